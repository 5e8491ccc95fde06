"""What the whole code base promises: light imports, no pickle, documented names, known prompt files."""

import dataclasses
import importlib
import json
import os
import pathlib
import pickle
import re
import subprocess
import sys

import pytest

import speckv
from speckv.errors import SpecKVError
from speckv.features import FEATURES, TOKEN_SIGNALS
from speckv.plugins import make_policy
from speckv.prompts import load_prompts
from speckv.saving import load_policy, save_policy
from speckv.traces import DRAFT_SIGNALS, TARGET_SIGNALS

ROOT = pathlib.Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "sklearn", "scipy.stats", "stable_baselines3", "matplotlib", "pyarrow")
PROGRAM = """
import sys
{code}
print([name for name in {heavy} if name in sys.modules])
"""


@pytest.mark.parametrize(
    "code",
    [
        "import speckv",
        "from click.testing import CliRunner; from speckv.cli import main\n"
        "assert 'compare' in CliRunner().invoke(main, ['--help']).output",
    ],
    ids=["import", "help"],
)
def test_imports_nothing_heavy(code):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(code=code, heavy=HEAVY)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


UNSAFE = re.compile(
    r"\b(c?[pP]ickle|dill|marshal|shelve)\b|joblib(\.| import )(load|dump)|torch\.(load|save)\(|allow_pickle"
    r"|weights_only=False"
)


def test_no_pickle_in_the_sources():
    sources = [path for folder in ("speckv", "policies", "envs", "plugins") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 25
    found = []
    for path in sources:
        code = path.read_text(encoding="utf-8")
        # Prose may say that there is none.
        found += [f"{path}: {match.group()}" for match in UNSAFE.finditer(re.sub(r'"""[\s\S]*?"""|#.*', "", code))]
    assert found == []


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from joblib import load", "torch.load(path)", "np.load(path, allow_pickle=True)", "import dill"],
)
def test_the_search_would_find_it(line):
    assert UNSAFE.search(line)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


@pytest.mark.parametrize("file", ["policy.json", "policy.safetensors"])
def test_a_pickle_is_refused_and_not_run(file, tmp_path):
    mark = tmp_path / "exploded"
    save_policy(make_policy("confidence"), tmp_path / "saved")
    load_policy(tmp_path / "saved")
    bomb = pickle.dumps(Bomb(mark))
    (tmp_path / "saved" / file).write_bytes(bomb)
    with pytest.raises(SpecKVError) as caught:
        load_policy(tmp_path / "saved")
    assert str(tmp_path / "saved") in str(caught.value) and "\n" not in str(caught.value)
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists(), "the bomb is a dud, and the test above shows nothing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema version 2 is newer than 1"),
        ({"format": "another"}, "is not a saved policy"),
        ({"policy": "fixd"}, "did you mean 'fixed'"),
        ({"params": {"gama": 1}}, "is not a whole saved policy"),
        ({"params": None}, "is not a whole saved policy"),
    ],
)
def test_a_saved_policy_that_is_none(change, message, tmp_path):
    save_policy(make_policy("fixed"), tmp_path / "saved")
    path = tmp_path / "saved" / "policy.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SpecKVError, match=message):
        load_policy(tmp_path / "saved")


def test_a_saved_policy_is_not_overwritten(tmp_path):
    save_policy(make_policy("fixed:gamma=2"), tmp_path / "saved")
    with pytest.raises(SpecKVError, match="holds a policy already"):
        save_policy(make_policy("fixed:gamma=3"), tmp_path / "saved")
    assert load_policy(tmp_path / "saved").get_params() == {"gamma": 2}
    (tmp_path / "saved" / "policy.safetensors").unlink()
    with pytest.raises(SpecKVError, match="is not a whole saved policy"):
        load_policy(tmp_path / "saved")


def test_public_names():
    assert sorted(speckv.__all__) == sorted(speckv._PUBLIC) == speckv.__all__
    for name in set(speckv.__all__) - {"SpeculativeDecoder"}:  # which needs torch
        assert getattr(speckv, name) is getattr(importlib.import_module(speckv._PUBLIC[name]), name)
        assert name in dir(speckv)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        speckv.nothing  # noqa: B018


def test_every_feature_has_a_unit_and_a_description():
    assert len(FEATURES) > 15
    for name, feature in FEATURES.items():
        assert feature.name == name and feature.unit and len(feature.description) > 8
        assert feature.when in {"before", "distribution", "drawn"}
        assert (name in TOKEN_SIGNALS or name in {"draft_index", "draft_token"}) == (feature.when != "before")
    assert set(TOKEN_SIGNALS.values()) == set(DRAFT_SIGNALS)
    assert all(unit for unit in (DRAFT_SIGNALS | TARGET_SIGNALS).values())


PROMPTS = {
    '{"id": "a", "task": "code", "prompt": "Sort."}': ("a", "code", "Sort."),
    '{"id": 7, "task": "chat", "turns": ["Hi", "And?"]}': ("7", "chat", "Hi"),
    '{"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": []}':
        ("81", "writing", "Write."),
    '{"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f", "test": ""}':
        ("HumanEval/0", "code", "def f():"),
    '{"question": "2 + 2?", "answer": "#### 4"}': ("gsm8k-6", "math", "2 + 2?"),
}  # fmt: skip


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_prompt_files_of_public_benchmarks(encoding, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = list(PROMPTS)
    path.write_text("\n".join([*lines[:4], "", lines[4]]) + "\n", encoding=encoding)
    assert [(prompt.id, prompt.task, prompt.text) for prompt in load_prompts(path)] == list(PROMPTS.values())


@pytest.mark.parametrize("letter", ["\u2028", "\x85", "\u2029"])
def test_a_prompt_may_hold_what_unicode_calls_a_line_break(letter, tmp_path):
    path = tmp_path / "prompts.jsonl"
    text = f"One{letter}two"
    path.write_text(json.dumps({"id": "a", "task": "chat", "prompt": text}, ensure_ascii=False), encoding="utf-8")
    assert [prompt.text for prompt in load_prompts(path)] == [text]


def test_the_shipped_prompts():
    from speckv.shipped import PROMPTS as shipped

    prompts = load_prompts(shipped)
    tasks = [prompt.task for prompt in prompts]
    assert set(tasks) == {"code", "math", "chat", "summarization"}
    assert min(tasks.count(task) for task in set(tasks)) >= 20


@pytest.mark.parametrize(
    "module", ["costs", "steplogs", "bounds", "policy", "runtime.bundle", "runtime.programs", "runtime.models"]
)
def test_what_holds_arrays_is_equal_to_itself_alone(module):
    """A comparison of arrays has no truth value, and arrays have no hash."""
    loaded = importlib.import_module(f"speckv.{module}")
    classes = [value for value in vars(loaded).values() if dataclasses.is_dataclass(value)]
    holders = [
        cls.__name__
        for cls in classes
        if cls.__module__ == loaded.__name__
        and any(
            word in str(item.type)
            for item in dataclasses.fields(cls)
            for word in ("Array", "ndarray", "Timings", "Program")
        )
    ]
    assert holders
    assert [name for name in holders if getattr(loaded, name).__eq__ is not object.__eq__] == []
