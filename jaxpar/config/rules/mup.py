"""Rules about µP, the maximal update parametrization."""

from jaxpar.config import Config, default_of, flag, require, value_of
from jaxpar.config.layout.layer_kinds import RECURRENT

SECTION = "model.mup"

#: Update rules with a learning rate for each width (`optimizer/widths.py`).
RULES = ("adamw", "lion", "adafactor", "muon")


def mup(cfg: Config) -> None:
    """Check that µP's factors are known for the model and its update rule."""
    m, without = cfg.model, flag(SECTION, None)
    if m.mup is None:
        return
    sizes = {"base_width": m.d_model, "base_d_ff": m.d_ff}
    sizes |= {"base_head_dim": m.head_dim, "base_depth": m.num_layers}
    for name, size in sizes.items():
        path = f"{SECTION}.{name}"
        given = value_of(cfg, path)
        require(given is None or given >= 1, cfg, path, "must be at least 1", flag(path, size))
    path, rule = "optimizer.name", f"has no learning rate for each width, which {SECTION} needs"
    require(cfg.optimizer.name in RULES, cfg, path, rule, flag(path, "adamw"), without)
    path, rule = "model.layer_pattern", "has recurrent layers, for which µP's factors do not hold"
    recurs = set(RECURRENT) & set(m.layer_pattern)
    require(not recurs, cfg, path, rule, flag(path, ""), without)
    for path, rule in (
        ("model.embed_scale", f"grows with the width; {SECTION} needs embedding_multiplier"),
        ("model.mtp_depth", f"adds modules that read hidden states unscaled, beside {SECTION}"),
    ):
        default = default_of(path)
        require(value_of(cfg, path) == default, cfg, path, rule, flag(path, default), without)
    path, rule = f"{SECTION}.base_head_dim", "is not for latent attention, which model has"
    ok = m.mup.base_head_dim is None or m.kv_lora_rank == 0
    require(ok, cfg, path, rule, flag(path, None), flag("model.kv_lora_rank", 0))
