"""Runs of our own, exported: any mesh's checkpoint, any step, the family that fits, a tokenizer."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from jaxpar import config
from jaxpar.checkpoint import Checkpointer, Damaged, folder
from jaxpar.commands import call
from jaxpar.config import Config, ConfigError, ModelConfig
from jaxpar.config.validate import resolve
from jaxpar.convert.hf import exporting, importing
from jaxpar.convert.hf.config import choose_family
from jaxpar.convert.hf.tokenizer import bytes_as_json, tokenizer_in, tokenizer_of_run
from jaxpar.data.tokenizer import ByteTokenizer
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step import state
from tests.checkpoint.test_checkpoint import write_dataset
from tests.slow import slow_but
from tests.tiny import STATE

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

GEMMA = {
    "activation": "gelu",
    "post_norms": True,
    "norm_offset": True,
    "embed_scale": True,
    "qk_norm": True,
}

MESHES = {
    "one device": {},
    "fsdp and tensor": {"parallel.data": 2, "parallel.tensor": 2},
    "interleaved pipeline": {
        "parallel.pipeline": 2,
        "parallel.virtual_stages": 2,
        "parallel.num_microbatches": 2,
        "parallel.zero": 1,
    },
}


def silent(_: str) -> None:
    """Says nothing."""


def save_run(folder: Path, devices, steps=(3,), **values) -> tuple[Config, list]:
    """A run whose weights are its initial ones, saved at some steps; its config and weights."""
    places = {"run.dir": str(folder / "run"), "data.path": write_dataset(folder / "data")}
    cfg = config.replace(Config(), **({"parallel.data": 1} | STATE | places | values))
    n = cfg.parallel.pipeline * cfg.parallel.data * cfg.parallel.tensor
    cfg, mesh = resolve(cfg, n), make_mesh(cfg.parallel, devices[:n])
    saved = []
    with Checkpointer(cfg) as saver:
        for step in steps:
            now = config.replace(cfg, **{"train.seed": step})
            at = state.init_state(now, mesh).replace(step=jax.numpy.int32(step))
            saver.save(at, step, step)
            saved.append(jax.tree.map(np.asarray, state.to_logical(at, cfg).params))
    return cfg, saved


@pytest.mark.parametrize("name", slow_but(["one device"], MESHES))
def test_any_meshs_checkpoint(name, devices, tmp_path):
    cfg, (params,) = save_run(tmp_path, devices, **MESHES[name])
    export, said = exporting.open_export(cfg.run.dir, dtype="float32"), []
    checked = name == "fsdp and tensor"
    exporting.to_hf(export, tmp_path / "out", said.append, 1e-4 if checked else None)
    assert not checked or "largest difference 0.00e+00" in said[1]
    found = load_file(tmp_path / "out" / "model.safetensors")
    for i in range(cfg.model.num_layers):
        layer = f"model.layers.{i}."
        w = {n: a[i] for n, a in params["layers"].items()}
        H, K, D = w["wo"].shape
        at = lambda n, layer=layer: found[f"{layer}{n}.weight"]  # noqa: E731
        np.testing.assert_array_equal(at("self_attn.q_proj"), w["wq"].reshape(D, H * K).T)
        np.testing.assert_array_equal(at("self_attn.o_proj"), w["wo"].reshape(H * K, D).T)
        np.testing.assert_array_equal(at("mlp.down_proj"), w["w_down"].T)
        np.testing.assert_array_equal(at("input_layernorm"), w["attn_norm"])
    np.testing.assert_array_equal(found["lm_head.weight"], params["head"].T)


def test_any_step_in_the_runs_compute_dtype(devices, tmp_path):
    cfg, params = save_run(tmp_path, devices, steps=(3, 5))
    for step, wanted in zip((3, 5), params, strict=True):
        export = exporting.open_export(cfg.run.dir, step)
        assert export.dtype == "bfloat16" and export.step == step
        out = tmp_path / f"out-{step}"
        exporting.to_hf(export, out, silent)
        found = load_file(out / "model.safetensors")["model.embed_tokens.weight"]
        np.testing.assert_array_equal(found, wanted["embed"].astype(found.dtype))
        assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert exporting.open_export(cfg.run.dir).step == 5


@pytest.mark.parametrize("command", ["to-hf", "to-torch"])
def test_a_damaged_latest_step_is_passed_over(command, devices, tmp_path, capsys):
    """The one before is exported. Asked for by its number, a damaged step is refused."""
    cfg, _ = save_run(tmp_path, devices, steps=(3, 5))
    file = max((folder(cfg.run.dir) / "5").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    words = [command, cfg.run.dir, str(tmp_path / "out.safetensors"), "--no-check"]
    assert call("convert", words) == 0
    told = capsys.readouterr()
    assert ", of step 3" in told.out
    assert told.err.count("step 5 of ") == told.err.count("An earlier step is read instead") == 1
    with pytest.raises(Damaged, match="step 5 of "):
        call("convert", [command, cfg.run.dir, str(tmp_path / "other.safetensors"), "--step", "5"])
    assert not (tmp_path / "other.safetensors").exists()


def test_the_folder_is_complete(devices, tmp_path):
    cfg, _ = save_run(tmp_path, devices)
    (tmp_path / "data" / "meta.json").unlink()
    said: list[str] = []
    export = exporting.open_export(cfg.run.dir)
    exporting.to_hf(export, tmp_path / "bare", said.append)
    assert any(line.startswith("no tokenizer: data.path") for line in said)
    write_dataset(tmp_path / "data", eos_id=256)
    exporting.to_hf(export, tmp_path / "out", silent)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["eos_token_id"] == 256 and values["model_type"] == "llama"
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("a é\n").ids == list("a é\n".encode())
    importing.from_hf(tmp_path / "out", tmp_path / "again", silent)
    imported = tokenizer_of_run(tmp_path / "again", cfg)
    assert imported.eos_id == 256 and imported.encode("a é\n").tolist() == list("a é\n".encode())
    (tmp_path / "again" / "hf" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"RUN = .*has no tokenizer\.json"):
        tokenizer_of_run(tmp_path / "again", cfg)


def test_mup_is_written_as_granites_factors(devices, tmp_path):
    cfg, _ = save_run(tmp_path, devices, **{"model.mup.base_width": 8, "model.mup.base_depth": 2})
    exporting.to_hf(exporting.open_export(cfg.run.dir), tmp_path / "out", silent, 1e-4)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = {"logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.5}
    assert values["model_type"] == "granite" and values | wanted == values
    with pytest.raises(ConfigError, match=r"llama'.*residual_multiplier = 0\.5.*--family granite"):
        exporting.open_export(cfg.run.dir, family="llama")


TEXT = ByteTokenizer().eos_token


def with_tokenizer(folder: Path, about: bytes) -> Path:
    """A folder with a tokenizer of bytes, and what its tokenizer_config.json says."""
    bytes_as_json(ByteTokenizer()).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes(about)
    return folder


@pytest.mark.parametrize("eos", [TEXT, {"content": TEXT, "lstrip": False}, None])
def test_the_end_of_text_that_came_with_a_tokenizer(eos, tmp_path):
    about = json.dumps({"eos_token": eos}).encode()
    assert tokenizer_in(with_tokenizer(tmp_path, about), "runs/a").eos_id == 256


@pytest.mark.parametrize(
    "about",
    [b"{", b"[]", b"5", b"\xff", *(b'{"eos_token": %s}' % v for v in (b"5", b"{}", b"[]"))],
)
def test_a_damaged_tokenizer_config_is_refused(about, tmp_path):
    with pytest.raises(ConfigError, match=r"RUN = 'runs/a': .*_config\.json that cannot be read"):
        tokenizer_in(with_tokenizer(tmp_path, about), "runs/a")


def test_an_end_of_text_that_the_tokenizer_lacks(tmp_path):
    folder = with_tokenizer(tmp_path, b'{"eos_token": "</nope>"}')
    with pytest.raises(
        ConfigError, match=r"RUN = .*has none of </nope>\. Fix: copy .* with its eos_token in "
    ):
        tokenizer_in(folder, "runs/a")


def test_bytes_survive_as_a_published_tokenizer():
    ours = ByteTokenizer()
    theirs = bytes_as_json(ours)
    text = "def f(x):\n\treturn x  # ünï 漢字 \x00\x7f" + "".join(map(chr, range(0x250)))
    assert theirs.encode(text).ids == ours.encode(text).tolist()
    assert theirs.decode(theirs.encode(text).ids) == text
    assert theirs.get_vocab_size() == ours.vocab_size


@pytest.mark.parametrize(
    ("fields", "family"),
    [
        ({}, "llama"),
        ({"qkv_bias": True, "out_bias": True, "mlp_bias": True}, "llama"),
        ({"sliding_window": 8}, "mistral"),
        ({"qkv_bias": True}, "qwen2"),
        ({"qkv_bias": True, "sliding_window": 8}, "qwen2"),
        ({"qk_norm": True}, "qwen3"),
        ({"qk_norm": True, "qkv_bias": True, "out_bias": True}, "qwen3"),
        (GEMMA, "gemma3_text"),
        (GEMMA | {"sliding_window": 8, "global_every": 2, "local_rope_theta": 1e4}, "gemma3_text"),
        ({"num_experts": 4}, "mixtral"),
        ({"num_experts": 4, "qk_norm": True, "normalize_experts": False}, "qwen3_moe"),
        (
            {"num_experts": 4, "qk_norm": True, "router_score": "sigmoid", "router_bias": True}
            | {"num_shared_experts": 1, "dense_layers": 1},
            "dots1",
        ),
    ],
)
def test_the_family_that_fits(fields, family):
    assert choose_family(ModelConfig(**fields)).model_type == family


def test_a_model_of_no_family():
    with pytest.raises(ConfigError, match=r"no published family \(llama: .*mistral: .*qwen3: "):
        choose_family(ModelConfig(out_bias=True))
    sigmoid = {"num_experts": 4, "qk_norm": True, "router_score": "sigmoid", "router_bias": True}
    with pytest.raises(ConfigError, match=r"dots1: Experts\.num_shared_experts = 0, .* least 1"):
        choose_family(ModelConfig(**sigmoid))
    with pytest.raises(
        ConfigError,
        match=r"llama: model\.layers\.feed_forward\.activation = gelu, .*silu",
    ):
        choose_family(ModelConfig(activation="gelu"))
    with pytest.raises(
        ConfigError,
        match=r"mixtral: model\..*\.expert\.bias = True, but its models",
    ):
        choose_family(ModelConfig(num_experts=4, expert_bias=True, router_linear_bias=True))
