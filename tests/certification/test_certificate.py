"""The certificate that `python -m jaxpar.certify` writes, and where."""

from pathlib import Path

import pytest

from jaxpar.certification import command
from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.monitoring.certificate import Result, conditions_of, read_certificate, reasons_against
from jaxpar.runtime import exit_codes

pytestmark = pytest.mark.usefixtures("devices")

PASSED = Result("meshes", "data=2", "loss", 1e-7, 1e-5)
FAILED = Result("meshes", "data=2", "gradient", 1e-3, 1e-5, where="embed")


@pytest.mark.parametrize(
    ("results", "code"),
    [([PASSED], exit_codes.EXIT_OK), ([PASSED, FAILED], exit_codes.EXIT_ERROR)],
)
def test_it_is_in_the_folder_of_the_run_or_where_it_is_asked_for(
    results, code, monkeypatch, capsys
):
    subjects = []
    monkeypatch.setattr(command, "run_checks", lambda s, _: subjects.append(s) or iter([results]))
    assert call("certify", ["quickstart", "--mesh", "data=2"]) == code
    file = Path("runs/quickstart/certificate.json")
    one, asked = read_certificate(file), subjects[0].asked
    assert one.results == tuple(results) and one.name == "quickstart"
    assert bool(reasons_against(one, asked, conditions_of(asked))) == bool(code)
    assert f"certificate {file}" in capsys.readouterr().out
    assert call("certify", ["quickstart", "--mesh", "data=2", "--output", "here.json"]) == code
    assert read_certificate(Path("here.json")).config == one.config


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--output"):
        call("certify", ["quickstart", "--mesh", "data=2", "--output", "file/here.json"])
