"""The coordinate check of µP (`jaxpar.certify --mup`): the size of activations by width."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpar.certification import traces
from jaxpar.certification.options import FLAT, MupOptions
from jaxpar.certification.small_config import float32
from jaxpar.components.dims import dims_of, numbers
from jaxpar.config import (
    Config,
    ConfigError,
    DataConfig,
    Model,
    ParallelConfig,
    TrainConfig,
    replace,
    value_of,
)
from jaxpar.config.fields import switch_of, turning_off
from jaxpar.config.layers import with_value
from jaxpar.config.model_source import ModelReader
from jaxpar.config.schema.features import objectives
from jaxpar.config.validate import resolve
from jaxpar.model.plain import decoder
from jaxpar.runtime import exit_codes
from jaxpar.runtime import start as runtime
from jaxpar.runtime.processes import rendezvous
from jaxpar.runtime.stages import stage
from jaxpar.runtime.tables import lines
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import init_state, to_logical
from jaxpar.step.train_step import make_train_step

# ------------------------------------------------------------------------ A config at another width


def prepared(cfg: Config, sequences: int, length: int) -> Config:
    """Return the config for the check: its model and its update rule at the peak of the rate.

    In float32, on one device, for packed batches of `sequences` times `length` tokens.

    Raises:   ConfigError for a model that cannot be widened, or a run that trains other weights.
    """
    rule = "is not part of the check, which trains all weights of layers with attention"
    for path in map(switch_of, ("lora", *objectives())):
        if (value := value_of(cfg, path)) is not None:
            raise ConfigError(path, value, rule, f"use {turning_off(path)[0]}")
    if cfg.model.recurrent:
        raise ConfigError("model.layers", "recurrent", rule, "use a config without it")
    rate = {"schedule": "constant", "warmup_steps": 0, "warmup_fraction": 0.0}
    rate |= {"decay_steps": 0, "schedule_by": "steps", "offload": False}
    rate |= {"schedule_as_input": False}
    made = Config(
        model=cfg.model,
        compute=cfg.compute,
        optimizer=dataclasses.replace(cfg.optimizer, ema=None, **rate),  # type: ignore[arg-type]
        train=TrainConfig(global_batch_size=sequences, seed=cfg.train.seed),
        data=DataConfig(seq_len=length, document_mask=cfg.data.document_mask),
        parallel=ParallelConfig(data=1, layer_loop=cfg.parallel.layer_loop),
    )
    return float32(made)


def widened(cfg: Config, width: int) -> Config:
    """Return the config with `d_model` = width, and all widths of a layer in proportion.

    More heads have the width of the model's. With `mup.base_head_dim`, wider heads are as many.

    Raises:   ConfigError for a width that is not in proportion to whole numbers.
    """
    m = cfg.model
    grows_heads = m.mup is None or m.mup.base_head_dim is None
    growing = {"mlp", *(("heads", "kv_heads") if grows_heads else ("head_dim",))}
    layers, sizes = m.layers, dict[str, int]()
    for layer in m.distinct:
        for role, term in (("mixer", layer.mixer), ("feed_forward", layer.feed_forward)):
            if term is None:
                continue
            grown = {f for dim in dims_of(term, m) if dim.axis in growing for f in dim.fields}
            at = f"model.{layer.name}.{role}"
            sizes |= {f"{at}.{f}": n for f, n in numbers(term) if f in grown}
    least = m.d_model // math.gcd(m.d_model, *sizes.values())
    if width < 1 or width % least:
        parts = ", ".join(f"{path} {size}" for path, size in sizes.items())
        rule = f"must be a multiple of {least}, so that d_model {m.d_model}, {parts} grow in "
        fix = f"use --widths {','.join(str(n * least) for n in _doublings(m, least))}"
        raise ConfigError("--widths", width, rule + "proportion", fix)
    for path, size in sizes.items():
        layers = with_value(layers, path, size * width // m.d_model)
    return dataclasses.replace(cfg, model=dataclasses.replace(m, d_model=width, layers=layers))


def _doublings(m: Model, least: int) -> list[int]:
    first = -(-(m.d_model // 2) // least)
    return [first, 2 * first, 4 * first]


# ------------- The size of activations of each kind of layer, before and after a few training steps


#: The kinds, in the order of a forward pass.
KINDS = ("embedding", "attention", "feed-forward", "last layer", "logits")


@dataclass(frozen=True)
class ActivationSizes:
    """Mean magnitudes at one width, by kind."""

    start: dict[str, float]
    """At the initial weights."""
    end: dict[str, float]
    """After the last step."""
    change: dict[str, float]
    """Of the difference of both."""


def activations(params: Any, batch: Batch, cfg: Config) -> dict[str, jax.Array]:
    """Compute the activations of each kind with the plain model, float32.

    attention and feed-forward are what the branches add to the residual stream, of all layers.
    """
    model, segments = cfg.model, jnp.asarray(batch.segment_ids)
    if not cfg.data.document_mask:
        segments = jnp.ones_like(segments)
    x = first = decoder.first_stream(params, batch.tokens, batch.positions, model)
    attention, feed_forward = [], []
    for layer, w in decoder.layers_of(params, model):
        place = w, layer, batch.positions, segments, model
        between, after = decoder.after_mixer(x, *place), decoder.block(x, *place)
        attention.append(between - x)
        feed_forward.append(after - between)
        x = after
    logits = decoder.output(x, params, model)
    found = first, jnp.stack(attention), jnp.stack(feed_forward), x, logits
    return dict(zip(KINDS, found, strict=True))


def measure(cfg: Config, mesh: Mesh, steps: int, seeds: int) -> ActivationSizes:
    """Train some steps on one batch, and return the sizes of activations, averaged over seeds.

    Args:     cfg: resolved for the mesh of one device.
    """
    batch = traces.random_batch(cfg)
    placed = traces.shard_batch(batch, cfg, mesh)
    train: Any = make_train_step(cfg, mesh, None)
    state = init_state(cfg, mesh)
    options = traces.compile_options(list(mesh.devices.flat))
    step = train.lower(state, placed).compile(compiler_options=options)
    forward = jax.jit(functools.partial(activations, cfg=cfg))
    mean = lambda found: {kind: float(jnp.mean(jnp.abs(a))) for kind, a in found.items()}  # noqa: E731
    rows = []
    for seed in range(seeds):
        state = init_state(replace(cfg, **{"train.seed": cfg.train.seed + seed}), mesh)
        start = forward(to_logical(state, cfg).params, batch)
        for _ in range(steps):
            state, _ = step(state, placed)
        end = forward(to_logical(state, cfg).params, batch)
        change = {kind: end[kind] - start[kind] for kind in KINDS}
        rows.append((mean(start), mean(end), mean(change)))
    columns = zip(*rows, strict=True)  # a value for each seed
    means = ({k: float(np.mean([one[k] for one in column])) for k in KINDS} for column in columns)
    return ActivationSizes(*means)


# --------------------------- How activations grow with the width: exponents, verdicts and the table


#: Kinds that may shrink: µP's logits start smaller in wider models.
_MAY_SHRINK = ("logits",)


@dataclass(frozen=True)
class Growth:
    """The exponents of one kind: sizes are in proportion to width**exponent."""

    kind: str
    size: float
    """Of activations after the last step."""
    change: float
    """Of their change."""

    def verdict(self, tolerance: float = FLAT) -> str:
        """Return flat, grows or shrinks. An update that shrinks has no effect in wide models."""
        if max(self.size, self.change) > tolerance:
            return "grows"
        if self.change < -tolerance and self.kind not in _MAY_SHRINK:
            return "shrinks"
        return "flat"


def growth(found: Mapping[int, ActivationSizes]) -> list[Growth]:
    """Return the exponents of each kind, by least squares in logarithms.

    Args:     found: the sizes at two or more widths.
    """
    widths = np.log(list(found))

    def exponent(of: str, kind: str) -> float:
        sizes = [max(getattr(one, of)[kind], np.finfo(np.float32).tiny) for one in found.values()]
        return float(np.polyfit(widths, np.log(sizes), 1)[0])

    return [Growth(kind, exponent("end", kind), exponent("change", kind)) for kind in KINDS]


def verdicts(exponents: list[Growth], tolerance: float) -> list[str]:
    """Return which kinds grow, and which shrink: a line for each, or none."""
    by_verdict = {
        "grow with the width": [one.kind for one in exponents if one.verdict(tolerance) == "grows"],
        "change less in wider models": [
            one.kind for one in exponents if one.verdict(tolerance) == "shrinks"
        ],
    }
    return [f"{what}: {', '.join(kinds)}" for what, kinds in by_verdict.items() if kinds]


def table(found: Mapping[int, ActivationSizes], exponents: list[Growth], tolerance: float) -> str:
    """Return the sizes after the last step as a table: a row for each kind."""
    title = ["", *map(str, found), "exponent", "of the change", ""]
    rows = [title]
    for one in exponents:
        sizes = [f"{sizes.end[one.kind]:.4g}" for sizes in found.values()]
        rows.append(
            [one.kind, *sizes, f"{one.size:+.2f}", f"{one.change:+.2f}", one.verdict(tolerance)]
        )
    return "\n".join(lines(rows, left=(0, len(title) - 1)))


# ------------------------------------------------- The work of `python -m jaxpar.certify --mup`


def widths_of(text: str, cfg: Config) -> list[int]:
    """Return the widths of `--widths`, ascending.

    Raises:   ConfigError unless they are two or more different whole numbers.
    """
    if not text:
        return [cfg.model.d_model * times for times in (1, 2, 4)]
    try:
        widths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        widths = []
    if len(widths) < 2:
        rule = "must be two or more whole numbers, separated by commas"
        fix = f"use --widths {','.join(map(str, widths_of('', cfg)))}"
        raise ConfigError("--widths", text, rule, fix)
    return widths


def check_coordinates(options: MupOptions, model_from: ModelReader) -> int:
    """Measure every width, print the table, and return the exit code.

    Args:     model_from: reads the model that `--model.from` names.
    """
    asked = options.config.asked(model_from)
    cfg = prepared(asked, options.sequences, options.length)
    configs = {width: resolve(widened(cfg, width), 1) for width in widths_of(options.widths, asked)}
    options.config.show(asked)
    rendezvous.require_single_process("jaxpar.certify --mup")
    runtime.start(Config(run=asked.run))
    title, under = _conditions(options, cfg)
    print(f"{title}: {under}", flush=True)
    found: dict[int, ActivationSizes] = {}
    mesh = make_mesh(cfg.parallel, jax.devices()[:1])
    with jax.default_matmul_precision("highest"):
        for width, of_width in configs.items():
            with stage(f"training at width {width}"):
                found[width] = measure(of_width, mesh, options.steps, options.seeds)
    exponents = growth(found)
    print(f"\nmean |activation| after step {options.steps}, by d_model\n")
    print(table(found, exponents, options.tolerance))
    wrong = verdicts(exponents, options.tolerance)
    print("\n" + ("; ".join(wrong) if wrong else "flat: no activation depends on the width"))
    return exit_codes.EXIT_ERROR if wrong else exit_codes.EXIT_OK


def _conditions(options: MupOptions, cfg: Config) -> tuple[str, str]:
    """Return the title and the conditions of the check."""
    o, m = cfg.optimizer, cfg.model
    kind = "standard parametrization" if m.mup is None else f"µP, base width {m.mup.base_width}"
    batch = f"{options.sequences} x {options.length} random tokens, seeds {options.seeds}"
    rate = f"{o.name} at {o.learning_rate:g}"
    return f"{options.config.name}, {kind}", f"{rate}, {options.steps} steps on {batch}"
