"""Runs that continue, or begin, with other layers than those of the weights."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar import functional
from jaxpar.checkpoint.saved import saved_steps
from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.config.command_line import read_config
from jaxpar.runtime import exit_codes
from jaxpar.sharding.params import flat
from jaxpar.step.state import init_state
from jaxpar.training.run import Run
from tests.convert import tiny

CONFIG = """
from jaxpar.config import *
from jaxpar.extend import Attention, Glu, Layer

def get_config():
    def layer(name, **fields):
        mixer = Attention(num_heads=4, num_kv_heads=2, head_dim=8, **fields)
        return Layer(name, mixer, Glu(64))
    block, local = layer("block"), layer("local", window=8)
    return Config(
        run=RunConfig(dir={run!r}),
        data=DataConfig(path={data!r}, seq_len=32),
        model=Model(d_model=32, vocab_size=272, layers={layers}),
        compute=ComputeConfig(dtype="float32"),
        train=TrainConfig(num_steps={steps}, global_batch_size=8, log_every=1),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule_as_input=True),
        checkpoint=CheckpointConfig(every=4, keep=9),
        evaluation=EvaluationConfig(every=0),
        parallel=ParallelConfig(layer_loop="scan"),
    )
"""
WINDOWS = "[local] * 2 + [block] * 4"


@pytest.fixture
def write(dataset, tmp_path):
    """(layers, steps, folder of the run) -> a config file."""

    def file(layers: str, steps: int = 8, run: str = "run") -> str:
        path = tmp_path / "composed.py"
        folder = str(tmp_path / run)
        path.write_text(CONFIG.format(run=folder, data=str(dataset), layers=layers, steps=steps))
        return str(path)

    return file


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.slow  # quicker: the places of weights, below
@pytest.mark.usefixtures("quick_compile")
def test_a_run_continues_after_some_layers_got_a_window(write, train_on, tmp_path, capfd):
    run = tmp_path / "run"
    assert train_on(2, write("[block] * 6"), "--parallel.data", "2") == exit_codes.EXIT_OK
    first = losses(run)

    # The same step on the mesh of before, the windows being the only change, and on another mesh.
    for folder, devices, flags in (("run", 4, ["--parallel.tensor", "2"]), ("other", 2, [])):
        if folder == "other":
            assert (
                call("checkpoint", ["branch", str(run), str(tmp_path / folder), "--step", "8"]) == 0
            )
        capfd.readouterr()
        file = write(WINDOWS, 12, folder)
        assert train_on(devices, file, *flags) == exit_codes.EXIT_OK
        said = capfd.readouterr().out
        assert "layers     local x 2, block x 4\n" in said
        assert "places     layers 0-1: block -> local, 9 weights each\n" in said
        assert "places     layers 2-5: block -> block, 9 weights each\n" in said
        assert "changed    model." not in said
    found, other = losses(run), losses(tmp_path / "other")
    assert found.keys() == set(range(1, 13)) and other.keys() == set(range(9, 13))
    np.testing.assert_allclose([found[i] for i in other], list(other.values()), rtol=1e-4)
    assert found[9] < first[1] - 0.5 and found[9] == pytest.approx(first[8], abs=0.2)

    # Each step of the run is read with the layers that it was saved with.
    for step, stacks in ((8, {"block"}), (12, {"block", "local"})):
        params, cfg = functional.load(run, step)
        assert {name for name in params if isinstance(params[name], dict)} == stacks
        assert len(cfg.model.layers) == 6


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_a_changed_run_is_resumed_and_every_command_reads_it(write, train_on, tmp_path, capfd):
    run = tmp_path / "run"
    assert train_on(2, write("[block] * 6")) == exit_codes.EXIT_OK
    assert call("checkpoint", ["branch", str(run), str(tmp_path / "other"), "--step", "8"]) == 0
    for folder in ("run", "other"):
        assert train_on(2, write(WINDOWS, 12, folder)) == exit_codes.EXIT_OK

    # What is saved after the change resumes bit for bit, and says no more of places.
    assert call("checkpoint", ["branch", str(tmp_path / "other"), str(tmp_path / "again")]) == 0
    for folder in ("other", "again"):
        capfd.readouterr()
        assert train_on(2, write(WINDOWS, 16, folder)) == exit_codes.EXIT_OK
        assert "places  " not in capfd.readouterr().out
    assert losses(tmp_path / "again").items() <= losses(tmp_path / "other").items()

    for step in (8, 12):
        at = ["--step", str(step)]
        capfd.readouterr()
        call("sample", [str(run), *at, "--prompt", "a", "--max-tokens", "2"])
        call("evaluate", [str(run), *at, "--split", "val", "--sequences", "8"])
        assert "loss" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_a_run_that_ends_before_its_first_save_maps_again(write, train_on, tmp_path):
    run = tmp_path / "run"
    assert train_on(2, write("[block] * 6")) == exit_codes.EXIT_OK
    assert call("checkpoint", ["branch", str(run), str(tmp_path / "other")]) == 0
    file = write(WINDOWS, 12)
    assert train_on(2, file, "--train.num-steps", "10", "--checkpoint.every", "0") == 0
    assert saved_steps(run) == [4, 8]
    for folder in ("run", "other"):
        assert train_on(2, write(WINDOWS, 12, folder)) == exit_codes.EXIT_OK
    wanted = losses(tmp_path / "other")
    assert {step: losses(run)[step] for step in wanted} == wanted


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_a_refused_change_writes_nothing(write, train_on, tmp_path):
    assert train_on(1, write("[block] * 6")) == exit_codes.EXIT_OK
    files = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    wide = write("[block] * 5 + [Layer('wide', block.mixer, Glu(96))]", 12)
    said = (
        r"model\.wide: w_\w+ .*the shape \[.*96.*\], layer 5, .* step 8 has \[.*64.*\] there, in b"
    )
    with pytest.raises(ConfigError, match=said):
        train_on(1, wide)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == files


def started(file: str, *flags: str, only_devices, devices: int = 1) -> Run:
    with only_devices(devices):
        return Run.open(read_config([file, *flags]))


@pytest.mark.usefixtures("quick_compile")
def test_a_run_begins_with_weights_of_other_layers(write, train_on, only_devices, tmp_path, capfd):
    assert train_on(1, write("[block] * 4")) == exit_codes.EXIT_OK
    there, _ = functional.load(tmp_path / "run")
    file = write("[block, local] * 3", 12, "other")
    origin = ["--run.init-from", str(tmp_path / "run"), "--parallel.tensor", "2"]
    run = started(file, *origin, only_devices=only_devices, devices=2)
    found = jax.device_get(run.start().state.params)
    said = capfd.readouterr().out
    assert "places     layers 4: new, block, initialized\n" in said
    assert "places     layers 1, 3: block -> local, 9 weights each\n" in said
    with only_devices(2):
        initial = jax.device_get(init_state(run.cfg, run.mesh).params)
    for name, rows in (("block", (0, 2)), ("local", (1, 3))):
        for weight, array in found[name].items():
            np.testing.assert_array_equal(array[:2], np.take(there["block"][weight], rows, 0))
            np.testing.assert_array_equal(array[2], initial[name][weight][2])
    np.testing.assert_array_equal(found["embed"], there["embed"])


@pytest.mark.usefixtures("quick_compile")
def test_a_composed_run_begins_with_a_published_model(write, only_devices, tmp_path):
    values = tiny.MODELS["qwen3"] | {"vocab_size": 272, "num_hidden_layers": 2}
    folder = tiny.write_folder(tmp_path / "published", values)
    params, there = functional.load(folder)
    m, mixer = there.model, there.model.layers[0].mixer
    sizes = ", ".join(f"{n}={getattr(mixer, n)}" for n in ("num_heads", "num_kv_heads", "head_dim"))
    rope = f"rope=Rope(theta={mixer.rope.theta})"
    file = Path(write("[block, local]"))
    text = file.read_text().replace(
        "num_heads=4, num_kv_heads=2, head_dim=8", f"{sizes}, {rope}, qk_norm=QkNorm()"
    )
    text = text.replace("d_model=32", f"d_model={m.d_model}, norm=Norm(eps={m.norm.eps!r})")
    text = text.replace("import Attention", "import QkNorm, Rope, Attention").replace(
        "Glu(64)", f"Glu({m.layers[0].feed_forward.d_ff})"
    )
    file.write_text(text)
    flags = ["--run.init-from", str(folder), "--model.tie-embeddings", str(m.tie_embeddings)]
    run = started(str(file), *flags, only_devices=only_devices)
    found = jax.device_get(run.start().state.params)
    for i, name in enumerate(("block", "local")):
        for weight, array in flat(found[name]).items():
            np.testing.assert_array_equal(array[0], params["layers"][weight][i])
