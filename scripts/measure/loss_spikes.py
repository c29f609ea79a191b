"""Count loss spikes of jaxpar's train step and of plain PyTorch from the same weights and batches.

    python scripts/measure/loss_spikes.py prepare FOLDER --seeds 10 --steps 300
    python scripts/measure/loss_spikes.py train FOLDER --variant bfloat16
    python scripts/measure/loss_spikes_torch.py FOLDER --precision mixed
    python scripts/measure/loss_spikes_report.py FOLDER/runs

`prepare` writes, for each seed, the initial weights and every batch. Each other command reads them,
trains one run per seed in one process, and adds FOLDER/runs/VARIANT.json with every step's loss,
gradient norm and largest change of a weight. loss_spikes_report.py defines and counts spikes.

`train` also writes FOLDER/points/NAME.npz: the weights before a step and its batch, for the steps
of --points in the first run and around the first spikes. From these, `gradients` computes the
gradient with each variant, and compares it with float32's by loss_spikes_torch.py --gradients.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from loss_spikes_report import is_spike, spikes
from loss_spikes_variants import RATE, VARIANTS, config, run_of

from jaxpar.config import (
    Config,
    Model,
    replace,
)
from jaxpar.config.validate import resolve
from jaxpar.data.loader import Loader
from jaxpar.model.parameters import param_specs
from jaxpar.runtime import provenance
from jaxpar.sharding.axes import BATCH_SPEC
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step.state import TrainState, state_of, state_shardings
from jaxpar.step.train_step import make_gradient_step, make_train_step
from jaxpar.tools.bench import conditions

#: Spikes of a variant around which points are written.
EXAMINED = 1
#: Steps whose weights are kept, until their losses have been read.
KEPT, BEHIND = 4, 2


# ------------------------------------------------------------------------------ inputs


def prepare(options: argparse.Namespace) -> None:
    """Write the weights and batches of every seed, and the shape for the PyTorch program."""
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    about = {n: getattr(options, n) for n in ("data", "steps", "warm_up", "seeds", "tiny")}
    cfg = resolve(config(about), 1)
    model, attention = cfg.model, cfg.model.layers[0].mixer
    about["model"] = {
        "num_layers": len(model.layers),
        "head_dim": attention.head_dim,
        "rope_theta": attention.rope.theta,
        "norm_eps": model.norm.eps,
    }
    about["optimizer"] = dataclasses.asdict(cfg.optimizer)
    with ThreadPoolExecutor(options.seeds) as pool:
        made = [pool.submit(write_weights, folder, model, seed) for seed in range(options.seeds)]
        for seed in range(options.seeds):
            write_batches(folder, cfg, seed)
        for each in made:
            each.result()
    (folder / "about.json").write_text(json.dumps(about, indent=2))


def write_weights(folder: Path, model: Model, seed: int) -> None:
    """Write the initial weights of a seed, with jaxpar's distributions and NumPy's random numbers.

    Both programs read the same bits.
    """
    random, arrays = np.random.default_rng(seed), {}
    for name, spec in flat(param_specs(model)).items():
        if spec.init == "normal":
            arrays[name] = random.standard_normal(spec.shape, np.float32) * np.float32(spec.std)
        else:
            arrays[name] = np.full(spec.shape, 1.0 if spec.init == "ones" else 0.0, np.float32)
    np.savez(folder / f"weights_{seed}.npz", **arrays)


def write_batches(folder: Path, cfg: Config, seed: int) -> None:
    """Write every batch of a seed in the order of jaxpar's loader, with its document masks."""
    cfg = replace(cfg, **{"train.seed": seed, "data.document_mask": True})
    loader = Loader(cfg, make_mesh(cfg.parallel, jax.devices()[:1]), "train")
    rows = np.arange(cfg.train.global_batch_size)
    batches = [loader.host_rows(step, rows) for step in range(cfg.train.num_steps)]
    fields = [field.name for field in dataclasses.fields(Batch)]
    fields = [name for name in fields if isinstance(getattr(batches[0], name), np.ndarray)]
    stacked = {name: np.stack([getattr(b, name) for b in batches]) for name in fields}
    np.savez(folder / f"batches_{seed}.npz", max_documents=loader.max_documents, **stacked)


def batches_of(folder: Path, seed: int, cfg: Config, mesh: Any) -> Iterator[Batch]:
    """Yield the batches of a seed on the device."""
    arrays = dict(np.load(folder / f"batches_{seed}.npz"))
    if not cfg.data.document_mask:
        arrays["segment_ids"] = np.ones_like(arrays["segment_ids"])
        steps, rows, length = arrays["tokens"].shape
        positions = np.arange(length, dtype=np.int32)
        arrays["positions"] = np.broadcast_to(positions, (steps, rows, length))
    sharding = NamedSharding(mesh, BATCH_SPEC)
    names = [field.name for field in dataclasses.fields(Batch) if field.name in arrays]
    for step in range(len(arrays["tokens"])):
        yield Batch(**{n: jax.device_put(arrays[n][step], sharding) for n in names})


def initial_state(folder: Path, seed: int, cfg: Config, mesh: Any) -> TrainState:
    """Return the state with the weights of a seed."""
    params = on_device(dict(np.load(folder / f"weights_{seed}.npz")), cfg, mesh)
    return state_of(params, cfg, mesh)


def on_device(arrays: dict[str, np.ndarray], cfg: Config, mesh: Any) -> Any:
    """Return parameters, given by name, as a tree on the device."""
    params = flax.traverse_util.unflatten_dict(arrays, sep="/")
    return jax.device_put(params, state_shardings(cfg, mesh).params)


# ------------------------------------------------------------------------------ training


@jax.jit
def largest_change(old: Any, new: Any) -> jax.Array:
    """Return the largest change of a weight."""
    changes = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), old, new)
    return jnp.max(jnp.stack(jax.tree.leaves(changes)))


@jax.jit
def copied(params: Any) -> Any:
    """Return a copy, which a step that donates its state does not overwrite."""
    return jax.tree.map(jnp.copy, params)


@dataclasses.dataclass
class Curve:
    """The run of one seed."""

    seed: int
    loss: list[float]
    grad_norm: list[float]
    change: list[float]


@dataclasses.dataclass
class Points:
    """Writes the weights before some steps: those asked for, and those around the first spikes."""

    folder: Path
    variant: str
    steps: tuple[int, ...]
    examined: int = 0

    def look(self, curve: Curve, recent: Sequence[tuple[int, Any, Batch]]) -> None:
        """Look at the latest loss that has been read."""
        at = len(curve.loss) - 1
        wanted = {at} if curve.seed == 0 and at in self.steps else set()
        if self.examined < EXAMINED and is_spike(curve.loss, at):
            self.examined += 1
            wanted |= {at - 1, at}
        for step, params, batch in recent:
            if step in wanted:
                arrays = flat(jax.device_get(params)) | dataclasses.asdict(jax.device_get(batch))
                self.folder.mkdir(exist_ok=True)
                np.savez(self.folder / f"{self.variant}_{curve.seed}_{step}.npz", **arrays)


def train_one(
    step_of: Callable, state: TrainState, batches: Iterator[Batch], seed: int, points: Points
) -> Curve:
    """Train from one seed. Losses are read BEHIND steps late, so the device does not wait."""
    curve, pending, recent = Curve(seed, [], [], []), deque(), deque(maxlen=KEPT)

    def read() -> None:
        metrics, change = pending.popleft()
        curve.loss.append(float(metrics["loss"]))
        curve.grad_norm.append(float(metrics["grad_norm"]))
        curve.change.append(float(change))
        points.look(curve, recent)

    for number, batch in enumerate(batches):
        before = copied(state.params)
        recent.append((number, before, batch))
        state, metrics = step_of(state, batch)
        pending.append((metrics, largest_change(before, state.params)))
        if len(pending) > BEHIND:
            read()
    while pending:
        read()
    return curve


def train(options: argparse.Namespace) -> None:
    """Train a run per seed with one compiled step, and write the curves."""
    folder, began = Path(options.folder), time.monotonic()
    about = json.loads((folder / "about.json").read_text())
    about |= {n: v for n in ("steps", "warm_up") if (v := getattr(options, n)) is not None}
    run, execution, environment = run_of(about, options.variant, options.learning_rate)
    print(f"attention: {run.attention}\nexecution: {'; '.join(execution.in_words())}", flush=True)
    step_of = make_train_step(run.cfg, run.mesh, run.max_segments, execution)
    name = options.variant + options.suffix
    points, curves = Points(folder / "points", name, tuple(options.points)), []
    for seed in range(about["seeds"])[: options.seeds]:
        started = time.monotonic()
        if curves and started - began > options.seconds:
            break
        state = initial_state(folder, seed, run.cfg, run.mesh)
        batches = itertools.islice(
            batches_of(folder, seed, run.cfg, run.mesh), run.cfg.train.num_steps
        )
        curves.append(train_one(step_of, state, batches, seed, points))
        last, found = curves[-1].loss[-1], spikes(curves[-1].loss)
        took = f"{time.monotonic() - started:.1f} s"
        print(f"{name} seed {seed}: {last:.4f}, spikes {found}, {took}", flush=True)
        written = {
            "variant": name,
            "what": VARIANTS[options.variant].what,
            "steps": about["steps"],
            "warm_up": about["warm_up"],
            "learning_rate": options.learning_rate,
            "attention": run.attention,
            "curves": [dataclasses.asdict(curve) for curve in curves],
            **conditions.of_this_process(environment, provenance.checked_out_commit()),
        }
        (folder / "runs").mkdir(exist_ok=True)
        (folder / "runs" / f"{name}.json").write_text(json.dumps(written))


# ------------------------------------------------------------------------------ gradients


def gradients(options: argparse.Namespace) -> None:
    """Compute the gradient of every point with each variant, and compare it with float32's."""
    folder = Path(options.folder)
    about = json.loads((folder / "about.json").read_text())
    found: dict[str, dict[str, Any]] = {}
    for name in options.variants.split(","):
        run, execution, _ = run_of(about, name, options.learning_rate)
        step = make_gradient_step(run.cfg, run.mesh, run.max_segments, execution)
        for file in sorted((folder / "points").glob("*.npz")):
            exact = folder / "exact" / file.name
            if not exact.is_file():
                continue
            arrays = dict(np.load(file))
            names = [field.name for field in dataclasses.fields(Batch)]
            place = NamedSharding(run.mesh, BATCH_SPEC)
            batch = jax.device_put(Batch(**{n: arrays.pop(n) for n in names}), place)
            metrics, grads = step(on_device(arrays, run.cfg, run.mesh), batch)
            by_float32 = on_device(dict(np.load(exact)), run.cfg, run.mesh)
            here = {"loss": float(metrics["loss"]), "grad_norm": float(metrics["grad_norm"])}
            here |= jax.tree.map(float, compared(flat(grads), flat(by_float32)))
            found.setdefault(file.stem, {})[name] = here
            print(f"{file.stem} {name}: {json.dumps(here)}", flush=True)
        (folder / "gradients").mkdir(exist_ok=True)
        (folder / "gradients" / "jaxpar.json").write_text(json.dumps(found))


@jax.jit
def compared(grads: dict[str, jax.Array], exact: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the distance of each gradient over the exact one's norm, and `all` together."""
    apart = {name: jnp.sum(jnp.square(grads[name] - exact[name])) for name in exact}
    size = {name: jnp.sum(jnp.square(exact[name])) for name in exact}
    whole = jnp.sqrt(sum(apart.values()) / sum(size.values()))
    return {"all": whole} | {name: jnp.sqrt(apart[name] / size[name]) for name in exact}


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    for name, run in (("prepare", prepare), ("train", train), ("gradients", gradients)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("folder")
        if name == "prepare":
            command.add_argument("--data", default="data/stdlib")
            command.add_argument("--steps", type=int, default=300)
            command.add_argument("--warm-up", type=int, default=20)
            command.add_argument("--tiny", action="store_true", help="a small model, for a test")
        if name != "gradients":
            command.add_argument("--seeds", type=int, default=10)
        if name != "prepare":
            command.add_argument("--learning-rate", type=float, default=RATE)
        if name == "gradients":
            command.add_argument("--variants", default="bfloat16", help="separated by commas")
        if name == "train":
            add = command.add_argument
            add("--variant", choices=VARIANTS, default="bfloat16")
            add("--suffix", default="", help="appended to the variant's name in the results")
            add("--steps", type=int, help="fewer steps than prepared")
            add("--warm-up", type=int, help="default: as prepared")
            add("--points", type=int, nargs="*", default=(), help="steps, from 0")
            add("--seconds", type=float, default=1e9, help="start no run after this time")
    options = parser.parse_args(argv)
    options.run(options)


if __name__ == "__main__":
    main(sys.argv[1:])
