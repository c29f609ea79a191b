"""The moving average of the weights (EMA)."""

from jaxpar.config.features import Declaration

DECLARATION = Declaration(switch="optimizer.ema", has_state=True, storage=("optimizer.ema.dtype",))
