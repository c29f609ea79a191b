"""Sizes of a model that its layers have: what µP and reports compare with another model's."""

from jaxpar.components.experts import Experts
from jaxpar.components.feed_forward import Glu
from jaxpar.components.model import Model


def d_ff(model: Model) -> int:
    """Return the width of the first experts of a model, or feed-forward; of none, `d_model`."""
    forwards = [layer.feed_forward for layer in model.distinct]
    widths = [of.expert.d_ff for of in forwards if isinstance(of, Experts)]
    widths += [of.d_ff for of in forwards if isinstance(of, Glu)]
    return widths[0] if widths else model.d_model


def head_dim(model: Model) -> int:
    """Return the width of a key of the first softmax attention of a model; without, `d_model`."""
    heads = (layer.mixer and layer.mixer.attention_heads for layer in model.distinct)
    return next((of.key_dim for of in heads if of), model.d_model)
