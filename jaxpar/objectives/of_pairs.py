"""Objectives of pairs of responses, of which one is better. Imports no JAX by itself."""

from typing import TYPE_CHECKING, ClassVar

from jaxpar.objectives.objective import Objective

if TYPE_CHECKING:
    import jax
    import numpy as np

    from jaxpar.config import Config
    from jaxpar.config.incompatible import Incompatible
    from jaxpar.objectives.head import Head, Sums, Tree
    from jaxpar.sharding.batch import Batch

#: Most pairs in a row of a random batch, and the share of tokens that belong to prompts.
PAIRS, PROMPTS = 2, 0.3


class PairObjective(Objective):
    """An objective of packed pairs (`objectives/pairs.py`), a mean over pairs.

    It is a function of the log probabilities of both responses. A subclass may have a field
    `too_long`: "error" or "drop".
    """

    recomputed = 8
    dataset = "pairs"  # `data.formats.meta.PAIRS`
    documents = 2 * PAIRS
    too_long = "error"
    """What to do with pairs that are longer than data.seq_len: "error" or "drop"."""
    relative: ClassVar[bool] = False
    """Whether log probabilities are relative to `REFERENCE` of a batch."""
    per_token: ClassVar[bool] = False
    """Whether they are means over the labels of a response, not sums."""

    def rewards(self, log_probs: "jax.Array") -> "tuple[jax.Array, jax.Array]":
        """Return the rewards of the chosen and the rejected responses, float32 [...].

        Args:     log_probs: [..., 2], of both responses.
        """
        return log_probs[..., 0], log_probs[..., 1]

    def measures(self, chosen: "jax.Array", rejected: "jax.Array") -> "jax.Array":
        """Return what is averaged over pairs: the loss, then `metrics`, float32 [N, ...].

        Args:     chosen, rejected: rewards, float32 [...].
        """
        raise NotImplementedError

    def plain_loss(self, chosen: "jax.Array", rejected: "jax.Array") -> "jax.Array":
        """Compute the loss alone, for `certify`; here by the same code."""
        return self.measures(chosen, rejected)[0]

    def head(self, top: "Tree", x: "jax.Array", mb: "Batch", h: "Head") -> "Sums":
        """Compute the summed loss of a microbatch's pairs, as `Objective.head`.

        Returns:  (loss, [N]: sums of `measures`), on the first rank of SEQUENCE; zeros on others.
        Communication: that of `token_scores.log_probs`, `by_response` and `present`.
        """
        import jax
        import jax.numpy as jnp
        from jax import lax

        from jaxpar.objectives import pairs, token_scores
        from jaxpar.sharding.batch import IGNORED, REFERENCE

        if h.max_segments is None:
            raise ValueError("pairs need max_segments")
        most = h.max_segments // 2
        with jax.named_scope("loss"):
            scores = token_scores.log_probs(top, x, mb.labels, h.cfg)
            if self.relative:
                scores = jnp.where(mb.labels == IGNORED, 0.0, scores - mb.extra[REFERENCE])
            rewards = self.rewards(pairs.by_response(scores, mb, most, self.per_token))
            here = pairs.present(mb, most)
            totals = pairs.totals(self.measures(*rewards), here)
            return totals[0], lax.stop_gradient(totals)

    def count(self, batch: "Batch", axes: tuple[str, ...]) -> "jax.Array":
        import jax.numpy as jnp

        from jaxpar.objectives import pairs
        from jaxpar.parallel.collectives import psum

        return psum(pairs.count_pairs(batch), axes).astype(jnp.float32)

    def report(self, mean: "jax.Array") -> "dict[str, jax.Array]":
        return dict(zip(("loss", *self.metrics), mean, strict=True))

    def plain(
        self, logits: "jax.Array", batch: "Batch", cfg: "Config"
    ) -> "tuple[jax.Array, jax.Array]":
        """As `Objective.plain`: document 2k + 1 of a row is the chosen response of its pair k,
        document 2k + 2 the rejected one."""
        import jax
        import jax.numpy as jnp

        from jaxpar.sharding.batch import IGNORED, REFERENCE

        scores, labeled = jax.nn.log_softmax(logits), batch.labels != IGNORED
        index = jnp.maximum(batch.labels, 0)[..., None]
        of_label = jnp.take_along_axis(scores, index, -1)[..., 0]
        before = batch.extra[REFERENCE] if self.relative else 0.0
        ratios = jnp.where(labeled, of_label - before, 0.0)
        total, count = jnp.float32(0), jnp.float32(0)

        def of_document(number: int) -> jax.Array:
            mine = batch.segment_ids == number
            found = jnp.sum(jnp.where(mine, ratios, 0.0), axis=1)
            count = jnp.maximum(jnp.sum(mine & labeled, axis=1), 1)
            return found / count if self.per_token else found

        for k in range(batch.labels.shape[1] // 2):
            of_pair = jnp.stack([of_document(2 * k + 1), of_document(2 * k + 2)], axis=-1)
            there = jnp.any(batch.segment_ids == 2 * k + 1, axis=1)
            loss = self.plain_loss(*self.rewards(jnp.where(there[:, None], of_pair, 0.0)))
            total += jnp.sum(jnp.where(there, loss, 0.0))
            count += jnp.sum(there)
        return total / count, total / count

    def random_batch(
        self, cfg: "Config", rng: "np.random.Generator", text: "np.ndarray"
    ) -> "Batch":
        """As `Objective.random_batch`: one or two pairs a row, of random lengths, with random log
        probabilities of a reference. Labels as those of prompts are IGNORED."""
        import numpy as np

        from jaxpar.sharding.batch import IGNORED, REFERENCE, Batch

        tokens = text[:, :-1]
        _, T = tokens.shape
        segments, positions = np.zeros(tokens.shape, np.int32), np.zeros(tokens.shape, np.int32)
        for row in range(len(tokens)):
            cuts = rng.choice(np.arange(1, T), 2 * (1 + row % PAIRS) - 1, replace=False)
            for document, start in enumerate([0, *sorted(cuts.tolist())]):
                segments[row, start:] = document + 1
                positions[row, start:] = np.arange(T - start)
        last = np.diff(segments, axis=1, append=-1) != 0
        spared = last | (rng.random(tokens.shape) < PROMPTS)
        labels = np.where(spared, np.int32(IGNORED), text[:, 1:])
        scores = np.where(spared, 0, -2 * rng.random(tokens.shape)).astype(np.float32)
        extra = {REFERENCE: scores} if self.relative else {}
        return Batch(tokens, labels, segments, positions, extra=extra)

    def batch_extra(self, cfg: "Config") -> dict[str, tuple[tuple[int, ...], str]]:
        from jaxpar.sharding.batch import REFERENCE

        return {REFERENCE: ((), "float32")} if self.relative else {}

    def loader(self, split: str) -> type:
        from jaxpar.data.pairs import PairLoader

        return PairLoader

    @classmethod
    def incompatible(cls) -> "tuple[Incompatible, ...]":
        from jaxpar.config import incompatible as known
        from jaxpar.config.condition import changed, equal

        no_term = "the loss of pairs has no such term"
        excluded = {
            known.Z_LOSS: no_term,
            known.Z_LOSS_SCHEDULE: no_term,
            known.MTP: no_term,
            known.MIXTURE: "pairs come from one dataset",
            changed("data.loss_on"): "the loss of pairs is on the responses",
            equal("data.document_mask", False): "two responses are documents of one sequence",
            known.BATCHES: "all steps have as many pairs",
            known.LENGTHS: "a sequence holds whole pairs",
            known.EPOCHS: "passes are over text: set train.num_steps",
            known.SOURCE: "pairs of responses are of a dataset",
        }
        late = known.Incompatible(cls.is_set(), known.DILOCO, "pairs are counted over all replicas")
        return (*cls.excludes(excluded), late)
