"""The parameters of multi-head latent attention."""

from collections.abc import Callable
from typing import Any

from jaxpar.config import ModelConfig
from jaxpar.sharding.params import ParamSpec


def specs(
    m: ModelConfig, matrix: Callable[..., ParamSpec], gain: Callable[..., ParamSpec], deep: float
) -> dict[str, Any]:
    """Return the specs of stacked layers' attention.

    The matrices that make latents are complete over TENSOR, since all heads read them. Those that
    read latents are split by heads, and sharded over FSDP_AXES along the latent.

    Args:     matrix, gain: shape and axes of a layer's array -> its spec. deep: standard deviation
              of the matrix that writes to the residual stream.
    """
    D, H, K, R, N = m.d_model, m.num_heads, m.head_dim, m.qk_rope_head_dim, m.qk_nope_head_dim
    found = {
        "wkv_a": matrix((D, m.kv_lora_rank + R), ("embed", "rank")),
        "kv_a_norm": gain((m.kv_lora_rank,), ("norm",)),
        "wkv_b": matrix(
            (m.kv_lora_rank, H, N + m.v_head_dim), ("latent", "heads", "head_dim"), columns=2
        ),
        "wo": matrix((H, m.v_head_dim, D), ("heads", "head_dim", "embed"), deep),
    }
    if m.q_lora_rank is None:
        return found | {"wq": matrix((D, H, K), ("embed", "heads", "head_dim"), columns=2)}
    return found | {
        "wq_a": matrix((D, m.q_lora_rank), ("embed", "rank")),
        "q_a_norm": gain((m.q_lora_rank,), ("norm",)),
        "wq_b": matrix((m.q_lora_rank, H, K), ("latent", "heads", "head_dim"), columns=2),
    }
