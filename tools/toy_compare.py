"""What masks are worth in the toy world: test accuracy after each way of masking, and a picture.

    python -m tools.toy_compare                                 # with what `python train_nmg.py` learned
    python -m tools.toy_compare --seeds=5                       # after `train_nmg.py --seed=1`, ...
    python -m tools.toy_compare --maskers=none,random,whole,oracle --seeds=5
    python -m tools.toy_compare --maskers=random,my_maskers.py:high_ids     # a masker of your own

The policy is shown twice: masks drawn from it, and the tokens of its highest logits (greedy).
"""
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

import data_prep
import finetune_cls
import maskers
from nmg.plays import won_lost
from pretrain import mask_batch, pretrain
from support import devices, plots, runs, toy
from support.data import Data, blocks, truncated
from support.models import LMReader, load_lm, load_tokenizer


@dataclass
class Config:
    maskers: str | None = None          # comma-separated; None: random, what NMG learned, oracle
    seeds: int = 1                      # how many; a seed names the policy and draws masks, order and head
    seed: int = 0                       # the first of them
    out: str = "runs/toy.png"           # the picture; the scores lie beside it, in runs/toy.jsonl


def score_on_test(data: Data, masker: str, seed: int) -> float:
    """Accuracy on test, in percent, after masking the whole corpus with a masker."""
    lm = load_lm("tiny")
    if masker != "none":
        pretrain(lm, blocks(data.corpus, 128), maskers.find(masker), p=toy.PRETRAIN["p"],
                 epochs=toy.PRETRAIN["epochs"], lr=toy.PRETRAIN["lr"], batch_size=toy.PRETRAIN["batch_size"],
                 seed=seed, desc=f"seed {seed}, {masker}")
    train, test = truncated(data["train"], 128), truncated(data["test"], 128)
    flags = toy.FINETUNE_CLS
    model = finetune_cls.finetune(lm, train, epochs=flags["epochs"], lr=flags["lr"],
                                  batch_size=flags["batch_size"], seed=seed)
    return finetune_cls.summary(finetune_cls.predictions(model, test))["accuracy"]


def shares_of_kinds(data: Data, masker: str) -> np.ndarray:
    """The share of each kind of words (toy.KINDS) among the tokens that a masker chooses in the corpus, in
    percent."""
    pieces = blocks(data.corpus, 128)
    lm = LMReader(load_lm("tiny"))
    every = np.arange(len(pieces))
    batch, mask, _ = mask_batch(pieces, maskers.find(masker), toy.PRETRAIN["p"], seed=0, epoch=0,
                                indices=every, lm=lm)
    kinds = toy.kind_of_token()[batch.input_ids[mask]]
    return 100 * np.bincount(kinds, minlength=len(toy.KINDS)) / len(kinds)


def folder_of(seed: int) -> str:
    """Where `python train_nmg.py --seed=SEED` leaves its policy."""
    return f"runs/nmg-toycls-tiny-{seed}"


def maskers_shown(cfg: Config, seed: int) -> dict[str, str]:
    """What is shown -> masker: what was asked for, or what NMG learned with this seed, between random and
    oracle."""
    if cfg.maskers:
        return {name: name for name in maskers.split_names(cfg.maskers)}
    folder = folder_of(seed)
    return {"random": "random", "NMG, drawn": f"sampled:{folder}", "NMG, greedy": f"nmg:{folder}",
            "oracle": "oracle"}


def what_was_learned(seed: int, masked: np.ndarray, text: np.ndarray) -> str:
    """The sentence that says what NMG learned: its record, and the kind of words that it masks most beyond
    their share of the text. masked, text: percentages of toy.KINDS."""
    metrics = runs.read_rows(Path(folder_of(seed)) / "metrics.jsonl")
    most = int(np.argmax(masked - text))
    said = f"seed {seed}: the learner {won_lost(metrics)}. It masks "
    kind = list(toy.KINDS)[most]
    return f"{said}{kind} {masked[most]:.0f} % of the time; they are {text[most]:.0f} % of the text."


def draw(rows: pd.DataFrame, file: Path) -> None:
    """Bars: the mean score of each masker in percent; dots: its seeds. rows: columns masker, accuracy"""
    scores = rows.groupby("masker", sort=False)["accuracy"]
    fig = plots.figure(7, 0.55 * len(scores) + 1.1)
    ax = fig.subplots()
    for i, (_, each) in enumerate(scores):
        ax.barh(i, each.mean(), color="#9db8d2", height=0.6)
        ax.plot(each, [i] * len(each), "o", color=plots.BLUE, markersize=5, alpha=0.8)
        ax.text(112, i, f"{each.mean():.1f}", va="center", ha="right")
    chance = 100 / len(toy.CLASSES)
    ax.axvline(chance, color="grey", linestyle=":", linewidth=1)
    for x, label in ((chance, "chance"), (109, "mean")):
        ax.text(x, -0.72, label, color="grey", fontsize=8, va="center", ha="center")
    ax.set(xlim=(0, 112), xlabel="test accuracy, % (bar: mean, dots: seeds)")
    ax.set_yticks(range(len(scores)), [name for name, _ in scores])
    ax.set_xticks(range(0, 101, 20))
    ax.invert_yaxis()
    plots.save(fig, file)


def main(cfg: Config) -> None:
    if not cfg.out.endswith(".png"):
        raise runs.UserError(f"--out={cfg.out}: is the picture, and must end with .png")
    picture = Path(cfg.out)
    scores = picture.with_suffix(".jsonl")
    runs.check_fields(scores, {"seed", "masker", "accuracy", "attributes"})
    devices.use_fast_path(False)
    data = data_prep.load("toycls", load_tokenizer("tiny"))

    # 1. What will be compared. A masker that cannot be found stops it here, before any training.
    jobs = []
    for seed in range(cfg.seed, cfg.seed + cfg.seeds):
        for name, masker in maskers_shown(cfg, seed).items():
            maskers.find(masker)
            jobs.append((seed, name, masker))

    # 2. Pre-train, fine-tune, score, seed by seed.
    rows, learned = [], []
    tokens = toy.kind_of_token()[data.corpus.input_ids]
    text = 100 * np.bincount(tokens, minlength=len(toy.KINDS)) / len(tokens)
    width = max(len(name) for _, name, _ in jobs)
    for seed, name, masker in jobs:
        row = {"seed": seed, "masker": name, "accuracy": score_on_test(data, masker, seed)}
        if masker != "none":
            kinds = shares_of_kinds(data, masker)
            row["attributes"] = float(kinds[0])
        if name == "NMG, drawn":
            learned.append(what_was_learned(seed, kinds, text))
        rows.append(row)
        print(f"seed {seed}  {name:{width}} {row['accuracy']:6.2f}", flush=True)
    runs.write_rows(scores, rows)

    # 3. The table, the picture, and what was learned.
    columns = "mean; each seed" if cfg.seeds > 1 else "%"
    print(f"\ntoycls, test accuracy, {columns}; attributes among the masked, %")
    table = pd.DataFrame(rows)
    for name, found in table.groupby("masker", sort=False):
        line = f"{name:{width}} {found['accuracy'].mean():6.2f}"
        if cfg.seeds > 1:
            line += "  " + "".join(f"{score:7.2f}" for score in found["accuracy"])
        if name != "none":
            line += "     " + " ".join(f"{share:.0f}" for share in found["attributes"])
        print(line)
    draw(table, picture)
    print(f"picture: {cfg.out}")
    for said in learned:
        print(said)


if __name__ == "__main__":
    runs.start(main, Config)
