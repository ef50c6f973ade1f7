"""Learns which words to mask: meta-trains a Neural Mask Generator by self-play (Kang, Han, Hwang 2020).

    python train_nmg.py --dataset=newsqa --lm=bert-base-uncased
    python train_nmg.py --dataset=chemprot --lm=FOLDER --preset=small_tasks     # flags for few texts
    python train_nmg.py                                             # toy world, tiny LM: a minute
    python pretrain.py --masker=sampled:runs/nmg-toycls-tiny-0      # a policy as a masker
    python train_nmg.py --plays=runs/a,runs/b --episodes=0          # learns from plays that are there
    torchrun --nproc_per_node=2 train_nmg.py --dataset=newsqa --lm=bert-base-uncased    # two plays at once

An episode (Algorithm 1): Players mask the contexts of a small sub-task. Each pre-trains a copy of the LM on
its masks, fine-tunes it, and is scored on held-out examples. What a player masked is rewarded by how it did
against the others, and the policy learns from this episode and all before it.

Self-play: the learner and the opponent are one policy that explores in opposite directions. In each episode a
random direction is added to the policy's logits for the learner and subtracted for the opponent, so that
their scores show which way is better. In some episodes a third player masks at random, as a control; its
plays teach, too.
(The paper's form, --paper, has two networks, which explore and learn otherwise: nmg/paper_form.py.)

Shapes: M blocks of text to mask (a context is one block or more), B rows of a forward pass, L tokens each
(padded), H the LM's hidden size, P plays of an episode. Train is cut into D_tr and D_val. A sub-task T' has
contexts S', labelled examples D_tr' of D_tr, and validation examples D_val' of D_val.
"""
import copy
import importlib
import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from scipy.special import entr, softmax
from tqdm import tqdm

import data_prep
import maskers
from nmg import loop
from nmg.paper_form import PaperAgents
from nmg.plays import (
    Episode,
    Play,
    checksum_of_plays,
    episodes_of_runs,
    file_of,
    is_tied,
    load_episodes,
    save_episode,
    warn_of_other_runs,
    won_lost,
)
from nmg.policies import (
    CLIP,
    SHARPNESS,
    LinearPolicy,
    Policy,
    State,
    encode,
    policy_forward,
    random_policy,
    sharpened,
    standardized,
)
from nmg.subtasks import SubTask, SubTaskSampler
from pretrain import pretrain
from support import devices, runs, toy
from support.data import Batch, Data, collate
from support.devices import all_gather, broadcast, device, rank_and_world
from support.models import load_lm, load_tokenizer, max_len_of, weights_of, write_card
from support.plots import curves
from support.rng import RowRandom, rng_for
from support.runs import Run, UserError
from support.sources import DataFlags

PLAYERS = ("random", "opponent", "learner")


@dataclass
class PlayConfig(DataFlags):
    """The flags of a play (one player masks, an LM is trained, it is scored): the task, a sub-task of it, and
    the inner loop. Some files in tools/ have the same flags."""
    # The values are the paper's; with --lm=tiny they come from TRAIN_NMG in support/toy.py. Where they differ
    # between classification (cls) and question answering (qa), they are None here, until open_task sets them.
    # the task
    dataset: str = "toycls"         # squad newsqa emrqa imdb chemprot scierc acl_arc scicite toycls toyqa,
                                    # hf:REPO of the hub, or a path (data_prep.py)
    lm: str = "tiny"                # tiny, a Hugging Face folder or hub name; the policy fits its hidden size
    dev_share: float | None = None  # share of train to cut as dev if there is none, and not to learn from, as
                                    # in fine-tuning; None: 0.1, but none of data sets with a name
    val_share: float = 0.1          # the share of train held out as D_val. More of it means less noise: on
                                    # ChemProt chance alone separates two plays by 2.2 to 2.5 points with 0.1,
                                    # and by 1.1 with 0.5
    # a sub-task
    contexts: int = 200             # texts to mask, each in one or more blocks of max_len tokens
    docs: int | None = None         # how many documents to draw them from; None: any
    examples: int = 1000            # labelled examples, at most; of the contexts, where these are labelled
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
    metric: str | None = None       # what is rewarded; None: cls accuracy, qa em (also cls macro_f1
                                    # likelihood, qa f1 likelihood: METRICS of the task). ChemProt's gains
                                    # were learned by likelihood, as in the preset; accuracy often ties
    fast: bool = True               # bf16 or fp16 where that is fast, cheaper attention on a CPU
    # the run
    seed: int = 0                   # seeds everything random except what is cut from train (D_val, dev)


@dataclass
class Config(PlayConfig):
    preset: str | None = None       # small_tasks, the values of PRESETS below; flags that are given win
    # the outer loop
    paper: bool = False             # True: the paper's network, exploration, reward and loss, which have
                                    # learned nothing so far
    episodes: int = 16              # 36 plays (with --paper 48). small_tasks has 21 episodes, 48 plays (with
                                    # --paper 63), as many as the policies had that gained on ChemProt; the
                                    # paper has 200 episodes at most. A finished run can be made longer
    plays: str | None = None        # folders of other runs, comma-separated: their plays teach, too
    self_play: bool = True          # False: the learner competes with random only (Table 3)
    out: str | None = None          # folder of the policy; None: runs/nmg-DATASET-LM-SEED
    # without --paper
    clip: float | None = CLIP       # logits are standardized in each block, and clipped at so many standard
                                    # deviations above the mean, so that all good tokens are drawn alike;
                                    # None: they are not clipped
    sharpness: float = SHARPNESS    # what logits are multiplied by then, before tokens are drawn
    exploration: float = 2.0        # weight of the random direction beside the policy's standardized logits.
                                    # In a simulation 4 taught as much as 2, and 8 a little less
    random_every: int = 4           # the random player takes part in the first of every so many episodes
    # with --paper
    continual: bool = True          # an episode starts from the LM that the learner of the last one
                                    # pre-trained; False: from the original LM (Table 3)
    uniform_episodes: int = 2       # the first ones, in which both agents draw uniformly
    rl_lr: float = 1e-4             # Adam's
    updates_per_episode: int = 10   # minibatches from replay
    minibatch: int = 64             # actions
    entropy_coef: float = 0.01      # higher values explore longer; entropy may fall without learning
    replay_size: int = 50_000       # actions that an agent remembers


# What --preset chooses. small_tasks: tasks of 200 texts, for an LM of 22 M parameters. docs/learning.md says
# what policies of 48 plays gained with it, and where no gain is shown. Their logits were not clipped; on
# ChemProt no difference by clipping is shown in the mean of two policies (docs/comparisons.md).
PRESETS = {"small_tasks": {"episodes": 21, "contexts": 200, "validation": 600, "val_share": 0.5,
                           "mlm_lr": 3e-4, "ft_lr": 2e-4, "max_len": 128, "ft_max_len": 128,
                           "batch_size": 8, "metric": "likelihood", "clip": None, "sharpness": 2.4}}

# Flags that only one form reads.
ONLY_WITH_PAPER = ("continual", "uniform_episodes", "rl_lr", "updates_per_episode", "minibatch",
                   "entropy_coef", "replay_size")
ONLY_WITHOUT_PAPER = ("clip", "sharpness", "exploration", "random_every", "plays")


# ---------------------------------------------------------------- the inner loop

def inner_loop(lm: torch.nn.Module, subtask: SubTask, mask: np.ndarray, task: ModuleType,
               cfg: PlayConfig) -> tuple[torch.nn.Module, dict[str, float]]:
    """Algorithm 1, InnerLoop after the masking (`act`): pre-trains a copy of the LM under `mask` (M, L),
    fine-tunes a copy of that, and scores it on D_val'. Returns the adapted LM and its scores by name: those
    of `task.summary`, in percent, and the others of METRICS, such as the mean log likelihood of the right
    answers.

    task: finetune_cls, finetune_qa, or another file with their interface
    With the same `subtask.seed` the players of an episode share order, corruption, dropout and head, so
    that only their masks differ."""
    adapted = copy.deepcopy(lm)
    training = {"batch_size": cfg.batch_size, "micro_batch": cfg.micro_batch, "seed": subtask.seed}
    # All epochs use the same mask and, with remask=False, the same corruption (80 / 10 / 10). pretrain checks
    # that the mask stays within p. An empty mask, that of `none` in tools/study.py, leaves the LM as it is.
    if mask.any():
        pretrain(adapted, subtask.contexts, maskers.fixed(mask), p=cfg.p, epochs=cfg.mlm_epochs,
                 lr=cfg.mlm_lr, remask=False, **training)
    model = task.finetune(adapted, subtask.train, epochs=cfg.ft_epochs, lr=cfg.ft_lr, **training)
    lines = task.predictions(model, subtask.val)
    scores = {name: float(score) for name, score in task.summary(lines).items()}
    # What `summary` does not report may be rewarded, too, such as the likelihood: the mean over all examples.
    for name in task.METRICS:
        if name not in scores:
            scores[name] = float(np.mean([line[name] for line in lines]))
    loop.check_numbers(scores, "a play")
    return adapted, scores


# ---------------------------------------------------------------- masking

@torch.no_grad()
def random_direction(states: list[State], seed: int, number: int) -> np.ndarray:
    """(M, L): what a step in a random direction adds to the logit of each token, in episode `number`. These
    are the logits of a linear policy with random weights, scaled to mean 0 and standard deviation 1 in each
    block; 0 at tokens that must not be masked, whose logits stay -inf. Adding them to a linear policy's
    logits is much like changing its weights."""
    hidden, _ = states[0]
    other = random_policy(hidden.shape[1], seed, f"direction {number}")
    direction = standardized(policy_forward(other.to(device()), states).cpu().numpy())
    return np.where(np.isfinite(direction), direction, 0)


@torch.no_grad()
def act(policy: Policy | None, states: list[State], batch: Batch, rng: RowRandom, p: float,
        direction: np.ndarray | None = None) -> Play:
    """Masks the blocks of a batch (M, L). Tokens are drawn without replacement (section 3.2), uniformly if
    there is no policy, else from the softmax of

        sharpness * min(standardized logits of the policy, clip)  +  sharpness * direction

    without the min if clip is None. In the paper's form it is the softmax of the logits as they are.

    direction: (M, L), in standard deviations of the policy's logits, already times `exploration`: the player
        tries another policy in this episode (parameter space noise, Plappert et al. 2018)"""
    logits = np.where(batch.maskable, 0.0, -np.inf)
    if policy is not None:
        logits = policy_forward(policy, states).cpu().numpy()
        logits = sharpened(logits, policy.sharpness, policy.clip)
    entropy = float(entr(softmax(logits, 1)).sum(1).mean())
    if direction is not None:
        logits = logits + policy.sharpness * direction
    # The highest logits after Gumbel noise are draws from their softmax, without replacement.
    mask = maskers.pick(logits + rng.gumbel(logits.shape), batch, maskers.budget_of(batch, p))
    return Play(mask, entropy)


def players_of(number: int, cfg: Config) -> tuple[str, ...]:
    """Who plays in episode `number`."""
    if not cfg.self_play:
        return "random", "learner"
    if cfg.paper or number % cfg.random_every == 0:
        return PLAYERS
    return "opponent", "learner"


def mask_contexts(policies: dict[str, Policy], states: list[State], batch: Batch, number: int,
                  cfg: Config) -> dict[str, Play]:
    """All players of episode `number` mask the blocks of a batch (M, L), each with its own random stream;
    their plays by name.

    Learner and opponent explore in opposite directions. While a run learns, the direction decides more than
    the policy what is masked: its standard deviation is `exploration` (2) times that of the policy's logits
    before they are clipped. A learned policy, used as a masker, has no direction. In the paper's form there
    is none, and learner and opponent draw uniformly at first, as random always does."""
    if cfg.paper and number < cfg.uniform_episodes:
        # Without a policy, `act` draws uniformly.
        policies = {}
    directions = {}
    if not cfg.paper:
        direction = cfg.exploration * random_direction(states, cfg.seed, number)                # (M, L)
        directions = {"learner": direction, "opponent": -direction}
    plays = {}
    for name in players_of(number, cfg):
        row_random = RowRandom(cfg.seed, f"{name} acts", number, batch.indices)
        plays[name] = act(policies.get(name), states, batch, row_random, cfg.p, directions.get(name))
    return plays


# ---------------------------------------------------------------- rewards

def rewards(episode: Episode, cfg: Config) -> np.ndarray:
    """(P,): for each play of an episode its score minus the mean score of the others.

    A reward of your own goes here: it sees the tokens and masks (M, L) and all scores of all players, also of
    random; labels are not kept with plays. Only differences within an episode count: `token_rewards`
    subtracts their mean. An episode with larger differences weighs more. The reward is P / (P - 1) times the
    score minus the mean of all P, so an episode of two players weighs 4/3 as much as one of three. A factor
    that all episodes have in common does not matter."""
    scores = np.array([play.scores[cfg.metric] for play in episode.plays.values()])
    mean_of_others = (scores.sum() - scores) / (len(scores) - 1)
    return scores - mean_of_others


# ---------------------------------------------------------------- learning

def token_rewards(episode: Episode, cfg: Config) -> np.ndarray:
    """R (M, L) of each token: the sum, over the players that masked it, of the player's reward minus the mean
    reward of the episode. It is 0, up to rounding, for a token that all players masked."""
    masks = np.stack([play.mask for play in episode.plays.values()])                        # (P, M, L)
    play_rewards = rewards(episode, cfg)                                                        # (P,)
    # The baseline is the mean reward (0 for the rewards above, but maybe not for yours). The first reward is
    # subtracted before it, so that equal rewards become exactly 0; else a policy would learn from rounding.
    play_rewards = play_rewards - play_rewards[0]
    play_rewards = play_rewards - play_rewards.mean()
    return np.tensordot(play_rewards, masks, 1)


def policy_gradient(episode: Episode, states: list[State], cfg: Config) -> torch.Tensor:
    """(H,): the sum of R_a (h_a - mean h of the block's maskable tokens) over all tokens a, where R are the
    `token_rewards`. It points to the states of tokens that good players masked.

    This is the gradient of the sum of R log π(a) at w = 0, the uniform policy, where it is always taken,
    however much has been learned by then: π is the softmax of w · h over the maskable tokens of a block.
    There are no importance weights: actions count by their rewards alone, whatever policy drew them (as in
    reward-weighted regression, Peters and Schaal 2007; docs/paper_vs_code.md says what the paper's weights
    would take away)."""
    R = token_rewards(episode, cfg)                                                             # (M, L)
    gradient = torch.zeros(states[0][0].shape[1])
    for block in R.any(1).nonzero()[0]:
        hidden, maskable = states[block]                                                        # (L, H), (L,)
        centered = hidden.float() - hidden[maskable].float().mean(0)
        gradient += torch.tensor(R[block, :len(hidden)], dtype=torch.float32) @ centered
    return gradient


class Agents:
    """Learner and opponent, which are one policy here. A class of your own needs what `meta_train` and
    `finish` call: policies, resume, learn and save_checkpoint; name it in `main` and in tools/foretell.py.
    A network takes optimizer steps in `learn`, with gradients on, to lower the sum of -R log softmax(logits)
    over the maskable tokens, with R from `token_rewards`. R may be negative, so that this has no lower bound:
    clip the step. Plays do not keep how probable an action was when it was drawn: for a loss that needs it,
    as PPO's, begin with paper_form.PaperAgents, the agents of --paper.

    w is the sum of the gradients of all episodes so far, those of other runs too (off-policy), in any order.
    So the policy is always one step away from the uniform one. How long that step is does not matter, as
    logits are standardized before tokens are drawn: so there is no learning rate. A run with more tokens or
    larger differences of scores weighs more."""

    def __init__(self, hidden_size: int, cfg: Config):
        self.cfg = cfg
        self.policy = LinearPolicy(hidden_size).to(device())
        self.policy.sharpness, self.policy.clip = cfg.sharpness, cfg.clip
        self.policies = {"opponent": self.policy, "learner": self.policy}

    @torch.no_grad()
    def learn(self, episode: Episode, states: list[State]) -> dict[str, float]:
        """Adds the gradient of an episode. Returns what is logged of it: nothing."""
        self.policy.weight += policy_gradient(episode, states, self.cfg).to(device())
        loop.check_finite(self.policy.weight, "the weights of the policy")
        return {}

    def resume(self, folder: Path, lm: torch.nn.Module) -> list[dict]:
        """Learns from the plays of other runs, and from those that this run has in `folder` already. Returns
        the metrics of the latter."""
        if self.cfg.plays:
            episodes_of = episodes_of_runs(self.cfg.plays, self.cfg.metric, lm.config.vocab_size)
            for episode in itertools.chain.from_iterable(episodes_of.values()):
                self.learn(episode, encode(lm, episode))
        metrics = []
        for number, (episode, log) in enumerate(load_episodes(folder), 1):
            if log["episode"] != number:
                raise UserError(f"{file_of(folder, number)}: is missing; copy it again, or remove the later "
                                "ones")
            self.learn(episode, encode(lm, episode))
            metrics.append(log)
        return metrics

    def save_checkpoint(self, folder: Path, lm: torch.nn.Module, metrics: list[dict]) -> None:
        """Nothing is written: the plays, which `meta_train` saves, are all that `resume` needs."""


# ---------------------------------------------------------------- the outer loop

SAVE_SECONDS = 300      # between two pictures of a run, and with --paper two checkpoints, which are large


def sample_subtask(sampler: SubTaskSampler, number: int, cfg: Config) -> SubTask:
    """The sub-task of episode `number`; its seed depends on the number, too."""
    rng = rng_for(cfg.seed, f"sub-task {number}")
    return sampler.sample(rng, cfg.contexts, cfg.docs, cfg.examples, cfg.validation)


def run_players(lm: torch.nn.Module, subtask: SubTask, plays: dict[str, Play], task: ModuleType,
                cfg: Config) -> dict[str, dict[str, float]]:
    """Runs the inner loop of every player, and returns the scores of each. With --paper and continual
    adaptation `lm` becomes the one that the learner pre-trained: the next episode starts from it.

    Under torchrun each process runs some of the players. They get the plays of the first process."""
    rank, world = rank_and_world()
    plays = broadcast(plays)
    players = [*plays]
    continual = cfg.paper and cfg.continual
    my_scores, weights = {}, None
    # Process i plays the players i, i + world, ...
    for name in players[rank::world]:
        adapted, my_scores[name] = inner_loop(lm, subtask, plays[name].mask, task, cfg)
        if name == "learner" and continual:
            weights = adapted.cpu().state_dict()
    if continual:
        lm.load_state_dict(broadcast(weights, source=players.index("learner") % world))
    scores = {}
    for scores_of_process in all_gather(my_scores):
        scores |= scores_of_process
    return scores


def meta_train(agents: Agents | PaperAgents, sampler: SubTaskSampler, cfg: Config, folder: Path,
               lm: torch.nn.Module, task: ModuleType) -> None:
    """Algorithm 1. The agents learn; metrics.jsonl, curves.png and the plays are written to `folder`. Under
    torchrun this is the first process; `help_to_play` is what the others do."""
    metrics = agents.resume(folder, lm)
    if metrics or (folder / "metrics.jsonl").exists():
        # After a kill, the file may have more or fewer episodes than `resume` has found.
        runs.write_rows(folder / "metrics.jsonl", metrics)
    if len(metrics) > cfg.episodes:
        raise UserError(f"--episodes={cfg.episodes}: {folder} holds {len(metrics)} already; give more")
    bar = tqdm(range(len(metrics), cfg.episodes), unit="episode")
    saved = time.monotonic()

    # Episodes are numbered from 0 here, and from 1 in what is written.
    for number in bar:
        started = time.monotonic()
        # 1. Sample a sub-task T' = {S', D_tr', D_val'}, much smaller than the task.
        subtask = sample_subtask(sampler, number, cfg)

        # 2. The players mask the same contexts.
        batch = collate(subtask.contexts, np.arange(len(subtask.contexts)))                 # (M, L)
        states = encode(lm, batch)
        plays = mask_contexts(agents.policies, states, batch, number, cfg)

        # 3. Inner loop: each pre-trains and fine-tunes a copy of the LM, and is scored on D_val'.
        for name, scores in run_players(lm, subtask, plays, task, cfg).items():
            plays[name].scores = scores

        # 4. and 5. What was masked is rewarded by how its player did against the others, and the policy
        #    learns from this episode and all before it.
        episode = Episode(batch.input_ids, batch.attention_mask, batch.maskable, plays)
        learned = agents.learn(episode, states)

        # 6. Log and save. `score` is the metric that was rewarded; after it come all of them, by name.
        log = {"episode": number + 1} | learned
        for name, play in plays.items():
            log |= {f"{name}_score": play.scores[cfg.metric], f"{name}_entropy": play.entropy}
            log |= {f"{name}_{metric}": score for metric, score in play.scores.items()}
        metrics.append(log | {"seconds": time.monotonic() - started})
        save_episode(file_of(folder, number + 1), episode, metrics[-1])
        runs.write_rows(folder / "metrics.jsonl", metrics)
        bar.set_postfix_str(f"learner {won_lost(metrics)}")
        if time.monotonic() - saved >= SAVE_SECONDS and number + 1 < cfg.episodes:
            saved = time.monotonic()
            agents.save_checkpoint(folder, lm, metrics)
            curves(metrics, folder / "curves.png")
    agents.save_checkpoint(folder, lm, metrics)
    if metrics:
        curves(metrics, folder / "curves.png")


def help_to_play(agents: Agents | PaperAgents, sampler: SubTaskSampler, cfg: Config, folder: Path,
                 lm: torch.nn.Module, task: ModuleType) -> None:
    """What the other processes of torchrun do while the first is in `meta_train`: they run the inner loops of
    some players. `resume` tells how many episodes are done and, with --paper, restores the LM. Their agents
    do not learn from the episodes that are played now."""
    done = len(agents.resume(folder, lm))
    for number in range(done, cfg.episodes):
        run_players(lm, sample_subtask(sampler, number, cfg), {}, task, cfg)


# ---------------------------------------------------------------- the script

def open_task(cfg: PlayConfig, spacy_model: str | None = None) -> tuple[Data, torch.nn.Module, ModuleType]:
    """The data, the LM, and the task's module. Fills in the flags of `cfg` that are None (INNER_LOOP), and
    lowers lengths to what the LM takes."""
    devices.use_fast_path(cfg.fast)
    tokenizer = load_tokenizer(cfg.lm)
    lm = load_lm(cfg.lm, cfg.seed).to(device())
    data = data_prep.load(cfg.dataset, tokenizer, cfg.dev_share, spacy_model, columns=cfg)
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


def unread_flags(cfg: Config) -> tuple[str, ...]:
    """The flags that only the other form reads."""
    return ONLY_WITHOUT_PAPER if cfg.paper else ONLY_WITH_PAPER


def check_flags(cfg: Config) -> None:
    """Raises UserError if a flag would have no effect, as it is of the other form, or if there is nothing to
    learn from."""
    chosen = PRESETS.get(cfg.preset, {})
    for flag in unread_flags(cfg):
        if getattr(cfg, flag) != chosen.get(flag, getattr(Config, flag)):
            raise UserError(f"--{flag}: is not read with --paper={cfg.paper}; leave it out")
    if not cfg.self_play and cfg.random_every != Config.random_every:
        raise UserError("--random_every: is not read with --self_play=False, where random plays in every "
                        "episode; leave it out")
    if not cfg.episodes and not cfg.plays:
        raise UserError("--episodes=0: nothing is played, so --plays=FOLDER must name plays to learn from")


def is_longer(cfg: Config) -> bool:
    """Whether a finished run is to be made longer. Raises UserError if it cannot be, or is to be shorter."""
    played = runs.read_run(cfg.out).get("settings", {}).get("episodes", cfg.episodes)
    if played > cfg.episodes:
        raise UserError(f"--out={cfg.out}: holds a run with --episodes={played}, which cannot be made "
                        "shorter; choose another folder")
    checkpoint = "checkpoint.pt" if cfg.paper else "plays"
    # A run of no episodes has nothing to go on from.
    if 0 < played < cfg.episodes and not Path(cfg.out, checkpoint).exists():
        raise UserError(f"--out={cfg.out}: is finished, and {checkpoint} is gone, so that it cannot be made "
                        f"longer; choose another folder, or --episodes={played}")
    return played < cfg.episodes


def finish(agents: Agents | PaperAgents, run: Run, cfg: Config) -> None:
    """Saves the policy, with its card, and ends the run."""
    agents.policies["learner"].save(run.folder)
    metrics = runs.read_rows(run.folder / "metrics.jsonl")
    if metrics and all(map(is_tied, metrics)):
        print("WARNING: in each episode of this run all players had the same score, so that these episodes "
              "taught nothing; --metric=likelihood, a larger --ft_lr or more --ft_epochs may help")
    text = (f"A policy that chooses which words to mask when this LM is pre-trained further. It played "
            f"{len(metrics)} episodes of its own, rewarded by {cfg.metric} on at most {cfg.validation:,} "
            f"held-out examples; the exploring learner {won_lost(metrics)}.\n\n"
            "    python pretrain.py --masker=sampled:FOLDER")
    if cfg.paper:
        text += "\n\nIt is in the paper's form, which has learned nothing in any task tried so far."
    write_card(run.folder, "train_nmg.py", cfg, "a Neural Mask Generator learned", text,
               tags=["neural-mask-generator"])
    run.finish(base_model=runs.base_of(cfg.lm))
    played = "metrics.jsonl, plays, curves.png, " if metrics else ""
    print(f"saved {run.folder}: {played}policy for --masker=sampled:{run.folder}")


def main(cfg: Config) -> None:
    check_flags(cfg)
    data, lm, task = open_task(cfg)
    if cfg.out is None:
        cfg.out = f"runs/nmg-{Path(cfg.dataset).stem}-{Path(cfg.lm).name}-{cfg.seed}"
    if "," in cfg.out:
        raise UserError(f"--out={cfg.out}: must be without a comma, which separates the folders of policies")
    sources = {"data": data.checksum, "weights": weights_of(cfg.lm)}
    if cfg.plays:
        warn_of_other_runs(cfg, sources["data"], sources["weights"])
        sources["plays_checksum"] = [checksum_of_plays(Path(folder)) for folder in cfg.plays.split(",")]
    # A killed run may go on with other values of the flags that are left out; a finished one may be made
    # longer. (A preset is known by its values, and flags of the other form are not read.)
    without = ("micro_batch", "preset", *unread_flags(cfg))
    settings = runs.settings_of(cfg, without, **sources)
    run = Run(cfg.out, settings, is_longer(cfg))
    if run.done:
        return
    form = PaperAgents if cfg.paper else Agents
    agents = form(lm.config.hidden_size, cfg)
    sampler = SubTaskSampler(data, task, cfg.max_len, cfg.ft_max_len, cfg.val_share)
    if not runs.is_main_process():
        help_to_play(agents, sampler, cfg, run.folder, lm, task)
        return
    meta_train(agents, sampler, cfg, run.folder, lm, task)
    finish(agents, run, cfg)


if __name__ == "__main__":
    runs.start(main, Config, presets=PRESETS, tiny=toy.TRAIN_NMG)
