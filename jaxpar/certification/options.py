"""Options of `python -m jaxpar.certify`, its --mup, and `python -m jaxpar.checkpoint replay`."""

from dataclasses import dataclass
from typing import Annotated

from jaxpar.config import ConfigError
from jaxpar.config.command_line import ConfigArguments
from jaxpar.config.options import Argument, Range, Written
from jaxpar.config.rules.limits import MAX_INT

#: Most steps: their batches are kept in memory.
MAX_STEPS = 10_000


@dataclass(frozen=True, kw_only=True)
class CertifyOptions:
    """Compare the weights, losses, gradients and optimizer steps of meshes with a plain, unsharded
    reference, in float32 on random packed documents."""

    config: ConfigArguments
    mesh: Annotated[tuple[str, ...], Written("AXIS=N,...")] = ()
    """Meshes to certify. Other axes are 1. Other fields of the parallel section may follow:
    pipeline=2,num_microbatches=4,virtual_stages=2,zero=1,context=ring. Empty: a selection that fits
    the devices. Fields of the parallel section of CONFIG apply to every mesh that does not set them
    itself, except for the axes."""
    check: Annotated[tuple[str, ...], Written("NAME")] = ()
    """Checks to run, such as tracing and meshes. Empty: all of them."""
    steps: Annotated[int, Range(0, MAX_STEPS, 3)] = 3
    """Optimizer steps. 0: gradients only."""
    full: bool = False
    """Keep the sizes of CONFIG. Otherwise the model is first reduced to a small one of the same
    kind: the same features, sizes that the meshes divide; options of CONFIG apply afterwards."""
    tolerance: float = 1e-5
    """Maximum relative error."""
    output: Annotated[str | None, Written("FILE")] = None
    """The certificate to write. Default: certificate.json in the folder of CONFIG's run."""

    def __post_init__(self) -> None:
        check_share(self.tolerance, "1e-5")


#: Exponents up to this count as flat: they are noise, and the way to the limit of infinite width.
FLAT = 0.3


@dataclass(frozen=True, kw_only=True)
class MupOptions:
    """Check that activations do not grow with the width of a model: µP's coordinate check.

    Trains the config at several widths, a few steps each, on a batch of random tokens, in float32
    on one device. Prints the mean size of the activations of each kind of layer after the last
    step, and the exponents by which they, and their change since the first step, grow with the
    width. In µP (`model.mup`) all exponents are near 0, except that logits may shrink. In the
    standard parametrization, changes grow.

    Source:   Yang et al. 2022 (2203.03466), appendix D.1.
    """

    config: ConfigArguments
    widths: Annotated[str, Written("N,N,...")] = ""
    """Values of model.d_model. Heads and d_ff grow in proportion. Empty: that of the config, twice
    and four times it."""
    steps: Annotated[int, Range(1, 1000, 4)] = 4
    """Optimizer steps."""
    seeds: Annotated[int, Range(1, 100, 2)] = 2
    """Initial weights to average."""
    sequences: Annotated[int, Range(1, 1024, 4)] = 4
    """Sequences of the batch."""
    length: Annotated[int, Range(2, 1 << 20, 128)] = 128
    """Their tokens."""
    tolerance: float = FLAT
    """Exponents up to this count as flat."""

    def __post_init__(self) -> None:
        check_share(self.tolerance, str(FLAT))


def check_share(tolerance: float, good: str) -> None:
    """Raises:   ConfigError for a tolerance that is not a share."""
    if not 0 < tolerance < 1:
        fix = f"use --tolerance {good}"
        raise ConfigError("--tolerance", tolerance, "must be between 0 and 1", fix)


@dataclass(frozen=True, kw_only=True)
class BisectOptions:
    """Find where two runs part that should agree, and which difference explains it.

    Repeats the steps of both in this process, from the last checkpoint that they share, until their
    bits differ. Names the first microbatch, layer, point and direction of that step, and the
    difference (batch, weights, flag, kernel, mesh, dtype, field or version) with which A's step
    gives B's bits. Writes a page with the distances by layer.
    """

    a: Annotated[str, Argument("A")]
    """Run folder."""
    b: Annotated[str, Argument("B")]
    """Another run folder, or a config, which starts as A did."""
    steps: Annotated[int, Range(1, MAX_INT, 1000)] = 1000
    """Most steps to repeat."""
    code: Annotated[tuple[str, ...], Written("FILE")] = ()
    """Files with the code of users' classes in the configs of runs."""
    output: Annotated[str | None, Written("FILE")] = None
    """The page. Default: A/bisect.html."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Repeat a step of a run, and find out whether data, hardware or numerics made it fail.

    Starts from the checkpoint before the step, with the batches that RUN/recent.jsonl lists, and
    repeats the step several times, also on other devices if there are any. The results are compared
    bit by bit with the record and with each other. No file is written.
    """

    run: Annotated[str, Argument("RUN")]
    """Run folder."""
    step: Annotated[int, Range(1, MAX_INT, 1)]
    """Step to repeat, counted from 1 as in metrics.jsonl."""
    repeat: Annotated[int, Range(1, 1000, 2)] = 2
    """Number of repetitions on the same devices."""
    code: Annotated[tuple[str, ...], Written("FILE")] = ()
    """Files with the code of users' classes in the run's config."""
