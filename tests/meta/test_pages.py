"""What single pages say is what the code has: plans, figures of cards, fields, files."""

import contextlib
import importlib.util
import io
import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from jaxpar.commands import call
from jaxpar.config.command_line import read_config
from jaxpar.config.config_file import known_configs, load_config
from jaxpar.config.fields import LENGTH, field_types
from jaxpar.config.layers import all_paths
from jaxpar.config.listed import members
from jaxpar.config.model_source import FAMILY, FROM
from jaxpar.config.serialize import to_json
from jaxpar.config.validate import resolve
from jaxpar.prediction.communication import Cluster
from jaxpar.prediction.hardware import GIB, GPUS, NETWORKS
from jaxpar.prediction.ranking import predict
from tests.slow import slow

ROOT = Path(__file__).resolve().parents[2]
PLANNING = "planning.md"


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
    for page in (ROOT / "docs").rglob("*.md"):
        folder = page.parent / "README.md"
        if page == ROOT / "docs" / "index.md":
            continue
        if page.parent == ROOT / "docs" or page == folder or not folder.is_file():
            assert f"]({page.relative_to(ROOT)})" in text
        else:
            assert f"]({page.name})" in folder.read_text("utf-8"), page


def test_pages_are_few_and_short():
    """Recipes and docs/extend aside: 25 pages of docs/; 80,000 words with those at the root."""
    docs = ROOT / "docs"
    pages = [p for p in docs.rglob("*.md") if p.parent not in (docs / "recipes", docs / "extend")]
    assert len(pages) <= 25
    texts = [p.read_text("utf-8") for p in [*pages, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]]
    assert sum(len(text.split()) for text in texts) <= 80_000


# -------------------------------------------------------------------------------------- plans


@cache
def planned(command: str) -> str:
    """What a plan prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        call("plan", shlex.split(command))
    return out.getvalue()


@pytest.mark.slow
def test_plans_that_are_shown_are_printed():
    text = re.sub(r"\\\n *", "", read(PLANNING))  # a command may go over several lines
    shown = re.findall(r"^\$ python -m jaxpar\.plan (.*)\n((?:.*\n)*?)```", text, re.M)
    assert shown
    for command, lines in shown:
        printed = [line.rstrip() for line in planned(command).splitlines()]
        for part in re.split(r"^\.\.\.$", lines, flags=re.MULTILINE):
            assert part.strip("\n") in "\n".join(printed), command


def test_steps_to_less_memory_are_as_predicted():
    """The table of memory.md: each row adds its options to those of the rows before it."""
    section = read("memory.md").partition("<!-- ladder -->")[2].partition("<!-- /ladder -->")[0]
    gpu, options, shown, predicted = GPUS["h100"], {}, [], []
    for words, gib, seconds in re.findall(
        r"\| \d+ \| `(.*?)`.*? \| ([\d.]+) \| ([\d.]+) \|", section
    ):
        options |= dict(re.findall(r"(\S+) (\S+)", words))
        command = f"llama3_8b --train.global-batch-size 64 {shlex.join(sum(options.items(), ()))}"
        cfg = resolve(read_config(shlex.split(command)), gpu.per_host)
        layout = predict(cfg, Cluster(gpu, NETWORKS["ib400"], gpu.per_host, gpu.per_host))
        shown.append((gib, seconds))
        predicted.append((f"{layout.memory.total / GIB:.1f}", f"{layout.time.total:.2f}"))
    assert len(shown) == 13 and shown == predicted


@pytest.mark.parametrize("name", ["benchmark_table", "draw_benchmarks", slow("draw_plan")])
def test_what_is_made_from_cards_is_up_to_date(name, capsys):
    assert script(name).main(["--check"]) == 0, capsys.readouterr().out


def test_cards_are_published_in_short():
    publish, cards = script("publish_cards"), [*script("benchmark_table").CARDS.glob("*.json")]
    assert len(cards) > 50
    for card in cards:
        text = card.read_text("utf-8")
        assert publish.text_of(json.loads(text)) == text, f"run publish_cards.py {card.name}"


def test_a_card_of_a_composed_model_has_addresses():
    config = json.loads(to_json(load_config("qwen3_next_80b_a3b")))
    card = script("publish_cards").published({"config": config, "processes": "1"})
    tables, found = script("benchmark_table"), card["config"]
    assert found["model.layers"] == "(delta_layers x 3, layers) x 12"
    assert found["model.layers.mixer.num_heads"] == 16
    assert tables.name_of(card) == "48 layers of Qwen3-Next with 512 experts"
    assert "recurrences by auto" in tables.how(card)


def test_the_headline_counts_every_comparison():
    tables = script("benchmark_table")
    assert f"all {len(tables.BESIDE)} comparisons" in tables.headline()
    assert f"in {len(tables.BESIDE)} comparisons" in tables.picture("")


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
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {str(page): page.read_text("utf-8") for page in pages} | {"table": tables.table()}
    for page, text in texts.items():
        for number, name in re.findall(r"\[([\d,]+(?:\.\d+)?)\]\([^)]*?([\w.-]+)\.json\)", text):
            path = tables.CARDS / f"{name}.json"
            card = json.loads(path.read_text("utf-8")) if path.is_file() else {}
            if "tokens_per_second_per_device" in card:
                assert number in figures_of(name, card, tables), f"{page}: {number} of {name}"
                checked += 1
    assert checked > 150


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
    assert expected in read(PLANNING), "run python scripts/docs/layout_tables.py --write"
    assert list(tables.TABLES) == re.findall(r"<!-- layouts: (\w+) -->", read(PLANNING))


# ------------------------------------------------------------------------------------- fields


def test_fields_that_other_systems_options_are_compared_with_exist():
    rows = re.findall(r"^\| .+? \| (.*?) \| .*\|$", read("coming_from.md"), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z]+\.[\w.]+)`", row)}
    assert len(named) > 60
    layers = [
        layer for name in known_configs().split(", ") for layer in load_config(name).model.layers
    ]
    below = {path.split(".", start)[-1] for path in all_paths(layers) for start in (2, 3, 4, 5)}
    assert not named - set(field_types()) - below - {LENGTH}


def choices(field: str) -> list[str]:
    """The names that a field may be; none of a number."""
    return [one for one in members(field_types()[field]) if isinstance(one, str)]


def test_values_that_other_systems_options_are_compared_with_exist():
    rows = re.findall(r"^\| .+? \| (.*?) \| .*\|$", read("coming_from.md"), re.MULTILINE)
    pairs = {
        (field, value)
        for row in rows
        for field, values in re.findall(r"`([a-z]+\.\w+)`((?:,? `[\w]+`)+)", row)
        for value in re.findall(r"`(\w+)`", values)
    }
    chosen = {(f, v) for f, v in pairs if choices(f)}
    assert len(chosen) > 10
    assert not [(f, v) for f, v in chosen if v not in choices(f)]


def test_flags_in_running_text_are_of_the_config():
    sections = {path.partition(".")[0] for path in field_types()}
    options = (option.removeprefix("--") for option in (FROM, FAMILY))
    known = {*field_types(), LENGTH, *options}
    unknown = []
    for page in (ROOT / "docs").rglob("*.md"):
        if page.name in ("experiments.md", "coming_from.md"):
            # The past, and others' flags.
            continue
        text = re.sub(r"^\$ .*\n.*|^config error: .*", "", page.read_text("utf-8"), flags=re.M)
        for flag in re.findall(r"--([a-z]+\.[a-z0-9_.-]*[a-z0-9])", text):
            path = flag.replace("-", "_")
            of_layers = re.fullmatch(r"model(\.\w+){2,}", path)  # of a composed model
            if path.partition(".")[0] in sections and path not in known and not of_layers:
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
