"""A model as a value: an embedding, a list of layers, and a head.

    block = Layer("layers", Attention(num_heads=32, num_kv_heads=8, head_dim=128), Glu(d_ff=14_336))
    Model(d_model=4096, vocab_size=128_256, layers=[block] * 32)

The list is the model: nothing else says what differs between layers.
"""

import functools
from dataclasses import dataclass
from typing import Literal

from jaxpar.components.component import FeedForward, Mixer, NormForm
from jaxpar.components.weight import Init, Weight, vector


@dataclass(frozen=True, kw_only=True)
class Norm:
    """The norm of the residual stream."""

    kind: Literal["rms", "layer"] = "rms"
    """rms: RMSNorm. layer: LayerNorm, with a bias (GPT-3)."""
    eps: float = 1e-5
    """Added to the mean square, or to the variance."""
    offset: bool = False
    """Multiply by 1 + scale, with scale initialized to 0 (Gemma)."""

    @property
    def init(self) -> Init:
        """Initial values of gains, such that the gain is 1."""
        return "zeros" if self.offset else "ones"


@dataclass(frozen=True)
class Layer:
    """x + mixer(norm(x)), then x + feed_forward(norm(x)). Either may be None (Nemotron-H)."""

    name: str
    """Groups the weights of the layers with this name, and addresses them."""
    mixer: Mixer | None
    feed_forward: FeedForward | None
    norms: Literal["before", "after", "around"] = "before"
    """Where each branch has its norms: before it, after it (OLMo 2), or both (Gemma)."""
    parallel: Literal["", "own_norms", "one_norm"] = ""
    """Both branches read the same stream (GPT-NeoX); with one norm for both (GPT-J)."""
    scaled: bool = False
    """Multiply the stream after the layer by a trained number (Gemma 4)."""

    def weights(self, model: "Model") -> dict[str, Weight]:
        """Declare the weights of the layer, with its norms."""
        found: dict[str, Weight] = {}
        if self.mixer:
            found |= self.mixer.weights(model)
        found |= self._norms(model)
        if self.feed_forward and self.scaled:
            found["layer_scale"] = vector((), (), "ones")
        if self.feed_forward:
            found |= self.feed_forward.weights(model)
        return found

    def has_point(self, point: str) -> bool:
        """Return whether probes and feeds find a point in the layer (`model/probes.py`)."""
        branches = {"mixer": self.mixer, "feed_forward": self.feed_forward}
        inside = [name for branch in branches.values() if branch for name in branch.points]
        around = [
            f"{name}_{at}" for name in branches if branches[name] for at in ("input", "output")
        ]
        return point in ("layer", *around, *inside)

    def _norms(self, model: "Model") -> dict[str, Weight]:
        gain = vector((model.d_model,), ("norm",), model.norm.init)
        branches = ["attn"] * bool(self.mixer) + ["mlp"] * bool(self.feed_forward)
        before = [n for n in branches if n == "attn" or self.parallel != "one_norm"]
        found: dict[str, Weight] = {}
        if self.norms != "after":
            found |= {f"{n}_norm": gain for n in before}
            if model.norm.kind == "layer":
                bias = vector((model.d_model,), ("norm",))
                found |= {f"{n}_norm_bias": bias for n in before}
        if self.norms != "before":
            found |= {f"{n}_post_norm": gain for n in branches}
        return found


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder. Nothing here says how it is executed."""

    d_model: int
    """Width of the residual stream."""
    vocab_size: int
    layers: tuple[Layer, ...]
    """Any sequence of layers, by Python's own list arithmetic."""
    norm: Norm = Norm()
    tie_embeddings: bool = False
    """Use the embedding as the output head."""
    max_positions: int = 0
    """Rows of a table of learned positions (GPT-3: 2048). 0: none."""
    mtp_depth: int = 0
    """Modules of multi-token prediction, whose layers are like the last one (DeepSeek-V3: 1)."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; output projections use init_std /
    sqrt(2 * num_layers)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))

    @functools.cached_property
    def stacks(self) -> dict[str, tuple[Layer, ...]]:
        """The layers of each name, in the model's order. Their weights are stacked."""
        found: dict[str, list[Layer]] = {}
        for layer in self.layers:
            found.setdefault(layer.name, []).append(layer)
        return {name: tuple(layers) for name, layers in found.items()}

    @functools.cached_property
    def norm_forms(self) -> frozenset[NormForm]:
        """The forms in which every component can read the norm of its input."""
        branches = (one for layer in self.layers for one in (layer.mixer, layer.feed_forward))
        return frozenset.intersection(*(frozenset(one.norm_forms) for one in branches if one))
