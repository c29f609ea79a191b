"""Runs that begin with another run's weights, or a published model's."""

import json
import shlex
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar.checkpoint.loading import restore_params
from jaxpar.checkpoint.saved import CARRIED, saved_config
from jaxpar.config import Config, ConfigError
from jaxpar.config.code import with_code
from jaxpar.config.command_line import parse_overrides, read_config
from jaxpar.config.config_file import CONFIGS
from jaxpar.config.validate import check
from jaxpar.convert.shape import model_from
from jaxpar.inference.generation import config_for_sampling
from jaxpar.inference.load import load
from jaxpar.model.lora import is_adapter
from jaxpar.sharding.mesh import make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step.state import init_state
from jaxpar.training.run import Run
from tests import ranks
from tests.convert import tiny

#: As in the tiny config: bytes of text, and a vocabulary with room for them.
PUBLISHED = tiny.MODELS["qwen3"] | {"vocab_size": 272, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("published") / "model", PUBLISHED)


@pytest.fixture(scope="module")
def config(tmp_path_factory, write_config) -> str:
    return write_config(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run_of(config, only_devices):
    """(flags, number of devices) -> the run, with nothing written."""

    def make(flags: list[str], devices: int = 1) -> Run:
        with only_devices(devices):
            return Run.open(read_config([config, *flags], model_from=model_from))

    return make


@pytest.fixture
def flags_to_fit(run_of, published) -> list[str]:
    """What the error about another model says to add."""
    with pytest.raises(ConfigError, match="contains a model with") as error:
        run_of(["--run.init-from", str(published)])
    assert "num_heads" not in str(error.value)  # what fits is not named
    return shlex.split(str(error.value).partition("Fix: ")[2].removesuffix("."))


def params_of(run_dir: Path, step: int, *code: Path):
    cfg = with_code(saved_config(run_dir, step), list(map(str, code)))
    cfg = config_for_sampling(cfg)
    return restore_params(run_dir, cfg, make_mesh(cfg.parallel, jax.devices()[:1]), step)


def assert_same(found, wanted) -> None:
    found, wanted = flat(found), flat(wanted)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(value), err_msg=name)


@pytest.mark.parametrize(("mesh", "devices"), [([], 1), (["--parallel.tensor", "2"], 4)])
def test_a_published_model_under_the_flags_that_the_error_gives(
    run_of, flags_to_fit, published, mesh, devices
):
    run = run_of([*flags_to_fit, "--run.init-from", str(published), *mesh], devices)
    state = run.start().state
    tensors = tiny.tensors(PUBLISHED)
    np.testing.assert_array_equal(state.params["embed"], tensors["model.embed_tokens.weight"])
    down = tensors["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(state.params["layers"]["w_down"][1], down.T)
    assert int(state.step) == 0
    assert not any(np.any(np.asarray(m)) for m in jax.tree.leaves(state.opt_state))


@pytest.mark.slow
def test_adapters_start_afresh_beside_a_published_model(run_of, flags_to_fit, published):
    flags = ["--run.init-from", str(published), "--lora.rank", "4", "--parallel.tensor", "2"]
    run = run_of([*flags_to_fit, *flags], 4)
    state, fresh = run.start().state, flat(init_state(run.cfg, run.mesh).params)
    down = tiny.tensors(PUBLISHED)["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(state.params["layers"]["w_down"][1], down.T)
    found = {name: a for name, a in flat(state.params).items() if is_adapter(name)}
    assert_same(found, {name: fresh[name] for name in found})
    assert np.abs(found["layers/wq_lora_a"]).max() > 0 and len(found) == 14
    moments = [a for a in jax.tree.leaves(state.opt_state) if a.ndim]
    assert len(moments) == 2 * len(found)


@pytest.mark.usefixtures("quick_compile")
def test_training_goes_on_from_there_and_is_resumed_without_it(
    train_on, run_of, flags_to_fit, config, published, tmp_path, capsys
):
    shutil.copytree(published, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    run_dir, begin = tmp_path / "tuned", ["--run.init-from", str(tmp_path / "model")]
    args = [*flags_to_fit, "--run.dir", str(run_dir), "--checkpoint.every", "4"]
    # A step that does not depend on their number is compiled once.
    args += ["--optimizer.schedule", "constant", "--optimizer.warmup-steps", "0"]
    args += ["--evaluation.every", "0"]
    assert train_on(2, config, *args, *begin, "--train.num-steps", "4") == 0
    assert f"weights of {tmp_path / 'model'} in " in capsys.readouterr().out
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < losses[0]
    assert (run_dir / CARRIED / "config.json").is_file()
    assert "[7, 2]" in (run_dir / CARRIED / "generation_config.json").read_text()
    shutil.rmtree(tmp_path / "model")
    assert train_on(2, config, *args, *begin, "--train.num-steps", "8") == 0  # its own come first
    assert "restored step 4" in capsys.readouterr().out

    elsewhere = ["--run.dir", str(tmp_path / "again"), "--parallel.tensor", "2"]
    again = run_of([*flags_to_fit, *elsewhere, "--run.init-from", str(run_dir)], 2)
    state = again.start().state
    assert_same(state.params, params_of(run_dir, 8))
    assert int(state.step) == 0


@pytest.mark.slow  # quicker: tests/extend and tests/meshes/test_lora.py, its parts
@pytest.mark.usefixtures("quick_compile")
def test_adapters_of_a_composed_run(train_on, dataset, tmp_path):
    """They begin with another run's weights, resume, and are merged to generate."""
    file, base, tuned = CONFIGS / "sigmoid_attention.py", tmp_path / "base", tmp_path / "tuned"
    args = [
        str(file),
        "--data.path",
        str(dataset),
        "--data.seq-len",
        "32",
        "--evaluation.every",
        "0",
    ]
    args += ["--train.global-batch-size", "4", "--optimizer.warmup-steps", "0"]
    assert train_on(2, *args, "--run.dir", str(base), "--train.num-steps", "2") == 0
    args += ["--run.dir", str(tuned), "--lora.rank", "4", "--run.init-from", str(base)]
    assert train_on(2, *args, "--train.num-steps", "2") == 0
    assert train_on(2, *args, "--train.num-steps", "4", "--parallel.tensor", "2") == 0
    before, after = (flat(params_of(*run, file)) for run in ((base, 2), (tuned, 4)))
    adapters = {name: after.pop(name) for name in [*after] if is_adapter(name)}
    assert_same(after, before)
    assert all(np.abs(a).max() > 0 for a in adapters.values()) and len(adapters) == 14
    model = load(str(tuned), None, 1, print, code=[str(file)])
    assert model.cfg.lora is None
    other = ["--run.dir", str(tmp_path / "other"), "--model.block.mixer.shift", "-3.0"]
    said = r"model\.block\.mixer\.shift = -3\.0: .*base has -4\.0 in a layer .* back to -4\.0"
    with pytest.raises(ConfigError, match=said):
        train_on(1, *args, *other)


@pytest.mark.waits
@pytest.mark.slow
@pytest.mark.parametrize("origin", ["published", "finished"])
def test_two_processes_begin_with_the_bits_that_one_does(
    origin, request, train_on, write_config, flags_to_fit, tmp_path
):
    folder = request.getfixturevalue(origin)
    args = [write_config(tmp_path), "--run.init-from", str(folder), "--train.num-steps", "3"]
    args += [*(flags_to_fit if origin == "published" else []), "--evaluation.every", "0"]
    args += ["--optimizer.warmup-steps", "0"]
    assert train_on(4, *args, "--run.dir", str(tmp_path / "one")) == 0
    process = ranks.launch(2, 2, "--", *args, "--run.dir", str(tmp_path / "two"))
    code, said = ranks.finish(process)
    assert code == 0 and f"weights of {folder}" in said, said[-3000:]
    ranks.assert_same_records(tmp_path / "two", tmp_path / "one")


def test_what_cannot_be_begun_with(run_of, tmp_path):
    for folder in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError, match=r"run\.init_from = .*is neither a run .* nor a "):
            run_of(["--run.init-from", str(folder)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick_compile")
def test_named_fields_of_the_model_may_differ(run_of, flags_to_fit, published, capsys):
    args = [*flags_to_fit, "--run.init-from", str(published)]
    args += ["--model.*.mixer.rope.theta", "777"]
    said = r"contains a model with layers\.mixer\.rope\.theta 1000000\.0, not 777"
    with pytest.raises(ConfigError, match=said):
        run_of(args).start()
    with pytest.raises(ConfigError, match=said):
        run_of([*args, "--run.init-changes", "mixer.window"]).start()
    run_of([*args, "--run.init-changes", "mixer.rope.theta,mixer.rope.scaling"]).start()
    said = "of the initial weights is changed: model.layers.mixer.rope.theta 1000000.0 -> 777"
    assert said in capsys.readouterr().out


@pytest.mark.usefixtures("quick_compile")
def test_they_may_differ_from_those_of_a_run(run_of, train_on, config_file, tmp_path, capsys):
    last = ["--train.num-steps", "2", "--optimizer.warmup-steps", "0", "--evaluation.every", "0"]
    assert train_on(1, config_file, *last) == 0
    args = ["--run.init-from", str(tmp_path / "run"), "--model.layers.mixer.rope.theta", "777"]
    params = run_of([*args, "--run.init-changes", "mixer.rope.theta"]).start().state.params
    assert_same(params, params_of(tmp_path / "run", 2))
    assert "is changed: model.layers.mixer.rope.theta 500000.0 -> 777.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "origin", "said"),
    [
        ("d_model", "x", r"init_changes = 'd_model': must be a list of names from mixer\.rope"),
        (
            "mixer.window,mixer.rop.theta",
            "x",
            "Fix: use --run.init-changes mixer.window,mixer.rop",
        ),
        ("mixer.window", "", r"init_changes = 'mixer\.window': needs run\.init_from"),
    ],
)
def test_names_that_cannot_be(names, origin, said):
    with pytest.raises(ConfigError, match=said):
        words = [f"--run.init-changes={names}", f"--run.init-from={origin}"]
        check(parse_overrides(Config(), words))
