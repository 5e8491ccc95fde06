"""Counters of speculation for Prometheus, under the names that vLLM gives them, so that its dashboards fit."""

from typing import TYPE_CHECKING, Any, ClassVar

from speckv.errors import SpecKVError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class SpeculationMetrics:
    """Counts the steps of live decoders. Hand it to them as one of their `logs`, and serve its registry:

        metrics = SpeculationMetrics("my-model")
        decoder = SpeculativeDecoder(target, draft, policy, logs=[metrics])
        prometheus_client.start_http_server(8000)

    `vllm:spec_decode_num_drafts` counts the steps in which something was drafted, `…_num_draft_tokens` and
    `…_num_accepted_tokens` their tokens, and `…_num_accepted_tokens_per_pos`, with the label `position`, how often the
    token at each place of the draft, from 0, was accepted. Prometheus puts `_total` behind the names.

    Args:
        model_name: the value of the label `model_name`.
        engine: that of the label `engine`.
        registry: of prometheus_client; by default its own global one. In a registry each name can stand once: one
            object counts for all decoders of a process.

    Raises:
        SpecKVError: prometheus_client is not installed, or the registry has these names already.
    """

    wants_features: ClassVar[bool] = False

    def __init__(self, model_name: str, engine: str = "0", registry: "CollectorRegistry | None" = None) -> None:
        try:
            from prometheus_client import REGISTRY, Counter
        except ModuleNotFoundError:
            raise SpecKVError("metrics need prometheus_client; pip install 'speckv[serve]'") from None

        def count(what: str, about: str, *labels: str) -> Any:
            names = ("model_name", "engine", *labels)
            try:
                counter = Counter(f"vllm:spec_decode_num_{what}", about, names, registry=registry or REGISTRY)
            except ValueError as error:
                raise SpecKVError(
                    f"{error}; share one SpeculationMetrics, or give each a registry of its own"
                ) from None
            return counter if labels else counter.labels(model_name, engine)

        self._labels = model_name, engine
        self._drafts = count("drafts", "Steps in which tokens were drafted.")
        self._drafted = count("draft_tokens", "Tokens that were drafted.")
        self._accepted = count("accepted_tokens", "Drafted tokens that the target agreed with.")
        self._per_position = count("accepted_tokens_per_pos", "The same by their place in the draft.", "position")

    def write(self, *, gamma: int, accepted: int, **others: Any) -> None:
        """Count one step, of which the rest does not matter here."""
        if not gamma:
            return
        self._drafts.inc()
        self._drafted.inc(gamma)
        self._accepted.inc(accepted)
        for place in range(gamma):  # one of which nothing was accepted yet stands there with 0
            self._per_position.labels(*self._labels, place).inc(place < accepted)
