"""The layer with multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1)."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layer import Rope, TorchLayer
from .norms import TorchNorm
from .rope import rotate


class LatentAttentionLayer(TorchLayer):
    """A layer whose keys and values are projections of a latent, and queries too if they have one.

    The last dims of each head are rotated. Their key is shared by all heads.
    """

    def __init__(self, m: SimpleNamespace, feeds_forward: bool = True):
        super().__init__(m, feeds_forward)
        of_latents = SimpleNamespace(**vars(m) | {"norm_eps": m.latent_norm_eps})
        linear = lambda width, out: nn.Linear(width, out, bias=False)  # noqa: E731
        H, self.nope = m.num_heads, m.head_dim - m.qk_rope_head_dim
        if m.q_lora_rank is None:
            self.q = linear(m.d_model, H * m.head_dim)
        else:
            self.q_a = linear(m.d_model, m.q_lora_rank)
            self.q_a_norm = TorchNorm(m.q_lora_rank, of_latents)
            self.q_b = linear(m.q_lora_rank, H * m.head_dim)
        self.kv_a = linear(m.d_model, m.kv_lora_rank + m.qk_rope_head_dim)
        self.kv_a_norm = TorchNorm(m.kv_lora_rank, of_latents)
        self.kv_b = linear(m.kv_lora_rank, H * (self.nope + m.v_head_dim))
        self.o = linear(H * m.v_head_dim, m.d_model)

    def mix(self, h: Tensor, rope: Rope, seen: Tensor) -> Tensor:
        m, sizes = self.m, (self.nope, self.m.qk_rope_head_dim)
        q = self.q(h) if m.q_lora_rank is None else self.q_b(self.q_a_norm(self.q_a(h)))
        latent, shared = self.kv_a(h).split((m.kv_lora_rank, sizes[1]), -1)
        kv = self.kv_b(self.kv_a_norm(latent)).unflatten(-1, (m.num_heads, -1))
        k, v = kv.split((self.nope, m.v_head_dim), -1)
        q, q_rope = q.unflatten(-1, (m.num_heads, -1)).split(sizes, -1)
        k_rope = shared[:, :, None]
        if rope is not None:
            q_rope, k_rope = (rotate(a, *rope, m.rope_layout) for a in (q_rope, k_rope))
        q = torch.cat((q, q_rope), -1)
        k = torch.cat((k, k_rope.expand_as(q_rope)), -1)
        q, k, v = (a.transpose(1, 2) for a in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, seen, scale=score_scale(m))
        return self.o(out.transpose(1, 2).flatten(2))


def score_scale(m: SimpleNamespace) -> float:
    """Factor of attention scores; one with YaRN's `mscale_all_dim` grows with the context."""
    scale = m.attention_multiplier
    scale = (m.query_scale_dim or m.head_dim) ** -0.5 if scale is None else scale
    if m.rope_scaling is None:
        return scale
    s = SimpleNamespace(**m.rope_scaling)
    return scale * (0.1 * s.mscale_all_dim * math.log(s.factor) + 1) ** 2
