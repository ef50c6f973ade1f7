"""The tables of README.md, docs/learning.md and docs/comparisons.md, and their pictures, from results/.

Comparisons of masks are listed in results/comparisons.toml. The toy world's scores are those that
tools.toy_compare writes, and what policies foretell is what tools.foretell writes; foretell-PLAYS.jsonl there
hold its rows, or those of earlier measurements by the same equations.

    python -m tools.figures
"""
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from scipy import stats

import report
from support import plots, runs
from support.runs import UserError
from support.sources import error_context
from tools import toy_compare

COLUMNS = ["minus random masks, or as named", "seeds", "points", "95 % interval", "p", "better on",
           "macro F1", "95 % interval"]
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"
# In gain.png, of the data sets, and of the ways to learn and to fine-tune; more of them cannot be drawn.
COLORS = [f"C{i}" for i in range(10)]
MARKERS = "osD^vP*X"


@dataclass
class Config:
    comparisons: str = "results/comparisons.toml"   # plays, and all else that is read, lie beside it
    pictures: str = "docs"              # the folder of gain.png, masks.png and toy.png


def scores_of(plays: pd.DataFrame, masks: str, metric: str) -> pd.Series:
    """The score of each seed, in points: the mean over the maskers whose name matches the expression."""
    found = plays[plays["masker"].str.fullmatch(masks)]
    if found.empty:
        raise UserError(f"masks={masks}: no such masker in these plays "
                        f"({', '.join(plays['masker'].unique())})")
    return found.groupby("seed")[metric].mean()


def rows_of(file: Path, what: str) -> list[dict]:
    """The lines of a file. Raises UserError if it is not there; what: how it is named"""
    if not file.is_file():
        raise UserError(f"{what}={file.name}: no such file in {file.parent}")
    return runs.read_rows(file)


def plays_of(row: dict, folder: Path) -> pd.DataFrame:
    """The plays of a comparison, a row each. Raises UserError if a file is not there."""
    lines = []
    for name in row["plays"]:
        lines += rows_of(folder / name, "plays")
    return pd.DataFrame(lines)


def compared(row: dict, plays: pd.DataFrame, metric: str) -> pd.Series:
    """A comparison by seeds: seeds, difference, low and high (95 %, Student's t), p, better, in points."""
    learned = scores_of(plays, row["masks"], metric)
    d = (learned - scores_of(plays, row.get("instead", "random"), metric)).dropna()
    test = stats.ttest_1samp(d, 0)
    interval = test.confidence_interval()
    return pd.Series({"seeds": len(d), "difference": d.mean(), "low": interval.low, "high": interval.high,
                      "p": test.pvalue, "better": (d > 0).sum()})


def table_line(what: str, found: pd.Series, macro_f1: pd.Series | None) -> str:
    """found, macro_f1: of `compared`; None where plays have no macro F1"""
    cells = [what, f"{found['seeds']:.0f}", f"{found['difference']:+.2f}", interval(found),
             f"{found['p']:.2g}", f"{found['better']:.0f}"]
    if macro_f1 is None:
        cells += ["-", "-"]
    else:
        cells += [f"{macro_f1['difference']:+.2f}", interval(macro_f1)]
    return f"| {' | '.join(cells)} |"


def interval(found: pd.Series) -> str:
    return f"{found['low']:.2f} to {found['high']:.2f}"


def toy_table(rows: pd.DataFrame) -> str:
    """rows: of tools.toy_compare, columns seed, masker, accuracy, attributes"""
    accuracy, attributes = (rows.groupby("masker", sort=False)[name] for name in ("accuracy", "attributes"))
    lowest, highest = (report.formatted(shares, "{:.0f}") for shares in (attributes.min(), attributes.max()))
    table = pd.DataFrame({
        "mean accuracy, %": report.formatted(accuracy.mean(), "{:.1f}"),
        f"lowest of {rows['seed'].nunique()} seeds": report.formatted(accuracy.min(), "{:.1f}"),
        "attributes among the masked tokens, %": lowest + " to " + highest})
    return report.markdown_table(table)


def foretold_table(folder: Path) -> str:
    """The means of the correlations in foretell-PLAYS.jsonl, rows of tools.foretell."""
    rows = []
    for file in sorted(folder.glob("foretell-*.jsonl")):
        plays = file.stem.removeprefix("foretell-").replace("-", " ")
        for row in runs.read_rows(file):
            # Rows that say how many updates were taken are of networks of the paper's size.
            policy = f"network, {row['updates']} updates" if "updates" in row else "linear"
            rows.append({"plays": plays, "policy": policy, **row})
    settings = ["plays", "metric", "judged_by", "policy"]
    ways = ["all words", "highest tenth"]
    means = pd.DataFrame(rows).pivot_table("r", settings, "way")[ways].reset_index()
    for way in ways:
        means[way] = report.formatted(means[way], "{:.2f}")
    names = {"metric": "reward", "judged_by": "score"}
    return report.markdown_table(means.rename(columns=names).astype(str).set_index("plays"))


def draw(points: pd.DataFrame, file: Path) -> None:
    """The gain of learned masks over random ones, with its interval, against the amount of text.

    points: columns task ("data set, way"), text (how many texts), difference, low, high"""
    fig = plots.figure(7.6, 3.4)
    ax = fig.subplots()
    ax.axhline(0, color="grey", linestyle=":", linewidth=1)
    # Points with equally many texts would hide one another: each is a little further to the right.
    place = points.groupby("text").cumcount()
    points = points.assign(x=points["text"] * 1.045**place)
    names = points["task"].str.partition(", ").set_axis(["data set", "comma", "way"], axis=1)
    color = dict(zip(names["data set"].unique(), COLORS, strict=False))
    marker = dict(zip(names["way"].unique(), MARKERS, strict=False))
    for task, of_task in points.groupby("task"):
        data_set, _, way = task.partition(", ")
        half = of_task["high"] - of_task["difference"]
        ax.errorbar(of_task["x"], of_task["difference"], yerr=half, color=color[data_set], fmt=marker[way],
                    markersize=5, capsize=3, label=task)
    ticks = sorted(points["text"].unique())
    ax.set_xscale("log")
    ax.set_xticks(ticks, [f"{n:,.0f}" for n in ticks], fontsize=7)
    ax.minorticks_off()
    ax.set(xlabel="texts to pre-train on", ylabel="points of accuracy above random masks")
    fig.legend(loc="outside right upper", frameon=False, fontsize=8)
    plots.save(fig, file)


def main(cfg: Config) -> None:
    file = Path(cfg.comparisons)
    points = []
    drawn = {"accuracy": {}, "macro F1": {}}
    # A field that is missing or wrong is said with the file's name.
    with error_context(file):
        for table in runs.read_toml(file, "comparisons")["table"]:
            print(f"\n{table['name']}\n\n{HEAD}")
            for row in table["row"]:
                plays = plays_of(row, file.parent)
                found = compared(row, plays, row.get("metric", "accuracy"))
                macro_f1 = compared(row, plays, "macro_f1") if "macro_f1" in plays else None
                print(table_line(row["what"], found, macro_f1))
                if "drawn" in row:
                    drawn["accuracy"][row["drawn"]] = found
                    drawn["macro F1"][row["drawn"]] = macro_f1
                if "text" in row:
                    points.append({"task": row["task"], "text": row["text"]} | found.to_dict())
    folder = Path(cfg.pictures)
    draw(pd.DataFrame(points), folder / "gain.png")
    panels = {metric: pd.DataFrame(rows).T for metric, rows in drawn.items()}
    report.forest(panels, "ChemProt, 12 tasks of 200 texts, 5 epochs", folder / "masks.png")

    toy_rows = pd.DataFrame(rows_of(file.parent / "toy.jsonl", "toy"))
    print(f"\nWhat masks are worth in the toy world\n\n{toy_table(toy_rows)}")
    toy_compare.draw(toy_rows, folder / "toy.png")
    print(f"\nWhat policies foretell\n\n{foretold_table(file.parent)}")
    print(f"\npictures: {folder}")


if __name__ == "__main__":
    runs.start(main, Config)
