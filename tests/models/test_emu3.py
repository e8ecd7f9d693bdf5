"""Emu3's prompts get the ids that the authors' tokenizer gives them: Qwen's words, NFC, and tiktoken's merges."""

import json
import unicodedata

import pytest
from checkpoints import baai, configured, emu3, loaded
from tokenizers import Tokenizer, pre_tokenizers

from specbench.models.catalog import load_model
from specbench.models.families.emu3 import ranked_bpe, read_ranks, split_as_qwen

TEXTS = (
    "a close-up of a cat", "close -up", "a cat's hat, don't", "It'S HERE. THEY'LL", "the end. A start.Again",
    "12 cats, 3.5 dogs", "  two  spaces ", "a line\n\nand another \n one", "(a) [b] -- c...", "tail   ",
)  # fmt: skip


def test_ids_are_those_of_the_scanner_written_out():
    tokenizer = ranked_bpe(baai.RANKS, {})
    assert [tokenizer.encode(text).ids for text in TEXTS] == list(map(baai.slow_ids, TEXTS))


@pytest.mark.parametrize("text", ["a close-up of a cat", "It'S HERE", "12 cats"])
def test_the_conversions_own_split_differs(text):
    """Else none of these tests could see which split is used."""
    ranks = baai.RANKS | {b"12": 900, b"'S": 901}
    conversion, authors = ranked_bpe(ranks, {}), ranked_bpe(ranks, {})
    conversion.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert conversion.encode(text).ids != authors.encode(text).ids


def test_texts_are_composed_before_they_are_split():
    decomposed = unicodedata.normalize("NFD", "café")
    assert decomposed != "café"
    tokenizer = ranked_bpe(baai.RANKS, {})
    assert tokenizer.encode(decomposed).ids == tokenizer.encode("café").ids == list("café".encode())


def test_special_tokens_are_found_anywhere_in_a_text():
    tokenizer = ranked_bpe(baai.RANKS, {"<|a|>": 700, "<|a b|>": 701})
    assert tokenizer.encode("x<|a|>y<|a b|>z<|").ids == [120, 700, 121, 701, 122, 60, 124]
    assert tokenizer.token_to_id("<|a|>") == 700


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (b"YQ== 0\n", "no token for byte 0"),
        (b"YQ==\n", "line 1"),
        (b"!!! 3\n", "base64|Only|discard|Non"),
        (b"YQ== x\n", "line 1"),
    ],
)
def test_a_file_of_ranks_that_makes_no_sense_is_an_error(lines, problem):
    with pytest.raises(ValueError, match=problem):
        read_ranks(lines)


def prompt(model, text: str) -> list[int]:
    return model.prompt_ids(text)[0]


def test_the_authors_layout_gives_the_authors_ids(tmp_path):
    baai.write(tmp_path)
    model = loaded("emu3", tmp_path)
    for text in TEXTS:
        ids = prompt(model, text)
        expected = baai.slow_ids(f"{text} masterpiece, film grained, best quality.")
        assert ids[1 : 1 + len(expected)] == expected
        assert ids[0] == baai.SPECIALS["<|extra_203|>"] and ids[-1] == baai.SPECIALS["<|image token|>"]


def test_the_converted_layout_gives_the_authors_ids_and_warns_of_its_own_split(tmp_path, capsys):
    emu3.write(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    # Merges that only another split allows or forbids.
    content["model"]["vocab"]["-u"] = content["model"]["vocab"]["<|visual token 000023|>"] + 1
    content["model"]["merges"] = [["-", "u"]]
    path.write_text(json.dumps(content))
    info = configured("emu3", tmp_path)
    ids = load_model(info, "cpu", "float32").tokenizer.encode("close-up").ids
    assert content["model"]["vocab"]["-u"] in ids, "Qwen keeps a hyphen with the letters after it"
    assert "splits prompts in another way than Emu3's authors" in " ".join(capsys.readouterr().err.split())
    tokenizer = Tokenizer.from_file(str(path))
    assert content["model"]["vocab"]["-u"] not in tokenizer.encode("close-up").ids
    split_as_qwen(tokenizer)
    tokenizer.save(str(path))
    load_model(info, "cpu", "float32")
    assert "another way" not in capsys.readouterr().err
