"""Check that every mesh computes the same as the reference model.

    python -m jaxpar.verify llama3_8b --shrink --mesh data=2,tensor=2 --mesh pipeline=2,sequence=2

Each mesh trains in float32 for a few steps on random packed documents, on simulated CPU devices or
on the available accelerators, and is compared with `model/reference.py` and optax on one device.
The criteria, where `t` is --tolerance:

    weights at init   identical bits on every mesh
    loss              every step: relative error at most t
    gradients         every parameter: largest error at most t times its largest gradient, or 4
                      times what rounding does to it, at most 10 t (`verification/rounding.py`)
    weights after     every parameter: mean error at most t * (1 + ln(1/t)) times the mean change

The last criterion is a mean because Adam moves an element by about lr * g / |g|, whatever the size
of its gradient g. Where |g| is at most the gradient error d, the update is arbitrary on any mesh,
so the largest error has no useful bound. For gradients distributed uniformly up to s, the mean of
min(1, d / |g|) is (d / s) * (1 + ln(s / d)), and d / s is at most t. This holds for one step. In
later steps, such updates change all gradients; Adam's eps is increased to keep the effect small
(`small_config.steady`). `verification/traces.py` makes the traces that are compared.
"""

import dataclasses
from collections.abc import Sequence

import jax

from jaxpar.config.command_line import expand_set_options, parse_overrides
from jaxpar.config.config_file import load_config
from jaxpar.config.lists.step_sizes import without_schedules
from jaxpar.config.model_source import take_source
from jaxpar.config.validate import check
from jaxpar.convert.shape import model_from
from jaxpar.runtime import exit_codes
from jaxpar.runtime.program import run_program
from jaxpar.verification import small_config
from jaxpar.verification.command import (
    DEFAULT_DEVICES,
    PROGRAM,
    compare_meshes,
    default_meshes,
    parse_options,
    refuse_large,
    start_devices,
)
from jaxpar.verification.meshes import num_devices, parse_meshes, refuse_rounding, resolve_meshes
from jaxpar.verification.table import print_conditions, print_table


def main(argv: Sequence[str]) -> int:
    """Compare every mesh, print the table, and return the exit code."""
    options, overrides = parse_options(argv)
    base = load_config(options.config)
    asked = parse_overrides(base, overrides, PROGRAM, model_from=model_from)
    # On one device, since each mesh is checked by itself.
    check(dataclasses.replace(asked, parallel=parse_meshes(["data=1"], asked.parallel)["data=1"]))
    cfg = small_config.float32(without_schedules(asked))
    meshes = parse_meshes(options.mesh or default_meshes(cfg.model), cfg.parallel)
    refuse_rounding(meshes, cfg.parallel)
    if options.shrink:
        cfg = small_config.shrink(cfg, list(meshes.values()))
        others, _ = take_source(list(expand_set_options(overrides)))
        cfg = small_config.float32(parse_overrides(cfg, others, PROGRAM))
    cfg = small_config.steady(cfg)
    needed = max(map(num_devices, meshes.values())) if options.mesh else DEFAULT_DEVICES
    devices = start_devices(asked.run, options.devices or asked.run.cpu_devices, needed)
    configs = resolve_meshes(cfg, meshes, len(devices), given=bool(options.mesh))
    refuse_large(cfg, configs.values(), devices)
    print_conditions(options, asked, cfg, devices)
    with jax.default_matmul_precision("highest"):
        rows = compare_meshes(cfg, configs, devices, options.steps, options.tolerance)
        wrong = print_table(rows, options.steps, max(map(len, configs)))
    left = len(meshes) - len(configs)
    agree = f"{len(configs)} of {len(meshes)} agree" + f"; {left} not compared" * bool(left)
    print("\n".join(wrong) if wrong else agree)
    return exit_codes.EXIT_ERROR if wrong else exit_codes.EXIT_OK


if __name__ == "__main__":
    run_program(main)
