"""Which configs can work: every rule in one place, checked before a device or a file is touched.

`check` applies the rules that need no device, `resolve` those and the ones that do. Both raise
`ConfigError` for the first broken rule, with a fix in the words of the command line: any one of
its alternatives, joined by ", or", makes that rule hold. The rules are small functions, one per
concern; what must divide what is one table, `_divisions`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxpar.config import Config, default_of, field_types, flag
from jaxpar.config import require as _require
from jaxpar.config import value_of as _get
from jaxpar.config_types import check_types
from jaxpar.data_rules import data, shares
from jaxpar.guard_rules import guards
from jaxpar.layout_rules import automatic
from jaxpar.lora_rules import lora
from jaxpar.memory_rules import moments, remat
from jaxpar.metrics_rules import sinks
from jaxpar.model_rules import attention_function, experts, layer_kinds

#: Of whole numbers: steps, seeds, sizes and tokens are int32 on the devices.
LARGEST_INT = 2**31 - 1

#: More of them take minutes to start, if they do at all.
MOST_CPU_DEVICES = 4096

#: The axes besides data.
_OTHER_AXES = tuple(
    f"parallel.{axis}" for axis in "pipeline replica expert sequence tensor".split()
)


def resolve(cfg: Config, num_devices: int) -> Config:
    """The config with `parallel.data = -1` filled in, once every rule holds; and with
    `parallel.zero` 1 where FSDP's axes have one device.

    Args:     num_devices: devices in the mesh, over all processes.
    Returns:  a config whose mesh axes multiply to num_devices.
    Raises:   ConfigError: field, value, rule and fix of the first rule broken.
    """
    _each_rule(cfg)
    cfg = fill_data_axis(cfg, num_devices)
    _divisibility(cfg)
    return _cast_once(cfg)


def _cast_once(cfg: Config) -> Config:
    """Where nothing is sharded there is nothing to gather layer by layer: as ZeRO-1, weights are
    cast once per step, and matmuls add the gradients of microbatches up. 8-bit gathers are left:
    they say how weights are rounded."""
    p = cfg.parallel
    if p.data * p.expert * p.sequence > 1 or p.gather_dtype != "compute":
        return cfg
    return dataclasses.replace(cfg, parallel=dataclasses.replace(p, zero=1))


def check(cfg: Config) -> None:
    """Every rule that needs no device, so that a program can fail before it starts one.

    Raises:   ConfigError: field, value, rule and fix of the first rule broken.
    """
    _each_rule(cfg)
    _divisibility(cfg)


def _each_rule(cfg: Config) -> None:
    check_types(cfg)
    first = (_numbers, _places, data, _schedule, moments, _model, _float8, _attention, remat)
    others = (_saving, guards, _profile, sinks, _interleaving, _turns, automatic)
    of_models = (experts, layer_kinds, attention_function, lora)
    for rule in first + others + of_models:
        rule(cfg)


# -------------------------------------------------------------------------- one field at a time

_AT_LEAST_ONE = """train.num_steps train.global_batch_size train.log_every data.seq_len
data.prefetch model.num_layers model.d_model model.num_heads model.num_kv_heads model.head_dim
model.d_ff model.experts_per_token model.vocab_size parallel.pipeline parallel.replica
parallel.expert parallel.sequence parallel.tensor parallel.num_microbatches parallel.row_groups
parallel.virtual_stages checkpoint.keep evaluation.num_batches
guard.max_skips guard.spike_window guard.spike_skip guard.loss_scale_interval profile.num_steps
cluster.connect_seconds""".split()

_AT_LEAST_ZERO = """run.cpu_devices model.num_experts model.global_every train.seed
train.z_loss optimizer.warmup_steps optimizer.weight_decay optimizer.clip_norm
parallel.loss_chunks checkpoint.every checkpoint.keep_every
checkpoint.save_failures_allowed evaluation.every guard.max_rewinds guard.recent_steps
guard.replica_check_every profile.start cluster.num_processes cluster.hang_seconds
cluster.slow_seconds""".split()

_ABOVE_ZERO = """model.rope_theta model.norm_eps model.init_std optimizer.learning_rate
optimizer.eps guard.spike_deviations""".split()

_BELOW_ONE = ("optimizer.beta1", "optimizer.beta2")


def _numbers(cfg: Config) -> None:
    def require(ok: bool, path: str, rule: str, better: Any = ...) -> None:
        _require(ok, cfg, path, rule, flag(path, default_of(path) if better is ... else better))

    for path in field_types():
        if path.startswith("model.rope_scaling.") and cfg.model.rope_scaling is None:
            continue
        if isinstance(_get(cfg, path), float):
            require(math.isfinite(_get(cfg, path)), path, "must be finite")
        if isinstance(_get(cfg, path), int) and path != "train.seed":
            require(_get(cfg, path) <= LARGEST_INT, path, f"must be at most {LARGEST_INT}")
    for path in _AT_LEAST_ONE:
        require(_get(cfg, path) >= 1, path, "must be at least 1")
    for path in _AT_LEAST_ZERO:
        require(_get(cfg, path) >= 0, path, "must not be negative", 0)
    for path in _ABOVE_ZERO:
        require(_get(cfg, path) > 0, path, "must be above 0")
    for path in _BELOW_ONE:
        require(0 <= _get(cfg, path) < 1, path, "must be at least 0 and below 1")
    most, rule = MOST_CPU_DEVICES, f"must be at most {MOST_CPU_DEVICES}"
    require(cfg.run.cpu_devices <= most, "run.cpu_devices", rule)
    data, ratio, seed = cfg.parallel.data, cfg.optimizer.min_lr_ratio, cfg.train.seed
    rule = "must be at least 1, or -1 for the devices that are left"
    require(data >= 1 or data == -1, "parallel.data", rule)
    require(0 <= ratio <= 1, "optimizer.min_lr_ratio", "must be at least 0 and at most 1")
    rule = f"must be at most {LARGEST_INT}"
    require(seed <= LARGEST_INT, "train.seed", rule, seed % (LARGEST_INT + 1))


# ----------------------------------------------------------------------- fields that go together


def _places(cfg: Config) -> None:
    for path in ("run.dir", "data.path"):
        ok = bool(_get(cfg, path).strip())
        _require(ok, cfg, path, "must name a folder", flag(path, default_of(path)))
    sources = [("data.mixture" if cfg.data.mixture else "data.path", s.path) for s in shares(cfg)]
    others = ("run.dir", "run.init_from", "run.compilation_cache", "data.held_out")
    for path, name in [*sources, *((other, _get(cfg, other)) for other in others)]:
        raw = name.encode("utf-8", "replace")
        ok = len(raw) < 4096 and max(map(len, raw.split(b"/"))) < 256 and b"\0" not in raw
        rule = "must be a path: 4,095 bytes at most, in each name 255, and no zero byte"
        _require(ok, cfg, path, rule, flag(path, default_of(path)))


def _schedule(cfg: Config) -> None:
    path, warmup, steps = "optimizer.warmup_steps", cfg.optimizer.warmup_steps, cfg.train.num_steps
    rule = f"must be below train.num_steps = {steps}"
    ways = flag(path, steps // 10), flag("train.num_steps", 10 * warmup)
    _require(warmup < steps or warmup == 0, cfg, path, rule, *ways)


def _model(cfg: Config) -> None:
    path, head_dim = "model.head_dim", cfg.model.head_dim
    rule = "must be even, since RoPE turns pairs of numbers"
    _require(head_dim % 2 == 0, cfg, path, rule, flag(path, head_dim + 1))
    path, window = "model.sliding_window", cfg.model.sliding_window
    # Of a window of 1 the softmax is 1, so queries and keys would have no gradient but rounding.
    rule = "must be at least 2, or None for full attention: a token alone has nothing to attend to"
    _require(window is None or window >= 2, cfg, path, rule, flag(path, None))
    scaling = cfg.model.rope_scaling
    if scaling is None:
        return
    path = "model.rope_scaling.factor"
    _require(scaling.factor >= 1, cfg, path, "must be at least 1", flag(path, 8.0))
    path, original = "model.rope_scaling.original_max_position", scaling.original_max_position
    _require(original >= 1, cfg, path, "must be at least 1", flag(path, 8192))
    path, high = "model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor"
    rule = f"must be above 0 and below high_freq_factor = {scaling.high_freq_factor}"
    ok = 0 < scaling.low_freq_factor < scaling.high_freq_factor
    _require(ok, cfg, path, rule, f"{flag(path, 1.0)} {flag(high, 4.0)}")


def _float8(cfg: Config) -> None:
    """What is set for 8-bit matmuls takes effect."""
    m, p, float8 = cfg.model, cfg.parallel, flag("model.matmul_dtype", "float8")
    path, rule = "model.float8_scaling", f"needs model.matmul_dtype float8, not {m.matmul_dtype}"
    ok = m.matmul_dtype == "float8"
    _require(ok or m.float8_scaling == "tensor", cfg, path, rule, float8, flag(path, "tensor"))
    path = "parallel.gather_dtype"
    compute = flag(path, "compute")
    _require(ok or p.gather_dtype == "compute", cfg, path, rule, float8, compute)
    rule = "is of ZeRO-3; ZeRO-1 gathers once per step, in the compute dtype"
    ok = p.gather_dtype == "compute" or p.zero == 3
    _require(ok, cfg, path, rule, compute, flag("parallel.zero", 3))


#: Head dims of the attention backends that do not take them all.
_HEAD_DIMS: dict[str, tuple[Sequence[int], str]] = {
    "cudnn": (range(8, 257, 8), "a multiple of 8 up to 256"),
    "pallas_hopper": ((64, 128, 256), "64, 128 or 256"),
}


def _attention(cfg: Config) -> None:
    """What each kernel declares in `jaxpar/kernels/attention/capability.py`, without a device."""
    m, p, path = cfg.model, cfg.parallel, "model.attention_backend"
    auto, name = flag(path, "auto"), m.attention_backend
    if name not in _HEAD_DIMS:
        return
    sizes, words = _HEAD_DIMS[name]
    rule = f"must be {words} for attention_backend = {name}"
    fits = flag("model.head_dim", next((size for size in sizes if size >= m.head_dim), 256))
    _require(m.head_dim in sizes, cfg, "model.head_dim", rule, fits, auto)
    rule = "computes in bfloat16 or float16, and model.dtype is float32"
    _require(m.dtype != "float32", cfg, path, rule, flag("model.dtype", "bfloat16"), auto)
    if name == "cudnn" and p.sequence > 1:
        rule = f"needs the text's own order, which parallel.context = {p.context} does not keep"
        _require(p.context == "ulysses", cfg, path, rule, flag("parallel.context", "ulysses"), auto)


def _saving(cfg: Config) -> None:
    path, every, keep_every = (
        "checkpoint.keep_every",
        cfg.checkpoint.every,
        cfg.checkpoint.keep_every,
    )
    never, needs = flag(path, 0), "needs checkpoints, and checkpoint.every is 0"
    some = flag("checkpoint.every", keep_every or 500)
    _require(keep_every == 0 or every > 0, cfg, path, needs, some, never)
    if every > 0:
        rule = f"must be a multiple of checkpoint.every = {every}"
        more = flag(path, -(-keep_every // every) * every)
        _require(keep_every % every == 0, cfg, path, rule, more, never)
    path = "checkpoint.resume"
    ok = cfg.checkpoint.resume != "must" or every > 0
    _require(ok, cfg, path, needs, some, flag(path, "auto"))


#: A trace of a large step has hundreds of thousands of events, which fill memory until it ends.
MOST_PROFILED_STEPS = 20


def _profile(cfg: Config) -> None:
    """A profile is of steps that the run takes, and of few."""
    path, start, last = "profile.start", cfg.profile.start, cfg.train.num_steps
    rule = f"must be a step of the run, which has train.num_steps = {last}"
    _require(start <= last, cfg, path, rule, flag(path, last), flag("train.num_steps", start))
    path, most = "profile.num_steps", MOST_PROFILED_STEPS
    rule = f"must be at most {most}: traces are large, and one step is like the next"
    _require(cfg.profile.num_steps <= most, cfg, path, rule, flag(path, most))


def _interleaving(cfg: Config) -> None:
    p, path = cfg.parallel, "parallel.virtual_stages"
    rule = "interleaves a pipeline, and parallel.pipeline is 1"
    ways = flag(path, 1), flag("parallel.pipeline", 2)
    _require(p.virtual_stages == 1 or p.pipeline > 1, cfg, path, rule, *ways)


def _turns(cfg: Config) -> None:
    p, path = cfg.parallel, "parallel.row_groups"
    rule = "needs unrolled layers, and parallel.layer_loop is scan"
    ways = flag(path, 1), flag("parallel.layer_loop", "unroll")
    _require(p.row_groups == 1 or p.layer_loop == "unroll", cfg, path, rule, *ways)


# ---------------------------------------------------------------------------- what divides what


class _Division(NamedTuple):
    """`path` must be divisible by the product of the fields `by`, times `times`."""

    path: str
    by: tuple[str, ...]
    why: str
    times: int = 1

    def divisor(self, cfg: Config) -> int:
        """The product; `parallel.data` counts once it is known."""
        return self.times * math.prod(max(_get(cfg, path), 1) for path in self.by)


def _divisions(cfg: Config) -> list[_Division]:
    p = cfg.parallel
    kv_heads, tensor, pipeline = "model.num_kv_heads", "parallel.tensor", "parallel.pipeline"
    sequence, data, expert = "parallel.sequence", "parallel.data", "parallel.expert"
    rows = ("parallel.replica", data, expert, "parallel.num_microbatches", "parallel.row_groups")
    cut, zigzag = p.sequence > 1, p.sequence > 1 and p.context != "ulysses"
    halves = "in zigzag order, each half of a shard" if zigzag else "each shard of a sequence"
    table = [
        _Division(kv_heads, (tensor,), "each tensor rank gets as many, and their query heads"),
        _Division("model.num_heads", (kv_heads,), "each KV head serves as many query heads"),
        _Division("model.d_ff", (tensor,), "each tensor rank gets an equal part"),
        _Division(
            "model.num_layers", (pipeline, "parallel.virtual_stages"), "each stage is as deep"
        ),
        _Division("model.vocab_size", (tensor, pipeline), "each vocabulary shard is as large"),
        _Division("data.seq_len", (sequence, tensor), f"{halves} is as long", 1 + zigzag),
        _Division("model.d_model", (data, expert, sequence), "parameters are sharded on it"),
        _Division("train.global_batch_size", rows, "each microbatch of a shard has as many rows"),
    ]
    if cut and p.context == "ulysses":
        why = "ulysses trades the sequence split for one of heads"
        table.append(_Division("model.num_heads", (tensor, sequence), why))
    if cfg.model.matmul_dtype == "float8":
        table += _float8_divisions(cfg)
    if p.virtual_stages > 1:
        why = "interleaved stages work in whole rounds"
        table.append(_Division("parallel.num_microbatches", (pipeline,), why))
    return table


def _float8_divisions(cfg: Config) -> list[_Division]:
    """cuBLAS takes 8-bit matrices whose sides are multiples of 16. A device's tokens are one, or
    those of a tensor rank, where matmuls take these one by one."""
    why, tensor = "float8 matmuls need sides of multiples of 16 on each device", "parallel.tensor"
    heads = 16 // math.gcd(16, cfg.model.head_dim)
    return [
        _Division("model.d_model", (), why, 16),
        _Division("model.d_ff", (tensor,), why, 16),
        _Division("model.num_kv_heads", (tensor,), why, heads),
        _Division("data.seq_len", ("parallel.sequence", tensor), why, 16),
    ]


def _divisibility(cfg: Config) -> None:
    table = _divisions(cfg)
    for rule in table:
        value, divisor = _get(cfg, rule.path), rule.divisor(cfg)
        if value % divisor == 0:
            continue
        whole = math.lcm(*(other.divisor(cfg) for other in table if other.path == rule.path))
        factors = [path for path in rule.by if _get(cfg, path) > 1]
        ways = [flag(rule.path, -(-value // whole) * whole)]
        if rule.path == "model.d_model" and factors:
            ways = _more_replicas(cfg) + ways
        elif rule.times == 1 and len(factors) == 1 and factors != ["parallel.data"]:
            ways.append(flag(factors[0], _largest_divisor(value, divisor)))
        product = " * ".join(([str(rule.times)] if rule.times > 1 else []) + factors)
        product += f" = {divisor}" if factors else ""
        why = f"must be divisible by {product}, since {rule.why}"
        _require(False, cfg, rule.path, why, *ways)


def _more_replicas(cfg: Config) -> list[str]:
    """The same devices, with parameters sharded over fewer of them: a way out for `d_model`."""
    p = cfg.parallel
    fits = [n for n in range(1, p.data) if p.data % n == 0]
    fits = [n for n in fits if cfg.model.d_model % (n * p.expert * p.sequence) == 0]
    if not fits:
        return []
    replicas = p.replica * p.data // fits[-1]
    return [f"{flag('parallel.data', fits[-1])} {flag('parallel.replica', replicas)}"]


def _largest_divisor(value: int, at_most: int) -> int:
    return max(n for n in range(1, at_most + 1) if value % n == 0)


# ----------------------------------------------------------------------------------- devices


def fill_data_axis(cfg: Config, num_devices: int) -> Config:
    """The config with `parallel.data` known, once the axes multiply to the devices.

    Raises:   ConfigError when they do not.
    """
    p, smaller = cfg.parallel, _smaller_axes(cfg, num_devices)
    rest = math.prod(_get(cfg, path) for path in _OTHER_AXES)
    fewer = [flag(path, size) for path, size in smaller.items()]
    devices = "1 device" if num_devices == 1 else f"{num_devices} devices"
    if p.data == -1 and not smaller:
        return dataclasses.replace(cfg, parallel=dataclasses.replace(p, data=num_devices // rest))
    if p.data == -1:
        path, needed = next(iter(smaller)), rest
        rule = f"the axes besides data multiply to {rest}, which does not divide {devices}"
    else:
        path, needed = "parallel.data", p.data * rest
        there = "there is" if num_devices == 1 else "there are"
        rule = f"the mesh axes multiply to {needed}, and {there} {devices}"
        fewer.append(flag("parallel.data", -1))
    ways = [" ".join(fewer)]
    if needed > num_devices or cfg.run.cpu_devices:
        ways.append(f"{flag('run.cpu_devices', needed)} to simulate them")
    _require(needed == num_devices, cfg, path, rule, *ways)
    return cfg


def _smaller_axes(cfg: Config, num_devices: int) -> dict[str, int]:
    """The axes besides `data` that must shrink for their product to divide the devices."""
    smaller, left = {}, num_devices
    for path in _OTHER_AXES:
        size = _get(cfg, path)
        fits = _largest_divisor(left, size)
        left //= fits
        if fits != size:
            smaller[path] = fits
    return smaller
