"""The schedules of a pipeline, as arithmetic: interleaved 1F1B, GPipe, and zero-bubble 1F1B.

There are P stages (devices along PIPELINE), v chunks of layers per stage, and M microbatches. Chunk
c of stage s is the (c*P + s)-th part of the model. An action is one microbatch in one chunk,
forward or backward. All stages run their actions in the same order and in lockstep, one forward and
one backward per tick:

    forward  of action i on stage s at tick  i + s
    backward of action i on stage s at tick  first_backward + i + (P - 1 - s)

Schedules differ in when the first backward comes. Methods accept ints and traced values.
"""

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True)
class PipelineSchedule:
    """Interleaved 1F1B: which action each stage runs at each tick.

    The first backward follows the first microbatch's last forward: first_backward is v*P - 1.

    Three loops run the ticks: forward only, both, backward only. A single loop that always does
    both would double the bubble, unless idle stages skip their work.

    Source:   Narayanan et al. 2021 (2104.04473), section 2.2, in lockstep.
    """

    stages: int
    virtual: int
    microbatches: int

    @property
    def num_actions(self) -> int:
        """Number of forward (or backward) actions of one stage."""
        return self.microbatches * self.virtual

    @property
    def first_backward(self) -> int:
        """Tick of the first backward, on the last stage."""
        return self.virtual * self.stages - 1

    @property
    def stash_size(self) -> int:
        """Maximum number of actions that wait for their backward: the longest wait plus one."""
        return 2 * self.virtual * self.stages - 1

    def phases(self) -> tuple[tuple[bool, bool, int, int], ...]:
        """Return (run forwards, run backwards, first tick, end tick) of each loop."""
        both, end = self.first_backward, self.num_actions + self.stages - 1
        stop = self.num_actions + self.virtual * self.stages + self.stages - 2
        loops = ((True, False, 0, both), (True, True, both, end), (False, True, end, stop))
        return tuple(loop for loop in loops if loop[3] > loop[2])

    @property
    def only_needed_ticks(self) -> bool:
        """Whether the loops have no tick in which every microbatch skips embedding or head."""
        return self.virtual == 1

    @property
    def duration(self) -> int:
        """Length of a step, in units of one chunk's forward plus backward.

        v*M + P - 1, of which P - 1 are the bubble.
        """
        return self.num_actions + self.stages - 1

    def forward_action(self, i):
        """Return (microbatch, chunk) of the i-th forward. Chunks change every P microbatches."""
        round_, rest = i // (self.virtual * self.stages), i % (self.virtual * self.stages)
        return round_ * self.stages + rest % self.stages, rest // self.stages

    def backward_action(self, i):
        """Return (microbatch, chunk, index of its forward) of the i-th backward.

        Chunks are in reverse order.
        """
        microbatch, chunk = self.forward_action(i)
        chunk = self.virtual - 1 - chunk
        round_, place = microbatch // self.stages, microbatch % self.stages
        forward = round_ * self.virtual * self.stages + chunk * self.stages + place
        return microbatch, chunk, forward


@dataclass(frozen=True)
class GPipe(PipelineSchedule):
    """GPipe: all forwards, then all backwards, in two loops. For stages of one chunk (v = 1).

    The first backward follows the last microbatch's last forward: first_backward is M + P - 1. Both
    loops have as many ticks, so the bubble is that of 1F1B, but every microbatch waits in the
    stash.

    Source:   Huang et al. 2019 (1811.06965), section 2.3. Backwards are in the order of the
              forwards, as in 1F1B, so gradients are summed in the same order.
    """

    @property
    def first_backward(self) -> int:
        return self.num_actions + self.stages - 1

    @property
    def stash_size(self) -> int:
        return self.num_actions

    def phases(self) -> tuple[tuple[bool, bool, int, int], ...]:
        turn = self.first_backward
        return (True, False, 0, turn), (False, True, turn, 2 * turn)

    @property
    def only_needed_ticks(self) -> bool:
        return False


@dataclass(frozen=True)
class ZeroBubble(PipelineSchedule):
    """Interleaved 1F1B in which stages compute some weight gradients where they would be idle.

    Forwards and backwards are those of 1F1B. A backward is the gradient of the input (B) and of the
    weights (W), and no other stage needs the second. In the first 2 (P - 1) ticks with a backward,
    stages postpone W. A stage computes them in its idle forward slots while later stages still have
    forwards, and two in each tick after its last backward. If W takes no longer than a forward or a
    B, the bubble is (P - 1)(F + B - W); that of 1F1B is (P - 1)(F + B + W).

    Needs M >= 2P - 1 microbatches, and stages that skip idle slots.

    Source:   Qi et al. 2023 (2401.10241), ZB-H1, in lockstep.
    """

    @property
    def max_postponed(self) -> int:
        """Number of postponed W of the last stage, which has the most."""
        return 2 * (self.stages - 1)

    def num_postponed(self, s):
        """Return the number of backwards of stage s, from its first one, that postpone W."""
        return self.stages - 1 + s

    def num_caught_up(self, s, t):
        """Return how many of its postponed W stage s has computed before tick t."""
        last_forward = self.num_actions - 1 + s
        last_backward = self.first_backward + self.num_actions - 1 + (self.stages - 1 - s)
        beside_forwards = _clip(t - last_forward - 1, self.stages - 1 - s)
        after_backwards = _clip(t - last_backward - 1, s)
        return beside_forwards + 2 * after_backwards

    @property
    def postponing_chunks(self) -> range:
        """The chunks to which postponed W belong: fewer than 2P backwards are of the last two."""
        return range(max(self.virtual - 2, 0), self.virtual)


def _clip(n, most):
    """Return n within [0, most]; ints or arrays."""
    if isinstance(n, int) and isinstance(most, int):
        return min(max(n, 0), most)
    return jnp.clip(n, 0, most)
