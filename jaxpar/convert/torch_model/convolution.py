"""The short convolution in front of a recurrence."""

import torch.nn.functional as F
from torch import Tensor, nn


class CausalConvolution(nn.Conv1d):
    """Convolution of each channel with its latest tokens, [B, T, C] to [B, T, C]."""

    def __init__(self, channels: int, width: int, bias: bool):
        super().__init__(channels, channels, width, groups=channels, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.transpose(1, 2), (self.kernel_size[0] - 1, 0))
        return super().forward(padded).transpose(1, 2)
