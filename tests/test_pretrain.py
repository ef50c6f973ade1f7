"""The loss against Hugging Face's own, masks, LMs of every architecture; the script, also after a kill."""
import math
import os
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, TEXTS, call, corpus_of, fast_tokenizer, kill_when, names, random_lm, same, succeed
from safetensors.torch import load_file

import data_prep
import finetune
import finetune_cls
import finetune_qa
import maskers
import pretrain
from nmg import policies
from support import models, runs, toy
from support.data import blocks
from support.runs import UserError

KINDS = ["bert", "distilbert", "roberta", "electra", "deberta", "modernbert", "albert", "mpnet", "longformer"]


@pytest.fixture
def pieces(tmp_path, tok):
    """60 blocks of up to 32 tokens."""
    return blocks(corpus_of(tmp_path, tok, *[f"{TEXTS[i % 4]} {i}" for i in range(40)]), 32)


def mask_batch(pieces, masker=maskers.random, n=8):
    """The first n pieces, masked with p = 0.15 and seed 0."""
    return pretrain.mask_batch(pieces, masker, 0.15, 0, 0, np.arange(n))


def huggingface_loss(model, batch, mask, corrupted):
    """The mean loss of the masked tokens, by the model's own code."""
    ids = torch.from_numpy(batch.input_ids.astype(np.int64))
    labels = torch.where(torch.from_numpy(mask), ids, -100)
    return model(input_ids=torch.from_numpy(corrupted.astype(np.int64)),
                 attention_mask=torch.from_numpy(batch.attention_mask.astype(np.int64)), labels=labels).loss


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# ---------------------------------------------------------------- the loss

@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_hugging_faces_own(kind, tok, pieces):
    """The sum over the masked tokens, for every architecture, though the head runs on these alone; and so
    are the gradients. Maskers that read the LM can read it, too."""
    model = random_lm(kind, len(tok)).eval()
    masked = mask_batch(pieces)
    tensors = pretrain.mlm_tensors(*masked)
    count = masked[1].sum()
    assert len(tensors["labels"]) == count > 8
    ours, theirs = pretrain.mlm_loss(model, tensors), huggingface_loss(model, *masked)
    assert abs(ours.item() / count - theirs.item()) < 1e-5
    torch.testing.assert_close(gradients(model, ours / count), gradients(model, theirs), atol=1e-5, rtol=0)
    lm, shape = models.LMReader(model), masked[0].input_ids.shape
    assert lm(masked[0]).shape == (*shape, 32) and lm.per_token(masked[0], surprise).shape == shape


def test_the_loss_on_held_out_text_is_the_mean_over_masked_tokens(tok, pieces):
    """Of a thousand blocks at most, without dropout, in a model that was in training."""
    many = pieces.take(np.arange(1500) % len(pieces))
    some = many.take(np.linspace(0, 1499, 1000).astype(int))
    model = random_lm("bert", len(tok), dropout=0.3).train()
    ours = pretrain.held_out_loss(model, many)
    theirs = huggingface_loss(model.cpu().eval(), *mask_batch(some, n=1000))
    assert ours == pytest.approx(theirs.item(), rel=1e-5)


# ---------------------------------------------------------------- masks

def test_masks_depend_on_seed_epoch_and_piece_alone(pieces):
    def masked(seed=0, epoch=0, order=range(8), p=0.15):
        _, mask, corrupted = pretrain.mask_batch(pieces, maskers.random, p, seed, epoch, np.array(order))
        return mask, corrupted

    mask, corrupted = masked()
    alone, corrupted_alone = masked(order=[5, 2])
    L = alone.shape[1]
    assert (alone == mask[[5, 2], :L]).all() and (corrupted_alone == corrupted[[5, 2], :L]).all()
    for changed in ({"epoch": 1}, {"seed": 1}):
        assert not (mask == masked(**changed)[0]).all()
        # Where all tokens are masked, corruption alone can differ.
        assert not (masked(p=1.0)[1] == masked(p=1.0, **changed)[1]).all()


def test_what_is_masked_does_not_tell_how_it_is_corrupted(pieces):
    """80 % of the masked tokens become [MASK], by random numbers that did not choose them."""
    corrupted = []
    for epoch in range(200):
        _, mask, ids = pretrain.mask_batch(pieces, maskers.random, 0.15, 0, epoch, np.arange(8))
        corrupted += ids[mask].tolist()
    share = np.mean(np.array(corrupted) == pieces.split.special.mask_id)
    assert len(corrupted) > 2000 and share == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("bad", [
    lambda batch: batch.maskable,                               # more than the budget
    lambda batch: np.indices(batch.maskable.shape)[1] == 0,     # [CLS], which may not be masked
    lambda batch: batch.input_ids,                              # no bool
    lambda batch: np.zeros_like(batch.maskable)[:, :-1],        # another shape
    lambda batch: torch.zeros(batch.maskable.shape, dtype=bool),
    lambda batch: None,
])
def test_a_masker_that_breaks_the_contract_is_told(bad, pieces):
    def masker(batch, budget, rng, lm=None):
        return bad(batch)

    with pytest.raises(UserError, match="the masker 'masker' must return a bool array"):
        mask_batch(pieces, masker)


@pytest.mark.parametrize("name", ["input_ids", "maskable", "word_ids", "readable_labels", "budget"])
def test_a_masker_cannot_change_the_batch(name, pieces):
    def masker(batch, budget, rng, lm=None):
        array = budget if name == "budget" else getattr(batch, name)
        with pytest.raises(FrozenInstanceError):
            setattr(batch, name, np.ones_like(batch.maskable))
        array[:] = 0
        return maskers.random(batch, budget, rng)

    with pytest.raises(ValueError, match="read-only"):
        mask_batch(pieces, masker)


@pytest.mark.parametrize("remask", [True, False])
def test_masks_and_corruption_anew_each_epoch_or_once(remask, pieces, monkeypatch):
    """In either case of the share p of each block."""
    spy = Mock(wraps=pretrain.mlm_tensors)
    monkeypatch.setattr(pretrain, "mlm_tensors", spy)
    pretrain.pretrain(random_lm("bert", 200), pieces, maskers.random, p=0.6, epochs=2, lr=1e-3,
                      batch_size=len(pieces), remask=remask)
    epochs = []
    for batch, mask, corrupted in [made.args for made in spy.call_args_list]:
        assert (mask.sum(1) == np.maximum(1, np.round(0.6 * batch.maskable.sum(1)))).all()
        order = np.argsort(batch.indices)
        epochs.append((mask[order], corrupted[order]))
    (mask, corrupted), (mask_again, corrupted_again) = epochs
    assert (mask == mask_again).all() == (not remask)
    assert (corrupted == corrupted_again).all() == (not remask)


def surprise(logits, input_ids):
    """(B, L) -log p of the tokens that stand in the text."""
    return -logits.log_softmax(-1).gather(-1, input_ids.long()[..., None])[..., 0]


@pytest.mark.parametrize("training", [True, False])
def test_a_masker_reads_the_lm_without_dropout(training, tok, pieces, monkeypatch):
    """Its states and its logits, of which it holds two rows of 8 here; it stays in training or evaluation."""
    batch = mask_batch(pieces)[0]
    model = random_lm("bert", len(tok), dropout=0.5).train(training)
    lm, rows = models.LMReader(model), []
    monkeypatch.setattr(models, "MOST_LOGITS", 2 * batch.input_ids.shape[1] * len(tok) + 1)
    model.register_forward_hook(lambda module, args, output: rows.append(len(output.logits)))
    hidden, scores = lm(batch), lm.per_token(batch, surprise)
    assert model.training == training and rows == [2, 2, 2, 2]
    assert hidden.shape == (*batch.input_ids.shape, 32) and not hidden.requires_grad
    model.cpu().eval()
    torch.testing.assert_close(hidden.cpu(), model.bert(**batch.tensors()).last_hidden_state)
    with torch.no_grad():
        expected = surprise(model(**batch.tensors()).logits, torch.tensor(batch.input_ids))
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


# ---------------------------------------------------------------- the LM

# With 66 rows of position embeddings; RoBERTa and its kin count from behind the padding id.
MOST = dict.fromkeys(KINDS, 66) | {"roberta": 65, "mpnet": 64, "longformer": 65}


@pytest.mark.parametrize("kind", KINDS)
def test_the_most_tokens_that_a_lm_takes(kind, tok, capsys):
    """The model runs on that many, and is never given more, which is said."""
    model, most = random_lm(kind, len(tok)).eval(), MOST[kind]
    model(input_ids=torch.full((1, most), 7))
    for wanted, given in ((20, 20), (most, most), (most + 1, most)):
        assert models.max_len_of(model, wanted, "ft_max_len") == given
        said = capsys.readouterr().out
        assert said.startswith(f"--ft_max_len={most} instead of {most + 1}") == (wanted > most)


@pytest.mark.parametrize("kind", KINDS)
def test_no_dropout_in_any_layer(kind, tok):
    model = random_lm(kind, len(tok), 0.3).train()
    config = model.config.to_dict()
    ids = torch.randint(7, len(tok), (2, 16), generator=torch.Generator().manual_seed(0))

    def difference_of_two_passes():
        logits = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            logits.append(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits)
        return (logits[0] - logits[1]).abs().max().item()

    assert difference_of_two_passes() > 0.01
    models.set_dropout(model, 0.0)
    assert difference_of_two_passes() == 0
    # Fine-tuning, which builds its model from the config, has it again.
    assert model.config.to_dict() == config


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_end_to_end(kind, tmp_path, cls_folder, qa_folder):
    """Pre-training and both fine-tunings of a folder of each kind; Hugging Face opens what was saved."""
    # Longformer wants three [SEP] around a question, as RoBERTa's tokenizer puts them.
    tokenizer = fast_tokenizer("bpe" if kind in ("roberta", "modernbert", "longformer") else "wordpiece")
    random_lm(kind, len(tokenizer), 0.1).save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    done = succeed("pretrain.py", f"--dataset={cls_folder}", "--lm=lm", "--masker=whole", "--lr=1e-3",
                   "--max_len=32", "--out=out", cwd=tmp_path)
    assert "NEWLY" not in done.stdout
    before = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "lm")
    lm = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert not same(before.state_dict(), lm.state_dict())

    for task, folder, examples in ((finetune_cls, cls_folder, 9), (finetune_qa, qa_folder, 5)):
        data = data_prep.load(str(folder), tokenizer)
        model = task.finetune(lm, task.pieces_of(data["train"], 48), epochs=1, lr=1e-3, batch_size=8)
        assert len(task.predictions(model, task.pieces_of(data["test"], 48))) == examples


# ---------------------------------------------------------------- the script

@pytest.fixture
def flags(lm_folder, cls_folder):
    """A short training of the small LM."""
    return [f"--dataset={cls_folder}", f"--lm={lm_folder}", "--lr=1e-3", "--batch_size=4", "--max_len=32"]


@pytest.mark.training
def test_what_a_run_leaves(tmp_path, flags, lm_folder):
    done = succeed("pretrain.py", *flags, "--masker=whole", "--out=o", cwd=tmp_path)
    assert names(tmp_path / "o") == ["README.md", "config.json", "model.safetensors", "run.json",
                                     "tokenizer.json", "tokenizer_config.json"]
    facts = runs.read_run(tmp_path / "o")
    wanted = {"masker": "whole", "p": 0.15, "epochs": 1, "lr": 1e-3, "max_len": 32,
              "weights": models.weights_of(str(lm_folder))}
    assert facts["settings"] == facts["settings"] | wanted
    before, after = facts["held_out_loss"]
    assert 0 < after < before and facts["seconds"] > 0
    assert f"{math.exp(before):.2f} before, {math.exp(after):.2f} after" in done.stdout
    assert f"{before:.3f} nats before, {after:.3f} after" in (tmp_path / "o/README.md").read_text()
    assert "WARNING" not in done.stdout
    worse = call("pretrain.py", *flags, "--masker=whole", "--lr=0.3", "--out=worse", cwd=tmp_path)
    assert "WARNING: the LM became worse on the text of dev" in worse.stdout


def test_none_hands_the_lm_on_as_it_is(tmp_path, flags, lm_folder):
    assert call("pretrain.py", *flags, "--masker=none", "--out=o", cwd=tmp_path).returncode == 0
    before, after = load_file(lm_folder / "model.safetensors"), load_file(tmp_path / "o/model.safetensors")
    assert same(before, after)
    before, after = runs.read_run(tmp_path / "o")["held_out_loss"]
    assert before == after


@pytest.mark.parametrize(("masker", "write"), [
    ("mine.py:mine", lambda n: Path("mine.py").write_text(f"from maskers import random as mine\n# {n}\n")),
    ("difference:words.txt", lambda n: Path("words.txt").write_text(f"the\t9\ncat\t{n}\n")),
    ("nmg:policy", lambda n: policies.random_policy(32, n, "x").save(Path("policy"))),
])
def test_a_masker_whose_file_changed_is_another_run(masker, write, tmp_path, monkeypatch, flags):
    """Of one's own, the words that it counts, or a policy; how that was learned is among the settings."""
    monkeypatch.chdir(tmp_path)
    learned = {"episodes": 4, "p": 0.05, "mlm_epochs": 3}
    runs.Run("policy", learned).finish()
    command = ["pretrain.py", *flags, f"--masker={masker}", "--max_steps=1", "--out=o"]
    for number, expected in ((1, "saved o"), (1, "already done"), (2, "")):
        write(number)
        result = call(*command, cwd=tmp_path)
        assert expected in result.stdout, result.stderr
    assert result.returncode == 2 and "holds another run (masker_file=" in result.stderr
    settings = finetune.origin_of("o")["settings"]
    assert settings.get("policy") == (learned if masker == "nmg:policy" else None)


LEARNED = {"p": 0.05, "mlm_epochs": 3, "lm": "/elsewhere", "weights": "a"}


@pytest.mark.parametrize(("learned", "given", "warned"), [
    (LEARNED, {"p": 0.05, "epochs": 3}, None),
    (LEARNED, {"p": 0.15, "epochs": 3}, "with --p=0.05 --epochs=3, and is used with --p=0.15 --epochs=3"),
    # The toy world's own flags are others.
    (LEARNED | {"lm": "tiny", "weights": None}, {"p": 0.15, "epochs": 1, "lm": "tiny"}, None),
    # It reads the hidden states of an LM with these weights, or of the same name; earlier policies name the
    # checksum of the weights alone.
    (LEARNED, {"p": 0.05, "epochs": 3, "lm": "b"}, "with the LM /elsewhere, .* and is used with b"),
    (LEARNED, {"p": 0.05, "epochs": 3, "lm": "a-1"}, None),
    (LEARNED | {"weights": "a-1"}, {"p": 0.05, "epochs": 3, "lm": "a-2"}, "with the LM /elsewhere"),
    (LEARNED | {"lm": "hub", "weights": None}, {"p": 0.05, "epochs": 3, "lm": "other"}, "with the LM hub"),
])
def test_a_policy_is_to_be_used_as_it_was_learned(learned, given, warned, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # The checksum of an LM is its name here, but the hub's have none.
    monkeypatch.setattr(models, "weights_of", lambda lm: lm if lm[0] in "ab" else None)
    runs.Run("policy", learned).finish()
    cfg = pretrain.Config(**{"lm": "a", "masker": "nmg:policy"} | given)
    assert pretrain.policy_settings(cfg) == learned
    said = f"WARNING: this policy was learned {warned}.*\n" if warned else ""
    assert re.fullmatch(said, capsys.readouterr().out)


@pytest.mark.slow
def test_killed_and_started_again(tmp_path, flags):
    """SIGKILL in the midst of it, which is not done then; again, the same bytes as of an undisturbed run."""
    flags += ["--epochs=10", "--eval_every=10"]
    succeed("pretrain.py", *flags, "--out=clean", cwd=tmp_path)
    checkpoint = tmp_path / "killed/checkpoint.pt"
    # With a checkpoint after every step.
    kill_when(checkpoint.exists, "pretrain.py", *flags, "--out=killed", cwd=tmp_path,
              changed={"nmg.loop.CHECKPOINT_MINUTES": 0})
    left = names(tmp_path / "killed")
    assert "run.json" not in left and "model.safetensors" not in left and "started.json" in left
    other = call("pretrain.py", *flags, "--out=killed", "--seed=3", cwd=tmp_path)
    assert other.returncode == 2 and "seed=0 there, 3 here" in other.stderr
    again = call("pretrain.py", *flags, "--out=killed", cwd=tmp_path)
    assert "going on after step" in again.stdout, again.stderr
    assert names(tmp_path / "killed") == names(tmp_path / "clean")
    clean, killed = tmp_path / "clean", tmp_path / "killed"
    for file in ("model.safetensors", "metrics.jsonl"):
        assert (clean / file).read_bytes() == (killed / file).read_bytes()
    assert runs.read_run(clean)["held_out_loss"] == runs.read_run(killed)["held_out_loss"]
    assert len(runs.read_rows(clean / "metrics.jsonl")) > 3


@pytest.mark.training
def test_looks_on_the_way_change_nothing(tmp_path, flags):
    """The same weights as without; a row every 3 steps, before the first and after the last; a picture. What
    a run with other flags, killed before its first checkpoint, left in the folder is gone."""
    runs.write_rows(tmp_path / "looked/started.json", [{}])
    runs.write_rows(tmp_path / "looked/metrics.jsonl", [{"step": 4, "held_out_loss": 9.9}])
    for out, more in (("plain", []), ("looked", ["--eval_every=3"])):
        succeed("pretrain.py", *flags, "--max_steps=9", *more, f"--out={out}", cwd=tmp_path)
    one, two = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("plain", "looked"))
    assert one == two
    rows = runs.read_rows(tmp_path / "looked/metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 3, 6, 9]
    before, after = runs.read_run(tmp_path / "looked")["held_out_loss"]
    losses = [row["held_out_loss"] for row in rows]
    # Nine steps of training change the loss, and may also raise it.
    assert losses[0] == before and losses[3] == after and len(set(losses)) == 4
    assert (tmp_path / "looked/held_out.png").stat().st_size > 5000


@pytest.mark.slow
def test_the_script_in_two_processes(tmp_path, flags, lm_folder):
    """torchrun: the LM of one process, but for rounding; one of the two writes and speaks."""
    # 36 blocks: the last batch has one, for two processes
    flags += ["--batch_size=7", "--epochs=2", "--fast=False", "--dropout=0"]
    succeed("pretrain.py", *flags, "--out=alone", cwd=tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               ROOT / "pretrain.py", *flags, "--out=both"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    both = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert both.returncode == 0, both.stderr
    for said in ("saved both: 12 steps", "blocks of at most", "tokens of a block", "the first of them"):
        assert both.stdout.count(said) == 1
    assert names(tmp_path / "alone") == names(tmp_path / "both")
    one, two = (load_file(tmp_path / out / "model.safetensors") for out in ("alone", "both"))
    before = load_file(lm_folder / "model.safetensors")
    apart = torch.cat([(one[name] - two[name]).abs().flatten() for name in one]).mean()
    moved = torch.cat([(one[name] - before[name]).abs().flatten() for name in before]).mean()
    # Adam turns the rounding of gradients near 0 into whole steps, here and there.
    assert apart < 0.01 * moved


@pytest.mark.parametrize(("masker", "warned"), [("whole", True), ("random", False), ("none", False)])
def test_words_longer_than_what_may_be_masked(masker, warned, tmp_path, lm_folder):
    """As in languages without spaces: whole words mask nothing, which is said. The loss, which is looked at
    after every 20th step, is 0 then, and not NaN."""
    (tmp_path / "c.txt").write_text("electroencephalographicelectroencephalographicelectro\n" * 20)
    done = succeed("pretrain.py", "--dataset=c.txt", f"--lm={lm_folder}", f"--masker={masker}",
                   "--max_len=64", "--batch_size=1", "--epochs=2", cwd=tmp_path)
    assert (f"WARNING: in 16 blocks {masker} masks 0 tokens" in done.stdout) == warned


def test_every_flag_reaches_the_training(tmp_path, lm_folder, cls_folder, monkeypatch):
    """Above all the seed. Without flags, the toy world's values, and its corpus alone."""
    seen = []

    def stop(model, pieces, masker, **given):
        rates = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
        seen.append(given | {"pieces": pieces, "masker": masker, "dropout": rates})
        raise UserError("stop")

    monkeypatch.setattr(pretrain, "pretrain", stop)
    wanted = {"p": 0.3, "epochs": 4, "lr": 0.002, "batch_size": 3, "seed": 7, "micro_batch": 2,
              "warmup": 0.1, "weight_decay": 0.01, "max_steps": 5}
    given = [f"--{name}={value}" for name, value in wanted.items()]
    (tmp_path / "more.txt").write_text("\n".join(TEXTS))
    given += ["--corpus=more.txt", "--read=corpus", "--max_len=20", "--masker=punct", "--dropout=0"]
    result = call("pretrain.py", f"--dataset={cls_folder}", f"--lm={lm_folder}", *given, "--out=o",
                  cwd=tmp_path)
    assert "stop" in result.stderr
    assert seen[0] == seen[0] | wanted | {"distributed": True, "dropout": {0}}
    assert str(seen[0]["checkpoint"]) == "o/checkpoint.pt"
    assert seen[0]["masker"] is maskers.MASKERS["punct"]
    assert seen[0]["pieces"].length.max() == 20 and len(seen[0]["pieces"].split) == len(TEXTS)
    assert "stop" in call("pretrain.py", cwd=tmp_path).stderr
    tiny = {name: toy.PRETRAIN[name] for name in ("p", "epochs", "lr", "batch_size")}
    assert seen[1] == seen[1] | tiny
    assert len(seen[1]["pieces"].split) == 2560
