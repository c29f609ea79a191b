"""Figures of all shipped configs that are no programs, to hold a change of structure against.

    python -m tests.step.figures                compare with the recorded ones
    python -m tests.step.figures --write        record them again, and print what changed
    python -m tests.step.figures --only gemma deepseek --parts specs plan

Specs of parameters, sizes and FLOPs, the planner's predictions, the shrunk config of `certify`, its
fused layout, names in a checkpoint, and initial values: see `figures_of.py`. Each difference names
the config, the part and the entry. Initial values hold for one version of JAX.
"""

import argparse
import json
import sys
from pathlib import Path

import jax

from tests.step.figures_of import PARTS, STATES, Entries, names, of_config, of_state

FIGURES = Path(__file__).with_name("figures.json")

#: Config, or state, -> part -> entry -> value.
type Figures = dict[str, dict[str, Entries]]


def figures(only: list[str], parts: list[str]) -> Figures:
    """Figures of all configs, or of those whose name holds one of these words."""
    wanted = lambda name: not only or any(word in name for word in only)  # noqa: E731
    found: Figures = {}
    for name in filter(wanted, names()):
        found[name] = of_config(name, parts)
        print(f"{name}: {sum(map(len, found[name].values()))} figures", flush=True)
    states = [name for name in STATES if wanted(f"state, {name}")] if "checkpoint" in parts else []
    return found | {f"state, {name}": of_state(name) for name in states}


def differences(recorded: Figures, found: Figures) -> list[str]:
    """A line for each entry that differs, is missing or is new."""
    lines = []
    for name, parts in found.items():
        for part, entries in parts.items():
            before = recorded.get(name, {}).get(part, {})
            for entry in dict.fromkeys([*before, *entries]):
                was, now = before.get(entry, "absent"), entries.get(entry, "absent")
                if was != now:
                    lines.append(f"{name}: {part}: {entry}: {was} -> {now}")
    return lines


def as_text(found: Figures) -> str:
    """JSON with a line for each part of a config."""
    by_config = []
    for name, parts in found.items():
        lines = [f"  {json.dumps(part)}: {json.dumps(of)}" for part, of in parts.items()]
        by_config.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    head = f' "jax": {json.dumps(jax.__version__)},\n'
    return "{\n" + head + ' "figures": {\n' + ",\n".join(by_config) + "\n }\n}\n"


def recorded() -> Figures:
    """The recorded figures."""
    return json.loads(FIGURES.read_text("utf-8"))["figures"]


def main() -> int:
    """The command line. Returns 1 if a figure differs from the recorded one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="words of names")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--write", action="store_true", help="record the figures")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    known = recorded() if FIGURES.is_file() else {}
    found = figures(options.only, options.parts)
    lines = differences(known, found)
    print(f"{len(found)} configs and states, {len(lines)} figures changed", *lines, sep="\n  ")
    if options.write:
        kept = known if options.only or options.parts != list(PARTS) else {}
        merged = kept | {name: kept.get(name, {}) | parts for name, parts in found.items()}
        FIGURES.write_text(as_text(merged), "utf-8")
    return 1 if lines and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
