"""The checks of `python -m jaxpar.certify`: each passes on a tiny config, and finds a fault."""

import dataclasses
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.certification import (
    checkpoints,
    checks,
    command,
    data_order,
    evaluations,
    independent,
    kernels,
    outer_steps,
    rounding,
    small_config,
    text,
    updates,
)
from jaxpar.certification.meshes import (
    MOST_DEVICES,
    default_meshes,
    parse_meshes,
    resolve_meshes,
)
from jaxpar.certification.results import Check, Result, Subject
from jaxpar.checkpoint.loading import restore
from jaxpar.config import Config, ConfigError, Experts, Glu, replace
from jaxpar.config.config_file import known_configs, load_config
from jaxpar.config.schema.items import StepShare
from jaxpar.config.schema.optimizer import EmaConfig
from jaxpar.config.schema.parallel import DilocoConfig
from jaxpar.data import packing, shuffle
from jaxpar.data.loader import Loader
from jaxpar.execution.decisions import Platform, execution_of
from jaxpar.inference import generation
from jaxpar.kernels.attention import AttentionMask
from jaxpar.model import decode, parameters
from jaxpar.model.parameters import specs_of
from jaxpar.model.plain.attention import PlainMask
from jaxpar.optimizer import moments, rules, schedules, stochastic_rounding
from jaxpar.parallel import staged_model
from jaxpar.parallel.fsdp import gather as fsdp
from jaxpar.sharding.params import ParamSpec, flat
from jaxpar.step import state as states
from jaxpar.step.diloco import fragments, outer
from jaxpar.step.diloco import overlap as diloco_overlap
from jaxpar.step.features import moving_average
from jaxpar.training import evaluation
from tests.tiny import STATE, TINY

pytestmark = pytest.mark.usefixtures("quick_compile", "devices")


def subject(meshes: tuple[str, ...] = ("data=1",), **fields) -> Subject:
    """A tiny model, of four layers."""
    small = replace(TINY, **STATE, **{path.replace("__", "."): v for path, v in fields.items()})
    small = dataclasses.replace(small, parallel=parse_meshes(["data=1"], small.parallel)["data=1"])
    on, left_out = resolve_meshes(small, parse_meshes(meshes, small.parallel), 16, given=True)
    return Subject(small, small, on, left_out, jax.devices(), 3, 1e-5)


def run(check: Check, of: Subject) -> list[Result]:
    with jax.default_matmul_precision("highest"):
        return [*check(of)]


def wrong(check: Check, of: Subject) -> list[str]:
    return [str(result) for result in run(check, of) if not result.passed]


# ------------------------------------------------------------------------------ initial weights


def test_initial_weights():
    found = run(updates.initial_weights, subject())
    assert len(found) == 4 and all(result.passed and not result.not_run for result in found)


@pytest.mark.parametrize("name", known_configs().split(", "))
def test_every_shipped_config_declares_the_kinds_of_its_weights(name):
    cfg = load_config(name)
    kinds = updates.kinds_of(cfg)
    terms = [
        one for layer in cfg.model.distinct for one in (layer.mixer, layer.feed_forward) if one
    ]
    for term in terms:  # those that are declared alone are compared with nothing
        assert updates.is_own(term) or all(map(independent.is_known, term.weights(cfg.model)))
    for path, spec in flat(specs_of(cfg)).items():
        assert not [*updates.declared_wrong(spec, kinds[path])], path
        assert kinds[path].lead(len(spec.shape)) == spec.lead or not kinds[path].is_matrix, path


def test_a_wrong_initial_deviation_is_found(monkeypatch):
    smaller = lambda **of: ParamSpec(**of | {"std": 0.8 * of.get("std", 1.0)})  # noqa: E731
    monkeypatch.setattr(parameters, "ParamSpec", smaller)
    declared, values = wrong(updates.initial_weights, subject())
    assert "embed has an initial deviation of 0.016, not 0.02" in declared
    assert "standard deviations from the distribution of" in values


# -------------------------------------------------------------------------------------- schedule


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd", "constant"])
def test_schedule(shape):
    fields = {"optimizer__schedule": shape, "optimizer__warmup_steps": 7}
    found = run(updates.schedule, subject(train__num_steps=50, **fields))
    assert [one.passed and not one.not_run for one in found] == [True, True]  # and by a table


SHARES = StepShare(0, 0.25), StepShare(9, 0.5), StepShare(20, 1.0)


def test_schedule_by_tokens():
    of = subject(train__num_steps=40, optimizer__warmup_steps=6)
    asked = replace(of.asked, **{"optimizer.schedule_by": SHARES})
    found = run(updates.schedule, dataclasses.replace(of, asked=asked))
    assert [one.passed and not one.not_run for one in found] == [True, True]


def test_a_warm_up_that_begins_at_zero_is_found(monkeypatch):
    real = optax.linear_schedule
    late = lambda first, last, steps, **more: real(0.0, last, steps + 1, **more)  # noqa: E731
    monkeypatch.setattr(schedules.optax, "linear_schedule", late)
    found, _ = wrong(updates.schedule, subject(optimizer__warmup_steps=7))
    assert found.startswith("schedule: learning rate of step 6: 0.00857143, not 0.01 is off")


# --------------------------------------------------------------------------------------- updates


@pytest.mark.parametrize("rule", ["adamw", "lion", "sgd", "muon", "adafactor"])
def test_optimizer(rule):
    found = run(updates.optimizer, subject(optimizer__name=rule))
    assert all(result.passed and not result.not_run for result in found)
    assert {"weights after 1 update", "weights after 3 updates"} <= {r.what for r in found}


FAULTS: dict[str, Callable] = {
    "decay of all": lambda m: m.setattr(
        rules, "decay_mask", lambda specs: jax.tree.map(lambda _: True, flat_like(specs))
    ),
    "eps in the root": lambda m: m.setattr(
        rules, "scale_by_adam", lambda c, _: optax.scale_by_adam(c.beta1, c.beta2, 0, c.eps * 1e4)
    ),
    "average of another decay": lambda m: m.setattr(
        moving_average,
        "decay",
        lambda most, step: jnp.minimum(most**2, (2.0 + step) / (11.0 + step)),
    ),
}


def flat_like(specs):
    return jax.tree.map(lambda spec: spec.shape[0], specs, is_leaf=lambda x: hasattr(x, "axes"))


def test_faults_of_updates_are_found(monkeypatch):
    for name, inject in FAULTS.items():
        with monkeypatch.context() as patched:
            inject(patched)
            assert wrong(updates.optimizer, subject()), name


# ------------------------------------------------------------------------------------ data order

MESHES = ("data=4", "sequence=4,data=2", "pipeline=2,num_microbatches=2")


def test_data_order():
    found = run(data_order.data_order, subject(MESHES))
    assert all(result.passed and not result.not_run for result in found)
    assert {*MESHES} <= {result.mesh for result in found}


@pytest.mark.slow
def test_faults_of_data_are_found(monkeypatch):
    of = subject(("sequence=2",))
    with monkeypatch.context() as patched:
        patched.setattr(Loader, "_ordered", lambda self, packed, length: packed)
        found, of_processes = wrong(data_order.data_order, of)
        assert found.startswith("sequence=2: batches of tokens of batch 0")
        assert of_processes.startswith("sequence=2: rows of processes")
    with monkeypatch.context() as patched:
        real = packing.document_begins
        late = lambda *args: np.roll(real(*args), 1, axis=1)  # noqa: E731
        patched.setattr("jaxpar.data.loader.document_begins", late)
        assert any("batches of the text" in one for one in wrong(data_order.data_order, of))
    with monkeypatch.context() as patched:
        same = lambda n, seed: lambda numbers: shuffle.sequence_order(n, 1)(numbers % n)  # noqa: E731
        patched.setattr("jaxpar.data.loader.sequence_order", same)
        said = wrong(data_order.data_order, of)
        assert any("orders that are the same" in one for one in said)
        assert any("sources have the same order" in one for one in said)


# ----------------------------------------------------------------------------------- checkpoints


def test_checkpoints():
    found = run(checkpoints.checkpoints, subject())
    assert all(result.passed and not result.not_run for result in found)
    assert {"state once loaded", "safetensors", "llama, imported"} <= {r.what for r in found}


def test_moments_in_the_order_of_the_mesh_are_found(monkeypatch):
    real = states.order_of

    def of_params(path, cfg):
        names = [getattr(key, "name", "") for key in path]
        return None if "opt_state" in names else real(path, cfg)

    monkeypatch.setattr(states, "order_of", of_params)
    found = wrong(checkpoints.checkpoints, subject())
    assert len(found) == 1 and "state on the mesh of opt_state" in found[0]


def test_moments_that_are_not_restored_are_found(monkeypatch):
    def cleared(cfg, mesh):
        state = restore(cfg, mesh)
        return dataclasses.replace(state, opt_state=jax.tree.map(jnp.zeros_like, state.opt_state))

    monkeypatch.setattr(checkpoints, "restore", cleared)
    (found,) = wrong(checkpoints.checkpoints, subject())
    assert "state once loaded of opt_state" in found


# ------------------------------------------------------------------------------------------ text


@pytest.mark.slow
def test_text():
    found = run(text.text, subject())
    assert all(result.passed and not result.not_run for result in found)


def test_a_cache_one_position_ahead_is_found(monkeypatch):
    real = decode.step
    late = lambda w, tokens, at, *more: real(w, tokens, at + 1, *more)  # noqa: E731
    monkeypatch.setattr(decode, "step", late)
    served = text.Served.of(subject().small, 1, jax.devices())
    with jax.default_matmul_precision("highest"):
        error, where = max(served.errors())
    assert error > 1e-3 and where.startswith("the token")


def test_chances_that_leave_out_a_token_are_found(monkeypatch):
    real = generation.chances
    fewer = lambda logits, how, n: real(logits, dataclasses.replace(how, top_k=5), n)  # noqa: E731
    monkeypatch.setattr(generation, "chances", fewer)
    found = [str(result) for result in text.sampled(48) if not result.passed]
    assert found and found[0].startswith("text: chances of tokens")


def test_rows_that_share_random_numbers_are_found(monkeypatch):
    real = generation.row_keys
    first = lambda how, position: real(how, position, 0 * position)  # noqa: E731
    monkeypatch.setattr(generation, "row_keys", first)
    found = [str(result) for result in text.sampled(48) if not result.passed]
    assert found and found[0].startswith("text: drawn tokens")


# -------------------------------------------------------------------------------------- rounding


@pytest.mark.slow
def test_what_a_config_rounds():
    of = subject()
    fields = {"parallel.grad_reduce": "bfloat16", "optimizer.second_moment_dtype": "bfloat16"}
    of = dataclasses.replace(of, asked=replace(of.asked, **fields))
    found = run(rounding.rounding, of)
    assert all(result.passed and not result.not_run for result in found)
    assert any("grad_reduce" in result.what for result in found)
    assert any("nu in bfloat16" in result.what for result in found)
    (none,) = run(rounding.rounding, subject())
    assert none.not_run


def test_errors_of_rounding_are_as_they_are_derived():
    numbers = 2 ** np.random.default_rng(0).uniform(0, 8, 100_000)
    errors = numbers.astype(jnp.bfloat16).astype(np.float64) / numbers - 1
    assert 0.99 * rounding.EPS < np.abs(errors).max() < rounding.EPS
    assert np.sqrt(np.mean(errors**2)) == pytest.approx(rounding.ROOT_MEAN_SQUARE, rel=0.02)


@pytest.mark.parametrize(("num_experts", "per_token"), [(8, 2), (16, 4), (64, 8)])
def test_rows_that_change_experts_are_as_they_are_derived(num_experts, per_token):
    rng, error = np.random.default_rng(0), 0.01
    logits = rng.standard_normal((20_000, num_experts))
    chosen = []
    for _ in range(2):
        here = logits + error * rng.standard_normal(logits.shape)
        chosen.append(here >= np.sort(here)[:, -per_token, None])
    changed = np.mean(chosen[0] != chosen[1]) * num_experts / per_token
    experts = Experts(expert=Glu(8), num_experts=num_experts, experts_per_token=per_token)
    assert changed == pytest.approx(rounding.other_rows(experts, error), rel=0.15)


def test_sums_in_bfloat16_that_divide_are_found(monkeypatch):
    of = subject()
    of = dataclasses.replace(of, asked=replace(of.asked, **{"parallel.grad_reduce": "bfloat16"}))
    real = fsdp.psum_scatter
    monkeypatch.setattr(fsdp, "psum_scatter", lambda x, axes, dim: real(x, axes, dim=dim) / 4)
    assert wrong(rounding.rounding, of)


@pytest.mark.slow
def test_rounding_that_truncates_is_found(monkeypatch):
    of = subject()
    fields = {"optimizer.second_moment_dtype": "bfloat16"}
    of = dataclasses.replace(of, asked=replace(of.asked, **fields))
    real = stochastic_rounding.round_to_bfloat16
    monkeypatch.setattr(moments, "round_to_bfloat16", lambda x, bits: real(x, 0 * bits))
    found = wrong(rounding.rounding, of)
    assert any("mean ratio of nu in bfloat16" in one for one in found)


def test_sums_in_few_digits_are_found(monkeypatch):
    of = subject()
    monkeypatch.setattr(rounding, "OF_DIGITS", rounding.OF_DIGITS[:1])
    results = list(rounding._few_digits(of, replace(of.small, **{"compute.dtype": "bfloat16"})))
    assert len(results) == 3 and all(one.passed and not one.not_run for one in results)

    def rounded(total, part):
        part = part if isinstance(part, jax.Array) else part.gradients[0]
        return (total.astype(jnp.bfloat16) + part.astype(jnp.bfloat16)).astype(jnp.float32)

    monkeypatch.setattr(staged_model.add_gradients, "__defaults__", (rounded,))
    *_, found = rounding._few_digits(of, replace(of.small, **{"compute.dtype": "bfloat16"}))
    assert not found.passed


# ----------------------------------------------------------------------------------- evaluations


@pytest.mark.slow
def test_evaluations(monkeypatch):
    of = subject(optimizer__ema=EmaConfig(decay=0.9))
    found = run(evaluations.evaluations, of)
    assert [result.what for result in found] == ["loss of held_out", "loss of ema"]
    assert all(result.passed and not result.not_run for result in found)
    monkeypatch.setattr(evaluation, "averaged", lambda state, cfg: state.params)
    assert len(wrong(evaluations.evaluations, of)) == 1


# ------------------------------------------------------------------------------------ outer steps


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [2])
def test_outer_steps(overlap, monkeypatch):
    diloco = DilocoConfig(every=6, fragments=2, overlap=overlap)
    of = subject()
    of = dataclasses.replace(of, asked=replace(of.asked, diloco=diloco))
    found = run(outer_steps.outer_steps, of)
    assert len(found) == 2 + bool(overlap)
    assert all(result.passed and not result.not_run for result in found)
    real = fragments.mean_of_replicas
    for module in (outer, diloco_overlap):
        twice = lambda x, dtype: 2 * real(x, dtype)  # noqa: E731
        monkeypatch.setattr(module, "mean_of_replicas", twice)
    assert wrong(outer_steps.outer_steps, of)


# --------------------------------------------------------------------------------------- kernels


def test_kernels_are_not_run_on_a_cpu():
    (found,) = run(kernels.kernels, subject())
    assert "certify on a GPU" in found.not_run


def test_references_are_not_compared_with_themselves(monkeypatch):
    """Where JAX's devices are CPUs, which run the reference, whatever the subject says."""
    gpu = types.SimpleNamespace(platform="gpu")
    of = dataclasses.replace(subject(), asked=load_config("quickstart_hybrid"), devices=[gpu])
    found = run(kernels.kernels, of)
    assert [result.what for result in found] == ["attention", "experts", "recurrences"]
    assert all("runs the reference" in result.not_run for result in found)
    error = ConfigError("compute.attention_backend", "auto", "disagrees", "report the bug")

    def disagree(*args):
        raise error

    monkeypatch.setattr(kernels.attention, "test_kernels", disagree)
    assert any("disagrees" in one for one in wrong(kernels.kernels, of))


@pytest.mark.gpu
def test_kernels_on_a_gpu():
    found = run(kernels.kernels, dataclasses.replace(subject(), asked=load_config("quickstart")))
    assert all(result.passed for result in found)
    assert any(result.what == "attention: dq" and not result.not_run for result in found)


def test_numpy_versions_import_nothing_of_what_they_check():
    names = {name for name in vars(independent) if not name.startswith("_")}
    assert names & {"jax", "jnp", "optax"} == set()
    assert independent.Config is Config


def test_what_is_not_compared_is_listed(monkeypatch):
    """A check that compares nothing says so, like one that says why it was not run."""
    name, check = checks._listed("nothing", lambda subject: iter(()))
    (found,) = check(subject())
    assert found.check == name and found.not_run
    monkeypatch.setattr(command, "print_results", lambda results, width: [*results])
    every = [("nothing", check), ("kernels", dict(checks.CHECKS)["kernels"])]
    results = [r for of in command.run_checks(subject(), checks=every) for r in of]
    said = command.summary(results).splitlines()
    assert [line.startswith("not run: ") for line in said] == [True, True, False]
    assert said[-1] == "0 of 0 comparisons agree"


def test_default_meshes_take_every_way_to_execute_a_dense_model():
    """What `execution_of` decides is decided both ways by meshes that accumulate gradients."""
    cfg = small_config.float32(load_config("llama3_8b"))
    meshes, _ = default_meshes(cfg, MOST_DEVICES)
    cfg = small_config.shrink(cfg, list(meshes.values()))
    configs, _ = resolve_meshes(cfg, meshes, MOST_DEVICES, given=False)
    taken = [execution_of(one, Platform("cpu")) for one in configs.values()]
    names = ("gathers_per_layer", "scatters_per_layer", "stage_wide_collectives", "layers_per_vjp")
    accumulates = lambda p: p.pipeline == 1 and p.num_microbatches > 1  # noqa: E731
    some = [ex for ex in taken if accumulates(ex.cfg.parallel)]
    for name in names:
        assert {bool(getattr(ex, name)) for ex in some} == {False, True}, name


def test_the_mask_of_the_plain_model_is_that_of_the_kernels():
    rng = np.random.default_rng(0)
    segments = np.cumsum(rng.random((3, 20)) < 0.2, axis=1).astype(np.int32)
    positions = np.broadcast_to(np.arange(20, dtype=np.int32), segments.shape)
    for window in (None, 4):
        given = positions, positions, segments, segments, window
        plain, ours = PlainMask(*given).dense(), AttentionMask(*given).dense()
        assert np.array_equal(plain, ours) and 0 < plain.mean() < 0.5
