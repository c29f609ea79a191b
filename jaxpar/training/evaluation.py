"""Held-out loss during training."""

import contextlib
import itertools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpar.config import Config, ConfigError
from jaxpar.data import Loader
from jaxpar.objectives.dpo import MEASURES
from jaxpar.step import compiled
from jaxpar.step.train_step import make_eval_step

#: Batches that are dispatched before the host waits for the first of them.
AHEAD = 2


def check_labels(cfg: Config, loader: Loader) -> None:
    """Check before the run starts that the evaluation batches contain labels.

    Args:     loader: of the held-out split.
    Raises:   ConfigError when none of the batches has a label.
    """
    first, most = loader.first_labeled(), cfg.evaluation.num_batches
    if first is not None and first < most:
        return
    what = ", ".join(str(source.dataset.path) for source in loader.sources)
    rule = f"covers only batches of {what} without a labeled token"
    fix = "use --evaluation.every 0"
    if first is not None:
        fix = f"use --evaluation.num-batches {first + 1}, or --evaluation.every 0"
    raise ConfigError("evaluation.num_batches", most, rule, fix)


class Evaluation:
    """Computes the held-out loss, over the same batches each time."""

    def __init__(
        self,
        cfg: Config,
        mesh: Mesh,
        loader: Loader | None,
        max_segments: int,
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """
        Args:     loader: of the held-out split; None without evaluation. alone: as in
                  `FirstRunAlone`.
        """
        self.loader, self.num_batches = loader, cfg.evaluation.num_batches
        self.of_pairs = bool(cfg.dpo.beta)
        if loader is not None:
            self.step = compiled.FirstRunAlone(make_eval_step(cfg, mesh, max_segments), alone)

    def lower(self, params: Any) -> Any:
        """Lower the evaluation step for parameters like these; `.compile()` compiles it for calls.

        Args:     params: arrays, or abstract arrays with shardings.
        Returns:  a `jax.stages.Lowered`; None without evaluation.
        """
        if self.loader is None:
            return None
        return self.step.program.lower(params, self.loader.abstract_batch)

    def __call__(self, params: Any) -> dict[str, float]:
        """Return what is recorded, by name: `held_out_loss`, and more if it is known."""
        loader = self.loader
        assert loader is not None
        sums = []
        with contextlib.closing(loader.prefetched()) as batches:
            for _, batch in itertools.islice(batches, self.num_batches):
                sums.append(self.step(params, batch))  # the devices do not wait for the host
                if len(sums) > AHEAD:
                    jax.block_until_ready(sums[-1 - AHEAD])
        sums = jax.device_get(sums)
        total, count = (sum(np.asarray(s[i], np.float64) for s in sums) for i in range(2))
        if self.of_pairs:
            measured = zip(MEASURES, np.asarray(total / count).tolist(), strict=True)
            return {f"held_out_{name}": mean for name, mean in measured}
        loss, ratio = float(total / count), loader.bytes_per_token
        known = {} if ratio is None else {"bits_per_byte": loss / math.log(2) / ratio}
        return {"held_out_loss": loss} | known
