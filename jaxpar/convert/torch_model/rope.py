"""Rotary embeddings: their frequencies, and how heads are turned."""

import math
from types import SimpleNamespace

import torch
from torch import Tensor


def frequencies(m: SimpleNamespace, theta: float, scaled: bool, length: int) -> Tensor:
    """Angle per position of each pair of the rotated dims, scaled as the model says."""
    rotated = m.qk_rope_head_dim if m.kv_lora_rank else int(m.head_dim * m.rope_fraction)
    angle = theta ** -(torch.arange(0, rotated, 2).float() / rotated)
    if m.rope_scaling is None or not scaled:
        return angle
    s = SimpleNamespace(**m.rope_scaling)
    if s.kind == "linear":
        return angle / s.factor
    if s.kind == "proportional":
        return torch.where(
            torch.arange(len(angle)) < int(s.turning * len(angle)), angle / s.factor, 0
        )
    if s.kind == "longrope":
        factors = s.long_factors if length > s.original_max_position else s.short_factors
        return angle / torch.tensor([float(factor) for factor in factors.split(",")])
    if s.kind == "yarn":
        keep = 1 - yarn_ramp(s, theta, rotated)
    else:
        turns = s.original_max_position * angle / (2 * math.pi)
        if s.low_freq_factor == s.high_freq_factor:
            return torch.where(turns > s.low_freq_factor, angle, angle / s.factor)
        keep = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
    return angle * (keep + (1 - keep) / s.factor)


def yarn_ramp(s: SimpleNamespace, theta: float, rotated: int) -> Tensor:
    """Which pairs YaRN scales: 0 for those that turn often in the original context, else 1."""
    once = s.original_max_position / (2 * math.pi)
    first, last = (rotated * math.log(once / n, theta) / 2 for n in (s.beta_fast, s.beta_slow))
    if s.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    return ((torch.arange(rotated // 2) - first) / ((last - first) or 1e-3)).clamp(0, 1)


def rotary_factor(m: SimpleNamespace) -> float:
    """Factor of cosine and sine."""
    s = SimpleNamespace(**(m.rope_scaling or {"kind": None}))
    if s.kind not in ("yarn", "longrope"):
        return 1.0
    if s.attention_factor is not None:
        return s.attention_factor
    if s.kind == "yarn":
        return 0.1 * math.log(s.factor) + 1
    return math.sqrt(1 + math.log(s.factor) / math.log(s.original_max_position))


def query_scale(m: SimpleNamespace, length: int, rotated: bool) -> Tensor:
    """Factor of the queries of every place, [T], in a layer with RoPE or without."""
    if m.nope_query_beta and not rotated:
        turns = (torch.arange(length) + 1).div(m.nope_query_span, rounding_mode="floor")
        return 1 + m.nope_query_beta * torch.log1p(turns.float())
    s = SimpleNamespace(**(m.rope_scaling or {"query_beta": 0.0, "original_max_position": 1}))
    turns = torch.arange(length).div(s.original_max_position, rounding_mode="floor")
    return 1 + s.query_beta * torch.log1p(turns.float())


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Apply RoPE to the first dims of each head, in pairs from two halves or of neighbors.

    Args:     x: [B, T, H, K]. cos, sin: [T, 1, R / 2], for the first R dims.
    """
    rotated, rest = x[..., : 2 * cos.shape[-1]].float(), x[..., 2 * cos.shape[-1] :]
    if layout == "interleaved":
        a, b = rotated[..., ::2], rotated[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = rotated.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)
