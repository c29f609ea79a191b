"""Damages the files that a stranger may give, at random, and lets the programs read them.

    python -m tests.e2e.strangers COUNT [KIND ...]

Each program runs in this process. It must return 0 or 2 (or 1, for a damaged checkpoint) or raise a
ConfigError: a traceback, 30 s, or 2 GB of memory are faults. Prints the faults as JSON.
"""

import contextlib
import faulthandler
import io
import json
import random
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.certification.replay import check_inputs
from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.config.command_line import read_config
from jaxpar.convert.hf import importing
from jaxpar.convert.hf.tokenizer import tokenizer_in
from jaxpar.convert.peft import importing as peft
from jaxpar.data.skips import read_skipped
from jaxpar.monitoring.recent_steps import read_recent, values_judged
from jaxpar.runtime.exit_codes import RunError
from tests.data.commands import main as data
from tests.e2e import good_files
from tests.e2e.damage import of_bytes, of_json, of_lines, of_safetensors, packed
from tests.tiny import TINY

#: Limits of each file.
SECONDS, MEMORY = 30, 2 << 30


@dataclass(frozen=True)
class Kind:
    """A kind of file: where it is in a folder of good files, and the program that reads it."""

    file: str
    mutate: Callable[[bytes, random.Random], bytes]
    read: Callable[[Path], Any]
    """Called with the folder."""
    allowed: tuple[int | None, ...] = (0, None, 2)


# ------------------------------------------------------------------------------ what reads them


def model(name: str) -> Callable[[Path], None]:
    """Opens a published model."""

    def read(folder: Path) -> None:
        importing.open_source(folder / name)

    return read


def tokenizer(folder: Path) -> None:
    """Loads a published tokenizer."""
    found = tokenizer_in(folder / "model", "model")
    found.decode(found.encode("a b é </s>"))


def adapters(folder: Path) -> None:
    """Reads the config of PEFT adapters."""
    peft.lora_of(peft.read_adapter_config(folder / "adapters"), TINY.model)


def resumed(folder: Path) -> None:
    """Reads the config of a run, as `train RUN` does."""
    read_config([str(folder / "run")])


def records(folder: Path) -> None:
    """Reads what `checkpoint replay` reads."""
    found = read_recent(folder / "run")
    values_judged(found.values())
    for record in found.values():
        check_inputs(record, folder)


def skipped(folder: Path) -> None:
    """Reads the batches that a run skips."""
    str(read_skipped(folder / "run"))


def prepared(name: str, command: str = "prepare") -> Callable[[Path], int]:
    """Tokenizes a file."""

    def read(folder: Path) -> int:
        args = [command, "--input", str(folder / name), "--output", str(folder / "out")]
        return data([*args, "--overwrite", "--tokenizer", "bytes", "--holdout", "0"])

    return read


def inspected(name: str, *more: str) -> Callable[[Path], int]:
    """Describes tokens."""
    return lambda folder: data(["inspect", str(folder / name), *more])


def compared(folder: Path) -> int | None:
    """Compares the card of a benchmark with a good one."""
    return call("profile", [str(folder / "card.json"), str(good_files.CARD)])


def reported(folder: Path) -> None:
    """Writes the report of a run."""
    call("report", [str(folder / "run")])


def profiled(folder: Path) -> None:
    """Shows a profile."""
    call("profile", [str(folder / "profile")])


def checkpoints(command: str) -> Callable[[Path], int | None]:
    """Lists or verifies checkpoints."""
    return lambda folder: call("checkpoint", [command, str(folder / "imported")])


STEP, DAMAGED = "imported/checkpoints/0", (0, 1, 2)

KINDS = {
    "safetensors": Kind("model/model.safetensors", of_safetensors, model("model")),
    "index": Kind("sharded/model.safetensors.index.json", of_json, model("sharded")),
    "config.json": Kind("model/config.json", of_json, model("model")),
    "tokenizer.json": Kind("model/tokenizer.json", of_json, tokenizer),
    "tokenizer_config.json": Kind("model/tokenizer_config.json", of_json, tokenizer),
    "adapter_config.json": Kind("adapters/adapter_config.json", of_json, adapters),
    "meta.json": Kind("tokens/meta.json", of_json, inspected("tokens")),
    "documents.npy": Kind("tokens/train.documents.npy", of_bytes, inspected("tokens")),
    "train.bin": Kind("tokens/train.bin", of_bytes, inspected("tokens")),
    "megatron.idx": Kind("megatron.idx", of_bytes, inspected("megatron")),
    "llmc.bin": Kind("llmc.bin", of_bytes, inspected("llmc.bin", "--eos-id", "0")),
    "card": Kind("card.json", of_json, compared),
    "config of a report": Kind("run/config.json", of_json, reported),
    "config of a resume": Kind("run/config.json", of_json, resumed),
    "manifest of a report": Kind("run/manifest.json", of_json, reported),
    "manifest of a resume": Kind("run/manifest.json", of_json, resumed),
    "metrics.jsonl": Kind("run/metrics.jsonl", of_lines, reported),
    "events.jsonl": Kind("run/events.jsonl", of_lines, reported),
    "samples.jsonl": Kind("run/samples.jsonl", of_lines, reported),
    "expert_loads.jsonl": Kind("run/expert_loads.jsonl", of_lines, reported),
    "recent.jsonl": Kind("run/recent.jsonl", of_lines, records),
    "skipped_batches.json": Kind("run/skipped_batches.json", of_json, skipped),
    "jsonl": Kind("texts.jsonl", of_lines, prepared("texts.jsonl")),
    "jsonl.gz": Kind("texts.jsonl.gz", packed(of_lines), prepared("texts.jsonl.gz")),
    "jsonl.zst": Kind("texts.jsonl.zst", of_bytes, prepared("texts.jsonl.zst")),
    "txt": Kind("texts.txt", of_bytes, prepared("texts.txt")),
    "parquet": Kind("texts.parquet", of_bytes, prepared("texts.parquet")),
    "arrow": Kind("texts.arrow", of_bytes, prepared("texts.arrow")),
    "state.json": Kind("saved/state.json", of_json, prepared("saved")),
    "chats": Kind("chats.jsonl", of_lines, prepared("chats.jsonl", "prepare-chat")),
    "xplane.pb.gz": Kind("profile/x.xplane.pb.gz", packed(of_bytes), profiled),
    "hlo.txt.gz": Kind("profile/step.hlo.txt.gz", packed(of_bytes), profiled),
    "profile.json": Kind("profile/profile.json", of_json, profiled),
    "metadata": Kind(f"{STEP}/_CHECKPOINT_METADATA", of_json, checkpoints("ls"), DAMAGED),
    "list of files": Kind(f"{STEP}/jaxpar_files.json", of_json, checkpoints("verify"), DAMAGED),
    "arrays": Kind(f"{STEP}/state/_METADATA", of_json, checkpoints("verify"), DAMAGED),
}


# ------------------------------------------------------------------------------ how it is judged


def fault(kind: Kind, folder: Path) -> str:
    """Read a file. Returns the traceback, or the wrong code; "" if all is well."""
    out = io.StringIO()
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = kind.read(folder)
        code = code if isinstance(code, int) else None
    except (ConfigError, RunError) as error:
        code = 2
        if len(str(error)) > 9_000:
            return f"a message of {len(str(error)):,} characters: {str(error)[:200]}"
    except BaseException:
        return traceback.format_exc()[-3_000:]
    finally:
        faulthandler.cancel_dump_traceback_later()
    if code not in kind.allowed:
        return f"code {code}: {out.getvalue()[-500:]}"
    return ""


def limit_memory() -> None:
    """Let this process take MEMORY more than now. Its threads have been started."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(argv: list[str]) -> None:
    """Damage COUNT files of each kind, and print the faults."""
    count, names = int(argv[0]), argv[1:]
    faults: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with contextlib.redirect_stdout(io.StringIO()):
            good_files.write(folder)
            for kind in KINDS.values():  # imports and compiles all that is needed
                why = fault(kind, folder)
                assert not why, f"{kind.file} is good: {why}"
        limit_memory()
        for title in names or KINDS:
            kind, noise = KINDS[title], random.Random(title)
            file = folder / kind.file
            good, began = file.read_bytes(), time.monotonic()
            for number in range(count):
                file.write_bytes(kind.mutate(good, noise))
                if why := fault(kind, folder):
                    faults.setdefault(title, []).append(f"{number}: {why}")
            file.write_bytes(good)
            print(f"{title}: {count} in {time.monotonic() - began:.1f} s", file=sys.stderr)
    print(json.dumps(faults))


if __name__ == "__main__":
    main(sys.argv[1:])
