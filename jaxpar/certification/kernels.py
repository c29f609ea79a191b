"""The check of kernels: on a GPU, those that the asked config runs, at its own shapes.

They are the tests before the first step of a run (`training/selftests`).
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.certification.data_order import DOCUMENT, END, of_files
from jaxpar.certification.results import Result, Subject
from jaxpar.certification.updates import mesh_of, on_one_device
from jaxpar.config import Config, ConfigError
from jaxpar.config.validate import resolve
from jaxpar.data.loader import Loader
from jaxpar.execution.decisions import execution_of
from jaxpar.parallel.context import order_of
from jaxpar.training.selftests import attention, experts, recurrent, top_k

#: Sequences of the text.
SEQUENCES = 2


def kernels(subject: Subject) -> Iterator[Result]:
    """Compare each kernel with its reference, forward and backward."""
    if subject.devices[0].platform == "cpu":
        why = "simulated devices run the references: certify on a GPU"
        yield Result("kernels", "", "kernels", not_run=why)
        return
    try:
        cfg = resolve(subject.asked, len(subject.devices), explain=False)
    except ConfigError:
        # The mesh of the run is another one; only the shards of a kernel's sizes depend on it.
        cfg = on_one_device(subject.asked)
    runs: dict[str, Callable[[], Mapping[str, float]]] = {
        "attention": lambda: _attention(cfg, subject),
        "experts": lambda: experts.test_experts(execution_of(cfg), _silent),
        "recurrences": lambda: recurrent.test_recurrences(cfg, _silent),
    }
    if cfg.parallel.replica > 1 and cfg.parallel.replica_reduction == "top_k":
        runs["top_k"] = lambda: top_k.test_top_k(cfg, _silent)
    bounds = attention.BOUNDS
    for name, run in runs.items():
        try:
            errors = run()
        except ConfigError as wrong:
            yield Result("kernels", "", name, np.inf, attention.BOUND, where=str(wrong))
            continue
        if not errors:
            yield Result("kernels", "", name, not_run="the config runs the reference, or has none")
        for array, error in errors.items():
            bound = bounds.get(array, experts.BOUND) if name == "attention" else experts.BOUND
            yield Result("kernels", "", f"{name}: {array}", error, bound)


def _silent(line: str) -> None:
    del line


def _attention(cfg: Config, subject: Subject) -> Mapping[str, float]:
    """Test the kernels of attention on a random text of the run's own sequences."""
    with tempfile.TemporaryDirectory() as folder:
        file, rng = Path(folder) / "text.bin", np.random.default_rng(cfg.train.seed)
        tokens = rng.integers(
            1, min(cfg.model.vocab_size, 1 << 16), SEQUENCES * cfg.data.seq_len + 1
        )
        tokens[rng.random(len(tokens)) < 1 / (16 * DOCUMENT)] = END
        tokens.astype("<u2").tofile(file)
        data: dict[str, Any] = {"path": str(file), "eos_id": END}
        read = of_files(cfg, data)
        mesh = mesh_of(read, jax.local_devices())
        loader = Loader(read, mesh, order=lambda length: order_of(read, length))
        most = loader.max_documents
        chosen = attention.choose_kernels(read, most)
        return attention.test_kernels(chosen, read, loader, most, 0, _silent)
