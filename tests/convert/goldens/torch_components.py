"""The components of tests/convert/composed.py that are not jaxpar's, in PyTorch. No jaxpar here."""

from typing import Any

import torch


def components(torch_model: Any) -> dict[str, dict[str, Any]]:
    """Return, by model, the classes for `torch_model.load`."""

    class Sigmoid(torch_model.TorchAttention):
        def heads(self, q, k, v, seen):
            k, v = (one.repeat_interleave(q.shape[2] // k.shape[2], 2) for one in (k, v))
            scores = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5 + self.shift
            weights = scores.sigmoid().masked_fill(~seen[:, None], 0)
            return torch.einsum("bhts,bshk->bthk", weights, v)

    class DecayedMean(torch_model.TorchComponent):
        def forward(self, x, weights, positions, segments):
            v = torch.einsum("bsd,dhk->bshk", x, weights["mean_v"])
            back = positions[:, :, None] - positions[:, None]
            seen = (back >= 0) & (segments[:, :, None] == segments[:, None])
            rate = 0.1 * self.power * weights["mean_rate"].exp()[:, None, None]
            decay = (-rate * back[:, None]).exp().masked_fill(~seen[:, None], 0)
            return torch.einsum("bhts,bshk,hkd->btd", decay, v, weights["mean_out"])

    class Sine(torch_model.TorchComponent):
        def forward(self, x, weights, positions, segments):
            return (x @ weights["sine_up"]).sin() @ weights["sine_down"]

    own = {"DecayedMean": DecayedMean, "Sine": Sine}
    return {
        "sigmoid": {"sigmoid_attention.py:Sigmoid": Sigmoid},
        "own": {f"tests.convert.composed:{name}": one for name, one in own.items()},
    }
