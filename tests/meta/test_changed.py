"""Which tests a change selects: `make test CHANGED=1`."""

from tests.changed import changed_since, modules, selected_by


def test_a_change_selects_what_imports_it_and_little_else():
    chosen = selected_by(["jaxpar/tools/doctor/checks/measured.py"])
    assert "tests/tools/doctor/test_checks.py" in chosen and len(chosen) < 20
    assert not [file for file in chosen if "/model/" in file or "/training/" in file]


def test_imports_in_functions_count():
    """`commands.call("convert", ...)` imports the command, whose main imports the rest."""
    assert "tests/convert/test_export.py" in selected_by(["jaxpar/convert/hf/exporting.py"])
    assert "tests/training/test_diloco.py" in selected_by(["jaxpar/convert/command.py"])


def test_code_that_a_component_names_counts():
    chosen = selected_by(["jaxpar/model/recurrent/mamba.py"])
    assert "tests/certification/test_certify.py" in chosen


def test_fixtures_and_lazy_packages_count():
    chosen = selected_by(["jaxpar/training/loop.py"])
    assert "tests/training/test_guards.py" in chosen  # by `train_on`
    assert "tests/data/test_chat.py" not in chosen
    assert "tests/checkpoint/test_damage.py" in selected_by(["jaxpar/checkpoint/saved.py"])


def test_configs_pages_and_whole_changes():
    assert "tests/meta/test_docs.py" in selected_by(["docs/troubleshooting.md"])
    assert "tests/config/test_commands.py" in selected_by(["configs/llama3_8b.py"])
    every = {file for file in modules().values() if file.name.startswith("test_")}
    assert len(selected_by(["tests/conftest.py"])) == len(every)
    assert selected_by([]) == []


def test_files_of_this_checkout_can_be_compared():
    assert all(isinstance(name, str) and name for name in changed_since("HEAD"))
