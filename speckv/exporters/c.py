"""A C header, for hosts without Python such as llama.cpp."""

import ctypes
import pathlib
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from speckv.compression import COMPRESSIONS
from speckv.errors import SpecKVError
from speckv.exporters.portable import PortableExporter, RowByRow
from speckv.features import FEATURES
from speckv.files import write_atomically
from speckv.policy import Policy
from speckv.runtime import Bundle
from speckv.runtime.models import Inputs, Model, Network
from speckv.runtime.programs import LONGEST, Additive, Choice, Draft, GammaRule, Program, Score, StopRule, Table
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
_TRANSFORMS = {"none": "{}", "log": "log({})", "log1p": "log1p({})", "logit": "speckv_logit({})", "sqrt": "sqrt({})"}


def _inputs(inputs: Inputs, cast: str = "") -> str:
    forms = [f"{{}} == {how[1:]}" if how.startswith("=") else _TRANSFORMS[how] for how in inputs.transforms]
    parts = [form.format(f"s->{name}") for form, name in zip(forms, inputs.features, strict=True)]
    return ", ".join(f"{cast}({part})" if cast else part for part in parts)


def _number(value: float) -> str:
    return repr(float(value)).replace("inf", "INFINITY")


class _Sequence(ctypes.Structure):
    """`speckv_sequence`, without what only `speckv_observe` reads."""

    _fields_ = [
        *((name, ctypes.c_double) for name in _FIELDS),
        ("survival", ctypes.c_double),
        ("goes_on", ctypes.c_int),
        ("accepted", ctypes.c_double),
        ("tried", ctypes.c_double),
        ("entropies", ctypes.c_double * LONGEST),
        ("top1s", ctypes.c_double * LONGEST),
    ]


#: What makes a library of a header, for Python to call.
_LIBRARY = f"""#include "{HEADER}"
const char *policy(void) {{ return SPECKV_POLICY; }}
const char *reads(void) {{ return SPECKV_READS; }}
const char *asks(void) {{ return SPECKV_ASKS; }}
int gamma_of(speckv_sequence *s) {{ return speckv_gamma_rule(s); }}
int draws(speckv_sequence *s) {{ return speckv_draw_rule(s); }}
int keeps(speckv_sequence *s) {{ return speckv_keep_rule(s); }}
"""


def load_header(path: pathlib.Path) -> Policy:
    """Compile a header, and play it as a policy.

    Raises:
        SpecKVError: there is no C compiler, or the header can't be compiled.
    """
    if not path.exists():
        raise SpecKVError(f"{path}: no such file; expected an exported policy")
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(path, pathlib.Path(folder))
    for name in ("policy", "reads", "asks"):
        getattr(library, name).restype = ctypes.c_char_p
    policy, reads, asks = (getattr(library, name)().decode() for name in ("policy", "reads", "asks"))

    def ask(function: Any, values: dict[str, float], draft: Draft) -> int:
        sequence = _Sequence(survival=draft.survival, goes_on=draft.goes_on, **values)
        answer = int(function(ctypes.byref(sequence)))
        draft.survival, draft.goes_on = sequence.survival, bool(sequence.goes_on)
        return answer

    return RowByRow(
        policy,
        tuple(reads.split(",")),
        asks or None,
        gamma=lambda values, draft: ask(library.gamma_of, values, draft),
        draws=lambda values, draft: bool(ask(library.draws, values, draft)),
        keeps=lambda values, draft: bool(ask(library.keeps, values, draft)),
    )


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
