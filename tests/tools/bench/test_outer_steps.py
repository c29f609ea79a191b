"""Timed outer steps of DiLoCo: each fragment's, and the mean with inner steps."""

import contextlib
import io
import json

import numpy as np
import pytest

from jaxpar.commands import call
from jaxpar.config import replace
from jaxpar.config.validate import resolve
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.diloco.sent import fragment_bytes
from jaxpar.step.state import init_state
from jaxpar.tools.bench import outer_steps
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

FIELDS = {"diloco.every": 4, "diloco.fragments": 2, "parallel.replica": 2, "parallel.data": 1}


def no_step(fragment):
    raise AssertionError("only an overlap has steps with an exchange")


def test_each_fragment_is_timed(devices):
    """And takes that many outer steps: here, replicas stay where the outer weights are."""
    cfg = resolve(replace(TINY, **FIELDS), 2)
    mesh = make_mesh(cfg.parallel, devices[:2])
    state = init_state(cfg, mesh)
    before = np.asarray(state.params["layers"]["wq"])
    card, state = outer_steps.time_outer_steps(cfg, mesh, state, no_step, repeats=2)
    np.testing.assert_array_equal(before, state.params["layers"]["wq"])
    found = card["outer_steps"]
    medians = [fragment["median"] for fragment in found["fragments"]]
    assert len(medians) == 2 and min(medians) > 0
    assert found["outer_step_seconds"] == sum(medians) and found["every"] == 4
    assert found["bytes_per_step"] == sum(fragment_bytes(cfg)) / 4
    plain = replace(cfg, diloco=None)
    assert outer_steps.time_outer_steps(plain, mesh, state, no_step) == ({}, state)


@pytest.mark.slow
def test_an_overlap_counts_what_its_steps_take_more(devices, monkeypatch):
    cfg = resolve(replace(TINY, **FIELDS, **{"diloco.overlap": 2}), 2)
    mesh = make_mesh(cfg.parallel, devices[:2])
    state, clock = init_state(cfg, mesh), [0.0]
    monkeypatch.setattr(outer_steps.time, "perf_counter", lambda: clock[0])

    def step_of(fragment):
        def step(state):
            clock[0] += 3.0 if fragment is None else 3.5 + fragment
            return state

        return step

    card, _ = outer_steps.time_outer_steps(cfg, mesh, state, step_of, repeats=1)
    found = card["outer_steps"]
    assert [fragment["more_in_a_step"] for fragment in found["fragments"]] == [0.5, 1.5]
    assert [fragment["median"] for fragment in found["fragments"]] == [1.0, 3.0]
    assert outer_steps.mean_step_seconds(3.0, card) == 3.0 + (1.0 + 3.0) / 4


def test_the_mean_and_its_words():
    fragments = [{"median": 0.03}, {"median": 0.05}]
    card = {"step_seconds": {"median": 0.1}, "outer_steps": {"every": 4, "fragments": fragments}}
    card["outer_steps"]["overlap"] = 0
    card["outer_steps"] |= {"outer_step_seconds": 0.08, "bytes_per_step": 2e6}
    assert outer_steps.mean_step_seconds(0.1, card) == pytest.approx(0.12)
    assert outer_steps.in_words(card) == (
        "diloco: inner step 100.0 ms, outer steps of 2 fragments (at most 50.0 at a time) 80.0 ms "
        "every 4, mean 120.0 ms per step, 2 MB per step over replica"
    )
    card["outer_steps"]["overlap"] = 2
    assert "ms every 4, beside 2 inner steps, mean" in outer_steps.in_words(card)
    assert outer_steps.mean_step_seconds(0.1, {}) == 0.1 and outer_steps.in_words({}) == ""


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 2])
def test_the_card_of_a_run(only_devices, write_config, tmp_path, steps):
    file, fields = tmp_path / "card.json", ["--parallel.replica", "2", "--diloco.every", "4"]
    fields += ["--diloco.overlap", str(steps)]
    command = ["--bench", write_config(tmp_path), "--steps", "4", "--profile-steps", "0", *fields]
    with only_devices(2), contextlib.redirect_stdout(io.StringIO()) as said:
        assert call("profile", [*command, "--card", str(file)]) == 0
    card = json.loads(file.read_text())
    inner, outer = card["step_seconds"]["median"], card["outer_steps"]["outer_step_seconds"]
    rate = 8 * 32 / (inner + outer / 4) / 2
    assert card["tokens_per_second_per_device"] == pytest.approx(rate)
    assert f"outer steps {outer * 1e3:.1f} ms every 4" in said.getvalue()
