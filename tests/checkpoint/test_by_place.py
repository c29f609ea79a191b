"""Checkpoints read by a model with other layers: by place and name of the weight, on any mesh."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxpar import config
from jaxpar.checkpoint import loading
from jaxpar.checkpoint.loading import check_resumable, restore, restore_params
from jaxpar.checkpoint.saved import read_saved
from jaxpar.checkpoint.saving import Checkpointer
from jaxpar.components.attention import QkNorm
from jaxpar.config import Config, ConfigError
from jaxpar.config.validate import resolve
from jaxpar.extend import Attention, Experts, Glu, Layer, Rope, component, vector
from jaxpar.sharding.mesh import make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step import state
from jaxpar.training import initial_weights
from jaxpar.training.chosen import Chosen
from tests.checkpoint.test_checkpoint import assert_same_bits, logical, save, write_dataset
from tests.slow import slow
from tests.tiny import STATE

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

BLOCK = Layer("block", Attention(num_heads=4, num_kv_heads=2, head_dim=4), Glu(24))


def with_mixer(name: str, **fields) -> Layer:
    return dataclasses.replace(BLOCK, name=name, mixer=dataclasses.replace(BLOCK.mixer, **fields))


LOCAL = with_mixer("local", window=8)
NORMED = with_mixer("normed", qk_norm=QkNorm(), sinks=True)
DEEP = [BLOCK] * 24
WINDOWS = [LOCAL] * 6 + [BLOCK] * 18
MIXED = ([LOCAL] + [BLOCK] * 3) * 6

PIPELINE = {"parallel.pipeline": 2, "parallel.num_microbatches": 2, "parallel.zero": 1}
VIRTUAL = PIPELINE | {"parallel.virtual_stages": 2}
UNEQUAL = PIPELINE | {"parallel.layers_per_stage": (13, 11)}
AVERAGE = {"optimizer.ema.decay": 0.9}
EIGHT_BITS = {"optimizer.first_moment_dtype": "8bit", "optimizer.second_moment_dtype": "8bit"}


@pytest.fixture
def setup(tmp_path, devices):
    """(layers, fields of the config) -> (the resolved config, its mesh)."""
    data = write_dataset(tmp_path / "data")
    places = {"run.dir": str(tmp_path / "run"), "data.path": data, "parallel.data": 1}
    base = config.replace(Config(), **STATE, **places)

    def make(layers, **values):
        model = config.Model(d_model=16, vocab_size=32, layers=layers)
        cfg = config.replace(base, **{"model": model} | values)
        p = cfg.parallel
        n = p.pipeline * p.data * p.tensor * p.replica
        return resolve(cfg, n), make_mesh(cfg.parallel, devices[:n])

    return make


def of_layers(tree, cfg: Config, rows: int = 0) -> list[dict[str, np.ndarray]]:
    """The arrays of each layer in order, from trees of stacks. Args: rows: the dim of layers."""
    found = []
    for stack, i in cfg.model.places:
        found.append({n: np.take(a, i, axis=rows) for n, a in flat(tree[stack]).items()})
    return found


def trees_of(found: state.TrainState) -> dict[str, dict]:
    """The trees of a logical state with the names of weights."""
    adam = found.opt_state[0]
    trees = {"params": found.params, "mu": adam.mu, "nu": adam.nu}
    return trees | ({"ema": found.extra["ema"]} if "ema" in found.extra else {})


def assert_by_place(now, cfg: Config, then, there: Config) -> None:
    """Check all weights that a layer of both has, and everything outside the layers."""
    assert int(now.step) == int(then.step)
    for name, tree in trees_of(now).items():
        before = trees_of(then)[name]
        for new, old in zip(of_layers(tree, cfg), of_layers(before, there), strict=True):
            assert new.keys() >= old.keys()
            assert_same_bits({n: new[n] for n in old}, old)
        for outside in ("embed", "head", "final_norm"):
            assert_same_bits(tree[outside], before[outside])


@pytest.mark.parametrize(
    ("layers", "before", "after"),
    [
        (WINDOWS, {"parallel.data": 2}, {"parallel.tensor": 2}),
        (MIXED, PIPELINE, PIPELINE | {"parallel.data": 2}),
        (MIXED, UNEQUAL | AVERAGE, {"parallel.data": 2, **AVERAGE}),
        slow([LOCAL] * 24, VIRTUAL, UNEQUAL),
        slow([LOCAL] * 24, UNEQUAL, VIRTUAL),
        slow(MIXED, EIGHT_BITS, PIPELINE | EIGHT_BITS),
        slow(WINDOWS, {}, {"optimizer.offload": True}),
    ],
)
def test_layers_with_other_names_keep_their_arrays(setup, capfd, layers, before, after):
    there, mesh = setup(DEEP, **before)
    then = logical(save(there, mesh, 3), there)
    cfg, mesh = setup(layers, **after)
    found = restore(cfg, mesh)
    assert_by_place(logical(found, cfg), cfg, then, there)
    assert jax.tree.map(lambda a: a.sharding, found) == state.state_shardings(cfg, mesh)
    said = capfd.readouterr().out
    at = {"WINDOWS": "0-5", "MIXED": "0, 4, ..., 20"}
    which = at["WINDOWS"] if layers is WINDOWS else at["MIXED"] if layers is MIXED else "0-23"
    assert f"places     layers {which}: block -> local, 9 weights each\n" in said


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["adamw", *map(slow, ("muon", "adafactor", "lion"))])
def test_a_checkpoint_of_the_new_layers_is_read_by_the_old_ones(setup, tmp_path, rule):
    there, mesh = setup(DEEP, **{"optimizer.name": rule})
    then = save(there, mesh, 3)
    cfg, _ = setup(MIXED, **{"optimizer.name": rule})
    now = restore(cfg, mesh)
    cfg = config.replace(cfg, **{"run.dir": str(tmp_path / "changed")})
    with Checkpointer(cfg) as checkpointer:
        checkpointer.save(now, 3, tokens_seen=0)
    assert_same_bits(restore(cfg, mesh), now)
    back = config.replace(there, **{"run.dir": cfg.run.dir})
    assert_same_bits(restore(back, mesh), then)


#: In layers that had none of them, and beside layers that had.
NEW_WEIGHTS = [
    slow(DEEP, [NORMED] * 6 + [BLOCK] * 18, range(6)),
    ([NORMED, BLOCK] * 12, [dataclasses.replace(NORMED, name="all")] * 24, range(1, 24, 2)),
]


@pytest.mark.parametrize(("layers", "changed", "new"), NEW_WEIGHTS)
def test_new_weights_begin_as_in_a_new_run(setup, capfd, layers, changed, new):
    there, mesh = setup(layers, **AVERAGE)
    then = logical(save(there, mesh, 3), there)
    cfg, mesh = setup(changed, **AVERAGE, **{"parallel.data": 2})
    now = logical(restore(cfg, mesh), cfg)
    assert_by_place(now, cfg, then, there)
    initial = trees_of(logical(state.init_state(cfg, mesh), cfg))
    names = {"q_norm", "k_norm", "sinks"}
    for kind, tree in trees_of(now).items():
        for i, (found, begun) in enumerate(
            zip(of_layers(tree, cfg), of_layers(initial[kind], cfg), strict=True)
        ):
            before = of_layers(trees_of(then)[kind], there)[i]
            wanted = begun if i in new else before
            assert names <= wanted.keys() or names.isdisjoint(found)
            assert_same_bits(*({n: of[n] for n in names & of.keys()} for of in (found, wanted)))
    assert "9 weights each; new, initialized: k_norm, q_norm, sinks\n" in capfd.readouterr().out


def test_weights_that_a_layer_no_longer_has_are_dropped(setup, capfd):
    there, mesh = setup([NORMED, BLOCK] * 2)
    then = logical(save(there, mesh, 3), there)
    cfg, mesh = setup([LOCAL, BLOCK] * 2)
    now = logical(restore(cfg, mesh), cfg)
    for new, old in zip(of_layers(now.params, cfg), of_layers(then.params, there), strict=True):
        assert_same_bits(new, {name: old[name] for name in new})
    said = capfd.readouterr().out
    assert "layers 0, 2: normed -> local, 9 weights each; dropped: " in said
    assert "layers 1, 3: block -> block, 9 weights each\n" in said


EXPERTS = dataclasses.replace(
    BLOCK, name="sparse", feed_forward=Experts(expert=Glu(24), num_experts=4, experts_per_token=2)
)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (
            [BLOCK, with_mixer("wide", head_dim=8), BLOCK, BLOCK],
            r"model\.wide: w[qkvo] .*has the shape \[.*8.*\], layer 1, and the checkpoint of step "
            r"3 has \[.*4.*\] there, in block/w[qkvo]\. Fix: set its sizes back, or use a new run",
        ),
        ([EXPERTS] * 4, r"model\.sparse: w_\w+ .*has the shape .*4.*, layer 0, and .* in block/w_"),
        (
            [with_mixer("block", window=8)] * 4,
            r"model\.block\.mixer\.window = 8: the checkpoint of step 3 has None in a layer of "
            r"this name.*set it back to None, or give the layers that change another name",
        ),
        (
            [with_mixer("block", rope=Rope(theta=1e6))] * 4,
            r"model\.block\.mixer\.rope\.theta = 1000000\.0: .* set it back to 500000\.0, or",
        ),
        (
            [dataclasses.replace(BLOCK, feed_forward=Glu(24, bias=True))] * 4,
            r"model\.block\.feed_forward\.bias = True: .* set it back to False, or",
        ),
        ([BLOCK] * 2 + [LOCAL] * 4, r"model\.num_layers = 6: .* has 4 layers.* set it back to 4"),
    ],
    ids=["head_dim", "experts", "name", "inside", "default", "number"],
)
def test_other_changes_are_refused_before_an_array_is_read(setup, monkeypatch, layers, said):
    there, mesh = setup([BLOCK] * 4)
    save(there, mesh, 3)
    cfg, mesh = setup(layers)
    monkeypatch.setattr(loading, "_load_whole", None)
    with pytest.raises(ConfigError, match=said):
        check_resumable(cfg, read_saved(cfg.run.dir))
    with pytest.raises(ConfigError, match=said):
        restore(cfg, mesh)


@component
class Doubled(Attention):
    """A user's mixer, with a weight of its own."""

    def weights(self, model):
        return {**super().weights(model), "gain": vector((4,), ("head_dim",), "ones")}

    def attending(self, q, k, v, w):
        return q * 2, k, v * w["gain"]


def test_a_run_begins_with_weights_of_classes_that_it_lacks(setup, tmp_path):
    """Reading the other run imports no code, and its config names a class of none of ours."""
    own = Layer("own", Doubled(**vars(BLOCK.mixer)), Glu(24))
    there, mesh = setup([own, BLOCK] * 2)
    then = logical(save(there, mesh, 3), there)
    cfg, mesh = setup([LOCAL, BLOCK] * 2, **{"run.init_from": there.run.dir})
    origin = initial_weights.find(cfg, Chosen(there.run.dir, 3))
    found = initial_weights.state(cfg, mesh, origin, lambda _: None)
    now = logical(found, cfg).params
    for new, old in zip(of_layers(now, cfg), of_layers(then.params, there), strict=True):
        assert_same_bits(new, {name: old[name] for name in new})


@pytest.mark.parametrize("weights", ["trained", "ema"])
def test_weights_alone(setup, weights):
    there, mesh = setup([BLOCK] * 4, **AVERAGE)
    then = trees_of(logical(save(there, mesh, 3), there))
    cfg, mesh = setup([LOCAL, BLOCK] * 2, **{"parallel.tensor": 2}, **AVERAGE)
    found = jax.device_get(restore_params(cfg.run.dir, cfg, mesh, weights=weights))
    wanted = then["params" if weights == "trained" else "ema"]
    for new, old in zip(of_layers(found, cfg), of_layers(wanted, there), strict=True):
        assert_same_bits(new, old)


DILOCO = {"diloco.every": 10, "parallel.replica": 2}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [DILOCO, DILOCO | PIPELINE])
def test_replicas_of_diloco(setup, fields):
    there, mesh = setup([BLOCK] * 4, **DILOCO)
    then = logical(save(there, mesh, 3), there)
    cfg, mesh = setup([LOCAL, NORMED] * 2, **fields)
    now = logical(restore(cfg, mesh), cfg)
    pairs = [
        (0, now.params, then.params),
        (0, now.extra["diloco"]["momentum"], then.extra["diloco"]["momentum"]),
        (1, now.extra["diloco"]["weights"], then.extra["diloco"]["weights"]),
        (1, now.opt_state[0].mu, then.opt_state[0].mu),
    ]
    for rows, new, old in pairs:
        layers = zip(of_layers(new, cfg, rows), of_layers(old, there, rows), strict=True)
        for found, wanted in layers:
            assert_same_bits({n: found[n] for n in wanted}, wanted)


COMPRESSED = {"parallel.replica": 2, "parallel.replica_reduction": "int8"}


def test_errors_of_compressed_sums(setup):
    there, mesh = setup([BLOCK] * 4, **COMPRESSED)
    then = logical(save(there, mesh, 3), there).extra["feedback"]["errors"]
    cfg, mesh = setup([LOCAL, NORMED] * 2, **COMPRESSED)
    now = logical(restore(cfg, mesh), cfg).extra["feedback"]["errors"]
    assert_same_bits(now["embed"], then["embed"])
    for new, old in zip(of_layers(now, cfg), of_layers(then, there), strict=True):
        assert_same_bits({n: new[n] for n in old}, old)
