"""Model pairs: loading at a compression, and a model with a key-value cache that rolls back."""

import contextlib
import logging
import pathlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, DynamicCache

from speckv.compression import check_compression
from speckv.errors import SpecKVError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries' own progress bars and per-layer remarks out of the user's terminal."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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
            return compute_in_float32(model) if compute == "float32" else model
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise SpecKVError(f"{name}: cannot be loaded as a causal language model ({_first_line(error)})") from None


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
    except (OSError, ValueError) as error:
        raise SpecKVError(f"{name}: has no tokenizer that can be loaded ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def check_same_tokenizer(target: Any, draft: Any, target_name: str, draft_name: str) -> None:
    """Refuse two tokenizers that do not map the same strings to the same ids.

    Raises:
        SpecKVError: naming both models.
    """
    if target.get_vocab() != draft.get_vocab():
        raise SpecKVError(
            f"the tokenizers of {target_name} and {draft_name} differ; a draft must share its target's vocabulary"
        )


def chat_tokens(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a user's text, in the model's chat template if it has one."""
    if tokenizer.chat_template is None:
        return list(tokenizer(text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """All ids that end a sequence: those of the generation settings and the tokenizer's own."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in (*ids, tokenizer.eos_token_id) if i is not None)


@dataclass(frozen=True)
class ModelPair:
    """A target and its draft, with one tokenizer.

    Attributes:
        target, draft: transformers causal language models.
        tokenizer: the target's.
        eos_ids: ids that end a sequence.
        compression: of the target's weights.
    """

    target: Any
    draft: Any
    tokenizer: Any
    eos_ids: frozenset[int]
    compression: str

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
    ) -> "ModelPair":
        """Load both models; refuse a pair whose tokenizers differ before any weight is read."""
        tokenizer = load_tokenizer(target)
        check_same_tokenizer(tokenizer, load_tokenizer(draft), target, draft)
        model = load_model(target, compression, compute, device)
        return cls(
            target=model,
            draft=load_model(draft, draft_compression, draft_compute, device),
            tokenizer=tokenizer,
            eos_ids=eos_ids(model, tokenizer),
            compression=compression,
        )

    @property
    def vocabulary_size(self) -> int:
        """Logits that stand for a token. A padded embedding has more; those rows mean nothing."""
        return len(self.tokenizer)


class CachedModel:
    """A causal language model and the key-value cache of one sequence, which can roll back.

    Args:
        model: a transformers causal language model.
        vocabulary_size: logits beyond it are padding of the embedding and are dropped.
    """

    def __init__(self, model: Any, vocabulary_size: int) -> None:
        self.model = model
        self.vocabulary_size = vocabulary_size
        self.cache = DynamicCache(config=model.config)
        self.length = 0
        if not self.cache.is_croppable:
            raise SpecKVError(f"{model.config.model_type}: its cache cannot be rolled back, so it cannot speculate")
        self.cache.activate_past_recording()

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append `tokens` to the cache. Returns (len(tokens), vocabulary) float32 logits after each of them."""
        ids = torch.tensor([list(tokens)], device=self.model.device)
        logits = self.model(input_ids=ids, cache=self.cache, use_cache=True).logits
        self.length += len(tokens)
        return torch.as_tensor(logits[0, :, : self.vocabulary_size]).float()

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the cache without asking for their logits."""
        if tokens:
            ids = torch.tensor([list(tokens)], device=self.model.device)
            self.model(input_ids=ids, cache=self.cache, use_cache=True, logits_to_keep=1)
            self.length += len(tokens)

    def crop(self, length: int) -> None:
        """Forget everything behind the first `length` tokens."""
        if length < self.length:
            self.cache.crop(length - self.length)
            self.length = length


def model_name(name: str) -> str:
    """How a recording calls a model: the last part of a folder's path, or the name on the hub as it is."""
    return pathlib.Path(name).name if pathlib.Path(name).is_dir() else name
