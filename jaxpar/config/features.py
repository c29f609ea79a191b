"""What is known of features of steps without JAX: what turns them on, what they keep.

What restores, plans and reads profiles looks here, and names no feature.
"""

from dataclasses import dataclass

from jaxpar.config import Config, replace, value_of


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """A feature of steps."""

    switch: str
    """The field, or the section, that turns it on by another value than its default."""
    reads_scores: bool = False
    """Whether its layers compute attention scores a second time."""
    has_state: bool = False
    """Whether it has arrays like the parameters in the state."""
    storage: tuple[str, ...] = ()
    """Fields that say how its state is stored, which a run with others converts."""
    scopes: tuple[str, ...] = ()
    """Names that it uses in `jax.named_scope`."""

    def is_on(self, cfg: Config) -> bool:
        return value_of(cfg, self.switch) != value_of(Config(), self.switch)


#: The features that have something to declare.
DECLARATIONS = (
    Declaration(switch="optimizer.ema", has_state=True, storage=("optimizer.ema.dtype",)),
    Declaration(switch="optimizer.qk_clip", reads_scores=True, scopes=("qk_clip",)),
)


def without_state(cfg: Config) -> Config:
    """Return the config without features that have arrays like the parameters."""
    off = {o.switch: value_of(Config(), o.switch) for o in DECLARATIONS if o.has_state}
    return replace(cfg, **off)


def reads_scores(cfg: Config) -> bool:
    """Whether layers compute attention scores a second time."""
    return any(one.reads_scores and one.is_on(cfg) for one in DECLARATIONS)
