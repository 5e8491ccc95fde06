"""ONNX graphs, one for each decision."""

import functools
import importlib.util
import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from speckv.errors import SpecKVError
from speckv.exporters.portable import PortableExporter
from speckv.features import FEATURES, Features
from speckv.files import write_atomically
from speckv.policy import Policy, State
from speckv.runtime import Bundle
from speckv.runtime.models import Inputs, Model, Network, Trees
from speckv.runtime.programs import Additive, Choice, GammaRule, Program, Score, Table, Threshold, Worth

if TYPE_CHECKING:
    import onnx

OPSET, TREE_OPSET, IR_VERSION = 17, 3, 8
#: What a graph remembers of a draft, as an input of the same name and an output `new_…`.
_REMEMBERED = ("survival", "goes_on")
_DECISIONS = ("choose_gamma", "draw_token", "keep_drafting")


class OnnxExporter(PortableExporter):
    """ONNX graphs, one for each decision, that take features as they are: scaling is inside the graph.

    `choose_gamma.onnx` and, for policies that decide inside the draft, `draw_token.onnx` and `keep_drafting.onnx`. All
    inputs are doubles (n,), one number a sequence, by the names of the features; the output `answer` (n,) is a whole
    number or a boolean. A graph that has the input `survival` or `goes_on` remembers something of the draft: give it 1
    at the first token, and the output `new_survival` or `new_goes_on` of the draft's last answer afterwards.
    """

    name = "onnx"
    decoder = "a host that runs ONNX"

    def check(self, policy: Policy) -> None:
        for module in ("onnx", "onnxruntime"):
            if importlib.util.find_spec(module) is None:
                raise SpecKVError(f"{module} is not installed; run: pip install 'speckv[export]'")
        super().check(policy)

    def write(self, bundle: Bundle, out: pathlib.Path) -> None:
        for decision, graph in make_graphs(bundle.program).items():
            graph.doc_string = f"{decision} of the policy {bundle.policy}"
            write_atomically(out / f"{decision}.onnx", functools.partial(_write, graph.SerializeToString()))

    def load(self, out: pathlib.Path) -> Policy:
        return OnnxPolicy(out)


def _write(content: bytes, path: pathlib.Path) -> None:
    path.write_bytes(content)


class OnnxPolicy(Policy):
    """Plays exported graphs with onnxruntime.

    Args:
        path: the folder of the graphs.

    Raises:
        SpecKVError: there are no such graphs.
    """

    name = "onnx"

    def __init__(self, path: str | pathlib.Path) -> None:
        super().__init__()
        import onnxruntime

        self.path = pathlib.Path(path)
        files = {decision: self.path / f"{decision}.onnx" for decision in _DECISIONS}
        if not files["choose_gamma"].exists():
            raise SpecKVError(f"{files['choose_gamma']}: no such file; expected an exported policy")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4  # faults are raised
        try:
            self._sessions = {
                decision: onnxruntime.InferenceSession(str(file), options) for decision, file in files.items()
                if file.exists()
            }  # fmt: skip
        except Exception as error:  # onnxruntime has a class for each fault, with nothing in common
            reason = str(error).splitlines()[0]
            raise SpecKVError(f"{self.path}: is no exported policy ({reason}); export it again") from None
        self._inputs = {
            decision: [entry.name for entry in session.get_inputs()] for decision, session in self._sessions.items()
        }
        wanted = {name for inputs in self._inputs.values() for name in inputs}
        self.features = tuple(name for name in FEATURES if name in wanted)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it never changes, and sessions can't be copied

    def overrides(self, method: str) -> bool:
        return method in self._sessions if method in _DECISIONS else super().overrides(method)

    def new_state(self, rows: int) -> State:
        return {name: np.ones(rows) for name in _REMEMBERED}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        state |= self.new_state(features.rows)
        return self._run("choose_gamma", features, state)

    def draw_token(self, features: Features, state: State) -> npt.ArrayLike:
        return self._run("draw_token", features, state)

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        return self._run("keep_drafting", features, state)

    def _run(self, decision: str, features: Features, state: State) -> npt.NDArray[Any]:
        session = self._sessions[decision]
        given = {
            name: np.ascontiguousarray(state[name] if name in _REMEMBERED else features[name])
            for name in self._inputs[decision]
        }
        names = [entry.name for entry in session.get_outputs()]
        found = dict(zip(names, session.run(None, given), strict=True))
        state |= {name: found[f"new_{name}"] for name in _REMEMBERED if f"new_{name}" in found}
        return np.asarray(found["answer"])


def make_graphs(program: Program) -> "dict[str, onnx.ModelProto]":
    """The decisions of a program as ONNX models, by their names."""
    graphs = {"choose_gamma": _Graph().gamma(program.gamma)}
    stop = program.stop
    if isinstance(stop, Worth):
        graphs |= {"draw_token": _Graph().worth(stop), "keep_drafting": _Graph().kept()}
    elif stop is not None:
        decision = "keep_drafting" if stop.drawn else "draw_token"
        graphs[decision] = _Graph().threshold(stop) if isinstance(stop, Threshold) else _Graph().score(stop)
    return graphs


class _Graph:
    """A graph that grows node by node. Values are known by their names; they are doubles unless it says otherwise."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: dict[str, Any] = {}

    def gamma(self, rule: GammaRule) -> "onnx.ModelProto":
        if isinstance(rule, Table):
            return self._done(self._integers(self._of_compression(rule.gamma)), boolean=False)
        if isinstance(rule, Additive):
            gamma, accepted = self._feature("last_gamma"), self._feature("last_accepted")
            up = self._add("Add", gamma, self._constant(rule.up))
            down = self._add("Max", self._add("Sub", gamma, self._constant(rule.down)), self._constant(rule.smallest))
            moved = self._add("Where", self._add("Equal", accepted, gamma), up, down)
            bounded = self._add("Min", moved, self._constant(rule.largest))
            answer = self._add("Where", self._is_set("is_first"), self._constant(rule.start), bounded)
            return self._done(self._integers(answer), boolean=False)
        if isinstance(rule, Choice):
            scaled = self._add("Mul", self._model(rule.model), self._constant(rule.scale))
            worth = self._add("Add", scaled, self._of_compression(rule.offset))
            best = self._add("ArgMax", worth, axis=1, keepdims=0)
            return self._done(self._add("Gather", self._constant(rule.choices, np.int64), best), boolean=False)
        opens = self._add("Greater", self._number(rule.model), self._of_compression(rule.threshold))
        cap, nothing = self._constant(rule.cap, np.int64), self._constant(0, np.int64)
        return self._done(self._add("Where", opens, cap, nothing), boolean=False)

    def threshold(self, rule: Threshold) -> "onnx.ModelProto":
        comparison = "GreaterOrEqual" if rule.above else "LessOrEqual"
        answer = self._add(comparison, self._feature(rule.signal), self._of_compression(rule.threshold))
        return self._done(self._unless_short(answer, rule.least - rule.drawn))

    def score(self, rule: Score) -> "onnx.ModelProto":
        said = self._number(rule.model)
        if rule.cumulative:
            said = self._add("Mul", self._feature("survival"), said)
        comparison = "Greater" if rule.strict else "GreaterOrEqual"
        answer = self._add(comparison, said, self._of_compression(rule.threshold))
        remembered = {"survival": said} if rule.cumulative else {}
        return self._done(self._unless_short(answer, rule.least - rule.drawn), remembered)

    def worth(self, rule: Worth) -> "onnx.ModelProto":
        size, most = rule.place.shape[1], len(rule.gain)
        index = self._add("Min", self._feature("draft_index"), self._constant(most))
        code = self._add("Mul", self._feature("compression"), self._constant(size))
        row = self._integers(self._add("Add", code, index))
        price = self._add("Gather", self._constant(rule.price.reshape(-1, most)), row)
        place = self._add("Gather", self._constant(rule.place.ravel()), row)
        survival = self._add("Mul", self._feature("survival"), self._number(rule.here))
        chance = self._add("Mul", survival, self._number(rule.ahead))
        gain = self._add("Mul", self._column(chance), self._constant(rule.gain))
        worth = self._add("ReduceMax", self._add("Sub", gain, price), axes=[1], keepdims=0)
        more = self._add("Max", worth, self._constant(0))
        draws = self._add("Greater", self._add("Add", more, survival), place)
        goes_on = self._doubles(self._add("Greater", worth, self._constant(0)))
        return self._done(draws, {"survival": survival, "goes_on": goes_on})

    def kept(self) -> "onnx.ModelProto":
        """What was decided when the token was drawn."""
        return self._done(self._is_set("goes_on"))

    def _model(self, model: Model) -> str:
        """What a model says, (n, outputs)."""
        said = self._network(model) if isinstance(model, Network) else self._trees(model)
        if model.output == "logistic":
            return self._add("Sigmoid", said)
        return self._clipped(said, 0, 1) if model.output == "unit" else said

    def _number(self, model: Model) -> str:
        """What a model with one output says, (n,)."""
        return self._add("Reshape", self._model(model), self._constant([-1], np.int64))

    def _network(self, model: Network) -> str:
        value, last = self._inputs(model.inputs), len(model.weights) - 1
        for number, (weights, biases) in enumerate(zip(model.weights, model.biases, strict=True)):
            value = self._add("Add", self._add("MatMul", value, self._constant(weights)), self._constant(biases))
            if number < last:
                value = self._add("Relu" if model.activation == "relu" else "Tanh", value)
        return value

    def _trees(self, model: Trees) -> str:
        from onnx import TensorProto

        inputs = self._add("Cast", self._inputs(model.inputs), to=TensorProto.FLOAT)
        said = self._add("TreeEnsembleRegressor", inputs, domain="ai.onnx.ml", **_ensemble(model))
        return self._doubles(said)

    def _inputs(self, inputs: Inputs) -> str:
        """What a model sees, (n, k)."""
        pairs = zip(inputs.features, inputs.transforms, strict=True)
        columns = [self._column(self._transformed(self._feature(name), how)) for name, how in pairs]
        return self._add("Concat", *columns, axis=1)

    def _transformed(self, value: str, how: str) -> str:
        if how.startswith("="):
            return self._doubles(self._add("Equal", value, self._constant(float(how[1:]))))
        if how == "log1p":
            return self._add("Log", self._add("Add", value, self._constant(1)))
        if how == "logit":
            kept = self._clipped(value, 1e-4, 1 - 1e-4)
            return self._add("Log", self._add("Div", kept, self._add("Sub", self._constant(1), kept)))
        return value if how == "none" else self._add({"log": "Log", "sqrt": "Sqrt"}[how], value)

    def _feature(self, name: str) -> str:
        """An input (n,), a feature or what is remembered."""
        from onnx import TensorProto, helper

        self.inputs[name] = helper.make_tensor_value_info(name, TensorProto.DOUBLE, ["n"])
        return name

    def _of_compression(self, table: npt.ArrayLike) -> str:
        """The entry of a table for the target's compression, (n, …)."""
        return self._add("Gather", self._constant(table), self._integers(self._feature("compression")))

    def _is_set(self, name: str) -> str:
        """Whether a feature that is 0 or 1 is 1, a boolean."""
        return self._add("Greater", self._feature(name), self._constant(0.5))

    def _unless_short(self, answer: str, least: int) -> str:
        """A boolean, but true for the first `least` tokens of a draft."""
        if least <= 0:
            return answer
        short = self._add("LessOrEqual", self._feature("draft_index"), self._constant(least))
        return self._add("Or", answer, short)

    def _constant(self, values: npt.ArrayLike, dtype: npt.DTypeLike = float) -> str:
        from onnx import numpy_helper

        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(values, dtype=dtype), name))
        return name

    def _add(self, operation: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """A node; the name of its output."""
        from onnx import helper

        name = f"{operation.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operation, list(inputs), [name], domain=domain, **attributes))
        return name

    def _column(self, value: str) -> str:
        """(n,) as (n, 1)."""
        return self._add("Unsqueeze", value, self._constant([1], np.int64))

    def _clipped(self, value: str, low: float, high: float) -> str:
        return self._add("Min", self._add("Max", value, self._constant(low)), self._constant(high))

    def _integers(self, value: str) -> str:
        from onnx import TensorProto

        return self._add("Cast", value, to=TensorProto.INT64)

    def _doubles(self, value: str) -> str:
        from onnx import TensorProto

        return self._add("Cast", value, to=TensorProto.DOUBLE)

    def _done(
        self, answer: str, remembered: Mapping[str, str] = MappingProxyType({}), boolean: bool = True
    ) -> "onnx.ModelProto":
        """The model of which these are the outputs."""
        from onnx import TensorProto, helper

        outputs = {"answer": (answer, TensorProto.BOOL if boolean else TensorProto.INT64)}
        outputs |= {f"new_{name}": (value, TensorProto.DOUBLE) for name, value in remembered.items()}
        for name, (value, _) in outputs.items():
            self.nodes.append(helper.make_node("Identity", [value], [name]))
        infos = [helper.make_tensor_value_info(name, kind, ["n"]) for name, (_, kind) in outputs.items()]
        graph = helper.make_graph(self.nodes, "decision", list(self.inputs.values()), infos, self.constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", TREE_OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="speckv")


def _ensemble(model: Trees) -> dict[str, Any]:
    """Attributes of ONNX's operator for trees."""
    nodes = [(tree, node) for tree, root in enumerate(model.root.tolist()) for node in _below(model, root)]
    trees, at = (list(part) for part in zip(*nodes, strict=True))
    leaf = model.left[at] == at
    number = {node: index for index, node in enumerate(at)}  # they have to be counted without gaps
    # Inputs are in single precision: what is at most a threshold is at most the largest such number below it.
    single = model.threshold[at].astype(np.float32)
    below = np.where(single > model.threshold[at], np.nextafter(single, np.float32(-np.inf)), single)

    def children(side: npt.NDArray[Any]) -> list[int]:
        return [0 if last else number[int(node)] for node, last in zip(side[at], leaf, strict=True)]

    outputs = model.outputs
    leaves = [(tree, node, target) for (tree, node), last in zip(nodes, leaf, strict=True) if last
              for target in range(outputs)]  # fmt: skip
    return {
        "n_targets": outputs,
        "aggregate_function": "SUM",
        "base_values": model.start.tolist(),
        "nodes_treeids": trees,
        "nodes_nodeids": list(number.values()),
        "nodes_modes": ["LEAF" if last else "BRANCH_LEQ" for last in leaf],
        "nodes_featureids": np.where(leaf, 0, model.feature[at]).tolist(),
        "nodes_values": np.where(leaf, 0, below).tolist(),
        "nodes_truenodeids": children(model.left),
        "nodes_falsenodeids": children(model.right),
        "nodes_missing_value_tracks_true": [0] * len(at),
        "target_treeids": [tree for tree, _, _ in leaves],
        "target_nodeids": [number[node] for _, node, _ in leaves],
        "target_ids": [target for _, _, target in leaves],
        "target_weights": [float(model.value[node, target]) for _, node, target in leaves],
    }


def _below(model: Trees, root: int) -> list[int]:
    """A node and all below it."""
    found = [root]
    for node in found:
        if model.left[node] != node:
            found += [int(model.left[node]), int(model.right[node])]
    return found
