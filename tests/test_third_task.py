"""A third kind of task, beside classification and questions: one file of a user's."""
import random

import numpy as np
import pytest
from conftest import ROOT, succeed

from support import runs, toy


@pytest.fixture
def ner(tmp_path, monkeypatch):
    """The module, and CoNLL files in which a name and the attribute behind it are a person."""
    rng = random.Random(0)
    (tmp_path / "conll").mkdir()
    for split, n in (("train", 200), ("dev", 20), ("test", 30)):
        text = "-DOCSTART- -X- O\n\n"
        for _ in range(n):
            lines = [f"{word} NN O\n" for word in rng.choices(toy.ALL_FILLERS, k=6)]
            person = f"{rng.choice(toy.ALL_NAMES)} NN B-PER\n{rng.choice(toy.ALL_ATTRIBUTES)} NN I-PER\n"
            lines.insert(rng.randrange(6), person)
            text += "".join(lines) + "\n"
        (tmp_path / f"conll/{split}.txt").write_text(text)
    monkeypatch.syspath_prepend(ROOT / "tests/third_task")
    import finetune_ner
    return finetune_ner


def test_tags_and_entities(ner):
    # The tokens are Anna - Maria, and two that hold the blank before them.
    arrays = {"char_end": [np.array([4, 5, 10, 16, 20])]}
    [tag] = ner.tag_arrays([{"text": "Anna-Maria Smith sat", "tags": [1, 2, 0]}], arrays)["tag"]
    assert [*tag] == [1, -100, -100, 2, 0]
    lines = [{"gold": ["B-PER", "I-PER", "I-ORG"], "predicted": ["O", "B-PER", "B-PER"]}]
    assert ner.entities(lines, "gold") == {(0, 0, "B-PER I-PER")}
    assert ner.entities(lines, "predicted") == {(0, 1, "B-PER"), (0, 2, "B-PER")}


@pytest.mark.slow
@pytest.mark.training
def test_a_policy_is_learned_for_a_third_kind_of_task(ner, tmp_path):
    succeed("train_nmg.py", "--dataset=conll", "--contexts=60", "--docs=60", "--ft_epochs=6",
            "--ft_lr=2e-3", "--episodes=1", "--out=o", cwd=tmp_path)
    [row] = runs.read_rows(tmp_path / "o/metrics.jsonl")
    assert row["learner_f1"] > 50


@pytest.mark.training
def test_an_lm_is_fine_tuned_and_scored(ner, tmp_path):
    succeed("finetune_ner.py", "--lr=2e-3", cwd=tmp_path)
    [row] = runs.read_rows(tmp_path / "results.jsonl")
    assert (row["split"], row["examples"]) == ("test", 30) and row["f1"] > 80
    made = succeed("report.py", cwd=tmp_path)
    assert f"| none | {row['f1']:.2f} |" in made.stdout
