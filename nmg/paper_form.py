"""The paper's own way to explore, to reward and to learn, which train_nmg.py uses with --paper.
docs/paper_vs_code.md says why it is not the default.

What differs with --paper:
    exploration     players draw tokens from their own policies, uniformly in the first --uniform_episodes; no
                    direction is added to a policy, and logits are not sharpened
    players         learner and opponent are two policies (Agent), and random takes part in every episode
    policy          a network (PaperPolicy), which reads the states of a block together
    rewards         signs of comparisons, in place of differences of scores
    replay          single actions, drawn by priority; an agent learns from its own plays only, and goes on
                    from what it had learned
    loss            the ratio of the new and the old policy, and a critic
    continual       an episode starts from the LM that the learner of the last one pre-trained
The inner loop is the same.
"""
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import log_softmax

from nmg.plays import Episode, Play, files_of
from nmg.policies import PaperPolicy, Policy, State, padded
from support import runs
from support.checkpoints import loaded_state, save_state
from support.devices import device
from support.rng import rng_for, torch_seed

# ---------------------------------------------------------------- rewards

def rewards(plays: dict[str, Play], player: str, cfg: Any) -> tuple[np.ndarray, np.ndarray]:
    """R (M, L) of a player's actions, and which of them count, (M, L) bool (Algorithm 1, OuterLoop).

    plays: the Play of each player; player: one of the agents, whose rival is the other one; cfg.metric: which
    of their scores are compared

    A comparison is 1 (won), -1 (lost) or 0 (a tie). Which of them rewards a token depends on who masked it:
        only this player                the worse of its two comparisons
        this player and random          the comparison with the rival
        this player and the rival       the comparison with random
        all three                       none: the token is skipped"""
    own, random = plays[player].mask, plays["random"].mask
    score = {name: play.scores[cfg.metric] for name, play in plays.items()}
    beats_random = np.sign(score[player] - score["random"])
    rival = {"learner": "opponent", "opponent": "learner"}[player]
    if rival not in plays:
        # Without self-play (Table 3) there is no rival, and the player is compared with random alone.
        return np.full(own.shape, beats_random), own & ~random
    beats_rival = np.sign(score[player] - score[rival])
    rival_mask = plays[rival].mask
    R = np.full(own.shape, min(beats_random, beats_rival))
    R[random & ~rival_mask] = beats_rival
    R[rival_mask & ~random] = beats_random
    return R, own & ~(random & rival_mask)


# ---------------------------------------------------------------- loss

def losses(logits: torch.Tensor, value: torch.Tensor, position: torch.Tensor, log_prob_old: torch.Tensor,
           R: torch.Tensor, entropy_coef: float) -> tuple[torch.Tensor, torch.Tensor]:
    """L_policy and L_value, summed over a minibatch (section 3.3).

        L_policy = - (R - V) π(a) / π_old(a) - α H(π)
        L_value  = 1/2 (R - V)^2

    logits (K, L), -inf at tokens that must not be masked, the block of each of K actions; position (of a),
    value, log_prob_old, R (K,); α is entropy_coef.

    π_old is the policy that masked the token. As in the official code, π_old(a) is the probability of a
    single draw, although tokens are drawn without replacement. The ratio is not clipped, as PPO's is. What it
    can hardly learn stands in docs/paper_vs_code.md."""
    log_probs = logits.log_softmax(1)
    log_prob = log_probs.gather(1, position[:, None]).squeeze(1)
    entropy = -(log_probs.exp() * log_probs.masked_fill(logits.isinf(), 0)).sum(1)
    ratio = (log_prob - log_prob_old).exp()
    advantage = R - value.detach()
    policy_loss = -(advantage * ratio).sum() - entropy_coef * entropy.sum()
    return policy_loss, 0.5 * (R - value).square().sum()


def logits_and_values(policy: PaperPolicy, states: list[State]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of M blocks the logits (M, L), as policy_forward returns them, and the values (M,), in one pass."""
    longest = max(len(hidden) for hidden, _ in states)
    logits = torch.full((len(states), longest), -torch.inf, device=device())
    values = torch.zeros(len(states), device=device())
    for indices, hidden, attention_mask, maskable in padded(states):
        logits[indices, :hidden.shape[1]] = policy(hidden, attention_mask, maskable)
        values[indices] = policy.value(hidden, attention_mask)
    return logits, values


# ---------------------------------------------------------------- replay

# A masked token, as replay remembers it.
ACTION = np.dtype([
    ("episode", "i4"), ("block", "i4"), ("position", "i8"),         # which token it was
    ("R", "f4"),            # its reward
    ("log_prob", "f4"),     # log π_old
    ("inv_sqrt_frequency", "f4"),       # 1 / square root of the token's frequency in its block
    ("value", "f4"),        # V, for the priority: from the player's network at first, updated when drawn
    ])


def actions_of(number: int, R: np.ndarray, rewarded: np.ndarray, input_ids: np.ndarray,
               log_prob: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The actions of a play that count, as replay stores them. R, rewarded, input_ids, log_prob (M, L);
    value (M,)."""
    block, position = rewarded.nonzero()
    actions = np.zeros(len(block), ACTION)
    actions["episode"] = number
    actions["block"] = block
    actions["position"] = position
    actions["R"] = R[rewarded]
    actions["log_prob"] = log_prob[rewarded]
    actions["value"] = value[block]
    frequency = (input_ids[block] == input_ids[rewarded][:, None]).sum(1)
    actions["inv_sqrt_frequency"] = 1 / np.sqrt(frequency)
    return actions


class Agent:
    """A policy, its optimizer, and its replay: an array of ACTION, oldest first."""

    def __init__(self, policy: PaperPolicy, lr: float):
        self.policy = policy.to(device())
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
        self.replay = np.zeros(0, ACTION)

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """Indices of at most n actions of replay, drawn without replacement, by priority: |R - V| / square
        root of the token's frequency in its block (section 3.3)."""
        priority = np.abs(self.replay["R"] - self.replay["value"]) * self.replay["inv_sqrt_frequency"]
        # The highest after Gumbel noise are the draws. A priority of 0 comes last.
        with np.errstate(divide="ignore"):
            keys = np.log(priority) + rng.gumbel(size=len(priority))
        return np.argsort(-keys, kind="stable")[:n]

    def learn(self, states_of: dict[int, list[State]], rng: np.random.Generator,
              cfg: Any) -> dict[str, float]:
        """Updates on minibatches from replay (section 3.3); returns the losses per action, for the log.

        states_of: episode -> the states of its blocks, for each episode that has actions in replay"""
        total = {"policy_loss": 0.0, "value_loss": 0.0}
        if not len(self.replay):
            return total
        count = 0
        for _ in range(cfg.updates_per_episode):
            chosen = self.draw(rng, cfg.minibatch)
            actions = self.replay[chosen]
            # One row per action, so that a block may be there several times.
            states = [states_of[action["episode"]][action["block"]] for action in actions]
            logits, value = logits_and_values(self.policy, states)
            columns = [torch.tensor(actions[name], device=device()) for name in ("position", "log_prob", "R")]
            policy_loss, value_loss = losses(logits, value, *columns, cfg.entropy_coef)
            self.optimizer.zero_grad()
            (policy_loss + value_loss).backward()
            self.optimizer.step()

            self.replay["value"][chosen] = value.detach().cpu().numpy()
            total["policy_loss"] += policy_loss.item()
            total["value_loss"] += value_loss.item()
            count += len(chosen)
        # A forward pass checks that its outputs are finite: here, after the last update.
        with torch.no_grad():
            logits_and_values(self.policy, states)
        return {name: loss / count for name, loss in total.items()}


# ---------------------------------------------------------------- two agents

class PaperAgents:
    """Learner and opponent, which are two policies, with the states that their replay needs. As
    train_nmg.Agents it has `policies`, `resume`, `learn` and `save_checkpoint`."""

    def __init__(self, hidden_size: int, cfg: Any):
        self.cfg = cfg
        self.agents: dict[str, Agent] = {}
        self.number = 0             # of the next episode, from 0
        self.states_of: dict[int, list[State]] = {}
        for name in ("opponent", "learner"):
            # Without self-play (Table 3) there is no opponent.
            if cfg.self_play or name == "learner":
                torch_seed(cfg.seed, name)
                self.agents[name] = Agent(PaperPolicy(hidden_size), cfg.rl_lr)

    @property
    def policies(self) -> dict[str, Policy]:
        return {name: agent.policy for name, agent in self.agents.items()}

    @torch.no_grad()
    def store(self, episode: Episode, states: list[State]) -> None:
        """Each agent remembers its own plays, with π_old, the policy that masked, which its loss needs."""
        self.states_of[self.number] = states
        for name, agent in self.agents.items():
            R, rewarded = rewards(episode.plays, name, self.cfg)
            # The policy is still the one that masked. In the first episodes tokens were drawn uniformly.
            logits, value = logits_and_values(agent.policy, states)
            logits, value = logits.cpu().numpy(), value.cpu().numpy()
            if self.number < self.cfg.uniform_episodes:
                logits = np.where(episode.maskable, 0.0, -np.inf)
            log_prob = log_softmax(logits, 1)
            actions = actions_of(self.number, R, rewarded, episode.input_ids, log_prob, value)
            agent.replay = np.concatenate((agent.replay, actions))[-self.cfg.replay_size:]
        # States that no action needs are dropped.
        used = np.concatenate([agent.replay["episode"] for agent in self.agents.values()])
        self.states_of = {e: states for e, states in self.states_of.items() if e in used}

    def resume(self, folder: Path, lm: torch.nn.Module) -> list[dict]:
        """Restores the checkpoint of a run, if there is one; returns the metrics of the episodes that are
        done."""
        metrics = self.load_checkpoint(folder / "checkpoint.pt", lm)
        # Episodes after the checkpoint are played again.
        if runs.is_main_process():
            for file in files_of(folder)[len(metrics):]:
                runs.remove(file)
        return metrics

    def learn(self, episode: Episode, states: list[State]) -> dict[str, float]:
        """Stores an episode's plays, and learns from replay; returns the mean losses of each agent."""
        self.store(episode, states)
        log = {}
        for name, agent in self.agents.items():
            rng = rng_for(self.cfg.seed, f"{name} learns {self.number}")
            mean_losses = agent.learn(self.states_of, rng, self.cfg)
            log |= {f"{name}_{loss}": value for loss, value in mean_losses.items()}
        self.number += 1
        return log

    def save_checkpoint(self, folder: Path, lm: torch.nn.Module, metrics: list[dict]) -> None:
        """All that the next episode depends on, in checkpoint.pt."""
        # Metrics go through JSON, as in metrics.jsonl: numbers of numpy, which a fork may log, could not be
        # read again.
        state = {"lm": None, "states": self.states_of, "metrics": json.loads(json.dumps(metrics)),
                 "agents": {}}
        if self.cfg.continual:
            state["lm"] = lm.state_dict()
        for name, agent in self.agents.items():
            # Replay is saved as a tensor of bytes, since torch.load with weights_only reads no numpy arrays.
            state["agents"][name] = {"policy": agent.policy.state_dict(),
                                     "optimizer": agent.optimizer.state_dict(),
                                     "replay": torch.from_numpy(agent.replay.view(np.uint8))}
        save_state(folder / "checkpoint.pt", state)

    def load_checkpoint(self, file: Path, lm: torch.nn.Module) -> list[dict]:
        """Restores a checkpoint, if there is one; returns the metrics of the episodes that were done."""
        if not file.exists():
            return []
        with loaded_state(file) as state:
            if state["lm"]:
                lm.load_state_dict(state["lm"])
            self.states_of = state["states"]
            for name, saved in state["agents"].items():
                self.agents[name].policy.load_state_dict(saved["policy"])
                self.agents[name].optimizer.load_state_dict(saved["optimizer"])
                self.agents[name].replay = saved["replay"].numpy().view(ACTION)
            self.number = len(state["metrics"])
            return state["metrics"]
