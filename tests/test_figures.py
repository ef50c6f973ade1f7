"""tools/figures.py: README.md and docs/learning.md show what it makes of results/."""
import pytest
from conftest import ROOT

from support import runs
from tools import figures


def test_the_pages_show_what_the_plays_say(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    figures.main(figures.Config(picture=str(tmp_path / "gain.png")))
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    shown = []
    for page in ("README.md", "docs/learning.md"):
        text = (ROOT / page).read_text("utf-8")
        for table in text.split(f"{figures.HEAD}\n")[1:]:
            shown += table.partition("\n\n")[0].splitlines()
    head, _ = figures.HEAD.splitlines()
    assert len(shown) > 10 and {*shown} == {*printed} - {head}
    assert (tmp_path / "gain.png").stat().st_size > 10_000


def test_a_comparison_is_of_pairs_of_seeds(tmp_path, capsys):
    """Two maskers of a seed are averaged; a seed without random masks is left out."""
    scores = {0: (50, 52, 54), 1: (60, 61, 61), 2: (40, 42, 44)}
    for seed, found in scores.items():
        for masker, score in zip(("random", "sampled:a", "sampled:b"), found, strict=True):
            runs.append_row(tmp_path / "plays.jsonl", {"masker": masker, "seed": seed, "accuracy": score})
    runs.append_row(tmp_path / "plays.jsonl", {"masker": "sampled:a", "seed": 3, "accuracy": 99})
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
