"""From text to batches: `prepare` writes tokens once, and `Loader` reads them.

Prepare:  documents -> readers, columns -> tokenizer -> writer    (`python -m jaxpar.data prepare`)
          chat -> writer                                          (`prepare-chat`)
          pairs -> writer                                         (`prepare-pairs`)
Formats:  megatron, bin_file -> token_file -> sources             (`inspect`, `convert`)
Train:    sources -> mixture -> packing -> loader                 (batch(step), a pure function)
          sources -> pairs -> pair_loader                         (the same of pairs)
"""

from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.loader import Loader
from jaxpar.data.pair_loader import PairLoader, open_loader
from jaxpar.data.tokenizer import Tokenizer, load_tokenizer

MAY_IMPORT = ("config", "runtime", "sharding")

__all__ = [
    "Loader",
    "PairLoader",
    "TokenDataset",
    "Tokenizer",
    "load_tokenizer",
    "open_loader",
]
