"""From text to batches: `prepare` writes tokens once, and `Loader` reads them.

Prepare:  documents -> readers, columns -> tokenizer -> writer    (`python -m jaxpar.data prepare`)
          parts -> each of them in any process -> manifest        (its plan, and the end)
          chat -> writer                                          (`prepare-chat`)
          pairs -> writer                                         (`prepare-pairs`)
Formats:  megatron, bin_file -> token_file -> sources             (`inspect`, `convert`)
Train:    sources -> mixture -> packing -> loader                 (batch(step), a pure function)
          sources -> pairs                                        (the same of pairs)
Store:    stored -> sources                               (tokens in an object store, cached)
Stream:   text -> stream/ -> sources                              (tokens that are never stored)

Processes that tokenize need no JAX: nothing is imported here.
"""

MAY_IMPORT = ("config", "runtime", "sharding", "stores")
