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
import copy
import importlib.util
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from types import ModuleType

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
import transformers

import finetune_cls
import finetune_qa
import loop
import maskers
import pretrain
import report
import runs
import train_nmg
from data import Batch, Pieces, collate
from loop import device
from models import load_tokenizer, with_head
from runs import UserError, stream
from subtasks import SubTask, SubTaskSampler

STAGES = ("MLM", "fine-tuning", "scoring")


@dataclass
class Config(train_nmg.BaseConfig):
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


# ---------------------------------------------------------------- a play, in three ways
# Each yields when it is ready to start, and then what each of STAGES has made.

def ours(cfg: Config, lm: torch.nn.Module, task: ModuleType, subtask: SubTask) -> Iterator:
    """A play with the functions that train_nmg.py calls."""
    yield
    adapted = copy.deepcopy(lm)
    pretrain.pretrain(adapted, subtask.contexts, maskers.random, p=cfg.p, epochs=cfg.mlm_epochs,
                      lr=cfg.mlm_lr, batch_size=cfg.batch_size)
    yield adapted
    model = task.finetune(adapted, subtask.train, epochs=cfg.ft_epochs, lr=cfg.ft_lr,
                          batch_size=cfg.batch_size)
    yield model
    yield task.predictions(model, subtask.val)


def padded(cfg: Config, lm: torch.nn.Module, task: ModuleType, subtask: SubTask) -> Iterator:
    """The same functions, with padded batches and without what makes MLM fast.

    They stay patched, as each side has a process of its own."""
    pretrain.collate = padded_to(cfg.max_len)
    pretrain.mlm_loss = mlm_loss_everywhere
    task.collate = padded_to(cfg.ft_max_len)
    return ours(cfg, lm, task, subtask)


def padded_to(length: int) -> Callable[[Pieces, np.ndarray], Batch]:
    """A collate that pads every batch to (B, length)."""
    def collate_padded(pieces, indices):
        batch = collate(pieces, indices)
        fill = {"input_ids": pieces.split.special.pad_id, "word_ids": -1}
        missing = length - batch.input_ids.shape[1]
        for name, array in vars(batch).items():
            if isinstance(array, np.ndarray) and array.ndim == 2:
                wider = np.pad(array, ((0, 0), (0, missing)), constant_values=fill.get(name, 0))
                setattr(batch, name, wider)
        return batch
    return collate_padded


def mlm_loss_everywhere(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same as pretrain.mlm_loss, with the MLM head on every position."""
    logits = model(tensors["input_ids"], attention_mask=tensors.get("attention_mask")).logits.flatten(0, 1)
    labels = torch.full(logits.shape[:1], -100, device=logits.device)
    labels[tensors["masked_at"]] = tensors["labels"]
    return F.cross_entropy(logits, labels, reduction="sum")


def with_trainer(cfg: Config, lm: torch.nn.Module, task: ModuleType, subtask: SubTask) -> Iterator:
    """The same with Hugging Face's Trainer."""
    tokenizer = load_tokenizer(cfg.lm)
    masking = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=cfg.p)
    padding = transformers.DataCollatorWithPadding(tokenizer)
    corpus = examples_of(subtask.contexts)
    train = examples_of(subtask.train, task)
    val = examples_of(subtask.val, task)
    yield
    adapted = copy.deepcopy(lm)
    trainer_of(adapted, corpus, masking, cfg.mlm_epochs, cfg.mlm_lr, cfg.batch_size).train()
    yield adapted
    if task is finetune_cls:
        labels = len(subtask.train.split.labels)
        model = with_head(adapted, transformers.AutoModelForSequenceClassification, 0, num_labels=labels)
    else:
        model = with_head(adapted, transformers.AutoModelForQuestionAnswering, 0, num_labels=2)
    trainer = trainer_of(model, train, padding, cfg.ft_epochs, cfg.ft_lr, cfg.batch_size)
    trainer.train()
    yield model
    yield trainer.predict(val)


def examples_of(pieces: Pieces, task: ModuleType | None = None) -> list[dict]:
    """A dictionary of lists for each piece, as Trainer reads them; with the labels of a task."""
    found = []
    for i in range(len(pieces)):
        batch = collate(pieces, np.array([i]))
        example = {name: tensor[0].tolist() for name, tensor in batch.tensors().items()}
        if task is finetune_cls:
            example["labels"] = int(finetune_cls.labels_of(pieces)[i])
        elif task is finetune_qa:
            first, last = finetune_qa.targets(batch, pieces)[0].tolist()
            example |= {"start_positions": first, "end_positions": last}
        found.append(example)
    return found


def trainer_of(model: torch.nn.Module, examples: list[dict], collator: Callable, epochs: int, lr: float,
               batch_size: int) -> transformers.Trainer:
    options = transformers.TrainingArguments(
        tempfile.mkdtemp(), num_train_epochs=epochs, learning_rate=lr, bf16=loop.has_bf16(),
        per_device_train_batch_size=batch_size, per_device_eval_batch_size=4 * batch_size,
        use_cpu=device().type == "cpu", dataloader_pin_memory=False, save_strategy="no",
        logging_strategy="no", report_to="none", disable_tqdm=True)
    trainer = transformers.Trainer(model, options, train_dataset=examples, data_collator=collator)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


SIDES = {"ours": ours, "padded": padded, "Trainer": with_trainer}


# ---------------------------------------------------------------- measuring

def measure(side: str, cfg: Config, repeat: int) -> tuple[list[float], float]:
    """The seconds of each stage, and the peak memory of this process in GB."""
    cfg = replace(cfg, seed=cfg.seed + repeat, fast=cfg.fast and side == "ours")
    times = []
    for _ in SIDES[side](cfg, *open_subtask(cfg)):
        if device().type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())
    return np.diff(times).tolist(), peak_gb()


def peak_gb() -> float:
    """The peak of the GPU, or else of this process."""
    if device().type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    # Bytes on macOS, elsewhere kB.
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9


# ---------------------------------------------------------------- the script

def median_and_range(values: np.ndarray) -> str:
    return f"{np.median(values):.2f} ({values.min():.2f} to {values.max():.2f})"


def main(cfg: Config) -> None:
    if not importlib.util.find_spec("accelerate"):
        raise UserError("Trainer needs a package that is not installed: pip install accelerate")
    if torch.cuda.device_count() > 1:
        raise UserError("Trainer would take all GPUs, ours takes one; set CUDA_VISIBLE_DEVICES=0")
    _, _, subtask = open_subtask(cfg)
    length = subtask.contexts.length
    print(f"\n{len(length)} contexts of {length.mean():.0f} tokens on average, at most {cfg.max_len}; "
          f"{len(subtask.train)} labelled pieces, {len(subtask.val)} to score; {device()}, "
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
    columns = {side: np.array(seconds) for side, seconds in measured.items()}       # (repeats, 4) each
    for side in list(SIDES)[1:]:
        columns[f"{side} / ours"] = columns[side] / columns["ours"]
    table = pd.DataFrame(index=pd.Index([*STAGES, "episode"], name="seconds"))
    for name, column in columns.items():
        table[name] = [median_and_range(seconds) for seconds in column.T]
    print("\n" + report.markdown_table(table))
    peaks = ", ".join(f"{side} {gb[side]:.2f}" for side in SIDES)
    print(f"\nmedian of {cfg.repeats} (least to most); peak GB: {peaks}")


if __name__ == "__main__":
    runs.start(main, Config)
