"""The two ways in which tokens reach the devices of their experts, as one protocol.

    tokens   every device receives all tokens of the axis       `plan.py`, `tokens.py`
    rows     a row per pair of token and expert is sent         `rows.py`

`Execution.expert_dispatch` chooses. Both are exact, and drop nothing. Without an expert axis,
tokens stay where they are.

    N tokens of a device   k experts per token   n devices of the axis   R rows of a buffer
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol, Self

import jax

from jaxpar.kernels import grouped_matmul as kernels
from jaxpar.parallel.collectives import Axes
from jaxpar.parallel.expert import rows, tokens
from jaxpar.parallel.expert.plan import plan_tokens
from jaxpar.sharding.axes import EXPERT


class Dispatch(Protocol):
    """Where the rows of a round come from, and where their results go."""

    @property
    def axes(self) -> Axes:
        """The mesh axes over which experts are divided."""

    @property
    def tiles(self) -> kernels.Tiles:
        """Which rows of the buffer belong to which expert."""

    @property
    def further_rounds(self) -> jax.Array:
        """How many rounds this device's layer needs after the first: int32."""

    def out(self, x: jax.Array) -> Any:
        """Send values of tokens, [N, D], to the devices of their experts. The transpose: `added`
        and then `home`."""

    def sent_again(self, sent: Any, after: Any) -> tuple[Any, Any]:
        """Send what `out` sent once more, for a backward that has not saved it.

        Args:     after: a tree of arrays that is sent before, since the backward needs it first.
        Returns:  (what `out` returned, after).
        """

    def pairs_out(self, values: jax.Array) -> Any:
        """Send values of pairs of token and expert, [N, k]. The transpose:
        `by_pair`, then `gradient_of_sent`."""

    def permuted(self, sent: Any, take: Callable = kernels.rows_taken) -> Any:
        """Return the token of each row, [R, D], of what `out` sent. Padding has some token.

        Args:     take: copies the rows, with the arguments of `rows_taken`.
        """

    def by_row(self, sent: Any) -> jax.Array:
        """Return the value of each row, [R], of what `pairs_out` sent. Padding has 0."""

    def added(self, y: jax.Array) -> Any:
        """Add up the rows of each token, [R, D], in float32 and in a fixed order, for `home`."""

    def by_pair(self, values: jax.Array) -> jax.Array:
        """Return values of rows, [R], by pair, for `gradient_of_sent`. 0 for pairs without a
        row."""

    def home(self, partial: Any) -> jax.Array:
        """Return the sum for each token, [N, D], at the token's device."""

    def gradient_out(self, d_partial: Any) -> Any:
        """Return the gradient of what `home` brought, as if `out` had sent it."""

    def gradient_of_sent(self, summed: Any, sent: Any) -> Any:
        """Return the gradient of `sent`, which `out` or `pairs_out` returned.

        Args:     summed: the gradient of each token or pair, from `added` or `by_pair`.
        """

    def in_rounds(self, of_round: Callable[[Self], Any], first: Any) -> Any:
        """Return `first`, the sums of this round, plus those of every further round.

        Args:     of_round: plan of a round -> its sums, a tree of arrays. It communicates only by
                  methods of the plan.
        """


def plan_rows(
    experts: jax.Array,
    num_experts: int,
    tile: int,
    slack: float = 1.0,
    by: Literal["tokens", "rows"] = "tokens",
    axes: Axes = (EXPERT,),
) -> Dispatch:
    """Give each pair of token and expert a row: sorted by expert, then by token.

    Args:     experts: int32 [N, k], of this device's tokens. tile: rows of a tile, of which an
              expert's rows begin a new one. slack: rows of the buffers of an expert axis, as a
              multiple of equal shares (`parallel.expert_slack`). by: the dispatch. axes: over
              which experts are divided.
    Returns:  the plan of the first round.
    Communication: over `axes`, as `plan_tokens` or `rows.plan_exchange`.
    """
    if by == "rows" and tokens.group_size(axes) > 1:
        return rows.plan_exchange(experts, num_experts, tile, slack, axes)
    return plan_tokens(experts, num_experts, tile, slack, axes)
