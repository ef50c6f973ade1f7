"""Whether it matters WHAT is masked in a task: what maskers score on the same sub-tasks, on dev documents.

    python -m tools.what_matters                                            # toy world
    python -m tools.what_matters --dataset=chemprot --lm=bert-base-uncased --contexts=200
    python -m tools.what_matters --dataset=chemprot --lm=bert-base-uncased --contexts=2000 --examples=600

All maskers of a seed share the sub-task, the order and the head: only their masks differ. Half of train's
documents are for validation; test data are not looked at. One line a play goes to --log; started again, it
goes on from there.
"""
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

import maskers
import runs
import train_nmg
from loop import stream
from pretrain import LMReader, choose_masks
from report import half_width
from runs import UserError
from subtasks import SubTaskSampler


@dataclass
class Config(train_nmg.BaseConfig):
    maskers: str = "random,none,punct,frequent,rare,label,marked"   # all are compared with the first
    seeds: int = 6                      # sub-tasks, with seeds from --seed on
    spacy_model: str | None = None      # finds entities
    log: str = "runs/what_matters.jsonl"        # a line a play


def main(cfg: Config) -> None:
    data, lm, task = train_nmg.open_task(cfg, graded=True, spacy_model=cfg.spacy_model)
    names = cfg.maskers.split(",")
    chosen = {name: maskers.find(name) for name in names}
    sampler = SubTaskSampler(data, task, cfg.max_len, cfg.ft_max_len, cfg.val_share)
    settings = train_nmg.log_settings(cfg, data, "maskers", "seeds", "seed")
    file = Path(cfg.log)
    lines = runs.read_results(file) or [settings]
    if lines[0] != settings:
        raise UserError(f"--log={file}: holds plays with other flags; choose another file")
    done = {(line["seed"], line["masker"]) for line in lines[1:]}

    seeds = range(cfg.seed, cfg.seed + cfg.seeds)
    with tqdm(total=len(seeds) * len(names), unit="play", disable=None) as bar:
        for seed in seeds:
            subtask = sampler.sample(stream(seed, "sub-task"), cfg.contexts, cfg.docs, cfg.examples,
                                     cfg.validation)
            for name, masker in chosen.items():
                bar.update()
                if (seed, name) in done:
                    continue
                started = time.time()
                mask = choose_masks(subtask.contexts, masker, cfg.p, seed, LMReader(lm))
                _, measured = train_nmg.inner_loop(lm, subtask, mask, task, cfg)
                scores = {metric: float(values.mean()) for metric, values in measured.items()}
                lines.append({"seed": seed, "masker": name, "scores": scores,
                              "seconds": time.time() - started})
                runs.write_jsonl(file, lines)
    print(table(lines[1:], names))


def table(plays: list[dict], names: list[str]) -> str:
    """Mean scores, and differences to the first masker, paired by seed, with their 95 % intervals."""
    first, lines = names[0], []
    for metric in plays[0]["scores"]:
        heading = f"minus {first}"
        lines.append(f"{metric + ' x 100':18}{'mean':>9}{heading:>16}{'95 % interval':>20}{'seeds':>7}")
        score = {(play["masker"], play["seed"]): 100 * play["scores"][metric] for play in plays}
        for name in names:
            seeds = [seed for masker, seed in score if masker == name and (first, seed) in score]
            found = np.array([score[name, seed] for seed in seeds])
            line = f"{name:18}{found.mean():9.2f}"
            d = found - [score[first, seed] for seed in seeds]
            if name != first and len(d) > 1:
                half = half_width(d)
                line += f"{d.mean():16.2f}{d.mean() - half:10.2f} to {d.mean() + half:5.2f}{len(d):7}"
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    runs.start(main, Config)
