"""What the scripts show of a run: pictures, and the table of a search. report.py shows whole studies."""
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from nmg.runs import atomic_write

BLUE = "#1f3b57"
ORANGE = "#d08c3c"


def save(fig: Figure, file: Path) -> None:
    """Writes a picture as PNG, its axes without a frame."""
    for ax in fig.axes:
        ax.spines[["top", "right"]].set_visible(False)
    with atomic_write(file) as partial:
        fig.savefig(partial, dpi=150, format="png")


def curves(metrics: list[dict], file: Path) -> None:
    """The paper's learning curves, from the records of metrics.jsonl, one per episode."""
    fig = Figure(figsize=(12, 3.4), layout="constrained")
    regret, entropy, loss = fig.subplots(1, 3)
    episodes = range(1, len(metrics) + 1)
    uniform = [m["random_entropy"] for m in metrics]
    regret.plot(episodes, episodes, color="grey", linewidth=1, label="worst case")
    entropy.plot(episodes, uniform, color="grey", linewidth=1, label="uniform")
    for name, color in (("learner", BLUE), ("opponent", ORANGE)):
        # Without self-play there is no opponent.
        if f"{name}_score" in metrics[0]:
            lost = np.cumsum([m[f"{name}_score"] < m["random_score"] for m in metrics])
            losses = [m[f"{name}_policy_loss"] + m[f"{name}_value_loss"] for m in metrics]
            entropies = [m[f"{name}_entropy"] for m in metrics]
            regret.plot(episodes, lost, ".-", color=color, label=name)
            entropy.plot(episodes, entropies, ".-", color=color, label=name)
            loss.plot(episodes, losses, ".-", color=color, label=name)
    regret.set(title="episodes lost against random, so far", ylim=(0, None))
    regret.yaxis.get_major_locator().set_params(integer=True)
    entropy.set(title="mean entropy of the policy, nats", ylim=(0, 1.1 * uniform[0]))
    loss.set(title="loss of an action in replay")
    for ax in (regret, entropy, loss):
        ax.set(xlabel="episode", xlim=(0, len(metrics) + 1))
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.legend(frameon=False, fontsize=8)
    save(fig, file)


def held_out_curve(rows: list[dict], file: Path) -> None:
    """Perplexity of held-out text against steps, from rows with "step" and "held_out_loss"."""
    fig = Figure(figsize=(5, 3.2), layout="constrained")
    ax = fig.subplots()
    steps = [row["step"] for row in rows]
    perplexity = np.exp([row["held_out_loss"] for row in rows])
    ax.plot(steps, perplexity, ".-", color=BLUE)
    ax.set(xlabel="step", ylabel="perplexity of held-out text")
    save(fig, file)


def worth_table(names: list[str], worth: dict[str, tuple[np.ndarray, np.ndarray]]) -> str:
    """What a search found, best first: a row per feature, its worth and 95 % interval in each metric.

    worth: {metric: (mean (d,), half of the interval (d,))}; the first metric decides about the order."""
    lines = [f"{'worth of 1 sd, x 100':20}" + "".join(f"{metric:>29}" for metric in worth)]
    first_mean, _ = next(iter(worth.values()))
    for i in np.argsort(-first_mean):
        line = f"{names[i]:20}"
        for mean, half in worth.values():
            low, high = 100 * (mean[i] - half[i]), 100 * (mean[i] + half[i])
            line += f"{100 * mean[i]:10.2f} ({low:6.2f} to {high:6.2f})"
        lines.append(line)
    return "\n".join(lines)


def winners_foreseen(expected: np.ndarray, y: np.ndarray) -> str:
    """How outcomes y (n,) of a search went with what was expected of each before it was seen.

    The correlation falls again once a search has learned, as then it expects the same of every pair; so the
    share of winners that were foreseen comes first."""
    # Positive where the winner was foreseen; 0 where nothing was expected, or nobody won.
    agreement = expected * y
    right = int(np.sum(agreement > 0))
    pairs = np.count_nonzero(agreement)
    if pairs < 4:
        return "too few pairs to say how well outcomes were predicted"
    p = stats.binomtest(right, pairs, 0.5, "greater").pvalue
    return (f"the player that was expected to win won in {right} of {pairs} pairs (p = {p:.2g}); "
            f"correlation of expectations and outcomes {np.corrcoef(expected, y)[0, 1]:.2f}")


def draw_worth(names: list[str], worth: np.ndarray, half: np.ndarray, expected: np.ndarray, y: np.ndarray,
               file: Path) -> None:
    """What a search found: the worth of each feature with its interval, and each outcome against what was
    expected before it."""
    fig = Figure(figsize=(9, 0.3 * len(names) + 1.4), layout="constrained")
    left, right = fig.subplots(1, 2, width_ratios=(3, 2))
    order = np.argsort(worth)
    left.axvline(0, color="grey", linestyle=":", linewidth=1)
    left.errorbar(100 * worth[order], range(len(names)), xerr=100 * half[order], fmt="o", color=BLUE)
    left.set_yticks(range(len(names)), [names[i] for i in order])
    left.set(xlabel="worth of masking 1 sd more of it, x 100; 95 % intervals")
    right.axhline(0, color="grey", linestyle=":", linewidth=1)
    right.plot(100 * expected, 100 * y, "o", color=ORANGE)
    right.set(xlabel="expected difference of a pair", ylabel="outcome")
    save(fig, file)
