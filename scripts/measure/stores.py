"""Measure uploads and downloads of checkpoints: python scripts/measure/stores.py s3://BUCKET/PREFIX

Writes a checkpoint of --gb gigabytes in --files files of random bytes to --folder, uploads it as a
run does, downloads it again with its SHA-256 verified, and deletes the objects. Credentials and
endpoint are those of docs/reliability.md. --moto starts moto's server here, in a process of its
own, and makes the bucket. CPU seconds are those of this process, and of that server.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxpar.config.rules.paths import read_address
from jaxpar.stores import objects, steps

#: Bytes written at a time.
CHUNK = 64 << 20


def write(folder: Path, num_bytes: int, num_files: int) -> None:
    """Write a checkpoint of random bytes, as step 1."""
    place = folder / steps.STEPS / "1" / "state" / "d"
    place.mkdir(parents=True)
    for number in range(num_files):
        left = num_bytes // num_files
        with open(place / f"{number:04}", "wb") as file:
            while left > 0:
                left -= file.write(os.urandom(min(CHUNK, left)))


def timed(what: str, call: Callable[[], int], server: int | None) -> None:
    """Print how fast a transfer is, and the CPU seconds of both ends."""
    began, ours, theirs = time.perf_counter(), time.process_time(), cpu_seconds(server)
    num_bytes = call()
    seconds = time.perf_counter() - began
    size = num_bytes / 1e9
    cpu = f"CPU {time.process_time() - ours:.1f} s here"
    cpu += f", {cpu_seconds(server) - theirs:.1f} s in the server" if server else ""
    print(
        f"{what:<10} {size:.3f} GB in {seconds:.1f} s, {size / seconds:.3f} GB/s; {cpu}", flush=True
    )


def cpu_seconds(process: int | None) -> float:
    """Return the CPU seconds of a process so far."""
    if process is None:
        return 0.0
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


#: The program of the server: it prints its port, and ends with its input.
MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


def start_moto(bucket: str) -> int:
    """Start a server on a free port of this host, with an empty bucket. Returns:  its process."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([sys.executable, "-c", MOTO], text=True, **pipes)
    assert server.stdout is not None
    url = f"http://127.0.0.1:{int(server.stdout.readline())}"
    asked = urllib.request.Request(f"{url}/{bucket}", method="PUT")
    urllib.request.urlopen(asked).read()
    os.environ |= {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    return server.pid


def main(argv: Sequence[str] | None = None) -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, empty")
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--folder", help="a folder on a fast disk (a temporary one)")
    parser.add_argument("--moto", action="store_true", help="start moto's server for S3 here")
    parser.add_argument("--files-at-once", type=int, default=steps.FILES_AT_ONCE)
    parser.add_argument("--parts-at-once", type=int, default=objects.PARTS_AT_ONCE)
    parser.add_argument("--part-mib", type=int, default=objects.PART_BYTES >> 20)
    options = parser.parse_args(argv)
    address = read_address("address", options.address)
    steps.FILES_AT_ONCE, objects.PARTS_AT_ONCE = options.files_at_once, options.parts_at_once
    objects.PART_BYTES = options.part_mib << 20
    server = start_moto(address.bucket) if options.moto else None
    store = objects.Objects(address, "address")
    if store.names():
        raise SystemExit(f"{address} is not empty")
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        sent, received = Path(place, "sent"), Path(place, "received")
        write(sent, int(options.gb * 1e9), options.files)
        timed("upload", lambda: steps.upload_step(store, sent, 1, lambda: None), server)
        shutil.rmtree(sent)
        timed("download", lambda: steps.download_step(store, received, 1), server)
        steps.delete_step(store, 1)


if __name__ == "__main__":
    main()
