"""What is known of features of steps without JAX: what turns them on, what they keep.

What restores, plans and reads profiles looks here, and names no feature.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpar.config import Config, replace, value_of
from jaxpar.config.condition import changed, enabled
from jaxpar.config.schema.features import SECTIONS

if TYPE_CHECKING:
    from jaxpar.config.incompatible import Incompatible


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
    incompatible: Callable[[], "tuple[Incompatible, ...]"] = tuple
    """Returns what it cannot be combined with."""

    def is_on(self, cfg: Config) -> bool:
        return value_of(cfg, self.switch) != value_of(Config(), self.switch)


def _with_average() -> "tuple[Incompatible, ...]":
    from jaxpar.config.incompatible import DILOCO, MASTERS_ON_HOST, Incompatible

    on = enabled("optimizer.ema")
    return (
        Incompatible(on, DILOCO, "inner steps do not change the weights to average"),
        Incompatible(on, MASTERS_ON_HOST, "the weights to average are in host memory"),
    )


def _with_clipped_scores() -> "tuple[Incompatible, ...]":
    from jaxpar.config import incompatible as known

    on, row = changed("optimizer.qk_clip"), known.Incompatible
    normalized = "queries and keys are normalized, whatever the size of their matrices"
    return (
        row(on, known.DILOCO, "the largest logits would be those of all replicas"),
        row(known.QK_NORM, on, normalized),
        row(known.USER_HEADS, on, "it has other logits"),
        row(known.DIFFERENT_HEADS, on, "it measures as many heads in each layer"),
        row(known.BEFORE_STAGES, on, "layers before the stages are not clipped"),
        row(known.MTP, on, "attention in modules is not clipped"),
        row(known.LORA, on, "adapters alone are trained"),
        row(on, known.MASTERS_ON_HOST, "the weights to rescale are in host memory"),
    )


#: The features that have something to declare.
DECLARATIONS = (
    Declaration(
        switch="optimizer.ema",
        has_state=True,
        storage=("optimizer.ema.dtype",),
        incompatible=_with_average,
    ),
    Declaration(
        switch="optimizer.qk_clip",
        reads_scores=True,
        scopes=("qk_clip",),
        incompatible=_with_clipped_scores,
    ),
    *(
        Declaration(
            switch=n, has_state=of.has_state, scopes=of.scopes, incompatible=of.incompatible
        )
        for n, of in SECTIONS.items()
    ),
)


def without_state(cfg: Config) -> Config:
    """Return the config without features that have arrays like the parameters."""
    off = {o.switch: value_of(Config(), o.switch) for o in DECLARATIONS if o.has_state}
    return replace(cfg, **off)


def reads_scores(cfg: Config) -> bool:
    """Whether layers compute attention scores a second time."""
    return any(one.reads_scores and one.is_on(cfg) for one in DECLARATIONS)
