"""The key of config.json with the width of shared experts, in families that do not count them."""

from jaxpar.convert.hf.composed import ABSENT, Composition
from jaxpar.convert.hf.config_file import Values, check_kind, refuse
from jaxpar.convert.hf.family import Family

NUMBER, WIDTH = "Experts.num_shared_experts", "Experts.expert.d_ff"


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
        rule = f"must be a multiple of {family.fields[WIDTH]} = {d_ff}, the width of an expert"
        raise refuse(key, width, rule, "use a model in which it is")
    return {NUMBER: width // max(d_ff, 1)}


def write(of: Composition, family: Family) -> Values:
    """Return the keys that `read` reads."""
    count, width = of.one(NUMBER), of.one(WIDTH)
    if not family.shared_width or ABSENT in (count, width):
        return {}
    return {family.shared_width: count * width}
