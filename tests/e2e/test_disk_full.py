"""A real process on a full disk: training goes on, loudly, and ends with code 1 past the budget."""

from jaxpar import checkpoint
from tests.e2e.test_train import losses_of, start

#: The training program, in which no file grows beyond 200 kB: a checkpoint's do, the others do not.
FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
from jaxpar import cli, train
cli.run_program(train.main)
"""


def test_a_full_disk(config_file, tmp_path):
    flags = "--train.num-steps 60 --checkpoint.every 12 --evaluation.every 0".split()
    good = start("-m", "jaxpar.train", config_file, *flags, "--train.num-steps", "12")
    assert good.returncode == 0, good.stderr
    full = start("-c", FULL, config_file, *flags, "--checkpoint.save-failures-allowed", "2")
    assert full.returncode == 1, full.stderr
    assert full.stderr.count("WARNING    step") == 2
    assert "WARNING    step 24 could not be saved" in full.stderr
    assert "error: step 48 could not be saved" in full.stderr
    assert "(failure 3 in a row)" in full.stderr
    assert max(losses_of(tmp_path / "run")) >= 48  # it trained on meanwhile
    where = checkpoint.folder(tmp_path / "run")
    assert [path.name for path in where.iterdir()] == ["12"]

    roomy = start("-m", "jaxpar.train", config_file, *flags)
    assert roomy.returncode == 0 and "restored step 12" in roomy.stdout, roomy.stderr
    assert "2 attempts" not in roomy.stdout and "3 attempts" in roomy.stdout
