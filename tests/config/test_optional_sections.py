"""Sections that are None by default: a field turns one on, and None turns it off."""

import dataclasses
import json

import pytest

from jaxpar.checkpoint.saved import Saved, by_path, changed_fields, check_fields
from jaxpar.commands import call
from jaxpar.config import Config, ConfigError, default_of, flag, present, replace, value_of
from jaxpar.config.command_line import parse_overrides, read_config
from jaxpar.config.config_file import load_config
from jaxpar.config.explain import fixes_of, options_in
from jaxpar.config.fields import is_required, leaf_paths, optional_sections, switch_of
from jaxpar.config.listed import written
from jaxpar.config.serialize import from_json, to_json
from jaxpar.config.values import to_values
from jaxpar.tools.planning.fields import changes
from jaxpar.tools.sweeps.grid import points_of
from tests.config.models import BASE, setting

SECTIONS = list(optional_sections())

#: Each field of each, beside the required ones.
FIELDS = [
    path for path in leaf_paths() if path.rpartition(".")[0] in SECTIONS and not is_required(path)
]
REQUIRED = [path for path in leaf_paths() if is_required(path)]


def words(fields: dict) -> list[str]:
    return [word for path, value in fields.items() for word in (flag(path), written(value))]


def nested(section: str, value: dict | None) -> dict:
    """The JSON of a section alone."""
    for name in reversed(section.split(".")):
        value = {name: value}
    return value


def turned_on(section: str) -> dict:
    """Fields that turn a section on."""
    return setting(switch_of(section), default_of(switch_of(section)))


def test_the_sections_that_are_off_by_default():
    assert {*SECTIONS} == {
        *("dpo", "distill", "diloco", "lora"),
        *("optimizer.ema", "checkpoint.memory", "model.mup"),
    }
    assert {*REQUIRED} == {
        "distill.teacher",
        "diloco.every",
        "lora.rank",
        "checkpoint.memory.every",
    }
    assert all(value_of(Config(), section) is None for section in SECTIONS)
    with pytest.raises(AssertionError):
        present(Config().lora)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_field_turns_it_on_and_none_off(section):
    on, off = words(turned_on(section)), [flag(section), "None"]
    made = parse_overrides(BASE, on)
    assert value_of(made, section) == default_of(section)
    assert parse_overrides(BASE, [*on, *off]) == parse_overrides(made, off) == BASE
    assert parse_overrides(BASE, [*off, *on]) == made == from_json(to_json(made))
    assert json.loads(to_json(made)) != json.loads(to_json(BASE))


@pytest.mark.parametrize("path", FIELDS)
def test_every_field_turns_it_on(path):
    section = path.rpartition(".")[0]
    made = parse_overrides(BASE, words(setting(path, default_of(path))))
    assert made == replace(BASE, **{section: default_of(section)})


@pytest.mark.parametrize("path", REQUIRED)
def test_a_required_field_that_is_missing_is_named(path):
    section = path.rpartition(".")[0]
    other = next(one for one in FIELDS if one.startswith(f"{section}."))
    at_once = rf"^{path} = '': is missing: it has no default, and {other} sets the section"
    with pytest.raises(ConfigError, match=at_once) as caught:
        read_config(["quickstart", *words({other: default_of(other)})])
    (fix,) = fixes_of(caught.value)
    made = parse_overrides(BASE, [*words({other: default_of(other)}), *options_in(fix)])
    assert value_of(made, section) == default_of(section)
    with pytest.raises(ConfigError, match=at_once):
        replace(BASE, **{other: default_of(other)})
    name = other.rpartition(".")[2]
    with pytest.raises(ConfigError, match=at_once):
        from_json(json.dumps(nested(section, {name: default_of(other)})))
    said = rf"^{path} = '': .*and the section is set\. Fix: add it, or leave out the section"
    with pytest.raises(ConfigError, match=said):
        from_json(json.dumps(nested(section, {})))
    assert from_json(json.dumps(nested(section, None))) == Config()


@pytest.mark.parametrize("section", SECTIONS)
def test_help_has_it_with_required_fields(section, capsys):
    with pytest.raises(SystemExit):
        call("train", ["quickstart", "--help", section.partition(".")[0]])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{flag(section)} None " in shown
    required = [path for path in REQUIRED if path.startswith(f"{section}.")]
    assert all(f"{flag(path)} " in shown for path in required)
    assert shown.count("(required)") == len(required)


def test_help_shows_the_values_of_a_section_that_is_on(capsys):
    with pytest.raises(SystemExit):
        call("train", ["llama_1b_lora_chat", "--help", "lora"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: 32.0)" in shown and "(required)" not in shown


@pytest.mark.parametrize("section", SECTIONS)
def test_a_plan_writes_it(section):
    made = replace(BASE, **turned_on(section))
    assert replace(BASE, **changes(BASE, made)) == made
    assert changes(made, BASE) == {section: None}
    assert parse_overrides(BASE, words(changes(BASE, made))) == made


def test_a_sweep_may_turn_it_on():
    points = points_of(load_config("quickstart"), ["lora.rank=2,4"])
    assert [present(point.cfg.lora).rank for point in points] == [2, 4]
    with pytest.raises(ConfigError, match=r"lora\.rank = '' is missing"):
        points_of(load_config("quickstart"), ["lora.alpha=2,4"])


def without(values: dict, path: str) -> dict:
    """A config without a section, as a version that did not have it wrote it."""
    name, _, rest = path.partition(".")
    others = {key: value for key, value in values.items() if key != name}
    return others | ({name: without(values[name], rest)} if rest else {})


def saved(cfg: Config) -> Saved:
    """A checkpoint of a config."""
    about = dict.fromkeys(("dataset", "versions", "fingerprints"), "")
    return Saved(step=1, tokens_seen=1, config=to_values(cfg), **about)  # type: ignore[arg-type]


@pytest.mark.parametrize("section", SECTIONS)
def test_what_a_checkpoint_has_of_it(section):
    """A run goes on with it, without it, and with other fields."""
    on = replace(BASE, **turned_on(section))
    switch, value = switch_of(section), default_of(switch_of(section))
    fields = [path for path in leaf_paths() if path.startswith(f"{section}.")]
    assert by_path(to_values(on))[switch] == value and by_path(to_values(BASE))[switch] is None
    assert not changed_fields(on, saved(on)) and not changed_fields(BASE, saved(BASE))
    written_of = by_path(to_values(on))
    values = {path: written_of[path] for path in fields if written_of[path] is not None}
    assert changed_fields(on, saved(BASE)) == {path: (None, v) for path, v in values.items()}
    assert changed_fields(BASE, saved(on)) == {path: (v, None) for path, v in values.items()}
    older = dataclasses.replace(saved(BASE), config=without(to_values(BASE), section))
    assert not changed_fields(BASE, older)
    with pytest.raises(ConfigError, match=rf"has None\. Fix: set it back with --{section} None"):
        check_fields(on, saved(BASE), [switch], "set it back")
    with pytest.raises(ConfigError, match=rf"^{switch} = None: .*: set it back to {value!r}"):
        check_fields(BASE, saved(on), [switch], "set it back")
