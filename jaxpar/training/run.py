"""A run made ready: mesh, data, attention's kernels, where to start. Nothing is written yet."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar import checkpoint
from jaxpar.config import Config, ConfigError, registry
from jaxpar.config.remat_policies import names_on_host
from jaxpar.config.serialize import to_json
from jaxpar.config.validate import resolve
from jaxpar.data import Loader
from jaxpar.data.skips import SKIPPED_FILE, read_skipped
from jaxpar.kernels.attention import AttentionMask, Choice, choose
from jaxpar.kernels.attention.dispatch.capability import xla_is_deterministic
from jaxpar.model.attention_context import attention_context
from jaxpar.model.flops import num_adapter_params, num_params
from jaxpar.monitoring.metrics import MetricsWriter
from jaxpar.monitoring.sinks import open_sinks, require_packages
from jaxpar.monitoring.startup import StartUp
from jaxpar.optimizer.schedules import learning_rate
from jaxpar.parallel.context import kernel_request, token_order
from jaxpar.planning.forecast import forecast_here
from jaxpar.runtime import provenance
from jaxpar.runtime.processes.peers import say
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import describe, make_mesh
from jaxpar.step.state import TrainState
from jaxpar.training import attention_selftest, elastic, initial_weights
from jaxpar.training.evaluation import check_labels
from jaxpar.training.step_guard import StepGuard


def _write(path: Path, text: str) -> None:
    """Write a file; an error names it, also where the disk is full."""
    try:
        path.write_text(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


class Run:
    """A run made ready, with nothing written yet: mesh, data, where to start."""

    def __init__(
        self, cfg: Config, start: Callable[[Config], int | None] | None = checkpoint.starting_step
    ):
        """
        Args:     start: which checkpoint to go on from, None for none. None in its place: the run
                  folder is not looked at, whatever lies there.
        Raises:   ConfigError for anything that would stop the run later.
        """
        self.startup = StartUp()
        self.dir = run_folder(cfg) if start else Path(cfg.run.dir)
        self.first_step = start(cfg) if start else None
        resumed = self.first_step is not None
        saved = checkpoint.read_saved(self.dir, self.first_step) if resumed else None
        used = resolve(elastic.same_rows(cfg, saved, jax.device_count()), jax.device_count())
        self.asked = elastic.asked_otherwise(cfg, used)
        self.cfg = cfg = used
        check_host_copies(cfg, jax.default_backend())
        require_packages(cfg)
        self.mesh = make_mesh(cfg.parallel)
        order = token_order(cfg.parallel, cfg.data.seq_len)
        self.loader = Loader(cfg, self.mesh, "train", order)
        splits = [self.loader]
        self.held_out = None
        if cfg.evaluation.every:
            self.held_out = Loader(cfg, self.mesh, "val", order)
            check_labels(cfg, self.held_out)
            splits.append(self.held_out)
        self.max_segments = max(split.max_documents for split in splits)
        self.changed: dict[str, tuple[Any, Any]] = {}
        if start:
            self.loader.skipped = read_skipped(self.dir)
        if saved is not None:
            checkpoint.check_resumable(cfg, saved)
            self.changed = checkpoint.changed_fields(cfg, saved)
            known = self.loader.skipped
            self.loader.skipped = known.and_also(saved.skipped_batches, saved.rewinds)
            check_steps(cfg, saved.step)
        self.origin = initial_weights.find(cfg) if self.first_step is None else None
        self.kernels = self.attention_kernels()
        added = f"{cfg.model.attention}, added from outside the package"
        self.attention = "; ".join(map(str, self.kernels)) or added
        self.startup.ended("data and checks")

    def open_folder(self, environment: list[str]) -> None:
        """Make the run folder and write what the run is: config.json and manifest.json."""
        if jax.process_index() != 0:
            return
        self.dir.mkdir(parents=True, exist_ok=True)
        _write(self.dir / "config.json", to_json(self.cfg))
        manifest = provenance.versions() | {
            "commit": provenance.checked_out_commit(),
            "mesh": describe(self.mesh),
            "parameters": num_params(self.cfg.model),
            "adapters": num_adapter_params(self.cfg.model, self.cfg.lora),
            "attention": self.attention,
            "environment": environment,
            "asked": self.asked,
        }
        _write(self.dir / "manifest.json", json.dumps(manifest, indent=2) + "\n")
        print(
            f"model      {num_params(self.cfg.model):,} parameters, {self.cfg.model.dtype}"
            f"{self.trained}\n"
            f"devices    {manifest['device']}, mesh {manifest['mesh']}\n"
            f"attention  {self.attention}\n"
            f"data       {self.data}{self.left_out}\n"
            f"run        {self.dir}" + "".join(f"\nset        {item}" for item in environment),
            flush=True,
        )

    def attention_kernels(self) -> tuple[Choice, ...]:
        """The attention kernels that this run's layers will use, and why not others; for each kind.

        None for a function that was added from outside the package: nothing is known of it.

        Raises:   ConfigError when those of `model.attention_backend` cannot serve.
        """
        m, p = self.cfg.model, self.cfg.parallel
        if registry.function("model.attention", m.attention):
            return ()
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

    @property
    def left_out(self) -> str:
        """Which batches are left out, and what says so: a new run may not expect any."""
        skipped, file = self.loader.skipped, self.dir / SKIPPED_FILE
        if not skipped.windows:
            return ""
        said = file if file.is_file() else f"the checkpoint of step {self.first_step}"
        fresh = "; the run begins anew: delete it to train on them" * (self.first_step is None)
        return f"\nleft out   {skipped}, as {said} says{fresh}"

    @property
    def content(self) -> str:
        """What is trained on and evaluated on, by its content; where it lies does not count."""
        splits = [self.loader, *([self.held_out] if self.held_out else [])]
        sums = [[source.dataset.fingerprint for source in split.sources] for split in splits]
        return json.dumps(sums)

    def masks(self, batch: Batch) -> tuple[AttentionMask, ...]:
        """The masks of some of the run's tokens, as its layers make them: one for each kind."""
        known = attention_context(batch, self.cfg, self.max_segments)
        return (known.mask,) if known.in_global is None else (known.mask, known.in_global.mask)

    def test_attention(self) -> None:
        """Try the attention kernels on a slice of the first batch, alone on one device.

        Raises:   ConfigError when they compute something else than `reference`.
        """
        if not self.kernels:
            return
        first_row = self.loader.host_rows(self.first_step or 0, np.zeros(1, np.int64))
        p = self.cfg.parallel
        in_text_order = p.sequence == 1 or p.context == "ulysses"
        length = self.cfg.data.seq_len // (1 if in_text_order else p.sequence)
        places = attention_selftest.slice_of(length, in_text_order)
        masks = jax.jit(self.masks)(jax.tree.map(lambda x: x[:, places], first_row))
        for kernels, mask in zip(self.kernels, masks, strict=True):
            self.test_kernels(kernels, mask)

    def test_kernels(self, kernels: Choice, mask: AttentionMask) -> None:
        """The same for the layers of one kind. Args and errors as `test_attention`."""
        if {kernels.forward, kernels.backward} == {"reference"}:
            say("attention self-test: skipped, reference is what kernels are compared with")
            return
        began = time.perf_counter()
        m = self.cfg.model
        group = m.num_heads // m.num_kv_heads
        values = attention_selftest.random_values(
            mask, group, m.head_dim, m.dtype, self.cfg.train.seed
        )
        q, k, v, d_out, mask = jax.device_put((*values, mask), jax.local_devices()[0])
        try:
            report = attention_selftest.check(kernels, q, k, v, mask, d_out)
        except attention_selftest.WrongKernel as error:
            fix = "use --model.attention-backend reference, or another that serves, and report it"
            name = m.attention_backend
            raise ConfigError("model.attention_backend", name, str(error), fix) from error
        say(f"attention self-test: {report}, {time.perf_counter() - began:.1f} s")

    def start(self) -> TrainState:
        """The state to go on from: restored, or fresh; once attention has been tested.

        Raises:   ConfigError as `test_attention`.
        """
        self.test_attention()
        self.startup.ended("attention self-test")
        began = time.perf_counter()
        if self.first_step is None:
            state = initial_weights.state(self.cfg, self.mesh, self.origin, say)
            what = f"weights of {self.origin}" if self.origin else "initialised"
        else:
            state, self.first_step = checkpoint.restore_latest(self.cfg, self.mesh)
            for field, (then, now) in self.changed.items():
                say(f"changed    {field}: {then} then, {now} now")
            what = f"restored step {self.first_step}"
        jax.block_until_ready(state)
        say(f"{what} in {time.perf_counter() - began:.1f} s")
        self.startup.ended("weights")
        return state

    def metrics(self) -> MetricsWriter:
        """What reports the steps from here on, and sees that their numbers are right."""
        cfg, first = self.cfg, self.first_step or 0
        batch_of, mesh = self.loader.skipped.batch_of, describe(self.mesh)
        look = StepGuard(cfg, self.dir, first, batch_of, say, mesh).look
        schedule = learning_rate(cfg.optimizer, cfg.train.num_steps)
        epochs, forecast = self.loader.epochs, forecast_here(cfg)
        sinks = open_sinks(cfg, self.dir, first, say)
        return MetricsWriter(cfg, self.dir, first, schedule, epochs, look, forecast, sinks)


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
    unrolled, on_host = cfg.parallel.layer_loop == "unroll", names_on_host(cfg.parallel.remat)
    if backend == "gpu" and unrolled and on_host and xla_is_deterministic():
        rule = "ends in an error of XLA's own runtime when XLA_FLAGS asks for deterministic kernels"
        rule += f" and values wait in host memory, as in parallel.remat = {cfg.parallel.remat}"
        fix = "use --parallel.layer-loop scan, leave the flag out, or name nothing with :host"
        raise ConfigError("parallel.layer_loop", "unroll", rule, fix)


def check_steps(cfg: Config, saved: int) -> None:
    """Raises:   ConfigError when the run is already past its last step."""
    if saved > cfg.train.num_steps:
        rule = f"must be at least the {saved} steps of the checkpoint in {cfg.run.dir}"
        raise ConfigError(
            "train.num_steps", cfg.train.num_steps, rule, f"use --train.num-steps {2 * saved}"
        )
