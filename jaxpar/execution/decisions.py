"""How a config is executed: every performance decision on one page.

No field of `Execution` changes what is computed. The train step, the planner, the table of XLA
flags and the run's manifest all read the same `Execution`. Decisions that depend on the size of an
array are made next to that array: `model/loss.num_chunks`, and the choice of kernel for a SwiGLU.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxpar.components.component import NormForm
from jaxpar.components.experts import experts_in
from jaxpar.config import Config
from jaxpar.config.layout.placement import expert_ways, spreads_experts
from jaxpar.config.remat_policies import saved_names, saves_on_host, without_mark
from jaxpar.config.rules.guard import scales_loss
from jaxpar.kernels.platform import Platform

#: Minimum number of tokens in a tensor rank's sequence shard for collective matmuls, which are
#: slower than one gather and one matmul on shorter shards. 8 layers of 8B on two H200s: 1% faster
#: with 4,096 tokens, 4% slower with 2,048
#: (docs/experiments.md#collective-matmul).
MIN_SHARD_TOKENS = 4096


@dataclass(frozen=True)
class Execution:
    """How a resolved config is executed on a platform. Create one with `execution_of`."""

    cfg: Config
    collective_matmul: bool
    """Matmuls multiply one tensor rank's shard of the sequence while the next shard is in transit.

    Not used with pipeline stages or row groups. GPUs use it from MIN_SHARD_TOKENS on. Other
    platforms always use it, because it costs nothing there and small tests then run the same code
    as large runs."""
    norm: NormForm
    """The form in which matmuls receive a norm.

    written         The output of the norm.
    deferred_scale  The output without the scale of each row, which is applied after the matmul.
                    Used for matmuls in the compute dtype on unsplit sequences, where one pass reads
                    all products. Not used in float16, whose range unscaled products may exceed.
    in_quantizer    The input of the norm. The quantizer of float8 matmuls with one scale per tensor
                    computes the norm as it rounds, so the norm's output is never written."""
    fused_gate_up: bool
    """One matmul computes the gate and up projections.

    Used for SwiGLU without biases, experts or adapters, in the compute dtype or in float8 with one
    scale per tensor. Not used with row groups, where XLA would delay more weight gradients and need
    4% more memory (docs/experiments.md#gate-and-up-in-one-matmul)."""
    float32_weight_gradients: bool
    """Matmuls accumulate the gradients of a layer's matrices in float32 over microbatches.

    Used in the compute dtype if each device holds complete matrices (ZeRO-1) and each chunk's sums
    have a fixed location (`parallel/pipeline/chunks.py`)."""
    gathers_per_layer: bool
    """Each layer gathers its weights, forward and backward (ZeRO-3)."""
    scatters_per_layer: bool
    """Each layer's backward scatters the gradients of its weights (ZeRO-2 and ZeRO-3)."""
    stage_wide_collectives: bool
    """Layers contain collectives that the devices of all pipeline stages must enter: permutes of
    keys and values, gathers of weights, scatters of gradients. Collectives over tensor stay
    within a stage."""
    layers_per_vjp: int
    """Number of layers differentiated at a time.

    One layer, or one period of a model whose layer kinds repeat. 0 means a complete chunk at once:
    if weights are gathered or activations fetched one layer ahead, with row groups, and for a loop
    over stacked layers."""

    scales_loss: bool
    """The loss is multiplied by a power of two before the backward, and gradients are divided by it
    (`optimizer/loss_scale.py`). Used in float16; `certify` does so too, with every dtype."""
    saved_names: tuple[str, ...] = ()
    """Remat names of what a layer's policy saves, on the device or in host memory. Layers may have
    different ones (`parallel.remat_layers`): `saving`."""

    def saving(self, names: Sequence[str]) -> "Execution":
        """Return the execution of a layer whose policy saves these names of `saved_names`."""
        return dataclasses.replace(self, saved_names=tuple(map(without_mark, names)))

    @property
    def weight_uses(self) -> int:
        """Matmuls per weight in a layer's forward: one per row group or sequence shard."""
        p = self.cfg.parallel
        return p.tensor if self.collective_matmul else p.row_groups

    @property
    def gathers_experts(self) -> bool:
        """Whether layers gather the matrices of experts, along D (ZeRO-3)."""
        p = self.cfg.parallel
        return self.gathers_per_layer and p.data * p.sequence != 1

    @property
    def expert_dispatch(self) -> Literal["tokens", "rows"]:
        """What the n devices that share experts send: by default, whichever is fewer bytes.

        tokens  Each token to all others: n - 1 copies of it. A permute each, by copy engines.
        rows    A row for each of its k experts, of which (n - 1) / n have another device, and the
                slack of the all-to-all's static shapes: slack k (n - 1) / n copies."""
        p, of_layers = self.cfg.parallel, experts_in(self.cfg.model)
        if p.expert_dispatch != "auto":
            return p.expert_dispatch
        fewest = min((of.experts_per_token for of in of_layers), default=1)
        copies = max(p.expert_slack, 1.0) * fewest
        return "tokens" if expert_ways(p) <= copies else "rows"

    @property
    def postpones_weight_gradients(self) -> bool:
        """Whether some backwards of a pipeline leave weight gradients for idle slots."""
        p = self.cfg.parallel
        return p.pipeline > 1 and p.schedule == "zero_bubble"

    @property
    def row_groups_overlap(self) -> bool:
        """Whether one row group's communication over tensor overlaps another's computation."""
        return self.cfg.parallel.tensor > 1 and self.cfg.parallel.row_groups > 1

    @property
    def activations_on_host(self) -> bool:
        """Whether some activations are in host memory between a layer's forward and backward."""
        return saves_on_host(self.cfg.parallel)

    def in_words(self) -> Iterator[str]:
        """Yield one readable phrase for each decision that this config leaves open."""
        p = self.cfg.parallel
        if p.tensor > 1:
            overlap = "row groups" if self.row_groups_overlap else "none"
            yield f"tensor overlap: {'collective matmuls' if self.collective_matmul else overlap}"
        yield "norms: " + _NORM_IN_WORDS[self.norm]
        yield f"gate and up: {'one matmul' if self.fused_gate_up else 'two matmuls'}"
        if self.gathers_per_layer:
            yield "weights: gathered per layer, one layer ahead"
        elif self.scatters_per_layer:
            yield "gradients: scattered per layer"
        if expert_ways(p) > 1 and experts_in(self.cfg.model):
            over = " over expert and tensor" if spreads_experts(p) else ""
            yield f"experts: dispatch by {self.expert_dispatch}{over}"
        if p.num_microbatches > 1 or p.pipeline > 1:
            how = "in the matmuls" if self.float32_weight_gradients else "in a separate pass"
            yield f"float32 gradient sums: {how}"
        if p.pipeline > 1:
            idle = "masked" if self.stage_wide_collectives else "skipped"
            if self.postpones_weight_gradients:
                idle = "some compute weight gradients"
            yield f"idle pipeline slots: {idle}"
        if self.activations_on_host:
            yield "activations: some in host memory"
        layers = self.layers_per_vjp
        yield f"backward: {f'{layers} layer(s) at a time' if layers else 'a chunk at a time'}"


_NORM_IN_WORDS: dict[NormForm, str] = {
    "written": "written before the matmul",
    "deferred_scale": "scaled after the matmul",
    "in_quantizer": "computed by the float8 quantizer",
}


def execution_of(cfg: Config, platform: Platform | None = None) -> Execution:
    """Return how `cfg` is executed.

    Args:     cfg: a resolved config. With `parallel.data` of -1, the decisions hold only for some
              numbers of devices. platform: defaults to this process's platform, which starts JAX's
              backend.
    """
    p = cfg.parallel
    platform = Platform.here() if platform is None else platform
    sharded = p.data * p.expert * p.sequence != 1
    gathers, scatters = sharded and p.zero == 3, sharded and p.zero != 1
    stage_wide = scatters or p.sequence > 1
    fused = _fuses_gate_up(cfg)
    return Execution(
        cfg=cfg,
        collective_matmul=_splits_matmuls(cfg, platform),
        norm=_norm(cfg, fused),
        fused_gate_up=fused,
        float32_weight_gradients=_matmuls_sum_gradients(cfg, stage_wide),
        gathers_per_layer=gathers,
        scatters_per_layer=scatters,
        stage_wide_collectives=stage_wide,
        layers_per_vjp=_layers_per_vjp(cfg, stage_wide),
        scales_loss=scales_loss(cfg),
    ).saving(saved_names(p.remat))


def on_gpus(cfg: Config) -> Execution:
    """Return how `cfg` is executed on GPUs, without starting a backend."""
    return execution_of(cfg, Platform("gpu"))


def _splits_matmuls(cfg: Config, platform: Platform) -> bool:
    p = cfg.parallel
    tokens = rows_per_device(cfg) * cfg.data.seq_len // (p.sequence * p.tensor)
    long_enough = platform.name != "gpu" or tokens >= MIN_SHARD_TOKENS
    return p.tensor > 1 and p.pipeline == 1 and p.row_groups == 1 and long_enough


def _fuses_gate_up(cfg: Config) -> bool:
    c = cfg.compute
    dtype_allows = c.matmul_dtype == "compute" or c.float8_scaling == "tensor"
    feed_forwards = {layer.feed_forward for layer in cfg.model.layers} - {None}
    allowed = all(one.fuses_gate_up for one in feed_forwards if one) and bool(feed_forwards)
    return dtype_allows and allowed and not cfg.lora and cfg.parallel.row_groups == 1


def _norm(cfg: Config, fused_gate_up: bool) -> NormForm:
    c, model = cfg.compute, cfg.model
    after = any(layer.norms == "after" for layer in model.layers)
    if cfg.parallel.tensor > 1 or cfg.lora or after or model.norm.kind == "layer":
        return "written"
    forms = model.norm_forms
    if c.matmul_dtype == "float8":
        allowed = c.float8_scaling == "tensor" and "in_quantizer" in forms
        return "in_quantizer" if allowed else "written"
    one_pass = fused_gate_up and "deferred_scale" in forms
    return "deferred_scale" if one_pass and c.dtype != "float16" else "written"


def _matmuls_sum_gradients(cfg: Config, stage_wide: bool) -> bool:
    p = cfg.parallel
    complete = p.zero == 1 and p.layer_loop == "unroll" and not cfg.lora
    one_place = p.virtual_stages == 1 or not stage_wide
    return complete and cfg.compute.matmul_dtype == "compute" and one_place


def _layers_per_vjp(cfg: Config, stage_wide: bool) -> int:
    p = cfg.parallel
    ahead = stage_wide or saves_on_host(p)
    if ahead or p.row_groups > 1 or p.layer_loop == "scan":
        return 0
    return cfg.model.repetition.period


def rows_per_device(cfg: Config) -> int:
    """Return B, the number of sequences of a microbatch on one device, for a resolved config."""
    p = cfg.parallel
    return cfg.train.global_batch_size // (p.replica * p.data * p.expert * p.num_microbatches)
