"""Mixers with a state that tokens carry on: Gated DeltaNet, Kimi Delta Attention and Mamba-2.

Key heads are split over the tensor axis, and with each the value heads that it serves. Matrices are
FSDP-sharded as those of attention. What is small is not. Decays start between those of a rate of 1
and of 16, and time steps between 0.001 and 0.1.

Source:   Dao & Gu 2024 (2405.21060), for the initial decays and time steps.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from jaxpar.components.component import Mixer, NormForm
from jaxpar.components.dims import DimRule, SmallSizes, smaller
from jaxpar.components.model import Model
from jaxpar.components.ranges import NotNegative, Positive, Range, Size
from jaxpar.components.weight import Weight, conv_kernel, matrix, vector

_BY_HEAD = ("heads", "head_dim")


@dataclass(frozen=True, kw_only=True)
class Recurrent(Mixer):
    """A recurrence after a short convolution over tokens. Its state is a matrix for each head."""

    uses_products: ClassVar[bool] = True

    norm_eps: Positive = 1e-5
    """Added to the mean square in the RMSNorm of the output, or of each head's."""
    conv_kernel_size: Annotated[int, Range(2, 1 << 10)] = 4
    """Tokens of the convolution, the latest included; at least 2."""
    chunk: Annotated[int, Range(1, 1 << 12)] = 64
    """Tokens that are processed at a time, in matmuls. It does not change what is computed."""

    def shrunk(self, sizes: SmallSizes) -> Self:
        # Norms divide by the length of what a recurrence returned, often near 0 in a small model:
        # with an eps of 1e-5, two orders of the same sums differ by 2e-5 on one device.
        return dataclasses.replace(
            smaller(self, sizes),
            chunk=min(self.chunk, 5),
            norm_eps=max(self.norm_eps, 1e-2),
            conv_kernel_size=self.conv_kernel_size,
        )

    # ---------------------------------------------------------------------------------- costs

    title: ClassVar[str]
    """Its name in the log."""
    is_delta_rule: ClassVar[bool] = True
    """Whether a write depends on what the state has at its key. Otherwise it is a state space."""
    has_kernels: ClassVar[bool] = True
    """Whether there are kernels of it. Otherwise plain JAX computes it on all devices."""

    @property
    def state(self) -> tuple[int, int, int]:
        """Heads with a state, and the width of its keys and of its values."""
        raise NotImplementedError

    @property
    def chunk_products(self) -> float:
        """Products of the keys of a chunk, for each head: with keys and with queries."""
        return 2.0

    @property
    def norm_forms(self) -> tuple[NormForm, ...]:
        return ("written", "in_quantizer", "deferred_scale")

    def model_flops(self) -> float:
        """A delta rule reads its state [K, V] twice and writes it once: 6 K V per head, and as much
        again twice in the backward. A state space reads it once."""
        return (18 if self.is_delta_rule else 12) * math.prod(self.state)

    def token_flops(self, tensor: int) -> float:
        """Products within a chunk, and with the state."""
        heads, K, V = self.state
        solved = K + V if self.is_delta_rule else 0
        within = self.chunk * (2 * self.chunk_products * K + solved + 2 * V)
        return heads / tensor * (within + (6 if solved else 4) * K * V)

    def backward_bytes(self, tensor: int, *, by_kernels: bool) -> float:
        """Inputs, the matrices of each chunk and the states between chunks, in float32. With
        kernels, in 16 bits: the matrices of each chunk, states and their gradients, and what tokens
        write and read. These are estimates."""
        heads, K, V = self.state
        C, products = self.chunk, self.chunk_products
        if by_kernels:
            matrices = 2 if self.is_delta_rule else 1
            return 2 * heads / tensor * (matrices * C + 2 * K * V / C + 3 * V)
        inputs = 3 * products * K + 4 * V + self._decay_values()
        return 4 * heads / tensor * (inputs + 2 * (1 + products) * C + K * V / C)

    def _decay_values(self) -> int:
        """Values per token and head of decays, their sums and factors, if channels have some."""
        return 0


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(Recurrent):
    """The gated delta rule, with a decay for each head (Yang et al. 2024, 2412.06464)."""

    computed_by: ClassVar[str] = "jaxpar.model.recurrent.delta_net:DELTA_NET"
    plain_by: ClassVar[str] = "jaxpar.model.plain.recurrent:delta_net"

    num_key_heads: Size
    """Heads of queries and keys. They serve equal numbers of value heads."""
    num_value_heads: Size
    """Heads of values, each with a state [key_head_dim, value_head_dim]."""
    key_head_dim: Size
    value_head_dim: Size
    allow_neg_eigval: bool = False
    """Rates of a write of up to 2 instead of 1, so that a state may change its sign along a key
    (OLMo Hybrid)."""

    inputs: ClassVar[tuple[str, ...]] = tuple(f"delta_{n}" for n in "qkvzba")
    """Projections of the input: queries, keys, values, gates, rates and time steps."""
    title: ClassVar[str] = "Gated DeltaNet"

    @property
    def state(self) -> tuple[int, int, int]:
        return self.num_value_heads, self.key_head_dim, self.value_head_dim

    def weights(self, model: Model) -> dict[str, Weight]:
        D, H, G = model.d_model, self.num_value_heads, self.num_key_heads
        K, V, served = self.key_head_dim, self.value_head_dim, H // G
        fused = {"into": "delta_in", "adapter": "in_proj", "columns": 2}
        found: dict[str, Weight] = {}
        for n, size in zip(
            self.inputs, (K, K, served * V, served * V, served, served), strict=True
        ):
            found[n] = matrix((D, G, size), ("embed", *_BY_HEAD), **fused)
        for n, size in {"q": K, "k": K, "v": served * V}.items():
            shape = (G, size, self.conv_kernel_size)
            found[f"delta_conv_{n}"] = conv_kernel(shape, "delta_conv")
        found["delta_a_log"] = vector((H,), ("heads",), "decay_rate")
        found["delta_dt_bias"] = vector((H,), ("heads",), "time_step")
        found["delta_norm"] = vector((V,), ("head_dim",), "ones")
        axes = (*_BY_HEAD, "embed")
        found["delta_out"] = matrix((H, V, D), axes, to_stream=True, adapter="out_proj")
        return found

    def rules(self, model: Model, parallel: Any) -> Iterator[DimRule]:
        yield from super().rules(model, parallel)
        H, G = self.num_value_heads, self.num_key_heads
        rule = f"must be divisible by num_key_heads = {G}"
        yield DimRule("num_value_heads", H % G == 0, rule, (("num_value_heads", -(-H // G) * G),))


@dataclass(frozen=True, kw_only=True)
class KimiDeltaAttention(Recurrent):
    """A delta rule with a decay for each channel of a key (Kimi Team 2025, 2510.26692)."""

    computed_by: ClassVar[str] = "jaxpar.model.recurrent.kimi_delta:KIMI_DELTA"
    plain_by: ClassVar[str] = "jaxpar.model.plain.recurrent:kimi_delta"

    num_heads: Size
    key_head_dim: Size
    value_head_dim: Size
    """Width of a value, and of the two latents of decays and output gates."""

    inputs: ClassVar[tuple[str, ...]] = tuple(f"kda_{n}" for n in "qkv")
    """Projections of the input: queries, keys and values."""
    gates: ClassVar[tuple[str, ...]] = ("kda_f_a", "kda_g_a", "kda_b")
    """And of the input too: latents of decays and of output gates, and rates."""
    title: ClassVar[str] = "Kimi Delta Attention"
    has_kernels: ClassVar[bool] = False

    @property
    def state(self) -> tuple[int, int, int]:
        return self.num_heads, self.key_head_dim, self.value_head_dim

    def _decay_values(self) -> int:
        return 5 * self.key_head_dim

    def weights(self, model: Model) -> dict[str, Weight]:
        # Decays and output gates are products of two matrices each. The first, to a latent, is
        # complete on each tensor rank. The second is FSDP-sharded along the latent.
        D, H, K, V = model.d_model, self.num_heads, self.key_head_dim, self.value_head_dim
        sizes, width = {"q": K, "k": K, "v": V}, self.conv_kernel_size
        gates = {"into": "kda_gates", "float8": False, "adapter": "in_proj"}
        after_latent = {"columns": 2, "float8": False, "inputs": "sequence"}
        fused = {"columns": 2, "into": "kda_in", "adapter": "in_proj"}
        found: dict[str, Weight] = {}
        for n, size in zip(self.inputs, sizes.values(), strict=True):
            found[n] = matrix((D, H, size), ("embed", *_BY_HEAD), **fused)
        *latents, rate = self.gates
        for n in latents:
            found[n] = matrix((D, V), ("embed", "rank"), **gates)
        found[rate] = matrix((D, H), ("embed", "heads"), **gates)
        for n, size in sizes.items():
            found[f"kda_conv_{n}"] = conv_kernel((H, size, width), "kda_conv")
        for n, size in {"f": K, "g": V}.items():
            found[f"kda_{n}_b"] = matrix((V, H, size), ("latent", *_BY_HEAD), **after_latent)
        found["kda_a_log"] = vector((H,), ("heads",), "decay_rate")
        found["kda_dt_bias"] = vector((H, K), _BY_HEAD, "time_step")
        found["kda_norm"] = vector((V,), ("head_dim",), "ones")
        axes = (*_BY_HEAD, "embed")
        found["kda_out"] = matrix((H, V, D), axes, to_stream=True, adapter="out_proj")
        return found


@dataclass(frozen=True, kw_only=True)
class Mamba2(Recurrent):
    """A state space model. Published code calls values x, keys B and queries C."""

    computed_by: ClassVar[str] = "jaxpar.model.recurrent.mamba:MAMBA"
    plain_by: ClassVar[str] = "jaxpar.model.plain.recurrent:mamba"

    num_heads: Size
    """Heads, each with a state [state_size, head_dim]."""
    head_dim: Size
    """Width of a value."""
    state_size: Size
    """Width of a query or key."""
    num_groups: Size = 1
    """Groups of heads, which share queries and keys, and the norm of the output."""
    min_step: NotNegative = 0.0
    """The least time step (Nemotron-H: 0.001)."""

    inputs: ClassVar[tuple[str, ...]] = tuple(f"mamba_{n}" for n in ("z", "x", "b", "c", "dt"))
    """Projections of the input: gates, values, keys, queries and time steps."""
    title: ClassVar[str] = "Mamba-2"
    is_delta_rule: ClassVar[bool] = False

    @property
    def state(self) -> tuple[int, int, int]:
        return self.num_heads, self.state_size, self.head_dim

    @property
    def chunk_products(self) -> float:
        """Groups share them."""
        return self.num_groups / self.num_heads

    def weights(self, model: Model) -> dict[str, Weight]:
        D, H, P, G, N = (
            model.d_model,
            self.num_heads,
            self.head_dim,
            self.num_groups,
            self.state_size,
        )
        wide = {"z": (H, P), "x": (H, P), "b": (G, N), "c": (G, N)}
        fused, (*by_head, step) = {"into": "mamba_in", "adapter": "in_proj"}, self.inputs
        found: dict[str, Weight] = {}
        for n, shape in zip(by_head, wide.values(), strict=True):
            found[n] = matrix((D, *shape), ("embed", *_BY_HEAD), columns=2, **fused)
        found[step] = matrix((D, H), ("embed", "heads"), **fused)
        for n in "xbc":
            kernel = conv_kernel((*wide[n], self.conv_kernel_size), "mamba_conv")
            found[f"mamba_conv_{n}"] = kernel
            bias = vector(wide[n], _BY_HEAD, into="mamba_conv_bias", rank=1)
            found[f"mamba_bias_{n}"] = bias
        found["mamba_a_log"] = vector((H,), ("heads",), "decay_rate")
        found["mamba_dt_bias"] = vector((H,), ("heads",), "time_step")
        found["mamba_d"] = vector((H,), ("heads",), "ones")
        found["mamba_norm"] = vector((H, P), _BY_HEAD, "ones", rank=1)
        axes = (*_BY_HEAD, "embed")
        found["mamba_out"] = matrix((H, P, D), axes, to_stream=True, adapter="out_proj")
        return found

    def rules(self, model: Model, parallel: Any) -> Iterator[DimRule]:
        yield from super().rules(model, parallel)
        H, G = self.num_heads, self.num_groups
        rule = f"must be divisible by num_groups = {G}"
        yield DimRule("num_heads", H % G == 0, rule, (("num_heads", -(-H // G) * G),))
