"""`Attention` and `LatentAttention` in plain jax.numpy: all scores of all heads at once."""

import math

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.components.attention import Attention
from jaxpar.components.latent_attention import LatentAttention
from jaxpar.components.model import Model
from jaxpar.components.rope import Rope
from jaxpar.kernels.attention import AttentionMask
from jaxpar.model.own_heads import own_heads
from jaxpar.model.plain.operations import Weights, norm, softcapped, times, unit_rms


def attention(a: Attention, h, w: Weights, positions, segments, model: Model, watch) -> jax.Array:
    """Compute attention with grouped queries."""
    of = {"q": "wq", "k": "wk", "v": "wk" if a.keys_as_values else "wv"}
    q, k, v = (times(h, w, name) + w.get("b" + n, 0.0) for n, name in of.items())
    if a.value_norm:
        v = unit_rms(v, model.norm.eps)
    if a.qk_norm and a.qk_norm.gain:
        over = _norm_of_head if a.qk_norm.over == "head" else _norm_of_token
        q, k = over(q, w["q_norm"], model), over(k, w["k_norm"], model)
    q, k = (rotated(x, positions, a.rope) for x in (q, k))
    if a.qk_norm and not a.qk_norm.gain and a.rope:
        q, k = unit_rms(q, model.norm.eps), unit_rms(k, model.norm.eps)
    q = q * _growth(a, positions[..., None, None])
    q, k, v = a.attending(q, k, v, w)
    o = _attend(a, q, k, v, _scale(a, model), w.get("sinks"), positions, segments, watch)
    if a.gate:
        o = o * jax.nn.sigmoid(times(h, w, "w_attn_gate"))
    return times(o, w, "wo", 2) + w.get("bo", 0.0)


def _norm_of_head(x, gain, model: Model):
    return norm(x, gain, model)


def _norm_of_token(x, gain, model: Model):
    """Normalize all heads of a token together, as one row [..., H K]."""
    return norm(x.reshape(*x.shape[:-2], -1), gain.reshape(-1), model).reshape(x.shape)


def _growth(a: Attention, positions):
    """Return the factor of queries that grows with their position."""
    s = a.rope.scaling if a.rope else None
    if a.growth and a.rope is None:
        turns = jnp.floor((positions + 1.0) / a.growth.span)
        return 1 + a.growth.beta * jnp.log(1 + turns)
    if s is not None and s.query_beta:
        return 1 + s.query_beta * jnp.log(1 + jnp.floor(positions / s.original_max_position))
    return 1.0


def _scale(a: Attention, model: Model) -> float:
    """Return the factor of scores. With µP's base width of heads, it falls like 1 / head_dim."""
    base = model.mup.base_head_dim if model.mup else None
    if a.scale is not None or a.scale_dim is not None:
        plain = (a.scale_dim or 1) ** -0.5 if a.scale is None else a.scale
        return plain * (base / a.head_dim if base else 1)
    return math.sqrt(base) / a.head_dim if base else a.head_dim**-0.5


def latent_attention(
    a: LatentAttention, h, w: Weights, positions, segments, model: Model, watch
) -> jax.Array:
    """Compute multi-head latent attention with the keys and values of every head."""
    c_q, name, nope = h, "wq", a.qk_nope_head_dim
    if a.q_lora_rank is not None:
        c_q, name = norm(times(h, w, "wq_a"), w["q_a_norm"], model, a.norm_eps), "wq_b"
    q, latent = times(c_q, w, name), times(h, w, "wkv_a")
    of_kv = norm(latent[..., : a.kv_lora_rank], w["kv_a_norm"], model, a.norm_eps)
    kv = times(of_kv, w, "wkv_b")
    key = rotated(latent[:, :, None, a.kv_lora_rank :], positions, a.rope)
    q = jnp.concatenate((q[..., :nope], rotated(q[..., nope:], positions, a.rope)), axis=-1)
    k = jnp.concatenate((kv[..., :nope], jnp.repeat(key, a.num_heads, axis=2)), axis=-1)
    s = a.rope.scaling if a.rope else None
    grown = 0.1 * s.mscale_all_dim * math.log(s.factor) + 1 if s else 1.0
    scale = (nope + a.qk_rope_head_dim) ** -0.5 * grown**2
    o = _attend(a, q, k, kv[..., nope:], scale, None, positions, segments, watch)
    return times(o, w, "wo", 2)


def rotated(x, positions, rope: Rope | None) -> jax.Array:
    """Rotate pairs of dims of every head [B, T, heads, K]."""
    if rope is None:
        return x
    half = int(x.shape[-1] * rope.fraction) // 2
    length = positions.shape[1]
    inv = jnp.asarray([frequency(j, half, length, rope) for j in range(half)])
    angle = positions[:, :, None, None] * inv
    cos, sin = (f(angle) * rotary_factor(rope.scaling) for f in (jnp.cos, jnp.sin))
    first, rest = x[..., : 2 * half], x[..., 2 * half :]
    if rope.layout == "interleaved":
        a, b = first[..., ::2], first[..., 1::2]
        turned = jnp.stack((a * cos - b * sin, b * cos + a * sin), axis=-1).reshape(first.shape)
    else:
        a, b = first[..., :half], first[..., half:]
        turned = jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
    return jnp.concatenate((turned, rest), axis=-1)


def _attend(
    a: Attention | LatentAttention, q, k, v, scale: float, sinks, positions, segments, watch
) -> jax.Array:
    """Attend to the keys of a document, at most `window` back and within a chunk."""
    function, cap = None, None
    if isinstance(a, Attention):
        function = own_heads(a)
        cap = a.softcap
    if function:
        if a.chunk is not None:
            segments = segments * (1 + jnp.max(positions)) + positions // a.chunk
        mask = PlainMask(positions, positions, segments, segments, a.window)
        return function(q * (scale * math.sqrt(a.head_dim)), k, v, mask)
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    seen = _seen(positions, segments, a.window)
    if a.chunk is not None:
        of_chunk = positions // a.chunk
        seen &= of_chunk[:, :, None] == of_chunk[:, None, :]
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * scale
    watch("queries", jnp.where(seen[:, None], scores, -jnp.inf))
    scores = jnp.where(seen[:, None], softcapped(scores, cap), -jnp.inf)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:  # a key of every query of a head, with this score and no value
        sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate((scores, sink), axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bhts,bshk->bthk", weights, v)


def _seen(positions, segments, window: int | None) -> jax.Array:
    """Return which keys each query sees, bool [B, T, T]."""
    back = positions[:, :, None] - positions[:, None, :]
    seen = (back >= 0) & (segments[:, :, None] == segments[:, None, :])
    return seen if window is None else seen & (back < window)


@flax.struct.dataclass
class PlainMask(AttentionMask):
    """The mask that a user's heads are given, without the code of `kernels/attention`."""

    def dense(self) -> jax.Array:
        return _seen(self.q_positions, self.q_segments, self.window)


# ------------------------------------------------- Frequencies of rotary embeddings in plain Python


def rotary_factor(s) -> float:
    """Return what multiplies cosine and sine."""
    if s is None or s.kind not in ("yarn", "longrope"):
        return 1.0
    usual = {
        "yarn": 1 + math.log(s.factor) / 10,
        "longrope": (1 + math.log(s.factor, s.original_max_position)) ** 0.5,
    }
    return usual[s.kind] if s.attention_factor is None else s.attention_factor


def frequency(j: int, half: int, length: int, rope: Rope) -> float:
    """Return the angle per position of pair j, for sequences of `length` tokens."""
    s, inv = rope.scaling, rope.theta ** (-j / half)
    if s is None:
        return inv
    if s.kind == "linear":
        return inv / s.factor
    if s.kind == "proportional":  # turns the first pairs, and the others not
        return inv / s.factor if j < math.floor(s.turning * half) else 0.0
    if s.kind == "yarn":
        return _yarn_frequency(j, half, inv, rope)
    if s.kind == "longrope":
        factors = s.short_factors if length <= s.original_max_position else s.long_factors
        return inv / factors[j]
    return _llama_frequency(inv, s)


def _yarn_frequency(j: int, half: int, inv: float, rope: Rope) -> float:
    """Divide by YaRN's factor where a ramp over pairs has ended, or a part of it on the ramp."""
    s = rope.scaling
    assert s is not None
    # Pair j turns original_max_position * theta^(-j / half) / (2 pi) times; solved for j.
    ends = [
        half * math.log(s.original_max_position / (2 * math.pi * turns), rope.theta)
        for turns in (s.beta_fast, s.beta_slow)
    ]
    if s.truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], 2 * half - 1)
    share = min(max((j - first) / (last - first or 0.001), 0), 1)
    return inv * (1 - share) + inv / s.factor * share


def _llama_frequency(inv: float, s) -> float:
    """Apply Llama 3.1's scaling by wavelength, written as in its authors' code."""
    wavelength = 2 * math.pi / inv
    if wavelength < s.original_max_position / s.high_freq_factor:
        return inv
    if wavelength > s.original_max_position / s.low_freq_factor:
        return inv / s.factor
    smooth = (s.original_max_position / wavelength - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    return (1 - smooth) * inv / s.factor + smooth * inv
