"""The command that says how far two captures are apart (the parity check of case H04)."""

import sys
from pathlib import Path

import pytest
from capture_for_tests import random_prompts, settings_for, write_prepared

from eagle3.capture import compare, extract
from eagle3.terminal import UserError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def capture(tiny_target: Path, tmp_path: Path):
    prepared = write_prepared(tmp_path / "prepared", tiny_target, random_prompts([40, 7, 64]))

    def run(name: str, **settings) -> Path:
        extract.extract(prepared, "transformers", settings_for(tiny_target, tmp_path / name, **settings))
        return tmp_path / name

    return run


def test_errors_by_layer(capture, capsys, monkeypatch):
    exact = capture("exact")
    assert compare.compare(exact, exact) == {2: (0, 0), 4: (0, 0), 5: (0, 0), 8: (0, 0)}
    rounded = compare.compare(capture("bf16", dtype="bfloat16"), exact)
    stored = compare.compare(capture("fp8", aux="fp8"), exact)
    assert all(0.001 < error <= worst < 0.05 for error, worst in rounded.values())
    assert all(0.01 < stored[layer][0] < 0.05 for layer in (2, 4, 5)) and stored[8] == (0, 0)
    monkeypatch.setattr(sys, "argv", ["compare", str(exact), str(exact)])
    compare.main()
    shown = capsys.readouterr().out
    assert "3 samples compared" in shown and "layer   8: relative error 0.00e+00" in shown


def test_what_cannot_be_compared_is_refused(capture, tiny_target, tmp_path):
    exact = capture("exact")
    with pytest.raises(UserError, match=r"layers is \[1, 4, 5, 8\], this run has \[2, 4, 5, 8\]; capture the same"):
        compare.compare(exact, capture("others", layers=(1, 4, 5, 8)))
    prepared = write_prepared(tmp_path / "other-ids", tiny_target, random_prompts([40, 7, 64], seed=1))
    extract.extract(prepared, "transformers", settings_for(tiny_target, tmp_path / "other"))
    with pytest.raises(UserError, match="no sample of the same ids and mask in common"):
        compare.compare(exact, tmp_path / "other")
