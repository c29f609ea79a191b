"""--model.from: the model of a published config.json, and what is refused by name."""

import json

import pytest

from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.command_line import ConfigArguments, read_config
from jaxpar.convert.hf.composed import difference
from jaxpar.convert.hf.config import family_of, model_of
from jaxpar.convert.shape import model_from
from jaxpar.model.flops import num_params
from tests.convert import tiny
from tests.tiny import TINY

QWEN3, GEMMA2, GPT2 = (tiny.MODELS[name] for name in ("qwen3", "gemma2", "gpt2"))

#: config.json as published, and the number of parameters.
PUBLISHED = {
    "Llama-3.2-1B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.45.0.dev0",
            "use_cache": True,
            "vocab_size": 128256,
        },
        1_235_814_400,
    ),
    "gpt2": (
        {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": 50256,
            "embd_pdrop": 0.1,
            "eos_token_id": 50256,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 50257,
        },
        124_439_808,
    ),
    "pythia-160m": (
        {
            "architectures": ["GPTNeoXForCausalLM"],
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_act": "gelu",
            "hidden_size": 768,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048,
            "model_type": "gpt_neox",
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "transformers_version": "4.24.0",
            "use_cache": True,
            "use_parallel_residual": True,
            "vocab_size": 50304,
        },
        162_322_944,
    ),
    "gemma-2-2b": (
        {
            "architectures": ["Gemma2ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": 50.0,
            "bos_token_id": 2,
            "cache_implementation": "hybrid",
            "eos_token_id": 1,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2304,
            "initializer_range": 0.02,
            "intermediate_size": 9216,
            "max_position_embeddings": 8192,
            "model_type": "gemma2",
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "num_key_value_heads": 4,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "torch_dtype": "float32",
            "transformers_version": "4.42.4",
            "use_cache": True,
            "vocab_size": 256000,
        },
        2_614_341_888,
    ),
}


def write(folder, values) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    text = values if isinstance(values, str) else json.dumps(values)
    (folder / "config.json").write_text(text)
    return str(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name, tmp_path, capsys):
    values, parameters = PUBLISHED[name]
    like = replace(TINY, **{"model.init_std": 0.01}).model
    model = model_from(write(tmp_path / name, values), values["model_type"], like)
    assert num_params(model) == parameters
    assert model.init_std == 0.01
    (line,) = capsys.readouterr().err.splitlines()
    shown = f"(family {values['model_type']}): {parameters:,} parameters; num_layers "
    assert line.startswith(f"model from {tmp_path / name} ") and shown in line


@pytest.mark.parametrize("name", tiny.MODELS)
def test_every_family(name, tmp_path):
    values = tiny.MODELS[name]
    found = model_from(write(tmp_path / "m", values), None, TINY.model)
    wanted = model_of(values, family_of(values))
    assert difference(found, wanted) is None


def test_the_command_line_fills_the_model_before_other_options(tmp_path):
    folder = write(tmp_path / "m", QWEN3)
    args = ["quickstart", "--model.num-layers", "3", "--model.from", folder, "--set"]
    args += ["model.family=qwen3", "train.seed=5"]
    cfg = read_config(args, model_from=model_from)
    assert (cfg.model.num_layers, cfg.model.d_model, cfg.train.seed) == (3, 32, 5)
    assert cfg.model.layers[0].mixer.qk_norm and cfg.model.vocab_size == 64
    args = ["quickstart", f"--model.from={folder}"]
    cfg = read_config(args, model_from=model_from)
    assert len(cfg.model.layers) == 2


def test_one_option_starts_from_a_published_model(tmp_path):
    folder, data = write(tmp_path / "m", QWEN3), ["--data.path", "data/stdlib"]
    made = [
        ConfigArguments.of([*start, f"--from={folder}", *data], "train").asked(model_from)
        for start in (["finetune"], [])
    ]
    assert made[0] == made[1] and made[0].model.d_model == 32
    assert made[0].run.init_from == folder and made[0].optimizer.learning_rate == 1e-5
    cfg = ConfigArguments.of(["quickstart", "--from", folder], "train").asked(model_from)
    assert (cfg.model, cfg.run.init_from) == (made[0].model, folder)


#: Changes to a good config.json of a family, and what the error says.
FILES = [
    (QWEN3, {"num_hidden_layers": None}, "num_hidden_layers = None: must be int"),
    (QWEN3, {"num_hidden_layers": "2"}, "num_hidden_layers = '2': must be int"),
    (QWEN3, {"num_hidden_layers": 2.5}, "num_hidden_layers = 2.5: must be int"),
    (QWEN3, {"hidden_size": [32]}, r"hidden_size = \[32\]: must be int"),
    (QWEN3, {"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5': must be float"),
    (QWEN3, {"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no': must be bool"),
    (QWEN3, {"hidden_act": "relu"}, "hidden_act = 'relu': is not supported"),
    (QWEN3, {"architectures": ["MambaForCausalLM"]}, "architectures = .*is not an architecture"),
    (QWEN3, {"architectures": [], "model_type": "t5"}, "architectures = 't5': is not an archit"),
    (QWEN3, {"architectures": "Qwen3ForCausalLM"}, "architectures = .*must be a list of names"),
    (QWEN3, {"mixer_kind": "mamba"}, "mixer_kind = 'mamba': is not a key of qwen3 that jaxpar"),
    (QWEN3, {"logit_scale": 0.5}, "logit_scale = 0.5: is not a key of qwen3 that jaxpar knows"),
    (QWEN3, {"num_experts": 8}, "num_experts = 8: is not a key of qwen3"),
    (QWEN3, {"alibi": True}, "alibi = True: is not a key of qwen3"),
    (QWEN3, {"use_qk_norm": True}, "use_qk_norm = True: is not supported by jaxpar"),
    (QWEN3, {"quantization_config": {"bits": 4}}, "quantization_config = .*not supported"),
    (QWEN3, {"is_encoder_decoder": True}, "is_encoder_decoder = True: is not supported"),
    (QWEN3, {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type = 'dynamic': is a RoPE"),
    (QWEN3, {"rope_parameters": 5}, "rope_parameters = 5: must be an object"),
    (QWEN3, {"layer_types": ["full_attention"]}, "layer_types = .*names 1 layers"),
    (QWEN3, {"torch_dtype": "int4"}, "dtype = 'int4': is not a dtype that jaxpar reads"),
    (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention = True: is not"),
    (GEMMA2, {"attn_logit_softcapping": "50"}, "attn_logit_softcapping = '50': must be float"),
    (GEMMA2, {"hidden_activation": "gelu"}, "hidden_activation = 'gelu': is not supported"),
    (GEMMA2, {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "repeating pattern"),
    (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
    (GPT2, {"activation_function": "relu"}, "activation_function = 'relu': is not supported"),
    (GPT2, {"n_positions": "many"}, "n_positions = 'many': must be int"),
    (GPT2, {"add_cross_attention": True}, "add_cross_attention = True: is not supported"),
]
#: Options, after a good folder is named DIR, and what the error says.
OPTIONS = [
    ("--model.from", r"model\.from = '': needs a value"),
    ("--model.from --train.seed 3", r"model\.from = '': needs a value"),
    ("--from", r"from = '': needs a value"),
    ("--from DIR --model.from DIR", r"model\.from = .*is given twice"),
    ("--model.from DIR --model.from DIR", r"model\.from = .*is given twice"),
    ("--model.family qwen3", r"model\.family = 'qwen3': needs --model\.from"),
    ("--model.from DIR --model.family", r"model\.family = '': needs a value"),
    ("--model.from DIR --model.family llama", r"model\.family = 'llama': is not the family of"),
    ("--model.from DIR --model.family mamba", r"model\.family = 'mamba': is not a family that"),
    ("--model.from DIR/none", r"model\.from = .*is not a folder"),
    ("--model.from DIR/config.json", r"config\.json|is not a folder"),
    ("--model.from DIR --model.layers.mixer.head-dim 15", r"head_dim = 15: must be even"),
    ("--model.form DIR", r"model\.form = .*is not a field of the config"),
]
TEXTS = ["", "[]", "{", '{"a": 1', "null"]
BAD = [*FILES, *((None, text, r"config\.json = ") for text in TEXTS), *((0, *o) for o in OPTIONS)]


@pytest.mark.parametrize(("good", "bad", "said"), BAD)
def test_it_is_refused_by_name(good, bad, said, tmp_path):
    values = QWEN3 if good == 0 else bad if good is None else good | bad
    folder = write(tmp_path / "m", values)
    options = bad if good == 0 else "--model.from DIR"
    args = ["quickstart", *options.replace("DIR", folder).split()]
    with pytest.raises(ConfigError, match=said) as caught:
        read_config(args, model_from=model_from)
    assert "\n" not in str(caught.value) and caught.value.fix


def test_a_program_that_cannot_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.from = .*is not an option of this program"):
        read_config(["quickstart", "--model.from", str(tmp_path)])
    assert Config() == replace(Config())
