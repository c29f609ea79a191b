"""The PyTorch file: every parameter has a name in it; with torch, the same logits."""

import dataclasses
import importlib.util
import json
import types
from pathlib import Path

import numpy as np
import pytest

from jaxpar.commands import call
from jaxpar.config import ConfigError, ModelConfig
from jaxpar.config.layout import composition
from jaxpar.convert import torch_file, torch_names
from jaxpar.convert.hf import exporting, importing
from jaxpar.convert.hf.config import entry_table, family_of, model_of
from jaxpar.convert.hf.tensor_layout import tensor_names
from jaxpar.convert.torch_names import PLAIN
from tests.convert import tiny
from tests.slow import slow_but

WITHOUT_TORCH = importlib.util.find_spec("torch") is None


def test_every_parameter_has_a_name():
    every = {name: True for name in ("qk_norm", "qkv_bias", "out_bias", "mlp_bias")}
    others = (
        ModelConfig(sliding_window=8),
        ModelConfig(num_experts=4, post_norms=True),
        ModelConfig(qk_norm=True, qk_norm_over="all"),
        ModelConfig(num_experts=4, router_bias=True, num_shared_experts=1),
        ModelConfig(num_experts=4, router_linear_bias=True, expert_bias=True),
        ModelConfig(attention_sinks=True),
        ModelConfig(pre_norms=False, post_norms=True),
        ModelConfig(attention_gate=True, layer_pattern="GM*", post_norms=True, num_experts=4),
        ModelConfig(kv_lora_rank=16, num_experts=4, dense_layers=1, mtp_depth=1),
        ModelConfig(kv_lora_rank=16, q_lora_rank=16, layer_pattern="M*-"),
        ModelConfig(num_experts=4, num_shared_experts=1, shared_expert_gate=True),
        ModelConfig(layer_pattern="ME*-", num_experts=4, num_shared_experts=1, mlp_gate=False),
    )
    for model in (ModelConfig(), ModelConfig(**every), *others):
        assert torch_names.why_not(model) is None
        table = entry_table(PLAIN, model)
        names = [name for entry in table for name in tensor_names(entry)]
        assert len({*names}) == len(names)


def test_a_model_that_it_cannot_write():
    model = ModelConfig(attention="my.py:attention")
    with pytest.raises(ConfigError, match=r"RUN = .*to-torch \(model\.attention = ") as error:
        exporting.choose(PLAIN, model, {})
    assert "family" not in str(error.value) and "export it" not in str(error.value)
    with pytest.raises(ConfigError, match=r"fits no published family .*Fix: "):
        exporting.choose(None, model, {})
    with pytest.raises(ConfigError, match=r"fits no published family .*export it with `to-torch`"):
        exporting.choose(None, ModelConfig(out_bias=True), {})


def import_tiny(folder: Path, name: str) -> Path:
    """A tiny model, imported."""
    published = tiny.write_folder(folder / "model", tiny.MODELS[name])
    importing.from_hf(published, folder / "run", lambda _: None, tolerance=None)
    return folder / "run"


@pytest.mark.skipif(not WITHOUT_TORCH, reason="torch is installed")
def test_without_torch_it_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"needs torch, which is not installed"):
        call(
            "convert",
            ["to-torch", str(import_tiny(tmp_path, "llama3")), str(tmp_path / "model.pt")],
        )
    assert not (tmp_path / "model.pt").exists()


def test_names_that_cannot_be_are_refused(tmp_path, monkeypatch):
    export = exporting.open_export(import_tiny(tmp_path, "llama3"), family=PLAIN)
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    for name in ("x.json", "weights", "x.safetensors", "", ".", "..", "new/.."):
        with pytest.raises(ConfigError, match=r"FILE = .*must end in \.pt or \.pth.*use .*\.pt\."):
            torch_file.to_torch(export, Path(name), lambda _: None)
    with pytest.raises(ConfigError, match=r"FILE = 'run/model\.pt': already exists"):
        (tmp_path / "run" / "model.pt").touch()
        torch_file.to_torch(export, Path("run/model.pt"), lambda _: None)
    assert sorted(tmp_path.iterdir()) == before


def test_torch_computes_every_model():
    for name, values in tiny.MODELS.items():
        assert torch_names.why_not(model_of(values, family_of(values))) is None, name


#: One of each kind of layer.
QUICK = ["llama3_1", "gemma3", "qwen3_moe", "deepseek_v2", "deepseek_v3_whole", "nemotron_3"]
QUICK += ["qwen3_next"]


@pytest.mark.skipif(WITHOUT_TORCH, reason="torch is not installed")
@pytest.mark.parametrize("name", slow_but(QUICK, tiny.MODELS))
def test_torch_computes_the_same_logits(name, tmp_path):
    import torch

    from jaxpar.convert import torch_model

    run, file = import_tiny(tmp_path, name), tmp_path / "model.pt"
    assert call("convert", ["to-torch", str(run), str(file)]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "model.json", "model.pt", "run"]
    model = torch_model.load(file)
    with torch.no_grad():
        found = model(torch.from_numpy(tiny.tokens(tiny.MODELS[name])))[0].numpy()
    golden = np.load(Path(__file__).parent / "goldens" / f"{name}.npy")
    assert np.abs(found - golden).max() <= 1e-5
    wanted = exporting.open_export(run).config.model
    assert json.loads(file.with_suffix(".json").read_text())["num_layers"] == wanted.num_layers
    with pytest.raises(ConfigError, match=r"FILE = .*already exists"):
        call("convert", ["to-torch", str(run), str(file)])


@pytest.mark.skipif(WITHOUT_TORCH, reason="torch is not installed")
def test_multi_token_prediction_is_left_out(tmp_path, capsys):
    import torch

    from jaxpar.convert import torch_model

    values = tiny.MODELS["deepseek_v3_whole"] | {"num_nextn_predict_layers": 1}
    published = tiny.write_folder(tmp_path / "model", values)
    importing.from_hf(published, tmp_path / "run", lambda _: None, tolerance=None)
    assert call("convert", ["to-torch", str(tmp_path / "run"), str(tmp_path / "model.pt")]) == 0
    assert "left out multi-token prediction" in capsys.readouterr().out
    with torch.no_grad():
        model = torch_model.load(tmp_path / "model.pt")
        found = model(torch.from_numpy(tiny.tokens(values)))[0].numpy()
    golden = np.load(Path(__file__).parent / "goldens" / "deepseek_v3_whole.npy")
    assert np.abs(found - golden).max() <= 1e-5


#: Options of experts, as DeepSeek-V3 and gpt-oss have them.
DEEPSEEK_V3 = {
    "num_shared_experts": 2,
    "router_score": "sigmoid",
    "router_bias": True,
    "router_groups": 4,
    "router_groups_per_token": 2,
    "router_scale": 2.5,
}
GPT_OSS = {
    "expert_bias": True,
    "router_linear_bias": True,
    "activation": "clamped_swiglu",
    "swiglu_limit": 2.0,
}


@pytest.mark.skipif(WITHOUT_TORCH, reason="torch is not installed")
@pytest.mark.parametrize(
    "options", [DEEPSEEK_V3, DEEPSEEK_V3 | {"normalize_experts": False}, GPT_OSS], ids=str
)
def test_torch_computes_experts_as_the_model_does(options):
    import torch

    from jaxpar.convert.torch_model import TorchExperts
    from jaxpar.model.plain.components import plain

    m = ModelConfig(d_model=16, d_ff=8, num_experts=8, experts_per_token=3, **options)
    experts = TorchExperts(types.SimpleNamespace(**dataclasses.asdict(m)))
    rng = np.random.default_rng(0)
    state = {n: rng.normal(size=w.shape).astype("f") for n, w in experts.state_dict().items()}
    experts.load_state_dict({name: torch.from_numpy(w) for name, w in state.items()})
    w = {"router": state["router.weight"].T}
    others = {"b_router": "router.bias", "router_bias": "router_bias"}
    w |= {ours: state[name] for ours, name in others.items() if name in state}
    for name in ("gate", "up", "down"):
        each = [state[f"experts.{e}.{name}.weight"].T for e in range(m.num_experts)]
        w[f"w_{name}"] = np.stack(each)
        if m.num_shared_experts:
            w[f"w_shared_{name}"] = state[f"shared.{name}.weight"].T
        if m.expert_bias:
            each = [state[f"experts.{e}.{name}.bias"] for e in range(m.num_experts)]
            w[f"b_{name}"] = np.stack(each)
    h = rng.normal(size=(2, 5, m.d_model)).astype("f")
    with torch.no_grad():
        found = experts(torch.from_numpy(h)).numpy()
    wanted = plain(composition.experts_of(m), h, w, None, None, composition.model_of(m))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
