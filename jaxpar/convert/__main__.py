"""Convert models: python -m jaxpar.convert from-hf, from-... DIR RUN; to-hf, to-... RUN OUT."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from jaxpar import checkpoint
from jaxpar.checkpoint import read_whole
from jaxpar.config import ConfigError
from jaxpar.config.rules.limits import STEP
from jaxpar.convert import selfcheck, torch_file
from jaxpar.convert.hf import exporting, importing
from jaxpar.convert.hf.config_file import CONFIG_FILE
from jaxpar.convert.megatron import importing as megatron_import
from jaxpar.convert.peft import exporting as peft_folder
from jaxpar.convert.peft import importing as peft_import
from jaxpar.convert.torch_names import PLAIN
from jaxpar.runtime import exit_codes
from jaxpar.runtime.option_classes import OR_ADDRESS, TO_ADDRESS, read_subcommand
from jaxpar.runtime.program import run_program
from jaxpar.stores.folders import new_folder_at
from jaxpar.stores.reading import with_local_runs

type Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, kw_only=True)
class Checking:
    """The check after the conversion, before the result appears."""

    check: bool = True
    """Compare logits with those of the input, and with `transformers` if it is installed."""
    tolerance: float = selfcheck.TOLERANCE
    """Maximum difference of logits, relative to the largest logit."""


@dataclass(frozen=True, kw_only=True)
class FromHf:
    """Convert a published model to a run with a checkpoint of step 0."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR"), TO_ADDRESS]
    """Folder with config.json and .safetensors files, or its address, s3://BUCKET/PREFIX, or a name
    on the Hugging Face Hub: org/model or org/model@revision."""
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder to write; it must be new."""
    checking: Annotated[Checking, tyro.conf.OmitArgPrefixes] = dataclasses.field(
        default_factory=Checking
    )


@dataclass(frozen=True, kw_only=True)
class FromPeft:
    """Convert a published model with PEFT adapters to a run with a checkpoint of step 0."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder with adapter_config.json and adapter_model.safetensors."""
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder to write; it must be new."""
    base: str | None = None
    """Folder of the adapters' base model, or its name on the Hub. None: the one that
    adapter_config.json names."""
    checking: Annotated[Checking, tyro.conf.OmitArgPrefixes] = dataclasses.field(
        default_factory=Checking
    )


@dataclass(frozen=True, kw_only=True)
class FromMegatron:
    """Convert a checkpoint of Megatron-LM to a run with a checkpoint of step 0."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder of Megatron-LM's --save, or of one step, in the format torch_dist."""
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder to write; it must be new."""
    checking: Annotated[Checking, tyro.conf.OmitArgPrefixes] = dataclasses.field(
        default_factory=Checking
    )


@dataclass(frozen=True, kw_only=True)
class ToHf:
    """Convert a checkpoint to the folder of a published model."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN"), OR_ADDRESS]
    """Run folder."""
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR"), TO_ADDRESS]
    """Folder to write, or s3://BUCKET/PREFIX; it must be new."""
    step: Annotated[checkpoint.Step, STEP] = None
    """Checkpoint to read. None: the latest intact one. best: that of checkpoint.best."""
    weights: Literal["trained", "ema"] = "trained"
    """Weights to convert: those that are trained, or their moving average (optimizer.ema_decay)."""
    dtype: Dtype | None = None
    """Dtype of the weights. None: that of the imported model, or the run's compute dtype."""
    family: str | None = None
    """model_type of config.json. None: that of the imported model, or the first that fits."""
    shard_gb: float = exporting.SHARD_BYTES / 1e9
    """Maximum size of a weights file, in GB. Larger models have several files and an index."""
    checking: Annotated[Checking, tyro.conf.OmitArgPrefixes] = dataclasses.field(
        default_factory=Checking
    )


@dataclass(frozen=True, kw_only=True)
class ToPeft:
    """Convert a run's adapters to a PEFT folder, without their base model."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN"), OR_ADDRESS]
    """Folder of a run with lora.rank."""
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR"), TO_ADDRESS]
    """Folder to write, or s3://BUCKET/PREFIX; it must be new."""
    base: str | None = None
    """Name or folder of the base model. None: the published folder in run.init_from."""
    step: Annotated[checkpoint.Step, STEP] = None
    """Checkpoint to read. None: the latest intact one. best: that of checkpoint.best."""
    weights: Literal["trained", "ema"] = "trained"
    """Weights to convert: those that are trained, or their moving average (optimizer.ema_decay)."""
    dtype: Dtype = "float32"
    """Dtype of the adapters."""
    family: str | None = None
    """As in `to-hf`; it determines the names of the modules."""
    checking: Annotated[Checking, tyro.conf.OmitArgPrefixes] = dataclasses.field(
        default_factory=Checking
    )


@dataclass(frozen=True, kw_only=True)
class ToTorch:
    """Convert a checkpoint to a PyTorch state_dict, which jaxpar/convert/torch_model.py loads."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN"), OR_ADDRESS]
    """Run folder."""
    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.pt")]
    """File to write, along with a .json file of the model's fields; both must be new."""
    step: Annotated[checkpoint.Step, STEP] = None
    """Checkpoint to read. None: the latest intact one. best: that of checkpoint.best."""
    weights: Literal["trained", "ema"] = "trained"
    """Weights to convert: those that are trained, or their moving average (optimizer.ema_decay)."""
    dtype: Dtype | None = None
    """Dtype of the weights. None: that of the imported model, or the run's compute dtype."""


COMMANDS: dict[str, Callable[..., Any]] = {
    "from-hf": FromHf,
    "from-peft": FromPeft,
    "from-megatron": FromMegatron,
    "to-hf": ToHf,
    "to-peft": ToPeft,
    "to-torch": ToTorch,
}

type Options = FromHf | FromPeft | FromMegatron | ToHf | ToPeft | ToTorch


def read_options(argv: Sequence[str]) -> Options:
    """Parse a command line.

    Raises:   ConfigError for an invalid value.
    """
    options = read_subcommand(COMMANDS, argv, "jaxpar.convert", __doc__)
    tolerance = getattr(options, "checking", Checking()).tolerance
    if not 0 < tolerance < 1:
        rule, fix = "must be between 0 and 1", "use --tolerance 1e-4"
        raise ConfigError("--tolerance", tolerance, rule, fix)
    if isinstance(options, ToHf) and not (math.isfinite(options.shard_gb) and options.shard_gb > 0):
        raise ConfigError("--shard-gb", options.shard_gb, "must be above 0", "use --shard-gb 5")
    return options


def main(argv: Sequence[str]) -> int:
    """Convert, check, and report. Returns the exit code."""
    options = read_options(argv)
    # A conversion only reads and writes files; it needs no GPU.
    jax.config.update("jax_platforms", "cpu")
    try:
        match options:
            case FromHf():
                from_hf(options)
            case FromPeft():
                from_peft(options)
            case FromMegatron():
                from_megatron(options)
            case ToHf():
                read_run(options, to_hf)
            case ToPeft():
                read_run(options, to_peft)
            case ToTorch():
                read_run(options, to_torch)
    except selfcheck.CheckFailed as error:
        print(f"self-check failed: {error}", file=sys.stderr)
        return exit_codes.EXIT_ERROR
    return exit_codes.EXIT_OK


def read_run[T: ToHf | ToPeft | ToTorch](options: T, convert: Callable[[T, int], None]) -> None:
    """Convert the checkpoint that the options name, or the latest intact one."""
    options = with_local_runs(options, log)
    step = checkpoint.step_of(options.run, options.step)
    read_whole(options.run, step, functools.partial(convert, options))


def from_hf(options: FromHf) -> None:
    """Run `from-hf`."""
    run, checking = Path(options.run), options.checking
    tolerance = checking.tolerance if checking.check else None
    source = importing.from_hf(options.folder, run, log, tolerance)
    log(f"{run}: {source.family.architecture} of {source.name}, the checkpoint of step 0")


def from_peft(options: FromPeft) -> None:
    """Run `from-peft`."""
    tolerance = options.checking.tolerance if options.checking.check else None
    cfg = peft_import.from_peft(options.folder, options.run, log, options.base, tolerance)
    log(f"{options.run}: with adapters of rank {cfg.lora.rank}, the checkpoint of step 0")


def from_megatron(options: FromMegatron) -> None:
    """Run `from-megatron`."""
    tolerance = options.checking.tolerance if options.checking.check else None
    source = megatron_import.from_megatron(options.folder, options.run, log, tolerance)
    log(f"{options.run}: {source.family.architecture}, the checkpoint of step 0")


def to_hf(options: ToHf, step: int) -> None:
    """Run `to-hf` on a checkpoint."""
    export = exporting.open_export(
        options.run, step, options.dtype, options.family, options.weights
    )
    checking = options.checking
    tolerance = checking.tolerance if checking.check else None
    shard_bytes = int(options.shard_gb * 1e9)
    with new_folder_at("DIR", options.folder, CONFIG_FILE) as folder:
        exporting.to_hf(export, folder, log, tolerance, shard_bytes)
    log(f"{options.folder}: {export.family.architecture} in {export.dtype}, of step {export.step}")


def to_peft(options: ToPeft, step: int) -> None:
    """Run `to-peft` on a checkpoint."""
    export = exporting.open_export(
        options.run, step, options.dtype, options.family, options.weights
    )
    base, checking = options.base or peft_folder.base_of(export.config), options.checking
    tolerance = checking.tolerance if checking.check else None
    with new_folder_at("DIR", options.folder, peft_folder.ADAPTER_CONFIG) as folder:
        peft_folder.to_peft(export, folder, log, base, tolerance)
    log(f"{options.folder}: adapters of rank {export.config.lora.rank}, of step {export.step}")


def to_torch(options: ToTorch, step: int) -> None:
    """Run `to-torch` on a checkpoint."""
    torch_file.require_torch()
    export = exporting.open_export(options.run, step, options.dtype, PLAIN, options.weights)
    torch_file.to_torch(export, Path(options.file), log)
    log(f"{options.file}: {export.dtype}, of step {export.step}")


def log(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


if __name__ == "__main__":
    run_program(main)
