"""Step times: against measured runs, and as physics has it."""

import dataclasses

import pytest

from jaxpar.config import ConfigError, replace
from jaxpar.config.command_line import load_config, read_config
from jaxpar.config.layout.layer_split import layers_per_chunk
from jaxpar.config.validate import resolve
from jaxpar.prediction.communication import Cluster, ring_bandwidth, span, traffic_of
from jaxpar.prediction.compute import (
    elementwise_rate,
    layer_seconds,
    repeats,
    weights_seconds,
)
from jaxpar.prediction.hardware import GPUS, H200, NETWORKS, HardwareFigure
from jaxpar.prediction.memory import memory_of, on_host_per_token
from jaxpar.prediction.ranking import make_plan, predict
from jaxpar.prediction.shard import shard_of
from jaxpar.prediction.startup import forecast
from jaxpar.prediction.time import step_time
from scripts.docs import calibration

BASE = load_config("llama3_8b")


def cluster(n: int, per_host: int = 8, network: str = "ib400", gpu=H200) -> Cluster:
    return Cluster(gpu, NETWORKS[network], n, per_host)


def on(n: int, **fields):
    return resolve(replace(BASE, **{f"parallel.{k}": v for k, v in fields.items()}), n)


def test_predictions_are_within_their_bounds_of_what_was_measured():
    compared = list(calibration.compare(lambda words: read_config(words)))
    assert len(compared) >= 41 and sum(c.memory_error is not None for c in compared) >= 28
    for c in compared:
        assert abs(c.time_error) < calibration.TIME_BOUND, (c.run.run, c.time_error)
        if c.memory_error is not None:
            assert abs(c.memory_error) < calibration.MEMORY_BOUND, (c.run.run, c.memory_error)


def test_predicted_memory_is_within_its_bound_of_xlas_plans():
    read = lambda words: read_config(words)  # noqa: E731
    compiled = list(calibration.compare_compiled(read))
    assert len(compiled) >= 46
    for c in compiled:
        assert abs(c.error) < calibration.MEMORY_BOUND, (c.run, c.error)


@pytest.mark.parametrize(("remat", "passes"), [("none", 1), ("attn_out", 1), ("full", 2)])
def test_sinks_read_and_write_attentions_output(remat, passes):
    plain = on(4, remat=remat)
    sinks = replace(plain, **{"model.layers.mixer.sinks": True})
    more = layer_seconds(sinks, shard_of(sinks), H200).elementwise
    more -= layer_seconds(plain, shard_of(plain), H200).elementwise
    moved = shard_of(plain).tokens * 2 * 2 * 32 * 128
    assert more * elementwise_rate(H200) == pytest.approx(passes * moved, rel=1e-6)


def test_bytes_sent_are_those_that_were_counted():
    """The card of 8B on 4 GPUs counts 34,560,565,266 bytes in the compiled step."""
    cfg = resolve(replace(BASE, **{"train.global_batch_size": 8}), 4)
    (fsdp,) = traffic_of(cfg, shard_of(cfg), cluster(4))
    assert fsdp.sent == pytest.approx(34_560_565_266, rel=1e-3)


def test_interleaved_stages_that_send_copy_the_weights_of_their_chunk():
    """8 bytes a weight of the layers and unit: read and written, forward and backward, in 16 bits.

    And 10 for its gradient, added to a float32 sum, which with one chunk the matmul does.
    """
    moved, units = {}, {1: 4 + 1, 2: (2 * 4 + 1) / 2}
    for virtual in units:
        cfg = on(8, pipeline=2, sequence=2, zero=1, num_microbatches=4, virtual_stages=virtual)
        shard = shard_of(cfg)
        moved[virtual] = weights_seconds(cfg, shard, H200).total * elementwise_rate(H200)
    weights = 16 * shard.layer.matrices
    assert weights == pytest.approx(16 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336))
    layers = 10 * shard.stack.everything * units[2]
    tables = 20 * shard.table * (units[2] - units[1])
    assert moved[2] - moved[1] == pytest.approx(8 * weights * units[2] + layers + tables)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_stages_that_may_rest_move_no_weights(virtual, tensor):
    """Embedding and head aside: 10 bytes for each of their weights and microbatch."""
    cfg = on(8, pipeline=2, zero=1, num_microbatches=4, virtual_stages=virtual, tensor=tensor)
    shard = shard_of(cfg)
    once = 12 * shard.parameters / shard.fsdp + 8 * shard.parameters
    moved = weights_seconds(cfg, shard, H200).total * elementwise_rate(H200)
    assert moved == pytest.approx(once + 10 * 2 * shard.table * 4)


def staged(layers: int, fields: dict):
    """8B with other numbers of layers, in a pipeline on 8 GPUs."""
    fields = dict(zero=1, num_microbatches=8) | fields
    cfg = replace(BASE, **{f"parallel.{k}": v for k, v in fields.items()})
    return resolve(replace(cfg, **{"model.num_layers": layers, "train.global_batch_size": 64}), 8)


@pytest.mark.parametrize(
    ("layers", "equal", "fields"),
    [
        (31, 32, dict(pipeline=2)),
        (30, 32, dict(pipeline=2, layers_per_stage=(14, 16))),
        (29, 32, dict(pipeline=2, virtual_stages=2, sequence=2)),
        (126, 128, dict(pipeline=4, num_microbatches=16)),
    ],
)
def test_a_pipeline_is_as_slow_and_as_large_as_its_largest_stage(layers, equal, fields):
    cfg, like = staged(layers, fields), staged(equal, fields | {"layers_per_stage": ()})
    assert step_time(cfg, cluster(8)).total == step_time(like, cluster(8)).total
    assert memory_of(cfg) == memory_of(like)


def test_chunks_that_are_skipped_take_no_time():
    """Chunks of 8, 8, 7 and 7 layers: memory for 16 a stage, and in a round time for 15."""
    shard = shard_of(staged(30, dict(pipeline=2, virtual_stages=2)))
    assert (shard.layers, shard.layers_in_turn) == (16, 15)


@pytest.mark.parametrize("stages", [4, 8])
def test_126_layers_are_planned_on_4_and_8_stages(stages):
    fixed = dict(pipeline=stages, tensor=8, replica=1, sequence=1, virtual_stages=1, zero=1)
    fixed |= dict(num_microbatches=24, row_groups=1)
    plan = make_plan(load_config("llama3_405b"), cluster(512), fixed, coarse=True)
    assert plan.fitting or plan.too_large
    assert {layers_per_chunk(one.cfg)[0] for one in plan.fitting + plan.too_large} == {
        -(-126 // stages)
    }


def test_parts_add_up_and_mfu_follows():
    t = step_time(on(8, tensor=2), cluster(8))
    parts = t.matmul + t.attention + t.elementwise + t.optimizer + t.bubble
    assert t.total == pytest.approx(parts + sum(t.exposed.values()) + t.contention + t.gaps)
    assert t.rate == pytest.approx(16 * 8192 / 8 / t.total)
    assert 0.3 < t.mfu < t.mfu_full < 0.8


def test_copies_to_host_memory_hide_behind_the_next_layer():
    """On 8 H200s all of them; where the link is slow, what a layer's time leaves over."""
    cfg = on(8, remat="dots_offload")
    plain, waiting = (step_time(c, cluster(8)) for c in (on(8, remat="dots"), cfg))
    assert "host" not in plain.exposed
    assert waiting.exposed["host"] == 0 and waiting.total == plain.total
    link = dataclasses.replace(H200.host_link, value=1e9)
    slow = dataclasses.replace(cluster(8), gpu=dataclasses.replace(H200, host_link=link))
    tokens, layer = 2 * 8192, layer_seconds(cfg, shard_of(cfg), H200).total
    copy = tokens * on_host_per_token(cfg) / 1e9
    assert step_time(cfg, slow).exposed["host"] == pytest.approx(32 * (2 * copy - layer))


def test_the_bubble_is_the_formulas():
    pipelined = dict(pipeline=4, zero=1, num_microbatches=8)
    one, two = (step_time(on(8, **pipelined, virtual_stages=v), cluster(8)) for v in (1, 2))
    assert one.bubble == pytest.approx(2 * two.bubble)
    stage = layer_seconds(on(8, **pipelined), shard_of(on(8, **pipelined)), H200).times(8).total
    assert one.bubble / (one.bubble + 8 * stage) == pytest.approx(3 / 11)  # of v M + P - 1


def test_gpipe_takes_as_long():
    pipelined = dict(pipeline=4, zero=1, num_microbatches=8)
    ours, gpipe = (
        step_time(on(8, **pipelined, **s), cluster(8)) for s in ({}, {"schedule": "gpipe"})
    )
    assert gpipe == ours


def test_a_zero_bubble_schedule_has_a_smaller_bubble():
    """Smaller by two weight gradients a stage, less the writes of their factors."""
    pipelined = dict(pipeline=4, zero=1, num_microbatches=8, layer_loop="unroll")
    plain, zero = (
        step_time(on(8, **pipelined, **s), cluster(8)) for s in ({}, {"schedule": "zero_bubble"})
    )
    assert zero.matmul == plain.matmul
    assert 0.4 < zero.bubble / plain.bubble < 0.6


def test_a_slower_network_is_slower_across_hosts_only():
    fast, slow = (
        step_time(on(16, replica=2), cluster(16, network=name)).total
        for name in ("ib400", "eth100")
    )
    assert slow > fast
    inside = [step_time(on(8), cluster(8, network=name)).total for name in ("ib400", "eth100")]
    assert inside[0] == inside[1]


def test_groups_know_how_many_of_them_share_a_host():
    cfg = on(16, replica=2, tensor=4)
    assert span(cfg, ("tensor",), 8) == (4, 4)
    assert span(cfg, ("data", "expert", "sequence"), 8) == (2, 2)
    assert span(cfg, ("replica",), 8) == (2, 1)
    link = H200.nvlink.value
    assert ring_bandwidth(2, 1, cluster(16)) == NETWORKS["ib400"].bandwidth.value < link


def test_remat_repeats_what_it_does_not_save():
    cfg = on(8)
    layer = cfg.model.layers[0]
    assert repeats(cfg, layer, "none") == set()
    assert repeats(cfg, layer, "dots") == {"elementwise"}
    assert repeats(cfg, layer, "attn_out") == {"qkv", "wo", "gate_up", "elementwise"}
    assert repeats(cfg, layer, "full") == {"qkv", "wo", "gate_up", "elementwise", "attention"}
    times = [
        step_time(on(8, remat=r), cluster(8)).total for r in ("none", "dots", "attn_out", "full")
    ]
    assert times == sorted(times)


def test_a_window_is_attended_to_in_part():
    whole, local = (
        replace(on(8), **{"model.layers.mixer.window": n}).model.layers[0].mixer
        for n in (None, 1024)
    )
    assert whole.num_pairs(8192) == 8192**2 / 2
    assert local.num_pairs(8192) == pytest.approx(sum(min(i, 1024) for i in range(8192)), rel=1e-3)


def test_a_gpu_without_kernels_for_zigzag_order_is_told():
    a100 = GPUS["a100"]
    older = cluster(8, gpu=dataclasses.replace(a100, name="v100", compute_capability="7.0"))
    cfg, ulysses = on(8, sequence=2), on(8, sequence=2, context="ulysses")
    for gpu in (GPUS["h200"], a100, GPUS["b200"]):
        assert not predict(cfg, cluster(8, gpu=gpu)).on_reference
        assert not predict(ulysses, cluster(8, gpu=gpu)).on_reference
    with pytest.raises(ConfigError, match=r"no attention kernel on v100.*ulysses"):
        predict(cfg, older)
    assert predict(ulysses, older).on_reference  # its documents
    assert not predict(replace(ulysses, **{"data.document_mask": False}), older).on_reference


def test_float16_is_planned_as_bfloat16_is():
    in_dtype = lambda dtype: replace(on(8), **{"compute.dtype": dtype})  # noqa: E731
    half, brain, full = map(in_dtype, ("float16", "bfloat16", "float32"))
    assert memory_of(half) == memory_of(brain)
    of_half, of_brain = (step_time(cfg, cluster(8)) for cfg in (half, brain))
    assert of_half.elementwise > of_brain.elementwise  # its norms are written scaled
    assert dataclasses.replace(of_half, elementwise=of_brain.elementwise) == of_brain
    assert memory_of(full).activations > 1.9 * memory_of(brain).activations
    assert step_time(full, cluster(8)).matmul > 1.9 * step_time(brain, cluster(8)).matmul


def test_scores_of_the_reference_count():
    cfg = replace(on(8), **{"compute.dtype": "float32"})
    assert predict(cfg, cluster(8)).on_reference
    scores = 16 * 2 * 32 * 8192 * 8192
    assert memory_of(cfg, on_reference=True).total - memory_of(cfg).total == scores


def test_forecast_of_a_run():
    assert forecast(on(8), "cpu", 8, 8) is None
    found = forecast(on(8), "NVIDIA H200", 8, 8)
    assert found is not None and "GiB peak" in str(found) and "assuming" not in str(found)
    line = found.beside({"memory_gib": found.memory_gib, "step_seconds": 2 * found.step_seconds})
    assert "(+0.0%)" in line and "(-50.0%)" in line
    assert "peak" in found.beside({"memory_gib": 1.0}) and "step" not in found.beside({})
    assert "assuming" in str(forecast(on(16), "NVIDIA H200", 16, 8))


def test_every_number_has_a_source():
    for gpu in GPUS.values():
        figures = [v for v in vars(gpu).values() if isinstance(v, HardwareFigure)]
        assert len(figures) >= 6 and all(f.value > 0 and f.source for f in figures)
        assert gpu.matmul.value < gpu.peak.value and dataclasses.is_dataclass(gpu)
    assert all(n.bandwidth.source.startswith("estimate") for n in NETWORKS.values())
