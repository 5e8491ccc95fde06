"""What the user sets, and what of vLLM it can be set for."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from speckv import SpecKVError, runtime
from speckv.compression import COMPRESSIONS
from speckv.steplog_writer import StepLogWriter

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "speckv"
#: How vLLM names the number types of weights that were not quantised -> compression.
_OF_DTYPE = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


@dataclass(frozen=True)
class Settings:
    """What stands in vLLM's `additional_config` under `speckv`.

    Attributes:
        bundle: the folder of a policy bundle, as `speckv export POLICY --to vllm` writes it.
        log: the folder that step logs are written to; None logs nothing.
        compression: of the target, from `speckv.compression.COMPRESSIONS`; None tells it from the target's number type.
        cost_ratio: seconds of a draft forward to those of a one-token target forward, for policies that read it.
    """

    bundle: str
    log: str | None = None
    compression: str | None = None
    cost_ratio: float | None = None

    @classmethod
    def of(cls, config: "VllmConfig") -> Self | None:
        """The settings in a configuration of vLLM, None if there are none.

        Raises:
            SpecKVError: they are no settings.
        """
        additional = config.additional_config
        given = additional.get(KEY) if isinstance(additional, dict) else None
        if given is None:
            return None
        known = {field.name: (int, float) if field.name == "cost_ratio" else str for field in fields(cls)}
        if not isinstance(given, dict) or "bundle" not in given:
            raise SpecKVError(
                f"additional_config: {KEY} is {given!r}; it must be an object with the folder of a `bundle`"
            )
        for name, value in given.items():
            if name not in known:
                raise SpecKVError(f"additional_config: {KEY} has no {name!r}; it has {', '.join(known)}")
            if isinstance(value, bool) or not isinstance(value, known[name]):
                raise SpecKVError(f"additional_config: {KEY}: {name} can't be {value!r}")
        return cls(**given)

    def start(self, config: "VllmConfig") -> dict[str, Any]:
        """What every sequence is started with, by the names of `speckv.runtime.Bundle.start`.

        Raises:
            SpecKVError: the compression is missing or unknown.
        """
        model = config.model_config
        of_dtype = None if model.quantization else _OF_DTYPE.get(str(model.dtype))
        compression = self.compression or of_dtype
        if compression is None:
            weights = model.quantization or model.dtype
            raise SpecKVError(
                f"additional_config: {KEY}: compression is missing; the target's weights are {weights}; say which of "
                f"{', '.join(COMPRESSIONS)} comes nearest"
            )
        return {"compression": compression, "cost_ratio": self.cost_ratio}


def check_engine(config: "VllmConfig", settings: Settings) -> None:
    """Refuse a configuration that the policy can't be played with.

    Raises:
        SpecKVError: what is in the way, and what to set instead; or as of `speckv.runtime.load` and `StepLogWriter`.
    """
    bundle = runtime.load(settings.bundle)
    bundle.start(**settings.start(config))
    if settings.log is not None:
        StepLogWriter(settings.log)  # which makes the folder, or says why it can't
    speculative = config.speculative_config
    if speculative is None or speculative.method != "draft_model":
        found = "none" if speculative is None else repr(speculative.method)
        raise SpecKVError(f'a policy needs a draft model, and the method is {found}; set "method": "draft_model"')
    if speculative.parallel_drafting:
        raise SpecKVError("parallel_drafting drafts all tokens at once, which leaves nothing to decide; unset it")
    if config.parallel_config.data_parallel_size > 1:
        raise SpecKVError("with data parallelism vLLM drafts as many tokens on each rank; start single engines instead")
    if config.use_v2_model_runner:
        raise SpecKVError("a policy is played in vLLM's first model runner alone; set VLLM_USE_V2_MODEL_RUNNER=0")
    if config.scheduler_config.async_scheduling:
        raise SpecKVError("vLLM schedules drafts before they are made; start it with --no-async-scheduling")
    if speculative.num_speculative_tokens_per_batch_size is None:
        most = speculative.num_speculative_tokens
        raise SpecKVError(
            "vLLM expects as many drafted tokens in every step; add to the speculative_config: "
            f'"num_speculative_tokens_per_batch_size": [[1, 1, {most}]]'
        )
    if (bundle.asks or bundle.signals) and (
        speculative.use_local_argmax_reduction or speculative.use_heterogeneous_vocab
    ):
        raise SpecKVError(
            f"policy {bundle.policy!r} looks at the draft's probabilities, which use_local_argmax_reduction and "
            "use_heterogeneous_vocab hide; unset them"
        )
