"""Flags, atomic files, and the folder of a run."""
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from conftest import names, succeed

from nmg import loop
from support import runs
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
    count: int = 3                  # flags of a fork, which runs.py does not know
    weight: float = 0.5
    weights: list[float] | None = None


@pytest.mark.parametrize(("args", "expected"), [
    ([], {}),
    (["--lm=bert", "--p=0.2", "--seed=3"], {"lm": "bert", "p": 0.2, "seed": 3}),
    (["--lm", "bert", "--p", "0.2", "--seed", "3"], {"lm": "bert", "p": 0.2, "seed": 3}),
    (["--p=None", "--epochs", "None"], {"p": None, "epochs": None}),
    (["--remask", "--seed=1"], {"remask": True, "seed": 1}),
    (["--remask=False"], {"remask": False}),
    # what looks like another type stays the text that it is
    (["--lm=007"], {"lm": "007"}),
    (["--lm=None"], {"lm": "None"}),
    # FOLDER/ is FOLDER, but / stays /
    (["--out=runs/x/", "--lm=/"], {"out": "runs/x", "lm": "/"}),
    # ~ is the home directory where a path begins, and nowhere else
    (["--out=~/x/", "--lm", "~"], {"out": "/home/me/x", "lm": "/home/me"}),
    (["--masker=nmg:~/x", "--lm=~/a,~/b"], {"masker": "nmg:/home/me/x", "lm": "/home/me/a,/home/me/b"}),
    (["--out=x~/~y", "--lm=./~"], {"out": "x~/~y", "lm": "./~"}),
    # a flag of one's own may have any value
    (["--count=-2", "--weight=-1.5"], {"count": -2, "weight": -1.5}),
])
def test_flags(args, expected, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_flags(Config, args) == Config(**expected)


@pytest.mark.parametrize(("args", "said"), [
    (["--mask=random"], "unknown flag --mask; did you mean 'masker'? Allowed: count, epochs, lm, lr, masker"),
    (["random"], "'random' is not a flag: write --name=value"),
    # Where Fire has flags of its own, and another call.
    (["--seed=1", "--", "--p=0.9"], "'--' alone is not a flag, and none may stand behind it"),
    (["--completion"], "unknown flag --completion; Allowed"),
    (["--lm="], "--lm= needs a value"),
    (["--seed=1.5"], "--seed takes int, not '1.5'"),
    (["--seed"], "--seed needs a value: --seed=..."),
    (["--remask=perhaps"], "--remask takes True or False, not 'perhaps'"),
    (["--p=0"], "--p=0: a share must be above 0 and at most 1"),
    (["--epochs=0"], "--epochs=0: must be 1 or more"),
    (["--seed=-1"], "--seed=-1: must be 0 or more"),
    (["--lr=inf"], "--lr=inf: must be a finite number"),
    (["--weights=1,2"], "--weights: a flag must be a bool, int, float or str"),
])
def test_wrong_flags(args, said):
    with pytest.raises(UserError) as error:
        parse_flags(Config, args)
    assert said in str(error.value)


def test_the_toy_worlds_values_are_those_of_flags_that_are_not_given(tmp_path, capsys):
    """Where the LM is `tiny`, or was made from it. Also a flag that is given its default value counts."""
    tiny = {"epochs": 9, "lr": 0.5, "pairs": 4}
    cfg = parse_flags(Config, ["--epochs=3"], tiny)
    assert (cfg.epochs, cfg.lr) == (3, 0.5)
    assert "toy world's values: --lr=0.5\n" in capsys.readouterr().out
    assert parse_flags(Config, ["--lm=bert"], tiny) == Config(lm="bert")
    for lm, lr in (("tiny", 0.5), ("bert", 2e-5)):
        Run(tmp_path / lm, {"lm": lm}).finish()
        # What was made of what was made of it.
        Run(tmp_path / f"{lm}-twice", {"lm": str(tmp_path / lm)}).finish()
        assert parse_flags(Config, [f"--lm={tmp_path / lm}-twice"], tiny).lr == lr


@pytest.mark.parametrize(("value", "expected"), [
    ("/home/me/lm", ".../lm"), ("/data", ".../data"), ("runs/lm", "runs/lm"), ("hf:a/b:c", "hf:a/b:c"),
    ("nmg:/home/me/a,/b/c", "nmg:.../a,.../c"), ({"policy": {"lm": "/a/b"}}, {"policy": {"lm": ".../b"}}),
])
def test_settings_without_the_folders_of_a_machine(value, expected):
    assert runs.portable(value) == runs.portable(expected) == expected


def test_what_an_lm_was_made_from(tmp_path):
    """Also where the folders between are gone."""
    (tmp_path / "own").mkdir()
    for lm, base in (("tiny", "tiny"), ("a/b", "a/b"), (str(tmp_path / "own"), ".../own")):
        assert runs.base_of(lm) == base
        Run(tmp_path / base[-3:], {"lm": ".../gone"}).finish(base_model=runs.base_of(lm))
        assert runs.base_of(str(tmp_path / base[-3:])) == base
    # Two folders, each made from the other, as far as they say.
    for one, other in (("one", "two"), ("two", "one")):
        Run(tmp_path / one, {"lm": str(tmp_path / other)}).finish()
    assert runs.base_of(str(tmp_path / "one")) == ".../one"


def test_a_preset_comes_after_what_is_given_and_before_the_toy_worlds(capsys):
    @dataclass
    class Preset(Config):
        preset: str | None = None

    presets = {"small": {"epochs": 7, "lr": 0.1, "seed": 5}}
    cfg = parse_flags(Preset, ["--preset=small", "--seed=0"], {"lr": 0.5, "p": 0.2}, presets)
    assert (cfg.epochs, cfg.lr, cfg.seed, cfg.p) == (7, 0.1, 0, 0.2)
    assert "--preset=small gives these flags their values: --epochs=7 --lr=0.1\n" in capsys.readouterr().out
    assert parse_flags(Preset, ["--lm=bert"], None, presets) == Preset(lm="bert")
    with pytest.raises(UserError, match="--preset=smal: no such preset; did you mean 'small'"):
        parse_flags(Preset, ["--preset=smal"], None, presets)


@pytest.mark.parametrize(("error", "code", "said"), [
    (UserError("this LM\nis broken"), 2, "error: this LM is broken\n"),
    (KeyboardInterrupt(), 130, "\nstopped; the same command goes on from its last checkpoint, if any\n"),
    (RuntimeError("CUDA out of memory. Tried 20 GiB.\nmore"), 2, "error: CUDA out of memory. Tried 20 GiB.;"),
    (RuntimeError("can't allocate memory"), 2, "; a small --micro_batch or shorter pieces need less\n"),
])
def test_a_mistake_is_one_sentence(error, code, said, monkeypatch, capsys):
    def main(cfg):
        raise error

    monkeypatch.setattr(sys, "argv", ["x.py"])
    with pytest.raises(SystemExit) as stopped:
        runs.start(main, Config)
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
    """Also where a fork opens a file that is not there."""
    def broken(cfg):
        raise FileNotFoundError

    monkeypatch.setattr(sys, "argv", ["x.py"])
    with pytest.raises(FileNotFoundError):
        runs.start(broken, Config)


@pytest.mark.parametrize("script", ["pretrain.py", "finetune_cls.py", "finetune_qa.py", "train_nmg.py"])
def test_every_script_has_help(script, tmp_path):
    """Its docstring, all flags with their advice, and the toy world's values."""
    shown = succeed(script, "--lm=broken", "--help", cwd=tmp_path)
    assert f"python {script} --" in shown.stdout and "seed: int = 0" in shown.stdout
    assert "With --lm=tiny: --" in shown.stdout
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- files

def test_help_of_which_a_pipe_reads_nothing(monkeypatch):
    """`--help | head` may close the pipe early."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "argv", ["x.py", "--help"])
        runs.start(test_flags, Config)


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
    left = tmp_path / ".folder.partial"
    left.mkdir()
    (left / "half").touch()
    with runs.atomic_write(tmp_path / "folder") as partial:
        partial.mkdir()
        (partial / "whole").touch()
    assert names(tmp_path) == ["folder"]
    assert names(tmp_path / "folder") == ["whole"]


def test_a_link_stays_a_link(tmp_path):
    """Its target gets the content, also where it is a link itself, or not there yet."""
    (tmp_path / "second").symlink_to("target")
    (tmp_path / "first").symlink_to(tmp_path / "second")
    for rows in ([{"a": 1}], [{"a": 2}]):
        runs.write_rows(tmp_path / "first", rows)
        assert runs.read_rows(tmp_path / "target") == rows
    assert names(tmp_path) == ["first", "second", "target"] and (tmp_path / "first").is_symlink()


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    """Written by Python and torch, with errors of their own; what was there stays."""
    monkeypatch.setattr(runs, "remove", lambda path: None)
    state = {"a": torch.zeros(100_000)}
    writers = {"rows": lambda file: runs.write_rows(file, 1000 * [{"a": "text"}]),
               "state": lambda file: loop.save_state(file, state)}
    for name, write in writers.items():
        (tmp_path / name).write_text("old")
        (tmp_path / f".{name}.partial").symlink_to("/dev/full")
        with pytest.raises(UserError, match=f"{name}: the disk is full; free some space, and start the same"):
            write(tmp_path / name)
        assert (tmp_path / name).read_text() == "old"


def test_only_files_are_written_over(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(UserError, match=f"{name}: cannot be written to .it is no regular file"):
            runs.write_rows(tmp_path / name, [])
    assert names(tmp_path) == ["folder", "pipe"]


def test_rows_that_are_none(tmp_path):
    """Not text; not to be read; a line separator within a text is none of the file."""
    (tmp_path / "binary").write_bytes(b"\x80\x02")
    (tmp_path / "rows").write_text('{"a": "x\u2028y"}\r\n{"a": 1}', encoding="utf-8")
    assert runs.read_rows(tmp_path / "rows") == [{"a": "x\u2028y"}, {"a": 1}]
    assert runs.read_rows(tmp_path / "nowhere") == []
    (tmp_path / "deep").write_text('{"a": 1}\n' + 100_000 * "[")
    for name, said in (("binary", "binary: not a file of JSON objects, one a line"),
                       (".", r"cannot be read \(Is a directory\)"),
                       ("deep", "deep:2: not a JSON object; mend or remove this line")):
        with pytest.raises(UserError, match=said):
            runs.read_rows(tmp_path / name)


# ---------------------------------------------------------------- the folder of a run

SETTINGS = {"seed": 0, "lm": "/home/me/lm", "overlaps": (1, 2)}


def test_a_run_from_its_start_to_its_end(tmp_path, capsys):
    run = Run(tmp_path / "runs/o", SETTINGS)
    assert not run.done and names(run.folder) == [".lock", "started.json"]
    # What a killed process left is removed at the end.
    (run.folder / ".model.partial").mkdir()
    run.finish(loss=0.5)
    assert names(run.folder) == ["run.json"]
    finished = runs.read_run(run.folder)
    assert finished["settings"] == SETTINGS | {"overlaps": [1, 2]} and finished["loss"] == 0.5
    assert {"python", "torch", "transformers"} <= set(finished["versions"])
    assert "already done" not in capsys.readouterr().out
    assert Run(tmp_path / "runs/o", SETTINGS).done
    said = capsys.readouterr().out
    assert f"already done: {tmp_path}/runs/o" in said and "WARNING" not in said
    # Earlier records held whole paths.
    assert Run(tmp_path / "runs/o", SETTINGS | {"lm": ".../lm"}).done


@pytest.mark.parametrize(("name", "text", "said"), [
    ("run.json", "", "is cut short or damaged"),
    ("run.json", '{"settings": {"se', "is cut short or damaged"),
    ("run.json", "[1]", "is cut short or damaged"),
    ("run.json", '{"masker": "whole"}', "an earlier version of this code wrote it"),
    ("started.json", '{"settings": {}, "commits": []}', "an earlier version of this code wrote it"),
])
def test_a_record_that_is_not_ours_is_refused(name, text, said, tmp_path):
    """Else its masker would be lost, and its LM taken for one without further pre-training."""
    (tmp_path / "checkpoint.pt").touch()
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"{name}: {said}"):
        Run(tmp_path, SETTINGS)


@pytest.mark.parametrize("left", ["run.json", "checkpoint.pt", None])
def test_a_folder_with_other_settings_is_refused(left, tmp_path):
    """Unless nothing would be lost, as after a mistake that shows at the start."""
    run = Run(tmp_path / "o", SETTINGS)
    if left == "checkpoint.pt":
        (tmp_path / "o/checkpoint.pt").touch()
    run.lock.release()
    if left == "run.json":
        run.finish()
    if left:
        with pytest.raises(UserError, match=r"holds another run \(seed=0 there, 3 here\); remove it, or"):
            Run(tmp_path / "o", SETTINGS | {"seed": 3})
    else:
        assert not Run(tmp_path / "o", SETTINGS | {"seed": 3}).done
        assert json.loads((tmp_path / "o/started.json").read_text())["settings"]["seed"] == 3


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
    """As a repository of its own shows: the same commit, edited in two ways."""
    def git(*args):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", *args], cwd=tmp_path, check=True,
                       capture_output=True)

    def commit_with(file, text):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
        return runs.commit.__wrapped__()

    git("init")
    (tmp_path / "x.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(runs, "__file__", str(tmp_path / "support/runs.py"))
    first = commit_with("x.py", "a = 1\n")
    # An edit, another one, and a file that git does not know yet.
    edited = [commit_with("x.py", "a = 2\n"), commit_with("x.py", "a = 3\n"), commit_with("nmg/y.py", "")]
    assert len({first, *edited}) == 4
    assert all(commit.startswith(f"{first}-edited-") for commit in edited)


def test_a_finished_run_can_be_made_longer(tmp_path):
    """It goes on from its checkpoint; with fewer it is done; without its checkpoint, or with other flags, it
    is refused."""
    folder = tmp_path / "o"
    Run(folder, SETTINGS | {"episodes": 2}, longer="episodes").lock.release()
    (folder / "checkpoint.pt").touch()
    Run(folder, SETTINGS | {"episodes": 3}, longer="episodes").finish()
    assert names(folder) == ["checkpoint.pt", "run.json"]
    for episodes in (1, 3):
        assert Run(folder, SETTINGS | {"episodes": episodes}, longer="episodes").done
    with pytest.raises(UserError, match=r"holds another run \(seed=0 there, 1 here\)"):
        Run(folder, SETTINGS | {"seed": 1, "episodes": 5}, longer="episodes")
    run = Run(folder, SETTINGS | {"episodes": 5}, longer="episodes")
    assert not run.done
    run.finish()
    assert runs.read_run(folder)["settings"]["episodes"] == 5
    (folder / "checkpoint.pt").unlink()
    with pytest.raises(UserError, match=r"its checkpoint is gone.* or --episodes=5"):
        Run(folder, SETTINGS | {"episodes": 6}, longer="episodes")
    # A run of length 0 has no checkpoint.
    Run(tmp_path / "none", SETTINGS | {"episodes": 0}, longer="episodes").finish()
    assert not Run(tmp_path / "none", SETTINGS | {"episodes": 1}, longer="episodes").done


@pytest.mark.parametrize("kept", [2, 4])
def test_a_run_that_was_killed_while_it_was_made_longer_is_not_done(kept, tmp_path):
    """What lies there is between two lengths. The same command goes on, and so does the one before."""
    folder = tmp_path / "o"
    run = Run(folder, SETTINGS | {"episodes": 2}, longer="episodes")
    (folder / "checkpoint.pt").touch()
    run.finish(loss=1)
    Run(folder, SETTINGS | {"episodes": 4}, longer="episodes").lock.release()
    assert runs.read_run(folder) == {}
    with pytest.raises(UserError, match="holds another run"):
        Run(folder, SETTINGS | {"seed": 1, "episodes": 4}, longer="episodes")
    run = Run(folder, SETTINGS | {"episodes": kept}, longer="episodes")
    assert not run.done
    run.finish()
    assert runs.read_run(folder)["settings"]["episodes"] == kept
    assert Run(folder, SETTINGS | {"episodes": kept}, longer="episodes").done


def test_a_flag_that_the_code_did_not_have_is_an_edit_of_it(tmp_path):
    """A run that was begun without it goes on; a finished one is another run."""
    Run(tmp_path / "o", SETTINGS).lock.release()
    (tmp_path / "o/checkpoint.pt").touch()
    run = Run(tmp_path / "o", SETTINGS | {"clip": 0.2})
    assert not run.done
    run.lock.release()
    with pytest.raises(UserError, match=r"\(clip=0.2 there, 0.3 here\)"):
        Run(tmp_path / "o", SETTINGS | {"clip": 0.3})
    Run(tmp_path / "o", SETTINGS | {"clip": 0.2}).finish()
    with pytest.raises(UserError, match=r"\(scale=None there, 10 here\)"):
        Run(tmp_path / "o", SETTINGS | {"clip": 0.2, "scale": 10})
    # But it may go on with it, where it is made longer.
    Run(tmp_path / "long", SETTINGS | {"episodes": 2}, longer="episodes").finish()
    (tmp_path / "long/checkpoint.pt").touch()
    assert not Run(tmp_path / "long", SETTINGS | {"episodes": 3, "clip": 0.2}, longer="episodes").done


def test_only_an_empty_folder_is_taken(tmp_path):
    for name in ("thesis.tex", "checkpoint.pt"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).touch()
        with pytest.raises(UserError, match="exists and is no run of this script"):
            Run(folder, SETTINGS)
        assert names(folder) == [name]
        (folder / name).unlink()
        # Hidden files are our own: another process has just begun, or was killed.
        (folder / ".started.json.partial").touch()
        assert not Run(folder, SETTINGS).done
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--out=.*cannot be written to"):
        Run(tmp_path / "file", SETTINGS)


def test_only_the_first_process_of_torchrun_writes(tmp_path, monkeypatch):
    """Also beside the first, which holds the lock."""
    monkeypatch.setenv("RANK", "1")
    assert not Run(tmp_path / "o", SETTINGS).done and not list(tmp_path.iterdir())
    monkeypatch.setenv("RANK", "0")
    first = Run(tmp_path / "o", SETTINGS)
    monkeypatch.setenv("RANK", "1")
    assert not Run(tmp_path / "o", SETTINGS).done
    first.finish()
    assert Run(tmp_path / "o", SETTINGS).done


def test_settings_are_all_flags_but_those_named():
    cfg = Config(seed=4, out="runs/x")
    settings = runs.settings_of(cfg, without=("remask",), data="ab12")
    assert "out" not in settings and "remask" not in settings
    assert settings["seed"] == 4 and settings["data"] == "ab12" and settings["p"] is None
