"""The composition that the flags of `ModelConfig` describe."""

import dataclasses
import functools

from jaxpar.components.attention import Attention, QkNorm, QueryGrowth
from jaxpar.components.component import FeedForward, Mixer
from jaxpar.components.experts import Experts, Router
from jaxpar.components.feed_forward import ClampedSwiglu, Glu, Mlp
from jaxpar.components.latent_attention import LatentAttention
from jaxpar.components.model import Layer, Model, Norm
from jaxpar.components.recurrent import GatedDeltaNet, KimiDeltaAttention, Mamba2
from jaxpar.components.rope import Rope
from jaxpar.config import ModelConfig
from jaxpar.config.layers import check_layers
from jaxpar.config.layout import layer_kinds as of

#: The name of the layers of `model.dense_layers`.
DENSE = "dense_layers"


# A plan has thousands of layouts of one model.
@functools.lru_cache(maxsize=128)
def model_of(m: ModelConfig) -> Model:
    """Return the composition of a model: its layers, or those that its flags describe."""
    if m.layers:
        check_layers(m.layers)
        return _model(m, m.layers)
    dense = of.dense_places(m) if m.dense_layers else ()
    layers = (_layer_at(m, i, kind, i in dense) for i, kind in enumerate(of.kinds(m)))
    return _model(m, tuple(layers))


def _model(m: ModelConfig, layers: tuple[Layer, ...]) -> Model:
    return Model(
        d_model=m.d_model,
        vocab_size=m.vocab_size,
        layers=layers,
        norm=Norm(kind=m.norm, eps=m.norm_eps, offset=m.norm_offset),
        tie_embeddings=m.tie_embeddings,
        max_positions=m.max_positions,
        mtp_depth=m.mtp_depth,
        init_std=m.init_std,
        embed_scale=m.embed_scale,
        embedding_multiplier=m.embedding_multiplier,
        residual_multiplier=m.residual_multiplier,
        logits_scaling=m.logits_scaling,
        logits_softcap=m.logits_softcap,
        mup=m.mup,
    )


@functools.lru_cache(maxsize=128)
def layer_of_modules(m: ModelConfig) -> Layer:
    """Return the layer of the modules of multi-token prediction: as the model's last one."""
    return dataclasses.replace(model_of(m).layers[-1], name=STACK_OF_MODULES)


STACK_OF_MODULES = "mtp"


def stacks_of_experts(m: ModelConfig) -> tuple[str, ...]:
    """Return the name of each layer with experts, in the model's order."""
    layers = model_of(m).layers
    return tuple(layer.name for layer in layers if isinstance(layer.feed_forward, Experts))


def places_of(m: ModelConfig, name: str) -> tuple[int, ...]:
    """Return the indices in the model of the layers with a name."""
    return tuple(i for i, layer in enumerate(model_of(m).layers) if layer.name == name)


def _layer_at(m: ModelConfig, i: int, kind: str, dense: bool) -> Layer:
    last_of = lambda every: every > 0 and (i + 1) % every == 0  # noqa: E731
    name = DENSE if dense else of.STACKS[kind]
    everywhere, rotates = last_of(m.global_every), not last_of(m.nope_every)
    return _layer(m, kind, name, dense=dense, everywhere=everywhere, rotates=rotates)


@functools.lru_cache(maxsize=4096)
def _layer(
    m: ModelConfig, kind: str, name: str, *, dense: bool, everywhere: bool, rotates: bool
) -> Layer:
    pre_norms, post_norms = of.norms_of(m, kind)
    feed_forward = None
    if of.has_feed_forward(m, kind):
        has_experts = of.has_experts(m, kind) and not dense
        feed_forward = experts_of(m) if has_experts else _dense(m)
    return Layer(
        name,
        _mixer(m, kind, everywhere, rotates),
        feed_forward,
        norms="around" if pre_norms and post_norms else "before" if pre_norms else "after",
        parallel=("one_norm" if m.shared_norm else "own_norms") if m.parallel_block else "",
        scaled=m.layer_scale and feed_forward is not None,
    )


def _mixer(m: ModelConfig, kind: str, everywhere: bool, rotates: bool) -> Mixer | None:
    if kind in of.FEED_FORWARDS:
        return None
    conv, chunk, eps = m.conv_kernel_size, m.recurrent_chunk, m.delta_norm_eps
    K, V = m.linear_key_head_dim, m.linear_value_head_dim
    if kind == of.DELTA_NET:
        return GatedDeltaNet(
            num_key_heads=m.linear_num_key_heads,
            num_value_heads=m.linear_num_value_heads,
            key_head_dim=K,
            value_head_dim=V,
            allow_neg_eigval=m.linear_allow_neg_eigval,
            norm_eps=eps,
            conv_kernel_size=conv,
            chunk=chunk,
        )
    if kind in (of.KDA, of.KDA_DENSE):
        return KimiDeltaAttention(
            num_heads=m.linear_num_key_heads,
            key_head_dim=K,
            value_head_dim=V,
            norm_eps=eps,
            conv_kernel_size=conv,
            chunk=chunk,
        )
    if kind == of.MAMBA:
        return Mamba2(
            num_heads=m.mamba_num_heads,
            head_dim=m.mamba_head_dim,
            state_size=m.mamba_state_size,
            num_groups=m.mamba_num_groups,
            min_step=m.mamba_min_step,
            norm_eps=m.norm_eps,
            conv_kernel_size=conv,
            chunk=chunk,
        )
    if m.kv_lora_rank:
        return LatentAttention(
            num_heads=m.num_heads,
            qk_nope_head_dim=m.qk_nope_head_dim,
            qk_rope_head_dim=m.qk_rope_head_dim,
            v_head_dim=m.v_head_dim,
            kv_lora_rank=m.kv_lora_rank,
            q_lora_rank=m.q_lora_rank,
            rope=_rope(m, local=False, fraction=1.0) if rotates and m.rope_fraction else None,
            window=None if everywhere else m.sliding_window,
            chunk=None if everywhere else m.attention_chunk,
            norm_eps=m.latent_norm_eps,
        )
    own = of.of_kind(m, kind)
    has_positions = m.positions == "rope" and m.rope_fraction > 0 and rotates
    everywhere = everywhere or kind == of.GLOBAL
    local = of.has_global_layers(m) and not everywhere
    growth = QueryGrowth(beta=m.nope_query_beta, span=m.nope_query_span)
    return Attention(
        num_heads=m.num_heads,
        num_kv_heads=own.num_kv_heads,
        head_dim=own.head_dim,
        rope=_rope(m, local=local, fraction=m.rope_fraction) if has_positions else None,
        window=None if everywhere else m.sliding_window,
        chunk=None if everywhere else m.attention_chunk,
        bias=m.qkv_bias,
        out_bias=m.out_bias,
        qk_norm=QkNorm(over=m.qk_norm_over, gain=m.qk_norm_gain) if m.qk_norm else None,
        value_norm=m.value_norm,
        gate=m.attention_gate,
        sinks=m.attention_sinks,
        keys_as_values=kind == of.GLOBAL and m.global_keys_as_values,
        scale=m.attention_multiplier,
        scale_dim=m.query_scale_dim,
        softcap=m.attention_softcap,
        growth=growth if growth.beta and not rotates else None,
        function=m.attention,
    )


def _rope(m: ModelConfig, *, local: bool, fraction: float) -> Rope:
    theta = m.local_rope_theta if local and m.local_rope_theta is not None else m.rope_theta
    scaling = None if local and not m.local_rope_scaling else m.rope_scaling
    return Rope(theta=theta, scaling=scaling, fraction=fraction, layout=m.rope_layout)


def _dense(m: ModelConfig) -> FeedForward:
    width = (m.dense_d_ff or m.d_ff) if m.num_experts else m.d_ff
    return _glu(m, width, bias=m.mlp_bias)


def _glu(m: ModelConfig, width: int, *, bias: bool) -> Glu:
    clamped = ClampedSwiglu(limit=m.swiglu_limit, alpha=m.swiglu_alpha)
    activation = clamped if m.activation == "clamped_swiglu" else m.activation
    return (Glu if m.mlp_gate else Mlp)(d_ff=width, activation=activation, bias=bias)


def experts_of(m: ModelConfig) -> Experts:
    """Return the experts of a model's layers that have some."""
    router = Router(
        score=m.router_score,
        normalize=m.normalize_experts,
        linear_bias=m.router_linear_bias,
        balancing_bias=m.router_bias,
        groups=m.router_groups,
        groups_per_token=m.router_groups_per_token,
        scale=m.router_scale,
        scales_input=m.router_scales_input,
    )
    return Experts(
        expert=_glu(m, m.d_ff, bias=m.expert_bias),
        num_experts=m.num_experts,
        experts_per_token=m.experts_per_token,
        router=router,
        num_shared_experts=m.num_shared_experts,
        shared_expert_gate=m.shared_expert_gate,
    )
