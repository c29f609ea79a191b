"""Every check of `python -m jaxpar.certify`, in the order in which they run."""

from jaxpar.certification.comparison import MESHES, compare_meshes
from jaxpar.certification.results import Check

CHECKS: tuple[tuple[str, Check], ...] = ((MESHES, compare_meshes),)
