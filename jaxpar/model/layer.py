"""One layer of the decoder: x + attention(norm(x)), then x + feed_forward(norm(x)).

Each term is a `Branch` with the steps normalize, receive, compute and send. Experts also dispatch
tokens before they compute, and collect them afterwards. This code is the same for every
`Execution`. Differences are in the types of the values: `Shards` of the sequence, whose parts are
`NormOutput`s, and weights that implement their own matmul. Shape letters are those of
`sharding/axes.py`; B counts a device's rows.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.component import Mixer, Term, named_in
from jaxpar.components.model import Layer
from jaxpar.components.weight import either_way
from jaxpar.config import Model
from jaxpar.execution.decisions import Execution
from jaxpar.execution.remat import named
from jaxpar.kernels.norm import NormOutput
from jaxpar.model import linear, lora, probes
from jaxpar.model.attention_context import AttentionContext
from jaxpar.model.norm import norm, norm_of_stream
from jaxpar.parallel.tensor.shards import Shards

type Weights = dict[str, Any]


def layer(x: jax.Array, w: Weights, context: AttentionContext, ex: Execution) -> jax.Array:
    """Apply one layer to the local shard of the residual stream.

    In a parallel block, x + attention(norm(x)) + feed_forward(norm(x)), all branches read x.

    Args:     x: [B, T/(sequence*tensor), D]. w: the layer's weights, complete over FSDP_AXES.
    Returns:  like x.
    Communication: that of each branch's `receive` and `send`, and the same in the backward.
    Source:   of the parallel block, Wang & Komatsuzaki 2021 (GPT-J); Black et al. 2022
              (2204.06745), GPT-NeoX, section 2.1.
    """
    branches = branches_with_weights(w, context.layer, ex.cfg.model)
    for together in [branches] if context.layer.parallel else [[one] for one in branches]:
        norms = []
        for branch, vectors, _ in together:
            with jax.named_scope(branch.name):
                x, h = branch.normalize(x, vectors, ex)
                x = probes.observe(branch.input_point, x, w, context, ex.cfg, seen=h.whole)
                norms.append(h)
        for h, (branch, vectors, matrices) in zip(norms, together, strict=True):
            with jax.named_scope(branch.name):
                h = branch.receive(h, matrices, branch.norm, context, ex)
                out = branch.function(h, matrices, context, ex)
                out = branch.normalized(branch.send(out), vectors, ex.cfg.model)
                out = probes.observe(branch.output_point, out, w, context, ex.cfg)
                x = branch.add(x, out, vectors, ex.cfg.model)
    return probes.observe("layer", x, w, context, ex.cfg)


def gathered(h: NormOutput, _: Weights, name: str, __: AttentionContext, ex: Execution) -> Shards:
    """Gather a norm's output over TENSOR: the `receive` of dense branches.

    Args:     name: remat name of the gathered value.
    """
    if ex.norm == "in_quantizer":  # unmaterialized; the quantizer names the rounded values
        return Shards((h,))
    shards = Shards.gather(h.operand, in_shards=ex.collective_matmul)
    return shards.each(lambda part: dataclasses.replace(h, operand=named(part, name)))


def _as_received(h: Any, *_: Any) -> Any:
    """Return what `receive` returned: the `dispatch` of branches without experts."""
    return h


def _as_computed(out: Any) -> Any:
    """Return what `compute` returned: the `collect` of branches without experts."""
    return out


@dataclass(frozen=True)
class Branch:
    """One term of the residual stream, as a function of the stream's norm.

    The steps are separate functions so that they can be scheduled differently: with row groups, the
    steps of one group that communicate overlap the `compute` of another (`row_groups.py`).
    """

    name: str
    norm: str
    compute: Callable[[Any, Weights, AttentionContext, Execution], Any]
    """Result of `dispatch` -> input of `collect`. No communication over TENSOR."""
    decode: Callable[..., Any]
    """As `Computation.decode`."""
    bias: str | None
    post_norm: str
    scale: str | None = None
    """Name of the number that multiplies the stream after the branch, if the layer has it."""
    saved_as: str | None = None
    """Remat name of the residual stream after the branch."""
    weights: frozenset[str] = frozenset()
    """Names of the weights that `receive` and `compute` use, without adapters."""
    points: tuple[str, ...] = ()
    """Points of probes and feeds within `compute` and `dispatch` (`probes.py`)."""
    role: str = "mixer"
    """"mixer" or "feed_forward": the points around it."""
    receive: Callable[[NormOutput, Weights, str, AttentionContext, Execution], Any] = gathered
    """The norm of this device's tokens -> the norm of the tokens that `compute` processes."""
    send: Callable[[Any], jax.Array] = Shards.reduce_scatter
    """Result of `collect` -> the sum for this device's tokens."""
    dispatch: Callable[[Any, Weights, AttentionContext, Execution], Any] = _as_received
    """Result of `receive` -> input of `compute`: communication over EXPERT, and TENSOR."""
    collect: Callable[[Any], Any] = _as_computed
    """Result of `compute` -> input of `send`: communication over EXPERT, and TENSOR."""

    @property
    def input_point(self) -> str:
        """The point at the branch's normalized input."""
        return f"{self.role}_input"

    @property
    def output_point(self) -> str:
        """The point at what the branch adds to the residual stream."""
        return f"{self.role}_output"

    def function(self, h: Any, w: Weights, context: AttentionContext, ex: Execution) -> Any:
        """Return the input of `send` from the result of `receive`."""
        return self.collect(self.compute(self.dispatch(h, w, context, ex), w, context, ex))

    def split(self, w: Weights) -> tuple[Weights, Weights]:
        """Select this branch's weights: (norms and bias, matrices with their adapters)."""
        around = {self.norm, f"{self.norm}_bias", self.bias, self.post_norm, self.scale}
        vectors = {name: a for name, a in w.items() if name in around}
        matrices = {name: a for name, a in w.items() if lora.matrix_of(name) in self.weights}
        return vectors, matrices | probes.at_points(w, self.points)

    def normalize(
        self, x: jax.Array, vectors: Weights, ex: Execution
    ) -> tuple[jax.Array, NormOutput]:
        """Return x and its norm. Use the returned x, so that one pass computes both gradients.

        In layers without norms of inputs (`Layer.norms`), the norm is x itself.
        """
        if self.norm not in vectors:
            return x, NormOutput(x)
        return norm_of_stream(x, vectors, self.norm, ex)

    def normalized(self, out: jax.Array, vectors: Weights, m: Model) -> jax.Array:
        """Return the branch's output with its bias, after a norm if the layer has one of it."""
        out = linear.add_bias(out, vectors.get(self.bias or ""))
        last = vectors.get(self.post_norm)
        return _added_by_norm(out) if last is None else norm(out, last, m)

    def add(self, x: jax.Array, out: jax.Array, vectors: Weights, m: Model) -> jax.Array:
        """Add the branch's `normalized` output to x.

        The last branch of a layer then scales the stream, with `Layer.scaled`.
        """
        x = x + (out if m.branch_factor == 1 else out * m.branch_factor)
        scale = vectors.get(self.scale or "")
        if scale is not None:  # in float32, for its gradient: a sum over all tokens
            x = (x.astype(jnp.float32) * scale).astype(x.dtype)
        return named(x, self.saved_as) if self.saved_as else x


@jax.custom_vjp
def _added_by_norm(out: jax.Array) -> jax.Array:
    """Keep a matmul's result separate, so that the pass of the next norm adds it to the stream.

    XLA would let the matmul add to x in place, and would first copy x for the backward."""
    return lax.optimization_barrier(out)


_added_by_norm.defvjp(lambda out: (_added_by_norm(out), None), lambda _, g: (g,))


@dataclass(frozen=True)
class Computation:
    """How a component computes: functions of one device's shards."""

    name: str
    """Scope of its operations in a profile."""
    compute: Callable[..., Any]
    decode: Callable[..., Any]
    """Of mixers: (norm, weights, context, held, `NewTokens`, config) -> (partial sum, held). Of
    feed-forwards: (norm, weights, context, execution) -> partial sum. Norms are of complete
    streams, partial sums those of a tensor rank."""
    held: Callable[..., Any] = lambda *_: None
    """(mixer, `HeldSize`) -> zeros for what it holds of a text."""
    held_specs: Any = None
    """How these arrays are split over a mesh."""
    receive: Callable[..., Any] = gathered
    dispatch: Callable[..., Any] = _as_received
    collect: Callable[..., Any] = _as_computed
    send: Callable[..., Any] = Shards.reduce_scatter


def of_whole(compute: Callable[..., Shards]) -> Callable[..., jax.Array]:
    """Return the `decode` of a feed-forward that communicates nothing before `send`."""

    def decode(h: NormOutput, w: Weights, context: AttentionContext, ex: Execution) -> jax.Array:
        (partial,) = compute(Shards((h,)), w, context, ex).parts
        return partial

    return decode


def computation(component: Term) -> Computation:
    """Return how a component computes: as its class or the nearest base, or by its own method."""
    for cls in type(component).__mro__:
        if "compute" in vars(cls):
            break
        if "computed_by" in vars(cls) and issubclass(cls, Term):
            return named_in(cls.computed_by)
    from jaxpar.model import own_components

    name = type(component).__name__.lower()
    if isinstance(component, Mixer):
        decode, held, specs = own_components.decoding(component)
        return Computation(name, own_components.mixer, decode, held, specs)
    compute = own_components.feed_forward
    return Computation(name, compute, of_whole(compute))


@functools.lru_cache(maxsize=1024)
def branches(layer: Layer, m: Model) -> tuple[Branch, ...]:
    """Return the branches of a layer, in order."""
    found = []
    if layer.mixer:
        found.append(_branch(layer.mixer, "attn", m, saved_as="attn_residual"))
    if layer.feed_forward:
        scale, norm = "layer_scale" if layer.scaled else None, "mlp_norm"
        norm = "attn_norm" if layer.parallel == "one_norm" else norm
        found.append(
            _branch(layer.feed_forward, "mlp", m, role="feed_forward", scale=scale, norm=norm)
        )
    return tuple(found)


def _branch(component: Term, prefix: str, m: Model, **fields: Any) -> Branch:
    declared = component.declared(m)
    arrays = either_way(declared)
    adapted = [name for name, w in declared.items() if w.adapter]
    of_branch = {
        "norm": f"{prefix}_norm",
        "post_norm": f"{prefix}_post_norm",
        "bias": component.output_bias or None,
        "weights": frozenset({*arrays, *adapted} - {component.output_bias}),
        "points": component.points,
    }
    how = computation(component)
    steps = ("name", "compute", "decode", "receive", "dispatch", "collect", "send")
    return Branch(**(of_branch | {step: getattr(how, step) for step in steps} | fields))


def branches_with_weights(
    w: Weights, layer: Layer, m: Model
) -> list[tuple[Branch, Weights, Weights]]:
    """Return each branch with its vectors and matrices (`Branch.split`).

    Raises:   ValueError for a weight that no component declares, which would have no effect.
    """
    found = [(branch, *branch.split(w)) for branch in branches(layer, m)]
    unused = set(w).difference(probes.at_points(w, probes.OF_LAYER))
    unused = unused.difference(*(own for _, *parts in found for own in parts))
    if unused:
        raise ValueError(f"no component of layer {layer.name} declares {sorted(unused)}")
    return found
