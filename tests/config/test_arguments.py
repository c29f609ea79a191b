"""A config file's get_config() may take arguments: options of every command that takes a config."""

import pytest

from jaxpar import commands
from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.config.command_line import ConfigArguments
from jaxpar.config.config_file import load_config
from jaxpar.config.numerals import number, whole_number, with_unit
from jaxpar.config.options import read_options
from jaxpar.tools.planning.command import asked_for
from jaxpar.tools.planning.fields import command_line
from jaxpar.tools.planning.options import PlanOptions


def arguments(*words):
    return ConfigArguments.of(words, "python -m jaxpar.train")


def weights(model):
    """The matrices of the layers, counted by hand."""
    layer = model.layers[0]
    heads = layer.mixer.num_heads + layer.mixer.num_kv_heads
    attention = 2 * model.d_model * layer.mixer.head_dim * heads
    return len(model.layers) * (attention + 3 * model.d_model * layer.feed_forward.d_ff)


@pytest.mark.parametrize("params", [5e6, 30e6, 125e6, 350e6, 760e6, 1e9, 3e9, 8e9, 70e9, 1e12])
def test_a_llama_has_the_parameters_asked_for(params):
    cfg = load_config(f"llama:params={params}")
    assert weights(cfg.model) == pytest.approx(params, rel=0.03)
    tokens = cfg.train.num_steps * cfg.train.global_batch_size * cfg.data.seq_len
    assert tokens == pytest.approx(20 * params, rel=0.01)


def test_rates_and_batches_follow_the_step_law():
    cfg = arguments("llama", "--params", "350M", "--tokens=7B").base
    assert cfg.optimizer.learning_rate == pytest.approx(1.53e-3, rel=0.01)  # by a calculator
    assert cfg.train.global_batch_size * cfg.data.seq_len == pytest.approx(242_000, rel=0.02)
    last = cfg.optimizer.learning_rate * cfg.optimizer.min_lr_ratio
    assert last == pytest.approx(1e-5, rel=0.01)


def test_arguments_and_fields_come_in_any_order():
    made = arguments("llama", "--train.num-steps", "20", "--tokens", "1B", "--params", "30M")
    assert made.name == "llama:tokens=1B,params=30M"
    assert made.asked().train.num_steps == 20
    assert arguments(made.name).base == made.base
    longer = arguments(made.name, "--tokens", "2B")  # the last one counts
    assert longer.base == arguments("llama", "--params", "30M", "--tokens", "2B").base


OWN = """
from jaxpar import load_config, replace

def get_config(steps=7, rate: float = 1e-3, tied=False, name="x", seed: int | None = None):
    return replace(load_config("quickstart"), **{
        "train.num_steps": steps, "optimizer.learning_rate": rate, "train.seed": seed or 0,
        "run.dir": name, "model.tie_embeddings": tied})
"""


def test_arguments_of_every_type(tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    own = str(tmp_path / "own.py")
    words = [own, "--steps=9", "--tied", "True", "--name", "2", "--seed", "3", "--rate", "1e-2"]
    cfg = arguments(*words).base
    assert (cfg.train.num_steps, cfg.train.seed, cfg.run.dir) == (9, 3, "2")
    assert cfg.model.tie_embeddings and cfg.optimizer.learning_rate == 1e-2
    for option, value, rule in (
        ("--steps", "1.5", "must be a whole number. Fix: use --steps 7"),
        ("--tied", "maybe", "Fix: use --tied False"),
        ("--seed", "x", "Fix: use --seed None"),
    ):
        with pytest.raises(ConfigError) as caught:
            _ = arguments(own, option, value).base
        assert rule in str(caught.value)
    with pytest.raises(SystemExit):
        call("train", [own, "--help"])
    assert "(default: 7)" in capsys.readouterr().out
    (tmp_path / "bad.py").write_text("def get_config(steps): pass")
    with pytest.raises(ConfigError, match="has no default for steps"):
        _ = arguments(str(tmp_path / "bad.py")).base


def test_an_option_of_the_command_is_an_argument_too():
    words = ["llama", "--params", "1B", "--tokens", "7B"]
    options = read_options(PlanOptions, words, "python -m jaxpar.plan", "")
    assert options.tokens == 7e9 and options.config.name == "llama:params=1B,tokens=7B"


def test_a_plan_without_data_assumes_a_vocabulary(tmp_path, capsys):
    words = ["llama", "--data.path", str(tmp_path / "none")]
    options = read_options(PlanOptions, words, "python -m jaxpar.plan", "")
    asked = asked_for(options, None, commands.with_vocabulary)
    assert asked.cfg.model.vocab_size == 32_000 and "32,000: assumed" in capsys.readouterr().err
    assert "vocab" not in command_line(asked.name, asked.base, asked.cfg)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["llama", "--params", "big"], "Fix: use --params 125M"),
        (["llama", "--params", "1"], "from 5M to 1T"),
        (["llama", "--parms", "1B"], "Fix: use --params"),
        (["llama", "--params"], "must be a number"),
        (["llama", "--tokens", "1K"], "at least 10 steps"),
        (["llama", "--tokens", "nan"], "from 0 to 1000T"),
        (["llama:width=3"], "Fix: use one of params, tokens"),
        (["quickstart:params=1B"], "Fix: use quickstart without --params"),
        (["quickstart", "--params", "1B"], "is not a field"),
    ],
)
def test_wrong_arguments(words, said):
    with pytest.raises(ConfigError) as caught:
        arguments(*words).asked()
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"), [("350M", 350e6), ("1.5B", 1.5e9), ("2K", 2000), ("-3T", -3e12)]
)
def test_numbers_with_a_unit(text, value):
    assert number(text) == whole_number(text) == value
    assert with_unit(value) == text


@pytest.mark.parametrize("text", ["M", "1.5.M", "1e3M", "1_0M", "0.0001K", "٣M", "infM"])
def test_what_is_no_whole_number_with_a_unit(text):
    with pytest.raises(ValueError):
        whole_number(text)
