"""Meta-training: equations against naive transcriptions of the paper, learning with a known reward, kills."""
import copy
import gc
import importlib
import inspect
import itertools
import math
import os
import random
import re
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    SHARED,
    TEXTS,
    call,
    fast_tokenizer,
    kill_when,
    mrqa_files,
    needs_shared,
    random_lm,
    torchrun,
)

import data_prep
import finetune_cls
import finetune_qa
import maskers
import pretrain
import train_nmg
from nmg import models, paper_form, policies, runs, sources, toy
from nmg.data import blocks, collate
from nmg.policies import Policy, load_policy
from nmg.runs import RowRandom, UserError
from nmg.subtasks import SubTaskSampler
from train_nmg import Agent, Config, Play

# A run of a few seconds, in which the LM of an episode is that of the last, and old actions leave replay.
SMALL = ["--contexts=24", "--docs=6", "--episodes=4", "--save_every=1",
         "--metric=likelihood", "--replay_size=60", "--updates_per_episode=4", "--minibatch=16"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Which take half of the time of a small run; the one of `finished` has them."""
    monkeypatch.setattr(train_nmg, "curves", lambda *_: None)


@pytest.fixture(scope="module")
def world():
    return data_prep.load("toycls", toy.tokenizer())


@pytest.fixture
def subtask(world):
    sampler = SubTaskSampler(world, finetune_cls, 64, 64, 0.5)
    return sampler.sample(np.random.default_rng(0), 48, 6, 1000, 1000)


def batch_of(pieces):
    return collate(pieces, np.arange(len(pieces)))


# ---------------------------------------------------------------- rewards

def plays_of(seed, names):
    """Random masks, and scores among which there are ties."""
    rng = np.random.default_rng(seed)
    plays = {}
    for name in names:
        plays[name] = Play(rng.random((6, 9)) < 0.4, None, None, 0.0, {"em": rng.integers(0, 3) / 2})
    return plays


@pytest.mark.parametrize("player", ["learner", "opponent"])
@pytest.mark.parametrize("seed", range(8))
def test_rewards_are_the_papers_outer_loop(seed, player):
    plays = plays_of(seed, ["random", "opponent", "learner"])
    R, counts = paper_form.rewards(plays, player, Config(metric="em"))
    other = {"learner": "opponent", "opponent": "learner"}[player]
    r, r_random, r_other = (plays[name].scores["em"] for name in (player, "random", other))
    for s, a in itertools.product(range(6), range(9)):
        own, by_random, by_other = (plays[name].mask[s, a] for name in (player, "random", other))
        assert counts[s, a] == (own and not (by_random and by_other))
        if not counts[s, a]:
            continue
        if not by_random and not by_other:
            assert R[s, a] == min(np.sign(r - r_random), np.sign(r - r_other))
        elif not by_other:
            assert R[s, a] == np.sign(r - r_other)
        else:
            assert R[s, a] == np.sign(r - r_random)


@pytest.mark.parametrize("seed", range(4))
def test_rewards_without_self_play(seed):
    plays = plays_of(seed, ["random", "learner"])
    R, counts = paper_form.rewards(plays, "learner", Config(metric="em"))
    assert (counts == (plays["learner"].mask & ~plays["random"].mask)).all()
    difference = plays["learner"].scores["em"] - plays["random"].scores["em"]
    assert (R[counts] == np.sign(difference)).all()


@pytest.mark.parametrize("names", [["random", "opponent", "learner"], ["random", "learner"]])
def test_rewards_are_differences_of_scores(names):
    """To the mean of the others; what all masked does not count."""
    plays = plays_of(1, names)
    for player in names:
        R, counts = train_nmg.rewards(plays, player, Config(metric="em"))
        others = [plays[name] for name in names if name != player]
        mean = sum(play.scores["em"] for play in others) / len(others)
        assert (plays[player].scores["em"] - mean == R).all()
        for s, a in itertools.product(range(6), range(9)):
            by_others = [play.mask[s, a] for play in others]
            assert counts[s, a] == (plays[player].mask[s, a] and not all(by_others))


# ---------------------------------------------------------------- losses and actions

def some_logits(seed, B=5, L=7):
    """Logits (B, L), -inf where not maskable, which is True somewhere; values and actions (B,)."""
    torch.manual_seed(seed)
    maskable = torch.rand(B, L) < 0.7
    maskable[:, 0] = True
    logits = torch.randn(B, L).masked_fill(~maskable, -torch.inf)
    action = torch.multinomial(maskable.float(), 1).squeeze(1)
    return logits, maskable, torch.randn(B), action


@pytest.mark.parametrize("paper", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_losses_are_those_of_both_forms(seed, paper):
    logits, maskable, value, action = some_logits(seed)
    R, log_prob_old = torch.randn(5), -3 * torch.rand(5)
    cfg = Config(entropy_coef=0.3, paper=paper)
    policy_loss, value_loss = train_nmg.losses(logits, value, action, log_prob_old, R, cfg)
    L_policy = L_value = 0.0
    for b in range(5):
        weights = [math.exp(logits[b, t]) for t in range(7) if maskable[b, t]]
        pi = [weight / sum(weights) for weight in weights]
        H = -sum(p * math.log(p) for p in pi)
        taken = math.exp(logits[b, action[b]]) / sum(weights)
        advantage = float(R[b] - value[b])
        if paper:
            objective = taken / math.exp(log_prob_old[b])
        elif advantage < 0:
            objective = math.log(max(taken, 0.01 / len(pi)))
        else:
            objective = math.log(taken)
        L_policy += -objective * advantage - 0.3 * H
        L_value += 0.5 * advantage**2
    assert policy_loss.item() == pytest.approx(L_policy, rel=1e-4, abs=1e-5)
    assert value_loss.item() == pytest.approx(L_value, rel=1e-4)


@pytest.mark.parametrize(("R", "pushed"), [(-1.0, False), (1.0, True)])
def test_a_token_that_lost_is_not_pushed_away_for_ever(R, pushed):
    """Of ten tokens, one with a probability of 1 / 2000. One that won is still approached."""
    logits = torch.zeros(1, 10)
    logits[0, 3] = math.log(9 / 1999)
    logits.requires_grad_()
    cfg = Config(entropy_coef=0.0)
    policy_loss, _ = train_nmg.losses(logits, torch.zeros(1), torch.tensor([3]), torch.zeros(1),
                                      torch.tensor([R]), cfg)
    policy_loss.backward()
    assert (logits.grad != 0).any() == pushed


def test_gradients_of_the_losses():
    """The policy loss leaves the value alone; logits of minus infinity get no gradient, and no NaN."""
    logits, maskable, value, action = some_logits(0)
    logits.requires_grad_()
    value.requires_grad_()
    cfg = Config(entropy_coef=0.3)
    policy_loss, value_loss = train_nmg.losses(logits, value, action, torch.zeros(5), torch.ones(5), cfg)
    policy_loss.backward()
    assert value.grad is None
    assert logits.grad.isfinite().all() and (logits.grad[~maskable] == 0).all()
    assert (logits.grad[maskable] != 0).any()
    value_loss.backward()
    torch.testing.assert_close(value.grad, (value - 1).detach())


def test_actions_are_those_that_count():
    rng = np.random.default_rng(0)
    shape = (4, 6)
    counts, R, ids = rng.random(shape) < 0.5, rng.normal(size=shape), rng.integers(0, 3, shape)
    play = Play(None, -rng.random(shape), rng.normal(size=4), 0.0)
    actions = train_nmg.actions_of(7, play, R, counts, ids)
    expected = []
    for s, a in itertools.product(range(4), range(6)):
        if counts[s, a]:
            rarity = 1 / math.sqrt(list(ids[s]).count(ids[s, a]))
            expected.append((7, s, a, R[s, a], play.log_prob[s, a], rarity, play.value[s]))
    assert len(actions) == counts.sum()
    np.testing.assert_allclose(np.array(actions.tolist()), expected, rtol=1e-6)


# ---------------------------------------------------------------- the policy and what it reads

def test_the_network_has_the_papers_size():
    assert sum(weight.numel() for weight in Policy(768).parameters()) == 2_561_026
    assert [Policy(size).attention.num_heads for size in (768, 312, 100)] == [12, 4, 1]


def test_the_network_is_the_papers():
    """One context at a time: attention in two heads of 64, residual, LayerNorm, a layer of 128, a logit; the
    value from the mean state."""
    torch.manual_seed(0)
    policy, hidden = Policy(128), torch.randn(3, 7, 128)
    for weight in policy.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    real = torch.arange(7) < torch.tensor([[7], [4], [6]])
    maskable = real & (torch.arange(7) > 0)
    logits, values = policy(hidden, real, maskable)
    attention, norm, gelu = policy.attention, policy.norm, torch.nn.functional.gelu
    (one, _, two), (three, _, four) = policy.token_head, policy.value_head
    for b in range(3):
        h = hidden[b, real[b]]                                                              # (n, H)
        projected = h @ attention.in_proj_weight.T + attention.in_proj_bias
        q, k, v = projected.view(len(h), 3, 2, 64).permute(1, 2, 0, 3)                      # (2, n, 64) each
        mixed = (q @ k.transpose(1, 2) / 8).softmax(-1) @ v
        mixed = mixed.transpose(0, 1).reshape(len(h), 128) @ attention.out_proj.weight.T
        x = h + mixed + attention.out_proj.bias
        variance = x.var(1, keepdim=True, correction=0)
        x = (x - x.mean(1, keepdim=True)) / (variance + 1e-12).sqrt() * norm.weight + norm.bias
        torch.testing.assert_close(logits[b, maskable[b]], two(gelu(one(x)))[1:, 0], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(values[b], four(gelu(three(h.mean(0))))[0], rtol=1e-4, atol=1e-3)
    assert (logits[~maskable] == -torch.inf).all()


def test_gumbel_top_k_draws_without_replacement(world):
    """How often a token is among two drawn ones: as in successive draws from the softmax."""
    batch = collate(blocks(world["train"], 16), np.zeros(4000, int))
    logits = np.where(batch.maskable, np.linspace(-1, 2, batch.input_ids.shape[1]), -np.inf)
    rng = RowRandom(0, "x", 0, np.arange(4000))
    mask = maskers.pick(logits + rng.gumbel(logits.shape), batch, np.full(4000, 2))
    maskable = batch.maskable[0]
    p = np.exp(logits[0, maskable])
    p /= p.sum()
    expected = []
    for i in range(len(p)):
        second = [p[j] * p[i] / (1 - p[j]) for j in range(len(p)) if j != i]
        expected.append(p[i] + sum(second))
    np.testing.assert_allclose(mask[:, maskable].mean(0), expected, atol=0.03)


def some_states(rng, lengths):
    return [(torch.randn(n, 8).half(), torch.from_numpy(rng.random(n) < 0.7)) for n in lengths]


def test_contexts_run_together_as_each_alone(monkeypatch):
    """Logits, values and gradients of contexts of two episodes are those of one context at a time."""
    torch.manual_seed(0)
    rng, policy, weights = np.random.default_rng(0), Policy(8), torch.randn(12)
    lengths = rng.integers(2, 30, (2, 5))
    memory = [some_states(rng, of_episode) for of_episode in lengths]
    monkeypatch.setattr(policies, "device", lambda: torch.device("cpu"))
    # Chunks of 40 tokens.
    monkeypatch.setattr(policies, "length_batches", lambda length: np.array_split(np.argsort(-length), 4))

    def with_gradients(logits, values):
        policy.zero_grad()
        finite = logits.masked_fill(logits.isinf(), 0)
        (weights @ (finite.square().sum(1) + values)).backward()
        return [logits, values, *(weight.grad.clone() for weight in policy.parameters())]

    chosen = list(zip(rng.integers(2, size=12), rng.integers(5, size=12), strict=True))
    logits = torch.full((12, max(lengths[e, c] for e, c in chosen)), -torch.inf)
    values = torch.zeros(12)
    for row, (e, c) in enumerate(chosen):
        n = lengths[e, c]
        hidden, maskable = memory[e][c]
        alone = policy(hidden[None].float(), torch.ones(1, n, dtype=torch.bool), maskable[None])
        logits[row, :n], values[row] = alone[0][0], alone[1][0]
    expected = with_gradients(logits, values)
    found = with_gradients(*train_nmg.policy_forward(policy, [memory[e][c] for e, c in chosen]))
    torch.testing.assert_close(found, expected)


def test_states_are_the_lms_of_each_context_alone(tmp_path):
    """In the order of the contexts, whatever their lengths."""
    rng, tok = random.Random(0), fast_tokenizer("wordpiece")
    words = " ".join(TEXTS).split()
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 40))) for _ in range(60)]
    (tmp_path / "c.txt").write_text("\n".join(texts))
    pieces = blocks(data_prep.load(str(tmp_path / "c.txt"), tok).corpus, 32)
    lm = random_lm("bert", len(tok), dropout=0.1).train()
    states = train_nmg.encode(lm, pieces)
    assert lm.training
    for i in range(len(pieces)):
        alone = collate(pieces, np.array([i]))
        hidden, maskable = states[i]
        expected = models.LMReader(lm)(alone)[0].cpu()
        torch.testing.assert_close(hidden.float(), expected, atol=2e-3, rtol=2e-3)
        assert maskable.tolist() == alone.maskable[0].tolist()


# ---------------------------------------------------------------- plays

def acting(subtask, uniform, agent=True, p=0.3, direction=None):
    torch.manual_seed(0)
    batch, states = batch_of(subtask.contexts), train_nmg.encode(models.load_lm("tiny"), subtask.contexts)
    agent = Agent(Policy(128), 1e-3) if agent else None
    rng = RowRandom(0, "learner acts", 0, batch.indices)
    return batch, states, agent, train_nmg.act(agent, states, batch, rng, p, direction, 4, uniform)


@pytest.mark.parametrize(("uniform", "agent"), [(True, True), (False, False), (False, True)])
def test_an_agent_masks_within_the_budget_of_all_maskers(uniform, agent, subtask):
    batch, _, _, play = acting(subtask, uniform, agent)
    assert (play.mask.sum(1) == maskers.budget_of(batch, 0.3)).all()
    assert not (play.mask & ~batch.maskable).any()


def test_log_probabilities_are_those_of_the_policy_that_acts(subtask):
    """The policy's own; uniform in the paper's exploration, and of the random player."""
    batch, states, agent, play = acting(subtask, uniform=False)
    logits, values = train_nmg.policy_forward(agent.policy, states)
    torch.testing.assert_close(torch.from_numpy(play.log_prob), logits.detach().cpu().log_softmax(1))
    torch.testing.assert_close(torch.from_numpy(play.value), values.detach().cpu())
    uniform = np.where(batch.maskable, -np.log(batch.maskable.sum(1))[:, None], -np.inf)
    for uniformly, has_agent in ((True, True), (False, False)):
        _, _, _, play = acting(subtask, uniformly, has_agent)
        np.testing.assert_allclose(play.log_prob, uniform)
    assert play.entropy == pytest.approx(np.log(batch.maskable.sum(1)).mean())


def test_a_direction_is_played_but_not_the_policys_own(subtask):
    """What is played has the direction added to its logits; the entropy is of the policy without it."""
    batch, states, agent, plain = acting(subtask, uniform=False)
    direction = train_nmg.random_direction(states, 0, 0)
    _, _, _, play = acting(subtask, uniform=False, direction=direction)
    logits, _ = train_nmg.policy_forward(agent.policy, states)
    logits = logits.detach().cpu() + 4 * torch.from_numpy(direction)
    torch.testing.assert_close(torch.from_numpy(play.log_prob), logits.log_softmax(1))
    assert play.entropy == plain.entropy
    # Twice as far as the logits differ: of a policy that is sure of itself, the direction is played, too.
    _, _, value_head = [agent.policy.token_head[i] for i in range(3)]
    value_head.weight.data *= 1000
    logits = train_nmg.policy_forward(agent.policy, states)[0].detach().cpu()
    centred = [row[row.isfinite()] - row[row.isfinite()].mean() for row in logits]
    spread = torch.cat(centred).std(correction=0)
    rng = RowRandom(0, "learner acts", 0, batch.indices)
    sure = train_nmg.act(agent, states, batch, rng, 0.3, direction, 4)
    expected = (logits + 2 * spread * torch.from_numpy(direction)).log_softmax(1)
    assert 2 * spread > 4
    torch.testing.assert_close(torch.from_numpy(sure.log_prob), expected, rtol=1e-4, atol=1e-3)
    # The two opposite players mask what is high, and what is low, in the direction.
    _, _, _, opposite = acting(subtask, uniform=False, direction=-direction)
    assert direction[play.mask].mean() > 0.5 > -0.5 > direction[opposite.mask].mean()


def test_random_directions_are_standardised(subtask):
    """Mean 0 in each context, standard deviation 1 over all; of their own for each seed and episode."""
    states = train_nmg.encode(models.load_lm("tiny"), subtask.contexts)
    maskable = batch_of(subtask.contexts).maskable
    directions = [train_nmg.random_direction(states, *place) for place in ((0, 0), (0, 0), (1, 0), (0, 1))]
    for direction in directions:
        assert (direction[~maskable] == 0).all() and direction[maskable].std() == pytest.approx(1)
        for row, allowed in zip(direction, maskable, strict=True):
            assert row[allowed].mean() == pytest.approx(0, abs=1e-5)
    assert (directions[0] == directions[1]).all()
    assert abs(np.corrcoef([d[maskable] for d in directions[1:]])[0, 1:]).max() < 0.9


def some_config(**flags):
    known = {"p": 0.05, "mlm_epochs": 2, "mlm_lr": 1e-3, "ft_epochs": 1, "ft_lr": 1e-3, "batch_size": 16,
             "metric": "likelihood"}
    return Config(**known | flags)


def test_an_inner_loop_trains_a_copy_on_its_own_masks(subtask, monkeypatch):
    """Each context under its own row of the mask in every epoch; what is fine-tuned is the adapted LM; the LM
    itself stays as it was."""
    lm, seen, tuned, mlm_loss = models.load_lm("tiny"), [], [], pretrain.mlm_loss
    batch, before = batch_of(subtask.contexts), copy.deepcopy(lm.state_dict())
    rng = np.random.default_rng(1)
    mask = maskers.pick(rng.random(batch.input_ids.shape), batch, maskers.budget_of(batch, 0.2))

    def watch(model, tensors):
        seen.append(tensors["labels"].tolist())
        return mlm_loss(model, tensors)

    lines = [{"gold": "a", "predicted": "a", "likelihood": -0.5},
             {"gold": "b", "predicted": "a", "likelihood": -3.0}]
    monkeypatch.setattr(pretrain, "mlm_loss", watch)
    monkeypatch.setattr(finetune_cls, "finetune", lambda *given, **flags: tuned.append((*given, flags)))
    monkeypatch.setattr(finetune_cls, "predictions", lambda model, pieces: lines)
    cfg = some_config(batch_size=1, p=0.2)
    adapted, scored = train_nmg.inner_loop(lm, subtask, mask, finetune_cls, cfg)
    expected = [batch.input_ids[i][mask[i]].tolist() for i in range(len(mask))]
    assert sorted(seen) == sorted(2 * expected)
    flags = {"epochs": 1, "lr": 1e-3, "batch_size": 1, "micro_batch": None, "seed": subtask.seed}
    assert tuned == [(adapted, subtask.train, flags)]
    # F1 of a is 2/3, of b 0.
    assert scored == {"accuracy": 50, "macro_f1": pytest.approx(100 / 3), "likelihood": -1.75}
    adapted.cpu()
    for name, weight in lm.state_dict().items():
        assert torch.equal(weight, before[name])
    assert not torch.equal(adapted.base_model.embeddings.word_embeddings.weight,
                           lm.base_model.embeddings.word_embeddings.weight)


def test_without_a_mask_the_lm_stays_as_it_is(subtask, monkeypatch):
    """As pre-training on no label leaves it."""
    lm, mask = models.load_lm("tiny"), np.zeros((len(subtask.contexts), 64), bool)
    trained = copy.deepcopy(lm)
    pretrain.pretrain(trained, subtask.contexts, maskers.fixed(mask), epochs=1)
    monkeypatch.setattr(train_nmg, "pretrain", None)
    adapted, _ = train_nmg.inner_loop(lm, subtask, mask, finetune_cls, some_config())
    trained.cpu()
    for name, weight in adapted.cpu().state_dict().items():
        assert torch.equal(weight, lm.state_dict()[name]) and torch.equal(weight, trained.state_dict()[name])


def test_only_masks_differ_between_the_players_of_an_episode(subtask):
    """Equal masks score equally; another mask, or the seed of another episode, does not."""
    lm, batch = models.load_lm("tiny"), batch_of(subtask.contexts)
    masks = []
    for seed in (0, 0, 1):
        rng = RowRandom(seed, "x", 0, batch.indices)
        masks.append(maskers.random(batch, maskers.budget_of(batch, 0.1), rng))

    def likelihood(mask):
        return train_nmg.inner_loop(lm, subtask, mask, finetune_cls, some_config())[1]["likelihood"]

    scores = [likelihood(mask) for mask in masks]
    assert scores[0] == scores[1] != scores[2]
    subtask.seed += 1
    assert scores[0] != likelihood(masks[0])


# ---------------------------------------------------------------- replay

def small_agent(lr):
    torch.manual_seed(0)
    agent, hidden = Agent(Policy(8), lr), torch.randn(30, 8).half()
    return agent, {0: [(part, torch.ones(len(part), dtype=torch.bool)) for part in hidden.split([9, 6, 15])]}


def value_of(agent, memory):
    with torch.no_grad():
        return train_nmg.policy_forward(agent.policy, memory[0])[1].cpu().numpy()


@pytest.mark.parametrize("paper", [True, False])
def test_an_agent_learns_the_value_of_a_context(paper):
    """Its mean reward, here; replay keeps the values before the update."""
    agent, memory = small_agent(1e-2)
    actions = np.zeros(12, train_nmg.ACTION)
    actions["block"], actions["position"] = np.arange(12) % 3, np.arange(12) // 3
    actions["R"] = np.where(np.arange(12) % 3, 1, -1)
    actions["rarity"], actions["log_prob"] = 1 / np.sqrt(1 + np.arange(12) % 4), -2
    agent.replay, value = actions.copy(), value_of(agent, memory)
    cfg = Config(updates_per_episode=1, minibatch=12, entropy_coef=0.01, paper=paper)
    agent.learn(memory, np.random.default_rng(0), cfg)
    np.testing.assert_allclose(agent.replay["value"], value[actions["block"]], rtol=1e-4)
    cfg.updates_per_episode = 200
    agent.learn(memory, np.random.default_rng(0), cfg)
    np.testing.assert_allclose(value_of(agent, memory), [-1, 1, 1], atol=0.1)


def test_actions_are_drawn_by_priority(monkeypatch):
    agent, memory = small_agent(1e-3)
    agent.replay = np.zeros(4, train_nmg.ACTION)
    agent.replay["position"], agent.replay["rarity"] = range(4), [1, 2, 5, 0]
    agent.replay["R"] = 1
    drawn, zero = [], torch.zeros((), requires_grad=True)

    def watch(logits, value, action, *_):
        drawn.extend(action.tolist())
        return zero * 1, zero * 1

    monkeypatch.setattr(train_nmg, "policy_forward", lambda policy, contexts: (None, torch.zeros(1)))
    monkeypatch.setattr(train_nmg, "losses", watch)
    cfg = Config(updates_per_episode=1000, minibatch=1, paper=True)
    agent.learn(memory, np.random.default_rng(0), cfg)
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 1000, np.array([1, 2, 5, 0]) / 8, atol=0.06)


def test_rewards_are_learned_whatever_their_scale(monkeypatch):
    """Points or shares teach the same; the paper's signs are taken as they are."""
    seen, zero = [], torch.zeros((), requires_grad=True)

    def watch(logits, value, action, log_prob_old, R, cfg):
        seen.append(sorted(R.tolist()))
        return zero * 1, zero * 1

    monkeypatch.setattr(train_nmg, "losses", watch)
    for scale, paper in ((1, False), (100, False), (1, True), (0, False)):
        agent, memory = small_agent(1e-3)
        agent.replay = np.zeros(3, train_nmg.ACTION)
        agent.replay["rarity"], agent.replay["R"] = 1, scale * np.array([0.1, -0.3, 0.5])
        cfg = Config(updates_per_episode=1, minibatch=3, paper=paper)
        agent.learn(memory, np.random.default_rng(0), cfg)
    rms = math.sqrt((0.01 + 0.09 + 0.25) / 3)
    assert seen[0] == pytest.approx([-0.3 / rms, 0.1 / rms, 0.5 / rms])
    assert seen[1] == pytest.approx(seen[0]) and seen[2] == pytest.approx([-0.3, 0.1, 0.5])
    assert seen[3] == [0, 0, 0]


def test_an_empty_replay_teaches_nothing():
    agent, memory = small_agent(1e-3)
    learned = agent.learn(memory, np.random.default_rng(0), Config(updates_per_episode=3))
    assert learned == {"policy_loss": 0, "value_loss": 0}


# ---------------------------------------------------------------- whole episodes

@pytest.mark.parametrize("self_play", [True, False])
def test_episodes_are_the_papers(self_play, cls_folder, lm_folder, tmp_path, monkeypatch):
    """What main stores and hands on, against a loop over the paper's cases: rewards, log probabilities,
    rarity, whose LM an episode starts from, seeds, flags."""
    players = ["random", "opponent", "learner"] if self_play else ["random", "learner"]
    score = {"random": 0.5, "opponent": 0.7, "learner": 0.6}
    n, plays, stored, configs, coefficients = len(players), [], [], [], set()
    actions_of, losses, learn = train_nmg.actions_of, train_nmg.losses, Agent.learn

    def inner_loop(lm, subtask, mask, task, cfg):
        adapted = copy.deepcopy(lm)
        with torch.no_grad():
            adapted.cls.predictions.bias += 1
        plays.append((mask, lm.cls.predictions.bias[0].round().item(), subtask))
        configs.append(cfg)
        mean = score[players[(len(plays) - 1) % n]]
        return adapted, {"accuracy": -mean, "likelihood": mean}

    def store(*args):
        stored.append(actions_of(*args))
        return stored[-1]

    def watch_losses(*args):
        coefficients.add(args[-1].entropy_coef)
        assert len(args[0]) == 8
        return losses(*args)

    def watch_learn(agent, memory, *args):
        assert len(agent.replay) <= 30 and set(agent.replay["episode"]) <= set(memory)
        return learn(agent, memory, *args)

    monkeypatch.setattr(train_nmg, "inner_loop", inner_loop)
    monkeypatch.setattr(train_nmg, "actions_of", store)
    monkeypatch.setattr(train_nmg, "losses", watch_losses)
    monkeypatch.setattr(Agent, "learn", watch_learn)
    flags = {"paper": True, "episodes": 3, "contexts": 12, "val_share": 0.3, "p": 0.3, "uniform_episodes": 3,
             "minibatch": 8,
             "updates_per_episode": 2, "entropy_coef": 0.3, "mlm_epochs": 2, "mlm_lr": 1e-4, "ft_epochs": 4,
             "ft_lr": 2e-4, "batch_size": 6, "max_len": 32, "ft_max_len": 24, "metric": "likelihood",
             "replay_size": 30, "self_play": self_play, "continual": self_play}
    train_nmg.main(Config(dataset=str(cls_folder), lm=str(lm_folder), out=str(tmp_path / "o"), **flags))

    assert len(plays) == 3 * n and len(stored) == 3 * (n - 1) and coefficients == {0.3}
    for cfg in configs:
        assert vars(cfg) == vars(cfg) | flags
    assert len({subtask.seed for _, _, subtask in plays}) == 3
    for i, (_, bias, _) in enumerate(plays):
        # The LM that the learner of each episode before has adapted.
        assert bias == (i // n if self_play else 0)
    for e in range(3):
        masks = {name: plays[e * n + i][0] for i, name in enumerate(players)}
        batch = batch_of(plays[e * n][2].contexts)
        for k, name in enumerate(players[1:]):
            expected = {}
            for s, a in np.argwhere(masks[name]).tolist():
                free = [other for other in players if other != name and not masks[other][s, a]]
                if free:
                    R = min(np.sign(score[name] - score[other]) for other in free)
                    count = (batch.input_ids[s] == batch.input_ids[s, a]).sum()
                    expected[s, a] = [e, R, -math.log(batch.maskable[s].sum()), 1 / math.sqrt(count)]
            found = {}
            for action in stored[e * (n - 1) + k]:
                values = action[["episode", "R", "log_prob", "rarity"]].tolist()
                found[action["block"].item(), action["position"].item()] = list(values)
            assert found.keys() == expected.keys()
            for place, values in expected.items():
                assert found[place] == pytest.approx(values, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1])
def test_the_papers_own_rule_learns(sign):
    """Where the score of a play is how many informative tokens (a quarter) it masked, or how few."""
    N, L, memory, shares = 6, 12, {}, []
    torch.manual_seed(1)
    rng = np.random.default_rng(2)
    agents = {name: Agent(Policy(8), 1e-3) for name in ("opponent", "learner")}
    cfg = Config(updates_per_episode=10, minibatch=64, entropy_coef=0.01, paper=True, metric="em")
    batch = SimpleNamespace(maskable=np.ones((N, L), bool))
    for e in range(40):
        good = rng.random((N, L)) < 0.25
        hidden = torch.randn(N * L, 8).half()
        hidden[:, 0] = torch.from_numpy(np.where(good, 2.0, -2.0)).flatten().half()
        memory[e] = [(context, torch.ones(L, dtype=torch.bool)) for context in hidden.split(L)]
        plays = {}
        for name in ("random", *agents):
            stream = RowRandom(0, name, e, np.arange(N))
            plays[name] = train_nmg.act(agents.get(name), memory[e], batch, stream, 2 / L)
            plays[name].scores["em"] = sign * (plays[name].mask & good).sum()
        for name, agent in agents.items():
            R, counts = paper_form.rewards(plays, name, cfg)
            ids = np.arange(N * L).reshape(N, L)
            actions = train_nmg.actions_of(e, plays[name], R, counts, ids)
            agent.replay = np.concatenate((agent.replay, actions))[-300:]
            agent.learn(memory, rng, cfg)
        # Of the learner's probability.
        shares.append((np.exp(plays["learner"].log_prob) * good).sum() / N)
    share = np.mean(shares[-10:])
    assert share > 0.35 if sign > 0 else share < 0.1


def simulated_share(seed, noise, ratio, worth):
    """A simulation without an LM, of 20 episodes. The score of a play is `worth` times the share of good
    tokens (one kind of four) among the masked, and noise. Returns their share under the learner's policy at
    the end."""
    N, L, H, memory, shares = 60, 12, 16, {}, []
    rng = np.random.default_rng(seed)
    cfg = Config(paper=ratio, updates_per_episode=20, metric="em")
    agents = {}
    for i, name in enumerate(("opponent", "learner")):
        torch.manual_seed(10 * seed + i)
        agents[name] = Agent(Policy(H), 3e-4)
    batch = SimpleNamespace(maskable=np.ones((N, L), bool))
    kinds = torch.from_numpy(rng.normal(size=(4, H))).float()
    for e in range(20):
        kind = torch.from_numpy(rng.integers(0, 4, (N, L)))
        good = (kind == 0).numpy()
        memory[e] = [(kinds[row].half(), torch.ones(L, dtype=torch.bool)) for row in kind]
        direction = train_nmg.random_direction(memory[e], seed, e)
        directions = {"learner": direction, "opponent": -direction} if noise else {}
        plays = {}
        for name in ("random", *agents):
            stream = RowRandom(seed, name, e, np.arange(N))
            plays[name] = train_nmg.act(agents.get(name), memory[e], batch, stream, 1 / L,
                                        directions.get(name), noise)
            share = (plays[name].mask & good).sum() / N
            plays[name].scores["em"] = worth * share + 0.3 * rng.normal()
        for agent in agents.values():
            for name in plays:
                R, counts = train_nmg.rewards(plays, name, cfg)
                actions = train_nmg.actions_of(e, plays[name], R, counts, kind.numpy())
                agent.replay = np.concatenate((agent.replay, actions))
            agent.learn(memory, rng, cfg)
        logits = train_nmg.policy_forward(agents["learner"].policy, memory[e])[0].detach()
        shares.append(float((logits.softmax(1).numpy() * good).sum() / N))
    return np.mean(shares[-3:])


@pytest.mark.slow
def test_exploring_among_policies_without_the_ratio_learns():
    shares = [simulated_share(seed, noise=2, ratio=False, worth=1) for seed in range(4)]
    assert min(shares) > 0.85, shares


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "ratio", "worth"), [(2, True, 1), (0, False, 1), (2, False, 0)])
def test_neither_change_alone_learns_nor_does_noise_teach(noise, ratio, worth):
    """On average over four seeds, as a policy drifts to some kind of words even if none is better."""
    shares = [simulated_share(seed, noise, ratio, worth) for seed in range(4)]
    assert np.mean(shares) < 0.6, shares


# ---------------------------------------------------------------- a run, killed and shared

@pytest.fixture(scope="module")
def finished(tmp_path_factory, one_thread):
    place = tmp_path_factory.mktemp("nmg")
    return place, call("train_nmg.py", *SMALL, "--out=o", cwd=place)


def ends_as(place, other):
    """Whether policy and metrics of two runs are the same."""
    policies, metrics = [], []
    for folder in (place / "o", other / "o"):
        policies.append((folder / "policy.safetensors").read_bytes())
        rows = runs.read_rows(folder / "metrics.jsonl")
        metrics.append([row | {"seconds": 0} for row in rows])
    return policies[0] == policies[1] and metrics[0] == metrics[1]


def test_a_small_run(finished):
    place, result = finished
    assert result.returncode == 0, result.stderr
    files = sorted(file.name for file in (place / "o").iterdir())
    assert files == ["checkpoint.pt", "curves.png", "metrics.jsonl", "policy.json", "policy.safetensors",
                     "run.json"]
    metrics = runs.read_rows(place / "o/metrics.jsonl")
    assert [row["episode"] for row in metrics] == [1, 2, 3, 4]
    # The policy starts out nearly uniform, and learns.
    uniform = metrics[0]["random_entropy"]
    assert metrics[0]["learner_entropy"] == pytest.approx(uniform, abs=0.01)
    assert metrics[-1]["learner_entropy"] != metrics[0]["learner_entropy"]
    for row in metrics:
        assert np.isfinite(list(row.values())).all()


@pytest.mark.parametrize(("kind", "task"), [("cls", finetune_cls), ("qa", finetune_qa)])
def test_help_shows_the_values_that_differ_between_tasks(kind, task):
    """As the comment of a flag that is None gives them."""
    source = inspect.getsource(train_nmg.PlayConfig)
    for name, value in task.INNER_LOOP.items():
        line = next(line for line in source.splitlines() if line.strip().startswith(f"{name}:"))
        shown = re.search(rf"None: .*?{kind} ([\w.-]+)", line)[1]
        assert type(value)(shown) == value, line


def test_what_a_policy_was_trained_on(finished):
    about = runs.read_run(finished[0] / "o")["settings"]
    world = data_prep.load("toycls", toy.tokenizer())
    assert about == about | {"lm": "tiny", "dataset": "toycls", "episodes": 4, "seed": 0, "self_play": True,
                             "continual": False, "paper": False, "data": world.checksum}


def test_a_finished_run_is_done(finished):
    again = call("train_nmg.py", *SMALL, "--out=o", cwd=finished[0])
    assert again.returncode == 0 and "already done" in again.stdout
    other = call("train_nmg.py", *SMALL, "--seed=1", "--out=o", cwd=finished[0])
    assert other.returncode == 2 and "seed=0 there, 1 here" in other.stderr


def test_a_finished_run_made_longer_is_the_longer_run(finished, tmp_path):
    """Byte for byte."""
    for episodes in (2, 4):
        result = call("train_nmg.py", *SMALL, f"--episodes={episodes}", "--out=o", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    assert ends_as(tmp_path, finished[0])


def test_run_json_is_written_last(finished):
    """Of all that a run leaves."""
    files = {file.name: file.stat().st_mtime_ns for file in (finished[0] / "o").iterdir()}
    assert max(files, key=files.get) == "run.json"


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_the_same(finished, tmp_path):
    """SIGKILL, twice, each time after more episodes, saved or not. While it is at work, the same command is
    refused."""
    log, rng, refused = tmp_path / "o/metrics.jsonl", random.Random(0), []
    command = ["train_nmg.py", *SMALL, "--out=o"]

    def ready(episodes):
        if not log.exists() or len(log.read_text().splitlines()) < episodes:
            return False
        if not refused:
            refused.append(call(*command, cwd=tmp_path))
        time.sleep(rng.uniform(0, 0.2))
        return True

    for episodes in (1, 3):
        kill_when(lambda n=episodes: ready(n), *command, cwd=tmp_path, **ONE_THREAD)
        assert not (tmp_path / "o/run.json").exists()
    assert refused[0].returncode == 2 and "another process is at work on it" in refused[0].stderr
    assert refused[0].stderr.count("\n") == 1
    assert call(*command, "--seed=1", cwd=tmp_path).returncode == 2
    fewer = call(*command, "--episodes=1", cwd=tmp_path)
    assert fewer.returncode == 2 and "--episodes=1: o holds" in fewer.stderr
    result = call(*command, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert ends_as(tmp_path, finished[0])
    assert sorted(os.listdir(tmp_path / "o")) == sorted(os.listdir(finished[0] / "o"))


class Killed(BaseException):
    """What nothing in the program catches."""


@pytest.mark.slow
def test_killed_before_any_of_its_files_it_ends_the_same(tmp_path, monkeypatch):
    """A run of one episode dies before its first file is in place, the next before its second, and so on."""
    flags = [*SMALL, "--episodes=1", "--mlm_epochs=1", "--out=o"]
    replace = os.replace
    lives = 0

    def die_at(last):
        """Instead of the last of so many renames."""
        renames = itertools.count(1)

        def move(*paths):
            if next(renames) == last:
                raise Killed
            replace(*paths)

        monkeypatch.setattr(os, "replace", move)

    (tmp_path / "killed").mkdir()
    for last in itertools.count(1):
        die_at(last)
        try:
            result = call("train_nmg.py", *flags, cwd=tmp_path / "killed")
            break
        except Killed:
            lives += 1
        # The process and its lock are gone.
        gc.collect()
    assert result.returncode == 0, result.stderr
    assert lives > 3
    die_at(0)
    (tmp_path / "whole").mkdir()
    assert call("train_nmg.py", *flags, cwd=tmp_path / "whole").returncode == 0
    assert ends_as(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
def test_three_processes_learn_what_one_does(finished, tmp_path):
    """The plays of an episode in processes of their own: the same policy, byte for byte."""
    result = torchrun(3, "train_nmg.py", *SMALL, "--out=o", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert ends_as(tmp_path, finished[0])
    assert result.stdout.count("--masker=sampled:o") == 1


@pytest.mark.slow
def test_two_processes_without_self_play(tmp_path):
    flags = [*SMALL, "--episodes=2", "--self_play=False", "--out=o"]
    result = torchrun(2, "train_nmg.py", *flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (tmp_path / "one").mkdir()
    assert call("train_nmg.py", *flags, cwd=tmp_path / "one").returncode == 0
    assert ends_as(tmp_path, tmp_path / "one")


# ---------------------------------------------------------------- a reward of one's own

EDIT = ("return np.full(own.shape, R), own & ~masked_by_all",
        "return np.full(own.shape, -R), own & ~masked_by_all")


def test_an_edit_of_the_reward_shows_in_the_next_run(tmp_path, monkeypatch):
    """In what is stored and in the policy; and the run before the edit goes on with it."""
    source = (ROOT / "train_nmg.py").read_text()
    assert EDIT[0] in source
    (tmp_path / "edited_nmg.py").write_text(source.replace(*EDIT))
    monkeypatch.syspath_prepend(tmp_path)
    flags = [*SMALL, "--episodes=1"]
    stored = {}
    for script in ("train_nmg", "edited_nmg"):
        module, stored[script] = importlib.import_module(script), []
        actions_of = module.actions_of

        def watch(*args, script=script, actions_of=actions_of):
            stored[script].append(actions_of(*args))
            return stored[script][-1]

        monkeypatch.setattr(module, "actions_of", watch)
        monkeypatch.setattr(module, "curves", lambda *_: None)
        result = call(f"{script}.py", *flags, f"--out={script}", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    before, after = stored["train_nmg"], stored["edited_nmg"]
    assert any(actions["R"].any() for actions in before)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new["R"], -old["R"])
    policies = [(tmp_path / script / "policy.safetensors").read_bytes() for script in stored]
    assert policies[0] != policies[1]
    longer = call("edited_nmg.py", *SMALL, "--episodes=2", "--out=train_nmg", cwd=tmp_path)
    assert longer.returncode == 0, longer.stderr
    assert len(runs.read_rows(tmp_path / "train_nmg/metrics.jsonl")) == 2


# ---------------------------------------------------------------- the script

def stopped(*args, **kwargs):
    raise UserError("stop")


@dataclass
class TwoEpisodes(Config):
    episodes: int = 2
    contexts: int = 12


@pytest.mark.slow
def test_the_first_commands_of_a_user(tmp_path, monkeypatch):
    """Those of the docstrings, verbatim, on small files under the names of the real ones. Only the paper's
    numbers of episodes and contexts are smaller."""
    mrqa_files(tmp_path / "cache/raw", "newsqa")
    for module in (sources, data_prep):
        monkeypatch.setattr(module, "CACHE", tmp_path / "cache")
    tok = fast_tokenizer("wordpiece")
    random_lm("bert", len(tok), 0.1).save_pretrained(tmp_path / "bert-base-uncased")
    tok.save_pretrained(tmp_path / "bert-base-uncased")
    monkeypatch.setattr(train_nmg, "Config", TwoEpisodes)

    result = call("train_nmg.py", "--dataset=newsqa", "--lm=bert-base-uncased", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    policy = "runs/nmg-newsqa-bert-base-uncased-0"
    assert f"--masker=sampled:{policy}" in result.stdout
    assert runs.read_run(tmp_path / policy)["settings"]["max_len"] == 66
    result = call("pretrain.py", "--dataset=newsqa", "--lm=bert-base-uncased", f"--masker=sampled:{policy}",
                  "--p=0.05", "--epochs=3", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    [adapted] = (tmp_path / "runs").glob("pretrain-*")
    result = call("finetune_qa.py", "--dataset=newsqa", f"--lm=runs/{adapted.name}", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    [row] = runs.read_rows(tmp_path / "results.jsonl")
    origin = row["config"]["pretraining"]
    assert row["masker"] == f"sampled:{policy}" and row["lm"] == "bert-base-uncased"
    assert origin["policy"]["episodes"] == 2 and origin["policy"]["self_play"]
    assert (origin["p"], origin["epochs"]) == (0.05, 3)


@pytest.mark.parametrize("flags", [
    ["--self_play=False"],
    ["--continual=False"],
    ["--dataset=toyqa", "--metric=likelihood"],
    ["--dataset=toyqa", "--metric=f1", "--validation=12"],
    ["--dataset=toyqa", "--metric=em"],
])
def test_switches(flags, tmp_path):
    small = ["--contexts=16", "--docs=4", "--episodes=1", "--ft_epochs=1", "--mlm_epochs=1", "--out=o"]
    result = call("train_nmg.py", *small, *flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    [row] = runs.read_rows(tmp_path / "o/metrics.jsonl")
    assert ("opponent_score" in row) != ("--self_play=False" in flags)
    assert np.isfinite(list(row.values())).all()


LENGTHS = [("pretrain", "cls", [256]), ("pretrain", "qa", [512]), ("finetune_cls", "cls", [256]),
           ("finetune_qa", "qa", [384]), ("train_nmg", "cls", [256, 256]), ("train_nmg", "qa", [512, 384])]


@pytest.mark.parametrize(("script", "kind", "lengths"), LENGTHS)
def test_lengths_are_the_papers(script, kind, lengths, cls_folder, qa_folder, lm_folder, tmp_path,
                                monkeypatch):
    seen = []

    def max_len_of(model, wanted, flag="max_len"):
        seen.append(wanted)
        if len(seen) == len(lengths):
            raise UserError("stop")
        return 48

    module = "finetune" if script.startswith("finetune_") else script
    monkeypatch.setattr(importlib.import_module(module), "max_len_of", max_len_of)
    data = cls_folder if kind == "cls" else qa_folder
    result = call(f"{script}.py", f"--dataset={data}", f"--lm={lm_folder}", cwd=tmp_path)
    assert "stop" in result.stderr and seen == lengths


PAPER = {"episodes": 200, "contexts": 200, "examples": 1000, "validation": 10_000, "p": 0.05, "mlm_epochs": 3,
         "mlm_lr": 2e-5, "rl_lr": 1e-4, "minibatch": 64, "replay_size": 50_000,
         "entropy_coef": 0.01, "self_play": True, "batch_size": 16,
         "val_share": 0.1}


@pytest.mark.parametrize(("kind", "epochs", "lr", "metric"), [
    ("cls", 5, 2e-5, "accuracy"), ("qa", 1, 3e-5, "em"),
])
def test_meta_training_is_the_papers(kind, epochs, lr, metric, cls_folder, qa_folder, lm_folder, tmp_path,
                                     monkeypatch):
    seen = []
    monkeypatch.setattr(train_nmg, "meta_train", lambda cfg, *_: seen.append(vars(cfg)) or stopped())
    data = cls_folder if kind == "cls" else qa_folder
    call("train_nmg.py", f"--dataset={data}", f"--lm={lm_folder}", cwd=tmp_path)
    assert seen[0] == seen[0] | PAPER | {"ft_epochs": epochs, "ft_lr": lr, "metric": metric}


def test_further_pre_training_is_the_papers(cls_folder, lm_folder, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(pretrain, "pretrain", lambda *_, **given: seen.append(given) or stopped())
    call("pretrain.py", f"--dataset={cls_folder}", f"--lm={lm_folder}", "--masker=whole", cwd=tmp_path)
    assert seen[0] == seen[0] | {"p": 0.15, "epochs": 1, "lr": 2e-5, "batch_size": 16}


@pytest.mark.parametrize(("task", "epochs", "lr"), [(finetune_cls, 3, 2e-5), (finetune_qa, 2, 3e-5)])
def test_fine_tuning_is_the_papers(task, epochs, lr, cls_folder, qa_folder, lm_folder, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(task, "finetune", lambda *_, **given: seen.append(given) or stopped())
    data = cls_folder if task is finetune_cls else qa_folder
    call(f"{task.__name__}.py", f"--dataset={data}", f"--lm={lm_folder}", cwd=tmp_path)
    assert seen[0] == seen[0] | {"epochs": epochs, "lr": lr, "batch_size": 16}


@needs_shared
@pytest.mark.slow
def test_chemprot_with_a_real_lm(tmp_path):
    result = call("train_nmg.py", f"--dataset={SHARED}/data/chemprot",
                  f"--lm={SHARED}/lm/minilm", "--contexts=8", "--episodes=1", "--validation=8",
                  "--examples=32", "--ft_epochs=1", "--out=o", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    weights = load_policy(tmp_path / "o").parameters()
    assert sum(weight.numel() for weight in weights) == 690_946


@pytest.mark.parametrize(("flags", "said"), [
    (["--reward=regression"], "unknown flag --reward"),
    (["--metric=f1"], "--metric=f1: allowed are accuracy, macro_f1, likelihood"),
    (["--episodes=0"], "--episodes=0: must be 1 or more"),
    (["--val_share=2"], "--val_share=2: a share must be above 0"),
    (["--selfplay=False"], "did you mean 'self_play'?"),
    (["--uniform_episodes=5"], "--uniform_episodes: is not read with --paper=False; leave it out"),
    (["--paper", "--noise=2"], "--noise: is not read with --paper=True; leave it out"),
    (["--dataset=corpus.txt"], "has no labelled examples to learn a policy from"),
])
def test_wrong_flags(flags, said, tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS))
    result = call("train_nmg.py", *flags, cwd=tmp_path)
    assert result.returncode == 2 and said in result.stderr
    assert "Traceback" not in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("flags", [
    ["--rl_lr=1e30", "--updates_per_episode=1"],
    ["--ft_lr=1e30", "--ft_epochs=1", "--metric=accuracy", "--batch_size=1000"]])
def test_one_step_with_a_learning_rate_without_sense(flags, tmp_path):
    """All weights are finite after it; no output is, and no policy is saved."""
    result = call("train_nmg.py", *SMALL, "--episodes=1", *flags, "--out=o", cwd=tmp_path)
    assert result.returncode == 2 and "became infinite or NaN; a smaller learning rate" in result.stderr
    assert not (tmp_path / "o/policy.safetensors").exists() and not (tmp_path / "o/metrics.jsonl").exists()


def test_a_checkpoint_can_be_read_whatever_a_fork_has_logged(tmp_path):
    """Numbers of numpy, which torch.load refuses with weights_only, among them."""
    agents, lm = {"learner": Agent(Policy(32), 1e-3)}, random_lm("bert")
    metrics = [{"episode": 1, "learner_balanced": np.mean([0.5, 1.0])}]
    train_nmg.save_checkpoint(tmp_path / "checkpoint.pt", None, agents, {}, metrics)
    assert train_nmg.load_checkpoint(tmp_path / "checkpoint.pt", lm, agents, {}) == metrics


def test_a_checkpoint_that_is_cut_short_is_one_sentence(tmp_path):
    agents = {"learner": Agent(Policy(32), 1e-3)}
    lm = random_lm("bert")
    train_nmg.save_checkpoint(tmp_path / "checkpoint.pt", lm.state_dict(), agents, {}, [])
    assert train_nmg.load_checkpoint(tmp_path / "checkpoint.pt", lm, agents, {}) == []
    whole = (tmp_path / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt").write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"checkpoint\.pt: cannot be read \(cut short, damaged"):
        train_nmg.load_checkpoint(tmp_path / "checkpoint.pt", lm, agents, {})


def test_a_learning_rate_without_sense(tmp_path):
    """Ends with one sentence, not with a policy of NaNs."""
    result = call("train_nmg.py", *SMALL, "--rl_lr=1e30", "--out=o", cwd=tmp_path)
    assert result.returncode == 2 and "of the policy became infinite or NaN" in result.stderr
    assert not (tmp_path / "o/policy.safetensors").exists()
