"""The section `model`: the architecture."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from jaxpar.components.model import Layer, MupConfig
from jaxpar.components.ranges import Count, Natural, Positive, Range, Size, Width
from jaxpar.components.rope import RopeScaling
from jaxpar.config.errors import ConfigError
from jaxpar.config.layers import summary


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The decoder: Llama 3 by default; docs/families.md lists others."""

    num_layers: Annotated[int, Range(1, 10_000)] = 4
    """Number of transformer layers."""
    layers: tuple[Layer, ...] = ()
    """Layers of components, by Python's list arithmetic: layers=[Layer("block", mixer,
    feed_forward)] * 32. They are the model; no flag below says what differs between layers.
    Empty: the flags describe the layers."""
    layer_pattern: str = ""
    """Kinds of layers, a letter each, repeated over the model. *: attention. A: global attention
    with heads of its own (Gemma 4: one after five *). G: Gated DeltaNet (Qwen3-Next: GGG*). K: Kimi
    Delta Attention; k: the same, with a dense feed-forward in a model with experts (Kimi Linear:
    kKK*KKK* ...). M: Mamba-2. -: a dense feed-forward layer. E: one with experts. Other layers have
    no feed-forward beside these two (Nemotron-H). Empty: attention in all layers."""
    d_model: Width = 256
    """Width of the residual stream."""
    num_heads: Size = 8
    """Number of query heads."""
    num_kv_heads: Size = 4
    """Number of key and value heads; fewer than num_heads means grouped-query attention (GQA)."""
    head_dim: Size = 32
    """Width of one head; num_heads * head_dim may differ from d_model."""
    global_head_dim: int | None = None
    """Layers of kind A: width of one head (Gemma 4: 512). None: head_dim."""
    global_num_kv_heads: int | None = None
    """Layers of kind A: number of key and value heads. None: num_kv_heads."""
    global_keys_as_values: bool = False
    """Layers of kind A: values are the projected keys, without the norm and the rotary embedding of
    keys, and have no projection of their own (Gemma 4)."""
    kv_lora_rank: Annotated[int, Range(0, 1 << 20)] = 0
    """Width of the latent from which multi-head latent attention computes keys and values (MLA,
    DeepSeek: 512). Each head then has its own keys. 0: keys and values are projections of the
    residual stream."""
    q_lora_rank: Annotated[int | None, Range(1, 1 << 20)] = None
    """MLA: width of the latent from which queries are computed (DeepSeek-V3: 1536). None: from the
    residual stream (DeepSeek-V2-Lite)."""
    qk_rope_head_dim: Size = 64
    """MLA: dims of each head that are rotated, the last ones of head_dim. Their key is shared by
    all heads. The others, qk_nope_head_dim in published models, are head_dim - qk_rope_head_dim."""
    v_head_dim: Size = 128
    """MLA: width of a head's values, at most head_dim."""
    latent_norm_eps: Positive = 1e-6
    """MLA: added to the mean square in the RMSNorms of both latents."""
    d_ff: Annotated[int, Range(1, 1 << 24)] = 704
    """Width of the feed-forward layer, or of each expert."""
    num_experts: Annotated[int, Range(0, 1 << 16)] = 0
    """Experts per layer (Mixtral, Qwen3-MoE). 0: a dense feed-forward layer."""
    experts_per_token: Size = 2
    """Experts that the router selects for each token (top-k)."""
    normalize_experts: bool = True
    """Normalize the weights of a token's experts to sum to 1, which needs at least two experts per
    token. False: use the router's probabilities."""
    expert_bias: bool = False
    """Biases on the three projections of each expert (gpt-oss). Shared experts have none."""
    num_shared_experts: Annotated[int, Range(0, 1 << 16)] = 0
    """Experts that every token uses, in addition to those of the router (DeepSeek). They are one
    feed-forward of width num_shared_experts * d_ff."""
    shared_expert_gate: bool = False
    """Multiply the shared experts' output by the sigmoid of a number that a vector computes from
    each token (Qwen3-Next)."""
    dense_layers: Natural = 0
    """First layers that have a dense feed-forward layer instead of experts (DeepSeek-V3: 3,
    GLM-4.5: 1). Without a pipeline, needs parallel.layer_loop unroll."""
    dense_d_ff: Annotated[int | None, Range(1, 1 << 24)] = None
    """Width of the feed-forward in dense_layers, or in layers of kind k, or - beside E. None:
    d_ff."""
    moe_every: Count = 1
    """Every Nth layer has experts (Llama 4 Maverick: 2), and dense_layers is the number of the
    others. 1: all layers but the first dense_layers."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the experts, from the router's logits. sigmoid: independent ones (DeepSeek-V3)."""
    router_linear_bias: bool = False
    """Bias on the router's logits, trained like any weight (gpt-oss)."""
    router_bias: bool = False
    """Add a bias per expert to the scores by which experts are chosen, but not to their weights. A
    step lowers it for experts with more tokens than the mean, by train.router_bias_rate. This
    balances experts without a loss (DeepSeek-V3)."""
    router_groups: Size = 1
    """Groups of neighboring experts; a token uses router_groups_per_token of them (DeepSeek-V3)."""
    router_groups_per_token: Size = 1
    """Groups that the router selects for each token, by the sum of a group's two best scores."""
    router_scales_input: bool = False
    """Multiply the input of a token's expert by its weight, in place of the output (Llama 4). Needs
    experts_per_token 1."""
    router_scale: float = 1.0
    """Multiply the weights of a token's experts by this (DeepSeek-V3: 2.5)."""
    mtp_depth: Annotated[int, Range(0, 8)] = 0
    """Modules of multi-token prediction after the layers (DeepSeek-V3: 1). Module k predicts the
    token k places after the next one, in training and for drafts in jaxpar.sample; train.mtp_loss
    weighs their losses."""
    vocab_size: Annotated[int, Range(0, 1 << 26)] = 512
    """Rows of the embedding; at least the tokenizer's vocabulary. 0: that of the training data,
    rounded up to a multiple of 128, and of what the mesh divides it by."""
    rope_theta: Positive = 500_000.0
    """Base of the rotary embedding's frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the frequencies; setting one of its fields enables it. None: plain RoPE."""
    rope_fraction: float = 1.0
    """Share of each head's dims that are rotated, the first ones (GLM-4.5: 0.5). 0, with recurrent
    layers: attention has no positions of its own (Nemotron-H, Kimi Linear)."""
    rope_layout: Literal["halves", "interleaved"] = "halves"
    """Which dims are rotated together. halves: one of the first half with one of the second.
    interleaved: neighbors (Helium, ERNIE 4.5)."""
    positions: Literal["rope", "learned"] = "rope"
    """How a layer knows positions. rope: rotary embeddings. learned: an embedding of each position,
    added to those of the tokens (GPT-2, GPT-3)."""
    max_positions: Natural = 0
    """Rows of the table of learned positions: the longest sequence (GPT-3: 2048)."""
    nope_every: int = 0
    """Every Nth layer has no rotary embedding (SmolLM3: 4). 0: all layers have it."""
    nope_query_beta: float = 0.0
    """In the layers of nope_every, multiply queries by
    1 + nope_query_beta * log(1 + floor((position + 1) / nope_query_span)), so that scores of later
    positions are larger (Llama 4: 0.1). 0: do not."""
    nope_query_span: Count = 8192
    """Positions between two steps of nope_query_beta's factor."""
    norm: Literal["rms", "layer"] = "rms"
    """Norm of the residual stream. rms: RMSNorm. layer: LayerNorm, with a bias (GPT-3)."""
    norm_eps: Positive = 1e-5
    """Added to the mean square inside RMSNorm, or to the variance inside LayerNorm."""
    parallel_block: bool = False
    """Attention and feed-forward read the same residual stream, and both are added to it (GPT-J,
    GPT-NeoX). False: the feed-forward comes after attention."""
    shared_norm: bool = False
    """With parallel_block, one norm for both (GPT-J). False: each its own (GPT-NeoX)."""
    tie_embeddings: bool = False
    """Use the embedding as the output head."""
    qk_norm: bool = False
    """RMSNorm over queries and keys before RoPE (Qwen3, OLMoE)."""
    qk_norm_gain: bool = True
    """Gain of qk_norm. False: without, and only in layers with a rotary embedding (Llama 4)."""
    qk_norm_over: Literal["head", "all"] = "head"
    """What qk_norm normalizes. head: each head, with one gain for all heads (Qwen3). all: the heads
    of a token together, each with its own gain (OLMoE)."""
    value_norm: bool = False
    """RMSNorm without a gain over each head's values (Gemma 4)."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    out_bias: bool = False
    """Bias on the attention output projection."""
    mlp_bias: bool = False
    """Biases on the feed-forward projections."""
    mlp_gate: bool = True
    """The feed-forward, or each expert, is a gated linear unit, of three matrices. False:
    act(x W_up) W_down, of two (GPT-3, Nemotron 3)."""
    sliding_window: int | None = None
    """Latest keys that a query attends to, its own included (Mistral); at least 2. None: all."""
    attention_chunk: int | None = None
    """Attend within chunks of this many tokens of a document (Llama 4: 8192); at least 2. A chunk's
    first token sees only itself. None: no chunks."""
    global_every: Natural = 0
    """Every Nth layer attends globally, without the sliding window (Gemma 3: 6) or the chunks
    (Llama 4: 4). 0: no such layers, or those of kind A in layer_pattern."""
    local_rope_theta: float | None = None
    """Base of the rotary frequencies in sliding-window layers. None: rope_theta."""
    local_rope_scaling: bool = True
    """Apply rope_scaling in sliding-window layers too (gpt-oss). False: only in global layers
    (Gemma 3, OLMo 3)."""
    linear_num_key_heads: Size = 4
    """Gated DeltaNet: heads of queries and keys. They serve equal numbers of value heads. Kimi
    Delta Attention: all heads."""
    linear_num_value_heads: Size = 8
    """Gated DeltaNet: heads of values, each with a state [linear_key_head_dim,
    linear_value_head_dim]. Kimi Delta Attention: linear_num_key_heads."""
    linear_key_head_dim: Size = 32
    """Gated DeltaNet, Kimi Delta Attention: width of a query or key."""
    linear_value_head_dim: Size = 32
    """Gated DeltaNet, Kimi Delta Attention: width of a value. In the latter, also that of the two
    latents from which decays and output gates are computed."""
    linear_allow_neg_eigval: bool = False
    """Gated DeltaNet: rates of a write of up to 2 instead of 1, so that a state may change its sign
    along a key (OLMo Hybrid)."""
    linear_norm_eps: float | None = None
    """Gated DeltaNet, Kimi Delta Attention: added to the mean square in the RMSNorm of a head's
    output. None: norm_eps (Qwen3-Next)."""
    mamba_num_heads: Size = 8
    """Mamba-2: heads, each with a state [mamba_state_size, mamba_head_dim]."""
    mamba_head_dim: Size = 32
    """Mamba-2: width of a value."""
    mamba_state_size: Size = 32
    """Mamba-2: width of a query or key, which published code calls C and B."""
    mamba_num_groups: Size = 1
    """Mamba-2: groups of heads, which share queries and keys, and the norm of the output."""
    mamba_min_step: float = 0.0
    """Mamba-2: the least time step (Nemotron-H: 0.001)."""
    conv_kernel_size: Annotated[int, Range(1, 1 << 10)] = 4
    """Tokens of the convolution before a recurrence, the latest included; at least 2."""
    recurrent_chunk: Annotated[int, Range(1, 1 << 12)] = 64
    """Tokens that a recurrence processes at a time, in matmuls. It does not change what is
    computed."""
    activation: Literal["silu", "gelu", "gelu_exact", "relu_squared", "clamped_swiglu"] = "silu"
    """Activation of the feed-forward gate. gelu: the tanh approximation, as in GeGLU (Gemma).
    gelu_exact (GPT-NeoX) and relu_squared (Primer): only without mlp_gate.
    clamped_swiglu: gate * sigmoid(swiglu_alpha * gate) * (up + 1), both clamped (gpt-oss)."""
    swiglu_limit: Positive = 7.0
    """clamped_swiglu clamps gate to at most this, and up to at most this magnitude."""
    swiglu_alpha: Positive = 1.702
    """Factor of the gate in the sigmoid of clamped_swiglu."""
    pre_norms: bool = True
    """Apply RMSNorm to the inputs of attention and feed-forward. False, with post_norms: OLMo 2."""
    post_norms: bool = False
    """Apply RMSNorm also to the outputs of attention and feed-forward, before the residual
    addition (Gemma)."""
    recurrent_norms: Literal["alike", "before"] = "alike"
    """Norms in recurrent layers. alike: as pre_norms and post_norms say of all layers. before: of
    the inputs of both branches, and none of outputs, whatever layers with attention have
    (OLMo Hybrid)."""
    norm_offset: bool = False
    """Multiply by 1 + scale in RMSNorm, with scale initialized to 0 (Gemma)."""
    embed_scale: bool = False
    """Multiply embeddings by sqrt(d_model) (Gemma)."""
    embedding_multiplier: Positive = 1.0
    """Multiply embeddings by this (Granite)."""
    layer_scale: bool = False
    """Multiply the residual stream after each layer by a trained number of the layer (Gemma 4)."""
    residual_multiplier: Positive = 1.0
    """Multiply the outputs of attention and feed-forward by this before the residual addition
    (Granite)."""
    logits_scaling: Positive = 1.0
    """Divide the logits by this (Granite)."""
    logits_softcap: float | None = None
    """Cap the logits' magnitude: softcap * tanh(logits / softcap) (Gemma 2: 30). None: no cap."""
    query_scale_dim: int | None = None
    """Divide attention scores by the square root of this (Gemma). None: of head_dim."""
    attention_multiplier: float | None = None
    """Multiply attention scores by this, in place of 1 / sqrt(head_dim) (Granite)."""
    attention_softcap: float | None = None
    """Cap the magnitude of attention scores: softcap * tanh(score / softcap) (Gemma 2: 50). None:
    no cap."""
    mup: MupConfig | None = None
    """Maximal update parametrization (µP): the best learning rate does not depend on the width
    (docs/mup.md). Setting one of its fields enables it. None: the standard parametrization."""
    init_std: Positive = 0.02
    """Standard deviation of the initial weights; output projections use init_std /
    sqrt(2 * num_layers)."""
    attention: Literal["softmax"] = "softmax"
    """Attention function: softmax, or one registered with jaxpar/config/registry.py."""
    attention_gate: bool = False
    """Multiply the heads' outputs by the sigmoid of a projection of the layer's input
    (Qwen3-Next)."""
    attention_sinks: bool = False
    """A learned score per query head that joins the softmax's denominator and has no value, so
    that a head can attend to nothing (gpt-oss)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or not all(isinstance(layer, Layer) for layer in self.layers):
            return
        fields = {field.name: field for field in dataclasses.fields(self)}
        for name, value in summary(self.layers).items():
            if getattr(self, name) not in (value, fields[name].default):
                rule = "describes layers of a model without model.layers, which are composed here"
                fix = f"remove {name}, which model.layers says"
                raise ConfigError(f"model.{name}", getattr(self, name), rule, fix)
            object.__setattr__(self, name, value)

    def with_layers(self, layers: Sequence[Layer]) -> "ModelConfig":
        """Return the model with other layers."""
        said = summary(self.layers) if self.layers else {}
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        others = {name: value for name, value in fields.items() if name not in said}
        return ModelConfig(**(others | {"layers": tuple(layers)}))

    @property
    def rotary_dims(self) -> int:
        """The number of each head's dims that are rotated."""
        if self.kv_lora_rank:
            return self.qk_rope_head_dim
        return int(self.head_dim * self.rope_fraction)

    @property
    def delta_norm_eps(self) -> float:
        """The eps of the norm of a head's output, of Gated DeltaNet and Kimi Delta Attention."""
        return self.norm_eps if self.linear_norm_eps is None else self.linear_norm_eps

    @property
    def attention_scale(self) -> float:
        """The factor of attention scores."""
        plain = self.attention_multiplier
        if plain is None:
            plain = (self.query_scale_dim or self.head_dim) ** -0.5
        return plain * self.mup_score_factor

    @property
    def mup_score_factor(self) -> float:
        """µP's factor of attention scores, beside that of the standard parametrization."""
        if self.mup is None or self.mup.base_head_dim is None:
            return 1.0
        narrower = self.mup.base_head_dim / self.head_dim
        is_constant = self.attention_multiplier is not None or self.query_scale_dim is not None
        return narrower if is_constant else math.sqrt(narrower)

    @property
    def width_multiplier(self) -> float:
        """µP's ratio of d_model to that of the base model; 1 without µP."""
        return 1.0 if self.mup is None else self.d_model / self.mup.base_width

    @property
    def depth_multiplier(self) -> float:
        """µP's ratio of num_layers to that of the base model; 1 without `base_depth`."""
        return self.num_layers / self.base_depth

    @property
    def base_depth(self) -> int:
        """The number of layers for which initial weights of outputs are."""
        return (self.mup and self.mup.base_depth) or self.num_layers

    @property
    def logits_divisor(self) -> float:
        """The number by which logits are divided."""
        return self.logits_scaling * self.width_multiplier

    @property
    def branch_factor(self) -> float:
        """The factor of what attention and feed-forward add to the residual stream."""
        return self.residual_multiplier / self.depth_multiplier

    @property
    def value_dim(self) -> int:
        """The width of a head's values."""
        return self.v_head_dim if self.kv_lora_rank else self.head_dim

    @property
    def qk_nope_head_dim(self) -> int:
        """The number of each head's dims that are not rotated, in latent attention."""
        return self.head_dim - self.qk_rope_head_dim


def Model(*, d_model: int, vocab_size: int, layers: Sequence[Layer], **fields: Any) -> ModelConfig:
    """Compose a model. The list is the model: nothing else says what differs between layers.

    Args:
        layers: by Python's list arithmetic: [local] * 5 + [wide]. Layers with one name are equal,
            and their weights are stacked.
        fields: of the section `model` that are not of layers: norm_eps, tie_embeddings, ...
    """
    return ModelConfig(d_model=d_model, vocab_size=vocab_size, layers=tuple(layers), **fields)
