"""Whether a run may resume from a checkpoint."""

from jaxpar.checkpoint.saved import (
    LORA_FIELDS,
    MODEL_FIELDS,
    NO_DATASET,
    Saved,
    by_path,
    check_fields,
)
from jaxpar.config import Config, ConfigError, default_of, flag, replace, value_of
from jaxpar.config.lists.mixture import stages
from jaxpar.config.lists.step_sizes import BATCHES, LENGTHS, step_sizes
from jaxpar.data.sources import fingerprint

#: Fields that may not change during a run: the meaning of the moments, and the order of the data.
RUN_FIELDS = ("optimizer.name", "train.seed", "data.seq_len")

#: Fields that decide the sizes of steps. A run may change them for steps to come.
SIZE_FIELDS = ("train.global_batch_size", BATCHES, LENGTHS, "data.length_keeps")


def check_resumable(cfg: Config, saved: Saved) -> None:
    """Refuse another model, optimizer or order of the data. The mesh and all else may change.

    Raises:   ConfigError that names the first field that differs; also for imported weights.
    """
    if saved.dataset == NO_DATASET:
        rule = f"contains imported weights in {saved}, without an optimizer state to resume"
        raise ConfigError("run.dir", cfg.run.dir, rule, "use a new run.dir")
    fixed = MODEL_FIELDS + LORA_FIELDS + RUN_FIELDS
    if not (cfg.train.batch_schedule or saved.config["train"].get("batch_schedule")):
        fixed += ("train.global_batch_size",)
    check_fields(cfg, saved, fixed, "use a new run.dir, or set it back")
    _check_sizes(cfg, saved)
    now = fingerprint(cfg)
    if now != saved.dataset:
        rule = f"is not the data of {saved} (fingerprint {now[:8]}, not {saved.dataset[:8]})"
        field = "mixture" if cfg.data.mixture else "path"
        then = saved.config["data"].get("mixture") or saved.config["data"]["path"]
        fix = f"use a new run.dir, or set it back to {then}"
        raise ConfigError(f"data.{field}", getattr(cfg.data, field), rule, fix)
    _check_stages(cfg, saved)


def _check_sizes(cfg: Config, saved: Saved) -> None:
    """Raises:   ConfigError if steps before the saved one had another size."""
    then = by_path(saved.config)
    fields = {path: then.get(path, default_of(path)) for path in SIZE_FIELDS}
    batches = saved.step + sum(count for _, count in saved.skipped_batches)
    past, now = (list(step_sizes(one).until(batches)) for one in (replace(cfg, **fields), cfg))
    if past != now:
        changed = [path for path in SIZE_FIELDS if value_of(cfg, path) != fields[path]]
        path = next((one for one in changed if one in (BATCHES, LENGTHS)), changed[0])
        rule = f"changes the size of steps before step {saved.step}, after which {saved} continues"
        before = " ".join(flag(one, fields[one]) for one in changed)
        fix = f"use {before}, or change only later steps"
        raise ConfigError(path, value_of(cfg, path), rule, fix)


def _check_stages(cfg: Config, saved: Saved) -> None:
    """Raises:   ConfigError if sources had other weights before the saved step."""
    path = "data.mixture_schedule"
    then = saved.config["data"].get("mixture_schedule", "")
    past, now = (
        [stage for stage in stages(one) if stage.step < saved.step]
        for one in (replace(cfg, **{path: then}), cfg)
    )
    if past != now:
        rule = f"changes weights before step {saved.step}, after which {saved} continues"
        fix = f"use {flag(path, then)}, or change only later steps"
        raise ConfigError(path, cfg.data.mixture_schedule, rule, fix)
