"""Everything that runs real models. Importing this package imports torch (extra `live`)."""

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    from speckv.errors import SpecKVError

    raise SpecKVError(f"{error.name} is not installed; run: pip install 'speckv[live]'") from None
