"""Fields of composed models that cannot be are refused, by their addresses, with a fix."""

import shlex

import pytest

from jaxpar.config import Config, ConfigError
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.config_file import load_config
from jaxpar.config.explain import errors_of, fixes_of, options_in
from jaxpar.config.validate import check

MIXER, FORWARD = "--model.layers.mixer", "--model.layers.feed-forward"
ROPE = f"{MIXER}.rope"
YARN = f"{ROPE}.scaling.kind yarn"
LONG = f"{ROPE}.scaling.kind longrope"
ONES = ",".join(["1.0"] * 16)

#: A config, options, and the beginning of each error that they are.
CASES = [
    ("quickstart", f"{MIXER}.num-heads 7", ["num_heads = 7: must be divisible by num_kv_heads"]),
    ("quickstart", f"{MIXER}.head-dim 7", ["head_dim = 7: must be even"]),
    (
        "quickstart",
        f"{MIXER}.scale 0.5 --model.layers.mixer.scale-dim 3",
        ["scale = 0.5: replaces the factor of scores that scale_dim = 3 gives"],
    ),
    ("quickstart", f"{MIXER}.scale 0.0", ["scale = 0.0: must be above 0"]),
    ("quickstart", f"{MIXER}.scale nan", ["scale = nan: must be finite"]),
    ("quickstart", f"{MIXER}.window 1", ["window = 1: must be at least 2"]),
    ("quickstart", f"{MIXER}.chunk 1", ["chunk = 1: must be at least 2"]),
    ("quickstart", f"{MIXER}.chunk 8 {MIXER}.window 8", ["chunk = 8: replaces a sliding window"]),
    ("quickstart", f"{MIXER}.softcap -1.0", ["softcap = -1.0: must be above 0"]),
    ("quickstart", f"{ROPE}.fraction 0.0", ["rope.fraction = 0.0: must be above 0 and at most 1"]),
    ("quickstart", f"{ROPE}.fraction 0.1", ["rope.fraction = 0.1: rotates 3 of head_dim = 32"]),
    (
        "quickstart",
        f"{MIXER}.qk-norm.over all {MIXER}.qk-norm.gain False",
        ["qk_norm.over = 'all': needs a gain"],
    ),
    ("quickstart", f"{ROPE}.scaling.factor 0.5", ["scaling.factor = 0.5: must be at least 1"]),
    ("quickstart", f"{ROPE}.scaling.turning 0.5", ["turning = 0.5: needs kind proportional"]),
    ("quickstart", f"{ROPE}.scaling.low-freq-factor 8", ["low_freq_factor = 8.0: must be at most"]),
    ("quickstart", f"{ROPE}.scaling.low-freq-factor 0", ["low_freq_factor = 0.0: must be above 0"]),
    ("quickstart", f"{YARN} {ROPE}.scaling.beta-slow 40", ["beta_slow = 40.0: must be at most"]),
    ("quickstart", f"{YARN} {ROPE}.theta 1", ["rope.theta = 1.0: must be above 1"]),
    ("quickstart", f"{YARN} {ROPE}.scaling.mscale-all-dim 1", ["mscale_all_dim = 1.0: needs lat"]),
    (
        "quickstart",
        LONG,
        ["short_factors = '': must be 16 numbers", "long_factors = '': must be 16 numbers"],
    ),
    (
        "quickstart",
        f"{LONG} {ROPE}.scaling.short-factors {ONES} {ROPE}.scaling.long-factors {ONES} "
        f"{ROPE}.scaling.original-max-position 1",
        ["original_max_position = 1: must be at least 2"],
    ),
    ("quickstart", f"{FORWARD}.activation gelu_exact", ["activation = 'gelu_exact': must be one"]),
    ("quickstart", f"{FORWARD}.activation tanh", []),
    (
        "quickstart",
        "--model.layers.norms around --model.norm.kind layer",
        ["norms = 'around': must be before with norm = layer"],
    ),
    (
        "quickstart",
        "--model.layers.norms after --model.layers.parallel one_norm",
        ["parallel = 'one_norm': needs a norm before the branches"],
    ),
    (
        "quickstart",
        "--model.norm.offset True --model.norm.kind layer",
        ["offset = True: needs"],
    ),
    (
        "quickstart",
        "--model.layers.mixer.bias True --model.layers.mixer.keys-as-values True",
        ["bias = True: is not supported with keys_as_values"],
    ),
    ("quickstart", "--model.logits-softcap 0.0", ["logits_softcap = 0.0: must be above 0"]),
    (
        "nemotron_h_8b",
        "--model.mlp_layers.parallel one_norm",
        ["mlp_layers.parallel = 'one_norm': needs a mixer and a feed-forward, of which one is"],
    ),
    (
        "llama4_scout",
        "--model.global-layers.mixer.growth.beta -0.1",
        ["growth.beta = -0.1: must not be negative"],
    ),
    (
        "gemma_4/31b",
        "--model.global-layers.mixer.head-dim 15",
        ["model.global_layers.mixer.head_dim = 15: must be even"],
    ),
    (
        "gemma_4/31b",
        "--model.global-layers.mixer.num-kv-heads 3",
        ["global_layers.mixer.num_heads = 32: must be divisible by num_kv_heads = 3"],
    ),
    (
        "gemma_4/31b",
        "--model.global-layers.mixer.rope.scaling.kind linear",
        ["global_layers.mixer.rope.scaling.turning = 0.25: needs kind proportional, not linear"],
    ),
    ("nemotron_h_8b", "--model.mamba_layers.scaled True", ["scaled = True: needs a feed-forward"]),
    (
        "llama4_scout",
        "--model.global-layers.mixer.rope.theta 1000",
        ["growth = QueryGrowth(beta=0.1, span=8192): is for layers without a rotary embedding"],
    ),
    (
        "quickstart_moe",
        f"{FORWARD}.experts-per-token 1",
        ["experts_per_token = 1: leaves the router without a gradient"],
    ),
    (
        "quickstart_moe",
        f"{FORWARD}.experts-per-token 1 {FORWARD}.router.normalize False "
        "--model.layers.norms after",
        ["experts_per_token = 1: leaves the router without a gradient: the norm after"],
    ),
    ("quickstart_moe", f"{FORWARD}.experts-per-token 99", ["experts_per_token = 99: must be at"]),
    ("quickstart_moe", f"{FORWARD}.router.groups 3", ["num_experts = 8: must be divisible by"]),
    (
        "quickstart_moe",
        f"{FORWARD}.router.groups-per-token 3",
        ["groups_per_token = 3: must be at most router.groups = 1"],
    ),
    (
        "quickstart_moe",
        f"{FORWARD}.router.scales-input True",
        ["router.scales_input = True: needs experts_per_token 1, not 2"],
    ),
    (
        "quickstart_moe",
        f"{FORWARD}.shared-expert-gate True",
        ["shared_expert_gate = True: needs num_shared_experts"],
    ),
    (
        "quickstart_moe",
        f"{FORWARD}.expert.activation relu_squared",
        ["expert.activation = 'relu_squared': must be one of silu, gelu in Glu"],
    ),
    (
        "mixtral_8x7b",
        "--train.router-bias-rate 0.1",
        ["bias_rate = 0.1: needs model.layers"],
    ),
    ("quickstart", "--train.balance-loss 0.1", ["balance_loss = 0.1: needs experts, but no layer"]),
    ("moonlight_16b_a3b", f"{MIXER}.v-head-dim 4000", ["v_head_dim = 4000: must be at most"]),
    ("moonlight_16b_a3b", f"{MIXER}.qk-rope-head-dim 63", ["qk_rope_head_dim = 63: must be even"]),
    ("moonlight_16b_a3b", f"{ROPE}.fraction 0.5", ["rope.fraction = 0.5: must be 1"]),
    (
        "moonlight_16b_a3b",
        f"{YARN} {ROPE}.scaling.query-beta 0.1",
        ["rope.scaling.query_beta = 0.1: must be 0"],
    ),
    (
        "quickstart",
        f"--compute.attention-backend cudnn --compute.dtype bfloat16 {MIXER}.head-dim 12",
        ["mixer.head_dim = 12: must be a multiple of 8 up to 256"],
    ),
    (
        "gemma_4/31b",
        "--compute.attention-backend triton",
        ["model.global_layers.mixer.head_dim = 512: must be a multiple of 16 up to 256"],
    ),
    (
        "quickstart",
        f"--compute.matmul-dtype float8 {FORWARD}.d-ff 380",
        ["feed_forward.d_ff = 380: makes 380 of w_gate on a device, which must be divisible by 16"],
    ),
    (
        "quickstart",
        f"--compute.matmul-dtype float8 {MIXER}.head-dim 12 {MIXER}.num-kv-heads 1",
        ["num_heads = 4: makes 72 of wq on a device"],
    ),
    ("quickstart", "--compute.recurrent-backend triton", ["= 'triton': needs a recurrent layer"]),
    (
        "quickstart_hybrid",
        "--compute.recurrent-backend triton --compute.dtype bfloat16",
        [
            "key_head_dim = 16: must be 64 or 128 for compute.recurrent_backend = triton",
            "value_head_dim = 16: must be a multiple of 64",
        ],
    ),
    ("quickstart_hybrid", "--data.seq-len 2", ["conv_kernel_size = 4: must be at most 3"]),
]


@pytest.mark.parametrize(("name", "options", "said"), CASES)
@pytest.mark.parametrize("micro_batch", [0, 1])
def test_one_error_with_a_fix(name, options, said, micro_batch):
    """With fixed microbatches too, whose number the devices decide."""
    cfg = load_config(name)
    words = [*shlex.split(options), *["--train.micro-batch-size", "1"] * micro_batch]
    if not said:  # of the type
        with pytest.raises(ConfigError, match=r"must be one of silu, .*activation silu"):
            parse_overrides(cfg, words)
        return
    broken = parse_overrides(cfg, words)
    with pytest.raises(ConfigError) as caught:
        check(broken)
    errors = errors_of(caught.value)
    assert len(errors) == len(said)
    for error, text in zip(errors, said, strict=True):
        assert text in str(error)
        assert fixes_of(error), error
    for fix in fixes_of(errors[0]):
        check(_fixed(broken, [fix, *(fixes_of(one)[0] for one in errors[1:])]))


def _fixed(cfg: Config, fixes: list[str]) -> Config:
    for fix in fixes:
        cfg = parse_overrides(cfg, options_in(fix))
    return cfg


def test_all_layers_get_the_bias_of_their_routers():
    cfg = parse_overrides(load_config("deepseek_v2_lite"), ["--train.router-bias-rate", "0.1"])
    with pytest.raises(ConfigError) as caught:
        check(cfg)
    for fix in fixes_of(caught.value):
        check(_fixed(cfg, [fix]))


def test_activation_on_a_command_line():
    of_gelu = parse_overrides(load_config("quickstart"), [f"{FORWARD}.activation", "gelu"])
    check(of_gelu)
    assert of_gelu.model.layers[0].feed_forward.activation == "gelu"
