"""Checks that a conversion kept the model, by comparing logits of its input and output.

Both sides are read from disk and computed layer by layer with the plain model
(`model/plain`) in float32, so only one layer of each is in memory at a time. If
`transformers` is installed, it also computes the logits of the published side.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.components.model import Layer, Model
from jaxpar.config import LoraConfig
from jaxpar.convert.hf.folder import Tensors
from jaxpar.convert.hf.tensor_layout import Entry, read_box
from jaxpar.convert.run_arrays import RunArrays
from jaxpar.convert.safetensors_file import DTYPES, NAMES
from jaxpar.model.flops import num_params
from jaxpar.model.parameters import param_specs
from jaxpar.model.plain import decoder
from jaxpar.runtime.host_memory import host_memory
from jaxpar.runtime.stages import stage
from jaxpar.runtime.units import size
from jaxpar.sharding.grid import Box
from jaxpar.sharding.params import flat

#: Number of random tokens, in one row, for which the logits are compared.
NUM_TOKENS = 256

#: Maximum difference relative to the largest logit: several hundred roundings of float32.
TOLERANCE = 1e-4

#: Reads a box of a parameter, float32.
type Read = Callable[[str, Box], np.ndarray]


class CheckFailed(Exception):
    """A conversion changed the model."""


def check_conversion(
    m: Model,
    run: Read,
    published: Read,
    folder: Path,
    tolerance: float,
    log: Callable[[str], None],
    what: str = "the published files",
) -> None:
    """Compare the logits of a run, of a published folder, and of `transformers` on the folder.

    Args:     run, published: the parameters of each side. folder: the published folder.
              tolerance: maximum difference, relative to the largest logit.
              log: called with the largest difference, or the reason why there is none. what: the
              folder's files, in words.
    Raises:   CheckFailed when the difference exceeds the tolerance, or a logit is non-finite.
    """
    tokens, ours = compare_readers(m, run, published, what, tolerance, log)
    left_out = why_not_in_torch(m, "transformers")
    if left_out is None:
        theirs = transformers_logits(folder, tokens)
        compare(theirs, ours, "transformers", tolerance, log)
    else:
        log(f"not compared with transformers: {left_out}")


def compare_readers(
    m: Model,
    run: Read,
    other: Read,
    what: str,
    tolerance: float,
    log: Callable[[str], None],
    adapters: LoraConfig | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Compare the logits of a run with those of other parameters, as `check_conversion` does.

    Args:     what: the others, in words. adapters: of both, as in `logits`.
    Returns:  (the tokens, the run's logits).
    """
    tokens = random_tokens(m)
    ours = logits(run, m, tokens, adapters)
    compare(logits(other, m, tokens, adapters), ours, what, tolerance, log)
    return tokens, ours


def random_tokens(m: Model) -> np.ndarray:
    """Make the tokens for the comparison, int32 [1, NUM_TOKENS] or as many as have positions."""
    shape = (1, min(NUM_TOKENS, m.max_positions or NUM_TOKENS))
    return np.random.default_rng(0).integers(0, m.vocab_size, shape, dtype=np.int32)


def compare(
    found: np.ndarray,
    ours: np.ndarray,
    what: str,
    tolerance: float,
    log: Callable[[str], None],
) -> None:
    """Log the largest difference. Raises:   CheckFailed beyond the tolerance."""
    largest = float(np.abs(ours).max())
    error = float(np.abs(found - ours).max())
    line = (
        f"logits of {ours.shape[1]} tokens compared with {what}: "
        f"largest difference {error:.2e}, largest logit {largest:.2e}"
    )
    if not (math.isfinite(largest) and error <= tolerance * largest):
        raise CheckFailed(f"{line}, allowed {tolerance * largest:.2e}; the output was discarded")
    log(line)


# ------------------------------------------------------------------------------- our own logits


def logits(
    read: Read, m: Model, tokens: np.ndarray, adapters: LoraConfig | None = None
) -> np.ndarray:
    """Compute logits float32 [B, T, V] of int32 tokens [B, T], with one layer in memory at a time.

    Args:     adapters: adapters that `read` also has, with their factor in the second matrix.
    """
    shapes = {path: spec.shape for path, spec in flat(param_specs(m, adapters)).items()}
    whole = lambda path: read(path, tuple(slice(0, n) for n in shapes[path]))  # noqa: E731

    def layer(i: int) -> dict[str, np.ndarray]:
        name, at = m.places[i]
        stack = f"{name}/"
        paths = {p.removeprefix(stack): p for p in shapes if p.startswith(stack)}
        rest = {p: tuple(slice(0, n) for n in shapes[p][1:]) for p in paths.values()}
        return {name: read(p, (slice(at, at + 1), *rest[p]))[0] for name, p in paths.items()}

    segments = np.ones_like(tokens)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    checking = stage("computing logits for the self-check")
    with jax.default_matmul_precision("highest"), checking as now:
        embed = whole("embed")
        learned = {"positions": whole("positions")} if m.max_positions else {}
        x = decoder.first_stream({"embed": embed} | learned, tokens, positions, m)
        if not m.tie_embeddings:
            del embed
        for i, of in enumerate(m.layers):
            now.at(f"layer {i + 1} of {len(m.layers)}")
            x = _block(of, m)(x, layer(i), positions, segments)
        top = {path: whole(path) for path in shapes if path.startswith("final_norm")}
        top |= {"embed": embed} if m.tie_embeddings else {"head": whole("head")}
        return np.asarray(jax.jit(lambda x, top: decoder.output(x, top, m))(x, top))


@functools.cache
def _block(of: Layer, model: Model) -> Callable:
    """Compile a layer of the plain model. It is called once for each layer of each side."""
    return jax.jit(lambda x, w, place, segments: decoder.block(x, w, of, place, segments, model))


def published_reader(entries: list[Entry], tensors: Tensors) -> Read:
    """Make a function that reads a published folder as jaxpar's parameters."""
    by_path = {entry.path: entry for entry in entries}
    return lambda path, box: read_box(by_path[path], box, tensors.open)


def run_reader(arrays: RunArrays, m: Model, dtype: str) -> Read:
    """Make a function that reads a run's parameters, rounded to the dtype of the export.

    Training writes chunks that span all layers, and a read loads complete chunks. Such parameters
    are cached after the first read if they fit into half of the host's memory.
    """
    kept: dict[str, np.ndarray] = {}
    fits = 4 * num_params(m) < host_memory() / 2
    exact = {path for path, spec in flat(param_specs(m)).items() if not spec.trainable}

    def rounded(a: np.ndarray, path: str) -> np.ndarray:
        return a if path in exact else a.astype(DTYPES[NAMES[dtype]]).astype(np.float32)

    def read(path: str, box: Box) -> np.ndarray:
        shape, chunk = arrays.shape(path), arrays.chunk(path)
        if "/" not in path or chunk[0] == 1 or not fits:
            return rounded(arrays.read(path, box), path)
        if path not in kept:
            kept[path] = arrays.read(path, tuple(slice(0, n) for n in shape))
        return rounded(kept[path][box], path)

    return read


# --------------------------------------------------------------------------------- transformers


def why_not_in_torch(m: Model, *packages: str) -> str | None:
    """Return why torch, with some packages, cannot compute the logits here; None if it can."""
    for name in ("torch", *packages):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    needed, there = 5 * num_params(m), host_memory()
    if needed > there:
        return f"it needs the full model in memory, {size(needed)} of {size(there)}"
    return None


def transformers_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Compute logits float32 [B, T, V] of a published folder with `transformers` in float32."""
    import torch

    with stage("computing logits with transformers"), torch.no_grad():
        model = transformers_model(folder)
        return model.eval()(torch.from_numpy(tokens.astype(np.int64))).logits.float().numpy()


def transformers_model(folder: Path) -> Any:
    """Load the model of a published folder with `transformers` in float32."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", use_safetensors=True
    )
