"""`from-peft`: converts a published model and PEFT adapters to a run with a step-0 checkpoint."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxpar.checkpoint import weights_alone
from jaxpar.config import Config, ConfigError, LoraConfig, Model
from jaxpar.config.json_reader import read_json_object
from jaxpar.config.lists.lora_targets import targets_of
from jaxpar.config.validate import check
from jaxpar.convert import selfcheck
from jaxpar.convert.hf.config_file import CONFIG_FILE, Values
from jaxpar.convert.hf.folder import Tensors, check_tensors
from jaxpar.convert.hf.importing import (
    PublishedModel,
    check_tokenizer,
    new_run,
    open_source,
    source_config,
)
from jaxpar.convert.peft.exporting import ADAPTER_CONFIG, ADAPTER_FILE, adapter_entries, either
from jaxpar.convert.peft.merging import unmerged_reader, with_factor
from jaxpar.convert.run_arrays import open_run
from jaxpar.convert.safetensors_file import read_header
from jaxpar.runtime import hub

#: Keys of adapter_config.json that do not affect what trained adapters compute.
_OF_TRAINING = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "layers_pattern",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}

#: Keys that are read.
_READ = {"r", "lora_alpha", "target_modules"}

#: Supported values. Other initializations also change the base model.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),
    "use_rslora": (True, False, None),
}


def read_adapter_config(folder: Path) -> Values:
    """Read the values of a folder's adapter_config.json.

    Raises:   ConfigError when it is missing, not JSON, or has an unsupported value.
    """
    path = folder / ADAPTER_CONFIG
    try:
        values = read_json_object(path)
        items = sorted(values.items())
    except (OSError, ValueError) as error:
        rule = f"has no {ADAPTER_CONFIG} that can be read ({error})"
        raise ConfigError("DIR", str(folder), rule, "use a folder that PEFT has saved") from error
    for key, value in items:
        allowed = _REQUIRED.get(key)
        # False, null and empty lists are the same as no key; layers_to_transform 0 is a layer.
        unset = not value and (isinstance(value, bool) or not isinstance(value, int))
        known = key in _READ | _OF_TRAINING or unset
        if (value not in allowed) if allowed else not known:
            rule = "is not supported by jaxpar's adapters"
            fix = f"use {' or '.join(map(repr, allowed))}" if allowed else "train without it"
            raise ConfigError(f"{ADAPTER_CONFIG} {key}", value, rule, fix)
    return values


def lora_of(values: Values, m: Model) -> LoraConfig:
    """Convert PEFT's config of adapters to a LoraConfig.

    Args:     m: the base model.
    Raises:   ConfigError that names a key with an unsupported value.
    """
    rank, alpha, targets = (values.get(key) for key in ("r", "lora_alpha", "target_modules"))
    for key, value, kind in (("r", rank, int), ("lora_alpha", alpha, int | float)):
        if not isinstance(value, kind) or isinstance(value, bool) or value <= 0:
            rule = "must be a number above 0"
            fix = "use the value of the training"
            raise ConfigError(f"{ADAPTER_CONFIG} {key}", value, rule, fix)
    there = list(targets_of(m))
    known = isinstance(targets, list) and all(t in there for t in targets)
    if not known or not targets:
        rule = f"must be a list of names from {', '.join(there)}"
        fix = "train adapters for only these"
        raise ConfigError(f"{ADAPTER_CONFIG} target_modules", targets, rule, fix)
    return LoraConfig(
        rank=int(rank or 0),
        alpha=float(alpha or 0),
        rank_stabilized=bool(values.get("use_rslora")),
        targets=tuple(name for name in there if name in targets),
    )


def base_folder(values: Values, base: str | None) -> str:
    """Return the base model: `base`, or the one in adapter_config.json.

    Raises:   ConfigError when it is neither a published folder nor a name of the Hub.
    """
    named: Any = base or values.get("base_model_name_or_path")
    rule, fix = "is not the folder of a published model", "use that of the adapters' base model"
    if not isinstance(named, str):
        raise ConfigError("--base", named, rule, fix)
    if not (Path(named) / CONFIG_FILE).is_file() and not hub.is_name(named):
        raise ConfigError("--base", named, rule, fix)
    return named


def from_peft(
    folder: str | Path,
    run_dir: str | Path,
    log: Callable[[str], None],
    base: str | None = None,
    tolerance: float | None = selfcheck.TOLERANCE,
) -> Config:
    """Convert a published model and adapters to a run, which appears when it is complete.

    Args:     base: folder of the model. None: the one in adapter_config.json. log: called with each
              result. tolerance: of the self-check; None to skip it.
    Returns:  the run's config.
    Raises:   ConfigError that names the key, tensor or file that is wrong, and when the run's
              folder is in use; CheckFailed.
    """
    folder, run_dir = Path(folder), Path(run_dir)
    values = read_adapter_config(folder)
    source = open_source(base_folder(values, base), "--base")
    cfg = source_config(source, run_dir)
    cfg = dataclasses.replace(cfg, lora=lora_of(values, cfg.model))
    check(cfg)
    adapters = _adapters(folder, source, cfg)
    check_tokenizer(source.folder, log, strict=tolerance is not None)
    with new_run(cfg, [source, adapters], log) as temporary:
        if tolerance is not None:
            run = unmerged_reader(open_run(temporary, cfg, weights_alone.STEP), cfg)
            reader = lambda s: selfcheck.published_reader(s.entries, s.tensors)  # noqa: E731
            published = with_factor(either(reader(adapters), reader(source)), cfg)
            what = "the published files"
            selfcheck.compare_readers(cfg.model, run, published, what, tolerance, log, cfg.lora)
    return cfg


def _adapters(folder: Path, source: PublishedModel, cfg: Config) -> PublishedModel:
    """Open the adapters of a folder, and check that all tensors exist, with their shapes.

    Raises:   ConfigError as `check_tensors`, and when the file is missing or a pickle.
    """
    file = folder / ADAPTER_FILE
    if not file.is_file():
        rule = f"has no {ADAPTER_FILE}"
        fix = "save the adapters with PEFT's safe_serialization, its default"
        raise ConfigError("DIR", str(folder), rule, fix)
    tensors = Tensors(read_header(file))
    entries = adapter_entries(source.family, cfg)
    check_tensors(tensors, entries)
    return dataclasses.replace(source, name=str(folder), tensors=tensors, entries=entries)
