"""Every check of `python -m jaxpar.certify`, in the order in which they run."""

from jaxpar.certification.checkpoints import checkpoints
from jaxpar.certification.comparison import MESHES, compare_meshes
from jaxpar.certification.data_order import data_order
from jaxpar.certification.kernels import kernels
from jaxpar.certification.results import Check
from jaxpar.certification.rounding import rounding
from jaxpar.certification.text import text
from jaxpar.certification.tracing import TRACING, trace_layouts
from jaxpar.certification.updates import initial_weights, optimizer, schedule

CHECKS: tuple[tuple[str, Check], ...] = (
    (TRACING, trace_layouts),
    (MESHES, compare_meshes),
    ("initial weights", initial_weights),
    ("schedule", schedule),
    ("optimizer", optimizer),
    ("data order", data_order),
    ("checkpoints", checkpoints),
    ("text", text),
    ("rounding", rounding),
    ("kernels", kernels),
)
