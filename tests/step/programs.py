"""Small configs that together take every way in which a step is executed, by name."""

TINY = {
    "model.num_layers": 2,
    "model.d_model": 64,
    "model.num_heads": 8,
    "model.num_kv_heads": 4,
    "model.head_dim": 16,
    "model.d_ff": 128,
    "model.vocab_size": 256,
    "data.seq_len": 64,
    "train.global_batch_size": 16,
    "parallel.layer_loop": "unroll",
}

#: Sizes that the kernels of SwiGLU, the softmax and float8 take, and Hopper's attention.
LARGE = {
    "model.num_layers": 2,
    "model.d_model": 2048,
    "model.num_heads": 16,
    "model.num_kv_heads": 8,
    "model.head_dim": 128,
    "model.d_ff": 4096,
    "model.vocab_size": 1024,
    "data.seq_len": 4096,
    "train.global_batch_size": 16,
    "parallel.layer_loop": "unroll",
}

F8 = {"compute.matmul_dtype": "float8"}
ROW = F8 | {"compute.float8_scaling": "row"}
BIASES = {"model.qkv_bias": True, "model.out_bias": True, "model.mlp_bias": True}
GEMMA = {
    "model.post_norms": True,
    "model.norm_offset": True,
    "model.activation": "gelu",
    "model.embed_scale": True,
    "model.query_scale_dim": 32,
    "model.qk_norm": True,
    "model.tie_embeddings": True,
}
WINDOWS = {"model.sliding_window": 16, "model.global_every": 2, "model.local_rope_theta": 1e4}
EXPERTS = {"model.num_experts": 4}
ROUTER = EXPERTS | {
    "model.num_shared_experts": 1,
    "model.router_score": "sigmoid",
    "model.router_bias": True,
    "model.router_groups": 2,
    "train.balance_loss": 0.01,
    "train.router_z_loss": 0.001,
}
LORA = {"lora.rank": 4}
FLOAT32 = {"compute.dtype": "float32"}


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
    "fsdp, names": axes(data=8, remat="attn_norm,mlp_norm,mlp_hidden"),
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
    "float8, gelu": axes(data=8) | F8 | {"model.activation": "gelu"},
    "float8, lora": axes(data=8) | F8 | LORA,
    "float8, scan": axes(data=8, layer_loop="scan") | F8,
    "float8, biases, names": axes(data=8, remat="attn_norm,qkv,mlp_hidden") | F8 | BIASES,
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
    "policies of layers": axes(data=8, remat_layers="::2=full"),
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
    "lora, some": axes(data=8) | LORA | {"lora.targets": "q_proj,down_proj"},
    # experts
    "experts": axes(data=8) | EXPERTS,
    "experts, tensor": axes(data=4, tensor=2) | EXPERTS,
    "experts, row groups": axes(data=4, tensor=2, row_groups=2) | EXPERTS,
    "experts apart": axes(data=2, expert=4, layer_loop="unroll") | EXPERTS,
    "experts apart, rounds": axes(data=2, expert=2, tensor=2, expert_slack=0.5) | ROUTER,
    "experts apart, pipeline": axes(expert=4, data=1, pipeline=2, num_microbatches=2) | EXPERTS,
    "experts, not normalized": axes(data=8) | EXPERTS | {"model.normalize_experts": False},
    "experts, every option": axes(data=2, tensor=2, pipeline=2, num_microbatches=2) | ROUTER,
    # kinds of models
    "biases": axes(data=8) | BIASES,
    "biases, qk norm": axes(data=4, tensor=2) | BIASES | {"model.qk_norm": True},
    "gemma": axes(data=8) | GEMMA,
    "gemma, tensor": axes(data=4, tensor=2) | GEMMA,
    "windows": axes(data=8) | WINDOWS | {"model.num_layers": 4},
    "windows, zero 1": axes(data=4, tensor=2, zero=1, num_microbatches=2)
    | WINDOWS
    | {"model.num_layers": 4},
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
    "cuda: experts": axes(data=8) | EXPERTS | {"model.d_ff": 1024},
    "cuda: experts, tensor": axes(data=4, tensor=2, zero=1) | EXPERTS | {"model.d_ff": 768},
    "cuda: lora": axes(data=8) | LORA,
    "cuda: gemma": axes(data=8) | GEMMA,
    "cuda: metrics of layers": axes(data=4, tensor=2) | {"metrics.layers": "all"},
    "cuda: pipeline": axes(data=2, tensor=2, pipeline=2, num_microbatches=2, zero=1),
}
