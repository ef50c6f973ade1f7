"""Each masker against the contract, property-based; what makes each strategy itself; corruption; random numbers."""
import numpy as np
import pytest
import torch
from conftest import SHARED, TEXTS, fast_tokenizer, needs_shared
from hypothesis import given, settings
from hypothesis import strategies as st

import data_prep
import maskers
from loop import UserError

LEARNED = ["nmg", "sampled"]
HEURISTICS = sorted(set(maskers.MASKERS) - set(LEARNED))


def batch_of(ids, ok, word, punct, ent):
    class Plain(data_prep.Batch):
        ent = None
    batch = Plain(ids, np.ones_like(ok), ok, word, punct, np.arange(len(ids)), np.zeros_like(ids), ok, None, None)
    batch.ent = ent
    return batch


@st.composite
def batches(draw):
    """Rows of random words, entities and punctuation, padded; some rows hold nothing that may be masked."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, width = draw(st.integers(1, 6)), draw(st.integers(3, 60))
    n = rng.integers(0, width - 1, rows)
    ok = (np.arange(width) >= 1) & (np.arange(width) <= n[:, None])
    word = np.where(ok, np.cumsum(rng.random(ok.shape) < 0.6, 1), -1)
    ent = np.where(ok & (word % 5 == 0), word // 5, -1)
    return batch_of(rng.integers(5, 100, ok.shape), ok, word, ok & (rng.random(ok.shape) < 0.2), ent)


def masker_of(name):
    """A registered masker; the learned one with a network of random weights, beside hidden states that depend on token and place."""
    if name not in LEARNED:
        return maskers.find(name)
    table, policy = torch.randn(200, 16, generator=torch.Generator().manual_seed(0)), maskers.NMG(16)

    def with_policy(batch, k, rng):
        return maskers.MASKERS[name](batch, k, rng, lambda b: table[b.ids] + table[100:100 + b.ids.shape[1]], policy)
    return with_policy


def rng_of(batch, seed=0, epoch=0):
    return maskers.RowRandom(seed, "mask", epoch, batch.rows)


@pytest.mark.parametrize("name", [*HEURISTICS, *LEARNED])
@given(batch=batches(), p=st.floats(0.01, 1.0), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_contract(name, batch, p, seed):
    k, masker = maskers.budget(batch, p), masker_of(name)
    mask = masker(batch, k, rng_of(batch, seed))
    assert mask.shape == batch.ok.shape and mask.dtype == bool
    assert not (mask & ~batch.ok).any()
    assert (mask.sum(1) <= k).all()
    if name in ("random", "span", "punct", "oracle", "anti", *LEARNED):
        assert (mask.sum(1) == k).all()
    assert (mask == masker(batch, k, rng_of(batch, seed))).all()


@pytest.mark.parametrize("name", HEURISTICS)
@given(batch=batches(), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_a_row_alone_gets_the_same_mask(name, batch, seed):
    """Neither the other rows of a batch, nor its order, nor its padding change a row's mask."""
    k = maskers.budget(batch, 0.3)
    mask = maskers.find(name)(batch, k, rng_of(batch, seed))
    for i in range(len(mask)):
        keep = max(1, int(batch.ok[i].nonzero()[0].max(initial=0)) + 1)
        alone = batch_of(*(a[i:i + 1, :keep] for a in (batch.ids, batch.ok, batch.word, batch.punct, batch.ent)))
        alone.rows = np.array([i])
        assert (maskers.find(name)(alone, k[i:i + 1], rng_of(alone, seed))[0] == mask[i, :keep]).all()


@given(batch=batches(), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_budget_is_the_papers(batch, seed):
    for n, k in zip(batch.ok.sum(1), maskers.budget(batch, 0.15), strict=True):
        assert k == min(n, max(1, round(0.15 * n)))


@given(batch=batches(), seed=st.integers(0, 10_000), p=st.floats(0.05, 0.9))
@settings(max_examples=80, deadline=None)
def test_pick_by_unit_against_a_naive_loop(batch, seed, p):
    rng = np.random.default_rng(seed)
    score, k = rng.random(batch.ids.shape), maskers.budget(batch, p)
    got = maskers.pick(score, batch, k, unit=maskers.runs(batch.word))
    for b in range(len(score)):
        tokens = {}
        for t in np.flatnonzero(batch.ok[b]):
            tokens.setdefault(batch.word[b, t], []).append(t)
        left, expected = k[b], set()
        for unit in sorted(tokens, key=lambda u: -max(score[b, t] for t in tokens[u])):
            if len(tokens[unit]) <= left:
                left -= len(tokens[unit])
                expected |= set(tokens[unit])
        assert set(np.flatnonzero(got[b])) == expected


def plain_batch(rows=4000, n=40, words_of=2):
    ok = np.zeros((rows, n + 2), bool)
    ok[:, 1:-1] = True
    word = np.where(ok, (np.arange(n + 2) - 1) // words_of, -1)
    return batch_of(np.where(ok, 7, 2), ok, word, np.zeros_like(ok), np.full(ok.shape, -1))


def test_units_are_drawn_uniformly_whatever_their_length():
    """Of as many units of one token as of two, a long one comes first in half of the rows."""
    batch = plain_batch(n=30)
    batch.word = batch.ent = np.where(batch.ok, np.concatenate(([-1], np.repeat(np.arange(20), [1, 2] * 10), [-1])), -1)
    for name in ("whole", "entity"):
        mask = maskers.find(name)(batch, np.full(4000, 2), rng_of(batch))
        assert abs((mask & (batch.word % 2 == 1)).any(1).mean() - 0.5) < 5 * np.sqrt(0.25 / 4000)


def test_random_is_uniform():
    batch = plain_batch()
    share = maskers.find("random")(batch, maskers.budget(batch, 0.15), rng_of(batch)).mean(0)[1:-1]
    assert abs(share - 0.15).max() < 5 * np.sqrt(0.15 * 0.85 / 4000)


def test_whole_takes_words_whole():
    batch = plain_batch(n=42, words_of=3)
    mask = maskers.find("whole")(batch, maskers.budget(batch, 0.15), rng_of(batch))
    for w in range(batch.word.max() + 1):
        part = mask[:, batch.word[0] == w]
        assert (part.all(1) == part.any(1)).all()
    assert (mask.sum(1) == 6).all() and len(np.unique(mask, axis=0)) > 50


def test_spans_are_whole_words_of_geometric_length(monkeypatch):
    """The scores that `span` hands on, where the budget cuts nothing off: 1 to 10 words, geometric with 0.2."""
    seen, batch = [], plain_batch(rows=300, n=400, words_of=2)
    monkeypatch.setattr(maskers, "pick", lambda score, batch, k: seen.append(score) or np.zeros_like(batch.ok))
    maskers.find("span")(batch, maskers.budget(batch, 0.02), rng_of(batch))
    length = np.concatenate([np.diff(np.flatnonzero(np.abs(np.diff(row)) > 1e-6)) for row in seen[0][:, 1:-1]])    # tokens of one score
    assert (length % 2 == 0).all() and length.max() <= 20
    np.testing.assert_allclose(np.bincount(length // 2, minlength=11)[1:] / len(length), 0.2 * 0.8**np.arange(10) / (1 - 0.8**10), atol=0.012)


def test_span_begins_anywhere_in_a_block():
    """A block whose words do not begin at 0 (the second block of a long text) is masked all over."""
    batch = plain_batch(rows=2000, n=50, words_of=1)
    batch.word = np.where(batch.ok, batch.word + 700, -1)
    share = maskers.find("span")(batch, maskers.budget(batch, 0.2), rng_of(batch)).mean(0)[1:-1]
    assert share.min() > 0.1 and share.max() < 0.3


def test_punct_and_entity_come_first():
    batch = plain_batch(rows=200)
    batch.punct[:, [5, 9]] = True
    batch.ent[:, 20:23] = 0
    k = maskers.budget(batch, 0.15)
    assert maskers.find("punct")(batch, k, rng_of(batch))[:, [5, 9]].all()
    assert maskers.find("entity")(batch, k, rng_of(batch))[:, 20:23].all()
    for name in ("punct", "entity"):                                     # then random tokens, up to the budget
        mask = maskers.find(name)(batch, k, rng_of(batch))
        assert (mask.sum(1) == k).all() and (mask.any(0) == batch.ok[0]).all()


def test_an_entity_is_masked_whole_or_not_at_all():
    batch = plain_batch(rows=200)
    batch.ent[:, 20:30] = 0
    assert not maskers.find("entity")(batch, maskers.budget(batch, 0.15), rng_of(batch))[:, 20:30].any()


def test_corruption_is_80_10_10():
    batch = plain_batch(rows=5000)
    mask = maskers.find("random")(batch, maskers.budget(batch, 0.5), rng_of(batch))
    plain = np.arange(10, 1000)
    ids = maskers.corrupt(batch.ids, mask, maskers.RowRandom(0, "corrupt", 0, batch.rows), 4, plain)
    assert (ids[~mask] == batch.ids[~mask]).all()
    n = mask.sum()
    for share, is_so in ((0.8, ids == 4), (0.1, (ids >= 10) & mask), (0.1, (ids == 7) & mask)):
        assert abs((is_so & mask).sum() / n - share) < 5 * np.sqrt(share * (1 - share) / n) + 1e-3


def test_random_numbers_are_uniform_and_unrelated():
    u = maskers.RowRandom(0, "mask", 0, np.arange(2000)).random((2000, 100))
    assert u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, 100, (0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 99 + 5 * np.sqrt(2 * 99)
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 0.01
    for other in (maskers.RowRandom(1, "mask", 0, np.arange(2000)), maskers.RowRandom(0, "corrupt", 0, np.arange(2000)),
                  maskers.RowRandom(0, "mask", 1, np.arange(2000))):
        assert abs(np.corrcoef(u.ravel(), other.random((2000, 100)).ravel())[0, 1]) < 0.01


def test_a_masker_from_a_file(tmp_path):
    (tmp_path / "mine.py").write_text("from __future__ import annotations\nfrom dataclasses import dataclass\nimport maskers\n"
                                      "@dataclass\nclass State:\n    seen: int = 0\n"
                                      "def rare(batch, k, rng, lm=None):\n    return maskers.pick(-batch.ids, batch, k)\n")
    batch = plain_batch(rows=3)
    batch.ids[:, 8] = 1
    assert maskers.find(f"{tmp_path}/mine.py:rare")(batch, np.array([1, 1, 1]), rng_of(batch))[:, 8].all()
    for name, said in ((f"{tmp_path}/mine.py:rars", "did you mean 'rare'"), (f"{tmp_path}/none.py:rare", "no such file"), ("rndom", "'random'")):
        with pytest.raises(UserError, match=said):
            maskers.find(name)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_words_of_every_tokenizer_family(kind, tmp_path):
    """Whole-word masking follows the tokenizer's own words: the characters masked in a text are whole words of it."""
    tok = fast_tokenizer(kind)
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS))
    data = data_prep.load(str(tmp_path / "corpus.txt"), tok)
    pieces = data_prep.blocks(data.corpus, data_prep.Specials.of(tok), 64)
    batch = data_prep.gather(pieces, np.arange(len(pieces)))
    mask = maskers.find("whole")(batch, maskers.budget(batch, 0.3), rng_of(batch))
    assert mask.any()
    for b in range(len(mask)):
        text = data.corpus.raw(pieces.row[b])
        hidden = np.zeros(len(text), bool)
        for t in np.flatnonzero(mask[b]):
            hidden[data.corpus.begin[batch.at[b, t]]:data.corpus.end[batch.at[b, t]]] = True
        at = 0
        for part in text.split(" "):
            letters = [i for i in range(at, at + len(part)) if part[i - at].isalpha()]
            if part.isalpha():
                assert hidden[letters].all() or not hidden[letters].any()
            at += len(part) + 1


def test_the_oracle_and_its_opposite_know_the_toy_words(tmp_path):
    tok = data_prep.load_tokenizer("tiny")
    data = data_prep.load("toycls", tok)
    pieces = data_prep.blocks(data.corpus, data_prep.Specials.of(tok), 64).take(np.arange(200))
    batch = data_prep.gather(pieces, np.arange(200))
    import toy
    table, k = toy.informative(), maskers.budget(batch, 0.05)
    assert table[batch.ids[maskers.find("oracle")(batch, k, rng_of(batch))]].all()
    assert not table[batch.ids[maskers.find("anti")(batch, k, rng_of(batch))]].any()


def test_entities_of_another_version_are_found_again(monkeypatch, tmp_path):
    (tmp_path / "c.txt").write_text("a line\n")
    found = iter(range(9))
    monkeypatch.setattr(data_prep, "find_entities", lambda split, model: np.full(len(split.ids), next(found), np.int32))
    for version, expected in (("3.8.0", 0), ("3.8.1", 1), ("3.8.0", 0)):
        corpus = data_prep.load(str(tmp_path / "c.txt"), fast_tokenizer("wordpiece")).corpus
        corpus.spacy_model = "some_model"
        monkeypatch.setattr("importlib.metadata.version", lambda name, version=version: version)
        assert (corpus.ent == expected).all()


@needs_shared
def test_entities_are_spacys_own(tmp_path):
    """Entity spans, computed on the raw text, cover exactly the characters that spaCy's own entities do."""
    import spacy
    texts = ["Barack Obama visited Berlin with Angela Merkel.", "Nothing here.", "The CEO of Apple, Tim Cook, lives in California."]
    (tmp_path / "corpus.txt").write_text("\n".join(texts))
    tok = data_prep.load_tokenizer(str(SHARED / "lm/minilm"))
    corpus = data_prep.load(str(tmp_path / "corpus.txt"), tok).corpus
    corpus.spacy_model = str(SHARED / "spacy/en_small")
    nlp = spacy.load(corpus.spacy_model)
    for i, text in enumerate(texts):
        ours, theirs = {}, [e.text.lower() for e in nlp(text).ents]
        for t in range(corpus.start[i], corpus.start[i + 1]):
            if corpus.ent[t] >= 0:
                lo, hi = ours.get(corpus.ent[t], (10**9, 0))
                ours[corpus.ent[t]] = min(lo, corpus.begin[t]), max(hi, corpus.end[t])
        assert [text[a:b].lower() for a, b in ours.values()] == theirs
    assert (corpus.ent >= 0).any()
