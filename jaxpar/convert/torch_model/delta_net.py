"""The layer with Gated DeltaNet (Yang et al. 2024, 2412.06464)."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .convolution import CausalConvolution
from .layer import Rope, TorchLayer


class DeltaNetLayer(TorchLayer):
    """A layer whose heads each carry a state [K, V] from token to token."""

    def __init__(self, m: SimpleNamespace, feeds_forward: bool = True):
        super().__init__(m, feeds_forward)
        H, width = m.linear_num_value_heads, m.conv_kernel_size
        keys, values = m.linear_num_key_heads * m.linear_key_head_dim, H * m.linear_value_head_dim
        linear = lambda out: nn.Linear(m.d_model, out, bias=False)  # noqa: E731
        self.q, self.k, self.v, self.z = map(linear, (keys, keys, values, values))
        self.a, self.b = linear(H), linear(H)
        convolutions = (CausalConvolution(n, width, bias=False) for n in (keys, keys, values))
        self.conv_q, self.conv_k, self.conv_v = convolutions
        self.a_log, self.dt_bias = (nn.Parameter(torch.empty(H)) for _ in range(2))
        self.norm = nn.Parameter(torch.empty(m.linear_value_head_dim))
        self.o = nn.Linear(values, m.d_model, bias=False)

    def mix(self, h: Tensor, rope: Rope, seen: Tensor) -> Tensor:
        m = self.m
        q, k, v = (
            F.silu(convolve(project(h))).unflatten(-1, (-1, dim)).float()
            for project, convolve, dim in (
                (self.q, self.conv_q, m.linear_key_head_dim),
                (self.k, self.conv_k, m.linear_key_head_dim),
                (self.v, self.conv_v, m.linear_value_head_dim),
            )
        )
        per_key_head = m.linear_num_value_heads // m.linear_num_key_heads
        q, k = (unit(a).repeat_interleave(per_key_head, 2) for a in (q, k))
        step = F.softplus(self.a(h).float() + self.dt_bias.float())
        decay = (-self.a_log.float().exp() * step).exp()
        rate = (2 if m.linear_allow_neg_eigval else 1) * self.b(h).float().sigmoid()
        out = delta_rule(q * q.shape[-1] ** -0.5, k, v, decay, rate)
        out = F.rms_norm(out, self.norm.shape, self.norm.float(), m.linear_norm_eps or m.norm_eps)
        out = out * F.silu(self.z(h).float().unflatten(-1, out.shape[-2:]))
        return self.o(out.flatten(2).to(h.dtype))


def unit(x: Tensor) -> Tensor:
    """Each query or key, with a length of 1."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
    """Let the state forget, correct what it knows of each key, and read it: [B, T, H, V].

    Args:     q, k: [B, T, H, K]. v: [B, T, H, V]. decay, rate: [B, T, H]. decay may be
              [B, T, H, K], of each channel.
    """
    decay = decay[..., None] if decay.ndim == 3 else decay
    state = v.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1])
    out = []
    for t in range(v.shape[1]):
        state = state * decay[:, t, ..., None]
        known = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        change = rate[:, t, :, None] * (v[:, t] - known)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], change)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1)
