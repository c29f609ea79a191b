"""Runs in object stores: uploads a run's folder, and downloads it, complete or not at all.

A run trains in a folder on its host, `run.dir`. A thread uploads what appears there.

    objects   reads and writes objects, with retries        lease     the lock of a run in a store
    steps     checkpoints, each complete or absent          parts     files that grow, as parts
    files     the other files of a run                      sessions  who wrote a run last
    mirror    the thread that uploads                       fetching  downloads a run
    reading   lets commands read a run
"""

MAY_IMPORT = ("config", "runtime")
