"""Makes cards small enough to publish: python scripts/docs/publish_cards.py CARD...

Each card of `profile --bench --card` is replaced by its figures and conditions: what a reader
compares, and what tells a run from another. The profile, the whole config and the environment go:
the commit and the remaining fields of the config reproduce the run. Other cards lose the config,
too. Numbers keep seven digits. A published card stays as it is.
"""

import json
import sys
from pathlib import Path
from typing import Any

from jaxpar.components.model import in_words
from jaxpar.config import Config, layers
from jaxpar.config.serialize import to_json, value_text

#: What stays as it is, in this order.
FIELDS = (
    "tokens_per_second_per_device",
    "mfu_causal",
    "mfu_full_attention",
    "step_seconds",
    "steps",
    "warm_up_steps",
    "compile_seconds",
    "loss",
    "peak_memory_gib",
    "experts",
    "power",
    "parameters",
    "mesh",
    "attention",
    "jax",
    "platform",
    "device",
    "gpu",
    "xla_flags",
    "commit",
)

#: What remains of others.
PARTS = {
    "step_seconds": ("median", "interquartile"),
    "power": ("watts", "sm_mhz", "at_power_limit"),
}

#: Fields of the config that are published whatever their value, beside those of layers: the model's
#: shape and the layout. Others are where they differ from the defaults.
CONFIG = """
compute.dtype compute.float8_scaling compute.logits_dtype compute.matmul_dtype
compute.recurrent_backend data.document_mask data.seq_len model.d_model model.layers
model.num_layers optimizer.name parallel.expert parallel.expert_slack parallel.gather_dtype
parallel.loss_chunks parallel.num_microbatches parallel.remat parallel.row_groups
parallel.virtual_stages parallel.zero train.global_batch_size
""".split()

#: What other cards lose (the commit and JAX say the versions), and details that rows of them lose.
OF_THE_RUN = (
    "config",
    "config_sha256",
    "environment",
    "jaxpar",
    "jaxlib",
    "processes",
    "host",
    "time",
)
DETAILS = ("ms_fastest", "ms_slowest", "launches", "flops", "useful_flops", "error")

#: Fields and sections of the config that say nothing about the time or memory of a step.
LEFT_OUT = """
run.dir run.init_from run.init_changes run.cpu_devices run.xla_flags run.record_routing
run.compilation_cache data.path data.shuffle model.init_std
""".split()
SECTIONS_LEFT_OUT = ("checkpoint", "evaluation", "metrics", "cluster")


def main(names: list[str]) -> None:
    """Replace the cards of these files."""
    if not names or names[0] in ("-h", "--help"):
        print(__doc__)
        return
    for name in names:
        path = Path(name)
        path.write_text(text_of(json.loads(path.read_text("utf-8"))), "utf-8")


def text_of(card: dict[str, Any]) -> str:
    """Return the text of a card in its published form."""
    if "parameters" not in card:
        card = {name: value for name, value in card.items() if name not in OF_THE_RUN}
    elif "model" in card["config"]:
        card = published(card)
    return json.dumps(short(card), indent=1) + "\n"


def published(card: dict[str, Any]) -> dict[str, Any]:
    """Return the published form of a training card."""
    made = {name: card[name] for name in FIELDS if name in card}
    for name, parts in PARTS.items():
        if card.get(name):
            made[name] = {part: card[name][part] for part in parts if part in card[name]}
    for name, loads in made.get("experts", {}).items():
        if isinstance(loads, dict):
            made["experts"][name] = {part: v for part, v in loads.items() if part != "least"}
    if card.get("profile"):
        made["exposed_ms"] = card["profile"]["ms"]["exposed"]
    if card["processes"] != "1":
        made["processes"] = card["processes"]
    config, defaults = flat(card["config"]), flat(json.loads(to_json(Config())))
    made["config"] = {
        name: value
        for name, value in config.items()
        if name in CONFIG
        or name.count(".") > 1
        or (value != defaults.get(name) and not left_out(name))
    }
    return made


def short(value: Any) -> Any:
    """Return a value with seven digits of each number, and without details of each timing."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, list):
        return [short(one) for one in value]
    if isinstance(value, dict):
        return {name: short(one) for name, one in value.items() if name not in DETAILS}
    return value


def left_out(name: str) -> bool:
    """Return whether a field of the config says nothing about a step."""
    return name in LEFT_OUT or name.partition(".")[0] in SECTIONS_LEFT_OUT


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return {section.field: value}, with fields of layers by address and lists as texts."""
    sections = ((part, fields or {}) for part, fields in config.items())
    made = {f"{part}.{name}": v for part, fields in sections for name, v in fields.items()}
    made |= {path: value_text(path, v) for path, v in made.items() if isinstance(v, list)}
    if not (values := made.get("model.layers")):  # older cards, whose model has a flag for each
        return made
    composed = layers.from_values(values)
    in_short = {"model.layers": in_words(composed), "model.num_layers": len(composed)}
    return made | layers.by_address(values) | in_short


if __name__ == "__main__":
    main(sys.argv[1:])
