"""A study of a task by a plan that is fixed in advance: policies are learned from one part of its documents,
and their masks are compared with random ones, and with those of other maskers, on the other part.

    python -m tools.study --plan=results/plans/scicite-200.toml --lm=FOLDER
    python -m tools.study --plan=results/plans/scicite-200.toml,results/plans/imdb-200.toml --lm=FOLDER

A plan is a TOML file: the fields of `Plan` in this file, and two tables, [learn] with flags of train_nmg.py,
and [play] with those of the plays that are compared (train_nmg.PlayConfig). All maskers of a seed share the
sub-task, the head, the order and the corruption. Without `sampled`, `nmg` and `mean` nothing is learned:
then a study shows whether it matters what is masked at all. Random masks and the primary masker play first.

A masker of a plan is any --masker, or
    sampled      draws tokens from a policy; seed s has policy s % policies
    nmg          takes the tokens of the highest logits of that policy
    mean         draws tokens from the mean of all policies
    untrained    draws tokens from a policy that has learned nothing, another one for each of the policies

OUT/NAME, the folder of a study, holds its policies (policy-0, ...) and a line for each play (plays.jsonl,
which report.py reads, too). Killed and started again, a study goes on; several of these commands at once
share its work. In the end it prints a table, and for several plans all primary comparisons, with p corrected
by Holm's method.
"""
import itertools
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

import data_prep
import maskers
import report
import train_nmg
from nmg.loop import length_batches
from nmg.policies import random_policy
from nmg.subtasks import SubTaskSampler
from pretrain import mask_batch
from support import devices, runs, sources, toy
from support.data import Pieces, cut_docs
from support.models import LMReader, weights_of
from support.rng import rng_for
from support.runs import UserError
from support.sources import DataFlags, Source

# Names in a plan that stand for the masks of its policies (Study.masker).
LEARNED = ("sampled", "nmg", "mean")


@dataclass
class Config:
    plan: str | None = None         # TOML files, separated by commas
    lm: str | None = None           # instead of the plan's lm
    dataset: str | None = None      # instead of the plan's dataset, as where its copy lies elsewhere
    out: str = "runs/studies"       # each study has a folder there, of the name of its plan


@dataclass
class Plan(DataFlags):
    dataset: str = "toycls"         # a name or path (data_prep.py) of labelled texts; a corpus is not read
    splits: str = "train"           # the splits to divide, such as train,dev,test
    new_share: float = 0.5          # the share of their texts, whole documents, on which maskers are compared
    known: str | None = None        # splits whose texts are left out of the comparison, because a policy in
                                    # `maskers` was learned from them elsewhere
    lm: str = "tiny"
    policies: int = 3               # how many are learned, with the seeds 0, 1, ...
    maskers: str = "random,sampled,nmg,mean,untrained,whole,span,punct,tfidf,label,rare,difference"
    plays_of: str | None = None     # logs of other plans, comma-separated: their plays of the same maskers
                                    # and seeds, such as random masks, are not made again
    primary: str = "sampled"        # the masker whose comparison with random is the primary one
    metric: str = "accuracy"        # in which they are compared
    seeds: int = 12                 # sub-tasks, on each of which every masker plays
    seed: int = 0                   # the first of the seeds
    spacy_model: str | None = None  # finds named entities, for the masker entity


@dataclass
class Study:
    """A plan that was read and checked, with the flags of learning and of playing, and the study's folder."""
    file: Path
    plan: Plan
    learn: train_nmg.Config
    play: train_nmg.PlayConfig
    folder: Path
    text: str = ""          # what the file said when it was read
    changed: str = ""       # when it was last changed, by then

    @property
    def log(self) -> Path:
        return self.folder / "plays.jsonl"

    @property
    def other_logs(self) -> list[Path]:
        """Those of other plans, whose plays are taken over."""
        return [Path(file) for file in (self.plan.plays_of or "").split(",") if file]

    @property
    def rows(self) -> list[str]:
        return maskers.split_names(self.plan.maskers)

    def masker(self, row: str, seed: int) -> str:
        """The --masker of a row of the plan."""
        number = seed % self.plan.policies
        policies = [f"{self.folder}/policy-{i}" for i in range(self.plan.policies)]
        stands_for = {
            "sampled": f"sampled:{policies[number]}",
            "nmg": f"nmg:{policies[number]}",
            "mean": f"sampled:{','.join(policies)}",
            "untrained": f"sampled:{self.folder}/untrained-{number}"}
        return stands_for.get(row, row)


# ---------------------------------------------------------------- the plan

def read_plan(file: Path, cfg: Config) -> Study:
    """Raises UserError, which names the key or value that is wrong, and what is allowed."""
    fields = runs.read_toml(file, "plan")
    tables = {name: fields.pop(name, {}) for name in ("learn", "play")}
    folder = Path(cfg.out, file.stem)
    plan = parsed(Plan, fields, str(file), {})
    plan = replace(plan, lm=cfg.lm or plan.lm, dataset=cfg.dataset or plan.dataset)
    # `divide` makes both data sets.
    own = {"dataset": f"{file.stem}-learn", "lm": plan.lm, "seed": 0, "out": str(folder)}
    learn = parsed(train_nmg.Config, tables["learn"], f"{file}, [learn]", own)
    own = {"dataset": f"{file.stem}-new", "lm": plan.lm, "seed": 0, "metric": plan.metric}
    play_flags = parsed(train_nmg.PlayConfig, tables["play"], f"{file}, [play]", own)
    text = file.read_text(encoding="utf-8").strip()
    study = Study(file, plan, learn, play_flags, folder, text, last_changed(file))
    check_maskers(study)
    return study


def check_maskers(study: Study) -> None:
    for row in study.rows:
        try:
            if row not in (*LEARNED, "untrained"):
                maskers.find(row)
        except UserError as e:
            # With a colon it names a file or a folder, so that the list of other names would not help.
            more = "" if ":" in row else f"; a plan may also have {', '.join(LEARNED)}, untrained"
            raise UserError(f"{study.file}: {e}{more}") from None
        if maskers.is_learned(row) and not study.plan.known:
            print(f"WARNING: {study.file}: {row} was not learned by this plan; if it has learned from texts "
                  "that are compared here, name their splits in `known`")
    others = [row for row in study.rows if row != "random"]
    if "random" not in study.rows or len({*study.rows}) < len(study.rows):
        raise UserError(f"{study.file}: maskers={study.plan.maskers}: must hold random, and none twice")
    # A log has no absolute paths, so that files are told apart by what is left of theirs (open_study).
    if len({runs.portable(row) for row in study.rows}) < len(study.rows):
        raise UserError(f"{study.file}: maskers={study.plan.maskers}: two of them differ in absolute paths "
                        "alone; rename one folder or file")
    primary = study.plan.primary
    if primary not in others:
        raise UserError(f"{study.file}: primary={primary}: is compared with random, and must be one of the "
                        f"other maskers{runs.nearest(primary, others)}")


def parsed(config: type, fields: dict, where: str, own: dict) -> object:
    """A dataclass from a table of a plan, whose fields are checked as the flags of a command line are.

    own: fields that the study sets itself"""
    if not isinstance(fields, dict):
        raise UserError(f"{where}: must be a table of flags")
    flags = [f"--{name}={value}" for name, value in own.items()]
    for name, value in fields.items():
        if name in own:
            raise UserError(f"{where}: {name} is set by the study; leave it out")
        if isinstance(value, list):
            value = ",".join(map(str, value))
        if not isinstance(value, str | int | float):
            raise UserError(f"{where}: {name} must be a text, a number, true, false, or a list of texts")
        flags.append(f"--{name}={value}")
    # The toy world's values are those of train_nmg.py.
    tiny = {} if config is Plan else toy.TRAIN_NMG
    try:
        return runs.parse_flags(config, flags, tiny, train_nmg.PRESETS)
    except UserError as e:
        raise UserError(f"{where}: {e}") from None


def last_changed(file: Path) -> str:
    """When a plan was last changed: its commit, or "not committed"."""
    file = file.resolve()
    # In the time of this machine, as that of plays.
    date = "--date=format-local:%Y-%m-%d %H:%M"
    last = runs.git(file.parent, "log", "-1", "--format=commit %h of %cd", date, "--", file.name)
    if last and not runs.git(file.parent, "status", "--porcelain", "--", file.name):
        return last
    edited = time.localtime(file.stat().st_mtime)
    return f"not committed, last edited {time.strftime('%Y-%m-%d %H:%M', edited)}"


# ---------------------------------------------------------------- the two parts of the documents

def divide(study: Study) -> None:
    """Divides the plan's documents, always in the same way, into two data sets, which it registers by the
    names NAME-learn and NAME-new. Raises UserError."""
    plan = study.plan
    source = sources.find_source(plan.dataset)
    source.set_columns(plan.dataset, plan)
    records_of = {}
    for split in plan.splits.split(","):
        if split not in source.splits:
            allowed = [name for name in source.splits if name != "corpus"]
            raise UserError(f"{study.file}: splits={plan.splits}: {plan.dataset} has no {split} split"
                            f"{runs.nearest(split, allowed)}")
        records_of[split] = [*source.records(split)]
    records = itertools.chain.from_iterable(records_of.values())
    gold = []
    for record in data_prep.with_docs(records):
        # What a task of your own has is not looked at.
        if record.get("label") or record.get("qas") or source.own_arrays:
            gold.append(record)
    docs = np.array([record["doc"] for record in gold])
    is_new = cut_docs(docs, plan.new_share)
    if is_new.all() or not is_new.any():
        raise UserError(f"{study.file}: new_share={plan.new_share}: {plan.dataset} has "
                        f"{len(np.unique(docs))} documents with labels (label={plan.label}), too few for "
                        "two parts")
    parts = {"learn": list(itertools.compress(gold, ~is_new)), "new": list(itertools.compress(gold, is_new))}
    # Where documents have numbers, two of them may hold the same text.
    known = {data_prep.plain(record["text"]) for record in parts["learn"]}
    for split in filter(None, (plan.known or "").split(",")):
        if split not in records_of:
            raise UserError(f"{study.file}: known={plan.known}: {split} is not among splits={plan.splits}")
        known |= {data_prep.plain(record["text"]) for record in records_of[split]}
    parts["new"] = [record for record in parts["new"] if data_prep.plain(record["text"]) not in known]
    for name, part in parts.items():
        part_of_study = Source({"train": part}, kind=source.kind, own_arrays=source.own_arrays)
        sources.DATASETS[f"{study.file.stem}-{name}"] = lambda made=part_of_study: made
    learn, new = len(parts["learn"]), len(parts["new"])
    print(f"{study.file.stem}: {learn:,} texts to learn policies from, and {new:,} of other documents to "
          f"compare maskers on; {len(gold) - learn - new:,} are left out, as policies know them")


# ---------------------------------------------------------------- a play, and the log of plays

def choose_masks(contexts: Pieces, masker: maskers.Masker, p: float, seed: int, lm: LMReader) -> np.ndarray:
    """(N, L) bool: the masks of all contexts, padded to the longest."""
    masks = np.zeros((len(contexts), contexts.length.max()), bool)
    for indices in length_batches(contexts.length):
        _, mask, _ = mask_batch(contexts, masker, p, seed, 0, indices, lm)
        masks[indices, :mask.shape[1]] = mask
    return masks


def play(name: str, seed: int, lm: torch.nn.Module, sampler: SubTaskSampler, task: ModuleType,
         cfg: train_nmg.PlayConfig) -> dict:
    """What a masker scores on the sub-task of a seed: its line of a log, without what all lines share.

    lm, task, cfg: of train_nmg.open_task"""
    started = time.monotonic()
    # The policies, or another study of this command, may have been made with another --fast.
    devices.use_fast_path(cfg.fast)
    checksum = maskers.checksum_of(name)
    # How a policy was learned, so that report.py can say it.
    policy = None
    if maskers.is_learned(name):
        policy = runs.read_run(maskers.folders_of(name)[0]).get("settings", {})
    rng = rng_for(seed, "sub-task")
    subtask = sampler.sample(rng, cfg.contexts, cfg.docs, cfg.examples, cfg.validation)
    mask = choose_masks(subtask.contexts, maskers.find(name), cfg.p, seed, LMReader(lm))
    _, scores = train_nmg.inner_loop(lm, subtask, mask, task, cfg)
    # In hundredths of a nat, beside points.
    if "likelihood" in scores:
        scores["likelihood"] *= 100
    return {"masker": name, "row": name, "seed": seed, "split": "val", "metrics": list(scores), **scores,
            "seconds": {"play": time.monotonic() - started}, "ended": time.strftime("%Y-%m-%d %H:%M"),
            "file": checksum, "policy": policy, "commit": runs.commit()}


def add_play(study: Study, line: dict, settings: dict) -> None:
    """Adds a play to the log, which several processes may share. Raises UserError if the plan, or a masker in
    a file of one's own, was changed while it was played. settings: of open_study"""
    row = line["row"]
    line = {"dataset": settings["dataset"], "lm": settings["lm"], **line, "config": settings}
    if line["file"] != settings["files"].get(runs.portable(row), line["file"]):
        raise UserError(f"{study.file}: the file of {row} was edited while this study ran; undo the edit, or "
                        "choose another --out")
    with runs.locked(study.log):
        refuse_another_plan(study, settings)
        runs.write_rows(study.log, [*runs.read_rows(study.log), line])


def done_plays(log: Path) -> set[tuple[int, str]]:
    """The plays of a log, as (seed, row)."""
    return {(line["seed"], line["row"]) for line in runs.read_rows(log)}


def warn_of_commits(log: Path) -> None:
    others = {line.get("commit", "unknown") for line in runs.read_rows(log)} - {runs.commit()}
    if others:
        print(f"WARNING: {log} has plays by commit {', '.join(others)}, and the code is now commit "
              f"{runs.commit()}; another file plays them anew")


# ---------------------------------------------------------------- learning and playing

def open_study(study: Study) -> tuple[torch.nn.Module, SubTaskSampler, ModuleType, dict]:
    """The LM, the sub-tasks, the task's module, and what all plays have in common. Fills in flags of plays
    that were left open. Raises UserError if the plan cannot be played."""
    divide(study)
    plan, log = study.plan, study.log
    if {*study.rows} & {*LEARNED}:
        try:
            train_nmg.check_flags(study.learn)
            train_nmg.open_task(replace(study.learn))
        except UserError as e:
            raise UserError(f"{study.file}, [learn]: {e}") from None
    cfg = study.play
    data, lm, task = train_nmg.open_task(cfg, plan.spacy_model)
    sampler = SubTaskSampler(data, task, cfg.max_len, cfg.ft_max_len, cfg.val_share)
    # What all lines of the log have in common. Paths are cut to their names, so that a log may move; an LM of
    # the hub, which has no checksum of weights here, keeps its full name.
    weights = weights_of(cfg.lm)
    settings = runs.settings_of(cfg, ("seed",), data=data.checksum, weights=weights)
    settings["dataset"] = Path(cfg.dataset).name
    if weights:
        settings["lm"] = Path(cfg.lm).name
    settings["plan"] = runs.settings_of(plan, ("dataset", "lm")) | {"dataset": Path(plan.dataset).name}
    settings["learn"] = runs.settings_of(study.learn, ("lm",))
    # A masker in a file of one's own, or a policy from elsewhere, must stay the same, too.
    settings["files"] = {runs.portable(row): maskers.checksum_of(row) for row in study.rows if ":" in row}
    with runs.locked(log):
        refuse_another_plan(study, settings)
        # Untrained policies are as sharp as those that learn (without --paper).
        for number in range(plan.policies):
            policy = random_policy(lm.config.hidden_size, number, "untrained")
            policy.sharpness, policy.clip = study.learn.sharpness, study.learn.clip
            policy.save(study.folder / f"untrained-{number}")
    # A masker that fails on this text or LM shows it now. (What is to be learned comes later.)
    some = sampler.contexts.take(sampler.contexts.evenly_spaced(2))
    for row in study.rows:
        if row not in LEARNED:
            choose_masks(some, maskers.find(study.masker(row, 0)), cfg.p, 0, LMReader(lm))
    return lm, sampler, task, settings


def run(study: Study, lm: torch.nn.Module, sampler: SubTaskSampler, task: ModuleType,
        settings: dict) -> list[str]:
    """Learns the policies and plays all maskers, as far as that is not done. Returns the plays that failed,
    and why; the others go on.

    lm, sampler, task, settings: of open_study"""
    plan, log = study.plan, study.log
    with runs.locked(log):
        # Another process may have been given another plan since this study was opened.
        refuse_another_plan(study, settings)
        take_over_plays(study, settings)
    warn_of_commits(log)
    plays = list(itertools.product(range(plan.seed, plan.seed + plan.seeds), study.rows))
    # The primary comparison first, so that it is whole where the time ends early.
    plays.sort(key=lambda job: job[1] not in ("random", plan.primary))
    # A play of a learned masker waits for its policies.
    needs = {}
    done = done_plays(log)
    for seed, row in plays:
        if row in LEARNED and (seed, row) not in done:
            needs[seed, row] = set(maskers.folders_of(study.masker(row, seed)))
    policies = sorted(set().union(*needs.values()))
    # The policies that this process has learned. Of one that is finished already, train_nmg.main only checks
    # that it was learned with the plan's flags.
    ready = set()
    failed = {}
    with tqdm(total=len(plays), initial=len(done), unit="play", disable=None) as bar:
        locks = log.with_name(f"{log.name}.locks")

        def ended():
            return ready | {*failed} | done_plays(log)

        for job in runs.shared([*policies, *plays], ended, locks, needs):
            if job in policies:
                train_nmg.main(replace(study.learn, seed=int(job.rpartition("-")[2]), out=job))
                ready.add(job)
                # The time of learning says nothing about that of plays.
                bar.unpause()
                continue
            seed, row = job
            try:
                line = play(study.masker(row, seed), seed, lm, sampler, task, study.play)
            except UserError as e:
                failed[job] = f"{row} with seed {seed}: {e}"
                tqdm.write(f"FAILED: {failed[job]}")
                continue
            add_play(study, line | {"row": row}, settings)
            # Other processes play, too.
            bar.n = len(done_plays(log))
            bar.refresh()
    return [*failed.values()]


def refuse_another_plan(study: Study, settings: dict) -> None:
    """Raises UserError if there are plays, and they were made by another plan or with other data or LM."""
    for line in runs.read_rows(study.log)[:1]:
        changed = differences(line["config"], settings)
        if changed:
            raise UserError(f"{study.file}: the plan, its data or its LM changed after the first play in "
                            f"{study.log} ({changed}); undo the change, or choose another --out")


def check_plays_of(study: Study, settings: dict, coming: set[Path]) -> None:
    """Raises UserError if the log of another plan has no plays, or those of other tasks.

    coming: logs that this command fills before it comes to this study; they may be empty now"""
    # The names of a plan's two parts, and what it compares, may differ from those of another plan.
    own = {field: settings[field] for field in ("dataset", "plan", "learn", "files")}
    for file in study.other_logs:
        lines = runs.read_rows(file)
        if not lines and file not in coming:
            raise UserError(f"{study.file}: plays_of={file}: is not there, or empty; it must hold plays of "
                            "the same tasks")
        for line in lines:
            changed = differences(line.get("config", {}) | own, settings)
            if changed:
                raise UserError(f"{study.file}: plays_of={file}: must hold plays of the same tasks, LM, and "
                                f"flags in [play] ({changed})")


def take_over_plays(study: Study, settings: dict) -> None:
    """Adds to the log what other plans have played on the same tasks, such as random masks. (Policies that a
    plan learns are its own.)"""
    check_plays_of(study, settings, set())
    seeds = range(study.plan.seed, study.plan.seed + study.plan.seeds)
    rows = [row for row in study.rows if row not in (*LEARNED, "untrained")]
    for file in study.other_logs:
        lines = runs.read_rows(file)
        done, taken = done_plays(study.log), []
        for line in lines:
            same = line["row"] in rows and line["file"] == settings["files"].get(runs.portable(line["row"]))
            same &= line["config"].get("plan", {}).get("spacy_model") == settings["plan"]["spacy_model"]
            if same and line["seed"] in seeds and (line["seed"], line["row"]) not in done:
                own_names = {"dataset": settings["dataset"], "config": settings, "taken_from": str(file)}
                taken.append(line | own_names)
        runs.write_rows(study.log, [*runs.read_rows(study.log), *taken])
        # Where several processes are at work, only the first finds any.
        if taken:
            print(f"{study.file.stem}: {len(taken)} plays taken over from {file}")


def differences(before: dict, now: dict) -> str:
    """What differs between the settings of two plays, as text; empty if nothing does. Flags that the code
    no longer has are left out."""
    before, now = report.flat(before), report.flat(now)
    found = []
    for name in now:
        if before.get(name) != now.get(name):
            found.append(f"{name}={before.get(name)} there, {now.get(name)} here")
    return ", ".join(found)


# ---------------------------------------------------------------- the table

def show(study: Study) -> pd.Series:
    """Prints the plan and the table of a study; returns the primary comparison, a row of report.compare."""
    plan = study.plan
    lines = report.read([str(study.log)], None)
    compared = report.compare(report.scores_of(lines, plan.metric), plan.primary)
    d = report.differences(report.scores_of(lines, plan.metric))
    table = report.score_table(lines, plan.metric, compared)
    table = table[[plan.metric, "minus random", "95 % interval"]]
    # score_table withholds p where seeds share a policy; what is found here is about these very policies.
    p = report.formatted(compared["p"], "{:.2g}").reindex(compared.index, fill_value="too few seeds")
    better = (d > 0).sum(axis=1).astype(str) + " of " + d.count(axis=1).astype(str)
    needed = {row: report.seeds_needed(found, 1) for row, found in compared.iterrows()}
    more = {"p": p, "seeds better": better, "seeds for 1 point": needed}
    table = table.join(pd.DataFrame(more, table.index, dtype=object).fillna("-"))
    # Plays that were taken over may be older than the plan.
    own = [line["ended"] for line in runs.read_rows(study.log) if "taken_from" not in line]
    first = min(own, default="before that")
    print(f"\nPlan {study.file} ({study.changed}); the first play ended {first}; played with "
          f"--dataset={runs.portable(plan.dataset)} --lm={runs.portable(plan.lm)}:\n")
    for line in study.text.splitlines():
        print(f"    {line}".rstrip())
    print(f"\n{report.markdown_table(table)}\n")
    print(f"The primary comparison is {plan.primary} minus random: its p is not corrected, those of others "
          "are (Holm). Seeds for 1 point: so many would find it with power .8. What is found of policies is "
          f"about these {plan.policies}. Other metrics: python report.py --results={study.log} "
          f"--primary={plan.primary} (which gives no p where seeds share a policy)")
    return compared.reindex([plan.primary]).iloc[0]


def show_primaries(found: dict[str, pd.Series]) -> None:
    """The primary comparisons of several studies, with p corrected over them by Holm's method."""
    compared = pd.DataFrame(found).T
    table = pd.DataFrame(index=compared.index.rename("primary comparison"))
    table["minus random"] = report.formatted(compared["difference"], "{:+.2f}")
    high = report.formatted(compared["high"], " to {:+.2f}")
    table["95 % interval"] = report.formatted(compared["low"], "{:+.2f}") + high
    table["p"] = report.formatted(compared["p"], "{:.2g}")
    table["p, Holm"] = report.formatted(report.holm(compared["p"]), "{:.2g}")
    print(f"\n{report.markdown_table(table.fillna('-'))}")


def main(cfg: Config) -> None:
    if not cfg.plan:
        raise UserError("--plan=FILE.toml is needed: what is fixed in advance (results/plans has examples)")
    if "," in cfg.out:
        raise UserError(f"--out={cfg.out}: must be without a comma, which separates the folders of policies")
    files = [Path(name) for name in cfg.plan.split(",")]
    if cfg.dataset and len(files) > 1:
        raise UserError(f"--dataset={cfg.dataset}: is for one plan, and --plan has {len(files)}")
    # All studies are opened before the first play, as a mistake in the last one should not show after days.
    studies = [read_plan(file, cfg) for file in files]
    if len({study.folder for study in studies}) < len(studies):
        raise UserError(f"--plan={cfg.plan}: two plans of the same name would share a folder; rename one")
    opened = [open_study(study) for study in studies]
    for number, study in enumerate(studies):
        *_, settings = opened[number]
        check_plays_of(study, settings, {earlier.log for earlier in studies[:number]})
    failed = []
    for study, parts in zip(studies, opened, strict=True):
        failed += run(study, *parts)
    played = [study for study in studies if study.log.exists()]
    found = {f"{study.file.stem}, {study.plan.primary}": show(study) for study in played}
    if len(found) > 1:
        show_primaries(found)
    if failed:
        raise UserError(f"{len(failed)} plays failed, and are missing above; the first: {failed[0]}")


if __name__ == "__main__":
    runs.start(main, Config)
