"""How a config is executed: every decision for speed, made once, on one page.

No field changes what is computed, only how. The step, the planner and the table of XLA's flags read
the same value, so none asks another. A decision that depends on the size of an array at hand is not
here, but where the array is: `loss.num_chunks`, and which kernel takes a norm or a SwiGLU.
"""

from dataclasses import dataclass
from typing import Literal

from jaxpar.config import Config
from jaxpar.config.remat_policies import names_on_host
from jaxpar.kernels.platform import Platform

#: Of one tensor rank's shard of the sequence, for which matmuls of shards are faster than one
#: gather and one matmul. Two H200s, 8 layers of 8B: shards of 4,096 tokens are 1% faster, of 2,048
#: 4% slower (docs/experiments/tensor_parallelism.md#collective-matmul).
FEWEST_TOKENS = 4096


@dataclass(frozen=True)
class Execution:
    """A resolved config, and how it is executed on a platform (`execution_of`)."""

    cfg: Config
    collective_matmul: bool
    """Matmuls take one tensor rank's shard of the sequence at a time, while another is on its way:
    without stages and turns. On GPUs of FEWEST_TOKENS or more; elsewhere, where nothing is gained
    or lost, of any number, so that small tests take the path of large runs."""
    norm: Literal["written", "deferred_scale", "in_quantizer"]
    """What matmuls are given of a norm.

    deferred_scale  its rows are scaled behind the matmul: in the compute dtype, on this device
                    alone, where all that reads the products is one pass. Not in float16, whose
                    range the unscaled products may leave.
    in_quantizer    it is never written: all that reads it are float8 matmuls on this device, with
                    one scale per tensor, which compute it as they round."""
    fused_gate_up: bool
    """One matmul serves gate and up: in the compute dtype, or in float8 with one scale per tensor,
    with the activation whose gradients are written side by side, and without what belongs to one of
    the two. Not for rows in turns, where XLA would put more of the weights' gradients off, 4% of
    memory (docs/experiments/one_gpu.md#gate-and-up-in-one-matmul)."""
    float32_weight_gradients: bool
    """Matmuls add the gradients of a layer's matrices to float32 sums over microbatches: where the
    matrices are whole on the device, multiplied as they are, and in a chunk whose sums have one
    place (`parallel/pipeline/runner.py`)."""
    gathers_per_layer: bool
    """A layer's weights come from other devices, and its gradients go there."""
    stage_wide_collectives: bool
    """All pipeline stages come to what a layer sends: permutes of keys and values, and gathers of
    weights. Over tensor only the devices of one stage do (`permutes.gather_within`)."""
    layers_per_vjp: int
    """How many layers are differentiated at a time: one, or as many as repeat where not all are
    alike. 0, a chunk at once: for weights gathered a layer ahead and values fetched a layer ahead,
    for rows in turns, whose groups meet nowhere within a chunk, and in a loop over stacked layers.
    """

    @property
    def weight_uses(self) -> int:
        """How many matmuls a layer's weight is in, forward: of groups of rows, or of shards."""
        p = self.cfg.parallel
        return p.tensor if self.collective_matmul else p.row_groups


def execution_of(cfg: Config, platform: Platform | None = None) -> Execution:
    """How `cfg`, resolved, is executed on a platform: this one, if none is given."""
    p, m = cfg.parallel, cfg.model
    platform = Platform.here() if platform is None else platform
    tokens = rows_per_device(cfg) * cfg.data.seq_len // (p.sequence * p.tensor)
    long_enough = platform.name != "gpu" or tokens >= FEWEST_TOKENS
    apart = p.tensor > 1 and p.pipeline == 1 and p.row_groups == 1

    compute, per_tensor = m.matmul_dtype == "compute", m.float8_scaling == "tensor"
    fused = (
        (compute or per_tensor)
        and m.activation == "silu"
        and not (m.mlp_bias or m.num_experts or cfg.lora.rank)
        and p.row_groups == 1
    )

    gathers = p.zero == 3 and p.data * p.expert * p.sequence > 1
    stage_wide = gathers or p.sequence > 1
    whole = p.zero == 1 and p.layer_loop == "unroll" and not cfg.lora.rank
    ahead = stage_wide or bool(names_on_host(p.remat))
    at_once = ahead or p.row_groups > 1 or p.layer_loop == "scan"
    return Execution(
        cfg=cfg,
        collective_matmul=apart and long_enough,
        norm=_norm(cfg, fused),
        fused_gate_up=fused,
        float32_weight_gradients=whole and compute and (p.virtual_stages == 1 or not stage_wide),
        gathers_per_layer=gathers,
        stage_wide_collectives=stage_wide,
        layers_per_vjp=0 if at_once else m.global_every or 1,
    )


def on_gpus(cfg: Config) -> Execution:
    """How it is executed on GPUs of any kind, wherever this is asked."""
    return execution_of(cfg, Platform("gpu"))


def _norm(cfg: Config, fused_gate_up: bool) -> Literal["written", "deferred_scale", "in_quantizer"]:
    m = cfg.model
    if cfg.parallel.tensor > 1 or cfg.lora.rank:
        return "written"
    if m.matmul_dtype == "float8":
        return "in_quantizer" if m.float8_scaling == "tensor" else "written"
    one_pass = fused_gate_up and not m.qkv_bias
    return "deferred_scale" if one_pass and m.dtype != "float16" else "written"


def rows_per_device(cfg: Config) -> int:
    """B: sequences of a microbatch on one device. cfg: resolved."""
    p = cfg.parallel
    return cfg.train.global_batch_size // (p.replica * p.data * p.expert * p.num_microbatches)
