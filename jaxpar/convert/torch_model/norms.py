"""The norms."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """Norm with mean and bias over the last dim, in float32."""

    def __init__(self, width: int, m: SimpleNamespace):
        super().__init__(width, eps=m.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        shape, w = self.normalized_shape, (self.weight.float(), self.bias.float())
        return F.layer_norm(x.float(), shape, *w, self.eps).to(x.dtype)


class TorchNorm(nn.Module):
    """Root-mean-square norm over the last dim, in float32."""

    def __init__(self, width: int, m: SimpleNamespace):
        super().__init__()
        self.weight, self.m = nn.Parameter(torch.empty(width)), m

    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight.float() + self.m.norm_offset
        return F.rms_norm(x.float(), gain.shape, gain, self.m.norm_eps).to(x.dtype)
