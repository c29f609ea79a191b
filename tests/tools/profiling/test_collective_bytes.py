"""Counts and bytes of collectives, of programs compiled here and of other notations."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.monitoring.hlo import Instruction, collective_bytes, group_size, parse

#: Floats on one device, and bytes.
N = 64
SIZE = 4 * N


def sent(fn, axes=("a",), shape=(4,)):
    """What a device sends in `fn` of its N floats, on a mesh of four."""
    mesh = jax.make_mesh(shape, axes, devices=jax.devices()[:4])
    where = jax.NamedSharding(mesh, P(axes))
    x = jax.ShapeDtypeStruct((4 * N,), jnp.float32, sharding=where)
    program = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P(axes), out_specs=P(axes)))
    return collective_bytes(program.lower(x).compile().as_text())


def scatter(x):
    return lax.psum_scatter(x, "a", scatter_dimension=0, tiled=True)


def ring(x):
    return lax.ppermute(x, "a", [(i, (i + 1) % 4) for i in range(4)])


@pytest.mark.parametrize(
    ("fn", "kind", "size"),
    [
        (lambda x: x * jnp.sum(lax.all_gather(x, "a", tiled=True)), "all-gather", 3 * SIZE),
        (lambda x: jnp.tile(scatter(x), 4), "reduce-scatter", SIZE * 3 // 4),
        (lambda x: lax.psum(x, "a") * x, "all-reduce", 2 * SIZE * 3 // 4),
        (lambda x: lax.all_to_all(x, "a", 0, 0, tiled=True), "all-to-all", SIZE * 3 // 4),
        (ring, "permute", SIZE),
    ],
)
def test_each_collective(fn, kind, size):
    found = sent(fn)
    assert found.kinds == {kind: {"count": 1, "bytes": size}}
    assert found.unknown == []
    assert found.card()["bytes"] == size


def test_groups_are_those_of_the_axis():
    found = sent(lambda x: lax.psum(x, "b") * x, ("a", "b"), (2, 2))
    assert found.kinds == {"all-reduce": {"count": 1, "bytes": SIZE}}
    found = sent(lambda x: lax.psum(x, ("a", "b")) * x, ("a", "b"), (2, 2))
    assert found.kinds["all-reduce"]["bytes"] == 2 * SIZE * 3 // 4


def test_an_axis_of_one_sends_nothing():
    assert sent(lambda x: lax.psum(x, "b") * x, ("a", "b"), (4, 1)).kinds == {}


def test_a_scan_counts_as_often_as_it_turns():
    def fn(x):
        turn = lambda c, _: (ring(c) + scatter(jnp.tile(c, 4)), None)  # noqa: E731
        return lax.scan(turn, x, None, length=5)[0] + lax.psum(x, "a")

    found = sent(fn)
    assert found.kinds["permute"] == {"count": 5, "bytes": 5 * SIZE}
    assert found.kinds["reduce-scatter"] == {"count": 5, "bytes": 5 * 3 * SIZE}
    assert found.kinds["all-reduce"] == {"count": 1, "bytes": 2 * SIZE * 3 // 4}
    assert found.unknown == []


def test_a_scan_within_a_scan():
    inner = lambda c, _: (ring(c) * 0.5, None)  # noqa: E731
    outer = lambda c, _: (lax.scan(inner, c, None, length=3)[0], None)  # noqa: E731
    assert sent(lambda x: lax.scan(outer, x, None, length=2)[0]).kinds["permute"]["count"] == 6


def test_an_unknown_number_of_turns_is_said():
    def fn(x):
        smaller = lambda c: lax.pmax(jnp.sum(c), "a") < 100.0  # noqa: E731
        return lax.while_loop(smaller, lambda c: ring(c) + 1, x)

    found = sent(fn)
    assert found.kinds["permute"] == {"count": 1, "bytes": SIZE}
    (why,) = found.unknown
    assert "unknown trip count; counted once" in why
    assert found.card()["unknown"] == [why]


def test_a_loop_that_sends_nothing_is_not_mentioned():
    grow = functools.partial(lax.while_loop, lambda c: jnp.sum(c) < 100.0, lambda c: c + 1)
    assert sent(grow).unknown == []


def test_branches_are_not_counted_and_said():
    def fn(x):
        total = lax.psum(jnp.sum(x), "a")
        return lax.cond(total > 0, ring, lambda y: y, x)

    found = sent(fn)
    assert set(found.kinds) == {"all-reduce"}
    assert len(found.unknown) == 1 and "unknown branch" in found.unknown[0]


ASYNC = """\
HloModule m, num_partitions=8

%fused (p: f32[16]) -> f32[16] {
  %p = f32[16]{0} parameter(0)
  ROOT %psum.1 = f32[16]{0} all-reduce(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
}

ENTRY %main (x: f32[16]) -> f32[64] {
  %x = f32[16]{0} parameter(0)
  %y = bf16[8]{0} parameter(1)
  %start = ((f32[16]{0}, bf16[8]{0}), (f32[64]{0}, bf16[32]{0})) all-gather-start(%x, /*i=1*/%y), \
replica_groups=[2,4]<=[8], dimensions={0}
  %one-shot = f32[16]{0} fusion-start(%x), calls=%fused
  %done = (f32[64]{0}, bf16[32]{0}) all-gather-done(%start)
  ROOT %out = f32[64]{0} get-tuple-element(%done), index=0
}
"""


def test_asynchronous_ones_count_once_and_fusions_are_looked_into():
    assert collective_bytes(ASYNC).kinds == {
        "all-gather": {"count": 1, "bytes": 3 * (64 + 16)},
        "all-reduce": {"count": 1, "bytes": 64},
    }


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ("replica_groups={}", 8),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
        ("replica_groups=[4,2]<=[8]", 2),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", 4),
        ("replica_groups=mesh['data'=4,'tensor'=2] {'data'}", 4),
        ("replica_groups=mesh['data'=4,'tensor'=2] {'data','tensor'}", 8),
        ("replica_groups=mesh['data'=4,'tensor'=2] {'data':(2)2}", 2),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([8]) {'b'}", 4),
        ("source_target_pairs={{0,1},{1,0}}", 2),
        ("source_target_pairs={{0,0},{1,1}}", 1),
        ("channel_id=1", 8),
    ],
)
def test_notations_of_groups(attributes, size):
    instruction = Instruction("x", "all-reduce", "f32[]", (), f", channel_id=1, {attributes}, a=b")
    assert group_size(instruction, 8) == size


def test_what_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="unknown notation"):
        group_size(Instruction("x", "all-reduce", "f32[]", (), ", replica_groups=<new>"), 8)
    with pytest.raises(ValueError, match="no instruction y"):
        collective_bytes(ASYNC.replace("  %y = bf16[8]{0} parameter(1)\n", ""))
    assert parse(ASYNC).num_devices == 8
