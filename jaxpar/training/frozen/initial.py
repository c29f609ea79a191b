"""The weights that a run began with, which it may need again after it has resumed.

They are the reference of preferences, and the state that a run without a checkpoint returns to.
"""

import dataclasses
from typing import Any

from jaxpar.checkpoint import Saved
from jaxpar.config import Config, ConfigError
from jaxpar.runtime.processes import peers
from jaxpar.training.frozen import chosen as weights
from jaxpar.training.frozen.chosen import INITIAL, Chosen
from jaxpar.training.initial_weights import Origin, digest_of, find


class InitialWeights:
    """The weights that a run began with."""

    def __init__(self, cfg: Config, chosen: dict[str, Chosen], saved: Saved | None):
        """Find the weights of a new run.

        Args:     chosen: the weights of other runs, which is completed here. saved: the state that
                  the run resumes from; None for a new run.
        Raises:   ConfigError as `find`.
        """
        self._cfg, self._chosen, self._saved = cfg, chosen, saved
        #: Where they are; None if they are random, and in a resumed run before `again`.
        self.origin = find(cfg, chosen.get(INITIAL)) if saved is None else None

    def again(self) -> Origin | None:
        """Return where they are, also in a resumed run; None if they are random.

        All processes call this together.

        Raises:   ConfigError when they are not there any more; PeerFailed.
        """
        if self._saved is None or self.origin is not None:
            return self.origin
        seconds = self._cfg.cluster.slow_seconds or 1e6
        found = weights.of_first_process(
            lambda: weights.initial_again(self._cfg, self._saved), seconds
        )
        self._chosen.update(found)
        open_here = lambda: find(self._cfg, found.get(INITIAL))  # noqa: E731
        self.origin = peers.all_or_none("initial weights", seconds, open_here)
        return self.origin

    @property
    def identity(self) -> str:
        """What identifies them, beside the seed."""
        if (initial := self._chosen.get(INITIAL)) is not None:
            return initial.weights or initial.run
        return ""

    def check_published(self, params: Any) -> None:
        """Record the values of a published model, or compare them with the record.

        Args:     params: made from `again`. Nothing is done for those of a run, whose step says it.
        Raises:   ConfigError if the run began with others.
        """
        initial = self._chosen.get(INITIAL)
        if initial is None or initial.step is not None:
            return
        found = digest_of(params, self._cfg)
        if initial.weights and found != initial.weights:
            rule = "has other weights now than when this run began with them"
            raise ConfigError(INITIAL, initial.run, rule, "bring those files back")
        self._chosen[INITIAL] = dataclasses.replace(initial, weights=found)
