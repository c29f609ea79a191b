"""The coordinate check: what it says of sizes, and that µP passes where the plain model fails."""

import dataclasses

import pytest

from jaxpar.certification.coordinates import (
    KINDS,
    ActivationSizes,
    Growth,
    growth,
    measure,
    prepared,
    table,
    verdicts,
    widened,
    widths_of,
)
from jaxpar.commands import call
from jaxpar.config import Attention, Config, ConfigError, GatedDeltaNet, Glu, Layer, replace
from jaxpar.config.validate import resolve
from jaxpar.sharding.mesh import make_mesh
from tests.tiny import ATTENTION, TINY

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

DELTA = GatedDeltaNet(num_key_heads=2, num_value_heads=4, key_head_dim=4, value_head_dim=4)
MUP = {"model.mup.base_width": 64}


def exponents_of(devices, **fields) -> list[Growth]:
    cfg = prepared(
        replace(TINY, **{"model.num_layers": 1, "model.init_std": 0.02}, **fields), 4, 32
    )
    mesh, found = make_mesh(cfg.parallel, devices[:1]), {}
    for width in (64, 256):
        found[width] = measure(resolve(widened(cfg, width), 1), mesh, 3, 1)
    return growth(found)


@pytest.mark.slow
def test_only_mup_passes(devices):
    plain, mup = exponents_of(devices), exponents_of(devices, **MUP)
    assert {one.kind for one in plain if one.verdict() == "grows"} >= {
        "attention",
        "feed-forward",
        "last layer",
        "logits",
    }
    assert [(one, one.verdict()) for one in mup if one.verdict() != "flat"] == []


def of_powers(size: float, change: float) -> dict[int, ActivationSizes]:
    """ActivationSizes that are powers of the width, except the embedding's."""

    def at(width: int, power: float) -> dict[str, float]:
        return dict.fromkeys(KINDS, 0.5 * width**power) | {"embedding": 2.0}

    return {w: ActivationSizes(at(w, 0), at(w, size), at(w, change)) for w in (64, 128, 512)}


@pytest.mark.parametrize(
    ("size", "change", "said"),
    [
        (0.0, 0.0, []),
        (0.4, 0.0, ["grow with the width: attention, feed-forward, last layer, logits"]),
        (0.0, 1.0, ["grow with the width: attention, feed-forward, last layer, logits"]),
        (0.0, -0.5, ["change less in wider models: attention, feed-forward, last layer"]),
    ],
)
def test_exponents(size, change, said):
    found = of_powers(size, change)
    exponents = growth(found)
    assert exponents[1].size == pytest.approx(size) and exponents[1].change == pytest.approx(change)
    assert exponents[0] == Growth("embedding", pytest.approx(0), pytest.approx(0))
    assert verdicts(exponents, 0.3) == said
    lines = table(found, exponents, 0.3).splitlines()
    assert lines[0].split() == ["64", "128", "512", "exponent", "of", "the", "change"]
    assert len(lines) == 1 + len(KINDS) and lines[1].split()[:2] == ["embedding", "2"]


def test_widths():
    dense = Layer("dense_layers", ATTENTION, Glu(48))
    m = widened(replace(TINY, **{"model.layers": [dense, *TINY.model.layers]}), 64).model
    wide = Attention(num_heads=16, num_kv_heads=8, head_dim=4)
    assert m.d_model == 64 and m.layers[1:] == (Layer("layers", wide, Glu(96)),) * 2
    assert m.layers[0] == Layer("dense_layers", wide, Glu(192))
    m = widened(replace(TINY, **{"model.mup.base_head_dim": 4}), 64).model
    assert m.layers[0].mixer == Attention(num_heads=4, num_kv_heads=2, head_dim=16)
    with pytest.raises(ConfigError, match=r"--widths = 20: must be a multiple of 8, .*8,16,32"):
        widened(TINY, 20)
    assert widths_of("", TINY) == [16, 32, 64] and widths_of("64,16", TINY) == [16, 64]
    for text in ("16", "16,16", "a,b", ","):
        with pytest.raises(ConfigError, match=r"--widths = .*two or more.*16,32,64"):
            widths_of(text, TINY)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lora.rank": 2}, "lora.rank"),
        ({"dpo.beta": 0.1}, "dpo.beta"),
        ({"distill.teacher": "runs/teacher"}, "distill.teacher"),
        ({"model.layers.mixer": DELTA}, "model.layers"),
    ],
)
def test_what_is_not_checked(fields, said):
    with pytest.raises(ConfigError, match=rf"{said} = .*not part of the check"):
        prepared(replace(TINY, **fields), 4, 32)
    schedule = replace(Config(), **{"optimizer.schedule": "wsd", "optimizer.offload": True})
    o = prepared(schedule, 4, 32).optimizer
    steady = {"schedule": "constant", "warmup_steps": 0, "muon_dtype": "float32"}
    assert o == dataclasses.replace(Config().optimizer, **steady)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "CONFIG"),
        (["quickstart", "--tolerance", "0"], "--tolerance"),
        (["quickstart", "--steps", "0"], "--steps"),
        (["quickstart", "--widths", "100,200"], "--widths = 100"),
    ],
)
def test_wrong_options(args, said):
    with pytest.raises(ConfigError, match=said):
        call("certify", ["--mup", *args])
