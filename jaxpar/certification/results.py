"""What the checks of `python -m jaxpar.certify` are given, and what they return.

A check is a function from a `Subject` to its results, each as soon as it is known. `CHECKS` in
`checks.py` lists them all; the command, the certificate and the tests know no check by name.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax

from jaxpar.config import Config


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is certified.

    Args:
        asked: the config as the user gave it.
        small: the config that is run: shrunk, with its own features, float32, one device.
        meshes: by name, `small` on each mesh, resolved.
        left_out: by name of a mesh, why it is not among them.
        devices: those that the meshes take theirs from.
        steps: optimizer steps to compare.
        tolerance: largest relative error of what is not rounded to a small dtype.
        given: whether --mesh named the meshes, which are then the only ones to look at.
    """

    asked: Config
    small: Config
    meshes: Mapping[str, Config]
    left_out: Mapping[str, str]
    devices: Sequence[jax.Device]
    steps: int
    tolerance: float
    given: bool = False


@dataclasses.dataclass(frozen=True)
class Result:
    """One comparison.

    Args:
        check: name of the check.
        mesh: where it ran; "" if on no mesh of its own.
        what: what is compared, the same in every run: "gradient".
        distance: between the two; 0 for equal bits.
        tolerance: largest distance that passes.
        not_run: why it was not run; "" if it was.
        where: the worst of what is compared, such as a parameter; "" if there is only one.
        detail: after a failure, the first wrong tensor, layer and direction, and the smallest mesh
            that shows it.
    """

    check: str
    mesh: str
    what: str
    distance: float = 0.0
    tolerance: float = 0.0
    not_run: str = ""
    where: str = ""
    detail: str = ""

    @property
    def passed(self) -> bool:
        """Whether the distance is within the tolerance. A NaN is not."""
        return bool(self.not_run) or (
            math.isfinite(self.distance) and self.distance <= self.tolerance
        )

    def __str__(self) -> str:
        at = f"{self.mesh or self.check}: {self.what}"
        if self.not_run:
            return f"{at}: {self.not_run}"
        named = f" of {self.where}" if self.where else ""
        off = f"{at}{named} is off by {self.distance:.1e}, allowed {self.tolerance:.1e}"
        return f"{off} ({self.detail})" if self.detail else off


#: A check. It says what it leaves out by a result with `not_run`. A list has the results of a mesh,
#: which get a line together.
Check = Callable[[Subject], Iterator[Result | list[Result]]]
