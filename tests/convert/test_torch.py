"""The PyTorch file: every parameter has a name in it; with torch, the same logits."""

import dataclasses
import functools
import importlib.util
import json
import math
import re
from pathlib import Path

import flax.traverse_util
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxpar.commands import call
from jaxpar.config import ConfigError, Model, replace
from jaxpar.convert import selfcheck, torch_file
from jaxpar.convert.hf import exporting, importing
from jaxpar.convert.hf.config import family_of, model_of
from jaxpar.convert.safetensors_file import read_header
from jaxpar.model.flops import num_params
from jaxpar.model.mup import standard
from jaxpar.model.parameters import param_specs
from jaxpar.model.plain import decoder
from jaxpar.sharding.params import flat
from tests.convert import composed, tiny
from tests.slow import slow_but
from tests.tiny import TINY

WITHOUT_TORCH = importlib.util.find_spec("torch") is None


GOLDEN = Path(__file__).parent / "goldens"


def models() -> dict[str, Model]:
    """All models of the tests, published and composed."""
    found = {name: model_of(values, family_of(values)) for name, values in tiny.MODELS.items()}
    return found | {f"composed {name}": composed.model_named(name) for name in composed.NAMES}


def test_tensors_have_the_declared_names():
    for name, m in models().items():
        tensors = torch_file.tensors_of(m)
        wanted = {
            f"layers.{i}.{weight}": declared.shape
            for i, layer in enumerate(m.layers)
            for weight, declared in layer.weights(m).items()
        }
        found = {n: t.shape for n, t in tensors.items() if n.startswith("layers.")}
        assert found == wanted, name
        sizes = sum(math.prod(t.shape) for t in tensors.values())
        assert sizes == num_params(dataclasses.replace(m, mtp_depth=0)), name


def test_the_description_has_every_field_and_weight():
    for name, m in models().items():
        tensors = torch_file.tensors_of(m)
        about = json.loads(json.dumps(torch_file.describe(m)))
        of_layers = [about["distinct"][i] for i in about["order"]]
        shapes = {n: shape for n, shape in about["weights"].items()}
        for i, (layer, of) in enumerate(zip(m.layers, of_layers, strict=True)):
            terms = {"mixer": layer.mixer, "feed_forward": layer.feed_forward}
            parts = [of, *(of[role] for role in terms if of[role])]
            shapes |= {f"layers.{i}.{n}": s for one in parts for n, s in one["weights"].items()}
            for role, term in terms.items():
                assert (term is None) == (of[role] is None), name
                if term is not None:
                    fields = json.loads(json.dumps(dataclasses.asdict(term)))
                    assert of[role]["fields"] == fields, name
            assert (of["norms"], of["parallel"], of["scaled"]) == (
                *(layer.norms, layer.parallel, layer.scaled),
            )
        assert shapes == {n: list(t.shape) for n, t in tensors.items()}, name
        assert about["model"]["norm"] == dataclasses.asdict(m.norm)


def test_a_model_that_no_family_can_write():
    biased = replace(TINY, **{"model.layers.mixer.out_bias": True}).model
    said = "fits no published family .*Fix: export it with `to-torch`"
    for model in (composed.sigmoid(), biased):
        with pytest.raises(ConfigError, match=said):
            exporting.choose(None, model, {})


def import_tiny(folder: Path, name: str) -> Path:
    """A tiny model, imported."""
    published = tiny.write_folder(folder / "model", tiny.MODELS[name])
    importing.from_hf(published, folder / "run", lambda _: None, tolerance=None)
    return folder / "run"


@pytest.mark.skipif(not WITHOUT_TORCH, reason="torch is installed")
def test_without_torch_it_names_a_file_that_needs_none(tmp_path):
    run = str(import_tiny(tmp_path, "llama3"))
    with pytest.raises(
        ConfigError, match=r"needs torch, which is not installed.*model.safe"
    ) as error:
        call("convert", ["to-torch", run, str(tmp_path / "model.pt")])
    assert not (tmp_path / "model.pt").exists()
    (file,) = re.findall(r"or use (\S+),", str(error.value))
    assert call("convert", ["to-torch", run, file]) == 0
    assert len(load_file(file)) == len(
        torch_file.tensors_of(exporting.open_export(run).config.model)
    )


def test_names_that_cannot_be_are_refused(tmp_path, monkeypatch):
    export = torch_file.open_export(import_tiny(tmp_path, "llama3"))
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    for name in ("x.json", "weights", "x.bin", "", ".", "..", "new/.."):
        rule = r"FILE = .*must end in \.pt or \.pth or \.safetensors.*use .*\.pt\."
        with pytest.raises(ConfigError, match=rule):
            torch_file.to_torch(export, Path(name), lambda _: None)
    for name in ("model.safetensors", "model.json"):
        (tmp_path / "run" / name).touch()
        with pytest.raises(ConfigError, match=rf"FILE = 'run/{name}': already exists"):
            torch_file.to_torch(export, Path("run/model.safetensors"), lambda _: None)
        (tmp_path / "run" / name).unlink()
    assert sorted(tmp_path.iterdir()) == before


def plain_logits(m: Model) -> np.ndarray:
    """The logits of a composed model, in JAX: rows of several documents."""
    specs = flat(param_specs(m))
    params = {path: composed.values_of(path, spec) for path, spec in specs.items()}
    tree = flax.traverse_util.unflatten_dict(params, sep="/")
    with jax.default_matmul_precision("highest"):
        return np.asarray(
            jax.jit(functools.partial(decoder.logits_of, model=m))(tree, *composed.documents())
        )


@pytest.mark.parametrize("name", slow_but(["latent", "experts", "own"], composed.NAMES))
def test_torch_computed_the_logits_of_every_component(name):
    """make_torch_goldens.py: PyTorch computed them from an exported file."""
    golden = np.load(GOLDEN / "torch.npz")[name]
    np.testing.assert_allclose(plain_logits(composed.model_named(name)), golden, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", slow_but(["own"], composed.NAMES))
def test_composed_models_are_exported(name, tmp_path, capsys):
    """With the self-check; a component of one's own with its code, and the code that it needs."""
    run, file = composed.write_run(tmp_path / "run", name), tmp_path / "new" / "model.safetensors"
    words = ["to-torch", str(run), str(file), "--dtype", "float32"]
    if name in composed.CODE:
        with pytest.raises(ConfigError, match=r"code is not loaded.*Fix: add --code \S+"):
            call("convert", words)
        words += ["--code", composed.CODE[name]]
    assert call("convert", words) == 0
    assert sorted(p.name for p in file.parent.iterdir()) == ["model.json", "model.safetensors"]
    said = capsys.readouterr().out
    assert "compared with the written file: largest difference" in said
    m = composed.model_named(name)
    assert all(sentence in said for sentence in torch_file.code_needed(m))
    assert json.loads(file.with_suffix(".json").read_text()) == torch_file.describe(standard(m))
    tensors, places = load_file(file), m.places
    specs = flat(param_specs(m))
    wanted = {path: composed.values_of(path, spec) for path, spec in specs.items()}
    for tensor, values in tensors.items():
        if tensor in wanted:
            np.testing.assert_array_equal(values, wanted[tensor])
        else:
            _, i, weight = tensor.split(".")
            stack, at = places[int(i)]
            np.testing.assert_array_equal(values, wanted[f"{stack}/{weight}"][at])


def test_code_that_a_component_needs():
    needs = torch_file.describe(composed.sigmoid())["needs"]
    assert needs == {
        "sigmoid_attention.py:Sigmoid": "sigmoid_attention.py:Sigmoid needs code in PyTorch: "
        "load(FILE, components={'sigmoid_attention.py:Sigmoid': YOURS}), where YOURS is a subclass "
        "of torch_model.TorchAttention that defines heads(self, q, k, v, seen). Its weights: "
        "wq [16, 4, 8], wk [16, 2, 8], wv [16, 2, 8], wo [4, 8, 16]"
    }
    mean = torch_file.code_needed(composed.MODELS["own"])
    said = mean["tests.convert.composed:DecayedMean"]
    assert (
        "torch_model.TorchComponent that defines forward(self, x, weights, positions, seg" in said
    )
    assert said.endswith("mean_v [16, 2, 8], mean_rate [2], mean_out [2, 8, 16]")


def test_a_changed_tensor_is_found(tmp_path, monkeypatch):
    """The self-check reads what was written."""
    run = composed.write_run(tmp_path / "run", "mup")
    copy = exporting.copy_parameter

    def wrong(export, path, shape, parts, progress):
        copy(export, path, shape, parts, progress)
        if path == "block/w_up":
            for _, _, part in parts(tuple(slice(0, n) for n in shape)):
                part[0, 0] += 1

    monkeypatch.setattr(exporting, "copy_parameter", wrong)
    with pytest.raises(selfcheck.CheckFailed, match="the written file"):
        torch_file.to_torch(
            composed.open_export(run, "mup"), tmp_path / "model.safetensors", lambda _: None
        )
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_balancing_bias_stays_float32(tmp_path):
    run, file = composed.write_run(tmp_path / "run", "experts"), tmp_path / "model.safetensors"
    assert call("convert", ["to-torch", str(run), str(file), "--dtype", "bfloat16"]) == 0
    kinds = {name: stored.dtype for name, stored in read_header(file).items()}
    assert kinds.pop("layers.0.router_bias") == "F32" and set(kinds.values()) == {"BF16"}


def test_no_published_family_has_a_composed_model(tmp_path):
    run = composed.write_run(tmp_path / "run", "own")
    with pytest.raises(
        ConfigError, match=r"fits no published family.*Fix: use `to-torch \S+ model.s"
    ):
        call("convert", ["to-hf", str(run), str(tmp_path / "hf")])


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
    assert json.loads(file.with_suffix(".json").read_text()) == torch_file.describe(wanted)
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


@pytest.mark.skipif(WITHOUT_TORCH, reason="torch is not installed")
@pytest.mark.parametrize("name", composed.NAMES)
def test_torch_computes_every_component(name, tmp_path):
    import torch

    from jaxpar.convert import torch_model
    from tests.convert.goldens import torch_components

    run, file = composed.write_run(tmp_path / "run", name), tmp_path / "model.safetensors"
    torch_file.to_torch(composed.open_export(run, name), file, lambda _: None)
    rows = (torch.from_numpy(a.astype(np.int64)) for a in composed.documents())
    classes = torch_components.components(torch_model).get(name)
    with torch.no_grad():
        found = torch_model.load(file, components=classes)(*rows).numpy()
    np.testing.assert_allclose(found, np.load(GOLDEN / "torch.npz")[name], rtol=0, atol=1e-5)
