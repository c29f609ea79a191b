"""Derives which mesh axes to use by model size, by planning Llama-like models."""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxpar.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from jaxpar.model.flops import num_params
from jaxpar.planning.predict.communication import Cluster
from jaxpar.planning.ranking import Layout, make_plan

VOCABULARY = 128_256


@dataclass(frozen=True)
class Case:
    """A model shape and a typical number of GPUs. batch: sequences of 8,192 tokens per step."""

    name: str
    layers: int
    width: int
    heads: int
    head_dim: int
    d_ff: int
    gpus: int
    batch: int

    def config(self) -> Config:
        """Return the config: Llama 3's architecture in bfloat16, with unrolled layers."""
        model = ModelConfig(
            num_layers=self.layers,
            d_model=self.width,
            num_heads=self.heads,
            num_kv_heads=8,
            head_dim=self.head_dim,
            d_ff=self.d_ff,
            vocab_size=VOCABULARY,
        )
        return Config(
            model=model,
            data=DataConfig(seq_len=8192, document_mask=False),
            train=TrainConfig(global_batch_size=self.batch),
            parallel=ParallelConfig(layer_loop="unroll"),
        )


#: Llama 3's shapes (2407.21783, table 3, and later models), and sizes in between with the same
#: proportions.
CASES = (
    Case("0.5B", 16, 1024, 16, 64, 4096, 8, 64),
    Case("1.5B", 16, 2048, 32, 64, 8192, 8, 64),
    Case("3B", 28, 3072, 24, 128, 8192, 8, 64),
    Case("8B", 32, 4096, 32, 128, 14336, 8, 64),
    Case("32B", 64, 5120, 40, 128, 25600, 32, 256),
    Case("70B", 80, 8192, 64, 128, 28672, 64, 512),
    Case("405B", 126, 16384, 128, 128, 53248, 384, 1152),
)


@dataclass(frozen=True)
class Advice:
    """The best layout of a shape; None if nothing fits. `runner_up`: the best with other axes."""

    case: Case
    parameters: int
    gpus: int
    best: Layout | None
    runner_up: Layout | None


def advise(cluster: Cluster, most_gpus: int | None = None) -> Iterator[Advice]:
    """Yield the best layouts of each shape on GPUs like the cluster's, from a coarse plan.

    Args:     most_gpus: skip shapes that use more GPUs.
    """
    for case in CASES:
        if most_gpus is not None and case.gpus > most_gpus:
            continue
        cfg = case.config()
        here = Cluster(cluster.gpu, cluster.network, case.gpus, cluster.per_host)
        plan = make_plan(cfg, here, coarse=True)
        best = plan.fitting[0] if plan.fitting else None
        others = (x for x in plan.fitting if best and _axes(x) != _axes(best))
        yield Advice(case, num_params(cfg.model), case.gpus, best, next(others, None))


def _axes(layout: Layout) -> tuple[bool, ...]:
    """Return which axes a layout uses."""
    p = layout.cfg.parallel
    return tuple(n > 1 for n in (p.pipeline, p.replica, p.data, p.sequence, p.tensor))
