"""Text generation: prefill of the prompts, then token by token with a cache of keys and values.

Rows are sampled independently: a row depends on its prompt, the seed and its number, not on the
other rows, the mesh or CHUNK.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxpar.components.attention import Attention
from jaxpar.components.latent_attention import LatentAttention
from jaxpar.components.model import STACK_OF_MODULES, Layer
from jaxpar.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    OptimizerConfig,
    ParallelConfig,
)
from jaxpar.execution.decisions import execution_of
from jaxpar.inference.options import Sampling
from jaxpar.model import decode, fused_weights, transformer
from jaxpar.model.attention_context import attention_context
from jaxpar.model.mtp.module import can_draft
from jaxpar.sharding.axes import TENSOR, VOCAB_AXES
from jaxpar.sharding.batch import Batch
from jaxpar.step.links import gather_once
from jaxpar.step.state import state_specs


def config_for_sampling(cfg: Config, tensor: int = 1) -> Config:
    """Return a config of the same model in the compute dtype, on a mesh with only tensor ranks."""
    remat = cfg.parallel.remat
    parallel = ParallelConfig(data=1, tensor=tensor, zero=1, remat=remat, layer_loop="unroll")
    compute = dataclasses.replace(cfg.compute, matmul_dtype="compute", float8_scaling="tensor")
    run = dataclasses.replace(cfg.run, cpu_devices=0)
    # No optimizer is used, and the run's own may be registered outside the package, unknown here.
    rule = OptimizerConfig(warmup_steps=0)
    # Nothing is trained: no checkpoint is the best, and nothing stops early.
    train, saving = dataclasses.replace(cfg.train, early_stop_patience=0), CheckpointConfig()
    return dataclasses.replace(
        cfg,
        run=run,
        parallel=parallel,
        compute=compute,
        optimizer=rule,
        train=train,
        checkpoint=saving,
        diloco=None,
    )


def seeing_as_in_training(cfg: Config) -> Config:
    """Return a config in which a token attends to no more tokens than in training.

    Global layers between layers with a sliding window still attend to all tokens.
    """
    m, length = cfg.model, cfg.data.seq_len
    local = any(getattr(layer.mixer, "window", None) for layer in m.layers)

    def seeing(layer: Layer) -> Layer:
        a = layer.mixer
        if not isinstance(a, Attention | LatentAttention) or (local and a.window is None):
            return layer
        own = dataclasses.replace(a, window=min(a.window or length, length))
        return dataclasses.replace(layer, mixer=own)

    return dataclasses.replace(cfg, model=m.with_layers(tuple(map(seeing, m.layers))))


def make_next_logits(cfg: Config, mesh: Mesh) -> Callable[[Any, np.ndarray, int], jax.Array]:
    """Make the compiled (params, tokens int32 [1, T], last) -> logits float32 [1, V] after `last`.

    Computes the full row, without a cache. `generate` is tested against it.
    """
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
    weights = fused_weights.fuse(params, execution_of(cfg))
    described = attention_context(batch, cfg, max_segments=1)
    return transformer.logits_at(weights, batch, described, last, execution_of(cfg))


#: A temperature below this counts as 0: logits divided by it could overflow float32, and the most
#: likely token would be sampled in any case.
MIN_TEMPERATURE = 1e-30


def draw(logits: jax.Array, keys: jax.Array, how: Sampling, vocab_size: int) -> jax.Array:
    """Sample a token id below vocab_size for each row of logits [B, V], with one key per row.

    Applies the temperature, then `top_k`, then `top_p` to the remaining tokens.

    Source:   Holtzman et al. 2020 (1904.09751), section 3.1: top_p.
    """
    logits = logits[:, :vocab_size]
    if how.temperature < MIN_TEMPERATURE:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    likely, ids = _likely(logits, how)
    place = jax.vmap(jax.random.categorical)(keys, likely)
    return jnp.take_along_axis(ids, place[:, None], axis=-1)[:, 0]


def chances(logits: jax.Array, how: Sampling, vocab_size: int) -> jax.Array:
    """Return the probabilities with which `draw` samples each token, float32 [B, vocab_size]."""
    logits = logits[:, :vocab_size]
    if how.temperature < MIN_TEMPERATURE:
        return jax.nn.one_hot(jnp.argmax(logits, axis=-1), vocab_size)
    likely, ids = _likely(logits, how)
    of_likely = jax.nn.softmax(likely, axis=-1)
    return jnp.put_along_axis(jnp.zeros_like(logits), ids, of_likely, axis=-1, inplace=False)


def _likely(logits: jax.Array, how: Sampling) -> tuple[jax.Array, jax.Array]:
    """Return the likeliest tokens' logits, -inf for those left out, and their ids."""
    logits, vocab_size = logits / how.temperature, logits.shape[-1]
    likely, ids = lax.top_k(logits, min(how.top_k or vocab_size, vocab_size))
    if how.top_p < 1:
        of_likely = jax.nn.softmax(likely, axis=-1)
        before = jnp.cumsum(of_likely, axis=-1) - of_likely
        likely = jnp.where(before < how.top_p, likely, -jnp.inf)  # always keeps the first
    return likely, ids


def row_keys(how: Sampling, position: jax.Array, number: jax.Array | None = None) -> jax.Array:
    """Return the random key of each row's token at `position`, int32 [B].

    Args:     number: int32 [B], of the rows. None: their indices.
    """
    root = jax.random.key(how.seed)
    number = jnp.arange(len(position)) if number is None else number
    one = lambda n, p: jax.random.fold_in(jax.random.fold_in(root, n), p)  # noqa: E731
    return jax.vmap(one)(number, position)


# ------------------------------------------------------------------------------ with the cache

#: Tokens that the device generates before the host reads them.
CHUNK = 16

#: The length of the cache is a multiple of this, so that programs are compiled for few lengths.
SLOTS = 128


@flax.struct.dataclass
class Rows:
    """The state of a batch of texts during generation."""

    cache: decode.Cache
    token: jax.Array
    """int32 [B], the latest tokens, not yet read by the model."""
    position: jax.Array
    """int32 [B], the positions of these tokens."""
    number: jax.Array
    """int32 [B], of the rows, for their random keys."""
    text: jax.Array | None = None
    """int32 [B, T]: the tokens so far, with LongRoPE; those within T of a text that gets longer."""


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled parts of `generate`, for one shape of batch."""

    start: Any
    """Jitted (weights, tokens [B, T], lengths [B], numbers of the rows, int32 [B]) -> rows with
    their first token."""
    go_on: Any
    """Jitted (weights, rows) -> rows and the next CHUNK tokens, int32 [B, CHUNK]."""
    compiled: dict[tuple[int, ...], Callable] = dataclasses.field(default_factory=dict)

    def ready_to_go_on(self, weights: Any, rows: Rows) -> Callable[[Any, Rows], tuple[Rows, Any]]:
        """Return `go_on`, compiled for this number of rows."""
        shape = rows.token.shape
        if shape not in self.compiled:
            self.compiled[shape] = self.go_on.lower(weights, rows).compile()
        return self.compiled[shape]


def weights_for_sampling(params: Any, cfg: Config, mesh: Mesh, *, modules: bool = False) -> Any:
    """Convert the weights to the fused layout and the compute dtype, and gather them, once.

    Args:     modules: with those of multi-token prediction, for `speculative.generate`.
    Returns:  the fused weights; each array has a leading dim over TENSOR, one entry per device.
    """

    def fuse(params):
        kept = modules and can_draft(cfg.model)
        used = {name: a for name, a in params.items() if kept or name != STACK_OF_MODULES}
        weights = gather_once(fused_weights.fuse(used, execution_of(cfg)), cfg)
        return jax.tree.map(lambda a: a[None], weights)

    specs = state_specs(cfg).params
    fused = jax.shard_map(
        fuse, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(TENSOR), check_vma=False
    )
    return jax.jit(fused)(params)


@functools.lru_cache(maxsize=8)
def make_programs(
    cfg: Config, mesh: Mesh, how: Sampling, *, slots: int, vocab_size: int
) -> Programs:
    """Make the `Programs` for a cache of `slots` positions."""
    cfg = seeing_as_in_training(cfg)
    cache = decode.cache_specs(cfg.model.layers, slots)
    weights, plain = PartitionSpec(TENSOR), PartitionSpec()
    reread = tokens_to_reread(cfg, slots)
    rows = Rows(cache, plain, plain, plain, plain if reread else None)  # type: ignore[arg-type]
    own = lambda tree: jax.tree.map(lambda a: a[0], tree)  # noqa: E731

    def next_token(weights, h, position, number):
        logits = decode.logits(weights, h, cfg.model)
        return draw(logits, row_keys(how, position, number), how, vocab_size)

    def start(weights, tokens, lengths, number):
        weights = own(weights)
        cache = decode.empty_cache(cfg, len(tokens), slots)
        h, cache = decode.prompt(weights, tokens, lengths, cache, cfg)
        last = jnp.take_along_axis(h, (lengths - 1)[:, None, None], axis=1)[:, 0]
        token, text = next_token(weights, last, lengths, number), None
        if reread:
            text = jnp.pad(tokens, ((0, 0), (0, reread)))[:, :reread]
            text = _with(text, token, lengths)
        return Rows(cache, token, lengths, number, text)

    def go_on(weights, rows):
        weights = own(weights)

        def one(rows, _):
            h, cache = decode.step(weights, rows.token[:, None], rows.position, rows.cache, cfg)
            h, position = h[:, 0], rows.position + 1
            if rows.text is not None:
                h, cache = _reread(weights, rows.text, position, h, cache, cfg)
            token = next_token(weights, h, position, rows.number)
            text = None if rows.text is None else _with(rows.text, token, position)
            return Rows(cache, token, position, rows.number, text), token

        rows, tokens = lax.scan(one, rows, length=CHUNK)
        return rows, tokens.T

    apart = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    return Programs(
        jax.jit(apart(start, in_specs=(weights, plain, plain, plain), out_specs=rows)),
        jax.jit(apart(go_on, in_specs=(weights, rows), out_specs=(rows, plain)), donate_argnums=1),
    )


def tokens_to_reread(cfg: Config, slots: int) -> int:
    """Return how many tokens to keep of texts that change LongRoPE's angles; 0 if none can."""
    most = decode.last_of_short_angles(cfg.model)
    return 0 if most is None or most >= slots else _rounded(most + 1)


def _reread(
    weights: Any,
    text: jax.Array,
    lengths: jax.Array,
    h: jax.Array,
    cache: decode.Cache,
    cfg: Config,
) -> tuple[jax.Array, decode.Cache]:
    """Read rows again whose last token has changed the angles of all their tokens.

    Args:     lengths: int32 [B], of the texts. h: [B, D], of their last tokens, by `decode.step`.
    Returns:  (h, cache), of these rows by `decode.prompt`.
    """
    most = decode.last_of_short_angles(cfg.model)
    assert most is not None
    changed = jnp.equal(lengths, most + 1)

    def again() -> tuple[jax.Array, decode.Cache]:
        whole, fresh = decode.prompt(weights, text, lengths, cache, cfg)
        last = jnp.take_along_axis(whole, (lengths - 1)[:, None, None], axis=1, mode="clip")[:, 0]
        of_rows = lambda a, b: jnp.where(  # noqa: E731
            changed.reshape(-1, *(1,) * (a.ndim - 1)), a, b
        )
        return jax.tree.map(of_rows, (last, fresh), (h, cache))

    return lax.cond(jnp.any(changed), again, lambda: (h, cache))


def _with(text: jax.Array, token: jax.Array, place: jax.Array) -> jax.Array:
    return text.at[jnp.arange(len(text)), place].set(token, mode="drop")


def generate(
    weights: Any,
    cfg: Config,
    mesh: Mesh,
    prompts: Sequence[Sequence[int]],
    how: Sampling,
    *,
    max_tokens: int,
    vocab_size: int,
    stop: Set[int],
    numbers: Sequence[int] | None = None,
) -> Iterator[list[list[int]]]:
    """Generate token ids after each prompt, until a stop token or `max_tokens`.

    Args:     weights: from `weights_for_sampling`. prompts: at least one token each. vocab_size: of
              the tokenizer. stop: ids that end a row; they are not returned. numbers: of the rows,
              below 2^31, on which samples depend. None: their indices.
    Returns:  an iterator over the new tokens of each row. Its first item, empty, comes when
              everything is compiled.
    Raises:   ConfigError if a text would have more tokens than the model has learned positions.
    """
    tokens, lengths = padded(prompts)
    check_positions(cfg, int(lengths.max()), max_tokens)
    size = {"slots": slots_for(int(lengths.max()), max_tokens), "vocab_size": vocab_size}
    programs = make_programs(cfg, mesh, how, **size)
    number = np.asarray(range(len(prompts)) if numbers is None else numbers, np.int32)
    rows = programs.start(weights, tokens, lengths, number)
    go_on = programs.ready_to_go_on(weights, rows)
    jax.block_until_ready(rows)
    yield [[] for _ in prompts]
    new, made = np.asarray(rows.token)[:, None], 0
    open_rows = np.ones(len(prompts), bool)
    while True:
        new = new[:, : max_tokens - made]
        made += new.shape[1]
        yield [
            until_stop(ids, stop) if going else []
            for ids, going in zip(new, open_rows, strict=True)
        ]
        open_rows &= ~np.isin(new, sorted(stop)).any(axis=1)
        if made == max_tokens or not open_rows.any():
            return
        rows, tokens = go_on(weights, rows)
        new = np.asarray(tokens)


def padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the prompts as one array, int32 [B, T], with zeros after them, and their lengths."""
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    tokens = np.zeros((len(prompts), _rounded(lengths.max())), np.int32)
    for row, ids in zip(tokens, prompts, strict=True):
        row[: len(ids)] = ids
    return tokens, lengths


def check_positions(cfg: Config, longest: int, max_tokens: int) -> None:
    """Raises:   ConfigError if a text would have more tokens than there are learned positions."""
    most = cfg.model.max_positions
    if 0 < most < longest + max_tokens:
        rule = f"makes texts of up to {longest + max_tokens} tokens, and the model has learned "
        rule += f"{most} positions"
        raise ConfigError("--max-tokens", max_tokens, rule, "use fewer, or shorter prompts")


def slots_for(longest: int, max_tokens: int) -> int:
    """Return the length of the cache. Args:     longest: tokens in the longest prompt."""
    return _rounded(longest + max_tokens + CHUNK)  # the last chunk may exceed max_tokens


def _rounded(length: Any) -> int:
    return -(-int(length) // SLOTS) * SLOTS


def until_stop(ids: np.ndarray, stop: Set[int]) -> list[int]:
    """Return the tokens before the first of `stop`."""
    return list(itertools.takewhile(lambda i: i not in stop, map(int, ids)))
