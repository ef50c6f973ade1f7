"""Whether it matters WHAT is masked in a task: what maskers score on the same sub-tasks. (For a study that
learns policies, and scores them on new documents by a plan that is fixed in advance: tools/study.py.)

    python -m tools.what_matters                                            # toy world
    python -m tools.what_matters --dataset=chemprot --lm=bert-base-uncased --contexts=200

All maskers of a seed share the sub-task, the order and the head: only their masks differ. They are scored on
half of train, the same documents for all seeds; test data are not looked at. One line per play goes to --log,
as the finetune scripts write them, and report.py makes the table. Started again, it goes on from there;
several of these commands at once share the plays.
"""
import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from tqdm import tqdm

import maskers
import report
import train_nmg
from nmg.loop import length_batches
from nmg.subtasks import SubTaskSampler
from pretrain import mask_batch
from support import runs, toy
from support.data import Pieces
from support.models import LMReader, weights_of
from support.rng import rng_for
from support.runs import UserError


@dataclass
class Config(train_nmg.PlayConfig):
    val_share: float = 0.5              # the share of train to validate on
    maskers: str = "random,none,punct,frequent,rare,label,marked"   # all are compared with random
    seeds: int = 6                      # sub-tasks, with seeds from --seed on
    spacy_model: str | None = None      # finds entities
    log: str = "runs/what_matters.jsonl"        # a line per play, in points and hundredths of a nat


def choose_masks(contexts: Pieces, masker: maskers.Masker, p: float, seed: int, lm: LMReader) -> np.ndarray:
    """(N, L) bool: the masks of all contexts, padded to the longest."""
    masks = np.zeros((len(contexts), contexts.length.max()), bool)
    for indices in length_batches(contexts.length):
        _, mask, _ = mask_batch(contexts, masker, p, seed, 0, indices, lm)
        masks[indices, :mask.shape[1]] = mask
    return masks


def play(name: str, seed: int, lm: torch.nn.Module, sampler: SubTaskSampler, task: ModuleType,
         cfg: train_nmg.PlayConfig) -> dict:
    """What a masker scores on the sub-task of a seed: its line of a log, without what all lines share.

    lm, task, cfg: of train_nmg.open_task"""
    started = time.monotonic()
    checksum = maskers.checksum_of(name)
    # How a policy was learned, so that report.py can say it.
    policy = None
    if maskers.is_learned(name):
        policy = runs.read_run(maskers.folders_of(name)[0]).get("settings", {})
    rng = rng_for(seed, "sub-task")
    subtask = sampler.sample(rng, cfg.contexts, cfg.docs, cfg.examples, cfg.validation)
    mask = choose_masks(subtask.contexts, maskers.find(name), cfg.p, seed, LMReader(lm))
    _, scores = train_nmg.inner_loop(lm, subtask, mask, task, cfg)
    # In hundredths of a nat, beside points.
    if "likelihood" in scores:
        scores["likelihood"] *= 100
    return {"masker": name, "row": name, "seed": seed, "split": "val", "metrics": list(scores), **scores,
            "seconds": {"play": time.monotonic() - started}, "ended": time.strftime("%Y-%m-%d %H:%M"),
            "file": checksum, "policy": policy, "commit": runs.commit()}


def settings_of_plays(cfg: train_nmg.PlayConfig, data: str) -> dict:
    """What all lines of a log have in common: the flags of their plays, the checksums of data and LM.

    Paths are cut to their names, so that a log may move; an LM of the hub, which has no checksum of weights
    here, keeps its full name."""
    weights = weights_of(cfg.lm)
    settings = runs.settings_of(cfg, ("log", "maskers", "seeds", "seed"), data=data, weights=weights)
    settings["dataset"] = Path(cfg.dataset).name
    if settings["weights"]:
        settings["lm"] = Path(cfg.lm).name
    return settings


def add_play(log: Path, line: dict, settings: dict) -> None:
    """Adds a play to a log, which several processes may share. settings: of settings_of_plays"""
    line = {"dataset": settings["dataset"], "lm": settings["lm"], **line, "config": settings}
    with runs.locked(log):
        runs.write_rows(log, [*runs.read_rows(log), line])


def done_plays(log: Path) -> set[tuple[int, str]]:
    """The plays of a log, as (seed, row)."""
    return {(line["seed"], line["row"]) for line in runs.read_rows(log)}


def locks_of(log: Path) -> Path:
    """The folder of the locks by which several processes share the plays of a log."""
    return log.with_name(f"{log.name}.locks")


def warn_of_commits(log: Path) -> None:
    others = {line.get("commit", "unknown") for line in runs.read_rows(log)} - {runs.commit()}
    if others:
        print(f"WARNING: {log} has plays by commit {', '.join(others)}, and the code is now commit "
              f"{runs.commit()}; another file plays them anew")


def main(cfg: Config) -> None:
    data, lm, task = train_nmg.open_task(cfg, cfg.spacy_model)
    names = maskers.split_names(cfg.maskers)
    # What fails here would else fail after a play.
    for name in names:
        maskers.find(name)
    files = {name: maskers.checksum_of(name) for name in names}
    sampler = SubTaskSampler(data, task, cfg.max_len, cfg.ft_max_len, cfg.val_share)
    settings = settings_of_plays(cfg, data.checksum)
    log = Path(cfg.log)
    with runs.locked(log):
        lines = runs.read_rows(log)
        if any(line.get("config") != settings for line in lines):
            raise UserError(f"--log={cfg.log}: holds plays with other flags; choose another file")
        # Plays of a policy or file that changed since then do not count, but are kept.
        edited = [line for line in lines if line["file"] != files.get(line["masker"], line["file"])]
        if edited:
            aside = log.with_name(f"{log.name}.edited")
            runs.write_rows(aside, [*runs.read_rows(aside), *edited])
            print(f"WARNING: {len(edited)} plays of maskers that were edited since are set aside in {aside}")
        lines = [line for line in lines if line not in edited]
        runs.write_rows(log, lines)
    warn_of_commits(log)
    plays = list(itertools.product(range(cfg.seed, cfg.seed + cfg.seeds), names))
    n_done = len(done_plays(log).intersection(plays))
    with tqdm(total=len(plays), initial=n_done, unit="play", disable=None) as bar:
        for seed, name in runs.shared(plays, lambda: done_plays(log), locks_of(log)):
            add_play(log, play(name, seed, lm, sampler, task, cfg), settings)
            bar.update()
    report.main(report.Config(results=cfg.log))


if __name__ == "__main__":
    runs.start(main, Config, tiny=toy.TRAIN_NMG)
