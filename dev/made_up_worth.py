"""What self-play finds where the worth of tokens is known: an experiment without an inner loop.

    python dev/made_up_worth.py --dataset=chemprot --lm=MINILM --seed=0

The networks, masks, rewards and learner are those of train_nmg.py. Only the score of a play is made up: the
mean worth of the masked tokens plus noise. The worth of a token is label + tfidf + rare - punct, scores of
maskers.py, each in standard deviations and minus its mean in the block. Printed is how far the policy's
logits correlate with the worth, on blocks that were not played, and the mean worth of tokens drawn from the
policy: 0 for random tokens, .82 for logits that are the worth itself.
"""
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data_prep
import maskers
import train_nmg
from nmg.plays import Episode
from nmg.policies import encode, policy_forward, sharpened
from support import devices, runs
from support.data import Pieces, blocks, collate
from support.models import LMReader, load_lm, load_tokenizer
from support.rng import RowRandom, rng_for

SIGNS = {"label": 1, "tfidf": 1, "rare": 1, "punct": -1}
# The standard deviation of the noise of a play. Learner and opponent differ by about .69 in the worth of
# their masks at first, so that the variance of a difference is .6 times that of its noise.
NOISE = 0.63


@dataclass
class Config(train_nmg.Config):
    dataset: str = "chemprot"
    metric: str = "worth"           # has no other value here
    max_len: int = 256


def scores_of(pieces: Pieces, lm: LMReader) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Maskable tokens (N, L), and each score (N, L) minus its mean in the block."""
    batch = collate(pieces, np.arange(len(pieces)))
    centred = {}
    for name in SIGNS:
        score = np.where(batch.maskable, maskers.SCORES[name](batch, lm), 0).clip(-20, 20)
        masked = np.ma.masked_array(score, ~batch.maskable)
        centred[name] = (masked - masked.mean(1, keepdims=True)).filled(0)
    return batch.maskable, centred


def main(cfg: Config) -> None:
    devices.use_fast_path(cfg.fast)
    lm = load_lm(cfg.lm, cfg.seed)
    data = data_prep.load(cfg.dataset, load_tokenizer(cfg.lm), columns=cfg)
    pieces = blocks(data.corpus, cfg.max_len)
    some = pieces.evenly_spaced(1500)
    held_out, pool = pieces.take(some[::5]), pieces.take(np.setdiff1d(some, some[::5]))

    # The worth of every token, with standard deviation 1 over the blocks that are held out.
    maskable, centred = scores_of(held_out, LMReader(lm))
    scale = {name: score[maskable].std() for name, score in centred.items()}
    worth = sum(sign * centred[name] / scale[name] for name, sign in SIGNS.items())
    _, centred = scores_of(pool, LMReader(lm))
    worth_of_pool = sum(sign * centred[name] / scale[name] for name, sign in SIGNS.items())
    worth_of_pool /= worth[maskable].std()
    worth /= worth[maskable].std()
    batch = collate(held_out, np.arange(len(held_out)))
    states = encode(lm, batch)
    states_of_pool = encode(lm, collate(pool, np.arange(len(pool))))

    learner = train_nmg.Learner(lm.config.hidden_size, cfg)
    n_plays = 0
    for number in range(cfg.episodes):
        chosen = rng_for(cfg.seed, f"sub-task {number}").choice(len(pool), cfg.contexts, replace=False)
        contexts = collate(pool.take(chosen), np.arange(cfg.contexts))
        worth_of_contexts = worth_of_pool[chosen, :contexts.input_ids.shape[1]]
        states_of_contexts = [states_of_pool[i] for i in chosen]
        plays = train_nmg.mask_contexts(learner.policies, states_of_contexts, contexts, number, cfg)
        for name, play in plays.items():
            noise = NOISE * rng_for(cfg.seed, f"noise of {name} {number}").normal()
            play.scores = {"worth": float(worth_of_contexts[play.mask].mean() + noise)}
        n_plays += len(plays)
        episode = Episode(contexts.input_ids, contexts.attention_mask, contexts.maskable, plays)
        learner.store(number, episode, states_of_contexts)
        learner.learn(number)

    with torch.no_grad():
        logits, _ = policy_forward(learner.policy, states)
    logits = sharpened(logits.numpy(), cfg.sharpness)
    budget = maskers.budget_of(batch, cfg.p)
    drawn = []
    for draw in range(3):
        gumbel = RowRandom(cfg.seed, "drawn", draw, np.arange(len(logits))).gumbel(logits.shape)
        drawn.append(worth[maskers.pick(logits + gumbel, batch, budget)].mean())
    correlation = np.corrcoef(logits[maskable], worth[maskable])[0, 1]
    print(f"seed {cfg.seed}, {n_plays} plays: correlation with the worth {correlation:.2f}, "
          f"worth of drawn tokens {np.mean(drawn):.2f}")


if __name__ == "__main__":
    runs.start(main, Config)
