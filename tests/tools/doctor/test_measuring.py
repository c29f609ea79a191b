"""Collectives are verified, and figures are what they are called; on simulated devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpar.commands import read
from jaxpar.config import ConfigError, ParallelConfig
from jaxpar.runtime import timing
from jaxpar.sharding.mesh import make_mesh
from jaxpar.tools.doctor import showing
from jaxpar.tools.doctor.checks import measured
from jaxpar.tools.doctor.measure import bandwidth, compute, links, verification
from jaxpar.tools.doctor.measure.verification import COLLECTIVES

ELEMENTS = 32


@pytest.fixture(scope="module")
def mesh(devices):
    """Two axes of 2, and so both of them together."""
    return make_mesh(ParallelConfig(data=2, sequence=1, tensor=2), devices[:4])


def test_every_collective_is_right(mesh):
    found = list(verification.verify(mesh, [ELEMENTS]))
    assert [one.axes for one in found[::2]] == [("data",), ("tensor",), ("data", "tensor")]
    assert [one.dtype for one in found[:2]] == ["float32", "bfloat16"]
    assert all(set(COLLECTIVES) == set(one.collectives) for one in found[:4])
    assert [one.wrong for one in found] == [[]] * 6


def test_a_group_is_the_devices_that_differ_along_its_axes(mesh):
    assert verification.groups(mesh, ("data",))[3] == ([1, 3], 1)
    assert verification.groups(mesh, ("tensor",))[2] == ([2, 3], 0)
    assert verification.groups(mesh, ("data", "tensor"))[2] == ([0, 1, 2, 3], 2)


def wrong_way(x, axes):
    """A permute that goes round the ring the other way."""
    n = lax.axis_size(axes)
    return lax.ppermute(x, axes, [((i + 1) % n, i) for i in range(n)])


def without_the_first(x, axes):
    return COLLECTIVES["psum"].run(jnp.where(lax.axis_index(axes) == 0, 0, x), axes)


def next_piece(x, axes):
    return COLLECTIVES["psum_scatter"].run(jnp.roll(x, 1, axis=0), axes)


def one_bit(x, axes):
    gathered = COLLECTIVES["all_gather"].run(x, axes)
    return gathered.at[-1, -1].add(jnp.where(lax.axis_index(axes) == 1, 1, 0).astype(x.dtype))


WRONG = [
    ("ppermute", wrong_way, 4, "Device 1 sent this to position 0"),
    ("psum", without_the_first, 4, "0 instead of 1"),
    (
        "psum_scatter",
        next_piece,
        4,
        "has 24 of 32 values wrong, the first in shard 0, at 0: 4 instead of 1",
    ),
    ("all_gather", one_bit, 1, "has 1 of 512 values wrong, the first in shard 15, at 31: 8 inst"),
]


@pytest.mark.parametrize(("name", "run", "devices_wrong", "said"), WRONG)
def test_a_wrong_collective_is_found(mesh, name, run, devices_wrong, said):
    broken = {name: dataclasses.replace(COLLECTIVES[name], run=run)}
    *_, last = verification.verify(mesh, [ELEMENTS], broken)
    assert last.axes == ("data", "tensor") and last.dtype == "bfloat16"
    assert len(last.wrong) == devices_wrong
    told = str(last.wrong[0])
    assert told.startswith(f"{name} over data and tensor, bfloat16, 32 elements: device ")
    assert said in told


def test_messages_are_exact_in_bfloat16_and_no_two_alike():
    for sender in (0, 3, 255, 256, 1000):
        for sent in (
            verification.message(sender, 4, 64),
            verification.addends(sender, 3, 16, 4, 64),
        ):
            assert np.array_equal(sent, sent.astype(jnp.bfloat16).astype(np.float32))
    rows = {verification.message(s, 4, 8)[p].tobytes() for s in range(300) for p in range(4)}
    assert len(rows) == 300 * 4
    sums = sum(verification.addends(s, s, 16, 1, 64)[0] for s in range(16))
    assert np.array_equal(sums[:16], np.arange(16) + 1) and set(sums[16:32]) == {16}


# ---------------------------------------------------------------------------------- bandwidth


def test_sizes_and_bus_factors():
    assert bandwidth.sizes(1 << 20) == [1 << 10, 1 << 14, 1 << 18, 1 << 20]
    assert bandwidth.sizes(1 << 10) == [1 << 10]
    factors = {kind: about.bus(8) for kind, about in bandwidth.KINDS.items()}
    assert factors == {
        "all-reduce": 1.75,
        "all-gather": 0.875,
        "reduce-scatter": 0.875,
        "broadcast": 1.0,
        "all-to-all": 0.875,
        "permute": 1.0,
    }


def test_collectives_within_hosts_and_across_them(devices, monkeypatch):
    """Two hosts of two devices: a group is a host, then the devices of one number."""
    groups = links.by_host(devices[:4], ["a"])
    assert groups == [list(devices[:4])] and not links.equal(groups)
    assert not links.equal([devices[:1], devices[1:3]])
    monkeypatch.setattr(links, "MEASURED", ("all-reduce", "all-gather"))
    rows = list(links.measure_hosts([devices[:2], devices[2:4]], 1 << 10, 1, 10))
    expected = [(way, kind) for way in (links.WITHIN, links.ACROSS) for kind in links.MEASURED]
    assert [(one.over, one.row.kind) for one in rows] == expected
    assert {(one.row.size, one.row.devices) for one in rows} == {(1 << 10, 2)}
    alone = links.measure_hosts([devices[:1], devices[2:3]], 1 << 10, 1, 10)
    assert next(alone).over == links.ACROSS


def rows_of_hosts(across: float, size: int = 1 << 30) -> list[links.HostRow]:
    """Rows of 2 hosts of 8 devices: 300 GB/s within them, so many GB/s across them."""
    made = []
    for way, devices, rate in ((links.WITHIN, 8, 300e9), (links.ACROSS, 2, across * 1e9)):
        for kind in links.MEASURED:
            for bytes_ in (1 << 10, size - size % devices):
                seconds = bandwidth.KINDS[kind].bus(devices) * bytes_ / rate
                call = timing.Spread(seconds, seconds, seconds)
                row = bandwidth.BandwidthRow(kind, bytes_, devices, call)
                made.append(links.HostRow(way, row))
    return made


def test_bandwidth_across_hosts_is_said_and_not_judged():
    found = measured.across_hosts(rows_of_hosts(45), (8, 8))
    said = "all-reduce 45 GB/s for each device, 300 within a host; not judged"
    assert (found.status, found.said) == ("pass", said)
    assert measured.across_hosts(rows_of_hosts(45), (16,)).said == "one host"
    assert measured.across_hosts([], (8, 4)).status == "skip"


def test_the_table_of_hosts():
    assert showing.hosts([]) == []
    (shown,) = showing.hosts(rows_of_hosts(45))
    table = shown.renderables[1]
    assert table.row_count == 8
    cells = [list(column.cells) for column in table.columns]
    assert [column[1] for column in cells][:2] == ["all-reduce", "1 GiB"]
    assert cells[3][1] == "300.0" and cells[5][1] == "45.0"


def test_groups_communicate_within_themselves(devices):
    """Two groups of two sum their own numbers, in the program that is timed."""
    mesh = bandwidth.in_groups([devices[:2], devices[2:4]])
    x = jnp.asarray([1.0, 2.0, 3.0, 4.0])
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))
    program = bandwidth.compile_repeated(mesh, bandwidth.KINDS["all-gather"], 1, 1)
    # The last element of what was gathered is written into the operand.
    assert program(jax.device_put(x, place)).tolist() == [2.0, 2.0, 4.0, 4.0]


def test_every_collective_is_timed(devices):
    mesh = bandwidth.one_axis(devices[:4])
    rows = list(bandwidth.measure(mesh, 1 << 10, 2, 10))
    assert [(row.kind, row.size) for row in rows] == [(kind, 1 << 10) for kind in bandwidth.KINDS]
    assert all(0 < r.call.fastest <= r.call.median <= r.call.slowest for r in rows)
    assert rows[0].bus == pytest.approx(1.5 * 1024 / rows[0].call.median)


def test_every_collective_is_the_gpus_own_there(devices, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    mesh = bandwidth.one_axis(devices[:4])
    x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=bandwidth.numbers(mesh, 16).sharding)
    for kind, about in bandwidth.KINDS.items():
        program = bandwidth.trace_repeated(mesh, about, x, 3).lower(lowering_platforms=("cuda",))
        own = kind.replace("-", "_").replace("broadcast", "collective_broadcast")
        assert f"stablehlo.{own.replace('permute', 'collective_permute')}" in program.as_text()


def test_calls_that_the_compiler_leaves_out_are_seen(devices):
    mesh = bandwidth.one_axis(devices[:4])
    kind = bandwidth.KINDS["permute"]
    program = bandwidth.compile_repeated(mesh, kind, 8, 3)
    for other, calls in ((kind.opcodes, 4), (("all-gather",), 3)):
        with pytest.raises(bandwidth.LeftOut):
            bandwidth.require_calls(program, other, calls)
    idle = dataclasses.replace(kind, run=lambda x: x)
    with pytest.raises(bandwidth.LeftOut, match="permute: 0 calls in the program instead of 3"):
        bandwidth.compile_repeated(mesh, idle, 8, 3)


# -------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("n", [2, 3, 8, 9])
def test_every_pair_meets_once(n):
    found = links.tournament(n)
    pairs = [pair for each in found for pair in each]
    assert sorted(pairs) == [(a, b) for a in range(n) for b in range(a + 1, n)]
    for each in found:
        met = [device for pair in each for device in pair]
        assert len(met) == len(set(met))


def test_many_devices_meet_within_their_process_and_the_next_one():
    found = links.rounds(32, 8)
    assert links.rounds(8, 4) == links.tournament(8)
    assert len(found) == 9
    assert {(0, 1), (8, 9), (30, 31)} <= {pair for each in found[:7] for pair in each}
    assert found[7] == [(s + i, s + i + 8) for s in (0, 16) for i in range(8)]
    assert found[8] == [(8 + i, 16 + i) for i in range(8)]
    for each in found:
        met = [device for pair in each for device in pair]
        assert len(met) == len(set(met))


def test_pairs_are_timed_in_each_direction(devices):
    mesh = bandwidth.one_axis(devices[:3])
    found = list(links.measure(mesh, 1 << 12, 2, 10, lambda own: own))
    assert sorted(link.pair for link in found) == [(0, 1), (0, 2), (1, 2)]
    assert all(min(link.there, link.back, link.both) > 0 for link in found)
    one = links.again(mesh, (0, 2), 1 << 12, 2, 10, lambda own: own)
    assert one.pair == (0, 2) and one.slowest == min(one.there, one.back, one.both / 2)


# ------------------------------------------------------------------------------------- compute


@pytest.mark.parametrize("dtype", ["float32", "float8"])
def test_each_matmul_needs_the_one_before(devices, dtype):
    mesh = bandwidth.one_axis(devices[:2])
    x, w = compute.operands(mesh, (64, 128, 32), dtype)
    found = np.asarray(compute.matmuls(mesh, dtype, 3)(x, w), np.float32)
    x, w = np.array(x, np.float32), np.asarray(w, np.float32)
    assert x.shape == (128, 128) and w.shape == (64, 128) and not np.array_equal(x[:64], x[64:])
    products = x[[63, 127]] * w[[31, 63]]  # of the last row of each device, with its last column
    x[[0, 64], 0] = products.sum(1)
    np.testing.assert_allclose(found, x, rtol=0.1 if dtype == "float8" else 1e-5, atol=1e-6)


def test_devices_are_timed_apart(devices):
    x = bandwidth.numbers(bandwidth.one_axis(devices[:4]), 4)
    assert set(timing.when_ready(x)) == {device.id for device in devices[:4]}
    spread = timing.Spread.of([3.0, 1.0, 2.0])
    assert (spread.median, spread.fastest, spread.slowest) == (2.0, 1.0, 3.0)


# ------------------------------------------------------------------------------- command line


def test_devices_are_shared_out_to_axes():
    large = lambda n: {a: s for a, s in verification.default_mesh(n).items() if s > 1}  # noqa: E731
    assert large(8) == {"data": 2, "sequence": 2, "tensor": 2}
    assert large(6) == {"sequence": 3, "tensor": 2}
    assert large(1) == {}
    assert large(256) == {"tensor": 4, "sequence": 4} | dict.fromkeys(
        ("pipeline", "replica", "data", "expert"), 2
    )
    assert verification.mesh_for({"data": 8}, 8).data == 8
    with pytest.raises(ConfigError, match=r"takes 4 devices, but there are 8\. Fix: use --mesh"):
        verification.mesh_for({"data": 2, "tensor": 2}, 8)


REFUSED = [
    (["--only", "links,speed"], "--only = 'speed': must be one of versions, hardware"),
    (["--largest", "64MB"], "must be a size in B, KiB, MiB or GiB"),
    (["--largest", "12"], "at least 1KiB"),
    (["--mesh", "model=2"], "--mesh = 'model=2': must be AXIS=SIZE"),
    (["--repeats", "0"], "must be at least 1"),
    (["--seconds", "0"], "must be above 0"),
    (["--seconds", "inf"], "--seconds = inf: must be above 0, and at most 1,000,000. Fix"),
    (["--seconds", "1e10"], "must be above 0, and at most 1,000,000"),
    (["--mesh", "data=2,data=4"], "--mesh = 'data=2,data=4': names data twice"),
    (["--run.cpu-devices", "-1"], "must not be negative"),
    (["--run.cpu-devices", "100000"], "must be at most 4,096"),
    (["--cpu-device", "2"], "'--cpu-device': is not an option of python -m jaxpar.doctor"),
    (["--cpu-devices", "2"], "Fix: use --run.cpu-devices"),
    (["--train.seed", "1"], "'--train.seed': is not an option of python -m jaxpar.doctor"),
    (["--cluster.process-ids", "1"], "is not a field"),
    (["links"], "'links': is one argument too many"),
]


@pytest.mark.parametrize(("args", "said"), REFUSED)
def test_wrong_options_are_refused(args, said):
    with pytest.raises(ConfigError) as error:
        read("doctor", args)
    assert said in str(error.value)


def test_options_are_read(tmp_path):
    file = tmp_path / "doctor.json"
    line = f"--only links,versions --run.cpu-devices 4 --mesh data=4 --largest 2MiB --json {file}"
    options = read("doctor", [*line.split(), "--cluster.num-processes", "2"])
    assert options.sections == ("versions", "links")
    assert (options.largest_bytes, options.axes) == (2 << 20, {"data": 4})
    cfg = options.config.asked()
    assert (cfg.run.cpu_devices, cfg.cluster.num_processes) == (4, 2)
    assert options.json == str(file) and not file.exists()
