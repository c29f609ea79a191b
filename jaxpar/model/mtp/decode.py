"""Modules of multi-token prediction in generation: each drafts one more token.

Runs on a mesh with only the tensor axis, as `model/decode.py`. Module k at position i reads the
hidden state of the module before and the token at i + k, and predicts the token at i + k + 1. Each
has a cache of its own, with the same slots.
"""

from typing import Any

import jax

from jaxpar.components.model import Layer
from jaxpar.components.recurrent import Recurrent
from jaxpar.config import Config, Model
from jaxpar.model import decode, norm
from jaxpar.model.attention_context import context_of_layer
from jaxpar.model.fused_weights import outside_layer
from jaxpar.model.held import NewTokens
from jaxpar.model.mtp.module import joined, of_layer
from jaxpar.model.mtp.parameters import prefix

type Tree = dict[str, Any]


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
