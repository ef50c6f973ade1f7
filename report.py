"""Makes tables and plots of results.jsonl, and says what so few seeds can and cannot show.

    python report.py                          # results.jsonl -> report/results.md, forest-*.png
    python report.py --results=here/results.jsonl,there/results.jsonl --split=dev --out=report-dev
    python report.py --plan=0.5               # how many seeds would find half a point
"""
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

import plots
import runs

# Tables 1 to 3 of the paper, percent, three seeds. The first line names the rows as in MASKERS of run_all.sh.
LINES = (Path(__file__).parent / "results/paper.txt").read_text(encoding="utf-8").splitlines()
ORDER = LINES[0].split()[3:]
# {(data set, LM, metric): {row: the paper's figure}}
PAPER = {tuple(line.split()[:3]): dict(zip(ORDER, line.split()[3:], strict=False)) for line in LINES[1:]}
READING = """- Mean ± standard deviation over seeds. hours: median of a seed, without meta-training.
- minus random: paired by seed, with Student's t 95 % interval. p: sign-flip test (exact up to 16 seeds),
  Holm-corrected over rows; "too few seeds" where 2 / 2^n, its least, is above .05 / rows. detectable: by a
  t test at .05 / rows, power .8. What seeds show holds for these examples, which all of them share.
"""
# Settings that differ between the rows of a table, or say where things lie, and so are not compared.
NOT_COMPARED = {"masker", "dataset", "lm", "split", "spacy_model", "eval_every", "weights", "pretraining",
                "policy"}
# Settings that a table names, where they are set.
SHOWN = ("contexts", "examples", "p", "mlm_epochs", "pretraining.p", "pretraining.epochs", "pretraining.lr",
         "labelled", "epochs", "lr", "batch_size")
# What may differ between the seeds of a row, besides its scores.
VARIES = {"seed", "pretraining.seed", "policy.seed", "policy.checksum"}

Rows = dict[str, dict[int, dict]]       # {name of a row: {seed: its line of results}}


@dataclass
class Config:
    results: str = "results.jsonl"  # lines of the finetune scripts; several files with commas
    split: str | None = None        # lines of this split only: test, dev, val; None: test, or what there is
    plan: float | None = None       # points: says how many seeds would find such a difference
    primary: str | None = None      # the row whose test was fixed in advance, so that its p is not corrected
    out: str | None = None          # folder of results.md and pictures; None: report, beside results


def read(files: list[str], split: str | None) -> list[dict]:
    """The lines of one split, each with its "row", "facts", "metrics" and "where" it stands."""
    found = []
    for file in files:
        if not Path(file).is_file():
            raise runs.UserError(f"--results={file}: no such file; the finetune scripts write it")
        for n, line in enumerate(runs.read_rows(Path(file)), 1):
            metrics = tuple(line.get("metrics", ()))
            fields = ("dataset", "lm", "masker", "seed", "split", "seconds", "config", "metrics", *metrics)
            missing = [name for name in fields if line.get(name) is None]
            if missing:
                raise runs.UserError(f"{file}:{n}: not a line of results: it lacks {', '.join(missing)}")
            found.append(line | {"where": f"{file}:{n}", "metrics": metrics, "row": row_of(line),
                                 "facts": facts_of(line)})
    if not found:
        raise runs.UserError(f"--results={','.join(files)}: holds no line of results yet")
    splits = {line["split"] for line in found}
    default = "test" if "test" in splits else min(splits)
    wanted = split or default
    if wanted not in splits:
        raise runs.UserError(f"--split={wanted}: no line of this split in {', '.join(files)}; there is "
                             f"{', '.join(sorted(splits))}")
    return [line for line in found if line["split"] == wanted]


def row_of(line: dict) -> str:
    """The name of its row. Policies of one kind are one row, whatever their folders are."""
    return re.sub(r"^(nmg|search|sampled):[^,]*", r"\1", line.get("row") or line["masker"])


def facts_of(line: dict) -> dict:
    """{name: value} of the scores of a line, and of all settings that are behind them."""
    pretraining = line["config"].get("pretraining") or {}
    if line["masker"] == "none":
        pretraining = {}
    facts = {name: line.get(name) for name in (*line["metrics"], "version")}
    stages = {"": line["config"], "pretraining.": pretraining, "policy.": pretraining.get("policy") or {}}
    for stage, flags in stages.items():
        for name, value in flags.items():
            if name not in NOT_COMPARED:
                facts[stage + name] = value
    return facts


def differing_facts(line: dict, other: dict, but: set[str]) -> str:
    """The facts in which two lines differ: "name value (value in the other), ..."; "" where in none."""
    a, b = line["facts"], other["facts"]
    names = [name for name in a if name in b and a[name] != b[name] and name not in but]
    return ", ".join(f"{name} {str(a[name])[:20]} ({str(b[name])[:20]})" for name in names)


def first_of(lines: dict) -> dict:
    return next(iter(lines.values()))


def grouped(lines: list[dict]) -> dict[tuple[str, str], Rows]:
    """{(data set, LM): its rows}, in the paper's order; UserError where lines contradict."""
    def rank(line: dict) -> tuple[int, int]:
        # Rows of the paper first.
        order = [*ORDER, line["row"]]
        return order.index(line["row"]), line["seed"]

    groups = {}
    for line in sorted(lines, key=rank):
        group = Path(line["dataset"]).name, Path(line["lm"]).name
        seeds = groups.setdefault(group, {}).setdefault(line["row"], {})
        # Twice the same seed: also the scores must be the same.
        check_same_facts(line, seeds.setdefault(line["seed"], line), set())
        check_same_facts(line, first_of(seeds), VARIES.union(line["metrics"]))
    return dict(sorted(groups.items()))


def check_same_facts(line: dict, other: dict, but: set[str]) -> None:
    differs = differing_facts(line, other, but)
    if differs:
        raise runs.UserError(f"{line['where']} ({other['where']}): both {line['row']} on {line['dataset']}, "
                             f"but differ in {differs}; keep one, or keep them in different files")


def rows_unlike_random(rows: Rows) -> list[str]:
    """A note for each row that differs from random in more than its masker."""
    if "random" not in rows:
        return []
    notes, random = [], first_of(rows["random"])
    for row, lines in rows.items():
        but = VARIES.union(random["metrics"], {"pretraining.masker_code"})
        differs = differing_facts(first_of(lines), random, but)
        if differs:
            notes.append(f"- {row} (random) differs in more than its masker: {differs}.")
    return notes


def settings_note(rows: Rows) -> str:
    """A note on the flags of random, or of the first row, that decide most."""
    facts = first_of(rows.get("random") or first_of(rows))["facts"]
    shown = [f"{name} {facts[name]}" for name in SHOWN if facts.get(name) is not None]
    return f"- Settings: {', '.join(shown)}."


def differences(rows: Rows, metric: str) -> dict[str, np.ndarray]:
    """{row: (S,) its scores minus those of random, in points, of the S seeds that both have}."""
    random = rows.get("random", {})
    found = {}
    for row, lines in rows.items():
        seeds = sorted(lines.keys() & random.keys())
        if row != "random":
            found[row] = np.array([lines[s][metric] - random[s][metric] for s in seeds])
    return found


def half_width(d: np.ndarray) -> float:
    """Of Student's t 95 % interval of the mean of d (S,), S > 1."""
    return stats.t.ppf(0.975, len(d) - 1) * stats.sem(d)


def sign_flips(d: np.ndarray) -> float:
    """Two-sided p of d (S,): of 2^S ways to flip signs (2^16 at most), the share at least as far from 0."""
    # Rounded, so that floating-point error does not tell equal means apart; with few seeds they matter.
    def rounded_mean(x: np.ndarray, axis: int) -> np.ndarray:
        return np.round(np.mean(x, axis), 9)
    test = stats.permutation_test((d,), rounded_mean, permutation_type="samples", n_resamples=2**16, rng=0)
    return test.pvalue


def holm(p: list[float]) -> np.ndarray:
    """p (m,) corrected for m tests: the smallest times m, the next times m - 1, ..., never falling."""
    corrected = np.maximum.accumulate(np.sort(p) * np.arange(len(p), 0, -1))
    return np.minimum(corrected[np.argsort(np.argsort(p))], 1)


class Comparison(NamedTuple):
    """A row of several seeds against random."""
    d: np.ndarray           # (S,) differences, in points
    p: float | None         # of a sign-flip test, Holm-corrected; None of too few seeds
    n_tests: int            # over which p is corrected

    def interval(self) -> tuple[float, float]:
        """The ends of Student's t 95 % interval."""
        return self.d.mean() - half_width(self.d), self.d.mean() + half_width(self.d)

    def detectable(self) -> float:
        """The difference that so many seeds would find."""
        return detectable(self.d.std(ddof=1), len(self.d), self.n_tests)


def compare(rows: Rows, metric: str, primary: str | None = None) -> dict[str, Comparison]:
    """Every row with random. The primary comparison is tested alone, uncorrected; all others are corrected
    among themselves."""
    found = {row: d for row, d in differences(rows, metric).items() if len(d) > 1}
    others = {row: sign_flips(d) for row, d in found.items() if row != primary}
    corrected = dict(zip(others, holm(list(others.values())).tolist(), strict=True))
    compared = {}
    for row, d in found.items():
        p, n_tests = corrected.get(row), len(others)
        if row == primary:
            p, n_tests = sign_flips(d), 1
        if len(d) < least_seeds(n_tests):
            p = None
        compared[row] = Comparison(d, p, n_tests)
    return compared


def least_seeds(n_tests: int) -> int:
    """With so many the least p of a sign-flip test, 2 / 2^seeds, is at most .05 / n_tests."""
    return math.ceil(1 + math.log2(n_tests / 0.05))


def detectable(sd: float, n: int, n_tests: int) -> float:
    """The difference that n paired seeds find with power .8, by a t test at 5 % / n_tests, Holm's first step.

    sd: of the differences"""
    return (stats.t.ppf(1 - 0.025 / n_tests, n - 1) + stats.t.ppf(0.8, n - 1)) * sd / np.sqrt(n)


def conclusion(compared: dict[str, Comparison], metric: str) -> str:
    """One sentence: what may be concluded."""
    said = []
    not_shown = []
    too_few = []
    for row, found in compared.items():
        mean = found.d.mean()
        low, high = found.interval()
        if found.p is None:
            too_few.append(row)
        elif found.p <= 0.05:
            verb = "beats" if mean > 0 else "is behind"
            said.append(f"{row} {verb} random: {mean:+.1f} points ({low:+.1f} to {high:+.1f})")
        else:
            points = found.detectable()
            not_shown.append(f"{row} ({len(found.d)} seeds would detect {points:.1f} points)")
    if not_shown:
        said.append(f"not shown to differ from random: {', '.join(not_shown)}")
    if too_few:
        least = max(least_seeds(compared[row].n_tests) for row in too_few)
        said.append(f"too few seeds to say anything of {', '.join(too_few)}: at least {least} are needed")
    return f"**{metric}**: {'; '.join(said)}." if said else ""


def planned(compared: dict[str, Comparison], metric: str, points: float) -> str:
    """One sentence: how many seeds would find a difference, from the scatter so far."""
    needed = []
    for row, found in compared.items():
        n, sd = least_seeds(found.n_tests), found.d.std(ddof=1)
        while detectable(sd, n, found.n_tests) > points and n < 10_000:
            n += 1
        guess = f" (a guess, from {len(found.d)} seeds)" if len(found.d) < 6 else ""
        needed.append(f"{row} {n}{guess}")
    return (f"Seeds that would find {points:g} points of {metric} (power .8, a t test at 5 % / "
            f"rows): {', '.join(needed) or 'not known from one seed'}.")


def score_table(dataset: str, lm: str, rows: Rows, metric: str,
                compared: dict[str, Comparison]) -> list[list[str]]:
    """The paper's table of one data set, LM and metric: its own figures beside ours, and the evidence."""
    # The paper's figures are of test sets.
    paper = {}
    if first_of(first_of(rows))["split"] == "test":
        paper = PAPER.get((dataset.lower(), lm, metric), {})
    seeds = set().union(*rows.values())
    found = differences(rows, metric)
    header = [f"{dataset}, {lm}", metric]
    if paper:
        header.append("paper")
    table = [[*header, "minus random", "95 % interval", "p", "detectable", "seeds", "hours"]]
    for row, lines in rows.items():
        scores = np.array([line[metric] for line in lines.values()])
        ours = f"{scores.mean():.2f}"
        if len(lines) > 1:
            ours += f" ±{scores.std(ddof=1):.2f}"
        cells = [row, ours]
        if paper:
            cells.append(paper.get(row, "-").replace("±", " ±"))
        cells += evidence(found.get(row, []), compared.get(row))
        count = f"{len(lines)} of {len(seeds)}"
        hours = np.median([sum(filter(None, line["seconds"].values())) for line in lines.values()]) / 3600
        table.append([*cells, count, f"{hours:.3f}"])
    return table


def evidence(d: np.ndarray, compared: Comparison | None) -> list[str]:
    """Four cells of a row: the difference to random, its interval, p, and what so many seeds would detect."""
    if len(d) == 1:
        return [f"{d[0]:+.2f}", "one seed: no evidence", "-", "-"]
    if compared is None:
        return ["-", "-", "-", "-"]
    low, high = compared.interval()
    cells = [f"{d.mean():+.2f}", f"{low:+.2f} to {high:+.2f}"]
    if compared.p is None:
        return [*cells, "too few seeds", "-"]
    return [*cells, f"{compared.p:.2g}", f"{compared.detectable():.2f}"]


def markdown_table(table: list[list[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    return "\n".join([lines[0], "|" + " --- |" * len(table[0]), *lines[1:]])


def forest(rows: Rows, metrics: tuple[str, ...], title: str, file: Path) -> None:
    """Differences to random with their intervals: a panel per metric, a line per row of several seeds."""
    fig = Figure(figsize=(1.6 + 3.8 * len(metrics), 0.4 * len(rows) + 0.8), layout="constrained")
    panels = fig.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for ax, metric in zip(panels, metrics, strict=True):
        ax.axvline(0, color="grey", linestyle=":", linewidth=1)
        found = differences(rows, metric)
        for y, d in enumerate(found.values()):
            if len(d) > 1:
                ax.errorbar(d.mean(), y, xerr=half_width(d), fmt="o", color="#1f3b57", linewidth=2)
        ax.set(ylim=(len(found) - 0.5, -0.5), xlabel=f"{metric}, points above random")
        ax.set_yticks(range(len(found)), found)
    fig.suptitle(f"{title}: 95 % intervals", fontsize=11)
    plots.save(fig, file)


def main(cfg: Config) -> None:
    flags = [f"--{name}={value}" for name, value in vars(cfg).items() if value]
    if cfg.out is None:
        cfg.out = str(Path(cfg.results.split(",")[0]).with_name("report"))
    page = [f"Made by `{shlex.join(['python', 'report.py', *flags])}`."]
    groups = grouped(read(cfg.results.split(","), cfg.split))
    known = set().union(*groups.values()) - {"random"}
    if cfg.primary and cfg.primary not in known:
        raise runs.UserError(f"--primary={cfg.primary}: no such row{runs.nearest(cfg.primary, known)}")
    for (dataset, lm), rows in groups.items():
        line = first_of(first_of(rows))
        notes = [settings_note(rows), *rows_unlike_random(rows)]
        if cfg.primary in rows:
            notes.append(f"- The test of {cfg.primary} was fixed in advance: its p is not corrected.")
        if line.get("examples"):
            notes.append(f"- Scored on {line['examples']:,} examples of {line['split']}.")
        if line.get("version"):
            notes.append(f"- Scored with version {line['version']} of this code; others may differ.")
        page.append(f"## {dataset}, {lm}")
        for metric in line["metrics"]:
            compared = compare(rows, metric, cfg.primary)
            page.append(markdown_table(score_table(dataset, lm, rows, metric, compared)))
            page.append(conclusion(compared, metric))
            if cfg.plan:
                page.append(planned(compared, metric, cfg.plan))
        page.append("\n".join(notes))
        if "random" in rows and len(rows) > 1:
            picture = f"forest-{dataset}-{lm}.png"
            forest(rows, line["metrics"], f"{dataset}, {lm}", Path(cfg.out, picture))
            page.append(f"![Differences to random]({picture})")
    text = "\n\n".join([*filter(None, page), READING])
    with runs.atomic_write(Path(cfg.out, "results.md")) as partial:
        partial.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    runs.start(main, Config)
