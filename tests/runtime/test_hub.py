"""Models named on the Hugging Face Hub: downloaded once, pinned to a commit, one line if not."""

from pathlib import Path

import pytest

from jaxpar.config import ConfigError
from jaxpar.runtime import hub
from tests.hub import COMMIT, connect, serving

FILES = {"config.json": b"{}", "model.safetensors": b"w" * 1000, "README.md": b"-"}
FILES |= {"original/model.safetensors": b"o", "consolidated.safetensors": b"c"}
WANTED = ["*.safetensors", "config.json"]
NOWHERE = "http://127.0.0.1:9"


def find(text: str) -> hub.Snapshot:
    return hub.find(text, "DIR", WANTED, "is not a folder", "use a folder")


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with serving(FILES) as server:
        connect(monkeypatch, server.url, tmp_path / "cache")
        yield server


@pytest.mark.parametrize("name", ["org/model", "org/model@v1", f"org/model@{COMMIT}"])
def test_a_model_is_downloaded_and_pinned(server, name):
    found = find(name)
    assert str(found) == f"org/model@{COMMIT}"
    assert sorted(file.name for file in found.folder.iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert (found.folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_the_cache_serves_later_calls_without_a_network(server, monkeypatch, tmp_path):
    first = find("org/model")
    contents = [request for request in server.requests if request.startswith("GET /org/model/res")]
    assert len(contents) == 2
    find("org/model")
    again = [request for request in server.requests if request.startswith("GET /org/model/res")]
    assert again == contents, "a file was downloaded again"
    connect(monkeypatch, NOWHERE, tmp_path / "cache")
    assert find("org/model") == first


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("org/other", "org/other does not exist, or is private.*hf auth login"),
        ("org/model@v2", "has no revision 'v2'.*a branch, a tag or a commit"),
        ("org/private", "needs permission.*accept its terms at .*/org/private"),
        ("runs/nothing/here", "does not exist. Fix: use one of `.*report --list runs`"),
        ("nothing", "is not a folder"),
        ("/no/where", "is not a folder"),
        ("org/model@", "is not a folder"),
        ("../model", "is not a folder"),
    ],
)
def test_what_is_not_there_is_one_line(server, name, why):
    with pytest.raises(ConfigError, match=why) as error:
        find(name)
    assert "\n" not in str(error.value)


def test_a_missing_run_is_not_looked_up(server):
    with pytest.raises(ConfigError, match="'runs/nothing': does not exist"):
        find("runs/nothing")
    assert not server.requests


def test_without_a_network_it_is_one_line(server, monkeypatch, tmp_path, capfd):
    connect(monkeypatch, NOWHERE, tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"cannot be reached.*hf download org/model"):
        find("org/model")
    assert "Retrying" not in "".join(capfd.readouterr())


def test_a_path_comes_before_a_name(server, tmp_path):
    Path("org/model").mkdir(parents=True)
    assert find("org/model") == hub.Snapshot(Path("org/model"), "org/model")
    assert not hub.is_name("org/model")
    assert hub.is_name("org/other")
    assert hub.named("gpt2@main").groups() == ("openai-community/gpt2", "main")
    assert not hub.is_name("gpt3")
    assert not server.requests
