"""The parameters of a run with adapters, as those of the model without that computes the same."""

from collections.abc import Callable

import numpy as np

from jaxpar.config import Config
from jaxpar.config.lora_targets import factor
from jaxpar.convert import selfcheck
from jaxpar.convert.run_arrays import RunArrays
from jaxpar.model.lora import A, B, is_adapter
from jaxpar.sharding.grid import Box


class MergedArrays(RunArrays):
    """A run's parameters, what its adapters add to each matrix added, in float32.

    `own` are the same without. What is read here is a sum, which has no fingerprint: they are
    compared with theirs before the first.
    """

    def __init__(self, arrays: RunArrays, cfg: Config):
        super().__init__(arrays.by_path, {}, arrays.where)
        self.own, self._compared = arrays, False
        self._factor = np.float32(factor(cfg))

    def read(self, path: str, box: Box) -> np.ndarray:
        """The float32 numbers of a box, for which the same part of both matrices is read."""
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
    """Reads a run's parameters, adapters as `reference.block` has them: their factor in B.

    Args:     dtype: that the adapters are rounded to.
    """
    read = selfcheck.run_reader(arrays, cfg.model, "float32")
    rounded = selfcheck.run_reader(arrays, cfg.model, dtype)
    return with_factor(lambda path, box: (rounded if is_adapter(path) else read)(path, box), cfg)


def with_factor(read: selfcheck.Read, cfg: Config) -> selfcheck.Read:
    """Reads the same, each adapter's second matrix times the factor."""
    return lambda path, box: read(path, box) * np.float32(factor(cfg) if path.endswith(B) else 1)


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
