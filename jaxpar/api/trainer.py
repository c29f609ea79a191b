"""Trains a config from Python: step by step, or by the training loop with callbacks."""

import contextlib
import shlex
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpar.api.arguments import Fits, check_generation, require_type
from jaxpar.checkpoint.saved import checkpoint_folder, saved_steps, starting_step
from jaxpar.checkpoint.saving import Checkpointer
from jaxpar.config import Config, ConfigError, config_file, replace
from jaxpar.config.code import with_code
from jaxpar.config.lists.datasets import HELD_OUT
from jaxpar.config.resolve import fill_batch
from jaxpar.config.rules.paths import absolute, with_paths
from jaxpar.config.validate import check, resolve
from jaxpar.config.values import SavedValue, class_name, require_code, to_values
from jaxpar.convert.hf import chat_format
from jaxpar.convert.hf.tokenizer import begin_of_prompts, tokenizer_of_run
from jaxpar.inference.generation import config_for_sampling, weights_for_sampling
from jaxpar.inference.load import LoadedModel
from jaxpar.inference.options import Sampling
from jaxpar.inference.sample import continuations
from jaxpar.monitoring import goodput
from jaxpar.runtime import exit_codes
from jaxpar.runtime.files.lock import RunLock
from jaxpar.runtime.processes import peers, rendezvous
from jaxpar.runtime.stages import stage
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step import adapters
from jaxpar.step.metrics import Metrics
from jaxpar.step.state import TrainState, state_shardings, to_logical
from jaxpar.training import elastic, manifest
from jaxpar.training.callbacks.callback import Callback
from jaxpar.training.chosen import choose_together, to_json
from jaxpar.training.evaluation import Evaluation
from jaxpar.training.first_run import prepare_quickstart
from jaxpar.training.programs import StepPrograms
from jaxpar.training.run import Run
from jaxpar.training.start import run_to_end
from jaxpar.training.vocabulary import with_vocabulary

#: Whether `Trainer.train` is under way in this thread.
_of_thread = threading.local()


class Trainer:
    """A config, ready to train: `init` or `load` a state, then `step` it over `batches`.

    States are values: no method changes the trainer's. `step` reuses the memory of the state that
    it is given, so keep only the state that it returns.
    """

    def __init__(self, cfg: Config):
        """Check everything that can be checked, and start JAX. Writes nothing, except the text of
        the config `quickstart`.

        Raises:   ConfigError as `python -m jaxpar.train`.
        """
        fix = 'jaxpar.load_config("quickstart")'
        require_type("cfg", cfg, Config, "a Config", fix)
        goodput.begin_now()
        cfg = with_paths(fill_batch(with_vocabulary(cfg)))
        check(cfg)
        self._environment: list[str] = []
        if peers.world_size() == 1:  # otherwise an earlier trainer has joined the others
            cfg, self._environment = rendezvous.join(cfg)
        prepare_quickstart(cfg)
        self._asked = cfg
        self._use(self._opened(cfg, in_folder=False))
        self._own_steps: set[int] = set()

    def _opened(self, cfg: Config, in_folder: bool) -> Run:
        laid_out = elastic.choose_layout(cfg, self._seconds)
        chosen = choose_together(laid_out, self._seconds, in_folder=in_folder)
        return Run.open(laid_out, in_folder=in_folder, chosen=chosen)

    def _use(self, run: Run) -> None:
        self._run, self._steps = run, StepPrograms(run)
        self._evaluation: Evaluation | None = None
        self._fits = Fits(run)

    @property
    def _seconds(self) -> float:
        return self._asked.cluster.slow_seconds or 1e6

    @property
    def cfg(self) -> Config:
        """The config, with all that follows from the devices."""
        return self._run.cfg

    @property
    def mesh(self) -> Mesh:
        """The mesh of the devices."""
        return self._run.mesh

    def init(self) -> TrainState:
        """Return the state before the first step. Tests the attention kernels first."""
        if self._run.first_step is not None:  # of `load`
            self._use(self._opened(self._asked, in_folder=False))
        return self._run.start().state

    def load(self) -> TrainState:
        """Return the state of the latest intact checkpoint in `run.dir`, on this mesh.

        Raises:   ConfigError if there is none, or the config may not resume it.
        """
        cfg = replace(self._asked, **{"checkpoint.resume": "auto"})
        if starting_step(cfg) is None:
            fix = "init() a state, or use the run.dir of a run"
            raise ConfigError("run.dir", cfg.run.dir, "contains no finished checkpoint", fix)
        self._use(self._opened(cfg, in_folder=True))
        state = self._run.start().state
        self._own_steps |= set(saved_steps(self.cfg.run.dir))
        return state

    def batches(self, state: TrainState, num_steps: int | None = None) -> Iterator[Batch]:
        """Yield the batches of the steps that follow a state.

        Args:     num_steps: how many; None: up to `train.num_steps`.
        Returns:  an iterator over Batches of int32 [B, T], sharded over the mesh.
        """
        self._fits.check_state(state)
        if num_steps is not None:
            require_type("num_steps", num_steps, int, "a number of steps, or None", "num_steps=10")
        first = int(state.step)
        last = self.cfg.train.num_steps if num_steps is None else first + num_steps
        with contextlib.closing(self._run.loader.prefetched(first)) as batches:
            for _ in range(first, last):
                yield next(batches)[1]

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take one optimizer step, and the outer steps of DiLoCo that are due after it.

        The first call for a size of batches compiles the step.

        Returns:  the next state, and the metrics: scalars such as `loss` and `grad_norm`, which
                  may still be computed when this returns; `float` waits for them.
        Raises:   ConfigError for the state or the batch of another config or mesh, and for tokens
                  beyond the vocabulary in a batch of NumPy arrays.
        """
        self._fits.check_state(state)
        self._fits.check_batch(batch)
        if not self._steps.has(batch):
            self._steps.prepare(state, batch)
        return self._steps(state, batch, int(state.step) if self.cfg.diloco else 0)

    def evaluate(self, state: TrainState) -> float:
        """Return the loss on held-out text, in nats per token.

        Raises:   ConfigError if the config evaluates nothing (`evaluation.every` 0).
        """
        if HELD_OUT not in self._run.held_out.loaders:
            rule, fix = "opens no held-out data", "use evaluation.every 100"
            raise ConfigError("evaluation.every", 0, rule, fix)
        if self._evaluation is None:
            run = self._run
            self._evaluation = Evaluation(run.cfg, run.mesh, run.held_out, run.max_segments)
        with stage("evaluating"):
            return self._evaluation(state, [HELD_OUT])[HELD_OUT].loss

    def save(self, state: TrainState) -> Path:
        """Save a checkpoint in `run.dir`, and wait until it is complete.

        Returns:  its folder. `python -m jaxpar.train` continues from it, and `load_model` reads it.
        Raises:   ConfigError if `run.dir` has checkpoints that this trainer neither saved nor
                  loaded; SaveFailed.
        """
        run, step = self._run, int(state.step)
        others = set(saved_steps(run.dir)) - self._own_steps
        if others:
            rule = f"has the checkpoint of step {max(others)} of another run"
            raise ConfigError("run.dir", str(run.dir), rule, "load() it, or use another run.dir")
        with (
            self._folder(),
            Checkpointer(
                run.cfg,
                peers.log,
                run.loader.skipped,
                asked=run.asked,
                weights_from=to_json(run.weights_from),
            ) as saver,
        ):
            tokens = run.loader.sizes_of_steps.tokens_before(step)
            saver.save(state, step, tokens, position=run.loader.position(step))
        self._own_steps.add(step)
        return checkpoint_folder(run.dir) / str(step)

    @contextlib.contextmanager
    def _folder(self) -> Iterator[None]:
        """Lock the run's folder for a block, with its config.json and manifest.json."""

        def take() -> RunLock | None:
            return RunLock(self._run.dir) if peers.rank() == 0 else None

        with peers.all_or_none("run folder", self._seconds, take) or contextlib.nullcontext():
            manifest.write(self._run, self._environment, show=lambda text: None)
            yield

    def generate(
        self,
        state: TrainState,
        prompt: str | Sequence[str],
        max_tokens: int = 100,
        sampling: Sampling = Sampling(),  # noqa: B008, a constant
        stop: Sequence[str] = (),
    ) -> Any:
        """Generate text with the weights of a state, as `jaxpar.generate` does. One process only.

        Raises:   ConfigError in a run of several processes, among others.
        """
        prompts = check_generation(prompt, max_tokens, sampling, stop)
        texts = continuations(self._model(state), prompts, sampling, max_tokens, stop)
        return texts[0] if isinstance(prompt, str) else texts

    def _model(self, state: TrainState) -> LoadedModel:
        """Return the model of a state, on the first device. Its weights are copied."""
        if peers.world_size() > 1:
            rule = "needs the weights on one device of one process"
            fix = "save(), and use python -m jaxpar.sample"
            raise ConfigError("processes", peers.world_size(), rule, fix)
        cfg, params = self.cfg, state.params
        if cfg.lora:  # merging donates its arguments
            params = adapters.merge(jax.tree.map(jnp.copy, params), cfg, self.mesh)
        whole = adapters.base_config(cfg)
        params = to_logical(TrainState((), params, ()), whole).params
        small = resolve(config_for_sampling(whole), 1)
        mesh = make_mesh(small.parallel, jax.devices()[:1])
        params = jax.device_put(params, state_shardings(small, mesh).params)
        folder = self._run.dir
        tokenizer = tokenizer_of_run(folder, cfg)
        begin = begin_of_prompts(folder, cfg, tokenizer)
        weights = weights_for_sampling(params, small, mesh)
        chat = chat_format.of_run(folder, cfg, tokenizer)
        return LoadedModel(small, mesh, weights, tokenizer, begin, int(state.step), chat)

    def launch_command(self, nodes: int = 1, code: Sequence[str] = ()) -> str:
        """Return the command that continues the run in `run.dir`, with this config, elsewhere.

        All hosts must see the folder at this path. The data axis takes the devices that are there;
        options of `jaxpar.train` may follow, such as other axes.

        Args:     nodes: 1: one process, for all GPUs of a host. More: under Slurm, with a process
                  on each node. code: files of your own classes.
        Raises:   ConfigError if the folder has no config yet, or another one, or names a class
                  that none of the files has, such as one of a notebook.
        """
        fix = "launch_command(nodes=2)"
        require_type("nodes", nodes, int, "a number of nodes", fix)
        if nodes < 1:
            raise ConfigError("nodes", nodes, "must be at least 1", fix)
        folder, fix = str(absolute(self._run.dir)), "save() a state first, or train()"
        if not Path(folder, "config.json").is_file():
            raise ConfigError("run.dir", folder, "has no config.json", fix)
        read = with_code(config_file.load_config(folder), code)
        require_code(read)
        check(read)
        asked = replace(self._asked, **{"run.dir": folder})
        if to_values(fill_batch(read)) != to_values(asked):
            raise ConfigError("run.dir", folder, "has another config", fix)
        words = ["python", "-m", "jaxpar.train", folder, *(f"--code={file}" for file in code)]
        slurm = ["srun", f"--nodes={nodes}", "--ntasks-per-node=1"] if nodes > 1 else []
        return shlex.join([*slurm, *words])

    def train(self, *callbacks: Callback) -> bool:
        """Train to the last step by the training loop, as `python -m jaxpar.train` does.

        The run is saved in `run.dir`, and resumes from there. Ctrl-C saves and stops it.

        Args:     callbacks: act after those of `train.callbacks`. In the config of a run's folder,
                  one replaces those of its class, whose code is not loaded.
        Returns:  whether the run has ended by itself; `load` returns its state. False: it was asked
                  to stop by a signal.
        Raises:   ConfigError, SaveFailed, and whatever a callback raises; RunError within a
                  callback of `train`.
        """
        if getattr(_of_thread, "trains", False):
            fix = "return from the callback first, or train in another thread"
            raise exit_codes.RunError(f"train() was called by a callback of train(). Fix: {fix}.")
        given = [class_name(one) for one in callbacks if isinstance(one, Callback)]
        others = [
            one
            for one in self._asked.train.callbacks
            if not (isinstance(one, SavedValue) and class_name(one) in given)
        ]
        cfg = replace(self._asked, **{"train.callbacks": (*others, *callbacks)})
        check(cfg)
        goodput.begin_now()
        _of_thread.trains = True
        try:
            code = run_to_end(cfg, self._environment)
        finally:
            _of_thread.trains = False
        return code == exit_codes.EXIT_OK
