"""Encode what is read, in processes, in order and in bounded memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from jaxpar.data.formats.readers import PIECE_CHARS
from jaxpar.data.processes import Processes
from jaxpar.data.tokenizer import one_thread_per_call


def encoded[Item, Result](
    items: Iterable[tuple[Item, Any, int]],
    encode: Callable[[list[Any]], list[Result]],
    workers: int,
) -> Iterator[tuple[Item, Result]]:
    """Yield items with their results in order, at most two batches per worker ahead.

    Args:     items: what is yielded again, what is encoded of it, and its characters. encode: a
              function that can be sent to a process; it gets the contents of a batch. workers:
              number of processes. 1: this one.
    """
    if workers == 1:
        with one_thread_per_call():
            for batch, contents in _batches(items):
                yield from zip(batch, encode(contents), strict=True)
        return
    waiting: deque[tuple[list[Item], Future[list[Result]]]] = deque()
    with Processes(encode, "encodes", workers) as processes:
        for batch, contents in _batches(items):
            waiting.append((batch, processes.call(contents)))
            if len(waiting) > 2 * workers:
                first, found = waiting.popleft()
                yield from zip(first, found.result(), strict=True)
        for first, found in waiting:
            yield from zip(first, found.result(), strict=True)


def _batches[Item](items: Iterable[tuple[Item, Any, int]]) -> Iterator[tuple[list[Item], list]]:
    batch, contents, num_chars = list[Item](), list[Any](), 0
    for item, content, chars in items:
        batch.append(item)
        contents.append(content)
        num_chars += chars
        if num_chars >= PIECE_CHARS:
            yield batch, contents
            batch, contents, num_chars = [], [], 0
    if batch:
        yield batch, contents
