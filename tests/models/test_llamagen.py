"""LlamaGen's caption cleaning does exactly what the official cleaning is documented to do."""

import json

import pytest

from specbench.models.families.llamagen import CAPTION, clean_caption
from specbench.store.run_store import RunStore


@pytest.mark.parametrize(
    ("typed", "cleaned"),
    [
        ("A Red Cat", "a red cat"),
        ("  a \t cat\n", "a cat"),
        ("a cat,a dog", "a cat, a dog"),
        ("a 1.5 m pole", "a 1.5 m pole"),
        ("a cat. A dog.", "a cat. a dog."),
        ("a “quiet” cat‘s tail", 'a "quiet" cat\'s tail'),
        ("“all of it”", "all of it"),
        ("a cat — asleep", "a cat - asleep"),
        ("a black-and-white T-shirt", "a black-and-white t-shirt"),
        ("this-is-my-very-own_cat", "this is my very own cat"),
        ("a%20cat+and+a%20dog", "a cat and a dog"),
        ("<person> with a cat", "person with a cat"),
        ("<b>a cat</b> &eacute;", "a cat é"),
        ("a cat &amp; a dog", "a cat a dog"),
        ("a cat <script>alert()</script>asleep", "a cat asleep"),
        ("a cat at https://cats.com/red and www.cats.co", "a cat at and"),
        ("a cat by @cat_lover", "a cat by"),
        ("a cat 猫 asleep", "a cat asleep"),
        ("a cat from 192.168.0.1", "a cat from"),
        ("cat #12, cat #12345, cat #1234", "cat , cat , cat 1234"),
        ("a cat 1234567", "a cat"),
        ("a cat my_cat.jpg", "a cat"),
        ("*** a cat!!! ***", "a cat!!!"),
        ("a cat... asleep", "a cat asleep"),
        ("a cat (asleep) [again] {or} not/", "a cat asleep again or not"),
        ("a cat jc6640 jc6640vc 6640vc231 j2d1a2a asleep", "a cat asleep"),
        ("a cat, free shipping, free download", "a cat,"),
        ("a cat, click for more", "a cat"),
        ("png images of a cat, page 3", "of a cat"),
        ("a cat 30x40 and 2.5×3", "a cat and"),
        ("a cat : asleep", "a cat: asleep"),
        ("- a cat -", "a cat"),
        ("ﬁve ｃats", "five cats"),
        ("", ""),
        ("***", ""),
    ],
)
def test_captions_are_cleaned_as_documented(typed, cleaned):
    assert clean_caption(typed) == cleaned


def test_a_second_pass_takes_what_the_first_uncovered():
    assert clean_caption("%3Cb%253E a cat") == "a cat"


def test_captions_that_are_cut_are_counted_stored_and_said(cli, tmp_path):
    """A token a byte, and one for the end."""
    (tmp_path / "p.txt").write_text(f"{'a' * (CAPTION - 1)}\n{'b' * (CAPTION + 4)}\nc\n")
    line = "--model llamagen --random-weights --scale tiny --decoder ar --device cpu --dtype float32 --threads 1"
    arguments = *line.split(), "--prompts", tmp_path / "p.txt", "--out", tmp_path / "out"
    planned, cut = cli("run", *arguments, "--dry-run"), "reads 120 tokens of a caption: 1 of 3 are cut"
    assert cut in planned.out
    ran = cli("run", *arguments)
    assert ran.code == 0 and cut in ran.err
    (folder,) = (tmp_path / "out").iterdir()
    facts = [json.loads(text)["caption_tokens_cut"] for text in RunStore(folder).samples(["facts"])["facts"]]
    assert sorted(facts) == [0, 0, 5]
    note = "llamagen+random+tiny truncated the captions of 1 of 3 images"
    for more in ((), ("--all",)):
        assert note in cli("report", "--out", tmp_path / "out", *more).out.replace("\n", " ")
