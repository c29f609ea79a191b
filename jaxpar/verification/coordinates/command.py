"""The work of `python -m jaxpar.verify --mup`."""

import jax

from jaxpar.config import Config, ConfigError
from jaxpar.config.model_source import ModelReader
from jaxpar.config.validate import resolve
from jaxpar.runtime import exit_codes
from jaxpar.runtime import start as runtime
from jaxpar.runtime.processes import rendezvous
from jaxpar.runtime.stages import stage
from jaxpar.sharding.mesh import make_mesh
from jaxpar.verification.coordinates.activations import ActivationSizes, measure
from jaxpar.verification.coordinates.growth import growth, table, verdicts
from jaxpar.verification.coordinates.wider import prepared, widened
from jaxpar.verification.options import MupOptions


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


def check_coordinates(options: MupOptions, model_from: ModelReader) -> int:
    """Measure every width, print the table, and return the exit code.

    Args:     model_from: reads the model that `--model.from` names.
    """
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
