"""How well a policy that was learned from one run's plays foretells the scores of other runs' plays.

    python -m tools.foretell --lm=MINILM --metric=likelihood --plays=runs/a,runs/b,runs/c
    python -m tools.foretell ... --judged_by=accuracy,macro_f1              # other scores than the reward
    python -m tools.foretell ... --joined=True      # each run is foretold from the plays of all other runs
    python -m tools.foretell ... --plays=runs/a+runs/b,runs/c   # a and b count as one run: those of one task
    python -m tools.foretell ... --out=runs/mine.jsonl      # after an edit of the learner, to compare both

A policy is learned from each run's plays (train_nmg.Agents), or with --joined=True from those of all
runs but one. For every play of the other runs we then compute how much it likes the mask: by all words, as
the mean standardized logit of the masked tokens (without --clip=None also that of clipped logits), and by the
highest tenth, as the share of the masked tokens that are among the tenth of their block with the highest
logits. Printed is the correlation of that with the score, both minus their mean over the plays of the
episode: the mean, and that of each pair of runs. So a learner is judged by plays that it has not seen,
without playing. Look at the highest tenth, too: a policy can be right about most words and wrong about those
that it masks.

Flags that say how plays are made, such as --contexts or --exploration, have no effect, as the plays are there
already, nor have those of --paper.
"""
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

import train_nmg
from nmg.plays import Episode, episodes_of_runs
from nmg.policies import Policy, State, encode, policy_forward, sharpened, standardized
from support import devices, runs, toy
from support.devices import device
from support.models import load_lm
from support.runs import UserError


@dataclass
class Config(train_nmg.Config):
    joined: bool = False            # learn from the plays of all other runs together; False: of each alone
    judged_by: str | None = None    # the scores that are foretold, separated by commas; None: --metric
    out: str = "runs/foretell.jsonl"    # every correlation, a line each


# The fields of a line of --out.
FIELDS = {"metric", "judged_by", "source", "target", "way", "r"}
# The share of a block's maskable tokens that counts as highest.
HIGHEST = 0.1


@torch.no_grad()
def foretold(policy: Policy, played: list[tuple[Episode, list[State]]],
             metrics: list[str]) -> dict[str, dict[str, float]]:
    """For each metric the correlation, within episodes, of the scores of plays and how much a policy likes
    their masks, for each way of liking."""
    scores, liked = defaultdict(list), defaultdict(list)
    for episode, states in played:
        plays = episode.plays.values()
        for metric in metrics:
            score = np.array([play.scores[metric] for play in plays])
            scores[metric].append(score - score.mean())
        logits = policy_forward(policy, states).cpu().numpy()   # (M, L)
        rank = (-logits).argsort(1).argsort(1)                  # 0 for the highest logit of a block
        n_maskable = np.isfinite(logits).sum(1, keepdims=True)
        ways = {"all words": standardized(logits), "highest tenth": rank < HIGHEST * n_maskable}
        if policy.clip is not None:
            ways["all, clipped"] = sharpened(logits, 1.0, policy.clip)
        for way, liking in ways.items():
            of_plays = np.array([liking[play.mask].mean() for play in plays])
            liked[way].append(of_plays - of_plays.mean())
    found = defaultdict(dict)
    for metric, way in itertools.product(scores, liked):
        of_all = np.concatenate(scores[metric]), np.concatenate(liked[way])
        found[metric][way] = float(np.corrcoef(*of_all)[0, 1])
    return found


def judged(sources: list[str], targets: list[str], played: dict[str, list], hidden_size: int,
           cfg: Config) -> Iterator[dict]:
    """A row for each target, score and way of liking: what a policy that was learned from the sources
    foretells."""
    agents = train_nmg.Agents(hidden_size, cfg)
    for source in sources:
        for episode, states in played[source]:
            agents.learn(episode, states)
    policy = agents.policies["learner"]
    for target in targets:
        for score, ways in foretold(policy, played[target], cfg.judged_by.split(",")).items():
            for way, r in ways.items():
                yield {"metric": cfg.metric, "judged_by": score, "source": ",".join(sources),
                       "target": target, "way": way, "r": r}


def main(cfg: Config) -> None:
    folders = [*dict.fromkeys(filter(None, (cfg.plays or "").split(",")))]
    if len(folders) < 2:
        raise UserError("--plays=A,B: the plays of at least two runs are needed")
    runs.check_fields(Path(cfg.out), FIELDS)
    devices.use_fast_path(cfg.fast)
    lm = load_lm(cfg.lm, cfg.seed).to(device())
    if cfg.metric is None:
        cfg.metric = "accuracy"
    cfg.judged_by = ",".join(dict.fromkeys((cfg.judged_by or cfg.metric).split(",")))
    # No play is there twice, so that no run is judged by plays that have taught its policy.
    of_single = episodes_of_runs(",".join(folders).replace("+", ","), cfg.metric, lm.config.vocab_size)
    episodes_of = {}
    for folder in folders:
        joined = [of_single[single] for single in folder.split("+")]
        episodes_of[folder] = [*itertools.chain.from_iterable(joined)]
    # All are checked before the first is read by the LM, which takes longest.
    for folder, episodes in episodes_of.items():
        plays = [*itertools.chain.from_iterable(episode.plays.values() for episode in episodes)]
        for score in cfg.judged_by.split(","):
            if any(score not in play.scores for play in plays):
                raise UserError(f"--judged_by={score}: plays of {folder} have {', '.join(plays[0].scores)}")
    played = {}
    for folder, episodes in episodes_of.items():
        played[folder] = [(episode, encode(lm, episode)) for episode in tqdm(episodes, folder)]

    order = "the first run's policy on the others, the second's, ..."
    if cfg.joined:
        order = "the others' policy on the first run, on the second, ..."
    print(f"{'score':<10}  {'liked':<14} mean   {order}")
    rows = []
    for folder in folders:
        others = [other for other in folders if other != folder]
        sources, targets = [folder], others
        if cfg.joined:
            sources, targets = others, [folder]
        rows += judged(sources, targets, played, lm.config.hidden_size, cfg)
    runs.write_rows(Path(cfg.out), rows)
    for (score, way), found in pd.DataFrame(rows).groupby(["judged_by", "way"]):
        each = "  ".join(f"{r:.2f}" for r in found["r"])
        print(f"{score:<10}  {way:<14} {found['r'].mean():.3f}  {each}")


if __name__ == "__main__":
    runs.start(main, Config, presets=train_nmg.PRESETS, tiny=toy.TRAIN_NMG)
