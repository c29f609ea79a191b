"""What the pages quote is so: excerpts, commands, tables that are made."""

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxpar.certification import meshes
from jaxpar.certification.options import CertifyOptions
from jaxpar.checkpoint.saved import FREE_MODEL_FIELDS
from jaxpar.commands import names_of_forms
from jaxpar.commands import read as read_options
from jaxpar.config import ConfigError, reference
from jaxpar.config.fields import leaf_paths
from jaxpar.config.incompatible import TABLE
from jaxpar.config.metrics import METRICS, Metric
from jaxpar.config.remat_policies import EXPERT_NAMES, REMAT_NAMES, REMAT_POLICIES
from jaxpar.config.schema.features import SECTIONS
from jaxpar.runtime.processes.launch_options import LaunchRun
from jaxpar.step.features import FEATURES
from jaxpar.tools.planning.command import asked_for
from jaxpar.tools.planning.options import PlanOptions
from jaxpar.tools.sweeps.command import read_sweep
from jaxpar.tools.sweeps.options import SweepOptions
from jaxpar.train import TrainOptions
from scripts.docs import generated_table

ROOT = Path(__file__).resolve().parents[2]

#: Pages whose commands must work today; those of the experiments and CHANGELOG.md are history.
CONFIGURATION = ROOT / "jaxpar" / "config" / "configuration.md"
PAGES = [
    ROOT / "README.md",
    CONFIGURATION,
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "experiments.md"),
]

EXCERPT = re.compile(r"<!-- excerpt: (\S+) (\S+) -->\n```python\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"python -m jaxpar\.(\S*.*)|^(?:python -m )?jaxpar ([a-z].*)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def read(name: str) -> str:
    """A page's text."""
    return (ROOT / name).read_text("utf-8")


# ---------------------------------------------------------------------------------- excerpts


def source_of(file: Path, name: str) -> str:
    """Source of a function, class, `Class.method` or top-level name of a file."""
    text = file.read_text("utf-8")
    body, node = ast.parse(text).body, None
    for part in name.split("."):
        node = next((n for n in body if part in names_of(n)), None)
        assert node is not None, f"{file.relative_to(ROOT)} has no {name}"
        body = getattr(node, "body", [])
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return "".join(text.splitlines(keepends=True)[first - 1 : node.end_lineno])


def names_of(node: ast.stmt) -> set[str]:
    """The names that a statement defines."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return {getattr(node, "name", ""), *(t.id for t in targets if isinstance(t, ast.Name))}


def excerpts() -> list[tuple[str, str, str, str]]:
    """(page, file, name, code) of every excerpt."""
    return [(page.name, *found) for page in PAGES for found in EXCERPT.findall(page.read_text())]


@pytest.mark.parametrize(("page", "file", "name", "code"), excerpts())
def test_excerpts_are_verbatim(page, file, name, code):
    assert code.strip(), "empty"
    assert code in source_of(ROOT / file, name), f"{page}: {name} of {file} reads otherwise now"


# ---------------------------------------------------------------------------------- commands


def commands(text: str) -> Iterator[list[str]]:
    """Words of each `python -m jaxpar.NAME` or `jaxpar NAME` in a page's code, from the module on.

    Left out are those with placeholders (CONFIG, ...), those shown to fail, after a `$ `, messages
    that name a program, and bare mentions of one.
    """
    blocks = [code.replace("\\\n", " ") for _, code in BLOCK.findall(text)]
    blocks = [re.sub(r"^(config error|bad numerics): .*", "", code, flags=re.M) for code in blocks]
    inline = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", BLOCK.sub("", text))
    for line in "\n".join(blocks + inline).splitlines():
        found = None if line.startswith("$ ") else COMMAND.search(line)
        words = shlex.split(f"jaxpar.{found[1] or found[2]}", comments=True) if found else []
        placeholder = any(w.split(".")[-1].isupper() or "..." in w for w in words)
        mention = all(
            word in names_of_forms(words[0].removeprefix("jaxpar.")) for word in words[1:]
        )
        if words and not placeholder and not mention:
            yield words


def check_command(words: list[str]) -> None:
    """Read a command line as its program would, without running it."""
    program, *args = (word for word in words if word != "--help")
    options = read_options(program.removeprefix("jaxpar."), args)
    cfg = options.config.asked(lambda _, __, like: like) if hasattr(options, "config") else None
    if isinstance(options, CertifyOptions):
        meshes.parse_meshes(options.mesh, cfg.parallel)
    elif isinstance(options, SweepOptions):
        read_sweep(options)
    elif isinstance(options, PlanOptions):
        asked_for(options, lambda _, __, like: like)
    elif isinstance(options, TrainOptions | LaunchRun):
        options.config.checked(model_from=lambda _, __, like: like)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_can_be_read(page):
    for words in commands(page.read_text("utf-8")):
        try:
            check_command(words)
        except (ConfigError, SystemExit) as error:
            pytest.fail(f"{page.name}: python -m {shlex.join(words)}: {error}")


def test_a_wrong_command_is_seen():
    assert len(list(commands(read("README.md")))) >= 6
    text = "`python -m jaxpar.train CONFIG --a.b v`\n```sh\npython -m jaxpar.train llama3_8b \\\n"
    (words,) = commands(text + "  --parallel.tenser 2  # two\n```\n")
    with pytest.raises(ConfigError, match=r"parallel\.tenser.*is not a field"):
        check_command(words)
    with pytest.raises(ConfigError, match="Fix: use --prompt"):
        check_command(["jaxpar.sample", "runs/quickstart", "--promt", "x"])
    assert list(commands("`jaxpar plan llama3_8b --gpus 8`")) == [
        ["jaxpar.plan", "llama3_8b", "--gpus", "8"]
    ]


def test_errors_that_are_quoted_are_said_so():
    shown = r"^\$ python -m (jaxpar\.train .+)\n((?:(?!\$ |```).+\n)+)"
    quoted = re.findall(shown, CONFIGURATION.read_text("utf-8"), re.M)
    assert len(quoted) == 2
    for command, said in quoted:
        with pytest.raises(ConfigError) as error:
            check_command(shlex.split(command))
        assert said == f"config error: {error.value}\n"


# ------------------------------------------------------------------------ tables


def script_of(name: str):
    """A script of scripts/docs, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / "docs" / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize("name", ["backend_table", "code_map", "families", "network_table"])
def test_tables_that_are_made_are_up_to_date(name):
    script = script_of(name)
    expected = generated_table.between(script.MARK, script.table())
    assert expected in read(f"docs/{script.PAGE}"), f"run python scripts/docs/{name}.py --write"


@pytest.mark.slow
def test_what_pages_say_of_predictions_is_up_to_date():
    script = script_of("plan_calibration")
    for page in script.BLOCKS:
        assert read(page) == script.filled(page), (
            "run python scripts/docs/plan_calibration.py --write"
        )


def metrics_in_order() -> dict[str, Metric]:
    """All metrics by group: those of every run, of objectives and of features."""
    declared = {n: m for one in (*SECTIONS.values(), *FEATURES) for n, m in one.metrics.items()}
    found = {n: m for n, m in METRICS.items() if n not in declared} | declared
    assert found == METRICS
    groups = ["training", "preferences", "layers", "experts", *(m.group for m in found.values())]
    shown = [(name, metric) for name, metric in found.items() if metric.shown != "never"]
    return dict(sorted(shown, key=lambda row: groups.index(row[1].group)))


def test_every_metric_is_on_its_page():
    rows = [
        f"| `{n}` | {m.group} | {m.unit or '–'} | {m.meaning} |"
        for n, m in metrics_in_order().items()
    ]
    head = "| name | group | unit | meaning |\n|---|---|---|---|\n"
    table = head + "".join(row + "\n" for row in rows)
    assert f"<!-- metrics -->\n{table}<!-- /metrics -->" in read("docs/monitoring.md"), table


def test_the_page_of_fields_has_each_field_once():
    """With its default and its meaning; the tables take the place of the mark in the text."""
    page = reference.configuration()
    rows = re.findall(r"^\|`([\w.]+)`\|(.+?)\|(.*)\|$", page, re.MULTILINE)
    named = [path for path, _, _ in rows]
    assert [path for path in leaf_paths() if named.count(path) != 1] == []
    assert [path for path, _, meaning in rows if path in leaf_paths() and not meaning] == []
    assert reference.MARK not in page and page.startswith("# Configuration\n")


def test_the_page_of_combinations_has_each_row_of_the_table():
    lines = reference.combinations().splitlines()
    for one, other, why in TABLE:
        (line,) = [line for line in lines if line.startswith(f"|{other.label}|")]
        assert one.label in line and why in line


def test_model_fields_that_may_change_are_as_listed():
    row = next(line for line in read("docs/checkpoints.md").splitlines() if "every `model`" in line)
    listed = set(re.findall(r"`(\w+)`", row.partition(" but ")[2]))
    assert listed == FREE_MODEL_FIELDS


def test_remat_policies_are_as_listed():
    names_table, policies_table = read("docs/parallelism.md").split("| policy | saves |")
    for name in (*REMAT_NAMES, *EXPERT_NAMES):
        assert f"| `{name}` |" in names_table, name
    for policy, names in REMAT_POLICIES.items():
        (row,) = re.findall(rf"^\| `{policy}` \| ([^|]*) \|", policies_table, re.MULTILINE)
        saved = (
            REMAT_NAMES if row.startswith("all of them") else tuple(re.findall(r"`([\w:]+)`", row))
        )
        assert saved == names, policy
