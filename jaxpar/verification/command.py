"""The command line of `python -m jaxpar.verify`, and its devices."""

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterable, Sequence

import jax

from jaxpar.config import Config, ConfigError, ModelConfig, RunConfig
from jaxpar.config.command_line import as_called
from jaxpar.config.config_file import load_config
from jaxpar.config.help import asks_help, print_help, topic_of
from jaxpar.config.layout.layer_split import layer_period
from jaxpar.config.rules.limits import MAX_CPU_DEVICES, Range
from jaxpar.model.parameters import param_specs
from jaxpar.planning.fit import check_host
from jaxpar.runtime import start as runtime
from jaxpar.runtime.host_memory import host_memory
from jaxpar.runtime.options import Parser
from jaxpar.runtime.processes import rendezvous
from jaxpar.runtime.stages import stage
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.sharding.params import count
from jaxpar.verification import distances, traces
from jaxpar.verification.meshes import num_devices
from jaxpar.verification.rounding import rounding_errors
from jaxpar.verification.table import MeshRow

PROGRAM = "python -m jaxpar.verify"


#: Parameters above which a step of the plain reference takes minutes on a CPU.
MAX_PARAMS_ON_CPU = 50_000_000


#: Most steps: their batches are kept in memory.
MAX_STEPS = 10_000


#: Number of simulated devices without --devices and --mesh.
DEFAULT_DEVICES = 8


#: The meshes without --mesh: those that fit the devices.
DEFAULT_MESHES = (
    "data=1",
    "data=2",
    "tensor=2",
    "sequence=2",
    "pipeline=2,num_microbatches=4",
    "pipeline=2,num_microbatches=4,layers_per_stage=3,1",
    "replica=2,data=2",
    "data=2,tensor=2,zero=1",
    "data=2,sequence=2,context=ring",
    "pipeline=2,data=2,tensor=2,num_microbatches=2",
    "data=2,sequence=2,tensor=2",
    "pipeline=2,data=2,sequence=2,tensor=2,num_microbatches=2",
)

#: Those of a model with experts: all but the first have 8 or 16 devices. Each axis is beside
#: `expert` with a slack of 0.3, with which most rows go through further rounds, and without.
EXPERT_MESHES = (
    "data=1",
    "data=8",
    "expert=8",
    "expert=4,data=2",
    "expert=4,data=2,expert_dispatch=tokens,expert_slack=0.3",
    "expert=4,data=2,expert_dispatch=rows,expert_slack=0.3",
    "expert=2,data=2,replica=2,num_microbatches=2",
    "expert=4,replica=2,expert_slack=0.3",
    "expert=4,tensor=2,expert_slack=0.3",
    "expert=2,data=2,tensor=2,zero=1",
    "expert=4,sequence=2,expert_slack=0.3",
    "expert=2,data=2,sequence=2",
    "expert=4,pipeline=2,num_microbatches=2,expert_slack=0.3",
    "expert=8,tensor=2",
    "expert=4,data=2,tensor=2,expert_dispatch=rows,expert_slack=0.3",
    "expert=2,data=2,pipeline=2,sequence=2,num_microbatches=2",
)


def default_meshes(model: ModelConfig) -> tuple[str, ...]:
    """Return the meshes to verify if none is named.

    Unequal stages of a model whose layers differ would have whole periods: many layers.
    """
    if model.num_experts:
        return EXPERT_MESHES
    if layer_period(model) > 1:
        return tuple(mesh for mesh in DEFAULT_MESHES if "layers_per_stage" not in mesh)
    return DEFAULT_MESHES


EPILOG = """\
Any other option sets a field of the config: --model.d-model 64. Except for the axes, fields of the
parallel section apply to every mesh that does not set them itself. Exit codes: 0 all agree, 1 a
mismatch, 2 bad input."""


def compare_meshes(
    cfg: Config,
    configs: dict[str, Config],
    devices: Sequence[jax.Device],
    steps: int,
    tolerance: float,
) -> Iterable[MeshRow]:
    """Yield a row for each mesh, as soon as it is done."""
    batches = [traces.random_batch(cfg, i) for i in range(max(steps, 1))]
    with stage("training the reference"):
        wanted = traces.reference_trace(cfg, batches, steps)
    zero = distances.zero_gradients(cfg.model)
    options = traces.QUICK_COMPILE if devices[0].platform == "cpu" else None
    rounding: dict[str, float] = {}
    for name, on_mesh in configs.items():
        mesh = make_mesh(on_mesh.parallel, devices[: math.prod(axis_sizes(on_mesh.parallel))])
        with stage(f"training on {name}"):
            found = traces.mesh_trace(on_mesh, mesh, batches, steps, options)
        compared = distances.compare(found, wanted, tolerance, zero)
        if compared.gradient[0] > tolerance:
            with stage("evaluating the reference in float64"):
                rounding = rounding or rounding_errors(wanted, batches[0], cfg, zero)
            compared = distances.compare(found, wanted, tolerance, zero, rounding)
        yield MeshRow(name, found.loss, compared)


def parse_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options of the program. Returns them, and the rest: overrides of the config.

    `--help` shows the options and a summary of the config, `--help SECTION` the fields of a
    section.
    """
    parser = Parser(
        PROGRAM,
        "Compare the weights, losses, gradients and optimizer steps of meshes with a plain, "
        "unsharded reference, in float32 on random packed documents.",
        usage=f"{as_called(PROGRAM)} CONFIG [--mesh AXIS=N,...] [options] [--section.field V ...]",
        epilog=EPILOG,
        add_help=False,
    )
    add = parser.add_argument
    add("config", metavar="CONFIG", nargs="?", help="name of a config, .py file or run folder")
    add("--mesh", action="append", metavar="AXIS=N,...", help=MESH_HELP)
    told = "optimizer steps; 0: gradients only (%(default)s)"
    parser.whole("--steps", 5, Range(0, MAX_STEPS, 5), help=told)
    add("--shrink", action="store_true", help=SHRINK_HELP)
    add("--tolerance", type=float, default=1e-5, help="maximum relative error (%(default)s)")
    parser.whole("--devices", None, Range(1, MAX_CPU_DEVICES, 8), metavar="N", help=DEVICES_HELP)
    if asks_help(argv):
        topic = topic_of(argv)
        if not topic:
            print(parser.format_help())
        first = argv[0] if not argv[0].startswith("-") else "quickstart"
        print_help(load_config(first), "", "", topic)
        sys.exit(0)
    options, overrides = parser.parse_known_args(argv)
    _check_options(options)
    return options, overrides


MESH_HELP = """\
a mesh to verify; repeat the option for more. Other axes are 1. Other fields of the parallel section
may follow: pipeline=2,num_microbatches=4,virtual_stages=2,zero=1,context=ring. Default: a selection
that fits the devices"""


SHRINK_HELP = """\
first reduce the model to a small one of the same kind: same flags, same ratios of heads and widths,
sizes that the meshes divide. Overrides apply afterwards"""


DEVICES_HELP = """\
simulate N CPU devices. Default: the accelerators that JAX finds; without any, as many CPU devices
as the meshes need"""


def _check_options(options: argparse.Namespace) -> None:
    if options.config is None:
        raise ConfigError("CONFIG", None, "is missing", "begin with a config, such as quickstart")
    if not 0 < options.tolerance < 1:
        raise ConfigError("--tolerance", options.tolerance, "must be between 0 and 1", "use 1e-5")


def start_devices(run: RunConfig, simulated: int, needed: int) -> list[jax.Device]:
    """Start JAX's backend: `simulated` CPU devices, or, if that is 0, the available accelerators.

    Args:     needed: CPU devices to simulate if there are no accelerators.
    """
    rendezvous.require_single_process("jaxpar.verify")
    try:
        runtime.start(Config(run=dataclasses.replace(run, cpu_devices=simulated)))
        if not simulated:
            jax.config.update("jax_num_cpu_devices", needed)
    except RuntimeError:
        pass  # JAX is already running, as in a notebook; `resolve_meshes` checks its devices
    return jax.devices()


def refuse_large(cfg: Config, on_meshes: Iterable[Config], devices: Sequence[jax.Device]) -> None:
    """Raise ConfigError for a model or a batch that is too large for a CPU."""
    if devices[0].platform != "cpu":
        return
    size = count(param_specs(cfg.model))
    if size > MAX_PARAMS_ON_CPU:
        rule = f"must be at most {MAX_PARAMS_ON_CPU} on a CPU, which would take too long"
        raise ConfigError("number of parameters", size, rule, "add --shrink")
    for on_mesh in on_meshes:
        check_host(on_mesh, num_devices(on_mesh.parallel), host_memory())
