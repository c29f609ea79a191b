"""Every check of `python -m jaxpar.certify`, in the order in which they run."""

from collections.abc import Iterator

from jaxpar.certification.checkpoints import checkpoints
from jaxpar.certification.comparison import MESHES, compare_meshes
from jaxpar.certification.data_order import data_order
from jaxpar.certification.evaluations import evaluations
from jaxpar.certification.kernels import kernels
from jaxpar.certification.outer_steps import outer_steps
from jaxpar.certification.results import Check, Result, Subject
from jaxpar.certification.rounding import every_rounding, rounding
from jaxpar.certification.text import text
from jaxpar.certification.tracing import TRACING, trace_layouts
from jaxpar.certification.updates import initial_weights, optimizer, schedule

#: What the config does not ask for: it runs if `--check` names it.
OTHER_DTYPES = "other dtypes"


def _listed(name: str, check: Check) -> tuple[str, Check]:
    """Return a check that says so if it compares nothing."""

    def found(subject: Subject) -> Iterator[Result | list[Result]]:
        nothing = True
        for item in check(subject):
            nothing = False
            yield item
        if nothing:
            yield Result(name, "", "every comparison", not_run="there was nothing to compare")

    return name, found


_EVERY: tuple[tuple[str, Check], ...] = (
    (TRACING, trace_layouts),
    (MESHES, compare_meshes),
    ("initial weights", initial_weights),
    ("schedule", schedule),
    ("optimizer", optimizer),
    ("data order", data_order),
    ("checkpoints", checkpoints),
    ("text", text),
    ("evaluations", evaluations),
    ("outer steps", outer_steps),
    ("rounding", rounding),
    ("kernels", kernels),
    (OTHER_DTYPES, every_rounding),
)

CHECKS: tuple[tuple[str, Check], ...] = tuple(_listed(*one) for one in _EVERY)
