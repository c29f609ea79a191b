"""The state of users' post-updates in checkpoints: other meshes, turned on late, turned off."""

import jax
import numpy as np
import pytest

from jaxpar import ParamSpec, PostUpdate, config
from jaxpar.checkpoint.loading import restore
from jaxpar.config import Config
from jaxpar.config.validate import resolve
from jaxpar.sharding.mesh import make_mesh
from tests.checkpoint.test_checkpoint import (
    assert_same_bits,
    logical,
    random_state,
    save,
    write_dataset,
)
from tests.tiny import STATE

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")


class Norms(PostUpdate):
    """State by layer, and outside the layers."""

    def extra(self, params):
        w, head = params["layers"]["w_down"], params["head"]
        by_layer = ParamSpec(shape=w.shape[:-1], axes=w.axes[:-1], init="ones")
        return {
            "layers": {"norm": by_layer},
            "of_head": ParamSpec(shape=head.shape, axes=head.axes),
        }

    def __call__(self, params, before, extra, step):
        return params, extra


OWN = (Norms(),)

UNEQUAL = {
    "parallel.pipeline": 2,
    "parallel.num_microbatches": 2,
    "parallel.layers_per_stage": (3, 1),
}
VIRTUAL = {
    "parallel.pipeline": 2,
    "parallel.virtual_stages": 2,
    "parallel.num_microbatches": 2,
}


@pytest.fixture
def setup(tmp_path, devices):
    """(fields, post-updates) -> (the resolved config, its mesh)."""
    data = write_dataset(tmp_path / "data")
    base = config.replace(
        Config(), **STATE, **{"run.dir": str(tmp_path / "run"), "data.path": data}
    )

    def make(fields, own=OWN):
        cfg = config.replace(base, **{"parallel.data": 1} | fields, **{"train.post_updates": own})
        n = cfg.parallel.pipeline * cfg.parallel.data * cfg.parallel.tensor
        return resolve(cfg, n), make_mesh(cfg.parallel, devices[:n])

    return make


@pytest.mark.parametrize("other", [{"parallel.data": 2, "parallel.tensor": 2}, UNEQUAL])
def test_it_is_restored_bit_for_bit_on_another_mesh(other, setup):
    cfg, mesh = setup(VIRTUAL)
    saved = random_state(cfg, mesh, 3)
    save(cfg, mesh, 3)
    here, mesh = setup(other)
    restored = restore(here, mesh)
    own = lambda state, cfg: jax.device_get(logical(state, cfg).extra["norms"])  # noqa: E731
    assert_same_bits(own(restored, here), own(saved, cfg))


def test_one_that_is_turned_on_late_begins_with_its_initial_values(setup, capfd):
    cfg, mesh = setup({}, ())
    save(cfg, mesh, 3)
    cfg, mesh = setup({"parallel.tensor": 2})
    restored = restore(cfg, mesh)
    assert "norms starts anew after step 3" in capfd.readouterr().out
    assert np.all(np.asarray(restored.extra["norms"]["layers"]["norm"]) == 1)


def test_one_that_is_gone_is_named_and_dropped(setup, capfd):
    cfg, mesh = setup({})
    save(cfg, mesh, 3)
    cfg, mesh = setup({"parallel.tensor": 2}, ())
    restored = restore(cfg, mesh)
    assert "the state of norms in" in capfd.readouterr().out
    assert restored.extra.keys() == {"guard"}
