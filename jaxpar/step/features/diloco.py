"""DiLoCo: replicas train on their own, and now and then average what they have learned."""

from jaxpar.config import Config
from jaxpar.step.diloco.trainers import num_trainers
from jaxpar.step.feature import Feature
from jaxpar.step.metrics import Step


class Diloco(Feature):
    """Makes the step that of each replica."""

    name = "diloco"
    turn = 90

    def is_on(self, cfg: Config) -> bool:
        return num_trainers(cfg) > 0

    def wrap(self, step: Step, cfg: Config, fragment: int | None) -> Step:
        from jaxpar.step.diloco.inner import of_each_replica
        from jaxpar.step.diloco.overlap import beside

        every = of_each_replica(step)
        return every if fragment is None else beside(every, cfg, fragment)


FEATURE = Diloco()
