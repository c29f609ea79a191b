"""What models are composed of: each mixer and each feed-forward is declared in one file.

A component is a frozen dataclass. It declares its fields and its weights, from which every table
that is keyed by the names of weights follows. No file here imports JAX: `--help` and errors in a
config do not wait for it. The computation is in `jaxpar/model`.

The names below are the only list of the kinds: `jaxpar.config`, `jaxpar.extend`, JSON and the table
of fields take theirs from it.
"""

from jaxpar.components.attention import Attention, QkNorm, QueryGrowth
from jaxpar.components.experts import Experts, Router
from jaxpar.components.feed_forward import ClampedSwiglu, Glu, Mlp
from jaxpar.components.latent_attention import LatentAttention
from jaxpar.components.model import Layer, Model, MupConfig, Norm
from jaxpar.components.recurrent import GatedDeltaNet, KimiDeltaAttention, Mamba2
from jaxpar.components.rope import Rope, RopeScaling

__all__ = [
    "Attention",
    "ClampedSwiglu",
    "Experts",
    "GatedDeltaNet",
    "Glu",
    "KimiDeltaAttention",
    "LatentAttention",
    "Layer",
    "Mamba2",
    "Mlp",
    "Model",
    "MupConfig",
    "Norm",
    "QkNorm",
    "QueryGrowth",
    "Rope",
    "RopeScaling",
    "Router",
]

MAY_IMPORT = ()
