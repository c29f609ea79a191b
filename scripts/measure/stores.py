"""Measure uploads and downloads of checkpoints: python scripts/measure/stores.py s3://BUCKET/PREFIX

Writes a checkpoint of --gb gigabytes in --files files of random bytes to --folder, uploads it as a
run does, downloads it again with its SHA-256 verified, and deletes the objects. Credentials and
endpoint are those of docs/object_stores.md. --moto starts moto's server here, and makes the bucket.
"""

import argparse
import os
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxpar.config.rules.paths import read_address
from jaxpar.stores import steps
from jaxpar.stores.objects import Objects

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


def timed(what: str, call: Callable[[], int]) -> None:
    """Print how fast a transfer is."""
    began = time.perf_counter()
    num_bytes = call()
    seconds = time.perf_counter() - began
    size = num_bytes / 1e9
    print(f"{what:<10} {size:.3f} GB in {seconds:.1f} s, {size / seconds:.3f} GB/s", flush=True)


def start_moto(bucket: str) -> None:
    """Start a server on a free port of this host, with an empty bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    asked = urllib.request.Request(f"{url}/{bucket}", method="PUT")
    urllib.request.urlopen(asked).read()
    os.environ |= {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, empty")
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--folder", help="a folder on a fast disk (a temporary one)")
    parser.add_argument("--moto", action="store_true", help="start moto's server for S3 here")
    options = parser.parse_args(argv)
    address = read_address("address", options.address)
    if options.moto:
        start_moto(address.bucket)
    objects = Objects(address, "address")
    if objects.names():
        raise SystemExit(f"{address} is not empty")
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        sent, received = Path(place, "sent"), Path(place, "received")
        write(sent, int(options.gb * 1e9), options.files)
        timed("upload", lambda: steps.upload_step(objects, sent, 1, lambda: None))
        shutil.rmtree(sent)
        timed("download", lambda: steps.download_step(objects, received, 1))
        steps.delete_step(objects, 1)


if __name__ == "__main__":
    main()
