"""From the benchmark's running step to the card, with a real trace in place of the one taken."""

import contextlib
import json

import jax.numpy as jnp
import pytest

from jaxpar.monitoring import profile_folder
from jaxpar.tools.bench import profiled
from jaxpar.tools.bench.cards import comparison

FACTS = profile_folder.ProfileFacts(4, 3, 1, 2, "NVIDIA H200", "data=2", 64, 1e9, 1e12, {}, {})


def running(hlo_text):
    """A step that counts, on batches that are numbers."""
    batches = ((n, jnp.float32(n)) for n in range(100))
    step = lambda s, b: (s + 1, b)  # noqa: E731
    return profiled.StartedRun(step, hlo_text, jnp.zeros(()), batches, lambda _: FACTS)


def test_from_trace_to_card(real_trace, real_hlo, monkeypatch, tmp_path):
    monkeypatch.setattr(profiled.trace, "newest_file", lambda folder: real_trace)
    monkeypatch.setattr(profiled, "SETTLE", 0)  # the real one is of the steps alone
    run = running(real_hlo)
    entries = profiled.profile_steps(run, 3, str(tmp_path))
    assert run.state == 3 and next(run.batches, None) is None
    assert list(tmp_path.rglob("*.xplane.pb"))
    card = json.loads(json.dumps(entries | {"collective_bytes": None}))
    assert card["profile"]["module"] == "jit_train_step" and card["profile"]["devices"] == 2
    assert len(card["profile"]["top_kernels"]) == 10
    assert profile_folder.read_facts(tmp_path) == FACTS, "the kept trace tells FLOPs of the model"
    assert card["profile"]["tensor_ms"] > 0
    assert "exposed communication 4.6 (5.0), 6.3%" in profiled.in_words(card)
    card["step_seconds"] = {}
    rows = [line.split() for line in comparison("ab", [card, card]).splitlines()]
    assert ["exposed:", "all-gather", "ms", "2.8", "2.8", "1.000"] in rows


def test_another_programs_trace_is_no_profile(real_trace, real_hlo, monkeypatch):
    monkeypatch.setattr(profiled.trace, "newest_file", lambda folder: real_trace)
    other = real_hlo.replace("HloModule jit_train_step", "HloModule jit_other")
    entries = profiled.profile_steps(running(other), 1)
    assert entries == {"profile": None, "profile_missing": "no GPU ran jit_other in the trace"}


def test_the_steps_in_which_clocks_settle_are_left_out(real_trace, real_hlo, monkeypatch):
    monkeypatch.setattr(profiled.trace, "newest_file", lambda folder: real_trace)
    whole = profiled.trace.read(real_trace)
    monkeypatch.setattr(profiled, "SETTLE", 1)
    entries = profiled.profile_steps(running(real_hlo), 2)
    assert entries["profile"]["steps"] == len(whole.devices[0]) - 1
    monkeypatch.setattr(profiled, "SETTLE", 3)
    missing = profiled.profile_steps(running(real_hlo), 2)["profile_missing"]
    assert missing == "jit_train_step ran only the first 3 steps, which are discarded"


@pytest.mark.parametrize("when", ["begin", "end"])
def test_a_trace_that_cannot_be_written_leaves_the_timing(when, monkeypatch):
    @contextlib.contextmanager
    def full(_):
        if when == "begin":
            raise OSError(28, "No space left on device")
        yield
        raise RuntimeError("no space")

    monkeypatch.setattr(profiled, "capture", full)
    run = running("HloModule jit_step")
    entries = profiled.profile_steps(run, 3)
    assert run.state == profiled.SETTLE + 3, "the steps are taken, once"
    assert entries["profile"] is None
    assert entries["profile_missing"].startswith("the trace failed: ")


def test_a_step_that_fails_under_the_profiler_is_no_failure_of_the_trace(monkeypatch):
    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(profiled, "capture", lambda _: contextlib.nullcontext())
    run = running("HloModule jit_step")
    run.step = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        profiled.profile_steps(run, 1)
