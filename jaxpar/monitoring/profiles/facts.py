"""Gathers the facts about a program that its trace does not contain."""

from typing import Any

import jax

from jaxpar.config import Config
from jaxpar.model.flops import attention_kernel_flops, train_flops_per_token
from jaxpar.monitoring.profiles.folder import ProfileFacts
from jaxpar.runtime import provenance
from jaxpar.runtime.processes import peers


def facts_of(cfg: Config, program: Any, mesh: str, first: int, num_steps: int) -> ProfileFacts:
    """Return the facts of a profile that begins with step `first`.

    Args:     program: the compiled step. mesh: a description.
    """
    tokens = cfg.train.global_batch_size * cfg.data.seq_len
    memory = program.memory_analysis()
    attention = attention_kernel_flops(cfg.model, cfg.data.seq_len)
    return ProfileFacts(
        first_step=first,
        num_steps=num_steps,
        processes=peers.world_size(),
        devices=jax.device_count(),
        device_kind=jax.devices()[0].device_kind,
        mesh=mesh,
        tokens=tokens,
        flops=tokens * train_flops_per_token(cfg.model, cfg.data.seq_len, lora=cfg.lora),
        attention_flops=None if attention is None else tokens * attention,
        memory={n: getattr(memory, n) for n in dir(memory) if n.endswith("_in_bytes")},
        versions=provenance.versions(),
    )
