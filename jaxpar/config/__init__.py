"""The configuration of a run, and the rules that it must satisfy.

`get_config()` in `configs/NAME.py` returns a config. The command line overrides its fields
(`command_line.py`), `validate.py` checks it once, and the run saves it as JSON.
"""

from jaxpar import components
from jaxpar.components import *  # noqa: F403
from jaxpar.config.errors import ConfigError
from jaxpar.config.fields import default_of, flag, present, replace, require, value_of
from jaxpar.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    ComputeConfig,
    Config,
    DataConfig,
    DilocoConfig,
    EmaConfig,
    EvaluationConfig,
    GuardConfig,
    LoraConfig,
    MemoryConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from jaxpar.config.schema.items import (
    BatchSize,
    EvaluationSet,
    LossWeight,
    MixtureWeights,
    RematSlice,
    RematValue,
    SequenceLength,
    Source,
    StepShare,
)
from jaxpar.config.schema.metrics import MetricsConfig, ProfileConfig

__all__ = [
    "BatchSize",
    "CheckpointConfig",
    "ClusterConfig",
    "ComputeConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DilocoConfig",
    "EmaConfig",
    "EvaluationConfig",
    "EvaluationSet",
    "GuardConfig",
    "LoraConfig",
    "LossWeight",
    "MemoryConfig",
    "MetricsConfig",
    "MixtureWeights",
    "OptimizerConfig",
    "ParallelConfig",
    "ProfileConfig",
    "RematSlice",
    "RematValue",
    "RunConfig",
    "SequenceLength",
    "Source",
    "StepShare",
    "TrainConfig",
    "default_of",
    "flag",
    "present",
    "replace",
    "require",
    "value_of",
]
__all__ += components.__all__

MAY_IMPORT = ("components",)
