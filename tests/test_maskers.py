"""Each masker against the contract, property-based; what makes each strategy itself; corruption; random
numbers; the policy network."""
import functools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import same
from hypothesis import given, settings
from hypothesis import strategies as st

import data_prep
import maskers
from maskers import SCORES
from nmg import counts, policies
from nmg.policies import LinearPolicy, PaperPolicy, load_policy, random_policy, sharpened, standardized
from support import models, runs, toy
from support.data import Batch, blocks, collate
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
    assert (SCORES["in_entity"](batch) == maskers.FIRST * is_name).all()


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


def test_the_papers_network_has_its_size_and_starts_from_small_weights_and_no_biases():
    torch.manual_seed(0)
    policy = PaperPolicy(768)
    assert sum(weight.numel() for weight in policy.parameters()) == 2_561_026
    for name, weight in policy.named_parameters():
        if name == "norm.weight":
            assert (weight == 1).all()
        elif name.endswith("bias"):
            assert (weight == 0).all()
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.2)
            assert abs(weight.mean().item()) < 0.005


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
