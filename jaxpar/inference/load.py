"""Loads a model from a run or a published folder: its weights on a mesh, and its tokenizer."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpar.checkpoint.loading import restore_params
from jaxpar.checkpoint.saved import read_whole, saved_config, saved_steps
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.code import with_code
from jaxpar.config.schema.optimizer import TRAINED, Weights
from jaxpar.config.validate import resolve
from jaxpar.convert.hf import chat_format
from jaxpar.convert.hf.chat_format import ChatFormat
from jaxpar.convert.hf.config_file import CONFIG_FILE
from jaxpar.convert.hf.importing import PublishedModel, load_params, open_source
from jaxpar.convert.hf.tokenizer import begin_of_prompts, tokenizer_in, tokenizer_of_run
from jaxpar.data.tokenizer import Tokenizer
from jaxpar.inference.generation import config_for_sampling, weights_for_sampling
from jaxpar.model.decode import cache_bytes
from jaxpar.model.flops import num_params
from jaxpar.model.mtp.module import layers_of
from jaxpar.runtime import hub
from jaxpar.runtime.gpus.visible import gpu_is_present
from jaxpar.runtime.host_memory import host_memory
from jaxpar.runtime.processes import peers, rendezvous
from jaxpar.runtime.stages import stage
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step import adapters

# ------ Compares the memory of weights and of the cache with that of the devices, before it is used


GIB = 2**30


def check_weights(cfg: Config, folder: str) -> None:
    """Check that the weights of a model fit in this host's memory, if its devices are CPUs.

    Raises:   ConfigError that names the folder.
    """
    if jax.default_backend() != "cpu":
        return
    needed, there = num_params(cfg.model) * jnp.dtype(cfg.compute.dtype).itemsize, host_memory()
    if needed > there:
        rule = f"has {needed / GIB:,.1f} GiB of weights in {cfg.compute.dtype}, but this host or "
        rule += f"container has {there / GIB:,.1f} GiB of memory"
        raise ConfigError("RUN", folder, rule, "use a GPU, or a host with more memory")


def check_cache(
    cfg: Config, rows: int, slots: int, max_tokens: int, *, modules: bool = False
) -> int:
    """Check that the cache of keys and values fits in the devices' memory.

    Args:     cfg: from `config_for_sampling`. rows, slots: the cache holds `rows` sequences of
              `slots` tokens. max_tokens: the value of --max-tokens. modules: with that of the
              modules of multi-token prediction.
    Returns:  its bytes on a device.
    Raises:   ConfigError that names --max-tokens.
    """
    tensor = cfg.parallel.tensor
    stacks = [cfg.model.layers, *([layers_of(cfg.model)] if modules else [])]
    needed = sum(cache_bytes(cfg, rows, slots, tensor, layers=layers) for layers in stacks)
    there = _device_memory()
    if needed > there:
        rule = f"needs {needed / GIB:,.1f} GiB per device for the keys and values of {rows:,} x "
        rule += f"{slots:,} tokens, but a device has {there / GIB:,.1f} GiB"
        fix = f"use --max-tokens {max(int(max_tokens * there / needed / 2), 1)}, or fewer prompts"
        raise ConfigError("--max-tokens", max_tokens, rule, fix)
    return needed


def _device_memory() -> float:
    """Return the bytes of one device; CPU devices share their host's memory."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    return limit or host_memory() / jax.local_device_count()


@dataclass(frozen=True)
class LoadedModel:
    """A model that can generate and score text."""

    cfg: Config
    """From `config_for_sampling`."""
    mesh: Mesh
    weights: Any
    """From `weights_for_sampling`."""
    tokenizer: Tokenizer
    begin: tuple[int, ...]
    """Ids to put before a text: the tokenizer's beginning of text, if the model expects it."""
    step: int | None
    """The step of the run's checkpoint; None for a published model."""
    chat: ChatFormat = chat_format.PLAIN
    """Its chat template, and the ids that end a text besides the tokenizer's end of text."""

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a text: the end of text and, for a chat model, that of a turn."""
        return self.chat.ends | {int(self.tokenizer.eos_id)}

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """Encode a prompt; without `begin`, a text that continues another."""
        return [*(self.begin if begin else ()), *map(int, self.tokenizer.encode(text))]


@dataclass(frozen=True)
class LoadedParams:
    """A model's parameters, as the train step and the evaluation step take them."""

    cfg: Config
    """From `config_for_sampling`."""
    mesh: Mesh
    params: Any
    """float32, in running order, sharded as `state.state_shardings`."""
    step: int | None
    """The step of the run's checkpoint; None for a published model."""


def load(
    folder: str,
    step: int | None,
    tensor: int,
    log: Callable[[str], None],
    *,
    modules: bool = False,
    weights: Weights = TRAINED,
    code: Sequence[str] = (),
) -> LoadedModel:
    """Load the model of a run (its latest intact checkpoint, or `step`) or a published model.

    Starts JAX. Each device reads only its own shards. Adapters are merged into the weights.

    Args:     tensor: number of tensor-parallel devices. log: called with what is read.
              modules: keep those of multi-token prediction, for speculative decoding. weights:
              of a run: those that are trained, or their moving average. code: files with the
              classes of components.
    Raises:   ConfigError when the folder contains no model, or there are too few devices; Damaged
              when no checkpoint is intact, or `step` is damaged.
    """
    source = _source(folder, step, tensor, weights, log)
    if source is None:
        read = lambda at: _of_run(folder, at, tensor, modules, weights, code)  # noqa: E731
        return read_whole(folder, step, read)
    cfg, mesh = _placed(source.config, tensor, folder)
    tokenizer = tokenizer_in(source.folder, folder)
    with stage(f"reading the weights in {source.name}"):
        params = load_params(source, cfg, mesh, log)
        weights = weights_for_sampling(params, cfg, mesh, modules=modules)
    chat = chat_format.of_folder(source.folder, tokenizer)
    return LoadedModel(cfg, mesh, weights, tokenizer, tokenizer.begin, None, chat)


def load_params_of(
    folder: str,
    step: int | None,
    tensor: int,
    log: Callable[[str], None],
    weights: Weights = TRAINED,
    code: Sequence[str] = (),
) -> LoadedParams:
    """Load parameters; arguments and errors as `load`."""
    source = _source(folder, step, tensor, weights, log)
    if source is None:
        read = lambda at: _params_of_run(folder, at, tensor, weights, code)  # noqa: E731
        return read_whole(folder, step, read)
    cfg, mesh = _placed(source.config, tensor, folder)
    with stage(f"reading the weights in {source.name}"):
        return LoadedParams(cfg, mesh, load_params(source, cfg, mesh, log), None)


def _of_run(
    folder: str, step: int, tensor: int, modules: bool, weights: Weights, code: Sequence[str]
) -> LoadedModel:
    """Load a checkpoint of a run; arguments and errors as `load`."""
    cfg = with_code(saved_config(folder, step), code)
    tokenizer = tokenizer_of_run(folder, cfg)
    begin = begin_of_prompts(folder, cfg, tokenizer)
    loaded = _params_of_run(folder, step, tensor, weights, code)
    cast = weights_for_sampling(loaded.params, loaded.cfg, loaded.mesh, modules=modules)
    chat = chat_format.of_run(folder, cfg, tokenizer)
    return LoadedModel(loaded.cfg, loaded.mesh, cast, tokenizer, begin, step, chat)


def _params_of_run(
    folder: str, step: int, tensor: int, weights: Weights, code: Sequence[str]
) -> LoadedParams:
    """Load the parameters of a checkpoint, with adapters merged into them."""
    cfg = with_code(saved_config(folder, step), code)
    cfg, mesh = _placed(cfg, tensor, folder)
    with stage(f"reading the weights in {folder}"):
        params = restore_params(folder, cfg, mesh, step, weights)
        params, cfg = adapters.merge(params, cfg, mesh), adapters.base_config(cfg)
    return LoadedParams(cfg, mesh, params, step)


def _placed(cfg: Config, tensor: int, folder: str) -> tuple[Config, Mesh]:
    """Return the config for sampling on `tensor` devices, and their mesh.

    Raises:   ConfigError when there are too few devices, or the weights do not fit them.
    """
    cfg, devices = config_for_sampling(cfg, tensor), jax.devices()
    if len(devices) < tensor:
        rule = f"needs {tensor} devices, but there are {len(devices)}"
        raise ConfigError("--tensor", tensor, rule, f"use --tensor {len(devices)}")
    try:
        cfg = resolve(cfg, tensor)
    except ConfigError as error:
        others = [n for n in range(tensor - 1, 0, -1) if _divides(cfg, n)]
        if not others:
            raise
        rule, fix = "does not divide the model's heads and layers", f"use --tensor {others[0]}"
        raise ConfigError("--tensor", tensor, rule, fix) from error
    check_weights(cfg, folder)
    return cfg, make_mesh(cfg.parallel, devices[:tensor])


def _divides(cfg: Config, tensor: int) -> bool:
    """Return whether the model can be placed on this many devices."""
    with contextlib.suppress(ConfigError):
        resolve(config_for_sampling(cfg, tensor), tensor)
        return True
    return False


def _start(tensor: int, log: Callable[[str], None]) -> None:
    """Start JAX for this machine before a checkpoint is read, rather than for the run's machine.

    Without a GPU, devices are simulated.

    Raises:   ConfigError when several processes do not use all their devices.
    """
    if peers.world_size() == 1:  # otherwise the program has already joined the others
        detect = "auto" if rendezvous.detect_peers() else "none"
        rendezvous.join(replace(Config(), **{"cluster.detect": detect}), log)
    number = peers.world_size()
    if not gpu_is_present() and tensor % number == 0:
        with contextlib.suppress(RuntimeError):  # JAX is already running: use its devices
            jax.config.update("jax_num_cpu_devices", tensor // number)
    if number > 1 and tensor != jax.device_count():
        rule = f"must be all {jax.device_count()} devices of the {number} processes"
        fix = f"use --tensor {jax.device_count()}, or start one process"
        raise ConfigError("--tensor", tensor, rule, fix)


def _source(
    folder: str,
    step: int | None,
    tensor: int,
    weights: Weights,
    log: Callable[[str], None],
) -> PublishedModel | None:
    """Start JAX, and return the published model; None for the folder of a run."""
    _start(tensor, log)
    if saved_steps(folder):
        return None
    if not (Path(folder) / CONFIG_FILE).is_file() and not hub.is_name(folder):
        rule = "is neither a run with a checkpoint nor a folder with a config.json and .safetensors"
        raise ConfigError("RUN", folder, rule, "use such a folder")
    if step is not None:
        rule = f"selects a run's checkpoint, but {folder} is a published model"
        raise ConfigError("--step", step, rule, "remove the option")
    if weights != TRAINED:
        rule = f"selects weights of a run, but {folder} is a published model"
        raise ConfigError("--weights", weights, rule, "remove the option")
    return open_source(folder, "RUN")
