"""How a config is executed: every decision made for speed, on one page.

No field of `Execution` changes what is computed. The train step, the planner, the table of XLA
flags and the run's manifest read the same value. Decisions that depend on the size of an array live
where the array is: `model/loss.num_chunks`, and which kernel computes a norm or a SwiGLU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxpar.config import Config, ModelConfig, replace
from jaxpar.config.remat_policies import names_on_host
from jaxpar.kernels.platform import Platform

#: Tokens in one tensor rank's shard of the sequence from which collective matmuls are faster than
#: one gather and one matmul. 8 layers of 8B on two H200s: 1% faster with shards of 4,096 tokens, 4%
#: slower with 2,048 (docs/experiments/tensor_parallelism.md#collective-matmul).
MIN_SHARD_TOKENS = 4096

type Norm = Literal["written", "deferred_scale", "in_quantizer"]


@dataclass(frozen=True)
class Execution:
    """How a resolved config is executed on a platform; `execution_of` makes it."""

    cfg: Config
    collective_matmul: bool
    """Matmuls take one tensor rank's shard of the sequence at a time while the next one travels.

    Without pipeline stages and row groups. On GPUs, from MIN_SHARD_TOKENS; elsewhere, where it
    costs nothing, always, so that small tests take the path of large runs."""
    norm: Norm
    """What matmuls receive of a norm.

    written         its output.
    deferred_scale  its output before the scale of each row, which is applied after the matmul: for
                    matmuls in the compute dtype, on unsplit sequences, where one pass reads all
                    products. Not in float16, whose range unscaled products may exceed.
    in_quantizer    its input. The quantizer of float8 matmuls with one scale per tensor computes
                    the norm as it rounds, so the norm's output is never written."""
    fused_gate_up: bool
    """One matmul computes gate and up projections.

    For SwiGLU without biases, experts or adapters, in the compute dtype or in float8 with one scale
    per tensor. Not with row groups, where XLA would delay more weight gradients and hold 4% more
    memory (docs/experiments/one_gpu.md#gate-and-up-in-one-matmul)."""
    float32_weight_gradients: bool
    """Matmuls add the gradients of a layer's matrices to float32 sums over microbatches.

    Where the matrices are complete on the device (ZeRO-1), in the compute dtype, and each chunk's
    sums have one place (`parallel/pipeline/chunks.py`)."""
    gathers_per_layer: bool
    """Each layer gathers its weights and scatters their gradients (ZeRO-3)."""
    stage_wide_collectives: bool
    """Layers contain collectives that devices of all pipeline stages must enter: permutes of keys
    and values, and gathers of weights. Collectives over tensor stay within a stage."""
    layers_per_vjp: int
    """Layers differentiated at a time: one, or one period of a model whose kinds of layers repeat.

    0: a whole chunk at once. For weights gathered and activations fetched one layer ahead, for row
    groups, and for a loop over stacked layers."""

    @property
    def weight_uses(self) -> int:
        """Matmuls per weight in a layer's forward: one for each row group or sequence shard."""
        p = self.cfg.parallel
        return p.tensor if self.collective_matmul else p.row_groups

    @property
    def row_groups_overlap(self) -> bool:
        """The communication of one row group over tensor overlaps another's computation."""
        return self.cfg.parallel.tensor > 1 and self.cfg.parallel.row_groups > 1

    @property
    def activations_on_host(self) -> bool:
        """Some activations wait in host memory between a layer's forward and backward."""
        return bool(names_on_host(self.cfg.parallel.remat))

    def in_words(self) -> Iterator[str]:
        """One phrase for each decision that this config leaves open, for people."""
        p = self.cfg.parallel
        if p.tensor > 1:
            overlap = "row groups" if self.row_groups_overlap else "none"
            yield f"tensor overlap: {'collective matmuls' if self.collective_matmul else overlap}"
        yield "norms: " + _NORM_IN_WORDS[self.norm]
        yield f"gate and up: {'one matmul' if self.fused_gate_up else 'two matmuls'}"
        if self.gathers_per_layer:
            yield "weights: gathered per layer, one layer ahead"
        if p.num_microbatches > 1 or p.pipeline > 1:
            how = "by the matmuls" if self.float32_weight_gradients else "after them"
            yield f"float32 gradient sums: {how}"
        if p.pipeline > 1:
            idle = "masked" if self.stage_wide_collectives else "skipped"
            yield f"idle pipeline slots: {idle}"
        if self.activations_on_host:
            yield "activations: some in host memory"
        layers = self.layers_per_vjp
        yield f"backward: {f'{layers} layer(s) at a time' if layers else 'a chunk at a time'}"


_NORM_IN_WORDS: dict[Norm, str] = {
    "written": "written before the matmul",
    "deferred_scale": "scaled after the matmul",
    "in_quantizer": "computed by the float8 quantizer",
}


def execution_of(cfg: Config, platform: Platform | None = None) -> Execution:
    """How `cfg` is executed.

    Args:     cfg: resolved; decisions for `parallel.data` of -1 hold for some number of devices.
              platform: this process's, by default, which starts JAX's backend.
    """
    p = cfg.parallel
    platform = Platform.here() if platform is None else platform
    gathers = p.zero == 3 and p.data * p.expert * p.sequence != 1
    stage_wide = gathers or p.sequence > 1
    fused = _fuses_gate_up(cfg)
    return Execution(
        cfg=cfg,
        collective_matmul=_splits_matmuls(cfg, platform),
        norm=_norm(cfg, fused),
        fused_gate_up=fused,
        float32_weight_gradients=_matmuls_sum_gradients(cfg, stage_wide),
        gathers_per_layer=gathers,
        stage_wide_collectives=stage_wide,
        layers_per_vjp=_layers_per_vjp(cfg, stage_wide),
    )


def explain(cfg: Config) -> str:
    """How `cfg` is executed on GPUs, in one line for people."""
    known = cfg.parallel.data > 0
    ex = on_gpus(cfg if known else replace(cfg, **{"parallel.data": 2}))
    when = "" if known else " (with parallel.data 2)"
    return f"execution on GPUs{when}: {'; '.join(ex.in_words())}"


def on_gpus(cfg: Config) -> Execution:
    """How `cfg` is executed on GPUs; starts no backend."""
    return execution_of(cfg, Platform("gpu"))


def _splits_matmuls(cfg: Config, platform: Platform) -> bool:
    p = cfg.parallel
    tokens = rows_per_device(cfg) * cfg.data.seq_len // (p.sequence * p.tensor)
    long_enough = platform.name != "gpu" or tokens >= MIN_SHARD_TOKENS
    return p.tensor > 1 and p.pipeline == 1 and p.row_groups == 1 and long_enough


def _fuses_gate_up(cfg: Config) -> bool:
    m = cfg.model
    dtype_allows = m.matmul_dtype == "compute" or m.float8_scaling == "tensor"
    apart = m.mlp_bias or m.num_experts or cfg.lora.rank or cfg.parallel.row_groups > 1
    return dtype_allows and m.activation == "silu" and not apart


def _norm(cfg: Config, fused_gate_up: bool) -> Norm:
    m: ModelConfig = cfg.model
    if cfg.parallel.tensor > 1 or cfg.lora.rank:
        return "written"
    if m.matmul_dtype == "float8":
        return "in_quantizer" if m.float8_scaling == "tensor" else "written"
    one_pass = fused_gate_up and not m.qkv_bias
    return "deferred_scale" if one_pass and m.dtype != "float16" else "written"


def _matmuls_sum_gradients(cfg: Config, stage_wide: bool) -> bool:
    p = cfg.parallel
    complete = p.zero == 1 and p.layer_loop == "unroll" and not cfg.lora.rank
    one_place = p.virtual_stages == 1 or not stage_wide
    return complete and cfg.model.matmul_dtype == "compute" and one_place


def _layers_per_vjp(cfg: Config, stage_wide: bool) -> int:
    p = cfg.parallel
    ahead = stage_wide or bool(names_on_host(p.remat))
    if ahead or p.row_groups > 1 or p.layer_loop == "scan":
        return 0
    return cfg.model.global_every or 1


def rows_per_device(cfg: Config) -> int:
    """B: sequences of a microbatch on one device. cfg: resolved."""
    p = cfg.parallel
    return cfg.train.global_batch_size // (p.replica * p.data * p.expert * p.num_microbatches)
