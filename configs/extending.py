"""The quickstart with a loss, a metric of layers and a change of the weights of its own."""

import jax.numpy as jnp

from jaxpar import Loss, ParamSpec, PostUpdate, Probe, load_config
from jaxpar.config import replace


class Focal(Loss):
    """Tokens that the model knows count less (Lin et al. 2017)."""

    gamma: float = 2.0

    def __call__(self, scores, batch):
        nll = scores.logsumexp() - scores.label()
        return (1 - jnp.exp(-nll)) ** self.gamma * nll


class StreamRms(Probe):
    """Root mean square of the residual stream after each layer."""

    reduce = "mean"

    def __call__(self, x):
        return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1))


class UnitRows(PostUpdate):
    """Scales rows of w_down to norm 1; keeps a running mean of the norms before."""

    def extra(self, params):
        w = params["layers"]["w_down"]
        return {"layers": {"norm": ParamSpec(shape=w.shape[:-1], axes=w.axes[:-1], init="ones")}}

    def __call__(self, params, before, extra, step):
        w = params["layers"]["w_down"]
        norm = jnp.linalg.norm(w, axis=-1)
        mean = 0.9 * extra["layers"]["norm"] + 0.1 * norm
        layers = params["layers"] | {"w_down": w / norm[..., None]}
        return params | {"layers": layers}, {"layers": {"norm": mean}}


def get_config():
    own = {"loss": Focal(gamma=1.5), "probes": (StreamRms(),), "post_updates": (UnitRows(),)}
    cfg = replace(load_config("quickstart"), **{"run.dir": "runs/extending"})
    return replace(cfg, **{f"train.{name}": value for name, value in own.items()})
