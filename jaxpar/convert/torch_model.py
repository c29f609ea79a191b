"""The model in plain PyTorch, for files of `python -m jaxpar.convert to-torch RUN FILE`.

    from torch_model import load
    model = load("FILE.pt")                 # float32; .to(torch.bfloat16) or .cuda() as you like
    logits = model(torch.tensor([[1, 2, 3]]))

FILE may end in .pt or .safetensors. This file needs only torch, so you can copy it anywhere.
FILE.json, next to FILE, is the model: its layers, and their components with their fields and the
names and shapes of their weights. `layers.7.wq` is the weight wq of layer 7, counted from 0.

A component of your own needs a class here, which gets its fields as attributes:

    class Sigmoid(torch_model.TorchAttention):
        def heads(self, q, k, v, seen): ...

    class Mean(torch_model.TorchComponent):
        def forward(self, x, weights, positions, segments): ...

    load("FILE.pt", components={"mine.py:Sigmoid": Sigmoid, "mine.py:Mean": Mean})

Recurrent layers go from token to token, as their papers write them.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Weights = dict[str, Any]


class TorchComponent:
    """A mixer or a feed-forward: its fields, and `model`, the fields of the model."""

    def __init__(self, fields: dict[str, Any], model: SimpleNamespace):
        vars(self).update(fields)
        self.model = model

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no field {name}")

    def forward(self, x: Tensor, weights: Weights, positions: Tensor, segments: Tensor) -> Tensor:
        """Compute what the component adds to the residual stream, [B, T, D].

        Args:     x: the normalized stream, [B, T, D]. weights: by name, with their declared shapes.
                  positions: of tokens in their documents, [B, T]. segments: their documents.
        """
        raise NotImplementedError


def times(x: Tensor, w: Weights, name: str, dims: int = 1) -> Tensor:
    """x times a matrix. Args:     dims: last dims of x that are the matrix's inputs."""
    return torch.tensordot(x, w[name], dims)


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Soft cap of scores or logits."""
    return x if cap is None else cap * torch.tanh(x / cap)


# -------------------------------------------------------------------------------- Norms, in float32


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square over the last dim."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


def rms_norm(x: Tensor, gain: Tensor, model: SimpleNamespace, eps: float | None = None) -> Tensor:
    """Root-mean-square norm over the last dim."""
    gain = gain.float() + 1 if model.norm.offset else gain.float()
    return F.rms_norm(x.float(), gain.shape, gain, model.norm.eps if eps is None else eps).to(x)


def norm_of_stream(x: Tensor, w: Weights, name: str, model: SimpleNamespace) -> Tensor:
    """The norm of the residual stream that has a name: RMSNorm, or LayerNorm."""
    if model.norm.kind == "rms":
        return rms_norm(x, w[name], model)
    gain, bias = w[name].float(), w[name + "_bias"].float()
    return F.layer_norm(x.float(), gain.shape, gain, bias, model.norm.eps).to(x)


# ----------------------------------- Rotary embeddings: their frequencies, and how heads are turned


def frequencies(rope: SimpleNamespace, half: int, length: int) -> Tensor:
    """Angle per position of each pair of the rotated dims, float32 [half]."""
    s, pair = rope.scaling, torch.arange(half, dtype=torch.float64)
    angle = rope.theta ** -(pair / half)
    if s is None:
        return angle.float()
    if s.kind == "linear":
        return (angle / s.factor).float()
    if s.kind == "proportional":
        return torch.where(pair < int(s.turning * half), angle / s.factor, 0).float()
    if s.kind == "longrope":
        factors = s.long_factors if length > s.original_max_position else s.short_factors
        return (angle / torch.tensor(factors)).float()
    if s.kind == "yarn":
        keep = 1 - yarn_ramp(rope, half)
    else:
        turns = s.original_max_position * angle / (2 * math.pi)
        if s.low_freq_factor == s.high_freq_factor:
            return torch.where(turns > s.low_freq_factor, angle, angle / s.factor).float()
        keep = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
    return (angle * (keep + (1 - keep) / s.factor)).float()


def yarn_ramp(rope: SimpleNamespace, half: int) -> Tensor:
    """Which pairs YaRN scales: 0 for those that turn often in the original context, else 1."""
    s = rope.scaling
    once = s.original_max_position / (2 * math.pi)
    first, last = (half * math.log(once / n, rope.theta) for n in (s.beta_fast, s.beta_slow))
    if s.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    pair = torch.arange(half, dtype=torch.float64)
    return ((pair - first) / ((last - first) or 1e-3)).clamp(0, 1)


def rotary_factor(s: SimpleNamespace | None) -> float:
    """Factor of cosine and sine."""
    if s is None or s.kind not in ("yarn", "longrope"):
        return 1.0
    if s.attention_factor is not None:
        return s.attention_factor
    if s.kind == "yarn":
        return 0.1 * math.log(s.factor) + 1
    return math.sqrt(1 + math.log(s.factor) / math.log(s.original_max_position))


def rotated(x: Tensor, positions: Tensor, rope: SimpleNamespace | None) -> Tensor:
    """Apply RoPE to the first dims of each head [B, T, H, K], in pairs from two halves or of
    neighbors."""
    if rope is None:
        return x
    half = int(x.shape[-1] * rope.fraction) // 2
    angle = positions[..., None, None] * frequencies(rope, half, x.shape[1]).to(x.device)
    cos, sin = (f(angle) * rotary_factor(rope.scaling) for f in (torch.cos, torch.sin))
    first, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if rope.layout == "interleaved":
        a, b = first[..., ::2], first[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = first.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


# ----------------------------------------------------------------------- Attention, also of latents


def seen_keys(a: Any, positions: Tensor, segments: Tensor) -> Tensor:
    """Which keys a query sees, [B, T, S]: those of its document that are not later, and of its
    window or chunk."""
    back = positions[:, :, None] - positions[:, None]
    seen = (back >= 0) & (segments[:, :, None] == segments[:, None])
    if a.window is not None:
        seen &= back < a.window
    if a.chunk is not None:
        seen &= positions[:, :, None] // a.chunk == positions[:, None] // a.chunk
    return seen


class TorchAttention(TorchComponent):
    """Softmax attention with grouped queries. A subclass may have other `heads` or `attending`."""

    def forward(self, x: Tensor, weights: Weights, positions: Tensor, segments: Tensor) -> Tensor:
        w, eps = weights, self.model.norm.eps
        of = {"q": "wq", "k": "wk", "v": "wk" if self.keys_as_values else "wv"}
        q, k, v = (times(x, w, name) + w.get("b" + n, 0) for n, name in of.items())
        if self.value_norm:
            v = unit_rms(v, eps)
        if self.qk_norm and self.qk_norm.gain:
            q, k = self.normalized(q, w["q_norm"]), self.normalized(k, w["k_norm"])
        q, k = (rotated(one, positions, self.rope) for one in (q, k))
        if self.qk_norm and not self.qk_norm.gain and self.rope:
            q, k = unit_rms(q, eps), unit_rms(k, eps)
        q = q * (self.growth_at(positions)[..., None, None] * self.factor()).to(q)
        q, k, v = (a.to(v) for a in self.attending(q, k, v, w))
        sinks = {"sinks": w["sinks"]} if self.sinks else {}
        out = self.heads(q, k, v, seen_keys(self, positions, segments), **sinks)
        if self.gate:
            out = out * times(x, w, "w_attn_gate").sigmoid()
        return times(out, w, "wo", 2) + w.get("bo", 0)

    # A copy of `Attention.attending`, by scripts/docs/torch_methods.py --write.
    def attending(self, q: Any, k: Any, v: Any, w: Any) -> tuple[Any, Any, Any]:
        """Return queries, keys and values as they attend. A field or a weight may change them here.

        Training on meshes, generation, the plain form and PyTorch call it. With operators and
        indices alone it is right for all of them. Their dtype is kept: some weights are float32.

        Args:
            q: [B, T, H, K], this tensor rank's heads, after their norm and RoPE.
            k: [B, T, G, K].
            v: as k.
            w: its weights of the layer, by name.
        """
        return q, k, v

    def heads(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend, [B, T, H, K].

        Args:     q: [B, T, H, K]. k, v: [B, S, G, K]. seen: which keys a query sees, [B, T, S].
                  sinks: the learned score of each head, if `self.sinks`.
        """
        q, k, v, seen = (*(one.transpose(1, 2) for one in (q, k, v)), seen[:, None])
        if sinks is None and self.softcap is None:
            out = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
            return out.transpose(1, 2)
        k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
        scores = (q @ k.transpose(-2, -1)).float() * self.head_dim**-0.5
        scores = capped(scores, self.softcap).masked_fill(~seen, -math.inf)
        if sinks is not None:
            of_head = sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, of_head), -1)
        return (scores.softmax(-1)[..., : seen.shape[-1]].to(v.dtype) @ v).transpose(1, 2)

    def normalized(self, x: Tensor, gain: Tensor) -> Tensor:
        """The norm of each head, or of the heads of a token together."""
        if self.qk_norm.over == "head":
            return rms_norm(x, gain, self.model)
        return rms_norm(x.flatten(-2), gain.flatten(), self.model).view_as(x)

    def factor(self) -> float:
        """Factor of queries, for scores over the square root of head_dim in `heads`."""
        if self.scale is None and self.scale_dim is None:
            return 1.0
        scale = self.scale_dim**-0.5 if self.scale is None else self.scale
        return scale * math.sqrt(self.head_dim)

    def growth_at(self, positions: Tensor) -> Tensor:
        """Factor of the queries of every place, [B, T]."""
        s = self.rope.scaling if self.rope else None
        if self.growth and self.rope is None:
            turns = (positions + 1).div(self.growth.span, rounding_mode="floor")
            return 1 + self.growth.beta * torch.log1p(turns.float())
        if s is None:
            return torch.ones_like(positions, dtype=torch.float32)
        turns = positions.div(s.original_max_position, rounding_mode="floor")
        return 1 + s.query_beta * torch.log1p(turns.float())


class TorchLatentAttention(TorchComponent):
    """Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1)."""

    def forward(self, x: Tensor, weights: Weights, positions: Tensor, segments: Tensor) -> Tensor:
        w, sizes = weights, (self.qk_nope_head_dim, self.qk_rope_head_dim)
        if self.q_lora_rank is None:
            q = times(x, w, "wq")
        else:
            latent = rms_norm(times(x, w, "wq_a"), w["q_a_norm"], self.model, self.norm_eps)
            q = times(latent, w, "wq_b")
        latent, shared = times(x, w, "wkv_a").split((self.kv_lora_rank, sizes[1]), -1)
        latent = rms_norm(latent, w["kv_a_norm"], self.model, self.norm_eps)
        k, v = times(latent, w, "wkv_b").split((sizes[0], self.v_head_dim), -1)
        q, of_q = q.split(sizes, -1)
        of_q, of_k = (rotated(one, positions, self.rope) for one in (of_q, shared[:, :, None]))
        q, k = torch.cat((q, of_q), -1), torch.cat((k, of_k.expand_as(of_q)), -1)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        seen = seen_keys(self, positions, segments)[:, None]
        out = F.scaled_dot_product_attention(q, k, v, seen, scale=self.scale())
        return times(out.transpose(1, 2), w, "wo", 2)

    def scale(self) -> float:
        """Factor of scores; with YaRN's `mscale_all_dim`, it grows with the context."""
        s = self.rope.scaling if self.rope else None
        grown = 0.1 * s.mscale_all_dim * math.log(s.factor) + 1 if s else 1.0
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * grown**2


# --------------------------------------- Mixers that carry a state of each head from token to token


def begins_of(segments: Tensor) -> Tensor:
    """Which tokens are the first of their documents, [B, T]."""
    before = F.pad(segments[:, :-1], (1, 0))
    first = torch.arange(segments.shape[1], device=segments.device) == 0
    return first | (segments != before)


def convolved(x: Tensor, w: Weights, name: str, begins: Tensor) -> Tensor:
    """Convolution of each channel with its latest tokens of the document.

    Args:     x: [B, T, H, K]. name: of the kernel [H, K, W].
    """
    length, width, document = x.shape[1], w[name].shape[-1], begins.cumsum(1)
    out = torch.zeros_like(x)
    for back in range(min(width, length)):
        same = (F.pad(document, (back, 0))[:, :length] == document)[..., None, None]
        earlier = F.pad(x, (0, 0, 0, 0, back, 0))[:, :length]
        out = out + torch.where(same, earlier, 0) * w[name][..., width - 1 - back]
    return out


def unit(x: Tensor) -> Tensor:
    """Each query or key, with a length of 1."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, begins: Tensor
) -> Tensor:
    """Let the state forget, correct what it knows of each key, and read it: [B, T, H, V].

    Args:     q, k: [B, T, H, K]. v: [B, T, H, V]. decay, rate: [B, T, H]. decay may be
              [B, T, H, K], of each channel. begins: [B, T].
    """
    decay = decay[..., None] if decay.ndim == 3 else decay
    decay = torch.where(begins[..., None, None], 0, decay)
    state = v.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1])
    out = []
    for t in range(v.shape[1]):
        state = state * decay[:, t, ..., None]
        known = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        change = rate[:, t, :, None] * (v[:, t] - known)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], change)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1)


def state_space(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, begins: Tensor) -> Tensor:
    """Let the state forget, write each value under its key, and read it: [B, T, H, P].

    Args:     q, k: [B, T, H, N]. v: [B, T, H, P]. decay: [B, T, H]. begins: [B, T].
    """
    decay = torch.where(begins[..., None], 0, decay)
    state = v.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1])
    out = []
    for t in range(v.shape[1]):
        written = torch.einsum("bhn,bhp->bhnp", k[:, t], v[:, t])
        state = state * decay[:, t, :, None, None] + written
        out.append(torch.einsum("bhnp,bhn->bhp", state, q[:, t]))
    return torch.stack(out, 1)


def decay_of(step: Tensor, w: Weights, name: str) -> Tensor:
    """exp(-exp(a) * step). Args:     step: [B, T, H, ...]. name: of the logarithm a of each head's
    rate."""
    rate = w[name].float().exp()
    return (-rate.view(-1, *[1] * (step.ndim - 3)) * step).exp()


class TorchGatedDeltaNet(TorchComponent):
    """Heads with a state [K, V] each (Yang et al. 2024, 2412.06464)."""

    def forward(self, x: Tensor, weights: Weights, positions: Tensor, segments: Tensor) -> Tensor:
        w, begins, H = weights, begins_of(segments), self.num_value_heads
        q, k, v = (
            F.silu(convolved(times(x, w, f"delta_{n}"), w, f"delta_conv_{n}", begins)).float()
            for n in "qkv"
        )
        q, k = (unit(one).repeat_interleave(H // self.num_key_heads, 2) for one in (q, k))
        of_heads = lambda n: times(x, w, f"delta_{n}").float().flatten(2).unflatten(2, (H, -1))  # noqa: E731
        step = F.softplus(of_heads("a")[..., 0] + w["delta_dt_bias"].float())
        rate = (2 if self.allow_neg_eigval else 1) * of_heads("b")[..., 0].sigmoid()
        v = v.flatten(2).unflatten(2, (H, -1))
        decay = decay_of(step, w, "delta_a_log")
        out = delta_rule(q * q.shape[-1] ** -0.5, k, v, decay, rate, begins)
        out = unit_rms(out, self.norm_eps) * w["delta_norm"].float() * F.silu(of_heads("z"))
        return times(out.to(x.dtype), w, "delta_out", 2)


class TorchKimiDeltaAttention(TorchComponent):
    """Heads with a state [K, V] each, which decays by a number for each channel (Kimi Team 2025,
    2510.26692)."""

    def forward(self, x: Tensor, weights: Weights, positions: Tensor, segments: Tensor) -> Tensor:
        w, begins = weights, begins_of(segments)
        q, k, v = (
            F.silu(convolved(times(x, w, f"kda_{n}"), w, f"kda_conv_{n}", begins)).float()
            for n in "qkv"
        )
        step, gate = (times(times(x, w, f"kda_{n}_a"), w, f"kda_{n}_b").float() for n in "fg")
        step = F.softplus(step + w["kda_dt_bias"].float())
        rate, decay = times(x, w, "kda_b").float().sigmoid(), decay_of(step, w, "kda_a_log")
        out = delta_rule(unit(q) * q.shape[-1] ** -0.5, unit(k), v, decay, rate, begins)
        out = unit_rms(out, self.norm_eps) * w["kda_norm"].float() * gate.sigmoid()
        return times(out.to(x.dtype), w, "kda_out", 2)


class TorchMamba2(TorchComponent):
    """Heads with a state [N, P] each (Dao & Gu 2024, 2405.21060).

    The paper calls values x, keys B and queries C.
    """

    def forward(self, x: Tensor, weights: Weights, positions: Tensor, segments: Tensor) -> Tensor:
        w, begins = weights, begins_of(segments)
        v, k, q = (
            F.silu(
                convolved(times(x, w, f"mamba_{n}"), w, f"mamba_conv_{n}", begins)
                + w[f"mamba_bias_{n}"]
            ).float()
            for n in "xbc"
        )
        q, k = (one.repeat_interleave(self.num_heads // self.num_groups, 2) for one in (q, k))
        step = F.softplus(times(x, w, "mamba_dt").float() + w["mamba_dt_bias"].float())
        step = step.clamp(min=self.min_step)
        out = state_space(q, k, step[..., None] * v, decay_of(step, w, "mamba_a_log"), begins)
        out = out + w["mamba_d"].float()[:, None] * v
        out = out * F.silu(times(x, w, "mamba_z").float())
        groups = out.flatten(2).unflatten(2, (self.num_groups, -1))
        out = unit_rms(groups, self.norm_eps).reshape(out.shape) * w["mamba_norm"].float()
        return times(out.to(x.dtype), w, "mamba_out", 2)


# ---------------------------------------------------- Feed-forwards: dense, or a mixture of experts


def activated(x: Tensor, kind: str) -> Tensor:
    """An activation."""
    if kind == "silu":
        return F.silu(x)
    if kind == "relu_squared":
        return F.relu(x).square()
    return F.gelu(x, approximate="none" if kind == "gelu_exact" else "tanh")


def feed_forward(x: Tensor, w: Weights, activation: Any, of: str = "") -> Tensor:
    """A gated linear unit, or two matrices if there is no gate. Args:     of: "shared_"."""

    def linear(x: Tensor, name: str) -> Tensor:
        return times(x, w, f"w_{of}{name}") + w.get(f"b_{of}{name}", 0)

    up = linear(x, "up")
    if f"w_{of}gate" not in w:
        return linear(activated(up, activation), "down")
    gate = linear(x, "gate")
    if isinstance(activation, str):
        return linear(activated(gate, activation) * up, "down")
    limit = activation.limit  # ClampedSwiglu
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return linear(gate * (activation.alpha * gate).sigmoid() * (up + 1), "down")


class TorchGlu(TorchComponent):
    """A dense feed-forward."""

    def forward(self, x: Tensor, weights: Weights, positions: Tensor, segments: Tensor) -> Tensor:
        return feed_forward(x, weights, self.activation)


class TorchMlp(TorchGlu):
    """A dense feed-forward of two matrices."""


class TorchExperts(TorchComponent):
    """Mixture of experts: each token uses the experts to which the router gives most."""

    def forward(self, x: Tensor, weights: Weights, positions: Tensor, segments: Tensor) -> Tensor:
        w, router, activation = weights, self.router, self.expert.activation
        logits = (times(x, w, "router") + w.get("b_router", 0)).float()
        scores = logits.sigmoid() if router.score == "sigmoid" else logits.softmax(-1)
        which = self.choose(scores + w.get("router_bias", 0))
        given = scores.gather(-1, which)
        given = F.normalize(given, p=1, dim=-1) if router.normalize else given
        shares = torch.zeros_like(scores).scatter(-1, which, given * router.scale).to(x.dtype)
        out = torch.zeros_like(x)
        by_expert = [name for name in w if name in EXPERT]
        for e, share in enumerate(shares.unsqueeze(-2).unbind(-1)):
            one = {name: w[name][e] for name in by_expert}
            if router.scales_input:
                out = out + (share != 0) * feed_forward(share * x, one, activation)
            else:
                out = out + share * feed_forward(x, one, activation)
        if not self.num_shared_experts:
            return out
        shared = feed_forward(x, w, activation, "shared_")
        if self.shared_expert_gate:
            shared = shared * times(x, w, "w_shared_router").sigmoid()[..., None]
        return out + shared

    def choose(self, scores: Tensor) -> Tensor:
        """Return the k best experts of the best groups, by a group's two best scores."""
        router = self.router
        if router.groups > 1:
            groups = scores.unflatten(-1, (router.groups, -1))
            best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1)
            chosen = best.topk(router.groups_per_token, -1).indices
            others = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
            scores = groups.masked_fill(others[..., None], -math.inf).flatten(-2)
        return scores.topk(self.experts_per_token, -1).indices


#: Weights of which each expert has its own.
EXPERT = ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")


# ------------------------------------------------------------- A layer, and the model of its layers


#: The components of jaxpar.
COMPONENTS: tuple[type[TorchComponent], ...] = (
    *(TorchAttention, TorchLatentAttention, TorchGatedDeltaNet, TorchKimiDeltaAttention),
    *(TorchMamba2, TorchGlu, TorchMlp, TorchExperts),
)

#: Classes of components by name.
Classes = dict[str, Any]


class WithWeights(nn.Module):
    """A module with parameters of given names and shapes."""

    def __init__(self, shapes: dict[str, list[int]]):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    @property
    def weights(self) -> Weights:
        """Its parameters by name."""
        return self._parameters


class TorchLayer(WithWeights):
    """x + mixer(norm(x)), then x + feed_forward(norm(x)). Either may be absent."""

    def __init__(self, of: dict[str, Any], model: SimpleNamespace, classes: Classes):
        terms = [of[role] for role in ("mixer", "feed_forward")]
        shapes = [of["weights"], *(term["weights"] for term in terms if term)]
        super().__init__({name: shape for part in shapes for name, shape in part.items()})
        self.norms, self.parallel, self.scaled = of["norms"], of["parallel"], of["scaled"]
        self.model = model
        self.mixer, self.feed_forward = (
            term and classes[term["class"]](namespace(term["fields"]).__dict__, model)
            for term in terms
        )

    def forward(self, x: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        before, place = x, (positions, segments)
        if self.mixer:
            x = x + self.branch(self.mixer, "attn_norm", "attn_post_norm", x, place)
        if self.feed_forward is None:
            return x
        name = "attn_norm" if self.parallel == "one_norm" else "mlp_norm"
        read = before if self.parallel else x
        x = x + self.branch(self.feed_forward, name, "mlp_post_norm", read, place)
        return x * self.weights["layer_scale"] if self.scaled else x

    def branch(
        self, term: TorchComponent, before: str, after: str, x: Tensor, place: tuple[Tensor, Tensor]
    ) -> Tensor:
        """What a component adds to the residual stream. Args:     before, after: its norms."""
        w, model = self.weights, self.model
        h = x if self.norms == "after" else norm_of_stream(x, w, before, model)
        out = term.forward(h, w, *place)
        out = out if self.norms == "before" else rms_norm(out, w[after], model)
        return model.residual_multiplier * out


class Decoder(WithWeights):
    """The model: tokens [B, T] to logits [B, T, V]."""

    def __init__(self, about: dict[str, Any], classes: Classes):
        super().__init__(about["weights"])
        self.model = namespace(about["model"])
        of_layers = (about["distinct"][i] for i in about["order"])
        self.layers = nn.ModuleList(TorchLayer(of, self.model, classes) for of in of_layers)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Args:     positions, segments: of several documents in a row, [B, T]. None: one each."""
        m, w = self.model, self.weights
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        segments = torch.zeros_like(tokens) if segments is None else segments
        x = F.embedding(tokens, w["embed"]) * m.embedding_multiplier
        x = x * math.sqrt(m.d_model) if m.embed_scale else x
        if m.max_positions:
            x = x + F.embedding(positions, w["positions"])
        for layer in self.layers:
            x = layer(x, positions, segments)
        x = norm_of_stream(x, w, "final_norm", m)
        logits = F.linear(x, w["embed"]) if m.tie_embeddings else times(x, w, "head")
        return capped(logits / m.logits_scaling, m.logits_softcap)


def namespace(value: Any) -> Any:
    """JSON with attributes in place of keys."""
    if isinstance(value, dict):
        return SimpleNamespace(**{name: namespace(one) for name, one in value.items()})
    return tuple(map(namespace, value)) if isinstance(value, list) else value


def classes_of(about: dict[str, Any], yours: Classes) -> Classes:
    """Return the class of each component of a model.

    Raises:   NotImplementedError that says which code is missing; ValueError for a name that the
              model does not have.
    """
    terms = [of[role] for of in about["distinct"] for role in ("mixer", "feed_forward")]
    terms = [term for term in terms if term]
    if unknown := set(yours) - {term["class"] for term in terms}:
        raise ValueError(f"the model has no component {', '.join(sorted(unknown))}")
    missing = [needs for name, needs in about["needs"].items() if name not in yours]
    if missing:
        raise NotImplementedError("\n".join(missing))
    ours = {one.__name__.removeprefix("Torch"): one for one in COMPONENTS}
    return {term["class"]: ours.get(term["base"]) for term in terms} | yours


def load(file: str | Path, components: Classes | None = None) -> Decoder:
    """Load the model of a file, in float32. Only tensors are unpickled.

    Args:     components: your classes, by the names that FILE.json has.
    """
    about = json.loads(Path(file).with_suffix(".json").read_text())
    with torch.device("meta"):
        model = Decoder(about, classes_of(about, components or {}))
    if Path(file).suffix == ".safetensors":
        state = read_safetensors(Path(file))
    else:
        state = torch.load(file, weights_only=True, mmap=True)
    model.load_state_dict({name: w.float() for name, w in state.items()}, assign=True)
    return model.eval()


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a file: the length of a header, the header in JSON, and the values."""
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    raw = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
    first = 8 + int.from_bytes(raw[:8].numpy().tobytes(), "little")
    header = json.loads(raw[8:first].numpy().tobytes())
    found = {}
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = (first + at for at in about["data_offsets"])
            # A copy begins at a multiple of the dtype's size.
            values = raw[begin:end].clone().view(dtypes[about["dtype"]])
            found[name] = values.reshape(about["shape"])
    return found
