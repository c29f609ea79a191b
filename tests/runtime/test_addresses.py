"""Host and port as text, and free ports."""

import contextlib

import pytest

from jaxpar.runtime.processes.addresses import FreePort, bind_error, is_here, joined, split


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpu1:1234", ("gpu1", 1234)),
        ("[fd00::1]:0080", ("fd00::1", 80)),
        ("fd00::1:80", None),
        ("[fd00::1:80", None),
        ("gpu1", None),
        (":80", None),
        ("gpu1:0", None),
        ("gpu1:65536", None),
        ("gpu1:00000000170000", None),
        ("gpu1:" + "9" * 5000, None),
        ("gpu1:\u0661", None),
    ],
)
def test_host_and_port_are_split(text, found):
    assert split(text) == found
    assert found is None or split(joined(*found)) == found


def test_a_held_port_is_free_for_those_who_share_it():
    with contextlib.closing(FreePort("127.0.0.1")) as port:
        assert is_here("127.0.0.1") and not is_here("192.0.2.1")
        assert bind_error("127.0.0.1", port.number) == 0
