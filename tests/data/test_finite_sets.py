"""Evaluations read finite sets: each sequence once, whatever the batch size and the mesh."""

import json
import math
import shutil

import jax
import numpy as np
import pytest

from jaxpar.config import Config, ParallelConfig, Source, replace
from jaxpar.data.loader import Loader, open_loader
from jaxpar.data.options import PreparePairsOptions
from jaxpar.data.pairs import PairLoader, plan_rows
from jaxpar.data.prepare.records_command import prepare_records
from jaxpar.objectives.pairs import count_pairs
from jaxpar.sharding.batch import IGNORED
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.evaluating import mean_loss

LENGTH = 16

MESHES = {
    "one": {"data": 1},
    "data": {"data": 8},
    "data and sequence": {"data": 2, "sequence": 2},
    "every batch axis": {"replica": 2, "data": 2, "expert": 2, "sequence": 2},
    "tensor and pipeline": {"pipeline": 2, "data": 2, "tensor": 4},
}


def mesh_of(**sizes: int):
    return make_mesh(ParallelConfig(**sizes), jax.devices()[: math.prod(sizes.values())])


def numbered(folder, source: int, count: int) -> str:
    """A file of tokens whose sequences are (1000 * source + their number), LENGTH times."""
    tokens = np.repeat(1000 * source + np.arange(count), LENGTH).astype("<u2")
    path = folder / f"{source}_of_{count}.bin"
    np.append(tokens, tokens[-1]).tofile(path)
    return str(path)


def config(path: str, **more) -> Config:
    values = {
        "data.path": path,
        "data.document_mask": False,
        "data.seq_len": LENGTH,
        "train.global_batch_size": 8,
        "model.vocab_size": 4096,
    }
    return replace(Config(), **values | more)


def labels_of(loader: Loader, most: int) -> list[np.ndarray]:
    """The labels of each batch of the first sequences."""
    return [np.asarray(batch.labels) for batch in loader.once(loader.first_sequences(most))]


def the_label(params, batch):
    """An evaluation step: the sum of all labels, and their number."""
    labels = np.asarray(batch.labels, np.float64)
    return labels[labels != IGNORED].sum(), (labels != IGNORED).sum()


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES.keys())
@pytest.mark.parametrize("count", [1, 5, 8, 9, 17])
def test_each_label_counts_once(count, sizes, tmp_path):
    mesh, path = mesh_of(**sizes), numbered(tmp_path, 0, count)
    for size in (8, 24) if math.prod(sizes.values()) > 1 else (1, 3, 8, 24):
        cfg = config(path, **{"data.held_out": path, "train.global_batch_size": size})
        loader = Loader(cfg, mesh, "val")
        for batches in (1, 2, 64):
            read = min(batches * size, count)
            numbers, labels = loader.first_sequences(batches * size), labels_of(loader, 10**9)
            assert numbers.tolist() == list(range(read))
            assert all(some.shape == (size, LENGTH) for some in labels)
            # Sequence i has LENGTH - 1 labels i and the first token of the next one; the last one
            # of the file has the token after it, which is i too.
            own = np.repeat(np.arange(count), LENGTH)[1 : read * LENGTH + 1]
            own = np.append(own, count - 1) if read == count else own
            wanted = own.astype(np.float64).mean()
            assert mean_loss(the_label, None, loader.once(numbers)) == pytest.approx(wanted)
        assert sum(int((some != IGNORED).sum()) for some in labels) == count * LENGTH


def test_rows_that_complete_a_batch_have_tokens_of_the_vocabulary(tmp_path):
    path = numbered(tmp_path, 0, 5)
    loader = Loader(config(path, **{"data.held_out": path}), mesh_of(data=8), "val")
    (batch,) = loader.once(loader.first_sequences(100))
    assert (np.asarray(batch.labels)[5:] == IGNORED).all()
    assert (np.asarray(batch.tokens) < 5).all() and (np.asarray(batch.segment_ids) == 1).all()


def test_a_mixture_is_read_once_too(tmp_path):
    """By weight as long as all sources have sequences left; what is short is not repeated."""
    folders, counts = [], (3, 40, 9)
    for source, count in enumerate(counts):
        folder = tmp_path / str(source)
        folder.mkdir()
        for split in ("train", "val"):
            shutil.copy(numbered(tmp_path, source, count), folder / f"{split}.bin")
        folders.append(str(folder))
    mixed = tuple(map(Source, folders, (5, 3, 2)))
    cfg = config("", **{"data.path": "", "data.mixture": mixed})
    for most in (8, 16, 512):
        found: list[list[int]] = []
        for sizes in ({"data": 1}, {"data": 4, "sequence": 2}):
            loader = Loader(cfg, mesh_of(**sizes), "val")
            first = [some[:, 0] for some in labels_of(loader, most)]
            found.append([int(label) for some in first for label in some if label != IGNORED])
        assert found[0] == found[1] and len(set(found[0])) == len(found[0])
        assert len(found[0]) == min(most, sum(counts))
        stream = [
            int(loader.host_rows(0, np.array([i])).labels[0, 0]) for i in loader.first_sequences(8)
        ]
        assert found[0][:8] == stream[:8] or len(set(stream)) < 8


def test_bytes_per_token_are_those_of_what_is_read(tmp_path):
    """A source with few sequences counts by them, not by its weight in the mixture."""

    class Known:
        def __init__(self, ratio):
            self.dataset, self.weight = type("Data", (), {"bytes_per_token": ratio}), 0.5

    paths = [numbered(tmp_path, source, count) for source, count in enumerate((2, 30))]
    cfg = config(
        "", **{"data.path": "", "data.mixture": tuple(Source(str(path), 1) for path in paths)}
    )
    loader = Loader(cfg, mesh_of(data=1))
    numbers = loader.first_sequences(32)
    loader.sources = [Known(2.0), Known(4.0)]  # type: ignore[list-item]
    assert loader.bytes_per_token(numbers) == pytest.approx((2 * 2 + 30 * 4) / 32)
    loader.sources = [Known(2.0), Known(None)]  # type: ignore[list-item]
    assert loader.bytes_per_token(numbers) is None


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES.keys())
def test_each_pair_counts_once(sizes, tmp_path):
    lines = [{"prompt": f"{n}?", "chosen": "a" * n, "rejected": "b"} for n in range(1, 40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {"input": (str(tmp_path / "pairs.jsonl"),), "output": str(tmp_path / "out")}
    prepare_records(PreparePairsOptions(**files, tokenizer="bytes", holdout=0.3))
    values = {"dpo.beta": 0.1, "data.seq_len": 128, "data.document_mask": True}
    loader = open_loader(config(files["output"], **values), mesh_of(**sizes), "val")
    assert isinstance(loader, PairLoader)
    (rows,) = loader.sequences_per_epoch
    assert rows % 8
    loader.reference = np.zeros(loader.dataset.num_tokens, np.float32)
    batches = list(loader.once(loader.first_sequences(10**6)))
    assert len(batches) == -(-rows // 8)
    pairs = plan_rows(loader.dataset.document_offsets, 128)
    assert sum(int(count_pairs(jax.device_get(b))) for b in batches) == len(pairs.kept)
    targets = int(np.sum(loader.dataset.targets[:] != 0))
    assert sum(int((np.asarray(b.labels) != IGNORED).sum()) for b in batches) == targets
