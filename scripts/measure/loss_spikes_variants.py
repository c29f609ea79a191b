"""The variants of loss_spikes.py: the model, its config, and ways to compute the same step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import (
    Attention,
    Config,
    DataConfig,
    Glu,
    Layer,
    Model,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    replace,
)
from jaxpar.execution.decisions import Execution
from jaxpar.model import loss as model_loss
from jaxpar.parallel.collectives import psum
from jaxpar.runtime import start as runtime
from jaxpar.sharding.axes import VOCAB_AXES
from jaxpar.training.run import Run

#: 152.8 million parameters.
MODEL = Model(
    d_model=768,
    vocab_size=50_304,
    layers=[Layer("layers", Attention(num_heads=12, num_kv_heads=4, head_dim=64), Glu(2048))] * 12,
)
#: The same in small, for a test on a CPU.
TINY = Model(
    d_model=64,
    vocab_size=8192,
    layers=[Layer("layers", Attention(num_heads=4, num_kv_heads=2, head_dim=16), Glu(128))] * 2,
)

#: Learning rate, unless another is given.
RATE = 6e-4


def config(about: dict[str, Any]) -> Config:
    """Return the config of every run: 8 sequences of 1,024 tokens, or of 64 in the small test.

    After the warm-up the learning rate stays. Attention is causal, without document masks.
    """
    steps, warm_up, tiny = (about[name] for name in ("steps", "warm_up", "tiny"))
    return Config(
        model=TINY if tiny else MODEL,
        data=DataConfig(path=about["data"], seq_len=64 if tiny else 1024, document_mask=False),
        train=TrainConfig(num_steps=steps, global_batch_size=8),
        parallel=ParallelConfig(data=1),
        optimizer=OptimizerConfig(learning_rate=RATE, warmup_steps=warm_up, schedule="constant"),
    )


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to compute the same step."""

    what: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    execution: dict[str, Any] = dataclasses.field(default_factory=dict)
    plain_loss: bool = False


_FLOAT32 = {"compute.dtype": "float32", "compute.attention_backend": "reference"}

VARIANTS = {
    "bfloat16": Variant("the default"),
    "bfloat16-again": Variant("the default, a second time"),
    "document-mask": Variant("attention within documents", {"data.document_mask": True}),
    "logits16": Variant("bfloat16 logits", {"compute.logits_dtype": "compute"}),
    "plain-loss": Variant("the loss differentiated by JAX in float32", plain_loss=True),
    "norm-written": Variant("norms scaled before the matmul", execution={"norm": "written"}),
    "reference": Variant("attention in plain JAX", {"compute.attention_backend": "reference"}),
    "cudnn": Variant("attention by cuDNN", {"compute.attention_backend": "cudnn"}),
    "hopper": Variant("attention by pallas_hopper", {"compute.attention_backend": "pallas_hopper"}),
    "triton": Variant("attention by Triton", {"compute.attention_backend": "triton"}),
    "deterministic": Variant("deterministic attention", {"compute.attention_deterministic": True}),
    "unroll": Variant(
        "unrolled layers, no recomputation",
        {"parallel.layer_loop": "unroll", "parallel.remat": "none"},
    ),
    "tf32": Variant("float32, matmuls in TF32", _FLOAT32),
    "float32": Variant("float32", _FLOAT32 | {"compute.matmul_precision": "float32"}),
}


#: The loss of jaxpar.
CROSS_ENTROPY = model_loss._cross_entropy


def plain_cross_entropy(h_ND, head_DV, labels_N, z_loss, logits_dtype, n):
    """Compute `loss._cross_entropy` as one would write it, for JAX to differentiate.

    The gradient of the logits stays in float32, and so do the operands of the matmuls that read it.
    """
    del n
    logits = jnp.dot(h_ND, head_DV, preferred_element_type=logits_dtype).astype(jnp.float32)
    lse = jax.scipy.special.logsumexp(logits, axis=-1)
    label = jnp.take_along_axis(logits, jnp.maximum(labels_N, 0)[:, None], axis=1)[:, 0]
    weight = jnp.where(labels_N == -1, 0.0, 1.0)
    nll = jnp.sum((lse - label) * weight)
    nll = psum(nll, VOCAB_AXES)  # of one device: only the type changes
    return nll + z_loss * psum(jnp.sum(jnp.square(lse) * weight), VOCAB_AXES), nll


def run_of(about: dict[str, Any], name: str, rate: float) -> tuple[Run, Execution, list[str]]:
    """Return a variant's run, how it is executed, and the environment that was set for it."""
    variant = VARIANTS[name]
    never = {"evaluation.every": 0, "checkpoint.every": 0, "optimizer.learning_rate": rate}
    cfg = replace(config(about), **never, **variant.fields)
    environment = runtime.start(cfg)
    model_loss._cross_entropy = plain_cross_entropy if variant.plain_loss else CROSS_ENTROPY
    run = Run.open(cfg, in_folder=False)
    return run, dataclasses.replace(run.execution, **variant.execution), environment
