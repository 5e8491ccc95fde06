"""Seconds to import the package and to show the help, in fresh processes: `make bench`."""

import subprocess
import sys

import pytest

#: command -> what the project promises, seconds
PROMISED = {("-c", "import speckv"): 0.3, ("-m", "speckv", "--help"): 0.6}


@pytest.mark.parametrize("arguments", PROMISED, ids=["import", "help"])
def test_startup(benchmark, capsys, arguments: tuple[str, ...]) -> None:
    def run(*command: str) -> None:
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)

    benchmark.pedantic(run, arguments, rounds=7, warmup_rounds=1)
    seconds = benchmark.stats.stats.median
    with capsys.disabled():
        print(f"\n{' '.join(arguments)}: {seconds:.3f} s")
    assert seconds < PROMISED[arguments]
