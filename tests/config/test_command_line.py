"""The command line: what it takes, what it refuses and how, and that it touches nothing first."""

import json
import operator
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxpar import commands
from jaxpar.commands import call
from jaxpar.config import (
    Config,
    ConfigError,
    MupConfig,
    RematValue,
    RopeScaling,
    flag,
    replace,
    value_of,
)
from jaxpar.config.command_line import KNOWN, load_config
from jaxpar.config.serialize import from_json
from jaxpar.runtime import exit_codes
from jaxpar.runtime import program as cli
from jaxpar.runtime.processes import peers

ROOT = Path(__file__).resolve().parents[2]

#: Processor seconds that a mistake may cost: imports, and no device.
SECONDS_TO_FAIL = 3.0


def run_train(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    """`python -m jaxpar.train` as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "jaxpar.train", *args],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
        timeout=600,
    )


def processor_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read(*args: str) -> Config:
    """The config that the command line of a program asks for."""
    return commands.read("train", args).config.checked()


def refused(*args: str) -> ConfigError:
    """Why the training program refuses a command line."""
    with pytest.raises(ConfigError) as caught:
        call("train", args)
    return caught.value


# -------------------------------------------------------------------------- as a process


def test_a_mistake_costs_one_line_and_little_time_and_no_device(tmp_path):
    # A platform that does not exist: starting a device would end in another error.
    seconds = []
    while len(seconds) < 3 and min(seconds, default=9e9) >= SECONDS_TO_FAIL:  # others slow a run
        before = processor_seconds_of_children()
        words = ["--model.layers.mixer.num-heads", "7"]
        done = run_train("quickstart", *words, cwd=tmp_path, JAX_PLATFORMS="none")
        seconds.append(processor_seconds_of_children() - before)
    assert done.returncode == exit_codes.EXIT_CONFIG == 2
    assert done.stdout == ""
    assert done.stderr == (
        "config error: model.layers.mixer.num_heads = 7: must be divisible by num_kv_heads = 2. "
        "Fix: use --model.layers.mixer.num-heads 8, or --model.layers.mixer.num-kv-heads 1.\n"
    )
    assert list(tmp_path.iterdir()) == []
    assert min(seconds) < SECONDS_TO_FAIL


def test_what_only_the_devices_can_tell_is_refused_as_well_and_writes_nothing(tmp_path):
    done = run_train("quickstart", "--parallel.tensor", "2", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "config error: parallel.tensor = 2: the mesh needs 2 devices, but there is 1 device. "
        "Fix: use --parallel.tensor 1, or --run.cpu-devices 2 to simulate them.\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_help_into_a_pipe_that_closes_is_no_traceback(tmp_path):
    command = f"{sys.executable} -m jaxpar.train quickstart --help | head -1"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.startswith("usage: python -m jaxpar.train CONFIG")
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------------------ mistakes

#: A command line after its config, and the error that it is.
MISTAKES = """
--train.num-stepz 4
    train.num_stepz = '4': is not a field of the config. Fix: use --train.num-steps.
--num-steps 4
    num_steps = '4': is not a field of the config. \
Fix: use --train.num-steps or --profile.num-steps.
--train.num-stepz
    train.num_stepz = '': is not a field of the config. Fix: use --train.num-steps.
--train.num-steps four
    train.num_steps = 'four': must be a whole number. Fix: use --train.num-steps 1000.
--train.num-steps 4.0
    train.num_steps = '4.0': must be a whole number. Fix: use --train.num-steps 4.
--train.num-steps None
    train.num_steps = 'None': must be a whole number. Fix: use --train.num-steps 1000.
--train.num-steps
    train.num_steps = '': needs a value. Fix: use --train.num-steps 1000.
--train.seed --train.num-steps 5
    train.seed = '': needs a value. Fix: use --train.seed 0.
--optimizer.learning-rate fast
    optimizer.learning_rate = 'fast': must be a number. Fix: use --optimizer.learning-rate 0.0003.
--model.tie-embeddings maybe
    model.tie_embeddings = 'maybe': must be True or False. Fix: use --model.tie-embeddings False.
--compute.dtype bf
    compute.dtype = 'bf': must be one of bfloat16, float16, float32. \
Fix: use --compute.dtype bfloat16.
--parallel.zero 4
    parallel.zero = '4': must be one of 1, 2, 3. Fix: use --parallel.zero 3.
--model.layers.mixer.window wide
    model.layers.mixer.window = 'wide': must be a whole number or None. \
Fix: use --model.layers.mixer.window None.
--model.layers.mixer.rope.scaling 8
    model.layers.mixer.rope.scaling = '8': must be a RopeScaling or None. \
Fix: use --model.layers.mixer.rope.scaling None.
--model.num-heads 8
    model.num_heads = '8': is not a field of the config. \
Fix: use --model.layers.mixer.num-heads 8.
--train 5 --train.num-steps 3
    train = '5': must be a TrainConfig. Fix: use --train.num-steps 1000.
--model.layers.mixer.rope.scaling.factor 0.5
    model.layers.mixer.rope.scaling.factor = 0.5: must be at least 1. \
Fix: use --model.layers.mixer.rope.scaling.factor 8.0.
extra
    command line = 'extra': is not --section.field value. Fix: see --help.
-train.num-steps 5
    command line = '-train.num-steps': is not --section.field value. Fix: see --help.
"""
EACH_MISTAKE = re.findall(r"^(\S.*)\n {4}(.*)$", MISTAKES, re.MULTILINE)


@pytest.mark.parametrize(("args", "message"), EACH_MISTAKE)
def test_a_mistake_is_one_error_with_its_fix(args, message):
    assert str(refused("quickstart", *args.split())) == message


def test_a_config_must_be_named():
    error = refused()
    assert (error.field, error.rule) == ("CONFIG", "is missing")
    assert len(str(error)) < 200 and error.fix.endswith("python -m jaxpar.train quickstart")
    assert read("--train.num-steps", "3", "quickstart").train.num_steps == 3


def test_values_of_a_list_after_a_space_are_joined_in_the_fix():
    error = refused("quickstart", "--lora.targets", "q_proj", "v_proj")
    assert error.value == "v_proj" and error.fix == "use --lora.targets q_proj,v_proj"


def test_an_unknown_config_is_refused_with_those_there_are(tmp_path):
    error = refused("nonesuch")
    assert (error.field, error.value, error.rule) == ("CONFIG", "nonesuch", "is not a config")
    assert error.fix == f"{KNOWN}; for a published model, --from nonesuch"
    assert refused("quikstart.py").fix.startswith("use quickstart, ")
    assert refused(str(tmp_path / "none.py")).rule == "does not exist"


def test_a_config_file_must_return_a_config(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("x = 1\n")
    assert refused(str(file)).rule == "has no get_config()"
    file.write_text("def get_config():\n    return {'train': {}}\n")
    assert refused(str(file)).rule == "must return a Config from get_config(), not dict"
    file.write_text("from jaxpar.config import Config\n\ndef get_config():\n    return Config()\n")
    assert read(str(file)) == Config()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "from jaxpar.config import Config, TrainConfig\n\n"
            "def get_config():\n    return Config(train=TrainConfig(num_stepz=3))\n",
            "fails at line 4: TypeError: TrainConfig.__init__() got an unexpected keyword",
        ),
        ("x = 1\nx = = 2\n", "fails at line 2: SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(0)\n", "fails at line 2: SystemExit: 0"),
        ("\nimport nonesuch\n", "fails at line 2: ModuleNotFoundError: No module named"),
        ("import json\njson.loads('{')\n", "fails at line 2: JSONDecodeError: Expecting"),
    ],
)
def test_a_config_file_that_fails_is_one_error_with_the_line(tmp_path, monkeypatch, text, said):
    file = tmp_path / "mine.py"
    file.write_text(text)
    monkeypatch.chdir(tmp_path)
    for name in (str(file), "mine.py"):
        error = refused(name)
        assert error.rule.startswith(said) and "\n" not in str(error)
        assert error.fix.startswith("correct it; ")


def test_a_config_files_own_config_error_is_shown_as_it_is(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from jaxpar.config import Config, replace\n\n"
        "def get_config():\n    return replace(Config(), **{'train.num_stepz': 3})\n"
    )
    assert refused(str(file)).field == "train.num_stepz"


def test_a_missing_dataset_is_refused_with_the_command_that_makes_it(tmp_path):
    data, run = tmp_path / "data", tmp_path / "run"
    error = refused("quickstart", "--data.path", str(data), "--run.dir", str(run))
    assert (error.field, error.value) == ("data.path", str(data))
    assert "does not exist" in error.rule
    assert f"python -m jaxpar.data prepare --input stdlib --output {data}" in error.fix
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------- values


def test_dashes_underscores_and_equal_signs_say_the_same():
    wanted = replace(load_config("quickstart"), **{"parallel.tensor": 2, "train.num_steps": 100})
    for args in (
        "--parallel.tensor 2 --train.num-steps 100",
        "--parallel.tensor 2 --train.num_steps 100",
        "--parallel.tensor=2 --train.num-steps=100",
        "--train.num-steps 7 --parallel.tensor 2 --train.num_steps 100",
    ):
        assert read("quickstart", *args.split()) == wanted


VALUES = [
    ("parallel.data", "-1", -1),
    ("train.num_steps", "10_000", 10_000),
    ("optimizer.learning_rate", "3e-4", 3e-4),
    ("optimizer.learning_rate", "1", 1.0),
    ("model.tie_embeddings", "False", False),
    ("model.tie_embeddings", "true", True),
    ("parallel.zero", "1", 1),
    ("compute.dtype", "bfloat16", "bfloat16"),
    ("parallel.remat", "qkv,attn_out", (RematValue("qkv"), RematValue("attn_out"))),
    ("run.compilation_cache", "", ""),
    ("run.dir", "None", "None"),
    ("run.dir", "runs/a=b c", "runs/a=b c"),
    ("model.layers.mixer.window", "128", 128),
    ("model.layers.mixer.window", "None", None),
    ("model.layers.mixer.rope.scaling", "None", None),
    ("model.layers.mixer.rope.scaling.original_max_position", "4096", 4096),
]


@pytest.mark.parametrize(("path", "text", "value"), VALUES)
@pytest.mark.parametrize("name", ["quickstart", "llama_1b"])  # RoPE scaling: None, and set
def test_a_value_takes_the_type_of_its_field(name, path, text, value):
    wanted = replace(load_config(name), **{path: value})
    found = read(name, flag(path), text)
    assert found == read(name, f"{flag(path)}={text}") == wanted
    assert read(name, *shlex.split(flag(path, value))) == wanted  # as a shell reads it
    assert type(value_at(found, path)) is type(value)


def value_at(cfg: Config, path: str) -> Any:
    if not path.startswith("model.layers."):
        return value_of(cfg, path)
    return operator.attrgetter(path.removeprefix("model.layers."))(cfg.model.layers[0])


def test_an_optional_section_can_be_set_changed_and_taken_away():
    path = "model.layers.mixer.rope.scaling"
    assert value_at(load_config("quickstart"), path) is None
    factor, position = f"--{path}.factor 4", f"--{path}.low-freq-factor 2"
    set_here = read("quickstart", *factor.split(), *position.split())
    assert value_at(set_here, path) == RopeScaling(factor=4.0, low_freq_factor=2.0)
    assert value_at(load_config("llama_1b"), path) == RopeScaling(factor=32.0)
    changed = read("llama_1b", *position.split())
    assert value_at(changed, path) == RopeScaling(factor=32.0, low_freq_factor=2.0)
    none = read("llama_1b", *factor.split(), f"--{path}", "None")
    assert value_at(none, path) is None
    again = read("llama_1b", f"--{path}", "None", *factor.split())
    assert value_at(again, path) == RopeScaling(factor=4.0)


def test_an_optional_section_of_flags_can_be_set_changed_and_taken_away():
    factor, none = ["--model.mup.base-width", "64"], ["--model.mup", "None"]
    assert load_config("quickstart").model.mup is None
    assert read("quickstart", *factor).model.mup == MupConfig(base_width=64)
    depth = read("quickstart", *factor, "--model.mup.base-depth", "2")
    assert depth.model.mup == MupConfig(base_width=64, base_depth=2)
    assert read("quickstart", *factor, *none).model.mup is None
    assert read("quickstart", *none, *factor).model.mup == MupConfig(base_width=64)


def test_print_config_shows_what_was_asked_for(capsys):
    factor = "model.layers.mixer.rope.scaling.factor"
    args = f"--train.num-steps 100 --print-config --{factor} 4".split()
    with pytest.raises(SystemExit) as stop:
        read("quickstart", *args)
    assert stop.value.code == 0
    text = capsys.readouterr().out
    wanted = {"train.num_steps": 100, factor: 4.0}
    assert from_json(text) == replace(load_config("quickstart"), **wanted)
    assert json.loads(text)["train"]["num_steps"] == 100


def test_print_config_of_what_cannot_work_is_refused(capsys):
    path = "model.layers.mixer.head_dim"
    assert refused("quickstart", flag(path), "7", "--print-config").field == path
    assert capsys.readouterr().out == ""


# ----------------------------------------------------------------------------- exit codes


def raising(error: BaseException):
    """A program that fails."""

    def main(_):
        raise error

    return main


ENDINGS = [
    (lambda _: None, 0, ""),
    (lambda _: 75, 75, ""),
    (raising(SystemExit()), 0, ""),
    (raising(SystemExit(3)), 3, ""),
    (raising(SystemExit("no")), 1, "no\n"),
    (raising(ConfigError("a.b", 1, "must", "do")), 2, "config error: a.b = 1: must. Fix: do.\n"),
    (raising(exit_codes.BadNumerics("step 3")), 17, "bad numerics: step 3\n"),
    (raising(BrokenPipeError()), 1, "error: the reader of the output has closed it\n"),
    (
        raising(OSError(28, "No space left")),
        1,
        "error: No space left. Free space, and run the same command again\n",
    ),
    (
        raising(OSError(36, "File name too long", "x" * 300)),
        2,
        f"config error: path = '{'x' * 60}...': is too long for a file name. "
        "Fix: use at most 255 bytes.\n",
    ),
    (raising(ZeroDivisionError("x")), 1, "ZeroDivisionError: x\n"),
    (raising(KeyboardInterrupt()), 130, "interrupted\n"),
    (raising(peers.PeerFailed("process 1 differs", 2)), 2, "error: process 1 differs\n"),
    (
        raising(peers.PeerFailed("checks: process 1: no", 1)),
        1,
        "error: checks: process 1: no\n",
    ),
    (raising(peers.PeersMissing("checks: after 9 s")), 1, "error: checks: after 9 s\n"),
]


@pytest.mark.parametrize(("main", "code", "message"), ENDINGS)
def test_a_program_ends_with_the_code_of_what_happened(main, code, message, monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    cli.run_program(main)
    assert codes == [code]
    error = capsys.readouterr().err
    assert error.endswith(message) if message else error == ""
    assert ("Traceback" in error) == message.startswith("ZeroDivisionError")


def test_a_sign_that_the_output_lacks_ends_no_program(tmp_path):
    program = (
        "from jaxpar.runtime.program import run_program; run_program(lambda _: print('2 × 3 µs'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 ? 3 ?s\n", "")
