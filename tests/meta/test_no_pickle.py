"""Nothing that jaxpar reads can run code: no pickle is run, no name in a file is imported.

PyTorch files are zips with a pickle; `weights_only=True` builds tensors from it and calls nothing.
"""

import ast
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxpar.checkpoint import integrity
from jaxpar.checkpoint.integrity import Damaged
from jaxpar.checkpoint.loading import restore
from jaxpar.checkpoint.saved import METADATA, checkpoint_folder
from jaxpar.config import ConfigError
from jaxpar.data.formats.meta import documents_file
from jaxpar.data.formats.tokens import TokenDataset
from tests.checkpoint.test_checkpoint import assert_same_bits, base, save, setup
from tests.meta.test_packages import ROOT, nodes_of, package_files

__all__ = ["base", "setup"]  # fixtures

#: Modules that turn bytes into objects by running what the bytes say.
RUN_CODE = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}

#: Calls that may do the same, unless told otherwise by the argument beside them.
UNSAFE_CALLS = {
    "torch.load": "weights_only=True",
    "np.load": "allow_pickle=False",
    "numpy.load": "allow_pickle=False",
    "eval": "never",
    "exec": "never",
    "jnp.load": "never",
    "pd.read_pickle": "never",
}


#: Code that this process has written itself: kernels, for Triton's compiler. No file is read.
WRITTEN = "jaxpar/kernels/attention/triton/source.py", "exec(compile(source, file, 'exec'), there)"


def unsafe(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of whatever could run code that a file holds."""
    for node in nodes_of(source):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call):
            called, arguments = ast.unparse(node.func), [ast.unparse(k) for k in node.keywords]
            if called in UNSAFE_CALLS and UNSAFE_CALLS[called] not in arguments:
                yield node.lineno, ast.unparse(node)
            if "allow_pickle=True" in arguments or "trust_remote_code=True" in arguments:
                yield node.lineno, ast.unparse(node)
        yield from ((node.lineno, name) for name in names if name.split(".")[0] in RUN_CODE)


def test_the_package_reads_no_pickle():
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text}"
        for file in package_files()
        for line, text in unsafe(file.read_text("utf-8"))
        if (file.relative_to(ROOT).as_posix(), text) != WRITTEN
    ]
    assert found == []


def test_an_unsafe_call_is_seen():
    for source in (
        "import pickle",
        "from cloudpickle import loads",
        "np.load(file)",
        "np.load(file, allow_pickle=True)",
        "torch.load(file)",
        "eval(text)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
    ):
        assert len(list(unsafe(source))) >= 1, source
    safe = "np.load(file, allow_pickle=False); torch.load(file, weights_only=True); model.eval()"
    assert list(unsafe(safe)) == []


class Payload:
    """What a stranger would put into a pickle."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


def test_a_token_file_that_holds_a_pickle_is_refused(dataset_folder, tmp_path):
    marker = tmp_path / "it ran"
    offsets = dataset_folder / documents_file("train")
    np.save(offsets, np.array([Payload(marker)], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match=r"has object \[1\], not int64 \[2\]"):
        TokenDataset.open(dataset_folder)
    assert not marker.exists()


@pytest.fixture
def dataset_folder(tmp_path) -> Path:
    """A dataset of a few tokens."""
    from jaxpar.data.options import PrepareOptions
    from jaxpar.data.prepare.text import prepare

    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat\n" * 50)
    prepare(PrepareOptions(input=(str(text),), output=str(tmp_path / "data"), holdout=0.0))
    return tmp_path / "data"


def test_names_in_a_checkpoint_are_not_imported(setup, tmp_path, monkeypatch):
    """Orbax notes the classes that wrote a checkpoint. A stranger may note others."""
    marker = tmp_path / "it ran"
    code = f"open({str(marker)!r}, 'w').close()\nclass Handler: ...\n"
    (tmp_path / "stranger.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    cfg, mesh = setup()
    saved = save(cfg, mesh, 3)
    folder = checkpoint_folder(cfg.run.dir) / "3"
    metadata = json.loads((folder / METADATA).read_text())
    metadata["item_handlers"] = dict.fromkeys(metadata["item_handlers"], "stranger.Handler")
    (folder / METADATA).write_text(json.dumps(metadata))
    tree = next(folder.glob("*/_METADATA"))
    tree.write_text(tree.read_text().replace('"jax.Array"', '"stranger.Handler"'))
    (folder / integrity.FILES).unlink()
    with contextlib.suppress(Damaged):
        assert_same_bits(restore(cfg, mesh), saved)
    assert not marker.exists() and "stranger" not in sys.modules
