"""Check a config against every rule, before any device or file is used.

`check` applies the rules that need no device; `resolve` applies all rules. Both raise one
`ConfigError` for all broken rules. A fix is a command-line option, or alternatives joined by
", or", each of which was tried (`explain.py`). Rules are small functions, one per topic;
combinations are one table, `incompatible.py`, and so is divisibility, `rules/divisibility.py`.
"""

from jaxpar.config import Config
from jaxpar.config.explain import Rule, collected, explained
from jaxpar.config.incompatible import combinations
from jaxpar.config.lists.step_sizes import fill_shares
from jaxpar.config.resolve import (
    cast_once,
    fill_batch,
    fill_data_axis,
    fill_deterministic,
    fill_microbatches,
    fill_steps,
)
from jaxpar.config.rules.components import (
    before_stages,
    float8_of_components,
    of_components,
    recurrences,
)
from jaxpar.config.rules.data import data, schedules, sizes_of_steps
from jaxpar.config.rules.diloco import diloco
from jaxpar.config.rules.divisibility import divisibility
from jaxpar.config.rules.experts import experts
from jaxpar.config.rules.guard import guards
from jaxpar.config.rules.items import items
from jaxpar.config.rules.layout import (
    compressed_sums,
    enough_microbatches,
    interleaving,
    layers,
)
from jaxpar.config.rules.lora import lora
from jaxpar.config.rules.memory import (
    blocks_of_moments,
    moments,
    offloaded_masters,
    remat,
)
from jaxpar.config.rules.metrics import sinks
from jaxpar.config.rules.model import (
    attention,
    float8_matmuls,
    mup,
    of_stream,
    vocabulary,
)
from jaxpar.config.rules.numbers import numbers
from jaxpar.config.rules.objectives.mtp import multi_token_prediction
from jaxpar.config.rules.run import (
    best,
    evaluation,
    initial_weights,
    own_values,
    places,
    profile,
    saving,
    schedule,
)
from jaxpar.config.rules.type_check import wrong_sections, wrong_types

#: Rules that the others build on: they are checked first.
_BASIC = (
    vocabulary,
    places,
    initial_weights,
    data,
    schedules,
    schedule,
    moments,
    offloaded_masters,
    of_stream,
    float8_matmuls,
    attention,
    before_stages,
    recurrences,
    layers,
)
_RULES: tuple[Rule, ...] = (
    of_components,
    combinations,
    *(remat, saving, guards, profile, sinks, interleaving, compressed_sums),
    *(experts, lora, mup, multi_token_prediction),
    *(evaluation, best, diloco, own_values),
)
_OF_MESH = (float8_of_components, divisibility, blocks_of_moments, enough_microbatches)


def resolve(cfg: Config, num_devices: int, *, explain: bool = True) -> Config:
    """Check every rule and fill in `train.global_batch_size` for `train.global_batch_tokens`,
    `train.num_steps` for `train.num_tokens`, `parallel.data = -1`, ZeRO-1 if weights are not
    sharded, and the number of microbatches for `train.micro_batch_size`; deterministic attention
    for `run.deterministic`; and the shares of steps in a learning rate by tokens.

    Args:
        num_devices: devices in the mesh, over all processes.
        explain: collect all broken rules. False: raise the first one, without trying its fixes, for
            programs that try many configs.
    Returns:  a config whose mesh axes multiply to num_devices.
    Raises:   ConfigError for the broken rules.
    """
    if not explain:
        return _resolved(cfg, num_devices)
    collected((wrong_sections,), cfg)
    return explained(_resolved, cfg, num_devices)


def check(cfg: Config) -> None:
    """Check every rule that needs no device, so that programs can fail before JAX starts.

    Raises:   ConfigError for the broken rules.
    """
    collected((wrong_sections,), cfg)
    explained(_checked, cfg, 0)


def _resolved(cfg: Config, num_devices: int) -> Config:
    collected((wrong_types,), cfg)
    cfg = fill_steps(fill_batch(cfg))
    _each_rule(cfg)
    cfg = fill_microbatches(fill_data_axis(fill_deterministic(cfg), num_devices))
    _of_mesh(cfg)
    sizes_of_steps(cfg, _every_rule)
    cfg = fill_shares(cfg)
    return cast_once(cfg)


def _checked(cfg: Config, _: int) -> Config:
    collected((wrong_types,), cfg)
    cfg = fill_batch(cfg)
    _each_rule(fill_steps(cfg))
    if cfg.train.micro_batch_size:  # the devices decide the number of microbatches
        collected((float8_of_components,), cfg)
        return cfg
    _of_mesh(cfg)
    if not cfg.parallel.auto:  # otherwise the planner does
        sizes_of_steps(cfg, _every_rule)
    return cfg


def _every_rule(cfg: Config) -> None:
    _each_rule(cfg)
    _of_mesh(cfg)


def _of_mesh(cfg: Config) -> None:
    for stage in ((of_components,), _OF_MESH):  # a size of components often breaks both
        collected(stage, cfg)


def _each_rule(cfg: Config) -> None:
    for stage in ((numbers, items), _BASIC, _RULES):
        collected(stage, cfg)
