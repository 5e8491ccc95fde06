"""Text out of tokens as they come, and strings that end it."""

from collections.abc import Sequence
from typing import Any

from speckv.errors import SpecKVError

#: What decoders show for bytes that are not yet a whole character.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


#: So many characters at the end of a text may still change: a character has four bytes at most.
_OPEN = 3
#: Tokens behind the last whole character before some are given up as broken, and how many stay.
_MOST, _KEPT = 32, 16


class Detokenizer:
    """The text of one sequence, token by token.

    `push` gives only what no later token can take back: no half characters, and nothing that may turn out to be the
    beginning of a stop string. It decodes a short window, the last tokens behind which the characters were whole and
    those that came since, so that a token costs the same however long the text is.

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
        # The window: tokens known by their text, of which they give the first characters, and newer ones.
        self._window: list[int] = []
        self._context = self._taken = 0
        # The text: what was shown; what is certain and may begin a stop string; what may yet change.
        self._shown: list[str] = []
        self._held = self._tail = ""

    def push(self, token: int) -> str:
        """Take in a token. Returns the text that is certain now and was not before."""
        held = self._held + self._certain(token)
        if found := [at for string in self._stop if (at := held.find(string)) >= 0]:
            self.stopped, self._tail = True, ""
            return self._show(held[: min(found)], "")
        shown = len(held) - max((len(_begun(held, string)) for string in self._stop), default=0)
        return self._show(held[:shown], held[shown:])

    def finish(self) -> str:
        """What was held back, once nothing follows."""
        rest, self._tail = self._held + self._tail, ""
        return self._show(rest, "")

    @property
    def text(self) -> str:
        """All text so far, without the stop string."""
        return "".join([*self._shown, self._held, self._tail])

    def _show(self, text: str, held: str) -> str:
        self._shown.append(text)
        self._held = held
        return text

    def _certain(self, token: int) -> str:
        """The new characters that a token made whole; those that are not stay in `_tail`."""
        self._window.append(token)
        # Where bytes stand for themselves, an invalid one can spoil valid ones in front of it: what was taken is taken.
        new = decoded_text(self._tokenizer, self._window)[self._taken :]
        whole = new.rstrip(_INCOMPLETE)
        self._tail = new[len(whole) :]
        if whole and not self._tail:
            self._window = self._window[self._context :]
            self._context = len(self._window)
        elif len(self._window) > self._context + _MOST:
            whole, self._tail = new[:-_OPEN], new[-_OPEN:]
            del self._window[self._context : -_KEPT]
        else:
            self._taken += len(whole)
            return whole
        self._taken = len(decoded_text(self._tokenizer, self._window)) - len(self._tail)
        return whole


def decoded_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens, without special ones and exactly as the model wrote it."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _begun(text: str, string: str) -> str:
    """The longest beginning of `string`, short of all of it, that `text` ends with."""
    return next((string[:n] for n in range(len(string) - 1, 0, -1) if text.endswith(string[:n])), "")
