"""Nothing crosses from one packed document into another: not a bit of it.

Two documents share a sequence and no token. With the labels of only one, the gradient of the
embedding rows that only the other one uses must be 0.0, and other tokens there must leave the loss
as it is, bit for bit.
"""

import functools

import numpy as np
import pytest

from jaxpar.certification import traces
from jaxpar.certification.meshes import num_devices, parse_meshes
from jaxpar.config import replace
from jaxpar.config.validate import resolve
from jaxpar.sharding.batch import IGNORED, Batch
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import init_state
from jaxpar.step.train_step import make_gradient_step
from tests.slow import slow_but
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

CFG = replace(TINY, **{"model.vocab_size": 32, "model.init_std": 0.3, "train.global_batch_size": 2})

#: The second document starts here: in the middle of a sequence shard, whatever the order.
CUT = 13

MESHES = """
data=1
sequence=2,context=allgather
sequence=2,context=ring
sequence=2,context=ulysses
""".split()


def two_documents(labeled: int, seeds: tuple[int, int] = (0, 1)) -> Batch:
    """Tokens 0-15 in the first document, 16-31 in the second; labels in one of them."""
    B, T = CFG.train.global_batch_size, CFG.data.seq_len
    document = np.broadcast_to((np.arange(T) >= CUT).astype(np.int32), (B, T))
    of_seed = [np.random.default_rng(seed).integers(0, 16, (B, T), np.int32) for seed in seeds]
    tokens = np.where(document == 0, of_seed[0], of_seed[1] + 16)
    labels = np.where(document == labeled, np.roll(tokens, -1, axis=1), np.int32(IGNORED))
    labels[:, [CUT - 1, T - 1]] = IGNORED
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)) - CUT * document
    return Batch(tokens, labels, document + 1, positions.astype(np.int32))


@pytest.fixture(scope="module", params=slow_but(MESHES[2:], MESHES))
def run(request, devices):
    """(batch, document_mask) -> loss, and gradient of the embedding [V, D]."""
    parallel = parse_meshes([request.param], CFG.parallel)[request.param]
    n = num_devices(parallel)
    mesh = make_mesh(parallel, devices[:n])
    cfg = resolve(replace(CFG, parallel=parallel), n)
    params = init_state(cfg, mesh).params

    @functools.cache
    def step(document_mask: bool):
        return make_gradient_step(replace(cfg, **{"data.document_mask": document_mask}), mesh)

    def compute(batch: Batch, document_mask: bool = True):
        placed = traces.shard_batch(batch, cfg, mesh)
        measured, grads = step(document_mask)(params, placed)
        return float(measured["loss"]), np.asarray(grads["embed"])

    return compute


@pytest.mark.parametrize("labeled", [0, 1])
def test_a_loss_has_no_gradient_in_another_document(labeled, run):
    _, gradient = run(two_documents(labeled))
    halves = np.split(gradient, 2)
    assert np.abs(halves[labeled]).max() > 1e-3
    assert (halves[1 - labeled] == 0.0).all()


@pytest.mark.parametrize("labeled", [0, 1])
def test_a_loss_does_not_depend_on_another_document(labeled, run):
    loss, _ = run(two_documents(labeled))
    seeds = (0, 2) if labeled == 0 else (2, 1)
    changed = two_documents(labeled, seeds)
    assert (changed.tokens != two_documents(labeled).tokens).any()
    assert run(changed)[0] == loss


@pytest.mark.parametrize("run", slow_but(["sequence=2,context=ring"], MESHES), indirect=True)
def test_without_document_mask_both_cross(run):
    loss, gradient = run(two_documents(1), document_mask=False)
    assert all(np.abs(half).max() > 1e-3 for half in np.split(gradient, 2))
    assert run(two_documents(1, seeds=(2, 1)), document_mask=False)[0] != loss
