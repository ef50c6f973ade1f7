"""Writes the data set of a user who has few labels: about so many labelled texts of a task's train, in whole
documents. With --corpus the texts of all of train lie beside them, without labels.

    python dev/few_labels.py --dataset=chemprot --out=runs/data/few
    python dev/few_labels.py --dataset=chemprot --corpus --out=runs/data/few-and-text
"""
import json
import sys
from pathlib import Path

import fire
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data_prep
from support import sources
from support.models import load_tokenizer
from support.rng import rng_for


def main(out: str, dataset: str = "chemprot", lm: str = "MINILM", labels: int = 400, seed: int = 0,
         corpus: bool = False) -> None:
    train = list(sources.find_source(dataset).records("train"))
    # Which texts belong to one document, data_prep finds out.
    doc = np.asarray(data_prep.load(dataset, load_tokenizer(lm))["train"].doc)
    order = rng_for(seed, "documents").permutation(np.unique(doc))
    texts_until = np.cumsum([np.sum(doc == number) for number in order])
    chosen = order[:np.searchsorted(texts_until, labels) + 1]
    labelled = [train[i] for i in np.flatnonzero(np.isin(doc, chosen))]
    splits = {"train": [{"text": record["text"], "label": record["label"]} for record in labelled]}
    if corpus:
        splits["corpus"] = [{"text": record["text"]} for record in train]
    Path(out).mkdir(parents=True, exist_ok=True)
    for split, records in splits.items():
        lines = [json.dumps(record) for record in records]
        Path(out, f"{split}.jsonl").write_text("\n".join(lines) + "\n")
        print(split, len(lines))


if __name__ == "__main__":
    fire.Fire(main)
