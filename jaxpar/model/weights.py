"""Weights on their way into a layer: cast, gathered, and their gradients scattered."""

import jax

from jaxpar.config import Config
from jaxpar.kernels import float8
from jaxpar.model import lora
from jaxpar.model.fused_weights import PROJECTIONS
from jaxpar.model.parameters import Tree
from jaxpar.parallel.fsdp import gather
from jaxpar.parallel.gradient_buffers import closed, of_gradients, opened_again


def cast_weights(w: Tree, dims: dict[str, int | None], cfg: Config) -> Tree:
    """Shards that `gathered_weights` gathers, as they travel; the others as they are.

    Not in a loop over microbatches: it is given float32 slices, and casts would come beside them.
    """
    m, p = cfg.model, cfg.parallel
    if p.zero == 1 or p.num_microbatches > 1:
        return closed(w)
    scales = w["scales"] if p.gather_dtype == "float8" else {}

    def cast(n: str, a: jax.Array) -> jax.Array:
        if n in scales:
            return gather.rounded_shard(a, scales[n], m.dtype)
        return a if dims.get(n) is None else a.astype(m.dtype)

    return {n: cast(n, a) for n, a in w.items()}


def gathered_weights(w: Tree, dims: dict[str, int | None], cfg: Config) -> Tree:
    """Weights ready to multiply by: gathered here (ZeRO-3), or once before the step (ZeRO-1).

    Those with a scale beside them come as `float8.Weight`, rounded before the gather or after it.
    """
    m, p, w = cfg.model, cfg.parallel, opened_again(w)
    scales, shards = w.pop("scales", {}), w
    if p.gather_dtype == "float8":
        w = {n: a for n, a in w.items() if n not in scales}
    if p.zero == 3:
        w = gather.gather_tree(w, dims, m.dtype, p.grad_reduce)
    for n, scale in scales.items():
        dim = PROJECTIONS[n]
        if p.gather_dtype == "float8":
            values, like = gather.gather_float8(shards[n], scale, dim, m.dtype, p.grad_reduce)
            w[n] = float8.Weight(values, scale, like, m.float8_scaling, dim)
        else:
            w[n] = float8.quantize_weight(w[n], scale, m.float8_scaling, dim)
    return w


def scattered_gradients(grads: Tree, dims: dict[str, int | None], cfg: Config) -> Tree:
    """The transpose of `gathered_weights`; scales have no gradient, nor what adapters lie
    beside."""
    rounded = {n: g.gradient for n, g in grads.items() if isinstance(g, float8.Weight)}
    grads = grads | rounded
    still = {n: None for n in grads if cfg.lora.rank and not lora.is_adapter(n)}
    grads = {n: g for n, g in grads.items() if n not in still}
    if cfg.parallel.zero == 3:
        grads = gather.scatter_tree(grads, dims, cfg.parallel.grad_reduce)
    return of_gradients(grads) | still | ({"scales": None} if rounded else {})
