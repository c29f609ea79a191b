"""The program `python -m jaxpar.certify`: what it prints, when it fails, what it refuses."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from jaxpar.certification import distances, small_config, traces
from jaxpar.certification import meshes as verification_meshes
from jaxpar.certification.meshes import MOST_DEVICES
from jaxpar.commands import call
from jaxpar.components.attention import Attention
from jaxpar.components.experts import Experts
from jaxpar.components.feed_forward import Glu
from jaxpar.components.model import Layer
from jaxpar.components.recurrent import Recurrent
from jaxpar.config import (
    Config,
    ConfigError,
    DataConfig,
    Model,
    ParallelConfig,
    Rope,
    RopeScaling,
    replace,
)
from jaxpar.config.config_file import known_configs, load_config
from jaxpar.config.validate import resolve
from jaxpar.model import parameters
from jaxpar.parallel import gradients
from jaxpar.sharding import params
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step import links, train_step

#: As little as shrinking and overrides leave.
TINY = ["quickstart", "--model.num-layers", "2", "--model.vocab-size", "32"]

# Verify must find the session's devices started.
pytestmark = pytest.mark.usefixtures("quick_compile", "devices")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["--parallel.replica-reduction", "int8"], ["--diloco.every", "4"]]
)
def test_what_needs_replicas_does_not_stop_the_others(words, capsys):
    replicas = ["--parallel.replica", "2", "--parallel.data", "1"]
    mesh = ["--mesh", "replica=2", "--steps", "0"]
    assert call("certify", [*TINY, *mesh, *replicas, *words]) == 0
    assert "comparisons agree" in capsys.readouterr().out


def test_meshes_agree(capsys):
    code = call("certify", [*TINY, "--mesh", "data=2,tensor=2,zero=1", "--steps", "2"])
    shown = capsys.readouterr().out
    assert code == 0
    assert "float32, highest matmul precision" in shown and "layers x 2" in shown
    assert "weights after" in shown
    (row,) = [line for line in shown.splitlines() if line.startswith("data=2,tensor=2,zero=1")]
    assert "same bits" in row and re.search(r" ok, \d+ s$", row)
    assert re.search(r"^(\d+) of \1 comparisons agree$", shown, re.MULTILINE)


def test_checks_that_are_left_out_are_named(capsys):
    assert call("certify", [*TINY, "--mesh", "data=2", "--check", "text"]) == 0
    shown = capsys.readouterr().out
    assert "not run: meshes: every comparison: --check leaves it out" in shown


def test_what_cannot_run_is_named():
    cfg = small_config.float32(load_config("quickstart"))
    meshes = verification_meshes.parse_meshes(["data=2", "data=4,tensor=4"], cfg.parallel)
    small = small_config.shrink(cfg, list(meshes.values()))
    found, left_out = verification_meshes.resolve_meshes(small, meshes, 2, given=False)
    assert [*found] == ["data=2"]
    assert "needs 16 devices, but there are 2" in left_out["data=4,tensor=4"]
    with pytest.raises(ConfigError, match="no default mesh fits"):
        verification_meshes.resolve_meshes(small, meshes, 1, given=False)


@pytest.mark.slow
def test_adapters_leave_the_biases_of_routers_alone():
    """A step of the plain model has the same frozen weights as one of training."""
    cfg = load_config("quickstart_moe")
    router = "model.layers.feed_forward.router"
    fields = {f"{router}.balancing_bias": True, f"{router}.score": "sigmoid"}
    fields |= {"lora.rank": 2, "lora.targets": ("q_proj", "o_proj"), "train.balance_loss": 0.0}
    meshes = verification_meshes.parse_meshes(["data=2"], cfg.parallel)
    small = small_config.shrink(small_config.float32(cfg), list(meshes.values()))
    small = replace(small, **fields, **{"model.num_layers": 1, "parallel": meshes["data=2"]})
    on_mesh = resolve(small_config.steady(small), 2)
    batches = [traces.random_batch(on_mesh)]
    plain = traces.reference_trace(on_mesh, batches, 1)
    biases = [name for name in plain.init if name.endswith("router_bias")]
    assert biases
    for name in biases:
        np.testing.assert_array_equal(plain.params[name], plain.init[name])
    assert any((plain.params[n] != plain.init[n]).any() for n in plain.init if "lora_b" in n)
    found = traces.mesh_trace(
        on_mesh, make_mesh(on_mesh.parallel, jax.devices()[:2]), batches, 1, traces.QUICK_COMPILE
    )
    zero = distances.zero_gradients(on_mesh.model)
    assert not distances.compare(found, plain, 1e-5, zero).mismatches()


def test_a_wrong_gradient_fails_and_is_named(capsys, monkeypatch):
    def reduce_wrongly(grads, specs):
        return grads | {"final_norm": grads["final_norm"] * 1.001}

    right = gradients.reduce_gradients
    wrong = lambda g, s, axes: reduce_wrongly(right(g, s, axes), s)  # noqa: E731
    monkeypatch.setattr(links, "reduce_gradients", wrong)
    code = call("certify", [*TINY, "--mesh", "data=2", "--steps", "0"])
    shown = capsys.readouterr().out
    assert code == 1
    assert "MISMATCH" in shown
    assert "data=2: gradient of final_norm is off by 1.0e-03, allowed 1.0e-05" in shown
    assert "backward: final_norm, off by 1.0e-03; the forward is right" in shown
    assert "smallest mesh that shows it: data=1" in shown


@pytest.mark.parametrize(
    ("rounding", "allowed"), [(0.0, 1e-5), (2e-6, 1e-5), (5e-6, 2e-5), (1e-2, 1e-4)]
)
def test_rounding_raises_a_tolerance_within_limits(rounding, allowed):
    assert distances.gradient_tolerance(1e-5, rounding) == pytest.approx(allowed)


@pytest.mark.slow
def test_gradients_of_twice_the_size_fail(capsys, monkeypatch):
    """Adam with the config's eps would not know."""
    clip = train_step.clip
    monkeypatch.setattr(train_step, "clip", lambda *of: jax.tree.map(lambda g: 2 * g, clip(*of)))
    code = call("certify", [*TINY, "--mesh", "data=2", "--steps", "2"])
    shown = capsys.readouterr().out
    assert code == 1
    assert "data=2: weights after 2 steps of" in shown and "gradient of" not in shown


def test_a_larger_eps_is_kept():
    cfg = load_config("quickstart")
    raised = small_config.steady(cfg).optimizer.eps
    assert cfg.optimizer.eps < raised < 1e-3
    assert small_config.steady(replace(cfg, **{"optimizer.eps": 0.5})).optimizer.eps == 0.5


def test_every_kind_of_mismatch_is_told():
    wrong = distances.Comparison(
        tolerance=1e-5,
        differing=["embed"],
        loss=1e-3,
        gradient=(2e-3, "head"),
        update=(3e-3, "layers/wq"),
    )
    assert [line.split()[1] for line in wrong.mismatches()] == [
        "initial",
        "loss",
        "gradient",
        "weights",
    ]
    assert not distances.Comparison(1e-5, [], 1e-6, (9e-6, "head"), (1e-4, "head")).mismatches()


def test_not_a_number_is_never_close():
    nan, one = {"w": np.full(2, np.nan, np.float32)}, {"w": np.ones(2, np.float32)}
    zero = {"w": np.zeros(2, np.float32)}
    for found in (nan, one):
        assert distances.gradient_errors(found, zero) == {"w": np.inf}
    assert (
        distances.gradient_errors(nan, one)
        == distances.update_errors(nan, one, zero)
        == {"w": np.inf}
    )
    assert distances.gradient_errors(zero, zero) == {"w": 0.0}


def test_a_mesh_may_set_a_float():
    name = "expert=2,expert_slack=0.5,expert_dispatch=rows"
    (mesh,) = verification_meshes.parse_meshes([name], Config().parallel).values()
    assert (mesh.expert, mesh.expert_slack, mesh.expert_dispatch) == (2, 0.5, "rows")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "CONFIG"),
        (["no_such_config"], "is not a config"),
        (["quickstart", "--mesh", "dta=2"], "'dta=2' is not a field=value.*pipeline, replica"),
        (["quickstart", "--mesh", "data"], "is not a field=value"),
        (["quickstart", "--mesh", "data=two"], "data must be a positive integer"),
        (["quickstart", "--mesh", "data=0"], "data must be a positive integer"),
        (["quickstart", "--mesh", "data=2,data=2"], "given twice"),
        (["quickstart", "--mesh", "expert_slack=few"], "'few' is not a number. Fix: use expert_s"),
        (
            ["quickstart_moe", "--mesh", "expert=2,expert_slack=nan"],
            "expert_slack = nan: must be finite",
        ),
        (["quickstart", "--mesh", "context=star"], "must be one of allgather, ring, ulysses"),
        (
            [
                "quickstart",
                "--mesh",
                "data=2,gather_dtype=float8",
                "--compute.matmul-dtype",
                "float8",
            ],
            "sets gather_dtype, but certify compares in float32. Fix: remove gather_dtype=float8",
        ),
        (["quickstart", "--mesh", "data=2,grad_reduce=bfloat16"], "sets grad_reduce"),
        (["quickstart", "--mesh", "data=32"], "needs 32 devices.*--run.cpu-devices 32"),
        (["quickstart", "--full", "--mesh", "tensor=5"], r"parallel\.tensor = 5"),
        (
            ["quickstart_moe", "--model.layers.feed-forward.experts-per-token", "1"],
            "_token = 1: leaves the router without a gradient",
        ),
        (["llama3_8b", "--full", "--mesh", "data=2"], "8030261248.*leave out --full"),
        (["quickstart", "--tolerance", "2"], "must be between 0 and 1"),
        (["quickstart", "--check", "meshs"], "must be one of tracing, .* use --check meshes"),
        (["quickstart", "--steps", "-1"], "must not be negative"),
        (["quickstart", "--steps", "few"], "--steps = 'few': must be a whole number"),
        (
            ["quickstart", "--mesh", "data=2", "--train.global-batch-size", "16777216"],
            r"needs .* GiB of memory for 2 CPU devices",
        ),
        (["quickstart", "--run.cpu-devices", "-1"], "must not be negative"),
        (["quickstart", "--run.cpu-devices", "10000000"], "must be at most 4,096"),
        (["quickstart", "--steps", str(10**12)], "must be at most 10,000"),
        (["quickstart", "--mesh", "data=100000000"], "data must be at most 1,048,576"),
        (
            ["quickstart", "--mesh", "data=4096,tensor=2"],
            "has 8,192 devices, and must have at most",
        ),
        (["quickstart", "--mesh", "data=2,virtual_stages=99999"], "virtual_stages must be at most"),
        (["quickstart", "--model.d-modle", "8"], "is not a field"),
        (["quickstart", "--model.*.mixer.num-kv-heads", "0"], "heads = 0: must be at"),
        (["quickstart", "--model.*.mixer.head-dim", "0"], "dim = 0: must be at least"),
        (["quickstart", "--data.seq-len", "0"], "seq_len = 0: must be at least"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        call("certify", arguments)


@pytest.mark.parametrize("use", [[], ["--mup"]])
def test_print_config_compares_nothing(use, capsys):
    with pytest.raises(SystemExit) as stop:
        call("certify", [*use, *TINY[:1], "--model.num-layers", "2", "--print-config"])
    assert stop.value.code == 0
    assert json.loads(capsys.readouterr().out)["model"]["layers"]["order"] == [0, 0]


def test_help_documents_every_option(capsys):
    with pytest.raises(SystemExit) as stop:
        call("certify", ["--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    named = "--mesh --steps --full --tolerance --run.cpu-devices --model.d-model"
    for option in named.split():
        assert option in shown


@pytest.mark.parametrize("name", known_configs().split(", "))
def test_every_config_shrinks_to_fit_the_default_meshes(name):
    cfg = small_config.float32(load_config(name))
    meshes, left_out = verification_meshes.default_meshes(cfg, MOST_DEVICES)
    small = small_config.shrink(cfg, list(meshes.values()))
    for parallel in meshes.values():
        resolve(replace(small, parallel=parallel), verification_meshes.num_devices(parallel))
    assert len(meshes) >= 6 and all(left_out.values())
    layers = [layer.name for layer in small.model.layers]
    assert all(layers.count(name) >= 2 for name in layers) or len(cfg.model.layers) < 2
    assert params.count(parameters.param_specs(small.model)) < 4_000_000
    assert small.model.tie_embeddings == cfg.model.tie_embeddings
    there = {layer.name: layer for layer in cfg.model.layers}
    assert {layer.name for layer in small.model.layers} == there.keys()
    for layer in small.model.layers:
        one, other = layer.mixer, there[layer.name].mixer
        assert type(one) is type(other) and layer.norms == there[layer.name].norms
        assert type(layer.feed_forward) is type(there[layer.name].feed_forward)
        if isinstance(one, Attention) and isinstance(other, Attention):
            assert one.num_heads * other.num_kv_heads == other.num_heads * one.num_kv_heads
            assert (one.qk_norm, one.bias, one.is_local) == (
                other.qk_norm,
                other.bias,
                other.is_local,
            )
            assert (one.rope and one.rope.theta) == (other.rope and other.rope.theta)
    least = (
        small_config.RECURRENT_EPS
        if any(isinstance(layer.mixer, Recurrent) for layer in cfg.model.layers)
        else 0.0
    )
    assert small.model.norm.eps == max(cfg.model.norm.eps, least)


def test_a_composed_model_shrinks_by_its_components():
    local = Attention(num_heads=32, num_kv_heads=8, head_dim=128, window=1024)
    everywhere = dataclasses.replace(local, window=None)
    experts = Experts(expert=Glu(d_ff=2048), num_experts=64, experts_per_token=6)
    start = Layer("start", everywhere, Glu(d_ff=8192))
    period = [Layer("local", local, experts), Layer("global", everywhere, experts)]
    model = Model(layers=(start, *period * 16), d_model=4096, vocab_size=128_000)
    cfg = Config(model=model, data=DataConfig(seq_len=8192), parallel=ParallelConfig(data=2))
    named = {"a": "data=2,tensor=2", "b": "pipeline=2,sequence=2", "c": "expert=4"}
    meshes = list(verification_meshes.parse_meshes([*named.values()], cfg.parallel).values())
    small = small_config.shrink(small_config.float32(cfg), meshes)
    for parallel in meshes:
        resolve(replace(small, parallel=parallel), verification_meshes.num_devices(parallel))
    assert [layer.name for layer in small.model.layers] == ["start"] * 2 + ["local", "global"] * 2
    _, first, second, *_ = small.model.layers
    assert isinstance(first.mixer, Attention) and isinstance(second.mixer, Attention)
    assert (first.mixer.num_heads, first.mixer.num_kv_heads, first.mixer.head_dim) == (8, 2, 8)
    assert (first.mixer.window, second.mixer.window) == (None, 4)
    assert isinstance(second.feed_forward, Experts)
    assert second.feed_forward.expert.d_ff == 32 and second.feed_forward.num_experts == 8
    assert params.count(parameters.param_specs(small.model)) < 400_000


def shrunk(mesh: str, **fields) -> Config:
    """`shrink` of llama_100m for a mesh, on it."""
    cfg = replace(load_config("llama_100m"), **fields)
    (parallel,) = verification_meshes.parse_meshes([mesh], cfg.parallel).values()
    return replace(small_config.shrink(cfg, [parallel]), parallel=parallel)


MIXER = "model.layers.mixer"


def test_shrinking_keeps_windows_in_proportion():
    rope = Rope(scaling=RopeScaling(original_max_position=8192))
    fields = {"data.seq_len": 8192, f"{MIXER}.window": 4096, f"{MIXER}.rope": rope}
    small = shrunk("data=2", **fields)
    mixer = small.model.layers[0].mixer
    assert mixer.window * 2 == mixer.rope.scaling.original_max_position == small.data.seq_len


@pytest.mark.parametrize(("window", "small"), [(64, 4), (2, 2)])
def test_no_window_shrinks_to_a_token(window, small):
    found = shrunk("data=2", **{"data.seq_len": 8192, f"{MIXER}.window": window})
    assert found.model.layers[0].mixer.window == small


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        ("data=3,row_groups=2,layer_loop=unroll", {}),
        (
            "data=2",
            {"model.layers.feed_forward.d_ff": 16}
            | {"lora.rank": 8, "lora.targets": ("q_proj", "gate_proj")},
        ),
    ],
)
def test_a_shrunk_config_keeps_the_rules(mesh, fields):
    small = shrunk(mesh, **fields)
    resolve(small, verification_meshes.num_devices(small.parallel))
