"""Sub-tasks: what belongs together comes together, and no document is on both sides."""
import json
import random
import re

import numpy as np
import pytest
from conftest import load_splits, write_rows

import finetune_cls
import finetune_qa
from data_prep import load
from nmg.subtasks import SubTaskSampler
from support import toy
from support.data import blocks, collate
from support.runs import UserError


def labelled_texts(n):
    return [{"text": f"alpha {i} beta", "label": "xyz"[i % 3]} for i in range(n)]


def sampler_of(folder, val_share, **splits):
    """A sampler of these rows, or without any of a data set by its name."""
    return SubTaskSampler(load_splits(folder, toy.tokenizer(), **splits), finetune_cls, 64, 64, val_share)


@pytest.mark.parametrize("seed", range(5))
def test_no_document_is_on_both_sides(seed, tmp_path):
    """Sentences repeat with other entity markers, as in ChemProt: they are one document."""
    words = ["alpha", "beta", "gamma", "delta", "kappa", "sigma"]
    rng = random.Random(0)
    rows = []
    for i in range(120):
        a, b = rng.sample(words, 2)
        rows.append({"text": f"<< {a} >> binds [[ {b} ]] in {i % 40} ways", "label": rng.choice("xyz")})
    for row in rows[:60]:
        rows.append({"text": re.sub("<< | >>", "", row["text"]), "label": "x"})
    subtask = sampler_of(tmp_path, 0.2, train=rows).sample(np.random.default_rng(seed), 30, None, 20, 1000)
    train = subtask.train.split
    plain = np.array([re.sub(r"[<>\[\] ]", "", train.text(i)) for i in range(len(train))])
    assert not set(plain[subtask.contexts.text_ids]) & set(plain[subtask.val.text_ids])


def test_examples_of_texts_are_the_contexts_themselves(tmp_path, capsys):
    """So many contexts as were asked for, and at most so many examples, all about these contexts. If all
    sub-tasks would have the same, it is said once."""
    sampler = sampler_of(tmp_path, 0.2, train=labelled_texts(150))
    subtask = sampler.sample(np.random.default_rng(0), 30, None, 20, 7)
    assert len(np.unique(subtask.contexts.text_ids)) == 30
    assert len(subtask.train) == 20 and len(subtask.val) == 7
    assert set(subtask.train.text_ids) <= set(subtask.contexts.text_ids)
    assert set(subtask.val.doc) <= set(sampler.val_docs)
    assert "takes all" not in capsys.readouterr().out
    whole = sampler.sample(np.random.default_rng(0), 1000, None, 1000, 1000)
    sampler.sample(np.random.default_rng(1), 120, None, 1000, 1000)
    assert capsys.readouterr().out.count("WARNING: --contexts takes all 108 texts that it may draw from") == 1
    assert set(whole.val.doc) == set(sampler.val_docs) and set(whole.train.doc) == set(sampler.train_docs)


def test_questions_are_those_on_the_contexts(tmp_path, qa_folder):
    """Articles are whole on one side; all windows of a question come together."""
    article = json.loads((qa_folder / "train.json").read_text())["data"][0]
    articles = [article | {"title": str(i)} for i in range(10)]
    file = write_rows(tmp_path / "articles.json", [{"data": articles}])
    sampler = SubTaskSampler(load(str(file), toy.tokenizer()), finetune_qa, 64, 96, 0.3)
    subtask = sampler.sample(np.random.default_rng(0), 20, None, 5, 7)
    assert not set(subtask.contexts.doc) & set(sampler.val_docs)
    assert set(subtask.val.doc) <= set(sampler.val_docs)
    assert set(subtask.train.text_ids) <= set(subtask.contexts.text_ids)
    for pieces, questions in ((subtask.train, 5), (subtask.val, 7)):
        ids, count = np.unique(pieces.question_ids, return_counts=True)
        assert len(ids) == questions
        every = np.bincount(sampler.examples.question_ids)[ids]
        assert (count == every).all() and count.max() > 1


def test_a_corpus_of_the_same_documents():
    """The toy world: unlabelled contexts of validation names are in it, their labelled sentences are not, and
    no test or dev name at all. The same random stream draws the same sub-task."""
    sampler = sampler_of("toycls", 0.5)
    train = sampler.examples.split
    drawn = [sampler.sample(np.random.default_rng(seed), 96, 13, 1000, 1000) for seed in (1, 1, 2)]
    # Also after another sub-task was drawn.
    for subtask in drawn:
        of_contexts, of_train, of_val = (set(x.doc) for x in (subtask.contexts, subtask.train, subtask.val))
        assert len(subtask.contexts) == 96 and len(of_contexts) == 13
        # Half of the contexts are about documents of D_val'.
        assert np.isin(subtask.contexts.doc, sampler.val_docs).sum() == 48 and len(of_val) == 7
        assert not of_train & of_val and of_val <= set(sampler.val_docs)
        assert of_contexts == of_train | of_val and max(of_contexts) < 24
        # Only the labels of training documents may choose masks.
        labelled = collate(subtask.contexts, np.arange(4)).readable_labels
        assert set(labelled) == set(subtask.train.text_ids)
        assert set(train.doc[labelled]) < set(sampler.train_docs)
    for part in ("contexts", "train", "val"):
        ids = [getattr(subtask, part).text_ids for subtask in drawn]
        assert np.array_equal(ids[0], ids[1]) and not np.array_equal(ids[0], ids[2])
    assert drawn[0].seed == drawn[1].seed != drawn[2].seed
    # Without a sub-task, all labels of the training split, also where the corpus is read.
    corpus = sampler.contexts.split
    assert len(collate(blocks(corpus, 64), np.arange(4)).readable_labels) == len(train) < len(corpus)


def test_a_corpus_whose_documents_are_not_those_of_train(tmp_path):
    """Without `doc` nothing joins them: contexts come from the whole corpus, examples from all of train. With
    it a sub-task lacks a part, which is said."""
    corpus = [{"text": f"gamma {i} delta"} for i in range(100)]
    sampler = sampler_of(tmp_path, 0.25, train=labelled_texts(40), corpus=corpus)
    subtask = sampler.sample(np.random.default_rng(0), 60, None, 1000, 1000)
    assert len(subtask.contexts) == 60 and max(subtask.contexts.text_ids) > 40
    assert set(subtask.train.doc) == set(sampler.train_docs)
    assert set(subtask.val.doc) == set(sampler.val_docs)
    train = [row | {"doc": i} for i, row in enumerate(labelled_texts(40))]
    corpus = [row | {"doc": 1000 + i} for i, row in enumerate(corpus)]
    sampler = sampler_of(tmp_path, 0.25, train=train, corpus=corpus)
    with pytest.raises(UserError, match="drew nothing for its part 'contexts'"):
        sampler.sample(np.random.default_rng(0), 60, None, 1000, 1000)


def test_what_has_nothing_to_mask_is_no_context(tmp_path):
    """A text of characters that the tokenizer drops would have a policy over nothing."""
    rows = labelled_texts(40)
    for row in rows[::2]:
        row["text"] = "\u200b"
    contexts = sampler_of(tmp_path, 0.25, train=rows).contexts
    assert 0 < len(contexts) < len(contexts.split)
    assert collate(contexts, np.arange(len(contexts))).maskable.any(1).all()
