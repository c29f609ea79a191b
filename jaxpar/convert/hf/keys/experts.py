"""The key of config.json with the width of shared experts, in families that do not count them."""

from jaxpar.config import ModelConfig
from jaxpar.convert.hf.config_file import Values, check_kind, refuse
from jaxpar.convert.hf.family import Family


def read(values: Values, family: Family, d_ff: int) -> Values:
    """Return the number of shared experts, whose width together is a key.

    Args:     d_ff: width of an expert.
    Raises:   ConfigError for a width that is no multiple of an expert's.
    """
    key = family.shared_width
    if not key:
        return {}
    width = values.get(key)
    check_kind(key, width, int)
    if width is None or width < 0 or width % max(d_ff, 1):
        rule = f"must be a multiple of {family.fields['d_ff']} = {d_ff}, the width of an expert"
        raise refuse(key, width, rule, "use a model in which it is")
    return {"num_shared_experts": width // max(d_ff, 1)}


def write(m: ModelConfig, family: Family) -> Values:
    """Return the keys that `read` reads."""
    return {family.shared_width: m.num_shared_experts * m.d_ff} if family.shared_width else {}
