"""The command that trains on a dataset, which `prepare` prints."""

from pathlib import Path

import numpy as np

from jaxpar.config import flag
from jaxpar.config.rules.paths import is_address
from jaxpar.data.formats.meta import PAIRS, SPLITS, VAL, Meta, documents_file

#: Tokens of a sequence in `quickstart`.
SEQ_LEN = 256


def train_command(output: str, meta: Meta) -> str:
    """Return the command that trains a small model on a dataset that was written.

    Args:     output: the dataset's folder or address, as given.
    """
    name = output.rstrip("/").rpartition("/")[2]
    flags = [flag("run.dir", f"runs/{name}"), flag("data.path", output)]
    flags.append(flag("model.vocab_size", -(-meta.vocab_size // 128) * 128))
    seq_len = _seq_len(output, meta)
    if seq_len != SEQ_LEN:
        flags.append(flag("data.seq_len", seq_len))
    if meta.kind == PAIRS:
        flags.append(flag("dpo.beta", 0.1))
    if not meta.splits[VAL].num_tokens:
        flags.append(flag("evaluation.every", 0))
    return f"python -m jaxpar.train quickstart {' '.join(flags)}"


def _seq_len(output: str, meta: Meta) -> int:
    """Return a length of sequences that each split has one of, and that holds each pair."""
    found = [split.num_tokens for split in meta.splits.values() if split.num_tokens]
    if meta.kind != PAIRS:
        shorter = (SEQ_LEN, 128, 64, 32, 16, 8, 4, 2)
        return next((n for n in shorter if n < min(found)), 1)  # the last label is one more
    if is_address(output):
        return SEQ_LEN  # the files are not on this host
    lengths = [
        np.diff(np.load(Path(output).expanduser() / documents_file(split), allow_pickle=False))
        for split in SPLITS
        if split in meta.splits and meta.splits[split].num_tokens
    ]
    longest = max(int(one.reshape(-1, 2).sum(axis=1).max()) for one in lengths)
    return max(SEQ_LEN, -(-longest // 64) * 64)
