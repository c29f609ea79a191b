"""Adapters out: PEFT's folder, and merged into the model's.

The golden folder and logits are PEFT's own, of the same adapters, by goldens/make_peft_goldens.py.
"""

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxpar.checkpoint import integrity, stored_arrays
from jaxpar.checkpoint.loading import restore_params
from jaxpar.checkpoint.saved import saved_config
from jaxpar.checkpoint.saving import Checkpointer
from jaxpar.commands import call
from jaxpar.config import Config, ConfigError, LoraConfig, replace
from jaxpar.config.validate import resolve
from jaxpar.convert import selfcheck
from jaxpar.convert.hf import exporting, importing
from jaxpar.convert.hf import folder as hf_folder
from jaxpar.convert.hf.config import model_of
from jaxpar.convert.hf.families import OLMO_HYBRID, PHI3
from jaxpar.convert.hf.importing import load_params
from jaxpar.convert.hf.tensor_layout import as_ours
from jaxpar.convert.peft import exporting as peft_folder
from jaxpar.convert.peft import importing as peft_import
from jaxpar.convert.peft.merging import MergedArrays
from jaxpar.model.plain import decoder
from jaxpar.sharding.mesh import make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step import state
from jaxpar.step.adapters import add_fresh, base_config, merge
from tests.checkpoint.test_checkpoint import write_dataset
from tests.convert import tiny
from tests.convert.test_goldens import TOLERANCE, plain_logits, silent

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

GOLDEN = Path(__file__).parent / "goldens" / "peft"
VALUES = tiny.MODELS[tiny.ADAPTED]
LORA = LoraConfig(rank=tiny.ADAPTERS["r"], alpha=tiny.ADAPTERS["lora_alpha"], rank_stabilized=True)


def save_run(folder: Path, base: Path, devices, mesh_axes: dict[str, int], **fields) -> Config:
    """A run on a published model whose adapters are those of `tiny`, saved from a mesh."""
    source = importing.open_source(base)
    places = {"run.dir": str(folder / "run"), "data.path": write_dataset(folder / "data")}
    axes = {f"parallel.{axis}": n for axis, n in mesh_axes.items()}
    cfg = dataclasses.replace(source.config, lora=LORA)
    cfg = replace(cfg, **places, **axes, **{"run.init_from": str(base)}, **fields)
    n = int(np.prod(list(mesh_axes.values())))
    cfg, mesh = resolve(cfg, n), make_mesh(cfg.parallel, devices[:n])
    arrays = {
        name: np.asarray(a) for name, a in flat(load_params(source, cfg, mesh, silent)).items()
    }
    given = tiny.adapter_tensors()
    for entry in peft_folder.adapter_entries(source.family, cfg):
        names = [entry.name.format(L=i) for i in range(cfg.model.num_layers)]
        arrays[entry.path] = np.stack([as_ours(given[name], entry) for name in names])
    shardings = flat(state.state_shardings(cfg, mesh).params)
    placed = {name: jax.device_put(a, shardings[name]) for name, a in arrays.items()}
    tree = {"layers": {n.removeprefix("layers/"): a for n, a in placed.items() if "/" in n}}
    tree |= {n: a for n, a in placed.items() if "/" not in n}
    with Checkpointer(cfg) as saver:
        saver.save(state.state_of(tree, cfg, mesh), 5, 0)
    return cfg


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("base") / "model", VALUES)


@pytest.fixture(scope="module")
def run(tmp_path_factory, base, devices) -> Config:
    return save_run(tmp_path_factory.mktemp("peft"), base, devices, {"data": 2, "tensor": 2})


def options(run: Config, folder: Path, *more: str) -> list[str]:
    return [run.run.dir, str(folder), *more]


def test_the_folder_is_what_peft_itself_writes(run, base, tmp_path, capsys):
    export = exporting.open_export(run.run.dir, dtype="float32")
    peft_folder.to_peft(export, tmp_path / "out", print, str(base))
    shown = capsys.readouterr().out
    assert f"compared with {base} and the written adapters" in shown
    found, wanted = (load_file(f / peft_folder.ADAPTER_FILE) for f in (tmp_path / "out", GOLDEN))
    assert found.keys() == wanted.keys() and len(found) == 28
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
        assert found[name].dtype == np.float32
    ours, theirs = (
        json.loads((f / peft_folder.ADAPTER_CONFIG).read_text()) for f in (tmp_path / "out", GOLDEN)
    )
    assert set(ours) <= set(theirs)
    assert ours["base_model_name_or_path"] == str(base)
    ours |= {"base_model_name_or_path": None, "target_modules": sorted(ours["target_modules"])}
    assert ours == {key: theirs[key] for key in ours}


def test_logits_are_those_of_peft(run, devices):
    """Unmerged in the plain model, and merged on a mesh."""
    wanted, tokens = np.load(GOLDEN / "logits.npy"), tiny.tokens(VALUES)
    assert wanted.shape[0] >= 256
    cfg = resolve(replace(run, **{"parallel.data": 1, "parallel.tensor": 2}), 2)
    mesh = make_mesh(cfg.parallel, devices[:2])
    params = restore_params(run.run.dir, cfg, mesh)
    apart = plain_logits(decoder.scale_adapters(jax.device_get(params), cfg), cfg, tokens)
    assert np.abs(apart - wanted).max() <= TOLERANCE
    alone = plain_logits(jax.device_get(merge(params, cfg, mesh)), base_config(cfg), tokens)
    assert np.abs(alone - wanted).max() <= TOLERANCE


def test_the_merged_model_is_a_published_one(run, tmp_path, capsys):
    assert call("convert", ["to-hf", *options(run, tmp_path / "out"), "--dtype", "float32"]) == 0
    shown = capsys.readouterr().out
    assert "compared with merged adapters" in shown and "with the written files" in shown
    source = importing.open_source(tmp_path / "out")
    assert source.config.lora is None
    cfg = resolve(replace(source.config, **{"parallel.data": 1}), 1)
    params = load_params(source, cfg, make_mesh(cfg.parallel, jax.devices()[:1]), silent)
    found = plain_logits(params, cfg, tiny.tokens(VALUES))
    assert np.abs(found - np.load(GOLDEN / "logits.npy")).max() <= TOLERANCE
    # What has no adapter is as it was.
    folders = Path(run.run.init_from), tmp_path / "out"
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    same = [name for name in before if before[name].tobytes() == after[name].tobytes()]
    assert sorted(same) == sorted(n for n in before if "_proj" not in n)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "targets", "modules"),
    [
        (
            "nemotron_h",
            "o_proj,out_proj,up_proj",
            [f"{i}.mixer.{name}_proj" for i, name in enumerate(("out", "o", "up", "out"))],
        ),
        (
            "deepseek_v3_whole",
            "q_b_proj,kv_b_proj",
            [f"{i}.self_attn.{name}" for i in range(3) for name in ("kv_b_proj", "q_b_proj")],
        ),
        ("qwen3_5", "k_proj,out_proj,down_proj", None),
        ("kimi_linear", "kv_a_proj_with_mqa,kv_b_proj", None),
        (
            "gemma4",
            "k_proj,v_proj,up_proj",
            [f"{i}.{name}" for i in range(4) for name in ("mlp.up_proj", "self_attn.k_proj")]
            + [f"{i}.self_attn.v_proj" for i in (0, 2)],
        ),
    ],
)
def test_adapters_of_several_kinds_of_layers_go_both_ways(
    name, targets, modules, tmp_path, devices
):
    base, params, export = adapted_run(name, targets, tmp_path, devices)
    peft_folder.to_peft(export, tmp_path / "out", silent, str(base))
    written = load_file(tmp_path / "out" / peft_folder.ADAPTER_FILE)
    found = {key.partition("layers.")[2].rpartition(".lora_")[0] for key in written}
    assert modules is None or sorted(found) == sorted(modules)
    back = peft_import.from_peft(tmp_path / "out", tmp_path / "back", silent, str(base))
    back = resolve(replace(back, **{"parallel.data": 1}), 1)
    mesh = make_mesh(back.parallel, devices[:1])
    again = flat(restore_params(back.run.dir, back, mesh))
    for path, value in flat(params).items():
        np.testing.assert_array_equal(again[path], value, err_msg=path)


def adapted_run(name: str, targets: str, folder: Path, devices):
    """A tiny model's published folder, its parameters with drawn adapters, and their run."""
    base = tiny.write_folder(folder / "model", tiny.MODELS[name])
    source = importing.open_source(base)
    places = {"run.dir": str(folder / "run"), "data.path": write_dataset(folder / "data")}
    cfg = dataclasses.replace(
        source.config, lora=LoraConfig(rank=2, targets=tuple(targets.split(",")))
    )
    cfg = resolve(replace(cfg, **places, **{"parallel.data": 1}), 1)
    mesh, rng = make_mesh(cfg.parallel, devices[:1]), np.random.default_rng(0)
    params = add_fresh(load_params(source, cfg, mesh, silent), cfg, mesh)
    drawn = lambda a: jax.device_put(rng.normal(0, 0.1, a.shape).astype("f"), a.sharding)  # noqa: E731
    params = jax.tree_util.tree_map_with_path(
        lambda path, a: drawn(a) if path[-1].key.endswith("_lora_b") else a, params
    )
    with Checkpointer(cfg) as saver:
        saver.save(state.state_of(params, cfg, mesh), 5, 0)
    return base, params, exporting.open_export(cfg.run.dir, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parts"),
    [("nemotron_h", ["in_proj"]), ("qwen3_next", ["in_proj_qkvz", "in_proj_ba"])],
)
def test_adapters_of_a_recurrence_are_merged_and_have_no_peft_form(name, parts, tmp_path, devices):
    base, _, export = adapted_run(name, "k_proj,in_proj,out_proj", tmp_path, devices)
    exporting.to_hf(export, tmp_path / "out", silent)  # compares with the adapters apart
    before, after = (load_file(f / "model.safetensors") for f in (base, tmp_path / "out"))
    changed = {name.split(".")[-2] for name in before if (before[name] != after[name]).any()}
    assert changed == {"k_proj", "out_proj", *parts}
    with pytest.raises(ConfigError, match=r"targets = 'in_proj': is a part of in_proj"):
        peft_folder.to_peft(export, tmp_path / "adapters", silent, str(base))


def test_a_name_that_peft_has_for_two_matrices_is_refused():
    model = model_of(tiny.MODELS["olmo_hybrid"], OLMO_HYBRID)
    lora = LoraConfig(rank=2, targets=("q_proj", "o_proj"))
    cfg = dataclasses.replace(Config(), model=model, lora=lora)
    said = r"targets = 'q_proj': is q_proj in olmo_hybrid, as is the matrix delta_layers/delta_q"
    with pytest.raises(ConfigError, match=said):
        peft_folder.adapter_entries(OLMO_HYBRID, cfg)
    both = replace(
        cfg, **{"lora.targets": ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj")}
    )
    assert len(peft_folder.adapter_entries(OLMO_HYBRID, both)) == 2 * (4 + 6 + 1)


def test_half_precision_is_rounded_once(run, tmp_path):
    assert call("convert", ["to-hf", *options(run, tmp_path / "a"), "--dtype", "bfloat16"]) == 0
    flags = ["--dtype", "bfloat16", "--base", str(run.run.init_from)]
    assert call("convert", ["to-peft", *options(run, tmp_path / "b"), *flags]) == 0
    tensors = hf_folder.find_tensors(tmp_path / "a")
    assert tensors.dtype() == "bfloat16"


def test_a_wrong_merge_is_found(run, tmp_path, monkeypatch):
    right = MergedArrays.read

    def read(arrays: MergedArrays, path: str, box) -> np.ndarray:
        return right(arrays, path, box) * np.float32(1.01 if path.endswith("wv") else 1)

    monkeypatch.setattr(MergedArrays, "read", read)
    export = exporting.open_export(run.run.dir, dtype="float32")
    with pytest.raises(selfcheck.CheckFailed, match="compared with merged adapters"):
        exporting.to_hf(export, tmp_path / "out", silent)
    assert not (tmp_path / "out").exists()


def test_what_is_merged_is_compared_with_its_fingerprints_once(run, tmp_path, monkeypatch):
    right, counted = stored_arrays.fingerprint_of, []
    monkeypatch.setattr(stored_arrays, "fingerprint_of", lambda a: counted.append(a) or right(a))
    assert call("convert", ["to-peft", *options(run, tmp_path / "adapters"), "--no-check"]) == 0
    assert not counted  # adapters are compared as they are written, and nothing else is read
    assert call("convert", ["to-hf", *options(run, tmp_path / "merged")]) == 0
    assert len(counted) == len(exporting.open_export(run.run.dir).arrays.by_path)
    monkeypatch.setattr(stored_arrays, "fingerprint_of", lambda _: "another")
    with pytest.raises(integrity.Damaged, match="has fingerprint another, not"):
        exporting.to_hf(exporting.open_export(run.run.dir), tmp_path / "out", silent, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapters", "merged"]


def test_another_base_is_found(run, tmp_path):
    other = tiny.write_folder(tmp_path / "other", VALUES | {"rms_norm_eps": 1e-2})
    export = exporting.open_export(run.run.dir, dtype="float32")
    with pytest.raises(ConfigError, match=r"is another model.*model\.norm\.eps differ"):
        peft_folder.to_peft(export, tmp_path / "out", silent, str(other))
    arrays = tiny.tensors(VALUES)
    arrays["model.layers.0.mlp.up_proj.weight"] *= 1.5
    moved = tiny.write_folder(tmp_path / "moved", VALUES)
    tiny.write_safetensors(moved / "model.safetensors", arrays)
    with pytest.raises(selfcheck.CheckFailed, match="moved and the written adapters"):
        peft_folder.to_peft(export, tmp_path / "out", silent, str(moved))
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_written(run, base, tmp_path):
    plain = importing.from_hf(base, tmp_path / "plain", silent, None)
    assert plain.config.lora is None
    with pytest.raises(ConfigError, match=r"was trained without adapters.*`to-hf`"):
        call("convert", ["to-peft", str(tmp_path / "plain"), str(tmp_path / "out")])
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(ConfigError, match="already exists"):
        call("convert", ["to-peft", *options(run, tmp_path / "used")])


def test_adapters_of_parts_of_a_tensor_are_refused():
    cfg = dataclasses.replace(Config(), lora=LoraConfig(rank=4, targets=("o_proj", "gate_proj")))
    with pytest.raises(ConfigError, match=r"lora\.targets = 'gate_proj': .*gate_up_proj in phi3"):
        peft_folder.adapter_entries(PHI3, cfg)
    fitting = replace(cfg, **{"lora.targets": ("o_proj", "down_proj")})
    assert len(peft_folder.adapter_entries(PHI3, fitting)) == 4


def test_a_folder_of_peft_becomes_a_run_and_is_written_again(base, tmp_path, capsys):
    flags = ["--base", str(base)]
    assert call("convert", ["from-peft", str(GOLDEN), str(tmp_path / "run"), *flags]) == 0
    assert "with the published files: largest difference 0.00e+00" in capsys.readouterr().out
    cfg = saved_config(tmp_path / "run")
    assert cfg.lora == LORA
    cfg = resolve(replace(cfg, **{"parallel.data": 1}), 1)
    params = restore_params(tmp_path / "run", cfg, make_mesh(cfg.parallel, jax.devices()[:1]))
    apart = decoder.scale_adapters(jax.device_get(params), cfg)
    found = plain_logits(apart, cfg, tiny.tokens(VALUES))
    assert np.abs(found - np.load(GOLDEN / "logits.npy")).max() <= TOLERANCE
    assert call("convert", ["to-peft", str(tmp_path / "run"), str(tmp_path / "out"), *flags]) == 0
    names = peft_folder.ADAPTER_FILE
    found, wanted = (load_file(f / names) for f in (tmp_path / "out", GOLDEN))
    assert found.keys() == wanted.keys()
    assert all(found[n].tobytes() == wanted[n].tobytes() for n in wanted)


def drop(values: dict, arrays: dict) -> None:
    del arrays["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"]


def add(values: dict, arrays: dict) -> None:
    arrays["base_model.model.lm_head.weight"] = np.zeros((64, 32), np.float32)


def widen(values: dict, arrays: dict) -> None:
    values["r"] = 8


BAD = {
    "dora": ({"use_dora": True}, r"adapter_config\.json use_dora = True: is not supported"),
    "another kind": ({"peft_type": "IA3"}, r"peft_type = 'IA3': .*use 'LORA'"),
    "biases": ({"bias": "all"}, r"bias = 'all': .*use 'none'"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\]"),
    "ranks of their own": ({"rank_pattern": {"q_proj": 2}}, r"rank_pattern = .*train without it"),
    "the first layer alone": (
        {"layers_to_transform": 0},
        r"layers_to_transform = 0: is not sup",
    ),
    "a start that moves the model": (
        {"init_lora_weights": "pissa"},
        r"init_lora_weights = 'pissa'",
    ),
    "no rank": ({"r": None}, r"adapter_config\.json r = None: must be a number above 0"),
    "a pattern": ({"target_modules": ".*_proj"}, r"target_modules = .*must be a list of names"),
    "lists of names": ({"target_modules": [["q_proj"]]}, r"must be a list of names from q_proj"),
    "a scaling in words": ({"use_rslora": "false"}, r"use_rslora = 'false': .*use True or False"),
    "the embedding": ({"target_modules": ["embed_tokens"]}, r"must be a list of names from q_proj"),
    "missing": (drop, r"layers\.1\.mlp\.up_proj\.lora_B\.weight = None: is missing"),
    "extra": (add, r"lm_head\.weight = .*belongs to no parameter"),
    "another rank": (widen, r"lora_A\.weight = \[4, 32\]: must be of shape \[8, 32\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folders_are_refused(name, base, tmp_path):
    change, message = BAD[name]
    values = json.loads((GOLDEN / peft_folder.ADAPTER_CONFIG).read_text())
    arrays = load_file(GOLDEN / peft_folder.ADAPTER_FILE)
    if callable(change):
        change(values, arrays)
    else:
        values |= change
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / peft_folder.ADAPTER_CONFIG).write_text(json.dumps(values))
    tiny.write_safetensors(tmp_path / "in" / peft_folder.ADAPTER_FILE, arrays)
    with pytest.raises(ConfigError, match=message):
        peft_import.from_peft(tmp_path / "in", tmp_path / "run", silent, str(base))
    assert not (tmp_path / "run").exists()


def test_what_asks_for_nothing_is_let_through(tmp_path):
    """As PEFT writes it: an empty list of layers is all of them."""
    values = json.loads((GOLDEN / peft_folder.ADAPTER_CONFIG).read_text())
    values |= {"layers_to_transform": [], "use_dora": False, "rank_pattern": {}}
    (tmp_path / peft_folder.ADAPTER_CONFIG).write_text(json.dumps(values))
    assert peft_import.read_adapter_config(tmp_path) == values


def test_folders_without_what_is_needed(base, tmp_path):
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json that can be read"):
        peft_import.from_peft(tmp_path, tmp_path / "run", silent, str(base))
    with pytest.raises(ConfigError, match=r"--base = None: is not the folder"):
        peft_import.from_peft(GOLDEN, tmp_path / "run", silent)
    shutil.copy(GOLDEN / peft_folder.ADAPTER_CONFIG, tmp_path)
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors"):
        peft_import.from_peft(tmp_path, tmp_path / "run", silent, str(base))
    file = GOLDEN / peft_folder.ADAPTER_FILE
    (tmp_path / file.name).write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"it is truncated or damaged"):
        peft_import.from_peft(tmp_path, tmp_path / "run", silent, str(base))


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
def test_peft_loads_and_merges_them(run, base, tmp_path, capsys):
    import peft
    import torch
    import transformers

    assert call("convert", ["to-peft", *options(run, tmp_path / "adapters")]) == 0
    assert "compared with peft" in capsys.readouterr().out
    assert call("convert", ["to-hf", *options(run, tmp_path / "merged"), "--dtype", "float32"]) == 0
    load = lambda folder: transformers.AutoModelForCausalLM.from_pretrained(  # noqa: E731
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model = peft.PeftModel.from_pretrained(load(base), tmp_path / "adapters").eval()
    with torch.no_grad():
        found = model(torch.from_numpy(tiny.tokens(VALUES))).logits[0].numpy()
    assert np.abs(found - np.load(GOLDEN / "logits.npy")).max() <= TOLERANCE
    theirs, ours = model.merge_and_unload().state_dict(), load(tmp_path / "merged").state_dict()
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, atol=1e-6, err_msg=name)
