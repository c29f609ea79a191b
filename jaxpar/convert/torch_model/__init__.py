"""The model in plain PyTorch, for files of `python -m jaxpar.convert to-torch RUN FILE.pt`.

    from torch_model import load
    model = load("FILE.pt")                 # float32; .to(torch.bfloat16) or .cuda() as you like
    logits = model(torch.tensor([[1, 2, 3]]))

This folder needs only torch, so you can copy it anywhere. FILE.json, next to FILE.pt, has the
fields. Recurrent layers go from token to token, as their papers write them.
"""

from .decoder import Decoder, load

__all__ = ["Decoder", "load"]
