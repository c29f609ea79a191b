"""Bad settings of experts: each is one error that names field, value, rule and fix."""

import re

import pytest

from jaxpar.config import Config, ConfigError, command_line, replace
from jaxpar.config.explain import errors_of
from jaxpar.config.validate import check
from tests.config.test_config import fixes
from tests.tiny import TINY

EXPERTS = replace(TINY, **{"model.num_experts": 4, "parallel.layer_loop": "unroll"})
NAN, INF = float("nan"), float("inf")
DENSE = {"model.dense_layers": 1}
STAGES = DENSE | {"model.num_layers": 3, "parallel.pipeline": 2, "parallel.num_microbatches": 2}
LORA = {"lora.rank": 2, "lora.targets": "q_proj"}
BIAS = {"model.router_bias": True}
NO_EXPERTS = {"model.num_experts": 0}
RECORD = {"run.record_routing": "1,3"}
CLAMPED = {"model.activation": "clamped_swiglu"}
FLOAT8 = {"compute.matmul_dtype": "float8", "model.d_model": 32, "model.num_heads": 8} | {
    "model.num_kv_heads": 8,
    "model.d_ff": 32,
}

CASES = [
    ({"model.router_scale": NAN}, "router_scale = nan: must be finite.*--model.router-scale 1.0"),
    ({"model.router_scale": INF}, "router_scale = inf: must be finite"),
    ({"model.router_groups": 5}, "router_groups = 5: must divide model.num_experts = 4.*groups 4"),
    ({"model.router_groups": -2}, "router_groups = -2: must be at least 1"),
    ({"model.router_groups_per_token": 0}, "router_groups_per_token = 0: must be at least 1"),
    (
        {"model.router_groups": 2, "model.experts_per_token": 3},
        "groups_per_token = 1: leaves 2 experts of which to choose 3.*per-token 2, or .*groups 1",
    ),
    ({"model.experts_per_token": -1}, "experts_per_token = -1: must be at least 1"),
    ({"model.num_experts": 10**9}, "num_experts = 1000000000: must be at most 65,536"),
    ({"model.num_experts": 2.5}, "num_experts = 2.5: must be a whole number"),
    ({"model.num_shared_experts": 10**9}, "num_shared_experts = 1000000000: must be at most"),
    ({"model.router_bias": "yes"}, "router_bias = 'yes': must be True or False"),
    ({"train.balance_loss": NAN}, "balance_loss = nan: must be finite"),
    ({"train.balance_over": "token"}, "balance_over = 'token': must be one of sequence, batch"),
    ({"train.router_z_loss": -1.0}, "router_z_loss = -1.0: must not be negative"),
    ({"train.router_bias_rate": NAN}, "router_bias_rate = nan: must be finite"),
    ({"train.router_bias_rate": -0.1}, "bias_rate = -0.1: needs model.router_bias.*rate 0.001"),
    (BIAS | {"train.router_bias_rate": -0.1}, "bias_rate = -0.1: must be above 0.*rate 0.001"),
    (
        LORA | {"train.router_z_loss": 0.1},
        "z_loss = 0.1: is not supported with lora.rank = 2: the router",
    ),
    (LORA | {"lora.targets": "up_proj"}, "'up_proj': must be .*; experts have no adapters"),
    ({"parallel.expert": 0}, "parallel.expert = 0: must be at least 1"),
    ({"parallel.expert": 3}, "d_model = 16: must be divisible by parallel.expert = 3"),
    ({"parallel.expert": 16}, "batch_size = 8: must be divisible by parallel.expert = 16.*rt 8"),
    ({"model.d_ff": 13, "parallel.tensor": 2}, "d_ff = 13: must be divisible by parallel.tensor"),
    (NO_EXPERTS | {"model.router_groups": 2}, "router_groups = 2: needs experts.*num-experts 8"),
    (NO_EXPERTS | {"model.router_scale": 2.0}, "router_scale = 2.0: needs experts"),
    (NO_EXPERTS | {"train.router_z_loss": 0.1}, "router_z_loss = 0.1: needs experts"),
    (NO_EXPERTS | {"train.balance_over": "batch"}, "balance_over = 'batch': needs experts"),
    (NO_EXPERTS | DENSE, "dense_layers = 1: needs experts.*dense-layers 0, or .*num-experts 8"),
    ({"model.dense_layers": 2}, "dense_layers = 2: must be below model.num_layers = 2.*layers 3"),
    ({"model.dense_layers": -1}, "dense_layers = -1: must not be negative"),
    ({"model.dense_d_ff": 8}, "dense_d_ff = 8: needs model.dense_layers, which is 0"),
    (DENSE | {"model.dense_d_ff": 0}, "dense_d_ff = 0: must be at least 1, or None"),
    (
        DENSE | {"model.dense_d_ff": 9, "parallel.tensor": 2},
        "dense_d_ff = 9: must be divisible by parallel.tensor = 2.*dense-d-ff 10",
    ),
    (
        DENSE | {"parallel.pipeline": 2},
        "num_layers = 2: must be at least 3: 1 layer for each of 2 stages.*and the 1 before those",
    ),
    (
        STAGES | {"parallel.layers_per_stage": "2,1"},
        "per_stage = '2,1': must add up to 2, the layers after the first 1, which .* not to 3",
    ),
    (
        STAGES | {"model.nope_every": 2, "model.num_layers": 5},
        "nope_every = 2: is not supported with model.dense_layers = 1: stages begin .*pipeline 1",
    ),
    (
        STAGES | {"compute.matmul_dtype": "float8"},
        "'float8': is not supported with model.dense_layers = 1: .*before the stages are not",
    ),
    (
        DENSE | {"parallel.layer_loop": "scan"},
        "loop = 'scan': is not supported with model.dense",
    ),
    (
        {"parallel.expert_dispatch": "rows"},
        "dispatch = 'rows': needs an expert axis, but parallel.expert is 1.*auto, or --pa.*rt 2",
    ),
    ({"parallel.expert_dispatch": "tokens"}, "dispatch = 'tokens': needs an expert axis"),
    (
        {"parallel.expert_dispatch": "all_to_all", "parallel.expert": 2},
        "expert_dispatch = 'all_to_all': must be one of auto, tokens, rows",
    ),
    (
        NO_EXPERTS | {"parallel.expert_dispatch": "rows", "parallel.expert": 2},
        "expert_dispatch = 'rows': needs experts, but model.num_experts is 0",
    ),
    ({"model.qk_norm_over": "all"}, "qk_norm_over = 'all': needs model.qk_norm, which is False"),
    ({"model.qk_norm": True, "model.qk_norm_over": "heads"}, "must be one of head, all"),
    ({"model.num_experts": -1}, r"model\.num_experts = -1: must not be negative"),
    ({"model.experts_per_token": 5}, r"= 5: must be at most model\.num_experts = 4.*use --mo"),
    ({"model.experts_per_token": 0}, r"experts_per_token = 0: must be at least 1"),
    (
        {"model.experts_per_token": 1},
        r"= 1: leaves the router without a gradient.*normalize-experts F",
    ),
    (
        {"model.experts_per_token": 1, "model.normalize_experts": False}
        | {"model.post_norms": True},
        r"= 1: leaves the router without a gradient: the norm after.*post-norms False",
    ),
    ({"model.router_groups": 3}, r"router_groups = 3: must divide model\.num_experts = 4.*s 2"),
    ({"model.router_groups": 0}, "router_groups = 0: must be at least 1"),
    (
        {"model.router_groups_per_token": 2},
        "per_token = 2: must be at most model.router_groups",
    ),
    (
        {"model.router_groups": 4},
        "groups_per_token = 1: leaves 1 experts of which to choose 2.*per-token 2, or",
    ),
    ({"model.router_scale": 0.0}, "router_scale = 0.0: must be above 0"),
    ({"model.router_scale": -1.0}, "router_scale = -1.0: must be above 0"),
    ({"model.num_shared_experts": -1}, "shared_experts = -1: must not be negative"),
    ({"parallel.expert": 8}, r"num_experts = 4: must be divisible by parallel\.expert = 8"),
    ({"parallel.expert_slack": 0.0}, r"expert_slack = 0\.0: must be above 0"),
    ({"parallel.expert_slack": -1.0}, r"expert_slack = -1\.0: must be above 0"),
    ({"model.router_score": "relu"}, "router_score = 'relu'"),
    ({"train.balance_loss": -0.1}, "balance_loss = -0.1: must not be negative"),
    ({"train.balance_loss": float("inf")}, "balance_loss = inf: must be finite"),
    ({"train.router_z_loss": float("nan")}, "router_z_loss = nan: must be finite"),
    ({"train.balance_over": "batch"}, "balance_over = 'batch': needs a balance loss"),
    ({"train.router_bias_rate": 0.1}, "bias_rate = 0.1: needs model.router_bias, which is F"),
    ({"model.router_bias": True, "train.router_bias_rate": 0.0}, "rate = 0.0: must be above 0"),
    (
        {"train.balance_loss": 0.1, "lora.rank": 2, "lora.targets": "q_proj"},
        "balance_loss = 0.1: is not supported with lora.rank = 2: the router is frozen",
    ),
    ({"model.num_experts": 0, "train.balance_loss": 0.1}, "= 0.1: needs experts"),
    ({"model.num_experts": 0, "model.router_bias": True}, "= True: needs experts"),
    ({"model.num_experts": 0, "model.router_score": "sigmoid"}, "'sigmoid': needs experts"),
    ({"model.num_experts": 0, "model.num_shared_experts": 1}, "= 1: needs experts"),
    ({"model.num_experts": 0, "model.experts_per_token": 3}, "= 3: needs experts"),
    ({"model.num_experts": 0, "model.normalize_experts": False}, "= False: needs experts"),
    ({"model.num_experts": 0, "model.expert_bias": True}, "expert_bias = True: needs experts"),
    ({"model.num_experts": 0, "model.router_linear_bias": True}, "= True: needs experts"),
    ({"model.swiglu_limit": 5.0}, "limit = 5.0: needs model.activation clamped_swiglu, not si"),
    ({"model.swiglu_alpha": 1.0}, "alpha = 1.0: needs model.activation clamped_swiglu, not si"),
    ({"model.swiglu_limit": 0.0} | CLAMPED, "swiglu_limit = 0.0: must be above 0"),
    ({"model.swiglu_limit": -7.0} | CLAMPED, "swiglu_limit = -7.0: must be above 0"),
    ({"model.swiglu_limit": float("inf")} | CLAMPED, "swiglu_limit = inf: must be finite"),
    ({"model.swiglu_alpha": 0.0} | CLAMPED, "swiglu_alpha = 0.0: must be above 0"),
    ({"model.activation": "swiglu"}, "activation = 'swiglu': must be one of silu, gelu, gelu_ex"),
    (
        {"model.expert_bias": True} | LORA | {"lora.targets": "gate_proj"},
        "lora.targets = 'gate_proj': must be names from q_proj, .*; experts have no adapters",
    ),
    ({"model.mlp_bias": True}, r"model\.mlp_bias = True: needs a dense feed-forward layer"),
    (FLOAT8 | {"model.d_ff": 24}, "d_ff = 24: must be divisible by 16.*float8.*--model.d-ff 32"),
    (
        FLOAT8 | {"parallel.tensor": 4},
        r"d_ff = 32: must be divisible by 16 \* parallel.tensor = 64.*float8.*--model.d-ff 64",
    ),
    (
        FLOAT8 | {"parallel.gather_dtype": "float8", "parallel.zero": 1},
        "gather_dtype = 'float8': is not supported with parallel.zero = 1.*-dtype compute",
    ),
    (RECORD | NO_EXPERTS, "record_routing = '1,3': needs experts.*--run.record-routing '', or --m"),
    (
        RECORD | LORA,
        "routing = '1,3': is not supported with lora.rank = 2: the router",
    ),
    ({"run.record_routing": "first"}, "= 'first': must be numbers of steps.*ng 1,1000"),
    ({"run.record_routing": "-1"}, "= '-1': must be numbers of steps, separated by commas"),
    ({"run.record_routing": "0,5"}, "= '0,5': must name steps of the run, from 1 to.*= 1000"),
    (RECORD | {"train.num_steps": 2}, "= '1,3': must name steps of.*routing 2, or.*steps 3"),
    (
        {"run.record_routing": ",".join(map(str, range(1, 102)))},
        "names 101 steps, and must name at most 100.*ng 1,2,3,4,5,6,7,8,9,10",
    ),
    (
        RECORD | {"train.global_batch_size": 1 << 12, "data.seq_len": 1 << 18},
        "records 2 steps of 4,294,967,296 bytes, and must record at most 4,294,967,296.*ng 1",
    ),
    (
        {"compute.float8_scaling": "row"},
        "float8_scaling = 'row': needs compute.matmul_dtype float8",
    ),
]


def test_the_config_without_these_settings_is_good():
    check(EXPERTS)
    check(replace(EXPERTS, **DENSE | {"model.dense_d_ff": 40}))
    check(replace(Config(), **{"model.qk_norm": True, "model.qk_norm_over": "all"}))


@pytest.mark.parametrize(("values", "said"), CASES, ids=[said[:30] for _, said in CASES])
def test_one_error_whose_fixes_work(values, said):
    bad = replace(EXPERTS, **values)
    with pytest.raises(ConfigError, match=said) as caught:
        check(bad)
    (error, *_) = (one for one in errors_of(caught.value) if re.search(said, str(one)))
    assert str(error).startswith(f"{error.field} = {error.value!r}: {error.rule}. Fix: use --")
    for way in fixes(error):
        fixed = command_line.parse_overrides(bad, way)
        assert (error.field, error.rule) not in broken_rules(fixed), way


def broken_rules(cfg: Config) -> list[tuple[str, str]]:
    """Field and rule of all that is wrong with a config."""
    try:
        check(cfg)
    except ConfigError as error:
        return [(one.field, one.rule) for one in errors_of(error)]
    return []
