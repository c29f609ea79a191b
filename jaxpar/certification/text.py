"""The checks of generated text, against complete forward passes of the plain model."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxpar.certification import traces
from jaxpar.certification.results import Result, Subject
from jaxpar.certification.traces import compile_options
from jaxpar.config import Config, ConfigError
from jaxpar.config.validate import resolve
from jaxpar.inference import generation, speculative
from jaxpar.inference.options import Sampling
from jaxpar.model import decode
from jaxpar.model.plain import decoder
from jaxpar.sharding.axes import TENSOR
from jaxpar.sharding.mesh import make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step.state import init_state

#: Tokens of the prompts, and those that follow.
PROMPTS, NEW = (1, 3, 8), 9

#: Tensor ranks that generate.
RANKS = (1, 2)


def text(subject: Subject) -> Iterator[Result]:
    """Compare logits with caches, and greedy text, with complete texts; and sampled tokens."""
    tolerance = subject.tolerance
    for ways in RANKS:
        mesh = f"tensor={ways}"
        try:
            model = Served.of(subject.small, ways, subject.devices)
        except ConfigError as error:
            yield Result("text", mesh, "logits", not_run=str(error))
            continue
        for what, errors in (("logits", model.errors), ("greedy text", model.greedy_errors)):
            far, where = max(errors())
            yield Result("text", mesh, what, far, tolerance, where=where)
    yield from sampled(subject.small.model.vocab_size)
    yield accepted()


class Served:
    """A small model that generates text on tensor ranks, and its plain form."""

    def __init__(self, cfg: Config, mesh: Mesh):
        """Args:     cfg: resolved, of `generation.config_for_sampling`."""
        self.cfg, self.mesh = cfg, mesh
        params = flat(init_state(cfg, mesh).params)
        for name, a in params.items():  # adapters begin with 0
            if name.endswith("_lora_b"):
                draw = np.random.default_rng(len(name)).standard_normal(a.shape)
                params[name] = jax.device_put(0.05 * draw.astype(np.float32), a.sharding)
        self.params = flax.traverse_util.unflatten_dict(params, sep="/")
        self.weights = generation.weights_for_sampling(self.params, cfg, mesh)
        arrays = traces.logical(self.params, cfg)
        tree = flax.traverse_util.unflatten_dict(arrays, sep="/")
        self._plain = decoder.scale_adapters(tree, cfg)

    @classmethod
    def of(cls, cfg: Config, ways: int, devices: Sequence[jax.Device]) -> "Served":
        """Make the model of a config on some of the devices.

        Raises:   ConfigError if its dims do not divide, or there are fewer devices.
        """
        if len(devices) < ways:
            rule = f"needs {ways} devices, but there are {len(devices)}"
            raise ConfigError("parallel.tensor", ways, rule, f"use --run.cpu-devices {ways}")
        cfg = resolve(generation.config_for_sampling(cfg, ways), ways)
        return cls(cfg, make_mesh(cfg.parallel, devices[:ways]))

    def whole(self, tokens: np.ndarray) -> np.ndarray:
        """Compute the plain model's logits of complete texts, int32 [B, T]."""
        place = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        run = functools.partial(decoder.logits_of, model=self.cfg.model)
        options = compile_options(list(self.mesh.devices.flat))
        program = jax.jit(run, compiler_options=options)
        return np.asarray(program(self._plain, tokens, place, place * 0))

    def errors(self) -> Iterator[tuple[float, str]]:
        """Yield the largest relative error of the logits after each prompt and what follows."""
        rng = np.random.default_rng(1)
        shape = len(PROMPTS), max(PROMPTS) + NEW
        tokens = rng.integers(0, self.cfg.model.vocab_size, shape).astype(np.int32)
        wanted, found = self.whole(tokens), np.asarray(_logits(self, tokens))
        for row, length in enumerate(PROMPTS):
            right = wanted[row, length - 1 : length + NEW]
            error = np.abs(found[row] - right).max(axis=-1) / np.abs(right).max()
            at = length - 1 + int(np.argmax(error))
            token = "last token of a prompt" if at == length - 1 else f"token {at}"
            yield float(error.max()), f"the {token} of {length}"

    def greedy_errors(self) -> Iterator[tuple[float, str]]:
        """Yield by how much a complete text prefers another token than the one generated."""
        rng, model = np.random.default_rng(2), self.cfg.model
        prompts = [rng.integers(0, model.vocab_size, n).tolist() for n in PROMPTS]
        size: dict[str, Any] = {"max_tokens": NEW, "vocab_size": model.vocab_size, "stop": set()}
        greedy = Sampling(temperature=0.0)
        rows: list[list[int]] = [[] for _ in prompts]
        for new in generation.generate(self.weights, self.cfg, self.mesh, prompts, greedy, **size):
            rows = [row + more for row, more in zip(rows, new, strict=True)]
        texts = np.zeros((len(PROMPTS), max(PROMPTS) + NEW), np.int32)
        for text, prompt, row in zip(texts, prompts, rows, strict=True):
            text[: len(prompt) + NEW] = prompt + row
        logits = self.whole(texts)
        for i, length in enumerate(PROMPTS):
            right = logits[i, length - 1 : length + NEW - 1]
            chosen = right[np.arange(NEW), rows[i]]
            error = (right.max(axis=-1) - chosen) / np.abs(right).max()
            at = length + int(np.argmax(error))
            yield float(error.max()), f"token {at} after a prompt of {length}"


def _logits(model: Served, tokens: np.ndarray) -> jax.Array:
    """Return the logits after each prompt, and after each token that follows, [B, 1 + NEW, V]."""
    cfg, mesh = model.cfg, model.mesh
    lengths, slots = np.array(PROMPTS, np.int32), tokens.shape[1] + 1
    prompts = np.where(np.arange(max(PROMPTS)) < lengths[:, None], tokens[:, : max(PROMPTS)], 0)
    places = lengths[:, None] + np.arange(NEW)
    later = np.take_along_axis(tokens, places, axis=1)

    def program(weights: Any) -> jax.Array:
        weights = jax.tree.map(lambda a: a[0], weights)
        cache = decode.empty_cache(cfg, len(tokens), slots)
        h, cache = decode.prompt(weights, jnp.asarray(prompts), jnp.asarray(lengths), cache, cfg)
        last = jnp.take_along_axis(h, (lengths - 1)[:, None, None], axis=1)[:, 0]

        def one(carry: Any, token: jax.Array) -> tuple[Any, jax.Array]:
            cache, at = carry
            h, cache = decode.step(weights, token[:, None], at, cache, cfg)
            return (cache, at + 1), decode.logits(weights, h[:, 0], cfg.model)

        _, rest = lax.scan(one, (cache, jnp.asarray(lengths)), jnp.asarray(later.T))
        return jnp.concatenate([decode.logits(weights, last, cfg.model)[None], rest]).swapaxes(0, 1)

    apart = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    of_mesh = apart(program, in_specs=PartitionSpec(TENSOR), out_specs=PartitionSpec())
    options = compile_options(list(mesh.devices.flat))
    return jax.jit(of_mesh, compiler_options=options)(model.weights)


# -------------------------------------------------------------------------------- sampled tokens

#: How tokens are drawn, and how many, each of a row of its own.
HOW = Sampling(temperature=0.7, top_k=6, top_p=0.8)
DRAWN = 1 << 13

#: Bound on the number of times that a token is drawn, in its own standard deviations.
DEVIATIONS = 7.0


def sampled(vocab_size: int) -> Iterator[Result]:
    """Compare chances and drawn tokens with numpy's: temperature, then top_k, then top_p.

    Source:   Holtzman et al. 2020 (1904.09751), section 3.1.
    """
    logits = np.random.default_rng(0).permutation(np.linspace(-2, 2, vocab_size))
    scores = logits / HOW.temperature
    order = np.argsort(-scores)[: HOW.top_k]
    share = np.exp(scores[order] - scores.max())
    share /= share.sum()
    keep = np.cumsum(share) - share < HOW.top_p
    wanted = np.zeros(vocab_size)
    wanted[order[keep]] = share[keep] / share[keep].sum()
    rows = jnp.asarray(np.broadcast_to(logits, (DRAWN, vocab_size)), jnp.float32)
    found = np.asarray(generation.chances(rows[:1], HOW, vocab_size))[0]
    error = float(np.abs(found - wanted).max())
    yield Result("text", "", "chances of tokens", error, 1e-5)
    keys = generation.row_keys(HOW, jnp.zeros(DRAWN, jnp.int32))
    tokens = np.asarray(generation.draw(rows, keys, HOW, vocab_size))
    counts = np.bincount(tokens, minlength=vocab_size)
    deviation = np.sqrt(DRAWN * np.maximum(wanted * (1 - wanted), 1e-6))
    far = np.abs(counts - DRAWN * wanted) / deviation
    yield Result("text", "", "drawn tokens", float(far.max()), DEVIATIONS, where=f"{far.argmax()}")


#: Drafts of a row, and tokens that they are drawn from.
DRAFTS, CHOICES = 2, 6


def accepted() -> Result:
    """Compare what follows from accepted drafts with what the model alone would draw.

    Source:   Leviathan et al. 2023 (2211.17192), theorem in appendix A.1.
    """
    rng = np.random.default_rng(0)
    target = rng.dirichlet(np.ones(CHOICES), DRAFTS + 1)
    proposed = rng.dirichlet(np.ones(CHOICES), DRAFTS)
    drafts = np.stack([rng.choice(CHOICES, DRAWN, p=q) for q in proposed], axis=1)
    uniform = rng.random((DRAWN, DRAFTS)).astype(np.float32)
    of_rows = lambda a: jnp.asarray(np.broadcast_to(a, (DRAWN, *a.shape)), jnp.float32)  # noqa: E731
    chances = of_rows(target), of_rows(proposed)
    count = speculative.num_accepted(*chances, jnp.asarray(drafts), jnp.asarray(uniform))
    rest = np.asarray(speculative.next_chances(*chances, count), np.float64)
    rest = np.cumsum(rest / rest.sum(axis=1, keepdims=True), axis=1)
    chosen = np.minimum((rest < rng.random((DRAWN, 1))).sum(axis=1), CHOICES - 1)
    number, far = np.asarray(count), 0.0
    for at in range(DRAFTS + 1):  # of the rows that reach a place, what is there
        there = number >= at
        tokens = np.where(number > at, drafts[:, min(at, DRAFTS - 1)], chosen)[there]
        wanted = target[at] * there.sum()
        deviation = np.sqrt(np.maximum(wanted * (1 - target[at]), 1e-6))
        found = np.bincount(tokens, minlength=CHOICES)
        far = max(far, float((np.abs(found - wanted) / deviation).max()))
    return Result("text", "", "tokens after drafts", far, DEVIATIONS)
