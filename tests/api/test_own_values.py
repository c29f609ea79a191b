"""Values of a user's classes by the Python API."""

import pytest

import jaxpar


class Doubled(jaxpar.Loss):
    factor: float = 2.0

    def __call__(self, scores, batch):
        return self.factor * (scores.logsumexp() - scores.label())


def test_load_config_takes_values_as_they_are():
    own = Doubled(factor=3.0)
    cfg = jaxpar.load_config("quickstart", {"train.loss": own, "train.num_steps": 5})
    assert cfg.train.loss is own and cfg.train.num_steps == 5
    with pytest.raises(jaxpar.ConfigError, match=r"train.loss.*must be a jaxpar.Loss"):
        jaxpar.load_config("quickstart", {"train.loss": 3})
