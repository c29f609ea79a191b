"""Direct preference optimization (DPO): learn which of two responses to a prompt is preferred.

    r(y) = beta log(policy(y | prompt) / reference(y | prompt))          the implicit reward
    loss = -log sigmoid(r(chosen) - r(rejected))                        mean over pairs

With label smoothing e, the labels are taken to be wrong with probability e:

    loss = -(1 - e) log sigmoid(margin) - e log sigmoid(-margin)

Source:   Rafailov et al. 2023 (2305.18290), equation 7; smoothing: Mitchell 2023, "A note on DPO
          with noisy preferences".
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from jaxpar.components.ranges import Positive, Reals
from jaxpar.config.metrics import Metric
from jaxpar.objectives.of_pairs import PairObjective

if TYPE_CHECKING:
    import jax

    from jaxpar.config.incompatible import Incompatible


@dataclass(frozen=True, kw_only=True)
class Dpo(PairObjective):
    """Preference tuning on pairs of responses (DPO)."""

    section = "dpo"
    metrics: ClassVar[dict[str, Metric]] = {
        "reward_accuracy": Metric(
            "preferences", "share", "pairs whose chosen response has the higher reward"
        ),
        "reward_margin": Metric(
            "preferences", "nats", "reward of the chosen minus of the rejected"
        ),
        "chosen_reward": Metric(
            "preferences", "nats", "beta log(policy / reference), mean over pairs"
        ),
        "rejected_reward": Metric("preferences", "nats", "the same of the rejected responses"),
    }
    relative = True

    beta: Positive = 0.1
    """Factor of the implicit reward, log(policy / reference). A larger one keeps the policy closer
    to the reference."""
    label_smoothing: Annotated[float, Reals(0, 0.5, below=True)] = 0.0
    """Share of the pairs whose preference is assumed to be wrong (cDPO)."""
    too_long: Literal["error", "drop"] = "error"
    """Pairs that are longer than data.seq_len: refuse the data, or leave them out."""

    def rewards(self, log_probs: "jax.Array") -> "tuple[jax.Array, jax.Array]":
        return self.beta * log_probs[..., 0], self.beta * log_probs[..., 1]

    def measures(self, chosen: "jax.Array", rejected: "jax.Array") -> "jax.Array":
        import jax.numpy as jnp

        margin = chosen - rejected
        right = (margin > 0).astype(jnp.float32)
        return jnp.stack([self.loss(margin), right, margin, chosen, rejected])

    def loss(self, margin: "jax.Array") -> "jax.Array":
        """Compute the loss of each pair from its margin r(chosen) - r(rejected), float32."""
        import jax

        right, wrong = jax.nn.log_sigmoid(margin), jax.nn.log_sigmoid(-margin)
        return -(1 - self.label_smoothing) * right - self.label_smoothing * wrong

    def plain_loss(self, chosen: "jax.Array", rejected: "jax.Array") -> "jax.Array":
        import jax.numpy as jnp

        e, margin = self.label_smoothing, chosen - rejected
        return (1 - e) * jnp.log1p(jnp.exp(-margin)) + e * jnp.log1p(jnp.exp(margin))

    @classmethod
    def incompatible(cls) -> "tuple[Incompatible, ...]":
        from jaxpar.config.incompatible import MASTERS_ON_HOST, Incompatible

        why = "the reference is computed from weights on the device"
        return (*super().incompatible(), Incompatible(cls.is_set(), MASTERS_ON_HOST, why))

    def prepare(
        self, cfg: Any, mesh: Any, loader: Any, max_segments: int, weights_from: Any
    ) -> Any:
        from jaxpar.features.dpo.reference import Reference

        return Reference()


SECTION = Dpo
