"""Sequences against a slow loop that says what they mean."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.data.packing import num_sequences
from jaxpar.sharding.batch import IGNORED
from tests.data.sequences import cut_sequences

FIELDS = ("tokens", "labels", "segment_ids", "positions")


def slow_sequence(
    documents: list[list[int]], index: int, seq_len: int, document_mask: bool
) -> list:
    """One sequence, token by token: (token, label, segment, position) of each place."""
    stream = [(token, number) for number, doc in enumerate(documents) for token in doc]
    places, segment, position = [], 1, 0
    for t in range(index * seq_len, (index + 1) * seq_len):
        (token, document), (label, next_document) = stream[t], stream[t + 1]
        if places and document_mask and stream[t - 1][1] != document:
            segment, position = segment + 1, 0
        if document_mask and next_document != document:
            label = IGNORED
        places.append((token, label, segment, position))
        position += 1
    return places


@st.composite
def corpora(draw):
    """Documents of 1 to 12 tokens, a sequence length, and some sequences in any order."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=2, max_size=20))
    token = iter(range(sum(lengths)))
    documents = [[next(token) for _ in range(length)] for length in lengths]
    seq_len = draw(st.integers(1, min(20, sum(lengths) - 1)))
    index = st.integers(0, num_sequences(sum(lengths), seq_len) - 1)
    return documents, seq_len, draw(st.lists(index, min_size=1, max_size=6))


@given(corpora(), st.booleans())
def test_against_the_loop(corpus, document_mask):
    """All four arrays, for every shape of documents and sequences."""
    documents, seq_len, indices = corpus
    tokens = np.array([token for doc in documents for token in doc], np.uint16)
    offsets = np.cumsum([0] + [len(doc) for doc in documents])
    batch = cut_sequences(tokens, offsets, np.array(indices), seq_len, document_mask)
    slow = np.array([slow_sequence(documents, i, seq_len, document_mask) for i in indices])
    for place, name in enumerate(FIELDS):
        array = getattr(batch, name)
        assert array.dtype == np.int32
        np.testing.assert_array_equal(array, slow[:, :, place], err_msg=name)


def test_by_hand():
    """Documents of 3, 4 and 2 tokens, the last of each its end, in sequences of 4."""
    tokens = np.array([1, 2, 0, 3, 4, 5, 0, 6, 0], np.uint16)
    batch = cut_sequences(tokens, np.array([0, 3, 7, 9]), np.array([0, 1]), 4, True)
    np.testing.assert_array_equal(batch.tokens, [[1, 2, 0, 3], [4, 5, 0, 6]])
    np.testing.assert_array_equal(batch.labels, [[2, 0, -1, 4], [5, 0, -1, 0]])
    np.testing.assert_array_equal(batch.segment_ids, [[1, 1, 1, 2], [1, 1, 1, 2]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 0], [0, 1, 2, 0]])


def test_offsets_decide_not_the_end_of_text():
    """An end-of-text id inside a document is a token like any other."""
    tokens = np.zeros(9, np.uint16)
    batch = cut_sequences(tokens, np.array([0, 9]), np.array([0]), 8, True)
    assert (batch.segment_ids == 1).all() and (batch.labels == 0).all()


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)]
)
def test_num_windows(num_tokens, expected):
    """The last label needs a token of its own."""
    assert num_sequences(num_tokens, 4) == expected


def test_large_token_ids():
    """Ids above 2^16 survive."""
    tokens = np.array([70_000, 128_000, 1], np.uint32)
    batch = cut_sequences(tokens, np.array([0, 3]), np.array([0]), 2, True)
    np.testing.assert_array_equal(batch.tokens, [[70_000, 128_000]])
