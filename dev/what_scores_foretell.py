"""Do words that heuristics choose foretell which masks score higher? Asked of the plays that runs have kept.

    R=results/nmg-acl_arc-48-minilm
    python dev/what_scores_foretell.py --dataset=acl_arc --lm=MINILM --plays=$R-0,$R-1

Printed are the correlations of tools/foretell.py, where words are liked not by a policy, but by a score of
maskers.py: label, tfidf, rare, and the sum of these and of minus punct, each with standard deviation 1 in a
block. Words are counted in a split as a whole, so that `label` also knows labels that plays were scored on.
"""
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data_prep
import maskers
from nmg.plays import Episode, load_episodes
from nmg.policies import sharpened
from support import runs
from support.data import Split
from support.models import load_tokenizer
from support.runs import UserError
from support.sources import DataFlags
from tools.foretell import correlations


@dataclass
class Config(DataFlags):
    dataset: str = "chemprot"
    lm: str = "tiny"
    plays: str | None = None        # folders of runs, comma-separated
    split: str = "test"             # the texts that words are counted in


def scores_of(episode: Episode, split: Split, is_punct: np.ndarray) -> dict[str, np.ndarray]:
    """The scores (N, L) of the tokens of an episode, -inf where they must not be masked."""
    # What these scores read of a batch.
    batch = SimpleNamespace(input_ids=episode.input_ids, is_punct=is_punct[episode.input_ids], split=split,
                            labelled=np.arange(len(split)))
    found = {}
    for name, sign in {"label": 1, "tfidf": 1, "rare": 1, "punct": -1}.items():
        # Of words that the split does not hold, some are infinite.
        score = sign * maskers.SCORES[name](batch).clip(-20, 20)
        found[name] = sharpened(np.where(episode.maskable, score, -np.inf), 1.0)
    found["all four"] = sum(found.values())
    # By itself it has two values only, so that a highest tenth would be drawn by place.
    del found["punct"]
    return found


def main(cfg: Config) -> None:
    tokenizer = load_tokenizer(cfg.lm)
    split = data_prep.load(cfg.dataset, tokenizer, columns=cfg)[cfg.split]
    # Labels are counted in these texts, too.
    split.train = split
    is_punct, _ = data_prep.vocabulary_tables(tokenizer)
    episodes = []
    for folder in (cfg.plays or "").split(","):
        episodes += [episode for episode, _ in load_episodes(Path(folder))]
    if not episodes:
        raise UserError(f"--plays={cfg.plays}: there are no plays; give folders of runs that have kept them")
    scores = [scores_of(episode, split, is_punct) for episode in episodes]
    first, *_ = episodes[0].plays.values()
    rows = {}
    for name in scores[0]:
        liked = [of_episode[name] for of_episode in scores]
        for metric, found in correlations(liked, episodes, list(first.scores)).items():
            rows[name, metric] = found
    print(pd.DataFrame(rows).T.round(2).to_string())


if __name__ == "__main__":
    runs.start(main, Config)
