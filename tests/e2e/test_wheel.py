"""What a wheel installs works: the command, the configs, and training from an empty folder."""

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from jaxpar.checkpoint.saved import saved_steps

ROOT = Path(__file__).resolve().parents[2]

#: A small model for a few steps.
SMALL = """--train.num-steps 2 --optimizer.warmup-steps 1 --data.seq-len 64
--train.global-batch-size 4 --model.num-layers 1 --model.d-model 32
--model.layers.feed-forward.d-ff 64 --checkpoint.every 2 --evaluation.every 0""".split()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel of this checkout."""
    folder = str(tmp_path_factory.mktemp("wheel"))
    (path,) = WheelBuilder(str(ROOT)).build(directory=folder, versions=["standard"])
    return Path(path)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The bin folder of a fresh environment with the wheel, and with this one's other packages."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", wheel], check=True, env=clean())
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.check_output([python, "-c", program], text=True).strip()
    Path(site, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def clean() -> dict[str, str]:
    """The environment, without what would lead to this checkout."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}


def test_a_wheel_holds_each_file_of_the_package_and_the_configs(wheel):
    command = ["git", "ls-files", "jaxpar", "configs", "docs/*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout of git")
    names = [n for n in listed.stdout.splitlines() if (ROOT / n).is_file()]
    wanted = {n if n.startswith("jaxpar/") else f"jaxpar/{n}" for n in names}
    held = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert wanted <= held and "jaxpar/configs/quickstart.py" in held
    assert {n.partition("/")[0] for n in held} == {"jaxpar"}
    assert not [n for n in held if n.startswith("jaxpar/docs/") and not n.endswith(".md")]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_installed_wheel_trains_from_an_empty_folder(installed, tmp_path):
    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=clean(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    python, jaxpar = installed / "python", installed / "jaxpar"
    where = run(python, "-c", "import jaxpar; print(jaxpar.__file__)")
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert "usage: jaxpar COMMAND" in run(jaxpar, "--help")

    text = run(python, "-m", "jaxpar.train", "quickstart", *SMALL)
    assert "the Python standard library's source, to data/stdlib-bytes" in text
    assert saved_steps(tmp_path / "runs" / "quickstart") == [2]
    run(jaxpar, "train", "runs/quickstart", "--train.num-steps", "3")
    assert saved_steps(tmp_path / "runs" / "quickstart") == [2, 3]

    assert "Best layout: python -m jaxpar.train llama3_8b" in run(jaxpar, "plan", "llama3_8b")
    done = subprocess.run([jaxpar, "plan", "nonesuch"], env=clean(), capture_output=True, text=True)
    assert done.returncode == 2
    assert re.search(r"use one of \w.* llama3_405b, llama3_70b", done.stderr), done.stderr
