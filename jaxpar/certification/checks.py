"""Every check of `python -m jaxpar.certify`, in the order in which they run."""

from jaxpar.certification.comparison import MESHES, compare_meshes
from jaxpar.certification.results import Check
from jaxpar.certification.tracing import TRACING, trace_layouts

CHECKS: tuple[tuple[str, Check], ...] = ((TRACING, trace_layouts), (MESHES, compare_meshes))
