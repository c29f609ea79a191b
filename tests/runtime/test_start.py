"""Before JAX starts, and at a program's first run."""

import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxpar.config import Config, ConfigError, Layer, RunConfig, replace
from jaxpar.config.validate import resolve
from jaxpar.execution import xla_flag_table
from jaxpar.kernels.attention.capability import xla_is_deterministic
from jaxpar.runtime import start as runtime
from jaxpar.runtime.gpus import visible, xla_flags
from jaxpar.step import compiled
from scripts.measure import matmul_autotuned as autotuned
from scripts.measure import matmul_table as matmuls
from tests.config.test_command_line import run_train
from tests.slow import slow
from tests.tiny import ATTENTION, EXPERTS

FSDP = Config()
TENSOR = replace(FSDP, **{"parallel.tensor": 2})
FLOAT8 = replace(FSDP, **{"compute.matmul_dtype": "float8"})
WIDE = replace(FSDP, **{"model.d_model": 4096})
APART = {"parallel.expert": 2, "model.layers": [Layer("layers", ATTENTION, EXPERTS)]}
LEFT_ALONE = Config(run=RunConfig(xla_flags="none"))


@pytest.fixture
def gpu_host(monkeypatch):
    """A host with an H200, as far as the flags can tell, and an environment of its own."""
    monkeypatch.setattr(visible, "gpu_is_present", lambda: True)
    monkeypatch.setattr(xla_flags, "gpu_is_present", lambda: True)
    monkeypatch.setattr(visible, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(xla_flags, "gpu_name", lambda: "NVIDIA H200")
    for name in ("XLA_FLAGS", *xla_flag_table.ENVIRONMENT, *xla_flag_table.ALWAYS):
        monkeypatch.delenv(name, raising=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        yield


@pytest.mark.parametrize("cfg", [FSDP, TENSOR, FLOAT8])
def test_flags_are_set_and_told(gpu_host, cfg):
    told = xla_flags.apply(cfg)
    rows = xla_flags.matching_rows("NVIDIA H200", jax.__version__, cfg)
    assert rows
    plain = [f"--{row.name}={row.value}" for row in rows if row.name != xla_flag_table.TABLE]
    words = os.environ["XLA_FLAGS"].split()
    assert [word for word in words if xla_flag_table.TABLE not in word] == plain
    assert len(words) == len(rows)
    assert set(os.environ["XLA_FLAGS"].split()) < set(told)
    for name, value in (xla_flag_table.ENVIRONMENT | xla_flag_table.ALWAYS).items():
        assert os.environ[name] == value and f"{name}={value}" in told


def test_the_config_decides(gpu_host):
    names = lambda p: {row.name for row in xla_flags.matching_rows("H200", jax.__version__, p)}  # noqa: E731
    combine = "xla_gpu_all_gather_combine_threshold_bytes"
    assert combine in names(FSDP) and combine not in names(TENSOR)
    assert FSDP.model.d_model < WIDE.model.d_model
    for cfg in (FLOAT8, WIDE):
        assert names(cfg) - names(FSDP) == {"xla_gpu_enable_triton_gemm"}
    offloading = replace(FSDP, **{"parallel.remat": "dots_offload"})
    assert names(offloading) - names(FSDP) == {"xla_gpu_experimental_parallel_async_compute_limit"}
    wide = replace(TENSOR, **{"model.d_model": 4096})
    assert names(wide) == names(TENSOR)
    staged = replace(TENSOR, **{"parallel.pipeline": 2})  # all-to-alls in place of permutes
    assert names(TENSOR) - names(staged) == {"xla_gpu_collective_permute_mode"}
    wide = replace(staged, **{"model.d_model": 4096})  # whose matmuls add up gradients
    assert names(wide) - names(staged) == {"xla_gpu_enable_triton_gemm"}
    assert names(replace(staged, **{"parallel.sequence": 2})) == names(TENSOR)


def test_the_number_of_gpus_decides_if_data_is_not_given(gpu_host, monkeypatch):
    monkeypatch.setattr(xla_flags, "gpu_name", lambda: "NVIDIA H100 80GB HBM3")
    combine = "xla_gpu_all_gather_combine_threshold_bytes"
    for gpus, others, is_set in ((1, {}, False), (2, {}, True), (2, {"parallel.tensor": 2}, False)):
        monkeypatch.setattr(xla_flags, "visible_gpus", lambda gpus=gpus: gpus)
        os.environ.pop("XLA_FLAGS", None)
        xla_flags.apply(replace(Config(), **{"parallel.data": -1} | others))
        assert (combine in os.environ["XLA_FLAGS"]) == is_set


def test_tokens_of_experts_are_sent_by_copy_engines():
    apart = replace(FSDP, **APART)
    rows = lambda p: {r.name for r in xla_flags.matching_rows("H100", jax.__version__, p)}  # noqa: E731
    permutes = "xla_gpu_collective_permute_mode"
    assert permutes in rows(apart) and permutes not in rows(FSDP)
    assert permutes not in rows(replace(apart, **{"parallel.pipeline": 2}))


def test_no_flag_is_set_twice(gpu_host):
    both = replace(TENSOR, **APART)
    for cfg in (FSDP, TENSOR, FLOAT8, WIDE, both):
        names = [row.name for row in xla_flags.matching_rows("H200", jax.__version__, cfg)]
        assert len(names) == len(set(names))


def test_what_several_processes_refuse_is_set_in_one_alone(gpu_host):
    name = "xla_gpu_collective_permute_mode"  # XLA refuses its value `peer` across processes
    rows = lambda n: {r.name for r in xla_flags.matching_rows("H200", jax.__version__, TENSOR, n)}  # noqa: E731
    assert name in rows(1)
    assert rows(1) - rows(2) == {name}
    xla_flags.apply(TENSOR, 2)
    assert name not in os.environ["XLA_FLAGS"] and "latency_hiding" in os.environ["XLA_FLAGS"]


@pytest.mark.parametrize("gpu, version", [("NVIDIA A100", jax.__version__), ("H200", "0.12.0")])
def test_nothing_that_was_not_measured(gpu_host, monkeypatch, gpu, version):
    assert xla_flags.matching_rows(gpu, version, FSDP) == []
    monkeypatch.setattr(visible, "gpu_name", lambda: gpu)
    monkeypatch.setattr(xla_flags, "gpu_name", lambda: gpu)
    monkeypatch.setattr(jax, "__version__", version)
    told = xla_flags.apply(FSDP)
    assert told[0].startswith("no XLA flags") and gpu in told[0]
    assert not os.environ["XLA_FLAGS"] and os.environ["NCCL_NVLS_ENABLE"] == "0"


def test_every_flag_has_its_measurement():
    for row in xla_flag_table.FLAGS:
        assert any(digit in row.gain for digit in "0123456789"), row.name


def test_the_users_own_win(gpu_host):
    mine = "--xla_gpu_enable_latency_hiding_scheduler=false"
    os.environ |= {"XLA_FLAGS": mine, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    told = xla_flags.apply(FSDP)
    assert os.environ["XLA_FLAGS"].split()[-1] == mine
    assert os.environ["XLA_FLAGS"].count("latency_hiding") == 1
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
    assert not [item for item in told if "latency_hiding" in item or "MEM_FRACTION" in item]


def test_the_users_own_may_lie_in_a_file(gpu_host, tmp_path):
    """XLA reads one if the variable names it, and nothing stands before the name."""
    flags = tmp_path / "flags"
    flags.write_text("--xla_gpu_enable_triton_gemm=true\n--xla_dump_to=x\n")
    os.environ["XLA_FLAGS"] = str(flags)
    told = xla_flags.apply(WIDE)
    words = os.environ["XLA_FLAGS"].split()
    assert words[-2:] == ["--xla_gpu_enable_triton_gemm=true", "--xla_dump_to=x"]
    assert str(flags) not in words and "--xla_gpu_enable_triton_gemm=false" not in told
    os.environ["XLA_FLAGS"] = str(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"XLA_FLAGS = '.*none': names a file"):
        xla_flags.apply(WIDE)


def test_a_table_of_kernels_is_a_file_of_the_package(gpu_host):
    xla_flags.apply(FSDP)
    (table,) = _values("xla_gpu_load_autotune_results_from")
    assert Path(table).is_absolute() and Path(table).is_file()
    assert Path(table) == xla_flags.table_of("NVIDIA H200")
    assert xla_flags.table_of("NVIDIA A100") is None and xla_flags.table_of("") is None


def _values(name: str) -> list[str]:
    """What the variable gives a flag, as XLA reads it."""
    words = shlex.split(os.environ["XLA_FLAGS"])
    return [w.partition("=")[2] for w in words if w.startswith(f"--{name}=")]


def test_the_package_may_lie_where_a_name_has_a_space(gpu_host, monkeypatch):
    monkeypatch.setattr(xla_flag_table, "PACKAGE", Path("/opt/my packages/jaxpar"))
    monkeypatch.setattr(xla_flags, "PACKAGE", Path("/opt/my packages/jaxpar"))
    xla_flags.apply(FSDP)
    (table,) = _values(xla_flag_table.TABLE)
    assert table == "/opt/my packages/jaxpar/execution/tuned/nvidia_h200.textproto"


@pytest.mark.parametrize("value", ["mine.textproto", ""])
def test_the_users_own_table_or_none_wins(gpu_host, value):
    os.environ["XLA_FLAGS"] = f"--xla_gpu_load_autotune_results_from={value}"
    told = xla_flags.apply(FSDP)
    assert _values(xla_flag_table.TABLE) == [value]
    assert not [item for item in told if xla_flag_table.TABLE in item]


@pytest.mark.parametrize(
    "row", [row for row in xla_flag_table.FLAGS if row.name == xla_flag_table.TABLE]
)
def test_a_table_that_is_shipped(row):
    """XLA would stop at what it cannot read, and take one of two entries for a kernel."""
    for gpu in row.gpus:
        text = xla_flags.table_of(gpu).read_text("utf-8")
        entries = autotuned.entries(text)
        assert (
            len(entries) == text.count("hlo_fingerprint") == len(re.findall("^entries", text, re.M))
        )
        assert text == matmuls.HEADER + autotuned.text_of(entries.values())
        targets = {re.search('device: "(.*?)"', entry)[1] for entry in entries.values()}
        assert len(targets) == 1  # of one GPU
        for entry in entries.values():
            product, times, start = entry.splitlines()[:3]
            sides = r"\w+\[[\d,]+\] x \w*\[[\d,]+\]"
            assert re.fullmatch(rf"# {sides} over [\d,]+ and [\d,]+.*", product)
            assert times.startswith(f"# {autotuned.choice_of(entry)}: ") and start == "entries {"
            assert re.search('optimal_backend_version: "[^"]+"', entry)
            assert entry.count("{") == entry.count("}")


TABLES = [row for row in xla_flag_table.FLAGS if row.name == xla_flag_table.TABLE]


@pytest.mark.parametrize("row", TABLES, ids=lambda row: row.gpus[0])
@pytest.mark.parametrize("folder", ["a", "with a space"])
def test_a_table_is_called_the_same_wherever_jaxpar_lies(folder, row, tmp_path, monkeypatch):
    monkeypatch.setattr(xla_flag_table, "PACKAGE", tmp_path / folder / "jaxpar")
    monkeypatch.setattr(xla_flags, "PACKAGE", tmp_path / folder / "jaxpar")
    settings = f"--xla_gpu_enable_triton_gemm=false {row.setting} --xla_a=b"
    found = xla_flags.alike_everywhere(settings).split()
    assert found == [
        "--xla_gpu_enable_triton_gemm=false",
        f"--xla_gpu_load_autotune_results_from=jaxpar/{row.value}",
        "--xla_a=b",
    ]


def test_a_flag_whose_name_goes_on_is_another(gpu_host):
    os.environ["XLA_FLAGS"] = "--xla_gpu_enable_triton_gemm_any=true"
    assert "--xla_gpu_enable_triton_gemm=false" in xla_flags.apply(WIDE)


def test_none_leaves_multicast_off_and_sets_nothing_else(gpu_host):
    before = dict(os.environ)
    assert xla_flags.apply(LEFT_ALONE) == ["NCCL_NVLS_ENABLE=0"]
    assert os.environ == before | {"NCCL_NVLS_ENABLE": "0"}
    os.environ["NCCL_NVLS_ENABLE"] = "1"
    assert xla_flags.apply(LEFT_ALONE) == [] and os.environ["NCCL_NVLS_ENABLE"] == "1"


def test_without_a_gpu_nothing_is_set(monkeypatch):
    monkeypatch.setattr(visible, "gpu_is_present", lambda: False)
    monkeypatch.setattr(xla_flags, "gpu_is_present", lambda: False)
    assert xla_flags.apply(FSDP) == []


def test_too_late_to_simulate_devices(devices):
    assert (
        runtime.start(Config(run=RunConfig(cpu_devices=len(devices)))) == []
    )  # as many as there are
    with pytest.raises(ConfigError, match="is too late: JAX has already started with 16 devices"):
        runtime.start(Config(run=RunConfig(cpu_devices=3)))
    assert jax.device_count() == 16


@pytest.mark.parametrize("asked", ["cuda", "cuda,cuda"])
def test_cuda_alone_without_a_gpu_is_refused(monkeypatch, asked):
    """JAX has an assertion without words for it, at the first use of a device."""
    seen = ["/nowhere"]
    monkeypatch.setattr(runtime, "NVIDIA_DEVICES", seen)
    monkeypatch.setattr(visible, "gpu_is_present", lambda: False)
    monkeypatch.setattr(xla_flags, "gpu_is_present", lambda: False)
    monkeypatch.setattr(runtime.jax, "config", SimpleNamespace(jax_platforms=asked))
    with pytest.raises(ConfigError, match=r"JAX_PLATFORMS = 'cuda.*JAX finds no NVIDIA GPU"):
        runtime.start(Config())
    assert runtime.start(Config(), needs_devices=False) == []
    runtime.jax.config.jax_platforms = f"{asked},cpu"
    assert runtime.start(Config()) == []
    runtime.jax.config.jax_platforms, _ = asked, seen.append("/dev/null")
    assert runtime.start(Config()) == []


@pytest.mark.parametrize("asked", ["none", slow("cpu,none")])
def test_a_platform_that_is_not_there_is_one_line(tmp_path, asked):
    done = run_train("quickstart", cwd=tmp_path, JAX_PLATFORMS=asked)
    assert done.returncode == 2 and done.stdout == ""
    begins = f"config error: JAX_PLATFORMS = '{asked}': requests none, which JAX cannot start ("
    assert done.stderr.startswith(begins) and done.stderr.count("\n") == 1
    assert (
        "; this host has a CPU and " in done.stderr
        and "Fix: unset it, or set it to cpu" in done.stderr
    )
    assert list(tmp_path.iterdir()) == []


def test_other_errors_than_of_a_platform_stay_as_they_are(monkeypatch):
    told = "Unable to initialize backend 'tpu': no such thing"
    monkeypatch.setattr(runtime.jax, "config", SimpleNamespace(jax_platforms="tpu"))
    monkeypatch.setattr(runtime, "NVIDIA_DEVICES", ["/dev/null"])
    assert str(runtime.of_a_platform(RuntimeError(f"{told} (set JAX_PLATFORMS='')"))) == (
        "JAX_PLATFORMS = 'tpu': requests tpu, which JAX cannot start (no such thing); this "
        "host has a CPU and an NVIDIA GPU. "
        "Fix: unset it, or set it to cpu; python -m jaxpar.doctor shows the devices."
    )
    for other in (RuntimeError("of a step"), ValueError(told)):
        assert runtime.of_a_platform(other) is other
    runtime.jax.config.jax_platforms = None  # nobody asked: JAX's own choice failed
    other = RuntimeError(told)
    assert runtime.of_a_platform(other) is other


def test_only_the_first_run_is_waited_for(monkeypatch):
    events = []
    monkeypatch.setattr(jax, "block_until_ready", lambda x: events.append(("wait", x)) or x)

    def program(a, b):
        events.append(("run", (a, b)))
        return a + b

    step = compiled.FirstRunAlone(program)
    assert [step(1, 2), step(3, 4)] == [3, 7]
    assert events == [("wait", (1, 2)), ("run", (1, 2)), ("wait", 3), ("run", (3, 4))]


class Holding:
    """A compiled program that holds so many GiB in host memory, of values and of moments."""

    def __init__(self, values: float, moments: float):
        sizes = {"host_temp_size_in_bytes": values, "host_argument_size_in_bytes": moments}
        self.memory = SimpleNamespace(**{name: int(gib * 2**30) for name, gib in sizes.items()})

    def memory_analysis(self):
        return self.memory


def test_a_step_that_needs_more_host_memory_than_there_is_is_refused(monkeypatch):
    """Of all devices of this process, in the first place by what takes more."""
    monkeypatch.setattr(jax, "local_device_count", lambda: 8)
    monkeypatch.setenv(runtime.HOST_LIMIT, "100")
    offloading = replace(FSDP, **{"parallel.remat": "offload", "optimizer.offload": True})
    check = lambda *gib: compiled.check_host_memory(Holding(*gib), offloading, bool)  # noqa: E731
    check(12.5, 0)
    check(6, 6.5)
    with pytest.raises(ConfigError, match=r"parallel\.remat = 'offload': needs 109\.6 GiB .* 100 "):
        check(13.7, 0)
    with pytest.raises(ConfigError, match=r"optimizer\.offload = True.*offload False"):
        check(4, 9)
    with pytest.raises(ConfigError, match="parallel"):  # it is too much on another host
        compiled.check_host_memory(Holding(1, 0), offloading, lambda here: True)
    monkeypatch.delenv(runtime.HOST_LIMIT)
    with pytest.raises(ConfigError, match=r"XLA may use only 64 GiB here"):
        check(12.5, 0)


def test_one_switch_makes_a_run_deterministic(gpu_host, monkeypatch):
    for name in xla_flags.NCCL_RING:
        monkeypatch.delenv(name, raising=False)
    cfg = replace(Config(), **{"run.deterministic": True, "run.compilation_cache": ""})
    assert resolve(cfg, 1).compute.attention_deterministic
    assert not resolve(Config(), 1).compute.attention_deterministic
    told = runtime.start(cfg)
    assert "--xla_gpu_deterministic_ops=true" in os.environ["XLA_FLAGS"].split()
    assert {"--xla_gpu_deterministic_ops=true", "NCCL_ALGO=Ring", "NCCL_NVLS_ENABLE=0"} <= set(told)
    assert xla_is_deterministic()


def test_a_choice_of_the_user_about_determinism_is_kept(gpu_host, monkeypatch):
    os.environ["XLA_FLAGS"] = "--xla_gpu_exclude_nondeterministic_ops=true"
    os.environ["NCCL_ALGO"] = "Tree"
    told = xla_flags.make_deterministic()
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_exclude_nondeterministic_ops=true"
    assert os.environ["NCCL_ALGO"] == "Tree"
    assert not any(line.startswith(("--", "NCCL_ALGO")) for line in told)


@pytest.mark.parametrize(
    ("field", "set_to"), [("default", None), ("tf32", "tensorfloat32"), ("float32", "float32")]
)
def test_the_precision_of_float32_matmuls(field, set_to, monkeypatch):
    found = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: found.append((name, value)))
    monkeypatch.setattr(runtime, "_simulate", lambda devices: None)
    runtime.start(replace(Config(), **{"compute.matmul_precision": field, "run.cpu_devices": 1}))
    assert found == ([] if set_to is None else [("jax_default_matmul_precision", set_to)])


@pytest.mark.parametrize(
    ("asked", "then"), [(None, None), ("cuda", "cuda,cpu"), ("cuda,cpu", None), ("cpu", None)]
)
def test_gpus_have_cpu_devices_beside_them(asked, then, monkeypatch):
    """Which hold copies of a state. The first platform stays the default."""
    updates = {}
    config = SimpleNamespace(jax_platforms=asked, update=updates.__setitem__)
    monkeypatch.setattr(runtime.jax, "config", config)
    monkeypatch.setattr(visible, "visible_gpus", lambda: 4)
    runtime._open_host_devices()
    assert updates == {"jax_num_cpu_devices": 4} | ({"jax_platforms": then} if then else {})
