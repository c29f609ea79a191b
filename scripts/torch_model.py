"""The model in plain PyTorch, for files of `python -m jaxpar.convert to-torch RUN FILE.pt`.

    from torch_model import load
    model = load("FILE.pt")                 # float32; .to(torch.bfloat16) or .cuda() as you like
    logits = model(torch.tensor([[1, 2, 3]]))

Needs torch alone: copy this file to where it is used. FILE.json, beside FILE.pt, holds the fields.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def load(file: str | Path) -> "Decoder":
    """The model of a file, in float32; only tensors are unpickled."""
    m = SimpleNamespace(**json.loads(Path(file).with_suffix(".json").read_text()))
    with torch.device("meta"):
        model = Decoder(m)
    state = torch.load(file, weights_only=True, mmap=True)
    model.load_state_dict({name: w.float() for name, w in state.items()}, assign=True)
    return model.eval()


class Norm(nn.Module):
    """Root-mean-square norm over the last dim, in float32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (x32 * scale * self.weight.float()).to(x.dtype)


def frequencies(m: SimpleNamespace) -> Tensor:
    """Angle per position of each pair of dims, [head_dim / 2]; stretched as Llama 3.1's."""
    angle = m.rope_theta ** -(torch.arange(0, m.head_dim, 2).float() / m.head_dim)
    if m.rope_scaling is None:
        return angle
    s = SimpleNamespace(**m.rope_scaling)
    turns = s.original_max_position * angle / (2 * math.pi)
    ramp = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    keep = ramp.clamp(0, 1)
    return angle * (keep + (1 - keep) / s.factor)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE: the first half of each head's dims turned against the second; x is [B, T, H, K]."""
    a, b = x.float().chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class SwiGLU(nn.Module):
    """A gated feed-forward."""

    def __init__(self, m: SimpleNamespace):
        super().__init__()
        self.gate, self.up = (nn.Linear(m.d_model, m.d_ff, bias=m.mlp_bias) for _ in "gu")
        self.down = nn.Linear(m.d_ff, m.d_model, bias=m.mlp_bias)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(h)) * self.up(h))


class Experts(nn.Module):
    """Several SwiGLUs, of which each token takes the likeliest few."""

    def __init__(self, m: SimpleNamespace):
        super().__init__()
        self.m, self.router = m, nn.Linear(m.d_model, m.num_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(m) for _ in range(m.num_experts))

    def forward(self, h: Tensor) -> Tensor:
        chance = self.router(h).float().softmax(-1)
        likely, which = chance.topk(self.m.experts_per_token, -1)
        if self.m.normalize_experts:
            likely = likely / likely.sum(-1, keepdim=True)
        weights = torch.zeros_like(chance).scatter(-1, which, likely).to(h.dtype)
        return sum(weights[..., e, None] * f(h) for e, f in enumerate(self.experts))


class Layer(nn.Module):
    """One pre-norm block: attention, then a feed-forward."""

    def __init__(self, m: SimpleNamespace):
        super().__init__()
        self.m, D, heads, kv = m, m.d_model, m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        self.attn_norm, self.mlp_norm = Norm(D, m.norm_eps), Norm(D, m.norm_eps)
        self.q = nn.Linear(D, heads, bias=m.qkv_bias)
        self.k, self.v = (nn.Linear(D, kv, bias=m.qkv_bias) for _ in "kv")
        self.o = nn.Linear(heads, D, bias=m.out_bias)
        if m.qk_norm:
            self.q_norm, self.k_norm = (Norm(m.head_dim, m.norm_eps) for _ in "qk")
        self.mlp = Experts(m) if m.num_experts else SwiGLU(m)

    def forward(self, x: Tensor, angles: Tensor, seen: Tensor) -> Tensor:
        x = x + self.attention(self.attn_norm(x), angles, seen)
        return x + self.mlp(self.mlp_norm(x))

    def attention(self, h: Tensor, angles: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (w(h).unflatten(-1, (-1, self.m.head_dim)) for w in (self.q, self.k, self.v))
        if self.m.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, angles), rotate(k, angles)
        q, k, v = (a.transpose(1, 2) for a in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Tokens [B, T] to logits [B, T, V]."""

    def __init__(self, m: SimpleNamespace):
        super().__init__()
        self.m, self.embed = m, nn.Embedding(m.vocab_size, m.d_model)
        self.layers = nn.ModuleList(Layer(m) for _ in range(m.num_layers))
        self.norm = Norm(m.d_model, m.norm_eps)
        if not m.tie_embeddings:
            self.head = nn.Linear(m.d_model, m.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        angles = place[:, None] * frequencies(self.m).to(tokens.device)
        back = place[:, None] - place
        seen = (back >= 0) & (back < (self.m.sliding_window or len(place)))
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, angles, seen)
        head = self.embed if self.m.tie_embeddings else self.head
        return F.linear(self.norm(x), head.weight)
