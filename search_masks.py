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
as much in WHAT they mask as two that explore token by token. Each outcome is predicted before it is seen.
"""
import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from scipy import stats
from tqdm import tqdm

import maskers
import runs
import train_nmg
from data import Data, Pieces, collate
from loop import all_gather, length_batches, rank_and_world, stream
from maskers import RowRandom
from policies import LinearPolicy
from pretrain import LMReader, weights_of
from report import draw_worth, predicted, worth_table
from runs import Run, UserError
from scores import SCORES
from subtasks import SubTaskSampler

# A search ends with evidence of 50 to 1 that it matters what is masked (where it does not, one search in 50
# ever sees so much), and a direction whose expected cosine with the true one is 0.9.
EVIDENCE, SETTLED = 50, 0.9


@dataclass
class Config(train_nmg.BaseConfig):
    # the search
    features: str = "frequent,punct,subword,marked,label,tfidf,loss"    # of scores.py, with commas
    components: int = 4             # principal components of the LM's hidden states, as more features
    pairs: int | None = None        # of plays, at most; None: 48 (toy world: 12)
    random_pairs: int = 4           # the first of these, with random masks: they show the noise
    beta: float = 3.0               # how strongly a player follows its direction: logits a standard deviation
    prior: float = 0.25             # what a feature may be worth: standard deviation, in noises of a pair
    spacy_model: str | None = None  # finds the entities of the feature in_entity; None: en_core_web_sm
    log: str | None = None          # a line a pair; a search goes on from this file; None: pairs.jsonl in out


# Validation is half of the documents, and the score is graded: less noise than accuracy on a tenth.
DEFAULTS = {"val_share": 0.5, "metric": "likelihood"}


# ---------------------------------------------------------------- features

def features_of(policy: LinearPolicy, contexts: Pieces, lm: LMReader) -> np.ndarray:
    """(N, L, d) of N contexts, 0 on padding."""
    found = np.zeros((len(contexts), contexts.length.max(), len(policy.mean)))
    for indices in length_batches(contexts.length):
        batch = collate(contexts, indices)
        found[indices, :batch.input_ids.shape[1]] = policy.features(batch, lm)
    return found


# ---------------------------------------------------------------- what is believed

@dataclass
class Belief:
    """What the features are worth, after some pairs: Bayesian linear regression of y on d."""
    mean: np.ndarray            # (d,) the worth of a standard deviation of each feature
    covariance: np.ndarray      # (d, d)
    freedom: int                # degrees of freedom of the noise's estimate: pairs
    evidence: float             # log of how much better than "nothing is worth anything" it fits, fairly

    def intervals(self) -> np.ndarray:
        """(d,) half of the 95 % interval of each worth."""
        return stats.t.ppf(0.975, max(1, self.freedom)) * np.sqrt(np.diag(self.covariance))

    def agreement(self) -> float:
        """The cosine that one may expect between the best direction and the true one."""
        length = self.mean @ self.mean
        return float(np.sqrt(length / (length + np.trace(self.covariance) + 1e-30)))


def believe(d: np.ndarray, y: np.ndarray, prior: float) -> Belief:
    """From n pairs: d (n, D), the difference of what two players masked, y (n,) of what they scored.

    y = d worth + noise; worth ~ N(0, (prior noise)^2), and nothing is known of the size of the noise, which
    random pairs (d near 0) and residuals show alike. Bishop 2006, sections 2.3.6, 3.3 and 3.5."""
    n, D = d.shape
    precision = np.eye(D) / prior**2 + d.T @ d
    shape = np.linalg.inv(precision)
    mean = shape @ (d.T @ y)
    left = y @ y - mean @ precision @ mean
    if n == 0 or left <= 0:
        return Belief(mean, shape, n, 0.0)
    # The ratio of the two marginal likelihoods.
    evidence = 0.5 * np.linalg.slogdet(shape)[1] - D * np.log(prior) + 0.5 * n * np.log(y @ y / left)
    return Belief(mean, shape * left / n, n, float(evidence))


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
        belief = believe(*differences(pairs, cfg.metric, len(policy.mean)), cfg.prior)
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
        pair = {"pair": n, "direction": direction.tolist(), "x": np.stack(x).tolist(),
                "scores": {name: [scores[0][name], scores[1][name]] for name in scores[0]},
                "expected": float(belief.mean @ (x[0] - x[1]))}
        pairs.append(pair | {"seconds": round(time.time() - started, 1)})
        if rank == 0:
            runs.write_jsonl(file, [settings, *pairs])
        bar.set_postfix_str(f"evidence {odds(belief)}, settled {belief.agreement():.2f}")

    belief = believe(*differences(pairs, cfg.metric, len(policy.mean)), cfg.prior)
    policy.weight = cfg.beta * belief.mean / max(np.linalg.norm(belief.mean), 1e-30)
    return policy, pairs


def read_pairs(file: Path, settings: dict) -> list[dict]:
    """The pairs that were played before; UserError where they are of another search."""
    if not file.exists():
        return []
    there, *pairs = map(json.loads, file.read_text().splitlines())
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
    for metric in pairs[0]["scores"]:
        belief = believe(*differences(pairs, metric, len(names)), cfg.prior)
        worth[metric] = (belief.mean, belief.intervals())
    d, y = differences(pairs, cfg.metric, len(names))
    expected = np.array([pair["expected"] for pair in pairs])
    directed = np.array([any(pair["direction"]) for pair in pairs])
    draw_worth(names, *worth[cfg.metric], expected[directed], y[directed], folder / "worth.png")
    odd, even = (believe(d[start::2], y[start::2], cfg.prior).mean for start in (0, 1))
    cosine = odd @ even / np.linalg.norm(odd) / np.linalg.norm(even)
    return "\n".join([worth_table(names, worth), predicted(expected[directed], y[directed]),
                      f"cosine between what odd and even pairs say: {cosine:.2f}",
                      verdict(believe(d, y, cfg.prior), names, cfg.metric)])


def verdict(belief: Belief, names: list[str], metric: str) -> str:
    """The sentence that says what was found."""
    if belief.evidence > np.log(EVIDENCE):
        best, worst = names[belief.mean.argmax()], names[belief.mean.argmin()]
        return (f"After {belief.freedom} pairs: it matters which words are masked (evidence {odds(belief)}). "
                f"Mask more of: {best}; less of: {worst}.")
    most = 100 * (np.abs(belief.mean) + belief.intervals()).max()
    return (f"After {belief.freedom} pairs: no evidence that it matters which words are masked "
            f"({odds(belief)}); no feature is worth more than {most:.2g} / 100 of {metric} a standard "
            "deviation (95 %).")


def odds(belief: Belief) -> str:
    return f"{np.exp(min(belief.evidence, 99)):.2g} to 1"


# ---------------------------------------------------------------- the script

def main(cfg: Config) -> None:
    data, lm, task = train_nmg.open_task(cfg, DEFAULTS, cfg.spacy_model)
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
        with runs.atomic_write(run.folder / "worth.txt") as partial:
            partial.write_text(text + "\n")
        run.finish()
        print(f"{text}\nsaved {run.folder}: worth.txt, worth.png, and the policy for "
              f"--masker=sampled:{run.folder}")


if __name__ == "__main__":
    runs.start(main, Config)
