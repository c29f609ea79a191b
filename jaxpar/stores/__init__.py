"""Runs and data in object stores: uploads and downloads them, complete or not at all.

A run trains in a folder on its host, `run.dir`. A thread uploads what appears there. Data is read
by parts, through a cache on the host's disk.

    objects   reads and writes objects, with retries        lease    the lock of a run in a store
    steps     checkpoints, each complete or absent          files    the other files of a run
    mirror    the threads that upload a run's folder        shards   of hosts that share no folder
    fetching  downloads a run to continue it                reading  lets commands read a run
    folders   datasets and exported models                  cache    objects that are read by parts
"""

MAY_IMPORT = ("config", "runtime")
