"""Model FLOPs, for model FLOPs utilization (MFU).

There are two conventions for the attention term, and both are supported. Neither counts
recomputation.

    causal   6 N + 6 L H K T per token: the FLOPs of a causal model (Megatron).
    full     6 N + 12 L H K T: as if every token attended to every other (torchtitan's MFU column).

Each mixer says what it has in place of H K, and recurrences what they compute beside matmuls, which
does not depend on T (`components/component.py`).

N counts the parameters used in matmuls: all except the tables of embeddings, which are looked up,
and the experts to which a token is not routed. Modules of multi-token prediction count as layers,
and the head once for each. The peak for MFU is that of bfloat16 for any `compute.matmul_dtype`, so
that figures stay comparable.
"""

from jaxpar.components.component import Mixer
from jaxpar.components.model import Layer
from jaxpar.config import LoraConfig, Model
from jaxpar.model.parameters import param_specs
from jaxpar.sharding.params import count


def num_params(model: Model) -> int:
    """Return the number of parameters of the model, without adapters."""
    return count(param_specs(model))


def num_adapter_params(model: Model, lora: LoraConfig | None) -> int:
    """Return the number of parameters of adapters; 0 without adapters."""
    return count(param_specs(model, lora)) - num_params(model)


def num_matmul_params(model: Model) -> int:
    """Return the number of parameters used in matmuls for a token. A tied table counts (head)."""
    table = model.vocab_size * model.d_model
    feed_forwards = (layer.feed_forward for layer in _layers(model))
    idle = sum(one.num_idle(model) for one in feed_forwards if one)
    again = model.mtp_depth * table  # each module multiplies with the head
    looked_up = 0 if model.tie_embeddings else table
    looked_up += model.max_positions * model.d_model
    return num_params(model) + again - idle - looked_up


def train_flops_per_token(
    model: Model, seq_len: int, *, causal: bool = True, lora: LoraConfig | None = None
) -> float:
    """Return the FLOPs of forward and backward per token of a sequence of seq_len.

    With adapters (`lora`), the base matrices have no gradients: they count 4 N, and adapters 6 N.
    """
    attention = sum(mixer.pair_flops() for mixer in _mixers(model)) * seq_len
    matmuls = 6 * num_matmul_params(model)
    if lora is not None:
        matmuls = 4 * num_matmul_params(model) + 6 * num_adapter_params(model, lora)
    return matmuls + (1.5 if causal else 3) * attention + recurrence_flops_per_token(model)


def recurrence_flops_per_token(model: Model) -> float:
    """Return the FLOPs of forward and backward of recurrences, token by token. Chunks compute more
    than that."""
    return sum(mixer.model_flops() for mixer in _mixers(model))


def attention_kernel_flops(model: Model, seq_len: int) -> float | None:
    """Return the FLOPs per token of attention kernels, forward and backward.

    Each sequence counts as one document. None for sliding windows and chunks.
    """
    mixers = _mixers(model)
    if any(mixer.is_local for mixer in mixers):
        return None
    return sum(mixer.pair_kernel_flops() for mixer in mixers) * seq_len / 2


def _layers(m: Model) -> list[Layer]:
    """Return the layers of the model, and of each module."""
    return [*m.layers, *[m.module_layer] * m.mtp_depth]


def _mixers(m: Model) -> list[Mixer]:
    return [layer.mixer for layer in _layers(m) if layer.mixer]
