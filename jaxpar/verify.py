"""Check that meshes compute what the plain model computes.

    python -m jaxpar.verify llama3_8b --shrink --mesh data=2,tensor=2 --mesh pipeline=2,sequence=2

On simulated CPU devices, or on the accelerators that are there, each mesh trains for a few steps on
random packed documents, in float32, and is compared with `model/reference.py` and optax on one
device. What must hold, `t` being --tolerance:

    weights at init   the same bits on every mesh
    loss              of every step: within t, relative
    gradients         of every parameter: largest error within t of its largest gradient
    weights after     of every parameter: mean error within t * (1 + ln(1/t)) of the mean change

The last is a mean because Adam moves an element by about lr * g / |g|, whatever the size of its
gradient g: where g is no larger than the error d of gradients, the move is arbitrary on any mesh,
and no useful bound holds for the largest error. With gradients spread evenly up to s, the mean of
min(1, d / |g|) is (d / s) * (1 + ln(s / d)), and d / s is at most t. That is of one step. Of the
next, all gradients are off by what such moves did to the loss; so Adam's eps is raised until they
are small (`small_config.steady`). What is compared is in `verification/traces.py`.
"""

from collections.abc import Sequence

import jax

from jaxpar.config.command_line import parse_overrides
from jaxpar.config.config_file import load_config
from jaxpar.runtime import exit_codes
from jaxpar.runtime.program import run_program
from jaxpar.verification import small_config
from jaxpar.verification.command import (
    DEFAULT_DEVICES,
    DEFAULT_MESHES,
    PROGRAM,
    compare_meshes,
    parse_options,
    refuse_large,
    start_devices,
)
from jaxpar.verification.meshes import num_devices, parse_meshes, refuse_rounding, resolve_meshes
from jaxpar.verification.table import print_conditions, print_table


def main(argv: Sequence[str]) -> int:
    """Compare every mesh and print the table; the exit code."""
    options, overrides = parse_options(argv)
    asked = parse_overrides(load_config(options.config), overrides, PROGRAM)
    cfg = small_config.float32(asked)
    meshes = parse_meshes(options.mesh or DEFAULT_MESHES, cfg.parallel)
    refuse_rounding(meshes, cfg.parallel)
    if options.shrink:
        cfg = small_config.shrink(cfg, list(meshes.values()))
        cfg = small_config.float32(parse_overrides(cfg, overrides, PROGRAM))
    cfg = small_config.steady(cfg)
    needed = max(map(num_devices, meshes.values())) if options.mesh else DEFAULT_DEVICES
    devices = start_devices(asked.run, options.devices or asked.run.cpu_devices, needed)
    configs = resolve_meshes(cfg, meshes, len(devices), given=bool(options.mesh))
    refuse_large(cfg, devices)
    print_conditions(options, asked, cfg, devices)
    with jax.default_matmul_precision("highest"):
        rows = compare_meshes(cfg, configs, devices, options.steps, options.tolerance)
        wrong = print_table(rows, options.steps, max(map(len, configs)))
    print("\n".join(wrong) if wrong else f"{len(configs)} of {len(configs)} agree")
    return exit_codes.EXIT_ERROR if wrong else exit_codes.EXIT_OK


if __name__ == "__main__":
    run_program(main)
