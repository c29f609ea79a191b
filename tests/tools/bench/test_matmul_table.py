"""scripts/measure/matmul_table.py: its runs, without a GPU, and what it refuses."""

import dataclasses
import json
import os
import re
import shlex
from pathlib import Path

import pytest

from jaxpar.config import Config, ConfigError, RunConfig
from jaxpar.execution import xla_flag_table
from jaxpar.runtime import exit_codes
from jaxpar.runtime.gpus import visible, xla_flags
from scripts.measure import matmul_autotuned as autotuned
from scripts.measure import matmul_table as matmuls
from tests.tools.bench.tuned import LOG, LOSS, QKV, RESULTS, STEP, found

# ------------------------------------------------------------------------------------- runs alone


def values_of(flags: str) -> dict[str, str]:
    """As XLA reads its variable."""
    parts = (word.lstrip("-").partition("=") for word in shlex.split(flags))
    return {name: value for name, _, value in parts}


class Alone:
    """`matmul_sustained.py` under XLA, as far as files and flags tell: a kernel's time
    is in `took`; each matmul alone has a fingerprint of its own."""

    def __init__(self, each: dict[str, matmuls.Matmul], took: dict[str, float]):
        self.prints = {m.name: f"{n}" * 32 for n, m in enumerate(each.values())}
        self.log, self.results = LOG, RESULTS
        for fingerprint, m in each.items():
            scope = f'op_name=\\"jit({m.name})/dot_general\\"'
            old = re.search(r'op_name="[^"]*"', m.tried.line)[0].replace('"', '\\"')
            self.log = self.log.replace(fingerprint, self.prints[m.name]).replace(old, scope)
            self.results = self.results.replace(fingerprint, self.prints[m.name])
        self.took, self.tables = took, []

    def __call__(self, command, flags: str, log: Path) -> None:
        given = values_of(flags)
        names = json.loads(Path(command[1]).read_text())
        assert command[0] == matmuls.SUSTAINED and given["xla_mine"] == "1"
        assert names.keys() == self.prints.keys()
        if len(command) == 2:
            assert "xla_gpu_load_autotune_results_from" not in given
            Path(given["xla_gpu_dump_autotune_results_to"]).write_text(self.results)
            Path(given["xla_gpu_dump_autotune_logs_to"]).write_text(self.log)
            return
        table = autotuned.entries(Path(given["xla_gpu_load_autotune_results_from"]).read_text())
        taken = {name: str(autotuned.choice_of(table[self.prints[name]])) for name in names}
        self.tables.append(taken)
        times = {name: [self.took[words], self.took[words] + 2] for name, words in taken.items()}
        Path(command[2]).write_text(json.dumps(times))


TOOK = {
    **{"cublaslt_fission 6": 1600.0, "triton 256 128 64 4 8 1 true 1": 1100.0},
    **{"cublaslt_fission 4": 25_000.0, "cublaslt_fission 0": 24_000.0},
}


@pytest.mark.parametrize("turns", [2, 3])
def test_every_rival_gets_its_time(turns, tmp_path, monkeypatch):
    each = found()
    run = Alone(each, TOOK)
    monkeypatch.setattr(matmuls, "_run", run)
    flags = "--xla_mine=1 --xla_gpu_load_autotune_results_from="
    monkeypatch.setattr(matmuls, "CANDIDATES", turns)
    matmuls.time_alone(list(each.values()), flags, tmp_path)
    for m in each.values():
        assert list(m.us) == [str(c) for c in m.rivals()]
        for words, times in m.us.items():
            assert set(times) == {TOOK[words], TOOK[words] + 2}
    assert len(run.tables) == turns
    assert [str(m.best()) for m in each.values()] == [
        "cublaslt_fission 0",
        "triton 256 128 64 4 8 1 true 1",
    ]


def test_of_many_rivals_as_many_as_asked_for(tmp_path, monkeypatch):
    each = found()
    slow = each[LOSS].tried.candidates[2]
    each[LOSS].own = slow
    monkeypatch.setattr(matmuls, "CANDIDATES", 2)
    monkeypatch.setattr(matmuls, "_run", Alone(each, TOOK | {str(slow): 9e9}))
    matmuls.time_alone(list(each.values()), "--xla_mine=1", tmp_path)
    assert list(each[LOSS].us) == [str(slow), "cublaslt_fission 4"]


def test_a_product_that_two_matmuls_share_runs_once(tmp_path, monkeypatch):
    """XLA's log has the second one's kernels under the first one's name alone."""
    each = found()
    twin = dataclasses.replace(each[QKV], us={}, own=each[QKV].tried.candidates[-1])
    twin.tried = dataclasses.replace(twin.tried, fingerprint="2" * 32)
    monkeypatch.setattr(matmuls, "CANDIDATES", 2)
    monkeypatch.setattr(matmuls, "_run", Alone(each, TOOK))
    matmuls.time_alone([*each.values(), twin], "--xla_mine=1", tmp_path)
    assert twin.us == each[QKV].us != {}


def test_what_is_another_matmul_alone_is_not_run(tmp_path, monkeypatch):
    """XLA's log of the runs alone lacks it; and kernels that it lacks there are no rivals."""
    each = found()
    run = Alone(each, TOOK)
    monkeypatch.setattr(matmuls, "CANDIDATES", 2)
    run.log = run.log.replace(f"jit({each[LOSS].name})", "jit(other)").replace(
        "block_m: 256", "block_m: 512"
    )
    monkeypatch.setattr(matmuls, "_run", run)
    matmuls.time_alone(list(each.values()), "--xla_mine=1", tmp_path)
    assert each[LOSS].us == {} and list(each[QKV].us) == ["cublaslt_fission 6"]


@pytest.mark.slow
def test_a_program_that_fails_says_why(tmp_path):
    with pytest.raises(
        exit_codes.RunError, match=r"sustained.py none\.json failed:\n(.|\n)*No such"
    ):
        matmuls._run([matmuls.SUSTAINED, "none.json"], "", tmp_path / "log")


# ------------------------------------------------------------------------------------ the command


@pytest.fixture
def gpu_host(monkeypatch):
    """A host with an H200, as far as the flags can tell, and an environment of its own."""
    monkeypatch.setattr(visible, "gpu_is_present", lambda: True)
    monkeypatch.setattr(xla_flags, "gpu_is_present", lambda: True)
    monkeypatch.setattr(visible, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(xla_flags, "gpu_name", lambda: "NVIDIA H200")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        os.environ.pop("XLA_FLAGS", None)
        yield


@pytest.fixture
def runs(monkeypatch):
    """The commands that would have been run: none where an error comes before."""
    seen = []
    monkeypatch.setattr(matmuls, "_run", lambda command, flags, log: seen.append(command))
    return seen


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "matmuls = 'no GPU': must run on a GPU. Fix: run it on a machine with"),
        (["--table", "t"], "matmuls = 'no GPU': must run on a GPU. Fix: run it on a"),
        (["--table", "here"], "--table = 'here': is a folder, not a file. Fix: use --table here/"),
        (["--table", ""], "--table = '': is empty. Fix: use --table runs/"),
        (["--train.num-step", "3"], "train.num_step = '3': "),
    ],
)
def test_bad_options(config_file, runs, tmp_path, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as error:
        matmuls.main([config_file, *options])
    assert said in str(error.value) and ". Fix: " in str(error.value)
    assert runs == [] and sorted(tmp_path.rglob("*")) == before


def test_a_gpu_whose_runs_read_no_table_needs_one_named(config_file, runs, gpu_host, monkeypatch):
    monkeypatch.setattr(visible, "gpu_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(xla_flags, "gpu_name", lambda: "NVIDIA A100")
    with pytest.raises(ConfigError) as error:
        matmuls.main([config_file])
    assert runs == [] and str(error.value) == (
        "--table = None: is required, since training reads no table on this device. "
        "Fix: add --table runs/matmuls.textproto."
    )


MINE = "--xla_gpu_load_autotune_results_from=mine.textproto --xla_mine=1"


@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_step_is_tuned_without_any_table(gpu_host, tmp_path, in_a_file):
    """And with all other flags of its training, the user's own too."""
    (tmp_path / "flags").write_text(MINE)
    os.environ["XLA_FLAGS"] = str(tmp_path / "flags") if in_a_file else MINE
    words = matmuls.flags_of(Config()).split()
    assert [w for w in words if "load_autotune" in w] == ["--xla_gpu_load_autotune_results_from="]
    assert "--xla_mine=1" in words and not [w for w in words if not w.startswith("--")]
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in words
    alone = matmuls.flags_of(Config(run=RunConfig(xla_flags="none"))).split()
    assert "--xla_gpu_load_autotune_results_from=" in alone


def test_from_config_to_table(config_file, gpu_host, tmp_path, monkeypatch, capsys):
    """In a folder whose name has a space; a table that is there is added to."""
    table = tmp_path / "my tables" / "h200.textproto"
    table.parent.mkdir()
    other = autotuned.entries(RESULTS)[LOSS].replace(LOSS, "0" * 32)
    table.write_text(other)
    os.environ["XLA_FLAGS"] = "--xla_mine=1"
    alone = Alone(found(), TOOK)

    def run(command, flags, log):
        if command[0] != "-m":
            return alone(command, flags, log)
        assert command[1:6] == ["jaxpar.profile", "--bench", config_file, "--train.seed", "3"]
        given = values_of(flags)
        assert given["xla_gpu_load_autotune_results_from"] == "" and given["xla_mine"] == "1"
        Path(given["xla_gpu_dump_autotune_results_to"]).write_text(RESULTS)
        Path(given["xla_gpu_dump_autotune_logs_to"]).write_text(LOG)
        ends = Path(given["xla_dump_to"]) / "module_1.sm_9.0_gpu_after_optimizations.txt"
        ends.write_text(STEP)

    monkeypatch.setattr(matmuls, "_run", run)
    monkeypatch.setattr(matmuls, "CANDIDATES", 2)
    assert matmuls.main([config_file, "--table", str(table), "--train.seed", "3"]) == 0
    entries = autotuned.entries(table.read_text())
    chosen = {f: str(autotuned.choice_of(entry)) for f, entry in entries.items()}
    assert chosen == {
        **{"0" * 32: "cublaslt_fission 4", LOSS: "cublaslt_fission 0"},
        QKV: "triton 256 128 64 4 8 1 true 1",
    }
    said = capsys.readouterr().out
    assert "total saving per step: 2.0 ms" in said  # 2 x 500 us, and 1,000
    assert said.splitlines()[-1] == (
        f"written to {table}; use it with XLA_FLAGS=--xla_gpu_load_autotune_results_from={table}"
    )


def test_a_step_without_large_matmuls_leaves_the_table(
    config_file, gpu_host, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(matmuls, "matmuls_of_step", lambda *_: ([], LOG))
    table = tmp_path / "h200.textproto"
    assert matmuls.main([config_file, "--table", str(table)]) == 0
    assert "nothing to tune" in capsys.readouterr().out and not table.exists()


def test_a_step_that_xla_says_nothing_of_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(matmuls, "_run", lambda *_: None)
    with pytest.raises(
        exit_codes.RunError, match="XLA wrote no log or no program of the train step"
    ):
        matmuls.matmuls_of_step(["quickstart"], "", tmp_path)


def test_the_table_that_training_reads_is_the_one_that_is_written(gpu_host):
    assert f"--{xla_flag_table.TABLE}={matmuls.default_table()}" in xla_flags.apply(Config())
