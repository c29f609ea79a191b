"""The formulas of docs/parallelism.md, "What an axis costs", are those that plans are made with."""

import re
from pathlib import Path

import pytest

from jaxpar.config import Config, replace
from jaxpar.config.command_line import load_config
from jaxpar.prediction import rates
from jaxpar.prediction.communication import Cluster, traffic_of
from jaxpar.prediction.hardware import GPUS, NETWORKS
from jaxpar.prediction.memory import bytes_of_names, saved_bytes, saved_per_token
from jaxpar.prediction.shard import shard_of, state_bytes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parallelism.md"
SECTION = re.search(r"^## What an axis costs\n(.*?)^## ", PAGE.read_text("utf-8"), re.M | re.S)[1]

BASE = replace(load_config("llama3_8b"), **{"train.global_batch_size": 64, "parallel.data": 1})


def row(first: str) -> list[str]:
    """The cells of a table's row, by its first."""
    found = re.search(rf"^\| {re.escape(first)} \| (.*) \|$", SECTION, re.MULTILINE)
    assert found, f"no row {first!r}"
    return found[1].split(" | ")


def value_of(formula: str, letters: dict[str, float]) -> float:
    """A formula as the page writes it: a space multiplies, but for those around a sign."""
    code = re.search(r"`([^`]+)`", formula)[1].replace("−", "-")
    code = re.sub(r" ([-+]) ", r"\1", code).replace(" ", "*")
    return eval(code, {}, dict(letters))


def letters_of(cfg: Config) -> dict[str, float]:
    """The page's letters, for a config."""
    m, p, shard = cfg.model, cfg.parallel, shard_of(cfg)
    mixer = m.layers[0].mixer
    b, T = shard.rows, cfg.data.seq_len
    layers = m.num_layers // p.pipeline
    table = m.vocab_size * m.d_model
    letters = dict(f=shard.fsdp, t=p.tensor, P=p.pipeline, r=p.replica, c=p.sequence, b=b, T=T)
    letters |= dict(M=p.num_microbatches, v=p.virtual_stages, L=m.num_layers, D=m.d_model)
    letters |= dict(V=m.vocab_size, N_l=shard.layer.matrices * p.tensor)
    letters |= dict(N=shard.layer.everything * p.tensor * m.num_layers + 2 * table)
    letters |= dict(A=2 * b * T / p.sequence * m.d_model)
    letters |= dict(KV=4 * b * T * mixer.num_kv_heads / p.tensor * mixer.head_dim)
    letters |= dict(Q=2 * b * T * mixer.num_heads / p.tensor * mixer.head_dim)
    rests = p.sequence == 1 and p.zero == 1
    idle = 0 if rests else (p.pipeline - 1) // p.virtual_stages
    return letters | dict(u=layers * (p.num_microbatches + idle))


def with_parallel(**fields: object) -> Config:
    return replace(BASE, **{f"parallel.{name}": value for name, value in fields.items()})


PIPELINE = dict(pipeline=4, zero=1, num_microbatches=8)


@pytest.mark.parametrize(
    ("name", "axis", "fields"),
    [
        ("data, ZeRO-3", "data", dict(data=8, num_microbatches=2)),
        ("data, ZeRO-3", "data", dict(data=4, tensor=2)),
        ("data, ZeRO-1, one microbatch", "data", dict(data=8, zero=1)),
        ("data, ZeRO-1, microbatches or pipeline", "data", dict(data=4, tensor=2, **PIPELINE)),
        ("replica", "replica", dict(replica=2, data=4, tensor=2)),
        ("sequence, `allgather`", "sequence", dict(sequence=4, tensor=2)),
        ("sequence, `ring`", "sequence", dict(sequence=4, context="ring", num_microbatches=2)),
        ("sequence, `ulysses`", "sequence", dict(sequence=4, context="ulysses")),
        ("tensor, remat `none`", "tensor", dict(tensor=4, remat="none", num_microbatches=2)),
        ("tensor, remat `dots`", "tensor", dict(tensor=4, virtual_stages=2, **PIPELINE)),
        ("tensor, remat `dots`", "tensor", dict(tensor=4, sequence=2, **PIPELINE)),
        ("tensor, remat `attn_out`", "tensor", dict(tensor=8, remat="attn_out")),
        ("pipeline", "pipeline", dict(tensor=2, virtual_stages=2, **PIPELINE)),
    ],
)
def test_bytes_sent(name, axis, fields):
    cfg = with_parallel(**fields)
    cluster = Cluster(GPUS["h200"], NETWORKS["ib400"], 64, 8)
    (traffic,) = (found for found in traffic_of(cfg, shard_of(cfg), cluster) if found.axis == axis)
    formula, share = row(name)
    assert value_of(formula, letters_of(cfg)) == pytest.approx(traffic.sent, rel=1e-3)
    told = [int(percent) / 100 for percent in re.findall(r"(\d+)%", share)]
    ways = ("tensor in shards", "tensor", "tensor in row groups") if axis == "tensor" else (axis,)
    if name.startswith("data, ZeRO-1"):
        ways = ("gathered once", "data")
    assert told == [rates.EXPOSED[way] for way in ways]
    if cfg.parallel.zero == 1 and axis == "data" and cfg.parallel.pipeline == 1:
        gathers = traffic.nccl / traffic.seconds  # the scatters are copies
        assert traffic.exposed == pytest.approx(told[0] * gathers + told[1] * (1 - gathers))
    else:
        assert any(traffic.exposed == pytest.approx(share) for share in told)


def test_bytes_kept():
    cfg = with_parallel(data=2, sequence=2, tensor=2, **PIPELINE)
    letters, shard = letters_of(cfg), shard_of(cfg)
    kept = lambda name: value_of(row(name)[0], letters)  # noqa: E731
    state = kept("master weights and moments, AdamW, float32")
    assert state == pytest.approx(sum(state_bytes(cfg)), rel=1e-3)
    own = 4 * shard.parameters / shard.fsdp
    assert kept("gradients at the end of the step, float32") == pytest.approx(own, rel=1e-3)
    whole = 2 * shard.parameters
    assert kept("gathered weights in bfloat16, ZeRO-1") == pytest.approx(whole, rel=1e-3)
    assert kept("the head's gradient, float32") == 4 * shard.table


def test_saved_values_are_those_of_the_page():
    cfg = with_parallel(data=2, sequence=2)
    tokens = value_of(row("values saved for the backward, without a pipeline")[0], letters_of(cfg))
    per_token = saved_per_token(cfg)
    assert tokens * per_token == pytest.approx(saved_bytes(cfg, shard_of(cfg)))
    rest = dict(data=2, tensor=2)
    for sends, more in (("", rest), (" with masks", dict(sequence=2))):
        staged = with_parallel(virtual_stages=2, **PIPELINE, **more)
        ring = value_of(row(f"the same in a pipeline{sends}")[0], letters_of(staged))
        shard = shard_of(staged)
        whole = shard.tokens * staged.model.num_layers * saved_per_token(staged)
        assert ring * whole == pytest.approx(saved_bytes(staged, shard))
    every = with_parallel(schedule="gpipe", **PIPELINE, **rest)
    letters, shard = letters_of(every), shard_of(every)
    kept = row("the same in a pipeline by GPipe")[0]
    share, outputs, _ = re.findall(r"`[^`]+`", kept)
    whole = shard.tokens * every.model.num_layers * saved_per_token(every)
    expected = value_of(share, letters) * whole + value_of(outputs, letters)
    assert expected == pytest.approx(saved_bytes(every, shard))
    two, one = (replace(staged, **{"parallel.tensor": n}) for n in (2, 1))
    layer = staged.model.layers[0]
    assert bytes_of_names(two, layer)["qkv"] * 2 == bytes_of_names(one, layer)["qkv"]
