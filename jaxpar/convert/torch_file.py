"""`to-torch`: exports a checkpoint as a plain PyTorch state_dict, which `torch_model.py` loads.

torch.save writes a pickle; jaxpar runs none. torch is an optional package: it is imported only
here, and by the checks that use `transformers` and PEFT.
"""

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxpar.config import ConfigError, ModelConfig
from jaxpar.config.packages import require_package
from jaxpar.config.rules.paths import check_path
from jaxpar.convert.hf import exporting
from jaxpar.convert.hf.exporting import Export
from jaxpar.convert.hf.family import Family
from jaxpar.convert.hf.tensor_layout import Entry
from jaxpar.convert.new_folder import require_place, require_space
from jaxpar.convert.safetensors_file import Stored, create_file
from jaxpar.runtime.progress import meter

#: Allowed suffixes of the file's name.
ENDINGS = (".pt", ".pth")

#: Fields that `torch_model.py` does not read, and their only values.
FIXED = {
    "attention": "softmax",
    "attention_chunk": None,
    "qk_norm_gain": True,
    "nope_query_beta": 0.0,
    "router_scales_input": False,
}

_LAYER = "layers.{L}."

#: The names in `torch_model.py`, for all parameters that a model can have.
PLAIN = Family(
    model_type="plain",
    architecture="Decoder",
    entries=(
        Entry("embed", "embed.weight", "VD", "V D"),
        Entry("final_norm", "norm.weight", "D", "D"),
        Entry("final_norm_bias", "norm.bias", "D", "D"),
        Entry("positions", "positions.weight", "ZD", "Z D"),
        Entry("head", "head.weight", "DV", "V D"),
        Entry("layers/attn_norm", _LAYER + "attn_norm.weight", "LD", "D"),
        Entry("layers/wq", _LAYER + "q.weight", "LDHK", "HK D"),
        Entry("layers/wk", _LAYER + "k.weight", "LDGK", "GK D"),
        Entry("layers/wv", _LAYER + "v.weight", "LDGK", "GK D"),
        Entry("layers/wo", _LAYER + "o.weight", "LHKD", "D HK"),
        Entry("layers/bq", _LAYER + "q.bias", "LHK", "HK"),
        Entry("layers/bk", _LAYER + "k.bias", "LGK", "GK"),
        Entry("layers/bv", _LAYER + "v.bias", "LGK", "GK"),
        Entry("layers/bo", _LAYER + "o.bias", "LD", "D"),
        Entry("layers/q_norm", _LAYER + "q_norm.weight", "LK", "K"),
        Entry("layers/k_norm", _LAYER + "k_norm.weight", "LK", "K"),
        Entry("layers/q_norm", _LAYER + "q_norm.weight", "LHK", "HK"),
        Entry("layers/k_norm", _LAYER + "k_norm.weight", "LGK", "GK"),
        Entry("layers/sinks", _LAYER + "sinks", "LH", "H"),
        Entry("layers/mlp_norm", _LAYER + "mlp_norm.weight", "LD", "D"),
        Entry("layers/attn_norm_bias", _LAYER + "attn_norm.bias", "LD", "D"),
        Entry("layers/mlp_norm_bias", _LAYER + "mlp_norm.bias", "LD", "D"),
        Entry("layers/attn_post_norm", _LAYER + "attn_post_norm.weight", "LD", "D"),
        Entry("layers/mlp_post_norm", _LAYER + "mlp_post_norm.weight", "LD", "D"),
        Entry("layers/w_gate", _LAYER + "mlp.gate.weight", "LDF", "F D"),
        Entry("layers/w_up", _LAYER + "mlp.up.weight", "LDF", "F D"),
        Entry("layers/w_down", _LAYER + "mlp.down.weight", "LFD", "D F"),
        Entry("layers/b_gate", _LAYER + "mlp.gate.bias", "LF", "F"),
        Entry("layers/b_up", _LAYER + "mlp.up.bias", "LF", "F"),
        Entry("layers/b_down", _LAYER + "mlp.down.bias", "LD", "D"),
        Entry("layers/router", _LAYER + "mlp.router.weight", "LDE", "E D"),
        Entry("layers/b_router", _LAYER + "mlp.router.bias", "LE", "E"),
        Entry("layers/router_bias", _LAYER + "mlp.router_bias", "LE", "E"),
        Entry("layers/w_shared_gate", _LAYER + "mlp.shared.gate.weight", "LDS", "S D"),
        Entry("layers/w_shared_up", _LAYER + "mlp.shared.up.weight", "LDS", "S D"),
        Entry("layers/w_shared_down", _LAYER + "mlp.shared.down.weight", "LSD", "D S"),
        Entry("layers/w_gate", _LAYER + "mlp.experts.{E}.gate.weight", "LEDF", "F D"),
        Entry("layers/w_up", _LAYER + "mlp.experts.{E}.up.weight", "LEDF", "F D"),
        Entry("layers/w_down", _LAYER + "mlp.experts.{E}.down.weight", "LEFD", "D F"),
        Entry("layers/b_gate", _LAYER + "mlp.experts.{E}.gate.bias", "LEF", "F"),
        Entry("layers/b_up", _LAYER + "mlp.experts.{E}.up.bias", "LEF", "F"),
        Entry("layers/b_down", _LAYER + "mlp.experts.{E}.down.bias", "LED", "D"),
    ),
    fields={f.name: f.name for f in dataclasses.fields(ModelConfig) if f.name not in FIXED},
    fixed=FIXED,
    defaults={},
    sliding=True,
    query_beta=True,
)


def check_file(file: Path) -> None:
    """Raises:   ConfigError for a file that cannot be written, or has another suffix."""
    check_path("FILE", str(file), "use a new file")
    if file.suffix not in ENDINGS:
        rule, better = f"must end in {' or '.join(ENDINGS)}", file / "model.pt"
        if file.name and not file.is_dir():
            better = file.with_suffix(".pt")
        raise ConfigError("FILE", str(file), rule, f"use {better}")
    for path in (file, file.with_suffix(".json")):
        if path.exists():
            raise ConfigError("FILE", str(path), "already exists", "use a new file")
    require_place("FILE", file)


def require_torch() -> None:
    """Raises:   ConfigError when torch is not installed."""
    require_package("torch", "to-torch", None, "use `to-hf`, which does not need it")


def to_torch(export: Export, file: Path, log: Callable[[str], None]) -> None:
    """Write FILE.pt, a dict of tensors by name, and FILE.json, the model's fields.

    The weights are first written to a temporary file, which torch.save reads through a memory map.
    This needs little memory, but twice the disk space. Both files appear when they are complete.

    Args:     export: from `exporting.open_export` with PLAIN. log: called with each result.
    Raises:   ConfigError as `check_file`, or when torch is not installed.
    """
    check_file(file)
    require_torch()
    about = file.with_suffix(".json")
    require_space("FILE", file, 2 * export.num_bytes)
    file.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=file.absolute().parent) as folder:
        stored = create_file(Path(folder) / "weights", export.shapes(), export.dtype)
        with meter(sum(s.num_bytes for s in stored.values())) as progress:
            for entry in export.entries:
                exporting.copy_out(export, entry, stored, progress)
            save(stored, Path(folder) / file.name)
            log(f"wrote {progress.summary(max(s.num_bytes for s in stored.values()))}")
        fields = dataclasses.asdict(export.config.model)
        (Path(folder) / about.name).write_text(json.dumps(fields, indent=2) + "\n")
        (Path(folder) / about.name).rename(about)
        (Path(folder) / file.name).rename(file)


def save(stored: dict[str, Stored], file: Path) -> None:
    """Save tensors of a file with `torch.save`."""
    import torch

    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

    def tensor(at: Stored) -> torch.Tensor:
        # torch does not know NumPy's bfloat16: pass the bytes, and view them as the dtype.
        raw = np.memmap(at.file, np.uint8, "r+", at.offset, (at.num_bytes,))
        return torch.from_numpy(raw).view(kinds[at.dtype]).reshape(at.shape)

    torch.save({name: tensor(at) for name, at in stored.items()}, file)
