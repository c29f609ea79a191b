"""JSON is read within limits, and what is beyond them is one line that names the file."""

import json

import pytest

from jaxpar.config.json_reader import UnreadableJson, read_json, read_json_object

WRONG = {
    "truncated": (b'{"a": ', "is not valid JSON"),
    "empty": (b"", "is not valid JSON"),
    "two values": (b"1 2", "is not valid JSON"),
    "arrays": (b"[" * 100_000, "is nested deeper than 64 levels"),
    "closed arrays": (b"[" * 100_000 + b"]" * 100_000, "is nested deeper than 64 levels"),
    "objects": (b'{"a":' * 65 + b"1" + b"}" * 65, "is nested deeper than 64 levels"),
    "65 arrays": (b"[" * 65 + b"]" * 65, "is nested deeper than 64 levels"),
    "NaN": (b'{"a": NaN}', "has NaN, which is not a JSON number"),
    "Infinity": (b"[Infinity]", "has Infinity, which"),
    "-Infinity": (b"[-Infinity]", "has -Infinity, which"),
    "1e999": (b"[1e999]", "has a number outside float64: 1e999"),
    "2**64": (b"18446744073709551616", "has an integer of more than 64 bits: 18446744073709551616"),
    "-2**63 - 1": (b"-9223372036854775809", "has an integer of more than 64 bits"),
    "a million digits": (b"9" * 1_000_000, "has an integer of more than 64 bits: 9999999999999"),
    "UTF-8": (b'"\xff"', "is not valid UTF-8: byte 0xff at 1"),
    "UTF-16": ('"a"'.encode("utf-16"), "is not valid UTF-8: byte 0xff at 0"),
    "surrogate": (rb'{"\ud800": 1}', "has text with half a surrogate pair"),
}


@pytest.mark.parametrize("text, why", WRONG.values(), ids=WRONG)
def test_what_is_beyond_the_limits_is_one_line(text, why, tmp_path):
    file = tmp_path / "file.json"
    file.write_bytes(text)
    for source, name in ((file, str(file)), (text, "the header")):
        with pytest.raises(UnreadableJson) as error:
            read_json(source, what="" if source is file else name)
        assert str(error.value).startswith(f"{name} {why}")
        assert "\n" not in str(error.value) and len(str(error.value)) < len(name) + 120


def test_a_file_that_is_too_large_is_not_read():
    with pytest.raises(UnreadableJson, match="/dev/zero is larger than 1,000 bytes"):
        read_json("/dev/zero", max_bytes=1000)
    with pytest.raises(FileNotFoundError):
        read_json("/no/such/file")


def test_everything_else_is_read_as_python_does():
    texts = [b'{"a": 1, "a": [2.5, true, null, "x"]}', b"18446744073709551615", rb'"\ud83d\ude00"']
    texts += [b"-9223372036854775808", b"[" * 64 + b"]" * 64, "\ufeff[1]".encode(), b" [ ] "]
    for text in texts:
        assert read_json(text) == json.loads(text)


def test_an_object_is_demanded():
    assert read_json_object(b'{"a": 1}') == {"a": 1}
    for text, kind in ((b"[]", "an array"), (b"1", "a number"), (b"null", "null")):
        with pytest.raises(UnreadableJson, match=f"^meta must be a JSON object, but is {kind}$"):
            read_json_object(text, what="meta")
