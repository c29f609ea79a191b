"""What `transformers` makes of tiny published models.

    python tests/convert/goldens/make_hf_goldens.py [NAME ...]

Needs torch and transformers, and nothing of jaxpar; writes, for each model of
tests/convert/tiny.py or those named, tests/convert/goldens/NAME.npy, logits float32 [tokens,
vocabulary], and its greedy text into greedy.json. `deepseek_v3` and `gpt_oss` are one layer of
experts: its output, each token's experts and their weights, and for `gpt_oss` all gradients; `rope`
is the frequencies of every kind of RoPE, `mxfp4` is about weights of 4 bits, and `mtp` and
`mtp_glm` are the logits of a module for multi-token prediction. The tests compare ours with them
where torch is absent.
"""

import importlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

TESTS = Path(__file__).resolve().parents[1]


def load_tiny():
    """tests/convert/tiny.py as a module."""
    sys.path.insert(0, str(TESTS.parents[1]))
    return importlib.import_module("tests.convert.tiny")


def recur_token_by_token() -> None:
    """Have recurrent layers compute one token after the other, as transformers does in generation.

    Its chunks subtract sums of logarithms: in these models, they are off by 2e-5 from float64.
    """
    for name in ("qwen3_next", "qwen3_5", "olmo_hybrid"):
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        module.torch_chunk_gated_delta_rule = module.torch_recurrent_gated_delta_rule
    module = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
    module.chunk_kimi_delta_attention = module.recurrent_kimi_delta_attention


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


def deepseek_v3(tiny) -> dict[str, np.ndarray]:
    """What DeepSeek-V3's layer of experts computes: experts in ascending order, their weights."""
    import transformers.models.deepseek_v3.modeling_deepseek_v3 as published

    layer = published.DeepseekV3MoE(transformers.DeepseekV3Config(**tiny.DEEPSEEK_V3)).eval()
    w = {name: torch.from_numpy(a) for name, a in tiny.deepseek_v3_tensors().items()}
    x, count = w.pop("x"), tiny.DEEPSEEK_V3["n_routed_experts"]
    each = lambda e, n: w.pop(f"experts.{e}.{n}.weight")  # noqa: E731
    gate_up = [torch.cat([each(e, "gate_proj"), each(e, "up_proj")]) for e in range(count)]
    w["experts.gate_up_proj"] = torch.stack(gate_up)
    w["experts.down_proj"] = torch.stack([each(e, "down_proj") for e in range(count)])
    layer.load_state_dict(w)
    with torch.no_grad():
        _, weights, experts = layer.gate(x)
        order = experts.argsort(-1)
        found = {"out": layer(x[None])[0], "experts": experts.gather(1, order)}
    return {n: a.numpy() for n, a in (found | {"weights": weights.gather(1, order)}).items()}


def gpt_oss(tiny) -> dict[str, np.ndarray]:
    """What gpt-oss's layer of experts computes, and the gradient of every weight, by name."""
    import transformers.models.gpt_oss.modeling_gpt_oss as published

    config = transformers.GptOssConfig(**tiny.GPT_OSS)
    config._experts_implementation = "eager"
    layer = published.GptOssMLP(config)
    w = {name: torch.from_numpy(a) for name, a in tiny.gpt_oss_tensors().items()}
    x, d_out = w.pop("x").requires_grad_(), w.pop("d_out")
    layer.load_state_dict(w)
    _, weights, experts = layer.router(x)
    out = layer(x[None])[0][0]
    out.backward(d_out)
    order = experts.argsort(-1)
    found = {"out": out, "experts": experts.gather(1, order), "weights": weights.gather(1, order)}
    found |= {f"d_{name}": p.grad for name, p in [("x", x), *layer.named_parameters()]}
    return {n: a.detach().numpy() for n, a in found.items()}


def rope(tiny) -> dict[str, np.ndarray]:
    """The frequencies of every RoPE of the tests, and its factor of cosine and sine last."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

    found = {}
    for name, (head_dim, parameters, is_long) in tiny.ROPES.items():
        config = transformers.LlamaConfig(head_dim=head_dim, rope_parameters=dict(parameters))
        kind, length = parameters["rope_type"], 10**6 if is_long else None
        if kind == "default":
            frequencies, factor = Glm4MoeRotaryEmbedding.compute_default_rope_parameters(config)
        else:
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
        found[name] = np.append(frequencies.numpy(), np.float32(factor))
    return found


def mxfp4(tiny) -> dict[str, np.ndarray]:
    """A weight in MXFP4, dequantized; and the logits of gpt-oss with such experts."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    def dequantized(blocks, scales):
        parts = torch.from_numpy(blocks), torch.from_numpy(scales)
        return convert_moe_packed_tensors(*parts, dtype=torch.float32).numpy()

    values = tiny.MODELS["gpt_oss"]
    arrays = tiny.tensors(values)
    for name in tiny.experts_of_gpt_oss(values):
        found = tiny.as_mxfp4(arrays, name)
        arrays[name] = dequantized(found[f"{name}_blocks"], found[f"{name}_scales"])
    with tempfile.TemporaryDirectory() as folder:
        folder = tiny.write_folder(Path(folder), values)
        tiny.write_safetensors(folder / "model.safetensors", arrays)
        found = logits(load(folder), tiny.tokens(values))
    return {"weight": dequantized(**tiny.mxfp4_tensors()), "logits": found}


def mtp(tiny, name: str, kind: type) -> dict[str, np.ndarray]:
    """Logits of a model's module for multi-token prediction, of all tokens but the first."""
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    values = tiny.MODELS[name] | {"num_nextn_predict_layers": 1}
    of_module = rf"model\.layers\.{values['num_hidden_layers']}.*"
    kind._keys_to_ignore_on_load_unexpected = [of_module]
    ids = torch.from_numpy(tiny.tokens(values))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model = load(tiny.write_folder(Path(folder), values))
        modules = MtpModel.from_pretrained(model).eval()
        hidden = model.model(ids).last_hidden_state[:, :-1]
        positions, cache = torch.arange(1, ids.shape[1])[None], MtpCache(config=modules.config)
        h = modules.forward_layer(0, hidden, positions, cache, input_ids=ids[:, 1:])
        return {"logits": model.lm_head(h)[0].numpy()}


def mtp_of_deepseek(tiny) -> dict[str, np.ndarray]:
    """DeepSeek-V3's module."""
    return mtp(tiny, "deepseek_v3_whole", transformers.DeepseekV3ForCausalLM)


def mtp_of_glm(tiny) -> dict[str, np.ndarray]:
    """GLM-4.5's module."""
    return mtp(tiny, "glm4_moe", transformers.Glm4MoeForCausalLM)


#: Parts of models, by name.
LAYERS = {"deepseek_v3": deepseek_v3, "gpt_oss": gpt_oss, "rope": rope, "mxfp4": mxfp4}
LAYERS |= {"mtp": mtp_of_deepseek, "mtp_glm": mtp_of_glm}


def main() -> None:
    """Write the golden files of the models named, or of all."""
    torch.use_deterministic_algorithms(True)
    recur_token_by_token()
    tiny, goldens = load_tiny(), TESTS / "goldens"
    texts = json.loads((goldens / "greedy.json").read_text())
    names = sys.argv[1:] or [*tiny.MODELS, *LAYERS]
    for name in LAYERS.keys() & names:
        np.savez(goldens / f"{name}.npz", **LAYERS[name](tiny))
    for name in [name for name in names if name in tiny.MODELS]:
        values = tiny.MODELS[name]
        tokens = tiny.tokens(values)
        with tempfile.TemporaryDirectory() as folder:
            model = load(tiny.write_folder(Path(folder), values))
        found = logits(model, tokens)
        prompts = [tokens[0, start:end] for start, end in tiny.PROMPTS]
        texts[name] = [greedy(model, prompt, tiny.NUM_GREEDY) for prompt in prompts]
        np.save(goldens / f"{name}.npy", found)
        print(f"{name}: {found.shape}, largest {np.abs(found).max():.3f}")
    lines = ",\n".join(f" {json.dumps(name)}: {ids}" for name, ids in texts.items())
    (goldens / "greedy.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
