"""What cannot be combined, and why: one table, which `validate.py` checks.

`jaxpar --help combinations` shows it (`reference.py`). A row whose conditions both hold is one
error, which names the first, and fixes that end either.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxpar.components.attention import Attention
from jaxpar.components.experts import Experts
from jaxpar.components.feed_forward import Mlp
from jaxpar.components.latent_attention import LatentAttention
from jaxpar.components.model import Layer
from jaxpar.components.recurrent import KimiDeltaAttention, Recurrent
from jaxpar.config import Config, ConfigError
from jaxpar.config.condition import (
    Condition,
    both,
    changed,
    enabled,
    equal,
    of_model,
    some_layer,
    unequal,
    where,
)
from jaxpar.config.features import DECLARATIONS
from jaxpar.config.fields import refused
from jaxpar.config.layout.layer_split import layers_before_stages
from jaxpar.config.remat_policies import names_on_host
from jaxpar.config.schema.features import objectives

# ------------------------------------------------------------------------------- parts of a model


def _attention(label: str, field: str, plain: Any) -> Condition:
    """Some attention has another value than `plain` of a field."""

    def holds(layer: Layer) -> bool:
        return isinstance(layer.mixer, Attention) and getattr(layer.mixer, field) != plain

    return some_layer(label, f"mixer.{field}", holds, plain)


def _numbers_of_heads(cfg: Config) -> set[int]:
    heads = (layer.mixer and layer.mixer.attention_heads for layer in cfg.model.layers)
    return {of.queries for of in heads if of}


EXPERTS = some_layer(
    "experts",
    "feed_forward",
    lambda layer: isinstance(layer.feed_forward, Experts),
)
UNGATED_EXPERTS = some_layer(
    "experts without a gate",
    "feed_forward.expert",
    lambda one: isinstance(one.feed_forward, Experts) and isinstance(one.feed_forward.expert, Mlp),
)
EXPERT_BIAS = some_layer(
    "biases of experts",
    "feed_forward.expert.bias",
    lambda one: isinstance(one.feed_forward, Experts) and one.feed_forward.expert.bias,
    False,
)
BEFORE_STAGES = of_model(
    "layers before the stages of a pipeline",
    lambda cfg: layers_before_stages(cfg.model, cfg.parallel) > 0,
)
LATENT = some_layer(
    "latent attention",
    "mixer",
    lambda layer: isinstance(layer.mixer, LatentAttention),
)
RECURRENT = some_layer(
    "recurrent layers",
    "mixer",
    lambda layer: layer.mixer is not None and layer.mixer.recurrent,
)
KIMI_DELTA = some_layer(
    "Kimi Delta Attention",
    "mixer",
    lambda layer: isinstance(layer.mixer, KimiDeltaAttention),
)
LAST_RECURRENT = of_model(
    "a recurrent last layer",
    lambda cfg: isinstance(cfg.model.layers[-1].mixer, Recurrent),
)
SEVERAL_STACKS = of_model(
    "layers of several names, dense ones included",
    lambda cfg: len(cfg.model.stacks) > 1,
)
SEVERAL_IN_LIST = of_model("a list of layers that differ", lambda cfg: len(cfg.model.distinct) > 1)
QK_NORM = _attention("a norm of queries and keys", "qk_norm", None)
CHUNKED = some_layer(
    "attention within chunks",
    "mixer.chunk",
    lambda one: isinstance(one.mixer, Attention | LatentAttention) and one.mixer.chunk is not None,
    None,
)
SOFTCAP = _attention("a cap of scores", "softcap", None)
SINKS = _attention("attention sinks", "sinks", False)
USER_HEADS = some_layer(
    "attention with another method `heads`",
    "mixer",
    lambda one: isinstance(one.mixer, Attention) and one.mixer.has_own_heads,
)
DIFFERENT_HEADS = of_model(
    "layers with different numbers of heads",
    lambda cfg: len(_numbers_of_heads(cfg)) > 1,
)
SCALED_LAYERS = some_layer("scaled layers", "scaled", lambda layer: layer.scaled, False)
PARALLEL_BLOCK = some_layer("parallel blocks", "parallel", lambda one: one.parallel != "", "")

# ------------------------------------------------------------------------------ fields of a config

#: Update rules with a learning rate for each width (`optimizer/widths.py`).
_RATES_BY_WIDTH = ("adamw", "lion", "adafactor", "muon")


def _needs_matrices(rule: Any) -> bool:
    return rule in ("muon", "adafactor") or getattr(rule, "needs", "") == "matrices"


LORA, MTP, MUP = enabled("lora"), changed("model.mtp_depth"), enabled("model.mup")
LOSS, PROBES = changed("train.loss"), changed("train.probes")
POST_UPDATES, SOURCE = changed("train.post_updates"), changed("data.source")
OWN_SCHEDULE = where(
    "a `Schedule` of a user", "optimizer.schedule", lambda held: not isinstance(held, str)
)
Z_LOSS, Z_LOSS_SCHEDULE = changed("train.z_loss"), changed("train.z_loss_schedule")
BATCHES, LENGTHS = changed("train.batch_schedule"), changed("data.length_schedule")
EPOCHS, MIXTURE = changed("train.num_epochs"), changed("data.mixture")
DILOCO = enabled("diloco")
MOMENTS_ON_HOST = changed("optimizer.offload")
MASTERS_ON_HOST = changed("optimizer.offload_masters")
LAYER_METRICS, ROUTING = changed("metrics.layers"), changed("run.record_routing")
PIPELINE, SEQUENCE = changed("parallel.pipeline"), changed("parallel.sequence")
VIRTUAL_STAGES = changed("parallel.virtual_stages")
SCAN = equal("parallel.layer_loop", "scan", better="unroll")
UNROLL = equal("parallel.layer_loop", "unroll")
ROW_GROUPS, REMAT_GROUP = changed("parallel.row_groups"), changed("parallel.remat_group")
FLOAT8 = changed("compute.matmul_dtype")
FLOAT16 = equal("compute.dtype", "float16", better="bfloat16")
LEARNED_POSITIONS, LAYER_NORM = changed("model.max_positions"), changed("model.norm.kind")
ZERO_BUBBLE = both(equal("parallel.schedule", "zero_bubble"), PIPELINE)
RING = both(equal("parallel.context", "ring"), SEQUENCE)
BACKEND = "compute.attention_backend"
_KERNELS = equal(BACKEND, "cudnn", "pallas_hopper", "triton")
_FIRST_IN_BLOCKS, _SECOND_IN_BLOCKS = (
    equal(f"optimizer.{moment}_moment_dtype", "8bit", better="bfloat16")
    for moment in ("first", "second")
)
TRITON_RECURRENCE = equal("compute.recurrent_backend", "triton")


class Incompatible(NamedTuple):
    """Two conditions that may not both hold."""

    one: Condition
    """Errors name its field."""
    other: Condition
    why: str
    """A clause."""


_ROW = Incompatible
_UNVERIFIED = "the combination is not verified"

_OF_ALL: tuple[Incompatible, ...] = (
    # Objectives
    _ROW(Z_LOSS, LOSS, "it is a term of the default loss: add one of scores.logsumexp() to yours"),
    _ROW(Z_LOSS_SCHEDULE, LOSS, "it is a term of the default loss"),
    _ROW(Z_LOSS, Z_LOSS_SCHEDULE, "the schedule replaces it"),
    _ROW(changed("train.mtp_loss"), changed("train.mtp_loss_schedule"), "the schedule replaces it"),
    # Data and evaluation
    _ROW(EPOCHS, MIXTURE, "each source has its own passes"),
    _ROW(EPOCHS, changed("train.num_tokens"), "both set the length of the run"),
    _ROW(
        changed("evaluation.test"),
        both(equal("evaluation.split", "test"), changed("evaluation.every", 0)),
        "the test split has been evaluated before",
    ),
    _ROW(SOURCE, MIXTURE, "the source mixes by itself"),
    _ROW(SOURCE, LENGTHS, "its sequences have one length"),
    _ROW(SOURCE, EPOCHS, "the source has no epochs"),
    _ROW(changed("optimizer.decay_steps"), OWN_SCHEDULE, "it says itself when the rate falls"),
    # Adapters
    _ROW(LORA, MTP, "modules have no adapters"),
    _ROW(PROBES, LORA, "probes are among the trained weights of layers"),
    _ROW(LAYER_METRICS, LORA, "they measure weights that are trained"),
    _ROW(changed("train.balance_loss"), LORA, "the router is frozen"),
    _ROW(changed("train.router_z_loss"), LORA, "the router is frozen"),
    _ROW(ROUTING, LORA, "the router is frozen"),
    # Multi-token prediction
    _ROW(LAST_RECURRENT, MTP, "a module is as the last layer"),
    _ROW(changed("model.logits_scaling"), MTP, "modules read what the head reads, unscaled"),
    _ROW(SCALED_LAYERS, MTP, _UNVERIFIED),
    # µP
    _ROW(unequal("optimizer.name", *_RATES_BY_WIDTH), MUP, "it has no learning rate by width"),
    _ROW(RECURRENT, MUP, "µP's factors do not hold for them"),
    _ROW(changed("model.embed_scale"), MUP, "it grows with the width: use embedding_multiplier"),
    _ROW(MTP, MUP, "modules read hidden states unscaled"),
    _ROW(changed("model.mup.base_head_dim"), LATENT, "its scores have another factor"),
    # DiLoCo
    _ROW(changed("parallel.auto"), DILOCO, "replicas change what is computed"),
    _ROW(changed("parallel.replica_reduction"), DILOCO, "inner steps do not sum over replicas"),
    _ROW(VIRTUAL_STAGES, DILOCO, "layers are stored in another order"),
    _ROW(SEVERAL_STACKS, changed("diloco.fragments"), "layers are in several stacks"),
    _ROW(EXPERTS, DILOCO, "loads are balanced over all replicas"),
    _ROW(LORA, DILOCO, "replicas would share the frozen weights"),
    _ROW(LAYER_METRICS, DILOCO, "squares are summed over all replicas"),
    _ROW(MOMENTS_ON_HOST, DILOCO, "layers are updated without a dim of replicas"),
    _ROW(FLOAT16, DILOCO, "all replicas have one loss scale"),
    _ROW(equal("optimizer.name", "muon"), DILOCO, "all replicas share the work on matrices"),
    _ROW(_FIRST_IN_BLOCKS, DILOCO, "blocks have no dim of replicas"),
    _ROW(_SECOND_IN_BLOCKS, DILOCO, "blocks have no dim of replicas"),
    _ROW(POST_UPDATES, DILOCO, "replicas differ in their weights"),
    # Host memory
    _ROW(POST_UPDATES, MASTERS_ON_HOST, "the weights are in host memory"),
    _ROW(LAYER_METRICS, MASTERS_ON_HOST, "all weights are read after a step"),
    _ROW(LORA, MASTERS_ON_HOST, "frozen weights have no masters"),
    _ROW(
        where("`optimizer.name` for whole matrices", "optimizer.name", _needs_matrices),
        MOMENTS_ON_HOST,
        "one layer, or rows of a table, are updated at a time",
    ),
    # Layers and their loops
    _ROW(ROW_GROUPS, SCAN, "groups take turns in unrolled layers"),
    _ROW(changed("parallel.remat_layers"), SCAN, "a scan has one policy"),
    _ROW(REMAT_GROUP, UNROLL, "it groups layers of a scan"),
    _ROW(
        REMAT_GROUP,
        where("`parallel.remat` with host memory", "parallel.remat", names_on_host),
        "it saves nothing in host memory",
    ),
    _ROW(PARALLEL_BLOCK, ROW_GROUPS, "its branches do not wait for one another"),
    _ROW(SEVERAL_IN_LIST, REMAT_GROUP, "a scan's step has a period of layers"),
    *(
        _ROW(one, LATENT, _UNVERIFIED)
        for one in (LAYER_NORM, PARALLEL_BLOCK, LEARNED_POSITIONS, CHUNKED)
    ),
    *(_ROW(one, MTP, _UNVERIFIED) for one in (LAYER_NORM, LEARNED_POSITIONS)),
    # Pipelines
    _ROW(FLOAT8, BEFORE_STAGES, "layers before the stages are not rounded"),
    _ROW(VIRTUAL_STAGES, equal("parallel.schedule", "gpipe"), "it does not interleave stages"),
    _ROW(unequal("parallel.zero", 1), ZERO_BUBBLE, "stages choose by a branch, without gathers"),
    _ROW(SEQUENCE, ZERO_BUBBLE, "stages choose by a branch, without sends of keys and values"),
    _ROW(SCAN, ZERO_BUBBLE, "products are postponed by layer"),
    _ROW(FLOAT8, ZERO_BUBBLE, "postponed products are in the compute dtype"),
    _ROW(LORA, ZERO_BUBBLE, "frozen weights have no gradients to postpone"),
    _ROW(RECURRENT, ZERO_BUBBLE, "the backward of attention layers alone is split"),
    # Attention and precision
    _ROW(SINKS, USER_HEADS, "they are a term of the softmax"),
    _ROW(SOFTCAP, USER_HEADS, "it caps scores of the softmax"),
    _ROW(RING, USER_HEADS, "its function gets all keys"),
    _ROW(unequal(BACKEND, "auto", "reference"), USER_HEADS, "kernels compute the softmax"),
    _ROW(SOFTCAP, equal(BACKEND, "cudnn", "pallas_hopper"), "it cannot cap scores"),
    _ROW(_KERNELS, equal("compute.dtype", "float32", better="bfloat16"), "kernels have 16 bits"),
    _ROW(
        equal(BACKEND, "cudnn"),
        both(unequal("parallel.context", "ulysses"), SEQUENCE),
        "it needs tokens in order",
    ),
    _ROW(TRITON_RECURRENCE, unequal("compute.dtype", "bfloat16"), "its kernels need bfloat16"),
    _ROW(TRITON_RECURRENCE, KIMI_DELTA, "there is no kernel for decays of each channel"),
    _ROW(changed("parallel.gather_dtype"), unequal("parallel.zero", 3), "it gathers once a step"),
    _ROW(FLOAT16, FLOAT8, "products are bfloat16 or float32"),
    _ROW(FLOAT8, UNGATED_EXPERTS, "their products are not rounded"),
    _ROW(EXPERT_BIAS, UNGATED_EXPERTS, "they have no biases"),
)


def _of_features() -> Iterator[Incompatible]:
    """Yield the rows that features declare. Objectives exclude each other."""
    for declared in DECLARATIONS:
        yield from declared.incompatible()
    each = [LOSS, *(cls.is_set() for cls in objectives().values())]
    for one, other in itertools.combinations(each, 2):
        yield _ROW(one, other, "both say what is trained")


TABLE = (*_of_features(), *_OF_ALL)


def combinations(cfg: Config) -> Iterator[ConfigError]:
    """Yield an error for each row whose conditions both hold."""
    holds = functools.cache(lambda condition: condition.holds(cfg))
    of_own: Any = getattr(cfg.train.loss, "incompatible", tuple)  # of an objective elsewhere
    for row in (*TABLE, *of_own()):
        if holds(row.one) and holds(row.other):
            path, value = row.one.named(cfg)
            rule = f"is not supported with {row.other.words(cfg)}: {row.why}"
            yield refused(path, value, rule, *row.one.off(cfg), *row.other.off(cfg))
