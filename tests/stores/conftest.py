"""Fixtures of stores: a server, an empty bucket, and short waits."""

from pathlib import Path

import pytest

from jaxpar.stores import lease, mirror, objects
from tests.stores.server import Server, objects_at, server


@pytest.fixture(scope="session")
def s3_server():
    yield server()
    server().close()


@pytest.fixture
def s3(s3_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The server, with the environment of its clients, and without long waits."""
    for name, value in {
        "AWS_ENDPOINT_URL": s3_server.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(objects, "BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(objects, "REQUEST_RETRIES", 0)
    monkeypatch.setattr(lease, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(mirror, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(mirror, "PART_SECONDS", 0.0)
    monkeypatch.setattr(mirror, "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(mirror, "DRAIN_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(mirror, "DRAIN_FAILING_SECONDS", 3.0)
    s3_server.requests.clear()
    yield s3_server
    s3_server.fault = lambda method, path: None


@pytest.fixture
def address(s3: Server):
    """An address in a new bucket."""
    return s3.address()


@pytest.fixture
def store(address):
    """The objects below it."""
    return objects_at(address)
