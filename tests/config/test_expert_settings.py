"""Bad settings of experts: each is one error that names field, value, rule and fix."""

import dataclasses
import re

import pytest

from jaxpar.config import (
    ClampedSwiglu,
    Config,
    ConfigError,
    Experts,
    Glu,
    Layer,
    Mlp,
    command_line,
    replace,
)
from jaxpar.config.errors import shown
from jaxpar.config.explain import errors_of
from jaxpar.config.validate import check
from tests.config.test_config import fixes
from tests.tiny import ATTENTION, EXPERTS, GLU, TINY

CONFIG = replace(TINY, **{"model.layers.feed_forward": EXPERTS, "parallel.layer_loop": "unroll"})
NAN, INF = float("nan"), float("inf")
FF = "model.layers.feed_forward"
K, GROUPS, PER_TOKEN = (
    f"{FF}.experts_per_token",
    f"{FF}.router.groups",
    f"{FF}.router.groups_per_token",
)
ACTIVATION, BIAS = f"{FF}.expert.activation", {f"{FF}.router.balancing_bias": True}
FIRST = [Layer("dense_layers", ATTENTION, GLU), *[Layer("layers", ATTENTION, EXPERTS)] * 2]
DENSE = {"model.layers": FIRST}
STAGES = DENSE | {"parallel.pipeline": 2, "parallel.num_microbatches": 2}
LORA = {"lora.rank": 2, "lora.targets": ("q_proj",)}
NO_EXPERTS = {FF: GLU}
RECORD = {"run.record_routing": (1, 3)}
MORE = dataclasses.replace(EXPERTS, experts_per_token=EXPERTS.experts_per_token + 1)
TWO_KINDS = {"model.layers": [Layer("one", ATTENTION, EXPERTS), Layer("more", ATTENTION, MORE)]}
WIDE = Experts(expert=Glu(32), num_experts=4, experts_per_token=2)
FLOAT8 = {"compute.matmul_dtype": "float8", "model.d_model": 32, FF: WIDE} | {
    "model.layers.mixer.num_heads": 8,
    "model.layers.mixer.num_kv_heads": 8,
}

CASES = [
    ({f"{FF}.router.scale": NAN}, "router.scale = nan: must be finite.*router.scale 1.0"),
    ({f"{FF}.router.scale": INF}, "router.scale = inf: must be finite"),
    ({f"{FF}.router.scale": 0.0}, "router.scale = 0.0: must be above 0"),
    ({f"{FF}.router.scale": -1.0}, "router.scale = -1.0: must be above 0"),
    ({GROUPS: 5}, "num_experts = 4: must be divisible by router.groups = 5.*ts 5, or .*groups 1"),
    ({GROUPS: 3}, "num_experts = 4: must be divisible by router.groups = 3.*ts 6, or .*groups 1"),
    ({GROUPS: 0}, "router.groups = 0: must be at least 1"),
    ({GROUPS: -2}, "router.groups = -2: must be at least 1"),
    ({PER_TOKEN: 0}, "groups_per_token = 0: must be at least 1"),
    ({PER_TOKEN: 2}, "groups_per_token = 2: must be at most router.groups = 1"),
    ({GROUPS: 2, K: 3}, "experts_per_token = 3: must be at most 2, the experts to choose from"),
    ({GROUPS: 4}, "experts_per_token = 2: must be at most 1, the experts to choose from"),
    ({K: -1}, "experts_per_token = -1: must be at least 1"),
    ({K: 0}, "experts_per_token = 0: must be at least 1"),
    ({K: 5}, "experts_per_token = 5: must be at most 4, the experts to choose from.*use --mo"),
    ({f"{FF}.num_experts": 10**9}, "num_experts = 1000000000: must be at most 65,536"),
    ({f"{FF}.num_experts": 2.5}, "num_experts = 2.5: must be a whole number"),
    ({f"{FF}.num_experts": -1}, "num_experts = -1: must be at least 1"),
    ({f"{FF}.num_shared_experts": 10**9}, "num_shared_experts = 1000000000: must be at most"),
    ({f"{FF}.num_shared_experts": -1}, "shared_experts = -1: must not be negative"),
    ({f"{FF}.router.balancing_bias": "yes"}, "bias = 'yes': must be True or False"),
    ({f"{FF}.router.score": "relu"}, "router.score = 'relu': must be one of softmax, sigmoid"),
    ({"train.balance_loss": NAN}, "balance_loss = nan: must be finite"),
    ({"train.balance_loss": INF}, "balance_loss = inf: must be finite"),
    ({"train.balance_loss": -0.1}, "balance_loss = -0.1: must not be negative"),
    ({"train.balance_over": "token"}, "balance_over = 'token': must be one of sequence, batch"),
    ({"train.balance_over": "batch"}, "balance_over = 'batch': needs a balance loss"),
    ({"train.router_z_loss": -1.0}, "router_z_loss = -1.0: must not be negative"),
    ({"train.router_z_loss": NAN}, "router_z_loss = nan: must be finite"),
    ({"train.router_bias_rate": NAN}, "router_bias_rate = nan: must be finite"),
    ({"train.router_bias_rate": -0.1}, "bias_rate = -0.1: must be above 0.*rate 0.001"),
    ({"train.router_bias_rate": 0.1}, f"bias_rate = 0.1: needs {FF}.router.balancing_bias, wh"),
    (BIAS | {"train.router_bias_rate": -0.1}, "bias_rate = -0.1: must be above 0.*rate 0.001"),
    (BIAS | {"train.router_bias_rate": 0.0}, "rate = 0.0: must be above 0"),
    (
        LORA | {"train.router_z_loss": 0.1},
        "z_loss = 0.1: is not supported with lora.rank = 2: the router",
    ),
    (
        LORA | {"train.balance_loss": 0.1},
        "balance_loss = 0.1: is not supported with lora.rank = 2: the router is frozen",
    ),
    (LORA | {"lora.targets": ("up_proj",)}, "'up_proj': must be .*; experts have no adapters"),
    (
        {f"{FF}.expert.bias": True} | LORA | {"lora.targets": ("gate_proj",)},
        "lora.targets = 'gate_proj': must be names from q_proj, .*; experts have no adapters",
    ),
    ({"parallel.expert": 0}, "parallel.expert = 0: must be at least 1"),
    (
        {"parallel.expert": 3, f"{FF}.num_experts": 6},
        "d_model = 16: must be divisible by parallel.expert = 3",
    ),
    (
        {"parallel.expert": 4, "train.global_batch_size": 6},
        "batch_size = 6: must be divisible by p",
    ),
    ({"parallel.expert": 8}, r"num_experts = 4: must be divisible by parallel\.expert = 8"),
    ({f"{FF}.expert.d_ff": 13, "parallel.tensor": 2}, "d_ff = 13: must be divisible by parallel.t"),
    (NO_EXPERTS | {"train.router_z_loss": 0.1}, "router_z_loss = 0.1: needs experts, but no lay"),
    (NO_EXPERTS | {"train.balance_over": "batch"}, "balance_over = 'batch': needs experts"),
    (NO_EXPERTS | {"train.balance_loss": 0.1}, "balance_loss = 0.1: needs experts"),
    (
        DENSE | {"model.dense_layers.feed_forward.d_ff": 9, "parallel.tensor": 2},
        "dense_layers.feed_forward.d_ff = 9: must be divisible by parallel.tensor = 2.*d-ff 10",
    ),
    (
        STAGES | {"parallel.pipeline": 4},
        "num_layers = 3: must be at least 5: 1 layer for each of 4 stages.*and the 1 before those",
    ),
    (
        STAGES | {"parallel.layers_per_stage": (2, 1)},
        "per_stage = '2,1': must add up to 2, the layers after the first 1, which .* not to 3",
    ),
    (
        STAGES | {"compute.matmul_dtype": "float8"},
        "'float8': is not supported with model.layers = .*before the stages are not",
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
        "expert_dispatch = 'rows': needs experts, but no layer has any",
    ),
    ({"parallel.expert_slack": 0.0}, r"expert_slack = 0\.0: must be above 0"),
    ({"parallel.expert_slack": -1.0}, r"expert_slack = -1\.0: must be above 0"),
    ({"model.layers.mixer.qk_norm.over": "heads"}, "over = 'heads': must be one of head, all"),
    ({K: 1}, r"= 1: leaves the router without a gradient.*router.normalize False"),
    (
        {K: 1, f"{FF}.router.normalize": False, "model.layers.norms": "around"},
        r"= 1: leaves the router without a gradient: the norm after.*layers.norms before",
    ),
    ({f"{FF}.shared_expert_gate": True}, "gate = True: needs num_shared_experts, which is 0"),
    ({f"{ACTIVATION}": "swiglu"}, "activation = 'swiglu': must be one of silu, gelu, gelu_ex"),
    ({f"{ACTIVATION}": ClampedSwiglu(limit=0.0)}, "activation.limit = 0.0: must be above 0"),
    ({f"{ACTIVATION}": ClampedSwiglu(limit=-7.0)}, "activation.limit = -7.0: must be above 0"),
    ({f"{ACTIVATION}": ClampedSwiglu(limit=INF)}, "activation.limit = inf: must be finite"),
    ({f"{ACTIVATION}": ClampedSwiglu(alpha=0.0)}, "activation.alpha = 0.0: must be above 0"),
    (
        {f"{FF}.expert": Mlp(24, activation=ClampedSwiglu())},
        "expert.activation = .*ClampedSwiglu.*: must be one of silu, .* in Mlp",
    ),
    (
        FLOAT8 | {f"{FF}.expert.d_ff": 24},
        "expert.d_ff = 24: makes 24 of w_gate on a device, .*divisible by 16.*float8.*d-ff 32",
    ),
    (
        FLOAT8 | {"parallel.tensor": 4},
        "expert.d_ff = 32: makes 8 of w_gate on a device, .*divisible by 16.*float8.*d-ff 64",
    ),
    (
        FLOAT8 | {"parallel.gather_dtype": "float8", "parallel.zero": 1},
        "gather_dtype = 'float8': is not supported with parallel.zero = 1.*-dtype compute",
    ),
    (RECORD | TWO_KINDS, "record_routing = '1,3': needs layers with equal numbers of experts"),
    (RECORD | NO_EXPERTS, "record_routing = '1,3': needs experts.*--run.record-routing ''"),
    (
        RECORD | LORA,
        "routing = '1,3': is not supported with lora.rank = 2: the router",
    ),
    (
        {"run.record_routing": "first"},
        "= 'first': must be a list of whole numbers",
    ),
    ({"run.record_routing": (5, 0)}, r"record_routing\[1\] = 0: must be at least 1.*routing 5,1"),
    (RECORD | {"train.num_steps": 2}, "= '1,3': must name steps of.*routing 2, or.*steps 3"),
    (
        {"run.record_routing": tuple(range(1, 102))},
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
    check(CONFIG)
    check(replace(CONFIG, **DENSE, **{"model.dense_layers.feed_forward.d_ff": 40}))
    check(replace(CONFIG, **{"model.layers.mixer.qk_norm.over": "all"}))


@pytest.mark.parametrize(("values", "said"), CASES, ids=[said[:30] for _, said in CASES])
def test_one_error_whose_fixes_work(values, said):
    bad = CONFIG
    with pytest.raises(ConfigError, match=said) as caught:
        bad = replace(CONFIG, **values)  # which refuses values of another type in layers
        check(bad)
    (error, *_) = (one for one in errors_of(caught.value) if re.search(said, str(one)))
    assert str(error).startswith(f"{error.field} = {shown(error.value)}: {error.rule}. Fix: use --")
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
