"""Small corpora and datasets."""

import json
from pathlib import Path

import pytest

from jaxpar.data.options import PrepareOptions
from jaxpar.data.prepare.text import prepare

#: Texts with non-ASCII letters, blank lines, and a forged end of text.
TEXTS = [
    f"Document {i}: naïve café, 日本語, \U0001f600.\r\n\n"
    + "the quick brown fox jumps over the lazy dog\n" * (i % 7)
    + ("<|endoftext|>" if i % 5 == 0 else "")
    for i in range(60)
]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """The documents of `corpus`."""
    return TEXTS


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .jsonl file of `texts`."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS), "utf-8")
    return path


@pytest.fixture(scope="session")
def dataset(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared byte dataset with a large held-out split. Tests must not write to it."""
    output = tmp_path_factory.mktemp("prepared") / "bytes"
    prepare(PrepareOptions(input=(str(corpus),), output=str(output), holdout=0.3))
    return output
