"""What every script needs besides its algorithm: flags, files, the folder of a run.

    @dataclass
    class Config:                                # one field per flag, its advice behind it
        lm: str = "tiny"                         # a Hugging Face folder or hub name

    def main(cfg: Config) -> None:
        run = Run(cfg.out, settings)             # refuses a folder that holds another run
        if not run.done:
            ...
            run.finish(loss=loss)                # writes run.json, last of all

    if __name__ == "__main__":
        runs.start(main, Config)
"""
import contextlib
import difflib
import errno
import functools
import hashlib
import inspect
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
import traceback
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import fire
from filelock import FileLock, Timeout

# What the flags of the project must be. A flag of another name may have any value, also 0 or less than 0.
SHARES = {"p", "val_share", "dev_share", "new_share"}   # above 0 and at most 1
AT_LEAST_ZERO = {
    "clip", "dropout", "episodes", "exploration", "ft_lr", "lr", "mlm_lr", "rl_lr", "seed", "sharpness",
    "uniform_episodes", "weight_decay"}
AT_LEAST_ONE = {
    "batch_size", "contexts", "docs", "epochs", "eval_every", "examples", "ft_epochs", "ft_max_len",
    "labelled", "max_len", "max_steps", "micro_batch", "minibatch", "mlm_epochs", "policies", "random_every",
    "replay_size", "seeds", "updates_per_episode", "validation"}
# Which files of the repository a run is made by.
CODE = ("*.py", "nmg/*.py", "support/*.py", "tools/*.py")
# What would be lost if a run with other flags began in the folder of one that was stopped.
CHECKPOINTS = ("checkpoint.pt", "plays")
# The beginning of a file that git has not fetched.
LFS_POINTER = b"version https://git-lfs"
# What a path raises that cannot be written: no rights to it, a file where a folder should be or the reverse,
# or too long a name.
FILE_ERRORS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
               errno.ENAMETOOLONG}
# What errors of a full disk say, whoever raises them.
DISK_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


class UserError(Exception):
    """An error that the user can fix, in one sentence: what, where, what is allowed. Exit code 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean X?' for the closest known name, then all that is allowed."""
    known = sorted(known)
    close = [k for k in known if k.startswith(name)] or difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{hint} Allowed: {', '.join(known)}"


# ---------------------------------------------------------------- flags

def start(main: Callable, config: type, tiny: dict | None = None, presets: dict | None = None) -> None:
    """Runs a script: main(config) with the flags of the command line. A UserError is one sentence.

    tiny: what the script uses instead of the values of `config` where the LM is `tiny` (toy.py); presets: the
    same for each value of its flag --preset"""
    if {"-h", "--help"} & set(sys.argv[1:]):
        parts = [inspect.getmodule(main).__doc__]
        # The flags that scripts share first; the last class is `object`.
        parts += [inspect.getsource(part) for part in reversed(config.__mro__[:-1])]
        if tiny:
            parts.append(f"With --lm=tiny: {as_flags(tiny)}")
        for name, values in (presets or {}).items():
            parts.append(f"With --preset={name}: {as_flags(values)}")
        # In one piece, which a pipe holds also when `| head` reads no further.
        sys.stdout.write("\n".join(parts) + "\n")
        return
    # A terminal or log that is not UTF-8 shows what it cannot print as \\u2581.
    for out in (sys.stdout, sys.stderr):
        # Tests put streams of other kinds in their places.
        with contextlib.suppress(AttributeError, OSError):
            out.reconfigure(errors="backslashreplace")
    # Of the processes that torchrun starts, one prints.
    if not is_main_process():
        sys.stdout = open(os.devnull, "w")
    try:
        main(parse_flags(config, sys.argv[1:], tiny, presets))
    except Exception as e:
        said = sentence_of(e)
        if not said:
            raise
        print("error:", said, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from its last checkpoint, if any", file=sys.stderr)
        sys.exit(130)


def sentence_of(error: Exception) -> str:
    """What a user is told of an error, in one line; empty for a defect of the program, which keeps its
    traceback."""
    if isinstance(error, UserError):
        # A path in it may hold line breaks.
        return " ".join(str(error).splitlines())
    if isinstance(error, OSError) and error.filename and error.errno in FILE_ERRORS:
        return f"{error.filename}: cannot be read or written ({error.strerror}); choose another path"
    # torch and safetensors turn the error of a full disk into errors of their own, so that the whole
    # traceback is searched for it.
    said = "".join(traceback.format_exception(error))
    if any(reason in said for reason in DISK_FULL):
        where = f"{error.filename}: " if getattr(error, "filename", None) else ""
        return f"{where}the disk is full; free some space, and start the same command again"
    if is_out_of_memory(error):
        reason = (str(error) or "out of memory").splitlines()[0]
        return f"{reason}; a small --micro_batch or shorter pieces need less"
    return ""


def is_out_of_memory(error: Exception) -> bool:
    """torch says "CUDA out of memory" or "can't allocate memory"; numpy has an error of its own."""
    said = str(error)
    return isinstance(error, MemoryError) or "out of memory" in said or "allocate memory" in said


def parse_flags(config: type, args: list[str], tiny: dict | None = None,
                presets: dict[str, dict] | None = None) -> object:
    """The dataclass `config`, filled from ["--name=value", ...]. Raises UserError.

    tiny: values of flags that are not given, where the LM is `tiny` or was made from it; presets: the same
    for each value of --preset, which come before those of tiny"""
    # Fire would read its own flags behind the first, and another call behind the second.
    for sign in ("--", "-"):
        if sign in args:
            raise UserError(f"{sign!r} alone is not a flag, and none may stand behind it: write --name=value")
    # Fire only splits the command line: every value stays the text that it is.
    split = fire.decorators.SetParseFn(str)(lambda *words, **flags: (words, flags))
    words, flags = fire.Fire(split, command=args, serialize=lambda _: None)
    if words:
        raise UserError(f"{words[0]!r} is not a flag: write --name=value")
    types = typing.get_type_hints(config)
    for name in flags:
        if name not in types:
            raise UserError(f"unknown flag --{name}{nearest(name, types)}")
    given = {name: convert(name, text, types[name]) for name, text in flags.items()}
    defaults = {}
    if tiny and is_tiny(given.get("lm", config.lm)):
        defaults = {name: value for name, value in tiny.items() if name in types and name not in given}
        print(f"the LM is tiny, and so these flags have the toy world's values: {as_flags(defaults)}")
    preset = given.get("preset")
    if preset:
        if preset not in (presets or {}):
            raise UserError(f"--preset={preset}: no such preset{nearest(preset, presets or {})}")
        chosen = {name: value for name, value in presets[preset].items() if name not in given}
        print(f"--preset={preset} gives these flags their values: {as_flags(chosen)}")
        defaults |= chosen
    cfg = config(**defaults, **given)
    # --predict tells a flag that was given from one that has its default, also where the values are equal.
    cfg.given = given
    return cfg


def as_flags(values: dict) -> str:
    return " ".join(f"--{name}={value}" for name, value in values.items())


def is_tiny(lm: str) -> bool:
    """Whether an LM is `tiny`, or what our scripts made of it in one run or several."""
    return base_of(lm) == "tiny"


def base_of(lm: str) -> str:
    """What the runs that made an LM began with: `tiny`, a name of the hub, or .../NAME for a folder."""
    if lm == "tiny" or not os.path.exists(lm):
        return lm
    return read_run(lm).get("base_model", f".../{Path(lm).name}")


def convert(name: str, text: str, flag_type: type) -> object:
    """The value of one flag, by its field's annotation: bool, int, float, str, or one of these | None."""
    optional = type(None) in typing.get_args(flag_type)
    if optional and text == "None":
        return None
    if optional:
        flag_type = typing.get_args(flag_type)[0]
    if text == "True" and flag_type is not bool:
        raise UserError(f"--{name} needs a value: --{name}=...")
    if flag_type is str:
        if not text:
            raise UserError(f"--{name}= needs a value (is a variable of the shell empty?)")
        # A shell knows ~ at the beginning of a word only, which is not where a flag has its paths.
        text = re.sub(r"(?<![^,:])~[^/,:]*", lambda home: os.path.expanduser(home[0]), text)
        # Tab puts a slash behind the name of a folder.
        return text.rstrip("/") or text
    if flag_type is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise UserError(f"--{name} takes True or False, not {text!r}")
        return text.lower() in ("true", "1")
    if flag_type not in (int, float):
        raise UserError(f"--{name}: a flag must be a bool, int, float or str, or one of them | None")
    try:
        number = flag_type(text)
    except ValueError:
        raise UserError(f"--{name} takes {flag_type.__name__}, not {text!r}") from None
    if name in SHARES and not 0 < number <= 1:
        raise UserError(f"--{name}={text}: a share must be above 0 and at most 1")
    if name == "warmup" and not 0 <= number <= 1:
        raise UserError(f"--{name}={text}: a share of the steps, from 0 to 1")
    if name in AT_LEAST_ONE and number < 1:
        raise UserError(f"--{name}={text}: must be 1 or more")
    if name in AT_LEAST_ZERO and number < 0:
        raise UserError(f"--{name}={text}: must be 0 or more")
    if not abs(number) < float("inf"):
        raise UserError(f"--{name}={text}: must be a finite number")
    return number


def is_main_process() -> bool:
    """Whether this is the only process, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


# ---------------------------------------------------------------- files

def target_of(path: Path) -> Path:
    """The file that is written as `path`, its links resolved; makes its folder. Raises UserError if something
    other than a file is in its place, such as a folder or /dev/null."""
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and not target.is_file():
        raise UserError(f"{path}: is no regular file; choose another path")
    return target


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A path beside `path` for a file or a folder; renamed into place when the block ends well, else
    removed. What a killed process left there is overwritten."""
    target = target_of(path)
    partial = target.with_name(f".{target.name}.partial")
    remove(partial)
    try:
        yield partial
        os.replace(partial, target)
    finally:
        remove(partial)


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    shutil.rmtree(path, ignore_errors=True)
    # A file or a link; a folder is gone by now.
    with contextlib.suppress(OSError):
        path.unlink()


def locked(path: Path) -> FileLock:
    """For `with`: holds the lock of a file that several processes write; it lies beside the file."""
    lock = Path(f"{target_of(path)}.lock")
    # In a folder that takes no files, such as /proc, this fails at once, and FileLock would wait forever.
    lock.touch()
    return FileLock(lock)


def shared(jobs: Iterable[Hashable], done: Callable[[], set], locks: Path,
           needs: dict[Hashable, set] | None = None) -> Iterator[Hashable]:
    """Gives out the jobs that are not done, each to one of the processes that call this at the same time.
    Ends when all jobs are done, also those that other processes are at work on.

    A job has a lock, which is held until the loop asks for the next one. The system takes it back when a
    process is killed, so that another one gets its job.

    jobs: what json can write; done: gives those that are done by now; locks: the folder of the locks;
    needs: job -> those that must be done before it"""
    needs = needs or {}
    locks.mkdir(parents=True, exist_ok=True)
    while True:
        finished = done()
        left = [job for job in jobs if job not in finished]
        if not left:
            return
        for job in left:
            if needs.get(job, set()) - finished:
                continue
            # Timeout: another process is at work on it.
            with contextlib.suppress(Timeout), FileLock(locks / f"{digest(job)}.lock").acquire(timeout=0):
                # Another process may have done it since it was looked up.
                if job not in done():
                    yield job
                break
        else:
            time.sleep(1)


def read_toml(file: Path, flag: str) -> dict:
    """What a TOML file holds. Raises UserError, also if it is empty; flag: the flag that names it."""
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"--{flag}={file}: cannot be read ({e.strerror})") from None
    except ValueError as e:
        raise UserError(f"{file}: is not TOML ({e})") from None
    if not found:
        raise UserError(f"--{flag}={file}: is empty")
    return found


def read_rows(file: Path) -> list[dict]:
    """The JSON objects of a file, one a line; none where there is no file. UserError names a broken line."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{file}: cannot be read as text ({e}); choose another path") from None
    rows = []
    for n, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            raise UserError(f"{file}:{n}: not a JSON object; mend or remove this line") from None
    return rows


def write_rows(file: Path, rows: list[dict]) -> None:
    with atomic_write(file) as partial:
        # No \u escapes, as run_all.sh searches this file for names of folders. A lone surrogate, which UTF-8
        # cannot encode, is written as JSON escapes it.
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        partial.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")


def check_fields(file: Path, own: set[str]) -> None:
    """Raises UserError if a file that is to be replaced holds lines with other fields than our own."""
    if any(row.keys() - own for row in read_rows(file)):
        raise UserError(f"{file}: holds lines of another kind, which would be lost; choose another --out")


def checksum(file: Path) -> str:
    """sha256 of a file, in hexadecimal. Raises OSError if it cannot be read."""
    # A pipe that nobody writes to would be waited for.
    if file.exists() and not file.is_file():
        raise OSError(f"{file}: is no regular file")
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def is_lfs_pointer(file: Path) -> bool:
    with open(file, "rb") as f:
        return f.read(len(LFS_POINTER)) == LFS_POINTER


def is_another_lm(settings: dict, lm: str | None, weights: str | None) -> bool:
    """Whether the LM of a run with these settings is not this one; False if they do not tell.

    weights: the checksum of this LM (models.weights_of)"""
    # An LM of the hub has no checksum, but a name. Earlier checksums are of the weights alone.
    known = settings.get("weights") or settings.get("lm")
    return bool(known) and known not in (lm, weights, str(weights).partition("-")[0])


# ---------------------------------------------------------------- the folder of a run

class Run:
    """The folder of one run: its settings at the start (started.json), and all of it at the end (run.json).

    run.json is written last: where it is, the run is done, and the same command does nothing. A folder is
    refused if it holds a finished run or a checkpoint of other settings, or other files, or if another
    process is at work on it. A run that was begun by other code goes on, with a warning.

    settings: every resolved flag, and the checksums of what was read; JSON values
    longer: whether a finished run goes on, to more episodes"""

    def __init__(self, folder: str | Path, settings: dict, longer: bool = False):
        self.folder = Path(folder)
        # Through JSON and back, as recorded settings went: so the two compare equal (tuples become lists).
        self.settings = json.loads(json.dumps(settings))
        started = self.folder / "started.json"
        # The record of what is there: of a finished run, of one that was stopped after a checkpoint, or {}.
        before = read_run(self.folder)
        self.done = bool(before) and not longer
        has_checkpoint = any(os.path.exists(self.folder / name) for name in CHECKPOINTS)
        if not before and has_checkpoint and os.path.isfile(started):
            # Without a checkpoint nothing would be lost, so that a run with other flags may start over here.
            before = read_record(started)
        self.refuse_others(before.get("settings", {}))
        self.commits = self.with_this_commit(before.get("commits", []))
        if self.done:
            print(f"already done: {self.folder} (remove it to run it again)")
        elif is_main_process():
            self.begin(is_ours=bool(before) or os.path.isfile(started), longer=longer)

    def with_this_commit(self, commits: list[str]) -> list[str]:
        """All commits that take part in the run; warns if the last one was another."""
        if commits and commits[-1] == commit():
            return commits
        if commits:
            print(f"WARNING: what is in {self.folder} was made by commit {commits[-1]}, and the code is now "
                  f"commit {commit()}", flush=True)
        return [*commits, commit()]

    def begin(self, is_ours: bool, longer: bool) -> None:
        """Takes the folder, which may hold other files only if it is ours, and a finished run only if that
        is made longer."""
        self.lock = FileLock(self.folder / ".lock")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Hidden files are our own.
            if not is_ours and any(self.folder.glob("[!.]*")):
                raise UserError(f"--out={self.folder}: exists and is no run of this script; choose another "
                                "folder")
            self.lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"--out={self.folder}: another process is at work on it; wait for it, "
                            "or choose another folder") from None
        if not longer and (self.folder / "run.json").exists():
            self.lock.release()
            raise UserError(f"--out={self.folder}: another process has just finished it; start the same "
                            "command again")
        with atomic_write(self.folder / "started.json") as partial:
            partial.write_text(json.dumps({"settings": self.settings, "commits": self.commits}, indent=1))
        # A run that is made longer is no longer done: what it writes from now on is not what run.json says.
        remove(self.folder / "run.json")

    def refuse_others(self, recorded: dict) -> None:
        changed = []
        for name, value in self.settings.items():
            # A flag that the record lacks was added to the code later. None and False are taken to mean what
            # the code did before.
            is_new = name not in recorded
            is_same = recorded.get(name) == value or (is_new and value is False)
            # A run that is not done may go on with new flags, or to another number of episodes.
            may_change = not self.done and (is_new or name == "episodes")
            if is_same or may_change:
                continue
            # The settings of an earlier stage are too many to be shown.
            if isinstance(value, dict):
                changed.append(f"another {name}")
            else:
                changed.append(f"{name}={recorded.get(name)} there, {value} here")
        if changed:
            raise UserError(f"--out={self.folder}: holds another run ({', '.join(changed)}); remove it, "
                            "or choose another folder")

    def finish(self, **results: object) -> None:
        """Writes run.json: the settings, the versions, the commits that took part, and the results."""
        run = {"settings": self.settings, **results, "versions": versions(), "commits": self.commits}
        with atomic_write(self.folder / "run.json") as partial:
            partial.write_text(json.dumps(run, indent=1))
        self.lock.release()
        # Half-written files are what an earlier, killed process left.
        for path in (*self.folder.glob(".*.partial"), self.folder / "started.json", self.folder / ".lock"):
            remove(path)


def read_run(folder: str | Path) -> dict:
    """run.json of a finished run: its "settings", "versions", "commits", and results by name; {} where there
    is none."""
    file = Path(folder) / "run.json"
    # os.path: a name that is too long for a file is no error.
    return read_record(file) if os.path.isfile(file) else {}


def is_unfinished(folder: str | Path) -> bool:
    """Whether a run was begun there, or made longer, and has not ended."""
    return Path(folder, "started.json").exists() and not Path(folder, "run.json").exists()


def read_record(file: Path) -> dict:
    """run.json or started.json. Raises UserError if it is cut short, or of an earlier version."""
    try:
        record = dict(json.loads(file.read_text(encoding="utf-8")))
    except OSError as e:
        raise UserError(f"{file}: cannot be read ({e.strerror})") from None
    except (ValueError, TypeError):
        raise UserError(f"{file}: is cut short or damaged; copy it again, or remove its folder and run "
                        "again") from None
    if not isinstance(record.get("settings"), dict):
        raise UserError(f"{file}: an earlier version of this code wrote it; remove its folder, run again")
    return record


def settings_of(cfg: object, without: tuple[str, ...] = (), **more: object) -> dict:
    """Every flag of a config but for `out` and those named, and whatever else makes this run what it is; no
    absolute paths, as folders of runs are shared."""
    flags = {name: value for name, value in asdict(cfg).items() if name not in ("out", *without)}
    return portable(flags | more)


def portable(value: object) -> object:
    """A setting in which absolute paths end up as .../NAME; what lies there, checksums tell."""
    if isinstance(value, dict):
        return {name: portable(part) for name, part in value.items()}
    if isinstance(value, str):
        # Paths in a flag may follow a comma or a colon, as in nmg:/a/b,/c/d.
        return re.sub(r"(?<![^,:])/([^,:]*/)?(?=[^/,:])", ".../", value)
    return value


def digest(settings: object) -> str:
    """Eight characters that tell JSON values apart."""
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]


def versions() -> dict[str, str]:
    """Of Python, torch and transformers; the GPU; the commit of this repository."""
    import torch
    import transformers
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found["transformers"] = transformers.__version__
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    found["commit"] = commit()
    return found


def git(folder: Path, *args: str) -> str:
    """What git prints in a folder; nothing where it is not installed, or the folder is in no repository."""
    with contextlib.suppress(OSError):
        return subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True).stdout.strip()
    return ""


@functools.cache
def commit() -> str:
    """The commit of this repository; where files were edited or added since, with a checksum of the code, as
    in "1c1f3c3-edited-5a0e21b7"; "no-git-5a0e21b7" in a copy without git. Looked up once, as this process
    does not see later edits."""
    root = Path(__file__).parent.parent
    head = git(root, "rev-parse", "--short", "HEAD")
    if head and not git(root, "status", "--porcelain", "--", *[f":(glob){pattern}" for pattern in CODE]):
        return head
    files = itertools.chain.from_iterable(map(root.glob, CODE))
    code = digest([checksum(file) for file in sorted(files)])
    return f"{head}-edited-{code}" if head else f"no-git-{code}"
