"""A hazard of small neural networks, weighed against measured cost."""

from typing import Any

import numpy as np
import numpy.typing as npt

from speckv.errors import SpecKVError
from speckv.features import FloatArray
from speckv.runtime.models import Inputs, Model, Network
from speckv_policies.estimators import logit, share_of, sigmoid
from speckv_policies.parameters import check_count, check_range
from speckv_policies.stopping import Examples, Kind, SurvivalStop


class NeuralHazard(SurvivalStop):
    """Drafts on while the next tokens are worth their time; the chances are networks with one hidden layer.

    torch fits them (Adam, all examples at once, cross-entropy); decisions are made in NumPy.

    Args:
        hidden: units of the hidden layer, from 1.
        epochs: passes over the training tokens, from 1.
        weight_decay: 0 or more.
    """

    name = "neural-hazard"
    requires = ("torch",)
    extra = "live"
    source = "`hazard` with small networks for its regressions is ours"

    def __init__(self, hidden: int = 8, epochs: int = 200, weight_decay: float = 0.001) -> None:
        super().__init__()
        check_count(1, hidden=hidden, epochs=epochs)
        check_range(0, weight_decay=weight_decay)
        self.hidden, self.epochs, self.weight_decay = hidden, epochs, weight_decay

    def learn(self, kind: Kind, examples: Examples, seed: int) -> dict[str, npt.NDArray[Any]]:
        if (reason := self.untrainable) is not None:
            raise SpecKVError(f"policy {self.label!r} {reason}, or load a trained one")
        import torch

        names = [f"{kind}_{part}" for part in ("hidden", "hidden_bias", "out", "out_bias")]
        if examples.right.all() or not examples.right.any():  # one class only, or nothing
            nothing = (np.zeros((examples.inputs.shape[1], self.hidden)), np.zeros(self.hidden), np.zeros(self.hidden))
            return dict(zip(names, (*nothing, logit(share_of(examples.right)[None])), strict=True))
        center, scale = examples.inputs.mean(axis=0), examples.inputs.std(axis=0)
        scale[scale == 0] = 1.0
        inputs = torch.from_numpy((examples.inputs - center) / scale)
        right = torch.from_numpy(examples.right.astype(float))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = torch.nn.Sequential(
                torch.nn.Linear(inputs.shape[1], self.hidden), torch.nn.Tanh(), torch.nn.Linear(self.hidden, 1)
            ).double()
        optimiser = torch.optim.Adam(model.parameters(), lr=0.03, weight_decay=self.weight_decay)
        loss_of = torch.nn.BCEWithLogitsLoss()
        for _ in range(self.epochs):
            optimiser.zero_grad()
            loss_of(model(inputs)[:, 0], right).backward()
            optimiser.step()
        hidden, hidden_bias, out, out_bias = (parameter.detach().numpy() for parameter in model.parameters())
        hidden = hidden.T / scale[:, None]  # the scaling is folded into the first layer
        return dict(zip(names, (hidden, hidden_bias - center @ hidden, out[0], out_bias), strict=True))

    def chance(self, kind: Kind, inputs: FloatArray) -> FloatArray:
        weights, bias, out, out_bias = (
            self.fitted[f"{kind}_{part}"] for part in ("hidden", "hidden_bias", "out", "out_bias")
        )
        return sigmoid(np.tanh(inputs @ weights + bias) @ out + out_bias)

    def model(self, kind: Kind, inputs: Inputs) -> Model:
        weights, bias, out, out_bias = (
            self.fitted[f"{kind}_{part}"] for part in ("hidden", "hidden_bias", "out", "out_bias")
        )
        return Network(inputs, (weights, out[:, None]), (bias, out_bias), "tanh", output="logistic")
