"""Requests of the Evaluation Harness: the results are those of its own Hugging Face model.

Its results are in goldens/harness.json, for the tiny model of `harness.py`.
"""

import json
import logging
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxpar.config import ConfigError
from jaxpar.data.prepare.chat import ChatEncoder
from jaxpar.inference.load import load
from tests.inference import harness

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "harness.json").read_text("utf-8"))


class Request(NamedTuple):
    """What the adapter reads of a request."""

    args: tuple
    task_name: str = "task"
    doc_id: int = 0
    idx: int = 0


def requests(cases) -> list[Request]:
    return [Request(tuple(case) if isinstance(case, tuple) else (case,)) for case in cases]


@pytest.fixture(scope="module", params=["plain", "begins"])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def loaded(kind, tmp_path_factory):
    folder = harness.write_model(tmp_path_factory.mktemp(kind) / "model", kind == "begins")
    return load(str(folder), None, 1, print)


@pytest.fixture(scope="module")
def model(loaded):
    from jaxpar.inference.lm_eval import HarnessModel  # tests for GPUs have no lm_eval

    return HarnessModel(loaded, 4)


@pytest.fixture(scope="module")
def wanted(kind) -> dict:
    return GOLDENS[kind]


def test_what_it_is(model, wanted):
    assert model.max_length == wanted["max_length"] and model.batch_size == 4
    assert model.prefix_token_id == wanted["prefix"]
    assert (model.rank, model.world_size) == (0, 1)
    assert model.model.ends == {256, 257}


def test_continuations(model, wanted, caplog):
    with caplog.at_level(logging.WARNING, "lm_eval"):
        found = model.loglikelihood(requests(harness.PAIRS), disable_tqdm=True)
    for (score, likeliest), (its, its_likeliest) in zip(found, wanted["pairs"], strict=True):
        assert score == pytest.approx(its, abs=2e-4) and likeliest == its_likeliest
    assert "longer than 64 tokens" in caplog.text


def test_whole_texts(model, wanted):
    found = model.loglikelihood_rolling(requests(harness.WHOLE), disable_tqdm=True)
    assert found == pytest.approx(wanted["whole"], abs=2e-3)


def test_written_texts(model, wanted):
    assert model.generate_until(requests(harness.WRITING), disable_tqdm=True) == wanted["texts"]


def test_conversations(model, wanted):
    found = [model.apply_chat_template(chat, answer) for chat, answer in harness.CHATS]
    assert found == wanted["chats"]
    assert model.chat_template(True) == harness.TEMPLATE and model.chat_template(False) is None
    first = model.tok_encode(found[0])
    assert first == model.tok_encode(found[0], add_special_tokens=False)  # it begins already
    assert first[:2] == [258, 259]
    assert isinstance(model.tokenizer_name, str)


def test_arguments_are_read_as_the_harness_reads_them():
    from jaxpar.inference.harness_requests import TOP_K, GenerationRequest

    for how, its in zip(harness.ARGUMENTS, GOLDENS["arguments"], strict=True):
        one = GenerationRequest.of("", how)
        assert (one.max_tokens, list(one.until)) == (its["max_gen_toks"], its["until"])
        assert one.sampled == its["do_sample"]
        if one.sampled:
            expected = its["temperature"], its.get("top_k", TOP_K), its.get("top_p", 1.0)
            assert (one.sampling.temperature, one.sampling.top_k, one.sampling.top_p) == expected


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"repetition_penalty": 5.0}, r"generation_kwargs\.repetition_penalty = 5\.0: is not"),
        ({"num_beams": 10}, r"generation_kwargs\.num_beams = 10: is not supported"),
        ({"max_length": 20}, r"generation_kwargs\.max_length = 20: is not supported"),
        ({"stop": ["x"]}, r"generation_kwargs\.stop"),
        ({"max_gen_toks": 0}, r"generation_kwargs\.max_gen_toks = 0: must be 1 or more"),
        ({"temperature": -1.0, "do_sample": True}, r"temperature = -1\.0: must be 0 or more"),
        ({"temperature": float("inf")}, r"temperature = inf: must be 0 or more"),
        ({"temperature": 1.0, "top_p": 0.0}, r"top_p = 0\.0: must be above 0 and at most 1"),
        ({"temperature": "hot"}, r"generation_kwargs = .*cannot be read"),
        ({"until": [3]}, r"generation_kwargs\.until = .*must be texts"),
    ],
)
def test_arguments_that_are_refused_by_name(how, said):
    from jaxpar.inference.harness_requests import GenerationRequest

    with pytest.raises(ConfigError, match=said):
        GenerationRequest.of("", how)


def test_arguments_that_change_nothing_and_the_models_own_defaults():
    from jaxpar.inference.harness_requests import GenerationRequest

    same = {"num_beams": 1, "repetition_penalty": 1.0, "early_stopping": None, "until": ["", "a"]}
    assert GenerationRequest.of("", same) == GenerationRequest.of("", {"until": "a"})
    one = GenerationRequest.of("", {"temperature": 0.5, "top_p": 0.9}, {"top_k": 20, "top_p": 0.8})
    assert (one.sampling.top_k, one.sampling.top_p) == (20, 0.9)


def test_samples_of_a_question_differ_and_depend_on_no_other_question(loaded):
    """Equal requests are samples: one instance several times, or equal instances."""
    from jaxpar.inference.lm_eval import HarnessModel

    how = {"until": [], "max_gen_toks": 16, "temperature": 1.0}
    first, second = Request(("the ", how), doc_id=0), Request(("the ", how), doc_id=1)
    model = HarnessModel(loaded, 4)
    write = lambda some: model.generate_until(some, disable_tqdm=True)  # noqa: E731
    both = write([*[first] * 4, *[second] * 4])
    assert len(set(both)) == 8  # also of two questions, which would share numbers by position
    assert both == write([*[first] * 4, *[second] * 4])
    assert write([second] * 2) == both[4:6] and write([first]) == both[:1]
    interleaved = write([second, first, second, first])
    assert interleaved == [both[4], both[0], both[5], both[1]]
    assert HarnessModel(loaded, 4, seed=1).generate_until([first], True) != both[:1]


def test_what_cannot_be_scored(model):
    for pair, said in (
        (("a", ""), "has no tokens to score"),
        (("", ""), "has no tokens to score"),
        (("", harness.BEGIN), "has no tokens to score"),
        (("a", "b" * 65), "has 65 tokens, and the model sees 64"),
    ):
        with pytest.raises(ConfigError, match=said):
            model.loglikelihood(requests([pair]), disable_tqdm=True)


def test_long_requests_are_cut_with_a_warning(model, caplog):
    cases = [(harness.SAID * 2, {"max_gen_toks": 20}), ("short", {"max_gen_toks": 64})]
    with caplog.at_level(logging.WARNING, "lm_eval"):
        model.generate_until(requests(cases), disable_tqdm=True)
    assert "1 of 2 contexts are cut to their last tokens" in caplog.text
    assert "1 of 2 requests are for max_gen_toks of 64 or more" in caplog.text


def test_results_go_to_the_harness_cache(model):
    class Kept(list):
        def add_partial(self, name, request, result):
            self.append((name, tuple(request), result))

    kept, before = Kept(), model.cache_hook
    model.set_cache_hook(kept)
    try:
        (score,) = model.loglikelihood(requests([("a", "b")]), disable_tqdm=True)
        (total,) = model.loglikelihood_rolling(requests(["ab"]), disable_tqdm=True)
        how = {"max_gen_toks": 3}
        (text,) = model.generate_until(requests([("a", how)]), disable_tqdm=True)
        model.generate_until(requests([("a", how | {"temperature": 1.0})]), disable_tqdm=True)
    finally:
        model.set_cache_hook(before)
    assert kept == [
        ("loglikelihood", ("a", "b"), score),
        ("loglikelihood_rolling", ("ab",), total),
        ("generate_until", ("a", how), text),
    ]


def test_a_model_without_a_template_says_so(loaded):
    import dataclasses

    from jaxpar.inference.lm_eval import HarnessModel

    plain = dataclasses.replace(loaded, chat=loaded.chat._replace(template=None))
    with pytest.raises(ConfigError, match="--apply-chat-template = True: the model has no chat"):
        HarnessModel(plain, 1).chat_template(True)
    assert not ChatEncoder.fits("chatml", loaded.tokenizer)
