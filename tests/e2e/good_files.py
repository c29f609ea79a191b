"""Writes a good file of each kind that a stranger may give, in one folder."""

import gzip
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jaxpar.convert.hf import importing
from jaxpar.convert.hf.tokenizer import bytes_as_json
from jaxpar.data.tokenizer import ByteTokenizer
from jaxpar.monitoring.profile_folder import ProfileFacts, write_facts
from jaxpar.monitoring.recent_steps import RecentSteps
from tests.convert import tiny
from tests.data.commands import main as data
from tests.tools.report.folders import write_loads, write_run

RECORDED = Path(__file__).parents[1] / "tools" / "profiling"
CARD = Path(__file__).parents[2] / "docs" / "benchmarks" / "llama3_8b-h200x2-none.json"


def write(folder: Path) -> None:
    """Write all files."""
    write_models(folder)
    write_texts(folder)
    write_tokens(folder)
    write_of_a_run(folder / "run")
    write_profile(folder / "profile")
    shutil.copy(CARD, folder / "card.json")


def write_models(folder: Path) -> None:
    """Published models with a tokenizer, one with an index; adapters; an imported run."""
    for name in ("model", "sharded"):
        tiny.write_folder(folder / name, tiny.MODELS["llama3_2"])
    stored = importing.open_source(folder / "model").tensors.stored
    where = {"metadata": {}, "weight_map": dict.fromkeys(stored, "model.safetensors")}
    (folder / "sharded" / "model.safetensors.index.json").write_text(json.dumps(where))
    importing.from_hf(folder / "model", folder / "imported", lambda _: None, None)
    bytes_as_json(ByteTokenizer()).save(str(folder / "model" / "tokenizer.json"))
    about = {"eos_token": {"content": "<|endoftext|>"}, "model_max_length": int(1e30)}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "adapters").mkdir()
    lora = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapters" / "adapter_config.json").write_text(json.dumps(lora))


def write_texts(folder: Path) -> None:
    """The same documents in each format, and conversations."""
    texts = [f"document {i}: some text, é\n" * 20 for i in range(40)]
    lines = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts))
    (folder / "texts.jsonl").write_text(lines)
    (folder / "texts.txt").write_text("".join(texts))
    (folder / "texts.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    with pa.output_stream(str(folder / "texts.jsonl.zst"), compression="zstd") as stream:
        stream.write(lines.encode())
    table = pa.table({"id": range(len(texts)), "text": texts})
    pq.write_table(table, folder / "texts.parquet", row_group_size=9)
    (folder / "saved").mkdir()
    for path in (folder / "texts.arrow", folder / "saved" / "data-0.arrow"):
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    state = {"_data_files": [{"filename": "data-0.arrow"}], "_fingerprint": "0"}
    (folder / "saved" / "state.json").write_text(json.dumps(state))
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (folder / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 5)


def write_tokens(folder: Path) -> None:
    """A dataset folder, a Megatron pair, and a file of llm.c."""
    files = ("texts.txt", "tokens", "megatron", "llmc.bin")
    names = {name: str(folder / name) for name in files}
    more = ("--tokenizer", "bytes", "--holdout", "0")
    data(["prepare", "--input", names["texts.txt"], "--output", names["tokens"], *more])
    for name, form in (("megatron", "megatron"), ("llmc.bin", "llmc")):
        data(["convert", "--input", names["tokens"], "--output", names[name], "--to", form])


def write_of_a_run(folder: Path) -> None:
    """A run's config and records."""
    write_run(folder, steps=40)
    write_loads(folder, range(10, 41, 10))
    recent = RecentSteps(folder, 8)
    for i in range(1, 5):
        inputs: dict = {"batch": i - 1, "windows": [8 * i, 8 * i + 8], "mesh": "data=1"}
        recent.add(i, {"loss": 2.5, "grad_norm": 1.5}, **inputs)
    skipped = {"windows": [[3, 2], [9, 1]], "rewinds": 2}
    (folder / "skipped_batches.json").write_text(json.dumps(skipped))


def write_profile(folder: Path) -> None:
    """A trace with its program and its facts."""
    folder.mkdir()
    shutil.copy(RECORDED / "fsdp4.xplane.pb.gz", folder / "x.xplane.pb.gz")
    shutil.copy(RECORDED / "fsdp4.hlo.txt.gz", folder / "step.hlo.txt.gz")
    sizes: dict = {"memory": {"temp": 5}, "versions": {"jax": "0"}, "attention_flops": 1e9}
    write_facts(folder, ProfileFacts(1, 2, 1, 4, "NVIDIA H200", "data=4", 8192, 1e12, **sizes))
