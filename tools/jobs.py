"""Runs commands, a line each, several at once; one that fails says so, and the rest go on. Of run_all.sh.

    bash run_all.sh --list | python -m tools.jobs --out=runs/tables --jobs=2

First it reads every data set and LM, so that a mistake there is told once; then come the commands that learn
a policy, then the rows, then the report of --out/results.jsonl. Ctrl-C and SIGTERM stop all that is at work.
"""
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import report
import runs


@dataclass
class Config:
    out: str = "runs/tables"    # folder of results.jsonl; its logs/ get what the commands print
    jobs: int = 1               # commands at once


def folder_of(command: str) -> str:
    """What a command makes; of two that are joined by &&, the second."""
    return re.findall(r"--out=(\S+)", command)[-1]


def policy_of(command: str) -> str | None:
    """The folder of the policy that a row masks with, if any."""
    found = re.search(r"--masker=\w+:(\S+)", command)
    return found and found[1]


def preparation_of(command: str) -> str:
    """The command that reads the same data and LM."""
    python, script, *flags = command.partition(" && ")[0].split()
    read = [flag for flag in flags if flag.startswith(("--dataset=", "--lm=", "--raw="))]
    return " ".join([python, str(Path(script).with_name("data_prep.py")), *read])


class Jobs:
    """Commands at work, and what became of them."""

    def __init__(self, cfg: Config, total: int):
        self.logs = Path(cfg.out) / "logs"
        self.pool = ThreadPoolExecutor(cfg.jobs)
        self.total = total
        self.at_work, self.ended = [], []
        self.failed: list[str] = []         # a sentence each

    def run(self, commands: list[str]) -> list[str]:
        """Runs them; returns those that failed."""
        codes = list(self.pool.map(self.run_one, commands))
        return [command for command, code in zip(commands, codes, strict=True) if code]

    def run_one(self, command: str) -> int:
        folder = folder_of(command)
        log = self.logs / f"{Path(folder).name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        say(f"{folder} begins, see {log}")
        with open(log, "a") as file:
            print(command, file=file, flush=True)
            # In a group of its own, which `stop` ends as a whole.
            job = subprocess.Popen(command, shell=True, stdout=file, stderr=file, start_new_session=True)
            self.at_work.append(job)
            code = job.wait()
            self.at_work.remove(job)
        if code:
            last = log.read_text(errors="replace").splitlines()[-1]
            self.fail(f"{folder} FAILED ({code}), see {log}: {last}")
        else:
            self.ended.append(folder)
            say(f"{folder} ends; {len(self.ended)} of {self.total} are finished")
        return code

    def fail(self, what: str) -> None:
        print(what, file=sys.stderr, flush=True)
        self.failed.append(what)

    def stop(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        for job in self.at_work:
            os.killpg(job.pid, signal.SIGTERM)


def say(what: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {what}", flush=True)


def run_all(jobs: Jobs, commands: list[str]) -> None:
    # 1. Data and LMs that cannot be read are told before anything runs; what needs them is dropped.
    for preparation in dict.fromkeys(map(preparation_of, commands)):
        if subprocess.run(preparation, shell=True).returncode:
            jobs.fail(f"{preparation} FAILED, see above")
            commands = [command for command in commands if preparation_of(command) != preparation]

    # 2. Policies, then rows, of which none starts without its policy.
    policies = [command for command in commands if "--row=" not in command]
    missing = {folder_of(command) for command in jobs.run(policies)}
    rows = []
    for command in commands:
        if policy_of(command) in missing:
            jobs.fail(f"{folder_of(command)} NOT STARTED, as its policy failed")
        elif command not in policies:
            rows.append(command)
    jobs.run(rows)


def main(cfg: Config) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if cfg.jobs > 1:
        # By itself each would take all cores.
        cores = os.cpu_count() // cfg.jobs
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
    commands = sys.stdin.read().splitlines()
    jobs = Jobs(cfg, len(commands))
    try:
        run_all(jobs, commands)
    except KeyboardInterrupt:
        jobs.stop()
        raise
    results = Path(cfg.out) / "results.jsonl"
    try:
        if results.exists():
            report.main(report.Config(results=str(results)))
    finally:
        # Last, where one looks first.
        if jobs.failed:
            print(f"\n{len(jobs.failed)} failed; the same command runs them again:", *jobs.failed, sep="\n",
                  file=sys.stderr)
    if jobs.failed:
        sys.exit(1)


if __name__ == "__main__":
    runs.start(main, Config)
