"""The outer loop: equations against naive transcriptions of the paper, learning with a known reward, resume, bad input."""
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, SHARED, needs_shared, run, squad, write_jsonl

import data_prep
import maskers
import toy
import train_nmg
from data_prep import Specials, gather
from maskers import NMG, RowRandom
from pretrain import hidden_states, load_lm, pretrain


# ---------------------------------------------------------------- equations

@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("by_context", [False, True])
def test_rewards_are_the_papers_outer_loop(seed, by_context):
    rng = np.random.default_rng(seed)
    own, psi, other = rng.random((3, 6, 9)) < 0.4
    r, r_psi, r_other = rng.integers(0, 3, (3, 6) if by_context else (3, 1)) / 2
    scores = (r, r_psi, r_other) if by_context else (r[0], r_psi[0], r_other[0])
    R, counts = train_nmg.rewards(own, psi, other, *scores)
    alone, alone_counts = train_nmg.rewards(own, psi, None, scores[0], scores[1], None)
    for s, a in itertools.product(range(6), range(9)):
        mine, random_, theirs = (x[s if by_context else 0] for x in (r, r_psi, r_other))
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
