"""`plan --goodput`: the formula of Young and Daly."""

import json
import random

import pytest

from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.tools.planning import questions


@pytest.mark.parametrize(
    "hours, interval, blocking", [(2, 300, 30), (10, 3000, 30), (1, 2000, 120)]
)
def test_the_formula_is_the_mean_of_random_failures(hours, interval, blocking):
    draw, between, restart = random.Random(0), hours * 3600.0, 300.0
    total, segments = 0.0, 20_000
    for _ in range(segments):
        need = interval + blocking
        while (failure := draw.expovariate(1 / between)) < need:
            total += failure
            need = restart + interval + blocking
        total += need
    simulated = segments * interval / total
    assert questions.expected_goodput(interval, blocking, restart, between) == pytest.approx(
        simulated, rel=0.01
    )


def test_the_best_interval_wastes_the_least():
    best = questions.best_interval(20, 3 * 3600)
    share = lambda seconds: questions.expected_goodput(seconds, 20, 300, 3 * 3600)  # noqa: E731
    assert share(best) >= max(share(0.9 * best), share(1.1 * best))
    assert best == pytest.approx((2 * 20 * 3 * 3600) ** 0.5, rel=0.05), "Young's"
    assert questions.best_interval(1e6, 10.0) == 10.0
    assert questions.expected_goodput(10.0, 1e6, 1e9, 10.0) == 0.0


def test_the_answer(capsys):
    assert call("plan", ["--goodput", "--gpus", "16384"]) == 0
    said = capsys.readouterr().out
    assert "16,384 GPUs: a failure every 3.05 h" in said and "expected goodput: 96." in said
    words = ["--failure-hours", "8000", "--save-seconds", "20", "--restart-seconds", "300"]
    assert call("plan", ["--goodput", "--gpus", "8", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seconds_between_failures"] == 3_600_000
    assert found["seconds_between_saves"] == pytest.approx(questions.best_interval(20, 3.6e6))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["llama3_8b", "--save-seconds", "3"], "'--save-seconds': is only for --goodput"),
        (
            ["--goodput", "--failure-hours", "0"],
            r"--failure-hours = 0.0: must be from .* use --f",
        ),
        (["--goodput", "--restart-seconds", "nan"], "--restart-seconds = nan: must be from"),
        (["llama3_8b", "--goodput"], "'llama3_8b': is one argument too many.*plan --goodput"),
        (["--goodput", "--top", "3"], "'--top': cannot be combined with --goodput"),
        (["--goodput", "--nodes=2"], "'--nodes': cannot be combined with --goodput"),
    ],
)
def test_refusals(words, said):
    with pytest.raises(ConfigError, match=said):
        call("plan", words)
