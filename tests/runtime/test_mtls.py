"""The coordinator and the processes recognize each other by certificates, if they have them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.config import ConfigError
from jaxpar.runtime.processes import mtls
from tests import ranks
from tests.runtime import certificates
from tests.slow import slow

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
]

#: One of two processes: their texts, or the error. It gives up after the seconds it is given.
PROCESS = """
import sys
from jaxpar.runtime.processes import connecting, peers
from jaxpar.runtime.processes.sources import ProcessPlace
from jaxpar.runtime.program import run_program
place = ProcessPlace(
    source="flags", coordinator=sys.argv[1], num_processes=2, process_id=int(sys.argv[2])
)
def main(_):
    connecting.connect(place, int(sys.argv[3]))
    print(peers.exchange("names", "own " + sys.argv[2], 200))
run_program(main)
"""


def start(address: str, own: int, env: dict[str, str], seconds: int = 200) -> subprocess.Popen:
    command = [sys.executable, "-c", PROCESS, address, str(own), str(seconds)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=ranks.environment(**env), **pipes)


@pytest.mark.parametrize("names", ["hosts", slow("uris")])
def test_processes_with_certificates_meet(tmp_path, names):
    """By the address in the certificate, or by its URI, of which the prefix is given."""
    alternative = "IP:127.0.0.1" if names == "hosts" else "URI:spiffe://jaxpar.test/run"
    env = certificates.make(tmp_path, "one", alternative)
    env |= {} if names == "hosts" else {mtls.URI_PREFIX: "spiffe://jaxpar.test/"}
    address = f"127.0.0.1:{ranks.free_port()}"
    for process in [start(address, own, env) for own in (0, 1)]:
        code, said = ranks.finish(process)
        assert code == 0 and "['own 0', 'own 1']" in said, said


@pytest.mark.parametrize("stranger", ["of another authority", "without a certificate"])
@pytest.mark.slow
def test_a_stranger_does_not_join(tmp_path, stranger):
    env = certificates.make(tmp_path, "one", "IP:127.0.0.1")
    other = certificates.make(tmp_path, "two", "IP:127.0.0.1") if "another" in stranger else {}
    address = f"127.0.0.1:{ranks.free_port()}"
    both = [start(address, 0, env, seconds=8), start(address, 1, other, seconds=8)]
    for process in both:
        code, said = ranks.finish(process)
        assert code != 0 and "own 0" not in said
        assert "not all processes connected within 8 s" in said, said


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return certificates.make(tmp_path_factory.mktemp("certificates"), "one", "IP:127.0.0.1")


def test_the_arguments_are_jaxs(good):
    assert mtls.arguments({}) == mtls.arguments({name: "" for name in good}) == {}
    found = mtls.arguments(good | {mtls.URI_PREFIX: "spiffe://a/"})
    assert list(found) == [*mtls.FILES, "mtls_peer_uri_prefix"]
    assert found["mtls_key_file"] == good["JAX_MTLS_KEY_FILE"]


CERT, KEY, CA = mtls.FILES.values()


def test_what_cannot_be_is_refused_before_anything_starts(good, tmp_path):
    readable = tmp_path / "key"
    readable.write_bytes(Path(good[KEY]).read_bytes())
    readable.chmod(0o644)
    empty = tmp_path / "empty"
    empty.touch()
    cases = [
        ({KEY: ""}, f"needs {KEY} too"),
        ({CERT: "", CA: ""}, f"needs {CERT} and {CA} too"),
        (dict.fromkeys(mtls.FILES.values(), "") | {mtls.URI_PREFIX: "a/"}, "needs"),
        ({CERT: str(tmp_path / "none")}, "cannot be read (No such file or directory)"),
        ({CA: str(tmp_path)}, "cannot be read (Is a directory)"),
        ({CA: str(empty)}, "has no PEM block CERTIFICATE"),
        ({CERT: good[KEY]}, "has no PEM block CERTIFICATE"),
        ({KEY: good[CERT]}, "has no PEM block PRIVATE KEY"),
        ({KEY: str(readable)}, "others may use (mode 644)"),
        ({mtls.URI_PREFIX: "spiffe://a"}, "must end with '/'"),
    ]
    for change, rule in cases:
        with pytest.raises(ConfigError) as error:
            mtls.arguments(good | change)
        assert rule in str(error.value), change
    os.chmod(readable, 0o600)
    mtls.arguments(good | {KEY: str(readable)})


def test_a_process_with_unusable_certificates_ends_with_one_error(good):
    process = start("127.0.0.1:1", 0, good | {CA: "/nowhere/ca.pem"})
    code, said = ranks.finish(process)
    assert code == 2 and said.count("\n") == 1, said
    assert said.startswith("config error: JAX_MTLS_CA_FILE = '/nowhere/ca.pem': cannot be read")
