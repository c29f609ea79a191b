"""The shapes of the benchmark of recurrences, and their FLOPs."""

import dataclasses
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.config.numerals import only_digits
from jaxpar.config.rules.limits import MAX_INT
from jaxpar.kernels.recurrence import Shape

RULES = ("delta_rule", "state_space")


@dataclasses.dataclass(frozen=True)
class RecurrenceProblem:
    """A recurrence: H heads that share the queries and keys of G, with states [K, V]."""

    rule: str
    B: int
    T: int
    G: int
    H: int
    K: int
    V: int
    C: int = 64
    dtype: str = "bfloat16"

    @property
    def shape(self) -> Shape:
        """What a backend must support."""
        return Shape(self.C, self.K, self.V, self.dtype)

    @property
    def size(self) -> dict[str, Any]:
        """The fields, for a card."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """The problem in one line."""
        sizes = ", ".join(f"{name} {getattr(self, name)}" for name in "BTGHKVC")
        return f"{self.rule}: {sizes}, {self.dtype}"

    def flops(self, direction: str) -> float:
        """Return the FLOPs of the kernels' matmuls, whole squares of a chunk's tokens included.

        The products of the triangular inverse do not count.
        """
        C, K, V, shared = self.C, self.K, self.V, self.G / self.H
        delta = self.rule == "delta_rule"
        forward = (
            2 * C * K * (1 + delta) * shared + 2 * C * V * (1 + delta) + K * V * (4 + 2 * delta)
        )
        through_states = 2 * C * V * (1 + delta) + K * V * (4 + 2 * delta)
        of_inputs = (2 * C * V + 4 * C * K) * (1 + delta) + K * V * (4 + 2 * delta)
        backward = through_states + of_inputs
        each = {"forward": forward, "backward": backward, "both": forward + backward}[direction]
        return float(self.B * self.T * self.H * each)


#: By name in --shapes: B, T, G, H, K, V of Qwen3-Next's and Nemotron-H's layers.
NAMED = {
    "qwen3_next": RecurrenceProblem("delta_rule", 1, 8192, 16, 32, 128, 128),
    "qwen3_next_rows": RecurrenceProblem("delta_rule", 4, 8192, 16, 32, 128, 128),
    "nemotron_h": RecurrenceProblem("state_space", 1, 8192, 8, 128, 128, 64),
}


def parse(text: str, chunk: int, dtype: str) -> RecurrenceProblem:
    """Return the shape of a name, or of "[RULE:]B,T,G,H,K,V".

    Raises:   ConfigError for anything else.
    """
    if text in NAMED:
        return dataclasses.replace(NAMED[text], C=chunk, dtype=dtype)
    before, colon, rest = text.rpartition(":")
    rule, sizes = before if colon else "delta_rule", rest.split(",")
    numbers = [int(n) for n in sizes if only_digits(n) and 0 < int(n) <= MAX_INT]
    fix = "use --shapes 1,8192,16,32,128,128"
    if rule not in RULES or len(numbers) != len(sizes) or len(sizes) != 6:
        names = ", ".join(NAMED)
        expected = f"must be one of {names}, or B,T,G,H,K,V, or {RULES[1]}:B,T,G,H,K,V"
        raise ConfigError("--shapes", text, expected, fix)
    if numbers[3] % numbers[2]:
        raise ConfigError("--shapes", text, "H must be a multiple of G", fix)
    B, T, G, H, K, V = numbers
    return RecurrenceProblem(rule, B, T, G, H, K, V, chunk, dtype)
