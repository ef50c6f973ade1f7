"""What a policy that was learned from the plays of one run foretells of the plays of other runs.

    python -m tools.foretell --lm=MINILM --metric=likelihood --plays=runs/a,runs/b,runs/c
    python -m tools.foretell ... --updates=20,80,320 --minibatch=32         # other settings of the learner

A policy is learned anew from each run's plays (train_nmg.Learner). Of every play of the other runs it then
says how much it likes the mask: the mean standardised logit of the masked tokens. Printed is the correlation
of that with the score, both minus their mean over the plays of the episode, for every pair of runs and
averaged over seeds. So a setting of the learner is judged by plays that it has not seen, without playing.
"""
import itertools
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

import train_nmg
from nmg import loop, runs, toy
from nmg.loop import device
from nmg.models import load_lm
from nmg.plays import Episode
from nmg.policies import Policy, State, encode, policy_forward, sharpened
from nmg.runs import UserError


@dataclass
class Config(train_nmg.Config):
    updates: str = "20,40,80"       # updates_per_episode to compare, separated by commas
    seeds: int = 3                  # how many learners of each run, with seeds from --seed on


def liking(policy: Policy, episode: Episode, states: list[State]) -> np.ndarray:
    """(P,) for each of P plays the mean standardised logit of the tokens that it masked."""
    logits, _ = policy_forward(policy, states)
    logits = sharpened(logits.detach().cpu().numpy(), 1.0)
    return np.array([logits[play.mask].mean() for play in episode.plays.values()])


def foretold(policy: Policy, played: list[tuple[Episode, list[State]]], metric: str) -> float:
    """The correlation, within episodes, of the scores of plays and how much a policy likes their masks."""
    scores, likings = [], []
    for episode, states in played:
        score = np.array([play.scores[metric] for play in episode.plays.values()])
        liked = liking(policy, episode, states)
        scores.append(score - score.mean())
        likings.append(liked - liked.mean())
    return float(np.corrcoef(np.concatenate(scores), np.concatenate(likings))[0, 1])


def learned_from(played: list[tuple[Episode, list[State]]], hidden_size: int, cfg: Config) -> Policy:
    """The policy that is learned anew from the plays of one run."""
    learner = train_nmg.Learner(hidden_size, cfg)
    for number, (episode, states) in enumerate(played):
        learner.store(number, episode, states)
    learner.learn(len(played) - 1)
    return learner.policy


def main(cfg: Config) -> None:
    folders = (cfg.plays or "").split(",")
    if len(folders) < 2:
        raise UserError("--plays=A,B: the plays of at least two runs are needed")
    if not all(number.isdigit() and int(number) > 0 for number in cfg.updates.split(",")):
        raise UserError(f"--updates={cfg.updates}: must be numbers above 0, separated by commas")
    loop.use_fast_path(cfg.fast)
    lm = load_lm(cfg.lm, cfg.seed).to(device())
    if cfg.metric is None:
        cfg.metric = "accuracy"
    played = {}
    for folder in folders:
        episodes = train_nmg.plays_of_others(folder, lm, cfg)
        played[folder] = [(episode, encode(lm, episode)) for episode in tqdm(episodes, folder)]

    print(f"{'updates':>8}  mean   the policy of the first run and each other run, then of the second, ...")
    first_seed = cfg.seed
    for updates in cfg.updates.split(","):
        cfg.updates_per_episode = int(updates)
        found = defaultdict(list)
        for source, seed in itertools.product(folders, range(first_seed, first_seed + cfg.seeds)):
            cfg.seed = seed
            policy = learned_from(played[source], lm.config.hidden_size, cfg)
            for target in folders:
                if target != source:
                    found[source, target].append(foretold(policy, played[target], cfg.metric))
        pairs = np.array([*found.values()])                                         # (pairs, seeds)
        each = "  ".join(f"{r:.2f}" for r in pairs.mean(1))
        of_seeds = "  ".join(f"{r:.3f}" for r in pairs.mean(0))
        print(f"{updates:>8}  {pairs.mean():.3f}  {each}   seeds  {of_seeds}", flush=True)


if __name__ == "__main__":
    runs.start(main, Config, presets=train_nmg.PRESETS, tiny=toy.TRAIN_NMG)
