"""The configuration: frozen dataclasses, one section for each part of the system.

`get_config()` in `configs/NAME.py` returns a config. The command line overrides its fields
(`command_line.py`), `validate.py` checks it once, and the run saves it as JSON. The text under
each field is its documentation: `python -m jaxpar.train --help SECTION` prints it.
"""

from dataclasses import dataclass, field

from jaxpar.components.attention import Attention
from jaxpar.components.feed_forward import Glu
from jaxpar.components.model import Layer, Model
from jaxpar.config.schema.compute import ComputeConfig
from jaxpar.config.schema.data import DataConfig
from jaxpar.config.schema.features import with_sections
from jaxpar.config.schema.metrics import MetricsConfig, ProfileConfig
from jaxpar.config.schema.optimizer import EmaConfig, OptimizerConfig
from jaxpar.config.schema.parallel import ClusterConfig, DilocoConfig, ParallelConfig
from jaxpar.config.schema.run import CheckpointConfig, GuardConfig, MemoryConfig, RunConfig
from jaxpar.config.schema.train import EvaluationConfig, LoraConfig, TrainConfig

__all__ = [
    "CheckpointConfig",
    "ClusterConfig",
    "ComputeConfig",
    "Config",
    "DataConfig",
    "DilocoConfig",
    "EmaConfig",
    "EvaluationConfig",
    "GuardConfig",
    "LoraConfig",
    "MemoryConfig",
    "MetricsConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ProfileConfig",
    "RunConfig",
    "TrainConfig",
]


_BLOCK = Layer("layers", Attention(num_heads=8, num_kv_heads=4, head_dim=32), Glu(704))
_MODEL = Model(d_model=256, vocab_size=512, layers=(_BLOCK,) * 4)


@dataclass(frozen=True, kw_only=True)
@with_sections(after="lora")
class Config:
    """The complete description of a run; `jaxpar/features/` has further sections."""

    run: RunConfig = field(default_factory=RunConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: Model = field(default=_MODEL)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    lora: LoraConfig | None = None
    """None: all weights are trained."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    diloco: DilocoConfig | None = None
    """None: replicas sum their gradients at every step."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
