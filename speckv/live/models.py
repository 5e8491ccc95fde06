"""Language models: loading one at a compression, and the first layers of one as a draft."""

import contextlib
import copy
import functools
import logging
import pathlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jinja2
import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from speckv.compression import check_compression
from speckv.errors import SpecKVError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries' own progress bars and remarks out of the user's terminal while a model is loaded."""
    log, bars = transformers.utils.logging, transformers.utils.logging.is_progress_bar_enabled()
    verbosity, quantiser = log.get_verbosity(), logging.getLogger("bitsandbytes")
    level = quantiser.level
    log.disable_progress_bar()
    log.set_verbosity_error()
    quantiser.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        quantiser.setLevel(level)
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


# LLM.int8() casts its input to float16 and says so at every layer of every forward.
warnings.filterwarnings("ignore", message="MatMul8bitLt: inputs will be cast")


#: How a model computes: with the kernels made for its compression, or in float32 from the same stored weights.
COMPUTE = ("native", "float32")


def load_model(name: str, compression: str, compute: str = "native", device: str = "cpu") -> Any:
    """Load a causal language model with its weights stored at `compression`.

    Args:
        name: a folder, or a name on the Hugging Face hub.
        compression: one of `speckv.compression.COMPRESSIONS`. `int8` and `nf4` need bitsandbytes; NF4 goes
            without double quantisation, which is about 50 times slower on a CPU.
        compute: `native` uses the kernels made for the compression (bfloat16 arithmetic under `int8` and
            `nf4`). `float32` decompresses the same stored values once and computes with them in float32, as
            `compute_in_float32` describes: results then do not depend on how many tokens share a forward.
        device: a torch device.

    Raises:
        SpecKVError: there is no such model.
    """
    check_compression(compression)
    if compute not in COMPUTE:
        raise SpecKVError(f"compute {compute!r} is unknown; choose one of {', '.join(COMPUTE)}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SpecKVError(f"device {device!r} can't be used here ({_first_line(error)}); try cpu") from None
    options: dict[str, Any] = {"dtype": _DTYPES.get(compression, torch.bfloat16), "device_map": {"": device}}
    if compression == "int8":
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    elif compression == "nf4":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    try:
        with _quiet():
            model = AutoModelForCausalLM.from_pretrained(name, **options).eval()
            if compute == "float32":
                return compute_in_float32(model)
            return _without_file(model) if "quantization_config" in options else model
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise SpecKVError(f"{name}: cannot be loaded as a causal language model ({_first_line(error)})") from None


def _without_file(model: Any) -> Any:
    """What a quantised model keeps as it was, such as its embedding, is a view of the mapped file and would keep all of
    it in memory."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.clone()
    return model


class Float32Linear(torch.nn.Module):
    """A linear layer that computes in float32 with the values its compressed original stores.

    Args:
        weight: (out, in) float32.
        bias: (out,) float32, or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # weight @ rows.T, not rows @ weight.T: twice as fast in MKL for the 2 to 20 rows of a verify forward.
        out = (self.weight @ x.reshape(-1, x.shape[-1]).T).T
        if self.bias is not None:
            out = out + self.bias
        return out.reshape(*x.shape[:-1], -1)


def compute_in_float32(model: Any) -> Any:
    """Replace every linear layer by a `Float32Linear` with the stored values, and cast the rest to float32.

    For the results of a compressed model on a machine without fast kernels for it, and for recording: float32
    results of several tokens in one forward and of one token at a time agree to rounding (rule R3). Under `int8`
    the activations are therefore not rounded to 8 bits as LLM.int8() does: that step is discontinuous, and the last
    bit of a sum would decide the text.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
        from bitsandbytes.nn import Linear4bit, Linear8bitLt
    else:
        Linear4bit = Linear8bitLt = ()
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Linear4bit):
                weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            elif isinstance(layer, Linear8bitLt):
                weight = int8_vectorwise_dequant(layer.weight.CB, layer.weight.SCB)
            elif isinstance(layer, torch.nn.Linear):
                weight = layer.weight.data
            else:
                continue
            bias = None if layer.bias is None else layer.bias.data.float()
            setattr(parent, name, Float32Linear(weight.float(), bias))
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()
    model.config.dtype = torch.float32
    return model


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a model. Raises SpecKVError if there is none."""
    try:
        with _quiet():
            return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # tokenizers raises nothing more special
        raise SpecKVError(f"{name}: has no tokenizer that can be loaded ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model with its tokenizer: a target or a draft.

    Attributes:
        model: a transformers causal language model.
        tokenizer: its tokenizer.
        compression: how its weights are stored, one of `speckv.compression.COMPRESSIONS`. Left out, it is read off
            the model.
    """

    model: Any
    tokenizer: Any
    compression: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "compression", check_compression(self.compression or _compression_of(self.model)))

    @classmethod
    def load(
        cls, name: str, compression: str, compute: str = "native", device: str = "cpu", tokenizer: Any = None
    ) -> Self:
        """Load a model as `load_model` does, and its tokenizer unless it is given."""
        tokenizer = tokenizer or load_tokenizer(name)
        return cls(load_model(name, compression, compute, device), tokenizer, compression)

    @property
    def name(self) -> str:
        """What messages and recordings call it: the last part of a folder's path, or the name on the hub."""
        return model_name(self.model.name_or_path or self.model.config.model_type)

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @functools.cached_property
    def vocabulary_size(self) -> int:
        """Logits that may stand for a token. A padded embedding has more; those rows mean nothing."""
        width = self.model.config.get_text_config().vocab_size
        return int(min(max(self.tokenizer.get_vocab().values()) + 1, width))

    @functools.cached_property
    def impossible_ids(self) -> list[int]:
        """Ids below the vocabulary's size that stand for no token."""
        return sorted(set(range(self.vocabulary_size)) - set(self.tokenizer.get_vocab().values()))

    @property
    def eos_ids(self) -> frozenset[int]:
        """All ids that end a sequence: those of the generation settings and the tokenizer's own."""
        configured = self.model.generation_config.eos_token_id
        ids = configured if isinstance(configured, list) else [configured]
        return frozenset(i for i in (*ids, self.tokenizer.eos_token_id) if i is not None)


def _compression_of(model: Any) -> str:
    """How the weights of a model that a user loaded are stored."""
    if getattr(model, "is_loaded_in_8bit", False):
        return "int8"
    if getattr(model, "is_loaded_in_4bit", False):
        return "nf4"
    return next((name for name, dtype in _DTYPES.items() if dtype == model.dtype), str(model.dtype))


class ModelPair(NamedTuple):
    """A target and its draft."""

    target: LanguageModel
    draft: LanguageModel

    @classmethod
    def load(
        cls,
        target: str,
        draft: str,
        compression: str,
        draft_compression: str = "bf16",
        compute: str = "native",
        draft_compute: str = "native",
        device: str = "cpu",
    ) -> Self:
        """Load both models; a pair whose tokenizers differ is refused before any weight is read.

        Raises:
            SpecKVError: a model cannot be loaded, or the tokenizers differ.
        """
        tokenizers = load_tokenizer(target), load_tokenizer(draft)
        check_same_tokenizer(*tokenizers, target, draft)
        return cls(
            LanguageModel.load(target, compression, compute, device, tokenizers[0]),
            LanguageModel.load(draft, draft_compression, draft_compute, device, tokenizers[1]),
        )


def check_same_tokenizer(target: Any, draft: Any, target_name: str, draft_name: str) -> None:
    """Refuse two tokenizers that do not map the same strings to the same ids.

    Raises:
        SpecKVError: naming both models.
    """
    if target.get_vocab() != draft.get_vocab():
        raise SpecKVError(
            f"the tokenizers of {target_name} and {draft_name} differ; a draft must share its target's vocabulary"
        )


def check_same_vocabulary(target: LanguageModel, draft: LanguageModel) -> None:
    """Refuse a draft that does not speak in the target's tokens.

    Raises:
        SpecKVError: naming both models.
    """
    check_same_tokenizer(target.tokenizer, draft.tokenizer, target.name, draft.name)
    if target.vocabulary_size != draft.vocabulary_size:
        raise SpecKVError(
            f"{target.name} can say {target.vocabulary_size} tokens and {draft.name} {draft.vocabulary_size}; a draft "
            "must share its target's vocabulary"
        )


def early_exit(target: LanguageModel, layers: int) -> LanguageModel:
    """The first layers of a model with its own output head, as a draft of the whole. The weights are shared.

    Args:
        target: a model whose decoder keeps its layers in `layers`, as those of transformers do.
        layers: how many of them, from 1 to one fewer than there are.

    Raises:
        SpecKVError: the model has no such layers, or not so many.
    """
    whole = target.model
    decoder: Any = getattr(whole, whole.base_model_prefix, None)
    if not isinstance(getattr(decoder, "layers", None), torch.nn.ModuleList) or "forward" in vars(whole):
        # A forward of its own, as accelerate's hooks give a model, would run the whole of it.
        raise SpecKVError(f"{target.name}: its layers cannot be run apart, so that it has no early exit")
    if not 1 <= layers < len(decoder.layers):
        most = len(decoder.layers) - 1
        raise SpecKVError(f"{target.name} has {most + 1} layers; exit early after 1 to {most} of them, not {layers}")
    config = copy.deepcopy(whole.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    decoder, model = _share(decoder, config), _share(whole, config)
    decoder._modules["layers"] = decoder.layers[:layers]
    model._modules[whole.base_model_prefix] = decoder
    return LanguageModel(model, target.tokenizer, target.compression)


def _share(module: Any, config: Any) -> Any:
    """A module with the same weights and another configuration."""
    other = copy.copy(module)
    other._modules = dict(module._modules)
    other.config = config
    return other


def to_device(integers: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Integers, nested or not, as a tensor on a device. `torch.tensor` would wait for all that the device has to do."""
    tensor = torch.tensor(integers, dtype=torch.long)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def chat_tokens(tokenizer: Any, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a user's text or of a chat's messages, in the model's chat template if it has one.

    Raises:
        SpecKVError: there are messages, and no chat template to put them in, or it refuses them.
    """
    if tokenizer.chat_template is None:
        if not isinstance(prompt, str):
            raise SpecKVError("the tokenizer has no chat template for messages; give the text itself")
        return list(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    try:
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    except jinja2.TemplateError as error:
        raise SpecKVError(f"the chat template refuses the messages ({_first_line(error)}); change them") from None
    return list(encoded["input_ids"])


def model_name(name: str) -> str:
    """How a recording calls a model: the last part of a folder's path, or the name on the hub as it is."""
    return pathlib.Path(name).name if pathlib.Path(name).is_dir() else name
