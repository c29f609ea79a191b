"""Values of users' classes in a config: their fields, JSON, code that is loaded later, errors."""

import dataclasses
import functools
import json
import textwrap
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpar import Loss, PostUpdate, Probe
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.config_file import load_config
from jaxpar.config.serialize import from_json, to_json
from jaxpar.config.validate import check
from jaxpar.config.values import SavedValue, require_code
from tests.tiny import TINY

CODE = """
import jax.numpy as jnp
from jaxpar import Loss, Probe, load_config
from jaxpar.config import Config, TrainConfig

def rms(x):
    return jnp.sqrt(jnp.mean(x**2, -1))

class Focal(Loss):
    gamma: float = 2.0
    sizes: tuple[int, ...] = ()
    def __call__(self, scores, batch):
        return self.gamma * scores.logsumexp()

def get_config():
    probes = (Probe(name="rms", reduce="mean", value=rms),)
    return Config(train=TrainConfig(loss=Focal(gamma=1.5, sizes=(1, 2)), probes=probes))
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(CODE))
    return path


class Doubled(Loss):
    factor: float = 2.0
    mtp_loss = 0.25

    def __call__(self, scores, batch):
        return self.factor * scores.logsumexp()


def test_a_subclass_is_a_frozen_dataclass_whose_assignments_are_defaults():
    value = Doubled(factor=3.0)
    assert value == Doubled(factor=3.0) != Doubled() and hash(value) == hash(Doubled(factor=3.0))
    assert value.mtp_loss == 0.25 and Doubled(mtp_loss=0.5).mtp_loss == 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.factor = 1.0
    with pytest.raises(TypeError):
        Doubled(3.0)
    assert jax.tree.leaves(value) == []


def test_a_decorated_class_is_the_same():
    @jax.tree_util.register_static
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Decorated(Loss):
        factor: float = 2.0

    assert Decorated(factor=1.0).factor == 1.0 and jax.tree.leaves(Decorated()) == []


def test_json_has_names_and_fields_and_reading_it_imports_nothing(file):
    cfg = load_config(str(file))
    saved = json.loads(to_json(cfg))["train"]
    assert saved["loss"]["class"] == "mine.py:Focal" and saved["loss"]["gamma"] == 1.5
    assert saved["probes"][0]["value"] == "mine.py:rms"
    file.unlink()
    read = from_json(to_json(cfg))
    assert isinstance(read.train.loss, SavedValue) and to_json(read) == to_json(cfg)
    with pytest.raises(ConfigError, match=r"mine.py:Focal.*not loaded.*--code mine.py"):
        require_code(read)
    check(read)  # programs that only look at a run do not need it


def test_code_makes_the_values_of_a_saved_config(file):
    cfg = load_config(str(file))
    read = parse_overrides(from_json(to_json(cfg)), ["--code", str(file)])
    assert read == cfg and type(read.train.loss) is type(cfg.train.loss)
    assert read.train.loss.sizes == (1, 2)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            CODE.replace("class Focal", "class Other").replace("=Focal", "=Other"),
            "Focal.*is not in",
        ),
        (
            CODE.replace("gamma: float = 2.0", "alpha: float = 2.0"),
            "gamma.*no field of mine.py:Focal",
        ),
        (CODE.replace("Focal(Loss)", "Focal"), "is no class of values"),
    ],
)
def test_code_of_another_shape_is_one_error(text, match, file, tmp_path):
    saved = to_json(load_config(str(file)))
    other = tmp_path / "other" / "mine.py"
    other.parent.mkdir()
    other.write_text(text.split("def get_config")[0])
    with pytest.raises(ConfigError, match=match):
        parse_overrides(from_json(saved), ["--code", str(other)])


def test_code_without_a_class_of_the_config_is_refused(tmp_path, file):
    saved = from_json(to_json(load_config(str(file))))
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ConfigError, match="has no class or function that the config names"):
        parse_overrides(saved, ["--code", str(tmp_path / "empty.py")])
    with pytest.raises(ConfigError, match="needs a file"):
        parse_overrides(saved, ["--code"])


def test_a_file_that_has_not_changed_is_imported_once(file):
    first, second = load_config(str(file)), load_config(str(file))
    assert first == second and type(first.train.loss) is type(second.train.loss)
    file.write_text(file.read_text() + "\n# changed\n")
    assert type(load_config(str(file)).train.loss) is not type(first.train.loss)


class Twice(PostUpdate):
    def __call__(self, params, before, extra, step):
        return params, extra


class WithSizes(Loss):
    sizes: Any = ()


PLAIN = Doubled(mtp_loss=0.0)


def one_of_each(x):
    return x


def probe(name: str = "a", reduce: str = "max", value: Any = abs, **more: Any) -> Probe:
    return Probe(name=name, reduce=reduce, value=value, **more)


class Max(Probe):
    reduce = "max"

    def __call__(self, x):
        return x


ADAPTERS = {"lora.rank": 2}
REPLICAS = {"diloco.every": 2, "parallel.replica": 2}

#: What is refused, the error, and the same after its fix.
BAD: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"train.loss": Doubled}, r"is a class, not a value.*Doubled\(\)", {"train.loss": PLAIN}),
    ({"train.loss": Twice()}, r"train.loss.*must be a jaxpar.Loss.*loss=", {"train.loss": PLAIN}),
    (
        {"train.loss": lambda scores, batch: scores.label()},
        r"must be a jaxpar.Loss or None.*loss=MyOwn\(\)",
        {"train.loss": PLAIN},
    ),
    (
        {"train.loss": WithSizes(sizes=[1])},
        "WithSizes.sizes.*must be hashable.*a tuple",
        {"train.loss": WithSizes(sizes=(1,))},
    ),
    (
        {"train.loss": Doubled()},
        "Doubled.mtp_loss = 0.25: is train.mtp_loss in a run.*use --train.mtp-loss",
        {"train.loss": PLAIN},
    ),
    (
        {"train.loss": PLAIN, "train.z_loss": 1e-4},
        "train.z_loss.*logsumexp.*use --train.z-loss 0.0",
        {"train.loss": PLAIN, "train.z_loss": 0.0},
    ),
    (
        {"train.loss": PLAIN, "dpo.beta": 0.1},
        "both say what is trained.*use --dpo None",
        {"train.loss": PLAIN, "dpo": None},
    ),
    ({"train.probes": probe()}, "must be a tuple.*,", {"train.probes": (probe(),)}),
    (
        {"train.probes": (probe(reduce=""),)},
        'a.reduce.*must say how tokens are reduced.*use reduce="mean" or',
        {"train.probes": (probe(reduce="mean"),)},
    ),
    (
        {"train.probes": (probe(value=None),)},
        "needs one function, and has none.*use value=FUNCTION",
        {"train.probes": (probe(),)},
    ),
    (
        {"train.probes": (Max(value=abs),)},
        "needs one function, and has two.*leave out value",
        {"train.probes": (Max(),)},
    ),
    (
        {"train.probes": (probe(value=lambda x: x),)},
        r"Probe.value = '.*<lambda>': has no name.*by `def` at the top",
        {"train.probes": (probe(value=one_of_each),)},
    ),
    (
        {"train.probes": (probe(value=functools.partial(one_of_each)),)},
        "Probe.value = '<no name>': has no name",
        {"train.probes": (probe(value=one_of_each),)},
    ),
    (
        {"train.probes": (probe(point="x"),)},
        "no point.*residual",
        {"train.probes": (probe(point="residual"),)},
    ),
    (
        {"train.probes": (probe(point="scores", reduce="mean"),)},
        "a.reduce = 'mean'.*use reduce=\"max\"",
        {"train.probes": (probe(point="scores", reduce="max"),)},
    ),
    (
        {"train.probes": (probe(point="router"),)},
        'needs a model with experts.*use point="feed_forward_input"',
        {"train.probes": (probe(point="feed_forward_input"),)},
    ),
    (
        {"train.probes": (probe(),)} | ADAPTERS,
        "probes are among the trained weights.*use --lora None",
        {"train.probes": (probe(),), "lora": None},
    ),
    (
        {"train.probes": (probe("loss"),)},
        'name of another metric.*use name="loss_2"',
        {"train.probes": (probe("loss_2"),)},
    ),
    (
        {"train.probes": 2 * (probe(),)},
        'name of another metric.*use name="a_2"',
        {"train.probes": (probe(), probe("a_2"))},
    ),
    (
        {"train.post_updates": 2 * (Twice(),)},
        "'twice'.*name of another state.*use key=\"twice_2\"",
        {"train.post_updates": (Twice(), Twice(key="twice_2"))},
    ),
    (
        {"train.post_updates": (Twice(key="ema"),)},
        "'ema'.*name of another state.*use key=\"ema_2\"",
        {"train.post_updates": (Twice(key="ema_2"),)},
    ),
    (
        {"train.post_updates": (Twice(),)} | REPLICAS,
        "replicas differ in their weights.*use --diloco None",
        {"train.post_updates": (Twice(),)} | REPLICAS | {"diloco": None},
    ),
]


@pytest.mark.parametrize(("fields", "match", "fixed"), BAD)
def test_bad_values_are_one_error_whose_fix_helps(fields, match, fixed):
    with pytest.raises(ConfigError, match=match):
        check(replace(TINY, **fields))
    check(replace(TINY, **fixed))


def test_a_config_has_no_values_by_default():
    assert json.loads(to_json(Config()))["train"]["probes"] == []
    assert from_json(to_json(Config())) == Config()
