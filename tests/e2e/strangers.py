"""Damages the files that a stranger may give, at random, and lets the programs read them.

    python -m tests.e2e.strangers COUNT [KIND ...]

Each program runs in this process. It must return 0 or 2 (or 1, for a damaged checkpoint) or raise a
ConfigError: a traceback, 30 s, or 2 GB of memory are faults. Prints the faults as JSON.
"""

import contextlib
import copy
import faulthandler
import gzip
import io
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS, MEMORY = 30, 2 << 30

#: Values of the wrong type or size, for any place of a JSON text; tuples are raw text.
STRANGE: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64, 10**25, 0.5, 1e308),
    *("", "a", "\x1b[2J", "x" * 10_000, "../../etc/passwd", "\0", [], {}, [[]], [1, 2], {"a": 1}),
    *(("NaN",), ("Infinity",), ("-Infinity",), ("1e999",), ("9" * 5_000,), ('"\\ud800"',)),
    *(("[" * 100_000,), ("[" * 2_000 + "]" * 2_000,), ('{"a":' * 500 + "1" + "}" * 500,)),
)

#: Whole texts.
WHOLE = (b"", b"null", b"[]", b"{}", b"{", b"NaN", b"[" * 100_000, b"\xff\xfe", b"1", b'"a"')


def of_bytes(data: bytes, noise: random.Random) -> bytes:
    """Flip bits, cut, repeat, insert or zero bytes."""
    changed, at = bytearray(data), noise.randrange(len(data) or 1)
    size = noise.choice((1, 4, 64, 4096))
    match noise.randrange(6):
        case 0:
            for _ in range(noise.randint(1, 8)):
                if changed:
                    changed[noise.randrange(len(changed))] ^= 1 << noise.randrange(8)
        case 1:
            del changed[at:]
        case 2:
            changed[at:at] = changed[at : at + size]
        case 3:
            changed[at:at] = noise.randbytes(size)
        case 4:
            changed[at : at + size] = bytes(size)
        case 5:
            changed[at : at + 8] = b"\xff" * 8
    return bytes(changed)


def of_json(data: bytes, noise: random.Random) -> bytes:
    """Put a strange value at a random place, remove or repeat a key, or damage the bytes."""
    how = noise.randrange(10)
    if how == 0:
        return noise.choice(WHOLE)
    if how == 1:
        return of_bytes(data, noise)
    value = json.loads(data)
    for _ in range(noise.choice((1, 1, 3))):
        _change(value, noise)
    raw = [strange[0] for strange in STRANGE if isinstance(strange, tuple)]
    text = json.dumps(value)
    for number, strange in enumerate(raw):
        text = text.replace(f'"raw {number}"', strange)
    return text.encode()


def _change(value: Any, noise: random.Random) -> None:
    """Change a random item of an object or array, at a random depth."""
    raw = [strange for strange in STRANGE if isinstance(strange, tuple)]
    while isinstance(value, dict | list) and value:
        key = noise.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if isinstance(value[key], dict | list) and value[key] and noise.random() < 0.8:
            value = value[key]
            continue
        strange = noise.choice(STRANGE)
        if noise.random() < 0.15:
            del value[key]
        elif isinstance(strange, tuple):
            value[key] = f"raw {raw.index(strange)}"
        else:
            value[key] = copy.deepcopy(strange)
        return


def of_lines(data: bytes, noise: random.Random) -> bytes:
    """Damage one line of JSON Lines, or the bytes."""
    lines = data.splitlines(keepends=True)
    at = noise.randrange(len(lines))
    if noise.random() < 0.2:
        return of_bytes(data, noise)
    lines[at] = of_json(lines[at], noise) + b"\n"
    return b"".join(lines)


def of_safetensors(data: bytes, noise: random.Random) -> bytes:
    """Damage the header, the values, or the length of the header."""
    length = int.from_bytes(data[:8], "little")
    if noise.random() < 0.3:
        return of_bytes(data, noise)
    header = of_json(data[8 : 8 + length], noise)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def packed(mutate: Callable) -> Callable:
    """Damage the content of a .gz file, or the file."""

    def change(data: bytes, noise: random.Random) -> bytes:
        if noise.random() < 0.3:
            return of_bytes(data, noise)
        return gzip.compress(mutate(gzip.decompress(data), noise), 1)

    return change


@dataclass(frozen=True)
class Kind:
    """A kind of file: where it is in a folder of good files, and the program that reads it."""

    file: str
    mutate: Callable[[bytes, random.Random], bytes]
    read: Callable[[Path], Any]
    """Called with the folder."""
    allowed: tuple[int | None, ...] = (0, None, 2)


def prepare(kind: str, *more: str) -> Callable[[Path], Any]:
    """`data prepare` of a file."""
    from jaxpar.data.__main__ import main

    def read(folder: Path) -> Any:
        args = ["--input", str(folder / kind), "--output", str(folder / "out"), "--overwrite"]
        return main(["prepare", *args, "--workers", "1", "--holdout", "0", *more])

    return read


def kinds() -> dict[str, Kind]:
    """All kinds by name. Imports the programs."""
    from jaxpar import profile
    from jaxpar.checkpoint import __main__ as checkpoint
    from jaxpar.config.command_line import read_config
    from jaxpar.convert.hf import importing
    from jaxpar.convert.hf.tokenizer import tokenizer_in
    from jaxpar.convert.peft import importing as peft
    from jaxpar.data.__main__ import main as data
    from jaxpar.data.skips import read_skipped
    from jaxpar.monitoring.recent_steps import losses_judged, read_recent
    from jaxpar.report.__main__ import main as report
    from jaxpar.verification.replay import check_inputs

    def model(folder: Path) -> None:
        importing.open_source(folder / "model")

    def tokenizer(folder: Path) -> None:
        found = tokenizer_in(folder / "model", "model")
        found.decode(found.encode("a b é </s>"))

    def adapters(folder: Path) -> None:
        peft.lora_of(peft.read_adapter_config(folder / "adapters"))

    def replay(folder: Path) -> None:
        records = read_recent(folder / "run")
        losses_judged(records.values())
        for record in records.values():
            check_inputs(record, folder)

    inspect = lambda name: lambda folder: data(["inspect", str(folder / name)])  # noqa: E731
    reported = lambda folder: report([str(folder / "run")])  # noqa: E731
    profiled = lambda folder: profile.main([str(folder / "profile")])  # noqa: E731
    listed = lambda folder: checkpoint.main(["ls", str(folder / "imported")])  # noqa: E731
    verified = lambda folder: checkpoint.main(["verify", str(folder / "imported")])  # noqa: E731
    step = "imported/checkpoints/0"
    return {
        "safetensors": Kind("model/model.safetensors", of_safetensors, model),
        "index": Kind("sharded/model.safetensors.index.json", of_json, lambda folder: (
            importing.open_source(folder / "sharded"))),
        "config.json": Kind("model/config.json", of_json, model),
        "tokenizer.json": Kind("model/tokenizer.json", of_json, tokenizer),
        "tokenizer_config.json": Kind("model/tokenizer_config.json", of_json, tokenizer),
        "adapter_config.json": Kind("adapters/adapter_config.json", of_json, adapters),
        "meta.json": Kind("tokens/meta.json", of_json, inspect("tokens")),
        "documents.npy": Kind("tokens/train.documents.npy", of_bytes, inspect("tokens")),
        "train.bin": Kind("tokens/train.bin", of_bytes, inspect("tokens")),
        "megatron.idx": Kind("megatron.idx", of_bytes, inspect("megatron")),
        "run's config": Kind("run/config.json", of_json, reported),
        "run's config, resumed": Kind("run/config.json", of_json, lambda folder: (
            read_config([str(folder / "run")], "jaxpar.train", None) and 0)),
        "manifest.json": Kind("run/manifest.json", of_json, reported),
        "metrics.jsonl": Kind("run/metrics.jsonl", of_lines, reported),
        "events.jsonl": Kind("run/events.jsonl", of_lines, reported),
        "samples.jsonl": Kind("run/samples.jsonl", of_lines, reported),
        "recent.jsonl": Kind("run/recent.jsonl", of_lines, replay),
        "skipped_batches.json": Kind("run/skipped_batches.json", of_json, lambda folder: (
            str(read_skipped(folder / "run")) and 0)),
        "jsonl": Kind("texts.jsonl", of_lines, prepare("texts.jsonl")),
        "jsonl.gz": Kind("texts.jsonl.gz", packed(of_lines), prepare("texts.jsonl.gz")),
        "jsonl.zst": Kind("texts.jsonl.zst", of_bytes, prepare("texts.jsonl.zst")),
        "txt": Kind("texts.txt", of_bytes, prepare("texts.txt")),
        "parquet": Kind("texts.parquet", of_bytes, prepare("texts.parquet")),
        "arrow": Kind("texts.arrow", of_bytes, prepare("texts.arrow")),
        "state.json": Kind("saved/state.json", of_json, prepare("saved")),
        "chats": Kind("chats.jsonl", of_lines, lambda folder: data(
            ["prepare-chat", "--input", str(folder / "chats.jsonl"), "--overwrite",
             "--output", str(folder / "out"), "--tokenizer", "bytes", "--holdout", "0"])),
        "xplane.pb.gz": Kind("profile/x.xplane.pb.gz", packed(of_bytes), profiled),
        "hlo.txt.gz": Kind("profile/step.hlo.txt.gz", packed(of_bytes), profiled),
        "profile.json": Kind("profile/profile.json", of_json, profiled),
        "checkpoint's metadata": Kind(f"{step}/_CHECKPOINT_METADATA", of_json, listed, (0, 1, 2)),
        "checkpoint's files": Kind(f"{step}/jaxpar_files.json", of_json, verified, (0, 1, 2)),
        "checkpoint's tree": Kind(f"{step}/state/_METADATA", of_json, verified, (0, 1, 2)),
    }  # fmt: skip


def write_good(folder: Path) -> None:
    """Write the good files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from jaxpar.convert.hf import importing
    from jaxpar.convert.hf.tokenizer import bytes_as_json
    from jaxpar.data.__main__ import main as data
    from jaxpar.data.tokenizer import ByteTokenizer
    from jaxpar.monitoring.recent_steps import RecentSteps
    from jaxpar.profiling.folder import ProfileFacts, write_facts
    from tests.convert import tiny
    from tests.report.folders import write_run

    values = tiny.MODELS["llama3_2"]
    for name in ("model", "sharded"):
        tiny.write_folder(folder / name, values)
    stored = importing.open_source(folder / "model").tensors.stored
    where = {"metadata": {}, "weight_map": dict.fromkeys(stored, "model.safetensors")}
    (folder / "sharded" / "model.safetensors.index.json").write_text(json.dumps(where))
    importing.from_hf(folder / "model", folder / "imported", lambda _: None, None)
    bytes_as_json(ByteTokenizer()).save(str(folder / "model" / "tokenizer.json"))
    about = {"eos_token": {"content": "<|endoftext|>"}, "model_max_length": int(1e30)}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "adapters").mkdir()
    lora = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapters" / "adapter_config.json").write_text(json.dumps(lora))
    write_run(folder / "run", steps=40)
    recent = RecentSteps(folder / "run", 8)
    for i in range(1, 5):
        inputs: dict = {"batch": i - 1, "windows": [8 * i, 8 * i + 8], "mesh": "data=1"}
        recent.add(i, {"loss": 2.5, "grad_norm": 1.5}, **inputs)
    skipped = {"windows": [[3, 2], [9, 1]], "rewinds": 2}
    (folder / "run" / "skipped_batches.json").write_text(json.dumps(skipped))
    texts = [f"document {i}: some text, é\n" * 20 for i in range(40)]
    lines = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts))
    (folder / "texts.jsonl").write_text(lines)
    (folder / "texts.txt").write_text("".join(texts))
    with gzip.open(folder / "texts.jsonl.gz", "wb") as file:
        file.write(lines.encode())
    with pa.output_stream(str(folder / "texts.jsonl.zst"), compression="zstd") as stream:
        stream.write(lines.encode())
    table = pa.table({"id": range(len(texts)), "text": texts})
    pq.write_table(table, folder / "texts.parquet", row_group_size=9)
    (folder / "saved").mkdir()
    for path in (folder / "texts.arrow", folder / "saved" / "data-0.arrow"):
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    state = {"_data_files": [{"filename": "data-0.arrow"}], "_fingerprint": "0"}
    (folder / "saved" / "state.json").write_text(json.dumps(state))
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (folder / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 5)
    data(["prepare", "--input", str(folder / "texts.txt"), "--output", str(folder / "tokens"),
          "--tokenizer", "bytes", "--holdout", "0"])  # fmt: skip
    data(["convert", "--input", str(folder / "tokens"), "--output", str(folder / "megatron"),
          "--to", "megatron"])  # fmt: skip
    (folder / "profile").mkdir()
    recorded = Path(__file__).parents[1] / "profiling"
    shutil.copy(recorded / "fsdp4.xplane.pb.gz", folder / "profile" / "x.xplane.pb.gz")
    shutil.copy(recorded / "fsdp4.hlo.txt.gz", folder / "profile" / "step.hlo.txt.gz")
    sizes: dict = {"memory": {"temp": 5}, "versions": {"jax": "0"}, "attention_flops": 1e9}
    facts = ProfileFacts(1, 2, 1, 4, "NVIDIA H200", "data=4", 8192, 1e12, **sizes)
    write_facts(folder / "profile", facts)


def fault(kind: Kind, folder: Path) -> str:
    """Read a file. Returns the traceback, or the wrong code; "" if all is well."""
    from jaxpar.config import ConfigError
    from jaxpar.runtime.exit_codes import RunError

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
    found = kinds()
    faults: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with contextlib.redirect_stdout(io.StringIO()):
            write_good(folder)
            for kind in found.values():  # imports and compiles all that is needed
                why = fault(kind, folder)
                assert not why, f"{kind.file} is good: {why}"
        limit_memory()
        for title in names or found:
            kind, noise = found[title], random.Random(title)
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
