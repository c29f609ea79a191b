"""The PyTorch side of loss_spikes.py: python scripts/measure/loss_spikes_torch.py FOLDER

Needs only NumPy and PyTorch. Trains the same model from the same weights on the same batches, with
the same AdamW, in plain PyTorch: flash attention, torch.compile, bfloat16 as in torchtitan.

    mixed      FSDP's mixed precision: every weight and activation in bfloat16, float32 masters
    autocast   torch.autocast: the residual stream and the norms stay in float32
    float32    all in float32, matmuls in TF32

--gradients computes the gradient of each point that loss_spikes.py wrote, in float32 without TF32,
which it writes to FOLDER/exact, and with the other precisions, which it compares with that one.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

PRECISIONS = ("mixed", "autocast", "float32")
#: Arrays of a point that are no weights.
BATCH = ("tokens", "labels", "segment_ids", "positions")
#: The label of tokens without loss, as in jaxpar.
IGNORED = -1


class Model:
    """The decoder as functions of a dict of weights: {"embed": tensor, "layers/wq": [tensor]}."""

    def __init__(self, shape: dict, length: int, device: str, precision: str):
        self.shape, self.device, self.precision = shape, device, precision
        self.dtype = torch.bfloat16 if precision == "mixed" else torch.float32
        half = shape["head_dim"] // 2
        pairs = torch.arange(half, dtype=torch.float32, device=device) / half
        angles = torch.arange(length, device=device)[:, None] * shape["rope_theta"] ** -pairs
        self.cos, self.sin = angles.cos()[:, None], angles.sin()[:, None]

    def loss(self, weights: dict, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy, from float32 logits as torchtitan computes it."""
        on = self.precision == "autocast"
        with torch.autocast(self.device, torch.bfloat16, enabled=on):
            logits = self.logits(weights, tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)

    def logits(self, weights: dict, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [B, T, V]."""
        cast = lambda w: w.to(self.dtype)  # noqa: E731
        x = F.embedding(tokens, cast(weights["embed"]))
        for i in range(self.shape["num_layers"]):
            w = {n[7:]: cast(each[i]) for n, each in weights.items() if n.startswith("layers/")}
            x = x + self.attention(self.norm(x, w["attn_norm"]), w)
            h = self.norm(x, w["mlp_norm"])
            x = x + (F.silu(h @ w["w_gate"]) * (h @ w["w_up"])) @ w["w_down"]
        return self.norm(x, cast(weights["final_norm"])) @ cast(weights["head"])

    def norm(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), gain, self.shape["norm_eps"])

    def attention(self, h: torch.Tensor, w: dict) -> torch.Tensor:
        q, k, v = ((h @ w[n].flatten(1)).unflatten(-1, w[n].shape[1:]) for n in ("wq", "wk", "wv"))
        q, k = self.rotated(q), self.rotated(k)
        q, k, v = (a.transpose(1, 2) for a in (q, k, v.to(q.dtype)))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return o.transpose(1, 2).flatten(2) @ w["wo"].flatten(0, 1)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.float().chunk(2, dim=-1)
        turned = a * self.cos - b * self.sin, b * self.cos + a * self.sin
        return torch.cat(turned, dim=-1).to(x.dtype)


def read_weights(file: Path, device: str) -> dict:
    """Read weights: one tensor per array, or one per layer."""
    found = {}
    for name, array in np.load(file).items():
        if name in BATCH:
            continue
        whole = torch.from_numpy(array).to(device)
        parts = [w.clone() for w in whole] if name.startswith("layers/") else whole
        for leaf in parts if isinstance(parts, list) else [parts]:
            leaf.requires_grad_(True)
        found[name] = parts
    return found


def leaves_of(weights: dict) -> tuple[list, list]:
    """Return the tensors with weight decay (matrices) and those without (norms)."""
    decayed, plain = [], []
    for name, found in weights.items():
        leaves = found if isinstance(found, list) else [found]
        (plain if name.endswith("norm") else decayed).extend(leaves)
    return decayed, plain


def adamw(decayed: list, plain: list, optimizer: dict) -> torch.optim.AdamW:
    """Return jaxpar's AdamW."""
    groups = [
        {"params": decayed, "weight_decay": optimizer["weight_decay"]},
        {"params": plain, "weight_decay": 0.0},
    ]
    betas = optimizer["beta1"], optimizer["beta2"]
    return torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=optimizer["eps"], fused=True)


def train_one(loss_of, weights: dict, folder: Path, seed: int, about: dict, device: str) -> dict:
    """Train from one seed, and return every step's loss, gradient norm and largest change."""
    arrays, optimizer = np.load(folder / f"batches_{seed}.npz"), about["optimizer"]
    tokens, labels = (torch.from_numpy(arrays[n]).long().to(device) for n in ("tokens", "labels"))
    decayed, plain = leaves_of(weights)
    leaves, rule = decayed + plain, adamw(decayed, plain, optimizer)
    found: dict[str, list] = {"loss": [], "grad_norm": [], "change": []}
    for step in range(about["steps"]):
        for group in rule.param_groups:
            rate = min(1.0, (step + 1) / max(about["warm_up"], 1))
            group["lr"] = optimizer["learning_rate"] * rate
        loss = loss_of(weights, tokens[step], labels[step])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves, optimizer["clip_norm"], foreach=True)
        with torch.no_grad():
            before = [w.clone() for w in leaves]
            rule.step()
            changes = torch._foreach_norm(torch._foreach_sub(leaves, before), float("inf"))
        rule.zero_grad(set_to_none=True)
        found["loss"].append(loss.detach())
        found["grad_norm"].append(norm.detach())
        found["change"].append(torch.stack(changes).max())
    lists = {name: torch.stack(values).tolist() for name, values in found.items()}
    return {"seed": seed, **lists}


def gradient_of(loss_of, file: Path, device: str) -> tuple[dict, dict]:
    """Compute the gradient of a point. Returns {"loss", "grad_norm"} and the gradients by name."""
    weights, arrays = read_weights(file, device), np.load(file)
    tokens, labels = (torch.from_numpy(arrays[n]).long().to(device) for n in ("tokens", "labels"))
    loss = loss_of(weights, tokens, labels)
    loss.backward()
    stack = lambda w: torch.stack([a.grad for a in w]) if isinstance(w, list) else w.grad  # noqa: E731
    found = {name: stack(w) for name, w in weights.items()}
    norm = sum(g.square().sum() for g in found.values()).sqrt()
    return {"loss": loss.item(), "grad_norm": norm.item()}, found


def compared(grads: dict, exact: dict) -> dict[str, float]:
    """Return the distance of each gradient over the exact one's norm, and `all` together."""
    apart = {name: (grads[name] - exact[name]).square().sum().item() for name in exact}
    size = {name: exact[name].square().sum().item() for name in exact}
    whole = (sum(apart.values()) / sum(size.values())) ** 0.5
    return {"all": whole} | {name: (apart[name] / size[name]) ** 0.5 for name in exact}


def gradients(folder: Path, shape: dict, length: int, device: str) -> None:
    """Compute the gradient of every point with each precision, without torch.compile."""
    found: dict[str, dict] = {}
    (folder / "exact").mkdir(exist_ok=True)
    for file in sorted((folder / "points").glob("*.npz")):
        here = found.setdefault(file.stem, {})
        torch.set_float32_matmul_precision("highest")
        model = Model(shape, length, device, "float32")
        here["float32"], exact = gradient_of(model.loss, file, device)
        np.savez(folder / "exact" / file.name, **{n: g.cpu().numpy() for n, g in exact.items()})
        torch.set_float32_matmul_precision("high")
        for precision in PRECISIONS:
            model = Model(shape, length, device, precision)
            name = "tf32" if precision == "float32" else precision
            here[name], grads = gradient_of(model.loss, file, device)
            here[name] |= compared(grads, exact)
        print(f"{file.stem}: {json.dumps(here)}", flush=True)
        (folder / "gradients").mkdir(exist_ok=True)
        (folder / "gradients" / "torch.json").write_text(json.dumps(found))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--precision", choices=PRECISIONS, default="mixed")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--gradients", action="store_true", help="only the gradients of points")
    parser.add_argument("--steps", type=int, help="fewer steps than prepared")
    parser.add_argument("--warm-up", type=int, help="default: as prepared")
    parser.add_argument("--learning-rate", type=float, help="default: as in jaxpar's runs")
    parser.add_argument("--suffix", default="", help="appended to the name in the results")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this time")
    options = parser.parse_args()
    folder, device = Path(options.folder), "cuda" if torch.cuda.is_available() else "cpu"
    about, began = json.loads((folder / "about.json").read_text()), time.monotonic()
    torch.set_float32_matmul_precision("high")
    length = np.load(folder / "batches_0.npz")["tokens"].shape[2]
    if options.gradients:
        gradients(folder, about["model"], length, device)
        return
    about |= {n: v for n in ("steps", "warm_up") if (v := getattr(options, n)) is not None}
    about["optimizer"]["learning_rate"] = rate = (
        options.learning_rate or about["optimizer"]["learning_rate"]
    )
    model = Model(about["model"], length, device, options.precision)
    loss_of = model.loss if options.eager else torch.compile(model.loss)
    name, curves = f"torch-{options.precision}{options.suffix}", []
    for seed in range(about["seeds"])[: options.seeds]:
        started = time.monotonic()
        if curves and started - began > options.seconds:
            break
        weights = read_weights(folder / f"weights_{seed}.npz", device)
        curves.append(train_one(loss_of, weights, folder, seed, about, device))
        took = time.monotonic() - started
        print(f"{name} seed {seed}: {curves[-1]['loss'][-1]:.4f}, {took:.1f} s", flush=True)
        found = {"variant": name, "what": f"PyTorch, {options.precision}", "curves": curves}
        found |= {"steps": about["steps"], "warm_up": about["warm_up"], "torch": torch.__version__}
        found["learning_rate"] = rate
        found["gpu"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        (folder / "runs").mkdir(exist_ok=True)
        (folder / "runs" / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
