"""What a policy would be worth, from a step log alone (rule R3): without the models, and without a rollout trace."""

from speckv.evaluation.estimates import Estimate, Evaluation, evaluate
from speckv.evaluation.recording import to_steps

__all__ = ["Estimate", "Evaluation", "evaluate", "to_steps"]
