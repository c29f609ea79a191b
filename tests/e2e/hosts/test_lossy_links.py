"""Runs over hosts whose links lose or delay packets: they take longer, and change no number."""

import pytest

from jaxpar.runtime import exit_codes
from tests import ranks
from tests.e2e.hosts.network import Network, require_namespaces
from tests.e2e.hosts.run import Run

pytestmark = [
    pytest.mark.usefixtures("namespaces"),
    pytest.mark.slow,
    pytest.mark.timeout(1500),
]

#: Seconds for the slowest machine to start and train.
TRAINS = 900


@pytest.fixture(scope="module")
def namespaces():
    require_namespaces()


@pytest.fixture
def trained(write_ranks, tmp_path, whole):
    """(what to do to the network first) -> nothing: two hosts train as one does."""

    def train(disturb, port: int | None = None) -> None:
        with Network(2, congestion="reno") as network:
            disturb(network)
            run = Run(network, write_ranks(tmp_path), tmp_path, network.addresses[0], port=port)
            codes = run.codes(TRAINS)
        assert codes == [exit_codes.EXIT_OK] * 2, run.said(0)[-2000:] + run.said(1)[-2000:]
        ranks.assert_same_run(tmp_path / "run", whole)

    return train


@pytest.mark.parametrize("share", [0.01, 0.05])
def test_lost_packets_change_no_number(share, trained):
    trained(lambda network: network.lose(1, share))


def test_a_delay_changes_no_number(trained):
    trained(lambda network: network.delay(1, 0.02))


def test_lost_packets_of_the_coordinator(trained):
    """Heartbeats and the store of keys get through, sooner or later."""
    port = ranks.free_port()
    trained(lambda network: network.lose(1, 0.1, port), port)
