"""Small configs that together take every way in which a step is executed, by name."""

import dataclasses

from jaxpar.config import (
    Attention,
    Experts,
    Glu,
    Layer,
    Model,
    QkNorm,
    RematSlice,
    Rope,
    Router,
)
from tests.tiny import remat_of

#: The parts of TINY's layers, which are named "layers".
ATTENTION = Attention(num_heads=8, num_kv_heads=4, head_dim=16)
GLU = Glu(128)

TINY = {
    "model": Model(d_model=64, vocab_size=256, layers=[Layer("layers", ATTENTION, GLU)] * 2),
    "data.seq_len": 64,
    "train.global_batch_size": 16,
    "parallel.layer_loop": "unroll",
}

#: Those of LARGE's: sizes that the kernels of SwiGLU, the softmax and float8 take, and Hopper's
#: attention.
WIDE_ATTENTION = Attention(num_heads=16, num_kv_heads=8, head_dim=128)
WIDE_GLU = Glu(4096)

LARGE = TINY | {
    "model": Model(
        d_model=2048, vocab_size=1024, layers=[Layer("layers", WIDE_ATTENTION, WIDE_GLU)] * 2
    ),
    "data.seq_len": 4096,
}

F8 = {"compute.matmul_dtype": "float8"}
ROW = F8 | {"compute.float8_scaling": "row"}
BIASES = {
    "model.layers.mixer.bias": True,
    "model.layers.mixer.out_bias": True,
    "model.layers.feed_forward.bias": True,
}
QK_NORM = {"model.layers.mixer.qk_norm": QkNorm()}
GELU = {"model.layers.feed_forward.activation": "gelu"}
GEMMA = (
    QK_NORM
    | GELU
    | {
        "model.layers.norms": "around",
        "model.layers.mixer.scale_dim": 32,
        "model.norm.offset": True,
        "model.embed_scale": True,
        "model.tie_embeddings": True,
    }
)
_LOCAL = dataclasses.replace(ATTENTION, window=16, rope=Rope(theta=1e4))
WINDOWS = {"model.layers": [Layer("local", _LOCAL, GLU), Layer("layers", ATTENTION, GLU)] * 2}
FOUR_EXPERTS = Experts(expert=GLU, num_experts=4, experts_per_token=2)
EXPERTS = {"model.layers.feed_forward": FOUR_EXPERTS}
ROUTED = dataclasses.replace(
    FOUR_EXPERTS,
    num_shared_experts=1,
    router=Router(score="sigmoid", balancing_bias=True, groups=2),
)
ROUTER = {
    "model.layers.feed_forward": ROUTED,
    "train.balance_loss": 0.01,
    "train.router_z_loss": 0.001,
}
LORA = {"lora.rank": 4}
FLOAT32 = {"compute.dtype": "float32"}


def _expert_width(d_ff: int) -> dict:
    return {"model.layers.feed_forward.expert.d_ff": d_ff}


def axes(**fields) -> dict:
    """Fields of the section `parallel`."""
    return {f"parallel.{name}": value for name, value in fields.items()}


#: Name -> changes to TINY. Each field of `Execution` takes each of its values in some of them.
CPU: dict[str, dict] = {
    # deferred-scale norms, fused gate-up projections
    "fsdp": axes(data=8),
    "fsdp, float32": axes(data=8) | FLOAT32,
    "fsdp, float16": axes(data=8) | {"compute.dtype": "float16"},
    "fsdp, scan": axes(data=8, layer_loop="scan"),
    "fsdp, remat none": axes(data=8, remat="none"),
    "fsdp, remat full": axes(data=8, remat="full"),
    "fsdp, names": axes(data=8, remat=remat_of("attn_norm,mlp_norm,mlp_hidden")),
    "fsdp, offload names": axes(data=8, remat="dots_offload"),
    "fsdp, offload input": axes(data=8, remat="offload") | {"model.num_layers": 3},
    "fsdp, microbatches": axes(data=8, num_microbatches=2),
    "fsdp, bfloat16 sums": axes(data=4, replica=2, grad_reduce="bfloat16"),
    # collective matmuls
    "tensor": axes(data=4, tensor=2),
    "tensor 4, names": axes(data=2, tensor=4, remat="none"),
    "tensor, sequence": axes(data=2, sequence=2, tensor=2),
    "tensor, zero 1, microbatches": axes(data=2, tensor=4, zero=1, num_microbatches=2),
    "tensor alone, microbatches": axes(data=1, tensor=4, replica=2, num_microbatches=2),
    "tensor, scan": axes(data=4, tensor=2, layer_loop="scan"),
    # row groups
    "row groups": axes(data=4, tensor=2, row_groups=2),
    "row groups, zero 1, microbatches": axes(
        data=2, tensor=2, replica=2, row_groups=2, zero=1, num_microbatches=2
    ),
    "row groups, pipeline": axes(
        data=2, tensor=2, pipeline=2, row_groups=2, num_microbatches=2, zero=1
    ),
    "row groups, 4 groups, float8": axes(data=2, tensor=4, row_groups=4) | F8,
    "row groups, biases": axes(data=4, tensor=2, row_groups=2) | BIASES,
    "row groups, gemma": axes(data=4, tensor=2, row_groups=2) | GEMMA,
    "row groups, lora": axes(data=4, tensor=2, row_groups=2) | LORA,
    # float32 weight gradients
    "zero 1, microbatches": axes(data=8, zero=1, num_microbatches=2),
    "zero 1, one microbatch": axes(data=8, zero=1),
    "zero 1, microbatches, experts": axes(data=8, zero=1, num_microbatches=2) | EXPERTS,
    # float8
    "float8": axes(data=8) | F8,
    "float8, tensor": axes(data=4, tensor=2) | F8,
    "float8, row": axes(data=8) | ROW,
    "float8, row, tensor": axes(data=4, tensor=2, remat="none") | ROW,
    "float8, gathers": axes(data=8, gather_dtype="float8") | F8,
    "float8, zero 1, microbatches": axes(data=8, zero=1, num_microbatches=2) | F8,
    "float8, gelu": axes(data=8) | F8 | GELU,
    "float8, lora": axes(data=8) | F8 | LORA,
    "float8, scan": axes(data=8, layer_loop="scan") | F8,
    "float8, biases, names": axes(data=8, remat=remat_of("attn_norm,qkv,mlp_hidden")) | F8 | BIASES,
    # pipeline
    "pipeline": axes(data=4, pipeline=2, num_microbatches=4),
    "pipeline, virtual": axes(
        data=2, pipeline=2, virtual_stages=2, replica=2, num_microbatches=4, zero=1
    )
    | {"model.num_layers": 8},
    "pipeline, virtual, zero 3": axes(data=4, pipeline=2, virtual_stages=2, num_microbatches=4)
    | {"model.num_layers": 4},
    "zero 2, microbatches": axes(data=8, zero=2, num_microbatches=2),
    "pipeline, zero 2": axes(data=4, pipeline=2, zero=2, num_microbatches=4),
    "policies of layers": axes(data=8, remat_layers=(RematSlice("full", step=2),)),
    "groups of layers": axes(data=8, layer_loop="scan", remat_group=2),
    "pipeline, virtual, sequence": axes(
        data=1, replica=2, sequence=2, pipeline=2, zero=1, virtual_stages=2, num_microbatches=4
    )
    | {"model.num_layers": 4},
    "pipeline, tensor, inputs": axes(
        data=2, tensor=2, pipeline=2, num_microbatches=2, zero=1, pipeline_save="inputs"
    ),
    "pipeline, float8": axes(data=2, tensor=2, pipeline=2, num_microbatches=2, zero=1) | F8,
    # adapters
    "lora": axes(data=8) | LORA,
    "lora, tensor, zero 1": axes(data=2, tensor=4, zero=1, num_microbatches=2) | LORA,
    "lora, some": axes(data=8) | LORA | {"lora.targets": ("q_proj", "down_proj")},
    # experts
    "experts": axes(data=8) | EXPERTS,
    "experts, tensor": axes(data=4, tensor=2) | EXPERTS,
    "experts, row groups": axes(data=4, tensor=2, row_groups=2) | EXPERTS,
    "experts apart": axes(data=2, expert=4, layer_loop="unroll") | EXPERTS,
    "experts apart, rounds": axes(data=2, expert=2, tensor=2, expert_slack=0.5) | ROUTER,
    "experts apart, pipeline": axes(expert=4, data=1, pipeline=2, num_microbatches=2) | EXPERTS,
    "experts, not normalized": axes(data=8)
    | EXPERTS
    | {"model.layers.feed_forward.router.normalize": False},
    "experts, every option": axes(data=2, tensor=2, pipeline=2, num_microbatches=2) | ROUTER,
    # kinds of models
    "biases": axes(data=8) | BIASES,
    "biases, qk norm": axes(data=4, tensor=2) | BIASES | QK_NORM,
    "gemma": axes(data=8) | GEMMA,
    "gemma, tensor": axes(data=4, tensor=2) | GEMMA,
    "windows": axes(data=8) | WINDOWS,
    "windows, zero 1": axes(data=4, tensor=2, zero=1, num_microbatches=2) | WINDOWS,
    "ring": axes(data=2, sequence=4, context="ring"),
    "ulysses": axes(data=2, sequence=4, context="ulysses"),
}

#: Name -> changes to LARGE, lowered for an H200, which need not be there.
CUDA: dict[str, dict] = {
    "cuda: fsdp": axes(data=8),
    "cuda: tensor": axes(data=4, tensor=2),
    "cuda: tensor, microbatches": axes(data=4, tensor=2, num_microbatches=4),
    "cuda: row groups": axes(data=4, tensor=2, row_groups=2),
    "cuda: zero 1, microbatches": axes(data=8, zero=1, num_microbatches=2),
    "cuda: float8": axes(data=8) | F8,
    "cuda: float8, tensor": axes(data=4, tensor=2) | F8,
    "cuda: float8, row": axes(data=8) | ROW,
    "cuda: experts": axes(data=8) | EXPERTS | _expert_width(1024),
    "cuda: experts, tensor": axes(data=4, tensor=2, zero=1) | EXPERTS | _expert_width(768),
    "cuda: lora": axes(data=8) | LORA,
    "cuda: gemma": axes(data=8) | GEMMA,
    "cuda: metrics of layers": axes(data=4, tensor=2) | {"metrics.layers": "all"},
    "cuda: pipeline": axes(data=2, tensor=2, pipeline=2, num_microbatches=2, zero=1),
}
