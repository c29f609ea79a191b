"""QK-clip (MuonClip): weights of queries and keys shrink where attention logits grow too large.

Each layer measures the largest logit of its heads; after the update, the weights of heads above the
threshold are rescaled (`model/qk_clip/`).
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config
from jaxpar.config.metrics import Metric
from jaxpar.model.probes import LayerProbe, Seen
from jaxpar.model.qk_clip import reference
from jaxpar.model.qk_clip.logits import across, largest
from jaxpar.model.qk_clip.rescale import factors, rescaled
from jaxpar.parallel.collectives import psum
from jaxpar.sharding.axes import PIPELINE, TENSOR, TOKEN_AXES
from jaxpar.sharding.batch import Batch
from jaxpar.step.feature import Feature, TrainStep
from jaxpar.step.layer_order import EMPTY


def _largest(s: Seen) -> jax.Array:
    """The largest logits of each row and head: float32 [B, H/tensor]."""
    stopped = lax.stop_gradient(s.x), lax.stop_gradient(s.more["k"])
    return largest(*across(*stopped, s.context.mask))


def _shape(batch: Batch, cfg: Config) -> tuple[int, ...]:
    return len(batch.tokens), cfg.model.num_heads // lax.axis_size(TENSOR)


MAXIMUM = LayerProbe("qk_maximum", "queries", _largest, _shape, by_row=True)


class QkClip(Feature):
    """Clips attention logits by rescaling weights."""

    name = "qk_clip"
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
        logits = jnp.where((s.layers == EMPTY)[:, None], -jnp.inf, logits)
        axes = (PIPELINE, TENSOR)
        above = jnp.sum(logits > s.cfg.optimizer.qk_clip, dtype=jnp.float32)
        s = s.with_metrics(
            max_attention_logit=lax.pmax(jnp.max(logits), axes), clipped_heads=psum(above, axes)
        )
        return s.replace(results=s.results | {self.name: logits})

    @jax.named_scope("qk_clip")
    def after_update(self, s: TrainStep) -> TrainStep:
        dense, params, m = s.cfg.model.dense_layers, s.trainable, s.cfg.model
        eta = jnp.where(s.ok, factors(s.results[self.name], s.cfg.optimizer.qk_clip), 1.0)
        found = params | {"layers": rescaled(params["layers"], eta[dense:], m)}
        if dense:  # which every stage holds: one stage alone, so this changes the type and no value
            of_dense = lax.pmin(eta[:dense], PIPELINE)
            found["dense_layers"] = rescaled(params["dense_layers"], of_dense, m)
        return s.replace(trainable=found)

    def plain(self, new: Any, before: Any, batch: Batch, cfg: Config) -> Any:
        return reference.clipped(new, reference.largest_logits(before, batch, cfg), cfg)
