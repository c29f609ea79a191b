"""Metadata of a checkpoint that nobody wrote: damage in one line, and the step before is used."""

import itertools
from pathlib import Path

import pytest

from jaxpar.checkpoint import integrity
from jaxpar.checkpoint.integrity import Damaged
from jaxpar.checkpoint.loading import restore_latest, restore_params
from jaxpar.checkpoint.saved import METADATA, saved_steps, starting_step
from jaxpar.commands import call
from tests.checkpoint.test_checkpoint import base, save, setup
from tests.checkpoint.test_damage import files_of, step_folder
from tests.slow import slow_but

__all__ = ["base", "setup"]  # fixtures

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

#: Contents of a file of JSON that no writer wrote, and of which some readers end.
NO_METADATA = {
    "nested": b"[" * 100_000,
    "objects": b'{"custom_metadata": ' * 100_000,
    "Infinity": b'{"custom_metadata": {"tokens_seen": Infinity}}',
    "digits": b'{"custom_metadata": {"tokens_seen": ' + b"9" * 10_000 + b"}}",
    "no UTF-8": b'{"custom_metadata": "\xff"}',
    "surrogate": b'{"custom_metadata": {"dataset": "\\ud800"}}',
    "list": b"[]",
    "types": b'{"custom_metadata": {"config": [], "dataset": 1, "versions": 2, "tokens_seen": ""}}',
}


ALONE, LISTED, LIST = (METADATA, False), (METADATA, True), (integrity.FILES, True)
UNREADABLE = list(itertools.product((ALONE, LISTED, LIST), NO_METADATA))
QUICK = [(ALONE, "nested"), (LIST, "nested"), (ALONE, "Infinity"), (ALONE, "types")]


@pytest.mark.parametrize(("where", "what"), slow_but(QUICK, UNREADABLE))
def test_unreadable_metadata_is_damage(setup, capfd, where, what):
    """One line everywhere; a run sets the step aside and uses the one before."""
    cfg, mesh = setup()
    save(cfg, mesh, 2, 4)
    name, listed = where
    if not listed:
        (step_folder(cfg, 4) / integrity.FILES).unlink()
    (step_folder(cfg, 4) / name).write_bytes(NO_METADATA[what])
    call("checkpoint", ["ls", cfg.run.dir])
    assert "DAMAGED: " in capfd.readouterr().out.splitlines()[-1]
    assert call("checkpoint", ["verify", cfg.run.dir]) == 1
    assert "step 4: DAMAGED" in capfd.readouterr().out
    with pytest.raises(Damaged, match=rf"step 4 of .* is damaged: .*({name}|metadata)") as error:
        restore_params(cfg.run.dir, cfg, mesh)
    assert "\n" not in str(error.value)
    assert starting_step(cfg) == 2
    assert restore_latest(cfg, mesh)[1] == 2
    assert saved_steps(cfg.run.dir) == [2]
    assert files_of(Path(cfg.run.dir) / integrity.DAMAGED / "4")


def test_saves_go_on_beside_an_older_step_with_unreadable_metadata(setup):
    cfg, mesh = setup()
    save(cfg, mesh, 2, 4)
    (step_folder(cfg, 2) / METADATA).write_bytes(b"[" * 100_000)
    assert restore_latest(cfg, mesh)[1] == 4
    save(cfg, mesh, 6)
    assert restore_latest(cfg, mesh)[1] == 6


@pytest.mark.parametrize("name", ["a b", "ü", "100%41", "a#b", "a|b"])
def test_a_checkpoint_in_any_folder_is_read_array_by_array(setup, tmp_path, name):
    """Names that would mean something else in a URL."""
    cfg, mesh = setup(**{"run.dir": str(tmp_path / name)})
    save(cfg, mesh, 2)
    assert call("checkpoint", ["verify", cfg.run.dir]) == 0
