"""Learns which words to mask: meta-trains a Neural Mask Generator by self-play (Kang, Han, Hwang 2020, PAPER: algorithm).

    python train_nmg.py                                                         # toy world, tiny LM, no download: learns, compares, draws
    python train_nmg.py --dataset=newsqa --lm=bert-base-uncased
    python pretrain.py  --dataset=newsqa --lm=bert-base-uncased --masker=nmg:runs/nmg-newsqa-bert-base-uncased-0

An episode: sample a sub-task; three players (random, opponent, learner) each mask its contexts, pre-train, fine-tune and are scored;
whoever's masks did better than the others' is rewarded for the tokens that the others did not mask; both agents learn from replay.
"""
import copy
import importlib.util
import itertools
import json
import math
import os
import pickle
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import data_prep
import finetune_cls
import finetune_qa
import loop
import maskers
import toy
from data_prep import Rows, Specials, blocks, gather, heads, windows
from loop import UserError, beside, by_length, checked, claim, cli, device, gathered, processes, share_weights, shared, stream, team, torch_seed
from maskers import NMG, RowRandom
from pretrain import fitting, hidden_states, load_lm, pretrain, versions, weights_of
from report import LOOKS, curves, verdict, won_lost

PLAYERS = ("random", "opponent", "learner")


# ---------------------------------------------------------------- 1. sub-tasks

@dataclass
class SubTask:
    """T' = {S', D_tr', D_val'} of one episode, and the seed of its plays."""
    contexts: Rows
    train: Rows
    val: Rows
    seed: int

    @property
    def example(self) -> np.ndarray:
        """Which of the V validation examples each piece of val belongs to: all windows of a question are of one."""
        return np.arange(len(self.val)) if self.val.question is None else np.unique(self.val.question, return_inverse=True)[1]

    @property
    def doc(self) -> tuple[np.ndarray, np.ndarray]:
        """The document of each context (N,) and of each validation example (V,), in the order of its scores."""
        first = np.unique(self.example, return_index=True)[1]
        return self.contexts.split.doc[self.contexts.row], self.val.split.doc[self.val.row[first]]


class Task:
    """A data set cut into D_tr and D_val by document, from which sub-tasks are drawn.

    join says how contexts find their labelled examples: "text", they are the same texts (PAPER); "document", where the corpus is a
    split of its own, by document; None, where its records name no document: not at all. A sub-task shares no document with
    D_val, but for join="document": there the unlabelled text of validation documents is among the contexts, as that of test
    documents is in meta-testing."""

    def __init__(self, data: data_prep.Data, specials: Specials, val_share: float, block: int, length: int):
        train, corpus = data["train"], data.corpus
        self.kind, self.labels, self.name = data.kind, len(data.labels), data.name
        self.join = "text" if corpus is train else "document" if data.joined else None
        pieces = blocks(corpus, specials, block)
        self.blocks = pieces.take(np.flatnonzero(np.maximum.reduceat(corpus.word, pieces.lo) >= 0))     # those with something to mask
        self.pieces = heads(train, specials, length) if self.kind == "cls" else windows(train, specials, length, min(128, length // 3), 64)
        self.val_docs = np.unique(train.doc[data_prep.cut_docs(np.asarray(train.doc), val_share)])
        self.train_docs = np.setdiff1d(train.doc, self.val_docs)
        if not len(self.train_docs):
            raise UserError(f"{data.name}: {len(self.val_docs)} document(s) cannot be cut into a part to train on and a part to validate on")

    def sample(self, rng: np.random.Generator, contexts: int, docs: int | None, examples: int, validation: int) -> SubTask:
        """`contexts` texts from `docs` documents (half of them validation documents where join="document"), the labelled examples
        that belong to them (at most `examples`), and at most `validation` examples of D_val that may belong to them."""
        corpus, doc = self.blocks.split, self.pieces.split.doc[self.pieces.row]                     # doc: of each piece
        halves = 2 if self.join == "document" else 1

        def draw(allowed):
            if docs:
                allowed = rng.choice(allowed, min(len(allowed), max(1, docs // halves)), replace=False)
            there = np.unique(self.blocks.row)
            return rng.permutation(there[np.isin(corpus.doc[there], allowed)])[:max(1, contexts // halves)]

        if self.join == "document":
            drawn = [draw(side) for side in (self.train_docs, self.val_docs)]
            of_train, of_val = (np.isin(doc, corpus.doc[some]) for some in drawn)
            texts = np.concatenate(drawn)
        else:
            texts = draw(self.train_docs if self.join else np.unique(corpus.doc))
            of_train = np.isin(self.pieces.row, texts) if self.join else np.isin(doc, self.train_docs)
            of_val = np.isin(doc, self.val_docs)
        picked = self.blocks.take(np.flatnonzero(np.isin(self.blocks.row, texts)))
        labelled, val = (self.pieces.take(self.some(rng, np.flatnonzero(of), most)) for of, most in ((of_train, examples), (of_val, validation)))
        for what, rows in (("contexts", picked), ("labelled examples", labelled), ("validation examples", val)):
            if not len(rows):
                raise UserError(f"{self.name}: a sub-task drew no {what}; more --contexts (or --docs) are needed")
        return SubTask(picked, labelled, val, int(rng.integers(2**31)))

    def some(self, rng: np.random.Generator, pieces: np.ndarray, most: int) -> np.ndarray:
        """The pieces of at most `most` examples (a question keeps all of its windows)."""
        example = pieces if self.kind == "cls" else self.pieces.question[pieces]
        return pieces[np.isin(example, rng.permutation(np.unique(example))[:most])]


# ---------------------------------------------------------------- 2. the inner loop (PAPER: InnerLoop)

def play(lm: torch.nn.Module, task: Task, sub: SubTask, mask: np.ndarray, seed: int, mlm: dict,
         ft: dict) -> tuple[torch.nn.Module, torch.nn.Module, dict[str, float]]:
    """Pre-trains a copy of `lm` on the contexts under `mask` (N, L) and fine-tunes a copy of that.

    Returns the fine-tuned model, the adapted LM, and the seconds of each stage. What the seed moves (order, corruption, dropout, head) is
    common to the players of an episode: between them only the masks differ."""
    adapted, begin = copy.deepcopy(lm), time.time()
    pretrain(adapted, sub.contexts, maskers.given(mask), seed=seed, remask=False, quiet=True, **mlm)
    trained = time.time()
    if task.kind == "cls":
        model = finetune_cls.finetune(adapted, sub.train, task.labels, seed=seed, quiet=True, **ft)
    else:
        model = finetune_qa.finetune(adapted, sub.train, seed=seed, quiet=True, **ft)
    return model, adapted, {"mlm": trained - begin, "fine-tuning": time.time() - trained}


def score(model: torch.nn.Module, task: Task, sub: SubTask, some: np.ndarray, metric: str) -> np.ndarray:
    """(v,) scores of a fine-tuned model on `some` (v,) of the validation examples, by rising index. Fork here to reward something else."""
    val = sub.val.take(np.flatnonzero(np.isin(sub.example, some)))
    if task.kind == "cls":
        logits = finetune_cls.predict(model, val, quiet=True)                                       # (v, C)
        gold = val.split.label[val.row]
        return (logits.argmax(1) == gold if metric == "accuracy" else log_softmax(logits)[np.arange(len(gold)), gold]).astype(float)
    asked, at = np.unique(val.question, return_inverse=True)
    if metric in ("accuracy", "f1"):
        said, which = finetune_qa.predict(model, val, quiet=True), ("accuracy", "f1").index(metric)
        return np.array([finetune_qa.em_f1(s[0]["text"] if s else "", val.split.questions[q]["scored"])[which]
                         for s, q in zip(said, asked, strict=True)], float)
    hit, log_p = finetune_qa.positions(model, val)
    there, value = ~np.isnan(log_p), hit if metric == "positions" else log_p                        # windows that hold the whole answer
    return np.bincount(at[there], value[there], len(asked)) / np.maximum(1, np.bincount(at[there], minlength=len(asked)))


def validate(tuned: dict[str, torch.nn.Module], players: tuple[str, ...], task: Task, sub: SubTask, metric: str, error: float | None,
             size: int) -> tuple[dict[str, np.ndarray], dict[tuple[str, str], float], float]:
    """Scores of each player (v,) on the same validation examples, the sign of each comparison (-1, 0, 1) by (player, other), and seconds.

    Without `error`: all examples, signs of the mean differences. With it: parts in random order until every `verdict` is a sign or final.
    tuned: the models of this process's team, each of whose `size` processes scores its share of a part."""
    rank, V, seconds = processes()[0], len(sub.doc[1]), 0.0
    order, looks = (stream(sub.seed, "validation").permutation(V), LOOKS) if error else (np.arange(V), (1,))
    scores, wins = np.zeros((len(players), V)), np.zeros((len(players), len(players)))
    for lo, hi in itertools.pairwise([0, *(math.ceil(V * t) for t in looks)]):
        shares, begin = [np.sort(order[lo:hi][r::size]) for r in range(size)], time.time()
        said = {name: score(model, task, sub, shares[rank % size], metric) for name, model in tuned.items()}
        seconds += time.time() - begin
        for r, some in enumerate(gathered(said)):
            for name, s in some.items():
                scores[players.index(name), shares[r % size]] = s
        if error:
            signs, more = verdict(scores[:, None, order[:hi]] - scores[None, :, order[:hi]], V, error)
            wins = np.where(wins, wins, signs)
            if not np.triu(more & (wins == 0), 1).any():
                break
    seen = {name: s[order[:hi]] for name, s in zip(players, scores, strict=True)}
    if not error:
        r = [float(s.mean()) for s in seen.values()]
        wins = np.sign(np.subtract.outer(r, r))
    return seen, {(a, b): wins[i, j] for i, a in enumerate(players) for j, b in enumerate(players)}, seconds


# ---------------------------------------------------------------- 3. states, actions, rewards, replay

class States:
    """The hidden states of an episode's contexts, without padding, in half precision: stored once, for both agents' actions."""

    def __init__(self, h: torch.Tensor, start: torch.Tensor, ok: torch.Tensor):
        self.h, self.start, self.ok = h, start, ok                                  # (T, H) float16, (N + 1,) int64, (T,) bool

    @classmethod
    def of(cls, lm: torch.nn.Module, contexts: Rows) -> "States":
        encode, start = hidden_states(lm), np.concatenate(([0], np.cumsum(contexts.length)))
        h, ok = torch.zeros(start[-1], lm.config.hidden_size, dtype=torch.float16), torch.zeros(start[-1], dtype=torch.bool)
        for rows in by_length(contexts.length):
            batch = gather(contexts, rows)
            at = (start[rows, None] + np.arange(batch.ids.shape[1]))[batch.real]    # (T',) of T
            h[at], ok[at] = encode(batch).half().cpu()[torch.from_numpy(batch.real)], torch.from_numpy(batch.ok[batch.real])
        return cls(h, torch.from_numpy(start), ok)

    def at(self, mask: np.ndarray) -> np.ndarray:
        """(M, H) hidden states of the tokens that `mask` (N, L) has masked, in the order of its nonzero()."""
        context, position = mask.nonzero()
        return self.h[self.start[context] + torch.from_numpy(position)].double().numpy()


def evaluate(policy: NMG, memory: dict[int, States], episode: np.ndarray, context: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (B, L), -inf beyond the end, and values (B,) of some contexts of some episodes; in chunks of similar length, as padding costs."""
    spans = [(memory[e], slice(*memory[e].start[c:c + 2].tolist())) for e, c in zip(episode.tolist(), context.tolist(), strict=True)]
    each = [(states.h[span], states.ok[span]) for states, span in spans]                            # (n, H), (n,) of each context
    n, out = np.array([len(ok) for _, ok in each]), []
    chunks = list(by_length(n))
    for rows in chunks:
        h, ok = (pad_sequence(part, batch_first=True) for part in zip(*(each[row] for row in rows), strict=True))
        real = torch.arange(h.shape[1]) < torch.from_numpy(n[rows])[:, None]
        logits, values = policy(h.to(device()).float(), real.to(device()), ok.to(device()))
        out.append((F.pad(logits, (0, n.max() - logits.shape[1]), value=-torch.inf), values))
    back = torch.from_numpy(np.argsort(np.concatenate(chunks))).to(device())
    return tuple(torch.cat(part)[back] for part in zip(*out, strict=True))


@torch.no_grad()
def policy_of(policy: NMG, states: States) -> tuple[np.ndarray, np.ndarray]:
    """Logits (N, L) and values (N,) of all contexts of an episode."""
    contexts = np.arange(len(states.start) - 1)
    logits, values = evaluate(policy, {0: states}, np.zeros_like(contexts), contexts)
    return logits.cpu().numpy(), values.cpu().numpy()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.logaddexp.reduce(logits, 1, keepdims=True)


def rewards(own: np.ndarray, random: np.ndarray, other: np.ndarray | None, beats_random: float, beats_other: float | None,
            ) -> tuple[np.ndarray, np.ndarray]:
    """R (N, L) of a player's actions and which of them count, (N, L) bool (PAPER: OuterLoop). Masks (N, L) bool; comparisons: 1 if the
    player did better, 0, -1.

    1. an action that neither other player took: the worse of the two comparisons
    2. one that only random took: the comparison with the opponent; one that only the opponent took: the comparison with random
    3. one that both took: skipped. A tie is 0. Without self-play (`other` is None): compared with random alone, skipped if random took it."""
    if other is None:
        return np.full(own.shape, beats_random), own & ~random
    R = np.where(random, beats_other, np.where(other, beats_random, min(beats_random, beats_other)))
    return R, own & ~(random & other)


ACTION = np.dtype([("episode", "i4"), ("context", "i4"), ("position", "i4"), ("reward", "f4"), ("log_old", "f4"), ("rarity", "f4"),
                   ("priority", "f8")])


def priority(reward: np.ndarray, value: np.ndarray, rarity: np.ndarray, form: str) -> np.ndarray:
    """|R - V| / sqrt(frequency of the token in its context) (PAPER: priority), or the official code's exp|R - V| / sqrt(...)."""
    error = np.abs(reward - value)
    return (np.exp(error) if form == "exp" else error) * rarity


def actions(episode: int, counts: np.ndarray, R: np.ndarray, log_p: np.ndarray, value: np.ndarray, ids: np.ndarray, form: str) -> np.ndarray:
    """The ACTIONs of a play that count: all arrays (N, L), value (N,)."""
    context, position = np.nonzero(counts)
    a = np.zeros(len(context), ACTION)
    a["episode"], a["context"], a["position"] = episode, context, position
    a["reward"], a["log_old"] = R[context, position], log_p[context, position]
    a["rarity"] = 1 / np.sqrt((ids[context] == ids[context, position][:, None]).sum(1))
    a["priority"] = priority(a["reward"], value[context], a["rarity"], form)
    return a


class Agent:
    """A policy, its optimizer, and its replay: an array of ACTION, oldest first."""

    def __init__(self, policy: NMG, lr: float):
        self.policy, self.replay = policy.to(device()), np.zeros(0, ACTION)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=lr)

    def store(self, new: np.ndarray, size: int) -> None:
        """Appends actions; beyond `size` of them whole contexts leave, oldest first."""
        both = np.concatenate((self.replay, new))
        first = max(0, len(both) - size)
        while 0 < first < len(both) and all(both[f][first] == both[f][first - 1] for f in ("episode", "context")):
            first += 1
        self.replay = both[first:]

    def learn(self, memory: dict[int, States], rng: np.random.Generator, updates: int, minibatch: int, form: str, worth: np.ndarray | None,
              **loss) -> tuple[float, float]:
        """`updates` steps on prioritised minibatches; returns the mean policy and value loss of an action. With `worth` (H,), the reward
        of an action is not the stored one but what the regression of now says of the token's hidden state."""
        seen = []
        for _ in range(updates if len(self.replay) else 0):
            with np.errstate(divide="ignore"):
                keys = np.log(self.replay["priority"]) + rng.gumbel(size=len(self.replay))      # the top of these: drawn without replacement
            rows = np.argsort(-keys, kind="stable")[:minibatch]
            a = self.replay[rows]
            reward, log_old, position = (torch.from_numpy(a[f].copy()).to(device()) for f in ("reward", "log_old", "position"))
            if worth is not None:
                h = torch.stack([memory[e].h[memory[e].start[c] + p] for e, c, p in a[["episode", "context", "position"]].tolist()])    # (B, H)
                reward = (h.float() @ torch.from_numpy(worth).float()).to(device())
            logits, value = evaluate(self.policy, memory, a["episode"], a["context"])
            policy_loss, value_loss = losses(logits, value, position.long(), reward, log_old, **loss)
            self.optimizer.zero_grad()
            (policy_loss + value_loss).backward()
            self.optimizer.step()
            self.replay["priority"][rows] = priority(reward.cpu().numpy(), value.detach().cpu().numpy(), a["rarity"], form)
            seen.append((policy_loss.item() / len(rows), value_loss.item() / len(rows)))
        return tuple(np.mean(seen, 0).tolist()) if seen else (0.0, 0.0)


def losses(logits: torch.Tensor, value: torch.Tensor, action: torch.Tensor, reward: torch.Tensor, log_old: torch.Tensor, *, alpha: float = 0.01,
           entropy: str = "sum", clip: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """L_policy and L_value summed over a minibatch (PAPER: RL). logits (B, L), -inf where nothing may be masked; the others (B,).

    entropy: of a context's policy "sum"med over its tokens (paper), or their "mean" times the minibatch (official code).
    clip: the ratio counts at most 1 + clip where the advantage is positive, at least 1 - clip where it is negative (PPO); None: never."""
    log_p = logits.log_softmax(1)
    ratio = (log_p.gather(1, action[:, None])[:, 0] - log_old).exp()
    advantage = reward - value.detach()
    gain = ratio * advantage
    if clip is not None:
        gain = torch.minimum(gain, ratio.clamp(1 - clip, 1 + clip) * advantage)
    h = -(log_p.exp() * log_p.masked_fill(logits.isinf(), 0)).sum(1)                                # (B,)
    if entropy == "mean":
        h = h / (~logits.isinf()).sum(1) * len(h)
    return -gain.sum() - alpha * h.sum(), 0.5 * (reward - value).square().sum()


def trial(sub: SubTask, states: States, mask: np.ndarray, scores: np.ndarray, by_document: bool) -> np.ndarray:
    """(U, H + 1) what a play did and what came of it: the mean hidden state of the tokens that it masked, and its mean score. One row a
    document that has both contexts and validation examples, or one for the whole play."""
    h, context = states.at(mask), mask.nonzero()[0]                                                 # (M, H), (M,)
    of_context, of_example = sub.doc if by_document else (np.zeros(len(mask), int), np.zeros(len(scores), int))
    return np.array([[*h[of_context[context] == d].mean(0), scores[of_example == d].mean()]
                     for d in np.intersect1d(of_context[context], of_example)])


def worth_of(trials: np.ndarray, scale: np.ndarray, players: int) -> np.ndarray:
    """(H,) what it is worth to mask a token, as a linear function of its hidden state, in standard deviations of the scores.

    Ridge regression over all trials (n, H + 1) so far, each less the mean over the players; scale (H,) of the hidden states. The penalty
    has the least error by generalised cross-validation, so that scores of pure noise are worth nothing."""
    x, y = trials[:, :-1] / scale, trials[:, -1]
    values, vectors = np.linalg.eigh(x.T @ x)                                           # (H,), (H, H)
    xy, free, best = vectors.T @ (x.T @ y), len(y) * (1 - 1 / players), (np.inf, 0.0)
    for penalty in values[-1] * np.logspace(-5, 5, 41):
        beta, used = xy / (values + penalty), (values / (values + penalty)).sum()
        error = (y @ y - 2 * beta @ xy + values @ beta**2) / (1 - used / free)**2
        if used < 0.9 * free and error < best[0]:
            best = error, vectors @ beta
    return best[1] / scale / max(y.std(), 1e-9)


def forget(memory: dict[int, States], agents: dict[str, Agent], gb: float) -> None:
    """Drops the states that no action points to, and while they take more than `gb` the oldest, with their actions."""
    while True:
        used = set().union(*(np.unique(a.replay["episode"]).tolist() for a in agents.values()))
        for e in set(memory) - used:
            del memory[e]
        if len(memory) < 2 or sum(s.h.numel() for s in memory.values()) * 2 <= gb * 1e9:
            return
        for a in agents.values():
            a.replay = a.replay[a.replay["episode"] > min(memory)]


# ---------------------------------------------------------------- 4. what is kept

def save_checkpoint(folder: Path, done: int, agents: dict[str, Agent], memory: dict[int, States], lm: torch.nn.Module | None,
                    trials: np.ndarray, metrics: list[dict]) -> None:
    """checkpoint-DONE.pt, after the states that it needs, each written once. The last two checkpoints stay, with their states."""
    kept = sorted(folder.glob("checkpoint-*.pt"))[-1:]
    wanted = set(memory).union(*(torch.load(f, weights_only=True, mmap=True, map_location="cpu")["memory"] for f in kept))
    since = int(kept[0].stem.removeprefix("checkpoint-")) if kept else 0             # states on disk that are newer are of a run that was killed
    for e in (e for e in memory if e >= since):
        with beside(folder / f"states-{e:05}.safetensors") as tmp:
            save_file(vars(memory[e]), tmp)
    state = {"done": done, "memory": list(memory), "metrics": metrics, "trials": torch.from_numpy(trials), "lm": lm and lm.state_dict(),
             "agents": {name: {"policy": a.policy.state_dict(), "optimizer": a.optimizer.state_dict(),
                               "replay": torch.from_numpy(a.replay.view(np.uint8).copy())} for name, a in agents.items()}}
    with beside(folder / f"checkpoint-{done:05}.pt") as tmp:
        torch.save(state, tmp)
    stay = {*kept, folder / f"checkpoint-{done:05}.pt", *(folder / f"states-{e:05}.safetensors" for e in wanted)}
    for file in {*folder.glob("checkpoint-*.pt"), *folder.glob("states-*.safetensors")} - stay:
        file.unlink()


def load_checkpoint(folder: Path, agents: dict[str, Agent], memory: dict[int, States], lm: torch.nn.Module,
                    ) -> tuple[int, np.ndarray, list[dict]]:
    """Puts the newest readable checkpoint, if any, into agents, memory and lm; returns the episodes done, their trials and metrics."""
    for file in sorted(folder.glob("checkpoint-*.pt"), reverse=True):
        try:
            state = torch.load(file, weights_only=True, map_location="cpu")
            stored = {e: States(**load_file(folder / f"states-{e:05}.safetensors")) for e in state["memory"]}
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as e:
            print(f"{file}: damaged ({str(e).splitlines()[0]}); set aside, going back to the one before", flush=True)
            file.rename(f"{file}.damaged")
            continue
        for name, saved in state["agents"].items():
            agents[name].policy.load_state_dict(saved["policy"])
            agents[name].optimizer.load_state_dict(saved["optimizer"])
            agents[name].replay = saved["replay"].numpy().view(ACTION)
        memory.update(stored)
        if state["lm"]:
            lm.load_state_dict(state["lm"])
        print(f"resuming after episode {state['done']} from {file}", flush=True)
        return state["done"], state["trials"].numpy(), state["metrics"]
    return 0, np.zeros((0, agents["learner"].policy.hidden + 1)), []


# ---------------------------------------------------------------- 5. the outer loop (PAPER: algorithm)

def meta_train(k: SimpleNamespace, data: data_prep.Data, tok, out: Path) -> None:
    """The algorithm; `k` holds every knob of main. Ends with the learner's policy in `out`.

    Under torchrun every process plays its share of an episode's plays, each play by a team where there are more processes than plays,
    and the first process does all the rest."""
    rank, world = processes()
    model = load_lm(k.lm).to(device())
    block = fitting(model, k.max_len, 512 if data.kind == "qa" else 256)
    length = fitting(model, k.ft_max_len, 384 if data.kind == "qa" else 256, "ft_max_len")
    task, hidden = Task(data, Specials.of(tok), k.val_share, block, length), model.config.hidden_size
    mlm = {"p": k.p, "epochs": k.mlm_epochs, "lr": k.mlm_lr, "batch_size": k.batch_size, "max_len": block, "fast": k.fast}
    ft = {"epochs": k.ft_epochs, "lr": k.ft_lr, "batch_size": k.batch_size, "max_len": length, "fast": k.fast}
    players = PLAYERS if k.self_play else ("random", "learner")
    names, agents, memory = players[1:], {}, {}
    size = max(1, world // len(players))                            # processes of a team
    for name in names:
        torch_seed(k.seed, name)
        agents[name] = Agent(NMG(hidden), k.rl_lr)
    masked = max(1.0, k.p * task.blocks.length.mean())
    if k.replay < masked:
        raise UserError(f"--replay={k.replay}: a context alone brings about {masked:.0f} actions")
    done, metrics, writer = 0, [], None
    if rank == 0:
        contexts = min(k.replay / masked, k.episodes * k.contexts * len(task.blocks) / len(np.unique(task.blocks.row)))      # at most
        gb = min(k.replay_gb, contexts * task.blocks.length.mean() * hidden * 2 / 1e9)
        weights = sum(w.numel() for w in agents["learner"].policy.parameters())
        print(f"{len(task.train_docs):,} documents to train on, {len(task.val_docs):,} to validate on; a policy of {weights:,} weights on "
              f"{device()}; replay will take about {gb:.2f} GB", flush=True)
        with beside(out / "run.json") as tmp:
            tmp.write_text(json.dumps(vars(k) | {"versions": versions()}, indent=1))
        done, trials, metrics = load_checkpoint(out, agents, memory, model)
        (out / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
        if k.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            writer = SummaryWriter(str(out / "tensorboard"), purge_step=done + 1)       # hides what a killed run wrote beyond
    done = shared(done)
    if done:
        share_weights(model, 0)

    bar = tqdm(total=k.episodes, initial=done, unit="episode", mininterval=0.1 if sys.stderr.isatty() else 60, disable=rank > 0)
    for n in range(done, k.episodes):
        begin = time.time()
        # sample
        sub = task.sample(stream(k.seed, f"sub-task {n}"), k.contexts, k.docs, k.examples, k.validation)
        masks, log_p, values = {}, {}, {}
        if rank == 0:
            batch = gather(sub.contexts, np.arange(len(sub.contexts)))                              # (N, L)
            memory[n] = states = States.of(model, sub.contexts)
            for name in players:
                logits = np.where(batch.ok, 0.0, -np.inf)
                if name != "random":
                    learned, values[name] = policy_of(agents[name].policy, states)
                    logits = learned if n >= k.explore else logits
                log_p[name] = log_softmax(logits)
                noise = RowRandom(k.seed, f"{name} acts", n, batch.rows).gumbel(batch.ids.shape)
                masks[name] = maskers.pick(logits + noise, batch, maskers.budget(batch, k.p))
        masks = shared(masks)
        # play
        tuned, adapted, took = {}, model, Counter()
        with team(size):
            for i, name in enumerate(players):
                if i % (world // size) == rank // size:
                    bar.set_description(f"{name} plays")
                    play_seed = sub.seed if k.common else sub.seed + 1 + PLAYERS.index(name)
                    tuned[name], adapted, stages = play(model, task, sub, masks[name], play_seed, mlm, ft)
                    took.update(stages)
        scores, wins, took["validation"] = validate(tuned, players, task, sub, k.metric, k.sequential, size)
        seconds = sum(gathered(took)[::size], Counter())                                            # of the first of each team
        if k.continual:                                                                             # the learner plays last
            model = adapted
            share_weights(model, (len(players) - 1) % (world // size) * size)
        if rank:
            continue
        # reward, store, learn: the opponent against the learner and random, then the learner against the opponent and random
        r, started = {name: float(s.mean()) for name, s in scores.items()}, time.time()
        row = {"episode": n + 1, "uniform_entropy": float(np.log(batch.ok.sum(1)).mean())} | {f"{o}_score": r[o] for o in r}
        if k.sequential:
            row |= {"validated": len(scores["random"])} | {f"{name}_won": int(wins[name, "random"]) for name in names}
        worth = None
        if k.credit == "regression":
            new = np.stack([trial(sub, states, masks[name], scores[name], task.join == "document") for name in players])   # (players, U, H + 1)
            trials = np.concatenate((trials, (new - new.mean(0)).reshape(-1, hidden + 1)))
            worth = worth_of(trials, states.h.float().std(0).numpy(), len(players))
        for name in names:
            if worth is None:
                other = next((o for o in names if o != name), None)
                R, counts = rewards(masks[name], masks["random"], masks.get(other), wins[name, "random"], wins.get((name, other)))
            else:                                                   # needs no disjoint actions
                R, counts = np.zeros(batch.ids.shape), masks[name]
                R[counts] = states.at(counts) @ worth
            agents[name].store(actions(n, counts, R, log_p[name], values[name], batch.ids, k.priority_form), k.replay)
            row[f"{name}_entropy"] = float(-np.sum(np.exp(log_p[name]) * np.where(batch.ok, log_p[name], 0), 1).mean())        # nats
        forget(memory, agents, k.replay_gb)
        for name in names:
            learnt = agents[name].learn(memory, stream(k.seed, f"{name} learns {n}"), k.updates, k.minibatch, k.priority_form, worth,
                                        alpha=k.alpha, entropy=k.entropy, clip=k.clip)
            row |= {f"{name}_policy_loss": learnt[0], f"{name}_value_loss": learnt[1]}
        # log, save
        seconds.update({"learning": time.time() - started, "episode": time.time() - begin})
        row |= {"replay": len(agents["learner"].replay), "peak_gb": round(loop.peak_gb(), 2)}
        metrics.append(row | {"seconds": {stage: round(s, 2) for stage, s in seconds.items()}})
        with open(out / "metrics.jsonl", "a") as f:
            f.write(json.dumps(metrics[-1]) + "\n")
        if writer:
            for name, value in row.items():
                writer.add_scalar(name, value, n + 1)
        bar.set_postfix_str(", ".join(f"{name} {r[name]:.3f}" for name in r) + f", learner {won_lost(metrics)}, entropy {row['learner_entropy']:.2f}",
                            refresh=False)
        bar.update()
        if (n + 1) % k.save_every == 0 and n + 1 < k.episodes:
            save_checkpoint(out, n + 1, agents, memory, model if k.continual else None, trials, metrics)
            curves(metrics, out / "curves.png")
    bar.close()
    if rank:
        return
    if writer:
        writer.close()
    curves(metrics, out / "curves.png")
    kept = ("lm", "dataset", "data", "episodes", "seed", "self_play", "continual", "credit")
    policy = agents["learner"].policy
    policy.about = {name: vars(k)[name] for name in kept} | {"hours": round(sum(m["seconds"]["episode"] for m in metrics) / 3600, 3)}
    policy.save(out)
    print(f"policy: {out}; in {len(metrics)} episodes it {won_lost(metrics)}\npicture: {out / 'curves.png'}")


def main(
    dataset: str = "toycls",            # a name (squad newsqa emrqa imdb chemprot toycls toyqa) or a path (see data_prep.py)
    lm: str = "tiny",                   # tiny, a Hugging Face folder or hub name; the policy fits LMs of its hidden size
    episodes: int | None = None,        # None: 200, the paper's most (the toy world's own for tiny, as in every None below)
    contexts: int | None = None,        # texts of a sub-task; None: 200
    docs: int | None = None,            # documents that they come from; None: any
    examples: int = 1000,               # labelled examples of a sub-task, at most
    validation: int = 10_000,           # validation examples of an episode, at most
    sequential: float | None = None,    # error rate at which validation stops early, in parts; undecided are ties; None: all examples (paper)
    val_share: float | None = None,     # share of train's documents that is D_val; None: 0.1
    p: float = 0.05,                    # share of tokens to mask
    mlm_epochs: int = 3,                # of pre-training on a sub-task
    mlm_lr: float | None = None,        # None: 2e-5; raise it for smaller LMs
    ft_epochs: int | None = None,       # None: 5, question answering 1
    ft_lr: float | None = None,         # None: 2e-5, question answering 3e-5; raise it for smaller LMs
    batch_size: int | None = None,      # rows a step of pre-training and fine-tuning; the paper chose from 8, 16, 32; None: 16
    max_len: int | None = None,         # tokens a context block; None: 512 for question answering, 256 else, or the LM's most
    ft_max_len: int | None = None,      # tokens of a labelled text or window; None: 384 for question answering, 256 else, or the LM's most
    fast: bool = True,                  # False: plays train the plain way (rows padded to max_len, head on all positions, fp32)
    rl_lr: float | None = None,         # Adam's for both agents; None: 1e-4
    updates: int | None = None,         # minibatches an agent learns from each episode; None: 10
    minibatch: int = 64,                # actions
    replay: int = 50_000,               # actions an agent remembers
    replay_gb: float = 4.0,             # memory of the states that they point to; the oldest episodes leave beyond it
    alpha: float | None = None,         # weight of the entropy; None: 0.01
    explore: int | None = None,         # first episodes in which both agents choose uniformly at random; None: 2
    self_play: bool = True,             # False: the learner competes with random only (PAPER: table 3)
    continual: bool | None = None,      # next episode starts from the LM that the learner adapted; None: True; False: from the original (table 3)
    metric: str | None = None,          # accuracy (QA: exact match), f1 (QA), positions (QA: official code), likelihood (graded); None: accuracy
    credit: str | None = None,          # play: the sign of the play's win (paper); regression: of scores on what was masked; None: play
    priority_form: str = "linear",      # |R - V| (paper), or exp (official code)
    entropy: str = "sum",               # over a context's tokens (paper), or mean (official code)
    clip: float | None = None,          # of the importance ratio as in PPO, such as 0.2; None: never (paper)
    common: bool = True,                # players share order, corruption, dropout and head; False: only to see how much noisier rewards get
    seed: int = 0,                      # of everything; every episode has streams of its own
    save_every: int = 10,               # episodes between checkpoints, and between pictures
    tensorboard: bool = False,          # also write the metrics for TensorBoard (pip install tensorboard)
    compare: int = 1,                   # seeds of the closing comparison in the toy world, from `seed` on; 0: none
    raw: str | None = None,             # folder with raw files of a named data set
    out: str | None = None,             # folder of the policy; None: runs/nmg-DATASET-LM-SEED
):
    run, world, plays = checked(locals()), int(os.environ.get("WORLD_SIZE", 1)), 3 if self_play else 2      # torchrun's word
    if world > plays and world % plays:
        raise UserError(f"{world} processes cannot share the {plays} plays of an episode; allowed are 1 to {plays}, and multiples of {plays}")
    tok = data_prep.load_tokenizer(lm)
    data = data_prep.load(dataset, tok, raw)
    if data.kind == "text":
        raise UserError(f"--dataset={dataset}: has no labelled examples to learn a policy from")
    paper = {"episodes": 200, "contexts": 200, "val_share": 0.1, "mlm_lr": 2e-5, "ft_epochs": 5 if data.kind == "cls" else 1,
             "ft_lr": 2e-5 if data.kind == "cls" else 3e-5, "batch_size": 16, "rl_lr": 1e-4, "updates": 10, "alpha": 0.01,
             "explore": 2, "continual": True, "metric": "accuracy", "credit": "play"}
    embedded = lm == "tiny" and dataset in data_prep.EMBEDDED
    defaults = paper | ((toy.META if data.kind == "cls" else toy.META_QA) if embedded else {})
    run |= {k: v for k, v in defaults.items() if run[k] is None} | {"data": data.checksum, "weights": weights_of(lm)}
    allowed = {"metric": ("accuracy", "likelihood") + (("f1", "positions") if data.kind == "qa" else ()),
               "credit": ("play", "regression"), "priority_form": ("linear", "exp"), "entropy": ("sum", "mean")}
    for name, values in allowed.items():
        if run[name] not in values:
            raise UserError(f"--{name}={run[name]}: allowed are {', '.join(values)}")
    if sequential and run["credit"] == "regression":
        raise UserError(f"--sequential={sequential}: --credit=regression reads every score; allowed with --credit=play")
    run["out"] = out or f"runs/nmg-{Path(dataset).stem}-{Path(lm).name}-{seed}"
    out = Path(run["out"])
    if tensorboard and not importlib.util.find_spec("tensorboard"):
        raise UserError("--tensorboard: the package is not installed: pip install tensorboard")
    if not claim(out, {k: v for k, v in run.items() if k not in ("compare", "save_every", "tensorboard")}, last="model.safetensors"):
        meta_train(SimpleNamespace(**run), data, tok, out)
    if processes()[0]:
        return
    for file in [*out.glob("checkpoint-*"), *out.glob("states-*.safetensors"), *out.glob(".*.tmp")]:
        file.unlink()
    picture = out / "comparison.png"
    if embedded and compare and not picture.exists():               # with a control: the learner before it learned anything
        fresh, hidden = out / "untrained", NMG.load(str(out)).hidden
        fresh.mkdir(exist_ok=True)
        torch_seed(seed, "learner")                                 # drawing the same weights again
        NMG(hidden, lm=lm, episodes=0).save(fresh)
        shown = {"none": "none", "random": "random", "untrained sampled": f"sampled:{fresh}", "nmg sampled": f"sampled:{out}",
                 "untrained greedy": f"nmg:{fresh}", "nmg greedy": f"nmg:{out}", "oracle": "oracle"}
        with team(1):                                               # the other processes have left
            toy.compare(data, shown, range(seed, seed + compare), picture)


if __name__ == "__main__":
    cli(main)
