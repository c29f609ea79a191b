"""The model and the train step as plain functions, for `jax.grad`, `vmap`, `jvp`, `jit`, notebooks.

    init, apply, loss                             plain: one device, no sharding, no kernels
    init_state, make_train_step, make_eval_step   sharded over a mesh, as `python -m jaxpar.train`
    load                                          the parameters of a run or of a published model

Parameters are dicts of float32 arrays under the names that a checkpoint has. A model is described
by the section `model` of a config, which is a static pytree, as losses are: functions of this
package are traced and compiled with them as they are.
"""

from jaxpar.functional.plain import apply, init, load, loss
from jaxpar.functional.sharded import init_state, make_eval_step, make_train_step
from jaxpar.objectives.losses import Loss, NextToken, Scores, loss_of

MAY_IMPORT = (
    "config",
    "runtime",
    "sharding",
    "model",
    "parallel",
    "objectives",
    "step",
    "inference",
)

__all__ = [
    "Loss",
    "NextToken",
    "Scores",
    "apply",
    "init",
    "init_state",
    "load",
    "loss",
    "loss_of",
    "make_eval_step",
    "make_train_step",
]
