"""The baseline without an LM: a linear classifier of words (TF-IDF and logistic regression).

    python -m tools.linear --dataset=my.csv --lm=roberta-base   # the row `linear` in the table of this LM

It is scored on the same texts and by the same code as a fine-tuned LM. The LM is not used: its tokenizer
prepares the data, and its name says in which table the row stands.
"""
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

# run_all.sh calls `python tools/linear.py`, which would not find the other files.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline

import finetune_cls
from finetune import evaluate
from finetune_cls import labels_of, lines_of
from support import runs
from support.data import Pieces, Split
from support.runs import UserError

# The inverse of the penalty of logistic regression. Of 1, 10 and 100, the last two were as good on the dev
# sets of ChemProt and ACL-ARC.
C = 10.0
# The least log probability, instead of minus infinity for a class without a text in train.
LOWEST = -20.0


@dataclass
class Config(finetune_cls.Config):
    row: str = "linear"
    linear: bool = True             # has no other value here; in results, it tells this baseline from an LM
    save_model: bool = False        # has no other value here


def pieces_of(split: Split, max_len: int) -> Pieces:
    """Every text of a split once and whole, so that none is said to be cut."""
    return finetune_cls.pieces_of(split, 2**31)


def texts_of(pieces: Pieces) -> list[str]:
    """The raw text of each piece, whole."""
    return [pieces.split.text(i) for i in pieces.text_ids]


def finetune(lm: object, pieces: Pieces, *, seed: int = 0, **training: object) -> Pipeline:
    """A linear classifier of the texts of `pieces`. `lm` and the flags of training have no effect."""
    words = TfidfVectorizer(sublinear_tf=True)
    classifier = LogisticRegression(C=C, max_iter=1000)
    try:
        return make_pipeline(words, classifier).fit(texts_of(pieces), labels_of(pieces))
    except ValueError as e:
        raise UserError(f"the linear baseline cannot be trained on these texts: {e}") from None


def predictions(model: Pipeline, pieces: Pieces) -> list[dict]:
    """As in finetune_cls.py."""
    log_probs = np.full((len(pieces), len(pieces.split.labels)), LOWEST)
    log_probs[:, model.classes_] = np.maximum(model.predict_log_proba(texts_of(pieces)), LOWEST)
    return lines_of(log_probs, pieces)


def main(cfg: Config) -> None:
    if cfg.save_model or cfg.predict or not cfg.linear:
        raise UserError("the linear baseline is not kept; leave out --save_model, --predict, and --linear")
    # The task of finetune_cls.py, with another model.
    task = vars(finetune_cls) | {"pieces_of": pieces_of, "finetune": finetune, "predictions": predictions}
    evaluate(cfg, SimpleNamespace(**task))


if __name__ == "__main__":
    runs.start(main, Config)
