"""The format of a published family of models, as a table: `families.py` has one for each."""

from dataclasses import dataclass, field
from typing import Any

from jaxpar.convert.hf.tensor_layout import Entry

#: Fields whose keys are the same in every family.
COMMON = {
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "d_ff": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """The format of a published family of models."""

    model_type: str
    """`model_type` of its config.json."""
    architecture: str
    """The class in `architectures`."""
    entries: tuple[Entry, ...]
    """All parameters that a model of the family may have."""
    fields: dict[str, str]
    """Keys of config.json, by field of ModelConfig."""
    same_as: dict[str, str] = field(default_factory=dict)
    """Fields where None stands for the value of another field, which config.json contains."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Fields with the same value in all models of the family."""
    at_least: dict[str, int] = field(default_factory=dict)
    """Fields with a minimum in all models of the family."""
    defaults: dict[str, Any]
    """Defaults of missing keys in config.json."""
    required: dict[str, Any] = field(default_factory=dict)
    """Keys with the only supported value; with another, the model would compute something else."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Alternative names of keys in some versions of `transformers`: {other: key}."""
    equal_keys: dict[str, str] = field(default_factory=dict)
    """Keys whose value must be that of another key: {key: other}."""
    letters: str = ""
    """The letters of layers that hybrid_override_pattern may have, if it has one for each."""
    shared_width: str = ""
    """Key of the width of shared experts together, in place of a key of their number."""
    hybrid: bool = False
    """Whether layers may have linear attention: Gated DeltaNet."""
    kimi_linear: bool = False
    """Whether linear_attn_config says which layers have Kimi Delta Attention."""
    mtp_prefix: str | None = None
    """Start of the names of tensors for multi-token prediction, which are left out."""
    sliding: bool = False
    """Whether layers may have a sliding window."""
    two_kinds: bool = False
    """Whether layers with a window may alternate with global ones."""
    global_heads: bool = False
    """Whether global layers have heads of their own, with the keys of `keys/global_heads.py`."""
    two_ropes: str | None = None
    """Older key of the RoPE base in layers with a window, if these kinds of layers each have their
    own RoPE."""
    given: tuple[str, ...] = ()
    """Fields that must not be None."""
    ropes: tuple[str, ...] = ()
    """Kinds of RoPE, if the family has only some; `default` is plain RoPE."""
    query_beta: bool = False
    """Whether scaled RoPE may have `query_beta`."""
    rope: bool = True
    """Whether models have rotary embeddings."""
    rope_fraction: float | None = None
    """Default of partial_rotary_factor; None where all dims are rotated."""
    mrope: bool = False
    """Whether RoPE may have the sections of images' positions, which are equal for text."""
    null_rope: bool = False
    """Whether models may have no rotary embedding, which a rope_theta of null says."""
    nope: bool = False
    """Whether every Nth layer may have no RoPE."""
    chunked: bool = False
    """Whether layers with RoPE attend within chunks, and queries of the others grow (Llama 4)."""
    mxfp4: bool = False
    """Whether weights may be in MXFP4, which are dequantized."""
    float8_blocks: bool = False
    """Whether weights may be in float8 with a scale for each block, which are dequantized."""
    latent: bool = False
    """Whether attention is multi-head latent attention, with the keys of `keys/latents.py`."""
    copies: dict[str, str] = field(default_factory=dict)
    """Tensors of modules for multi-token prediction that are copies: {name with {P}: of which}."""
    heads_alike: bool = False
    """Whether config.json has only the number of heads: num_kv_heads is num_heads, and head_dim is
    d_model / num_heads."""
    without: tuple[str, ...] = ()
    """Stacks of parameters that its models do not have, and compute the same without."""
    prefix: str = ""
    """Prefix of all tensors but the head, which some files leave out."""
    heads_fill_model: bool = False
    """Whether num_heads * head_dim must be d_model."""
