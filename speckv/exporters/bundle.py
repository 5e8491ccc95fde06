"""Policy bundles, which `speckv.runtime` loads."""

import pathlib

from speckv import runtime
from speckv.exporters.portable import BundlePolicy, PortableExporter
from speckv.policy import Policy
from speckv.runtime import Bundle


class BundleExporter(PortableExporter):
    """A policy bundle: JSON and safetensors, for any host that can call Python with NumPy."""

    name = "bundle"
    decoder = "a host that calls speckv.runtime"

    def write(self, bundle: Bundle, out: pathlib.Path) -> None:
        bundle.save(out)

    def load(self, out: pathlib.Path) -> Policy:
        return BundlePolicy(runtime.load(out))
