"""`to-peft`: exports a run's adapters as a PEFT folder, without their base model.

    adapter_config.json          rank, alpha, names of modules
    adapter_model.safetensors    base_model.model.model.layers.{L}.self_attn.q_proj.lora_A.weight,
                                 [R, in], lora_B.weight, [out, R], and so on

Source:   https://huggingface.co/docs/peft/developer_guides/checkpoint; peft 0.21.2.
"""

import dataclasses
import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.checkpoint.saved import saved_steps
from jaxpar.components.weight import Weight, vector
from jaxpar.config import Config, ConfigError, present
from jaxpar.config.rules.paths import is_address
from jaxpar.convert import selfcheck
from jaxpar.convert.hf.composed import differences
from jaxpar.convert.hf.config import entry_table
from jaxpar.convert.hf.config_file import CONFIG_FILE
from jaxpar.convert.hf.exporting import Export, copy_out
from jaxpar.convert.hf.family import Family
from jaxpar.convert.hf.folder import Tensors
from jaxpar.convert.hf.importing import open_source
from jaxpar.convert.hf.tensor_layout import Entry
from jaxpar.convert.peft.merging import MergedArrays, unmerged_reader, with_factor
from jaxpar.convert.safetensors_file import DTYPES, NAMES, create_file, read_header
from jaxpar.model.flops import num_adapter_params
from jaxpar.model.lora import A, B, is_adapter
from jaxpar.runtime.files.atomic import new_folder
from jaxpar.runtime.files.outputs import refuse_used, require_space
from jaxpar.runtime.progress import meter
from jaxpar.stores.reading import run_at

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"

#: PEFT's prefix of module names.
_PREFIX = "base_model.model."


def adapter_entries(family: Family, cfg: Config) -> list[Entry]:
    """Return the entries of a run's adapters in PEFT's file.

    Raises:   ConfigError for a matrix that is a part of a published tensor.
    """
    found = []
    _check_names(family, cfg)
    for target, entry in _targeted(family, cfg):
        path = entry.path
        if entry.is_part:
            module = entry.name.split(".")[-2]
            rule = f"is a part of {module} in {family.model_type}, whose adapters are not of parts"
            fix = "export the merged model with `to-hf`"
            raise ConfigError("lora.targets", target, rule, fix)
        cut = len(entry.ours) - entry.columns
        inputs, outputs = entry.ours[1:cut], entry.ours[cut:]
        module = _PREFIX + entry.name.removesuffix("weight")
        sizes = {**entry.sizes, "R": present(cfg.lora).rank}
        of = functools.partial(Entry, sizes=sizes, layers=entry.layers)
        found += [
            of(path + A, f"{module}lora_A.weight", f"L{inputs}R", f"R {inputs}"),
            of(path + B, f"{module}lora_B.weight", f"LR{outputs}", f"{outputs} R"),
        ]
    return found


def _check_names(family: Family, cfg: Config) -> None:
    """Raises:   ConfigError when PEFT would take the name of a targeted matrix for another, too."""
    named = {_module(entry): target for target, entry in _targeted(family, cfg)}
    paths = {entry.path for _, entry in _targeted(family, cfg)}
    for entry in entry_table(family, cfg.model):
        is_matrix = _declared(entry, cfg).is_matrix and entry.path not in paths
        if is_matrix and _module(entry) in named:
            target = named[_module(entry)]
            rule = f"is {_module(entry)} in {family.model_type}, as is the matrix {entry.path}"
            fix = "target both, or export the merged model with `to-hf`"
            raise ConfigError("lora.targets", target, rule, fix)


def _module(entry: Entry) -> str:
    return entry.name.split(".")[-2]


def _targeted(family: Family, cfg: Config) -> list[tuple[str, Entry]]:
    """Return each target with the entries of its matrices, of every stack of layers."""
    table = entry_table(family, cfg.model)
    return [
        (target, entry)
        for target in present(cfg.lora).targets
        for entry in table
        if _declared(entry, cfg).adapter == target
    ]


def _declared(entry: Entry, cfg: Config) -> Weight:
    """Return the declaration of a layer's weight; one without outputs for other arrays."""
    stack, _, name = entry.path.partition("/")
    layers = cfg.model.stacks.get(stack)
    weights = layers[0].weights(cfg.model) if layers else {}
    return weights.get(name) or vector((), ())


def adapter_config(family: Family, cfg: Config, base: str | None) -> dict[str, Any]:
    """Make adapter_config.json, with only keys that every version of PEFT knows."""
    names = [entry.name.split(".")[-2] for _, entry in _targeted(family, cfg)]
    lora = present(cfg.lora)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "use_rslora": lora.rank_stabilized,
        "lora_dropout": 0.0,
        "target_modules": list(dict.fromkeys(names)),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def base_of(cfg: Config) -> str | None:
    """Return the published folder that a run started from; None if there is none."""
    named = cfg.run.init_from
    if not named:
        return None
    folder = run_at("run.init_from", named, checkpoints=False)
    return named if folder is None or not (is_address(named) or saved_steps(folder)) else None


def to_peft(
    export: Export,
    folder: Path,
    log: Callable[[str], None],
    base: str | None = None,
    tolerance: float | None = selfcheck.TOLERANCE,
) -> None:
    """Write the folder. It appears when it is complete and checked.

    Args:     export: of a run with adapters, in their dtype on disk. base: name or folder of the
              base model for PEFT. log: called with each result. tolerance: of the self-check; None
              to skip it.
    Raises:   ConfigError when the run has no adapters, or the folder is in use; CheckFailed.
    """
    cfg, arrays = export.config, export.arrays
    if not isinstance(arrays, MergedArrays):
        rule = "was trained without adapters: all its weights were trained"
        raise ConfigError("RUN", str(export.run), rule, "export it with `to-hf`")
    refuse_used("DIR", folder)
    size = DTYPES[NAMES[export.dtype]].itemsize * num_adapter_params(cfg.model, cfg.lora)
    require_space("DIR", folder, size)
    export = dataclasses.replace(
        export,
        arrays=arrays.own,
        entries=adapter_entries(export.family, cfg),
    )
    with new_folder(folder) as temporary:
        about = adapter_config(export.family, cfg, base)
        (temporary / ADAPTER_CONFIG).write_text(json.dumps(about, indent=2) + "\n")
        stored = create_file(temporary / ADAPTER_FILE, export.shapes(), export.dtype)
        with meter(sum(s.num_bytes for s in stored.values())) as progress:
            for entry in export.entries:
                copy_out(export, entry, stored, progress)
            log(f"wrote {progress.summary(max(s.num_bytes for s in stored.values()))}")
        if tolerance is not None:
            check(export, temporary, base, tolerance, log)


def check(
    export: Export,
    folder: Path,
    base: str | None,
    tolerance: float,
    log: Callable[[str], None],
) -> None:
    """Compare the logits of a run with those of its base model and the exported adapters.

    The base model is the published folder if it is on this machine, or else the run's weights. If
    PEFT is installed, it also computes the logits.

    Raises:   ConfigError when the base is another model; CheckFailed.
    """
    cfg = export.config
    own = unmerged_reader(export.arrays, cfg, export.dtype)
    written = Tensors(read_header(folder / ADAPTER_FILE))
    there = base is not None and (Path(base) / CONFIG_FILE).is_file()
    published, what = own, "the run's base model and the written adapters"
    if there:
        source = open_source(str(base))
        if other := [d.path for d in differences(cfg.model, source.config.model)]:
            rule = f"is another model than the run's: {', '.join(other)} differ"
            raise ConfigError("--base", base, rule, "use the model that the run started from")
        entries = entry_table(source.family, cfg.model)  # by the names of its layers
        published = selfcheck.published_reader(entries, source.tensors)
        what = f"{base} and the written adapters"

    adapters = selfcheck.published_reader(export.entries, written)
    read = with_factor(either(adapters, published), cfg)
    tokens, ours = selfcheck.compare_readers(cfg.model, own, read, what, tolerance, log, cfg.lora)
    left_out = why_no_peft(cfg) if there else "--base is not a folder on this machine"
    if left_out is None:
        theirs = peft_logits(Path(str(base)), folder, tokens)
        selfcheck.compare(theirs, ours, "peft", tolerance, log)
    else:
        log(f"not compared with peft: {left_out}")


def either(adapters: selfcheck.Read, model: selfcheck.Read) -> selfcheck.Read:
    """Make a function that reads adapters with one function, and all else with another."""
    return lambda path, box: (adapters if is_adapter(path) else model)(path, box)


def why_no_peft(cfg: Config) -> str | None:
    """Return why PEFT cannot compute the logits here; None if it can."""
    if importlib.util.find_spec("peft") is None:
        return "peft is not installed"
    return selfcheck.why_not_in_torch(cfg.model, "transformers")


def peft_logits(base: Path, folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Compute logits float32 [B, T, V] of a base model and adapters with PEFT in float32."""
    import peft
    import torch

    model = peft.PeftModel.from_pretrained(selfcheck.transformers_model(base), folder)
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens.astype(np.int64))).logits.float().numpy()
