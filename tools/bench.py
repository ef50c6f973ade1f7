"""What an episode of meta-training costs: here, as the official code does it, and with transformers' Trainer.

    python -m tools.bench                                           # toycls, tiny LM
    python -m tools.bench --dataset=chemprot --lm=distilbert-base-uncased

    ours     the functions that train_nmg.py calls
    padded   as the official code does it: rows padded to the maximum, the MLM head on every position, fp32,
             torch's dropout and attention
    Trainer  batches padded to their longest row, bf16 where that is native, no search for the best answers

An episode is three plays of MLM, fine-tuning and scoring; what the policies add to it is not measured.
Each side has a process of its own; they take turns on sub-tasks as train_nmg.py draws them. Ratios
carry over to other machines, seconds do not. Needs `pip install accelerate`.
"""
import contextlib
import copy
import importlib
import importlib.util
import io
import re
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
import transformers

import finetune_cls
import finetune_qa
import loop
import maskers
import pretrain
import runs
import train_nmg
from data import Batch, Pieces, collate
from loop import device
from models import load_tokenizer, with_head
from runs import UserError, stream
from subtasks import SubTaskSampler

STAGES = ("MLM", "fine-tuning", "scoring")


@dataclass
class Config(train_nmg.BaseConfig):
    # small enough for the slowest side
    contexts: int = 64              # texts of a sub-task
    examples: int = 64              # labelled examples, at most
    validation: int = 300           # validation examples, at most
    batch_size: int = 8             # pieces per step
    repeats: int = 3                # sub-tasks, with seeds from --seed on; the table shows medians


# ---------------------------------------------------------------- the work, in three ways

class Ours:
    """The stages of a play, with the functions that train_nmg.py calls."""
    fast = True

    def __init__(self, cfg: Config, repeat: int):
        self.tokenizer = load_tokenizer(cfg.lm)
        self.cfg = replace(cfg, seed=cfg.seed + repeat, fast=cfg.fast and self.fast)
        data, self.lm, self.task = train_nmg.open_task(self.cfg)

        # The first sub-task with this seed.
        sampler = SubTaskSampler(data, self.task, self.cfg.max_len, self.cfg.ft_max_len, self.cfg.val_share)
        rng = stream(self.cfg.seed, "sub-task 0")
        self.subtask = sampler.sample(rng, cfg.contexts, self.cfg.docs, cfg.examples, cfg.validation)

    def mlm(self) -> None:
        self.adapted = copy.deepcopy(self.lm)
        pretrain.pretrain(self.adapted, self.subtask.contexts, maskers.random, p=self.cfg.p,
                          epochs=self.cfg.mlm_epochs, lr=self.cfg.mlm_lr, batch_size=self.cfg.batch_size)

    def finetune(self) -> None:
        self.model = self.task.finetune(self.adapted, self.subtask.train, epochs=self.cfg.ft_epochs,
                                        lr=self.cfg.ft_lr, batch_size=self.cfg.batch_size)

    def score(self) -> list[dict]:
        return self.task.predictions(self.model, self.subtask.val)


class Padded(Ours):
    """The same functions, with padded batches and without what makes MLM fast.

    They stay patched, as each side has a process of its own."""
    fast = False

    def __init__(self, cfg: Config, repeat: int):
        super().__init__(cfg, repeat)
        pretrain.collate = padded_to(self.cfg.max_len)
        pretrain.mlm_loss = mlm_loss_everywhere
        self.task.collate = padded_to(self.cfg.ft_max_len)


def padded_to(length: int) -> Callable[[Pieces, np.ndarray], Batch]:
    """A collate that pads every batch to (B, length)."""
    def collate_padded(pieces, indices):
        batch = collate(pieces, indices)
        fill = {"input_ids": pieces.split.special.pad_id, "word_ids": -1}
        missing = length - batch.input_ids.shape[1]
        for name, array in vars(batch).items():
            if isinstance(array, np.ndarray) and array.ndim == 2:
                padded = np.pad(array, ((0, 0), (0, missing)), constant_values=fill.get(name, 0))
                setattr(batch, name, padded)
        return batch
    return collate_padded


def mlm_loss_everywhere(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same as pretrain.mlm_loss, with the MLM head on every position."""
    logits = model(tensors["input_ids"], attention_mask=tensors.get("attention_mask")).logits.flatten(0, 1)
    labels = torch.full(logits.shape[:1], -100, device=logits.device)
    labels[tensors["masked_at"]] = tensors["labels"]
    return F.cross_entropy(logits, labels, reduction="sum")


class Trainer(Ours):
    """The same with Hugging Face's Trainer."""
    fast = False

    def __init__(self, cfg: Config, repeat: int):
        super().__init__(cfg, repeat)
        self.corpus = examples_of(self.subtask.contexts)
        self.train = examples_of(self.subtask.train, self.task)
        self.val = examples_of(self.subtask.val, self.task)

    def trainer(self, model: torch.nn.Module, examples: list[dict], epochs: int, lr: float,
                collator: Callable | None = None) -> transformers.Trainer:
        options = transformers.TrainingArguments(
            tempfile.mkdtemp(), num_train_epochs=epochs, learning_rate=lr, bf16=loop.has_bf16(),
            per_device_train_batch_size=self.cfg.batch_size, use_cpu=device().type == "cpu",
            per_device_eval_batch_size=4 * self.cfg.batch_size, dataloader_pin_memory=False,
            save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True)
        collator = collator or transformers.DataCollatorWithPadding(self.tokenizer)
        return transformers.Trainer(model, options, train_dataset=examples, data_collator=collator)

    def mlm(self) -> None:
        self.adapted = copy.deepcopy(self.lm)
        masking = transformers.DataCollatorForLanguageModeling(self.tokenizer, mlm_probability=self.cfg.p)
        self.trainer(self.adapted, self.corpus, self.cfg.mlm_epochs, self.cfg.mlm_lr, masking).train()

    def finetune(self) -> None:
        auto_class, labels = transformers.AutoModelForQuestionAnswering, 2
        if self.task is finetune_cls:
            auto_class = transformers.AutoModelForSequenceClassification
            labels = len(self.subtask.train.split.labels)
        self.model = with_head(self.adapted, auto_class, 0, num_labels=labels)
        self.trainer(self.model, self.train, self.cfg.ft_epochs, self.cfg.ft_lr).train()

    def score(self) -> None:
        self.trainer(self.model, [], 1, self.cfg.ft_lr).predict(self.val)


def examples_of(pieces: Pieces, task: ModuleType | None = None) -> list[dict]:
    """A dictionary of lists for each piece, as Trainer reads them; with the labels of a task."""
    found = []
    for i in range(len(pieces)):
        batch = collate(pieces, np.array([i]))
        example = {name: tensor[0].tolist() for name, tensor in batch.tensors().items()}
        if task is finetune_cls:
            example["labels"] = int(finetune_cls.labels_of(pieces)[i])
        elif task:
            first, last = finetune_qa.targets(batch, pieces)[0].tolist()
            example |= {"start_positions": first, "end_positions": last}
        found.append(example)
    return found


SIDES = {"ours": Ours, "padded": Padded, "Trainer": Trainer}


# ---------------------------------------------------------------- measuring

def measure(side: str, cfg: Config, repeat: int) -> tuple[list[float], float]:
    """The seconds of each stage, and the peak memory of this process in GB."""
    seconds = []
    # Trainer prints every result.
    with contextlib.redirect_stdout(io.StringIO()):
        work = SIDES[side](cfg, repeat)
        for stage in (work.mlm, work.finetune, work.score):
            started = time.perf_counter()
            stage()
            if device().type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    return seconds, peak_gb()


def peak_gb() -> float:
    """The peak of the GPU, or else of this process; 0 on a system that does not tell it."""
    if device().type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    return int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1]) * 1024 / 1e9


# ---------------------------------------------------------------- the script

def median_and_range(values: np.ndarray) -> str:
    return f"{np.median(values):.2f} ({values.min():.2f} to {values.max():.2f})"


def main(cfg: Config) -> None:
    if not importlib.util.find_spec("accelerate"):
        raise UserError("Trainer needs a package that is not installed: pip install accelerate")
    if torch.cuda.device_count() > 1:
        raise UserError("Trainer would take all GPUs, ours takes one; set CUDA_VISIBLE_DEVICES=0")
    work = Ours(cfg, 0)
    length = work.subtask.contexts.length
    print(f"\n{len(length)} contexts of {length.mean():.0f} tokens on average, at most {work.cfg.max_len}; "
          f"{len(work.subtask.train)} labelled pieces, {len(work.subtask.val)} to score; {device()}, "
          f"{torch.get_num_threads()} threads", flush=True)

    # 1. each side in a process of its own; another one is first in every repeat
    pools = {side: ProcessPoolExecutor(1, get_context("spawn")) for side in SIDES}
    measured = {side: [] for side in SIDES}
    gb = {}
    for repeat in range(cfg.repeats):
        for side in np.roll(list(SIDES), repeat).tolist():
            seconds, gb[side] = pools[side].submit(measure, side, cfg, repeat).result()
            # Three plays are an episode.
            measured[side].append([*seconds, 3 * sum(seconds)])
            print(f"repeat {repeat}, {side}: a play of {sum(seconds):.1f} s", flush=True)

    # 2. the table, in Markdown
    others = [side for side in SIDES if side != "ours"]
    heading = ["seconds", *SIDES, *(f"{side} / ours" for side in others)]
    print(f"\n| {' | '.join(heading)} |\n|{' --- |' * len(heading)}")
    for i, stage in enumerate([*STAGES, "episode"]):
        seconds = {side: np.array(found)[:, i] for side, found in measured.items()}         # (repeats,) each
        ratios = [seconds[side] / seconds["ours"] for side in others]
        cells = map(median_and_range, [*seconds.values(), *ratios])
        print("|", " | ".join([stage, *cells]), "|")
    peaks = ", ".join(f"{side} {gb[side]:.2f}" for side in SIDES)
    print(f"\nmedian of {cfg.repeats} (least to most); peak GB: {peaks}")


if __name__ == "__main__":
    runs.start(main, Config)
