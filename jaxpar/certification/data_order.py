"""The check of what a run reads: batches over meshes, steps, epochs and a resume.

Batches are of a small text made here, of which each sequence is known by its tokens. What a batch
must be follows from the text alone: no function of `data` is on the other side.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxpar.certification.results import Result, Subject
from jaxpar.certification.updates import ONE, mesh_of, on
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.schema.features import objectives
from jaxpar.config.schema.items import BatchSize, MixtureWeights, SequenceLength, Source
from jaxpar.data.formats.meta import PAIRS
from jaxpar.data.loader import Loader, rows_of_process
from jaxpar.data.mixture import BLOCK
from jaxpar.data.packing import pack
from jaxpar.data.pairs import pack_rows, plan_rows
from jaxpar.data.skips import SkippedBatches
from jaxpar.objectives.objective import objective_of
from jaxpar.parallel.context import order_of
from jaxpar.sharding.axes import BATCH_SPEC
from jaxpar.sharding.batch import IGNORED, REFERENCE, Batch

#: Batches in an epoch of the text, which ends within a batch.
BATCHES = 2.4

#: Mean length of a document, in tokens, and the token that ends it.
DOCUMENT, END = 12, 0

#: Steps whose batches are compared on every mesh: of two epochs.
STEPS = (0, 1, 2, 3)

#: Weights of two sources of one length, and sequences of theirs that are read: shares are exact in
#: a block of BLOCK sequences.
WEIGHTS, MIXED = (0.75, 0.25), 2048

#: The fields of a batch.
FIELDS = ("tokens", "labels", "segment_ids", "positions")


@dataclasses.dataclass(frozen=True)
class Text:
    """Tokens of documents, each with END.

    Args:
        tokens: int [N]. length: T, tokens of a sequence. documents: whether batches see them.
    """

    tokens: np.ndarray
    length: int
    documents: bool

    @property
    def num_sequences(self) -> int:
        """Sequences of an epoch; the last label needs one more token."""
        return (len(self.tokens) - 1) // self.length

    def sequence(self, number: int) -> dict[str, np.ndarray]:
        """Return what a batch has of a sequence, token by token."""
        T, begin = self.length, number * self.length
        row: dict[str, list[int]] = {name: [] for name in FIELDS}
        segment, position = 1, 0
        for at in range(begin, begin + T):
            if self.documents and at > begin and self.tokens[at - 1] == END:
                segment, position = segment + 1, 0
            ends = self.documents and self.tokens[at] == END
            label = IGNORED if ends else self.tokens[at + 1]
            of_token = self.tokens[at], label, segment, position
            for name, value in zip(FIELDS, of_token, strict=True):
                row[name].append(int(value))
            position += 1
        return {name: np.array(values, np.int32) for name, values in row.items()}

    @functools.cached_property
    def number_of(self) -> dict[bytes, int]:
        """Return the number of each sequence by its tokens, of which no two have the same."""
        return {self.sequence(i)["tokens"].tobytes(): i for i in range(self.num_sequences)}

    def errors(self, batch: Batch) -> tuple[list[str], list[int]]:
        """Return the fields of a batch on the host that are not those of its sequences, and their
        numbers; -1 for what is no sequence."""
        known, wrong, numbers = self.number_of, set[str](), list[int]()
        for row in range(len(batch.tokens)):
            found = {name: np.asarray(getattr(batch, name))[row] for name in FIELDS}
            numbers.append(known.get(found["tokens"].tobytes(), -1))
            right = self.sequence(max(numbers[-1], 0))
            wrong |= {name for name in FIELDS if not np.array_equal(found[name], right[name])}
        return sorted(wrong), numbers


def random_text(cfg: Config, num_sequences: int, seed: int) -> Text:
    """Make a text whose sequences have different tokens."""
    rng, T = np.random.default_rng(seed), cfg.data.seq_len
    for _ in range(100):
        tokens = rng.integers(1, cfg.model.vocab_size, num_sequences * T + 1)
        tokens[rng.random(len(tokens)) < 1 / DOCUMENT] = END
        text = Text(tokens, T, cfg.data.document_mask)
        if len(text.number_of) == num_sequences:
            return text
    raise AssertionError(f"no text of {num_sequences} different sequences of {T} tokens")


def data_order(subject: Subject) -> Iterator[Result]:
    """Compare batches with the text, on every mesh, in two epochs, after a resume, of a mixture."""
    own = subject.small.data.source
    if own is not None:
        why = "data.source is your own: its batches are what it returns"
        yield Result("data order", "", type(own).__name__, not_run=why)
    with tempfile.TemporaryDirectory() as folder:
        yield from _of_text(subject, Path(folder))


def _of_text(subject: Subject, folder: Path) -> Iterator[Result]:
    rows = subject.small.train.global_batch_size
    count = max(int(BATCHES * rows), 20)
    texts = [random_text(subject.small, count, seed) for seed in (1, 2)]
    paths = [folder / f"text{i}.bin" for i in range(len(texts))]
    for text, path in zip(texts, paths, strict=True):
        text.tokens.astype("<u2").tofile(path)

    def opened(cfg: Config, devices: Sequence[jax.Device], **data: Any) -> Loader:
        fields: dict[str, Any] = {"path": str(paths[0]), "eos_id": END} | data
        of_train = {n: fields.pop(n) for n in ("batch_schedule", "seed") if n in fields}
        cfg = of_files(cfg, fields)
        cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, **of_train))
        return Loader(cfg, mesh_of(cfg, devices), order=lambda length: order_of(cfg, length))

    one = on(subject.small, ONE, len(subject.devices))
    plain = lambda **data: opened(one, subject.devices, **data)  # noqa: E731
    yield from _epochs(texts[0], plain(), plain(seed=one.train.seed + 1), rows)
    yield from _resumed(plain)
    yield from _once(texts[0], plain())
    yield _targets(texts[0])
    if objective_of(subject.small).dataset == PAIRS:
        yield _pairs(subject.small)
    yield from _resized(plain, rows)
    yield from _mixed(texts, plain(path="", mixture=_weighted(paths)))
    yield _restaged(texts, plain(path="", mixture=_weighted(paths), mixture_schedule=LATER))
    wanted = [plain().batch(step) for step in STEPS]
    for name, cfg in subject.meshes.items():
        loader = opened(cfg, subject.devices)
        yield _on_mesh(name, cfg, loader, wanted)
        yield _of_processes(name, cfg, loader, wanted[0])


def of_files(cfg: Config, fields: dict[str, Any]) -> Config:
    """Return a config of a text, whatever else the config trains on.

    Args:     fields: of the section `data`.
    """
    none: dict[str, Any] = {
        "source": None,
        "mixture": (),
        "mixture_schedule": (),
        "length_schedule": (),
    }
    none |= {"length_keeps": "tokens", "held_out": ""}
    data = dataclasses.replace(cfg.data, **none | fields)
    train = dataclasses.replace(cfg.train, batch_schedule=())
    of_text = dataclasses.replace(cfg, data=data, train=train)
    return replace(of_text, **dict.fromkeys(objectives()))


def _weighted(paths: Iterable[Path]) -> tuple[Source, ...]:
    return tuple(Source(str(path), weight) for path, weight in zip(paths, WEIGHTS, strict=True))


def _said(what: str, wrong: Sequence[str]) -> Result:
    return Result("data order", "", what, len(wrong), where="; ".join(wrong))


def _epochs(text: Text, loader: Loader, other: Loader, rows: int) -> Iterator[Result]:
    """Look at two epochs: what a batch has of a sequence, and that each sequence is in it once.

    Args:     other: of another seed.
    """
    n, every, wrong = text.num_sequences, list[int](), list[str]()
    for step in range(-(-2 * n // rows)):
        fields, numbers = text.errors(jax.device_get(loader.batch(step)))
        wrong += [f"{name} of batch {step}" for name in fields]
        every += numbers
    yield _said("batches of the text", wrong)
    epochs = [every[:n], every[n : 2 * n]]
    wrong = [f"epoch {i}" for i, epoch in enumerate(epochs) if sorted(epoch) != [*range(n)]]
    yield _said("every sequence once an epoch", wrong)
    _, of_seed = text.errors(jax.device_get(other.batch(0)))
    wrong = ["of another seed"] if of_seed == every[:rows] else []
    wrong += ["of the two epochs"] if epochs[0] == epochs[1] else []
    wrong += ["of the text"] if [*range(n)] in epochs else []
    yield _said("orders that are the same", wrong)


def _resumed(plain: Callable[[], Loader]) -> Iterator[Result]:
    """Compare the batches of one loader with those of one that begins later, or skips some."""
    first, wrong = plain(), list[str]()
    for begin in (0, 2):
        going = plain().prefetched(begin)
        for step in (begin, begin + 1):
            number, batch = next(going)
            if number != step or not _same(batch, first.batch(step)):
                wrong.append(f"batch {step} of a loader that begins at {begin}")
        going.close()
    skipping = plain()
    skipping.skipped = SkippedBatches(((2, 1),))
    for step, number in ((1, 1), (2, 3), (3, 4)):
        if not _same(skipping.batch(step), first.batch(number)):
            wrong.append(f"step {step} without batch 2")
    yield _said("batches after a resume", wrong)


@dataclasses.dataclass(frozen=True)
class PairedTexts:
    """Documents of which each two are a pair, as a dataset has them."""

    tokens: np.ndarray
    document_offsets: np.ndarray
    targets: np.ndarray


def _pairs(cfg: Config) -> Result:
    """Pack random pairs, and compare each place of each row with what its document has there."""
    rng, T = np.random.default_rng(4), cfg.data.seq_len
    lengths = rng.integers(2, T // 3, 16)
    ends = np.cumsum(lengths)
    tokens = rng.integers(1, cfg.model.vocab_size, ends[-1])
    dataset: Any = PairedTexts(tokens, np.r_[0, ends], rng.random(ends[-1]) < 0.7)
    scores, rows = rng.random(ends[-1]).astype(np.float32), plan_rows(dataset.document_offsets, T)
    found = pack_rows(dataset, rows, np.arange(len(rows.first) - 1), T, scores)
    wanted: list[list[tuple[Any, ...]]] = [[]]
    segment = 0
    for i in range(0, len(ends), 2):
        if len(wanted[-1]) + sum(lengths[i : i + 2] - 1) > T:
            wanted.append([])
        for document in (i, i + 1):
            segment = wanted[-1][-1][2] + 1 if wanted[-1] else 1
            begin = ends[document] - lengths[document]
            for place in range(lengths[document] - 1):
                own, after = begin + place, begin + place + 1
                counts = dataset.targets[after]
                label = tokens[after] if counts else IGNORED
                score = float(scores[after]) if counts else 0.0
                wanted[-1].append((tokens[own], label, segment, place, score))
    wrong = [] if len(wanted) == len(found.tokens) else [f"{len(found.tokens)} rows"]
    fields = (*FIELDS, REFERENCE)
    for number, row in enumerate(wanted[: len(found.tokens)]):
        for field, values in zip(fields, zip(*row, strict=True), strict=True):
            of_field = found.extra[REFERENCE] if field == REFERENCE else getattr(found, field)
            here = np.asarray(of_field)[number]
            rest = here[len(row) :]
            unused = field == "labels" and (rest != IGNORED).any()
            if unused or not np.array_equal(here[: len(row)], np.array(values, here.dtype)):
                wrong.append(f"{field} of row {number}")
    return _said("rows of pairs", wrong)


def _resized(plain: Callable[..., Loader], rows: int) -> Iterator[Result]:
    """Compare a text read in batches of growing sizes, and by pieces of sequences, with the same
    text in batches of one size."""
    steps = range(5)
    whole = [jax.device_get(plain().batch(step)) for step in steps]
    of_rows = np.concatenate([batch.tokens for batch in whole])
    small, length = rows // 2 or 1, whole[0].tokens.shape[1]
    schedules: dict[str, dict[str, Any]] = {
        "batches that grow": {"batch_schedule": (BatchSize(0, small), BatchSize(2, rows))},
        "sequences that grow": {
            "length_schedule": (SequenceLength(0, length // 2), SequenceLength(2, length))
        },
    }
    for what, fields in schedules.items():
        try:
            loader = plain(**fields)
        except ConfigError as error:
            yield Result("data order", "", what, not_run=str(error))
            continue
        tokens = [np.asarray(loader.batch(step).tokens).reshape(-1) for step in steps]
        found = np.concatenate(tokens).reshape(-1, length)
        yield _said(what, [] if np.array_equal(found, of_rows[: len(found)]) else ["sequences"])


def _once(text: Text, loader: Loader) -> Iterator[Result]:
    """Read the sequences once, as evaluations do: rows that complete a batch have no labels."""
    n = text.num_sequences
    counted = 0
    for batch in loader.once(loader.first_sequences(n)):
        counted += int((np.asarray(batch.labels) != IGNORED).sum())
    labels = [int((text.sequence(i)["labels"] != IGNORED).sum()) for i in range(n)]
    wrong = [] if counted == sum(labels) else [f"{counted} labels, not {sum(labels)}"]
    yield _said("sequences read once", wrong)


def _targets(text: Text) -> Result:
    """Pack tokens of which some are no targets, as those of a user in a conversation."""
    rng, T = np.random.default_rng(3), text.length
    tokens = text.tokens[: T + 1].astype(np.int32)
    spared = rng.random(T + 1) < 0.5
    labels = pack(tokens[None], None, spared[None]).labels[0]
    right = [IGNORED if spared[at + 1] else int(tokens[at + 1]) for at in range(T)]
    return _said("labels of targets alone", [] if labels.tolist() == right else ["labels"])


def _mixed(texts: Sequence[Text], loader: Loader) -> Iterator[Result]:
    """Look at a mixture: shares, orders, and what a source goes on with in the next block."""
    rows, known = loader.sizes.at(0).rows, [text.number_of for text in texts]

    def read(begin: int, count: int) -> tuple[np.ndarray, list[int]]:
        sources, numbers = list[int](), list[int]()
        first, end = begin // rows, -(-(begin + count) // rows)
        batches = [loader.host_rows(step, np.arange(rows)).tokens for step in range(first, end)]
        every = np.concatenate(batches).astype(np.int32)[begin - first * rows :][:count]
        for tokens in (row.tobytes() for row in every):
            found = [i for i, of in enumerate(known) if tokens in of]
            sources.append(found[0] if found else -1)
            numbers.append(known[found[0]][tokens] if found else -1)
        return np.array(sources), numbers

    wrong, epochs = list[str](), list[list[int]]()
    n, (sources, numbers) = texts[0].num_sequences, read(0, MIXED)
    for i, weight in enumerate(WEIGHTS):
        share, deviation = np.mean(sources == i), (weight * (1 - weight) / MIXED) ** 0.5
        if not abs(share - weight) < 5 * deviation:
            wrong.append(f"share of source {i}: {share:.3f}, not {weight}")
        of = [number for source, number in zip(sources, numbers, strict=True) if source == i]
        epochs.append(of[:n])
        wrong += [f"epoch of source {i}"] if sorted(of[:n]) != [*range(n)] else []
    wrong += ["sources have the same order"] if epochs[0] == epochs[1] else []
    before = int(WEIGHTS[0] * BLOCK) % n  # of the epoch in which the first block ends
    sources, numbers = read(BLOCK - 2 * n, 4 * n)
    ends = [k for k, source in zip(numbers[: 2 * n], sources, strict=False) if source == 0]
    begins = [
        k for k, source in zip(numbers[2 * n :], sources[2 * n :], strict=True) if source == 0
    ]
    epoch = ends[len(ends) - before :] + begins[: n - before]
    wrong += ["epoch over two blocks"] if sorted(epoch) != [*range(n)] else []
    yield _said("a mixture", wrong)


#: Weights of the sources from a later step on.
LATER = (MixtureWeights(3, WEIGHTS[::-1]),)


def _restaged(texts: Sequence[Text], loader: Loader) -> Result:
    """Look at a mixture whose weights change: each source continues where it was."""
    rows, wrong = loader.sizes.at(0).rows, list[str]()
    steps = 4 * -(-texts[0].num_sequences // rows) + LATER[0].step
    batches = [loader.host_rows(step, np.arange(rows)).tokens for step in range(steps)]
    every = np.concatenate(batches).astype(np.int32)
    for i, text in enumerate(texts):
        numbers = [
            text.number_of[row.tobytes()] for row in every if row.tobytes() in text.number_of
        ]
        n = text.num_sequences
        if len(numbers) < n or sorted(numbers[:n]) != [*range(n)]:
            wrong.append(f"epoch of source {i}")
    return _said("a mixture whose weights change", wrong)


def _on_mesh(name: str, cfg: Config, loader: Loader, wanted: Sequence[Batch]) -> Result:
    order, wrong = order_of(cfg), list[str]()
    if order is not None and not np.array_equal(order, zigzag(cfg)):
        wrong.append("order of tokens along the sequence axis")
    back = slice(None) if order is None else np.argsort(zigzag(cfg))
    for step, right in zip(STEPS, wanted, strict=True):
        batch = loader.batch(step)
        for field in FIELDS:
            array, whole = getattr(batch, field), np.asarray(getattr(right, field))
            for shard in array.addressable_shards:
                if not np.array_equal(shard.data, np.asarray(array)[shard.index]):
                    wrong.append(f"{field} of batch {step} on {shard.device}")
            if not np.array_equal(np.asarray(array)[:, back], whole):
                wrong.append(f"{field} of batch {step}")
    return Result("data order", name, "batches", len(wrong), where="; ".join(wrong[:3]))


@dataclasses.dataclass(frozen=True)
class OfProcess:
    """The sharding of a batch as one of several processes sees it."""

    whole: NamedSharding
    devices: Sequence[jax.Device]

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict[jax.Device, Any]:
        """Return which part of an array each device of the process has."""
        return {d: i for d, i in self.whole.devices_indices_map(shape).items() if d in self.devices}


def _of_processes(name: str, cfg: Config, loader: Loader, wanted: Batch) -> Result:
    """Look at the rows that processes with one, and with half of the devices would read."""
    whole_tokens, shape = np.asarray(wanted.tokens), np.shape(wanted.tokens)
    mesh = mesh_of(cfg, jax.devices())
    devices, whole, wrong = [*mesh.devices.flat], NamedSharding(mesh, BATCH_SPEC), list[str]()
    places = whole.devices_indices_map(shape).items()
    of_device = {d: index[0].indices(shape[0]) for d, index in places}
    for count in dict.fromkeys((1, max(len(devices) // 2, 1))):
        for first in range(0, len(devices), count):
            part = devices[first : first + count]
            of_part: Any = OfProcess(whole, part)
            rows = rows_of_process(of_part, shape)
            right = sorted({row for d in part for row in range(*of_device[d])})
            read = loader.host_rows(0, rows).tokens
            order = order_of(cfg)
            read = read if order is None else read[:, np.argsort(zigzag(cfg))]
            if rows.tolist() != right or not np.array_equal(read, whole_tokens[rows]):
                wrong.append(f"process {first // count} of {len(devices) // count}")
    return Result("data order", name, "rows of processes", len(wrong), where=", ".join(wrong[:3]))


def zigzag(cfg: Config) -> np.ndarray:
    """Return the text position of each column: device i of n has parts i and 2n - 1 - i of 2n."""
    ways, T = cfg.parallel.sequence, cfg.data.seq_len
    parts = np.arange(T).reshape(2 * ways, -1)
    return np.concatenate([parts[[i, 2 * ways - 1 - i]].ravel() for i in range(ways)])


def _same(a: Batch, b: Batch) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in FIELDS)
