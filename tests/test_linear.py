"""tools/linear.py: the baseline is a row like others, scored by the same code."""
import subprocess
import sys

import numpy as np
from conftest import ROOT, call, succeed

from support import runs


def test_a_row_beside_those_of_the_lm(cls_folder, tmp_path):
    """On the same examples, with the same fields, and first in the table."""
    for script in ("finetune_cls.py", "tools/linear.py"):
        for seed in (0, 1):
            flags = [f"--dataset={cls_folder}", f"--seed={seed}", "--epochs=1", "--save_model=False"]
            succeed(script, *flags, cwd=tmp_path)
    of_lm, _, linear, _ = runs.read_rows(tmp_path / "results.jsonl")
    assert linear.keys() == of_lm.keys() and (linear["row"], linear["masker"]) == ("linear", "none")
    assert linear["config"]["data"] == of_lm["config"]["data"] and linear["accuracy"] == 100
    lines = [runs.read_rows(tmp_path / row["predictions"]) for row in (of_lm, linear)]
    assert [line["gold"] for line in lines[0]] == [line["gold"] for line in lines[1]]
    assert lines[0][0].keys() == lines[1][0].keys()
    table = call("report.py", cwd=tmp_path).stdout
    assert 0 < table.index("| linear | 100.00 ±0.00 |") < table.index("| none |")


def test_few_labels_are_drawn_by_seed(cls_folder, tmp_path):
    """Also where a class has none: the likelihood is a number. Once as run_all.sh starts it, by its path."""
    likelihoods = []
    for seed, out in ((0, "by its path"), (0, "b"), (3, "c")):
        flags = [f"--dataset={cls_folder}", "--labelled=3", f"--seed={seed}", f"--out={out}"]
        if out == "by its path":
            subprocess.run([sys.executable, ROOT / "tools/linear.py", *flags], cwd=tmp_path, check=True)
        else:
            succeed("tools/linear.py", *flags, cwd=tmp_path)
        lines = runs.read_rows(tmp_path / out / "predictions.jsonl")
        likelihoods.append([line["likelihood"] for line in lines])
    assert np.isfinite(likelihoods).all()
    assert likelihoods[0] == likelihoods[1] != likelihoods[2]
