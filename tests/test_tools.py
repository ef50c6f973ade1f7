"""The tools (tests of tools/study.py have a file of their own); the embedded world: its texts and its LM."""
import json
import re
import subprocess
import sys
from collections import Counter
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import spacy
import torch
from conftest import ROOT, call, refused, squad, succeed, write_rows
from scipy import stats

import data_prep
import maskers
import pretrain
import train_nmg
from nmg.plays import Episode, Play, checksum_of_plays, file_of, save_episode
from nmg.policies import PaperPolicy, load_policy, random_policy
from support import models, plots, runs, toy
from support.data import blocks
from tools import figures, foretell, make_tiny, show_masks, toy_compare

# ---------------------------------------------------------------- show_masks

@pytest.fixture
def policy(tmp_path):
    random_policy(32, 0, "test").save(tmp_path / "policy")
    return f"nmg:{tmp_path / 'policy'}"


def show(dataset: Path, lm: Path, out: Path, **flags: object) -> list[SimpleNamespace]:
    """The contexts of its page: name, questions, and for each masker the text and which of it is marked."""
    show_masks.main(show_masks.Config(dataset=str(dataset), lm=str(lm), out=str(out), **flags))
    contexts = []
    for part in (out / "masks.html").read_bytes().decode().split("<h2>")[1:]:
        shown = {}
        for masker, html in re.findall("<dt>(.*?)</dt><dd dir=auto>(.*?)</dd>", part, re.DOTALL):
            # Every second piece is marked.
            pieces = [unescape(piece) for piece in re.split("</?mark>", html)]
            marked = np.repeat(np.arange(len(pieces)) % 2 == 1, [len(piece) for piece in pieces])
            shown[unescape(masker)] = "".join(pieces), marked
        questions = re.findall("<p>(.*?)</p>", part, re.DOTALL)
        contexts.append(SimpleNamespace(name=part.partition("<")[0], questions=[*map(unescape, questions)],
                                        shown=shown))
    return contexts


def test_masks_are_those_of_pretraining(qa_folder, lm_folder, policy, tmp_path):
    """The characters of their tokens, block by block."""
    names = ["punct", policy, "whole"]
    contexts = show(qa_folder, lm_folder, tmp_path / "out", maskers=",".join(names), p=0.2, contexts=7,
                    seed=3)
    assert len(contexts) == 7
    tokenizer = models.load_tokenizer(str(lm_folder))
    pieces = blocks(data_prep.load(str(qa_folder), tokenizer).corpus, 66)
    lm = models.LMReader(models.load_lm(str(lm_folder)))
    most_blocks = 0
    for context in contexts:
        i = int(re.match(r"text (\d+)", context.name)[1])
        assert list(context.shown) == names
        in_text = np.flatnonzero(pieces.text_ids == i)
        most_blocks = max(most_blocks, len(in_text))
        for name, (text, marked) in context.shown.items():
            assert text == pieces.split.text(i)
            expected = np.zeros(len(text), bool)
            for block in in_text:
                one = np.array([block])
                batch, mask, _ = pretrain.mask_batch(pieces, maskers.find(name), 0.2, 3, 0, one, lm)
                for token in batch.token_at[mask]:
                    expected[pieces.split.char_begin[token]:pieces.split.char_end[token]] = True
            assert marked.tolist() == expected.tolist() and expected.any()
    assert most_blocks > 1


def test_a_hostile_text_stays_a_text(lm_folder, tmp_path):
    """As a context, a question and an answer."""
    hostile = ["</script><img src=x onerror=alert(1)> on the <b>mat</b> & \"dogs\" don't",
               "<!--<script>alert(1)</script> \u2028 😀 big\r\n\t cats\u202e  ]]>"]
    data = squad(hostile, hostile)
    for paragraph, text in zip(data["data"][0]["paragraphs"], hostile, strict=True):
        paragraph["qas"][0]["question"] = text
    (tmp_path / "qa.json").write_text(json.dumps(data))
    contexts = show(tmp_path / "qa.json", lm_folder, tmp_path / "out", split="train")
    tags = set(re.findall(r"<(\w+)", (tmp_path / "out/masks.html").read_text()))
    assert tags == {"meta", "title", "style", "h1", "p", "h2", "dl", "dt", "dd", "mark"}
    assert len(contexts) == len(hostile)
    for context in contexts:
        for text, _ in context.shown.values():
            assert text in hostile and context.questions == [f"{text} → {text}"]


def test_parts_of_speech_against_a_naive_count(lm_folder, policy, tmp_path, capsys):
    # Parts of speech by rule: no model is needed.
    nlp = spacy.blank("en")
    ruler = nlp.add_pipe("attribute_ruler")
    words = {"DET": "the", "ADP": "on into", "VERB": "sat bark purr purred", "ADJ": "big", "PRON": "they",
             "PUNCT": ", ; ! . ( )", "NOUN": "cat mat dogs ones pieces", "X": "and do n't 0 1 2 3 4 5 6 7 8"}
    for tag, some in words.items():
        ruler.add([[{"LOWER": {"IN": some.split()}}]], {"POS": tag})
    nlp.to_disk(tmp_path / "rules")

    sentence = "The cat sat on the mat, and purred; they don't  purr {}!\nDogs (big ones) bark into pieces."
    texts = [sentence.format(i) for i in range(9)]
    # Several blocks, one of which ends within "don't".
    texts.append("  " + " ".join(texts))
    folder = write_rows(tmp_path / "data/corpus.jsonl", [{"text": text} for text in texts]).parent
    show(folder, lm_folder, tmp_path / "out", maskers=f"random,{policy}", p=0.3, contexts=10, seed=1,
         spacy_model=str(tmp_path / "rules"))
    printed = capsys.readouterr().out

    tokenizer = models.load_tokenizer(str(lm_folder))
    pieces = blocks(data_prep.load(str(folder), tokenizer).corpus, 66)
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
    """The ten tokens that are masked most beyond chance, or fewer if fewer are. Token 40 is too rare."""
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
    assert 1 / (1 + mean**2) == pytest.approx(2 / 9, abs=0.01)
    refused("toy world only", "tools/show_masks.py", "--maskers=oracle", f"--lm={lm_folder}", cwd=tmp_path)


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


# ---------------------------------------------------------------- foretell

def an_episode(rng, N=5, L=8):
    """Random contexts, three plays with scores, and states in which every token may be masked."""
    every = np.ones((N, L), bool)
    plays = {name: Play(rng.random((N, L)) < 0.4, 0.0, {"em": float(rng.normal())}) for name in "abc"}
    states = [(torch.randn(L, 8).half(), torch.ones(L, dtype=torch.bool)) for _ in range(N)]
    return Episode(rng.integers(5, 40, (N, L)), every, every, plays), states


def test_what_is_foretold():
    """The correlation, over all plays, of score and liking, each minus its mean in the episode. A play is
    liked for the mean logit of what it masks, also clipped from above, or for how much of it is among the
    highest tenth of a block."""
    torch.manual_seed(0)
    rng, policy = np.random.default_rng(0), PaperPolicy(8)
    policy.clip = 0.5
    played = [an_episode(rng) for _ in range(4)]
    plays = []
    for number, (episode, states) in enumerate(played):
        rows = []
        for hidden, maskable in states:
            row = policy(hidden[None].float(), maskable[None], maskable[None])[0].detach().numpy()
            rows.append((row - row.mean()) / row.std())
        for play in episode.plays.values():
            liked = []
            for b, t in np.argwhere(play.mask):
                is_high = sum(rows[b] > rows[b][t]) < 0.1 * len(rows[b])
                liked.append([rows[b][t], min(rows[b][t], 0.5), is_high])
            plays.append([number, play.scores["em"], *np.mean(liked, 0)])
    ways = ["all words", "all, clipped", "highest tenth"]
    table = pd.DataFrame(plays, columns=["episode", "score", *ways]).set_index("episode")
    within = table - table.groupby("episode").mean()
    expected = within.corr()["score"][ways].to_dict()
    assert foretell.foretold(policy, played, ["em"])["em"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.usefixtures("one_thread")
def test_a_policy_of_several_runs_foretells_another():
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    played = {}
    for run in "abc":
        played[run] = [an_episode(rng, N=2) for _ in range(3)]
    cfg = foretell.Config(metric="em", judged_by="em")
    rows = [*foretell.judged(["a", "b"], ["c"], played, 8, cfg)]
    agents = train_nmg.Agents(8, cfg)
    for episode, states in played["a"] + played["b"]:
        agents.learn(episode, states)
    expected = foretell.foretold(agents.policy, played["c"], ["em"])["em"]
    assert {row["way"]: row["r"] for row in rows} == expected
    assert {(row["source"], row["target"]) for row in rows} == {("a,b", "c")}


def test_the_table_of_what_is_foretold(tmp_path):
    """Where the score of a play is how many tokens of one kind it masked, each run foretells the other."""
    rng = np.random.default_rng(1)
    for run in ("a", "b", "c"):
        for number in range(1, 5):
            episode, _ = an_episode(rng, 30, 12)
            for play in episode.plays.values():
                # Each player prefers tokens above or below some id.
                cut = rng.integers(8, 36)
                play.mask[:] = (episode.input_ids < cut) & (rng.random(play.mask.shape) < 0.5)
                play.scores["em"] = float((episode.input_ids[play.mask] < 15).mean())
                play.scores["wrong"] = -play.scores["em"]
            save_episode(file_of(tmp_path / run, number), episode, {})

    def rows_of(*flags):
        result = succeed("tools/foretell.py", "--metric=em", *flags, cwd=tmp_path)
        return pd.DataFrame(runs.read_rows(tmp_path / "runs/foretell.jsonl")), result.stdout

    rows, said = rows_of("--plays=a,b")
    r = rows["r"][rows["way"] == "all words"]
    assert len(rows) == 6 and min(r) > 0.5
    # The mean, then each pair of runs.
    printed = re.search("em +all words +(.*)", said)[1].split()
    assert [float(number) for number in printed] == pytest.approx([r.mean(), *r], abs=0.006)
    # Two runs as one, which is learned from and foretold as a whole; and another score than the reward.
    rows, _ = rows_of("--plays=a+b,c", "--judged_by=em,wrong,em")
    assert {*zip(rows["source"], rows["target"], strict=True)} == {("a+b", "c"), ("c", "a+b")}
    of_score = rows[rows["way"] == "all words"].groupby("judged_by")["r"].mean()
    assert of_score["em"] == pytest.approx(-of_score["wrong"], abs=0.001)
    assert of_score["em"] > 0.5
    # Each run is foretold by all others together.
    rows, _ = rows_of("--plays=a,b,c", "--joined")
    pairs = {*zip(rows["source"], rows["target"], strict=True)}
    assert pairs == {("b,c", "a"), ("a,c", "b"), ("a,b", "c")}
    # No run is judged by plays that it has learned from.
    refused("plays that are in another of these folders", "tools/foretell.py", "--metric=em", "--plays=a,b+a",
            cwd=tmp_path)


# ---------------------------------------------------------------- figures

def tables(text: str) -> set[tuple[str, str]]:
    """The rows of all Markdown tables of a text, each with the first line of its table."""
    rows = set()
    for paragraph in text.split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line.startswith("|")]
        rows |= {(lines[0], line) for line in lines[2:]}
    return rows


def test_the_pages_show_what_lies_in_results(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    figures.main(figures.Config(pictures=str(tmp_path)))
    printed = tables(capsys.readouterr().out)
    heads = {head for head, _ in printed}
    shown = set()
    for page in ("README.md", "docs/learning.md", "docs/comparisons.md"):
        shown |= {row for row in tables((ROOT / page).read_text("utf-8")) if row[0] in heads}
    assert len(heads) == 3 and shown == printed
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("gain", "masks", "toy"))
    # Under another name, such as that of results, nothing is written.
    with pytest.raises(runs.UserError, match=r"gain\.jsonl: is a picture, and must end with"):
        plots.save(plots.figure(1, 1), tmp_path / "gain.jsonl")


def test_a_comparison_is_of_pairs_of_seeds(tmp_path):
    """Two maskers of a seed are averaged; a seed without random masks is left out."""
    scores = {0: (50, 52, 54), 1: (60, 61, 61), 2: (40, 42, 44)}
    lines = [{"masker": "sampled:a", "seed": 3, "accuracy": 99}]
    for seed, found in scores.items():
        for masker, score in zip(("random", "sampled:a", "sampled:b"), found, strict=True):
            lines.append({"masker": masker, "seed": seed, "accuracy": score})
    runs.write_rows(tmp_path / "plays.jsonl", lines)
    row = {"what": "ours", "plays": ["plays.jsonl"], "masks": "sampled:.*"}
    plays = figures.plays_of(row, tmp_path)
    found = figures.compared(row, plays, "accuracy")
    # The differences are 3, 1, 3: their standard error is 2/3, and t(2) at .975 is 4.303.
    assert found["seeds"] == 3 and found["difference"] == pytest.approx(7 / 3)
    assert found["high"] - found["difference"] == pytest.approx(4.302653 * 2 / 3)
    assert found["better"] == 3

    with pytest.raises(runs.UserError, match=r"no such masker.*random"):
        figures.compared(row | {"masks": "nmg"}, plays, "accuracy")
    with pytest.raises(runs.UserError, match=r"plays=no\.jsonl: no such file"):
        figures.plays_of(row | {"plays": ["no.jsonl"]}, tmp_path)


def test_the_policies_that_are_kept_were_learned_from_the_plays_that_are_kept():
    folders = sorted((ROOT / "results/policies").iterdir())
    assert len(folders) >= 3
    for folder in folders:
        assert load_policy(folder).hidden_size == 384, folder
        settings = runs.read_run(folder)["settings"]
        plays = [checksum_of_plays(ROOT / name) for name in settings["plays"].split(",")]
        assert settings["plays_checksum"] == plays and settings["episodes"] == 0


# ---------------------------------------------------------------- linear

def test_a_linear_row_beside_those_of_the_lm(cls_folder, tmp_path):
    """On the same examples, with the same fields, and first in the table."""
    for script in ("finetune_cls.py", "tools/linear.py"):
        succeed(script, f"--dataset={cls_folder}", "--epochs=1", "--save_model=False", cwd=tmp_path)
    of_lm, linear = runs.read_rows(tmp_path / "results.jsonl")
    assert linear.keys() == of_lm.keys() and (linear["row"], linear["masker"]) == ("linear", "none")
    assert linear["config"]["data"] == of_lm["config"]["data"] and linear["accuracy"] == 100
    lines = [runs.read_rows(tmp_path / row["predictions"]) for row in (of_lm, linear)]
    assert [line["gold"] for line in lines[0]] == [line["gold"] for line in lines[1]]
    assert lines[0][0].keys() == lines[1][0].keys()
    table = call("report.py", cwd=tmp_path).stdout
    assert 0 < table.index("| linear | 100.00 |") < table.index("| none |")


def test_few_labels_are_drawn_by_seed(cls_folder, tmp_path):
    """Also where a class has none: the likelihood is a number. Once as run_all.sh starts it, by its path."""
    likelihoods = []
    for seed, out in ((0, "by its path"), (0, "b"), (3, "c")):
        flags = [f"--dataset={cls_folder}", "--labelled=3", f"--seed={seed}", f"--out={out}"]
        if out == "by its path":
            subprocess.run([sys.executable, ROOT / "tools/linear.py", *flags], cwd=tmp_path, check=True)
        else:
            succeed("tools/linear.py", *flags, cwd=tmp_path)
        lines = runs.read_rows(tmp_path / out / "predictions.jsonl")
        likelihoods.append([line["likelihood"] for line in lines])
    assert np.isfinite(likelihoods).all()
    assert likelihoods[0] == likelihoods[1] != likelihoods[2]


# ---------------------------------------------------------------- the embedded world, and make_tiny

def words_of(text):
    return re.findall(r"\w+", text)


@pytest.mark.parametrize("task", toy.TASKS)
def test_no_name_is_in_two_splits_and_only_the_corpus_tells_its_class(task):
    world = toy.TASKS[task]()
    new = {*toy.NAMES[0][:toy.N_TASK], *toy.NAMES[1][:toy.N_TASK]}
    docs, names = {}, {}
    for split, records in world.items():
        docs[split] = {record["doc"] for record in records}
        names[split] = new & set(words_of(" ".join(record["text"] for record in records)))
    assert docs["train"] | docs["dev"] | docs["test"] == docs["corpus"]
    assert len(docs["train"]) + len(docs["dev"]) + len(docs["test"]) == len(docs["corpus"])
    assert not names["train"] & names["test"] and names["test"] <= names["corpus"] == new
    # Labelled texts tell nothing but a name: of which class it is, the LM must know from the corpus.
    for record in world["train"] + world["dev"] + world["test"]:
        words = set(words_of(record["text"]))
        assert not words & set(toy.ALL_ATTRIBUTES + toy.NAMES[1]) and words & set(toy.NAMES[0])
    # It is the same everywhere.
    assert toy.TASKS[task]() == world


def test_a_context_holds_a_name_and_an_attribute_of_each_family():
    """Side by side, and of one class; names and attributes of both families are equally frequent."""
    corpus, count = toy.classification()["corpus"], Counter()
    for record in corpus:
        words = words_of(record["text"])
        count.update(words)
        for names, attributes in zip(toy.NAMES, toy.ATTRIBUTES, strict=True):
            [name] = set(words) & set(names)
            attribute = words[words.index(name) + 1]
            assert [attribute] == [word for word in words if word in attributes]
            assert attributes.index(attribute) % 3 == names.index(name) % 3
    for names, attributes in zip(toy.NAMES, toy.ATTRIBUTES, strict=True):
        assert {count[name] for name in names[:toy.N_TASK]} == {16}
        assert sum(count[attribute] for attribute in attributes) == len(corpus)


def test_labels_and_answers_are_the_names_own():
    for record in toy.classification()["test"]:
        [name] = set(words_of(record["text"])) & set(toy.NAMES[0])
        assert record["label"] == toy.CLASSES[toy.NAMES[0].index(name) % 3]
    for record in toy.question_answering()["test"]:
        assert len({qa["question"] for qa in record["qas"]}) == 3
        for qa in record["qas"]:
            attribute, [answer] = words_of(qa["question"])[-1], qa["answers"]
            assert record["text"][answer["start"]:].startswith(answer["text"])
            assert toy.NAMES[0].index(answer["text"]) % 3 == toy.ATTRIBUTES[0].index(attribute) % 3


def test_the_lm_has_seen_no_name_of_a_task():
    text = toy.general_text()
    assert text[:9] == toy.general_text()[:9] != toy.general_text(1)[:9]
    words = set(words_of(" ".join(text)))
    for names in toy.NAMES:
        assert not words & set(names[:toy.N_TASK]) and words >= set(names[toy.N_TASK:])
    assert words >= set(toy.ALL_ATTRIBUTES + toy.ALL_FILLERS)


def test_the_kinds_are_equally_frequent():
    """So whoever prefers any one kind masks the informative words no more often than random masks do."""
    corpus = data_prep.load("toycls", toy.tokenizer()).corpus
    share = np.bincount(toy.kind_of_token()[corpus.input_ids]) / len(corpus.input_ids)
    assert len(share) == len(toy.KINDS) == 9
    fillers = [name.startswith("fillers") for name in toy.KINDS]
    # Each context has one token of every other kind; fillers are drawn.
    assert share[np.logical_not(fillers)] == pytest.approx(1 / 9, abs=1e-12)
    assert share[fillers] == pytest.approx(1 / 9, abs=0.01)


@pytest.mark.slow
def test_the_lm_can_be_made_again(tmp_path, monkeypatch):
    """Here from a fortieth of the text: weights that have learned, though less than the committed ones."""
    general_text = toy.general_text
    monkeypatch.setattr(toy, "general_text", lambda seed: general_text(seed)[:600])
    succeed("tools/make_tiny.py", "--out=again", cwd=tmp_path)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / file).read_text() == (toy.TINY / file).read_text()
    lms = [models.load_lm("tiny"), models.load_lm(str(tmp_path / "again")), make_tiny.untrained()]
    pieces = make_tiny.general_blocks(1)
    committed, again, at_first = (pretrain.held_out_loss(lm, pieces) for lm in lms)
    assert committed < again < at_first - 0.5
