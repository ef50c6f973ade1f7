"""A third kind of task, beside classification and questions: one file, and a source of that kind."""

import numpy as np
import pytest
from conftest import ROOT, call

from nmg import runs, sources


@pytest.fixture
def counting(tmp_path, monkeypatch):
    """How often "nas" stands in a text: the data set `counting`, of kind "score"."""
    monkeypatch.syspath_prepend(ROOT / "tests/third_task")
    rows = []
    for i in range(60):
        rows.append({"text": f"text {i}: tom" + " nas" * (i % 4), "label": i % 4})
    source = sources.Source({"train": rows}, kind="score")
    monkeypatch.setitem(sources.DATASETS, "counting", lambda: source)


@pytest.mark.training
def test_a_policy_is_learned_for_a_third_kind_of_task(counting, tmp_path):
    result = call("train_nmg.py", "--dataset=counting", "--episodes=1", "--contexts=12", "--val_share=0.3",
                  "--out=o", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "o/policy.safetensors").exists()
    [row] = runs.read_rows(tmp_path / "o/metrics.jsonl")
    # Minus a mean squared error.
    assert -20 < row["learner_score"] < 0 and np.isfinite(list(row.values())).all()

    # Its summary returns a number of numpy, with which the run goes on all the same.
    longer = call("train_nmg.py", "--dataset=counting", "--episodes=2", "--contexts=12", "--val_share=0.3",
                  "--out=o", cwd=tmp_path)
    assert longer.returncode == 0, longer.stderr
    assert [row["episode"] for row in runs.read_rows(tmp_path / "o/metrics.jsonl")] == [1, 2]


@pytest.mark.training
def test_an_lm_is_fine_tuned_and_scored(counting, tmp_path, monkeypatch):
    result = call("finetune_score.py", "--dev_share=0.2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    [row] = runs.read_rows(tmp_path / "results.jsonl")
    assert (row["split"], row["examples"], row["config"]["lr"]) == ("dev", 12, 1e-3)
    assert -20 < row["closeness"] < 0
    made = call("report.py", cwd=tmp_path)
    assert made.returncode == 0 and f"| none | {row['closeness']:.2f} |" in made.stdout


def test_its_metrics_and_lengths_are_its_own(counting, tmp_path):
    result = call("train_nmg.py", "--dataset=counting", "--metric=accuracy", cwd=tmp_path)
    assert result.returncode == 2 and "--metric=accuracy: allowed are closeness" in result.stderr
