"""The work of `python -m jaxpar.convert`."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import jax

from jaxpar.checkpoint.best import step_of
from jaxpar.checkpoint.saved import read_whole
from jaxpar.config import value_of
from jaxpar.convert import selfcheck, torch_file
from jaxpar.convert.hf import exporting, importing
from jaxpar.convert.hf.config_file import CONFIG_FILE
from jaxpar.convert.megatron import importing as megatron_import
from jaxpar.convert.options import FromHf, FromMegatron, FromPeft, Options, ToHf, ToPeft, ToTorch
from jaxpar.convert.peft import exporting as peft_folder
from jaxpar.convert.peft import importing as peft_import
from jaxpar.runtime import exit_codes
from jaxpar.stores.folders import new_folder_at
from jaxpar.stores.reading import with_local_runs


def convert(options: Options) -> int:
    """Convert, check, and report. Returns the exit code."""
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
    step = step_of(options.run, options.step)
    read_whole(options.run, step, functools.partial(convert, options))


def from_hf(options: FromHf) -> None:
    """Run `from-hf`."""
    source = importing.from_hf(options.folder, Path(options.run), log, options.limit)
    log(f"{options.run}: {source.family.architecture} of {source.name}, the checkpoint of step 0")


def from_peft(options: FromPeft) -> None:
    """Run `from-peft`."""
    cfg = peft_import.from_peft(options.folder, options.run, log, options.base, options.limit)
    rank = value_of(cfg, "lora.rank")
    log(f"{options.run}: with adapters of rank {rank}, the checkpoint of step 0")


def from_megatron(options: FromMegatron) -> None:
    """Run `from-megatron`."""
    source = megatron_import.from_megatron(options.folder, options.run, log, options.limit)
    log(f"{options.run}: {source.family.architecture}, the checkpoint of step 0")


def to_hf(options: ToHf, step: int) -> None:
    """Run `to-hf` on a checkpoint."""
    export = exporting.open_export(
        options.run, step, options.dtype, options.family, options.weights
    )
    shard_bytes = int(options.shard_gb * 1e9)
    with new_folder_at("DIR", options.folder, CONFIG_FILE) as folder:
        exporting.to_hf(export, folder, log, options.limit, shard_bytes)
    log(f"{options.folder}: {export.family.architecture} in {export.dtype}, of step {export.step}")


def to_peft(options: ToPeft, step: int) -> None:
    """Run `to-peft` on a checkpoint."""
    export = exporting.open_export(
        options.run, step, options.dtype, options.family, options.weights
    )
    base = options.base or peft_folder.base_of(export.config)
    with new_folder_at("DIR", options.folder, peft_folder.ADAPTER_CONFIG) as folder:
        peft_folder.to_peft(export, folder, log, base, options.limit)
    rank = value_of(export.config, "lora.rank")
    log(f"{options.folder}: adapters of rank {rank}, of step {export.step}")


def to_torch(options: ToTorch, step: int) -> None:
    """Run `to-torch` on a checkpoint."""
    file = Path(options.file)
    torch_file.check_file(file)
    export = torch_file.open_export(options.run, step, options.dtype, options.weights, options.code)
    torch_file.to_torch(export, file, log, options.limit)
    log(f"{options.file}: {export.dtype}, of step {export.step}")


def log(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)
