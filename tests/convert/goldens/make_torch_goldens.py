"""What PyTorch makes of exported models, with jaxpar/convert/torch_model.py.

    python tests/convert/goldens/make_torch_goldens.py export FOLDER    with jaxpar
    python tests/convert/goldens/make_torch_goldens.py compute FOLDER   with torch, without jaxpar

The two may be different interpreters. Writes tests/convert/goldens/torch.npz: for each model of
tests/convert/composed.py, the logits float32 [2, tokens, vocabulary] of rows with several
documents. The tests compare the plain model in JAX with them where torch is absent. The published
models of tests/convert/tiny.py are compared with the logits of `transformers`, which are here, too.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def export(folder: Path) -> None:
    """Export all models, and what they are computed for."""
    sys.path.insert(0, str(ROOT))
    from jaxpar.convert import torch_file
    from jaxpar.convert.hf import importing
    from tests.convert import composed, tiny

    tokens, positions, segments = composed.documents()
    np.savez(folder / "tokens.npz", tokens=tokens, positions=positions, segments=segments)
    for name in composed.NAMES:
        opened = composed.open_export(composed.write_run(folder / "runs" / name, name), name)
        torch_file.to_torch(opened, folder / f"{name}.safetensors", print)
    for name, values in tiny.MODELS.items():
        run, here = folder / "runs" / "published" / name, folder / "published" / name
        published = tiny.write_folder(here, values)
        importing.from_hf(published, run, print, tolerance=None)
        opened = torch_file.open_export(run, dtype="float32")
        torch_file.to_torch(opened, here / "exported.safetensors", print)
        np.save(here / "tokens.npy", tiny.tokens(values))


def load_module(file: Path):
    """A file as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error_of(load, file: Path, components: dict) -> str:
    """The error of a file with some classes."""
    try:
        load(file, components=components)
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return "none"


def compute(folder: Path) -> None:
    """Compute the logits of all that `export` wrote."""
    import torch

    torch_model = load_module(ROOT / "jaxpar" / "convert" / "torch_model.py")
    classes = load_module(HERE / "torch_components.py").components(torch_model)
    rows = {
        n: torch.from_numpy(a.astype(np.int64)) for n, a in np.load(folder / "tokens.npz").items()
    }
    found = {}
    with torch.no_grad():
        for file in sorted(folder.glob("*.safetensors")):
            own = classes.get(file.stem, {})
            found[file.stem] = torch_model.load(file, components=own)(**rows).numpy()
            for name in own:
                others = {other: one for other, one in own.items() if other != name}
                said = error_of(torch_model.load, file, others)
                assert said.startswith(f"{name} needs code in PyTorch"), said
            more = own | {"other.py:Other": torch_model.TorchGlu}
            said = error_of(torch_model.load, file, more)
            assert said == "the model has no component other.py:Other", said
        np.savez_compressed(HERE / "torch.npz", **found)
        for file in sorted((folder / "published").glob("*/exported.safetensors")):
            tokens = torch.from_numpy(np.load(file.with_name("tokens.npy")))
            logits = torch_model.load(file)(tokens)[0].numpy()
            error = np.abs(logits - np.load(HERE / f"{file.parent.name}.npy")).max()
            print(f"{file.parent.name}: {error:.1e}")
            assert error <= 1e-5


if __name__ == "__main__":
    _, what, where = sys.argv
    Path(where).mkdir(parents=True, exist_ok=True)
    {"export": export, "compute": compute}[what](Path(where))
