"""The script that measures the rows of docs/benchmarks/README.md."""

import contextlib
import datetime
import functools
import importlib.util
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import HANG, environment

pytestmark = pytest.mark.waits

ROOT = Path(__file__).resolve().parents[2]


def script(name: str):
    """A script, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/measure/{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def targets():
    return script("targets")


def test_the_pages_predictions_are_the_scripts(targets, capsys):
    assert targets.main(["--list"]) == 0
    listed = capsys.readouterr().out.strip()
    page = (ROOT / "docs/benchmarks/README.md").read_text("utf-8")
    shown = re.search(r"<!-- predictions -->\n(.*?)<!-- /predictions -->", page, re.DOTALL)
    table = listed.partition("\n\n```")[0]
    assert shown and shown[1].strip() == table, "run scripts/measure/targets.py --list --write"
    assert re.findall(r"^# (.*)$", listed, re.M) == list(targets.ROWS)
    assert re.findall(r"^\| (\S+) \| [\d-]", listed, re.M) == list(targets.ROWS)


def test_torchtitan_beside_a_row_has_as_many_sequences_as_long(targets):
    layouts = script("torchtitan_run").LAYOUTS
    for name, row in targets.ROWS.items():
        gpus = row.gpus or 8
        cfg = targets.predicted(row, gpus).cfg
        _, window, sequences, options = layouts[row.torchtitan]
        ways = re.findall(r"(?:tensor|pipeline|context)_parallel_degree (\S+)", options)
        ranks = gpus // math.prod(int(n.format(gpus=gpus)) for n in ways)
        assert (window, sequences * ranks) == (cfg.data.seq_len, cfg.train.global_batch_size), name


def test_torchtitans_log_makes_its_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "tokenizer.json").write_text("{}")
    log, titan = tmp_path / "new" / "logs" / "titan.log", script("torchtitan_run")
    words = ["fsdp", "--data", str(tmp_path), "--log", str(log)]
    monkeypatch.setattr(sys, "argv", ["torchtitan_run.py", *words])
    options = titan.arguments()
    assert not log.parent.exists()  # asking writes nothing
    line = "step: 5  memory: 50.1GiB(36%)  tps: 9,000  tflops: 400  mfu: 40.00%"
    program = f"print('starting'); print({line!r})"
    ran = titan.execute([sys.executable, "-c", program], dict(os.environ), Path(options.log))
    assert ran == (0, ["starting\n", f"{line}\n"])
    assert log.read_text() == f"starting\n{line}\n" and capsys.readouterr().out == f"{line}\n"


@pytest.mark.slow
def test_rows_are_measured_and_what_fails_is_told(
    targets, config_file, dataset, tmp_path, monkeypatch, capsys
):
    row = functools.partial(targets.Row, torchtitan="fsdp", config=config_file, sequences=4)
    one = row(what="again", options="--run.cpu-devices 1", target=0.5, gpus=1, share_of="tiny")
    rows = {
        "tiny": row(what="tiny", options="--run.cpu-devices {gpus}", target=1e9),
        "again": one,
        "uneven": row(what="uneven", options="--parallel.tensor 3"),
        "three": row(what="three", options="", ways=3),
    }
    monkeypatch.setattr(targets, "ROWS", rows)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    cards = tmp_path / "cards"
    where = ["--data", str(dataset), "--cards", str(cards)]
    asked = ["--gpus", "2", "--steps", "4", "--torchtitan", sys.executable]
    assert targets.main([*where, *asked]) == 1
    said = capsys.readouterr().out
    assert "three: needs a multiple of 3 GPUs, not 2: skipped" in said
    assert "uneven: skipped on 2 GPUs: model.layers.mixer.num_kv_heads = 2: must be" in said
    assert "failed: tiny, again\n" in said
    assert re.search(r"torchtitan-tiny\.log: .* contains no tokenizer\.json", said)
    found = {name: json.loads((cards / f"{name}.json").read_text()) for name in list(rows)[:2]}
    assert found["tiny"]["config"]["train"]["global_batch_size"] == 8
    assert [found[name]["mesh"] for name in found] == ["data=2", "1 device"]
    assert len({found[name]["host"] for name in found}) == 1
    assert all(datetime.datetime.fromisoformat(found[name]["time"]) for name in found)
    rates = {name: card["tokens_per_second_per_device"] for name, card in found.items()}
    lines = dict(re.findall(r"^\| (tiny|again) \| (.*) \|$", said, re.M))
    assert lines["tiny"].startswith(f"1,000,000,000 | {rates['tiny']:,.0f} | 0.0% |")
    share = rates["again"] / (0.5 * rates["tiny"])
    assert lines["again"].startswith(f"50% of tiny | {rates['again']:,.0f} | {share:.1%} |")
    assert lines["again"].endswith("| - | -")


OTHER_BENCH = """
import json, pathlib, sys
figures = dict(tokens_per_second_per_device=1.0, peak_memory_gib=2.0, mfu_causal=None)
pathlib.Path(sys.argv[sys.argv.index("--card") + 1]).write_text(json.dumps(figures))
"""


OTHER_CONFIG = "field_types = lambda: ['train.global_batch_size', 'data.document_mask']"


@pytest.mark.slow
def test_another_checkout_is_measured_beside(
    targets, config_file, dataset, tmp_path, monkeypatch, capsys
):
    rows = {"tiny": targets.Row("tiny", "fsdp", config_file, "--run.cpu-devices 1", 4)}
    monkeypatch.setattr(targets, "ROWS", rows)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    other, cards = tmp_path / "other", tmp_path / "cards"
    for folder in ("bench", "config"):
        (other / "jaxpar" / folder).mkdir(parents=True)
    files = {"__init__": "", "config/__init__": "", "config/fields": OTHER_CONFIG}
    for name, text in (files | {"bench/__init__": "", "bench/__main__": OTHER_BENCH}).items():
        (other / "jaxpar" / f"{name}.py").write_text(text)
    where = ["--data", str(dataset), "--cards", str(cards), "--beside", str(other)]
    assert targets.main([*where, "--gpus", "1", "--steps", "4"]) == 0
    said = capsys.readouterr().out
    theirs, ours = said.index(f"{other} $ "), said.index("\n$ ")
    assert theirs < ours  # the other one's first
    assert f"{other} has no --run.cpu-devices: measured without" in said
    assert "--run.cpu-devices" not in said[theirs:ours] and "--run.cpu-devices 1" in said[ours:]
    rate = json.loads((cards / "tiny.json").read_text())["tokens_per_second_per_device"]
    assert "| beside, GiB | ratio |\n" in said
    assert re.search(rf"^\| tiny .* \| 1, 2\.0 \| {rate:.3f} \|$", said, re.M)


def commands() -> Iterator[bytes]:
    """Those of the processes that run now."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            yield file.read_bytes()


def gone(words: str) -> bool:
    """Whether no process has these words in its command. One that was killed is still listed until
    the system has taken it apart."""
    until = time.monotonic() + HANG
    while (left := any(words.encode() in c for c in commands())) and time.monotonic() < until:
        time.sleep(0.1)
    return not left


def test_a_run_that_takes_too_long_is_ended_with_its_children(targets, tmp_path, capsys):
    child = f"sleep {1000 + os.getpid()}"  # of a shell, which has begun long before three seconds
    parent = ["sh", "-c", f"echo begun; {child} & wait"]
    assert targets.run(parent, tmp_path / "card.json", 3, 1) is None
    said = capsys.readouterr().out
    assert "failed, exit code none after 3 s" in said and said.rstrip().endswith("card.log: begun")
    assert gone(child)


def test_a_card_of_an_earlier_time_stays_until_there_is_another(targets, tmp_path, capsys):
    card, partial = tmp_path / "card.json", tmp_path / "card.partial"
    card.write_text('{"n": 1}')
    write = f"import pathlib, sys; pathlib.Path({str(card)!r}).write_text('{{\"n\": 2}}'); "
    assert targets.run([sys.executable, "-c", write + "sys.exit(3)"], card, 60, 1) is None
    assert json.loads(card.read_text()) == {"n": 1} and json.loads(partial.read_text()) == {"n": 2}
    assert "failed, exit code 3" in capsys.readouterr().out
    assert targets.run([sys.executable, "-c", write], card, 60, 1) == {"n": 2}
    assert json.loads(card.read_text()) == {"n": 2} and not list(tmp_path.glob("*.earlier"))


def test_ctrl_c_leaves_the_table_of_what_was_measured(
    targets, dataset, tmp_path, monkeypatch, capsys
):
    measured = {"tokens_per_second_per_device": 1e4, "mfu_causal": None, "peak_memory_gib": 80.0}

    def measure(name, _):
        if name == "float8":
            raise KeyboardInterrupt
        return {"jaxpar": measured}

    monkeypatch.setattr(targets, "measure", measure)
    where = ["--data", str(dataset), "--cards", str(tmp_path)]
    assert targets.main(["fsdp", "float8", "--gpus", "8", *where]) == 130
    said = capsys.readouterr().out
    assert "| FSDP | 12,000 | 10,000 |" in said and "| FSDP in float8 |" not in said
    assert said.endswith("interrupted: 1 of 2 rows measured\n")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_with_its_children(number, code, dataset, tmp_path):
    card = tmp_path / "1.5b.json"
    card.write_text("{}")
    command = [sys.executable, str(ROOT / "scripts/measure/targets.py"), "1.5b", "--gpus", "1"]
    command += ["--data", str(dataset), "--cards", str(tmp_path)]
    given = environment() | {"PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=given, text=True, **pipes) as process:
        for line in process.stdout:
            if "jaxpar.profile --bench" in line:
                break
        while not any(str(card).encode() in c for c in commands()):
            time.sleep(0.05)
        process.send_signal(number)
        said, wrong = process.communicate(timeout=600)
    assert process.returncode == code and "Traceback" not in wrong
    assert ("interrupted: 0 of 1 rows" in said) == (number == signal.SIGINT)
    assert gone(str(card))
    assert card.read_text() == "{}"


def test_more_gpus_than_can_be_seen_are_refused(targets, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(SystemExit):
        targets.main(["fsdp", "--gpus", "8"])
    assert "--gpus = 8: only 2 are visible" in capsys.readouterr().err


@pytest.mark.slow
def test_a_list_that_is_not_read_to_its_end_or_has_no_rows(targets, capsys):
    command = f"{sys.executable} scripts/measure/targets.py 1.5b --list | true"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert targets.main(["data-pipeline2", "--list", "--gpus", "3"]) == 1
    assert capsys.readouterr().out.endswith("no rows fit 3 GPUs\n")


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["fdsp", "--gpus", "8"], "ROW = 'fdsp' is not known. Fix: one of fsdp, "),
        (
            ["--data", "nowhere", "--gpus", "8"],
            "--data = 'nowhere' contains no tokens. Fix: python",
        ),
        (
            ["--list", "--torchtitan", "titan"],
            "--torchtitan = 'titan' is not a program. Fix: use the python",
        ),
        (["--list", "--write", "--gpus", "4"], "--write: the page has all rows for 8 GPUs. Fix: "),
        (
            ["--list", "--beside", "nowhere"],
            "--beside = 'nowhere' does not contain jaxpar/config. Fix: ",
        ),
        (["--gpus", "0", "--list"], "--gpus = 0: must be at least 1. Fix: --gpus 8"),
        (["--steps", "0"], "--steps = 0: must be at least 1. Fix: --steps 10"),
        (["--timeout", "-1"], "--timeout = -1: must be at least 1. Fix: --timeout 900"),
        (["--cards", ""], "--cards = '': is empty. Fix: use --cards runs/folder"),
        (["--cards", __file__], "is a file, not a folder"),
    ],
)
def test_refusals(targets, words, rule, capsys):
    with pytest.raises(SystemExit) as stop:
        targets.main(words)
    assert stop.value.code == 2 and rule in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (
            "torchtitan_run fsdp --data nowhere",
            "--data = 'nowhere' contains no tokenizer.json. Fix: ",
        ),
        ("torchtitan_run fsdp --steps 0", "--steps = 0: must be at least 3. Fix: --steps 20"),
        ("torchtitan_run fsdp --gpus 0", "--gpus = 0: must be at least 1. Fix: --gpus 8"),
        ("torchtitan_run fsdp --data HERE --card HERE", "is not a writable file. Fix: --card"),
        ("torchtitan_run fsdp --data HERE --card=", "--card = '': is not a writable file"),
        ("loader --batch 0", "--batch = 0: must be at least 1. Fix: --batch 32"),
        ("loader --seq-len -1", "--seq-len = -1: must be at least 1. Fix: --seq-len 1024"),
        ("saves nowhere/config.json", "CONFIG.json = 'nowhere/config.json': cannot be read: "),
        ("saves HERE/tokenizer.json", "Fix: give the config.json of a run"),
        ("saves nowhere --saves 0", "--saves = 0: must be at least 1. Fix: --saves 5"),
    ],
)
def test_refusals_of_the_other_scripts(words, rule, tmp_path, monkeypatch, capsys):
    (tmp_path / "tokenizer.json").write_text("{}}")
    script, *rest = words.replace("HERE", str(tmp_path)).split()
    file = str(ROOT / f"scripts/measure/{script}.py")
    monkeypatch.setattr(sys, "argv", [file, *rest])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(file, run_name="__main__")
    assert stop.value.code == 2 and rule in capsys.readouterr().err
