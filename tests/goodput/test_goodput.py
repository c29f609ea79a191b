"""The simulation of failures agrees with closed forms, and its time adds up."""

import dataclasses
import itertools
import math

import pytest

from jaxpar.goodput import study, theory
from jaxpar.goodput.failures import DAY, HOUR, KINDS, Interruption, Rates, failures, per_second
from jaxpar.goodput.recovery import Attempt, Policy, Saves
from jaxpar.goodput.run import PARTS, Simulation

NEVER = Rates(*[math.inf] * len(KINDS))


def scene(rates: Rates, hosts: int = 8, days: float = 60, seeds: int = 16) -> study.Scene:
    return study.Scene(hosts, 8, rates, days * DAY, range(seeds))


def agrees(found: study.Mean, expected: float) -> bool:
    """Within twice the 95% interval, four standard errors; which must be narrow."""
    return abs(found.value - expected) < 2 * found.error < 0.02


@pytest.mark.parametrize("hours, every, blocking", [(2, 60, 30), (10, 600, 30), (1, 400, 120)])
def test_saves_that_block_cost_what_theory_says(hours, every, blocking):
    rates = dataclasses.replace(NEVER, software=8 * hours)
    policy = Policy(5.0, Saves(every, blocking), detect=60, restart=240)
    found = study.simulate(policy, scene(rates))
    expected = theory.goodput(every * 5.0, blocking, 300, hours * HOUR)
    assert agrees(found.goodput, expected)


def test_the_best_interval_is_dalys():
    rates = dataclasses.replace(NEVER, software=8 * 3)
    policy, place = Policy(5.0, Saves(10, 20), restart=300), scene(rates, seeds=8)
    best = study.best_intervals(policy, place, lambda *_: None)
    by_daly = round(theory.daly(20, 3 * HOUR) / 5)
    there = study.simulate(study.with_intervals(policy, by_daly, 0), place).goodput
    assert abs(there.value - best.goodput.value) < 0.001
    assert 0.6 < best.policy.disk.every / by_daly < 1.7
    assert theory.young(20, 3 * HOUR) == pytest.approx(theory.daly(20, 3 * HOUR), rel=0.05)


def test_hosts_that_are_lost_are_waited_for():
    """One host that fails every 100 hours and is away for 10: it is there 10 of 11 hours."""
    rates = dataclasses.replace(NEVER, host=100)
    policy = Policy(1.0, Saves(1), repair=10 * HOUR)
    found = study.simulate(policy, scene(rates, hosts=1, days=600))
    assert agrees(found.goodput, 100 / 110)
    assert found.share("no hosts") == pytest.approx(10 / 110, rel=0.1)


def test_spares_replace_hosts():
    rates = dataclasses.replace(NEVER, host=100)
    policy = Policy(1.0, Saves(1), repair=10 * HOUR, spares=5)
    assert study.simulate(policy, scene(rates, hosts=1)).share("no hosts") == 0


def test_fewer_hosts_go_on():
    """Of two hosts, each away for a tenth of the time, those that are there work."""
    rates = dataclasses.replace(NEVER, host=90)
    policy = Policy(1.0, Saves(1), repair=10 * HOUR, fewest=1)
    found = study.simulate(policy, scene(rates, hosts=2, days=600))
    assert agrees(found.goodput, 0.9)
    assert found.share("fewer hosts") == pytest.approx(0.09, rel=0.1)


def test_a_fixed_part_of_a_step_takes_no_longer_on_fewer_hosts():
    policy = Policy(10.0, Saves(), fixed=4.0)
    assert [policy.step_on(live, 4) for live in (4, 3, 1)] == [10, 4 + 6 * 4 / 3, 4 + 6 * 4]


@pytest.mark.parametrize("away", [20, 50])
def test_a_host_that_comes_back_during_a_restart_is_taken_in_after_a_step(away):
    """One host of two is lost at 50 s and back before the other trains again, at 160 s."""
    policy = Policy(1.0, Saves(10, 0, 1, 5), detect=5, restart=100, repair=away, fewest=1)
    outcome = Simulation(policy, 2, iter([Interruption(50.0, "host", 1)]), 400.0).run()
    # 40 steps are on disk. Step 41 takes two seconds; then the run saves, and starts on both hosts.
    both = 50 + 5 + 100 + 5 + 2 + 1 + 100 + 5
    assert outcome.seconds["fewer hosts"] == 1 and outcome.steps == 41 + 400 - both
    assert outcome.seconds["lost work"] == 10 and outcome.seconds["save wait"] == 1


def test_a_run_that_stops_in_time_saves_to_disk():
    """Also with mirrors: the disk is newer then."""
    policy = Policy(1.0, Saves(100, 0, 3, 7), Saves(10, 0, 0, 1), restart=5)
    outcome = Simulation(policy, 2, iter([Interruption(24.5, "planned", 0)]), 60.0).run()
    assert outcome.loaded == {"disk": 1} and outcome.most_lost == 0
    assert outcome.seconds["save wait"] == 3 and outcome.steps == 60 - 3 - 5 - 7


DISK = Policy(5.0, Saves(300, 10, 100, 120), detect=30, restart=200, spares=10**6)
BOTH = dataclasses.replace(DISK, memory=Saves(10, 0.1, 20, 5))


def test_mirrors_lose_fewer_steps():
    """At most those since the last one that was complete: one interval and 20 s before it."""
    place = scene(dataclasses.replace(NEVER, host=400), hosts=16)
    without, mirrored = study.simulate(DISK, place), study.simulate(BOTH, place)
    assert mirrored.goodput.value > without.goodput.value + 0.005
    assert max(one.most_lost for one in without.outcomes) > 300
    only = [one.most_lost for one in mirrored.outcomes if set(one.loaded) == {"memory"}]
    assert len(only) > 8 and 10 <= max(only) <= 10 + 20 / 5 + 1


def test_the_disk_is_needed_when_both_hosts_of_a_pair_are_lost():
    """As often as the partner fails before the next mirror is complete."""
    rates = dataclasses.replace(NEVER, host=20)
    found = study.simulate(BOTH, scene(rates, hosts=16)).outcomes
    window = 30 + 200 + 5 + 10 * 5.0 + 0.1 + 20
    fell = sum(one.loaded["disk"] + one.loaded["start"] for one in found)
    expected = sum(one.failures["host"] for one in found) * window / (20 * HOUR)
    assert expected > 50 and abs(fell - expected) < 4 * math.sqrt(expected)


def test_time_adds_up_and_failures_are_those_of_the_rates():
    policy = Policy(
        *(6.0, Saves(100, 1, 60, 90), Saves(5, 0.2, 10, 5)),
        **{"detect": 60, "restart": 120, "spares": 3, "repair": 40 * HOUR, "fewest": 500},
    )
    place = scene(Rates(), hosts=512, days=30, seeds=6)
    found = study.simulate(policy, place)
    for one in found.outcomes:
        assert one.total == pytest.approx(30 * DAY, rel=1e-9)
        assert min(one.seconds.values()) >= 0 and one.seconds["fewer hosts"] > 0
        assert one.seconds["step"] == pytest.approx(one.steps * 6.0)
    seen = sum(sum(one.failures.values()) for one in found.outcomes)
    expected = 6 * 30 * DAY * sum(per_second(Rates(), 512, 8).values())
    assert abs(seen - expected) < 4 * math.sqrt(expected)
    assert set(found.outcomes[0].seconds) == set(PARTS)


def test_llama_3_had_so_many():
    assert 54 * DAY * sum(per_second(Rates(), 2048, 8).values()) == pytest.approx(466)


def test_an_attempt_by_hand():
    """Steps of 10 s; the memory after each second step holds 1 s, the disk after each fourth 3."""
    disk, memory = Saves(4, 3, 20), Saves(2, 1, 5)
    attempt = Attempt(2, 10.0, Policy(10.0, disk, memory))
    ends = [(3, 10), (4, 20), (5, 34), (6, 44), (7, 55), (8, 65), (9, 79)]
    for step, end in ends:
        assert attempt.end_of(step) == end
        assert attempt.done(end) == step and attempt.done(end - 0.01) == step - 1
    assert attempt.complete_at(4, memory) == 26 and attempt.complete_at(4, disk) == 44
    saved = lambda seconds: attempt.saved(seconds, attempt.done(seconds))  # noqa: E731
    assert saved(25.9) == (None, None) and saved(26) == (None, 4)
    assert saved(43)[0] is None and saved(44)[0] == 4
    assert saved(88)[0] == 4 and saved(89)[0] == 8


def test_a_save_that_is_slower_than_its_interval_holds_training_up():
    assert Saves(10, 1, 100).wait(5.0) == 1 + 50
    found = study.simulate(Policy(5.0, Saves(10, 1, 100)), scene(NEVER, days=1))
    assert found.goodput.value == pytest.approx(50 / 101, rel=0.01)


def test_one_failure_by_hand():
    """Killed at 47 s in step 5: 4 steps done, 3 of them in memory; the disk has none."""
    policy = Policy(10.0, Saves(100, 0, 0, 9), Saves(3, 1, 2, 4), detect=5, restart=6)
    run = Simulation(policy, 2, iter([Interruption(47.0, "gpu", 1)]), 100.0)
    run._spares = 1
    outcome = run.run()
    assert outcome.loaded == {"memory": 1} and outcome.most_lost == 1
    # 31 s for three steps and a mirror, one step lost, 6 s of the next; recovered at 47+5+6+4 = 62
    assert outcome.seconds["lost work"] == pytest.approx(10 + 6 + 7)  # 7: at the end, within a step
    assert outcome.seconds["detect"] == 5 and outcome.seconds["load"] == 4
    assert outcome.steps == 6 and outcome.seconds["mirror wait"] == 2


def test_seeds_differ_and_repeat():
    first, again, other = (
        list(itertools.islice(failures(Rates(), 64, 8, seed), 50)) for seed in (1, 1, 2)
    )
    assert first == again != other
