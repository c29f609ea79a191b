"""Global batches: the same on every mesh, a function of (seed, step), and fit to be trained on."""

import subprocess
import sys
import textwrap
import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpar.config import Config, ConfigError, replace
from jaxpar.data.formats.inspect import inspect_tokens
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.loader import Loader
from jaxpar.data.options import InspectOptions, PrepareOptions
from jaxpar.data.packing import num_sequences
from jaxpar.data.prepare.text import prepare
from jaxpar.data.shuffle import sequence_order
from jaxpar.sharding.axes import AXES, BATCH_SPEC
from tests.data.sequences import cut_sequences

pytestmark = pytest.mark.waits

BATCH, LENGTH = 8, 16

MESHES = {
    "one": {},
    "data": {"data": 8},
    "data x sequence": {"data": 4, "sequence": 2},
    "every batch axis": {"replica": 2, "data": 2, "expert": 2, "sequence": 2},
    "tensor and pipeline": {"pipeline": 2, "data": 2, "tensor": 4},
}


def make_mesh(**sizes: int) -> Mesh:
    """A mesh of simulated devices; axes that are not named have size 1."""
    shape = [sizes.get(axis, 1) for axis in AXES]
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), AXES)


@pytest.fixture
def cfg(dataset) -> Config:
    """Reads the shared byte dataset in short sequences."""
    values = {"data.path": str(dataset), "data.seq_len": LENGTH, "train.global_batch_size": BATCH}
    return replace(Config(), **values)


def arrays(batch) -> list[np.ndarray]:
    """The four arrays, on the host."""
    return [np.asarray(x) for x in (batch.tokens, batch.labels, batch.segment_ids, batch.positions)]


def assert_same(batch, other) -> None:
    """Equal in every array."""
    for a, b in zip(arrays(batch), arrays(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES.keys())
@pytest.mark.parametrize("split", ["train", "val"])
def test_same_batch_on_every_mesh(sizes, split, cfg):
    """Sharded as promised, and the same values as on one device."""
    mesh = make_mesh(**sizes)
    batch, alone = (Loader(cfg, m, split).batch(3) for m in (mesh, make_mesh()))
    for x in (batch.tokens, batch.labels, batch.segment_ids, batch.positions):
        assert x.shape == (BATCH, LENGTH) and x.dtype == np.int32
        assert x.sharding.spec == BATCH_SPEC and x.sharding.mesh == mesh
    assert_same(batch, alone)


@pytest.mark.parametrize("document_mask", [True, False])
def test_rows_are_the_windows_of_the_sequence(document_mask, cfg, dataset):
    """Row r of step s is sequence number s * B + r of the order that the seed draws."""
    cfg = replace(cfg, **{"data.document_mask": document_mask})
    tokens = TokenDataset.open(dataset)
    order = sequence_order(num_sequences(tokens.num_tokens, LENGTH), cfg.train.seed)
    indices = order(5 * BATCH + np.arange(BATCH))
    expected = cut_sequences(tokens.tokens, tokens.document_offsets, indices, LENGTH, document_mask)
    assert_same(Loader(cfg, make_mesh(data=4)).batch(5), expected)


def test_pure_in_seed_and_step(cfg):
    """Any order of calls, any loader; another seed or step is another batch."""
    mesh = make_mesh(data=2)
    loader, other = Loader(cfg, mesh), Loader(cfg, mesh)
    seeded = Loader(replace(cfg, **{"train.seed": 1}), mesh)
    later = loader.batch(100)
    first = loader.batch(0)
    assert_same(first, other.batch(0))
    assert_same(later, other.batch(100))
    assert (arrays(first)[0] != arrays(later)[0]).any()
    assert (arrays(first)[0] != arrays(seeded.batch(0))[0]).any()


def test_held_out_batches_are_in_text_order_and_wrap_around(cfg, dataset):
    """Sequence i, modulo the split, whatever the seed."""
    cfg = replace(cfg, **{"train.seed": 7})
    loader, opened = Loader(cfg, make_mesh(), "val"), TokenDataset.open(dataset, "val")
    (count,) = loader.sequences_per_epoch
    assert count == (opened.num_tokens - 1) // LENGTH
    step = count // BATCH  # The batch that holds the last sequence, or the first of the next round.
    for s in (0, step):
        indices = np.arange(s * BATCH, (s + 1) * BATCH) % count
        expected = cut_sequences(opened.tokens, opened.document_offsets, indices, LENGTH, True)
        assert_same(loader.batch(s), expected)


def test_the_test_split(cfg, corpus, tmp_path):
    """Read and inspected like the held-out one."""
    out = str(tmp_path / "out")
    prepare(PrepareOptions(input=(str(corpus),), output=out, split=(6, 2, 2)))
    found = Loader(replace(cfg, **{"data.path": out}), make_mesh(), "test").batch(0)
    opened = TokenDataset.open(out, "test")
    expected = cut_sequences(opened.tokens, opened.document_offsets, np.arange(BATCH), LENGTH, True)
    assert_same(found, expected)
    assert f"  test: {opened.num_tokens:,} tokens" in inspect_tokens(InspectOptions(path=out))


def test_order_moves_columns(cfg):
    """Column t holds text position order[t], in all four arrays, on a sharded sequence too."""
    order = np.random.default_rng(0).permutation(LENGTH)
    plain = Loader(cfg, make_mesh()).batch(1)
    moved = Loader(cfg, make_mesh(data=2, sequence=4), order=lambda length: order).batch(1)
    for a, b in zip(arrays(plain), arrays(moved), strict=True):
        np.testing.assert_array_equal(a[:, order], b)


@pytest.mark.parametrize("order", [np.zeros(LENGTH, int), np.arange(LENGTH - 1)])
def test_order_must_be_a_permutation(order, cfg):
    """A lost or doubled token would go unnoticed for long."""
    with pytest.raises(ValueError, match=r"permutation of range\(16\)"):
        Loader(cfg, make_mesh(), order=lambda length: order)


def test_each_process_reads_its_rows(cfg):
    """Any subset of rows is that subset of the whole batch."""
    loader = Loader(cfg, make_mesh())
    whole = loader.host_rows(2, np.arange(BATCH))
    rows = np.array([1, 4, 5])
    for a, b in zip(arrays(whole), arrays(loader.host_rows(2, rows)), strict=True):
        np.testing.assert_array_equal(a[rows], b)


def test_refusals(cfg):
    """Vocabulary, sequence length, missing data: field and numbers."""
    for path, value, rule in [
        ("model.vocab_size", 256, "must cover the 257 tokens"),
        ("data.seq_len", 10**6, "needs 1000001 tokens, but train of"),
        ("data.path", "missing", "does not exist"),
    ]:
        with pytest.raises(ConfigError, match=rule) as error:
            Loader(replace(cfg, **{path: value}), make_mesh())
        assert error.value.field == path
    small = {"model.vocab_size": 256, "run.init_from": "org/model"}  # its size cannot change
    with pytest.raises(ConfigError, match="prepare the text with the tokenizer of org/model"):
        Loader(replace(cfg, **small), make_mesh())
    missing = {"data.path": "missing", "run.init_from": "org/model"}
    fix = "prepare-chat --input CHATS.jsonl --tokenizer org/model --output missing`"
    with pytest.raises(ConfigError, match=fix):
        Loader(replace(cfg, **missing), make_mesh())


@pytest.mark.parametrize("prefetch", [1, 3])
def test_prefetched(prefetch, cfg):
    """The same batches as asked for one by one, from any step on."""
    loader = Loader(replace(cfg, **{"data.prefetch": prefetch}), make_mesh(data=2))
    stream = loader.prefetched(4)
    for expected in range(4, 10):
        step, batch = next(stream)
        assert step == expected
        assert_same(batch, loader.batch(step))
    stream.close()


def test_prefetch_runs_ahead_and_stops(cfg, monkeypatch):
    """So many batches ahead and no more; closing ends the thread."""
    loader = Loader(replace(cfg, **{"data.prefetch": 3}), make_mesh())
    made, enough = [], threading.Event()

    def host_rows(step, rows):
        made.append((step, threading.current_thread()))
        if len(made) == 4:
            enough.set()
        return step

    def place(step, host):
        assert threading.current_thread() is threading.main_thread()
        return host

    monkeypatch.setattr(loader, "host_rows", host_rows)
    monkeypatch.setattr(loader, "_place", place)
    stream = loader.prefetched(0)
    assert next(stream) == (0, 0)
    assert enough.wait(600)
    assert [step for step, _ in made] == [0, 1, 2, 3]
    stream.close()
    thread = made[0][1]
    assert thread is not threading.current_thread() and not thread.is_alive()
    assert len(made) == 4


def test_prefetch_raises_where_it_failed(cfg, monkeypatch):
    """Batches before the failure arrive; then comes the exception itself."""
    before = threading.enumerate()  # with those of loaders that nothing has collected yet
    loader = Loader(cfg, make_mesh())
    whole = loader.host_rows

    def host_rows(step, rows):
        if step == 2:
            raise OSError("disk went away")
        return whole(step, rows)

    monkeypatch.setattr(loader, "host_rows", host_rows)
    stream = loader.prefetched(0)
    assert [next(stream)[0], next(stream)[0]] == [0, 1]
    with pytest.raises(OSError, match="disk went away"):
        next(stream)
    new = [t for t in threading.enumerate() if t not in before]
    assert not [t for t in new if t.name.startswith("train-batches")]


PROGRAM = """
    import jax, numpy as np, sys
    from jaxpar.config import Config, replace
    from jaxpar.data.loader import Loader
    from jax.sharding import Mesh
    from jaxpar.sharding.axes import AXES
    jax.config.update("jax_num_cpu_devices", 2)
    path, process, port = sys.argv[1:]
    if port != "0":
        jax.distributed.initialize(f"localhost:{port}", 2, int(process))
    devices = np.array(jax.devices()).reshape([1, 1, jax.device_count(), 1, 1, 1])
    values = {"data.path": path, "data.seq_len": 16, "train.global_batch_size": 8}
    loader = Loader(replace(Config(), **values), Mesh(devices, AXES))
    stream = loader.prefetched(0)
    step, batch = next(stream)
    for shard in batch.tokens.addressable_shards:
        print(shard.index[0].indices(8)[0], np.asarray(shard.data).tolist())
    print("rows read", len(loader._rows[8]))
"""


def start(dataset, process: int, port: int) -> subprocess.Popen:
    """A program that takes one batch, prints its part and ends without closing anything."""
    args = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(dataset), str(process), str(port)]
    return subprocess.Popen(args, stdout=subprocess.PIPE, text=True)


def test_interpreter_exit_does_not_hang(dataset):
    """A prefetch thread left running does not keep the program alive."""
    program = start(dataset, 0, 0)
    output, _ = program.communicate(timeout=600)
    assert program.returncode == 0 and "rows read 8" in output


def test_two_processes(dataset, cfg):
    """Each process holds, and has read, half of the batch that one process makes."""
    import socket

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    programs = [start(dataset, process, port) for process in (0, 1)]
    outputs = [program.communicate(timeout=600)[0] for program in programs]
    assert [program.returncode for program in programs] == [0, 0]
    expected, seen = arrays(Loader(cfg, make_mesh()).batch(0))[0], []
    for output in outputs:
        *shards, rows_read = output.splitlines()
        assert rows_read == "rows read 4"
        for line in shards:
            first, rows = line.split(" ", 1)
            np.testing.assert_array_equal(expected[int(first) :][:2], eval(rows))
            seen.append(int(first))
    assert sorted(seen) == [0, 2, 4, 6]
