"""The model in plain PyTorch, for files of `python -m jaxpar.convert to-torch RUN FILE.pt`.

    from torch_model import load
    model = load("FILE.pt")                 # float32; .to(torch.bfloat16) or .cuda() as you like
    logits = model(torch.tensor([[1, 2, 3]]))

This file needs only torch, so you can copy it anywhere. FILE.json, next to FILE.pt, has the
fields. Recurrent layers go from token to token, as their papers write them.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """LayerNorm with mean and bias over the last dim, in float32."""

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


# ----------------------------------- Rotary embeddings: their frequencies, and how heads are turned


def frequencies(m: SimpleNamespace, theta: float, scaled: bool, length: int) -> Tensor:
    """Angle per position of each pair of the rotated dims, scaled as the model says."""
    rotated = m.qk_rope_head_dim if m.kv_lora_rank else int(m.head_dim * m.rope_fraction)
    angle = theta ** -(torch.arange(0, rotated, 2).float() / rotated)
    if m.rope_scaling is None or not scaled:
        return angle
    s = SimpleNamespace(**m.rope_scaling)
    if s.kind == "linear":
        return angle / s.factor
    if s.kind == "proportional":
        return torch.where(
            torch.arange(len(angle)) < int(s.turning * len(angle)), angle / s.factor, 0
        )
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


def query_scale(m: SimpleNamespace, length: int, rotated: bool) -> Tensor:
    """Factor of the queries of every place, [T], in a layer with RoPE or without."""
    if m.nope_query_beta and not rotated:
        turns = (torch.arange(length) + 1).div(m.nope_query_span, rounding_mode="floor")
        return 1 + m.nope_query_beta * torch.log1p(turns.float())
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


# ---------------------------------------------------- Feed-forwards: dense, or a mixture of experts


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


# --------- What layers of every kind have in common: norms, the residual stream, and a feed-forward


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


# ---------------------- The layer with attention whose keys and values are projections of its input


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Soft cap of scores or logits."""
    return x if cap is None else cap * torch.tanh(x / cap)


class AttentionLayer(TorchLayer):
    """A layer with attention."""

    def __init__(self, m: SimpleNamespace, feeds_forward: bool = True):
        super().__init__(m, feeds_forward)
        D, heads, kv = m.d_model, m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        wide = (heads, kv) if m.qk_norm_over == "all" else (m.head_dim, m.head_dim)
        gains = m.qk_norm and m.qk_norm_gain
        norms = (TorchNorm(width, m) if gains else nn.Identity() for width in wide)
        self.q_norm, self.k_norm = norms
        self.q = nn.Linear(D, heads, bias=m.qkv_bias)
        self.k, self.v = (nn.Linear(D, kv, bias=m.qkv_bias) for _ in "kv")
        if m.global_keys_as_values:
            self.v = None
        self.o = nn.Linear(heads, D, bias=m.out_bias)
        if m.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(m.num_heads))
        if m.attention_gate:
            self.gate = nn.Linear(D, heads, bias=False)

    def mix(self, h: Tensor, rope: Rope, seen: Tensor) -> Tensor:
        q, k = self.q(h), self.k(h)
        v = k if self.v is None else self.v(h)
        if self.m.qk_norm_over == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (a.unflatten(-1, (-1, self.m.head_dim)) for a in (q, k, v))
        if self.m.value_norm:
            v = F.rms_norm(v.float(), v.shape[-1:], eps=self.m.norm_eps).to(v.dtype)
        if self.m.qk_norm_over == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = (rotate(a, *rope, self.m.rope_layout) for a in (q, k))
            if self.m.qk_norm and not self.m.qk_norm_gain:
                q, k = (F.rms_norm(a, a.shape[-1:], eps=self.m.norm_eps) for a in (q, k))
        q = q * query_scale(self.m, q.shape[1], rope is not None).to(q)[:, None, None]
        q, k, v = (a.transpose(1, 2) for a in (q, k, v))
        scale = self.m.attention_multiplier
        scale = (self.m.query_scale_dim or self.m.head_dim) ** -0.5 if scale is None else scale
        if self.m.attention_sinks or self.m.attention_softcap is not None:
            out = self.by_scores(q * scale, k, v, seen)
        else:
            out = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
        out = out.transpose(1, 2).flatten(2)
        return self.o(out * self.gate(h).sigmoid() if self.m.attention_gate else out)

    def by_scores(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """Attention with capped scores, or a learned one per head; q, k, v [B, H, T, K]."""
        k, v = (a.repeat_interleave(q.shape[1] // k.shape[1], 1) for a in (k, v))
        scores = capped((q @ k.transpose(-2, -1)).float(), self.m.attention_softcap)
        scores = scores.masked_fill(~seen, -math.inf)
        if not self.m.attention_sinks:
            return scores.softmax(-1).to(v.dtype) @ v
        sinks = self.sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1].to(v.dtype) @ v


# ---------------- The layer with multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1)


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


# --------------------------------------------------- The short convolution in front of a recurrence


class CausalConvolution(nn.Conv1d):
    """Convolution of each channel with its latest tokens, [B, T, C] to [B, T, C]."""

    def __init__(self, channels: int, width: int, bias: bool):
        super().__init__(channels, channels, width, groups=channels, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.transpose(1, 2), (self.kernel_size[0] - 1, 0))
        return super().forward(padded).transpose(1, 2)


# ------------------------------------- The layer with Gated DeltaNet (Yang et al. 2024, 2412.06464)


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


# --------------------------------- The layer with Kimi Delta Attention (Kimi Team 2025, 2510.26692)


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


# ----------------------------------------------- The layer with Mamba-2 (Dao & Gu 2024, 2405.21060)


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


# --------------------------------------------------------- The complete model, and how it is loaded


def load(file: str | Path) -> "Decoder":
    """Load the model of a file, in float32. Only tensors are unpickled."""
    m = SimpleNamespace(**json.loads(Path(file).with_suffix(".json").read_text()))
    with torch.device("meta"):
        model = Decoder(m)
    state = torch.load(file, weights_only=True, mmap=True)
    model.load_state_dict({name: w.float() for name, w in state.items()}, assign=True)
    return model.eval()


def letter_of(m: SimpleNamespace, i: int) -> str:
    """Letter of layer i."""
    pattern = m.layer_pattern or "*"
    return pattern[i % len(pattern)]


def with_heads(m: SimpleNamespace, letter: str) -> SimpleNamespace:
    """Model with the heads of its layers of a letter: global ones (A) have their own."""
    own = {"global_keys_as_values": letter == "A" and m.global_keys_as_values}
    if letter == "A":
        own["head_dim"] = m.global_head_dim or m.head_dim
        own["num_kv_heads"] = m.global_num_kv_heads or m.num_kv_heads
    return SimpleNamespace(**vars(m) | own)


def layer(m: SimpleNamespace, i: int) -> TorchLayer:
    """Layer i of the model. In a model with experts, the first or some between may be dense."""
    letter = letter_of(m, i)
    is_dense = (i + 1) % m.moe_every > 0 if m.moe_every > 1 else i < m.dense_layers
    if is_dense or letter in "-k":
        dense = {"num_experts": 0, "d_ff": m.dense_d_ff or m.d_ff}
        m = SimpleNamespace(**vars(m) | dense)
    if letter in "GMKk" and m.recurrent_norms == "before":
        m = SimpleNamespace(**vars(m) | {"pre_norms": True, "post_norms": False})
    m = with_heads(m, letter)
    kinds = {
        "*": LatentAttentionLayer if m.kv_lora_rank else AttentionLayer,
        "A": AttentionLayer,
        "G": DeltaNetLayer,
        "M": MambaLayer,
        "K": KimiDeltaLayer,
        "k": KimiDeltaLayer,
        "-": FeedForwardLayer,
        "E": FeedForwardLayer,
    }
    feeds_forward = letter in "-E" or set("-E").isdisjoint(m.layer_pattern)
    return kinds[letter](m, feeds_forward=feeds_forward)


class Decoder(nn.Module):
    """The model: tokens [B, T] to logits [B, T, V]."""

    def __init__(self, m: SimpleNamespace):
        super().__init__()
        self.m, self.embed = m, nn.Embedding(m.vocab_size, m.d_model)
        self.layers = nn.ModuleList(layer(m, i) for i in range(m.num_layers))
        self.norm = (LayerNorm if m.norm == "layer" else TorchNorm)(m.d_model, m)
        learned = m.positions == "learned"
        self.positions = nn.Embedding(m.max_positions, m.d_model) if learned else None
        self.head = None if m.tie_embeddings else nn.Linear(m.d_model, m.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        m, place = self.m, torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) * (math.sqrt(m.d_model) if m.embed_scale else 1)
        x = x * m.embedding_multiplier
        if self.positions is not None:
            x = x + self.positions(place)
        for i, layer in enumerate(self.layers, 1):
            letter = letter_of(m, i - 1)
            is_global = letter == "A" or (m.global_every and i % m.global_every == 0)
            window = None if is_global else m.sliding_window
            without = m.positions == "learned" or (m.nope_every and i % m.nope_every == 0)
            rope = None if without or not m.rope_fraction else self.rope(place, letter, is_global)
            x = layer(x, rope, self.seen(place, window, None if is_global else m.attention_chunk))
        logits = F.linear(self.norm(x), (self.head or self.embed).weight) / m.logits_scaling
        return capped(logits, m.logits_softcap)

    def seen(self, place: Tensor, window: int | None, chunk: int | None) -> Tensor:
        """Which keys a query sees, [T, T]: of a window, of its chunk, or all that are not later."""
        back = place[:, None] - place
        seen = (back >= 0) & (back < (window or len(place)))
        return seen & (place[:, None] // chunk == place // chunk) if chunk else seen

    def rope(self, place: Tensor, letter: str, is_global: bool) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every place, [T, 1, R / 2], in global layers or in the others."""
        m = with_heads(self.m, letter)
        local = (m.global_every or "A" in m.layer_pattern) and not is_global
        theta = m.local_rope_theta if local and m.local_rope_theta else m.rope_theta
        scaled = m.local_rope_scaling or not local
        angles = place[:, None] * frequencies(m, theta, scaled, len(place)).to(place.device)
        factor = rotary_factor(m) if scaled else 1.0
        return angles.cos()[:, None] * factor, angles.sin()[:, None] * factor
