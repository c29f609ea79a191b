"""What a run trains, as a value: all that other packages know of it.

This file imports no JAX by itself, since a section of the config may be an objective.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from jaxpar.config.schema.section import ConfigSection
from jaxpar.config.values import Value

if TYPE_CHECKING:
    import jax
    import numpy as np

    from jaxpar.config import Config
    from jaxpar.objectives.head import Head, Sums, Tree
    from jaxpar.sharding.batch import Batch


class Objective(ConfigSection, Value):
    """What a run trains.

    The head of the model gives sums; a step divides them by a count, of the whole batch. Those in
    place of the next token are sections of the config (`jaxpar/features/`), whose fields are their
    options, or values of `train.loss`, of classes outside the package.
    """

    kind: ClassVar[str] = "Loss"
    evaluates: ClassVar[bool] = True
    """Whether evaluations are of it. Otherwise they are of the cross entropy."""
    recomputed: ClassVar[int] = 0
    """Bytes per logit that the backward has in float32 if it computes logits again, which then
    keeps the head's input; 0: it does not."""
    dataset: ClassVar[str] = ""
    """The kind of dataset that it needs, `Meta.kind`."""
    documents: ClassVar[int | None] = None
    """The most documents in a row of `random_batch`."""

    # ------------------------------------------------------------- in a step, on local shards

    def head(self, top: "Tree", x: "jax.Array", mb: "Batch", h: "Head") -> "Sums":
        """Compute the summed loss of a microbatch. Every device calls it.

        Args:
            top: weights outside the layers.
            x: [B, T/(sequence*tensor), D], of the last pipeline stage.
            mb: of this device.
            h: what it knows beside them.
        Returns:  (sum to differentiate, sums to report).
        """
        raise NotImplementedError

    def count(self, batch: "Batch", axes: tuple[str, ...]) -> "jax.Array | None":
        """Return what the sums are divided by, of the global batch; labeled tokens by default.

        None: it depends on the model, and is the last of the sums in an evaluation; a training step
        evaluates its batch first, and the head gets the mean.

        Args:
            batch: of this device.
            axes: of the mesh, over which tokens are split.
        """
        from jaxpar.objectives.head import count_labels

        return count_labels(batch, axes)

    def report(self, mean: Any) -> dict[str, Any]:
        """Name the means of the sums: "loss", and the metrics."""
        return {"loss": mean}

    @property
    def of_metrics(self) -> int:
        """How many of the sums, the last ones, are those of metrics: over all replicas of
        DiLoCo."""
        return 0

    def summed(self, sums: "jax.Array", axes: tuple[str, ...]) -> "jax.Array":
        """Sum what heads have reported over devices, and metrics over all replicas.

        Communication: an all-reduce over `axes`, and one of metrics over REPLICA if it is another.
        """
        import jax.numpy as jnp

        from jaxpar.parallel.collectives import psum
        from jaxpar.sharding.axes import REPLICA

        total, n = psum(sums, axes), self.of_metrics
        if not n or REPLICA in axes:
            return total
        return jnp.concatenate([total[:-n], psum(total[-n:], REPLICA)])

    # ---------------------------------------------------------------------------- for `certify`

    def plain(
        self, logits: "jax.Array", batch: "Batch", cfg: "Config"
    ) -> "tuple[jax.Array, jax.Array]":
        """Compute the mean loss of a batch from all logits on one device, without sharding.

        Args:
            logits: float32 [B, T, V].
            batch: [B, T] in text order.
        Returns:  (what is differentiated, "loss").
        """
        raise NotImplementedError

    def random_batch(
        self, cfg: "Config", rng: "np.random.Generator", text: "np.ndarray"
    ) -> "Batch | None":
        """Make a random batch on the host, in text order. None: packed documents.

        Args:     text: int32 [B, T + 1].
        """
        return None

    def random_extra(self, cfg: "Config", rng: "np.random.Generator") -> "dict[str, np.ndarray]":
        """Make what it reads of `Batch.extra`, with random values."""
        return {}

    # ------------------------------------------------------------ in a config, its data and a run

    def batch_extra(self, cfg: "Config") -> dict[str, tuple[tuple[int, ...], str]]:
        """Return what it reads of `Batch.extra`: name -> (dims after [B, T], dtype)."""
        return {}

    def loader(self, split: str) -> "type | None":
        """Return the class, a subclass of `Loader`, that reads a split; None: `Loader`."""
        return None

    def frozen_model(self, cfg: "Config") -> "Config | None":
        """Return the config of a frozen model whose forward pass comes before each step."""
        return None

    def check_plan(self, cfg: "Config") -> None:
        """Raise ConfigError if `frozen_model` is unknown, so that it cannot be counted."""

    def weights(self, cfg: "Config", recorded: Any) -> dict[str, Any]:
        """Choose the weights of other runs that it reads: field -> `Chosen`.

        Args:     recorded: those that the run has used so far, by field.
        """
        return {}

    @property
    def in_files(self) -> bool:
        """Whether files are in place of these weights."""
        return False

    def prepare(
        self, cfg: "Config", mesh: Any, loader: Any, max_segments: int, weights_from: Any
    ) -> Any:
        """Return what a run needs in addition, a `Supplement`; None: nothing.

        Args:     as `Run` has them.
        """
        return None

    @classmethod
    def data_commands(cls) -> dict[str, tuple[type, Callable[[Any], None]]]:
        """Return subcommands of `python -m jaxpar.data`: name -> (options, main)."""
        return {}


def objective_of(cfg: "Config") -> Objective:
    """Return what a config minimizes."""
    from jaxpar.config.schema.features import objective_in
    from jaxpar.config.values import unknown_code
    from jaxpar.objectives.losses import Loss
    from jaxpar.objectives.tokens import CrossEntropy, MultiToken, OwnLoss

    if isinstance(found := objective_in(cfg), Objective):
        return found
    if isinstance(cfg.train.loss, Loss):
        return OwnLoss.of(cfg.train.loss)
    if cfg.train.loss is not None:
        raise unknown_code("train.loss", cfg.train.loss)
    return MultiToken() if cfg.model.mtp_depth else CrossEntropy()


def head_of(objective: Objective, h: "Head") -> "Callable[[Tree, jax.Array, Batch], Sums]":
    """Return an objective's head as `StagedModel` has it."""
    from jaxpar.objectives.tokens import CrossEntropy

    used = objective if h.trains or objective.evaluates else CrossEntropy()
    return functools.partial(used.head, h=h)
