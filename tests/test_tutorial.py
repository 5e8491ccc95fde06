"""docs/write-a-policy.md, word for word: its commands are run and its files are written in the order of the page."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "write-a-policy.md"
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str, str]]:
    """Language, file name and text of each block."""
    return [match.groups(default="") for match in FENCE.finditer(PAGE.read_text(encoding="utf-8"))]


def test_every_block_is_one_that_is_run():
    assert PAGE.read_text(encoding="utf-8").count("```") == 2 * len(blocks())
    assert all((language, bool(file)) in {("sh", False), ("python", True)} for language, file, _ in blocks())
    assert len(blocks()) > 8


class Reader:
    """Somebody who does what the page says, in a folder of their own. `pip install .` puts the project into `site`."""

    def __init__(self, home: pathlib.Path) -> None:
        self.folder, self.site, self.said = home, home / "site", ""
        self.environment = os.environ | {
            "PATH": os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(self.site), *filter(None, sys.path)]),
            "PIP_TARGET": str(self.site),
            "PIP_UPGRADE": "1",
            "PIP_NO_DEPS": "1",
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it so: there is none
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def run(self, commands: str) -> None:
        """All commands of a block, in one shell; the next block goes on in the folder where this one ends."""
        script = f"set -e\n{commands}\npwd > '{self.site.parent / 'where'}'\n"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=self.folder, timeout=900,
                              env=self.environment)  # fmt: skip
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
        self.said += done.stdout
        self.folder = pathlib.Path((self.site.parent / "where").read_text().strip())

    def write(self, file: str, text: str) -> None:
        (self.folder / file).write_text(text, encoding="utf-8")


@pytest.mark.slow
def test_the_page_works_as_it_stands(tmp_path):
    reader = Reader(tmp_path)
    for language, file, text in blocks():
        reader.run(text) if language == "sh" else reader.write(file, text)
    assert reader.folder == tmp_path / "speckv-patient"
    assert reader.said.count(" passed") == 2 and "failed" not in reader.said
    assert re.search(r"speckv-patient 0\.1\.0 +│ policy +│ patient", reader.said)
    assert "100.00% of" in reader.said and (reader.folder / "exported" / "fidelity.json").exists()
    cells = json.loads((reader.folder / "result.json").read_text())["cells"]
    patient = [cell for cell in cells if cell["policy"] == "patient"]
    assert {cell["costs"] for cell in patient} == {"epyc-float32", "rtx3090"} and all(c["gain_ci"] for c in patient)
    print([(c["costs"], c["compression"], round(c["gain"], 4), round(c["p"], 4)) for c in patient])
