"""RUN/samples.jsonl: texts that a run's model has generated, shown in its report."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxpar.runtime.files import json_lines
from jaxpar.runtime.files.append import Lines

SAMPLES_FILE = "samples.jsonl"


def write_sample(run_dir: Path, step: int, prompt: str, text: str, **how: Any) -> None:
    """Append a generated text.

    Args:     step: of the checkpoint. text: the text after the prompt. how: the sampling options.
    """
    record = {"step": step, "prompt": prompt, "text": text, "time": time.time(), "sampling": how}
    with contextlib.closing(Lines(run_dir / SAMPLES_FILE)) as file:
        file.write(json.dumps(record) + "\n")


def read_samples(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Read the texts, in the order in which they were written."""
    needed = {"step", "prompt", "text"}
    return (record for record in json_lines.read(run_dir / SAMPLES_FILE) if needed <= set(record))
