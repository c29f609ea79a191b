"""What single pages say is what the code has: pictures, letters, fields, messages."""

import ast
import contextlib
import importlib.util
import io
import json
import re
from functools import cache
from pathlib import Path
from typing import Literal, get_args, get_origin

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxpar import plan
from jaxpar.config import ParallelConfig
from jaxpar.config.fields import field_types
from jaxpar.config.model_source import FAMILY, FROM
from jaxpar.sharding import axes
from jaxpar.sharding.mesh import make_mesh
from tests.slow import slow

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS, PLANNING = "choosing_a_layout.md", "planning.md"


def read(name: str) -> str:
    """A page's text."""
    return (ROOT / "docs" / name).read_text("utf-8")


def script(name: str):
    """A script, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / "docs" / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_every_page_is_named_in_the_readme():
    """A folder's pages are named in its own README, which is in the first one."""
    text = (ROOT / "README.md").read_text("utf-8")
    shown = [line for line in text.splitlines() if not line.startswith("<!--")]
    assert len(shown) <= 120
    for page in (ROOT / "docs").rglob("*.md"):
        folder = page.parent / "README.md"
        if page == ROOT / "docs" / "index.md":
            continue
        if page.parent == ROOT / "docs" or page == folder or not folder.is_file():
            assert f"]({page.relative_to(ROOT)})" in text
        else:
            assert f"]({page.name})" in folder.read_text("utf-8"), page


# ----------------------------------------------------------------------------------- pictures


@pytest.fixture(scope="module")
def drawing():
    """The script that draws."""
    return script("draw_parallelism")


def test_pictures_are_up_to_date_and_shown(drawing):
    for name, text in drawing.files().items():
        there = (drawing.FOLDER / name).read_text("utf-8")
        assert there == text, "run python scripts/docs/draw_parallelism.py --write"
        assert f"](pictures/{name})" in read("parallelism.md")


@pytest.mark.parametrize("axis", ["pipeline", "replica", "data", "sequence", "tensor"])
def test_pictures_show_what_devices_hold(drawing, axis):
    ways = drawing.WAYS
    mesh = make_mesh(ParallelConfig(**({"data": 1} | {axis: ways})), jax.devices()[:ways])
    shape = (drawing.LAYERS, drawing.WIDTH, drawing.FEED)
    sharding = NamedSharding(mesh, axes.partition_spec(drawing.WEIGHT))
    for device, where in sharding.devices_indices_map(shape).items():
        inside = np.zeros(shape)
        inside[where] = 1
        held = {tuple(map(int, i)) for i in np.argwhere(inside)}
        place = mesh.devices.ravel().tolist().index(device)
        assert drawing.held_weights(axis, place) == held
    tokens = [drawing.held_tokens(axis, device) for device in range(ways)]
    assert set.union(*tokens) == {(r, t) for r in range(drawing.ROWS) for t in range(8)}
    if axis == "sequence":  # an early and a late piece
        assert tokens[0] == {(r, t) for r in range(drawing.ROWS) for t in (0, 7)}


# -------------------------------------------------------------------------------------- plans


@cache
def planned(command: str) -> str:
    """What a plan prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        plan.main(command.split())
    return out.getvalue()


@pytest.mark.parametrize("page", [slow(LAYOUTS), slow(PLANNING)])
def test_plans_that_are_shown_are_printed(page):
    shown = re.findall(r"^\$ python -m jaxpar\.plan (.*)\n((?:.*\n)*?)```", read(page), re.M)
    assert shown
    for command, lines in shown:
        printed = [line.rstrip() for line in planned(command).splitlines()]
        for part in lines.split("\n...\n"):
            assert part.strip("\n") in "\n".join(printed), command


@pytest.mark.slow
def test_the_picture_of_a_plan_is_what_it_prints():
    picture = script("draw_plan")
    there = picture.FILE.read_text("utf-8")
    made = picture.draw(planned(picture.COMMAND))
    assert made == there, "run python scripts/docs/draw_plan.py --write"


def test_benchmark_tables_are_up_to_date():
    tables = script("benchmark_table")
    for page in tables.BLOCKS:
        there = (ROOT / page).read_text("utf-8")
        assert tables.filled(page) == there, "run python scripts/docs/benchmark_table.py --write"


def test_the_chart_of_benchmarks_is_up_to_date_and_shown():
    chart = script("draw_benchmarks")
    there = chart.FILE.read_text("utf-8")
    assert chart.draw() == there, "run python scripts/docs/draw_benchmarks.py --write"
    for page in ("README.md", "docs/benchmarks/README.md"):
        assert f"images/{chart.FILE.name})" in (ROOT / page).read_text("utf-8")


def figures_of(name, card, tables):
    """The figures that a page may give of a card: rate, step time, memory, ratio to torchtitan."""
    rate = card["tokens_per_second_per_device"]
    found = {f"{rate:,.0f}", f"{card['peak_memory_gib']:.1f}"}
    if isinstance(card.get("step_seconds"), dict):
        milliseconds = 1e3 * card["step_seconds"]["median"]
        found |= {f"{milliseconds:,.0f}", f"{milliseconds:,.1f}"}
    if name in tables.BESIDE:
        theirs = json.loads((tables.CARDS / f"{tables.BESIDE[name]}.json").read_text("utf-8"))
        found.add(f"{tables.ratio(card, theirs):.2f}")
    return found


def test_a_number_that_links_to_a_card_is_a_figure_of_it():
    tables, checked = script("benchmark_table"), 0
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        links = re.findall(
            r"\[([\d,]+(?:\.\d+)?)\]\([^)]*?([\w.-]+)\.json\)", page.read_text("utf-8")
        )
        for number, name in links:
            path = tables.CARDS / f"{name}.json"
            card = json.loads(path.read_text("utf-8")) if path.is_file() else {}
            if "tokens_per_second_per_device" in card:
                assert number in figures_of(name, card, tables), f"{page}: {number} of {name}"
                checked += 1
    assert checked > 200


def test_the_headline_counts_every_comparison():
    tables = script("benchmark_table")
    assert f"all {len(tables.BESIDE)} comparisons" in tables.headline()
    assert f"in {len(tables.BESIDE)} comparisons" in tables.picture("")


def test_a_figure_that_is_not_of_its_card_is_seen(tmp_path, monkeypatch, capsys):
    tables = script("benchmark_table")
    page = (ROOT / "README.md").read_text("utf-8")
    (tmp_path / "README.md").write_text(page.replace("| 1.13 |", "| 1.14 |"), "utf-8")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "BLOCKS", {"README.md": tables.BLOCKS["README.md"]})
    assert tables.main(["--check"]) == 1
    assert "README.md: differs from the cards" in capsys.readouterr().out
    assert tables.main(["--write"]) == 0
    assert (tmp_path / "README.md").read_text("utf-8") == page
    assert tables.main(["--check"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sizes", "host", "shapes", "hosts", "experts", "mixtures"])
def test_tables_of_layouts_are_up_to_date(name):
    tables = script("layout_tables")
    expected = f"<!-- layouts: {name} -->\n{tables.table(name)}<!-- /layouts -->"
    assert expected in read(LAYOUTS), "run python scripts/docs/layout_tables.py --write"
    assert list(tables.TABLES) == re.findall(r"<!-- layouts: (\w+) -->", read(LAYOUTS))


# ------------------------------------------------------------------------------------- fields


def test_fields_that_other_systems_options_are_compared_with_exist():
    rows = re.findall(r"^\| .+? \| (.*?) \| .*\|$", read("coming_from.md"), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z]+\.[\w.]+)`", row)}
    assert len(named) > 60
    assert not named - set(field_types())


def test_values_that_other_systems_options_are_compared_with_exist():
    rows = re.findall(r"^\| .+? \| (.*?) \| .*\|$", read("coming_from.md"), re.MULTILINE)
    pairs = {
        (field, value)
        for row in rows
        for field, values in re.findall(r"`([a-z]+\.\w+)`((?:,? `[\w]+`)+)", row)
        for value in re.findall(r"`(\w+)`", values)
    }
    chosen = {(f, v) for f, v in pairs if get_origin(field_types()[f]) is Literal}
    assert len(chosen) > 10
    assert not [(f, v) for f, v in chosen if v not in get_args(field_types()[f])]


def test_flags_in_running_text_are_of_the_config():
    sections = {path.partition(".")[0] for path in field_types()}
    known = field_types().keys() | {option.removeprefix("--") for option in (FROM, FAMILY)}
    unknown = []
    for page in (ROOT / "docs").rglob("*.md"):
        if page.parent.name == "experiments" or page.name == "coming_from.md":
            # The past, and others' flags.
            continue
        text = re.sub(r"^\$ .*\n.*|^config error: .*", "", page.read_text("utf-8"), flags=re.M)
        for flag in re.findall(r"--([a-z]+\.[a-z0-9_.-]*[a-z0-9])", text):
            path = flag.replace("-", "_")
            if path.partition(".")[0] in sections and path not in known:
                unknown.append(f"{page.name}: --{flag}")
    assert not unknown


PATH = re.compile(r"(?<![\w/.])(?:jaxpar|scripts|configs|tests)/[\w/]*[\w.]+(?:\.\w+|/)(?![\w*<])")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page):
    """A file or folder of the project in backquotes is where the page says."""
    named = re.findall(r"`([^`\n]+)`", page.read_text("utf-8"))
    paths = {path for text in named if " " not in text for path in PATH.findall(text)}
    made_by_the_reader = {"configs/chosen.py", "configs/NAME.py"}
    assert not [p for p in sorted(paths - made_by_the_reader) if not (ROOT / p).exists()]


def test_letters_and_axes_of_the_glossary_are_the_codes():
    text = read("glossary.md")
    legend = re.search(r"Shape letters.*?:\n(.*)\"\"\"", axes.__doc__ + '"""', re.S)[1]
    letters = re.findall(r"\b([A-Z]) [A-Za-z]", legend)
    assert re.findall(r"^\| ([A-Z]) \|", text, re.MULTILINE) == letters
    mesh = text[text.index("| axis | also called |") :]
    names = re.findall(r"^\| `(\w+)` \|", mesh, re.MULTILINE)
    assert tuple(names[: len(axes.AXES)]) == axes.AXES
    table = text[text.index("| logical axis |") :]
    told = {
        name: tuple(re.findall(r"\w+", row)) if row != "none" else ()
        for names, row in re.findall(r"^\| (`.*?`) \| (.*?) \| .* \|$", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert told == axes.RULES


# ----------------------------------------------------------------------------------- messages


@cache
def said_by_the_code() -> frozenset[str]:
    """Every piece of text in the package that a message may be made of."""
    pieces: set[str] = set()
    for file in (ROOT / "jaxpar").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                pieces.update(re.split(r"\{\}|\n", node.value))
    return frozenset(piece for piece in pieces if len(piece.strip()) > 3)


#: What a message is about: quoted values, flags, paths, numbers, names of fields and variables.
VALUE = re.compile(r"'[^']*'|--\S+|\S*/\S*|\S*\d\S*|\b\w+[._]\w\S*|\b[A-Z]{4,}\b|\([^)]*\)")


def unsaid(line: str) -> float:
    """Share of a message's letters, those of values left out, that no piece covers."""
    covered = [False] * len(line)
    for piece in said_by_the_code():
        text = piece.strip()
        at = line.find(text)
        while at >= 0:
            covered[at : at + len(text)] = [True] * len(text)
            at = line.find(text, at + 1)
    words = VALUE.sub(lambda found: " " * len(found[0]), line)
    letters = [i for i, c in enumerate(words) if c.isalpha()]
    return sum(not covered[i] for i in letters) / max(len(letters), 1)


def quoted(name: str) -> list[str]:
    """Lines of output that a page quotes, those that others say left out."""
    pattern = re.compile(r"(<!-- said by: .*? -->\n)?^```text\n(.*?)^```", re.M | re.S)
    ours = (found[2] for found in pattern.finditer(read(name)) if not found[1])
    return [line for block in ours for line in block.splitlines()]


def test_messages_that_are_quoted_are_said():
    lines = quoted("troubleshooting.md") + quoted("precision.md")
    assert len(lines) > 20
    invented = {line: f"{unsaid(line):.0%}" for line in lines if unsaid(line) > 0.25}
    assert not invented
    assert unsaid("hang: process 3: step 120, step: was over before it had begun") > 0.25
