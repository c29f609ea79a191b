"""Write docs/families.md: what is tested of each published family.

    python scripts/docs/families.py --write

Rows are the families of jaxpar/convert/hf/families. A cell names the tiny models
(tests/convert/tiny_models.py) that a test covers, read from the test's own parameters. To add a
family, add a line to ROWS, and a tiny model.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the tests, for their parameters

from jaxpar.config.config_file import known_configs  # noqa: E402
from jaxpar.convert.hf.families import FAMILIES  # noqa: E402
from tests.convert import test_goldens, tiny_models  # noqa: E402
from tests.meshes import test_families  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
GOLDENS = ROOT / "tests" / "convert" / "goldens"

#: By `model_type`: the models, and the configs of jaxpar with their shape.
ROWS: dict[str, tuple[str, str]] = {
    "llama": (
        "Llama 2 to 3.3",
        "llama_1b llama3_8b llama3_70b llama3_3_70b llama3_405b llama_1b_long/128k",
    ),
    "mistral": ("Mistral 7B and similar", ""),
    "qwen2": ("Qwen2, Qwen2.5", ""),
    "qwen3": ("Qwen3 (dense)", ""),
    "mixtral": ("Mixtral 8x7B and similar", "mixtral_8x7b"),
    "qwen3_moe": ("Qwen3-30B-A3B and similar", "qwen3_30b_a3b"),
    "olmoe": ("OLMoE-1B-7B and similar", "olmoe_1b_7b"),
    "dots1": ("dots.llm1", ""),
    "glm4_moe": ("GLM-4.5 to 4.7", ""),
    "gemma3_text": ("Gemma 3 (text)", "gemma_3/270m gemma_3/1b gemma_3/4b gemma_3/12b gemma_3/27b"),
    "gemma4_text": ("Gemma 4 (text, dense)", "gemma_4/31b"),
    "deepseek_v2": ("DeepSeek-V2-Lite and similar", "deepseek_v2_lite"),
    "deepseek_v3": ("DeepSeek-V3, Moonlight", "deepseek_v3 moonlight_16b_a3b"),
    "kimi_k2": ("Kimi K2", "kimi_k2"),
    "qwen3_next": ("Qwen3-Next", "qwen3_next_80b_a3b"),
    "qwen3_5_text": ("Qwen3.5 (text, dense)", ""),
    "nemotron_h": (
        "Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano",
        "nemotron_h_8b nemotron_3_nano",
    ),
    "kimi_linear": ("Kimi Linear", "kimi_linear_48b_a3b"),
    "olmo2": ("OLMo 2", ""),
    "olmo3": ("OLMo 3", ""),
    "olmo_hybrid": ("OLMo Hybrid", "olmo_hybrid_7b"),
    "smollm3": ("SmolLM3", ""),
    "helium": ("Helium", ""),
    "gpt_oss": ("gpt-oss", "gpt_oss_20b gpt_oss_120b"),
    "phi3": ("Phi-3, Phi-4, Phi-4-mini", "phi_4 phi_4_mini"),
    "granite": ("Granite 3 and 4 (dense)", "granite_4_1_3b"),
    "gemma2": ("Gemma 2", "gemma_2/2b gemma_2/9b gemma_2/27b"),
    "ministral3": ("Ministral 3 (text)", "ministral_3_8b"),
    "llama4_text": ("Llama 4 Scout, Maverick (text)", "llama4_scout"),
    "gpt2": ("GPT-2; GPT-3's block", "gpt3_175b"),
    "gpt_neox": ("Pythia, GPT-NeoX", ""),
    "starcoder2": ("StarCoder2", ""),
}

#: Columns: title, the tests, the tiny models that they cover, and what they compare.
COLUMNS = {
    "train": (
        "tests/meshes/test_families.py",
        "test_gradients",
        {name for name, _ in test_families.CASES},
        "loss and gradients of three meshes with the plain model, in float32, within 1e-5",
    ),
    "import": (
        "tests/convert/test_goldens.py",
        "test_logits_are_those_of_transformers",
        {name for name in test_goldens.MODELS if (GOLDENS / f"{name}.npy").is_file()},
        "logits of 304 tokens with those of transformers, in float32, within 1e-5",
    ),
    "export": (
        "tests/convert/test_goldens.py",
        "test_round_trip_is_bitwise",
        set(test_goldens.MODELS),
        "every bit of every tensor after import and export",
    ),
    "LoRA": (
        "tests/meshes/test_families.py",
        "test_gradients_of_adapters",
        set(test_families.ADAPTED),
        "gradients of adapters on a mesh with the plain model, within 1e-5; of models with "
        "experts, only those of attention",
    ),
    "generate": (
        "tests/convert/test_goldens.py",
        "test_greedy_text_is_that_of_transformers",
        set(test_goldens.SAME_CACHE),
        "greedy text after six prompts, with that of transformers",
    ),
}

TOP = (
    "# Families\n\n"
    "A row is a family of published models. It can be trained from scratch, [imported and exported]"
    "(convert.md#families), tuned with [adapters](lora.md), and [sampled](generation.md), on any "
    "mesh. A cell names the tiny models of the family for which a test compares this; an empty one "
    "has no such test, or is not supported. [`--model.from`]"
    "(convert.md#a-published-models-shape) takes the shape of any other model of a family.\n"
)


#: Families that are another one under a `model_type` of their own.
SAME = {"kimi_k2": "deepseek_v3"}


def models_of(model_type: str) -> list[str]:
    """The tiny models of a family."""
    model_type = SAME.get(model_type, model_type)
    return [n for n, values in tiny_models.MODELS.items() if values["model_type"] == model_type]


def page() -> str:
    """The page's text.

    Raises:   ValueError for a row without a family, or a config or test that does not exist.
    """
    known, configs = {f.model_type for f in FAMILIES}, known_configs().split(", ")
    if known != ROWS.keys():
        raise ValueError(f"rows and families differ: {', '.join(sorted(known ^ ROWS.keys()))}")
    head = ["family", "models", "configs", *COLUMNS]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for model_type, (models, shipped) in ROWS.items():
        if missing := set(shipped.split()) - set(configs):
            raise ValueError(f"{model_type}: no config {', '.join(sorted(missing))}")
        cells = [f"`{model_type}`", models, ", ".join(f"`{name}`" for name in shipped.split())]
        own = models_of(model_type)
        for _, _, covered, _ in COLUMNS.values():
            cells.append(", ".join(name for name in own if name in covered))
        lines.append("| " + " | ".join(cells) + " |")
    tests = ["| column | what is compared | test |", "|---|---|---|"]
    for title, (file, test, _, what) in COLUMNS.items():
        if f"def {test}(" not in (ROOT / file).read_text("utf-8"):
            raise ValueError(f"{file} has no {test}")
        tests.append(f"| {title} | {what} | `{file}`, {test} |")
    return "\n".join([TOP, *lines, "", "## The tests", "", *tests, ""])


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/families.md")
    if parser.parse_args().write:
        PAGE.write_text(page(), "utf-8")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
