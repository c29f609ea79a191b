"""Weights of losses that change by step, on straight lines between the points of a schedule."""

import itertools

from jaxpar.config import Config, replace, value_of

#: Schedules, and the fields of the weights that do not change.
Z_LOSS, MTP_LOSS = "train.z_loss_schedule", "train.mtp_loss_schedule"
CONSTANT = {Z_LOSS: "train.z_loss", MTP_LOSS: "train.mtp_loss"}


def with_weights_of(cfg: Config, step: int) -> Config:
    """Return the config with the weights of one step at every step."""
    given = [path for path in CONSTANT if value_of(cfg, path)]
    values = {CONSTANT[path]: weight_at(cfg, path, step) for path in given}
    return replace(cfg, **dict.fromkeys(given, ()), **values)


def weight_at(cfg: Config, path: str, step: int) -> float:
    """Return a weight after `step` steps: of its schedule, or the one that does not change."""
    found = value_of(cfg, path)
    if not found:
        return float(value_of(cfg, CONSTANT[path]))
    for one, other in itertools.pairwise(found):
        if one.step <= step < other.step:
            share = (step - one.step) / (other.step - one.step)
            return one.weight + share * (other.weight - one.weight)
    return found[0].weight if step < found[0].step else found[-1].weight
