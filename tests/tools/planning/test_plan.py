"""`python -m jaxpar.plan` as its users run it."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.commands import call
from jaxpar.config import Config, ConfigError, MupConfig, RematValue, RopeScaling, replace
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.config_file import CONFIGS, load_config
from jaxpar.config.validate import resolve
from jaxpar.prediction.communication import Cluster
from jaxpar.prediction.hardware import GPUS, NETWORKS, HardwareFigure, gpu_of_kind
from jaxpar.prediction.startup import forecast, forecast_here
from jaxpar.runtime import stages
from jaxpar.runtime.gpus.peaks import peak_flops
from jaxpar.tools.planning import compiling, fields
from tests.slow import slow


def run(capsys, *words: str) -> str:
    """What a command line prints."""
    assert call("plan", words) == 0
    return capsys.readouterr().out


def test_the_ranking(capsys):
    said = run(capsys, "llama3_8b", "--gpus", "4", "--quick", "--top", "3")
    assert "fit 128.6 GiB per GPU" in said and "1. data 4" in said and "4. " not in said
    for part in ("weights", "activations", "matmul", "exposed: data", "bubble", "total"):
        assert part in said
    assert "Invalid: " in said and "Best layout: python -m jaxpar.train llama3_8b" in said


def test_values_in_host_memory_are_told(capsys):
    """28,672 bytes of 16,384 tokens and 32 layers; nothing else in these plans is an estimate."""
    plans = lambda remat: run(capsys, "llama3_8b", "--gpus", "8", "--fix", f"remat={remat},data=8")  # noqa: E731
    there, here = plans("dots_offload"), plans("dots")
    assert "exposed: host" in there and "exposed: host" not in here
    assert "Estimates: values in host memory (14.0 GiB per GPU" in there
    assert "Estimates" not in here


def test_how_far_it_is_goes_to_stderr(capsys, monkeypatch):
    monkeypatch.setattr(stages, "FIRST", 0.0)
    at = stages.Stage.at

    def looked_at(stage, detail):
        at(stage, detail)
        stages._stages.look(stage.since)

    monkeypatch.setattr(stages.Stage, "at", looked_at)  # no thread has to be in time
    assert call("plan", ["quickstart", "--gpus", "2", "--quick", "--json"]) == 0
    said = capsys.readouterr()
    json.loads(said.out)
    assert re.search(r"^predicting layouts: 0 s so far, at [\d,]+ of [\d,]+$", said.err, re.M)


@pytest.mark.slow
def test_json_is_the_same_in_numbers(capsys):
    words = ("llama3_8b", "--gpus", "16", "--gpu", "b200", "--quick", "--json", "--tokens", "1e12")
    words += ("--fix", "remat=dots")
    found = json.loads(run(capsys, *words))
    best = found["layouts"][0]
    rates = [layout["tokens_per_second_per_gpu"] for layout in found["layouts"]]
    assert rates == sorted(rates, reverse=True)
    seconds, memory = best["seconds"], best["memory_bytes"]
    assert seconds["in all"] == pytest.approx(sum(v for k, v in seconds.items() if k != "in all"))
    assert memory["in all"] <= found["usable_bytes"]
    cost = found["cost"]
    assert cost["gpu_hours"] == pytest.approx(1e12 / rates[0] / 3600)
    assert cost["seconds"] == pytest.approx(cost["gpu_hours"] * 3600 / 16)
    assert len(found["caveats"]) == 1 and "b200" in found["caveats"][0]


def test_what_is_written_is_what_was_chosen(capsys, tmp_path):
    file = tmp_path / "chosen.py"
    words = ("llama3_8b", "--gpus", "4", "--quick", "--fix", "tensor=2,zero=3", "--json")
    found = json.loads(run(capsys, *words, "--data.seq-len", "4096", "--write", str(file)))
    cfg = resolve(load_config(str(file)), 4)
    chosen = found["layouts"][0]["parallel"]
    assert {name: getattr(cfg.parallel, name) for name in chosen} == chosen
    assert cfg.parallel.tensor == 2 and cfg.data.seq_len == 4096
    _, _, _, name, *rest = found["command"].split()
    assert parse_overrides(load_config(name), rest) == cfg
    with pytest.raises(ConfigError, match=r"--write .* exists"):
        call("plan", [*words, "--write", str(file)])
    with pytest.raises(ConfigError, match=r"--write .*must end in \.py"):
        call("plan", [*words, "--write", str(tmp_path / "chosen")])


def test_what_is_printed_works_as_written(capsys, tmp_path, monkeypatch):
    """From a config file by a relative path, with a space in its name."""
    monkeypatch.chdir(tmp_path)
    own, new = Path("my config.py"), Path("there") / "the first.py"
    new.parent.mkdir()
    own.write_text((CONFIGS / "quickstart.py").read_text())
    words = ("--gpus", "1", "--quick", "--fix", "remat=attn_out,attn_lse,gate_up", "--json")
    scaled = ("--model.*.mixer.rope.scaling.factor", "8", "--model.layers.mixer.window", "64")
    scaled += ("--evaluation.sets", "web:data/web")
    found = json.loads(run(capsys, str(own), *words, *scaled, "--write", str(new)))
    _, _, _, name, *rest = shlex.split(found["command"])
    cfg = parse_overrides(load_config(name), rest)
    assert cfg.parallel.remat == tuple(map(RematValue, ("attn_out", "attn_lse", "gate_up")))
    mixers = {layer.mixer for layer in cfg.model.layers}
    assert {(one.rope.scaling, one.window) for one in mixers} == {(RopeScaling(), 64)}
    monkeypatch.chdir("there")
    assert load_config("the first.py") == cfg


def test_a_section_that_is_turned_off_stays_so():
    on = replace(Config(), **{"model.mup": MupConfig(), "model.layers.mixer.window": 8})
    found = fields.changes(on, Config())
    assert found == {"model.layers.mixer.window": None, "model.mup": None}
    _, _, _, _, *rest = fields.command_line("quickstart", on, Config()).split()
    assert parse_overrides(on, rest) == Config()


def test_changes_of_a_composed_model_are_by_address():
    """Also a section that begins or ends, with its defaults alone, and a number of layers."""
    plain = load_config("quickstart")
    one = "model.layers.mixer.rope.scaling"
    scaled = replace(plain, **{"model.num_layers": 2, f"{one}.factor": 8.0})
    scaled = replace(scaled, **{"model.layers.feed_forward.d_ff": 256, "model.d_model": 64})
    assert scaled.model.layers[0].mixer.rope.scaling == RopeScaling()
    for base, chosen in ((plain, scaled), (scaled, plain)):
        _, _, _, _, *rest = shlex.split(fields.command_line("quickstart", base, chosen))
        assert parse_overrides(base, rest) == chosen
    assert fields.changes(scaled, plain) == {
        "model.num_layers": len(plain.model.layers),
        one: None,
        "model.layers.feed_forward.d_ff": plain.model.layers[0].feed_forward.d_ff,
        "model.d_model": plain.model.d_model,
    }


def test_fewest_gpus(capsys):
    found = json.loads(run(capsys, "llama3_8b", "--min-gpus", "--json"))
    assert found["gpus"] == 2  # 12 bytes for each of 8e9 parameters, and a step
    assert "2 x h200" in run(capsys, "llama3_8b", "--min-gpus")


def test_hardware_with_sources(capsys):
    said = run(capsys, "--hardware")
    assert "h200: NVIDIA H200" in said and "datasheet" in said and "estimate" in said
    for line in (
        r"peak +989 TFLOP/s",
        r"memory_peak +3.35 TB/s",
        r"nvlink +450 GB/s",
        r"host_link +51.7 GB/s",
    ):
        assert re.search(line, said)
    found = json.loads(run(capsys, "--hardware", "--json"))
    assert found["gpus"].keys() == GPUS.keys() and found["networks"].keys() == NETWORKS.keys()
    assert found["networks"]["ib400"]["bandwidth"]["value"] == 40e9


def test_the_table_of_gpus_in_the_docs_is_of_the_figures():
    page = (Path(__file__).resolve().parents[3] / "docs" / "planning.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", page, re.MULTILINE))
    gpus = {name: row for name, row in rows.items() if name in GPUS}
    assert gpus == {
        gpu.name: f"{gpu.device_kind} | {gpu.memory.value / 2**30:.1f} | "
        f"{gpu.peak.value / 1e12:,.4g} | {gpu.matmul.value / 1e12:,.0f} | "
        f"{gpu.bandwidth.value / 1e12:.2f} | {gpu.nvlink.value / 1e9:.0f}"
        for gpu in GPUS.values()
    }


DATASHEET = ("peak", "memory_peak", "nvlink")


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_figures_of_a_gpu_agree_with_each_other(gpu):
    assert gpu.peak.value == peak_flops(gpu.device_kind) and gpu_of_kind(gpu.device_kind) is gpu
    for name, figure in vars(gpu).items():
        if isinstance(figure, HardwareFigure) and gpu.name != "h200":
            measured = figure.source.startswith("measured")
            assert not measured and ("estimate" in figure.source or name in DATASHEET)
    assert 0.86 < gpu.bandwidth.value / gpu.memory_peak.value < 0.88
    assert 0.45 < gpu.matmul.value / gpu.peak.value < 0.85
    assert gpu.float8 is None or 1.5 < gpu.float8.value / gpu.matmul.value < 2
    assert (gpu.links == 0) == ("PCIe" in gpu.nvlink.source)


def test_an_estimate_is_named(capsys):
    words = ("llama_1b", "--gpus", "8", "--gpu", "a100-40", "--quick", "--top", "1")
    said = run(capsys, *words, "--fix", "remat=dots,zero=1")
    assert "a100-40's rates are estimates" in " ".join(said.split())


BAD = (
    (("llama3_8b", "--gpu", "h20"), r"--gpu = 'h20'.*h200, h100, a100, b200.*use --gpu h200"),
    (("llama3_8b", "--network", "carrier"), r"--network = 'carrier'.*ib400"),
    (("llama3_8b", "--gpus", "0"), r"--gpus = 0: must be at least 1"),
    (("llama3_8b", "--gpus", "12", "--nodes", "5"), r"--nodes = 5: must divide.*--nodes 4"),
    (("llama3_8b", "--fix", "heads=2"), r"--fix = 'heads=2'.*tensor"),
    (("llama3_8b", "--fix", "tensor=x"), r"--fix = 'tensor=x'.*positive integer"),
    (("llama3_8b", "--fix", "tensor=²"), r"--fix = 'tensor=²': tensor must be a positive integer"),
    (("llama3_8b", "--fix", "tensor=2,3"), r"--fix = 'tensor=2,3': tensor must be a positive"),
    (("llama3_8b", "--fix", "tensor=2,tensor=4"), r"--fix = .* names tensor twice"),
    (("llama3_8b", "--fix", "zero=9"), r"--fix = 'zero=9': zero must be.*use --fix zero=3"),
    (
        ("llama3_8b", "--fix", "remat=bogus,data=8"),
        r"--fix = 'remat=bogus': .*use --fix remat=dots",
    ),
    (("llama3_8b", "--tokens", "0"), r"--tokens = 0.0: must be at least 1"),
    (("llama3_8b", "--tokens", "1e-300"), r"--tokens = 1e-300: must be at least 1, and at most"),
    (("llama3_8b", "--tokens", "1e300"), r"--tokens = 1e\+300: .*at most 1e\+18"),
    (("llama3_8b", "--model.num-head", "2"), r"model.num_head = '2': is not a field"),
    (("--gpus", "8"), r"CONFIG = '' : |CONFIG = ''.*missing"),
    slow(("llama3_70b", "--gpus", "4", "--quick"), r"--gpus = 4: is not enough.*GiB.*--min-gpus"),
    (
        ("llama3_8b", "--gpus", "7", "--quick"),
        r"--gpus = 7: allows no valid mesh.*same length\. Fix",
    ),
    (
        ("llama3_8b", "--fix", "tensor=3", "--quick"),
        r"--gpus = 8: allows no valid mesh.*fixed axis sizes",
    ),
    (("llama3_8b", "--tokens", "inf"), r"--tokens = inf: must be at least 1"),
    (("llama3_8b", "--write", "nowhere/new.py"), r"--write = .* needs the folder nowhere"),
    (("llama3_8b", "--write", "my plan"), r"must end in \.py.*use --write 'my plan\.py'"),
    (("--hardware", "--gpus", "1"), r"'--gpus': cannot be combined with --hardware.*remove it"),
    (("--hardware", "--nodes", "2"), r"'--nodes': cannot be combined with --hardware"),
    (("--hardware", "--data.seq-len=512"), r"'--data.seq-len=512': is not an opt.*--hardware"),
    (
        ("--hardware", "--nonsense", "3"),
        r"'--nonsense': is not an option .*see .*--hardware --help",
    ),
    (("llama3_8b", "--hardware"), r"'llama3_8b': is one argument too many.*--hardware --help"),
    (("llama3_8b", "--min-gpus", "--write", "new.py"), r"--write = .* combined with --min-gpus"),
    (("llama3_8b", "--gpus", "100000000"), r"--gpus = 100000000: must be at most 131,072"),
    (("llama3_8b", "--gpus", "8", "--min-gpus"), r"--gpus = 8: cannot be combined with --min"),
    (
        ("llama3_8b", "--nodes", "2", "--min-gpus"),
        r"--nodes = 2: .* with --min.*complete hosts.*remove",
    ),
    (("llama3_8b", "--min-gpus", "--top", "3"), r"--top = 3: .* with --min-gpus, which prints"),
    (("--hardware", "--top", "3"), r"'--top': cannot be combined with --hardware"),
    (("llama3_8b", "--compile", "3", "--top", "1"), r"--compile = 3: .*at most 1, the.*--top 3"),
    (("llama3_8b", "--compile", "11"), r"--compile = 11: must be at most 10, the number"),
)


@pytest.mark.parametrize(("words", "said"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_said(words, said):
    with pytest.raises(ConfigError, match=said):
        call("plan", words)


def test_help_answers():
    done = subprocess.run(
        [sys.executable, "-m", "jaxpar.plan", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "--gpus" in done.stdout and "--min-gpus" in done.stdout and "--compile" in done.stdout


@pytest.mark.skipif(compiling.has_plugin(), reason="the CUDA plugin is here")
def test_compiling_without_the_plugin_is_refused():
    with pytest.raises(ConfigError, match=r"--compile.*CUDA plugin.*cuda13"):
        call("plan", ["llama3_8b", "--compile", "1"])


def test_moments_in_host_memory_are_not_compiled_without_a_gpu():
    with pytest.raises(ConfigError, match=r"optimizer\.offload = True.*remove --compile"):
        call("plan", ["llama3_8b", "--compile", "1", "--optimizer.offload", "True"])


def test_a_failed_compilation_says_what_is_wrong():
    """JAX writes on after the error, of its frames."""
    trace = "Traceback (most recent call last):\n  File ...\njax.errors.TypeError: no such thing\n"
    assert compiling.error_in(trace + "-----\nFor simplicity, JAX\n") == trace.splitlines()[-1]
    assert compiling.error_in("killed\n\n") == "killed" and compiling.error_in("") == ""


@pytest.mark.waits
def test_a_compilation_that_takes_too_long_is_reported_and_not_waited_for():
    cluster = Cluster(GPUS["h200"], NETWORKS["ib400"], 1, 1)
    with pytest.raises(RuntimeError, match="did not finish in 0 s"):
        compiling.compile_layout(resolve(Config(), 1), cluster, timeout=0.01)


@pytest.mark.slow
@pytest.mark.skipif(not compiling.has_plugin(), reason="needs JAX's CUDA plugin")
def test_compiling_confirms_the_prediction(capsys):
    words = ("llama_1b", "--gpus", "1", "--model.num-layers", "4", "--compile", "1", "--json")
    found = json.loads(run(capsys, *words))
    predicted = found["layouts"][0]["memory_bytes"]["in all"]
    compiled = found["compiled"][0]
    assert compiled["arguments"] + compiled["temporary"] == pytest.approx(predicted, rel=0.1)


def test_a_config_without_changes_is_itself():
    assert fields.changes(Config(), Config()) == {}


@pytest.mark.slow
def test_a_run_says_what_was_predicted_and_what_came(
    train_on, config_file, tmp_path, capsys, monkeypatch
):
    """On a GPU that is none: the prediction for one of the same name stands in."""
    short = ("--train.num-steps", "3", "--optimizer.warmup-steps", "0", "--evaluation.every", "0")
    small = ("--checkpoint.every", "0", "--model.num-layers", "1")
    h200 = lambda cfg: forecast(cfg, "NVIDIA H200", 1, 1)  # noqa: E731
    assert forecast_here(load_config(config_file)) is None
    monkeypatch.setattr("jaxpar.training.programs.forecast_here", h200)
    assert train_on(1, config_file, *short, *small) == 0
    first, last = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("predicted")
    ]
    assert "GiB peak" in first and "and measured: peak" in last and "step" in last
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    assert set(told[0]) == {"predicted_step_seconds", "predicted_memory_gib"}
    assert [record["step"] for record in told[1:]] == [1, 2, 3]
