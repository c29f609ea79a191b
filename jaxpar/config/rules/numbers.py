"""Range checks of single numbers."""

import math
from typing import Any

from jaxpar.config import Config, ConfigError, default_of, flag, value_of
from jaxpar.config.features import declarations
from jaxpar.config.fields import field_types, refused
from jaxpar.config.rules.limits import MAX_INT, most_of

_AT_LEAST_ONE = """model.moe_every train.num_steps train.global_batch_size train.log_every
metrics.layers_every
data.cache_gib
data.seq_len
data.prefetch model.num_layers model.d_model model.num_heads model.num_kv_heads model.head_dim
model.d_ff model.experts_per_token model.router_groups model.router_groups_per_token
model.linear_num_key_heads model.linear_num_value_heads model.linear_key_head_dim
model.linear_value_head_dim model.mamba_num_heads model.mamba_head_dim
model.mamba_state_size model.mamba_num_groups model.conv_kernel_size model.recurrent_chunk
model.qk_rope_head_dim model.v_head_dim model.nope_query_span
parallel.pipeline parallel.replica
parallel.expert parallel.sequence parallel.tensor parallel.num_microbatches parallel.row_groups
parallel.remat_group
parallel.virtual_stages checkpoint.keep evaluation.num_batches
guard.max_skips guard.spike_window guard.spike_skip guard.loss_scale_interval profile.num_steps
optimizer.muon_steps diloco.fragments cluster.connect_seconds""".split()


_AT_LEAST_ZERO = """run.cpu_devices data.tokenize_workers model.num_experts model.max_positions
model.global_every train.seed
model.num_shared_experts model.dense_layers model.kv_lora_rank model.mtp_depth
train.num_tokens train.num_epochs train.global_batch_tokens train.micro_batch_size
train.early_stop_patience
train.mtp_loss train.z_loss
train.balance_loss train.router_z_loss optimizer.warmup_steps optimizer.decay_steps
optimizer.weight_decay optimizer.clip_norm parallel.loss_chunks checkpoint.every
checkpoint.keep_every checkpoint.save_failures_allowed checkpoint.memory_every
checkpoint.memory_copies evaluation.every guard.max_rewinds
guard.recent_steps guard.replica_check_every profile.start profile.every
diloco.every diloco.overlap cluster.num_processes cluster.hang_seconds
cluster.slow_seconds""".split()


_ABOVE_ZERO = """model.rope_theta model.norm_eps model.latent_norm_eps model.init_std
model.swiglu_limit model.swiglu_alpha model.embedding_multiplier model.residual_multiplier
model.logits_scaling optimizer.learning_rate optimizer.eps
optimizer.muon_lr_ratio guard.spike_deviations
parallel.replica_top_k""".split()


_BELOW_ONE = (
    *("optimizer.beta1", "optimizer.beta2", "optimizer.muon_momentum"),
    *("optimizer.warmup_fraction", *(path for one in declarations() for path in one.shares)),
)


def numbers(cfg: Config) -> list[ConfigError]:
    """Return an error for each number that is not in its range."""
    found: dict[str, ConfigError] = {}

    def require(ok: bool, path: str, rule: str, better: Any = ...) -> None:
        if not ok and path not in found:
            fix = flag(path, default_of(path) if better is ... else better)
            found[path] = refused(path, value_of(cfg, path), rule, fix)

    for path in field_types():
        section = path.rpartition(".")[0]
        if section in field_types() and value_of(cfg, section) is None:
            continue
        if isinstance(value_of(cfg, path), float):
            require(math.isfinite(value_of(cfg, path)), path, "must be finite")
        if isinstance(value_of(cfg, path), int) and path != "train.seed":
            most = most_of(path)
            require(value_of(cfg, path) <= most, path, f"must be at most {most}")
    for path in _AT_LEAST_ONE:
        require(value_of(cfg, path) >= 1, path, "must be at least 1")
    for path in _AT_LEAST_ZERO:
        require(value_of(cfg, path) >= 0, path, "must not be negative", 0)
    for path in _ABOVE_ZERO:
        require(value_of(cfg, path) > 0, path, "must be above 0")
    for path in _BELOW_ONE:
        require(0 <= value_of(cfg, path) < 1, path, "must be at least 0 and below 1")
    data, ratio, seed = cfg.parallel.data, cfg.optimizer.min_lr_ratio, cfg.train.seed
    rule = "must be at least 1, or -1 for all remaining devices"
    require(data >= 1 or data == -1, "parallel.data", rule)
    require(0 <= ratio <= 1, "optimizer.min_lr_ratio", "must be from 0 to 1")
    rule = f"must be at most {MAX_INT}"
    require(seed <= MAX_INT, "train.seed", rule, seed % (MAX_INT + 1))
    return list(found.values())
