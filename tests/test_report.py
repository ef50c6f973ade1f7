"""report.py: each statistic against SciPy or a loop, tables of made-up results with a known answer, and the script as a user runs it."""
import itertools
import json
import math
import re
from collections import Counter

import numpy as np
import pytest
from conftest import SHARED, needs_shared, run
from matplotlib.figure import Figure
from scipy import stats

import report
import train_nmg
from loop import UserError
from report import detectable, interval, sign_flips, sign_test, t_quantile

MASKERS = {"none": -2, "random": 0, "whole": 1, "span": 3, "entity": 0, "punct": -1, "nmg:runs/policy": 2}      # points to Random


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def add(folder, masker="random", seed=0, scores=None, dataset="reviews", lm="minilm", config=None, pretraining=None, policy=None, **changed):
    """Appends a line of results and writes the scores of its examples, (N, 1) or (N, 2)."""
    scores = np.asarray([[1], [0], [1], [1]] if scores is None else scores, np.float32)
    mean, apart = 100 * scores.astype(float).mean(0), masker == "none"
    folder.mkdir(exist_ok=True)
    name = f"{len(list(folder.glob('*.npy')))}.npy"
    np.save(folder / name, scores)
    before = {"base": lm, "masker": masker, "seed": seed, "policy": policy, "seconds": None if apart else 1800.0, "loss": 2 + float(mean[0])}
    before |= {"p": None if apart else 0.15, "epochs": None if apart else 1} | (pretraining or {})
    line = {"dataset": dataset, "lm": lm, "masker": masker, "seed": seed, "split": "test", "train_seconds": 1200.0, "score_seconds": 600,
            "examples": name, "versions": {"device": "cpu"},
            "config": {"lm": f"runs/{masker}-{seed}", "lr": 2e-4, "epochs": 3, "data": "abc", "seed": seed, "pretraining": before} | (config or {})}
    line |= {"em": mean[0], "f1": mean[1]} if len(mean) == 2 else {"accuracy": mean[0], "micro_f1": mean[0], "macro_f1": mean[0] / 2}
    with open(folder / "results.jsonl", "a") as f:
        f.write(json.dumps(line | changed) + "\n")


def right(share, n=400):
    """Scores (n, 1) of which `share` are right: the same examples are right again for a larger share."""
    return (np.arange(n) < round(share * n)).astype(float)[:, None]


def parts_of(folder, split="test", files=("results.jsonl",)):
    groups = report.grouped(report.read([str(folder / f) for f in files], split))
    return [part for (dataset, lm), rows in groups.items() for part in report.report(dataset, lm, rows, folder / "report")]


def table(parts, title):
    """{row: {column: cell}} of the table with this title; cells of the same column get a star."""
    (_, _, header, body), = (part for part in parts if part[:2] == ("table", title))
    header = [column + "*" * header[:i].count(column) for i, column in enumerate(header)]
    return {line[0]: dict(zip(header[1:], line[1:], strict=True)) for line in body}


def notes(parts):
    return [note for kind, *what in parts if kind == "notes" for note in what[0]]


def refused(folder, **how):
    with pytest.raises(UserError) as error:
        parts_of(folder, **how)
    return str(error.value)


# ---------------------------------------------------------------- statistics

@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 6, 9, 30, 101])
@pytest.mark.parametrize("p", [0.5, 0.8, 0.975, 0.9995])
def test_t_quantiles_are_scipys(df, p):
    assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_sign_flips_are_scipys_permutation_test(n, rng):
    for each in (rng.normal(0.5, 1, n), rng.integers(-2, 3, n).astype(float)):
        theirs = stats.permutation_test((each, np.zeros(n)), lambda a, b: np.mean(a - b), permutation_type="samples", n_resamples=np.inf).pvalue
        naive = np.mean([abs(np.dot(signs, each)) >= abs(each.sum()) - 1e-9 for signs in itertools.product((1, -1), repeat=n)])
        assert sign_flips(each) == pytest.approx(naive) == pytest.approx(theirs)


def test_sign_flips_by_hand(rng):
    assert sign_flips(np.array([1.0, 2.0, 3.0])) == 0.25                    # three seeds, all on one side: as small as it gets
    assert sign_flips(np.array([0.1, 0.2, -0.3])) == 1
    assert all(sign_flips(x / 10) == sign_flips(x) for x in rng.integers(-5, 6, (200, 5)))      # rounding breaks no tie
    assert math.isnan(sign_flips(np.array([5.0]))) and math.isnan(sign_flips(np.ones(21)))


@pytest.mark.parametrize(("n", "up", "down"), [(10, 3, 1), (50, 20, 20), (9, 0, 9), (3000, 700, 600), (25000, 6000, 5700), (5, 0, 0)])
def test_the_sign_test_is_scipys_binomial_test(n, up, down, rng):
    d = rng.permutation(np.concatenate((np.full(up, 0.4), np.full(down, -1.0), np.zeros(n - up - down))))
    theirs = stats.binomtest(up, up + down).pvalue if up + down else 1.0
    assert sign_test(d) == pytest.approx(theirs, rel=1e-9)


def test_seeds_that_cancel_are_no_difference():
    f1 = np.array([[0.7], [0.1], [-0.2], [-0.6]]) / 3
    assert sign_test(np.tile(f1, 20).mean(0)) == 1                          # 1e-17 is not a sign


def test_detectable_is_what_a_paired_t_test_finds():
    each = np.array([0.3, 1.9, 1.1, -0.4])
    sd, n = each.std(ddof=1), 4
    assert detectable(each) == pytest.approx((stats.t.ppf(0.975, 3) + stats.t.ppf(0.8, 3)) * sd / 2)
    power = 1 - stats.nct.cdf(stats.t.ppf(0.975, n - 1), n - 1, detectable(each) / sd * math.sqrt(n))
    assert power == pytest.approx(0.8, abs=0.06)
    assert math.isnan(detectable(each[:1]))


def test_one_seed_is_scipys_percentile_bootstrap(rng):
    d = rng.choice([-1.0, 0, 0, 0, 0.5, 1], (1, 300))
    theirs = stats.bootstrap((d[0],), np.mean, n_resamples=10_000, method="percentile", random_state=1).confidence_interval
    assert np.allclose(interval(d), theirs, atol=0.006)
    assert interval(d) == interval(d)                                       # the same every time


def test_seeds_are_scipys_bootstrap_stretched(rng):
    """Examples that all differ by the same leave the bootstrap over seeds alone."""
    each = rng.normal(1, 2, 8)
    theirs = stats.bootstrap((each,), np.mean, n_resamples=10_000, method="percentile", random_state=1).confidence_interval
    stretch = math.sqrt(8 / 7) * stats.t.ppf(0.975, 7) / stats.norm.ppf(0.975)
    ours = np.array(interval(np.tile(each[:, None], 50)))
    assert stretch > 1.25 and np.allclose(ours - each.mean(), (np.array(theirs) - each.mean()) * stretch, atol=0.1)


def test_the_interval_is_that_of_a_loop(rng):
    d = rng.normal(0, 3, (3, 40)) + rng.normal(0, 1, (3, 1)) + rng.normal(0, 3, 40)
    stretch, means = math.sqrt(3 / 2) * stats.t.ppf(0.975, 2) / stats.norm.ppf(0.975), []
    for _ in range(6000):
        seeds, examples = rng.integers(3, size=3), rng.integers(40, size=40)
        means.append(np.mean([d[:, i].mean() for i in examples]) + stretch * (np.mean([d[s].mean() for s in seeds]) - d.mean()))
    low, high = np.percentile(means, [2.5, 97.5])
    assert np.allclose(interval(d), (low, high), atol=(high - low) / 25)


def coverage(rng, seeds, seed, example, both, repeats=200, n=60):
    """How often the interval holds the truth (0), and how often an unstretched crossed bootstrap does; the arguments are standard deviations."""
    ours = plain = 0
    for _ in range(repeats):
        d = seed * rng.normal(size=(seeds, 1)) + example * rng.normal(size=n) + both * rng.normal(size=(seeds, n))
        low, high = interval(d, 500)
        ours += low <= 0 <= high
        weights = [rng.multinomial(k, [1 / k] * k, 500) / k for k in (seeds, n)]
        low, high = np.percentile((weights[0] @ d * weights[1]).sum(1), [2.5, 97.5])
        plain += low <= 0 <= high
    return ours / repeats, plain / repeats


def test_coverage_with_few_seeds(rng):
    """Where the seed is the noise a plain bootstrap of three seeds holds the truth three times in four only; ours is never far below 95 %."""
    ours, plain = coverage(rng, 3, 1, 0, 0.01)
    assert 0.91 < ours < 0.99 and plain < 0.82
    assert 0.91 < coverage(rng, 3, 0, 4, 0.1)[0] < 0.99                          # where the examples are
    assert coverage(rng, 3, 0.5, 4, 4)[0] > 0.94 and coverage(rng, 5, 0.5, 0.1, 4)[0] > 0.94


# ---------------------------------------------------------------- tables

@pytest.fixture
def study(tmp_path):
    """Seven rows, three seeds, with the differences to Random of MASKERS up to the noise of seeds and examples."""
    for masker, points in MASKERS.items():
        for seed in range(3):
            hard = np.random.default_rng(seed).random(2000)
            moved = hard + np.random.default_rng([seed, len(masker)]).normal(0, 0.02, 2000)
            policy = {"hours": 12.5, "episodes": 30, "self_play": True, "continual": True, "credit": "play"} if "nmg" in masker else None
            own = {"p": 0.05, "epochs": 3} if policy else None
            add(tmp_path / "r", masker, seed, (moved < 0.7 + points / 100)[:, None], "data/chemprot", "lms/bert-base-uncased", None, own, policy,
                train_seconds=36000 if seed == 2 else 1200)         # one run of a row was paused: the hours are those of the others
    return tmp_path / "r"


def test_known_differences_are_found(study):
    parts = parts_of(study)
    found = table(parts, "accuracy against Random")
    assert list(found) == ["No PT", "Whole-Random", "Span-Random", "Entity-Random", "Punct.-Random", "NMG"]
    for row, points in zip(found, (-2, 1, 3, 0, -1, 2), strict=True):
        low, high = map(float, found[row]["95 % interval"].split(" to "))
        assert low <= points <= high and abs(float(found[row]["difference"]) - points) < 1 and high - low < 6
    assert found["Span-Random"]["p (seeds)"] == "0.25" and found["Span-Random"]["p (examples)"] == "<0.001"
    assert "With 3 seeds no p (seeds) below 0.25 is possible." in notes(parts) and not any("Not the same" in note for note in notes(parts))
    assert (study / "report" / "forest-chemprot-bert-base-uncased.png").read_bytes().startswith(b"\x89PNG")


def test_scores_paper_hours_and_marks(study):
    parts = parts_of(study)
    found = table(parts, "scores")
    assert list(found) == report.ORDER[:7]
    lines = [json.loads(line) for line in open(study / "results.jsonl")]
    for masker, (row, cells) in zip(MASKERS, found.items(), strict=True):
        each = [line["accuracy"] for line in lines if line["masker"] == masker]
        mark = {"span": "best", "nmg:runs/policy": "second"}.get(masker, "")
        assert cells["accuracy"] == (f"{np.mean(each):.2f}", f"{np.std(each, ddof=1):.2f}".removeprefix("0"), mark)
        assert cells["seeds"] == "3" and cells["hours"] == ("0.500 CPU" if row == "No PT" else "1.000 CPU")
    assert found["Whole-Random"]["paper"] == ("80.18", "1.20", "") and found["NMG"]["paper"] == ("81.66", ".37", "")
    assert any("NMG 12.50 hours (30 episodes)" in note for note in notes(parts))
    text = report.markdown(parts)
    assert f"| **{found['Span-Random']['accuracy'][0]}**<sub>" in text and "| 80.18<sub>1.20</sub> |" in text
    assert rf"\textbf{{{found['Span-Random']['accuracy'][0]}}}$_{{" in report.latex(parts) and "80.18$_{1.20}$" in report.latex(parts)


def test_identical_rows_differ_by_nothing(tmp_path):
    for masker in ("random", "whole"):
        for seed in range(3):
            add(tmp_path, masker, seed, right(0.5 + seed / 10))
    found = table(parts_of(tmp_path), "accuracy against Random")["Whole-Random"]
    assert list(found.values()) == ["3", "+0.00", "+0.00 to +0.00", "1", "1", "0.00"]


def test_the_sides_are_not_exchanged(tmp_path):
    for seed in range(2):
        add(tmp_path, "random", seed, right(0.5))
        add(tmp_path, "whole", seed, right(0.75))
    assert table(parts_of(tmp_path), "accuracy against Random")["Whole-Random"]["difference"] == "+25.00"


def test_missing_seeds_are_shown_and_never_averaged_over(tmp_path):
    for seed, share in ((0, 0.5), (1, 0.5), (2, 0.8)):
        add(tmp_path, "random", seed, right(share))
        add(tmp_path, "whole", seed, right(share + 0.05))
    add(tmp_path, "span", 2, right(0.9))
    add(tmp_path, "punct", 7, right(0.9))
    parts = parts_of(tmp_path)
    scores, differences = table(parts, "scores"), table(parts, "accuracy against Random")
    assert scores["Span-Random"]["seeds"] == "1 of 4, lacks 0, 1, 7" and scores["Random"]["seeds"] == "3 of 4, lacks 7"
    assert all(row["accuracy"][2] == "" for row in scores.values()) and scores["Span-Random"]["accuracy"] == ("90.00", "", "")
    assert differences["Span-Random"]["difference"] == "+10.00"             # to seed 2 of Random, not to the mean of its three
    assert differences["Span-Random"]["95 % interval"].endswith("†") and differences["Span-Random"]["p (seeds)"] == "-"
    assert list(differences["Punct.-Random"].values()) == ["0", *"-----"]
    assert [note[:10] for note in notes(parts)] == ["With 3 see", "† One seed"]


def test_only_complete_rows_are_marked(tmp_path):
    for masker, share, seeds in (("random", 0.5, 3), ("whole", 0.7, 3), ("span", 0.6, 3), ("entity", 0.7, 2), ("punct", 0.9, 2)):
        for seed in range(seeds):
            add(tmp_path, masker, seed, right(share))
    marks = {row: cells["accuracy"][2] for row, cells in table(parts_of(tmp_path), "scores").items()}
    assert marks == {"Random": "", "Whole-Random": "best", "Span-Random": "second", "Entity-Random": "", "Punct.-Random": ""}


def test_one_seed_is_mcnemars_test(tmp_path, rng):
    random, whole = rng.random((200, 1)) < 0.6, rng.random((200, 1)) < 0.7
    add(tmp_path, "random", 0, random)
    add(tmp_path, "whole", 0, whole)
    found = table(parts_of(tmp_path), "accuracy against Random")["Whole-Random"]
    theirs = stats.binomtest(int((whole & ~random).sum()), int((whole != random).sum())).pvalue
    assert float(found["p (examples)"]) == pytest.approx(theirs, rel=0.005) and found["detectable"] == "-"


def test_question_answering_ablations_and_credit(tmp_path):
    forms = {"nmg:a": {}, "sampled:a": {}, "nmg:b": {"self_play": False}, "nmg:c": {"continual": False},
             "nmg:d": {"self_play": False, "continual": False}, "nmg:e": {"credit": "regression"}, "dir/my.py:rare": None, "random": None}
    for masker, policy in forms.items():
        for seed in range(2):
            add(tmp_path, masker, seed, np.stack([np.arange(50) < 20, np.linspace(0.2, 1, 50)], 1), "newsqa", "distilbert-base-uncased",
                policy=None if policy is None else {"self_play": True, "continual": True, "credit": "play"} | policy)
    parts = parts_of(tmp_path)
    scores, ablations = table(parts, "scores"), table(parts, "ablations, scores")
    assert list(scores) == ["Random", "NMG", "NMG, credit=regression", "NMG, sampled", "my.py:rare"]
    assert list(ablations) == ["NMG", "NMG, credit=regression", "NMG, sampled", "NMG without self-play", "NMG without continual adaptation",
                               "NMG without self-play and continual adaptation"]
    assert [ablations["NMG without self-play"][column] for column in ("paper", "paper*")] == [("48.64", ".27", ""), ("63.37", ".17", "")]
    assert scores["NMG, credit=regression"]["paper"] == "-"                 # not the paper's form
    assert scores["NMG"]["EM"][0] == "40.00" and scores["NMG"]["F1"][0] == "60.00"
    for metric in ("EM", "F1"):
        assert len(table(parts, f"{metric} against Random")) == 4 and len(table(parts, f"ablations, {metric} against Random")) == 6


def test_other_lms_have_no_figures_of_the_paper(tmp_path):
    add(tmp_path, "random", dataset="ChemProt", lm="minilm")
    add(tmp_path, "random", dataset="ChemProt", lm="org/bert-base-cased")
    groups = report.grouped(report.read([str(tmp_path / "results.jsonl")], "test"))
    headers = {lm: report.score_table("scores", dataset, lm, rows)[0][2] for (dataset, lm), rows in groups.items()}
    assert "paper" not in headers["minilm"] and "paper" in headers["bert-base-cased"]


def test_no_random_row(tmp_path):
    add(tmp_path, "whole")
    assert any("No row Random" in note for note in notes(parts_of(tmp_path)))


# ---------------------------------------------------------------- what must not be compared silently

def test_each_metric_has_its_own_differences(tmp_path):
    for masker, f1 in (("random", 0.5), ("whole", 0.7)):
        for seed in range(2):
            add(tmp_path, masker, seed, np.stack([np.arange(20) < 10, np.full(20, f1)], 1), "newsqa")
    parts = parts_of(tmp_path)
    assert [table(parts, f"{m} against Random")["Whole-Random"]["difference"] for m in ("EM", "F1")] == ["+0.00", "+20.00"]


def test_two_lines_of_one_row_and_seed(tmp_path):
    add(tmp_path, "whole", 0, right(0.5))
    add(tmp_path, "whole", 0, right(0.5), config={"lm": "elsewhere/whole-0", "out": "elsewhere"}, pretraining={"seconds": 3.0})
    assert table(parts_of(tmp_path), "scores")["Whole-Random"]["accuracy"][0] == "50.00"        # said again
    add(tmp_path, "whole", 0, config={"lr": 1e-3}, pretraining={"p": 0.3})
    sentence = refused(tmp_path)
    assert "results.jsonl:1 and" in sentence and "results.jsonl:3 are both Whole-Random, seed 0" in sentence
    assert "lr 0.0002 and 0.001" in sentence and "pretraining.p 0.15 and 0.3" in sentence


def test_data_sets_with_dots_in_their_names(tmp_path):
    for dataset in ("folder/data-v1.0", "folder/data-v1.1", "folder/data-v1.1.csv.gz"):
        add(tmp_path, "random", 0, dataset=dataset)
    groups = report.grouped(report.read([str(tmp_path / "results.jsonl")], "test"))
    assert list(groups) == [("data-v1.0", "minilm"), ("data-v1.1", "minilm")]


def test_the_same_settings_with_another_score(tmp_path):
    for share in (0.5, 0.6):
        add(tmp_path, "whole", 0, right(share))
    assert "are both Whole-Random, seed 0, but differ: accuracy 50.0 and 60.0" in refused(tmp_path)


def test_policies_of_another_seed_are_not_taken_for_each_other(tmp_path):
    add(tmp_path, "nmg:a", policy={"seed": 0})
    add(tmp_path, "nmg:a", policy={"seed": 1})
    assert "policy.seed 0 and 1" in refused(tmp_path)


def test_rows_with_other_knobs_are_named(tmp_path):
    for seed in range(2):
        add(tmp_path, "random", seed)
        add(tmp_path, "nmg:a", seed, pretraining={"p": 0.05, "epochs": 3}, policy={"self_play": True})
        add(tmp_path, "none", seed)
    assert not any("Not the same" in note for note in notes(parts_of(tmp_path)))
    add(tmp_path, "whole", 0, config={"lr": 1e-3})
    add(tmp_path, "whole", 1, pretraining={"p": 0.05})
    found = [note for note in notes(parts_of(tmp_path)) if "Not the same" in note]
    assert found == ["Not the same in all rows: lr is 0.0002 in No PT, Random, Whole-Random (seed 1), NMG; 0.001 in Whole-Random (seed 0).",
                     "Not the same in all rows: pretraining.p is 0.15 in Random, Whole-Random (seed 0); 0.05 in Whole-Random (seed 1)."]


def test_within_a_row_the_masker_is_the_same(tmp_path):
    """Rows have maskers and entities of their own; seeds of a row do not. What was left to its default differs from what was not."""
    for seed in range(2):
        add(tmp_path, "none", seed)
        add(tmp_path, "random", seed, pretraining={"masker_file": None, "spacy_model": None, "max_len": None})
        add(tmp_path, "entity", seed, pretraining={"masker_file": None, "spacy_model": "sm", "max_len": None})
        add(tmp_path, "my.py:rare", seed, pretraining={"masker_file": "a", "max_len": None})
    assert not any("Not the same" in note for note in notes(parts_of(tmp_path)))
    add(tmp_path, "entity", 2, pretraining={"spacy_model": "trf", "max_len": None})
    add(tmp_path, "my.py:rare", 2, pretraining={"masker_file": "b", "max_len": 64})
    assert [note for note in notes(parts_of(tmp_path)) if "Not the same" in note] == [
        "Not the same in all rows: pretraining.max_len is null in Random, Entity-Random, my.py:rare (seed 0, 1); 64 in my.py:rare (seed 2).",
        'Not the same in all rows: pretraining.spacy_model is "sm" in Entity-Random (seed 0, 1); "trf" in Entity-Random (seed 2).',
        'Not the same in all rows: pretraining.masker_file is "a" in my.py:rare (seed 0, 1); "b" in my.py:rare (seed 2).']


def test_other_test_examples(tmp_path):
    add(tmp_path, "random", 0, right(0.5, 10))
    add(tmp_path, "whole", 0, right(0.5, 8))
    assert "do not score the same examples" in refused(tmp_path)


@pytest.mark.parametrize("text", ["{broken", "[1]", '"text"', "", "{}", '{"em": 1}'])
def test_broken_lines(tmp_path, text):
    add(tmp_path)
    with open(tmp_path / "results.jsonl", "a") as f:
        f.write(text + "\n")
    assert "results.jsonl:2: not a line of results" in refused(tmp_path)


def test_a_line_that_lacks_something(tmp_path):
    add(tmp_path, train_seconds=None, seed="0")
    assert "results.jsonl:1: not a line of results: seed, train_seconds missing" in refused(tmp_path)


def test_examples(tmp_path):
    add(tmp_path, accuracy=75.02)
    assert "accuracy is 75.02, but 75.00 by the examples in" in refused(tmp_path)
    (tmp_path / "results.jsonl").unlink()
    add(tmp_path, accuracy=75.009)
    assert parts_of(tmp_path)
    np.save(tmp_path / "1.npy", np.ones((4, 2), np.float32))
    assert "(4, 2), not (examples, 1)" in refused(tmp_path)
    (tmp_path / "1.npy").write_bytes(b"")
    assert "1.npy, the scores of its examples, is missing or not" in refused(tmp_path)
    np.save(tmp_path / "1.npy", np.array([{}]))                            # a pickle, which is not loaded
    assert "is missing or not a .npy file of numbers" in refused(tmp_path)
    (tmp_path / "1.npy").unlink()
    assert "results.jsonl:1: " in refused(tmp_path) and "is missing" in refused(tmp_path)


def test_splits_and_several_files(tmp_path):
    add(tmp_path / "a", "random", 0, right(0.5))
    add(tmp_path / "b", "random", 1, right(0.7))
    add(tmp_path / "b", "whole", 0, right(0.9), split="dev")
    assert "--split=train: no line of" in refused(tmp_path, split="train", files=["a/results.jsonl", "b/results.jsonl"])
    assert table(parts_of(tmp_path, "test", ["a/results.jsonl", "b/results.jsonl"]), "scores")["Random"]["accuracy"][0] == "60.00"
    assert list(table(parts_of(tmp_path, "dev", ["b/results.jsonl"]), "scores")) == ["Whole-Random"]
    assert "no such file" in refused(tmp_path, files=["c.jsonl"])


@needs_shared
def test_the_papers_figures():
    text = (SHARED / "design/PAPER.md").read_text()
    theirs = Counter(re.findall(r"\d+\.\d+±\d*\.\d+", text[text.index("## Tables"):]))
    theirs.subtract(" ".join(report.PAPER.values()).split())
    assert +theirs == Counter(["48.75±.08", "63.55±.14"]) and not -theirs          # NMG's row, again in table 3


def test_learning_curves(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, tmp, **_: shown.append(figure) or tmp.touch())
    scores = [(0.5, 0.4, 0.6), (0.5, 0.5, 0.3), (0.5, 0.2, 0.4)]
    small = {"entropy": 0.1, "policy_loss": 0.2, "value_loss": 0.3}
    metrics = [{"random_score": r, "opponent_score": o, "learner_score": s, "uniform_entropy": 2.0} |
               {f"{name}_{what}": i + x for name in ("opponent", "learner") for what, x in small.items()} for i, (r, o, s) in enumerate(scores)]
    report.curves(metrics, tmp_path / "c.png")
    regret, entropy, loss = ({line.get_label(): list(line.get_ydata()) for line in ax.lines} for ax in shown[0].axes)
    assert regret == {"worst case": [1, 2, 3], "learner": [0, 1, 2], "opponent": [1, 1, 2]}
    assert entropy["learner"] == [0.1, 1.1, 2.1] and loss["opponent"] == pytest.approx([0.5, 2.5, 4.5])
    assert report.won(metrics[0] | {"learner_won": 0}, "learner") == 0 and train_nmg.won_lost(metrics) == "won 1 and lost 2 against random"


# ---------------------------------------------------------------- the script

def test_names_are_escaped(tmp_path):
    name = "dir/a|b_c%d&e#f.py:$x<y"
    for masker in ("random", name):
        add(tmp_path, masker, 0, dataset="a_b|c")
    parts = parts_of(tmp_path)
    text, tex = report.markdown(parts), report.latex(parts)
    assert r"| a\|b\_c%d&e#f.py:$x\<y | " in text and r"### a\_b\|c, minilm" in text
    for block in text.split("\n\n"):
        assert not block.startswith("|") or len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    assert r"a$|$b\_c\%d\&e\#f.py:\$x$<$y & " in tex and "caption{a\\_b$|$c, minilm: scores}" in tex
    assert not [line for line in tex.splitlines() if re.search(r"(?<!\\)[%#]", line) and not line.startswith("% ")]
    assert tex.count(r"\begin{table}") == tex.count(r"\end{table}") == 2
    assert "\\end{table}\n\\par" not in tex and tex.count(r"\par}" + "\n" + r"\end{table}") == 1         # notes float with their table
    assert report.tex(r"\~^") == r"\textbackslash{}\textasciitilde{}\textasciicircum{}" and report.tex("-0.14 to x-2†") == r"$-$0.14 to x-2$^\dag$"


def test_the_script_and_the_readme(study):
    page = "# title\n\n<!-- results -->\nof yore\n<!-- /results -->\nend\n"
    (study / "README.md").write_text(page)
    (study / "bare.md").write_text("# title\n<!-- /results -->\n<!-- results -->\n")
    command = ["report.py", "--results=results.jsonl", "--out=some/where", "--readme=README.md"]
    first = run(*command, cwd=study)
    assert first.returncode == 0, first.stderr
    text = (study / "README.md").read_text()
    made, shown = (study / "some/where/tables.md").read_text(), (study / "some/where/tables.tex").read_text()
    assert first.stdout.startswith(made) and "some/where/forest-chemprot-bert-base-uncased.png" in first.stdout.splitlines()[-1]
    assert text.startswith("# title\n\n<!-- results -->\nMade by `python report.py --results=results.jsonl")
    assert text.endswith("<!-- /results -->\nend\n") and "of yore" not in text
    assert "](some/where/forest-chemprot-bert-base-uncased.png)" in text and "](forest-chemprot" in made
    assert r"\toprule" in shown and "Span-Random" in shown
    assert run(*command, cwd=study).returncode == 0 and (study / "README.md").read_text() == text          # again: the same
    for readme in ("bare.md", "none.md"):
        with pytest.raises(UserError, match=f"{readme}: no such file, or without the two lines"):
            report.main(str(study / "results.jsonl"), out=str(study / "other"), readme=str(study / readme))
        assert not (study / "other").exists()


def test_the_script_does_without_scipy(study):
    (study / "scipy.py").write_text("raise ImportError('a dev dependency')")
    assert run("report.py", "--results=results.jsonl", cwd=study, PYTHONPATH=str(study)).returncode == 0
    wrong = run("report.py", "--results=nothing.jsonl", cwd=study)
    assert wrong.returncode == 2 and wrong.stderr == "error: --results=nothing.jsonl: no such file; finetune_cls.py and finetune_qa.py write it\n"
