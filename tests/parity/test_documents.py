"""Nothing crosses from one packed document into another: such gradients are exactly zero.

Two documents share a window and no token. With the labels of only one, the gradient of the
embedding rows that only the other one uses must be 0.0, not merely small.
"""

import jax
import numpy as np
import pytest

from jaxpar import parity
from jaxpar.batch import IGNORED, Batch
from jaxpar.config import Config, replace
from jaxpar.parallel.mesh import make_mesh
from jaxpar.state import init_state
from jaxpar.step import make_gradient_step
from jaxpar.validation import resolve
from jaxpar.verify import num_devices, parse_meshes

CFG = replace(
    parity.float32(Config()),
    **{
        "model.num_layers": 2,
        "model.d_model": 16,
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.head_dim": 4,
        "model.d_ff": 24,
        "model.vocab_size": 32,
        "model.init_std": 0.3,
        "data.seq_len": 32,
        "train.global_batch_size": 2,
    },
)

#: The second document starts here: in the middle of a sequence shard, whatever the order.
CUT = 13

MESHES = """
data=1
sequence=2,context=allgather
sequence=2,context=ring
sequence=2,context=ulysses
""".split()


def two_documents(labelled: int) -> Batch:
    """Tokens 0-15 in the first document, 16-31 in the second; labels in one of them."""
    B, T = CFG.train.global_batch_size, CFG.data.seq_len
    rng = np.random.default_rng(0)
    document = np.broadcast_to((np.arange(T) >= CUT).astype(np.int32), (B, T))
    tokens = rng.integers(0, 16, (B, T), dtype=np.int32) + 16 * document
    labels = np.where(document == labelled, np.roll(tokens, -1, axis=1), np.int32(IGNORED))
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)) - CUT * document
    return Batch(tokens, labels, document + 1, positions.astype(np.int32))


@pytest.fixture(scope="module", params=MESHES)
def embedding_gradient(request, devices):
    """(document with labels, document_mask) -> gradient of the embedding, [V, D]."""
    parallel = parse_meshes([request.param], CFG.parallel)[request.param]
    n = num_devices(parallel)
    mesh = make_mesh(parallel, devices[:n])
    jax.config.update("jax_disable_most_optimizations", True)
    params = init_state(resolve(replace(CFG, parallel=parallel), n), mesh).params

    def gradient(labelled: int, document_mask: bool) -> np.ndarray:
        cfg = replace(CFG, parallel=parallel, **{"data.document_mask": document_mask})
        batch = parity.place_batch(two_documents(labelled), resolve(cfg, n), mesh)
        _, grads = make_gradient_step(resolve(cfg, n), mesh)(params, batch)
        return np.asarray(grads["embed"])

    yield gradient
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("labelled", [0, 1])
def test_another_documents_loss_has_no_gradient(labelled, embedding_gradient):
    halves = np.split(embedding_gradient(labelled, True), 2)
    assert np.abs(halves[labelled]).max() > 1e-3
    assert (halves[1 - labelled] == 0.0).all()


def test_without_document_mask_it_has(embedding_gradient):
    first, second = np.split(embedding_gradient(1, False), 2)
    assert np.abs(first).max() > 1e-3
    assert np.abs(second).max() > 1e-3
