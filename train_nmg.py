"""Learns which words to mask: meta-trains a Neural Mask Generator by self-play (Kang, Han, Hwang 2020).

    python train_nmg.py --dataset=newsqa --lm=bert-base-uncased
    python train_nmg.py                                             # toy world, tiny LM: a minute
    python pretrain.py --masker=sampled:runs/nmg-toycls-tiny-0      # a policy as a masker
    torchrun --nproc_per_node=3 train_nmg.py --dataset=newsqa --lm=bert-base-uncased    # three plays at once

An episode (Algorithm 1): Three players (random, opponent, learner) mask the contexts of a small sub-task.
Each pre-trains a copy of the LM on its masks, fine-tunes it, and is scored on held-out examples. What a
player masked is rewarded by how it did against the others. Opponent and learner, which are two policies,
learn from replay.

The learner's policy is the result; the opponent's is a second one that learns in the same way, from the same
plays. In each episode a random direction is added to the learner's logits and subtracted from the opponent's,
so that their scores show which way is better. (In the paper's form, --paper, they explore and learn
otherwise: nmg/paper_form.py.)

Shapes: N blocks of text to mask (a context is one block or more), B rows of a forward pass, L tokens each
(padded), K actions.
"""
import copy
import importlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from scipy.special import entr, log_softmax, softmax
from tqdm import tqdm

import data_prep
import maskers
from nmg import loop, paper_form, runs, toy
from nmg.data import Batch, Data, collate
from nmg.loop import all_gather, broadcast, device, rank_and_world, torch_seed
from nmg.models import load_lm, load_tokenizer, max_len_of, weights_of
from nmg.plots import curves
from nmg.policies import Policy, State, encode, policy_forward
from nmg.runs import RowRandom, Run, UserError, stream
from nmg.sources import Columns
from nmg.subtasks import SubTask, SubTaskSampler
from pretrain import pretrain

PLAYERS = ("random", "opponent", "learner")
# Printed at the start of a run: what --paper chooses between.
FORMS = {
    False: "Exploring among policies: an episode adds a random direction to the learner's logits and "
           "subtracts it from the opponent's; both agents move towards the policies that won and away from "
           "the others.",
    True: "The paper's form: players explore token by token, and the loss has the ratio of the new "
          "and the old policy; it has learned nothing in any task tried so far."}


@dataclass
class PlayConfig(Columns):
    """The flags of a play (one player masks, an LM is trained, it is scored): the task, a sub-task of it, and
    the inner loop. Some files in tools/ have the same flags."""
    # The values are the paper's; with --lm=tiny they come from TRAIN_NMG in nmg/toy.py. None is filled in by
    # open_task with the value for classification (cls) or question answering (qa): INNER_LOOP in
    # finetune_cls.py or finetune_qa.py, and Data.block_len for max_len.
    # the task
    dataset: str = "toycls"         # squad newsqa emrqa imdb chemprot toycls toyqa, or a path (data_prep.py)
    lm: str = "tiny"                # tiny, a Hugging Face folder or hub name; the policy fits its hidden size
    val_share: float = 0.1          # the share of train held out as D_val; with 0.5 scores are less noisy
    # a sub-task
    contexts: int = 200             # texts to mask, each in one or more blocks of max_len tokens
    docs: int | None = None         # how many documents to draw them from; None: any
    examples: int = 1000            # labelled examples, at most
    validation: int = 10_000        # validation examples, at most
    # the inner loop
    p: float = 0.05                 # share of tokens to mask
    mlm_epochs: int = 3             # epochs of pre-training
    mlm_lr: float = 2e-5            # raise it for LMs smaller than BERT-base (6 layers x 384: 3e-4)
    ft_epochs: int | None = None    # epochs of fine-tuning; None: cls 5, qa 1
    ft_lr: float | None = None      # None: cls 2e-5, qa 3e-5; raise it for LMs smaller than BERT-base (2e-4)
    batch_size: int = 16            # of pre-training and fine-tuning; the paper chose from 8, 16, 32
    micro_batch: int | None = None  # rows of one forward pass; fewer need less memory; None: batch_size
    max_len: int | None = None      # tokens of a block; None: cls 256, qa 512
    ft_max_len: int | None = None   # tokens of a labelled text or window; None: cls 256, qa 384
    metric: str | None = None       # what is rewarded (METRICS of the task); None: cls accuracy, qa em
    fast: bool = True               # bf16 or fp16 where that is fast, cheaper attention on a CPU
    # the run
    seed: int = 0                   # seeds everything random except what is cut from train (D_val, dev)


@dataclass
class Config(PlayConfig):
    # the outer loop
    paper: bool = False             # True: the paper's reward and loss, which have learned nothing yet
    noise: float = 4.0              # how far players explore, in logits (`explore`); not read with --paper
    episodes: int = 200             # the paper has at most 200; a finished run can be made longer
    self_play: bool = True          # False: the learner competes with random only (Table 3)
    continual: bool = False         # True, the paper's: an episode starts from the LM that the learner of the
                                    # last one pre-trained (Table 3); False: from the original LM
    uniform_episodes: int = 2       # with --paper: the first ones, in which both agents draw uniformly
    rl_lr: float = 1e-4             # Adam's, for both agents
    updates_per_episode: int = 40   # minibatches that an agent learns from; 10 in the paper
    minibatch: int = 64             # actions
    replay_size: int = 50_000       # actions that an agent remembers; without --paper, of all three players
    entropy_coef: float = 0.01      # higher values explore longer; falling entropy alone shows no learning
    save_every: int = 10            # episodes between two checkpoints
    out: str | None = None          # folder of the policy; None: runs/nmg-DATASET-LM-SEED


# ---------------------------------------------------------------- the inner loop

def inner_loop(lm: torch.nn.Module, subtask: SubTask, mask: np.ndarray, task: ModuleType,
               cfg: PlayConfig) -> tuple[torch.nn.Module, dict[str, float]]:
    """Algorithm 1, InnerLoop after the masking (`act`): pre-trains a copy of the LM under `mask` (N, L),
    fine-tunes a copy of that, and scores it on D_val'. Returns the adapted LM and its scores by name: those
    of `task.summary`, in percent, and if METRICS has it, the mean log likelihood of the right answers.

    task: finetune_cls, finetune_qa, or another file with their interface
    With the same `subtask.seed` the players of an episode share order, corruption, dropout and head, so
    that only their masks differ."""
    adapted = copy.deepcopy(lm)
    training = {"batch_size": cfg.batch_size, "micro_batch": cfg.micro_batch, "seed": subtask.seed}
    # The masker `none` gives an empty mask, which leaves the LM as it is. Otherwise all epochs use the same
    # mask and, with remask=False, the same corruption (80 / 10 / 10). pretrain checks that the mask stays
    # within p.
    if mask.any():
        pretrain(adapted, subtask.contexts, maskers.fixed(mask), p=cfg.p, epochs=cfg.mlm_epochs,
                 lr=cfg.mlm_lr, remask=False, **training)
    model = task.finetune(adapted, subtask.train, epochs=cfg.ft_epochs, lr=cfg.ft_lr, **training)
    lines = task.predictions(model, subtask.val)
    scores = {name: float(score) for name, score in task.summary(lines).items()}
    # The likelihood stands in no table, but it may be what is rewarded.
    if "likelihood" in task.METRICS:
        scores["likelihood"] = float(np.mean([line["likelihood"] for line in lines]))
    loop.check_numbers(scores, "a play")
    return adapted, scores


# ---------------------------------------------------------------- actions

@dataclass
class Play:
    """What one player did in an episode, and how it did."""
    mask: np.ndarray            # (N, L) bool
    log_prob: np.ndarray        # (N, L) log π_old, by which tokens were drawn; only --paper reads it
    value: np.ndarray           # (N,) V of each block, by the player's own network (0 for random)
    entropy: float              # of its distribution before a direction is added, mean over blocks, in nats
    # On D_val', by metric; higher is better.
    scores: dict[str, float] = field(default_factory=dict)


@torch.no_grad()
def random_direction(states: list[State], seed: int, episode: int) -> np.ndarray:
    """A direction in the space of policies: the logits (N, L) of a newly initialised policy, with mean 0 in
    each block and standard deviation 1 over all blocks; 0 at tokens that must not be masked."""
    torch_seed(seed, f"direction {episode}")
    hidden, _ = states[0]
    logits, _ = policy_forward(Policy(hidden.shape[1]).to(device()), states)
    logits = np.ma.masked_invalid(logits.cpu().numpy())
    centred = logits - logits.mean(1, keepdims=True)
    return (centred / centred.std()).filled(0)


def explore(logits: np.ndarray, direction: np.ndarray, noise: float) -> np.ndarray:
    """The logits (N, L) of a player that explores: a step in a direction (N, L) is added. So it prefers other
    words than its policy, and the same ones in all blocks (parameter space noise, Plappert et al. 2018). The
    step is `noise` or more: it must outweigh what the policy prefers, or no mistake could be unlearned."""
    finite = np.ma.masked_invalid(logits)
    sd = (finite - finite.mean(1, keepdims=True)).std()
    return logits + max(noise, 2 * sd) * direction


@torch.no_grad()
def act(agent: "Agent | None", states: list[State], batch: Batch, rng: RowRandom, p: float,
        direction: np.ndarray | None = None, noise: float = 0.0, uniform: bool = False) -> Play:
    """Masks the blocks of a batch (N, L). Tokens are drawn without replacement: uniformly for random (agent
    None), else from the agent's policy (section 3.2).

    direction, noise: if given, the player explores (`explore`)
    uniform: the agent also draws uniformly, which is the paper's exploration at the start"""
    logits = np.where(batch.maskable, 0.0, -np.inf)
    value = np.zeros(len(logits))
    if agent is not None:
        policy_logits, values = policy_forward(agent.policy, states)
        value = values.cpu().numpy()
        if not uniform:
            logits = policy_logits.cpu().numpy()
    entropy = float(entr(softmax(logits, 1)).sum(1).mean())
    if direction is not None:
        logits = explore(logits, direction, noise)
    # The highest logits after Gumbel noise are draws from their softmax, without replacement.
    mask = maskers.pick(logits + rng.gumbel(logits.shape), batch, maskers.budget_of(batch, p))
    return Play(mask, log_softmax(logits, 1), value, entropy)


def mask_contexts(agents: dict[str, "Agent"], players: tuple[str, ...], states: list[State], batch: Batch,
                  episode: int, cfg: Config) -> dict[str, Play]:
    """All players mask the blocks of a batch (N, L), each with its own random stream; their plays by name.

    The agents explore in opposite directions, so that one of them is likely to beat the other, and both learn
    from it which direction is better. In the paper's form they draw uniformly at first."""
    uniform = cfg.paper and episode < cfg.uniform_episodes
    directions = {}
    if not cfg.paper:
        direction = random_direction(states, cfg.seed, episode)                             # (N, L)
        directions = {"learner": direction, "opponent": -direction}
    plays = {}
    for name in players:
        row_random = RowRandom(cfg.seed, f"{name} acts", episode, batch.indices)
        plays[name] = act(agents.get(name), states, batch, row_random, cfg.p, directions.get(name),
                          cfg.noise, uniform)
    return plays


# ---------------------------------------------------------------- rewards

def rewards(plays: dict[str, Play], player: str, cfg: Config) -> tuple[np.ndarray, np.ndarray]:
    """R (N, L) of a player's actions, and which of them count, (N, L) bool: the difference of its score and
    the mean score of the others. A token that all players masked is skipped.

    A reward of your own goes here: it sees the masks (N, L) and all scores of all players, and both agents
    learn from the plays of all (`player` may be random). `Agent.learn` divides rewards by their root mean
    square, so that only their ratios matter."""
    own = plays[player].mask
    others = [play.scores[cfg.metric] for name, play in plays.items() if name != player]
    R = plays[player].scores[cfg.metric] - np.mean(others)
    masked_by_all = np.all([play.mask for play in plays.values()], axis=0)
    return np.full(own.shape, R), own & ~masked_by_all


# ---------------------------------------------------------------- replay and learning

# A masked token, as replay remembers it.
ACTION = np.dtype([
    ("episode", "i4"), ("block", "i4"), ("position", "i8"),         # which token it was
    ("R", "f4"),            # its reward
    ("log_prob", "f4"),     # log π_old
    ("rarity", "f4"),       # 1 / square root of the token's frequency in its block
    ("value", "f4"),        # V, for the priority: from the player's network at first, updated when drawn
    ])


def priority(R: np.ndarray, value: np.ndarray, rarity: np.ndarray) -> np.ndarray:
    """|R - V| / square root of the token's frequency in its block (section 3.3), for K actions."""
    return np.abs(R - value) * rarity


def actions_of(episode: int, play: Play, R: np.ndarray, rewarded: np.ndarray,
               input_ids: np.ndarray) -> np.ndarray:
    """The actions of a play that count, as replay stores them. R, rewarded, input_ids (N, L)."""
    block, position = rewarded.nonzero()
    actions = np.zeros(len(block), ACTION)
    actions["episode"] = episode
    actions["block"] = block
    actions["position"] = position
    actions["R"] = R[rewarded]
    actions["log_prob"] = play.log_prob[rewarded]
    actions["value"] = play.value[block]
    frequency = (input_ids[block] == input_ids[rewarded][:, None]).sum(1)
    actions["rarity"] = 1 / np.sqrt(frequency)
    return actions


# Tokens with R < V are pushed away, but no further than to this share of their uniform probability.
FLOOR = 0.01


def losses(logits: torch.Tensor, value: torch.Tensor, position: torch.Tensor, log_prob_old: torch.Tensor,
           R: torch.Tensor, cfg: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """L_policy and L_value, summed over a minibatch (section 3.3).

        L_policy = - (R - V) log π(a) - α H(π)
        L_value  = 1/2 (R - V)^2

    π is a distribution over the tokens of one block, the softmax of its logits. An action a is one masked
    token, and α is `entropy_coef`. The policy approaches those that won and leaves those that lost
    (reward-weighted regression, Peters and Schaal 2007; evolution strategies, Salimans et al. 2017). That
    teaches something only if the players draw from different policies (`explore`). As log π(a) has no lower
    bound, tokens with R < V would be pushed away forever; hence FLOOR. (Replay draws tokens by priority, so
    that rare tokens and surprising plays have more weight in these sums.)

    With --paper, `paper_form.ratio` takes the place of log π(a).

    logits (B, L), -inf at tokens that must not be masked, the block of each of B actions; position (of a),
    value, log_prob_old, R (B,)."""
    log_probs = logits.log_softmax(1)
    log_prob = log_probs.gather(1, position[:, None]).squeeze(1)
    entropy = -(log_probs.exp() * log_probs.masked_fill(logits.isinf(), 0)).sum(1)
    advantage = R - value.detach()
    if cfg.paper:
        objective = paper_form.ratio(log_prob, log_prob_old)
    else:
        # A token that lost is pushed away only while it is above the floor: below it there is no gradient. A
        # uniform policy gives each of n maskable tokens 1 / n.
        lowest = (FLOOR / logits.isfinite().sum(1)).log()
        objective = torch.where(advantage < 0, torch.maximum(log_prob, lowest), log_prob)
    policy_loss = -(advantage * objective).sum() - cfg.entropy_coef * entropy.sum()
    return policy_loss, 0.5 * (R - value).square().sum()


class Agent:
    """A policy, its optimizer, and its replay: an array of ACTION, oldest first."""

    def __init__(self, policy: Policy, lr: float):
        self.policy = policy.to(device())
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
        self.replay = np.zeros(0, ACTION)

    def draw(self, reward: np.ndarray, rng: np.random.Generator, n: int) -> np.ndarray:
        """Indices of at most n actions of replay, drawn without replacement, with probabilities by priority.
        reward: of every action in replay"""
        # As in `act`, the highest after Gumbel noise are the draws. A priority of 0 comes last.
        with np.errstate(divide="ignore"):
            keys = np.log(priority(reward, self.replay["value"], self.replay["rarity"]))
        keys += rng.gumbel(size=len(keys))
        return np.argsort(-keys, kind="stable")[:n]

    def learn(self, states_of: dict[int, list[State]], rng: np.random.Generator,
              cfg: Config) -> dict[str, float]:
        """Updates on minibatches from replay (section 3.3); returns the losses per action, for the log.

        states_of: episode -> the states of its blocks, for each episode that has actions in replay"""
        total = {"policy_loss": 0.0, "value_loss": 0.0}
        if not len(self.replay):
            return total
        reward = self.replay["R"]
        if not cfg.paper and reward.any():
            # The root mean square becomes 1, so that rl_lr and entropy_coef suit scores of any unit. V
            # predicts these scaled rewards.
            reward = reward / np.sqrt(np.mean(reward**2))
        count = 0
        for _ in range(cfg.updates_per_episode):
            chosen = self.draw(reward, rng, cfg.minibatch)
            actions = self.replay[chosen]
            # One row per action, so that a block may be there several times.
            states = [states_of[action["episode"]][action["block"]] for action in actions]
            logits, value = policy_forward(self.policy, states)
            position = torch.tensor(actions["position"], device=device())
            log_prob_old = torch.tensor(actions["log_prob"], device=device())
            R = torch.tensor(reward[chosen], device=device())
            policy_loss, value_loss = losses(logits, value, position, log_prob_old, R, cfg)
            self.optimizer.zero_grad()
            (policy_loss + value_loss).backward()
            self.optimizer.step()

            self.replay["value"][chosen] = value.detach().cpu().numpy()
            total["policy_loss"] += policy_loss.item()
            total["value_loss"] += value_loss.item()
            count += len(chosen)
        # Run once more, as the policy fails where its outputs are not finite: also after the last update.
        with torch.no_grad():
            policy_forward(self.policy, states)
        return {name: loss / count for name, loss in total.items()}


# ---------------------------------------------------------------- checkpoints

def save_checkpoint(file: Path, adapted_lm: dict[str, torch.Tensor] | None, agents: dict[str, Agent],
                    states_of: dict[int, list[State]], metrics: list[dict]) -> None:
    """All that the next episode depends on. adapted_lm: with continual adaptation, the weights of the LM."""
    # Through JSON, as in metrics.jsonl: numbers of numpy, which a fork may log, could not be read again.
    metrics = json.loads(json.dumps(metrics))
    state = {"lm": adapted_lm, "states": states_of, "metrics": metrics, "agents": {}}
    for name, agent in agents.items():
        # Replay is saved as a tensor of bytes, since torch.load with weights_only reads no numpy arrays.
        state["agents"][name] = {"policy": agent.policy.state_dict(),
                                 "optimizer": agent.optimizer.state_dict(),
                                 "replay": torch.from_numpy(agent.replay.view(np.uint8))}
    loop.save_state(file, state)


def load_checkpoint(file: Path, lm: torch.nn.Module, agents: dict[str, Agent],
                    states_of: dict[int, list[State]]) -> list[dict]:
    """Restores a checkpoint in place; returns the metrics of the episodes that were done."""
    with loop.loaded_state(file) as state:
        if state["lm"]:
            lm.load_state_dict(state["lm"])
        states_of.update(state["states"])
        for name, saved in state["agents"].items():
            agents[name].policy.load_state_dict(saved["policy"])
            agents[name].optimizer.load_state_dict(saved["optimizer"])
            agents[name].replay = saved["replay"].numpy().view(ACTION)
        return state["metrics"]


# ---------------------------------------------------------------- the outer loop

def won_lost(metrics: list[dict]) -> str:
    """The record of the learner's plays, in which it explores (its policy plus the episode's direction)."""
    ahead = np.array([m["learner_score"] - m["random_score"] for m in metrics])
    return f"won {sum(ahead > 0)}, lost {sum(ahead < 0)}, tied {sum(ahead == 0)} against random"


def inner_loops(lm: torch.nn.Module, subtask: SubTask, plays: dict[str, Play], task: ModuleType,
                cfg: Config) -> dict[str, torch.Tensor] | None:
    """Runs the inner loop of every player and fills in `scores` of its play; under torchrun each process runs
    some of them. Returns the weights of the LM that the learner pre-trained, for continual adaptation."""
    rank, world = rank_and_world()
    players = [*plays]
    my_scores, learners_lm = {}, None
    # Process i plays the players i, i + world, ...
    for name in players[rank::world]:
        adapted, my_scores[name] = inner_loop(lm, subtask, plays[name].mask, task, cfg)
        if name == "learner" and cfg.continual:
            learners_lm = adapted.cpu().state_dict()
    for scores_of_process in all_gather(my_scores):
        for name, scores in scores_of_process.items():
            plays[name].scores = scores
    if cfg.continual:
        learners_lm = broadcast(learners_lm, source=players.index("learner") % world)
    return learners_lm


def meta_train(cfg: Config, folder: Path, data: Data, lm: torch.nn.Module, task: ModuleType) -> Policy:
    """Algorithm 1. Writes metrics.jsonl, curves.png and checkpoints to `folder`; returns the learner's
    policy.

    Under torchrun each process runs the inner loops of some players. The first process also does everything
    else; the policy that the others return is not trained."""
    players = PLAYERS if cfg.self_play else ("random", "learner")
    reward_fn = paper_form.rewards if cfg.paper else rewards
    sampler = SubTaskSampler(data, task, cfg.max_len, cfg.ft_max_len, cfg.val_share)
    agents, states_of = {}, {}
    metrics = []
    for name in players[1:]:
        torch_seed(cfg.seed, name)
        agents[name] = Agent(Policy(lm.config.hidden_size), cfg.rl_lr)
    if (folder / "checkpoint.pt").exists():
        metrics = load_checkpoint(folder / "checkpoint.pt", lm, agents, states_of)
        if len(metrics) > cfg.episodes:
            raise UserError(f"--episodes={cfg.episodes}: {folder} holds {len(metrics)} already; give more")
        if runs.is_main_process():
            # After a kill, the log has more than the checkpoint.
            runs.write_rows(folder / "metrics.jsonl", metrics)
    bar = tqdm(range(len(metrics), cfg.episodes), unit="episode", disable=not runs.is_main_process())

    for episode in bar:
        started = time.time()
        # 1. Sample a sub-task T' = {S', D_tr', D_val'}, much smaller than the task.
        subtask_rng = stream(cfg.seed, f"sub-task {episode}")
        subtask = sampler.sample(subtask_rng, cfg.contexts, cfg.docs, cfg.examples, cfg.validation)

        # 2. Random, opponent and learner mask the same contexts.
        plays = {}
        if runs.is_main_process():
            states_of[episode] = encode(lm, subtask.contexts)
            batch = collate(subtask.contexts, np.arange(len(subtask.contexts)))             # (N, L)
            plays = mask_contexts(agents, players, states_of[episode], batch, episode, cfg)
        plays = broadcast(plays)

        # 3. Inner loop: each pre-trains and fine-tunes a copy of the LM, and is scored on D_val'.
        learners_lm = inner_loops(lm, subtask, plays, task, cfg)

        if runs.is_main_process():
            # 4. Outer loop: what was masked is rewarded by how its player did against the others, and stored.
            # Both agents learn from the plays of all three: log π(a) asks only which tokens won, not by whose
            # policy they were drawn. The ratio of the paper's form asks for that, so there each agent learns
            # from its own plays.
            log = {"episode": episode + 1}
            for name, agent in agents.items():
                learns_from = [name] if cfg.paper else players
                for player in learns_from:
                    R, rewarded = reward_fn(plays, player, cfg)
                    actions = actions_of(episode, plays[player], R, rewarded, batch.input_ids)
                    agent.replay = np.concatenate((agent.replay, actions))[-cfg.replay_size:]

            # 5. Outer loop: both agents learn from replay; states that no action needs are dropped.
            used = np.concatenate([agent.replay["episode"] for agent in agents.values()])
            states_of = {e: states for e, states in states_of.items() if e in used}
            for name, agent in agents.items():
                replay_rng = stream(cfg.seed, f"{name} learns {episode}")
                mean_losses = agent.learn(states_of, replay_rng, cfg)
                log |= {f"{name}_{loss}": value for loss, value in mean_losses.items()}

        # 6. Continual adaptation: the next episode starts from the LM that the learner pre-trained.
        if cfg.continual:
            lm.load_state_dict(learners_lm)

        # 7. Log and checkpoint.
        if runs.is_main_process():
            # `score` is the metric that was rewarded; after it come all of them, by name.
            for name, play in plays.items():
                log |= {f"{name}_score": play.scores[cfg.metric], f"{name}_entropy": play.entropy}
                log |= {f"{name}_{metric}": score for metric, score in play.scores.items()}
            metrics.append(log | {"seconds": time.time() - started})
            runs.write_rows(folder / "metrics.jsonl", metrics)
            bar.set_postfix_str(f"learner {won_lost(metrics)}")
            if (episode + 1) % cfg.save_every == 0 or episode + 1 == cfg.episodes:
                curves(metrics, folder / "curves.png")
                save_checkpoint(folder / "checkpoint.pt", learners_lm, agents, states_of, metrics)
    return agents["learner"].policy


# ---------------------------------------------------------------- the script

def open_task(cfg: PlayConfig, spacy_model: str | None = None) -> tuple[Data, torch.nn.Module, ModuleType]:
    """The data, the LM, and the task's module. Fills in the flags of `cfg` that are None (INNER_LOOP), and
    lowers lengths to what the LM takes."""
    loop.use_fast_path(cfg.fast)
    tokenizer = load_tokenizer(cfg.lm)
    lm = load_lm(cfg.lm, cfg.seed).to(device())
    data = data_prep.load(cfg.dataset, tokenizer, spacy_model=spacy_model, columns=cfg)
    if data.kind == "text":
        raise UserError(f"--dataset={cfg.dataset}: has no labelled examples to learn a policy from; "
                        "--label=COLUMN names those of a table")
    data.check_labels("train")
    task = importlib.import_module(f"finetune_{data.kind}")
    for name, value in task.INNER_LOOP.items():
        if getattr(cfg, name) is None:
            setattr(cfg, name, value)
    cfg.max_len = max_len_of(lm, cfg.max_len or data.block_len)
    cfg.ft_max_len = max_len_of(lm, cfg.ft_max_len, "ft_max_len")
    if cfg.metric not in task.METRICS:
        raise UserError(f"--metric={cfg.metric}: allowed are {', '.join(task.METRICS)}")
    return data, lm, task


def main(cfg: Config) -> None:
    # A flag of the other form would have no effect, so it is refused.
    unread = "noise" if cfg.paper else "uniform_episodes"
    if getattr(cfg, unread) != getattr(Config, unread):
        raise UserError(f"--{unread}: is not read with --paper={cfg.paper}; leave it out")
    data, lm, task = open_task(cfg)
    if cfg.out is None:
        cfg.out = f"runs/nmg-{Path(cfg.dataset).stem}-{Path(cfg.lm).name}-{cfg.seed}"
    sources = {"data": data.checksum, "weights": weights_of(cfg.lm)}
    # A killed run may go on with other values of the two flags that are left out; a finished one may be made
    # longer.
    settings = runs.settings_of(cfg, without=("save_every", "micro_batch"), **sources)
    run = Run(cfg.out, settings, longer="episodes")
    if run.done:
        return
    print(FORMS[cfg.paper])
    policy = meta_train(cfg, run.folder, data, lm, task)
    if runs.is_main_process():
        policy.save(run.folder)
        run.finish()
        print(f"saved {run.folder}: metrics.jsonl, curves.png, policy for --masker=sampled:{run.folder}")


if __name__ == "__main__":
    runs.start(main, Config, tiny=toy.TRAIN_NMG)
