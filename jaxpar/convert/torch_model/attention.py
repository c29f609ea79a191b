"""The layer with attention whose keys and values are projections of its input."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layer import Rope, TorchLayer
from .norms import TorchNorm
from .rope import query_scale, rotate


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Soft cap of scores or logits."""
    return x if cap is None else cap * torch.tanh(x / cap)


class AttentionLayer(TorchLayer):
    """A layer with attention."""

    def __init__(self, m: SimpleNamespace, feeds_forward: bool = True):
        super().__init__(m, feeds_forward)
        D, heads, kv = m.d_model, m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        wide = (heads, kv) if m.qk_norm_over == "all" else (m.head_dim, m.head_dim)
        gains = m.qk_norm and m.qk_norm_gain
        norms = (TorchNorm(width, m) if gains else nn.Identity() for width in wide)
        self.q_norm, self.k_norm = norms
        self.q = nn.Linear(D, heads, bias=m.qkv_bias)
        self.k, self.v = (nn.Linear(D, kv, bias=m.qkv_bias) for _ in "kv")
        if m.global_keys_as_values:
            self.v = None
        self.o = nn.Linear(heads, D, bias=m.out_bias)
        if m.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(m.num_heads))
        if m.attention_gate:
            self.gate = nn.Linear(D, heads, bias=False)

    def mix(self, h: Tensor, rope: Rope, seen: Tensor) -> Tensor:
        q, k = self.q(h), self.k(h)
        v = k if self.v is None else self.v(h)
        if self.m.qk_norm_over == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (a.unflatten(-1, (-1, self.m.head_dim)) for a in (q, k, v))
        if self.m.value_norm:
            v = F.rms_norm(v.float(), v.shape[-1:], eps=self.m.norm_eps).to(v.dtype)
        if self.m.qk_norm_over == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = (rotate(a, *rope, self.m.rope_layout) for a in (q, k))
            if self.m.qk_norm and not self.m.qk_norm_gain:
                q, k = (F.rms_norm(a, a.shape[-1:], eps=self.m.norm_eps) for a in (q, k))
        q = q * query_scale(self.m, q.shape[1], rope is not None).to(q)[:, None, None]
        q, k, v = (a.transpose(1, 2) for a in (q, k, v))
        scale = self.m.attention_multiplier
        scale = (self.m.query_scale_dim or self.m.head_dim) ** -0.5 if scale is None else scale
        if self.m.attention_sinks or self.m.attention_softcap is not None:
            out = self.by_scores(q * scale, k, v, seen)
        else:
            out = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
        out = out.transpose(1, 2).flatten(2)
        return self.o(out * self.gate(h).sigmoid() if self.m.attention_gate else out)

    def by_scores(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """Attention with capped scores, or a learned one per head; q, k, v [B, H, T, K]."""
        k, v = (a.repeat_interleave(q.shape[1] // k.shape[1], 1) for a in (k, v))
        scores = capped((q @ k.transpose(-2, -1)).float(), self.m.attention_softcap)
        scores = scores.masked_fill(~seen, -math.inf)
        if not self.m.attention_sinks:
            return scores.softmax(-1).to(v.dtype) @ v
        sinks = self.sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1].to(v.dtype) @ v
