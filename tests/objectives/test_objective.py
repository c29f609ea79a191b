"""Which objective a config has, and what the packages that read it learn."""

import pytest

from jaxpar.config import Config, replace
from jaxpar.config.schema.features import objective_in, objectives
from jaxpar.objectives.losses import NextToken
from jaxpar.objectives.objective import objective_of
from jaxpar.objectives.of_pairs import PairObjective


class Margins(PairObjective):
    """An objective outside the package."""

    scale: float = 1.0

    def measures(self, chosen, rejected):
        return (self.scale * (rejected - chosen))[None]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, "CrossEntropy"),
        ({"model.mtp_depth": 1}, "MultiToken"),
        ({"train.loss": NextToken()}, "OwnLoss"),
        ({"train.loss": Margins(scale=2.0)}, "Margins"),
        ({"dpo.beta": 0.2}, "Dpo"),
    ],
)
def test_the_objective_of_a_config(fields, wanted):
    cfg = replace(Config(), **fields)
    assert type(objective_of(cfg)).__name__ == wanted
    assert (objective_in(cfg) is None) == (wanted in ("CrossEntropy", "MultiToken", "OwnLoss"))


def test_an_objective_outside_the_package_has_what_those_in_it_have():
    own = Margins(scale=2.0)
    assert own.dataset == "pairs"
    assert own.option("too_long", "drop") == "Margins(too_long='drop')"
    assert {row.other.label for row in own.incompatible()} == {"`train.loss`", "`diloco`"}


def test_every_section_of_an_objective_computes_and_has_a_plain_form():
    for name, cls in objectives().items():
        assert cls.section == name and cls.__doc__, name
        for method in ("head", "plain"):
            assert getattr(cls, method).__qualname__ != f"Objective.{method}", (name, method)
