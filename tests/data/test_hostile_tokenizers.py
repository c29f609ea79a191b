"""A tokenizer.json that cannot be used: one error."""

import json

import numpy as np
import pytest
import tokenizers

from jaxpar.config import ConfigError
from jaxpar.data.tokenizer import read_tokenizer_json, train_bpe

WORDS = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1, "<unk>": 2}, "unk_token": "<unk>"}
GOOD = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": WORDS,
}


def added(**token):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"added_tokens": [flags | token]}


GOOD |= added(id=1, content="</s>", special=True)


def words(**changes):
    return {"model": WORDS | changes}


#: Changes of GOOD, or the whole text, and what the error says.
BAD = {
    "an id of 2**32 - 1": (
        words(vocab=WORDS["vocab"] | {"b": 2**32 - 1}),
        r"token 'b' has the id 4294967295, not an integer from 0 to 16,777,215",
    ),
    "an id below 0": (words(vocab=WORDS["vocab"] | {"b": -1}), "token 'b' has the id -1"),
    "a text as id": (words(vocab=WORDS["vocab"] | {"b": "3"}), "token 'b' has the id 3, not an"),
    "an added id": (added(id=2**24, content="b"), "token 'b' has the id 16777216"),
    "an added token without id": (added(content="b"), "token 'b' has the id None"),
    "an added token without text": (added(id=3), "without content"),
    "added tokens": ({"added_tokens": {"a": 1}}, "added_tokens are not a list"),
    "no unknown token": (words(unk_token="<no>"), r"Missing \[UNK\] token"),
    "a panic of a normalizer": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "Cannot parse precompiled_charsmap",
    ),
    "a panic of a processor": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
        "no entry found for key",
    ),
    "a pattern": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}},
        "unmatched parenthesis",
    ),
    "an unknown model": ({"model": {"type": "X", "vocab": {"a": 0}}}, "variant"),
    "no vocabulary": ({"model": {"type": "BPE"}}, "its model has no vocab"),
    "no tokens": (words(vocab={}) | {"added_tokens": []}, "it has no tokens"),
    "no model": ({"model": None}, "it has no model"),
    "nested": ("[" * 100_000, "nested deeper than 64 levels"),
    "Infinity": ('{"model": Infinity}', "has Infinity"),
    "truncated": (json.dumps(GOOD)[:-9], "is not valid JSON"),
    "a list": ("[]", "must be a JSON object"),
    "not UTF-8": (b"\xff{}", "not valid UTF-8"),
}


def write(folder, change):
    text = change if isinstance(change, str | bytes) else json.dumps(GOOD | change)
    path = folder / "tokenizer.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(("change", "said"), BAD.values(), ids=BAD)
def test_it_is_one_error(change, said, tmp_path):
    path = write(tmp_path, change)
    with pytest.raises(ConfigError, match=f"--tokenizer.*cannot be read: .*{said}") as error:
        read_tokenizer_json(path)
    assert "\n" not in str(error.value) and len(error.value.rule) < 400


def test_a_good_one_is_loaded(tmp_path):
    path = write(tmp_path, {})
    tokenizer = read_tokenizer_json(path)
    assert tokenizer.encode("a b").tolist() == [0, 2]


def test_text_that_cannot_be_encoded_is_an_error_too(tmp_path):
    tokenizer = read_tokenizer_json(write(tmp_path, {}))
    tokenizer._tokenizer.model = tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="<no>")
    with pytest.raises(ConfigError, match="cannot encode a text"):
        tokenizer.encode("b")


def test_a_trained_tokenizer_passes_its_own_check(tmp_path):
    train_bpe(["some text"] * 3, 260).save(tmp_path)
    assert read_tokenizer_json(tmp_path / "tokenizer.json").encode("é").dtype == np.int32
