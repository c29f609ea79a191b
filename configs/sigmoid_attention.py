"""A model of your own in one file: sigmoid attention, and a focal loss. docs/extend/components.md.

python -m jaxpar.train configs/sigmoid_attention.py --run.cpu-devices 2 --parallel.tensor 2

Source:   Ramapuram et al. 2024 (2409.04431), sigmoid attention; Lin et al. 2017 (1708.02002).
"""

import jax
import jax.numpy as jnp

from jaxpar import Config, load_config, replace
from jaxpar.extend import Attention, Glu, Layer, Model, component, token_loss


@component
class Sigmoid(Attention):
    """Attention with a sigmoid for each score, in place of the softmax."""

    shift: float = -4.0
    """Added to scores: about the logarithm of one over the number of keys."""

    def heads(self, q, k, v, mask):
        k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], 2) for a in (k, v))
        scores = jnp.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5 + self.shift
        weights = jnp.where(mask.dense()[:, None], jax.nn.sigmoid(scores), 0)
        return jnp.einsum("bhts,bshk->bthk", weights, v)


@token_loss
def focal(scores, batch):
    """Weigh tokens that the model predicts well less."""
    logp = scores.log_prob()
    return -((1 - jnp.exp(logp)) ** 2) * logp


def get_config() -> Config:
    block = Layer("block", Sigmoid(num_heads=4, num_kv_heads=2, head_dim=32), Glu(384))
    model = Model(d_model=128, vocab_size=272, layers=[block] * 4)
    return replace(load_config("quickstart"), **{"model": model, "train.loss": focal})
