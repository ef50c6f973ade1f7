"""Which masks score higher, by the plays that runs have kept: do maskers that learn nothing foretell it?

    R=results/nmg-bounded-chemprot-minilm
    python dev/what_scores_foretell.py --dataset=chemprot --lm=MINILM --plays=$R-0,$R-1,$R-2

As in tools/foretell.py, how much a mask is liked is correlated, within episodes, with each score of its play.
Here it is not a policy that likes words, but scores of maskers.py: label, tfidf and rare, the opposite of
punctuation, and their sum in standard deviations. They are counted in the texts of --split.
"""
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data_prep
from nmg import counts
from nmg.plays import Episode, load_episodes
from nmg.policies import sharpened
from support import runs
from support.data import Split
from support.models import load_tokenizer
from support.sources import DataFlags
from tools.foretell import HIGHEST


@dataclass
class Config(DataFlags):
    dataset: str = "chemprot"
    lm: str = "tiny"
    plays: str | None = None        # folders of runs, comma-separated
    split: str = "test"             # the texts and labels that words are counted in


def likings(episode: Episode, split: Split, is_punct: np.ndarray) -> dict[str, np.ndarray]:
    """The scores (N, L) of the tokens of an episode, -inf where they must not be masked."""
    ids = episode.input_ids
    times = (ids[:, :, None] == ids[:, None, :]).sum(2)
    every = tuple(range(len(split)))
    scores = {"label": np.log(counts.label_information(split, every)[ids]),
              "tfidf": np.log(times) + np.log(counts.inverse_document_frequency(split)[ids]),
              "rare": -np.log(counts.token_counts(split)[ids]),
              "no punctuation": -1.0 * is_punct[ids]}
    # Of words that the split does not hold, some are infinite.
    found = {}
    for name, score in scores.items():
        found[name] = sharpened(np.where(episode.maskable, score.clip(-20, 20), -np.inf), 1.0)
    found["all four"] = sum(found.values())
    return found


def main(cfg: Config) -> None:
    tokenizer = load_tokenizer(cfg.lm)
    split = data_prep.load(cfg.dataset, tokenizer, columns=cfg)[cfg.split]
    is_punct, _ = data_prep.vocabulary_tables(tokenizer)
    # Each play's liking and score, less the means of its episode.
    liked, scored = defaultdict(list), defaultdict(list)
    for folder in cfg.plays.split(","):
        for episode, _ in load_episodes(Path(folder)):
            plays = list(episode.plays.values())
            for name, liking in likings(episode, split, is_punct).items():
                rank = (-liking).argsort(1).argsort(1)
                n_maskable = np.isfinite(liking).sum(1, keepdims=True)
                ways = {"all words": liking, "highest tenth": rank < HIGHEST * n_maskable}
                for way, tokens in ways.items():
                    of_plays = np.array([tokens[play.mask].mean() for play in plays])
                    liked[name, way] += list(of_plays - of_plays.mean())
            for metric in plays[0].scores:
                scores = np.array([play.scores[metric] for play in plays])
                scored[metric] += list(scores - scores.mean())
    columns = {}
    for metric, scores in scored.items():
        columns[metric] = {key: np.corrcoef(likes, scores)[0, 1] for key, likes in liked.items()}
    print(pd.DataFrame(columns).round(2).to_string())


if __name__ == "__main__":
    runs.start(main, Config)
