"""The work of `python -m jaxpar.profile --bench`."""

import dataclasses
import functools
import hashlib
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpar.config import Config, ConfigError
from jaxpar.config.command_line import expand_set_options
from jaxpar.config.lists.step_sizes import BATCHES, LENGTHS, without_schedules
from jaxpar.config.serialize import to_json
from jaxpar.config.values import to_values
from jaxpar.model.flops import num_params
from jaxpar.monitoring.hlo import collective_bytes
from jaxpar.monitoring.metrics import mfu, peak_memory_gib
from jaxpar.monitoring.profiler import facts_of
from jaxpar.monitoring.routing import RecordedRouting, read_routing
from jaxpar.runtime import exit_codes, provenance
from jaxpar.runtime.files import outputs
from jaxpar.runtime.files.outputs import check_file, check_folder
from jaxpar.runtime.processes import peers, rendezvous
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import describe
from jaxpar.step.compiled import FirstRunAlone
from jaxpar.step.state import TrainState
from jaxpar.tools.bench import conditions, outer_steps, profiled
from jaxpar.tools.bench import steps as timed_steps
from jaxpar.tools.bench.steps import RoutingReplay, cut_short_card, time_steps
from jaxpar.tools.profiling.options import WARM_UP, BenchOptions
from jaxpar.training import elastic
from jaxpar.training.programs import compiled
from jaxpar.training.run import Run


def measure(
    run: Run, steps: int, routing: RecordedRouting | None = None, warm_up: int = WARM_UP
) -> tuple[dict[str, Any], profiled.StartedRun]:
    """Time the train step on consecutive batches.

    Args:     routing: repeated in every step. None: routers choose. warm_up: steps before timing.
    Returns:  the figures (step times, waits for data, compile time, first and last loss, peak
        memory, bytes sent), and the run, for further steps. A signal ends the timing, after which
        the figures are those of the steps so far.
    Raises:   RunError if a signal came before a step was timed.
    """
    state = run.start().state
    began = time.perf_counter()
    batches, example = run.loader.prefetched(0), run.loader.batch(0)
    if routing is not None:
        replay = RoutingReplay(routing, run.cfg, run.mesh)
        batches, example = replay.of_each(batches), replay.of(example)
    train_step = compiled(run, state, example)
    compile_seconds = time.perf_counter() - began
    completed = (run.supplemented(batch) for _, batch in batches)
    first_done = functools.partial(run.startup.ended, "first step")
    with conditions.watch_power(jax.default_backend() == "gpu") as gpus:
        found, state = time_steps(train_step, state, completed, warm_up, steps, gpus, first_done)
    seconds, warm_up = found.seconds, found.begin
    if not seconds:
        rule = f"stopped by {found.cut_short} before a step was timed: there is no card"
        raise exit_codes.RunError(rule)
    outer: dict[str, Any] = {}
    if not found.cut_short:
        step_of = _steps_on(found.batch, run, train_step, state)
        outer, state = outer_steps.time_outer_steps(run.cfg, run.mesh, state, step_of)
    hlo_text = train_step.program.as_text()
    figures = {
        "step_seconds": spread(seconds),
        "data_wait_seconds": spread(found.waits[warm_up:-1]),
        "warm_up_steps": warm_up,
        "steps": len(seconds),
        "compile_seconds": compile_seconds,
        "start_up_seconds": run.startup.seconds,
        "loss": {"first": found.losses[0], "last": found.losses[-1]},
        "peak_memory_gib": peak_memory_gib(),
        **cut_short_card(found, steps),
        **conditions.of_steps(found.done[warm_up:], routing, warm_up),
        **outer,
        **gpus.card(),
        **sent_by(hlo_text),
    }
    first = warm_up + steps + 2  # a step before the warm-up, and the timed ones
    facts = functools.partial(facts_of, run.cfg, train_step.program, describe(run.mesh), first)
    return figures, profiled.StartedRun(train_step, hlo_text, state, batches, facts)


def _steps_on(
    batch: Batch, run: Run, train_step: FirstRunAlone, state: TrainState
) -> Callable[[int | None], outer_steps.Act]:
    """Return what returns the train step on a batch, with the exchange of a fragment or without."""

    def step_of(fragment: int | None) -> outer_steps.Act:
        one = train_step if fragment is None else compiled(run, state, batch, fragment=fragment)
        return lambda now: one(now, batch)[0]

    return step_of


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, minimum, maximum and interquartile range (0 for a single value)."""
    low, high = 0.0, 0.0
    if len(seconds) > 1:
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return {
        "median": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "interquartile": high - low,
    }


def sent_by(hlo_text: str) -> dict[str, Any]:
    """Return the card's entry for the bytes sent; None and the reason if unknown."""
    try:
        return {"collective_bytes": collective_bytes(hlo_text).card()}
    except ValueError as error:
        return {"collective_bytes": None, "collective_bytes_missing": str(error)}


def card(run: Run, measured: dict[str, Any], environment: list[str], commit: str) -> dict[str, Any]:
    """Return the figures with the conditions of the measurement."""
    cfg, devices = run.cfg, jax.device_count()
    tokens = cfg.train.global_batch_size * cfg.data.seq_len
    seconds = outer_steps.mean_step_seconds(measured["step_seconds"]["median"], measured)
    rate = tokens / seconds / devices
    share = lambda causal: mfu(  # noqa: E731
        rate,
        cfg.model,
        cfg.data.seq_len,
        jax.devices()[0].device_kind,
        causal=causal,
        lora=cfg.lora,
    )
    return {
        "tokens_per_second_per_device": rate,
        "mfu_causal": share(True),
        "mfu_full_attention": share(False),
        **measured,
        "parameters": num_params(cfg.model),
        "mesh": describe(run.mesh),
        "attention": run.attention,
        **conditions.of_this_process(environment, commit),
        "config_sha256": hashlib.sha256(to_json(cfg).encode()).hexdigest(),
        "config": to_values(cfg),
    }


def summary(result: dict[str, Any]) -> str:
    """Format the figures in two or three lines."""
    seconds = result["step_seconds"]
    parts = [
        f"{result['tokens_per_second_per_device']:,.0f} tokens/s/device",
        f"step {seconds['median'] * 1e3:.1f} ms "
        f"({seconds['fastest'] * 1e3:.1f} to {seconds['slowest'] * 1e3:.1f}, "
        f"interquartile {seconds['interquartile'] * 1e3:.1f})",
        f"peak {result['peak_memory_gib']:.1f} GiB",
        f"loss {result['loss']['first']:.4f} to {result['loss']['last']:.4f}",
    ]
    if result["mfu_causal"] is not None:
        mfus = f"MFU {result['mfu_causal']:.1%} causal, {result['mfu_full_attention']:.1%} full"
        parts.insert(1, mfus)
    below = [
        f"compiled in {result['compile_seconds']:.1f} s",
        f"data wait {result['data_wait_seconds']['median'] * 1e3:.1f} ms per step",
        profiled.sent_in_words(result),
    ]
    lines = ["   ".join(parts), "   ".join(below), conditions.experts_in_words(result)]
    lines.append(outer_steps.in_words(result))
    lines += [conditions.power_in_words(result), timed_steps.in_words(result)]
    return "\n".join(filter(None, lines))


def config_of(options: BenchOptions) -> Config:
    """Return the config to measure, and check the places of the files to write.

    Raises:   ConfigError for a field that has no effect, or a file that cannot be written.
    """
    cfg = without_schedules(options.config.checked())
    refuse_fields_of_a_run(cfg, options.config.overrides)
    place = rendezvous.detect(cfg, os.environ)
    if (
        place is None or place.process_id == 0
    ):  # only process 0 writes; others may run on other hosts
        check_folder("--trace", options.trace or None)
        check_file("--card", options.card or None)
    return cfg


def refuse_fields_of_a_run(cfg: Config, given_words: Sequence[str]) -> None:
    """Raise ConfigError if the command line sets a field of a run that a benchmark ignores.

    Args:     given_words: the config and its overrides, as on the command line.
    """
    given = {arg.partition("=")[0].replace("_", "-") for arg in expand_set_options(given_words)}
    if "--run.dir" in given:
        fix = "remove it; use --card FILE to write the figures"
        raise ConfigError("run.dir", cfg.run.dir, "has no effect: a benchmark writes no run", fix)
    if "--run.record-routing" in given:
        rule = "has no effect: a benchmark writes no run"
        raise ConfigError("run.record_routing", cfg.run.record_routing, rule, "remove it")
    for path in (BATCHES, LENGTHS):
        if "--" + path.replace("_", "-") in given:
            rule = "has no effect: a benchmark measures steps of the largest size"
            raise ConfigError(path, "", rule, "remove it")
    if "--run.init-from" in given:
        rule = "has no effect: a benchmark starts from fresh weights"
        raise ConfigError("run.init_from", cfg.run.init_from, rule, "remove it")


def bench(options: BenchOptions) -> int:
    """Measure, print the figures, write the card, and return the exit code."""
    cfg = config_of(options)
    routing = read_routing("--routing", options.routing, cfg) if options.routing else None
    cfg, environment = rendezvous.join(cfg)
    cfg = dataclasses.replace(
        cfg,
        checkpoint=dataclasses.replace(
            cfg.checkpoint, every=0, keep_every=0, best="", resume="auto"
        ),
        evaluation=dataclasses.replace(cfg.evaluation, every=0, sets=(), test=False),
        train=dataclasses.replace(cfg.train, early_stop_patience=0),
        run=dataclasses.replace(cfg.run, dir="runs/bench", init_from="", record_routing=()),
    )
    trace = options.trace or None
    profiled.check_profiler(options.profiler, trace)
    run = Run.open(elastic.choose_layout(cfg, cfg.cluster.slow_seconds or 1e6), in_folder=False)
    figures, running = measure(run, options.steps, routing, options.warm_up)
    result = card(run, figures, environment, options.commit or provenance.checked_out_commit())
    peers.log(summary(result))
    to_card = options.card and peers.rank() == 0
    if to_card:  # before the profiler, which may fail
        outputs.write_json("--card", options.card, result)
    if stopped := result.get("cut_short"):
        running.batches.close()
        interrupted = stopped["by"] == signal.SIGINT.name
        return exit_codes.EXIT_INTERRUPTED if interrupted else exit_codes.EXIT_PREEMPTED
    result |= profiled.profile_steps(running, options.profile_steps, trace, options.profiler)
    peers.log(profiled.in_words(result))
    if to_card:
        outputs.write_json("--card", options.card, result)
    return 0
