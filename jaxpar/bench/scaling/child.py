"""Measures a point in a process of its own, by `bench train`: XLA reads devices and flags once."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpar.bench.scaling.points import ScalingPoint
from jaxpar.config.json_reader import UnreadableJson, read_json_object
from jaxpar.runtime import exit_codes
from jaxpar.runtime.gpus import visible
from jaxpar.runtime.processes import children

#: Lines of a failed program's output to show.
TAIL = 15

#: Seconds for a program to end after a signal.
GRACE = 5.0

_ERROR = re.compile(r"(config error|error|bad numerics): |[\w.]*(Error|Exception)\b: ?")


class PointFailed(exit_codes.RunError):
    """A point could not be measured. The message is the program's error, in one line."""

    def __init__(self, error: str, code: int, output: str):
        super().__init__(error)
        self.code, self.output = code, output


def measure(point: ScalingPoint, command: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run `bench train` on the first `point.devices` devices.

    Args:     command: the config with its overrides, and options of `bench train`. folder: for the
              card and the output.
    Returns:  the card of `bench train`.
    Raises:   PointFailed if the program fails.
    """
    card, log = folder / "card.json", folder / "output.log"
    for file in (card, log):
        file.unlink(missing_ok=True)
    words = ["jaxpar.bench", "train", *command, *point.flags, "--card", str(card)]
    started = children.start([sys.executable, "-m", *words], environment(point), log)
    ended = children.Children([started], GRACE).wait()
    code = ended.get(0, exit_codes.EXIT_ERROR)
    if code:
        code = code if code > 0 else 128 - code
        raise PointFailed(error_in(children.tail(log, 1000), code), code, children.tail(log, TAIL))
    try:
        return read_json_object(card)
    except (OSError, UnreadableJson) as error:
        said = f"it wrote no card: {error}"
        raise PointFailed(said, exit_codes.EXIT_ERROR, children.tail(log, TAIL)) from error


def environment(point: ScalingPoint) -> dict[str, str]:
    """Return the environment of a point's program, with as many GPUs as the point has devices."""
    env = dict(os.environ)
    if visible.gpu_is_present() and "run.cpu_devices" not in dict(point.settings):
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible.visible_gpu_ids()[: point.devices])
    return env


def error_in(output: str, code: int) -> str:
    """Return the last line of a program's output that names an error, or its exit code."""
    named = [line.strip() for line in output.splitlines() if _ERROR.match(line)]
    return named[-1][:500] if named else f"exit code {code}"
