"""The mesh whose axes are verified."""

import dataclasses
import math
from typing import Any

from jaxpar.config import ConfigError, ParallelConfig
from jaxpar.config.numerals import only_digits
from jaxpar.sharding.axes import AXES, DATA, EXPERT, PIPELINE, REPLICA, SEQUENCE, TENSOR

#: Mesh axes in the order in which devices are assigned to them, if no mesh is given.
SHARED_OUT = (TENSOR, SEQUENCE, DATA, PIPELINE, REPLICA, EXPERT)


def read_mesh(text: str) -> dict[str, int]:
    """ "data=2,tensor=4" -> {"data": 2, "tensor": 4}."""
    found: dict[str, int] = {}
    for pair in text.split(",") if text else []:
        axis, _, size = (part.strip() for part in pair.partition("="))
        if axis not in AXES or not only_digits(size) or int(size) < 1:
            rule = f"must be AXIS=SIZE, where AXIS is one of {', '.join(AXES)} and SIZE is above 0"
            raise ConfigError("--mesh", pair, rule, "use --mesh data=2,tensor=4")
        if axis in found:
            raise ConfigError("--mesh", text, f"names {axis} twice", "give each axis once")
        found[axis] = int(size)
    return found


def default_mesh(devices: int) -> dict[str, int]:
    """Assign the prime factors of `devices` to the axes: 8 -> tensor=2, sequence=2, data=2."""
    sizes = dict.fromkeys(AXES, 1)
    for i, factor in enumerate(prime_factors(devices)):
        sizes[SHARED_OUT[i % len(SHARED_OUT)]] *= factor
    return sizes


def prime_factors(n: int) -> list[int]:
    """Return the prime factors in ascending order."""
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return found


def mesh_for(asked: dict[str, int], devices: int) -> ParallelConfig:
    """Return the mesh to verify.

    Raises:   ConfigError when its axes do not multiply to the number of devices.
    """
    sizes: dict[str, Any] = dict.fromkeys(AXES, 1) | asked if asked else default_mesh(devices)
    if math.prod(sizes.values()) != devices:
        said = ",".join(f"{axis}={size}" for axis, size in asked.items())
        rule = f"takes {math.prod(sizes.values())} devices, but there are {devices}"
        default = {a: s for a, s in default_mesh(devices).items() if s > 1} or {DATA: 1}
        fix = f"use --mesh {','.join(f'{a}={s}' for a, s in default.items())}"
        raise ConfigError("--mesh", said, rule, fix)
    return dataclasses.replace(ParallelConfig(), **sizes)
