"""Global batches with what a teacher says of them, from its files."""

import dataclasses
from typing import Any

import numpy as np

from jaxpar.data.loader import Loader
from jaxpar.data.teacher_cache.cache import TeacherCache
from jaxpar.sharding.batch import Batch


class TeacherCacheLoader(Loader):
    """A `Loader` whose batches have `Batch.teacher_ids` and `Batch.teacher_scores`."""

    def __init__(self, *args: Any, **more: Any):
        """As `Loader`. Raises: ConfigError also as `TeacherCache`."""
        super().__init__(*args, **more)
        sources = [source.dataset.fingerprint for source in self.sources]
        self.taught = TeacherCache(self._cfg, sources, self.sequences_per_epoch)

    def _packed_sequences(self, numbers: np.ndarray, pieces: np.ndarray, length: int) -> Batch:
        assert length == self._cfg.data.seq_len  # a rule of the config: sequences are not cut
        batch = super()._packed_sequences(numbers, pieces, length)
        sources, before = self._mixture.places(numbers)
        shape = len(numbers), length, self._cfg.distill.top_k
        ids, scores = np.empty(shape, np.int32), np.empty(shape, np.float32)
        for source in np.unique(sources):
            at = np.flatnonzero(sources == source)
            indices = self._sequences[source](before[at])
            ids[at], scores[at] = self.taught.read(int(source), indices)
        return dataclasses.replace(batch, teacher_ids=ids, teacher_scores=scores)

    def abstract_batch(self, step: int = 0) -> Batch:
        """Return what `batch` returns, without values."""
        plain = super().abstract_batch(step)
        shape = (*plain.tokens.shape, self._cfg.distill.top_k)
        of = lambda dtype: plain.tokens.update(shape=shape, dtype=dtype)  # noqa: E731
        return dataclasses.replace(plain, teacher_ids=of(np.int32), teacher_scores=of(np.float32))
