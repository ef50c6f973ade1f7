"""What a run of train_nmg.py tells about itself: who won, and whether its episodes agree on what to mask. The
policy does not depend on any of it.
"""
import numpy as np
import torch


def won_lost(metrics: list[dict]) -> str:
    """The record of the learner's plays, in which it explores (its policy plus the episode's direction),
    against random, in the episodes in which random played."""
    played = [m for m in metrics if "random_score" in m]
    ahead = np.array([m["learner_score"] - m["random_score"] for m in played])
    return f"won {sum(ahead > 0)}, lost {sum(ahead < 0)}, tied {sum(ahead == 0)} against random"


def is_tied(log: dict) -> bool:
    """Whether all players of an episode had the same score, so that nothing is learned from it."""
    return len({log[name] for name in log if name.endswith("_score")}) == 1


def p_agree(gradients: torch.Tensor) -> float:
    """Do E episodes agree on what to mask, or are they noise? The p value of a sign-flip test: the share of
    random signs of their gradients (E, H) that make the sum at least as long as it is.

    If masks did not matter, the two players of an episode could as well have had each other's scores, and
    with these the gradient has the other sign. (For three players this also needs noise that is symmetric.)
    Later masks depend on earlier scores; docs/comparisons.md has a simulation which shows that it does no
    harm. p is never far below 2 ** (1 - E). A reward that is computed from the mask itself would make
    episodes agree without any effect on scores."""
    products = (gradients @ gradients.T).double().numpy()                                   # (E, E)
    signs = np.random.default_rng(0).choice([-1, 1], (10_000, len(products)))
    squared_lengths = ((signs @ products) * signs).sum(1)
    # Up to rounding. The signs that the gradients have count as one more draw, so that p is never 0.
    as_long = (squared_lengths >= 0.9999 * products.sum()).sum()
    return float((as_long + 1) / (len(signs) + 1))
