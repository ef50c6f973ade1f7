"""Meta-training: equations against naive transcriptions of the paper, learning with a known reward, kills."""
import contextlib
import copy
import functools
import gc
import json
import math
import os
import random
import shutil
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import all_of, kill_when, names, random_lm, ranks, refused, same, side_by_side, succeed, weights

import data_prep
import finetune_cls
import maskers
import pretrain
import train_nmg
from nmg import paper_form, policies
from nmg.plays import Episode, Play
from nmg.policies import LinearPolicy, PaperPolicy
from nmg.subtasks import SubTaskSampler
from support import models, runs, sources, toy
from support.data import blocks, collate
from support.rng import RowRandom
from train_nmg import Config

# Runs of a few seconds: random plays some of the episodes. In the paper's form each episode has the LM of the
# last, and old actions leave replay.
SHORT = ["--contexts=24", "--docs=6", "--episodes=3", "--mlm_epochs=1", "--ft_epochs=1",
         "--metric=likelihood"]
SMALL = [*SHORT, "--random_every=2"]
PAPER = [*SHORT, "--paper=True", "--updates_per_episode=4", "--minibatch=16", "--replay_size=60"]
FORMS = {"default": SMALL, "paper": PAPER}
PLAYERS = ["random", "opponent", "learner"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Which take half of the time of a small run; the one of `finished` has them."""
    monkeypatch.setattr(train_nmg, "curves", lambda *_: None)


@pytest.fixture(scope="module")
def subtask():
    world = data_prep.load("toycls", toy.tokenizer())
    sampler = SubTaskSampler(world, finetune_cls, 64, 64, 0.5)
    return sampler.sample(np.random.default_rng(0), 48, 6, 1000, 1000)


# ---------------------------------------------------------------- the paper's rewards, losses and actions

def plays_of(seed, names):
    """Random masks, and scores among which there are ties."""
    rng = np.random.default_rng(seed)
    return {name: Play(rng.random((6, 9)) < 0.4, 0.0, {"em": rng.integers(0, 3) / 2}) for name in names}


def papers_reward(plays, player, place):
    """Algorithm 1, OuterLoop: the worst comparison with those who did not mask the token; None if all did."""
    comparisons = []
    for other in plays:
        if other != player and not plays[other].mask[place]:
            comparisons.append(np.sign(plays[player].scores["em"] - plays[other].scores["em"]))
    return min(comparisons, default=None)


@pytest.mark.parametrize("player", ["learner", "opponent"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("self_play", [True, False])
def test_rewards_are_the_papers_outer_loop(self_play, seed, player):
    plays = plays_of(seed, PLAYERS if self_play else ["random", player])
    R, counts = paper_form.rewards(plays, player, Config(metric="em"))
    for place in np.ndindex(6, 9):
        expected = papers_reward(plays, player, place)
        assert counts[place] == (plays[player].mask[place] and expected is not None)
        if counts[place]:
            assert R[place] == expected


@pytest.mark.parametrize("seed", range(4))
def test_losses_are_the_papers(seed):
    torch.manual_seed(seed)
    maskable = torch.rand(5, 7) < 0.7
    # Each block has a token that may be masked.
    maskable[:, 0] = True
    logits = torch.randn(5, 7).masked_fill(~maskable, -torch.inf).requires_grad_()
    action = torch.multinomial(maskable.float(), 1).squeeze(1)
    value = torch.randn(5).requires_grad_()
    R, log_prob_old = torch.randn(5), -3 * torch.rand(5)
    policy_loss, value_loss = paper_form.losses(logits, value, action, log_prob_old, R, 0.3)
    L_policy = L_value = 0.0
    for b in range(5):
        weights = [math.exp(logits[b, t].item()) for t in range(7) if maskable[b, t]]
        pi = [weight / sum(weights) for weight in weights]
        H = -sum(p * math.log(p) for p in pi)
        taken = math.exp(logits[b, action[b]].item()) / sum(weights)
        advantage = R[b].item() - value[b].item()
        L_policy += -taken / math.exp(log_prob_old[b]) * advantage - 0.3 * H
        L_value += 0.5 * advantage**2
    assert policy_loss.item() == pytest.approx(L_policy, rel=1e-4, abs=1e-5)
    assert value_loss.item() == pytest.approx(L_value, rel=1e-4)
    # The policy loss leaves the value alone; and logits of minus infinity get no NaN for a gradient.
    policy_loss.backward()
    assert value.grad is None
    assert logits.grad.isfinite().all() and (logits.grad[~maskable] == 0).all()


def test_an_agent_remembers_its_own_rewarded_actions():
    """The newest, with the probability by which they were drawn, uniformly at first; and their states."""
    rng = np.random.default_rng(0)
    agents = paper_form.PaperAgents(8, Config(paper=True, metric="em", replay_size=40, uniform_episodes=3))
    expected = {"opponent": [], "learner": []}
    states = []
    for number in range(4):
        plays, ids = plays_of(number, PLAYERS), rng.integers(0, 3, (6, 9))
        states.append([(torch.randn(9, 8).half(), torch.ones(9, dtype=torch.bool)) for _ in range(6)])
        agents.store(Episode(ids, None, np.ones((6, 9), bool), plays), states[number])
        agents.number += 1
        for name, actions in expected.items():
            logits, value = paper_form.logits_and_values(agents.policies[name], states[number])
            log_prob = logits.detach().log_softmax(1)
            if number < 3:
                log_prob = torch.full((6, 9), -math.log(9))
            for s, a in np.argwhere(plays[name].mask).tolist():
                R = papers_reward(plays, name, (s, a))
                if R is not None:
                    rarity = 1 / math.sqrt(list(ids[s]).count(ids[s, a]))
                    actions.append((number, s, a, R, log_prob[s, a].item(), rarity, value[s].item()))
    episodes = set()
    for name, agent in agents.agents.items():
        np.testing.assert_allclose(np.array(agent.replay.tolist()), expected[name][-40:], rtol=1e-5)
        episodes |= set(agent.replay["episode"].tolist())
    assert {3} < episodes < {0, 1, 2, 3}
    assert agents.states_of == {number: states[number] for number in episodes}


# ---------------------------------------------------------------- the policy and what it reads

def test_the_network_is_the_papers():
    """One context at a time: attention in two heads of 64, residual, LayerNorm, a layer of 128, a logit; the
    value from the mean state. It has its size, and starts from small weights and no biases."""
    torch.manual_seed(0)
    assert sum(weight.numel() for weight in PaperPolicy(768).parameters()) == 2_561_026
    policy, hidden = PaperPolicy(128), torch.randn(3, 7, 128)
    for name, weight in policy.named_parameters():
        if name == "norm.weight":
            assert (weight == 1).all()
        elif name.endswith("bias"):
            assert (weight == 0).all()
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.2)
            assert abs(weight.mean().item()) < 0.005
        torch.nn.init.normal_(weight, std=0.2)
    real = torch.arange(7) < torch.tensor([[7], [4], [6]])
    maskable = real & (torch.arange(7) > 0)
    logits, values = policy(hidden, real, maskable), policy.value(hidden, real)
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


def test_a_policy_of_ones_own_has_finite_logits():
    """Those of tokens that must not be masked do not count."""
    class Own(policies.Policy):
        def token_logits(self, hidden, attention_mask):
            return hidden[..., 0]

    hidden, real = torch.tensor([[[1.0], [torch.nan], [3.0]]]), torch.ones(1, 3, dtype=torch.bool)
    assert Own(1)(hidden, real, torch.tensor([[True, False, True]])).tolist() == [[1, -torch.inf, 3]]
    with pytest.raises(runs.UserError, match="the logits of the policy became infinite or NaN"):
        Own(1)(hidden, real, real)


def test_tokens_are_drawn_without_replacement(monkeypatch):
    """How often a token is among two drawn ones: as in successive draws from the softmax."""
    maskable = np.arange(9) > 2
    batch = SimpleNamespace(maskable=np.tile(maskable, (4000, 1)), indices=np.arange(4000))
    logits = np.where(batch.maskable, np.linspace(-1, 2, 9), -np.inf)
    monkeypatch.setattr(train_nmg, "policy_forward", lambda *_: torch.from_numpy(logits))
    rng = RowRandom(0, "x", 0, batch.indices)
    mask = train_nmg.act(PaperPolicy(8), None, batch, rng, 2 / maskable.sum()).mask
    p = np.exp(logits[0, maskable])
    p /= p.sum()
    expected = []
    for i in range(len(p)):
        second = [p[j] * p[i] / (1 - p[j]) for j in range(len(p)) if j != i]
        expected.append(p[i] + sum(second))
    np.testing.assert_allclose(mask[:, maskable].mean(0), expected, atol=0.03)


def test_contexts_run_together_as_each_alone(monkeypatch):
    """Logits and values are those of one context at a time. A context may be there twice."""
    torch.manual_seed(0)
    policy, sizes = PaperPolicy(8), (2, 7, 29, 11, 7, 3, 18)
    states = [(torch.randn(n, 8).half(), torch.arange(n) % 3 > 0) for n in sizes]
    states.append(states[3])
    monkeypatch.setattr(policies, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(policies, "length_batches", lambda length: np.array_split(np.argsort(-length), 3))
    logits, values = torch.full((8, 29), -torch.inf), torch.zeros(8)
    for row, (hidden, maskable) in enumerate(states):
        n = len(hidden)
        one, real = hidden[None].float(), torch.ones(1, n, dtype=torch.bool)
        logits[row, :n], values[row] = policy(one, real, maskable[None])[0], policy.value(one, real)[0]
    torch.testing.assert_close(train_nmg.policy_forward(policy, states), logits)
    torch.testing.assert_close(paper_form.logits_and_values(policy, states), (logits, values))


def test_states_are_the_lms_of_each_context_alone(cls_folder, tok):
    """In the order of the contexts, whatever their lengths."""
    pieces = blocks(data_prep.load(str(cls_folder), tok)["train"], 32)
    lm = random_lm("bert", len(tok), dropout=0.1).train()
    states = train_nmg.encode(lm, all_of(pieces))
    assert lm.training and len(set(pieces.length)) > 3
    for i in range(len(pieces)):
        alone = collate(pieces, np.array([i]))
        hidden, maskable = states[i]
        expected = models.LMReader(lm)(alone)[0].cpu()
        torch.testing.assert_close(hidden.float(), expected, atol=2e-3, rtol=2e-3)
        assert maskable.tolist() == alone.maskable[0].tolist()


# ---------------------------------------------------------------- plays

@pytest.fixture
def contexts(subtask):
    """The contexts of a sub-task as a batch, and their states under the LM."""
    batch = all_of(subtask.contexts)
    return batch, train_nmg.encode(models.load_lm("tiny"), batch)


def test_random_directions_are_standardized(contexts):
    """In each context; of their own for each seed and episode."""
    batch, states = contexts
    maskable = batch.maskable
    places = (0, 0), (0, 0), (1, 0), (0, 1)
    one, again, *others = [train_nmg.random_direction(states, *place) for place in places]
    assert (one[~maskable] == 0).all() and (one == again).all()
    for row, allowed in zip(one, maskable, strict=True):
        assert row[allowed].mean() == pytest.approx(0, abs=1e-5)
        assert row[allowed].std() == pytest.approx(1, abs=1e-3)
    for other in others:
        assert abs(np.corrcoef(one[maskable], other[maskable])[0, 1]) < 0.9


def test_players_take_opposite_steps_from_one_policy(contexts):
    """The entropy is of the policy without the step."""
    cfg = Config(exploration=2, sharpness=1.5, clip=0.8, p=0.3, seed=5)
    batch, states = contexts
    agents = train_nmg.Agents(128, cfg)
    torch.nn.init.normal_(agents.policy.weight)
    plays = train_nmg.mask_contexts(agents.policies, states, batch, 1, cfg)
    direction = train_nmg.random_direction(states, 5, 1)
    logits = train_nmg.policy_forward(agents.policy, states).detach().cpu().numpy()
    base = policies.sharpened(logits, 1.5, 0.8)
    own = torch.from_numpy(base).log_softmax(1)
    entropy = -(own.exp() * own.masked_fill(own.isinf(), 0)).sum(1).mean()
    for name, sign in (("learner", 1), ("opponent", -1)):
        noise = RowRandom(5, f"{name} acts", 1, batch.indices).gumbel(base.shape)
        highest = maskers.pick(base + sign * 3 * direction + noise, batch, maskers.budget_of(batch, 0.3))
        assert (plays[name].mask == highest).all()
        assert plays[name].entropy == pytest.approx(entropy.item())


def test_players_of_the_papers_form(contexts):
    """Each draws by its own policy, but uniformly in the first episodes, as random always does."""
    cfg = Config(paper=True, uniform_episodes=2, p=0.3)
    batch, states = contexts
    agents = paper_form.PaperAgents(128, cfg)
    for number in (1, 2):
        plays = train_nmg.mask_contexts(agents.policies, states, batch, number, cfg)
        assert [*plays] == PLAYERS
        for name, play in plays.items():
            logits = np.where(batch.maskable, 0, -np.inf)
            if number == 1 or name == "random":
                assert play.entropy == pytest.approx(np.log(batch.maskable.sum(1)).mean())
            else:
                logits = train_nmg.policy_forward(agents.policies[name], states).detach().cpu().numpy()
            noise = RowRandom(0, f"{name} acts", number, batch.indices).gumbel(logits.shape)
            assert (play.mask == maskers.pick(logits + noise, batch, maskers.budget_of(batch, 0.3))).all()


def test_sharpened_logits():
    """Standardized in each block, cut from above, and multiplied; a single token, and no choice."""
    logits = np.array([[1.0, 5.0, -np.inf, 3.0], [2.0, -np.inf, -np.inf, -np.inf], [4.0, 4.0, 4.0, -np.inf]])
    scaled = policies.standardized(logits)
    np.testing.assert_allclose(scaled[0, [0, 1, 3]], np.array([-1, 1, 0]) * math.sqrt(1.5))
    assert scaled[1, 0] == 0 and (scaled[2, :3] == 0).all()
    np.testing.assert_allclose(policies.sharpened(logits, 2.0), 2 * scaled)
    clipped = policies.sharpened(logits, 2.0, 0.5)
    np.testing.assert_allclose(clipped[0, [0, 1, 3]], [-2 * math.sqrt(1.5), 1, 0], atol=1e-12)
    assert (np.isinf(clipped) == np.isinf(logits)).all()
    flat = policies.sharpened(logits, 0.0, 0.5)
    assert (flat[np.isfinite(logits)] == 0).all() and (np.isinf(flat) == np.isinf(logits)).all()
    # The paper's form.
    assert policies.sharpened(logits, None) is logits


def test_an_inner_loop_trains_a_copy_on_its_own_masks(subtask, monkeypatch):
    """Each context under its own row of the mask in every epoch; what is fine-tuned is the adapted LM; the LM
    itself stays as it was. All players of an episode have the same seeds."""
    lm, batch = models.load_lm("tiny"), all_of(subtask.contexts)
    before = weights(lm)
    rng = np.random.default_rng(1)
    mask = maskers.pick(rng.random(batch.input_ids.shape), batch, maskers.budget_of(batch, 0.2))
    lines = [{"gold": "a", "predicted": "a", "likelihood": -0.5},
             {"gold": "b", "predicted": "a", "likelihood": -3.0}]
    pretrained, mlm_loss = Mock(wraps=pretrain.pretrain), Mock(wraps=pretrain.mlm_loss)
    tuned, predictions = Mock(), Mock(return_value=lines)
    monkeypatch.setattr(pretrain, "mlm_loss", mlm_loss)
    monkeypatch.setattr(train_nmg, "pretrain", pretrained)
    monkeypatch.setattr(finetune_cls, "finetune", tuned)
    monkeypatch.setattr(finetune_cls, "predictions", predictions)
    cfg = Config(p=0.2, mlm_epochs=2, mlm_lr=2e-3, ft_epochs=1, ft_lr=1e-3, batch_size=1)
    adapted, scored = train_nmg.inner_loop(lm, subtask, mask, finetune_cls, cfg)
    inputs = [of_step.args[1] for of_step in mlm_loss.call_args_list]
    expected = [batch.input_ids[i][mask[i]].tolist() for i in range(len(mask))]
    assert sorted(tensors["labels"].tolist() for tensors in inputs) == sorted(2 * expected)
    # The same masks are corrupted in the same way in each epoch.
    assert len({str(tensors["input_ids"].tolist()) for tensors in inputs}) == len(mask)
    flags = pretrained.call_args.kwargs
    assert (flags["lr"], flags["seed"]) == (2e-3, subtask.seed)
    tuned.assert_called_once_with(adapted, subtask.train, epochs=1, lr=1e-3, batch_size=1, micro_batch=None,
                                  seed=subtask.seed)
    predictions.assert_called_with(tuned.return_value, subtask.val)
    # F1 of a is 2/3, of b 0.
    assert scored == {"accuracy": 50, "macro_f1": pytest.approx(100 / 3), "likelihood": -1.75}
    assert same(weights(lm), before)
    assert not same(weights(adapted), before)
    # Without a mask (of the masker `none`) the copy stays as the LM is, and nothing is trained.
    monkeypatch.setattr(train_nmg, "pretrain", None)
    adapted, _ = train_nmg.inner_loop(lm, subtask, np.zeros_like(mask), finetune_cls, cfg)
    assert same(weights(adapted), before)


# ---------------------------------------------------------------- learning

def episode_of(scores, batch, rng):
    """Players with these scores have masked half of the tokens at random."""
    plays = {}
    for name, score in scores.items():
        mask = maskers.pick(rng.random(batch.input_ids.shape), batch, maskers.budget_of(batch, 0.5))
        plays[name] = Play(mask, 0.0, {"em": score})
    return Episode(batch.input_ids, batch.attention_mask, batch.maskable, plays)


def test_who_scores_alike_teaches_nothing(contexts):
    """Whatever the score is: three times 72.3 is not quite 216.9 in floating point."""
    batch, states = contexts
    for score in [72.3, 64.1, 99.7, -1.2345678]:
        episode = episode_of(dict.fromkeys(PLAYERS, score), batch, np.random.default_rng(0))
        assert not train_nmg.policy_gradient(episode, states, Config(metric="em")).any()


def test_the_policy_learns_by_policy_gradient(contexts, monkeypatch):
    """The gradient, by autograd, of the sum of R log π(a) over all actions of two episodes, at w = 0. R is a
    score minus the mean of the others; tokens that all players masked do not count."""
    batch, states = contexts
    agents = train_nmg.Agents(128, Config(metric="em"))
    uniform = LinearPolicy(128)
    objective = 0
    rng = np.random.default_rng(0)
    for scores in ({"random": 1, "opponent": 4, "learner": 10.5}, {"opponent": 5, "learner": 2}):
        episode = episode_of(scores, batch, rng)
        agents.learn(episode, states)
        logits = train_nmg.policy_forward(uniform, states)
        found = train_nmg.rewards(episode, agents.cfg)
        for (name, play), reward in zip(episode.plays.items(), found, strict=True):
            R = scores[name] - np.mean([scores[other] for other in scores if other != name])
            assert reward == pytest.approx(R)
            for block, t in zip(*play.mask.nonzero(), strict=True):
                if not all(other.mask[block, t] for other in episode.plays.values()):
                    objective += R * logits[block].log_softmax(0)[t]
    objective.backward()
    torch.testing.assert_close(agents.policy.weight.data, uniform.weight.grad, rtol=1e-3, atol=1e-2)
    # What all players earn teaches nothing.
    alone = train_nmg.policy_gradient(episode, states, agents.cfg)
    earned = train_nmg.rewards(episode, agents.cfg) + 100
    monkeypatch.setattr(train_nmg, "rewards", lambda episode, cfg: earned)
    shifted = train_nmg.policy_gradient(episode, states, agents.cfg)
    torch.testing.assert_close(shifted, alone)


def value_of(agent, memory):
    with torch.no_grad():
        return paper_form.logits_and_values(agent.policy, memory[0])[1].cpu().numpy()


def test_an_agent_learns_the_value_of_a_context():
    """Its mean reward, here; replay keeps the values before the update. An empty replay teaches nothing."""
    torch.manual_seed(0)
    agent, hidden = paper_form.Agent(PaperPolicy(8), 1e-2), torch.randn(30, 8).half()
    memory = {0: [(part, torch.ones(len(part), dtype=torch.bool)) for part in hidden.split([9, 6, 15])]}
    nothing = agent.learn(memory, np.random.default_rng(0), Config(updates_per_episode=3))
    assert nothing == {"policy_loss": 0, "value_loss": 0}
    actions = np.zeros(12, paper_form.ACTION)
    actions["block"], actions["position"] = np.arange(12) % 3, np.arange(12) // 3
    actions["R"] = np.where(np.arange(12) % 3, 1, -1)
    actions["inv_sqrt_frequency"], actions["log_prob"] = 1 / np.sqrt(1 + np.arange(12) % 4), -2
    agent.replay, value = actions.copy(), value_of(agent, memory)
    cfg = Config(updates_per_episode=1, minibatch=12, entropy_coef=0.01, paper=True)
    agent.learn(memory, np.random.default_rng(0), cfg)
    np.testing.assert_allclose(agent.replay["value"], value[actions["block"]], rtol=1e-4)
    cfg.updates_per_episode = 200
    agent.learn(memory, np.random.default_rng(0), cfg)
    np.testing.assert_allclose(value_of(agent, memory), [-1, 1, 1], atol=0.1)


def test_actions_are_drawn_by_priority():
    agent = paper_form.Agent(PaperPolicy(8), 1e-3)
    agent.replay = np.zeros(4, paper_form.ACTION)
    agent.replay["inv_sqrt_frequency"], agent.replay["R"] = [1, 1, 5, 0], [1, -1, 1, 1]
    # |R - V|: 1, 2, 1, 1
    agent.replay["value"] = [0, 1, 2, 0]
    rng = np.random.default_rng(0)
    drawn = [agent.draw(rng, 1)[0] for _ in range(1000)]
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 1000, np.array([1, 2, 5, 0]) / 8, atol=0.06)


def test_a_policy_of_the_plays_of_others(finished, tmp_path):
    """Two runs teach something else than one of them; and from there it goes on playing."""
    other = finished["default"] / "o"
    succeed("train_nmg.py", *SMALL, "--episodes=1", "--seed=5", "--out=second", cwd=tmp_path)
    # Tokens mean something else to another LM.
    run = runs.read_run(tmp_path / "second")
    run["settings"]["weights"] = "another"
    (tmp_path / "second/run.json").write_text(json.dumps(run))
    learned = []
    for folders, episodes, place in ((other, 0, "0"), (f"{other},second", 0, "1"), (other, 1, "0")):
        out = tmp_path / place
        flags = [*SMALL, f"--episodes={episodes}", f"--plays={folders}", f"--out={out}"]
        result = succeed("train_nmg.py", *flags, cwd=tmp_path)
        # With the same seed there would be the same sub-tasks.
        assert ("draws the same sub-tasks and directions again" in result.stdout) == (episodes > 0)
        assert ("--plays=second: was played with the LM tiny" in result.stdout) == (place == "1")
        learned.append((out / "policy.safetensors").read_bytes())
        assert len(runs.read_rows(out / "metrics.jsonl")) == episodes
    # From the plays of a run alone follows the policy of that run.
    assert learned[0] == (other / "policy.safetensors").read_bytes() != learned[1]
    for name in ("other/o", "gap", "half", "damaged"):
        shutil.copytree(other, tmp_path / name)
    whole = (other / "plays/00001.npz").read_bytes()
    (tmp_path / "damaged/plays/00001.npz").write_bytes(whole[:-200])
    # Other plays in a folder of the same name, and one that is missing in the midst of a run that goes on.
    (tmp_path / "other/o/plays/00001.npz").unlink()
    (tmp_path / "gap/plays/00002.npz").unlink()
    # A run that was killed while it was made longer.
    (tmp_path / "half/run.json").rename(tmp_path / "half/started.json")
    cases = {f"--episodes=1 --plays={tmp_path}/other/o --out=0": "holds another run (plays_checksum=",
             f"--episodes=0 --plays={other},gap": "gap holds plays that are in another of these folders, too",
             "--episodes=9 --out=gap": "gap/plays/00002.npz: is missing",
             f"--episodes=0 --plays={other} --dataset=toyqa --metric=em": "its plays have no score em",
             "--episodes=0 --plays=damaged": "00001.npz: is no episode of train_nmg.py",
             "--episodes=0 --plays=half": "half: this run is not finished",
             # Its plays would be lost.
             "--episodes=1 --out=half": "--episodes=1: half holds 3 already",
             "--seed=9 --out=half": "holds another run (seed="}
    for flags, said in cases.items():
        refused(said, "train_nmg.py", *SMALL, *flags.split(), cwd=tmp_path)
    # The paper's form goes on from a checkpoint alone, and would remove them.
    refused("holds another run (", "train_nmg.py", *PAPER, "--out=half", cwd=tmp_path)
    assert len(names(tmp_path / "half/plays")) == 3


# ---------------------------------------------------------------- whole episodes

@pytest.mark.parametrize(("continual", "expected"), [(True, [0, 0, 0, 1, 1, 1, 2, 2, 2]), (False, [0] * 9)])
def test_what_an_episode_of_the_paper_hands_on(continual, expected, cls_folder, lm_folder, tmp_path,
                                               monkeypatch, capsys):
    """Whose LM it starts from (the one that the last learner adapted), seeds, flags; each draws a picture."""
    starts, subtasks, drawn = [], [], []
    monkeypatch.setattr(train_nmg, "SAVE_SECONDS", 0)
    monkeypatch.setattr(train_nmg, "curves", lambda metrics, file: drawn.append(len(metrics)))

    def inner_loop(lm, subtask, mask, task, cfg):
        assert vars(cfg) == vars(cfg) | flags
        adapted = copy.deepcopy(lm)
        with torch.no_grad():
            adapted.cls.predictions.bias += 1
        starts.append(lm.cls.predictions.bias[0].round().item())
        subtasks.append(subtask)
        return adapted, {"accuracy": 50.0, "likelihood": -1.0}

    monkeypatch.setattr(train_nmg, "inner_loop", inner_loop)
    flags = {"dataset": str(cls_folder), "lm": str(lm_folder), "paper": True, "episodes": 3, "contexts": 12,
             "docs": 11, "examples": 5, "validation": 3, "val_share": 0.3, "p": 0.3, "mlm_epochs": 2,
             "mlm_lr": 1e-4, "ft_epochs": 4, "ft_lr": 2e-4, "batch_size": 6, "max_len": 32, "ft_max_len": 24,
             "metric": "likelihood", "continual": continual, "updates_per_episode": 1}
    train_nmg.main(Config(out=str(tmp_path / "o"), **flags))
    assert "WARNING: in each episode of this run all players had the same score" in capsys.readouterr().out
    assert starts == expected and drawn == [1, 2, 3]
    seeds = [subtask.seed for subtask in subtasks]
    assert seeds[0] == seeds[1] == seeds[2] and len(set(seeds)) == 3
    # The sub-tasks that were asked for.
    assert {len(np.unique(subtask.contexts.doc)) for subtask in subtasks} == {11}
    assert {(len(subtask.train), len(subtask.val)) for subtask in subtasks} == {(5, 3)}
    assert max(subtask.contexts.length.max() for subtask in subtasks) == 32
    assert max(subtask.train.length.max() for subtask in subtasks) == 24
    # Other seeds have others.
    train_nmg.main(Config(out=str(tmp_path / "other"), seed=1, **flags))
    assert not {*seeds} & {subtask.seed for subtask in subtasks[9:]}


@pytest.mark.slow
@pytest.mark.parametrize(("form", "N", "p", "episodes", "noise", "least", "flags"), [
    (train_nmg.Agents, 60, 1 / 12, 20, 0.3, 0.85, {}),
    (paper_form.PaperAgents, 6, 2 / 12, 40, 0, 0.6,
     {"paper": True, "uniform_episodes": 0, "rl_lr": 1e-3, "replay_size": 300}),
])
def test_what_is_good_to_mask_is_learned(form, N, p, episodes, noise, least, flags):
    """A simulation without an LM: a play scores by how many good tokens (one kind of four) it masked, and by
    chance. In the end the policy draws good tokens."""
    L, H = 12, 16
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    cfg = Config(metric="em", p=p, **flags)
    agents = form(H, cfg)
    batch = SimpleNamespace(maskable=np.ones((N, L), bool), indices=np.arange(N))
    kinds = torch.from_numpy(rng.normal(size=(4, H))).float()
    shares = []
    for e in range(episodes):
        kind = torch.from_numpy(rng.integers(0, 4, (N, L)))
        good = (kind == 0).numpy()
        states = [(kinds[row].half(), torch.ones(L, dtype=torch.bool)) for row in kind]
        plays = train_nmg.mask_contexts(agents.policies, states, batch, e, cfg)
        for play in plays.values():
            play.scores["em"] = (play.mask & good).sum() / N + noise * rng.normal()
        agents.learn(Episode(kind.numpy(), batch.maskable, batch.maskable, plays), states)
        row_random = RowRandom(0, "x", e, batch.indices)
        drawn = train_nmg.act(agents.policies["learner"], states, batch, row_random, p)
        shares.append((drawn.mask & good).sum() / drawn.mask.sum())
    assert np.mean(shares[-3:]) > least


# ---------------------------------------------------------------- a run, killed and shared

@pytest.fixture(scope="module")
def finished(one_thread):
    """Form -> the place where a run of it has left its folder `o`, which tests only read: all workers share
    it."""
    def make(form, place):
        place.mkdir()
        succeed("train_nmg.py", *FORMS[form], "--out=o", cwd=place)

    places = {form: sources.CACHE / "finished" / form for form in FORMS}
    for form, place in places.items():
        sources.make_once(place, functools.partial(make, form))
    return places


def assert_ends_alike(place, other):
    """Two runs leave the same policy, the same metrics, and (but for pictures) the same files."""
    ends = []
    for folder in (place / "o", other / "o"):
        rows = [row | {"seconds": 0} for row in runs.read_rows(folder / "metrics.jsonl")]
        files = {*names(folder)} - {"curves.png"}
        ends.append(((folder / "policy.safetensors").read_bytes(), rows, files))
    assert ends[0] == ends[1]


def test_a_small_run(finished):
    place = finished["default"]
    assert names(place / "o") == ["README.md", "curves.png", "metrics.jsonl", "plays", "policy.json",
                                  "policy.safetensors", "run.json"]
    metrics = runs.read_rows(place / "o/metrics.jsonl")
    assert [row["episode"] for row in metrics] == [1, 2, 3]
    assert ["random_score" in row for row in metrics] == [True, False, True]
    for row in metrics:
        assert np.isfinite(list(row.values())).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_finished_run_made_longer_is_the_longer_run(form, finished, tmp_path):
    """Byte for byte."""
    for episodes in (2, 3):
        succeed("train_nmg.py", *FORMS[form], f"--episodes={episodes}", "--out=o", cwd=tmp_path)
    assert_ends_alike(tmp_path, finished[form])


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_the_same(finished, tmp_path):
    """SIGKILL, twice, after more and more episodes. While it is at work, the same command is refused."""
    log, rng, asked = tmp_path / "o/metrics.jsonl", random.Random(0), []
    command = ["train_nmg.py", *PAPER, "--out=o"]

    def ready(episodes):
        if len(runs.read_rows(log)) < episodes:
            return False
        if not asked:
            asked.append(refused("another process is at work on it", *command, cwd=tmp_path))
        time.sleep(rng.uniform(0, 0.2))
        return True

    for episodes in (1, 2):
        # With a checkpoint after each episode.
        kill_when(lambda n=episodes: ready(n), *command, cwd=tmp_path, changed={"train_nmg.SAVE_SECONDS": 0})
        assert not (tmp_path / "o/run.json").exists()
    succeed(*command, cwd=tmp_path)
    assert_ends_alike(tmp_path, finished["paper"])


@pytest.mark.parametrize(("paper", "checkpoint"), [(False, "plays"), (True, "checkpoint.pt")])
def test_a_run_is_made_longer_from_its_checkpoint(paper, checkpoint, tmp_path):
    def is_longer(episodes):
        return train_nmg.is_longer(Config(paper=paper, episodes=episodes, out=str(tmp_path)))

    assert not is_longer(3)
    for played in (0, 2):
        (tmp_path / "run.json").write_text(json.dumps({"settings": {"episodes": played}}))
        assert not is_longer(played)
        if played:
            with pytest.raises(runs.UserError, match=f"{checkpoint} is gone"):
                is_longer(3)
            (tmp_path / checkpoint).touch()
        assert is_longer(3)
    with pytest.raises(runs.UserError, match="--episodes=2, which cannot be made shorter"):
        is_longer(1)


class Killed(BaseException):
    """What nothing in the program catches."""


def test_killed_before_any_of_its_files_it_ends_the_same(tmp_path, monkeypatch):
    """A run of one episode dies before its first file is in place, the next before its second, and so on. A
    play scores by where it masks, without training."""
    def inner_loop(lm, subtask, mask, task, cfg):
        return lm, {cfg.metric: float(mask.nonzero()[1].sum())}

    monkeypatch.setattr(train_nmg, "inner_loop", inner_loop)
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    flags = [*SMALL, "--episodes=1", "--out=o"]
    succeed("train_nmg.py", *flags, cwd=tmp_path / "whole")
    replace, lives, renames = os.replace, 0, []

    def move(*paths):
        renames.append(paths)
        if len(renames) > lives:
            raise Killed
        replace(*paths)

    monkeypatch.setattr(os, "replace", move)
    while not (tmp_path / "killed/o/run.json").exists():
        renames.clear()
        with contextlib.suppress(Killed):
            succeed("train_nmg.py", *flags, cwd=tmp_path / "killed")
        lives += 1
        # The process and its lock are gone.
        gc.collect()
    assert lives > 4
    assert_ends_alike(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
def test_several_processes_learn_what_one_does(finished, tmp_path):
    """The same policy, byte for byte. In the paper's form the LM of the learner is sent to all."""
    said = side_by_side(ranks(3), "train_nmg.py", *FORMS["paper"], "--out=o", cwd=tmp_path)
    assert_ends_alike(tmp_path, finished["paper"])
    assert "".join(said).count("--masker=sampled:o") == 1


@pytest.mark.parametrize(("flags", "players"), [
    (["--self_play=False"], ["random", "learner"]),
    (["--dataset=toyqa", "--metric=f1", "--validation=12"], PLAYERS),
    (["--preset=small_tasks"], PLAYERS),
])
def test_switches(flags, players, tmp_path):
    small = ["--contexts=16", "--docs=4", "--episodes=1", "--ft_epochs=1", "--mlm_epochs=1"]
    succeed("train_nmg.py", *small, *flags, cwd=tmp_path)
    [folder] = tmp_path.glob("runs/nmg-toy*-tiny-0")
    [row] = runs.read_rows(folder / "metrics.jsonl")
    assert [name for name in row if name.endswith("_score")] == [f"{player}_score" for player in players]
    assert np.isfinite(list(row.values())).all()


def test_a_learning_rate_of_the_policy_without_sense(tmp_path):
    """All weights are finite after a step; no output is, and no policy is saved."""
    refused("became infinite or NaN; a smaller learning rate", "train_nmg.py", *PAPER, "--episodes=1",
            "--rl_lr=1e30", "--out=o", cwd=tmp_path)
    assert not (tmp_path / "o/policy.safetensors").exists() and not (tmp_path / "o/metrics.jsonl").exists()
