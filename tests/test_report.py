"""report.py: each statistic against scipy, a loop or by hand; tables of made-up results with a known answer;
the script as a user runs it."""
import itertools
import json
import re
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, SHARED, needs_shared, refused, succeed
from scipy import stats

import report
from nmg import plays
from support import plots, runs


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def add(folder, masker="random", seed=0, score=75.0, dataset="reviews", lm="minilm", config=None,
        pretraining=None, policy=None, **changed):
    """Appends a line of results; score: accuracy, or (EM, F1)."""
    before = {"lm": lm, "masker": masker, "seed": seed, "policy": policy}
    if masker != "none":
        before |= {"p": 0.15, "epochs": 1, "masker_file": None}
    line = {"dataset": dataset, "lm": lm, "masker": masker, "seed": seed, "split": "test",
            "seconds": {"pretrain": None if masker == "none" else 1800.0, "train": 1200.0, "score": 600},
            "config": {"lm": f"runs/{masker}-{seed}", "lr": 2e-4, "epochs": 3, "data": "abc", "seed": seed,
                       "pretraining": before | (pretraining or {})} | (config or {}),
            "versions": {}}
    if isinstance(score, tuple):
        line |= {"metrics": ["em", "f1"], "em": score[0], "f1": score[1]}
    else:
        line |= {"metrics": ["accuracy", "macro_f1"], "accuracy": score, "macro_f1": score / 2}
    folder.mkdir(exist_ok=True)
    with open(folder / "results.jsonl", "a") as f:
        f.write(json.dumps(line | changed) + "\n")


def read(folder, split="test", files=("results.jsonl",)):
    return report.read([str(folder / file) for file in files], split)


def compare(lines, metric="accuracy", primary=None):
    return report.compare(report.scores_of(lines, metric), primary)


def table_of(folder, metric="accuracy"):
    """{row: {column: cell}} of the only table of this metric."""
    lines = read(folder)
    assert len(lines.groupby(["dataset", "lm"])) == 1
    return report.score_table(lines, metric, compare(lines, metric)).to_dict("index")


def notes_of(folder, split="test"):
    """Without the first, which names the settings that all rows share."""
    return report.notes(read(folder, split), None)[1:]


# ---------------------------------------------------------------- statistics

@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_sign_flips_are_those_of_a_loop(n, rng):
    for d in (rng.normal(0.5, 1, n), rng.integers(-2, 3, n).astype(float)):
        far = 0
        for signs in itertools.product((1, -1), repeat=n):
            far += abs(np.dot(signs, d)) >= abs(d.sum()) - 1e-9
        assert report.sign_flips(d) == pytest.approx(far / 2**n)


def test_rounding_breaks_no_tie(rng):
    for x in rng.integers(-5, 6, (100, 5)):
        assert report.sign_flips(x / 10) == report.sign_flips(x.astype(float))


def test_beyond_16_seeds_flips_are_drawn(rng):
    d = rng.normal(0.4, 1, 18)
    assert report.sign_flips(d) == report.sign_flips(d)
    assert report.sign_flips(d) == pytest.approx(stats.ttest_1samp(d, 0).pvalue, abs=0.02)


def test_the_interval_is_that_of_scipys_t_test(rng):
    scores = pd.DataFrame(rng.normal(1, 2, (4, 6)), ["random", "a", "b", "c"])
    found = report.compare(scores)
    low, high = stats.ttest_rel(scores[1:], scores[:1], axis=1).confidence_interval(0.95)
    np.testing.assert_allclose(found["low"], low)
    np.testing.assert_allclose(found["high"], high)


def test_holm_is_that_of_the_textbook_loop(rng):
    for p in rng.random((20, 5)) ** 3:
        found, largest = report.holm(pd.Series(p)), 0
        for step, i in enumerate(np.argsort(p)):
            largest = max(largest, (5 - step) * p[i])
            assert found[i] == pytest.approx(min(1, largest))


# ---------------------------------------------------------------- tables

MASKERS = {"none": -2, "random": 0, "whole": 1, "span": 3, "entity": 0, "punct": -1, "nmg:runs/policy": 2}


@pytest.fixture
def study(tmp_path):
    """Seven rows, nine seeds, with the differences to random of MASKERS and a noise of half a point."""
    for i, (masker, points) in enumerate(MASKERS.items()):
        row = masker.replace("nmg:runs/policy", "nmg-paper")
        for seed in range(9):
            score = 70 + 3 * np.sin(seed) + points + np.random.default_rng([seed, i]).normal(0, 0.5)
            add(tmp_path, masker, seed, score, "chemprot", "lms/bert-base-uncased", row=row)
    return tmp_path


def test_known_differences_are_found(study):
    found = table_of(study)
    assert list(found) == list(report.PAPER.columns[:7])
    lines = runs.read_rows(study / "results.jsonl")
    for (masker, points), (row, cells) in zip(MASKERS.items(), found.items(), strict=True):
        each = [line["accuracy"] for line in lines if line["masker"] == masker]
        assert cells["accuracy"] == f"{np.mean(each):.2f} ±{np.std(each, ddof=1):.2f}"
        assert cells["hours"] == ("0.500" if row == "none" else "1.000")
        if row != "random":
            low, high = map(float, cells["95 % interval"].split(" to "))
            assert low <= points <= high < low + 2
    # 2 / 2^9 times the six rows
    assert found["span"]["p"] == "0.023"
    assert found["whole"]["paper"] == "80.18 ±1.20"
    assert "paper" not in next(iter(table_of(study, "macro_f1").values()))


def test_detectable_is_what_a_paired_t_test_finds(study):
    sem = stats.sem(report.differences(report.scores_of(read(study), "accuracy")).loc["nmg-paper"])
    # One test for each row but random.
    threshold = stats.t.ppf(1 - 0.05 / 2 / (len(MASKERS) - 1), 8)
    expected = (threshold + stats.t.ppf(0.8, 8)) * sem
    assert float(table_of(study)["nmg-paper"]["detectable"]) == pytest.approx(expected, abs=0.005)
    power = 1 - stats.nct.cdf(threshold, 8, expected / sem)
    assert power == pytest.approx(0.8, abs=0.03)


def test_missing_seeds_are_counted_and_never_averaged_over(tmp_path):
    for seed, score in ((0, 50), (1, 50), (2, 80)):
        add(tmp_path, "random", seed, score)
        add(tmp_path, "whole", seed, score + 5)
    add(tmp_path, "span", 2, 90)
    add(tmp_path, "punct", 7, 90)
    found = table_of(tmp_path)
    assert found["random"]["seeds"] == "3 of 4"
    # The difference is to seed 2 of Random, not to the mean of its three.
    assert found["span"] == found["span"] | {"accuracy": "90.00", "seeds": "1 of 4", "p": "-",
                                             "minus random": "+10.00",
                                             "95 % interval": "one seed: no evidence"}
    assert (found["whole"]["p"], found["whole"]["detectable"]) == ("too few seeds", "-")
    assert (found["punct"]["minus random"], found["punct"]["seeds"]) == ("-", "1 of 4, 0 with random")
    # Of one seed, or without random, nothing is concluded.
    for masker in ("whole", "random"):
        add(tmp_path / "one", masker, 0, 90.0)
        assert table_of(tmp_path / "one")["whole"]["minus random"] == ("-" if masker == "whole" else "+0.00")
        assert concluded(tmp_path / "one") == ""
    succeed("report.py", cwd=tmp_path / "one")


def test_a_row_is_called_as_in_run_all(tmp_path):
    """By its masker where it has no other name. Two policies of one seed are compared, as
    `MASKERS="sampled:A sampled:B"` asks for; that of one seed and the two of another are one row, nmg."""
    names = {"nmg": "nmg:a", "nmg-alone": "nmg:b", None: "dir/my.py:rare", "sampled:a/b": "sampled:a/b",
             "random": "random", "nmg-paper": "nmg:d",
             # With flags of its own it is another row.
             "random,--p=0.3": "random", "nmg,--epochs=2": "nmg:e"}
    for row, masker in names.items():
        add(tmp_path, masker, 0, (40.0, 60.0), "newsqa", "distilbert-base-uncased", row=row)
    found = table_of(tmp_path, "em")
    assert list(found) == ["random", "nmg-paper", "nmg-alone", "nmg", "sampled", "dir/my.py:rare",
                           "random,--p=0.3", "nmg,--epochs=2"]
    # The paper's NMG is that of its own form.
    assert [found[row]["paper"] for row in ("nmg-paper", "nmg-alone", "nmg")] == [
        "48.75 ±.08", "48.64 ±.27", "-"]
    assert (found["nmg"]["em"], table_of(tmp_path, "f1")["nmg"]["f1"]) == ("40.00", "60.00")
    for seed in range(2):
        for folder in ("A/policy", "B/policy"):
            add(tmp_path / "two", f"sampled:{folder}", seed, row=f"sampled:{folder}")
        add(tmp_path / "two", "nmg:0" if seed == 0 else "nmg:1,2", seed)
    assert set(table_of(tmp_path / "two")) == {"nmg", "sampled:A/policy", "sampled:B/policy"}


# The last: a folder that is called like a data set of the paper.
@pytest.mark.parametrize("changed", [
    {"lm": "org/bert-base-cased"}, {"split": "dev"}, {"dataset": ".../chemprot"}])
def test_figures_of_the_paper_stand_beside_its_own_data_and_lms_alone(changed, tmp_path):
    add(tmp_path, **{"dataset": "chemprot", "lm": "org/bert-base-uncased"} | changed)
    lines = read(tmp_path, None)
    assert "paper" not in report.score_table(lines, "accuracy", compare(lines))


@needs_shared
def test_the_papers_figures():
    text = (SHARED / "design/PAPER.md").read_text()
    theirs = Counter(re.findall(r"\d+\.\d+±\d*\.\d+", text[text.index("## Tables"):]))
    theirs.subtract(report.PAPER.stack().dropna())
    # NMG's row, again in table 3
    assert +theirs == Counter(["48.75±.08", "63.55±.14"])
    assert not -theirs


# ---------------------------------------------------------------- what must not be compared silently

def test_a_metric_that_only_some_lines_have(tmp_path):
    """As after a fork has added one: it has a table, whichever line comes first."""
    add(tmp_path, "random")
    add(tmp_path, "whole", metrics=["accuracy", "mcc"], mcc=12.0)
    made = succeed("report.py", cwd=tmp_path)
    for metric in ("accuracy", "macro_f1", "mcc"):
        assert f"| reviews, minilm | {metric} |" in made.stdout
    assert "| whole | 12.00 |" in made.stdout


@pytest.mark.parametrize(("lines", "said"), [
    ([{"seed": "0", "seconds": None}], "seed, seconds missing"),
    ([{"accuracy": np.nan}], "accuracy missing"),
    ([{"metrics": []}], "metrics missing"),
    ([{"masker": "none", "row": "whole"}], "the row whole has the masker none"),
    ([{"score": 50.0}, {"score": 60.0}],
     "both nmg on reviews with seed 0, but differ in accuracy, macro_f1;"),
    ([{}, {"config": {"lr": 1e-3}, "pretraining": {"p": 0.3}}], "but differ in lr, pretraining.p;"),
    # The code of a masker, or a policy, is a setting like any other.
    ([{}, {"pretraining": {"masker_file": "b"}}], "but differ in pretraining.masker_file;"),
])
def test_lines_that_are_refused(lines, said, tmp_path):
    for line in lines:
        add(tmp_path, **{"masker": "nmg:a"} | line)
    with pytest.raises(runs.UserError, match=said):
        read(tmp_path)


def test_the_same_may_be_said_again_of_another_folder(tmp_path):
    add(tmp_path, "whole")
    add(tmp_path, "whole", config={"lm": "elsewhere/whole-0", "out": "elsewhere"})
    assert len(read(tmp_path)) == 1


@pytest.mark.parametrize(("one", "other", "names"), [
    (("A/ckpt", "aa"), ("B/ckpt", "bb"), ["A/ckpt", "B/ckpt"]),
    # A folder, and an LM of the hub that is called like it.
    (("lms/bert", "aa"), ("bert", None), ["bert", "lms/bert"]),
    # The same LM elsewhere.
    (("A/ckpt", "aa"), ("B/ckpt", "aa"), ["ckpt"]),
    # The same weights with another config.json.
    (("A/ckpt", "123456789-aa"), ("A/ckpt", "123456789-bb"), ["ckpt (1234567-aa)", "ckpt (1234567-bb)"])])
def test_lms_whose_paths_end_alike_have_tables_of_their_own(one, other, names, tmp_path):
    """Else their difference would be a gain of the masker. Plays of tools have the LM among their flags."""
    for masker, (lm, weights) in (("random", one), ("whole", other)):
        add(tmp_path / "runs", masker, lm=lm, pretraining={"weights": weights})
        add(tmp_path / "plays", masker, lm=lm, config={"pretraining": None, "weights": weights})
    for folder in ("runs", "plays"):
        assert sorted(set(read(tmp_path / folder)["lm"])) == names


def test_data_sets_whose_paths_end_alike_have_tables_of_their_own(tmp_path):
    add(tmp_path, "random", dataset="x/data", config={"data": "aa"})
    add(tmp_path, "whole", dataset="y/data", config={"data": "bb"})
    # Moved, and edited, so that scores are on other texts.
    add(tmp_path, "span", dataset="z/data", config={"data": "aa"})
    add(tmp_path, "none", dataset="x/data", config={"data": "cc"})
    lines = read(tmp_path)
    assert {name: set(rows["row"]) for name, rows in lines.groupby("dataset")} == {
        "x/data (aa)": {"random", "span"}, "x/data (cc)": {"none"}, "y/data": {"whole"}}
    # With the tokenizer of another LM the same data have another checksum.
    for lm, checksum in (("bert", "aa"), ("roberta", "bb")):
        add(tmp_path / "lms", lm=lm, dataset="my.csv", config={"data": checksum})
    assert set(read(tmp_path / "lms")["dataset"]) == {"my.csv"}


def test_the_papers_layout(tmp_path):
    """A table for each kind of task; of each data set and LM the best is bold, the second best underlined."""
    for seed in (0, 1):
        for masker, (em, f1) in {"none": (80, 90), "random": (81, 89), "my|f": (79, 90)}.items():
            add(tmp_path, masker, seed, (em + seed, f1), "squad", "bert", {"data": "a"})
        add(tmp_path, "none", seed, (70.0, 80.0), "newsqa", "distil", {"data": "b"})
        add(tmp_path, "whole", seed, 75.0, "chemprot", "bert", {"data": "c"})
    page = succeed("report.py", "--paper", cwd=tmp_path).stdout
    _, _, table, *_ = page.partition("## em / f1, as the paper prints it")[2].split("\n\n")
    assert table.splitlines() == [
        "|   | squad | newsqa |",
        "| --- | --- | --- |",
        "| *bert* |   |   |",
        "| No PT | <u>80.50±.71</u> / **90.00±.00** | - |",
        "| Random | **81.50±.71** / <u>89.00±.00</u> | - |",
        "| my\\|f | 79.50±.71 / **90.00±.00** | - |",
        "| *distil* |   |   |",
        "| No PT | - | **70.00±.00** / **80.00±.00** |"]
    assert "|   | chemprot |\n" in page


def test_settings_that_differ_are_named_with_their_rows(tmp_path):
    """Also where only the seeds of one row differ; so is an edit of the code. Policies may have own seeds."""
    for seed in range(2):
        add(tmp_path, "none", seed)
        add(tmp_path, "random", seed, config={"labelled": None}, versions={"commit": "1a"})
        add(tmp_path, "my.py:rare", seed, pretraining={"masker_file": "a"})
    assert notes_of(tmp_path) == []
    add(tmp_path / "edited", "my.py:rare", 0, pretraining={"masker_file": "a"})
    add(tmp_path / "edited", "my.py:rare", 1, pretraining={"masker_file": "b"})
    assert notes_of(tmp_path / "edited") == [
        "- The file of my.py:rare was edited between its seeds: they are of different maskers."]
    add(tmp_path, "nmg:a", 0, pretraining={"p": 0.05}, policy={"seed": 0, "paper": True})
    add(tmp_path, "nmg:b", 1, pretraining={"p": 0.05}, policy={"seed": 1, "paper": False})
    # With the commit where tools/study.py writes it.
    add(tmp_path, "whole", 0, config={"lr": 1e-3, "labelled": 100}, commit="1a-edited-2b")
    add(tmp_path, "whole", 1)
    assert notes_of(tmp_path) == [
        "- lr differs: 0.0002 (none, random, whole, nmg, my.py:rare), 0.001 (whole).",
        "- labelled differs: 100 (whole), None (random).",
        "- pretraining.p differs: 0.05 (nmg), 0.15 (random, whole, my.py:rare).",
        "- pretraining.policy.paper differs: False (nmg), True (nmg).",
        "- The code was edited between these lines (commits 1a, 1a-edited-2b)."]


def test_splits_and_several_files(tmp_path, capsys):
    add(tmp_path / "a", "random", 0, 50.0)
    add(tmp_path / "b", "random", 1, 70.0)
    # Flags are chosen on dev, where one row and seed may have many lines.
    for lr in (1e-3, 1e-4):
        add(tmp_path / "b", "whole", 0, 90.0, split="dev", config={"lr": lr})
    both = ("a/results.jsonl", "b/results.jsonl")
    scores = report.scores_of(read(tmp_path, files=both), "accuracy")
    assert scores.loc["random"].to_dict() == {0: 50.0, 1: 70.0} and list(scores.index) == ["random"]
    with pytest.raises(runs.UserError, match="but differ in lr;"):
        read(tmp_path, split="dev", files=both)
    # Unless a split is asked for, dev is shown of those data sets that have nothing of test.
    add(tmp_path / "a", "punct", 0, dataset="my.csv", split="dev", config={"data": "mine"})
    capsys.readouterr()
    assert sorted(read(tmp_path, split=None, files=both)["row"]) == ["punct", "random", "random"]
    assert "lines of reviews that are not in these tables: 2, of dev" in capsys.readouterr().out


def test_seeds_that_share_a_pretraining_or_a_policy_claim_nothing(tmp_path):
    """Policies are told apart by their weights, wherever they lie; in lines without these, by their folders.
    Of a single policy, which is compared under its own name, something is claimed."""
    for seed in range(10):
        add(tmp_path, "random", seed, 70.0 + seed % 3, config={"weights": f"r{seed}"})
        add(tmp_path, "whole", seed, 75.0 + seed % 2, config={"weights": "one"})
        add(tmp_path, "span", seed, 75.0 + seed % 2, config={"weights": f"s{seed % 2}"})
        add(tmp_path, "punct", seed, 75.0 + seed % 2, config={"weights": f"p{seed}"})
        # Without pre-training there is nothing to share.
        add(tmp_path, "none", seed, 65.0 + seed % 2, config={"weights": "base"})
        for row, masker, file in (("nmg", f"nmg:a/{seed % 3}", None), ("ten", f"sampled:{seed}", f"f{seed}"),
                                  ("three", f"sampled:{seed}", f"f{seed % 3}"),
                                  ("sampled", "sampled:a/b", None), (None, "sampled:a/b", None)):
            add(tmp_path, masker, seed, 75.0, row=row, pretraining={"masker_file": file}, policy={})
    # pre-trainings, policies, and whether p is withheld
    expected = {"none": ("-", "-", False), "random": ("10", "-", False), "whole": ("1", "-", True),
                "span": ("2", "-", True), "punct": ("10", "-", False), "nmg": ("10", "3", True),
                "ten": ("10", "10", False), "three": ("10", "3", True), "sampled": ("10", "1", True),
                "sampled:a/b": ("10", "1", False)}
    cells = {row: (found["pre-trainings"], found["policies"], found["p"] == "withheld")
             for row, found in table_of(tmp_path).items()}
    assert cells == expected
    said = concluded(tmp_path)
    assert "none is behind random" in said
    for row in expected.keys() - {"none", "random"}:
        assert (f"{row} beats random" in said) == (not expected[row][2]), row
    # If those of random do, no difference counts.
    file = tmp_path / "results.jsonl"
    file.write_text(file.read_text().replace('"weights": "r9"', '"weights": "r8"'))
    assert "random:" not in concluded(tmp_path)
    assert "nothing is claimed of none, whole, span, punct, " in concluded(tmp_path)


def test_how_a_policy_was_learned_is_said_where_it_is_used_otherwise(tmp_path):
    add(tmp_path, "random", 0)
    same = {"data": "abc", "weights": "w", "lm": "minilm", "dataset": "reviews"}
    for row, policy in {"a": same, "b": same | {"data": "z", "dataset": "other"},
                        "c": same | {"weights": "v", "lm": "big"}, "d": {}}.items():
        add(tmp_path, f"nmg:{row}", 0, row=row, pretraining={"weights": "w"}, policy=policy)
    assert [note for note in notes_of(tmp_path) if "The policy" in note] == [
        "- The policy of b was learned from other data, or prepared in another way (other).",
        "- The policy of c was learned with another LM (big)."]
    # Plays of tools are scored on a part of train, whose labels a policy may have read.
    add(tmp_path / "plays", "nmg:a", split="val", config={"pretraining": None, "weights": "w"})
    line, = runs.read_rows(tmp_path / "plays/results.jsonl")
    runs.write_rows(tmp_path / "plays/results.jsonl", [line | {"policy": same}])
    said = "- The policy of nmg was learned from the labels of the very texts that are scored."
    assert said in notes_of(tmp_path / "plays", "val")


def test_names_are_text_in_markdown(tmp_path):
    """In tables, titles and sentences; and in pictures a dollar begins no formula."""
    assert report.escaped("a|b*c*_d_`e`<i>$x$[f](g)") == r"a\|b\*c\*\_d\_\`e\`\<i\>\$x\$\[f\](g)"
    for name in ("macro_f1", "random,--p=0.05,--epochs=3", "sampled:a/b-c.d"):
        assert report.escaped(name) == name
    for seed in range(2):
        add(tmp_path, "random", seed, 70.0, dataset="us$_$.csv", lm="$\\frac{$")
        add(tmp_path, "a|b$_$.py:f", seed, 71.0 + seed, dataset="us$_$.csv", lm="$\\frac{$")
    result = succeed("report.py", cwd=tmp_path)
    for said in (r"## us\$\_\$.csv, \$\\frac\{\$", r"| a\|b\$\_\$.py:f | ", r"of a\|b\$\_\$.py:f: fewer"):
        assert said in result.stdout
    assert [file.name for file in tmp_path.glob("report/*.png")] == ["forest-us-_-.csv--frac-.png"]


# ---------------------------------------------------------------- plots

@pytest.fixture
def shown(monkeypatch):
    """The figures that would have been saved."""
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, file: figures.append(figure))
    return figures


def lines_of(ax):
    return {line.get_label(): list(line.get_ydata()) for line in ax.lines}


def test_learning_curves(tmp_path, shown):
    """Random plays all episodes but the second: lost and won are counted in those; a tie is no loss."""
    records = []
    for i, scores in enumerate([(0.6, 0.4), (0.1, 0.9), (0.3, 0.5), (0.4, 0.2)]):
        record = {"episode": i + 1}
        if i != 1:
            record |= {"random_score": 0.5, "random_entropy": 2.0}
        for name, score in zip(("learner", "opponent"), scores, strict=True):
            record |= {f"{name}_score": score, f"{name}_entropy": i + 0.1, f"{name}_policy_loss": i + 0.2,
                       f"{name}_value_loss": i + 0.3}
        records.append(record)
    plots.curves(records, tmp_path / "c.png")
    regret, scores, entropy, loss = map(lines_of, shown[0].axes)
    assert regret == {"worst case": [1, 2, 3], "learner": [0, 1, 2], "opponent": [1, 1, 2]}
    assert {tuple(line.get_xdata()) for line in shown[0].axes[0].lines} == {(1, 3, 4)}
    assert scores["random"] == [0.5] * 3 and scores["learner"] == [0.6, 0.1, 0.3, 0.4]
    assert entropy["random"] == [2, 2, 2] and entropy["learner"] == [0.1, 1.1, 2.1, 3.1]
    assert loss["opponent"] == pytest.approx([0.5, 2.5, 4.5, 6.5])
    assert plays.won_lost(records) == "won 1, lost 2, tied 0 against random"
    assert not any(map(plays.is_tied, records))
    assert plays.is_tied({"random_score": 0.5, "learner_score": 0.5, "seconds": 3.0})
    # The linear policy has no losses. Without self-play there is no opponent.
    record = {"random_score": 0.5, "random_entropy": 2.0, "learner_score": 0.5, "learner_entropy": 1.0}
    plots.curves([record | {"episode": i} for i in (1, 2, 3)], tmp_path / "c.png")
    assert list(lines_of(shown[1].axes[0])) == ["worst case", "learner"] and len(shown[1].axes) == 3


def test_forest(study, shown):
    lines = read(study)
    lines = lines[(lines["row"] != "punct") | (lines["seed"] != 8)]
    # One seed is no evidence: no interval
    lines = lines[(lines["row"] != "entity") | (lines["seed"] == 0)]
    compared = {metric: compare(lines, metric) for metric in ("accuracy", "macro_f1")}
    report.forest(compared, "title", study / "forest.png")
    shown[0].canvas.draw()
    names = [label.get_text() for label in shown[0].axes[0].get_yticklabels()]
    assert names == ["none", "whole", "span", "punct", "nmg-paper"]
    for ax, metric in zip(shown[0].axes, compared, strict=True):
        assert ax.get_xlabel() == f"{metric}, points above random"
        bars = ax.containers[0].lines[2][0].get_segments()
        for name, ((low, y), (high, _)) in zip(names, bars, strict=True):
            assert (low, high) == pytest.approx(tuple(compared[metric].loc[name, ["low", "high"]]))
            assert names[round(y)] == name


# ---------------------------------------------------------------- what may be concluded

def concluded(folder):
    lines = read(folder)
    return report.conclusion(compare(lines), "accuracy", report.sharing(lines))


def test_one_sentence_says_what_may_be_concluded(tmp_path):
    """Ten seeds: one masker is better on all, one worse on all, one scatters; three seeds: too few."""
    scatter = np.array([-3.0, 3, -2, 2, -1, 1, -3, 3, 1, -1])
    for seed in range(10):
        add(tmp_path, "random", seed, 70.0)
        add(tmp_path, "tfidf", seed, 71.0 + seed / 10)
        add(tmp_path, "punct", seed, 68.0 - seed / 10)
        add(tmp_path, "whole", seed, 70.0 + scatter[seed])
    half = stats.t.ppf(0.975, 9) * np.std(np.arange(10) / 10, ddof=1) / np.sqrt(10)
    least = (stats.t.ppf(1 - 0.05 / 2 / 3, 9) + stats.t.ppf(0.8, 9)) * scatter.std(ddof=1) / np.sqrt(10)
    said = concluded(tmp_path)
    assert f"tfidf beats random: +1.4 points (+{1.45 - half:.1f} to +{1.45 + half:.1f})" in said
    assert f"punct is behind random: -2.5 points (-{2.45 + half:.1f} to -{2.45 - half:.1f})" in said
    assert f"not shown to differ from random: whole (10 seeds would detect {least:.1f} points)" in said
    assert "too few" not in said
    for seed in range(3):
        add(tmp_path, "span", seed, 99.0)
    assert "too few seeds to say anything of span: fewer than 8 can show nothing" in concluded(tmp_path)


def test_a_comparison_that_was_fixed_in_advance(tmp_path, rng):
    """It is not corrected, and neither are the others for it."""
    for seed in range(7):
        add(tmp_path, "random", seed, 70.0)
        for masker, mean in (("tfidf", 4), ("punct", 1), ("whole", 1)):
            add(tmp_path, masker, seed, 70.0 + rng.normal(mean, 1))
    lines = read(tmp_path)
    p = report.differences(report.scores_of(lines, "accuracy")).agg(report.sign_flips, axis=1)
    tested = compare(lines, primary="tfidf")
    low, high = sorted(("whole", "punct"), key=p.get)
    assert dict(tested["p"]) == pytest.approx(
        {"tfidf": p["tfidf"], low: 2 * p[low], high: max(2 * p[low], p[high])})
    assert dict(tested["tests"]) == {"tfidf": 1, low: 2, high: 2}
    assert list(compare(lines)["tests"]) == [3] * 3
    # Else the primary comparison would be corrected in silence.
    refused("--primary=tdidf: no such row", "report.py", "--primary=tdidf", cwd=tmp_path)


def test_planned_seeds_find_the_difference(tmp_path, rng):
    """In simulation: with the scatter that was seen, 80 of 100 such studies find it, by scipy's t test."""
    scatter = np.array([-1.0, 1.5, -0.5, 0.7, -0.9, 0.2, 1.1, -1.1])
    for seed in range(8):
        add(tmp_path, "random", seed, 70.0)
        add(tmp_path, "whole", seed, 70.0 + scatter[seed])
    compared = compare(read(tmp_path)).loc["whole"]
    n = int(report.seeds_needed(compared, 0.5))
    drawn = rng.normal(0.5, scatter.std(ddof=1), (4000, n))
    found = stats.ttest_1samp(drawn, 0, axis=1).pvalue < 0.05
    assert 0.77 < found.mean() < 0.85
    # Without scatter: what a sign-flip test of one row needs at least.
    compared["sd"] = 0.0
    assert report.seeds_needed(compared, 0.5) == "6"


def test_the_committed_report_is_made_from_the_committed_results(tmp_path):
    flags = ["--results=results/study-chemprot-1000.jsonl", "--plan=0.5", "--primary=sampled"]
    succeed("report.py", *flags, f"--out={tmp_path}", cwd=ROOT)
    here = (ROOT / "docs/results.md").read_text().splitlines()
    now = (tmp_path / "results.md").read_text().splitlines()
    # The first line names --out, which is not docs, as that would write over what is written by hand.
    assert here[0] == f"Made by `python report.py {' '.join(flags)} --out=runs/report`."
    # And below it stands what is written by hand.
    assert here[1:len(now)] == now[1:] and here[len(now) + 1].startswith("## What would it cost")
