"""How much rounding alone changes the gradients of the plain model.

A gradient is a sum over all tokens. Where its terms cancel, as they may for the gain of a norm, one
rounding of a term can be more than `--tolerance` of the sum, and two correct meshes differ by that.
So the plain model is evaluated in float64, which shows what float32 makes of each gradient.
"""

from collections.abc import Container

import flax.traverse_util
import jax
import numpy as np

from jaxpar.config import Config
from jaxpar.config.lists.weight_schedules import with_weights_of
from jaxpar.sharding.batch import Batch
from jaxpar.verification import traces
from jaxpar.verification.distances import gradient_errors

#: Times that the weights are moved.
SAMPLES = 3

#: Half the distance of two float32 numbers, relative to them.
HALF_ULP = 2.0**-24


def rounding_errors(
    plain: traces.TrainingTrace, batch: Batch, cfg: Config, zero: Container[str] = ()
) -> dict[str, float]:
    """Measure the errors of the plain model's gradients that rounding explains, as in
    `gradient_errors`.

    The largest of: the error of the float32 gradient, and what it does to the exact one to move
    each weight by half an ulp, up or down at random. The second does not depend on float32 code,
    and a gradient of few elements that is right by chance does not hide it.

    Args:     plain: trained on `batch` first. zero: as for `gradient_errors`.
    Returns:  an error for each parameter.
    """
    rng = np.random.default_rng(cfg.train.seed)
    at_start = with_weights_of(cfg, 0)
    found = [plain.gradients]
    with jax.enable_x64(True):
        gradients = jax.jit(lambda params: traces.reference_gradients(params, batch, at_start)[1])

        def exact(weights: dict[str, np.ndarray]) -> traces.Arrays:
            return traces.to_host(gradients(flax.traverse_util.unflatten_dict(weights, sep="/")))

        weights = {name: a.astype(np.float64) for name, a in plain.init.items()}
        wanted = exact(weights)
        for _ in range(SAMPLES):
            move = lambda a: a * (1 + HALF_ULP * rng.choice([-1.0, 1.0], a.shape))  # noqa: E731
            found.append(exact({name: move(a) for name, a in weights.items()}))
    errors = [gradient_errors(one, wanted, zero) for one in found]
    return {name: max(error[name] for error in errors) for name in wanted}
