"""Models in a store: runs to start from, teachers, published models, and exports to addresses."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxpar.commands import call
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.rules.paths import local_folder
from jaxpar.config.serialize import to_json
from jaxpar.convert.hf.importing import open_source
from jaxpar.convert.peft.exporting import base_of
from jaxpar.convert.shape import model_from
from jaxpar.features.distillation import FIELD
from jaxpar.features.distillation.teacher import Teacher
from jaxpar.runtime.exit_codes import RunError
from jaxpar.sharding.mesh import make_mesh
from jaxpar.stores import folders, reading
from jaxpar.training import chosen, initial_weights
from tests.convert import tiny
from tests.convert.test_export import save_run
from tests.stores.server import objects_at
from tests.stores.test_mirror import mirrored
from tests.weights import origin_of

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")


@pytest.fixture(autouse=True)
def a_new_process():
    yield
    reading._run_at.cache_clear()


@pytest.fixture
def run(address, tmp_path, devices) -> Config:
    """A run with a checkpoint, in the store: its config. Its folder may be damaged."""
    cfg, _ = save_run(tmp_path, devices)
    folder = Path(cfg.run.dir)
    (folder / "config.json").write_text(to_json(cfg))
    (folder / "metrics.jsonl").write_text("")
    with mirrored(address, folder):
        pass
    return cfg


@pytest.fixture
def published(address, tmp_path) -> tuple[str, Path]:
    """A published model in the store, and its folder."""
    there = tiny.write_folder(tmp_path / "published", tiny.MODELS["qwen3"])
    at = address._replace(prefix="models/tiny")
    for path in sorted(p for p in there.rglob("*") if p.is_file()):
        objects_at(at).upload(str(path.relative_to(there)), path)
    return str(at), there


def test_a_run_begins_with_the_weights_of_an_address(run, address, devices):
    mesh = make_mesh(run.parallel, devices[:1])
    folders_of = {"here": run.run.dir, "there": str(address)}
    states = {}
    for name, folder in folders_of.items():
        cfg = replace(run, **{"run.init_from": folder, "run.dir": f"{run.run.dir}-{name}"})
        origin = origin_of(cfg)
        assert str(origin) == f"{folder}, step 3"
        states[name] = initial_weights.state(cfg, mesh, origin, print).params
    np.testing.assert_array_equal(states["here"]["head"], states["there"]["head"])
    assert base_of(replace(run, **{"run.init_from": str(address)})) is None


def test_a_teacher_at_an_address(run, address, devices):
    cfg = replace(run, **{"distill.teacher": str(address), "run.dir": f"{run.run.dir}-student"})
    taken = chosen.choose(cfg, None)[FIELD]
    teacher = Teacher(cfg.distill, cfg, make_mesh(cfg.parallel, devices[:1]), 8, taken)
    assert str(teacher) == f"{address}, step 3"
    assert taken.weights == chosen.digest(Path(run.run.dir), 3)
    cfg.distill.check_plan(cfg)
    assert cfg.distill.frozen_model(cfg).model == run.model
    none = replace(cfg, **{"distill.teacher": f"{address}-none"})
    assert none.distill.frozen_model(none) is None
    with pytest.raises(ConfigError, match=r"distill.teacher = .*is not a run with a checkpoint"):
        chosen.choose(none, None)


def test_a_published_model_at_an_address(published, s3, address):
    url, folder = published
    shape = model_from(url, None, Config().model)
    assert shape == model_from(str(folder), None, Config().model)
    copy = local_folder(address._replace(prefix="models/tiny"), "models")
    assert not list(copy.glob("*.safetensors"))
    source = open_source(url)
    assert source.name == url and source.config.model.d_model == shape.d_model
    s3.requests.clear()
    open_source(url)
    assert not [path for method, path in s3.requests if method == "GET" and "safetensors" in path]
    (copy / "model.safetensors").write_bytes(b"")
    open_source(url)
    assert base_of(replace(Config(), **{"run.init_from": url})) == url
    with pytest.raises(ConfigError, match="contains neither a run nor a published model"):
        open_source(f"{url}-none")


def test_an_export_to_an_address_is_complete_or_absent(run, address, tmp_path, monkeypatch, capsys):
    url = str(address._replace(prefix="exports/one"))
    upload = folders.Objects.upload

    def fails(self, name, file, beside=1):
        if name.endswith(".safetensors"):
            raise RunError("killed")
        return upload(self, name, file, beside)

    monkeypatch.setattr(folders.Objects, "upload", fails)
    with pytest.raises(RunError, match="killed"):
        call("convert", ["to-hf", run.run.dir, url, "--no-check"])
    names = [one.name for one in objects_at(address._replace(prefix="exports/one")).names()]
    assert "config.json" not in names and folders.FILES in names
    monkeypatch.setattr(folders.Objects, "upload", upload)
    assert call("convert", ["to-hf", run.run.dir, url, "--no-check"]) == 0
    assert f"{url}: LlamaForCausalLM" in capsys.readouterr().out
    assert call("convert", ["to-hf", run.run.dir, str(tmp_path / "out"), "--no-check"]) == 0
    wanted = load_file(tmp_path / "out" / "model.safetensors")
    found = load_file(open_source(url).folder / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(found[name], tensor)
    with pytest.raises(ConfigError, match=r"DIR = 's3://.*already exists, and is not empty"):
        call("convert", ["to-hf", run.run.dir, url, "--no-check"])
    other = objects_at(address._replace(prefix="photos"))
    other.write("a.png", b"")
    with pytest.raises(ConfigError, match="already exists"):
        call("convert", ["to-hf", run.run.dir, str(other.address), "--no-check"])
    assert not list((tmp_path / "cache" / "jaxpar" / "writing").iterdir())


def test_a_damaged_export_is_not_read(run, address):
    at = address._replace(prefix="exports/one")
    assert call("convert", ["to-hf", run.run.dir, str(at), "--no-check"]) == 0
    store = objects_at(at)
    content = store.read("model.safetensors")[0]
    store.write("model.safetensors", content[:-1] + b"\1")
    with pytest.raises(RunError, match=r"is damaged: model.safetensors has different content"):
        open_source(str(at))
