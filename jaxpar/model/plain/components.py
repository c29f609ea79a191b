"""The plain form of each component: the normalized stream [B, T, D] -> what it adds, [B, T, D]."""

from collections.abc import Callable
from typing import Any

import jax

from jaxpar.components.attention import Attention
from jaxpar.components.component import Mixer, Term
from jaxpar.components.experts import Experts
from jaxpar.components.feed_forward import Glu
from jaxpar.components.latent_attention import LatentAttention
from jaxpar.components.model import Model
from jaxpar.components.recurrent import GatedDeltaNet, KimiDeltaAttention, Mamba2
from jaxpar.model.own_components import token_by_token
from jaxpar.model.plain import attention, feed_forward, recurrent

#: Called with the name of a point of a layer (`model/probes.py`), and the value there.
type Watch = Callable[[str, Any], None]


def unwatched(point: str, value: Any) -> None:
    """Watch nothing."""


_PLAIN: dict[type[Term], Callable[..., jax.Array]] = {
    Attention: attention.attention,
    LatentAttention: attention.latent_attention,
    GatedDeltaNet: recurrent.delta_net,
    KimiDeltaAttention: recurrent.kimi_delta,
    Mamba2: recurrent.mamba,
    Glu: feed_forward.glu,
    Experts: feed_forward.experts,
}


def plain(
    component: Term, h, w, positions, segments, model: Model, watch: Watch = unwatched
) -> jax.Array:
    """Apply a component in plain jax.numpy: by its own method, or by the table for ours.

    Args:     as `Term.plain`. watch: at "queries" it gets the masked attention scores,
              [B, H, T, S], and at "router" a `PlainRouting`.
    """
    for kind in type(component).__mro__:
        if kind in _PLAIN:
            return _PLAIN[kind](component, h, w, positions, segments, model, watch)
        if not {"plain", "compute"}.isdisjoint(vars(kind)):
            break
    if isinstance(component, Mixer) and component.has_state and not component.has_plain:
        return token_by_token(component, h, w, positions)
    return component.plain(h, w, positions, segments, model)
