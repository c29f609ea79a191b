"""Rules about values of users' classes: losses, probes, post-updates, callbacks."""

from collections.abc import Iterator

from jaxpar.config import Config, value_of
from jaxpar.config.values import FIELDS, Value


def own_values(cfg: Config) -> None:
    """Let each value check the config that holds it."""
    for path, value in values_of(cfg):
        value.check(cfg, path)


def values_of(cfg: Config) -> Iterator[tuple[str, Value]]:
    """Yield every value of a config, with the path of its field."""
    for path, (_, several) in FIELDS.items():
        held = value_of(cfg, path)
        for value in held if several else (held,):
            if isinstance(value, Value):
                yield path, value
