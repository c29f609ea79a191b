"""The configuration of a run, and the rules that it must satisfy.

`get_config()` in `configs/NAME.py` returns a config. The command line overrides its fields
(`command_line.py`), `validate.py` checks it once, and the run saves it as JSON.
"""

from jaxpar.components.model import MupConfig
from jaxpar.components.rope import RopeScaling
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
from jaxpar.config.schema.model import ModelConfig
from jaxpar.config.schema.objectives import DistillConfig, DpoConfig

__all__ = [
    "CheckpointConfig",
    "ClusterConfig",
    "ComputeConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DilocoConfig",
    "DistillConfig",
    "DpoConfig",
    "EvaluationConfig",
    "GuardConfig",
    "LoraConfig",
    "MetricsConfig",
    "ModelConfig",
    "MupConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ProfileConfig",
    "RopeScaling",
    "RunConfig",
    "TrainConfig",
    "default_of",
    "flag",
    "replace",
    "require",
    "value_of",
]

MAY_IMPORT = ("components",)
