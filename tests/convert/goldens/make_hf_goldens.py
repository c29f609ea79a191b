"""What `transformers` makes of tiny published models.

    python tests/convert/goldens/make_hf_goldens.py

Needs torch and transformers, and nothing of jaxpar; writes, for each model of
tests/convert/tiny.py, tests/convert/goldens/NAME.npy, logits float32 [tokens, vocabulary], and its
greedy text into greedy.json. The tests compare ours with them where torch is absent.
"""

import importlib.util
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

TESTS = Path(__file__).resolve().parents[1]


def load_tiny():
    """tests/convert/tiny.py as a module."""
    spec = importlib.util.spec_from_file_location("tiny", TESTS / "tiny.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(folder: Path):
    """A model's folder in float32, every tensor of it used. Attention is the plain one."""
    model, about = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {what: names for what, names in about.items() if names}
    assert not wrong, wrong
    return model.eval()


def logits(model, tokens: np.ndarray) -> np.ndarray:
    """float32 [tokens, vocabulary]."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits[0].numpy()


def greedy(model, prompt: np.ndarray, count: int) -> list[int]:
    """What `generate` goes on with from a prompt, no token being the end."""
    model.generation_config.eos_token_id = None
    mask = torch.ones(1, len(prompt), dtype=torch.int64)
    text = model.generate(
        torch.from_numpy(prompt)[None],
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=count,
        pad_token_id=0,
    )
    return text[0, len(prompt) :].tolist()


def main() -> None:
    """Write every golden file."""
    torch.use_deterministic_algorithms(True)
    tiny, texts = load_tiny(), {}
    for name, values in tiny.MODELS.items():
        tokens = tiny.tokens(values)
        with tempfile.TemporaryDirectory() as folder:
            model = load(tiny.write_folder(Path(folder), values))
        found = logits(model, tokens)
        prompts = [tokens[0, start:end] for start, end in tiny.PROMPTS]
        texts[name] = [greedy(model, prompt, tiny.NUM_GREEDY) for prompt in prompts]
        np.save(TESTS / "goldens" / f"{name}.npy", found)
        print(f"{name}: {found.shape}, largest {np.abs(found).max():.3f}")
    lines = ",\n".join(f" {json.dumps(name)}: {ids}" for name, ids in texts.items())
    (TESTS / "goldens" / "greedy.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
