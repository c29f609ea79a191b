"""What the checks of `python -m jaxpar.certify` are given, and what they return.

A check is a function from a `Subject` to its results, each as soon as it is known. `CHECKS` in
`checks.py` lists them all; the command, the certificate and the tests know no check by name.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax

from jaxpar.config import Config
from jaxpar.monitoring.certificate import Result

__all__ = ["Check", "Result", "Subject"]


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


#: A check. It says what it leaves out by a result with `not_run`. A list has the results of a mesh,
#: which get a line together.
Check = Callable[[Subject], Iterator[Result | list[Result]]]
