"""The collectives of a step in their order, loops as loops."""

from jaxpar.monitoring.hlo import collective_order

LOOPED = """HloModule jit_f, entry_computation_layout={()->f32[8]}, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  ROOT %ar = f32[8] all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add, \
metadata={op_name="jit(f)/layer/psum"}
}

%condition (p: f32[8]) -> pred[] {
  %p.1 = f32[8] parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (x: f32[2]) -> f32[8] {
  %x = f32[2] parameter(0)
  %ag = f32[8] all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}, \
metadata={op_name="jit(f)/embed"}
  %alone = f32[8] all-reduce(%ag), replica_groups={{0},{1},{2},{3}}, to_apply=%add
  ROOT %loop = f32[8] while(%alone), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_they_stand_in_order_and_one_device_alone_sends_nothing():
    assert collective_order(LOOPED) == [
        "all-gather f32[8] of 4  jit(f)/embed",
        "3 times:",
        "  all-reduce f32[8] of 2  jit(f)/layer/psum",
    ]
