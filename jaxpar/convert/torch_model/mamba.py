"""The layer with Mamba-2 (Dao & Gu 2024, 2405.21060)."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .convolution import CausalConvolution
from .layer import Rope, TorchLayer


class MambaLayer(TorchLayer):
    """A layer whose heads each carry a state [N, P] from token to token.

    The paper calls values x, keys B and queries C.
    """

    def __init__(self, m: SimpleNamespace, feeds_forward: bool = True):
        super().__init__(m, feeds_forward)
        H, width = m.mamba_num_heads, m.conv_kernel_size
        values, keys = H * m.mamba_head_dim, m.mamba_num_groups * m.mamba_state_size
        linear = lambda out: nn.Linear(m.d_model, out, bias=False)  # noqa: E731
        self.z, self.x, self.b, self.c = map(linear, (values, values, keys, keys))
        self.dt = linear(H)
        convolutions = (CausalConvolution(n, width, bias=True) for n in (values, keys, keys))
        self.conv_x, self.conv_b, self.conv_c = convolutions
        self.a_log, self.dt_bias, self.d = (nn.Parameter(torch.empty(H)) for _ in range(3))
        self.norm = nn.Parameter(torch.empty(values))
        self.o = nn.Linear(values, m.d_model, bias=False)

    def mix(self, h: Tensor, rope: Rope, seen: Tensor) -> Tensor:
        m = self.m
        x, b, c = (
            F.silu(convolve(project(h))).unflatten(-1, (-1, dim)).float()
            for project, convolve, dim in (
                (self.x, self.conv_x, m.mamba_head_dim),
                (self.b, self.conv_b, m.mamba_state_size),
                (self.c, self.conv_c, m.mamba_state_size),
            )
        )
        per_group = m.mamba_num_heads // m.mamba_num_groups
        b, c = (a.repeat_interleave(per_group, 2) for a in (b, c))
        step = F.softplus(self.dt(h).float() + self.dt_bias.float()).clamp(min=m.mamba_min_step)
        decay = (-self.a_log.float().exp() * step).exp()
        out = state_space(c, b, step[..., None] * x, decay) + self.d.float()[:, None] * x
        out = (out.flatten(2) * F.silu(self.z(h).float())).unflatten(-1, (m.mamba_num_groups, -1))
        out = F.rms_norm(out, out.shape[-1:], eps=m.norm_eps).flatten(2) * self.norm.float()
        return self.o(out.to(h.dtype))


def state_space(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """Let the state forget, write each value under its key, and read it: [B, T, H, P].

    Args:     q, k: [B, T, H, N]. v: [B, T, H, P]. decay: [B, T, H].
    """
    state = v.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1])
    out = []
    for t in range(v.shape[1]):
        written = torch.einsum("bhn,bhp->bhnp", k[:, t], v[:, t])
        state = state * decay[:, t, :, None, None] + written
        out.append(torch.einsum("bhnp,bhn->bhp", state, q[:, t]))
    return torch.stack(out, 1)
