"""Pairs of responses: what a line may look like, how they are packed, and what is refused."""

import itertools
import json

import jax
import numpy as np
import pytest

from jaxpar.config import Config, ConfigError, ParallelConfig, replace
from jaxpar.data.formats.compressed import BadRow
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.loader import Loader, open_loader
from jaxpar.data.options import PreparePairsOptions
from jaxpar.data.pairs import PairLoader, plan_rows
from jaxpar.data.prepare.chat import ChatEncoder
from jaxpar.data.prepare.pairs import Pair, encode_pair, read_pair
from jaxpar.data.prepare.records_command import prepare_records
from jaxpar.data.tokenizer import open_tokenizer
from jaxpar.sharding.batch import IGNORED, REFERENCE
from jaxpar.sharding.mesh import make_mesh
from tests.data.commands import main

FIELDS = "prompt", "chosen", "rejected"


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


PAIR = Pair([said("user", "2+2?")], [said("assistant", "4")], [said("assistant", "5")])
LONGER = [said("user", "2+2?"), said("assistant", "?"), said("user", "two and two")]

FORMS = {
    "texts": {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
    "messages": dict(zip(FIELDS, PAIR, strict=True)),
    "a text and conversations": {
        "prompt": "2+2?",
        "chosen": PAIR.prompt + PAIR.chosen,
        "rejected": PAIR.prompt + PAIR.rejected,
    },
    "conversations": {
        "chosen": PAIR.prompt + PAIR.chosen,
        "rejected": PAIR.prompt + PAIR.rejected,
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    assert read_pair(FIELDS, FORMS[form], "here") == PAIR


def test_a_prompt_of_several_turns():
    of = lambda text: [*LONGER, said("assistant", text)]  # noqa: E731
    pair = read_pair(FIELDS, {"chosen": of("4"), "rejected": of("5")}, "here")
    assert pair == Pair(LONGER, PAIR.chosen, PAIR.rejected)
    encoder = ChatEncoder("plain", open_tokenizer("bytes", None))
    for ids, targets in encode_pair(pair, encoder):
        assert targets.sum() == 2 and targets[-2:].all()  # not the answer "?" before
        assert bytes(ids[ids < 256].tolist()).startswith(b"user:\n2+2?")


SYSTEM, OTHER = said("system", "Be brief."), said("system", "Be long.")
TURNS = [said("user", "1+1?"), said("assistant", "2"), said("user", "2+2?")]
MARKED = [{**said("user", "2+2?"), "name": "x", "id": 3}]


def conversations(start, end="", **more):
    """A pair of conversations with a common beginning, and other fields."""
    responses = (said("assistant", f"{end}{number}") for number in (4, 5))
    return {**dict(zip(FIELDS[1:], ([*start, one] for one in responses), strict=True)), **more}


#: Lines whose prompt stands in the conversations too, and the prompt of the pair.
ONCE = {
    "behind a system message": (conversations([SYSTEM, *PAIR.prompt], prompt="2+2?"), 1),
    "messages behind a system message": (
        conversations([SYSTEM, *PAIR.prompt], prompt=PAIR.prompt),
        1,
    ),
    "spaces at its end": (conversations(PAIR.prompt, prompt="2+2?\n"), 0),
    "other keys": (conversations(MARKED, prompt=PAIR.prompt), 0),
    "other keys in the prompt": (conversations(PAIR.prompt, prompt=MARKED), 0),
    "the last turn": (conversations(TURNS, prompt="2+2?"), 2),
    "the last turn behind a system message": (conversations([SYSTEM, *TURNS], prompt="2+2?"), 3),
    "all turns": (conversations(TURNS, prompt=TURNS), 2),
    "a system message only in the prompt": (
        conversations(PAIR.prompt, prompt=[SYSTEM, *PAIR.prompt]),
        1,
    ),
    "only a system message": (conversations(PAIR.prompt, prompt=[SYSTEM]), 1),
    "a system message, twice": (conversations([SYSTEM, *PAIR.prompt], prompt=[SYSTEM]), 1),
    "an empty prompt": (conversations(PAIR.prompt, prompt=""), 0),
    "no messages": (conversations(PAIR.prompt, prompt=[]), 0),
    "responses alone": (conversations([], prompt="2+2?"), 0),
    "one conversation": (conversations(PAIR.prompt, prompt="2+2?") | {"rejected": "5"}, 0),
    "an answer that quotes a word": (conversations([], "2+2? is ", prompt="2+2?"), 0),
}


@pytest.mark.parametrize(("line", "before"), ONCE.values(), ids=ONCE)
def test_the_prompt_is_there_once(line, before, tmp_path):
    pair = read_pair(FIELDS, line, "here")
    assert pair.prompt[before:] == PAIR.prompt
    assert [len(pair.prompt), len(pair.chosen), len(pair.rejected)] == [before + 1, 1, 1]
    assert all(set(message) == {"role", "content"} for part in pair for message in part)
    tokenizer = open_tokenizer("bytes", None)
    for ids, _ in encode_pair(pair, ChatEncoder("plain", tokenizer)):
        assert tokenizer.decode(ids).count("user:\n2+2?<|endoftext|>") == 1


def test_the_beginning_of_an_answer_may_be_given():
    given = [*PAIR.prompt, said("assistant", "It is")]
    for start in ([], given):
        pair = read_pair(FIELDS, conversations(start, " ", prompt=given), "here")
        assert pair == Pair(given, [said("assistant", " 4")], [said("assistant", " 5")])


#: Lines that would have the prompt twice, or another prompt.
REFUSED = {
    "another prompt": conversations([said("user", "2 + 2?")], prompt="2+2?"),
    "another conversation": conversations(TURNS, prompt="3+3?"),
    "another system message": conversations([OTHER, *PAIR.prompt], prompt=[SYSTEM, *PAIR.prompt]),
    "a system message alone": conversations([SYSTEM], prompt=PAIR.prompt),
    "a given beginning within": conversations(
        PAIR.prompt, "It is ", prompt=[*PAIR.prompt, said("assistant", "It is")]
    ),
    "different beginnings": {
        "prompt": "2+2?",
        "chosen": [said("assistant", "Hi."), *PAIR.prompt, *PAIR.chosen],
        "rejected": [said("assistant", "Hello."), *PAIR.prompt, *PAIR.rejected],
    },
    "different systems": {
        "prompt": "2+2?",
        "chosen": [SYSTEM, *PAIR.prompt, *PAIR.chosen],
        "rejected": [OTHER, *PAIR.prompt, *PAIR.rejected],
    },
    "other turns behind a system message": {
        "prompt": [SYSTEM],
        "chosen": [said("user", "1+1?"), *PAIR.chosen],
        "rejected": [*PAIR.prompt, *PAIR.rejected],
    },
    "one system message": {
        "prompt": [SYSTEM],
        "chosen": [SYSTEM, *PAIR.prompt, *PAIR.chosen],
        "rejected": [*PAIR.prompt, *PAIR.rejected],
    },
    "only systems in common": {
        "chosen": [SYSTEM, said("user", "1+1?"), *PAIR.chosen],
        "rejected": [SYSTEM, *PAIR.prompt, *PAIR.rejected],
    },
    "two systems": conversations([OTHER, *PAIR.prompt], prompt=[SYSTEM]),
    "texts": {"prompt": "What is it?", "chosen": "What is it? 4", "rejected": "What is it? 5"},
}


@pytest.mark.parametrize("line", REFUSED.values(), ids=REFUSED)
def test_no_prompt_is_there_twice(line):
    with pytest.raises(BadRow, match=r"prompt|system message|before the response") as error:
        read_pair(FIELDS, line, "here")
    assert error.value.value == "here"


BAD = [
    ("[1]", "is not a JSON object"),
    ('{"prompt": "a", "chosen": "b"}', "field 'rejected' must be text, not NoneType"),
    ('{"prompt": "a", "chosen": "b", "rejected": "b"}', "two responses that are the same"),
    ('{"chosen": "a", "rejected": "b"}', "has no prompt: no field 'prompt'"),
    ('{"prompt": "a", "chosen": 1, "rejected": "b"}', "field 'chosen' must be text, not int"),
    (
        '{"prompt": "a", "chosen": [{"role": "you", "content": "b"}], "rejected": "c"}',
        "chosen: message 1 has role 'you', not one of",
    ),
    (
        '{"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": "c"}',
        "no message of the assistant in 'chosen' after the prompt",
    ),
]


@pytest.mark.parametrize(("line", "rule"), BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named_and_nothing_is_written(line, rule, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(FORMS["texts"]) + "\n" + line)
    options = {"output": str(tmp_path / "out"), "tokenizer": "bytes", "holdout": 0.0}
    with pytest.raises(ConfigError, match=rule) as error:
        prepare_records(PreparePairsOptions(input=(str(path),), **options))
    assert error.value.value == f"{path}:2"
    assert [p.name for p in tmp_path.iterdir()] == ["bad.jsonl"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> str:
    """Forty pairs, two of each prompt."""
    folder = tmp_path_factory.mktemp("pairs")
    lines = [
        {"prompt": f"{n // 2}?", "chosen": "yes" * (1 + n % 5), "rejected": "no" * (1 + n % 3)}
        for n in range(40)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = ["--input", str(folder / "pairs.jsonl"), "--output", str(folder / "out")]
    assert main(["prepare-pairs", *args, "--tokenizer", "bytes", "--holdout", "0.3"]) == 0
    return str(folder / "out")


def config(path: str, **values) -> Config:
    fields = {"data.path": path, "data.seq_len": 160, "train.global_batch_size": 4}
    fields |= {"dpo.beta": 0.1, "model.vocab_size": 272}
    return replace(Config(), **fields | values)


def one_device():
    return make_mesh(ParallelConfig(data=1), jax.devices()[:1])


def test_pairs_of_a_prompt_share_a_split(prepared):
    train, val = (TokenDataset.open(prepared, split) for split in ("train", "val"))
    prompt = lambda ids: tuple(ids[: ids.index(ids[-1])])  # up to the first end of text  # noqa: E731
    prompts = [
        {prompt(d.tokens[a:b].tolist()) for a, b in itertools.pairwise(d.document_offsets)}
        for d in (train, val)
    ]
    assert all(prompts) and not prompts[0] & prompts[1]
    assert train.num_documents % 4 == val.num_documents % 4 == 0


def test_rows_hold_whole_pairs_whose_labels_are_the_responses(prepared):
    loader = open_loader(config(prepared), one_device())
    dataset = loader.sources[0].dataset
    assert isinstance(loader, PairLoader) and loader.max_documents >= 4
    offsets, found = dataset.document_offsets, []
    for row in range(loader.sequences_per_epoch[0]):
        batch = jax.tree.map(lambda a: np.asarray(a)[0], loader.batch_of_rows(np.full(4, row)))
        assert not batch.extra and batch.segment_ids.max() % 2 == 0
        for document in range(1, batch.segment_ids.max() + 1):
            mine = batch.segment_ids == document
            assert (batch.positions[mine] == np.arange(mine.sum())).all()
            found.append((batch.tokens[mine], batch.labels[mine]))
    assert len(found) == dataset.num_documents
    for i, (tokens, labels) in enumerate(found):
        ids = dataset.tokens[offsets[i] : offsets[i + 1]]
        marked = dataset.targets[offsets[i] : offsets[i + 1]] == 1
        n = len(ids) - 1
        assert (tokens[:n] == ids[:-1]).all() and (labels[n:] == IGNORED).all()
        assert (labels[:n] == np.where(marked[1:], ids[1:].astype(np.int32), IGNORED)).all()


def test_the_reference_is_beside_its_labels(prepared):
    loader = open_loader(config(prepared), one_device())
    loader.reference = -np.arange(loader.dataset.num_tokens, dtype=np.float32)
    batch = jax.tree.map(np.asarray, loader.batch(0))
    places = (-batch.extra[REFERENCE]).astype(int)
    labeled = batch.labels != IGNORED
    assert labeled.any() and (batch.extra[REFERENCE][~labeled] == 0).all()
    assert (loader.dataset.tokens[places[labeled]] == batch.labels[labeled]).all()
    assert loader.abstract_batch().extra[REFERENCE].dtype == batch.extra[REFERENCE].dtype


def test_rows_are_filled_in_order():
    lengths = np.array([3, 4, 5, 2, 9, 9, 2, 2])  # pairs of 5, 5, 16 and 2 places
    rows = plan_rows(np.concatenate([[0], np.cumsum(lengths)]), 10)
    assert rows.kept.tolist() == [0, 1, 3] and rows.first.tolist() == [0, 2, 3]
    assert (rows.num_dropped, rows.longest, rows.most_pairs) == (1, 16, 2)


def test_what_is_refused(prepared, dataset):
    mesh = one_device()
    with pytest.raises(ConfigError, match=r"seq_len = 50: is shorter than .* pairs of .*drop"):
        open_loader(config(prepared, **{"data.seq_len": 50}), mesh)
    some = {"data.seq_len": 50, "dpo.too_long": "drop"}
    kept = open_loader(config(prepared, **some), mesh)
    assert 0 < len(kept.rows.kept) < kept.dataset.num_documents // 2
    with pytest.raises(ConfigError, match="is shorter than"):
        open_loader(config(prepared, **some | {"data.seq_len": 8}), mesh)
    with pytest.raises(ConfigError, match=r"is not a dataset of pairs.*prepare-pairs"):
        open_loader(config(str(dataset)), mesh)
    with pytest.raises(ConfigError, match=r"is a dataset of pairs of responses.*--dpo.beta 0.1"):
        Loader(replace(config(prepared), dpo=None), mesh)
