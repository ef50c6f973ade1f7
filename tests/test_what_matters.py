"""tools/what_matters.py: plays of several maskers on the same sub-tasks, its log, and its table."""
import itertools
import re

import numpy as np
import pytest
from conftest import call

import maskers
import train_nmg
from nmg.policies import Policy
from nmg.subtasks import SubTaskSampler
from support import runs, toy
from support.models import LMReader
from support.rng import rng_for
from tools import what_matters

# A play of a second or less.
PLAYS = ["--contexts=60", "--docs=12", "--mlm_epochs=1", "--ft_epochs=1", "--fast=False"]
MATTERS = ["tools/what_matters.py", *PLAYS, "--log=w.jsonl"]

pytestmark = pytest.mark.usefixtures("one_thread")


def plays_of(place):
    """{(seed, masker): {metric: score}}"""
    lines = runs.read_rows(place / "w.jsonl")
    plays = {}
    for line in lines:
        plays[line["seed"], line["masker"]] = {metric: line[metric] for metric in line["metrics"]}
    assert len(plays) == len(lines) and {line["dataset"] for line in lines} == {"toycls"}
    return plays


def test_maskers_are_compared_on_the_same_sub_tasks(tmp_path):
    command = [*MATTERS, "--maskers=random,none,punct", "--seeds=2", "--seed=3"]
    result = call(*command, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    plays = plays_of(tmp_path)
    assert set(plays) == set(itertools.product((3, 4), ("random", "none", "punct")))

    # One of the plays again.
    cfg = runs.parse_flags(what_matters.Config, PLAYS, toy.TRAIN_NMG)
    data, lm, task = train_nmg.open_task(cfg)
    sampler = SubTaskSampler(data, task, cfg.max_len, cfg.ft_max_len, 0.5)
    rng = rng_for(4, "sub-task")
    subtask = sampler.sample(rng, 60, 12, cfg.examples, cfg.validation)
    mask = what_matters.choose_masks(subtask.contexts, maskers.find("punct"), 0.05, 4, LMReader(lm))
    _, measured = train_nmg.inner_loop(lm, subtask, mask, task, cfg)
    for metric, score in measured.items():
        unit = 100 if metric == "likelihood" else 1
        assert plays[4, "punct"][metric] == pytest.approx(unit * score, abs=1e-4)

    # It goes on where it stopped, with these flags.
    lines = (tmp_path / "w.jsonl").read_text().splitlines()
    (tmp_path / "w.jsonl").write_text("\n".join(lines[:4]) + "\n")
    again = call(*command, cwd=tmp_path)
    assert again.returncode == 0 and (tmp_path / "w.jsonl").read_text().splitlines()[:4] == lines[:4]
    assert plays_of(tmp_path) == plays
    for flag in ("--p=0.1", "--contexts=70", "--dataset=toyqa"):
        other = call(*command, flag, cwd=tmp_path)
        assert other.returncode == 2 and "--log=w.jsonl: holds plays with other flags" in other.stderr
    assert plays_of(tmp_path) == plays

    # The table of report.py.
    score = np.array([plays[seed, "punct"]["likelihood"] for seed in (3, 4)])
    d = score - [plays[seed, "random"]["likelihood"] for seed in (3, 4)]
    row = rf"^\| punct \| {score.mean():.2f} ±.* \| {re.escape(f'{d.mean():+.2f}')} \|"
    assert re.search(row, result.stdout, re.MULTILINE)


def test_an_edited_masker_is_played_again(tmp_path):
    """And no other; the plays before are set aside, with a word."""
    logs = []
    for code in ("from maskers import random as mine\n", "from maskers import whole as mine\n"):
        (tmp_path / "my.py").write_text(code)
        result = call(*MATTERS, "--maskers=random,my.py:mine", "--seeds=1", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        lines = runs.read_rows(tmp_path / "w.jsonl")
        logs.append({line["masker"]: (line["file"], line["seconds"]) for line in lines})
        assert len(lines) == 2
    said = "WARNING: 1 plays of maskers that were edited since are set aside in w.jsonl.edited"
    assert said in result.stdout
    aside, = runs.read_rows(tmp_path / "w.jsonl.edited")
    assert (aside["file"], aside["seconds"]) == logs[0]["my.py:mine"] and aside["masker"] == "my.py:mine"
    assert logs[0]["random"] == logs[1]["random"] and logs[0]["my.py:mine"][0] != logs[1]["my.py:mine"][0]


def test_a_policy_that_has_read_the_labels_is_told(tmp_path):
    """It was learned from train, half of which is scored here."""
    cfg = runs.parse_flags(what_matters.Config, PLAYS, toy.TRAIN_NMG)
    data, _, _ = train_nmg.open_task(cfg)
    Policy(128).save(tmp_path / "policy")
    settings = {"data": data.checksum, "dataset": "toycls", "lm": "tiny"}
    runs.Run(tmp_path / "other", settings).finish()
    (tmp_path / "other/run.json").rename(tmp_path / "policy/run.json")
    result = call(*MATTERS, "--maskers=random,nmg:policy", "--seeds=1", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert [line["policy"] for line in runs.read_rows(tmp_path / "w.jsonl")] == [None, settings]
    said = "- The policy of nmg was learned from the labels of the very texts that are scored."
    assert said in result.stdout.splitlines()


def test_plays_of_edited_code_are_kept_with_a_warning(tmp_path, monkeypatch):
    """A masker of ours may have been edited, which no checksum of a file shows."""
    said = []
    for commit in ("aaa", "aaa", "bbb"):
        monkeypatch.setattr(runs, "commit", lambda commit=commit: commit)
        said.append(call(*MATTERS, "--maskers=random,rare", "--seeds=1", cwd=tmp_path).stdout)
    assert "WARNING" not in said[0] + said[1]
    assert "WARNING: w.jsonl has plays by commit aaa, and the code is now commit bbb;" in said[2]
    assert len(runs.read_rows(tmp_path / "w.jsonl")) == 2


def test_what_others_write_meanwhile_stays(tmp_path, monkeypatch):
    """Several of these commands may share a log."""
    inner_loop = train_nmg.inner_loop

    def while_another_writes(*args):
        lines = runs.read_rows(tmp_path / "w.jsonl")
        if not lines:
            runs.write_rows(tmp_path / "w.jsonl", [other])
        return inner_loop(*args)

    assert call(*MATTERS, "--maskers=rare", "--seeds=1", cwd=tmp_path).returncode == 0
    other, = runs.read_rows(tmp_path / "w.jsonl")
    runs.write_rows(tmp_path / "w.jsonl", [])
    monkeypatch.setattr(train_nmg, "inner_loop", while_another_writes)
    assert call(*MATTERS, "--maskers=random,punct", "--seeds=1", cwd=tmp_path).returncode == 0
    assert set(plays_of(tmp_path)) == {(0, "rare"), (0, "random"), (0, "punct")}
