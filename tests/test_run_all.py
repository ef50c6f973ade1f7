"""run_all.sh: which commands it makes; a failed row says so and the rest go on; nothing is run twice."""
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from conftest import ROOT, succeed

import maskers
from support import runs
from tools import cost

# What the user has set for run_all.sh is not for the tests.
CHOSEN = re.compile("QA|CLS|LMS|MASKERS|SEEDS|POLICIES|PROCESSES|JOBS|OUT|QUICK|PYTHON|[A-Z]+_FLAGS")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not CHOSEN.fullmatch(name)}


def run_all(*flags, cwd=None, **env):
    """cwd: None: an empty folder, so that no test sees runs of the clone, of the user, or of another test."""
    cwd = cwd or tempfile.mkdtemp(prefix="nmg-test-")
    return subprocess.run(["bash", str(ROOT / "run_all.sh"), *flags], cwd=cwd, capture_output=True, text=True,
                          timeout=600, env=ENVIRONMENT | env)


def listed(cwd=None, **env):
    """The commands that are left to do, in a folder without runs unless it is another."""
    result = run_all("--list", cwd=cwd, **env)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


# ---------------------------------------------------------------- which commands

@pytest.fixture(scope="module")
def papers_tables():
    """What --list says of all of them."""
    return run_all("--list")


def test_every_row_of_the_papers_tables(papers_tables):
    commands = papers_tables.stdout.splitlines()
    policies = [c for c in commands if "train_nmg.py" in c]
    rows = [c for c in commands if "finetune_" in c]
    assert commands == policies + rows
    # Policies of tables 1, 2 and 3; rows of three seeds.
    assert len(policies) == 3 * (2 * 4 + 2 * 2 + 2)
    assert len(rows) == 3 * (4 * 10 + 2 * 10 + 2) == len(set(rows))
    # Two tables of QA, one of classification, with two LMs and with one
    assert sum("--row=random,--p=0.05,--epochs=3" in row for row in rows) == 3 * 6
    made = {c.partition("--out=")[2] for c in policies}
    used = {row.partition("--masker=nmg:")[2].partition(" ")[0] for row in rows}
    assert used - {""} == made
    # Drawn tokens are those of the policies of nmg.
    drawn = {row.partition("--masker=sampled:")[2].partition(" ")[0] for row in rows}
    assert drawn - {""} == {folder for folder in made if re.search(r"-nmg-\d$", folder)}


@pytest.mark.parametrize(("env", "count"), [
    # The linear baseline is a row of classification.
    ({"QA": "newsqa", "CLS": "my.csv", "LMS": "x y", "MASKERS": "linear random", "SEEDS": "3"}, 2 * 2 + 2),
    # With several policies of each kind: what a single one gains before it has learned is luck.
    ({"QUICK": "1"}, 3 * (6 + 9 + 9 + 2)),
])
def test_subsets(env, count):
    assert len(listed(**env)) == count


@pytest.mark.parametrize("name", ["x&touch${IFS}PWNED;$(touch${IFS}PWNED)", "it's", 'a"b\\c', "*", "~é#!"])
def test_a_name_is_no_code(name, stub, tmp_path):
    """Of a data set, an LM, a masker, or in flags: every script is given it as it is."""
    (tmp_path / "a_file").touch()
    asked = stub | {"CLS": name, "LMS": name, "MASKERS": f"{name}:f,--spacy_model={name}",
                    "PRETRAIN_FLAGS": f"--doc={name}", "FINETUNE_FLAGS": f"--doc={name}"}
    # What is listed for a scheduler is what is run.
    said, = run_all("--list", cwd=tmp_path, **asked).stdout.splitlines()
    subprocess.run(["bash", "-c", said], cwd=tmp_path, env=ENVIRONMENT | stub, check=True)
    result = run_all(cwd=tmp_path, **asked | {"OUT": str(tmp_path / "o")})
    assert result.returncode == 0, result.stderr
    ran = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    given = {f"--dataset={name}", f"--doc={name}"}
    for pretrained, scored in (ran[:2], ran[2:]):
        assert given | {f"--lm={name}", f"--masker={name}:f", f"--spacy_model={name}"} <= set(pretrained)
        assert given <= set(scored)
    data, = (tmp_path / "log-data").read_text().splitlines()
    assert data.endswith(f" --dataset={name} --lm={name} --kind=cls --doc={name}")
    assert not list(tmp_path.rglob("PWNED*"))


def test_seeds_take_turns_with_policies():
    """So that the interval of a row holds for policies, too. 08, as of `seq -w 1 10`, is not octal."""
    commands = listed(CLS="chemprot", LMS="x", MASKERS="nmg random", SEEDS="0 1 2 3 08", POLICIES="2")
    learn, rows = commands[:2], commands[2:7]
    made = [c.partition("--out=")[2] for c in learn]
    assert ["--seed=0 " in learn[0], "--seed=1 " in learn[1]] == [True, True] and len(set(made)) == 2
    for policy, row in zip((0, 1, 0, 1, 0), rows, strict=True):
        assert f"--masker=nmg:{made[policy]} " in row
    assert rows[4].count("--seed=08 ") == 2


@pytest.mark.parametrize(("env", "parts"), [
    # Folders have readable names.
    ({"LMS": "google/bert_tiny", "MASKERS": "my.py:rare,--p=0.3", "SEEDS": "7"},
     ["--out=runs/tables/pretrain-my.csv-google-bert_tiny-my.py-rare---p=0.3-7 && ",
      "--results=runs/tables/results.jsonl ",
      "--out=runs/tables/score-my.csv-google-bert_tiny-my.py-rare---p=0.3-7"]),
    # A learned row has the flags with which it was learned. More flags win, its own most of all.
    ({"MASKERS": "sampled:a/b,--p=0.3", "PRETRAIN_FLAGS": "--p=0.15",
      "FINETUNE_FLAGS": "--lr=1 --label l --dev_share=0.3"},
     [" --masker=sampled:a/b --seed=0 --p=0.05 --epochs=3 --label l --dev_share=0.3 --p=0.15 --p=0.3 --out=",
      " && ", " --seed=0 --save_model=False --lr=1 --label l --dev_share=0.3 --row="]),
    # In the toy world all rows have as many epochs. A row that is not learned is called like those that are.
    ({"LMS": "tiny", "MASKERS": "nmg:a"}, [" --masker=nmg:a --seed=0 --out="]),
    ({"MASKERS": "difference:a/b"}, [" --masker=difference:a/b --seed=0 --out="]),
    # A file whose name is too long for the system ends with a checksum.
    ({"CLS": 30 * "scratch/" + "my.csv", "MASKERS": "none"}, ["--row=none", f"score-{5 * 'scratch-'}scrat-"]),
    # All scripts read the same columns.
    ({"MASKERS": "whole", "FINETUNE_FLAGS": "--text=t --label l"},
     ["pretrain.py ", " --text=t --label l ", " && ", "finetune_cls.py ", " --text=t --label l "]),
    ({"MASKERS": "linear"}, ["/tools/linear.py --dataset=my.csv --lm=x --seed=0 ", "--row=linear "]),
])
def test_the_command_of_a_row(env, parts):
    command, = listed(**{"CLS": "my.csv", "LMS": "x", "SEEDS": "0"} | env)
    assert re.search(".*".join(map(re.escape, parts)), command)


def test_what_is_learned_and_its_flags():
    """Flags of a kind of policy win; the row masks with it, and flags after a comma are its alone."""
    given = "--mlm_lr=3e-4 --self_play=True"
    commands = listed(LMS="x", QA="newsqa", MASKERS="nmg nmg-alone nmg-fresh random,--p=0.3,--epochs=2",
                      SEEDS="0", NMG_FLAGS=given, PROCESSES="3")
    learn, rows = commands[:3], commands[3:]
    # Only policies: pre-training and fine-tuning in several processes need a GPU each.
    torchrun = "python -m torch.distributed.run --standalone --nproc_per_node=3"
    assert learn[0].startswith(f"{torchrun} {ROOT}/train_nmg.py ")
    assert rows[0].startswith(f"python {ROOT}/pretrain.py ") and "torch" not in rows[0]
    script = "train_nmg.py --dataset=newsqa --lm=x --seed=0"
    where = "--out=runs/tables/policy-newsqa-x"
    # The paper's form has the paper's number of episodes, unless another one is asked for.
    paper = f"{script} --episodes=200 {given} --paper=True"
    assert learn[0].endswith(f"{script} {given} {where}-nmg-0")
    assert learn[1].endswith(f"{paper} --continual=True --self_play=False {where}-nmg-alone-0")
    assert learn[2].endswith(f"{paper} --continual=False {where}-nmg-fresh-0")
    for command, row in zip(learn, rows, strict=False):
        assert f"--masker=nmg:{command.partition('--out=')[2]} --seed=0 --p=0.05 --epochs=3 --out=" in row
    assert "--masker=random " in rows[3] and " --p=0.3 --epochs=2 " in rows[3].partition("&&")[0]
    assert "--row=random,--p=0.3,--epochs=2 " in rows[3]


def test_what_is_cut_as_dev_is_cut_in_all_stages():
    commands = listed(LMS="x", CLS="my.csv", MASKERS="nmg", SEEDS="0", FINETUNE_FLAGS="--dev-share=0.3")
    stages = " && ".join(commands).split(" && ")
    assert len(stages) == 3 and all(" --dev-share=0.3 " in stage for stage in stages)


def test_the_mean_of_policies():
    """Each seed draws from all of them; sampled and nmg share them."""
    *learn, one, other = listed(CLS="my.csv", LMS="x", MASKERS="mean", SEEDS="0 4", POLICIES="2")
    folders = [command.partition("--out=")[2] for command in learn]
    assert folders == [f"runs/tables/policy-my.csv-x-nmg-{i}" for i in range(2)]
    for row in (one, other):
        assert f"--masker=sampled:{','.join(folders)} " in row and "--row=mean " in row
    assert listed(CLS="my.csv", LMS="x", MASKERS="nmg", SEEDS="0 1", POLICIES="2")[:2] == learn


# ---------------------------------------------------------------- what they cost

def test_the_price_of_the_papers_tables_is_that_of_the_docs(papers_tables):
    _, _, *table, total = papers_tables.stderr.splitlines()
    assert len(table) == 2 + 6 + 1
    assert "\n".join(table) in (ROOT / "docs/speed.md").read_text(encoding="utf-8")
    # What the time limit of a job must be above.
    longest = max(cost.hours_of(command)[3] for command in papers_tables.stdout.splitlines())
    assert f"the longest command: {longest:.1f}" in total and longest > 3


@pytest.mark.parametrize(("masker", "env", "policies", "rows"), [
    # The formula of docs/speed.md: 36 plays of 200 blocks, 200 texts in 5 epochs, and 417 scored texts.
    ("nmg", {}, 36 * (0.049 * (3 * 200 + 5 * 200) / 16 + 1.1e-6 * 417 * 70 + 0.6), 3 * 4169 + 3 * 4169),
    ("nmg-alone", {"NMG_FLAGS": "--episodes=10"}, 20 * (0.049 * 1600 / 16 + 0.6 + 0.03), 6 * 4169),
    ("random", {"LMS": "distilbert-base-uncased"}, 0, 0.5 * 4 * 4169),
    ("none", {}, 0, 3 * 4169),
    ("none", {"FINETUNE_FLAGS": "--epochs=20"}, 0, 20 * 4169)])
def test_the_price_of_one_row(masker, env, policies, rows):
    """In seconds."""
    asked = {"CLS": "chemprot", "LMS": "bert-base-uncased", "MASKERS": masker, "SEEDS": "0"} | env
    seconds = {True: 0.0, False: 0.0}
    for command in listed(**asked):
        _, _, learns, hours = cost.hours_of(command)
        seconds[learns] += 3600 * hours
    assert seconds[True] == pytest.approx(policies, rel=0.01)
    assert seconds[False] == pytest.approx(rows * 0.049 / 16, rel=0.02)


@pytest.mark.parametrize("env", [
    {"MASKERS": "nmg", "NMG_FLAGS": "--preset=small_tasks"}, {"MASKERS": "linear"},
    {"MASKERS": "none", "FINETUNE_FLAGS": "--labelled=100"}])
def test_what_has_an_unknown_price(env):
    with pytest.raises(KeyError):
        cost.hours_of(listed(CLS="chemprot", LMS="bert-base-uncased", SEEDS="0", **env)[0])


@pytest.mark.parametrize(("env", "said"), [
    ({"SEEDS": "0 1 2 3 4 5"}, "6 seeds can show nothing: a comparison of 3 rows needs 7 "),
    ({"SEEDS": "0 1 2 3 4 5 6", "POLICIES": "7"}, None),
    ({"SEEDS": "0 1 2 3 4 5 6"}, "policies behind 7 seeds: 3; nothing will be claimed of learned masks"),
    # All of them have policy 0.
    ({"SEEDS": "0 3 6 9 12 15 18"}, "policies behind 7 seeds: 1; nothing will be claimed of learned masks"),
    ({"SEEDS": "0", "MASKERS": "none whole"}, None)])
def test_how_many_seeds_can_show_something(env, said):
    """With which report.py would find p <= .05, Holm's first step, if all of them agreed."""
    asked = {"QA": "my.json", "LMS": "x", "MASKERS": "random nmg whole"} | env
    _, *lines = run_all("--list", **asked).stderr.splitlines()
    assert lines == [] if said is None else lines[0].startswith(said)


@pytest.mark.parametrize(("env", "said"), [
    ({"MASKERS": "random nmgg,--p=1"}, f"no such masker. Allowed: .* {' '.join(maskers.MASKERS)}"),
    # A helper in maskers.py
    ({"MASKERS": "pick"}, "MASKERS=pick: no such masker"),
    ({"MASKERS": "my.py:f"}, "no such file: my.py"),
    ({"MASKERS": "random ,--p=1"}, "must be like none random,--p=0.3 whole"),
    ({"MASKERS": "random,whole"}, "must be like none random,--p=0.3 whole"),
    ({"MASKERS": "nmg:a/b nmg:a-b"}, r"two rows would share the folders \*-nmg-a-b-\*"),
    ({"CLS": "a a-b", "LMS": "c b-c"}, r"two pairs of data and LM would share the folders \*-a-b-c-\*"),
    # The shell leaves ~ as it is in quotes.
    ({"OUT": "~/runs"}, "must be without spaces or ~"),
    ({"OUT": "a,b"}, "must be without a comma"),
    ({"JOBS": "0"}, "must be 1 or more"),
    ({"PROCESSES": "4"}, "must be 1, 2 or 3"),
    ({"FINETUNE_FLAG": "--lr=1"}, "FINETUNE_FLAG=--lr=1: is not read"),
    ({"SEED": "5"}, "SEED=5: is not read; bash run_all.sh --help names what is"),
    ({"SEEDS": "0,1,2"}, "must be numbers: 0 1 2"),
    ({"QUICK": "yes"}, "must be 1 or 0"),
    ({"PRETRAIN_FLAGS": "p=0.3"}, "flags begin with --"),
    ({"PRETRAIN_FLAGS": "--lr=1 --epoch=3"}, "--epoch is no flag of pretrain.py"),
    ({"NMG_FLAGS": "--label=x --episode 9"}, "--episode is no flag of train_nmg.py"),
    ({"MASKERS": "none random,--p=1,--epoch=3"}, "--epoch is no flag of pretrain.py"),
    ({"FINETUNE_FLAGS": "--seed=5"}, "this script sets --seed itself"),
])
def test_mistakes(env, said, tmp_path):
    """Nothing is run, and no folder is made."""
    result = run_all(cwd=tmp_path, **env)
    assert result.returncode == 2 and re.fullmatch(f"error: .*{said}.*\n", result.stderr), result.stderr
    assert not list(tmp_path.iterdir())


def test_help_is_the_comment_at_the_top():
    shown = run_all("--help").stdout
    assert shown.startswith("Every row of the paper's tables") and "set -ef" not in shown
    result = run_all("--lits")
    assert result.returncode == 2 and "--lits: give --list" in result.stderr


def test_download_fetches_and_runs_nothing_else(stub, tmp_path):
    flags = "--text=t --dev_share=0.3 --split=dev"
    asked = {"QA": "q", "CLS": "c", "LMS": "x", "FINETUNE_FLAGS": f"--epochs=2 {flags}",
             "PRETRAIN_FLAGS": "--epochs=3 --corpus=c.txt"}
    result = run_all("--download", **stub | asked)
    assert result.returncode == 0, result.stderr
    question, text = (tmp_path / "log-data").read_text().splitlines()
    assert question.endswith(f"/data_prep.py --dataset=q --lm=x --kind=qa {flags} --corpus=c.txt")
    assert text.endswith(f"/data_prep.py --dataset=c --lm=x --kind=cls {flags} --corpus=c.txt")
    fetched = (tmp_path / "log").read_text().splitlines()
    # The LM, for questions and for classes.
    assert fetched.count("    load_lm(sys.argv[1])") == sum(line.endswith('") x') for line in fetched) == 2
    # For the row entity.
    assert fetched[-1] == "-m spacy download en_core_web_sm"
    assert not (tmp_path / "out").exists()
    # Python is a stand-in here. What the real one imports is there.
    code = re.search("fetch_lm='(import sys.*)\ntry:", (ROOT / "run_all.sh").read_text(), re.DOTALL)[1]
    exec(code)


# ---------------------------------------------------------------- running them

STUB = """#!/usr/bin/env bash
case "$*" in
    *cost.py*) exit ;;
    *data_prep.py*)
        echo "$@" >> "$STUB_LOG-data"
        case "$*" in *--dataset=unreadable*) echo "error: no column"; exit 2 ;; esac
        exit ;;
    *"import en_core_web_sm"*) exit 1 ;;
    *show_masks*) echo "$PYTHONPATH $@" >> "$STUB_LOG-masks"; exit ;;
    *report.py*) [ -z "$REAL_PYTHON" ] || exec $REAL_PYTHON "$@"; exit ;;
    *train_nmg.py*) sleep 0.5 ;;
esac
echo "$@" >> "$STUB_LOG"
case "$*" in
    *--dataset=bad*) echo wrong; exit 3;;
    *--dataset=odd*) echo "WARNING: odd";;
    *slow*) sleep 2; echo ended >> "$STUB_LOG";;
esac
command="$*"
out=${command##*--out=}
mkdir -p $out
echo "{}" > $out/run.json
results=${command##*--results=}
[[ $command != *--results=* ]] || echo "{\\"predictions\\": \\"$out/x\\"}" >> ${results%% *}
"""


@pytest.fixture
def stub(tmp_path):
    """A PYTHON that writes down what it was asked to run, and leaves run.json there as our scripts do. It
    fails for the data set `bad`, and is slow for `slow`. Given REAL_PYTHON it runs report.py by that."""
    file = tmp_path / "python"
    file.write_text(STUB)
    file.chmod(0o755)
    return {"PYTHON": str(file), "STUB_LOG": str(tmp_path / "log"), "OUT": str(tmp_path / "out"), "LMS": "x",
            "QA": "", "SEEDS": "0"}


def scripts_that_ran(tmp_path):
    return [Path(line.split()[0]).name for line in (tmp_path / "log").read_text().splitlines()]


def test_what_fails_is_told_at_once_and_again_at_the_end(stub, tmp_path):
    """The others go on. Of data that cannot be read no row and no policy is tried."""
    asked = stub | {"CLS": "bad odd unreadable", "MASKERS": "none nmg", "REAL_PYTHON": sys.executable}
    result = run_all(**asked, FINETUNE_FLAGS="--epochs=3 --label stars")
    assert result.returncode == 1 and "2 policies and 4 rows are left" in result.stdout
    *failed, last = [line for line in result.stderr.splitlines() if line.startswith("FAILED")]
    assert len(failed) == 2 * 4 and failed[:4] == failed[4:]
    data, _, row, _ = failed[:4]
    assert "data-unreadable-x.log" in data and "error: no column" in data
    log = tmp_path / "out/logs/score-bad-x-none-0.log"
    assert row == f"FAILED (3): {log}: wrong"
    # The stand-in for Python has left no lines that could be read.
    assert last == "FAILED: report.py"
    # What was run, and what it said.
    command, said = log.read_text().splitlines()
    assert "finetune_cls.py --dataset=bad " in command and said == "wrong"
    # bad: the policy, none and the first half of nmg; odd: the policy, none and both halves
    assert len(scripts_that_ran(tmp_path)) == 3 + 4
    *_, tried = (tmp_path / "log-data").read_text().splitlines()
    assert tried.endswith("--dataset=unreadable --lm=x --kind=cls --label stars")
    # Each warning in the logs, once for all that were given it.
    assert "\nWARNING: odd (--dataset=odd --lm=x, 4 times)\n" in result.stderr


def test_the_finished_is_skipped_and_the_unfinished_is_run_again(stub, tmp_path):
    def ran(**env):
        (tmp_path / "log").write_text("")
        assert run_all(**stub | {"CLS": "good", "MASKERS": "none nmg"} | env).returncode == 0
        return scripts_that_ran(tmp_path)

    assert ran() == ["train_nmg.py", "finetune_cls.py", "pretrain.py", "finetune_cls.py"]
    assert ran() == []
    # Who has the rows needs no policy.
    (tmp_path / "out/policy-good-x-nmg-0/run.json").unlink()
    assert ran() == []
    # As a row leaves it that was killed before it wrote its line, and then while it was fine-tuned.
    (tmp_path / "out/results.jsonl").unlink()
    assert ran() == ["train_nmg.py", "finetune_cls.py", "pretrain.py", "finetune_cls.py"]
    (tmp_path / "out/score-good-x-nmg-0/run.json").rename(tmp_path / "out/score-good-x-nmg-0/started.json")
    assert run_all("--list", **stub | {"CLS": "good", "MASKERS": "none nmg"}).stdout.count("\n") == 1
    assert ran() == ["pretrain.py", "finetune_cls.py"]
    assert ran(SEEDS="0 1", MASKERS="none") == ["finetune_cls.py"]


@pytest.mark.parametrize(("changed", "value"), [
    ("PRETRAIN_FLAGS", "--lr=2"), ("FINETUNE_FLAGS", "--lr=2"), ("NMG_FLAGS", "--p=0.5"), ("POLICIES", "2")])
def test_other_flags_need_another_folder(stub, changed, value):
    """Once a row is done. Where rows were only listed, or no data could be read, flags may be mended."""
    first = {"PRETRAIN_FLAGS": "--lr=1", "FINETUNE_FLAGS": "--lr=1", "NMG_FLAGS": "--p=1", "POLICIES": "1"}
    asked = stub | {"CLS": "good", "MASKERS": "none"} | first
    assert run_all("--list", **asked | {changed: value}).returncode == 0
    assert run_all(**asked | {changed: value, "CLS": "unreadable"}).returncode == 1
    assert run_all(**asked).returncode == 0
    for flags in ([], ["--list"]):
        refused = run_all(*flags, **asked | {changed: value})
        assert refused.returncode == 2 and "settings has other flags" in refused.stderr


@pytest.mark.skipif(not shutil.which("flock"), reason="flock is not installed")
def test_a_folder_that_is_at_work_is_refused(stub):
    """Also if only commands are at work that a killed run_all.sh has left. What is left can be listed."""
    asked = stub | {"CLS": "good", "MASKERS": "none"}
    lock = Path(stub["OUT"], "logs/.lock")
    lock.parent.mkdir(parents=True)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused = run_all(**asked)
        assert refused.returncode == 2 and "another run_all.sh is at work there" in refused.stderr
        assert run_all("--list", **asked).returncode == 0
    assert run_all(**asked).returncode == 0


def test_a_policy_is_learned_before_its_rows_whatever_names_say(stub, tmp_path):
    out = str(tmp_path / "finetune_study")
    result = run_all(**stub | {"CLS": "good", "MASKERS": "nmg", "JOBS": "2", "OUT": out})
    assert result.returncode == 0
    assert scripts_that_ran(tmp_path) == ["train_nmg.py", "pretrain.py", "finetune_cls.py"]
    shown = (tmp_path / "log-masks").read_text()
    assert f"--p=0.05 --maskers=random,sampled:{out}/policy-good-x-nmg-0 --out={out}/masks-good-x" in shown


def heed_signals():
    """What nohup, or a shell in the background, starts ignores these signals, and so would its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize(("signalled", "to_group"), [
    (signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGHUP, False)])
def test_a_signal_ends_the_rows_at_work_and_no_other_starts(signalled, to_group, stub, tmp_path):
    """Ctrl-C in a terminal is sent to all processes; a scheduler knows the script alone. Two rows at once."""
    env = ENVIRONMENT | stub | {"CLS": "slow", "MASKERS": "none", "SEEDS": "0 1 2 3 4", "JOBS": "2"}
    child = subprocess.Popen(["bash", str(ROOT / "run_all.sh")], env=env, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL, start_new_session=True,
                             preexec_fn=heed_signals)
    log = tmp_path / "log"
    while not log.exists() or len(log.read_text().splitlines()) < 2:
        time.sleep(0.05)
    send = os.killpg if to_group else os.kill
    send(child.pid, signalled)
    assert child.wait(60) == 130
    time.sleep(2.5)
    begun = log.read_text().splitlines()
    assert len(begun) == 2 and "ended" not in begun


@pytest.mark.slow
def test_rows_are_run(stub, tmp_path):
    """In the toy world, by the real scripts; after that nothing is left, and the data set has its table."""
    small = "--contexts=30 --docs=6 --mlm_epochs=1 --ft_epochs=1"
    asked = stub | {"QUICK": "1", "REAL_PYTHON": sys.executable, "LMS": "tiny", "CLS": "toycls",
                    "MASKERS": "none sampled", "NMG_FLAGS": f"--episodes=1 {small}",
                    "PRETRAIN_FLAGS": "--max_steps=2", "FINETUNE_FLAGS": "--epochs=1"}
    for command in listed(**asked):
        for part in command.split(" && "):
            _, script, *flags = shlex.split(part)
            succeed(Path(script).name, *flags, cwd=tmp_path)
    assert listed(**asked) == []
    result = run_all(cwd=tmp_path, **asked)
    assert result.returncode == 0, result.stderr
    lines = runs.read_rows(tmp_path / "out/results.jsonl")
    assert sorted(line["row"] for line in lines) == ["none", "sampled"]
    assert "## toycls, tiny\n" in result.stdout and ", as the paper prints it\n" in result.stdout
    # What the stand-in for Python was asked for besides, with the folder where modules are found.
    masks, = (tmp_path / "log-masks").read_text().splitlines()
    path, _, module, *flags = masks.split()
    assert (path, module) == (str(ROOT), "tools.show_masks")
    succeed("tools/show_masks.py", *flags, cwd=tmp_path)
    assert (tmp_path / "out/masks-toycls-tiny/masks.html").exists()
