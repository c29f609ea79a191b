"""Text from a model: one token at a time, each from a full forward pass over the window.

Exact and simple; a window of tokens is recomputed for every new one, so it suits samples, not
serving.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxpar.axes import VOCAB_AXES
from jaxpar.batch import Batch
from jaxpar.config import Config, ParallelConfig
from jaxpar.model import block, transformer
from jaxpar.state import state_specs


def config_for_sampling(cfg: Config) -> Config:
    """The same model on a mesh of one device, reading one row at a time, in the compute dtype."""
    parallel = ParallelConfig(data=1, zero=1, remat=cfg.parallel.remat)
    if cfg.model.global_every:
        parallel = dataclasses.replace(parallel, layer_loop="unroll")
    model = dataclasses.replace(cfg.model, matmul_dtype="compute", float8_scaling="tensor")
    return dataclasses.replace(cfg, parallel=parallel, model=model)


def make_next_logits(cfg: Config, mesh: Mesh) -> Callable[[Any, np.ndarray, int], jax.Array]:
    """The compiled (params, tokens int32 [1, T], last) -> logits float32 [1, V] after `last`."""
    step = jax.shard_map(
        functools.partial(_next_logits, cfg),
        mesh=mesh,
        in_specs=(state_specs(cfg).params, PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(None, VOCAB_AXES),
        check_vma=False,  # the row is the same on every device, though its type varies
    )
    return jax.jit(step)


def _next_logits(cfg: Config, params: Any, tokens: jax.Array, last: jax.Array) -> jax.Array:
    place = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    batch = Batch(tokens, tokens, jnp.ones_like(tokens), place)
    weights = transformer.view(params, cfg.parallel)
    described = block.describe_tokens(batch, cfg, max_segments=1)
    return transformer.logits_at(weights, batch, described, last, cfg)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 0.8
    """0: always the likeliest token. Higher is more random."""
    top_k: int = 50
    """Draw from this many likeliest tokens. 0: from all."""
    seed: int = 0
    """Seed of the draws."""


def draw(logits: jax.Array, key: jax.Array, how: Sampling, vocab_size: int) -> int:
    """One token id below vocab_size from logits [V]."""
    logits = logits[:vocab_size]
    if how.temperature == 0:
        return int(jnp.argmax(logits))
    if how.top_k:
        floor = lax.top_k(logits, min(how.top_k, vocab_size))[0][-1]
        logits = jnp.where(logits < floor, -jnp.inf, logits)
    return int(jax.random.categorical(key, logits / how.temperature))


def generate(
    params: Any,
    cfg: Config,
    mesh: Mesh,
    prompt: Sequence[int],
    how: Sampling,
    *,
    vocab_size: int,
    eos_id: int,
) -> Iterator[int]:
    """Token ids that go on from a prompt, until the end of text.

    Args:     params: as restored for `config_for_sampling`. prompt: at least one token; the window
              sees the latest data.seq_len of prompt and text. vocab_size: of the tokenizer.
    """
    step, T = make_next_logits(cfg, mesh), cfg.data.seq_len
    text, root = list(prompt), jax.random.key(how.seed)
    while True:
        seen = text[-T:]
        window = np.zeros((1, T), np.int32)
        window[0, : len(seen)] = seen
        logits = step(params, window, len(seen) - 1)[0]
        token = draw(logits, jax.random.fold_in(root, len(text)), how, vocab_size)
        if token == eos_id:
            return
        text.append(token)
        yield token
