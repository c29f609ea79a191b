"""Model FLOPs and hardware peaks: what a tokens-per-second figure is worth.

Two conventions are in use for the attention term, so both are given. Neither counts recomputation.

    causal   6 N + 6 L H K T per token: what a causal model needs (Megatron).
    full     6 N + 12 L H K T: as if every token saw every other (torchtitan's MFU column).

N counts the parameters that multiply: all but the embedding table, which is looked up, and but the
experts that a token does not take. The peak is that of bfloat16 whatever `model.matmul_dtype` is,
so that figures stay comparable.
"""

from jaxpar.config import LoraConfig, ModelConfig
from jaxpar.model.parameters import param_specs
from jaxpar.sharding.params import count


def num_params(model: ModelConfig) -> int:
    """All parameters of the model, adapters left out."""
    return count(param_specs(model))


def num_adapter_params(model: ModelConfig, lora: LoraConfig) -> int:
    """Those of adapters; 0 where there are none."""
    return count(param_specs(model, lora)) - num_params(model)


def num_matmul_params(model: ModelConfig) -> int:
    """Parameters that multiply for a token. A tied table is used as the head, so it counts."""
    table = model.vocab_size * model.d_model
    others = max(model.num_experts - model.experts_per_token, 0) * model.num_layers
    not_taken = others * 3 * model.d_model * model.d_ff
    return num_params(model) - not_taken - (0 if model.tie_embeddings else table)


def train_flops_per_token(
    model: ModelConfig, seq_len: int, *, causal: bool = True, lora: LoraConfig | None = None
) -> float:
    """FLOPs of forward and backward per token of a sequence of seq_len.

    With adapters (`lora`) the model's own matrices have no gradient: 4 N and 6 N of the adapters.
    """
    attention = model.num_layers * model.num_heads * model.head_dim * seq_len
    matmuls = 6 * num_matmul_params(model)
    if lora is not None and lora.rank:
        matmuls = 4 * num_matmul_params(model) + 6 * num_adapter_params(model, lora)
    return matmuls + (6 if causal else 12) * attention
