"""The results of evaluations: their names in metrics.jsonl, and their lines."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxpar.config.lists.datasets import HELD_OUT, TEST
from jaxpar.config.schema.optimizer import AVERAGED


class Score(NamedTuple):
    """The result on a set of text."""

    loss: float
    """Nats per labeled token."""
    bits_per_byte: float | None
    """None if the length of the text is unknown."""
    of_pairs: Mapping[str, float] = {}
    """In preference tuning: the other means over pairs (`objectives/pairs.py`), by name."""

    @classmethod
    def of(cls, loss: float, bytes_per_token: float | None) -> "Score":
        """Return the result for a loss on text with this many bytes per token."""
        return cls(loss, None if bytes_per_token is None else loss / math.log(2) / bytes_per_token)

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f"   {self.bits_per_byte:.4f} bits per byte"
        if self.of_pairs:
            right, margin = self.of_pairs["reward_accuracy"], self.of_pairs["reward_margin"]
            return f"{self.loss:.4f}   accuracy {right:.3f}   margin {margin:.3f}"
        return f"{self.loss:.4f}{bits}"


#: The names of the loss and of bits per byte in metrics.jsonl. Those of sets are objects, by set.
NAMES = {
    HELD_OUT: ("held_out_loss", "bits_per_byte"),
    AVERAGED: (f"{AVERAGED}_loss", f"{AVERAGED}_bits_per_byte"),
    TEST: ("test_loss", "test_bits_per_byte"),
}
OF_SETS = ("set_loss", "set_bits_per_byte")


def record_of(scores: Mapping[str, Score]) -> dict[str, Any]:
    """Return the values of a record of metrics.jsonl.

    Args:     scores: by name: HELD_OUT, AVERAGED, TEST, or a set of `evaluation.sets`.
    """
    record: dict[str, Any] = {}
    for name, score in scores.items():
        keys = NAMES.get(name, OF_SETS)
        values = dict(zip(keys, (score.loss, score.bits_per_byte), strict=True))
        prefix = keys[0].removesuffix("loss")
        values |= {f"{prefix}{key}": value for key, value in score.of_pairs.items()}
        for key, value in values.items():
            if value is None:
                continue
            if name in NAMES:
                record[key] = value
            else:
                record.setdefault(key, {})[name] = value
    return record


def lines(scores: Mapping[str, Score]) -> Iterator[str]:
    """Yield a line for each result."""
    words = {HELD_OUT: "held-out loss", TEST: "test loss"}
    words[AVERAGED] = f"held-out loss of the {AVERAGED.upper()}"
    for name, score in scores.items():
        yield f"{words.get(name, f'held-out loss of {name}')} {score}"
