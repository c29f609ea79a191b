"""Which configs can work: every rule in one place, checked before a device or a file is touched.

`resolve` fills in what depends on the number of devices and raises `ConfigError` for the first
broken rule. The rules are small functions, one per concern, each naming a field and a fix.
"""

import dataclasses
import math
import types
import typing
from typing import Any, Literal

from jaxpar.config import Config, ConfigError

#: Values that the backward can find saved instead of recomputing, in the order of the forward.
REMAT_NAMES = (
    "attn_norm",
    "qkv",
    "qk",
    "attn_out",
    "attn_lse",
    "attn_residual",
    "mlp_norm",
    "gate_up",
    "mlp_hidden",
)

#: Named policies: which of REMAT_NAMES they save. Fewer names, less memory, more recomputation.
REMAT_POLICIES: dict[str, tuple[str, ...]] = {
    "none": REMAT_NAMES,
    "dots": ("qkv", "attn_out", "attn_lse", "attn_residual", "gate_up"),
    "attn_out": ("attn_out", "attn_lse"),
    "full": (),
}


def resolve(cfg: Config, num_devices: int) -> Config:
    """The config with `parallel.data = -1` filled in, once every rule holds.

    Args:     num_devices: devices in the mesh, over all processes.
    Returns:  a config whose mesh axes multiply to num_devices.
    Raises:   ConfigError: field, value, rule and fix of the first rule broken.
    """
    _check_types(cfg, "")
    for rule in (_counts, _rates, _model, _remat, _evaluation_and_checkpoint):
        rule(cfg)
    cfg = _fill_data_axis(cfg, num_devices)
    for rule in (_tensor, _pipeline, _sequence, _sharding, _batch):
        rule(cfg)
    return cfg


def _check_types(node: Any, prefix: str) -> None:
    hints = typing.get_type_hints(type(node))
    for field in dataclasses.fields(node):
        value, path = getattr(node, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            _check_types(value, path + ".")
        elif not _fits(value, hints[field.name]):
            raise ConfigError(path, value, f"must be {_describe(hints[field.name])}", "change it")


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_fits(value, h) for h in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if isinstance(hint, types.UnionType):
        return " or ".join(_describe(h) for h in typing.get_args(hint))
    return "None" if hint is type(None) else f"of type {hint.__name__}"


_AT_LEAST_ONE = """train.num_steps train.global_batch_size train.log_every data.seq_len data.prefetch
model.num_layers model.d_model model.num_heads model.num_kv_heads model.head_dim model.d_ff
model.vocab_size parallel.pipeline parallel.replica parallel.expert parallel.sequence
parallel.tensor parallel.num_microbatches parallel.virtual_stages checkpoint.keep
evaluation.num_batches""".split()

_AT_LEAST_ZERO = """run.cpu_devices train.seed train.z_loss optimizer.warmup_steps
optimizer.weight_decay optimizer.clip_norm checkpoint.every checkpoint.keep_every
evaluation.every""".split()

_ABOVE_ZERO = """model.rope_theta model.norm_eps model.init_std optimizer.learning_rate
optimizer.eps""".split()

_BELOW_ONE = ("optimizer.beta1", "optimizer.beta2")


def _get(cfg: Config, path: str) -> Any:
    node: Any = cfg
    for key in path.split("."):
        node = getattr(node, key)
    return node


def _require(ok: bool, cfg: Config, path: str, rule: str, fix: str) -> None:
    if not ok:
        raise ConfigError(path, _get(cfg, path), rule, fix)


def _counts(cfg: Config) -> None:
    for path in _AT_LEAST_ONE:
        _require(_get(cfg, path) >= 1, cfg, path, "must be at least 1", "use a positive number")
    for path in _AT_LEAST_ZERO:
        _require(_get(cfg, path) >= 0, cfg, path, "must not be negative", "use 0 or more")
    _require(
        cfg.parallel.data >= 1 or cfg.parallel.data == -1,
        cfg,
        "parallel.data",
        "must be at least 1, or -1 for the devices that are left",
        "use -1",
    )
    _require(bool(cfg.run.dir), cfg, "run.dir", "must name a folder", "use --run.dir runs/NAME")


def _rates(cfg: Config) -> None:
    for path in (*_AT_LEAST_ONE, *_AT_LEAST_ZERO, *_ABOVE_ZERO, "optimizer.min_lr_ratio"):
        _require(math.isfinite(_get(cfg, path)), cfg, path, "must be finite", "use a number")
    for path in _ABOVE_ZERO:
        _require(_get(cfg, path) > 0, cfg, path, "must be above 0", "use a small positive number")
    for path in _BELOW_ONE:
        fix = "use a value such as 0.9"
        _require(0 <= _get(cfg, path) < 1, cfg, path, "must be in [0, 1)", fix)
    opt = cfg.optimizer
    in_unit = 0 <= opt.min_lr_ratio <= 1
    _require(in_unit, cfg, "optimizer.min_lr_ratio", "must be in [0, 1]", "use a value such as 0.1")
    _require(
        opt.warmup_steps < cfg.train.num_steps or opt.warmup_steps == 0,
        cfg,
        "optimizer.warmup_steps",
        f"must be below train.num_steps = {cfg.train.num_steps}",
        f"use {cfg.train.num_steps // 10}, or train for longer",
    )


def _model(cfg: Config) -> None:
    m = cfg.model
    _divides(cfg, "model.num_heads", m.num_kv_heads, "model.num_kv_heads", "every KV head")
    _require(
        m.head_dim % 2 == 0,
        cfg,
        "model.head_dim",
        "must be even, since RoPE turns pairs of numbers",
        f"use {m.head_dim + 1}",
    )
    window = m.sliding_window
    _require(
        window is None or window >= 1,
        cfg,
        "model.sliding_window",
        "must be at least 1, or None for full attention",
        "use None",
    )
    if m.attention_backend == "cudnn":
        fits = m.head_dim % 8 == 0 and m.head_dim <= 256
        rule = "must be a multiple of 8 up to 256 for attention_backend = cudnn"
        _require(fits, cfg, "model.head_dim", rule, "use attention_backend reference")
        rule = "cudnn computes in bfloat16 only, and model.dtype is float32"
        fix = "use --model.dtype bfloat16, or attention_backend reference"
        _require(m.dtype == "bfloat16", cfg, "model.attention_backend", rule, fix)
    if m.rope_scaling is not None:
        _rope_scaling(cfg)


def _rope_scaling(cfg: Config) -> None:
    s = cfg.model.rope_scaling
    assert s is not None
    name = "model.rope_scaling."
    _require(s.factor >= 1, cfg, name + "factor", "must be at least 1", "use 8.0")
    _require(
        0 < s.low_freq_factor < s.high_freq_factor,
        cfg,
        name + "low_freq_factor",
        f"must be above 0 and below high_freq_factor = {s.high_freq_factor}",
        "use 1.0 and 4.0",
    )
    original = s.original_max_position
    _require(original >= 1, cfg, name + "original_max_position", "must be at least 1", "use 8192")


def _remat(cfg: Config) -> None:
    remat = cfg.parallel.remat
    unknown = [n for n in remat.split(",") if n not in REMAT_NAMES]
    _require(
        remat in REMAT_POLICIES or not unknown,
        cfg,
        "parallel.remat",
        f"must be one of {', '.join(REMAT_POLICIES)}, or names joined by commas",
        f"choose names from {', '.join(REMAT_NAMES)}",
    )


def _evaluation_and_checkpoint(cfg: Config) -> None:
    every, keep_every = cfg.checkpoint.every, cfg.checkpoint.keep_every
    _require(
        keep_every == 0 or (every > 0 and keep_every % every == 0),
        cfg,
        "checkpoint.keep_every",
        f"must be a multiple of checkpoint.every = {every}",
        f"use {max(every, 1) * 10}, or 0",
    )
    _require(
        cfg.checkpoint.resume != "must" or every > 0,
        cfg,
        "checkpoint.resume",
        "needs checkpoints, and checkpoint.every is 0",
        "use --checkpoint.every 500",
    )


def _fill_data_axis(cfg: Config, num_devices: int) -> Config:
    p = cfg.parallel
    rest = p.pipeline * p.replica * p.expert * p.sequence * p.tensor
    if p.data == -1:
        _require(
            num_devices % rest == 0,
            cfg,
            "parallel.data",
            f"-1 takes the devices that are left, but the other axes multiply to {rest}, "
            f"which does not divide {num_devices} devices",
            "choose axes whose product divides the number of devices",
        )
        return dataclasses.replace(cfg, parallel=dataclasses.replace(p, data=num_devices // rest))
    _require(
        p.data * rest == num_devices,
        cfg,
        "parallel.data",
        f"the mesh axes multiply to {p.data * rest}, and there are {num_devices} devices",
        "use --parallel.data -1 to take the devices that are left",
    )
    return cfg


def _divides(cfg: Config, path: str, by: int, by_name: str, why: str) -> None:
    value = _get(cfg, path)
    good = ", ".join(str(n) for n in range(1, value + 1) if value % n == 0)
    few = good if len(good) < 80 else good[:77] + "..."
    _require(
        value % by == 0,
        cfg,
        path,
        f"must be divisible by {by_name} = {by} ({why} gets an equal part)",
        f"use {-(-value // by) * by} here, or {by_name} from {few}",
    )


def _tensor(cfg: Config) -> None:
    tensor = cfg.parallel.tensor
    for path in ("model.num_heads", "model.num_kv_heads", "model.d_ff"):
        _divides(cfg, path, tensor, "parallel.tensor", "every tensor rank")


def _pipeline(cfg: Config) -> None:
    p = cfg.parallel
    stages = p.pipeline * p.virtual_stages
    _require(
        p.virtual_stages == 1 or p.pipeline > 1,
        cfg,
        "parallel.virtual_stages",
        "interleaves a pipeline, and parallel.pipeline is 1",
        "use --parallel.virtual-stages 1",
    )
    name = "parallel.pipeline * parallel.virtual_stages"
    _divides(cfg, "model.num_layers", stages, name, "every stage")
    vocab_name = "parallel.tensor * parallel.pipeline"
    _divides(cfg, "model.vocab_size", p.tensor * p.pipeline, vocab_name, "every vocabulary shard")
    if p.virtual_stages > 1:
        why = "interleaving needs whole rounds: every stage"
        _divides(cfg, "parallel.num_microbatches", p.pipeline, "parallel.pipeline", why)


def _sequence(cfg: Config) -> None:
    p = cfg.parallel
    zigzag = p.sequence > 1 and p.context != "ulysses"
    parts = p.sequence * p.tensor * (2 if zigzag else 1)
    name = "parallel.sequence * parallel.tensor" + (" * 2" if zigzag else "")
    why = "zigzag order: each half of every shard" if zigzag else "every sequence shard"
    _divides(cfg, "data.seq_len", parts, name, why)
    if p.context == "ulysses" and p.sequence > 1:
        heads = p.tensor * p.sequence
        name = "parallel.tensor * parallel.sequence"
        _divides(cfg, "model.num_heads", heads, name, "ulysses trades sequence for heads: each rank")


def _sharding(cfg: Config) -> None:
    p = cfg.parallel
    ways = p.data * p.expert * p.sequence
    name = "parallel.data * parallel.expert * parallel.sequence"
    _divides(cfg, "model.d_model", ways, name, "parameters are sharded on it: every shard")


def _batch(cfg: Config) -> None:
    p = cfg.parallel
    parts = p.replica * p.data * p.expert * p.num_microbatches
    name = "parallel.replica * data * expert * num_microbatches"
    _divides(cfg, "train.global_batch_size", parts, name, "every microbatch of every shard")
