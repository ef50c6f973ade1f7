"""A third kind of task, beside classification and questions: one file, and a source of that kind."""
import re

import numpy as np
import pytest
from conftest import call

import runs
import sources

# Predicts a number: a head of one output, and the mean squared error.
FINETUNE_SCORE = '''
import sys
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

from data import collate, truncated
from evaluation import EvaluationConfig, evaluate
from loop import autocast, device, fit, length_batches, to_device
from models import with_head

KIND = "score"
DEFAULTS = {"epochs": 2, "lr": 1e-3, "batch_size": 8, "max_len": 64}
INNER_LOOP = {"ft_epochs": 2, "ft_lr": 1e-3, "metric": "closeness"}
METRICS = ("closeness",)


@dataclass
class Config(EvaluationConfig):
    dataset: str = "counting"


def pieces_of(split, max_len):
    return truncated(split, max_len)


def numbers_of(pieces):
    labels = [float(label) for label in pieces.split.labels]
    return torch.tensor(labels)[pieces.split.label[pieces.text_ids].astype(int)]


def loss_fn(model, tensors):
    return F.mse_loss(predict(model, tensors), tensors["labels"], reduction="sum")


def predict(model, tensors):
    with autocast(model):
        output = model(input_ids=tensors["input_ids"], attention_mask=tensors["attention_mask"])
    return output.logits.float().squeeze(-1)


def finetune(lm, pieces, *, epochs, lr, batch_size, seed=0, distributed=False):
    model, numbers = with_head(lm, AutoModelForSequenceClassification, seed, num_labels=1), numbers_of(pieces)

    def make_batch(step, epoch, indices):
        return collate(pieces, indices).tensors() | {"labels": numbers[indices]}

    fit(model, pieces.length, make_batch, loss_fn, epochs=epochs, batch_size=batch_size, lr=lr, seed=seed,
        distributed=distributed, desc="fine-tuning")
    return model


@torch.no_grad()
def predictions(model, pieces):
    error = torch.zeros(len(pieces))
    model.to(device()).eval()
    for indices in length_batches(pieces.length):
        tensors = to_device(collate(pieces, indices).tensors())
        error[indices] = predict(model, tensors).cpu() - numbers_of(pieces)[indices]
    return [{"closeness": -error[i].item()**2} for i in np.argsort(pieces.example_ids)]


def summary(lines):
    return {"closeness": np.mean([line["closeness"] for line in lines])}


def main(cfg):
    evaluate(cfg, sys.modules[__name__])
'''


@pytest.fixture
def counting(tmp_path, monkeypatch):
    """How often "nas" stands in a text: the data set `counting`, of kind "score"."""
    (tmp_path / "finetune_score.py").write_text(FINETUNE_SCORE)
    monkeypatch.syspath_prepend(tmp_path)
    rows = []
    for i in range(60):
        rows.append({"text": f"text {i}: tom" + " nas" * (i % 4), "label": str(i % 4)})
    source = sources.Source({"train": rows}, kind="score")
    monkeypatch.setitem(sources.DATASETS, "counting", lambda: source)


def test_a_policy_is_learned_for_a_third_kind_of_task(counting, tmp_path):
    result = call("train_nmg.py", "--dataset=counting", "--episodes=1", "--contexts=12", "--val_share=0.3",
                  "--out=o", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "o/policy.safetensors").exists()
    [row] = runs.read_rows(tmp_path / "o/metrics.jsonl")
    # Minus a mean squared error.
    assert -20 < row["learner_score"] < 0 and np.isfinite(list(row.values())).all()


def test_an_lm_is_fine_tuned_and_scored(counting, tmp_path, monkeypatch):
    result = call("finetune_score.py", "--dev_share=0.2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    [row] = runs.read_rows(tmp_path / "results.jsonl")
    assert (row["split"], row["examples"], row["config"]["lr"]) == ("dev", 12, 1e-3)
    assert -20 < row["closeness"] < 0
    made = call("report.py", cwd=tmp_path)
    assert made.returncode == 0 and f"| none | {row['closeness']:.2f} |" in made.stdout


def test_a_search_for_a_third_kind_of_task(counting, tmp_path):
    result = call("search_masks.py", "--dataset=counting", "--metric=closeness", "--contexts=12", "--pairs=2",
                   "--features=frequent,label", "--components=1", "--out=o", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert re.search(r"worth of 1 sd, x 100 +closeness\n", (tmp_path / "o/worth.txt").read_text())


def test_its_metrics_and_lengths_are_its_own(counting, tmp_path):
    result = call("train_nmg.py", "--dataset=counting", "--metric=accuracy", cwd=tmp_path)
    assert result.returncode == 2 and "--metric=accuracy: allowed are closeness" in result.stderr
