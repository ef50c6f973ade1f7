"""What an episode of meta-training costs, stage by stage: as a careful user writes it with Hugging Face's Trainer, and as here, in one run.

    python bench.py                                                             # toycls, tiny LM
    python bench.py --dataset=chemprot --lm=distilbert-base-uncased --plain=True
    python bench.py --scaling=True                                              # and how the cost grows with length, batch, width and contexts

Ratios carry over to other machines, seconds do not. Needs `pip install accelerate` (Trainer's own requirement).
"""
import contextlib
import copy
import ctypes
import importlib.metadata
import importlib.util
import itertools
import json
import math
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

import data_prep
import finetune_cls
import finetune_qa
import loop
import maskers
import train_nmg
from data_prep import Rows, Specials, gather
from loop import UserError, attention_of_models, beside, checked, cli, device, has_bf16, peak_gb, stream
from pretrain import fitting, hidden_states, load_lm, masked_rows, pretrain, versions

STAGES = {"masking": "masking", "MLM": "mlm", "fine-tuning": "finetuning", "validation": "validation", "policy updates": "updates"}  # methods
PLAY = ("MLM", "fine-tuning", "validation")                         # of which a play consists
POINTS = [(n, b, 384) for n in (128, 256, 512) for b in (8, 16, 32)] + [(384, 16, 384), (128, 64, 384)] + [(128, 16, h) for h in (128, 256, 768)]
ATTENTION = (64, 128, 192, 256, 384, 512)


# ---------------------------------------------------------------- the work, three ways

class Here:
    """The stages of a play, and the updates of both agents, with the functions that train_nmg.py calls; `fast` False: their plain path."""

    def __init__(self, work: SimpleNamespace, fast: bool = True):
        self.w, self.fast, self.finetune = work, fast, finetune_cls if work.task.kind == "cls" else finetune_qa
        self.random = maskers.find("random")

    def masking(self) -> None:
        for epoch in range(self.w.mlm_epochs):
            for rows in np.array_split(np.arange(len(self.w.sub.contexts)), -(-len(self.w.sub.contexts) // self.w.batch_size)):
                masked_rows(self.w.sub.contexts, self.random, self.w.p, 0, epoch, rows)

    def mlm(self) -> None:
        self.adapted = copy.deepcopy(self.w.model)
        pretrain(self.adapted, self.w.sub.contexts, self.random, p=self.w.p, epochs=self.w.mlm_epochs, batch_size=self.w.batch_size,
                 max_len=self.w.block, fast=self.fast, quiet=True)

    def finetuning(self) -> None:
        labels = (self.w.task.labels,) if self.w.task.kind == "cls" else ()
        self.tuned = self.finetune.finetune(self.adapted, self.w.sub.train, *labels, epochs=self.w.ft_epochs, batch_size=self.w.batch_size,
                                            max_len=self.w.length, fast=self.fast, quiet=True)

    def validation(self) -> None:
        self.finetune.predict(self.tuned, self.w.sub.val, fast=self.fast, quiet=True)

    def updates(self) -> None:
        contexts, rng = self.w.sub.contexts, np.random.default_rng(0)
        batch = gather(contexts, np.arange(len(contexts)))
        mask = self.random(batch, maskers.budget(batch, self.w.p), maskers.RowRandom(0, "mask", 0, batch.rows))
        log_p, R = train_nmg.log_softmax(np.where(batch.ok, 0.0, -np.inf)), rng.choice([-1.0, 0.0, 1.0], mask.shape)
        memory = {0: train_nmg.States.of(self.w.model, contexts)}
        for _ in range(2):
            agent = train_nmg.Agent(maskers.NMG(self.w.hidden), 1e-4)
            agent.store(train_nmg.actions(0, mask, R, log_p, np.zeros(len(mask)), batch.ids, "linear"), 50_000)
            agent.learn(memory, rng, self.w.updates, self.w.minibatch, "linear", None)


class Baseline:
    """The same with Trainer: batches padded to their longest row, head on every position, models saved and loaded between stages, and
    policies that learn from states padded to the longest context. What its n-best search over answers would cost is left out."""

    def __init__(self, work: SimpleNamespace, folder: Path):
        import transformers as hf
        self.w, self.folder, self.lm = work, folder, hf.AutoModelForMaskedLM
        self.task = hf.AutoModelForSequenceClassification if work.task.kind == "cls" else hf.AutoModelForQuestionAnswering
        self.shape = {"num_labels": work.task.labels} if work.task.kind == "cls" else {}
        self.mask, self.pad = hf.DataCollatorForLanguageModeling(work.tok, mlm_probability=work.p), hf.DataCollatorWithPadding(work.tok)
        self.contexts, self.train, self.val = ([self.example(rows, i) for i in range(len(rows))] for rows in
                                               (work.sub.contexts, work.sub.train, work.sub.val))

    def example(self, rows: Rows, i: int) -> dict:
        batch = gather(rows, np.array([i]))
        if rows.question is not None:
            first, last = finetune_qa.targets(batch, rows)[0].tolist()
            return {"input_ids": batch.ids[0].tolist(), "start_positions": first, "end_positions": last} | (
                {} if batch.types is None else {"token_type_ids": batch.types[0].tolist()})
        return {"input_ids": batch.ids[0].tolist()} | ({} if rows is self.w.sub.contexts else {"labels": int(rows.split.label[rows.row[i]])})

    def trainer(self, model: torch.nn.Module, examples: list[dict] | None, collate: Callable, epochs: int):
        from transformers import Trainer, TrainingArguments
        options = TrainingArguments(str(self.folder / "trainer"), num_train_epochs=epochs, per_device_train_batch_size=self.w.batch_size,
                                    learning_rate=2e-5, per_device_eval_batch_size=4 * self.w.batch_size, bf16=has_bf16(device().type),
                                    use_cpu=device().type == "cpu", save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True)
        return Trainer(model, options, train_dataset=examples, data_collator=collate)

    def masking(self) -> None:
        for _ in range(self.w.mlm_epochs):
            for i in range(0, len(self.contexts), self.w.batch_size):
                self.mask(self.contexts[i:i + self.w.batch_size])

    def mlm(self) -> None:
        lm = self.lm.from_pretrained(data_prep.find_lm(self.w.lm), dtype=torch.float32)
        trainer = self.trainer(lm, self.contexts, self.mask, self.w.mlm_epochs)
        trainer.train()
        trainer.model.save_pretrained(self.folder / "adapted")

    def finetuning(self) -> None:
        trainer = self.trainer(self.task.from_pretrained(self.folder / "adapted", **self.shape), self.train, self.pad, self.w.ft_epochs)
        trainer.train()
        trainer.model.save_pretrained(self.folder / "tuned")

    def validation(self) -> None:
        self.trainer(self.task.from_pretrained(self.folder / "tuned"), None, self.pad, 1).predict(self.val)

    def updates(self) -> None:
        batch, rng, dev = gather(self.w.sub.contexts, np.arange(len(self.w.sub.contexts))), np.random.default_rng(0), device()
        encode = hidden_states(self.w.model)
        states = torch.cat([encode(gather(self.w.sub.contexts, rows, batch.ids.shape[1])).cpu()
                            for rows in np.array_split(batch.rows, -(-len(batch.rows) // self.w.batch_size))])
        real, ok = torch.from_numpy(batch.real), torch.from_numpy(batch.ok)
        for _ in range(2):
            policy = maskers.NMG(self.w.hidden).to(dev)
            optimizer = torch.optim.Adam(policy.parameters(), lr=1e-4)
            for _ in range(self.w.updates):
                rows = torch.from_numpy(rng.integers(len(states), size=self.w.minibatch))
                action = torch.from_numpy(np.stack([rng.choice(np.flatnonzero(batch.ok[r])) for r in rows]))
                logits, value = policy(states[rows].to(dev), real[rows].to(dev), ok[rows].to(dev))
                reward = torch.from_numpy(rng.choice([-1.0, 1.0], len(rows))).float().to(dev)
                policy_loss, value_loss = train_nmg.losses(logits, value, action.to(dev), reward, -ok[rows].sum(1).log().to(dev))
                optimizer.zero_grad()
                (policy_loss + value_loss).backward()
                optimizer.step()


def episode(w: SimpleNamespace, folder: Path) -> dict:
    """One whole episode by train_nmg.py in a process of its own: its line of metrics (seconds of each stage, peak memory)."""
    flags = {"dataset": w.dataset, "lm": w.lm, "raw": w.raw, "episodes": 1, "contexts": w.contexts, "docs": w.contexts, "examples": w.examples,
             "validation": w.validation, "val_share": 0.1, "p": w.p, "mlm_epochs": w.mlm_epochs, "mlm_lr": 2e-5, "ft_epochs": w.ft_epochs,
             "ft_lr": 2e-5, "rl_lr": 1e-4, "batch_size": w.batch_size, "max_len": w.block, "ft_max_len": w.length, "updates": w.updates,
             "minibatch": w.minibatch, "explore": 0, "continual": True, "credit": "play", "alpha": 0.01, "metric": "accuracy", "compare": 0,
             "seed": w.seed, "out": folder / "episode"}
    torch.cuda.empty_cache()                                        # a GPU's memory that this process keeps, but does not use
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("train_nmg.py")), *(f"--{k}={v}" for k, v in flags.items())],
                          capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"train_nmg.py ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return json.loads((folder / "episode/metrics.jsonl").read_text())


# ---------------------------------------------------------------- measuring

@contextlib.contextmanager
def measured(into: list) -> Iterator[None]:
    """Appends (seconds, peak memory in GB) of the block: of the device's memory on a GPU, else of this process."""
    peak = Path("/proc/self/clear_refs")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif peak.exists():
        peak.write_text("5")                                    # Linux: sets the highest resident size back to the present one
    begin = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    into.append((time.perf_counter() - begin, peak_gb()))


def masking_rate(pieces: Rows, name: str) -> float:
    """Rows a second of a masker alone, on batches of 32 that are already there."""
    batches = [gather(pieces, rows) for rows in np.array_split(np.arange(len(pieces)), -(-len(pieces) // 32))]
    begin = time.perf_counter()
    for batch in batches:
        maskers.find(name)(batch, maskers.budget(batch, 0.15), maskers.RowRandom(0, "mask", 0, batch.rows))
    return len(pieces) / (time.perf_counter() - begin)


def product_rate(dtype: torch.dtype) -> float:
    """Floating-point operations a second of square matrix products: the limit of any training on this machine."""
    n = 2048 if device().type == "cpu" else 16384                   # a GPU is through with small ones before they are started
    a, b, best = torch.randn(n, n, device=device()).to(dtype), torch.randn(n, n, device=device()).to(dtype), 0.0
    for _ in range(8):
        begin = time.perf_counter()
        (a @ b)[0, 0].item()
        best = max(best, 2 * n**3 / (time.perf_counter() - begin))
    return best


def cost(model: torch.nn.Module) -> tuple[Callable[[np.ndarray], float], float]:
    """Operations of a forward pass of the encoder over rows of given lengths (a L + b L^2 each, from two counts), and of the MLM head a token."""
    def count(module: torch.nn.Module, n: int) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(input_ids=torch.ones(1, n, dtype=torch.long, device=device()))
        return counter.get_total_flops()
    model.to(device()).eval()
    short, long = count(model.base_model, 64) / 64, count(model.base_model, 128) / 128
    b = (long - short) / 64
    return (lambda n: float(((short - 64 * b) * n + b * n.astype(float)**2).sum())), (count(model, 64) - 64 * short) / 64


def mlm_operations(model: torch.nn.Module, pieces: Rows, p: float) -> float:
    """Operations of the matrix products that an epoch of MLM cannot do without: real tokens, head on masked positions (a backward pass counts
    twice its forward pass)."""
    encoder, head = cost(model)
    return 3 * (encoder(pieces.length) + head * maskers.budget(gather(pieces, np.arange(len(pieces))), p).sum())


def operations(w: SimpleNamespace) -> dict[str, float]:
    """The same of the stages of one play."""
    encoder, _ = cost(w.model)
    return {"MLM": w.mlm_epochs * mlm_operations(w.model, w.sub.contexts, w.p), "fine-tuning": 3 * w.ft_epochs * encoder(w.sub.train.length),
            "validation": encoder(w.sub.val.length)}


def processor() -> str:
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return named[1] if named else platform.processor() or platform.machine()


def steps(lm: torch.nn.Module, data: data_prep.Data, specials: Specials, length: int, batch_size: int) -> tuple[float, float, float]:
    """Rows a second, useful operations a second and peak memory of two MLM steps on full blocks of `length` tokens."""
    n, text = 2 * batch_size, data.corpus
    lo = np.arange(n) * 97 % max(1, len(text.ids) - length)                                         # blocks cut without regard to texts
    pieces = Rows(text, specials, np.zeros(n, np.int64), lo, lo + length - len(specials.prefix) - len(specials.suffix))
    seen = []
    with contextlib.suppress(OSError, AttributeError):              # Linux: what earlier points needed goes back to the system
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    pretrain(lm, pieces.take(np.arange(batch_size)), maskers.find("random"), batch_size=batch_size, quiet=True)
    with measured(seen):
        pretrain(lm, pieces, maskers.find("random"), batch_size=batch_size, quiet=True)
    (seconds, gb), = seen
    return n / seconds, mlm_operations(lm, pieces, 0.15) / seconds, gb


def attention_gain(n: int, dropout: float) -> float:
    """How many times faster than the plain way the one for long rows is, 16 rows of n tokens (12 heads of 32): training, or evaluation where
    dropout is 0."""
    heads, took, usual = torch.randn(3, 16, 12, n, 32, requires_grad=dropout > 0), {0: [], math.inf: []}, loop.LARGE
    for large in 5 * list(took):
        loop.LARGE, begin = large, time.perf_counter()
        with loop.quick_dropout(True):
            out = loop.attention(None, *heads, None, dropout=dropout)[0].sum()
        if dropout:
            out.backward()
        took[large].append(time.perf_counter() - begin)
    loop.LARGE = usual
    return min(took[math.inf]) / min(took[0])


def fresh_bert(hidden: int, vocabulary: int) -> torch.nn.Module:
    """A BERT of BERT-base's shape at this width (12 layers from 768 on, 6 below), random weights."""
    from transformers import BertConfig, BertForMaskedLM
    config = BertConfig(vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=12 if hidden >= 768 else 6, num_attention_heads=hidden // 64,
                        intermediate_size=4 * hidden)
    config._attn_implementation = attention_of_models()
    return BertForMaskedLM(config)


def table(heading: list[str], lines: list[list[str]]) -> None:
    widths = [max(len(line[i]) for line in [heading, *lines]) for i in range(len(heading))]
    for line in [heading, *lines]:
        print("  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))))


def main(
    dataset: str = "toycls",            # a name or a path (see data_prep.py)
    lm: str = "tiny",                   # tiny, a Hugging Face folder or hub name
    raw: str | None = None,             # folder with raw files of a named data set
    contexts: int | None = None,        # texts of the sub-task; None: 64, question answering 32
    examples: int | None = None,        # labelled examples, at most; None: 64, question answering 200
    validation: int = 300,              # validation examples, at most
    p: float = 0.05,                    # share of tokens to mask
    mlm_epochs: int = 3,                # of pre-training
    ft_epochs: int | None = None,       # None: 5, question answering 1
    batch_size: int = 8,                # rows a step
    max_len: int | None = None,         # tokens a block; None: 256, question answering 512, or the LM's most
    ft_max_len: int | None = None,      # tokens of a labelled text or window; None: 256, question answering 384, or the LM's most
    updates: int = 10,                  # minibatches an agent learns from
    minibatch: int = 64,                # actions
    repeats: int = 3,                   # each with texts of its own, all sides in turn; the table shows medians
    spacy_model: str | None = None,     # also time the entity masker, with this spaCy model
    plain: bool = False,                # also time the plain path: rows padded to max_len and ft_max_len, fp32, head on every position
    scaling: bool = False,              # also time MLM steps at other lengths, batches and widths, and plays of other numbers of contexts
    out: str = "runs/bench.json",       # the figures
):
    run = checked(locals())
    if not importlib.util.find_spec("accelerate"):
        raise UserError("bench.py compares with Hugging Face's Trainer, which needs a package that is not installed: pip install accelerate")
    if torch.cuda.device_count() > 1:
        raise UserError(f"{torch.cuda.device_count()} GPUs: Trainer would take them all, ours one; set CUDA_VISIBLE_DEVICES=0")
    tok = data_prep.load_tokenizer(lm)
    data, model = data_prep.load(dataset, tok, raw), load_lm(lm)
    if data.kind == "text":
        raise UserError(f"--dataset={dataset}: has no labelled examples")
    qa, specials = data.kind == "qa", Specials.of(tok)
    block, length = fitting(model, max_len, 512 if qa else 256), fitting(model, ft_max_len, 384 if qa else 256, "ft_max_len")
    task = train_nmg.Task(data, specials, 0.1, block, length)

    def sized(n: int, examples: int, seed: int = 0) -> SimpleNamespace:
        sub = task.sample(stream(seed, "sub-task 0"), n, n, examples, validation)                   # the one that train_nmg.py draws
        return SimpleNamespace(**run | {"contexts": n, "examples": examples, "ft_epochs": ft_epochs or (1 if qa else 5)}, task=task, sub=sub, tok=tok,
                               seed=seed, model=model, block=block, length=length, hidden=model.config.hidden_size)

    contexts, examples = contexts or (32 if qa else 64), examples or (200 if qa else 64)
    works = [sized(contexts, examples, i) for i in range(repeats)]
    limit = {str(d).removeprefix("torch."): product_rate(d) for d in (torch.float32, torch.bfloat16)}
    best = limit["bfloat16" if has_bf16(device().type) else "float32"]
    figures = {"dataset": dataset, "lm": lm, "contexts": [len(w.sub.contexts) for w in works], "labelled": [len(w.sub.train) for w in works],
               "validation": [len(w.sub.val) for w in works], "mean length": [round(float(w.sub.contexts.length.mean()), 1) for w in works],
               "longest": [int(w.sub.contexts.length.max()) for w in works], "batch": batch_size,
               "machine": processor(), "threads": torch.get_num_threads(), "native bf16": has_bf16(device().type),
               **versions(), "accelerate": importlib.metadata.version("accelerate"),
               "matrix products, GFLOP/s": {k: round(v / 1e9) for k, v in limit.items()}}
    print(", ".join(f"{k} {v}" for k, v in figures.items()), flush=True)

    names = ["random", "whole", "span", "punct"]
    if spacy_model:
        data.corpus.spacy_model = spacy_model
        names.append("entity")
    figures["maskers, rows/s"] = {n: round(np.median([masking_rate(task.blocks.take(np.arange(min(320, len(task.blocks)))), n)
                                                      for _ in range(repeats + 1)])) for n in names}
    print("maskers alone, rows/s: " + ", ".join(f"{n} {r:,}" for n, r in figures["maskers, rows/s"].items()), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        sides = {"plain": lambda w: Here(w, fast=False)} if plain else {}
        sides |= {"baseline": lambda w: Baseline(w, Path(folder)), "ours": Here}
        seen, whole = {(side, stage): [] for side in sides for stage in STAGES}, []
        with tqdm(total=repeats * (1 + len(seen)), desc="measuring", disable=None) as bar:
            for i, w in enumerate(works):
                of = {name: side(w) for name, side in sides.items()}
                for stage, name in itertools.product(STAGES, np.roll(list(sides), i).tolist()):     # another one first in each repeat
                    with measured(seen[name, stage]):
                        getattr(of[name], STAGES[stage])()
                    bar.update()
                whole.append(episode(w, Path(tempfile.mkdtemp(dir=folder))))
                bar.update()

    trained = np.array([w.mlm_epochs * len(w.sub.contexts) for w in works])                        # (repeats,) each, as all below
    rows = {"masking": trained, "MLM": trained, "fine-tuning": np.array([w.ft_epochs * len(w.sub.train) for w in works]),
            "validation": np.array([len(w.sub.val) for w in works]), "policy updates": 2 * updates * minibatch}
    counts = [operations(w) for w in works]
    useful = {stage: np.array([count[stage] for count in counts]) for stage in PLAY}
    useful["whole episode"] = 3 * sum(useful.values())
    seconds = {key: np.array([s for s, _ in some]) for key, some in seen.items()}
    gb = {key: max(g for _, g in some) for key, some in seen.items()}
    for side in sides:
        seconds[side, "whole episode"] = 3 * sum(seconds[side, s] for s in PLAY) + seconds[side, "policy updates"]
        gb[side, "whole episode"] = max(gb[side, s] for s in STAGES)
    seconds["ours", "whole episode"] = np.array([m["seconds"]["episode"] for m in whole])
    gb["ours", "whole episode"] = max(m["peak_gb"] for m in whole)
    others = [side for side in sides if side != "ours"]
    lines, figures["stages"] = [], {}
    for stage in (*STAGES, "whole episode"):
        took = {side: float(np.median(seconds[side, stage])) for side in sides}
        ratios = {side: seconds[side, stage] / seconds["ours", stage] for side in others}
        rate, share = (float(np.median(what.get(stage, 0) / seconds["ours", stage])) for what in (rows, useful))
        share /= best
        figures["stages"][stage] = {"seconds": {side: seconds[side, stage].tolist() for side in sides},
                                    "peak GB": {side: gb[side, stage] for side in sides}, "rows/s": rate, "share": share}
        lines.append([stage, *(f"{took[side]:.2f}" for side in sides),
                      *(f"{np.median(r):.1f} ({r.min():.1f} to {r.max():.1f})" for r in ratios.values()), f"{rate:,.0f}" if rate else "",
                      f"{share:.0%}" if share else "", *(f"{gb[side, stage]:.2f}" for side in sides)])
    print()
    table(["seconds, medians", *sides, *(f"{side} / ours" for side in others), "rows/s", "of limit", *(f"{side}, GB" for side in sides)], lines)
    rest = [1 - sum(v for k, v in m["seconds"].items() if k != "episode") / m["seconds"]["episode"] for m in whole]
    figures["rest of an episode"] = rest
    print(f"whole episode: ours measured, by train_nmg.py; the others three plays and the updates. Of ours {np.median(rest):.1%} goes into "
          "everything but MLM, fine-tuning, validation and updates.\nrows/s: ours; of limit: useful operations a second (real tokens, head on masked "
          "positions) as a share of the matrix products' above; GB: peak of the process", flush=True)

    if scaling:
        print()
        lines, figures["scaling"] = [], []
        for n, b, h in tqdm(POINTS, desc="scaling", disable=None):
            rate, done, gb = steps(fresh_bert(h, len(tok)), data, specials, n, b)
            figures["scaling"].append({"length": n, "batch": b, "hidden": h, "rows/s": rate, "share": done / best, "peak GB": gb})
            lines.append([f"{n}", f"{b}", f"{h}", f"{rate:.1f}", f"{done / best:.0%}", f"{gb:.2f}"])
        table(["MLM steps: length", "batch", "hidden", "rows/s", "of limit", "GB"], lines)
        if device().type == "cpu":
            lines = []
            for n in ATTENTION:
                gains = [attention_gain(n, dropout) for dropout in (0.1, 0.0)]
                figures["scaling"].append({"attention": n, "times the plain way": gains})
                lines.append([f"{n}", *(f"{gain:.2f}" for gain in gains)])
            print()
            table(["attention, times the plain way: tokens", "training", "evaluation"], lines)
        lines = []
        for n in (max(1, contexts // 4), max(1, contexts // 2), contexts, 2 * contexts):
            some, took = Here(sized(n, max(1, n * examples // contexts))), []
            for stage in (some.mlm, some.finetuning, some.validation):
                with measured(took):
                    stage()
            figures["scaling"].append({"contexts": n, "seconds": [s for s, _ in took]})
            lines.append([f"{n}", *(f"{s:.1f}" for s, _ in took), f"{max(gb for _, gb in took):.2f}"])
        print()
        table(["one play: contexts", *PLAY, "GB"], lines)
    with beside(Path(out)) as tmp:
        tmp.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    cli(main)
