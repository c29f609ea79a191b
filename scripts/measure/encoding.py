"""Measure `data prepare` beside the raw encoder: python scripts/measure/encoding.py

Source code of Python is encoded by a BPE that is trained on it. Cases take turns; each line has the
CPU time (user and system) of a case, without that of starting the command, in each turn, and the
median of its ratios to the raw encoder, which encodes texts in memory, in the same turn.
`--datatrove PYTHON` names an interpreter with datatrove and orjson, whose DocumentTokenizer is then
measured too.
"""

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from jaxpar.data.tokenizer import train_bpe

#: Encodes in memory: prints seconds. Batches are those of `prepare`.
RAW = """
import json, os, sys, time, tokenizers
os.environ["TOKENIZERS_PARALLELISM"] = "false"
texts = [json.loads(line)["text"] for line in open(sys.argv[1])]
encode = tokenizers.Tokenizer.from_file(sys.argv[2]).encode_batch_fast
began, batch, size = time.process_time(), [], 0
for text in [*texts, None]:
    if text is None or size >= 1 << 20:
        encode(batch, add_special_tokens=False)
        batch, size = [], 0
    batch.append(text)
    size += len(text or "")
print(time.process_time() - began)
"""

DATATROVE = """
import os, sys
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.executor import LocalPipelineExecutor
folder, tokenizer, output = sys.argv[1:]
places = {"output_folder": output + "/tokens", "local_working_dir": output + "/local"}
named = {"tokenizer_name_or_path": tokenizer, "save_filename": "all"}
write = DocumentTokenizer(**places, **named, shuffle_documents=False)
LocalPipelineExecutor([JsonlReader(folder), write], logging_dir=output + "/logs").run()
"""


def seconds(command: list[str]) -> tuple[float, str]:
    """Return the CPU time of a program and of its processes, and what it prints."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, check=True, text=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(
        getattr(after, n) - getattr(before, n) for n in ("ru_utime", "ru_stime")
    ), done.stdout


def write_corpus(folder: Path, num_bytes: int) -> None:
    """Write two folders of text, one of them a single document, and tokenizer.json."""
    found, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        text = path.read_bytes().decode("utf-8", "replace")
        found.append(json.dumps({"text": text}) + "\n")
        size += len(text)
        if size > num_bytes:
            break
    for name, lines in (("text", found), ("little", found[:1])):
        (folder / name).mkdir()
        (folder / name / "a.jsonl").write_text("".join(lines))
    (folder / "tokenizer.json").write_text(train_bpe(found, 32_000).json_text)


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="of prepare")
    parser.add_argument("--datatrove", metavar="PYTHON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder, args.megabytes * 1_000_000)
        tokenizer, text = str(folder / "tokenizer.json"), folder / "text" / "a.jsonl"

        def prepared(workers: int) -> float:
            def of(which: str) -> float:
                command = f"-m jaxpar.data prepare --input {folder / which} --tokenizer {tokenizer}"
                more = f"--output {folder}/out --overwrite --holdout 0 --workers {workers}"
                return seconds([sys.executable, *command.split(), *more.split()])[0]

            return of("text") - of("little")

        def raw() -> float:
            return float(seconds([sys.executable, "-c", RAW, str(text), tokenizer])[1])

        def datatrove() -> float:
            def of(which: str) -> float:
                with tempfile.TemporaryDirectory() as output:
                    words = [str(folder / which), tokenizer, output]
                    return seconds([args.datatrove, "-c", DATATROVE, *words])[0]

            return of("text") - of("little")

        cases = {"raw encoder": raw}
        for count in args.processes:
            cases[f"prepare, processes: {count}"] = functools.partial(prepared, count)
        if args.datatrove:
            cases["datatrove"] = datatrove
        found = {case: list[float]() for case in cases}
        for _ in range(args.turns):
            for case, measure in cases.items():
                found[case].append(measure())
        print(f"{text.stat().st_size / 1e6:.1f} MB, {os.cpu_count()} cores")
        for case, times in found.items():
            each = ", ".join(f"{one:.2f}" for one in times)
            ratios = [a / b for a, b in zip(times, found["raw encoder"], strict=True)]
            print(f"{case:22} {each} s: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
