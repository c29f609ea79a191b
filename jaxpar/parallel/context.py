"""Context parallelism: attention over a sequence that is sharded over the SEQUENCE axis.

`parallel.context` chooses between three algorithms. All support causal masks, grouped queries and
packed documents.

    allgather   Each device gathers all keys and values. Fewest launches; the default on NVLink.
    ring        Keys and values travel around the ring. Each device holds one shard of them.
    ulysses     All-to-alls reshard from the sequence to heads. Tokens are in text order.

allgather and ring are correct for any order of tokens. The loader uses zigzag order for them, which
gives each device an early and a late part of the sequence and thus the same amount of causal work,
except in models with recurrent layers, which need text order.
`positions` hold the order.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.config import Config, ParallelConfig
from jaxpar.config.layout.placement import in_zigzag_order
from jaxpar.kernels.attention import (
    AttentionMask,
    Choice,
    attention,
    backward,
    check_arguments,
    choose,
    forward,
)
from jaxpar.kernels.attention.sinks import add_sinks, sinks_gradient
from jaxpar.parallel.collectives import all_gather, all_to_all, shift
from jaxpar.parallel.tensor import permutes
from jaxpar.sharding.axes import SEQUENCE


def token_order(parallel: ParallelConfig, seq_len: int) -> np.ndarray | None:
    """Return the order in which a sequence's tokens are stored.

    In zigzag order, device r of n holds pieces r and 2n-1-r of 2n equal pieces.

    Returns:  int64 [T], the token's index in the text for each place; None for text order.
    Source:   Llama 3 (2407.21783), section 3.3.2.
    """
    n = parallel.sequence
    if n == 1 or parallel.context == "ulysses":
        return None
    pieces = np.arange(seq_len).reshape(2 * n, -1)
    return np.concatenate([pieces[[r, 2 * n - 1 - r]].ravel() for r in range(n)])


def order_of(cfg: Config, length: int = 0) -> np.ndarray | None:
    """Return `token_order` for a config. Models with recurrent layers have text order.

    Args:     length: of the sequence. 0: `data.seq_len`.
    """
    return token_order(cfg.parallel, length or cfg.data.seq_len) if in_zigzag_order(cfg) else None


@jax.named_scope("core_attention")
def context_attention(
    q,
    k,
    v,
    mask: AttentionMask,
    *,
    kind: str,
    backend: str,
    deterministic: bool = False,
    sinks: jax.Array | None = None,
    softcap: float | None = None,
    function: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Compute attention over the complete sequence, given each device's shard of it.

    Args:     q: [B, T/sequence, H/tensor, K]. k: [B, T/sequence, G/tensor, K], v: the same, or
              with a smaller head dim I.
              mask: returned by `mask_across`. kind: parallel.context. backend, deterministic,
              softcap: as in `attention`. sinks: [H/tensor], as in `attention`. function:
              (q, k, v, mask) -> out, used instead of the kernels of softmax attention; not with
              `ring`, which merges softmaxes, nor with sinks.
    Returns:  [B, T/sequence, H/tensor, I].
    Communication: over SEQUENCE, depending on kind; see the module. None if its size is 1.
    """
    kernels: dict[str, Any] = {
        "backend": backend,
        "deterministic": deterministic,
        "softcap": softcap,
    }
    if kind == "ring" and lax.axis_size(SEQUENCE) > 1:
        assert function is None, "a rule of the config"
        return _ring(q, k, v, sinks, mask, kernels)

    def attend(q, k, v, mask, sinks):
        if function is not None:
            assert sinks is None, "a rule of the config"
            return named_output(function)(q, k, v, mask)
        return attention(q, k, v, mask, sinks=sinks, **kernels)[0]

    if lax.axis_size(SEQUENCE) == 1:
        return attend(q, k, v, mask, sinks)
    return (_allgather if kind == "allgather" else _ulysses)(q, k, v, sinks, mask, attend)


def mask_across(mask: AttentionMask, kind: str) -> AttentionMask:
    """Return the mask that `context_attention` needs, once for all layers.

    Args:     mask: of the local tokens, [B, T/sequence]. kind: parallel.context.
    Returns:  the mask of the kernels' inputs: with the keys of the complete sequence, and under
              `ulysses` its queries too. Unchanged under `ring`, where it travels with the keys.
    Communication: all-gathers over SEQUENCE of positions and segments, 4 bytes per token each.
    """
    if kind == "ring" or lax.axis_size(SEQUENCE) == 1:
        return mask
    positions = all_gather(mask.kv_positions, SEQUENCE, dim=1)
    segments = mask.kv_segments
    if segments is not None:
        segments = all_gather(segments, SEQUENCE, dim=1)
    whole = replace(mask, kv_positions=positions, kv_segments=segments)
    if kind == "ulysses":
        return replace(whole, q_positions=positions, q_segments=segments)
    return replace(whole, in_order=False)


def named_output(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Wrap an attention function so that its output has the same remat name as `attention`'s."""
    return lambda *args: checkpoint_name(function(*args), "attn_out")


def kernel_request(
    cfg: Config, mask: AttentionMask, queries: int, keys: int, head_dim: int
) -> tuple[Any, Any, AttentionMask]:
    """Return the q, k and mask that `context_attention` passes to one device's kernels, as shapes.

    With row groups, these are the shapes of one row group.

    Args:     cfg: resolved. mask: of a device's tokens of a microbatch, [B, T/sequence]; shapes.
              queries, keys: heads of each. head_dim: width of both.
    """
    p = cfg.parallel
    B, T = mask.q_positions.shape
    B //= p.row_groups
    S, H, G, n = T, queries // p.tensor, keys // p.tensor, p.sequence
    if n > 1 and p.context == "allgather":
        S = n * T
    if n > 1 and p.context == "ulysses":
        T, S, H, G = n * T, n * T, H // n, G // math.gcd(G, n)
    of_q, of_k = (jax.ShapeDtypeStruct((B, length), jnp.int32) for length in (T, S))
    whole = replace(mask, q_positions=of_q, kv_positions=of_k)
    if mask.q_segments is not None:
        whole = replace(whole, q_segments=of_q, kv_segments=of_k)
    q, k = (
        jax.ShapeDtypeStruct((B, length, heads, head_dim), cfg.compute.dtype)
        for length, heads in ((T, H), (S, G))
    )
    return q, k, whole


def _allgather(q, k, v, sinks, mask: AttentionMask, attend: Callable[..., jax.Array]) -> jax.Array:
    """Gather k and v by permutes; their gradients are reduce-scattered by permutes."""
    k, v = (permutes.permute_all_gather(x, SEQUENCE, 1) for x in (k, v))
    return attend(q, k, v, mask, sinks)


def _ulysses(q, k, v, sinks, mask: AttentionMask, attend: Callable[..., jax.Array]) -> jax.Array:
    """Attend with all-to-alls of q, k, v and out. KV heads are repeated to divide the axis.

    Every device has all sinks, and takes those of its heads.

    Source:   Jacobs et al. 2023 (2309.14509).
    """
    n = lax.axis_size(SEQUENCE)
    repeat = n // math.gcd(k.shape[2], n)
    k, v = (jnp.repeat(x, repeat, axis=2) for x in (k, v))
    q, k, v = (all_to_all(x, SEQUENCE, split_dim=2, concat_dim=1) for x in (q, k, v))
    if sinks is not None:
        heads = q.shape[2]
        sinks = lax.dynamic_slice_in_dim(sinks, lax.axis_index(SEQUENCE) * heads, heads)
    out = attend(q, k, v, mask, sinks)
    return all_to_all(out, SEQUENCE, split_dim=1, concat_dim=2)


def _ring(q, k, v, sinks, mask: AttentionMask, kernels: dict[str, Any]) -> jax.Array:
    """Attend with n-1 permutes of k, v and mask forward; as many backward, and n of dk and dv.

    Source:   Liu et al. 2023 (2310.01889).
    """
    mask = replace(mask, in_order=False)
    check_arguments(q, k, v, mask, sinks)
    return _ring_attention(q, k, v, sinks, mask, choose(q=q, k=k, mask=mask, **kernels))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _ring_attention(q, k, v, sinks, mask, choice: Choice):
    return _ring_forward(q, k, v, sinks, mask, choice)[0]


def _keys(k, v, mask: AttentionMask):
    return k, v, mask.kv_positions, mask.kv_segments


def _with_keys(mask: AttentionMask, keys) -> AttentionMask:
    return replace(mask, kv_positions=keys[2], kv_segments=keys[3])


def _ring_forward(q, k, v, sinks, mask, choice: Choice):
    out, lse = forward(q, k, v, mask, choice)
    out = out.astype(jnp.float32)
    keys = _keys(k, v, mask)
    for _ in range(1, lax.axis_size(SEQUENCE)):
        keys = shift(keys, SEQUENCE, 1)
        part = forward(q, keys[0], keys[1], _with_keys(mask, keys), choice)
        out, lse = _merge(out, lse, *part)
    out, lse = add_sinks(out, lse, sinks)
    out = checkpoint_name(out.astype(q.dtype), "attn_out")
    return out, (q, k, v, sinks, mask, out, checkpoint_name(lse, "attn_lse"))


def _merge(out_a, lse_a, out_b, lse_b):
    """Merge the results of two softmaxes over disjoint keys. Float32."""
    lse = jnp.logaddexp(lse_a, lse_b)
    share = lambda part: jnp.exp(part - lse).transpose(0, 2, 1)[..., None]  # noqa: E731
    return out_a * share(lse_a) + out_b * share(lse_b), lse


def _ring_backward(choice: Choice, saved, d_out):
    q, k, v, sinks, mask, out, lse = saved
    zero = jnp.zeros_like(lse)
    d_sinks = sinks_gradient(sinks, out, lse, d_out, zero)
    f32 = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)  # noqa: E731
    dq, *d_keys = f32(backward(q, k, v, mask, out, lse, d_out, zero, choice))
    keys = _keys(k, v, mask)
    for _ in range(1, lax.axis_size(SEQUENCE)):
        keys, d_keys = shift(keys, SEQUENCE, 1), shift(d_keys, SEQUENCE, 1)
        part = backward(q, keys[0], keys[1], _with_keys(mask, keys), out, lse, d_out, zero, choice)
        dq, *d_keys = jax.tree.map(jnp.add, [dq, *d_keys], list(f32(part)))
    dk, dv = shift(d_keys, SEQUENCE, 1)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), d_sinks, None


_ring_attention.defvjp(_ring_forward, _ring_backward)
