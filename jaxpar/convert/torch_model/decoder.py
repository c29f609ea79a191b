"""The complete model, and how it is loaded."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import AttentionLayer, capped
from .delta_net import DeltaNetLayer
from .kimi_delta import KimiDeltaLayer
from .latent_attention import LatentAttentionLayer
from .layer import FeedForwardLayer, TorchLayer
from .mamba import MambaLayer
from .norms import LayerNorm, TorchNorm
from .rope import frequencies, rotary_factor


def load(file: str | Path) -> "Decoder":
    """Load the model of a file, in float32. Only tensors are unpickled."""
    m = SimpleNamespace(**json.loads(Path(file).with_suffix(".json").read_text()))
    with torch.device("meta"):
        model = Decoder(m)
    state = torch.load(file, weights_only=True, mmap=True)
    model.load_state_dict({name: w.float() for name, w in state.items()}, assign=True)
    return model.eval()


def letter_of(m: SimpleNamespace, i: int) -> str:
    """Letter of layer i."""
    pattern = m.layer_pattern or "*"
    return pattern[i % len(pattern)]


def with_heads(m: SimpleNamespace, letter: str) -> SimpleNamespace:
    """Model with the heads of its layers of a letter: global ones (A) have their own."""
    own = {"global_keys_as_values": letter == "A" and m.global_keys_as_values}
    if letter == "A":
        own["head_dim"] = m.global_head_dim or m.head_dim
        own["num_kv_heads"] = m.global_num_kv_heads or m.num_kv_heads
    return SimpleNamespace(**vars(m) | own)


def layer(m: SimpleNamespace, i: int) -> TorchLayer:
    """Layer i of the model. In a model with experts, the first or some between may be dense."""
    letter = letter_of(m, i)
    is_dense = (i + 1) % m.moe_every > 0 if m.moe_every > 1 else i < m.dense_layers
    if is_dense or letter in "-k":
        dense = {"num_experts": 0, "d_ff": m.dense_d_ff or m.d_ff}
        m = SimpleNamespace(**vars(m) | dense)
    if letter in "GMKk" and m.recurrent_norms == "before":
        m = SimpleNamespace(**vars(m) | {"pre_norms": True, "post_norms": False})
    m = with_heads(m, letter)
    kinds = {
        "*": LatentAttentionLayer if m.kv_lora_rank else AttentionLayer,
        "A": AttentionLayer,
        "G": DeltaNetLayer,
        "M": MambaLayer,
        "K": KimiDeltaLayer,
        "k": KimiDeltaLayer,
        "-": FeedForwardLayer,
        "E": FeedForwardLayer,
    }
    feeds_forward = letter in "-E" or set("-E").isdisjoint(m.layer_pattern)
    return kinds[letter](m, feeds_forward=feeds_forward)


class Decoder(nn.Module):
    """The model: tokens [B, T] to logits [B, T, V]."""

    def __init__(self, m: SimpleNamespace):
        super().__init__()
        self.m, self.embed = m, nn.Embedding(m.vocab_size, m.d_model)
        self.layers = nn.ModuleList(layer(m, i) for i in range(m.num_layers))
        self.norm = (LayerNorm if m.norm == "layer" else TorchNorm)(m.d_model, m)
        learned = m.positions == "learned"
        self.positions = nn.Embedding(m.max_positions, m.d_model) if learned else None
        self.head = None if m.tie_embeddings else nn.Linear(m.d_model, m.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        m, place = self.m, torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) * (math.sqrt(m.d_model) if m.embed_scale else 1)
        x = x * m.embedding_multiplier
        if self.positions is not None:
            x = x + self.positions(place)
        for i, layer in enumerate(self.layers, 1):
            letter = letter_of(m, i - 1)
            is_global = letter == "A" or (m.global_every and i % m.global_every == 0)
            window = None if is_global else m.sliding_window
            without = m.positions == "learned" or (m.nope_every and i % m.nope_every == 0)
            rope = None if without or not m.rope_fraction else self.rope(place, letter, is_global)
            x = layer(x, rope, self.seen(place, window, None if is_global else m.attention_chunk))
        logits = F.linear(self.norm(x), (self.head or self.embed).weight) / m.logits_scaling
        return capped(logits, m.logits_softcap)

    def seen(self, place: Tensor, window: int | None, chunk: int | None) -> Tensor:
        """Which keys a query sees, [T, T]: of a window, of its chunk, or all that are not later."""
        back = place[:, None] - place
        seen = (back >= 0) & (back < (window or len(place)))
        return seen & (place[:, None] // chunk == place // chunk) if chunk else seen

    def rope(self, place: Tensor, letter: str, is_global: bool) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every place, [T, 1, R / 2], in global layers or in the others."""
        m = with_heads(self.m, letter)
        local = (m.global_every or "A" in m.layer_pattern) and not is_global
        theta = m.local_rope_theta if local and m.local_rope_theta else m.rope_theta
        scaled = m.local_rope_scaling or not local
        angles = place[:, None] * frequencies(m, theta, scaled, len(place)).to(place.device)
        factor = rotary_factor(m) if scaled else 1.0
        return angles.cos()[:, None] * factor, angles.sin()[:, None] * factor
