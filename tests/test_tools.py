"""The tools: what the page of masks shows, and the comparison in the toy world."""
import json
import re
import sys
from collections import Counter
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import spacy
from conftest import call, squad, succeed, write_rows
from scipy import stats

import data_prep
import maskers
import pretrain
from nmg.policies import PaperPolicy, random_policy
from support import models, runs, toy
from support.data import Pieces, blocks
from tools import show_masks, toy_compare

# ---------------------------------------------------------------- show_masks

HOSTILE = ["</script><img src=x onerror=alert(1)> on the <b>mat</b> & \"dogs\" don't",
           "<!--<script>alert(1)</script> \u2028 😀 big\r\n\t cats\u202e  ]]>"]


@pytest.fixture
def policy(tmp_path):
    random_policy(32, 0, "test").save(tmp_path / "policy")
    return f"nmg:{tmp_path / 'policy'}"


@pytest.fixture
def pipeline(tmp_path):
    """A spaCy pipeline that tells parts of speech by rule: no model is needed."""
    nlp = spacy.blank("en")
    ruler = nlp.add_pipe("attribute_ruler")
    ruler.add([[{"IS_ALPHA": False}]], {"POS": "X"})
    ruler.add([[{"IS_ALPHA": True}]], {"POS": "NOUN"})
    words = {"DET": "the", "ADP": "on into", "VERB": "sat bark purr purred", "ADJ": "big", "PRON": "they",
             "PUNCT": ", ; ! . ( )"}
    for tag, some in words.items():
        ruler.add([[{"LOWER": {"IN": some.split()}}]], {"POS": tag})
    nlp.to_disk(tmp_path / "rules")
    return tmp_path / "rules"


def show(dataset: Path, lm: Path, out: Path, **flags: object) -> list[SimpleNamespace]:
    """Runs show_masks, and returns the contexts of its page: name, questions, and for every masker the
    characters of the text and whether they are marked."""
    show_masks.main(show_masks.Config(dataset=str(dataset), lm=str(lm), out=str(out), **flags))
    contexts = []
    for part in (out / "masks.html").read_bytes().decode().split("<h2>")[1:]:
        shown = {}
        for masker, html in re.findall("<dt>(.*?)</dt><dd dir=auto>(.*?)</dd>", part, re.DOTALL):
            shown[unescape(masker)] = []
            for i, piece in enumerate(re.split("</?mark>", html)):
                shown[unescape(masker)] += [(character, i % 2 == 1) for character in unescape(piece)]
        questions = re.findall("<p>(.*?)</p>", part, re.DOTALL)
        contexts.append(SimpleNamespace(name=part.partition("<")[0], questions=[*map(unescape, questions)],
                                        shown=shown))
    return contexts


def text_of(shown: list) -> str:
    return "".join(character for character, _ in shown)


def corpus_blocks(dataset: Path, lm: Path) -> Pieces:
    return blocks(data_prep.load(str(dataset), models.load_tokenizer(str(lm))).corpus, 66)


def test_masks_are_those_of_pretraining(qa_folder, lm_folder, policy, tmp_path):
    """The characters of their tokens, block by block."""
    names = ["punct", policy, "whole"]
    contexts = show(qa_folder, lm_folder, tmp_path / "out", maskers=",".join(names), p=0.2, contexts=7,
                    seed=3)
    assert len(contexts) == 7
    pieces = corpus_blocks(qa_folder, lm_folder)
    lm = models.LMReader(models.load_lm(str(lm_folder)))
    most_blocks = 0
    for context in contexts:
        i = int(re.match(r"text (\d+)", context.name)[1])
        assert list(context.shown) == names
        in_text = np.flatnonzero(pieces.text_ids == i)
        most_blocks = max(most_blocks, len(in_text))
        for name, shown in context.shown.items():
            assert text_of(shown) == pieces.split.text(i)
            expected = np.zeros(len(shown), bool)
            for block in in_text:
                one = np.array([block])
                batch, mask, _ = pretrain.mask_batch(pieces, maskers.find(name), 0.2, 3, 0, one, lm)
                for token in batch.token_at[mask]:
                    expected[pieces.split.char_begin[token]:pieces.split.char_end[token]] = True
            assert [marked for _, marked in shown] == expected.tolist() and expected.any()
    assert most_blocks > 1


def test_a_hostile_text_stays_a_text(lm_folder, tmp_path):
    """As a context, a question and an answer."""
    data = squad(HOSTILE, HOSTILE)
    for paragraph, text in zip(data["data"][0]["paragraphs"], HOSTILE, strict=True):
        paragraph["qas"][0]["question"] = text
    (tmp_path / "qa.json").write_text(json.dumps(data))
    contexts = show(tmp_path / "qa.json", lm_folder, tmp_path / "out", split="train")
    tags = set(re.findall(r"<(\w+)", (tmp_path / "out/masks.html").read_text()))
    assert tags == {"meta", "title", "style", "h1", "p", "h2", "dl", "dt", "dd", "mark"}
    assert len(contexts) == len(HOSTILE)
    for context in contexts:
        for characters in context.shown.values():
            text = text_of(characters)
            assert text in HOSTILE and context.questions == [f"{text} → {text}"]


def test_parts_of_speech_against_a_naive_count(lm_folder, policy, pipeline, tmp_path, capsys):
    sentence = "The cat sat on the mat, and purred; they don't  purr {}!\nDogs (big ones) bark into pieces."
    texts = [sentence.format(i) for i in range(9)]
    # Several blocks, one of which ends within "don't".
    texts.append("  " + " ".join(texts))
    folder = write_rows(tmp_path / "data/corpus.jsonl", [{"text": text} for text in texts]).parent
    show(folder, lm_folder, tmp_path / "out", maskers=f"random,{policy}", p=0.3, contexts=10, seed=1,
         spacy_model=str(pipeline))
    printed = capsys.readouterr().out

    pieces, nlp = corpus_blocks(folder, lm_folder), spacy.load(pipeline)
    tokenizer = models.load_tokenizer(str(lm_folder))
    lm = models.LMReader(models.load_lm(str(lm_folder)))
    assert len(pieces) > len(texts)
    counts = {}
    for name, masker, p in (("random", "random", 0.3), (policy, policy, 0.3), ("in the text", "random", 1.0)):
        counts[name] = Counter()
        for block, i in enumerate(pieces.text_ids):
            one = np.array([block])
            batch, mask, _ = pretrain.mask_batch(pieces, maskers.find(masker), p, 1, 0, one, lm)
            doc = nlp(texts[i])
            encoded = tokenizer(texts[i], return_offsets_mapping=True, add_special_tokens=False)
            for token in batch.token_at[mask] - pieces.split.token_start[i]:
                end = encoded["offset_mapping"][token][1]
                [word] = [w for w in doc if w.idx < end <= w.idx + len(w.text)]
                counts[name][word.pos_] += 1
    assert counts["random"] != counts[policy]

    top = [tag for tag, _ in (counts["random"] + counts[policy]).most_common(6)]
    for name, count in counts.items():
        total = count.total()
        count["other"] = sum(n for tag, n in count.items() if tag not in top)
        [line] = [line for line in printed.splitlines() if line.startswith(f"{name} ") and "NOUN" in line]
        expected = [f"{tag} {100 * count[tag] / total:.1f} %" for tag in (*top, "other")]
        assert line.removeprefix(name).strip().split("  ") == expected
    assert (tmp_path / "out" / "parts_of_speech.png").exists()


def test_the_tokens_that_are_masked_most():
    """Against counting by hand: the ten that are masked most beyond chance, or fewer, where fewer are masked
    more often than all. Tokens 0 to 40, of which 40 is too rare."""
    rng = np.random.default_rng(0)
    ids = np.append(rng.integers(0, 40, 2000), [40] * 9)
    split = SimpleNamespace(input_ids=ids, token_start=np.array([0, 300, 2009]),
                            special=SimpleNamespace(vocabulary_size=41))
    for possible in (ids >= 0, ids <= 7):
        masked = possible & (rng.random(len(ids)) < 0.1 + 0.8 * (ids == 7))
        beyond = {}
        for token in range(40):
            expected = masked.sum() * (ids == token).sum() / len(ids)
            beyond[token] = (masked[ids == token].sum() - expected) / np.sqrt(expected)
        by_hand = [token for token in sorted(beyond, key=beyond.get)[::-1] if beyond[token] > 0]
        found = show_masks.most_masked(split, np.array([0, 1]), masked)
        assert [token for token, _ in found] == by_hand[:10] and found[0][0] == 7
        assert dict(found)[7] == masked[ids == 7].mean()
    assert len(found) < 10


def test_preferences_are_differences_within_documents():
    """By loops; a document in which nothing is masked does not count."""
    rng = np.random.default_rng(0)
    index = np.arange(3, 43)
    features = pd.DataFrame({"a": rng.normal(size=40), "b": rng.normal(size=40)}, index)
    doc = pd.Series(np.repeat([5, 6, 7, 8], 10), index)
    masked = np.zeros(60, bool)
    masked[[4, 7, 14, 24, 25, 30]] = True
    table = show_masks.preferences(features, doc, masked)
    for name in ("a", "b"):
        d = []
        for number in (5, 6, 7):
            tokens = [i for i in index if doc[i] == number]
            of_masked = np.mean([features.loc[i, name] for i in tokens if masked[i]])
            d.append(of_masked - np.mean([features.loc[i, name] for i in tokens]))
        half = stats.t.ppf(0.975, 2) * np.std(d, ddof=1) / np.sqrt(3)
        expected = [np.mean(d), np.mean(d) - half, np.mean(d) + half]
        np.testing.assert_allclose(table.loc[name].to_numpy(), expected)
    assert table["masked minus text"].is_monotonic_decreasing


def test_show_masks_on_the_toy_world(lm_folder, tmp_path):
    """`punct` masks one mark in each text, and nothing is more of a mark. Scores are standardized."""
    result = succeed("tools/show_masks.py", "--maskers=none,punct", "--out=o", cwd=tmp_path)
    assert {file.name for file in (tmp_path / "o").iterdir()} == {"masks.html", "preferences.csv"}
    table = pd.read_csv(tmp_path / "o/preferences.csv").set_index(["masker", "feature"])
    assert set(table.index.get_level_values("masker")) == {"punct"}
    mean, low, high = table.loc["punct", "punct"]
    assert f"punct        {mean:+.2f} ({low:+.2f} to {high:+.2f})" in result.stdout
    assert mean == table["masked minus text"].max() > 1
    # A standardized indicator of the share q is sqrt((1 - q) / q) at a mark; two of nine tokens are marks.
    q = 1 / (1 + mean**2)
    assert q == pytest.approx(2 / 9, abs=0.01)
    result = call("tools/show_masks.py", "--maskers=oracle", f"--lm={lm_folder}", cwd=tmp_path)
    assert result.returncode == 2 and "toy world only" in result.stderr


# ---------------------------------------------------------------- toy_compare

@pytest.mark.slow
def test_the_oracle_beats_no_masking_by_far(tmp_path, monkeypatch):
    """After one epoch. And pretrain.py and finetune_cls.py, with their defaults, give the same score."""
    monkeypatch.setitem(toy.PRETRAIN, "epochs", 1)
    result = succeed("tools/toy_compare.py", "--maskers=none,oracle", "--out=toy.png", cwd=tmp_path)
    score = dict(re.findall(r"seed 0  (\w+) +([\d.]+)", result.stdout))
    assert float(score["oracle"]) > float(score["none"]) + 20
    assert re.search(r"oracle .* 100\n", result.stdout)
    succeed("pretrain.py", "--masker=oracle", "--out=o", "--fast=False", cwd=tmp_path)
    succeed("finetune_cls.py", "--lm=o", "--fast=False", cwd=tmp_path)
    row, = runs.read_rows(tmp_path / "results.jsonl")
    assert f"{row['accuracy']:.2f}" == score["oracle"]


def test_what_nmg_learned_is_compared_by_seed(tmp_path, monkeypatch):
    """Drawn and greedy, between random masks and the oracle; then what each seed learned, in a sentence."""
    for seed in (7, 8):
        folder = tmp_path / f"runs/nmg-toycls-tiny-{seed}"
        PaperPolicy(128).save(folder)
        runs.write_rows(folder / "metrics.jsonl", seed * [{"learner_score": 0.5, "random_score": 0.1}])
    points = {"random": 0, "sampled": 1, "nmg": 2, "oracle": 3}
    monkeypatch.setattr(toy_compare, "score_on_test",
                        lambda data, masker, seed: seed + points[masker.partition(":")[0]])
    monkeypatch.setattr(toy_compare, "shares_of_kinds",
                        lambda data, masker: np.array([60, 10, 10, 10, 10, 0, 0, 0, 0]))
    result = succeed("tools/toy_compare.py", "--seed=7", "--seeds=2", "--out=toy.png", cwd=tmp_path)
    table = result.stdout.split("among the masked, %\n")[1]
    # The mean, each seed, and their shares of informative words.
    for name, cells in (("random", "7.50 7.00 8.00 60 60"), ("NMG, drawn", "8.50 8.00 9.00 60 60"),
                        ("NMG, greedy", "9.50 9.00 10.00 60 60"), ("oracle", "10.50 10.00 11.00 60 60")):
        assert f"{name} {cells}\n" in re.sub(" +", " ", table)
    for seed in (7, 8):
        assert f"seed {seed}: the learner won {seed}, lost 0, tied 0 against random" in table
    assert table.count("It masks attributes 60 % of the time; they are 11 % of the text.") == 2
    assert (tmp_path / "toy.png").exists()


# ---------------------------------------------------------------- general_words

def test_words_of_wordfreq_are_counted_among_a_billion(tmp_path, monkeypatch):
    frequency = {"die": 0.0398, "00": 0.002, "straße": 1.234e-7, "selten": 1.02e-8}
    fake = SimpleNamespace(top_n_list=lambda language, n: {"de": list(frequency)}[language][:n],
                           word_frequency=lambda word, language: {"de": frequency}[language][word])
    monkeypatch.setitem(sys.modules, "wordfreq", fake)
    succeed("tools/general_words.py", "--language=de", "--words=3", cwd=tmp_path)
    assert (tmp_path / "general_words.txt").read_text("utf-8") == "die\t39800000\nstraße\t123\n"


