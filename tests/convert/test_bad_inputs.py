"""What cannot be converted is refused with one error that names it, and nothing is written."""

import dataclasses
import json
import types
from pathlib import Path

import numpy as np
import pytest

from jaxpar.checkpoint.loading import check_resumable
from jaxpar.checkpoint.saved import read_saved, saved_config
from jaxpar.commands import call, read
from jaxpar.config import ConfigError
from jaxpar.config.layers import with_value
from jaxpar.convert import selfcheck
from jaxpar.convert.hf import exporting, importing
from jaxpar.convert.hf.config_file import HOLDS
from jaxpar.convert.hf.folder import INDEX_FILE, SINGLE_FILE
from jaxpar.convert.hf.importing import changes_of
from jaxpar.convert.safetensors_file import DTYPES, NAMES
from jaxpar.runtime.files import atomic, outputs
from tests.convert import tiny

VALUES = tiny.MODELS["llama3_2"]
GATE = "model.layers.1.mlp.gate_proj.weight"


def silent(_: str) -> None:
    """Says nothing."""


def rewrite(folder: Path, change) -> None:
    """Change the folder's tensors by a function of {name: array}."""
    arrays = tiny.tensors(VALUES)
    change(arrays)
    tiny.write_safetensors(folder / SINGLE_FILE, arrays)


def configure(**values):
    """A change of config.json."""
    return lambda folder: (folder / "config.json").write_text(json.dumps(VALUES | values))


def rename(new: str):
    return lambda folder: (folder / SINGLE_FILE).rename(folder / new)


def edit_bytes(change):
    def edit(folder: Path) -> None:
        file = folder / SINGLE_FILE
        file.write_bytes(change(file.read_bytes()))

    return edit


def index_of(where: dict[str, str]):
    """An index beside the one file."""
    return lambda folder: (folder / INDEX_FILE).write_text(json.dumps({"weight_map": where}))


def everything_in(file: str, **but: str) -> dict[str, str]:
    return dict.fromkeys(tiny.shapes(VALUES), file) | but


def change_tensors(change):
    return lambda folder: rewrite(folder, change)


def other_dtype(folder: Path) -> None:
    arrays = {n: a.astype(np.int32) for n, a in tiny.tensors(VALUES).items()}
    tiny.write_safetensors(folder / SINGLE_FILE, arrays, "I32")


ROPE = VALUES["rope_parameters"]

#: What is done to a good folder, and what the error says.
BAD = {
    "no folder": (lambda f: [p.unlink() for p in f.iterdir()] and f.rmdir(), "is not a folder"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config is no JSON": (
        lambda f: (f / "config.json").write_text("{"),
        "config.json.*not valid JSON",
    ),
    "architecture": (
        configure(architectures=["BloomForCausalLM"]),
        "architectures.*BloomForCausalLM.*not an architecture that jaxpar.*LlamaForCausalLM",
    ),
    "no architecture": (configure(architectures=None, model_type="mamba"), "architectures.*mamba"),
    "missing key": (configure(hidden_size=None), "hidden_size = None: must be int"),
    "rope type": (
        configure(rope_parameters=ROPE | {"rope_type": "dynamic"}),
        "rope_type = 'dynamic'",
    ),
    "rope key": (configure(rope_parameters=ROPE | {"mscale": 1.0}), "mscale = 1.0: is not a key"),
    "partial": (
        configure(partial_rotary_factor=0.5),
        "partial_rotary_factor = 0.5: is not supported in this family",
    ),
    "rope factor": (configure(rope_parameters=ROPE | {"factor": None}), "factor = None"),
    "activation": (configure(hidden_act="gelu"), "hidden_act = 'gelu'.*'silu'"),
    "quantized": (configure(quantization_config={"bits": 4}), "quantization_config"),
    "weights' dtype": (configure(torch_dtype="int8"), "dtype = 'int8'"),
    "odd head": (configure(head_dim=15), r"mixer\.head_dim = 15: must be even"),
    "some layers slide": (
        configure(
            architectures=["Qwen2ForCausalLM"],
            use_sliding_window=True,
            sliding_window=4,
            max_window_layers=1,
        ),
        "sliding_window = 4: applies to some layers only",
    ),
    "layers without end": (
        configure(num_hidden_layers=10**5),
        "num_hidden_layers = 100000: asks for more tensors than the 20 in the files",
    ),
    "pickle": (rename("pytorch_model.bin"), "pytorch_model.bin.*is a pickle.*safetensors"),
    "nothing": (rename("weights"), "contains neither model.safetensors nor"),
    "truncated": (edit_bytes(lambda b: b[:-100]), "model.safetensors = '.*truncated"),
    "too long": (edit_bytes(lambda b: b + b"0"), "model.safetensors = '.*must be .* bytes long"),
    "cut in the header": (edit_bytes(lambda b: b[:40]), "model.safetensors = '40 bytes': is not"),
    "no header": (edit_bytes(lambda b: b"\0" * 4), "model.safetensors = '4 bytes': is not"),
    "damaged header": (edit_bytes(lambda b: b[:9] + b"!" + b[10:]), "has a damaged header"),
    "a hole": (
        edit_bytes(lambda b: b.replace(b'"data_offsets": [0, ', b'"data_offsets": [4, ', 1)),
        "model.safetensors.*damaged header",
    ),
    "dtype": (other_dtype, "model.embed_tokens.weight = 'I32': of model.safetensors must be one"),
    "missing tensor": (change_tensors(lambda a: a.pop(GATE)), f"{GATE} = None: is missing"),
    "extra tensor": (
        change_tensors(lambda a: a.update({"model.layers.2.mlp.up_proj.weight": np.ones(3, "f4")})),
        r"model.layers.2.mlp.up_proj.weight = \[3\]: belongs to no parameter",
    ),
    "transposed tensor": (
        change_tensors(lambda a: a.update({GATE: a[GATE].T.copy()})),
        rf"{GATE} = \[32, 56\]: must be of shape \[56, 32\]",
    ),
    "another head": (
        change_tensors(lambda a: a.update({"lm_head.weight": a["model.embed_tokens.weight"] + 1})),
        "lm_head.weight.*must be the embedding",
    ),
    "index of a missing file": (index_of(everything_in("gone.safetensors")), "gone.safetensors"),
    "index that leaves the folder": (
        index_of(everything_in(SINGLE_FILE, **{GATE: "../x.safetensors"})),
        r"'\.\./x\.safetensors': is not in the folder",
    ),
    "index of a missing tensor": (
        index_of(everything_in(SINGLE_FILE, extra=SINGLE_FILE)),
        "extra = None: is not in model.safetensors",
    ),
    "tensor without an index": (
        index_of({n: f for n, f in everything_in(SINGLE_FILE).items() if n != GATE}),
        f"{GATE}.*is in model.safetensors",
    ),
    "index of numbers": (index_of(dict.fromkeys([GATE], 5)), f"{INDEX_FILE}.*5 is not a file name"),
    "damaged index": (lambda f: (f / INDEX_FILE).write_text("[]"), f"{INDEX_FILE}.*is damaged"),
}


@pytest.mark.parametrize("what", BAD)
def test_it_is_refused_by_name(what, tmp_path):
    change, said = BAD[what]
    folder = tiny.write_folder(tmp_path / "model", VALUES)
    change(folder)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=f"(?s){said}") as error:
        importing.from_hf(folder, tmp_path / "run", silent)
    assert str(error.value).count("Fix: ") == 1 and "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["gemma3", "mixtral", "qwen3_moe"])
def test_sizes_whose_names_would_fill_the_memory_are_refused(name, tmp_path):
    """Layers are listed by kind, and tensors by layer and expert."""
    values = tiny.MODELS[name]
    folder = tiny.write_folder(tmp_path / "model", values)
    importing.open_source(folder)
    keys = [k for k in ("num_hidden_layers", "num_local_experts", "num_experts") if k in values]
    for key in keys:
        (folder / "config.json").write_text(json.dumps(values | {key: 10**5}))
        with pytest.raises(ConfigError, match=f"^config.json {key} = 100000: asks for more"):
            importing.open_source(folder)
    together = dict.fromkeys(keys, 50 // len(keys))  # each alone is fewer than the tensors
    (folder / "config.json").write_text(json.dumps(values | together))
    with pytest.raises(ConfigError, match=rf"^config.json {keys[-1]} = \d+: asks for more"):
        importing.open_source(folder)


@pytest.mark.parametrize("key", HOLDS)
def test_values_of_another_kind_are_refused(key, tmp_path):
    folder = tiny.write_folder(tmp_path / "model", VALUES)
    for value in ("12", True, [[1]], *([1.5] if HOLDS[key] is int else [])):
        configure(**{key: value})(folder)
        with pytest.raises(ConfigError, match=f"^config.json {key} = .*: must be a") as error:
            importing.open_source(folder)
        assert error.value.value == value
    configure(**{key: None})(folder)
    importing.open_source(folder)


def test_what_holds_no_weights_of_its_own_is_let_through(tmp_path):
    folder = tiny.write_folder(tmp_path / "model", VALUES)
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, "f4")}

    def add(arrays):
        arrays |= inv_freq | {"lm_head.weight": arrays["model.embed_tokens.weight"]}

    rewrite(folder, add)
    importing.open_source(folder)


@pytest.mark.parametrize("code", ["BF16", "F16"])
def test_rotary_frequencies_do_not_decide_the_dtype_of_the_weights(code, tmp_path):
    folder = tiny.write_folder(tmp_path / "model", VALUES)
    weights = {n: a.astype(DTYPES[code]) for n, a in tiny.tensors(VALUES).items()}
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, "f4")}
    files = {"a.safetensors": (weights, code), "b.safetensors": (inv_freq, "F32")}
    for file, (arrays, dtype) in files.items():
        tiny.write_safetensors(folder / file, arrays, dtype)
    where = {name: file for file, (arrays, _) in files.items() for name in arrays}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": where}))
    source = importing.open_source(folder)
    assert source.num_bytes == sum(a.nbytes for a in weights.values())
    assert source.config.compute.dtype == "bfloat16"
    importing.from_hf(folder, tmp_path / "run", silent, None)
    assert DTYPES[NAMES[exporting.open_export(tmp_path / "run").dtype]] == DTYPES[code]


def test_folders_in_use_are_left_alone(tmp_path):
    folder = tiny.write_folder(tmp_path / "model", VALUES)
    with pytest.raises(ConfigError, match=r"RUN = .*is not empty"):
        importing.from_hf(folder, folder, silent)
    importing.from_hf(folder, tmp_path / "run", silent, None)
    export = exporting.open_export(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"DIR = .*is not empty"):
        exporting.to_hf(export, folder, silent)
    (tmp_path / "empty").mkdir()
    exporting.to_hf(export, tmp_path / "empty", silent, None)


def test_a_full_disk_is_seen_before_it_is_full(tmp_path, monkeypatch):
    folder = tiny.write_folder(tmp_path / "model", VALUES)
    importing.from_hf(folder, tmp_path / "run", silent, None)
    export = exporting.open_export(tmp_path / "run")
    before = sorted(tmp_path.iterdir())
    usage = types.SimpleNamespace(free=1000)
    monkeypatch.setattr(outputs.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"RUN = .*needs .* kB of disk space, but 1\.0 kB"):
        importing.from_hf(folder, tmp_path / "new" / "run", silent)
    with pytest.raises(ConfigError, match=r"DIR = .*needs .* kB of disk space, but 1\.0 kB"):
        exporting.to_hf(export, tmp_path / "out", silent)
    assert sorted(tmp_path.iterdir()) == before


def test_exports_that_cannot_be(tmp_path):
    folder, run = tiny.write_folder(tmp_path / "model", VALUES), tmp_path / "run"
    big = {"model.norm.weight": np.full(32, 1e6, "f4")}
    rewrite(folder, lambda arrays: arrays.update(big))
    importing.from_hf(folder, run, silent, None)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"step = 7: is not a checkpoint of .*use one of 0"):
        exporting.open_export(run, 7)
    with pytest.raises(ConfigError, match="contains no finished checkpoint"):
        exporting.open_export(folder)
    with pytest.raises(ConfigError, match="--family = 'bloom': is not a family"):
        exporting.open_export(run, family="bloom")
    with pytest.raises(ConfigError, match=r"'qwen3': cannot express .*qk_norm.*--family llama"):
        exporting.open_export(run, family="qwen3")
    export = exporting.open_export(run, dtype="float16")
    with pytest.raises(ConfigError, match=r"model.norm.weight = 'float16': has values beyond"):
        exporting.to_hf(export, tmp_path / "out", silent)
    assert sorted(tmp_path.iterdir()) == before


def test_a_conversion_that_changes_the_model_ends_with_an_error(tmp_path, monkeypatch, capsys):
    folder = tiny.write_folder(tmp_path / "model", VALUES)
    read = selfcheck.published_reader

    def damaged(*args):
        return lambda path, box: read(*args)(path, box) * (1.01 if path == "layers/wv" else 1)

    monkeypatch.setattr(selfcheck, "published_reader", damaged)
    assert call("convert", ["from-hf", str(folder), str(tmp_path / "run")]) == 1
    assert "self-check failed: logits of 256 tokens" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert call("convert", ["from-hf", str(folder), str(tmp_path / "run"), "--no-check"]) == 0


def test_an_imported_run_is_not_resumed(tmp_path):
    folder, run = tiny.write_folder(tmp_path / "model", VALUES), tmp_path / "run"
    importing.from_hf(folder, run, silent, None)
    cfg = saved_config(run)
    with pytest.raises(ConfigError, match=r"run\.dir.*contains imported weights"):
        check_resumable(cfg, read_saved(run))
    source = importing.open_source(folder)
    layers = with_value(cfg.model.layers, "model.layers.feed_forward.d_ff", 64)
    other = dataclasses.replace(cfg, model=cfg.model.with_layers(layers))
    said = r"contains a model with layers\.feed_forward\.d_ff 56, not 64"
    with pytest.raises(ConfigError, match=said):
        changes_of(other, source)


@pytest.mark.parametrize("text", ["{", '{"model": {"type": "BPE", "vocab": {"a": 4294967295}}}'])
def test_a_broken_tokenizer_fails_the_check_before_the_conversion(text, tmp_path, capsys):
    folder, run = tiny.write_folder(tmp_path / "model", VALUES), tmp_path / "run"
    (folder / "tokenizer.json").write_text(text)
    assert call("convert", ["from-hf", str(folder), str(run)]) == 1
    said = capsys.readouterr()
    assert said.out.startswith(f"WARNING    {folder / 'tokenizer.json'} cannot be used: ")
    assert said.err.startswith(f"self-check failed: {folder / 'tokenizer.json'} cannot be used: ")
    assert not run.exists()
    assert call("convert", ["from-hf", str(folder), str(run), "--no-check"]) == 0
    assert "WARNING" in capsys.readouterr().out
    assert (run / "hf" / "tokenizer.json").read_text() == text


def test_options_that_cannot_be():
    for words, said in (
        (["--tolerance", "2"], "--tolerance = 2.0: must be between 0 and 1"),
        (["--shard-gb", "0"], "--shard-gb = 0.0: must be above 0"),
        (["--dtype", "int8"], "--dtype = 'int8': must be .*float16"),
    ):
        with pytest.raises(ConfigError, match=said):
            read("convert", ["to-hf", "run", "dir", *words])


def test_a_place_where_nothing_can_be_made_is_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for path in (file / "run", file / "a" / "b"):
        with pytest.raises(ConfigError) as error:
            outputs.refuse_used("RUN", path)
        assert str(error.value) == (
            f"RUN = {str(path)!r}: cannot be created: {file} is a file. "
            "Fix: use a folder that you can write to."
        )
    outputs.refuse_used("RUN", tmp_path / "a" / "b")


def test_a_folder_that_cannot_be_replaced_is_refused(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for path in (Path("."), Path("../here"), tmp_path / "here"):
        with pytest.raises(ConfigError, match=r"RUN = .*: is the current directory.*new"):
            outputs.refuse_used("RUN", path)
    with pytest.raises(ConfigError, match=r"RUN = 'a/\.\./\.\.': already exists"):
        outputs.refuse_used("RUN", Path("a/../.."))
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "disk")
    with pytest.raises(ConfigError, match=r"RUN = .*: is a mount point"):
        outputs.refuse_used("RUN", tmp_path / "disk")


@pytest.mark.parametrize("there", [True, False])
def test_where_a_link_points_the_folder_is_made(there, tmp_path):
    to, link = tmp_path / "to", tmp_path / "link"
    link.symlink_to(to)
    if there:
        to.mkdir()
    outputs.refuse_used("RUN", link)
    with atomic.new_folder(link) as temporary:
        assert temporary.parent == to.parent
        (temporary / "file").touch()
    assert link.is_symlink() and (to / "file").is_file() and (link / "file").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "to"]
