"""Tokenizers: exact round trips, ends of text that cannot be forged, clear refusals."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from jaxpar.config import ConfigError
from jaxpar.data.formats.convert import convert
from jaxpar.data.formats.meta import read_meta
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.options import ConvertOptions, PrepareOptions
from jaxpar.data.prepare.text import prepare
from jaxpar.data.tokenizer import (
    ByteTokenizer,
    load_tokenizer,
    open_tokenizer,
    read_tokenizer_json,
    train_bpe,
)
from tests.data.commands import main

SAMPLE = ["def f(x):\n    return x + 1\n" * 50, "the quick brown fox " * 50]
BPE = train_bpe(SAMPLE, 280)

# Text without lone surrogates, which no UTF-8 file can hold.
any_text = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
@given(text=any_text)
def test_round_trip(tokenizer, text):
    """decode(encode(text)) is text, and no id is the end of text."""
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_id not in ids.tolist()
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_end_of_text(tokenizer):
    """The end of text decodes to its name; the name in a document is ordinary text."""
    forged = f"a{tokenizer.eos_token}b"
    ids = tokenizer.encode(forged)
    assert tokenizer.eos_id not in ids and tokenizer.decode(ids) == forged
    joined = [*tokenizer.encode("é"), tokenizer.eos_id, *tokenizer.encode("b"), tokenizer.eos_id]
    assert tokenizer.decode(joined) == f"é{tokenizer.eos_token}b{tokenizer.eos_token}"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_batch_equals_single(tokenizer):
    """encode_batch is encode, one by one."""
    texts = ["", "one", "two\n\n三", *SAMPLE]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))


@pytest.mark.parametrize("bad", [-1, "vocab_size"])
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_ids_outside_the_vocabulary_are_refused(tokenizer, bad):
    """A padded embedding row must not decode to nothing."""
    bad = tokenizer.vocab_size if bad == "vocab_size" else bad
    with pytest.raises(ValueError, match="outside the tokenizer's vocabulary"):
        tokenizer.decode([1, bad])


def test_bytes_cut_inside_a_character():
    """A cut character is replaced, and does not swallow the end of text after it."""
    cut = ByteTokenizer().encode("é")[:1]
    assert ByteTokenizer().decode([*cut, 256, 97]) == "\ufffd<|endoftext|>a"


def test_bpe_learns_and_repeats_itself():
    """Training is deterministic, uses its vocabulary, and compresses what it saw."""
    again = train_bpe(SAMPLE, 280)
    assert again.fingerprint == BPE.fingerprint
    assert train_bpe(SAMPLE, 270).fingerprint != BPE.fingerprint
    assert BPE.vocab_size == 280
    assert 280 < train_bpe(SAMPLE, 1000).vocab_size < 1000  # It runs out of pairs.
    assert len(BPE.encode(SAMPLE[0])) < 0.6 * len(SAMPLE[0])


def test_bpe_without_room_for_bytes():
    """256 bytes and the end of text are the least."""
    with pytest.raises(ConfigError, match="bpe:256"):
        train_bpe(SAMPLE, 256)


@pytest.mark.parametrize("spec", ["bytes", "bpe:280"])
def test_saved_with_the_dataset(spec, corpus, texts, tmp_path):
    """The folder gives back the tokenizer that wrote it."""
    output = tmp_path / "out"
    meta = prepare(PrepareOptions(input=(str(corpus),), output=str(output), tokenizer=spec))
    tokenizer = load_tokenizer(output)
    assert tokenizer.fingerprint == meta.tokenizer_fingerprint
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (meta.vocab_size, meta.eos_id)
    assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0]


def test_another_tokenizer_in_the_folder_is_noticed(corpus, tmp_path):
    """A replaced or removed tokenizer.json is an error, not other text."""
    output = tmp_path / "out"
    prepare(PrepareOptions(input=(str(corpus),), output=str(output), tokenizer="bpe:280"))
    BPE.save(output)
    with pytest.raises(ConfigError, match="is not the tokenizer"):
        load_tokenizer(output)
    (output / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load_tokenizer(output)


DEEPSEEK = "<\uff5cend\u2581of\u2581sentence\uff5c>"


def _published(path: Path, special: list[str]) -> Path:
    """A word-level tokenizer.json that truncates, and adds special tokens, as published ones do."""
    words = ["<unk>", *"abc"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))
    return path


def test_published_tokenizer(tmp_path):
    """The end of text is found by its usual name, and nothing is truncated or padded."""
    path = _published(tmp_path / "tokenizer.json", ["<|im_end|>", "</s>"])
    tokenizer = read_tokenizer_json(path)
    assert tokenizer.eos_token == "</s>" and tokenizer.eos_id == 5
    assert tokenizer.vocab_size == 6
    np.testing.assert_array_equal(tokenizer.encode("a b c a"), [1, 2, 3, 1])
    tokenizer.save(tmp_path)
    assert read_tokenizer_json(path).fingerprint == tokenizer.fingerprint
    assert read_tokenizer_json(path, "<|im_end|>").eos_id == 4


@pytest.mark.parametrize(
    ("special", "eos_token", "rule"),
    [
        (["<s>"], None, "has none of"),
        (["</s>", "<eos>"], None, "but has 2: </s>, <eos>"),
        (["</s>"], "<stop>", "has none of <stop>"),
    ],
)
def test_unclear_end_of_text(special, eos_token, rule, tmp_path):
    """Which token ends a text is never guessed."""
    path = _published(tmp_path / "tokenizer.json", special)
    with pytest.raises(ConfigError, match=rule) as error:
        read_tokenizer_json(path, eos_token)
    assert "--eos-token" in error.value.fix


#: Of published files: the ordinary tokens, the special ones, eos_token of tokenizer_config.json,
#: and the end of text.
ENDS = {
    "Gemma 3": (["</s>"], ["<eos>", "<bos>"], "<eos>", "<eos>"),
    "Gemma 3, the file alone": (["</s>"], ["<eos>", "<bos>"], ..., "<eos>"),
    "Qwen3": (["</s>"], ["<|endoftext|>", "<|im_end|>"], "<|im_end|>", "<|im_end|>"),
    "Qwen3, the file alone": (["</s>"], ["<|endoftext|>", "<|im_end|>"], ..., "<|endoftext|>"),
    "DeepSeek": ([], [DEEPSEEK], {"__type": "AddedToken", "content": DEEPSEEK}, DEEPSEEK),
    "DeepSeek, the file alone": ([], [DEEPSEEK], ..., DEEPSEEK),
    "no end in the config": ([], ["</s>"], None, "</s>"),
    "an end that has no usual name": ([], ["<stop>", "</s>"], "<stop>", "<stop>"),
}


@pytest.mark.parametrize(("ordinary", "special", "named", "end"), ENDS.values(), ids=ENDS)
def test_the_end_of_text_of_published_files(ordinary, special, named, end, tmp_path):
    vocabulary = {token: i for i, token in enumerate(["a", *ordinary])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    made.add_special_tokens(special)
    made.save(str(tmp_path / "tokenizer.json"))
    if named is not ...:
        about = {"eos_token": named, "model_max_length": 10**30}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    assert open_tokenizer(str(tmp_path)).eos_token == end
    assert read_tokenizer_json(tmp_path / "tokenizer.json", "a").eos_token == "a"  # if asked for


@pytest.mark.parametrize(
    ("about", "rule"),
    [
        ('{"eos_token": "<stop>"}', "has the eos_token '<stop>', which is not a token"),
        ('{"eos_token": 3}', "has the eos_token 3, which is not"),
        ('{"eos_token": ["</s>"]}', "which is not a token"),
        ('{"eos_token": {"content": 1}}', "has the eos_token 1"),
        ('{"eos_token": "</s>"', "cannot be read: it is not valid JSON"),
        ("[]", "cannot be read: it must be a JSON object"),
    ],
)
def test_a_config_of_a_tokenizer_that_says_nothing_useful(about, rule, tmp_path):
    path = _published(tmp_path / "tokenizer.json", ["</s>"])
    (tmp_path / "tokenizer_config.json").write_text(about)
    with pytest.raises(ConfigError, match=re.escape(rule)) as error:
        read_tokenizer_json(path)
    assert "with --eos-token" in error.value.fix
    assert read_tokenizer_json(path, "</s>").eos_token == "</s>"  # the fix


def test_ordinary_tokens_do_not_end_a_text(tmp_path):
    made = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"has none of .* as a special token.*--eos-token"):
        read_tokenizer_json(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["prepare"], "--eos-token"),
        (["prepare-chat"], "--eos-token"),
        (["convert", "--to", "megatron"], "--eos-id"),
        (["inspect"], "--eos-id"),
    ],
)
def test_fixes_name_options_that_the_command_has(
    command, option, corpus, dataset, tmp_path, capsys
):
    """Of an end of text that is not known, and of a tokenizer that is not there."""
    path = _published(tmp_path / "tokenizer.json", ["<s>"])
    source = str(corpus if command[0].startswith("prepare") else dataset)
    paths = ["--input", source, "--output", str(tmp_path / "out")]
    args = [*command, *([source] if command == ["inspect"] else paths), "--tokenizer"]
    assert main([*args, str(path)]) == 2
    assert f"select one with {option}" in " ".join(capsys.readouterr().err.split())
    assert main([*args, "gpt3"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "is neither bytes, nor" in error
    assert ("bpe:8192" in error) == ("bpe:N" in error) == (command == ["prepare"])


def test_an_end_of_text_by_its_id(tmp_path):
    """Of a tokenizer.json without a usual one: what no name says, the number does."""
    path = _published(tmp_path / "tokenizer.json", ["<stop>"])
    np.array([1, 2, 4, 3, 4], "<u2").tofile(tmp_path / "x.bin")
    names = {"input": (str(tmp_path / "x.bin"),), "to": "jaxpar", "tokenizer": str(path)}
    out = tmp_path / "out"
    convert(ConvertOptions(**names, output=str(out), eos_id=4))
    assert TokenDataset.open(out).document_offsets[:].tolist() == [0, 3, 5]
    assert (read_meta(out).eos_id, load_tokenizer(out).eos_token) == (4, "<stop>")
    refused = [
        (str(path), 5, "not a token of"),
        ("bytes", 4, "not the end of text of --tokenizer bytes, "),
    ]
    for spec, eos_id, rule in refused:
        names |= {"tokenizer": spec, "output": str(tmp_path / "none"), "eos_id": eos_id}
        with pytest.raises(ConfigError, match=f"--eos-id = {eos_id}: is {rule}"):
            convert(ConvertOptions(**names))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("content", ["{", json.dumps({"model": {"type": "no such"}}), "\ud800"])
def test_broken_tokenizer_json(content, tmp_path):
    """Whatever is wrong with the file, its name is in the error."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=r"tokenizer\.json.*cannot be read"):
        read_tokenizer_json(path)


def with_begin(folder: Path, post_processor: processors.PostProcessor | None) -> Path:
    """A tokenizer of letters, as published, with what its post-processor adds."""
    vocabulary = {c: i for i, c in enumerate("abc")} | {"<s>": 3, "</s>": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    # What it says of the beginning counts for nothing beside a tokenizer.json.
    about = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about | {"add_bos_token": True}))
    return folder


def template(single: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=single, special_tokens=[("<s>", 3), ("</s>", 4)])


#: Ids that transformers 5.23 puts before "ab", by post-processor.
BEGINNINGS = {
    "none": (None, ()),
    "bytes alone": (processors.ByteLevel(), ()),
    "begin": (template("<s> $A"), (3,)),
    "begin and end": (template("<s> $A </s>"), (3,)),
    "end alone": (template("$A </s>"), ()),
    "a sequence, as Llama 3's": (
        processors.Sequence([processors.ByteLevel(), template("<s> $A")]),
        (3,),
    ),
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_what_stands_before_a_text(name, tmp_path):
    post_processor, wanted = BEGINNINGS[name]
    folder = with_begin(tmp_path / "model", post_processor)
    tokenizer = read_tokenizer_json(folder / "tokenizer.json", "</s>")
    assert tokenizer.begin == wanted
    assert tokenizer.encode("ab").tolist() == [0, 1]
    if importlib.util.find_spec("transformers"):
        import transformers

        ids = transformers.AutoTokenizer.from_pretrained(folder)("ab").input_ids
        assert tuple(ids[: ids.index(0)]) == wanted


def test_bytes_have_no_beginning():
    assert ByteTokenizer().begin == () and BPE.begin == ()
