"""Before the first step: the kernels a run says it uses are those it uses, and they are tested."""

import json
import types

import pytest

from jaxpar.config import ConfigError
from jaxpar.config.command_line import read_config
from jaxpar.kernels.attention import Choice, api, reference
from jaxpar.parallel import context
from jaxpar.step.train_step import make_train_step
from jaxpar.training import run
from jaxpar.training.selftests import attention
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

KERNELS = Choice("cudnn", "pallas_hopper", reason="planted")

MESHES = [
    "--parallel.data 2",
    "--parallel.data 2 --parallel.num-microbatches 2",
    "--parallel.data 1 --parallel.tensor 2",
    "--parallel.data 1 --parallel.pipeline 2 --parallel.num-microbatches 2",
    "--parallel.data 1 --parallel.sequence 2 --parallel.context allgather",
    "--parallel.data 1 --parallel.sequence 2 --parallel.context ring",
    "--parallel.data 1 --parallel.sequence 2 --parallel.context ulysses",
    "--parallel.data 1 --parallel.sequence 2 --parallel.context ulysses "
    "--model.*.mixer.num-kv-heads 1",
    "--data.document-mask False --model.*.mixer.window 8",
    "--parallel.data 2 --parallel.layer-loop unroll",  # and layers of two kinds
]
TWO_KINDS = """
import dataclasses
from jaxpar import load_config
from jaxpar.config import replace

def get_config():
    cfg = load_config({file!r})
    wide = cfg.model.layers[0]
    local = dataclasses.replace(wide.mixer, window=8)
    layers = [dataclasses.replace(wide, name="local", mixer=local), wide]
    return replace(cfg, **{{"model.layers": layers}})
"""


@pytest.fixture
def two_kinds(config_file, tmp_path) -> str:
    """The tiny config, whose first layer has a window."""
    file = tmp_path / "two_kinds.py"
    file.write_text(TWO_KINDS.format(file=config_file))
    return str(file)


@pytest.fixture
def planted(monkeypatch):
    """(factor of dq) -> a run's kernels, as far as it knows, with a backward that may be wrong."""

    def plant(factor: float):
        def forward(*arguments, **options):
            return reference.forward(*arguments)

        def backward(*arguments, deterministic=False, **options):
            dq, dk, dv = reference.backward(*arguments)
            return factor * dq, dk, dv

        module = types.SimpleNamespace(forward=forward, backward=backward)
        names = dict.fromkeys((KERNELS.forward, KERNELS.backward), module)
        monkeypatch.setattr(api, "BACKENDS", api.BACKENDS | names)
        monkeypatch.setattr(attention, "choose", lambda *_, **__: KERNELS)

    return plant


def shapes(q, k, mask) -> tuple:
    """What a choice depends on."""
    kept = (mask.q_positions, mask.kv_positions, mask.q_segments, mask.kv_segments)
    of_mask = [None if x is None else (x.shape, str(x.dtype)) for x in kept]
    return q.shape, k.shape, str(q.dtype), *of_mask, mask.window, mask.max_segments, mask.in_order


@pytest.mark.parametrize("mesh", slow_but(MESHES[5:6], MESHES))
def test_what_is_told_is_what_the_layers_ask_for(
    mesh, config_file, two_kinds, only_devices, monkeypatch
):
    asked, told = set(), set()

    def spy(seen):
        def choose(backend, q, k, mask, *, deterministic, softcap):
            seen.add((backend, deterministic, softcap, *shapes(q, k, mask)))
            return Choice("reference", "reference")

        return choose

    kinds = 2 if mesh == MESHES[9] else 1
    args = [two_kinds if kinds == 2 else config_file, *mesh.split()]
    args += ["--compute.attention-deterministic", "True", "--model.*.mixer.softcap", "9"]
    with only_devices(2):
        monkeypatch.setattr(attention, "choose", spy(told))
        made = run.Run.open(read_config(args))
        state = made.start().state
        for module in (api, context):
            monkeypatch.setattr(module, "choose", spy(asked))
        make_train_step(made.cfg, made.mesh, made.max_segments).lower(state, made.loader.batch(0))
    assert asked == told and len(told) == kinds


@pytest.mark.parametrize("mesh", [MESHES[0], *MESHES[4:7], MESHES[8]])
def test_right_kernels_are_told(mesh, planted, config_file, only_devices, capsys):
    planted(1.0)
    with only_devices(2):
        args = [config_file, *mesh.split(), "--compute.dtype", "bfloat16"]
        run.Run.open(read_config(args)).test_attention()
    line = capsys.readouterr().out
    assert line.startswith("attention self-test: out ") and " dv " in line and line.endswith(" s\n")


def test_wrong_kernels_stop_the_run_before_its_first_step(planted, config_file, train_on, tmp_path):
    planted(1.1)
    with pytest.raises(ConfigError) as caught:
        train_on(1, config_file)
    error = caught.value
    assert error.field == "compute.attention_backend"
    assert "forward cudnn, backward pallas_hopper disagree with reference" in error.rule
    assert "dq is off by " in error.rule and "dk" not in error.rule
    assert "--compute.attention-backend reference" in error.fix
    assert "\n" not in str(error)
    folder = tmp_path / "run"
    there = sorted(file.name for file in folder.iterdir())
    assert there == ["config.json", "events.jsonl", "lock", "manifest.json"]
    told = json.loads((folder / "manifest.json").read_text("utf-8"))["attention"]
    assert told == "forward cudnn, backward pallas_hopper (planted)"


def test_on_a_cpu_there_is_nothing_to_test_and_one_line_about_it(two_kinds, only_devices, capsys):
    """Also with layers of two kinds."""
    with only_devices(1):
        made = run.Run.open(read_config([two_kinds, "--parallel.layer-loop=unroll"]))
        made.test_attention()
    assert capsys.readouterr().out == ""
    assert len(made.kernels) == 2
    assert made.attention == "reference (the others need an NVIDIA GPU, and the platform is cpu)"


@pytest.mark.parametrize("backend", ["cudnn", "pallas_hopper"])
def test_a_backend_that_cannot_serve_is_refused_before_anything_is_written(
    backend, config_file, train_on, tmp_path
):
    args = f"--compute.attention-backend {backend} --compute.dtype bfloat16"
    args += " --model.*.mixer.head-dim 64"
    with pytest.raises(
        ConfigError, match=r"the platform is cpu.*Fix: use --compute.attention-backend"
    ):
        train_on(1, config_file, *args.split())
    assert not (tmp_path / "run").exists()
