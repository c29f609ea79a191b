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

from jaxpar.bench.training import conditions
from jaxpar.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    replace,
)
from jaxpar.config.validate import resolve
from jaxpar.data import Loader
from jaxpar.execution.decisions import Execution
from jaxpar.model import loss as model_loss
from jaxpar.model.parameters import param_specs
from jaxpar.parallel.collectives import psum
from jaxpar.runtime import provenance
from jaxpar.runtime import start as runtime
from jaxpar.sharding.axes import BATCH_SPEC, VOCAB_AXES
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step.state import TrainState, state_of, state_shardings
from jaxpar.step.train_step import make_gradient_step, make_train_step
from jaxpar.training.run import Run

#: 152.8 million parameters.
MODEL = ModelConfig(
    num_layers=12,
    d_model=768,
    num_heads=12,
    num_kv_heads=4,
    head_dim=64,
    d_ff=2048,
    vocab_size=50304,
)
#: The same in small, for a test on a CPU.
TINY = dataclasses.replace(
    MODEL,
    num_layers=2,
    d_model=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    d_ff=128,
    vocab_size=8192,
)

#: Learning rate, unless another is given.
RATE = 6e-4

#: Spikes of a variant around which points are written.
EXAMINED = 1
#: Steps whose weights are kept, until their losses have been read.
KEPT, BEHIND = 4, 2


def config(about: dict[str, Any]) -> Config:
    """Return the config of every run: 8 sequences of 1,024 tokens, or of 64 in the small test.

    After the warm-up the learning rate stays. Attention is causal, without document masks.
    """
    steps, warm_up, tiny = (about[name] for name in ("steps", "warm_up", "tiny"))
    return Config(
        model=TINY if tiny else MODEL,
        data=DataConfig(path=about["data"], seq_len=64 if tiny else 1024, document_mask=False),
        train=TrainConfig(num_steps=steps, global_batch_size=8),
        parallel=ParallelConfig(data=1),
        optimizer=OptimizerConfig(learning_rate=RATE, warmup_steps=warm_up, schedule="constant"),
    )


# ------------------------------------------------------------------------------ variants


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to compute the same step."""

    what: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    execution: dict[str, Any] = dataclasses.field(default_factory=dict)
    plain_loss: bool = False


_FLOAT32 = {"model.dtype": "float32", "model.attention_backend": "reference"}

VARIANTS = {
    "bfloat16": Variant("the default"),
    "bfloat16-again": Variant("the default, a second time"),
    "document-mask": Variant("attention within documents", {"data.document_mask": True}),
    "logits16": Variant("bfloat16 logits", {"model.logits_dtype": "compute"}),
    "plain-loss": Variant("the loss differentiated by JAX in float32", plain_loss=True),
    "norm-written": Variant("norms scaled before the matmul", execution={"norm": "written"}),
    "reference": Variant("attention in plain JAX", {"model.attention_backend": "reference"}),
    "cudnn": Variant("attention by cuDNN", {"model.attention_backend": "cudnn"}),
    "hopper": Variant("attention by pallas_hopper", {"model.attention_backend": "pallas_hopper"}),
    "triton": Variant("attention by Triton", {"model.attention_backend": "triton"}),
    "deterministic": Variant("deterministic attention", {"model.attention_deterministic": True}),
    "unroll": Variant(
        "unrolled layers, no recomputation",
        {"parallel.layer_loop": "unroll", "parallel.remat": "none"},
    ),
    "tf32": Variant("float32, matmuls in TF32", _FLOAT32),
    "float32": Variant("float32", _FLOAT32 | {"model.matmul_precision": "float32"}),
}


#: The loss of jaxpar.
CROSS_ENTROPY = model_loss._cross_entropy


def plain_cross_entropy(h_ND, head_DV, labels_N, z_loss, logits_dtype, n):
    """Compute `loss._cross_entropy` as one would write it, for JAX to differentiate.

    The gradient of the logits stays in float32, and so do the operands of the matmuls that read it.
    """
    del n
    logits = jnp.dot(h_ND, head_DV, preferred_element_type=logits_dtype).astype(jnp.float32)
    lse = jax.scipy.special.logsumexp(logits, axis=-1)
    label = jnp.take_along_axis(logits, jnp.maximum(labels_N, 0)[:, None], axis=1)[:, 0]
    weight = jnp.where(labels_N == -1, 0.0, 1.0)
    nll = jnp.sum((lse - label) * weight)
    nll = psum(nll, VOCAB_AXES)  # of one device: only the type changes
    return nll + z_loss * psum(jnp.sum(jnp.square(lse) * weight), VOCAB_AXES), nll


# ------------------------------------------------------------------------------ inputs


def prepare(options: argparse.Namespace) -> None:
    """Write the weights and batches of every seed, and the shape for the PyTorch program."""
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    about = {n: getattr(options, n) for n in ("data", "steps", "warm_up", "seeds", "tiny")}
    cfg = resolve(config(about), 1)
    model = cfg.model
    about |= {"model": dataclasses.asdict(model), "optimizer": dataclasses.asdict(cfg.optimizer)}
    with ThreadPoolExecutor(options.seeds) as pool:
        made = [pool.submit(write_weights, folder, model, seed) for seed in range(options.seeds)]
        for seed in range(options.seeds):
            write_batches(folder, cfg, seed)
        for each in made:
            each.result()
    (folder / "about.json").write_text(json.dumps(about, indent=2))


def write_weights(folder: Path, model: ModelConfig, seed: int) -> None:
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
    names = [field.name for field in dataclasses.fields(Batch)]
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
        curve.loss.append(float(metrics.loss))
        curve.grad_norm.append(float(metrics.grad_norm))
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


def run_of(about: dict[str, Any], name: str, rate: float) -> tuple[Run, Execution, list[str]]:
    """Return a variant's run, how it is executed, and the environment that was set for it."""
    variant = VARIANTS[name]
    never = {"evaluation.every": 0, "checkpoint.every": 0, "optimizer.learning_rate": rate}
    cfg = replace(config(about), **never, **variant.fields)
    environment = runtime.start(cfg)
    model_loss._cross_entropy = plain_cross_entropy if variant.plain_loss else CROSS_ENTROPY
    run = Run(cfg, in_folder=False)
    return run, dataclasses.replace(run.execution, **variant.execution), environment


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
            here = {"loss": float(metrics.loss), "grad_norm": float(metrics.grad_norm)}
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
