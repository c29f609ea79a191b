"""A teacher's kept tokens: batches with them on every mesh, and what is refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxpar.config import Config, ConfigError, Source, replace
from jaxpar.data.loader import Loader, open_loader
from jaxpar.features.distillation import IDS, SCORES, cache
from jaxpar.features.distillation.cache import (
    About,
    TeacherCacheLoader,
    TeacherFile,
    about_to_json,
    missing_shards,
    shard_path,
)
from tests.data.test_loader import MESHES, assert_same, make_mesh

K, LENGTH = 3, 16


def told(source: int, index: int) -> tuple[np.ndarray, np.ndarray]:
    """What the teacher of these tests says of a sequence."""
    rng = np.random.default_rng([source, index])
    scores = np.sort(rng.standard_normal((LENGTH, K)).astype(np.float32))[:, ::-1]
    return rng.integers(0, 272, (LENGTH, K)), scores


def write(folder: Path, about: About) -> None:
    """Write a complete cache."""
    folder.mkdir()
    (folder / "about.json").write_text(about_to_json(about))
    for source, number in missing_shards(folder, about):
        path = shard_path(folder, source, number)
        path.write_bytes(bytes(cache.size_of(about, source, number)))
        shard = TeacherFile(about, source, number, path, "r+")
        for row in range(about.rows_of(source, number)):
            shard.ids[row], shard.scores[row] = told(source, number * about.rows + row)
            shard.checks[row] = shard.check_of(row)
        for array in (shard.ids, shard.scores, shard.checks):
            array.flush()


@pytest.fixture
def cfg(dataset, tmp_path) -> Config:
    """Reads the shared dataset twice, and a cache of it that is complete."""
    values = {
        "data.mixture": (Source(str(dataset), 3), Source(f"{dataset}/.", 1)),
        "data.seq_len": LENGTH,
        "train.global_batch_size": 8,
        "model.vocab_size": 272,
        "distill.teacher": "runs/teacher",
        "distill.top_k": K,
    }
    live = replace(Config(), **values)
    loader = Loader(live, make_mesh())
    about = About(
        teacher="hash",
        teacher_name="runs/teacher, step 3",
        sources=tuple(source.dataset.fingerprint for source in loader.sources),
        sequences=tuple(loader.sequences_per_epoch),
        seq_len=LENGTH,
        document_mask=True,
        vocab_size=272,
        top_k=K,
        temperature=1.0,
        rows=10,
    )
    write(tmp_path / "cache", about)
    return replace(live, **{"distill.cache": str(tmp_path / "cache")})


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES.keys())
def test_batches_have_what_the_teacher_says(sizes, cfg):
    """Of each row's own sequence, in the order of the sequence axis, over the end of an epoch."""
    order = np.random.default_rng(3).permutation(LENGTH)
    loader = open_loader(cfg, make_mesh(**sizes), "train", lambda length: order)
    assert isinstance(loader, TeacherCacheLoader)
    plain = Loader(cfg, make_mesh(), "train", lambda length: order)
    for step in (0, 5, sum(loader.sequences_per_epoch) // 8 + 3):
        batch = loader.batch(step)
        assert_same(batch, plain.batch(step))
        numbers = np.arange(8 * step, 8 * step + 8)
        sources, before = loader._mixture.places(numbers)
        pairs = [
            told(source, int(loader._sequences[source](np.array([n]))[0]))
            for source, n in zip(sources, before, strict=True)
        ]
        for found, kept in zip((batch.extra[IDS], batch.extra[SCORES]), zip(*pairs, strict=True)):  # noqa: B905
            np.testing.assert_array_equal(np.asarray(found), np.stack(kept)[:, order])
        like = loader.abstract_batch(step)
        assert like.extra[IDS].shape == batch.extra[IDS].shape
        assert like.extra[SCORES].sharding == batch.extra[SCORES].sharding
    assert type(open_loader(cfg, make_mesh(), "val")) is Loader  # which has no teacher


def test_fewer_tokens_are_the_likeliest(cfg):
    """A cache serves each smaller top_k."""
    loader = open_loader(replace(cfg, **{"distill.top_k": 1}), make_mesh())
    whole = open_loader(cfg, make_mesh()).batch(2)
    np.testing.assert_array_equal(loader.batch(2).extra[IDS], whole.extra[IDS][..., :1])


def test_every_byte_is_checked(cfg):
    """A damaged row is an error, which names the file, and never a target."""
    folder = Path(cfg.distill.cache)
    path = shard_path(folder, 1, 0)
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    loader = open_loader(cfg, make_mesh())
    for at in [0, len(whole) - 1, *rng.integers(0, len(whole), 20)]:
        damaged = bytearray(whole)
        damaged[at] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=rf"{path.name}: row \d+ differs from its checksum"):
            loader.taught.read(1, np.arange(10))
    path.write_bytes(whole)
    loader.taught.read(1, np.arange(10))
    other = shard_path(folder, 0, 0)  # rows of another place
    path.write_bytes(other.read_bytes()[: len(whole)])
    with pytest.raises(ConfigError, match=r"row 0 differs|has .* bytes"):
        open_loader(cfg, make_mesh()).taught.read(1, np.arange(1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data.seq_len": 8}, r"data.seq_len = 8: differs from that of distill.cache .*, 16"),
        ({"data.document_mask": False}, r"document_mask = False: differs from that of"),
        ({"model.vocab_size": 512}, r"model.vocab_size = 512: differs from that of"),
        ({"distill.temperature": 2.0}, r"temperature = 2.0: differs from that of"),
        ({"distill.top_k": 4}, r"top_k = 4: is more than distill.cache .* has, 3"),
        (
            {"distill.cache": "nowhere"},
            r"no about.json.*run python -m jaxpar.data teacher with the",
        ),
    ],
)
def test_other_fields_are_refused(fields, message, cfg):
    with pytest.raises(ConfigError, match=message):
        open_loader(replace(cfg, **fields), make_mesh())


def test_other_data_and_missing_files_are_refused(cfg, dataset):
    alone = replace(cfg, **{"data.mixture": (), "data.path": str(dataset)})
    with pytest.raises(ConfigError, match=r"is of other training data"):
        open_loader(alone, make_mesh())
    path = shard_path(Path(cfg.distill.cache), 1, 1)
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(ConfigError, match=rf"1 files are missing, such as {path.name}"):
        open_loader(cfg, make_mesh())
    path.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match=rf"{path.name}: has .* bytes, not"):
        open_loader(cfg, make_mesh())
    about = Path(cfg.distill.cache) / "about.json"
    about.write_text(about.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(ConfigError, match=r"does not describe a teacher's tokens"):
        open_loader(cfg, make_mesh())


def test_a_mesh_of_other_sizes_reads_the_same_files(cfg):
    """Neither batch, seed nor mesh is part of the cache."""
    other = replace(cfg, **{"train.global_batch_size": 4, "train.seed": 5})
    loader = open_loader(other, make_mesh(data=2))
    numbers = np.arange(4)
    sources, before = loader._mixture.places(numbers)
    first = told(sources[0], int(loader._sequences[sources[0]](before[:1])[0]))
    np.testing.assert_array_equal(np.asarray(loader.batch(0).extra[IDS])[0], first[0])
    assert dataclasses.astuple(loader.taught.about)[0] == "hash"
