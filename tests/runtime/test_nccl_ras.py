"""NCCL's RAS service is asked as its documentation says, against a server that speaks so."""

import contextlib
import socket
import threading

import pytest

from jaxpar.runtime.gpus import nccl_ras
from tests.ranks import HANG

pytestmark = pytest.mark.waits

#: As NCCL writes it: a table of communicators, then sections, each heading underlined.
REPORT = """\
NCCL version 2.28.9 compiled with CUDA 13.0

Communicators... (0.00s)
========================

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         2         2         2   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (e1f2a3b4c5d6e7f8) MISMATCH
  Communicator ranks have different collective operation counts
  1 rank has launched up to operation 41
  Rank 0 -- GPU 0 managed by process 7 on node 10.0.0.1
  1 rank has launched up to operation 40
  Rank 1 -- GPU 1 managed by process 8 on node 10.0.0.1
"""


@contextlib.contextmanager
def serving(talk):
    """A server on a free port, for one client: its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            link, _ = listening.accept()
            with link, link.makefile("rw", newline="\n") as lines, contextlib.suppress(OSError):
                talk(lines)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join(HANG)


def answering(report: str, heard: list[str]):
    """What NCCL does: shake hands, take the limit, report, close."""

    def talk(lines):
        for answer in ("SERVER PROTOCOL 2\n", "OK\n", report):
            heard.append(lines.readline().strip())
            lines.write(answer)
            lines.flush()

    return talk


def test_the_report_and_what_it_finds_wrong(monkeypatch):
    heard: list[str] = []
    with serving(answering(REPORT, heard)) as address:
        monkeypatch.setenv("NCCL_RAS_ADDR", address)
        report = nccl_ras.status(HANG)
    assert heard == ["CLIENT PROTOCOL 2", f"TIMEOUT {HANG - 1:.0f}", "VERBOSE STATUS"]
    assert report == REPORT
    found = nccl_ras.what_is_wrong(report)
    assert found[0] == "#0-0 (e1f2a3b4c5d6e7f8) MISMATCH" and len(found) == 6
    assert found[-1] == "  Rank 1 -- GPU 1 managed by process 8 on node 10.0.0.1"
    assert nccl_ras.what_is_wrong(REPORT.partition("#0-0")[0]) == []


def silent(lines):
    lines.read()  # until the client leaves


def refusing(lines):
    lines.readline()
    lines.write("ERROR: who are you\n")
    lines.flush()


def closing(lines):
    lines.readline()


@pytest.mark.parametrize(
    ("talk", "why"),
    [(silent, "timed out"), (refusing, "who are you"), (closing, "closed the connection")],
)
def test_no_answer_is_said_in_time(talk, why):
    with serving(talk) as address, pytest.raises(nccl_ras.NoAnswer, match=why):
        nccl_ras.status(HANG if talk is not silent else 0.3, address)


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(nccl_ras.NoAnswer, match=f"{address}: .*refused"):
        nccl_ras.status(1.0, address)


def test_a_report_that_does_not_end_is_cut_off():
    def talk(lines):
        answering("half of a report\n", [])(lines)
        lines.read()  # until the client leaves

    with serving(talk) as address:
        assert nccl_ras.status(2.0, address).startswith("half of a report\n\n[truncated")
