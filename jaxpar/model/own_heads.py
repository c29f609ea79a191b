"""The method `heads` of a user's subclass of `Attention`, with its result checked."""

from collections.abc import Callable
from typing import Any

from jaxpar.components.attention import Attention
from jaxpar.config import ConfigError


def own_heads(a: Attention) -> Callable[..., Any] | None:
    """Return the function (q, k, v, mask) -> out of a subclass; None for softmax attention.

    Raises:   ConfigError when the function is called, for a result of another shape or dtype.
    """
    if not a.has_own_heads:
        return None

    def heads(q: Any, k: Any, v: Any, mask: Any) -> Any:
        out = a.heads(q, k, v, mask)
        found = getattr(out, "shape", None), getattr(out, "dtype", None)
        if found != (q.shape, q.dtype):
            shown = f"{found[1]} {found[0]}" if found[1] else type(out).__name__
            rule = f"returns {shown} in place of an array as its queries"
            fix = f"return {q.dtype} {q.shape}"
            raise ConfigError(f"{type(a).__name__}.heads", type(a).__name__, rule, fix)
        return out

    return heads
