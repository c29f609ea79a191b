"""How many files of the package name a feature: few, so that a new one needs few.

A file names a feature if its text, comments included, has one of the words below: identifiers,
fields, and the name in prose.
"""

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "jaxpar"

#: Tables of the names of all weights: of published formats, of the form in PyTorch, and of the
#: check that shares no code with what it checks.
WEIGHTS = (
    "convert/hf/families/shared.py",
    "convert/torch_model.py",
    "certification/independent.py",
)

NAMES = {
    "QK-clip": (r"qk_?clip|QK-clip", 3, ()),
    "router bias": (r"router_bias|balancing_bias", 3, WEIGHTS),
    "expert loads": (r"expert_?loads|load_metrics", 3, ()),
    "DPO": (r"(?<![a-z])dpo|preference (tuning|loss|optimization)", 5, ()),
    "distillation": (r"distill|teacher|taught", 5, ()),
}


def files_that_name(words: str) -> list[str]:
    """The files of the package with a match, whatever its case, but for `ThreadPoolExecutor`."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text("utf-8").replace("ThreadPoolExecutor", "")
        if re.search(words, text, re.IGNORECASE):
            found.append(file.relative_to(PACKAGE).as_posix())
    return found


@pytest.mark.parametrize("feature", NAMES)
def test_few_files_name_a_feature(feature):
    words, most, tables = NAMES[feature]
    found = [file for file in files_that_name(words) if file not in tables]
    assert 0 < len(found) <= most, found
