"""Plans of models with experts: against measured runs, and by what an expert axis changes."""

import dataclasses
from pathlib import Path

import jax
import pytest

from jaxpar.certification import small_config
from jaxpar.commands import call, read
from jaxpar.components.component import FeedForward
from jaxpar.components.experts import Experts, experts_in
from jaxpar.components.feed_forward import Glu
from jaxpar.config import Config, ConfigError, RematSlice, replace
from jaxpar.config.command_line import load_config, read_config
from jaxpar.config.layout.layer_split import layers_per_chunk
from jaxpar.config.validate import resolve
from jaxpar.extend import swap
from jaxpar.prediction import experts, memory
from jaxpar.prediction.communication import Cluster, span_with_gaps, traffic_of
from jaxpar.prediction.compute import layer_seconds
from jaxpar.prediction.hardware import GIB, GPUS, H200, NETWORKS
from jaxpar.prediction.layer_kinds import layer_kinds
from jaxpar.prediction.layouts import legal_layouts
from jaxpar.prediction.memory import memory_of, saved_per_token
from jaxpar.prediction.ranking import make_plan, nothing_fits
from jaxpar.prediction.shard import shard_of, state_bytes
from jaxpar.prediction.time import step_time
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import abstract_state, bytes_per_device, state_shardings
from jaxpar.tools.planning.command import asked_for
from jaxpar.tools.planning.showing import caveats
from scripts.docs import calibration

QWEN = load_config("qwen3_30b_a3b")

SMALL = replace(
    small_config.float32(Config()),
    **{
        "model.vocab_size": 64,
        "model.layers.feed_forward": Experts(expert=Glu(704), num_experts=8, experts_per_token=2),
        "data.seq_len": 64,
        "train.global_batch_size": 16,
        "parallel.layer_loop": "unroll",
    },
)


def experts_of(cfg: Config) -> Experts:
    """The experts of a model's first layer that has some."""
    return experts_in(cfg.model)[0]


def cluster(n: int, gpu=H200) -> Cluster:
    return Cluster(gpu, NETWORKS["ib400"], n, 8)


def on(n: int, cfg: Config = QWEN, **fields) -> Config:
    return resolve(replace(cfg, **{f"parallel.{k}": v for k, v in fields.items()}), n)


def test_predictions_are_within_their_bounds_of_what_was_measured():
    read = lambda words: read_config(words)  # noqa: E731
    compared = list(calibration.compare(read, "experts"))
    assert len(compared) >= 12
    for c in compared:
        assert abs(c.time_error) < calibration.TIME_BOUND, (c.run.run, c.time_error)
        if c.memory_error is not None:
            assert abs(c.memory_error) < calibration.MEMORY_BOUND, (c.run.run, c.memory_error)


@pytest.mark.parametrize(
    "mesh",
    [
        {"expert": 4},
        {"expert": 2, "data": 2},
        {"expert": 2, "tensor": 2, "sequence": 2},
        {"expert": 2, "tensor": 2, "data": 2, "expert_tensor": 1},
        {"expert": 2, "pipeline": 2, "num_microbatches": 2},
    ],
)
def test_state_on_an_expert_axis_is_that_of_the_arrays(mesh, devices):
    count = 8 if "tensor" in mesh else 4
    layer, *others = SMALL.model.layers
    dense = dataclasses.replace(layer, name="dense_layers", feed_forward=Glu(704))
    cfg = replace(SMALL, **{"model.layers": [dense, *others]})
    cfg = on(count, cfg, **{"data": 1} | mesh)
    to = state_shardings(cfg, make_mesh(cfg.parallel, devices[:count]))
    placed = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract_state(cfg), to
    )
    assert sum(state_bytes(cfg)) == bytes_per_device(placed)
    assert shard_of(cfg).owned == pytest.approx(state_bytes(cfg)[0] / 4, rel=0.05)


STAGES = {"pipeline": 2, "num_microbatches": 4, "zero": 1, "data": 4}


def test_dense_layers_before_the_stages_are_work_of_the_first():
    """By a branch, or on all stages if collectives need them. They save nothing in the stash."""
    by_branch, masked = on(8, DENSE, **STAGES), on(8, DENSE, **STAGES | {"zero": 3})
    assert layers_per_chunk(by_branch) == (1, 3)
    one, all_of_them = shard_of(by_branch), shard_of(masked)
    assert (one.layers_in_turn, one.dense_in_turn) == (3, 2)
    assert (all_of_them.layers_in_turn, all_of_them.dense_in_turn) == (3 + 2, 2)
    routed = replace(by_branch, **{"model": of_kinds().model})
    assert one.layers == shard_of(routed).layers == 3
    assert memory_of(by_branch).total > memory_of(routed).total
    assert step_time(masked, cluster(8)).total > step_time(by_branch, cluster(8)).total
    even = replace(by_branch, **{"parallel.layers_per_stage": (2, 2)})
    assert shard_of(even).layers_in_turn == 4


def test_the_buffer_is_the_one_of_the_layer():
    """131,072 pairs: times 1.1, and a tile for each of 64 experts; at most what could arrive."""
    slacks = [{"expert": 2, "expert_slack": s} for s in (1.1, 2.0)]
    one, some, most = (on(2, **f) for f in ({}, *slacks))
    one, some, most = (replace(c, **{"train.global_batch_size": 8}) for c in (one, some, most))
    assert experts.buffer_rows(one, experts_of(one)) == 131_072 + 128 * 127 // 128 * 128
    assert experts.buffer_rows(some, experts_of(some)) == 144_256 + 64 * 128
    assert experts.buffer_rows(most, experts_of(most)) == (262_144 + 64 * 127) // 128 * 128
    assert [experts.needs_rounds(c, experts_of(c)) for c in (one, some, most)] == [
        False,
        True,
        False,
    ]
    rounds = step_time(some, cluster(2)).gaps - step_time(most, cluster(2)).gaps
    assert rounds == pytest.approx(48 * 1.89e-3 / 2)
    larger = replace(some, **{"parallel.expert_slack": 1.25})
    without = step_time(most, cluster(2)).gaps
    assert step_time(larger, cluster(2)).gaps == pytest.approx(without)


def test_loops_of_rounds_wait_for_the_host_unless_they_are_in_graphs():
    """Three loops in each of 48 layers, where tensor parallelism also sends by permutes, and where
    rounds communicate."""
    apart = {"expert": 4, "expert_slack": 1.25}
    cfgs = (on(8, **apart | more) for more in ({}, {"tensor": 2}, {"expert_dispatch": "rows"}))
    seconds = [experts.round_seconds(cfg, shard_of(cfg)) for cfg in cfgs]
    assert seconds == pytest.approx([0.0, *[3 * 48 * 0.09e-3] * 2])


def test_the_saved_gate_and_up_have_the_rows_of_the_buffer():
    """4 F bytes a row, and the plan: the row's token; a token's k experts, and of all devices the
    rows twice and the weights."""
    cfg = on(8, expert=8, remat="dots")
    rows = experts.buffer_rows(cfg, experts_of(cfg)) / (4 * 4096)
    dense = swap(cfg.model, "layers.feed_forward", Glu, d_ff=768)
    others = saved_per_token(replace(cfg, **{"model": dense, "parallel.expert": 1})) - 4 * 768
    plan = 4 * (rows + 8 + 3 * 8 * 8)
    assert saved_per_token(cfg) == pytest.approx(others + 4 * 768 * rows + plan)


def test_an_expert_axis_sends_tokens_and_no_experts():
    """Five messages of the tokens of n - 1 devices in a layer, 2 D bytes each, and small ones."""
    cfg = on(8, expert=8)
    sent = {t.axis: t.sent for t in traffic_of(cfg, shard_of(cfg), cluster(8))}
    tokens = 5 * 7 * 4 * 4096 * 2 * 2048 * 48
    assert sent["expert"] == pytest.approx(tokens, rel=0.01)
    shard = shard_of(cfg)
    others = 48 * (shard.layer.matrices - shard.layer.experts)
    assert sent["data"] == pytest.approx(2 * 7 / 8 * (3 * others + 2 * 2 * shard.table), rel=0.01)
    whole = {t.axis: t.sent for t in traffic_of(on(8), shard_of(on(8)), cluster(8))}
    assert "expert" not in whole and whole["data"] > 10 * sent["data"]


def test_whole_experts_on_tensor_ranks_send_to_both_axes_and_gather_nothing():
    split = on(8, expert=4, tensor=2, data=1)
    whole = on(8, expert=4, tensor=2, data=1, expert_tensor=1)
    sizes = [
        {t.axis: t.sent for t in traffic_of(c, shard_of(c), cluster(8))} for c in (split, whole)
    ]
    N = 32 * 4096 // 4
    assert [experts.dispatched(c, experts_of(c)).sent for c in (split, whole)] == [
        3 * N,
        7 * N // 2,
    ]
    assert sizes[1]["tensor"] < 0.6 * sizes[0]["tensor"]
    assert experts.saved_rows(whole, experts_of(whole)) == pytest.approx(
        experts.saved_rows(split, experts_of(split)), rel=0.02
    )


def test_a_dispatch_by_rows_sends_and_stores_its_slots():
    """C rows for each other device in each of five messages; R and n C have room for all."""
    apart = {"expert": 8, "expert_slack": 1.1}
    by_tokens, by_rows = (on(8, **apart, expert_dispatch=by) for by in ("tokens", "rows"))
    C = 18_023  # ceil(1.1 * 16384 * 8 / 8)
    sizes = experts.dispatched(by_rows, experts_of(by_rows))
    assert (sizes.sent, sizes.received) == (7 * C, 8 * C)
    assert sizes.buffer == (8 * C + 16 * 127) // 128 * 128
    sent = [experts.sent_bytes(c, experts_of(c), shard_of(c)) for c in (by_tokens, by_rows)]
    each = 5 * 2 * 2048
    assert sent == [7 * 16_384 * (each + 3 * 4 * 8), 7 * C * (each + 2 * 4)]
    times = [step_time(c, cluster(8)).total for c in (by_tokens, by_rows)]
    assert times[0] < times[1]
    of_few = on(8, load_config("mixtral_8x7b"), **apart)  # 2 experts a token: auto sends rows
    assert experts.dispatched(of_few, experts_of(of_few)).sent == 7 * 4506


def test_experts_of_two_groups_travel_between_them():
    """Experts over 4 devices, D over the other 2: half of a layer's E/4 experts, three times."""
    both, apart = on(8, expert=4, data=2), on(8, expert=8)
    both, apart = (
        next(t.sent for t in traffic_of(c, shard_of(c), cluster(8)) if t.axis == "data")
        for c in (both, apart)
    )
    experts_of_4 = 48 * 128 // 4 * 3 * 2048 * 768
    assert both - apart == pytest.approx(3 * 2 * experts_of_4 / 2)


def test_ranks_of_axes_with_another_between_them():
    cfg = on(32, data=4, expert=8)
    assert span_with_gaps(cfg, ("data", "sequence"), 8) == (4, 1)
    assert span_with_gaps(on(8, data=2, expert=2, sequence=2), ("data", "sequence"), 8) == (4, 4)


def test_sums_of_an_axis_are_read_where_they_are():
    """A pass adds up the parts of n devices, forward and backward. Stages gather into one array."""
    apart, stages = on(8, expert=8), on(8, expert=4, pipeline=2, num_microbatches=2, zero=1, data=1)
    assert experts.dispatched(apart, experts_of(apart)).copied == 2 * (8 + 1) * experts.tokens_of(
        apart
    )
    assert experts.dispatched(stages, experts_of(stages)).copied == (
        2 * 5 + 6 * 4
    ) * experts.tokens_of(stages)


def test_tokens_that_are_sent_once_more_are_hidden_by_what_comes_before_their_use():
    """Gate and up that are recomputed wait for tokens, as those of the forward do."""
    saved, again = (on(8, expert=4, zero=1, remat=r) for r in ("none", "attn_out"))
    exposed = []
    for cfg in (saved, again):
        one = 1e-3
        share = experts.exposed_share(
            cfg, experts_of(cfg), shard_of(cfg), H200, experts.messages(cfg) * one
        )
        exposed.append(share * experts.messages(cfg))
    router = experts.router_elements(saved, experts_of(saved)) * 2 / (4.18e12 * 0.86)
    assert exposed[0] == pytest.approx(2 + 1 - router / one)
    assert exposed[1] == pytest.approx(exposed[0] + 1 - router / one)


def test_gathers_of_zero_1_are_at_the_beginning_of_a_step():
    """Of all layers at once, beside little else; a gradient's scatter as with ZeRO-3."""
    dense = load_config("llama3_8b")
    once = on(8, dense, zero=1)
    (traffic,) = traffic_of(once, shard_of(once), cluster(8))
    half = 7 / 8 * 2 * (shard_of(once).stack.matrices + 2 * shard_of(once).table)
    gathers, scatters = half / (450e9 * 0.55), half / (450e9 * 0.84)
    assert (traffic.nccl, traffic.seconds) == pytest.approx((gathers, gathers + scatters))
    assert traffic.exposed * traffic.seconds == pytest.approx(0.68 * gathers + 0.18 * scatters)


def test_gradients_of_an_axis_s_experts_are_not_scattered():
    """Each device has those of its experts in float32 only; of the others also the whole ones."""
    cfg = on(2, replace(QWEN, **{"model.num_layers": 6}), expert=2, data=1, zero=1)
    stack, shard = shard_of(cfg).stack, shard_of(cfg)
    assert memory._at_end(cfg, shard, 0.0, 0.0).gradients == pytest.approx(
        2 * (stack.everything - stack.experts + 2 * shard.table) + 4 * shard.owned
    )


def test_the_step_waits_for_the_fullest_rank():
    alone, axis = on(8), on(8, expert=8)
    times = [step_time(axis, cluster(8), load).total for load in (1.0, 1.1, 1.5)]
    assert times[0] < times[1] < times[2]
    assert step_time(axis, cluster(8)).total == times[1]
    same = [step_time(alone, cluster(8), load).total for load in (1.0, 1.5)]
    assert same[0] == same[1]


def test_the_listing_splits_experts_over_divisors_of_both():
    fixed = {"pipeline": 1, "tensor": 1, "sequence": 1, "replica": 1}
    sizes = {c.parallel.expert for c in legal_layouts(QWEN, 8, fixed, coarse=True).configs}
    assert sizes == {1, 2, 4, 8}
    fields = {"num_experts": 6, "experts_per_token": 2}
    of_six = replace(QWEN, **{f"model.layers.feed_forward.{k}": n for k, n in fields.items()})
    found = legal_layouts(of_six, 8, fixed, coarse=True)
    assert {c.parallel.expert for c in found.configs} == {1, 2} and not found.refused
    dense = replace(load_config("llama3_8b"), **{"parallel.expert": 2})
    assert {c.parallel.expert for c in legal_layouts(dense, 8, fixed, coarse=True).configs} == {2}


def test_both_ways_to_place_experts_are_ranked():
    fixed = {"pipeline": 1, "tensor": 1, "sequence": 1, "replica": 1, "num_microbatches": 1}
    plan = make_plan(QWEN, cluster(8), fixed, coarse=True)
    assert {layout.cfg.parallel.expert for layout in plan.fitting} == {1, 2, 4, 8}
    (only,) = caveats(plan, plan.fitting)
    assert "experts were compared on two and four GPUs only" in only and "axes" not in only
    a100 = make_plan(QWEN, cluster(8, GPUS["a100"]), fixed, coarse=True)
    assert "no kernel on a100" in caveats(a100, a100.fitting)[0]


@pytest.mark.parametrize(("size", "fix"), [(3, 2), (48, 32), (256, 128)])
def test_a_fixed_expert_axis_must_split_the_experts(size, fix):
    said = rf"'expert={size}': expert must divide the 128 experts.*--fix expert={fix}\."
    with pytest.raises(ConfigError, match=said):
        asked_for(read("plan", ["qwen3_30b_a3b", "--fix", f"expert={size}"]))
    asked = asked_for(read("plan", ["llama3_8b", "--fix", "expert=3"]))
    assert asked.fixed == {"expert": 3}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "the fixed axis sizes do not divide the number of GPUs"),
        ({"train.global_batch_size": 12}, "train.global_batch_size = 12 must be divisible by"),
    ],
)
def test_an_expert_axis_that_does_not_fit_is_one_error(fields, said):
    fixed = {"expert": 8 if fields else 16}
    with pytest.raises(ConfigError, match=said):
        raise nothing_fits(make_plan(replace(QWEN, **fields), cluster(8), fixed, coarse=True))


@pytest.mark.parametrize("load", ["0.9", "nan", "inf", "-1"])
def test_a_load_that_no_rank_can_have(load):
    with pytest.raises(ConfigError, match="--expert-imbalance"):
        call("plan", ["qwen3_30b_a3b", f"--expert-imbalance={load}"])


# ----------------------------------------------------------------------------- dense first layers


def of_kinds(*feed_forwards: FeedForward) -> Config:
    """Six of its layers; the first ones with other feed-forwards."""
    routed = QWEN.model.layers[:6]
    first = (dataclasses.replace(routed[0], name="dense", feed_forward=f) for f in feed_forwards)
    layers = (*first, *routed[len(feed_forwards) :])
    return replace(QWEN, **{"model": QWEN.model.with_layers(layers)})


DENSE = of_kinds(*[Glu(6144)] * 2)


def of_all_kinds() -> tuple[Config, Config, Config]:
    """Six layers: the first two dense; all of them with experts; all dense."""
    mixed, routed = (on(8, of_kinds(*[Glu(6144)] * n)) for n in (2, 0))
    return mixed, routed, replace(mixed, **{"model": of_kinds(*[Glu(6144)] * 6).model})


def test_dense_first_layers_take_their_own_time_and_memory():
    mixed, routed, dense = of_all_kinds()
    seconds = [layer_seconds(c, shard_of(mixed), H200).total for c in (mixed, routed, dense)]
    assert seconds[0] == pytest.approx((4 * seconds[1] + 2 * seconds[2]) / 6)
    saved = [saved_per_token(c) for c in (mixed, routed, dense)]
    assert saved[0] == pytest.approx((4 * saved[1] + 2 * saved[2]) / 6)
    owned = [shard_of(c).stack.everything for c in (mixed, routed, dense)]
    assert owned[0] == pytest.approx((4 * owned[1] + 2 * owned[2]) / 6)


def test_policies_of_layers_are_those_of_their_kind():
    mixed = replace(
        of_all_kinds()[0],
        **{"parallel.remat_layers": (RematSlice("none", 0, 1), RematSlice("full", 5, 6))},
    )
    kinds = {
        (k.experts.num_experts if k.experts else 0, k.remat): k.share for k in layer_kinds(mixed)
    }
    assert kinds == {
        (0, "none"): 1 / 6,
        (0, mixed.parallel.remat): 1 / 6,
        (128, mixed.parallel.remat): 3 / 6,
        (128, "full"): 1 / 6,
    }


def test_shared_experts_are_a_dense_layer_beside_the_routed_ones():
    path = "model.layers.feed_forward.num_shared_experts"
    plain, shared = (on(8, replace(QWEN, **{path: n})) for n in (0, 1))
    more = layer_seconds(shared, shard_of(shared), H200).matmul
    more -= layer_seconds(plain, shard_of(plain), H200).matmul
    assert more == pytest.approx(9 * 2 * 16384 * 2048 * 768 / 698e12, rel=0.05)
    assert memory_of(shared).total > memory_of(plain).total


def test_weights_of_experts_are_summed_in_a_pass_of_their_own():
    """Matmuls of a dense layer accumulate over microbatches in ZeRO-1, grouped products do not."""
    plain = on(8, zero=1, replica=8, data=1)
    two = replace(plain, **{"parallel.num_microbatches": 2})
    one, both = (step_time(c, cluster(8)) for c in (plain, two))
    added = 2 * 10 * 48 * 128 * 3 * 2048 * 768 / (4.18e12 * 0.86)
    assert both.elementwise - one.elementwise > added


# --------------------------------------------------------------------------------------- the docs


def test_the_whole_model_on_8_gpus_is_as_on_its_page():
    """Step and rate of the three columns in docs/architectures.md, "Cost of experts"."""
    page = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text("utf-8")
    layouts = {"expert": 4, "data": 2}, {"expert": 8}, {"remat": "dots_offload"}
    times = [
        step_time(on(8, **{"zero": 1, "remat": "none", "expert_slack": 1.25} | fields), cluster(8))
        for fields in layouts
    ]
    steps = " | ".join(f"{t.total * 1e3:,.0f}" for t in times)
    assert f"| step | {steps} |" in page, steps
    rates = " | ".join(f"{t.rate:,.0f}" for t in times)
    assert f"| tokens/s/GPU | {rates} |" in page, rates


def test_memory_is_within_its_bound_of_xlas_plans():
    """Compiled without a GPU, in GiB (docs/planning.md)."""
    six = {"model.num_layers": 6, "compute.logits_dtype": "compute", "data.document_mask": False}
    six |= {"parallel.expert_slack": 1.1}
    small = replace(QWEN, **six)
    on_2 = on(2, replace(small, **{"train.global_batch_size": 8}), expert=2)
    on_8 = on(8, small, expert=4, zero=1, remat="none")
    two = replace(load_config("mixtral_8x7b"), **six | {"model.num_layers": 2})
    mixtral = on(2, replace(two, **{"train.global_batch_size": 8}), expert=2)
    for cfg, gib in ((on_2, 37.94), (on_8, 19.07), (mixtral, 33.61)):
        assert memory_of(cfg).total / GIB == pytest.approx(gib, rel=calibration.MEMORY_BOUND)
