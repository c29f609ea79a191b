"""`train RUN_DIR`: a run resumes from its folder, wherever that lies now."""

import json
import shutil
from pathlib import Path

import pytest

from jaxpar.checkpoint.saved import saved_steps
from jaxpar.commands import call
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.config_file import load_config
from jaxpar.config.serialize import from_json, to_json
from jaxpar.runtime import exit_codes

SHORT = """--train.num-steps 4 --optimizer.warmup-steps 0 --checkpoint.every 2 --evaluation.every 0
--optimizer.learning-rate 5e-3 --metrics.tensorboard False""".split()


def config_of(folder: Path) -> Config:
    """The resolved config that a run's folder has."""
    return from_json((folder / "config.json").read_text("utf-8"))


def losses_of(folder: Path) -> dict[int, float]:
    """The last loss of each step, to the last digit."""
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    return {r["step"]: r["loss"] for r in map(json.loads, lines) if "loss" in r}


@pytest.mark.usefixtures("quick_compile")
def test_a_run_resumes_from_its_folder_as_by_the_same_command(train_on, config_file, tmp_path):
    run, moved = tmp_path / "run", tmp_path / "elsewhere" / "moved"
    assert train_on(2, config_file, *SHORT, "--checkpoint.resume", "never") == exit_codes.EXIT_OK
    shutil.copytree(run, moved)

    more = ("--train.num-steps", "6")
    assert train_on(2, config_file, *SHORT, *more) == exit_codes.EXIT_OK
    assert train_on(2, str(moved), *more) == exit_codes.EXIT_OK
    assert saved_steps(moved) == saved_steps(run)
    assert losses_of(moved) == losses_of(run) and set(losses_of(run)) == {1, 2, 3, 4, 5, 6}
    assert config_of(moved) == replace(config_of(run), **{"run.dir": str(moved)})

    with pytest.raises(ConfigError, match=r"data\.seq_len = 64: the checkpoint of step 6 has 32"):
        train_on(2, str(moved), "--data.seq-len", "64")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_a_layout_is_chosen_again_for_the_devices_that_are_there(train_on, config_file, tmp_path):
    run = tmp_path / "run"
    assert train_on(2, config_file, *SHORT, "--parallel.auto", "all") == exit_codes.EXIT_OK
    assert config_of(run).parallel.auto == ()
    assert load_config(str(run)).parallel.auto == ("all",)
    assert train_on(1, str(run), "--train.num-steps", "5") == exit_codes.EXIT_OK
    assert config_of(run).parallel.data == 1 and set(losses_of(run)) == {1, 2, 3, 4, 5}
    assert load_config(str(run)).parallel.auto == ("all",)


def test_what_followed_from_the_devices_is_asked_for_anew(tmp_path):
    values = {"parallel.data": 4, "parallel.num_microbatches": 8, "checkpoint.resume": "never"}
    cfg = replace(Config(), **values | {"run.dir": "runs/there", "train.seed": 7})
    (tmp_path / "config.json").write_text(to_json(cfg))
    anew = {"parallel.data": -1, "checkpoint.resume": "auto", "run.dir": str(tmp_path)}
    assert load_config(str(tmp_path)) == replace(cfg, **anew)
    asked = {"parallel.num_microbatches": 2}
    (tmp_path / "manifest.json").write_text(json.dumps({"jax": "0.11.2", "asked": asked}))
    assert load_config(str(tmp_path)) == replace(cfg, **anew, **asked)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (None, "is not a run folder: it has no config.json"),
        ('{"run": {"dir"', "has a damaged config.json"),
        ('{"architectures": ["LlamaForCausalLM"]}', "its config.json is not a run's"),
        ("[]", "its config.json is not a run's"),
        ('{"run": {}, "model": {"num_layer": 2}}', "is not a field of the config"),
    ],
)
def test_a_folder_that_is_no_run_is_one_error_and_writes_nothing(tmp_path, text, rule):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    before = list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=rule):
        call("train", [str(tmp_path)])
    assert list(tmp_path.iterdir()) == before
