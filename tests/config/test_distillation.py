"""Rules about distillation."""

import pytest

from jaxpar.config import Config, ConfigError, Source, replace
from jaxpar.config.validate import check

GOOD = replace(Config(), **{"distill.teacher": "runs/teacher", "distill.temperature": 2.0})


def test_what_may_be():
    check(GOOD)
    check(replace(GOOD, **{"distill.weight": 1.0, "distill.top_k": Config().model.vocab_size}))
    check(replace(GOOD, **{"lora.rank": 4, "data.mixture": (Source("a", 1.0), Source("b", 2.0))}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"distill.teacher": ""}, r"must name the run of a teacher.*, or --distill None\."),
        ({"distill.weight": 0.0}, r"distill.weight = 0.0: must be above 0 and at most 1"),
        ({"distill.weight": 1.5}, r"distill.weight = 1.5: must be above 0 and at most 1"),
        ({"distill.temperature": 0.0}, r"distill.temperature = 0.0: must be above 0"),
        ({"distill.top_k": 0}, r"distill.top_k = 0: must be from 1 to model.vocab_size"),
        ({"distill.top_k": 10**6}, r"distill.top_k = 1000000: must be from 1 to model.vocab"),
        ({"dpo.beta": 0.1}, r"teacher = 'runs/teacher': is not supported with dpo.beta = 0.1"),
        ({"model.mtp_depth": 1}, r"mtp_depth = 1: is not .* distill.teacher .*, or --distill None"),
        ({"train.z_loss": 1e-4}, r"z_loss = 0.0001: is not supported with distill.teacher"),
    ],
)
def test_what_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        check(replace(GOOD, **fields))
