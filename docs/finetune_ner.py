"""Fine-tunes an LM to find named entities in CoNLL files: an example of a third kind of task, to copy.

    python finetune_ner.py --lm=bert-base-cased     # reads conll/train.txt, dev.txt and test.txt

Copy it beside finetune_cls.py, whose docstring lists the names below. For pretrain.py and train_nmg.py to
know its data set, add `import finetune_ner` to them.
"""
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForTokenClassification

import finetune_cls
from finetune import evaluate
from nmg.loop import fit, forward_all
from support import data, runs, sources
from support.data import blocks, collate
from support.models import with_head

KIND = "ner"
INNER_LOOP = {"ft_epochs": 5, "ft_lr": 3e-5, "ft_max_len": 128, "metric": "f1"}
METRICS = ("f1",)
TAGS = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"]


@dataclass
class Config(finetune_cls.Config):
    dataset: str = "conll"


# Step 2 of docs/formats.md: a reader, and a name for what it reads.
def read_conll(path):
    """The sentences of a file, and the tag of each word, as an index into TAGS."""
    words, tags = [], []
    with sources.error_context(path) as at:
        for at.where, line in [*sources.lines(path), (path, "")]:
            if line.strip() and not line.startswith("-DOCSTART-"):
                word, *_, tag = line.split()
                words.append(word)
                tags.append(TAGS.index(tag))
            elif words:
                yield {"text": " ".join(words), "tags": tags}
                words, tags = [], []


def conll():
    splits = {split: [*read_conll(Path(f"conll/{split}.txt"))] for split in ("train", "dev", "test")}
    return sources.Source(splits, kind=KIND, own_arrays=tag_arrays)


sources.DATASETS["conll"] = conll


# Step 3: arrays. Of every token, the tag of the word that it begins; -100, no label, within a word.
def tag_arrays(records, arrays):
    tag = []
    for record, token_end in zip(records, arrays["char_end"], strict=True):
        word_end = np.cumsum([len(word) + 1 for word in record["text"].split(" ")])
        word = np.searchsorted(word_end, token_end, "right")
        tag.append(np.where(np.diff(word, prepend=-1), np.array(record["tags"])[word], -100))
    return {"tag": tag}


data.ARRAYS["tag"] = np.int32


# The rest is as in finetune_cls.py. A sentence that is longer than --max_len is several pieces.
pieces_of = blocks


def loss_fn(model, tensors):
    output = model(input_ids=tensors["input_ids"], attention_mask=tensors.get("attention_mask"))
    # (B L, C) for C tags: of more dimensions this loss is not deterministic on a GPU, and ends with an error.
    logits = output.logits.float().flatten(0, 1)
    return F.cross_entropy(logits, tensors["labels"].flatten(), reduction="sum")


def finetune(lm, pieces, *, seed=0, **training):
    model = with_head(lm, AutoModelForTokenClassification, seed, num_labels=len(TAGS))

    def make_batch(epoch, indices):
        batch = collate(pieces, indices)
        tag = np.where(batch.in_text, pieces.split.tag[batch.token_at], -100)
        return batch.tensors() | {"labels": torch.from_numpy(tag).long()}

    fit(model, pieces.length, make_batch, loss_fn, seed=seed, desc="fine-tuning", **training)
    return model


def predictions(model, pieces):
    """A line for every sentence: the tags of its words, the right and the predicted ones."""
    split = pieces.split
    predicted = np.zeros(len(split.input_ids), int)                 # (T,) of every token of the split
    for _, batch, output in forward_all(model, pieces):
        best = output.logits.argmax(-1).cpu().numpy()
        predicted[batch.token_at[batch.in_text]] = best[batch.in_text]
    lines = []
    for i in np.unique(pieces.text_ids):
        tokens = range(split.token_start[i], split.token_start[i + 1])
        first = [token for token in tokens if split.tag[token] >= 0]
        lines.append({"gold": [TAGS[split.tag[token]] for token in first],
                      "predicted": [TAGS[predicted[token]] for token in first]})
    return lines


def entities(lines, which):
    """All entities: (sentence, first word, tags), as in (0, 3, "B-PER I-PER")."""
    found = set()
    for i, line in enumerate(lines):
        tags = " ".join(line[which])
        for entity in re.finditer(r"B-(\S+)( I-\1\b)*", tags):
            found.add((i, tags[:entity.start()].count(" "), entity[0]))
    return found


def summary(lines):
    gold, predicted = entities(lines, "gold"), entities(lines, "predicted")
    return {"f1": 200 * len(gold & predicted) / max(1, len(gold) + len(predicted))}


def main(cfg):
    evaluate(cfg, sys.modules[__name__])


if __name__ == "__main__":
    runs.start(main, Config)
