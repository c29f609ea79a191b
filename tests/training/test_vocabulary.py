"""model.vocab_size 0: the size of the data's vocabulary, chosen once."""

import pytest

from jaxpar.checkpoint.saving import Checkpointer
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.validate import check, resolve
from jaxpar.data.options import PrepareOptions
from jaxpar.data.prepare.text import prepare
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import init_state
from jaxpar.training.vocabulary import with_vocabulary
from tests.tiny import STATE

pytestmark = pytest.mark.usefixtures("quick_compile")


def configured(tmp_path, **fields) -> Config:
    """A config of bytes: 256, and the end of text."""
    text, data = tmp_path / "a.txt", str(tmp_path / "data")
    text.write_text("some text\n" * 20)
    prepare(PrepareOptions(input=(str(text),), output=data, holdout=0.0))
    places = {"run.dir": str(tmp_path / "run"), "data.path": data}
    return replace(Config(), **(places | {"model.vocab_size": 0} | fields))


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 384),
        ({"parallel.tensor": 2}, 384),
        ({"parallel.tensor": 7}, 896),
        ({"parallel.pipeline": 2, "parallel.tensor": 5}, 640),
    ],
)
def test_the_size_is_that_of_the_data(fields, size, tmp_path, capsys):
    cfg = configured(tmp_path, **fields)
    assert with_vocabulary(cfg).model.vocab_size == size
    said = capsys.readouterr().err
    assert said.startswith(f"vocabulary {size}: the 257 tokens of {tmp_path}/data, in mult")


def test_a_size_that_is_given_stays(tmp_path, capsys):
    cfg = configured(tmp_path, **{"model.vocab_size": 300, "data.path": "nowhere"})
    assert with_vocabulary(cfg) is cfg and capsys.readouterr().err == ""


def test_a_run_keeps_its_size(devices, tmp_path, capsys):
    cfg = configured(tmp_path, **(STATE | {"parallel.data": 1}))
    cfg = resolve(replace(cfg, **{"model.vocab_size": 32}), 1)
    with Checkpointer(cfg) as saver:
        saver.save(init_state(cfg, make_mesh(cfg.parallel, devices[:1])), 1, 1)
    again = with_vocabulary(replace(cfg, **{"model.vocab_size": 0, "parallel.tensor": 3}))
    assert again.model.vocab_size == 32
    assert f"vocabulary 32: that of the run in {cfg.run.dir}" in capsys.readouterr().err


def test_what_cannot_be(tmp_path):
    cfg = configured(tmp_path)
    with pytest.raises(ConfigError, match=r"vocab_size = 0: is that of the training data, which"):
        check(cfg)
    with pytest.raises(ConfigError, match=r"vocab_size = -1: must not be negative"):
        check(replace(cfg, **{"model.vocab_size": -1}))
    with pytest.raises(ConfigError, match=r"vocab_size = 0: must be that of the weights in run\.i"):
        with_vocabulary(replace(cfg, **{"run.init_from": "runs/a"}))
    with pytest.raises(ConfigError, match=r"data\.path = 'nowhere'"):
        with_vocabulary(replace(cfg, **{"data.path": "nowhere"}))
