"""Records what transformers makes of the config.json files in `tests/convert/published`.

    PYTHONPATH=. python tests/convert/goldens/make_published.py

Needs transformers 5.24.0 and PyTorch, and neither weights nor a network. It writes, for each:

    NAME/saved/config.json   the file as transformers saves it again
    NAME/parameters.json     the number of parameters of the model that it builds
    other_names.json         for each tiny model whose tensors have other names in memory, or in a
                             folder that transformers saved: their names and shapes
    NAME/two_forms.json      for each change of `two_forms.py`, how the saved file then differs, or
                             None if transformers refuses it
"""

import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.convert import tiny
from tests.convert.two_forms import changes

PUBLISHED = Path(__file__).resolve().parents[1] / "published"

#: transformers has Kimi K2 only as part of a model with images; its class is that of DeepSeek-V3.
TYPES = {"kimi_k2": "deepseek_v3"}


def saved(values: dict[str, Any]) -> dict[str, Any]:
    """The file as transformers saves it, through its class."""
    values = json.loads(json.dumps(values))
    kind = values.pop("model_type")
    config = transformers.CONFIG_MAPPING[TYPES.get(kind, kind)].from_dict(values)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        found = json.loads((Path(folder) / "config.json").read_text())
    return found | {"model_type": kind}


def parameters(values: dict[str, Any]) -> int:
    """The number of parameters of a model, without memory for them."""
    values = json.loads(json.dumps(values))
    kind = values.pop("model_type")
    values.pop("quantization_config", None)
    config = transformers.CONFIG_MAPPING[TYPES.get(kind, kind)].from_dict(values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The keys of `after` with another value, and those that it lacks, as null."""
    new = {k: v for k, v in after.items() if k not in before or before[k] != v}
    return new | {k: None for k in before if k not in after}


def record(folder: Path) -> None:
    """Write the files of a folder."""
    values = json.loads((folder / "config.json").read_text())
    again = saved(values)
    (folder / "saved").mkdir(exist_ok=True)
    write(folder / "saved" / "config.json", again)
    write(folder / "parameters.json", {"parameters": parameters(values)})
    forms: dict[str, Any] = {}
    for base, of_base in (("published", values), ("saved", again)):
        for name, (key, changed) in changes(of_base).items():
            try:
                found: Any = {"saved": differences(again, saved(changed))}
                if key == "head_dim":
                    found["parameters"] = parameters(changed)
            except Exception:
                found = None
            forms[f"{base}.{name}"] = found
    write(folder / "two_forms.json", forms)


def other_names(folder: str, values: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a tiny model that are not those of published files, in memory and saved."""
    model = AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**values))
    model.save_pretrained(folder)
    with safe_open(f"{folder}/model.safetensors", "pt") as file:
        in_file = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    in_memory = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    published, found = tiny.shapes(values), {}
    for where, tensors in (("memory", in_memory), ("saved", in_file)):
        new = {n: s for n, s in tensors.items() if published.get(n) != tuple(s)}
        new.pop("lm_head.weight", None) if values.get("tie_word_embeddings") else None
        found |= {where: new} if new else {}
    return found


def write(path: Path, values: dict[str, Any]) -> None:
    """Write an object with a line for each key."""
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in values.items())
    path.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    assert transformers.__version__ == "5.24.0", transformers.__version__
    names = {}
    for tiny_name, tiny_values in tiny.MODELS.items():
        with tempfile.TemporaryDirectory() as saved_in:
            if there := other_names(saved_in, tiny_values):
                names[tiny_name] = there
    write(PUBLISHED / "other_names.json", names)
    for config_file in sorted(PUBLISHED.glob("*/config.json")):
        if sys.argv[1:] and config_file.parent.name not in sys.argv[1:]:
            continue
        record(config_file.parent)
        print(config_file.parent.name, flush=True)
