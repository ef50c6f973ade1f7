"""Which tokens are masked: the registry of maskers, and what becomes of a masked token.

    @register
    def random(batch, budget, rng, lm=None):
        return pick(rng.random(batch.input_ids.shape), batch, budget)

A masker gets
    batch    numpy arrays (B, L): input_ids, maskable, word_ids, entity_ids, is_punct, and access to the raw
             text (see Batch in support/data.py)
    budget   (B,) how many tokens to mask in each row, the same for every masker
    rng      random numbers (B, L) on demand; a row's depend on seed, epoch and block alone
    lm       the LM as it is now: lm(batch) are hidden states (B, L, H), a tensor; lm.per_token(batch, fn) is
             what fn makes of its logits, an array (B, L); and lm.outputs(batch, output_hidden_states=True)
             is what transformers returns. Do not call lm.model yourself: it may be in training mode.
             Another LM, as LMReader(load_lm(NAME)) of support/models.py, needs the same tokenizer
and returns a bool (B, L): True only where maskable, and as many as the budget, or fewer where whole units do
not fit or the masker leaves tokens out (`none` masks nothing).

A masker of your own: decorate a function in this file, or use --masker=path/to/file.py:function. Every score
of this file is a masker, too; in a file of yours @maskers.register_score makes a masker of a score. Maskers
that use others get them by name from `find`. With a policy that train_nmg.py learned, nmg:FOLDER masks the
tokens of its highest logits, and sampled:FOLDER draws tokens from it.
"""
import functools
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch.nn.functional as F

from nmg import counts
from nmg.policies import CLIP, SHARPNESS, Policy, load_policy, sharpened, standardized
from support import runs, toy
from support.data import Batch
from support.rng import RowRandom
from support.runs import UserError, nearest

Masker = Callable[..., np.ndarray]
MASKERS: dict[str, Masker] = {}
SCORES: dict[str, Callable] = {}    # the scores of the maskers that have one


def register(masker: Masker) -> Masker:
    """Makes a function a --masker of that name. Raises UserError if this file has that name already, as
    results of the two would be mixed up."""
    if masker.__name__ in globals():
        raise UserError(f"@register: maskers.py has {masker.__name__!r} already; choose another name")
    MASKERS[masker.__name__] = masker
    return masker


def register_score(score: Callable) -> Callable:
    """Makes a score, a function (batch, lm) -> (B, L) that says how much each token should be masked, a
    --masker of that name. It draws tokens with weight exp(score), so that a score of log n gives weight n.
    The function itself stays the score, so that other scores can call it."""
    register(sampled(score))
    SCORES[score.__name__] = score
    return score


def sampled(score: Callable) -> Masker:
    """The masker that draws tokens without replacement, with weight exp(score). score: of this file, or the
    sharpened logits of a policy, as in its training. (There it reads the LM before pre-training, and all
    epochs have one mask. In pretrain.py it reads the LM as it is then, and each epoch has its own mask.)"""
    @functools.wraps(score)
    def draw(batch, budget, rng, lm=None):
        return pick(score(batch, lm) + rng.gumbel(batch.input_ids.shape), batch, budget)
    return draw


def greedy(score: Callable) -> Masker:
    """The masker that takes the tokens of the highest score: with the raw logits of a policy (clipping
    would tie the best tokens) the paper's meta-testing."""
    def take(batch, budget, rng, lm=None):
        return pick(score(batch, lm), batch, budget)
    return take


# ---------------------------------------------------------------- what maskers are made of

def budget_of(batch: Batch, p: float) -> np.ndarray:
    """(B,) max(1, round(p n)) of the n maskable tokens of each row; 0 where n is 0."""
    n = batch.maskable.sum(1)
    return np.minimum(n, np.maximum(1, np.round(p * n))).astype(np.int64)


def pick(score: np.ndarray, batch: Batch, budget: np.ndarray) -> np.ndarray:
    """The mask (B, L) of the tokens with the highest scores (B, L), within the budget (B,); a token whose
    score is -inf is never masked.

    Sampling without replacement from a softmax policy is pick(logits + gumbel noise); its greedy choice is
    pick(logits). Raises UserError if a score is NaN."""
    score = maskable_scores(score, batch)
    best_first = np.argsort(-score, 1, kind="stable")
    mask = np.zeros(score.shape, bool)
    np.put_along_axis(mask, best_first, np.arange(score.shape[1]) < budget[:, None], 1)
    return mask & (score > -np.inf)


def maskable_scores(score: np.ndarray, batch: Batch) -> np.ndarray:
    """The scores (B, L), -inf where nothing may be masked. Raises UserError if one of the others is NaN."""
    score = np.where(batch.maskable, score, -np.inf)
    if np.isnan(score).any():
        raise UserError("a masker's score of a token is NaN; is it the log of a negative number?")
    return score


def fixed(masks: np.ndarray) -> Masker:
    """A masker that repeats what was chosen before: masks (M, L) bool, a row for each block, in order. L is
    the length of the longest block; a batch of shorter blocks has fewer columns."""
    def repeat(batch, budget, rng, lm=None):
        return masks[batch.indices, :batch.input_ids.shape[1]]
    return repeat


def corrupt(input_ids: np.ndarray, mask: np.ndarray, rng: RowRandom, mask_id: int,
            ordinary_ids: np.ndarray) -> np.ndarray:
    """BERT's 80/10/10: of the masked tokens 80 % become [MASK], 10 % a random ordinary token, 10 % stay.

    Held-out loss is measured with it, too: after an edit, old and new losses are not comparable."""
    u = rng.random(input_ids.shape)
    random_ids = ordinary_ids[(rng.random(input_ids.shape) * len(ordinary_ids)).astype(np.int64)]
    replaced = np.where(u < 0.8, mask_id, np.where(u < 0.9, random_ids, input_ids))
    return np.where(mask, replaced, input_ids)


# ---------------------------------------------------------------- the maskers

def pick_units(score: np.ndarray, batch: Batch, budget: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """As `pick`, but tokens of one unit are masked together or not at all, by the highest of their scores. A
    unit that no longer fits into the budget is passed over for the next that does.

    unit: (B, L), for each token the column where its unit starts (`units_of`)"""
    score = maskable_scores(score, batch)
    B, L = score.shape
    taken = np.zeros((B, L), bool)          # whether the unit that starts at a column is masked
    for b in range(B):
        # Size and best score of the unit that starts at each column; 0 and -inf where none does.
        size = np.bincount(unit[b], weights=batch.maskable[b], minlength=L)
        best = np.full(L, -np.inf)
        np.maximum.at(best, unit[b], score[b])
        left = budget[b]
        for u in np.argsort(-best, kind="stable"):
            if left == 0 or best[u] == -np.inf:
                break
            if size[u] <= left:
                taken[b, u] = True
                left -= size[u]
    return per_unit(taken, unit) & batch.maskable


def units_of(ids: np.ndarray) -> np.ndarray:
    """(B, L) for each token the column where its word or entity starts; a token with id -1 is its own unit.

    ids: (B, L) word_ids or entity_ids."""
    begins = np.ones(ids.shape, bool)
    begins[:, 1:] = (ids[:, 1:] != ids[:, :-1]) | (ids[:, 1:] < 0)
    return np.maximum.accumulate(np.where(begins, np.arange(ids.shape[1]), 0), 1)


def per_unit(numbers: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """(B, L) for each token the number of its unit.

    numbers: (B, L); unit: (B, L) the column of `numbers` that holds it: the one where the unit starts
        (`units_of`), or for spans the number of the span"""
    return np.take_along_axis(numbers, unit, 1)


@register
def none(batch: Batch, budget: np.ndarray, rng: RowRandom, lm=None) -> np.ndarray:
    """No further pre-training at all."""
    return np.zeros_like(batch.maskable)


@register
def random(batch: Batch, budget: np.ndarray, rng: RowRandom, lm=None) -> np.ndarray:
    """Tokens, uniformly, without replacement."""
    return pick(rng.random(batch.input_ids.shape), batch, budget)


@register
def whole(batch: Batch, budget: np.ndarray, rng: RowRandom, lm=None) -> np.ndarray:
    """Whole words, uniformly."""
    counts.check_spaces(batch.split)
    words = units_of(batch.word_ids)
    score = per_unit(rng.random(words.shape), words)
    return pick_units(score, batch, budget, words)


@register
def span(batch: Batch, budget: np.ndarray, rng: RowRandom, lm=None) -> np.ndarray:
    """Spans of whole words, lengths geometric (0.2) up to 10 (SpanBERT); the last is cut to the budget."""
    counts.check_spaces(batch.split)
    B, L = batch.input_ids.shape
    # Lengths of consecutive spans, in words: 2, 1, 3, ...
    p_length = 0.2 * 0.8**np.arange(10) / (1 - 0.8**10)                                         # of 1 to 10
    length = 1 + np.searchsorted(p_length.cumsum()[:-1], rng.random((B, L)), "right")
    # The words of a row are numbered in a circle that begins at a random word, so that all are masked equally
    # often. `place` is this number: 3 4 0 1 2 if the circle of five words begins at the third (turn = 3).
    # With the lengths above, these words are in the spans 2 2 0 0 1.
    first_of_word = (units_of(batch.word_ids) == np.arange(L)) & batch.maskable
    n_words = np.maximum(1, first_of_word.sum(1, keepdims=True))                                # (B, 1)
    turn = (rng.random((B, 1)) * n_words).astype(np.int64)
    place = (np.cumsum(first_of_word, 1) - 1 + turn) % n_words                                  # (B, L)
    span_ids = np.zeros((B, L), np.int64)
    for row in range(B):
        span_of_place = np.repeat(np.arange(L), length[row])                                    # 0 0 1 2 2 2
        span_ids[row] = span_of_place[place[row]]
    # All tokens of a span share one score, and its first words come first where the budget ends within it.
    score = per_unit(rng.random((B, L)), span_ids)
    return pick(score - 1e-9 * place, batch, budget)


@register
def entity(batch: Batch, budget: np.ndarray, rng: RowRandom, lm=None) -> np.ndarray:
    """Whole named entities first, then random tokens (the paper's Entity-Random)."""
    entities = units_of(batch.entity_ids)
    score = (batch.entity_ids >= 0) + per_unit(rng.random(entities.shape), entities)
    return pick_units(score, batch, budget, entities)


@register
def pmi(batch: Batch, budget: np.ndarray, rng: RowRandom, lm=None) -> np.ndarray:
    """Collocations and words, whole, uniformly (PMI-Masking, Levine et al. 2021)."""
    units = units_of(np.where(batch.maskable, counts.collocations(batch.split)[batch.token_at], -1))
    score = per_unit(rng.random(units.shape), units)
    return pick_units(score, batch, budget, units)


# ---------------------------------------------------------------- scores, each of which makes a masker

# Word counts of general English (docs/adapt.md says how they were made); difference:FILE takes your own.
GENERAL = Path(counts.__file__).with_name("general_words.txt")
FIRST = 20.0    # a logit far above all noise: such tokens come first


@register_score
def punct(batch: Batch, lm=None) -> np.ndarray:
    """Punctuation first, then random tokens (the paper's Punctuation-Random)."""
    return FIRST * batch.is_punct


@register_score
def no_punct(batch: Batch, lm=None) -> np.ndarray:
    """Random tokens that are not punctuation; punctuation only where nothing else is left."""
    return -FIRST * batch.is_punct


@register_score
def oracle(batch: Batch, lm=None) -> np.ndarray:
    """The toy world's informative words first, the best that a policy could learn there (--lm=tiny)."""
    if batch.split.special.vocabulary_size != len(toy.informative()):
        raise UserError("the masker oracle knows the words of the toy world only; use --lm=tiny")
    return FIRST * toy.informative()[batch.input_ids]


@register_score
def frequent(batch: Batch, lm=None) -> np.ndarray:
    """log n, n: how often the token stands in the split that is read."""
    return np.log(counts.token_counts(batch.split)[batch.input_ids])


@register_score
def rare(batch: Batch, lm=None) -> np.ndarray:
    """-log n, the opposite of `frequent`."""
    return -frequent(batch)


@register_score
def long(batch: Batch, lm=None) -> np.ndarray:
    """The number of characters of the token in the raw text; 0 for punctuation, which may still be masked.

    One character more means e times the weight, so that mostly the longest tokens are drawn. A blank counts
    where it is part of the token, and an unknown token is as long as what it stands for."""
    characters = batch.split.char_end[batch.token_at] - batch.split.char_begin[batch.token_at]
    return np.where(batch.is_punct, 0.0, characters)


@register_score
def subword(batch: Batch, lm=None) -> np.ndarray:
    """The second and later tokens of words first; the first token of a piece is never one."""
    counts.check_spaces(batch.split)
    later = np.zeros(batch.maskable.shape, bool)
    later[:, 1:] = batch.word_ids[:, 1:] == batch.word_ids[:, :-1]
    return FIRST * later


@register_score
def in_entity(batch: Batch, lm=None) -> np.ndarray:
    """Tokens of named entities first; unlike `entity`, one by one."""
    return FIRST * (batch.entity_ids >= 0)


@register_score
def tfidf(batch: Batch, lm=None) -> np.ndarray:
    """log(tf log(N / df)): tf times in this piece, in df of the N texts of the split."""
    same = batch.input_ids[:, :, None] == batch.input_ids[:, None, :]                           # (B, L, L)
    return np.log(same.sum(2)) + np.log(counts.inverse_document_frequency(batch.split)[batch.input_ids])


@register_score
def label(batch: Batch, lm=None) -> np.ndarray:
    """log of how much the token tells about the label: KL(p(label | token), p(label)) in train, in nats.

    In question answering the label of a token is whether it stands in an answer."""
    known = tuple(batch.readable_labels.tolist())
    return np.log(counts.label_information(batch.split.train, known)[batch.input_ids])


@register_score
def loss(batch: Batch, lm=None) -> np.ndarray:
    """log of the LM's own loss at the token, unmasked, in nats."""
    def nats(logits, input_ids):
        # torch wants the classes, V, as the second dimension.
        return F.cross_entropy(logits.transpose(1, 2), input_ids, reduction="none")

    return np.log(lm.per_token(batch, nats) + 1e-3)                                             # (B, L)


@register_score
def easy(batch: Batch, lm=None) -> np.ndarray:
    """The opposite of `loss`: tokens are drawn with weight 1 / loss."""
    return -loss(batch, lm)


@register_score
def entropy(batch: Batch, lm=None) -> np.ndarray:
    """log of the entropy of what the LM would put in the token's place, unmasked, in nats."""
    def nats(logits, input_ids):
        log_probs = logits.log_softmax(-1)
        return -(log_probs.exp() * log_probs).sum(-1)

    return np.log(lm.per_token(batch, nats) + 1e-3)                                             # (B, L)


@register_score
def difference(batch: Batch, lm=None, general: Path = GENERAL) -> np.ndarray:
    """log p(word) in the split - log p(word) in general text; 0 for words without a letter.

    What is typical of the task, after Difference-Masking (Wilf et al. 2023), which ranks words by TF-ICF.
    general: a file of words and their counts, "word<TAB>count" a line; as a masker, difference:FILE"""
    words = counts.words_of(batch.split).word_of_token[batch.token_at]                          # (B, L)
    return counts.log_ratio_to_general(batch.split, general)[words]


# ---------------------------------------------------------------- names of maskers

def find(name: str) -> Masker:
    """The masker of a --masker: a registered name, nmg:FOLDER, sampled:FOLDER, difference:FILE, or
    FILE.py:function. Several folders, separated by commas, are the mean of their policies."""
    if is_learned(name):
        policies = [load_policy(folder) for folder in folders_of(name)]
        if name.startswith("nmg:"):
            return greedy(logits_of(policies))
        return sampled(sharpened_logits_of(policies))
    if name.startswith("difference:"):
        general = Path(name.removeprefix("difference:"))
        if not general.is_file():
            raise UserError(f"--masker={name}: no such file: {general}")
        return sampled(functools.partial(difference, general=general))
    if name in MASKERS:
        return MASKERS[name]
    file, _, function = name.rpartition(":")
    if not file.endswith(".py"):
        raise UserError(f"--masker={name}: no such masker{nearest(name, MASKERS)}, FILE.py:function, and "
                        "nmg:FOLDER or sampled:FOLDER of a policy that train_nmg.py learned")
    if not Path(file).is_file():
        raise UserError(f"--masker={name}: no such file: {file}")
    masker = runpy.run_path(file).get(function)
    if not callable(masker):
        raise UserError(f"--masker={name}: {file} has no function {function!r}")
    if masker is SCORES.get(function):
        # @register_score leaves the name to the score, so we take the masker that it made of it.
        masker = MASKERS[function]
    return masker


def checksum_of(name: str) -> str | None:
    """Of the files behind a --masker: policies, a list of words, FILE.py. None for registered names."""
    if name in MASKERS:
        return None
    if is_learned(name):
        checksums = []
        for folder in folders_of(name):
            checksums.append(runs.checksum(Path(folder, "policy.safetensors")))
            # The same weights, drawn from in another way, are another masker. Older files of policies have no
            # clip: for them the checksum of the weights stays alone, so that finished runs still match.
            settings = Path(folder, "policy.json")
            if '"clip"' in settings.read_text():
                checksums.append(runs.checksum(settings))
        return checksums[0] if len(checksums) == 1 else runs.digest(checksums)
    if name.startswith("difference:"):
        file = Path(name.removeprefix("difference:"))
    else:
        file = Path(name.rpartition(":")[0])
    return runs.checksum(file)


def is_learned(name: str) -> bool:
    """Whether a --masker names the folder of a policy, or of several."""
    return name.startswith(("nmg:", "sampled:"))


def folders_of(name: str) -> list[str]:
    """The folders of a learned masker."""
    return name.partition(":")[2].split(",")


def split_names(names: str) -> list[str]:
    """The maskers of a list that is separated by commas; the folders of a learned one stay together."""
    found = []
    for name in names.split(","):
        if found and is_learned(found[-1]) and (Path(name) / "policy.json").exists():
            found[-1] += f",{name}"
        else:
            found.append(name)
    return found


def logits_of(policies: list[Policy]) -> Callable[[Batch, Callable], np.ndarray]:
    """The logits of a policy, as a function of a batch and an LM. Those of several policies are the mean of
    their standardized logits, so that each has the same weight."""
    if len(policies) == 1:
        return policies[0].logits

    def mean_logits(batch, lm):
        return np.mean([standardized(policy.logits(batch, lm)) for policy in policies], axis=0)

    return mean_logits


def sharpened_logits_of(policies: list[Policy]) -> Callable[[Batch, Callable], np.ndarray]:
    """The logits by which tokens are drawn, sharpened as the first policy says. If it says nothing and there
    are several, by the defaults."""
    logits = logits_of(policies)
    sharpness, clip = policies[0].sharpness, policies[0].clip
    # A mean of standardized logits is flatter than each of them, too flat to be drawn from as it is.
    if len(policies) > 1 and sharpness is None:
        sharpness, clip = SHARPNESS, CLIP

    def sharpened_logits(batch, lm):
        return sharpened(logits(batch, lm), sharpness, clip)

    return sharpened_logits
