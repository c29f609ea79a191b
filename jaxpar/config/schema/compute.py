"""The section `compute`: how a model is computed."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """How the model is computed: dtypes, kernels and determinism."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Compute dtype. Master weights, the loss and gradient sums are always float32."""
    matmul_dtype: Literal["compute", "float8"] = "compute"
    """Dtype of the operands of a layer's matmuls. float8: e4m3, and e5m2 for gradients, with
    scales computed at every step."""
    matmul_precision: Literal["default", "tf32", "float32"] = "default"
    """Precision of matmuls of float32 operands on GPUs. default: JAX's, which is TF32 since Ampere.
    float32: without TF32. Other dtypes are not affected."""
    float8_scaling: Literal["tensor", "row"] = "tensor"
    """Granularity of float8 scales: per tensor, or per row (token). row computes weight gradients
    in the compute dtype."""
    logits_dtype: Literal["float32", "compute"] = "float32"
    """Output dtype of the head's matmul; the loss is computed in float32."""
    attention_backend: Literal["auto", "reference", "cudnn", "pallas_hopper", "triton"] = "auto"
    """Attention kernel. auto picks the fastest measured forward and backward, and logs the choice
    and the reason."""
    recurrent_backend: Literal["auto", "reference", "triton"] = "auto"
    """Kernels of recurrent layers. reference: plain JAX. auto: the fastest where it was measured,
    else reference (docs/code.md#recurrences)."""
    attention_deterministic: bool = False
    """Make the attention backward bitwise deterministic, at a cost in speed."""
