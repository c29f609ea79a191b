"""Prints the table of `python -m jaxpar.verify`."""

import dataclasses
import sys
from collections.abc import Iterable, Sequence

import jax
from rich.markup import escape

from jaxpar.config import Config
from jaxpar.model.parameters import param_specs
from jaxpar.runtime import tables, terminal
from jaxpar.sharding.params import count
from jaxpar.verification import distances
from jaxpar.verification.options import VerifyOptions

COLUMNS = ("mesh", "weights at init", "loss", "worst gradient", "weights after", "verdict")


@dataclasses.dataclass(frozen=True)
class MeshRow:
    """The comparison of one mesh."""

    mesh: str
    loss: float
    found: distances.Comparison

    def cells(self) -> tuple[str, ...]:
        """Return the row as text, in the order of COLUMNS."""
        f = self.found
        named = lambda pair: f"{pair[0]:.1e} {pair[1]}" if pair else "-"  # noqa: E731
        init = f"{len(f.differing)} differ" if f.differing else "same bits"
        loss = f"{self.loss:.6f} ({f.loss:.1e})"
        verdict = "MISMATCH" if f.mismatches() else "ok, rounding" if f.is_rounding else "ok"
        return self.mesh, init, loss, named(f.gradient), named(f.update), verdict


def print_conditions(
    options: VerifyOptions, asked: Config, cfg: Config, devices: Sequence[jax.Device]
) -> None:
    """Print what is compared, and in which precision."""
    m, kind, n = cfg.model, devices[0].device_kind, len(devices)
    changed = f" instead of {asked.model.dtype}" if asked.model.dtype != m.dtype else ""
    lines = (
        f"{options.config.name}{', shrunk' if options.shrink else ''}: {count(param_specs(m)):,} "
        f"parameters; {m.num_layers} layers, d_model {m.d_model}, {m.num_heads} heads on "
        f"{m.num_kv_heads} of {m.head_dim}, d_ff {m.d_ff}, vocabulary {m.vocab_size}",
        f"{cfg.train.global_batch_size} sequences of {cfg.data.seq_len} tokens a step, random "
        f"packed documents, seed {cfg.train.seed}",
        f"float32{changed}, highest matmul precision, reference attention; tolerance "
        f"{options.tolerance:g} (weights after: "
        f"{distances.update_tolerance(options.tolerance):.1e})"
        + (
            f"; Adam's eps {cfg.optimizer.eps:.1e}"
            if cfg.optimizer.name in ("adamw", "muon")
            else ""
        ),
        f"{n} simulated CPU devices" if kind == "cpu" else f"{n} {kind}",
    )
    print("\n".join(lines), flush=True)


def print_table(rows: Iterable[MeshRow], steps: int, width: int) -> list[str]:
    """Print the rows, in plain text as soon as each is done.

    Args:     width: length of the longest mesh name.
    Returns:  descriptions of all mismatches.
    """
    columns = [f"{c} {steps} steps" if c == "weights after" else c for c in COLUMNS]
    done = _print_rich(rows, columns) if sys.stdout.isatty() else _print_plain(rows, columns, width)
    return [f"{row.mesh}: {what}" for row in done for what in row.found.mismatches()]


def _print_rich(rows: Iterable[MeshRow], columns: Sequence[str]) -> list[MeshRow]:
    console, done, each = terminal.console(), [], range(len(columns))
    table = tables.rich_table(columns, left=each, wrapped=each)
    with console.status("compiling and running ...") as status:
        for row in rows:
            done.append(row)
            status.update(f"compiling and running ... {len(done)} done, last: {row.mesh}")
            style = "bold red" if row.found.mismatches() else None
            table.add_row(*map(escape, row.cells()), style=style)
    console.print(table)
    return done


def _print_plain(rows: Iterable[MeshRow], columns: Sequence[str], width: int) -> list[MeshRow]:
    widths, each = (width, 15, 18, 25, 25, 0), range(len(columns))
    print(tables.line(columns, widths, left=each), flush=True)
    done = []
    for row in rows:
        done.append(row)
        print(tables.line(row.cells(), widths, left=each), flush=True)
    return done
