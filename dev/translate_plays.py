"""Plays of one LM for another that has the same tokens under other numbers, as MPNet has those of BERT: so a
policy for a large LM can be learned from plays of a small one.

    python dev/translate_plays.py --plays=results/nmg-chemprot-fresh-minilm-0 --lm=MINILM --to=MPNET \
        --out=runs/translated
    python train_nmg.py --dataset=chemprot --lm=MPNET --preset=small_tasks --episodes=0 \
        --plays=runs/translated
"""
import sys
from pathlib import Path

import fire
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nmg.plays import file_of, load_episodes, save_episode
from support.models import load_tokenizer


def new_ids(lm: str, to: str) -> np.ndarray:
    """(V,) for each token of `lm` its number in the vocabulary of `to`. Raises KeyError if one is missing."""
    old, new = load_tokenizer(lm), load_tokenizer(to)
    number_of = new.get_vocab()
    # Special tokens have other names.
    for role in ("cls_token", "sep_token", "pad_token", "mask_token", "unk_token"):
        number_of[getattr(old, role)] = number_of[getattr(new, role)]
    return np.array([number_of[token] for token in old.convert_ids_to_tokens(range(len(old)))])


def main(plays: str, lm: str, to: str, out: str) -> None:
    ids = new_ids(lm, to)
    number = 0
    for folder in plays.split(","):
        for episode, log in load_episodes(Path(folder)):
            number += 1
            episode.input_ids = ids[episode.input_ids]
            save_episode(file_of(Path(out), number), episode, log)
    print(f"{out}: {number} episodes")


if __name__ == "__main__":
    fire.Fire(main)
