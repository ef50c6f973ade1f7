"""Fine-tunes a LM on extractive question answering and scores it: exact match (EM) and F1.

    python finetune_qa.py                                                       # toyqa, tiny LM, no further pre-training
    python finetune_qa.py --dataset=newsqa --lm=runs/newsqa-whole               # a folder that pretrain.py made
    python finetune_qa.py --dataset=squad_like_folder --lm=distilbert-base-uncased --split=dev
"""
import json
import re
import string
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoModelForQuestionAnswering

import data_prep
import toy
from data_prep import Batch, Rows, Specials, gather, windows
from loop import autocast, by_length, checked, checkpoint_of, claim, cli, device, fit, pad_to, processes, spent, to, with_head
from pretrain import digest, finish, fitting, inputs, lineage, load_lm, save, versions


def targets(batch: Batch, pieces: Rows) -> torch.Tensor:
    """(B, 2) columns of the first and the last token of the answer; column 0 where the window does not hold all of it."""
    column = answer_tokens(pieces, batch.rows) - pieces.lo[batch.rows][:, None] + batch.inside.argmax(1)[:, None]
    return torch.from_numpy(np.where(whole_answer(pieces, batch.rows)[:, None], column, 0))


def answer_tokens(pieces: Rows, rows: np.ndarray) -> np.ndarray:
    """(B, 2) first and last token of the answers to the questions of some windows, counted in the split."""
    return pieces.split.start[pieces.row[rows]][:, None] + pieces.split.answer[pieces.question[rows]]


def whole_answer(pieces: Rows, rows: np.ndarray) -> np.ndarray:
    """(B,) whether a window holds all of its answer."""
    answer = answer_tokens(pieces, rows)
    return (answer[:, 0] >= pieces.lo[rows]) & (answer[:, 1] < pieces.hi[rows])


def loss_of(model: torch.nn.Module, t: dict[str, torch.Tensor]) -> torch.Tensor:
    out = model(**{k: v for k, v in t.items() if k != "labels"})
    return (F.cross_entropy(out.start_logits.float(), t["labels"][:, 0]) + F.cross_entropy(out.end_logits.float(), t["labels"][:, 1])) / 2


def finetune(lm: torch.nn.Module, pieces: Rows, *, epochs: int = 2, lr: float = 3e-5, batch_size: int = 16, max_len: int = 384, seed: int = 0,
             fast: bool = True, checkpoint: Path | None = None, key: str = "", quiet: bool = False) -> torch.nn.Module:
    """A span predictor around a copy of `lm`, all of it trained on `pieces` (windows). Order, head and dropout: separate streams."""
    model = with_head(lm, AutoModelForQuestionAnswering, seed, num_labels=2)

    def make(_, rows):
        batch = gather(pieces, rows, None if fast else max_len, pad_to())
        return inputs(batch) | {"labels": targets(batch, pieces)}

    fit(model, pieces.length, make, loss_of, epochs=epochs, batch_size=batch_size, lr=lr, seed=seed, fast=fast, checkpoint=checkpoint, key=key,
        desc="fine-tuning", quiet=quiet)
    return model


@torch.no_grad()
def predict(model: torch.nn.Module, pieces: Rows, max_answer: int = 30, n_best: int = 5, fast: bool = True, quiet: bool = False) -> list[list]:
    """For every question that `pieces` ask, in order, its n best (text, score, first token, last token), best first, over all its windows.

    A span's score is its start logit plus its end logit; every span of at most `max_answer` context tokens is considered."""
    dev, split, best = device(), pieces.split, {}
    model.to(dev).eval()
    with tqdm(total=len(pieces), desc="scoring", unit="window", disable=quiet or None) as bar:
        for rows in by_length(pieces.length):
            batch = gather(pieces, rows, None, pad_to())
            with autocast(dev, fast):
                out = model(**to(inputs(batch), dev))
            outside = torch.from_numpy(~batch.inside).to(dev)
            start = out.start_logits.float().masked_fill(outside, -torch.inf)                       # (B, L)
            end = F.pad(out.end_logits.float().masked_fill(outside, -torch.inf), (0, max_answer - 1), value=-torch.inf)
            score = start[:, :, None] + end.unfold(1, max_answer, 1)                                # (B, L, A): ends at start + 0 .. A-1
            top, flat = (x.cpu().numpy() for x in score.flatten(1).topk(min(n_best, score[0].numel())))
            for b, r in enumerate(rows):
                for value, at in zip(top[b], flat[b], strict=True):
                    if np.isfinite(value):
                        first = int(batch.at[b, at // max_answer])
                        best.setdefault(int(pieces.question[r]), []).append((float(value), first, first + int(at % max_answer)))
            bar.update(len(rows))
    return [answers(split, q, best.get(q, []), n_best) for q in np.unique(pieces.question)]


@torch.no_grad()
def positions(model: torch.nn.Module, pieces: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Of every window (M,): the share of start and end hit by the argmax over all its tokens (the official code's accuracy), and the log
    probability of both; 0 and nan where the window does not hold all of the answer."""
    dev, whole = device(), whole_answer(pieces, np.arange(len(pieces)))
    hit, log_p = np.zeros(len(pieces)), np.full(len(pieces), np.nan)
    model.to(dev).eval()
    for chunk in by_length(pieces.length[whole]):
        rows = np.flatnonzero(whole)[chunk]
        batch = gather(pieces, rows, None, pad_to())
        with autocast(dev):
            out = model(**to(inputs(batch), dev))
        logits = torch.stack((out.start_logits, out.end_logits), 1).float().cpu().masked_fill(~torch.from_numpy(batch.real)[:, None], -torch.inf)
        gold = targets(batch, pieces)                                                               # (B, 2)
        hit[rows] = (logits.argmax(-1) == gold).float().mean(1).numpy()
        log_p[rows] = logits.log_softmax(-1).gather(-1, gold[..., None]).sum((1, 2)).numpy()
    return hit, log_p


def answers(split: data_prep.Split, question: int, spans: list[tuple[float, int, int]], n: int) -> list[dict]:
    """The n best different spans of a question as exact characters of its raw text."""
    text, out = split.raw(split.q_row[question]), {}
    for score, first, last in sorted(spans, key=lambda s: (-s[0], s[1], s[2])):
        out.setdefault((first, last), {"text": text[split.begin[first]:split.end[last]], "score": score})
    return list(out.values())[:n]


# ---------------------------------------------------------------- EM and F1 of SQuAD (two answers of nothing agree, as in version 2)

def normalize(answer: str) -> str:
    """Lower case; punctuation, articles and extra white space removed."""
    answer = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer).split())


def em_f1(said: str, references: list[str]) -> tuple[float, float]:
    """The best exact match and the best token F1 over all reference answers, in [0, 1]."""
    def f1(a: list[str], b: list[str]) -> float:
        common = sum((Counter(a) & Counter(b)).values())
        return 2 * common / (len(a) + len(b)) if common else float(not a and not b)
    said = normalize(said)
    return (max(float(said == normalize(r)) for r in references),
            max(f1(said.split(), normalize(r).split()) for r in references))


def main(
    dataset: str = "toyqa",             # a name (squad newsqa emrqa toyqa) or a path to SQuAD json or MRQA jsonl (see data_prep.py)
    lm: str = "tiny",                   # tiny, a folder of pretrain.py, a Hugging Face folder or hub name
    split: str = "test",                # scored split: test, or dev (for choosing anything)
    epochs: int | None = None,          # None: 2 as in the paper's meta-test (the toy world's own for tiny)
    lr: float | None = None,            # None: 3e-5 (the toy world's own for tiny); raise it for smaller LMs
    batch_size: int | None = None,      # windows a step; the paper chose from 12, 16, 32; None: 16 (32 for tiny)
    max_len: int | None = None,         # tokens a window, question and context; None: 384 or the LM's most
    overlap: int = 128,                 # context tokens that a window shares with the one before; at most a third of max_len
    max_question: int = 64,             # tokens; longer questions are cut
    max_answer: int = 30,               # tokens; the longest answer that is considered
    seed: int = 0,                      # of head, order and dropout (three separate streams)
    fast: bool = True,                  # False: the plain path (windows padded to max_len, fp32)
    raw: str | None = None,             # folder with raw files of a named data set
    dev_share: float | None = None,     # share of train to cut as dev where there is none; None: 0.1 for paths
    results: str = "results.jsonl",     # one line a finished evaluation
    out: str | None = None,             # folder of predictions.jsonl; None: runs/qa-DATASET-LM-SPLIT-SEED-HASH
    save_model: bool = False,           # keep the span predictor in `out`, as a Hugging Face folder
):
    run = checked(locals())
    tok = data_prep.load_tokenizer(lm)
    data = data_prep.load(dataset, tok, raw, dev_share, kind="qa")
    train, scored, specials, origin = data["train"], data.scored(split), Specials.of(tok), lineage(lm)
    defaults = toy.FINETUNE_QA if origin["base"] == "tiny" else {"epochs": 2, "lr": 3e-5, "batch_size": 16}
    run |= {k: v for k, v in defaults.items() if run[k] is None} | {"data": data.checksum, "pretraining": origin}
    run["out"] = out or f"runs/qa-{Path(dataset).stem}-{Path(lm).name}-{split}-{seed}-{digest(run)}"
    out = Path(run["out"])
    if not claim(out, run):
        encoder, begin = load_lm(lm), time.time() - spent(checkpoint_of(out), json.dumps(run))
        length = fitting(encoder, max_len, 384)
        shape = {"max_len": length, "overlap": min(overlap, length // 3), "max_question": max_question}
        pieces = windows(train, specials, **shape)
        lost = len(train.q_row) - len(np.unique(pieces.question[whole_answer(pieces, np.arange(len(pieces)))]))
        print(f"{len(pieces):,} windows of {len(train.q_row):,} questions; the answers of {lost:,} are cut off in every window: trained as absent")
        model = finetune(encoder, pieces, epochs=run["epochs"], lr=run["lr"], batch_size=run["batch_size"], max_len=length, seed=seed,
                         fast=fast, checkpoint=checkpoint_of(out), key=json.dumps(run))
        if processes()[0]:
            return
        trained = time.time()
        best = predict(model, windows(scored, specials, **shape), max_answer, fast=fast)
        examples = []
        for question, found in zip(scored.questions, best, strict=True):
            em, f1 = em_f1(found[0]["text"] if found else "", question["scored"])
            examples.append({"id": question["id"], "em": em, "f1": f1, "n_best": found})
        seconds = {"train_seconds": round(trained - begin, 1), "score_seconds": round(time.time() - trained, 1)}
        scores = {k: 100 * float(np.mean([e[k] for e in examples])) for k in ("em", "f1")}
        save(model if save_model else None, tok, out, run | {"scores": scores | seconds, "versions": versions()}, examples)
    if not processes()[0]:
        finish(out, results, run, ("em", "f1"))


if __name__ == "__main__":
    cli(main)
