"""What a measurement was made on, for the record."""

import os
import pathlib
import platform
import sys
from typing import Any


def machine() -> dict[str, Any]:
    """This machine, and the versions of the libraries in use that decide what a model computes and how fast."""
    description: dict[str, Any] = {"processor": _processor(), "cores": os.cpu_count()}
    if (torch := sys.modules.get("torch")) is not None:
        description["threads"] = torch.get_num_threads()
        description["instructions"] = torch.backends.cpu.get_cpu_capability()
        description["torch"] = torch.__version__
        if torch.cuda.is_available():
            description["accelerator"] = torch.cuda.get_device_name()
    if (transformers := sys.modules.get("transformers")) is not None:
        description["transformers"] = transformers.__version__
    return description


def _processor() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
