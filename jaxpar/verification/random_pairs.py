"""Random batches of packed pairs of responses, for `verify.py` and the tests."""

import numpy as np

from jaxpar.config import Config
from jaxpar.sharding.batch import IGNORED, Batch

#: Most pairs in a row of a random batch, and the share of tokens that belong to prompts.
PAIRS, PROMPTS = 2, 0.3


def max_segments(cfg: Config) -> int | None:
    """Return the bound on documents in a row that the steps of random batches need."""
    return 2 * PAIRS if cfg.dpo.beta else None


def random_pairs(cfg: Config, index: int = 0) -> Batch:
    """Make a batch of one or two pairs a row, of random lengths, on the host, in text order.

    A function of (train.seed, index). Some labels are IGNORED, as those of prompts are, and the
    log probabilities of the reference are random.
    """
    rng = np.random.default_rng((cfg.train.seed, index))
    shape = B, T = cfg.train.global_batch_size, cfg.data.seq_len
    text = rng.integers(0, cfg.model.vocab_size, (B, T + 1), dtype=np.int32)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row in range(B):
        cuts = rng.choice(np.arange(1, T), 2 * (1 + row % PAIRS) - 1, replace=False)
        for document, start in enumerate([0, *sorted(cuts.tolist())]):
            segments[row, start:] = document + 1
            positions[row, start:] = np.arange(T - start)
    last = np.diff(segments, axis=1, append=-1) != 0
    spared = last | (rng.random(shape) < PROMPTS)
    labels = np.where(spared, np.int32(IGNORED), text[:, 1:])
    scores = np.where(spared, 0, -2 * rng.random(shape)).astype(np.float32)
    return Batch(text[:, :T], labels, segments, positions, scores)
