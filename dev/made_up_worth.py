"""What self-play finds where the worth of tokens is known: an experiment without an inner loop.

    python dev/made_up_worth.py --dataset=chemprot --lm=MINILM --seed=0
    python dev/made_up_worth.py --dataset=gaussian --contexts=400 --seed=0      # as many tokens as NewsQA has

The policies, masks, rewards and learner are those of train_nmg.py. Only the score of a play is made up: the
mean worth of the masked tokens plus noise. The worth of a token is label + tfidf + rare - punct, scores of
maskers.py, each in standard deviations and minus its mean in the block; of `gaussian`, which needs no LM, it
is a random function of the state. Printed is how far the policy's logits correlate with the worth, on blocks
that were not played, and the mean worth of tokens drawn from the policy: 0 for random tokens, .82 on ChemProt
for logits that are the worth itself.
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
from nmg import monitor
from nmg.plays import Episode
from nmg.policies import State, encode, policy_forward, sharpened, standardized
from support import devices, runs
from support.data import Batch, Pieces, blocks, collate
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


@dataclass
class Blocks:
    """M blocks of text, the state of each, and the worth of every token (M, L)."""
    input_ids: np.ndarray
    attention_mask: np.ndarray
    maskable: np.ndarray
    states: list[State]
    worth: np.ndarray

    @property
    def indices(self) -> np.ndarray:
        return np.arange(len(self.states))

    def take(self, rows: np.ndarray) -> "Blocks":
        L = self.attention_mask[rows].sum(1).max()
        arrays = (self.input_ids, self.attention_mask, self.maskable, self.worth)
        *tokens, worth = [array[rows, :L] for array in arrays]
        return Blocks(*tokens, [self.states[i] for i in rows], worth)


def text_blocks(cfg: Config) -> tuple[Blocks, Blocks]:
    """Blocks of a data set to play on, and others that are held out."""
    devices.use_fast_path(cfg.fast)
    lm = load_lm(cfg.lm, cfg.seed)
    data = data_prep.load(cfg.dataset, load_tokenizer(cfg.lm), columns=cfg)
    pieces = blocks(data.corpus, cfg.max_len)
    some = pieces.evenly_spaced(1500)
    batches = {"held out": collated(pieces.take(some[::5])),
               "pool": collated(pieces.take(np.setdiff1d(some, some[::5])))}

    # Scores have standard deviation 1 over the blocks that are held out, and so has the worth.
    scores = {name: centred_scores(batch, LMReader(lm)) for name, batch in batches.items()}
    maskable = batches["held out"].maskable
    scale = {name: score[maskable].std() for name, score in scores["held out"].items()}
    found = {}
    for part, batch in batches.items():
        worth = sum(sign * scores[part][name] / scale[name] for name, sign in SIGNS.items())
        found[part] = Blocks(batch.input_ids, batch.attention_mask, batch.maskable, encode(lm, batch), worth)
    unit = found["held out"].worth[maskable].std()
    for part in found.values():
        part.worth /= unit
    return found["pool"], found["held out"]


def collated(pieces: Pieces) -> Batch:
    return collate(pieces, np.arange(len(pieces)))


def centred_scores(batch: Batch, lm: LMReader) -> dict[str, np.ndarray]:
    """Each score (M, L) minus its mean in the block."""
    centred = {}
    for name in SIGNS:
        score = np.where(batch.maskable, maskers.SCORES[name](batch, lm), 0).clip(-20, 20)
        masked = np.ma.masked_array(score, ~batch.maskable)
        centred[name] = (masked - masked.mean(1, keepdims=True)).filled(0)
    return centred


def gaussian_blocks(cfg: Config) -> tuple[Blocks, Blocks]:
    """As text_blocks, of 1,600 and 100 blocks of 512 and 150 tokens in turn, as NewsQA's contexts have, whose
    states are random numbers: 32 components, the i-th with a standard deviation of i^-0.7."""
    rng = rng_for(cfg.seed, "gaussian blocks")
    component = np.arange(1, 33) ** -0.7
    linear, curved = rng.normal(size=(2, 32))
    found = []
    for n in (1600, 100):
        length = np.tile([512, 150], n // 2)
        is_token = np.arange(512) < length[:, None]                                     # (M, L)
        hidden = rng.normal(size=(n, 512, 32)) * component
        # Half of the worth cannot be told by a linear function of the state.
        worth = hidden @ linear / np.linalg.norm(linear * component)
        bend = (hidden @ curved / np.linalg.norm(curved * component)) ** 2
        worth = np.ma.masked_array(worth + (bend - 1) / np.sqrt(2), ~is_token)
        worth = ((worth - worth.mean(1, keepdims=True)) / worth.std()).filled(0)
        states = []
        for block, tokens in zip(hidden, length, strict=True):
            states.append((torch.tensor(block[:tokens]).half(), torch.ones(tokens, dtype=torch.bool)))
        found.append(Blocks(np.zeros((n, 512), int), is_token, is_token, states, worth))
    return found[0], found[1]


def main(cfg: Config) -> None:
    make = gaussian_blocks if cfg.dataset == "gaussian" else text_blocks
    pool, held_out = make(cfg)
    hidden_size = pool.states[0][0].shape[1]

    learner = train_nmg.Learner(hidden_size, cfg)
    n_plays = 0
    for number in range(cfg.episodes):
        chosen = rng_for(cfg.seed, f"sub-task {number}").choice(len(pool.states), cfg.contexts, replace=False)
        contexts = pool.take(chosen)
        plays = train_nmg.mask_contexts(learner.policies, contexts.states, contexts, number, cfg)
        for name, play in plays.items():
            noise = NOISE * rng_for(cfg.seed, f"noise of {name} {number}").normal()
            play.scores = {"worth": float(contexts.worth[play.mask].mean() + noise)}
        n_plays += len(plays)
        episode = Episode(contexts.input_ids, contexts.attention_mask, contexts.maskable, plays)
        learner.learn(episode, contexts.states)

    with torch.no_grad():
        logits = policy_forward(learner.policy, held_out.states).cpu().numpy()
    sharp = sharpened(logits, cfg.sharpness, cfg.clip)
    budget = maskers.budget_of(held_out, cfg.p)
    drawn = []
    for draw in range(3):
        gumbel = RowRandom(cfg.seed, "drawn", draw, np.arange(len(logits))).gumbel(logits.shape)
        drawn.append(held_out.worth[maskers.pick(sharp + gumbel, held_out, budget)].mean())
    liked = standardized(logits)[held_out.maskable]
    correlation = np.corrcoef(liked, held_out.worth[held_out.maskable])[0, 1]
    print(f"seed {cfg.seed}, {n_plays} plays: correlation with the worth {correlation:.2f}, "
          f"worth of drawn tokens {np.mean(drawn):.2f}, p_agree {monitor.p_agree(learner.gradients):.2g}")


if __name__ == "__main__":
    runs.start(main, Config)
