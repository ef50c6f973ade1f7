"""Each masker against the contract, property-based; what makes each strategy itself; corruption; random
numbers; the policy network; each score against plain loops over a small data set."""
import functools
import itertools
import math
import random
import re
import string
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import all_of, corpus_of, fast_tokenizer, load_splits, random_lm, same
from hypothesis import given, settings
from hypothesis import strategies as st

import data_prep
import maskers
from maskers import FIRST, SCORES
from nmg import counts, policies
from nmg.policies import LinearPolicy, PaperPolicy, load_policy, random_policy, sharpened, standardized
from support import models, runs, toy
from support.data import Batch, blocks, collate
from support.models import LMReader
from support.rng import RowRandom, rng_for
from support.runs import UserError

HEURISTICS = sorted(maskers.MASKERS)
# The most probable tokens of a policy with random weights, and draws from it.
with torch.random.fork_rng():
    torch.manual_seed(0)
    POLICY = PaperPolicy(16)
LEARNED = {"nmg": maskers.greedy(POLICY.logits), "sampled": maskers.sampled(POLICY.logits)}
# Maskers whose units are single tokens: they use all of the budget.
EXACT = ["random", "span", *SCORES, *LEARNED]


class Corpus:
    """The split of a batch: every row is a text, every token has two characters, some of them << >> [[ ]]."""

    def __init__(self, input_ids, word_ids, entity_ids):
        texts, self.length = input_ids.shape
        self.input_ids, self.word_ids = input_ids.ravel(), word_ids.ravel()
        self.entity_ids = entity_ids.ravel()
        self.token_start = np.arange(texts + 1) * self.length
        self.char_begin = np.tile(3 * np.arange(self.length), texts)
        self.char_end = self.char_begin + 2
        self.label = np.arange(texts) % 3
        self.train = self
        self.special = SimpleNamespace(vocabulary_size=len(toy.informative()))

    def __len__(self):
        return len(self.label)

    def text(self, i):
        return " ".join((["ab", "<<", "ab", "ab", ">>", "ab", "[[", "ab", "]]"] * self.length)[:self.length])


def batch_of(input_ids, maskable, word_ids, is_punct, entity_ids):
    """A batch without a data set; row b has [CLS], its maskable tokens, [SEP], and padding."""
    attention_mask = np.arange(input_ids.shape[1]) < maskable.sum(1)[:, None] + 2
    token_at = np.arange(input_ids.size).reshape(input_ids.shape)
    split = Corpus(input_ids, word_ids, entity_ids)
    indices = np.arange(len(input_ids))
    return Batch(input_ids, attention_mask, maskable, word_ids, is_punct, None, indices, indices,
                 token_at, maskable, indices, split)


@st.composite
def batches(draw):
    """Rows of random words, entities and punctuation, padded; some rows hold nothing that may be masked."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    B, L = draw(st.integers(1, 6)), draw(st.integers(3, 60))
    tokens = rng.integers(0, L - 1, (B, 1))
    column = np.arange(L)
    maskable = (column >= 1) & (column <= tokens)
    word_ids = np.where(maskable, np.cumsum(rng.random((B, L)) < 0.6, 1), -1)
    entity_ids = np.where(maskable & (word_ids % 5 == 0), word_ids // 5, -1)
    is_punct = maskable & (rng.random((B, L)) < 0.2)
    input_ids = np.where(maskable, rng.integers(5, 100, (B, L)), 0)
    return batch_of(input_ids, maskable, word_ids, is_punct, entity_ids)


def plain_batch(rows=4000, n=40, words_of=2):
    """Rows of n tokens (id 7) between two special ones, in words of `words_of` tokens."""
    maskable = np.zeros((rows, n + 2), bool)
    maskable[:, 1:-1] = True
    word_ids = np.where(maskable, (np.arange(n + 2) - 1) // words_of, -1)
    return batch_of(np.where(maskable, 7, 2), maskable, word_ids, np.zeros_like(maskable),
                    np.full(maskable.shape, -1))


def rng_of(batch, seed=0):
    return RowRandom(seed, "mask", 0, batch.indices)


def mask_of(name, batch, p, seed=0):
    masker = LEARNED.get(name) or maskers.find(name)
    return masker(batch, maskers.budget_of(batch, p), rng_of(batch, seed), LM())


class LM:
    """Hidden states (B, L, 16), and logits (B, L, 200), that depend on token and place."""

    def __init__(self):
        self.table = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))

    def __call__(self, batch):
        return self.table[batch.input_ids] + self.table[100:100 + batch.input_ids.shape[1]]

    def per_token(self, batch, fn):
        return fn(self(batch) @ self.table.T, torch.from_numpy(batch.input_ids).long()).numpy()


@given(batch=batches(), seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_what_a_folder_of_a_policy_masks(batch, seed, tmp_path_factory):
    """nmg: the tokens of the highest logits, not clipped; sampled: tokens drawn from them, as sharp as in
    training. Two policies are the mean of their standardized logits: each counts alike, however wide."""
    folder, each, shapes = tmp_path_factory.mktemp("policy"), [], [(1.7, 0.6), (None, None)]
    for i, shape in enumerate(shapes):
        policy = random_policy(16, seed + i, "x")
        policy.sharpness, policy.clip = shape
        policy.weight.data *= 100**i
        policy.save(folder / str(i))
        each.append(np.where(batch.maskable, (LM()(batch) @ policy.weight).detach().numpy(), -np.inf))
    mean = np.mean([standardized(logits) for logits in each], 0)
    noise = rng_of(batch, seed).gumbel(batch.maskable.shape)
    scores = {
        f"nmg:{folder}/0": each[0],
        f"sampled:{folder}/0": sharpened(each[0], 1.7, 0.6) + noise,
        # In the paper's form logits are drawn from as they are.
        f"sampled:{folder}/1": each[1] + noise,
        f"nmg:{folder}/0,{folder}/1": mean,
        # As sharp as the first one; as usual if that is not sharpened.
        f"sampled:{folder}/0,{folder}/1": sharpened(mean, 1.7, 0.6) + noise,
        f"sampled:{folder}/1,{folder}/0": sharpened(mean, policies.SHARPNESS, policies.CLIP) + noise}
    for name, score in scores.items():
        expected = maskers.pick(score, batch, maskers.budget_of(batch, 0.4))
        assert (mask_of(name, batch, 0.4, seed) == expected).all()


def test_several_policies_are_one_masker(tmp_path):
    """A list of maskers keeps the folders of one together; another order is another masker, and so are the
    same weights that are drawn from in another way."""
    for i in range(2):
        random_policy(16, i, "x").save(tmp_path / str(i))
    name = f"sampled:{tmp_path}/0,{tmp_path}/1"
    assert maskers.split_names(f"random,{name},whole") == ["random", name, "whole"]
    others = [name, f"sampled:{tmp_path}/1,{tmp_path}/0", f"sampled:{tmp_path}/0"]
    before = {maskers.checksum_of(other) for other in others}
    assert len(before) == 3
    policy = random_policy(16, 0, "x")
    policy.clip = 1.0
    policy.save(tmp_path / "0")
    assert len(before | {maskers.checksum_of(other) for other in others}) == 6
    # A policy of an earlier version keeps the checksum by which finished runs know it.
    (tmp_path / "0/policy.json").write_text('{"class": "LinearPolicy", "hidden_size": 16, "sharpness": 2.4}')
    assert maskers.checksum_of(others[2]) == runs.checksum(tmp_path / "0/policy.safetensors")


# ---------------------------------------------------------------- the contract

@pytest.mark.parametrize("name", [*HEURISTICS, *LEARNED])
@given(batch=batches(), p=st.floats(0.01, 1.0), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_contract(name, batch, p, seed):
    budget, mask = maskers.budget_of(batch, p), mask_of(name, batch, p, seed)
    # The budget is the paper's.
    assert budget.tolist() == [min(n, max(1, round(p * n))) for n in batch.maskable.sum(1)]
    assert mask.shape == batch.maskable.shape and mask.dtype == bool
    assert not (mask & ~batch.maskable).any()
    assert (mask.sum(1) <= budget).all()
    if name in EXACT:
        assert (mask.sum(1) == budget).all()
    assert (mask == mask_of(name, batch, p, seed)).all()


@pytest.mark.parametrize("name", HEURISTICS)
@given(batch=batches(), seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_a_row_alone_gets_the_same_mask(name, batch, seed):
    """Neither the other rows of a batch, nor its order, nor its padding change a row's mask."""
    mask = mask_of(name, batch, 0.3, seed)
    for i in range(len(mask)):
        # [CLS] and the tokens that may be masked
        row = (slice(i, i + 1), slice(0, 1 + batch.maskable[i].sum()))
        cut = {}
        for field in ("input_ids", "attention_mask", "maskable", "word_ids", "is_punct", "token_at"):
            cut[field] = getattr(batch, field)[row]
        alone = replace(batch, **cut, in_text=cut["maskable"], indices=np.array([i]))
        assert (mask_of(name, alone, 0.3, seed) == mask[row]).all()


def naive_pick(score, maskable, unit, budget):
    """The tokens of one row: unit by unit, by its best score, whatever fits into what is left."""
    units = {}
    for token in np.flatnonzero(maskable):
        units.setdefault(unit[token], []).append(token)
    picked = set()
    for tokens in sorted(units.values(), key=lambda tokens: -max(score[tokens])):
        if max(score[tokens]) > -np.inf and len(picked) + len(tokens) <= budget:
            picked |= set(tokens)
    return picked


@pytest.mark.parametrize("of_words", [False, True])
@given(batch=batches(), seed=st.integers(0, 10_000), p=st.floats(0.05, 1.0))
@settings(max_examples=80, deadline=None)
def test_pick_against_a_naive_loop(of_words, batch, seed, p):
    """A unit whose scores are all -inf is never picked, not even where the budget would take all. A score
    that is not a number is an error only where a token could be masked."""
    rng, budget = np.random.default_rng(seed), maskers.budget_of(batch, p)
    score = rng.random(batch.input_ids.shape)
    score[rng.random(score.shape) < 0.3] = -np.inf
    pick, unit = maskers.pick, np.broadcast_to(np.arange(score.shape[1]), score.shape)
    if of_words:
        unit = batch.word_ids
        pick = functools.partial(maskers.pick_units, unit=maskers.units_of(unit))
    mask = pick(np.where(batch.maskable, score, np.nan), batch, budget)
    for b in range(len(score)):
        assert set(np.flatnonzero(mask[b])) == naive_pick(score[b], batch.maskable[b], unit[b], budget[b])
    if batch.maskable.any():
        with pytest.raises(UserError, match="score of a token is NaN"):
            pick(np.where(batch.maskable, np.nan, score), batch, budget)


# ---------------------------------------------------------------- each strategy

@pytest.mark.parametrize("name", ["whole", "entity", "pmi"])
def test_units_are_drawn_uniformly_whatever_their_length(name, monkeypatch):
    """Of as many units of one token as of two, a long one comes first in half of the rows."""
    batch = plain_batch(n=30)
    units = np.concatenate(([-1], np.repeat(np.arange(20), [1, 2] * 10), [-1]))
    batch = replace(batch, word_ids=np.where(batch.maskable, units, -1))
    batch.split.entity_ids = batch.word_ids.ravel()
    monkeypatch.setattr(counts, "collocations", lambda split: split.entity_ids)
    mask = maskers.find(name)(batch, np.full(4000, 2), rng_of(batch))
    long = (mask & (batch.word_ids % 2 == 1)).any(1)
    assert abs(long.mean() - 0.5) < 5 * np.sqrt(0.25 / 4000)


def test_spans_are_whole_words_of_geometric_length(monkeypatch):
    """SpanBERT's lengths of 1 to 10 words: geometric (0.2), cut off at 10; before the budget cuts any."""
    seen, lengths = [], []
    monkeypatch.setattr(maskers, "pick", lambda score, batch, budget: seen.append(score))
    mask_of("span", plain_batch(rows=300, n=400, words_of=2), 0.02)
    for score in seen[0][:, 1:-1]:
        # All tokens of a span share one score, but for 1e-9 a token.
        ends = np.flatnonzero(np.abs(np.diff(score)) > 1e-6)
        lengths.extend(np.diff(ends))
    lengths = np.array(lengths)
    assert (lengths % 2 == 0).all() and lengths.max() <= 20
    found = np.bincount(lengths // 2, minlength=11)[1:] / len(lengths)
    expected = 0.2 * 0.8**np.arange(10) / (1 - 0.8**10)
    np.testing.assert_allclose(found, expected, atol=0.012)


@pytest.mark.parametrize("p", [0.15, 0.5])
@pytest.mark.parametrize("n", [2, 11, 60])
@pytest.mark.parametrize("name", ["random", "span"])
def test_every_place_is_masked_as_often(name, n, p):
    batch = plain_batch(n=n, words_of=1)
    mask = mask_of(name, batch, p)[:, 1:-1]
    share = maskers.budget_of(batch, p)[0] / n
    assert abs(mask.mean(0) - share).max() < 5 * np.sqrt(share * (1 - share) / 4000)
    if (name, n, p) == ("span", 11, 0.15):
        # Two words: side by side, at both ends of the row, or two spans of one.
        assert (mask[:, 1:] & mask[:, :-1]).any(1).mean() > 0.6


def test_punctuation_or_entities_come_first_and_the_rest_is_random():
    batch = plain_batch(rows=200)
    batch.is_punct[:, 20:23] = True
    batch.split.entity_ids = np.where(batch.is_punct, 0, -1).ravel()
    for name in ("punct", "entity"):
        mask = mask_of(name, batch, 0.15)
        assert mask[:, 20:23].all()
        assert (mask.sum(1) == 6).all()
        assert (mask.any(0) == batch.maskable[0]).all()
    # The opposite: of what is left, everything at some time.
    mask = mask_of("no_punct", batch, 0.15)
    assert (mask.any(0) == batch.maskable[0] & ~batch.is_punct[0]).all()


def test_entities_of_the_toy_world_are_its_names():
    """Of the whole corpus, of which a batch is a part; texts are cut into blocks."""
    tokenizer = models.load_tokenizer("tiny")
    batch = collate(blocks(data_prep.load("toycls", tokenizer).corpus, 6), np.arange(100, 300))
    is_name = np.isin(batch.input_ids, tokenizer.convert_tokens_to_ids(toy.ALL_NAMES))
    assert (is_name == (batch.entity_ids >= 0)).all()
    assert (SCORES["in_entity"](batch) == FIRST * is_name).all()


MINE = """
import maskers

def rare(batch, budget, rng, lm=None):
    return maskers.pick(-batch.input_ids, batch, budget)

@maskers.register_score
def ones(batch, lm=None):
    return 1e3 * (batch.input_ids == 1)

by_hand = maskers.sampled(ones)
"""


@pytest.mark.parametrize("name", ["rare", "ones", "by_hand"])
def test_a_masker_from_a_file(name, tmp_path, monkeypatch):
    """Or a score, registered, or made a masker by hand; it draws tokens with weight exp(score)."""
    monkeypatch.setattr(maskers, "MASKERS", {**maskers.MASKERS})
    monkeypatch.setattr(maskers, "SCORES", {**maskers.SCORES})
    (tmp_path / "mine.py").write_text(MINE)
    batch = plain_batch(rows=3)
    batch.input_ids[:, 8] = 1
    assert maskers.find(f"{tmp_path}/mine.py:{name}")(batch, np.array([1, 1, 1]), rng_of(batch))[:, 8].all()


def test_a_name_that_is_taken_is_not_registered_again(tmp_path):
    """Else tools would compare with something else that is called random."""
    before = dict(maskers.MASKERS), dict(maskers.SCORES)
    source = "from maskers import register_score\n\n@register_score\ndef random(batch, lm=None): ...\n"
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(UserError, match="has 'random' already"):
        maskers.find(f"{tmp_path}/mine.py:random")
    assert before == (maskers.MASKERS, maskers.SCORES)


# ---------------------------------------------------------------- corruption, random numbers, policies

def test_corruption_is_80_10_10():
    batch = plain_batch(rows=5000)
    mask = mask_of("random", batch, 0.5)
    ordinary = np.arange(10, 1000)
    rng = RowRandom(0, "corrupt", 0, batch.indices)
    corrupted = maskers.corrupt(batch.input_ids, mask, rng, 4, ordinary)
    assert (corrupted[~mask] == 7 * batch.maskable[~mask] + 2 * ~batch.maskable[~mask]).all()
    ids = corrupted[mask]
    for expected, found in ((0.8, ids == 4), (0.1, ids >= 10), (0.1, ids == 7)):
        assert abs(found.mean() - expected) < 5 * np.sqrt(expected * (1 - expected) / len(ids)) + 1e-3
    assert len(np.unique(ids[ids >= 10])) > 950


def test_streams_depend_on_seed_and_name_alone():
    first = [rng_for(*stream).random() for stream in ((0, "order"), (0, "order"), (0, "head"), (1, "order"))]
    assert first[0] == first[1] and len(set(first)) == 3


def test_random_numbers_are_uniform_and_unrelated():
    """Neighbours in rows and columns; the next call, another seed, purpose and epoch."""
    rows, shape = np.arange(2000), (2000, 100)
    rng = RowRandom(0, "mask", 0, rows)
    u = rng.random(shape)
    assert u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, 100, (0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 99 + 5 * np.sqrt(2 * 99)
    pairs = [(u[:-1], u[1:]), (u[:, :-1], u[:, 1:]), (u, rng.random(shape))]
    for other in ((1, "mask", 0), (0, "corrupt", 0), (0, "mask", 1)):
        pairs.append((u, RowRandom(*other, rows).random(shape)))
    for one, other in pairs:
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.01


def test_a_saved_policy_is_the_same_or_refused(tmp_path, capsys):
    """One that has learned nothing is told."""
    for policy in (LinearPolicy(32), random_policy(32, 0, "x"), PaperPolicy(32)):
        policy.sharpness, policy.clip = 2.4, 1.5
        policy.save(tmp_path)
        opened = load_policy(tmp_path)
        assert type(opened) is type(policy)
        assert (opened.sharpness, opened.clip) == (2.4, 1.5)
        assert same(policy.state_dict(), opened.state_dict())
        is_told = "this policy has learned nothing" in capsys.readouterr().out
        assert is_told == (not any(weight.any() for weight in policy.parameters()))
    batch = plain_batch(rows=2)
    with pytest.raises(UserError, match="reads hidden states of size 32, this LM has 16"):
        maskers.greedy(opened.logits)(batch, np.full(2, 1), rng_of(batch), LM())
    # The run that makes it goes on.
    (tmp_path / "started.json").touch()
    with pytest.raises(UserError, match="is not finished"):
        load_policy(tmp_path)


# ---------------------------------------------------------------- scores, against plain loops

MARKED = [
    "The << cat >> sat on the [[ mat ]], and purred.",
    "Dogs (big ones) bark; << electroencephalographic dogs >> don't purr!",
    "<< Big [[ dogs ]] ones >> bark << into pieces.",
    "Short, and short again.",
    "<<the << cat>> and [[unbelievable]] measurements sat on measurements.",
]


@pytest.fixture
def data(tmp_path, tok):
    """Labelled texts, and a corpus of other texts."""
    train = [{"text": f"{MARKED[i % 5]} {i}", "label": "xyz"[i % 3], "doc": i} for i in range(30)]
    dev = [row | {"text": f"dev {i}", "doc": 99} for i, row in enumerate(train)]
    corpus = [{"text": f"{MARKED[i % 4]} {MARKED[i % 3]} in {i}", "doc": i} for i in range(20)]
    return load_splits(tmp_path / "scored", tok, train=train, dev=dev, corpus=corpus)


def check_score(name, batch, expected, lm=None, rtol=1e-6, **options):
    """The score of every token that may be masked is expected(row, column)."""
    found = SCORES[name](batch, lm, **options)
    assert found.shape == batch.input_ids.shape
    places = np.argwhere(batch.maskable).tolist()
    assert len(places) > 100
    wanted = [expected(b, column) for b, column in places]
    assert len(set(wanted)) > 1
    np.testing.assert_allclose([found[b, column] for b, column in places], wanted, rtol=rtol, atol=1e-9)


def texts_of(split):
    """The token ids of each text."""
    return [text.tolist() for text in np.split(split.input_ids, split.token_start[1:-1])]


@pytest.mark.parametrize(("name", "sign"), [("frequent", 1), ("rare", -1)])
def test_frequent_and_rare_count_in_the_corpus(name, sign, data):
    batch = all_of(blocks(data.corpus, 64))
    n = Counter(itertools.chain.from_iterable(texts_of(data.corpus)))
    check_score(name, batch, lambda b, column: sign * math.log(n[batch.input_ids[b, column]]))


@pytest.mark.parametrize("max_len", [64, 12])
def test_tfidf(max_len, data):
    """tf counts within a piece, df texts of the corpus."""
    batch, texts = all_of(blocks(data.corpus, max_len)), texts_of(data.corpus)

    def expected(b, column):
        token = batch.input_ids[b, column]
        tf = batch.input_ids[b].tolist().count(token)
        df = sum(token in text for text in texts)
        return math.log(tf * math.log((len(texts) + 1) / df))

    check_score("tfidf", batch, expected)


def naive_words(split):
    """Of each text, (word in lower case, or the signs where there is none; index of its first token, of its
    last)."""
    texts = []
    for i in range(len(split)):
        words = []
        for _, group in itertools.groupby(range(*split.token_start[i:i + 2]), lambda t: split.word_ids[t]):
            tokens = list(group)
            characters = split.text(i)[split.char_begin[tokens[0]]:split.char_end[tokens[-1]]].lower()
            word = " ".join(re.findall(r"\w+(?:['-]\w+)*", characters) or [characters.strip()])
            words.append((word, tokens[0], tokens[-1]))
        texts.append(words)
    return texts


GENERAL = {"the": 900, "cat": 60, "unbelievable": 7, "sat": 40, "in": 500, ",": 400, "3": 20}


def test_difference_of_the_corpus_to_general_text(data, tmp_path):
    """A word that is not listed is as rare as the rarest that is; 0 where there is no letter."""
    file = tmp_path / "general.txt"
    file.write_text("".join(f"{word}\t{count}\n" for word, count in GENERAL.items()))
    batch, word_at, every = all_of(blocks(data.corpus, 64)), {}, []
    for word, first, last in itertools.chain(*naive_words(data.corpus)):
        every.append(word)
        word_at |= dict.fromkeys(range(first, last + 1), word)

    def expected(b, column):
        word = word_at[batch.token_at[b, column]]
        if not re.search("[a-z]", word):
            return 0.0
        in_general = GENERAL.get(word, 7) / sum(GENERAL.values())
        return math.log(every.count(word) / len(every)) - math.log(in_general)

    check_score("difference", batch, expected, general=file)


def test_a_word_with_hyphens_is_as_rare_as_its_rarest_part(tmp_path, tok, capsys):
    """Unless it is listed itself; apostrophes are straight or not, accents composed or not."""
    listed = "Cat\t50\ncat\t10\nbig\t500\ndon\u2019t\t40\ncafe\u0301\t30\nrare\t1\n"
    (tmp_path / "general.txt").write_text(listed)
    split = corpus_of(tmp_path, tok, "big-cat don\u2019t cafe\u0301 zzz-cat")
    typical = counts.log_ratio_to_general(split, tmp_path / "general.txt")
    found = dict(zip(counts.words_of(split).text, typical, strict=True))
    for word, count in {"big-cat": 60, "don't": 40, "café": 30, "zzz-cat": 1}.items():
        assert found[word] == pytest.approx(math.log(1 / 4) - math.log(count / 631))
    # Of big-cat the parts are listed, of zzz-cat not: one of four is unlisted, and below two of three.
    split = corpus_of(tmp_path, tok, "cat zzz yyy")
    assert "not in general.txt" not in capsys.readouterr().out
    counts.log_ratio_to_general(split, tmp_path / "general.txt")
    assert "WARNING: 67% of the words of this text are not in general.txt" in capsys.readouterr().out


SPACELESS = {
    "Thai": "เมื่อวานนี้ฉันไปดูหนังกับเพื่อน และกินข้าวที่ร้านอาหารใหม่",
    "short Chinese sentences": "好看。很好。太差。不行。",
}
SPACED = {
    "segmented Thai": "เมื่อวานนี้ ฉัน ไป ดู หนัง กับ เพื่อน และ กิน ข้าว ที่ ร้าน อาหาร ใหม่",
    "Korean": "어제는 친구와 함께 새로운 영화를 보았습니다.",
    "names": "The band 東京事変 played in Tokyo, and its singer is 椎名林檎, who was born in Saitama.",
}


@pytest.mark.parametrize("script", SPACELESS)
def test_text_without_spaces_has_no_words_to_mask(script, tmp_path):
    batch = all_of(blocks(corpus_of(tmp_path, fast_tokenizer("bpe"), *[SPACELESS[script]] * 3), 64))
    budget, rng = maskers.budget_of(batch, 0.3), RowRandom(0, "mask", 0, batch.indices)
    for masker in ("whole", "span", "pmi", "difference", "subword"):
        with pytest.raises(UserError, match="% of the letters of this text stand in scripts without spaces"):
            maskers.find(masker)(batch, budget, rng)
    assert (maskers.random(batch, budget, rng).sum(1) == budget).all()


@pytest.mark.parametrize("script", SPACED)
def test_text_with_spaces_has_words(script, tmp_path):
    split = corpus_of(tmp_path, fast_tokenizer("bpe"), SPACED[script])
    every = [word for word in counts.words_of(split).text if counts.has_letter(word)]
    words = [word.strip(string.punctuation) for word in SPACED[script].lower().split()]
    assert every == [word for word in dict.fromkeys(words) if counts.has_letter(word)]


def naive_high_pmi(texts, words):
    """From the definition: every n-gram, every way to cut it."""
    grams = []
    for text in texts:
        for begin, end in itertools.combinations(range(len(text) + 1), 2):
            grams.append(tuple(text[begin:end]))
    count, total = Counter(grams), sum(len(text) for text in texts)
    pmi = {}
    for gram in count:
        if 2 <= len(gram) <= 5 and count[gram] >= 10 and set(gram) <= set(words):
            pmi[gram] = math.inf
            for cuts in itertools.product([False, True], repeat=len(gram) - 1):
                edges = [0, *(i for i, cut in enumerate(cuts, 1) if cut), len(gram)]
                apart = 0.0
                for a, b in itertools.pairwise(edges):
                    apart += math.log(count[gram[a:b]] / total)
                if any(cuts):
                    pmi[gram] = min(pmi[gram], math.log(count[gram] / total) - apart)
    values = sorted([0.0, *pmi.values()])
    median = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
    return {gram for gram in pmi if pmi[gram] > median + 1e-9}


def texts_with(phrases, seed):
    """200 texts of 8 phrases (lists of words) each."""
    rng = random.Random(seed)
    return [list(itertools.chain(*rng.choices(phrases, k=8))) for _ in range(200)]


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_units_are_collocations_from_left_to_right(kind, tmp_path):
    """The longest first, never across two texts; other words alone. With a text that may have no tokens,
    special tokens, capitals, phrases of more than five words, and words of several tokens or no letter."""
    phrases = ["the cat sat on", "the cat sat", "big dogs", "dogs", "unbelievable measurements", "7 8",
               "one two three four five", "six six six six six six", "a 99 b", "seven", *"abcde"]
    texts = [" ".join(text) for text in texts_with([phrase.split() for phrase in phrases], 0)]
    texts += ["a the cat", "sat on big", "dogs 7 8 unbelievable", "[SEP] the CAT  Sat[MASK]on [SEP]"]
    split = corpus_of(tmp_path, fast_tokenizer(kind), texts[0], "\u200b", *texts[1:])
    words = naive_words(split)
    read = [[word for word, _, _ in text] for text in words]
    assert [*read[0], *read[2]] == [*texts[0].split(), *texts[1].split()] and {"sep", "cat"} < {*read[-1]}
    kept = naive_high_pmi(read, {word for word in itertools.chain(*read) if re.search("[a-z]", word)})
    assert kept >= {("big", "dogs"), ("the", "cat", "sat", "on"), ("unbelievable", "measurements"),
                    ("one", "two", "three", "four", "five"), ("six",) * 5}
    expected, unit = [], 0
    for text in words:
        while text:
            gram = [word for word, _, _ in text[:5]]
            while len(gram) > 1 and tuple(gram) not in kept:
                gram.pop()
            expected += [unit] * (text[len(gram) - 1][2] - text[0][1] + 1)
            unit += 1
            del text[:len(gram)]
    found = counts.collocations(split)
    np.testing.assert_array_equal(found - found[0], expected)


def information(ids, labels, classes, token):
    """KL(p(label | token), p(label)), smoothed by 5 tokens of p(label); ids and labels of all tokens."""
    p_label = [(labels.count(c) + 1) / (len(labels) + classes) for c in range(classes)]
    of_token = [label for i, label in zip(ids, labels, strict=True) if i == token]
    kl = 0.0
    for c, p in enumerate(p_label):
        p_given = (of_token.count(c) + 5 * p) / (len(of_token) + 5)
        kl += p_given * math.log(p_given / p)
    return math.log(kl + 1e-4)


@pytest.mark.parametrize(("of_train", "of_pieces", "n"), [
    (np.arange(30), None, 30), (np.arange(12), None, 12), (np.arange(5, 30), np.arange(12), 12)])
def test_label_tells_of_the_classes_of_train(of_train, of_pieces, n, data):
    """In the corpus, by what was counted in train, as if it had no other texts than those whose labels may be
    known: where pieces have a choice of their own, that counts. A token that train does not have tells
    nothing."""
    train, pieces = data["train"], blocks(data.corpus, 64)
    train.labelled, pieces.readable_labels = of_train, of_pieces
    # Of all tokens of the first n texts.
    ids, labels = [], []
    for text, label in zip(texts_of(train)[:n], train.label.tolist()[:n], strict=True):
        ids += text
        labels += [label] * len(text)
    batch = all_of(pieces)
    check_score("label", batch, lambda b, column: information(ids, labels, 3, batch.input_ids[b, column]))
    unknown = ~np.isin(batch.input_ids, ids) & batch.maskable
    assert unknown.any() and SCORES["label"](batch)[unknown] == pytest.approx(math.log(1e-4))


def test_label_of_a_question_is_whether_a_token_stands_in_an_answer(qa_folder, tok):
    split = load_splits(qa_folder, tok)["train"]
    # An answer that cannot be used.
    split.answer = np.array(split.answer)
    split.answer[0] = -1
    ids, labels = split.input_ids.tolist(), [0] * len(split.input_ids)
    for text_id, question in [*zip(split.question_text, split.questions, strict=True)][1:]:
        answer = question["references"][0]
        begin = split.text(text_id).index(answer)
        for t in range(split.token_start[text_id], split.token_start[text_id + 1]):
            if split.char_begin[t] >= begin and split.char_end[t] <= begin + len(answer):
                labels[t] = 1
    batch = all_of(blocks(split, 64))
    check_score("label", batch, lambda b, column: information(ids, labels, 2, batch.input_ids[b, column]))


def test_long_tokens_have_many_letters(data, tok):
    """Punctuation has none. Brackets are unknown to this tokenizer, and so no punctuation."""
    batch = all_of(blocks(data.corpus, 128))

    def expected(b, column):
        token = tok.convert_ids_to_tokens(int(batch.input_ids[b, column])).removeprefix("##")
        if token == "[UNK]":
            return 1
        return len(token) if token.isalnum() else 0

    check_score("long", batch, expected)


def test_subwords_are_second_and_later_tokens_of_words(data, tok):
    batch = all_of(blocks(data.corpus, 128))

    def expected(b, column):
        before, token = tok.convert_ids_to_tokens(batch.input_ids[b, column - 1:column + 1].tolist())
        return FIRST * (token.startswith("##") or token == "'" or before == "'")

    check_score("subword", batch, expected)


@pytest.mark.parametrize("name", ["loss", "entropy"])
def test_loss_and_entropy_are_those_of_the_lm_at_the_token_itself(name, data, tok):
    """Against Hugging Face's own logits of each piece alone."""
    model = random_lm("bert", len(tok)).eval()
    # Logits so wide that entropies differ.
    torch.nn.init.constant_(model.cls.predictions.transform.LayerNorm.weight, 20.0)
    lm = LMReader(model)
    pieces = blocks(data.corpus, 40)
    batch = all_of(pieces)
    expected = np.zeros(batch.input_ids.shape)
    for b, n in enumerate(pieces.length):
        ids = torch.from_numpy(batch.input_ids[b, None, :n].astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=ids.to(model.device)).logits[0].cpu()
        nats = {"loss": torch.nn.functional.cross_entropy(logits, ids[0], reduction="none"),
                "entropy": torch.distributions.Categorical(logits=logits).entropy()}
        expected[b, :n] = (nats[name] + 1e-3).log()
    check_score(name, batch, lambda b, column: expected[b, column], lm, rtol=1e-4)
    if name == "loss":
        np.testing.assert_array_equal(SCORES["easy"](batch, lm), -SCORES["loss"](batch, lm))
