"""The pages of docs/extend: their code is a config file, and it trains."""

import re
from pathlib import Path

import numpy as np
import pytest

import jaxpar
from jaxpar.certification import distances, small_config, traces
from jaxpar.config import replace
from jaxpar.config.code import with_code
from jaxpar.config.config_file import import_file
from jaxpar.config.serialize import from_json, to_json
from jaxpar.config.validate import check
from tests.slow import slow

PAGES = sorted((Path(__file__).parents[2] / "docs" / "extend").glob("*.md"))


def written(page: str, tmp_path: Path) -> Path:
    """The code of a page, as a config file."""
    text = next(p for p in PAGES if p.stem == page).read_text("utf-8")
    file = tmp_path / f"{page}.py"
    file.write_text("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    return file


@pytest.mark.parametrize("page", [p.stem for p in PAGES])
def test_a_page_is_a_config(page, tmp_path):
    file = written(page, tmp_path)
    cfg = jaxpar.load_config(str(file))
    check(cfg)
    assert with_code(from_json(to_json(cfg)), [str(file)]) == cfg


def test_the_page_of_components(tmp_path):
    module = import_file(str(written("components", tmp_path)))
    assert {layer.feed_forward.d_ff for layer in module.wider().model.layers} == {512}


@pytest.mark.slow  # quicker: test_check.py
def test_the_test_of_the_page_of_components(tmp_path):
    import_file(str(written("components", tmp_path))).test_retention()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("mesh", ["data=2,tensor=2", slow("pipeline=2,num_microbatches=2")])
def test_the_rule_and_the_schedule_of_a_page_on_meshes(mesh, tmp_path, devices):
    from tests.meshes.test_own_code import on_mesh
    from tests.tiny import TINY

    own = jaxpar.load_config(str(written("optimizers", tmp_path))).optimizer
    cfg = replace(TINY, **{"optimizer.name": own.name, "optimizer.schedule": own.schedule})
    cfg = small_config.steady(replace(cfg, **{"optimizer.warmup_steps": 1}))
    batches = [traces.random_batch(cfg, i) for i in range(2)]
    wanted = traces.reference_trace(cfg, batches, 2)
    here, there = on_mesh(mesh, cfg)
    found = traces.mesh_trace(here, there, batches, 2)
    assert not distances.compare(found, wanted, 1e-5).mismatches()


@pytest.fixture
def trainer_of(write_config, tmp_path, only_devices):
    """(overrides) -> a trainer of the tests' tiny config, with what is on the page of runs."""
    own = jaxpar.load_config(str(written("runs", tmp_path)))
    values = {
        "data.source": own.data.source,
        "metrics.sinks": own.metrics.sinks,
    }
    base = jaxpar.load_config(write_config(tmp_path))
    with only_devices(2):
        yield lambda **fields: jaxpar.Trainer(replace(base, **values | fields))


def test_the_page_of_runs(trainer_of):
    """Batches are the source's; the sink has the losses; a run that resumes gets the same ones."""
    fields = {"train.num_steps": 4, "train.log_every": 1, "checkpoint.every": 2}
    trainer = trainer_of(**fields)
    shape = trainer.cfg.train.global_batch_size, trainer.cfg.data.seq_len
    wanted = trainer.cfg.data.source(trainer.cfg.train.seed, 3, shape)
    batches = dict(enumerate(trainer.batches(trainer.init(), 4)))
    np.testing.assert_array_equal(np.asarray(batches[3].tokens), wanted[:, :-1])
    np.testing.assert_array_equal(np.asarray(batches[3].labels), wanted[:, 1:])
    assert trainer.train()
    records = [r for r in jaxpar.read_metrics(trainer.cfg.run.dir) if "loss" in r]
    table = (Path(trainer.cfg.run.dir) / "loss.csv").read_text().split()
    found = {int(step): float(loss) for step, loss in (line.split(",") for line in table)}
    assert found == {r["step"]: pytest.approx(r["loss"], rel=1e-3) for r in records}
    low = trainer_of(**fields | {"train.num_steps": 6})
    assert low.train()
    assert len((Path(low.cfg.run.dir) / "loss.csv").read_text().split()) == 6


def test_the_source_that_iterates_on_the_page_of_runs(trainer_of, tmp_path):
    """A row is a line; what is saved goes on behind its steps, whatever was prefetched."""
    lines = [b"%d: %s\n" % (i, b"ab" * i) for i in range(21)]
    (tmp_path / "lines").write_bytes(b"".join(lines))
    source = import_file(str(written("runs", tmp_path))).Lines(path=str(tmp_path / "lines"))
    fields = {"data.source": source, "train.num_steps": 4, "checkpoint.every": 2}
    trainer = trainer_of(**fields)
    state, rows, length = trainer.init(), trainer.cfg.train.global_batch_size, 32
    for step, batch in enumerate(trainer.batches(state, 4)):
        if step == 3:
            trainer.save(state)
            break
        state, _ = trainer.step(state, batch)
    again = trainer_of(**fields)
    (resumed,) = again.batches(again.load(), 1)
    for found in (batch, resumed):
        for row in range(rows):
            line = np.frombuffer(lines[(3 * rows + row) % len(lines)], np.uint8)[: length + 1]
            wanted = np.full(length, -1)
            wanted[: len(line) - 1] = line[1:]
            np.testing.assert_array_equal(np.asarray(found.labels)[row], wanted)
            tokens = np.asarray(found.tokens)[row][: len(line) - 1]
            np.testing.assert_array_equal(tokens, line[: len(tokens)])


def test_another_source_does_not_resume(trainer_of):
    fields = {"train.num_steps": 2, "checkpoint.every": 1}
    trainer = trainer_of(**fields)
    trainer.train()
    other = type(trainer.cfg.data.source)(letters=3)
    with pytest.raises(jaxpar.ConfigError, match="is not the data of"):
        trainer_of(**fields | {"data.source": other, "train.num_steps": 3}).load()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda shape: np.zeros(shape, np.int32), r"returns the text as int32 \[\d+, \d+\]"),
        (lambda shape: {"tokens": np.zeros(shape, int)}, "returns the arrays tokens"),
        (lambda shape: np.full((shape[0], shape[1] + 1), 10**6), "returns tokens from 1000000"),
        (lambda shape: np.zeros((shape[0], shape[1] + 1)), "returns the text as float64"),
    ],
)
def test_wrong_batches_are_refused(made, message, trainer_of):
    class Wrong(jaxpar.extend.DataSource):
        def __call__(self, seed, step, shape):
            return made(shape)

    with pytest.raises(jaxpar.ConfigError, match=message):
        trainer = trainer_of(**{"data.source": Wrong(), "train.num_steps": 2})
        next(iter(trainer.batches(trainer.init())))


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(
    "mesh", ["data=2,sequence=2", slow("pipeline=2,num_microbatches=2,zero=1,tensor=2")]
)
def test_the_loss_of_pairs_of_a_page_on_meshes(mesh, tmp_path, devices):
    """An objective outside the package, as those in it: the plain model sums each document."""
    from tests.meshes.test_own_code import on_mesh
    from tests.tiny import TINY

    own = import_file(str(written("losses", tmp_path))).of_pairs().train.loss
    cfg = small_config.steady(replace(TINY, **{"train.loss": own}))
    batches = [traces.random_batch(cfg, i) for i in range(2)]
    wanted = traces.reference_trace(cfg, batches, 2)
    here, there = on_mesh(mesh, cfg)
    found = traces.mesh_trace(here, there, batches, 2)
    assert not distances.compare(found, wanted, 1e-5).mismatches()
