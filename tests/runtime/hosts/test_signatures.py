"""Entries of the rendezvous, which strangers may write too, and the token that signs them."""

import os
import stat
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from jaxpar.config import Config, ConfigError, replace
from jaxpar.runtime.processes import launcher
from jaxpar.runtime.processes.hosts import kv_store, link
from jaxpar.runtime.processes.hosts.generations import End
from jaxpar.runtime.processes.hosts.kv_store import LocalStore, Read, Signatures
from jaxpar.runtime.processes.hosts.membership import Membership
from jaxpar.runtime.processes.token import FILE, TOKEN, TOKEN_FILE, RunToken, given_token, token_of

SECRET, OTHER = RunToken("a token of sixteen"), RunToken("another token of sixteen")


class SignedStore(LocalStore):
    """A store in this process that signs, as one of another process does."""

    def __init__(self, texts: dict[str, str], run: str, token: RunToken):
        super().__init__(texts)
        self.signatures = Signatures(run, token)

    def ask(self, own: Mapping[str, str], create: Mapping[str, str]) -> None:
        super().ask(self.signatures.signed(own), self.signatures.signed(create))

    def answer(self) -> Read | None:
        read = super().answer()
        return read and Read(self.signatures.verified(read.texts), read.asked)


@pytest.fixture
def texts() -> dict[str, str]:
    """What the store has, which all memberships share."""
    return {}


@pytest.fixture
def joins(texts):
    made: list[Membership] = []

    def join(name: str, secret: RunToken = SECRET, run: str = "runs/x") -> Membership:
        own = {"name": name, "address": "127.0.0.1", "devices": 1, "processes": 1}
        made.append(Membership(SignedStore(texts, run, secret), own, 60.0))
        return made[-1]

    yield join
    for one in made:
        one.close()


def look(here: Membership) -> Any:
    """The view after an exchange."""
    here.hurry()
    return here.turn()


def test_hosts_with_one_token_see_each_other(joins):
    a, b = joins("a"), joins("b")
    for _ in range(2):
        found = look(a), look(b)
    assert set(found[0].hosts) == set(found[1].hosts) == {"a", "b"}
    b.create("end/1", End(code=0, text="").as_text())
    look(b)
    assert look(a).ends == {1: End(code=0, text="")}


def test_what_a_stranger_writes_is_passed_over_with_one_warning_each(joins, texts, capsys):
    a, b = joins("a"), joins("b")
    b.create("end/1", End(code=17, text="").as_text())
    for one in (a, b, a):
        look(one)
    end = End(code=0, text="").as_text()
    signed = {k.rpartition("/")[0]: (k, v) for k, v in texts.items()}
    key, text = signed["end/1"]
    for stranger in (
        {"end/1": end, "end/2": f"{'0' * 64} {end}", "host/evil": "{", "note": "", "": ""},
        {f"end/1/{'0' * 64}": text, f"end/2/{key.rpartition('/')[2]}": text},
        {key.replace("end/1", "end/3"): text},  # of another generation
        {"host/b\x1b[2J/x": "", "host/" + "x" * 10_000: "x" * 10_000},
    ):
        texts |= stranger
        for _ in range(3):
            found = look(a)
            assert set(found.hosts) == {"a", "b"} and found.ends == {1: End(code=17, text="")}
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(texts) - 3 and len(set(said)) >= len(said) - 3
    assert all("is not signed with this run's token" in line for line in said)
    assert all(len(line) < 300 and "\x1b" not in line for line in said)
    texts |= {f"note/{i}": "" for i in range(1000)}
    look(a)
    assert len(capsys.readouterr().err.splitlines()) == kv_store.MAX_WARNINGS - len(said)


def test_a_stranger_who_replaces_entries_is_not_believed(joins, texts):
    a = joins("a")
    a.create("end/1", End(code=17, text="").as_text())
    look(a)
    for key in list(texts):
        texts[key] = "x"
    found = look(a)
    assert set(found.hosts) == {"a"} and not found.ends


@pytest.mark.parametrize(("other", "run"), [(OTHER, "runs/x"), (SECRET, "runs/y")])
def test_hosts_of_another_token_or_run_are_not_of_this_one(joins, capsys, other, run):
    a, b = joins("a"), joins("b", other, run)
    for one in (a, b, a, b):
        found = look(one)
        assert set(found.hosts) == {one.own.name}
    assert "the entry host/b of the rendezvous is passed over" in capsys.readouterr().err


def test_an_entry_of_another_version_is_passed_over_with_one_warning(joins, texts, capsys):
    a = joins("a")
    later = a.own.as_text().replace('"version": 1', '"version": 2').replace('"a"', '"b"')
    texts |= a.store.signatures.signed({"host/b": later})
    for _ in range(3):
        assert set(look(a).hosts) == {"a"}
    said = capsys.readouterr().err.splitlines()
    told = "it has format version 2, and this jaxpar reads 1"
    assert said == [f"WARNING    the entry host/b of the rendezvous is passed over: {told}"]


def test_bytes_that_are_no_text_do_not_end_a_link():
    class Client:
        def key_value_set(self, key: str, text: str, allow_overwrite: bool = False) -> None:
            pass

        def key_value_dir_get_bytes(self, prefix: str) -> list[tuple[str, bytes]]:
            return [("p/host/a", b"\xff\xfe"), ("p/b", b"b"), ("p/c", b" " * (link.MAX_BYTES + 1))]

    found = link.answered(Client(), "p", {"set": {}, "create": {}})
    assert found == {"host/a": "\ufffd\ufffd", "b": "b", "c": ""}


# ------------------------------------------------------------------------------- the token


@pytest.mark.waits
def test_the_first_launcher_creates_the_token_and_the_others_read_it(tmp_path):
    found: list[RunToken] = []
    start = threading.Barrier(8)

    def launch() -> None:
        start.wait()
        found.append(token_of(tmp_path / "run", {}))

    threads = [threading.Thread(target=launch) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(found) == 8 and len(set(found)) == 1 and len(found[0].secret) == 64
    file = tmp_path / "run" / FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert found[0].secret not in repr(found[0])
    assert given_token(found[0].environment()) == found[0] == token_of(tmp_path / "run", {})


def test_variables_name_a_token(tmp_path):
    file = tmp_path / "secret"
    file.write_text("x" * 20 + "\n")
    assert given_token({}) is None and given_token({TOKEN: "", TOKEN_FILE: ""}) is None
    assert token_of(tmp_path, {TOKEN_FILE: str(file)}).secret == "x" * 20
    assert token_of(tmp_path, {TOKEN: "y" * 20, TOKEN_FILE: str(file)}).secret == "y" * 20
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 2000, b"\xff" * 32, b"x" * 20 + b"\0"])
def test_what_is_no_token_is_refused(tmp_path, content):
    file = tmp_path / FILE
    file.write_bytes(content)
    for env in ({TOKEN_FILE: str(file)}, {}):
        with pytest.raises(ConfigError, match="is no token") as error:
            token_of(tmp_path, env)
        assert "\n" not in str(error.value)


def test_a_token_that_is_missing_or_cannot_be_read_is_said_with_a_fix(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=f"{TOKEN_FILE}.*cannot be read: No such file"):
        token_of(tmp_path, {TOKEN_FILE: str(tmp_path / "none")})
    with pytest.raises(ConfigError, match=f"{TOKEN} .*must be 16 to"):
        given_token({TOKEN: "short"})
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.delenv(TOKEN_FILE, raising=False)
    cfg = replace(Config(), **{"run.store": "s3://bucket/run", "run.dir": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match=f"{TOKEN_FILE}.*is needed with --nodes and run.store"):
        launcher.token_for_hosts(cfg)
    assert not os.listdir(tmp_path)


def test_signatures_hold_for_the_same_texts_only():
    signed = SECRET.sign("ab", "c")
    assert SECRET.has_signed(signed, "ab", "c")
    for texts in (("a", "bc"), ("abc",), ("ab", "c", ""), ("ab", "d")):
        assert not SECRET.has_signed(signed, *texts)
    assert not OTHER.has_signed(signed, "ab", "c") and not SECRET.has_signed("é", "ab", "c")
