"""A policy that never masks punctuation, learned from plays that are kept, about words alone; and a masker
that draws tokens from it. An experiment: what do plays teach beyond punctuation?

    python dev/words_only.py --lm=MINILM
    python pretrain.py --dataset=scierc --lm=MINILM --p=0.05 --epochs=3 \
        --masker=dev/words_only.py:scierc_words
"""
import functools
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data_prep
import maskers
import train_nmg
from nmg.plays import checksum_of_plays, episodes_of_runs
from nmg.policies import Policy, encode, load_policy, sharpened
from support import devices, runs
from support.data import Batch
from support.devices import device
from support.models import load_lm, load_tokenizer, weights_of
from support.runs import Run

POLICY = Path(__file__).resolve().parent.parent / "results/policies/scierc-words"


@dataclass
class Config(train_nmg.Config):
    dataset: str = "scierc"         # of the plays; it is not read
    metric: str = "likelihood"
    episodes: int = 0               # none is played
    plays: str = "results/nmg-scierc-minilm-0,results/nmg-scierc-minilm-1"
    out: str = str(POLICY)
    # The values of the preset small_tasks, with which ChemProt's policies gained.
    sharpness: float = 2.4
    clip: float | None = None


def main(cfg: Config) -> None:
    devices.use_fast_path(cfg.fast)
    tokenizer = load_tokenizer(cfg.lm)
    lm = load_lm(cfg.lm, cfg.seed).to(device())
    is_punct, _ = data_prep.vocabulary_tables(tokenizer)
    plays = [checksum_of_plays(Path(folder)) for folder in cfg.plays.split(",")]
    run = Run(cfg.out, runs.settings_of(cfg, weights=weights_of(cfg.lm), plays_checksum=plays))
    if run.done:
        return
    agents = train_nmg.Agents(lm.config.hidden_size, cfg)
    episodes_of = episodes_of_runs(cfg.plays, cfg.metric, lm.config.vocab_size)
    for episode in itertools.chain.from_iterable(episodes_of.values()):
        # Punctuation counts neither as masked nor as what could have been masked.
        words = ~is_punct[episode.input_ids]
        episode.maskable &= words
        for play in episode.plays.values():
            play.mask &= words
        agents.learn(episode, encode(lm, episode))
    agents.policy.save(run.folder)
    run.finish(base_model=runs.base_of(cfg.lm))


@functools.cache
def kept_policy() -> Policy:
    return load_policy(POLICY)


@maskers.sampled
def scierc_words(batch: Batch, lm=None) -> np.ndarray:
    policy = kept_policy()
    logits = np.where(batch.is_punct, -np.inf, policy.logits(batch, lm))
    # Logits are standardized over the words of a block.
    return sharpened(logits, policy.sharpness, policy.clip)


def half_random(batch: Batch, budget: np.ndarray, rng: maskers.RowRandom, lm=None) -> np.ndarray:
    """Half of the tokens are drawn from the policy, the others at random. Of an odd budget, chance decides
    who gets the last token."""
    chance = rng.random((len(budget), 1))[:, 0]
    from_policy = scierc_words(batch, np.floor(budget / 2 + chance).astype(np.int64), rng, lm)
    # The random tokens come after all that the policy chose.
    return maskers.pick(from_policy + rng.random(from_policy.shape), batch, budget)


if __name__ == "__main__":
    runs.start(main, Config)
