"""Is reinforcement learning needed? A policy that learns without any play which words tell about the label.

    python dev/policy_without_plays.py --dataset=chemprot --lm=MINILM --out=runs/studies/chemprot-no-plays
    python pretrain.py --dataset=chemprot --lm=MINILM --masker=sampled:runs/studies/chemprot-no-plays

The network is that of the paper. By least squares it learns the score `label` of maskers.py for each word
of train. Printed is how well it imitates the score in blocks that were held out. (The score itself is counted
from all labels of train, also those of these blocks.)
"""
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.stats import pearsonr
from tqdm import trange

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data_prep
import maskers
import train_nmg
from nmg.policies import PaperPolicy, encode, policy_forward, sharpened
from support import devices, runs
from support.data import Batch, blocks, collate
from support.devices import device
from support.models import load_lm, load_tokenizer, weights_of
from support.rng import rng_for, torch_seed
from support.runs import UserError
from support.sources import DataFlags


@dataclass
class Config(DataFlags):
    dataset: str = "chemprot"
    lm: str = "tiny"
    max_len: int = 128
    updates: int = 200          # gradient updates, as many as networks took to learn from plays
    minibatch: int = 64         # blocks in an update
    rl_lr: float = 1e-4         # its learning rate
    seed: int = 0
    out: str | None = None      # the folder of the policy


def label_score(batch: Batch) -> np.ndarray:
    """`label` of each token (N, L), with mean 0 and standard deviation 1 in a block; -inf where it must not
    be masked."""
    return sharpened(np.where(batch.maskable, maskers.SCORES["label"](batch), -np.inf), 1.0)


def main(cfg: Config) -> None:
    if cfg.out is None:
        raise UserError("--out: name the folder of the policy")
    devices.use_fast_path(True)
    lm = load_lm(cfg.lm, cfg.seed).to(device())
    data = data_prep.load(cfg.dataset, load_tokenizer(cfg.lm), columns=cfg)
    # A policy that is there is not written over.
    run = runs.Run(cfg.out, runs.settings_of(cfg, data=data.checksum, weights=weights_of(cfg.lm)))
    if run.done:
        return
    pieces = blocks(data["train"], cfg.max_len)
    batch = collate(pieces, np.arange(len(pieces)))                                             # (N, L)
    states, score = encode(lm, batch), label_score(batch)
    # Every tenth block is held out.
    held_out = np.arange(0, len(pieces), 10)
    known = np.setdiff1d(np.arange(len(pieces)), held_out)

    torch_seed(cfg.seed, "policy without plays")
    policy = PaperPolicy(lm.config.hidden_size, sharpness=train_nmg.Config.sharpness).to(device())
    optimizer = torch.optim.Adam(policy.parameters(), lr=cfg.rl_lr)
    rng = rng_for(cfg.seed, "minibatches")
    for _ in trange(cfg.updates):
        chosen = rng.choice(known, min(cfg.minibatch, len(known)), replace=False)
        # Logits reach as far as the longest of these blocks.
        logits, _ = policy_forward(policy, [states[i] for i in chosen])           # (B, L)
        wanted = torch.from_numpy(score[chosen, :logits.shape[1]]).to(device())
        is_word = wanted.isfinite()
        loss = (logits[is_word] - wanted[is_word]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with torch.no_grad():
        logits, _ = policy_forward(policy, [states[i] for i in held_out])
    wanted = score[held_out, :logits.shape[1]]
    is_word = np.isfinite(wanted)
    learned = sharpened(logits.cpu().numpy(), 1.0)[is_word]
    print(f"correlation with the score on {len(held_out)} blocks that were held out: "
          f"{pearsonr(learned, wanted[is_word]).statistic:.2f}")
    policy.save(run.folder)
    run.finish(base_model=runs.base_of(cfg.lm))


if __name__ == "__main__":
    runs.start(main, Config)
