"""Kernels by their names, and places by op_names; all names are from real traces or libraries."""

import pytest

from jaxpar.tools.profiling.trace.kernels import (
    CLASSES,
    PATTERNS,
    classify,
    family,
    place_of,
    shorten,
)

NAMES = {
    "matmul": (
        "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NTT",
        "nvjet_sm90_tss_128x160_64x5_2x1_v_badd_NTT",
        "gemm_fusion_dot_259",
        "gemm_fusion_dot_general_1",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn>",
        "cutlass_80_tensorop_f16_s16816_dgrad",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(int)",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128>",
    ),
    "attention": (
        "anonymous_mosaic_gpu_kernel",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_6_64x128x128_1x1x1_kernel",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128>(float*)",
        "void cudnn::fusion::convert_dq_to_16bits<true, __nv_bfloat16, 128>(__nv_bfloat16*)",
        "fmha_v2_flash_attention_bf16_64_128_S_128_sm90_kernel",
    ),
    "fusion": (
        "loop_convert_slice_fusion_3",
        "loop_add_multiply_fusion_17",
        "loop_multiply_rsqrt_fusion",
        "input_reduce_fusion_185",
        "input_concatenate_reduce_fusion_1",
        "input_scatter_fusion",
        "input_transpose_fusion_33",
        "wrapped_concatenate_32",
        "wrapped_convert_1",
        "fusion_3853",
        "triton_softmax_5",
    ),
    "copy": ("MemcpyD2D", "Memset 3", "memcpy128", "memcpy32_post", "copy_12"),
    "other": ("void cub::DeviceRadixSortOnesweepKernel<int>", "RepeatBufferKernel"),
}

COLLECTIVES = {
    "all-gather": (
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclSymkDevKernel_AllGather_LLMC(ncclSymkDevWorkArgs4K)",
    ),
    "reduce-scatter": ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgs)",),
    "all-reduce": (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)",
        "psum_invariant_126_0_fusion_1",
    ),
    "send-receive": ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",),
    "permute": ("MemcpyP2P",),
    "host": ("MemcpyD2H", "MemcpyH2D"),
    "other": ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",),
}


@pytest.mark.parametrize(("what", "name"), [(w, n) for w, names in NAMES.items() for n in names])
def test_classes(what, name):
    assert classify(name) == (what, "")


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, ns in COLLECTIVES.items() for n in ns])
def test_kinds_of_communication(kind, name):
    assert classify(name) == ("communication", kind)


def test_every_pattern_says_why():
    assert all(p.reason and p.what in CLASSES for p in PATTERNS)
    assert all(bool(p.kind) == (p.what == "communication") for p in PATTERNS)


def test_the_instruction_says_what_a_send_was_for():
    name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    scope = "jit(train_step)/shard_map/transpose(jvp(jvp()))/checkpoint/"
    assert classify(name, scope + "all_to_all")[1] == "all-to-all"
    assert classify(name, scope + "ppermute")[1] == "permute"
    assert classify(name, op="collective-permute.3")[1] == "permute"
    assert classify(name, op="all_to_all.519.1")[1] == "all-to-all"


def test_pallas_kernels_outside_attention_are_told():
    name = "anonymous_mosaic_gpu_kernel"
    assert classify(name, "jit(f)/jvp(attention)/anonymous/mpmd_map")[0] == "attention"
    assert classify(name, "jit(f)/jvp(feed_forward)/anonymous/mpmd_map")[0] == "pallas"
    assert classify("quantize_mosaic_gpu_kernel", "jit(f)/jvp(attention)/x")[0] == "pallas"
    assert classify("flash_backward_mosaic_gpu_kernel")[0] == "attention"
    assert classify("softmax_exponentials_mosaic_gpu_kernel")[0] == "pallas"
    assert classify("quantize_both_ways")[0] == "pallas"
    assert classify("softmax_sum")[0] == classify("softmax_exponentials")[0] == "pallas"
    assert classify("swiglu")[0] == classify("swiglu_backward")[0] == "pallas"


def test_families():
    assert family("loop_convert_slice_fusion_3") == "loop_convert_slice_fusion"
    assert family("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)") == (
        "ncclDevKernel_SendRecv"
    )
    assert family("void cub::Sort<int>(int)") == "cub::Sort<int>"


STEP = "jit(train_step)/shard_map/"


@pytest.mark.parametrize(
    ("op_name", "place"),
    [
        ("jvp(attention)/dot_general", ("forward", "attention")),
        ("jvp(feed_forward)/jit(silu)/mul", ("forward", "feed_forward")),
        ("jvp(jvp(feed_forward))/dot_general", ("forward", "feed_forward")),
        ("jvp()/while/body/eval_jaxpr/dot_general", ("forward", "")),
        ("jvp(jit(_where))/select_n", ("forward", "")),
        ("transpose(jvp(jvp()))/checkpoint/attention/mul", ("backward", "attention")),
        (
            "transpose(jvp(jvp()))/checkpoint/attention/anonymous/mpmd_map",
            ("backward", "attention"),
        ),
        (
            "transpose(jvp(jvp()))/checkpoint/rematted_computation/feed_forward/reduce_sum",
            ("recompute", "feed_forward"),
        ),
        (
            "transpose(jvp(jvp()))/checkpoint/rematted_computation/all_gather",
            ("recompute", ""),
        ),
        ("optimizer/jit(tree_bias_correction)/div", ("outside", "optimizer")),
        ("reduce_sum", ("outside", "")),
    ],
)
def test_places(op_name, place):
    assert place_of(STEP + op_name) == place
    assert shorten(STEP + op_name) == op_name
