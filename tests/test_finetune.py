"""EM and F1 against torchmetrics, predictions against brute force, and both scripts as a user runs them."""
import errno
import importlib
import json
import signal
import string

import numpy as np
import pytest
import torch
from conftest import GPU, TEXTS, call, fast_tokenizer, kill_when, needs_gpu, random_lm, run, squad
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.text import SQuAD
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, get_linear_schedule_with_warmup

import data_prep
import finetune_cls
import finetune_qa
import loop
import pretrain
from data_prep import Specials, gather, heads, windows

answer = st.text(alphabet=st.sampled_from("aAbt heTn,.-'é 1"), max_size=15)


@given(st.lists(st.tuples(answer, st.lists(answer, min_size=1, max_size=4)), min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_em_and_f1_are_torchmetrics(cases):
    metric = SQuAD()
    metric.update([{"id": str(i), "prediction_text": said} for i, (said, _) in enumerate(cases)],
                  [{"id": str(i), "answers": {"text": gold, "answer_start": [0] * len(gold)}} for i, (_, gold) in enumerate(cases)])
    theirs, ours = metric.compute(), np.mean([finetune_qa.em_f1(said, gold) for said, gold in cases], axis=0)
    assert np.allclose(100 * ours, [theirs["exact_match"], theirs["f1"]], atol=1e-4)


def test_em_and_f1_by_hand():
    assert finetune_qa.em_f1("The Denver Broncos!", ["denver broncos"]) == (1, 1)
    assert finetune_qa.em_f1("Denver", ["the Denver Broncos", "Carolina"]) == (0, 2 / 3)
    assert finetune_qa.em_f1("", ["a"]) == (1, 1)               # an article alone is nothing, as in the official script
    assert finetune_qa.em_f1("x" + string.punctuation, ["x"]) == (1, 1)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=40))
@settings(max_examples=100, deadline=None)
def test_scores_are_torchmetrics(pairs):
    gold, said = np.array(pairs).T
    ours = finetune_cls.scores(gold, said)
    g, s = torch.tensor(gold), torch.tensor(said)
    used = len(np.union1d(gold, said))
    accuracy = MulticlassAccuracy(5, average="micro")(s, g).item()
    micro, each = MulticlassF1Score(5, average="micro")(s, g).item(), MulticlassF1Score(5, average="none")(s, g).sum().item()
    assert np.allclose([ours["accuracy"], ours["micro_f1"], ours["macro_f1"]], [100 * accuracy, 100 * micro, 100 * each / used], atol=1e-4)


def test_the_best_spans_are_those_of_brute_force(qa_folder):
    """All spans of all windows of a question, scored one by one from the model's own logits."""
    tok = fast_tokenizer("wordpiece")
    split = data_prep.load(str(qa_folder), tok)["test"]
    lm = random_lm("bert", len(tok))
    pieces = windows(split, Specials.of(tok), 40, 10, 20)
    from transformers import AutoModelForQuestionAnswering

    from loop import with_head
    model = with_head(lm, AutoModelForQuestionAnswering, 0)
    torch.nn.init.normal_(model.qa_outputs.weight, std=3.0)
    got = finetune_qa.predict(model, pieces, max_answer=7, n_best=3, fast=False, quiet=True)
    for q in range(len(split.q_row)):
        spans = {}
        for r in np.flatnonzero(pieces.question == q):
            batch = gather(pieces, np.array([r]))
            with torch.inference_mode():
                out = model.eval()(**pretrain.inputs(batch))
            for s in np.flatnonzero(batch.inside[0]):
                for e in range(s, min(s + 7, batch.inside.shape[1])):
                    if batch.inside[0, e]:
                        key = (batch.at[0, s], batch.at[0, e])
                        spans[key] = max(spans.get(key, -np.inf), (out.start_logits[0, s] + out.end_logits[0, e]).item())
        best = sorted(spans.values(), reverse=True)[:3]
        assert np.allclose([a["score"] for a in got[q]], best, atol=1e-4)
        first, last = max(spans, key=spans.get)
        assert got[q][0]["text"] == split.raw(split.q_row[q])[split.begin[first]:split.end[last]]


def test_targets_point_at_the_answer(qa_folder):
    tok = fast_tokenizer("bpe")
    split = data_prep.load(str(qa_folder), tok)["train"]
    pieces = windows(split, Specials.of(tok), 48, 12, 20)
    batch = gather(pieces, np.arange(len(pieces)))
    targets = finetune_qa.targets(batch, pieces).numpy()
    found = set()
    for r, (s, e) in enumerate(targets):
        if s:
            text = split.raw(pieces.row[r])[split.begin[batch.at[r, s]]:split.end[batch.at[r, e]]]
            assert text.strip() == split.questions[pieces.question[r]]["scored"][0]
            found.add(pieces.question[r])
        else:
            assert e == 0
    assert found == set(range(len(split.q_row)))


def test_a_head_learns(tmp_path, cls_folder):
    """Fine-tuning fits what can be fitted: a few examples, many epochs."""
    (tmp_path / "train.json").write_text(json.dumps(squad(TEXTS[:3], ["mat", "big ones", "many pieces"])))
    tok = fast_tokenizer("wordpiece")
    lm, specials = random_lm("bert", len(tok)), Specials.of(tok)
    data = data_prep.load(str(cls_folder), tok)
    pieces = data_prep.heads(data["train"], specials, 64)
    model = finetune_cls.finetune(lm, pieces, 4, epochs=150, lr=5e-3, batch_size=8, quiet=True)
    assert (finetune_cls.predict(model, pieces, quiet=True).argmax(1) == data["train"].label).mean() > 0.95
    split = data_prep.load(str(tmp_path / "train.json"), tok)["train"]
    pieces = windows(split, specials, 64, 16, 20)
    lm.config.num_labels = 4                                        # as that of a LM that was fine-tuned to classify
    reader = finetune_qa.finetune(lm, pieces, epochs=150, lr=5e-3, batch_size=8, quiet=True)
    said = finetune_qa.predict(reader, pieces, quiet=True)
    assert np.mean([finetune_qa.em_f1(p[0]["text"], q["scored"])[0] for p, q in zip(said, split.questions, strict=True)]) == 1


# ---------------------------------------------------------------- the scripts

@pytest.mark.parametrize("gpu", ["", pytest.param(GPU, marks=needs_gpu)], ids=["CPU", "GPU"])
@pytest.mark.parametrize("script", ["finetune_cls.py", "finetune_qa.py"])
def test_the_whole_row_twice_is_the_same_to_the_last_digit(script, gpu, tmp_path, lm_folder, cls_folder, qa_folder):
    """prepare, mask, pre-train, fine-tune, score: two runs in two places agree; a third in the same place does nothing, nor
    would it if the LM had been made again."""
    data = cls_folder if script == "finetune_cls.py" else qa_folder
    rows = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        for command in (["pretrain.py", f"--lm={lm_folder}", "--masker=whole", "--max_len=64", "--lr=1e-3", "--out=adapted"],
                        [script, "--lm=adapted", "--lr=1e-3", "--epochs=3", "--max_len=64", "--save_model"]):
            where = {"cwd": tmp_path / place} | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
            result = (run if place == "one" or gpu else call)(command[0], f"--dataset={data}", *command[1:], **where)
            assert result.returncode == 0, result.stderr
        rows.append(json.loads((tmp_path / place / "results.jsonl").read_text()))
    scores = [{k: v for k, v in r.items() if k in ("accuracy", "macro_f1", "em", "f1", "masker", "lm", "dataset")} for r in rows]
    assert scores[0] == scores[1] and scores[0]["masker"] == "whole" and scores[0]["lm"] == str(lm_folder)
    made = json.loads((tmp_path / "two/adapted/run.json").read_text())
    (tmp_path / "two/adapted/run.json").write_text(json.dumps(made | {"seconds": made["seconds"] + 100}))       # adapted again, on a slower day
    again = call(script, f"--dataset={data}", "--lm=adapted", "--lr=1e-3", "--epochs=3", "--max_len=64", "--save_model", cwd=tmp_path / "two")
    assert "already done" in again.stdout and len((tmp_path / "two/results.jsonl").read_text().splitlines()) == 1
    weights = pretrain.weights_of(str(tmp_path / "two/adapted"))
    assert weights == pretrain.weights_of(str(tmp_path / "one/adapted")) != pretrain.weights_of(str(lm_folder)) == made["weights"]
    examples = [json.loads(line) for line in open(tmp_path / "one" / rows[0]["predictions"])]
    if script == "finetune_cls.py":
        from transformers import AutoModelForSequenceClassification as Auto
        assert 100 * np.mean([e["correct"] for e in examples]) == rows[0]["accuracy"]
    else:
        from transformers import AutoModelForQuestionAnswering as Auto
        assert np.isclose(100 * np.mean([e["f1"] for e in examples]), rows[0]["f1"])
    folder = next((tmp_path / "one/runs").iterdir())
    known = {"base": str(folder), "weights": pretrain.weights_of(str(folder)), "masker": "none"}
    assert {k: v for k, v in pretrain.lineage(str(folder)).items() if v is not None} == known
    assert Auto.from_pretrained(folder).config.architectures
    assert (folder / "model.safetensors").exists()


def test_nothing_of_the_users_is_overwritten(tmp_path, lm_folder, cls_folder):
    """A folder with other things in it, the LM's own folder, another run's folder, and a damaged results.jsonl are refused."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work/thesis.tex").write_text("years")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/.gitkeep").touch()
    flags = [f"--dataset={cls_folder}", f"--lm={lm_folder}", "--epochs=1", "--max_len=32"]
    for out in ("work", "kept", str(lm_folder)):
        result = call("finetune_cls.py", *flags, "--save_model", f"--out={out}", cwd=tmp_path)
        assert result.returncode == 2 and "is not a run of this script" in result.stderr
    assert (tmp_path / "work/thesis.tex").read_text() == "years"
    assert call("finetune_cls.py", *flags, "--out=a", cwd=tmp_path).returncode == 0
    result = call("finetune_cls.py", *flags, "--out=a", "--seed=1", cwd=tmp_path)
    assert result.returncode == 2 and "seed=0 there, 1 here" in result.stderr
    with open(tmp_path / "results.jsonl", "a") as f:
        f.write('{"half a li')
    result = call("finetune_cls.py", *flags, "--seed=1", cwd=tmp_path)
    assert result.returncode == 2 and "results.jsonl:2: not a line of results" in result.stderr and "Traceback" not in result.stderr
    (tmp_path / "results.jsonl").write_text((tmp_path / "results.jsonl").read_text().splitlines()[0] + "\n")
    assert call("finetune_cls.py", *flags, "--seed=1", cwd=tmp_path).returncode == 0          # done already: only the line was missing
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2


def test_killed_in_fine_tuning_and_started_again(tmp_path, lm_folder, qa_folder):
    """SIGKILL after the first checkpoint; the same command again gives the undisturbed predictions and leaves no checkpoint."""
    flags = [f"--dataset={qa_folder}", f"--lm={lm_folder}", "--epochs=60", "--batch_size=4", "--lr=1e-3", "--max_len=48"]
    assert call("finetune_qa.py", *flags, "--out=clean", cwd=tmp_path).returncode == 0
    checkpoint = tmp_path / ".killed.checkpoint.pt"
    kill_when(checkpoint.exists, "finetune_qa.py", *flags, "--out=killed", cwd=tmp_path)
    again = call("finetune_qa.py", *flags, "--out=killed", cwd=tmp_path)
    assert "resuming at step" in again.stdout and not checkpoint.exists()
    assert (tmp_path / "clean/predictions.jsonl").read_text() == (tmp_path / "killed/predictions.jsonl").read_text()


@pytest.mark.parametrize(("script", "flags", "said"), [
    ("finetune_cls.py", ["--dataset=toyqa"], "for this data: finetune_qa.py"),
    ("finetune_qa.py", ["--dataset=toycls"], "for this data: finetune_cls.py"),
    ("finetune_cls.py", ["--split=tset"], "--split=tset: must be dev or test"),
    ("finetune_cls.py", ["--split=corpus"], "--split=corpus: must be dev or test"),
    ("finetune_qa.py", ["--overlap=-5"], "--overlap=-5: must be 0 or more"),
    ("finetune_qa.py", ["--max_answer=0"], "--max_answer=0: must be positive"),
    ("finetune_cls.py", ["--lm=empty"], "--lm=empty: no config.json"),
    ("finetune_qa.py", ["--bach_size=3"], "did you mean 'batch_size'"),
])
def test_wrong_flags(script, flags, said, tmp_path):
    (tmp_path / "empty").mkdir()
    result = call(script, *flags, cwd=tmp_path)
    assert result.returncode == 2 and said in result.stderr and "Traceback" not in result.stderr
    assert [f.name for f in tmp_path.iterdir()] == ["empty"]


def test_dropout_is_dropout():
    """The quick mask: the right share of zeros, the rest scaled, reproducible by torch's seed, no gradient where dropped, none in eval."""
    x = torch.ones(400, 501, requires_grad=True)
    torch.manual_seed(1)
    y = loop.dropout16(x, 0.1)
    kept = (y != 0).float()
    assert abs(kept.mean().item() - 0.9) < 5 * np.sqrt(0.09 / x.numel())
    assert torch.allclose(y, kept / 0.9)
    assert abs(np.corrcoef(kept[:, :-1].ravel(), kept[:, 1:].ravel())[0, 1]) < 0.01
    y.sum().backward()
    assert torch.allclose(x.grad, kept / 0.9)
    torch.manual_seed(1)
    assert torch.equal(loop.dropout16(x, 0.1), y)
    assert loop.dropout16(x, 0.1, training=False) is x
    with loop.quick_dropout(True):
        torch.manual_seed(1)
        assert torch.equal(torch.nn.Dropout(0.1)(x), y)
    torch.manual_seed(1)
    assert not torch.equal(torch.nn.Dropout(0.1)(x), y)


def test_batches_come_in_random_order_anew_each_epoch():
    length = np.random.default_rng(0).integers(3, 90, 256)
    mean = [[length[rows].mean() for e, rows in loop.batches(length, 8, 2, seed=1) if e == epoch] for epoch in range(2)]
    assert all(abs(np.corrcoef(np.arange(32), m)[0, 1]) < 0.6 for m in mean) and mean[0] != mean[1]         # sorted by length: 0.999


def test_a_loss_that_is_not_finite_ends_the_run():
    with pytest.raises(loop.UserError, match="MLM: the loss became nan at step 2 of 2; a smaller --lr may help"):
        loop.fit(torch.nn.Linear(2, 1), np.ones(8), lambda _, rows: {"input_ids": torch.ones(len(rows), 2), "labels": torch.ones(len(rows))},
                 lambda model, t: model(t["input_ids"]).mean() * float("nan"), epochs=1, batch_size=4, lr=0.1, desc="MLM", quiet=True)


def test_a_checkpoint_of_another_configuration_is_not_gone_on_from(tmp_path):
    x, file = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)), tmp_path / "c.pt"

    def trained(lr, checkpoint=None, stop=None):
        def loss_of(model, t):
            seen.append(1)
            if len(seen) == stop:
                signal.raise_signal(signal.SIGINT)
            return model(t["input_ids"]).square().mean()

        model, seen = torch.nn.Linear(2, 1, bias=False), []
        torch.nn.init.ones_(model.weight)
        loop.fit(model, np.ones(8), lambda _, rows: {"input_ids": x[rows], "labels": torch.ones(len(rows))}, loss_of, epochs=4, batch_size=4,
                 lr=lr, checkpoint=checkpoint, key=f"lr={lr}", quiet=True)
        return model.weight

    with pytest.raises(KeyboardInterrupt):
        trained(0.1, file, 3)
    assert file.exists() and torch.equal(trained(0.01, file), trained(0.01))


def test_labels_follow_their_texts(cls_folder):
    """In a selection, as the sub-tasks of train_nmg.py are."""
    tok = fast_tokenizer("wordpiece")
    pieces = heads(data_prep.load(str(cls_folder), tok)["train"], Specials.of(tok), 48).take(np.array([5, 2]))
    assert finetune_cls.tensors(pieces, np.array([1, 0]))["labels"].tolist() == [2, 1]                      # text i has class i % 4


@pytest.mark.parametrize("kind", ["cls", "qa"])
def test_predictions_are_without_dropout(kind, cls_folder, qa_folder):
    """Of a model as fine-tuning leaves it, which is in training."""
    tok = fast_tokenizer("wordpiece")
    lm, specials = random_lm("bert", len(tok), 0.5), Specials.of(tok)
    if kind == "cls":
        pieces = heads(data_prep.load(str(cls_folder), tok)["test"], specials, 48)
        model = loop.with_head(lm, AutoModelForSequenceClassification, 0, num_labels=4)
        said = [finetune_cls.predict(model.train(), pieces, quiet=True) for _ in range(2)]
    else:
        pieces = windows(data_prep.load(str(qa_folder), tok)["test"], specials, 48, 12, 20)
        model = loop.with_head(lm, AutoModelForQuestionAnswering, 0)
        said = [[s["score"] for found in finetune_qa.predict(model.train(), pieces, quiet=True) for s in found] for _ in range(2)]
        np.testing.assert_array_equal(*(finetune_qa.positions(model.train(), pieces)[1] for _ in range(2)))
    np.testing.assert_array_equal(*said)


@pytest.mark.parametrize("script", ["pretrain", "finetune_cls", "finetune_qa"])
def test_every_knob_reaches_the_optimiser(script, lm_folder, cls_folder, qa_folder, tmp_path, monkeypatch):
    """Above all the seed, without which all seeds of a row are one, and the key by which a checkpoint knows its run."""
    seen, heads_of, knobs = [], [], {"epochs": 4, "lr": 0.002, "batch_size": 3, "fast": False}

    def stop(model, *_, **given):
        seen.append(given)
        heads_of.append([w for n, w in model.named_parameters() if n in ("classifier.weight", "qa_outputs.weight")])
        raise loop.UserError("stop")

    monkeypatch.setattr(importlib.import_module(script), "fit", stop)
    for seed in (7, 8):
        flags = [f"--{k}={v}" for k, v in (knobs | {"seed": seed, "max_len": 48, "lm": lm_folder}).items()]
        assert "stop" in call(f"{script}.py", f"--dataset={qa_folder if 'qa' in script else cls_folder}", *flags, cwd=tmp_path).stderr
        assert knobs | {"seed": seed} == {k: seen[-1][k] for k in (*knobs, "seed")}
    assert seen[0]["key"] != seen[1]["key"]
    assert len(heads_of[0]) == (script != "pretrain") and not any(torch.equal(a, b) for a, b in zip(*heads_of, strict=True))


def test_batches_cover_every_row_once_an_epoch():
    length = np.random.default_rng(0).integers(3, 90, 1000)
    plan = list(loop.batches(length, 8, 3, seed=1))
    for epoch in range(3):
        assert sorted(np.concatenate([rows for e, rows in plan if e == epoch])) == list(range(1000))
    again, other = list(loop.batches(length, 8, 3, seed=1)), list(loop.batches(length, 8, 3, seed=2))
    assert all((a[1] == b[1]).all() for a, b in zip(plan, again, strict=True)) and any((a[1] != b[1]).any() for a, b in zip(plan, other, strict=True))
    padded = sum(length[rows].max() * len(rows) for _, rows in plan)
    assert padded < 1.1 * 3 * length.sum()
    covered = np.concatenate(list(loop.by_length(length, 500)))
    assert sorted(covered) == list(range(1000)) and (np.diff(length[covered]) <= 0).all()


def test_a_run_that_another_process_is_at_work_on(lm_folder, cls_folder, tmp_path):
    """The second of two equal commands at once is refused; when the first is gone, it runs, and no lock is left."""
    flags = [f"--dataset={cls_folder}", f"--lm={lm_folder}", "--out=o"]
    with loop.lock(tmp_path / ".o.lock", wait=False):
        assert loop.lock(tmp_path / ".o.lock", wait=False) is None
        result = call("finetune_cls.py", *flags, cwd=tmp_path)
        assert result.returncode == 2 and "another process is at work on it" in result.stderr and not (tmp_path / "o").exists()
    assert call("finetune_cls.py", *flags, cwd=tmp_path).returncode == 0 and not (tmp_path / ".o.lock").exists()


def test_a_file_system_without_locks(monkeypatch, tmp_path):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    loop.lock(tmp_path / "a", wait=False).close()


def test_the_same_configuration_in_two_folders_keeps_the_scores_of_both(lm_folder, cls_folder, tmp_path):
    for out in ("a", "b"):
        assert call("finetune_cls.py", f"--dataset={cls_folder}", f"--lm={lm_folder}", f"--out={out}", cwd=tmp_path).returncode == 0
    rows = [json.loads(line) for line in open(tmp_path / "results.jsonl")]
    assert len({row["examples"] for row in rows}) == 2
    for row in rows:
        assert 100 * np.load(tmp_path / row["examples"]).mean() == pytest.approx(row["accuracy"])


def test_seconds_are_those_of_all_processes_of_a_run(tmp_path):
    """What a killed process spent is in its checkpoint and counts."""
    file, model = tmp_path / "c.pt", torch.nn.Linear(2, 1)
    assert loop.spent(file, "k") == 0.0

    def fit(limit):
        def loss_of(model, t):
            if len(seen) == limit:
                signal.raise_signal(signal.SIGINT)
            seen.append(1)
            return model(t["input_ids"]).mean()

        seen = []
        with pytest.raises(KeyboardInterrupt):
            loop.fit(model, np.ones(4), lambda *_: {"input_ids": torch.ones(4, 2), "labels": torch.ones(4)}, loss_of, epochs=4, batch_size=4,
                     lr=0.1, checkpoint=file, key="k", quiet=True)

    fit(0)
    torch.save(torch.load(file, weights_only=True) | {"seconds": 1000.0}, file)
    fit(1)
    assert 1000 < loop.spent(file, "k") < 1100 and loop.spent(file, "other") == 0.0


def test_the_optimiser_is_that_of_the_paper():
    """AdamW without weight decay, no warm-up, linear decay to 0, norm clipped to 1: torch's and Hugging Face's own."""
    torch.manual_seed(0)
    x, y, ours, theirs = 9 * torch.randn(12, 5), torch.randn(12), torch.nn.Linear(5, 1), torch.nn.Linear(5, 1)
    theirs.load_state_dict(ours.state_dict())
    plan = list(loop.batches(np.ones(12), 4, 3, seed=5))
    loop.fit(ours, np.ones(12), lambda _, rows: {"input_ids": x[rows], "labels": y[rows]}, lambda model, t: (
        model(t["input_ids"])[:, 0] - t["labels"]).square().mean(), epochs=3, batch_size=4, lr=0.1, seed=5, fast=False, quiet=True)
    opt = torch.optim.AdamW(theirs.parameters(), lr=0.1, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(opt, 0, 9)
    for _, rows in plan:
        opt.zero_grad()
        (theirs(x[rows])[:, 0] - y[rows]).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        opt.step()
        schedule.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_lm_without_a_model_for_the_task():
    from transformers import AutoModelForQuestionAnswering, EsmConfig, EsmForMaskedLM
    lm = EsmForMaskedLM(EsmConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, pad_token_id=1))
    with pytest.raises(loop.UserError, match="the LM is a EsmForMaskedLM: transformers has no model of its kind for this task"):
        loop.with_head(lm, AutoModelForQuestionAnswering, 0)


@pytest.mark.parametrize("kind", ["cls", "qa"])
def test_the_plain_path_computes_the_same_fine_tuning(kind, cls_folder, qa_folder, monkeypatch):
    monkeypatch.setattr(loop, "has_bf16", lambda kind: False)
    tok, models = fast_tokenizer("wordpiece"), []
    lm, specials, knobs = random_lm("bert", len(tok)), Specials.of(tok), {"epochs": 1, "lr": 1e-3, "max_len": 48, "quiet": True}
    for fast in (True, False):
        if kind == "cls":
            pieces = heads(data_prep.load(str(cls_folder), tok)["train"], specials, 48)
            models.append(finetune_cls.finetune(lm, pieces, 4, fast=fast, **knobs))
        else:
            pieces = windows(data_prep.load(str(qa_folder), tok)["train"], specials, 48, 12, 20).take(np.arange(16))
            models.append(finetune_qa.finetune(lm, pieces, fast=fast, **knobs))
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=0)
