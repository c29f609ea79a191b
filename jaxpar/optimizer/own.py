"""Update rules and schedules of users: values of the fields `optimizer.name` and `.schedule`.

Imports no JAX: config files import it.
"""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jaxpar.config.values import Value

if TYPE_CHECKING:
    import jax
    import optax

    from jaxpar.config import OptimizerConfig


class UpdateRule(Value):
    """An update rule: how gradients become changes of the weights.

    By default it is elementwise, since each device updates its own shards. Its moments have the
    shapes of all or some parameters (`optax.masked`, `optax.partition`); those named mu, trace and
    nu can be stored in bfloat16.
    """

    kind: ClassVar[str] = "UpdateRule"

    needs: ClassVar[Literal["elements", "matrices"]] = "elements"
    """"matrices": it gets complete matrices, by `Matrices.map` (optimizer/matrices.py)."""

    def __call__(
        self, cfg: "OptimizerConfig", rate: "optax.Schedule", mask: Any, *matrices: Any
    ) -> "optax.GradientTransformation":
        """Return the transformation of gradients.

        Args:
            cfg: the section `optimizer`.
            rate: the learning rate by step.
            mask: where weight decay applies, a tree of booleans.
            matrices: one `Matrices`, if the rule needs them.
        """
        raise NotImplementedError


class Schedule(Value):
    """A shape of the learning rate after the warm-up."""

    kind: ClassVar[str] = "Schedule"

    def __call__(self, step: "jax.Array", num_steps: int) -> "jax.Array":
        """Return the learning rate, relative to `optimizer.learning_rate`.

        Args:
            step: int32 scalar, from 0 after the warm-up.
            num_steps: steps of the run after the warm-up.
        """
        raise NotImplementedError
