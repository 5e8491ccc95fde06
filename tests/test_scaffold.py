"""`speckv new-policy`: a project that works as it is written, or none."""

import os
import pathlib
import subprocess
import sys

import pytest
from click.testing import CliRunner

from speckv import scaffold
from speckv.cli import main

from .plugin_files import fresh_registry, install  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("fresh_registry")

EXAMPLE = pathlib.Path(__file__).parents[1] / "plugins" / "speckv-example"


def new_policy(*arguments):
    return CliRunner().invoke(main, ["new-policy", *map(str, arguments)])


def test_the_example_is_what_it_writes():
    """Neither can change without the other."""
    files = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLE.iterdir() if path.is_file()}
    assert files == scaffold.render("streak", "speckv-example")


@pytest.mark.slow
def test_the_project_passes_its_own_tests(tmp_path):
    done = new_policy("two-words", "--out", tmp_path / "new")
    folder = tmp_path / "new" / "speckv-two-words"
    assert done.exit_code == 0 and done.stdout.startswith(f"{folder}: written; change the rule in speckv_two_words.py")
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "pyproject.toml", "speckv_two_words.py", "test_speckv_two_words.py"]  # fmt: skip
    assert "class TwoWords(speckv.Policy)" in (folder / "speckv_two_words.py").read_text()
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tested = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=600,
                            env=os.environ | {"PYTHONPATH": path})  # fmt: skip
    assert tested.returncode == 0, tested.stdout
    assert "failed" not in tested.stdout and "passed" in tested.stdout

    rule = folder / "speckv_two_words.py"
    rule.write_text(rule.read_text().replace("self.long, self.short)", "-self.long, self.short)"))
    tested = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=600,
                            env=os.environ | {"PYTHONPATH": path})  # fmt: skip
    assert tested.returncode == 1 and "answers_in_range" in tested.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hazard", "there is a policy 'hazard' already, from speckv (speckv_policies)"),
        ("none", "there is a policy 'none' already"),
        ("policies", "a module speckv_policies or a project speckv-policies is installed already"),
        ("there", "there is a policy 'there' already, from plugin-there 1.2"),
        ("true", "'true' can't name a policy"),
        ("My", "'My' can't name a policy"),
        ("a--b", "'a--b' can't name a policy"),
        ("-a", ""),
        ("2nd", "'2nd' can't name a policy"),
        ("../up", "'../up' can't name a policy"),
        ("a b", "'a b' can't name a policy"),
        ("ünder", "'ünder' can't name a policy"),
        ("", "'' can't name a policy"),
        ("used", "speckv-used: exists already"),
    ],
)
def test_a_name_that_cannot_be_had(name, message, tmp_path, monkeypatch):
    source = """
        import speckv

        class There(speckv.Policy):
            name = "there"

        @speckv.hookimpl
        def speckv_register_policies(register):
            register(There)
    """
    install(tmp_path, "there", source)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "out" / "speckv-used").mkdir(parents=True)
    done = new_policy(name, "--out", tmp_path / "out")
    (line,) = done.stderr.splitlines()
    assert done.exit_code == 2 and line.startswith("speckv: error: ") and message in line
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["speckv-used"]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("precious")
    done = new_policy("mine", "--out", tmp_path / "file" / "below")
    assert done.exit_code == 2 and "cannot be written (Not a directory)" in done.stderr
    assert (tmp_path / "file").read_text() == "precious"


def test_a_project_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    def fails(name, project):
        yield from {"a": "b"}.items()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scaffold, "render", lambda *given: type("Files", (), {"items": lambda self: fails(*given)})())
    done = new_policy("mine", "--out", tmp_path)
    assert done.exit_code == 2 and "No space left on device" in done.stderr and list(tmp_path.iterdir()) == []
