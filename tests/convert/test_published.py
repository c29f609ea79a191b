"""One published config.json of each family, as published and as transformers 5.24 saves it again.

`published/sources.json` says where each is from; `goldens/make_published.py` writes what
transformers makes of it.
"""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from jaxpar.config import ConfigError, Model
from jaxpar.convert.hf.composed import difference
from jaxpar.convert.hf.config import config_json, family_of, model_of
from jaxpar.convert.hf.config_file import Values, read_config_json
from jaxpar.convert.hf.families import FAMILIES
from jaxpar.convert.hf.keys.known import unknown
from jaxpar.convert.hf.tokenizer import end_of_text
from jaxpar.convert.shape import model_from
from jaxpar.model.parameters import param_specs
from jaxpar.sharding.params import flat
from tests.convert.two_forms import changes
from tests.slow import slow_but
from tests.tiny import TINY

PUBLISHED = Path(__file__).parent / "published"
NAMES = sorted(json.loads((PUBLISHED / "sources.json").read_text()))
FOLDERS = [name + saved for name in NAMES for saved in ("", "/saved")]

#: Parameters that are buffers in transformers, which does not count them.
BUFFERS = ("router_bias", "layer_scale")


def num_parameters(m: Model) -> int:
    """As transformers counts them: without modules for multi-token prediction."""
    specs = flat(param_specs(dataclasses.replace(m, mtp_depth=0)))
    return sum(math.prod(s.shape) for path, s in specs.items() if not path.endswith(BUFFERS))


def test_every_family_has_a_published_file():
    found = {read_config_json(PUBLISHED / name)["model_type"] for name in NAMES}
    assert found == {family.model_type for family in FAMILIES}
    assert {path.parent.name for path in PUBLISHED.glob("*/config.json")} == {*NAMES}


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_model_has_the_right_size(folder, capsys):
    values = read_config_json(PUBLISHED / folder)
    family = family_of(values)
    model = model_of(values, family)
    counts = json.loads((PUBLISHED / folder.split("/")[0] / "parameters.json").read_text())
    assert num_parameters(model) == counts["parameters"]
    assert unknown(values, family) == {}
    shape = model_from(str(PUBLISHED / folder), values["model_type"], TINY.model)
    assert "parameters" in capsys.readouterr().err
    assert difference(shape, model) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_was_saved_again_describes_the_same_model(name):
    models = []
    for folder in (PUBLISHED / name, PUBLISHED / name / "saved"):
        values = read_config_json(folder)
        models.append(model_of(values, family_of(values)))
    assert models[0] == models[1]


@pytest.mark.parametrize("folder", FOLDERS)
def test_it_is_exported_as_it_was(folder):
    values = read_config_json(PUBLISHED / folder)
    family = family_of(values)
    model = model_of(values, family)
    found = config_json(model, family, values, "float32")
    changed = {key: "float32" for key in ("dtype", "torch_dtype") if key in values}
    changed = changed or {"dtype": "float32"}
    kept = {key: value for key, value in values.items() if key != "quantization_config"}
    assert found == kept | changed
    # Another model of the family gets keys that describe it, and no others.
    other = dataclasses.replace(model, vocab_size=512)
    written = config_json(other, family, values, "float32")
    assert model_of(written, family) == other
    assert unknown(written, family) == {}


@pytest.mark.parametrize("name", NAMES)
def test_the_end_of_text_is_that_of_the_tokenizers_file(name, tmp_path):
    file = PUBLISHED / name / "tokenizer_config.json"
    eos = json.loads(file.read_text()).get("eos_token")
    eos = eos["content"] if isinstance(eos, dict) else eos
    if eos is None:  # GPT-2 names it in config.json alone
        eos = json.loads((PUBLISHED / name / "config.json").read_text())["eos_token_id"]
    assert end_of_text(PUBLISHED / name, name) == eos
    for other, text in (("special_tokens_map.json", '{"eos_token": "<x>"}'), ("config.json", "{}")):
        (tmp_path / other).write_text(text)
    assert end_of_text(tmp_path, name) == "<x>"


def test_files_that_do_not_name_the_end_of_text(tmp_path):
    assert end_of_text(tmp_path, "m") is None
    for several in ([1, 2], None, "3", 1.5, True):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": several}))
        assert end_of_text(tmp_path, "m") in (None, "3")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [7]}))
    assert end_of_text(tmp_path, "m") == 7
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": 5}')
    with pytest.raises(ConfigError, match=r"RUN = 'm': has a special_tokens_map\.json that cannot"):
        end_of_text(tmp_path, "m")


def test_a_model_with_images_is_named_as_one():
    values = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {}}
    with pytest.raises(ConfigError, match=r"architectures = .*images.*save its text part"):
        family_of(values)


# ------------------------------------------------------------------- two forms of one setting


def read(values: Values) -> Model | ConfigError:
    try:
        return model_of(values, family_of(values))
    except ConfigError as error:
        return error


def theirs(again: Values, changed: Values, different: Values) -> Values:
    """The file that transformers saved, from its differences to another.

    A null is a key that it does not have, or one that was null before.
    """
    null = {key for key, value in different.items() if value is None}
    gone = {key for key in null if changed.get(key, 0) is not None}
    return {key: value for key, value in (again | different).items() if key not in gone}


@pytest.mark.parametrize("name", slow_but(NAMES[::12], NAMES))
def test_two_forms_mean_what_they_mean_to_transformers_or_are_both_named(name):
    published, again = (
        json.loads((PUBLISHED / name / file).read_text())
        for file in ("config.json", "saved/config.json")
    )
    recorded, compared = json.loads((PUBLISHED / name / "two_forms.json").read_text()), 0
    for base, values in (("published", published), ("saved", again)):
        for case, (key, changed) in changes(values).items():
            ours, record = read(changed), recorded[f"{base}.{case}"]
            if isinstance(ours, ConfigError):
                inner = changed[key] if isinstance(changed[key], dict) else {}
                assert any(word in str(ours) for word in (key, *inner)), (case, str(ours))
                continue
            if record is None:  # transformers refuses what has no meaning to it
                continue
            if case == "sliding_window.1" and family_of(changed).two_kinds:
                continue  # it makes layers with a window of null, and cannot run them
            wanted = read(theirs(again, changed, record["saved"]))
            if isinstance(wanted, ConfigError):
                # The key is another family's: transformers keeps it, beside its own.
                assert unknown(changed, family_of(changed)), (case, str(wanted))
                continue
            assert ours == wanted, case
            if "parameters" in record:
                assert num_parameters(ours) == record["parameters"], case
            compared += 1
    assert compared > 20
