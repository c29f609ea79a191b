"""The constants of the step-time model: a handful, each with what it stands for.

Each is a rate or a share that was read off profiled steps on H200s, or off a kernel alone; none is
fitted to a single run. docs/planning.md compares predictions made with them and measured runs.
"""

import math

#: What is lost where a matmul's dims end: a dim of d reaches d / (d + TILE) of the rate. Read off
#: no profile: widths of 2,048 and 4,096 show no difference beyond the noise, so it is small, and
#: only keeps very narrow shards from looking as good as wide ones. `Gpu.matmul` is at WIDE.
TILE = 32
WIDE = 0.983

#: Causal attention alone on an H200, TFLOP/s by head dim and T: (T, forward, backward), the faster
#: backend of each, from kernels/attention/measured: short runs, but for the backward of 64.
ATTENTION = {
    64: ((4096, 416, 468),),
    128: ((4096, 556, 446), (8192, 598, 500), (32768, 614, 539)),
    256: ((4096, 562, 353),),
}

#: Share of those that is left within a step, where the power limit holds every kernel back:
#: 0.88 to 0.95 in the profiles of 1.5B and 8B; at T = 131,072, 0.94 forward and 0.83 backward.
ATTENTION_IN_A_STEP = 0.90

#: Share of a copy's bandwidth that fused elementwise kernels reach (RMSNorm and rotary embedding
#: 0.56 to 0.81, SwiGLU 1.0: docs/LOG.md).
ELEMENTWISE = 0.86

#: Share of NVLink's bandwidth that NCCL's kernels reach beside matmuls, by the ranks of a group: a
#: matmul holds multiprocessors that they wait for. Copy engines wait for none.
NCCL = {2: 0.38, 4: 0.26}
COPIES = 0.84

#: Share of a collective's time that nothing hides, by axis, on NVLink: gathers of the first layer
#: and scatters of the last, what waits for a matmul to end, and the launches of copies.
EXPOSED = {
    "data": 0.18,
    "replica": 0.35,
    "sequence": 0.35,
    "tensor": 1.0,
    "tensor in row groups": 0.5,
    "tensor in shards": 0.15,
    "pipeline": 0.45,
}

#: Share of the computing behind which gathers and scatters can hide, where they take longer.
HIDING = 0.85

#: Time by which NCCL's kernels slow down the matmuls beside them, over their own time.
CONTENTION = 0.18

#: Gap between kernels, and kernels per layer and microbatch; and what a step begins with, seconds.
GAP = 1e-6
KERNELS_PER_LAYER = 65
STEP_START = 1e-3


def matmul_share(*dims: float) -> float:
    """Share of a GPU's rate that a matmul with these three dims reaches."""
    return math.prod(d / (d + TILE) for d in dims) / WIDE


def attention_rate(head_dim: int, length: int) -> tuple[float, float]:
    """FLOP/s (forward, backward) in a step on an H200, between the lengths by their logarithm.

    A head dim that was not measured takes the next larger one's time per element, so that the
    rate falls with the share of it that is used.
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
    """Share of the link that NCCL reaches beside matmuls."""
    return NCCL[2] if ranks <= 2 else NCCL[4]
