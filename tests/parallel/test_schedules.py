"""The pipeline's arithmetic, exhaustively and without devices.

Every schedule of up to 6 stages, 4 chunks on each, and several numbers of microbatches is played
tick by tick: P stages, v chunks on each, M microbatches, and part g = c*P + s of the model is chunk
c of stage s.
"""

from fractions import Fraction

import numpy as np

from jaxpar.parallel.pipeline.schedules import GPipe, PipelineSchedule, ZeroBubble
from tests.every import every


def microbatch_counts(P: int, v: int) -> list[int]:
    """Any number without interleaving; whole rounds of P with it."""
    return sorted({1, 2, 3, 5, 8, 2 * P, 2 * P + 1}) if v == 1 else [P, 2 * P, 3 * P]


SCHEDULES = [
    PipelineSchedule(P, v, M)
    for P in range(1, 7)
    for v in range(1, 5)
    for M in microbatch_counts(P, v)
]
SCHEDULES += [GPipe(P, 1, M) for P in range(1, 7) for M in microbatch_counts(P, 1)]
ZERO_BUBBLES = [
    ZeroBubble(P, 1, M) for P in range(2, 8) for M in sorted({2 * P - 1, 3 * P - 3, 3 * P, 4 * P})
]
ZERO_BUBBLES += [ZeroBubble(P, v, k * P) for P in range(2, 6) for v in (2, 3, 4) for k in (2, 3)]


def forwards(plan: PipelineSchedule) -> list[tuple[int, int, int, int, int]]:
    """(stage, index of the unit, tick, microbatch, part of the model) of each forward unit."""
    return [
        (s, i, i + s, m, c * plan.stages + s)
        for s in range(plan.stages)
        for i in range(plan.num_actions)
        for m, c in [plan.forward_action(i)]
    ]


def backwards(plan: PipelineSchedule) -> list[tuple[int, int, int, int, int]]:
    """(stage, index of the *forward* unit, tick, microbatch, part of the model) of each."""
    P = plan.stages
    return [
        (s, f, plan.first_backward + j + (P - 1 - s), m, c * P + s)
        for s in range(P)
        for j in range(plan.num_actions)
        for m, c, f in [plan.backward_action(j)]
    ]


def ticks(units) -> dict[tuple[int, int], int]:
    """(microbatch, part of the model) -> tick; every pair once."""
    found = {(m, part): tick for _, _, tick, m, part in units}
    assert len(found) == len(units)
    return found


every_schedule = every(SCHEDULES)


@every_schedule
def test_every_unit_once(plan):
    whole = {(m, g) for m in range(plan.microbatches) for g in range(plan.stages * plan.virtual)}
    assert ticks(forwards(plan)).keys() == whole
    assert ticks(backwards(plan)).keys() == whole


@every_schedule
def test_a_stage_does_one_unit_of_each_kind_per_tick(plan):
    for units in (forwards(plan), backwards(plan)):
        slots = [(s, tick) for s, _, tick, _, _ in units]
        assert len(set(slots)) == len(slots)


@every_schedule
def test_messages_are_used_exactly_one_tick_after_they_are_sent(plan):
    """What a permute brings is overwritten a tick later, so earlier and later are both wrong."""
    forward, backward = ticks(forwards(plan)), ticks(backwards(plan))
    last = plan.stages * plan.virtual - 1
    for m in range(plan.microbatches):
        for g in range(last):
            assert forward[m, g + 1] == forward[m, g] + 1
            assert backward[m, g] == backward[m, g + 1] + 1
        # The head's gradient is used in the tick in which it is made: that of the last forward, or
        # the backward tick in which GPipe takes the output out again.
        waits = plan.microbatches if isinstance(plan, GPipe) else 0
        assert backward[m, last] == forward[m, last] + waits


@every_schedule
def test_a_backward_names_its_own_forward(plan):
    units = {(s, i): (m, g) for s, i, _, m, g in forwards(plan)}
    for s, f, _, m, g in backwards(plan):
        assert units[s, f] == (m, g)


def clobbered(plan: PipelineSchedule, stash_size: int) -> int:
    """Entries of the ring that are overwritten before, or in the tick in which, they are read.

    In one tick the forward writes before the backward reads.
    """
    written = {(s, i): tick for s, i, tick, _, _ in forwards(plan)}
    never = 10**9
    return sum(
        written.get((s, f + stash_size), never) <= read for s, f, read, _, _ in backwards(plan)
    )


@every_schedule
def test_the_ring_is_just_large_enough(plan):
    assert clobbered(plan, plan.stash_size) == 0
    if plan.num_actions >= plan.stash_size > 1:
        assert clobbered(plan, plan.stash_size - 1) > 0


@every_schedule
def test_phases_hold_every_unit_and_do_no_more(plan):
    phases = plan.phases()
    assert [start for _, _, start, _ in phases] == [0, *(stop for *_, stop in phases[:-1])]
    runs = {t: (f, b) for f, b, start, stop in phases for t in range(start, stop)}
    for units, which in ((forwards(plan), 0), (backwards(plan), 1)):
        used = {tick for _, _, tick, _, _ in units}
        assert used == {tick for tick, kinds in runs.items() if kinds[which]}


@every_schedule
def test_the_head_and_the_embeddings_gradient_run_in_a_phase_that_has_them(plan):
    """1F1B runs `slots.head` where both kinds do, GPipe with the backwards, as the embedding."""
    kinds = {t: (f, b) for f, b, start, stop in plan.phases() for t in range(start, stop)}
    backward, last = ticks(backwards(plan)), plan.stages * plan.virtual - 1
    for m in range(plan.microbatches):
        assert kinds[backward[m, last]] == (not isinstance(plan, GPipe), True)
        assert kinds[backward[m, 0]][1]


@every_schedule
def test_duration_and_bubble(plan):
    """A tick of only one kind takes that kind's share; in sum v*M + P - 1 whole units."""
    P, v, M = plan.stages, plan.virtual, plan.microbatches
    share = Fraction(1, 3)  # of the forward in a unit; any share gives the same sum
    took = sum(
        (f * share + b * (1 - share)) * (stop - start) for f, b, start, stop in plan.phases()
    )
    assert took == plan.duration == v * M + P - 1
    bubble = 1 - Fraction(plan.num_actions, plan.duration)
    assert bubble == Fraction(P - 1, v * M + P - 1)
    ticks = 2 * (M + P - 1) if isinstance(plan, GPipe) else v * M + v * P + P - 2
    assert plan.phases()[-1][3] == ticks


#: (schedule, stages, virtual, microbatches) -> ticks with a forward, ticks with a backward, all
#: ticks, stash slots, bubble.
TABLE = """
1F1B  2 1 4  | 5 5 6 3 1/5
1F1B  4 1 4  | 7 7 10 7 3/7
1F1B  4 1 16 | 19 19 22 7 3/19
1F1B  4 2 16 | 35 35 42 15 3/35
GPipe 2 1 4  | 5 5 10 4 1/5
GPipe 4 1 4  | 7 7 14 4 3/7
GPipe 4 1 16 | 19 19 38 16 3/19
GPipe 1 1 3  | 3 3 6 3 0
""".strip().splitlines()


@every(TABLE)
def test_ticks_slots_and_bubbles_are_those_of_the_table(row):
    left, right = (side.split() for side in row.split("|"))
    plan = {"1F1B": PipelineSchedule, "GPipe": GPipe}[left[0]](*map(int, left[1:]))
    phases = plan.phases()
    count = lambda kind: sum(phase[3] - phase[2] for phase in phases if phase[kind])  # noqa: E731
    bubble = 1 - Fraction(plan.num_actions, plan.duration)
    found = count(0), count(1), phases[-1][3], plan.stash_size, bubble
    assert " ".join(map(str, found)) == " ".join(right)


def test_figure():
    """Two stages, two chunks, four microbatches, as drawn by hand: (microbatch, chunk)."""
    plan = PipelineSchedule(stages=2, virtual=2, microbatches=4)
    forward = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    backward = [(0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (3, 1), (2, 0), (3, 0)]
    assert [plan.forward_action(i) for i in range(8)] == forward
    assert [plan.backward_action(i)[:2] for i in range(8)] == backward
    assert plan.phases() == ((True, False, 0, 3), (True, True, 3, 9), (False, True, 9, 12))


def test_arrays_count_as_numbers_do():
    plan = PipelineSchedule(stages=3, virtual=2, microbatches=6)
    i = np.arange(plan.num_actions)
    for unit in (plan.forward_action, plan.backward_action):
        assert np.array_equal(np.stack(unit(i), 1), [unit(int(n)) for n in i])


def caught_up(plan: ZeroBubble) -> list[tuple[int, int, int]]:
    """(stage, index of the postponed backward, tick) of each weight gradient in an idle slot."""
    end = plan.phases()[-1][3]
    return [
        (s, j, t)
        for s in range(plan.stages)
        for t in range(end)
        for j in range(plan.num_caught_up(s, t), plan.num_caught_up(s, t + 1))
    ]


def numbered_backwards(plan: PipelineSchedule) -> list[tuple[int, int, int]]:
    """(stage, index of the backward, tick) of each backward."""
    first, P = plan.first_backward, plan.stages
    return [(s, i, first + i + (P - 1 - s)) for s in range(P) for i in range(plan.num_actions)]


every_zero_bubble = every(ZERO_BUBBLES)


@every_zero_bubble
def test_each_postponed_weight_gradient_is_computed_once_and_after_its_backward(plan):
    made = {(s, i): tick for s, i, tick in numbered_backwards(plan)}
    found = caught_up(plan)
    postponed = [(s, j) for s in range(plan.stages) for j in range(plan.num_postponed(s))]
    assert [(s, j) for s, j, _ in found] == postponed
    assert all(made[s, j] < tick for s, j, tick in found), "the slot comes before the backward's"
    assert max(map(plan.num_postponed, range(plan.stages))) == plan.max_postponed
    assert {plan.backward_action(j)[1] for _, j in postponed} <= set(plan.postponing_chunks)


@every_zero_bubble
def test_postponed_weight_gradients_are_computed_in_idle_forward_slots(plan):
    busy = {(s, tick) for s, _, tick, _, _ in forwards(plan)}
    assert not busy & {(s, t) for s, _, t in caught_up(plan)}


def length(plan: PipelineSchedule, F: int, B: int, W: int) -> int:
    """Time of a step. The stages wait for each other at the head and between two ticks."""
    last = plan.stages * plan.virtual - 1
    head = {t for _, _, t, _, part in forwards(plan) if part == last}
    both = {"F": [[0] * plan.stages for _ in range(plan.phases()[-1][3])]}
    both["B"] = [list(row) for row in both["F"]]
    for s, _, t, _, _ in forwards(plan):
        both["F"][t][s] += F
    for s, i, t in numbered_backwards(plan):
        postpones = isinstance(plan, ZeroBubble) and i < plan.num_postponed(s)
        both["B"][t][s] += B + (0 if postpones else W)
    if isinstance(plan, ZeroBubble):
        for s, _, t in caught_up(plan):
            both["F"][t][s] += W
    took = 0
    for t, (first, second) in enumerate(zip(both["F"], both["B"], strict=True)):
        whole = max(a + b for a, b in zip(first, second, strict=True))
        took += max(first) + max(second) if t in head else whole
    return took


@every_zero_bubble
def test_the_bubble_of_a_zero_bubble_schedule(plan):
    P, v, M = plan.stages, plan.virtual, plan.microbatches
    plain = PipelineSchedule(P, v, M)
    for F, B, W in (1, 1, 1), (5, 6, 4), (3, 3, 1):
        assert length(plan, F, B, W) == v * M * (F + B + W) + (P - 1) * (F + B - W)
        assert plain.duration == v * M + P - 1
        assert length(plain, F, B, W) == plain.duration * (F + B + W)


def test_ticks_of_a_zero_bubble_schedule():
    """Two stages: the first postpones one weight gradient, the last two."""
    plan = ZeroBubble(2, 1, 4)
    assert caught_up(plan) == [(0, 0, 4), (1, 0, 5), (1, 1, 5)]
    assert [plan.num_postponed(s) for s in range(2)] == [1, 2]


def test_arrays_count_as_numbers_do_in_a_zero_bubble_schedule():
    plan = ZeroBubble(3, 1, 6)
    t = np.arange(plan.phases()[-1][3])
    for s in range(3):
        expected = [plan.num_caught_up(s, int(tick)) for tick in t]
        assert np.array_equal(plan.num_caught_up(np.int32(s), t), expected)
