"""Whether it matters WHAT is masked in a task: what maskers score on the same sub-tasks.

    python -m tools.what_matters                                            # toy world
    python -m tools.what_matters --dataset=chemprot --lm=bert-base-uncased --contexts=200

All maskers of a seed share the sub-task, the order and the head: only their masks differ. They are scored on
half of train, the same documents for all seeds; test data are not looked at. One line per play goes to --log,
as the finetune scripts write them, and report.py makes the table; started again, it goes on from there.
"""
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

import maskers
import report
import train_nmg
from nmg import runs, toy
from nmg.data import Pieces
from nmg.loop import length_batches
from nmg.models import LMReader, weights_of
from nmg.runs import UserError, stream
from nmg.subtasks import SubTaskSampler
from pretrain import mask_batch


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


def main(cfg: Config) -> None:
    data, lm, task = train_nmg.open_task(cfg, cfg.spacy_model)
    chosen = {name: maskers.find(name) for name in maskers.split_names(cfg.maskers)}
    sampler = SubTaskSampler(data, task, cfg.max_len, cfg.ft_max_len, cfg.val_share)
    # What all lines of a log have in common. Paths are cut to their names, so that a log may move; an LM of
    # the hub, which has no checksum of weights here, keeps its full name.
    settings = runs.settings_of(cfg, ("log", "maskers", "seeds", "seed"), data=data.checksum,
                                weights=weights_of(cfg.lm))
    settings["dataset"] = Path(cfg.dataset).name
    if settings["weights"]:
        settings["lm"] = Path(cfg.lm).name
    log = Path(cfg.log)
    files = {name: maskers.checksum_of(name) for name in chosen}
    # How policies were learned, so that report.py can say it.
    policies = {name: runs.read_run(name.partition(":")[2]).get("settings", {}) for name in chosen
                if maskers.is_learned(name)}
    # Several of these commands may share a log. What fails here would else fail after a play.
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
    others = {line.get("commit", "unknown") for line in lines} - {runs.commit()}
    if others:
        print(f"WARNING: {cfg.log} has plays by commit {', '.join(others)}, and the code is now commit "
              f"{runs.commit()}; another --log plays them anew")
    done = {(line["seed"], line["masker"]) for line in lines}
    seeds = range(cfg.seed, cfg.seed + cfg.seeds)
    with tqdm(total=len(seeds) * len(chosen), unit="play", disable=None) as bar:
        for seed in seeds:
            subtask = sampler.sample(stream(seed, "sub-task"), cfg.contexts, cfg.docs, cfg.examples,
                                     cfg.validation)
            for name, masker in chosen.items():
                bar.update()
                if (seed, name) in done:
                    continue
                started = time.monotonic()
                mask = choose_masks(subtask.contexts, masker, cfg.p, seed, LMReader(lm))
                _, scores = train_nmg.inner_loop(lm, subtask, mask, task, cfg)
                # In hundredths of a nat, beside points.
                if "likelihood" in scores:
                    scores["likelihood"] *= 100
                line = {"dataset": settings["dataset"], "lm": settings["lm"], "masker": name, "row": name,
                        "seed": seed, "split": "val", "metrics": list(scores), **scores,
                        "seconds": {"play": time.monotonic() - started}, "file": files[name],
                        "config": settings, "policy": policies.get(name), "commit": runs.commit()}
                with runs.locked(log):
                    runs.write_rows(log, [*runs.read_rows(log), line])
    report.main(report.Config(results=cfg.log))


if __name__ == "__main__":
    runs.start(main, Config, tiny=toy.TRAIN_NMG)
