"""`python -m jaxpar.bench scaling`: its points, their order, what it writes and what it refuses."""

import json
from xml.etree import ElementTree as ET

import pytest

from jaxpar import bench
from jaxpar.bench.scaling import child, command, points, results
from jaxpar.bench.scaling.child import PointFailed
from jaxpar.config import ConfigError, replace
from jaxpar.runtime.gpus import visible
from tests.tiny import TINY

SIMULATED = replace(TINY, **{"run.cpu_devices": 8})


def settings_of(cfg, counts, axis, mode) -> list[dict]:
    return [dict(point.settings) for point in points.all_points(cfg, counts, [axis], [mode])]


# ----------------------------------------------------------------------------------- the points


def test_weak_scaling_grows_the_batch_and_strong_does_not():
    weak = settings_of(SIMULATED, [1, 2, 4], "data", "weak")
    assert [s["parallel.data"] for s in weak] == [1, 2, 4]
    assert [s.get("train.global_batch_size", 8) for s in weak] == [8, 16, 32]
    assert [s["run.cpu_devices"] for s in weak] == [1, 2, 4]
    strong = settings_of(SIMULATED, [1, 2, 4], "data", "strong")
    assert [s["parallel.data"] for s in strong] == [1, 2, 4]
    assert not any("train.global_batch_size" in s for s in strong)


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "sequence", "replica"])
def test_one_axis_grows_and_data_stays(axis):
    made = settings_of(SIMULATED, [1, 2], axis, "weak")
    assert [s.get(f"parallel.{axis}", 1) for s in made] == [1, 2]
    assert [s["parallel.data"] for s in made] == [1, 1]
    assert made[1]["train.global_batch_size"] == 16


def test_a_pipelines_microbatches_keep_their_size():
    cfg = replace(SIMULATED, **{"parallel.num_microbatches": 4})
    assert settings_of(cfg, [1, 2], "pipeline", "weak")[1]["parallel.num_microbatches"] == 8
    assert "parallel.num_microbatches" not in settings_of(cfg, [1, 2], "pipeline", "strong")[1]
    assert "parallel.num_microbatches" not in settings_of(cfg, [1, 2], "data", "weak")[1]
    sized = replace(SIMULATED, **{"train.micro_batch_size": 2})
    assert "parallel.num_microbatches" not in settings_of(sized, [1, 2], "pipeline", "weak")[1]


def test_the_other_axes_stay_as_the_config_has_them():
    cfg = replace(SIMULATED, **{"parallel.tensor": 2})
    assert points.counts_for(cfg, ["data"], 8) == [2, 4, 8]
    made = settings_of(cfg, [2, 4], "data", "weak")
    assert [s["parallel.data"] for s in made] == [1, 2]
    assert [s.get("train.global_batch_size", 8) for s in made] == [8, 16]  # of the fewest devices
    both = replace(SIMULATED, **{"parallel.data": 2})
    assert [s["parallel.tensor"] for s in settings_of(both, [4], "tensor", "strong")] == [2]


def test_default_counts_are_powers_of_two_up_to_the_devices():
    assert points.counts_for(SIMULATED, ["data"], 8) == [1, 2, 4, 8]
    assert points.counts_for(SIMULATED, ["data", "tensor"], 6) == [1, 2, 4]


def test_a_point_has_the_first_of_the_visible_gpus(monkeypatch):
    monkeypatch.setattr(visible, "gpu_is_present", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6,GPU-12ab,7")
    on_gpus = points.all_points(TINY, [1, 2], ["data"], ["weak"])
    seen = [child.environment(point)["CUDA_VISIBLE_DEVICES"] for point in on_gpus]
    assert seen == ["4", "4,6"]
    assert command.devices_here(TINY) == 4 and command.devices_here(SIMULATED) == 8
    simulated = points.all_points(SIMULATED, [1, 2], ["data"], ["weak"])
    assert child.environment(simulated[0])["CUDA_VISIBLE_DEVICES"] == "4, 6,GPU-12ab,7"


# ------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "1,two"], "--gpus = '1,two': must be whole numbers from 1 to 4,096, separated"),
        (["--gpus", "0,1"], "--gpus = '0,1': must be whole numbers from 1"),
        (["--gpus", "1," + "9" * 5000], "must be whole numbers from 1"),
        (["--gpus", ""], "--gpus = '': must be whole numbers"),
        (["--gpus", "2,2"], "--gpus = '2,2': must be at least two numbers, to compare"),
        (["--axis", "expert"], "--axis = 'expert': must be one or several of pipeline, replica"),
        (["--axis", "data,"], "--axis = 'data,': must be one or several of"),
        (["--steps", "0"], "--steps = 0: must be at least 1"),
        (["--plot", "a.png"], "--plot = 'a.png': must end in .svg.*Fix: use --plot a.svg"),
        (["--plot", "/"], "--plot = '/': is a folder"),
        (["--card", ""], "--card = '': is empty"),
        (["--run.dir", "runs/mine"], "run.dir = 'runs/mine': has no effect"),
        (["--trace", "t"], "trace"),
        (["--gpus", "1,16", "--run.cpu-devices", "4"], "devices than there are: there are 4. Fix"),
        (["--gpus", "1,2,16", "--run.cpu-devices", "4"], "Fix: use --gpus 1,2, or add --run.cpu-d"),
        (
            ["--gpus", "1,3,4", "--run.cpu-devices", "4", "--strong", "--axis", "replica"],
            "train.global_batch_size = 8: on 3 devices, strong scaling over replica: must be "
            "divisible by parallel.replica = 3.*Fix: use --gpus 1,4, or choose another --axis",
        ),
        (
            ["--axis", "tensor", "--run.cpu-devices", "8"],
            "model.num_kv_heads = 2: on 4 devices, weak scaling over tensor: .*use --gpus 1,2, or",
        ),
        (
            ["--gpus", "2,3", "--run.cpu-devices", "3", "--train.global-batch-size", "5"],
            "train.global_batch_size = 5",
        ),
        (
            ["--gpus", "1,2", "--run.cpu-devices", "2", "--parallel.tensor", "2"],
            "--gpus = 1: on 1 device, weak scaling over data: must be divisible by 2, the product",
        ),
        (
            ["--run.cpu-devices", "3", "--parallel.tensor", "2"],
            "--gpus = None: needs at least 4 devices, but there are 3",
        ),
        (
            ["--run.cpu-devices", "4", "--parallel.auto", "all"],
            "parallel.auto = 'all': leaves the layout to the planner",
        ),
        (
            [
                *("--run.cpu-devices", "2", "--cluster.num-processes", "2"),
                *("--cluster.process-id", "0", "--cluster.coordinator", "localhost:1"),
            ],
            "cluster.num_processes = 2: connects several processes",
        ),
    ],
)
def test_bad_options_measure_nothing(config_file, monkeypatch, options, said):
    monkeypatch.setattr(child, "measure", lambda *_, **__: pytest.fail("it measures"))
    with pytest.raises(ConfigError, match=said):
        bench.main(["scaling", config_file, *options])


def test_without_a_gpu_there_is_one_device(config_file, monkeypatch):
    monkeypatch.setattr(visible, "gpu_is_present", lambda: False)
    said = "there is 1. Fix: add --run.cpu-devices 2 to simulate devices on a CPU"
    with pytest.raises(ConfigError, match=said):
        bench.main(["scaling", config_file])


# ------------------------------------------------------------------------- what it does with them


def card_of(point, rate=1000.0) -> dict:
    """A card as `bench train` writes it, of which scaling uses these entries."""
    batch = dict(point.settings).get("train.global_batch_size", 8)
    return {
        "tokens_per_second_per_device": rate,
        "step_seconds": {"median": 0.25, "fastest": 0.2, "slowest": 0.3, "interquartile": 0.05},
        "peak_memory_gib": 1.5,
        "mesh": f"data={point.devices}",
        "profile": None,
        "jax": "0.11",
        "jaxpar": "0.1",
        "commit": "abc",
        "device": f"{point.devices} x NVIDIA H200",
        "xla_flags": "--a",
        "config": {"train": {"global_batch_size": batch}},
    }


def run(config_file, measure, *options) -> int:
    asked, cfg = command.read_command([config_file, "--run.cpu-devices", "8", *options])
    return command.run(asked, cfg, "the command", measure)


def test_efficiencies_card_and_plot(config_file, tmp_path, capsys):
    card, plot = tmp_path / "cards" / "a.json", tmp_path / "plots" / "a.svg"
    asked = []

    def measure(point):
        asked.append(point)
        return card_of(point, 1000 - 100 * (point.devices - 1) * (1 + (point.mode == "strong")))

    options = ["--gpus", "1,2,4", "--card", str(card), "--plot", str(plot)]
    assert run(config_file, measure, *options) == 0
    assert [(p.mode, p.devices) for p in asked] == [
        *(("weak", n) for n in (1, 2, 4)),
        *(("strong", n) for n in (2, 4)),  # on one device, both are the same measurement
    ]
    made = json.loads(card.read_text())
    assert made["what"] == "scaling" and made["jax"] == "0.11" and made["command"] == "the command"
    assert made["config"]["train"]["global_batch_size"] == 8 and made["steps"] == 20
    shares = {(r["scaling"], r["devices"]): r["efficiency"] for r in made["rows"]}
    weak, strong = ("weak", 1, 0.9, 0.7), ("strong", 1, 0.8, 0.4)
    for mode, *expected in (weak, strong):
        assert [shares[mode, n] for n in (1, 2, 4)] == pytest.approx(expected)
    last = made["rows"][-1]
    assert last["tokens_per_second"] == pytest.approx(4 * 400) and last["efficiency_against"] == 1
    assert last["xla_flags"] == "--a" and "config" not in last and "jax" not in last
    assert "--parallel.data 4" in last["options"]
    said = capsys.readouterr().out
    assert "1 of 5: weak, data, 1 device" in said and "5 of 5: strong, data, 4 devices" in said
    (row,) = [line.split() for line in said.splitlines() if line.startswith("  data  strong  ")][2:]
    assert row == ["data", "strong", "4", "data=4", "8", "400", "250.0", "40.0%", "1.5"]
    assert "efficiency: against 1 device\n" in said
    texts = [node.text for node in ET.fromstring(plot.read_bytes()).iter() if node.text]
    assert {"weak, data", "strong, data", "90 at 2", "40 at 4", "70 at 4"} <= set(texts)


def test_two_cards_compared(config_file, tmp_path, capsys):
    files = []
    for name, factor in (("a", 1.0), ("b", 1.1)):
        files.append(str(tmp_path / f"{name}.json"))
        assert run(config_file, lambda p, f=factor: card_of(p, 800 * f), "--card", files[-1]) == 0
    damaged = json.loads((tmp_path / "b.json").read_text())
    damaged["rows"] = [5, *damaged["rows"][1:]]
    (tmp_path / "b.json").write_text(json.dumps(damaged))
    capsys.readouterr()
    assert bench.main(["compare", *files]) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if line.startswith("  data  weak")]
    assert rows[0] == ["data", "weak", "1", "800", "-", "-", "100.0%", "-"]
    assert rows[1] == ["data", "weak", "2", "800", "880", "1.100~", "100.0%", "100.0%"]
    assert "note: skipped 1 entries of B that are not rows" in said


def test_a_point_that_fails_is_told_and_the_others_are_measured(config_file, tmp_path, capsys):
    card, plot = tmp_path / "a.json", tmp_path / "a.svg"

    def measure(point):
        if point.devices in (1, 8):
            raise PointFailed("RESOURCE_EXHAUSTED: Out of memory", 1, "the end of the output")
        return card_of(point, 500.0)

    options = ["--weak", "--card", str(card), "--plot", str(plot)]
    assert run(config_file, measure, *options) == 1
    rows = json.loads(card.read_text())["rows"]
    assert [row.get("error", "")[:18] for row in rows] == [
        *("RESOURCE_EXHAUSTED", "", ""),
        "RESOURCE_EXHAUSTED",
    ]
    assert {row["efficiency_against"] for row in rows if "error" not in row} == {2}
    said = capsys.readouterr()
    assert "failed: weak, data, 8 devices: RESOURCE_EXHAUSTED: Out of memory" in said.out
    assert "efficiency: against 2 devices" in said.out and "the end of the output" in said.err
    assert plot.is_file()


def test_a_wrong_config_ends_it_at_once(config_file, tmp_path, capsys):
    def measure(point):
        raise PointFailed("config error: data.path = 'x': does not exist", 2, "")

    assert run(config_file, measure, "--card", str(tmp_path / "a.json")) == 2
    said = capsys.readouterr()
    assert said.err == "config error: data.path = 'x': does not exist\n"
    assert said.out == "1 of 7: weak, data, 1 device\n" and not (tmp_path / "a.json").exists()


def test_the_card_has_what_was_measured_before_an_interrupt(config_file, tmp_path):
    def measure(point):
        if point.devices > 2:
            raise KeyboardInterrupt
        return card_of(point)

    with pytest.raises(KeyboardInterrupt):
        run(config_file, measure, "--card", str(tmp_path / "a.json"))
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["devices"] for row in rows] == [1, 2]


def test_exposed_communication_of_profiled_points():
    (point,) = points.all_points(SIMULATED, [2], ["data"], ["weak"])
    measured = card_of(point) | {"profile": {"ms": {"exposed": 12.5}}}
    rows = results.with_efficiency([results.row_of(point, measured)])
    title, row, _ = results.table(rows).splitlines()
    assert title.endswith("exposed ms") and row.split()[-1] == "12.5"


def test_the_error_in_a_programs_output():
    assert child.error_in("a\nconfig error: b = 1: c\nlast", 2) == "config error: b = 1: c"
    assert child.error_in("Traceback\njax.errors.JaxRuntimeError: X: y\n---\n", 1).startswith(
        "jax."
    )
    assert child.error_in("a line", 137) == "exit code 137"


@pytest.mark.slow
def test_programs_on_simulated_devices(config_file, tmp_path, capsys):
    """The command as a user calls it; its points are programs."""
    card, plot = tmp_path / "a.json", tmp_path / "a.svg"
    options = ["--gpus", "1,2", "--weak", "--steps", "2", "--run.cpu-devices", "2"]
    options += ["--card", str(card), "--plot", str(plot), "--commit", "abc"]
    assert bench.main(["scaling", config_file, *options]) == 0
    made = json.loads(card.read_text())
    assert [(r["mesh"], r["global_batch_size"]) for r in made["rows"]] == [
        ("1 device", 8),
        ("data=2", 16),
    ]
    assert [row["device"] for row in made["rows"]] == ["1 x cpu", "2 x cpu"]
    assert made["rows"][0]["efficiency"] == 1 and made["rows"][1]["efficiency"] > 0
    assert made["commit"] == "abc" and made["jax"] and made["host"]
    assert "2 of 2: weak, data, 2 devices" in capsys.readouterr().out
    ET.fromstring(plot.read_bytes())
