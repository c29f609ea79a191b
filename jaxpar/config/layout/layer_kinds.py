"""The kinds of a model's layers, which `model.layer_pattern` gives by letters.

Layers of one kind have the same parameters, and are stacked. A mesh runs them in the model's order.
"""

import dataclasses
import functools

from jaxpar.config.schema import Config
from jaxpar.config.schema.model import ModelConfig

#: The letters, after Nemotron-H's.
ATTENTION, GLOBAL, DELTA_NET, MAMBA, FEED_FORWARD, EXPERTS = "*", "A", "G", "M", "-", "E"

#: Kimi Delta Attention. The second has a dense feed-forward in a model with experts.
KDA, KDA_DENSE = "K", "k"

#: The name of each kind's stack of parameters.
STACKS = {
    ATTENTION: "layers",
    GLOBAL: "global_layers",
    DELTA_NET: "delta_layers",
    MAMBA: "mamba_layers",
    KDA: "kda_layers",
    KDA_DENSE: "kda_dense_layers",
    FEED_FORWARD: "mlp_layers",
    EXPERTS: "moe_layers",
}

#: Kinds whose layers have attention.
ATTENTIONS = (ATTENTION, GLOBAL)

#: Kinds whose layers are a feed-forward branch alone.
FEED_FORWARDS = (FEED_FORWARD, EXPERTS)

#: Kinds whose layers carry a state from token to token.
RECURRENT = (DELTA_NET, MAMBA, KDA, KDA_DENSE)


def kinds(m: ModelConfig) -> str:
    """Return the letter of each layer. Without a pattern, all have attention."""
    pattern = m.layer_pattern or ATTENTION
    return (pattern * -(-m.num_layers // len(pattern)))[: m.num_layers]


def has_global_layers(m: ModelConfig) -> bool:
    """Return whether some layers attend globally, and the others within a window or chunks."""
    return m.global_every > 0 or GLOBAL in m.layer_pattern


# A plan has thousands of layouts of one model.
@functools.lru_cache(maxsize=32)
def of_kind(m: ModelConfig, kind: str) -> ModelConfig:
    """Return the model with the heads of a kind's layers: for global attention with heads of its
    own, those heads, without a window."""
    if kind != GLOBAL:
        return m
    return dataclasses.replace(
        m,
        head_dim=m.global_head_dim or m.head_dim,
        num_kv_heads=m.global_num_kv_heads or m.num_kv_heads,
        sliding_window=None,
        attention_chunk=None,
    )


def dense_places(m: ModelConfig) -> tuple[int, ...]:
    """Return the indices of the layers of `model.dense_layers`: the first, or between experts."""
    if m.moe_every == 1:
        return tuple(range(m.dense_layers))
    return tuple(i for i in range(m.num_layers) if (i + 1) % m.moe_every)


def has_feed_forward(m: ModelConfig, kind: str) -> bool:
    """Return whether layers of a kind have a feed-forward branch.

    In models with feed-forward layers, other layers have none.
    """
    return kind in FEED_FORWARDS or set(FEED_FORWARDS).isdisjoint(m.layer_pattern)


def has_experts(m: ModelConfig, kind: str) -> bool:
    """Return whether the feed-forward of a kind's layers has experts, if not of dense_layers."""
    dense = kind in (FEED_FORWARD, KDA_DENSE)
    return m.num_experts > 0 and has_feed_forward(m, kind) and not dense


def kinds_with_experts(m: ModelConfig) -> str:
    """Return the letter of each layer with experts, in the model's order."""
    letters = "".join(kind for kind in kinds(m) if has_experts(m, kind))
    return letters[m.dense_layers :]


def norms_of(m: ModelConfig, kind: str) -> tuple[bool, bool]:
    """Return whether layers of a kind have norms of their branches' inputs, and of outputs."""
    if kind in RECURRENT and m.recurrent_norms == "before":
        return True, False
    return m.pre_norms, m.post_norms


def is_recurrent(m: ModelConfig) -> bool:
    """Return whether some layers carry a state from token to token."""
    if m.layers:
        return any(layer.mixer is not None and layer.mixer.recurrent for layer in m.layers)
    return any(kind in m.layer_pattern for kind in RECURRENT)


def has_kda(m: ModelConfig) -> bool:
    """Return whether some layers have Kimi Delta Attention."""
    return not {KDA, KDA_DENSE}.isdisjoint(m.layer_pattern)


def in_zigzag_order(cfg: Config) -> bool:
    """Return whether a sequence axis stores tokens in zigzag order.

    The order balances the work of causal attention. A recurrent layer needs text order, in which a
    device's tokens follow those of the device before.
    """
    return cfg.parallel.context != "ulysses" and not is_recurrent(cfg.model)
