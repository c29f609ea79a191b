"""The section of the configuration that says what the model is (`schema.py`)."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of the slow rotary frequencies."""

    factor: float = 8.0
    """How many times the context grows."""
    low_freq_factor: float = 1.0
    """Wavelengths above original_max_position / low_freq_factor are divided by factor."""
    high_freq_factor: float = 4.0
    """Wavelengths below original_max_position / high_freq_factor stay as they are."""
    original_max_position: int = 8192
    """Context length that the model was first trained with."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The decoder: Llama 3's by default; Qwen3, Mistral, Mixtral, Gemma 3 are other values."""

    num_layers: int = 4
    """Transformer blocks."""
    d_model: int = 256
    """Width of the residual stream."""
    num_heads: int = 8
    """Query heads."""
    num_kv_heads: int = 4
    """Key and value heads (grouped-query attention when fewer than num_heads)."""
    head_dim: int = 32
    """Width of one head; num_heads * head_dim need not be d_model."""
    d_ff: int = 704
    """Width of the feed-forward; with experts, of each."""
    num_experts: int = 0
    """Experts of each feed-forward (Mixtral, Qwen3-MoE). 0: one dense feed-forward."""
    experts_per_token: int = 2
    """Experts that a token goes through: those that the router finds likeliest."""
    normalize_experts: bool = True
    """A token's weights add up to 1; it needs two experts. False: the router's probabilities."""
    vocab_size: int = 512
    """Rows of the embedding. Must cover the tokenizer's vocabulary."""
    rope_theta: float = 500_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1 frequency scaling; setting one of its fields turns it on. None: plain RoPE."""
    norm_eps: float = 1e-5
    """Added to the mean square inside RMSNorm."""
    tie_embeddings: bool = False
    """Use the embedding as the output head."""
    qk_norm: bool = False
    """RMSNorm over each query and key head before RoPE (Qwen3)."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    out_bias: bool = False
    """Bias on the attention output projection."""
    mlp_bias: bool = False
    """Biases on the three feed-forward projections."""
    sliding_window: int | None = None
    """Each query sees this many latest keys, itself included (Mistral): 2 or more. None: all."""
    global_every: int = 0
    """Every so many layers, one has no sliding window (Gemma 3: 6). 0: all layers are alike."""
    local_rope_theta: float | None = None
    """Base of the rotary frequencies in layers with the window. None: rope_theta, as elsewhere."""
    activation: Literal["silu", "gelu"] = "silu"
    """Of the feed-forward's gate. gelu: in its tanh form, of GeGLU (Gemma)."""
    post_norms: bool = False
    """RMSNorm also after attention and feed-forward, before they are added (Gemma)."""
    norm_offset: bool = False
    """RMSNorm multiplies by 1 + its parameter, which starts at 0 (Gemma)."""
    embed_scale: bool = False
    """Multiply embeddings by sqrt(d_model) (Gemma)."""
    query_scale_dim: int | None = None
    """Attention scores are divided by its root (Gemma). None: by that of head_dim."""
    init_std: float = 0.02
    """Standard deviation of initial weights; outputs of a block get init_std / sqrt(2 * layers)."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Compute dtype. Master weights, loss and gradient sums are always float32."""
    matmul_dtype: Literal["compute", "float8"] = "compute"
    """Operands of a layer's projections. float8: e4m3, gradients e5m2, scaled anew every step."""
    float8_scaling: Literal["tensor", "row"] = "tensor"
    """A float8 scale per tensor, or per token; then weight gradients stay in the compute dtype."""
    logits_dtype: Literal["float32", "compute"] = "float32"
    """What the head's matmul rounds logits to; the loss of them is taken in float32."""
    attention: Literal["softmax"] = "softmax"
    """What attention computes; other functions are added from outside (config/registry.py)."""
    attention_backend: Literal["auto", "reference", "cudnn", "pallas_hopper"] = "auto"
    """Attention kernel. auto picks forward and backward, as measured, and says which and why."""
    attention_deterministic: bool = False
    """Bit-for-bit repeatable attention backward, at a cost in speed."""
