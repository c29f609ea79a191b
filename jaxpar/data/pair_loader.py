"""Global batches of pairs of responses, as a pure function of seed and step."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpar.config import Config, ConfigError, flag
from jaxpar.data.formats.meta import PAIRS, TRAIN
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.loader import Loader, check_vocabulary
from jaxpar.data.pairs import PairRows, pack_rows, plan_rows
from jaxpar.data.teacher_cache.loader import TeacherCacheLoader
from jaxpar.sharding.batch import Batch

#: The command that makes a dataset of pairs.
PREPARE_PAIRS = "python -m jaxpar.data prepare-pairs"


class PairLoader(Loader):
    """A `Loader` whose sequences are rows of packed pairs (`pairs.py`)."""

    #: float32 [tokens]: log probability of each target of the split under the reference model, and
    #: 0 of others. None until it is known: batches are then without `Batch.reference`.
    reference: np.ndarray | None = None

    @property
    def dataset(self) -> TokenDataset:
        """The split's only source."""
        return self.sources[0].dataset

    @functools.cached_property
    def rows(self) -> PairRows:
        """The rows of the split."""
        return plan_rows(self.dataset.document_offsets, self._cfg.data.seq_len)

    @property
    def sequences_per_epoch(self) -> list[int]:
        """The number of rows."""
        return [len(self.rows.first) - 1]

    @property
    def max_documents(self) -> int:
        """An upper bound on the segments in a row, a power of two."""
        return 2 << (self.rows.most_pairs - 1).bit_length()

    def _check_fits(self, dataset: TokenDataset) -> None:
        cfg, path = self._cfg, dataset.name
        check_vocabulary(cfg, dataset)
        if dataset.meta is None or dataset.meta.kind != PAIRS or dataset.targets is None:
            rule = f"is not a dataset of pairs, which {flag('dpo.beta', cfg.dpo.beta)} needs"
            raise ConfigError("data.path", path, rule, f"prepare one with `{PREPARE_PAIRS}`")
        rows, seq_len = self.rows, cfg.data.seq_len
        if rows.num_dropped and (cfg.dpo.too_long == "error" or not len(rows.kept)):
            of_all = f"{rows.num_dropped:,} of {dataset.num_documents // 2:,} pairs"
            rule = f"is shorter than {of_all} of {path} ({self.split}); the longest has "
            rule += f"{rows.longest:,} tokens"
            fix = "use " + flag("data.seq_len", -(-rows.longest // 128) * 128)
            if len(rows.kept):
                fix += f", or leave them out with {flag('dpo.too_long', 'drop')}"
            raise ConfigError("data.seq_len", seq_len, rule, fix)

    def _packed_sequences(self, numbers: np.ndarray, pieces: np.ndarray, length: int) -> Batch:
        assert length == self._cfg.data.seq_len  # a rule of the config: rows are not cut
        return self._packed_rows(self._sequences[0](numbers))

    def _packed_rows(self, rows: np.ndarray) -> Batch:
        return pack_rows(self.dataset, self.rows, rows, self._cfg.data.seq_len, self.reference)

    def _without_labels(self, host: Batch, rows: np.ndarray) -> Batch:
        # A pair counts where its first document, of an odd number, begins: such a row has none.
        host = super()._without_labels(host, rows)
        segments = np.where(rows[:, None], np.int32(2), host.segment_ids)
        return dataclasses.replace(host, segment_ids=segments)

    def batch_of_rows(self, rows: np.ndarray) -> Batch:
        """Return a global batch of some rows of the split, like `batch`.

        Args:     rows: int64 [global_batch_size], the same in every process.
        """
        _, count, length = self.sizes.at(0)  # steps of pairs have one size
        host = self._packed_rows(rows[self._rows[count]])
        return self._place(0, self._ordered(host, length))

    def abstract_batch(self, step: int = 0) -> Batch:
        """Return what `batch` returns once the reference is known, without values."""
        plain = super().abstract_batch(step)
        tokens = plain.tokens
        scores = jax.ShapeDtypeStruct(tokens.shape, np.float32, sharding=tokens.sharding)
        return dataclasses.replace(plain, reference=scores)


def open_loader(
    cfg: Config,
    mesh: Mesh,
    split: str = TRAIN,
    order: Callable[[int], np.ndarray | None] = lambda length: None,
) -> Loader:
    """Open the loader of a split: of pairs with `dpo.beta`, and with what a teacher says in the
    training split with `distill.cache`. Args, Raises: as `Loader`; also as `TeacherCacheLoader`.
    """
    if cfg.distill.cache and split == TRAIN:
        return TeacherCacheLoader(cfg, mesh, split, order)
    return (PairLoader if cfg.dpo.beta else Loader)(cfg, mesh, split, order)
