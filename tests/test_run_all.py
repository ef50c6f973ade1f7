"""run_all.sh: which commands it makes; a failed row says so and the rest go on; nothing is run twice."""
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import spacy
from conftest import ROOT, TEXTS, fast_tokenizer, mrqa_files, random_lm, write_rows


def run_all(*flags, cwd=ROOT, **env):
    command = ["bash", str(ROOT / "run_all.sh"), *flags]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=os.environ | env, timeout=600)


def listed(cwd=ROOT, **env):
    result = run_all("--list", cwd=cwd, **env)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


# ---------------------------------------------------------------- which commands

def test_every_row_of_the_papers_tables():
    commands = listed()
    policies = [c for c in commands if "train_nmg.py" in c]
    rows = [c for c in commands if "finetune_" in c]
    assert commands == policies + rows
    # Policies of tables 1, 2 and 3; rows of three seeds.
    assert len(policies) == 3 * (2 * 6 + 2 * 2 + 2)
    assert len(rows) == 3 * (6 * 9 + 2 * 9 + 2) == len(set(rows))
    # none: two tables of QA, one of classification
    assert sum("pretrain.py" not in row for row in rows) == 3 * 8
    for row in rows:
        seed = row.rsplit("-", 2)[1]
        assert row.count(f"--seed={seed} ") == row.count(".py ")
    assert sum("--self_play=False" in c for c in policies) == 3
    assert sum("--continual=False" in c for c in policies) == 3
    assert sum("--paper=True" in c for c in policies) == 3 * 8
    assert sum("--row=random,--p=0.05,--epochs=3" in row for row in rows) == 3 * 8
    made = {c.partition("--out=")[2] for c in policies}
    used = {row.partition("--masker=nmg:")[2].partition(" ")[0] for row in rows}
    assert used - {""} == made


@pytest.mark.parametrize(("env", "count"), [
    ({"CLS": "chemprot", "MASKERS": "none whole", "SEEDS": "0 1 2 3 4"}, 10),
    ({"LMS": "roberta-base", "QA": "newsqa", "MASKERS": "nmg", "SEEDS": "7"}, 1 + 1),
    ({"LMS": "roberta-base", "QA": "newsqa", "MASKERS": "nmg-alone nmg-fresh", "SEEDS": "7"}, 2 + 2),
    ({"QA": "some/folder", "CLS": "", "LMS": "x", "MASKERS": "none", "SEEDS": "0"}, 1),
    ({"CLS": "my.csv", "LMS": "x", "MASKERS": "random tfidf random,--p=0.3 search", "SEEDS": "0 1"}, 10),
    ({"CLS": "my.csv", "LMS": "x", "MASKERS": "search sampled", "SEEDS": "0"}, 1 + 2),
    ({"QA": "", "CLS": ""}, 0),
])
def test_subsets(env, count):
    assert len(listed(**env)) == count


def test_quick_runs_the_same_rows_on_the_toys():
    commands = listed(QUICK="1")
    assert len(commands) == 6 + 8 + 8 + 2
    assert all("--lm=tiny " in c and "--dataset=toy" in c for c in commands)
    learning = [c for c in commands if "train_nmg.py" in c]
    assert all("--episodes=2 --metric=likelihood" in c for c in learning)


def test_seeds_take_turns_with_policies():
    """So that the interval of a row holds for policies, too."""
    commands = listed(CLS="chemprot", LMS="x", MASKERS="nmg random", SEEDS="0 1 2 3 4", POLICIES="2")
    learn, rows = commands[:2], commands[2:7]
    made = [c.partition("--out=")[2] for c in learn]
    assert ["--seed=0 " in learn[0], "--seed=1 " in learn[1]] == [True, True] and len(set(made)) == 2
    for seed, row in enumerate(rows):
        assert f"--masker=nmg:{made[seed % 2]} " in row


def test_paths_keep_their_names(tmp_path):
    """Data sets and LMs in other folders, by relative and by absolute paths, go into folders of their own."""
    (tmp_path / "data2").mkdir()
    data = f"../x/data ../x/other {tmp_path}/data2"
    commands = listed(QA=data, CLS="", LMS="../lm/m-1.0 ../lm/m-1.5", MASKERS="none", SEEDS="0")
    outs = {c.rpartition("--out=")[2] for c in commands}
    assert len(outs) == len(commands) == 6


def test_more_flags():
    commands = listed(CLS="chemprot", MASKERS="entity", SEEDS="0",
                      PRETRAIN_FLAGS="--spacy_model=some_model", FINETUNE_FLAGS="--lr=2e-4")
    before, _, after = commands[0].partition(" && ")
    assert " --masker=entity --seed=0 --spacy_model=some_model " in before
    assert " --seed=0 --lr=2e-4 " in after
    assert "spacy_model" not in after


def test_what_is_learned_and_its_flags():
    """A policy for each learned masker, whose own flags win; the row masks with it, and flags after a comma
    are its alone."""
    names = "nmg nmg-alone nmg-fresh sampled random,--p=0.3,--epochs=2"
    commands = listed(LMS="x", QA="newsqa", MASKERS=names, SEEDS="0", SEARCH_FLAGS="--pairs=9",
                      NMG_FLAGS="--mlm_lr=3e-4 --self_play=True")
    learn, rows = commands[:4], commands[4:]
    assert ["train_nmg.py" in c and "--mlm_lr=3e-4" in c for c in learn] == [True, True, True, False]
    where = "--seed=0 --dataset=newsqa --lm=x --out=runs/tables/policy-newsqa-x-"
    assert f"--self_play=True --continual=True --self_play=False {where}" in learn[1]
    assert f"--self_play=True --continual=False {where}" in learn[2]
    assert f"search_masks.py --pairs=9 {where}" in learn[3]
    made = [c.partition("--out=")[2] for c in learn]
    assert len(set(made)) == 4
    for kind, folder, row in zip(("nmg", "nmg", "nmg", "sampled"), made, rows, strict=False):
        assert f"--masker={kind}:{folder} " in row
    assert "--masker=random " in rows[4] and " --p=0.3 --epochs=2 " in rows[4].partition("&&")[0]
    assert "--row=random,--p=0.3,--epochs=2 " in rows[4]


def test_every_row_has_a_folder_of_its_own():
    names = "search:a/b sampled:a/b random random,--p=0.3 difference difference:a/b my.py:b"
    commands = listed(CLS="my.csv", LMS="x", MASKERS=names, SEEDS="0")
    outs = [c.rpartition("--out=")[2] for c in commands]
    keys = [c.partition("--key=")[2].split()[0] for c in commands]
    assert len(set(outs)) == len(set(keys)) == len(commands) == 7


@pytest.mark.parametrize("edited", ["my.csv", "lm/weights", "my.py", "policy/weights", "words.txt"])
def test_what_is_edited_is_another_row(edited, tmp_path):
    """Of the files, what they hold is in the key, and not where they lie."""
    keys = []
    for place in ("here", "there", "edited"):
        names = ("my.csv", "lm/weights", "my.py", "policy/weights", "words.txt")
        files = dict.fromkeys(names, "one")
        if place == "edited":
            files[edited] = "two"
        for file, content in files.items():
            (tmp_path / place / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / place / file).write_text(content)
        commands = listed(cwd=tmp_path / place, CLS="my.csv", LMS="lm", SEEDS="0",
                          MASKERS="none my.py:rare sampled:policy difference:words.txt")
        keys.append([command.partition("--key=")[2].split()[0] for command in commands])
    here, there, after = keys
    assert here == there and len(set(here)) == 4
    row = {"my.py": 1, "policy/weights": 2, "words.txt": 3}.get(edited)
    changed = [one != other for one, other in zip(here, after, strict=True)]
    assert changed == [row in (None, i) for i in range(4)]


def test_one_kind_of_task_alone():
    """CLS=my.csv asks for no question answering, and the other way round."""
    assert all("--dataset=my.csv" in c for c in listed(QUICK="1", CLS="my.csv", MASKERS="random"))
    assert all("finetune_cls.py" in c for c in listed(CLS="my.csv", LMS="x", MASKERS="random"))
    assert all("finetune_qa.py" in c for c in listed(QA="my.json", LMS="x", MASKERS="random"))


def test_from_another_folder(tmp_path):
    """Paths are those of the user's folder, and the scripts are found."""
    env = {"CLS": "my.csv", "LMS": "x", "MASKERS": "random", "SEEDS": "0"}
    command, = run_all("--list", cwd=tmp_path, **env).stdout.splitlines()
    assert f"{ROOT}/pretrain.py --dataset=my.csv " in command
    assert f"{ROOT}/finetune_cls.py --dataset=my.csv " in command
    assert "--out=runs/tables/score-my.csv-x-random-0-" in command


def test_rows_in_the_results_are_not_listed_again(tmp_path):
    """Wherever data, LM and results lie now; with other flags it is another row, and another policy."""
    for file in ("a/my.csv", "b/lm/weights", "else/my.csv", "where/lm/weights"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(Path(file).name)
    asked = {"CLS": "a/my.csv", "LMS": "b/lm", "MASKERS": "random nmg", "SEEDS": "0 1", "OUT": str(tmp_path),
             "POLICIES": "1", "cwd": tmp_path}
    commands = listed(**asked)
    assert len(commands) == 5
    keys = [c.partition("--key=")[2].split()[0] for c in commands if "--key=" in c]
    assert len(set(keys)) == 4
    lines = [json.dumps({"seed": 0, "key": key, "config": {}}) for key in keys]
    (tmp_path / "results.jsonl").write_text("\n".join(lines[:3]) + "\n")
    left = listed(**asked | {"CLS": "else/my.csv", "LMS": "where/lm"})
    assert len(left) == 2 and "train_nmg.py" in left[0] and f"--key={keys[3]} " in left[1]
    assert len(listed(**asked | {"FINETUNE_FLAGS": "--epochs=9"})) == 5
    relearned = listed(**asked | {"NMG_FLAGS": "--episodes=9"})
    assert len(relearned) == 1 + 2 + 0 and relearned[0].split("--out=")[1] != left[0].split("--out=")[1]
    assert len(listed(**asked | {"PRETRAIN_FLAGS": "--epochs=9"})) == 5
    (tmp_path / "results.jsonl").write_text("\n".join(lines) + "\n")
    assert listed(**asked) == []


@pytest.mark.parametrize(("flags", "env", "message"), [
    (["--lits"], {}, "--lits: give --list or nothing; all else are environment variables"),
    ([], {"QA": "", "CLS": ""}, "no row is left: check LMS, QA, CLS and MASKERS"),
    (["--list"], {"OUT": "with space"}, "OUT, PYTHON and this path must be without spaces"),
    ([], {"JOBS": "0"}, "JOBS=0: must be 1 or more"),
    ([], {"JOBS": "many"}, "JOBS=many: must be 1 or more"),
])
def test_mistakes(flags, env, message):
    result = run_all(*flags, **env)
    assert result.returncode == 2
    assert result.stderr == f"error: {message}\n"


# ---------------------------------------------------------------- running them

STUB = """#!/usr/bin/env bash
case "$*" in *report.py*) exec $REAL_PYTHON "$@" ;; esac
echo "$@" >> "$STUB_LOG"
case "$*" in
    *--dataset=bad*) echo wrong; exit 3;;
    *--dataset=odd*) echo "WARNING: odd";;
    *slow*) sleep 2; echo ended >> "$STUB_LOG";;
esac
"""


@pytest.fixture
def stub(tmp_path):
    """A PYTHON that writes down what it was asked to run. It fails for the data set `bad`, and is slow for
    `slow`."""
    file = tmp_path / "python"
    file.write_text(STUB)
    file.chmod(0o755)
    return {"PYTHON": str(file), "REAL_PYTHON": sys.executable, "STUB_LOG": str(tmp_path / "log"),
            "OUT": str(tmp_path / "out"), "LMS": "x", "QA": "", "SEEDS": "0"}


def test_a_failed_row_says_so_and_the_rest_go_on(stub, tmp_path):
    # As the first row leaves it before it fails: nothing to report yet.
    (tmp_path / "out").mkdir()
    (tmp_path / "out/results.jsonl").touch()
    result = run_all(**stub | {"CLS": "bad good", "MASKERS": "none whole"})
    ran = (tmp_path / "log").read_text().splitlines()
    assert result.returncode == 1
    assert "2 failed; the same command runs them again" in result.stderr
    assert "no line of results" not in result.stderr
    failed = r"^score-bad-x-none-0-\d+ FAILED \(3\), see \S+: wrong$"
    assert re.search(failed, result.stderr, re.MULTILINE)
    # Why, at the end, once.
    assert result.stderr.endswith(" 2 wrong\n")
    assert len(list((tmp_path / "out/logs").glob("score-bad-x-none-0-*.log"))) == 1
    # bad: none and the first half of whole; good: none and both halves
    assert len(ran) == 2 + 3
    assert len(re.findall(r"score-good-x-(?:whole|none)-0-\d+ ends$", result.stdout, re.MULTILINE)) == 2


def test_what_logs_warn_of_is_counted_at_the_end(stub):
    """Of the last run of each row."""
    for _ in range(2):
        result = run_all(**stub | {"CLS": "odd good", "MASKERS": "none", "SEEDS": "0 1 2"})
    assert result.returncode == 0 and re.search(r"^ +3 WARNING: odd$", result.stderr, re.MULTILINE)


def test_a_report_that_fails_is_told_by_the_exit_code(stub, tmp_path):
    """And it does not hide what failed before it."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/results.jsonl").write_text("no JSON\n")
    result = run_all(**stub | {"CLS": "bad good", "MASKERS": "none"})
    assert result.returncode == 1 and "results.jsonl:1: not a JSON object" in result.stderr
    assert "1 failed; the same command runs them again" in result.stderr
    assert result.stderr.endswith(" 1 wrong\n")


def test_a_policy_is_learned_before_its_rows_whatever_names_say(stub, tmp_path):
    out = str(tmp_path / "finetune_study")
    result = run_all(**stub | {"CLS": "good", "MASKERS": "nmg", "JOBS": "2", "OUT": out})
    assert result.returncode == 0
    ran = [Path(line.split()[0]).name for line in (tmp_path / "log").read_text().splitlines()]
    assert ran == ["train_nmg.py", "pretrain.py", "finetune_cls.py"]
    begun = re.findall(r"\d (policy|score)-\S+ (begins|ends)", result.stdout)
    assert begun == [("policy", "begins"), ("policy", "ends"), ("score", "begins"), ("score", "ends")]


@contextlib.contextmanager
def quick_python(folder, **env):
    """A PYTHON for run_all.sh whose commands need not import torch (fork_python.py)."""
    fork_python, python = ROOT / "tests/fork_python.py", folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {fork_python} {folder}/socket "$@"\n')
    python.chmod(0o755)
    command = [sys.executable, str(fork_python), f"{folder}/socket"]
    env = os.environ | {"PYTHONWARNINGS": "ignore"} | env
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout.readline() == "ready\n"
            yield str(python)
        finally:
            server.kill()


@pytest.mark.slow
def test_ctrl_c_ends_the_row_at_work_and_no_other_starts(stub, tmp_path):
    env = os.environ | stub | {"CLS": "slow", "MASKERS": "none", "SEEDS": "0 1 2 3 4"}
    child = subprocess.Popen(["bash", str(ROOT / "run_all.sh")], env=env, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL, start_new_session=True,
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    log = tmp_path / "log"
    while not log.exists():
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGINT)
    assert child.wait(5) != 0
    time.sleep(3)
    assert len(log.read_text().splitlines()) == 1


@pytest.mark.slow
def test_rows_of_the_toy_world_are_run_once(tmp_path):
    """A row fails, is mended and run again; what is finished is not."""
    with quick_python(tmp_path) as python:
        env = {"PYTHON": python, "QUICK": "1", "CLS": "toycls", "MASKERS": "none entity",
               "OUT": str(tmp_path), "FINETUNE_FLAGS": "--epochs=1"}
        first = run_all(**env, PRETRAIN_FLAGS="--epochs=1 --spacy_model=xx_none")
        [log] = (tmp_path / "logs").glob("score-toycls-tiny-none-0-*.log")
        before = log.read_text()
        second = run_all(**env, PRETRAIN_FLAGS="--epochs=1", SEEDS="0 1")
    assert first.returncode == 1
    assert "1 failed" in first.stderr
    assert "the spaCy model 'xx_none' is not installed" in first.stderr
    assert "1 runs are in" in second.stdout
    assert "- Scored on 480 examples of test." in second.stdout
    logs = [file.read_text() for file in (tmp_path / "logs").glob("score-toycls-tiny-entity-0-*.log")]
    assert ["xx_none" in text for text in sorted(logs, key=len)].count(True) == 1
    assert "| none |" in first.stdout
    assert second.returncode == 0, second.stderr
    assert log.read_text() == before
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    rows = [(line["masker"], line["seed"]) for line in lines]
    assert sorted(rows) == [("entity", 0), ("entity", 1), ("none", 0), ("none", 1)]
    # Each seed has an LM of its own, and yet they are one row.
    assert re.search(r"\| entity \| [^|]+±[^|]+\|", second.stdout)


# ---------------------------------------------------------------- the paper's tables, on stand-ins

def paper_data(raw: Path) -> None:
    """A few records in the place of each download, and of emrQA, which is not for download."""
    for name in ("squad", "newsqa"):
        mrqa_files(raw, name, 12)
    for name, labels in (("chemprot", ["ACTIVATOR", "INHIBITOR", "SUBSTRATE"]), ("imdb", ["0", "1"])):
        for split, n in (("train", 12), ("dev", 6), ("test", 6)):
            rows = []
            for i in range(n):
                rows.append({"text": f"{split} {i}. {TEXTS[i % 4]}", "label": labels[i % len(labels)]})
            write_rows(raw / name / f"{split}.jsonl", rows)
    notes = []
    for i in range(12):
        qa = {"question": ["what sat?"], "answers": [{"evidence": "the mat", "text": "mat"}]}
        text = [f"Note {i}\n", "The cat sat on the mat\n"]
        notes.append({"note_id": str(i), "context": text, "qas": [qa]})
    (raw / "emrqa").mkdir(parents=True)
    articles = [{"title": "medication", "paragraphs": notes}]
    (raw / "emrqa/data.json").write_text(json.dumps({"data": articles}))


def hub_cache(hub: Path) -> None:
    """Small random LMs under the names of the paper's, as Hugging Face keeps what it has downloaded."""
    tokenizer = fast_tokenizer("wordpiece")
    for kind in ("bert", "distilbert"):
        folder = hub / f"models--{kind}-base-uncased"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs/main").write_text("0" * 40)
        random_lm(kind, len(tokenizer), 0.1, layers=1).save_pretrained(folder / "snapshots" / ("0" * 40))
        tokenizer.save_pretrained(folder / "snapshots" / ("0" * 40))


@pytest.fixture
def stand_ins(tmp_path):
    """Variables for run_all.sh: small local LMs and data under the names of the real ones, and a PYTHON that
    starts at once."""
    paper_data(tmp_path / "cache/raw")
    hub_cache(tmp_path / "hf/hub")
    nlp = spacy.blank("en")
    nlp.add_pipe("entity_ruler").add_patterns([{"label": "THING", "pattern": "cat"}])
    nlp.to_disk(tmp_path / "spacy")
    env = {"OUT": str(tmp_path / "out"), "NMG_CACHE": str(tmp_path / "cache"),
           "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1",
           "PRETRAIN_FLAGS": f"--spacy_model={tmp_path}/spacy"}
    with quick_python(tmp_path, **env) as python:
        yield env | {"PYTHON": python}


@pytest.mark.slow
def test_every_row_of_the_paper_is_run(stand_ins, tmp_path):
    """Tables 1 to 3 with all defaults but two, for their time: one seed of three, one episode of 200."""
    result = run_all(**stand_ins, SEEDS="0", NMG_FLAGS="--episodes=1", JOBS="2")
    assert result.returncode == 0, result.stderr
    out = tmp_path / "out"

    bert, distilbert = "bert-base-uncased", "distilbert-base-uncased"
    groups = [*itertools.product(("squad", "emrqa", "newsqa"), (bert, distilbert)), ("chemprot", bert),
              ("imdb", bert)]
    expected = []
    for data, lm in groups:
        names = ["none", "random", "whole", "span", "entity", "punct", "nmg", "nmg-paper"]
        names.append("random,--p=0.05,--epochs=3")
        if (data, lm) == ("newsqa", distilbert):
            names += ["nmg-alone", "nmg-fresh"]
        expected += itertools.product([data], [lm], names, [0])
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    rows = [(line["dataset"], line["lm"], line["row"], line["seed"]) for line in lines]
    assert sorted(rows) == sorted(expected)

    # The tables of the report, by data set and LM.
    _, *parts = (out / "report/results.md").read_text().split("\n## ")
    assert sorted(part.partition("\n")[0] for part in parts) == sorted(map(", ".join, groups))
    for part in parts:
        names = set(re.findall(r"^\| ([^|]+) \|.* 1 \|", part, re.MULTILINE))
        ablations = {"nmg-alone", "nmg-fresh"}
        assert names - ablations == {"none", "random", "whole", "span", "entity", "punct", "nmg", "nmg-paper",
                                     "random,--p=0.05,--epochs=3"}
        assert (names >= ablations) == part.startswith(f"newsqa, {distilbert}")
