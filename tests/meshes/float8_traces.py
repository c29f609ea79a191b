"""Losses and gradients of small models in float8, on any mesh, and their errors."""

import math

import numpy as np

from jaxpar.config import Config, replace
from jaxpar.config.validate import resolve
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.verification import small_config, traces
from jaxpar.verification.meshes import parse_meshes
from tests import weights

BASE = replace(
    small_config.float32(Config()),
    **{
        "model.num_layers": 2,
        "model.d_model": 64,
        "model.num_heads": 8,
        "model.num_kv_heads": 4,
        "model.head_dim": 8,
        "model.d_ff": 96,
        "model.vocab_size": 64,
        "model.init_std": 0.05,
        "model.matmul_dtype": "float8",
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
