"""QK-clip."""

from jaxpar.config.features import Declaration

DECLARATION = Declaration(switch="optimizer.qk_clip", reads_scores=True, scopes=("qk_clip",))
