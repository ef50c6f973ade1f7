"""Turns lines of results into the paper's tables and a figure, and says what so few seeds can and cannot show (PAPER: tables 1-3).

    python report.py                                                            # results.jsonl -> report/tables.md, tables.tex, forest-*.png
    python report.py --results=here/results.jsonl,there/results.jsonl --split=dev --out=report-dev
    python report.py --readme=README.md                                         # and between its lines <!-- results --> and <!-- /results -->

Everything comes from the lines that finetune_cls.py and finetune_qa.py append, and from the scores of single examples that they point to.
Its statistics of a running comparison and its learning curves serve train_nmg.py.
"""
import functools
import json
import math
import os
import re
import shlex
import sys
from pathlib import Path
from statistics import NormalDist

import numpy as np

from loop import ENDING, UserError, beside, cli, stream

NAMES = {"none": "No PT", "random": "Random", "whole": "Whole-Random", "span": "Span-Random", "entity": "Entity-Random", "punct": "Punct.-Random"}
ORDER = [*NAMES.values(), "NMG", "NMG without self-play", "NMG without continual adaptation"]
METRICS = {"accuracy": "accuracy", "macro_f1": "macro F1", "em": "EM", "f1": "F1"}
PAPER = {       # tables 1 to 3, the rows in ORDER
    ("squad", "bert-base", "em"): "80.63±.32 80.64±.02 80.73±.23 80.66±.19 80.79±.13 80.60±.24 80.83±.20",
    ("squad", "bert-base", "f1"): "88.18±.25 88.14±.10 88.20±.11 88.19±.11 88.23±.22 88.07±.25 88.28±.21",
    ("emrqa", "bert-base", "em"): "70.58±.09 71.40±1.01 71.65±.33 70.87±.38 71.50±.34 71.17±.58 71.84±.68",
    ("emrqa", "bert-base", "f1"): "76.60±.29 77.31±.78 77.84±.31 76.76±.33 77.57±.27 77.08±.57 77.49±.55",
    ("newsqa", "bert-base", "em"): "51.66±.31 51.46±.19 51.12±.28 51.17±.63 51.55±.43 51.47±.37 51.81±.33",
    ("newsqa", "bert-base", "f1"): "66.23±.16 66.21±.22 65.94±.51 65.93±.50 65.44±.34 66.18±.36 66.57±.48",
    ("squad", "distilbert", "em"): "76.75±.41 76.46±.35 76.48±.27 76.73±.13 76.34±.36 76.85±.09 76.93±.32",
    ("squad", "distilbert", "f1"): "85.13±.26 84.92±.17 84.96±.15 84.96±.13 84.78±.21 85.16±.03 85.30±.23",
    ("emrqa", "distilbert", "em"): "68.52±.39 69.02±.40 69.64±.39 69.54±.21 69.25±.43 69.41±.21 69.98±.37",
    ("emrqa", "distilbert", "f1"): "75.00±.53 75.70±.29 76.16±.24 76.11±.33 75.98±.39 76.14±.18 76.51±.45",
    ("newsqa", "distilbert", "em"): "48.61±.39 48.52±.46 48.22±.41 48.59±.09 48.19±.20 48.58±.26 48.75±.08 48.64±.27 48.52±.12",
    ("newsqa", "distilbert", "f1"): "63.45±.56 63.06±.21 62.92±.33 63.15±.39 62.97±.16 63.14±.20 63.55±.14 63.37±.17 63.06±.20",
    ("chemprot", "bert-base", "accuracy"): "80.40±.70 81.25±.72 80.18±1.20 78.06±1.72 79.68±1.32 79.68±.30 81.66±.37",
    ("imdb", "bert-base", "accuracy"): "92.28±.05 92.45±.21 92.55±.04 92.40±.10 92.38±.13 92.40±.18 92.53±.03",
}
READING = (
    "Scores in percent: mean over seeds and, lowered, their standard deviation. Of the rows with every seed the best mean is bold and the second "
    "underlined: the paper's convention, no finding. paper: its own figures. hours: of a seed (further pre-training, fine-tuning, scoring), median.",
    "difference: to Random, in points, over the seeds that both rows have, on the same examples. Its 95 % interval is a bootstrap (10,000) over "
    "examples and, independently, over seeds; as a bootstrap of few seeds is too narrow, their deviations are stretched to Student's t. Examples "
    "count as independent: where many ask about one text, or sentences repeat, intervals are too narrow and p (examples) too small.",
    "p (seeds): exact sign-flip test on the seeds' differences. p (examples): exact sign test on the examples' differences averaged over seeds (one "
    "seed, scores 0 or 1: McNemar's): of how many examples got better, not of the mean, and of these very models, not of what other seeds would "
    "bring. No p is corrected for the number of rows.",
    "detectable: the true difference that a paired t test would find with power 80 % at a level of 5 %, with so many seeds that scatter as these do.")


# ---------------------------------------------------------------- lines of results

def read(files: list[str], split: str) -> list[dict]:
    """The lines of one split, each with `where` it stands, the `row` that it belongs to and the `scores` (N, K) of its examples in 0 to 1."""
    lines, others = [], set()
    for file in map(Path, files):
        if not file.is_file():
            raise UserError(f"--results={file}: no such file; finetune_cls.py and finetune_qa.py write it")
        for n, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                line = dict(json.loads(text))
            except (ValueError, TypeError):
                raise UserError(f"{file}:{n}: not a line of results: no JSON object") from None
            metrics = ("em", "f1") if "em" in line else ("accuracy", "macro_f1")
            kinds = dict.fromkeys(("dataset", "lm", "masker", "split", "examples"), str) | {"seed": int, "config": dict}
            kinds |= dict.fromkeys((*metrics, "train_seconds", "score_seconds"), int | float)
            wrong = [key for key, kind in kinds.items() if not isinstance(line.get(key), kind)]
            if wrong:
                raise UserError(f"{file}:{n}: not a line of results: {', '.join(wrong)} missing or of the wrong kind")
            others.add(line["split"])
            if line["split"] == split:
                line |= {"where": f"{file}:{n}", "row": row_of(line), "metrics": metrics}
                lines.append(line | {"scores": examples_of(line, file.parent)})
    if not lines:
        raise UserError(f"--split={split}: no line of {', '.join(files)} is of this split; there: {', '.join(sorted(others)) or 'nothing'}")
    return lines


def examples_of(line: dict, folder: Path) -> np.ndarray:
    """(N, K) scores of a line's examples: accuracy, or EM and F1. Their mean must be the line's own score."""
    file, metrics = folder / line["examples"], [m for m in line["metrics"] if m != "macro_f1"]
    try:
        scores = np.load(file, allow_pickle=False).astype(float)
    except (OSError, ValueError, EOFError):
        raise UserError(f"{line['where']}: {file}, the scores of its examples, is missing or not a .npy file of numbers") from None
    if scores.ndim != 2 or scores.shape[1] != len(metrics) or not len(scores):
        raise UserError(f"{line['where']}: {file} holds an array {scores.shape}, not (examples, {len(metrics)}): {', '.join(metrics)}")
    for metric, mean in zip(metrics, 100 * scores.mean(0), strict=True):
        if not abs(mean - line[metric]) <= 0.01:
            raise UserError(f"{line['where']}: {metric} is {line[metric]:.2f}, but {mean:.2f} by the examples in {file}")
    return scores


def row_of(line: dict) -> str:
    """The name of a line's row: the paper's, with whatever a policy lacks of the paper's form."""
    if not line["masker"].startswith(("nmg:", "sampled:")):
        return NAMES.get(line["masker"], Path(line["masker"]).name)
    policy = (line["config"].get("pretraining") or {}).get("policy") or {}
    lacks = [what for knob, what in (("self_play", "self-play"), ("continual", "continual adaptation")) if policy.get(knob) is False]
    credit = policy.get("credit") or "play"
    sampled = ", sampled" * line["masker"].startswith("sampled:")
    return "NMG" + " without " * bool(lacks) + " and ".join(lacks) + f", credit={credit}" * (credit != "play") + sampled


def place(row: str) -> tuple[int, str]:
    """Sorts rows: the paper's in its order, other forms of NMG, other maskers by name."""
    return (ORDER.index(row) if row in ORDER else len(ORDER) + (not row.startswith(("NMG ", "NMG,"))), row)


ELSEWHERE = {"dataset", "lm", "base", "raw", "results", "out", "save_model", "split", "pretraining", "policy", "loss", "seconds", "hours"}
OF_ROW = {"seed", "pretraining.seed", "pretraining.masker", "policy.self_play", "policy.continual", "policy.credit"}


def settings(line: dict) -> dict:
    """Every knob and checksum behind a line, those of the stages before under `pretraining.` and `policy.`; no paths and no times."""
    before = line["config"].get("pretraining") or {}
    before = {k: v for k, v in before.items() if v is not None or before.get("masker") != "none"}
    stages = {"": line["config"], "pretraining.": before, "policy.": before.get("policy") or {}}
    return {stage + k: v for stage, knobs in stages.items() for k, v in knobs.items() if k not in ELSEWHERE}


def grouped(lines: list[dict]) -> dict[tuple[str, str], dict[str, dict[int, dict]]]:
    """{(data set, LM): {row: {seed: line}}}. A line that says the same again is dropped; one that differs in settings or scores is an error."""
    groups = {}
    for line in sorted(lines, key=lambda x: (*group_of(x), place(x["row"]), x["seed"])):
        rows = groups.setdefault(group_of(line), {})
        first = rows.setdefault(line["row"], {}).setdefault(line["seed"], line)
        a, b = ({m: round(x[m], 2) for m in x["metrics"]} | settings(x) for x in (first, line))
        differs = [f"{k} {a.get(k)} and {b.get(k)}" for k in a | b if a.get(k) != b.get(k)]
        if differs:
            raise UserError(f"{first['where']} and {line['where']} are both {line['row']}, seed {line['seed']}, but differ: {'; '.join(differs)}; "
                            "keep one of them")
        one = first_of(rows)
        if one["scores"].shape != line["scores"].shape:
            raise UserError(f"{one['where']} and {line['where']} do not score the same examples: "
                            f"{one['scores'].shape} against {line['scores'].shape}")
    return groups


def group_of(line: dict) -> tuple[str, str]:
    """The names of a line's data set, a file's without its ending, and LM."""
    return re.sub(ENDING, "", Path(line["dataset"]).name), Path(line["lm"]).name


def first_of(rows: dict[str, dict[int, dict]]) -> dict:
    return next(iter(next(iter(rows.values())).values()))


def differing(rows: dict[str, dict[int, dict]]) -> list[str]:
    """One sentence for each setting that is not the same in all lines of a table. NMG's p and epochs of pre-training are its own, and a
    masker's file and spaCy model each row's."""
    seen = {}
    for row, lines in rows.items():
        for seed, line in lines.items():
            for knob, value in settings(line).items():
                own = row if knob in ("pretraining.masker_file", "pretraining.spacy_model") else \
                    row.startswith("NMG") and knob in ("pretraining.p", "pretraining.epochs")
                seen.setdefault((knob, own), {}).setdefault(json.dumps(value), {}).setdefault(row, []).append(seed)

    def at(where):
        return ", ".join(row if len(s) == len(rows[row]) else f"{row} (seed {', '.join(map(str, s))})" for row, s in where.items())

    def short(value):                                               # a checksum by its first digits
        return re.sub(r"^\"([0-9a-f]{8})[0-9a-f]{56}\"$", r"\1...", value)

    return [f"Not the same in all rows: {knob} is {'; '.join(f'{short(value)} in {at(where)}' for value, where in values.items())}."
            for (knob, _), values in seen.items() if knob not in OF_ROW and len(values) > 1]


# ---------------------------------------------------------------- statistics

def t_quantile(p: float, df: int) -> float:
    """Student's t: the value that is exceeded with probability 1 - p >= 0, p >= 1/2. Bisects the exact series for whole degrees of freedom."""
    def inside(angle):                                              # P(|T| < sqrt(df) tan(angle)), Abramowitz and Stegun 26.7.3 and 26.7.4
        odd, cos2 = df % 2, math.cos(angle) ** 2
        terms = np.cumprod([1.0] + [cos2 * (k - 1) / k for k in range(2 + odd, df - 1, 2)])
        series = math.sin(angle) * (terms.sum() if not odd else math.cos(angle) * terms.sum() * (df > 1))
        return 2 / math.pi * (angle + series) if odd else series

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < 2 * p - 1 else (low, middle)
    return math.sqrt(df) * math.tan(low)


def interval(d: np.ndarray, resamples: int = 10_000) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean of d (S, N), the differences of S seeds on N examples.

    Each resample adds two independent draws: the mean of N examples, each averaged over the seeds (so that every seed has the same
    examples), and the deviation of S seeds from the mean. With S seeds the bootstrap's variance is (S - 1) / S of the right one, and normal
    where Student's t is due: so the deviations are stretched by sqrt(S / (S - 1)) t(.975, S - 1) / 1.96. One seed: examples alone."""
    rng, (s, n) = np.random.default_rng(0), d.shape
    values, counts = np.unique(np.round(d.mean(0), 9), return_counts=True)              # (K,): equal examples are drawn together
    size = max(1, 2**22 // len(values))                                                 # resamples at once
    means = np.concatenate([rng.multinomial(n, counts / n, min(size, resamples - i)) @ values / n for i in range(0, resamples, size)])
    if s > 1:
        stretch = math.sqrt(s / (s - 1)) * t_quantile(0.975, s - 1) / 1.959964
        means += rng.multinomial(s, [1 / s] * s, resamples) @ (d.mean(1) - d.mean()) / s * stretch
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def sign_flips(each: np.ndarray) -> float:
    """Two-sided p of the differences of S seeds (S,) under all 2^S flips of their signs: how many give a mean at least as far from 0.

    NaN for one seed, which can only give 1, and beyond 20, which are too many to enumerate."""
    if not 1 < len(each) <= 20:
        return math.nan
    sums = np.zeros(1)
    for x in each:
        sums = np.concatenate((sums + x, sums - x))
    return float(np.mean(np.abs(sums) >= abs(sums[0]) - 1e-9))


def sign_test(d: np.ndarray) -> float:
    """Two-sided exact p of the differences of examples (N,): the binomial test of how many are above 0 among those that are not 0."""
    signs = np.sign(np.round(d, 6))
    n, k = int(np.count_nonzero(signs)), int(min((signs > 0).sum(), (signs < 0).sum()))
    ways = tail = 1                                                 # n choose 0, 1, ... k in whole numbers, and their sum
    for i in range(k):
        ways = ways * (n - i) // (i + 1)
        tail += ways
    return min(1.0, 2 * tail / 2**n)


def detectable(each: np.ndarray) -> float:
    """(t(.975) + t(.80)) sd / sqrt(S) of the differences of S seeds (S,): what a paired t test finds with power 80 % (NaN for one seed)."""
    n = len(each)
    return (t_quantile(0.975, n - 1) + t_quantile(0.8, n - 1)) * float(np.std(each, ddof=1)) / math.sqrt(n) if n > 1 else math.nan


def against(row: dict[int, dict], random: dict[int, dict], k: int) -> dict | None:
    """The difference of a row to Random in points, by column k of the scores, over the seeds that both have; None where there is none."""
    seeds = sorted(row.keys() & random.keys())
    if not seeds:
        return None
    d = 100 * np.stack([row[s]["scores"][:, k] - random[s]["scores"][:, k] for s in seeds])     # (S, N)
    each = d.mean(1)
    low, high = interval(d)
    return {"seeds": len(seeds), "mean": float(each.mean()), "low": low, "high": high, "p_seeds": sign_flips(each),
            "p_examples": sign_test(d.mean(0)), "detectable": detectable(each)}


LOOKS = (1/8, 1/4, 1/2, 3/4, 1)         # shares of the validation examples after which sequential validation may stop


@functools.cache
def boundary(error: float, looks: tuple[float, ...] = LOOKS) -> float:
    """What |Z| exceeds at one look or more with probability `error` where two players are equal; from half a million Brownian paths."""
    steps = stream(0, "boundary").normal(size=(500_000, len(looks))) * np.sqrt(np.diff(looks, prepend=0))
    return float(np.quantile(np.abs(np.cumsum(steps, 1) / np.sqrt(looks)).max(1), 1 - error))


def verdict(d: np.ndarray, V: int, error: float) -> tuple[np.ndarray, np.ndarray]:
    """Which of two players is better, (...) -1, 0 or 1, and where it is 0, whether more examples may tell, (...) bool. d (..., n): the
    differences between their scores on the first n of V examples in random order.

    A group-sequential test with one boundary for |Z| at all looks (Pocock 1977), Z = sum(d) / sqrt(sum(d^2)): among players that are equal,
    in the world that the V examples come from or on those V, a sign appears at any look with probability `error` at most; among others
    the wrong sign with less than half of that. After all V, Z will be normal with mean Z / sqrt(t) and variance (1 - t) / t, t = n / V;
    where it will be beyond the boundary with probability below `error`, more examples are futile (Spiegelhalter et al. 1986)."""
    z, t, c = d.sum(-1) / np.sqrt(np.maximum(1e-12, (d**2).sum(-1))), d.shape[-1] / V, boundary(error)
    cdf, lead, spread = np.vectorize(NormalDist().cdf), np.abs(z) / np.sqrt(t), np.sqrt(max(1e-12, 1 - t) / t)
    return np.sign(z) * (np.abs(z) > c), (np.abs(z) <= c) & (cdf((lead - c) / spread) + cdf((-lead - c) / spread) >= error)


# ---------------------------------------------------------------- tables

def score_table(title: str, dataset: str, lm: str, rows: dict[str, dict[int, dict]]) -> list[tuple]:
    """The paper's table and the notes to it. A cell is text, or (text, subscript, "best" or "second" or "")."""
    expected = sorted({s for lines in rows.values() for s in lines})
    body, header = {row: [row] for row in rows}, [title]
    for metric in first_of(rows)["metrics"]:
        header.append(METRICS[metric])
        values = {row: [line[metric] for line in lines.values()] for row, lines in rows.items()}
        top = sorted({round(float(np.mean(v)), 2) for v in values.values() if len(v) == len(expected)}, reverse=True)
        marks = dict(zip(top, ("best", "second"), strict=False))
        for row, v in values.items():
            mark = marks.get(round(float(np.mean(v)), 2), "") if len(v) == len(expected) else ""
            body[row].append((f"{np.mean(v):.2f}", f"{np.std(v, ddof=1):.2f}".removeprefix("0") if len(v) > 1 else "", mark))
        family = next((f for f in ("bert-base", "distilbert") if lm.startswith(f)), "")
        paper = PAPER.get((dataset.lower(), family, metric))
        if paper:
            header.append("paper")
            known = dict(zip(ORDER, paper.split(), strict=False))
            for row in rows:
                body[row].append((*known[row].split("±"), "") if row in known else "-")
    header += ["seeds", "hours"]
    for row, lines in rows.items():
        lacks = [str(s) for s in expected if s not in lines]
        body[row] += [f"{len(lines)}" + f" of {len(expected)}, lacks {', '.join(lacks)}" * bool(lacks), hours(lines.values())]
    meta = {}
    for row, lines in rows.items():
        for line in lines.values():
            policy = (line["config"].get("pretraining") or {}).get("policy") or {}
            if policy.get("hours") is not None:
                meta[row, line["masker"]] = f"{row} {policy['hours']:.2f} hours ({policy.get('episodes')} episodes)"
    notes = [f"Meta-training, paid once for a policy and not in the hours above: {'; '.join(meta.values())}."] if meta else []
    return [("table", title, header, list(body.values())), ("notes", notes)]


def hours(lines) -> str:
    """Median hours of a seed and the device; "-" where the seconds of pre-training are not known."""
    seconds = [(line["config"].get("pretraining") or {}).get("seconds") if line["masker"] != "none" else 0 for line in lines]
    if None in seconds:
        return "-"
    kinds = {(line.get("versions") or {}).get("device") or "" for line in lines}
    device = "/".join(sorted("GPU" if k.startswith("cuda") else k.upper() for k in kinds))
    each = [before + line["train_seconds"] + line["score_seconds"] for before, line in zip(seconds, lines, strict=True)]
    return f"{np.median(each) / 3600:.3f} {device}".strip()


def signed(x: float) -> str:
    return f"{round(x, 2) + 0.0:+.2f}"


def chance(p: float) -> str:
    return "-" if math.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3g}"


def difference_table(title: str, compared: dict[str, dict | None]) -> list[tuple]:
    """The differences to Random, and the notes to them."""
    body = []
    for row, c in compared.items():
        one = "†" * bool(c and c["seeds"] == 1)
        body.append([row, "0", *"-----"] if c is None else [
            row, str(c["seeds"]), signed(c["mean"]), f"{signed(c['low'])} to {signed(c['high'])}{one}", chance(c["p_seeds"]), chance(c["p_examples"]),
            "-" if math.isnan(c["detectable"]) else f"{c['detectable']:.2f}"])
    counts = sorted({c["seeds"] for c in compared.values() if c})
    notes = [f"With {n} seeds no p (seeds) below {2 / 2**n:.3g} is possible." for n in counts if n > 1]
    notes += ["† One seed: this interval is over examples alone and knows nothing of the seed, which moves a row as well."] * (1 in counts)
    return [("table", title, [title, "seeds", "difference", "95 % interval", "p (seeds)", "p (examples)", "detectable"], body), ("notes", notes)]


def forest(compared: dict[str, dict[str, dict | None]], title: str, file: Path) -> None:
    """Differences to Random with their intervals: a panel a metric, a line a row. Hollow: one seed."""
    from matplotlib.figure import Figure
    rows = list(next(iter(compared.values())))
    fig = Figure(figsize=(0.8 + 5.6 * len(compared), 0.42 * len(rows) + 1.4), layout="constrained")
    axes = fig.subplots(1, len(compared), squeeze=False)
    for ax, (metric, differences) in zip(axes[0], compared.items(), strict=True):
        ax.axvline(0, color="grey", linestyle=":", linewidth=1)
        texts, one = [], any(c and c["seeds"] == 1 for c in differences.values())
        for i, (row, c) in enumerate(differences.items()):
            color = "#d08c3c" if row.startswith("NMG") else "#1f3b57"
            if c:
                ax.plot([c["low"], c["high"]], [i, i], color=color, linewidth=2, solid_capstyle="round")
                ax.plot(c["mean"], i, "o", color=color, markersize=7, markerfacecolor="white" if c["seeds"] == 1 else color)
            texts.append(f"{signed(c['mean'])}  ({signed(c['low'])} to {signed(c['high'])})" if c else "no seed shared")
        ax.set(ylim=(len(rows) - 0.5, -0.5), xlabel=f"{metric}: points above Random, 95 % interval" + "\n(hollow: one seed, examples alone)" * one)
        ax.set_yticks(range(len(rows)), rows if ax is axes[0][0] else [""] * len(rows))
        numbers = ax.twinx()
        numbers.set(ylim=ax.get_ylim())
        numbers.set_yticks(range(len(rows)), [t.replace("-", "\u2212") for t in texts], fontsize=9)
        ax.locator_params(axis="x", nbins=6)
        for a in (ax, numbers):
            a.spines[["top", "right", "left"]].set_visible(False)
            a.tick_params(axis="y", length=0)
    fig.suptitle(title, fontsize=11)
    with beside(file) as tmp:
        fig.savefig(tmp, dpi=150, format="png")


def won(m: dict, name: str) -> float:
    """1, 0 or -1: whether a player won an episode against random, by what sequential validation decided or else by the scores."""
    return m.get(f"{name}_won", np.sign(m[f"{name}_score"] - m["random_score"]))


def won_lost(metrics: list[dict]) -> str:
    ahead = [won(m, "learner") for m in metrics]
    return f"won {sum(a > 0 for a in ahead)} and lost {sum(a < 0 for a in ahead)} against random"


def curves(metrics: list[dict], file: Path) -> None:
    """PAPER: learning curves. Cumulative regret against random with its worst case, policy entropy, loss."""
    from matplotlib.figure import Figure
    x = np.arange(1, len(metrics) + 1)
    fig = Figure(figsize=(12, 3.4), layout="constrained")
    regret, entropy, loss = fig.subplots(1, 3)
    regret.plot(x, x, color="grey", linewidth=1, label="worst case")
    for name, color in (("learner", "#1f3b57"), ("opponent", "#d08c3c")):
        if f"{name}_score" in metrics[0]:
            regret.plot(x, np.cumsum([won(m, name) < 0 for m in metrics]), color=color, label=name)
            entropy.plot(x, [m[f"{name}_entropy"] for m in metrics], color=color, label=name)
            loss.plot(x, [m[f"{name}_policy_loss"] + m[f"{name}_value_loss"] for m in metrics], color=color, label=name)
    entropy.plot(x, [m["uniform_entropy"] for m in metrics], color="grey", linewidth=1, label="uniform")
    regret.set(title="episodes lost against random, so far", ylim=(0, None))
    entropy.set(title="mean entropy of the policy, nats", ylim=(0, None))
    loss.set(title="loss of an action in replay")
    regret.yaxis.get_major_locator().set_params(integer=True)
    for ax in (regret, entropy, loss):
        ax.set(xlabel="episode", xlim=(0, len(x) + 1))
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize=8)
    with beside(file) as tmp:
        fig.savefig(tmp, dpi=120, format="png")


# ---------------------------------------------------------------- Markdown and LaTeX

def md(text: str) -> str:
    return re.sub(r"([\\|*_<>`\[\]])", r"\\\1", text)


def tex(text: str) -> str:
    other = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "|": "$|$", "†": r"$^\dag$"}
    text = re.sub(r"[\\~^<>|†&%$#_{}]", lambda m: other.get(m[0], "\\" + m[0]), text)
    return re.sub(r"(?<![\w.)])-(?=[\d.])", "$-$", text)


def cell(c: str | tuple, escape, best: str, second: str, sub: str) -> str:
    text, below, mark = (c, "", "") if isinstance(c, str) else c
    return {"best": best, "second": second, "": "%s"}[mark] % escape(text) + (sub % below if below else "")


def markdown(parts: list[tuple], folder: str = "") -> str:
    """The report for a file from which its pictures are in `folder`."""
    out = []
    for kind, *what in parts:
        if kind == "title":
            out.append(f"### {md(what[0])}")
        elif kind == "table":
            lines = [[cell(c, md, "**%s**", "<ins>%s</ins>", "<sub>%s</sub>") for c in line] for line in (what[1], *what[2])]
            lines.insert(1, ["---"] * len(what[1]))
            out.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        elif kind == "notes":
            out += ["\n".join(f"- {md(note)}" for note in what[0])] * bool(what[0])
        else:
            out.append(f"![{md(what[1])}]({folder}{what[0]})")
    return "\n\n".join(out) + "\n"


def latex(parts: list[tuple]) -> str:
    r"""The report as tables to \input; needs \usepackage{booktabs,graphicx}."""
    out, title = [r"% needs \usepackage{booktabs,graphicx}"], ""
    for kind, *what in parts:
        if kind == "title":
            title = tex(what[0])
            out.append(f"% {title}")
        elif kind == "table":
            lines = [" & ".join(cell(c, tex, r"\textbf{%s}", r"\underline{%s}", "$_{%s}$") for c in line) + r" \\" for line in (what[1], *what[2])]
            out += [r"\begin{table}", r"\centering", rf"\caption{{{title}: {tex(what[0])}}}",
                    r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{\begin{tabular}{l" + "r" * (len(what[1]) - 1) + "}",
                    r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule", r"\end{tabular}}", r"\end{table}"]
        elif kind == "notes":                                       # a table's float away with it
            end = [out.pop()] if out[-1] == r"\end{table}" else []
            out += [rf"\par{{\raggedright\footnotesize {tex(note)}\par}}" for note in what[0]] + end
        else:
            out.append(rf"\begin{{figure}}\centering\includegraphics[width=\linewidth]{{{what[0]}}}\caption{{{tex(what[1])}}}\end{{figure}}")
    return "\n".join(out) + "\n"


def report(dataset: str, lm: str, rows: dict[str, dict[int, dict]], out: Path) -> list[tuple]:
    """The parts of one data set and LM: the paper's table, the differences to Random, both again for the ablations, the picture."""
    parts, random = [("title", f"{dataset}, {lm}")], rows.get("Random")
    scored = [m for m in first_of(rows)["metrics"] if m != "macro_f1"]
    compared = {METRICS[m]: {row: against(lines, random, k) for row, lines in rows.items() if row != "Random"}
                for k, m in enumerate(scored)} if random and len(rows) > 1 else {}
    ablated = {row: lines for row, lines in rows.items() if row.startswith("NMG without")}
    whole = {row: lines for row, lines in rows.items() if row not in ablated}
    full = {row: lines for row, lines in whole.items() if row == "NMG" or row.startswith("NMG,")}
    for prefix, chosen in (("", whole), ("ablations, ", full | ablated if ablated else {})):
        if chosen:
            parts += score_table(f"{prefix}scores", dataset, lm, chosen)
            for metric, differences in compared.items():
                shown = {row: c for row, c in differences.items() if row in chosen}
                parts += difference_table(f"{prefix}{metric} against Random", shown) if shown else []
            parts.append(("notes", differing(chosen | ({"Random": random} if random else {}))))
    if compared:
        picture = "forest-" + re.sub(r"[^\w.-]", "-", f"{dataset}-{lm}") + ".png"
        forest(compared, f"{dataset}, {lm}", out / picture)
        return [*parts, ("figure", picture, f"Differences to Random on {dataset}, {lm}")]
    return [*parts, ("notes", [] if random else ["No row Random: there is nothing to compare the others with."])]


def main(
    results: str = "results.jsonl",             # lines of finetune_cls.py and finetune_qa.py; several files with commas between them
    split: str = "test",                        # lines of this split only
    out: str = "report",                        # folder of tables.md, tables.tex and forest-DATASET-LM.png
    readme: str | None = None,                  # a file whose part between its lines <!-- results --> and <!-- /results --> becomes the Markdown
):
    around = re.compile(r"(^<!-- results -->\n).*?(^<!-- /results -->$)", re.DOTALL | re.MULTILINE)
    page = Path(readme).read_text(encoding="utf-8") if readme and Path(readme).is_file() else ""
    if readme and not around.search(page):
        raise UserError(f"--readme={readme}: no such file, or without the two lines <!-- results --> and <!-- /results -->")
    folder, parts = Path(out), []
    for (dataset, lm), rows in grouped(read(results.split(","), split)).items():
        parts += report(dataset, lm, rows, folder)
    parts += [("title", "How to read these tables"), ("notes", READING)]
    made = f"Made by `{shlex.join(['python', 'report.py', *sys.argv[1:]])}`.\n\n"
    files = {folder / "tables.md": made + markdown(parts), folder / "tables.tex": latex(parts)}
    if readme:
        pictures = os.path.relpath(folder, Path(readme).parent) + "/"
        files[Path(readme)] = around.sub(lambda m: m[1] + made + markdown(parts, pictures) + m[2], page)
    for file, text in files.items():
        with beside(file) as tmp:
            tmp.write_text(text, encoding="utf-8")
    print(files[folder / "tables.md"])
    print(*files, *(folder / what[0] for kind, *what in parts if kind == "figure"), sep="\n")


if __name__ == "__main__":
    cli(main)
