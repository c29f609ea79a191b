"""The lease on a run: one holder, taken over when it has expired, kept through a poor network."""

import json
import threading
import time
from datetime import datetime, timedelta

import pytest

from jaxpar.runtime.files.lock import RunLocked
from jaxpar.stores import lease
from jaxpar.stores.lease import NAME, Lease
from tests.ranks import HANG, wait_for
from tests.stores.server import objects_at


def taken(address, **more) -> Lease:
    return Lease(objects_at(address), print, **more)


def of_another_host(store, **more) -> None:
    """Write the lease of a run elsewhere."""
    about = json.loads(store.read(NAME)[0])
    store.write(NAME, json.dumps(about | {"space": "elsewhere", "host": "gpu7"} | more).encode())


@pytest.mark.waits
def test_one_of_many_takes_it(address):
    held, refused, start = [], [], threading.Barrier(6)

    def race() -> None:
        start.wait()
        try:
            held.append(taken(address, wait=False))
        except RunLocked as error:
            refused.append(str(error))

    threads = [threading.Thread(target=race) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 1 and len(refused) == 5
    assert "is being written by process" in refused[0] and "Fix: stop that run" in refused[0]
    held[0].release()
    taken(address, wait=False).release()


def test_a_living_holder_is_not_waited_for(address, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)
    with taken(address):
        objects = objects_at(address)
        of_another_host(objects)  # lost at the next renewal, by its holder here
    monkeypatch.setattr(lease, "RENEW_SECONDS", 1.1)  # the time in it has whole seconds
    with taken(address.__class__("s3", address.bucket, "runs/two")) as held:
        monkeypatch.setattr(lease, "_process_space", lambda: "elsewhere")
        monkeypatch.setattr(lease, "LEASE_SECONDS", 1e6)  # waiting for it would never end
        with pytest.raises(RunLocked, match="is being written"):
            Lease(objects_at(held._objects.address), print)


def test_an_expired_one_is_taken_over(address, store, monkeypatch, capsys):
    taken(address)._over.set()  # it is renewed no more
    of_another_host(store)
    with pytest.raises(RunLocked, match="on gpu7"):
        taken(address, wait=False)
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.3)
    began = time.monotonic()
    taken(address).release()
    assert time.monotonic() - began >= 0.3
    assert "waiting    s3://" in capsys.readouterr().out


def test_that_of_a_dead_process_of_this_host_is_taken_at_once(address, store):
    taken(address)._over.set()
    about = json.loads(store.read(NAME)[0])
    store.write(NAME, json.dumps(about | {"pid": 2**22 + 1}).encode())
    taken(address, wait=False).release()


@pytest.mark.parametrize("minutes", [-10_000, -16, 16, 10_000])
def test_no_clock_tells_that_a_lease_is_old(address, store, monkeypatch, minutes):
    """Whichever clock is wrong, that of the holder or that of the one who starts."""
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.5)
    real = datetime

    class Wrong(datetime):
        @classmethod
        def now(cls, tz=None):
            return real.now(tz) + timedelta(minutes=minutes)

    with taken(address) as held:
        monkeypatch.setattr(lease, "_process_space", lambda: "elsewhere")
        monkeypatch.setattr(lease, "datetime", Wrong)
        monkeypatch.setattr(time, "time", lambda: minutes * 60.0)
        with pytest.raises(RunLocked, match="is being written"):
            taken(address)
        held.check()
        assert held.is_held()


def test_a_clock_that_jumps_while_it_waits_takes_no_lease_from_a_live_run(address, monkeypatch):
    """As after a pause of the process: what it has read before is outdated, and says nothing."""
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)
    jumped = [0.0]
    with taken(address) as held:
        monkeypatch.setattr(lease, "_process_space", lambda: "elsewhere")
        read = held._objects.__class__.read

        def paused(self, name):
            found = read(self, name)
            if threading.current_thread() is threading.main_thread():
                before, until = held._renewed, time.time() + 20
                while held._renewed == before and time.time() < until:  # it is renewed meanwhile
                    time.sleep(0.01)
                jumped[0] += 1000.0
            return found

        clock = time.monotonic
        monkeypatch.setattr(held._objects.__class__, "read", paused)
        monkeypatch.setattr(
            lease.time, "monotonic", lambda: clock() + jumped[0] if in_main() else clock()
        )
        with pytest.raises(RunLocked, match="is being written"):
            taken(address)
        assert held.is_held()


def in_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def test_it_counts_from_when_a_renewal_was_sent_not_answered(s3, address, monkeypatch):
    """It arrives at once; its answer is late. Who waits counts from the arrival."""
    with taken(address) as held:
        s3.failing(1, 0.6, part=NAME)
        before = lease._seconds()
        assert held._written(held._stamp) is not None
        assert lease._seconds() - before >= 0.6
        assert held._renewed - before < 0.3


def test_a_machine_that_was_suspended_does_not_hold_it(address, monkeypatch):
    with taken(address) as held:
        assert held.is_held()
        seconds = lease._seconds
        monkeypatch.setattr(lease, "_seconds", lambda: seconds() + lease.LEASE_SECONDS)
        assert not held.is_held()


@pytest.mark.parametrize("content", [b"", b"[]", b"{\xff", b'{"time": 3}'])
def test_a_damaged_one_expires(address, store, monkeypatch, content):
    store.write(NAME, content)
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.1)
    taken(address).release()


def test_a_holder_that_has_lost_it_stops(address, store, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)
    with taken(address) as held:
        assert held.is_held()
        held.check()
        of_another_host(store, session="another")
        held._thread.join(HANG)
        assert not held.is_held()
        with pytest.raises(RunLocked, match=r"another run has taken it\. This run stops"):
            held.check()
    assert json.loads(store.read(NAME)[0])["session"] == "another"  # not released


@pytest.mark.waits
def test_a_renewal_whose_answer_is_lost_is_no_loss(s3, address, store, monkeypatch):
    """The second request finds the version of the first."""
    s3.failing(1, "lost", part=NAME)
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)
    with taken(address) as held:
        s3.failing(1, "lost", part=NAME)
        before = held._renewed
        wait_for(lambda: held._renewed > before)
        assert not held._lost


@pytest.mark.waits
def test_it_is_not_held_while_the_store_is_away(s3, address, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.5)
    with taken(address) as held:
        s3.failing(9999, 503)
        wait_for(lambda: not held.is_held())
        held.check()  # but nobody else has it
        s3.fault = lambda method, path: None
        wait_for(held.is_held)


@pytest.mark.parametrize("nothing", [True, False])
def test_a_run_that_has_written_nothing_leaves_none(address, store, nothing):
    with taken(address) as held:
        held.leaves_nothing = nothing
    assert [one.name for one in store.names()] == ([] if nothing else [NAME])
    taken(address, wait=False).release()
