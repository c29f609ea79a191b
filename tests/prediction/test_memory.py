"""The predicted state is the true one, byte for byte; saved values are those of the docs."""

import json
from pathlib import Path

import jax
import pytest

from jaxpar.certification import small_config
from jaxpar.config import Config, Experts, Glu, Router, replace
from jaxpar.config.command_line import load_config
from jaxpar.config.remat_policies import REMAT_NAMES
from jaxpar.config.validate import resolve
from jaxpar.prediction.communication import Cluster
from jaxpar.prediction.hardware import A100, GIB, H200, NETWORKS
from jaxpar.prediction.memory import (
    bytes_of_names,
    memory_of,
    on_host_per_token,
    saved_per_token,
)
from jaxpar.prediction.ranking import predict
from jaxpar.prediction.shard import moment_bytes, shard_of, state_bytes
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import abstract_state, bytes_per_device, init_state, state_shardings

CARD = Path(__file__).resolve().parents[2] / "docs/benchmarks/optimizer_state-h100.json"

SMALL = replace(
    small_config.float32(Config()),
    **{"model.vocab_size": 64, "data.seq_len": 64, "train.global_batch_size": 16},
)

MESHES = (
    {"data": 1},
    {"data": 4},
    {"tensor": 2, "data": 2},
    {"pipeline": 2, "tensor": 2, "data": 2, "zero": 1, "num_microbatches": 2},
    {"sequence": 2, "data": 2, "replica": 2},
    {"pipeline": 2, "virtual_stages": 2, "expert": 2, "num_microbatches": 2},
    {"pipeline": 2, "layers_per_stage": (3, 1), "data": 2, "num_microbatches": 2},
)


def on(cfg: Config, mesh: dict) -> Config:
    """The config on that mesh, resolved."""
    fields = {"data": 1} | mesh
    count = 1
    for axis in ("pipeline", "replica", "data", "expert", "sequence", "tensor"):
        count *= fields.get(axis, 1)
    return resolve(replace(cfg, **{f"parallel.{k}": v for k, v in fields.items()}), count)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sgd", "muon", "adafactor"])
def test_state_is_that_of_the_arrays(mesh, optimizer, devices):
    cfg = on(replace(SMALL, **{"optimizer.name": optimizer}), mesh)
    p = cfg.parallel
    count = p.pipeline * p.replica * p.data * p.expert * p.sequence * p.tensor
    to = state_shardings(cfg, make_mesh(p, devices[:count]))
    placed = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract_state(cfg), to
    )
    assert sum(state_bytes(cfg)) == bytes_per_device(placed)
    assert state_bytes(cfg)[0] == bytes_per_device(placed.params)


def test_state_is_what_lies_on_a_device(devices):
    fields = {"optimizer.first_moment_dtype": "bfloat16", "parallel.tensor": 2, "parallel.data": 2}
    fields["model.num_layers"] = 1
    cfg = resolve(replace(SMALL, **fields), 4)
    state = init_state(cfg, make_mesh(cfg.parallel, devices[:4]))
    held = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(state)
        for shard in leaf.addressable_shards
        if shard.device == devices[0]
    )
    assert sum(state_bytes(cfg)) == held
    assert 0 < moment_bytes(cfg) <= state_bytes(cfg)[1]


def test_experts_biases_and_tied_tables_count(devices):
    biased = {"expert": Glu(704, bias=True), "router": Router(linear_bias=True)}
    fields = {
        "model.tie_embeddings": True,
        "model.layers.mixer.bias": True,
        "model.layers.feed_forward": Experts(num_experts=4, experts_per_token=2, **biased),
    }
    cfg = on(replace(SMALL, **fields), {"data": 2, "tensor": 2})
    to = state_shardings(cfg, make_mesh(cfg.parallel, devices[:4]))
    placed = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract_state(cfg), to
    )
    assert sum(state_bytes(cfg)) == bytes_per_device(placed)


def test_adapters_have_the_moments_alone(devices):
    cfg = on(replace(SMALL, **{"lora.rank": 4}), {"data": 2, "tensor": 2})
    to = state_shardings(cfg, make_mesh(cfg.parallel, devices[:4]))
    placed = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract_state(cfg), to
    )
    weights, rest = state_bytes(cfg)
    assert weights + rest == bytes_per_device(placed) and rest < weights / 2
    assert memory_of(cfg).gradients == 0


def test_saved_values_of_8b_are_those_of_the_docs():
    base = load_config("llama3_8b")
    page = {"none": 139_392, "dots": 94_336, "attn_out": 16_512, "full": 8_192}
    for remat, expected in page.items():
        cfg = resolve(replace(base, **{"parallel.remat": remat}), 8)
        assert saved_per_token(cfg) == expected + 8  # and the scales of two norms
    float8 = {"parallel.remat": "none", "compute.matmul_dtype": "float8"}
    assert saved_per_token(resolve(replace(base, **float8), 8)) == page["none"] - 18_432 + 8
    assert set(bytes_of_names(base, base.model.layers[0])) == {
        *REMAT_NAMES,
        "layer_input",
    }


def test_a_policy_that_saves_less_needs_less():
    base = load_config("llama3_8b")
    totals = []
    for remat in ("none", "dots", "attn_out", "full"):
        cfg = resolve(replace(base, **{"parallel.remat": remat}), 4)
        totals.append(memory_of(cfg).total)
    assert totals == sorted(totals, reverse=True)


def test_older_gpus_keep_logits_beside_their_exponentials():
    """72.0 GiB in place of 64.5 were measured without the kernel (docs/experiments.md)."""
    fields = {
        "compute.logits_dtype": "compute",
        "parallel.remat": "none",
        "parallel.loss_chunks": 1,
    }
    of = lambda **more: resolve(replace(load_config("llama_1b"), **fields | more), 1)  # noqa: E731
    cfg, wide = of(), of(**{"compute.logits_dtype": "float32"})
    more = memory_of(cfg, softmax_by_xla=True).logits - memory_of(cfg).logits
    tokens = cfg.train.global_batch_size * cfg.data.seq_len
    assert more == 2 * tokens * cfg.model.vocab_size
    assert memory_of(wide, softmax_by_xla=True) == memory_of(wide)
    older, newer = (predict(cfg, Cluster(gpu, NETWORKS["ib400"], 1, 1)) for gpu in (A100, H200))
    assert older.memory.logits - newer.memory.logits == more


def test_values_in_host_memory_are_not_on_the_device():
    base = replace(load_config("llama3_8b"), **{"parallel.layer_loop": "scan"})
    cfg = lambda remat: resolve(replace(base, **{"parallel.remat": remat}), 8)  # noqa: E731
    assert saved_per_token(cfg("offload")) == 4 * base.model.layers[0].mixer.num_heads + 8
    # Of dots: queries and keys after RoPE in place of those before, as many bytes.
    dots, waiting = cfg("dots"), cfg("dots_offload")
    assert saved_per_token(dots) == saved_per_token(waiting) + on_host_per_token(waiting)
    assert on_host_per_token(dots) == 0


def test_state_in_host_memory_is_not_on_the_device():
    """Before the update, no part of it; at its end, that of one layer."""
    base = {"parallel.layer_loop": "scan", "parallel.remat": "dots"}
    cfg = resolve(replace(load_config("llama3_8b"), **base), 8)
    offload = replace(cfg, **{"optimizer.offload": True})
    masters = replace(offload, **{"optimizer.offload_masters": True})
    weights, _ = state_bytes(cfg)
    device, moments_away, both_away = map(memory_of, (cfg, offload, masters))
    assert {m.moment for m in (device, moments_away, both_away)} == {"start"}
    assert device.total - moments_away.total == pytest.approx(moment_bytes(cfg))
    assert moments_away.total - both_away.total == pytest.approx(weights)

    # A loop over microbatches keeps the weights of the step: 16 bits of 32.
    loop = {"parallel.num_microbatches": 2}
    kept = [memory_of(resolve(replace(c, **loop), 8)) for c in (offload, masters)]
    assert [m.moment for m in kept] == ["loss", "loss"]
    assert kept[0].total - kept[1].total == pytest.approx(weights / 2)

    # With few tokens the end of the backward is the peak, with the state of one layer of 32.
    few = {"data.seq_len": 256, "train.global_batch_size": 8}
    moments, both = (memory_of(resolve(replace(c, **few), 8)) for c in (offload, masters))
    assert moments.moment == both.moment == "end"
    assert moments.optimizer == pytest.approx(moment_bytes(cfg) / 32, rel=1e-3)
    assert both.weights == pytest.approx(weights * (1 / 2 + 1 / 32), rel=1e-3)


@pytest.mark.parametrize("kind", ["adamw", "host", "masters-host"])
def test_peaks_with_state_in_host_memory_are_those_measured(kind):
    """On an H100: scripts/measure/offload.py, docs/experiments.md#optimizer-state."""
    card = json.loads(CARD.read_text())
    away = {"adamw": {}, "host": {"optimizer.offload": True}}
    fields = away.get(kind, away["host"] | {"optimizer.offload_masters": True})
    shape = {"model.tie_embeddings": False, "train.global_batch_size": 2}
    llama = replace(load_config("llama_1b"), **shape, **{"data.document_mask": False})
    predicted = memory_of(resolve(replace(llama, **fields), 1)).total / GIB
    assert predicted == pytest.approx(card["rows"][kind]["peak_memory_gib"], rel=0.02)


def ring(micro: int, **fields) -> float:
    """Bytes of activations of 8B in a pipeline of two stages, one sequence in a microbatch."""
    fields |= {"pipeline": 2, "data": 2, "zero": 1, "num_microbatches": micro}
    named = {f"parallel.{name}": value for name, value in fields.items()}
    rows = {"train.global_batch_size": 2 * micro}
    return memory_of(resolve(replace(load_config("llama3_8b"), **named, **rows), 4)).activations


def test_a_pipelines_ring_is_flat_in_microbatches():
    assert ring(4) == ring(16)


def test_gpipe_keeps_every_microbatch_and_its_output():
    stream = 2 * 8192 * 4096
    for save, kept in (("residuals", 16 * 8192 * (94_336 + 8)), ("inputs", stream)):
        few, more = (ring(n, schedule="gpipe", pipeline_save=save) for n in (4, 16))
        assert more - few == 12 * (kept + stream)
    three = ring(3, schedule="gpipe")  # as many as 1F1B has slots
    assert three == ring(3) + 3 * stream


def test_a_zero_bubble_pipeline_keeps_the_factors_of_some_weight_gradients():
    """Two microbatches in a virtual stage of 16 or 8 layers, with the widths of four matmuls."""
    widths = (4096 + 6144) + (4096 + 4096) + (4096 + 2 * 14336) + (14336 + 4096)
    unrolled = {"layer_loop": "unroll"}
    for v in (1, 2):
        fields = unrolled | {"virtual_stages": v}
        kept = ring(4, schedule="zero_bubble", **fields) - ring(4, **fields)
        assert kept == 2 * 16 / v * 8192 * 2 * widths


def test_a_shard_is_what_the_axes_leave():
    cfg = resolve(replace(load_config("llama3_8b"), **{"parallel.tensor": 2}), 8)
    shard = shard_of(cfg)
    assert (shard.rows, shard.tokens, shard.layers, shard.fsdp) == (4, 4 * 8192, 32, 4)
    assert shard.layer.matrices == (8_030_261_248 - 2 * 128_256 * 4096 - 65 * 4096) / 32 / 2
