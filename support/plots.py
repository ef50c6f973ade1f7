"""What the scripts show of a run: pictures. report.py shows whole studies."""
from pathlib import Path

import numpy as np

from support.runs import UserError, atomic_write

BLUE = "#1f3b57"
ORANGE = "#d08c3c"


def figure(width: float, height: float):
    """A picture of matplotlib, in inches."""
    # Imported where it is needed: it takes a second, and most commands draw nothing.
    import matplotlib
    from matplotlib.figure import Figure
    # A $ in the name of a data set begins no formula.
    matplotlib.rcParams["text.parse_math"] = False
    return Figure(figsize=(width, height), layout="constrained")


def save(fig, file: Path) -> None:
    """Writes a picture as PNG, its axes without a frame. Raises UserError if the file does not end
    with .png."""
    if file.suffix != ".png":
        raise UserError(f"{file}: is a picture, and must end with .png")
    for ax in fig.axes:
        ax.spines[["top", "right"]].set_visible(False)
    with atomic_write(file) as partial:
        fig.savefig(partial, dpi=150, format="png")


def curves(metrics: list[dict], file: Path) -> None:
    """The paper's learning curves, and the scores, from the records of metrics.jsonl, one per episode."""
    fig = figure(15, 3.4)
    # Only the paper's form has losses.
    has_losses = "learner_policy_loss" in metrics[0]
    n_panels = 4 if has_losses else 3
    panels = fig.subplots(1, n_panels)
    regret, scores, entropy = panels[:3]
    last = metrics[-1]["episode"]
    against_random = [m for m in metrics if "random_score" in m]
    compared = [m["episode"] for m in against_random]
    regret.plot(compared, range(1, len(compared) + 1), color="grey", linewidth=1, label="worst case")
    for name, color in (("random", "grey"), ("learner", BLUE), ("opponent", ORANGE)):
        # Without self-play there is no opponent, and random takes part in some episodes only.
        played = [m for m in metrics if f"{name}_score" in m]
        if not played:
            continue
        episodes = [m["episode"] for m in played]
        scores.plot(episodes, [m[f"{name}_score"] for m in played], ".-", color=color, label=name)
        entropy.plot(episodes, [m[f"{name}_entropy"] for m in played], ".-", color=color, label=name)
        if name != "random":
            lost = [m[f"{name}_score"] < m["random_score"] for m in against_random]
            regret.plot(compared, np.cumsum(lost), ".-", color=color, label=name)
        if name != "random" and has_losses:
            losses = [m[f"{name}_policy_loss"] + m[f"{name}_value_loss"] for m in metrics]
            panels[3].plot([m["episode"] for m in metrics], losses, ".-", color=color, label=name)
    regret.set(title="episodes lost against random, so far", ylim=(0, None))
    regret.yaxis.get_major_locator().set_params(integer=True)
    scores.set(title="score (what is rewarded)")
    entropy.set(title="mean entropy of the policy, nats", ylim=(0, None))
    if has_losses:
        panels[3].set(title="loss of an action in replay")
    for ax in panels:
        ax.set(xlabel="episode", xlim=(0, last + 1))
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
