"""Whether it matters WHAT is masked in a task: what maskers score on the same sub-tasks.

    python -m tools.what_matters                                            # toy world
    python -m tools.what_matters --dataset=chemprot --lm=bert-base-uncased --contexts=200
    python -m tools.what_matters --dataset=chemprot --lm=bert-base-uncased --contexts=2000 --examples=600 \\
        --log=large.jsonl --sizes=runs/what_matters.jsonl           # and a picture of both sizes

All maskers of a seed share the sub-task, the order and the head: only their masks differ. They are scored on
half of train, the same documents for all seeds; test data are not looked at. One line per play goes to --log;
started again, it goes on from there.
"""
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

import maskers
import plots
import runs
import train_nmg
from pretrain import LMReader, choose_masks
from report import half_width
from runs import UserError, stream
from subtasks import SubTaskSampler


@dataclass
class Config(train_nmg.BaseConfig):
    maskers: str = "random,none,punct,frequent,rare,label,marked"   # all are compared with the first
    seeds: int = 6                      # sub-tasks, with seeds from --seed on
    spacy_model: str | None = None      # finds entities
    log: str = "runs/what_matters.jsonl"        # a line per play
    sizes: str | None = None            # logs of other --contexts, with commas: a picture of all beside log


def main(cfg: Config) -> None:
    data, lm, task = train_nmg.open_task(cfg, low_noise=True, spacy_model=cfg.spacy_model)
    names = cfg.maskers.split(",")
    chosen = {name: maskers.find(name) for name in names}
    sampler = SubTaskSampler(data, task, cfg.max_len, cfg.ft_max_len, cfg.val_share)
    settings = train_nmg.log_settings(cfg, data, without=("maskers", "seeds", "seed", "sizes"))
    file = Path(cfg.log)
    lines = runs.read_rows(file) or [settings]
    if lines[0] != settings:
        raise UserError(f"--log={file}: holds plays with other flags; choose another file")
    # Plays of a masker that was edited since then do not count.
    codes = {name: maskers.checksum(name) for name in names}
    lines[1:] = [play for play in lines[1:] if play["code"] == codes.get(play["masker"], play["code"])]
    done = {(play["seed"], play["masker"]) for play in lines[1:]}

    others = [Path(name) for name in (cfg.sizes or "").split(",") if name]
    for other in others:
        rows = runs.read_rows(other)
        if not rows or "masker" not in rows[-1]:
            raise UserError(f"--sizes={other}: no log of this script; it is what another --log wrote")

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
                lines.append({"seed": seed, "masker": name, "code": codes[name], "scores": scores,
                              "seconds": time.time() - started})
                runs.write_rows(file, lines)
    print(table(lines[1:], names))
    if others:
        draw([file, *others], names, cfg.metric, file.with_suffix(".png"))


def scores_of(plays: list[dict], masker: str, first: str, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """(S,) the scores of a masker, x 100, and (S,) the differences to the first, of the S seeds of both."""
    score = {(play["masker"], play["seed"]): 100 * play["scores"][metric] for play in plays}
    seeds = [seed for name, seed in score if name == masker and (first, seed) in score]
    found = np.array([score[masker, seed] for seed in seeds])
    return found, found - [score[first, seed] for seed in seeds]


def table(plays: list[dict], names: list[str]) -> str:
    """Mean scores, and differences to the first masker, paired by seed, with their 95 % intervals."""
    first, lines = names[0], []
    for metric in plays[0]["scores"]:
        heading = f"minus {first}"
        lines.append(f"{metric + ' x 100':18}{'mean':>9}{heading:>16}{'95 % interval':>20}{'seeds':>7}")
        for name in names:
            found, d = scores_of(plays, name, first, metric)
            line = f"{name:18}{found.mean():9.2f}"
            if name != first and len(d) > 1:
                half = half_width(d)
                line += f"{d.mean():16.2f}{d.mean() - half:10.2f} to {d.mean() + half:5.2f}{len(d):7}"
            lines.append(line)
    return "\n".join(lines)


def draw(logs: list[Path], names: list[str], metric: str, file: Path) -> None:
    """What maskers are worth against the number of texts: differences to the first, 95 % intervals."""
    fig = Figure(figsize=(6, 3.6), layout="constrained")
    ax = fig.subplots()
    ax.axhline(0, color="grey", linestyle=":", linewidth=1)
    read = sorted(map(runs.read_rows, logs), key=lambda lines: lines[0]["contexts"])
    sizes = [lines[0]["contexts"] for lines in read]
    for i, name in enumerate(names[1:]):
        differences = [scores_of(lines[1:], name, names[0], metric)[1] for lines in read]
        mean, half = zip(*[(d.mean(), half_width(d)) for d in differences], strict=True)
        # A little apart, so that intervals do not hide each other.
        ax.errorbar(np.array(sizes) * 1.04**i, mean, yerr=half, fmt="o-", label=name)
    ax.set(xscale="log", xlabel="texts of the adaptation", ylabel=f"{metric} x 100, minus {names[0]}")
    ax.set_xticks(sizes, sizes)
    ax.minorticks_off()
    fig.legend(loc="outside right upper", frameon=False)
    plots.save(fig, file)
    print(f"picture: {file}")


if __name__ == "__main__":
    runs.start(main, Config)
