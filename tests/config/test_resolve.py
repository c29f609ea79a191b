"""Fields that follow from others and from the devices."""

import pytest

from jaxpar.config import Config, replace
from jaxpar.config.validate import check, resolve


@pytest.mark.parametrize(
    ("devices", "fields", "count"),
    [
        (1, {}, 16),
        (4, {}, 4),
        (4, {"parallel.tensor": 2}, 8),
        (4, {"parallel.num_microbatches": 4}, 4),
        (4, {"parallel.pipeline": 2, "parallel.virtual_stages": 2}, 8),
    ],
)
def test_the_size_of_microbatches_gives_their_number(devices, fields, count):
    cfg = replace(Config(), **{"train.micro_batch_size": 2}, **fields)
    check(cfg)
    found = resolve(cfg, devices)
    assert found.parallel.num_microbatches == count
    assert resolve(found, devices) == found
