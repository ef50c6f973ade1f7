"""The reward and the loss of the paper, which train_nmg.py uses with --paper; why they are not its default.

What differs with --paper, besides what is below:
    exploration     players draw tokens from their own policies, uniformly in the first --uniform_episodes;
                    no direction is added to a policy
    replay          an agent learns from its own plays only, and rewards are not scaled
Network, critic, priorities and self-play are the same.
"""
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def rewards(plays: Mapping[str, Any], player: str, cfg: Any) -> tuple[np.ndarray, np.ndarray]:
    """R (N, L) of a player's actions, and which of them count, (N, L) bool (Algorithm 1, OuterLoop).

    plays: the Play of each player; player: one of the agents, whose rival is the other one; cfg.metric: which
    of their scores are compared

    A comparison is 1 (won), -1 (lost) or 0 (a tie). Which of them rewards a token depends on who masked it:
        only this player                the worse of its two comparisons
        this player and random          the comparison with the rival
        this player and the rival       the comparison with random
        all three                       none: the token is skipped"""
    own, random = plays[player].mask, plays["random"].mask
    score = {name: play.scores[cfg.metric] for name, play in plays.items()}
    beats_random = np.sign(score[player] - score["random"])
    rival = {"learner": "opponent", "opponent": "learner"}[player]
    if rival not in plays:
        # Without self-play (Table 3) there is no rival, and the player is compared with random alone.
        return np.full(own.shape, beats_random), own & ~random
    beats_rival = np.sign(score[player] - score[rival])
    rival_mask = plays[rival].mask
    R = np.full(own.shape, min(beats_random, beats_rival))
    R[random & ~rival_mask] = beats_rival
    R[rival_mask & ~random] = beats_random
    return R, own & ~(random & rival_mask)


def ratio(log_prob: torch.Tensor, log_prob_old: torch.Tensor) -> torch.Tensor:
    """π(a) / π_old(a) of B actions a, which the paper's loss has in place of log π(a) (section 3.3):

        L_policy = - (R - V) π(a) / π_old(a) - α H(π)

    π_old is the policy that masked the token. As in the official code, π_old(a) is the probability of a
    single draw, although tokens are drawn without replacement. The ratio is not clipped; clipping (PPO) would
    go here.

    Why is it not the default? For a fixed R and tokens a drawn from π_old, the expected step is

        E[(R - V) ∇π(a) / π_old(a)] = (R - V) Σ_a ∇π(a) = (R - V) ∇ Σ_a π(a) = 0,

    whatever π_old was: dividing by π_old removes the information on WHICH policy was played. What is left is
    how R depends on each single draw, and nearly all tokens of a play share one noisy R. With log π(a) the
    expected step in the logits is (R - V) (π_old - π): towards a policy that won, away from one that lost.
    (If π_old is π, that is zero, too. So the players must differ from the policy that learns.)"""
    return (log_prob - log_prob_old).exp()
