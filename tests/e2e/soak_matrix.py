"""A run that is saved in one mesh and number of processes goes on in another."""

import itertools
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxpar.checkpoint.saved import saved_steps
from jaxpar.runtime import exit_codes
from tests import ranks

#: Six meshes of four devices.
MESHES = {
    "data": "--parallel.data 4",
    "replica": "--parallel.replica 2 --parallel.data 2",
    "tensor": "--parallel.tensor 2 --parallel.data 2",
    "sequence": "--parallel.sequence 2 --parallel.data 2",
    "pipeline": "--parallel.pipeline 2 --parallel.data 2 --parallel.zero 1"
    " --parallel.num-microbatches 2",
    "product": "--parallel.pipeline 2 --parallel.tensor 2 --parallel.zero 1"
    " --parallel.num-microbatches 2",
}

DEVICES = 4

#: A run is saved after so many steps, and goes on to so many.
SAVED, LAST = 6, 10

#: Of every run. The learning rate does not depend on the last step.
ALWAYS = "--evaluation.every 0 --optimizer.schedule constant --optimizer.warmup-steps 2".split()

#: What a pair on one mesh finds.
SAME_BITS = "same bits"

#: Losses of two meshes are equal to rounding, relative to themselves.
ROUNDING = 1e-5

#: A trial is over by then, or hangs.
MAX_SECONDS = 400.0


@dataclass(frozen=True)
class Place:
    """A mesh, and the number of processes that its devices are in."""

    mesh: str
    processes: int

    def __str__(self) -> str:
        return f"{self.mesh} in {self.processes}"


PLACES = [Place(*place) for place in itertools.product(MESHES, (1, 2, 4))]


def train(config: str, run: Path, place: Place, *more: str) -> None:
    """Run the training program to its end, in a place."""
    args = [config, *MESHES[place.mesh].split(), "--run.dir", str(run), *more]
    args += ALWAYS
    if place.processes == 1:
        command = [sys.executable, "-m", "jaxpar.train", *args, "--run.cpu-devices", str(DEVICES)]
        kept = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, env=ranks.environment(), cwd=ranks.ROOT, **kept)
    else:
        each = DEVICES // place.processes
        process = ranks.launch(place.processes, each, "--restarts", "0", "--", *args)
    code, said = ranks.finish(process, MAX_SECONDS)
    assert code == exit_codes.EXIT_OK, f"code {code}: {said[-1500:]}"


class Matrix:
    """The trials, and the runs that they share."""

    def __init__(self, config: str):
        """Args:     config: a config file; runs lie beside it."""
        self._config, self._folder = config, Path(config).parent

    def whole(self, mesh: str) -> str:
        """A run on a mesh, in one process, that nothing interrupts."""
        train(self._config, self._whole(mesh), Place(mesh, 1), "--train.num-steps", str(LAST))
        return f"loss {ranks.losses_of(self._whole(mesh))[LAST][0]:.6f}"

    def begin(self, place: Place) -> str:
        """A run that is saved in a place."""
        run = self._folder / str(place)
        steps = ("--train.num-steps", str(SAVED), "--checkpoint.every", str(SAVED))
        train(self._config, run, place, *steps)
        assert saved_steps(run) == [SAVED]
        return f"saved step {SAVED}"

    def goes_on(self, before: Place, now: Place) -> str:
        """A run of one place goes on in the other: to the bit on its mesh, to rounding elsewhere,
        with the same batches in the same order."""
        run = self._folder / f"{before} then {now}"
        shutil.copytree(self._folder / str(before), run)
        train(self._config, run, now, "--train.num-steps", str(LAST), "--checkpoint.resume", "must")
        assert saved_steps(run)[-1] == LAST
        assert ranks.batches_of(run) == ranks.batches_of(self._whole(now.mesh))
        found = ranks.losses_of(run)
        first, later = self._whole(before.mesh), self._whole(now.mesh)
        known = {step: values for step, values in found.items() if step <= SAVED}
        assert known.items() <= ranks.losses_of(first).items(), "saved steps have other bits"
        if before.mesh == now.mesh:
            ranks.assert_same_records(run, later)
            said = SAME_BITS
        else:
            wanted = ranks.losses_of(later)
            assert sorted(found) == sorted(wanted)
            pairs = [(found[step][0], wanted[step][0]) for step in sorted(wanted)]
            away = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)
            np.testing.assert_array_less(away, ROUNDING)
            said = f"losses within {away:.1e}"
        shutil.rmtree(run)
        return said

    def _whole(self, mesh: str) -> Path:
        return self._folder / f"whole {mesh}"
