"""What a train step does beside loss, gradients and update: its features.

A feature is one class in one file. It may measure values in layers (`probes`), have state that is
saved with the run (`extra`), change what a step begins with (`before_gradients`), reduce gradients
(`reduce`), and act on what a step has computed (`after_gradients`, `after_update`): metrics,
parameters, state. Step, state, checkpoints and metrics know none of them by name. A section of the
config may be a feature (`jaxpar/features/`), so this file imports no JAX by itself.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from jaxpar.config.metrics import Metric
from jaxpar.config.schema.section import ConfigSection

if TYPE_CHECKING:
    from jaxpar.config import Config
    from jaxpar.model.probes import Feed, LayerProbe
    from jaxpar.sharding.batch import Batch
    from jaxpar.step.metrics import Step
    from jaxpar.step.progress import TrainStep

type Tree = Any


class Feature(ConfigSection):
    """A feature of train steps. Every method has a default that does nothing."""

    name: ClassVar[str]
    """Of its state, in `TrainState.extra` and in a checkpoint."""
    turn: ClassVar[int] = 0
    """Its place among features: what changes weights comes before the average of weights, and what
    wraps the whole step at the end."""
    begins: ClassVar[str] = ""
    """What a log says of a state that a checkpoint does not have, before "step N"."""
    by_layer: ClassVar[bool] = False
    """Whether it only measures layers, in steps that `metrics.layers_every` names."""
    of_final_weights: ClassVar[bool] = False
    """Whether `after_update` reads the weights that the step ends with, and changes its state
    alone: then it comes after users' post-updates."""
    handles_skips: ClassVar[bool] = False
    """Whether `after_update` itself changes nothing where `TrainStep.ok` is False. Otherwise the
    step selects, which takes no extra pass for what `after_update` returns unchanged."""

    names: ClassVar[list[str]] = []
    """Those of all features."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.section or cls.name
        if isinstance(cls.name, str):
            Feature.names.append(cls.name)

    def is_on(self, cfg: "Config") -> bool:
        """Whether a config has the feature: its section, unless a class says otherwise."""
        return getattr(cfg, self.section) is not None

    def own_metrics(self, cfg: "Config") -> dict[str, Metric]:
        """Return the metrics that users' values in a config add."""
        return {}

    def probes(self, cfg: "Config", requested: tuple[str, ...]) -> "tuple[LayerProbe, ...]":
        """Return what its layers measure."""
        return ()

    def feeds(self, cfg: "Config", batch: "Batch") -> "tuple[Feed, ...]":
        """Return what its layers read in addition."""
        return ()

    def extra(self, cfg: "Config", specs: Tree) -> Tree:
        """Return the ParamSpecs of its state; () for none.

        Args:     specs: ParamSpecs of the trainable parameters, in running or logical layer order.
        """
        return ()

    def initial(self, cfg: "Config", params: Tree) -> Tree | None:
        """Return its state before the first step, global arrays. None: as its specs initialize it.

        Args:     params: the initial trainable parameters.
        """
        return None

    def before_gradients(self, s: "TrainStep") -> "TrainStep":
        """Change what a step begins with: batch, `scale`, `fed`."""
        return s

    #: (grads, specs, s) -> (sums, new state), in place of the sum over the mesh in float32.
    reduce: Callable[..., tuple[Tree, Any]] | None = None

    def after_gradients(self, s: "TrainStep") -> "TrainStep":
        """After the gradients, before the update: metrics of probes and gradients."""
        return s

    def after_update(self, s: "TrainStep") -> "TrainStep":
        """After the update: parameters, state, metrics."""
        return s

    def plain_state(self, cfg: "Config", params: Tree, initialize: Callable[[Tree], Tree]) -> Tree:
        """Return the state before the first step that `plain` gets; () for none.

        Args:
            params: the trainable ones.
            initialize: from ParamSpecs to their initial values.
        """
        return ()

    def plain(
        self, new: Tree, before: Tree, state: Tree, step: Any, batch: "Batch", cfg: "Config"
    ) -> tuple[Tree, Tree]:
        """`after_update` for the reference model: parameters and state on one device, in plain
        jax.numpy.

        Args:
            new, before: all parameters after and before the update.
            step: steps before this one.
        """
        return new, state

    def plain_before(self, params: Tree, batch: "Batch", cfg: "Config") -> dict[str, Any]:
        """`after_gradients` for the reference model: metrics, from its parameters."""
        return {}

    def plain_after(self, new: Tree, cfg: "Config") -> dict[str, Any]:
        """The metrics of `after_update` for the reference model, from its new parameters."""
        return {}

    def wrap(self, step: "Step", cfg: "Config", fragment: int | None) -> "Step":
        """Wrap the whole step.

        Args:     fragment: as in `make_train_step`.
        """
        return step
