"""Rules about the model: vocabulary, matmuls, attention backends, norm, positions and µP."""

from collections.abc import Sequence

from jaxpar.components.experts import d_ff, head_dim
from jaxpar.config import Config, default_of, flag, require, value_of
from jaxpar.config.fields import refused
from jaxpar.config.layers import addressed


def vocabulary(cfg: Config) -> None:
    """Check that the vocabulary has a size. That of the data was filled in before, if at all."""
    path, size = "model.vocab_size", cfg.model.vocab_size
    require(size >= 0, cfg, path, "must not be negative", flag(path, default_of(path)))
    rule = "is that of the training data, which jaxpar.train, jaxpar.sweep and Trainer read, but "
    rule += "not this program"
    require(size > 0, cfg, path, rule, flag(path, default_of(path)))


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

#: The shortest sequences that a fix proposes.
SHORTEST = 64

#: Head dims of the attention backends that do not support every size.
_HEAD_DIMS: dict[str, tuple[Sequence[int], str]] = {
    "cudnn": (range(8, 257, 8), "a multiple of 8 up to 256"),
    "pallas_hopper": ((64, 128, 256), "64, 128 or 256"),
    "triton": (range(16, 257, 16), "a multiple of 16 up to 256"),
}


def attention(cfg: Config) -> None:
    """Check the head dims that `jaxpar/kernels/attention/capability.py` declares for each kernel,
    without a device."""
    name, auto = cfg.compute.attention_backend, flag(BACKEND, "auto")
    if name not in _HEAD_DIMS:
        return
    sizes, words = _HEAD_DIMS[name]
    rule = f"must be {words} for attention_backend = {name}"
    for layer in cfg.model.distinct:
        heads = layer.mixer and layer.mixer.attention_heads
        if not heads or heads.key_dim in sizes:
            continue
        path = f"model.{layer.name}.mixer.head_dim"
        is_field = bool(list(addressed([layer], path.split(".")[1:])))
        fits = next((size for size in sizes if size >= heads.key_dim), 256)
        raise refused(path, heads.key_dim, rule, *[flag(path, fits)] * is_field, auto)


def of_stream(cfg: Config) -> None:
    """Check what is beside the layers: the norm's offset, and positions."""
    m, path, kind = cfg.model, "model.norm.offset", "model.norm.kind"
    ways = flag(kind, "rms"), flag(path, False)
    rule = f"needs {kind} rms, not {m.norm.kind}"
    require(m.norm.kind == "rms" or not m.norm.offset, cfg, path, rule, *ways)
    path = "model.max_positions"
    rule = f"must be at least data.seq_len = {cfg.data.seq_len}: each position has a row"
    shorter = [flag("data.seq_len", m.max_positions)] if m.max_positions >= SHORTEST else []
    ok = not m.max_positions or m.max_positions >= cfg.data.seq_len
    require(ok, cfg, path, rule, flag(path, cfg.data.seq_len), *shorter)


def mup(cfg: Config) -> None:
    """Check the sizes of the base model of µP."""
    m = cfg.model
    if m.mup is None:
        return
    sizes = {"base_width": m.d_model, "base_d_ff": d_ff(m)}
    sizes |= {"base_head_dim": head_dim(m), "base_depth": m.num_layers}
    for name, size in sizes.items():
        path = f"model.mup.{name}"
        given = value_of(cfg, path)
        require(given is None or given >= 1, cfg, path, "must be at least 1", flag(path, size))
