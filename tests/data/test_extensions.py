"""`data prepare --extension`: which files of a folder are read, and how."""

import pytest

from jaxpar.config import ConfigError
from jaxpar.data.formats.readers import ReadOptions
from jaxpar.data.prepare.documents import Wanted, find_sources, read_pieces


def test_other_endings_are_text(tmp_path):
    (tmp_path / ".git").mkdir()
    for name in (".git/config", "a.py", "b.MD", "c.txt", "notes"):
        (tmp_path / name).write_text(name)
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "line"}\n\n\n\n')
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\xff")
    (tmp_path / "zeros").write_bytes(bytes(5))

    def names(*extensions):
        return [source.path.name for source in find_sources([str(tmp_path)], Wanted(extensions))]

    assert names() == ["c.txt", "d.jsonl"]
    assert names(".py", "md") == ["a.py", "b.MD"]
    assert names(".py", ".jsonl") == ["a.py", "d.jsonl"]
    assert names("any") == ["a.py", "b.MD", "c.txt", "d.jsonl", "notes"]
    found = find_sources([str(tmp_path / "a.py"), str(tmp_path / "d.jsonl")], Wanted(("any",)))
    assert [piece.text for piece in read_pieces(found, ReadOptions())] == ["a.py", "line"]
    with pytest.raises(ConfigError, match=r"a\.py.*or read it as text with --extension \.py"):
        find_sources([str(tmp_path / "a.py")])
    for wrong, rule in (
        (".rs", r"has no \.rs"),
        ("", "is not"),
        (".", "is not"),
        ("a/b", "is not"),
    ):
        with pytest.raises(ConfigError, match=rule):
            names(wrong)
