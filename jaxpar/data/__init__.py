"""From text to batches: `prepare` writes tokens once, and `Loader` reads them.

Prepare:  documents -> readers, columns -> tokenizer -> writer    (`python -m jaxpar.data prepare`)
          chat -> writer                                          (`prepare-chat`)
          pairs -> writer                                         (`prepare-pairs`)
Formats:  megatron, bin_file -> token_file -> sources             (`inspect`, `convert`)
Train:    sources -> mixture -> packing -> loader                 (batch(step), a pure function)
          sources -> pairs -> pair_loader                         (the same of pairs)
Store:    stored/ -> sources                              (tokens in an object store, cached)
Stream:   text -> stream/ -> sources                              (tokens that are never stored)

A name is imported when it is first used: the processes that tokenize need no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpar.data.formats.tokens import TokenDataset
    from jaxpar.data.loader import Loader
    from jaxpar.data.pair_loader import PairLoader, open_loader
    from jaxpar.data.tokenizer import Tokenizer, load_tokenizer

MAY_IMPORT = ("config", "runtime", "sharding", "stores")

_MODULES = {
    "Loader": "jaxpar.data.loader",
    "PairLoader": "jaxpar.data.pair_loader",
    "TokenDataset": "jaxpar.data.formats.tokens",
    "Tokenizer": "jaxpar.data.tokenizer",
    "load_tokenizer": "jaxpar.data.tokenizer",
    "open_loader": "jaxpar.data.pair_loader",
}

__all__ = [
    "Loader",
    "PairLoader",
    "TokenDataset",
    "Tokenizer",
    "load_tokenizer",
    "open_loader",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxpar.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
