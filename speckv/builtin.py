"""What the framework itself registers, through the hooks that outsiders use."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from speckv.hookspecs import hookimpl

if TYPE_CHECKING:
    import click

    from speckv.costs import CostModel
    from speckv.exporting import Exporter
    from speckv.steplogs import Importer


@hookimpl
def speckv_register_drafters(register: Callable[[str, str], None]) -> None:
    register("prompt-lookup", "speckv.live.drafting:prompt_lookup")
    register("early-exit", "speckv.live.models:early_exit")


@hookimpl
def speckv_register_cost_models(
    register: "Callable[[str, str | os.PathLike[str] | Callable[[], CostModel]], None]",
) -> None:
    from speckv.shipped import COSTS

    for path in sorted(COSTS.glob("*.json")):
        register(path.stem, path)


@hookimpl
def speckv_register_importers(register: "Callable[[type[Importer]], None]") -> None:
    from speckv.importers.table import TableImporter
    from speckv.importers.vllm import VllmImporter
    from speckv.paper.importer import PaperImporter
    from speckv.steplogs import SpecKVImporter

    for importer in (SpecKVImporter, PaperImporter, VllmImporter, TableImporter):
        register(importer)


@hookimpl
def speckv_register_exporters(register: "Callable[[type[Exporter]], None]") -> None:
    from speckv.exporters.assisted import AssistedExporter, AssistedThresholdExporter
    from speckv.exporters.bundle import BundleExporter
    from speckv.exporters.c import CExporter
    from speckv.exporters.llamacpp import LlamaCppExporter, LlamaCppPythonExporter
    from speckv.exporters.onnx import OnnxExporter
    from speckv.exporters.openvino import OpenVinoExporter
    from speckv.exporters.sglang import SglangExporter
    from speckv.exporters.tensorrt_llm import TensorRtLlmExporter
    from speckv.exporters.transformers import TransformersExporter
    from speckv.exporters.vllm import VllmExporter, VllmScheduleExporter
    from speckv.exporting import SpecKVExporter

    for exporter in (
        SpecKVExporter,
        BundleExporter,
        OnnxExporter,
        CExporter,
        TransformersExporter,
        AssistedExporter,
        AssistedThresholdExporter,
        LlamaCppExporter,
        LlamaCppPythonExporter,
        OpenVinoExporter,
        SglangExporter,
        TensorRtLlmExporter,
        VllmExporter,
        VllmScheduleExporter,
    ):
        register(exporter)


@hookimpl
def speckv_register_commands(register: "Callable[[click.Command], None]") -> None:
    from speckv.cli import COMMANDS

    for command in COMMANDS:
        register(command)
