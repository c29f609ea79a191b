"""What limits kernels, scopes and steps, and the use of tensor cores."""

import dataclasses
import gzip
import shutil
from pathlib import Path

import pytest

from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.planning.predict.hardware import H200, gpu_of_kind
from jaxpar.tools.profiling import breakdown, limits, loading, table
from jaxpar.tools.profiling.trace import read as trace
from jaxpar.tools.profiling.trace.kernels import uses_tensor_cores
from jaxpar.tools.profiling.trace.launches import Chip
from jaxpar.tools.profiling.trace.read import KernelTrace, NoKernels, ProfiledKernel


def row(what="fusion", us=100.0, least=(0.0, 80.0), waves=None, **more):
    """A kernel with its costs."""
    known = {"class": what, "mean_us": us, "ms": us / 1e3, "count": 1.0, "waves": waves}
    return known | {"name": "k", "least_us": least, "scope": "", "flops": 0, "bytes": 1} | more


@pytest.mark.parametrize(
    ("given", "bound"),
    [
        (row(least=(0.0, 80.0)), "memory"),
        (row("matmul", least=(65.0, 20.0)), "compute"),
        (row("matmul", least=(20.0, 65.0)), "memory"),
        (row(least=(0.0, 10.0)), "other"),
        (row(us=5.0, least=(0.0, 1.0)), "latency"),
        (row(us=5.0, least=(0.0, 4.0)), "memory"),  # short, but near the roof
        (row(least=(0.0, 10.0), waves=0.2), "latency"),
        (row("attention", least=(None, 10.0)), None),
        (row("attention", least=(None, 60.0)), "memory"),
        (row("all-gather", least=None), "communication"),
        (row("host", least=None), "communication"),
        (row(least=None), None),
        (row(us=2.0, least=None), "latency"),
    ],
)
def test_bounds(given, bound):
    assert limits.bound_of(given) == bound


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


def test_a_steps_limits():
    rows = limits.with_bounds(
        [
            row("matmul", 600.0, (400.0, 100.0), name="nvjet_a", flops=4e11),
            row("fusion", 300.0, (0.0, 250.0)),
            row("attention", 100.0, None, name="anonymous_mosaic_gpu_kernel", flops=None),
        ]
    )
    found = limits.summary(rows, 1.2, H200)
    assert found["by_bound_ms"] == {"compute": 0.6, "memory": 0.3, "unknown": 0.1}
    assert found["tensor_share"] == pytest.approx(0.7 / 1.2)
    assert found["tensor_flops"] is found["peak_share"] is None, "attention's are unknown"
    found = limits.summary(rows[:2], 1.2, H200)
    assert found["flops_per_second"] == pytest.approx(4e11 / 600e-6)
    assert found["peak_share"] == pytest.approx(4e11 / (989e12 * 1.2e-3), rel=1e-3)


@pytest.fixture(scope="module")
def piece(real_trace, real_hlo):
    """The piece of a real trace, with an H200's peaks and FLOPs of attention."""
    flops = 2 * 10 / 14 * 14 * 8 * 128 * 2 * 8192 * 8192 / 2  # two backward passes of 8 heads
    return breakdown.profile(trace.read(real_trace), real_hlo, 100, H200, flops * 14 / 10)


def test_the_real_piece(piece):
    found = piece["limits"]
    assert found["by_bound_ms"]["compute"] == pytest.approx(50.3, abs=0.1)
    assert found["tensor_share"] == pytest.approx(0.878, abs=1e-3)
    scopes = {(r["pass"], r["scope"]): r for r in piece["scopes"]}
    down = scopes["backward", "feed_forward"]
    assert down["bound"] == "compute" and down["tensor_share"] == pytest.approx(0.957, abs=0.01)
    total = sum(r["flops_per_second"] * r["ms"] / 1e3 for r in piece["scopes"])
    attention = next(k for k in piece["top_kernels"] if k["class"] == "attention")
    exact = piece["matmuls"]["flops"] + attention["flops"] * attention["count"]
    assert total == pytest.approx(exact), "each FLOP counts once"


def test_a_kernel_around_a_product_has_no_costs(piece):
    """cuBLAS clears its workspace under the product's instruction."""
    cleared = [k for k in piece["top_kernels"] if k["name"].startswith("Memset")]
    assert cleared and all(k["flops"] is k["roofline"] is None for k in cleared)
    assert all((k["roofline"] or 0) <= 1 for k in piece["top_kernels"])


def test_the_tables_fit(piece):
    text = table.table(piece)
    assert max(map(len, text.splitlines())) <= 120
    assert "  tensor cores: 87.8% of the step in kernels that use them, at " in text
    assert "\n  limit            ms  of step\n" in text
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
    found = breakdown.profile(h100.trace, h100.module, 100, gpu_of_kind(h100.trace.device_kind))
    assert sum(k["count"] for k in found["top_kernels"]) == 150
    of = {k["name"] + " " + k["result"]: k for k in found["top_kernels"]}
    product = of["nvjet_sm90_tst_176x128_64x5_1x2_h_bz_TNN bf16[32768,8192]"]
    assert product["occupancy"] == pytest.approx(0.1875) and product["waves"] == pytest.approx(1.0)
    assert product["tensor_cores"] and product["bound"] == "compute"
    assert product["roofline"] == pytest.approx(2 * 32768 * 8192 * 2048 / 989e12 / 1472.5e-6, 1e-3)
    pallas = of["swiglu_backward bf16[32768,2,8192]"]
    assert (pallas["bound"], pallas["flops"], pallas["occupancy"]) == ("memory", 0, 1.0)
    assert pallas["roofline"] == pytest.approx(3.058e12 / 3.35e12, 1e-3), "of the datasheet's peak"
    assert all((kernel["roofline"] or 0) <= 1 for kernel in found["top_kernels"])
    assert found["matmuls"]["share"] == pytest.approx(0.742, abs=1e-3)
    scopes = {(r["pass"], r["scope"]): r for r in found["scopes"]}
    attention = scopes["backward", "attention/core_attention"]
    assert attention["bound"] is None and attention["roofline"] is None, "its FLOPs are not known"
    assert attention["occupancy"] == pytest.approx(0.28, abs=0.01)
    launched = found["launching"]
    assert (launched["calls"], launched["graphs"], launched["in_graphs"]) == (1, 1, 150)
    assert launched["ahead_ms"]["least"] > 0 and launched["between_us"] == pytest.approx(
        1.5, abs=0.1
    )


def test_facts_tell_the_limit_of_attention(h100):
    """Four backward passes, as if four layers were the model. With heads of 64, they are limited
    by neither FLOPs nor bytes: the exponentials take as long."""
    gpu = gpu_of_kind(h100.trace.device_kind)
    flops = 4 * 14 * 32 * 64 * 32768 * 4096 / 2
    found = breakdown.profile(h100.trace, h100.module, 1, gpu, flops)
    (attention,) = found["top_kernels"]
    assert attention["flops"] == pytest.approx(flops * 10 / 14 / attention["count"])
    assert attention["bound"] == "other" and attention["roofline"] == pytest.approx(0.335, abs=2e-3)
    assert "unknown" not in found["limits"]["by_bound_ms"]
    assert found["limits"]["peak_share"] == pytest.approx(0.53, abs=0.01)


def test_hlo_without_shapes_is_refused(tmp_path):
    here = Path(__file__).parent
    shutil.copy(here / "h100.xplane.pb.gz", tmp_path)
    text = gzip.decompress((here / "h100.hlo.txt.gz").read_bytes()).decode()
    (tmp_path / "h100.hlo.txt").write_text(text.replace("bf16[", "bf16("))
    with pytest.raises(ConfigError, match="is damaged"):
        call("profile", [str(tmp_path / "h100.xplane.pb.gz")])


def test_kernels_that_take_no_time(h100, tmp_path):
    """Of a damaged trace: nothing is divided by zero."""
    gpu = gpu_of_kind(h100.trace.device_kind)
    still = lambda k: dataclasses.replace(k, end=k.start)  # noqa: E731
    (steps,) = h100.trace.devices.values()
    moving = [[still(k) if n else k for n, k in enumerate(step)] for step in steps]
    found = breakdown.profile(
        dataclasses.replace(h100.trace, devices={0: moving}), h100.module, 200, gpu, 1e12
    )
    assert table.table(found)
    stopped = dataclasses.replace(h100.trace, devices={0: [[still(steps[0][0])]]})
    with pytest.raises(NoKernels, match="take no time"):
        breakdown.profile(stopped, h100.module, 200, gpu, 1e12)


def test_costs_are_means_over_a_groups_instructions():
    """Two fusions with the same name and result read one and three arrays."""
    text = """HloModule jit_f

ENTRY %main {
  %a = f32[1000]{0} parameter(0)
  %fusion.1 = f32[1000]{0} fusion(%a), kind=kLoop
  ROOT %fusion.2 = f32[1000]{0} fusion(%a, %a, %a), kind=kLoop
}
"""
    kernels = [ProfiledKernel(f"fusion_{n}", n * 20, n * 20 + 10, op=f"fusion.{n}") for n in (1, 2)]
    found = breakdown.profile(KernelTrace("jit_f", {0: [kernels]}), text)
    (row,) = found["top_kernels"]
    assert row["count"] == 2 and row["bytes"] == 4000 * (2 + 4) / 2 and "ops" not in row
