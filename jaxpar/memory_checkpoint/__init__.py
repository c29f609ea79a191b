"""Copies of the training state in the memory of hosts, from which a run resumes without the disk.

Every `checkpoint.memory.every` steps, each process writes its shards of the state to files in its
host's memory, /dev/shm, and sends them to other hosts. The files outlive the process. After a
failure the processes start again, agree on the newest step of which every piece is left, and load
it onto their mesh, which may be another one.

    places.kept_in_memory, server.PieceServer    for a launcher: the folder of the files, and the
                                                 server from which other hosts read them
    writing.MemoryCheckpointer                   for the training loop: makes copies
    restoring.find, restoring.restore            for a start: the newest copy, and its arrays
"""

MAY_IMPORT = ("config", "runtime", "sharding", "step", "data", "checkpoint")
