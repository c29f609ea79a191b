"""Compare ways to sum gradients over replicas: python scripts/measure/slow_link.py --data FOLDER

Trains a small model on four replicas once with each method of `parallel.replica_reduction`, and
with DiLoCo: the same weights at the start, the same batches. Writes losses to OUT/curves.jsonl as
they come, prints a table of losses and bytes sent, and draws OUT/curves.svg. All steps are compiled
first, side by side, in one process; then the methods train one after another.

    python scripts/measure/slow_link.py --data data/stdlib --out runs/slow_link       # 4 GPUs
    python scripts/measure/slow_link.py --data data/stdlib-bytes --shrink --steps 60  # on a CPU

--first N trains N steps in float32 before, and every method continues from their state. --variant
adds a method with other fields:

    python scripts/measure/slow_link.py --first 1000 --variant h10=diloco.every=10

With --times, it instead measures the seconds of a step of each method on two GPUs, on random tokens
and a model like llama_1b; with DiLoCo, of an inner step, and of the outer step of each fragment.
Words that begin with -- and have a dot set fields of the config:

    CUDA_VISIBLE_DEVICES=0,1 python scripts/measure/slow_link.py --times --out runs/slow_link

With --xla-top-k, XLA's kernel finds the elements that top_k sends, in place of jaxpar's. It takes
the largest of each 1,024 elements.
"""

import argparse
import itertools
import json
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from slow_link_report import EVERY, picture, table_of, table_of_times

from jaxpar.certification import traces
from jaxpar.config import Attention, Config, Glu, Layer, Model, replace
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.config_file import load_config
from jaxpar.config.validate import resolve
from jaxpar.data.loader import Loader
from jaxpar.kernels import take_largest
from jaxpar.parallel.replicas import top_k
from jaxpar.prediction.communication import sent_over_replicas
from jaxpar.runtime import provenance
from jaxpar.runtime import start as runtime
from jaxpar.runtime.program import run_program
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.compiled import FirstRunAlone
from jaxpar.step.diloco import trainers
from jaxpar.step.diloco.outer import OuterSteps
from jaxpar.step.diloco.overlap import programs_of_steps, same_program, under_way
from jaxpar.step.diloco.sent import fragment_bytes
from jaxpar.step.diloco.trainers import with_exchange, without_exchange
from jaxpar.step.state import TrainState, abstract_logical, fresh_exchange, init_state
from jaxpar.step.train_step import make_eval_step, make_train_step
from jaxpar.tools.bench import conditions
from jaxpar.tools.bench.outer_steps import Act, mean_step_seconds, time_outer_steps
from jaxpar.training.vocabulary import with_vocabulary

REDUCTION = "parallel.replica_reduction"

#: Fields of each method.
Methods = dict[str, dict[str, Any]]
METHODS: Methods = {
    **{name: {REDUCTION: name} for name in "float32 int8 top_k bfloat16".split()},
    "diloco": {"diloco.every": 50},
    "diloco_overlap": {"diloco.every": 50, "diloco.fragments": 2, "diloco.overlap": 5},
}

_ATTENTION = Attention(num_heads=4, num_kv_heads=2, head_dim=64)

#: The model of the curves: 11 million parameters with a vocabulary of 8,192.
CURVES: dict[str, Any] = {
    "parallel.replica": 4,
    "parallel.data": 1,
    "model": Model(
        d_model=256,
        vocab_size=0,
        layers=[Layer("layers", _ATTENTION, Glu(1024))] * 6,
    ),
    "data.seq_len": 256,
    "train.global_batch_size": 32,
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_steps": 100,
}

#: To try the curves on a CPU.
SHRINK = {
    "run.cpu_devices": 4,
    "model.num_layers": 2,
    "model.d_model": 64,
    "model.layers.mixer": Attention(num_heads=2, num_kv_heads=2, head_dim=32),
    "model.layers.feed_forward": Glu(128),
    "data.seq_len": 64,
    "train.global_batch_size": 8,
    "compute.dtype": "float32",
    "optimizer.learning_rate": 3e-3,
    "optimizer.warmup_steps": 20,
}

#: The model of the times: half of the layers of llama_1b, whose step compiles quickly.
TIMES: dict[str, Any] = {
    "parallel.replica": 2,
    "parallel.data": 1,
    "parallel.zero": 1,
    "parallel.layer_loop": "scan",
    "parallel.remat": "dots",
    "model.num_layers": 8,
    "data.seq_len": 4096,
    "data.document_mask": False,
    "train.global_batch_size": 4,
    "optimizer.warmup_steps": 0,
}

#: Batches of held-out text, and timed steps and those before.
HELD_OUT_BATCHES, TIMED, BEFORE = 20, 5, 3


def configs_of(base: Config, methods: Methods) -> dict[str, Config]:
    """Return the config of each method."""
    return {
        name: resolve(replace(base, **fields), len(jax.devices()))
        for name, fields in methods.items()
    }


def variant(text: str) -> tuple[str, dict[str, Any]]:
    """Parse NAME=FIELD=VALUE,... of --variant."""
    name, _, fields = text.partition("=")
    return name, {
        key: json.loads(value) for key, value in (f.split("=") for f in fields.split(","))
    }


def sent_bytes(cfg: Config) -> float:
    """Return the bytes that a device sends over `replica` in a step, on average."""
    if cfg.diloco:
        return sum(fragment_bytes(cfg)) / cfg.diloco.every
    return sent_over_replicas(cfg)


def compiled(cfgs: dict[str, Config], mesh: Mesh, batch: Any, most: int) -> dict[str, Any]:
    """Compile the train steps of all methods at once: {method: program, or the exception}.

    Args:     most: documents in a sequence.
    """

    def one(lowered: Any) -> Any:
        try:
            return lowered.compile()
        except Exception as error:
            traceback.print_exc()
            return error

    began = time.perf_counter()
    texts: dict[str, str] = {}
    lowered: dict[str, Any] = {}
    for name, cfg in cfgs.items():
        program: Any = make_train_step(cfg, mesh, most)
        step = program.lower(abstract_logical(cfg, mesh), batch)
        texts[name] = step.as_text()  # inner steps of DiLoCo are often the same
        lowered.setdefault(texts[name], step)
    with ThreadPoolExecutor(len(lowered)) as pool:
        found = dict(zip(lowered, pool.map(one, lowered.values()), strict=True))
    print(f"compiled {len(lowered)} steps in {time.perf_counter() - began:.0f} s", flush=True)
    return {name: found[text] for name, text in texts.items()}


# ---------------------------------------------------------------------------------------- curves


def start_from(trained: TrainState | None, cfg: Config, mesh: Mesh) -> TrainState:
    """Return the state in which a method starts: fresh, or a copy of one trained in float32."""
    if trained is None:
        return init_state(cfg, mesh)
    trained = jax.tree.map(jnp.copy, trained)
    if n := trainers.num_trainers(cfg):
        to = jax.tree.map(lambda a: a.sharding, abstract_logical(cfg, mesh))
        found = trainers.with_replicas(trained, 0, n, without_exchange(to))
        return with_exchange(found, fresh_exchange(found.params, cfg, mesh))
    return trained.with_extra(feedback=init_state(cfg, mesh).extra["feedback"])


def train(
    cfg: Config,
    state: TrainState,
    mesh: Mesh,
    program: Any,
    loader: Loader,
    most: int,
    seconds: float,
    write: Callable,
) -> tuple[Any, dict[str, Any]]:
    """Train a method to the end, or for some seconds. Returns the last state, and figures.

    Args:     most: documents in a sequence.
    """
    outer, first = OuterSteps(cfg, mesh), int(state.step)
    outer.compile(state)
    run: dict[int | None, FirstRunAlone] = {None: FirstRunAlone(program)}
    for fragment in programs_of_steps(cfg)[1:]:
        of_it: Any = make_train_step(cfg, mesh, most, fragment=fragment)
        run[fragment] = FirstRunAlone(of_it.lower(state, loader.batch(0)).compile())
    losses: list[float] = []
    waiting: list[Any] = []
    began = time.perf_counter()
    for step, batch in itertools.islice(loader.prefetched(first), cfg.train.num_steps - first):
        fragment = under_way(step, cfg)
        key = None if fragment is None else same_program(cfg, fragment)
        state, metrics = run[key](state, batch)
        state = outer(step + 1, state)
        waiting.append(metrics["loss"])
        if len(waiting) == 2 * EVERY:  # the device stays a few steps ahead
            done, waiting = waiting[:EVERY], waiting[EVERY:]
            losses += map(float, done)
            write({"step": first + len(losses), "loss": statistics.mean(losses[-EVERY:])})
            if time.perf_counter() - began > seconds:
                break
    losses += map(float, waiting)
    took = time.perf_counter() - began
    last = losses[-max(len(losses) // 20, 1) :]
    figures = {"steps": len(losses), "seconds": took, "loss": statistics.mean(last)}
    write({"step": first + len(losses), "loss": statistics.mean(losses[-EVERY:])})
    return state, figures


def held_out_loss(program: Any, params: Any, loader: Loader) -> float:
    """Return the mean loss over held-out text."""
    sums = [program(params, loader.batch(i)) for i in range(HELD_OUT_BATCHES)]
    return float(sum(np.asarray(s) for s, _ in sums) / sum(np.asarray(n) for _, n in sums))


def curves(
    base: Config, methods: Methods, out: Path, seconds: float, before: int
) -> dict[str, Any]:
    """Train with every method, and return their figures.

    Args:     before: steps in float32 from whose state every method starts.
    """
    cfgs = configs_of(with_vocabulary(base), methods)
    first = next(iter(cfgs.values()))
    mesh = make_mesh(first.parallel)
    text, held_out = Loader(first, mesh), Loader(first, mesh, "val")
    most = max(text.max_documents, held_out.max_documents)
    programs = compiled(cfgs, mesh, text.batch(0), most)
    evaluate = make_eval_step(first, mesh, most)
    rows: dict[str, Any] = {}
    trained: TrainState | None = None
    with open(out / "curves.jsonl", "w") as file:
        if before:
            some = replace(cfgs["float32"], **{"train.num_steps": before})
            start = init_state(some, mesh)
            plain, nothing = programs["float32"], lambda _: None
            trained, _ = train(some, start, mesh, plain, text, most, 9e9, nothing)
        for name, cfg in cfgs.items():
            program, rows[name] = programs[name], {"sent": sent_bytes(cfg)}
            if isinstance(program, Exception):
                rows[name]["error"] = str(program)[:300]
                continue

            def write(line: dict[str, Any], name: str = name) -> None:
                file.write(json.dumps({"method": name, **line}) + "\n")
                file.flush()

            try:
                state = start_from(trained, cfg, mesh)
                state, figures = train(cfg, state, mesh, program, text, most, seconds, write)
                figures["held_out"] = held_out_loss(evaluate, state.params, held_out)
            except Exception as error:
                traceback.print_exc()
                figures = {"error": str(error)[:300]}
            rows[name] |= figures
            print(f"{name}: {json.dumps(rows[name])}", flush=True)
            (out / "curves.json").write_text(json.dumps(rows, indent=1) + "\n")
    return rows


# ----------------------------------------------------------------------------------------- times


def times(base: Config, methods: Methods, out: Path) -> dict[str, Any]:
    """Measure a step of every method on random tokens, one after another."""
    cfgs = configs_of(base, methods)
    first = next(iter(cfgs.values()))
    mesh = make_mesh(first.parallel)
    batches = [traces.shard_batch(traces.random_batch(first, i), first, mesh) for i in range(2)]
    rows: dict[str, Any] = {}
    for name, program in compiled(cfgs, mesh, batches[0], 1).items():
        rows[name] = {"sent": sent_bytes(cfgs[name])}
        try:
            if isinstance(program, Exception):
                raise program
            rows[name] |= _timed(cfgs[name], mesh, program, batches)
        except Exception as error:
            traceback.print_exc()
            rows[name]["error"] = str(error)[:300]
        print(f"{name}: {json.dumps(rows[name])}", flush=True)
        (out / "times.json").write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def _timed(cfg: Config, mesh: Mesh, program: Any, batches: list[Any]) -> dict[str, Any]:
    state, run = init_state(cfg, mesh), FirstRunAlone(program)
    seconds, losses = [], []
    for i in range(BEFORE + TIMED):
        began = time.perf_counter()
        state, metrics = run(state, batches[i % 2])
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - began)
        losses.append(float(metrics["loss"]))
    memory, inner = program.memory_analysis(), statistics.median(seconds[BEFORE:])

    def step_of(fragment: int | None) -> Act:
        one = run if fragment is None else make_train_step(cfg, mesh, 1, fragment=fragment)
        return lambda state: one(state, batches[0])[0]

    outer, _ = time_outer_steps(cfg, mesh, state, step_of)
    return {
        **outer,
        "mean_ms": 1e3 * mean_step_seconds(inner, outer),
        "ms": 1e3 * inner,
        "fastest_ms": 1e3 * min(seconds[BEFORE:]),
        "slowest_ms": 1e3 * max(seconds[BEFORE:]),
        "temporary_gib": memory.temp_size_in_bytes / 2**30 if memory else None,
        "losses": losses,
    }


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", default="data/stdlib", metavar="FOLDER", help="token folder (%(default)s)")
    add("--out", type=Path, default=Path("runs/slow_link"), metavar="OUT")
    add("--methods", default=",".join(METHODS), help="separated by commas (%(default)s)")
    add("--steps", type=int, default=2000, help="steps of a curve (%(default)s)")
    add("--first", type=int, default=0, metavar="N", help="steps in float32 before (%(default)s)")
    add("--variant", type=variant, action="append", default=[], help="NAME=FIELD=VALUE,...")
    add("--seconds", type=float, default=60, help="end of a curve (%(default)s)")
    add("--shrink", action="store_true", help="a tiny model on four simulated devices of a CPU")
    add("--times", action="store_true", help="measure the seconds of a step instead")
    add("--xla-top-k", action="store_true", help="top_k by XLA's kernel")
    add("--commit", help="commit to record, if there is no checkout")
    options, others = parser.parse_known_args(argv)
    names = options.methods.split(",")
    if unknown := set(names) - METHODS.keys():
        parser.error(f"--methods knows {', '.join(METHODS)}, not {', '.join(sorted(unknown))}")
    if options.xla_top_k:
        take_largest.MAX_GROUP, top_k.MIN_GROUP = 0, 1024
    if options.first and "float32" not in names:
        parser.error("--first needs float32 among --methods")
    methods = {name: METHODS[name] for name in names} | dict(options.variant)
    if options.times:
        fields = TIMES | (
            SHRINK | {"run.cpu_devices": 2, "model.vocab_size": 512} if options.shrink else {}
        )
        base = replace(load_config("llama_1b"), **fields)
    else:
        fields = CURVES | (SHRINK if options.shrink else {})
        base = replace(Config(), **fields, **{"train.num_steps": options.first + options.steps})
        base = replace(base, **{"data.path": options.data})
    base = parse_overrides(base, others)
    environment = runtime.start(base)
    if options.shrink:  # LLVM's optimizations would take most of the time
        jax.config.update("jax_disable_most_optimizations", True)
    options.out.mkdir(parents=True, exist_ok=True)
    about = conditions.of_this_process(
        environment, options.commit or provenance.checked_out_commit()
    )
    (options.out / "conditions.json").write_text(json.dumps(about, indent=1, default=str) + "\n")
    if options.times:
        print("\n".join(table_of_times(times(base, methods, options.out))))
        return
    rows = curves(base, methods, options.out, options.seconds, options.first)
    print("\n".join(table_of(rows)))
    (options.out / "curves.svg").write_bytes(picture(options.out))


if __name__ == "__main__":
    run_program(main)
