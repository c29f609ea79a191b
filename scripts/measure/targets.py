"""Measure the targets of docs/benchmarks/README.md: python scripts/measure/targets.py [ROW ...]

Each row is a run of `python -m jaxpar.profile --bench`. With --torchtitan PYTHON, the interpreter
of an environment with torchtitan, scripts/measure/torchtitan_run.py runs after it. With --beside
FOLDER, another checkout of jaxpar, that checkout runs before it. Each run writes a card and a log
to the folder --cards, and the table is printed at the end. If a row fails, the others still run,
and the exit code is 1. Prepare the text once with

    python -m jaxpar.data prepare --input stdlib --output data/stdlib --tokenizer bpe:8192

To measure whether a change is faster, compare two checkouts on the same host:

    git worktree add ../before main
    python scripts/measure/targets.py fsdp float8 --beside ../before

Fields that the other checkout does not have are dropped there. It must be able to read the text. If
it is too old, prepare the text with it: newer code can read it.

--list prints the planner's predictions and the commands, and needs no GPU. --write writes the
predictions to the page.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402

from jaxpar.config import ConfigError  # noqa: E402
from jaxpar.config.command_line import read_config  # noqa: E402
from jaxpar.config.validate import resolve  # noqa: E402
from jaxpar.prediction.communication import Cluster  # noqa: E402
from jaxpar.prediction.hardware import GIB, H200, NETWORKS  # noqa: E402
from jaxpar.prediction.ranking import Layout, predict  # noqa: E402
from jaxpar.runtime.exit_codes import EXIT_INTERRUPTED  # noqa: E402
from jaxpar.runtime.files.outputs import check_folder  # noqa: E402
from jaxpar.runtime.gpus import nvml  # noqa: E402
from jaxpar.runtime.gpus.visible import visible_gpus  # noqa: E402
from jaxpar.runtime.processes.children import held_back  # noqa: E402
from jaxpar.runtime.program import run_program  # noqa: E402
from scripts.measure.target_rows import ROWS, Row  # noqa: E402

# The planner needs no GPU. This process must not use the memory of the measured GPUs.
jax.config.update("jax_platforms", "cpu")

PAGE = ROOT / "docs" / "benchmarks" / "README.md"
MARKERS = re.compile(r"(<!-- predictions -->\n).*?(<!-- /predictions -->)", re.DOTALL)

#: The requested cards of a row ("jaxpar", "beside", "torchtitan"); None if the run failed.
type Cards = dict[str, dict[str, Any] | None]


def arguments(words: list[str]) -> argparse.Namespace:
    """The command line."""
    lines = (__doc__ or "").split("\n")
    parser = argparse.ArgumentParser(
        prog="targets.py",
        description=lines[0],
        epilog="\n".join(lines[2:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("rows", nargs="*", metavar="ROW", help=f"rows to measure: {', '.join(ROWS)} (all that fit)")
    add("--gpus", type=int, help="number of GPUs (all of this host; 8 for --list)")
    add("--steps", type=int, default=10, help="number of timed steps (10)")
    add("--data", default="data/stdlib", help="folder of `jaxpar.data prepare` (data/stdlib)")
    add("--cards", default="runs/targets", help="folder for cards and logs (runs/targets)")
    add("--torchtitan", metavar="PYTHON", help="interpreter with torchtitan: measure it too")
    add("--beside", metavar="FOLDER", help="another checkout of jaxpar, measured before this one")
    add("--timeout", type=int, default=900, help="time limit of a run in seconds (900)")
    add("--list", action="store_true", help="print commands and predictions without running them")
    add(
        "--write",
        action="store_true",
        help="with --list for 8 GPUs: write docs/benchmarks/README.md",
    )
    options = parser.parse_args(words)
    unknown = [name for name in options.rows if name not in ROWS]
    if unknown:
        parser.error(f"ROW = {unknown[0]!r} is not known. Fix: one of {', '.join(ROWS)}")
    for name in ("gpus", "steps", "timeout"):
        value = getattr(options, name)
        if value is not None and value < 1:
            fix = f"--{name} {parser.get_default(name) or 8}"
            parser.error(f"--{name} = {value}: must be at least 1. Fix: {fix}")
    try:
        check_folder("--cards", options.cards)
    except ConfigError as error:
        parser.error(str(error))
    options.gpus = options.gpus or (8 if options.list else visible_gpus())
    if options.write and (not options.list or options.rows or options.gpus != 8):
        parser.error("--write: the page has all rows for 8 GPUs. Fix: use only --list --write")
    if options.gpus < 1:
        parser.error("--gpus: there is no GPU. Fix: use --list to print the commands")
    here = visible_gpus()
    if not options.list and 0 < here < options.gpus:
        rule = f"--gpus = {options.gpus}: only {here} are visible (CUDA_VISIBLE_DEVICES)"
        parser.error(f"{rule}. Fix: --gpus {here}")
    if not options.list and not (Path(options.data) / "meta.json").exists():
        fix = "python -m jaxpar.data prepare --input stdlib --output "
        fix += shlex.quote(options.data)
        parser.error(
            f"--data = {options.data!r} contains no tokens. Fix: {fix} --tokenizer bpe:8192"
        )
    if options.torchtitan:
        found = shutil.which(options.torchtitan)
        if not found:
            rule = f"--torchtitan = {options.torchtitan!r} is not a program"
            parser.error(f"{rule}. Fix: use the python of an environment with torchtitan")
        options.torchtitan = os.path.abspath(
            found
        )  # keeps symbolic links, which define the environment
    if options.beside and not (Path(options.beside) / "jaxpar" / "config").is_dir():
        rule = f"--beside = {options.beside!r} does not contain jaxpar/config"
        parser.error(f"{rule}. Fix: make a checkout with git worktree add ../before COMMIT")
    return options


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the requested rows, or all that fit an H200, and print the skipped ones."""
    fit = []
    for name in options.rows or ROWS:
        row, gpus = ROWS[name], options.gpus
        if gpus % row.ways:
            print(f"{name}: needs a multiple of {row.ways} GPUs, not {gpus}: skipped")
            continue
        try:
            memory = predicted(row, row.gpus or gpus).memory.total
        except ConfigError as error:
            print(f"{name}: skipped on {gpus} GPUs: {error}")
            continue
        if memory > H200.usable_bytes and not options.rows and not options.list:
            print(f"{name}: {memory / GIB:.1f} GiB per GPU by the planner: skipped")
            continue
        fit.append(name)
    return fit


@functools.cache
def predicted(row: Row, gpus: int) -> Layout:
    """Return the planner's prediction of a row on H200s of one host."""
    cfg = resolve(read_config(row.arguments(gpus)), gpus)
    return predict(cfg, Cluster(H200, NETWORKS["ib400"], gpus, H200.per_host))


def listing(names: list[str], gpus: int) -> str:
    """Return the rows as Markdown: targets and predictions, then the commands."""
    lines = ["| row | target | ms | tokens/s/GPU | GiB |", "|---|---|---|---|---|"]
    commands = []
    for name in names:
        row = ROWS[name]
        made = predicted(row, row.gpus or gpus)
        figures = [f"{made.time.total * 1e3:,.0f}", f"{made.time.rate:,.0f}"]
        cells = [name, _target(row), *figures, f"{made.memory.total / GIB:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
        words = " ".join(row.arguments(row.gpus or gpus))
        alone = "CUDA_VISIBLE_DEVICES=0 " if row.gpus == 1 else ""
        commands += [f"# {name}", f"{alone}python -m jaxpar.profile --bench {words}"]
    return "\n".join([*lines, "", "```sh", *commands, "```", ""])


def _target(row: Row) -> str:
    if row.target is None:
        return "-"
    return f"{row.target:.0%} of {row.share_of}" if row.share_of else f"{row.target:,.0f}"


def run(
    command: list[str], card: Path, timeout: int, gpus: int, folder: Path = ROOT
) -> dict[str, Any] | None:
    """Run a program that writes a card, and return the card; None if it fails.

    On failure, an earlier card is restored, and the program's own is renamed to CARD.partial.

    Args:     folder: working directory, whose modules `python -m` uses.
    """
    print(f"{'' if folder == ROOT else f'{folder} '}$ {shlex.join(command)}", flush=True)
    log, earlier = card.with_suffix(".log"), card.with_suffix(".earlier")
    if card.exists():
        card.replace(earlier)
    try:
        code = exit_code(command, log, timeout, gpus, folder)
        if code == 0 and card.exists():
            found = json.loads(card.read_text())
            earlier.unlink(missing_ok=True)
            return found
    finally:  # also if this program is terminated
        if earlier.exists():
            if card.exists():
                card.replace(card.with_suffix(".partial"))
            earlier.replace(card)
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    print(f"failed, exit code {code}; {log}: {said[-1] if said else 'nothing printed'}", flush=True)
    return None


def exit_code(command: list[str], log: Path, timeout: int, gpus: int, folder: Path) -> int | str:
    """Run a program on some GPUs with its output in `log`, and return its exit code."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    given = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[:gpus])}
    with open(log, "w") as file, contextlib.ExitStack() as afterwards:
        with held_back():  # otherwise a started program could keep running unnoticed
            process = subprocess.Popen(
                command, cwd=folder, env=given, stdout=file, stderr=file, start_new_session=True
            )
            afterwards.callback(end, process)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"none after {timeout} s"


def end(process: subprocess.Popen) -> None:
    """End a program and its children, which would otherwise keep their GPUs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def measure(name: str, options: argparse.Namespace) -> Cards:
    """Measure a row, and return its card and those of the other programs."""
    row, folder, found = ROWS[name], Path(options.cards).resolve(), {}
    gpus, data = row.gpus or options.gpus, str(Path(options.data).resolve())

    def ours(kind: str, code: Path) -> None:
        card = folder / (f"{name}.json" if kind == "jaxpar" else f"{kind}-{name}.json")
        words = row.arguments(gpus, memory_gib())
        words = words if code == ROOT else known_to(code, words)
        # An older checkout has a command of its own for benchmarks.
        older = (code / "jaxpar" / "bench" / "__main__.py").is_file()
        program = ["jaxpar.bench", "train"] if older else ["jaxpar.profile", "--bench"]
        command = [sys.executable, "-m", *program, *words]
        command += ["--data.path", data, "--steps", str(options.steps), "--card", str(card)]
        found[kind] = run(command, card, options.timeout, gpus, code)

    if options.beside:
        ours("beside", Path(options.beside).resolve())
    ours("jaxpar", ROOT)
    if options.torchtitan:
        card = folder / f"torchtitan-{name}.json"
        command = [options.torchtitan, "scripts/measure/torchtitan_run.py", row.torchtitan]
        command += ["--gpus", str(gpus), "--steps", str(max(4, options.steps)), "--data", data]
        command += ["--card", str(card), "--log", str(card.with_suffix(".out"))]
        found["torchtitan"] = run(command, card, options.timeout, gpus)
    return found


@functools.cache
def memory_gib() -> float:
    """Return the memory of this host's first GPU; an H200's if there is none."""
    try:
        return (nvml.gpus()[0].memory_total or H200.memory.value) / GIB
    except nvml.Unavailable:
        return H200.memory.value / GIB


def known_to(code: Path, words: list[str]) -> list[str]:
    """Return a row's arguments without fields that the other checkout does not have."""
    asked = [sys.executable, "-c", "from jaxpar.config.fields import field_types as f; print(*f())"]
    said = subprocess.run(asked, cwd=code, capture_output=True, text=True, check=False)
    config, *pairs = words
    kept = [config]
    for option, value in zip(pairs[::2], pairs[1::2], strict=True):
        if said.returncode == 0 and option[2:].replace("-", "_") not in said.stdout.split():
            print(f"{code} has no {option}: measured without", flush=True)
        else:
            kept += [option, value]
    return kept


def table(found: dict[str, Cards]) -> str:
    """Return the measurements as Markdown."""
    peers = [p for p in ("beside", "torchtitan") if any(p in cards for cards in found.values())]
    heads = ["layout", "target", "tokens/s/GPU", "of target", "MFU (causal, full)", "peak GiB"]
    heads += [head for peer in peers for head in (f"{peer}, GiB", "ratio")]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    rates = {name: _rate(cards["jaxpar"]) for name, cards in found.items() if cards["jaxpar"]}
    for name, cards in found.items():
        row, rate = ROWS[name], rates.get(name)
        goal = row.target and row.target * (rates.get(row.share_of, 0) if row.share_of else 1)
        cells = [row.what, _target(row), *_figures(cards["jaxpar"], goal)]
        for peer in peers:
            cells += _beside(cards.get(peer), rate)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _rate(card: dict[str, Any]) -> float:
    return card["tokens_per_second_per_device"]


def _figures(card: dict[str, Any] | None, goal: float | None) -> list[str]:
    if not card:
        return ["-"] * 4
    share = f"{_rate(card) / goal:.1%}" if goal else "-"
    mfu = "-"  # the device's peak is unknown
    if card["mfu_causal"] is not None:
        mfu = f"{card['mfu_causal']:.1%}, {card['mfu_full_attention']:.1%}"
    return [f"{_rate(card):,.0f}", share, mfu, f"{card['peak_memory_gib']:.1f}"]


def _beside(card: dict[str, Any] | None, rate: float | None) -> list[str]:
    if not card:
        return ["-"] * 2
    ratio = f"{rate / _rate(card):.3f}" if rate else "-"
    return [f"{_rate(card):,.0f}, {card['peak_memory_gib']:.1f}", ratio]


def main(words: list[str]) -> int:
    """List or measure the rows, and return the exit code."""
    options = arguments(words)
    names = chosen(options)
    if not names:
        print(f"no rows fit {options.gpus} GPUs")
        return 1
    if options.list:
        made = listing(names, options.gpus)
        if options.write:
            text, predictions = PAGE.read_text("utf-8"), made.partition("\n```")[0]
            PAGE.write_text(MARKERS.sub(lambda m: m[1] + predictions + m[2], text), "utf-8")
        print(made)
        return 0
    Path(options.cards).mkdir(parents=True, exist_ok=True)
    found: dict[str, Cards] = {}
    stopped = False
    try:
        for i, name in enumerate(names, 1):
            print(f"[{i}/{len(names)}] {name}: {ROWS[name].what}", flush=True)
            found[name] = measure(name, options)
    except KeyboardInterrupt:
        stopped = True
    if found:
        print("\n" + table(found))
    failed = [name for name, cards in found.items() if None in cards.values()]
    if failed:
        print(f"failed: {', '.join(failed)}")
    if stopped:
        print(f"interrupted: {len(found)} of {len(names)} rows measured")
        return EXIT_INTERRUPTED
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the child, too
    run_program(main)
