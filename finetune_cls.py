"""Fine-tunes a LM on text classification and scores it: accuracy, micro and macro F1.

    python finetune_cls.py                                                      # toycls, tiny LM, no further pre-training
    python finetune_cls.py --dataset=chemprot --lm=runs/chemprot-whole          # a folder that pretrain.py made
    python finetune_cls.py --dataset=reviews.csv --lm=roberta-base --split=dev
"""
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification

import data_prep
import toy
from data_prep import Rows, Specials, gather, heads
from loop import autocast, by_length, checked, checkpoint_of, claim, cli, device, fit, pad_to, processes, spent, to, with_head
from pretrain import digest, finish, fitting, inputs, lineage, load_lm, save, versions


def tensors(pieces: Rows, rows: np.ndarray, width: int | None = None) -> dict[str, torch.Tensor]:
    return inputs(gather(pieces, rows, width, pad_to())) | {"labels": torch.from_numpy(pieces.split.label[pieces.row[rows]].astype(np.int64))}


def loss_of(model: torch.nn.Module, t: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(input_ids=t["input_ids"], attention_mask=t["attention_mask"]).logits.float(), t["labels"])


def finetune(lm: torch.nn.Module, pieces: Rows, labels: int, *, epochs: int = 3, lr: float = 2e-5, batch_size: int = 16, max_len: int = 256,
             seed: int = 0, fast: bool = True, checkpoint: Path | None = None, key: str = "", quiet: bool = False) -> torch.nn.Module:
    """A classifier around a copy of `lm`, all of it trained on `pieces`. Order, head and dropout are separate streams of `seed`."""
    model = with_head(lm, AutoModelForSequenceClassification, seed, num_labels=labels)
    fit(model, pieces.length, lambda _, rows: tensors(pieces, rows, None if fast else max_len), loss_of, epochs=epochs, batch_size=batch_size,
        lr=lr, seed=seed, fast=fast, checkpoint=checkpoint, key=key, desc="fine-tuning", quiet=quiet)
    return model


@torch.no_grad()
def predict(model: torch.nn.Module, pieces: Rows, fast: bool = True, quiet: bool = False) -> np.ndarray:
    """(N, C) logits of every row, in large batches of similar length."""
    dev, out = device(), np.zeros((len(pieces), model.config.num_labels), np.float32)
    model.to(dev).eval()
    with tqdm(total=len(pieces), desc="scoring", unit="row", disable=quiet or None) as bar:
        for rows in by_length(pieces.length):
            t = to(tensors(pieces, rows), dev)
            with autocast(dev, fast):
                out[rows] = model(input_ids=t["input_ids"], attention_mask=t["attention_mask"]).logits.float().cpu().numpy()
            bar.update(len(rows))
    return out


def scores(gold: np.ndarray, said: np.ndarray) -> dict[str, float]:
    """accuracy, micro and macro F1 in percent; gold and said are class indices (N,). Macro: over classes in gold or said."""
    f1 = [2 * ((gold == c) & (said == c)).sum() / ((gold == c).sum() + (said == c).sum()) for c in np.union1d(gold, said)]
    accuracy = 100 * float(np.mean(gold == said))
    return {"accuracy": accuracy, "micro_f1": accuracy, "macro_f1": 100 * float(np.mean(f1))}     # one label each: micro F1 = accuracy


def main(
    dataset: str = "toycls",            # a name (imdb chemprot toycls) or a path with text and label (see data_prep.py)
    lm: str = "tiny",                   # tiny, a folder of pretrain.py, a Hugging Face folder or hub name
    split: str = "test",                # scored split: test, or dev (for choosing anything)
    epochs: int | None = None,          # None: 3 as in the paper's meta-test (the toy world's own for tiny)
    lr: float | None = None,            # None: 2e-5 (the toy world's own for tiny); raise it for smaller LMs
    batch_size: int | None = None,      # rows a step; the paper chose from 12, 16, 32; None: 16 (32 for tiny)
    max_len: int | None = None,         # tokens; longer texts are cut; None: 256 or the LM's most
    seed: int = 0,                      # of head, order and dropout (three separate streams)
    fast: bool = True,                  # False: the plain path (rows padded to max_len, fp32)
    raw: str | None = None,             # folder with raw files of a named data set
    dev_share: float | None = None,     # share of train to cut as dev where there is none; None: 0.1 for paths
    results: str = "results.jsonl",     # one line a finished evaluation
    out: str | None = None,             # folder of predictions.jsonl; None: runs/cls-DATASET-LM-SPLIT-SEED-HASH
    save_model: bool = False,           # keep the classifier in `out`, as a Hugging Face folder
):
    run = checked(locals())
    tok = data_prep.load_tokenizer(lm)
    data = data_prep.load(dataset, tok, raw, dev_share, kind="cls")
    train, scored, specials, origin = data["train"], data.scored(split), Specials.of(tok), lineage(lm)
    defaults = toy.FINETUNE_CLS if origin["base"] == "tiny" else {"epochs": 3, "lr": 2e-5, "batch_size": 16}
    run |= {k: v for k, v in defaults.items() if run[k] is None} | {"data": data.checksum, "pretraining": origin}
    run["out"] = out or f"runs/cls-{Path(dataset).stem}-{Path(lm).name}-{split}-{seed}-{digest(run)}"
    out = Path(run["out"])
    if not claim(out, run):
        encoder, begin = load_lm(lm), time.time() - spent(checkpoint_of(out), json.dumps(run))
        length = fitting(encoder, max_len, 256)
        model = finetune(encoder, heads(train, specials, length), len(data.labels), epochs=run["epochs"], lr=run["lr"],
                         batch_size=run["batch_size"], max_len=length, seed=seed, fast=fast, checkpoint=checkpoint_of(out),
                         key=json.dumps(run))
        if processes()[0]:
            return
        trained = time.time()
        said, gold = predict(model, heads(scored, specials, length), fast).argmax(1), np.array(scored.label)
        examples = [{"row": i, "gold": data.labels[g], "said": data.labels[s], "correct": bool(g == s)}
                    for i, (g, s) in enumerate(zip(gold, said, strict=True))]
        seconds = {"train_seconds": round(trained - begin, 1), "score_seconds": round(time.time() - trained, 1)}
        model.config.id2label, model.config.label2id = dict(enumerate(data.labels)), {n: i for i, n in enumerate(data.labels)}
        save(model if save_model else None, tok, out, run | {"scores": scores(gold, said) | seconds, "versions": versions()}, examples)
    if not processes()[0]:
        finish(out, results, run, ("correct",))


if __name__ == "__main__":
    cli(main)
