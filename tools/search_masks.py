"""Searches for the kinds of words that are worth masking, by pairs of opposite policies.

    python search_masks.py                                              # toy world, tiny LM: two minutes
    python search_masks.py --dataset=chemprot --lm=bert-base-uncased    # 48 pairs of plays
    python pretrain.py --masker=sampled:runs/search-toycls-tiny-0       # what was found, as a masker
    torchrun --nproc_per_node=2 search_masks.py ...                     # both plays of a pair at once

Not the paper's algorithm: this searches among POLICIES that are linear in a few features of a token (scores
such as its frequency, principal components of its hidden state). For each pair of plays a direction of
features is drawn. One player masks what it favours, the other the opposite, in the same sub-task. The
difference of their scores, regressed on the difference of what they masked, tells what each feature is worth,
and the next direction is drawn from the posterior of that regression (Thompson sampling). The paper's players
draw tokens from much the same policy, and differ 30 to 60 times less in WHAT they mask (docs/learning.md).
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
import train_nmg
from maskers import SCORES
from nmg import runs, toy
from nmg.data import Data, collate
from nmg.loop import all_gather, broadcast, length_batches, rank_and_world
from nmg.models import LMReader, weights_of
from nmg.plots import draw_worth, winners_foreseen, worth_table
from nmg.policies import LinearPolicy
from nmg.runs import RowRandom, Run, UserError, stream
from nmg.subtasks import SubTaskSampler

# A search ends when the odds that it matters what is masked exceed 50 to 1 (if it does not, at most one in 50
# searches ever gets there), and the expected cosine of the estimated and the true direction exceeds 0.8.
ODDS, COSINE = 50, 0.8
# The prior standard deviation of a feature's worth, in standard deviations of the noise, is a guess: the odds
# average over three. The posterior has the widest, which shrinks the estimate least towards 0.
PRIORS = (0.1, 0.3, 1.0)
# All scores but this one are in percent; worths are told in hundredths.
UNIT = {"likelihood": 1}


@dataclass
class Config(train_nmg.PlayConfig):
    # the search
    val_share: float = 0.5          # of train, whole documents, for D_val; half of them halves the noise
    metric: str = "likelihood"      # what is compared
    features: str = "frequent,punct,subword,marked,label,tfidf,loss"    # of maskers.py, comma-separated
    components: int = 4             # principal components of the LM's hidden states, as more features
    pairs: int = 48                 # of plays, at most
    beta: float = 3.0               # how far a player follows its direction: logits per standard deviation
    spacy_model: str | None = None  # finds the entities of the feature in_entity; None: en_core_web_sm
    log: str | None = None          # a line per pair, from which a search goes on; None: pairs.jsonl in out
    out: str | None = None          # folder of the policy; None: runs/search-DATASET-LM-SEED


# ---------------------------------------------------------------- what features are worth

@dataclass
class Posterior:
    """What D features are worth, after n pairs: Bayesian linear regression.

    y = X worth + noise; X (n, D): the difference of what two players masked, y (n,): of what they scored;
    worth ~ N(0, s^2) with s = prior * the sd of the noise, which is not known (Bishop 2006, 2.3.6, 3.3)"""
    X: np.ndarray
    y: np.ndarray

    def __post_init__(self):
        self.mean, self.scale, _ = self.fit(max(PRIORS))        # (D,), (D, D)

    def fit(self, prior: float) -> tuple[np.ndarray, np.ndarray, float]:
        """Mean and scale matrix of the worth (a t of n degrees of freedom), and the log of the Bayes factor
        between it and worth = 0 (Bishop 2006, 3.5)."""
        X, y = self.X, self.y
        n, D = X.shape
        precision = np.eye(D) / prior**2 + X.T @ X
        covariance = np.linalg.inv(precision)
        # The prior, as long as there are no pairs, or nothing but ties.
        if not y.any():
            return np.zeros(D), covariance, 0.0
        mean = covariance @ (X.T @ y)
        residual = y @ y - mean @ precision @ mean
        # How much better the data are explained, less what the freedom of D weights costs.
        gain = 0.5 * n * np.log(y @ y / residual)
        cost = D * np.log(prior) - 0.5 * np.linalg.slogdet(covariance)[1]
        return mean, covariance * residual / n, gain - cost

    def log_odds(self) -> float:
        """log of the odds that it matters what is masked (before: 1 to 1), which is the mean Bayes factor."""
        return float(logsumexp([self.fit(prior)[2] for prior in PRIORS]) - np.log(len(PRIORS)))

    def odds(self) -> str:
        return f"{np.exp(min(self.log_odds(), 99)):.2g} to 1"

    def cosine(self) -> float:
        """Approximate expected cosine of the estimated and the true direction."""
        squared = self.mean @ self.mean
        return float(np.sqrt(squared / (squared + np.trace(self.scale))))

    def half_widths(self) -> np.ndarray:
        """(D,) of the 95 % interval of each worth."""
        return stats.t.ppf(0.975, len(self.y)) * np.sqrt(np.diag(self.scale))


def posterior_of(pairs: list[dict], metric: str, D: int) -> Posterior:
    x = np.array([pair["x"] for pair in pairs]).reshape(-1, 2, D)
    y = np.array([pair["scores"][metric] for pair in pairs]).reshape(-1, 2)
    return Posterior(x[:, 0] - x[:, 1], y[:, 0] - y[:, 1])


# ---------------------------------------------------------------- the search

def search(cfg: Config, file: Path, settings: dict, data: Data, lm: torch.nn.Module,
           task: ModuleType) -> tuple[LinearPolicy, list[dict]]:
    """Plays pairs until the budget is spent or the posterior has settled. Returns the policy along its mean,
    and the pairs, which are in `file`, too."""
    rank, world = rank_and_world()
    sampler = SubTaskSampler(data, task, cfg.max_len, cfg.ft_max_len, cfg.val_share)
    reader, contexts = LMReader(lm), sampler.contexts
    # Enough text to whiten the features, and not more than memory holds.
    some = contexts.evenly_spaced(min(1000, int(100_000 / contexts.length.mean())))
    batches = [collate(contexts, some[indices]) for indices in length_batches(contexts.length[some])]
    policy = LinearPolicy.whitened(cfg.features.split(","), SCORES, cfg.components, batches, reader)
    D = len(policy.weight)
    pairs = read_pairs(file, settings)
    if runs.is_main_process():
        # Fails now where it would fail after a pair.
        runs.write_rows(file, [settings, *pairs])
    pairs = pairs[:cfg.pairs]
    bar = tqdm(range(len(pairs), cfg.pairs), unit="pair", disable=not runs.is_main_process())

    for n in bar:
        started = time.time()
        # 1. What features are worth, as far as is known; the end, if that has settled.
        posterior = posterior_of(pairs, cfg.metric, D)
        bar.set_postfix_str(f"odds {posterior.odds()}, cosine {posterior.cosine():.2f}")
        if posterior.log_odds() > np.log(ODDS) and posterior.cosine() > COSINE:
            break

        # 2. A sub-task, and a direction of features that may be the best one, for all that is known: a draw
        # from the posterior (as if it were a Gaussian).
        subtask = sampler.sample(stream(cfg.seed, f"sub-task {n}"), cfg.contexts, cfg.docs, cfg.examples,
                                 cfg.validation)
        rng = stream(cfg.seed, f"direction {n}")
        direction = rng.multivariate_normal(posterior.mean, posterior.scale)
        direction /= np.linalg.norm(direction)

        # 3. Two players mask the same contexts: one what the direction favours, one the opposite.
        features = policy.features_of(subtask.contexts, reader)                                 # (N, L, D)
        batch = collate(subtask.contexts, np.arange(len(subtask.contexts)))
        masks = []
        for sign in (1, -1):
            gumbel = RowRandom(cfg.seed, f"player {sign}", n, batch.indices).gumbel(batch.maskable.shape)
            logits = features @ (sign * cfg.beta * direction)
            masks.append(maskers.pick(logits + gumbel, batch, maskers.budget_of(batch, cfg.p)))
        # The mean features of what each of them masked.
        x = np.stack([features[mask].mean(0) for mask in masks])                                # (2, D)
        masks, x = broadcast((masks, x))

        # 4. Inner loop: each pre-trains and fine-tunes a copy of the LM, and is scored.
        mine = {}
        for i in range(rank, 2, world):
            _, measured = train_nmg.inner_loop(lm, subtask, masks[i], task, cfg)
            mine[i] = {metric: measured[metric] / UNIT.get(metric, 100) for metric in measured}
        scores = {}
        for theirs in all_gather(mine):
            scores |= theirs

        # 5. One line, with what was expected before.
        pairs.append({"pair": n, "seconds": time.time() - started, "direction": direction.tolist(),
                      "x": x.tolist(), "expected": float(posterior.mean @ (x[0] - x[1])),
                      "scores": {metric: [scores[0][metric], scores[1][metric]] for metric in scores[0]}})
        if runs.is_main_process():
            runs.write_rows(file, [settings, *pairs])

    posterior = posterior_of(pairs, cfg.metric, D)
    if not posterior.y.any():
        raise UserError(f"after {len(pairs)} pairs nothing is known: both players of each had the same "
                        f"{cfg.metric}; --metric=likelihood is continuous, and more --validation helps")
    policy.weight = cfg.beta * posterior.mean / np.linalg.norm(posterior.mean)
    return policy, pairs


def read_pairs(file: Path, settings: dict) -> list[dict]:
    """The pairs that were played before; UserError where they are of another search."""
    rows = runs.read_rows(file) or [settings]
    changed = [name for name in settings | rows[0] if rows[0].get(name) != settings.get(name)]
    if changed:
        raise UserError(f"{file}: holds another search ({', '.join(changed)} differ); remove it, or choose "
                        "another file with --log")
    runs.check_numbered(file, [row.get("pair") for row in rows[1:]], 0)
    return rows[1:]


# ---------------------------------------------------------------- what was found

def describe(policy: LinearPolicy, pairs: list[dict], cfg: Config, folder: Path) -> str:
    """The worth of each feature, how well outcomes were predicted, and what may be said; draws worth.png."""
    names = [*policy.names, *(f"component {i + 1}" for i in range(policy.components.shape[1]))]
    others = [metric for metric in pairs[0]["scores"] if metric != cfg.metric]
    posteriors = {metric: posterior_of(pairs, metric, len(names)) for metric in (cfg.metric, *others)}
    worth = {metric: (posterior.mean, posterior.half_widths()) for metric, posterior in posteriors.items()}
    posterior, expected = posteriors[cfg.metric], np.array([pair["expected"] for pair in pairs])
    draw_worth(names, posterior.mean, posterior.half_widths(), expected, posterior.y, folder / "worth.png")
    foreseen = winners_foreseen(expected, posterior.y)
    return f"{worth_table(names, worth)}\n{foreseen}\n{verdict(posterior, names, cfg.metric)}"


def verdict(posterior: Posterior, names: list[str], metric: str) -> str:
    """The sentence that says what was found."""
    said = f"After {len(posterior.y)} pairs: odds of {posterior.odds()} that it matters what is masked"
    half = posterior.half_widths()
    if posterior.log_odds() <= np.log(ODDS):
        most = 100 * (np.abs(posterior.mean) + half).max()
        return (f"{said}, less than the {ODDS} to 1 that count as evidence. No feature is worth more than "
                f"{most:.2g} hundredths of {metric} (each at 95 %).")
    more = [name for name, low in zip(names, posterior.mean - half, strict=True) if low > 0] or ["-"]
    less = [name for name, high in zip(names, posterior.mean + half, strict=True) if high < 0] or ["-"]
    return f"{said}. Better to mask (each at 95 %): {', '.join(more)}; worse: {', '.join(less)}."


# ---------------------------------------------------------------- the script

def main(cfg: Config) -> None:
    data, lm, task = train_nmg.open_task(cfg, cfg.spacy_model)
    for name in cfg.features.split(","):
        if name not in SCORES:
            raise UserError(f"--features: {name!r} is no score{runs.nearest(name, SCORES)}")
    if cfg.out is None:
        cfg.out = f"runs/search-{Path(cfg.dataset).stem}-{Path(cfg.lm).name}-{cfg.seed}"
    # --pairs may be raised until the search is done.
    settings = runs.log_settings(cfg, ("pairs",), data=data.checksum, weights=weights_of(cfg.lm))
    run = Run(cfg.out, settings | {"pairs": cfg.pairs})
    if run.done:
        return
    policy, pairs = search(cfg, Path(cfg.log or run.folder / "pairs.jsonl"), settings, data, lm, task)
    if runs.is_main_process():
        policy.save(run.folder)
        text = describe(policy, pairs, cfg, run.folder)
        (run.folder / "worth.txt").write_text(text + "\n")
        run.finish()
        print(f"{text}\nsaved {run.folder}: worth.txt, worth.png, and the policy for "
              f"--masker=sampled:{run.folder}")


if __name__ == "__main__":
    runs.start(main, Config, tiny=toy.TRAIN_NMG | {"pairs": 12, "metric": "accuracy"})
