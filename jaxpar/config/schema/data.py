"""The section `data`: tokens, windows and mixtures."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.components.ranges import Range, Reals
from jaxpar.config.rules.limits import MAX_SEQUENCE
from jaxpar.config.schema.items import MixtureWeights, SequenceLength, Source
from jaxpar.config.values import Value


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training and evaluation data."""

    path: str = "data/stdlib"
    """Dataset, or its s3:// address: docs/data.md."""
    cache_dir: str = ""
    """Folder of this host for what is read of datasets in object stores. Empty: a folder of the
    user's cache, ~/.cache/jaxpar/data."""
    cache_gib: Annotated[float, Reals(1)] = 64.0
    """Largest size of data.cache_dir, in GiB. Parts that were not read for longest are deleted."""
    seq_len: Annotated[int, Range(1, MAX_SEQUENCE)] = 1024
    """Tokens per training sequence."""
    length_schedule: tuple[SequenceLength, ...] = ()
    """Lengths of the sequences by step. They divide the longest, seq_len. Empty: seq_len."""
    length_keeps: Literal["tokens", "sequences"] = "tokens"
    """What length_schedule leaves as it is. tokens: shorter sequences are more, so that a step has
    as many tokens. sequences: a step has as many sequences."""
    document_mask: bool = True
    """Restrict attention to a document and restart its positions. False: plain causal attention."""
    prefetch: Annotated[int, Range(1, 1 << 10)] = 2
    """Batches to prepare in the background, ahead of the current step."""
    tokenize_workers: Annotated[int, Range(0, 1 << 10)] = 2
    """Processes that tokenize streamed datasets, for each process of the run. 0: it does itself."""
    source: Value | None = None
    """A `DataSource` of your own, whose batches are trained on in place of those of data.path; set
    in Python. Its tokenizer and its held-out text remain. None: data.path."""
    mixture: tuple[Source, ...] = ()
    """Datasets to mix in place of data.path. Empty: only data.path."""
    mixture_schedule: tuple[MixtureWeights, ...] = ()
    """Other weights of data.mixture after some steps. Empty: the weights stay."""
    held_out: str = ""
    """Dataset to evaluate on. Empty: the held-out splits of the training data."""
    eos_id: int | None = None
    """End-of-document token of files that do not mark documents."""
    token_dtype: Literal["uint8", "uint16", "uint32", "int64"] | None = None
    """Dtype of files that do not tell it. None: by format and model.vocab_size."""
    loss_on: Literal["targets", "all"] = "targets"
    """Tokens of chat data in the loss. targets: the assistant's. all: every token. Other data
    always uses every token."""
