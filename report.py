"""Makes tables and plots of results.jsonl, and says what so few seeds can and cannot show.

    python report.py                          # results.jsonl -> report/results.md, forest-*.png
    python report.py --results=here/results.jsonl,there/results.jsonl --split=dev --out=report-dev
    python report.py --plan=0.5               # how many seeds would find half a point
"""
import math
import re
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from support import plots, runs
from support.runs import UserError

# Tables 1 to 3 of the paper, percent, three seeds; a column is a row of our tables, called as in run_all.sh.
PAPER = pd.read_csv(Path(__file__).parent / "results/paper.txt", sep=" ", index_col=[0, 1, 2])
READING = """- Mean ± standard deviation over seeds. hours: median of a seed, without meta-training.
- minus random: paired by seed, with Student's t 95 % interval. p: sign-flip test (exact up to 16 seeds),
  Holm-corrected over rows; "too few seeds" where n seeds cannot show anything: p is never below 2 / 2^n, and
  that is above .05 / rows. detectable: the difference that so many seeds would find 4 times in 5 (t test at
  .05 / rows). What seeds show holds for these examples, which all of them share. withheld: seeds that share a
  pre-training or a policy are no independent trials of a masker (`POLICIES` of run_all.sh). A checksum behind
  the name of data or an LM: they were edited between two lines, and so these are not compared."""
# Rows as the paper's tables call them. Its NMG is our nmg-paper; the others are our form, and ablations.
PAPER_ROWS = {"none": "No PT", "random": "Random", "whole": "Whole", "span": "Span", "entity": "Entity",
              "punct": "Punct.", "nmg-paper": "NMG (the paper's form)", "nmg-alone": "NMG w/o self-play",
              "nmg-fresh": "NMG w/o continual adaptation", "nmg": "NMG (ours)",
              "sampled": "NMG (ours, drawn)"}
# Settings that say where things lie, or that a table shows by itself, and so are not compared.
NOT_COMPARED = {"masker", "dataset", "lm", "split", "spacy_model", "eval_every", "weights"}
# Settings that a table names, where they are set.
SHOWN = ("contexts", "examples", "p", "mlm_epochs", "pretraining.p", "pretraining.epochs",
         "pretraining.max_steps", "pretraining.lr", "labelled", "epochs", "lr", "batch_size")

# What a line of results has at least, and the types of these.
LINE = {"dataset": str, "lm": str, "masker": str, "seed": int, "split": str, "seconds": dict, "config": dict,
        "metrics": list}


@dataclass
class Config:
    results: str = "results.jsonl"  # lines of the finetune scripts; several files, comma-separated
    split: str | None = None        # lines of this split only: test, dev, val; None: test, or what there is
    plan: float | None = None       # points: says how many seeds would find such a difference
    paper: bool = False             # True: before all else the tables as the paper prints them
    primary: str | None = None      # the row whose test was fixed in advance, so that its p is not corrected
    out: str | None = None          # folder of results.md and pictures; None: report, beside results


# ---------------------------------------------------------------- lines

def check_line(line: dict, where: str) -> None:
    """Raises UserError if a line lacks something that every line of results has."""
    wrong = [name for name, kind in LINE.items() if not isinstance(line.get(name), kind)]
    if not wrong:
        for metric in line["metrics"] or ["metrics"]:
            score = line.get(metric)
            if not isinstance(score, int | float) or not math.isfinite(score):
                wrong.append(metric)
    if wrong:
        raise UserError(f"{where}: not a line of results: {', '.join(wrong)} missing, or of a wrong type")
    # Something else under the name of random would be what all rows are compared with.
    row = (line.get("row") or line["masker"]).partition(",")[0]
    if row in PAPER.columns[:6] and row != line["masker"]:
        raise UserError(f"{where}: the row {row} has the masker {line['masker']}; give it another --row")


def read(files: list[str], split: str | None) -> pd.DataFrame:
    """The lines of one split, one for each data set, LM, row and seed; the paper's rows first.

    Columns: those of the files, with short names of data set and LM, and row (its name), hours (of all
    stages), where (file:line), settings (settings_of), commit (of the code), checksums: weights (of the LM
    before pre-training) and data. Raises UserError if two lines of a row and seed differ."""
    found = []
    for file in files:
        if not Path(file).is_file():
            raise UserError(f"--results={file}: no such file; the finetune scripts write it")
        for n, line in enumerate(runs.read_rows(Path(file)), 1):
            check_line(line, f"{file}:{n}")
            seconds = [s for s in line["seconds"].values() if s]
            # The LM that pre-training began with; without pre-training (tools/study.py), the LM.
            base = line["config"].get("pretraining") or line["config"]
            versions = line.get("versions") or {}
            found.append(line | {"row": line.get("row") or line["masker"], "hours": sum(seconds) / 3600,
                                 "where": f"{file}:{n}", "settings": settings_of(line),
                                 "weights": base.get("weights"), "data": line["config"].get("data"),
                                 "commit": line.get("commit", versions.get("commit")),
                                 "given": line["dataset"], **origins_of(line)})
    if not found:
        raise UserError(f"--results={','.join(files)}: holds no line of results yet")
    lines = pd.DataFrame(found)
    lines["lm"] = short_names(lines["lm"], lines["weights"])
    # A data set has another checksum for each tokenizer.
    lines["dataset"] = short_names(lines["dataset"], lines["data"], within=lines["lm"])
    lines = of_split(lines, split)
    lines["row"] = row_names(lines)
    refuse_contradictions(lines)
    lines = lines.drop_duplicates(["dataset", "lm", "row", "seed"])
    # The baseline, the paper's rows in its order, NMG in our form; rows of your own have no place: last.
    place = {row: i for i, row in enumerate(["linear", *PAPER.columns, "nmg", "sampled"])}
    return lines.assign(place=lines["row"].map(place)).sort_values(["place", "seed"])


def origins_of(line: dict) -> dict[str, str | None]:
    """What tells the pre-training and the policy behind a line from others: the checksum of their weights (in
    old lines a path), None without one. And how the policy was learned, if not as it is used."""
    config = line["config"]
    pretraining = config.get("pretraining") or {}
    base = pretraining or config
    policy = pretraining.get("policy") or line.get("policy") or {}
    adapted = policy_file = None
    if pretraining and line["masker"] != "none":
        adapted = config.get("weights") or config.get("lm")
    if line["masker"].startswith(("nmg:", "sampled:")):
        policy_file = pretraining.get("masker_file") or policy.get("checksum") or line.get("file")
        policy_file = policy_file or line["masker"]
    learned = []
    if policy.get("data") not in (None, config.get("data")):
        learned.append(f"from other data, or prepared in another way ({policy.get('dataset')})")
    elif policy.get("data") and line["split"] == "val":
        learned.append("from the labels of the very texts that are scored")
    if runs.is_another_lm(policy, base.get("lm"), base.get("weights")):
        learned.append(f"with another LM ({policy.get('lm')})")
    return {"pre-trainings": adapted, "policies": policy_file, "learned": " and ".join(learned) or None}


def short_names(full: pd.Series, checksum: pd.Series, within: pd.Series | None = None) -> pd.Series:
    """The paths of LMs or data sets, shortened to their last components if these are unambiguous. Equal
    checksums are one LM or data set, which has moved. If what is at a path was replaced or edited, names end
    with the checksum, as scores on other data or with another LM are not compared.

    within: (LMs) the checksum of the same data differs between these; only a difference within one is an
    edit"""
    # The first path of each checksum; without a checksum, each path is one of its own.
    first = full.groupby(checksum.where(checksum.notna(), full)).transform("first")
    last = first.map(lambda path: Path(path).name)
    names = last.where(first.groupby(last).transform("nunique") == 1, first)
    alike = [names]
    if within is not None:
        alike.append(within)
    replaced = checksum.groupby(alike).transform("nunique") > 1
    # Seven characters of the weights; what stands behind a hyphen is of config.json and the tokenizer.
    short = checksum.fillna("unknown").astype(str).str.replace("^(.{7})[^-]*", r"\1", regex=True)
    return names + (" (" + short + ")").where(replaced, "")


def of_split(lines: pd.DataFrame, split: str | None) -> pd.DataFrame:
    """The lines of one split; None: of each data set those of test, or else of what there is."""
    known = set(lines["split"])
    if split and split not in known:
        raise UserError(f"--split={split}: no line of this split; there is {', '.join(sorted(known))}")
    # Without test, the first by the alphabet: dev comes before val.
    first = lines.groupby("dataset")["split"].transform("min")
    has_test = (lines["split"] == "test").groupby(lines["dataset"]).transform("any")
    wanted = split or first.mask(has_test, "test")
    if not split:
        for (dataset, other), left in lines[lines["split"] != wanted].groupby(["dataset", "split"]):
            print(f"WARNING: lines of {dataset} that are not in these tables: {len(left)}, of {other} "
                  f"(--split={other} shows them)")
    return lines[lines["split"] == wanted]


def row_names(lines: pd.DataFrame) -> pd.Series:
    """nmg:FOLDER becomes nmg, as policies of several seeds lie in several folders; but where one
    policy has several seeds, or two share a seed, they are to be compared, and keep their names."""
    # The folders are separated by commas, and so are the flags of a row, --name=value.
    kind = lines["row"].str.replace("^(nmg|sampled):[^,]*(,(?!--)[^,]*)*", r"\1", regex=True)
    rows_of_a_seed = lines.groupby([kind, "dataset", "lm", "seed"])["row"].transform("nunique")
    of_kind = lines.groupby([kind, "dataset", "lm"])
    single = (of_kind["row"].transform("nunique") == 1) & (of_kind["seed"].transform("nunique") > 1)
    compared = kind.isin(kind[rows_of_a_seed > 1]) | single
    return lines["row"].where(compared, kind)


def refuse_contradictions(lines: pd.DataFrame) -> None:
    """Raises UserError if two lines of a row and seed differ in their flags or scores; duplicates are
    allowed."""
    firsts = {}
    for line in lines.to_dict("records"):
        first = firsts.setdefault((line["dataset"], line["lm"], line["row"], line["seed"]), line)
        before = first["settings"]
        differ = [name for name, value in line["settings"].items() if before.get(name, value) != value]
        differ += [metric for metric in line["metrics"] if first[metric] != line[metric]]
        if differ:
            raise UserError(f"{line['where']} ({first['where']}): both {line['row']} on "
                            f"{line['dataset']} with seed {line['seed']}, but differ in "
                            f"{', '.join(differ)}; keep one, or keep them in different files")


def settings_of(line: dict) -> dict[str, str]:
    """{name: value} of all settings behind a line: those of fine-tuning ("lr"), of pre-training
    ("pretraining.lr") and of a policy ("pretraining.policy.seed")."""
    config = line["config"]
    # Without pre-training its flags are empty.
    if line["masker"] == "none":
        config = config | {"pretraining": None}
    # As text, because pandas does not tell a value of None from a missing one.
    return {name: str(value) for name, value in flat(config).items()
            if name.split(".")[-1] not in NOT_COMPARED}


def flat(settings: dict) -> dict:
    """{"p": 0.05, "learn.p": 0.05, ...} from {"p": 0.05, "learn": {"p": 0.05}}"""
    found, = pd.json_normalize(settings).to_dict("records")
    return found


# ---------------------------------------------------------------- statistics

def scores_of(lines: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Rows x seeds, in points; NaN where a row lacks a seed."""
    return lines.pivot(index="row", columns="seed", values=metric).loc[lines["row"].unique()]


def differences(scores: pd.DataFrame) -> pd.DataFrame:
    """All rows but random, by seeds: the scores minus those of random with the same seed."""
    random = scores.loc["random"] if "random" in scores.index else np.nan
    return scores.drop(index="random", errors="ignore") - random


def least_seeds(n_tests: float | pd.Series) -> float | pd.Series:
    """The fewest seeds with which a sign-flip test can reach p = 2 / 2^seeds <= .05 / n_tests."""
    return np.ceil(1 + np.log2(n_tests / 0.05))


def detectable(sd: float | pd.Series, n: float | pd.Series, n_tests: float | pd.Series) -> float | pd.Series:
    """The difference that n paired seeds find with power .8, by a t test at 5 % / n_tests, Holm's first step.

    sd: of the differences"""
    return (stats.t.ppf(1 - 0.025 / n_tests, n - 1) + stats.t.ppf(0.8, n - 1)) * sd / np.sqrt(n)


def sign_flips(d: np.ndarray) -> float:
    """Two-sided p of d (S,): of 2^S ways to flip signs (2^16 at most), the share at least as far from 0."""
    # Rounded, so that floating-point error does not tell equal means apart; with few seeds they matter.
    # In batches, as all flips of 1,000 seeds would take gigabytes.
    test = stats.permutation_test((d,), lambda x, axis: np.round(np.mean(x, axis), 9),
                                  permutation_type="samples", n_resamples=2**16, rng=0,
                                  batch=max(1, 2**22 // len(d)))
    return test.pvalue


def holm(p: pd.Series) -> pd.Series:
    """p (m,) corrected for m tests: the smallest times m, the next times m - 1, ..., never falling."""
    corrected = p.sort_values() * np.arange(len(p), 0, -1)
    return corrected.cummax().clip(upper=1)[p.index]


def compare(scores: pd.DataFrame, primary: str | None = None) -> pd.DataFrame:
    """Every row of several seeds against random: a table of these rows.

    The primary row is tested alone, uncorrected; all others are corrected among themselves.

    scores: rows x seeds
    Columns: n, the seeds that both have; difference (mean), sd, low and high (Student's t 95 % interval), in
    points; tests, over which p is corrected; p and detectable, NaN where there are too few seeds."""
    d = differences(scores)
    d = d[d.count(axis=1) > 1]
    found = pd.DataFrame({"n": d.count(axis=1), "difference": d.mean(axis=1), "sd": d.std(axis=1)})
    half = stats.t.ppf(0.975, found["n"] - 1) * found["sd"] / np.sqrt(found["n"])
    found["low"] = found["difference"] - half
    found["high"] = found["difference"] + half

    others = found.index != primary
    found["tests"] = np.where(others, others.sum(), 1)
    p = pd.Series([sign_flips(of_row.dropna()) for _, of_row in d.iterrows()], d.index, dtype=float)
    p[others] = holm(p[others])
    enough = found["n"] >= least_seeds(found["tests"])
    found["p"] = p.where(enough)
    found["detectable"] = detectable(found["sd"], found["n"], found["tests"]).where(enough)
    return found


# ---------------------------------------------------------------- what may be concluded

def behind(lines: pd.DataFrame) -> pd.DataFrame:
    """How many different pre-trainings and policies stand behind each row; 0 where it has none."""
    return lines.groupby("row")[["pre-trainings", "policies"]].nunique()


def sharing(lines: pd.DataFrame) -> list[str]:
    """The rows whose seeds share a pre-training or a policy, and so are no independent trials of a masker;
    all rows, if those of random do. A row nmg:FOLDER is about that policy, and no other."""
    counts, seeds = behind(lines), lines.groupby("row")["seed"].nunique()
    counts.loc[counts.index.str.startswith(("nmg:", "sampled:")), "policies"] = 0
    shared = (counts.gt(0) & counts.lt(seeds, axis=0)).any(axis=1)
    if not shared.get("random"):
        shared = shared[shared]
    return list(shared.index)


def conclusion(compared: pd.DataFrame, metric: str, shared: list[str]) -> str:
    """One sentence: what may be concluded. Nothing of the rows in `shared`."""
    said = []
    withheld = compared.index.intersection(shared)
    compared = compared.drop(withheld)
    for row, found in compared[compared["p"] <= 0.05].iterrows():
        verb = "beats" if found.difference > 0 else "is behind"
        said.append(f"{row} {verb} random: {found.difference:+.1f} points ({found.low:+.1f} to "
                    f"{found.high:+.1f})")
    not_shown = []
    for row, found in compared[compared["p"] > 0.05].iterrows():
        not_shown.append(f"{row} ({found.n:g} seeds would detect {found.detectable:.1f} points)")
    if not_shown:
        said.append(f"not shown to differ from random: {', '.join(not_shown)}")
    too_few = compared[compared["p"].isna()]
    if len(too_few):
        least = least_seeds(too_few["tests"].max())
        said.append(f"too few seeds to say anything of {', '.join(too_few.index)}: fewer than {least:g} can "
                    "show nothing, and --plan=0.5 tells how many find half a point")
    if len(withheld):
        said.append(f"nothing is claimed of {', '.join(withheld)}, as seeds share pre-trainings or policies")
    return f"**{escaped(metric)}**: {escaped('; '.join(said))}." if said else ""


def seeds_needed(found: pd.Series, points: float) -> str:
    """How many seeds would find a difference of so many points with a row of `compare`, as text."""
    n = np.arange(least_seeds(found.tests), 10_000)
    enough = n[detectable(found.sd, n, found.tests) <= points]
    number = f"{enough[0]:g}" if len(enough) else "more than 10,000"
    guess = f" (a guess, from {found.n:g} seeds)" if found.n < 6 else ""
    return f"{number}{guess}"


def planned(compared: pd.DataFrame, metric: str, points: float) -> str:
    """One sentence: how many seeds would find a difference, from the scatter so far."""
    needed = [f"{row} {seeds_needed(found, points)}" for row, found in compared.iterrows()]
    return (f"Seeds that would find {points:g} points of {metric} (power .8, a t test at 5 % / "
            f"rows): {', '.join(needed) or 'no row has two seeds in common with random'}.")


def notes(lines: pd.DataFrame, primary: str | None) -> list[str]:
    """What was compared: the settings of random (without it, of the first row), and each setting that is not
    the same in all lines, with the rows that have a value of it."""
    firsts = lines.drop_duplicates("row").set_index("row")
    base = firsts.loc["random"] if "random" in firsts.index else firsts.iloc[0]
    shown = [f"{name} {base['settings'][name]}" for name in SHOWN
             if base["settings"].get(name, "None") != "None"]
    found = [f"- Settings: {', '.join(shown)}."]
    settings = pd.DataFrame(list(lines["settings"]), index=lines.index)
    for name in settings:
        rows = lines.groupby(settings[name])["row"].unique()
        # Every row has seeds and files of its own, but policies should have been learned alike. (Old lines
        # have masker_code, policy, and policy.checksum.)
        if len(rows) > 1 and not re.search("seed|masker_file|masker_code|policy$|policy.checksum", name):
            values = [f"{value} ({', '.join(names)})" for value, names in rows.items()]
            found.append(f"- {name} differs: {', '.join(values)}.")
    for row, of_row in lines[lines["policies"].isna()].groupby("row"):
        if of_row["settings"].map(lambda settings: settings.get("pretraining.masker_file")).nunique() > 1:
            found.append(f"- The file of {row} was edited between its seeds: they are of different maskers.")
    commits = lines["commit"].dropna().unique()
    if len(commits) > 1:
        found.append(f"- The code was edited between these lines (commits {', '.join(commits)}).")
    for how, rows in lines.groupby("learned")["row"].unique().items():
        found.append(f"- The policy of {', '.join(rows)} was learned {how}.")
    if primary in firsts.index:
        found.append(f"- The test of {primary} was fixed in advance: its p is not corrected.")
    if pd.notna(base.get("examples")):
        found.append(f"- Scored on {base['examples']:,.0f} examples of {base['split']}.")
    return found


# ---------------------------------------------------------------- tables and pictures

def formatted(numbers: pd.Series, form: str) -> pd.Series:
    """The numbers as text, without those that are missing."""
    return numbers.dropna().map(form.format).astype(str)


def score_table(lines: pd.DataFrame, metric: str, compared: pd.DataFrame) -> pd.DataFrame:
    """The table of one data set, LM and metric, as text: our scores, the paper's figures, the evidence."""
    dataset, lm, split, given = lines.iloc[0][["dataset", "lm", "split", "given"]]
    scores = scores_of(lines, metric)
    d = differences(scores)
    one_seed = d.index[d.count(axis=1) == 1]
    # A folder that happens to be called squad is not the paper's data.
    paper = (given, lm, metric)

    # Columns find their rows by name; what a column does not know becomes "-".
    table = pd.DataFrame(index=scores.index.rename(f"{dataset}, {lm}"))
    sd = formatted(scores.std(axis=1), " ±{:.2f}")
    table[metric] = formatted(scores.mean(axis=1), "{:.2f}").add(sd, fill_value="")
    # The paper's figures are of test sets.
    if split == "test" and paper in PAPER.index:
        table["paper"] = PAPER.loc[paper].str.replace("±", " ±")
    table["minus random"] = formatted(d.mean(axis=1), "{:+.2f}")
    high = formatted(compared["high"], " to {:+.2f}")
    table["95 % interval"] = formatted(compared["low"], "{:+.2f}") + high
    table.loc[one_seed, "95 % interval"] = "one seed: no evidence"
    table["p"] = formatted(compared["p"], "{:.2g}").reindex(compared.index, fill_value="too few seeds")
    withheld = compared.index[compared["p"].notna()].intersection(sharing(lines))
    table.loc[withheld, "p"] = "withheld"
    table["detectable"] = formatted(compared["detectable"], "{:.2f}")
    table["seeds"] = scores.count(axis=1).astype(str) + f" of {scores.shape[1]}"
    # The mean is of all seeds of a row, but the difference of those that random has, too.
    if "random" in scores.index:
        paired = d.count(axis=1)
        fewer = paired.index[paired < scores.count(axis=1)[paired.index]]
        table.loc[fewer, "seeds"] += ", " + paired[fewer].astype(str) + " with random"
    for name, count in behind(lines).items():
        if count.any():
            table[name] = count[count > 0].astype(str)
    table["hours"] = formatted(lines.groupby("row")["hours"].median(), "{:.3f}")
    return table.fillna("-")


def escaped(text: str) -> str:
    """Text as Markdown shows it, whatever names of data, LMs, maskers and metrics hold."""
    return re.sub(r"([\\`*\[\]<>|$^~@{}#&]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(text.split()))


def markdown_table(table: pd.DataFrame) -> str:
    table = table.reset_index()
    rows = [map(escaped, table.columns), ["---"] * len(table.columns)]
    rows += [map(escaped, cells) for cells in table.to_numpy()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def paper_column(lines: pd.DataFrame, metrics: tuple[str, ...]) -> pd.Series:
    """The scores of one data set and LM, a row each, as the paper prints them: means ± standard deviations,
    "80.63±.32 / 88.18±.25"; of each metric the best is bold, and the second best underlined."""
    columns = []
    for metric in metrics:
        scores = scores_of(lines, metric)
        mean = scores.mean(axis=1).round(2)
        text = formatted(mean, "{:.2f}").add(formatted(scores.std(axis=1), "±{:.2f}"), fill_value="")
        text = text.str.replace("±0.", "±.")
        place = mean.rank(ascending=False, method="dense")
        text = text.mask(place == 1, "**" + text + "**").mask(place == 2, "<u>" + text + "</u>")
        columns.append(text.reindex(scores.index, fill_value="-"))
    return columns[0].str.cat(columns[1:], sep=" / ")


def printed_metrics(metrics: list[str]) -> tuple[str, ...]:
    """Those that the paper prints, which are without macro F1; of a task that it does not have, all."""
    known = set(PAPER.index.get_level_values("metric"))
    return tuple(name for name in metrics if name in known) or tuple(metrics)


def paper_tables(lines: pd.DataFrame) -> list[str]:
    """A table for each kind of task, which is told by its metrics, as the paper prints them: a column for
    each data set, and for each LM a block of rows."""
    page = []
    known = PAPER.index.get_level_values("dataset").unique()
    for metrics, of_task in lines.groupby(lines["metrics"].map(printed_metrics)):
        datasets = set(of_task["dataset"])
        datasets = [name for name in known if name in datasets] + sorted(datasets.difference(known))
        rows = [[" ", *map(escaped, datasets)], ["---"] * (1 + len(datasets))]
        for lm, of_lm in of_task.groupby("lm"):
            rows.append([f"*{escaped(lm)}*", *[" "] * len(datasets)])
            # Columns find their rows by name.
            table = pd.DataFrame(index=of_lm["row"].unique())
            for dataset, of_dataset in of_lm.groupby("dataset"):
                table[dataset] = paper_column(of_dataset, metrics)
            for row, cells in table.reindex(columns=datasets).fillna("-").iterrows():
                rows.append([escaped(PAPER_ROWS.get(row, row)), *cells])
        page.append(f"## {escaped(' / '.join(metrics))}, as the paper prints it")
        page.append("Bold: the best mean; underlined: the second best. That is no evidence: whether a row "
                    "differs from random, and over how many seeds, stands in the tables below.")
        page.append("\n".join(f"| {' | '.join(cells)} |" for cells in rows))
    return page


def forest(compared: dict[str, pd.DataFrame], title: str, file: Path) -> None:
    """Differences to random with their intervals: a panel per metric, all rows of several seeds."""
    n_rows = max(len(found) for found in compared.values())
    fig = plots.figure(1.6 + 3.8 * len(compared), 0.4 * n_rows + 1.2)
    panels = fig.subplots(1, len(compared), sharey=True, squeeze=False)[0]
    for ax, (metric, found) in zip(panels, compared.items(), strict=True):
        ax.axvline(0, color="grey", linestyle=":", linewidth=1)
        half = found["high"] - found["difference"]
        ax.errorbar(found["difference"], found.index, xerr=half, fmt="o", color=plots.BLUE, linewidth=2)
        ax.set(ylim=(n_rows - 0.5, -0.5), xlabel=f"{metric}, points above random")
    fig.suptitle(f"{title}: 95 % intervals", fontsize=11)
    plots.save(fig, file)


def main(cfg: Config) -> None:
    if cfg.plan is not None and cfg.plan <= 0:
        raise UserError(f"--plan={cfg.plan}: must be above 0, in points")
    flags = [f"--{name}={value}" for name, value in asdict(cfg).items() if value]
    page = [f"Made by `{shlex.join(['python', 'report.py', *flags])}`.", READING]
    all_lines = read(cfg.results.split(","), cfg.split)
    if cfg.out is None:
        cfg.out = str(Path(cfg.results.split(",")[0]).with_name("report"))
    known = set(all_lines["row"]) - {"random"}
    if cfg.primary and cfg.primary not in known:
        raise UserError(f"--primary={cfg.primary}: no such row{runs.nearest(cfg.primary, known)}")
    if cfg.paper:
        page += paper_tables(all_lines)
    made = ["results.md"]
    for (dataset, lm), lines in all_lines.groupby(["dataset", "lm"]):
        title = f"{dataset}, {lm}"
        page.append(f"## {escaped(title)}")
        page.append("\n".join(map(escaped, notes(lines, cfg.primary))))
        compared = {}
        # Some lines may have more metrics than others, as a fork can add them.
        for metric in lines["metrics"].explode().unique():
            compared[metric] = compare(scores_of(lines, metric), cfg.primary)
        # A picture, where any row has several seeds.
        if any(map(len, compared.values())):
            picture = re.sub(r"[^\w.-]+", "-", f"forest-{dataset}-{lm}.png")
            forest(compared, title, Path(cfg.out, picture))
            page.append(f"![Differences to random]({picture})")
            made.append(picture)
        for metric, found in compared.items():
            page.append(markdown_table(score_table(lines, metric, found)))
            page.append(conclusion(found, metric, sharing(lines)))
            if cfg.plan:
                page.append(escaped(planned(found, metric, cfg.plan)))
    text = "\n\n".join(filter(None, page)) + "\n"
    with runs.atomic_write(Path(cfg.out, "results.md")) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    print(text)
    print(f"saved {cfg.out}: {', '.join(made)}")


if __name__ == "__main__":
    runs.start(main, Config)
