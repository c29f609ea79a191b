"""Classifies GPU kernels by name, with a table of patterns."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from jaxpar.config.features import DECLARATIONS

MATMUL, ATTENTION, COMMUNICATION = "matmul", "attention", "communication"
FUSION, COPY, PALLAS, OTHER = "fusion", "copy", "pallas", "other"

#: Classes in the order in which they are reported.
CLASSES = (MATMUL, ATTENTION, PALLAS, FUSION, COPY, OTHER, COMMUNICATION)

#: Kinds of communication. NCCL uses one kernel for sends and receives, in all-to-alls and permutes.
#: The HLO instruction tells which of them it was.
HOST = "host"
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute", HOST)
SEND_RECEIVE = "send-receive"


@dataclass(frozen=True)
class Pattern:
    """A regular expression for kernel names, their class, and the origin of the names."""

    what: str
    regex: str
    reason: str
    kind: str = ""


def _nccl(kind: str, function: str) -> Pattern:
    reason = "NCCL: nccl[Sym|Symk]DevKernel_FUNCTION_..., before 2.19 ncclKernel_FUNCTION_..."
    return Pattern(COMMUNICATION, rf"^nccl\w*Kernel_{function}(_|\b)", reason, kind)


#: Part of the name of every Pallas kernel for Mosaic GPU, after its own name or "anonymous".
MOSAIC = "mosaic_gpu"
_ATTENTION = re.compile(r"attention|flash")

#: The first matching pattern applies.
PATTERNS = (
    _nccl("all-gather", "AllGather"),
    _nccl("reduce-scatter", "ReduceScatter"),
    _nccl("all-reduce", "AllReduce"),
    _nccl("all-to-all", "All[Tt]o[Aa]ll"),
    _nccl(SEND_RECEIVE, "SendRecv"),
    Pattern(COMMUNICATION, r"^nccl", "the rest of NCCL: Broadcast, Reduce", "other"),
    Pattern(COMMUNICATION, r"nvshmem", "NVSHMEM's own collectives", "other"),
    Pattern(COMMUNICATION, r"^Memcpy ?P2P", "a copy to another GPU", "permute"),
    Pattern(COMMUNICATION, r"^Memcpy ?(D2H|H2D)", "a copy to host memory, or from it", HOST),
    Pattern(
        COMMUNICATION,
        r"^(psum|pmax|pmin|all[-_]reduce)\w*_fusion(_\d+)*$",
        "XLA's one-shot all-reduce: a Triton kernel named after the collective",
        "all-reduce",
    ),
    Pattern(ATTENTION, r"cudnn\w*sdpa", "cuDNN: cudnn_generated_fort_native_sdpa_sm90_flash_..."),
    Pattern(ATTENTION, r"cudnn.*compute_dot_do_o|cudnn.*convert_dq", "cuDNN, around its backward"),
    Pattern(ATTENTION, r"fmha|flash_(fwd|bwd|attention)", "fused attention of older libraries"),
    Pattern(ATTENTION, MOSAIC, "Pallas, unless its name or scope says otherwise"),
    Pattern(
        PALLAS,
        r"^(quantize_both_ways|softmax_(sum|exponentials)|swiglu)",
        "ours, in profiles from before they were for Mosaic GPU",
    ),
    Pattern(MATMUL, r"^nvjet_", "cuBLAS for Hopper and later"),
    Pattern(MATMUL, r"gemm", "cuBLAS and CUTLASS kernels, and XLA's Triton ones: gemm_fusion_dot"),
    Pattern(MATMUL, r"cutlass.*(wgmma|tensorop|[sh]884|[sh]16816)", "CUTLASS without the word"),
    Pattern(MATMUL, r"gemv|cublasLt|cublas|splitKreduce", "other cuBLAS kernels"),
    Pattern(COPY, r"^Mem(cpy|set)", "CUPTI's names: MemcpyD2D, Memset 0"),
    Pattern(COPY, r"^mem(cpy|set)\d*(_\w+)?$", "the driver's copies by kernel: memcpy128"),
    Pattern(COPY, r"^copy(_\d+)*$", "an XLA copy by kernel"),
    Pattern(FUSION, r"fusion(_\d+)*$", "XLA: loop_*_fusion, input_*_fusion, *_concatenate_fusion"),
    Pattern(FUSION, r"^(wrapped|loop|input|triton)_", "XLA: one instruction, or Triton"),
)
_COMPILED = tuple((re.compile(p.regex), p) for p in PATTERNS)


def classify(name: str, scope: str = "", op: str = "") -> tuple[str, str]:
    """Return the class of a kernel, and its kind if it is communication, else "".

    Args:     name: name in the profile. scope: op_name of the HLO instruction, if known. op: name
        of the instruction. They distinguish Pallas kernels outside attention, and the purposes of
        NCCL's sends and receives.
    """
    for regex, pattern in _COMPILED:
        if regex.search(name):
            if MOSAIC in name:
                return _kind_of_pallas(name, scope), ""
            if pattern.kind == SEND_RECEIVE:
                return COMMUNICATION, _kind_of_exchange(f"{scope} {op}")
            return pattern.what, pattern.kind
    return OTHER, ""


#: Kernels that a library launches around the one that computes: sums of split products, cleared
#: workspaces, and the preparation of cuDNN's backward.
_AROUND = re.compile(r"splitK|compute_dot_do_o|convert_dq|^Mem(set|cpy)", re.IGNORECASE)

#: Products without tensor cores: with a vector, and in plain float32 or float64.
_WITHOUT_TENSOR_CORES = re.compile(
    r"gemv|[sd]gemm|gemm_f(32f32|64f64)_(?!tf32)|simt", re.IGNORECASE
)

#: Pallas kernels outside attention that multiply matrices, by their names.
_PALLAS_PRODUCT = re.compile(r"matmul|gemm|dot|outer")


def uses_tensor_cores(name: str, what: str) -> bool:
    """Return whether a kernel runs on tensor cores, by its name and class."""
    if what == PALLAS:
        return bool(_PALLAS_PRODUCT.search(name))
    computes = what in (MATMUL, ATTENTION) and not _AROUND.search(name)
    return computes and not _WITHOUT_TENSOR_CORES.search(name)


def _kind_of_pallas(name: str, scope: str) -> str:
    """Classify a Pallas kernel by its name, or by its scope if it has none."""
    known = scope if name.startswith("anonymous") else name
    return ATTENTION if _ATTENTION.search(known) or not known else PALLAS


def _kind_of_exchange(text: str) -> str:
    if re.search(r"all[-_]to[-_]all", text):
        return "all-to-all"
    return "permute" if re.search(r"permute|\b(send|recv)\b", text) else SEND_RECEIVE


def family(name: str) -> str:
    """Return a kernel's name without arguments and XLA's numeric suffixes."""
    return re.sub(r"(_\d+)+$", "", name.split("(")[0].removeprefix("void "))


# ------------------------------------------ Parses a kernel's op_name into its pass and named scope


FORWARD, RECOMPUTE, BACKWARD, OUTSIDE = "forward", "recompute", "backward", "outside"
PASSES = (FORWARD, RECOMPUTE, BACKWARD, OUTSIDE)

#: Names that the model and the step use in `jax.named_scope`.
BLOCKS = (
    *("embedding", "attention", "feed_forward", "experts", "loss", "optimizer"),
    *("norm", "qkv", "rope", "core_attention", "output", "gate_up", "activation", "router"),
    *("plan", "permute", "down", "combine", "weight_gradients", "shared_experts"),
    *("adapters", "clip", "grad_norm", "gather_weights", "float8_scales", "scatter_gradients"),
    *("reduce_gradients", "between_stages", "exchange_matrices", "newton_schulz"),
    *("largest_logits", *(scope for one in DECLARATIONS for scope in one.scopes)),
)

#: Parts of a name that JAX adds for its own structure.
_STRUCTURE = frozenset(
    "shard_map checkpoint rematted_computation remat while body cond scan closed_call core_call "
    "eval_jaxpr custom_vjp_call custom_jvp_call custom_vjp_call_jaxpr pjit jit named_call".split()
)
#: A transformation around a part, whose argument is a name. In jit(silu) it is a function.
_TRANSFORMED = re.compile(r"(?:jvp|transpose|vmap|pmap)\((.*)\)$")


class Place(NamedTuple):
    """A pass and a scope.

    The pass is forward, recompute (rematerialization), backward, or outside of differentiation.
    """

    phase: str
    scope: str


def place_of(op_name: str) -> Place:
    """Return pass and named scopes of an op_name; the scope is "" if there is none.

    The scope has the nested names in BLOCKS, outermost first, or else the outermost name.
    jit(train_step)/shard_map/transpose(jvp(jvp()))/checkpoint/attention/norm/mul: backward,
    attention/norm.
    """
    if "rematted_computation" in op_name:
        phase = RECOMPUTE
    elif "transpose(" in op_name:
        phase = BACKWARD
    else:
        phase = FORWARD if "jvp(" in op_name else OUTSIDE
    parts = op_name.split("/")[:-1]  # the last is the primitive
    names = list(filter(None, map(_name, parts)))
    known = list(dict.fromkeys(name for name in names if name in BLOCKS))
    return Place(phase, "/".join(known or names[:1]))


def _name(part: str) -> str:
    """Return the name in a part; "" if JAX added the part."""
    while found := _TRANSFORMED.match(part):
        part = found[1]
    if "(" in part or part in _STRUCTURE or re.fullmatch(r"branch_\d+_fun", part):
        return ""
    return part


def shorten(op_name: str) -> str:
    """Return an op_name without the common prefix jit(NAME)/shard_map/."""
    return re.sub(r"^jit\([^)]*\)/(shard_map/)?", "", op_name)
