"""The whole model in plain jax.numpy: no sharding, no rematerialization, no kernels.

`jaxpar.functional` makes functions of it, with which `python -m jaxpar.certify` and the tests
compare every mesh. It deliberately shares only components and the names of their weights with
`transformer.py`, so that a mistake in one of them shows as a difference.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.components.component import Mixer, Term, named_in
from jaxpar.components.model import STACK_OF_MODULES, Layer, Model
from jaxpar.config import Config
from jaxpar.model.own_components import token_by_token
from jaxpar.model.plain.feed_forward import PlainRouting
from jaxpar.model.plain.operations import norm, norm_of_stream, softcapped
from jaxpar.sharding.batch import IGNORED, Batch

# ----- The plain form of each component: the normalized stream [B, T, D] -> what it adds, [B, T, D]


#: Called with the name of a point of a layer (`model/probes.py`), and the value there.
type Watch = Callable[[str, Any], None]


def unwatched(point: str, value: Any) -> None:
    """Watch nothing."""


def plain(
    component: Term, h, w, positions, segments, model: Model, watch: Watch = unwatched
) -> jax.Array:
    """Apply a component in plain jax.numpy: by the form that its class names, or by its own method.

    Args:     as `Term.plain`. watch: at "queries" it gets the masked attention scores,
              [B, H, T, S], and at "router" a `PlainRouting`.
    """
    for kind in type(component).__mro__:
        if "plain_by" in vars(kind) and issubclass(kind, Term):
            form = named_in(kind.plain_by)
            return form(component, h, w, positions, segments, model, watch)
        if not {"plain", "compute"}.isdisjoint(vars(kind)):
            break
    if isinstance(component, Mixer) and component.has_state and not component.has_plain:
        return token_by_token(component, h, w, positions)
    return component.plain(h, w, positions, segments, model)


# -------------------------------------------------------------------------------------- The decoder


type Tree = dict[str, Any]


def logits_of(params: Tree, tokens, positions, segments, model: Model) -> jax.Array:
    """Compute logits, float32 [B, T, V], from int32 [B, T] tokens, positions and segments."""
    x = first_stream(params, tokens, positions, model)
    for layer, w in layers_of(params, model):
        x = block(x, w, layer, positions, segments, model)
    return output(x, params, model)


def hidden_and_routings(
    params: Tree, batch: Batch, cfg: Config, watch: Watch | None = None
) -> tuple[jax.Array, list[PlainRouting]]:
    """Compute the last residual stream, and what the routers of the layers with experts did.

    Args:     watch: called with the name of each point (`probes.py`), and the value there; at
              "queries" with the masked attention scores, [B, H, T, S].
    """
    model, positions, segments = cfg.model, batch.positions, _segments(batch, cfg)
    x, routings = first_stream(params, batch.tokens, positions, model), []
    watch = watch or unwatched

    def reached(point: str, value: Any) -> None:
        if point == "router":
            routings.append(value)
            watch("routing", value.share)
        else:
            watch(point, value)

    for layer, w in layers_of(params, model):
        x = block(x, w, layer, positions, segments, model, reached)
        watch("layer", x)
    watch("head", norm_of_stream(x, params, "final_norm", model))
    return x, routings


def modules(
    params: Tree, x, batch: Batch, cfg: Config
) -> Iterator[tuple[jax.Array, jax.Array, list[PlainRouting]]]:
    """Yield (labels, normalized hidden states, what its router did) of each module that predicts
    further tokens."""
    model = cfg.model
    h, segments = norm(x, params["final_norm"], model), jnp.asarray(batch.segment_ids)
    tokens, labels = jnp.asarray(batch.tokens), jnp.asarray(batch.labels)
    last = jnp.arange(tokens.shape[1]) == tokens.shape[1] - 1
    for k in range(model.mtp_depth):
        w = jax.tree.map(lambda a, k=k: a[k], params[STACK_OF_MODULES])
        ends = last | (jnp.roll(segments, -1, 1) != segments)
        tokens, labels = jnp.roll(tokens, -1, 1), jnp.where(ends, IGNORED, jnp.roll(labels, -1, 1))
        embedded = norm(embed(params["embed"][tokens], model), w["embed_norm"], model)
        of_x = norm(h, w["hidden_norm"], model)
        x = embedded @ w["w_join"][0] + of_x @ w["w_join"][1]
        found: list[PlainRouting] = []

        def reached(point: str, value: Any, found: list[PlainRouting] = found) -> None:
            found += [value] if point == "router" else []

        layer, place = cfg.model.module_layer, (batch.positions, _segments(batch, cfg))
        h = norm(block(x, w, layer, *place, model, reached), w["out_norm"], model)
        yield labels, h, found


def loads(params: Tree, batch: Batch, cfg: Config) -> jax.Array:
    """Count the tokens of each expert in a batch, [layers, E], those of `modules` last."""
    params = scale_adapters(params, cfg)
    x, routings = hidden_and_routings(params, batch, cfg)
    for _, _, of_module in modules(params, x, batch, cfg):
        routings += of_module
    return jnp.stack([jnp.sum(routing.used, axis=(0, 1)) for routing in routings])


def scale_adapters(params: Tree, cfg: Config) -> Tree:
    """Scale the second matrix of each adapter by `lora.alpha`, as `block` expects."""
    if cfg.lora is None:
        return params
    r = cfg.lora.rank
    scale = cfg.lora.alpha / (r**0.5 if cfg.lora.rank_stabilized else r)
    scaled = lambda n, w: w * scale if n.endswith("_lora_b") else w  # noqa: E731
    return {
        name: {n: scaled(n, a) for n, a in w.items()} if isinstance(w, dict) else w
        for name, w in params.items()
    }


def _segments(batch: Batch, cfg: Config) -> jax.Array:
    ids = jnp.asarray(batch.segment_ids)
    return ids if cfg.data.document_mask else jnp.ones_like(ids)


def layers_of(params: Tree, model: Model) -> Iterator[tuple[Layer, Tree]]:
    """Yield each layer with its weights, in the model's order."""
    for layer, (stack, i) in zip(model.layers, model.places, strict=True):
        yield layer, jax.tree.map(lambda a, i=i: a[i], params[stack])


# -------------------------------------------------------------------- before and after the layers


def first_stream(top: Tree, tokens, positions, model: Model) -> jax.Array:
    """Compute the residual stream before the first layer: embeddings of tokens and positions."""
    x = embed(top["embed"][tokens], model)
    return x + top["positions"][positions] if model.max_positions else x


def embed(rows: jax.Array, model: Model) -> jax.Array:
    """Compute the first residual stream from the tokens' rows of the embedding."""
    return rows * model.embedding_multiplier * (model.d_model**0.5 if model.embed_scale else 1)


def output(x: jax.Array, top: Tree, model: Model) -> jax.Array:
    """Compute logits from the last residual stream. `top` has the parameters outside the layers."""
    wider = model.d_model / model.mup.base_width if model.mup else 1.0
    logits = norm_of_stream(x, top, "final_norm", model) @ _head(top) / model.logits_scaling
    return softcapped(logits / wider, model.logits_softcap)


def logits_of_module(h: jax.Array, top: Tree, model: Model) -> jax.Array:
    """Compute logits from the hidden states that `modules` yields."""
    return softcapped(h @ _head(top), model.logits_softcap)


def _head(top: Tree) -> jax.Array:
    return top["head"] if "head" in top else top["embed"].T


# ---------------------------------------------------------------------------------------- a layer


def block(
    x: jax.Array, w: Tree, layer: Layer, positions, segments, model: Model, watch=unwatched
) -> jax.Array:
    """Apply one layer with the parameters `w` to the residual stream [B, T, D].

    Args:     watch: as `hidden_and_routings`, but at "router" it gets the `PlainRouting`.
    """
    before = x
    x = after_mixer(x, w, layer, positions, segments, model, watch)
    if layer.feed_forward is None:
        return x
    names = "attn_norm" if layer.parallel == "one_norm" else "mlp_norm", "mlp_post_norm"
    read, place = before if layer.parallel else x, (positions, segments, model, watch)
    x = x + _branch("feed_forward", layer.feed_forward, names, read, w, layer, *place)
    return x * w["layer_scale"] if layer.scaled else x


def after_mixer(
    x: jax.Array, w: Tree, layer: Layer, positions, segments, model: Model, watch=unwatched
) -> jax.Array:
    """Apply the first branch of a layer, attention or a recurrence; arguments as `block`."""
    if layer.mixer is None:
        return x
    names, place = ("attn_norm", "attn_post_norm"), (positions, segments, model, watch)
    return x + _branch("mixer", layer.mixer, names, x, w, layer, *place)


def _branch(
    role: str,
    component: Term,
    names: tuple[str, str],
    x: jax.Array,
    w: Tree,
    layer: Layer,
    positions,
    segments,
    model: Model,
    watch: Watch,
) -> jax.Array:
    """Compute what a branch adds to the residual stream.

    Args:     names: of the norms before and after the component.
    """
    before, after = names
    h = x if layer.norms == "after" else norm_of_stream(x, w, before, model)
    out = plain(component, h, w, positions, segments, model, watch)
    out = out if layer.norms == "before" else norm(out, w[after], model)
    watch(f"{role}_input", h)
    watch(f"{role}_output", out)
    depth = model.mup.base_depth if model.mup else None
    return model.residual_multiplier * (depth / len(model.layers) if depth else 1) * out
