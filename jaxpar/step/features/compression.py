"""Compressed sums of gradients over replicas, and what they keep (`parallel/replicas/`)."""

from typing import Any

from jaxpar.config import Config
from jaxpar.optimizer import loss_scale
from jaxpar.step.feature import Feature
from jaxpar.step.progress import TrainStep


class Compression(Feature):
    """Sums gradients over `replica` with fewer bits, and keeps the errors for the next step."""

    name = "feedback"
    turn = 30
    handles_skips = True

    def is_on(self, cfg: Config) -> bool:
        return cfg.parallel.replica_reduction != "float32"

    def extra(self, cfg: Config, specs: Any) -> Any:
        from jaxpar.parallel.replicas.reduction import feedback_specs

        return feedback_specs(specs, cfg.parallel)

    def reduce(self, grads: Any, specs: Any, s: TrainStep) -> tuple[Any, Any]:
        from jaxpar.parallel.replicas.reduction import reduce_compressed

        # Errors outlive a loss scale.
        grads = loss_scale.unscale_gradients(grads, s.scale, scaled=s.ex.scales_loss)
        return reduce_compressed(grads, s.extra.get(self.name, ()), specs, s.cfg.parallel)

    def after_update(self, s: TrainStep) -> TrainStep:
        if self.name not in s.extra:
            return s
        return s.with_extra(feedback=s.if_ok(s.results[self.name], s.extra[self.name]))


FEATURE = Compression()
