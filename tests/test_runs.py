"""Flags, atomic files, the folder of a run; what a user may get wrong, of all scripts."""
import errno
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from unittest.mock import Mock

import pytest
import torch
from conftest import TEXTS, call, names, succeed, write_rows

from support import checkpoints, runs
from support.runs import Run, UserError, parse_flags

# ---------------------------------------------------------------- flags


@dataclass
class Config:
    lm: str = "tiny"                # the advice of --lm
    masker: str = "random"
    p: float | None = None
    epochs: int | None = 3
    lr: float = 2e-5
    seed: int = 0
    remask: bool = True
    out: str | None = None
    preset: str | None = None
    count: int = 3                  # flags of a fork, which runs.py does not know
    weight: float = 0.5


@pytest.mark.parametrize(("args", "expected"), [
    (["--lm=bert", "--p=0.2", "--remask=False"], {"lm": "bert", "p": 0.2, "remask": False}),
    (["--lm", "bert", "--p", "0.2", "--remask"], {"lm": "bert", "p": 0.2, "remask": True}),
    (["--p=None", "--epochs", "None"], {"p": None, "epochs": None}),
    # what looks like another type stays the text that it is
    (["--lm=007", "--masker=None"], {"lm": "007", "masker": "None"}),
    # FOLDER/ is FOLDER, but / stays /
    (["--out=runs/x/", "--lm=/"], {"out": "runs/x", "lm": "/"}),
    # ~ is the home directory where a path begins, and nowhere else
    (["--masker=nmg:~/x", "--lm=~/a,~/b"], {"masker": "nmg:/home/me/x", "lm": "/home/me/a,/home/me/b"}),
    (["--out=x~/~y", "--lm=./~"], {"out": "x~/~y", "lm": "./~"}),
    # a flag of one's own may have any value
    (["--count=-2", "--weight=-1.5"], {"count": -2, "weight": -1.5}),
])
def test_flags(args, expected, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_flags(Config, args) == Config(**expected)


def test_the_toy_worlds_values_are_those_of_flags_that_are_not_given(tmp_path, capsys):
    """Where the LM is `tiny`, or was made from it. Also a flag that is given its default value counts."""
    tiny = {"epochs": 9, "lr": 0.5, "pairs": 4}
    cfg = parse_flags(Config, ["--epochs=3"], tiny)
    assert (cfg.epochs, cfg.lr) == (3, 0.5)
    assert "toy world's values: --lr=0.5\n" in capsys.readouterr().out
    assert parse_flags(Config, ["--lm=bert"], tiny) == Config(lm="bert")
    for base, lr in (("tiny", 0.5), ("bert", 2e-5)):
        Run(tmp_path / base, {}).finish(base_model=base)
        assert parse_flags(Config, [f"--lm={tmp_path / base}"], tiny).lr == lr


@pytest.mark.parametrize(("value", "expected"), [
    ("/home/me/lm", ".../lm"), ("/data", ".../data"), ("runs/lm", "runs/lm"), ("hf:a/b:c", "hf:a/b:c"),
    ("nmg:/home/me/a,/b/c", "nmg:.../a,.../c"), ({"policy": {"lm": "/a/b"}}, {"policy": {"lm": ".../b"}}),
])
def test_settings_without_the_folders_of_a_machine(value, expected):
    assert runs.portable(value) == runs.portable(expected) == expected


def test_what_an_lm_was_made_from(tmp_path):
    """Also where the folders between are gone."""
    (tmp_path / "own").mkdir()
    Run(tmp_path / "next", {"lm": ".../gone"}).finish(base_model="a/b")
    for lm, base in (("a/b", "a/b"), (tmp_path / "own", ".../own"), (tmp_path / "next", "a/b")):
        assert runs.base_of(str(lm)) == base


def test_a_preset_comes_after_what_is_given_and_before_the_toy_worlds(capsys):
    presets = {"small": {"epochs": 7, "lr": 0.1, "seed": 5}}
    cfg = parse_flags(Config, ["--preset=small", "--seed=0"], {"lr": 0.5, "p": 0.2}, presets)
    assert (cfg.epochs, cfg.lr, cfg.seed, cfg.p) == (7, 0.1, 0, 0.2)
    assert "--preset=small gives these flags their values: --epochs=7 --lr=0.1\n" in capsys.readouterr().out
    assert parse_flags(Config, ["--lm=bert"], None, presets) == Config(lm="bert")
    with pytest.raises(UserError, match="--preset=smal: no such preset; did you mean 'small'"):
        parse_flags(Config, ["--preset=smal"], None, presets)


@pytest.mark.parametrize(("error", "code", "said"), [
    (UserError("this LM\nis broken"), 2, "error: this LM is broken\n"),
    (KeyboardInterrupt(), 130, "\nstopped; the same command goes on from its last checkpoint, if any\n"),
    (RuntimeError("CUDA out of memory. Tried 20 GiB.\nmore"), 2, "error: CUDA out of memory. Tried 20 GiB.;"),
    (MemoryError("Unable to allocate 9 GiB"), 2, "error: Unable to allocate 9 GiB; a small"),
    (RuntimeError("can't allocate memory"), 2, "; a small --micro_batch or shorter pieces need less\n"),
    (PermissionError(errno.EACCES, "Permission denied", "/x/o"), 2,
     "error: /x/o: cannot be read or written (Permission denied); choose another path\n"),
])
def test_a_mistake_is_one_sentence(error, code, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x.py"])
    with pytest.raises(SystemExit) as stopped:
        runs.start(Mock(side_effect=error), Config)
    assert stopped.value.code == code
    printed = capsys.readouterr().err
    assert said in printed and printed.strip().count("\n") == 0


def test_a_terminal_that_is_not_utf_8_shows_names_in_another_way(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "argv", ["x.py"])
    runs.start(lambda cfg: print("é"), Config)
    out.flush()
    assert out.buffer.getvalue() == b"\\xe9\n"


def test_a_defect_of_the_program_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py"])
    with pytest.raises(FileNotFoundError):
        runs.start(lambda cfg: open("nowhere"), Config)


def test_a_script_has_help(tmp_path):
    """Its docstring, all flags with their advice, and the toy world's values."""
    shown = succeed("pretrain.py", "--lm=broken", "--help", cwd=tmp_path)
    for part in ("python pretrain.py --", "seed: int = 0", "With --lm=tiny: --"):
        assert part in shown.stdout
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- files

def test_atomic_write_that_fails_leaves_the_old_file(tmp_path):
    file = tmp_path / "file.txt"
    file.write_text("old")
    # What the block does with other files keeps its traceback.
    with pytest.raises(FileNotFoundError), runs.atomic_write(file) as partial:
        partial.write_text("half")
        (tmp_path / "nowhere").read_text()
    assert file.read_text() == "old" and names(tmp_path) == ["file.txt"]


def test_atomic_write_of_a_folder_begins_anew(tmp_path):
    """What a killed process left of a folder does not come into the next."""
    (tmp_path / ".folder.partial/half").mkdir(parents=True)
    with runs.atomic_write(tmp_path / "folder") as partial:
        (partial / "whole").mkdir(parents=True)
    assert names(tmp_path) == ["folder"]
    assert names(tmp_path / "folder") == ["whole"]


def test_a_link_stays_a_link(tmp_path):
    """Its target gets the content."""
    (tmp_path / "link").symlink_to("target")
    runs.write_rows(tmp_path / "link", [{"a": 1}])
    assert runs.read_rows(tmp_path / "target") == [{"a": 1}] and (tmp_path / "link").is_symlink()


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    """Written by Python and torch, with errors of their own; what was there stays."""
    monkeypatch.setattr(runs, "remove", lambda path: None)
    state = {"a": torch.zeros(100_000)}
    writers = {"rows": lambda file: runs.write_rows(file, 1000 * [{"a": "text"}]),
               "state": lambda file: checkpoints.save_state(file, state)}
    for name, write in writers.items():
        (tmp_path / name).write_text("old")
        (tmp_path / f".{name}.partial").symlink_to("/dev/full")
        with pytest.raises((OSError, RuntimeError)) as stopped:
            write(tmp_path / name)
        said = runs.sentence_of(stopped.value)
        assert said == "the disk is full; free some space, and start the same command again"
        assert (tmp_path / name).read_text() == "old"


def test_only_files_are_written_over(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: is no regular file"):
        runs.write_rows(tmp_path / "pipe", [])
    assert (tmp_path / "pipe").is_fifo()


def test_rows_of_a_file(tmp_path):
    """A line separator within a text is none of the file."""
    (tmp_path / "rows").write_text('{"a": "x\u2028y"}\r\n{"a": 1}', encoding="utf-8")
    assert runs.read_rows(tmp_path / "rows") == [{"a": "x\u2028y"}, {"a": 1}]
    assert runs.read_rows(tmp_path / "nowhere") == []
    (tmp_path / "list").write_text('{"a": 1}\n[2]')
    with pytest.raises(UserError, match="list:2: not a JSON object"):
        runs.read_rows(tmp_path / "list")


# ---------------------------------------------------------------- the folder of a run

SETTINGS = {"seed": 0, "lm": ".../lm", "overlaps": (1, 2)}


@pytest.mark.parametrize(("name", "text", "said"), [
    ("run.json", '{"settings": {"se', "is cut short or damaged"),
    ("run.json", "[1]", "is cut short or damaged"),
    ("started.json", '{"masker": "whole"}', "an earlier version of this code wrote it"),
])
def test_a_record_that_is_not_ours_is_refused(name, text, said, tmp_path):
    """Else its masker would be lost, and its LM taken for one without further pre-training."""
    (tmp_path / "checkpoint.pt").touch()
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"{name}: {said}"):
        Run(tmp_path, SETTINGS)


@pytest.mark.parametrize(("state", "before", "now", "expected"), [
    # Nothing would be lost, as after a mistake that shows at the start.
    ("begun", {}, {"seed": 3}, "goes on"),
    ("stopped", {}, {"seed": 3}, "holds another run (seed=0 there, 3 here); remove it, or"),
    ("finished", {}, {"seed": 3}, "holds another run (seed=0 there, 3 here); remove it, or"),
    # A flag that the code did not have is an edit of it.
    ("stopped", {}, {"clip": 0.2}, "goes on"),
    ("finished", {}, {"clip": 0.2}, "(clip=None there, 0.2 here)"),
    # The flag that may grow.
    ("stopped", {"episodes": 2}, {"episodes": 3}, "goes on"),
    ("finished", {"episodes": 3}, {"episodes": 1}, "(episodes=3 there, 1 here)"),
    ("finished", {"episodes": 3}, {"episodes": 5, "clip": 0.2}, "goes on"),
    ("finished", {"episodes": 3}, {"episodes": 5, "seed": 1}, "(seed=0 there, 1 here)"),
    # Killed while it was made longer: what lies there is between two lengths.
    ("killed longer", {"episodes": 2}, {"episodes": 2}, "goes on"),
    ("killed longer", {"episodes": 2}, {"episodes": 4}, "goes on"),
    ("killed longer", {"episodes": 2}, {"episodes": 4, "seed": 1}, "(seed=0 there, 1 here)"),
])
def test_what_a_command_finds_in_its_folder(state, before, now, expected, tmp_path):
    folder = tmp_path / "o"
    longer = now.get("episodes", 0) > before.get("episodes", 0)
    run = Run(folder, SETTINGS | before)
    kept = set()
    if state == "stopped":
        (folder / "checkpoint.pt").touch()
        kept = {"checkpoint.pt"}
    if state in ("begun", "stopped"):
        run.lock.release()
    else:
        run.finish()
    if state == "killed longer":
        Run(folder, SETTINGS | {"episodes": 4}, longer=True).lock.release()
        (folder / "plays").mkdir()
        kept = {"plays"}
        assert runs.read_run(folder) == {}
    if expected != "goes on":
        with pytest.raises(UserError, match=re.escape(expected)):
            Run(folder, SETTINGS | now, longer)
        return
    # What a killed process left.
    (folder / ".model.partial").mkdir()
    run = Run(folder, SETTINGS | now, longer)
    assert not run.done
    assert json.loads((folder / "started.json").read_text())["settings"] == run.settings
    run.finish()
    assert runs.read_run(folder)["settings"] == run.settings
    # A run that is made longer goes on from these.
    assert {*names(folder)} == {"run.json"} | kept
    assert Run(folder, SETTINGS | now).done
    # A new flag that is off makes no other run of it.
    assert Run(folder, SETTINGS | now | {"added_later": False}).done


def test_a_run_that_another_process_has_just_finished_stays(tmp_path, monkeypatch):
    """Between the look into its folder and the lock of it."""
    def acquire(lock, timeout):
        (tmp_path / "o/run.json").write_text("{}")

    monkeypatch.setattr(runs.FileLock, "acquire", acquire)
    with pytest.raises(UserError, match="another process has just finished it"):
        Run(tmp_path / "o", SETTINGS)
    assert (tmp_path / "o/run.json").exists()


def test_edited_code_goes_on_with_a_warning_that_names_both_commits(tmp_path, monkeypatch, capsys):
    """Once; whoever took part before is still named when the same code goes on again."""
    warned = []
    for code in ("aaa", "aaa", "bbb", "bbb"):
        monkeypatch.setattr(runs, "commit", lambda code=code: code)
        run = Run(tmp_path / "o", SETTINGS)
        warned.append("was made by commit aaa, and the code is now commit bbb" in capsys.readouterr().out)
        (tmp_path / "o/checkpoint.pt").touch()
        run.lock.release()
    assert warned == [False, False, True, False]
    run.finish()
    assert runs.read_run(run.folder)["commits"] == ["aaa", "bbb"]


def test_an_edit_changes_the_commit(tmp_path, monkeypatch):
    """As a repository of its own shows: the same commit, edited in two ways, and with a new file."""
    (tmp_path / "nmg").mkdir()
    (tmp_path / "x.py").write_text("a = 1\n")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y"]
    for command in (["init"], ["add", "."], ["commit", "-m", "first"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.setattr(runs, "__file__", str(tmp_path / "support/runs.py"))
    first, edited = runs.commit.__wrapped__(), set()
    for file, text in (("x.py", "a = 2\n"), ("x.py", "a = 3\n"), ("nmg/y.py", "")):
        (tmp_path / file).write_text(text)
        edited.add(runs.commit.__wrapped__())
    assert len(edited) == 3 and all(commit.startswith(f"{first}-edited-") for commit in edited)


def test_only_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="exists and is no run of this script"):
        Run(tmp_path, SETTINGS)
    assert names(tmp_path) == ["thesis.tex"]
    (tmp_path / "thesis.tex").unlink()
    # Hidden files are our own: another process has just begun, or was killed.
    (tmp_path / ".started.json.partial").touch()
    assert not Run(tmp_path, SETTINGS).done


def test_settings_are_all_flags_but_those_named():
    settings = runs.settings_of(Config(seed=4, out="runs/x"), without=("remask",), data="ab12")
    assert settings.keys() == vars(Config()).keys() - {"out", "remask"} | {"data"}
    assert settings["seed"] == 4 and settings["data"] == "ab12"


# ---------------------------------------------------------------- mistakes: one sentence each, exit code 2

WRONG = [
    ("pretrain.py --mask=random", "--mask; did you mean 'masker'? Allowed: batch_size,"),
    ("pretrain.py random", "'random' is not a flag"),
    # Fire has flags of its own behind this.
    ("pretrain.py --seed=1 -- --p=0.9", "'--' alone is not a flag"),
    ("pretrain.py --lm=", "--lm= needs a value"),
    ("pretrain.py --seed=1.5", "--seed takes int"),
    ("pretrain.py --seed", "--seed needs a value"),
    ("pretrain.py --fast=perhaps", "--fast takes True or False"),
    ("pretrain.py --p=0", "--p=0: a share"),
    ("pretrain.py --epochs=0", "--epochs=0: must be 1 or more"),
    ("pretrain.py --seed=-1", "--seed=-1: must be 0 or more"),
    ("pretrain.py --weight_decay=-1.5", "--weight_decay=-1.5: must be 0 or more"),
    ("pretrain.py --lr=inf", "--lr=inf: must be a finite number"),
    ("pretrain.py --masker=nmg:nowhere", "nowhere: no policy of train_nmg.py in this folder"),
    ("tools/study.py --plan=wrong.toml --out=a,b", "--out=a,b: must be without a comma"),
    ("pretrain.py --masker=mine.py:rars", "mine.py has no function 'rars'"),
    ("pretrain.py --dataset=toycl", "did you mean 'toycls'?"),
    ("pretrain.py --dropout=10", "--dropout=10: must be below 1"),
    ("pretrain.py --dataset=full/c.txt --eval_every=5", "full/c.txt has no dev split to look at"),
    ("pretrain.py --dataset=full/c.txt --dev_share=0.2", "full/c.txt has no train split to cut from"),
    ("pretrain.py --dataset=full", "full: no file named train, dev, test or corpus"),
    ("pretrain.py --corpus=full/c.txt", "toycls has a corpus already"),
    ("pretrain.py --read=all", "--read=all: allowed are train, corpus, both"),
    ("finetune_cls.py --dataset=two.jsonl --label=text", "--text=text --label=text: are the same column"),
    ("finetune_cls.py --label=kind", "toycls: is not read from files"),
    ("data_prep.py --dataset=emrqa", "data-use agreement"),
    ("train_nmg.py --uniform_episodes=5", "--uniform_episodes: is not read with --paper=False"),
    ("train_nmg.py --paper --exploration=3", "--exploration: is not read with --paper=True"),
    ("train_nmg.py --dataset=full/c.txt", "has no labelled examples to learn a policy from"),
    ("train_nmg.py --episodes=0", "nothing is played, so --plays=FOLDER must name plays"),
    ("finetune_cls.py --dataset=toyqa", "holds 'qa' data, not 'cls'; it is for finetune_qa.py"),
    ("finetune_cls.py --split=tset", "--split=tset: must be dev or test"),
    ("finetune_cls.py --dataset=two.jsonl --split=test", "has no test split"),
    ("finetune_cls.py --warmup=10", "--warmup=10: a share of the steps, from 0 to 1"),
    ("finetune_cls.py --dataset=one.jsonl", "all texts of train have the label 'a'; two labels are"),
    ("finetune_cls.py --labelled=1", "all 1 labelled texts of train have the label"),
    ("data_prep.py --dataset=two.jsonl --dev_share=1", "--dev_share=1: leaves nothing of train; it must be"),
    ("train_nmg.py --out=a,b", "--out=a,b: must be without a comma"),
    ("finetune_cls.py --results=full/c.txt/results.jsonl", "full/c.txt: cannot be read or written ("),
    ("finetune_cls.py --results=/sys/x", "/sys/x.lock: cannot be read or written ("),
    ("finetune_cls.py --out=full/c.txt", "full/c.txt: cannot be read or written ("),
    ("report.py --results=no.jsonl", "--results=no.jsonl: no such file; the finetune scripts write it"),
    ("tools/toy_compare.py --out=results.jsonl", "is the picture, and must end with .png"),
    ("tools/toy_compare.py --out=two.png", "two.jsonl: holds lines of another kind, which would be lost"),
    ("tools/make_tiny.py --out=full", "--out=full: is there already; choose another folder"),
    ("tools/linear.py --dataset=two.jsonl --save_model=True", "is not kept; leave out --save_model"),
    ("tools/study.py --plan=empty.toml", "--plan=empty.toml: is empty"),
    ("tools/study.py --plan=a,b --dataset=toyqa", "--dataset=toyqa: is for one plan, and --plan has 2"),
    ("tools/figures.py --comparisons=wrong.toml", "wrong.toml: the field 'row' is missing"),
    ("tools/foretell.py --plays=a,a", "--plays=A,B: the plays of at least two runs are needed"),
    ("tools/foretell.py --plays=a,b --out=two.jsonl", "two.jsonl: holds lines of another kind"),
    ("tools/foretell.py --plays=a,b", "--plays=a: holds no plays"),
]
# What shows when the text is cut or masked, or in training, before anything is saved.
LATE = [
    ("pretrain.py --max_len=2", "a length of 2 leaves no room for text"),
    ("finetune_qa.py --max_len=3", "a window of 3 tokens leaves no room for a question"),
    ("train_nmg.py --dataset=two.jsonl --doc=source", "too few documents (1, see --doc)"),
    ("pretrain.py --dataset=full/c.txt --masker=label", "needs labels or answers in train"),
    # Its logarithm would be infinite.
    ("pretrain.py --masker=difference:zero.txt", "zero.txt:2: must be a word, a tab, and how often"),
    # After one step all weights are finite, and no output is.
    ("pretrain.py --dataset=full/c.txt --max_steps=1 --lr=1e30", "the LM: its loss is nan; a smaller"),
    ("finetune_cls.py --dataset=two.jsonl --epochs=1 --batch_size=1000 --lr=1e30",
     "the predictions became infinite or NaN; a smaller"),
]


@pytest.mark.parametrize(("command", "said"), WRONG + LATE, ids=[command for command, _ in WRONG + LATE])
def test_wrong_flags(command, said, tmp_path):
    """Nothing is written but an empty file of results, and what says that a run was begun where the mistake
    shows late."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full/c.txt").write_text("bird\n" * 20)
    write_rows(tmp_path / "one.jsonl", [{"text": text, "label": "a"} for text in TEXTS * 5])
    write_rows(tmp_path / "two.jsonl", [{"text": text, "label": text[:1], "source": 1} for text in TEXTS * 5])
    (tmp_path / "empty.toml").touch()
    (tmp_path / "mine.py").touch()
    (tmp_path / "zero.txt").write_text("cat\t3\nthe\t0\n")
    (tmp_path / "wrong.toml").write_text("[[table]]\nname = 'x'\n")
    before = names(tmp_path)
    script, *flags = command.split()
    result = call(script, *flags, cwd=tmp_path)
    assert result.returncode == 2 and said in result.stderr, result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    written = {*names(tmp_path)} - {*before, "results.jsonl", "results.jsonl.lock"}
    assert not written or (written == {"runs"} and (command, said) in LATE)
    # What begins with a point is the lock of the folder.
    assert {file.name for file in tmp_path.glob("runs/*/[!.]*")} <= {"started.json"}
    assert names(tmp_path / "full") == ["c.txt"] and runs.read_rows(tmp_path / "results.jsonl") == []
