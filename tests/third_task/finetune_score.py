"""Fine-tunes an LM to predict a number for each text: an example of a third kind of task, to copy.

    python finetune_score.py --dataset=...        # beside finetune_cls.py, whose docstring lists the names
"""
import sys
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

from finetune import EvaluationConfig, evaluate
from nmg import runs
from nmg.data import collate, truncated
from nmg.loop import autocast, device, fit, length_batches, to_device
from nmg.models import with_head

KIND = "score"
INNER_LOOP = {"ft_epochs": 2, "ft_lr": 1e-3, "ft_max_len": 64, "metric": "closeness"}
METRICS = ("closeness",)


@dataclass
class Config(EvaluationConfig):
    dataset: str = "counting"
    epochs: int = 2
    lr: float = 1e-3
    batch_size: int = 8
    max_len: int = 64


def pieces_of(split, max_len):
    """Every text once, cut to max_len tokens."""
    return truncated(split, max_len)


def numbers_of(pieces):
    """(M,) the number of each piece; the names of labels are the numbers."""
    labels = [float(label) for label in pieces.split.labels]
    return torch.tensor(labels)[pieces.split.label[pieces.text_ids].astype(int)]


def loss_fn(model, tensors):
    """Squared error, summed over the texts of a batch."""
    return F.mse_loss(predict(model, tensors), tensors["labels"], reduction="sum")


def predict(model, tensors):
    """(B,) numbers."""
    with autocast(model):
        output = model(input_ids=tensors["input_ids"], attention_mask=tensors.get("attention_mask"))
    return output.logits.float().squeeze(-1)


def finetune(lm, pieces, *, seed=0, **training):
    model = with_head(lm, AutoModelForSequenceClassification, seed, num_labels=1)
    numbers = numbers_of(pieces)

    def make_batch(step, epoch, indices):
        # "labels" is what the steps count, too; -100 would be no label.
        return collate(pieces, indices).tensors() | {"labels": numbers[indices]}

    fit(model, pieces.length, make_batch, loss_fn, seed=seed, desc="fine-tuning", **training)
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


if __name__ == "__main__":
    runs.start(main, Config)
