"""Values of experts that a policy saves by name: the backward neither sends nor gathers them again,
and computes the same."""

import functools
import math
import re

import jax
import pytest

from jaxpar.certification import traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.config import ConfigError, RematSlice, RematValue, replace
from jaxpar.config.validate import check, resolve
from jaxpar.parallel.expert import rows
from jaxpar.prediction import experts
from jaxpar.prediction.memory import saved_per_token
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.step.state import init_state
from jaxpar.step.train_step import make_gradient_step
from tests.meshes.test_experts import BASE
from tests.slow import slow_but
from tests.tiny import GLU, remat_of

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")


@functools.cache
def gradients(
    mesh_item: str, names: str, layers: tuple[RematSlice, ...] = ()
) -> tuple[float, float, str]:
    """Loss and gradient norm of a step that saves these names, and its compiled program."""
    cfg = replace(BASE, **{"parallel.remat": remat_of(names), "parallel.remat_layers": layers})
    parallel = parse_meshes([mesh_item], cfg.parallel)[mesh_item]
    n = math.prod(axis_sizes(parallel))
    cfg = resolve(replace(cfg, parallel=parallel), n)
    mesh = make_mesh(parallel, jax.devices()[:n])
    params = init_state(cfg, mesh).params
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    program = make_gradient_step(cfg, mesh).lower(params, batch).compile()
    measured, _ = program(params, batch)
    return float(measured["loss"]), float(measured["grad_norm"]), program.as_text()


def collectives(text: str, kind: str) -> int:
    return len(re.findall(rf" {kind}(?:-start)?\(", text))


SCAN = "expert=2,data=2,layer_loop=scan"

#: Mesh, name, collective, and how many of it are not needed again. The router's weights are always
#: saved; gate, up and down are gathered.
SCANNED = [
    (SCAN, "moe_tokens", "collective-permute", 1),
    (SCAN, "moe_weights", "all-gather", 3),
]
UNROLLED = [
    ("expert=2,layer_loop=unroll", "moe_tokens", "collective-permute", 2 * 1),
    ("data=2,layer_loop=unroll", "moe_weights", "all-gather", 2 * 3),
    ("expert=2,expert_dispatch=rows,layer_loop=unroll", "moe_tokens", "all-to-all", 2 * 1),
]


@pytest.mark.slow  # quicker: the planner counts them
@pytest.mark.parametrize(
    ("mesh", "name", "kind", "fewer"), slow_but(SCANNED[:1], [*SCANNED, *UNROLLED])
)
def test_what_is_saved_does_not_travel_again(mesh, name, kind, fewer, devices):
    loss, norm, text = gradients(mesh, "gate_up")
    saved_loss, saved_norm, with_less = gradients(mesh, f"gate_up,{name}")
    assert collectives(text, kind) - collectives(with_less, kind) == fewer
    assert (loss, norm) == (saved_loss, saved_norm)


def saved(**fields) -> float:
    """Bytes per token and layer of a model in bfloat16 that the planner knows of."""
    cfg = replace(BASE, **{"compute.dtype": "bfloat16", "parallel.data": 1, **fields})
    return saved_per_token(cfg)


@pytest.mark.parametrize("dispatch", ["tokens", "rows"])
def test_the_planner_counts_them(dispatch):
    m, of_layer = BASE.model, BASE.model.layers[0].feed_forward
    axis = {"parallel.expert": 2, "parallel.expert_dispatch": dispatch}
    of = lambda names: saved(**axis, **{"parallel.remat": remat_of(names)})  # noqa: E731
    tokens = BASE.train.global_batch_size // 2 * BASE.data.seq_len
    k, here = of_layer.experts_per_token, of_layer.num_experts // 2
    received = 2 * tokens
    if dispatch == "rows":
        received = 2 * rows.capacity(tokens, k, here, 2, BASE.parallel.expert_slack)
    of_tokens = received * 2 * m.d_model / tokens
    assert of("gate_up,moe_tokens") - of("gate_up") == pytest.approx(of_tokens)
    of_weights = 6 * m.d_model * of_layer.expert.d_ff * here / tokens
    assert of("gate_up,moe_weights") - of("gate_up") == pytest.approx(of_weights)


#: Names of a policy, and how often a layer sends tokens, or sums of theirs.
SENDS = [("gate_up,moe_tokens", 4), ("gate_up", 5), ("attn_out", 5)]


@pytest.mark.parametrize(("names", "count"), SENDS)
def test_the_planner_counts_sends(names, count):
    apart = {"parallel.expert": 2, "parallel.data": 1, "parallel.remat": remat_of(names)}
    cfg = replace(BASE, **apart)
    assert experts.messages(cfg) == count
    by_rows = replace(cfg, **{"parallel.expert_dispatch": "rows"})
    stages = replace(cfg, **{"parallel.pipeline": 2, "parallel.num_microbatches": 2})
    assert experts.messages(by_rows) == experts.messages(stages) == count


@pytest.mark.parametrize(
    ("names", "count", "layers"),
    slow_but(
        [], [*((*sends, ()) for sends in SENDS), ("gate_up", 5, [RematSlice("attn_out", 0, 1)])]
    ),
)
def test_the_program_sends_as_the_planner_counts(names, count, layers, devices):
    """Also if a layer's own policy does not save gate and up, for which it sends tokens again."""
    _, _, text = gradients("expert=2,layer_loop=unroll", names, *layers)
    tokens = BASE.train.global_batch_size // 2 * BASE.data.seq_len
    of_tokens = rf"= \(?f32\[{tokens},{BASE.model.d_model}\][^=]* collective-permute(?:-start)?\("
    assert len(re.findall(of_tokens, text)) == BASE.model.num_layers * count


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"parallel.remat": remat_of("moe_tokens:host")},
            r"on the device only.*--parallel\.remat .\[moe_tokens\]",
        ),
        (
            {
                "parallel.remat": (RematValue("qkv"), RematValue("moe_weights")),
                "parallel.pipeline": 2,
            },
            r"saves moe_weights, of which a pipeline.*--parallel\.remat .\[qkv\]., or .*pipeline 1",
        ),
        (
            {"parallel.remat": remat_of("moe_tokens"), "model.layers.feed_forward": GLU},
            r"remat = '\[moe_tokens\]': names moe_tokens, which only experts have",
        ),
    ],
)
def test_what_cannot_be_saved(fields, said):
    with pytest.raises(ConfigError, match=said):
        check(replace(BASE, **fields))
