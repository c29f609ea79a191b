"""The listing holds what `validation` accepts: all of it, and nothing else."""

import itertools

import pytest

from jaxpar.certification import small_config
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.command_line import load_config
from jaxpar.config.validate import resolve
from jaxpar.prediction.layouts import describe, divisors, legal_layouts, meshes, values_of
from jaxpar.tools.planning.questions import counts_of_gpus

#: Odd numbers, so that many rules refuse something.
SMALL = replace(
    small_config.float32(Config()),
    **{
        "model.num_layers": 6,
        "model.layers.mixer.num_kv_heads": 2,
        "model.vocab_size": 72,
        "train.global_batch_size": 6,
        "data.seq_len": 96,
        "parallel.layer_loop": "unroll",
    },
)

#: What divides a batch of six, and a number that does not.
MICROBATCHES = (1, 2, 3, 4, 6)

POLICIES = ("none", "dots", "attn_out", "full", "dots_offload", "offload")
ON_DEVICE = POLICIES[:4]


def brute_force(cfg: Config, gpus: int) -> set[tuple]:
    """Every combination of small values, tried one by one."""
    sizes = range(1, gpus + 1)
    found = set()
    for P, r, f, c, t in itertools.product(sizes, repeat=5):
        if P * r * f * c * t != gpus:
            continue
        rest = itertools.product((1, 2, 3), MICROBATCHES, range(1, 4), (1, 2))
        for zero, micro, virtual, groups in rest:
            if zero > 1 and f * c == 1:  # nothing is sharded
                continue
            if zero == 2 and P == micro == 1:  # no sums over microbatches to shard
                continue
            if groups == 2 and 1 in (t, P):  # turns hide what goes over tensor, between stages
                continue
            values = (P, r, f, 1, c, t, zero, micro, virtual, groups)
            names = "pipeline replica data expert sequence tensor "
            names += "zero num_microbatches virtual_stages"
            fields = dict(zip((names + " row_groups").split(), values, strict=True))
            try:
                resolve(replace(cfg, **{f"parallel.{n}": v for n, v in fields.items()}), gpus)
            except ConfigError:
                continue
            found |= {(*values, remat) for remat in (POLICIES if P == 1 else ON_DEVICE)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "least"), [(2, 50), (4, 100)])
def test_listing_is_the_brute_force_one(gpus, least):
    listing = legal_layouts(SMALL, gpus, {})
    listed = [tuple(values_of(cfg).values()) for cfg in listing.configs]
    assert len(listed) == len(set(listed)) > least
    assert set(listed) == brute_force(SMALL, gpus)
    assert sum(listing.refused.values()) > 0
    for cfg in listing.configs[::7]:
        assert resolve(cfg, gpus) == cfg


def test_fixed_fields_stay():
    fixed = {"tensor": 2, "zero": 1, "remat": "dots", "num_microbatches": 2}
    listing = legal_layouts(SMALL, 4, fixed)
    assert listing.configs
    for cfg in listing.configs:
        assert {name: values_of(cfg)[name] for name in fixed} == fixed


@pytest.mark.slow
def test_coarse_is_a_part_of_all():
    everything = {tuple(values_of(c).values()) for c in legal_layouts(SMALL, 4, {}).configs}
    coarse = {
        tuple(values_of(c).values()) for c in legal_layouts(SMALL, 4, {}, coarse=True).configs
    }
    assert coarse < everything


def test_a_refusal_names_its_rule_and_a_fix():
    listing = legal_layouts(SMALL, 4, {"tensor": 4})
    assert not listing.configs
    (reason, count), *_ = listing.refused.most_common(1)
    assert reason.startswith("model.layers.mixer.num_kv_heads: ") and count > 0
    assert "--parallel.tensor 2" in listing.examples[reason].fix


@pytest.mark.parametrize("n", [1, 6, 16, 360])
def test_meshes_multiply_to_the_gpus(n):
    found = [tuple(mesh.values()) for mesh in meshes(n, {})]
    assert len(found) == len(set(found))
    for mesh in found:
        product = 1
        for size in mesh:
            product *= size
        assert product == n
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_counts_of_gpus_are_whole_hosts():
    counts = counts_of_gpus(8, 512)
    assert counts[:6] == [1, 2, 4, 8, 16, 24] and counts == sorted(set(counts))
    assert all(n < 8 or n % 8 == 0 for n in counts) and counts[-1] <= 512


def test_a_layout_in_words():
    cfg = resolve(replace(load_config("llama3_8b"), **{"parallel.tensor": 2}), 8)
    assert describe(cfg) == "data 4, tensor 2"
