"""Bytes of what a fusion takes slices of, behind elementwise operations too."""

import pytest

from jaxpar.monitoring.hlo import text as hlo
from jaxpar.tools.profiling.hlo import costs


def size_of(*body: str, result: str = "bf16[2,16]{1,0}") -> int | None:
    """Of a fusion of %p, f32[8,16]."""
    inside = "\n".join(f"  {line}" for line in ("%p = f32[8,16]{1,0} parameter(0)", *body))
    module = hlo.parse(
        f"HloModule jit_f\n\n%fused (p: f32[8,16]) -> {result} {{\n{inside}\n}}\n\nENTRY %main {{\n"
        "  %a = f32[8,16]{1,0} parameter(0)\n"
        f"  ROOT %f = {result} fusion(%a), kind=kLoop, calls=%fused\n}}\n"
    )
    return costs.cost_of(module, module.instructions["f"]).bytes


ROUNDED = "%r = bf16[8,16]{1,0} convert(%p)"
WRITTEN = 2 * 2 * 16


def row(name: str, of: str, dtype: str = "bf16") -> str:
    return f"%{name} = {dtype}[1,16]{{1,0}} slice({of}), slice={{[0:1], [0:16]}}"


@pytest.mark.parametrize(
    ("body", "read"),
    [
        ([ROUNDED, row("s", "%r")], 4 * 16),  # of float32, though what is cut is rounded
        ([ROUNDED, row("s", "%r"), row("t", "%r")], 2 * 4 * 16),
        ([ROUNDED, row("s", "%r"), row("t", "%p", "f32")], 2 * 4 * 16),
        (
            ["%b = f32[16,8]{1,0} bitcast(%p)", ROUNDED.replace("%p", "%b"), row("s", "%r")],
            4 * 16,
        ),
        ([row(f"s{n}", "%p", "f32") for n in range(9)], 4 * 8 * 16),  # some of it twice
        ([ROUNDED, row("s", "%r"), "%n = bf16[8,16]{1,0} negate(%r)"], 4 * 8 * 16),
        ([ROUNDED, "%n = bf16[8,16]{1,0} negate(%r)", row("s", "%n")], 4 * 16),
        ([ROUNDED, "%n = bf16[8,16]{1,0} multiply(%r, %r)", row("s", "%n")], 4 * 16),
        ([row("t", "%p", "f32"), "%n = f32[1,8]{1,0} slice(%t), slice={[0:1], [0:8]}"], 4 * 8),
        (["%c = f32[16,16]{1,0} concatenate(%p, %q), dimensions={0}", row("s", "%c")], 4 * 8),
        (["%n = f32[16]{0} reduce(%p), dimensions={0}", row("s", "%n")], 4 * 8 * 16),
        ([ROUNDED], 4 * 8 * 16),  # nobody cuts it
    ],
    ids=[
        "one",
        "two",
        "both",
        "bitcast",
        "all",
        "whole too",
        "arithmetic",
        "two of one",
        "of a slice",
        "of a whole",
        "a sum",
        "none",
    ],
)
def test_of_what_is_cut_the_slices_are_read(body, read):
    last = "ROOT %out = bf16[2,16]{1,0} concatenate(%s, %s), dimensions={0}"
    assert size_of(*body, last) == read + WRITTEN
