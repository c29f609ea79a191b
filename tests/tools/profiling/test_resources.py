"""What of a GPU kernels use: tensor cores, multiprocessors, launches."""

import dataclasses
from pathlib import Path

import pytest

from jaxpar.tools.profiling import breakdown, loading, table
from jaxpar.tools.profiling.trace import read as trace
from jaxpar.tools.profiling.trace.kernels import uses_tensor_cores
from jaxpar.tools.profiling.trace.read import Chip, NoKernels


@pytest.mark.parametrize(
    ("name", "what", "uses"),
    [
        ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NTT", "matmul", True),
        ("gemm_fusion_dot_259", "matmul", True),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention", True),
        ("anonymous_mosaic_gpu_kernel", "attention", True),
        ("ampere_sgemm_128x64_nn", "matmul", False),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x16", "matmul", True),
        ("void gemv2T_kernel_val<int, int, float>", "matmul", False),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(int)", "matmul", False),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true>(float*)", "attention", False),
        ("loop_add_multiply_fusion_17", "fusion", False),
        ("rms_norm", "pallas", False),
        ("grouped_matmul_mosaic_gpu_kernel", "pallas", True),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication", False),
    ],
)
def test_kernels_that_use_tensor_cores(name, what, uses):
    assert uses_tensor_cores(name, what) is uses


@pytest.fixture(scope="module")
def piece(real_trace, real_hlo):
    return breakdown.profile(trace.read(real_trace), real_hlo, 100)


def test_the_real_piece(piece):
    assert piece["tensor_ms"] / piece["ms"]["step"] == pytest.approx(0.878, abs=1e-3)


def test_the_tables_fit(piece):
    text = table.table(piece)
    assert max(map(len, text.splitlines())) <= 120
    assert "  tensor cores: 87.8% of the step in kernels that use them\n" in text
    (line,) = [line for line in text.splitlines() if line.startswith("  gaps ")]
    assert "0.00 ms until the host launched, 0.11 ms else" in line


# ------------------------------------------------------- a piece of a step on an H100, in a graph


@pytest.fixture(scope="module")
def h100():
    """150 kernels of the backward pass of Llama 3.2 1B, cut by `scripts/measure/trim_trace.py`."""
    return loading.load(str(Path(__file__).parent / "h100.xplane.pb.gz"))


def test_kernels_in_a_graph_have_their_resources(h100):
    assert h100.trace.device_kind == "NVIDIA H100 80GB HBM3"
    assert h100.trace.chip == Chip(132, 2048)
    (steps,) = h100.trace.devices.values()
    assert [len(step) for step in steps] == [150, 150]
    assert all(kernel.call.is_graph for kernel in steps[0])
    assert all(k.shape is not None for k in steps[0] if not k.name.startswith("Memset"))


def test_occupancy_and_waves(h100):
    found = breakdown.profile(h100.trace, h100.module, 100)
    assert sum(k["count"] for k in found["top_kernels"]) == 150
    of = {k["name"] + " " + k["result"]: k for k in found["top_kernels"]}
    product = of["nvjet_sm90_tst_176x128_64x5_1x2_h_bz_TNN bf16[32768,8192]"]
    assert product["occupancy"] == pytest.approx(0.1875) and product["waves"] == pytest.approx(1.0)
    assert product["tensor_cores"]
    pallas = of["swiglu_backward bf16[32768,2,8192]"]
    assert not pallas["tensor_cores"] and pallas["occupancy"] == 1.0
    launched = found["launching"]
    assert (launched["calls"], launched["graphs"], launched["in_graphs"]) == (1, 1, 150)
    assert launched["ahead_ms"]["least"] > 0 and launched["between_us"] == pytest.approx(
        1.5, abs=0.1
    )


def test_kernels_that_take_no_time(h100, tmp_path):
    """Of a damaged trace: nothing is divided by zero."""
    still = lambda k: dataclasses.replace(k, end=k.start)  # noqa: E731
    (steps,) = h100.trace.devices.values()
    moving = [[still(k) if n else k for n, k in enumerate(step)] for step in steps]
    found = breakdown.profile(
        dataclasses.replace(h100.trace, devices={0: moving}), h100.module, 200
    )
    assert table.table(found)
    stopped = dataclasses.replace(h100.trace, devices={0: [[still(steps[0][0])]]})
    with pytest.raises(NoKernels, match="take no time"):
        breakdown.profile(stopped, h100.module, 200)
