"""What a config says beside its programs: names, shapes, counts, predictions, initial values."""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxpar.certification.small_config import shrink
from jaxpar.components.costs import NO_WIDTHS
from jaxpar.config import Config, ConfigError, ParallelConfig, replace
from jaxpar.config.config_file import CONFIGS, load_config
from jaxpar.config.serialize import to_json
from jaxpar.config.validate import resolve
from jaxpar.execution.decisions import execution_of
from jaxpar.model import flops, fused_weights, lora
from jaxpar.model.chunks import layers_of_chunk
from jaxpar.model.decode import cache_bytes
from jaxpar.model.parameters import param_specs, specs_of
from jaxpar.prediction.communication import Cluster
from jaxpar.prediction.hardware import NETWORKS, gpu_named
from jaxpar.prediction.layer_kinds import layer_kinds
from jaxpar.prediction.memory import bytes_of_names
from jaxpar.prediction.ranking import predict
from jaxpar.sharding.axes import AXES, axes_of
from jaxpar.sharding.fingerprint import named_leaves, text
from jaxpar.sharding.mesh import axis_sizes
from jaxpar.sharding.params import ParamSpec, flat, map_specs, split
from jaxpar.step.state import abstract_state
from tests import weights
from tests.fingerprints import sums_of

#: Entry -> value, of one part of a config's figures.
type Entries = dict[str, Any]

#: The mesh of fused layouts and shrunk configs, and the GPUs of predictions.
MESH = ParallelConfig(data=2, tensor=2)
GPU, NETWORK, PER_HOST = "h200", "ib400", 8


def names() -> list[str]:
    """The configs that come with jaxpar."""
    files = sorted(CONFIGS.rglob("*.py"))
    return [Path(file).relative_to(CONFIGS).with_suffix("").as_posix() for file in files]


def digest(value: Any) -> str:
    """A short hash of a value's text."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


def short(value: float) -> float:
    """A number with nine digits: sums may be taken in another order."""
    return float(f"{value:.9g}")


def specs(cfg: Config) -> Entries:
    """The shape of each parameter, and a hash of all that is declared of it; again with experts
    spread over tensor ranks, of those that differ."""
    found = {name: _declared(spec) for name, spec in flat(specs_of(cfg)).items()}
    spread = flat(param_specs(cfg.model, cfg.lora, spread=True))
    other = {f"spread/{name}": _declared(spec) for name, spec in spread.items()}
    return found | {n: v for n, v in other.items() if v != found[n.removeprefix("spread/")]}


def _declared(spec: ParamSpec) -> str:
    shape = "x".join(map(str, spec.shape))
    fields = dataclasses.asdict(spec) | {"partition_spec": str(spec.partition_spec)}
    del fields["dtype"]  # of the state of features; parameters are float32
    return f"{shape} {digest(sorted(fields.items()))}"


@functools.cache
def small(cfg: Config) -> Config:
    """The model of `certify`, on MESH."""
    shrunk = replace(shrink(cfg, [MESH]), **{"parallel.layer_loop": "unroll"})
    return resolve(dataclasses.replace(shrunk, parallel=_mesh(shrunk)), 4)


def _mesh(cfg: Config) -> ParallelConfig:
    kept = {"remat": cfg.parallel.remat, "layer_loop": "unroll"}
    return dataclasses.replace(MESH, **kept)


def shrunk(cfg: Config) -> Entries:
    """The fields of the shrunk config that are not the defaults."""
    fields, default = _fields(shrink(cfg, [MESH])), _fields(Config())
    return {path: value for path, value in fields.items() if value != default.get(path)}


def _fields(cfg: Config) -> Entries:
    return flat(json.loads(to_json(cfg)))


def layout(cfg: Config) -> Entries:
    """The fused arrays of one device of the shrunk model, by layer, for layers that differ: shapes,
    and how they are gathered."""
    one = small(cfg)
    tree, ex = specs_of(one), execution_of(one)
    sizes = dict(zip(AXES, axis_sizes(one.parallel), strict=True))
    shards = map_specs(functools.partial(_shard, sizes=sizes), tree)
    found: Entries = {}
    for part, of_part in zip(("trainable", "frozen"), split(shards, tree), strict=True):
        if of_part:
            fused = jax.eval_shape(lambda p: fused_weights.fuse(p, ex), of_part)
            found |= {f"{part}/{name}": value for name, value in _fused(fused, one).items()}
    return found


def _shard(spec: ParamSpec, sizes: dict[str, int]) -> jax.ShapeDtypeStruct:
    """A device's shard of a parameter."""
    entries = [*spec.partition_spec, *[None] * len(spec.shape)][: len(spec.shape)]
    ways = [
        math.prod(sizes[axis] for axis in sorted(axes_of(jax.sharding.PartitionSpec(entry))))
        for entry in entries
    ]
    shape = tuple(size // way for size, way in zip(spec.shape, ways, strict=True))
    return jax.ShapeDtypeStruct(shape, "float32")


def _fused(tree: Any, cfg: Config) -> Entries:
    top, m = tree["top"], cfg.model
    found = _arrays("top", top, fused_weights.top_dims(top, m), _rounded(cfg))
    seen: list[Entries] = []
    layers = [w for chunk in tree["layers"] for w in chunk]
    of_each = itertools.cycle(layers_of_chunk(cfg))
    for number, (w, layer) in enumerate(zip(layers, of_each, strict=False)):
        one = _arrays("", w, fused_weights.layer_dims(w, layer, m), _rounded(cfg))
        if one not in seen:
            seen.append(one)
            found |= {f"layer {number}{name}": value for name, value in one.items()}
    return found


def _rounded(cfg: Config) -> set[str]:
    """The matrices that `compute.matmul_dtype` applies to, of all layers."""
    model, m = cfg.model, cfg.model
    layers = [*model.layers, *[m.module_layer] * (m.mtp_depth > 0)]
    of_each = (fused_weights.matrices_of(layer, model).items() for layer in layers)
    return {name for matrices in of_each for name, w in matrices if w.float8}


def _arrays(prefix: str, arrays: dict, dims: Any, rounded: set[str]) -> Entries:
    in_float8 = lambda name: " float8" * (name in rounded)  # noqa: E731
    adapter = lambda name: " adapter" * lora.is_adapter(name)  # noqa: E731
    return {
        f"{prefix}/{name}": f"{'x'.join(map(str, a.shape))} {dims[name]}"
        + in_float8(name)
        + adapter(name)
        for name, a in arrays.items()
    }


def counts(cfg: Config) -> Entries:
    """Parameters, FLOPs per token, and bytes of a cache of two texts of 4,096 tokens."""
    m, T = cfg.model, cfg.data.seq_len
    return {
        "params": flops.num_params(m),
        "adapters": flops.num_adapter_params(m, cfg.lora),
        "in matmuls": flops.num_matmul_params(m),
        "train": flops.train_flops_per_token(m, T, lora=cfg.lora),
        "train, full attention": flops.train_flops_per_token(m, T, causal=False, lora=cfg.lora),
        "recurrences": flops.recurrence_flops_per_token(m),
        "attention kernels": flops.attention_kernel_flops(m, T),
        "cache": cache_bytes(cfg, 2, 4096),
        "cache of a tensor rank": cache_bytes(cfg, 2, 4096, 2),
    }


def checkpoint(cfg: Config) -> Entries:
    """The arrays of a checkpoint, by group: how many, and a hash of names, shapes and dtypes."""
    groups: dict[str, list] = {}
    for name, leaf in named_leaves(abstract_state(cfg).saved).items():
        group = name.rpartition("/")[0] or name
        groups.setdefault(group, []).append((name, leaf.shape, str(leaf.dtype)))
    return {group: f"{len(of_it)} {digest(of_it)}" for group, of_it in groups.items()}


def plan(cfg: Config) -> Entries:
    """Predictions for the fewest GPUs on which the config's own layout is legal: memory, times, and
    what they are made of, for each kind of layer."""
    on_gpus = _resolved(cfg)
    num = math.prod(axis_sizes(on_gpus.parallel))
    made = predict(on_gpus, Cluster(gpu_named(GPU), NETWORKS[NETWORK], num, PER_HOST))
    memory, time = dict(vars(made.memory)), dict(vars(made.time))
    traffic = {t.axis: t for t in time.pop("traffic")}
    exposed = time.pop("exposed")
    found: Entries = {"GPUs": num, "on reference": made.on_reference}
    found |= {f"memory, {n}": v if isinstance(v, str) else short(v) for n, v in memory.items()}
    found |= {f"time, {name}": short(value) for name, value in time.items()}
    found |= {f"exposed, {axis}": short(value) for axis, value in exposed.items()}
    found |= {f"sent, {axis}": short(one.sent) for axis, one in traffic.items()}
    shares: dict[str, float] = {}
    for kind in layer_kinds(made.cfg):
        model, layer = made.cfg.model, kind.layer
        mixer, alone = layer.mixer, replace(made.cfg, **{"parallel.tensor": 1})
        saved = bytes_of_names(alone, layer)
        parts = {
            "remat": kind.remat,
            "widths": digest([*map(short, mixer.widths(model, 1) if mixer else NO_WIDTHS)]),
            "matmuls": digest(_matmuls(mixer.matmuls(model, 1) if mixer else {})),
            "saved": digest({n: short(v) for n, v in saved.items()}),
            "recurrence": short(mixer.backward_bytes(1, by_kernels=False)) if mixer else 0.0,
        }
        name = "layers, " + ", ".join(f"{name} {value}" for name, value in parts.items())
        shares[name] = shares.get(name, 0.0) + kind.share
    return found | {name: short(share) for name, share in shares.items()}


def _matmuls(sites: Any) -> Any:
    """The sizes of the matmuls that there are, by name."""
    sizes = {name: [tuple(map(short, one)) for one in of] for name, of in sites.items()}
    return {name: [s for s in of if all(s)] for name, of in sizes.items() if any(map(all, of))}


def _resolved(cfg: Config) -> Config:
    """The config on the fewest GPUs, of whole hosts, on which its layout is legal."""
    fixed = math.prod(size for size in axis_sizes(cfg.parallel) if size > 0)
    last: ConfigError | None = None
    for num in (fixed << doublings for doublings in range(12)):
        try:
            return resolve(cfg, math.lcm(num, PER_HOST))
        except ConfigError as error:
            last = error
    assert last is not None
    raise last


def initial(cfg: Config) -> Entries:
    """Fingerprints of the initial parameters of the shrunk model (`COMPILED`)."""
    one = shrink(cfg, [MESH])
    made = weights.values_of(tuple(flat(specs_of(one)).items()), one.train.seed)
    return {name: text(sums_of(values)) for name, values in flat(made).items()}


#: The parts of a config's figures, quick ones first.
PARTS: dict[str, Callable[[Config], Entries]] = {
    "specs": specs,
    "counts": counts,
    "plan": plan,
    "shrunk": shrunk,
    "layout": layout,
    "checkpoint": checkpoint,
    "initial": initial,
}


#: Configs of every kind of layer, whose initial values are compiled. They are a function of specs,
#: names and a seed; specs are figures of every config.
COMPILED = (
    "deepseek_v3",
    "gemma_4/31b",
    "gpt3_175b",
    "gpt_oss_20b",
    "kimi_linear_48b_a3b",
    "llama_1b_dpo",
    "nemotron_3_nano",
    "qwen3_next_80b_a3b",
)


def parts_of(name: str) -> list[str]:
    """The parts of a config's figures."""
    return [part for part in PARTS if part != "initial" or name in COMPILED]


def of_config(name: str, parts: list[str]) -> dict[str, Entries]:
    """Some parts of a config's figures."""
    cfg = load_config(name)
    if not cfg.model.vocab_size:  # that of the data
        cfg = replace(cfg, **{"model.vocab_size": 32_000})
    return {part: PARTS[part](cfg) for part in parts_of(name) if part in parts}


#: Optimizers, and what else is part of a state: fields of the default config, by name.
STATES: dict[str, dict] = {
    "adamw": {},
    "adamw, 8 bits": {
        "optimizer.first_moment_dtype": "8bit",
        "optimizer.second_moment_dtype": "8bit",
        "optimizer.moment_block": 64,
    },
    "lion": {"optimizer.name": "lion"},
    "sgd": {"optimizer.name": "sgd"},
    "muon": {"optimizer.name": "muon"},
    "adafactor": {"optimizer.name": "adafactor"},
    "float16": {"compute.dtype": "float16"},
    "moving average": {"optimizer.ema.decay": 0.99},
    "adapters": {"lora.rank": 4},
    "diloco": {"diloco.every": 4, "parallel.replica": 2, "parallel.data": 2},
    "feedback": {
        "parallel.replica_reduction": "int8",
        "parallel.replica": 2,
        "parallel.data": 2,
    },
}


def of_state(name: str) -> dict[str, Entries]:
    """The names of a state, as of a config."""
    return {"checkpoint": checkpoint(resolve(replace(Config(), **STATES[name]), 4))}
