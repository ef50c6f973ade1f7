"""Fine-tunes an LM on extractive question answering and scores it: exact match (EM) and F1.

    python finetune_qa.py                                               # toyqa, no further pre-training
    python finetune_qa.py --dataset=newsqa --lm=runs/newsqa-whole       # a folder that pretrain.py made
    python finetune_qa.py --dataset=my_squad_folder --lm=distilbert-base-uncased --out=runs/answers
    python finetune_qa.py --predict=questions.jsonl --lm=runs/answers   # questions.predicted.jsonl
    torchrun --nproc_per_node=4 finetune_qa.py --dataset=squad --lm=bert-base-uncased

The same interface as finetune_cls.py.
"""
import re
import string
import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from transformers import AutoModelForQuestionAnswering

from finetune import EvaluationConfig, evaluate
from nmg.loop import check_finite, fit, forward_all
from support import runs, toy
from support.data import Batch, Pieces, Split, collate, windows
from support.devices import device
from support.models import with_head

KIND = "qa"
# The paper's values for the inner loop of meta-training (its appendix).
INNER_LOOP = {"ft_epochs": 1, "ft_lr": 3e-5, "ft_max_len": 384, "metric": "em"}
METRICS = ("em", "f1", "likelihood")
AUTO_CLASS = AutoModelForQuestionAnswering

OVERLAP = 128       # context tokens that two windows share; in short windows a third
MAX_QUESTION = 64   # tokens; longer questions are cut
MAX_ANSWER = 30     # tokens; longer answers are never predicted


@dataclass
class Config(EvaluationConfig):
    # The values are the paper's, of a whole task; with --lm=tiny, FINETUNE_QA in support/toy.py.
    dataset: str = "toyqa"          # squad newsqa emrqa toyqa, hf:REPO of the hub, or a path to SQuAD json
                                    # or MRQA jsonl, or to rows with a question each
    epochs: int = 2
    lr: float = 3e-5                # raise it for LMs smaller than BERT-base (6 layers x 384: 2e-4)
    batch_size: int = 16            # windows per step; the paper chose from 12, 16, 32
    max_len: int = 384              # tokens of a window: question and text


# ---------------------------------------------------------------- the task

def pieces_of(split: Split, max_len: int) -> Pieces:
    """Every question with its context, in windows of max_len tokens. Prints the share of the answers that are
    longer than MAX_ANSWER tokens."""
    longer = (np.diff(split.answer) >= MAX_ANSWER).mean()
    if longer:
        print(f"WARNING: {longer:.2%} of the answers of {split.folder.name} are longer than {MAX_ANSWER} "
              "tokens and can never be found; a larger MAX_ANSWER in finetune_qa.py allows for longer ones")
    return windows(split, max_len, min(OVERLAP, max_len // 3), MAX_QUESTION)


def answer_tokens(pieces: Pieces, indices: np.ndarray) -> np.ndarray:
    """(B, 2) first and last token of each window's answer, as indices into the tokens of the split."""
    text_start = pieces.split.token_start[pieces.text_ids[indices]]
    return text_start[:, None] + pieces.split.answer[pieces.question_ids[indices]]


def holds_answer(pieces: Pieces, indices: np.ndarray) -> np.ndarray:
    """(B,) whether a window holds all of its answer."""
    first, last = answer_tokens(pieces, indices).T
    return (first >= pieces.begin[indices]) & (last < pieces.end[indices])


def targets(batch: Batch, pieces: Pieces) -> torch.Tensor:
    """(B, 2) positions of the answer's first and last token in the padded rows; 0 where a window does not
    hold all of it."""
    text_column = batch.in_text.argmax(1)
    offset = text_column - pieces.begin[batch.indices]
    column = answer_tokens(pieces, batch.indices) + offset[:, None]
    whole = holds_answer(pieces, batch.indices)[:, None]
    return torch.from_numpy(np.where(whole, column, 0))


def loss_fn(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of start and end, summed over both and over the windows of a batch."""
    inputs = {name: tensor for name, tensor in tensors.items() if name != "labels"}
    output = model(**inputs)
    start, end = tensors["labels"].T
    loss = F.cross_entropy(output.start_logits.float(), start, reduction="sum")
    return loss + F.cross_entropy(output.end_logits.float(), end, reduction="sum")


def finetune(lm: torch.nn.Module, pieces: Pieces, *, seed: int = 0, **training: object) -> torch.nn.Module:
    """A span predictor around a copy of the LM's encoder, trained on `pieces`; `lm` stays as it is.

    training: epochs, lr, batch_size and more, as in loop.fit"""
    model = with_head(lm, AUTO_CLASS, seed, num_labels=2)

    def make_batch(epoch, indices):
        batch = collate(pieces, indices)
        return batch.tensors() | {"labels": targets(batch, pieces)}

    fit(model, pieces.length, make_batch, loss_fn, seed=seed, desc="fine-tuning", **training)
    return model


def predictions(model: torch.nn.Module, pieces: Pieces) -> list[dict]:
    """A line for every question, in the order of the split: its best answer over all windows, characters of
    the raw text, with the sum of its start and end logit, its probability in its window, exact match and F1
    in [0, 1], and the log likelihood of the right answer.

    Every span of at most MAX_ANSWER context tokens is considered."""
    split = pieces.split
    score = np.zeros(len(pieces))
    probability = np.zeros(len(pieces))
    log_prob = np.zeros(len(pieces))
    tokens = np.zeros((len(pieces), 2), np.int64)
    for indices, batch, output in forward_all(model, pieces):
        real = torch.tensor(batch.attention_mask, device=device())
        check_finite(output.start_logits[real] + output.end_logits[real], "the predictions")
        log_probs = ends_log_probs(output, batch)
        log_prob_of_answer = span_log_prob(log_probs, targets(batch, pieces)).numpy()
        log_prob[indices] = np.where(holds_answer(pieces, indices), log_prob_of_answer, np.nan)
        in_text = torch.tensor(batch.in_text, device=device())
        score[indices], columns = best_span(output, in_text)
        probability[indices] = span_log_prob(log_probs, torch.from_numpy(columns)).exp().numpy()
        tokens[indices] = np.take_along_axis(batch.token_at, columns, 1)

    # The best window of each question comes first.
    order = np.lexsort((-score, pieces.question_ids))
    questions, first_window = np.unique(pieces.question_ids[order], return_index=True)
    # The mean over the windows that hold the answer. A question without such a window counts 0 for every
    # player, so that it makes no difference between them.
    likelihood = pd.Series(log_prob).groupby(pieces.question_ids).mean().fillna(0).to_numpy()
    lines = []
    for i, window in enumerate(order[first_window]):
        asked = split.questions[questions[i]]
        answer = answer_text(split, questions[i], *tokens[window])
        lines.append({"id": asked["id"], "answer": answer, "score": float(score[window]),
                      "probability": float(probability[window]),
                      "em": exact_match(answer, asked["references"]),
                      "f1": f1_score(answer, asked["references"]), "likelihood": float(likelihood[i])})
    return lines


def outputs(model: torch.nn.Module, pieces: Pieces) -> list[dict]:
    """The predicted answer to every question, with its probability and its score, in their order."""
    return [{"predicted": line["answer"], "probability": round(line["probability"], 6),
             "score": round(line["score"], 6)} for line in predictions(model, pieces)]


def summary(lines: list[dict]) -> dict[str, float]:
    """EM and F1 of all predictions, in percent."""
    em = np.mean([line["em"] for line in lines])
    f1 = np.mean([line["f1"] for line in lines])
    return {"em": 100 * float(em), "f1": 100 * float(f1)}


def best_span(output, in_text: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The score of the best span of at most A = MAX_ANSWER tokens of each window (B,), and its first and last
    column (B, 2).

    in_text: (B, L) bool, True somewhere in each row."""
    start = output.start_logits.float().masked_fill(~in_text, -torch.inf)                       # (B, L)
    end = output.end_logits.float().masked_fill(~in_text, -torch.inf)
    # ends[:, i] holds the logits of ends at i, i + 1, ... i + A - 1.
    ends = F.pad(end, (0, MAX_ANSWER - 1), value=-torch.inf).unfold(1, MAX_ANSWER, 1)           # (B, L, A)
    score, flat = (start[:, :, None] + ends).flatten(1).max(1)                                  # (B,)
    first = flat // MAX_ANSWER
    columns = torch.stack((first, first + flat % MAX_ANSWER), 1)
    return score.cpu().numpy(), columns.cpu().numpy()


def answer_text(split: Split, question: int, first: int, last: int) -> str:
    """The characters of a question's text from one token of the split to another, without blanks around."""
    text = split.text(split.question_text[question])
    return text[split.char_begin[first]:split.char_end[last]].strip()


def ends_log_probs(output, batch: Batch) -> torch.Tensor:
    """(B, 2, L) log probability of each token of a window as the answer's first, and as its last."""
    logits = torch.stack((output.start_logits, output.end_logits), 1).float().cpu()             # (B, 2, L)
    padding = torch.from_numpy(~batch.attention_mask)[:, None]
    return logits.masked_fill(padding, -torch.inf).log_softmax(-1)


def span_log_prob(log_probs: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """(B,) log probability of the spans with the first and last columns (B, 2)."""
    return log_probs.gather(-1, columns[..., None]).sum((1, 2))


# ---------------------------------------------------------------- EM and F1, as SQuAD defines them

def normalize(answer: str) -> str:
    """Lower case; punctuation, articles and extra white space removed."""
    plain = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def exact_match(predicted: str, references: list[str]) -> float:
    """1.0 if the normalized answer is one of the references, else 0.0."""
    return float(normalize(predicted) in map(normalize, references))


def f1_score(predicted: str, references: list[str]) -> float:
    """The best token F1 over the references, in [0, 1]. Two answers of no words agree, as in SQuAD 2."""
    tokens = normalize(predicted).split()
    best = 0.0
    for reference in references:
        wanted = normalize(reference).split()
        common = (Counter(tokens) & Counter(wanted)).total()
        if common:
            best = max(best, 2 * common / (len(tokens) + len(wanted)))
        elif not tokens and not wanted:
            best = 1.0
    return best


# ---------------------------------------------------------------- the script

def main(cfg: Config) -> None:
    evaluate(cfg, sys.modules[__name__])


if __name__ == "__main__":
    runs.start(main, Config, tiny=toy.FINETUNE_QA)
