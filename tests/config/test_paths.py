"""Paths that a run could not write to, or another system's, are refused before anything starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.commands import read
from jaxpar.config import Config, ConfigError, Source, replace
from jaxpar.config.config_file import load_config
from jaxpar.config.rules import paths
from jaxpar.config.validate import check
from jaxpar.convert import torch_file
from jaxpar.data.formats import writer
from jaxpar.runtime.files import outputs
from jaxpar.runtime.files.outputs import refuse_used
from jaxpar.tools.report.command import where
from jaxpar.tools.sweeps.command import read_sweep

FIELDS = ["run.dir", "data.path", "run.init_from", "run.compilation_cache", "data.held_out"]
FIELDS += ["distill.teacher", "data.cache_dir"]

#: Fields that take addresses of object stores.
STORED_FIELDS = ("data.path", "data.held_out", "run.init_from", "distill.teacher")

WRONG = {
    "gs://bucket/run": "gs:// is not supported",
    "S3://bucket": "S3:// is not supported",
    "file:///tmp/run": "file:// is not supported",
    "gs:/bucket": "gs:// is not supported",
    "runs/\udcff": "in UTF-8",
    "runs/\ud800x": "in UTF-8",
    "runs/\0": "null byte",
    "x" * 256: "255 per name",
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("field", FIELDS)
def test_a_path_that_cannot_be_used_is_refused(field, name):
    if field in STORED_FIELDS and name.startswith("gs://"):
        check(replace(Config(), **{field: name}))  # tests/stores
        return
    with pytest.raises(ConfigError, match=WRONG[name]) as error:
        check(replace(Config(), **{field: name}))
    assert error.value.field == field
    str(error.value).encode()  # it can be printed


@pytest.mark.parametrize("name", ["https://host/x", "runs/\udcff"])
def test_those_of_a_mixture_and_of_a_conversion_too(name):
    with pytest.raises(ConfigError, match=r"data\.mixture\[0\]\.path = "):
        check(replace(Config(), **{"data.mixture": (Source(name, 1), Source("b", 2))}))
    with pytest.raises(ConfigError, match=r"^OUTPUT = "):
        refuse_used("OUTPUT", Path(name))


OUTPUTS = {
    "data prepare": lambda name: writer.whole_folder(
        name.replace("gs://", "gs:/"), overwrite=False
    ).__enter__(),
    "convert to-torch": lambda name: torch_file.check_file(Path(f"{name}.pt")),
    "report": lambda name: where(f"{name}.html", ["run"]),
    "bench --card": lambda name: outputs.check_file("--card", f"{name}.json"),
    "bench --keep": lambda name: outputs.check_folder("--keep", name),
}


@pytest.mark.parametrize("program", OUTPUTS)
def test_outputs_of_programs_are_no_addresses(program, tmp_path, monkeypatch):
    """They would be in a folder named gs: here."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="gs:// is not supported"):
        OUTPUTS[program]("gs://bucket/x")
    assert not list(tmp_path.iterdir())


#: The readers of command lines, and the argument that each error names.
READERS = {
    "train CONFIG": lambda url: load_config(url),
    "checkpoint RUN": lambda url: read("checkpoint", ["ls", url]),
    "average NEW": lambda url: read("checkpoint", ["average", "run", url]),
    "convert RUN": lambda url: read("convert", ["to-hf", url, "out"]),
    "convert DIR": lambda url: read("convert", ["from-hf", url, "run"]),
    "report RUN": lambda url: read("report", [url]),
    "list FOLDER": lambda url: read("report", ["--list", url]),
    "sample RUN": lambda url: read("sample", [url]),
    "evaluate --data": lambda url: read("evaluate", ["run", "--split", "val", "--data", url]),
    "sweep --folder": lambda url: read_sweep(
        read("sweep", ["quickstart", "--grid", "train.seed=1,2", "--folder", url])
    ),
}


#: Arguments that take the address of a run or a published model.
STORED = {"checkpoint RUN", "list FOLDER", "convert RUN", "convert DIR", "report RUN", "sample RUN"}


@pytest.mark.parametrize("url", ["s3://bucket/run", "az://box/run", "https://host/run"])
@pytest.mark.parametrize("program", READERS)
def test_paths_of_programs_are_no_addresses(program, url):
    if program in STORED and url.startswith("s3://"):
        READERS[program](url)  # tests/stores
        return
    scheme, name = url.partition(":")[0], program.split()[1]
    with pytest.raises(ConfigError, match=f"{scheme}:// is not supported") as error:
        READERS[program](url)
    assert error.value.field.split()[0] == name and error.value.value == url


def test_a_prompt_may_be_an_address():
    argv = ["run", "--prompt", "https://host/run"]
    assert read("sample", argv).prompt == (argv[2],)


@pytest.mark.parametrize("name", ["a:b", "ü", "日本", "a b", "100%", "a#b", "a|b", "x=1", "~/x"])
def test_other_names_are_fine(name):
    check(replace(Config(), **{"run.dir": f"runs/{name}", "data.path": name}))


@pytest.mark.parametrize("name", ["a\\b", "x*", "run?", "[1]", "a]"])
def test_a_run_folder_has_no_characters_of_patterns(name):
    """Orbax and TensorStore would write or look elsewhere, and save without the arrays."""
    with pytest.raises(ConfigError, match=r"run.dir = .* cannot hold checkpoints with"):
        check(replace(Config(), **{"run.dir": f"runs/{name}"}))
    check(replace(Config(), **{"data.path": name}))


@pytest.mark.parametrize(
    ("folder", "rule"), [("[x]", "with . or . in its path"), ("\udcff", "is not UTF-8")]
)
def test_the_current_folder_counts(tmp_path, monkeypatch, folder, rule):
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    with pytest.raises(ConfigError, match=f"run.dir = 'runs/a': cannot hold .*{rule}.*absolute"):
        check(replace(Config(), **{"run.dir": "runs/a"}))


def test_a_name_that_the_locale_cannot_represent_is_refused(monkeypatch):
    monkeypatch.setattr(os, "fsencode", lambda name: name.encode("ascii", "surrogateescape"))
    with pytest.raises(ConfigError, match="PYTHONUTF8=1"):
        paths.check_path("run.dir", "runs/ü", "use --run.dir runs/default")


@pytest.mark.waits
@pytest.mark.slow
def test_train_refuses_it_under_the_c_locale(tmp_path):
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "jaxpar.train", "quickstart", "--run.dir", "ü"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, timeout=600)
    assert done.returncode == 2 and b"PYTHONUTF8=1" in done.stderr
    assert done.stderr.count(b"\n") <= 2 and not list(tmp_path.iterdir())
