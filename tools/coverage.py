"""How often the intervals and tests of report.py are right, by simulation of studies with a known answer.

    python -m tools.coverage                    # minutes; the table of docs/statistics.md
"""
from dataclasses import dataclass

import numpy as np
from scipy import stats
from tqdm import tqdm

import report
import runs

# Paired differences of scores, all with mean 0 and standard deviation 1.
SHAPES = {
    "normal": lambda rng, n: rng.normal(size=n),
    "heavy tails": lambda rng, n: rng.standard_t(5, n) / np.sqrt(5 / 3),
    "skewed": lambda rng, n: rng.exponential(size=n) - 1,
}


@dataclass
class Config:
    seeds: str = "3,6,8,10,18"      # sizes of the studies, with commas
    studies: int = 500              # of each size and shape
    effect: float = 1.0             # in standard deviations of a paired difference, for the power
    seed: int = 0


def covers(d: np.ndarray, rng: np.random.Generator) -> tuple[bool, bool]:
    """Whether Student's t interval, and a BCa bootstrap, hold the true mean 0 of d."""
    bootstrap = stats.bootstrap((d,), np.mean, n_resamples=999, rng=rng).confidence_interval
    return abs(d.mean()) <= report.half_width(d), bootstrap.low <= 0 <= bootstrap.high


def main(cfg: Config) -> None:
    rng = np.random.default_rng(cfg.seed)
    print("| differences | seeds | t interval holds the truth | BCa bootstrap does | p <= .05 without effect "
          f"| with {cfg.effect:g} sd |\n|{' --- |' * 6}")
    for shape, draw in SHAPES.items():
        for n in map(int, cfg.seeds.split(",")):
            right = np.zeros(4)
            for _ in tqdm(range(cfg.studies), desc=f"{shape}, {n} seeds", leave=False, disable=None):
                d = draw(rng, n)
                found = [report.sign_flips(x) <= 0.05 for x in (d, d + cfg.effect)]
                right += [*covers(d, rng), *found]
            cells = [f"{100 * share:.1f} %" for share in right / cfg.studies]
            print("|", " | ".join([shape, str(n), *cells]), "|", flush=True)


if __name__ == "__main__":
    runs.start(main, Config)
