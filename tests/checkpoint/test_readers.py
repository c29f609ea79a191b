"""Programs that only read a run: they pass over damaged steps, say so, and move nothing."""

import pytest

from jaxpar.checkpoint import integrity
from jaxpar.checkpoint.integrity import Damaged
from jaxpar.checkpoint.loading import restore, restore_params
from jaxpar.checkpoint.saved import METADATA, read_whole, saved_steps
from tests.checkpoint.test_checkpoint import base, save, setup
from tests.checkpoint.test_damage import damage_array, step_folder

__all__ = ["base", "setup"]  # fixtures

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")


def test_readers_refuse_a_damaged_step_and_leave_it(setup, devices):
    cfg, mesh = setup()
    save(cfg, mesh, 2, 4)
    damage_array(cfg, 4)
    with pytest.raises(Damaged, match=r"step 4 of .* is damaged"):
        restore_params(cfg.run.dir, cfg, mesh)
    restore_params(cfg.run.dir, cfg, mesh, 2)
    assert saved_steps(cfg.run.dir) == [2, 4]


def test_readers_use_the_latest_intact_step_and_say_so(setup, capfd):
    """Whether the metadata, the list of files or only the fingerprints show the damage."""
    cfg, mesh = setup()
    run = cfg.run.dir

    def read(step: int) -> int:
        restore(cfg, mesh, step)
        return step

    save(cfg, mesh, 2, 4, 6)
    assert read_whole(run, None, read) == 6
    assert capfd.readouterr().err == ""
    (step_folder(cfg, 6) / integrity.FILES).unlink()
    damage_array(cfg, 6)  # only the fingerprints show it
    (step_folder(cfg, 4) / METADATA).write_text("[")
    assert read_whole(run, None, read) == 2
    for step, line in zip((6, 4), capfd.readouterr().err.splitlines(), strict=True):
        assert f"step {step} of {run} is damaged: " in line
        assert line.endswith("An earlier step is read instead; nothing was moved.")
    with pytest.raises(Damaged, match="step 4"):
        read_whole(run, 4, read)
    damage_array(cfg, 2)
    with pytest.raises(Damaged, match=r"every checkpoint of .* step 2: .*; step 6: "):
        read_whole(run, None, read)
    assert saved_steps(run) == [2, 4, 6]
