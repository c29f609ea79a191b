"""Runs of several processes for tests: launched, watched, and made to fail on purpose."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.checkpoint.loading import restore
from jaxpar.checkpoint.saved import read_saved
from jaxpar.config import replace
from jaxpar.config.serialize import from_json
from jaxpar.data.options import PrepareOptions
from jaxpar.data.prepare.text import prepare
from jaxpar.inference.generation import config_for_sampling
from jaxpar.monitoring.recent_steps import read_recent
from jaxpar.runtime.processes.addresses import FreePort
from jaxpar.sharding.mesh import make_mesh

ROOT = Path(__file__).resolve().parents[1]

#: Seconds after which something will never happen. A limit only ends a hang: it is far beyond what
#: a busy machine needs, and no test depends on it.
HANG = 240.0

#: A config that does FAULT ("RANK STEP KIND") in one process, as that step has been dispatched.
#: FAULT_ONCE names a file that is there once it has been done, and keeps it from being done again.
CONFIG = """
import os, signal, time
from jaxpar.config import *

def fail(kind):
    if kind == "sleep":
        time.sleep(1e6)
    elif kind == "raise":
        raise RuntimeError("a fault of this test")
    elif kind == "slow":
        time.sleep(0.3)
    else:
        os.kill(os.getpid(), getattr(signal, kind))

def install(rank, step, kind):
    from jaxpar.monitoring import metrics
    write_previous = metrics.MetricsWriter.write_previous
    once = os.environ.get("FAULT_ONCE", "")
    def faulty(self, at, *measured):
        due = at + 1 >= int(step) if kind == "slow" else at + 1 == int(step)
        if due and not os.path.exists(once):
            if once:
                open(once, "w").close()
            fail(kind)
        write_previous(self, at, *measured)
    metrics.MetricsWriter.write_previous = faulty

if "FAULT" in os.environ and os.environ.get("JAXPAR_PROCESS_ID") == os.environ["FAULT"].split()[0]:
    install(*os.environ["FAULT"].split())

def get_config():
    return Config(
        run=RunConfig(dir={run!r}),
        data=DataConfig(path={data!r}, seq_len=16),
        model=Model(
            d_model=16,
            vocab_size=272,
            layers=[Layer("layers", Attention(num_heads=4, num_kv_heads=2, head_dim=4), Glu(32))]
            * 2,
        ),
        compute=ComputeConfig(dtype="float32"),
        train=TrainConfig(num_steps=40, global_batch_size=8, log_every=1),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=10),
        checkpoint=CheckpointConfig(every=5),
        evaluation=EvaluationConfig(every=20, num_batches=1),
    )
"""


#: What the text repeats, twelve times a document, each document with a number of its own.
VERSE = "the cat sat on the mat, and the dog sat on the log.\n"


def write_text(path: Path) -> None:
    """Forty documents of repetitive text, as JSON lines."""
    documents = [{"text": f"verse {i}\n" + VERSE * 12} for i in range(40)]
    path.write_text("".join(json.dumps(d) + "\n" for d in documents), "utf-8")


def write_config(folder: Path, data: Path | None = None) -> str:
    """A config file in a folder, whose run goes to `folder/run`. Args: data: else made there."""
    if data is None:
        data = folder / "verses"
        write_text(folder / "verses.jsonl")
        text = (str(folder / "verses.jsonl"),)
        prepare(PrepareOptions(input=text, output=str(data), holdout=0.2))
    file = folder / "tiny.py"
    file.write_text(CONFIG.format(run=str(folder / "run"), data=str(data)))
    return str(file)


def environment(**more: str) -> dict[str, str]:
    """For a program: no devices chosen."""
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "FAULT", "FAULT_ONCE")}
    return env | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | more


def launch(count: int, each: int, *args: str, out: Any = None, **env: str) -> subprocess.Popen:
    """`jaxpar.launch` of so many processes and devices in each.

    Args:     its own, --, the run's. out: an open file that it writes to; None: a pipe.
    """
    command = [sys.executable, "-m", "jaxpar.launch", "-n", str(count)]
    command += ["--run.cpu-devices", str(each), *args]
    return subprocess.Popen(
        command,
        env=environment(**env),
        stdout=subprocess.PIPE if out is None else out,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def finish(process: subprocess.Popen, seconds: float = 600) -> tuple[int, str]:
    """A program's exit code and all that it said. Nothing of it is left running."""
    began = {pid: stat_of(pid)[START_TIME] for pid in children_of(process.pid)}
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        raise AssertionError(f"still running after {seconds} s:\n{said[-3000:]}") from None
    # Numbers are used again, and soon where many threads are made.
    left = [pid for pid, at in began.items() if alive(pid) and stat_of(pid)[START_TIME] == at]
    assert not left, f"still running: {left}"
    return process.returncode, said


def children_of(pid: int) -> list[int]:
    """Pids of a process's children, in the order of their start."""
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with contextlib.closing(FreePort("127.0.0.1")) as port:
        return port.number


#: Where a process's time of start lies in `stat_of`.
START_TIME = slice(19, 20)


def stat_of(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended, and was not collected, does not."""
    return stat_of(pid)[:1] not in ([], ["Z"])


def wait_for(happened, seconds: float = HANG) -> None:
    """Wait until a function returns true."""
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, "it has not happened"
        time.sleep(0.02)


def losses_of(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step; of two records of one step, the later counts."""
    file = run / "metrics.jsonl"
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in records if "loss" in r}


def batches_of(run: Path) -> dict[int, tuple[int, list[int]]]:
    """Which batch each step took, and its windows in the run's sequence."""
    return {step: (r["batch"], r["windows"]) for step, r in read_recent(run).items()}


def assert_same_records(run: Path, whole: Path) -> None:
    """Every loss and gradient norm, every batch, and each array of the last checkpoint, by its
    fingerprint, is the same to the bit. Reads no array, and starts no device."""
    for what, of in {"losses": losses_of, "batches": batches_of, "arrays": arrays_of}.items():
        found, wanted = of(run), of(whole)
        assert found, f"no {what} of {run}"
        others = [key for key in found | wanted if found.get(key) != wanted.get(key)]
        first = [(key, found.get(key), wanted.get(key)) for key in others[:3]]
        assert not others, f"{len(others)} of {len(wanted)} {what} differ: {first}"


def arrays_of(run: Path) -> dict[str, Any]:
    """Fingerprints of the last checkpoint's arrays, and its step."""
    saved = read_saved(run)
    assert saved.fingerprints
    return saved.fingerprints | {"step": saved.step}


def weights_of(run: Path, step: int | None = None) -> list[np.ndarray]:
    """The whole saved state, on the host."""
    cfg = config_for_sampling(from_json((run / "config.json").read_text("utf-8")))
    cfg = replace(cfg, **{"run.dir": str(run)})
    state = restore(cfg, make_mesh(cfg.parallel, jax.devices()[:1]), step)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(state))]


def assert_same_run(run: Path, whole: Path) -> None:
    """Every loss, gradient norm and number of the final state has the same bits."""
    found, wanted = losses_of(run), losses_of(whole)
    assert found == wanted
    for mine, theirs in zip(weights_of(run), weights_of(whole), strict=True):
        assert mine.tobytes() == theirs.tobytes()
