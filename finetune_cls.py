"""Fine-tunes an LM on text classification and scores it: accuracy and macro F1.

    python finetune_cls.py                                              # toycls, no further pre-training
    python finetune_cls.py --dataset=chemprot --lm=runs/chemprot-whole  # a folder that pretrain.py made
    python finetune_cls.py --dataset=reviews.csv --lm=roberta-base --out=runs/reviews
    python finetune_cls.py --predict=new.csv --lm=runs/reviews          # new.predicted.csv, no training
    torchrun --nproc_per_node=4 finetune_cls.py --dataset=imdb --lm=bert-base-uncased

A kind of task is a file finetune_KIND.py with the names below; train_nmg.py finds it by the kind of the data.

    Config, main   the flags, as a subclass of EvaluationConfig, and what runs with them
    KIND           the kind of data sets that it handles (Data.kind, in support/data.py)
    INNER_LOOP     the values of train_nmg.py's flags that differ between tasks
    METRICS        what train_nmg.py may reward: scores of `summary`, or means of what `predictions` has
    pieces_of      cuts a split into what the model reads: texts, windows, ...
    finetune       trains a task model around a copy of an LM's encoder (loss_fn as in loop.fit)
    predictions    a dict for every example, always in the same order, with those of METRICS that `summary`
                   lacks; finetune.py looks at "gold" and "predicted", where they are there
    summary        the scores of all predictions, in percent: a line of results
    f1_by_label    may be missing: F1 of every class, for the end of a run
    AUTO_CLASS     the class of transformers that `finetune` makes, by which --predict opens the model
    outputs        for --predict, may be missing: the columns that are added to each row
"""
import sys
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

from finetune import EvaluationConfig, evaluate
from nmg.loop import check_finite, fit, forward_all
from support import runs, toy
from support.data import Pieces, Split, collate, truncated
from support.models import with_head
from support.runs import UserError

KIND = "cls"
# The paper's values for the inner loop of meta-training (its appendix).
INNER_LOOP = {"ft_epochs": 5, "ft_lr": 2e-5, "ft_max_len": 256, "metric": "accuracy"}
METRICS = ("accuracy", "macro_f1", "likelihood")
AUTO_CLASS = AutoModelForSequenceClassification


@dataclass
class Config(EvaluationConfig):
    # The values are the paper's, of a whole task; with --lm=tiny, FINETUNE_CLS in support/toy.py.
    dataset: str = "toycls"         # imdb chemprot scierc acl_arc scicite toycls, hf:REPO of the hub, or a
                                    # path with text and label (data_prep.py)
    epochs: int = 3
    lr: float = 2e-5                # raise it for LMs smaller than BERT-base (6 layers x 384: 2e-4)
    batch_size: int = 16            # texts per step; the paper chose from 12, 16, 32
    max_len: int = 256              # tokens of a text; what is longer is cut


# ---------------------------------------------------------------- the task

def pieces_of(split: Split, max_len: int) -> Pieces:
    """Every text of a split once, cut to max_len tokens."""
    if len(split.labels) < 2:
        raise UserError(f"all texts of train have the label {split.labels[0]!r}; two labels are needed")
    return truncated(split, max_len)


def labels_of(pieces: Pieces) -> np.ndarray:
    """(M,) the class of each piece, an index into split.labels."""
    return pieces.split.label[pieces.text_ids].astype(np.int64)


def loss_fn(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy, summed over the texts of a batch."""
    output = model(input_ids=tensors["input_ids"], attention_mask=tensors.get("attention_mask"))
    return F.cross_entropy(output.logits.float(), tensors["labels"], reduction="sum")


def finetune(lm: torch.nn.Module, pieces: Pieces, *, seed: int = 0, **training: object) -> torch.nn.Module:
    """A classifier around a copy of the LM's encoder, trained on `pieces`; `lm` stays as it is.

    training: epochs, lr, batch_size and more, as in loop.fit"""
    names = dict(enumerate(pieces.split.labels))
    label2id = {label: i for i, label in names.items()}
    model = with_head(lm, AUTO_CLASS, seed, id2label=names, label2id=label2id,
                      problem_type="single_label_classification")
    labels = torch.from_numpy(labels_of(pieces))

    def make_batch(epoch, indices):
        return collate(pieces, indices).tensors() | {"labels": labels[indices]}

    fit(model, pieces.length, make_batch, loss_fn, seed=seed, desc="fine-tuning", **training)
    return model


def log_probs_of(model: torch.nn.Module, pieces: Pieces) -> np.ndarray:
    """(M, C) log probability of each of C labels for each piece."""
    log_probs = np.zeros((len(pieces), model.config.num_labels), np.float32)                    # (M, C)
    for indices, _, output in forward_all(model, pieces):
        check_finite(output.logits, "the predictions")
        log_probs[indices] = output.logits.float().log_softmax(-1).cpu().numpy()
    return log_probs


def predictions(model: torch.nn.Module, pieces: Pieces) -> list[dict]:
    """A line for every text, in the order of the split: its index there, its label, the predicted one,
    accuracy (0 or 1), and likelihood, log p(label)."""
    return lines_of(log_probs_of(model, pieces), pieces)


def lines_of(log_probs: np.ndarray, pieces: Pieces) -> list[dict]:
    """The lines of `predictions`, given the log probabilities (M, C) of the labels."""
    labels, names = labels_of(pieces), pieces.split.labels
    lines = []
    for i in np.argsort(pieces.text_ids):
        gold, predicted = labels[i], log_probs[i].argmax()
        lines.append({"text": int(pieces.text_ids[i]), "gold": names[gold], "predicted": names[predicted],
                      "accuracy": float(gold == predicted), "likelihood": float(log_probs[i, gold])})
    return lines


def summary(lines: list[dict]) -> dict[str, float]:
    """Accuracy (which is micro F1) and macro F1 of all predictions, in percent."""
    correct = [line["gold"] == line["predicted"] for line in lines]
    f1 = [*f1_by_label(lines).values()]
    return {"accuracy": 100 * float(np.mean(correct)), "macro_f1": 100 * float(np.mean(f1))}


def f1_by_label(lines: list[dict]) -> dict[str, float]:
    """F1, in [0, 1], of every label that a text has or that was predicted."""
    gold = np.array([line["gold"] for line in lines])
    predicted = np.array([line["predicted"] for line in lines])
    f1 = {}
    for label in np.union1d(gold, predicted):
        hits = ((gold == label) & (predicted == label)).sum()
        f1[str(label)] = float(2 * hits / ((gold == label).sum() + (predicted == label).sum()))
    return f1


# ---------------------------------------------------------------- the script

def outputs(model: torch.nn.Module, pieces: Pieces) -> list[dict]:
    """The predicted label of every text, and the probability of each label, in the order of the texts."""
    names = pieces.split.labels
    lines = []
    for p in np.exp(log_probs_of(model, pieces)[np.argsort(pieces.text_ids)]):
        line = {"predicted": names[p.argmax()]}
        for i, name in enumerate(names):
            line[f"p_{name}"] = round(float(p[i]), 6)
        lines.append(line)
    return lines


def main(cfg: Config) -> None:
    evaluate(cfg, sys.modules[__name__])


if __name__ == "__main__":
    runs.start(main, Config, tiny=toy.FINETUNE_CLS)
