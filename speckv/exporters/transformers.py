"""Policies for `generate` of transformers."""

from speckv.exporting import SpecKVExporter


class TransformersExporter(SpecKVExporter):
    """A saved policy as it is, for `speckv.live.generation`, which plays it inside `generate` of transformers."""

    name = "transformers"
    decoder = "generate of transformers 5.24"
