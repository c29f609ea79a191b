"""Measure a lease that many want: python scripts/measure/leases.py --contenders 8 64 512

Threads, each with a client of its own, want the lease of one address at once. moto's server
for S3 is a process of its own. The lease is absent or released. Prints the seconds until
one has it and until the last one is refused, and ends with 1 unless exactly one has had it.
"""

import argparse
import json
import sys
import threading
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from stores import start_moto

from jaxpar.config.rules.paths import Address
from jaxpar.runtime.files.lock import RunLocked
from jaxpar.stores.lease import NAME, Lease
from jaxpar.stores.objects import Objects

BUCKET = "leases"

#: What each contender finds: None, or what differs from the lease of a run that trains.
STATES: dict[str, dict[str, Any] | None] = {
    "absent": None,
    "released": {"released": True},
}


def contend(contenders: int, state: str, wait: bool) -> dict[str, Any]:
    """Return who had the lease, and after how many seconds."""
    address = Address("s3", BUCKET, f"runs/{uuid.uuid4().hex[:8]}")
    if (changes := STATES[state]) is not None:
        about = {"session": "other", "host": "elsewhere", "pid": 1, "space": "elsewhere"}
        about |= {"time": datetime.now(UTC).isoformat(timespec="seconds")} | changes
        Objects(address, "address").write(NAME, json.dumps(about).encode())
    ready, held, refused, failed = threading.Barrier(contenders + 1), [], [], []

    def want() -> None:
        objects = Objects(address, "address")
        ready.wait()
        try:
            lease = Lease(objects, lambda text: None, wait)
            held.append((time.perf_counter() - began, lease))
        except RunLocked:
            refused.append(time.perf_counter() - began)
        except Exception as error:
            failed.append(str(error))

    threads = [threading.Thread(target=want) for _ in range(contenders)]
    for thread in threads:
        thread.start()
    began, used = time.perf_counter(), time.process_time()
    ready.wait()
    for thread in threads:
        thread.join()
    found = {"held": len(held), "refused": len(refused), "failed": len(failed)}
    found["one has it after"] = round(min(after for after, _ in held), 3)
    found["all know after"] = round(max([after for after, _ in held] + refused), 3)
    found["CPU"] = round(time.process_time() - used, 2)
    named = json.loads(Objects(address, "address").read(NAME)[0])["session"]
    found["the store names it"] = [lease.session for _, lease in held] == [named]
    for _, lease in held:
        lease.release()
    return found | ({"error": failed[0][:200]} if failed else {})


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contenders", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--wait", action="store_true", help="see that its holder lives, as runs do")
    options = parser.parse_args()
    start_moto(BUCKET)
    threading.stack_size(1 << 20)
    wrong = False
    for contenders in options.contenders:
        for state in STATES:
            found = contend(contenders, state, options.wait)
            wrong |= found["held"] != 1 or not found["the store names it"]
            print(f"{contenders} contenders, {state}: {json.dumps(found)}", flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
