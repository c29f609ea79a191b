"""Two profiles, before and after."""

import json
from pathlib import Path

import pytest

from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.tools.profiling import table

PIECE = str(Path(__file__).parent / "fsdp4.xplane.pb.gz")


def figures(scopes: dict[tuple[str, str], float], step: float, **classes: float):
    """The figures of a profile that are compared."""
    names = ("step", "compute", "communication", "exposed", "idle")
    return {
        "ms": dict.fromkeys(names, 1.0) | {"step": step},
        "by_class": {what: {"ms": ms, "count": 1} for what, ms in classes.items()},
        "by_scope_ms": [
            {"pass": p, "scope": s, "class": "fusion", "ms": ms} for (p, s), ms in scopes.items()
        ],
        "unattributed_ms": 0.0,
    }


def test_the_largest_differences_come_first():
    before = figures({("forward", "loss"): 5.0, ("backward", "attention"): 10.0}, 20.0, fusion=15.0)
    after = figures(
        {("forward", "loss"): 4.5, ("backward", "attention"): 7.0, ("forward", "rope"): 1.0}, 18.0
    )
    found = table.compare(before, after)
    assert [row["name"] for row in found["scopes"]] == [
        ("backward", "attention"),
        ("forward", "rope"),
        ("forward", "loss"),
    ]
    assert found["step"][0] == {
        "name": ("step",),
        "before": 20.0,
        "after": 18.0,
        "difference": -2.0,
    }
    text = table.in_words(found, ["a", "b"])
    assert text.startswith("before  a\nafter   b\n")
    rows = [line.split() for line in text.splitlines()]
    assert ["backward", "attention", "10.0", "7.0", "-3.0", "0.700"] in rows
    assert ["forward", "rope", "-", "1.0", "+1.0", "-"] in rows
    assert ["fusion", "15.0", "-", "-15.0", "-"] in rows


def test_a_profile_and_itself(tmp_path, capsys):
    file = tmp_path / "both.json"
    call("profile", [PIECE, PIECE, "--gpu", "h200", "--json", str(file)])
    text = capsys.readouterr().out
    assert "step             72.0   72.0        +0.0  1.000" in text
    assert max(map(len, text.splitlines())) <= 120
    found = json.loads(file.read_text())
    assert found["scopes"] and all(row["difference"] == 0 for row in found["scopes"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([PIECE, PIECE, "--step", "3"], "--step = 3: applies to a single profile"),
        ([PIECE, "/nowhere"], "RUN_OR_TRACE = '/nowhere': does not exist"),
    ],
)
def test_what_is_refused(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        call("profile", words)
    assert said in str(error.value)
    assert not list(tmp_path.iterdir())
