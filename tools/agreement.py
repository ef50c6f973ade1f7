"""Whether searches of different seeds found the same: a cosine, and how often one foresees another's winners.

    python -m tools.agreement --logs=search-0.jsonl,search-1.jsonl,search-2.jsonl

Searches that share a data set, an LM and the features draw sub-tasks and directions of their own, so what one
of them believes has not seen the pairs of another. The documents of D_val are the same for all.
"""
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import runs
from plots import draw_worth, worth_table
from runs import UserError
from search_masks import Belief, belief_from


@dataclass
class Config:
    logs: str = ""                      # --log of two searches or more, with commas
    out: str = "runs/agreement.png"     # the picture of what all pairs together say


def read(logs: list[Path]) -> tuple[dict, list[list[dict]]]:
    """The settings that the searches have in common, and the pairs of each."""
    searches = [runs.read_rows(log) for log in logs]
    if len(searches) < 2 or not all(len(lines) > 1 and "direction" in lines[1] for lines in searches):
        raise UserError("--logs: two files of search_masks.py or more are needed, with commas between")
    settings = [lines[0] | {"seed": None} for lines in searches]
    if any(other != settings[0] for other in settings):
        raise UserError("--logs: these searches differ in more than their seed")
    return settings[0], [lines[1:] for lines in searches]


def foreseen(belief: Belief, other: Belief) -> str:
    """How many winners of another search a belief foresees, and the correlation with its outcomes."""
    expected = other.X @ belief.mean
    right = int((expected * other.y > 0).sum())
    return f"{right} of {len(other.y)}, correlation {np.corrcoef(expected, other.y)[0, 1]:.2f}"


def main(cfg: Config) -> None:
    settings, searches = read([Path(log) for log in filter(None, cfg.logs.split(","))])
    metric, D = settings["metric"], len(searches[0][0]["direction"])
    names = settings["features"].split(",")
    names += [f"component {i + 1}" for i in range(settings["components"])]
    if len(names) != D:
        # Scores that are the same for every token were left out, and the logs do not say which.
        names = [f"feature {i + 1}" for i in range(D)]
    beliefs = [belief_from(pairs, metric, D) for pairs in searches]
    for i, j in itertools.combinations(range(len(beliefs)), 2):
        a, b = beliefs[i], beliefs[j]
        cosine = a.mean @ b.mean / (np.linalg.norm(a.mean) * np.linalg.norm(b.mean))
        print(f"{i} and {j}: cosine {cosine:.2f}; winners of {j} that {i} foresees: {foreseen(a, b)}; "
              f"of {i} that {j} does: {foreseen(b, a)}")
    print(f"directions without anything in common have cosines of 0 +- {1 / np.sqrt(D):.2f}\n")

    pairs = list(itertools.chain(*searches))
    belief = belief_from(pairs, metric, D)
    print(worth_table(names, {metric: (belief.mean, belief.intervals())}))
    print(f"all {len(pairs)} pairs together: odds of {belief.odds()} that it matters which words are masked")
    expected = np.array([pair["expected"] for pair in pairs])
    draw_worth(names, belief.mean, belief.intervals(), expected, belief.y, Path(cfg.out))
    print(f"picture: {cfg.out}")


if __name__ == "__main__":
    runs.start(main, Config)
