"""The constants of the step-time model.

Each is a rate or a share from profiled steps on H200s, or from an isolated kernel. None is fitted
to a single run. docs/planning.md compares the resulting predictions with measured runs.
"""

import math

#: Loss at the edges of a matmul: a dim of size d reaches d / (d + TILE) of the rate. It is not
#: measured: widths of 2,048 and 4,096 show no difference beyond noise, so it is small. It only
#: keeps very narrow shards from looking as good as wide ones. `Gpu.matmul` is the rate at WIDE.
TILE = 32
WIDE = 0.983

#: Isolated causal attention on an H200, TFLOP/s by head dim: (T, forward, backward), the faster
#: backend of each, from kernels/attention/measured: short runs, except the backward of 64.
ATTENTION = {
    64: ((4096, 416, 468),),
    128: ((4096, 556, 446), (8192, 598, 500), (32768, 614, 539)),
    256: ((4096, 562, 353),),
}

#: Share of those rates within a step, where the power limit slows every kernel:
#: 0.88 to 0.95 in the profiles of 1.5B and 8B; at T = 131,072, 0.94 forward and 0.83 backward.
ATTENTION_IN_A_STEP = 0.90

#: FLOP/s of the grouped products of experts by product, counting padding, at these widths (D, F):
#: docs/architectures.md#expert-kernels, times 1 + half a tile a row of an expert. With padding
#: counted, they differ by 3% between 16, 64 and 128 experts of 131,072 rows. Within a step on two
#: H100s, they take as long (715 TFLOP/s in the mean; expert axis, so that nothing else is computed
#: meanwhile).
GROUPED_AT = 2048, 768
GROUPED = {
    "gate_up": 734e12,
    "down": 690e12,
    "to_hidden": 724e12,
    "to_input": 730e12,
    "weights": 700e12,
}

#: The same in float8, on an H200, of a prototype's kernels (16 and 64 experts).
GROUPED_FLOAT8 = {"gate_up": 1350e12, "down": 1140e12, "to_hidden": 1300e12, "to_input": 1320e12}

#: Elements per token that take as long as the router and the plan, many small kernels: D times the
#: first, plus E and k times the others. Together 0.48 ms of a profile (16,384 tokens, D 2,048, 128
#: experts, top 8, H100); the division into three is an estimate.
ROUTER = {"D": 9, "E": 120, "k": 768}

#: Time (s) that a loop of further rounds waits for the host, unless it is part of a CUDA graph: of
#: 24 branches on four H200s, whose step took 321.7 ms, and 319.6 as parts of graphs (an earlier
#: program, which decided twice a layer).
ROUND_WAIT = 0.09e-3

#: Time (s) of a layer's further round, forward and backward: passes over buffers and over the
#: weights' gradients, 1.76 ms. With slack 1.1 on two H100s, 9.2 ms more than with 2.0 (6 layers, of
#: which half need one), of which 4 were decisions of that program. Gate, up and the rows' gradients
#: are now computed once more: 0.13 ms of products for 10,000 rows, counted.
FURTHER_ROUND = 1.89e-3

#: How far loads of the fullest rank are from their mean: no layer exceeds it by half of this, and
#: half of the layers exceed the mean. An estimate: a fresh router's loads.
SPREAD_OF_LOADS = 0.3

#: Share of a copy's bandwidth that fused elementwise kernels reach (RMSNorm and rotary embedding
#: 0.56 to 0.81, SwiGLU 1.0: docs/experiments.md#bandwidth-of-elementwise-kernels).
ELEMENTWISE = 0.86

#: Share of NVLink's bandwidth that NCCL's kernels reach during matmuls, by the ranks of a group:
#: they wait for multiprocessors that the matmul occupies. Copy engines do not.
NCCL = {2: 0.38, 4: 0.26}
COPIES = 0.84

#: Share of NVLink's bandwidth that gathers reach which ZeRO-1 runs at the beginning of a step, most
#: of them beside nothing: 0.46 to 0.63 in nine profiles (1.5B, Moonlight and Qwen3-30B-A3B).
GATHERED_ONCE = 0.55

#: The same for the all-to-alls of rows of experts, by themselves: 281 GB/s on two H100s.
ROWS = 0.62

#: Share of a collective's time that is exposed, by axis, on NVLink: gathers of the first layer,
#: scatters of the last, waiting for a matmul to end, and launches of copies. Of gathers at the
#: beginning of a step, 0.43 to 0.85 in the same nine profiles.
EXPOSED = {
    "data": 0.18,
    "gathered once": 0.68,
    "replica": 0.35,
    "sequence": 0.35,
    "tensor": 1.0,
    "tensor in row groups": 0.5,
    "tensor in shards": 0.15,
    "pipeline": 0.45,
    "matrices": 1.0,
}

#: Times that a compressed sum over replicas reads or writes a shard of gradients in float32, beside
#: its errors, which count as moments do. From steps of 0.75B on two H200s; that of top_k is its
#: kernel's (docs/experiments.md).
COMPRESSION = {"float32": 0.0, "bfloat16": 1.0, "int8": 5.0, "top_k": 12.5}

#: Share of the compute time that can hide gathers and scatters, if they take longer.
HIDING = 0.85

#: Copies of exchanged matrices in a step: stacking and unstacking, and transposing at both ends of
#: two exchanges. A count of the operations, not measured.
EXCHANGE_COPIES = 6

#: Slowdown of matmuls by concurrent NCCL kernels, relative to the kernels' own time.
CONTENTION = 0.18

#: Gap between kernels (s), kernels per layer and microbatch, and the start of a step (s).
GAP = 1e-6
KERNELS_PER_LAYER = 65
STEP_START = 1e-3


def matmul_share(*dims: float) -> float:
    """Return the share of a GPU's rate that a matmul with these three dims reaches."""
    return math.prod(d / (d + TILE) for d in dims) / WIDE


def attention_rate(head_dim: int, length: int) -> tuple[float, float]:
    """Return the FLOP/s (forward, backward) in a step on an H200.

    Rates are interpolated in log T. A head dim that was not measured uses the next larger one's
    time, so the rate falls with the used share of it.
    """
    known = next((d for d in sorted(ATTENTION) if d >= head_dim), max(ATTENTION))
    rows = ATTENTION[known]
    used = min(head_dim / known, 1.0) * ATTENTION_IN_A_STEP * 1e12
    below = [row for row in rows if row[0] <= length] or [rows[0]]
    above = [row for row in rows if row[0] >= length] or [rows[-1]]
    (t0, *low), (t1, *high) = below[-1], above[0]
    part = math.log(length / t0) / math.log(t1 / t0) if t1 > t0 else 0.0
    forward, backward = (a + part * (b - a) for a, b in zip(low, high, strict=True))
    return forward * used, backward * used


def nccl_share(ranks: int) -> float:
    """Return the share of the link that NCCL reaches during matmuls."""
    return NCCL[2] if ranks <= 2 else NCCL[4]


#: Load of the fullest rank of an expert axis, relative to the mean.
EXPERT_IMBALANCE = 1.1
