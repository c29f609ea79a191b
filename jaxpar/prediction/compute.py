"""Predicts the compute time of a step: matmuls, attention, elementwise kernels, optimizer."""

from dataclasses import dataclass

from jaxpar.components.component import Mixer, Term
from jaxpar.components.costs import Heads
from jaxpar.components.experts import Experts
from jaxpar.components.model import Layer
from jaxpar.config import Config, replace
from jaxpar.config.features import reads_scores
from jaxpar.config.layout.moment_blocks import uses_blocks
from jaxpar.config.layout.placement import spreads_experts
from jaxpar.config.remat_policies import saved_names, without_mark
from jaxpar.config.schema.features import objective_in
from jaxpar.config.schema.items import Remat
from jaxpar.model.largest_scores import by_kernel
from jaxpar.model.loss import num_chunks
from jaxpar.prediction import experts, matrices, rates
from jaxpar.prediction.hardware import Gpu
from jaxpar.prediction.kernels import by_kernels
from jaxpar.prediction.layer_kinds import (
    LayerKind,
    before_stages,
    hidden,
    layer_kinds,
    widths,
)
from jaxpar.prediction.memory import factors_per_token, slot_bytes
from jaxpar.prediction.shard import Shard, moment_bytes, state_bytes


@dataclass(frozen=True)
class Seconds:
    """Seconds by class of kernel."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.elementwise

    def __add__(self, other: "Seconds") -> "Seconds":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Seconds(*(a + b for a, b in pairs))

    def times(self, n: float) -> "Seconds":
        """Return the seconds multiplied by n."""
        return Seconds(*(n * value for value in vars(self).values()))


def layer_seconds(cfg: Config, shard: Shard, gpu: Gpu) -> Seconds:
    """Return the time of one layer for one microbatch: forward, backward and recomputation.

    If layers differ, their mean.
    """
    seconds = Seconds()
    for kind in layer_kinds(cfg):
        one = _layer_seconds(cfg, kind, shard, gpu, repeats(cfg, kind.layer, kind.remat))
        if cfg.parallel.remat_group > 1:  # a group runs forward once more
            one += _layer_seconds(cfg, kind, shard, gpu, repeats(cfg, kind.layer, "full"))
            one += _layer_seconds(cfg, kind, shard, gpu, set()).times(-1)
        seconds += one.times(kind.share)
    return seconds


def stage_seconds(cfg: Config, shard: Shard, gpu: Gpu) -> Seconds:
    """Return the time of the slowest stage's layers for one microbatch, with dense layers before
    the stages."""
    before = shard.dense_in_turn
    stage = layer_seconds(cfg, shard, gpu).times(shard.layers_in_turn - before)
    if not before:
        return stage
    kind = before_stages(cfg)
    dense = _layer_seconds(cfg, kind, shard, gpu, repeats(cfg, kind.layer, kind.remat))
    return stage + dense.times(before)


def _layer_seconds(
    cfg: Config, kind: LayerKind, shard: Shard, gpu: Gpu, repeated: set[str]
) -> Seconds:
    return Seconds(
        matmul=_layer_matmuls(cfg, kind, shard, gpu, repeated),
        attention=_layer_mixing(cfg, kind.layer.mixer, shard, gpu, repeated),
        elementwise=_layer_elementwise(cfg, kind, shard, gpu, repeated),
    )


def repeats(cfg: Config, layer: Layer, remat: Remat) -> set[str]:
    """Return what the backward recomputes, of MATMULS, "attention" and "elementwise".

    A value is recomputed unless it, or everything computed from it, is saved on the device or the
    host.
    """
    saved = set(map(without_mark, saved_names(remat)))
    needs = {
        "latents": "latents" in saved or not widths(layer, cfg, 1).latents,
        "qkv": "qkv" in saved,
        "attention": {"attn_out", "attn_lse"} <= saved,
        "wo": "attn_residual" in saved,
        "gate_up": "gate_up" in saved,
        "elementwise": {"attn_norm", "mlp_norm", "mlp_hidden"} <= saved,
    }
    return {what for what, there in needs.items() if not there}


def _layer_matmuls(
    cfg: Config, kind: LayerKind, shard: Shard, gpu: Gpu, repeated: set[str]
) -> float:
    passes = {name: 2 + shard.trainable + (name in repeated) for name in MATMULS}
    seconds = sum(
        _matmul_seconds(cfg, one, shard, gpu, passes)
        for one in (kind.layer.mixer, kind.layer.feed_forward)
    )
    if kind.experts:
        grouped = experts.product_seconds(cfg, kind.experts, shard, gpu, repeated)
        seconds += sum(grouped.values())
    return seconds


#: The matmuls of a layer (`Term.matmuls`).
MATMULS = ("latents", "qkv", "wo", "gate_up", "down")


def _matmul_seconds(
    cfg: Config, component: Term | None, shard: Shard, gpu: Gpu, passes: dict[str, int]
) -> float:
    """Return the time of a component's dense matmuls, each as often as `passes` says."""
    if component is None:
        return 0.0
    t, n = cfg.parallel.tensor, shard.tokens
    parts = t if shard.execution.collective_matmul else cfg.parallel.row_groups
    sites = component.matmuls(cfg.model, t)
    rate = matmul_rate(cfg, gpu, float8=cfg.compute.matmul_dtype == "float8")
    seconds = 0.0
    for name, site in ((name, site) for name, of in sites.items() for site in of):
        tokens = n * site.share
        if flops := 2 * passes[name] * site.times * tokens * site.inner * site.out:
            share = rates.matmul_share(tokens / parts, site.inner, site.out)
            seconds += flops / rate / share
    return seconds


def bubble_seconds(cfg: Config, shard: Shard, gpu: Gpu) -> float:
    """Return the time in which a stage is idle: (P - 1) microbatches in one of its chunks.

    A zero-bubble schedule computes 2 (P - 1) chunks' weight gradients in it, and writes their
    factors to a buffer.
    """
    p = cfg.parallel
    bubble = layer_seconds(cfg, shard, gpu).times(shard.layers).total / p.virtual_stages
    if shard.execution.postpones_weight_gradients:
        once = dict.fromkeys(MATMULS, 1)
        weights = 0.0
        for kind in layer_kinds(cfg):
            feed_forward = None if kind.experts else kind.layer.feed_forward
            for component in (kind.layer.mixer, feed_forward):
                of_kind = _matmul_seconds(cfg, component, shard, gpu, once)
                weights += kind.share * of_kind * shard.layers
        written = 2 * factors_per_token(cfg, shard) * shard.tokens * shard.layers
        bubble += 2 * (written / elementwise_rate(gpu) - weights) / p.virtual_stages
    return (p.pipeline - 1) * bubble


def matmul_rate(cfg: Config, gpu: Gpu, *, float8: bool) -> float:
    """Return the FLOP/s of wide matmuls in float8 or in the compute dtype."""
    if float8 and gpu.float8 is not None:
        return gpu.float8.value
    # float32 matmuls use TF32 at half the rate: an estimate.
    return gpu.matmul.value * (0.5 if cfg.compute.dtype == "float32" else 1.0)


def _layer_mixing(
    cfg: Config, mixer: Mixer | None, shard: Shard, gpu: Gpu, repeated: set[str]
) -> float:
    """Return the time of what mixes tokens: attention, or a recurrence."""
    if mixer is None:
        return 0.0
    seconds = _recurrence(cfg, mixer, shard, gpu, repeated)
    if not mixer.pair_flops():
        return seconds
    p, heads = cfg.parallel, mixer.attention_heads
    if heads is None or heads.is_own or heads.key_dim > max(rates.ATTENTION):
        passes = 3 + ("attention" in repeated)
        flops, moved = reference_work(cfg, mixer, shard.rows, passes)
        seconds += flops / matmul_rate(cfg, gpu, float8=False) + moved / elementwise_rate(gpu)
        return seconds
    pairs = mixer.num_pairs(cfg.data.seq_len) / p.sequence
    flops = shard.rows * pairs * mixer.pair_flops() / p.tensor
    forward, backward = rates.attention_rate(heads.key_dim, cfg.data.seq_len)
    runs = 2 if "attention" in repeated else 1
    kernels = (runs * flops / forward + 2.5 * flops / backward) / gpu.attention.value
    if reads_scores(cfg):
        again = flops / 2 / forward / gpu.attention.value
        kernel = by_kernel(cfg.compute.dtype, heads.key_dim)
        kernels += again if kernel else _written_scores(cfg, heads, shard, gpu)
    return seconds + kernels


def reference_work(cfg: Config, mixer: Mixer, rows: int, passes: int) -> tuple[float, float]:
    """Return FLOPs and bytes of attention on a device, without kernels or with heads that are too
    wide for them.

    Products of all pairs, later keys too, and float32 scores, written and read. An estimate.

    Args:     passes: forward ones; the backward counts as two.
    """
    p, heads = cfg.parallel, mixer.attention_heads
    pairs = passes * rows * cfg.data.seq_len**2 / p.sequence / p.tensor
    return pairs * mixer.pair_flops(), 16 * pairs * (heads.queries if heads else 1)


def _written_scores(cfg: Config, heads: Heads, shard: Shard, gpu: Gpu) -> float:
    """Return the time of scores that are computed again without a kernel: all pairs, written and
    read once. An estimate."""
    p, length = cfg.parallel, cfg.data.seq_len
    scores = shard.rows * heads.queries / p.tensor * length**2 / p.sequence
    flops = 2 * heads.key_dim * scores
    return flops / matmul_rate(cfg, gpu, float8=False) + 8 * scores / elementwise_rate(gpu)


def _recurrence(cfg: Config, mixer: Mixer, shard: Shard, gpu: Gpu, repeated: set[str]) -> float:
    """Return the time of a recurrence: its products, whose rate without kernels is that of TF32,
    and its passes over memory.

    The backward takes twice the forward, and needs all but the last product again. An estimate.
    """
    t, kernels = cfg.parallel.tensor, by_kernels(cfg.compute)
    passes = 3 + ("attention" in repeated)
    flops = passes * shard.tokens * mixer.token_flops(t)
    moved = 2 * passes * shard.tokens * mixer.backward_bytes(t, by_kernels=kernels)
    rate = (1.0 if kernels else 0.5) * gpu.matmul.value
    return flops / rate + moved / elementwise_rate(gpu)


def _layer_elementwise(
    cfg: Config, kind: LayerKind, shard: Shard, gpu: Gpu, repeated: set[str]
) -> float:
    """Return the time of the fused kernels between matmuls: bytes moved over bandwidth.

    Forward: norms (2 D each, and of latents), two residual sums (3 D), RoPE (queries and keys),
    SwiGLU (3 F); again where they are recomputed, except what is fused with the backward.
    Backward: norms with the sums of gradients (6 D each), RoPE, SwiGLU (5 F), out times its
    gradient (2 H K), the query gradient's float32 zeros, sums and cast (5 H K in units of 2
    bytes), and the concatenated gradients of the three projections. In float8 with one scale per
    tensor, norms write no result. Deferred-scale norms read no input. Attention sinks read and
    write out (2 H K), again where attention is recomputed. `_between_ranks` adds
    the traffic of communication over tensor, `experts.moved_elements` that of experts.
    """
    m, t, width, layer = cfg.model, cfg.parallel.tensor, shard.width, kind.layer
    w, (into, f) = widths(layer, cfg, t), hidden(layer, cfg, t)
    both = w.query + w.key
    stream = m.d_model * (1 + 1 / t) / 2  # norms and sums are sharded over tensor, gathers are not
    forward = 10 * stream + 2 * both + into + f
    backward = 12 * stream + 2 * both + 2 * w.out + 5 * w.query + 2 * (both + w.value) + 2 * into
    backward += f
    again = 4 * stream + 2 * both + f if "elementwise" in repeated else 0.0
    again += 3 * stream if "wo" in repeated else 0.0
    forward, backward = forward + 2 * w.latents, backward + 6 * w.latents
    again += 2 * w.latents if "elementwise" in repeated else 0.0
    if layer.mixer:
        forward += layer.mixer.output_passes * w.out
        again += layer.mixer.output_passes * w.out if "attention" in repeated else 0.0
    extra = _quantized(cfg, layer) if cfg.compute.matmul_dtype == "float8" else 0.0
    if shard.execution.norm != "written":
        forward -= 2 * stream
    elements = forward + backward + again + _between_ranks(cfg, layer, shard, repeated)
    moved = shard.tokens * (width * elements + extra)
    if kind.experts:
        moved += width * experts.moved_elements(cfg, kind.experts, shard, repeated)
    return moved / elementwise_rate(gpu)


def _between_ranks(cfg: Config, layer: Layer, shard: Shard, repeated: set[str]) -> float:
    """Elements per token that a layer moves for communication over tensor.

    Gathered shards are copied into place, twice with row groups or all-to-alls, and scattered ones
    are summed. A collective matmul only sums, concatenates queries, keys and values, and splits
    attention's output, both again in the backward.
    """
    m, p, messages = cfg.model, cfg.parallel, tensor_messages(cfg, layer, repeated)
    if p.tensor == 1:
        return 0.0
    if not shard.execution.collective_matmul:
        return (1.5 if p.row_groups == p.pipeline == 1 else 3) * messages * m.d_model
    w = widths(layer, cfg, p.tensor)
    added = messages / 2 * (p.tensor + 1) / p.tensor * m.d_model
    return added + 4 * (w.query + w.key + w.value) + 4 * w.out


def tensor_messages(cfg: Config, layer: Layer, repeated: set[str]) -> float:
    """Return the gathers and scatters over tensor in a layer (docs/parallelism.md).

    In units of the residual stream. Latent attention gathers latents in its place. Experts that are
    spread over tensor need none, unless others are shared.
    """
    model, again = cfg.model, "elementwise" in repeated
    received = layer.mixer.received(model) if layer.mixer else model.d_model
    latents = (2 + again) * (received / model.d_model - 1)
    alone = isinstance(layer.feed_forward, Experts) and not hidden(layer, cfg, 1)[1]
    branches = 1 if alone and spreads_experts(cfg.parallel) else 2
    return branches * (4 + again) + latents + ("wo" in repeated)


def _quantized(cfg: Config, layer: Layer) -> float:
    """Bytes per token that quantization moves: each operand is read once and written twice."""
    t, D = cfg.parallel.tensor, cfg.model.d_model
    w, (_, wide) = widths(layer, cfg, t), hidden(layer, cfg, t)  # experts' kernels round their own
    branches = 2 if wide else 1
    inputs = branches * D + w.out + wide + w.latents
    gradients = w.query + w.kept + branches * D + 2 * wide + w.latents
    return 4 * (inputs + gradients)


def elementwise_rate(gpu: Gpu) -> float:
    """Return the bytes/s of fused elementwise kernels."""
    return gpu.bandwidth.value * rates.ELEMENTWISE


def head_seconds(cfg: Config, shard: Shard, gpu: Gpu) -> Seconds:
    """Return the time of the head and the loss of one microbatch, forward and backward."""
    n, D = shard.tokens, cfg.model.d_model
    chunk = n / num_chunks(n, shard.vocab, cfg.parallel.loss_chunks)
    share = rates.matmul_share(chunk, D, shard.vocab)
    rate = matmul_rate(cfg, gpu, float8=False) * share
    logit = 4 if cfg.compute.logits_dtype == "float32" else shard.width
    reads = 2 if cfg.compute.dtype == "float16" else 1  # and the exponentials written
    reads += 3 if cfg.model.logits_softcap is not None else 0  # and the capped logits written
    moved = (reads * logit + shard.width) * n * shard.vocab
    flops = (4 + 2 * shard.trainable) * n * D * shard.vocab
    of = objective_in(cfg)
    if of is not None and of.recomputed:  # the backward computes the logits again
        flops, moved = flops + 2 * n * D * shard.vocab, moved + 2 * logit * n * shard.vocab
    once = Seconds(matmul=flops / rate, elementwise=moved / elementwise_rate(gpu))
    return once.times(1 + cfg.model.mtp_depth)


def weights_seconds(cfg: Config, shard: Shard, gpu: Gpu) -> Seconds:
    """Return the elementwise time on weights and gradients in a step.

    It covers casts of the shards (6 bytes, forward and backward; for 8 bits, 5 once per step and 4
    for the scales), preparing gradients to send and summing them on arrival, and sums over
    microbatches and over shards of the sequence. ZeRO-1 casts and sends once per step, ZeRO-2 casts
    once.
    """
    zero, micro = cfg.parallel.zero, cfg.parallel.num_microbatches
    own = shard.owned
    travels = 8 * (shard.parameters - shard.stack.matrices + shard.gathered(shard.stack))
    travels *= shard.fsdp > 1 and shard.trainable
    rounded_once = cfg.parallel.gather_dtype == "float8" and cfg.parallel.num_microbatches == 1
    casts = (9 if rounded_once else 12) * own
    moved = casts * (micro if zero == 3 else 1) + travels * (1 if zero == 1 else micro)
    moved += _added_up(cfg, shard) * backward_actions(cfg, shard) / shard.chunks
    moved += _sums_of_shards(cfg, shard) * micro
    return Seconds(elementwise=moved / elementwise_rate(gpu))


def _sums_of_shards(cfg: Config, shard: Shard) -> float:
    """Bytes that a microbatch moves to add up the gradients of one weight's matmuls."""
    if not (shard.trainable and shard.execution.collective_matmul):
        return 0.0
    return 3 * shard.width * (cfg.parallel.tensor - 1) * shard.stack.matrices


def _added_up(cfg: Config, shard: Shard) -> float:
    """Bytes that a microbatch moves for the sums of gradients.

    10 a weight, but nothing where the matmuls add, which those of experts never do. A stage of
    several chunks that send copies the one that a unit multiplies with, forward and backward.
    """
    p, stack = cfg.parallel, shard.stack
    copied = shard.chunks > 1 and shard.execution.stage_wide_collectives
    moved = 4 * shard.width * stack.matrices if copied else 0.0
    if shard.trainable and (p.num_microbatches > 1 or p.pipeline > 1):
        summed = shard.parameters if p.zero == 1 else shard.owned
        if shard.execution.float32_weight_gradients:  # ZeRO-1
            summed -= stack.everything - stack.experts
        moved += 10 * summed
    return moved


def backward_actions(cfg: Config, shard: Shard) -> int:
    """Return the backward actions of a device in a step.

    They include idle ticks if stages communicate in them.
    """
    p = cfg.parallel
    return p.num_microbatches * p.virtual_stages + (
        p.pipeline - 1 if shard.execution.stage_wide_collectives else 0
    )


def stash_seconds(cfg: Config, shard: Shard, gpu: Gpu) -> Seconds:
    """Return the time of copying residuals into the activation stash and out of it."""
    if cfg.parallel.pipeline == 1:
        return Seconds()
    return Seconds(
        elementwise=4
        * slot_bytes(cfg, shard)
        * backward_actions(cfg, shard)
        / elementwise_rate(gpu)
    )


def optimizer_seconds(cfg: Config, shard: Shard, gpu: Gpu) -> float:
    """Return the time of gradient norm, clipping and update, at the bandwidth of a copy.

    They move 20 bytes per parameter for gradients and weights, and read and write the moments.
    With moments in 8 bits, another pass over gradients and moments finds the scales. What is in
    host memory crosses the link to it in the same loop, one direction after the other: moments and
    masters both ways, and masters once more at the start of the step. A rule that needs matrices
    also iterates on them. Inner steps of DiLoCo leave its outer weights and momentum alone.
    """
    weights, moments = state_bytes(replace(cfg, diloco=None))
    moved = 5 * weights * shard.trainable + 2 * moments
    if uses_blocks(cfg.optimizer):
        moved += weights * shard.trainable + moments
    crossing = 2 * moment_bytes(cfg) if cfg.optimizer.offload else 0
    crossing += 3 * weights if cfg.optimizer.offload_masters else 0
    copied = crossing / gpu.host_link.value
    return copied + moved / gpu.bandwidth.value + matrices.iteration_seconds(cfg, gpu)
