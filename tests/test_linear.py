"""tools/linear.py: the baseline is a row like others, scored by the same code."""
import numpy as np
import pytest
from conftest import call, run, succeed, write_rows

from support import runs


@pytest.fixture
def colors(tmp_path):
    """Texts whose label is one of their words; in train, "grey" is rare."""
    for split, n in (("train", 90), ("test", 30)):
        rows = []
        for i in range(n):
            color = ["red", "blue", "grey"][i % 3]
            rows.append({"text": f"number {i} is {color}", "label": color})
        write_rows(tmp_path / "colors" / f"{split}.jsonl", rows)
    return tmp_path


def test_a_row_beside_those_of_the_lm(colors):
    """On the same examples, with the same fields, and first in the table."""
    flags = ["--dataset=colors", "--epochs=1", "--dev_share=0.1"]
    for script in ("finetune_cls.py", "tools/linear.py"):
        for seed in (0, 1):
            succeed(script, *flags, f"--seed={seed}", "--save_model=False", cwd=colors)
    of_lm, _, linear, _ = runs.read_rows(colors / "results.jsonl")
    assert linear.keys() == of_lm.keys() and (linear["row"], linear["masker"]) == ("linear", "none")
    assert linear["config"]["data"] == of_lm["config"]["data"] and linear["accuracy"] == 100
    lines = [runs.read_rows(colors / row["predictions"]) for row in (of_lm, linear)]
    assert [line["gold"] for line in lines[0]] == [line["gold"] for line in lines[1]]
    assert lines[0][0].keys() == lines[1][0].keys()
    table = call("report.py", cwd=colors).stdout
    assert 0 < table.index("| linear | 100.00 ±0.00 |") < table.index("| none |")


def test_few_labels_are_drawn_by_seed(colors):
    """Also where a class has none: the likelihood is a number. As run_all.sh starts it, by its path."""
    likelihoods = []
    for out, seed in (("a", 0), ("b", 0), ("c", 3)):
        flags = ["--dataset=colors", "--labelled=3", f"--seed={seed}", f"--out={out}"]
        start = run if out == "a" else call
        result = start("tools/linear.py", *flags, cwd=colors)
        assert result.returncode == 0, result.stderr
        lines = runs.read_rows(colors / out / "predictions.jsonl")
        likelihoods.append([line["likelihood"] for line in lines])
    assert np.isfinite(likelihoods).all()
    assert likelihoods[0] == likelihoods[1] != likelihoods[2]
    result = call("tools/linear.py", "--dataset=colors", "--labelled=1", cwd=colors)
    assert result.returncode == 2 and "two labels are needed" in result.stderr
