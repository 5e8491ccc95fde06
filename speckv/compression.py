"""How a model's weights are stored: the names that traces, cost models and policies share."""

from speckv.errors import SpecKVError

#: Name -> meaning. The order is the one of the codes that policies see: append only.
COMPRESSIONS = {
    "fp32": "32-bit floating point",
    "bf16": "16-bit brain floating point",
    "fp16": "16-bit floating point",
    "int8": "bitsandbytes LLM.int8()",
    "nf4": "bitsandbytes 4-bit NormalFloat",
}


def check_compression(name: str) -> str:
    """Return `name`.

    Raises:
        SpecKVError: it is not a known compression.
    """
    if name not in COMPRESSIONS:
        raise SpecKVError(f"compression {name!r} is unknown; choose one of {', '.join(COMPRESSIONS)}")
    return name
