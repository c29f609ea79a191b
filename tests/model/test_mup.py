"""µP: which factors a model has, and that at the base model's sizes it is the plain model."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from jaxpar.certification import traces
from jaxpar.config import Attention, Layer, Model, MupConfig, replace
from jaxpar.config.validate import resolve
from jaxpar.model.mup import in_words, mup_score_factor, standard
from jaxpar.model.parameters import param_specs
from jaxpar.model.plain import decoder
from jaxpar.sharding.mesh import make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step.state import abstract_state
from jaxpar.step.train_step import make_train_step
from tests.tiny import ATTENTION, EXPERTS, GLU, TINY

#: Twice the width, three times d_ff, twice the width of a head, twice the layers.
WIDE = {
    "model.mup.base_width": 8,
    "model.mup.base_d_ff": 8,
    "model.mup.base_head_dim": 2,
    "model.mup.base_depth": 1,
}
#: The same sizes as the base model.
BASE = {
    "model.mup.base_width": 16,
    "model.mup.base_d_ff": 24,
    "model.mup.base_head_dim": 4,
    "model.mup.base_depth": 2,
}


def specs_of(**fields) -> dict:
    return flat(param_specs(replace(TINY, **fields).model))


def test_widths_and_initial_weights():
    """Matrices by their inputs, readouts by the square, all others as in the base model."""
    experts = dataclasses.replace(EXPERTS, num_shared_experts=1, shared_expert_gate=True)
    fields = {"model.layers.feed_forward": experts, "model.layers.mixer.bias": True}
    found, plain = specs_of(**(WIDE | fields)), specs_of(**fields)
    of_rows = dict.fromkeys(("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_shared_up"), 2.0)
    of_rows |= {"w_down": 3.0, "w_shared_down": 3.0, "w_shared_gate": 2.0}
    for path, spec in found.items():
        name = path.rpartition("/")[2]
        std = plain[path].std * (math.sqrt(2) if name in ("wo", "w_down", "w_shared_down") else 1)
        if name in ("router", "w_shared_router"):
            assert spec.widths == (2.0, 1.0) and spec.std == pytest.approx(std / 2), path
        elif name in of_rows:
            rows = of_rows[name]
            assert spec.widths[0] == rows and spec.std == pytest.approx(std / math.sqrt(rows)), path
        else:
            assert spec.widths == (1.0, 1.0) and spec.std == std, path
        assert spec.gradient == (1 / 4 if "/" in path else 1 / 2), path
    assert found["layers/wo"].widths == (2.0, 2.0) and found["layers/w_up"].widths == (2.0, 3.0)
    adapters = flat(
        param_specs(replace(TINY, **WIDE).model, replace(TINY, **{"lora.rank": 2}).lora)
    )
    assert adapters["layers/w_down_lora_a"].widths == (3.0, 1.0)
    assert adapters["layers/w_down_lora_b"].widths == (1.0, 2.0)


def test_factors_of_scores():
    """1 / sqrt(d) of the base model's heads, then 1 / d."""

    def at(d: int, base: int | None = 16, **fields) -> float:
        a = Attention(num_heads=4, num_kv_heads=2, head_dim=d, **fields)
        layer, mup = Layer("layers", a, GLU), MupConfig(base_head_dim=base)
        return (
            standard(Model(d_model=16, vocab_size=48, layers=[layer], mup=mup))
            .layers[0]
            .mixer.scale
        )

    assert at(16) == 1 / 4 and mup_score_factor(ATTENTION, TINY.model) == 1
    assert at(64) == pytest.approx(1 / 4 * 16 / 64)
    assert at(64, scale=0.5) == pytest.approx(0.5 * 16 / 64)
    assert at(64, scale_dim=4) == pytest.approx(0.5 * 16 / 64)
    assert at(64, base=None) == 1 / 8


def test_the_function_in_the_standard_parametrization():
    """Granite's factors compute what µP's do; the weights are the same."""
    m = replace(TINY, **WIDE, **{"model.num_layers": 1}).model
    plain = standard(m)
    assert plain.mup is None and plain.logits_scaling == 2 and plain.residual_multiplier == 1
    assert standard(plain) is plain
    tokens = np.arange(16, dtype=np.int32).reshape(1, 16)
    one = np.ones_like(tokens)

    @jax.jit
    def logits_of_each():
        params = traces.initialize(param_specs(m), 0)
        models = m, plain, dataclasses.replace(m, mup=None)
        return [decoder.logits_of(params, tokens, tokens, one, model) for model in models]

    mup, folded, without = map(np.asarray, logits_of_each())
    np.testing.assert_allclose(folded, mup, rtol=1e-5, atol=1e-6)
    assert np.abs(without - mup).max() > 0.1 * np.abs(mup).max()
    assert in_words(plain) == "" and "/ 2 with d_model inputs, / 3 with d_ff" in in_words(m)


def lowered(devices, **fields) -> str:
    cfg = resolve(replace(TINY, **fields), 1)
    mesh = make_mesh(cfg.parallel, devices[:1])
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    return make_train_step(cfg, mesh, None).lower(abstract_state(cfg), batch).as_text()


@pytest.mark.slow
def test_the_base_model_is_the_plain_model(devices):
    """The same program, initial weights and state."""
    assert lowered(devices, **BASE) == lowered(devices)
    drawn = lambda spec: (spec.init, spec.std, spec.shape)  # noqa: E731
    base, plain = specs_of(**BASE), specs_of()
    assert {n: drawn(s) for n, s in base.items()} == {n: drawn(s) for n, s in plain.items()}
    for name in ("adamw", "lion", "adafactor", "muon"):
        of_rule = {"optimizer.name": name}
        states = [abstract_state(replace(TINY, **of_rule, **f)) for f in (WIDE, {})]
        assert states[0] == states[1]
