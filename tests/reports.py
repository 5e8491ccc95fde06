"""A small result with all that a report of it needs, in a folder."""

import json
import pathlib

from speckv.comparison import REQUIRED, compare
from speckv.files import write_json
from speckv.plugins import make_policy
from speckv.vocabulary import Vocabulary

from .synthetic import make_costs, make_sequences, write_dataset

BUDGET = 24
#: Among what a report replays, one policy with a model of acceptance and one without.
SPECS = ("disco", "confidence:threshold=0.6")
TIMES = {name: (1e-5, 1e-6) for name in ("none", "fixed", "best-fixed", "disco", "confidence")}
#: What a token must not do to a page, in one of each four tokens.
HOSTILE = '</script><script>document.title = "broken"</script>&<!--'


def make_report_folder(folder: pathlib.Path) -> pathlib.Path:
    """`traces/` with a vocabulary, `one.json` and `dear.json` with costs, and `result.json`."""
    dataset = write_dataset(folder / "traces", make_sequences(prompts=15, budget=BUDGET), budget=BUDGET, draft="small")
    tokens = {token: f" w{token}".encode() for token in range(1002)}
    tokens |= {token: HOSTILE.encode() for token in range(3, 1002, 4)} | {5: b"\n"}
    Vocabulary(tokens).save(dataset.path)
    costs = [make_costs(name="one", controller=TIMES), make_costs(name="dear", draft=0.03, controller=TIMES)]
    for model in costs:
        model.save(folder / f"{model.name}.json")
    policies = [make_policy("fixed:gamma=4" if name == "fixed-4" else name) for name in REQUIRED]
    result = compare([*policies, *map(make_policy, SPECS)], dataset, costs, folds=3)
    write_json(folder / "result.json", result.to_json())
    return folder


def report_command(folder: pathlib.Path, *command: object) -> list[str]:
    """A command line with the result's recording and costs."""
    name, *more = map(str, command)
    given = ["--traces", folder / "traces", "--costs", folder / "one.json", "--costs", folder / "dear.json"]
    return [name, *more, *map(str, given)]


def page_json(page: str) -> dict:
    """The data of a page, as its script reads them."""
    return json.loads(page.split('<script type="application/json" id="data">')[1].split("</script>")[0])
