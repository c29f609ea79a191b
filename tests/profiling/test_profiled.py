"""From the benchmark's running step to the card, with a real trace in place of the one taken."""

import json

import jax.numpy as jnp

from jaxpar.bench import profiled
from jaxpar.bench.compare import comparison


def running(hlo_text):
    """A step that counts, on batches that are numbers."""
    batches = ((n, jnp.float32(n)) for n in range(100))
    return profiled.Running(lambda s, b: (s + 1, b), hlo_text, jnp.zeros(()), batches)


def test_from_trace_to_card(real_trace, real_hlo, monkeypatch, tmp_path):
    monkeypatch.setattr(profiled.trace, "newest_file", lambda folder: real_trace)
    run = running(real_hlo)
    entries = profiled.profile_steps(run, 3, str(tmp_path))
    assert run.state == 3 and next(run.batches, None) is None
    assert list(tmp_path.rglob("*.xplane.pb"))
    card = json.loads(json.dumps(entries | {"collective_bytes": None}))
    assert card["profile"]["module"] == "jit_train_step" and card["profile"]["devices"] == 2
    assert len(card["profile"]["top_kernels"]) == 10
    assert "exposed communication 4.6 (5.0), 6.3%" in profiled.in_words(card)
    card["step_seconds"] = {}
    rows = [line.split() for line in comparison("ab", [card, card], "train").splitlines()]
    assert ["exposed:", "all-gather", "ms", "2.8", "2.8", "1.000"] in rows


def test_another_programs_trace_is_no_profile(real_trace, real_hlo, monkeypatch):
    monkeypatch.setattr(profiled.trace, "newest_file", lambda folder: real_trace)
    other = real_hlo.replace("HloModule jit_train_step", "HloModule jit_other")
    entries = profiled.profile_steps(running(other), 1)
    assert entries == {"profile": None, "profile_missing": "no GPU ran jit_other in the trace"}
