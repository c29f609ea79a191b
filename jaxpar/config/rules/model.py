"""Rules about the model: heads, matmuls, attention, and the parts of a layer."""

from collections.abc import Iterator, Sequence

from jaxpar.components.feed_forward import Glu, Mlp
from jaxpar.config import Config, ModelConfig, default_of, flag, require, value_of
from jaxpar.config.fields import refused
from jaxpar.config.layers import addressed
from jaxpar.config.layout.layer_kinds import FEED_FORWARDS, GLOBAL, has_global_layers, of_kind


def layer_kinds(cfg: Config) -> None:
    """Check interleaved global and sliding-window layers. (`layout.layers` splits them.)"""
    m, p, every = cfg.model, cfg.parallel, "model.global_every"
    none, n = flag(every, 0), m.global_every
    path, rule = (
        "model.local_rope_theta",
        f"needs global and sliding-window layers, but {every} is 0",
    )
    theta = m.local_rope_theta
    no_theta = flag(path, None)
    require(theta is None or has_global_layers(m), cfg, path, rule, no_theta, flag(every, 6))
    require(theta is None or theta > 0, cfg, path, "must be above 0", no_theta)
    path, dim = "model.query_scale_dim", m.query_scale_dim
    rule = "must be at least 1, or None for head_dim"
    require(dim is None or dim >= 1, cfg, path, rule, flag(path, None))
    if n == 0:
        return
    require(n > 1, cfg, every, "leaves no sliding-window layer", none, flag(every, 6))
    rule = "needs a sliding window or chunks, but model.sliding_window and model.attention_chunk "
    rule += "are None"
    window = flag("model.sliding_window", 1024)
    local = m.sliding_window is not None or m.attention_chunk is not None
    require(local, cfg, every, rule, window, none)
    path, rule = "parallel.layer_loop", f"must be unroll, since layers differ: {every} is {n}"
    require(p.layer_loop == "unroll", cfg, path, rule, flag(path, "unroll"), none)


def activation(cfg: Config) -> None:
    """Check that the constants of an activation take effect."""
    path, clamped, given = "model.activation", "clamped_swiglu", cfg.model.activation
    for constant in ("model.swiglu_limit", "model.swiglu_alpha"):
        default, rule = default_of(constant), f"needs {path} {clamped}, not {given}"
        ok = given == clamped or value_of(cfg, constant) == default
        require(ok, cfg, constant, rule, flag(path, clamped), flag(constant, default))


def factors(cfg: Config) -> None:
    """Check the factors of scores and the cap of scores."""
    m = cfg.model
    for name in ("attention_multiplier", "attention_softcap"):
        path, value = f"model.{name}", getattr(m, name)
        require(value is None or value > 0, cfg, path, "must be above 0", flag(path, None))
    path, other = "model.attention_multiplier", "model.query_scale_dim"
    ok = m.attention_multiplier is None or m.query_scale_dim is None
    rule = f"replaces the factor of scores that {other} = {m.query_scale_dim} gives"
    require(ok, cfg, path, rule, flag(path, None), flag(other, None))


def vocabulary(cfg: Config) -> None:
    """Check that the vocabulary has a size. That of the data was filled in before, if at all."""
    path, size = "model.vocab_size", cfg.model.vocab_size
    require(size >= 0, cfg, path, "must not be negative", flag(path, default_of(path)))
    rule = "is that of the training data, which jaxpar.train, jaxpar.sweep and Trainer read, but "
    rule += "not this program"
    require(size > 0, cfg, path, rule, flag(path, default_of(path)))


def model(cfg: Config) -> None:
    """Check norms of queries and keys, and the sliding window."""
    path, needed = "model.pre_norms", "model.post_norms"
    rule = f"must be True, or {needed} too: without any, the residual stream grows without limit"
    ok = cfg.model.pre_norms or cfg.model.post_norms
    require(ok, cfg, path, rule, flag(path, True), flag(needed, True))
    path, needed = "model.qk_norm_over", "model.qk_norm"
    ok = cfg.model.qk_norm or cfg.model.qk_norm_over == "head"
    rule = f"needs {needed}, which is False"
    require(ok, cfg, path, rule, flag(needed, True), flag(path, "head"))
    path, window = "model.sliding_window", cfg.model.sliding_window
    # With a window of 1 the softmax is 1: queries and keys would get only rounding errors.
    rule = "must be at least 2, since a token must see another one; None is full attention"
    require(window is None or window >= 2, cfg, path, rule, flag(path, None))
    path, chunk = "model.attention_chunk", cfg.model.attention_chunk
    rule = "must be at least 2, since a token must see another one; None is full attention"
    require(chunk is None or chunk >= 2, cfg, path, rule, flag(path, None))
    rule = f"replaces a sliding window, but model.sliding_window is {window}"
    ways = flag(path, None), flag("model.sliding_window", None)
    require(chunk is None or window is None, cfg, path, rule, *ways)
    _without_gain(cfg)
    _scaled_layers(cfg)
    path, latent = "model.value_norm", "model.kv_lora_rank"
    rule = f"is not supported with latent attention, {latent} = {cfg.model.kv_lora_rank}"
    ok = not cfg.model.value_norm or not cfg.model.kv_lora_rank
    require(ok, cfg, path, rule, flag(path, False), flag(latent, 0))


def _without_gain(cfg: Config) -> None:
    path, m = "model.qk_norm_gain", cfg.model
    for needed, wanted in (("model.qk_norm", True), ("model.qk_norm_over", "head")):
        rule = f"needs {needed} {wanted}, not {value_of(cfg, needed)}"
        ok = m.qk_norm_gain or value_of(cfg, needed) == wanted
        require(ok, cfg, path, rule, flag(needed, wanted), flag(path, True))


def _scaled_layers(cfg: Config) -> None:
    """Check that the last branch of every layer scales the stream, with `model.layer_scale`."""
    path, m = "model.layer_scale", cfg.model
    none = flag(path, False)
    rule = f"needs layers that end with a feed-forward: model.layer_pattern is {m.layer_pattern}"
    alone = not set(FEED_FORWARDS).isdisjoint(m.layer_pattern)
    require(not (m.layer_scale and alone), cfg, path, rule, none)


def float8_matmuls(cfg: Config) -> None:
    """Check that options of float8 matmuls take effect."""
    c, p, float8 = cfg.compute, cfg.parallel, flag("compute.matmul_dtype", "float8")
    path = "compute.float8_scaling"
    rule = f"needs compute.matmul_dtype float8, not {c.matmul_dtype}"
    ok = c.matmul_dtype == "float8"
    require(ok or c.float8_scaling == "tensor", cfg, path, rule, float8, flag(path, "tensor"))
    path = "parallel.gather_dtype"
    ok = ok or p.gather_dtype == "compute"
    require(ok, cfg, path, rule, float8, flag(path, "compute"))


BACKEND = "compute.attention_backend"

#: Head dims of the attention backends that do not support every size.
_HEAD_DIMS: dict[str, tuple[Sequence[int], str]] = {
    "cudnn": (range(8, 257, 8), "a multiple of 8 up to 256"),
    "pallas_hopper": ((64, 128, 256), "64, 128 or 256"),
    "triton": (range(16, 257, 16), "a multiple of 16 up to 256"),
}


def attention(cfg: Config) -> None:
    """Check the head dims that `jaxpar/kernels/attention/capability.py` declares for each kernel,
    without a device."""
    m, name, auto = cfg.model, cfg.compute.attention_backend, flag(BACKEND, "auto")
    if name not in _HEAD_DIMS:
        return
    sizes, words = _HEAD_DIMS[name]
    rule = f"must be {words} for attention_backend = {name}"
    for head, dim in _head_dims(m):
        is_field = not m.layers or bool(list(addressed(m.layers, head.split(".")[1:])))
        fits = [flag(head, next((size for size in sizes if size >= dim), 256))] * is_field
        if dim not in sizes:
            raise refused(head, dim, rule, *fits, auto)


def _head_dims(m: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yield the head dim of each kind of layer with attention, and the field that sets it."""
    if not m.layers:
        yield "model.head_dim", m.head_dim
        if GLOBAL in m.layer_pattern:
            yield "model.global_head_dim", of_kind(m, GLOBAL).head_dim
    for layer in dict.fromkeys(m.layers):
        if layer.mixer and (heads := layer.mixer.attention_heads):
            yield f"model.{layer.name}.mixer.head_dim", heads.key_dim


#: Fields that only rotary embeddings read.
OF_ROPE = ("model.rope_scaling", "model.rope_fraction", "model.rope_layout", "model.nope_every")


def block(cfg: Config) -> None:
    """Check that the parts of a layer fit one another."""
    _feed_forward(cfg)
    _parallel(cfg)
    m, path, other = cfg.model, "model.norm", "model.post_norms"
    rule = f"needs {path} rms, not {m.norm}"
    require(m.norm == "rms" or not m.post_norms, cfg, other, rule, *_of_norm(other))


def _feed_forward(cfg: Config) -> None:
    m, path, gate = cfg.model, "model.activation", "model.mlp_gate"
    allowed = (*Glu.activations, "clamped_swiglu") if m.mlp_gate else Mlp.activations
    rule = f"must be one of {', '.join(allowed)} with {gate} {m.mlp_gate}"
    ways = flag(path, "gelu"), flag(gate, not m.mlp_gate)
    require(m.activation in allowed, cfg, path, rule, *ways)


def _of_norm(path: str) -> tuple[str, str]:
    """Return the fixes of a field that only RMSNorm has."""
    return flag("model.norm", "rms"), flag(path, default_of(path))


def of_stream(cfg: Config) -> None:
    """Check what is beside the layers: the norm's offset, the cap of logits, and positions."""
    m, path = cfg.model, "model.logits_softcap"
    ok = m.logits_softcap is None or m.logits_softcap > 0
    require(ok, cfg, path, "must be above 0", flag(path, None))
    path, rule = "model.norm_offset", f"needs model.norm rms, not {m.norm}"
    require(m.norm == "rms" or not m.norm_offset, cfg, path, rule, *_of_norm(path))
    _positions(cfg)


def _parallel(cfg: Config) -> None:
    m, path, shared = cfg.model, "model.parallel_block", "model.shared_norm"
    rule = f"needs {path}, which is False"
    ok = m.parallel_block or not m.shared_norm
    require(ok, cfg, shared, rule, flag(path, True), flag(shared, False))
    rule = "needs model.pre_norms, which is False"
    ways = flag("model.pre_norms", True), flag(shared, False)
    require(m.pre_norms or not m.shared_norm, cfg, shared, rule, *ways)


def _positions(cfg: Config) -> None:
    m, path, most = cfg.model, "model.positions", "model.max_positions"
    ways: tuple[str, ...]
    if m.positions == "rope" and not m.layers:
        rule = f"needs {path} learned, not rope"
        ways = flag(path, "learned"), flag(most, 0)
        require(m.max_positions == 0, cfg, most, rule, *ways)
        return
    if m.layers and not m.max_positions:
        return
    rope = flag(path, "rope")
    rule = f"must be at least data.seq_len = {cfg.data.seq_len}: each position has a row"
    ways = (flag(most, cfg.data.seq_len), flag("data.seq_len", m.max_positions or 1))
    ways = ways if m.max_positions else ways[:1]
    require(m.max_positions >= cfg.data.seq_len, cfg, most, rule, *ways)
    for other in () if m.layers else OF_ROPE:
        default = default_of(other) if other != "model.rope_scaling" else None
        value = m.rope_scaling if other == "model.rope_scaling" else value_of(cfg, other)
        rule = f"needs {path} rope, not learned"
        require(value == default, cfg, other, rule, f"{rope} {flag(most, 0)}", flag(other, default))
