"""What the scripts show of a run: pictures. report.py shows whole studies."""
from pathlib import Path

import numpy as np

from nmg.runs import atomic_write

BLUE = "#1f3b57"
ORANGE = "#d08c3c"


def figure(width: float, height: float):
    """A picture of matplotlib, in inches."""
    # Imported where it is needed: it takes a second, and most commands draw nothing.
    from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained")


def save(fig, file: Path) -> None:
    """Writes a picture as PNG, its axes without a frame."""
    for ax in fig.axes:
        ax.spines[["top", "right"]].set_visible(False)
    with atomic_write(file) as partial:
        fig.savefig(partial, dpi=150, format="png")


def curves(metrics: list[dict], file: Path) -> None:
    """The paper's learning curves, from the records of metrics.jsonl, one per episode."""
    fig = figure(12, 3.4)
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
    fig = figure(5, 3.2)
    ax = fig.subplots()
    steps = [row["step"] for row in rows]
    perplexity = np.exp([row["held_out_loss"] for row in rows])
    ax.plot(steps, perplexity, ".-", color=BLUE)
    ax.set(xlabel="step", ylabel="perplexity of held-out text")
    save(fig, file)
