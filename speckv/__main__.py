"""`python -m speckv`: the command line."""

from speckv.cli import main

main(prog_name="speckv")
