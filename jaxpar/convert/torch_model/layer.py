"""What layers of every kind have in common: norms, the residual stream, and a feed-forward."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from .feed_forward import TorchExperts, TorchFeedForward
from .norms import LayerNorm, TorchNorm

#: Cosine and sine; None without positions.
Rope = tuple[Tensor, Tensor] | None


class TorchLayer(nn.Module):
    """One block: a mixer of tokens, then a feed-forward. A subclass has the mixer's weights."""

    mixes = True

    def __init__(self, m: SimpleNamespace, feeds_forward: bool = True):
        super().__init__()
        self.m = m
        stream = LayerNorm if m.norm == "layer" else TorchNorm
        before = lambda: stream(m.d_model, m) if m.pre_norms else nn.Identity()  # noqa: E731
        after = lambda: TorchNorm(m.d_model, m) if m.post_norms else nn.Identity()  # noqa: E731
        self.mlp: nn.Module | None = None
        if self.mixes:
            self.attn_norm, self.attn_post_norm = before(), after()
        if feeds_forward:
            self.mlp_norm, self.mlp_post_norm = None if m.shared_norm else before(), after()
            self.mlp = TorchExperts(m) if m.num_experts else TorchFeedForward(m)
        if m.layer_scale:
            self.layer_scale = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor, rope: Rope, seen: Tensor) -> Tensor:
        by, before = self.m.residual_multiplier, x
        if self.mixes:
            x = x + by * self.attn_post_norm(self.mix(self.attn_norm(x), rope, seen))
        if self.mlp is None:
            return x
        h = (self.mlp_norm or self.attn_norm)(before if self.m.parallel_block else x)
        x = x + by * self.mlp_post_norm(self.mlp(h))
        return x * self.layer_scale if self.m.layer_scale else x

    def mix(self, h: Tensor, rope: Rope, seen: Tensor) -> Tensor:
        """Mix tokens.

        Args:     h: [B, T, D]. rope: cosine and sine of every place, [T, 1, R / 2]; None for a
                  layer without. seen: [T, T], which keys a query sees.
        """
        raise NotImplementedError


class FeedForwardLayer(TorchLayer):
    """A layer with a feed-forward alone."""

    mixes = False
