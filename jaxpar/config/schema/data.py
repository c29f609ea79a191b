"""The section `data`: tokens, windows and mixtures."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.components.ranges import Range, Reals
from jaxpar.config.rules.limits import MAX_SEQUENCE
from jaxpar.config.values import Value


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training and evaluation data."""

    path: str = "data/stdlib"
    """Dataset, its s3:// address, or others (docs/data.md)."""
    cache_dir: str = ""
    """Folder of this host for what is read of datasets in object stores. Empty: a folder of the
    user's cache, ~/.cache/jaxpar/data."""
    cache_gib: Annotated[float, Reals(1)] = 64.0
    """Largest size of data.cache_dir, in GiB. Parts that were not read for longest are deleted."""
    seq_len: Annotated[int, Range(1, MAX_SEQUENCE)] = 1024
    """Tokens per training sequence."""
    length_schedule: str = ""
    """Lengths of the sequences by step: 0:LENGTH;STEP:LENGTH, each after STEP steps. They divide
    the longest, seq_len. Empty: seq_len."""
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
    mixture: str = ""
    """Datasets to mix in place of data.path: PATH:WEIGHT,PATH:WEIGHT. Weights are shares of the
    sequences. Empty: only data.path."""
    mixture_schedule: str = ""
    """Other weights of data.mixture after some steps: STEP:WEIGHT,WEIGHT;STEP:WEIGHT,WEIGHT, one
    weight for each source, in its order. 0 leaves a source out. Empty: the weights stay."""
    held_out: str = ""
    """Dataset to evaluate on. Empty: the held-out splits of the training data."""
    eos_id: int | None = None
    """End-of-document token, for formats that do not mark documents (nanoGPT, llm.c)."""
    loss_on: Literal["targets", "all"] = "targets"
    """Tokens of chat data in the loss. targets: the assistant's. all: every token. Other data
    always uses every token."""
