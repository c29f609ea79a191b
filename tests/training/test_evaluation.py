"""What a run is evaluated on: its held-out split, named sets, and once its test split; and with
which weights: those that are trained, and their moving average."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar.certification import traces
from jaxpar.checkpoint.loading import restore_params
from jaxpar.checkpoint.saved import read_saved, saved_config
from jaxpar.commands import call
from jaxpar.config import Config, ConfigError, EvaluationSet, replace
from jaxpar.config.command_line import parse_overrides, read_config
from jaxpar.config.lists.datasets import held_out_sets
from jaxpar.config.validate import check
from jaxpar.config.values import SavedValue
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.loader import Loader
from jaxpar.data.options import PrepareOptions
from jaxpar.data.prepare.text import prepare
from jaxpar.data.tokenizer import ByteTokenizer
from jaxpar.inference.evaluate import text_loss
from jaxpar.inference.load import load, load_params_of
from jaxpar.model.plain import decoder
from jaxpar.runtime import exit_codes
from jaxpar.sharding.batch import IGNORED
from jaxpar.sharding.mesh import make_mesh
from jaxpar.training.run import Run
from tests.slow import slow


@pytest.fixture(scope="module")
def three(text_file, tmp_path_factory) -> str:
    """The verses in three splits."""
    output = str(tmp_path_factory.mktemp("three") / "verses")
    prepare(PrepareOptions(input=(str(text_file),), output=output, split=(2, 1, 1)))
    return output


@pytest.fixture
def make_run(only_devices, config_file):
    """(command line) -> a run, with nothing written."""

    def make(*arguments: str) -> Run:
        with only_devices(2):
            return Run.open(read_config([config_file, *arguments]))

    return make


def records_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_split_to_evaluate_on(make_run, three):
    other = ("--data.path", three)
    for arguments in ((), other, (*other, "--evaluation.split", "test")):
        (source,) = make_run(*arguments).held_out.repeated["held_out"].sources
        assert source.dataset.split == ("test" if "test" in arguments else "val")
    with pytest.raises(ConfigError, match=r"has an empty test split.*--split 98,1,1"):
        make_run("--evaluation.split", "test")


def plain_loss(
    run: Path, dataset: str, split: str, sequences: int, weights: str = "trained", ids: int = 0
) -> float:
    """Nats per label of the first sequences of a split, by the plain model.

    Args:     ids: those that a token can be. 0: all of the model's.
    """
    alone = {"parallel.data": 1, "parallel.sequence": 1}
    cfg = replace(saved_config(run), **alone, **{"data.path": dataset})
    mesh = make_mesh(cfg.parallel, jax.devices()[:1])
    params = restore_params(run, cfg, mesh, None, weights)
    b = Loader(cfg, mesh, split).host_rows(0, np.arange(sequences))
    logits = decoder.logits_of(params, b.tokens, b.positions, b.segment_ids, cfg.model)
    logits = logits[..., : ids or None]
    scores = np.asarray(jax.nn.log_softmax(logits))
    own = np.take_along_axis(scores, np.maximum(b.labels, 0)[..., None], axis=-1)[..., 0]
    return -float(own[b.labels != IGNORED].mean())


@pytest.fixture(scope="module")
def train_evaluated(train_on, write_config, three, dataset):
    """(folder, further fields) -> a run on two devices with sets and a moving average."""
    values = f"""--data.path {three} --evaluation.every 2 --evaluation.num-batches 1
    --evaluation.sets verses:{dataset},seen:{three}:train --evaluation.test True
    --optimizer.ema.decay 0.6 --optimizer.schedule constant --optimizer.warmup-steps 0
    --train.num-steps 4 --checkpoint.every 1 --checkpoint.keep 9"""

    def train(folder: Path, *more: str) -> Path:
        assert train_on(2, write_config(folder), *values.split(), *more) == exit_codes.EXIT_OK
        return folder / "run"

    return train


@pytest.fixture(scope="module")
def evaluated(train_evaluated, tmp_path_factory) -> Path:
    """Four steps of it. Tests must not write to it."""
    return train_evaluated(tmp_path_factory.mktemp("evaluated"))


def test_named_sets_and_the_test_split_have_losses_of_their_own(
    evaluated, three, dataset, tmp_path
):
    """In the run, and by the command for the run's folder."""
    run = evaluated
    records = [r for r in records_of(run) if "held_out_loss" in r]
    assert [r["step"] for r in records] == [2, 4]
    assert ["test_loss" in r for r in records] == [False, True]
    of_verses = [r["set_loss"]["verses"] for r in records]
    assert of_verses[0] > of_verses[1] and set(records[0]["set_loss"]) == {"verses", "seen"}
    last = records[1]
    for name, data, split in (("held_out", three, "val"), ("test", three, "test")):
        assert last[f"{name}_loss"] == pytest.approx(plain_loss(run, data, split, 8), abs=2e-5)
    assert of_verses[1] == pytest.approx(plain_loss(run, str(dataset), "val", 8), abs=2e-5)
    assert last["set_loss"]["seen"] == pytest.approx(plain_loss(run, three, "train", 8), abs=2e-5)
    assert last["set_bits_per_byte"]["seen"] > last["set_loss"]["seen"] / math.log(2)

    output = tmp_path / "result.json"
    flags = "--split test --batch-size 3 --sequences 8 --output".split()
    call("evaluate", [str(run), *flags, str(output)])
    found = json.loads(output.read_text())["text_loss"]
    assert found["loss"] == pytest.approx(last["test_loss"], abs=2e-5)
    assert found["bits_per_byte"] == pytest.approx(last["test_bits_per_byte"], abs=3e-5)

    model = load_params_of(str(run), None, 1, print)
    own = replace(model.cfg, **{"train.loss": SavedValue(name="own.py:Own")})  # code not loaded
    score = text_loss(dataclasses.replace(model, cfg=own), None, "test", 8, 3)
    assert score.loss == pytest.approx(found["loss"])


@pytest.mark.slow  # quicker: data/test_finite_sets.py, named sets above
@pytest.mark.parametrize("mesh", [(), slow(("--parallel.sequence", "2"))])
def test_a_split_that_is_smaller_than_an_evaluation_is_read_once(
    mesh, train_on, write_config, three, tmp_path, capsys
):
    """Five sequences and two batches of eight; by the command with several batch sizes."""
    few, tokens = tmp_path / "few.bin", TokenDataset.open(three, "test").tokens
    length = 32
    np.asarray(tokens[: 5 * length + 1], "<u2").tofile(few)
    flags = f"""--data.path {three} --data.held-out {few} --data.seq-len {length}
    --data.document-mask False --evaluation.every 1 --evaluation.num-batches 2
    --train.global-batch-size 8 --train.num-steps 1 --checkpoint.every 1"""
    assert train_on(2, write_config(tmp_path), *flags.split(), *mesh) == exit_codes.EXIT_OK
    (loss,) = [r["held_out_loss"] for r in records_of(tmp_path / "run") if "held_out_loss" in r]
    cfg = saved_config(tmp_path / "run")
    assert loss == pytest.approx(plain_loss(tmp_path / "run", cfg.data.path, "val", 5), abs=2e-5)
    for size in (1, 4, 8):
        flags = ["--split", "val", "--batch-size", str(size), "--output"]
        call("evaluate", [str(tmp_path / "run"), *flags, str(tmp_path / "found.json")])
        found = json.loads((tmp_path / "found.json").read_text())["text_loss"]
        assert found["loss"] == pytest.approx(loss, abs=2e-5)
        assert "5 of 5 sequences" in capsys.readouterr().out


def weights_of(run: Path, step: int, weights: str) -> traces.Arrays:
    cfg = saved_config(run, step)
    mesh = make_mesh(cfg.parallel, jax.devices()[: cfg.parallel.data])
    return traces.to_host(restore_params(run, cfg, mesh, step, weights))


def test_it_is_the_recurrence_of_the_saved_weights(evaluated):
    average = weights_of(evaluated, 1, "ema")
    for step in (2, 3, 4):
        d = np.float32(min(0.6, (1 + step) / (10 + step)))
        trained = weights_of(evaluated, step, "trained")
        average = {n: d * a + (1 - d) * trained[n] for n, a in average.items()}
        found = weights_of(evaluated, step, "ema")
        assert all(np.allclose(found[n], average[n], rtol=0, atol=1e-6) for n in average)
        assert not np.allclose(found["embed"], trained["embed"], atol=1e-4)


def test_it_has_a_loss_of_its_own_and_the_programs_take_it(evaluated, tmp_path):
    losses = {r["step"]: r for r in records_of(evaluated) if "ema_loss" in r}
    assert list(losses) == [2, 4] and losses[4]["ema_loss"] > losses[4]["held_out_loss"]
    flags = "--split val --sequences 8 --weights ema --output".split()
    call("evaluate", [str(evaluated), *flags, str(tmp_path / "of_run.json")])
    assert call("convert", ["to-hf", str(evaluated), str(tmp_path / "hf"), "--weights", "ema"]) == 0
    data = str(saved_config(evaluated).data.path)
    flags = ["--split", "val", "--sequences", "8", "--data", data, "--output"]
    call("evaluate", [str(tmp_path / "hf"), *flags, str(tmp_path / "of_hf.json")])
    # An export has the ids of its tokenizer alone.
    of_hf = plain_loss(evaluated, data, "val", 8, "ema", ByteTokenizer.vocab_size)
    per_nat = losses[4]["ema_bits_per_byte"] / losses[4]["ema_loss"]
    for name, loss in (("of_run", losses[4]["ema_loss"]), ("of_hf", of_hf)):
        found = json.loads((tmp_path / f"{name}.json").read_text())["text_loss"]
        assert found["loss"] == pytest.approx(loss, abs=2e-5)
        assert found["bits_per_byte"] == pytest.approx(loss * per_nat, abs=3e-5)
    assert of_hf < losses[4]["ema_loss"]
    with pytest.raises(ConfigError, match="--weights = 'ema': selects weights of a run"):
        load(str(tmp_path / "hf"), None, 1, print, weights="ema")


def test_a_run_that_was_stopped_resumes_it_exactly(evaluated, train_evaluated, tmp_path):
    for last in ("2", "4"):
        run = train_evaluated(tmp_path, "--train.num-steps", last)
    saved = [read_saved(one, 4) for one in (evaluated, run)]
    assert saved[0].fingerprints == saved[1].fingerprints and saved[0].has_average


BAD_SETS = {
    "web": "must be a list of NAME:PATH.*, but 'web' has no path",
    "web:": r"sets\[0\]\.path = '': must not be empty",
    "a:x,": "but '' has no path",
    ":data/web": r"sets\[0\]\.name = '': must not be empty",
    "we/b:data/web": r"sets\[0\]\.name = 'we/b': must have at most 64 letters",
    "a:x,a:y": "has the name a twice",
    "test:data/web": "name = 'test': has another meaning",
    "ema:data/web": "name = 'ema': has another meaning",
    "held_out:data/web": "name = 'held_out': has another meaning",
    "a:ftp://web": "ftp:// is not supported",
    ",".join(f"a{i}:x" for i in range(65)): "has 65 items, more than 64",
}


@pytest.mark.parametrize("sets", BAD_SETS)
def test_sets_that_are_no_sets(sets):
    with pytest.raises(ConfigError, match=BAD_SETS[sets]) as error:
        check(parse_overrides(Config(), [f"--evaluation.sets={sets}"]))
    assert error.value.field.startswith("evaluation.sets")


def test_a_split_of_a_set_and_a_colon_in_its_path():
    words = ["--evaluation.sets=a:x:test, b:y:1, c:z", "--evaluation.split=val"]
    assert held_out_sets(parse_overrides(Config(), words)) == [
        EvaluationSet("a", "x", "test"),
        EvaluationSet("b", "y:1", "val"),
        EvaluationSet("c", "z", "val"),
    ]


def test_what_would_not_be_evaluated_as_it_says(make_run, dataset, three, tmp_path, text_file):
    other = str(tmp_path / "other")
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(TOKENIZER)
    prepare(
        PrepareOptions(input=(str(text_file),), output=other, tokenizer=str(tokenizer), holdout=0.2)
    )
    tokens = tmp_path / "val.bin"
    tokens.write_bytes((dataset / "val.bin").read_bytes())
    file = ("--data.held-out", str(tokens), "--data.eos-id", "256")
    for arguments, said in (
        (["--evaluation.sets", f"a:{dataset}", "--evaluation.every", "0"], "never evaluated"),
        (["--evaluation.test", "True", "--evaluation.split", "test"], "evaluated before"),
        (["--evaluation.test", "True", *file], r"val\.bin, on which held_out is evaluated"),
        (["--evaluation.test", "True"], "has an empty test split"),
        (["--evaluation.sets", f"a:{tmp_path / 'none'}"], "a: .*none does not exist"),
        (["--evaluation.sets", f"a:{dataset}:test"], "a: .*empty test split.*:SPLIT"),
        (["--evaluation.sets", f"a:{other}"], "evaluation.sets.*different tokenizer"),
        (["--evaluation.sets", f"a:{other}:train"], "evaluation.sets.*different tokenizer"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_run(*arguments)


TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 1,
                "content": "<|endoftext|>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "<|endoftext|>": 1}, "unk_token": "a"},
        "pre_tokenizer": {"type": "Whitespace"},
    }
)


def test_what_the_command_cannot_evaluate(evaluated, dataset, tmp_path):
    for flags, said in (
        ([], "there is nothing to evaluate"),
        (["--data", "data/web"], "--data = .*needs --split"),
        (
            ["--split", "test", "--data", str(dataset)],
            "--data = .*has an empty test split. Fix: use --split val.$",
        ),
        (["--split", "val", "--data", str(tmp_path / "none")], "--data = .*does not exist"),
        (["--split", "val", "--sequences", "0"], "--sequences = 0: must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            call("evaluate", [str(evaluated), *flags])
