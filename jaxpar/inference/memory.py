"""Compares the memory of weights and of the cache with that of the devices, before it is used."""

import jax
import jax.numpy as jnp

from jaxpar.config import Config, ConfigError
from jaxpar.model.decode import cache_bytes
from jaxpar.model.flops import num_params
from jaxpar.model.mtp.decode import as_layers
from jaxpar.runtime.host_memory import host_memory

GIB = 2**30


def check_weights(cfg: Config, folder: str) -> None:
    """Check that the weights of a model fit in this host's memory, if its devices are CPUs.

    Raises:   ConfigError that names the folder.
    """
    if jax.default_backend() != "cpu":
        return
    needed, there = num_params(cfg.model) * jnp.dtype(cfg.model.dtype).itemsize, host_memory()
    if needed > there:
        rule = f"has {needed / GIB:,.1f} GiB of weights in {cfg.model.dtype}, but this host or "
        rule += f"container has {there / GIB:,.1f} GiB of memory"
        raise ConfigError("RUN", folder, rule, "use a GPU, or a host with more memory")


def check_cache(
    cfg: Config, rows: int, slots: int, max_tokens: int, *, modules: bool = False
) -> int:
    """Check that the cache of keys and values fits in the devices' memory.

    Args:     cfg: from `config_for_sampling`. rows, slots: the cache holds `rows` sequences of
              `slots` tokens. max_tokens: the value of --max-tokens. modules: with that of the
              modules of multi-token prediction.
    Returns:  its bytes on a device.
    Raises:   ConfigError that names --max-tokens.
    """
    tensor = cfg.parallel.tensor
    models = [cfg.model, *([as_layers(cfg.model)] if modules else [])]
    needed = sum(cache_bytes(m, rows, slots, tensor) for m in models)
    there = _device_memory()
    if needed > there:
        rule = f"needs {needed / GIB:,.1f} GiB per device for the keys and values of {rows:,} x "
        rule += f"{slots:,} tokens, but a device has {there / GIB:,.1f} GiB"
        fix = f"use --max-tokens {max(int(max_tokens * there / needed / 2), 1)}, or fewer prompts"
        raise ConfigError("--max-tokens", max_tokens, rule, fix)
    return needed


def _device_memory() -> float:
    """Return the bytes of one device; CPU devices share their host's memory."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    return limit or host_memory() / jax.local_device_count()
