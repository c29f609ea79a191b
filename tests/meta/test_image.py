"""The Dockerfile: checked by hadolint, and built on Debian for the CPU, without a registry."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "Dockerfile"
REQUIREMENTS = ROOT / "scripts" / "deploy" / "requirements.py"


def hadolint(file: Path) -> subprocess.CompletedProcess:
    beside = Path(sys.executable).with_name("hadolint")
    program = str(beside) if beside.exists() else shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed; `make install` does")
    return subprocess.run([program, str(file)], capture_output=True, text=True)


def test_hadolint_finds_nothing(tmp_path):
    done = hadolint(DOCKERFILE)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(DOCKERFILE.read_text().replace("--no-install-recommends ", ""))
    assert "DL3015" in hadolint(wrong).stdout


def requirements(extras: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(REQUIREMENTS), extras]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_requirements_of_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    own, extras = project["dependencies"], project["optional-dependencies"]
    jax = [line for line in extras["cuda13"] if "jaxpar" not in line]
    wanted = own + jax + extras["hf"] + extras["triton"]  # which cuda13 names
    assert requirements("cuda13,hf").stdout.splitlines() == wanted
    whole = requirements("test").stdout.splitlines()  # names others, which name others
    assert set(extras["docs"]) < set(whole) and not any("jaxpar" in line for line in whole)
    refused = requirements("cuda")
    assert refused.returncode == 1 and "no extra cuda; there are cuda13, " in refused.stderr


def test_the_image_has_what_the_build_copies():
    """And .dockerignore leaves it, since it leaves out everything else."""
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"]
    lines = [line.split() for line in DOCKERFILE.read_text().splitlines()]
    copied = [w for line in lines if line[:1] == ["COPY"] for w in line[1:-1] if "=" not in w]
    for name in copied:
        if not name.startswith("/"):
            assert (ROOT / name).exists() and name.split("/")[0] in kept, name


#: A tar of Debian's root, to spare three minutes: mmdebstrap's, as `base` calls it.
BASE_TAR = os.environ.get("JAXPAR_TEST_BASE")

#: The extras of the image. With cuda13 it takes 15 minutes and 12 GB of the temporary folder.
EXTRAS = os.environ.get("JAXPAR_TEST_EXTRAS", "hf")

#: What the build needs of this machine to reach PyPI: certificates, and pip's settings.
OF_THIS_MACHINE = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf", "/etc/xdg/pip")


@pytest.fixture(scope="module")
def buildah(tmp_path_factory):
    """Runs buildah with a store of its own, and returns what it says."""
    missing = [name for name in ("buildah", "mmdebstrap") if not shutil.which(name)]
    if missing or os.geteuid():
        pytest.skip(f"needs root, and Debian's packages {', '.join(missing) or 'buildah'}")
    folder = tmp_path_factory.mktemp("buildah")
    places = ["--root", f"{folder}/store", "--runroot", f"{folder}/run", "--storage-driver", "vfs"]

    def run(*words: str) -> str:
        done = subprocess.run(["buildah", *places, *words], capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout

    yield run
    run("rm", "--all")
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def base(buildah, tmp_path_factory):
    """Debian 13 with Python: of the same shape as the image that the Dockerfile names."""
    tar = BASE_TAR or str(tmp_path_factory.mktemp("debian") / "root.tar")
    if not BASE_TAR:
        with_ = "--include=python3,python3-pip,python3-venv,ca-certificates"
        subprocess.run(["mmdebstrap", "--variant=apt", with_, "trixie", tar], check=True)
    container = buildah("from", "scratch").strip()
    buildah("add", container, tar, "/")
    buildah("commit", "--rm", container, "localhost/base:trixie")
    return "localhost/base:trixie"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_image_is_built_and_runs(buildah, base):
    """Its user is not root, and may write to the working directory. There is no GPU here."""
    mounts = [w for at in OF_THIS_MACHINE if Path(at).exists() for w in ("-v", f"{at}:{at}:ro")]
    arguments = ["--build-arg", f"BASE={base}", "--build-arg", f"EXTRAS={EXTRAS}"]
    buildah("bud", "--isolation", "chroot", *arguments, *mounts, "--tag", "jaxpar:test", str(ROOT))
    config = json.loads(buildah("inspect", "--type", "image", "jaxpar:test"))["OCIv1"]["config"]
    assert config["User"] == "1000:1000" and config["WorkingDir"] == "/workspace"
    assert config["Entrypoint"] == ["/usr/bin/tini", "--", "jaxpar"]
    container = buildah("from", "jaxpar:test").strip()
    inside = lambda *words: buildah("run", "--isolation", "chroot", container, "--", *words)  # noqa: E731
    assert "jaxpar COMMAND" in inside(*config["Entrypoint"], "--help")
    assert inside("sh", "-c", "touch it && id -u && ls /opt/jaxpar/bin/jaxpar").split()[0] == "1000"
    loaded = "import ctypes; ctypes.CDLL('libibverbs.so.1'); import jaxpar; print(jaxpar.__file__)"
    assert inside("python", "-c", loaded).startswith("/opt/jaxpar/lib/python3")
    doctor = "jaxpar", "doctor", "--only", "versions"
    assert "simulated CPU devices" in inside(*doctor, "--cpu-devices", "2")
    if "cuda13" in EXTRAS.split(","):
        assert "JAX is installed with CUDA, but there is no GPU here" in inside(*doctor)
        of = "from importlib.metadata import version; print(version('jax'), version('jaxlib'), *("
        of += "version(f'jax-cuda13-{of}') for of in ('plugin', 'pjrt')))"
        versions = inside("python", "-c", of).split()
        assert len(versions) == 4 and len(set(versions)) == 1, versions
