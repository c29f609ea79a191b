"""Multi-token prediction: each module predicts one token further.

    h_k = norm(layer([norm(embed(t_{i+k})) | norm(h_{k-1})] W))       h_0: output of the final norm
    loss = L(h_0, t_{i+1}) + weight / D * sum over k of L(h_k, t_{i+k+1})

Embedding and head are those of the model. A module sees tokens of its document only: where the
next token belongs to another one, there is no loss, and no later token of the document attends.
With pipeline stages, every stage computes the modules from the last stage's output, as they compute
the head, which is split over them. The losses and the loads of their routers count on one stage.

Source:   DeepSeek-AI 2024 (2412.19437), section 2.2.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.components.model import Layer
from jaxpar.components.recurrent import Recurrent
from jaxpar.config import Config, Model
from jaxpar.model import decode, norm
from jaxpar.model.attention_context import AttentionContext, context_of_layer
from jaxpar.model.fused_weights import outside_layer
from jaxpar.model.held import NewTokens
from jaxpar.model.mtp import DIMS, prefix
from jaxpar.parallel.collectives import all_gather
from jaxpar.parallel.context import order_of
from jaxpar.sharding.axes import SEQUENCE
from jaxpar.sharding.batch import IGNORED, Batch

type Tree = dict[str, Any]


@jax.named_scope("mtp")
def module(
    x: jax.Array,
    embedded: jax.Array,
    w: Tree,
    context: AttentionContext,
    cfg: Config,
    layer: Callable[..., jax.Array],
) -> jax.Array:
    """Compute the hidden states of one module.

    Args:     x: of the module before, [B, T/(sequence*tensor), D]. embedded: of the tokens that x
              predicts, like x. w: the module's weights, complete over FSDP_AXES. layer: (x, weights
              of a layer, context) -> x.
    """
    x = layer(joined(x, embedded, w, cfg.model), of_layer(w), context)
    return norm.norm(x, w["out_norm"], cfg.model)


def joined(x: jax.Array, embedded: jax.Array, w: Tree, m: Model) -> jax.Array:
    """Compute the input of a module's layer. Args: as `module`."""
    normed = norm.norm(embedded, w["embed_norm"], m), norm.norm(x, w["hidden_norm"], m)
    return jnp.concatenate(normed, axis=-1) @ w["w_join"]


def of_layer(w: Tree) -> Tree:
    """Select the weights of a module's layer."""
    return {n: a for n, a in w.items() if n not in DIMS}


def shifted(batch: Batch, cfg: Config) -> Batch:
    """Return a batch whose tokens and labels are those of each token's successor in the text.

    Labels are IGNORED where the successor belongs to another document, or is not in the sequence.

    Communication: all-gathers over SEQUENCE of tokens, labels and documents, 4 bytes per token.
    """
    T = cfg.data.seq_len
    order = order_of(cfg)
    places, n = jnp.asarray(_successors(order, T)), lax.axis_size(SEQUENCE)
    whole = lambda a: a if n == 1 else all_gather(a, SEQUENCE, dim=1)  # noqa: E731
    if n > 1:
        here = lax.axis_index(SEQUENCE) * (T // n)
        places = lax.dynamic_slice_in_dim(places, here, T // n)
    take = lambda a: jnp.take(whole(a), jnp.maximum(places, 0), axis=1)  # noqa: E731
    same = (take(batch.segment_ids) == batch.segment_ids) & (places >= 0)
    labels = jnp.where(same, take(batch.labels), IGNORED)
    return dataclasses.replace(batch, tokens=take(batch.tokens), labels=labels)


def _successors(order: np.ndarray | None, T: int) -> np.ndarray:
    """Return the place of each stored token's successor, int32 [T]; -1 for the last of the text."""
    text = np.arange(T) if order is None else np.asarray(order)
    place_of = np.empty(T + 1, np.int32)
    place_of[text], place_of[T] = np.arange(T), -1
    return place_of[text + 1]


# ---------------------- Modules of multi-token prediction in generation: each drafts one more token
#
# Runs on a mesh with only the tensor axis, as `model/decode.py`. Module k at position i reads the
# hidden state of the module before and the token at i + k, and predicts the token at i + k + 1.
# Each has its own cache, with the same slots.


def layers_of(m: Model) -> tuple[Layer, ...]:
    """Return the layer of each module: those of their cache."""
    return (m.module_layer,) * m.mtp_depth


def can_draft(m: Model) -> bool:
    """Return whether the modules' drafts can be verified: by layers without a recurrent state,
    which could not go back before drafts that are rejected."""
    mixers = (layer.mixer for layer in m.layers)
    return m.mtp_depth > 0 and not any(isinstance(mixer, Recurrent) for mixer in mixers)


def step(
    weights: Tree,
    k: int,
    x: jax.Array,
    tokens: jax.Array,
    first: jax.Array,
    cache: decode.Cache,
    cfg: Config,
    lengths: jax.Array | None = None,
    of_text: jax.Array | None = None,
) -> tuple[jax.Array, decode.Cache]:
    """Run a module on some positions of each row.

    Args:     weights: of the model, fused, with its modules. k: from 0. x: [B, T, D], hidden states
              of the module before; of the final norm, for the first. tokens: int32 [B, T], those at
              k + 1 positions after x. first: int32 [B], positions of the first of x. cache: of all
              modules. lengths: as `NewTokens.lengths`. of_text: `length` of `decode.step`.
    Returns:  (hidden states for the head and for the next module, [B, T, D]; the cache).
    Communication: two all-reduces over TENSOR, and one for the embedding.
    """
    m, w = cfg.model, outside_layer(weights["top"], prefix(k))
    if of_text is None:
        of_text = first + tokens.shape[1] if lengths is None else lengths
    positions, contexts = decode.context_of(tokens, first, of_text, cache.slots, cfg)
    context = context_of_layer(contexts, m.module_layer)
    x = joined(x, decode.embed(weights["top"], tokens, positions, cfg), w, m)
    held, new = list(cache.held), NewTokens(first, positions, lengths)
    x, held[k] = decode.layer(x, of_layer(w), context, held[k], new, cfg)
    return norm.norm(x, w["out_norm"], m), decode.Cache(tuple(held), cache.slots)
