"""Sub-tasks T' = {S', D_tr', D_val'}: small copies of a task, a new one for each episode (Algorithm 1)."""
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from support.data import Data, Pieces, blocks, cut_docs
from support.runs import UserError


@dataclass
class SubTask:
    """Contexts S', labelled examples D_tr' and D_val', and the seed that its plays have in common."""
    contexts: Pieces            # (M pieces) the blocks of the contexts S'; a text is one block or more
    train: Pieces
    val: Pieces
    seed: int


class SubTaskSampler:
    """A data set cut into D_tr and D_val by document, from which sub-tasks are drawn.

    task: finetune_cls, finetune_qa, or another file with their interface; max_len, ft_max_len: tokens of a
    block and of a labelled piece; val_share: the share of train's texts that is D_val, whole documents."""

    def __init__(self, data: Data, task: ModuleType, max_len: int, ft_max_len: int, val_share: float):
        train, corpus = data["train"], data.corpus
        if corpus is train:
            # The texts themselves are labelled, as in all data sets of the paper.
            self.context_source = "same_texts"
        elif data.shared_doc_ids:
            # There is a corpus, and both say from which documents their texts are, as in the toy world.
            self.context_source = "same_documents"
        else:
            # There is a corpus whose documents are not known.
            self.context_source = "independent"
        self.examples = task.pieces_of(train, ft_max_len)
        self.warned = False
        contexts = blocks(corpus, max_len)
        # Blocks in which nothing may be masked, whose word ids are all -1, are left out, as no token could be
        # drawn. `reduceat` takes the maximum of each block (they follow one another, and none is empty).
        maskable = np.maximum.reduceat(corpus.word_ids, contexts.begin) >= 0
        self.contexts = contexts.take(np.flatnonzero(maskable))
        held_out = cut_docs(np.asarray(train.doc), val_share)                                   # (N,) bool
        self.val_docs = np.unique(train.doc[held_out])
        self.train_docs = np.setdiff1d(train.doc, self.val_docs)
        if not len(self.train_docs):
            raise UserError(f"--dataset={data.name}: too few documents ({len(self.val_docs)}, see --doc) for "
                            "a part to train on and a part to validate on; with several, choose a smaller "
                            "--val_share")

    def sample(self, rng: np.random.Generator, n_contexts: int, n_docs: int | None, n_examples: int,
               n_validation: int) -> SubTask:
        """n_contexts texts from n_docs documents (None: from any), and at most n_examples and n_validation
        labelled examples."""
        # The texts of the contexts; and which of the labelled pieces may be drawn for D_tr' and for D_val',
        # (len(self.examples),) bool each.
        doc = self.examples.doc
        if self.context_source == "same_texts":
            # Contexts are texts of D_tr, and D_tr' has their labels.
            texts = self.draw_texts(rng, self.train_docs, n_contexts, n_docs)
            for_train = np.isin(self.examples.text_ids, texts)
            for_val = np.isin(doc, self.val_docs)
        elif self.context_source == "same_documents":
            # Half of the contexts are from documents of D_tr, which D_tr' is about, and half from those of
            # D_val, which D_val' is about: the corpus of a whole task has text of test documents, too.
            n_train_docs = n_val_docs = None
            if n_docs:
                n_train_docs = max(1, n_docs // 2)
                n_val_docs = n_docs - n_docs // 2
            n_train = n_contexts // 2
            train_texts = self.draw_texts(rng, self.train_docs, n_train, n_train_docs)
            val_texts = self.draw_texts(rng, self.val_docs, n_contexts - n_train, n_val_docs)
            texts = np.concatenate((train_texts, val_texts))
            doc_of_text = self.contexts.split.doc
            for_train = np.isin(doc, doc_of_text[train_texts])
            for_val = np.isin(doc, doc_of_text[val_texts])
        else:
            # Contexts are any texts of the corpus.
            texts = self.draw_texts(rng, np.unique(self.contexts.doc), n_contexts, n_docs)
            for_train = np.isin(doc, self.train_docs)
            for_val = np.isin(doc, self.val_docs)
        contexts = self.contexts.take(np.flatnonzero(np.isin(self.contexts.text_ids, texts)))
        train = self.draw_examples(rng, for_train, n_examples)
        val = self.draw_examples(rng, for_val, n_validation)
        # A masker may read the labels that fine-tuning has, and never those of D_val.
        contexts.readable_labels = np.unique(train.text_ids)
        for what, drawn in {"contexts": contexts, "train": train, "val": val}.items():
            if not len(drawn):
                raise UserError(f"a sub-task drew nothing for its part {what!r}; more --contexts (or --docs) "
                                "are needed")
        return SubTask(contexts, train, val, seed=int(rng.integers(2**31)))

    def draw_texts(self, rng: np.random.Generator, allowed: np.ndarray, n: int,
                   docs: int | None) -> np.ndarray:
        """n texts of the allowed documents, or of `docs` of these."""
        if docs:
            allowed = rng.choice(allowed, min(len(allowed), docs), replace=False)
        texts = np.unique(self.contexts.text_ids[np.isin(self.contexts.doc, allowed)])
        if len(texts) <= n and not docs and not self.warned:
            print(f"WARNING: --contexts takes all {len(texts)} texts that it may draw from, so that all "
                  "sub-tasks have the same texts; fewer --contexts", flush=True)
            self.warned = True
        return rng.permutation(texts)[:max(1, n)]

    def draw_examples(self, rng: np.random.Generator, allowed: np.ndarray, most: int) -> Pieces:
        """All pieces of at most `most` examples; allowed: a bool for each labelled piece."""
        ids = self.examples.example_ids
        drawn = rng.permutation(np.unique(ids[allowed]))[:most]
        return self.examples.take(np.flatnonzero(allowed & np.isin(ids, drawn)))
