"""Runs of our own, exported: any mesh's checkpoint, any step, the family that fits, a tokenizer."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from jaxpar import config
from jaxpar.checkpoint.integrity import Damaged
from jaxpar.checkpoint.saved import checkpoint_folder
from jaxpar.checkpoint.saving import Checkpointer
from jaxpar.commands import call
from jaxpar.config import Config, ConfigError, Layer, Model, Norm, QkNorm, Rope, Router
from jaxpar.config.validate import resolve
from jaxpar.convert.hf import exporting, importing
from jaxpar.convert.hf.config import choose_family
from jaxpar.convert.hf.tokenizer import bytes_as_json, tokenizer_in, tokenizer_of_run
from jaxpar.data.tokenizer import ByteTokenizer
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step import state
from tests.checkpoint.test_checkpoint import write_dataset
from tests.slow import slow_but
from tests.tiny import ATTENTION, EXPERTS, GLU, STATE

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

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
    places = {
        "run.dir": str(folder / "run"),
        "data.path": write_dataset(folder / "data"),
    }
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
    file = max(
        (checkpoint_folder(cfg.run.dir) / "5").rglob("*"), key=lambda path: path.stat().st_size
    )
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


QK, BIASES = {"qk_norm": QkNorm()}, {"bias": True, "out_bias": True}
SIGMOID = replace(EXPERTS, router=Router(score="sigmoid", balancing_bias=True))
SHARED = replace(SIGMOID, num_shared_experts=1)
BIASED = replace(EXPERTS, expert=replace(GLU, bias=True), router=Router(linear_bias=True))
GELU = replace(GLU, activation="gelu")


def layer(feed_forward=GLU, name="layers", norms="before", **mixer) -> Layer:
    return Layer(name, replace(ATTENTION, **mixer), feed_forward, norms=norms)


def model(*period: Layer, **fields) -> Model:
    """A model of four layers."""
    return Model(d_model=16, vocab_size=32, layers=period * (4 // len(period)), **fields)


GEMMA = {"norm": Norm(offset=True), "embed_scale": True}
WIDE = layer(GELU, "global_layers", "around", **QK)
LOCAL = layer(GELU, "layers", "around", window=8, rope=Rope(theta=1e4), **QK)


@pytest.mark.parametrize(
    ("m", "family"),
    [
        (model(layer()), "llama"),
        (model(layer(replace(GLU, bias=True), **BIASES)), "llama"),
        (model(layer(window=8)), "mistral"),
        (model(layer(bias=True)), "qwen2"),
        (model(layer(bias=True, window=8)), "qwen2"),
        (model(layer(**QK)), "qwen3"),
        (model(layer(**QK, **BIASES)), "qwen3"),
        (model(WIDE, **GEMMA), "gemma3_text"),
        (model(LOCAL, WIDE, **GEMMA), "gemma3_text"),
        (model(layer(EXPERTS)), "mixtral"),
        (model(layer(replace(EXPERTS, router=Router(normalize=False)), **QK)), "qwen3_moe"),
        (model(layer(name="dense_layers", **QK), *[layer(SHARED, **QK)] * 3), "dots1"),
    ],
)
def test_the_family_that_fits(m, family):
    assert choose_family(m).model_type == family


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (layer(out_bias=True), r"no published family \(llama: .*mistral: .*qwen3: "),
        (layer(SIGMOID, **QK), r"dots1: Experts\.num_shared_experts = 0, .* least 1"),
        (layer(GELU), r"llama: model\.layers\.feed_forward\.activation = gelu, .*silu"),
        (layer(BIASED), r"mixtral: model\..*\.expert\.bias = True, but its models"),
    ],
)
def test_a_model_of_no_family(wrong, said):
    with pytest.raises(ConfigError, match=said):
        choose_family(model(wrong))
