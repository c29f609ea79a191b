"""Multi-head latent attention (MLA).

Source:   DeepSeek-AI 2024 (2405.04434), section 2.1.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from jaxpar.components.attention import num_pairs, one_limit, over_sequence
from jaxpar.components.component import Mixer, NormForm
from jaxpar.components.costs import Heads, Widths
from jaxpar.components.dims import DimRule, SmallSizes, smaller
from jaxpar.components.model import Model
from jaxpar.components.ranges import Positive, Range, Size, Width
from jaxpar.components.rope import Rope
from jaxpar.components.weight import Weight, matrix, vector


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Mixer):
    """Attention whose keys and values are computed from a latent. The fields have the names of
    published configs."""

    num_heads: Size
    qk_nope_head_dim: Size
    """Dims of a query or key that are not rotated."""
    qk_rope_head_dim: Size
    """Dims that are, after the others. Their key is shared by all heads."""
    v_head_dim: Size
    """Width of a head's values."""
    kv_lora_rank: Width
    """Width of the latent of keys and values (DeepSeek: 512)."""
    q_lora_rank: Annotated[int | None, Range(1, 1 << 20)] = None
    """Width of the latent of queries (DeepSeek-V3: 1536). None: queries are projections of the
    residual stream (DeepSeek-V2-Lite)."""
    rope: Rope | None = Rope()  # noqa: RUF009
    window: Annotated[int | None, Range(2)] = None
    """Latest keys that a query attends to, its own included. None: all."""
    chunk: Annotated[int | None, Range(2)] = None
    """Attend within chunks of this many tokens of a document. None: no chunks."""
    norm_eps: Positive = 1e-6
    """Added to the mean square in the RMSNorms of both latents."""

    computed_by: ClassVar[str] = "jaxpar.model.latent_attention:LATENT_ATTENTION"
    plain_by: ClassVar[str] = "jaxpar.model.plain.attention:latent_attention"
    points: ClassVar[tuple[str, ...]] = ("queries",)
    uses_products: ClassVar[bool] = True
    recurrent: ClassVar[bool] = False

    @property
    def head_dim(self) -> int:
        """Width of a query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_dims(self) -> int:
        """Dims of each head that the rotary embedding turns."""
        return self.qk_rope_head_dim if self.rope else 0

    def weights(self, model: Model) -> dict[str, Weight]:
        # The matrices that make latents are complete on each tensor rank, since all heads read
        # them. Those that read latents are split by heads, and FSDP-sharded along the latent.
        D, H, K, V, R = (
            model.d_model,
            self.num_heads,
            self.head_dim,
            self.v_head_dim,
            self.q_lora_rank,
        )
        by_head, kv = ("heads", "head_dim"), self.kv_lora_rank

        def make(rank: int, target: str) -> Weight:
            return matrix((D, rank), ("embed", "rank"), adapter=target, inputs="own_tokens")

        def read(rank: int, width: int, target: str) -> Weight:
            return matrix((rank, H, width), ("latent", *by_head), columns=2, adapter=target)

        def gain(rank: int) -> Weight:
            return vector((rank,), ("norm",), model.norm.init)

        found = {
            "wkv_a": make(kv + self.qk_rope_head_dim, "kv_a_proj_with_mqa"),
            "kv_a_norm": gain(kv),
        }
        if R is None:
            axes = ("embed", *by_head)
            found["wq"] = matrix((D, H, K), axes, columns=2, adapter="q_proj")
        else:
            found |= {"wq_a": make(R, "q_a_proj"), "q_a_norm": gain(R)}
            found["wq_b"] = read(R, K, "q_b_proj")
        found["wkv_b"] = read(kv, self.qk_nope_head_dim + V, "kv_b_proj")
        found["wo"] = matrix((H, V, D), (*by_head, "embed"), to_stream=True, adapter="o_proj")
        return found

    def rules(self, model: Model, parallel: Any) -> Iterator[DimRule]:
        yield from super().rules(model, parallel)
        yield from over_sequence(self.num_heads, parallel)
        yield from one_limit(self.window, self.chunk)
        K, turned, V = self.head_dim, self.qk_rope_head_dim, self.v_head_dim
        rule = "must be even, since RoPE rotates pairs of elements"
        even = (("qk_rope_head_dim", turned + 1),)
        yield DimRule("qk_rope_head_dim", turned % 2 == 0, rule, even)
        rule = f"must be at most qk_nope_head_dim + qk_rope_head_dim = {K}"
        yield DimRule("v_head_dim", V <= K, rule, (("v_head_dim", K),))
        if self.rope is None:
            return
        if turned % 2 == 0:  # otherwise nobody knows the pairs
            for one in self.rope.rules(turned):
                yield one.below("rope")
        field, rule = "rope.fraction", "must be 1: qk_rope_head_dim says which dims are rotated"
        yield DimRule(field, self.rope.fraction == 1, rule, ((field, 1.0),))
        field, rule = "rope.scaling.query_beta", "must be 0: mscale_all_dim scales the scores"
        ok = self.rope.scaling is None or self.rope.scaling.query_beta == 0
        yield DimRule(field, ok, rule, ((field, 0.0),))

    def shrunk(self, sizes: SmallSizes) -> Self:
        small = smaller(self, sizes)
        return dataclasses.replace(
            small,
            rope=self.rope and self.rope.shrunk(small.qk_rope_head_dim, sizes),
            window=self.window and sizes.length(self.window, 4),
            chunk=self.chunk and sizes.length(self.chunk, 2),
        )

    # ---------------------------------------------------------------------------------- costs

    @property
    def norm_forms(self) -> tuple[NormForm, ...]:
        return ("written", "in_quantizer")

    @property
    def attention_heads(self) -> Heads:
        return Heads(self.num_heads, self.num_heads, self.head_dim, self.v_head_dim)

    @property
    def is_local(self) -> bool:
        return self.window is not None or self.chunk is not None

    def num_pairs(self, length: int) -> float:
        return num_pairs(length, self.window, self.chunk)

    def widths(self, model: Model, tensor: int) -> Widths:
        H, K, V, rotated = self.num_heads, self.head_dim, self.v_head_dim, self.qk_rope_head_dim
        query, value = H * K / tensor, H * V / tensor
        # Up-projections return keys without the rotated dims, which all heads share.
        kept = H * (K + V - rotated) / tensor + rotated
        latents = self.kv_lora_rank + rotated + (self.q_lora_rank or 0)
        return Widths(query, query, value, value, kept, latents)
