"""Initial parameters, logits and loss of a model, in plain jax.numpy on one device.

`python -m jaxpar.certify` compares every mesh with these functions.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config, ConfigError, Model, TrainConfig
from jaxpar.inference.load import load_params_of
from jaxpar.model.parameters import specs_of
from jaxpar.model.plain import decoder
from jaxpar.model.plain.feed_forward import router_loss
from jaxpar.objectives.losses import AnyLoss, Loss, NextToken, Scores, split, summed
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.initial_values import initialize
from jaxpar.sharding.params import flat

# A model is an argument of traced functions, and part of what they are compiled for.
jax.tree_util.register_static(Model)

#: Parameters: dicts of float32 arrays under the names of a checkpoint.
type Params = dict[str, Any]


def init(model: Model, key: jax.Array) -> Params:
    """Return initial parameters.

    Args:     model: the section of a config. key: from `jax.random.key`.
    Returns:  float32 arrays; for `jax.random.key(N)`, those of a run with `train.seed` N, bit for
              bit.
    Raises:   ConfigError for what is no model.
    """
    _require_model(model)
    return _init(model, key)


@jax.jit
def _init(model: Model, key: jax.Array) -> Params:
    # Compiled, as in a run: eagerly, values would differ in the last bit.
    return initialize(specs_of(Config(model=model)), key)


def apply(
    params: Params,
    tokens: jax.Array,
    model: Model,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Compute the logits of the next tokens.

    Args:     params: as `init` returns them. tokens: int32 [B, T]. positions: int32 [B, T], in each
              document; None: from 0. segment_ids: int32 [B, T], the document of each token, which
              attends within it; None: one document.
    Returns:  float32 [B, T, V].
    Raises:   ConfigError for parameters of another model, and arrays of another shape.
    """
    _check(params, model)
    batch = _batch({"tokens": tokens, "positions": positions, "segment_ids": segment_ids})
    return decoder.logits_of(params, batch.tokens, batch.positions, batch.segment_ids, model)


def loss(
    params: Params,
    batch: Batch | Mapping[str, Any],
    model: Model,
    loss: AnyLoss = NextToken(),  # noqa: B008, a constant
) -> jax.Array:
    """Compute the mean loss of a batch: a scalar, to differentiate by `params`.

    Args:     params: as `init` returns them. batch: a `Batch` in text order, or a dict of its
              arrays, each int32 [B, T]: `tokens`; `labels`, the next tokens, -1 where there is
              none, by default the tokens moved by one; `positions` and `segment_ids` as for
              `apply`. model: the section of a config. loss: of tokens.
    Returns:  float32 scalar: the mean over labeled tokens, plus the terms of routers and of
              multi-token prediction that `loss` has weights for.
    Raises:   ConfigError as `apply`.
    """
    _check(params, model)
    return loss_of_logical(params, _batch(batch), Config(model=model), loss)


def loss_of_logical(params: Params, batch: Batch, cfg: Config, loss: AnyLoss) -> jax.Array:
    """Compute `loss` for parameters that may have adapters.

    Args:     cfg: only `model` and `lora` are read.
    """
    terms = loss if isinstance(loss, Loss) else Loss()
    of_tokens = loss.plain if isinstance(loss, Loss) else loss
    cfg, model = _with_terms(cfg, terms), cfg.model
    params = decoder.scale_adapters(params, cfg)
    x, routings = decoder.hidden_and_routings(params, batch, cfg)
    scores = Scores(decoder.output(x, params, model), jnp.asarray(batch.labels))
    total, count = summed(*split(of_tokens(scores, batch), scores.labels))
    mean = total / count
    for labels, h, of_module in decoder.modules(params, x, batch, cfg):
        scores = Scores(decoder.logits_of_module(h, params, model), labels)
        values, weights = split(of_tokens(scores, batch), labels)
        further, _ = summed(values, lax.stop_gradient(weights))
        mean += terms.mtp_loss / cfg.model.mtp_depth * further / lax.stop_gradient(count)
        routings += of_module
    return mean + sum(router_loss(one, cfg) for one in routings)


def _with_terms(cfg: Config, loss: Loss) -> Config:
    """Return the config that the plain model reads: its model, and a loss's weights of terms."""
    names = ("mtp_loss", "balance_loss", "balance_over", "router_z_loss")
    train = TrainConfig(**{name: getattr(loss, name) for name in names})
    return Config(model=cfg.model, lora=cfg.lora, train=train)


def _batch(given: Batch | Mapping[str, Any]) -> Batch:
    """Return a batch with defaults for what is not given."""
    arrays = dict(given if isinstance(given, Mapping) else vars(given))
    extra = {name: jnp.asarray(a) for name, a in arrays.pop("extra", {}).items()}
    if "source" in arrays:
        extra["source"] = jnp.asarray(arrays.pop("source"))
    if unknown := arrays.keys() - Batch.__dataclass_fields__.keys():
        rule = "is no array of a batch"
        raise ConfigError("batch", min(unknown), rule, f"use {', '.join(_ARRAYS)}")
    if "tokens" not in arrays:
        raise ConfigError("batch", sorted(arrays), "has no tokens", 'use {"tokens": tokens}')
    arrays = {name: jnp.asarray(a) for name, a in arrays.items() if a is not None}
    tokens = arrays["tokens"]
    for name in _ARRAYS:
        shape, dtype = (getattr(arrays.get(name, tokens), of) for of in ("shape", "dtype"))
        if tokens.ndim != 2 or shape != tokens.shape or not jnp.issubdtype(dtype, jnp.integer):
            rule = f"must be integers [B, T], like the tokens, {list(tokens.shape)}"
            fix = "use tokens[None] for one sequence" if tokens.ndim == 1 else "use that shape"
            raise ConfigError(f"batch.{name}", f"{dtype}{list(shape)}", rule, fix)
    place = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    last = jnp.full((tokens.shape[0], 1), -1, tokens.dtype)
    if "labels" not in arrays:
        arrays["labels"] = jnp.concatenate([tokens[:, 1:], last], axis=1)
        if "segment_ids" in arrays:  # the first token of a document is no label
            same = arrays["segment_ids"][:, 1:] == arrays["segment_ids"][:, :-1]
            same = jnp.concatenate([same, last == 0], axis=1)
            arrays["labels"] = jnp.where(same, arrays["labels"], -1)
    return Batch(extra=extra, **{"positions": place, "segment_ids": jnp.ones_like(place)} | arrays)


_ARRAYS = ("tokens", "labels", "positions", "segment_ids")


def _check(params: Params, model: Model) -> None:
    """Raises:   ConfigError unless the parameters have the names and shapes of a model's."""
    _require_model(model)
    wanted = {name: spec.shape for name, spec in flat(specs_of(Config(model=model))).items()}
    found = {name: jnp.shape(a) for name, a in flat(params).items()}
    fix = "use init(model, key), or load(RUN) and its config.model"
    for name in sorted(wanted.keys() ^ found.keys()):
        rule = "is no parameter of this model" if name in found else "is not among the parameters"
        raise ConfigError("params", name, rule, fix)
    for name, shape in wanted.items():
        if found[name] != shape:
            rule = f"has the shape {list(found[name])}, and this model's has {list(shape)}"
            raise ConfigError("params", name, rule, fix)


def _require_model(model: Any) -> None:
    """Raises:   ConfigError for what is no section `model`."""
    if not isinstance(model, Model):
        rule = "must be the section `model` of a config"
        raise ConfigError("model", type(model).__name__, rule, "use config.model")


# -------------------------------------------- Reads the parameters of a run or of a published model


def load(folder: str | Path, step: int | None = None) -> tuple[Any, Config]:
    """Load parameters onto one device, with adapters merged into them.

    Args:     folder: of a run, or of a published model. step: of the run's checkpoint; None: the
              latest intact one.
    Returns:  the parameters, as `init` returns them, and the config, whose `model` they are of.
    Raises:   ConfigError if the folder contains no model; Damaged if the checkpoint is.
    """
    found = load_params_of(str(folder), step, 1, lambda text: None)
    return found.params, found.cfg
