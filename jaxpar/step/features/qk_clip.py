"""QK-clip (MuonClip): weights of queries and keys shrink where attention logits grow too large.

Each layer measures the largest logit of its heads; after the update, the weights of heads above the
threshold are rescaled, head by head:

    eta = min(1, threshold / largest logit of the head)

A head's logits are products of its query and its key, so scaling both by sqrt(eta) brings its
largest logit to the threshold.

    grouped queries     A key head has several query heads. It is scaled by the square root of the
                        largest of their etas, and each query head by what is left of its own eta.
                        A head that need not be clipped then keeps its logits.
    latent attention    The parts without position are scaled by sqrt(eta). The rotary key is shared
                        by all heads, so the rotary part of the query alone is scaled, by eta.

Source:   Kimi Team 2025 (2507.20534), section 2.1 and algorithm 1.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.component import Mixer
from jaxpar.components.latent_attention import LatentAttention
from jaxpar.config import Config
from jaxpar.config.metrics import Metric
from jaxpar.model.chunks import layers_of_chunk
from jaxpar.model.largest_scores import across, largest
from jaxpar.model.probes import LayerProbe, Seen
from jaxpar.parallel.collectives import psum
from jaxpar.sharding.axes import PIPELINE, TENSOR, TOKEN_AXES
from jaxpar.sharding.batch import Batch
from jaxpar.step.feature import Feature
from jaxpar.step.layer_order import EMPTY, layers_here
from jaxpar.step.progress import TrainStep


def _largest(s: Seen) -> jax.Array:
    """The largest logits of each row and head: float32 [B, H/tensor]."""
    stopped = lax.stop_gradient(s.x), lax.stop_gradient(s.more["k"])
    return largest(*across(*stopped, s.context.mask))


def _shape(batch: Batch, cfg: Config) -> tuple[int, ...]:
    heads = next(m.attention_heads for m in _mixers(cfg).values() if m.attention_heads)
    return len(batch.tokens), heads.queries // lax.axis_size(TENSOR)


def _mixers(cfg: Config) -> dict[str, Mixer]:
    """Return the mixer of each name whose layers have logits to clip."""
    layers = cfg.model.layers
    return {one.name: one.mixer for one in layers if one.mixer and one.has_point("queries")}


MAXIMUM = LayerProbe("qk_maximum", "queries", _largest, _shape, by_row=True)


class QkClip(Feature):
    """Clips attention logits by rescaling weights."""

    name = "qk_clip"
    turn = 10
    handles_skips = True
    metrics: ClassVar[dict[str, Metric]] = {
        "max_attention_logit": Metric(
            "training", "", "largest of all heads; with optimizer.qk_clip", "max"
        ),
        "clipped_heads": Metric("training", "heads", "above optimizer.qk_clip, in all layers"),
    }

    def is_on(self, cfg: Config) -> bool:
        return cfg.optimizer.qk_clip > 0

    def probes(self, cfg: Config, requested: tuple[str, ...]) -> tuple[LayerProbe, ...]:
        return (MAXIMUM,)

    def after_gradients(self, s: TrainStep) -> TrainStep:
        """Communication: maxima over TOKEN_AXES, PIPELINE and TENSOR; a sum over the latter two."""
        here = s.probes[MAXIMUM.name].stage
        assert here is not None
        logits = lax.pmax(jnp.max(here, axis=-2), TOKEN_AXES)
        layers = layers_here(s.cfg)[jnp.array(s.probes[MAXIMUM.name].places)]
        logits = jnp.where((layers == EMPTY)[:, None], -jnp.inf, logits)
        axes = (PIPELINE, TENSOR)
        above = jnp.sum(logits > s.cfg.optimizer.qk_clip, dtype=jnp.float32)
        s = s.with_metrics(
            max_attention_logit=lax.pmax(jnp.max(logits), axes), clipped_heads=psum(above, axes)
        )
        return s.replace(results=s.results | {self.name: logits})

    @jax.named_scope("qk_clip")
    def after_update(self, s: TrainStep) -> TrainStep:
        cfg, params, mixers = s.cfg, s.trainable, _mixers(s.cfg)
        eta = jnp.where(s.ok, factors(s.results[self.name], cfg.optimizer.qk_clip), 1.0)
        chunk = [layer.name for layer in layers_of_chunk(cfg) if layer.name in mixers]
        names, found = chunk * cfg.parallel.virtual_stages, dict(params)
        for name in dict.fromkeys(names):
            of_stack = _rows(eta, [i for i, other in enumerate(names) if other == name])
            if name in cfg.model.leading_stacks:
                # Every stage holds them: one stage alone, so this changes the type and no value.
                of_stack = lax.pmin(of_stack, PIPELINE)
            found[name] = rescaled(params[name], of_stack, mixers[name])
        return s.replace(trainable=found)

    def plain(
        self, new: Any, before: Any, state: Any, step: Any, batch: Batch, cfg: Config
    ) -> tuple[Any, Any]:
        return plainly_clipped(new, largest_logits(before, batch, cfg), cfg), state

    def plain_before(self, params: Any, batch: Batch, cfg: Config) -> dict[str, Any]:
        logits = largest_logits(params, batch, cfg)
        above = jnp.sum(logits > cfg.optimizer.qk_clip)
        return {"max_attention_logit": jnp.max(logits), "clipped_heads": above}


def _rows(a: jax.Array, rows: list[int]) -> jax.Array:
    if rows == list(range(rows[0], rows[-1] + 1)):
        return a[rows[0] : rows[-1] + 1]
    return a[jnp.array(rows)]


def factors(largest: jax.Array, threshold: float) -> jax.Array:
    """Return eta of each head, from its largest logit: float32, at most 1."""
    return jnp.where(largest > threshold, threshold / jnp.maximum(largest, threshold), 1.0)


def rescaled(w: dict[str, Any], eta: jax.Array, mixer: Mixer) -> dict[str, Any]:
    """Return the weights of attention of stacked layers, rescaled.

    Args:     w: of stacked layers, as `mixer` names them; a device's shards, or complete.
              eta: float32 [L, H], of the same layers and heads.
    """
    if isinstance(mixer, LatentAttention):
        return w | _latent(w, eta, mixer)
    L, H = eta.shape
    G = w["wk"].shape[2]
    of_group = jnp.max(eta.reshape(L, G, H // G), axis=2)
    of_key = jnp.sqrt(of_group)
    of_query = (eta.reshape(L, G, H // G) / of_key[:, :, None]).reshape(L, H)
    by_head = {"wq": of_query, "bq": of_query, "wk": of_key, "bk": of_key}
    return w | {name: _times(w[name], factor) for name, factor in by_head.items() if name in w}


def _latent(w: dict[str, Any], eta: jax.Array, m: LatentAttention) -> dict[str, Any]:
    half, nope = jnp.sqrt(eta)[..., None], m.qk_nope_head_dim
    query = "wq_b" if m.q_lora_rank else "wq"
    of_query = jnp.concatenate(
        [
            jnp.broadcast_to(half, (*eta.shape, nope)),
            jnp.broadcast_to(eta[..., None], (*eta.shape, m.qk_rope_head_dim)),
        ],
        axis=-1,
    )
    ones = jnp.ones((*eta.shape, m.v_head_dim), eta.dtype)
    of_key = jnp.concatenate([jnp.broadcast_to(half, (*eta.shape, nope)), ones], axis=-1)
    by_dim = {query: of_query, "wkv_b": of_key}
    return {name: w[name] * factor[:, None] for name, factor in by_dim.items()}


def _times(a: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiply [L, ..., heads, K] by a factor [L, heads]."""
    between = (1,) * (a.ndim - 3)
    return a * factor.reshape(factor.shape[0], *between, factor.shape[1], 1)


def largest_logits(params: Any, batch: Batch, cfg: Config) -> jax.Array:
    """Compute the largest attention logit of each layer and head of a batch: float32 [L, H]."""
    found: list[jax.Array] = []

    def watch(point: str, value: jax.Array) -> None:
        if point == "queries":
            found.append(jnp.max(value, axis=(0, 2, 3)))

    from jaxpar.model.plain import decoder

    decoder.hidden_and_routings(params, batch, cfg, watch)
    return jnp.stack(found)


def plainly_clipped(params: Any, largest: jax.Array, cfg: Config) -> Any:
    """Return parameters after QK-clip, layer by layer and head by head.

    Args:     largest: logits of the step, [layers, H].
    """
    found = {n: dict(w) if isinstance(w, dict) else w for n, w in params.items()}
    mixers, attending = _mixers(cfg), 0
    for layer, (stack, i) in zip(cfg.model.layers, cfg.model.places, strict=True):
        if layer.name not in mixers:
            continue
        above, w, m = largest[attending] / cfg.optimizer.qk_clip, found[stack], layer.mixer
        attending += 1
        for h in range(len(above)):
            too_large = jnp.maximum(above[h], 1.0)
            if isinstance(m, LatentAttention):
                nope, query = m.qk_nope_head_dim, "wq_b" if m.q_lora_rank else "wq"
                w[query] = w[query].at[i, :, h, :nope].divide(jnp.sqrt(too_large))
                w[query] = w[query].at[i, :, h, nope:].divide(too_large)
                w["wkv_b"] = w["wkv_b"].at[i, :, h, :nope].divide(jnp.sqrt(too_large))
                continue
            served = len(above) // w["wk"].shape[2]
            first = h - h % served
            of_key = jnp.sqrt(jnp.maximum(jnp.min(above[first : first + served]), 1.0))
            for name in (n for n in ("wq", "bq") if n in w):
                w[name] = w[name].at[i, ..., h, :].multiply(of_key / too_large)
            for name in (n for n in ("wk", "bk") if n in w and h == first):
                w[name] = w[name].at[i, ..., h // served, :].divide(of_key)
    return found


FEATURE = QkClip()
