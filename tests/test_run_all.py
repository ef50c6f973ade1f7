"""run_all.sh: which commands it makes, that a failed row says so and the rest go on, and that nothing is run twice."""
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

QUICK = {"QUICK": "1", "DATASETS": "toycls", "PYTHON": sys.executable, "PYTHONWARNINGS": "ignore"}


def run_all(*flags, **env):
    return subprocess.run(["bash", str(ROOT / "run_all.sh"), *flags], capture_output=True, text=True, env=os.environ | env, timeout=600)


def listed(**env):
    result = run_all("--list", **env)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_every_row_of_the_papers_tables():
    commands = listed()
    policies, rows = [c for c in commands if "train_nmg.py" in c], [c for c in commands if "finetune_" in c]
    assert commands == policies + rows and len(policies) == 6 + 2 + 2                      # tables 1, 2 and 3
    assert len(rows) == 3 * (6 * 7 + 2 * 7 + 2) == len(set(rows))
    assert sum("pretrain.py" not in row for row in rows) == 3 * 8                         # No PT
    assert all(row.count(f"--seed={row.rpartition('-')[2]} ") == row.count(".py ") for row in rows)
    assert sum("--self_play=False" in c for c in policies) == sum("--continual=False" in c for c in policies) == 1
    made = {c.partition("--out=")[2] for c in policies}
    assert {row.partition("--masker=nmg:")[2].partition(" ")[0] for row in rows} - {""} == made


@pytest.mark.parametrize(("env", "count"), [
    ({"DATASETS": "chemprot", "MASKERS": "none whole", "SEEDS": "0 1 2 3 4"}, 10),
    ({"LMS": "roberta-base", "DATASETS": "newsqa", "MASKERS": "nmg", "SEEDS": "7"}, 1 + 1),
    ({"LMS": "roberta-base", "DATASETS": "newsqa", "MASKERS": "nmg-alone nmg-fresh", "SEEDS": "7"}, 2 + 2),
    ({"QA": "some/folder", "CLS": "", "LMS": "x", "MASKERS": "none", "SEEDS": "0"}, 1),
])
def test_subsets(env, count):
    assert len(listed(**env)) == count


def test_paths_keep_their_names(tmp_path):
    """Data sets and LMs in other folders, by relative and by absolute paths, go into folders of their own."""
    (tmp_path / "data").mkdir()
    commands = listed(QA=f"../x/data ../x/other {tmp_path}/data2", CLS="", LMS="../lm/m-1.0 ../lm/m-1.5", MASKERS="none", SEEDS="0")
    assert len({c.rpartition("--out=")[2] for c in commands}) == len(commands) == 6
    assert run_all("--list", OUT="with space").returncode == 2


def test_raw_files_and_more_knobs(tmp_path):
    (tmp_path / "chemprot").mkdir()
    env = {"DATASETS": "chemprot", "MASKERS": "entity", "SEEDS": "0", "RAW": str(tmp_path), "SPACY_MODEL": "some_model",
           "PRETRAIN_FLAGS": "--lr=3e-4", "FINETUNE_FLAGS": "--lr=2e-4"}
    before, _, after = listed(**env)[0].partition(" && ")
    assert f"--raw={tmp_path}/chemprot --spacy_model=some_model --lr=3e-4" in before and f"--raw={tmp_path}/chemprot --lr=2e-4" in after
    three = listed(LMS="x", DATASETS="newsqa", MASKERS="nmg nmg-alone nmg-fresh", NMG_FLAGS="--mlm_lr=3e-4 --self_play=True")
    policies = [c for c in three if "train_nmg.py" in c]
    assert len(policies) == 3 and all("--mlm_lr=3e-4" in c for c in policies)
    assert [c.rindex("--self_play=False") > c.index("--self_play=True") for c in policies if "--self_play=False" in c] == [True]
    assert run_all("--lits").returncode == run_all(**env | {"MASKERS": "all"}).returncode == 2 and not listed(MASKERS="all")


def test_a_failed_row_says_so_and_nothing_is_run_twice(tmp_path):
    first = run_all(**QUICK, MASKERS="none entity", OUT=str(tmp_path), SPACY_MODEL="xx_none")
    assert first.returncode == 1 and "1 of 2 commands failed" in first.stderr and "pretrain-toycls-tiny-entity-0" in first.stderr
    assert "xx_none" in (tmp_path / "logs/score-toycls-tiny-entity-0.log").read_text() and "| No PT |" in first.stdout
    second = run_all(**QUICK, MASKERS="none entity", OUT=str(tmp_path))
    assert second.returncode == 0 and second.stdout.count("done before") == 1 and "| Entity-Random |" in second.stdout, second.stderr
    assert [json.loads(line)["masker"] for line in open(tmp_path / "results.jsonl")] == ["none", "entity"]
    third = run_all(**QUICK, MASKERS="none entity", OUT=str(tmp_path))
    assert third.returncode == 0 and third.stdout.count("done before") == 2
    assert third.stdout[third.stdout.index("| Entity"):] == second.stdout[second.stdout.index("| Entity"):]


STUB = """#!/usr/bin/env bash
echo "$@" >> "$STUB_LOG"
case "$*" in *--dataset=bad*|*report.py*) exit 3;; *slow*) sleep 2; echo ended >> "$STUB_LOG";; esac
"""


@pytest.fixture
def stub(tmp_path):
    """A PYTHON that writes down what it was asked to run, fails for the data set `bad` and for the report, and is slow for `slow`."""
    file = tmp_path / "python"
    file.write_text(STUB)
    file.chmod(0o755)
    return {"PYTHON": str(file), "STUB_LOG": str(tmp_path / "log"), "OUT": str(tmp_path / "out"), "LMS": "x", "QA": "", "SEEDS": "0"}


def test_rows_do_not_take_a_policy_that_failed(stub, tmp_path):
    result = run_all(**stub | {"CLS": "bad good", "MASKERS": "none nmg"})
    ran = (tmp_path / "log").read_text().splitlines()
    assert result.returncode == 1 and "3 of 6 commands failed" in result.stderr and result.stderr.count("NOT STARTED") == 2
    assert [line.split()[1] for line in ran if "pretrain.py" in line] == ["--dataset=good"] and sum("finetune_cls.py" in line for line in ran) == 3


@pytest.mark.parametrize("stop", [lambda child: child.terminate(), lambda child: os.killpg(child.pid, signal.SIGINT)], ids=["SIGTERM", "Ctrl-C"])
def test_when_it_is_stopped_the_row_at_work_ends_and_no_other_starts(stop, stub, tmp_path):
    child = subprocess.Popen(["bash", str(ROOT / "run_all.sh")], env=os.environ | stub | {"CLS": "slow", "MASKERS": "none", "SEEDS": "0 1 2 3 4"},
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    while not (tmp_path / "log").exists():
        time.sleep(0.05)
    stop(child)
    assert child.wait(5) == 143
    time.sleep(3)
    assert len((tmp_path / "log").read_text().splitlines()) == 1
