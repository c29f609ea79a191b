"""The configuration of a run, and the rules that it must satisfy.

`get_config()` in `configs/NAME.py` returns a config. The command line overrides its fields
(`command_line.py`), `validate.py` checks it once, and the run saves it as JSON.
"""

from jaxpar.components.attention import Attention, QkNorm, QueryGrowth
from jaxpar.components.experts import Experts, Router
from jaxpar.components.feed_forward import ClampedSwiglu, Glu, Mlp
from jaxpar.components.latent_attention import LatentAttention
from jaxpar.components.model import Layer, Model, MupConfig, Norm
from jaxpar.components.recurrent import GatedDeltaNet, KimiDeltaAttention, Mamba2
from jaxpar.components.rope import Rope, RopeScaling
from jaxpar.config.errors import ConfigError
from jaxpar.config.fields import default_of, flag, replace, require, value_of
from jaxpar.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    ComputeConfig,
    Config,
    DataConfig,
    DilocoConfig,
    EvaluationConfig,
    GuardConfig,
    LoraConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from jaxpar.config.schema.metrics import MetricsConfig, ProfileConfig
from jaxpar.config.schema.objectives import DistillConfig, DpoConfig

__all__ = [
    "Attention",
    "CheckpointConfig",
    "ClampedSwiglu",
    "ClusterConfig",
    "ComputeConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DilocoConfig",
    "DistillConfig",
    "DpoConfig",
    "EvaluationConfig",
    "Experts",
    "GatedDeltaNet",
    "Glu",
    "GuardConfig",
    "KimiDeltaAttention",
    "LatentAttention",
    "Layer",
    "LoraConfig",
    "Mamba2",
    "MetricsConfig",
    "Mlp",
    "Model",
    "MupConfig",
    "Norm",
    "OptimizerConfig",
    "ParallelConfig",
    "ProfileConfig",
    "QkNorm",
    "QueryGrowth",
    "Rope",
    "RopeScaling",
    "Router",
    "RunConfig",
    "TrainConfig",
    "default_of",
    "flag",
    "replace",
    "require",
    "value_of",
]

MAY_IMPORT = ("components",)
