"""Softmax attention with grouped queries."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from jaxpar.components.component import Component, Mixer, NormForm
from jaxpar.components.costs import Heads, Widths
from jaxpar.components.dims import DimRule, SmallSizes, smaller
from jaxpar.components.model import Model
from jaxpar.components.ranges import Count, NotNegative, Range, Reals, Size
from jaxpar.components.rope import Rope
from jaxpar.components.weight import Weight, matrix, vector


@dataclass(frozen=True, kw_only=True)
class QkNorm(Component):
    """RMSNorm over queries and keys."""

    over: Literal["head", "all"] = "head"
    """head: each head, with one gain for all heads (Qwen3). all: the heads of a token together,
    each with its own gain (OLMoE)."""
    gain: bool = True
    """False: none, and only in layers with a rotary embedding (Llama 4)."""


@dataclass(frozen=True, kw_only=True)
class QueryGrowth(Component):
    """Queries times 1 + beta * log(1 + floor((position + 1) / span)) (Llama 4)."""

    beta: NotNegative
    span: Count = 8192


@dataclass(frozen=True, kw_only=True)
class Attention(Mixer):
    """Softmax attention: num_heads queries share num_kv_heads keys and values."""

    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    rope: Rope | None = Rope()  # noqa: RUF009
    """None: no rotary embedding (NoPE)."""
    window: Annotated[int | None, Range(2)] = None
    """Latest keys that a query attends to, its own included. None: all."""
    chunk: Annotated[int | None, Range(2)] = None
    """Attend within chunks of this many tokens of a document (Llama 4). None: no chunks."""
    bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    out_bias: bool = False
    """Bias on the output projection."""
    qk_norm: QkNorm | None = None
    value_norm: bool = False
    """RMSNorm without a gain over each head's values (Gemma 4)."""
    gate: bool = False
    """Multiply the heads' outputs by the sigmoid of a projection of the input (Qwen3-Next)."""
    sinks: bool = False
    """A learned score per head in the softmax's denominator, without a value (gpt-oss)."""
    keys_as_values: bool = False
    """Values are the projected keys, before their norm and rotary embedding (Gemma 4)."""
    scale: Annotated[float | None, Reals(0, above=True)] = None
    """Factor of the scores, in place of 1 / sqrt(head_dim) (Granite)."""
    scale_dim: Annotated[int | None, Range(1)] = None
    """Divide the scores by the square root of this, in place of head_dim (Gemma)."""
    softcap: Annotated[float | None, Reals(0, above=True)] = None
    """Cap the magnitude of the scores (Gemma 2: 50)."""
    growth: QueryGrowth | None = None
    """Of queries, in layers without a rotary embedding."""

    output_bias: ClassVar[str] = "bo"
    computed_by: ClassVar[str] = "jaxpar.model.attention:ATTENTION"
    plain_by: ClassVar[str] = "jaxpar.model.plain.attention:attention"
    points: ClassVar[tuple[str, ...]] = ("queries",)
    uses_products: ClassVar[bool] = True
    recurrent: ClassVar[bool] = False

    def heads(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        """Attend. A subclass may define another function of queries and keys.

        Args:     q: [B, T, H, K], this tensor rank's heads, after their norm and RoPE. k, v:
                  [B, S, G, K], all tokens that a query may see. mask: `AttentionMask`; its
                  `dense()` is bool [B, T, S].
        Returns:  [B, T, H, K], in q's dtype.
        """
        raise NotImplementedError

    def attending(self, q: Any, k: Any, v: Any, w: Any) -> tuple[Any, Any, Any]:
        """Return queries, keys and values as they attend. A field or a weight may change them here.

        Training on meshes, generation, the plain form and PyTorch call it. With operators and
        indices alone it is right for all of them. Their dtype is kept: some weights are float32.

        Args:
            q: [B, T, H, K], this tensor rank's heads, after their norm and RoPE.
            k: [B, T, G, K].
            v: as k.
            w: its weights of the layer, by name.
        """
        return q, k, v

    @property
    def rotary_dims(self) -> int:
        """Dims of each head that the rotary embedding turns."""
        return int(self.head_dim * self.rope.fraction) if self.rope else 0

    def weights(self, model: Model) -> dict[str, Weight]:
        D, H, G, K = model.d_model, self.num_heads, self.num_kv_heads, self.head_dim
        of_q, of_kv = ("heads", "head_dim"), ("kv_heads", "head_dim")
        into = "wqk" if self.keys_as_values else "wqkv"

        def projection(heads: int, axes: tuple[str, ...], target: str) -> Weight:
            shape = (D, heads, K)
            return matrix(shape, ("embed", *axes), columns=2, into=into, adapter=target)

        found = {"wq": projection(H, of_q, "q_proj"), "wk": projection(G, of_kv, "k_proj")}
        if not self.keys_as_values:
            found["wv"] = projection(G, of_kv, "v_proj")
        if self.gate:
            found["w_attn_gate"] = matrix((D, H, K), ("embed", *of_q), columns=2)
        found["wo"] = matrix((H, K, D), (*of_q, "embed"), to_stream=True, adapter="o_proj")
        if self.qk_norm and self.qk_norm.gain:
            for name, heads, by in (("q_norm", H, of_q), ("k_norm", G, of_kv)):
                all_heads = self.qk_norm.over == "all"
                shape, axes = ((heads, K), by) if all_heads else ((K,), by[1:])
                found[name] = vector(shape, axes, model.norm.init)
        if self.sinks:
            found["sinks"] = vector((H,), ("heads",), "normal")
        if self.bias:
            for name, heads, by in (("bq", H, of_q), ("bk", G, of_kv), ("bv", G, of_kv)):
                found[name] = vector((heads, K), by, into="bqkv", rank=1)
        if self.out_bias:
            found["bo"] = vector((D,), ("norm",))
        return found

    def rules(self, model: Model, parallel: Any) -> Iterator[DimRule]:
        yield from super().rules(model, parallel)
        H, G = self.num_heads, self.num_kv_heads
        rule = f"must be divisible by num_kv_heads = {G}"
        fixes = (("num_heads", -(-H // G) * G), ("num_kv_heads", math.gcd(H, G)))
        yield DimRule("num_heads", H % G == 0, rule, fixes)
        yield from over_sequence(H, parallel)
        yield from one_limit(self.window, self.chunk)
        yield from self._of_scores()
        if self.rope:
            yield from self._of_rope(self.rope)

    def _of_scores(self) -> Iterator[DimRule]:
        ok = self.scale is None or self.scale_dim is None
        rule = f"replaces the factor of scores that scale_dim = {self.scale_dim} gives"
        yield DimRule("scale", ok, rule, (("scale", None), ("scale_dim", None)))
        norm = self.qk_norm or QkNorm()
        rule = "needs a gain: heads that are normalized together have one each"
        fixes = (("qk_norm.over", "head"), ("qk_norm.gain", True))
        yield DimRule("qk_norm.over", norm.gain or norm.over == "head", rule, fixes)
        ok = not (self.keys_as_values and self.bias)
        rule = "is not supported with keys_as_values: values have no projection"
        yield DimRule("bias", ok, rule, (("bias", False), ("keys_as_values", False)))
        ok = self.growth is None or self.rope is None
        rule = "is for layers without a rotary embedding, but rope is set"
        yield DimRule("growth", ok, rule, (("growth", None), ("rope", None)))

    def _of_rope(self, rope: Rope) -> Iterator[DimRule]:
        K, turned = self.head_dim, self.rotary_dims
        rule = "must be even, since RoPE rotates pairs of elements"
        yield DimRule("head_dim", K % 2 == 0, rule, (("head_dim", K + 1),))
        rule = f"rotates {turned} of head_dim = {K} dims, which must be even and at least 2"
        ok = K % 2 == 1 or (turned >= 2 and turned % 2 == 0)
        yield DimRule("rope.fraction", ok, rule, (("rope.fraction", 1.0),))
        if turned >= 2 and turned % 2 == 0 and K % 2 == 0:  # otherwise nobody knows the pairs
            for one in rope.rules(turned):
                yield one.below("rope")
        field, rule = "rope.scaling.mscale_all_dim", "needs latent attention"
        ok = rope.scaling is None or rope.scaling.mscale_all_dim == 0
        yield DimRule(field, ok, rule, ((field, 0.0),))

    def shrunk(self, sizes: SmallSizes) -> Self:
        # A multiple of 8, of which all published fractions are even.
        small = dataclasses.replace(smaller(self, sizes), head_dim=sizes.width(self.head_dim, 8))
        rope = self.rope and self.rope.shrunk(small.head_dim, sizes)
        scale, scale_dim = self.scale, self.scale_dim
        if scale is not None:
            scale *= self.head_dim / small.head_dim
            # Normalized queries and keys have products of sqrt(head_dim), and trained gains less.
            # In front of a softmax, large scores amplify rounding.
            scale = min(scale, small.head_dim**-0.5) if self.qk_norm else scale
        if scale_dim is not None:
            scale_dim = max(round(scale_dim * small.head_dim / self.head_dim), 1)
        growth = self.growth
        if growth is not None:
            growth = dataclasses.replace(growth, span=sizes.length(growth.span))
        return dataclasses.replace(
            small,
            rope=rope,
            window=self.window and sizes.length(self.window, 4),
            chunk=self.chunk and sizes.length(self.chunk, 2),
            scale=scale,
            scale_dim=scale_dim,
            growth=growth,
        )

    # ---------------------------------------------------------------------------------- costs

    @property
    def norm_forms(self) -> tuple[NormForm, ...]:
        both: tuple[NormForm, ...] = ("written", "in_quantizer")
        return both if self.bias else (*both, "deferred_scale")

    @property
    def has_own_heads(self) -> bool:
        """Whether a subclass defines another function of queries and keys."""
        return "heads" in self.own_methods

    @property
    def own_methods(self) -> tuple[str, ...]:
        """The parts of the computation that a subclass defines."""
        names = ("heads", "attending")
        return tuple(n for n in names if getattr(type(self), n) is not getattr(Attention, n))

    @property
    def attention_heads(self) -> Heads:
        H, G, K = self.num_heads, self.num_kv_heads, self.head_dim
        return Heads(H, G, K, K, self.softcap, self.has_own_heads)

    @property
    def is_local(self) -> bool:
        return self.window is not None or self.chunk is not None

    @property
    def output_passes(self) -> int:
        return 2 * self.sinks

    def num_pairs(self, length: int) -> float:
        return num_pairs(length, self.window, self.chunk)

    def widths(self, model: Model, tensor: int) -> Widths:
        query, key = (n * self.head_dim / tensor for n in (self.num_heads, self.num_kv_heads))
        return Widths(query, key, key, query, 2 * key, 0.0)


def over_sequence(num_heads: int, parallel: Any) -> Iterator[DimRule]:
    """Yield the rule of a mesh that shards heads in place of the sequence."""
    if parallel.context == "ulysses" and parallel.sequence > 1:
        ways = parallel.tensor * parallel.sequence
        rule = f"must be divisible by parallel.tensor * parallel.sequence = {ways}, for ulysses"
        more = -(-num_heads // ways) * ways
        yield DimRule("num_heads", num_heads % ways == 0, rule, (("num_heads", more),))


def one_limit(window: int | None, chunk: int | None) -> Iterator[DimRule]:
    """Yield the rule that queries attend within a window or within chunks."""
    rule = f"replaces a sliding window, but window is {window}"
    ok = window is None or chunk is None
    yield DimRule("chunk", ok, rule, (("chunk", None), ("window", None)))


def num_pairs(length: int, window: int | None, chunk: int | None) -> float:
    """Return the causal query-key pairs of a sequence within a window, or within chunks."""
    if chunk is not None:
        return length * min(chunk, length) / 2
    if window is None or window >= length:
        return length * length / 2
    return window * (length - window / 2)
