"""Options of `python -m jaxpar.convert`."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.config import ConfigError
from jaxpar.config.options import OR_ADDRESS, TO_ADDRESS, Argument, Step
from jaxpar.config.rules.limits import STEP
from jaxpar.config.schema.optimizer import Weights

type Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, kw_only=True)
class Checking:
    """The check after the conversion, before the result appears."""

    check: bool = True
    """Compare logits with those of the input, and with `transformers` if it is installed."""
    tolerance: float = 1e-4
    """Maximum difference of logits, relative to the largest logit."""

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            rule, fix = "must be between 0 and 1", "use --tolerance 1e-4"
            raise ConfigError("--tolerance", self.tolerance, rule, fix)

    @property
    def limit(self) -> float | None:
        """The tolerance; None: do not check."""
        return self.tolerance if self.check else None


@dataclass(frozen=True, kw_only=True)
class FromHf(Checking):
    """Convert a published model to a run with a checkpoint of step 0."""

    folder: Annotated[str, Argument("DIR"), TO_ADDRESS]
    """Folder with config.json and .safetensors files, or its address, s3://BUCKET/PREFIX, or a name
    on the Hugging Face Hub: org/model or org/model@revision."""
    run: Annotated[str, Argument("RUN")]
    """Run folder to write; it must be new."""


@dataclass(frozen=True, kw_only=True)
class FromPeft(Checking):
    """Convert a published model with PEFT adapters to a run with a checkpoint of step 0."""

    folder: Annotated[str, Argument("DIR")]
    """Folder with adapter_config.json and adapter_model.safetensors."""
    run: Annotated[str, Argument("RUN")]
    """Run folder to write; it must be new."""
    base: str | None = None
    """Folder of the adapters' base model, or its name on the Hub. None: the one that
    adapter_config.json names."""


@dataclass(frozen=True, kw_only=True)
class FromMegatron(Checking):
    """Convert a checkpoint of Megatron-LM to a run with a checkpoint of step 0."""

    folder: Annotated[str, Argument("DIR")]
    """Folder of Megatron-LM's --save, or of one step, in the format torch_dist."""
    run: Annotated[str, Argument("RUN")]
    """Run folder to write; it must be new."""


@dataclass(frozen=True, kw_only=True)
class _OfRun:
    """The weights to convert."""

    run: Annotated[str, Argument("RUN"), OR_ADDRESS]
    """Run folder."""
    step: Annotated[Step, STEP] = None
    """Checkpoint to read. None: the latest intact one. best: that of checkpoint.best."""
    weights: Weights = "trained"
    """Weights to convert: those that are trained, or their moving average."""


@dataclass(frozen=True, kw_only=True)
class ToHf(Checking, _OfRun):
    """Convert a checkpoint to the folder of a published model."""

    folder: Annotated[str, Argument("DIR"), TO_ADDRESS]
    """Folder to write, or s3://BUCKET/PREFIX; it must be new."""
    dtype: Dtype | None = None
    """Dtype of the weights. None: that of the imported model, or the run's compute dtype."""
    family: str | None = None
    """model_type of config.json. None: that of the imported model, or the first that fits."""
    shard_gb: float = 5.0
    """Maximum size of a weights file, in GB. Larger models have several files and an index."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.shard_gb) and self.shard_gb > 0):
            raise ConfigError("--shard-gb", self.shard_gb, "must be above 0", "use --shard-gb 5")


@dataclass(frozen=True, kw_only=True)
class ToPeft(Checking, _OfRun):
    """Convert a run's adapters to a PEFT folder, without their base model."""

    folder: Annotated[str, Argument("DIR"), TO_ADDRESS]
    """Folder to write, or s3://BUCKET/PREFIX; it must be new."""
    base: str | None = None
    """Name or folder of the base model. None: the published folder in run.init_from."""
    dtype: Dtype = "float32"
    """Dtype of the adapters."""
    family: str | None = None
    """As in `to-hf`; it determines the names of the modules."""


@dataclass(frozen=True, kw_only=True)
class ToTorch(Checking, _OfRun):
    """Convert a checkpoint to PyTorch tensors, which jaxpar/convert/torch_model.py loads."""

    file: Annotated[str, Argument("FILE")]
    """File to write, FILE.pt or FILE.safetensors, along with FILE.json, the model's layers; both
    must be new."""
    dtype: Dtype | None = None
    """Dtype of the weights. None: that of the imported model, or the run's compute dtype."""
    code: tuple[str, ...] = ()
    """Files with the classes of a model's own components (docs/extend/components.md)."""


type Options = FromHf | FromPeft | FromMegatron | ToHf | ToPeft | ToTorch
