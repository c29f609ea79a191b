"""A reference model in plain jax.numpy: one device, no sharding, no rematerialization, no kernels.

`jaxpar.functional` makes functions of it, with which `python -m jaxpar.verify` and the tests
compare every mesh. It deliberately shares only the parameter names with `transformer.py`, so that a
mistake in one of them shows as a difference.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import Config, ModelConfig, registry
from jaxpar.kernels.attention import AttentionMask
from jaxpar.model import reference_rope
from jaxpar.model.gpt import reference as gpt
from jaxpar.model.moe.reference import router
from jaxpar.model.recurrent import reference as recurrent
from jaxpar.sharding.batch import IGNORED, Batch

type Tree = dict[str, Any]

#: The recurrences, by the name of the matrix after them.
_RECURRENT = {
    "delta_out": recurrent.delta_net,
    "mamba_out": recurrent.mamba,
    "kda_out": recurrent.kimi_delta,
}


def modules(params: Tree, x, batch: Batch, cfg: Config):
    """Yield (labels, normalized hidden states, its router or None) of each module that predicts
    further tokens."""
    m = cfg.model
    h, segments = _norm(x, params["final_norm"], m), jnp.asarray(batch.segment_ids)
    tokens, labels = jnp.asarray(batch.tokens), jnp.asarray(batch.labels)
    last = jnp.arange(tokens.shape[1]) == tokens.shape[1] - 1
    for k in range(m.mtp_depth):
        w = jax.tree.map(lambda a, k=k: a[k], params["mtp"])
        ends = last | (jnp.roll(segments, -1, 1) != segments)
        tokens, labels = jnp.roll(tokens, -1, 1), jnp.where(ends, IGNORED, jnp.roll(labels, -1, 1))
        embedded = _norm(embed(params["embed"][tokens], m), w["embed_norm"], m)
        of_x = _norm(h, w["hidden_norm"], m)
        x = embedded @ w["w_join"][0] + of_x @ w["w_join"][1]
        place = x, w, batch.positions, _segments(batch, cfg), m
        of_module = _router_of(*place) if m.num_experts else None
        h = _norm(block(*place), w["out_norm"], m)
        yield labels, h, of_module


def loads(params: Tree, batch: Batch, cfg: Config) -> jax.Array:
    """Count the tokens of each expert in a batch, [layers, E], those of `modules` last."""
    params = scale_adapters(params, cfg)
    x, routers = hidden_and_routers(params, batch, cfg)
    routers += [of_module for _, _, of_module in modules(params, x, batch, cfg)]
    return jnp.stack([jnp.sum(used, axis=(0, 1)) for used, _, _ in routers])


def balanced(params: Tree, counts: jax.Array, cfg: Config) -> Tree:
    """Return the parameters after the update of `router_bias` for the loads of a batch."""
    mean = jnp.mean(counts, axis=1, keepdims=True)
    change = cfg.train.router_bias_rate * jnp.sign(mean - counts)
    found, stacks = dict(params), recurrent.stacks_of_biases(params, cfg.model)
    for stack in dict.fromkeys(stacks):
        part = change[jnp.array([i for i, name in enumerate(stacks) if name == stack])]
        found[stack] = params[stack] | {"router_bias": params[stack]["router_bias"] + part}
    return found


def scale_adapters(params: Tree, cfg: Config) -> Tree:
    """Scale the second matrix of each adapter by `lora.alpha`, as `block` expects."""
    r = max(cfg.lora.rank, 1)
    scale = cfg.lora.alpha / (r**0.5 if cfg.lora.rank_stabilized else r)
    scaled = lambda n, w: w * scale if n.endswith("_lora_b") else w  # noqa: E731
    return {
        name: {n: scaled(n, a) for n, a in w.items()} if isinstance(w, dict) else w
        for name, w in params.items()
    }


def _segments(batch: Batch, cfg: Config) -> jax.Array:
    ids = jnp.asarray(batch.segment_ids)
    return ids if cfg.data.document_mask else jnp.ones_like(ids)


def logits_of(params: Tree, tokens, positions, segments, m: ModelConfig) -> jax.Array:
    """Compute logits, float32 [B, T, V], from int32 [B, T] tokens, positions and segments."""
    x = first_stream(params, tokens, positions, m)
    for i in range(m.num_layers):
        x = block(x, recurrent.weights_of(params, i, m), positions, segments, of_layer(m, i))
    return output(x, params, m)


def hidden_and_routers(params: Tree, batch: Batch, cfg: Config, watch=None):
    """Compute the last residual stream, and of each layer with experts what `_router_of` gives.

    Args:     watch: called with the name of each point (`probes.py`), and the value
              there; at "queries" with the masked attention scores, [B, H, T, S].
    """
    m, positions, segments = cfg.model, batch.positions, _segments(batch, cfg)
    x, routers = first_stream(params, batch.tokens, positions, m), []
    for i in range(m.num_layers):
        w, of_i = recurrent.weights_of(params, i, m), of_layer(m, i)
        if "router" in w:
            routers.append(_router_of(x, w, positions, segments, of_i))
            if watch is not None:
                watch("routing", routers[-1][1])
        x = block(x, w, positions, segments, of_i, watch)
        if watch is not None:
            watch("layer", x)
    if watch is not None:
        watch("head", _stream_norm(x, params, "final_norm", m))
    return x, routers


def _router_of(x, w: Tree, positions, segments, m: ModelConfig):
    """Return (used, share, logits) of a layer's router."""
    after = x if m.parallel_block else after_attention(x, w, positions, segments, m)
    logits = _router_logits(_before(after, w, "mlp_norm", m), w)
    _, used, share = router(logits, w.get("router_bias", 0.0), m)
    return used, share, logits


def output(x: jax.Array, top: Tree, m: ModelConfig) -> jax.Array:
    """Compute logits from the last residual stream. `top` has the parameters outside the layers."""
    logits = _stream_norm(x, top, "final_norm", m) @ _head(top) / m.logits_scaling
    return _softcapped(logits / _wider(m), m.logits_softcap)


def _wider(m: ModelConfig) -> float:
    """Return how much wider a model is than µP's base model."""
    return m.d_model / m.mup.base_width if m.mup else 1.0


def _deeper(m: ModelConfig) -> float:
    return m.num_layers / m.mup.base_depth if m.mup and m.mup.base_depth else 1.0


def _head(top: Tree) -> jax.Array:
    return top["head"] if "head" in top else top["embed"].T


def _softcapped(x, cap: float | None):
    return x if cap is None else cap * jnp.tanh(x / cap)


def logits_of_module(h: jax.Array, top: Tree, m: ModelConfig) -> jax.Array:
    """Compute logits from the hidden states that `modules` yields."""
    return _softcapped(h @ _head(top), m.logits_softcap)


def first_stream(top: Tree, tokens, positions, m: ModelConfig) -> jax.Array:
    """Compute the residual stream before the first layer: embeddings of tokens and positions."""
    x = embed(top["embed"][tokens], m)
    return x + top["positions"][positions] if m.positions == "learned" else x


def embed(rows: jax.Array, m: ModelConfig) -> jax.Array:
    """Compute the first residual stream from the tokens' rows of the embedding."""
    return rows * m.embedding_multiplier * (m.d_model**0.5 if m.embed_scale else 1)


def of_layer(m: ModelConfig, i: int) -> ModelConfig:
    """Return the model config for only layer i, with the window and rotary base of its kind.

    A layer without a rotary embedding has rope_fraction 0.
    """
    if m.layer_pattern and m.recurrent_norms == "before":
        recurs = m.layer_pattern[i % len(m.layer_pattern)] in "GMKk"
        m = dataclasses.replace(m, pre_norms=True, post_norms=False) if recurs else m
    fraction = 0.0 if m.nope_every and i % m.nope_every == m.nope_every - 1 else m.rope_fraction
    alike = dataclasses.replace(m, global_every=0, local_rope_theta=None, rope_fraction=fraction)
    own_heads = bool(m.layer_pattern) and m.layer_pattern[i % len(m.layer_pattern)] == "A"
    if m.global_every == 0 and "A" not in m.layer_pattern:
        return alike
    if own_heads:
        G, K = m.global_num_kv_heads or m.num_kv_heads, m.global_head_dim or m.head_dim
        alike = dataclasses.replace(alike, num_kv_heads=G, head_dim=K)
    if own_heads or (m.global_every and i % m.global_every == m.global_every - 1):
        return dataclasses.replace(alike, sliding_window=None, attention_chunk=None)
    scaling = m.rope_scaling if m.local_rope_scaling else None
    theta = m.local_rope_theta or m.rope_theta
    return dataclasses.replace(alike, rope_theta=theta, rope_scaling=scaling)


def block(x: jax.Array, w: Tree, positions, segments, m: ModelConfig, watch=None) -> jax.Array:
    """Apply one layer with the parameters `w` to the residual stream [B, T, D]."""
    before = x
    x = after_attention(x, w, positions, segments, m, watch)
    if "w_down" not in w:
        return x
    h = _before(before if m.parallel_block else x, w, "mlp_norm", m)
    out = _feed_forward(h, w, m)
    out = _norm(out, w["mlp_post_norm"], m) if m.post_norms else out
    if watch is not None:
        watch("feed_forward_input", h)
        watch("feed_forward_output", out)
    return (x + m.residual_multiplier / _deeper(m) * out) * w.get("layer_scale", 1.0)


def after_attention(x, w: Tree, positions, segments, m: ModelConfig, watch=None):
    """Apply the first branch of a layer, attention or a recurrence; arguments as `block`."""
    if not w.keys() & {"wo", *_RECURRENT}:
        return x
    h = _before(x, w, "attn_norm", m)
    of_kind = _latent_attention if m.kv_lora_rank else _attention
    if found := w.keys() & _RECURRENT.keys():
        (name,) = found
        o = _times(_RECURRENT[name](h, w, segments, m), w, name)
    else:
        o = of_kind(h, w, positions, segments, m, watch)
    o = _norm(o, w["attn_post_norm"], m) if m.post_norms else o
    if watch is not None:
        watch("mixer_input", h)
        watch("mixer_output", o)
    return x + m.residual_multiplier / _deeper(m) * o


def _attention(h, w: Tree, positions, segments, m: ModelConfig, watch=None):
    of = {"q": "wq", "k": "wk", "v": "wv" if "wv" in w else "wk"}
    q, k, v = (_times(h, w, name) + w.get("b" + n, 0.0) for n, name in of.items())
    v = _norm(v, 1.0 - m.norm_offset, m) if m.value_norm else v
    no_rope = m.nope_every and m.rope_fraction == 0
    if m.qk_norm and m.qk_norm_gain:
        q, k = _head_norm(q, w["q_norm"], m), _head_norm(k, w["k_norm"], m)
    q, k = (_rotate(a, positions, m) for a in (q, k))
    if m.qk_norm and not m.qk_norm_gain and not no_rope:
        q, k = _norm(q, 1.0, m), _norm(k, 1.0, m)
    if m.nope_query_beta and no_rope:
        turns = jnp.floor((positions[..., None, None] + 1.0) / m.nope_query_span)
        q = q * (1 + m.nope_query_beta * jnp.log(1 + turns))
    if m.rope_scaling is not None and m.rope_scaling.query_beta:
        s, place = m.rope_scaling, positions[..., None, None]
        q = q * (1 + s.query_beta * jnp.log(1 + jnp.floor(place / s.original_max_position)))
    o = _attend(q, k, v, w.get("sinks"), positions, segments, m, watch)
    if m.attention_gate:
        o = o * jax.nn.sigmoid(_times(h, w, "w_attn_gate"))
    return _times(o, w, "wo") + w.get("bo", 0.0)


def _latent_attention(h, w: Tree, positions, segments, m: ModelConfig, watch=None):
    """Compute multi-head latent attention with the keys and values of every head."""
    eps, last = dataclasses.replace(m, norm_eps=m.latent_norm_eps), m.qk_rope_head_dim
    c_q, name = h, "wq"
    if m.q_lora_rank is not None:
        c_q, name = _norm(_times(h, w, "wq_a"), w["q_a_norm"], eps), "wq_b"
    q, latent = _times(c_q, w, name), _times(h, w, "wkv_a")
    kv = _times(_norm(latent[..., :-last], w["kv_a_norm"], eps), w, "wkv_b")
    of_rope = dataclasses.replace(m, head_dim=last, rope_fraction=1.0 if m.rope_fraction else 0.0)
    rotate = lambda a: _rotate(a, positions, of_rope)  # noqa: E731
    key, nope = rotate(latent[:, :, None, -last:]), m.head_dim - last
    q = jnp.concatenate((q[..., :nope], rotate(q[..., nope:])), axis=-1)
    k = jnp.concatenate((kv[..., :nope], jnp.repeat(key, m.num_heads, axis=2)), axis=-1)
    s = m.rope_scaling
    grown = 0.1 * s.mscale_all_dim * math.log(s.factor) + 1 if s else 1.0
    o = _attend(q * grown**2, k, kv[..., nope:], None, positions, segments, m, watch)
    return _times(o, w, "wo")


def _before(x, w: Tree, name: str, m: ModelConfig):
    if m.shared_norm:
        name = "attn_norm"
    return _stream_norm(x, w, name, m) if m.pre_norms else x


def _stream_norm(x, w: Tree, name: str, m: ModelConfig):
    if m.norm == "rms":
        return _norm(x, w[name], m)
    return gpt.layer_norm(x, w[name], w[name + "_bias"], m.norm_eps)


def _times(x, w: Tree, name: str):
    """Compute x times a matrix, plus x times the product of its adapter's two if it has one."""
    y = jnp.tensordot(x, w[name], 2 if name in ("wo", *_RECURRENT) else 1)
    if name + "_lora_a" not in w:
        return y
    a, b = w[name + "_lora_a"], w[name + "_lora_b"]
    return y + jnp.tensordot(jnp.tensordot(x, a, a.ndim - 1), b, 1)


def _feed_forward(h, w: Tree, m: ModelConfig):
    if "router" in w:
        return _experts(h, w, m)
    if not m.mlp_gate:
        hidden = gpt.activated(_times(h, w, "w_up") + w.get("b_up", 0.0), m.activation)
        return _times(hidden, w, "w_down") + w.get("b_down", 0.0)
    gate, up = (_times(h, w, "w_" + n) + w.get("b_" + n, 0.0) for n in ("gate", "up"))
    return _times(_gated(gate, up, m), w, "w_down") + w.get("b_down", 0.0)


def _hidden(m: ModelConfig, *into):
    """Compute hidden values of gate and up, or of up alone."""
    if not m.mlp_gate:
        return gpt.activated(into[0], m.activation)
    gate, up = into
    return _gated(gate, up, m)


def _gated(gate, up, m: ModelConfig):
    if m.activation != "clamped_swiglu":
        return gpt.activated(gate, m.activation) * up
    gate = jnp.clip(gate, None, m.swiglu_limit)
    up = jnp.clip(up, -m.swiglu_limit, m.swiglu_limit)
    return gate * jax.nn.sigmoid(m.swiglu_alpha * gate) * (up + 1)


def _experts(h, w: Tree, m: ModelConfig):
    """Apply all experts to all tokens. Experts that a token does not use have weight 0."""
    scores, used, _ = router(_router_logits(h, w), w.get("router_bias", 0.0), m)
    weight = jnp.where(used, scores, 0.0)
    if m.normalize_experts:
        weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
    weight, x, of_each = weight * m.router_scale, h, "btd,edf->btef"
    if m.router_scales_input:
        x, of_each = h[:, :, None] * weight[..., None], "bted,edf->btef"
        weight = jnp.where(used, 1.0, 0.0)
    into = ("gate", "up") if m.mlp_gate else ("up",)
    of_all = (jnp.einsum(of_each, x, w["w_" + n]) + w.get("b_" + n, 0.0) for n in into)
    out = jnp.einsum("btef,efd,bte->btd", _hidden(m, *of_all), w["w_down"], weight)
    out = out + jnp.einsum("bte,ed->btd", weight, w["b_down"]) if m.expert_bias else out
    if m.num_shared_experts:
        shared = _hidden(m, *(_times(h, w, "w_shared_" + n) for n in into))
        shared = _times(shared, w, "w_shared_down")
        if m.shared_expert_gate:
            shared = shared * jax.nn.sigmoid(h @ w["w_shared_router"])[..., None]
        out = out + shared
    return out


def _router_logits(h, w: Tree):
    return h @ w["router"] + w.get("b_router", 0.0)


def _norm(x, gain, m: ModelConfig):
    unit = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + m.norm_eps)
    return unit * (1 + gain) if m.norm_offset else unit * gain


def _head_norm(x, gain, m: ModelConfig):
    """Normalize each head [..., H, K], or all heads of a token together, as one row [..., H K]."""
    if m.qk_norm_over == "head":
        return _norm(x, gain, m)
    rows = x.reshape(*x.shape[:-2], -1)
    return _norm(rows, gain.reshape(-1), m).reshape(x.shape)


def _rotate(x, positions, m: ModelConfig):
    if m.rope_fraction == 0 or m.positions == "learned":
        return x
    half, length = int(m.head_dim * m.rope_fraction) // 2, positions.shape[1]
    inv = jnp.asarray([reference_rope.frequency(j, half, length, m) for j in range(half)])
    angle = positions[:, :, None, None] * inv
    cos, sin = (f(angle) * reference_rope.rotary_factor(m.rope_scaling) for f in (jnp.cos, jnp.sin))
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    if m.rope_layout == "interleaved":
        a, b = rotated[..., ::2], rotated[..., 1::2]
        turned = jnp.stack((a * cos - b * sin, b * cos + a * sin), axis=-1).reshape(rotated.shape)
    else:
        a, b = rotated[..., :half], rotated[..., half:]
        turned = jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
    return jnp.concatenate((turned, rest), axis=-1)


def _attend(q, k, v, sinks, positions, segments, m: ModelConfig, watch=None):
    if function := registry.function("model.attention", m.attention):
        if m.attention_chunk is not None:
            segments = segments * (1 + jnp.max(positions)) + positions // m.attention_chunk
        mask = AttentionMask(positions, positions, segments, segments, m.sliding_window)
        return function(q * (m.attention_scale * math.sqrt(m.head_dim)), k, v, mask)
    k, v = (jnp.repeat(a, m.num_heads // m.num_kv_heads, axis=2) for a in (k, v))
    back = positions[:, :, None] - positions[:, None, :]
    seen = (back >= 0) & (segments[:, :, None] == segments[:, None, :])
    if m.sliding_window is not None:
        seen &= back < m.sliding_window
    if m.attention_chunk is not None:
        of_chunk = positions // m.attention_chunk
        seen &= of_chunk[:, :, None] == of_chunk[:, None, :]
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * m.attention_scale
    if watch is not None:
        watch("queries", jnp.where(seen[:, None], scores, -jnp.inf))
    scores = _softcapped(scores, m.attention_softcap)
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    if sinks is not None:  # a key of every query of a head, with this score and no value
        sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate((scores, sink), axis=-1), axis=-1)[..., :-1]
    else:
        weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights, v)
