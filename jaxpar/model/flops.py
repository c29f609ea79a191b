"""Model FLOPs, for model FLOPs utilization (MFU).

There are two conventions for the attention term, and both are supported. Neither counts
recomputation.

    causal   6 N + 6 L H K T per token: the FLOPs of a causal model (Megatron).
    full     6 N + 12 L H K T: as if every token attended to every other (torchtitan's MFU column).

In latent attention, values have another width than keys, and K is the mean of both. L counts the
layers with attention; global layers with heads of their own have another K. Recurrent layers have a
term that does not depend on T.

N counts the parameters used in matmuls: all except the tables of embeddings, which are looked up,
and the experts to which a token is not routed. Modules of multi-token prediction count as layers,
and the head once for each. The peak for MFU is that of bfloat16 for any `model.matmul_dtype`, so
that figures stay comparable.
"""

from jaxpar.config import LoraConfig, ModelConfig
from jaxpar.config.layout.layer_kinds import (
    ATTENTIONS,
    DELTA_NET,
    KDA,
    KDA_DENSE,
    MAMBA,
    kinds,
    kinds_with_experts,
    of_kind,
)
from jaxpar.model.parameters import param_specs
from jaxpar.sharding.params import count


def num_params(model: ModelConfig) -> int:
    """Return the number of parameters of the model, without adapters."""
    return count(param_specs(model))


def num_adapter_params(model: ModelConfig, lora: LoraConfig) -> int:
    """Return the number of parameters of adapters; 0 without adapters."""
    return count(param_specs(model, lora)) - num_params(model)


def num_matmul_params(model: ModelConfig) -> int:
    """Return the number of parameters used in matmuls for a token. A tied table counts (head)."""
    table = model.vocab_size * model.d_model
    others = max(model.num_experts - model.experts_per_token, 0)
    others *= len(kinds_with_experts(model)) + model.mtp_depth
    D, F, matrices = model.d_model, model.d_ff, 3 if model.mlp_gate else 2
    not_taken = others * (matrices * D * F + model.expert_bias * (2 * F + D))
    again = model.mtp_depth * table  # each module multiplies with the head
    looked_up = (0 if model.tie_embeddings else table) + model.max_positions * D
    return num_params(model) + again - not_taken - looked_up


def train_flops_per_token(
    model: ModelConfig, seq_len: int, *, causal: bool = True, lora: LoraConfig | None = None
) -> float:
    """Return the FLOPs of forward and backward per token of a sequence of seq_len.

    With adapters (`lora`), the base matrices have no gradients: they count 4 N, and adapters 6 N.
    """
    mean_dims = ((m.head_dim + m.value_dim) / 2 for m in _with_attention(model))
    attention = model.num_heads * sum(mean_dims) * seq_len
    matmuls = 6 * num_matmul_params(model)
    if lora is not None and lora.rank:
        matmuls = 4 * num_matmul_params(model) + 6 * num_adapter_params(model, lora)
    return matmuls + (6 if causal else 12) * attention + recurrence_flops_per_token(model)


def recurrence_flops_per_token(model: ModelConfig) -> float:
    """Return the FLOPs of forward and backward of recurrences, token by token.

    Gated DeltaNet reads its state [K, V] twice and writes it once: 6 K V per head, and as much
    again twice in the backward. So does Kimi Delta Attention. Mamba-2 reads it once. Chunks compute
    more than that.
    """
    m, of_kinds = model, kinds(model)
    delta_net = m.linear_num_value_heads * m.linear_key_head_dim * m.linear_value_head_dim
    mamba = m.mamba_num_heads * m.mamba_state_size * m.mamba_head_dim
    of_delta = sum(map(of_kinds.count, (DELTA_NET, KDA, KDA_DENSE)))
    return 18 * of_delta * delta_net + 12 * of_kinds.count(MAMBA) * mamba


def attention_kernel_flops(model: ModelConfig, seq_len: int) -> float | None:
    """Return the FLOPs per token of attention kernels, forward and backward.

    14 H K per pair of a query and a key: 4 forward, and 10 backward, which computes the scores
    again. Of the 14, 8 are of keys and 6 of values. Each sequence counts as one document. None for
    sliding windows and chunks.
    """
    if model.sliding_window is not None or model.attention_chunk is not None:
        return None
    of_heads = sum(8 * m.head_dim + 6 * m.value_dim for m in _with_attention(model))
    return model.num_heads * of_heads * seq_len / 2


def _with_attention(m: ModelConfig) -> list[ModelConfig]:
    """Return the model with the heads of each layer that has attention, and of each module."""
    return [of_kind(m, kind) for kind in kinds(m) if kind in ATTENTIONS] + [m] * m.mtp_depth
