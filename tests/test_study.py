"""tools/study.py: a study by its plan, killed and resumed, by two processes, and plans that are wrong."""
import itertools
import re
import subprocess
from collections import Counter

import numpy as np
import pytest
from conftest import ROOT, call, kill_when, side_by_side, succeed, write_rows

import maskers
import report
import train_nmg
from nmg.policies import LinearPolicy, load_policy
from nmg.subtasks import SubTaskSampler
from support import runs, sources
from support.models import LMReader
from support.rng import rng_for
from tools import study

# A play of a second or less.
FAST = "contexts = 30\ndocs = 6\nmlm_epochs = 1\nft_epochs = 1\n"
ROWS = ("random", "punct", "sampled", "nmg", "mean", "untrained")
# Of these two maskers no policy is learned.
PLAYS = f"""policies = 2
seeds = 3
primary = 'punct'
maskers = ['random', 'punct']
[learn]
episodes = 1
sharpness = 3.0
clip = 0.7
{FAST}[play]
val_share = 0.5
{FAST}"""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def place(tmp_path):
    (tmp_path / "plays.toml").write_text(PLAYS)
    (tmp_path / "bad.py").write_text("def bad(batch, *_): return batch.maskable")
    return tmp_path


def study_of(place, name="plays", code=0):
    """Runs a study, which must end with this exit code."""
    result = call("tools/study.py", f"--plan={name}.toml", "--out=o", cwd=place)
    assert result.returncode == code, result.stderr
    return result


def lines_of(place, name="plays"):
    return runs.read_rows(place / f"o/{name}/plays.jsonl")


def plays_of(place, name="plays"):
    """{(seed, row): accuracy}; no play is there twice."""
    lines = lines_of(place, name)
    plays = {(line["seed"], line["row"]): line["accuracy"] for line in lines}
    assert len(plays) == len(lines)
    return plays


@pytest.mark.slow
def test_two_processes_share_a_study(place):
    """Of the toy world, with all that stands for policies."""
    plan = PLAYS.replace("seeds = 3", "seeds = 2").replace("['random', 'punct']", f"{[*ROWS]}")
    (place / "toy.toml").write_text(plan)
    said = side_by_side([{}, {}], "tools/study.py", "--plan=toy.toml", "--out=o", cwd=place)
    plays = plays_of(place, "toy")
    assert set(plays) == set(itertools.product(range(2), ROWS))
    # Each policy is learned once, from the first part of the documents.
    learned = Counter(re.findall(r"saved o/toy/(policy-\d)", "".join(said)))
    assert learned == {"policy-0": 1, "policy-1": 1}
    for seed in (0, 1):
        about = runs.read_run(place / f"o/toy/policy-{seed}")["settings"]
        assert (about["dataset"], about["seed"], about["episodes"]) == ("toy-learn", seed, 1)
    used = {line["row"]: line["masker"] for line in lines_of(place, "toy") if line["seed"] == 1}
    assert used == {"random": "random", "punct": "punct", "sampled": "sampled:o/toy/policy-1",
                    "nmg": "nmg:o/toy/policy-1", "mean": "sampled:o/toy/policy-0,o/toy/policy-1",
                    "untrained": "sampled:o/toy/untrained-1"}
    untrained = [load_policy(place / f"o/toy/untrained-{number}") for number in (0, 1)]
    assert (untrained[0].weight != untrained[1].weight).any()
    assert {(policy.sharpness, policy.clip) for policy in untrained} == {(3.0, 0.7)}

    # Both wait for the end, so that both print the plan and the whole table.
    tables = [out[out.index("\nPlan"):] for out in said]
    assert tables[0] == tables[1] and "Plan toy.toml (not committed, last edited 20" in tables[0]
    assert "    policies = 2\n    seeds = 2\n" in tables[0]
    d = np.array([plays[seed, "untrained"] - plays[seed, "random"] for seed in range(2)])
    row = re.search(r"^\| untrained \|.*$", tables[0], re.MULTILINE)[0].split(" | ")
    assert row[2] == f"{d.mean():+.2f}" and row[4:6] == ["too few seeds", f"{sum(d > 0)} of 2"]


def test_a_play_is_an_inner_loop_under_the_masks_of_its_masker(place):
    (place / "plays.toml").write_text(PLAYS.replace("['random'", "['whole', 'random'"))
    study_of(place)
    # What is compared first of all is played first.
    assert [line["row"] for line in lines_of(place)] == 3 * ["random", "punct"] + 3 * ["whole"]
    plan = study.read_plan(place / "plays.toml", study.Config(out=str(place / "o")))
    study.divide(plan)
    data, lm, task = train_nmg.open_task(plan.play)
    sampler = SubTaskSampler(data, task, plan.play.max_len, plan.play.ft_max_len, 0.5)
    subtask = sampler.sample(rng_for(1, "sub-task"), 30, 6, plan.play.examples, plan.play.validation)
    mask = study.choose_masks(subtask.contexts, maskers.find("punct"), plan.play.p, 1, LMReader(lm))
    _, scores = train_nmg.inner_loop(lm, subtask, mask, task, plan.play)
    line, = [line for line in lines_of(place) if (line["seed"], line["row"]) == (1, "punct")]
    assert line["accuracy"] == pytest.approx(scores["accuracy"])
    # In hundredths of a nat.
    assert line["likelihood"] == pytest.approx(100 * scores["likelihood"], abs=1e-3)


def test_plays_of_another_plan_are_taken_over(place):
    """Also those of a plan that the same command plays first. A mistake in the last shows before any play."""
    (place / "last.toml").write_text(f"metric = 'acuracy'\n{PLAYS}")
    more = "seeds = 2\nseed = 2\nprimary = 'whole'\nplays_of = 'o/plays/plays.jsonl'\n"
    text = PLAYS.replace("punct", "whole").replace("seeds = 3\nprimary = 'whole'\n", more)
    (place / "more.toml").write_text(text)
    result = study_of(place, "plays.toml,more.toml,last", 2)
    assert "acuracy" in result.stderr and lines_of(place) == []
    study_of(place, "plays.toml,more")
    plays = plays_of(place, "more")
    assert set(plays) == set(itertools.product((2, 3), ("random", "whole")))
    # Only one of them was there: the others are new.
    seconds = {line["seconds"]["play"]: (line["seed"], line["row"]) for line in lines_of(place, "more")}
    taken = [seconds.get(line["seconds"]["play"]) for line in lines_of(place)]
    assert taken == [None, None, None, None, (2, "random"), None]
    (place / "others.toml").write_text(text.replace("contexts = 30", "contexts = 31"))
    assert "contexts=30 there, 31 here" in study_of(place, "others", 2).stderr


def test_parts_share_no_document_and_no_text(tmp_path):
    """Two files number their documents alike; a text stands in many documents."""
    for split, docs in (("train", range(40)), ("test", range(20, 60))):
        rows = [{"text": f"{split} {doc} says this.", "label": "ab"[doc % 2], "doc": doc} for doc in docs]
        rows += [{"text": f"<< Common >> text  {doc % 3}", "label": "a", "doc": doc} for doc in docs]
        write_rows(tmp_path / f"data/{split}.jsonl", rows)
    made = study.Study(tmp_path / "s.toml", study.Plan(dataset=str(tmp_path / "data"), splits="train,test"),
                       None, None, tmp_path)

    def parts():
        study.divide(made)
        return [sources.DATASETS[name]().splits["train"] for name in ("s-learn", "s-new")]

    learn, new = parts()
    assert parts() == [learn, new]
    assert {row["doc"] for row in learn} & {row["doc"] for row in new} == set()
    assert {row["text"] for row in learn} & {row["text"] for row in new} == set()
    assert len({row["doc"] for row in learn + new}) == 60 and len(learn) == 80 and len(new) >= 30

    # What other policies know is left out of the second part only.
    made.plan.known = "train"
    unknown = [row for row in new if row["text"].startswith("test ")]
    assert 0 < len(unknown) < len(new) and parts() == [learn, unknown]


@pytest.mark.slow
def test_a_killed_study_goes_on(place):
    """Also with what the killed process was at work on; nothing is played twice."""
    log = place / "o/plays/plays.jsonl"
    kill_when(lambda: len(runs.read_rows(log)) >= 2, "tools/study.py", "--plan=plays.toml", "--out=o",
              cwd=place)
    before = runs.read_rows(log)
    assert 2 <= len(before) < 6
    result = study_of(place)
    assert lines_of(place)[:len(before)] == before
    # As if it had not been killed.
    assert call("tools/study.py", "--plan=plays.toml", "--out=whole", cwd=place).returncode == 0
    whole = runs.read_rows(place / "whole/plays/plays.jsonl")
    assert plays_of(place) == {(line["seed"], line["row"]): line["accuracy"] for line in whole}
    # The same command prints the table again.
    assert study_of(place).stdout.splitlines()[-3:] == result.stdout.splitlines()[-3:]


def test_jobs_are_given_out_once(tmp_path):
    """One that waits for others comes after them; what another process does meanwhile is not done again."""
    done, given = set(), []
    other = runs.shared(["a", "b", "c"], lambda: done, tmp_path / "locks")
    assert next(other) == "a"
    needs = {"c": {"a", "b"}}
    for job in runs.shared(["c", "a", "b"], lambda: done, tmp_path / "locks", needs):
        given.append(job)
        done.add(job)
        if job == "b":
            # The other process finishes, or is killed.
            other.close()
    assert given == ["b", "a", "c"]


def test_what_must_stay_the_same_after_the_first_play(place, monkeypatch):
    """The plan, but for its comments, and the file of a masker, also while a play goes on."""
    plan, mine = place / "plays.toml", place / "my.py"
    mine.write_text("from maskers import whole as mine\n")
    text = PLAYS.replace("punct", "my.py:mine").replace("seeds = 3", "seeds = 1")
    plan.write_text(text)
    study_of(place)
    before = lines_of(place)
    plan.write_text(f"# Comments may change.\n{text}")
    # Nor is it another study if the code has a flag less now.
    before[0]["config"]["learn"]["gone"] = 1
    write_rows(place / "o/plays/plays.jsonl", before)
    study_of(place)
    more_seeds = text.replace("seeds = 1", "seeds = 3")
    for file, edited, said in ((mine, "from maskers import span as mine\n", "(files.my.py:mine="),
                               (plan, more_seeds, "(plan.seeds=1 there, 3 here)")):
        original = file.read_text()
        file.write_text(edited)
        result = study_of(place, code=2)
        file.write_text(original)
        assert "changed after the first play" in result.stderr and said in result.stderr
        assert lines_of(place) == before

    def edit_and_play(*args):
        mine.write_text("from maskers import span as mine\n")
        return play(*args)

    play = study.play
    monkeypatch.setattr(study, "play", edit_and_play)
    (place / "new.toml").write_text(text)
    result = study_of(place, "new", 2)
    assert "the file of my.py:mine was edited while" in result.stderr
    assert [line["row"] for line in lines_of(place, "new")] == ["random"]


@pytest.mark.parametrize(("old", "new", "said"), [
    ("policies = 2", "polices = 2", "plays.toml: unknown flag --polices; did you mean 'policies'?"),
    ("episodes = 1", "seed = 1", "plays.toml, [learn]: seed is set by the study"),
    ("'punct']", "'punkt']", "plays.toml: --masker=punkt: no such masker"),
    ("['random', 'punct']", "'punct,rare'", "plays.toml: maskers=punct,rare: must hold random"),
    ("['random', 'punct']", f"['random', '{ROOT}/maskers.py:rare', '{ROOT}/nmg/../maskers.py:rare']",
     "two of them differ in absolute paths alone"),
    ("primary = 'punct'", "primary = 'random'", "plays.toml: primary=random"),
    ("seeds = 3", "seeds = 3\nknown = 'test'", "known=test: test is not among splits=train"),
    ("seeds = 3", "seeds = 3\nnew_share = 1", "toycls has 24 documents with labels"),
    # What would show late: after the plays of other maskers.
    ("'punct']", "'punct', 'bad.py:bad']", "the masker 'bad' must return a bool array"),
    ("'punct']\n[learn]\n", "'punct', 'nmg']\n[learn]\nmetric = 'f1'\n", "[learn]: --metric=f1: allowed are"),
])
def test_wrong_plans(old, new, said, place):
    """One sentence that names the key or the value, and no play."""
    (place / "plays.toml").write_text(PLAYS.replace(old, new))
    result = study_of(place, code=2)
    assert said in result.stderr and result.stderr.count("\n") == 1, result.stderr
    assert not (place / "o/plays/plays.jsonl").exists()


def made_up_play(name, seed, *_):
    score = np.random.default_rng(seed + len(name)).normal()
    return {"masker": name, "row": name, "seed": seed, "split": "val", "metrics": ["accuracy"],
            "accuracy": score, "seconds": {"play": 1.0}, "ended": "2026-01-01 00:00", "file": None,
            "policy": None, "commit": runs.commit()}


def test_a_play_that_fails_while_the_plan_is_edited(place, monkeypatch):
    """The others go on, and the table says by which plan. With that of now, nothing is played."""
    def play(name, seed, *_):
        (place / "plays.toml").write_text(PLAYS.replace("seeds = 3", "seeds = 9"))
        if (name, seed) == ("punct", 1):
            raise runs.UserError("it is broken")
        return made_up_play(name, seed)

    monkeypatch.setattr(study, "play", play)
    result = study_of(place, code=2)
    assert set(plays_of(place)) == set(itertools.product(range(3), ("random", "punct"))) - {(1, "punct")}
    assert "1 plays failed" in result.stderr and "punct with seed 1: it is broken" in result.stderr
    assert "    seeds = 3\n" in result.stdout
    assert "(plan.seeds=3 there, 9 here)" in study_of(place, code=2).stderr


def test_primary_comparisons_of_several_studies(place, monkeypatch):
    """Of plays that are made up."""
    monkeypatch.setattr(study, "play", made_up_play)
    (place / "other.toml").write_text(PLAYS.replace("seeds = 3", "seeds = 7\nseed = 20"))
    (place / "plays.toml").write_text(PLAYS.replace("seeds = 3", "seeds = 6").replace("t']", "t', 'whole']"))
    result = succeed("tools/study.py", "--plan=plays.toml,other.toml", "--out=o", cwd=place)
    p = {}
    for name in ("plays", "other"):
        plays = plays_of(place, name)
        d = [plays[seed, "punct"] - plays[seed, "random"] for seed, row in plays if row == "punct"]
        p[name] = report.sign_flips(np.array(d))
    low, high = sorted(p.values())
    corrected = {low: min(1, 2 * low), high: min(1, max(2 * low, high))}
    for name in p:
        row = re.search(rf"^\| {name}, punct \|.*$", result.stdout, re.MULTILINE)[0].split(" | ")
        assert row[3:] == [f"{p[name]:.2g}", f"{corrected[p[name]]:.2g} |"]
    # In the table of one study the primary p is not corrected.
    assert re.search(rf"^\| punct \|.* \| {p['plays']:.2g} \| . of 6 \|", result.stdout, re.MULTILINE)


def test_the_commit_of_a_plan(place):
    file = place / "plays.toml"
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init"], ["add", "plays.toml"], ["commit", "-m", "plan"]):
        subprocess.run([*git, *command], cwd=place, check=True, capture_output=True)
    assert re.fullmatch(r"commit [0-9a-f]{7,} of 20\d\d-\d\d-\d\d \d\d:\d\d", study.last_changed(file))
    file.write_text("# edited\n" + PLAYS)
    assert study.last_changed(file).startswith("not committed, last edited 20")


def test_the_plans_of_the_repository(tmp_path, monkeypatch):
    """They can be read, also for another LM, with stand-ins for the policies that were learned before and for
    maskers that lie in the history."""
    monkeypatch.chdir(tmp_path)
    plans = sorted((ROOT / "results/plans").glob("*.toml"))
    assert plans
    for file in plans:
        text = file.read_text("utf-8")
        for folder in re.findall(r"(?:runs/studies|results/policies)/[\w/-]+", text):
            LinearPolicy(8).save(tmp_path / folder)
        for script, function in re.findall(r"(dev/\w+\.py):(\w+)", text):
            (tmp_path / "dev").mkdir(exist_ok=True)
            with open(tmp_path / script, "a") as f:
                f.write(f"from maskers import whole as {function}\n")
        read = study.read_plan(file, study.Config(lm="other"))
        assert read.plan.lm == read.play.lm == read.learn.lm == "other"
        assert read.plan.dataset in sources.DATASETS
