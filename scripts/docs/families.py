"""Makes the table of families of published models, and of their tests, in docs/architectures.md.

    python scripts/docs/families.py --write

Rows are the families of jaxpar/convert/hf/families. Which families a test covers is read from its
parameters, the names of tiny models (tests/convert/tiny_models.py). To add a family, add a line to
ROWS, and a tiny model.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the tests, for their parameters

from jaxpar.config.config_file import known_configs  # noqa: E402
from jaxpar.convert.hf.families import FAMILIES  # noqa: E402
from scripts.docs.generated_table import run  # noqa: E402
from tests.convert import test_goldens, tiny_models  # noqa: E402
from tests.meshes import test_families  # noqa: E402

PAGE, MARK = "architectures.md", "families"
GOLDENS = ROOT / "tests" / "convert" / "goldens"

#: By `model_type`: the models, the configs of jaxpar with their shape, and what they have beyond a
#: plain Llama.
ROWS: dict[str, tuple[str, str, str]] = {
    "llama": (
        "Llama 2 to 3.3",
        "llama_1b llama3_8b llama3_70b llama3_3_70b llama3_405b llama_1b_long/128k",
        "RoPE scaling, tied embeddings, biases",
    ),
    "mistral": ("Mistral 7B and similar", "", "sliding window"),
    "qwen2": ("Qwen2, Qwen2.5", "", "biases on queries, keys, values"),
    "qwen3": ("Qwen3 (dense)", "", "QK norm"),
    "mixtral": ("Mixtral 8x7B and similar", "mixtral_8x7b", "experts, normalized expert weights"),
    "qwen3_moe": ("Qwen3-30B-A3B and similar", "qwen3_30b_a3b", "QK norm, experts in every layer"),
    "olmoe": (
        "OLMoE-1B-7B and similar",
        "olmoe_1b_7b",
        "QK norm over all heads (`qk_norm.over` all), expert weights that are not normalized",
    ),
    "dots1": (
        "dots.llm1",
        "",
        "QK norm, shared experts, dense first layers, a sigmoid router with groups, bias and scale",
    ),
    "glm4_moe": (
        "GLM-4.5 to 4.7",
        "",
        "as `dots1`, but QK norm only in some, and RoPE on half of each head; modules of "
        "[multi-token prediction](#multi-token-prediction)",
    ),
    "gemma3_text": (
        "Gemma 3 (text)",
        "gemma_3/270m gemma_3/1b gemma_3/4b gemma_3/12b gemma_3/27b",
        "post-norms, two kinds of layers with two RoPEs, GeGLU, scaled embeddings",
    ),
    "gemma4_text": (
        "Gemma 4 (text, dense)",
        "gemma_4/31b",
        "[layers of two shapes of attention](#local-and-global-attention-gemma-4), in "
        "both forms of their keys. E2B and E4B (`hidden_size_per_layer_input`, "
        "`num_kv_shared_layers`) and experts (26B-A4B) are refused",
    ),
    "deepseek_v2": (
        "DeepSeek-V2-Lite and similar",
        "deepseek_v2_lite",
        "[latent attention](#latent-attention), shared experts, dense first layers, expert "
        "weights that are not normalized. Routers that choose among all experts "
        "(`topk_method` greedy); the larger DeepSeek-V2, with groups, is refused",
    ),
    "deepseek_v3": (
        "DeepSeek-V3, V3.1, R1, Moonlight-16B-A3B",
        "deepseek_v3 moonlight_16b_a3b",
        "latent attention, a router as in `dots1`, modules of [multi-token "
        "prediction](#multi-token-prediction); weights in float8",
    ),
    "kimi_k2": ("Kimi K2", "kimi_k2", "as `deepseek_v3`"),
    "qwen3_next": (
        "Qwen3-Next-80B-A3B",
        "qwen3_next_80b_a3b",
        "[Gated DeltaNet](#gated-deltanet) in three of four layers, gated attention, experts "
        "with a gated shared one. Tensors of multi-token prediction are left out",
    ),
    "qwen3_5_text": (
        "Qwen3.5 (text, dense)",
        "",
        "as `qwen3_next`, with a dense feed-forward. `mrope_section` and `mrope_interleaved` "
        "change nothing for text",
    ),
    "nemotron_h": (
        "Nemotron-H 8B to 56B, Nemotron Nano 2, Nemotron 3 Nano",
        "nemotron_h_8b nemotron_3_nano",
        "[Mamba-2](#mamba-2), attention, feed-forward and expert layers by "
        "`hybrid_override_pattern` or `layers_block_type`, no RoPE, relu squared, experts "
        "without a gate, a sigmoid router with groups, bias and scale. `moe_latent_size` "
        "(Nemotron 3 Super) is refused. Tensors of multi-token prediction are left out",
    ),
    "kimi_linear": (
        "Kimi-Linear-48B-A3B",
        "kimi_linear_48b_a3b",
        "[Kimi Delta Attention](#kimi-delta-attention) in three of four layers by "
        "`linear_attn_config`, latent attention without positions in the others, a dense "
        "first layer, experts as in `deepseek_v3`. Kimi K3's gates and latent experts are "
        "refused",
    ),
    "olmo2": (
        "OLMo 2",
        "",
        'norms only after attention and feed-forward (`norms="after"`), QK norm over all heads',
    ),
    "olmo3": (
        "OLMo 3",
        "",
        "as `olmo2`, with windows in three of four layers, and YaRN in the fourth",
    ),
    "olmo_hybrid": (
        "OLMo Hybrid",
        "olmo_hybrid_7b",
        "[Gated DeltaNet](#gated-deltanet) in three of four layers, with norms of inputs; the "
        "fourth as in `olmo3`, without windows. `rope_theta` null: no RoPE; a file that says "
        "neither is refused",
    ),
    "smollm3": ("SmolLM3", "", "no RoPE in every Nth layer"),
    "helium": ("Helium", "", "RoPE that rotates neighboring dims"),
    "gpt_oss": (
        "gpt-oss-20b, gpt-oss-120b",
        "gpt_oss_20b gpt_oss_120b",
        "attention sinks, windows in every second layer, YaRN, biases everywhere, experts "
        "with a clamped SwiGLU; weights in MXFP4",
    ),
    "phi3": (
        "Phi-3, Phi-4, Phi-4-mini",
        "phi_4 phi_4_mini",
        "queries, keys and values in one tensor, gate and up in another; LongRoPE on a part "
        "of each head",
    ),
    "granite": (
        "Granite 3 and 4 (dense)",
        "granite_4_1_3b",
        "factors of embeddings, branches, scores and logits (`model.embedding_multiplier` and "
        "others)",
    ),
    "gemma2": (
        "Gemma 2",
        "gemma_2/2b gemma_2/9b gemma_2/27b",
        "as `gemma3_text`, with one RoPE and without QK norm; caps of scores "
        "(`mixer.softcap`) and logits (`model.logits_softcap`)",
    ),
    "ministral3": (
        "Ministral 3 (text)",
        "ministral_3_8b",
        "YaRN, with queries that grow with the position (`rope.scaling.query_beta`)",
    ),
    "llama4_text": (
        "Llama 4 Scout, Maverick (text)",
        "llama4_scout",
        "[attention within chunks](#chunks), no RoPE in every fourth layer, QK norm without "
        "gain, one expert per token, whose input is scaled, and a shared one",
    ),
    "gpt2": (
        "GPT-2; GPT-3's block",
        "gpt3_175b",
        "LayerNorm, a feed-forward without gate (`Mlp`), learned positions, biases; matrices "
        "stored as [in, out]",
    ),
    "gpt_neox": (
        "Pythia, GPT-NeoX",
        "",
        "as `gpt2`, with RoPE on a part of each head, attention and feed-forward in parallel "
        "(`parallel`)",
    ),
    "starcoder2": ("StarCoder2", "", "as `gpt2`, with RoPE, grouped queries and windows"),
}

#: By what is tested: the test, the tiny models that it covers, and what it compares.
TESTS = {
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

#: Families that are another one under a `model_type` of their own.
SAME = {"kimi_k2": "deepseek_v3"}


def models_of(model_type: str) -> list[str]:
    """The tiny models of a family."""
    model_type = SAME.get(model_type, model_type)
    return [n for n, values in tiny_models.MODELS.items() if values["model_type"] == model_type]


def table() -> str:
    """Return the two tables as Markdown.

    Raises:   ValueError for a row without a family, or a config or test that does not exist.
    """
    known, configs = {f.model_type for f in FAMILIES}, known_configs().split(", ")
    if known != ROWS.keys():
        raise ValueError(f"rows and families differ: {', '.join(sorted(known ^ ROWS.keys()))}")
    lines = ["| `model_type` | models | configs | beyond a plain Llama |", "|---|---|---|---|"]
    for model_type, (models, shipped, beyond) in ROWS.items():
        if missing := set(shipped.split()) - set(configs):
            raise ValueError(f"{model_type}: no config {', '.join(sorted(missing))}")
        names = ", ".join(f"`{name}`" for name in shipped.split())
        lines.append(f"| `{model_type}` | {models} | {names} | {beyond} |")
    tests = ["| tested | what is compared | families without such a test |", "|---|---|---|"]
    for title, (file, test, covered, what) in TESTS.items():
        if f"def {test}(" not in (ROOT / file).read_text("utf-8"):
            raise ValueError(f"{file} has no {test}")
        without = [f"`{name}`" for name in ROWS if covered.isdisjoint(models_of(name))]
        tests.append(f"| {title} | {what} (`{file}`) | {', '.join(without) or 'none'} |")
    return "\n".join([*lines, "", *tests, ""])


if __name__ == "__main__":
    run(__doc__, PAGE, MARK, table)
