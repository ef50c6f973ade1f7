"""What an episode of meta-training costs: here, and as the official code does it.

    python -m tools.bench                                           # toycls, tiny LM
    python -m tools.bench --dataset=chemprot --lm=distilbert-base-uncased

    ours     the functions that train_nmg.py calls
    padded   as the official code does it: rows padded to the maximum, the MLM head on every position, fp32,
             torch's dropout and attention

An episode is three plays of MLM, fine-tuning and scoring; what the policies add to it is not measured.
The sides take turns on sub-tasks as train_nmg.py draws them. Ratios carry over to other machines, seconds do
not.
"""
import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

import maskers
import pretrain
import report
import train_nmg
from nmg import runs, toy
from nmg.data import Batch, Pieces, collate
from nmg.loop import device
from nmg.runs import stream
from nmg.subtasks import SubTask, SubTaskSampler

SIDES = ("ours", "padded")
STAGES = ("MLM", "fine-tuning", "scoring")


@dataclass
class Config(train_nmg.PlayConfig):
    # small enough for the slowest side
    contexts: int = 64              # texts of a sub-task
    examples: int = 64              # labelled examples, at most
    validation: int = 300           # validation examples, at most
    batch_size: int = 8             # pieces per step
    repeats: int = 3                # sub-tasks, with seeds from --seed on; the table shows medians


def open_subtask(cfg: Config) -> tuple[torch.nn.Module, ModuleType, SubTask]:
    """The LM, the module of the task, and the first sub-task that train_nmg.py draws with this seed."""
    data, lm, task = train_nmg.open_task(cfg)
    sampler = SubTaskSampler(data, task, cfg.max_len, cfg.ft_max_len, cfg.val_share)
    rng = stream(cfg.seed, "sub-task 0")
    return lm, task, sampler.sample(rng, cfg.contexts, cfg.docs, cfg.examples, cfg.validation)


# ---------------------------------------------------------------- a play, and what makes it slow

def play(cfg: Config, lm: torch.nn.Module, task: ModuleType, subtask: SubTask) -> Iterator:
    """A play with the functions that train_nmg.py calls. Yields when it begins, and then what each of STAGES
    has made."""
    yield
    adapted = copy.deepcopy(lm)
    pretrain.pretrain(adapted, subtask.contexts, maskers.random, p=cfg.p, epochs=cfg.mlm_epochs,
                      lr=cfg.mlm_lr, batch_size=cfg.batch_size, micro_batch=cfg.micro_batch)
    yield adapted
    model = task.finetune(adapted, subtask.train, epochs=cfg.ft_epochs, lr=cfg.ft_lr,
                          batch_size=cfg.batch_size, micro_batch=cfg.micro_batch)
    yield model
    yield task.predictions(model, subtask.val)


@contextlib.contextmanager
def padded(cfg: Config, task: ModuleType) -> Iterator[None]:
    """Within it, all batches are padded to the maximum, and the MLM head runs on every position."""
    mlm = patch.multiple(pretrain, collate=padded_to(cfg.max_len), mlm_loss=mlm_loss_everywhere)
    fine_tuning = patch.object(task, "collate", padded_to(cfg.ft_max_len))
    with mlm, fine_tuning:
        yield


def padded_to(length: int) -> Callable[[Pieces, np.ndarray], Batch]:
    """A collate that pads every batch to (B, length)."""
    def collate_padded(pieces, indices):
        batch = collate(pieces, indices)
        fill = {"input_ids": pieces.split.special.pad_id, "word_ids": -1}
        missing = length - batch.input_ids.shape[1]
        wider = {}
        for name, array in vars(batch).items():
            if isinstance(array, np.ndarray) and array.ndim == 2:
                wider[name] = np.pad(array, ((0, 0), (0, missing)), constant_values=fill.get(name, 0))
        return replace(batch, **wider)
    return collate_padded


def mlm_loss_everywhere(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same as pretrain.mlm_loss, with the MLM head on every position."""
    logits = model(tensors["input_ids"], attention_mask=tensors.get("attention_mask")).logits.flatten(0, 1)
    labels = torch.full(logits.shape[:1], -100, device=logits.device)
    labels[tensors["masked_at"]] = tensors["labels"]
    return F.cross_entropy(logits, labels, reduction="sum")


# ---------------------------------------------------------------- measuring

def measure(side: str, cfg: Config, repeat: int) -> list[float]:
    """The seconds of each stage."""
    cfg = replace(cfg, seed=cfg.seed + repeat, fast=cfg.fast and side == "ours")
    lm, task, subtask = open_subtask(cfg)
    way = padded(cfg, task) if side == "padded" else contextlib.nullcontext()
    times = []
    with way:
        for _ in play(cfg, lm, task, subtask):
            if device().type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())
    return np.diff(times).tolist()


# ---------------------------------------------------------------- the script

def median_and_range(values: np.ndarray) -> str:
    return f"{np.median(values):.2f} ({values.min():.2f} to {values.max():.2f})"


def main(cfg: Config) -> None:
    _, _, subtask = open_subtask(cfg)
    length = subtask.contexts.length
    print(f"\n{len(length)} contexts of {length.mean():.0f} tokens on average, at most {cfg.max_len}; "
          f"{len(subtask.train)} labelled pieces, {len(subtask.val)} to score; {device()}, "
          f"{torch.get_num_threads()} threads", flush=True)

    # 1. in turn; another side is first in every repeat
    measured = {side: [] for side in SIDES}
    for repeat in range(cfg.repeats):
        for side in np.roll(SIDES, repeat).tolist():
            seconds = measure(side, cfg, repeat)
            # Three plays are an episode.
            measured[side].append([*seconds, 3 * sum(seconds)])
            print(f"repeat {repeat}, {side}: a play of {sum(seconds):.1f} s", flush=True)

    # 2. the table, in Markdown
    columns = {side: np.array(seconds) for side, seconds in measured.items()}       # (repeats, 4) each
    columns["padded / ours"] = columns["padded"] / columns["ours"]
    table = pd.DataFrame(index=pd.Index([*STAGES, "episode"], name="seconds"))
    for name, column in columns.items():
        table[name] = [median_and_range(seconds) for seconds in column.T]
    print("\n" + report.markdown_table(table))
    print(f"\nmedian of {cfg.repeats} (least to most)")


if __name__ == "__main__":
    runs.start(main, Config, tiny=toy.TRAIN_NMG | {"contexts": 64, "batch_size": 8})
