"""The texts of the token ids that stand in a recording: what a page can show without the tokenizer."""

import codecs
import pathlib
from collections.abc import Iterable, Mapping
from typing import Self

from speckv.errors import SpecKVError
from speckv.files import check_version, read_json, write_json

FILE = "vocabulary.json"
FORMAT = "speckv-vocabulary"
SCHEMA_VERSION = 1


class Vocabulary:
    """Token ids and the bytes that they stand for.

    In the file a token's bytes are text; a byte that is no whole character is written as the lone surrogate that
    Python's `surrogateescape` makes of it.

    Args:
        tokens: id -> bytes.
    """

    def __init__(self, tokens: Mapping[int, bytes]) -> None:
        self.tokens = dict(sorted(tokens.items()))

    @classmethod
    def of(cls, folder: pathlib.Path) -> Self:
        """That of a trace folder; an empty one if it has none.

        Raises:
            SpecKVError: the file is damaged, or of a newer schema version.
        """
        path = folder / FILE
        if not path.exists():
            return cls({})
        value = read_json(path, "the vocabulary of a recording")
        if value.get("format") != FORMAT:
            raise SpecKVError(f"{path}: is not a vocabulary; make one with `speckv traces texts`")
        check_version(value.get("schema_version"), SCHEMA_VERSION, path)
        try:
            tokens = {int(token): text.encode("utf-8", "surrogateescape") for token, text in value["tokens"].items()}
        except (KeyError, ValueError, AttributeError) as error:
            raise SpecKVError(f"{path}: not a whole vocabulary ({error!r}); make it again") from None
        return cls(tokens)

    def save(self, folder: pathlib.Path) -> None:
        """Write it into a trace folder."""
        tokens = {str(token): text.decode("utf-8", "surrogateescape") for token, text in self.tokens.items()}
        write_json(folder / FILE, {"format": FORMAT, "schema_version": SCHEMA_VERSION, "tokens": tokens})

    def texts(self, tokens: Iterable[int]) -> list[str]:
        """The text that each of some consecutive tokens adds; together they are the text.

        A token that ends inside a character adds what is whole, and the token that completes the character all of it.
        Unknown tokens are shown as their number.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return [
            decoder.decode(self.tokens[token]) if token in self.tokens else f"⟨{token}⟩" for token in map(int, tokens)
        ]
