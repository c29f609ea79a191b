"""Steps of a run that goes on, traced: at a step, by a file, by a signal; and read again."""

import json
import os
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.monitoring import metrics, profile_folder, profiler
from jaxpar.runtime import exit_codes
from jaxpar.tools.profiling.trace import xspace
from tests import ranks
from tests.e2e.test_train import records_of

SHORT = ("--train.num-steps", "14", "--checkpoint.every", "0", "--evaluation.every", "0")


def numbers_of(run: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    return [(r["loss"], r["grad_norm"]) for r in records_of(run) if "loss" in r]


@pytest.fixture(scope="module")
def plain(train_on, write_config, tmp_path_factory) -> Path:
    """A run without profiles."""
    where = tmp_path_factory.mktemp("plain")
    assert train_on(2, write_config(where), *SHORT) == exit_codes.EXIT_OK
    return where / "run"


@pytest.fixture(scope="module")
def profiled(train_on, write_config, tmp_path_factory) -> Path:
    """The same run, profiled by a file at its start, at step 5, and by a signal in step 9."""
    where = tmp_path_factory.mktemp("profiled")
    (where / "run").mkdir()
    (where / "run" / profiler.REQUEST_FILE).touch()
    write_previous = metrics.MetricsWriter.write_previous

    def signalled(self, step, *measured):
        if step + 1 == 9:
            os.kill(os.getpid(), signal.SIGUSR1)
        write_previous(self, step, *measured)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics.MetricsWriter, "write_previous", signalled)
        args = (*SHORT, "--profile.start", "5", "--profile.num-steps", "2")
        assert train_on(2, write_config(where), *args) == exit_codes.EXIT_OK
    return where / "run"


@pytest.fixture(scope="module")
def shown(profiled, tmp_path_factory) -> dict:
    """Every figure of its profile of step 5, and the text under "text"."""
    path = tmp_path_factory.mktemp("shown") / "profile.json"
    with pytest.MonkeyPatch.context() as patch:
        text: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: text.append(" ".join(words)))
        call("profile", [str(profiled), "--step", "5", "--json", str(path)])
    return json.loads(path.read_text("utf-8")) | {"text": "\n".join(text)}


@pytest.mark.slow
def test_profiles_of_a_running_run_change_no_bit(plain, profiled):
    assert list(profile_folder.profiles_of(profiled)) == [1, 5, 10]
    assert numbers_of(profiled) == numbers_of(plain) and len(numbers_of(plain)) == 14
    assert not (profiled / profiler.REQUEST_FILE).exists()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    for step, where in profile_folder.profiles_of(profiled).items():
        facts = profile_folder.read_facts(where)
        assert (facts.first_step, facts.num_steps, facts.devices) == (step, 2, 2)
        assert facts.memory["argument_size_in_bytes"] > 0
        files = {str(f.relative_to(where)) for f in where.rglob("*") if f.is_file()}
        traces = f"plugins/profile/{where.name}/process_0"
        endings = (".xplane.pb", ".trace.json.gz")
        assert files == {"profile.json", "step.hlo.txt.gz", *(traces + end for end in endings)}


def test_a_cpus_profile(shown, profiled):
    found = shown["profile"]
    assert (found["devices"], found["steps"]) == (2, 2)
    ms = found["ms"]
    assert ms["step"] == pytest.approx(ms["compute"] + ms["exposed"] + ms["idle"])
    assert {"matmul", "fusion", "communication"} <= found["by_class"].keys()
    assert {"all-gather", "all-to-all", "all-reduce"} <= found["communication"].keys()
    assert found["unattributed_ms"] < 0.1 * ms["step"]
    places = {(row["pass"], row["scope"]) for row in found["by_scope_ms"]}
    for scope in ("attention/qkv", "feed_forward/gate_up", "loss"):
        assert {("forward", scope), ("backward", scope)} <= places, scope
    assert ("outside", "optimizer") in places
    assert found["devices_ms"].keys() == {"0", "1"}
    memory = shown["memory"]
    assert sum(memory["given"].values()) == memory["arguments"] and memory["temporaries"] > 0
    assert memory["given"]["state.params"] == memory["given"]["state.opt_state[0].mu"]
    assert shown["missing"] == [] and shown["collective_bytes"]["bytes"] > 0
    text = shown["text"]
    assert f"{profiled}/profiles/step_00000005: steps 5 to 6 on 2 x cpu, mesh data=2" in text
    assert "note: this is a CPU trace" in text and "compiled memory per device" in text


def test_of_programs_of_one_name_the_one_that_was_profiled():
    """A process that has trained two models has two programs, as in a notebook."""
    compiled = [jax.jit(jnp.sin).lower(jnp.zeros(n)).compile() for n in (3, 5)]
    modules = [one.runtime_executable().hlo_modules()[0] for one in compiled]
    programs = [xspace.TracedProgram(m.as_serialized_hlo_module_proto(), None) for m in modules]
    for program, one in zip(programs, compiled, strict=True):
        assert xspace.program_of(programs, one.as_text()) is program
    assert xspace.program_of(programs, "") is programs[-1]
    assert xspace.program_of([], compiled[0].as_text()) is None


def test_which_profile(profiled, capsys):
    call("profile", [str(profiled), "--top", "3"])
    said = capsys.readouterr().out
    assert "steps 10 to 11" in said
    assert "other profiles of the run, for --step: 1, 5" in said
    call("profile", [str(profiled / "profiles" / "step_00000001")])
    assert "steps 1 to 2" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"--step = 7: is not the first step of .* 1, 5"):
        call("profile", [str(profiled), "--step", "7"])


def test_without_facts_and_hlo_the_trace_tells_the_rest(profiled, tmp_path, capsys):
    (trace,) = (profiled / "profiles" / "step_00000005").rglob("*.xplane.pb")
    shutil.copy(trace, tmp_path / "a.xplane.pb")
    call("profile", [str(tmp_path / "a.xplane.pb")])
    text = capsys.readouterr().out
    assert "jit_train_step" in text and "attention/qkv" in text and "MFU" not in text
    with pytest.raises(ConfigError, match=r"--step = 5: selects one of a run's profiles"):
        call("profile", [str(tmp_path / "a.xplane.pb"), "--step", "5"])


def test_a_cut_off_trace_is_refused(profiled, tmp_path):
    (trace,) = (profiled / "profiles" / "step_00000005").rglob("*.xplane.pb")
    cut = tmp_path / "cut.xplane.pb"
    cut.write_bytes(trace.read_bytes()[:-1000])
    with pytest.raises(
        ConfigError, match=r"cut\.xplane\.pb is not a profiler trace or is truncated"
    ):
        call("profile", [str(cut)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        (profiler, "capture", RuntimeError("another profiler is at work")),
        (profile_folder, "write_hlo", OSError(28, "No space left on device")),
    ],
)
def test_a_profiler_that_fails_ends_no_run(
    module, name, error, train_on, config_file, tmp_path, monkeypatch, capsys
):
    def broken(*_):
        raise error

    monkeypatch.setattr(module, name, broken)
    assert train_on(2, config_file, *SHORT, "--profile.start", "2") == exit_codes.EXIT_OK
    said = capsys.readouterr().out
    assert (
        f"WARNING    profile of step 2 failed: {type(error).__name__}: {error} (process 0)" in said
    )
    assert len(numbers_of(tmp_path / "run")) == 14
    assert not list((tmp_path / "run" / "profiles").rglob(".process_*"))


@pytest.mark.waits
@pytest.mark.slow
def test_a_signal_to_one_process_makes_all_trace_the_same_steps(write_ranks, tmp_path, capsys):
    config = write_ranks(tmp_path)
    args = ("--", config, "--train.num-steps", "20", "--checkpoint.every", "0")
    code, said = ranks.finish(ranks.launch(2, 1, *args, FAULT="1 8 SIGUSR1"))
    assert code == exit_codes.EXIT_OK, said[-3000:]
    (where,) = profile_folder.profiles_of(tmp_path / "run").values()
    assert where.name == "step_00000012"  # 8 steps done, 3 ahead, and the next
    names = {file.name for file in where.rglob("*.xplane.pb")}
    assert names == {"process_0.xplane.pb", "process_1.xplane.pb"}
    call("profile", [str(tmp_path / "run")])
    text = capsys.readouterr().out
    assert "mean of 2 devices" in text and "\n  0:0 " in text and "\n  1:" in text
