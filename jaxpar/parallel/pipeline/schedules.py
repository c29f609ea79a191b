"""Arithmetic of the interleaved 1F1B pipeline, in plain numbers.

P stages (devices along PIPELINE), v chunks of layers on each, M microbatches. Chunk c of stage s
is the c*P + s-th part of the model. An action is one microbatch in one chunk. Each stage runs its
actions in the same order, one forward and one backward per tick, all stages in lock-step:

    forward  of action i on stage s at tick  i + s
    backward of action i on stage s at tick  (v*P - 1) + i + (P - 1 - s)

so three loops do all the work: forward only, both, backward only. One loop that always did both
would double the bubble, unless a stage idles in a tick without an action. Methods work on ints and
on traced values alike.

Source:   Narayanan et al. 2021 (2104.04473), section 2.2, made lock-step.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """When each stage runs what."""

    stages: int
    virtual: int
    microbatches: int

    @property
    def num_actions(self) -> int:
        """Forward (or backward) actions of one stage: a microbatch in a chunk is one."""
        return self.microbatches * self.virtual

    @property
    def first_backward(self) -> int:
        """Tick of the first backward, on the last stage."""
        return self.virtual * self.stages - 1

    @property
    def stash_size(self) -> int:
        """Actions in flight: at most so many activations are stashed for their backward."""
        return 2 * self.virtual * self.stages - 1

    def phases(self) -> tuple[tuple[bool, bool, int, int], ...]:
        """(run forwards, run backwards, first tick, past the last tick) of the three loops."""
        both, end = self.first_backward, self.num_actions + self.stages - 1
        stop = self.num_actions + self.virtual * self.stages + self.stages - 2
        loops = ((True, False, 0, both), (True, True, both, end), (False, True, end, stop))
        return tuple(loop for loop in loops if loop[3] > loop[2])

    @property
    def duration(self) -> int:
        """Length of a step, in the time of one chunk's forward plus backward.

        v*M + P - 1, of which P - 1 are bubble: the textbook figure.
        """
        return self.num_actions + self.stages - 1

    def forward_action(self, i):
        """(microbatch, chunk) of the i-th forward: P microbatches go through a chunk at a time."""
        round_, rest = i // (self.virtual * self.stages), i % (self.virtual * self.stages)
        return round_ * self.stages + rest % self.stages, rest // self.stages

    def backward_action(self, i):
        """(microbatch, chunk, index of its forward) of the i-th backward: chunks in reverse."""
        microbatch, chunk = self.forward_action(i)
        chunk = self.virtual - 1 - chunk
        round_, place = microbatch // self.stages, microbatch % self.stages
        forward = round_ * self.virtual * self.stages + chunk * self.stages + place
        return microbatch, chunk, forward
