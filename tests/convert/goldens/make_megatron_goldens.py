"""Checkpoints as megatron-core writes them, and its logits, of a tiny Llama and a tiny Mixtral.

    python tests/convert/goldens/make_megatron_goldens.py

Needs torch and megatron-core 0.19, and nothing of jaxpar. Two processes with tensor parallelism
save each model, so that most tensors are in two pieces; the logits are theirs, float32
[tokens, vocabulary], on the CPU. The Llama is saved in float32, the Mixtral in bfloat16.
"""

import argparse
import contextlib
import os
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HERE = Path(__file__).resolve().parent
NUM_TOKENS, RANKS = 48, 2

ARGS = dict(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    ffn_hidden_size=56,
    norm_epsilon=1e-5,
    rotary_base=10000,
    rotary_percent=1.0,
    max_position_embeddings=64,
    padded_vocab_size=64,
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    add_qkv_bias=False,
    position_embedding_type="rope",
    group_query_attention=True,
    untie_embeddings_and_output_weights=True,
    qk_layernorm=False,
    num_experts=None,
    params_dtype=torch.float32,
)
EXPERTS = dict(num_experts=4, moe_router_topk=2, params_dtype=torch.bfloat16)
MODELS = {"llama": ARGS, "mixtral": ARGS | EXPERTS}


def config_of(a: dict):
    """megatron-core's config for arguments of Megatron-LM."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts = dict(
        num_moe_experts=a["num_experts"],
        moe_router_topk=a.get("moe_router_topk", 2),
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
    )
    return TransformerConfig(
        num_layers=a["num_layers"],
        hidden_size=a["hidden_size"],
        num_attention_heads=a["num_attention_heads"],
        num_query_groups=a["num_query_groups"],
        kv_channels=a["kv_channels"],
        ffn_hidden_size=a["ffn_hidden_size"],
        layernorm_epsilon=a["norm_epsilon"],
        normalization=a["normalization"],
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        init_method_std=0.2,
        use_cpu_initialization=True,
        tensor_model_parallel_size=RANKS,
        sequence_parallel=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **(experts if a["num_experts"] else {}),
    )


def work(rank: int, name: str) -> None:
    """Make, run and save a model, as one of RANKS processes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29519"}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import random

    # Saving asks for a GPU, if there is one or not.
    torch.cuda.synchronize, torch.cuda.current_device = lambda: None, lambda: "cpu"
    random.initialize_rng_tracker()
    random.get_cuda_rng_tracker().fork = contextlib.nullcontext
    parallel_state.initialize_model_parallel(RANKS, 1)
    a = MODELS[name]
    spec = get_gpt_layer_local_spec(a["num_experts"], normalization="RMSNorm")
    torch.manual_seed(0)
    model = GPTModel(
        config_of(a),
        spec,
        vocab_size=a["padded_vocab_size"],
        max_sequence_length=a["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=a["rotary_base"],
        parallel_output=False,
    ).eval()
    for path, w in model.named_parameters():  # norms of one would hide a swap
        if "norm" in path:
            w.data = 1 + 0.3 * torch.sin(torch.arange(len(w)) + len(path))
    os.chdir(HERE)  # the checkpoint has its own path
    folder = Path("megatron") / name / "iter_0000010"
    if rank == 0:
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder.parent / "latest_checkpointed_iteration.txt").write_text("10")
    dist.barrier()
    dtype = a["params_dtype"]
    for w in model.parameters():
        w.data = w.data.to(dtype).float()  # logits in float32, of the weights as saved
    tokens = torch.arange(NUM_TOKENS)[None] * 7 % a["padded_vocab_size"]
    seen = torch.triu(torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        logits = model(tokens, torch.arange(NUM_TOKENS)[None], seen)
    if rank == 0:
        np.save(folder.parent / "logits.npy", logits[0].numpy())
    state = model.to(dtype).sharded_state_dict()
    state |= {"args": argparse.Namespace(**a), "iteration": 10, "checkpoint_version": 3.0}
    dist_checkpointing.save(state, str(folder))


if __name__ == "__main__":
    for name in MODELS:
        mp.spawn(work, (name,), RANKS)
