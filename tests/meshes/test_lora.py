"""Only adapters are trained, on every mesh as in the plain model, and cost nothing else.

An adapter's second matrix starts at 0, and with it the first one's gradient: gradients are compared
where both are random, training where it starts.
"""

import functools
import math
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.certification import distances, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.config import Config, ConfigError, Experts, Glu, Router, replace
from jaxpar.config.lists.lora_targets import adapted, targets_of
from jaxpar.config.validate import check, resolve
from jaxpar.model import lora
from jaxpar.model.parameters import param_specs, trainable_specs
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.sharding.params import count, flat, split
from jaxpar.step.adapters import base_config, merge
from jaxpar.step.state import TrainState, abstract_state, init_state, state_shardings, to_running
from jaxpar.step.train_step import make_eval_step, make_gradient_step, make_train_step
from tests import weights
from tests.extend.test_components import ATTENTION, LAYERS, Layer, Products, Sine, component, config
from tests.meshes.test_meshes import BASE as PLAIN
from tests.meshes.test_meshes import TOLERANCE
from tests.slow import slow, slow_but
from tests.tiny import EXPERTS, remat_of

BASE = replace(PLAIN, **{"lora.rank": 3, "lora.alpha": 6.0})

MESHES = """
data=1
data=2,layer_loop=unroll
replica=2,data=2,num_microbatches=2
data=2,num_microbatches=2,zero=1,layer_loop=unroll
data=2,num_microbatches=2,zero=2,layer_loop=unroll
tensor=4
data=2,tensor=2,layer_loop=unroll,row_groups=2
sequence=2,context=ring
data=2,expert=2
pipeline=2,num_microbatches=4
pipeline=2,num_microbatches=2,virtual_stages=2,pipeline_save=inputs,zero=1,tensor=2
pipeline=2,num_microbatches=2,layer_loop=unroll,data=2
pipeline=2,data=2,sequence=2,tensor=2,num_microbatches=2
pipeline=2,num_microbatches=4,schedule=gpipe,zero=1,layer_loop=unroll
""".split()

VARIANTS = {
    "attention, rank stabilized": (
        {"lora.targets": ("k_proj", "o_proj"), "lora.rank_stabilized": True},
        "pipeline=2,num_microbatches=2",
    ),
    "tied embeddings, biases, some targets": (
        {
            "model.tie_embeddings": True,
            "model.layers.mixer.bias": True,
            "model.layers.feed_forward.bias": True,
            "lora.targets": ("q_proj", "down_proj"),
        },
        "data=2,tensor=2",
    ),
    "experts": (
        {
            "model.layers.feed_forward": Experts(
                expert=Glu(24, bias=True),
                num_experts=4,
                experts_per_token=2,
                router=Router(linear_bias=True),
            ),
            "lora.targets": ("q_proj", "k_proj", "v_proj", "o_proj"),
        },
        "expert=2,data=2,tensor=2,layer_loop=unroll",
    ),
}


@component
class Plain(Products):
    """Declares adapters, and gets plain arrays."""

    uses_products: ClassVar[bool] = False


MORE_LAYERS = LAYERS | {
    "bare": [Layer("block", None, Sine(width=12))] * 2,
    "plain": [Layer("block", ATTENTION, Plain(width=12))] * 2,
}
COMPOSED = {name: {"model": config(*layers).model} for name, layers in MORE_LAYERS.items()}
OF_ATTENTION, OF_ONE = ({"lora.targets": names} for names in (("q_proj", "o_proj"), ("gate_proj",)))

#: Composed models: adapters in some stacks, or in a component of a user.
OF_COMPONENTS = [
    slow("data=2,tensor=2", COMPOSED["sigmoid"]),
    slow("pipeline=2,num_microbatches=2,tensor=2", COMPOSED["deep"]),
    slow("sequence=2,data=2", COMPOSED["windows"]),
    slow("data=2,tensor=2,layer_loop=unroll", COMPOSED["mean"] | OF_ONE),
    slow("data=2,num_microbatches=2,zero=1,layer_loop=scan", COMPOSED["mean"] | OF_ATTENTION),
    slow("pipeline=2,data=2,num_microbatches=2", COMPOSED["mean"] | OF_ATTENTION),
    slow("expert=2,tensor=2", COMPOSED["experts"]),
    slow(
        "data=2,tensor=2",
        COMPOSED["products"] | {"lora.targets": ("sine_down", "sine_up", "v_proj")},
    ),
]


def on_mesh(item: str, devices, cfg: Config = BASE):
    """The config for a mesh item such as "data=2,zero=1", and the mesh."""
    parallel = parse_meshes([item], cfg.parallel)[item]
    n = math.prod(axis_sizes(parallel))
    return resolve(replace(cfg, parallel=parallel), n), make_mesh(parallel, devices[:n])


@functools.cache
def trained_params(cfg: Config) -> dict:
    """Parameters whose adapters all add something, as logical arrays on the host."""
    params = weights.values_of(tuple(flat(param_specs(cfg.model, cfg.lora)).items()), 5)
    rng = np.random.default_rng(0)
    of_b = lambda w: rng.normal(0, 0.2, w.shape).astype(np.float32)  # noqa: E731
    return params | {
        stack: {name: of_b(w) if name.endswith(lora.B) else w for name, w in layers.items()}
        for stack, layers in params.items()
        if isinstance(layers, dict)
    }


@functools.cache
def wanted(cfg: Config):
    """Loss and gradients of the plain model."""
    gradients = jax.jit(lambda p, b: traces.reference_gradients(p, b, cfg))
    loss, grads = gradients(trained_params(cfg), traces.random_batch(cfg))
    return float(loss), traces.to_host(grads)


def placed(params, cfg: Config, mesh):
    """Logical parameters as the step of a mesh holds them."""
    put = jax.device_put(params, state_shardings(cfg, mesh).params)
    return to_running(TrainState((), put, ()), cfg).params


def compare(cfg: Config, item: str, devices) -> None:
    plain = replace(cfg, parallel=Config().parallel)
    cfg, mesh = on_mesh(item, devices, cfg)
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    params = placed(trained_params(plain), cfg, mesh)
    measured, grads = make_gradient_step(cfg, mesh)(params, batch)
    loss, wanted_grads = wanted(plain)
    assert float(measured["loss"]) == pytest.approx(loss, rel=TOLERANCE)
    assert all(np.abs(g).max() > 0 for g in wanted_grads.values())
    error, name = distances.worst(
        distances.gradient_errors(traces.logical(grads, cfg), wanted_grads)
    )
    assert error < TOLERANCE, name


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("mesh", slow_but(MESHES[5:6], MESHES))
def test_gradients_are_those_of_the_plain_model(mesh, devices):
    compare(BASE, mesh, devices)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_variants(variant, devices):
    fields, mesh = VARIANTS[variant]
    compare(replace(BASE, **fields), mesh, devices)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(("mesh", "fields"), OF_COMPONENTS)
def test_gradients_of_composed_models(mesh, fields, devices):
    compare(replace(BASE, **fields), mesh, devices)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("remat", ["full", "none", "qkv,gate_up"])
def test_remat_policies(remat, devices):
    compare(replace(BASE, **{"parallel.remat": remat_of(remat)}), "data=2", devices)


@pytest.mark.slow  # quicker: e2e/test_lora.py moves nothing but adapters
@pytest.mark.usefixtures("quick_compile")
def test_training_moves_adapters_alone(devices):
    base = replace(BASE, **{"model.num_layers": 2})
    cfg, mesh = on_mesh("data=2,tensor=2", devices, base)
    batches = [traces.random_batch(cfg, i) for i in range(3)]
    plain = traces.reference_trace(base, batches, 3)
    found = traces.mesh_trace(cfg, mesh, batches, 3)
    assert not distances.compare(found, plain, TOLERANCE).mismatches()
    moved = set(distances.differing_arrays(found.params, found.init))
    assert moved == {name for name in found.init if lora.is_adapter(name)}
    assert moved == set(flat(trainable_specs(cfg))) and len(moved) == 14


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_the_first_step_is_that_of_the_model_without(devices):
    cfg, mesh = on_mesh("data=2", devices)
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    state = init_state(cfg, mesh)
    base = init_state(base_config(cfg), mesh)
    shared = {n: a for n, a in flat(state.params).items() if not lora.is_adapter(n)}
    assert not distances.differing_arrays(traces.to_host(base.params), traces.to_host(shared))
    found = make_eval_step(cfg, mesh)(state.params, batch)
    alone = make_eval_step(base_config(cfg), mesh)(base.params, batch)
    # To float32's last digits: without adapters gate and up are one matmul, and a norm's rows are
    # scaled behind it.
    np.testing.assert_allclose(found[0], alone[0], rtol=5e-7)


def test_moments_are_of_adapters_alone():
    cfg = resolve(BASE, 1)
    adapters, base = count(trainable_specs(cfg)), count(param_specs(cfg.model))
    size = lambda tree: sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree) if a.ndim)  # noqa: E731
    state = abstract_state(cfg)
    assert size(state.opt_state) == 2 * 4 * adapters
    assert size(state.params) == 4 * (base + adapters) and adapters < base / 2
    half = replace(cfg, **{"optimizer.first_moment_dtype": "bfloat16"})
    assert size(abstract_state(half).opt_state) == (2 + 4) * adapters


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Some donated buffers")  # they have no shardings here
@pytest.mark.parametrize(
    "item",
    ["data=2", "data=2,layer_loop=unroll", "pipeline=2,num_microbatches=2,data=2"],
)
def test_no_gradient_of_the_model_is_computed_or_sent(item, devices):
    """Sizes tell products apart: those of a matrix's gradient have both of its sides."""
    sizes = {"model.d_model": 48, "model.vocab_size": 104, "model.num_layers": 2}
    sizes["model.layers.feed_forward"] = Glu(88)
    cfg, mesh = on_mesh(item, devices, replace(BASE, **sizes))
    full, _ = on_mesh(item, devices, base_config(replace(BASE, **sizes)))

    def products(cfg: Config) -> set[tuple[int, ...]]:
        state, batch = abstract_state(cfg), traces.random_batch(cfg)
        text = make_train_step(cfg, mesh).lower(state, batch).as_text()
        found = re.findall(r"(?:dot_general|all_to_all).*-> tensor<([\dx]+)xf32>", text)
        return {tuple(map(int, dims.split("x"))) for dims in found}

    vocab = 104 // axis_sizes(cfg.parallel)[0]
    multiplied, sent = {(48, 88), (176, 48), (48, vocab)}, {(2, 24, 88), (2, 24, vocab)}
    assert multiplied | sent <= products(full), "gate and up are one matrix, of 176"
    of_adapters = products(cfg)
    assert not (multiplied | sent | {(88, 48)}) & of_adapters
    assert {(48, 3), (3, 48), (2, 24, 3)} <= of_adapters


def test_without_adapters_nothing_changes():
    specs = param_specs(PLAIN.model, PLAIN.lora)
    assert flat(specs) == flat(param_specs(PLAIN.model)) == flat(trainable_specs(PLAIN))
    trainable, frozen = split(specs, specs)
    assert trainable is specs and frozen == {}
    w, y = {"wq": jnp.ones((2, 2))}, jnp.ones(2)
    assert lora.with_frozen_base(w) is w and lora.add(y, y, w, "wq") is y


def test_merged_weights_compute_the_same(devices):
    cfg, mesh = on_mesh("data=2,tensor=2,sequence=2", devices)
    params = merge(placed(trained_params(BASE), cfg, mesh), cfg, mesh)
    batch = traces.random_batch(cfg)
    alone = base_config(BASE)
    assert float(jax.jit(lambda p: traces.token_loss(p, batch, alone))(jax.device_get(params))) == (
        pytest.approx(wanted(BASE)[0], rel=1e-6)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_float8_is_of_the_model_and_adapters_are_exact(loop, devices):
    """Rounding of the matrices and of what flows back through them is all that differs."""
    sizes = {"model.d_model": 64, "model.init_std": 0.05}
    sizes |= {"model.layers.mixer.head_dim": 16, "model.layers.feed_forward": Glu(96)}
    exact = replace(BASE, **sizes, **{"parallel.layer_loop": loop})
    eight = replace(exact, **{"compute.matmul_dtype": "float8"})

    def gradients(cfg: Config):
        cfg, mesh = on_mesh("data=2", devices, cfg)
        batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
        step = make_gradient_step(cfg, mesh)
        params = placed(trained_params(exact), cfg, mesh)
        return traces.to_host(step(params, batch)[1])

    found, exactly = gradients(eight), gradients(exact)
    assert found.keys() == exactly.keys()
    norm = lambda a: float(np.linalg.norm(a))  # noqa: E731
    errors = {n: norm(found[n] - g) / norm(g) for n, g in exactly.items()}
    assert 1e-4 < max(errors.values()) < 0.2  # that of test_float8.py


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_offloaded_moments(devices):
    cfg, mesh = on_mesh("data=2", devices)
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    states = []
    for offload in (False, True):
        with_it = replace(cfg, **{"optimizer.offload": offload})
        state, _ = make_train_step(with_it, mesh)(init_state(with_it, mesh), batch)
        states.append(traces.to_host(state.params))
    assert distances.worst(distances.gradient_errors(*states))[0] < 1e-6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora.rank": 0}, r"rank = 0: must be at least 1\. .* --lora\.rank 16, or --lora None\."),
        ({"lora.rank": 17}, r"rank = 17: must be at most 16, the smaller dimension of q_proj"),
        (
            {"lora.rank": 9, "model.layers.mixer.num_kv_heads": 2},
            r"at most 8, the smaller dimension of k_proj",
        ),
        ({"lora.alpha": 0.0}, r"lora\.alpha = 0.0: must be above 0"),
        ({"lora.alpha": math.nan}, r"lora\.alpha = nan: must be finite"),
        ({"lora.targets": ("q_prj",)}, r"must be names from q_proj, .*--lora.targets q_proj\."),
        ({"lora.targets": "q_proj,v_proj"}, r"must be a list of names, .*targets q_proj,v_proj\."),
        ({"lora.targets": ()}, r"lora\.targets = '': must be names"),
        ({"lora.targets": ("q_proj", "lm_head")}, r"must be names from q_proj, "),
        (
            {"lora.targets": ("q_proj", "q_proj")},
            r"must name each projection once.*targets q_proj\.",
        ),
        (
            {"model.layers.feed_forward": EXPERTS},
            r"must be names from q_proj, k_.*; experts have no adapters.*targets q_proj,k_proj,v_",
        ),
        (
            COMPOSED["mean"] | {"lora.targets": ("q_prj", "mean_v")},
            r"must be names from q_proj, .*, down_proj.*targets q_proj\.",
        ),
        (COMPOSED["bare"], r"lora\.rank = 3: needs a weight that declares an adapter.*--lora None"),
        (
            COMPOSED["plain"] | {"lora.targets": ("sine_up",)},
            r"model\.block\.feed_forward: sine_up = 'adapter sine_up': needs a component .*Plain",
        ),
    ],
)
def test_bad_adapters_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        check(replace(BASE, **fields))


def test_every_target_is_a_parameter():
    specs = flat(param_specs(BASE.model, BASE.lora))
    model = BASE.model
    assert list(targets_of(model)) == list(BASE.lora.targets)
    for target in targets_of(model):
        (name,) = adapted(model.layers[0], model, [target])
        pair = [specs[f"layers/{name}{end}"] for end in (lora.A, lora.B)]
        assert all(spec.trainable and 3 in spec.shape for spec in pair), target
        outer = math.prod(pair[0].shape[1:-1]) * math.prod(pair[1].shape[2:])
        assert outer == math.prod(specs[f"layers/{name}"].shape[1:])
    assert jnp.isclose(specs["layers/wo_lora_a"].std ** 2 * 3 * 8 * 4, 1)
