"""The objectives in plain jax.numpy, to compare with. One device, no kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import Config, DpoConfig, present
from jaxpar.model.plain import decoder
from jaxpar.model.plain.feed_forward import router_loss
from jaxpar.sharding.batch import IGNORED, Batch


def preference_loss(params: Any, batch: Batch, cfg: Config) -> jax.Array:
    """Compute the mean loss over the pairs of a batch, with the losses of routers.

    Args:     params: the logical parameters. batch: [B, T] in text order; document 2k + 1 of a row
              is the chosen response of its pair k, document 2k + 2 the rejected one.
    """
    d = present(cfg.dpo)
    params = decoder.scale_adapters(params, cfg)
    x, routings = decoder.hidden_and_routings(params, batch, cfg)
    scores = jax.nn.log_softmax(decoder.output(x, params, cfg.model))
    of_label = jnp.take_along_axis(scores, jnp.maximum(batch.labels, 0)[..., None], -1)[..., 0]
    ratios = jnp.where(batch.labels == IGNORED, 0.0, of_label - batch.reference)
    total, count = jnp.float32(0), jnp.float32(0)
    for k in range(batch.labels.shape[1] // 2):
        chosen, rejected = (
            jnp.sum(jnp.where(batch.segment_ids == document, ratios, 0.0), axis=1)
            for document in (2 * k + 1, 2 * k + 2)
        )
        there = jnp.any(batch.segment_ids == 2 * k + 1, axis=1)
        total += jnp.sum(jnp.where(there, _loss(d.beta * (chosen - rejected), d), 0.0))
        count += jnp.sum(there)
    return total / count + sum(router_loss(one, cfg) for one in routings)


def _loss(margin: jax.Array, dpo: DpoConfig) -> jax.Array:
    e = dpo.label_smoothing
    return (1 - e) * jnp.log1p(jnp.exp(-margin)) + e * jnp.log1p(jnp.exp(margin))


def distillation_losses(params: Any, batch: Batch, cfg: Config) -> tuple[jax.Array, jax.Array]:
    """Compute what a distillation minimizes, and the cross entropy alone, over labeled tokens.

    The divergence compares distributions of as many outcomes as the teacher names, and the tail.
    """
    d = present(cfg.distill)
    params = decoder.scale_adapters(params, cfg)
    x, routings = decoder.hidden_and_routings(params, batch, cfg)
    logits, T = decoder.output(x, params, cfg.model), d.temperature
    labeled = batch.labels != IGNORED
    scores = jax.nn.log_softmax(logits)
    at_label = jnp.take_along_axis(scores, jnp.maximum(batch.labels, 0)[..., None], -1)[..., 0]
    q = jnp.take_along_axis(jax.nn.softmax(logits / T), batch.teacher_ids, axis=-1)
    p = jnp.exp(batch.teacher_scores)
    kl = jnp.sum(p * (batch.teacher_scores - jnp.log(q)), axis=-1)
    if p.shape[-1] < cfg.model.vocab_size:
        of_p, of_q = 1 - jnp.sum(p, axis=-1), 1 - jnp.sum(q, axis=-1)
        kl += of_p * jnp.log(of_p / of_q)
    mean = lambda a: jnp.sum(jnp.where(labeled, a, 0.0)) / jnp.sum(labeled)  # noqa: E731
    ce, share = -mean(at_label), d.weight
    total = (1 - share) * ce + share * T**2 * mean(kl)
    return total + sum(router_loss(one, cfg) for one in routings), ce
