"""Prompts that must not be trained on: from every kind of row, found again whatever their case and punctuation."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.exclusion import Exclusion, load_exclusion, normal_form
from eagle3.terminal import UserError


def user(*texts):
    return [{"role": "user", "content": text} for text in texts]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prompts_of_every_kind_of_row(tmp_path):
    answer = {"role": "assistant", "content": "an answer"}
    rows = write(
        tmp_path / "rows.jsonl",
        {"messages": [*user("one"), answer, *user("two")]},
        {"conversations": [{"from": "human", "value": "three"}]},
        {"turns": ["four", "five"]},
        {"question": "six", "answer": 6},
        {"instruction": "seven", "input": "of nine", "output": "x"},
        {"prompt": "one!"},
    )
    text = tmp_path / "prompts.txt"
    text.write_text("\ufeffEight, nine.\n\n  ... \nTen\n", encoding="utf-8")
    exclusion = load_exclusion([rows, text])
    assert exclusion.prompts == {"one", "two", "three", "four", "five", "six", "sevenofnine", "eightnine", "ten"}
    assert len(exclusion) == 9
    assert exclusion.matches([{"role": "system", "content": "s"}, *user("other", "  TWO? ")])
    assert not exclusion.matches([*user("three things"), {"role": "assistant", "content": "one"}])
    assert not exclusion.matches(user("", "...", "one two"))


def test_compatible_forms_and_cases_are_one_prompt():
    for text in ("What is ½ of Straße №１０？", "what is 1⁄2 of STRASSE no10", "WHAT_IS—½ of\u00a0strasse «№ 10»"):
        assert normal_form(text) == "whatis12ofstrasseno10"
    assert normal_form("质数是什么？") == "质数是什么" and normal_form("¿?\n_ 😀") == ""


@given(st.text(), st.text(alphabet=" \n.,;!?_-\"'()", max_size=5))
def test_case_and_punctuation_never_hide_a_prompt(text, marks):
    exclusion = Exclusion(frozenset({normal_form(text)} - {""}))
    assert exclusion.matches(user(marks + text + marks)) == bool(normal_form(text))


@given(st.text(alphabet=st.characters(codec="ascii")))
def test_ascii_keeps_letters_and_digits_only(text):
    assert normal_form(text) == "".join(sign for sign in text.lower() if sign.isalnum())


def test_identity_follows_the_set(tmp_path):
    def identity(*prompts):
        return load_exclusion([write(tmp_path / "a.jsonl", *({"prompt": prompt} for prompt in prompts))]).identity()

    assert identity("a", "b") == identity("B", "a!", "a") != identity("a")
    assert identity("ab") != identity("a", "b")
    assert Exclusion(frozenset("fedcba")).identity() == hashlib.sha256(b"a\nb\nc\nd\ne\nf").hexdigest()[:16]


def test_rows_without_a_prompt_are_said(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", {"prompt": "p"}, {"text": "x"}, {"text": "y"}, {"messages": []})
    path.write_text(path.read_text() + "\n")  # a blank line is no row
    assert len(load_exclusion([path])) == 1
    assert capsys.readouterr().err == (
        f"warning: --exclude {path}: 3 rows have no prompt and exclude nothing "
        "(2 × no conversation in columns text; 1 × messages is empty)\n"
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_file_without_a_prompt_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_text(" \n\n" if name == "a.txt" else '{"text": "x"}\n{"prompt": "?"}\n')
    reason = "" if name == "a.txt" else r" \(1 × no conversation in columns text\)"
    with pytest.raises(UserError, match=rf"^--exclude {path}: no prompt in it{reason}; give a \.txt file"):
        load_exclusion([write(tmp_path / "good.jsonl", {"prompt": "p"}), path])


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "a.csv").touch()
    with pytest.raises(UserError, match=r"--exclude .*a\.csv: expected a file that ends in \.json, "):
        load_exclusion([tmp_path / "a.csv"])
    (tmp_path / "a.txt").write_bytes(b"\xff\n")
    with pytest.raises(UserError, match=r"--exclude .*a\.txt is not UTF-8 text"):
        load_exclusion([tmp_path / "a.txt"])
    with pytest.raises(FileNotFoundError):
        load_exclusion([tmp_path / "none.txt"])
