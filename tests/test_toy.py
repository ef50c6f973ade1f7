"""The embedded world: what it promises of its texts and its LM."""
import re
from collections import Counter

import numpy as np
import pytest
from conftest import succeed

import data_prep
from pretrain import held_out_loss
from support import toy
from support.models import load_lm
from tools.make_tiny import general_blocks, untrained


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
    lms = [load_lm("tiny"), load_lm(str(tmp_path / "again")), untrained()]
    pieces = general_blocks(1)
    committed, again, at_first = (held_out_loss(lm, pieces) for lm in lms)
    assert committed < again < at_first - 0.5
