"""A SpecKV policy inside vLLM: it says at every step of the engine how many tokens the draft model drafts.

vLLM finds `register` through the entry-point group `vllm.general_plugins`, and calls it in each of its processes. What
is to be played stands in vLLM's `additional_config` under `speckv`, see `speckv_vllm.settings.Settings`; without that,
vLLM drafts as it always does.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["register"]


@functools.cache
def register() -> None:
    """Put the proposer in place of vLLM's own, and have each configuration of an engine checked that names a policy."""
    from vllm.config import VllmConfig
    from vllm.v1.spec_decode import draft_model

    from speckv_vllm.proposer import PolicyProposer

    # The model runner takes the class from its module when it is imported, which a process may do before or after this.
    draft_model.DraftModelProposer = PolicyProposer
    if runner := sys.modules.get("vllm.v1.worker.gpu_model_runner"):
        runner.DraftModelProposer = PolicyProposer  # type: ignore[attr-defined]
    VllmConfig.__post_init__ = _checked(VllmConfig.__post_init__)


def _checked(post_init: Callable[..., None]) -> Callable[..., None]:
    """What completes a configuration, and then refuses one that the policy can't be played with.

    A server says so in its first process, before it loads a model. Where the proposer is never made it says so, too.
    For the draft vLLM completes another one, whose model is the draft's: the settings are those of the target.
    """
    from speckv_vllm.settings import Settings, check_engine

    @functools.wraps(post_init)
    def completed(self: Any, *args: Any, **kwargs: Any) -> None:
        post_init(self, *args, **kwargs)
        of = self.speculative_config
        of_draft = of and self.model_config is of.draft_model_config is not of.target_model_config
        if not of_draft and (settings := Settings.of(self)):
            check_engine(self, settings)

    return completed
