"""Tiny token files as other programs write them, and the tokens and documents that they read back.

    python tests/data/goldens/make_goldens.py PROGRAM...

PROGRAM is a function below; each needs its own package, and nothing of jaxpar. Writes a folder for
each, and its entry in expected.json: tokens, and the first token of each document. llm.c and
nanoGPT are no packages: their files follow `write_datafile` of `dev/data/data_common.py` and
`data/*/prepare.py`, and are read back by the documented layout.

Written with megatron-core 0.19.2, datatrove 0.10.1, ai2-olmo-core 3.0.0, datasets 5.0 (Parquet and
Arrow), mosaicml-streaming 0.13.0 and webdataset 1.0.2.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent

#: The end of text, and the tokens of the documents, some of which need 32 bits.
EOS = 0
SMALL = [[*(1 + (7 * i + j * j) % 300 for j in range(1 + i * 5 % 17)), EOS] for i in range(20)]
LARGE = [[*(token * 331 for token in text[:-1]), EOS] for text in SMALL]


def joined(texts: list[list[int]]) -> list[int]:
    return [token for text in texts for token in text]


def starts(tokens: list[int]) -> list[int]:
    """The first tokens of documents that end with EOS."""
    return [0, *(i + 1 for i, token in enumerate(tokens[:-1]) if token == EOS)]


def found(texts: list[list[int]]) -> dict[str, list[int]]:
    """What a program has read, as documents."""
    ends = np.cumsum([0, *map(len, texts)])[:-1]
    return {"tokens": [int(token) for token in joined(texts)], "documents": ends.tolist()}


def megatron(folder: Path) -> dict[str, object]:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    parts = {"a": (SMALL[:8], np.uint16), "b": (SMALL[8:], np.int32)}
    texts = []
    for name, (part, dtype) in parts.items():
        prefix = str(folder / f"{name}_text_document")
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype)
        for text in part:  # the second half of a document is a sequence
            half = len(text) // 2
            builder.add_document(torch.tensor(text), [half, len(text) - half])
        builder.finalize(f"{prefix}.idx")
        read = IndexedDataset(prefix)
        pairs = zip(read.document_indices[:-1], read.document_indices[1:], strict=True)
        texts += [joined([read[i].tolist() for i in range(a, b)]) for a, b in pairs]
    return {"": found(texts)}


def datatrove(folder: Path) -> dict[str, object]:
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile
    from datatrove.utils.dataset import DatatroveFileDataset

    done: dict[str, object] = {}
    for kind, texts, bytes_of_token in (("small", SMALL, 2), ("large", LARGE, 4)):
        documents = []
        for rank, part in enumerate((texts[:8], texts[8:])):
            name = f"{rank:05d}_shuffled.ds"
            file = TokenizedFile(
                str(folder / kind),
                name,
                save_final_metadata=True,
                tokenizer_name_or_path="gpt2",
                token_size=bytes_of_token,
            )
            for text in part:
                file.write(text, None)
            file.close()
            length = len(joined(part))
            path = str(folder / kind / name)
            read = DatatroveFileDataset(path, length - 1, bytes_of_token, return_positions=True)[0]
            begins = np.flatnonzero(read["positions"].numpy() == 0)
            documents += [part.tolist() for part in np.split(read["input_ids"].numpy(), begins[1:])]
        done[f"/{kind}"] = found(documents)
    return done


def olmo(folder: Path) -> dict[str, object]:
    from olmo_core.data.utils import iter_document_indices, load_array_slice

    done: dict[str, object] = {}
    for kind, texts, dtype in (("small", SMALL, np.uint16), ("large", LARGE, np.uint32)):
        documents = []
        for number, part in enumerate((texts[:8], texts[8:])):
            path = folder / kind / f"part-{number}-00000.npy"
            path.parent.mkdir(exist_ok=True)
            tokens = joined(part)
            mapped = np.memmap(path, mode="w+", dtype=dtype, shape=(len(tokens),))
            mapped[:] = tokens
            mapped.flush()
            spans = iter_document_indices(str(path), eos_token_id=EOS, dtype=dtype)
            documents += [load_array_slice(path, a, b, dtype).tolist() for a, b in spans]
        done[f"/{kind}"] = found(documents)
    return done


def datasets(folder: Path) -> dict[str, object]:
    from datasets import Dataset, Features, List, Value, load_from_disk

    done = {}
    features = Features({"input_ids": List(Value("int32")), "attention_mask": List(Value("int8"))})
    masks = [[1] * len(text) for text in LARGE]
    rows = Dataset.from_dict({"input_ids": LARGE, "attention_mask": masks}, features)
    (folder / "parquet").mkdir()
    for name, part in (("train-00000-of-00002", range(8)), ("train-00001-of-00002", range(8, 20))):
        rows.select(part).to_parquet(folder / "parquet" / f"{name}.parquet", batch_size=5)
    files = sorted(map(str, (folder / "parquet").glob("*.parquet")))
    read = Dataset.from_parquet(files, cache_dir=tempfile.mkdtemp())
    done["/parquet"] = found([row["input_ids"] for row in read])
    rows.save_to_disk(folder / "saved", num_shards=2)
    done["/saved"] = found([row["input_ids"] for row in load_from_disk(folder / "saved")])
    return done


def mds(folder: Path) -> dict[str, object]:
    from streaming import MDSWriter, StreamingDataset

    done: dict[str, object] = {}
    kinds = {
        "array": ({"tokens": "ndarray:int32"}, {}),
        "any": ({"tokens": "ndarray", "number": "int"}, {}),
        "bytes": ({"tokens": "bytes", "domain": "str"}, {}),
        "zstd": ({"tokens": "ndarray:int32"}, {"compression": "zstd"}),
    }
    for kind, (columns, options) in kinds.items():
        out = str(folder / kind)
        with MDSWriter(out=out, columns=columns, size_limit=1500, **options) as writer:
            for number, text in enumerate(LARGE):
                array = np.array(text, np.int64 if kind == "bytes" else np.int32)
                value = array.tobytes() if kind == "bytes" else array
                sample = {"tokens": value, "number": number, "domain": f"web {number}"}
                writer.write({name: sample[name] for name in columns})
        keep = {"keep_zip": True} if options else {}
        rows = list(StreamingDataset(local=out, shuffle=False, batch_size=1, **keep))
        arrays = [
            np.frombuffer(row["tokens"], np.int64) if kind == "bytes" else row["tokens"]
            for row in rows
        ]
        done[f"/{kind}"] = found([array.tolist() for array in arrays])
        for file in Path(out).glob("*.mds") if options else ():
            file.unlink()  # decompressed by the reader
    return done


def webdataset(folder: Path) -> dict[str, object]:
    import webdataset as wds

    done: dict[str, object] = {}
    for kind in ("npy", "json.gz"):
        (folder / kind).mkdir()
        with wds.ShardWriter(str(folder / kind / "shard-%02d.tar"), maxcount=5) as writer:
            for number, text in enumerate(LARGE[:8]):
                value = np.array(text, np.int32) if kind == "npy" else text
                writer.write({"__key__": f"{number:04d}", kind: value})
        shards = sorted(map(str, (folder / kind).glob("*.tar")))
        rows = wds.WebDataset(shards, shardshuffle=False).decode()
        done[f"/{kind}"] = found([list(row[kind]) for row in rows])
    return done


def llmc(folder: Path) -> dict[str, object]:
    done = {}
    for kind, texts, magic, version, dtype in (
        ("gpt2", SMALL, 20240520, 1, "<u2"),
        ("llama3", LARGE, 20240801, 7, "<u4"),
    ):
        (folder / kind).mkdir()
        for name, part in (("val_000000", texts[:3]), ("train_000001", texts[3:9])):
            _write_llmc(folder / kind / f"fineweb_{name}.bin", joined(part), magic, version, dtype)
        last = folder / kind / "fineweb_train_000002.bin"
        _write_llmc(last, joined(texts[9:]), magic, version, dtype)
        tokens = []
        for path in sorted((folder / kind).glob("*_train_*.bin")):
            head = np.fromfile(path, "<i4", 256)
            tokens += np.fromfile(path, dtype, int(head[2]), offset=1024).tolist()
        done[f"/{kind}"] = {"tokens": tokens, "documents": starts(tokens)}
    return done


def _write_llmc(path: Path, tokens: list[int], magic: int, version: int, dtype: str) -> None:
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(tokens)
    path.write_bytes(head.tobytes() + np.array(tokens, dtype).tobytes())


def nanogpt(folder: Path) -> dict[str, object]:
    for split, part in (("train", SMALL[3:]), ("val", SMALL[:3])):
        np.array(joined(part), dtype=np.uint16).tofile(folder / f"{split}.bin")
    tokens = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r").tolist()
    return {"": {"tokens": tokens, "documents": starts(tokens)}}


def main(names: list[str]) -> None:
    expected = HERE / "expected.json"
    known = json.loads(expected.read_text()) if expected.exists() else {}
    for name in names:
        folder = HERE / name
        folder.mkdir()
        for inner, read in globals()[name](folder).items():
            known[name + inner] = read
    expected.write_text(json.dumps(known, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
