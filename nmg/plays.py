"""What was played: the record of an episode, and its file in RUN/plays. A policy can be learned from such
files again without playing, also from those of other runs.
"""
import json
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from support import runs
from support.runs import UserError, atomic_write, checksum, digest


@dataclass
class Play:
    """What one player did in an episode, and how it did."""
    mask: np.ndarray                    # (M, L) bool
    entropy: float      # of its policy without a direction, or of uniform draws; mean over blocks, in nats
    # On D_val', by metric; higher is better.
    scores: dict[str, float] = field(default_factory=dict)


@dataclass
class Episode:
    """The contexts that all players of an episode masked, and their plays by name. The arrays are (M, L), as
    those of a Batch."""
    input_ids: np.ndarray
    attention_mask: np.ndarray
    maskable: np.ndarray
    plays: dict[str, Play]


# ---------------------------------------------------------------- files

def file_of(folder: Path, number: int) -> Path:
    """Where episode `number` (from 1) of a run is kept."""
    return folder / "plays" / f"{number:05}.npz"


def save_episode(file: Path, episode: Episode, log: dict) -> None:
    """Writes an episode and its line of metrics.jsonl: some ten kilobytes, as masks are bits."""
    arrays = {"input_ids": episode.input_ids.astype(np.int32),
              "length": episode.attention_mask.sum(1).astype(np.int32),
              "maskable": np.packbits(episode.maskable, 1)}
    for name, play in episode.plays.items():
        arrays[f"mask of {name}"] = np.packbits(play.mask, 1)
    about = {name: {"entropy": play.entropy, "scores": play.scores} for name, play in episode.plays.items()}
    arrays["about"] = np.array(json.dumps({"plays": about, "log": log}))
    # Beside its place and then renamed, so that an episode is there as a whole or not at all.
    with atomic_write(file) as partial, open(partial, "wb") as f:
        np.savez_compressed(f, **arrays)


def load_episode(file: Path) -> tuple[Episode, dict]:
    """The episode of a file, and its line of metrics.jsonl. Raises UserError if the file is damaged."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            about = json.loads(str(arrays["about"]))
            input_ids = arrays["input_ids"]
            L = input_ids.shape[1]
            plays = {}
            for name, said in about["plays"].items():
                mask = np.unpackbits(arrays[f"mask of {name}"], 1, count=L).astype(bool)
                plays[name] = Play(mask, said["entropy"], said["scores"])
            attention_mask = np.arange(L) < arrays["length"][:, None]
            maskable = np.unpackbits(arrays["maskable"], 1, count=L).astype(bool)
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, zipfile.BadZipFile,
            zlib.error) as e:
        raise UserError(f"{file}: is no episode of train_nmg.py, or damaged; copy it again, or remove it and "
                        "the later ones beside it") from e
    return Episode(input_ids, attention_mask, maskable, plays), about["log"]


def load_episodes(folder: Path) -> list[tuple[Episode, dict]]:
    """All episodes of a run, in order; none if it has not played yet."""
    return [load_episode(file) for file in files_of(folder)]


def episodes_of_runs(folders: str, metric: str, vocabulary_size: int) -> dict[str, list[Episode]]:
    """{folder: all episodes} of some runs, whose folders are separated by commas. Raises UserError if they
    cannot be learned from, or if one is there twice, as in a run that was copied.

    metric: what is rewarded; vocabulary_size: of the LM, which is the one of these runs"""
    episodes, seen = {}, set()
    for folder in folders.split(","):
        if runs.is_unfinished(folder):
            raise UserError(f"--plays={folder}: this run is not finished; start its command again, or copy "
                            "its folder `plays` to another place, if what it has played is enough")
        found = [episode for episode, _ in load_episodes(Path(folder))]
        if not found:
            raise UserError(f"--plays={folder}: holds no plays ({folder}/plays/*.npz); give a run that has "
                            "kept them")
        for episode in found:
            if any(metric not in play.scores for play in episode.plays.values()):
                raise UserError(f"--plays={folder}: its plays have no score {metric}; choose another "
                                "--metric")
            if episode.input_ids.max() >= vocabulary_size:
                raise UserError(f"--plays={folder}: has tokens that --lm does not know; give the LM of these "
                                "plays")
            played = [[play.mask.tolist(), play.scores] for play in episode.plays.values()]
            content = digest([episode.input_ids.tolist(), played])
            if content in seen:
                raise UserError(f"--plays={folders}: {folder} holds plays that are in another of these "
                                "folders, too, or twice in this one; each must be given once")
            seen.add(content)
        episodes[folder] = found
    return episodes


def files_of(folder: Path) -> list[Path]:
    """The files of all episodes of a run, in order."""
    return sorted((folder / "plays").glob("[!.]*.npz"))


def checksum_of_plays(folder: Path) -> str:
    """A checksum of all episodes of a run."""
    return digest([checksum(file) for file in files_of(folder)])


def warn_of_other_runs(cfg: Any, data: str, weights: str) -> None:
    """Warns where the plays of --plays were made with another LM, or are those that this run will make again.

    data, weights: checksums of the data set and the LM of this run"""
    for folder in cfg.plays.split(","):
        played = runs.read_run(folder).get("settings", {})
        if runs.is_another_lm(played, cfg.lm, weights):
            print(f"WARNING: --plays={folder}: was played with the LM {played['lm']}; {cfg.lm} must have the "
                  "same tokenizer")
        if cfg.episodes and (played.get("seed"), played.get("data")) == (cfg.seed, data):
            print(f"WARNING: --plays={folder}: was played with --seed={cfg.seed}, too, so that this run "
                  "draws the same sub-tasks and directions again; another --seed teaches more")


# ---------------------------------------------------------------- what metrics.jsonl tells

def won_lost(metrics: list[dict]) -> str:
    """The learner's record against random, in the episodes in which random played."""
    played = [m for m in metrics if "random_score" in m]
    ahead = np.array([m["learner_score"] - m["random_score"] for m in played])
    return f"won {sum(ahead > 0)}, lost {sum(ahead < 0)}, tied {sum(ahead == 0)} against random"


def is_tied(log: dict) -> bool:
    """Whether all players of an episode had the same score, so that nothing is learned from it."""
    return len({log[name] for name in log if name.endswith("_score")}) == 1
