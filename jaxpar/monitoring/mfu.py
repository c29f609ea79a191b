"""Model FLOPs utilization."""

from jaxpar.config import LoraConfig, ModelConfig
from jaxpar.model.flops import train_flops_per_token
from jaxpar.runtime.gpus.peaks import peak_flops


def mfu(
    tokens_per_second: float,
    model: ModelConfig,
    seq_len: int,
    device_kind: str,
    *,
    causal: bool,
    lora: LoraConfig | None = None,
) -> float | None:
    """Compute the share of a device's peak FLOP/s from its tokens per second.

    Returns:  None when the peak is unknown.
    """
    peak = peak_flops(device_kind)
    if peak is None:
        return None
    flops = train_flops_per_token(model, seq_len, causal=causal, lora=lora)
    return tokens_per_second * flops / peak
