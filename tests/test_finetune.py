"""EM and F1 against torchmetrics, predictions against brute force, and both scripts as a user runs them."""
import errno
import functools
import importlib
import json
import os
import string
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT, TEXTS, call, fast_tokenizer, random_lm, squad, torchrun, write_rows
from filelock import FileLock, Timeout
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.text import SQuAD
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification

import finetune
import finetune_cls
import finetune_qa
from data_prep import load
from nmg import counts
from support import devices, models, runs, toy
from support.data import collate, windows
from support.runs import Run, UserError

ANSWER = st.text(alphabet=st.sampled_from("aAbt heTn,.-'é 1"), max_size=15)
CASES = st.lists(st.tuples(ANSWER, st.lists(ANSWER, min_size=1, max_size=4)), min_size=1, max_size=8)
TRAINING = {"epochs": 60, "lr": 3e-3, "warmup": 0.1, "batch_size": 24}


@pytest.fixture(scope="module")
def tok():
    return fast_tokenizer("wordpiece")


@pytest.fixture
def texts(cls_folder, tok):
    """Labelled texts; text i has class i % 4."""
    return load(str(cls_folder), tok)


@pytest.fixture
def questions(qa_folder, tok):
    """One question a context, of several windows each."""
    return load(str(qa_folder), tok)


# ---------------------------------------------------------------- metrics

@given(CASES)
@settings(max_examples=60, deadline=None)
def test_em_and_f1_are_torchmetrics(cases):
    metric = SQuAD()
    predictions, gold = [], []
    for i, (predicted, references) in enumerate(cases):
        predictions.append({"id": str(i), "prediction_text": predicted})
        answers = {"text": references, "answer_start": [0] * len(references)}
        gold.append({"id": str(i), "answers": answers})
    metric.update(predictions, gold)
    theirs = metric.compute()
    em = [finetune_qa.exact_match(*case) for case in cases]
    f1 = [finetune_qa.f1_score(*case) for case in cases]
    assert 100 * np.mean(em) == pytest.approx(theirs["exact_match"].item(), abs=1e-4)
    assert 100 * np.mean(f1) == pytest.approx(theirs["f1"].item(), abs=1e-4)


@pytest.mark.parametrize(("predicted", "references", "em", "f1"), [
    ("The Denver Broncos!", ["denver broncos"], 1, 1),
    ("Denver", ["the Denver Broncos", "Carolina"], 0, 2 / 3),
    # An article alone is nothing, as in the official script.
    ("", ["a"], 1, 1),
    ("x" + string.punctuation, ["x"], 1, 1),
])
def test_em_and_f1_by_hand(predicted, references, em, f1):
    assert finetune_qa.exact_match(predicted, references) == em
    assert finetune_qa.f1_score(predicted, references) == f1


@pytest.mark.parametrize(("gold", "predicted", "warned"), [
    ("abb", "bbb", True), ("abb", "bba", False), ("bbb", "bbb", False)])
def test_one_label_for_all_texts_is_warned_of(gold, predicted, warned, lm_folder, cls_folder, tmp_path,
                                              monkeypatch):
    """Unless it is the only one there is. Once, by the script: train_nmg.py sums up many evaluations."""
    lines = [{"gold": g, "predicted": p} for g, p in zip(gold, predicted, strict=True)]
    monkeypatch.setattr(finetune_cls, "finetune", lambda *_, **__: None)
    monkeypatch.setattr(finetune_cls, "predictions", lambda *_: lines)
    done = call("finetune_cls.py", f"--dataset={cls_folder}", f"--lm={lm_folder}", "--save_model=False",
                cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "F1 by label: " in done.stdout and "Model: not saved" in done.stdout
    assert done.stdout.count("WARNING: all texts were given the label b") == warned


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=40))
@settings(max_examples=40, deadline=None)
def test_accuracy_and_macro_f1_are_torchmetrics(pairs):
    gold, predicted = np.array(pairs).T
    ours = finetune_cls.summary([{"gold": str(g), "predicted": str(p)} for g, p in pairs])
    both = (torch.tensor(predicted), torch.tensor(gold))
    accuracy = MulticlassAccuracy(5, average="micro")(*both).item()
    f1_of_each = MulticlassF1Score(5, average="none")(*both).sum().item()
    used = len(np.union1d(gold, predicted))
    assert ours["accuracy"] == pytest.approx(100 * accuracy, abs=1e-4)
    assert ours["macro_f1"] == pytest.approx(100 * f1_of_each / used, abs=1e-4)


# ---------------------------------------------------------------- what a model is trained on

def test_targets_point_at_the_answer(qa_folder):
    split = load(str(qa_folder), fast_tokenizer("bpe"))["train"]
    pieces = windows(split, 48, 12, 20, max_answer=30)
    batch = collate(pieces, np.arange(len(pieces)))
    found = set()
    for row, (first, last) in enumerate(finetune_qa.targets(batch, pieces).tolist()):
        question = pieces.question_ids[row]
        if not first:
            assert last == 0
            continue
        begin = split.char_begin[batch.token_at[row, first]]
        end = split.char_end[batch.token_at[row, last]]
        text = split.text(pieces.text_ids[row])[begin:end]
        assert text.strip() == split.questions[question]["references"][0]
        found.add(question)
    assert found == set(range(len(split.questions)))


# ---------------------------------------------------------------- predictions

def test_the_best_spans_are_those_of_brute_force(questions, tok):
    """All spans of all windows of a question, scored one by one from the model's own logits."""
    split = questions["test"]
    pieces = windows(split, 40, 10, 20, max_answer=7)
    model = models.with_head(random_lm("bert", len(tok)), AutoModelForQuestionAnswering, 0, num_labels=2)
    torch.nn.init.normal_(model.qa_outputs.weight, std=3.0)
    predicted = finetune_qa.predictions(model, pieces)
    for question, line in enumerate(predicted):
        spans = {}
        for piece in np.flatnonzero(pieces.question_ids == question):
            batch = collate(pieces, np.array([piece]))
            with torch.no_grad():
                output = model.eval()(**devices.to_device(batch.tensors()))
            columns = np.flatnonzero(batch.in_text[0])
            for first in columns:
                for last in columns[(columns >= first) & (columns < first + 7)]:
                    span = (batch.token_at[0, first], batch.token_at[0, last])
                    score = (output.start_logits[0, first] + output.end_logits[0, last]).item()
                    spans[span] = max(spans.get(span, -np.inf), score)
        first, last = max(spans, key=spans.get)
        assert line["score"] == pytest.approx(spans[first, last], abs=1e-4)
        text = split.text(split.question_text[question])
        assert line["answer"] == text[split.char_begin[first]:split.char_end[last]].strip()
    assert len(predicted) == len(split.questions)


def metrics_of(module, model, pieces):
    """{metric: (V,)} of those that every example has."""
    lines = module.predictions(model, pieces)
    metrics = {}
    for metric in {finetune_cls: ("accuracy", "likelihood"), finetune_qa: ("em", "f1", "likelihood")}[module]:
        metrics[metric] = np.array([line[metric] for line in lines])
    return metrics


class Known(torch.nn.Module):
    """A model whose logits a table says for each token; padding counts for nothing. In training it drops
    tokens, as fine-tuning leaves a model."""

    def __init__(self, vocab: int, labels: int):
        super().__init__()
        table = torch.randn(vocab, labels, generator=torch.Generator().manual_seed(0))
        self.table = torch.nn.Parameter(table)
        self.config = SimpleNamespace(num_labels=labels, model_type="known")

    def forward(self, input_ids, attention_mask=None, token_type_ids=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        each = self.table[input_ids] * attention_mask[..., None]
        each = torch.nn.functional.dropout(each, 0.5, self.training)
        return SimpleNamespace(logits=each.sum(1), start_logits=each[..., 0], end_logits=each[..., -1])


def test_scores_of_texts(texts, tok):
    train, model = texts["train"], Known(len(tok), 4)
    ids = np.array([5, 17, 11])
    pieces = finetune_cls.pieces_of(train, 64).take(ids)
    by_rising_id = np.sort(ids)
    logits = [model.table[tok(train.text(i))["input_ids"]].sum(0) for i in by_rising_id]
    logits = torch.stack(logits).detach()
    gold = torch.from_numpy(by_rising_id % 4)
    likelihood = -torch.nn.functional.cross_entropy(logits, gold, reduction="none")
    found = metrics_of(finetune_cls, model, pieces)
    np.testing.assert_allclose(found["likelihood"], likelihood, rtol=1e-4)
    np.testing.assert_array_equal(found["accuracy"], (logits.argmax(1) == gold).float())


@pytest.mark.parametrize(("max_len", "overlap"), [(64, 16), (24, 0)])
def test_likelihood_of_answers(max_len, overlap, questions, tok):
    """Against the windows and offsets of Hugging Face's tokenizer: the mean over the windows that hold all of
    the answer; 0 where none does."""
    split, model = questions["train"], Known(len(tok), 2)
    expected = []
    for i, asked in enumerate(split.questions):
        text, answer = split.text(split.question_text[i]), asked["references"][0]
        begin, end = text.index(answer), text.index(answer) + len(answer)
        encoded = tok(asked["question"], text, truncation="only_second", max_length=max_len, stride=overlap,
                      return_overflowing_tokens=True, return_offsets_mapping=True)
        log_probs = []
        for w, ids in enumerate(encoded["input_ids"]):
            first = last = None
            for column, (lo, hi) in enumerate(encoded["offset_mapping"][w]):
                if encoded.sequence_ids(w)[column] == 1:
                    first = column if lo == begin else first
                    last = column if hi == end else last
            if first is not None and last is not None:
                log_p = model.table[ids].log_softmax(0)
                log_probs.append((log_p[first, 0] + log_p[last, 1]).item())
        expected.append(np.mean(log_probs) if log_probs else 0)
    assert (0 in expected) == (overlap == 0)
    pieces = windows(split, max_len, overlap, 32, max_answer=30)
    found = metrics_of(finetune_qa, model, pieces)
    np.testing.assert_allclose(found["likelihood"], expected, rtol=1e-4)


@pytest.mark.parametrize("kind", ["cls", "qa"])
def test_scores_come_by_rising_example_id(kind, texts, questions, tok):
    """Whatever the order of the pieces, and none for an example of which there is no piece."""
    module = {"cls": finetune_cls, "qa": finetune_qa}[kind]
    split = {"cls": texts, "qa": questions}[kind]["train"]
    pieces, model = module.pieces_of(split, 64), Known(len(tok), {"cls": 4, "qa": 2}[kind])
    with torch.no_grad():
        model.table[tok.convert_tokens_to_ids(["purred", "big", "many"]), 0] += 9
        model.table[tok.convert_tokens_to_ids(["purred", "ones"]), -1] += 9
    if kind == "qa":
        for line, asked in zip(finetune_qa.predictions(model, pieces), split.questions, strict=True):
            assert line["em"] == finetune_qa.exact_match(line["answer"], asked["references"])
            assert line["f1"] == finetune_qa.f1_score(line["answer"], asked["references"])
    whole = metrics_of(module, model, pieces)
    for values in whole.values():
        assert len(values) == len(np.unique(pieces.example_ids)) and len(set(values)) > 1
    some = np.array([9, 2, 7, 3])
    order = np.random.default_rng(0).permutation(len(pieces))
    chosen = order[np.isin(pieces.example_ids[order], some)]
    found = metrics_of(module, model, pieces.take(chosen))
    for metric, values in whole.items():
        np.testing.assert_allclose(found[metric], values[np.sort(some)], rtol=1e-5)


def test_the_share_of_answers_that_are_longer_than_max_answer(tmp_path, tok, capsys):
    contexts = ["a b c d", "x y " * 30, "z w " * 30, "c d"]
    answers = ["b c d", "x y " * 17 + "x", "z w " * 23, "c"]
    (tmp_path / "train.json").write_text(json.dumps(squad(contexts, answers)))
    split = load(str(tmp_path / "train.json"), tok, dev_share=None)["train"]
    capsys.readouterr()
    for max_answer, share in ((34, "50.00%"), (35, "25.00%"), (45, "25.00%"), (46, None)):
        assert finetune_qa.pieces_of(split, 200, max_answer).max_answer == max_answer
        printed = capsys.readouterr().out
        said = f"{share} of the answers of train are longer than {max_answer} tokens and can never be found"
        assert (said in printed) if share else printed == ""


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_answers_have_no_blank_at_their_ends(kind, tmp_path):
    """Where tokens begin with the blank before their word."""
    (tmp_path / "train.json").write_text(json.dumps(squad(["the  cat sat "], ["cat"])))
    split = load(str(tmp_path / "train.json"), fast_tokenizer(kind), dev_share=None)["train"]
    n = len(split.input_ids)
    every = {finetune_qa.answer_text(split, 0, first, last) for first in range(n) for last in range(first, n)}
    assert {"the  cat sat", "cat sat", "cat"} <= every
    assert all(answer == answer.strip() for answer in every)


# ---------------------------------------------------------------- training

def quick_learner(tok):
    """A LM with one layer and weights of 0.1. With the usual 0.02 it would first stay where it is for a long
    time, and how long would depend on how a processor rounds."""
    lm = random_lm("bert", len(tok), layers=1)
    for weight in lm.parameters():
        if weight.dim() == 2:
            weight.data.mul_(5)
    return lm


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.parametrize("fast", [False, True])
def test_a_classifier_learns(fast, texts, tok):
    """Fine-tuning fits what can be fitted: a few examples, many epochs."""
    devices.use_fast_path(fast)
    pieces = finetune_cls.pieces_of(texts["train"], 64)
    model = finetune_cls.finetune(quick_learner(tok), pieces, **TRAINING)
    assert metrics_of(finetune_cls, model, pieces)["accuracy"].mean() > 0.95


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.parametrize("fast", [False, True])
def test_a_reader_learns(fast, tmp_path, tok):
    devices.use_fast_path(fast)
    answers = ["mat", "big ones", "many pieces"]
    (tmp_path / "train.json").write_text(json.dumps(squad(TEXTS[:3], answers)))
    pieces = finetune_qa.pieces_of(load(str(tmp_path / "train.json"), tok, dev_share=None)["train"], 64)
    lm = quick_learner(tok)
    # As that of a LM that was fine-tuned to classify.
    lm.config.num_labels = 4
    model = finetune_qa.finetune(lm, pieces, **TRAINING)
    assert metrics_of(finetune_qa, model, pieces)["em"].mean() == 1


@pytest.mark.parametrize("kind", ["cls", "qa"])
def test_the_plain_path_computes_the_same_fine_tuning(kind, texts, questions, tok, monkeypatch):
    monkeypatch.setattr(devices, "has_bf16", lambda: False)
    module = {"cls": finetune_cls, "qa": finetune_qa}[kind]
    split = {"cls": texts, "qa": questions}[kind]["train"]
    pieces = module.pieces_of(split, 48).take(np.arange(16))
    lm = random_lm("bert", len(tok))
    models = []
    for fast in (True, False):
        devices.use_fast_path(fast)
        models.append(module.finetune(lm, pieces, epochs=1, lr=1e-3, batch_size=8))
    # Without native bf16, the fast path of a GPU computes in fp16, and that of a CPU in fp32.
    tolerance = 1e-3 if devices.device().type == "cpu" else 5e-3
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


@pytest.mark.parametrize("script", ["finetune_cls", "finetune_qa"])
def test_every_flag_reaches_the_training(script, lm_folder, cls_folder, qa_folder, tmp_path, monkeypatch):
    """Above all the seed, without which all seeds of a row are one."""
    seen, heads, max_answers = [], [], []
    module = importlib.import_module(script)
    whole = module.finetune

    def finetune(lm, pieces, **given):
        assert pieces.length.max() <= 48
        max_answers.append(pieces.max_answer)
        return whole(lm, pieces, **given)

    def stop(model, *_, **given):
        seen.append(given)
        head = {"finetune_cls": "classifier", "finetune_qa": "qa_outputs"}[script]
        heads.append(getattr(model, head).weight)
        raise UserError("stop")

    monkeypatch.setattr(module, "finetune", finetune)
    monkeypatch.setattr(module, "fit", stop)
    data = cls_folder if script == "finetune_cls" else qa_folder
    of_answers = ["--max_answer=9"] if script == "finetune_qa" else []
    for seed in (7, 8):
        flags = [f"--dataset={data}", f"--lm={lm_folder}", "--max_len=48", "--epochs=4", "--lr=0.002",
                 "--batch_size=3", f"--seed={seed}", *of_answers]
        assert "stop" in call(f"{script}.py", *flags, cwd=tmp_path).stderr
        expected = {"epochs": 4, "lr": 0.002, "batch_size": 3, "seed": seed, "distributed": True}
        assert seen[-1] == seen[-1] | expected
    assert not torch.equal(*heads) and (max_answers == [9, 9] or not of_answers)


@pytest.mark.parametrize("script", ["finetune_cls", "finetune_qa"])
def test_a_copy_of_a_script_runs_its_own_functions(script, lm_folder, cls_folder, qa_folder, tmp_path,
                                                   monkeypatch):
    edited = (ROOT / f"{script}.py").read_text() + """

def loss_fn(model, tensors):
    raise runs.UserError("the loss of the copy")
"""
    (tmp_path / f"my_{script}.py").write_text(edited)
    monkeypatch.syspath_prepend(tmp_path)
    data = cls_folder if script == "finetune_cls" else qa_folder
    result = call(f"my_{script}.py", f"--dataset={data}", f"--lm={lm_folder}", "--max_len=64", cwd=tmp_path)
    assert result.returncode == 2 and "the loss of the copy" in result.stderr, result.stderr


@pytest.mark.parametrize("script", ["finetune_cls", "finetune_qa"])
def test_stages_of_a_seed_use_the_same_labels(script, lm_folder, cls_folder, qa_folder, tmp_path,
                                              monkeypatch):
    """--labelled: of so many texts, which the seed alone decides; masks that read labels read no others."""
    used = []

    def train(lm, pieces, **_):
        used.append(np.unique(pieces.text_ids).tolist())
        raise UserError("stop")

    def read(split, texts):
        used.append(list(texts))
        raise UserError("stop")

    monkeypatch.setattr(importlib.import_module(script), "finetune", train)
    monkeypatch.setattr(counts, "label_information", read)
    data = cls_folder if script == "finetune_cls" else qa_folder
    flags = [f"--dataset={data}", f"--lm={lm_folder}", "--max_len=64"]
    for stage in (f"{script}.py", "pretrain.py"):
        for seed in (0, 1):
            more = ["--labelled=7", f"--seed={seed}", f"--out={stage}{seed}"]
            if stage == "pretrain.py":
                more.append("--masker=label")
            result = call(stage, *flags, *more, cwd=tmp_path)
            assert "stop" in result.stderr, result.stderr
    assert used[:2] == used[2:] and used[0] != used[1]
    assert [len(set(texts)) for texts in used] == [7] * 4
    for stage in (f"{script}.py", "pretrain.py"):
        too_many = call(stage, *flags, "--labelled=1000", "--out=all", cwd=tmp_path)
        assert too_many.returncode == 2 and len(used) == 4
        n = 24 if script == "finetune_cls" else 12
        assert f"--labelled=1000: train has {n} labelled texts, not so many" in too_many.stderr


@pytest.mark.parametrize("script", ["finetune_cls.py", "finetune_qa.py"])
def test_a_test_file_without_labels_is_predicted(script, lm_folder, cls_folder, qa_folder, tmp_path):
    """A prediction for each example and no score, and none in the results; started again, the same."""
    if script == "finetune_cls.py":
        write_rows(cls_folder / "test.jsonl", [{"text": f"text {i}", "label": None} for i in range(3)])
        folder, kept = cls_folder, {"text", "predicted"}
    else:
        asked = squad(TEXTS[:3], ["cat", "ones", "much"])
        for paragraph in asked["data"][0]["paragraphs"]:
            del paragraph["qas"][0]["answers"]
        (qa_folder / "test.json").write_text(json.dumps(asked))
        folder, kept = qa_folder, {"id", "answer", "score", "probability"}
    flags = (f"--dataset={folder}", f"--lm={lm_folder}", "--epochs=1", "--max_len=32", "--out=o")
    for _ in range(2):
        result = call(script, *flags, cwd=tmp_path)
        assert result.returncode == 0 and "test has no labels, so that nothing is scored" in result.stdout
        lines = runs.read_rows(tmp_path / "o/predictions.jsonl")
        assert len(lines) == 3 and all(line.keys() == kept for line in lines)
        assert runs.read_rows(tmp_path / "results.jsonl") == []
    scored = call(script, *flags[:-1], "--split=dev", cwd=tmp_path)
    assert scored.returncode == 0 and len(runs.read_rows(tmp_path / "results.jsonl")) == 1


def test_what_is_cut_and_what_stands_in_train_is_told(lm_folder, cls_folder, tmp_path):
    """Of the texts of four kinds in train, one in four is longer than 40 tokens."""
    rows = runs.read_rows(cls_folder / "train.jsonl")
    write_rows(cls_folder / "test.jsonl", [*rows[:3], {"text": "new", "label": "cat"}])
    result = call("finetune_cls.py", f"--dataset={cls_folder}", f"--lm={lm_folder}", "--max_len=40",
                  "--epochs=1", cwd=tmp_path)
    for said in ("--max_len=40 cuts 25.0% of the texts of train, and 25.0% of those of test.",
                 "WARNING: 75.0% of the texts of test also stand in train"):
        assert result.stdout.count(said) == 1


def test_fine_tuning_needs_labels_and_pre_training_does_not(lm_folder, cls_folder, qa_folder, tmp_path):
    rows = runs.read_rows(cls_folder / "train.jsonl")
    del rows[1]["label"]
    write_rows(cls_folder / "train.jsonl", [*rows, {"text": "a list", "label": ["x", "y"]}])
    write_rows(cls_folder / "test.jsonl", [{"text": "what?", "label": "no such label"}])
    asked = json.loads((qa_folder / "train.json").read_text())
    asked["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] = 1
    (qa_folder / "train.json").write_text(json.dumps(asked))
    for kind, folder, said in (("cls", cls_folder, "train: there is no label, in the row with the text"),
                               ("qa", qa_folder, "does not stand at offset 1 of its context")):
        flags = (f"--dataset={folder}", f"--lm={lm_folder}", "--max_len=32")
        for masker in ("random", "label"):
            result = call("pretrain.py", *flags, f"--masker={masker}", "--max_steps=1",
                          f"--out={kind}-{masker}", cwd=tmp_path)
            assert result.returncode == 0, result.stderr
        result = call(f"finetune_{kind}.py", *flags, cwd=tmp_path)
        assert result.returncode == 2 and said in result.stderr
        result = call("train_nmg.py", *flags, cwd=tmp_path)
        assert result.returncode == 2 and said in result.stderr


def test_a_table_of_other_columns_from_file_to_results(lm_folder, tmp_path):
    """Through every stage by the same flags; without them, one sentence that names them."""
    table = pd.DataFrame({"review": TEXTS * 5, "stars": [1, 5] * 10, "user": np.arange(20) // 2})
    table.to_csv(tmp_path / "t.csv", index=False)
    flags = ("--dataset=t.csv", "--text=review", "--label=stars", "--doc=user", "--dev_share=0.2")
    small = ("--max_len=32", "--epochs=1")
    done = call("pretrain.py", *flags, *small, f"--lm={lm_folder}", "--out=lm2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = call("finetune_cls.py", *flags, *small, "--lm=lm2", cwd=tmp_path)
    [row] = runs.read_rows(tmp_path / "results.jsonl")
    assert row["examples"] == 4 and row["config"]["label"] == "stars"
    done = call("finetune_cls.py", flags[0], *small, "--lm=lm2", cwd=tmp_path)
    assert done.returncode == 2 and "--text=NAME, --label=NAME and --doc=NAME say what to read" in done.stderr
    done = call("finetune_cls.py", *flags[:2], *small, "--lm=lm2", cwd=tmp_path)
    assert done.returncode == 2 and "--label=COLUMN names the labels of a table" in done.stderr


def test_masks_that_read_more_labels_are_refused(lm_folder, cls_folder, tmp_path):
    """Those of another number of texts, or of other texts."""
    flags = [f"--dataset={cls_folder}", "--max_len=64"]
    for masker in ("label", "random"):
        made = call("pretrain.py", *flags, f"--lm={lm_folder}", f"--masker={masker}", "--labelled=12",
                    "--max_steps=1", f"--out={masker}", cwd=tmp_path)
        assert made.returncode == 0, made.stderr
    allowed = {}
    for wanted in (["--labelled=12"], ["--labelled=8"], ["--labelled=12", "--seed=1"], []):
        for masker in ("label", "random"):
            result = call("finetune_cls.py", *flags, f"--lm={masker}", "--epochs=1", *wanted, cwd=tmp_path)
            allowed[masker, *wanted] = result.returncode == 0
            assert result.returncode == 0 or "may have read other labels; pre-train it with" in result.stderr
    refused = [row for row, fine in allowed.items() if not fine]
    assert refused == [("label", "--labelled=8"), ("label", "--labelled=12", "--seed=1")]


def test_a_dev_split_that_pretraining_may_have_read_is_warned_of(tmp_path):
    """Where train was cut in another way for the LM."""
    rows = [{"text": f"text {i} of many", "label": "ab"[i % 2]} for i in range(40)]
    write_rows(tmp_path / "my.jsonl", rows)
    made = call("pretrain.py", "--dataset=my.jsonl", "--max_steps=1", "--out=adapted", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    warned = []
    for flags in ([], ["--dev_share=0.1"], ["--dev_share=0.5"]):
        scored = call("finetune_cls.py", "--dataset=my.jsonl", "--lm=adapted", "--epochs=1", *flags,
                      cwd=tmp_path)
        assert scored.returncode == 0, scored.stderr
        warned.append("WARNING: my.jsonl was prepared in another way for the pre-training" in scored.stdout)
    assert warned == [False, False, True]
    # A test file is the same, however train is cut.
    (tmp_path / "my").mkdir()
    for split in ("train", "test"):
        write_rows(tmp_path / f"my/{split}.jsonl", rows)
    for script, *flags in (["pretrain.py", "--max_steps=1", "--out=other"],
                           ["finetune_cls.py", "--lm=other", "--epochs=1", "--dev_share=0.5"]):
        result = call(script, "--dataset=my", *flags, cwd=tmp_path)
        assert result.returncode == 0 and "prepared in another way" not in result.stdout


# ---------------------------------------------------------------- the scripts

@pytest.mark.parametrize(("script", "auto_class"), [
    ("finetune_cls.py", AutoModelForSequenceClassification),
    ("finetune_qa.py", AutoModelForQuestionAnswering),
])
def test_a_row_twice_is_the_same(script, auto_class, tmp_path, lm_folder, cls_folder, qa_folder):
    """Prepare, mask, pre-train, fine-tune, score: two runs in two places agree in every byte of their
    predictions; a third in the same place does nothing. The line of results is the mean of
    predictions.jsonl, which the saved model makes again."""
    data = cls_folder if script == "finetune_cls.py" else qa_folder
    flags = [f"--dataset={data}", "--lr=1e-3"]
    finetune = [script, *flags, "--lm=adapted", "--epochs=3", "--out=o"]
    rows, predictions = [], []
    for place in (tmp_path / "one", tmp_path / "two"):
        place.mkdir()
        pretrain = ["pretrain.py", *flags, f"--lm={lm_folder}", "--masker=whole", "--out=adapted"]
        for command in (pretrain, finetune):
            result = call(*command, cwd=place)
            assert result.returncode == 0 and "--max_len=66 instead of" in result.stdout, result.stderr
        rows.append(json.loads((place / "results.jsonl").read_text()))
        assert rows[-1]["examples"] == len((place / "o/predictions.jsonl").read_text().splitlines())
        assert len(rows[-1]["held_out_loss"]) == 2
        predictions.append((place / "o/predictions.jsonl").read_bytes())
    assert predictions[0] == predictions[1]
    for row in rows:
        del row["seconds"]
    assert rows[0] == rows[1]
    row = rows[0]
    assert (row["masker"], row["lm"], row["predictions"]) == ("whole", ".../lm", "o/predictions.jsonl")
    assert row["config"]["max_len"] == 66

    lines = runs.read_rows(tmp_path / "one/o/predictions.jsonl")
    model = auto_class.from_pretrained(tmp_path / "one/o").eval()
    test = load(str(data), fast_tokenizer("wordpiece"))["test"]
    if script == "finetune_cls.py":
        assert row["accuracy"] == 100 * np.mean([line["gold"] == line["predicted"] for line in lines])
        again = finetune_cls.predictions(model, finetune_cls.pieces_of(test, 66))
        assert [line["predicted"] for line in again] == [line["predicted"] for line in lines]
        assert [line["text"] for line in lines] == list(range(9))
    else:
        assert row["em"] == pytest.approx(100 * np.mean([line["em"] for line in lines]))
        assert row["f1"] == pytest.approx(100 * np.mean([line["f1"] for line in lines]))
        again = finetune_qa.predictions(model, finetune_qa.pieces_of(test, 66))
        assert [line["answer"] for line in again] == [line["answer"] for line in lines]
        assert [line["id"] for line in lines] == [question["id"] for question in test.questions]

    again = call(*finetune, cwd=tmp_path / "two")
    assert "already done" in again.stdout
    assert "results.jsonl has a line of these settings already" in again.stdout
    assert len((tmp_path / "two/results.jsonl").read_text().splitlines()) == 1


# ---------------------------------------------------------------- rows without labels

@pytest.fixture
def classifier(lm_folder, cls_folder, tmp_path):
    """The folder of a fine-tuned model, by an absolute path, as all that went into it."""
    done = call("finetune_cls.py", f"--dataset={cls_folder}", f"--lm={lm_folder}", "--max_len=24",
                "--epochs=1", f"--out={tmp_path / 'model'}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return tmp_path / "model"


def test_the_hint_how_to_predict_names_the_column_of_texts(tmp_path, capsys):
    for text, hint in (("text", f"--lm={tmp_path}\n"), ("the body", f"--lm={tmp_path} --text='the body'\n")):
        facts = {"settings": {"text": text}, "scores": {"accuracy": 50.0}, "commits": ["1a"]}
        (tmp_path / "run.json").write_text(json.dumps(facts))
        (tmp_path / "config.json").touch()
        write_rows(tmp_path / "predictions.jsonl", [{"gold": "a", "predicted": "a"}])
        finetune.report(tmp_path, "dev", finetune_cls)
        assert capsys.readouterr().out.endswith(hint)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_new_rows_are_predicted(suffix, classifier, cls_folder, tmp_path):
    """The texts of test again, among others and one that is blank: the same predictions, every row in its
    place with its own columns."""
    texts = [row["text"] for row in runs.read_rows(cls_folder / "test.jsonl")]
    rows = [{"id": f"0{i}", "text": text, "note": 'a, "b"'} for i, text in enumerate([*texts, " ", texts[0]])]
    if suffix == ".csv":
        pd.DataFrame(rows).to_csv(tmp_path / "new.csv", index=False)
    else:
        write_rows(tmp_path / "new.jsonl", rows)
    done = call("finetune_cls.py", f"--predict=new{suffix}", f"--lm={classifier}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # The length is that of fine-tuning; texts of other lengths would have other predictions.
    assert "10 of 11 rows have text" in done.stdout and "cut to 24 tokens" in done.stdout
    out = tmp_path / f"new.predicted{suffix}"
    read = functools.partial(pd.read_csv, dtype={"id": str}) if suffix == ".csv" else runs.read_rows
    found = pd.DataFrame(read(out))
    assert found[["id", "text", "note"]].to_dict("records") == rows
    gold = [line["predicted"] for line in runs.read_rows(classifier / "predictions.jsonl")]
    assert found["predicted"].dropna().tolist() == [*gold, gold[0]] and found["predicted"].isna()[9]
    p = found.drop(index=9)[["p_cat", "p_dog", "p_long", "p_short"]].astype(float)
    assert np.allclose(p.sum(axis=1), 1, atol=1e-5)
    assert p.idxmax(axis=1).str.removeprefix("p_").tolist() == [*gold, gold[0]]
    # Nothing is written over, and no column is.
    for flags, said in (([], "is there already"), ([f"--predict={out}"], "has a column 'predicted' already")):
        again = call("finetune_cls.py", f"--predict=new{suffix}", f"--lm={classifier}", *flags, cwd=tmp_path)
        assert again.returncode == 2 and said in again.stderr


def test_new_questions_are_answered(lm_folder, qa_folder, tmp_path):
    done = call("finetune_qa.py", f"--dataset={qa_folder}", f"--lm={lm_folder}", "--max_len=48", "--epochs=1",
                "--out=o", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = runs.read_rows(tmp_path / "o/predictions.jsonl")
    asked = json.loads((qa_folder / "test.json").read_text())["data"][0]["paragraphs"]
    rows = [{"mine": 7, "id": "a", "context": part["context"], "question": part["qas"][0]["question"]}
            for part in asked]
    write_rows(tmp_path / "flat.jsonl", rows)
    for file, own in ((qa_folder / "test.json", {"id": "q1"}), ("flat.jsonl", rows[1])):
        done = call("finetune_qa.py", f"--predict={file}", "--lm=o", "--out=p.jsonl", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found = runs.read_rows(tmp_path / "p.jsonl")
        assert [row["predicted"] for row in found] == [line["answer"] for line in lines]
        assert [row["score"] for row in found] == pytest.approx([line["score"] for line in lines], abs=1e-4)
        assert all(0 < row["probability"] < 1 for row in found)
        assert found[1] == found[1] | own
        (tmp_path / "p.jsonl").unlink()


@pytest.mark.parametrize(("script", "flags", "said"), [
    ("finetune_cls.py", ["--lm=lm"], "--lm=lm: is a BertForMaskedLM, and --predict needs a fine-tuned model"),
    ("finetune_qa.py", ["--lm=model"], "--lm=model: is a BertForSequenceClassification, and --predict needs"),
    ("finetune_cls.py", ["--lm=model", "--text=body"], "new.csv:2: the field 'body' is missing"),
    ("finetune_cls.py", ["--lm=model", "--predict=no.csv"], "--predict=no.csv: no such file"),
    ("finetune_qa.py", ["--lm=lm"], "needs a fine-tuned model (...ForQuestionAnswering)"),
])
def test_what_cannot_predict(script, flags, said, classifier, tmp_path):
    (tmp_path / "new.csv").write_text("text\na b\n")
    result = call(script, "--predict=new.csv", *flags, cwd=tmp_path)
    assert result.returncode == 2 and said in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "new.predicted.csv").exists()


def test_a_model_that_can_be_shared(classifier, cls_folder, tmp_path):
    """No file of it says where things lie; its card tells what was scored. As an LM it lends its encoder."""
    for file in classifier.glob("*.json*"):
        assert str(tmp_path) not in file.read_text(), file
    card = ModelCard.load(classifier / "README.md").text
    assert "# lm, fine-tuned on data" in card and "Scores on test (9 examples), in percent: accuracy" in card
    assert "F1 by label: cat " in card and "--dataset=.../data" in card
    more = call("finetune_cls.py", f"--dataset={cls_folder}", f"--lm={classifier}", "--max_len=24",
                "--epochs=1", "--out=o", cwd=tmp_path)
    assert "is a fine-tuned model (BertForSequenceClassification): its head is replaced" in more.stdout
    again = call("finetune_cls.py", f"--dataset={cls_folder}", f"--lm={tmp_path / 'lm'}", "--max_len=24",
                 "--epochs=1", "--out=model", cwd=tmp_path)
    assert "already done" in again.stdout and "Scores on test (9 examples)" in again.stdout


@pytest.mark.slow
def test_two_processes_give_one_result(tmp_path, lm_folder, cls_folder):
    result = torchrun(2, "finetune_cls.py", f"--dataset={cls_folder}", f"--lm={lm_folder}", "--max_len=48",
                      "--epochs=2", "--lr=1e-3", "--out=o", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    rows = runs.read_rows(tmp_path / "results.jsonl")
    assert len(rows) == 1 and 0 <= rows[0]["accuracy"] <= 100
    assert len(runs.read_rows(tmp_path / "o/predictions.jsonl")) == 9
    assert result.stdout.count("Scores on test (9 examples)") == 1


@pytest.mark.parametrize("script", ["finetune_cls", "finetune_qa"])
def test_the_script_starts_with_the_toy_worlds_values(script, tmp_path, monkeypatch):
    """With no flag at all."""
    def stop(lm, pieces, **given):
        values.append(given)
        raise UserError("stop")

    values = []
    module = importlib.import_module(script)
    monkeypatch.setattr(module, "finetune", stop)
    assert "stop" in call(f"{script}.py", cwd=tmp_path).stderr
    wanted = {"finetune_cls": toy.FINETUNE_CLS, "finetune_qa": toy.FINETUNE_QA}[script]
    assert values[0] == values[0] | {name: wanted[name] for name in ("epochs", "lr", "batch_size")}


def test_predictions_of_ones_own_task_must_be_finite(lm_folder, cls_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(finetune_cls, "predictions", lambda model, pieces: [{"error": float("nan")}])
    monkeypatch.setattr(finetune_cls, "summary", lambda lines: {"accuracy": 0.0})
    result = call("finetune_cls.py", f"--dataset={cls_folder}", f"--lm={lm_folder}", "--epochs=1",
                  cwd=tmp_path)
    assert result.returncode == 2 and "error: predictions: error is nan; a smaller" in result.stderr


# ---------------------------------------------------------------- one line of results

def finished_run(folder, seed=0):
    """A finished evaluation, as finetune_cls.py leaves it."""
    settings = {"dataset": "d", "lm": "l", "seed": seed, "split": "test",
                "pretraining": {"lm": "base", "masker": "whole"}}
    run = Run(folder, settings)
    run.finish(scores={"accuracy": 50.0, "macro_f1": 40.0}, examples=8, held_out_loss=[3.0, 2.5],
               seconds={"train": 1.0})
    return run


def test_a_line_of_results(tmp_path, capsys):
    run = finished_run(tmp_path / "o")
    capsys.readouterr()
    finetune.add_result(tmp_path / "results.jsonl", run)
    row = json.loads((tmp_path / "results.jsonl").read_text())
    versions = row.pop("versions")
    assert "torch" in versions
    assert row.pop("config") == run.settings
    assert row.pop("metrics") == ["accuracy", "macro_f1"]
    assert capsys.readouterr().out == ""
    assert row == {"dataset": "d", "lm": "base", "masker": "whole", "row": None, "seed": 0, "split": "test",
                   "examples": 8, "accuracy": 50.0, "macro_f1": 40.0, "held_out_loss": [3.0, 2.5],
                   "seconds": {"train": 1.0},
                   "predictions": str(tmp_path / "o/predictions.jsonl")}


def test_results_that_are_there_stay(tmp_path):
    """Each settings once; a blank line is none, and nothing is glued to a line without newline."""
    results = tmp_path / "results.jsonl"
    results.write_text('\n{"seed": 7}')
    one, two = finished_run(tmp_path / "one", seed=1), finished_run(tmp_path / "two", seed=2)
    for run in (one, two, one, two):
        finetune.check_results(results)
        finetune.add_result(results, run)
    assert [line["seed"] for line in runs.read_rows(results)] == [7, 1, 2]
    assert results.read_text().endswith("}\n")


def test_results_that_cannot_be_written_are_told_before_training(tmp_path, monkeypatch):
    """Also where the folder takes no lock, and waiting for it would never end; or no file may be replaced, as
    those of somebody else in /tmp."""
    (tmp_path / "file").write_text('{"seed": 0}\n')
    (tmp_path / "folder/r.jsonl.lock").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    for place in ("file/r.jsonl", "folder", "pipe", "folder/r.jsonl", "/proc/self/x"):
        with pytest.raises(UserError, match=f"--results=.*{place}: cannot be written to"):
            finetune.check_results(tmp_path / place)

    def not_permitted(partial, target):
        raise PermissionError(errno.EPERM, "Operation not permitted", partial, None, target)

    with monkeypatch.context() as patch, pytest.raises(UserError, match="Operation not permitted"):
        patch.setattr(os, "replace", not_permitted)
        finetune.check_results(tmp_path / "file")
    (tmp_path / "file").write_text('{"seed": 0}\n{"half a li\n')
    with pytest.raises(UserError, match="file:2: not a JSON object"):
        finetune.check_results(tmp_path / "file")


def test_two_names_of_a_results_file_are_one(tmp_path):
    """A link stays one, and its lock is that of its target."""
    (tmp_path / "all").mkdir()
    (tmp_path / "link").symlink_to("all/results.jsonl")
    finetune.check_results(tmp_path / "link")
    for seed, name in enumerate(["link", "all/results.jsonl", "link"]):
        run = finished_run(tmp_path / f"o-{seed}", seed=seed)
        finetune.add_result(tmp_path / name, run)
    assert (tmp_path / "link").is_symlink()
    assert [line["seed"] for line in runs.read_rows(tmp_path / "all/results.jsonl")] == [0, 1, 2]
    with runs.locked(tmp_path / "link"), pytest.raises(Timeout):
        FileLock(tmp_path / "all/results.jsonl.lock").acquire(timeout=0)
