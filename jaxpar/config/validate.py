"""Check a config against every rule, before any device or file is used.

`check` applies the rules that need no device; `resolve` applies all rules. Both raise `ConfigError`
for the first broken rule. Its fix is a command-line option, or alternatives joined by ", or", each
of which satisfies the rule. Rules are small functions, one per topic; the divisibility rules are
one table, `rules/divisibility.py`.
"""

from jaxpar.config import Config
from jaxpar.config.features import of_features
from jaxpar.config.lists.shares import fill_shares
from jaxpar.config.resolve import (
    cast_once,
    fill_batch,
    fill_data_axis,
    fill_deterministic,
    fill_microbatches,
    fill_steps,
)
from jaxpar.config.rules.composed import components_divide, composed
from jaxpar.config.rules.data import data, schedules, sizes_of_steps
from jaxpar.config.rules.divisibility import divisibility
from jaxpar.config.rules.experts import experts
from jaxpar.config.rules.guard import guards
from jaxpar.config.rules.latent_attention import latent_attention
from jaxpar.config.rules.layer_pattern import layer_pattern
from jaxpar.config.rules.layout import (
    automatic,
    compressed_sums,
    interleaving,
    layers,
    turns,
)
from jaxpar.config.rules.lora import lora
from jaxpar.config.rules.memory import (
    blocks_of_moments,
    moments,
    offloaded_masters,
    offloaded_moments,
    remat,
)
from jaxpar.config.rules.metrics import metrics_of_layers, sinks
from jaxpar.config.rules.model import (
    activation,
    attention,
    attention_function,
    block,
    factors,
    float8_matmuls,
    layer_kinds,
    model,
    vocabulary,
)
from jaxpar.config.rules.mup import mup
from jaxpar.config.rules.numbers import numbers
from jaxpar.config.rules.objectives.distillation import distillation
from jaxpar.config.rules.objectives.dpo import dpo
from jaxpar.config.rules.objectives.mtp import multi_token_prediction
from jaxpar.config.rules.parallel.diloco import diloco
from jaxpar.config.rules.parallel.zero_bubble import enough_microbatches, zero_bubble
from jaxpar.config.rules.rope import rope
from jaxpar.config.rules.run import (
    best,
    evaluation,
    initial_weights,
    places,
    profile,
    saving,
    schedule,
)
from jaxpar.config.rules.type_check import check_types
from jaxpar.config.rules.values import own_values


def resolve(cfg: Config, num_devices: int) -> Config:
    """Check every rule and fill in `train.global_batch_size` for `train.global_batch_tokens`,
    `train.num_steps` for `train.num_tokens`, `parallel.data = -1`, ZeRO-1 if weights are not
    sharded, and the number of microbatches for `train.micro_batch_size`; deterministic attention
    for `run.deterministic`; and the shares of steps in a learning rate by tokens.

    Args:     num_devices: devices in the mesh, over all processes.
    Returns:  a config whose mesh axes multiply to num_devices.
    Raises:   ConfigError for the first broken rule.
    """
    check_types(cfg)
    cfg = fill_steps(fill_batch(cfg))
    _each_rule(cfg)
    cfg = fill_microbatches(fill_data_axis(fill_deterministic(cfg), num_devices))
    _divides(cfg)
    sizes_of_steps(cfg, _every_rule)
    cfg = fill_shares(cfg)
    return cast_once(cfg)


def check(cfg: Config) -> None:
    """Check every rule that needs no device, so that programs can fail before JAX starts.

    Raises:   ConfigError for the first broken rule.
    """
    check_types(cfg)
    cfg = fill_batch(cfg)
    _each_rule(fill_steps(cfg))
    if cfg.train.micro_batch_size:  # the devices decide the number of microbatches
        return
    _divides(cfg)
    if not cfg.parallel.auto:  # otherwise the planner does
        sizes_of_steps(cfg, _every_rule)


def _every_rule(cfg: Config) -> None:
    _each_rule(cfg)
    _divides(cfg)


def _divides(cfg: Config) -> None:
    components_divide(cfg)
    divisibility(cfg)
    blocks_of_moments(cfg)
    enough_microbatches(cfg)


def _each_rule(cfg: Config) -> None:
    first = (
        numbers,
        vocabulary,
        places,
        initial_weights,
        data,
        schedules,
        schedule,
        moments,
        offloaded_moments,
        offloaded_masters,
        latent_attention,
        rope,
        model,
        activation,
        block,
        factors,
        float8_matmuls,
        attention,
        composed,
        layer_pattern,
        layers,
    )
    others = (remat, saving, guards, profile, sinks, interleaving, turns, zero_bubble, automatic)
    of_links = (compressed_sums, metrics_of_layers)
    of_models = (experts, layer_kinds, attention_function, lora, mup, multi_token_prediction)
    objectives = (evaluation, best, dpo, distillation, of_features, diloco, own_values)
    for rule in first + others + of_links + of_models + objectives:
        rule(cfg)
