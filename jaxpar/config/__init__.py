"""What a run is asked to be, and which requests can work.

A config is made by `configs/NAME.py`'s `get_config()`, changed on the command line
(`command_line.py`), checked once by `validate.py`, and saved as JSON with the run.
"""

from jaxpar.config.errors import ConfigError
from jaxpar.config.fields import default_of, flag, replace, require, value_of
from jaxpar.config.model_schema import ModelConfig, RopeScaling
from jaxpar.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    GuardConfig,
    LoraConfig,
    MetricsConfig,
    OptimizerConfig,
    ParallelConfig,
    ProfileConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
    "GuardConfig",
    "LoraConfig",
    "MetricsConfig",
    "ModelConfig",
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

MAY_IMPORT = ()
