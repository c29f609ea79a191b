"""A model as a value: an embedding, a list of layers, and a head.

    block = Layer("layers", Attention(num_heads=32, num_kv_heads=8, head_dim=128), Glu(d_ff=14_336))
    Model(d_model=4096, vocab_size=128_256, layers=[block] * 32)

The list is the model: nothing else says what differs between layers.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from jaxpar.components.component import Component, FeedForward, Mixer, NormForm
from jaxpar.components.dims import DimRule, SmallSizes
from jaxpar.components.ranges import Natural, Positive, Range, Reals, Width
from jaxpar.components.weight import Init, Weight, vector


@dataclass(frozen=True, kw_only=True)
class Norm(Component):
    """The norm of the residual stream."""

    kind: Literal["rms", "layer"] = "rms"
    """rms: RMSNorm. layer: LayerNorm, with a bias (GPT-3)."""
    eps: Positive = 1e-5
    """Added to the mean square, or to the variance."""
    offset: bool = False
    """rms: multiply by 1 + scale, with scale initialized to 0 (Gemma)."""

    @property
    def init(self) -> Init:
        """Initial values of gains, such that the gain is 1."""
        return "zeros" if self.offset else "ones"


@dataclass(frozen=True, kw_only=True)
class MupConfig:
    """Maximal update parametrization: hyperparameters of a narrow base model hold for wide ones."""

    base_width: int = 256
    """d_model of the base model (Cerebras, Megatron: mup_base_hidden_size). Initial weights,
    learning rates and logits depend on d_model / base_width."""
    base_d_ff: int | None = None
    """d_ff of the base model. None: in the proportion of d_model."""
    base_head_dim: int | None = None
    """head_dim of the base model. Scores are multiplied by sqrt(base_head_dim) / head_dim in place
    of 1 / sqrt(head_dim). None: head_dim, so that wider models have more heads."""
    base_depth: int | None = None
    """num_layers of the base model: also multiply the outputs of attention and feed-forward by
    base_depth / num_layers (CompleteP). None: factors do not depend on the depth."""


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

    def __str__(self) -> str:
        terms = (str(term) for term in (self.mixer, self.feed_forward) if term)
        return f"{self.name}: {', '.join(terms)}"

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Models of a hundred layers are keys of caches that a plan reads thousands of times.
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self)).__hash__()

    def __getstate__(self) -> dict[str, Any]:  # hashes of texts differ between processes
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def weights(self, model: "Model") -> dict[str, Weight]:
        """Declare the weights of the layer, with its norms."""
        found: dict[str, Weight] = {}
        if self.mixer:
            found |= self.mixer.declared(model)
        found |= self._norms(model)
        if self.feed_forward and self.scaled:
            found["layer_scale"] = vector((), (), "ones")
        if self.feed_forward:
            found |= self.feed_forward.declared(model)
        return found

    def rules(self, model: "Model", parallel: Any) -> Iterator[DimRule]:
        """Yield the rules of both components, with the addresses of their fields."""
        for role in ("mixer", "feed_forward"):
            if term := getattr(self, role):
                for rule in term.rules(model, parallel):
                    yield rule.below(f"{self.name}.{role}")
        for rule in self._of_branches():
            yield rule.below(self.name)
        ok = self.norms == "before" or model.norm.kind == "rms"
        fixes = ((f"{self.name}.norms", "before"), ("norm", "rms"))
        yield DimRule(f"{self.name}.norms", ok, "must be before with norm = layer", fixes)

    def _of_branches(self) -> Iterator[DimRule]:
        ok = self.parallel != "one_norm" or self.norms != "after"
        fixes = (("parallel", "own_norms"), ("norms", "before"))
        yield DimRule("parallel", ok, "needs a norm before the branches, not norms = after", fixes)
        ok = not self.parallel or (self.mixer is not None and self.feed_forward is not None)
        rule = "needs a mixer and a feed-forward, of which one is None"
        yield DimRule("parallel", ok, rule, (("parallel", ""),))
        ok = not self.scaled or self.feed_forward is not None
        yield DimRule("scaled", ok, "needs a feed-forward, which is None", (("scaled", False),))

    def shrunk(self, sizes: SmallSizes) -> "Layer":
        """Return a small layer of the same kind, whose dims all meshes divide."""
        mixer = self.mixer and self.mixer.shrunk(sizes)
        feed_forward = self.feed_forward and self.feed_forward.shrunk(sizes)
        return dataclasses.replace(self, mixer=mixer, feed_forward=feed_forward)

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
    """The decoder, as its layers: docs/architectures.md."""

    d_model: Width
    """Width of the residual stream."""
    vocab_size: Annotated[int, Range(0, 1 << 26)]
    """Rows of the embedding; at least the tokenizer's vocabulary. 0: that of the training data,
    rounded up to a multiple of 128, and of what the mesh divides it by."""
    layers: tuple[Layer, ...]
    """Layers of components, by Python's list arithmetic: layers=[local] * 5 + [wide]. Layers with
    one name are equal, and their weights are stacked."""
    norm: Norm = Norm()
    """The norm of the residual stream, of each branch and at the end."""
    tie_embeddings: bool = False
    """Use the embedding as the output head."""
    max_positions: Natural = 0
    """Rows of a table of learned positions, which are added to the embeddings: the longest
    sequence (GPT-3: 2048). 0: none."""
    mtp_depth: Annotated[int, Range(0, 8)] = 0
    """Modules of multi-token prediction, whose layers are like the last one (DeepSeek-V3: 1).
    Module k predicts the token k places after the next one, in training and for drafts in
    jaxpar.sample; train.mtp_loss weighs their losses."""
    init_std: Positive = 0.02
    """Standard deviation of the initial weights; output projections use init_std /
    sqrt(2 * num_layers)."""
    embed_scale: bool = False
    """Multiply embeddings by sqrt(d_model) (Gemma)."""
    embedding_multiplier: Positive = 1.0
    """Multiply embeddings by this (Granite)."""
    residual_multiplier: Positive = 1.0
    """Multiply what mixers and feed-forwards add to the residual stream by this (Granite)."""
    logits_scaling: Positive = 1.0
    """Divide the logits by this (Granite)."""
    logits_softcap: Annotated[float | None, Reals(0, above=True)] = None
    """Cap the logits' magnitude: softcap * tanh(logits / softcap) (Gemma 2: 30). None: no cap."""
    mup: MupConfig | None = None
    """Maximal update parametrization (µP): the best learning rate does not depend on the width
    (docs/optimizers.md). Setting one of its fields enables it. None: the standard
    parametrization."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))

    def with_layers(self, layers: Sequence[Layer]) -> "Model":
        """Return the model with other layers."""
        return dataclasses.replace(self, layers=tuple(layers))

    def rules(self, parallel: Any) -> Iterator[DimRule]:
        """Yield the conditions of the fields of its layers on a mesh.

        Args:     parallel: the section of a config, resolved.
        """
        for layer in self.distinct:
            yield from layer.rules(self, parallel)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def width_multiplier(self) -> float:
        """µP's ratio of d_model to that of the base model; 1 without µP."""
        return 1.0 if self.mup is None else self.d_model / self.mup.base_width

    @property
    def base_depth(self) -> int:
        """The number of layers for which initial weights of outputs are."""
        return (self.mup and self.mup.base_depth) or self.num_layers

    @property
    def depth_multiplier(self) -> float:
        """µP's ratio of num_layers to that of the base model; 1 without `base_depth`."""
        return self.num_layers / self.base_depth

    @property
    def logits_divisor(self) -> float:
        """The number by which logits are divided."""
        return self.logits_scaling * self.width_multiplier

    @property
    def branch_factor(self) -> float:
        """The factor of what mixers and feed-forwards add to the residual stream."""
        return self.residual_multiplier / self.depth_multiplier

    @functools.cached_property
    def module_layer(self) -> Layer:
        """The layer of the modules of multi-token prediction: as the last one."""
        return dataclasses.replace(self.layers[-1], name=STACK_OF_MODULES)

    @property
    def recurrent(self) -> bool:
        """Whether some layers carry a state from token to token."""
        return any(layer.mixer is not None and layer.mixer.recurrent for layer in self.distinct)

    def places_of(self, name: str) -> tuple[int, ...]:
        """Return the indices of the layers with a name."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.name == name)

    @functools.cached_property
    def distinct(self) -> tuple[Layer, ...]:
        """The different layers, in the order of the first of each."""
        return tuple(dict.fromkeys(self.layers))

    @functools.cached_property
    def stacks(self) -> dict[str, tuple[Layer, ...]]:
        """The layers of each name, in the model's order. Their weights are stacked."""
        found: dict[str, list[Layer]] = {}
        for layer in self.layers:
            found.setdefault(layer.name, []).append(layer)
        return {name: tuple(layers) for name, layers in found.items()}

    @functools.cached_property
    def places(self) -> tuple[tuple[str, int], ...]:
        """The stack of each layer, and its index there."""
        at = {name: itertools.count() for name in self.stacks}
        return tuple((layer.name, next(at[layer.name])) for layer in self.layers)

    @functools.cached_property
    def repetition(self) -> "Repetition":
        """How the layers repeat."""
        return repetition(self.layers)

    @functools.cached_property
    def leading_stacks(self) -> tuple[str, ...]:
        """The names of which all layers come before those that repeat."""
        names = dict.fromkeys(layer.name for layer in self.layers[: self.repetition.start])
        later = {layer.name for layer in self.layers[self.repetition.start :]}
        return tuple(name for name in names if name not in later)

    @property
    def stage_stacks(self) -> tuple[str, ...]:
        """The other names: of the layers that a pipeline splits into stages."""
        return tuple(name for name in self.stacks if name not in self.leading_stacks)

    @functools.cached_property
    def norm_forms(self) -> frozenset[NormForm]:
        """The forms in which every component can read the norm of its input."""
        branches = (one for layer in self.layers for one in (layer.mixer, layer.feed_forward))
        return frozenset.intersection(*(frozenset(one.norm_forms) for one in branches if one))


#: The name of the layers of the modules of multi-token prediction.
STACK_OF_MODULES = "mtp"


class Repetition(NamedTuple):
    """How layers repeat: those from `start` on are repetitions of `period` layers."""

    start: int
    """Number of layers before them, such as the dense layers of DeepSeek-V3."""
    period: int


@functools.lru_cache(maxsize=512)
def repetition(layers: tuple[Layer, ...]) -> Repetition:
    """Return how layers repeat, the last time perhaps in part: with as few layers as possible
    before, and then as short a period. If none repeat, all are one period."""
    kinds = list(map(list(dict.fromkeys(layers)).index, layers))
    for start in range(len(kinds) - 1):
        rest = kinds[start:]
        for period in range(1, len(rest)):
            if rest[period:] == rest[:-period]:
                return Repetition(start, period)
    return Repetition(0, len(kinds))


def with_length(layers: tuple[Layer, ...], number: int) -> tuple[Layer, ...]:
    """Return layers with more or fewer repetitions, the last perhaps in part: `repetition`."""
    beginning, period = _parts(layers)
    return tuple(itertools.islice(itertools.chain(beginning, itertools.cycle(period)), number))


def in_words(layers: tuple[Layer, ...]) -> str:
    """Return layers by name: "dense_layers, layers x 58", or "(linear x 3, full) x 12"."""
    beginning, period = _parts(layers)
    times, rest = divmod(len(layers) - len(beginning), len(period))
    repeated = _runs(period * times)
    if "," in _runs(period) and times > 1:
        repeated = f"({_runs(period)}) x {times}"
    return ", ".join(filter(None, (_runs(beginning), repeated, _runs(period[:rest]))))


def _parts(layers: tuple[Layer, ...]) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    start, n = repetition(layers)
    return layers[:start], layers[start : start + n]


def _runs(layers: tuple[Layer, ...]) -> str:
    runs = ((name, len(list(of))) for name, of in itertools.groupby(x.name for x in layers))
    return ", ".join(f"{name} x {n}" if n > 1 else name for name, n in runs)
