"""The format of a published family of models, as a table: `families/` has a file for each."""

from dataclasses import dataclass, field
from typing import Any, Literal

from jaxpar.components.attention import Attention
from jaxpar.components.component import FeedForward, Mixer
from jaxpar.components.feed_forward import Glu
from jaxpar.convert.hf.names import Names

#: Fields of models whose keys are the same in most families.
OF_MODEL = {
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "vocab_size": "vocab_size",
    "Norm.eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
OF_ATTENTION = {
    "Attention.num_heads": "num_attention_heads",
    "Attention.num_kv_heads": "num_key_value_heads",
    "Attention.head_dim": "head_dim",
}
#: Of families whose layers have attention and a dense feed-forward.
COMMON = {**OF_MODEL, **OF_ATTENTION, "Glu.d_ff": "intermediate_size"}

SILU = {"hidden_act": "silu"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """The format of a published family of models.

    Addresses are those of `composed.py`.
    """

    model_type: str
    """`model_type` of its config.json."""
    architecture: str
    """The class in `architectures`."""
    names: Names
    """The names of all tensors that a model of the family may have."""
    mixer: type[Mixer] = Attention
    """The class of the mixer of most layers."""
    feed_forward: type[FeedForward] = Glu
    others: tuple[type, ...] = ()
    """Classes of components that other layers have."""
    fields: dict[str, str]
    """Keys of config.json, by address."""
    switches: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """What true and false stand for, by the address of a key that is one of them."""
    instead: dict[str, str] = field(default_factory=dict)
    """Addresses whose value is written where another has none: {address: other}."""
    equal: dict[str, str] = field(default_factory=dict)
    """Addresses without a key, whose value is that of another: {address: other}."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Addresses with the same value in all models of the family, or with the class of what is
    there."""
    at_least: dict[str, int] = field(default_factory=dict)
    """Addresses with a minimum in all models of the family."""
    given: tuple[str, ...] = ()
    """Addresses whose value must not be None."""
    defaults: dict[str, Any]
    """Defaults of missing keys in config.json."""
    required: dict[str, Any] = field(default_factory=dict)
    """Keys with the only supported value; with another, the model would compute something else."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Alternative names of keys in some versions of `transformers`: {other: key}."""
    taken: dict[str, str] = field(default_factory=dict)
    """Other names that transformers takes for keys: {other: key}. They are read, not written."""
    equal_keys: dict[str, str] = field(default_factory=dict)
    """Keys whose value must be that of another key: {key: other}."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Names of tensors in memory, or in another version: {pattern: replacement}."""
    letters: bool = False
    """Whether hybrid_override_pattern has a letter for each layer."""
    shared_width: str = ""
    """Key of the width of shared experts together, in place of a key of their number."""
    hybrid: bool = False
    """Whether layers may have linear attention: Gated DeltaNet."""
    kimi_linear: bool = False
    """Whether linear_attn_config says which layers have Kimi Delta Attention."""
    dense_first: str = ""
    """Key of the number of first layers with a dense feed-forward in place of experts."""
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
    reads_interval: bool = False
    """Whether a key of every how many layers differ is read where there is no `layer_types`; others
    ignore it, but for its default."""
    width_is_fixed: bool = False
    """Whether its classes need heads that fill the model, though there is a key for their width."""
    ropes: tuple[str, ...] = ()
    """Kinds of RoPE, if the family has only some; `default` is plain RoPE."""
    rope_layout: Literal["halves", "interleaved"] = "halves"
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
    prefix: str = ""
    """Prefix of all tensors but the head, which some files leave out."""
    heads_fill_model: bool = False
    """Whether num_heads * head_dim must be d_model."""

    def key(self, address: str) -> str:
        """Return the key of an address, or of a field of any component with that name; "" if the
        family has none."""
        found = (k for a, k in self.fields.items() if address in (a, a.rpartition(".")[2]))
        return next(found, "")
