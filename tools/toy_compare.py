"""What masks are worth in the toy world: test accuracy after each way of masking, and a picture.

    python -m tools.toy_compare                                 # with what `python search_masks.py` found
    python -m tools.toy_compare --seeds=5                       # and with `--seed=1`, ... `--seed=4`
    python -m tools.toy_compare --maskers=none,random,whole,oracle --seeds=5

What was found is shown twice: masks drawn from it (sampled), and its most probable tokens (greedy).
"""
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import data_prep
import finetune_cls
import loop
import maskers
import plots
import runs
import toy
from data import Data, blocks, truncated
from models import LMReader, load_lm, load_tokenizer
from pretrain import mask_batch, pretrain


@dataclass
class Config:
    maskers: str | None = None          # comma-separated; None: none, random, what was found, oracle
    seeds: int = 1                      # how many: of policy, masks, order and head
    seed: int = 0                       # the first of them
    out: str = "runs/toy.png"           # the picture


def score_on_test(data: Data, masker: str, seed: int) -> float:
    """Accuracy on test, in percent, after masking the whole corpus with a masker."""
    lm = load_lm("tiny")
    if masker != "none":
        pretrain(lm, blocks(data.corpus, 128), maskers.find(masker), **toy.PRETRAIN, seed=seed,
                 desc=f"seed {seed}, {masker}")
    train, test = truncated(data["train"], 128), truncated(data["test"], 128)
    model = finetune_cls.finetune(lm, train, **toy.FINETUNE["cls"], seed=seed)
    return finetune_cls.summary(finetune_cls.predictions(model, test))["accuracy"]


def informative_share(data: Data, masker: str) -> float:
    """The share of informative words among the tokens that a masker chooses in the corpus, in percent."""
    pieces = blocks(data.corpus, 128)
    lm = LMReader(load_lm("tiny"))
    every = np.arange(len(pieces))
    batch, mask, _ = mask_batch(pieces, maskers.find(masker), toy.PRETRAIN["p"], 0, 0, every, lm)
    return 100 * float(toy.informative()[batch.input_ids[mask]].mean())


def maskers_shown(cfg: Config, seed: int) -> dict[str, str]:
    """What is shown -> masker: what was asked for, or what the search of this seed found, between random and
    oracle."""
    if cfg.maskers:
        return {name: name for name in cfg.maskers.split(",")}
    folder = f"runs/search-toycls-tiny-{seed}"
    return {"none": "none", "random": "random", "search, sampled": f"sampled:{folder}",
            "search, greedy": f"search:{folder}", "oracle": "oracle"}


def draw(scores: dict[str, list[float]], file: Path) -> None:
    """Bars: the mean score of each masker in percent; dots: its seeds."""
    fig = Figure(figsize=(7, 0.55 * len(scores) + 1.1), layout="constrained")
    ax = fig.subplots()
    for i, each in enumerate(scores.values()):
        ax.barh(i, np.mean(each), color="#9db8d2", height=0.6)
        ax.plot(each, [i] * len(each), "o", color=plots.BLUE, markersize=5, alpha=0.8)
        ax.text(112, i, f"{np.mean(each):.1f}", va="center", ha="right")
    chance = 100 / len(toy.CLASSES)
    ax.axvline(chance, color="grey", linestyle=":", linewidth=1)
    for x, label in ((chance, "chance"), (109, "mean")):
        ax.text(x, -0.72, label, color="grey", fontsize=8, va="center", ha="center")
    ax.set(xlim=(0, 112), xlabel="test accuracy, % (bar: mean, dots: seeds)")
    ax.set_yticks(range(len(scores)), scores)
    ax.set_xticks(range(0, 101, 20))
    ax.invert_yaxis()
    plots.save(fig, file)


def main(cfg: Config) -> None:
    loop.use_fast_path(True)
    data = data_prep.load("toycls", load_tokenizer("tiny"))

    # 1. What will be compared. A policy that is missing is told before any training.
    jobs = []
    for seed in range(cfg.seed, cfg.seed + cfg.seeds):
        for name, masker in maskers_shown(cfg, seed).items():
            maskers.find(masker)
            jobs.append((seed, name, masker))

    # 2. Pre-train, fine-tune, score, seed by seed.
    scores, shares = defaultdict(list), defaultdict(list)
    width = max(len(name) for _, name, _ in jobs)
    for seed, name, masker in jobs:
        score = score_on_test(data, masker, seed)
        scores[name].append(score)
        if masker != "none":
            shares[name].append(informative_share(data, masker))
        print(f"seed {seed}  {name:{width}} {score:6.2f}", flush=True)

    # 3. The table and the picture.
    columns = "mean; each seed" if cfg.seeds > 1 else "%"
    print(f"\ntoycls, test accuracy, {columns}; informative words among the masked, %")
    for name, each in scores.items():
        line = f"{name:{width}} {np.mean(each):6.2f}"
        if cfg.seeds > 1:
            line += "  " + "".join(f"{score:7.2f}" for score in each)
        if shares[name]:
            line += "     " + " ".join(f"{share:.0f}" for share in shares[name])
        print(line)
    draw(scores, Path(cfg.out))
    print(f"picture: {cfg.out}")


if __name__ == "__main__":
    runs.start(main, Config)
