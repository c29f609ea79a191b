"""The model in plain PyTorch, for files of `python -m jaxpar.convert to-torch RUN FILE.pt`.

    from torch_model import load
    model = load("FILE.pt")                 # float32; .to(torch.bfloat16) or .cuda() as you like
    logits = model(torch.tensor([[1, 2, 3]]))

This file needs only torch, so you can copy it anywhere. FILE.json, next to FILE.pt, has the fields.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def load(file: str | Path) -> "Decoder":
    """Load the model of a file, in float32. Only tensors are unpickled."""
    m = SimpleNamespace(**json.loads(Path(file).with_suffix(".json").read_text()))
    with torch.device("meta"):
        model = Decoder(m)
    state = torch.load(file, weights_only=True, mmap=True)
    model.load_state_dict({name: w.float() for name, w in state.items()}, assign=True)
    return model.eval()


class LayerNorm(nn.LayerNorm):
    """Norm with mean and bias over the last dim, in float32."""

    def __init__(self, width: int, m: SimpleNamespace):
        super().__init__(width, eps=m.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        shape, w = self.normalized_shape, (self.weight.float(), self.bias.float())
        return F.layer_norm(x.float(), shape, *w, self.eps).to(x.dtype)


class Norm(nn.Module):
    """Root-mean-square norm over the last dim, in float32."""

    def __init__(self, width: int, m: SimpleNamespace):
        super().__init__()
        self.weight, self.m = nn.Parameter(torch.empty(width)), m

    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight.float() + self.m.norm_offset
        return F.rms_norm(x.float(), gain.shape, gain, self.m.norm_eps).to(x.dtype)


def frequencies(m: SimpleNamespace, theta: float, scaled: bool, length: int) -> Tensor:
    """Angle per position of each pair of the rotated dims, scaled as the model says."""
    rotated = int(m.head_dim * m.rope_fraction)
    angle = theta ** -(torch.arange(0, rotated, 2).float() / rotated)
    if m.rope_scaling is None or not scaled:
        return angle
    s = SimpleNamespace(**m.rope_scaling)
    if s.kind == "linear":
        return angle / s.factor
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


def query_scale(m: SimpleNamespace, length: int) -> Tensor:
    """Factor of the queries of every place, [T]."""
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


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Soft cap of scores or logits."""
    return x if cap is None else cap * torch.tanh(x / cap)


class FeedForward(nn.Module):
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


class Experts(nn.Module):
    """Mixture of experts: each token uses the experts to which the router gives most."""

    def __init__(self, m: SimpleNamespace):
        super().__init__()
        self.m = m
        self.router = nn.Linear(m.d_model, m.num_experts, bias=m.router_linear_bias)
        expert = SimpleNamespace(**vars(m) | {"mlp_bias": m.expert_bias})
        self.experts = nn.ModuleList(FeedForward(expert) for _ in range(m.num_experts))
        if m.router_bias:
            self.router_bias = nn.Parameter(torch.empty(m.num_experts))
        if m.num_shared_experts:
            wide = vars(m) | {"d_ff": m.num_shared_experts * m.d_ff}
            self.shared = FeedForward(SimpleNamespace(**wide))

    def forward(self, h: Tensor) -> Tensor:
        m, logits = self.m, self.router(h).float()
        scores = logits.sigmoid() if m.router_score == "sigmoid" else logits.softmax(-1)
        which = self.choose(scores + self.router_bias if m.router_bias else scores)
        given = scores.gather(-1, which)
        given = F.normalize(given, p=1, dim=-1) if m.normalize_experts else given
        weights = torch.zeros_like(scores).scatter(-1, which, given * m.router_scale).to(h.dtype)
        out = sum(weights[..., e, None] * f(h) for e, f in enumerate(self.experts))
        return out + self.shared(h) if m.num_shared_experts else out

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


class Layer(nn.Module):
    """One block: attention, then a feed-forward."""

    def __init__(self, m: SimpleNamespace):
        super().__init__()
        self.m, D, heads, kv = m, m.d_model, m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        norm = lambda width, used=True: Norm(width, m) if used else nn.Identity()  # noqa: E731
        stream = LayerNorm if m.norm == "layer" else Norm
        before = lambda: stream(D, m) if m.pre_norms else nn.Identity()  # noqa: E731
        self.attn_norm, self.mlp_norm = before(), None if m.shared_norm else before()
        self.attn_post_norm, self.mlp_post_norm = norm(D, m.post_norms), norm(D, m.post_norms)
        wide = heads, kv
        if m.qk_norm_over == "head":
            wide = m.head_dim, m.head_dim
        self.q_norm, self.k_norm = (norm(width, m.qk_norm) for width in wide)
        self.q = nn.Linear(D, heads, bias=m.qkv_bias)
        self.k, self.v = (nn.Linear(D, kv, bias=m.qkv_bias) for _ in "kv")
        self.o = nn.Linear(heads, D, bias=m.out_bias)
        if m.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(m.num_heads))
        self.mlp = Experts(m) if m.num_experts else FeedForward(m)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, seen: Tensor) -> Tensor:
        by = self.m.residual_multiplier
        before = x
        x = x + by * self.attn_post_norm(self.attention(self.attn_norm(x), rope, seen))
        h = (self.mlp_norm or self.attn_norm)(before if self.m.parallel_block else x)
        return x + by * self.mlp_post_norm(self.mlp(h))

    def attention(self, h: Tensor, rope: tuple[Tensor, Tensor] | None, seen: Tensor) -> Tensor:
        q, k, v = self.q(h), self.k(h), self.v(h)
        if self.m.qk_norm_over == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (a.unflatten(-1, (-1, self.m.head_dim)) for a in (q, k, v))
        if self.m.qk_norm_over == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = (rotate(a, *rope, self.m.rope_layout) for a in (q, k))
        q = q * query_scale(self.m, q.shape[1]).to(q)[:, None, None]
        q, k, v = (a.transpose(1, 2) for a in (q, k, v))
        scale = self.m.attention_multiplier
        scale = (self.m.query_scale_dim or self.m.head_dim) ** -0.5 if scale is None else scale
        if self.m.attention_sinks or self.m.attention_softcap is not None:
            out = self.by_scores(q * scale, k, v, seen)
        else:
            out = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))

    def by_scores(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """Attention with capped scores, or a learned one per head; q, k, v [B, H, T, K]."""
        k, v = (a.repeat_interleave(q.shape[1] // k.shape[1], 1) for a in (k, v))
        scores = capped((q @ k.transpose(-2, -1)).float(), self.m.attention_softcap)
        scores = scores.masked_fill(~seen, -math.inf)
        if not self.m.attention_sinks:
            return scores.softmax(-1).to(v.dtype) @ v
        sinks = self.sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1].to(v.dtype) @ v


class Decoder(nn.Module):
    """The model: tokens [B, T] to logits [B, T, V]."""

    def __init__(self, m: SimpleNamespace):
        super().__init__()
        self.m, self.embed = m, nn.Embedding(m.vocab_size, m.d_model)
        self.layers = nn.ModuleList(Layer(m) for _ in range(m.num_layers))
        self.norm = (LayerNorm if m.norm == "layer" else Norm)(m.d_model, m)
        learned = m.positions == "learned"
        self.positions = nn.Embedding(m.max_positions, m.d_model) if learned else None
        self.head = None if m.tie_embeddings else nn.Linear(m.d_model, m.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        m, place = self.m, torch.arange(tokens.shape[1], device=tokens.device)
        back = place[:, None] - place
        x = self.embed(tokens) * (math.sqrt(m.d_model) if m.embed_scale else 1)
        x = x * m.embedding_multiplier
        if self.positions is not None:
            x = x + self.positions(place)
        for i, layer in enumerate(self.layers, 1):
            is_global = m.global_every and i % m.global_every == 0
            window = None if is_global else m.sliding_window
            without = m.positions == "learned" or (m.nope_every and i % m.nope_every == 0)
            rope = None if without else self.rope(place, is_global)
            x = layer(x, rope, (back >= 0) & (back < (window or len(place))))
        logits = F.linear(self.norm(x), (self.head or self.embed).weight) / m.logits_scaling
        return capped(logits, m.logits_softcap)

    def rope(self, place: Tensor, is_global: bool) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every place, [T, 1, R / 2], in global layers or in the others."""
        m = self.m
        local = m.global_every and not is_global
        theta = m.local_rope_theta if local and m.local_rope_theta else m.rope_theta
        scaled = m.local_rope_scaling or not local
        angles = place[:, None] * frequencies(m, theta, scaled, len(place)).to(place.device)
        factor = rotary_factor(m) if scaled else 1.0
        return angles.cos()[:, None] * factor, angles.sin()[:, None] * factor
