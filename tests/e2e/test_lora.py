"""A trained run, tuned on conversations by adapters: they learn, its own weights stay."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar.checkpoint.loading import restore_params
from jaxpar.checkpoint.saved import saved_config
from jaxpar.commands import call
from jaxpar.config import ConfigError, replace
from jaxpar.config.command_line import load_config, read_config
from jaxpar.inference.generation import config_for_sampling
from jaxpar.inference.load import load
from jaxpar.model.lora import is_adapter
from jaxpar.sharding.mesh import make_mesh
from jaxpar.sharding.params import flat
from jaxpar.training.run import Run
from tests.e2e.test_chat_tuning import QUESTIONS, write_chats

# Some 80 s; what adapters do on each mesh is tested in tests/meshes/test_lora.py.
pytestmark = pytest.mark.slow

#: Of tokens that the first training has seen: adapters teach the head no others.
ANSWER = "on the mat, the dog."

QUICK = ["--evaluation.every", "0", "--optimizer.weight-decay", "0.1"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats"), QUESTIONS, ANSWER)


@pytest.fixture(scope="module")
def runs(train_on, write_config, chats, tmp_path_factory) -> tuple[str, Path, Path]:
    """The config, the run that was trained, and the one that was tuned."""
    folder = tmp_path_factory.mktemp("lora")
    config = write_config(folder)
    first = ["--checkpoint.every", "120"]
    assert train_on(2, config, *QUICK, *first) == 0
    assert train_on(2, config, *flags(folder, "tuned", chats, 60), "--parallel.tensor", "2") == 0
    return config, folder / "run", folder / "tuned"


def flags(folder: Path, name: str, chats: Path, steps: int) -> list[str]:
    found = ["--run.dir", str(folder / name), "--run.init-from", str(folder / "run")]
    found += ["--data.path", str(chats), "--train.num-steps", str(steps), *QUICK]
    return [
        *found,
        "--lora.rank",
        "8",
        "--optimizer.schedule",
        "constant",
        "--checkpoint.every",
        "30",
    ]


def params_of(run: Path, step: int | None = None) -> dict[str, np.ndarray]:
    cfg = config_for_sampling(saved_config(run))
    mesh = make_mesh(cfg.parallel, jax.devices()[:1])
    restored = restore_params(run, cfg, mesh, step)
    return {name: np.asarray(a) for name, a in flat(restored).items()}


def losses(run: Path) -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def test_it_learns_and_moves_nothing_but_adapters(runs):
    _, first, tuned = runs
    found = losses(tuned)
    assert found[0] > 1.2 and np.mean(found[-5:]) < 0.5 * found[0]
    before, after = params_of(first), params_of(tuned)
    adapters = {name for name in after if is_adapter(name)}
    assert set(after) - adapters == set(before) and len(adapters) == 14
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    assert all(np.abs(after[name]).max() > 0 for name in adapters)
    manifest = json.loads((tuned / "manifest.json").read_text())
    assert manifest["adapters"] == sum(after[name].size for name in adapters)


def test_a_run_goes_on_exactly_and_on_another_mesh(runs, train_on, chats):
    config, first, tuned = runs
    half = [*flags(first.parent, "halves", chats, 60), "--parallel.tensor", "2"]
    assert train_on(2, config, *half, "--train.num-steps", "30") == 0
    assert train_on(2, config, *half) == 0
    whole, halves = params_of(tuned), params_of(first.parent / "halves")
    assert all(whole[name].tobytes() == halves[name].tobytes() for name in whole)
    more = [*flags(first.parent, "halves", chats, 62), "--parallel.layer-loop", "unroll"]
    assert train_on(4, config, *more) == 0
    later = params_of(first.parent / "halves", 62)
    assert all(later[n].tobytes() == whole[n].tobytes() for n in whole if not is_adapter(n))


def test_text_from_it(runs, capfd):
    _, _, tuned = runs
    model = load(str(tuned), None, 1, print)
    assert model.cfg.lora is None
    given = [
        "--prompt",
        "user:\n17?\nassistant:\n",
        "--temperature",
        "0",
        "--max-tokens",
        str(len(ANSWER)),
    ]
    call("sample", [str(tuned), *given])
    assert ANSWER in capfd.readouterr().out


def test_a_run_begins_with_what_adapters_have_made_of_another(runs, train_on, chats, tmp_path):
    config, first, tuned = runs
    args = flags(first.parent, "again", chats, 1)
    args[args.index("--run.init-from") + 1] = str(tuned)
    assert train_on(2, config, *args, "--optimizer.warmup-steps", "0") == 0
    assert losses(first.parent / "again")[0] < 0.7  # its own adapters add nothing yet
    own = params_of(first.parent / "again")
    assert own["layers/wq"].tobytes() != params_of(tuned)["layers/wq"].tobytes()


def test_it_leaves_as_a_published_model(runs, tmp_path):
    _, _, tuned = runs
    assert call("convert", ["to-hf", str(tuned), str(tmp_path / "merged")]) == 0
    assert call("convert", ["to-peft", str(tuned), str(tmp_path / "adapters")]) == 0
    about = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert about["r"] == 8 and about["base_model_name_or_path"] is None


def test_other_adapters_are_not_the_same_run(runs, only_devices):
    config, _, tuned = runs
    for flag, value in {"rank": "4", "alpha": "8", "targets": "q_proj"}.items():
        given = ["--run.dir", str(tuned), "--lora.rank", "8", f"--lora.{flag}", value]
        with only_devices(1), pytest.raises(ConfigError, match=rf"lora\.{flag} = .*has"):
            Run.open(read_config([config, *given]))


def test_the_config_is_that_of_the_shape_it_tunes():
    tuned, every_weight = (load_config(f"llama_1b_{name}") for name in ("lora_chat", "chat"))
    assert tuned.model == every_weight.model and tuned.lora.rank
    assert tuned.run.init_from == every_weight.run.init_from
    assert replace(tuned, **{"lora.rank": 16}).data == every_weight.data
