"""What an episode of meta-training costs: here, as the official code does it, and with transformers' Trainer.

    python -m tools.bench                                           # toycls, tiny LM
    python -m tools.bench --dataset=chemprot --lm=distilbert-base-uncased

    ours     the functions that train_nmg.py calls
    padded   as the official code does it: rows padded to the maximum, the MLM head on every position, fp32,
             torch's dropout and attention; policies that learn from padded states
    Trainer  batches padded to their longest row, bf16 where that is native, no search for the best answers;
             policies as in padded

An episode is three plays of MLM, fine-tuning and scoring, and then both policies. Each side has a process of
its own; they take turns on sub-tasks as train_nmg.py draws them. Ratios carry over to other machines, seconds
do not. The last line is JSON, for programs. Needs `pip install accelerate`.
"""
import contextlib
import copy
import importlib
import importlib.util
import io
import json
import re
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

import data_prep
import finetune_cls
import finetune_qa
import loop
import maskers
import pretrain
import runs
import train_nmg
from data import Batch, Pieces, collate
from loop import device, stream, with_head
from maskers import Policy, RowRandom
from runs import UserError
from subtasks import SubTaskSampler

STAGES = ("MLM", "fine-tuning", "scoring", "policies", "episode")


@dataclass
class Config:
    dataset: str = "toycls"         # squad newsqa emrqa imdb chemprot toycls toyqa, or a path (data_prep.py)
    lm: str = "tiny"                # tiny, a Hugging Face folder or hub name
    raw: str | None = None          # folder with the raw files of a named data set
    contexts: int = 64              # texts of a sub-task
    examples: int = 64              # labelled examples, at most
    validation: int = 300           # validation examples, at most
    p: float = 0.05                 # share of tokens to mask
    batch_size: int = 8             # pieces a step
    max_len: int | None = None      # tokens a context; None: 512 for question answering, else 256
    ft_max_len: int | None = None   # tokens of a labelled piece; None: 384 for question answering, else 256
    repeats: int = 3                # episodes, each on a sub-task of its own; the tables show medians


# ---------------------------------------------------------------- the work, in three ways

class Ours:
    """The stages of an episode, with the functions that train_nmg.py calls."""
    fast = True

    def __init__(self, cfg: Config, repeat: int):
        loop.use_fast_path(self.fast)
        self.tokenizer = data_prep.load_tokenizer(cfg.lm)
        data = data_prep.load(cfg.dataset, self.tokenizer, cfg.raw)
        if data.kind == "text":
            raise UserError(f"--dataset={cfg.dataset}: has no labelled examples")
        self.task = importlib.import_module(f"finetune_{data.kind}")
        self.lm = pretrain.load_lm(cfg.lm).to(device())
        self.policies = [Policy(self.lm.config.hidden_size) for _ in ("opponent", "learner")]

        # The flags of train_nmg.py, resolved as there.
        flags = {name: value for name, value in vars(cfg).items() if name != "repeats"}
        self.cfg = train_nmg.Config(**flags, seed=repeat)
        runs.fill(self.cfg, train_nmg.PAPER | self.task.INNER_LOOP | {"metric": self.task.METRICS[0]})
        self.cfg.max_len = pretrain.max_len_of(self.lm, cfg.max_len, data.block_len)
        ft_max_len = self.task.DEFAULTS["max_len"]
        self.cfg.ft_max_len = pretrain.max_len_of(self.lm, cfg.ft_max_len, ft_max_len, "ft_max_len")

        # The first sub-task with this seed, and random masks.
        sampler = SubTaskSampler(data, self.task, self.cfg.max_len, self.cfg.ft_max_len, self.cfg.val_share)
        rng = stream(repeat, "sub-task 0")
        self.subtask = sampler.sample(rng, cfg.contexts, None, cfg.examples, cfg.validation)
        self.contexts = self.subtask.contexts
        self.batch = collate(self.contexts, np.arange(len(self.contexts)))
        self.rng = RowRandom(repeat, "random acts", 0, self.batch.indices)
        self.mask = maskers.random(self.batch, maskers.budget_of(self.batch, cfg.p), self.rng)      # (N, L)

    def mlm(self) -> None:
        self.adapted = copy.deepcopy(self.lm)
        pretrain.pretrain(self.adapted, self.contexts, maskers.fixed(self.mask), p=self.cfg.p,
                          epochs=self.cfg.mlm_epochs, lr=self.cfg.mlm_lr, batch_size=self.cfg.batch_size,
                          remask=False, quiet=True)

    def finetune(self) -> None:
        self.model = self.task.finetune(self.adapted, self.subtask.train, epochs=self.cfg.ft_epochs,
                                        lr=self.cfg.ft_lr, batch_size=self.cfg.batch_size, quiet=True)

    def score(self) -> None:
        self.task.example_scores(self.model, self.subtask.val, self.cfg.metric)

    def learn(self) -> None:
        states = train_nmg.encode(self.lm, self.contexts)
        rng = np.random.default_rng(0)
        for policy in self.policies:
            agent = train_nmg.Agent(policy, self.cfg.rl_lr)
            play = train_nmg.act(agent, states, self.batch, self.rng, self.cfg.p, explore=False)
            R = rng.choice([-1.0, 1.0], play.mask.shape)
            agent.replay = train_nmg.actions_of(0, play, R, play.mask, self.batch.input_ids)
            agent.learn({0: states}, train_nmg.SelfPlay(), rng, self.cfg)


class Padded(Ours):
    """The same functions, with padded batches and without what makes MLM fast."""
    fast = False

    def mlm(self) -> None:
        with patch.multiple(pretrain, collate=padded_to(self.cfg.max_len), mlm_loss=mlm_loss_everywhere,
                            choose_masks=lambda *_: self.mask):
            super().mlm()

    def finetune(self) -> None:
        with patch.object(self.task, "collate", padded_to(self.cfg.ft_max_len)):
            super().finetune()

    def score(self) -> None:
        with patch.object(self.task, "collate", padded_to(self.cfg.ft_max_len)):
            super().score()

    def learn(self) -> None:
        pad = padded_to(self.cfg.max_len)
        lm_states = pretrain.LMReader(self.lm)
        parts = np.array_split(self.batch.indices, -(-len(self.contexts) // self.cfg.batch_size))
        hidden = torch.cat([lm_states(pad(self.contexts, part)).cpu() for part in parts])   # (N, max_len, H)
        batch = pad(self.contexts, self.batch.indices)
        masks = [torch.from_numpy(batch.attention_mask), torch.from_numpy(batch.maskable)]
        actions = np.argwhere(self.mask)                                                    # (A, 2)
        rng = np.random.default_rng(0)
        for policy in self.policies:
            policy.to(device())
            optimizer = torch.optim.Adam(policy.parameters(), lr=self.cfg.rl_lr)
            for _ in range(self.cfg.updates_per_episode):
                context, position = actions[rng.integers(len(actions), size=self.cfg.minibatch)].T
                R = rng.choice([-1.0, 1.0], len(context)).astype(np.float32)
                log_prob = -np.log(batch.maskable.sum(1)[context]).astype(np.float32)
                inputs = [x[context].to(device()) for x in (hidden, *masks)]
                given = [torch.from_numpy(x.copy()).to(device()) for x in (position, log_prob, R)]
                policy_loss, value_loss = train_nmg.losses(*policy(*inputs), *given, self.cfg.entropy_coef)
                optimizer.zero_grad()
                (policy_loss + value_loss).backward()
                optimizer.step()


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


class Trainer(Padded):
    """The same with Hugging Face's Trainer, but for the policies."""

    def __init__(self, cfg: Config, repeat: int):
        super().__init__(cfg, repeat)
        self.corpus = self.examples(self.contexts)
        self.train, self.val = self.examples(self.subtask.train), self.examples(self.subtask.val)

    def examples(self, pieces: Pieces) -> list[dict]:
        """A dictionary of lists for each piece."""
        found = []
        for i in range(len(pieces)):
            batch = collate(pieces, np.array([i]))
            example = {name: tensor[0].tolist() for name, tensor in batch.tensors().items()}
            if pieces.question_ids is not None:
                first, last = finetune_qa.targets(batch, pieces)[0].tolist()
                example |= {"start_positions": first, "end_positions": last}
            elif pieces is not self.contexts:
                example["labels"] = int(finetune_cls.labels_of(pieces)[i])
            found.append(example)
        return found

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
            labels = len(self.contexts.split.labels)
        self.model = with_head(self.adapted, auto_class, 0, num_labels=labels)
        self.trainer(self.model, self.train, self.cfg.ft_epochs, self.cfg.ft_lr).train()

    def score(self) -> None:
        self.trainer(self.model, [], 1, self.cfg.ft_lr).predict(self.val)


SIDES = {"ours": Ours, "padded": Padded, "Trainer": Trainer}


# ---------------------------------------------------------------- measuring

def measure(side: str, cfg: Config, repeat: int) -> tuple[list[tuple[float, float]], float]:
    """(seconds, peak GB of the GPU or else of this process) of each stage, and the operations of MLM."""
    found = []
    # Trainer prints every result.
    with contextlib.redirect_stdout(io.StringIO()):
        work = SIDES[side](cfg, repeat)
        for stage in (work.mlm, work.finetune, work.score, work.learn):
            reset_peak()
            started = time.perf_counter()
            stage()
            if device().type == "cuda":
                torch.cuda.synchronize()
            found.append((time.perf_counter() - started, peak_gb()))
    seconds, peaks = zip(*found, strict=True)
    episode = (3 * sum(seconds[:3]) + seconds[3], max(peaks))
    return [*found, episode], mlm_operations(work)


def reset_peak() -> None:
    if device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    # Linux: the peak counts from the memory of now on.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_gb() -> float:
    """The peak since reset_peak; 0 on a system that does not tell it."""
    if device().type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    return int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1]) * 1024 / 1e9


def mlm_operations(work: Ours) -> float:
    """Floating-point operations of the products that MLM cannot do without: the encoder on real tokens, the
    head on masked ones. A backward pass counts twice its forward pass."""
    length = round(work.contexts.length.mean())
    row = torch.ones(1, length, dtype=torch.long, device=device())
    counts = []
    for module in (work.lm.base_model, work.lm):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(input_ids=row)
        counts.append(counter.get_total_flops() / length)
    encoder, head = counts[0], counts[1] - counts[0]
    return float(3 * work.cfg.mlm_epochs * (encoder * work.contexts.length.sum() + head * work.mask.sum()))


def product_rate() -> float:
    """Operations a second of a large square product, in the type that training computes in."""
    n = 2048 if device().type == "cpu" else 16384
    dtype = torch.bfloat16 if loop.has_bf16() else torch.float32
    matrix = torch.randn(n, n, device=device()).to(dtype)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        seconds.append(time.perf_counter() - started)
    return 2 * n**3 / min(seconds)


# ---------------------------------------------------------------- the script

def table(heading: list[str], rows: list[list[str]]) -> None:
    """Prints a table in Markdown."""
    print()
    for row in (heading, ["---"] + ["---:"] * (len(heading) - 1), *rows):
        print("| " + " | ".join(row) + " |")


def spread(values: np.ndarray) -> str:
    return f"{np.median(values):.2f} ({values.min():.2f} to {values.max():.2f})"


def main(cfg: Config) -> None:
    if not importlib.util.find_spec("accelerate"):
        raise UserError("Trainer needs a package that is not installed: pip install accelerate")
    if torch.cuda.device_count() > 1:
        raise UserError("Trainer would take all GPUs, ours takes one; set CUDA_VISIBLE_DEVICES=0")
    work = Ours(cfg, 0)
    limit = product_rate()
    length = work.contexts.length
    print(f"\n{len(length)} contexts of {length.mean():.0f} tokens on average, at most {work.cfg.max_len}; "
          f"{len(work.subtask.train)} labelled pieces, {len(work.subtask.val)} to score; {device()}, "
          f"{torch.get_num_threads()} threads, large products {limit / 1e9:,.0f} GFLOP/s", flush=True)

    # Each side in a process of its own; another one is first in every repeat.
    pools = {side: ProcessPoolExecutor(1, get_context("spawn")) for side in SIDES}
    measured = {side: [] for side in SIDES}
    rates = []
    with tqdm(total=cfg.repeats * len(SIDES), desc="measuring", disable=None) as bar:
        for repeat in range(cfg.repeats):
            for side in np.roll(list(SIDES), repeat).tolist():
                found, operations = pools[side].submit(measure, side, cfg, repeat).result()
                measured[side].append(found)
                if side == "ours":
                    rates.append(operations / found[0][0])
                bar.update()
    share = float(np.median(rates)) / limit
    measured = {side: np.array(found) for side, found in measured.items()}      # (repeats, stages, 2) each

    others = [side for side in SIDES if side != "ours"]
    times, memory = [], []
    for i, stage in enumerate(STAGES):
        seconds = {side: found[:, i, 0] for side, found in measured.items()}
        ratios = [spread(seconds[side] / seconds["ours"]) for side in others]
        times.append([stage, *map(spread, seconds.values()), *ratios])
        memory.append([stage, *(f"{found[:, i, 1].max():.2f}" for found in measured.values())])
    table(["seconds", *SIDES, *(f"{side} / ours" for side in others)], times)
    table(["peak GB", *SIDES], memory)
    print(f"\nseconds: median of {cfg.repeats} (least to most); our MLM reaches {share:.0%} of the rate of "
          "large products")
    figures = vars(cfg) | {"gflops": limit / 1e9, "mlm_share": share, "seconds": {}, "gb": {}}
    for side, found in measured.items():
        for name, values in zip(("seconds", "gb"), np.median(found, 0).T.tolist(), strict=True):
            figures[name][side] = dict(zip(STAGES, values, strict=True))
    print(json.dumps(figures))


if __name__ == "__main__":
    runs.start(main, Config)
