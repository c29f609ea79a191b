"""`--help`: one page, one section, or every field."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from jaxpar import components, config, features
from jaxpar.commands import call
from jaxpar.config import Config, ConfigError, flag, schema
from jaxpar.config.config_file import known_configs, load_config
from jaxpar.config.fields import LENGTH, field_types, leaf_paths, section_of
from jaxpar.config.help import SECTIONS
from jaxpar.config.layers import FIELD, all_paths


def documentation() -> dict[str, str]:
    """The docstring of each section, and the one under each field, by section and leaf path."""
    folders = [Path(inspect.getsourcefile(one)).parent for one in (schema, components, features)]
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    lines: dict[tuple[str, str], str] = {}
    for node in [node for file in files for node in ast.parse(file.read_text("utf-8")).body]:
        if isinstance(node, ast.ClassDef):
            lines[node.name, ""] = ast.get_docstring(node)
            for field, line in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(line, ast.Expr):
                    text = ast.literal_eval(line.value)
                    lines[node.name, field.target.id] = " ".join(text.split())
    found = {}
    for path in leaf_paths():
        section, _, name = path.rpartition(".")
        found[path] = lines[type(config.default_of(section)).__name__, name]
    for name in SECTIONS:
        found[name] = lines[type(config.default_of(name)).__name__, ""]
    return found


def help_of(capsys, *args: str) -> str:
    """What a command line with --help prints."""
    with pytest.raises(SystemExit) as stop:
        call("train", args)
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "quickstart", "llama_1b"])
def test_help_is_one_page_that_names_the_rest(name, capsys):
    shown = help_of(capsys, *[name] * bool(name), "--help")
    lines = shown.splitlines()
    assert len(lines) <= 80 and max(map(len, lines)) <= 100
    assert lines[0].startswith("usage: python -m jaxpar.train CONFIG ")
    for section in SECTIONS:
        assert re.search(rf"^  {section} +\S", shown, re.MULTILINE), section
    assert f"show the fields of one section, or all {len(leaf_paths())}" in shown
    for text in (*known_configs().split(", "), "--print-config", "--help SECTION", "--set "):
        assert text in shown
    num_steps = load_config(name).train.num_steps if name else 1000
    assert f"(default: {num_steps})" in " ".join(shown.split())


def config_of(name: str) -> Config:
    """A config by name; that of no name has the defaults."""
    return load_config(name) if name else Config()


def paths_of(name: str) -> set[str]:
    """The fields that the help of a config lists: those of layers by their addresses."""
    always = {path for path, hint in field_types().items() if section_of(hint) is hint}
    hidden = {FIELD, *always}  # whose fields are listed
    return {LENGTH, *field_types().keys() - hidden, *all_paths(config_of(name).model.layers)}


@pytest.mark.parametrize("name", ["", "llama_1b", "quickstart_hybrid"])
@pytest.mark.parametrize("section", SECTIONS)
def test_help_shows_one_section(name, section, capsys):
    shown = help_of(capsys, *[name] * bool(name), "--help", section)
    found = re.findall(r"^  --([\w.-]+)", shown, re.MULTILINE)
    fields = {path for path in paths_of(name) if f"{path}.".startswith(f"{section}.")}
    assert {one.replace("-", "_") for one in found} == fields
    assert documentation()[section] in " ".join(shown.split())


def test_help_of_an_unknown_section_is_refused():
    with pytest.raises(ConfigError, match=r"is not a section .* Fix: use --help model"):
        call("train", ["quickstart", "--help", "modle"])
    with pytest.raises(ConfigError, match=f"use one of {', '.join(SECTIONS)}, all"):
        call("train", ["--help", "nonesuch"])


@pytest.mark.parametrize("args", [["--help"], ["quickstart", "-h"], ["llama_1b", "--help"]])
def test_help_documents_every_field(args, capsys):
    text = " ".join(help_of(capsys, *args, "all").split())
    name = "" if args[0] == "--help" else args[0]
    shown = paths_of(name)
    paths = [path for path in leaf_paths() if path in shown]
    missing = [
        path
        for path in (*paths, *all_paths(config_of(name).model.layers))
        if flag(path) + " " not in text
    ]
    assert not missing
    joined = "".join(text.split())  # a line may end at a hyphen of a word
    documented = {path: "".join(line.split()) for path, line in documentation().items()}
    paths += SECTIONS
    undocumented = [path for path in paths if documented[path] not in joined]
    assert not undocumented
    if args[0] == "llama_1b":
        line = "Factor by which the context length grows. (default: 32.0)"
        assert f"--model.layers.mixer.rope.scaling.factor FLOAT {line}" in text
