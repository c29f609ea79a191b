"""Check that all copies of the training state are equal.

Several devices hold copies of the same parameters and moments: over `replica`, and over every axis
that does not shard an array. Each copy goes through the same operations, so all copies stay equal
bit for bit. A device that computes or stores a wrong value makes its copies drift, which nothing
else detects.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxpar.config import Config
from jaxpar.parallel.collectives import varying
from jaxpar.runtime.exit_codes import BadNumerics
from jaxpar.sharding.axes import AXES, axes_of
from jaxpar.sharding.fingerprint import local_sums, named_leaves
from jaxpar.step.state import TrainState, state_specs


@dataclass(frozen=True)
class Drift:
    """An array whose copies differ."""

    name: str
    """Name of the array."""
    devices: tuple[Any, ...]
    """The devices whose copies are in the minority, or all devices if there is no majority."""
    copies: int

    def __str__(self) -> str:
        named = ", ".join(f"{d} of process {d.process_index}" for d in self.devices)
        if len(self.devices) == self.copies:
            return f"{self.name}: {named} differ, with no majority"
        return f"{self.name}: {named} differ{'s' if len(self.devices) == 1 else ''} from the others"


class ReplicaCheck:
    """Finds copies that differ in the running state.

    Every process must call it. It does not check moments and master weights in host memory
    (`optimizer.offload`, `offload_masters`), which would have to be copied to the device.

    Communication: one all-reduce of 8 bytes for each device and array.
    """

    def __init__(self, cfg: Config, mesh: Mesh):
        specs = _looked_at(state_specs(cfg), cfg)
        flat = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, PartitionSpec))

        def table(tree: Any) -> jax.Array:
            leaves = zip(jax.tree.leaves(tree), flat, strict=True)
            own = [varying(local_sums(x, s)) for x, s in leaves]
            place = jnp.arange(mesh.size) == lax.axis_index(AXES)
            return lax.psum(jnp.where(place[:, None, None], jnp.stack(own), 0), AXES)

        self._cfg, self._mesh = cfg, mesh
        self._specs = dict(zip(named_leaves(specs), flat, strict=True))
        mapped = jax.shard_map(table, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec())
        self._program = jax.jit(mapped)

    def compile(self, state: TrainState) -> None:
        """Compile the program for calls with such a state.

        Args:     state: arrays, or abstract arrays with shardings.
        """
        self._program.lower(_looked_at(state, self._cfg)).compile()  # JAX keeps it

    def __call__(self, state: TrainState) -> list[Drift]:
        """Return the copies of the running state that differ from the others."""
        sums = np.asarray(jax.device_get(self._program(_looked_at(state, self._cfg))))
        found = (
            _drifts(self._mesh, name, spec, sums[:, i])
            for i, (name, spec) in enumerate(self._specs.items())
        )
        return [drift for drifts in found for drift in drifts]


def _looked_at(state: TrainState, cfg: Config) -> Any:
    left_out = {"opt_state"} if cfg.optimizer.offload else set()
    left_out |= {"params"} if cfg.optimizer.offload_masters else set()
    return {name: part for name, part in state.saved.items() if name not in left_out}


def _drifts(mesh: Mesh, name: str, spec: PartitionSpec, sums: np.ndarray) -> list[Drift]:
    """Find the shards of an array whose copies differ.

    Args:     sums: uint32 [devices, 2], in mesh order.
    """
    cut = [i for i, axis in enumerate(mesh.axis_names) if axis in axes_of(spec)]
    groups: dict[tuple, list[tuple[Any, tuple]]] = defaultdict(list)
    for place, device in np.ndenumerate(mesh.devices):
        row = int(np.ravel_multi_index(place, mesh.devices.shape))
        groups[tuple(place[i] for i in cut)].append((device, tuple(sums[row].tolist())))
    found = []
    for copies in groups.values():
        (most, count), *_ = Counter(text for _, text in copies).most_common()
        if count == len(copies):
            continue
        alone = tuple(d for d, text in copies if text != most or 2 * count <= len(copies))
        found.append(Drift(name, alone, len(copies)))
    return found


def require_equal(step: int, drifts: list[Drift]) -> None:
    """Raise an error if copies have drifted.

    Raises:   BadNumerics, naming the devices and arrays that have drifted.
    """
    if not drifts:
        return
    devices = {d for drift in drifts for d in drift.devices}
    named, more = drifts[:4], len(drifts) - 4
    text = "; ".join(map(str, named)) + (f"; and {more} more arrays" if more > 0 else "")
    raise BadNumerics(
        f"step {step}: copies that should be equal differ on {len(devices)} of "
        f"{jax.device_count()} devices. {text}. Remove the faulty device and resume from a "
        "checkpoint older than the previous check (python -m jaxpar.checkpoint ls)."
    )
