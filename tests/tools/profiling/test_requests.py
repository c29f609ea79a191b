"""Requests: how processes agree on the same step without waiting for one another."""

import contextlib
import random
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxpar.config import Config, replace
from jaxpar.monitoring import profiler as requests


class Board:
    """A fake of `peers`: texts that each process publishes, read by any of them."""

    def __init__(self, count: int):
        self.texts: dict[int, str] = {}
        self.current, self.size = 0, count

    def world_size(self):
        return self.size

    def rank(self):
        return self.current

    def publish(self, topic, text):
        self.texts[self.current] = text

    def read_published(self, topic):
        return dict(self.texts)


@pytest.mark.parametrize("seed", range(20))
def test_all_begin_with_the_same_step(seed, monkeypatch, tmp_path):
    rng = random.Random(seed)
    count, every = rng.choice([2, 3, 5]), rng.choice([1, 3, 10])
    board = Board(count)
    monkeypatch.setattr(requests, "peers", board)
    cfg = replace(
        Config(), **{"train.log_every": every, "profile.num_steps": rng.choice([1, 2, 45])}
    )
    ranks = [requests.RunProfiler(cfg, tmp_path, None, "", str) for _ in range(count)]
    begun: list[list[int]] = [[] for _ in ranks]
    for own, profiler in zip(begun, ranks, strict=True):

        def begin(step, own=own, profiler=profiler):
            own.append(step)
            profiler._first = step

        monkeypatch.setattr(profiler, "_begin", begin)
        monkeypatch.setattr(profiler, "_end", lambda p=profiler: setattr(p, "_first", 0))
        monkeypatch.setattr(profiler, "_annotate", lambda step: None)
    asked = {(rng.randrange(count), rng.randrange(2, 40)) for _ in range(2)}
    steps, waiting = [1] * count, set()
    while min(steps) < 90:
        # Nobody is more than a step ahead of the slowest: it fetches a loss that all have made.
        rank = rng.choice([r for r in range(count) if steps[r] <= min(steps) + 1])
        board.current = rank
        if rank in waiting or (rank, steps[rank]) in asked:
            waiting.discard(rank)
            requests._signals.append(10)
        ranks[rank].before(steps[rank], None, lambda: None, lambda *args, **more: None)
        waiting |= {rank} if requests._signals else set()
        requests._signals.clear()  # it is this process's alone
        steps[rank] += 1
    assert begun[0] and all(own == begun[0] for own in begun)
    first = [step for step in begun[0] if step - requests.MAX_PROFILED_STEPS not in begun[0]]
    assert all((step - 1) % every == 0 for step in first)


def traced(tmp_path, monkeypatch, last: int, **fields) -> list[tuple[int, int]]:
    """First and last step of each trace of a run of `last` steps, without a profiler."""
    cfg = replace(Config(), **{f"profile.{name}": value for name, value in fields.items()})
    profiler = requests.RunProfiler(cfg, tmp_path, None, "", str)
    found = []
    monkeypatch.setattr(requests, "capture", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(
        profiler, "_keep", lambda: found.append((profiler._first, profiler._latest))
    )
    with profiler:
        for step in range(1, last + 1):
            profiler.before(step, None, lambda: None, lambda *args, **more: None)
    return found


def test_a_long_profile_is_several_traces(tmp_path, monkeypatch):
    found = traced(tmp_path, monkeypatch, 90, start=10, num_steps=45)
    assert found == [(10, 29), (30, 49), (50, 54)]


def test_repeated_profiles(tmp_path, monkeypatch):
    found = traced(tmp_path, monkeypatch, 80, start=3, num_steps=2, every=30)
    assert found == [(3, 4), (33, 34), (63, 64)]
    found = traced(tmp_path, monkeypatch, 90, start=1, num_steps=25, every=40)
    assert found == [(1, 20), (21, 25), (41, 60), (61, 65), (81, 90)]


def test_a_trace_that_fails_does_not_end_the_repeats(tmp_path, monkeypatch):
    def fails_once(folder, tried=[]):  # noqa: B006
        tried.append(folder)
        if len(tried) == 1:
            raise OSError("no space")
        return contextlib.nullcontext()

    cfg = replace(Config(), **{"profile.start": 2, "profile.num_steps": 30, "profile.every": 40})
    profiler = requests.RunProfiler(cfg, tmp_path, None, "", str)
    begun = []
    monkeypatch.setattr(requests, "capture", fails_once)
    monkeypatch.setattr(profiler, "_keep", lambda: begun.append(profiler._first))
    with profiler:
        for step in range(1, 60):
            profiler.before(step, None, lambda: None, lambda *args, **more: None)
    assert begun == [22, 42]


def test_requests_are_looked_for_once_a_second(monkeypatch, tmp_path):
    profiler = requests.RunProfiler(Config(), tmp_path, None, "", str)
    request, now = tmp_path / requests.REQUEST_FILE, [100.0]
    monkeypatch.setattr(requests.time, "monotonic", lambda: now[0])
    assert not profiler._is_asked_for()
    request.touch()
    assert not profiler._is_asked_for() and request.exists()
    now[0] += requests.LOOK_SECONDS
    assert profiler._is_asked_for() and not request.exists()
    requests._signals.append(10)
    assert profiler._is_asked_for() and not profiler._is_asked_for()


def test_profiles_of_one_attempt_are_limited(monkeypatch, tmp_path):
    said: list[str] = []
    profiler = requests.RunProfiler(Config(), Path(tmp_path), None, "", said.append)
    profiler._taken = requests.MAX_PROFILES
    profiler._begin(7)
    assert "has taken its maximum of" in said[0] and profiler._first == 0
    assert not (tmp_path / "profiles").exists()


def test_the_command_that_reads_a_profile_works_as_written(monkeypatch, tmp_path):
    said: list[str] = []
    run = tmp_path / "my run"
    profiler = requests.RunProfiler(Config(), run, None, "", said.append)
    profiler._first = profiler._latest = 7
    profiler._steps = SimpleNamespace(cfg=None, program=SimpleNamespace(as_text=str))
    profiler._scratch().mkdir(parents=True)
    monkeypatch.setattr(requests, "facts_of", lambda *_: None)
    monkeypatch.setattr(requests.profile_folder, "write_facts", lambda *_: None)
    profiler._keep()
    command = said[0].partition("to read it: ")[2]
    assert shlex.split(command)[2:] == ["jaxpar.profile", str(run), "--step", "7"]
