"""The size of the routing that a run records, `run.record_routing`."""

from jaxpar.components.experts import experts_in, num_experts
from jaxpar.config.schema import Config

#: Most steps of a run whose routing is recorded.
MAX_STEPS = 100

#: Most bytes of the routing of all recorded steps together, before compression.
MAX_BYTES = 4 << 30


def id_bits(num_experts: int) -> int:
    """Return the bits of the smallest unsigned integer that holds an expert's index."""
    return next(bits for bits in (8, 16, 32, 64) if num_experts <= 1 << bits)


def bytes_of_a_step(cfg: Config) -> int:
    """Return the bytes of the routing of one step, before compression."""
    model, tokens = cfg.model, cfg.train.global_batch_size * cfg.data.seq_len
    chosen = sum(of.experts_per_token for of in experts_in(model))
    return tokens * chosen * id_bits(num_experts(model)) // 8
