"""What a user's file is written with. Experimental until version 0.2.

    component, Mixer, FeedForward    what a layer is composed of, and the decorator of its class
    matrix, vector                   the declaration of a weight
    Layer, Model, swap               a model: [Layer(name, mixer, feed_forward), ...]
    Loss, token_loss, Probe          a loss, a metric of layers
    PairObjective                    a loss of pairs of responses
    PostUpdate, UpdateRule, Schedule what changes weights, and the learning rate
    DataSource, Callback, MetricSink batches, what acts between steps, where metrics go
    check                            a conformance test of a component

docs/extend has an example of each.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxpar import components
from jaxpar.components import *  # noqa: F403
from jaxpar.components.component import Component, FeedForward, Mixer, Tokens, component
from jaxpar.components.model import Layer
from jaxpar.components.weight import Weight, matrix, vector
from jaxpar.data.own import DataSource
from jaxpar.extend.model import swap
from jaxpar.monitoring.sinks import MetricSink
from jaxpar.objectives.losses import Loss, Scores
from jaxpar.objectives.of_pairs import PairObjective
from jaxpar.optimizer.matrices import Matrices
from jaxpar.optimizer.own import Schedule, UpdateRule
from jaxpar.sharding.params import ParamSpec
from jaxpar.step.features.own_probes import Probe
from jaxpar.step.features.post_updates import PostUpdate
from jaxpar.training.callbacks.callback import Callback, Request

__all__ = [
    "Callback",
    "Component",
    "DataSource",
    "FeedForward",
    "Loss",
    "Matrices",
    "MetricSink",
    "Mixer",
    "PairObjective",
    "ParamSpec",
    "PostUpdate",
    "Probe",
    "Request",
    "Schedule",
    "Scores",
    "Tokens",
    "UpdateRule",
    "Weight",
    "check",
    "component",
    "matrix",
    "swap",
    "token_loss",
    "vector",
]
__all__ += components.__all__


MAY_IMPORT = (
    "components",
    "config",
    "sharding",
    "optimizer",
    "objectives",
    "step",
    "data",
    "monitoring",
    "training",
    "certification",
)


def token_loss(function: Callable[[Scores, Any], Any]) -> Loss:
    """Make a loss of a function (scores, batch) -> [B, T], or (values, weights).

    The loss is the mean over labeled tokens, or that of values by weights, on every mesh.
    """
    fields: dict[str, Any] = {"__call__": lambda _, scores, batch: function(scores, batch)}
    for name in ("__module__", "__qualname__", "__doc__"):
        fields[name] = getattr(function, name)
    return type(function.__name__, (Loss,), fields)()


def check(
    part: Mixer | FeedForward | Layer,
    *,
    d_model: int = 64,
    seq_len: int = 32,
    meshes: Sequence[str] | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Check a component in a small model: a conformance test, for pytest.

        def test_sigmoid():
            check(Sigmoid(num_heads=4, num_kv_heads=2, head_dim=16))

    The weights that it declares are those that it reads. A token depends on no later one, and on no
    other document. Its gradients on meshes are those of its plain form on one device; a checkpoint
    is loaded on another mesh bit for bit; text token by token has the logits of a complete one; and
    gradients in bfloat16 are near. It takes about half a minute, and four devices: without GPUs,
    JAX simulates them, unless it is already running with fewer.

    Args:
        part: with sizes that two tensor ranks divide, and four ranks that share experts.
        d_model: width of the model.
        seq_len: tokens of its sequences.
        meshes: in place of its own, as for `python -m jaxpar.certify --mesh`.
        tolerance: relative to the largest value of an array.
    Raises:   CheckError, an AssertionError that names what differs, where and by how much;
              ConfigError for fewer devices.
    """
    from jaxpar.certification import conformance

    conformance.check(part, d_model=d_model, seq_len=seq_len, meshes=meshes, tolerance=tolerance)
