"""Compare optimizers over seeds: python scripts/measure/optimizers.py --data FOLDER [CONFIG]

Trains CONFIG (llama_100m) with every rule, learning rate and seed, one run after another, in
RUNS/RULE-RATE-SEED. Prints for each rule and rate the mean and the standard deviation of the last
held-out loss, the median step time, and the share of the steps after which a rule's mean held-out
loss is as low as the last one of the first rule at its best rate. A run that is complete is only
read, one that was stopped resumes. --plot draws each rule at its best rate: the mean of the seeds,
and their range. Options after -- are passed to jaxpar.train.

    python scripts/measure/optimizers.py --data data/web --plot muon.svg
    python scripts/measure/optimizers.py --data data/web --rates 5e-4,1e-3,2e-3 --seeds 0
    python scripts/measure/optimizers.py --data data/stdlib-bytes quickstart -- --train.num-steps 50
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from line_chart import Chart, Line, line_chart, scale_of, svg_file  # noqa: E402

#: The folders of the seeds of each (rule, learning rate).
type Runs = dict[tuple[str, str], list[Path]]


def curve_of(folder: Path) -> dict[int, float]:
    """Return the held-out loss of each evaluated step. A later attempt's values count."""
    found = {}
    for record in records_of(folder):
        if "held_out_loss" in record:
            found[record["step"]] = record["held_out_loss"]
    return found


def records_of(folder: Path) -> list[dict]:
    """Return the records of a run's metrics.jsonl, none before it exists."""
    path = folder / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def train(config: str, folder: Path, fields: dict[str, str], others: list[str]) -> None:
    """Train a run to its end, unless it is complete."""
    command = [sys.executable, "-m", "jaxpar.train", config, "--run.dir", str(folder)]
    command += itertools.chain.from_iterable((f"--{name}", v) for name, v in fields.items())
    print(" ".join(command[2:]), flush=True)
    subprocess.run([*command, *others], check=True)


def first_as_low(mean: dict[int, float], loss: float) -> float | None:
    """Return the share of the steps after which a mean curve is at most `loss`; None if never."""
    steps = [step for step, value in sorted(mean.items()) if value <= loss]
    return steps[0] / max(mean) if steps else None


def mean_curve(curves: list[dict[int, float]]) -> dict[int, float]:
    """Average curves over the steps that all of them have."""
    steps = set.intersection(*map(set, curves))
    return {step: statistics.mean(curve[step] for curve in curves) for step in steps}


def best_rates(runs: Runs) -> dict[str, str]:
    """Return the rate of each rule whose mean held-out loss ends lowest."""
    ends = {key: statistics.mean(last_of(folder) for folder in runs[key]) for key in runs}
    rules = dict.fromkeys(rule for rule, _ in runs)
    return {rule: min((k for k in ends if k[0] == rule), key=ends.__getitem__)[1] for rule in rules}


def last_of(folder: Path) -> float:
    """Return the last held-out loss of a run."""
    curve = curve_of(folder)
    return curve[max(curve)]


def table_of(runs: Runs) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| rule | rate | seeds | held-out loss | deviation | s/step | steps for the first's |"]
    lines.append("|---|---|---|---|---|---|---|")
    first = next(iter(best_rates(runs).items()))
    target = statistics.mean(last_of(folder) for folder in runs[first])
    for (rule, rate), folders in runs.items():
        last = [last_of(folder) for folder in folders]
        share = first_as_low(mean_curve([curve_of(folder) for folder in folders]), target)
        times = [r["step_seconds"] for f in folders for r in records_of(f) if "step_seconds" in r]
        spread = f"{statistics.stdev(last):.4f}" if len(last) > 1 else "-"
        lines.append(
            f"| {rule} | {rate} | {len(last)} | {statistics.mean(last):.4f} | {spread} "
            f"| {statistics.median(times):.4f} | {'never' if share is None else f'{share:.0%}'} |"
        )
    return lines


def picture(runs: Runs, config: str) -> bytes:
    """Draw the held-out loss of each rule at its best rate, as an SVG file."""
    lines, names, told = [], [], []
    for i, key in enumerate(best_rates(runs).items()):
        curves = [curve_of(folder) for folder in runs[key]]
        mean = mean_curve(curves)
        range_ = [(s, min(c[s] for c in curves), max(c[s] for c in curves)) for s in sorted(mean)]
        lines.append(Line(i, sorted(mean.items()), "dots", range_))
        names.append(f"{key[0]}, rate {key[1]}")
        told.append(f"{names[-1]}: {mean[max(mean)]:.3f} at the end")
    points = [point for line in lines for point in line.points]
    scales = scale_of(x for x, _ in points), scale_of(y for _, y in points)
    title = f"Held-out loss of {config}"
    drawn = line_chart(Chart(title, "; ".join(told), *scales, "steps", lines))
    seeds = max(len(runs[key]) for key in best_rates(runs).items())
    return svg_file(drawn, title, f"mean of {seeds} seeds and their range", names)


def main() -> None:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", default="llama_100m", metavar="CONFIG")
    parser.add_argument("--data", required=True, metavar="FOLDER")
    several = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--rules", type=several, default=["adamw", "muon"])
    parser.add_argument("--rates", type=several, default=["1e-3"])
    parser.add_argument("--seeds", type=several, default=["0", "1", "2"])
    parser.add_argument("--runs", type=Path, default=Path("runs/optimizers"))
    parser.add_argument("--plot", type=Path, metavar="FILE", help="an SVG file to write")
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    options, others = parser.parse_args(given[:cut]), given[cut + 1 :]
    runs: Runs = {}
    for seed, rule, rate in itertools.product(options.seeds, options.rules, options.rates):
        folder = options.runs / f"{rule}-{rate}-{seed}"
        fields = {"optimizer.name": rule, "optimizer.learning-rate": rate, "train.seed": seed}
        train(options.config, folder, fields | {"data.path": options.data}, others)
        runs.setdefault((rule, rate), []).append(folder)
    print("\n".join(table_of(runs)))
    if options.plot:
        options.plot.write_bytes(picture(runs, options.config))


if __name__ == "__main__":
    main()
