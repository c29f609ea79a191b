"""How configs are executed: one table, config -> Execution."""

import dataclasses

import pytest

from jaxpar.config import Attention, ClampedSwiglu, Config, Experts, Glu, Layer, replace
from jaxpar.config.validate import resolve
from jaxpar.execution import decisions
from jaxpar.execution.decisions import execution_of, on_gpus
from jaxpar.kernels.platform import Platform

GPU, CPU = Platform("gpu"), Platform("cpu")

#: What a plain FSDP run on 8 devices decides; the table names what differs from it.
FSDP = {
    "collective_matmul": False,
    "norm": "deferred_scale",
    "fused_gate_up": True,
    "float32_weight_gradients": False,
    "gathers_per_layer": True,
    "stage_wide_collectives": True,
    "layers_per_vjp": 0,
}

WRITTEN = {"norm": "written"}
SEPARATE = {"fused_gate_up": False, "norm": "written"}
WHOLE = {"gathers_per_layer": False, "stage_wide_collectives": False, "layers_per_vjp": 1}
SUMMED = {"float32_weight_gradients": True}

BLOCK = Layer("layers", Attention(num_heads=8, num_kv_heads=4, head_dim=32), Glu(704))
EXPERTS = Experts(expert=Glu(704), num_experts=4, experts_per_token=2)

#: Words for values that are neither texts nor numbers.
VALUES = {
    "True": True,
    "clamped_swiglu": ClampedSwiglu(),
    "experts": EXPERTS,
    "windows": [Layer("local", dataclasses.replace(BLOCK.mixer, window=16), Glu(704)), BLOCK] * 2,
}

#: Fields of the config -> decisions that differ.
TABLE = [
    ("", {}),
    ("parallel.data=1 parallel.replica=8", WHOLE | SUMMED),
    # What matmuls receive of a norm, and whether gate and up are one.
    ("compute.dtype=float16", WRITTEN),
    ("model.layers.mixer.bias=True", WRITTEN),
    ("model.layers.feed_forward.bias=True", SEPARATE),
    ("model.layers.feed_forward.activation=gelu", SEPARATE),
    ("model.layers.feed_forward.activation=clamped_swiglu", SEPARATE),
    ("model.layers.feed_forward=experts", SEPARATE),
    ("lora.rank=4", SEPARATE),
    ("compute.matmul_dtype=float8", {"norm": "in_quantizer"}),
    ("compute.matmul_dtype=float8 compute.float8_scaling=row", SEPARATE),
    (
        "compute.matmul_dtype=float8 parallel.data=4 parallel.tensor=2 parallel.row_groups=2",
        SEPARATE,
    ),
    # Collective matmuls, from 4,096 tokens a shard on GPUs.
    ("parallel.data=4 parallel.tensor=2 data.seq_len=8192", WRITTEN | {"collective_matmul": True}),
    ("parallel.data=4 parallel.tensor=2 data.seq_len=4096", WRITTEN),
    ("parallel.data=4 parallel.tensor=2 data.seq_len=8192 parallel.row_groups=2", SEPARATE),
    ("parallel.data=2 parallel.tensor=2 parallel.pipeline=2 data.seq_len=8192", WRITTEN),
    # Float32 sums of gradients, in complete matrices.
    ("parallel.zero=1", WHOLE | SUMMED),
    ("parallel.zero=1 parallel.layer_loop=scan", WHOLE | {"layers_per_vjp": 0}),
    ("parallel.zero=1 lora.rank=4", WHOLE | SEPARATE),
    ("parallel.zero=1 compute.matmul_dtype=float8", WHOLE | {"norm": "in_quantizer"}),
    (
        "parallel.zero=1 parallel.data=4 parallel.sequence=2",
        SUMMED | {"gathers_per_layer": False},
    ),
    (
        "parallel.zero=1 parallel.data=2 parallel.sequence=2 parallel.pipeline=2 "
        "parallel.virtual_stages=2",
        {"gathers_per_layer": False},
    ),
    (
        "parallel.zero=1 parallel.data=4 parallel.pipeline=2 parallel.virtual_stages=2",
        WHOLE | SUMMED,
    ),
    # Layers differentiated at a time.
    ("parallel.zero=1 model.layers=windows", WHOLE | SUMMED | {"layers_per_vjp": 2}),
    ("parallel.zero=1 parallel.remat=dots_offload", WHOLE | SUMMED | {"layers_per_vjp": 0}),
]


def config(words: str) -> Config:
    """8 devices, two sequences of a microbatch on each; layers unrolled."""
    fields = dict(word.split("=") for word in words.split())
    typed = {name: int(v) if v.isdigit() else VALUES.get(v, v) for name, v in fields.items()}
    defaults = {"parallel.data": 8, "parallel.layer_loop": "unroll", "model.layers": [BLOCK] * 4}
    cfg = replace(Config(), **defaults | typed)
    p = cfg.parallel
    microbatches = 2 if p.pipeline > 1 else 1
    rows = p.replica * p.data * p.expert * microbatches * (2 if p.row_groups > 1 else 1)
    more = {"parallel.num_microbatches": microbatches, "train.global_batch_size": rows}
    return resolve(replace(cfg, **more), 8)


@pytest.mark.parametrize(("words", "differs"), TABLE, ids=[words or "fsdp" for words, _ in TABLE])
def test_a_config_is_executed_as_the_table_says(words, differs):
    ex = on_gpus(config(words))
    assert {name: getattr(ex, name) for name in FSDP} == FSDP | differs
    assert ex == execution_of(ex.cfg, GPU)


def test_every_decision_takes_every_value():
    for name in FSDP:
        values = {FSDP[name], *(differs[name] for _, differs in TABLE if name in differs)}
        options = {"norm": 3, "layers_per_vjp": 3}.get(name, 2)
        assert len(values) == options, name


def test_small_tests_on_cpus_take_collective_matmuls_too():
    cfg = config("parallel.data=4 parallel.tensor=2 data.seq_len=64")
    assert execution_of(cfg, CPU).collective_matmul and not on_gpus(cfg).collective_matmul
    assert execution_of(cfg, CPU).weight_uses == 2 and on_gpus(cfg).weight_uses == 1


def test_in_words():
    words = list(on_gpus(config("parallel.data=4 parallel.tensor=2 data.seq_len=8192")).in_words())
    assert words == [
        "tensor overlap: collective matmuls",
        "norms: written before the matmul",
        "gate and up: one matmul",
        "weights: gathered per layer, one layer ahead",
        "backward: a chunk at a time",
    ]
    piped = config(
        "parallel.zero=1 parallel.data=4 parallel.pipeline=2 parallel.remat=dots_offload"
    )
    assert list(on_gpus(piped).in_words())[2:] == [
        "float32 gradient sums: in the matmuls",
        "idle pipeline slots: skipped",
        "activations: some in host memory",
        "backward: a chunk at a time",
    ]


def test_no_decision_needs_devices(monkeypatch):
    def started():
        raise AssertionError("started a backend")

    monkeypatch.setattr(decisions.Platform, "here", staticmethod(started))
    on_gpus(Config())  # `parallel.data` is -1 until the devices are known


@pytest.mark.parametrize(
    ("experts_per_token", "expert", "slack", "by"),
    [
        (8, 2, 1.1, "tokens"),
        (8, 8, 1.1, "tokens"),  # 7 copies of a token against 7.7
        (8, 16, 1.1, "rows"),  # 15 against 8.25
        (2, 2, 1.1, "tokens"),
        (2, 4, 1.1, "rows"),  # 3 against 1.65
        (2, 2, 0.5, "tokens"),  # a small buffer needs more rounds, not fewer bytes
    ],
)
def test_the_dispatch_of_fewer_bytes(experts_per_token, expert, slack, by):
    experts = dataclasses.replace(EXPERTS, num_experts=16, experts_per_token=experts_per_token)
    fields = {
        "model.layers": [Layer("layers", BLOCK.mixer, experts)],
        "parallel.expert": expert,
        "parallel.expert_slack": slack,
    }
    cfg = replace(Config(), **fields)
    assert on_gpus(cfg).expert_dispatch == by
    assert f"experts: dispatch by {by}" in on_gpus(cfg).in_words()
    for asked in ("tokens", "rows"):
        given = replace(cfg, **{"parallel.expert_dispatch": asked})
        assert on_gpus(given).expert_dispatch == asked
