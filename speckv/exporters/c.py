"""A C header, for hosts without Python such as llama.cpp."""

import ctypes
import pathlib
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from speckv.compression import COMPRESSIONS
from speckv.errors import SpecKVError
from speckv.exporters.portable import PortableExporter
from speckv.features import FEATURES, Features, FloatArray, IntArray, signal_of
from speckv.files import write_atomically
from speckv.policy import Outcome, Policy, State
from speckv.runtime import Bundle
from speckv.runtime.models import TINY, Inputs, Model, Network
from speckv.runtime.programs import LONGEST, Additive, Choice, GammaRule, Program, Score, StopRule, Table
from speckv.runtime.programs import Threshold as ThresholdRule

HEADER = "speckv_policy.h"
_TEMPLATE = pathlib.Path(__file__).with_name("policy.h")
#: What a sequence knows; a token's id is not among it.
_FIELDS = tuple(name for name in FEATURES if name != "draft_token")


class CExporter(PortableExporter):
    """One header of C99 that depends on nothing and allocates nothing; how to call it is written at its beginning.

    What was written is compiled and replayed, for which a C compiler is needed.
    """

    name = "c"
    decoder = "a host written in C or C++"

    def check(self, policy: Policy) -> None:
        _compiler()
        super().check(policy)

    def write(self, bundle: Bundle, out: pathlib.Path) -> None:
        text = make_header(bundle)
        write_atomically(out / HEADER, lambda partial: partial.write_text(text, encoding="utf-8"))

    def load(self, out: pathlib.Path) -> Policy:
        return load_header(out / HEADER)


def make_header(bundle: Bundle) -> str:
    """A portable policy as the text of a header."""
    code = _Code()
    code.rules(bundle.program)
    facts = {
        "SPECKV_POLICY": _quoted(bundle.policy),
        "SPECKV_READS": _quoted(",".join(bundle.program.features)),
        "SPECKV_ASKS": _quoted(bundle.asks or ""),
        "SPECKV_LONGEST": f"{LONGEST}  /* tokens of the longest draft */",
    }
    for number, (name, text) in enumerate(COMPRESSIONS.items()):
        facts[f"SPECKV_{name.upper()}"] = f"{number}  /* {text} */"
    parts = {
        "FACTS": "\n".join(f"#define {name} {value}" for name, value in facts.items()),
        "FIELDS": "\n".join(f"    double {name};  /* {FEATURES[name].unit} */" for name in _FIELDS),
        "TABLES": "\n".join(code.tables),
        "RULES": "\n\n".join(code.functions),
    }
    text = _TEMPLATE.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return text


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ").replace("?", "\\?") + '"'


class _Code:
    """Tables and functions of a header."""

    def __init__(self) -> None:
        self.tables: list[str] = []
        self.functions: list[str] = []

    def rules(self, program: Program) -> None:
        self._function("gamma_rule", self._gamma(program.gamma))
        draws, keeps = self._stop(program.stop)
        self._function("draw_rule", draws)
        self._function("keep_rule", keeps)

    def _function(self, name: str, lines: Iterable[str]) -> None:
        body = "\n".join(f"    {line}" for line in ("(void)s;", *lines))
        self.functions.append(f"static inline int speckv_{name}(speckv_sequence *s)\n{{\n{body}\n}}")

    def _gamma(self, rule: GammaRule) -> list[str]:
        if isinstance(rule, Table):
            return [f"return (int){self._of_compression(rule.gamma)};"]
        if isinstance(rule, Additive):
            return [
                f"if (s->is_first) return {rule.start};",
                "return (int)speckv_min(s->last_accepted == s->last_gamma",
                f"                           ? s->last_gamma + {rule.up}",
                f"                           : speckv_max(s->last_gamma - {rule.down}, {rule.smallest}),",
                f"                       {rule.largest});",
            ]
        if isinstance(rule, Choice):
            size = len(rule.choices)
            offset = self._of_compression(rule.offset)
            return [
                f"double said[{size}], best = -INFINITY;",
                "int i, chosen = 0;",
                f"{self._model(rule.model)}(s, said);",
                f"for (i = 0; i < {size}; i++) {{",
                f"    const double worth = {self._table(rule.scale)}[i] * said[i] + {offset}[i];",
                "    if (worth > best) { best = worth; chosen = i; }",
                "}",
                f"return (int){self._table(rule.choices)}[chosen];",
            ]
        threshold = self._of_compression(rule.threshold)
        return [
            "double said[1];",
            f"{self._model(rule.model)}(s, said);",
            f"return said[0] > {threshold} ? {rule.cap} : 0;",
        ]

    def _stop(self, rule: StopRule | None) -> tuple[list[str], list[str]]:
        """Bodies of `draw_token` and `keep_drafting`."""
        always = ["return 1;"]
        if rule is None:
            return always, always
        if isinstance(rule, ThresholdRule):
            sign = ">=" if rule.above else "<="
            lines = [f"if (s->draft_index <= {rule.least - rule.drawn}) return 1;"] if rule.least > 0 else []
            lines.append(f"return s->{rule.signal} {sign} {self._of_compression(rule.threshold)};")
            return (always, lines) if rule.drawn else (lines, always)
        if isinstance(rule, Score):
            lines = [
                "double said[1];",
                f"{self._model(rule.model)}(s, said);",
                *(["said[0] = s->survival = s->survival * said[0];"] if rule.cumulative else []),
                f"return said[0] {'>' if rule.strict else '>='} {self._of_compression(rule.threshold)}",
                f"    || s->draft_index <= {rule.least - rule.drawn};",
            ]
            return (always, lines) if rule.drawn else (lines, always)
        most = len(rule.gain)
        return [
            f"const int drafted = (int)speckv_min(s->draft_index, {most});",
            f"const double *price = {self._of_compression(rule.price)} + drafted * {most};",
            "double here[1], ahead[1], worth = -INFINITY;",
            "int i;",
            f"{self._model(rule.here)}(s, here);",
            f"{self._model(rule.ahead)}(s, ahead);",
            "s->survival *= here[0];",
            f"for (i = 0; i < {most}; i++)",
            f"    worth = speckv_max(worth, s->survival * ahead[0] * {self._table(rule.gain)}[i] - price[i]);",
            "s->goes_on = worth > 0;",
            f"return speckv_max(worth, 0) + s->survival > {self._of_compression(rule.place)}[drafted];",
        ], ["return s->goes_on;"]

    def _model(self, model: Model) -> str:
        """The name of a function that writes what a model says to its second argument."""
        lines = self._network(model) if isinstance(model, Network) else self._trees(model)
        name = f"speckv_model_{len(self.functions)}"
        body = "\n".join(f"    {line}" for line in lines)
        self.functions.append(f"static inline void {name}(const speckv_sequence *s, double *said)\n{{\n{body}\n}}")
        return name

    def _network(self, model: Network) -> list[str]:
        lines = ["int i, j;", f"const double x0[] = {{{_inputs(model.inputs)}}};"]
        sizes = [len(model.inputs.features), *(len(bias) for bias in model.biases)]
        lines += [f"double x{number}[{size}];" for number, size in enumerate(sizes[1:-1], 1)]
        last = len(model.weights) - 1
        for number, (weights, biases) in enumerate(zip(model.weights, model.biases, strict=True)):
            before, size = sizes[number], sizes[number + 1]
            to = "said" if number == last else f"x{number + 1}"
            finish = _OUTPUTS[model.output] if number == last else _ACTIVATIONS[model.activation]
            lines += [
                f"for (j = 0; j < {size}; j++) {{",
                f"    double sum = {self._table(biases)}[j];",
                f"    for (i = 0; i < {before}; i++) sum += x{number}[i] * {self._table(weights.T)}[j * {before} + i];",
                f"    {to}[j] = {finish};",
                "}",
            ]
        return lines

    def _trees(self, model: Any) -> list[str]:
        left, right, feature = (self._integers(part) for part in (model.left, model.right, model.feature))
        threshold, size = self._table(model.threshold), model.outputs
        return [
            "int t, j;",
            f"const float x[] = {{{_inputs(model.inputs, '(float)')}}};",
            f"for (j = 0; j < {size}; j++) said[j] = {self._table(model.start)}[j];",
            f"for (t = 0; t < {len(model.root)}; t++) {{",
            f"    int node = {self._integers(model.root)}[t];",
            f"    while ({left}[node] != node)",
            f"        node = x[{feature}[node]] <= {threshold}[node] ? {left}[node] : {right}[node];",
            f"    for (j = 0; j < {size}; j++) said[j] += {self._table(model.value)}[node * {size} + j];",
            "}",
            f"for (j = 0; j < {size}; j++) {{ const double sum = said[j]; said[j] = {_OUTPUTS[model.output]}; }}",
        ]

    def _of_compression(self, table: npt.NDArray[Any]) -> str:
        """The entry of a table, or where its entries begin, for the target's compression."""
        width = int(np.prod(table.shape[1:]))
        if table.ndim == 1:
            return f"{self._table(table)}[(int)s->compression]"
        return f"({self._table(table)} + (int)s->compression * {width})"

    def _table(self, values: npt.NDArray[Any]) -> str:
        return self._array("double", (_number(value) for value in np.ravel(values).tolist()))

    def _integers(self, values: npt.NDArray[Any]) -> str:
        return self._array("int", map(str, np.ravel(values).tolist()))

    def _array(self, kind: str, values: Iterable[str]) -> str:
        name = f"speckv_table_{len(self.tables)}"
        rows = textwrap.fill(", ".join(values), 118, initial_indent="    ", subsequent_indent="    ")
        self.tables.append(f"static const {kind} {name}[] = {{\n{rows}}};")
        return name


_ACTIVATIONS = {"relu": "speckv_max(sum, 0)", "tanh": "tanh(sum)"}
_OUTPUTS = {"linear": "sum", "logistic": "speckv_sigmoid(sum)", "unit": "speckv_min(speckv_max(sum, 0), 1)"}
_TRANSFORMS = {
    "none": "{}",
    "log": f"log(speckv_max({TINY!r}, {{}}))",
    "log1p": "log1p({})",
    "logit": "speckv_logit({})",
    "sqrt": "sqrt(speckv_max(0, {}))",
}


def _inputs(inputs: Inputs, cast: str = "") -> str:
    forms = [f"{{}} == {how[1:]} ? 1.0 : 0.0" if how.startswith("=") else _TRANSFORMS[how] for how in inputs.transforms]
    parts = [form.format(f"s->{name}") for form, name in zip(forms, inputs.features, strict=True)]
    return ", ".join(f"{cast}({part})" if cast else part for part in parts)


def _number(value: float) -> str:
    return repr(float(value)).replace("inf", "INFINITY")


#: What makes a library of a header: its own functions, each for n sequences in a row.
_LIBRARY = f"""#include "{HEADER}"
const char *policy(void) {{ return SPECKV_POLICY; }}
const char *reads(void) {{ return SPECKV_READS; }}
const char *asks(void) {{ return SPECKV_ASKS; }}
int size(void) {{ return (int)sizeof(speckv_sequence); }}
void start(speckv_sequence *s, int n, const double *length, const double *compression, const double *ratio)
{{
    for (; n--; s++) speckv_start(s, (int)*length++, (int)*compression++, *ratio++);
}}
void choose_gamma(speckv_sequence *s, int n, int *answer, const double *size)
{{
    for (; n--; s++) *answer++ = speckv_choose_gamma(s, (int)*size++);
}}
void draw_token(speckv_sequence *s, int n, int *answer, const double *a, const double *b, const double *c,
                const double *d)
{{
    for (; n--; s++) *answer++ = speckv_draw_token(s, *a++, *b++, *c++, *d++);
}}
void keep_drafting(speckv_sequence *s, int n, int *answer, const double *p)
{{
    for (; n--; s++) *answer++ = speckv_keep_drafting(s, *p++);
}}
void observe(speckv_sequence *s, int n, const double *drafted, const double *accepted, const double *a, const double *b)
{{
    for (; n--; s++) speckv_observe(s, (int)*drafted++, (int)*accepted++, *a++, *b++);
}}
"""
#: What a host tells a header, the rest of the features it keeps itself.
_TOLD = ("context_length", "compression", "cost_ratio", "batch_size", "target_entropy", "target_margin")
_SIGNALS = ("draft_entropy", "draft_top1", "draft_top2", "draft_top10")


class HeaderPolicy(Policy):
    """A compiled header as a policy: its own functions keep the features of each sequence, told what a host would tell.

    Args:
        library: of a header.
    """

    name = "portable"

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        for name in ("policy", "reads", "asks"):
            getattr(library, name).restype = ctypes.c_char_p
        self._label, self._asks = str(library.policy(), "utf-8"), str(library.asks(), "utf-8")
        names = str(library.reads(), "utf-8").split(",")
        last = {str(signal_of(name)) for name in names if FEATURES[name].when == "before" and signal_of(name)}
        shown = {*names, *last} & {*_TOLD, *_SIGNALS, "draft_probability"}
        self.features = tuple(name for name in FEATURES if name in shown)
        # What only tokens that are gone on from are asked about can be told then; else each token has to be told of.
        self._tells = bool(last) or self._asks in {"draw_token", "both"}
        self._size = int(library.size())
        # Copies of a policy share the library, which can't be copied; functions are not.
        self._call: Callable[..., Any] = lambda function, *arguments: getattr(library, function)(*arguments)

    @property
    def label(self) -> str:
        return self._label

    def overrides(self, method: str) -> bool:
        if method == "draw_token":
            return self._tells
        if method == "keep_drafting":
            return self._asks in {"keep_drafting", "both"}
        return super().overrides(method)

    def new_state(self, rows: int) -> State:
        return {
            "sequence": np.zeros((rows, self._size), dtype=np.uint8),
            "started": np.zeros(rows, dtype=bool),
            "drafted": np.zeros(rows),
            "accepted": np.zeros(rows),
        }

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        """Also starts the sequence, or takes in the step before: what the target said of it is only known now."""
        seen = [self._told(features, name) for name in _TOLD]
        fresh = ~state["started"]
        for rows, function, columns in (
            (fresh, "start", seen[:3]),
            (~fresh, "observe", [state["drafted"], state["accepted"], *seen[4:]]),
        ):
            part = {"sequence": state["sequence"][rows]}
            self._tell(function, part, [column[rows] for column in columns])
            state["sequence"][rows] = part["sequence"]
        state["started"][:] = True
        return self._ask("choose_gamma", state, seen[3:4])

    def draw_token(self, features: Features, state: State) -> npt.ArrayLike:
        return self._ask("draw_token", state, [self._told(features, name) for name in _SIGNALS]).astype(bool)

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        if not self._tells:
            self.draw_token(features, state)
        return self._ask("keep_drafting", state, [self._told(features, "draft_probability")]).astype(bool)

    def observe(self, outcome: Outcome, state: State) -> None:
        state["drafted"], state["accepted"] = outcome.drafted.astype(float), outcome.accepted.astype(float)

    def _told(self, features: Features, name: str) -> FloatArray:
        """What the policy does not look at is 0."""
        return features[name] if name in self.features else np.zeros(features.rows)

    def _ask(self, function: str, state: State, columns: list[FloatArray]) -> IntArray:
        answers = np.zeros(len(state["sequence"]), dtype=np.intc)
        self._tell(function, state, [answers, *columns])
        return answers.astype(np.int64)

    def _tell(self, function: str, state: State, columns: Sequence[npt.NDArray[Any]]) -> None:
        """Call a function of the library on sequences, in place, with arrays of as many entries."""
        sequences = state["sequence"] = np.ascontiguousarray(state["sequence"])
        arrays = [np.ascontiguousarray(column) for column in columns]
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (sequences, *arrays)]
        self._call(function, pointers[0], len(sequences), *pointers[1:])


def load_header(path: pathlib.Path) -> Policy:
    """Compile a header, and play it as a policy.

    Raises:
        SpecKVError: there is no C compiler, or the header can't be compiled.
    """
    if not path.exists():
        raise SpecKVError(f"{path}: no such file; expected an exported policy")
    with tempfile.TemporaryDirectory() as folder:
        return HeaderPolicy(compile_library(path, pathlib.Path(folder)))


def compile_library(header: pathlib.Path, folder: pathlib.Path) -> ctypes.CDLL:
    """Compile a header to a library in a folder, and load it.

    Raises:
        SpecKVError: there is no C compiler, or it refuses the header.
    """
    (folder / "policy.c").write_text(_LIBRARY, encoding="utf-8")
    command = [_compiler(), "-std=c99", "-O2", "-shared", "-fPIC", f"-I{header.parent.resolve()}"]
    done = subprocess.run(
        [*command, "-o", "policy.so", "policy.c", "-lm"], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), "the compiler refuses it")
        raise SpecKVError(f"{header}: is no exported policy ({first.strip()}); export it again")
    return ctypes.CDLL(str(folder / "policy.so"))


def _compiler() -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SpecKVError("there is no C compiler to check an exported header with; install gcc")
    return compiler
