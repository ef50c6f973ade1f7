"""Searches for the kinds of words that are worth masking, by pairs of opposite policies.

    python search_masks.py                                              # toy world, tiny LM: two minutes
    python search_masks.py --dataset=chemprot --lm=bert-base-uncased    # 48 pairs of plays
    python pretrain.py --masker=sampled:runs/search-toycls-tiny-0       # what was found, as a masker
    torchrun --nproc_per_node=2 search_masks.py ...                     # both plays of a pair at once

Not the paper's algorithm: it searches among POLICIES, linear in a few features of a token (scores such as
its frequency, principal components of its hidden state). For each pair of plays a direction of features is
drawn. One player masks what it favours, the other the opposite, in the same sub-task. The difference of their
scores, regressed on the difference of what they masked, tells what each feature is worth, and the next
direction is drawn from what is believed so far (Thompson sampling). Two such players differ 10 to 80 times
as much in WHAT they mask as two that explore token by token.
"""
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from scipy import stats
from scipy.special import logsumexp
from tqdm import tqdm

import maskers
import runs
import train_nmg
from data import Data, Pieces, collate
from loop import all_gather, length_batches, rank_and_world, stream
from maskers import RowRandom
from policies import LinearPolicy
from pretrain import LMReader, weights_of
from report import draw_worth, halves, predicted, worth_table
from runs import Run, UserError
from scores import SCORES
from subtasks import SubTaskSampler

# When a search ends: odds of 50 to 1 that it matters what is masked (where it does not, one search in 50 ever
# sees them), and a direction whose expected cosine with the true one is 0.8.
EVIDENCE, SETTLED = 50, 0.8
# How much a standard deviation of a feature may be worth, in units of the noise of a pair: for the belief
# the widest of these, for the evidence the average over all.
PRIORS = (0.1, 0.3, 1.0)


@dataclass
class Config(train_nmg.BaseConfig):
    # the search
    features: str = "frequent,punct,subword,marked,label,tfidf,loss"    # of scores.py, with commas
    components: int = 4             # principal components of the LM's hidden states, as more features
    pairs: int | None = None        # of plays, at most; None: 48 (toy world: 12)
    random_pairs: int = 4           # the first of these, with random masks: they show the noise
    beta: float = 3.0               # how strongly a player follows its direction: logits a standard deviation
    spacy_model: str | None = None  # finds the entities of the feature in_entity; None: en_core_web_sm
    log: str | None = None          # a line a pair; a search goes on from this file; None: pairs.jsonl in out



# ---------------------------------------------------------------- what is believed

@dataclass
class Belief:
    """What the features are worth, after some pairs: Bayesian linear regression of y on d."""
    mean: np.ndarray            # (d,) the worth of a standard deviation of each feature
    covariance: np.ndarray      # (d, d)
    pairs: int
    evidence: float             # log of how much better than "nothing is worth anything" it fits, fairly

    def intervals(self) -> np.ndarray:
        """(d,) half of the 95 % interval of each worth."""
        return stats.t.ppf(0.975, max(1, self.pairs)) * np.sqrt(np.diag(self.covariance))

    def agreement(self) -> float:
        """The cosine that one may expect between the best direction and the true one."""
        length = self.mean @ self.mean
        return float(np.sqrt(length / (length + np.trace(self.covariance) + 1e-30)))

    def odds(self) -> str:
        return f"{np.exp(min(self.evidence, 99)):.2g} to 1"


def believe(d: np.ndarray, y: np.ndarray) -> Belief:
    """From n pairs: d (n, D), the difference of what two players masked, y (n,) of what they scored.

    y = d worth + noise; worth ~ N(0, (prior noise)^2), and nothing is known of the size of the noise, which
    random pairs (d near 0) and residuals show alike. Bishop 2006, sections 2.3.6, 3.3 and 3.5."""
    n, D = d.shape
    evidence = []
    for prior in PRIORS:
        precision = np.eye(D) / prior**2 + d.T @ d
        covariance = np.linalg.inv(precision)
        mean = covariance @ (d.T @ y)
        squares_left = y @ y - mean @ precision @ mean
        # The ratio of two marginal likelihoods: of this, and of worth = 0.
        shrunk = 0.5 * np.linalg.slogdet(covariance)[1] - D * np.log(prior)
        evidence.append(shrunk - 0.5 * n * np.log((squares_left + 1e-30) / (y @ y + 1e-30)))
    # So far in units of the noise's variance, which is squares_left / n.
    covariance *= max(squares_left, 1e-30) / max(n, 1)
    return Belief(mean, covariance, n, float(logsumexp(evidence) - np.log(len(PRIORS))))


# ---------------------------------------------------------------- the search

def search(cfg: Config, file: Path, settings: dict, data: Data, lm: torch.nn.Module,
           task: ModuleType) -> tuple[LinearPolicy, list[dict]]:
    """Plays pairs until the budget is spent or the belief has settled. Returns the best policy, and the
    pairs, which are in `file`, too."""
    rank, world = rank_and_world()
    sampler = SubTaskSampler(data, task, cfg.max_len, cfg.ft_max_len, cfg.val_share)
    reader, contexts = LMReader(lm), sampler.contexts
    some = np.linspace(0, len(contexts) - 1, min(1000, len(contexts))).astype(np.int64)
    batches = [collate(contexts, some[indices]) for indices in length_batches(contexts.length[some])]
    policy = LinearPolicy.favouring_nothing(cfg.features.split(","), cfg.components, batches, reader)
    pairs = read_pairs(file, settings)
    bar = tqdm(range(len(pairs), cfg.pairs), unit="pair", disable=not runs.is_main_process())

    for n in bar:
        started = time.time()
        belief = believe(*differences(pairs, cfg.metric, len(policy.mean)))
        if belief.evidence > np.log(EVIDENCE) and belief.agreement() > SETTLED:
            break
        # 1. A sub-task, and a direction of features that may be the best one, for all that is known.
        rng = stream(cfg.seed, f"pair {n}")
        subtask = sampler.sample(rng, cfg.contexts, cfg.docs, cfg.examples, cfg.validation)
        direction = np.zeros(len(policy.mean))
        if n >= cfg.random_pairs:
            direction = rng.multivariate_normal(belief.mean, belief.covariance)
            direction /= np.linalg.norm(direction)

        # 2. Two players mask the same contexts: one what the direction favours, one the opposite.
        features = features_of(policy, subtask.contexts, reader)                                # (N, L, d)
        batch = collate(subtask.contexts, np.arange(len(subtask.contexts)))
        masks = []
        for sign in (1, -1):
            noise = RowRandom(cfg.seed, f"player {sign}", n, batch.indices).gumbel(batch.maskable.shape)
            logits = sign * cfg.beta * features @ direction + noise
            masks.append(maskers.pick(logits, batch, maskers.budget_of(batch, cfg.p)))
        x = [features[mask].mean(0) for mask in masks]

        # 3. Inner loop: each pre-trains and fine-tunes a copy of the LM, and is scored.
        mine = {}
        for i in range(rank, 2, world):
            _, measured = train_nmg.inner_loop(lm, subtask, masks[i], task, cfg)
            mine[i] = {metric: float(values.mean()) for metric, values in measured.items()}
        scores = {}
        for theirs in all_gather(mine):
            scores |= theirs

        # 4. One line, with what was expected before.
        pairs.append({"pair": n, "direction": direction.tolist(), "x": np.stack(x).tolist(),
                      "scores": {name: [scores[0][name], scores[1][name]] for name in scores[0]},
                      "expected": float(belief.mean @ (x[0] - x[1])), "seconds": time.time() - started})
        if rank == 0:
            runs.write_jsonl(file, [settings, *pairs])
        bar.set_postfix_str(f"evidence {belief.odds()}, settled {belief.agreement():.2f}")

    belief = believe(*differences(pairs, cfg.metric, len(policy.mean)))
    policy.weight = cfg.beta * belief.mean / max(np.linalg.norm(belief.mean), 1e-30)
    return policy, pairs


def features_of(policy: LinearPolicy, contexts: Pieces, lm: LMReader) -> np.ndarray:
    """(N, L, d) of N contexts, 0 on padding."""
    found = np.zeros((len(contexts), contexts.length.max(), len(policy.mean)))
    for indices in length_batches(contexts.length):
        batch = collate(contexts, indices)
        found[indices, :batch.input_ids.shape[1]] = policy.features(batch, lm)
    return found


def read_pairs(file: Path, settings: dict) -> list[dict]:
    """The pairs that were played before; UserError where they are of another search."""
    there, *pairs = runs.read_results(file) or [settings]
    changed = [name for name in settings if there.get(name) != settings[name]]
    if changed:
        raise UserError(f"{file}: holds another search ({', '.join(changed)} differ); remove it, or choose "
                        "another file with --log")
    return pairs


def differences(pairs: list[dict], metric: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """d (n, size) and y (n,) of the pairs."""
    x = np.array([pair["x"] for pair in pairs]).reshape(-1, 2, size)
    y = np.array([pair["scores"][metric] for pair in pairs]).reshape(-1, 2)
    return x[:, 0] - x[:, 1], y[:, 0] - y[:, 1]


# ---------------------------------------------------------------- what was found

def describe(policy: LinearPolicy, pairs: list[dict], cfg: Config, folder: Path) -> str:
    """The worth of each feature, how well outcomes were predicted, and what may be said; draws worth.png."""
    names = [*policy.names, *(f"component {i + 1}" for i in range(policy.components.shape[1]))]
    worth = {}
    for metric in sorted(pairs[0]["scores"], key=lambda metric: metric != cfg.metric):
        belief = believe(*differences(pairs, metric, len(names)))
        worth[metric] = (belief.mean, belief.intervals())
    d, y = differences(pairs, cfg.metric, len(names))
    expected = np.array([pair["expected"] for pair in pairs])
    directed = slice(cfg.random_pairs, None)
    draw_worth(names, *worth[cfg.metric], expected[directed], y[directed], folder / "worth.png")
    return "\n".join([worth_table(names, worth), predicted(expected[directed], y[directed]),
                      halves(believe(d[::2], y[::2]).mean, believe(d[1::2], y[1::2]).mean),
                      verdict(believe(d, y), names, cfg.metric)])


def verdict(belief: Belief, names: list[str], metric: str) -> str:
    """The sentence that says what was found."""
    said = f"After {belief.pairs} pairs: odds of {belief.odds()} that it matters which words are masked"
    if belief.evidence > np.log(EVIDENCE):
        return f"{said}. More of: {names[belief.mean.argmax()]}; less of: {names[belief.mean.argmin()]}."
    most = 100 * (np.abs(belief.mean) + belief.intervals()).max()
    return f"{said}: no evidence. No feature is worth more than {most:.2g} / 100 of {metric} (each at 95 %)."


# ---------------------------------------------------------------- the script

def main(cfg: Config) -> None:
    data, lm, task = train_nmg.open_task(cfg, graded=True, spacy_model=cfg.spacy_model)
    for name in cfg.features.split(","):
        if name not in SCORES:
            raise UserError(f"--features: {name!r} is no score{runs.nearest(name, SCORES)}")
    if cfg.out is None:
        cfg.out = f"runs/search-{Path(cfg.dataset).stem}-{Path(cfg.lm).name}-{cfg.seed}"
    pairs = 12 if cfg.lm == "tiny" else 48
    runs.fill(cfg, {"pairs": pairs})
    # Where data and LM lie, and how many pairs are played, may change until it is done.
    settings = runs.settings_of(cfg, "raw", "pairs", "log", data=data.checksum, weights=weights_of(cfg.lm))
    settings |= {"dataset": Path(cfg.dataset).name, "lm": Path(cfg.lm).name}
    run = Run(cfg.out, settings | {"pairs": cfg.pairs})
    if run.done:
        return
    policy, pairs = search(cfg, Path(cfg.log or run.folder / "pairs.jsonl"), settings, data, lm, task)
    if runs.is_main_process():
        policy.about = run.settings | {"played": len(pairs)}
        policy.save(run.folder)
        text = describe(policy, pairs, cfg, run.folder)
        (run.folder / "worth.txt").write_text(text + "\n")
        run.finish()
        print(f"{text}\nsaved {run.folder}: worth.txt, worth.png, and the policy for "
              f"--masker=sampled:{run.folder}")


if __name__ == "__main__":
    runs.start(main, Config)
