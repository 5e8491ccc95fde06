"""The texts of token ids: what is kept of them, and how they are put together."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speckv.errors import SpecKVError
from speckv.traces import TraceDataset
from speckv.vocabulary import Vocabulary

from .synthetic import make_sequences, write_dataset


@given(st.dictionaries(st.integers(0, 9), st.binary(max_size=4), min_size=1), st.data())
def test_texts_of_tokens_make_up_the_text(tokens, data):
    ids = data.draw(st.lists(st.sampled_from(sorted(tokens)), max_size=12))
    whole = b"".join(tokens[token] for token in ids).decode("utf-8", "replace")
    texts = Vocabulary(tokens).texts(ids)
    assert len(texts) == len(ids) and whole.startswith("".join(texts))
    assert len(whole) - len("".join(texts)) <= 3  # of a character that has not ended


@given(tokens=st.dictionaries(st.integers(0, 10**6), st.binary(max_size=6)))
def test_a_vocabulary_comes_back_as_it_was_written(tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabulary")
    Vocabulary(tokens).save(folder)
    assert Vocabulary.of(folder).tokens == tokens


def test_unknown_tokens_are_numbers_and_a_folder_may_have_none(tmp_path):
    assert Vocabulary.of(tmp_path).texts([7, 8]) == ["⟨7⟩", "⟨8⟩"]
    assert Vocabulary({7: "é".encode()[:1], 8: "é".encode()[1:]}).texts([7, 8]) == ["", "é"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "another"}, "is not a vocabulary"),
        ({"schema_version": 2}, "schema version 2 is newer"),
        ({"tokens": {"a": "b"}}, "not a whole vocabulary"),
        ({"tokens": ["a"]}, "not a whole vocabulary"),
        ({"tokens": {"1": 2}}, "not a whole vocabulary"),
    ],
)
def test_a_file_that_is_none(change, message, tmp_path):
    Vocabulary({1: b"a"}).save(tmp_path)
    path = tmp_path / "vocabulary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SpecKVError, match=message):
        Vocabulary.of(tmp_path)


def test_merging_keeps_the_texts(tmp_path):
    sequences = make_sequences(prompts=2, budget=6)
    parts = [write_dataset(tmp_path / str(n), sequences[2 * n : 2 * n + 2], budget=6) for n in (0, 1)]
    for n, part in enumerate(parts):
        Vocabulary({n: b"x" * n, 9: b"nine"}).save(part.path)
    merged = TraceDataset.merge(parts, tmp_path / "merged")
    assert Vocabulary.of(merged.path).tokens == {0: b"", 1: b"x", 9: b"nine"}
    assert len(merged.load()) == 4


def test_byte_level_tokens():
    from speckv.live.vocabulary import vocabulary_of
    from speckv.testing.pairs import END, byte_tokenizer

    tokenizer = byte_tokenizer()
    text = "Grüße 🌍\n\tend"
    ids = tokenizer(text)["input_ids"]
    vocabulary = vocabulary_of(tokenizer, [*ids, END, 271])
    assert "".join(vocabulary.texts(ids)) == text
    assert vocabulary.texts([END]) == ["<|endoftext|>"] and 271 not in vocabulary.tokens


def test_sentencepiece_tokens():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    from speckv.live.vocabulary import vocabulary_of

    pieces = {"▁the": 0, "▁": 1, "<0xC3>": 2, "<0xA9>": 3, "s": 4, "</s>": 5}
    backend = Tokenizer(models.BPE(vocab=pieces, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    vocabulary = vocabulary_of(tokenizer, pieces.values())
    assert "".join(vocabulary.texts([0, 1, 2, 3, 4, 5])) == " the és</s>"


def test_the_shipped_vocabulary_holds_every_token_of_the_recording():
    from speckv.shipped import shipped_traces

    dataset = shipped_traces()
    tokens = Vocabulary.of(dataset.path).tokens
    for sequence in dataset:
        for column in (sequence.prompt_tokens, sequence.tokens, sequence.draft_tokens, sequence.off_tokens):
            assert tokens.keys() >= set(column.tolist())
