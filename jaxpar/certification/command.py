"""The work of `python -m jaxpar.certify`: its devices, its meshes, and their comparison."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax

from jaxpar.certification import distances, small_config, traces
from jaxpar.certification.distances import rounding_errors
from jaxpar.certification.meshes import num_devices, parse_meshes, refuse_rounding, resolve_meshes
from jaxpar.certification.options import CertifyOptions
from jaxpar.components.attention import Attention
from jaxpar.components.experts import experts_in
from jaxpar.components.model import in_words
from jaxpar.config import Config, ConfigError, Model, RunConfig
from jaxpar.config.command_line import expand_set_options, parse_overrides
from jaxpar.config.lists.step_sizes import without_schedules
from jaxpar.config.model_source import ModelReader, take_source
from jaxpar.config.rules.values import values_of
from jaxpar.config.validate import check
from jaxpar.model.own_components import computes_itself
from jaxpar.model.parameters import param_specs
from jaxpar.objectives.losses import Loss
from jaxpar.planning.startup import check_host
from jaxpar.runtime import exit_codes, tables
from jaxpar.runtime import start as runtime
from jaxpar.runtime.host_memory import host_memory
from jaxpar.runtime.processes import rendezvous
from jaxpar.runtime.stages import stage
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.sharding.params import count

# ----------------------------------------------- Prints the table of `python -m jaxpar.certify`


COLUMNS = ("mesh", "weights at init", "loss", "worst gradient", "weights after", "verdict")


@dataclasses.dataclass(frozen=True)
class MeshRow:
    """The comparison of one mesh."""

    mesh: str
    loss: float
    found: distances.Comparison

    def cells(self) -> tuple[str, ...]:
        """Return the row as text, in the order of COLUMNS."""
        f = self.found
        named = lambda pair: f"{pair[0]:.1e} {pair[1]}" if pair else "-"  # noqa: E731
        init = f"{len(f.differing)} differ" if f.differing else "same bits"
        loss = f"{self.loss:.6f} ({f.loss:.1e})"
        verdict = "MISMATCH" if f.mismatches() else "ok, rounding" if f.is_rounding else "ok"
        return self.mesh, init, loss, named(f.gradient), named(f.update), verdict


def print_conditions(
    options: CertifyOptions, asked: Config, cfg: Config, devices: Sequence[jax.Device]
) -> None:
    """Print what is compared, and in which precision."""
    m, kind, n = cfg.model, devices[0].device_kind, len(devices)
    layers = m.layers
    changed = (
        f" instead of {asked.compute.dtype}" if asked.compute.dtype != cfg.compute.dtype else ""
    )
    lines = (
        f"{options.config.name}{'' if options.full else ', shrunk'}: {count(param_specs(m)):,} "
        f"parameters; d_model {m.d_model}, vocabulary {m.vocab_size}; {in_words(layers)}",
        *map(str, dict.fromkeys(layers)),
        f"{cfg.train.global_batch_size} sequences of {cfg.data.seq_len} tokens a step, random "
        f"packed documents, seed {cfg.train.seed}",
        f"float32{changed}, highest matmul precision, reference attention; tolerance "
        f"{options.tolerance:g} (weights after: "
        f"{distances.update_tolerance(options.tolerance):.1e})"
        + (
            f"; Adam's eps {cfg.optimizer.eps:.1e}"
            if cfg.optimizer.name in ("adamw", "muon")
            else ""
        ),
        f"{n} simulated CPU devices" if kind == "cpu" else f"{n} {kind}",
    )
    print("\n".join(lines), flush=True)


def print_table(rows: Iterable[MeshRow], steps: int, width: int) -> list[str]:
    """Print the rows, each as soon as it is done.

    Args:     width: length of the longest mesh name.
    Returns:  descriptions of all mismatches.
    """
    columns = [f"{c} {steps} steps" if c == "weights after" else c for c in COLUMNS]
    widths, each, wrong = (width, 15, 18, 25, 25, 0), range(len(columns)), list[str]()
    print(tables.line(columns, widths, left=each), flush=True)
    for row in rows:
        print(tables.line(row.cells(), widths, left=each), flush=True)
        wrong += [f"{row.mesh}: {what}" for what in row.found.mismatches()]
    return wrong


#: Parameters above which a step of the plain reference takes minutes on a CPU.
MAX_PARAMS_ON_CPU = 50_000_000


#: Number of simulated devices without --run.cpu-devices and --mesh.
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


def default_meshes(model: Model) -> tuple[str, ...]:
    """Return the meshes to certify if none is named.

    Unequal stages of a model whose layers differ would have whole periods: many layers. A ring
    computes softmax attention alone.
    """
    if experts_in(model):
        return EXPERT_MESHES
    left_out = ["layers_per_stage"] if model.repetition.period > 1 else []
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, Attention)]
    if any(type(mixer).heads is not Attention.heads for mixer in mixers):
        left_out.append("context=ring")
    return tuple(mesh for mesh in DEFAULT_MESHES if not any(part in mesh for part in left_out))


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


def start_devices(run: RunConfig, needed: int) -> list[jax.Device]:
    """Start JAX's backend: the simulated CPU devices of a run, or without the accelerators.

    Args:     needed: CPU devices to simulate if there are no accelerators.
    """
    rendezvous.require_single_process("jaxpar.certify")
    try:
        runtime.start(Config(run=run))
        if not run.cpu_devices:
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
        raise ConfigError("number of parameters", size, rule, "leave out --full")
    for on_mesh in on_meshes:
        check_host(on_mesh, num_devices(on_mesh.parallel), host_memory())


def own_code(cfg: Config) -> list[str]:
    """Say what the comparison proves of a config's own classes."""
    lines, itself = [], "was compared with itself on one device"
    only_sharding = f"{itself}: its sharding is proved, not its mathematics"
    for layer in dict.fromkeys(cfg.model.layers):
        for role, term in (("mixer", layer.mixer), ("feed_forward", layer.feed_forward)):
            if term is not None and computes_itself(term):
                name = f"model.{layer.name}.{role}: {type(term).__name__}"
                lines.append(f"{name} {only_sharding}")
    for path, value in values_of(cfg):
        if path in ("train.callbacks", "data.source", "metrics.sinks"):
            continue
        name = f"{path}: {getattr(value, 'metric', '') or type(value).__name__}"
        if isinstance(value, Loss) and type(value).plain is not Loss.plain:
            lines.append(f"{name} was compared with its plain form")
        else:
            lines.append(f"{name} {only_sharding}")
    return lines


def certify(options: CertifyOptions, model_from: ModelReader) -> int:
    """Compare every mesh, print the table, and return the exit code.

    Args:     model_from: reads the model that `--model.from` names.
    """
    asked = options.config.asked(model_from)
    # On one device, since each mesh is checked by itself.
    check(dataclasses.replace(asked, parallel=parse_meshes(["data=1"], asked.parallel)["data=1"]))
    options.config.show(asked)
    cfg = small_config.float32(without_schedules(asked))
    meshes = parse_meshes(options.mesh or default_meshes(cfg.model), cfg.parallel)
    refuse_rounding(meshes, cfg.parallel)
    if not options.full:
        cfg = small_config.shrink(cfg, list(meshes.values()))
        others, _ = take_source(list(expand_set_options(options.config.overrides)))
        cfg = small_config.float32(parse_overrides(cfg, others))
    cfg = small_config.steady(cfg)
    needed = max(map(num_devices, meshes.values())) if options.mesh else DEFAULT_DEVICES
    devices = start_devices(asked.run, needed)
    configs = resolve_meshes(cfg, meshes, len(devices), given=bool(options.mesh))
    refuse_large(cfg, configs.values(), devices)
    print_conditions(options, asked, cfg, devices)
    with jax.default_matmul_precision("highest"):
        rows = compare_meshes(cfg, configs, devices, options.steps, options.tolerance)
        wrong = print_table(rows, options.steps, max(map(len, configs)))
    for line in own_code(cfg):
        print(line)
    left = len(meshes) - len(configs)
    agree = f"{len(configs)} of {len(meshes)} agree" + f"; {left} not compared" * bool(left)
    print("\n".join(wrong) if wrong else agree)
    return exit_codes.EXIT_ERROR if wrong else exit_codes.EXIT_OK
