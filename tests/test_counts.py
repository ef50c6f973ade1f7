"""Each score against plain loops over a small data set; a score, as a masker, draws by its softmax."""
import itertools
import math
import random
import re
import string
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import ROOT, corpus_of, fast_tokenizer, load_splits, random_lm

import maskers
from maskers import FIRST, SCORES
from nmg import counts
from support.data import blocks, collate
from support.models import LMReader
from support.rng import RowRandom
from support.runs import UserError

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


def batch_of(split, max_len=64):
    pieces = blocks(split, max_len)
    return collate(pieces, np.arange(len(pieces)))


def check(name, batch, expected, lm=None, rtol=1e-6, **options):
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
    batch = batch_of(data.corpus)
    n = Counter(itertools.chain.from_iterable(texts_of(data.corpus)))
    check(name, batch, lambda b, column: sign * math.log(n[batch.input_ids[b, column]]))


@pytest.mark.parametrize("max_len", [64, 12])
def test_tfidf(max_len, data):
    """tf counts within a piece, df texts of the corpus."""
    batch, texts = batch_of(data.corpus, max_len), texts_of(data.corpus)

    def expected(b, column):
        token = batch.input_ids[b, column]
        tf = batch.input_ids[b].tolist().count(token)
        df = sum(token in text for text in texts)
        return math.log(tf * math.log((len(texts) + 1) / df))

    check("tfidf", batch, expected)


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


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_words_against_a_plain_loop(kind, tmp_path):
    """With a text that may have no tokens, special tokens, and words of several tokens."""
    texts = ["The Unbelievable cat", "\u200b", "[SEP] the CAT  sat[MASK]on [SEP]", "cat 7 unbelievable"]
    split = corpus_of(tmp_path, fast_tokenizer(kind), *texts)
    words, expected = counts.words_of(split), list(itertools.chain(*naive_words(split)))
    every = [word for word, _, _ in expected]
    assert every[:3] + every[-3:] == ["the", "unbelievable", "cat", "cat", "7", "unbelievable"]
    assert words.text == list(dict.fromkeys(every))
    assert words.count.tolist() == [every.count(word) for word in words.text]
    assert words.first_token.tolist() == [first for _, first, _ in expected]
    assert len(words.word_of_token) == len(split.input_ids) > len(every)
    for word, first, last in expected:
        assert {words.text[w] for w in words.word_of_token[first:last + 1]} == {word}


GENERAL = {"the": 900, "cat": 60, "unbelievable": 7, "sat": 40, "in": 500, ",": 400, "3": 20}


def test_difference_of_the_corpus_to_general_text(data, tmp_path):
    """A word that is not listed is as rare as the rarest that is; 0 where there is no letter."""
    file = tmp_path / "general.txt"
    file.write_text("".join(f"{word}\t{count}\n" for word, count in GENERAL.items()))
    batch, word_at, every = batch_of(data.corpus), {}, []
    for word, first, last in itertools.chain(*naive_words(data.corpus)):
        every.append(word)
        word_at |= dict.fromkeys(range(first, last + 1), word)

    def expected(b, column):
        word = word_at[batch.token_at[b, column]]
        if not re.search("[a-z]", word):
            return 0.0
        in_general = GENERAL.get(word, 7) / sum(GENERAL.values())
        return math.log(every.count(word) / len(every)) - math.log(in_general)

    check("difference", batch, expected, general=file)


def test_a_word_with_hyphens_is_as_rare_as_its_rarest_part(tmp_path, tok):
    """Unless it is listed itself; apostrophes are straight or not, accents composed or not."""
    listed = "Cat\t50\ncat\t10\nbig\t500\ndon\u2019t\t40\ncafe\u0301\t30\nrare\t1\n"
    (tmp_path / "general.txt").write_text(listed)
    split = corpus_of(tmp_path, tok, "big-cat don\u2019t cafe\u0301 zzz-cat")
    typical = counts.log_ratio_to_general(split, tmp_path / "general.txt")
    found = dict(zip(counts.words_of(split).text, typical, strict=True))
    for word, count in {"big-cat": 60, "don't": 40, "café": 30, "zzz-cat": 1}.items():
        assert found[word] == pytest.approx(math.log(1 / 4) - math.log(count / 631))


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
    batch = batch_of(corpus_of(tmp_path, fast_tokenizer("bpe"), *[SPACELESS[script]] * 3))
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


@pytest.mark.parametrize("seed", range(2))
def test_high_pmi_against_its_definition(seed):
    """Phrases of up to 6 words among single ones; word 99 has no letter."""
    phrases = [[20, 21], [20, 21, 3], [22, 23, 24], [22, 25, 26, 27, 28], [29] * 6, [1, 99, 2]]
    texts = texts_with([*phrases, [0], [1], [2], [3], [4]], seed)
    found = counts.high_pmi(texts, range(40))
    assert found == naive_high_pmi(texts, range(40))
    assert {(20, 21), (22, 23, 24), (22, 25, 26, 27, 28)} <= found


def test_units_are_collocations_from_left_to_right(tmp_path, tok):
    """The longest first, never across two texts; other words alone."""
    phrases = ["the cat sat on", "the cat sat", "big dogs", "dogs", "unbelievable measurements", "7 8"]
    phrases = [phrase.split() for phrase in [*phrases, *"abcdef"]]
    texts = [" ".join(text) for text in texts_with(phrases, 0)]
    texts += ["a the cat", "sat on big", "dogs 7 8 unbelievable"]
    split = corpus_of(tmp_path, tok, texts[0], "\u200b", *texts[1:])
    kept = naive_high_pmi([text.split() for text in texts], set(" ".join(texts).split()) - {"7", "8"})
    assert {("big", "dogs"), ("the", "cat", "sat", "on"), ("unbelievable", "measurements")} <= kept
    expected, unit = [], 0
    for text in naive_words(split):
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
    batch = collate(pieces, np.arange(len(pieces)))
    check("label", batch, lambda b, column: information(ids, labels, 3, batch.input_ids[b, column]))
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
    batch = batch_of(split)
    check("label", batch, lambda b, column: information(ids, labels, 2, batch.input_ids[b, column]))


def test_brackets_are_not_masked(data):
    """By a masker in a file of its own, where there are enough other tokens."""
    split = data["train"]
    batch = batch_of(split)
    expected = np.zeros_like(batch.maskable)
    for b, column in np.argwhere(batch.maskable).tolist():
        t = batch.token_at[b, column]
        token = split.text(batch.text_ids[b])[split.char_begin[t]:split.char_end[t]]
        expected[b, column] = token not in ("<", ">", "[", "]")
    masker = maskers.find(f"{ROOT}/dev/no_brackets.py:no_brackets")
    mask = masker(batch, expected.sum(1), RowRandom(0, "mask", 0, batch.indices))
    np.testing.assert_array_equal(mask, expected)


def test_subwords_are_second_and_later_tokens_of_words(data, tok):
    batch = batch_of(data.corpus, 128)

    def expected(b, column):
        before, token = tok.convert_ids_to_tokens(batch.input_ids[b, column - 1:column + 1].tolist())
        return FIRST * (token.startswith("##") or token == "'" or before == "'")

    check("subword", batch, expected)


@pytest.mark.parametrize("name", ["loss", "entropy"])
def test_loss_and_entropy_are_those_of_the_lm_at_the_token_itself(name, data, tok):
    """Against Hugging Face's own logits of each piece alone."""
    model = random_lm("bert", len(tok)).eval()
    # Logits so wide that entropies differ.
    torch.nn.init.constant_(model.cls.predictions.transform.LayerNorm.weight, 20.0)
    lm = LMReader(model)
    pieces = blocks(data.corpus, 40)
    batch = collate(pieces, np.arange(len(pieces)))
    expected = np.zeros(batch.input_ids.shape)
    for b, n in enumerate(pieces.length):
        ids = torch.from_numpy(batch.input_ids[b, None, :n].astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=ids.to(model.device)).logits[0].cpu()
        nats = {"loss": torch.nn.functional.cross_entropy(logits, ids[0], reduction="none"),
                "entropy": torch.distributions.Categorical(logits=logits).entropy()}
        expected[b, :n] = (nats[name] + 1e-3).log()
    check(name, batch, lambda b, column: expected[b, column], lm, rtol=1e-4)
    if name == "loss":
        np.testing.assert_array_equal(SCORES["easy"](batch, lm), -SCORES["loss"](batch, lm))


