"""Checkpoints: what is saved comes back bit for bit, on any mesh, or an error says why not."""

import contextlib
import dataclasses
import resource
import signal
import subprocess
import sys
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from jaxpar import config
from jaxpar.checkpoint import loading
from jaxpar.checkpoint.integrity import Damaged
from jaxpar.checkpoint.loading import restore, restore_params
from jaxpar.checkpoint.saved import (
    changed_fields,
    checkpoint_folder,
    read_saved,
    saved_config,
    saved_steps,
    starting_step,
)
from jaxpar.checkpoint.saving import Checkpointer, SaveFailed
from jaxpar.config import Config, ConfigError, serialize
from jaxpar.config.validate import resolve
from jaxpar.data.formats.meta import FORMAT, META_FILE, SPLITS, Meta, Part, SplitMeta, meta_to_json
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step import state
from tests.slow import slow
from tests.tiny import STATE

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

DATA_2 = {"parallel.data": 2}
TENSOR_2 = {"parallel.tensor": 2, "parallel.data": 1}
VIRTUAL = {
    "parallel.pipeline": 2,
    "parallel.virtual_stages": 2,
    "parallel.num_microbatches": 2,
    "parallel.zero": 1,
    "parallel.data": 1,
}


def write_dataset(folder: Path, eos_id: int = 0) -> str:
    """A dataset's description, without its tokens."""
    hashes = dict.fromkeys(("sha256", "documents_sha256"), "0" * 64)
    hashes |= dict.fromkeys(("tokens_hash", "documents_hash"), "0" * 16)
    part = Part(name="train", num_tokens=8, num_documents=1, num_bytes=8, **hashes)
    meta = Meta(
        format=FORMAT,
        dtype="uint16",
        vocab_size=max(32, eos_id + 1),
        eos_id=eos_id,
        eos_token="<eos>",
        tokenizer="bytes",
        tokenizer_fingerprint="0" * 64,
        unigram_entropy=1.0,
        inputs=("test",),
        holdout=0.1,
        splits=dict.fromkeys(SPLITS, SplitMeta(parts=(part,))),
    )
    folder.mkdir(exist_ok=True)
    (folder / META_FILE).write_text(meta_to_json(meta))
    return str(folder)


@pytest.fixture
def base(tmp_path: Path) -> Config:
    """A tiny run in a folder of its own."""
    data = write_dataset(tmp_path / "data")
    places = {"run.dir": str(tmp_path / "run"), "data.path": data}
    return config.replace(Config(), **STATE, **places)


@pytest.fixture
def setup(base, devices):
    """(fields of the config) -> (the resolved config, its mesh)."""

    def make(**values):
        cfg = config.replace(base, **(DATA_2 | values))
        n = cfg.parallel.pipeline * cfg.parallel.data * cfg.parallel.tensor
        return resolve(cfg, n), make_mesh(cfg.parallel, devices[:n])

    return make


def random_state(cfg: Config, mesh, step: int) -> state.TrainState:
    """A running state whose every number differs: the logical one depends on `step` alone."""
    rng = np.random.default_rng(step)

    def numbers(leaf):
        return np.asarray(rng.normal(size=leaf.shape) * 1000, leaf.dtype)

    leaves = state.abstract_logical(cfg, mesh)
    values = dataclasses.replace(jax.tree.map(numbers, leaves), step=np.int32(step))
    placed = jax.device_put(values, jax.tree.map(lambda leaf: leaf.sharding, leaves))
    return state.to_running(placed, cfg)


def logical(running: state.TrainState, cfg: Config) -> state.TrainState:
    return jax.device_get(state.to_logical(running, cfg))


def assert_same_bits(a, b) -> None:
    chex.assert_trees_all_equal_structs(a, b)
    chex.assert_trees_all_equal(a, b, strict=True)


def save(cfg: Config, mesh, *steps: int) -> state.TrainState:
    """Save random states of these steps; returns the last."""
    with Checkpointer(cfg) as checkpointer:
        for step in steps:
            last = random_state(cfg, mesh, step)
            assert checkpointer.save(last, step, tokens_seen=100 * step)
    return last


@pytest.mark.parametrize("optimizer", ["adamw", *map(slow, "lion sgd muon adafactor".split())])
def test_a_round_trip_keeps_every_bit(setup, optimizer):
    cfg, mesh = setup(**{"optimizer.name": optimizer})
    saved = save(cfg, mesh, 3)
    restored = restore(cfg, mesh)
    assert_same_bits(restored, saved)
    assert jax.tree.map(lambda a: a.sharding, restored) == state.state_shardings(cfg, mesh)


ELSEWHERE = [(VIRTUAL, "adamw"), *(slow(VIRTUAL, rule) for rule in ("muon", "adafactor"))]


@pytest.mark.parametrize(("other", "rule"), [*ELSEWHERE, slow(TENSOR_2, "adamw")])
def test_another_mesh_reads_the_same_logical_arrays_and_back(setup, tmp_path, other, rule):
    first, first_mesh = setup(**{"optimizer.name": rule})
    expected = logical(save(first, first_mesh, 5), first)

    second, second_mesh = setup(**{"optimizer.name": rule}, **other)
    restored = restore(second, second_mesh)
    assert_same_bits(logical(restored, second), expected)
    if other is VIRTUAL:  # the running order does differ, or this proves nothing
        wq = jax.device_get(restored.params["layers"]["wq"])
        np.testing.assert_array_equal(wq[1], expected.params["layers"]["wq"][2])

    moved = config.replace(second, **{"run.dir": str(tmp_path / "moved")})
    with Checkpointer(moved) as checkpointer:
        checkpointer.save(restored, 5, tokens_seen=0)
    back = config.replace(first, **{"run.dir": moved.run.dir})
    assert_same_bits(jax.device_get(restore(back, first_mesh)), expected)


def test_the_folder_alone_tells_what_was_saved(setup):
    cfg, mesh = setup()
    save(cfg, mesh, 1, 2)
    saved = read_saved(cfg.run.dir)
    assert (saved.step, saved.tokens_seen) == (2, 200)
    assert set(saved.versions) == {"jaxpar", "jax"}
    assert saved_config(cfg.run.dir) == cfg
    assert read_saved(cfg.run.dir, 1).tokens_seen == 100
    assert int(restore(cfg, mesh, 1).step) == 1
    with pytest.raises(ConfigError, match=r"step = 7: .* Fix: use one of 1, 2"):
        read_saved(cfg.run.dir, 7)


def test_the_latest_and_every_kth_are_kept(setup):
    cfg, mesh = setup(**{"checkpoint.every": 2, "checkpoint.keep": 2, "checkpoint.keep_every": 4})
    save(cfg, mesh, 2, 4, 6)
    assert saved_steps(cfg.run.dir) == [4, 6]
    save(cfg, mesh, 8, 10, 12, 14)  # as a resumed run
    assert saved_steps(cfg.run.dir) == [4, 8, 12, 14]


def test_a_step_is_saved_once(setup):
    cfg, mesh = setup()
    saved = save(cfg, mesh, 2)
    with Checkpointer(cfg) as checkpointer:
        assert checkpointer.steps() == [2]
        assert not checkpointer.save(random_state(cfg, mesh, 99), 2, tokens_seen=0)
        assert checkpointer.save(random_state(cfg, mesh, 3), 3, tokens_seen=0)
        assert not checkpointer.save(random_state(cfg, mesh, 99), 3, tokens_seen=0)
        assert checkpointer.steps() == [2, 3]
    assert_same_bits(restore(cfg, mesh, 2), saved)


def test_resume(setup, monkeypatch, tmp_path):
    cfg, mesh = setup()
    names = ("auto", "never", "must")
    modes = {name: config.replace(cfg, **{"checkpoint.resume": name}) for name in names}
    assert starting_step(modes["auto"]) is None
    assert starting_step(modes["never"]) is None
    with pytest.raises(ConfigError, match=r"checkpoint.resume = 'must': .* no finished checkpoint"):
        starting_step(modes["must"])
    with pytest.raises(ConfigError, match=r"run.dir = .* no finished checkpoint"):
        restore(cfg, mesh)
    assert not Path(cfg.run.dir).exists()

    monkeypatch.chdir(tmp_path)
    modes = {k: config.replace(c, **{"run.dir": "run"}) for k, c in modes.items()}  # relative
    save(modes["auto"], mesh, 1, 10, 9)
    assert starting_step(modes["auto"]) == 10
    assert starting_step(modes["must"]) == 10
    with pytest.raises(ConfigError, match=r"checkpoint.resume = 'never': .* step 10"):
        starting_step(modes["never"])


@pytest.mark.parametrize(
    ("path", "value", "then"),
    [
        ("model.d_model", 32, 16),
        ("model.tie_embeddings", True, False),
        ("optimizer.name", "lion", "adamw"),
        ("train.seed", 1, 0),
        ("train.global_batch_size", 64, 32),
        ("data.seq_len", 2048, 1024),
    ],
)
def test_a_change_that_cannot_be_continued_is_refused_by_name(setup, path, value, then):
    cfg, mesh = setup()
    save(cfg, mesh, 4)
    changed = config.replace(cfg, **{path: value})
    with pytest.raises(ConfigError) as caught:
        restore(changed, mesh)
    assert str(caught.value) == (
        f"{path} = {value!r}: the checkpoint of step 4 has {then!r}. "
        f"Fix: use a new run.dir, or set it back to {then!r}."
    )


def test_other_data_is_refused_wherever_it_lies(setup, tmp_path):
    cfg, mesh = setup()
    save(cfg, mesh, 4)
    copy = write_dataset(tmp_path / "copy")
    restore(config.replace(cfg, **{"data.path": copy}), mesh)
    other = write_dataset(tmp_path / "other", eos_id=1)
    with pytest.raises(ConfigError, match=r"data.path = .* not the data of .* step 4"):
        restore(config.replace(cfg, **{"data.path": other}), mesh)


def test_the_rest_may_change(setup):
    cfg, mesh = setup()
    saved = save(cfg, mesh, 4)
    free = {
        "train.num_steps": 5000,
        "optimizer.learning_rate": 1e-3,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.weight_decay": 0.0,
        "parallel.layer_loop": "unroll",
        "compute.dtype": "float32",
    }
    changed = config.replace(cfg, **free)
    assert_same_bits(restore(changed, mesh), saved)
    differences = changed_fields(changed, read_saved(cfg.run.dir))
    assert differences.keys() == free.keys()
    assert differences["train.num_steps"] == (1000, 5000)


def test_a_field_that_the_writer_did_not_know_counts_as_its_default(setup):
    cfg, mesh = setup()
    save(cfg, mesh, 4)
    saved = read_saved(cfg.run.dir)
    del saved.config["train"]["seed"], saved.config["model"]["tie_embeddings"]
    assert changed_fields(cfg, saved) == {}
    newer = config.replace(cfg, **{"model.tie_embeddings": True})
    assert changed_fields(newer, saved) == {"model.tie_embeddings": (False, True)}


def test_the_checkpoint_of_another_program_is_refused(tmp_path):
    with ocp.training.Checkpointer(tmp_path / "checkpoints") as other:
        other.save(1, {"params": np.zeros(2)})
    with pytest.raises(ConfigError, match=r"run.dir = .* step 1 was not written by jaxpar"):
        saved_config(tmp_path)


def test_parameters_alone_for_one_device(setup, devices):
    cfg, mesh = setup(**VIRTUAL)
    expected = logical(save(cfg, mesh, 4), cfg).params
    reader = config.replace(
        saved_config(cfg.run.dir),
        **{"parallel": config.ParallelConfig(data=1), "optimizer.name": "sgd", "data.path": ""},
    )
    one = make_mesh(reader.parallel, devices[:1])
    assert_same_bits(jax.device_get(restore_params(cfg.run.dir, reader, one)), expected)
    with pytest.raises(ConfigError, match=r"feed_forward\.d_ff = 48: .* Fix: set it back to 24"):
        wider = config.replace(reader, **{"model.layers.feed_forward.d_ff": 48})
        restore_params(cfg.run.dir, wider, one)


def test_a_parameter_that_the_checkpoint_lacks_is_missed(setup, monkeypatch):
    cfg, mesh = setup()
    save(cfg, mesh, 4)
    wants_biases = config.replace(cfg, **{"model.layers.mixer.bias": True})
    monkeypatch.setattr(loading, "check_model", lambda *_: None)
    with pytest.raises(Damaged, match="not contain params/layers/bk, params/layers/bq"):
        restore_params(cfg.run.dir, wants_biases, mesh)


def test_a_half_written_save_is_passed_over_and_swept_away(setup):
    cfg, mesh = setup()
    saved = save(cfg, mesh, 4)
    half = checkpoint_folder(cfg.run.dir) / "6.orbax-checkpoint-tmp"
    (half / "state").mkdir(parents=True)
    assert starting_step(cfg) == 4
    assert_same_bits(restore(cfg, mesh), saved)
    assert half.exists()  # reading sweeps nothing: a run may be writing it
    save(cfg, mesh, 6)
    assert not half.exists()
    assert saved_steps(cfg.run.dir) == [4, 6]


def check_donation(cfg: Config, mesh) -> None:
    """Overwrite the state in place as soon as `save` returns; the save must not notice."""
    step = jax.jit(lambda s: jax.tree.map(lambda a: a * 3 + 1, s), donate_argnums=0)
    running = random_state(cfg, mesh, 4)
    expected = jax.tree.map(np.array, running)  # copies: a view would keep the buffers alive
    with Checkpointer(cfg) as checkpointer:
        checkpointer.save(running, 4, tokens_seen=0)
        for _ in range(5):
            running = step(running)
    assert_same_bits(jax.device_get(restore(cfg, mesh)), expected)


def test_donating_the_state_right_after_save_leaves_the_save_alone(setup):
    check_donation(*setup(**{"model.vocab_size": 65536}))


@pytest.mark.gpu
def test_donating_the_state_right_after_save_on_a_gpu(setup):
    check_donation(*setup(**{"model.vocab_size": 1 << 22, "parallel.data": 1}))  # 1.5 GiB


@contextlib.contextmanager
def files_no_larger_than(size: int):
    """Writing beyond `size` fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_save_that_fails_in_the_background_is_raised_once_and_can_be_tried_again(setup):
    big = {"model.vocab_size": 65536, "checkpoint.keep": 1}
    cfg, mesh = setup(**big, **{"checkpoint.save_failures_allowed": 0})
    first, second = random_state(cfg, mesh, 2), random_state(cfg, mesh, 4)
    checkpointer = Checkpointer(cfg)
    checkpointer.save(first, 2, tokens_seen=0)
    checkpointer.wait()
    with files_no_larger_than(1 << 20):
        assert checkpointer.save(second, 4, tokens_seen=0)
        with pytest.raises(SaveFailed, match="File too large"):
            checkpointer.wait()
    assert saved_steps(cfg.run.dir) == [2]  # not deleted for want of a successor
    assert checkpointer.save(second, 4, tokens_seen=0)
    checkpointer.close()
    assert_same_bits(restore(cfg, mesh), second)
    assert saved_steps(cfg.run.dir) == [4]


def test_leaving_raises_the_failure_of_the_last_save(setup):
    cfg, mesh = setup(**{"model.vocab_size": 65536})
    too_large = pytest.raises(SaveFailed, match="File too large")
    with files_no_larger_than(1 << 20), too_large, Checkpointer(cfg) as checkpointer:
        checkpointer.save(random_state(cfg, mesh, 2), 2, tokens_seen=0)


def test_a_folder_that_cannot_be_written_is_noticed_at_once(setup):
    cfg, mesh = setup()
    where = checkpoint_folder(cfg.run.dir)
    with pytest.raises(SaveFailed, match="checkpoints"), Checkpointer(cfg) as checkpointer:
        where.rmdir()
        where.touch()  # a file where the folder was
        assert not checkpointer.save(random_state(cfg, mesh, 2), 2, tokens_seen=0)


KILLED_WHILE_SAVING = """
import jax, os, signal, sys, time
jax.config.update("jax_num_cpu_devices", 2)
from jaxpar.checkpoint.saved import checkpoint_folder
from jaxpar.checkpoint.saving import Checkpointer
from jaxpar.config import serialize
from jaxpar.step import state
from jaxpar.sharding.mesh import make_mesh
cfg = serialize.from_json(sys.stdin.read())
mesh = make_mesh(cfg.parallel)
zeros = jax.tree.map(lambda a: jax.numpy.zeros(a.shape, a.dtype), state.abstract_state(cfg))
zeros = jax.device_put(zeros, state.state_shardings(cfg, mesh))
checkpointer = Checkpointer(cfg)
checkpointer.save(zeros, 6, tokens_seen=0)
while not list(checkpoint_folder(cfg.run.dir).glob("6*")):
    time.sleep(0.001)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow  # quicker: a half-written save, above
def test_a_save_killed_half_way_leaves_the_one_before(setup):
    cfg, mesh = setup(**{"model.vocab_size": 65536})  # a save of some tens of milliseconds
    saved = save(cfg, mesh, 4)
    child = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_SAVING], input=serialize.to_json(cfg), text=True
    )
    assert child.returncode == -signal.SIGKILL
    assert 4 in saved_steps(cfg.run.dir)
    assert_same_bits(restore(cfg, mesh, 4), saved)
    latest = starting_step(cfg)  # 4, unless the kill came too late
    with Checkpointer(cfg) as checkpointer:
        assert checkpointer.save(random_state(cfg, mesh, 6), 6, tokens_seen=0) == (latest == 4)
    assert starting_step(cfg) == 6
