"""The outer loop: equations against naive transcriptions of the paper, learning with a known reward, resume, bad input."""
import copy
import functools
import importlib.util
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import GPU, SHARED, call, fast_tokenizer, kill_when, kill_worker_when, needs_gpu, needs_shared, random_lm, run, torchrun, write_jsonl
from transformers import AutoModelForQuestionAnswering

import data_prep
import finetune_cls
import finetune_qa
import loop
import maskers
import pretrain
import report
import toy
import train_nmg
from data_prep import Specials, blocks, gather
from loop import UserError
from maskers import NMG, RowRandom
from train_nmg import Task

SMALL = ["--contexts=24", "--docs=6", "--episodes=4", "--explore=1", "--save_every=1", "--compare=0", "--replay=24"]    # older episodes leave


# ---------------------------------------------------------------- equations

@pytest.mark.parametrize("seed", range(12))
def test_rewards_are_the_papers_outer_loop(seed):
    rng = np.random.default_rng(seed)
    own, psi, other = rng.random((3, 6, 9)) < 0.4
    mine, random_, theirs = rng.integers(0, 3, 3) / 2
    R, counts = train_nmg.rewards(own, psi, other, np.sign(mine - random_), np.sign(mine - theirs))
    alone, alone_counts = train_nmg.rewards(own, psi, None, np.sign(mine - random_), None)
    for s, a in itertools.product(range(6), range(9)):
        if own[s, a] and not psi[s, a] and not other[s, a]:
            assert counts[s, a] and R[s, a] == min(np.sign(mine - random_), np.sign(mine - theirs))
        elif own[s, a] and psi[s, a] and not other[s, a]:
            assert counts[s, a] and R[s, a] == np.sign(mine - theirs)
        elif own[s, a] and other[s, a] and not psi[s, a]:
            assert counts[s, a] and R[s, a] == np.sign(mine - random_)
        else:
            assert not counts[s, a]
        assert alone_counts[s, a] == (own[s, a] and not psi[s, a])
        if alone_counts[s, a]:
            assert alone[s, a] == np.sign(mine - random_)


def some_logits(seed, B=5, L=7):
    torch.manual_seed(seed)
    ok = torch.rand(B, L) < 0.7
    ok[:, 0] = True
    logits = torch.randn(B, L).masked_fill(~ok, -torch.inf)
    return logits, ok, torch.randn(B), torch.tensor([random.Random(seed + b).choice(ok[b].nonzero()[:, 0].tolist()) for b in range(B)])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("entropy", "clip"), [("sum", None), ("mean", None), ("sum", 0.2)])
def test_losses_are_the_papers(seed, entropy, clip):
    logits, ok, value, action = some_logits(seed)
    reward, log_old = torch.randn(5), -torch.rand(5) * 3
    policy_loss, value_loss = train_nmg.losses(logits, value, action, reward, log_old, alpha=0.3, entropy=entropy, clip=clip)
    L_policy = L_value = 0.0
    for b in range(5):
        z = sum(math.exp(logits[b, t]) for t in range(7) if ok[b, t])
        pi = [math.exp(logits[b, t]) / z if ok[b, t] else 0.0 for t in range(7)]
        H = -sum(q * math.log(q) for q in pi if q > 0)
        if entropy == "mean":
            H = 5 * H / sum(ok[b].tolist())
        ratio, advantage = pi[action[b]] / math.exp(log_old[b]), float(reward[b] - value[b])
        if clip:
            ratio = min(ratio, 1 + clip) if advantage > 0 else max(ratio, 1 - clip)
        L_policy += -ratio * advantage - 0.3 * H
        L_value += 0.5 * advantage**2
    assert policy_loss.item() == pytest.approx(L_policy, rel=1e-4, abs=1e-5) and value_loss.item() == pytest.approx(L_value, rel=1e-4)


def test_the_policy_loss_leaves_the_value_alone():
    logits, _, value, action = some_logits(0)
    value.requires_grad_()
    train_nmg.losses(logits, value, action, torch.ones(5), torch.zeros(5))[0].requires_grad_().backward()
    assert value.grad is None


@pytest.mark.parametrize("form", ["linear", "exp"])
def test_priorities(form):
    rng = np.random.default_rng(0)
    R, V, count = rng.normal(size=20), rng.normal(size=20), rng.integers(1, 9, 20)
    ours = train_nmg.priority(R, V, 1 / np.sqrt(count), form)
    naive = [(math.exp(abs(r - v)) if form == "exp" else abs(r - v)) / math.sqrt(c) for r, v, c in zip(R, V, count, strict=True)]
    np.testing.assert_allclose(ours, naive)


def test_worth_finds_what_the_scores_depend_on_and_nothing_in_noise():
    rng = np.random.default_rng(0)
    x, true = rng.normal(size=(60, 3, 8)), np.array([2.0, -1, 0, 0, 0, 0, 0, 0])
    def trials(y):
        both = np.concatenate((x, y[..., None]), 2)
        return (both - both.mean(1, keepdims=True)).reshape(-1, 9)
    found = train_nmg.worth_of(trials(x @ true + rng.normal(size=(60, 3))), np.ones(8), 3)
    assert np.corrcoef(found, true)[0, 1] > 0.95
    rescaled = train_nmg.worth_of(trials(x @ true + 1.0), np.full(8, 7.0), 3)
    np.testing.assert_allclose(rescaled * trials(x @ true).std(0)[-1], true, atol=0.02)     # in standard deviations of the score
    assert np.abs(train_nmg.worth_of(trials(rng.normal(size=(60, 3))), np.ones(8), 3)).max() < 0.1


@pytest.mark.parametrize("by_document", [True, False])
def test_trials(by_document):
    rng = np.random.default_rng(0)
    start, doc, of_val = torch.tensor([0, 4, 9, 12]), np.array([7, 8, 7]), np.array([8, 7, 7, 9])
    states, scores, mask = train_nmg.States(torch.randn(12, 3).half(), start, None), rng.random(4), rng.random((3, 5)) < 0.5
    mask[0, 4:] = mask[2, 3:] = False
    mask[:, 0] = True
    got = train_nmg.trial(SimpleNamespace(doc=(doc, of_val)), states, mask, scores, by_document)
    groups = [((0, 2), (1, 2)), ((1,), (0,))] if by_document else [((0, 1, 2), (0, 1, 2, 3))]            # contexts, examples
    for row, (contexts, examples) in zip(got, groups, strict=True):
        h = [states.h[start[c] + t].double().numpy() for c in contexts for t in np.flatnonzero(mask[c])]
        np.testing.assert_allclose(row, [*np.mean(h, 0), np.mean([scores[i] for i in examples])])


# ---------------------------------------------------------------- the policy and its masker

def test_the_network_has_the_papers_size():
    assert sum(w.numel() for w in NMG(768).parameters()) == 2_561_026
    assert NMG(768).attention.num_heads == 12 and NMG(312).attention.num_heads == 4 and NMG(100).attention.num_heads == 1


def test_the_network_is_the_papers():
    """One context and one head at a time: attention, residual, LayerNorm, a layer of 128, a logit; the value from the mean state."""
    torch.manual_seed(0)
    policy, states, real = NMG(128), torch.randn(3, 7, 128), torch.arange(7) < torch.tensor([[7], [4], [6]])
    for w in policy.parameters():
        torch.nn.init.normal_(w, std=0.2)
    ok = real & (torch.arange(7) > 0)
    logits, values = policy(states, real, ok)
    att, (one, _, two), (three, _, four), gelu = policy.attention, policy.score, policy.value, torch.nn.functional.gelu
    for b in range(3):
        h = states[b, real[b]]                                                                  # (n, H)
        q, k, v = (h @ att.in_proj_weight.T + att.in_proj_bias).view(len(h), 3, 2, 64).permute(1, 2, 0, 3)      # (2, n, 64) each
        mixed = ((q @ k.transpose(1, 2) / 8).softmax(-1) @ v).transpose(0, 1).reshape(len(h), 128)
        x = h + mixed @ att.out_proj.weight.T + att.out_proj.bias
        x = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, correction=0) + 1e-12).sqrt() * policy.norm.weight + policy.norm.bias
        torch.testing.assert_close(logits[b, ok[b]], two(gelu(one(x)))[1:, 0], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(values[b], four(gelu(three(h.mean(0))))[0], rtol=1e-4, atol=1e-3)


def states_of(batch, hidden=32):
    return torch.randn(*batch.ids.shape, hidden, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def tiny_data():
    return data_prep.load("toycls", toy.tokenizer())


@pytest.fixture(scope="module")
def contexts(tiny_data):
    return data_prep.blocks(tiny_data["train"], Specials.of(toy.tokenizer()), 16)


def test_padding_changes_nothing_and_specials_are_never_chosen(contexts):
    policy, batch, wide = NMG(32), gather(contexts, np.arange(20)), gather(contexts, np.arange(20), 31)
    L, s = batch.ids.shape[1], states_of(gather(contexts, np.arange(20), 31))
    short, v = policy(s[:, :L], torch.from_numpy(batch.real), torch.from_numpy(batch.ok))
    long, w = policy(s, torch.from_numpy(wide.real), torch.from_numpy(wide.ok))
    torch.testing.assert_close(short, long[:, :L])
    torch.testing.assert_close(v, w)
    assert long[:, L:].isinf().all() and short[~torch.from_numpy(batch.ok)].isinf().all() and short[torch.from_numpy(batch.ok)].isfinite().all()


def test_greedy_masks_are_the_most_probable_tokens(contexts):
    policy, batch = NMG(32), gather(contexts, np.arange(20))
    k = np.full(20, 3)
    mask = maskers.nmg(batch, k, RowRandom(0, "mask", 0, batch.rows), states_of, policy)
    logits = policy(states_of(batch), torch.from_numpy(batch.real), torch.from_numpy(batch.ok))[0].detach().numpy()
    assert (mask.sum(1) == 3).all() and not (mask & ~batch.ok).any()
    assert all(logits[b][mask[b]].min() > logits[b][~mask[b]].max() for b in range(20))


def test_gumbel_top_k_draws_without_replacement(contexts):
    """The share of draws in which token i is among two chosen is that of successive draws from the softmax."""
    batch = gather(contexts, np.zeros(4000, int))
    n = int(batch.ok[0].sum())
    logits = np.where(batch.ok, np.linspace(-1, 2, batch.ids.shape[1]), -np.inf)
    rng = RowRandom(0, "x", 0, np.arange(4000))
    mask = maskers.pick(logits - np.log(-np.log(rng.random(logits.shape))), batch, np.full(4000, 2))
    p = np.exp(train_nmg.log_softmax(logits[:1]))[0][batch.ok[0]]
    expected = [p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(n) if j != i) for i in range(n)]
    np.testing.assert_allclose(mask[:, batch.ok[0]].mean(0), expected, atol=0.03)


def test_a_policy_is_kept_and_does_not_fit_another_size(tmp_path, contexts):
    policy = NMG(32, lm="some LM", dataset="some data")
    policy.save(tmp_path)
    again = maskers.find(f"sampled:{tmp_path}").keywords["policy"]
    assert again.about == policy.about and all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters(), strict=True))
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert maskers.find(f"sampled:{tmp_path}").func is maskers.sampled and maskers.find(f"nmg:{tmp_path}").func is maskers.nmg
    batch = gather(contexts, np.arange(3))
    with pytest.raises(UserError, match="some LM reads hidden states of size 32, this LM has 48"):
        maskers.find(f"nmg:{tmp_path}")(batch, np.ones(3), None, lambda b: states_of(b, 48))
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"no policy of train_nmg\.py in this folder"):
            maskers.find(f"nmg:{folder}")


def test_sampled_masks_are_drawn_from_the_policy(contexts):
    """The first of two draws without replacement has the policy's own probabilities; what is drawn depends on the row alone."""
    torch.manual_seed(0)
    policy, one = NMG(48), gather(contexts, np.arange(1))
    states = states_of(one, 48) * 9

    def lm(batch):
        return states.expand(len(batch.ids), -1, -1)

    p = np.exp(train_nmg.log_softmax(maskers.policy_logits(one, lm, policy)))[0]
    mask = maskers.sampled(gather(contexts, np.zeros(3000, int)), np.ones(3000), RowRandom(0, "x", 0, np.arange(3000)), lm, policy)
    assert (mask.sum(1) == 1).all() and p.max() > 2 * p[p > 0].min()
    np.testing.assert_allclose(mask.mean(0), p, atol=0.03)


def test_a_masker_sees_the_lm_as_it_is_in_training(contexts):
    """A masker that reads the LM gets other states after a step, without dropout; the same command gives the same weights."""
    seen = []

    def watch(batch, k, rng, lm=None):
        one = gather(contexts, np.arange(2))
        a, b = lm(one), lm(one)
        assert torch.equal(a, b)
        seen.append(a)
        return maskers.pick(a.norm(dim=-1).numpy()[:1].repeat(len(batch.ids), 0) * 0 + rng.random(batch.ids.shape), batch, k)

    results = []
    for _ in range(2):
        lm = random_lm("bert", len(toy.tokenizer()), 0.1)
        pretrain.pretrain(lm, contexts.take(np.arange(24)), watch, lr=1e-2, batch_size=8, quiet=True)
        results.append(torch.cat([w.flatten() for w in lm.state_dict().values()]))
    assert torch.equal(seen[0], seen[1]) and len(seen) == 8             # the look ahead, then one call a step
    assert not torch.equal(seen[1], seen[2]) and not torch.equal(seen[2], seen[3]) and torch.equal(*results)


# ---------------------------------------------------------------- sub-tasks

def test_a_sub_task_shares_no_document_with_validation(tmp_path):
    """Sentences repeat with other entity markers, as in ChemProt: they are one document."""
    words = ["alpha", "beta", "gamma", "delta", "kappa", "sigma"]
    rng = random.Random(0)
    pairs = [rng.sample(words, 2) for _ in range(120)]
    rows = [{"text": f"<< {a} >> binds [[ {b} ]] in {i % 40} ways", "label": rng.choice("xyz")} for i, (a, b) in enumerate(pairs)]
    rows += [{"text": r["text"].replace("<< ", "").replace(" >>", ""), "label": "x"} for r in rows[:60]]
    data = data_prep.load(str(write_jsonl(tmp_path / "t.jsonl", rows)), toy.tokenizer())
    task = Task(data, Specials.of(toy.tokenizer()), 0.2, 64, 64)
    train = data["train"]
    plain = np.array(["".join(c for c in train.raw(i) if c not in "<>[] ") for i in range(len(train))])
    for n in range(5):
        sub = task.sample(np.random.default_rng(n), 30, None, 20, 1000)
        assert len(np.unique(sub.contexts.row)) == 30 and len(sub.train) == 20 and set(sub.train.row) <= set(sub.contexts.row)
        assert not set(plain[sub.contexts.row]) & set(plain[sub.val.row])
        assert set(train.doc[sub.val.row]) == set(task.val_docs)


def test_a_sub_task_of_questions(tmp_path, qa_folder):
    """Documents (articles) are whole on one side; the questions are those on the contexts; all windows of a question go together."""
    article = json.loads((qa_folder / "train.json").read_text())["data"][0]
    folder = tmp_path / "articles"
    folder.mkdir()
    (folder / "train.json").write_text(json.dumps({"data": [article | {"title": str(i)} for i in range(10)]}))
    data = data_prep.load(str(folder), toy.tokenizer(), dev_share=0.1)
    task = Task(data, Specials.of(toy.tokenizer()), 0.3, 64, 96)
    sub, train = task.sample(np.random.default_rng(0), 20, None, 5, 7), data["train"]
    assert not set(train.doc[sub.contexts.row]) & set(task.val_docs) and set(train.doc[sub.val.row]) <= set(task.val_docs)
    assert set(sub.train.row) <= set(sub.contexts.row) and len(np.unique(sub.train.question)) == 5 and len(sub.doc[1]) == 7
    assert all((sub.val.question == q).sum() == (task.pieces.question == q).sum() > 1 for q in np.unique(sub.val.question))
    with pytest.raises(UserError, match="cannot be cut"):
        Task(data_prep.load(str(qa_folder), toy.tokenizer()), Specials.of(toy.tokenizer()), 0.3, 64, 96)


def test_a_sub_task_of_a_world_with_a_corpus_of_its_own(tiny_data):
    """Unlabelled contexts of validation names are in it, their labelled sentences are not, and no test or dev name at all."""
    task = Task(tiny_data, Specials.of(toy.tokenizer()), 0.5, 64, 64)
    sub = task.sample(np.random.default_rng(0), 96, 12, 1000, 1000)
    of_context, of_val = sub.doc
    of_train = tiny_data["train"].doc[sub.train.row]
    assert len(sub.contexts) == 96 and not set(of_train) & set(of_val) and set(of_val) <= set(task.val_docs)
    assert set(of_context) <= set(of_train) | set(of_val) and set(of_context) & set(of_val) and max(of_context) < 120
    assert len(of_val) == len(sub.val)


def test_a_corpus_whose_documents_are_not_those_of_train(tmp_path):
    """Without `doc` in the records nothing joins them: contexts come from the whole corpus, examples from all of train."""
    for split, n in (("train", 40), ("test", 4)):
        write_jsonl(tmp_path / f"{split}.jsonl", [{"text": f"{split} alpha {i} beta", "label": "xy"[i % 2]} for i in range(n)])
    write_jsonl(tmp_path / "corpus.jsonl", [{"text": f"gamma {i} delta"} for i in range(100)])
    task = Task(data_prep.load(str(tmp_path), toy.tokenizer()), Specials.of(toy.tokenizer()), 0.25, 64, 64)
    sub, train = task.sample(np.random.default_rng(0), 60, None, 1000, 1000), task.pieces.split
    assert task.join is None and len(sub.contexts) == 60 and max(sub.contexts.row) > 40
    assert set(train.doc[sub.train.row]) == set(task.train_docs) and set(train.doc[sub.val.row]) == set(task.val_docs)


def test_what_has_nothing_to_mask_is_no_context(tmp_path):
    """A text of special tokens alone would have a policy over nothing."""
    rows = [{"text": "[MASK] [SEP]" if i % 2 else f"alpha {i}", "label": "xy"[i // 2 % 2]} for i in range(40)]
    task = Task(data_prep.load(str(write_jsonl(tmp_path / "t.jsonl", rows)), toy.tokenizer()), Specials.of(toy.tokenizer()), 0.25, 64, 64)
    assert 0 < len(task.blocks) <= 20 and gather(task.blocks, np.arange(len(task.blocks))).ok.any(1).all()


def test_a_sub_task_without_examples_says_so(tmp_path):
    rows = [{"text": f"alpha {i}", "label": "xy"[i % 2], "doc": i} for i in range(40)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    write_jsonl(tmp_path / "corpus.jsonl", [{"text": f"beta {i}", "doc": 1000 + i} for i in range(40)])
    task = Task(data_prep.load(str(tmp_path), toy.tokenizer()), Specials.of(toy.tokenizer()), 0.25, 64, 64)
    with pytest.raises(UserError, match="drew no contexts"):
        task.sample(np.random.default_rng(0), 60, None, 1000, 1000)


# ---------------------------------------------------------------- plays and their scores

def test_a_play_trains_a_copy_on_its_own_masks(cls_folder, monkeypatch):
    """Each context under its own row of the mask in every epoch; what is fine-tuned is the adapted LM; the LM itself stays as it was."""
    tok = fast_tokenizer("wordpiece")
    task, lm, seen = Task(data_prep.load(str(cls_folder), tok), Specials.of(tok), 0.3, 64, 64), random_lm("bert", len(tok)), []
    sub = task.sample(np.random.default_rng(0), 12, None, 20, 20)
    batch = gather(sub.contexts, np.arange(len(sub.contexts)))
    mask = maskers.pick(np.random.default_rng(1).random(batch.ids.shape), batch, maskers.budget(batch, 0.2))
    before, loss = copy.deepcopy(lm.state_dict()), pretrain.mlm_loss
    monkeypatch.setattr(pretrain, "mlm_loss", lambda model, t: seen.append(t["labels"].tolist()) or loss(model, t))
    monkeypatch.setattr(finetune_cls, "finetune", lambda lm, *_, **__: lm)
    model, adapted, _ = train_nmg.play(lm, task, sub, mask, 0, {"p": 0.2, "epochs": 2, "lr": 1e-3, "batch_size": 1, "max_len": 64}, {})
    assert sorted(seen) == sorted(2 * [batch.ids[b][mask[b]].tolist() for b in range(len(mask))])
    assert model is adapted and all(torch.equal(w, before[k]) for k, w in lm.state_dict().items())
    assert any(not torch.equal(w, before[k]) for k, w in adapted.state_dict().items())


class Known(torch.nn.Module):
    """A model whose logits a table says for each token; padding counts for nothing."""

    def __init__(self, vocab, labels):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(vocab, labels, generator=torch.Generator().manual_seed(0)))
        self.config = SimpleNamespace(num_labels=labels)

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        each = self.table[input_ids] * attention_mask[..., None]
        return SimpleNamespace(logits=each.sum(1), start_logits=each[..., 0], end_logits=each[..., -1])


def test_scores_of_texts(cls_folder):
    tok = fast_tokenizer("wordpiece")
    train, model = data_prep.load(str(cls_folder), tok)["train"], Known(len(tok), 4)
    val = data_prep.heads(train, Specials.of(tok), 64).take(np.array([5, 2, 17, 9, 11]))
    sub, task = train_nmg.SubTask(val, val, val, 0), SimpleNamespace(kind="cls")
    logits = torch.stack([model.table[tok(train.raw(i))["input_ids"]].sum(0) for i in (5, 17, 11)]).detach()
    gold = torch.from_numpy(np.array(train.label))[[5, 17, 11]].long()
    log_p = -torch.nn.functional.cross_entropy(logits, gold, reduction="none")
    for metric, theirs in (("likelihood", log_p), ("accuracy", logits.argmax(1) == gold)):
        np.testing.assert_allclose(train_nmg.score(model, task, sub, np.array([0, 2, 4]), metric), theirs.float(), rtol=1e-4)


def test_scores_of_questions(qa_folder):
    """Against the windows and offsets of Hugging Face's tokenizer: means over the windows that hold the whole answer."""
    tok = fast_tokenizer("wordpiece")
    split, model = data_prep.load(str(qa_folder), tok)["train"], Known(len(tok), 2)
    with torch.no_grad():
        model.table[tok.convert_tokens_to_ids(["purred", "big", "many"]), 0] += 9
    pieces = data_prep.windows(split, Specials.of(tok), 64, 16, 32)
    sub, task, likely, hit = train_nmg.SubTask(pieces, pieces, pieces, 0), SimpleNamespace(kind="qa"), [], []
    for q, asked in enumerate(split.questions):
        text, answer, each = split.raw(split.q_row[q]), asked["scored"][0], []
        begin = text.index(answer)
        enc = tok(asked["question"], text, truncation="only_second", max_length=64, stride=16, return_overflowing_tokens=True,
                  return_offsets_mapping=True)
        for ids, spans, types in zip(enc["input_ids"], enc["offset_mapping"], enc["token_type_ids"], strict=True):
            context = [(t, lo, hi) for t, ((lo, hi), of_text) in enumerate(zip(spans, types, strict=True)) if of_text and lo < hi]
            first, last = [t for t, lo, _ in context if lo == begin], [t for t, _, hi in context if hi == begin + len(answer)]
            if first and last:
                logits = model.table[ids].detach()
                p, best = logits.log_softmax(0), logits.argmax(0)
                each.append([(p[first[0], 0] + p[last[0], 1]).item(), ((best[0] == first[0]).item() + (best[1] == last[0]).item()) / 2])
        likely.append(np.mean([a for a, _ in each]))
        hit.append(np.mean([b for _, b in each]))
    np.testing.assert_allclose(train_nmg.score(model, task, sub, np.arange(12), "likelihood"), likely, rtol=1e-4)
    np.testing.assert_allclose(train_nmg.score(model, task, sub, np.arange(12), "positions"), hit)
    assert len(set(hit)) > 1


def likelihoods(lm, task, sub, *play):
    return train_nmg.score(train_nmg.play(lm, task, sub, *play)[0], task, sub, np.arange(len(sub.doc[1])), "likelihood")


def test_masks_fit_batches_that_are_padded_further(monkeypatch, tiny_data):
    """As on a GPU, where batches are padded to a multiple of 8."""
    task, lm = Task(tiny_data, Specials.of(toy.tokenizer()), 0.5, 64, 64), pretrain.load_lm("tiny")
    sub = task.sample(np.random.default_rng(0), 16, 6, 1000, 1000)
    mask = gather(sub.contexts, np.arange(len(sub.contexts))).ok
    monkeypatch.setattr(pretrain, "gather", lambda pieces, rows, width=None, multiple=1: gather(pieces, rows, width, 8))
    mlm, ft = ({"epochs": 1, "lr": 1e-3, "batch_size": 16, "max_len": 64} for _ in range(2))
    assert np.isfinite(likelihoods(lm, task, sub, mask, 0, mlm | {"p": 1.0}, ft)).all()


def test_equal_masks_score_equally_and_only_common_seeds_do(tiny_data):
    task, lm = Task(tiny_data, Specials.of(toy.tokenizer()), 0.5, 64, 64), pretrain.load_lm("tiny")
    sub = task.sample(np.random.default_rng(0), 48, 6, 1000, 1000)
    batch = gather(sub.contexts, np.arange(len(sub.contexts)))
    mask = maskers.find("random")(batch, maskers.budget(batch, 0.05), RowRandom(0, "x", 0, batch.rows))
    mlm, ft = ({"epochs": 1, "lr": 1e-3, "batch_size": 16, "max_len": 64} for _ in range(2))
    scores = [likelihoods(lm, task, sub, mask, seed, mlm | {"p": 0.05}, ft) for seed in (1, 1, 2)]
    assert np.array_equal(scores[0], scores[1]) and not np.array_equal(scores[0], scores[2])


# ---------------------------------------------------------------- sequential validation

@pytest.mark.parametrize(("looks", "constant"), [(2, 2.178), (3, 2.289), (5, 2.413)])
def test_the_boundary_is_pococks(looks, constant):
    """Jennison and Turnbull 2000, table 2.1, two-sided at 0.05."""
    assert report.boundary(0.05, tuple(np.arange(1, looks + 1) / looks)) == pytest.approx(constant, abs=0.01)


def sequential(d, error):
    """Sign and share of examples used of many validations at once, d (R, V) the differences in the order of the examples."""
    V, sign, used, going = d.shape[1], np.zeros(len(d)), np.zeros(len(d)), np.full(len(d), True)
    for look in report.LOOKS:
        if not going.any():
            break
        n = math.ceil(V * look)
        signs, more = report.verdict(d[going, :n].astype(int), V, error)
        sign[going], used[going] = signs, n / V
        going[going] = more
    return sign, used


def populations(rng, R, V, difference, world):
    """(R, V) paired differences of 0/1 scores, not equal in a quarter of the examples: V examples of a world with the given mean difference,
    or V examples with exactly that one, in random order."""
    if world:
        u = rng.random((R, V), np.float32)
        return (u < (0.25 + difference) / 2).astype(np.int8) - (u > 1 - (0.25 - difference) / 2)
    net, unequal = round(difference * V), round(0.25 * V)
    one = np.zeros(V, np.int8)
    one[:unequal], one[:(unequal - net) // 2] = 1, -1
    one[unequal - (unequal - net) % 2:unequal] = 0                      # so that the sum is `net`
    assert one.sum() == net
    return rng.permuted(np.tile(one, (R, 1)), axis=1)


@pytest.mark.parametrize("error", [0.05, 0.2])
@pytest.mark.parametrize(("V", "R"), [(417, 4000), (10_000, 400)])
def test_wrong_signs_stay_below_the_error_rate(V, R, error):
    """Printed: percent of wrong signs, of ties, and of the examples that were used."""
    rng = np.random.default_rng(0)
    for world, difference in itertools.product((True, False), (0, 0.005, 0.01, 0.02, 0.05)):
        sign, used = sequential(populations(rng, R, V, difference, world), error)
        wrong, tie = (sign < 0 if difference else sign != 0).mean(), (sign == 0).mean()
        print(f"{V:6} {error:4} {'world' if world else 'exact'} {100 * difference:4}: {100 * wrong:5.1f} {100 * tie:5.1f} {100 * used.mean():5.1f}")
        assert wrong < (error if difference == 0 else error / 2) + 3 * math.sqrt(error * (1 - error) / R)
        if difference == 0.05 and V == 10_000:
            assert (sign == 1).all() and used.mean() < 0.2
        if difference == 0 and world:
            assert wrong > error / 2 and used.mean() < 0.8              # neither always a tie nor always all examples


def test_three_players_need_more_examples_than_two():
    """An episode goes on until all of its three comparisons are decided. Players equal in the world. Printed: percent of episodes with a
    sign, and of the examples that were used, by one comparison and by all three."""
    R, V, rng = 2000, 417, np.random.default_rng(0)
    right = rng.random((3, R, V), np.float32) < (1 - math.sqrt(0.5)) / 2       # so that two are unequal in a quarter of the examples
    for error in (0.05, 0.2):
        signs, used = zip(*(sequential(right[i].astype(np.int8) - right[j], error) for i, j in ((0, 1), (0, 2), (1, 2))), strict=True)
        wrong, one, three = (np.stack(signs) != 0).any(0).mean(), used[0].mean(), np.max(used, 0).mean()
        print(f"three players, {error}: {100 * wrong:.1f} {100 * one:.1f} {100 * three:.1f}")
        assert one < three < 1 and error / 2 < wrong < 3 * error


@pytest.mark.parametrize(("right", "error", "used"), [((0.5, 0.05, 0.95), 0.05, 1 / 8), ((0.5, 0.5, 0.5), 0.2, 1 / 2), ((0.5, 0.05, 0.95), None, 1)])
def test_all_players_are_scored_on_the_same_examples_until_every_comparison_is_decided(right, error, used, tiny_data, monkeypatch):
    """Players that are equal on every example tie as soon as all of them would hardly tell them apart."""
    task, u, asked = Task(tiny_data, Specials.of(toy.tokenizer()), 0.5, 64, 64), np.random.default_rng(0), []
    sub, players = task.sample(np.random.default_rng(0), 1000, None, 1000, 1000), ("random", "opponent", "learner")
    u = u.random(len(sub.doc[1]))
    tuned = {name: (u < p).astype(float) for name, p in zip(players, right, strict=True)}

    def known(scores, task, sub, some, metric):
        asked.append(some)
        return scores[some]

    monkeypatch.setattr(train_nmg, "score", known)
    seen, wins, _ = train_nmg.validate(tuned, players, task, sub, "accuracy", error, 1)
    parts = [np.sort(np.concatenate(asked[i::3])) for i in range(3)]
    assert len(set(parts[0])) == len(parts[0]) == math.ceil(len(u) * used) and all(np.array_equal(parts[0], part) for part in parts)
    assert all(np.array_equal(np.sort(seen[name]), np.sort(tuned[name][parts[0]])) for name in players)
    assert wins == {(a, b): np.sign(right[i] - right[j]) for i, a in enumerate(players) for j, b in enumerate(players)}


def test_parts_of_the_validation_examples_score_as_in_the_whole(qa_folder):
    """A question keeps all of its windows, though the processes of a team and the looks of a sequential validation share the questions."""
    data = data_prep.load(str(qa_folder), toy.tokenizer(), dev_share=0.1)
    pieces = data_prep.windows(data["train"], Specials.of(toy.tokenizer()), 64, 16, 32)
    sub, task = train_nmg.SubTask(pieces, pieces, pieces, 0), SimpleNamespace(kind="qa")
    model, V = loop.with_head(random_lm("bert", len(toy.tokenizer())), AutoModelForQuestionAnswering, 0), len(sub.doc[1])
    assert len(pieces) > V > 4
    whole = train_nmg.score(model, task, sub, np.arange(V), "f1")
    assert len(set(whole)) > 2
    for some in (np.arange(1, V, 3), np.array([V - 1]), np.arange(0)):
        np.testing.assert_allclose(train_nmg.score(model, task, sub, some, "f1"), whole[some])
    assert not len(train_nmg.score(model, task, sub, np.arange(0), "likelihood"))


# ---------------------------------------------------------------- replay

def some_actions(episode, contexts, each):
    a = np.zeros(contexts * each, train_nmg.ACTION)
    a["episode"], a["context"], a["priority"] = episode, np.repeat(np.arange(contexts), each), 1
    return a


def test_replay_is_bounded_and_loses_whole_contexts():
    agent = train_nmg.Agent(NMG(8), 1e-4)
    memory = {e: train_nmg.States(torch.zeros(10, 8, dtype=torch.float16), torch.tensor([0, 10]), torch.ones(10, dtype=torch.bool)) for e in range(3)}
    for e in range(3):
        agent.store(some_actions(e, 4, 3), 20)
    assert len(agent.replay) == 18 and agent.replay["episode"].tolist() == [1] * 6 + [2] * 12 and agent.replay["context"][0] == 2
    train_nmg.forget(memory, {"learner": agent}, 1)
    assert sorted(memory) == [1, 2]
    train_nmg.forget(memory, {"learner": agent}, 170e-9)                # 160 bytes an episode: one is left
    assert sorted(memory) == [2] and set(agent.replay["episode"]) == {2}


def test_contexts_are_evaluated_in_chunks_as_each_alone(monkeypatch):
    """Logits, values and gradients of a shuffled selection are those of one context at a time."""
    monkeypatch.setattr(train_nmg, "by_length", functools.partial(loop.by_length, tokens=40))
    torch.manual_seed(0)
    policy, rng = NMG(8), np.random.default_rng(0)
    lengths = [rng.integers(2, 30, 5) for _ in range(2)]
    memory = {e: train_nmg.States(torch.randn(n.sum(), 8).half(), torch.from_numpy(np.concatenate(([0], n.cumsum()))), torch.rand(n.sum()) < 0.7)
              for e, n in enumerate(lengths)}
    episode, context = rng.integers(2, size=12), rng.integers(5, size=12)
    alone, grads = [], []
    for e, c in zip(episode, context, strict=True):
        of = slice(*memory[e].start[c:c + 2])
        alone.append(policy(memory[e].h[None, of].float(), torch.ones(1, lengths[e][c], dtype=torch.bool), memory[e].ok[None, of]))
    weights = torch.randn(12)
    for logits, values in ((torch.nn.utils.rnn.pad_sequence([o[0][0] for o in alone], True, -torch.inf), torch.cat([o[1] for o in alone])),
                           train_nmg.evaluate(policy, memory, episode, context)):
        policy.zero_grad()
        (weights @ (logits.masked_fill(logits.isinf(), 0).square().sum(1) + values)).backward()
        grads.append([logits, values, *(p.grad.clone() for p in policy.parameters())])
    torch.testing.assert_close(*grads)


def test_states_are_the_lms_of_each_context_alone(tmp_path):
    """In the order of the contexts, whatever their lengths; at(mask): those of the masked tokens."""
    tok, rng = toy.tokenizer(), random.Random(0)
    (tmp_path / "c.txt").write_text("\n".join(" ".join(rng.choices(toy.general()[0].split(), k=rng.randint(1, 40))) for _ in range(60)))
    pieces, lm = blocks(data_prep.load(str(tmp_path / "c.txt"), tok).corpus, Specials.of(tok), 32), random_lm("bert", len(tok))
    states = train_nmg.States.of(lm, pieces)
    mask = np.zeros((len(pieces), 32), bool)
    for i, n in enumerate(pieces.length):
        alone, mask[i, n // 2] = gather(pieces, np.array([i])), True
        of = slice(states.start[i], states.start[i + 1])
        torch.testing.assert_close(states.h[of].float(), pretrain.hidden_states(lm)(alone)[0], atol=2e-3, rtol=2e-3)
        assert states.ok[of].tolist() == alone.ok[0].tolist()
        np.testing.assert_array_equal(states.at(mask)[i], states.h[of][n // 2])


def test_an_agent_learns_from_prioritised_replay(monkeypatch):
    torch.manual_seed(0)
    agent, start = train_nmg.Agent(NMG(8), 1e-2), torch.tensor([0, 9, 15, 30])
    memory = {0: train_nmg.States(torch.randn(30, 8).half(), start, torch.ones(30, dtype=torch.bool))}
    a = np.zeros(12, train_nmg.ACTION)
    a["context"], a["position"], a["reward"] = np.arange(12) % 3, np.arange(12) // 3, np.where(np.arange(12) % 3, 1, -1)
    a["rarity"], a["priority"], a["log_old"] = 1 / np.sqrt(1 + np.arange(12) % 4), 1, -2
    agent.store(a, 50)
    value = train_nmg.policy_of(agent.policy, memory[0])[1]
    agent.learn(memory, np.random.default_rng(0), 1, 12, "linear", None)
    np.testing.assert_allclose(agent.replay["priority"], np.abs(a["reward"] - value[a["context"]]) * a["rarity"], rtol=1e-4)     # V before the step
    agent.learn(memory, np.random.default_rng(0), 200, 12, "linear", None)
    np.testing.assert_allclose(train_nmg.policy_of(agent.policy, memory[0])[1], [-1, 1, 1], atol=0.1)       # the value: the mean reward

    seen, zero = [], torch.zeros((), requires_grad=True)
    monkeypatch.setattr(train_nmg, "evaluate", lambda policy, memory, episode, context: (None, torch.zeros(len(context))))
    monkeypatch.setattr(train_nmg, "losses", lambda logits, value, action, *_, **__: seen.append(action.tolist()) or (zero * 1, zero * 1))
    monkeypatch.setattr(train_nmg, "priority", lambda reward, value, rarity, form: rarity)
    agent.replay = np.zeros(4, train_nmg.ACTION)
    agent.replay["position"], agent.replay["priority"], agent.replay["rarity"] = range(4), [1, 2, 5, 0], [1, 2, 5, 0]
    agent.learn(memory, np.random.default_rng(0), 1000, 1, "linear", None)
    np.testing.assert_allclose(np.bincount(np.ravel(seen), minlength=4) / 1000, np.array([1, 2, 5, 0]) / 8, atol=0.06)


# ---------------------------------------------------------------- learning, with the inner loop replaced by a known reward

@pytest.mark.parametrize("usual", [True, False])
def test_episodes_are_the_papers(usual, cls_folder, lm_folder, monkeypatch, tmp_path):
    """What main stores and hands on, against a loop over the paper's cases: rewards, log probabilities, rarity, LMs, seeds, knobs."""
    players, r = ["random", "opponent", "learner"] if usual else ["random", "learner"], {"random": 0.5, "opponent": 0.7, "learner": 0.6}
    n, plays, stored, given, store, losses = len(players), [], [], [], train_nmg.Agent.store, train_nmg.losses
    knobs, agents, asked = [], [], set()

    def known(lm, task, sub, mask, seed, mlm, ft):
        plays.append((mask, getattr(lm, "mark", 0), seed, sub))
        knobs.append((mlm, ft))
        adapted = copy.deepcopy(lm)
        adapted.mark = len(plays)
        return players[(len(plays) - 1) % n], adapted, {}

    monkeypatch.setattr(train_nmg, "play", known)
    monkeypatch.setattr(train_nmg, "score", lambda name, task, sub, some, metric: asked.add(metric) or np.full(len(some), r[name]))
    monkeypatch.setattr(train_nmg, "priority", lambda reward, value, rarity, form: asked.add(form) or 7 * rarity)
    monkeypatch.setattr(train_nmg.Agent, "store", lambda self, new, size: (
        agents.append(self), stored.append(new), asked.add(size), store(self, new, size)))
    monkeypatch.setattr(train_nmg, "forget", lambda memory, agents, gb: asked.add(gb))
    monkeypatch.setattr(train_nmg, "losses", lambda *a, **k: given.append((len(a[0]), k)) or losses(*a, **k))
    monkeypatch.setattr(train_nmg, "curves", lambda *_: None)
    train_nmg.main(str(cls_folder), str(lm_folder), episodes=3, contexts=12, val_share=0.3, p=0.3, explore=3, updates=2, minibatch=8, alpha=0.3,
                   mlm_epochs=2, mlm_lr=1e-4, ft_epochs=4, ft_lr=2e-4, batch_size=6, max_len=32, ft_max_len=24, fast=usual, metric="likelihood",
                   priority_form="exp", replay=5000, replay_gb=0.5, entropy="mean", clip=0.2, self_play=usual, continual=usual,
                   common=usual, out=str(tmp_path / "o"))
    assert [mark for _, mark, *_ in plays] == [e * n * usual for e in range(3) for _ in players]            # whose LM an episode starts from
    assert len({sub.seed for *_, sub in plays}) == 3 and asked == {"likelihood", "exp", 5000, 0.5}
    assert all(mlm == {"p": 0.3, "epochs": 2, "lr": 1e-4, "batch_size": 6, "max_len": 32, "fast": usual} for mlm, _ in knobs)
    assert all(ft == {"epochs": 4, "lr": 2e-4, "batch_size": 6, "max_len": 24, "fast": usual} for _, ft in knobs)
    assert (NMG.load(str(tmp_path / "o")).score[0].weight == agents[-1].policy.score[0].weight).all()               # the learner's
    assert all(k == {"alpha": 0.3, "entropy": "mean", "clip": 0.2} and b == 8 for b, k in given) and len(given) == 3 * 2 * (n - 1)
    for e in range(3):
        of_episode = plays[e * n:e * n + n]
        masks, sub = {name: mask for name, (mask, *_) in zip(players, of_episode, strict=True)}, of_episode[0][3]
        assert len({seed for _, _, seed, _ in of_episode}) == (1 if usual else n)
        batch = gather(sub.contexts, np.arange(len(sub.contexts)))
        for name, new in zip(players[1:], stored[e * (n - 1):(e + 1) * (n - 1)], strict=True):
            expected = {}
            for s, a in np.argwhere(masks[name]).tolist():
                free = [o for o in players if o != name and not masks[o][s, a]]
                if free:
                    expected[s, a] = (min(np.sign(r[name] - r[o]) for o in free), -math.log(batch.ok[s].sum()),
                                      1 / math.sqrt((batch.ids[s] == batch.ids[s, a]).sum()))
            got = {(c, p): (R, log_old, rarity) for _, c, p, R, log_old, rarity, _ in new.tolist()}
            np.testing.assert_allclose(new["priority"], 7 * new["rarity"], rtol=1e-6)
            assert got.keys() == expected.keys() and all(got[k] == pytest.approx(expected[k], rel=1e-5) for k in got)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_papers_own_rule_learns(sign):
    """Where the score of a play is how many informative tokens (a quarter of all) it masked, or how few."""
    N, L, names = 6, 12, ("opponent", "learner")
    torch.manual_seed(1)
    rng, agents, memory, shares = np.random.default_rng(2), {n: train_nmg.Agent(NMG(8), 1e-3) for n in names}, {}, []
    batch = SimpleNamespace(ok=np.ones((N, L), bool))
    for e in range(40):
        good = rng.random((N, L)) < 0.25
        h = torch.randn(N * L, 8).half()
        h[:, 0] = torch.from_numpy(np.where(good, 2.0, -2.0)).flatten().half()
        memory[e] = states = train_nmg.States(h, torch.arange(0, N * L + 1, L), torch.ones(N * L, dtype=torch.bool))
        log_p, value = {"random": np.full((N, L), -np.log(L))}, {}
        for name in names:
            logits, value[name] = train_nmg.policy_of(agents[name].policy, states)
            log_p[name] = train_nmg.log_softmax(logits)
        mask = {name: maskers.pick(log_p[name] + rng.gumbel(size=(N, L)), batch, np.full(N, 2)) for name in ("random", *names)}
        r = {name: sign * (m & good).sum() for name, m in mask.items()}
        for name, other in (names, names[::-1]):
            R, counts = train_nmg.rewards(mask[name], mask["random"], mask[other], np.sign(r[name] - r["random"]), np.sign(r[name] - r[other]))
            agents[name].store(train_nmg.actions(e, counts, R, log_p[name], value[name], np.arange(N * L).reshape(N, L), "linear"), 300)
            agents[name].learn(memory, rng, 10, 64, "linear", None)
        shares.append((np.exp(log_p["learner"]) * good).sum() / N)                              # of the learner's probability
    share = np.mean(shares[-10:])
    assert share > 0.35 if sign > 0 else share < 0.1


def meta_train(monkeypatch, tmp_path, seed, effect, **knobs):
    """Trains a policy where masking an informative word adds `effect` to the score of its document, whose noise (0.25 a document and play)
    is that of real plays; returns the share of informative words among its greedy masks and among its sampled ones."""
    noise = np.random.default_rng(seed)

    def known(lm, task, sub, mask, *_):
        batch = gather(sub.contexts, np.arange(len(sub.contexts)))
        good = (mask & toy.informative()[batch.ids]).sum(1)
        of_context, of_val = sub.doc
        score = {d: effect * good[of_context == d].sum() + noise.normal(0, 0.25) for d in np.unique(of_val)}
        return np.array([score[d] for d in of_val]), lm, {}         # in the place of a fine-tuned model: its scores

    monkeypatch.setattr(train_nmg, "play", known)
    monkeypatch.setattr(train_nmg, "score", lambda scores, task, sub, some, metric: scores[some])
    monkeypatch.setattr(train_nmg, "curves", lambda *_: None)
    train_nmg.main(seed=seed, out=str(tmp_path / str(seed)), compare=0, save_every=1000, **knobs)
    metrics = [json.loads(line) for line in open(tmp_path / str(seed) / "metrics.jsonl")]
    policy, corpus = NMG.load(tmp_path / str(seed)), data_prep.load("toycls", toy.tokenizer()).corpus
    batch = gather(data_prep.blocks(corpus, Specials.of(toy.tokenizer()), 64), np.arange(0, 3840, 16))
    with torch.no_grad():
        logits = policy(pretrain.hidden_states(pretrain.load_lm("tiny"))(batch), torch.from_numpy(batch.real), torch.from_numpy(batch.ok))[0].numpy()
    good = toy.informative()[batch.ids]
    return good[np.arange(len(logits)), logits.argmax(1)].mean(), (np.exp(train_nmg.log_softmax(logits)) * good).sum(1).mean(), metrics


@pytest.mark.parametrize("seed", range(3))
def test_the_rl_alone_finds_a_known_reward(seed, monkeypatch, tmp_path):
    greedy, _, metrics = meta_train(monkeypatch, tmp_path, seed, 0.05, episodes=8)
    assert greedy >= 0.9 and metrics[-1]["learner_score"] > metrics[-1]["random_score"]


def test_noise_teaches_nothing(monkeypatch, tmp_path):
    sampled = [meta_train(monkeypatch, tmp_path, seed, 0.0, episodes=5)[1] for seed in range(3)]
    assert np.abs(np.array(sampled) - 0.25).max() < 0.1                # 3 of 12 tokens are informative


# ---------------------------------------------------------------- the script

ONE = {"OMP_NUM_THREADS": "1"}                                          # sums in the same order, however many processes share the cores


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    place = tmp_path_factory.mktemp("nmg")
    return place, run("train_nmg.py", *SMALL, "--out=whole", cwd=place, **ONE)


def ends_as(place, finished):
    """Policy and metrics are those of the run that nobody killed."""
    policies = [(p / "whole/model.safetensors").read_bytes() for p in (place, finished)]
    metrics = [[{k: v for k, v in json.loads(line).items() if k not in ("seconds", "peak_gb")} for line in open(p / "whole/metrics.jsonl")]
               for p in (place, finished)]
    return policies[0] == policies[1] and metrics[0] == metrics[1]


@needs_gpu
def test_a_small_run_on_a_gpu(tmp_path):
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        result = run("train_nmg.py", *SMALL, "--out=whole", cwd=tmp_path / place, CUDA_VISIBLE_DEVICES=GPU)
        assert result.returncode == 0 and "weights on cuda" in result.stdout, result.stderr
    assert ends_as(tmp_path / "one", tmp_path / "two")


def test_a_small_run(finished):
    place, result = finished
    assert result.returncode == 0, result.stderr
    assert sorted(f.name for f in (place / "whole").iterdir()) == ["config.json", "curves.png", "metrics.jsonl", "model.safetensors", "run.json"]
    metrics = [json.loads(line) for line in open(place / "whole/metrics.jsonl")]
    assert [m["episode"] for m in metrics] == [1, 2, 3, 4]
    assert metrics[0]["learner_entropy"] == pytest.approx(metrics[0]["uniform_entropy"]) != metrics[1]["learner_entropy"]   # explores, then plays
    again = call("train_nmg.py", *SMALL, "--out=whole", cwd=place)
    assert again.returncode == 0 and "already done" in again.stdout
    other = call("train_nmg.py", *SMALL, "--out=whole", "--seed=1", cwd=place)
    assert other.returncode == 2 and "seed=0 there, 1 here" in other.stderr


def test_killed_at_any_moment_it_ends_the_same(finished, tmp_path):
    rng, log = random.Random(0), tmp_path / "whole/metrics.jsonl"
    for n in (1, 2, 3):                                                 # after each more episode than before, saved or not
        kill_when(lambda n=n: log.exists() and len(log.read_text().splitlines()) >= n and not time.sleep(rng.uniform(0, 0.3)),
                  "train_nmg.py", *SMALL, "--out=whole", cwd=tmp_path, **ONE)
        (tmp_path / f"whole/.checkpoint-0000{n}.pt.1.tmp").write_bytes(b"half")
    result = run("train_nmg.py", *SMALL, "--out=whole", cwd=tmp_path, **ONE)
    assert result.returncode == 0 and "resuming after episode" in result.stdout, result.stderr
    assert ends_as(tmp_path, finished[0])
    assert sorted(f.name for f in (tmp_path / "whole").iterdir()) == sorted(f.name for f in (finished[0] / "whole").iterdir())


@pytest.mark.parametrize("what", ["checkpoint", "states"])
def test_a_damaged_file_is_passed_over(what, finished, tmp_path):
    kill_when(lambda: len(list(tmp_path.glob("whole/checkpoint-*.pt"))) == 2, "train_nmg.py", *SMALL, "--out=whole", cwd=tmp_path, **ONE)
    newest = sorted(tmp_path.glob("whole/checkpoint-*.pt"))[-1]
    if what == "states":
        newest = tmp_path / f"whole/states-{max(torch.load(newest, weights_only=True)['memory']):05}.safetensors"
    newest.write_bytes(newest.read_bytes()[:1000])
    result = run("train_nmg.py", *SMALL, "--out=whole", cwd=tmp_path, **ONE)
    assert result.returncode == 0 and "damaged" in result.stdout and "resuming after episode" in result.stdout, result.stderr
    assert ends_as(tmp_path, finished[0])


def test_the_plays_of_an_episode_in_processes_of_their_own(finished, tmp_path):
    """torchrun with three processes, the LM carried on from episode to episode: the same policy as from one process, byte for byte."""
    flags = [*SMALL, "--continual=True", "--episodes=3", "--out=whole"]
    for place in ("one", "three"):
        (tmp_path / place).mkdir()
    assert run("train_nmg.py", *flags, cwd=tmp_path / "one", **ONE).returncode == 0
    result = subprocess.run(torchrun(3, "train_nmg.py", *flags), cwd=tmp_path / "three", capture_output=True, text=True, timeout=600,
                            env=os.environ | ONE)
    assert result.returncode == 0, result.stderr
    assert ends_as(tmp_path / "three", tmp_path / "one") and result.stdout.count("policy: ") == 1


def test_a_play_shared_by_processes(tmp_path):
    """torchrun with four processes, two a play: what one process finds, but for rounding. Before, one of two is killed, which ends that run; the
    same command goes on, with however many processes."""
    flags = [*SMALL, "--episodes=3", "--self_play=False", "--continual=True", "--metric=likelihood", "--credit=play", "--sequential=0.3",
             "--out=whole"]
    two, four = (torchrun(n, "train_nmg.py", *flags) for n in (2, 4))
    kill_worker_when(lambda: list(tmp_path.glob("whole/checkpoint-*.pt")), two, tmp_path)
    again = subprocess.run(four, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=os.environ | ONE)
    assert again.returncode == 0 and again.stdout.count("resuming after episode") == 1, again.stderr
    (tmp_path / "one").mkdir()
    assert run("train_nmg.py", *flags, cwd=tmp_path / "one", **ONE).returncode == 0
    metrics = [[{k: v for k, v in json.loads(line).items() if k not in ("seconds", "peak_gb")} for line in open(folder / "whole/metrics.jsonl")]
               for folder in (tmp_path, tmp_path / "one")]
    assert len(metrics[0]) == 3 and all(shared == pytest.approx(alone, rel=0.01) for shared, alone in zip(*metrics, strict=True))


def test_killed_while_comparing_it_still_compares(finished, tmp_path, monkeypatch):
    folder, compared = shutil.copytree(finished[0] / "whole", tmp_path / "whole"), []

    def compare(data, shown, seeds, picture):
        compared.append((list(shown.items()), list(seeds)))
        picture.touch()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(toy, "compare", compare)
    (folder / "checkpoint-00003.pt").write_bytes(b"left over")
    for _ in range(2):                                                  # the second finds the picture and does not compare again
        train_nmg.main(contexts=24, docs=6, episodes=4, explore=1, replay=24, out="whole", compare=2)
    shown = {"none": "none", "random": "random", "untrained sampled": "sampled:whole/untrained", "nmg sampled": "sampled:whole",
             "untrained greedy": "nmg:whole/untrained", "nmg greedy": "nmg:whole", "oracle": "oracle"}
    assert compared == [(list(shown.items()), [0, 1])] and not list(folder.glob("checkpoint-*"))
    trained, fresh = (NMG.load(folder / name) for name in (".", "untrained"))
    train_nmg.torch_seed(0, "learner")                                  # as meta_train does
    assert trained.about["episodes"] == 4 and torch.equal(fresh.score[0].weight, NMG(128).score[0].weight)
    assert not torch.equal(trained.score[0].weight, fresh.score[0].weight)


def test_the_policy_is_a_masker(finished, tmp_path):
    result = call("pretrain.py", f"--masker=nmg:{finished[0] / 'whole'}", "--epochs=1", "--out=o", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    made = json.loads((tmp_path / "o/run.json").read_text())
    assert made["masker_file"] == data_prep.checksum(finished[0] / "whole/model.safetensors")


@pytest.mark.parametrize("flags", [
    ["--self_play=False", "--continual=True", "--credit=play", "--entropy=mean", "--priority_form=exp", "--clip=0.2"],
    ["--dataset=toyqa", "--metric=positions", "--common=False", "--docs=4", "--ft_epochs=1"],
    ["--dataset=toyqa", "--metric=likelihood", "--docs=4", "--ft_epochs=1", "--replay=60", "--replay_gb=0.0001"],
    ["--dataset=toyqa", "--metric=f1", "--docs=4", "--ft_epochs=1", "--validation=12", "--credit=play", "--sequential=0.2"],
])
def test_switches(flags, tmp_path):
    result = call("train_nmg.py", *SMALL[:3], "--episodes=2", "--compare=0", *flags, "--out=o", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    metrics = [json.loads(line) for line in open(tmp_path / "o/metrics.jsonl")]
    assert len(metrics) == 2 and ("opponent_score" in metrics[0]) != ("--self_play=False" in flags)
    assert all((m.get("validated") in range(2, 13)) == ("--sequential=0.2" in flags) for m in metrics)
    assert all(np.isfinite(v) for m in metrics for v in m.values() if not isinstance(v, dict))


@pytest.mark.parametrize(("script", "kind", "lengths"), [("pretrain", "cls", [256]), ("pretrain", "qa", [512]), ("finetune_cls", "cls", [256]),
                         ("finetune_qa", "qa", [384]), ("train_nmg", "cls", [256, 256]), ("train_nmg", "qa", [512, 384])])
def test_lengths_are_the_papers(script, kind, lengths, cls_folder, qa_folder, lm_folder, tmp_path, monkeypatch):
    seen = []

    def fitting(model, max_len, default, knob="max_len"):
        seen.append(default)
        if len(seen) == len(lengths):
            raise UserError("stop")
        return 48

    monkeypatch.setattr(importlib.import_module(script), "fitting", fitting)
    result = call(f"{script}.py", f"--dataset={cls_folder if kind == 'cls' else qa_folder}", f"--lm={lm_folder}", cwd=tmp_path)
    assert "stop" in result.stderr and seen == lengths


def test_the_papers_hyper_parameters(cls_folder, qa_folder, lm_folder, tmp_path, monkeypatch):
    """PAPER: meta-training and meta-test."""
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(train_nmg, "meta_train", lambda k, *_: seen.append(vars(k)))
    paper = {"episodes": 200, "contexts": 200, "examples": 1000, "validation": 10_000, "p": 0.05, "mlm_epochs": 3, "mlm_lr": 2e-5, "rl_lr": 1e-4,
             "updates": 10, "minibatch": 64, "replay": 50_000, "alpha": 0.01, "self_play": True, "continual": True, "credit": "play",
             "metric": "accuracy", "priority_form": "linear", "entropy": "sum", "clip": None}
    for data, own in ((cls_folder, {"ft_epochs": 5, "ft_lr": 2e-5}), (qa_folder, {"ft_epochs": 1, "ft_lr": 3e-5})):
        train_nmg.main(str(data), str(lm_folder), out=f"{data.name}-run")
        assert paper | own == {k: seen[-1][k] for k in paper | own}
    NMG(32, lm="x").save(tmp_path)
    monkeypatch.setattr(pretrain, "pretrain", lambda *_, **knobs: seen.append(knobs) or 0.0)
    for masker, (p, epochs) in {"whole": (0.15, 1), f"nmg:{tmp_path}": (0.05, 3)}.items():
        result = call("pretrain.py", f"--dataset={cls_folder}", f"--lm={lm_folder}", f"--masker={masker}", f"--out=o{epochs}", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert (seen[-1]["p"], seen[-1]["epochs"], seen[-1]["lr"]) == (p, epochs, 2e-5)

    def stop(*_, **knobs):
        seen.append(knobs)
        raise UserError("stop")

    for script, data, epochs, lr in ((finetune_cls, cls_folder, 3, 2e-5), (finetune_qa, qa_folder, 2, 3e-5)):
        monkeypatch.setattr(script, "finetune", stop)
        assert "stop" in call(f"{script.__name__}.py", f"--dataset={data}", f"--lm={lm_folder}", cwd=tmp_path).stderr
        assert (seen[-1]["epochs"], seen[-1]["lr"]) == (epochs, lr)


@needs_shared
def test_chemprot_with_a_real_lm(tmp_path):
    result = run("train_nmg.py", "--dataset=chemprot", f"--raw={SHARED}/data/chemprot", f"--lm={SHARED}/lm/minilm", "--contexts=8", "--episodes=1",
                 "--validation=8", "--ft_epochs=1", "--out=o", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "690,946 weights" in result.stdout


@pytest.mark.parametrize(("flags", "said"), [
    (["--credit=plays"], "--credit=plays: allowed are play, regression"),
    (["--metric=f1"], "--metric=f1: allowed are accuracy, likelihood"),
    (["--episodes=0"], "--episodes=0: must be positive"),
    (["--val_share=2"], "--val_share=2.0: must be in (0, 1)"),
    (["--sequential=1"], "--sequential=1.0: must be in (0, 1)"),
    (["--sequential=0.1"], "--sequential=0.1: --credit=regression reads every score"),
    (["--selfplay=False"], "did you mean 'self_play'?"),
])
def test_wrong_flags(flags, said, tmp_path):
    result = call("train_nmg.py", *flags, cwd=tmp_path)
    assert result.returncode == 2 and said in result.stderr and "Traceback" not in result.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("world", "flags"), [(4, []), (3, ["--self_play=False"])])
def test_processes_that_cannot_share_the_plays(world, flags, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    result = call("train_nmg.py", *flags, cwd=tmp_path)
    assert result.returncode == 2 and f"{world} processes cannot share the {world - 1} plays" in result.stderr and not list(tmp_path.iterdir())


def test_tensorboard(tmp_path):
    flags = [*SMALL[:3], "--episodes=1", "--compare=0", "--tensorboard=True", "--out=o"]
    result = call("train_nmg.py", *flags, cwd=tmp_path)
    if importlib.util.find_spec("tensorboard"):
        assert result.returncode == 0 and list(tmp_path.glob("o/tensorboard/events.*")), result.stderr
    else:
        assert result.returncode == 2 and "pip install tensorboard" in result.stderr and not list(tmp_path.iterdir())


def test_a_replay_that_holds_no_context(tmp_path):
    result = call("train_nmg.py", *SMALL[:3], "--p=0.5", "--replay=3", "--out=o", cwd=tmp_path)
    assert result.returncode == 2 and "--replay=3: a context alone brings about" in result.stderr and not list(tmp_path.iterdir())


def test_a_masker_without_its_folder(tmp_path):
    for masker, said in (("nmg", "nmg:FOLDER"), ("sampled:nowhere", "no policy of train_nmg.py")):
        result = call("pretrain.py", f"--masker={masker}", cwd=tmp_path)
        assert result.returncode == 2 and said in result.stderr and "Traceback" not in result.stderr
