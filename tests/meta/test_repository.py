"""What the pages promise is there: links, headings, make targets, programs. No machine's paths."""

import re
import subprocess
import tomllib
from pathlib import Path

from tests.conftest import gpu_of_worker

ROOT = Path(__file__).resolve().parents[2]

#: Pages about the past, whose commands are history.
HISTORY = {"CHANGELOG.md", "experiments.md"}

LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|(?:src|href)=\"([^\"]+)\"")
FENCE = re.compile(r"^( *)(```|~~~)[^\n]*\n(.*?)^\1\2", re.DOTALL | re.MULTILINE)
INLINE_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
MAKE = re.compile(r"(?:^|[;&|(]|\$ )\s*(?:\w+=\S* +)*make +([^\n;&|#)]*)", re.MULTILINE)
PROGRAM = re.compile(r"-m +(jaxpar(?:\.\w+)*)")

#: A folder of somebody's machine at the start of a path (not inside a URL or a relative path).
HOME_PATH = re.compile(r"(?<![\w.~*}$/-])/(?:home|root|Users|work)/[\w.~-]")


def is_made(parts: tuple[str, ...]) -> bool:
    """Whether a path lies in a folder that .gitignore keeps out: made, not written."""
    folders = parts[:-1]
    hidden = any(f == "__pycache__" or f.startswith(".") for f in folders)
    return hidden or parts[0] in ("runs", "data", "build", "dist")


def tracked_files() -> list[Path]:
    """Files that git tracks, or would on `git add .`; without git, all but caches and runs."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        inside = (f.relative_to(ROOT) for f in ROOT.rglob("*"))
        names = [str(f) for f in inside if not is_made(f.parts)]
    else:
        names = listed.stdout.split("\0")
    files = sorted(ROOT / name for name in names if name and (ROOT / name).is_file())
    assert ROOT / "pyproject.toml" in files
    return files


def pages(history: bool) -> list[Path]:
    """Every Markdown page, with or without those about the past."""
    found = [f for f in tracked_files() if f.suffix == ".md"]
    return [f for f in found if history or f.name not in HISTORY]


def code_of(text: str) -> str:
    """The code of a page: its fenced blocks and its inline code, one piece per line."""
    blocks = [m.group(3) for m in FENCE.finditer(text)]
    return "\n".join(blocks + INLINE_CODE.findall(FENCE.sub("", text)))


def links_of(text: str) -> list[str]:
    """Link targets of a page, code left out."""
    prose = INLINE_CODE.sub("`code`", FENCE.sub("", text))
    return [a or b for a, b in LINK.findall(prose)]


def anchors_of(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them, and its explicit ones."""
    prose = FENCE.sub("", text)
    anchors = set(re.findall(r"(?:id|name)=\"([^\"]+)\"", prose))
    for title in re.findall(r"^#+ +(.+?) *#*$", prose, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = base = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        repeat = 0
        while slug in anchors:
            repeat += 1
            slug = f"{base}-{repeat}"
        anchors.add(slug)
    return anchors


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of a page to a missing file or heading."""
    broken = []
    for link in links_of(text):
        if re.match(r"[a-z][a-z0-9+.-]*:|//", link):
            continue  # another site
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists():
            broken.append(f"{page.relative_to(ROOT)}: {link}: no such file")
        elif anchor and target.suffix == ".md":
            there = text if target == page else target.read_text("utf-8")
            if anchor not in anchors_of(there):
                broken.append(f"{page.relative_to(ROOT)}: {link}: no such heading")
    return broken


def make_targets_of(text: str) -> set[str]:
    """Targets that a page tells people to make. TARGET and other capitals are placeholders."""
    words = {word for match in MAKE.findall(code_of(text)) for word in match.split()}
    return {word for word in words if re.fullmatch(r"[a-z][\w-]*", word)}


def missing_programs(text: str) -> set[str]:
    """`python -m jaxpar...` of a page that would not start. jaxpar.NAME is a placeholder."""
    missing = set()
    for module in PROGRAM.findall(text):
        path = ROOT.joinpath(*module.split("."))
        exists = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
        if not exists and not module.split(".")[-1].isupper():
            missing.add(module)
    return missing


def text_of_pages(history: bool) -> dict[str, str]:
    """Text of each page, by path from the root."""
    return {str(p.relative_to(ROOT)): p.read_text("utf-8") for p in pages(history)}


def test_readme_and_the_package_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    exists = (ROOT / "README.md").is_file()
    assert exists == ("readme" in project), (
        'README.md and `readme = "README.md"` in pyproject.toml come together'
    )


def test_links_resolve():
    texts = text_of_pages(history=True)
    broken = [b for page, text in texts.items() for b in broken_links(ROOT / page, text)]
    assert not broken, "\n" + "\n".join(broken)


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, re.MULTILINE))
    told = {page: make_targets_of(text) for page, text in text_of_pages(history=False).items()}
    missing = {page: names - targets for page, names in told.items() if names - targets}
    assert not missing, missing
    assert "test" in told["CONTRIBUTING.md"]


def test_programs_exist():
    told = {page: missing_programs(text) for page, text in text_of_pages(history=False).items()}
    missing = {page: names for page, names in told.items() if names}
    assert not missing, missing


def test_no_file_names_a_folder_of_somebodys_machine():
    named = []
    for file in tracked_files():
        try:
            lines = file.read_text("utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # binary
        at = [n for n, line in enumerate(lines, 1) if HOME_PATH.search(line)]
        named += [f"{file.relative_to(ROOT)}:{n}" for n in at]
    assert not named, named


def test_a_broken_link_is_seen():
    page = ROOT / "CONTRIBUTING.md"
    good = "# A title: `x`\n[a](LICENSE) [b](#a-title-x) [c](https://x.org/y) `[d](none)`\n"
    assert broken_links(page, good) == []
    bad = '![e](e.png) [f](#a-title) <img src="g.png"> [![h](h.png)](LICENSE)'
    assert len(broken_links(page, good + bad)) == 4


def test_commands_are_found_in_code_only():
    text = (
        "We make do. `make one`, `make TARGET`\n"
        "```sh\n$ A=b make -j two three X=y  # make four\ncd d && make five\n```\n"
    )
    assert make_targets_of(text) == {"one", "two", "three", "five"}
    assert missing_programs("python -m jaxpar.NAME and `python -m jaxpar.sharding.axes`") == set()
    assert missing_programs("`python -m jaxpar.nonesuch x`.") == {"jaxpar.nonesuch"}


def test_a_home_folder_is_told_from_a_url():
    own = "/".join(["", "home", "me", "run"])
    assert HOME_PATH.search(f"cd {own}")
    assert HOME_PATH.search(f'"{own}"')
    assert not HOME_PATH.search(f"https://x.org{own} docs{own}")


def test_each_worker_of_a_gpu_run_has_a_gpu_of_its_own():
    assert [gpu_of_worker(f"gw{n}", None, 4) for n in range(5)] == ["0", "1", "2", "3", "0"]
    assert [gpu_of_worker(f"gw{n}", "6,2", 8) for n in range(3)] == ["6", "2", "6"]
