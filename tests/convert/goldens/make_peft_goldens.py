"""What PEFT makes of tiny adapters.

    python tests/convert/goldens/make_peft_goldens.py

Needs torch, transformers and peft, and nothing of jaxpar; writes into tests/convert/goldens/peft
the folder that `save_pretrained` makes of the adapters of tests/convert/tiny.py, and the logits of
the model with them, float32 [tokens, vocabulary]. The tests compare ours with both.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import peft
import torch
from make_hf_goldens import TESTS, load, load_tiny, logits

OUTPUT = TESTS / "goldens" / "peft"


def main() -> None:
    """Write the folder and the logits."""
    torch.use_deterministic_algorithms(True)
    tiny = load_tiny()
    values = tiny.MODELS[tiny.ADAPTED]
    with tempfile.TemporaryDirectory() as folder:
        base = load(tiny.write_folder(Path(folder), values))
    plain = logits(base, tiny.tokens(values))
    about = peft.LoraConfig(task_type="CAUSAL_LM", **tiny.ADAPTERS)
    model = peft.get_peft_model(base, about).eval()
    given = {name: torch.from_numpy(a) for name, a in tiny.adapter_tensors().items()}
    result = peft.set_peft_model_state_dict(model, given)
    assert not result.unexpected_keys, result.unexpected_keys
    assert not [name for name in result.missing_keys if "lora" in name]
    found = logits(model, tiny.tokens(values))
    assert np.abs(found - plain).max() > 0.1
    model.save_pretrained(OUTPUT)
    (OUTPUT / "README.md").unlink(missing_ok=True)
    (OUTPUT / "adapter_model.safetensors").chmod(0o644)
    # The base lay in a temporary folder.
    config = json.loads((OUTPUT / "adapter_config.json").read_text())
    config |= {"base_model_name_or_path": None, "target_modules": sorted(config["target_modules"])}
    (OUTPUT / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    np.save(OUTPUT / "logits.npy", found)
    print(f"{found.shape}, largest {np.abs(found).max():.3f}, peft {peft.__version__}")


if __name__ == "__main__":
    main()
