"""How much each token should be masked: scores, as logits. A score is a masker, which draws tokens in
proportion to exp(score) (of log n, in proportion to n), and a feature of search_masks.py.

    @register("rare")
    def rare(batch, lm=None):
        return -np.log(token_counts(batch.split)[batch.input_ids])

batch: numpy arrays (B, L), see data.Batch; batch.split is the corpus, over which a score may count. lm: the
LM as it is now: lm(batch) are its hidden states (B, L, H), lm.logits(batch) (B, L, V). Returns (B, L).
"""
import functools
import re
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

import toy
from data import Batch, Split
from runs import UserError

Score = Callable[..., np.ndarray]
SCORES: dict[str, Score] = {}


def register(name: str) -> Callable[[Score], Score]:
    def add(score):
        SCORES[name] = score
        return score
    return add


FIRST = 20.0    # a logit far above all noise: such tokens come first


@register("punct")
def punct(batch: Batch, lm=None) -> np.ndarray:
    """Punctuation first, then random tokens (the paper's Punctuation-Random)."""
    return FIRST * batch.is_punct


@register("oracle")
def oracle(batch: Batch, lm=None) -> np.ndarray:
    """The toy world's informative words first, the best that a policy could learn there (--lm=tiny)."""
    if batch.split.special.vocabulary_size != len(toy.informative()):
        raise UserError("the maskers oracle and anti know the words of the toy world only; use --lm=tiny")
    return FIRST * toy.informative()[batch.input_ids]


@register("anti")
def anti(batch: Batch, lm=None) -> np.ndarray:
    """The toy world's filler first, the worst (--lm=tiny)."""
    return -oracle(batch)


@register("frequent")
def frequent(batch: Batch, lm=None) -> np.ndarray:
    """log n, n: how often the token stands in the corpus."""
    return np.log(token_counts(batch.split)[batch.input_ids])


@register("rare")
def rare(batch: Batch, lm=None) -> np.ndarray:
    """-log n, the opposite of `frequent`."""
    return -frequent(batch)


@register("subword")
def subword(batch: Batch, lm=None) -> np.ndarray:
    """The second and later tokens of words first; the first token of a piece is never one."""
    later = np.zeros(batch.maskable.shape, bool)
    later[:, 1:] = batch.word_ids[:, 1:] == batch.word_ids[:, :-1]
    return FIRST * (later & batch.maskable)


@register("in_entity")
def in_entity(batch: Batch, lm=None) -> np.ndarray:
    """Tokens of named entities first; unlike `entity`, one by one."""
    return FIRST * (batch.entity_ids >= 0)


@register("marked")
def marked(batch: Batch, lm=None) -> np.ndarray:
    """What stands inside << >> and [[ ]] first: the entities that a label of ChemProt is about."""
    return FIRST * np.where(batch.in_text, in_markers(batch.split)[batch.token_at], False)


@register("tfidf")
def tfidf(batch: Batch, lm=None) -> np.ndarray:
    """log(tf log(N / df)): tf times in this piece, in df of the corpus' N texts."""
    same = batch.input_ids[:, :, None] == batch.input_ids[:, None, :]                           # (B, L, L)
    return np.log(same.sum(2)) + np.log(inverse_document_frequency(batch.split)[batch.input_ids])


@register("label")
def label(batch: Batch, lm=None) -> np.ndarray:
    """log of how much the token tells about the label: KL(p(label | token), p(label)) in train, in nats.

    In question answering the label of a token is whether it stands in an answer."""
    train = batch.split.train
    return np.log(label_information(train, tuple(train.labelled))[batch.input_ids])


@register("loss")
def loss(batch: Batch, lm=None) -> np.ndarray:
    """log of the LM's own loss at the token, unmasked, in nats."""
    logits = lm.logits(batch)                                                                   # (B, L, V)
    ids = torch.from_numpy(batch.input_ids.astype(np.int64)).to(logits.device)
    nats = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")                       # (B, L)
    return (nats + 1e-3).log().cpu().numpy()


# ---------------------------------------------------------------- what is counted once over a split

@functools.cache
def token_counts(split: Split) -> np.ndarray:
    """(V,) how often each token occurs in a split, one at least."""
    return np.maximum(1, np.bincount(split.input_ids, minlength=split.special.vocabulary_size))


@functools.cache
def inverse_document_frequency(split: Split) -> np.ndarray:
    """(V,) log(N / df) of the N texts of a split, of which df hold the token; a little above 0 at least."""
    V = split.special.vocabulary_size
    text_ids = np.repeat(np.arange(len(split)), np.diff(split.token_start))
    df = np.bincount(np.unique(text_ids * V + split.input_ids) % V, minlength=V)
    return np.log((len(split) + 1) / np.maximum(1, df))


@functools.lru_cache(maxsize=4)
def label_information(split: Split, texts: tuple[int, ...]) -> np.ndarray:
    """(V,) KL(p(label | token), p(label)) in nats, smoothed by 5 tokens of p(label), and 1e-4 at least.

    texts: those whose labels are counted. In a sub-task they are its labelled examples, as in meta-testing
    they are those of train."""
    if hasattr(split, "label"):
        label = np.repeat(split.label, np.diff(split.token_start))                              # (T,)
    else:
        # Whether a token stands in an answer: answers add 1 where they begin, and take it away behind.
        starts = split.token_start[split.question_text]
        change = np.zeros(len(split.input_ids) + 1, np.int64)
        np.add.at(change, starts + split.answer[:, 0], 1)
        np.add.at(change, starts + split.answer[:, 1] + 1, -1)
        label = (np.cumsum(change[:-1]) > 0).astype(np.int64)
    known = np.repeat(np.isin(np.arange(len(split)), texts), np.diff(split.token_start))
    count = np.zeros((split.special.vocabulary_size, label.max() + 1))
    np.add.at(count, (split.input_ids[known], label[known]), 1)
    p_label = (count.sum(0) + 1) / (count.sum() + count.shape[1])
    p_given = (count + 5 * p_label) / (count.sum(1, keepdims=True) + 5)                         # (V, labels)
    return 1e-4 + (p_given * np.log(p_given / p_label)).sum(1)


@functools.cache
def in_markers(split: Split) -> np.ndarray:
    """(T,) bool: which tokens of a split stand inside << >> or [[ ]]."""
    inside = np.zeros(len(split.input_ids), bool)
    for i in range(len(split)):
        tokens = slice(split.token_start[i], split.token_start[i + 1])
        for found in re.finditer(r"<<(.*?)>>|\[\[(.*?)\]\]", split.text(i)):
            begin, end = found.span(found.lastindex)
            inside[tokens] |= (split.char_begin[tokens] >= begin) & (split.char_end[tokens] <= end)
    return inside
