"""The work of `python -m jaxpar.verify --mup`."""

from collections.abc import Callable, Mapping

import jax

from jaxpar.config import Config, ConfigError
from jaxpar.config.model_source import ModelReader
from jaxpar.config.validate import resolve
from jaxpar.runtime import exit_codes
from jaxpar.runtime import start as runtime
from jaxpar.runtime.files import atomic
from jaxpar.runtime.files.outputs import check_file
from jaxpar.runtime.processes import rendezvous
from jaxpar.runtime.stages import stage
from jaxpar.sharding.mesh import make_mesh
from jaxpar.verification.coordinates.activations import KINDS, ActivationSizes, measure
from jaxpar.verification.coordinates.growth import growth, table, verdicts
from jaxpar.verification.coordinates.wider import prepared, widened
from jaxpar.verification.options import MupOptions

type Draw = Callable[[Mapping[int, Mapping[str, float]], str, str], bytes]


def widths_of(text: str, cfg: Config) -> list[int]:
    """Return the widths of `--widths`, ascending.

    Raises:   ConfigError unless they are two or more different whole numbers.
    """
    if not text:
        return [cfg.model.d_model * times for times in (1, 2, 4)]
    try:
        widths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        widths = []
    if len(widths) < 2:
        rule = "must be two or more whole numbers, separated by commas"
        fix = f"use --widths {','.join(map(str, widths_of('', cfg)))}"
        raise ConfigError("--widths", text, rule, fix)
    return widths


def check_coordinates(options: MupOptions, model_from: ModelReader, draw: Draw) -> int:
    """Measure every width, print the table, and return the exit code.

    Args:     model_from: reads the model that `--model.from` names. draw: makes the file of --svg,
              from sizes by width and kind, a title, and the line under it.
    """
    check_file("--svg", options.svg or None, "mup.svg", in_existing_folder=True)
    asked = options.config.asked(model_from)
    cfg = prepared(asked, options.sequences, options.length)
    configs = {width: resolve(widened(cfg, width), 1) for width in widths_of(options.widths, asked)}
    options.config.show(asked)
    rendezvous.require_single_process("jaxpar.verify --mup")
    runtime.start(Config(run=asked.run))
    title, under = _conditions(options, cfg)
    print(f"{title}: {under}", flush=True)
    found: dict[int, ActivationSizes] = {}
    mesh = make_mesh(cfg.parallel, jax.devices()[:1])
    with jax.default_matmul_precision("highest"):
        for width, of_width in configs.items():
            with stage(f"training at width {width}"):
                found[width] = measure(of_width, mesh, options.steps, options.seeds)
    exponents = growth(found)
    print(f"\nmean |activation| after step {options.steps}, by d_model\n")
    print(table(found, exponents, options.tolerance))
    if options.svg:
        sizes = {width: {kind: one.end[kind] for kind in KINDS} for width, one in found.items()}
        atomic.write(options.svg, draw(sizes, title, under))
        print(f"\nwrote {options.svg}")
    wrong = verdicts(exponents, options.tolerance)
    print("\n" + ("; ".join(wrong) if wrong else "flat: no activation depends on the width"))
    return exit_codes.EXIT_ERROR if wrong else exit_codes.EXIT_OK


def _conditions(options: MupOptions, cfg: Config) -> tuple[str, str]:
    """Return the title and the conditions of the check."""
    o, m = cfg.optimizer, cfg.model
    kind = "standard parametrization" if m.mup is None else f"µP, base width {m.mup.base_width}"
    batch = f"{options.sequences} x {options.length} random tokens, seeds {options.seeds}"
    rate = f"{o.name} at {o.learning_rate:g}"
    return f"{options.config.name}, {kind}", f"{rate}, {options.steps} steps on {batch}"
