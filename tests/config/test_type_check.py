"""Values of the wrong type are refused, with a setting that works."""

from pathlib import Path

import numpy as np
import pytest

from jaxpar.config import ConfigError, TrainConfig, command_line, replace
from jaxpar.config.explain import errors_of, fixes_of
from jaxpar.config.validate import check
from tests.config.models import BASE
from tests.config.test_config import fixes, leaf_paths

MIXER, ROPE = "model.layers.mixer", "model.layers.mixer.rope"

#: A field, a value of the wrong type, its rule, and the setting that the fix names.
WRONG_TYPES = [
    ("train.num_steps", "four", "must be a whole number", "--train.num-steps 1000"),
    ("train.num_steps", 400.0, "must be a whole number", "--train.num-steps 400"),
    ("train.num_steps", "1e3", "must be a whole number", "--train.num-steps 1000"),
    ("train.num_steps", True, "must be a whole number", "--train.num-steps 1000"),
    ("train.num_steps", None, "must be a whole number", "--train.num-steps 1000"),
    ("train.num_steps", np.int64(4), "must be a whole number", "--train.num-steps 1000"),
    ("optimizer.learning_rate", "fast", "must be a number", "--optimizer.learning-rate 0.0003"),
    ("optimizer.learning_rate", False, "must be a number", "--optimizer.learning-rate 0.0003"),
    ("model.tie_embeddings", 1, "must be True or False", "--model.tie-embeddings False"),
    ("model.tie_embeddings", "yes", "must be True or False", "--model.tie-embeddings False"),
    (
        "compute.dtype",
        "bf16",
        "must be one of bfloat16, float16, float32",
        "--compute.dtype bfloat16",
    ),
    ("compute.attention_backend", "flash", "one of auto, reference", "--compute.attention-backend"),
    ("parallel.zero", 4, "must be one of 1, 2, 3", "--parallel.zero 3"),
    ("parallel.zero", 1.0, "must be one of 1, 2, 3", "--parallel.zero 1"),
    ("parallel.zero", True, "must be one of 1, 2, 3", "--parallel.zero 3"),
    ("parallel.context", "all_gather", "must be one of allgather", "--parallel.context allgather"),
    ("parallel.layer_loop", "while", "must be one of scan, unroll", "--parallel.layer-loop scan"),
    ("optimizer.name", "adam", "must be one of adamw, lion, sgd", "--optimizer.name adamw"),
    ("optimizer.schedule", "cos", "must be one of cosine", "--optimizer.schedule cosine"),
    ("checkpoint.resume", "always", "must be one of auto, never", "--checkpoint.resume auto"),
    (f"{MIXER}.window", 3.5, "must be a whole number or None", f"--{MIXER}.window None"),
    ("run.dir", Path("runs"), "must be text", "--run.dir runs/default"),
    (f"{ROPE}.scaling", 8, "must be a RopeScaling or None", f"--{ROPE}.scaling None"),
    (f"{ROPE}.scaling", TrainConfig(), "must be a RopeScaling or None", f"--{ROPE}.scaling None"),
    (f"{ROPE}.scaling.factor", "8x", "must be a number", f"--{ROPE}.scaling.factor"),
    ("model.mup", 8, "must be a MupConfig or None", "--model.mup None"),
    ("model.mup.base_width", "8x", "must be a whole number", "--model.mup.base-width 256"),
    ("model", TrainConfig(), "must be a Model", "--model."),
    ("train", None, "must be a TrainConfig", "--train.num-steps 1000"),
]


def test_wrong_types_are_one_error_with_all_other_rules():
    wrong = {"train.num_steps": "four", "train.seed": 2.0, "lora.rank": 4, "model.mtp_depth": 1}
    cfg = replace(BASE, **wrong)
    with pytest.raises(ConfigError) as caught:
        check(cfg)
    found = [error.field for error in errors_of(caught.value)]
    assert found == ["train.num_steps", "train.seed", "lora.rank"]
    firsts = [fixes_of(error)[0] for error in errors_of(caught.value)]
    check(command_line.parse_overrides(cfg, " ".join(firsts).split()))
    with pytest.raises(ConfigError, match=r"2 rules are broken.*\n1\. run\.dir.*\n2\. .*seed"):
        check(replace(BASE, **{"run.dir": 5, "train.seed": None}))
    with pytest.raises(ConfigError, match=r"^2 rules are broken.*\n1\. train\.seed.*\n2\. data"):
        command_line.parse_overrides(BASE, ["--train.seed", "x", "--data.seq-len", "y"])
    with pytest.raises(ConfigError, match=r"^train = 5: must be a TrainConfig"):
        command_line.parse_overrides(replace(BASE, train=5), ["--train.num-steps", "2"])


@pytest.mark.parametrize(("path", "value", "rule", "fix"), WRONG_TYPES)
def test_a_value_of_the_wrong_type_is_refused(path, value, rule, fix):
    with pytest.raises(ConfigError) as caught:
        check(replace(BASE, **{path: value}))
    assert (caught.value.field, caught.value.value) == (path, value)
    assert rule in caught.value.rule
    assert fix in caught.value.fix
    if path in leaf_paths():
        (way, *_) = fixes(caught.value)
        check(command_line.parse_overrides(BASE, way))
