"""Speed and memory of converting a 70B-shaped model: python scripts/measure/conversion.py FOLDER

Writes random bfloat16 weights with Llama 3 70B's widths and a few layers (--layers) to FOLDER,
converts them to a run and back, each in a separate process, prints the programs' output, and
compares the bits. A layer is the same work as any other, so the time of all 80 follows from the
bytes per second; memory does not depend on their number, which --layers 1 and 2 show. Needs 8 bytes
of disk for each parameter: 24 GB with one layer.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from jaxpar.config import Config
from jaxpar.config.command_line import load_config, parse_overrides
from jaxpar.convert.hf.config import config_json, entry_table
from jaxpar.convert.hf.families import LLAMA
from jaxpar.convert.hf.folder import create_tensors, find_tensors
from jaxpar.convert.hf.tensor_layout import tensor_names, tensor_shape

#: Number of random values, which are written repeatedly.
BLOCK = 1 << 22


def write_model(folder: Path, cfg: Config) -> int:
    """Write a published folder of random weights, and return the number of parameters."""
    folder.mkdir(parents=True)
    m = cfg.model
    (folder / "config.json").write_text(json.dumps(config_json(m, LLAMA, {}, "bfloat16")))
    shapes = {
        name: tensor_shape(entry) for entry in entry_table(LLAMA, m) for name in tensor_names(entry)
    }
    values = 0.02 * np.random.default_rng(0).standard_normal(BLOCK, np.float32)
    for stored in create_tensors(folder, shapes, "bfloat16", 5_000_000_000).values():
        flat = stored.open("r+").reshape(-1)
        for begin in range(0, flat.size, BLOCK):
            flat[begin : begin + BLOCK] = values[: flat.size - begin]
    return sum(int(np.prod(shape)) for shape in shapes.values())


def run(*words: str) -> float:
    """Run one conversion, and return its seconds."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "jaxpar.convert", *words], check=True)
    return time.perf_counter() - began


def check_same(a: Path, b: Path) -> None:
    """Check that two folders have the same tensors with the same bits."""
    one, other = find_tensors(a), find_tensors(b)
    assert one.stored.keys() == other.stored.keys()
    for name in one.stored:
        x, y = (side.open(name).view(np.uint16) for side in (one, other))
        assert all(map(np.array_equal, x, y)), name
    print(f"{len(one.stored)} tensors have the same bits")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a new folder, deleted at the end")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="with the self-check")
    options = parser.parse_args()
    cfg = parse_overrides(load_config("llama3_70b"), ["--model.num-layers", str(options.layers)])
    published, middle, back = (options.folder / n for n in ("published", "run", "back"))
    checking = [] if options.check else ["--no-check"]
    try:
        print(f"{options.layers} layers, {write_model(published, cfg):,} parameters", flush=True)
        print(f"{run('from-hf', str(published), str(middle), *checking):.1f} s", flush=True)
        print(f"{run('to-hf', str(middle), str(back), *checking):.1f} s", flush=True)
        check_same(published, back)
    finally:
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
