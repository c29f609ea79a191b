"""Rules about metrics of layers, and metric sinks."""

import ipaddress
import re

from jaxpar.config import Config, flag, require


def records_of_layers(cfg: Config) -> None:
    """Check that a step with metrics of layers is one that is recorded."""
    path, every, log = "metrics.layers_every", cfg.metrics.layers_every, cfg.train.log_every
    rule = f"must be 1, or a multiple of train.log_every = {log}"
    nearest = max(round(every / log), 1) * log
    require(every == 1 or every % log == 0, cfg, path, rule, flag(path, nearest), flag(path, 1))


def sinks(cfg: Config) -> None:
    """Check names, ports and addresses."""
    records_of_layers(cfg)
    m, path = cfg.metrics, "metrics.wandb"
    ok = m.wandb == "" or re.fullmatch(r"([\w.-]+/)?[\w.-]+", m.wandb) is not None
    rule = "must be PROJECT or ENTITY/PROJECT, with letters, digits, '.', '_' and '-', or empty"
    require(ok, cfg, path, rule, flag(path, "jaxpar"))
    path, ok = "metrics.mlflow", len(m.mlflow) <= 500 and m.mlflow.isprintable()
    require(ok, cfg, path, "must be the name of an experiment", flag(path, "jaxpar"))
    path, rule = "metrics.prometheus_address", "must be an IP address or localhost"
    ok = m.prometheus_address == "localhost" or _is_address(m.prometheus_address)
    require(ok, cfg, path, rule, flag(path, "127.0.0.1"))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
