"""Runs and data in object stores: uploads and downloads them, complete or not at all.

A run trains in a folder on its host, `run.dir`. A thread uploads what appears there. Data is read
by parts, through a cache on the host's disk.

    objects   reads and writes objects, with retries
    lease     the lock of a run in a store
    steps     checkpoints, each complete or absent          parts     files that grow, as parts
    files     the other files of a run                      sessions  who wrote a run last
    mirror    uploads a run's folder, on a thread           uploading such threads
    shards    the shards of hosts that share no folder      shard_mirror  uploads them
    finishing uploads shards of an earlier attempt          bringing  a checkpoint to all hosts
    fetching  downloads a run                               reading   lets commands read a run
    folders   datasets and exported models                  models    runs and models to start from
    cached    an object that is read by parts               cache     the parts on this host's disk
"""

MAY_IMPORT = ("config", "runtime")
