"""Operands that are elements of tuples have those elements' types, and no more bytes."""

import pytest

from jaxpar.monitoring import hlo
from jaxpar.monitoring.hlo import collective_bytes
from jaxpar.tools.profiling.trace.cpu_trace import multiplications

#: As on a GPU, where a layer's values go through barriers, whose results are tuples.
HLO = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%product (r0: bf16[4,16], r1: bf16[16,32]) -> bf16[4,32] {
  %r0 = bf16[4,16]{1,0} parameter(0)
  %r1 = bf16[16,32]{1,0} parameter(1)
  ROOT %dot.1 = bf16[4,32]{1,0} dot(%r0, %r1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%put (q0: f32[8,128], q1: f32[1,128]) -> f32[8,128] {
  %q0 = f32[8,128]{1,0} parameter(0)
  %q1 = (f32[], f32[1,128]{1,0}) parameter(1)
  ROOT %update.1 = f32[8,128]{1,0} dynamic-update-slice(%q0, %q1#1)
}

ENTRY %main {
  %a = f32[8,128]{1,0} parameter(0)
  %remat2.192.0 = (f32[1000]{0}, bf16[4,16]{1,0}, /*index=2*/bf16[16,32]{1,0:T(8,128)}) parameter(1)
  %custom-call.1 = (bf16[4,32]{1,0}, s8[64]{0}) custom-call(%remat2.192.0#1, %remat2.192.0#2), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{\
"dot_dimension_numbers":{"lhs_batch_dimensions":[],"lhs_contracting_dimensions":["1"],\
"rhs_batch_dimensions":[],"rhs_contracting_dimensions":["0"]}}}
  %fusion.1 = bf16[4,32]{1,0} fusion(%remat2.192.0#1, %remat2.192.0#2), kind=kCustom, calls=%product
  %pair = (f32[], f32[1,128]{1,0}) parameter(2)
  %fusion.2 = f32[8,128]{1,0} fusion(%a, %pair), kind=kLoop, calls=%put
  %gone = bf16[4,32]{1,0} fusion(%elsewhere#1), kind=kLoop
  %all-gather.1 = bf16[16,16]{1,0} all-gather(%remat2.192.0#1), replica_groups={{0,1,2,3}}, \
dimensions={0}
  ROOT %whole = (f32[1000]{0}, bf16[4,16]{1,0}) custom-call(%remat2.192.0), custom_call_target="x"
}
"""


@pytest.mark.parametrize(
    ("text", "elements"),
    [
        ("(f32[8]{0}, s8[64]{0})", ["f32[8]{0}", "s8[64]{0}"]),
        ("(bf16[2,3]{1,0})", ["bf16[2,3]{1,0}"]),
        (
            "(f32[], /*index=1*/pred[2,3]{0,1:T(8,128)(2,1)}, token[])",
            ["f32[]", "pred[2,3]{0,1:T(8,128)(2,1)}", "token[]"],
        ),
        (
            "((f32[16]{0}, bf16[8]{0}), (f32[64]{0}, bf16[2,2]{1,0}), u32[])",
            ["(f32[16]{0}, bf16[8]{0})", "(f32[64]{0}, bf16[2,2]{1,0})", "u32[]"],
        ),
    ],
)
def test_elements_of_a_tuple(text, elements):
    assert hlo.elements_of(text) == elements


def test_types_of_operands():
    module = hlo.parse(HLO)
    call = module.instructions["custom-call.1"]
    assert call.operands == ("remat2.192.0#1", "remat2.192.0#2")
    assert [module.type_of(o) for o in call.operands] == [
        "bf16[4,16]{1,0}",
        "bf16[16,32]{1,0:T(8,128)}",
    ]
    assert module.type_of("a") == "f32[8,128]{1,0}"
    assert module.type_of("pair") == "(f32[], f32[1,128]{1,0})"
    assert module.type_of("elsewhere") is None and module.type_of("elsewhere#1") is None


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("custom-call.1", 2 * 4 * 16 * 32),
        ("fusion.1", 2 * 4 * 16 * 32),
        ("fusion.2", 0),
        ("gone", 0),
    ],
)
def test_products_are_of_the_element_alone(name, flops):
    module = hlo.parse(HLO)
    assert multiplications(module, module.instructions[name]) == flops


def test_so_do_bytes_that_are_sent():
    assert collective_bytes(HLO).kinds == {"all-gather": {"count": 1, "bytes": 3 * 2 * 4 * 16}}
    with pytest.raises(ValueError, match="no instruction elsewhere#1"):
        collective_bytes(HLO.replace("all-gather(%remat2.192.0#1)", "all-gather(%elsewhere#1)"))
