"""Writes the data set of a user who has few labels: random documents of the train split of a task, which
together have at least --labels texts. With --corpus all texts of train are written, too, without labels.

    python dev/few_labels.py --dataset=chemprot --lm=MINILM --out=runs/data/few
    python dev/few_labels.py --dataset=chemprot --lm=MINILM --corpus --out=runs/data/few-and-text
"""
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data_prep
from support import runs
from support.models import load_tokenizer
from support.rng import rng_for


@dataclass
class Config:
    dataset: str = "chemprot"
    lm: str = "tiny"            # its tokenizer, without which data are not read; the texts stay the same
    labels: int = 400           # so many labelled texts, or a few more, as documents stay whole
    corpus: bool = False        # True: corpus.jsonl, beside train.jsonl
    seed: int = 0               # draws the documents
    out: str = "runs/data/few"  # an empty folder, or a new one


def main(cfg: Config) -> None:
    if any(Path(cfg.out).glob("*")):
        raise runs.UserError(f"--out={cfg.out}: is not empty; choose another folder")
    data = data_prep.load(cfg.dataset, load_tokenizer(cfg.lm), kind="cls")
    data.check_labels("train")
    train = data["train"]
    docs, n_texts = np.unique(train.doc, return_counts=True)
    order = rng_for(cfg.seed, "documents").permutation(len(docs))
    if not 1 <= cfg.labels <= len(train):
        raise runs.UserError(f"--labels={cfg.labels}: must be from 1 to {len(train)}, the texts of train")
    # The fewest documents, in this order, that have so many texts.
    n_docs = np.searchsorted(n_texts[order].cumsum(), cfg.labels) + 1
    labelled = np.flatnonzero(np.isin(train.doc, docs[order[:n_docs]]))
    splits = {"train": [{"text": train.text(i), "label": train.labels[train.label[i]]} for i in labelled]}
    if cfg.corpus:
        splits["corpus"] = [{"text": train.text(i)} for i in range(len(train))]
    for split, rows in splits.items():
        runs.write_rows(Path(cfg.out, f"{split}.jsonl"), rows)
        print(f"{split}: {len(rows)} texts")


if __name__ == "__main__":
    runs.start(main, Config)
