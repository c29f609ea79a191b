"""The load of each expert in a step: its metrics, and the update of the router's bias."""

import functools
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.experts import BALANCING_BIAS, LOSSES, Experts, experts_in, stacks_of_experts
from jaxpar.components.model import STACK_OF_MODULES
from jaxpar.config import Config, Model, replace
from jaxpar.config.layout.layer_split import is_equal
from jaxpar.config.layout.placement import expert_ways
from jaxpar.config.metrics import Metric
from jaxpar.model.chunks import layers_of_chunk
from jaxpar.model.probes import LayerProbe, Probed, Seen
from jaxpar.parallel.collectives import psum
from jaxpar.sharding.axes import AXES, PIPELINE, TOKEN_AXES
from jaxpar.sharding.batch import Batch
from jaxpar.step.feature import Feature
from jaxpar.step.layer_order import EMPTY, expert_layers_here
from jaxpar.step.progress import TrainStep


@flax.struct.dataclass
class ExpertLoads:
    """What the routers of this stage's layers did with the global batch. The same on each device
    of the stage."""

    rows: jax.Array
    """float32 [layers, E]: tokens that each expert had. Exact up to 2**24, 16 million."""
    losses: jax.Array
    """float32 [layers, 2]: `LOSSES`, means over tokens, not yet weighted."""
    further_rounds: jax.Array
    """float32 [layers]: rounds beyond the first, of all microbatches and devices. Devices along
    TENSOR, which have the same rows, count once. 0 without an expert axis."""
    modules: jax.Array | None = None
    """The same as `rows`, of the modules of multi-token prediction. Metrics do not count them."""


def _tally(s: Seen) -> jax.Array:
    """What a router did with its tokens: rows of each expert, its losses, and further rounds."""
    r = s.more["routing"]
    parts = jnp.sum(r.counts, 0), jnp.sum(s.more["losses"], 1), s.more["rounds"][None]
    return jnp.concatenate([part.astype(jnp.float32) for part in parts])


def _size(batch: Batch, cfg: Config) -> tuple[int, ...]:
    return (_experts(cfg).num_experts + len(LOSSES) + 1,)


TALLY = LayerProbe("router_tally", "routing", _tally, _size)


def _experts(cfg: Config) -> Experts:
    """Return the experts of a layer: all have the same number."""
    return experts_in(cfg.model)[0]


class ExpertBalance(Feature):
    """Balances experts by the bias of their router, and reports their loads."""

    name = "experts"
    turn = 40
    handles_skips = True
    metrics: ClassVar[dict[str, Metric]] = {
        "expert_entropy": Metric("experts", "", "of their loads, mean over layers; 1 is balanced"),
        "fullest_expert": Metric("experts", "", "largest load of any layer, relative to the mean"),
        "fullest_rank": Metric("experts", "", "the same of the ranks of the expert axis"),
        "fullest_rank_mean": Metric(
            "experts", "", "the mean over layers of a layer's fullest rank"
        ),
        "further_rounds": Metric(
            "experts", "rounds", "beyond the first, of an expert axis; 0 is best"
        ),
        "dropped_rows": Metric("experts", "", "pairs of token and expert left out; always 0"),
        "balance_loss": Metric("experts", "", "before its weight, mean over layers; 1 is balanced"),
        "router_z_loss": Metric("experts", "", "before its weight, mean over layers"),
        "router_bias_range": Metric("experts", "", "largest difference within a layer"),
    }

    def is_on(self, cfg: Config) -> bool:
        return bool(experts_in(cfg.model)) and cfg.lora is None

    def probes(self, cfg: Config, requested: tuple[str, ...]) -> tuple[LayerProbe, ...]:
        return (TALLY,)

    def after_gradients(self, s: TrainStep) -> TrainStep:
        tokens = s.batch.tokens.size * lax.axis_size(TOKEN_AXES)
        loads = reduce_tallies(s.probes[TALLY.name], tokens, s.cfg)
        s = s.replace(results=s.results | {self.name: loads})
        return s.with_metrics(**load_metrics(loads, tokens, s.cfg))

    def after_update(self, s: TrainStep) -> TrainStep:
        loads = s.results[self.name]
        if _experts(s.cfg).router.balancing_bias:
            s = s.replace(frozen=balance_bias(s.frozen, loads, s.ok, s.cfg))
            s = s.with_metrics(router_bias_range=bias_range(s.frozen, s.cfg.model))
        if "expert_rows" in s.requested:
            s = s.with_metrics(expert_rows=rows_of_all_layers(loads, s.cfg))
        return s

    def plain(
        self, new: Any, before: Any, state: Any, step: Any, batch: Batch, cfg: Config
    ) -> tuple[Any, Any]:
        if not _experts(cfg).router.balancing_bias:
            return new, state
        from jaxpar.model.plain import decoder

        counts, m = decoder.loads(before, batch, cfg), cfg.model
        mean = jnp.mean(counts, axis=1, keepdims=True)
        change = cfg.train.router_bias_rate * jnp.sign(mean - counts)
        layers = [*m.layers, *[m.module_layer] * m.mtp_depth]
        names = [layer.name for layer in layers if isinstance(layer.feed_forward, Experts)]
        found = dict(new)
        for name in dict.fromkeys(names):
            part = change[jnp.array([i for i, other in enumerate(names) if other == name])]
            found[name] = new[name] | {BALANCING_BIAS: new[name][BALANCING_BIAS] + part}
        return found, state

    def plain_before(self, params: Any, batch: Batch, cfg: Config) -> dict[str, Any]:
        from jaxpar.model.plain import decoder
        from jaxpar.model.plain.feed_forward import router_loss

        _, routings = decoder.hidden_and_routings(params, batch, cfg)
        rows = jnp.stack([jnp.sum(one.used, axis=(0, 1)) for one in routings])
        share = rows / jnp.sum(rows, axis=1, keepdims=True)
        E = rows.shape[1]
        logs = jnp.where(rows > 0, jnp.log(jnp.where(rows > 0, share, 1.0)), 0.0)
        found = {
            "expert_rows": rows,
            "expert_entropy": jnp.mean(-jnp.sum(share * logs, axis=1)) / jnp.log(max(E, 2)),
            "fullest_expert": jnp.max(share) * E,
            "dropped_rows": jnp.zeros(()),
        }
        if cfg.metrics.layers != "none":
            there = [isinstance(one.feed_forward, Experts) for one in cfg.model.layers]
            of_all = jnp.full(len(there), jnp.nan)
            places = jnp.array([i for i, has in enumerate(there) if has])
            found["layer_fullest_expert"] = of_all.at[places].set(jnp.max(share, axis=1) * E)
        for name in LOSSES:
            if getattr(cfg.train, name):
                alone = {
                    "train.balance_loss": 0.0,
                    "train.router_z_loss": 0.0,
                    f"train.{name}": 1.0,
                }
                losses = [router_loss(one, replace(cfg, **alone)) for one in routings]
                found[name] = jnp.mean(jnp.stack(losses))
        return found

    def plain_after(self, new: Any, cfg: Config) -> dict[str, Any]:
        layers = [one.name for one in cfg.model.layers if isinstance(one.feed_forward, Experts)]
        biases = [new[name][BALANCING_BIAS] for name in layers if BALANCING_BIAS in new[name]]
        ranges = [jnp.max(jnp.ptp(bias, axis=-1)) for bias in biases]
        return {"router_bias_range": jnp.max(jnp.stack(ranges))} if ranges else {}


@jax.named_scope("expert_loads")
def reduce_tallies(tallies: Probed, tokens: int, cfg: Config) -> ExpertLoads:
    """Sum the tallies of a step over devices.

    Args:     tokens: of the global batch.
    Communication: an all-reduce over every axis but PIPELINE.
    """
    here = [a for a in (tallies.stage, tallies.modules) if a is not None]
    total, *rest = psum(here, tuple(axis for axis in AXES if axis != PIPELINE))
    modules = psum(rest[0][:, : _experts(cfg).num_experts], PIPELINE) if rest else None
    if not is_equal(cfg):  # the router of an empty slot chooses, too
        empty = expert_layers_here(cfg) == EMPTY
        total = jnp.where(empty[:, None], 0, total)
    rows, losses, rounds = jnp.split(total, [_experts(cfg).num_experts, total.shape[1] - 1], axis=1)
    return ExpertLoads(rows, losses / tokens, rounds[:, 0], modules)


@jax.named_scope("expert_loads")
def load_metrics(loads: ExpertLoads, tokens: int, cfg: Config) -> dict[str, jax.Array]:
    """Compute the metrics of all layers: float32 scalars, the same on every device.

    Communication: two all-reduces over PIPELINE, and two of `_of_ranks`.
    """
    of, rows = _experts(cfg), loads.rows
    share = rows / jnp.maximum(jnp.sum(rows, axis=1, keepdims=True), 1)
    entropy = -jnp.sum(share * jnp.log(jnp.maximum(share, 1e-30)), axis=1)
    entropy /= jnp.log(jnp.float32(max(of.num_experts, 2)))
    sums = jnp.concatenate([jnp.sum(entropy)[None], jnp.sum(loads.losses, axis=0)])
    means = psum(sums, PIPELINE) / len(stacks_of_experts(cfg.model))
    dropped = jnp.float32(of.experts_per_token * tokens) - jnp.sum(rows, axis=1)
    dropped = jnp.where(expert_layers_here(cfg) == EMPTY, 0, dropped)
    fullest = jnp.max(share, axis=1) * of.num_experts
    worst = lax.pmax(jnp.stack([jnp.max(fullest), jnp.max(jnp.abs(dropped))]), PIPELINE)
    named = {"expert_entropy": means[0], "fullest_expert": worst[0], "dropped_rows": worst[1]}
    weights = (cfg.train.balance_loss, cfg.train.router_z_loss)
    losses = zip(LOSSES, means[1:], weights, strict=True)
    named |= {name: value for name, value, weight in losses if weight}
    return named | _of_ranks(loads, share, cfg)


def _of_ranks(loads: ExpertLoads, share: jax.Array, cfg: Config) -> dict[str, jax.Array]:
    """Compute the metrics of the devices that share experts. Empty if none do.

    Args:     share: float32 [layers, E], of a layer's rows.
    Communication: two all-reduces over PIPELINE.
    """
    if (n := expert_ways(cfg.parallel)) == 1:
        return {}
    of_rank = jnp.sum(share.reshape(len(share), n, -1), axis=2)
    fullest = jnp.max(of_rank, axis=1) * n  # of each layer; 0 in an empty slot
    sums = psum(jnp.stack([jnp.sum(fullest), jnp.sum(loads.further_rounds)]), PIPELINE)
    return {
        "fullest_rank": lax.pmax(jnp.max(fullest), PIPELINE),
        "fullest_rank_mean": sums[0] / len(stacks_of_experts(cfg.model)),
        "further_rounds": sums[1],
    }


@jax.named_scope("expert_loads")
def rows_of_all_layers(loads: ExpertLoads, cfg: Config) -> jax.Array:
    """Return the rows of all layers with experts, in the model's order.

    Returns:  float32 [layers with experts, E], the same on every device.
    Communication: an all-reduce over PIPELINE.
    """
    layers, count = expert_layers_here(cfg), len(stacks_of_experts(cfg.model))
    at = jnp.where(layers == EMPTY, count, layers)
    every = jnp.zeros((count, _experts(cfg).num_experts), jnp.float32)
    return psum(every.at[at].set(loads.rows, mode="drop"), PIPELINE)


def balance_bias(params: Any, loads: ExpertLoads | None, ok: jax.Array, cfg: Config) -> Any:
    """Return the parameters with the bias lowered for experts with more than the mean load,
    and raised for the others.

    Args:     params: may hold no bias. loads: None without experts. ok: whether the step counts.
    Source:   Wang et al. 2024 (2408.15664), algorithm 1; DeepSeek-AI 2024 (2412.19437), section
              2.1.2.
    """
    if loads is None or not _experts(cfg).router.balancing_bias:
        return params
    rate = jnp.where(ok, cfg.train.router_bias_rate, 0.0)

    def balanced(stack: str, rows: jax.Array) -> dict:
        step = rate * jnp.sign(jnp.mean(rows, axis=1, keepdims=True) - rows)
        return {stack: params[stack] | {BALANCING_BIAS: params[stack][BALANCING_BIAS] + step}}

    found = params
    for stack, rows in _rows_by_stack(loads.rows, cfg).items():
        found = found | balanced(stack, rows)
    return found if loads.modules is None else found | balanced(STACK_OF_MODULES, loads.modules)


def _names_here(cfg: Config) -> list[str]:
    """Return the names of a stage's layers with experts, in the order of its slots."""
    chunk = [one.name for one in layers_of_chunk(cfg) if isinstance(one.feed_forward, Experts)]
    return chunk * cfg.parallel.virtual_stages


def _rows_by_stack(rows: jax.Array, cfg: Config) -> dict[str, jax.Array]:
    """Split what this stage's layers with experts have, in order, by their stacks."""
    here = _names_here(cfg)
    if len(set(here)) == 1:
        return {here[0]: rows}
    places = lambda name: [i for i, other in enumerate(here) if other == name]  # noqa: E731
    return {name: rows[jnp.array(places(name))] for name in dict.fromkeys(here)}


def bias_range(params: Any, m: Model) -> jax.Array:
    """Return the largest difference between the biases of a layer: float32 scalar.

    Communication: an all-reduce over PIPELINE.
    """
    stacks = (params.get(name, {}) for name in m.stacks)
    biases = [stack[BALANCING_BIAS] for stack in stacks if BALANCING_BIAS in stack]
    ranges = [jnp.max(jnp.max(bias, axis=1) - jnp.min(bias, axis=1)) for bias in biases]
    return lax.pmax(functools.reduce(jnp.maximum, ranges), PIPELINE)


FEATURE = ExpertBalance()
