"""Published models: the logits of `transformers`, and the same bits after a round trip.

The goldens are `transformers`' own logits of the same weights, from goldens/make_hf_goldens.py.
"""

import dataclasses
import functools
import json
from pathlib import Path

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpar.checkpoint.loading import restore_params
from jaxpar.checkpoint.saved import saved_config
from jaxpar.config import Config, replace
from jaxpar.config.layers import with_value
from jaxpar.config.validate import resolve
from jaxpar.convert.hf import exporting, importing
from jaxpar.convert.hf.config import config_json, model_of
from jaxpar.convert.hf.families import DOTS1
from jaxpar.convert.hf.folder import INDEX_FILE
from jaxpar.convert.hf.importing import load_params
from jaxpar.inference.generation import (
    config_for_sampling,
    generate,
    make_next_logits,
    weights_for_sampling,
)
from jaxpar.inference.options import Sampling
from jaxpar.model.plain import decoder
from jaxpar.sharding.mesh import make_mesh
from tests.convert import tiny
from tests.slow import slow, slow_but

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

GOLDENS = Path(__file__).parent / "goldens"

#: float32, largest absolute difference of any logit; the largest logits are about 3.5.
TOLERANCE = 1e-5

MODELS = list(tiny.MODELS)
#: Stretched RoPE, two kinds of layers with norms after them, experts, biases of experts and sinks,
#: latent attention, recurrences, LayerNorm. The tensors of every class: test_tensor_layout.py.
QUICK = ["llama3_1", "gemma3", "mixtral", "gpt_oss", "deepseek_v3_whole", "qwen3_next", "gpt2"]


def silent(_: str) -> None:
    """Says nothing."""


@functools.cache
def golden(name: str) -> np.ndarray:
    """Logits float32 [tokens, vocabulary] by `transformers`."""
    return np.load(GOLDENS / f"{name}.npy")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    """name -> (folder as published, the run that it became)."""
    root = tmp_path_factory.mktemp("convert")

    @functools.cache
    def make(name: str) -> tuple[Path, Path]:
        folder = tiny.write_folder(root / name, tiny.MODELS[name])
        importing.from_hf(folder, root / f"run-{name}", silent, tolerance=None)
        return folder, root / f"run-{name}"

    return make


@pytest.fixture(scope="module")
def params_of(devices):
    """run -> its config and its parameters on one device, as every program restores them."""

    def restore(run: Path):
        cfg = resolve(replace(saved_config(run), **{"parallel.data": 1}), 1)
        mesh = make_mesh(cfg.parallel, devices[:1])
        return cfg, restore_params(run, cfg, mesh)

    return restore


def plain_logits(params, cfg: Config, tokens: np.ndarray) -> np.ndarray:
    """Logits of the plain model, [tokens, vocabulary]."""
    one = np.ones_like(tokens)
    place = np.arange(tokens.shape[1])[None]
    run = jax.jit(lambda p: decoder.logits_of(p, tokens, place, one, cfg.model))
    return np.asarray(run(params))[0]


@pytest.mark.parametrize("name", slow_but(QUICK, MODELS))
def test_logits_are_those_of_transformers(name, folders, params_of):
    cfg, params = params_of(folders(name)[1])
    tokens = tiny.tokens(tiny.MODELS[name])
    found, wanted = plain_logits(params, cfg, tokens), golden(name)
    assert wanted.shape[0] >= 256 and np.abs(wanted).max() > 1
    assert np.abs(found - wanted).max() <= TOLERANCE


@pytest.mark.slow
def test_the_text_is_long_enough_to_tell_rope_scaling_and_windows(folders, params_of):
    for name, off in (
        ("llama3_1", {"rope.scaling": None}),
        ("yarn_mscale", {"rope.scaling.attention_factor": None}),
        ("longrope", {"rope.scaling.original_max_position": 512}),
        ("mistral", {"window": None}),
        ("deepseek_v3_whole", {"rope.scaling.mscale_all_dim": 0.0}),
    ):
        cfg, params = params_of(folders(name)[1])
        layers = cfg.model.layers
        for key, value in off.items():
            layers = with_value(layers, f"model.{layers[-1].name}.mixer.{key}", value)
        without = dataclasses.replace(cfg, model=cfg.model.with_layers(layers))
        found = plain_logits(params, without, tiny.tokens(tiny.MODELS[name]))
        assert np.abs(found - golden(name)).max() > 0.01, name


@pytest.mark.parametrize("name", slow_but(QUICK, MODELS))
def test_round_trip_is_bitwise(name, folders, tmp_path):
    folder, run = folders(name)
    exporting.to_hf(exporting.open_export(run), tmp_path / "out", silent, None)
    before, after = (
        load_file(folder / "model.safetensors"),
        load_file(tmp_path / "out/model.safetensors"),
    )
    assert before.keys() == after.keys()
    assert all(before[n].tobytes() == after[n].tobytes() for n in before)
    assert all(before[n].shape == after[n].shape for n in before)
    importing.open_source(tmp_path / "out")
    imported, exported = (
        json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "out")
    )
    changed = {k for k in exported | imported if exported.get(k) != imported.get(k)}
    assert changed <= {"dtype", "torch_dtype", "quantization_config"}


def test_another_family_keeps_what_holds_in_each(folders, tmp_path):
    run = folders("llama3")[1]
    exporting.to_hf(exporting.open_export(run, family="mistral"), tmp_path / "out", silent, None)
    values = json.loads((tmp_path / "out/config.json").read_text())
    assert values["model_type"] == "mistral" and values["eos_token_id"] == 2
    assert values["max_position_embeddings"] == 512 and values["sliding_window"] is None
    assert "attention_bias" not in values
    layers = importing.open_source(tmp_path / "out").config.model.layers
    assert {layer.mixer.window for layer in layers} == {None}


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16")])
def test_round_trip_of_half_precision_in_several_files(dtype, tmp_path):
    values = tiny.MODELS["qwen3"] | {"torch_dtype": dtype}
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    arrays = {n: a.astype(kind) for n, a in tiny.tensors(values).items()}
    folder = tiny.write_folder(tmp_path / "in", values)
    code = {"bfloat16": "BF16", "float16": "F16"}[dtype]
    tiny.write_safetensors(folder / "model.safetensors", arrays, code)
    importing.from_hf(folder, tmp_path / "run", silent)
    export = exporting.open_export(tmp_path / "run")
    assert export.dtype == dtype
    exporting.to_hf(export, tmp_path / "out", silent, shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in arrays.values())
    loaded = {n: a for f in files for n, a in load_file(tmp_path / "out" / f).items()}
    assert loaded.keys() == arrays.keys()
    assert all(loaded[n].tobytes() == arrays[n].tobytes() for n in arrays)
    importing.from_hf(tmp_path / "out", tmp_path / "again", silent)


def test_a_routers_bias_stays_float32_beside_half_precision(tmp_path):
    """A rounded bias would choose other experts."""
    values = tiny.MODELS["dots1"] | {"torch_dtype": "bfloat16"}
    arrays = tiny.tensors(values)
    halves = {
        n: a if n.endswith("bias") else a.astype(ml_dtypes.bfloat16) for n, a in arrays.items()
    }
    folder = tiny.write_folder(tmp_path / "in", values)
    save_file(halves, folder / "model.safetensors")
    source = importing.from_hf(folder, tmp_path / "run", silent)
    assert source.config.compute.dtype == "bfloat16"
    exporting.to_hf(exporting.open_export(tmp_path / "run"), tmp_path / "out", silent)
    found = load_file(tmp_path / "out/model.safetensors")
    assert {n: a.dtype for n, a in found.items()} == {n: a.dtype for n, a in halves.items()}
    assert all(found[n].tobytes() == halves[n].tobytes() for n in halves)


def test_layers_for_multi_token_prediction_are_left_out(tmp_path):
    values, arrays = tiny.MODELS["qwen3_5"], tiny.tensors(tiny.MODELS["qwen3_5"])
    folder, said = tiny.write_folder(tmp_path / "in", values), []
    extra = {"mtp.fc.weight": np.ones((32, 64), np.float32)}
    tiny.write_safetensors(folder / "model.safetensors", arrays | extra)
    importing.from_hf(folder, tmp_path / "run", said.append, tolerance=None)
    assert said[0] == "left out 1 tensors of layers for multi-token prediction"
    exporting.to_hf(exporting.open_export(tmp_path / "run"), tmp_path / "out", silent, None)
    assert load_file(tmp_path / "out/model.safetensors").keys() == arrays.keys()


@pytest.mark.parametrize(
    ("changes", "window", "widths"),
    [
        ({"sliding_window": 4096}, None, [56, 24, 24]),
        ({"sliding_window": 48, "max_window_layers": 0}, 48, [56, 24, 24]),
        ({"first_k_dense_replace": 0}, None, [24, 24, 24]),
    ],
)
def test_other_models_of_dots1(changes, window, widths):
    m = model_of(tiny.MODELS["dots1"] | changes, DOTS1)
    forwards = [layer.feed_forward for layer in m.layers]
    assert {layer.mixer.window for layer in m.layers} == {window}
    assert [getattr(f, "d_ff", None) or f.expert.d_ff for f in forwards] == widths
    again = config_json(m, DOTS1, {}, "float32")
    assert again["moe_intermediate_size"] == 24
    assert model_of(again, DOTS1) == m


def test_the_tensors_dtype_counts(tmp_path):
    folder = tiny.write_folder(tmp_path / "in", tiny.MODELS["llama3"] | {"torch_dtype": "bfloat16"})
    source = importing.from_hf(folder, tmp_path / "run", silent, None)
    assert source.config.compute.dtype == "float32"
    export = exporting.open_export(tmp_path / "run")
    exporting.to_hf(export, tmp_path / "out", silent, None)
    assert export.dtype == "float32"
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "out"))
    assert all(before[n].tobytes() == after[n].tobytes() for n in before)


MESHES = {
    "qwen3": {"data": 2, "tensor": 2},
    "llama3_2": {"data": 2, "replica": 2},
    "mistral": {"tensor": 2, "data": 1},
    "gemma3": {"data": 2, "tensor": 2},
    "mixtral": {"expert": 2, "tensor": 2, "data": 1},
    "olmoe": {"data": 2, "tensor": 2},
    "dots1": {"expert": 2, "tensor": 2, "data": 1},
    "gpt_oss": {"expert": 2, "tensor": 2, "data": 1},
    "olmo3": {"data": 2, "tensor": 2},
    "deepseek_v3_whole": {"expert": 2, "tensor": 2, "data": 1},
}


@pytest.mark.parametrize("name", slow_but(["mixtral"], MESHES))
def test_a_folder_goes_straight_onto_a_mesh(name, folders, params_of, devices):
    folder, run = folders(name)
    source, said = importing.open_source(folder), []
    axes = {f"parallel.{axis}": n for axis, n in MESHES[name].items()}
    n = int(np.prod(list(MESHES[name].values())))
    cfg = resolve(replace(source.config, **axes, **{"data.seq_len": tiny.NUM_TOKENS}), n)
    mesh = make_mesh(cfg.parallel, devices[:n])
    params = load_params(source, cfg, mesh, said.append)
    _, wanted = params_of(run)
    chex.assert_trees_all_equal(params, wanted)
    # Every number is read once, however many devices hold it.
    (line,) = said
    assert line.startswith(f"read {source.num_bytes / 1000:.1f} kB in ")
    tokens = tiny.tokens(tiny.MODELS[name]).astype(np.int32)
    found = make_next_logits(cfg, mesh)(params, tokens, tiny.NUM_TOKENS - 1)[0]
    assert np.abs(found - golden(name)[-1]).max() <= TOLERANCE


#: In classes other than Phi-3's, `transformers` rotates keys of LongRoPE as long as the text was
#: when they came into the cache.
SAME_CACHE = [name for name in MODELS if name != "longrope"]


@pytest.mark.parametrize("name", slow_but(["llama3_1"], SAME_CACHE))
def test_greedy_text_is_that_of_transformers(name, folders, devices):
    """Each by its own cache; ours has all the prompts, of different lengths, in one batch."""
    cfg = resolve(config_for_sampling(saved_config(folders(name)[1])), 1)
    mesh = make_mesh(cfg.parallel, devices[:1])
    params = restore_params(folders(name)[1], cfg, mesh)
    weights = weights_for_sampling(params, cfg, mesh)
    tokens = tiny.tokens(tiny.MODELS[name])[0]
    prompts = [tokens[start:end].tolist() for start, end in tiny.PROMPTS]
    found: list[list[int]] = [[] for _ in prompts]
    size = {"max_tokens": tiny.NUM_GREEDY, "vocab_size": cfg.model.vocab_size}
    greedy = Sampling(temperature=0.0)
    for new in generate(weights, cfg, mesh, prompts, greedy, stop=(), **size):
        found = [row + ids for row, ids in zip(found, new, strict=True)]
    wanted = json.loads((GOLDENS / "greedy.json").read_text())[name]
    assert found == wanted
    assert len({token for row in wanted for token in row}) > 3


@pytest.mark.slow
def test_sampling_knows_layers_of_two_kinds(folders, params_of, devices):
    cfg, params = params_of(folders("gemma3")[1])
    cfg = config_for_sampling(cfg)
    tokens = tiny.tokens(tiny.MODELS["gemma3"]).astype(np.int32)
    step = make_next_logits(cfg, make_mesh(cfg.parallel, devices[:1]))
    found = step(params, tokens, tiny.NUM_TOKENS - 1)[0]
    assert np.abs(found - golden("gemma3")[-1]).max() <= TOLERANCE


def test_a_pipeline_gets_its_layers_in_its_own_order(devices, tmp_path):
    values = tiny.MODELS["llama3"] | {"num_hidden_layers": 4}
    source = importing.open_source(tiny.write_folder(tmp_path / "in", values))
    axes = {"parallel.pipeline": 2, "parallel.virtual_stages": 2, "parallel.num_microbatches": 2}
    cfg = resolve(replace(source.config, **axes, **{"parallel.data": 1, "parallel.zero": 1}), 2)
    params = load_params(source, cfg, make_mesh(cfg.parallel, devices[:2]), silent)
    found = np.asarray(params["layers"]["w_down"])
    for place, layer in enumerate((0, 2, 1, 3)):
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        np.testing.assert_array_equal(found[place], tiny.tensors(values)[name].T)
