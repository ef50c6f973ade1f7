"""Writes the data set of a user who has few labels: labelled texts of the train split of a task, in whole
documents, until there are so many. With --corpus the texts of all of train lie beside them, without labels.

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
    lm: str = "tiny"            # its tokenizer prepares the data, which says which texts are one document
    labels: int = 400
    corpus: bool = False
    seed: int = 0               # draws the documents
    out: str = "runs/data/few"  # an empty folder, or a new one


def main(cfg: Config) -> None:
    train = data_prep.load(cfg.dataset, load_tokenizer(cfg.lm), kind="cls")["train"]
    order = rng_for(cfg.seed, "documents").permutation(np.unique(train.doc))
    texts_until = np.cumsum([np.sum(train.doc == number) for number in order])
    chosen = order[:np.searchsorted(texts_until, cfg.labels) + 1]
    labelled = [{"text": train.text(i), "label": train.labels[train.label[i]]}
                for i in np.flatnonzero(np.isin(train.doc, chosen))]
    splits = {"train": labelled}
    if cfg.corpus:
        splits["corpus"] = [{"text": train.text(i)} for i in range(len(train))]
    if any(Path(cfg.out).glob("*")):
        raise runs.UserError(f"--out={cfg.out}: is not empty; choose another folder")
    for split, rows in splits.items():
        runs.write_rows(Path(cfg.out, f"{split}.jsonl"), rows)
        print(f"{split}: {len(rows)} texts")


if __name__ == "__main__":
    runs.start(main, Config)
