"""How a config is executed: the decisions for speed, on one page."""

from jaxpar.config import Config
from jaxpar.config.remat_policies import names_on_host
from jaxpar.kernels.platform import Platform

#: Of a piece, for which matmuls of pieces are faster than one gather and one matmul. Two H200s, 8
#: layers of 8B: pieces of 4,096 tokens are 1% faster, of 2,048 4% slower (docs/LOG.md).
FEWEST_TOKENS = 4096


def in_pieces(cfg: Config, on_gpu: bool | None = None) -> bool:
    """Whether matmuls take one tensor rank's shard of the sequence at a time: without stages and
    turns. On GPUs of FEWEST_TOKENS or more; elsewhere, where nothing is gained or lost, of any
    number, so that small tests take the path of large runs.

    Args:     cfg: resolved. on_gpu: if not given, whether the step is traced for one.
    """
    p = cfg.parallel
    if p.tensor == 1 or p.pipeline > 1 or p.row_groups > 1:
        return False
    on_gpu = Platform.here().name == "gpu" if on_gpu is None else on_gpu
    tokens = rows_on_device(cfg) * cfg.data.seq_len // (p.sequence * p.tensor)
    return not on_gpu or tokens >= FEWEST_TOKENS


def rows_on_device(cfg: Config) -> int:
    """B: sequences of a microbatch on one device. cfg: resolved."""
    p = cfg.parallel
    return cfg.train.global_batch_size // (p.replica * p.data * p.expert * p.num_microbatches)


def uses_of_weights(cfg: Config) -> int:
    """How many matmuls a layer's weight is in, forward: of groups of rows, or of pieces."""
    return cfg.parallel.tensor if in_pieces(cfg) else cfg.parallel.row_groups


def norms_stay_unwritten(cfg: Config) -> bool:
    """Whether all that reads a layer's normalised inputs are float8 matmuls on this device, with
    one scale per tensor: they compute them on the way."""
    rounded = cfg.model.matmul_dtype == "float8" and cfg.model.float8_scaling == "tensor"
    return rounded and cfg.parallel.tensor == 1 and not cfg.lora.rank


def norms_are_scaled_later(cfg: Config) -> bool:
    """Whether the rows of a layer's normalised inputs are scaled behind the matmuls: where these
    are in the compute dtype and on this device alone, and all that reads their products is one
    pass. Not in float16, whose range the unscaled products may leave."""
    m = cfg.model
    one_pass = gate_and_up_are_one(cfg) and not m.qkv_bias
    plain = m.matmul_dtype == "compute" and m.dtype != "float16"
    return one_pass and plain and cfg.parallel.tensor == 1


#: A chunk's float32 logits stay below this: 2,048 tokens of Llama 3's vocabulary on one device,
#: with which the figures of docs/benchmarks were measured; small beside the activations.
CHUNK_BYTES = 1 << 30


def num_chunks(num_tokens: int, vocab_shard: int, wanted: int = 0) -> int:
    """As many chunks as are wanted; 0: the fewest whose float32 logits fit CHUNK_BYTES. At most one
    for each token."""
    fewest = -(-num_tokens * vocab_shard * 4 // CHUNK_BYTES)
    return min(wanted or max(fewest, 1), num_tokens)


def matmuls_add_up(cfg: Config) -> bool:
    """Whether matmuls add the gradients of a layer's matrices to float32 sums over microbatches.

    For that the matrices are whole on the device, multiplied as they are, and in a chunk whose
    sums have one place (`parallel/pipeline/runner.py`).
    """
    p, m = cfg.parallel, cfg.model
    whole = p.zero == 1 and p.layer_loop == "unroll" and not cfg.lora.rank
    one_place = p.virtual_stages == 1 or not stage_sends(cfg)
    return whole and m.matmul_dtype == "compute" and one_place


def gathers(cfg: Config) -> bool:
    """Whether a layer's weights come from other devices, and its gradients go there."""
    p = cfg.parallel
    return p.zero == 3 and p.data * p.expert * p.sequence > 1


def stage_sends(cfg: Config) -> bool:
    """Whether all pipeline stages come to what `stage` sends.

    To permutes of keys and values they must, and they do to gathers of weights. Over tensor only
    the devices of one stage do, where there are stages (`permutes.gather_within`).

    Args:     cfg: resolved.
    """
    return gathers(cfg) or cfg.parallel.sequence > 1


def layers_in_part(cfg: Config) -> int:
    """How many layers `stage` is given at a time: one, or as many as repeat where not all are
    alike. 0, a chunk at once: for weights gathered a layer ahead and values fetched a layer ahead,
    for rows in turns, whose groups meet nowhere within a chunk, and in a loop over stacked layers.

    Args:     cfg: resolved.
    """
    p = cfg.parallel
    ahead = stage_sends(cfg) or names_on_host(p.remat)
    return 0 if ahead or p.row_groups > 1 or p.layer_loop == "scan" else cfg.model.global_every or 1


def gate_and_up_are_one(cfg: Config) -> bool:
    """Whether one matmul serves gate and up: in the compute dtype, or in float8 with one scale per
    tensor, with the activation whose gradients are written side by side, and without what belongs
    to one of the two. Not for rows in turns, where XLA would put more of the weights' gradients
    off, 4% of memory (docs/LOG.md)."""
    m = cfg.model
    scaled_by_row = m.matmul_dtype == "float8" and m.float8_scaling == "row"
    plain = not scaled_by_row and m.activation == "silu" and not m.mlp_bias
    in_turns = cfg.parallel.row_groups > 1
    return plain and not m.num_experts and not cfg.lora.rank and not in_turns
