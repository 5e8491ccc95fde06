"""The vocabulary of a recording, read off a tokenizer."""

import re
from collections.abc import Iterable
from typing import Any

from speckv.traces import Rollout, TraceDataset
from speckv.vocabulary import Vocabulary

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def keep_texts(dataset: TraceDataset, tokenizer: Any) -> int:
    """Write the texts of all tokens of a recording into its folder. Returns how many there are."""
    ids: set[int] = set()
    for sequence in dataset:
        ids.update(_tokens(sequence))
    vocabulary = vocabulary_of(tokenizer, ids)
    vocabulary.save(dataset.path)
    return len(vocabulary.tokens)


def _tokens(sequence: Rollout) -> Iterable[int]:
    for column in (sequence.prompt_tokens, sequence.tokens, sequence.draft_tokens, sequence.off_tokens):
        yield from column.tolist()


def vocabulary_of(tokenizer: Any, tokens: Iterable[int]) -> Vocabulary:
    """The bytes of token ids.

    Args:
        tokenizer: a fast transformers tokenizer, byte-level or of SentencePiece's kind.
        tokens: ids; those that the tokenizer does not have, as padded logits can bring about, are left out.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
    added = tokenizer.added_tokens_decoder

    def spelled(token: int, piece: str) -> bytes:
        if token in added:
            return piece.encode()
        if byte_level:
            return bytes(byte_of[letter] for letter in piece)
        if byte := _BYTE.fullmatch(piece):
            return bytes.fromhex(byte[1])
        return piece.replace("▁", " ").encode()

    ids = sorted(set(tokens))
    pieces = zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True)
    return Vocabulary({token: spelled(token, piece) for token, piece in pieces if piece is not None})
