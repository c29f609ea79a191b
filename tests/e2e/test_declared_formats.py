"""What one process writes and another reads, damaged at random: no reader ends in a traceback."""

import dataclasses
import hashlib
import io
import json
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxpar.checkpoint.integrity import Damaged
from jaxpar.checkpoint.saved import changed_fields, saved_of
from jaxpar.config import Config, ConfigError, declared, replace
from jaxpar.config.json_reader import UnreadableJson
from jaxpar.config.serialize import from_values, to_json
from jaxpar.data.formats.meta import FORMAT, Meta, Part, SplitMeta, read_meta
from jaxpar.data.prepare import parts
from jaxpar.data.prepare.splits import Borders
from jaxpar.data.skips import SkippedBatches, read_skipped, write_skipped
from jaxpar.data.stream import index as stream_index
from jaxpar.features.distillation.cache import About, about_to_json, read_about
from jaxpar.memory_checkpoint import client, restoring
from jaxpar.memory_checkpoint.piece_file import (
    ArrayType,
    DamagedPieces,
    LocalBytes,
    StoredPieces,
    checksums,
    place_pieces,
    with_content,
    write_index,
)
from jaxpar.memory_checkpoint.places import MIRRORED, OWN, MemoryPlace
from jaxpar.monitoring import routing
from jaxpar.monitoring.certificate import (
    CERTIFICATE_FILE,
    Certificate,
    Result,
    conditions_of,
    to_values,
)
from jaxpar.monitoring.metric_names import TABLE_FILE, Described, MetricTable, read_table
from jaxpar.monitoring.profile_folder import ProfileFacts, read_facts, write_facts
from jaxpar.monitoring.recent_steps import read_recent, values_judged
from jaxpar.runtime.exit_codes import RunError
from jaxpar.runtime.files import lock
from jaxpar.runtime.processes import children, token
from jaxpar.runtime.processes.hosts.generations import End, Generation, Host, Over, Restarts, view
from jaxpar.stores import folders, lease, objects, shards, steps
from jaxpar.stores.objects import Altered
from jaxpar.tools.report import listing
from jaxpar.tools.report.listing import found_runs, lines
from jaxpar.tools.sweeps.running import SweepFolder
from jaxpar.training.certified import certified
from tests.e2e.damage import of_bytes, of_json, of_lines
from tests.slow import slow
from tests.tiny import EXPERTS, TINY
from tests.tools.report.folders import write_run

HOST = Host(name="a", life="x", address="127.0.0.1", port=1, devices=1, processes=2, ready=1)
FORMED = Generation(
    number=1,
    members=("a",),
    lives=("x",),
    counts=(2,),
    coordinator="127.0.0.1:1",
    resumed=False,
    why="start",
    restarts=Restarts(error="boom", step=3),
    pieces=("127.0.0.1:2",),
)
OVER = Over(kind="lost", text="lost b", hosts=("b",), silent=3.2, step=4)
SAVED = {
    "step": 10,
    "tokens_seen": 100,
    "config": json.loads(to_json(Config())),
    "dataset": "0123",
    "versions": {"jax": "1"},
    "fingerprints": {"a": "b"},
    "skipped_batches": [[1, 2]],
    "rewinds": 1,
    "best": {"what": "loss", "step": 5, "value": 2.5, "stale": 0},
    "asked": {"train.seed": 1},
}
TABLE = MetricTable({"loss": Described("training", "nats per token", "cross entropy")})
ABOUT = About("t", "runs/t", ("s",), (100,), 16, True, 256, 4, 1.0, 10)
CERTIFICATE = Certificate.of(
    "quickstart",
    Config(),
    conditions_of(Config()),
    [Result("meshes", "data=2", "loss", 1e-7, 1e-5, where="step 1")],
)
FACTS = ProfileFacts(10, 3, 1, 1, "cpu", "1", 100, 1e9, None, {"temp": 5}, {"jax": "1"})
PART_META = Part(
    name="train",
    num_tokens=9,
    num_documents=2,
    num_bytes=7,
    sha256="0" * 64,
    documents_sha256="0" * 64,
    tokens_hash="0" * 16,
    documents_hash="0" * 16,
)
META = Meta(
    format=FORMAT,
    dtype="uint16",
    vocab_size=257,
    eos_id=256,
    eos_token="e",
    tokenizer="bytes",
    tokenizer_fingerprint="0" * 64,
    unigram_entropy=1.0,
    inputs=("a.jsonl",),
    holdout=0.5,
    splits={name: SplitMeta(parts=(PART_META,)) for name in ("train", "val")},
)
PLAN = parts.PartsPlan(about={"parts": 2, "input": "0"}, borders=Borders(1, 2), trained="")
PART = parts.PartJson(
    splits={name: PART_META for name in ("train", "val")},
    num_good=1,
    num_bad=0,
    num_blank=0,
    first_bad="",
    left_out=(),
)
WORDS = {"time": 5.0, "step": 3, "error": "boom", "code": 1}
HOLDER = {"session": "s", "host": "h", "pid": 1, "space": "x", "time": "2026-01-01T00:00:00+00:00"}
FILES = {"format": objects.FORMAT, "files": {"a": {"bytes": 1, "sha256": "0" * 64}}}
SENT = {"format": shards.FORMAT, "arrays": FILES["files"], "small": {"m": "AAAA"}}


@dataclass(frozen=True)
class Format:
    """A format: a good text, and its reader, which is called with the text and an empty folder.

    A reader passes over what it cannot read, with one line, or raises one of the errors that
    programs report in one line.
    """

    good: bytes
    read: Callable[[bytes, Path], Any]
    mutate: Callable[[bytes, random.Random], bytes] = of_json


def entry(key: str) -> Callable[[bytes, Path], None]:
    """Reads an entry of the rendezvous."""

    def read(text: bytes, _: Path) -> None:
        seen = view({"host/b": "{}", key: text.decode(errors="replace")}, {"a"})
        assert set(seen.unread) <= {"host/b", key}
        seen.there()
        if seen.latest is not None:
            assert seen.latest.first_rank(seen.latest.members[0]) == 0
            seen.left_by(seen.latest)

    return read


def message(kind: type) -> Callable[[bytes, Path], None]:
    """Reads a message of a piece server or its client."""
    return lambda text, _: declared.read(kind, text, max_bytes=client.MAX_REQUEST)


def piece_file(folder: Path) -> Path:
    """A whole file of pieces of one copy."""
    for kind in (OWN, MIRRORED):
        (folder / kind).mkdir(parents=True)
    file = folder / OWN / "step_0000000010.0123abcd.0.0.single"
    box = (slice(0, 3), slice(0, 4))
    index = place_pieces([ArrayType("params/a", "float32", (3, 4))], [(0, box)], lambda _: 4)
    content = np.arange(16, dtype=np.float32).tobytes()[: index.num_bytes].ljust(index.num_bytes)
    with open(file, "w+b") as opened:
        opened.write(content)
        opened.flush()
        write_index(opened.fileno(), with_content(index, checksums(memoryview(content)), SAVED))
    return file


def index_of_pieces(folder: Path) -> bytes:
    content = piece_file(folder).read_bytes()
    length = struct.unpack("<8sQI", content[-20:])[1]
    return content[-20 - length : -20]


def pieces(text: bytes, folder: Path) -> None:
    """Finds the copies of a state, one of whose files has this index."""
    file = piece_file(folder)
    content = file.read_bytes()
    length = struct.unpack("<8sQI", content[-20:])[1]
    tail = struct.pack("<8sQI", b"jaxparm1", len(text), zlib.crc32(text))
    file.write_bytes(content[: -20 - length] + text + tail)
    write_skipped(folder / "run", SkippedBatches(((1, 2),), 1))  # as in SAVED
    sizes = {"run.dir": str(folder / "run"), "checkpoint.memory.every": 5}
    for one in restoring._look(replace(Config(), **sizes), MemoryPlace(folder, (), 0)):
        for name in one.files:
            opened = StoredPieces(LocalBytes(folder / OWN / name))
            for piece in opened.index.pieces:
                opened.read(piece, 4)


def metadata(text: bytes, _: Path) -> None:
    """Reads the metadata of a checkpoint."""
    saved = saved_of(json.loads(text), "it")
    changed_fields(Config(), saved)
    from_values(saved.config)


def of_a_run(name: str) -> Callable[[bytes, Path], None]:
    """Lists the runs of a folder, one of which has this file."""

    def read(text: bytes, folder: Path) -> None:
        for run in ("a", "b"):
            write_run(folder / run, steps=20)
        (folder / "a" / name).write_bytes(text)
        found = found_runs([str(folder)])
        lines(listing.summaries(found))
        assert str(folder / "b") in {run.name for run in found}

    return read


def good_of_a_run(name: str, folder: Path) -> bytes:
    write_run(folder, steps=20)
    return (folder / name).read_bytes()


def in_folder(name: str, read: Callable[[Path], Any]) -> Callable[[bytes, Path], Any]:
    """Reads a file of this name in a folder."""

    def written(text: bytes, folder: Path) -> Any:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
        return read(folder)

    return written


def in_store(read: Callable[[Any], Any]) -> Callable[[bytes, Path], Any]:
    """Reads an object of a store."""
    return lambda text, _: read(SimpleNamespace(read=lambda name: (text, None)))


def sent(text: bytes, _: Path) -> None:
    """Reads a list of shards, whose digest is right."""
    about = text.decode(errors="replace")
    sealed = {"about": about, "sha256": hashlib.sha256(about.encode()).hexdigest()}
    store: Any = SimpleNamespace(read=lambda name: (json.dumps(sealed).encode(), None))
    shards._read(store, "x")


def holder_of_lease(text: bytes, _: Path) -> None:
    about = lease._parsed(text)
    lease._has_ended(about)
    lease._holder(about)


def holder_of_lock(folder: Path) -> None:
    with open(folder / "lock", "rb") as file:
        lock._holder(file.fileno())


def sweep(folder: Path) -> None:
    opened = SweepFolder(folder)
    opened.open(Config(), ["train.seed"])


def good_sweep(folder: Path) -> bytes:
    sweep(folder)
    return (folder / "sweep.json").read_bytes()


def written(write: Callable[[], Any], file: Path) -> bytes:
    file.parent.mkdir(parents=True, exist_ok=True)
    write()
    return file.read_bytes()


def stream_json(folder: Path) -> bytes:
    files = (stream_index.StreamFile("x.jsonl", 5, "0"),)
    frames = np.zeros((1, 5), np.int64)
    stream_index.write_index(
        stream_index.StreamIndex(folder, "text", files, frames, {"train": "0"})
    )
    return (folder / stream_index.STREAM_FILE).read_bytes()


def stream(folder: Path) -> None:
    np.save(folder / stream_index.FRAMES_FILE, np.zeros((1, 5), np.int64))
    for file in stream_index.read_index(folder).files:
        assert not Path(file.path).is_file()


def recent_losses(folder: Path) -> None:
    values_judged(read_recent(folder).values())


def experts() -> bytes:
    file = io.BytesIO()
    experts = np.zeros((2, 4, 2, 1), np.uint8)
    np.savez_compressed(file, experts=experts, step=np.int64(1), num_experts=np.int64(4))
    return file.getvalue()


def recorded(folder: Path) -> None:
    sizes = {"train.global_batch_size": 2, "data.seq_len": 4}
    sizes |= {"model.layers.feed_forward": dataclasses.replace(EXPERTS, experts_per_token=1)}
    routing.read_routing("--routing", str(folder / "x.npz"), replace(TINY, **sizes))


def said() -> dict[str, Format]:
    """What hosts say to one another."""
    nonce, signature = "0" * 32, "0" * 64
    greeting, proof = (
        client.Greeting(nonce=nonce),
        client.Proof(nonce=nonce, signature=signature),
    )
    request = client.PieceRequest(do="read", name="x", begin=1, size=2)
    limits = client.Limits(session="0123abcd", last_step=5, file_bytes=5, all_bytes=9)
    of_message = lambda one: Format(client.line(one), message(type(one)))  # noqa: E731
    return {
        "host": Format(HOST.as_text().encode(), entry("host/a")),
        "generation": Format(FORMED.as_text().encode(), entry("generation/1")),
        "over": Format(OVER.as_text().encode(), entry("over/1")),
        "end": Format(End(code=0, text="").as_text().encode(), entry("end/1")),
        "greeting": of_message(greeting),
        "proof": of_message(proof),
        "request": of_message(request),
        "answer": of_message(client.Answer(files={"a": 1})),
        "limits": of_message(limits),
    }


def formats(folder: Path) -> dict[str, Format]:
    """All formats, with good texts."""
    listed = lambda read: Format(json.dumps(FILES).encode(), in_store(read))  # noqa: E731
    of_run = lambda name, mutate=of_json: Format(  # noqa: E731
        good_of_a_run(name, folder / name), of_a_run(name), mutate
    )
    skips = lambda: write_skipped(folder, SkippedBatches(((5, 2),), 1))  # noqa: E731
    facts = written(lambda: write_facts(folder, FACTS), folder / "profile.json")
    recent = {"step": 1, "loss": 1.0, "grad_norm": 2.0, "bits": {"loss": "0", "grad_norm": "0"}}
    line = (json.dumps(recent) + "\n").encode() * 3
    return {
        **said(),
        "index of pieces": Format(index_of_pieces(folder / "pieces"), pieces),
        "metadata of a checkpoint": Format(json.dumps(SAVED).encode(), metadata, of_valid),
        "sweep.json": Format(good_sweep(folder / "sweep"), in_folder("sweep.json", sweep)),
        "config.json": of_run("config.json"),
        "metric_names.json": Format(
            declared.to_json(TABLE).encode(), in_folder(TABLE_FILE, read_table)
        ),
        "manifest.json": of_run("manifest.json"),
        "metrics.jsonl": of_run("metrics.jsonl", of_lines),
        "events.jsonl": of_run("events.jsonl", of_lines),
        "about.json": Format(about_to_json(ABOUT).encode(), in_folder("about.json", read_about)),
        "stream.json": Format(stream_json(folder), in_folder("stream.json", stream)),
        "meta.json": Format(declared.to_json(META).encode(), in_folder("meta.json", read_meta)),
        "plan.json": Format(declared.to_json(PLAN).encode(), in_folder("plan.json", parts.plan_of)),
        "part.json": Format(
            declared.to_json(PART).encode(),
            in_folder("part.json", lambda folder: parts.read_part(folder, ("train", "val"))),
        ),
        "certificate.json": Format(
            json.dumps(to_values(CERTIFICATE)).encode(),
            in_folder(CERTIFICATE_FILE, lambda f: certified(Config(), f, "")),
        ),
        "profile.json": Format(facts, in_folder("profile.json", read_facts)),
        "skipped_batches.json": Format(
            written(skips, folder / "skipped_batches.json"),
            in_folder("skipped_batches.json", read_skipped),
        ),
        "recent.jsonl": Format(
            line,
            in_folder("recent.jsonl", recent_losses),
            of_lines,
        ),
        "last words": Format(
            json.dumps(WORDS).encode(),
            in_folder(
                "ranks/0.json",
                lambda f: children.failure_of({0: 1}, children.last_words(f, 0.0)),
            ),
        ),
        "lock": Format(json.dumps(HOLDER).encode(), in_folder("lock", holder_of_lock)),
        "lease": Format(json.dumps(HOLDER).encode(), holder_of_lease),
        "complete": listed(lambda store: steps.listed(store, 1)),
        "stored_files.json": listed(folders.listed_files),
        "shards": Format(json.dumps(SENT).encode(), sent),
        "routing": Format(experts(), in_folder("x.npz", recorded), of_bytes),
        "token": Format(
            b"0" * 64, in_folder(".token", lambda f: token.given_token(env_of(f))), of_bytes
        ),
    }


def env_of(folder: Path) -> dict[str, str]:
    return {token.TOKEN_FILE: str(folder / ".token")}


def of_valid(data: bytes, noise: random.Random) -> bytes:
    """Change values, but leave it JSON that Python reads."""
    while True:
        text = of_json(data, noise)
        try:
            if isinstance(json.loads(text), dict):
                return text
        except (ValueError, RecursionError):
            continue


#: What programs report in one line.
REPORTED = (ConfigError, RunError, UnreadableJson, Damaged, DamagedPieces, Altered)


@pytest.mark.parametrize("count", [30, slow(400)])
def test_what_another_process_has_written_is_read_or_passed_over(
    tmp_path_factory, monkeypatch, capfd, count
):
    monkeypatch.setattr("jaxpar.runtime.files.json_lines._reported", set())
    ended = []
    good = tmp_path_factory.mktemp("good")
    for name, one in formats(good).items():
        one.read(one.good, tmp_path_factory.mktemp("good"))
        said = capfd.readouterr()
        assert not said.err, (name, said.err)
        noise = random.Random(name)
        for number in range(count):
            text = one.mutate(one.good, noise)
            where = tmp_path_factory.mktemp("folder")
            try:
                one.read(text, where)
            except REPORTED as error:
                ended.append(name)
                assert len(str(error).splitlines()) <= 4 and len(str(error)) < 2000, (name, number)
            except Exception as error:
                raise AssertionError(f"{name} {number}: {text[:2000]!r}") from error
            said = capfd.readouterr()
            assert len(said.err.splitlines()) <= 1, (name, number, said.err)
    assert len(set(ended)) > 10  # the damage is noticed


def test_the_formats_are_those_that_are_written():
    """Their fields are read back as they were, and each has a version."""
    for one in (HOST, FORMED, OVER, End(code=3, text="x"), FACTS, ABOUT, TABLE, CERTIFICATE):
        text = declared.to_json(one).encode()
        assert declared.read(type(one), text) == one
        fields = json.loads(text)
        assert fields.pop("version") == 1 and set(fields) == set(asdict(one))
        later = json.dumps({**fields, "version": 2}).encode()
        with pytest.raises(
            UnreadableJson, match="it has format version 2, and this jaxpar reads 1"
        ):
            declared.read(type(one), later)
        assert declared.read(type(one), json.dumps({**fields, "more": [{}]}).encode()) == one
