"""Losses and gradients of small models in float8, on any mesh, and their errors."""

import math

import numpy as np

from jaxpar.certification import small_config, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.config import Attention, Config, Glu, Layer, Model, replace
from jaxpar.config.validate import resolve
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.step.state import init_state
from jaxpar.step.train_step import make_train_step
from tests import weights

ATTENTION = Attention(num_heads=8, num_kv_heads=4, head_dim=8)
LAYER = Layer("layers", ATTENTION, Glu(96))

BASE = replace(
    small_config.float32(Config()),
    **{
        "model": Model(d_model=64, vocab_size=64, layers=[LAYER] * 2, init_std=0.05),
        "compute.matmul_dtype": "float8",
        "data.seq_len": 64,
        "train.global_batch_size": 8,
    },
)

#: Bound on a gradient's relative error between meshes: an eighth of a rounding to e5m2 (0.053).
ACROSS_MESHES = 0.053 / 8

#: Bound on a gradient's relative error against float32: a rounding or two per product.
AGAINST_FLOAT32 = 0.2


def on_mesh(item: str, devices, **fields):
    """The config for a mesh item such as "data=2,zero=1", and the mesh."""
    cfg = replace(BASE, **{name.replace("__", "."): value for name, value in fields.items()})
    parallel = parse_meshes([item], cfg.parallel)[item]
    n = math.prod(axis_sizes(parallel))
    cfg = resolve(replace(cfg, parallel=parallel), n)
    return cfg, make_mesh(parallel, devices[:n])


def first_gradients(item: str, devices, **fields) -> traces.TrainingTrace:
    cfg, mesh = on_mesh(item, devices, **fields)
    return weights.first_gradients(cfg, mesh, traces.random_batch(cfg))


def relative_errors(found: traces.Arrays, wanted: traces.Arrays) -> dict[str, float]:
    """Of each array: norm of the difference by the norm of what was wanted."""
    assert found.keys() == wanted.keys()
    norm = lambda a: float(np.linalg.norm(a.astype(np.float64)))  # noqa: E731
    return {name: norm(found[name] - w) / norm(w) for name, w in wanted.items()}


def loss_curve(devices, steps: int = 300, **changes) -> list[float]:
    """The losses of training on `learnable_batch` on one device."""
    fields = {
        "data__document_mask": False,
        "train__num_steps": steps,
        "optimizer__learning_rate": 3e-3,
        "optimizer__warmup_steps": 20,
    }
    cfg, mesh = on_mesh("data=1", devices, **fields | changes)
    state, step, losses = init_state(cfg, mesh), make_train_step(cfg, mesh), []
    for i in range(steps):
        batch = traces.shard_batch(learnable_batch(cfg, i), cfg, mesh)
        state, measured = step(state, batch)
        losses.append(float(measured["loss"]))
    return losses


def learnable_batch(cfg: Config, index: int):
    """Each token is a fixed function of the one before, three times of four; else it is random."""
    batch = traces.random_batch(cfg, index)
    rng = np.random.default_rng((7, index))
    after = np.random.default_rng(7).permutation(cfg.model.vocab_size)
    tokens = np.array(batch.tokens)
    text = np.concatenate([tokens, tokens[:, :1]], axis=1)
    for t in range(1, text.shape[1]):
        kept = rng.random(len(text)) < 0.75
        text[:, t] = np.where(kept, after[text[:, t - 1]], text[:, t])
    return batch.replace(tokens=text[:, :-1], labels=text[:, 1:])


def assert_close(found: list[float], plain: list[float]) -> None:
    """Assert that something was learned, and that windows of 20 steps agree to 0.5% on average."""
    means, wanted = (np.reshape(curve, (-1, 20)).mean(axis=1) for curve in (found, plain))
    assert wanted[-1] < 0.75 * wanted[0], "nothing was learned"
    np.testing.assert_allclose(means, wanted, rtol=5e-3)
