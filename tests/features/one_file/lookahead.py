"""Lookahead: every few steps, the weights return to slow weights, which have followed them.

Source:   Zhang et al. 2019 (1907.08610), algorithm 1.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from jaxpar.components.ranges import Count, Reals
from jaxpar.step.feature import Feature

if TYPE_CHECKING:
    from jaxpar.config import Config
    from jaxpar.step.progress import TrainStep


@dataclass(frozen=True, kw_only=True)
class Lookahead(Feature):
    """Slow weights, to which the trained ones return every few steps (Lookahead)."""

    section = "lookahead"
    turn = 15
    has_state = True
    begins = "the slow weights begin with those of"

    every: Count = 5
    """Steps between returns."""
    share: Annotated[float, Reals(0, 1, above=True)] = 0.5
    """How far the slow weights follow, from 0, not at all, to 1."""

    def extra(self, cfg: "Config", specs: Any) -> Any:
        return specs

    def initial(self, cfg: "Config", params: Any) -> Any:
        import jax

        return jax.tree.map(lambda a: a.copy(), params)

    def after_update(self, s: "TrainStep") -> "TrainStep":
        new, slow = self.moved(s.trainable, s.extra[self.name], s.step)
        return s.replace(trainable=new).with_extra(**{self.name: slow})

    def moved(self, fast: Any, slow: Any, step: Any) -> Any:
        import jax
        import jax.numpy as jnp

        returns = (step + 1) % self.every == 0
        follow = lambda a, w: jnp.where(returns, a + self.share * (w - a), a)  # noqa: E731
        slow = jax.tree.map(follow, slow, fast)
        return jax.tree.map(lambda a, w: jnp.where(returns, a, w), slow, fast), slow

    def plain_state(self, cfg: "Config", params: Any, initialize: Any) -> Any:
        return params

    def plain(
        self, new: Any, before: Any, state: Any, step: Any, batch: Any, cfg: "Config"
    ) -> tuple[Any, Any]:
        return self.moved(new, state, step)


SECTION = Lookahead
