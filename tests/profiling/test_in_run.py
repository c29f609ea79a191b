"""Requests: how processes agree on the same step without waiting for one another."""

import random
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxpar.config import Config, replace
from jaxpar.profiling import in_run


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
    monkeypatch.setattr(in_run, "peers", board)
    cfg = replace(Config(), **{"train.log_every": every, "profile.num_steps": rng.choice([1, 2])})
    ranks = [in_run.RunProfiler(cfg, tmp_path, None, "", str) for _ in range(count)]
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
            in_run._signals.append(10)
        ranks[rank].before(steps[rank], None, lambda: None, lambda *args, **more: None)
        waiting |= {rank} if in_run._signals else set()
        in_run._signals.clear()  # it is this process's alone
        steps[rank] += 1
    assert begun[0] and all(own == begun[0] for own in begun)
    assert all((step - 1) % every == 0 for step in begun[0])


def test_requests_are_looked_for_once_a_second(monkeypatch, tmp_path):
    profiler = in_run.RunProfiler(Config(), tmp_path, None, "", str)
    request, now = tmp_path / in_run.REQUEST_FILE, [100.0]
    monkeypatch.setattr(in_run.time, "monotonic", lambda: now[0])
    assert not profiler._is_asked_for()
    request.touch()
    assert not profiler._is_asked_for() and request.exists()
    now[0] += in_run.LOOK_SECONDS
    assert profiler._is_asked_for() and not request.exists()
    in_run._signals.append(10)
    assert profiler._is_asked_for() and not profiler._is_asked_for()


def test_profiles_of_one_attempt_are_limited(monkeypatch, tmp_path):
    said: list[str] = []
    profiler = in_run.RunProfiler(Config(), Path(tmp_path), None, "", said.append)
    profiler._taken = in_run.MAX_PROFILES
    profiler._begin(7)
    assert "has taken its maximum of" in said[0] and profiler._first == 0
    assert not (tmp_path / "profiles").exists()


def test_the_command_that_reads_a_profile_works_as_written(monkeypatch, tmp_path):
    said: list[str] = []
    run = tmp_path / "my run"
    profiler = in_run.RunProfiler(Config(), run, None, "", said.append)
    profiler._first = profiler._latest = 7
    profiler._program = SimpleNamespace(as_text=str)
    profiler._scratch().mkdir(parents=True)
    monkeypatch.setattr(profiler, "_facts", lambda *_: None)
    monkeypatch.setattr(in_run.folder, "write_facts", lambda *_: None)
    profiler._keep()
    command = said[0].partition("to read it: ")[2]
    assert shlex.split(command)[2:] == ["jaxpar.profile", str(run), "--step", "7"]
