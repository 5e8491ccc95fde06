"""SpecKV: adaptive control of speculative decoding.

Record a model pair once, replay any policy on the recording exactly, compare policies in tokens per second,
and ship the winner. Importing this package imports none of its heavy dependencies.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

#: Public name -> module that defines it; loaded on first use.
_PUBLIC = {
    "Clairvoyant": "speckv.policy",
    "CostModel": "speckv.costs",
    "Features": "speckv.features",
    "Memory": "speckv.policy",
    "Outcome": "speckv.policy",
    "Policy": "speckv.policy",
    "Rollouts": "speckv.traces",
    "SpecKVError": "speckv.errors",
    "SpecKVWarning": "speckv.errors",
    "SpeculativeDecoder": "speckv.live.decoder",
    "State": "speckv.policy",
    "TraceDataset": "speckv.traces",
    "compare": "speckv.comparison",
    "hookimpl": "speckv.hookspecs",
    "load_policy": "speckv.saving",
    "oracle": "speckv.bounds",
    "replay": "speckv.replaying",
    "save_policy": "speckv.saving",
}
__all__ = [
    "Clairvoyant",
    "CostModel",
    "Features",
    "Memory",
    "Outcome",
    "Policy",
    "Rollouts",
    "SpecKVError",
    "SpecKVWarning",
    "SpeculativeDecoder",
    "State",
    "TraceDataset",
    "compare",
    "hookimpl",
    "load_policy",
    "oracle",
    "replay",
    "save_policy",
]

if TYPE_CHECKING:
    from speckv.bounds import oracle
    from speckv.comparison import compare
    from speckv.costs import CostModel
    from speckv.errors import SpecKVError, SpecKVWarning
    from speckv.features import Features
    from speckv.hookspecs import hookimpl
    from speckv.live.decoder import SpeculativeDecoder
    from speckv.policy import Clairvoyant, Memory, Outcome, Policy, State
    from speckv.replaying import replay
    from speckv.saving import load_policy, save_policy
    from speckv.traces import Rollouts, TraceDataset


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'speckv' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
