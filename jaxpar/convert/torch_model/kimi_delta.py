"""The layer with Kimi Delta Attention (Kimi Team 2025, 2510.26692)."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .convolution import CausalConvolution
from .delta_net import delta_rule, unit
from .layer import Rope, TorchLayer


class KimiDeltaLayer(TorchLayer):
    """A layer whose heads each carry a state [K, V], which decays by a number for each channel."""

    def __init__(self, m: SimpleNamespace, feeds_forward: bool = True):
        super().__init__(m, feeds_forward)
        H, width, latent = m.linear_num_key_heads, m.conv_kernel_size, m.linear_value_head_dim
        keys, values = H * m.linear_key_head_dim, H * latent
        linear = lambda n, out: nn.Linear(n, out, bias=False)  # noqa: E731
        self.q, self.k, self.v = (linear(m.d_model, n) for n in (keys, keys, values))
        self.f_a, self.f_b = linear(m.d_model, latent), linear(latent, keys)
        self.g_a, self.g_b = linear(m.d_model, latent), linear(latent, values)
        self.b = linear(m.d_model, H)
        convolutions = (CausalConvolution(n, width, bias=False) for n in (keys, keys, values))
        self.conv_q, self.conv_k, self.conv_v = convolutions
        self.a_log, self.dt_bias = nn.Parameter(torch.empty(H)), nn.Parameter(torch.empty(keys))
        self.norm = nn.Parameter(torch.empty(latent))
        self.o = linear(values, m.d_model)

    def mix(self, h: Tensor, rope: Rope, seen: Tensor) -> Tensor:
        m, H = self.m, self.m.linear_num_key_heads
        q, k, v = (
            F.silu(convolve(project(h))).unflatten(-1, (H, -1)).float()
            for project, convolve in (
                (self.q, self.conv_q),
                (self.k, self.conv_k),
                (self.v, self.conv_v),
            )
        )
        step = F.softplus(self.f_b(self.f_a(h)).float() + self.dt_bias.float())
        step = step.unflatten(-1, (H, -1))
        decay = (-self.a_log.float().exp()[:, None] * step).exp()
        rate = self.b(h).float().sigmoid()
        out = delta_rule(unit(q) * q.shape[-1] ** -0.5, unit(k), v, decay, rate)
        out = F.rms_norm(out, self.norm.shape, self.norm.float(), m.linear_norm_eps or m.norm_eps)
        out = out * self.g_b(self.g_a(h)).float().unflatten(-1, (H, -1)).sigmoid()
        return self.o(out.flatten(2).to(h.dtype))
