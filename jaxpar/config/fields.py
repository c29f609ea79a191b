"""Fields of a config by path: their types, values, defaults and flags."""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import re
import shlex
import types
import typing
from collections.abc import Callable
from typing import Any

from jaxpar.components.ranges import Range, Reals, declared_range
from jaxpar.config.errors import ConfigError
from jaxpar.config.layers import FIELD, all_paths, required_fields
from jaxpar.config.listed import written
from jaxpar.config.schema import Config
from jaxpar.config.schema.features import objectives


def section_of(hint: Any) -> Any:
    """Return the section class of a field's type (`Section` or `Section | None`), or None."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((option for option in options if dataclasses.is_dataclass(option)), None)


def hints_in(section: Any) -> dict[str, Any]:
    """Return the types of a section's fields, in order, without their ranges."""
    hints = typing.get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


@functools.cache
def field_types(cls: Any = Config, prefix: str = "") -> dict[str, Any]:
    """Return the type of every section and field by path: {"train.seed": int, ...}."""
    found: dict[str, Any] = {}
    for name, hint in hints_in(cls).items():
        found[prefix + name] = hint
        if section_of(hint) is not None:
            found |= field_types(section_of(hint), f"{prefix}{name}.")
    return found


def leaf_paths() -> list[str]:
    """Return the paths of all fields that are not sections, with those of optional sections."""
    return [path for path, hint in field_types().items() if section_of(hint) is None]


@functools.cache
def annotation_of(path: str) -> Any:
    """Return the type of a field, with its range."""
    section: Any = Config
    *sections, name = path.split(".")
    for key in sections:
        section = section_of(typing.get_type_hints(section)[key])
    return typing.get_type_hints(section, include_extras=True)[name]


@functools.cache
def range_of(path: str) -> Range | Reals | None:
    """Return the range that a field declares."""
    return declared_range(annotation_of(path))


@functools.cache
def default_of(path: str) -> Any:
    """Return a field's default, or a value that works if it has none (`required_fields`).

    In an optional section, it applies once the section is set.
    """
    node: Any = Config()
    for key in path.split("."):
        section, node = section_of(typing.get_type_hints(type(node))[key]), getattr(node, key)
        if node is None and section is not None:
            hints = typing.get_type_hints(section, include_extras=True)
            needed = {name: hints[name].__metadata__ for name in required_fields(section)}
            node = section(**{name: marks[0].good for name, marks in needed.items()})
    return node


@functools.cache
def optional_sections() -> dict[str, Any]:
    """Return the sections that may be None: the path and the class of each."""
    found = {path: section_of(hint) for path, hint in field_types().items()}
    return {path: cls for path, cls in found.items() if cls not in (None, field_types()[path])}


def is_required(path: str) -> bool:
    """Return whether a field of an optional section has no default."""
    section, _, name = path.rpartition(".")
    return section in optional_sections() and name in required_fields(optional_sections()[section])


def switch_of(path: str) -> str:
    """Return the field that stands for an optional section: its first, such as "lora.rank"."""
    return f"{path}.{dataclasses.fields(optional_sections()[path])[0].name}"


def switches_for(kind: str) -> list[str]:
    """Return the options that turn on an objective of datasets of a kind."""
    found = [name for name, cls in objectives().items() if cls.dataset == kind]
    return [flag(switch_of(name), default_of(switch_of(name))) for name in found]


def present[Section](section: Section | None) -> Section:
    """Return an optional section, in code that only runs where a config has it."""
    assert section is not None
    return section


def turning_off(path: str) -> tuple[str, ...]:
    """Return the option that ends the optional section that a field stands for, if it does."""
    section = path.rpartition(".")[0]
    stands = section in optional_sections() and switch_of(section) == path
    return (flag(section, None),) if stands else ()


def make_section(section: Any, path: str, values: dict[str, Any]) -> Any:
    """Return a section of these fields.

    Raises:   ConfigError for one that is missing and has no default.
    """
    for name in required_fields(section):
        if name not in values:
            at, given = f"{path}.{name}", next(iter(values), "")
            rule = "is missing: it has no default, and "
            rule += f"{path}.{given} sets the section" if given else "the section is set"
            raise ConfigError(at, "", rule, f"use {flag(at, default_of(at))}")
    return section(**values)


@functools.cache
def meanings(section: Any) -> dict[str, str]:
    """Return the docstring under each field of a section's class, by the field's name."""
    (node,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for field, below in itertools.pairwise(node.body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


def meanings_of(cls: Any) -> dict[str, str]:
    """Return the docstring under each field of a class, those of its bases included."""
    found: dict[str, str] = {}
    bases: list[Any] = [base for base in cls.__mro__[:-1] if dataclasses.is_dataclass(base)]
    for base in reversed(bases):
        found |= meanings(base)
    return {field.name: found.get(field.name, "") for field in dataclasses.fields(cls)}


def value_of(cfg: "Config", path: str) -> Any:
    """Return a field's value, `value_of(cfg, "model.vocab_size")`; None in a section that is."""
    node: Any = cfg
    for key in path.split("."):
        node = None if node is None else getattr(node, key)
    return node


def require(ok: bool, cfg: "Config", path: str, rule: str, *ways: str) -> None:
    """Raise ConfigError for a field unless `ok`, with `ways` as alternative fixes."""
    if not ok:
        raise refused(path, value_of(cfg, path), rule, *ways)


def refused(path: str, value: Any, rule: str, *ways: str) -> ConfigError:
    """Return the error of a field, with `ways` as alternative fixes.

    The field's default comes before all that turns something on, which could be refused in turn:
    following first fixes never leads in a circle.
    """
    default = flag(path, default_of(path)) if path in field_types() else ""
    if default in ways:
        others = [way for way in ways if way != default]
        before = len(list(itertools.takewhile(_is_default, others)))
        at = min(before, ways.index(default))
        ways = (*others[:at], default, *others[at:])
    fix = "use " + ", or ".join(ways) if ways else "use other layers in model.layers"
    return ConfigError(path, value, rule, fix)


def _is_default(way: str) -> bool:
    """Return whether a fix only gives a field its default."""
    path = way.partition(" ")[0].removeprefix("--").replace("-", "_")
    return path in leaf_paths() and way == flag(path, default_of(path))


#: Names that other programs give to fields.
ALIASES = {
    **dict.fromkeys(("lr", "max_lr", "peak_lr"), "optimizer.learning_rate"),
    "min_lr": "optimizer.min_lr_ratio",
    **dict.fromkeys(("wd", "decay"), "optimizer.weight_decay"),
    **dict.fromkeys(("warmup", "warmup_iters"), "optimizer.warmup_steps"),
    **dict.fromkeys(("lr_scheduler", "scheduler", "lr_decay_style"), "optimizer.schedule"),
    "optim": "optimizer.name",
    **dict.fromkeys(("clip", "grad_clip", "clip_grad", "max_norm"), "optimizer.clip_norm"),
    **dict.fromkeys(("b1", "adam_beta1"), "optimizer.beta1"),
    **dict.fromkeys(("b2", "adam_beta2"), "optimizer.beta2"),
    **dict.fromkeys(("epsilon", "adam_eps"), "optimizer.eps"),
    **dict.fromkeys(("bs", "batch", "batch_size", "gbs"), "train.global_batch_size"),
    **dict.fromkeys(("batch_tokens", "total_batch_size"), "train.global_batch_tokens"),
    **dict.fromkeys(("steps", "max_steps", "iters", "train_iters"), "train.num_steps"),
    **dict.fromkeys(("accum", "grad_accum", "ga"), "parallel.num_microbatches"),
    **dict.fromkeys(("layers", "n_layer", "n_layers", "depth"), "model.num_layers"),
    **dict.fromkeys(("hidden_size", "n_embd", "width", "dim"), "model.d_model"),
    **dict.fromkeys(("heads", "n_head", "n_heads"), "model.*.mixer.num_heads"),
    **dict.fromkeys(
        ("kv_heads", "n_kv_heads", "num_key_value_heads"), "model.*.mixer.num_kv_heads"
    ),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_size"), "model.*.feed_forward.d_ff"),
    **dict.fromkeys(("vocab", "padded_vocab_size"), "model.vocab_size"),
    **dict.fromkeys(("block_size", "context_length", "max_seq_len"), "data.seq_len"),
    **dict.fromkeys(("tp", "tensor_parallel"), "parallel.tensor"),
    **dict.fromkeys(("pp", "pipeline_parallel"), "parallel.pipeline"),
    **dict.fromkeys(("dp", "fsdp"), "parallel.data"),
    **dict.fromkeys(("cp", "sp"), "parallel.sequence"),
    **dict.fromkeys(("ddp", "hsdp"), "parallel.replica"),
    **dict.fromkeys(("save_every", "save_interval"), "checkpoint.every"),
    **dict.fromkeys(("eval_every", "eval_interval"), "evaluation.every"),
    **dict.fromkeys(("out_dir", "output_dir", "save_dir"), "run.dir"),
}


#: The number of layers, which is no field: an option that repeats or cuts the list.
LENGTH = "model.num_layers"

#: Most fields that an error names for one that does not exist.
MOST_NAMED = 3


def unknown_field(
    path: str, value: Any, show: Callable[[str], str] = str, cfg: Config | None = None
) -> ConfigError:
    """Return the error for a path that is not a field, with the most similar fields.

    Args:     show: formats a path for the message. cfg: whose layers have fields, too.
    """
    section, _, name = path.rpartition(".")
    of_layers = () if cfg is None else (*all_paths(cfg.model.layers), LENGTH)
    known = [one for one in leaf_paths() if one != FIELD or cfg is None]
    names = {one: one.rpartition(".")[2] for one in (*of_layers, *known)}
    beside = [one for one in names if one.startswith(section + ".")]
    alias = ALIASES.get(name, "")
    name = alias.rpartition(".")[2] or name
    words = re.sub("[._-]", "", path)
    meant = [one for one in names if re.sub("[._-]", "", one) == words]  # lora_rank is lora.rank
    named = sorted((one for one in names if names[one] == name), key=lambda one: one.count("."))
    meant = meant or ([alias] if alias in names else named)
    meant = meant or [alias] * bool(alias)
    if not meant and beside:
        near = difflib.get_close_matches(name, [names[one] for one in beside], n=1)
        meant = [one for one in beside if names[one] in near]
    elif not meant:
        meant = difflib.get_close_matches(path, names, n=1)
    if meant:
        fix = "use " + " or ".join(map(show, meant[:MOST_NAMED]))
    elif beside:
        near = difflib.get_close_matches(name, [names[one] for one in beside], n=3, cutoff=0)
        best = ", ".join(show(f"{section}.{one}") for one in near)
        fix = f"use one of {best}, or see --help {section.partition('.')[0]}"
    else:
        sections = ", ".join(field.name for field in dataclasses.fields(Config))
        fix = f"use SECTION.FIELD, with a section of {sections}"
    return ConfigError(path, value, "is not a field of the config", fix)


def flag(path: str, value: Any = ...) -> str:
    """Return a field as on the command line: "--model.num-heads 8", or only the option's name.

    Values are quoted for a shell.
    """
    name = "--" + path.replace("_", "-")
    return name if value is ... else f"{name} {shlex.quote(written(value))}"


def replace(cfg: Config, **values: Any) -> Config:
    """Return a copy with some fields changed: `replace(cfg, **{"model.num_layers": 2})`.

    Setting a field of an optional section that is None makes the section, of `values` and its
    defaults. Fields of layers have addresses:
    `replace(cfg, **{"model.block.mixer.num_heads": 8})`. A component may be given whole, and so may
    `model.layers`: `replace(cfg, **{"model.block.feed_forward": Mlp(512)})`.

    Raises:   ConfigError for a path that is not a field, and for a required one that is missing.
    """
    from jaxpar.config.addresses import (  # which imports this
        addresses_layers,
        with_addressed,
    )

    for path, value in values.items():
        if addresses_layers(cfg, path):
            cfg = with_addressed(cfg, path, functools.partial(_as_given, value))
            continue
        if path not in field_types():
            raise unknown_field(path, value, cfg=cfg)
        if path == FIELD:
            cfg = dataclasses.replace(cfg, model=cfg.model.with_layers(value))
            continue
        cfg = _replaced(cfg, path, value, values)
    return cfg


def _as_given(value: Any, _: Any) -> Any:
    return value


def _replaced(node: Any, path: str, value: Any, values: dict[str, Any], at: str = "") -> Any:
    """Return a section with another value of a field. Args: values: all. at: of the section."""
    name, _, rest = path.partition(".")
    if rest:
        inner, section = getattr(node, name), section_of(typing.get_type_hints(type(node))[name])
        if not isinstance(inner, section):  # None
            paths = {key: f"{at}{name}.{key}" for key in typing.get_type_hints(section)}
            made = {key: values[path] for key, path in paths.items() if path in values}
            inner = make_section(section, at + name, made)
        value = _replaced(inner, rest, value, values, f"{at}{name}.")
    return dataclasses.replace(node, **{name: value})
