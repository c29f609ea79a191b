"""llama_1b on a mixture whose sources count differently, with the loss of each as a metric."""

import jax.numpy as jnp

from jaxpar import ConfigError, Loss, load_config
from jaxpar.config import Source, replace


class SourceWeights(Loss):
    """Cross entropy, in which each token counts as its source says."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    reads = ("source",)

    def check(self, cfg, path):
        super().check(cfg, path)
        count = len(cfg.data.mixture)
        if not len(self.names) == len(self.weights) == count:
            rule, fix = (
                f"must have {count} names and weights, like data.mixture",
                "use --data.mixture data/web:0.7,data/code:0.3",
            )
            raise ConfigError(path, self, rule, fix)

    def __call__(self, scores, batch):
        weights = jnp.array(self.weights, jnp.float32)
        return scores.logsumexp() - scores.label(), weights[batch.source]

    def metrics(self, values, batch):
        of = dict(enumerate(self.names))
        return {f"loss_{name}": (values, batch.source == i) for i, name in of.items()}


def get_config():
    loss = SourceWeights(names=("web", "code"), weights=(1.0, 0.5))
    mixture = (Source("data/web", 0.7), Source("data/code", 0.3))
    own = {"train.loss": loss, "data.mixture": mixture, "run.dir": "runs/source_weights"}
    return replace(load_config("llama_1b"), **own)
