"""Logits of tiny published models by `transformers`: python scripts/make_hf_goldens.py

Needs torch and transformers, and nothing of jaxpar; writes tests/convert/goldens/NAME.npy, float32
[tokens, vocabulary], for each model of tests/convert/tiny.py. The tests compare our logits with
them where torch is absent.
"""

import importlib.util
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

TESTS = Path(__file__).resolve().parents[1] / "tests" / "convert"


def load_tiny():
    """tests/convert/tiny.py as a module."""
    spec = importlib.util.spec_from_file_location("tiny", TESTS / "tiny.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """float32 [tokens, vocabulary] of a model's folder. Attention is the plain one."""
    model, about = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {what: names for what, names in about.items() if names}
    assert not wrong, wrong
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens)).logits[0].numpy()


def main() -> None:
    """Write every golden file."""
    torch.use_deterministic_algorithms(True)
    tiny = load_tiny()
    for name, values in tiny.MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = logits(tiny.write_folder(Path(folder), values), tiny.tokens(values))
        np.save(TESTS / "goldens" / f"{name}.npy", found)
        print(f"{name}: {found.shape}, largest {np.abs(found).max():.3f}")


if __name__ == "__main__":
    main()
