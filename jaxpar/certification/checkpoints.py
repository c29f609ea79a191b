"""The checks of what a run writes: checkpoints, read on another mesh, and exported models.

A state of random values goes to disk and back. Where its rows must be follows from the stages of a
mesh alone, so an order that is wrong both ways is found, too.
"""

import dataclasses
import json
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpar.certification.results import Result, Subject
from jaxpar.certification.traces import Arrays
from jaxpar.certification.updates import DECAY, is_own, mesh_of, on
from jaxpar.checkpoint import stored_arrays
from jaxpar.checkpoint.loading import restore
from jaxpar.checkpoint.saved import checkpoint_folder
from jaxpar.checkpoint.saving import Checkpointer
from jaxpar.config import Config, ConfigError, Model, replace
from jaxpar.config.layout.layer_split import is_equal
from jaxpar.config.lists.lora_targets import factor
from jaxpar.config.schema.optimizer import EmaConfig
from jaxpar.convert import torch_file
from jaxpar.convert.hf import exporting, importing
from jaxpar.convert.run_arrays import open_run
from jaxpar.model import lora
from jaxpar.model.plain.decoder import logits_of
from jaxpar.sharding.fingerprint import named_leaves
from jaxpar.sharding.params import flat
from jaxpar.step.state import TrainState, abstract_logical, to_running

#: Meshes to save on and to load on, in the order of preference: those of stages store layers in
#: another order, which with fewer parts is its own inverse.
SAVED_ON = (
    "pipeline=2,virtual_stages=4,num_microbatches=2",
    "pipeline=2,virtual_stages=2,num_microbatches=2",
    "pipeline=2,num_microbatches=2",
    "data=2,tensor=2",
    "data=2",
    "data=1",
)
LOADED_ON = ("data=2,tensor=2", "data=2", "expert=2,tensor=2", "expert=2", "data=1")

#: Steps of the saved state.
STEP = 2


def checkpoints(subject: Subject) -> Iterator[Result]:
    """Save on one mesh and load on another; export, and import."""
    asked, small = subject.asked.optimizer, subject.small
    o = {n: getattr(asked, n) for n in ("first_moment_dtype", "second_moment_dtype")}
    o |= {"ema": asked.ema or EmaConfig(decay=DECAY)}
    cfg = dataclasses.replace(small, optimizer=dataclasses.replace(small.optimizer, **o))
    try:
        here, there = (_first(cfg, names, subject.devices) for names in (SAVED_ON, LOADED_ON))
    except ConfigError as error:
        yield Result("checkpoint", "", "saved and loaded", not_run=str(error))
        return
    unequal = [(n, c) for n, c in subject.meshes.items() if c.parallel.layers_per_stage]
    same = lambda of: dataclasses.replace(of, optimizer=cfg.optimizer)  # noqa: E731
    for name, on_mesh in (here, *((n, same(c)) for n, c in unequal[:1])):
        with tempfile.TemporaryDirectory() as folder:
            written = SavedState.of(on_mesh, Path(folder), subject.devices)
            for what, wrong in written.reloaded(there[1], subject.devices).items():
                yield _said("checkpoint", f"{name} to {there[0]}", what, wrong)
            if name == here[0]:
                yield from _exported(written)


def _said(check: str, mesh: str, what: str, wrong: Sequence[str]) -> Result:
    return Result(check, mesh, what, len(wrong), where=", ".join(wrong[:3]))


def _first(cfg: Config, names: Sequence[str], devices: Sequence[jax.Device]) -> tuple[str, Config]:
    """Return the first mesh on which the config runs with equal stages, and the config on it."""
    *others, last = names
    for name in others:
        try:
            on_mesh = on(cfg, name, len(devices))
        except ConfigError:
            continue
        if is_equal(on_mesh):
            return name, on_mesh
    return last, on(cfg, last, len(devices))


@dataclasses.dataclass(frozen=True)
class SavedState:
    """A checkpoint of random values.

    Args:
        cfg: of its run, resolved for the mesh that saved it.
        logical: its arrays by name, in the model's order.
        misplaced: those that the mesh had in another place than its stages have them.
    """

    cfg: Config
    logical: Arrays
    misplaced: list[str]

    @classmethod
    def of(cls, cfg: Config, folder: Path, devices: Sequence[jax.Device]) -> "SavedState":
        """Save a state in a new run in a folder."""
        cfg, mesh = of_files(cfg, folder), mesh_of(cfg, devices)
        state, logical = random_state(cfg, mesh)
        running = to_running(state, cfg)
        misplaced = in_other_places(running, logical, cfg)
        with Checkpointer(cfg, log=lambda text: None) as saver:
            saver.save(running, STEP, 0)
        return cls(cfg, logical, misplaced)

    @property
    def folder(self) -> Path:
        """The folder of the arrays."""
        return checkpoint_folder(self.cfg.run.dir) / str(STEP)

    def reloaded(self, cfg: Config, devices: Sequence[jax.Device]) -> dict[str, list[str]]:
        """Load the checkpoint for another mesh.

        Args:     cfg: the same config, resolved for it.
        Returns:  the arrays that are wrong, by where they were.
        """
        on_disk = [n for n, right in self.logical.items() if not _equal(self._stored(n), right)]
        cfg = dataclasses.replace(cfg, run=self.cfg.run, data=self.cfg.data)
        found = restore(cfg, mesh_of(cfg, devices))
        return {
            "state on the mesh": self.misplaced,
            "arrays on disk": on_disk,
            "state once loaded": in_other_places(found, self.logical, cfg),
        }

    def _stored(self, name: str) -> np.ndarray:
        return np.asarray(stored_arrays.open_array(self.folder, name).read().result())


def of_files(cfg: Config, folder: Path) -> Config:
    """Return a config of a run in a folder, with data of its own."""
    tokens = np.arange(4 * cfg.data.seq_len, dtype="<u2") % cfg.model.vocab_size
    tokens.tofile(folder / "tokens.bin")
    files: dict[str, Any] = {"run.dir": f"{folder}/run", "data.path": f"{folder}/tokens.bin"}
    files |= {"data.eos_id": 0, "data.mixture": (), "data.mixture_schedule": ()}
    return replace(cfg, **files, **{"data.source": None, "data.held_out": ""})


def random_state(cfg: Config, mesh: Mesh) -> tuple[TrainState, Arrays]:
    """Make a state in the model's order, and its arrays by name on the host."""
    like = abstract_logical(cfg, mesh)
    names = [name.removeprefix("extra/") for name in named_leaves(like)]

    def make(name: str, a: jax.ShapeDtypeStruct) -> np.ndarray:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        if name == "step":
            return np.full(a.shape, STEP, a.dtype)
        if jnp.issubdtype(a.dtype, jnp.floating):
            gain = name.endswith(("_norm", "_scale", "mamba_d"))
            return (gain + 0.05 * rng.standard_normal(a.shape)).astype(a.dtype)
        return rng.integers(0, 100, a.shape).astype(a.dtype)

    leaves, tree = jax.tree.flatten(like)
    found = {name: make(name, a) for name, a in zip(names, leaves, strict=True)}
    placed = [jax.device_put(found[n], a.sharding) for n, a in zip(names, leaves, strict=True)]
    return jax.tree.unflatten(tree, placed), found


def in_other_places(running: TrainState, logical: Arrays, cfg: Config) -> list[str]:
    """Return the names of arrays whose rows are not where the stages of a mesh have them."""
    wrong = []
    for name, array in named_leaves(running.saved).items():
        right = logical[name]
        if _on_stages(name, cfg):
            rows = rows_of_stages(len(right), cfg)
            right = np.where(rows.reshape(-1, *(1,) * (right.ndim - 1)) < 0, 0, right[rows])
            right = right.astype(logical[name].dtype)
        if not _equal(np.asarray(array), right):
            wrong.append(name)
    return wrong


def _on_stages(name: str, cfg: Config) -> bool:
    """Return whether an array has a row for each layer of some name, or of all, on the stages."""
    stacks = {"layers", *cfg.model.stacks} - set(cfg.model.leading_stacks)
    return not stacks.isdisjoint(name.split("/"))


def rows_of_stages(count: int, cfg: Config) -> np.ndarray:
    """Return the layer in each row of a mesh, or -1 in rows without.

    Stage p of P runs parts p, P + p, 2P + p, ... of the layers, and has them one after another. A
    part that is shorter than the longest ends with rows of zeros.

    Source:   Narayanan et al. 2021 (2104.04473), section 2.2: interleaved stages.
    """
    p = cfg.parallel
    parts = p.pipeline * p.virtual_stages
    # Given sizes count layers of every name, in whole periods: each has the same share of a name.
    given = p.layers_per_stage or (1,) * parts
    sizes = [size * count // sum(given) for size in given]
    rows, first = np.full((parts, max(sizes)), -1), 0
    for part, size in enumerate(sizes):
        rows[part, :size] = np.arange(first, first + size)
        first += size
    of_stages = rows.reshape(p.virtual_stages, p.pipeline, -1).swapaxes(0, 1)
    return of_stages.ravel()


def _equal(found: np.ndarray, wanted: np.ndarray) -> bool:
    return found.shape == wanted.shape and found.tobytes() == wanted.tobytes()


# ---------------------------------------------------------------------------------------- exports


def _exported(saved: SavedState) -> Iterator[Result]:
    """Export the checkpoint in both formats, and look at the files."""
    cfg, check = saved.cfg, "export"
    params = {n.removeprefix("params/"): a for n, a in saved.logical.items() if "params/" in n}
    merged = merged_weights({n: a for n, a in params.items()}, cfg)
    if cfg.lora:
        tree = flax.traverse_util.unflatten_dict(params, sep="/")
        of_model = {n: np.asarray(a) for n, a in flat(lora.merge(tree, factor(cfg.lora))).items()}
        yield _said(check, "", "merged adapters", _differing(of_model, merged))
    silent = lambda text: None  # noqa: E731
    folder = Path(cfg.run.dir).parent
    terms = (term for of in cfg.model.layers for term in (of.mixer, of.feed_forward) if term)
    if not any(map(is_own, terms)):
        file = folder / "model.safetensors"
        opened = torch_file.open_export(cfg.run.dir, STEP, "float32")
        torch_file.to_torch(opened, file, silent, None)
        wrong = _differing(tensors_in(file), by_place(merged, cfg.model))
        yield _said(check, "", "safetensors", wrong)
    else:
        why = "the model has components of your own, which are exported with their code"
        yield Result(check, "", "safetensors", not_run=why)
    try:
        export = exporting.open_export(cfg.run.dir, STEP, "float32")
    except ConfigError as error:
        why = str(error).partition(" (")[0]  # and why each family does not
        yield Result(check, "", "published format", not_run=why)
        return
    published = folder / "published"
    exporting.to_hf(export, published, silent, None)
    files = dict[str, np.ndarray]()
    for file in sorted(published.glob("*.safetensors")):
        files |= tensors_in(file)
    model, kind = cfg.model, export.family.model_type
    if kind in PUBLISHED:
        wrong = _differing(files, published_weights(merged, model, kind), some=True)
        yield _said(check, "", f"names of {kind}", wrong)
    else:
        yield Result(check, "", f"names of {kind}", not_run="certify has no other table of them")
    source = importing.from_hf(published, folder / "imported", silent, None)
    arrays = open_run(folder / "imported", source.config, 0)
    back = {n: arrays.read(n, (...,)) for n in arrays.by_path}  # type: ignore[arg-type]
    wanted = by_place(merged, model)
    wrong = _differing(by_place(back, source.config.model), wanted, some=True)
    yield _said(check, "", f"{kind}, imported", wrong)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (1, min(cfg.data.seq_len, 32)))
    here = _logits(merged, tokens, model)
    # The exported one has no µP: its factors are those of other fields.
    far = np.abs(_logits(back, tokens, source.config.model) - here).max() / np.abs(here).max()
    yield Result(check, "", f"logits of {kind}, imported", float(far), LOGITS)


#: Bound on the relative error of logits: factors are multiplied in another order.
LOGITS = 1e-4


def _logits(params: Arrays, tokens: np.ndarray, model: Model) -> np.ndarray:
    tree: dict[str, Any] = {}
    for path, array in params.items():
        stack, _, name = path.rpartition("/")
        (tree.setdefault(stack, {}) if stack else tree)[name] = jnp.asarray(array, jnp.float32)
    tokens = tokens.astype(np.int32)
    place = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    run = jax.jit(lambda tree: logits_of(tree, tokens, place, 0 * place, model))
    return np.asarray(run(tree))


def merged_weights(params: Mapping[str, np.ndarray], cfg: Config) -> Arrays:
    """Return the weights with adapters merged into them: W + factor A B.

    Source:   Hu et al. 2021 (2106.09685), section 4.1; Kalajdzievski 2023 (2312.03732).
    """
    found = {n: a for n, a in params.items() if not n.endswith(("_lora_a", "_lora_b"))}
    if cfg.lora:
        root = 0.5 if cfg.lora.rank_stabilized else 1.0
        times = cfg.lora.alpha / cfg.lora.rank**root
        for name in [n for n in found if f"{n}_lora_a" in params]:
            a, b = (params[f"{name}_lora_{part}"].astype(np.float64) for part in "ab")
            product = np.stack([np.tensordot(x, y, 1) for x, y in zip(a, b, strict=True)])
            found[name] = (found[name] + times * product).astype(np.float32)
    return found


def by_place(params: Mapping[str, np.ndarray], model: Model) -> Arrays:
    """Return weights by the number of their layer, "layers.3.wq", whatever its stack is."""
    found, seen = dict[str, np.ndarray](), dict[str, int]()
    for i, layer in enumerate(model.layers):
        row = seen.setdefault(layer.name, 0)
        seen[layer.name] += 1
        for path, array in params.items():
            stack, _, name = path.rpartition("/")
            if stack == layer.name:
                found[f"layers.{i}.{name}"] = array[row]
    return found | {path: a for path, a in params.items() if "/" not in path}


def _differing(found: Arrays, wanted: Arrays, *, some: bool = False) -> list[str]:
    """Return the names of arrays that differ; merged ones by more than rounding.

    Args:     some: `found` may have others.
    """
    extra = [] if some else [f"{n}, which is new" for n in found if n not in wanted]
    wrong = [f"{n}, which is missing" for n in wanted if n not in found]
    wrong += [n for n in wanted if n in found and not _near(found[n], wanted[n])]
    return wrong + extra


def _near(found: np.ndarray, wanted: np.ndarray) -> bool:
    return found.shape == wanted.shape and bool(np.allclose(found, wanted, rtol=0, atol=1e-6))


def tensors_in(file: Path) -> Arrays:
    """Read a file of float32 tensors: the length of its header, the header, and the bytes."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    found = {}
    for name, about in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            assert about["dtype"] == "F32", about
            begin, end = (8 + length + at for at in about["data_offsets"])
            found[name] = np.frombuffer(raw[begin:end], "<f4").reshape(about["shape"])
    return found


# What transformers names the weights of families without other conventions, each a matrix [outputs,
# inputs]: `modeling_llama.py` and its kin. A table of `convert` that is wrong both ways shows here.

_PARTS = ("gate", "up", "down")
_OF_LAYER = {
    **{f"self_attn.{n}_proj.weight": f"w{n}" for n in "qkvo"},
    **{f"mlp.{n}_proj.weight": f"w_{n}" for n in _PARTS},
    "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "mlp_norm",
}
_OF_HEADS = {f"self_attn.{n}_norm.weight": f"{n}_norm" for n in "qk"}
_OF_EXPERTS = {
    **{f"mlp.experts.{{}}.{n}_proj.weight": f"w_{n}" for n in _PARTS},
    "mlp.gate.weight": "router",
}
_FOUR_NORMS = {
    "post_attention_layernorm.weight": "attn_post_norm",
    "pre_feedforward_layernorm.weight": "mlp_norm",
    "post_feedforward_layernorm.weight": "mlp_post_norm",
}
_OF_LATENTS = {n: name for n, name in _OF_LAYER.items() if name not in ("wq", "wk", "wv")}
PUBLISHED = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "granite"), _OF_LAYER),
    "qwen3": _OF_LAYER | _OF_HEADS,
    "qwen3_moe": _OF_LAYER | _OF_HEADS | _OF_EXPERTS,
    "deepseek_v2": _OF_LATENTS | _OF_EXPERTS,
    "deepseek_v3": _OF_LATENTS | _OF_EXPERTS,
    "gpt_oss": _OF_LAYER,
    "gemma2": _OF_LAYER | _FOUR_NORMS,
    "gemma3_text": _OF_LAYER | _OF_HEADS | _FOUR_NORMS,
}


def published_weights(params: Arrays, model: Model, kind: str) -> Arrays:
    """Return weights by their published names."""
    found = {
        "model.embed_tokens.weight": params["embed"],
        "model.norm.weight": params["final_norm"],
    }
    if "head" in params:
        found["lm_head.weight"] = params["head"].T
    placed = by_place(params, model)
    for path, array in placed.items():
        place, _, weight = path.rpartition(".")
        if kind == "gpt_oss" and weight == "w_gate":  # [experts, inputs, outputs], in turn
            both = np.stack([array, placed[f"{place}.w_up"]], axis=-1)
            found[f"model.{place}.mlp.experts.gate_up_proj"] = both.reshape(*array.shape[:-1], -1)
        inputs = 2 if weight == "wo" else 1  # dims: of heads, or of the width
        for tensor, name in PUBLISHED[kind].items():
            named = f"model.{place}.{tensor}"
            if name != weight or not place:
                continue
            if "{}" in tensor and array.ndim == 3:
                found |= {named.format(e): matrix.T for e, matrix in enumerate(array)}
            elif "{}" not in tensor and (
                array.ndim == 1 or "mlp." not in tensor or array.ndim == 2
            ):
                whole = array.reshape(int(np.prod(array.shape[:inputs])), -1).T
                found[named] = array if array.ndim == 1 else whole
    return found
