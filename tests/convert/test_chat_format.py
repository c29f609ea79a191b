"""What a chat model needs beside its weights, in exports: ends of texts, template, vocabulary."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jinja2.sandbox
import numpy as np
import pytest
import tokenizers as t

from jaxpar.checkpoint.branching import branch
from jaxpar.checkpoint.saved import CARRIED, saved_config, saved_steps
from jaxpar.checkpoint.saving import Checkpointer
from jaxpar.commands import call
from jaxpar.config import Attention, Config, ConfigError, Glu, Layer, Model, replace
from jaxpar.config.serialize import to_json
from jaxpar.config.validate import resolve
from jaxpar.convert.hf import chat_format, exporting, importing
from jaxpar.convert.hf.composed import difference
from jaxpar.convert.hf.tokenizer import as_json, tokenizer_of_run
from jaxpar.data.options import PrepareChatOptions
from jaxpar.data.prepare.chat import TEMPLATES, ChatEncoder
from jaxpar.data.prepare.records_command import prepare_records
from jaxpar.data.tokenizer import load_tokenizer, open_tokenizer
from jaxpar.inference.load import load
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step import state
from jaxpar.training import initial_weights
from tests.fingerprints import quickly_computed
from tests.inference import harness
from tests.weights import origin_of

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>"]
SPECIAL += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What's 2 + 2?\n"},
    {"role": "assistant", "content": 'It is "4", né?'},
    {"role": "user", "content": "Sure?"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Words as in GPT-2, and the special tokens of every template."""
    words = t.Tokenizer(t.models.BPE())
    words.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = t.decoders.ByteLevel()
    alphabet = t.pre_tokenizers.ByteLevel.alphabet()
    trainer = t.trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator(["user system assistant What is it? brief Sure"] * 9, trainer)
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    words.save(str(file))
    return file


@pytest.fixture(scope="module")
def prepared(tokenizer, tmp_path_factory):
    """(template) -> a dataset of conversations."""
    folder = tmp_path_factory.mktemp("chats")
    lines = [json.dumps({"messages": [*CHAT[:3]], "n": n}) for n in range(4)]
    (folder / "chats.jsonl").write_text("\n".join(lines))

    def prepare(template: str) -> str:
        output = str(folder / template)
        if not Path(output).exists():
            files = {"input": (str(folder / "chats.jsonl"),), "output": output}
            prepare_records(
                PrepareChatOptions(**files, tokenizer=str(tokenizer), template=template, holdout=0)
            )
        return output

    return prepare


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_the_tokens_of_training(name, tokenizer):
    """With and without the beginning of an answer, in the environment that transformers has."""
    ours = open_tokenizer(str(tokenizer))
    encoder, text = ChatEncoder(name, ours), chat_format.jinja(name, ours.eos_token)
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    render = environment.from_string(text).render
    ids = lambda some: as_json(ours).encode(some, add_special_tokens=False).ids  # noqa: E731
    for chat in (CHAT, CHAT[1:2], CHAT[:3]):
        whole = render(messages=chat, add_generation_prompt=False)
        assert ids(whole) == encoder.encode(chat).ids.tolist()
        assert ids(render(messages=chat, add_generation_prompt=True)) == encoder.prompt(chat)


def write_run(folder: Path, cfg: Config) -> None:
    """Save a checkpoint of random numbers, and config.json."""
    cfg = resolve(replace(cfg, **{"parallel.data": 1, "optimizer.warmup_steps": 0}), 1)
    mesh = make_mesh(cfg.parallel, jax.devices()[:1])
    like, rng = state.abstract_logical(cfg, mesh), np.random.default_rng(0)
    with quickly_computed(), Checkpointer(cfg) as saver:
        made = jax.tree.map(lambda a: (rng.normal(size=a.shape) / 9).astype(a.dtype), like)
        made = dataclasses.replace(made, step=np.int32(1))
        placed = jax.device_put(made, jax.tree.map(lambda a: a.sharding, like))
        assert saver.save(placed, 1, tokens_seen=1)
    (folder / "config.json").write_text(to_json(cfg))


def a_run(folder: Path, data: str, vocab_size: int = 320, **fields) -> Path:
    """A run of one step on some data, with random weights."""
    values = {"data.path": data, "data.seq_len": 32, "run.dir": str(folder)}
    values |= {"compute.dtype": "float32"} | fields
    layer = Layer("layers", Attention(num_heads=2, num_kv_heads=2, head_dim=8), Glu(32))
    model = Model(d_model=16, vocab_size=vocab_size, layers=[layer])
    write_run(folder, replace(Config(model=model), **values))
    return folder


def exported(run: Path, folder: Path) -> dict:
    exporting.to_hf(exporting.open_export(run), folder, print)
    return json.loads((folder / "generation_config.json").read_text())


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_export_has_both_ends_and_the_template(name, prepared, tmp_path):
    run = a_run(tmp_path / "run", prepared(name))
    generation = exported(run, tmp_path / "hf")
    ours = load_tokenizer(prepared(name))
    end = ChatEncoder(name, ours).end_id
    expected = ours.eos_id if end == ours.eos_id else [end, ours.eos_id]
    assert generation["eos_token_id"] == expected
    template = (tmp_path / "hf" / "chat_template.jinja").read_text()
    assert template == chat_format.jinja(name, ours.eos_token)
    for folder in (run, tmp_path / "hf"):
        model = load(str(folder), None, 1, print)
        assert model.ends == {end, ours.eos_id} and model.chat.template == template


def test_an_export_has_the_ids_of_its_tokenizer_alone(prepared, tmp_path):
    """Its weights are those of the run, and come back with an import of it."""
    run = a_run(tmp_path / "run", prepared("chatml"))
    size = load_tokenizer(prepared("chatml")).vocab_size
    assert size < 320
    exported(run, tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == size
    importing.from_hf(tmp_path / "hf", tmp_path / "back", print)
    cfg, back = saved_config(run), saved_config(tmp_path / "back")
    assert difference(back.model, replace(cfg, **{"model.vocab_size": size}).model) is None
    of = lambda folder, cfg: exporting.open_run(folder, cfg, saved_steps(folder)[-1])  # noqa: E731
    one, other = of(run, cfg), of(tmp_path / "back", back)
    for path in other.by_path:
        box = tuple(slice(0, n) for n in other.shape(path))
        np.testing.assert_array_equal(one.read(path, box), other.read(path, box))
    assert one.shape("embed")[0] == 320 and other.shape("embed")[0] == size
    again = exporting.open_export(tmp_path / "back")
    assert again.config.model.vocab_size == size


def test_padding_stays_if_the_tokenizer_is_missing(prepared, tmp_path):
    data = shutil.copytree(prepared("plain"), tmp_path / "data")
    run = a_run(tmp_path / "run", str(data))
    shutil.rmtree(data)
    assert exporting.open_export(run).config.model.vocab_size == 320


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """An instruct model: a template, two ends, and other settings of generation."""
    folder = harness.write_model(tmp_path_factory.mktemp("published") / "instruct", begins=True)
    about = {"eos_token_id": [257, 256], "bos_token_id": 258, "temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(about))
    return folder


CHAT_FILES = (
    "generation_config.json",
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
)


def tuned(origin: Path, folder: Path, data: str) -> Path:
    """A run that starts from the weights of another, with the files that its start writes."""
    is_run = bool(saved_steps(origin))
    there = saved_config(origin) if is_run else importing.open_source(origin).config
    values = {"run.init_from": str(origin), "data.path": data, "run.dir": str(folder)}
    cfg = dataclasses.replace(replace(Config(), **values), model=there.model, compute=there.compute)
    found = origin_of(cfg)
    assert found is not None
    write_run(folder, cfg)
    initial_weights.keep_files(found, folder)
    return folder


@pytest.mark.parametrize("imported", [True, False], ids=["from a run", "from a published folder"])
def test_published_files_follow_the_weights(imported, published, prepared, tmp_path):
    """Through an import, two runs that start from one another, and a branch, into the export."""
    origin = published
    if imported:
        importing.from_hf(published, tmp_path / "imported", print)
        origin = tmp_path / "imported"
    data = shutil.copytree(prepared("plain"), tmp_path / "data")
    first = tuned(origin, tmp_path / "first", str(data))
    second = tuned(first, tmp_path / "second", str(data))
    shutil.rmtree(data)
    branch(str(second), str(tmp_path / "branch"), None, print)
    for run in (second, tmp_path / "branch"):
        assert (run / CARRIED).is_dir()
        out = tmp_path / f"hf_{run.name}"
        exported(run, out)
        for name in CHAT_FILES:
            assert (out / name).read_bytes() == (published / name).read_bytes(), name
        model = load(str(run), None, 1, print)
        assert model.ends == {256, 257} and model.chat.template == harness.TEMPLATE
        assert model.tokenizer.eos_id == 256
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 260


def test_conversations_add_their_end_to_published_ones(published, tmp_path):
    """Data with the model's tokenizer: the template stays, and the end of a turn is added."""
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT[:3]}))
    files = {"input": (str(tmp_path / "chats.jsonl"),), "output": str(tmp_path / "data")}
    prepare_records(
        PrepareChatOptions(
            **files, tokenizer=str(published), eos_token=harness.END, template="plain", holdout=0
        )
    )
    run = tuned(published, tmp_path / "run", files["output"])
    said: list[str] = []
    exporting.to_hf(exporting.open_export(run), tmp_path / "hf", said.append)
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [257, 256] and generation["temperature"] == 0.6
    assert (tmp_path / "hf" / "chat_template.jinja").read_text() == harness.TEMPLATE
    assert any("trained with --template plain" in line for line in said)


def test_another_tokenizer_of_the_data_replaces_the_published_one(published, prepared, tmp_path):
    run = tuned(published, tmp_path / "run", prepared("chatml"))
    generation = exported(run, tmp_path / "hf")
    ours = load_tokenizer(prepared("chatml"))
    assert tokenizer_of_run(run, saved_config(run)).fingerprint == ours.fingerprint
    assert ours.eos_id in generation["eos_token_id"]
    assert ours.id_of("<|im_end|>") in generation["eos_token_id"]
    made = (tmp_path / "hf" / "chat_template.jinja").read_text()
    assert made == chat_format.jinja("chatml", ours.eos_token)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("generation_config.json", '{"eos_token_id": "x"}', "has eos_token_id 'x'"),
        ("generation_config.json", '{"eos_token_id": [1, -2]}', r"has eos_token_id \[1, -2\]"),
        ("generation_config.json", "[", "generation_config.json that cannot be read"),
        ("chat_template.json", "{", "chat_template.json that cannot be read"),
    ],
)
def test_files_that_cannot_be_read(file, text, said, published, tmp_path):
    folder = shutil.copytree(published, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    (folder / file).write_text(text)
    with pytest.raises(ConfigError, match=said):
        chat_format.of_folder(folder, open_tokenizer(str(folder), harness.END))


def test_older_files_have_templates_too(published, tmp_path):
    ours = open_tokenizer(str(published), harness.END)
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    of = {"chat_template": several}
    for file, about in (
        ("tokenizer_config.json", {"chat_template": "d"}),
        ("tokenizer_config.json", of),
        ("chat_template.json", {"chat_template": "d"}),
    ):
        folder = tmp_path / f"{file}{len(str(about))}"
        folder.mkdir()
        (folder / file).write_text(json.dumps(about))
        assert chat_format.of_folder(folder, ours).template == "d"


def test_what_was_compared_is_named(prepared, tmp_path, capsys):
    run = a_run(tmp_path / "run", prepared("plain"))
    assert call("convert", ["to-hf", str(run), str(tmp_path / "hf")]) == 0
    shown = capsys.readouterr().out
    assert "compared with the written files" in shown and "published" not in shown
