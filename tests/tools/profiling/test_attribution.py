"""Kernels of command buffers get their instruction, by the order of the schedule."""

from dataclasses import replace

import pytest

from jaxpar.monitoring import hlo
from jaxpar.tools.profiling.attribution import attribute
from jaxpar.tools.profiling.trace import read as trace
from jaxpar.tools.profiling.trace.read import KernelTrace, ProfiledKernel

GEMM = "nvjet_sm90_tst_128x160_64x5_2x1_v_bz_NNT"
FMHA = "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_6_kernel"

HLO = """\
HloModule jit_step, is_scheduled=true, num_partitions=2

%body (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  %custom-call.7 = (f32[2]{0}, s8[64]{0}) custom-call(%p), custom_call_target="__cublas$lt$matmul"\
, metadata={op_name="jit(step)/jvp(inner)/dot_general"}
  ROOT %loop_add_fusion.9 = f32[2]{0} fusion(%p), kind=kLoop, calls=%fused\
, metadata={op_name="jit(step)/jvp(inner)/add"}
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %loop_add_fusion.3 = f32[2]{0} fusion(%x), kind=kLoop, metadata={op_name="jit(step)/first/add"}
  %while.1 = f32[2]{0} while(%x), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"2"}}
  %fmha.2 = f32[2]{0} custom-call(%x), custom_call_target="__cudnn$fmhaSoftmaxBackward", \
metadata={op_name="jit(step)/transpose(jvp(attention))/sdpa"}
  ROOT %loop_add_fusion.4 = f32[2]{0} fusion(%x), metadata={op_name="jit(step)/last/add"}
}
"""


def scopes_of(*names):
    """The scopes that kernels of one stream get, by their last two parts."""
    kernels = [
        ProfiledKernel(name, 10 * n, 10 * n + 5, "Stream #1") for n, name in enumerate(names)
    ]
    (done,) = attribute(KernelTrace("jit_step", {0: [kernels]}), hlo.parse(HLO)).devices[0]
    return ["/".join(k.scope.split("/")[1:]) for k in done]


def test_loops_run_as_often_as_they_turn():
    names = ["loop_add_fusion_3", GEMM, "loop_add_fusion_9", GEMM, "loop_add_fusion_3", FMHA]
    assert scopes_of(*names, "loop_add_fusion_3") == [
        "first/add",
        *["jvp(inner)/dot_general", "jvp(inner)/add"] * 2,
        "transpose(jvp(attention))/sdpa",
        "last/add",
    ]


def test_a_library_call_may_launch_several_kernels():
    helper = "void cudnn::fusion::convert_dq_to_16bits<true>(float*)"
    found = scopes_of(GEMM, "loop_add_fusion_9", FMHA, helper, "Memset 3", "loop_add_fusion_3")
    assert found[2:] == ["transpose(jvp(attention))/sdpa"] * 2 + ["", "last/add"]


def test_a_triton_kernel_has_the_name_that_its_call_gives_it():
    call = """\
  %triton_kernel_call.5 = f32[2]{0} custom-call(%x), custom_call_target="triton_kernel_call", \
metadata={op_name="jit(step)/jvp(mlp)/take_largest/triton_kernel_call"}
  ROOT %loop_add_fusion.4"""
    text = HLO.replace("  ROOT %loop_add_fusion.4", call)
    kernels = [ProfiledKernel("take_largest", 0, 5, "Stream #1")]
    (done,) = attribute(KernelTrace("jit_step", {0: [kernels]}), hlo.parse(text)).devices[0]
    assert done[0].scope == "jit(step)/jvp(mlp)/take_largest/triton_kernel_call"


def test_what_is_not_in_the_schedule_stays_unknown():
    assert scopes_of("RepeatBufferKernel", "loop_mystery_fusion") == ["", ""]


def test_what_the_profiler_names_is_an_anchor():
    """Of three equal kernels, one is known: the others are told by it."""
    add = "loop_add_fusion_3"
    kernels = [ProfiledKernel(add, 10 * n, 10 * n + 5, "Stream #1") for n in range(3)]
    kernels[1] = replace(kernels[1], op="loop_add_fusion.4")
    (done,) = attribute(KernelTrace("jit_step", {0: [kernels]}), hlo.parse(HLO)).devices[0]
    assert done[1].scope == "jit(step)/last/add" and done[1].result == "f32[2]"
    assert done[0].scope and not done[2].scope


def test_the_real_piece(real_trace, real_hlo):
    """What the profiler knows by itself, the order of the schedule gives too."""
    module = hlo.parse(real_hlo)
    read = trace.read(real_trace)
    blind = {
        number: [[replace(k, op="", scope="") if _computes(k) else k for k in s] for s in steps]
        for number, steps in read.devices.items()
    }
    found = attribute(replace(read, devices=blind), module)
    checked = 0
    for number, steps in read.devices.items():
        for known, guessed in zip(steps, found.devices[number], strict=True):
            for a, b in zip(known, guessed, strict=True):
                if a.name.startswith("Memset"):
                    continue
                assert b.scope, b
                if a.op and _computes(a):
                    assert b.op == a.op
                    checked += 1
    assert checked == 36


def _computes(kernel: ProfiledKernel) -> bool:
    return not kernel.name.startswith("nccl")


def test_text_that_is_no_hlo():
    with pytest.raises(ValueError, match="not the text of an HLO module"):
        hlo.parse("hello")
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("HloModule m\n")


def test_types():
    assert hlo.num_bytes("bf16[8,128]{1,0:T(8,128)}") == 2048
    assert hlo.num_bytes("(f32[4]{0}, (s8[3]{0}, pred[]), token[], /*index=5*/u4[3]{0})") == 22
    assert hlo.num_bytes("f8e4m3fn[2,3]{1,0}") == 6 and hlo.num_bytes("c64[2]") == 16
    assert hlo.shape_of("(bf16[2,4]{1,0}, s8[33554432]{0})") == "bf16[2,4]"
    assert hlo.shape_of("(f32[1]{0}, f32[2]{0}, f32[3]{0}, f32[4]{0})") == (
        "(f32[1], f32[2], f32[3], ...)"
    )
    assert hlo.shape_of("token[]") == ""


ROUNDS = """\
HloModule jit_step, is_scheduled=true, num_partitions=1

%more (r: s32[]) -> pred[] {
  %r = s32[] parameter(0)
  ROOT %wrapped_compare.1 = pred[] fusion(%r), kind=kLoop, metadata={op_name="jit(step)/rounds/lt"}
}

%body (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %again = f32[2]{0} custom-call(%p), custom_call_target="mosaic_gpu_v2"\
, metadata={op_name="jit(step)/rounds/gate_up"}
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %first = f32[2]{0} custom-call(%x), custom_call_target="mosaic_gpu_v2"\
, metadata={op_name="jit(step)/gate_up"}
  %while.1 = f32[2]{0} while(%first), condition=%more, body=%body
  %last = f32[2]{0} custom-call(%while.1), custom_call_target="mosaic_gpu_v2"\
, metadata={op_name="jit(step)/weight_gradients"}
  ROOT %loop_add_fusion.4 = f32[2]{0} fusion(%last), metadata={op_name="jit(step)/last/add"}
}
"""


def test_a_loop_without_a_known_count_has_no_turn():
    """The nth kernel of Mosaic is that of the nth instruction outside of the loop."""
    mosaic, add = "anonymous_mosaic_gpu_kernel", "loop_add_fusion_4"
    names = [mosaic, "wrapped_compare_1", "set_while_condition", mosaic, add]
    kernels = [ProfiledKernel(name, 10 * n, 10 * n + 5, "1") for n, name in enumerate(names)]
    (done,) = attribute(KernelTrace("jit_step", {0: [kernels]}), hlo.parse(ROUNDS)).devices[0]
    parts = ["gate_up", "rounds/lt", "", "weight_gradients", "last/add"]
    assert [k.scope.removeprefix("jit(step)/") for k in done] == parts
