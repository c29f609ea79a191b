"""The metrics of a step, computed with the plain model on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.components.experts import Experts, experts_in
from jaxpar.config import Config, replace
from jaxpar.model.plain import decoder
from jaxpar.model.plain.feed_forward import PlainRouting, router_loss
from jaxpar.sharding.batch import IGNORED, Batch
from jaxpar.step.features.qk_clip import largest_logits

type Metrics = dict[str, jax.Array]


def before_update(params: Any, grads: Any, batch: Batch, cfg: Config) -> Metrics:
    """Return the metrics of a step's loss and gradients.

    Args:     params: before the update. grads: of the trainable ones.
    """
    found: Metrics = {
        "grad_norm": optax.tree.norm(grads),
        "num_tokens": jnp.sum(jnp.asarray(batch.labels) != IGNORED),
    }
    if cfg.metrics.layers != "none":
        found["layer_grad_norm"] = jnp.sqrt(_of_layers(grads, cfg))
    if cfg.optimizer.qk_clip > 0:
        logits = largest_logits(params, batch, cfg)
        found["max_attention_logit"] = jnp.max(logits)
        found["clipped_heads"] = jnp.sum(logits > cfg.optimizer.qk_clip)
    if experts_in(cfg.model) and not cfg.lora:
        _, routings = decoder.hidden_and_routings(params, batch, cfg)
        found |= _of_experts(routings, cfg)
    return found


def _of_layers(tree: Any, cfg: Config) -> jax.Array:
    """Return the sum of squares of each layer, [layers]."""
    squares = lambda stack, i: [jnp.sum(a[i] ** 2) for a in tree.get(stack, {}).values()]  # noqa: E731
    return jnp.stack([jnp.asarray(sum(squares(*place))) for place in cfg.model.places])


def of_update(new: Any, old: Any, cfg: Config) -> Metrics:
    """Return the metrics of what an update changed.

    Args:     new, old: the trainable parameters after and before it.
    """
    if cfg.metrics.layers == "none":
        return {}
    # As stored: the rounding of large weights is a part of a small change.
    stored = lambda a: a.astype(jnp.float32).astype(a.dtype)  # noqa: E731
    changes = jax.tree.map(lambda a, b: stored(a) - stored(b), new, old)
    return {"layer_update": jnp.sqrt(_of_layers(changes, cfg) / _of_layers(old, cfg))}


def _of_experts(routings: list[PlainRouting], cfg: Config) -> Metrics:
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
    for name in ("balance_loss", "router_z_loss"):
        if getattr(cfg.train, name):
            alone = {"train.balance_loss": 0.0, "train.router_z_loss": 0.0, f"train.{name}": 1.0}
            losses = [router_loss(one, replace(cfg, **alone)) for one in routings]
            found[name] = jnp.mean(jnp.stack(losses))
    return found


def after_update(new: Any, cfg: Config) -> Metrics:
    """Return the metrics of a step's update.

    Args:     new: all parameters after it.
    """
    zero = jnp.zeros(())
    found: Metrics = {"skipped": zero, "in_a_row": zero, "loss_scale": jnp.ones(())}
    layers = [one.name for one in cfg.model.layers if isinstance(one.feed_forward, Experts)]
    biases = [new[name]["router_bias"] for name in layers if "router_bias" in new[name]]
    if biases and not cfg.lora:
        ranges = [jnp.max(jnp.ptp(of, axis=-1)) for of in biases]
        found["router_bias_range"] = jnp.max(jnp.stack(ranges))
    return found
