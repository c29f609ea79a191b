"""Makes the table of kernels by GPU: python scripts/docs/backend_table.py [--write]

Each cell is the first backend that serves a feature on a GPU, of those that the capability tables
of `jaxpar/kernels` declare. Without options, prints the table. --write writes it between the
markers of docs/code.md.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxpar.kernels import recurrence, take_largest  # noqa: E402
from jaxpar.kernels.attention import capability  # noqa: E402
from jaxpar.kernels.platform import Platform, compiling_for  # noqa: E402
from scripts.docs.generated_table import run  # noqa: E402

PAGE, MARK = "code.md", "backend table"

GPUS = {"A100": "8.0", "L4, RTX 40": "8.9", "H100, H200": "9.0", "B200": "10.0", "RTX 50": "12.0"}

#: What a request needs, apart from one sequence of text of head dim 128.
ATTENTION: dict[str, dict] = {
    "attention, text order": {},
    "packed documents": {"kind": "packed", "packed": True, "max_segments": 16},
    "permuted tokens": {"kind": "general", "in_order": False},
    "head dim 256": {"D": 256},
    "head dim 96": {"D": 96},
    "capped scores": {"softcap": 50.0},
}


def attention(platform: Platform, **needs) -> str:
    """Return the first backend of attention that serves a backward."""
    sizes = dict(B=1, T=4096, S=4096, H=32, G=8, D=128, dtype="bfloat16", kind="causal")
    rest = dict(in_order=True, packed=False, max_segments=None)
    request = capability.AttentionRequest("backward", platform, **sizes | rest | needs)
    able = [b for b in capability.CAPABILITIES if capability.refusal(b, request) is None]
    return next(b for b in sorted(able, key=lambda b: capability.is_last_resort(b, request)))


def row(platform: Platform) -> list[str]:
    """Return the backend of each feature."""
    shape = recurrence.Shape(64, 128, 128, "bfloat16")
    with compiling_for(platform):
        largest = take_largest.refusal(256, 32)
    mosaic = platform.runs_elementwise_kernels
    return [
        *(attention(platform, **needs) for needs in ATTENTION.values()),
        "reference" if recurrence.refusal(shape, platform) else "triton",
        "XLA" if largest else "triton",
        "Mosaic GPU" if mosaic else "XLA",
    ]


def table() -> str:
    """Return the table as Markdown."""
    features = [*ATTENTION, "recurrences", "top-k of gradients", "softmax, SwiGLU, float8"]
    columns = [row(Platform("gpu", name, capability)) for name, capability in GPUS.items()]
    lines = [f"| | {' | '.join(GPUS)} |", "|---" * (len(GPUS) + 1) + "|"]
    for feature, cells in zip(features, zip(*columns, strict=True), strict=True):
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run(__doc__, PAGE, MARK, table)
