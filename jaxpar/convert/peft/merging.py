"""Merges a run's adapters into its parameters, for a model without adapters."""

from collections.abc import Callable

import numpy as np

from jaxpar.config import Config, LoraConfig, present
from jaxpar.config.lists.lora_targets import factor
from jaxpar.convert import selfcheck
from jaxpar.convert.run_arrays import RunArrays
from jaxpar.model.lora import A, B, is_adapter
from jaxpar.sharding.grid import Box


class MergedArrays(RunArrays):
    """A run's parameters with its adapters merged into each matrix, in float32.

    `own` are the unmerged parameters. Merged values have no fingerprints, so those of `own` are
    verified before the first read.
    """

    def __init__(self, arrays: RunArrays, lora: LoraConfig):
        super().__init__(arrays.by_path, {}, arrays.where)
        self.own, self._compared = arrays, False
        self._factor = np.float32(factor(lora))

    def read(self, path: str, box: Box) -> np.ndarray:
        """Read the float32 values of a box, and the matching parts of both adapter matrices."""
        if not self._compared:
            self.own.compare_all()
            self._compared = True
        values = super().read(path, box)
        if path + A not in self.by_path:
            return values
        *inputs, rank = (slice(0, n) for n in self.shape(path + A))
        cut = len(inputs)
        a = super().read(path + A, (*box[:cut], rank))
        b = super().read(path + B, (box[0], rank, *box[cut:]))
        for one, left, right in zip(values, a, b, strict=True):
            one += self._factor * np.tensordot(left, right, 1)
        return values


def unmerged_reader(arrays: RunArrays, cfg: Config, dtype: str = "float32") -> selfcheck.Read:
    """Make a function that reads a run's parameters, with the adapters' factor in B.

    This is the form that `reference.block` expects.

    Args:     dtype: the adapters are rounded to it.
    """
    read = selfcheck.run_reader(arrays, cfg.model, "float32")
    rounded = selfcheck.run_reader(arrays, cfg.model, dtype)
    return with_factor(lambda path, box: (rounded if is_adapter(path) else read)(path, box), cfg)


def with_factor(read: selfcheck.Read, cfg: Config) -> selfcheck.Read:
    """Wrap a reader to multiply each adapter's second matrix by the factor."""
    of_b = np.float32(factor(present(cfg.lora)))
    return lambda path, box: read(path, box) * (of_b if path.endswith(B) else np.float32(1))


def check_merge(
    merged: MergedArrays, cfg: Config, tolerance: float, log: Callable[[str], None]
) -> None:
    """Compare the logits of a run before and after its adapters are merged, both in float32.

    Args:     tolerance, log: as in `selfcheck.check_conversion`.
    Raises:   CheckFailed beyond the tolerance.
    """
    tokens = selfcheck.random_tokens(cfg.model)
    ours = selfcheck.logits(unmerged_reader(merged.own, cfg), cfg.model, tokens, cfg.lora)
    read = selfcheck.run_reader(merged, cfg.model, "float32")
    found = selfcheck.logits(read, cfg.model, tokens)
    selfcheck.compare(found, ours, "merged adapters", tolerance, log)
