"""Text generation with drafts: as `inference/generation.py`, with several tokens in each pass."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpar.config import Config
from jaxpar.inference.generation import check_positions, padded, slots_for, until_stop
from jaxpar.inference.options import Sampling
from jaxpar.inference.speculative.programs import SpeculativeRows, make_programs


@dataclass
class Drafts:
    """How many drafts the model has accepted, for one call of `generate`."""

    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        """The share that was accepted."""
        return self.accepted / max(self.drafted, 1)


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
    drafts: Drafts | None = None,
) -> Iterator[list[list[int]]]:
    """Generate token ids after each prompt, as `inference.generation.generate`.

    Greedy text is the same. With a temperature, texts are drawn from the same distribution, but
    with other random numbers. SpeculativeRows may get unequal numbers of tokens at a time.

    Args:     cfg: with `model.mtp_depth`. weights: from `weights_for_sampling` with modules.
              drafts: counts what is drafted and accepted.
    """
    tokens, lengths = padded(prompts)
    longest = int(lengths.max())
    check_positions(cfg, longest, max_tokens)
    slots = slots_for(longest, max_tokens)
    programs = make_programs(cfg, mesh, how, slots=slots, vocab_size=vocab_size)
    rows = programs.start(weights, tokens, lengths)
    end = lengths + max_tokens - 1  # the position of a row's last token
    go_on = programs.go_on.lower(weights, rows, end).compile()
    jax.block_until_ready(rows)
    yield [[] for _ in prompts]
    shown, open_rows = lengths, np.ones(len(prompts), bool)
    while True:
        new, shown = _between(rows, shown), np.asarray(rows.position) + 1
        if drafts is not None:
            drafts.drafted = int(np.asarray(rows.drafted).sum())
            drafts.accepted = int(np.asarray(rows.accepted).sum())
        yield [
            until_stop(ids, stop) if going else []
            for ids, going in zip(new, open_rows, strict=True)
        ]
        stopped = np.array([bool(np.isin(ids, sorted(stop)).any()) for ids in new])
        open_rows &= ~stopped & (shown <= end)
        if not open_rows.any():
            return
        rows = go_on(weights, rows, np.where(open_rows, end, 0).astype(np.int32))


def _between(rows: SpeculativeRows, shown: np.ndarray) -> list[np.ndarray]:
    """Return each row's tokens that have not been shown, up to its latest."""
    text, position = np.asarray(rows.text), np.asarray(rows.position)
    return [row[first : last + 1] for row, first, last in zip(text, shown, position, strict=True)]
