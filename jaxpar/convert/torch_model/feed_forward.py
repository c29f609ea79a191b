"""Feed-forwards: dense, or a mixture of experts."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def gated(gate: Tensor, up: Tensor, m: SimpleNamespace) -> Tensor:
    """Hidden values of a feed-forward: SwiGLU, GeGLU, or gpt-oss's SwiGLU of clamped values."""
    if m.activation == "clamped_swiglu":
        gate, up = gate.clamp(max=m.swiglu_limit), up.clamp(-m.swiglu_limit, m.swiglu_limit)
        return gate * (m.swiglu_alpha * gate).sigmoid() * (up + 1)
    return up * activated(gate, m.activation)


def activated(x: Tensor, kind: str) -> Tensor:
    """The activation of a feed-forward."""
    if kind == "silu":
        return F.silu(x)
    if kind == "relu_squared":
        return F.relu(x).square()
    return F.gelu(x, approximate="none" if kind == "gelu_exact" else "tanh")


class TorchFeedForward(nn.Module):
    """The feed-forward: a gated linear unit, or two matrices without a gate."""

    def __init__(self, m: SimpleNamespace):
        super().__init__()
        self.m = m
        self.gate, self.up = (nn.Linear(m.d_model, m.d_ff, bias=m.mlp_bias) for _ in "gu")
        if not m.mlp_gate:
            self.gate = None
        self.down = nn.Linear(m.d_ff, m.d_model, bias=m.mlp_bias)

    def forward(self, h: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(activated(self.up(h), self.m.activation))
        return self.down(gated(self.gate(h), self.up(h), self.m))


class TorchExperts(nn.Module):
    """Mixture of experts: each token uses the experts to which the router gives most."""

    def __init__(self, m: SimpleNamespace):
        super().__init__()
        self.m = m
        self.router = nn.Linear(m.d_model, m.num_experts, bias=m.router_linear_bias)
        expert = SimpleNamespace(**vars(m) | {"mlp_bias": m.expert_bias})
        self.experts = nn.ModuleList(TorchFeedForward(expert) for _ in range(m.num_experts))
        if m.router_bias:
            self.router_bias = nn.Parameter(torch.empty(m.num_experts))
        if m.num_shared_experts:
            wide = vars(m) | {"d_ff": m.num_shared_experts * m.d_ff}
            self.shared = TorchFeedForward(SimpleNamespace(**wide))
        if m.shared_expert_gate:
            self.shared_gate = nn.Linear(m.d_model, 1, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        m, logits = self.m, self.router(h).float()
        scores = logits.sigmoid() if m.router_score == "sigmoid" else logits.softmax(-1)
        which = self.choose(scores + self.router_bias if m.router_bias else scores)
        given = scores.gather(-1, which)
        given = F.normalize(given, p=1, dim=-1) if m.normalize_experts else given
        weights = torch.zeros_like(scores).scatter(-1, which, given * m.router_scale).to(h.dtype)
        by_expert = zip(weights.unsqueeze(-2).unbind(-1), self.experts, strict=True)
        if m.router_scales_input:
            out = sum((w != 0) * f(w * h) for w, f in by_expert)
        else:
            out = sum(w * f(h) for w, f in by_expert)
        if not m.num_shared_experts:
            return out
        shared = self.shared(h)
        return out + (shared * self.shared_gate(h).sigmoid() if m.shared_expert_gate else shared)

    def choose(self, scores: Tensor) -> Tensor:
        """Return the k best experts of the best groups, by a group's two best scores."""
        m = self.m
        if m.router_groups > 1:
            groups = scores.unflatten(-1, (m.router_groups, -1))
            best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1)
            chosen = best.topk(m.router_groups_per_token, -1).indices
            others = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
            scores = groups.masked_fill(others[..., None], -math.inf).flatten(-2)
        return scores.topk(m.experts_per_token, -1).indices
