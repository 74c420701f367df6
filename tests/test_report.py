"""The report of a run: what it tells after each stage, that it needs nothing else and holds no text unasked."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import REPOSITORY
from prepare_for_tests import prepare_here

from eagle3 import artifacts
from eagle3.draft.config import derive
from eagle3.model_card import model_card
from eagle3.report import __main__ as command
from eagle3.report import draw
from eagle3.report.read import read_run
from eagle3.target import open_target
from eagle3.terminal import UserError
from eagle3.training.metrics import Acceptance
from eagle3.vocab_map import write_vocab_map

SECRET = "zyxw <u>plumbago</u> & quill"  # in every answer
ASKED = "Which vermilion heron?"
EVIL = "<img src=x onerror=alert(1)>"
SECTIONS = ["Data", "Capture", "Vocabulary coverage", "Training", "Held out", "Served check", "How to serve"]
SECTIONS += ["Configuration"]
VOID = ("meta",)


class Page(HTMLParser):
    """Elements of a page by path, text by section; refuses what is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.sections: dict[str, str] = {}  # heading to text
        self.absent: list[str] = []
        self.marked: list[str] = []
        self.titles: list[str] = []
        self._heading, self._in_absent = "", False
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attributes
        if tag in VOID:
            return
        self.open.append(tag)
        self._in_absent = ("class", "absent") in attributes
        if tag == "h2":
            self._heading = ""
        if self._in_absent:
            self.absent.append("")
        if tag == "mark":
            self.marked.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._in_absent = False
        if tag == "h2":
            self.sections[self._heading] = ""

    def handle_data(self, data: str) -> None:
        if "h2" in self.open:
            self._heading += data
        elif self._heading:
            self.sections[self._heading] += f"{data}\n"
        if self._in_absent:
            self.absent[-1] += data
        if "mark" in self.open:
            self.marked[-1] += data
        if self.open and self.open[-1] == "title" and "svg" not in self.open:
            self.titles.append(data)


def acceptance(right: int) -> dict:
    """Figures of three drafts as the training loop writes them: of 100 starts `right`, a half and a quarter accept."""
    counts = [right, right // 2, right // 4]
    sums = {"loss": [150.0] * 3, "rows": [100] * 3, "correct": counts, "position": counts, "starts": [100] * 3}
    sums |= {"accepted": [counts[0], sum(counts[:2]), sum(counts)], "plain": [60, 80, 90], "plain_starts": 100}
    sums |= {"sampled_starts": [100] * 3, "sampled_accepted": [30, 40, 45], "lost": [1, 2, 3]}
    return Acceptance(3, **sums, far_starts=[100, 0, 0, 0, 0, 0], far_accepted=[55, 0, 0, 0, 0, 0]).report()


def write_captured(out: Path) -> None:
    prepared = artifacts.read_manifest(out / "prepared", "01")
    canary = {"positions": 438, "mean": 1.8e-3, "largest": 1.5e-2, "tolerance": 0.02, "argmax_equal": 190}
    canary |= {"argmax_clear": 190, "state_rms": {"2": 3.27, "4": 9.5, "8": 11.25}, "state_max": 2483.5, "seconds": 2.5}
    canary["stored"] = {"aux_error": {"2": 0.0213, "4": 0.0226}, "teacher_kl": 3e-4, "teacher_argmax_equal": 0.995}
    made = {"target": prepared["fingerprint"]["target"], "engine": "vllm", "engine_version": "0.32.0"}
    made |= {"dtype": "bfloat16", "store_dtype": "fp8", "store_final_dtype": "fp8"}
    totals = {"samples": 9, "wanted": 12, "tokens": 700, "supervised": 300, "consumed": 0, "bytes": 151_620}
    totals |= {"bytes_per_token": 216.6, "failed": {f"states are not finite {EVIL}": 3}, "aux_layers": [2, 4]}
    artifacts.write_manifest(out / "hidden_states", "02", made, complete=True, **totals, canary=canary)


def write_trained(out: Path, model: Path) -> None:
    draft = out / "draft"
    lines = []
    for step in range(1, 501):
        losses = [9.0 / step + k for k in range(3)]
        lines.append({"kind": "train", "step": step, "epoch": (step - 1) // 250, "loss_by_step": losses})
        lines[-1] |= {"learning_rate": 1e-4, "gradient_norm": 0.5, "seconds": 0.25, "tokens_per_second": 16384.0}
    lines.append({"kind": "untrained", "step": 0} | acceptance(12))
    lines.append({"kind": "most_frequent_token", "step": 0, "token": 198} | acceptance(8))
    del lines[-1]["loss_by_step"]
    for epoch, right in ((1, 40), (2, 64)):
        lines.append({"kind": "held_out", "step": 250 * epoch, "epoch": epoch} | acceptance(right))
    draft.mkdir()
    torn = '{"kind": "train", "step": 501, "lo'
    (draft / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + f"damaged\n{torn}")
    options = {"loss": "kl", "ttt_steps": 3, "supervision": "served", "train_lm_head": True}
    artifacts.write_manifest(draft, "04", options, complete=True, held_out=[*range(40)], report=acceptance(68))
    target = open_target(str(model))
    card = model_card(target, derive(target, 64, [2, 4]), options, acceptance(68), ["chats"], 512, EVIL)
    (draft / "export").mkdir()
    (draft / "export" / "README.md").write_text(card)


def write_served(out: Path) -> None:
    report = {"tau": 1.9321, "acceptance_by_position": [0.61, 0.3217, 0.0], "drafts": 1234, "identical": 19}
    report |= {"prompts": 20, "different_samples": [7], "dtype": "bfloat16", "engine": "0.33.1"}
    artifacts.save_json(out / "draft" / "served_check.json", report | {"seconds_without": 8.25, "seconds_with": 4.75})


@pytest.fixture(scope="module")
def whole(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all stages: 01 and 03 are real, the others' small files as these stages write them."""
    out = tmp_path_factory.mktemp("run")
    rows = [
        {"messages": [{"role": "user", "content": f"{ASKED} {n}"}, {"role": "assistant", "content": f"{n} {SECRET}"}]}
        for n in range(12)
    ]
    rows += [rows[0], {"messages": [{"role": "wizard vermilion", "content": "x"}]}]
    data = tmp_path_factory.mktemp("data") / "<s>chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare_here(tiny_target, data, out / "prepared")
    write_captured(out)
    write_vocab_map(out / "prepared", out / "vocab_map", 8000)
    write_trained(out, tiny_target)
    write_served(out)
    return out


def report(out: Path, *flags: object) -> Page:
    """Through the command's own main, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["report", str(out), *map(str, flags)])
        command.main()
    return Page((out / "report.html").read_text())


@pytest.fixture(scope="module")
def page(whole: Path) -> Page:
    return report(whole)


def test_every_section_tells_the_run_s_figures(page: Page, whole: Path) -> None:
    assert list(page.sections) == SECTIONS
    assert page.titles == [f"EAGLE-3 run {whole.name}"]
    assert page.absent == [f"{whole}/draft/metrics.jsonl: 1 damaged line left out"]
    expected = {
        "Data": ["12 from 12 rows", "<s>chats.jsonl", "2 rows were skipped", "duplicate of an earlier row"],
        "Capture": ["vllm 0.32.0", "9 of 12", "216.6", "0.15 MB", "438 positions", "2.13%", "KL 3.0e-04 nats", "9.5"],
        "Vocabulary coverage": ["8,000 ids", "4,096 ids", "100.00%"],
        "Training": ["500", "median 0.25", "Training loss", "Learning rate", "Tokens/s", "TTT step 2"],
        "Held out": [
            "1.640",
            "exported",
            "untrained",
            "1.120",
            "most frequent token",
            "1.080",
            "68.0%",
            "tau by epoch",
            "tau by number of drafts",
            "3.0%",
        ],
        "Served check": ["1.9321 over 1,234 drafts", "19 of 20", "vLLM 0.33.1", "32.2%", "4.75 and 8.25"],
        "How to serve": ["vllm serve", f"{whole}/draft/export", "sglang.launch_server"],
        "Configuration": ["max_seq_len", "engine_version", "store_final_dtype", "40 in all", artifacts.code_version()],
    }
    for section, figures in expected.items():
        for figure in figures:
            assert figure in page.sections[section], (section, figure)


def test_the_file_needs_nothing_else(page: Page) -> None:
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "base", "a", "form"})
    assert {name for name, _ in page.attributes}.isdisjoint({"src", "href", "style", "action", "srcset"})
    assert not re.search(r"url\(|@import|@font-face", page.text)
    assert "prefers-color-scheme: dark" in page.text and 'name="viewport"' in page.text
    assert "svg" in page.tags and len(page.text) < 200_000


def test_it_holds_no_text_of_the_data_unless_asked(page: Page, whole: Path, tiny_target: Path) -> None:
    for word in ("zyxw", "plumbago", "vermilion", "heron", "wizard"):  # an unknown role is a word of the row as well
        assert word not in page.text
    assert "unknown role …" in page.sections["Data"]

    shown = report(whole, "--with-samples", "--model-path", tiny_target)
    samples = shown.sections["Samples"]
    assert samples.count(ASKED) == 3 and samples.count("zyxw") == 3
    marked = "".join(shown.marked)
    assert marked.count(SECRET) == 3 and ASKED not in marked, "only what is supervised, escaped"
    assert "u" not in shown.tags
    assert marked.count("<|im_end|>") == 3


def test_what_comes_from_files_is_text(page: Page) -> None:
    assert page.tags.isdisjoint({"img", "s"})
    assert EVIL in page.sections["Capture"] and "<img" not in page.text
    assert all(value is None or "<" not in value for _, value in page.attributes)


@pytest.mark.parametrize("last", ["01", "02", "03", "04"])
def test_after_any_stage(whole: Path, tmp_path: Path, last: str) -> None:
    """What is missing is a line that says why; a run under way has a manifest that is not complete."""
    for stage, folder in (("01", "prepared"), ("02", "hidden_states"), ("03", "vocab_map")):
        if stage <= last:
            shutil.copytree(whole / folder, tmp_path / folder)
    if last == "04":
        artifacts.write_manifest(tmp_path / "draft", "04", {"loss": "kl"}, complete=False)
    page = report(tmp_path)
    assert list(page.sections) == SECTIONS
    absent = {
        "02": "hidden_states/ is absent: stage 02 has not run here",
        "03": "vocab_map/ is absent: stage 03 has not run here",
        "04": "draft/ is absent: stage 04 has not run here",
    }
    for stage, words in absent.items():
        assert (words in page.absent) == (stage > last)
    assert "draft/served_check.json is absent: the served check has not run here." in page.absent
    assert any("nothing is exported yet" in words for words in page.absent)
    if last == "04":
        assert "metrics.jsonl holds no training step yet." in page.absent
        assert "not finished" in page.sections["Configuration"]


def test_damaged_files_cost_their_section_alone(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    (out / "vocab_map" / "manifest.json").write_text("{")
    (out / "draft" / "served_check.json").write_text("[]")
    with open(out / "prepared" / "index.jsonl", "a") as index:
        index.write("nothing\n")
    page = report(out)
    assert list(page.sections) == SECTIONS
    for words in ("vocab_map/manifest.json is damaged", "served_check.json is damaged: a list", "index.jsonl line 15"):
        assert any(words in line for line in page.absent), words
    assert "216.6" in page.sections["Capture"] and "1.640" in page.sections["Held out"]

    artifacts.save_json(out / "draft" / "served_check.json", {"tau": "high"})
    page = report(out)
    assert any(line.startswith("The files of this section are not as this program writes") for line in page.absent)

    for shard in range(2):  # of three
        (out / "hidden_states" / f"manifest.shard-{shard}-of-3.json").write_text("{}")
    (out / "hidden_states" / "manifest.json").unlink()
    assert "hidden_states/ has 2 of 3 shards, not merged: run stage 02 with --merge" in report(out).absent


def test_of_two_lines_of_a_step_the_later_counts(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "prepared", tmp_path / "prepared")
    lines = [{"kind": "train", "step": step, "loss_by_step": [loss]} for step, loss in ((1, 5.0), (2, 4.0), (2, 3.0))]
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = read_run(tmp_path).metrics["train"]
    assert [(one["step"], one["loss_by_step"]) for one in steps] == [(1, [5.0]), (2, [3.0])]


def test_faults_are_one_line(whole: Path, smollm2: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no stage's output .*prepared/ is absent.*give the directory that"):
        report(tmp_path)
    with pytest.raises(UserError, match="--with-samples needs the tokenizer: give --model-path"):
        report(whole, "--with-samples")
    with pytest.raises(UserError, match=r"target is '.*', this run has '.*'; give the --model-path that stage 01 had"):
        report(whole, "--with-samples", "--model-path", smollm2)
    result = subprocess.run(
        [sys.executable, "-m", "eagle3.report", str(tmp_path)], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert result.returncode == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


# --------------------------------------------------------------------------------------------------- drawing


def points(figure: str) -> list[tuple[float, float]]:
    return [tuple(map(float, pair.split(","))) for pair in re.findall(r'points="([^"]+)"', figure)[0].split()]


def test_lines_stand_where_their_numbers_are() -> None:
    places = points(draw.lines({"one": [(0, 0), (5, 5), (10, 10)]}, "t", "x", "y"))
    left, right, bottom, top = draw.LEFT, draw.WIDTH - draw.RIGHT, draw.HEIGHT - draw.BOTTOM, draw.TOP
    assert places == [(left, bottom), ((left + right) / 2, (bottom + top) / 2), (right, top)]
    grows = points(draw.lines({"one": [(0, 1), (1, 10), (2, 100)]}, "t", "x", "y"))  # logarithmic
    assert grows[1] == ((left + right) / 2, (bottom + top) / 2)


@pytest.mark.parametrize(
    "values", [[3.0], [0, 0], [1.0149, 1.0150], [1.03375, 1.03545], [-5, 7e9], [1e-9, 2e-9], [2, 3], [1, 1e6]]
)
def test_any_range_gets_ticks_and_stays_inside(values: list[float]) -> None:
    figure = draw.lines({"one": list(enumerate(values))}, "t", "x", "y")
    shown = re.findall(r'class="tick end">([^<]*)<', figure)
    assert shown and len(set(shown)) == len(shown) and "nan" not in figure
    for x, y in points(figure):
        assert draw.LEFT <= x <= draw.WIDTH - draw.RIGHT and draw.TOP - 0.1 <= y <= draw.HEIGHT - draw.BOTTOM + 0.1


def test_many_points_are_means_and_what_is_not_finite_is_left_out() -> None:
    values = [(n, float("nan") if n == 3 else 1.0 + n % 2) for n in range(1001)]
    figure = draw.lines({"one": values}, "t", "x", "y")
    assert len(points(figure)) <= draw.MOST_POINTS and "means of 5 a point" in figure
    assert "nothing recorded" in draw.lines({"one": [(0, float("inf"))]}, "t", "x", "y")


def test_a_histogram_counts_every_value() -> None:
    values = [1, 1, 1, 7, 7, 500, 512, 512]
    counts = [int(n) for n in re.findall(r"<title>[^<]*: (\d+)</title>", draw.histogram(values, "t", "x", "y"))]
    assert sum(counts) == len(values) and counts[0] == 5 and counts[-1] == 3
    assert "<rect" in draw.histogram([4, 4], "t", "x", "y")
