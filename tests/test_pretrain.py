"""The loss against Hugging Face's own, fast path against plain path, resume, common random numbers, a new MLM head."""
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, TEXTS, call, fast_tokenizer, kill_when, kill_worker_when, random_lm, torchrun
from safetensors.torch import load_file

import data_prep
import loop
import maskers
import pretrain
from data_prep import Specials, blocks
from loop import UserError

KINDS = ["bert", "distilbert", "roberta", "electra", "modernbert", "deberta"]


@pytest.fixture(scope="module")
def tok():
    return fast_tokenizer("wordpiece")


@pytest.fixture
def pieces(tmp_path, tok):
    (tmp_path / "c.txt").write_text("\n".join(f"{TEXTS[i % 4]} {i}" for i in range(40)))
    return blocks(data_prep.load(str(tmp_path / "c.txt"), tok).corpus, Specials.of(tok), 32)


def weights(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_hugging_faces_own(kind, tok, pieces):
    """The gathered loss of every architecture equals the model's own loss on the same masks, to 1e-5, and so do the gradients."""
    model = random_lm(kind, len(tok)).eval()
    batch, mask, ids = pretrain.masked_rows(pieces, maskers.find("random"), 0.15, 0, 0, np.arange(8))
    fast, plain = pretrain.tensors(batch, mask, ids), pretrain.tensors(batch, mask, ids, fast=False)
    assert (plain["labels"] != -100).sum() == len(fast["at"]) == mask.sum()
    ours = pretrain.mlm_loss(model, fast)
    ours.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    theirs = model(**plain).loss
    theirs.backward()
    assert abs(ours.item() - theirs.item()) < 1e-5
    assert torch.isclose(theirs, pretrain.mlm_loss(model, plain)).item()
    for a, b in zip(grads, [p.grad for p in model.parameters() if p.grad is not None], strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_attention_of_long_rows(masked, p, monkeypatch):
    """Training, and evaluation where p is 0, in both ways against softmax(q k / sqrt(D) + mask), dropout and v written out in double precision."""
    B, H, L, D = 3, 5, 400, 8                                   # heads in parts of 2, 2 and 1
    torch.manual_seed(0)
    q, k, v, g = torch.randn(4, B, H, L, D)
    mask = torch.zeros(B, 1, L, L) if masked else None
    if masked:
        mask[1, :, :, 350:] = mask[1, :, 50:60] = mask[2, :, :, 7:] = torch.finfo(torch.float32).min        # some queries may look nowhere
    torch.manual_seed(1)
    lives = loop.kept(loop.random_bits(torch.Size((B, H, L, L))), p).double() if p else 1.0
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    weights = torch.einsum("bhid,bhjd->bhij", *exact[:2]) / D**0.5 + (mask.double() if masked else 0)
    out = torch.einsum("bhij,bhjd->bihd", weights.softmax(-1) * lives / (1 - p), exact[2])
    expected = [out, *torch.autograd.grad(out, exact, g.transpose(1, 2).double())]
    ways = []
    for large in (0, B * H * L * L):
        monkeypatch.setattr(loop, "LARGE", large)
        given = [x.clone().requires_grad_(p > 0) for x in (q, k, v)]
        torch.manual_seed(1)
        with loop.quick_dropout(True):
            out = loop.attention(None, *given, mask, dropout=p)[0]
        ways.append([out, *(torch.autograd.grad(out, given, g.transpose(1, 2)) if p else ())])
        for ours, theirs in zip(ways[-1], expected[:len(ways[-1])], strict=True):
            assert torch.allclose(ours.double(), theirs, rtol=1e-4, atol=1e-5)
    assert not torch.equal(ways[0][-1], ways[1][-1])            # two ways indeed


def test_attention_learns_a_bias_of_long_rows(monkeypatch):
    monkeypatch.setattr(loop, "LARGE", 0)
    bias = torch.zeros(2, 3, 20, 20, requires_grad=True)
    with loop.quick_dropout(True):
        loop.attention(None, *torch.randn(3, 2, 3, 20, 8), bias, dropout=0.1)[0].square().sum().backward()
    assert (bias.grad.abs().sum((2, 3)) > 0).all()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "eurobert"])
def test_attention_serves_every_architecture(kind, half, monkeypatch):
    """Loss and gradients of training with dropout: the way for long rows against the plain one, which is what transformers calls eager."""
    model, ids = random_lm(kind, dropout=0.2), torch.randint(5, 40, (4, 30), generator=torch.manual_seed(0))
    real = torch.ones_like(ids)
    real[1, 20:] = 0
    found = []
    for name, large in (("eager", 0), (loop.attention_of_models(), 10**9), (loop.attention_of_models(), 0)):
        monkeypatch.setattr(loop, "LARGE", large)
        model.set_attn_implementation(name)
        model.train().zero_grad()
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=half), loop.quick_dropout(True):
            loss = model(input_ids=ids, attention_mask=real, labels=ids).loss
        loss.backward()
        found.append(torch.cat([loss.detach()[None], *(w.grad.flatten() for w in model.parameters() if w.grad is not None)]))
    eager, plain, long = found
    assert (plain - eager).norm() <= (1e-2 if half else 0) * eager.norm() and (long - eager).norm() < (1e-2 if half else 1e-5) * eager.norm()


def test_the_loss_on_held_out_text_is_the_mean_over_masked_tokens(tok, pieces, monkeypatch):
    monkeypatch.setattr(loop, "has_bf16", lambda kind: False)
    monkeypatch.setattr(pretrain, "by_length", lambda length: np.array_split(np.arange(len(length)), 3))
    model = random_lm("bert", len(tok), 0.1).train()
    ours = pretrain.held_out_loss(model, pieces)
    all_rows = pretrain.tensors(*pretrain.masked_rows(pieces, maskers.find("random"), 0.15, 0, 0, np.arange(len(pieces))), fast=False)
    assert ours == pytest.approx(model.eval()(**all_rows).loss.item(), rel=1e-5)


def test_a_batch_with_nothing_to_mask_is_no_loss(tok, tmp_path):
    """One word of many pieces and a budget of one token: whole-word masking takes nothing, and nothing breaks."""
    (tmp_path / "c.txt").write_text("electroencephalographicelectro\n" * 20)
    pieces = blocks(data_prep.load(str(tmp_path / "c.txt"), tok).corpus, Specials.of(tok), 32)
    model = random_lm("bert", len(tok))
    for fast in (True, False):
        before = weights(model)
        loss = pretrain.pretrain(model, pieces, maskers.find("whole"), batch_size=1, max_len=32, lr=1e-3, fast=fast, quiet=True)
        assert loss == 0 and same(before, weights(model))


def test_a_model_that_evaluation_moved_can_still_be_trained(tok, pieces, monkeypatch):
    """From a CPU to a GPU; here, where there may be none, to float64, which replaces the weights all the same."""
    model = random_lm("bert", len(tok))
    monkeypatch.setattr(type(model), "to", lambda self, device: self.double())
    pretrain.held_out_loss(model, pieces)
    assert next(model.parameters()).dtype == torch.float64
    batch, mask, ids = pretrain.masked_rows(pieces, maskers.find("random"), 0.15, 0, 0, np.arange(8))
    pretrain.mlm_loss(model.train(), pretrain.tensors(batch, mask, ids)).backward()


@pytest.mark.parametrize(("half", "near"), [(False, 1e-4), (True, 5e-3)])
def test_the_plain_path_computes_the_same_training(half, near, tok, pieces, monkeypatch):
    """Padding to max_len, the head on every position and bf16 products change nothing but rounding."""
    monkeypatch.setattr(loop, "has_bf16", lambda kind: half)
    losses, models = [], []
    for fast in (True, False):
        model = random_lm("bert", len(tok))
        losses.append(pretrain.pretrain(model, pieces, maskers.find("random"), lr=1e-3, batch_size=8, max_len=32, fast=fast, quiet=True))
        models.append(model)
    difference = abs(losses[0] - losses[1])
    assert difference < near and (difference > 0 or not half)
    if not half:                                                    # Adam makes whole steps of what bf16 rounds
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-3)


def test_the_same_seed_gives_the_same_weights(tok, pieces):
    def trained(seed, masker="random", dropout=0.1):
        model = random_lm("bert", len(tok), dropout)
        pretrain.pretrain(model, pieces, maskers.find(masker), lr=1e-3, batch_size=8, seed=seed, quiet=True)
        return weights(model)
    assert same(trained(1), trained(1)) and not same(trained(1), trained(2)) and not same(trained(1), trained(1, "whole"))


def test_another_masker_leaves_order_head_and_dropout_untouched(tok, pieces, monkeypatch):
    """Common random numbers: what differs between two maskers' runs is their masks."""
    seen = {}

    def spy(name):
        seen[name] = {"rows": [], "dropout": []}
        original = pretrain.masked_rows

        def masked_rows(pieces, masker, p, seed, epoch, rows, *more):
            seen[name]["rows"].append((epoch, rows.tolist()))
            return original(pieces, masker, p, seed, epoch, rows, *more)
        monkeypatch.setattr(pretrain, "masked_rows", masked_rows)
        model = random_lm("bert", len(tok), 0.1)
        model.bert.embeddings.dropout.register_forward_hook(
            lambda m, args, out: seen[name]["dropout"].append((out == 0).sum(-1).tolist()) if m.training else None)
        pretrain.pretrain(model, pieces, maskers.find(name), epochs=2, lr=1e-3, batch_size=8, quiet=True)
        monkeypatch.setattr(pretrain, "masked_rows", original)
        from transformers import AutoModelForSequenceClassification
        torch.manual_seed(len(seen))                                # whatever torch's own generator has come to
        seen[name]["head"] = loop.with_head(model, AutoModelForSequenceClassification, 0, num_labels=3).classifier.weight
        seen[name]["model"] = weights(model)

    spy("random")
    spy("punct")
    assert seen["random"]["rows"] == seen["punct"]["rows"] and seen["random"]["dropout"] == seen["punct"]["dropout"] != []
    assert torch.equal(seen["random"]["head"], seen["punct"]["head"])
    assert not same(seen["random"]["model"], seen["punct"]["model"])


@pytest.mark.parametrize("asks", [False, True])
def test_training_is_with_dropout(asks, tok, pieces, monkeypatch):
    """Of a LM as it comes from its folder, in evaluation mode, and though a masker has read it just before each step."""
    def masker(batch, k, rng, lm=None):
        return maskers.pick((lm(batch)[:, :, 0].numpy() if asks else 0) + rng.random(batch.ids.shape), batch, k)

    seen, loss = [], pretrain.mlm_loss
    monkeypatch.setattr(pretrain, "mlm_loss", lambda model, t: seen.append(model.training) or loss(model, t))
    pretrain.pretrain(random_lm("bert", len(tok), 0.1).eval(), pieces, masker, batch_size=8, quiet=True)
    assert seen == [True] * -(-len(pieces) // 8)


def test_a_lm_in_half_precision_is_trained_in_full(tmp_path, tok):
    random_lm("bert", len(tok)).bfloat16().save_pretrained(tmp_path)
    tok.save_pretrained(tmp_path)
    assert {w.dtype for w in pretrain.load_lm(str(tmp_path)).parameters()} == {torch.float32}


def test_masks_anew_each_epoch_or_once(tok, pieces):
    def masks(epoch):
        return pretrain.masked_rows(pieces, maskers.find("random"), 0.15, 0, epoch, np.arange(8))[1]
    assert (masks(0) == masks(0)).all() and not (masks(0) == masks(1)).all()
    both = {}
    for remask in (True, False):
        epochs = []

        def spy(batch, k, rng, lm=None, epochs=epochs):
            mask = maskers.find("random")(batch, k, rng)
            epochs.append((batch.rows.tolist(), mask))
            return mask
        pretrain.pretrain(random_lm("bert", len(tok)), pieces, spy, epochs=2, batch_size=64, remask=remask, quiet=True)
        _, (rows, first), (again, second) = epochs                  # the first call only looks whether the masker reads the LM
        both[remask] = (first[np.argsort(rows)].sum(0) == second[np.argsort(again)].sum(0)).all()
    assert not both[True] and both[False]


@pytest.mark.parametrize("fast", [True, False])
def test_masks_once_by_the_lm_as_it_came(fast, tok, pieces):
    """A masker that reads the LM, asked once: the same training as under the masks that it chooses before the first step."""
    def by_lm(batch, k, rng, lm=None):
        return maskers.pick(lm(batch)[:, :, 0].numpy(), batch, k)

    def trained(masker, remask):
        model = random_lm("bert", len(tok))
        pretrain.pretrain(model, pieces, masker, epochs=2, lr=1e-2, batch_size=4, max_len=40, remask=remask, fast=fast, quiet=True)
        return weights(model)

    lm, mask = pretrain.hidden_states(random_lm("bert", len(tok))), np.zeros((len(pieces), 32), bool)
    for row in range(len(pieces)):
        _, chosen, _ = pretrain.masked_rows(pieces, by_lm, 0.15, 0, 0, np.array([row]), lm)
        mask[row, :chosen.shape[1]] = chosen
    once = trained(by_lm, False)
    assert same(once, trained(maskers.given(mask), False)) and not same(once, trained(by_lm, True))


def test_a_masker_that_asks_now_and_then(tok, pieces):
    """It would read the LM in a thread beside its training."""
    calls = iter(range(1000))

    def sometimes(batch, k, rng, lm=None):
        return maskers.pick(lm(batch)[:, :, 0].numpy() if next(calls) > 2 else rng.random(batch.ids.shape), batch, k)

    with pytest.raises(UserError, match="did not when it was tried"):
        pretrain.pretrain(random_lm("bert", len(tok)), pieces, sometimes, batch_size=4, quiet=True)


def test_a_masker_that_breaks_the_contract_is_told(pieces):
    for bad in (lambda batch, k, rng, lm=None: batch.ok, lambda batch, k, rng, lm=None: ~batch.ok, lambda batch, k, rng, lm=None: batch.ids,
                lambda batch, k, rng, lm=None: batch.ok[:, :-1]):
        with pytest.raises(loop.UserError, match="must return a bool"):
            pretrain.masked_rows(pieces, bad, 0.15, 0, 0, np.arange(4))


def test_a_checkpoint_resumes_to_the_same_weights(tok, pieces, tmp_path, monkeypatch):
    """Interrupted after any number of steps and started again, dropout included, the weights are the uninterrupted ones."""
    def trained(checkpoint=None, stop=None):
        model = random_lm("bert", len(tok), 0.1)
        if stop is not None:
            calls = []

            def failing(model, t):
                calls.append(1)
                if len(calls) > stop:
                    signal.raise_signal(signal.SIGTERM)
                    signal.raise_signal(signal.SIGTERM)             # sent to all and passed on by torchrun: it comes twice
                return pretrain_loss(model, t)
            monkeypatch.setattr(pretrain, "mlm_loss", failing)
        try:
            pretrain.pretrain(model, pieces, maskers.find("random"), epochs=3, lr=1e-3, batch_size=8, checkpoint=checkpoint, key="k", quiet=True)
        finally:
            monkeypatch.setattr(pretrain, "mlm_loss", pretrain_loss)
        return weights(model)

    pretrain_loss = pretrain.mlm_loss
    whole = trained()
    for stop in (0, 3, 7):
        file = tmp_path / f"{stop}.pt"
        with pytest.raises(KeyboardInterrupt):
            trained(file, stop)
        assert file.exists() and same(whole, trained(file))


def test_a_new_mlm_head_is_said_loudly(tmp_path, tok, capsys):
    random_lm("bert", len(tok)).bert.save_pretrained(tmp_path / "encoder")
    pretrain.load_lm(str(tmp_path / "encoder"))
    assert "NEWLY INITIALISED" in capsys.readouterr().out
    random_lm("bert", len(tok)).save_pretrained(tmp_path / "lm")
    pretrain.load_lm(str(tmp_path / "lm"))
    assert "NEWLY" not in capsys.readouterr().out


def test_a_lm_saved_to_return_attentions_opens(tmp_path, tok):
    random_lm("bert", len(tok)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"output_attentions": True}))
    assert not pretrain.load_lm(str(tmp_path)).config.output_attentions


@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_end_to_end(kind, tmp_path, cls_folder, qa_folder):
    """Pre-training and both fine-tunings on a folder of each architecture; the result opens with from_pretrained."""
    from transformers import AutoModelForMaskedLM

    import finetune_cls
    import finetune_qa
    tok = fast_tokenizer("bpe" if kind in ("roberta", "modernbert") else "wordpiece")
    random_lm(kind, len(tok), 0.1).save_pretrained(tmp_path / "lm")
    tok.save_pretrained(tmp_path / "lm")
    model, specials = pretrain.load_lm(str(tmp_path / "lm")), Specials.of(tok)
    data, asked = data_prep.load(str(cls_folder), tok), data_prep.load(str(qa_folder), tok)
    length = pretrain.fitting(model, None, 512)
    assert length == {"roberta": 65, "modernbert": 512}.get(kind, 66)      # RoBERTa counts positions after its padding index
    before = weights(model)
    pretrain.pretrain(model, blocks(data.corpus, specials, min(length, 64)), maskers.find("whole"), lr=1e-3, batch_size=8, quiet=True)
    assert not same(before, weights(model))
    pretrain.save(model, tok, tmp_path / "out", {})
    opened = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert same(weights(model), weights(opened))
    classifier = finetune_cls.finetune(model, data_prep.heads(data["train"], specials, 64), 4, epochs=1, lr=1e-3, quiet=True)
    assert finetune_cls.predict(classifier, data_prep.heads(data["test"], specials, 64), quiet=True).shape == (9, 4)
    reader = finetune_qa.finetune(model, data_prep.windows(asked["train"], specials, 64, 16, 20), epochs=1, lr=1e-3, quiet=True)
    assert len(finetune_qa.predict(reader, data_prep.windows(asked["test"], specials, 64, 16, 20), quiet=True)) == 5


# ---------------------------------------------------------------- the script

def test_killed_and_started_again(tmp_path, lm_folder, cls_folder):
    """SIGKILL in the midst of pre-training; the same command again gives the same weights as an undisturbed run."""
    flags = [f"--dataset={cls_folder}", f"--lm={lm_folder}", "--epochs=120", "--batch_size=4", "--lr=1e-3", "--max_len=32"]
    clean = call("pretrain.py", *flags, "--out=clean", cwd=tmp_path)
    assert clean.returncode == 0, clean.stderr
    checkpoint = tmp_path / ".killed.checkpoint.pt"
    kill_when(checkpoint.exists, "pretrain.py", *flags, "--out=killed", cwd=tmp_path)
    assert not (tmp_path / "killed").exists()
    again = call("pretrain.py", *flags, "--out=killed", cwd=tmp_path)
    assert "resuming at step" in again.stdout and not checkpoint.exists()
    assert (tmp_path / "clean/model.safetensors").read_bytes() == (tmp_path / "killed/model.safetensors").read_bytes()
    assert "already done" in call("pretrain.py", *flags, "--out=killed", cwd=tmp_path).stdout
    other = call("pretrain.py", *flags, "--out=killed", "--seed=3", cwd=tmp_path)
    assert other.returncode == 2 and "seed=0 there, 3 here" in other.stderr


def test_a_process_of_several_dies(tmp_path, lm_folder, cls_folder):
    """It ends the run; the same command goes on from the checkpoint, with however many processes."""
    flags = [f"--dataset={cls_folder}", f"--lm={lm_folder}", "--epochs=120", "--batch_size=4", "--max_len=32", "--out=o"]
    kill_worker_when((tmp_path / ".o.checkpoint.pt").exists, torchrun(2, "pretrain.py", *flags), tmp_path)
    assert not (tmp_path / "o").exists()
    again = call("pretrain.py", *flags, cwd=tmp_path)
    assert again.returncode == 0 and "resuming at step" in again.stdout and (tmp_path / "o/model.safetensors").exists(), again.stderr


def test_memory_is_that_of_this_process_alone():
    """Not of the one that started it, which `resource` counts on Linux."""
    held = bytearray(600_000_000)
    said = subprocess.run([sys.executable, "-c", "import loop; print(loop.peak_gb())"], capture_output=True, text=True, env=os.environ | {
        "PYTHONPATH": str(ROOT)}).stdout
    assert 0.05 < float(said) < len(held) / 1e9 < loop.peak_gb()


def test_ctrl_c_saves_and_says_so(tmp_path, lm_folder, cls_folder):
    flags = [f"--dataset={cls_folder}", f"--lm={lm_folder}", "--epochs=5000", "--batch_size=4", "--max_len=32", "--out=o"]
    p = subprocess.Popen([sys.executable, str(ROOT / "pretrain.py"), *flags], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while p.poll() is None and not (tmp_path / ".o.checkpoint.pt").exists():
        time.sleep(0.02)
    (tmp_path / ".o.checkpoint.pt").unlink()                            # what stands there afterwards was written on Ctrl-C
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=60)
    assert p.returncode == 130 and "the same command goes on" in err and "Traceback" not in err
    assert (tmp_path / ".o.checkpoint.pt").exists() and not (tmp_path / "o").exists()


@pytest.mark.parametrize(("flags", "said"), [
    (["--mask=random"], "unknown flag --mask; did you mean 'masker'?"),
    (["random"], "'random' is not a flag"),
    (["--masker=hwole"], "did you mean 'whole'?"),
    (["--dataset=toycl"], "did you mean 'toycls'?"),
    (["--lm=no/such_model"], "--lm=no/such_model: cannot be opened"),
    (["--p=0"], "must be in (0, 1]"),
    (["--p=1.2"], "must be in (0, 1]"),
    (["--p=lots"], "--p takes float, not 'lots'"),
    (["--epochs=0"], "--epochs=0: must be positive"),
    (["--fast=perhaps"], "--fast takes True or False"),
    (["--raw=nowhere"], "--raw=nowhere: no such folder"),
    (["--out=full"], "exists and is not a run"),
    (["--seed=-1"], "--seed=-1: must be 0 or more"),
    (["--lr=nan"], "--lr=nan: must be positive"),
    (["--max_len=2"], "--max_len=2: must be 8 or more"),
    (["--masker=oracle", "--lm=no/such"], "knows the words of the toy world only"),
])
def test_wrong_flags(flags, said, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").touch()
    result = call("pretrain.py", *flags, cwd=tmp_path)
    assert result.returncode == 2 and said in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1 and sorted(f.name for f in tmp_path.iterdir()) == ["full"]


def test_an_entity_masker_without_its_model(tmp_path, lm_folder, cls_folder):
    result = call("pretrain.py", f"--dataset={cls_folder}", f"--lm={lm_folder}", "--masker=entity", "--spacy_model=xx_none", cwd=tmp_path)
    assert result.returncode == 2 and "python -m spacy download xx_none" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(("masker", "warned"), [("whole", True), ("random", False), ("none", False)])
def test_words_longer_than_what_may_be_masked(masker, warned, tmp_path, lm_folder):
    """As in languages without spaces: whole words mask nothing, which is said."""
    (tmp_path / "c.txt").write_text("electroencephalographicelectroencephalographicelectroencephalographic\n" * 20)
    result = call("pretrain.py", "--dataset=c.txt", f"--lm={lm_folder}", f"--masker={masker}", "--max_len=64", cwd=tmp_path)
    assert result.returncode == 0 and (f"WARNING: in 16 blocks {masker} masks 0 tokens of" in result.stdout) == warned


def test_too_long_for_the_lm_and_a_slow_tokenizer(tmp_path, lm_folder, cls_folder, monkeypatch):
    result = call("pretrain.py", f"--dataset={cls_folder}", f"--lm={lm_folder}", "--max_len=100", cwd=tmp_path)
    assert result.returncode == 2 and "takes at most 66 tokens" in result.stderr
    random_lm("bert").save_pretrained(tmp_path / "no_words")
    result = call("pretrain.py", f"--dataset={cls_folder}", "--lm=no_words", cwd=tmp_path)
    assert result.returncode == 2 and "--lm=no_words: its tokenizer knows no words" in result.stderr
    import transformers

    class Slow:
        is_fast = False
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *a, **k: Slow())
    with pytest.raises(loop.UserError, match="only a slow tokenizer"):
        data_prep.load_tokenizer(str(lm_folder))


def test_a_full_disk_is_one_sentence(tmp_path, lm_folder, cls_folder):
    """A limit on the size of files stands for the full disk: nothing half-written stays."""
    code = ("import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); import pretrain, loop;"
            f"sys.argv = ['pretrain.py', '--dataset={cls_folder}', '--lm={lm_folder}', '--max_len=32', '--out=o']; loop.cli(pretrain.main)")
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert result.returncode == 2 and "disk is full" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "o").exists() and not list(tmp_path.glob("*.tmp"))


def test_on_a_full_disk_results_keep_whole_lines(tmp_path):
    code = ("import resource, sys; from pretrain import add_result; add_result('r.jsonl', {'config': 1});"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (30, 30)); add_result('r.jsonl', {'config': 2, 'scores': 'x' * 50})")
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert "OSError" in result.stderr and (tmp_path / "r.jsonl").read_text() == '{"config": 1}\n'
    pretrain.add_result(str(tmp_path / "r.jsonl"), {"config": 2})
    assert (tmp_path / "r.jsonl").read_text() == '{"config": 1}\n{"config": 2}\n'


def test_what_is_half_made_goes_with_sigterm(tmp_path):
    def main():
        with loop.beside(tmp_path / "folder") as tmp:
            tmp.mkdir()
            signal.raise_signal(signal.SIGTERM)
    before, argv = signal.getsignal(signal.SIGTERM), sys.argv
    try:
        sys.argv = ["x.py"]
        with pytest.raises(SystemExit, match="130"):
            loop.cli(main)
    finally:
        sys.argv = argv
        signal.signal(signal.SIGTERM, before)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_the_same_with_a_slash_behind(tmp_path):
    assert [loop.parse("out", str | None, value) for value in ("runs/x/", "runs/x", "/")] == ["runs/x", "runs/x", "/"]


def test_places_that_a_finished_run_cannot_take_are_refused(tmp_path, lm_folder, cls_folder):
    """A link in the place of --out, and a damaged checkpoint: said before anything is trained."""
    flags = [f"--dataset={cls_folder}", f"--lm={lm_folder}", "--max_len=32"]
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / ".o.checkpoint.pt").write_text("half")
    for out, said in (("link", "is a link or a mount point"), ("o", ".o.checkpoint.pt: damaged")):
        result = call("pretrain.py", *flags, f"--out={out}", cwd=tmp_path)
        assert result.returncode == 2 and said in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("script", ["pretrain.py", "finetune_cls.py", "finetune_qa.py"])
def test_a_batch_shared_by_processes(script, lm_folder, cls_folder, qa_folder, tmp_path):
    """torchrun with three processes (the last batch of an epoch has fewer rows than that): the weights of one process, but for rounding."""
    config = json.loads((lm_folder / "config.json").read_text())
    (lm_folder / "config.json").write_text(json.dumps(config | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}))
    flags = [f"--dataset={qa_folder if 'qa' in script else cls_folder}", f"--lm={lm_folder}", "--lr=1e-3", "--batch_size=11", "--out=o"]
    flags += ["--epochs=2"] if script == "pretrain.py" else ["--epochs=2", "--save_model=True"]
    weights = []
    for name, command in (("one", [sys.executable, str(ROOT / script), *flags]), ("three", torchrun(3, script, *flags))):
        (tmp_path / name).mkdir()
        result = subprocess.run(command, cwd=tmp_path / name, capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert result.returncode == 0, result.stderr
        weights.append(load_file(tmp_path / name / "o/model.safetensors"))
    before, (one, three) = load_file(lm_folder / "model.safetensors"), weights
    moved, apart = (torch.cat([(one[n] - other[n]).abs().flatten() for n in one if n in before]).mean() for other in (before, three))
    assert 0 < apart < 0.01 * moved                                     # Adam turns the rounding of gradients near 0 into whole steps, here and there
