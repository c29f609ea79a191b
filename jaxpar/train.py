"""Train a model: python -m jaxpar.train CONFIG [--section.field value ...]

The run folder is all there is to a run. If it holds a checkpoint, the run goes on from there.
"""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar import checkpoint, cli, guard, initial, runtime
from jaxpar.batch import Batch
from jaxpar.config import Config, ConfigError
from jaxpar.config_json import to_json
from jaxpar.data import Loader
from jaxpar.kernels.attention import AttentionMask, Choice, choose, selftest
from jaxpar.metrics import MetricsWriter
from jaxpar.model.block import describe_tokens
from jaxpar.model.flops import num_adapter_params, num_params
from jaxpar.model.remat import names_on_host
from jaxpar.optimizer import learning_rate
from jaxpar.parallel.context import kernel_request, token_order
from jaxpar.parallel.mesh import describe, make_mesh
from jaxpar.planning.forecast import forecast_here
from jaxpar.startup import StartUp
from jaxpar.state import TrainState, bytes_per_device
from jaxpar.step import make_eval_step, make_train_step
from jaxpar.validation import resolve


class Run:
    """A run made ready, with nothing written yet: mesh, data, where to start."""

    def __init__(self, cfg: Config):
        """Raises:   ConfigError for anything that would stop the run later."""
        self.cfg = cfg = resolve(cfg, jax.device_count())
        check_host_copies(cfg, jax.default_backend())
        self.startup = StartUp()
        self.dir = run_folder(cfg)
        self.mesh = make_mesh(cfg.parallel)
        order = token_order(cfg.parallel, cfg.data.seq_len)
        self.loader = Loader(cfg, self.mesh, "train", order)
        splits = [self.loader]
        self.held_out = None
        if cfg.evaluation.every:
            self.held_out = Loader(cfg, self.mesh, "val", order)
            splits.append(self.held_out)
        self.max_segments = max(split.max_documents for split in splits)
        self.first_step = checkpoint.starting_step(cfg)
        self.changed: dict[str, tuple[Any, Any]] = {}
        if self.first_step is not None:
            saved = checkpoint.read_saved(cfg.run.dir, self.first_step)
            checkpoint.check_resumable(cfg, saved)
            self.changed = checkpoint.changed_fields(cfg, saved)
            check_steps(cfg, self.first_step)
        self.origin = initial.find(cfg) if self.first_step is None else None
        self.kernels = self.attention_kernels()
        self.attention = "; ".join(map(str, self.kernels))
        self.startup.ended("data and checks")

    def open_folder(self, environment: list[str]) -> None:
        """Make the run folder and write what the run is: config.json and manifest.json."""
        if jax.process_index() != 0:
            return
        self.dir.mkdir(parents=True, exist_ok=True)
        (self.dir / "config.json").write_text(to_json(self.cfg))
        manifest = runtime.versions() | {
            "mesh": describe(self.mesh),
            "parameters": num_params(self.cfg.model),
            "adapters": num_adapter_params(self.cfg.model, self.cfg.lora),
            "attention": self.attention,
            "environment": environment,
        }
        (self.dir / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        print(
            f"model      {num_params(self.cfg.model):,} parameters, {self.cfg.model.dtype}"
            f"{self.trained}\n"
            f"devices    {manifest['device']}, mesh {manifest['mesh']}\n"
            f"attention  {self.attention}\n"
            f"data       {self.data}\n"
            f"run        {self.dir}" + "".join(f"\nset        {item}" for item in environment),
            flush=True,
        )

    def attention_kernels(self) -> tuple[Choice, ...]:
        """The attention kernels that this run's layers will use, and why not others; for each kind.

        Raises:   ConfigError when those of `model.attention_backend` cannot serve.
        """
        m, p = self.cfg.model, self.cfg.parallel
        ways = p.replica * p.data * p.expert * p.num_microbatches
        shard = (self.cfg.train.global_batch_size // ways, self.cfg.data.seq_len // p.sequence)
        rows = jax.ShapeDtypeStruct(shard, "int32")
        masks = jax.eval_shape(self.masks, Batch(rows, rows, rows, rows))
        requests = [kernel_request(self.cfg, mask) for mask in masks]
        name, exact = m.attention_backend, m.attention_deterministic
        try:
            return tuple(choose(name, *request, deterministic=exact) for request in requests)
        except ValueError as error:
            fix = "use --model.attention-backend auto"
            raise ConfigError("model.attention_backend", name, str(error), fix) from error

    @property
    def trained(self) -> str:
        """What is trained, where that is not the model itself."""
        size, lora = num_adapter_params(self.cfg.model, self.cfg.lora), self.cfg.lora
        text = f"\ntrained    {size:,} parameters of adapters, rank {lora.rank} on {lora.targets}"
        return text if size else ""

    @property
    def data(self) -> str:
        """What is trained on, and how often by the end: a line for each source."""
        epochs, total = self.loader.epochs(self.cfg.train.num_steps), self.loader.sources
        share = sum(source.weight for source in total)
        lines = [
            f"{source.dataset.path}, {source.dataset.num_tokens:,} tokens"
            + (f", {source.weight / share:.2%} of the windows" if len(total) > 1 else "")
            + f", {epochs[str(source.dataset.path)]:.3g} epochs"
            for source in total
        ]
        return "\n           ".join(lines)

    def masks(self, batch: Batch) -> tuple[AttentionMask, ...]:
        """The masks of some of the run's tokens, as its layers make them: one for each kind."""
        tokens = describe_tokens(batch, self.cfg, self.max_segments)
        return (tokens.mask,) if tokens.in_global is None else (tokens.mask, tokens.in_global.mask)

    def test_attention(self) -> None:
        """Try the attention kernels on a slice of the first batch, alone on one device.

        Raises:   ConfigError when they compute something else than `reference`.
        """
        first_row = self.loader.host_rows(self.first_step or 0, np.zeros(1, np.int64))
        p = self.cfg.parallel
        in_text_order = p.sequence == 1 or p.context == "ulysses"
        length = self.cfg.data.seq_len // (1 if in_text_order else p.sequence)
        places = selftest.slice_of(length, in_text_order)
        masks = jax.jit(self.masks)(jax.tree.map(lambda x: x[:, places], first_row))
        for kernels, mask in zip(self.kernels, masks, strict=True):
            self.test_kernels(kernels, mask)

    def test_kernels(self, kernels: Choice, mask: AttentionMask) -> None:
        """The same for the layers of one kind. Args and errors as `test_attention`."""
        if {kernels.forward, kernels.backward} == {"reference"}:
            log("attention self-test: skipped, reference is what kernels are compared with")
            return
        began = time.perf_counter()
        m = self.cfg.model
        group = m.num_heads // m.num_kv_heads
        values = selftest.random_values(mask, group, m.head_dim, m.dtype, self.cfg.train.seed)
        q, k, v, d_out, mask = jax.device_put((*values, mask), jax.local_devices()[0])
        try:
            report = selftest.check(kernels, q, k, v, mask, d_out)
        except selftest.WrongKernel as error:
            fix = "use --model.attention-backend reference, or another that serves, and report it"
            name = m.attention_backend
            raise ConfigError("model.attention_backend", name, str(error), fix) from error
        log(f"attention self-test: {report}, {time.perf_counter() - began:.1f} s")

    def start(self) -> TrainState:
        """The state to go on from: restored, or fresh; once attention has been tested.

        Raises:   ConfigError as `test_attention`.
        """
        self.test_attention()
        self.startup.ended("attention self-test")
        began = time.perf_counter()
        if self.first_step is None:
            state = initial.state(self.cfg, self.mesh, self.origin, log)
            what = f"weights of {self.origin}" if self.origin else "initialised"
        else:
            state = checkpoint.restore(self.cfg, self.mesh, self.first_step)
            for field, (then, now) in self.changed.items():
                log(f"changed    {field}: {then} then, {now} now")
            what = f"restored step {self.first_step}"
        jax.block_until_ready(state)
        log(f"{what} in {time.perf_counter() - began:.1f} s")
        self.startup.ended("weights")
        return state


def run_folder(cfg: Config) -> Path:
    """The run folder, which need not exist yet.

    Raises:   ConfigError when something else bears its name.
    """
    folder = Path(cfg.run.dir)
    if folder.exists() and not folder.is_dir():
        raise ConfigError("run.dir", cfg.run.dir, "is a file", "use --run.dir runs/NAME")
    return folder


def check_host_copies(cfg: Config, backend: str) -> None:
    """Raises:   ConfigError for what JAX 0.11 compiles for a GPU, and cannot run (docs/LOG.md)."""
    on_host = names_on_host(cfg.parallel.remat)
    if backend == "gpu" and cfg.parallel.layer_loop == "unroll" and on_host:
        rule = "fails on GPUs in XLA's own runtime when values wait in host memory, as in "
        rule += f"parallel.remat = {cfg.parallel.remat}"
        fix = "use --parallel.layer-loop scan, or name nothing with :host"
        raise ConfigError("parallel.layer_loop", "unroll", rule, fix)


def check_steps(cfg: Config, saved: int) -> None:
    """Raises:   ConfigError when the run is already past its last step."""
    if saved > cfg.train.num_steps:
        rule = f"must be at least the {saved} steps of the checkpoint in {cfg.run.dir}"
        raise ConfigError(
            "train.num_steps", cfg.train.num_steps, rule, f"use --train.num-steps {2 * saved}"
        )


def log(text: str) -> None:
    """Print from the first process only."""
    if jax.process_index() == 0:
        print(text, flush=True)


def train(run: Run) -> int:
    """The loop. Returns an exit code."""
    cfg = run.cfg
    if run.first_step == cfg.train.num_steps:
        log(f"done already: {run.dir}")
        return guard.EXIT_OK
    state = run.start()
    tokens_per_step = cfg.train.global_batch_size * cfg.data.seq_len
    first, last = run.first_step or 0, cfg.train.num_steps
    evaluate = Evaluation(run)
    schedule = learning_rate(cfg.optimizer, cfg.train.num_steps)
    batches = run.loader.prefetched(first)
    with (
        guard.StopRequest() as stop,
        checkpoint.Checkpointer(cfg) as saver,
        MetricsWriter(cfg, run.dir, first, schedule, run.loader.epochs) as metrics,
    ):
        plan = forecast_here(cfg)
        if plan is not None:
            log(str(plan))
            metrics.write(plan.record())
        train_step = compiled(run, state)
        for step in range(first, last):
            began = time.perf_counter()
            _, batch = next(batches)
            data_wait = time.perf_counter() - began
            state, measured = train_step(state, batch)
            if step == first:  # it has been waited for
                run.startup.ended("first step")
                log(str(run.startup))
            metrics.write_previous(step, measured, data_wait)
            done = step + 1
            if due(done, cfg.evaluation.every, last):
                metrics.pause()
                metrics.evaluation(done, *evaluate(state.params))
            if stop.received or due(done, cfg.checkpoint.every, last):
                metrics.pause()
                saver.save(state, done, done * tokens_per_step)
            if stop.received:
                log(f"{stop.received}: saved step {done}; the same command goes on from there")
                return guard.EXIT_PREEMPTED
        metrics.flush()
        if plan is not None:
            log(plan.beside(metrics.last))
    batches.close()
    log(f"done: {run.dir}")
    return guard.EXIT_OK


def due(done: int, every: int, last: int) -> bool:
    """Whether something that happens every so many steps, and at the end, happens now."""
    return every > 0 and (done % every == 0 or done == last)


def compiled(run: Run, state: TrainState):
    """The train step, compiled for this run's shapes before its first use, and timed."""
    began = time.perf_counter()
    step: Any = make_train_step(run.cfg, run.mesh, run.max_segments)
    program = step.lower(state, run.loader.batch(0)).compile()
    log(f"compiled in {time.perf_counter() - began:.1f} s{memory_of(program, state)}")
    run.startup.ended("compilation")
    return runtime.FirstRunAlone(program)


def memory_of(program: Any, state: TrainState) -> str:
    """What a compiled step needs beside the state, for the log; where the compiler says so.

    The state itself is there once if the step takes over all of it; a warning says if not.
    """
    memory = program.memory_analysis()
    if memory is None:
        return ""
    text = f", {memory.temp_size_in_bytes / 2**30:.1f} GiB temporary"
    if memory.host_temp_size_in_bytes:
        text += f", {memory.host_temp_size_in_bytes / 2**30:.1f} GiB in host memory"
    twice = bytes_per_device(state) - memory.alias_size_in_bytes - memory.host_alias_size_in_bytes
    if twice > 0:
        text += f"\nWARNING    the step holds {twice / 2**30:.3f} GiB of the state twice"
    return text


class Evaluation:
    """Held-out loss over the same batches each time."""

    def __init__(self, run: Run):
        self.run = run
        if run.held_out is not None:
            step = make_eval_step(run.cfg, run.mesh, run.max_segments)
            self.step = runtime.FirstRunAlone(step)

    def __call__(self, params) -> tuple[float, float | None]:
        """Returns:  nats per labelled token, bits per byte of text where its length is known."""
        loader = self.run.held_out
        assert loader is not None
        batches = range(self.run.cfg.evaluation.num_batches)
        sums = [jax.device_get(self.step(params, loader.batch(i))) for i in batches]
        loss = sum(float(s[0]) for s in sums) / sum(float(s[1]) for s in sums)
        ratio = loader.bytes_per_token
        return loss, None if ratio is None else loss / math.log(2) / ratio


def main(argv: Sequence[str]) -> int:
    """The command line."""
    cfg = cli.read_config(argv, "jaxpar.train", __doc__)
    environment = runtime.start(cfg)
    run = Run(cfg)
    run.open_folder(environment)
    return train(run)


if __name__ == "__main__":
    cli.run_program(main)
