"""A run and its certificate: made before the first step, read at the start, stale later."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxpar.certification import command
from jaxpar.certification.checks import CHECKS
from jaxpar.certification.comparison import MESHES
from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.config.command_line import ConfigArguments
from jaxpar.monitoring.certificate import CERTIFICATE_FILE, Result, read_certificate, to_values
from jaxpar.parallel import gradients
from jaxpar.runtime import exit_codes
from jaxpar.step import links
from jaxpar.training import certified
from jaxpar.training.run import Run

pytestmark = pytest.mark.usefixtures("quick_compile", "devices")

SHORT = ["--train.num-steps", "2", "--evaluation.every", "0", "--checkpoint.every", "2"]

OWN = """
import jax
import jax.numpy as jnp
from jaxpar.extend import Attention, component


@component
class Own(Attention):
    def heads(self, q, k, v, mask):
        k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], 2) for a in (k, v))
        scores = jnp.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
        weights = jnp.where(mask.dense()[:, None], jax.nn.sigmoid(scores - 4), 0)
        return jnp.einsum("bhts,bshk->bthk", weights, v)
"""


@pytest.fixture
def certifies(monkeypatch) -> list[list[str]]:
    """The commands of the processes that certify; what they do is done here, on one mesh."""
    commands: list[list[str]] = []

    def start(words, env, log):
        commands.append(words)
        assert words[1:3] == ["-m", "jaxpar.certify"]
        code = call("certify", [*words[3:], "--mesh", "data=2", "--steps", "0"])
        return SimpleNamespace(wait=lambda: code, end=lambda: None)

    monkeypatch.setattr(certified.children, "start", start)
    checks = [(name, check) for name, check in CHECKS if name == MESHES]
    run_checks = functools.partial(command.run_checks, checks=checks)
    monkeypatch.setattr(command, "run_checks", run_checks)
    return commands


@pytest.mark.slow  # quicker: what certify refuses, below
def test_a_run_is_certified_first_and_once(certifies, train_on, config_file, capsys):
    run = Path(config_file).parent / "run"
    assert train_on(1, config_file, *SHORT, "--certify") == exit_codes.EXIT_OK
    said = capsys.readouterr().out
    assert "certify    " in said and "; applies\n" in said and len(certifies) == 1
    one = read_certificate(run / CERTIFICATE_FILE)
    assert not one.failed and {r.mesh for r in one.results if not r.not_run} == {"data=2"}
    assert json.loads((run / "manifest.json").read_text())["certificate"] == {
        "no_longer_applies": []
    }
    assert train_on(1, config_file, *SHORT, "--train.num-steps", "4", "--certify") == 0
    assert "; applies\n" in capsys.readouterr().out and len(certifies) == 1

    assert train_on(1, config_file, *SHORT, "--train.num-steps", "6", "--train.z-loss", "0.1") == 0
    assert "no longer applies: train.z_loss is 0.1, was 0.0\n" in capsys.readouterr().out
    assert json.loads((run / "manifest.json").read_text())["certificate"] == {
        "no_longer_applies": ["train.z_loss is 0.1, was 0.0"]
    }


@pytest.mark.slow
def test_a_run_that_is_not_certified_does_not_begin(
    certifies, train_on, config_file, capsys, monkeypatch
):
    right = gradients.reduce_gradients

    def wrong(grads, specs, axes):
        found = right(grads, specs, axes)
        return found | {"final_norm": found["final_norm"] * 1.001}

    monkeypatch.setattr(links, "reduce_gradients", wrong)
    with pytest.raises(certified.NotCertified, match=r"is not certified.*Fix: ") as failed:
        train_on(1, config_file, *SHORT, "--certify")
    assert failed.value.code == exit_codes.EXIT_NUMERICS
    folder = Path(config_file).parent / "run"
    assert [r.where for r in read_certificate(folder / CERTIFICATE_FILE).failed] == ["final_norm"]
    assert not (folder / "config.json").exists()


def test_what_certify_refuses_is_a_bad_config(config_file, monkeypatch):
    code = SimpleNamespace(wait=lambda: exit_codes.EXIT_CONFIG, end=lambda: None)
    monkeypatch.setattr(certified.children, "start", lambda *_: code)
    arguments = ConfigArguments.of([config_file], "train")
    with pytest.raises(ConfigError, match="cannot be certified"):
        certified.certify_first(arguments, arguments.checked())


def test_a_crash_is_no_verdict(config_file, monkeypatch):
    code = SimpleNamespace(wait=lambda: exit_codes.EXIT_ERROR, end=lambda: None)
    monkeypatch.setattr(certified.children, "start", lambda *_: code)
    arguments = ConfigArguments.of([config_file], "train")
    with pytest.raises(exit_codes.RunError, match="ended with code 1 before") as failed:
        certified.certify_first(arguments, arguments.checked())
    assert failed.value.code == exit_codes.EXIT_ERROR


@pytest.mark.slow  # quicker: monitoring/test_certificate.py
def test_the_source_of_a_component_changes(certifies, train_on, config_file, capsys):
    file = Path(config_file)
    file.write_text(OWN + file.read_text().replace("Attention(num", "Own(num"))
    assert train_on(1, config_file, *SHORT, "--certify") == exit_codes.EXIT_OK
    assert "; applies\n" in capsys.readouterr().out
    file.write_text(file.read_text().replace("scores - 4", "scores - 5"))
    assert train_on(1, config_file, *SHORT, "--train.num-steps", "4") == exit_codes.EXIT_OK
    assert "no longer applies: the source of tiny.py has changed\n" in capsys.readouterr().out


def test_kernels_of_a_certificate_are_not_tested_again(config_file, tmp_path, only_devices):
    arguments = ConfigArguments.of([config_file, *SHORT], "train")
    cfg = arguments.checked()
    now = certified.conditions_of(cfg)
    kernels = Result(certified.KERNELS, "", "attention", 1e-4, 2e-2)
    meshes = Result("meshes", "data=2", "loss", 0.0, 1e-5)
    tested = []

    def of(*results: Result, file: str = "") -> None:
        one = certified.Certificate.of("tiny", cfg, now, results)
        place = tmp_path / (file or "run") / CERTIFICATE_FILE
        place.parent.mkdir(exist_ok=True)
        place.write_text(json.dumps(to_values(one)))
        with only_devices(1), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Run, "_test_kernels", lambda _: tested.append(place.parent.name))
            Run.open(cfg, certificate=str(place) if file else "").start()

    of(meshes)
    of(meshes, kernels, file="named")
    of(meshes, kernels)
    of(meshes, Result(certified.KERNELS, "", "attention", 1.0, 2e-2))
    of(meshes, Result(certified.KERNELS, "", "attention", not_run="no GPU"))
    assert tested == ["run", "run", "run"]


def test_files_that_are_no_certificate(config_file, tmp_path, capsys):
    cfg = ConfigArguments.of([config_file], "train").checked()
    (tmp_path / CERTIFICATE_FILE).write_text("{}")
    assert certified.certified(cfg, tmp_path, "") is None
    assert "the certificate cannot be read" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"--certificate = .* cannot be read"):
        certified.certified(cfg, tmp_path, str(tmp_path / CERTIFICATE_FILE))
    with pytest.raises(ConfigError, match="use one of both"):
        call("train", [config_file, "--certify", "--certificate", "x.json"])
