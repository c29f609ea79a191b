"""FLOPs and MFU against figures worked out by hand."""

import pytest

from jaxpar.config import replace
from jaxpar.config.command_line import load_config
from jaxpar.model import flops
from jaxpar.monitoring import metrics
from jaxpar.runtime.gpus import peaks

LLAMA_8B = load_config("llama3_8b").model


def test_flops_of_llama_8b():
    matrices = 32 * (4096 * (4096 + 1024 + 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    norms = 65 * 4096
    head = 4096 * 128256
    assert flops.num_matmul_params(LLAMA_8B) == matrices + norms + head
    attention = 32 * 4096 * 8192
    causal = flops.train_flops_per_token(LLAMA_8B, 8192)
    assert causal == 6 * (matrices + norms + head) + 6 * attention
    assert causal == pytest.approx(45.0e9 + 6.4e9, rel=5e-3)
    full = flops.train_flops_per_token(LLAMA_8B, 8192, causal=False)
    assert full - causal == 6 * attention


def test_a_tied_table_multiplies_too():
    cfg = load_config("llama_1b")
    untied = replace(cfg, **{"model.tie_embeddings": False}).model
    assert flops.num_matmul_params(cfg.model) == flops.num_matmul_params(untied)
    assert flops.num_params(untied) - flops.num_params(cfg.model) == 128256 * 2048


def test_mfu_is_a_share_of_the_peak():
    """torchtitan's 10,448 tokens/s/GPU of this shape are 61.2% in its own convention."""
    share = metrics.mfu(10_448, LLAMA_8B, 8192, "NVIDIA H200", causal=False)
    assert share == pytest.approx(0.612, abs=5e-4)
    assert metrics.mfu(10_448, LLAMA_8B, 8192, "cpu", causal=True) is None


@pytest.mark.parametrize(
    ("device", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA RTX A1000", None),
        ("cpu", None),
    ],
)
def test_the_peak_is_of_the_card_that_is_there(device, teraflops):
    assert peaks.peak_flops(device) == (teraflops and teraflops * 1e12)
