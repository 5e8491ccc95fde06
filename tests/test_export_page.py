"""docs/export.md, word for word: its commands are run, and so is its code."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from speckv.exporters.bundle import BundleExporter
from speckv.exporters.c import CExporter
from speckv.exporting import export
from speckv.plugins import registry
from speckv.runtime import Sequence
from tests.portable import EXACT, fitted, recording

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "export.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(PAGE.read_text(encoding="utf-8")) if kind == language]


def test_it_names_every_exporter_and_every_portable_policy():
    page = PAGE.read_text(encoding="utf-8")
    listed = re.search(r"These policies fit\nexactly:\n\n(.*?)\n\n", page, re.DOTALL)
    assert listed and set(re.findall(r"`([\w-]+)`", listed[1])) == {spec.partition(":")[0] for spec in EXACT}
    exporters = {name for name, entry in registry().exporters.items() if entry.plugin.built_in}
    assert exporters == set(re.findall(r"^\| `([\w-]+)` \|.*\|.*\|.*\|$", page, re.MULTILINE))
    for link in re.findall(r"\]\(([^)#]+)\)", page):
        assert (PAGE.parent / link).is_file(), link


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("spec", "drafted"), [("none", 0), ("confidence:threshold=0.95,cap=6", 1), ("heuristic", 5)])
def test_its_hosts_tell_what_they_drafted(spec, drafted, tmp_path, monkeypatch, capsys):
    """In Python and in C, also of a draft that was stopped and of none."""
    monkeypatch.chdir(tmp_path)
    export(BundleExporter(), fitted(spec), tmp_path / "mlp-bundle", *recording())
    export(CExporter(), fitted(spec), tmp_path / "mlp-c", *recording())
    told = []
    monkeypatch.setattr(Sequence, "observe", lambda self, *args, **more: told.append((args, more)))
    exec(blocks("python")[0], {})
    assert told == [((drafted,), {"accepted": max(drafted - 1, 0), "target_entropy": 0.3, "target_margin": 2.5})]
    in_python = capsys.readouterr().out.split()
    assert in_python[0] == run_c(tmp_path).split()[0] == str(drafted)


def run_c(folder: pathlib.Path) -> str:
    """What the host in C prints."""
    (program,) = blocks("c")
    (folder / "host.c").write_text(program)
    strict = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-Imlp-c"]
    subprocess.run(["cc", *strict, "host.c", "-o", "host", "-lm"], check=True, cwd=folder)
    return subprocess.run(["./host"], capture_output=True, text=True, check=True, cwd=folder).stdout


@pytest.mark.slow
def test_the_page_works_as_it_stands(tmp_path, monkeypatch, capsys, small_pair_paths):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]))
    for commands in blocks("sh"):
        done = subprocess.run(["bash", "-ec", commands], capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("100.00% of") == 2
    names = {"TARGET": small_pair_paths.target, "DRAFT": small_pair_paths.draft}
    said = []
    for code in blocks("python"):
        exec(code, names)
        said.append(capsys.readouterr().out)
    in_python, speculated, assisted = said
    first, other = (text.splitlines()[-1].partition(")")[0] for text in (speculated, assisted))
    assert first == other, "the first step of a text does not depend on the form"
    assert in_python == f"{run_c(tmp_path).strip()} 1.0\n"
