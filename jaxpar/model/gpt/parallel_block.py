"""The parallel block: x + attention(norm(x)) + feed_forward(norm(x)).

Source:   Wang & Komatsuzaki 2021 (GPT-J); Black et al. 2022 (2204.06745), GPT-NeoX, section 2.1.
"""

import jax

from jaxpar.execution.decisions import Execution
from jaxpar.model import probes
from jaxpar.model.attention_context import AttentionContext
from jaxpar.model.layer import Weights, branches_with_weights


def parallel_layer(x: jax.Array, w: Weights, context: AttentionContext, ex: Execution) -> jax.Array:
    """Apply a layer whose branches read the same residual stream. As `layer` otherwise."""
    branches = branches_with_weights(w, context.layer, ex.cfg.model)
    norms = []
    for branch, vectors, _ in branches:
        with jax.named_scope(branch.name):
            x, h = branch.normalize(x, vectors, ex)
            x = probes.observe(branch.input_point, x, w, context, ex.cfg, seen=h.whole)
            norms.append(h)
    for h, (branch, vectors, matrices) in zip(norms, branches, strict=True):
        with jax.named_scope(branch.name):
            h = branch.receive(h, matrices, branch.norm, context, ex)
            out = branch.function(h, matrices, context, ex)
            out = branch.normalized(branch.send(out), vectors, ex.cfg.model)
            out = probes.observe(branch.output_point, out, w, context, ex.cfg)
            x = branch.add(x, out, vectors, ex.cfg.model)
    return probes.observe("layer", x, w, context, ex.cfg)
