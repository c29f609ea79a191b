"""Recorded routing in a run's folder: written at the named steps, read with every check."""

import io

import numpy as np
import pytest

from jaxpar.config import (
    Attention,
    Config,
    ConfigError,
    DataConfig,
    Experts,
    Glu,
    Layer,
    Model,
    RunConfig,
    TrainConfig,
    replace,
)
from jaxpar.monitoring.routing import RoutingWriter, file_of, read_routing
from jaxpar.parallel.context import token_order

ATTENTION = Attention(num_heads=4, num_kv_heads=4, head_dim=8)
DENSE = Layer("dense", ATTENTION, Glu(32))
ROUTED = Layer("moe", ATTENTION, Experts(expert=Glu(8), num_experts=4, experts_per_token=2))


def of(*layers: Layer) -> dict[str, Model]:
    return {"model": Model(d_model=32, vocab_size=64, layers=layers)}


CFG = Config(
    **of(DENSE, ROUTED, ROUTED),
    data=DataConfig(path="data/stdlib", seq_len=8),
    train=TrainConfig(num_steps=10, global_batch_size=2),
    run=RunConfig(record_routing=(3, 7)),
)
EXPERTS = np.random.default_rng(0).integers(0, 4, (2, 8, 2, 2)).astype(np.uint8)


@pytest.fixture
def recorded(tmp_path, devices):
    """A file of step 7."""
    writer = RoutingWriter(CFG, tmp_path, lambda length: None)
    assert not writer.write(6, EXPERTS) and not writer.write(3, None)
    assert writer.write(7, EXPERTS)
    assert [path.name for path in (tmp_path / "routing").iterdir()] == ["step_00000007.npz"]
    return tmp_path / file_of(7)


def test_what_is_written_is_read(recorded):
    found = read_routing("--routing", str(recorded), CFG)
    np.testing.assert_array_equal(found.experts, EXPERTS)
    assert found.step == 7
    assert str(found) == f"replayed: {found.sha256[:12]}, step 7"


def test_tokens_are_in_the_order_of_the_text(devices, tmp_path):
    parallel = replace(CFG, **{"parallel.sequence": 2}).parallel
    order = token_order(parallel, 8)
    assert order is not None
    RoutingWriter(CFG, tmp_path, lambda length: order).write(3, EXPERTS[:, order])
    found = read_routing("--routing", str(tmp_path / file_of(3)), CFG)
    np.testing.assert_array_equal(found.experts, EXPERTS)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (of(DENSE, ROUTED, ROUTED, ROUTED), "with model.num_layers 3, not 4"),
        (
            of(ROUTED, ROUTED, ROUTED),
            "with model.num_layers 2, not 3. Fix: use --model.num-layers 2.",
        ),
        (
            {"model.moe.feed_forward.num_experts": 8},
            "with model.*.feed_forward.num_experts 4, not 8. Fix: use "
            "--model.*.feed-forward.num-experts 4.",
        ),
        (
            of(*[DENSE] * 3),
            "with model.*.feed_forward.num_experts 4, not 0. Fix: use a model with 4 experts.",
        ),
        (
            {"model.moe.feed_forward.experts_per_token": 1},
            "with model.*.feed_forward.experts_per_token 2, not 1. Fix: use "
            "--model.*.feed-forward.experts-per-token 2.",
        ),
        ({"data.seq_len": 16}, "with data.seq_len 8, not 16"),
        (
            {"train.global_batch_size": 4, "data.seq_len": 4},
            "with train.global_batch_size 2, data.seq_len 8, not 4, 4. Fix: use "
            "--train.global-batch-size 2 --data.seq-len 8",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused(recorded, fields, said):
    with pytest.raises(ConfigError, match=r"--routing = .*was recorded with") as caught:
        read_routing("--routing", str(recorded), replace(CFG, **fields))
    assert said in str(caught.value)


def npz(**arrays) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK not an archive",
        npz(experts=EXPERTS, step=7),
        npz(experts=EXPERTS.astype(np.float32), step=7, num_experts=4),
        npz(experts=EXPERTS[0], step=7, num_experts=4),
        npz(experts=EXPERTS[:0], step=7, num_experts=4),
        npz(experts=EXPERTS, step="seven", num_experts=4),
        npz(experts=np.array([None]), step=7, num_experts=4),
        npz(experts=EXPERTS, step=7, num_experts=4)[:-40],
    ],
)
def test_another_file_is_refused(content, tmp_path):
    path = tmp_path / "other.npz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"is not a recorded routing.*--run\.record-routing"):
        read_routing("--routing", str(path), CFG)


def test_a_missing_file_and_an_impossible_expert_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_routing("--routing", str(tmp_path / "none.npz"), CFG)
    (tmp_path / "a.npz").write_bytes(npz(experts=EXPERTS + 1, step=7, num_experts=4))
    with pytest.raises(ConfigError, match="has expert 4, but was recorded with 4 experts"):
        read_routing("--routing", str(tmp_path / "a.npz"), CFG)
