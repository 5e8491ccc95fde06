"""Portable policies: what a decoder needs to play one that was trained with speckv, and no more.

    bundle = speckv.runtime.load("bundle")
    sequence = bundle.start(context_length=len(prompt))
    gamma = sequence.choose_gamma()

It needs NumPy and safetensors, and imports neither torch nor scikit-learn.
"""

from speckv.runtime.bundle import Bundle, load
from speckv.runtime.programs import Program
from speckv.runtime.sequence import Sequence

__all__ = ["Bundle", "Program", "Sequence", "load"]
