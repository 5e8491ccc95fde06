"""Prompt files: JSON Lines of this project's shape and of the public benchmarks' shapes."""

import json
import pathlib
from dataclasses import dataclass
from typing import Any

from speckv.errors import SpecKVError


@dataclass(frozen=True)
class Prompt:
    """One prompt: an identifier unique in its file, a task category, and the user's text."""

    id: str
    task: str
    text: str


def load_prompts(path: str | pathlib.Path) -> list[Prompt]:
    """Read a JSON Lines prompt file.

    Accepted shapes, told apart by their keys, line by line:

    | source               | keys                              | id              | task       |
    |----------------------|-----------------------------------|-----------------|------------|
    | SpecKV               | `id`, `task`, `prompt` or `turns` | `id`            | `task`     |
    | Spec-Bench, MT-bench | `question_id`, `category`, `turns`| `question_id`   | `category` |
    | HumanEval            | `task_id`, `prompt`               | `task_id`       | `code`     |
    | GSM8K                | `question`                        | `gsm8k-<line>`  | `math`     |

    Of several turns the first is used: the later ones depend on the model's own answer.

    Raises:
        SpecKVError: the file is missing or empty, or a line has none of these shapes; the message
            names file and line.
    """
    path = pathlib.Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise SpecKVError(f"{path}: no such prompt file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecKVError(f"{path}: not readable as a prompt file ({error})") from None
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = _parse(json.loads(line), number)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise SpecKVError(f"{path}:{number}: not a prompt ({error}); expected JSON with id, task, prompt") from None
        if prompt.id in prompts:
            raise SpecKVError(f"{path}:{number}: the id {prompt.id!r} stands in the file twice; make ids unique")
        prompts[prompt.id] = prompt
    if not prompts:
        raise SpecKVError(f"{path}: holds no prompt; write one JSON object with id, task, prompt a line")
    return list(prompts.values())


def _parse(row: Any, number: int) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError("the line is not a JSON object")
    if "question_id" in row:
        identifier, task, text = row["question_id"], row["category"], row["turns"][0]
    elif "task_id" in row:
        identifier, task, text = row["task_id"], "code", row["prompt"]
    elif "id" in row:
        identifier, task, text = row["id"], row["task"], row["prompt"] if "prompt" in row else row["turns"][0]
    elif "question" in row:
        identifier, task, text = f"gsm8k-{number}", "math", row["question"]
    else:
        raise ValueError("none of the known keys")
    if isinstance(row.get("turns"), str):
        raise ValueError("turns must be a list")
    if identifier == "":
        raise ValueError("the id is empty")
    if not isinstance(text, str) or not text.strip():
        raise ValueError("the prompt text is empty")
    return Prompt(str(identifier), str(task), text)
