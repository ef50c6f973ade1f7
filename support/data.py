"""Prepared data: token arrays in memory maps, and the pieces and batches that models read.

    Split     one prepared split (train, dev, test, corpus): N texts, their tokens, questions and labels
    Pieces    what goes into a model at once: blocks of texts, texts cut short, windows of questions
    Batch     some pieces, padded to the longest of them: numpy arrays (B, L)

data_prep.py writes the arrays; every stage reads them through this file.
"""
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from support import runs
from support.rng import rng_for
from support.runs import UserError

# What a split's folder holds, NAME.bin each; `Split` says what they are. What one task alone has, such as a
# label per token, is added here.
ARRAYS = {
    # Of every token.
    "input_ids": np.int32, "word_ids": np.int32, "char_begin": np.int32, "char_end": np.int32,
    "is_punct": np.bool_,
    # Of every text.
    "token_start": np.int64, "byte_start": np.int64, "utf8": np.uint8, "doc": np.int32, "label": np.int32,
    # Of every question.
    "question_tokens": np.int32, "question_start": np.int64, "question_text": np.int32, "answer": np.int32}


@dataclass
class SpecialTokens:
    """What a tokenizer puts around texts: prefix text suffix, or prefix question middle text suffix."""
    prefix: list[int]
    middle: list[int]
    suffix: list[int]
    pair_types: bool            # whether the second text of a pair has token type 1
    pad_id: int
    mask_id: int
    ordinary_ids: np.ndarray    # ids that may replace a masked token: all but the special ones
    vocabulary_size: int        # its highest id + 1


class Split:
    """One prepared split, memory-mapped: N texts of T tokens in all, without special tokens.

    input_ids, word_ids, char_begin, char_end, is_punct (T,): the id, the index of the word within its text
        (-1: a special token, which is never masked, such as a marker that somebody added), the characters of
        the raw text, and whether it is punctuation
    token_start (N + 1,): text i is tokens token_start[i]:token_start[i + 1]
    byte_start (N + 1,): its characters are utf8[byte_start[i]:byte_start[i + 1]]
    doc (N,): the document that a text comes from
    label (N,): its class, an index into `labels`, -1 where it has none; only if texts have classes; the next
        three, only if they have questions
    question_start (Q + 1,): question j is question_tokens[question_start[j]:question_start[j + 1]]
    question_text (Q,): the text that a question asks about
    answer (Q, 2): first and last token of the answer, counted within the text; -1 where it has none

    labels: the names of the classes, sorted; none where there are no classes
    find_entities: split -> (T,) index of the named entity of each token, -1 where none; runs on first use
    train: the split of the same data set that training sees
    labelled: the texts whose labels, or whose answers, may be used"""

    def __init__(self, folder: Path, special: SpecialTokens, labels: list[str], find_entities: Callable):
        self.folder = folder
        self.special = special
        self.labels = labels
        self.find_entities = find_entities
        self.train = self
        for name, dtype in ARRAYS.items():
            file = folder / f"{name}.bin"
            if file.exists():
                # An empty file cannot be mapped.
                array = np.memmap(file, dtype, "r") if file.stat().st_size else np.zeros(0, dtype)
                setattr(self, name, array)
        self.labelled = np.arange(len(self), dtype=np.int32)
        if hasattr(self, "label"):
            self.labelled = self.labelled[self.label >= 0]
        if hasattr(self, "answer"):
            self.answer = self.answer.reshape(-1, 2)
            self.labelled = np.unique(self.question_text[self.answer[:, 0] >= 0])

    def __len__(self) -> int:
        return len(self.doc)

    def text(self, i: int) -> str:
        """The raw text i, in which char_begin and char_end count."""
        return bytes(self.utf8[self.byte_start[i]:self.byte_start[i + 1]]).decode()

    def limit_labels(self, n: int, seed: int) -> None:
        """From now on, `labelled` are n texts, drawn by seed: the same for every masker and stage."""
        if n > len(self.labelled):
            raise UserError(f"--labelled={n}: train has {len(self.labelled)} labelled texts, not so many")
        self.labelled = np.sort(rng_for(seed, "labelled").permutation(self.labelled)[:n])

    @functools.cached_property
    def questions(self) -> list[dict]:
        """{"id", "question", "references"} of every question, in order."""
        return runs.read_rows(self.folder / "questions.jsonl")

    @functools.cached_property
    def entity_ids(self) -> np.ndarray:
        return self.find_entities(self)


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """(N + 1,) where each of N consecutive parts begins, given their lengths, and where the last one ends."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


@dataclass
class Data:
    """A prepared data set for one tokenizer."""
    name: str
    kind: str                   # "cls", "qa", or "text": which finetune_*.py is its task
    splits: dict[str, Split]
    checksum: str               # of the raw files, the tokenizer, and how they were prepared
    shared_doc_ids: bool        # train and the corpus have the same document ids: both give "doc"
    label_errors: dict[str, str]    # by split: why not all of its labels or answers can be used

    def __getitem__(self, split: str) -> Split:
        if split not in self.splits:
            hints = {"dev": "; --dev_share=0.1 cuts one from train, if that has several documents",
                     "test": "; score with --split=dev"}
            raise UserError(f"{self.name} has no {split} split. Allowed: {', '.join(self.splits)}"
                            f"{hints.get(split, '')}")
        return self.splits[split]

    def check_labels(self, *splits: str) -> None:
        """Raises UserError if labels or answers of a split cannot be used. Pre-training does not ask."""
        for split in splits:
            if split in self.label_errors:
                hint = ""
                if split == "test":
                    hint = "; or score another split with --split=dev (--predict=FILE needs no labels)"
                raise UserError(f"{self.name}, {split}: {self.label_errors[split]}{hint}")

    def scored_split(self, asked: str | None) -> str:
        """The split that is scored: the one that is asked for, or else test, or dev where there is no test.
        Raises UserError."""
        if asked not in (None, "dev", "test"):
            raise UserError(f"--split={asked}: must be dev or test")
        if asked is None:
            asked = "test" if "test" in self.splits else "dev"
        return asked

    @property
    def block_len(self) -> int:
        """Tokens of a block of text in pre-training, by default (section 4.1)."""
        return 512 if self.kind == "qa" else 256

    @property
    def corpus(self) -> Split:
        """The unlabelled text S: a split of its own where the data set has one, else the texts of train."""
        return self.splits.get("corpus") or self["train"]


def cut_docs(docs: np.ndarray, share: float) -> np.ndarray:
    """(N,) bool: which texts to hold out, given their documents (N,): whole documents, in a fixed random
    order, as many as fit into the share, but at least one."""
    values, counts = np.unique(docs, return_counts=True)
    room = max(round(share * len(docs)), counts.min(initial=len(docs)))
    held_out = []
    for i in rng_for(0, "cut").permutation(len(values)):
        if counts[i] <= room:
            held_out.append(values[i])
            room -= counts[i]
    return np.isin(docs, held_out)


# ---------------------------------------------------------------- pieces

@dataclass
class Pieces:
    """M pieces of a split: piece m is tokens begin[m]:end[m] of the split, in text text_ids[m].

    question_ids (M,): the question that stands before the piece; None in a task without questions
    max_question: tokens beyond which a question is cut
    readable_labels: the texts of train whose labels a masker may read (`label` does): those of a sub-task;
        None: all that fine-tuning may use, split.train.labelled"""
    split: Split
    text_ids: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    question_ids: np.ndarray | None = None
    max_question: int = 0
    readable_labels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.begin)

    @property
    def doc(self) -> np.ndarray:
        """(M,) the document of each piece."""
        return self.split.doc[self.text_ids]

    @property
    def example_ids(self) -> np.ndarray:
        """(M,) the labelled example of each piece: all windows of a question are one example."""
        return self.text_ids if self.question_ids is None else self.question_ids

    @functools.cached_property
    def length(self) -> np.ndarray:
        """(M,) int32 tokens of each piece, with its question and its special tokens."""
        special = self.split.special
        extra = len(special.prefix) + len(special.suffix)
        if self.question_ids is not None:
            question = np.diff(self.split.question_start)[self.question_ids]
            extra = extra + np.minimum(question, self.max_question) + len(special.middle)
        return (self.end - self.begin + extra).astype(np.int32)

    def take(self, indices: np.ndarray) -> "Pieces":
        questions = None if self.question_ids is None else self.question_ids[indices]
        return replace(self, text_ids=self.text_ids[indices], begin=self.begin[indices],
                       end=self.end[indices], question_ids=questions)

    def evenly_spaced(self, n: int) -> np.ndarray:
        """Indices of n pieces at most, at equal distances."""
        return np.linspace(0, len(self) - 1, min(n, len(self))).astype(np.int64)

    def labelled_only(self) -> "Pieces":
        """Those whose text is labelled."""
        return self.take(np.flatnonzero(np.isin(self.text_ids, self.split.labelled)))


def number_pieces(count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """N things have count (N,) pieces. For each of all M pieces: which thing it belongs to, and its number
    there, from 0; both (M,) int32."""
    thing = np.repeat(np.arange(len(count), dtype=np.int32), count)
    return thing, (np.arange(len(thing)) - offsets_of(count)[thing]).astype(np.int32)


def room_for_text(special: SpecialTokens, max_len: int) -> int:
    """The tokens of a text that fit between the special ones. Raises UserError if none does."""
    around = len(special.prefix) + len(special.suffix)
    if max_len <= around:
        raise UserError(f"a length of {max_len} leaves no room for text, as the tokenizer puts {around} "
                        f"special tokens around it; at least {around + 1} are needed (--max_len, in "
                        "train_nmg.py also --ft_max_len)")
    return max_len - around


def blocks(split: Split, max_len: int) -> Pieces:
    """Every text in blocks of at most max_len tokens, special ones included; the last block is shorter."""
    room = room_for_text(split.special, max_len)
    count = np.ceil(np.diff(split.token_start) / room).astype(np.int64)             # (N,) blocks of each text
    text_ids, nth = number_pieces(count)
    # A block ends where the next one begins.
    edge = np.append(split.token_start[text_ids] + nth * room, split.token_start[-1])
    return Pieces(split, text_ids, edge[:-1], edge[1:])


def truncated(split: Split, max_len: int) -> Pieces:
    """Every text once, cut to max_len tokens with the special ones."""
    room = room_for_text(split.special, max_len)
    begin = np.asarray(split.token_start[:-1])
    return Pieces(split, np.arange(len(split)), begin, np.minimum(split.token_start[1:], begin + room))


def windows(split: Split, max_len: int, overlap: int, max_question: int) -> Pieces:
    """Every question with its text, in windows of at most max_len tokens that share `overlap` text tokens."""
    special = split.special
    question = np.minimum(np.diff(split.question_start), max_question)                          # (Q,)
    room = max_len - question - len(special.prefix) - len(special.middle) - len(special.suffix)
    step = room - overlap
    if (step <= 0).any():
        raise UserError(f"a window of {max_len} tokens leaves no room for a question of {question.max()} "
                        f"tokens and an overlap of {overlap}; longer windows are needed (--max_len, in "
                        "train_nmg.py --ft_max_len)")
    tokens = np.diff(split.token_start)[split.question_text]                                    # (Q,)
    if not tokens.all():
        asked = split.questions[tokens.argmin()]
        raise UserError(f"question {asked['id']!r}: the tokenizer drops every character of its context; "
                        "remove the question")
    count = 1 + np.ceil(np.maximum(0, tokens - room) / step).astype(np.int64)                   # (Q,) windows
    question_ids, nth = number_pieces(count)
    text_ids = split.question_text[question_ids]
    begin = split.token_start[text_ids] + nth * step[question_ids]
    end = np.minimum(begin + room[question_ids], split.token_start[text_ids + 1])
    return Pieces(split, text_ids, begin, end, question_ids, max_question)


# ---------------------------------------------------------------- batches

@dataclass(frozen=True)
class Batch:
    """B pieces padded to L tokens: numpy arrays (B, L). Maskers cannot change it, or they would change what
    the LM is trained on.

    The raw text of row b is split.text(text_ids[b]); the characters of a token in it, where in_text, are
    split.char_begin[token_at] to split.char_end[token_at]."""
    input_ids: np.ndarray
    attention_mask: np.ndarray      # bool: not padding
    maskable: np.ndarray            # bool: may be masked; False on padding, special tokens and questions
    word_ids: np.ndarray            # index of the word or sign within its text, -1 where not maskable
    is_punct: np.ndarray            # bool
    token_type_ids: np.ndarray | None   # bool: of the second text of a pair
    indices: np.ndarray             # (B,) which pieces these are
    text_ids: np.ndarray            # (B,) the texts that they are from
    token_at: np.ndarray            # index of the token in the split, 0 where `in_text` is False
    in_text: np.ndarray             # bool: a token of the text, not special, padding or question
    readable_labels: np.ndarray     # the texts of train whose labels a masker may read
    split: Split

    @property
    def entity_ids(self) -> np.ndarray:
        """(B, L) index of the named entity, -1 where none; the first use finds them in the whole split."""
        return np.where(self.in_text, self.split.entity_ids[self.token_at], -1)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a Hugging Face model reads: (B, L) int64 each."""
        inputs = model_inputs(self.input_ids, self.attention_mask)
        if self.token_type_ids is not None:
            inputs["token_type_ids"] = torch.from_numpy(self.token_type_ids.astype(np.int64))
        return inputs


def model_inputs(input_ids: np.ndarray, attention_mask: np.ndarray) -> dict[str, torch.Tensor]:
    """Arrays (B, L) as a Hugging Face model reads them. No attention_mask where there is no padding:
    attention is faster without it."""
    inputs = {"input_ids": torch.from_numpy(input_ids.astype(np.int64))}
    if not attention_mask.all():
        inputs["attention_mask"] = torch.from_numpy(attention_mask.astype(np.int64))
    return inputs


def collate(pieces: Pieces, indices: np.ndarray) -> Batch:
    """The batch of the given pieces, padded to the longest of them. A row with a question (without one there
    is no middle, either):

        prefix  question  middle  text  suffix  padding
        [CLS]   ...       [SEP]   ...   [SEP]   [PAD] ...
        <------- before ------->
        <--------------- length ------------->
    """
    split, special = pieces.split, pieces.split.special
    begin, end = pieces.begin[indices], pieces.end[indices]
    length = pieces.length[indices]
    column = np.arange(length.max())                                               # (L,)
    before = length - (end - begin) - len(special.suffix)                          # (B,)
    offset = column - before[:, None]                                       # (B, L) position within the text
    in_text = (offset >= 0) & (offset < (end - begin)[:, None])
    token_at = np.where(in_text, begin[:, None] + offset, 0)

    input_ids = np.where(in_text, split.input_ids[token_at], special.pad_id)
    input_ids[:, :len(special.prefix)] = special.prefix
    for i, token in enumerate(special.suffix):
        input_ids[np.arange(len(indices)), length - len(special.suffix) + i] = token
    if pieces.question_ids is not None:
        put_questions(input_ids, pieces, indices, before)

    attention_mask = column < length[:, None]
    token_type_ids = None
    if special.pair_types and pieces.question_ids is not None:
        token_type_ids = attention_mask & (column >= before[:, None])
    word_ids = np.where(in_text, split.word_ids[token_at], -1)
    is_punct = in_text & split.is_punct[token_at]
    readable_labels = pieces.readable_labels
    if readable_labels is None:
        readable_labels = split.train.labelled
    batch = Batch(input_ids=input_ids, attention_mask=attention_mask, maskable=word_ids >= 0,
                  word_ids=word_ids, is_punct=is_punct, token_type_ids=token_type_ids,
                  indices=np.array(indices), text_ids=pieces.text_ids[indices], token_at=token_at,
                  in_text=in_text, readable_labels=readable_labels, split=split)
    for array in vars(batch).values():
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    return batch


def put_questions(input_ids: np.ndarray, pieces: Pieces, indices: np.ndarray, before: np.ndarray) -> None:
    """Writes the questions of some pieces, and what stands behind them, into the rows (B, L) of `collate`."""
    split, special = pieces.split, pieces.split.special
    for row, question in enumerate(pieces.question_ids[indices]):
        end = before[row] - len(special.middle)
        start = split.question_start[question]
        tokens = split.question_tokens[start:start + end - len(special.prefix)]
        input_ids[row, len(special.prefix):end] = tokens
        input_ids[row, end:before[row]] = special.middle
