"""tools/figures.py: README.md, docs/learning.md and docs/comparisons.md show what it makes of results/."""
import pytest
from conftest import ROOT

from nmg.plays import checksum_of_plays
from nmg.policies import load_policy
from support import plots, runs
from tools import figures


def tables(text: str) -> set[tuple[str, str]]:
    """The rows of all Markdown tables of a text, each with the first line of its table."""
    rows = set()
    for paragraph in text.split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line.startswith("|")]
        rows |= {(lines[0], line) for line in lines[2:]}
    return rows


def test_the_pages_show_what_lies_in_results(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    figures.main(figures.Config(pictures=str(tmp_path)))
    printed = tables(capsys.readouterr().out)
    heads = {head for head, _ in printed}
    shown = set()
    for page in ("README.md", "docs/learning.md", "docs/comparisons.md"):
        shown |= {row for row in tables((ROOT / page).read_text("utf-8")) if row[0] in heads}
    assert len(heads) == 4 and shown == printed
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("gain", "masks", "toy"))
    # Under another name, such as that of results, nothing is written.
    with pytest.raises(runs.UserError, match=r"gain\.jsonl: is a picture, and must end with"):
        plots.save(plots.figure(1, 1), tmp_path / "gain.jsonl")


def test_a_comparison_is_of_pairs_of_seeds(tmp_path):
    """Two maskers of a seed are averaged; a seed without random masks is left out."""
    scores = {0: (50, 52, 54), 1: (60, 61, 61), 2: (40, 42, 44)}
    lines = [{"masker": "sampled:a", "seed": 3, "accuracy": 99}]
    for seed, found in scores.items():
        for masker, score in zip(("random", "sampled:a", "sampled:b"), found, strict=True):
            lines.append({"masker": masker, "seed": seed, "accuracy": score})
    runs.write_rows(tmp_path / "plays.jsonl", lines)
    row = {"what": "ours", "plays": ["plays.jsonl"], "masks": "sampled:.*"}
    plays = figures.plays_of(row, tmp_path)
    found = figures.compared(row, plays, "accuracy")
    # The differences are 3, 1, 3: their standard error is 2/3, and t(2) at .975 is 4.303.
    assert found["seeds"] == 3 and found["difference"] == pytest.approx(7 / 3)
    assert found["high"] - found["difference"] == pytest.approx(4.302653 * 2 / 3)
    assert found["better"] == 3

    with pytest.raises(runs.UserError, match=r"no such masker.*random"):
        figures.compared(row | {"masks": "nmg"}, plays, "accuracy")
    with pytest.raises(runs.UserError, match=r"plays=no\.jsonl: no such file"):
        figures.plays_of(row | {"plays": ["no.jsonl"]}, tmp_path)


def test_the_policies_that_are_kept_were_learned_from_the_plays_that_are_kept():
    folders = sorted((ROOT / "results/policies").iterdir())
    assert len(folders) >= 3
    for folder in folders:
        assert load_policy(folder).hidden_size == 384, folder
        settings = runs.read_run(folder)["settings"]
        plays = [checksum_of_plays(ROOT / name) for name in settings["plays"].split(",")]
        assert settings["plays_checksum"] == plays and settings["episodes"] == 0
