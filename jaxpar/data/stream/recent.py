"""A cache that holds the most recently used values up to a total size."""

from collections import OrderedDict
from collections.abc import Callable, Hashable


class Recent[Value]:
    """Remembers values by key. The one that was used least recently goes first."""

    def __init__(self, most: int, dropped: Callable[[Value], None] = lambda value: None):
        """
        Args:     most: total size of the values to keep. dropped: called with a value that goes.
        """
        self._most, self._dropped, self._total = most, dropped, 0
        self._held: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()

    def get(self, key: Hashable) -> Value | None:
        """Return the value of a key, or None."""
        found = self._held.get(key)
        if found is None:
            return None
        self._held.move_to_end(key)
        return found[0]

    def keep(self, key: Hashable, value: Value, size: int) -> Value:
        """Remember a value, and forget others; a value above the total is kept alone."""
        self._held[key] = value, size
        self._total += size
        while self._total > self._most and len(self._held) > 1:
            _, (old, freed) = self._held.popitem(last=False)
            self._total -= freed
            self._dropped(old)
        return value
