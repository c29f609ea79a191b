"""Lists the kinds of a model's layers: attention or not, experts or not, and the remat policy."""

import dataclasses
import functools
from collections import Counter
from dataclasses import dataclass

from jaxpar.config import Config, ModelConfig
from jaxpar.config.layout.layer_kinds import (
    ATTENTIONS,
    dense_places,
    has_experts,
    has_feed_forward,
    kinds,
    of_kind,
)
from jaxpar.config.layout.layer_split import dense_before_stages, slots_per_chunk
from jaxpar.config.remat_policies import of_layers


@dataclass(frozen=True)
class LayerKind:
    """Some layers of a model.

    cfg     a config all of whose layers are of this kind.
    remat   their policy.
    share   their share of the layers.
    """

    cfg: Config
    remat: str
    share: float


def layer_kinds(cfg: Config) -> list[LayerKind]:
    """Return the kinds of layers of the stages.

    Those before the stages of a pipeline are of `before_stages`.
    """
    if cfg.model.layer_pattern:
        return _of_pattern(cfg)
    if not cfg.model.dense_layers:
        return [LayerKind(cfg, remat, share) for remat, share in shares_of_policies(cfg).items()]
    if dense_before_stages(cfg.model, cfg.parallel):
        alike = dataclasses.replace(cfg, model=_dense_and_others(cfg.model)[1])
        return [LayerKind(alike, remat, share) for remat, share in shares_of_policies(cfg).items()]
    m, policies = cfg.model, of_layers(cfg.parallel, cfg.model.num_layers)
    models = dict(zip((True, False), _dense_and_others(m), strict=True))
    dense = dense_places(m)
    counts = Counter((i in dense, remat) for i, remat in enumerate(policies))
    return [
        LayerKind(dataclasses.replace(cfg, model=models[is_dense]), remat, count / m.num_layers)
        for (is_dense, remat), count in counts.items()
    ]


def before_stages(cfg: Config) -> LayerKind:
    """Return the kind of the dense layers before the stages, whose backward computes them again."""
    return LayerKind(dataclasses.replace(cfg, model=_dense_and_others(cfg.model)[0]), "full", 1.0)


# A plan has thousands of layouts of one model. Making a changed copy of it is a third of a
# prediction.
@functools.lru_cache(maxsize=8)
def _dense_and_others(m: ModelConfig) -> tuple[ModelConfig, ModelConfig]:
    """Return models all of whose layers are like the dense ones, or like the others."""
    others = dataclasses.replace(m, dense_layers=0, moe_every=1)
    return dataclasses.replace(others, num_experts=0, d_ff=m.dense_d_ff or m.d_ff), others


def _of_pattern(cfg: Config) -> list[LayerKind]:
    m, policies = cfg.model, of_layers(cfg.parallel, slots_per_chunk(cfg))
    counts = Counter(zip(kinds(m), policies, strict=False))  # chunks have the same kinds
    return [
        LayerKind(of_one_kind(cfg, kind), remat, count / len(policies))
        for (kind, remat), count in counts.items()
    ]


def of_one_kind(cfg: Config, kind: str) -> Config:
    """Return a config all of whose layers are of a kind. Its width is 0 without a feed-forward."""
    return dataclasses.replace(cfg, model=_model_of_one_kind(cfg.model, kind))


@functools.lru_cache(maxsize=32)
def _model_of_one_kind(m: ModelConfig, kind: str) -> ModelConfig:
    width, m = m.d_ff if has_feed_forward(m, kind) else 0, of_kind(m, kind)
    alike = dataclasses.replace(m, layer_pattern=kind)
    if kind not in ATTENTIONS:
        alike = dataclasses.replace(alike, kv_lora_rank=0)
    if has_experts(m, kind):
        return alike
    width = width and (m.dense_d_ff or width)
    return dataclasses.replace(alike, d_ff=width, num_experts=0)


def shares_of_policies(cfg: Config) -> dict[str, float]:
    """Return each policy of the layers, with the share of the layers that have it."""
    p = cfg.parallel
    if not p.remat_layers:
        return {p.remat: 1.0}
    policies = of_layers(p, slots_per_chunk(cfg))
    return {remat: policies.count(remat) / len(policies) for remat in dict.fromkeys(policies)}
