"""Text out of tokens as they come, and strings that end it."""

from collections.abc import Sequence
from typing import Any

from speckv.errors import SpecKVError

#: What decoders show for bytes that are not yet a whole character.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of one sequence, token by token.

    `push` gives only what no later token can take back: no half characters, and nothing that may turn out to be the
    beginning of a stop string.

    Args:
        tokenizer: a transformers tokenizer.
        stop: strings that end the text; they are not part of it.

    Attributes:
        stopped: whether a stop string was met. No token may be pushed behind it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str) or not all(isinstance(string, str) and string for string in stop):
            raise SpecKVError(f"stop is {stop!r}; it must be a list of strings of at least one character")
        self.stopped = False
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []
        self._text = ""
        self._shown = 0

    def push(self, token: int) -> str:
        """Take in a token. Returns the text that is certain now and was not before."""
        self._tokens.append(token)
        text = decoded_text(self._tokenizer, self._tokens)
        # Where bytes stand for themselves, an invalid one can spoil valid ones in front of it: shown is shown.
        self._text = self._text[: self._shown] + text[self._shown :]
        whole = self._text.rstrip(_INCOMPLETE)
        if found := [at for string in self._stop if (at := whole.find(string)) >= 0]:
            self.stopped = True
            self._text = whole[: min(found)]
            return self._show(len(self._text))
        return self._show(len(whole) - max(map(len, (_begun(whole, string) for string in self._stop)), default=0))

    def finish(self) -> str:
        """What was held back, once nothing follows."""
        return self._show(len(self._text))

    @property
    def text(self) -> str:
        """All text so far, without the stop string."""
        return self._text

    def _show(self, end: int) -> str:
        shown, self._shown = self._shown, max(end, self._shown)
        return self._text[shown : self._shown]


def decoded_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens, without special ones and exactly as the model wrote it."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _begun(text: str, string: str) -> str:
    """The longest beginning of `string`, short of all of it, that `text` ends with."""
    return next((string[:n] for n in range(len(string) - 1, 0, -1) if text.endswith(string[:n])), "")
