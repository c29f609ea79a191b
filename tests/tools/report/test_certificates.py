"""The report's section about a certificate, and the page of a bisection."""

import json
import math
from datetime import datetime
from pathlib import Path

import pytest

from jaxpar.certification.bisect import Bisection, Tried
from jaxpar.certification.layer_distances import LayerDistances
from jaxpar.certification.options import BisectOptions
from jaxpar.certification.step_inputs import RunDifference
from jaxpar.config import Config, ConfigError
from jaxpar.monitoring.certificate import (
    CERTIFICATE_FILE,
    Certificate,
    Result,
    conditions_of,
    to_values,
)
from jaxpar.tools.report import bisection
from tests.tools.report.folders import write_run
from tests.tools.report.test_figures import text_of

RESULTS = (
    Result("meshes", "data=2", "gradient", 4e-6, 1e-5, where="embed"),
    Result("meshes", "data=2", "loss", 1e-7, 1e-5),
    Result("updates", "", "decay mask", math.inf, 0.0, where="<b>norm</b>"),
    Result("meshes", "data=16", "mesh", not_run="16 devices are too many"),
)


def write(folder: Path, *results: Result) -> None:
    cfg = Config()
    one = Certificate.of("mine", cfg, conditions_of(cfg), results)
    folder.mkdir(exist_ok=True, parents=True)
    (folder / CERTIFICATE_FILE).write_text(json.dumps(to_values(one)))


def told(folder: Path, **more) -> None:
    """Add to the manifest what the run said at its latest start."""
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))


def test_what_was_compared_and_what_was_not(tmp_path):
    run = write_run(tmp_path / "run")
    assert "Certificate" not in text_of(str(run))
    write(run, *RESULTS)
    text = text_of(str(run))
    assert "certificate of 20" in text and "2 of 3 comparisons passed, 1 not run, in " in text
    assert "The run has not started since it was made." in text
    assert "gradient embed" in text and "4.0e-06" in text and "MISMATCH" in text
    assert "data=16: mesh: 16 devices are too many" in text
    assert "&lt;b&gt;norm" in text


def test_whether_it_applies(tmp_path):
    run = write_run(tmp_path / "run")
    write(run, *RESULTS[:2])
    told(run, certificate={"no_longer_applies": []})
    assert "It applied to the run at its latest start." in text_of(str(run))
    told(run, certificate={"no_longer_applies": ["JAX is 2, was 1"]})
    text = text_of(str(run))
    assert "It no longer applied at the latest start:" in text and "JAX is 2, was 1" in text
    (run / CERTIFICATE_FILE).write_text("{}")
    assert "the certificate cannot be read: " in text_of(str(run))


def test_a_config_that_has_not_been_trained(tmp_path):
    write(tmp_path / "run", *RESULTS)
    assert "2 of 3 comparisons passed" in text_of(str(tmp_path / "run"))


def test_the_page_of_a_bisection(tmp_path):
    one, other = (
        RunDifference("kernel", "k", "<a>", "b"),
        RunDifference("version", "of jax", "1", "2", "x"),
    )
    layers = [LayerDistances(f"layer {i}", {"residual": i * 1e-7}, 1e-6) for i in range(3)]
    found = Bisection(
        a="runs/a",
        b="runs/b",
        step=7,
        begin=5,
        microbatch=1,
        layer="layer 2",
        point="mixer_output",
        direction="forward",
        values={"loss": (2.0, 2.5)},
        differences=(one, other),
        tried=(Tried(one, True, 0.0),),
        cause=(one,),
        layers=(*layers, LayerDistances("outside layers", {"head": math.nan}, 0.0)),
        notes=("a note",),
    )
    text = bisection.page(found, datetime.now().astimezone()).decode()
    assert '<th scope="row">cause</th><td>kernel k: &lt;a&gt; in A, b in B</td>' in text
    assert "microbatch 1, layer 2, mixer_output, forward" in text and "the bits of B" in text
    assert "not tried: x" in text and "a note" in text
    assert text.count('class="line r') == 2 * 2 and "2.0e-07" in text
    empty = bisection.page(Bisection("a", "b", 0, last=9), datetime.now().astimezone())
    assert b"none: the same bits up to step 9" in empty and b"<svg" not in empty
    with pytest.raises(ConfigError, match=r"must end in \.html"):
        bisection.output_of(BisectOptions(a="a", b="b", output=str(tmp_path / "page.txt")))
