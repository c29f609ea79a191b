"""Optimizer rules, decay mask, schedules, the moving average and initial values, in numpy, float64.

`certify` compares the run's own with these. They are written from the papers and from what the
fields say, and import nothing of what they check: what both sides share, a comparison cannot see.
The tables name every weight anew, so a weight that changes its kind must change here, too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpar.config import Config, Model, OptimizerConfig

type Arrays = dict[str, np.ndarray]

# ------------------------------------------------------------------------- the kinds of weights


@dataclass(frozen=True)
class WeightKind:
    """What a weight is.

    Args:
        inputs, outputs: letters of the dims of each matrix y = x W: D width, F feed-forward, H
            heads, K head dim, R latent or rank, E experts. A table that is read by row, and a
            vector, have no outputs.
        own_dims: dims of one matrix, table or vector. Those before them count layers and experts.
        init: normal, ones, zeros, decay_rate or time_step.
        std: of normal values.
        decays: whether weight decay applies.
        trained: whether the optimizer updates it.
        table: whether it is read by row, with the last dim as columns.
        readout: whether its outputs do not grow with the width (µP).
    """

    inputs: str = ""
    outputs: str = ""
    own_dims: int = 1
    init: str = "normal"
    std: float = 0.0
    decays: bool = False
    trained: bool = True
    table: bool = False
    readout: bool = False

    @property
    def is_matrix(self) -> bool:
        """Whether it maps activations to activations, as Muon's matrices do."""
        return bool(self.outputs)

    def cut(self, ndim: int) -> int | None:
        """Return the first dim of columns, of matrices and tables; None for vectors."""
        if self.is_matrix:
            return ndim - len(self.outputs)
        return ndim - 1 if self.table else None

    def lead(self, ndim: int) -> int:
        """Return the number of dims that count layers and experts."""
        return ndim - self.own_dims


#: Matrices by the letters of their inputs and outputs.
MATRICES = {
    "D HK": "wq wk wv w_attn_gate delta_q delta_k delta_v delta_z delta_b delta_a kda_q kda_k "
    "kda_v mamba_z mamba_x mamba_b mamba_c",
    "D H": "kda_b mamba_dt",
    "D R": "wq_a wkv_a kda_f_a kda_g_a",
    "R HK": "wq_b wkv_b kda_f_b kda_g_b",
    "D F": "w_gate w_up w_shared_gate w_shared_up",
    "HK D": "wo delta_out kda_out mamba_out",
    "F D": "w_down w_shared_down",
    "2D D": "w_join",
}

#: Matrices that write to the residual stream: their initial values have std / sqrt(2 layers).
#: Source:   Radford et al. 2019 (GPT-2), section 2.3.
TO_STREAM = "wo delta_out kda_out mamba_out w_down w_shared_down".split()

#: Tables with rows and columns, by their number of dims.
TABLES = {"embed": 2, "positions": 2, "head": 2, "router": 2}

#: Vectors without weight decay: gains of norms (1, or 0 where 1 is added), and others.
GAINS = (
    "attn_norm mlp_norm attn_post_norm mlp_post_norm final_norm q_norm k_norm q_a_norm kv_a_norm "
    "embed_norm hidden_norm out_norm"
).split()
ONES = "delta_norm kda_norm mamba_norm mamba_d layer_scale".split()
ZEROS = (
    "attn_norm_bias mlp_norm_bias final_norm_bias bq bk bv bo b_router router_bias b_gate b_up "
    "b_down mamba_bias_x mamba_bias_b mamba_bias_c"
).split()
DECAY_RATES = "delta_a_log kda_a_log mamba_a_log".split()
TIME_STEPS = "delta_dt_bias kda_dt_bias mamba_dt_bias".split()

_LETTERS = {name: tuple(of.split()) for of, names in MATRICES.items() for name in names.split()}


def is_known(name: str) -> bool:
    """Return whether `kind_of` knows the name of a weight in a layer."""
    vectors = {*GAINS, *ONES, *ZEROS, *DECAY_RATES, *TIME_STEPS, "w_shared_router", "sinks"}
    return name in _LETTERS or name in TABLES or "_conv_" in name or name in vectors


def kind_of(path: str, ndim: int, cfg: Config) -> WeightKind:
    """Return what the weight of a path, such as "layers/wq", is. Raises KeyError for others."""
    m, name = cfg.model, path.rsplit("/", maxsplit=1)[-1]
    in_layer, std = "/" in path, m.init_std
    if name.endswith(("_lora_a", "_lora_b")):
        inputs, outputs = _LETTERS[name[: -len("_lora_a")]]
        if name.endswith("_a"):
            # Those of PEFT's uniform distribution: variance 1 / (3 inputs). The caller knows them.
            return WeightKind(inputs, "R", len(inputs) + 1, std=math.nan, decays=True)
        return WeightKind("R", outputs, len(outputs) + 1, "zeros", decays=True)
    trained = cfg.lora is None
    if name in _LETTERS:
        inputs, outputs = _LETTERS[name]
        if name in TO_STREAM:
            std /= math.sqrt(2 * ((m.mup and m.mup.base_depth) or len(m.layers)))
        own = len(inputs) + len(outputs)
        std /= math.sqrt(width_ratio(inputs, m))
        return WeightKind(inputs, outputs, own, std=std, decays=True, trained=trained)
    if name in TABLES:
        readout = name == "router"
        std /= _width(m) if readout else 1
        own = TABLES[name]
        return WeightKind(
            own_dims=own, std=std, decays=True, trained=trained, table=True, readout=readout
        )
    if "_conv_" in name:  # a kernel for each channel; the caller knows its width
        return WeightKind(own_dims=3, std=math.nan, decays=True, trained=trained, table=True)
    of_experts = name in ("b_gate", "b_up", "b_down") and ndim == 3
    own = ndim - in_layer - of_experts
    if name == "w_shared_router":
        return WeightKind(
            own_dims=own, std=std / _width(m), decays=True, trained=trained, readout=True
        )
    if name == "sinks":
        return WeightKind(own_dims=own, std=std, trained=trained)
    inits = {
        **dict.fromkeys(GAINS, "zeros" if m.norm.offset else "ones"),
        **dict.fromkeys(ONES, "ones"),
        **dict.fromkeys(ZEROS, "zeros"),
        **dict.fromkeys(DECAY_RATES, "decay_rate"),
        **dict.fromkeys(TIME_STEPS, "time_step"),
    }
    return WeightKind(own_dims=own, init=inits[name], trained=trained and name != "router_bias")


def with_sizes(kind: WeightKind, shape: tuple[int, ...]) -> WeightKind:
    """Return a kind with the standard deviation that depends on its shape."""
    if not math.isnan(kind.std):
        return kind
    if kind.table:
        std = shape[-1] ** -0.5
    else:
        ndim = len(shape)
        std = (3 * math.prod(shape[kind.lead(ndim) : kind.cut(ndim)])) ** -0.5
    return WeightKind(**{**vars(kind), "std": std})


# ------------------------------------------------------------------------------------------- µP


def _width(m: Model) -> float:
    return m.d_model / m.mup.base_width if m.mup else 1.0


def width_ratio(letters: str, m: Model) -> float:
    """Return how many times more inputs a matrix has than that of µP's base model.

    Source:   Yang et al. 2022 (2203.03466), table 8.
    """
    if m.mup is None:
        return 1.0
    hidden = _width(m)
    if m.mup.base_d_ff:
        forwards: list[Any] = [layer.feed_forward for layer in m.layers if layer.feed_forward]
        of_experts = [of.expert for of in forwards if hasattr(of, "expert")]
        hidden = (of_experts or forwards)[0].d_ff / m.mup.base_d_ff
    of = {"D": _width(m), "HK": _width(m), "F": hidden}
    return of.get(letters, 1.0)


def rate_factor(kind: WeightKind, m: Model) -> float:
    """Return the factor of a weight's updates in µP: of Adam's and Lion's, table 8."""
    return 1 / (_width(m) if kind.readout else width_ratio(kind.inputs, m))


def eps_factor(path: str, m: Model) -> float:
    """Return the factor of Adam's eps in µP.

    Source:   Dey et al. 2025 (2505.01618), table 1.
    """
    if m.mup is None:
        return 1.0
    deeper = len(m.layers) / m.mup.base_depth if m.mup.base_depth else 1.0
    return 1 / (_width(m) * (deeper if "/" in path else 1.0))


# ------------------------------------------------------------------------------------- schedules


def counted(o: OptimizerConfig, steps: int) -> float:
    """Return what the first steps count as: their number, or their shares of a whole step."""
    if isinstance(o.schedule_by, str):
        return float(steps)
    total = 0.0
    for i in range(steps):
        total += next(one.share for one in reversed(o.schedule_by) if i >= one.step)
    return total


def warm_up(o: OptimizerConfig, num_steps: int) -> int:
    """Return the steps of the warm-up: a tenth of a run that is not longer than them."""
    if o.warmup_fraction:
        return round(o.warmup_fraction * num_steps)
    return o.warmup_steps if o.warmup_steps < num_steps else int(num_steps / 10)


def learning_rate(o: OptimizerConfig, num_steps: int, step: int) -> float:
    """Return the learning rate of a step, counted from 0.

    Source:   warm-up: Goyal et al. 2017 (1706.02677), section 2.2, without a step at 0. cosine:
              Loshchilov & Hutter 2017 (1608.03983), equation 5. wsd: Hu et al. 2024 (2404.06395),
              equation 1, with a linear decay.
    """
    at, whole = counted(o, step), math.ceil(counted(o, num_steps))
    first = warm_up(o, whole)
    if at < first:
        return o.learning_rate * min(at + 1, first) / first
    t, rest, floor = at - first, max(whole - first, 1), o.min_lr_ratio
    if o.schedule == "constant":
        return o.learning_rate
    if o.schedule == "wsd":
        length = min(o.decay_steps, rest) or max(rest // 5, 1)
        done = min(max(t - (rest - length), 0) / length, 1)
        return o.learning_rate * (1 - done * (1 - floor))
    done = min(t / (o.decay_steps or rest), 1)
    if o.schedule == "cosine":
        return o.learning_rate * (floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2)
    assert o.schedule == "linear", o.schedule
    return o.learning_rate * (1 - done * (1 - floor))


# ------------------------------------------------------------------------ clipping and the average


def clipped(grads: Arrays, limit: float) -> Arrays:
    """Scale gradients to a global norm of at most `limit`; 0 leaves them as they are.

    Source:   Pascanu et al. 2013 (1211.5063), algorithm 1.
    """
    norm = math.sqrt(sum(float(np.sum(np.square(g))) for g in grads.values()))
    if not limit or norm <= limit:
        return grads
    return {name: g * (limit / norm) for name, g in grads.items()}


def averaged(average: Arrays, weights: Arrays, most: float, step: int) -> Arrays:
    """Return the moving average after the update of `step`, counted from 0.

    Source:   Polyak & Juditsky 1992; the decay of TensorFlow's `ExponentialMovingAverage`.
    """
    updates = step + 1
    keep = min(most, (1 + updates) / (10 + updates))
    return {name: keep * old + (1 - keep) * weights[name] for name, old in average.items()}


# ----------------------------------------------------------------------------------------- rules


@dataclass
class Optimizer:
    """An update rule with its moments, by the names that they have in a state.

    Args:
        cfg: its optimizer and model.
        kinds: of the trained weights, by path.
    """

    cfg: Config
    kinds: Mapping[str, WeightKind]
    count: int = 0
    moments: dict[str, Arrays] = field(default_factory=dict)

    def update(self, weights: Arrays, grads: Arrays) -> Arrays:
        """Return the weights after one update with gradients as they are, before clipping.

        Source:   decay: Loshchilov & Hutter 2019 (1711.05101), algorithm 2.
        """
        o, new = self.cfg.optimizer, {}
        rate = learning_rate(o, self.cfg.train.num_steps, self.count)
        grads, self.count = clipped(grads, o.clip_norm), self.count + 1
        for path, w in weights.items():
            kind, rule, ratio = self.kinds[path], str(o.name), 1.0
            if rule == "muon":
                rule, ratio = ("muon", o.muon_lr_ratio) if kind.is_matrix else ("adamw", 1.0)
            step = getattr(self, f"_{rule}")(path, grads[path]) + o.weight_decay * kind.decays * w
            new[path] = w - ratio * rate * step
        return new

    def _average(self, name: str, path: str, beta: float, value: np.ndarray) -> np.ndarray:
        of = self.moments.setdefault(name, {})
        of[path] = beta * of.get(path, np.zeros_like(value)) + (1 - beta) * value
        return of[path]

    def _adamw(self, path: str, g: np.ndarray) -> np.ndarray:
        """Source:   Kingma & Ba 2015 (1412.6980), algorithm 1."""
        o, t = self.cfg.optimizer, self.count
        m = self._average("mu", path, o.beta1, g) / (1 - o.beta1**t)
        v = self._average("nu", path, o.beta2, g * g) / (1 - o.beta2**t)
        step = m / (np.sqrt(v) + o.eps * eps_factor(path, self.cfg.model))
        return rate_factor(self.kinds[path], self.cfg.model) * step

    def _lion(self, path: str, g: np.ndarray) -> np.ndarray:
        """Source:   Chen et al. 2023 (2302.06675), algorithm 2."""
        o = self.cfg.optimizer
        before = self.moments.get("mu", {}).get(path, np.zeros_like(g))
        step = np.sign(o.beta1 * before + (1 - o.beta1) * g)
        self._average("mu", path, o.beta2, g)
        return rate_factor(self.kinds[path], self.cfg.model) * step

    def _sgd(self, path: str, g: np.ndarray) -> np.ndarray:
        """Source:   Sutskever et al. 2013, equations 1 and 2, with the rate outside the sum."""
        of = self.moments.setdefault("trace", {})
        of[path] = self.cfg.optimizer.beta1 * of.get(path, np.zeros_like(g)) + g
        return of[path]

    def _muon(self, path: str, g: np.ndarray) -> np.ndarray:
        """Source:   Jordan et al. 2024 (kellerjordan.github.io/posts/muon); size: Liu et al. 2025
        (2502.16982), equation 4; corrections of Nesterov momentum: Dozat 2016, algorithm 2."""
        o, t = self.cfg.optimizer, self.count
        kind, beta = self.kinds[path], self.cfg.optimizer.muon_momentum
        x = self._average("mu", path, beta, g)
        if o.muon_nesterov:
            x = beta * x / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t)
        lead, cut = kind.lead(x.ndim), kind.cut(x.ndim)
        rows, columns = math.prod(x.shape[lead:cut]), math.prod(x.shape[cut:])
        step = newton_schulz(x.reshape(-1, rows, columns), o.muon_steps, o.eps).reshape(x.shape)
        m = self.cfg.model
        wider = width_ratio(kind.inputs, m), width_ratio(kind.outputs, m)
        of_base = rows / wider[0], columns / wider[1]
        size = math.sqrt(max(1, of_base[1] / of_base[0]))
        if o.muon_scale == "rms":
            size = 0.2 * math.sqrt(max(of_base))
        return size * math.sqrt(wider[1] / wider[0]) * step

    def _adafactor(self, path: str, g: np.ndarray) -> np.ndarray:
        """Source:   Shazeer & Stern 2018 (1804.04235), algorithm 4 without the relative rate, with
        the decay of section 7.2 and the clipping of section 6."""
        o, kind = self.cfg.optimizer, self.kinds[path]
        beta = min(o.beta2, 1 - self.count**-0.8)
        lead, cut, squares = kind.lead(g.ndim), kind.cut(g.ndim), g * g + 1e-30
        if cut is None:
            v = self._average("nu", path, beta, squares)
        else:
            over_rows, over_columns = tuple(range(lead, cut)), tuple(range(cut, g.ndim))
            r = self._average("nu_rows", path, beta, squares.mean(over_columns))
            c = self._average("nu_columns", path, beta, squares.mean(over_rows))
            r = np.expand_dims(r, over_columns)
            v = r * np.expand_dims(c, over_rows) / r.mean(over_rows, keepdims=True)
        step, own = g / np.sqrt(v), tuple(range(lead, g.ndim))
        step /= np.maximum(1, np.sqrt(np.mean(step * step, axis=own, keepdims=True)))
        if o.beta1:
            step = self._average("mu", path, o.beta1, step)
        return rate_factor(kind, self.cfg.model) * step


def newton_schulz(x: np.ndarray, steps: int, eps: float) -> np.ndarray:
    """Bring the singular values of matrices [n, rows, columns] near 1. Jordan et al. 2024."""
    if x.shape[1] > x.shape[2]:
        return newton_schulz(x.swapaxes(1, 2), steps, eps).swapaxes(1, 2)
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (np.sqrt(np.sum(x * x, axis=(1, 2), keepdims=True)) + eps)
    for _ in range(steps):
        gram = x @ x.swapaxes(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
