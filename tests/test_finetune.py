"""EM and F1 against torchmetrics, predictions against brute force, and both scripts as a user runs them."""
import functools
import inspect
import json
import random
import re
import string
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import (
    ROOT,
    TEXTS,
    call,
    fast_tokenizer,
    random_lm,
    ranks,
    refused,
    side_by_side,
    squad,
    succeed,
    write_rows,
)
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.text import SQuAD
from transformers import AutoModelForQuestionAnswering

import finetune
import finetune_cls
import finetune_qa
import train_nmg
from data_prep import load
from nmg import counts
from support import devices, models, runs, toy
from support.data import collate, windows
from support.runs import Run, UserError

ANSWER = st.text(alphabet=st.sampled_from("aAbthTen  1é" + string.punctuation), max_size=15)


@pytest.fixture(params=[finetune_cls, finetune_qa], ids=["cls", "qa"])
def task(request, lm_folder, cls_folder, qa_folder):
    """A kind of task: its file, a small data set, and flags with that and a small LM."""
    data = {finetune_cls: cls_folder, finetune_qa: qa_folder}[request.param]
    return SimpleNamespace(module=request.param, script=f"{request.param.__name__}.py", data=data,
                           flags=[f"--dataset={data}", f"--lm={lm_folder}"])


# ---------------------------------------------------------------- metrics

@given(st.lists(st.tuples(ANSWER, st.lists(ANSWER, min_size=1, max_size=4)), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_em_and_f1_are_torchmetrics(cases):
    metric = SQuAD()
    for predicted, references in cases:
        answers = {"text": references, "answer_start": [0] * len(references)}
        metric.update({"id": "", "prediction_text": predicted}, {"id": "", "answers": answers})
    theirs = metric.compute()
    em = [finetune_qa.exact_match(*case) for case in cases]
    f1 = [finetune_qa.f1_score(*case) for case in cases]
    assert 100 * np.mean(em) == pytest.approx(theirs["exact_match"].item(), abs=1e-4)
    assert 100 * np.mean(f1) == pytest.approx(theirs["f1"].item(), abs=1e-4)


def test_predictions_that_cannot_be_right(lm_folder, cls_folder, tmp_path, monkeypatch):
    """One label for all texts is warned of, unless it is the only one there is; once, by the script, as
    train_nmg.py sums up many evaluations. The numbers of a task of one's own must be finite."""
    flags = [f"--dataset={cls_folder}", f"--lm={lm_folder}", "--save_model=False"]
    monkeypatch.setattr(finetune_cls, "finetune", lambda *_, **__: None)
    for gold, predicted, warned in (("abb", "bbb", True), ("abb", "bba", False), ("bbb", "bbb", False)):
        lines = [{"gold": g, "predicted": p} for g, p in zip(gold, predicted, strict=True)]
        monkeypatch.setattr(finetune_cls, "predictions", Mock(return_value=lines))
        done = succeed("finetune_cls.py", *flags, f"--out={gold}-{predicted}", cwd=tmp_path)
        assert "F1 by label: " in done.stdout and "Model: not saved" in done.stdout
        assert done.stdout.count("WARNING: all texts were given the label b") == warned
    for value in (float("nan"), -float("inf")):
        lines = [{"name": "a name is no number", "error": value}]
        monkeypatch.setattr(finetune_cls, "predictions", Mock(return_value=lines))
        refused(f"predictions: error is {value}", "finetune_cls.py", *flags, cwd=tmp_path)


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


# ---------------------------------------------------------------- predictions

def test_the_best_spans_are_those_of_brute_force(qa_folder, tok, monkeypatch):
    """All spans of all windows of a question, scored one by one from the model's own logits."""
    monkeypatch.setattr(finetune_qa, "MAX_ANSWER", 7)
    split = load(str(qa_folder), tok)["test"]
    pieces = windows(split, 40, 10, 20)
    model = models.with_head(random_lm("bert", len(tok)), AutoModelForQuestionAnswering, 0, num_labels=2)
    torch.nn.init.normal_(model.qa_outputs.weight, std=3.0)
    predicted = finetune_qa.predictions(model, pieces)
    for question, line in enumerate(predicted):
        spans = []
        for piece in np.flatnonzero(pieces.question_ids == question):
            batch = collate(pieces, np.array([piece]))
            with torch.no_grad():
                output = model.eval()(**devices.to_device(batch.tensors()))
            columns = np.flatnonzero(batch.in_text[0])
            p_start, p_end = output.start_logits[0].softmax(0), output.end_logits[0].softmax(0)
            for first in columns:
                for last in columns[(columns >= first) & (columns < first + 7)]:
                    span = (batch.token_at[0, first], batch.token_at[0, last])
                    score = (output.start_logits[0, first] + output.end_logits[0, last]).item()
                    spans.append((score, (p_start[first] * p_end[last]).item(), span))
        score, probability, (first, last) = max(spans)
        assert line["score"] == pytest.approx(score, abs=1e-4)
        assert line["probability"] == pytest.approx(probability, rel=1e-3)
        text = split.text(split.question_text[question])
        assert line["answer"] == text[split.char_begin[first]:split.char_end[last]].strip()
    assert len(predicted) == len(split.questions)


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


def test_scores_of_texts(cls_folder, tok):
    """By rising id, whatever the order of the pieces, and none for a text of which there is no piece."""
    train, model = load(str(cls_folder), tok)["train"], Known(len(tok), 4)
    pieces = finetune_cls.pieces_of(train, 64).take(np.array([5, 17, 11]))
    by_rising_id = np.array([5, 11, 17])
    logits = [model.table[tok(train.text(i))["input_ids"]].sum(0) for i in by_rising_id]
    logits = torch.stack(logits).detach()
    # Text i has class i % 4.
    gold = torch.from_numpy(by_rising_id % 4)
    likelihood = -torch.nn.functional.cross_entropy(logits, gold, reduction="none")
    found = pd.DataFrame(finetune_cls.predictions(model, pieces))
    np.testing.assert_allclose(found["likelihood"], likelihood, rtol=1e-4)
    np.testing.assert_array_equal(found["accuracy"], (logits.argmax(1) == gold).float())


@pytest.mark.parametrize(("max_len", "overlap"), [(64, 16), (24, 0)])
def test_targets_and_scores_of_questions(max_len, overlap, qa_folder, tok):
    """Against the windows and offsets of Hugging Face's tokenizer. The targets are 0 in a window that does
    not hold all of the answer; the likelihood is the mean over those that do, or 0 where none does. Scores
    come by rising id, whatever the order of the windows, and none for a question without a window."""
    split, model = load(str(qa_folder), tok)["train"], Known(len(tok), 2)
    with torch.no_grad():
        model.table[tok.convert_tokens_to_ids(["purred", "big", "many"]), 0] += 9
        model.table[tok.convert_tokens_to_ids(["purred", "ones"]), 1] += 9
    expected, targets = [], []
    for i, asked in enumerate(split.questions):
        text, answer = split.text(split.question_text[i]), asked["references"][0]
        begin = text.index(answer)
        encoded = tok(asked["question"], text, truncation="only_second", max_length=max_len, stride=overlap,
                      return_overflowing_tokens=True)
        log_probs = []
        for w, ids in enumerate(encoded["input_ids"]):
            first = encoded.char_to_token(w, begin, sequence_index=1)
            last = encoded.char_to_token(w, begin + len(answer) - 1, sequence_index=1)
            if first is None or last is None:
                targets.append([0, 0])
                continue
            targets.append([first, last])
            log_p = model.table[ids].log_softmax(0)
            log_probs.append((log_p[first, 0] + log_p[last, 1]).item())
        expected.append(np.mean(log_probs) if log_probs else 0)
    assert (0 in expected) == (overlap == 0)
    pieces = windows(split, max_len, overlap, 32)
    assert finetune_qa.targets(collate(pieces, np.arange(len(pieces))), pieces).tolist() == targets
    order = np.random.default_rng(0).permutation(len(pieces))
    some = order[np.isin(pieces.question_ids[order], [2, 3, 7, 9])]
    for chosen, ids in ((order, range(12)), (some, [2, 3, 7, 9])):
        lines = finetune_qa.predictions(model, pieces.take(chosen))
        likelihood = [line["likelihood"] for line in lines]
        np.testing.assert_allclose(likelihood, [expected[i] for i in ids], rtol=1e-4)
        for line, i in zip(lines, ids, strict=True):
            assert line["id"] == f"q{i}"
            assert line["em"] == finetune_qa.exact_match(line["answer"], split.questions[i]["references"])
            assert line["f1"] == finetune_qa.f1_score(line["answer"], split.questions[i]["references"])
        assert {line["em"] for line in lines} == {0, 1}


def test_the_share_of_answers_that_are_too_long(tmp_path, tok, capsys, monkeypatch):
    (tmp_path / "train.json").write_text(json.dumps(squad(["a b c d", "c d e f"], ["b c d", "d e"])))
    split = load(str(tmp_path / "train.json"), tok, dev_share=None)["train"]
    capsys.readouterr()
    for max_answer, said in ((1, "WARNING: 100.00%"), (2, "WARNING: 50.00%"), (3, "")):
        monkeypatch.setattr(finetune_qa, "MAX_ANSWER", max_answer)
        finetune_qa.pieces_of(split, 200)
        assert capsys.readouterr().out.partition(" of the answers of train are longer")[0] == said


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
    """A LM with one layer and weights of 0.1; with 0.02 rounding would decide when it begins to learn."""
    lm = random_lm("bert", len(tok), layers=1)
    for weight in lm.parameters():
        if weight.dim() == 2:
            weight.data.mul_(5)
    return lm


def test_the_loss_is_that_of_transformers_summed(task, tok, monkeypatch):
    """The loss of a batch is the sum of what transformers computes for each of its pieces alone. (There the
    loss of a question is the mean of start and end, hence the 2.)"""
    calls = []
    monkeypatch.setattr(task.module, "fit", lambda *given, **_: calls.append(given))
    pieces = task.module.pieces_of(load(str(task.data), tok)["train"], 48)
    task.module.finetune(quick_learner(tok), pieces)
    [(model, _, make_batch, loss_fn)] = calls
    model.cpu().eval()
    alone = 0.0
    for i in range(5):
        tensors = make_batch(0, np.array([i]))
        labels = tensors.pop("labels")
        if task.module is finetune_cls:
            alone += model(**tensors, labels=labels).loss
        else:
            alone += 2 * model(**tensors, start_positions=labels[:, 0], end_positions=labels[:, 1]).loss
    torch.testing.assert_close(loss_fn(model, make_batch(0, np.arange(5))), alone, rtol=1e-4, atol=1e-4)


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.parametrize("fast", [False, True])
def test_a_reader_learns(fast, tmp_path, tok):
    """Fine-tuning fits what can be fitted: a few examples, many epochs."""
    devices.use_fast_path(fast)
    answers = ["mat", "big ones", "many pieces"]
    (tmp_path / "train.json").write_text(json.dumps(squad(TEXTS[:3], answers)))
    pieces = finetune_qa.pieces_of(load(str(tmp_path / "train.json"), tok, dev_share=None)["train"], 64)
    lm = quick_learner(tok)
    # As that of a LM that was fine-tuned to classify.
    lm.config.num_labels = 4
    model = finetune_qa.finetune(lm, pieces, epochs=60, lr=3e-3, warmup=0.1, batch_size=24)
    assert finetune_qa.summary(finetune_qa.predictions(model, pieces))["em"] == 100


def test_every_flag_reaches_the_training(task, tmp_path, monkeypatch):
    """Above all the seed, without which all seeds of a row are one. Without flags, the toy world's values."""
    seen, fresh = [], []

    def stop(model, length, *_, **given):
        seen.append(given | {"max_len": length.max()})
        fresh.append(torch.nn.utils.parameters_to_vector(model.parameters()))
        raise UserError("stop")

    monkeypatch.setattr(task.module, "fit", stop)
    wanted = {"epochs": 4, "lr": 0.002, "batch_size": 3}
    more = {"micro_batch": 2, "warmup": 0.1, "weight_decay": 0.01}
    flags = [f"--{name}={value}" for name, value in (wanted | more).items()]
    for seed in (7, 8):
        result = call(task.script, *task.flags, "--max_len=48", *flags, f"--seed={seed}", cwd=tmp_path)
        assert "stop" in result.stderr
        assert seen[-1] == seen[-1] | wanted | more | {"seed": seed, "distributed": True, "max_len": 48}
    assert not torch.equal(*fresh)
    assert "stop" in call(task.script, cwd=tmp_path).stderr
    tiny = {finetune_cls: toy.FINETUNE_CLS, finetune_qa: toy.FINETUNE_QA}[task.module]
    assert seen[-1] == seen[-1] | {name: tiny[name] for name in wanted}


def test_a_copy_of_a_script_runs_its_own_functions(task, tmp_path, monkeypatch):
    loss_fn = "def loss_fn(model, tensors):\n    raise runs.UserError('the loss of the copy')\n"
    (tmp_path / f"my_{task.script}").write_text(inspect.getsource(task.module) + loss_fn)
    monkeypatch.syspath_prepend(tmp_path)
    refused("the loss of the copy", f"my_{task.script}", *task.flags, "--max_len=64", cwd=tmp_path)


def test_stages_of_a_seed_use_the_same_labels(task, tmp_path, monkeypatch):
    """--labelled: of so many texts, which the seed alone decides; masks that read labels read no others."""
    used = []

    def train(lm, pieces, **_):
        used.append(np.unique(pieces.text_ids).tolist())
        raise UserError("stop")

    def read(split, texts):
        used.append(list(texts))
        raise UserError("stop")

    monkeypatch.setattr(task.module, "finetune", train)
    monkeypatch.setattr(counts, "label_information", read)
    flags = [*task.flags, "--max_len=64"]
    for stage in ([task.script], ["pretrain.py", "--masker=label"]):
        for seed in (0, 1):
            result = call(*stage, *flags, "--labelled=7", f"--seed={seed}", f"--out={stage[0]}{seed}",
                          cwd=tmp_path)
            assert "stop" in result.stderr, result.stderr
    assert used[:2] == used[2:] and used[0] != used[1]
    assert [len(set(texts)) for texts in used] == [7] * 4
    too_many = call(task.script, *flags, "--labelled=1000", "--out=all", cwd=tmp_path)
    assert "--labelled=1000: train has" in too_many.stderr


def spoil(split, folder):
    """Takes the label of a text away, or moves an answer to where it does not stand."""
    file, = folder.glob(f"{split}.*")
    text = file.read_text()
    if file.suffix == ".jsonl":
        file.write_text(text.replace('"label"', '"other"', 1))
    else:
        file.write_text(re.sub(r'"answer_start": \d+', '"answer_start": 1', text, count=1))


def test_labels_are_needed_only_where_they_are_used(task, tmp_path):
    """Those of a test file where it is scored, and those of train in all but pre-training."""
    said = {finetune_cls: "there is no label", finetune_qa: "does not stand at offset 1"}[task.module]
    spoil("test", task.data)
    for command in (["data_prep.py", *task.flags], [task.script, *task.flags, "--max_len=32", "--epochs=1"]):
        result = call(*command, cwd=tmp_path)
        assert result.returncode == 2 and said in result.stderr and "--split=dev" in result.stderr
        succeed(*command, "--split=dev", cwd=tmp_path)
    spoil("train", task.data)
    pretrain = ["pretrain.py", *task.flags, "--max_len=32", "--max_steps=1"]
    for masker in ("random", "label"):
        succeed(*pretrain, f"--masker={masker}", cwd=tmp_path)
    for command in ([task.script, "--split=dev"], ["train_nmg.py"]):
        refused(said, *command, *task.flags, "--max_len=32", cwd=tmp_path)


def test_masks_that_read_more_labels_are_refused(lm_folder, cls_folder, tmp_path):
    """Those of another number of texts, or of other texts."""
    flags = [f"--dataset={cls_folder}", "--max_len=64"]
    for masker in ("label", "random"):
        succeed("pretrain.py", *flags, f"--lm={lm_folder}", f"--masker={masker}", "--labelled=12",
                "--max_steps=1", f"--out={masker}", cwd=tmp_path)
    for command, stopped in (("--lm=label --labelled=12", False), ("--lm=label", False),
                             ("--lm=label --labelled=8", True), ("--lm=label --labelled=12 --seed=1", True),
                             ("--lm=random --labelled=8", False)):
        result = call("finetune_cls.py", *flags, "--epochs=1", *command.split(), cwd=tmp_path)
        assert ("may have read other labels; pre-train it with" in result.stderr) == stopped
        assert result.returncode == (2 if stopped else 0)
    # Of edited data other texts are drawn.
    write_rows(cls_folder / "train.jsonl", runs.read_rows(cls_folder / "train.jsonl")[1:])
    refused("may have read other labels", "finetune_cls.py", *flags, "--lm=label", "--labelled=12",
            cwd=tmp_path)


def test_a_dev_split_that_pretraining_may_have_read_is_warned_of(tmp_path):
    """Where train was cut in another way; a test file stays. All stages read columns by the same flags."""
    rows = [{"review": f"text {i} of many", "stars": 1 + 4 * (i % 2), "user": i // 2} for i in range(40)]
    columns = ["--text=review", "--label=stars", "--doc=user"]
    for file in ("my.jsonl", "my/train.jsonl", "my/test.jsonl"):
        write_rows(tmp_path / file, rows)
    for data in ("my.jsonl", "my"):
        succeed("pretrain.py", f"--dataset={data}", *columns, "--max_steps=1", f"--out=of-{data}",
                cwd=tmp_path)
    for data, dev_share, warned in (("my.jsonl", 0.1, False), ("my.jsonl", 0.5, True), ("my", 0.5, False)):
        scored = succeed("finetune_cls.py", f"--dataset={data}", *columns, f"--lm=of-{data}", "--epochs=1",
                         f"--dev_share={dev_share}", cwd=tmp_path)
        assert ("was prepared in another way for the pre-training" in scored.stdout) == warned
    assert runs.read_rows(tmp_path / "results.jsonl")[0]["examples"] == 4
    succeed("train_nmg.py", "--dataset=my", *columns, "--val_share=0.2", "--episodes=1", cwd=tmp_path)


def test_policies_do_not_learn_from_dev(tmp_path):
    """Given the share that fine-tuning has."""
    file = write_rows(tmp_path / "my.jsonl", [{"text": f"text {i}", "label": "ab"[i % 2]} for i in range(40)])
    data, *_ = train_nmg.open_task(train_nmg.Config(dataset=str(file), dev_share=0.5))
    assert [len(data[split]) for split in ("train", "dev")] == [20, 20]


@pytest.mark.parametrize(("dataset", "dev_share", "warned"), [
    ("my.csv", 0.1, False), ("my.csv", 0.3, True), ("other.csv", 0.3, False)])
def test_beside_a_corpus_the_flag_tells_what_was_cut(dataset, dev_share, warned, capsys):
    """As the checksum is then that of two files."""
    pretraining = {"dataset": "my.csv", "data": "of both", "corpus": "c", "dev_share": 0.1, "masker": "long"}
    cfg = finetune_cls.Config(dataset=dataset, split="dev", dev_share=dev_share)
    finetune.check_pretraining(pretraining, cfg, "of my.csv")
    assert ("may have read texts of dev" in capsys.readouterr().out) == warned


# ---------------------------------------------------------------- the scripts

def test_a_row_twice_is_the_same(task, tmp_path, tok):
    """Prepare, mask, pre-train, fine-tune, score: two runs in two places agree in every byte of their
    predictions; a third in the same place does nothing. The line of results is the mean of
    predictions.jsonl, which the saved model makes again."""
    flags = [*task.flags, "--lr=1e-3"]
    pretrain = ["pretrain.py", *flags, "--masker=whole", "--out=adapted"]
    evaluate = [task.script, *flags, "--lm=adapted", "--epochs=3", "--out=o"]
    rows, predictions = [], []
    for place in (tmp_path / "one", tmp_path / "two"):
        place.mkdir()
        for command in (pretrain, evaluate):
            result = succeed(*command, cwd=place)
            assert "--max_len=66 instead of" in result.stdout
        [row] = runs.read_rows(place / "results.jsonl")
        rows.append(row | {"seconds": None})
        predictions.append((place / "o/predictions.jsonl").read_bytes())
    assert rows[0] == rows[1] and predictions[0] == predictions[1]
    row, lines = rows[0], runs.read_rows(tmp_path / "one/o/predictions.jsonl")
    assert row == row | {"masker": "whole", "lm": ".../lm", "row": None, "seed": 0, "split": "test",
                         "examples": len(lines), "predictions": "o/predictions.jsonl"}
    assert len(row["held_out_loss"]) == 2 and row["config"]["max_len"] == 66 and "torch" in row["versions"]

    model = task.module.AUTO_CLASS.from_pretrained(tmp_path / "one/o").eval()
    test = load(str(task.data), tok)["test"]
    again = task.module.predictions(model, task.module.pieces_of(test, 66))
    answer, metrics = {finetune_cls: ("predicted", ["accuracy", "macro_f1"]),
                       finetune_qa: ("answer", ["em", "f1"])}[task.module]
    assert [line[answer] for line in again] == [line[answer] for line in lines]
    assert row["metrics"] == metrics
    for metric in {*metrics} - {"macro_f1"}:
        assert row[metric] == pytest.approx(100 * np.mean([line[metric] for line in lines]))

    again = call(*evaluate, cwd=tmp_path / "two")
    assert "already done" in again.stdout and "keeps other scores" not in again.stdout
    # A line with other scores, as other code has written it, is kept, but not in silence.
    edited = row | {row["metrics"][0]: -1}
    write_rows(tmp_path / "two/results.jsonl", [edited])
    again = call(*evaluate, cwd=tmp_path / "two")
    assert "WARNING: results.jsonl keeps other scores of the same settings" in again.stdout
    assert runs.read_rows(tmp_path / "two/results.jsonl") == [edited]
    # In a table of this LM, further pre-training begins with it as it is.
    adapted = str(tmp_path / "two/adapted")
    for row, masker in ((None, "whole"), ("random", "whole"), ("none,--lr=1e-3", "none"), ("linear", "none")):
        origin = finetune.origin_of(adapted, row)["settings"]
        assert (origin["masker"], origin["lm"]) == (masker, ".../adapted" if masker == "none" else ".../lm")


# ---------------------------------------------------------------- rows without labels

@pytest.fixture
def classifier(lm_folder, cls_folder, tmp_path):
    """The folder of a fine-tuned model, by an absolute path, as all that went into it."""
    done = succeed("finetune_cls.py", f"--dataset={cls_folder}", f"--lm={lm_folder}", "--max_len=24",
                   "--epochs=1", f"--out={tmp_path / 'model'}", cwd=tmp_path)
    cut = "--max_len=24 cuts 25.0% of the texts of train, and 22.2% of those of test."
    assert done.stdout.count(cut) == 1
    return tmp_path / "model"


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_new_rows_are_predicted(suffix, classifier, cls_folder, tmp_path):
    """The texts of test again, and a blank one: the same predictions; every row is where and as it was."""
    texts = [row["text"] for row in runs.read_rows(cls_folder / "test.jsonl")]
    # The column of the texts is the one that the model was fine-tuned on.
    run = runs.read_run(classifier)
    run["settings"]["text"] = "body"
    (classifier / "run.json").write_text(json.dumps(run))
    rows = [{"id": f"0{i}", "body": text, "note": 'a, "b"'} for i, text in enumerate([*texts, " ", texts[0]])]
    if suffix == ".csv":
        pd.DataFrame(rows).to_csv(tmp_path / "new.csv", index=False)
    else:
        write_rows(tmp_path / "new.jsonl", rows)
    done = succeed("finetune_cls.py", f"--predict=new{suffix}", f"--lm={classifier}", cwd=tmp_path)
    # The length is that of fine-tuning; texts of other lengths would have other predictions.
    assert "10 of 11 rows have text" in done.stdout and "cut to 24 tokens" in done.stdout
    out = tmp_path / f"new.predicted{suffix}"
    read = functools.partial(pd.read_csv, dtype={"id": str}) if suffix == ".csv" else runs.read_rows
    found = pd.DataFrame(read(out))
    assert found[["id", "body", "note"]].to_dict("records") == rows
    scored = runs.read_rows(classifier / "predictions.jsonl")
    gold = [line["predicted"] for line in scored]
    assert found["predicted"].dropna().tolist() == [*gold, gold[0]] and found["predicted"].isna()[9]
    # A small model may predict one label for all texts, but no two of its probabilities are the same.
    for i, line in enumerate(scored):
        assert float(found.loc[i, f"p_{line['gold']}"]) == pytest.approx(np.exp(line["likelihood"]), abs=1e-5)
    # Flags that are given count, also with the values of their defaults (66 is all that the LM takes). A list
    # becomes JSON in a table.
    write_rows(tmp_path / "tagged.jsonl", [{"text": text, "tags": ["a", 'b"']} for text in texts])
    longer = succeed("finetune_cls.py", "--predict=tagged.jsonl", f"--lm={classifier}", "--text=text",
                     "--max_len=256", "--out=tagged.csv", cwd=tmp_path)
    assert "cut to 66 tokens" in longer.stdout
    assert json.loads(pd.read_csv(tmp_path / "tagged.csv")["tags"][0]) == ["a", 'b"']
    # Nothing is written over, and no column is.
    for flags, said in (([], "is there already"), ([f"--predict={out}"], "has a column 'predicted' already"),
                        (["--out=p.parquet"], "predictions are written as .csv, .tsv or .jsonl")):
        refused(said, "finetune_cls.py", f"--predict=new{suffix}", f"--lm={classifier}", *flags, cwd=tmp_path)


def test_new_questions_are_answered(lm_folder, qa_folder, tmp_path):
    """Those of test again, as they are, in rows, and with contexts in a column that --text names."""
    succeed("finetune_qa.py", f"--dataset={qa_folder}", f"--lm={lm_folder}", "--max_len=48", "--epochs=1",
            "--out=o", cwd=tmp_path)
    lines = runs.read_rows(tmp_path / "o/predictions.jsonl")
    asked = json.loads((qa_folder / "test.json").read_text())["data"][0]["paragraphs"]
    # A question needs no name.
    rows = [{"mine": 7, "context": part["context"], "question": part["qas"][0]["question"]} for part in asked]
    titled = [row | {"passage": row["context"], "context": "a title"} for row in rows]
    write_rows(tmp_path / "flat.jsonl", rows)
    write_rows(tmp_path / "titled.jsonl", titled)
    for file, flags, own in ((qa_folder / "test.json", [], {"id": "q1"}), ("flat.jsonl", [], rows[1]),
                             ("titled.jsonl", ["--text=passage"], titled[1])):
        succeed("finetune_qa.py", f"--predict={file}", *flags, "--lm=o", "--out=p.jsonl", cwd=tmp_path)
        found = runs.read_rows(tmp_path / "p.jsonl")
        assert [row["predicted"] for row in found] == [line["answer"] for line in lines]
        assert [row["score"] for row in found] == pytest.approx([line["score"] for line in lines], abs=1e-4)
        assert all(0 < row["probability"] < 1 for row in found)
        assert found[1] == found[1] | own
        (tmp_path / "p.jsonl").unlink()
    # A row without a context stays, and has no answer.
    write_rows(tmp_path / "blank.jsonl", [rows[0], rows[1] | {"context": " "}])
    succeed("finetune_qa.py", "--predict=blank.jsonl", "--lm=o", "--out=b.jsonl", cwd=tmp_path)
    assert [row["predicted"] is None for row in runs.read_rows(tmp_path / "b.jsonl")] == [False, True]
    # A context of which the tokenizer keeps nothing.
    write_rows(tmp_path / "none.jsonl", [rows[0], rows[1] | {"context": "\u200b"}])
    refused("the tokenizer drops every character", "finetune_qa.py", "--predict=none.jsonl", "--lm=o",
            cwd=tmp_path)


def test_a_model_that_can_be_shared(classifier, cls_folder, tmp_path):
    """No file of it says where things lie. As an LM it lends its encoder; for another task it is none."""
    for file in classifier.glob("*.json*"):
        assert str(tmp_path) not in file.read_text(), file
    config = json.loads((classifier / "config.json").read_text())
    assert config["problem_type"] == "single_label_classification"
    assert config["label2id"] == {"cat": 0, "dog": 1, "long": 2, "short": 3}
    card = ModelCard.load(classifier / "README.md")
    assert "# lm, fine-tuned on data" in card.text and "--dataset=.../data" in card.text
    assert "Scores on test (9 examples), in percent: accuracy" in card.text
    # What lies on this machine is nothing on the hub.
    assert card.data.base_model is None and card.data.datasets is None
    flags = [f"--dataset={cls_folder}", f"--lm={classifier}", "--epochs=1"]
    more = call("finetune_cls.py", *flags, cwd=tmp_path)
    assert "NEWLY INITIALIZED" in more.stdout and ", classifier.bias)" in more.stdout
    refused("is a BertForSequenceClassification", "finetune_qa.py", f"--predict={cls_folder}/test.jsonl",
            f"--lm={classifier}", cwd=tmp_path)


@pytest.mark.slow
def test_two_processes_give_one_result(tmp_path, lm_folder, cls_folder):
    said = side_by_side(ranks(2), "finetune_cls.py", f"--dataset={cls_folder}", f"--lm={lm_folder}",
                        "--max_len=48", "--epochs=2", "--lr=1e-3", "--out=o", cwd=tmp_path)
    assert len(runs.read_rows(tmp_path / "results.jsonl")) == 1
    assert len(runs.read_rows(tmp_path / "o/predictions.jsonl")) == 9
    assert "".join(said).count("Scores on test (9 examples)") == 1


def test_results_that_are_there_stay(tmp_path):
    """Each settings once; a blank line is none, and nothing is glued to a line without newline."""
    results = tmp_path / "results.jsonl"
    results.write_text('\n{"seed": 7}')
    # Rows of other names are other lines, or run_all.sh would not find theirs.
    for seed, row in ((1, None), (2, None), (1, None), (1, "x"), (1, "x")):
        finetune.check_results(results)
        run = Run(tmp_path / str(seed), {"dataset": "d", "seed": seed, "split": "test",
                                         "pretraining": {"lm": "base", "masker": "whole"}})
        if not run.done:
            run.finish(scores={"accuracy": 50.0}, examples=8, held_out_loss=[3.0, 2.5], seconds={"train": 1})
        finetune.add_result(results, run, row)
    assert [line["seed"] for line in runs.read_rows(results)] == [7, 1, 2, 1]


# ---------------------------------------------------------------- a third kind of task: one file of a user's

@pytest.fixture
def ner(tmp_path, monkeypatch):
    """The module, and CoNLL files in which a name and the attribute behind it are a person."""
    rng = random.Random(0)
    (tmp_path / "conll").mkdir()
    for split, n in (("train", 200), ("dev", 20), ("test", 30)):
        text = "-DOCSTART- -X- O\n\n"
        for _ in range(n):
            lines = [f"{word} NN O\n" for word in rng.choices(toy.ALL_FILLERS, k=6)]
            person = f"{rng.choice(toy.ALL_NAMES)} NN B-PER\n{rng.choice(toy.ALL_ATTRIBUTES)} NN I-PER\n"
            lines.insert(rng.randrange(6), person)
            text += "".join(lines) + "\n"
        (tmp_path / f"conll/{split}.txt").write_text(text)
    monkeypatch.syspath_prepend(ROOT / "docs")
    import finetune_ner
    return finetune_ner


def test_tags_and_entities(ner):
    # The tokens are Anna - Maria, and two that hold the blank before them.
    arrays = {"char_end": [np.array([4, 5, 10, 16, 20])]}
    [tag] = ner.tag_arrays([{"text": "Anna-Maria Smith sat", "tags": [1, 2, 0]}], arrays)["tag"]
    assert [*tag] == [1, -100, -100, 2, 0]
    lines = [{"gold": ["B-PER", "I-PER", "I-ORG"], "predicted": ["O", "B-PER", "B-PER"]}]
    assert ner.entities(lines, "gold") == {(0, 0, "B-PER I-PER")}
    assert ner.entities(lines, "predicted") == {(0, 1, "B-PER"), (0, 2, "B-PER")}


@pytest.mark.slow
@pytest.mark.training
def test_a_policy_is_learned_for_a_third_kind_of_task(ner, tmp_path):
    succeed("train_nmg.py", "--dataset=conll", "--contexts=60", "--docs=60", "--ft_epochs=6",
            "--ft_lr=2e-3", "--episodes=1", "--out=o", cwd=tmp_path)
    [row] = runs.read_rows(tmp_path / "o/metrics.jsonl")
    assert row["learner_f1"] > 50


@pytest.mark.training
def test_an_lm_is_fine_tuned_and_scored(ner, tmp_path):
    succeed("finetune_ner.py", "--lr=2e-3", cwd=tmp_path)
    [row] = runs.read_rows(tmp_path / "results.jsonl")
    assert (row["split"], row["examples"]) == ("test", 30) and row["f1"] > 80
    made = succeed("report.py", cwd=tmp_path)
    assert f"| none | {row['f1']:.2f} |" in made.stdout
