"""The work of `python -m jaxpar.certify`: its devices, its meshes, its checks and their results."""

import difflib
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax

from jaxpar.certification import distances, small_config
from jaxpar.certification.checks import CHECKS, OTHER_DTYPES
from jaxpar.certification.meshes import (
    MOST_DEVICES,
    default_meshes,
    num_devices,
    parse_meshes,
    refuse_rounding,
    resolve_meshes,
    without_mesh,
)
from jaxpar.certification.options import CertifyOptions
from jaxpar.certification.results import Check, Result, Subject
from jaxpar.components.model import in_words
from jaxpar.config import Config, ConfigError, RunConfig
from jaxpar.config.command_line import expand_set_options, parse_overrides
from jaxpar.config.lists.step_sizes import without_schedules
from jaxpar.config.model_source import ModelReader, take_source
from jaxpar.config.rules.paths import with_paths, with_store
from jaxpar.config.rules.run import values_of
from jaxpar.config.validate import check
from jaxpar.model.own_components import computes_itself
from jaxpar.model.parameters import param_specs
from jaxpar.monitoring.certificate import (
    CERTIFICATE_FILE,
    Certificate,
    conditions_of,
    to_values,
)
from jaxpar.objectives.losses import Loss
from jaxpar.objectives.of_pairs import PairObjective
from jaxpar.prediction.startup import check_host
from jaxpar.runtime import exit_codes, tables
from jaxpar.runtime import start as runtime
from jaxpar.runtime.files.outputs import check_file, write_json
from jaxpar.runtime.host_memory import host_memory
from jaxpar.runtime.processes import rendezvous
from jaxpar.sharding.params import count

# --------------------------------------------- Prints the results of `python -m jaxpar.certify`


#: The quantities of a mesh that have a column. Another one has it if it is the worst.
SHOWN = ("initial values", "loss", "gradient", "weights after")

WIDTHS = (14, 8, 25, 25, 48)


def cells(of_mesh: Sequence[Result]) -> list[str]:
    """Return a mesh's results as text: SHOWN, the one of the others nearest its bound, verdict."""
    shown = {name: "-" for name in (*SHOWN, "other")}
    nearest = -1.0
    for result in of_mesh:
        error = f"{result.distance:.1e} {result.where}".strip()
        column = next((name for name in SHOWN if result.what.startswith(name)), "other")
        if column == "initial values":
            error = f"{result.distance:.0f} differ" if result.distance else "same bits"
        if column == "other":
            share = result.distance / result.tolerance if result.tolerance else 0.0
            share = share if result.passed else float("inf")
            if share <= nearest:
                continue
            nearest, error = share, f"{result.distance:.1e} {result.what}"
        shown[column] = error
    return [*shown.values(), "ok" if all(r.passed for r in of_mesh) else "MISMATCH"]


def print_results(results: Iterable[Result | list[Result]], width: int) -> list[Result]:
    """Print the results of a check, each as soon as it is known: a mesh, or a result, a line.

    Args:     width: length of the longest mesh name.
    Returns:  the results.
    """
    found, now = list[Result](), time.monotonic()
    head: tuple[str, ...] = ("mesh", *SHOWN, "other, nearest its bound", "verdict")
    for item in results:
        took, now = time.monotonic() - now, time.monotonic()
        found += item if isinstance(item, list) else [item]
        if isinstance(item, list):
            if head:
                print(tables.line(head, (width, *WIDTHS, 0), left=range(len(head))), flush=True)
            row, head = (item[0].mesh, *cells(item)), ()
            row = (*row[:-1], f"{row[-1]}, {took:.0f} s")
            print(tables.line(row, (width, *WIDTHS, 0), left=range(len(row))), flush=True)
        elif not item.not_run:
            verdict = "ok" if item.passed else "MISMATCH"
            at = ", ".join(filter(None, (item.mesh, item.what, item.where)))
            off = f"{item.distance:.1e} of at most {item.tolerance:.1e}"
            print(f"{item.check}: {at}  {off}  {verdict}, {took:.0f} s", flush=True)
    return found


def run_checks(
    subject: Subject, chosen: Sequence[str] = (), checks: Sequence[tuple[str, Check]] = CHECKS
) -> Iterator[list[Result]]:
    """Run checks, print their results, and yield those of each check.

    Args:     chosen: names of those to run; empty for all.
    """
    width = max(map(len, subject.meshes), default=4)
    for name, run in checks:
        if chosen and name not in chosen:
            yield [Result(name, "", "every comparison", not_run="--check leaves it out")]
        elif name == OTHER_DTYPES and not chosen:
            why = f"the config does not use them; --check {shlex.quote(name)} does"
            yield [Result(name, "", "every comparison", not_run=why)]
        else:
            yield print_results(run(subject), width)


def refuse_unknown(chosen: Sequence[str]) -> None:
    """Raise ConfigError for the name of no check."""
    names = [name for name, _ in CHECKS]
    for name in chosen:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0)[0]
            rule = f"must be one of {', '.join(names)}"
            raise ConfigError("--check", name, rule, f"use --check {shlex.quote(near)}")


def summary(results: Sequence[Result]) -> str:
    """Return what failed, what was not run and why, and how much agrees."""
    lines = [str(result) for result in results if not result.passed]
    lines += [f"not run: {result}" for result in results if result.not_run]
    run = [result for result in results if not result.not_run]
    agree = sum(result.passed for result in run)
    lines.append(f"{agree} of {len(run)} comparisons agree")
    return "\n".join(lines)


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
        f"{distances.update_tolerance(options.tolerance):.1e})",
        f"{n} simulated CPU devices" if kind == "cpu" else f"{n} {kind}",
    )
    print("\n".join(lines), flush=True)


#: Parameters above which a step of the plain reference takes minutes on a CPU.
MAX_PARAMS_ON_CPU = 50_000_000


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
        forms = ((Loss, "plain"), (PairObjective, "plain_loss"))
        own = (isinstance(value, k) and getattr(type(value), n) is not vars(k)[n] for k, n in forms)
        if any(own):
            lines.append(f"{name} was compared with its plain form")
        else:
            lines.append(f"{name} {only_sharding}")
    return lines


def certify(options: CertifyOptions, model_from: ModelReader) -> int:
    """Run every check, print its results, and return the exit code.

    Args:     model_from: reads the model that `--model.from` names.
    """
    asked = with_store(with_paths(options.config.asked(model_from)))
    # On one device, since each mesh is checked by itself.
    check(without_mesh(asked))
    options.config.show(asked)
    refuse_unknown(options.check)
    output = options.output or str(Path(asked.run.dir, CERTIFICATE_FILE))
    check_file("--output", output, CERTIFICATE_FILE)
    conditions = conditions_of(asked)
    cfg = small_config.float32(without_schedules(asked))
    meshes = parse_meshes(options.mesh, cfg.parallel)
    refuse_rounding(meshes, cfg.parallel)
    devices = start_devices(asked.run, max(map(num_devices, meshes.values()), default=MOST_DEVICES))
    left_out: dict[str, str] = {}
    if not meshes:
        meshes, left_out = default_meshes(cfg, len(devices))
    if not options.full:
        cfg = small_config.shrink(cfg, list(meshes.values()))
        others, _ = take_source(list(expand_set_options(options.config.overrides)))
        cfg = small_config.float32(parse_overrides(cfg, others))
    cfg = small_config.thorough(cfg)
    configs, refused = resolve_meshes(cfg, meshes, len(devices), given=bool(options.mesh))
    left_out |= refused
    refuse_large(cfg, configs.values(), devices)
    print_conditions(options, asked, cfg, devices)
    subject = Subject(
        asked,
        cfg,
        configs,
        left_out,
        devices,
        options.steps,
        options.tolerance,
        given=bool(options.mesh),
    )
    with jax.default_matmul_precision("highest"):
        found = run_checks(subject, options.check)
        results = [result for of_check in found for result in of_check]
    print("\n".join([*own_code(cfg), summary(results)]))
    certificate = Certificate.of(options.config.name, asked, conditions, results)
    write_json("--output", output, to_values(certificate))
    print(f"certificate {output}, {certificate.cpu_seconds:,.0f} CPU seconds")
    passed = all(result.passed for result in results)
    return exit_codes.EXIT_OK if passed else exit_codes.EXIT_ERROR
