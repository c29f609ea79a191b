"""`import jaxpar`: what it costs, what it has, and the page about it."""

import dataclasses
import functools
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

import jaxpar
from jaxpar import Sampling, functional
from jaxpar.api.arguments import check_generation
from jaxpar.api.trainer import Trainer
from jaxpar.runtime.exit_codes import RunError
from jaxpar.step.state import abstract_state
from tests.tiny import EXPERTS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "python_api.md"

#: Programs compiled as users do: the steps of the page take longer than their compilation.
AS_USERS = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "false", "XLA_FLAGS": ""}


#: What `Prepares` calls.
CALLED: list[Callable[[], Any]] = []


class Prepares(jaxpar.Callback):
    """Calls a function of CALLED before the first step."""

    def prepare(self, run):
        CALLED[-1]()


BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def run(code: str, folder: Path, **env: str) -> str:
    """Run a program in a process of its own; what it prints."""
    env = os.environ | {"PYTHONPATH": str(ROOT)} | env
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_is_cheap_and_starts_no_device(tmp_path):
    said = run(
        "import sys, jaxpar\n"
        "loaded = [m for m in sys.modules if m.startswith('jaxpar') or m in ('jax', 'numpy')]\n"
        "assert loaded == ['jaxpar'], loaded\n"
        "assert set(jaxpar.__all__) <= set(dir(jaxpar))\n"
        "for name in jaxpar.__all__: getattr(jaxpar, name)\n"
        "cfg = jaxpar.load_config('llama3_8b', {'train.num_steps': 7, 'run.cpu_devices': 8})\n"
        "from jax._src import xla_bridge\n"
        "print(cfg.train.num_steps, xla_bridge.backends_are_initialized())",
        tmp_path,
    )
    assert said.split() == ["7", "False"]
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'Traner'"):
        jaxpar.Traner  # noqa: B018


def test_configs_are_checked():
    for wrong in ({"optimizer.learning_rat": 1.0}, {"train.num_steps": -1}, {"train.seed": "x"}):
        with pytest.raises(jaxpar.ConfigError, match=next(iter(wrong))):
            jaxpar.load_config("quickstart", wrong)
    cfg = jaxpar.load_config("quickstart", {"run.init_from": "", "checkpoint.keep_every": 0})
    assert cfg.optimizer.learning_rate == 3e-3


@pytest.mark.slow  # quicker: what the page calls, in steps by hand below
@pytest.mark.parametrize("smaller", [True, False])
def test_the_page_runs_as_written(smaller, write_config, dataset, tmp_path):
    """With a smaller text in place of the config's, which takes a while to prepare; and a smaller
    model, of which 40 steps are quick."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "stdlib-bytes").symlink_to(dataset)
    code, env = "\n".join(BLOCK.findall(PAGE.read_text("utf-8"))), AS_USERS
    if smaller:
        Path(write_config(tmp_path)).rename(tmp_path / "quickstart.py")
        there = "config_file.CONFIGS = config_file.Path()"
        code, env = f"from jaxpar.config import config_file\n{there}\n{code}", {}
    lines = run(code, tmp_path, JAX_NUM_CPU_DEVICES="1", **env).splitlines()
    assert any(re.match(r"loss \d\.\d+, held-out \d\.\d+", line) for line in lines)
    (means,) = (line for line in lines if line.startswith("True [("))
    assert re.search(r"\[\((2[1-9]|30), \d\.\d+\), .*\(40, \d\.\d+\)\]", means)
    assert any(re.search(r"\(40, \d\.\d+\)\]$", line) for line in lines)
    assert lines[-1].startswith("['embed', 'final_norm', ")


def test_the_page_names_all_that_there_is():
    page = PAGE.read_text("utf-8")
    public = [name for name in vars(Trainer) if not name.startswith("_")]
    assert [name for name in public if f"`trainer.{name}" not in page] == []
    both = page + "".join(p.read_text("utf-8") for p in (ROOT / "docs/extend").glob("*.md"))
    assert [name for name in jaxpar.__all__ if name not in both] == []
    assert jaxpar.functional is functional
    assert [name for name in functional.__all__ if f"{name}(" not in page] == []
    hooks = [name for name in vars(jaxpar.Callback) if callable(getattr(jaxpar.Callback, name))]
    assert [name for name in hooks if name[0] != "_" and f"| `{name}(" not in page] == []


@pytest.fixture
def trainer_of(config_file, only_devices):
    """(overrides) -> a trainer of the tests' tiny config on two devices."""
    with only_devices(2):
        yield lambda **fields: Trainer(jaxpar.load_config(config_file, fields))


@pytest.mark.slow  # quicker: extend/test_docs.py
def test_steps_by_hand_are_those_of_the_loop(trainer_of):
    """The same losses; a state that is saved is loaded bit by bit, and goes on in the loop."""
    fields = {"train.num_steps": 6, "evaluation.every": 3, "checkpoint.every": 2}
    by_loop = trainer_of(**fields)
    assert by_loop.train()

    by_hand = trainer_of(**fields, **{"run.dir": str(by_loop.cfg.run.dir) + "-by-hand"})
    state, losses = by_hand.init(), []
    for batch in by_hand.batches(state, 4):
        state, metrics = by_hand.step(state, batch)
        losses.append(float(metrics["loss"]))
    recorded = [r for r in jaxpar.read_metrics(by_loop.cfg.run.dir) if "loss" in r]
    assert losses == [r["loss"] for r in recorded][:4]
    kept = jax.tree.map(np.asarray, state)
    assert by_hand.save(state).name == "4"
    loaded = trainer_of(**fields, **{"run.dir": by_hand.cfg.run.dir}).load()
    chex.assert_trees_all_equal(kept, jax.tree.map(np.asarray, loaded))
    assert by_hand.train()
    end = jax.tree.map(np.asarray, by_hand.load().params)
    whole = jax.tree.map(np.asarray, by_loop.load().params)
    chex.assert_trees_all_equal(end, whole)
    assert by_hand.generate(by_hand.load(), "a", 3) == jaxpar.generate(
        jaxpar.load_model(by_hand.cfg.run.dir), "a", 3
    )


def test_what_is_refused(trainer_of):
    trainer = trainer_of(**{"train.num_steps": 4, "evaluation.every": 0})
    with pytest.raises(jaxpar.ConfigError, match="no finished checkpoint"):
        trainer.load()
    with pytest.raises(jaxpar.ConfigError, match=r"train.callbacks = 3: must be a jaxpar.Callback"):
        trainer.train(3)
    with pytest.raises(
        jaxpar.ConfigError, match=r"'Prepares': is a class.* use a value, Prepares\(\)"
    ):
        trainer.train(Prepares)
    state = trainer.init()
    with pytest.raises(jaxpar.ConfigError, match=r"evaluation\.every"):
        trainer.evaluate(state)
    with pytest.raises(jaxpar.ConfigError, match="prompts"):
        trainer.generate(state, "")
    trainer.save(state)
    again = trainer_of(**{"train.num_steps": 4, "evaluation.every": 0})
    with pytest.raises(jaxpar.ConfigError, match="checkpoint of step 0 of another run"):
        again.save(again.init())


WRONG_ARGUMENTS = [
    (lambda: jaxpar.load_config(5), "CONFIG = 5: must be the name of a config"),
    (lambda: jaxpar.load_config(None), "CONFIG = None: must be"),
    (lambda: jaxpar.load_config("\ud800"), "half a character"),
    (lambda: jaxpar.load_config("quickstart", ["train.num_steps"]), "must be values by field"),
    (lambda: jaxpar.load_config("quickstart", "train.num_steps=5"), "must be values by field"),
    (lambda: jaxpar.load_config("quickstart", {5: 5}), "overrides = 5: must be a text"),
    (lambda: jaxpar.load_config("quickstart", {"run.dir": "\udc80"}), "half a character"),
    (lambda: jaxpar.Trainer("quickstart"), "cfg = 'quickstart': must be a Config"),
    (lambda: jaxpar.Trainer({"train": {}}), "must be a Config"),
    (lambda: jaxpar.load_model(5), "folder = 5: must be the path of a folder"),
    (lambda: jaxpar.load_model("runs/x", "last"), "step = 'last': must be the step"),
    (lambda: jaxpar.load_model("runs/x", True), "step = True"),
    (lambda: jaxpar.read_metrics(None), "run_dir = None: must be the path of a folder"),
    (lambda: jaxpar.generate("runs/x", "def "), "model = 'runs/x': must be a model"),
]


@pytest.mark.parametrize(("call", "message"), WRONG_ARGUMENTS)
def test_arguments_of_the_wrong_type(call, message):
    with pytest.raises(jaxpar.ConfigError, match=message):
        call()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": 5}, "prompt = 5: must be a text, or a list"),
        ({"prompt": ["a", None]}, "prompt = None: must be a text"),
        ({"prompt": b"a"}, "prompt = 97: must be a text"),
        ({"prompt": "\ud800"}, "half a character"),
        ({"prompt": "a", "max_tokens": 2.5}, "max_tokens = 2.5: must be a whole number"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens = True"),
        ({"prompt": "a", "sampling": "hot"}, "sampling = 'hot': must be a jaxpar.Sampling"),
        ({"prompt": "a", "sampling": Sampling(temperature="hot")}, "temperature = 'hot'"),
        ({"prompt": "a", "sampling": Sampling(top_k=2.5)}, "top_k = 2.5"),
        ({"prompt": "a", "stop": 5}, "stop = 5: must be a list of tokens"),
        ({"prompt": "a", "stop": "ab"}, r"stop = 'ab': must be a list.*stop=\[\"\.\"\]"),
        ({"prompt": "a", "stop": [5]}, "stop = 5: must be a text"),
    ],
)
def test_arguments_of_generate_of_the_wrong_type(arguments, message):
    given = {"max_tokens": 4, "sampling": Sampling(), "stop": ()} | arguments
    with pytest.raises(jaxpar.ConfigError, match=message):
        check_generation(**given)


def test_a_step_takes_only_what_belongs_to_it(trainer_of):
    trainer = trainer_of(**{"evaluation.every": 0, "run.dir": "unused"})
    state = trainer.init()
    batch = next(trainer.batches(state, 1))
    wider = abstract_state(
        trainer_of(**{"model.layers.feed_forward.d_ff": 128, "run.dir": "unused"}).cfg
    )
    host = jax.tree.map(np.asarray, batch)
    other_mesh = trainer_of(**{"parallel.tensor": 2, "run.dir": "unused"}).init()
    wrong = {
        r"is on another mesh or sharded otherwise": (other_mesh, batch),
        r"\['w_(gate|up|down)'\].*: has float32.*this trainer's": (wider, batch),
        "state = .*: must be a state of a trainer": (state.params, batch),
        "is not in the state": (dataclasses.replace(state, params={}), batch),
        r"of another trainer": (state.with_extra(mine=state.params), batch),
        "batch = .*: must be a Batch": (state, host.tokens),
        r"batch.tokens = \[4, 32\]: must have the shape of int32 \[8, 32\]": (
            *(state, jax.tree.map(lambda a: a[:4], host)),
        ),
        r"batch.labels = \[8, 16\]": (state, host.replace(labels=host.labels[:, :16])),
        "batch.positions = 'int64': must be int32": (
            *(state, host.replace(positions=host.positions.astype(np.int64))),
        ),
        "batch.tokens = 100000: must be from 0 to 271": (
            *(state, host.replace(tokens=np.where(host.tokens > 0, 100_000, 0).astype("i4"))),
        ),
        "batch.tokens = -7": (state, host.replace(tokens=np.full_like(host.tokens, -7))),
        "batch.labels = -2": (state, host.replace(labels=np.full_like(host.labels, -2))),
    }
    for message, (bad_state, bad_batch) in wrong.items():
        with pytest.raises(jaxpar.ConfigError, match=message):
            trainer.step(bad_state, bad_batch)
    with pytest.raises(jaxpar.ConfigError, match="num_steps = 'all'"):
        next(trainer.batches(state, "all"))


def test_train_within_a_callback_is_refused_once(trainer_of, capsys):
    trainer, errors = trainer_of(**{"train.num_steps": 2, "evaluation.every": 0}), []

    def refused():
        for other in (trainer, trainer_of(**{"run.dir": "never"})):
            with pytest.raises(RunError, match="called by a callback of train") as error:
                other.train()
            errors.append(str(error.value))

    CALLED.append(refused)
    assert trainer.train(Prepares())
    assert len(errors) == 2 and "Recursion" not in capsys.readouterr().err
    assert not Path("never").exists()


@pytest.mark.slow
def test_two_trainers_train_in_two_threads(config_file, only_devices, tmp_path):
    """As alone. (One device each: on CPUs, collectives of two programs can wait for each other.)"""
    fields = {"train.num_steps": 3, "evaluation.every": 0, "checkpoint.every": 0}
    streams, folders = (sys.stdout, sys.stderr), [str(tmp_path / name) for name in "abc"]
    with only_devices(1):
        configs = [jaxpar.load_config(config_file, fields | {"run.dir": f}) for f in folders]
        trainers = [Trainer(cfg) for cfg in configs]
        assert trainers[2].train()
        both = threading.Barrier(2)
        with ThreadPoolExecutor(2) as pool:
            CALLED.append(functools.partial(both.wait, 100))
            done = [pool.submit(one.train, Prepares()) for one in trainers[:2]]
            assert [one.result() for one in done] == [True, True]
    losses = [[r["loss"] for r in jaxpar.read_metrics(f) if "loss" in r] for f in folders]
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 3
    assert (sys.stdout, sys.stderr) == streams


@pytest.mark.slow
def test_a_step_takes_the_tokens_of_a_live_teacher(trainer_of):
    small = {"model.num_layers": 1, "evaluation.every": 0}
    teacher = trainer_of(**small)
    teacher.save(teacher.init())
    folder = teacher.cfg.run.dir
    fields = {"run.dir": f"{folder}-student", "distill.teacher": folder, "distill.top_k": 4}
    student = trainer_of(**small, **fields)
    state = student.init()
    (batch,) = student.batches(state, 1)
    _, metrics = student.step(state, batch)
    assert float(metrics["distill_loss"]) >= 0


@pytest.mark.slow
def test_a_step_returns_the_routing_that_a_run_records(trainer_of):
    experts = {"model.layers.feed_forward": EXPERTS, "run.record_routing": (1,)}
    trainer = trainer_of(**experts, **{"evaluation.every": 0, "train.num_steps": 1})
    state = trainer.init()
    (batch,) = trainer.batches(state)
    _, metrics = trainer.step(state, batch)
    by_hand = np.asarray(metrics["routing"])
    assert by_hand.shape == (8, 32, 2, 2) and by_hand.max() < 4
    assert trainer.train()
    (record,) = jaxpar.read_metrics(trainer.cfg.run.dir)[:1]
    assert float(metrics["loss"]) == record["loss"]
    assert (Path(trainer.cfg.run.dir) / "routing").is_dir()


def test_the_command_of_a_launch(config_file, only_devices, tmp_path):
    fields = {"model.num_layers": 1, "evaluation.every": 0, "run.dir": str(tmp_path / "a run")}
    with only_devices(1):
        trainer = Trainer(jaxpar.load_config(config_file, fields))
        with pytest.raises(jaxpar.ConfigError, match=r"no config\.json\. Fix: save\("):
            trainer.launch_command()
        trainer.save(trainer.init())
        *words, folder = shlex.split(trainer.launch_command(nodes=2))
        assert words == "srun --nodes=2 --ntasks-per-node=1 python -m jaxpar.train".split()
        # One device has no use for ZeRO-3; others do.
        assert trainer.cfg.parallel.zero == 1 and jaxpar.load_config(folder).parallel.zero == 3
        other = Trainer(jaxpar.load_config(config_file, fields | {"train.seed": 1}))
        with pytest.raises(jaxpar.ConfigError, match="has another config"):
            other.launch_command()
        with pytest.raises(jaxpar.ConfigError, match="nodes = 0: must be at least 1"):
            trainer.launch_command(nodes=0)


def test_the_command_of_a_launch_names_own_code(config_file, only_devices, tmp_path):
    fields = {"model.num_layers": 1, "evaluation.every": 0, "run.dir": str(tmp_path / "run")}
    with only_devices(1):
        cfg = jaxpar.load_config(config_file, fields | {"train.callbacks": (Prepares(),)})
        trainer = Trainer(cfg)
        trainer.save(trainer.init())
        with pytest.raises(jaxpar.ConfigError, match="--code"):
            trainer.launch_command()
        assert f"--code={__name__}" in trainer.launch_command(code=[__name__])
