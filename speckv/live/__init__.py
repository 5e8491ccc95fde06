"""Everything that runs real models. Importing this package imports torch (extra `live`)."""

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    from speckv.errors import SpecKVError

    raise SpecKVError(f"{error.name} is not installed; run: pip install 'speckv[live]'") from None

from speckv.live.decoder import Options, SpeculativeDecoder, Stream
from speckv.live.drafting import Drafter, Drafting, ModelDrafter, PromptLookup
from speckv.live.models import LanguageModel, ModelPair, early_exit
from speckv.live.results import Decoded, KeptCache, Piece, Step
from speckv.live.sampling import Greedy, Gumbel, Rejection, Sampler

__all__ = [
    "Decoded",
    "Drafter",
    "Drafting",
    "Greedy",
    "Gumbel",
    "KeptCache",
    "LanguageModel",
    "ModelDrafter",
    "ModelPair",
    "Options",
    "Piece",
    "PromptLookup",
    "Rejection",
    "Sampler",
    "SpeculativeDecoder",
    "Step",
    "Stream",
    "early_exit",
]
