"""tools/foretell.py: what a policy foretells, against a naive transcription, and as a command."""
import re

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import call, succeed

import train_nmg
from nmg import monitor
from nmg.plays import Episode, Play, file_of, save_episode
from nmg.policies import PaperPolicy
from support import runs
from tools import foretell

pytestmark = pytest.mark.usefixtures("one_thread")


def an_episode(rng, N=5, L=8):
    """Random contexts, three plays with scores, and states in which every token may be masked."""
    every = np.ones((N, L), bool)
    plays = {name: Play(rng.random((N, L)) < 0.4, 0.0, {"em": float(rng.normal())}) for name in "abc"}
    states = [(torch.randn(L, 8).half(), torch.ones(L, dtype=torch.bool)) for _ in range(N)]
    return Episode(rng.integers(5, 40, (N, L)), every, every, plays), states


def test_what_is_foretold():
    """The correlation, over all plays, of score and liking, each minus its mean in the episode. A play is
    liked for the mean logit of what it masks, also clipped from above, or for how much of it is among the
    highest tenth of a block."""
    torch.manual_seed(0)
    rng, policy = np.random.default_rng(0), PaperPolicy(8)
    policy.clip = 0.5
    played = [an_episode(rng) for _ in range(4)]
    x, y, clipped, z = [], [], [], []
    for episode, states in played:
        rows = []
        for hidden, maskable in states:
            row = policy(hidden[None].float(), maskable[None], maskable[None])[0].detach().numpy()
            rows.append((row - row.mean()) / row.std())
        liked, liked_clipped, among_highest = [], [], []
        for play in episode.plays.values():
            liked.append(np.mean([rows[b][t] for b, t in np.argwhere(play.mask)]))
            liked_clipped.append(np.mean([min(rows[b][t], 0.5) for b, t in np.argwhere(play.mask)]))
            highest = [sum(rows[b] > rows[b][t]) < 0.1 * len(rows[b]) for b, t in np.argwhere(play.mask)]
            among_highest.append(np.mean(highest))
        scores = [play.scores["em"] for play in episode.plays.values()]
        x += [score - np.mean(scores) for score in scores]
        y += [value - np.mean(liked) for value in liked]
        clipped += [value - np.mean(liked_clipped) for value in liked_clipped]
        z += [value - np.mean(among_highest) for value in among_highest]
    expected = {way: np.dot(x, v) / np.sqrt(np.dot(x, x) * np.dot(v, v))
                for way, v in (("all words", y), ("all, clipped", clipped), ("highest tenth", z))}
    assert foretell.foretold(policy, played, ["em"])["em"] == pytest.approx(expected, abs=1e-4)


def test_a_policy_of_several_runs_foretells_another():
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    played = {run: [an_episode(rng, N=2) for _ in range(3)] for run in "abc"}
    cfg = foretell.Config(metric="em", judged_by="em")
    rows = [*foretell.judged(["a", "b"], ["c"], played, 8, cfg)]
    agents = train_nmg.Agents(8, cfg)
    for episode, states in played["a"] + played["b"]:
        agents.learn(episode, states)
    p_agree = monitor.p_agree(agents.gradients)
    assert {row["p_agree"] for row in rows} == {p_agree} and 0 < p_agree < 1
    expected = foretell.foretold(agents.policy, played["c"], ["em"])["em"]
    assert {row["way"]: row["r"] for row in rows} == expected
    assert {(row["source"], row["target"]) for row in rows} == {("a,b", "c")}


def test_the_table(tmp_path):
    """Where the score of a play is how many tokens of one kind it masked, each run foretells the other."""
    rng = np.random.default_rng(1)
    for run in ("a", "b", "c"):
        for number in range(1, 5):
            episode, _ = an_episode(rng, 30, 12)
            for play in episode.plays.values():
                # Each player prefers tokens above or below some id.
                cut = rng.integers(8, 36)
                play.mask[:] = (episode.input_ids < cut) & (rng.random(play.mask.shape) < 0.5)
                play.scores["em"] = float((episode.input_ids[play.mask] < 15).mean())
                play.scores["wrong"] = -play.scores["em"]
            save_episode(file_of(tmp_path / run, number), episode, {})
    def rows_of(*flags):
        succeed("tools/foretell.py", "--metric=em", "--out=o.jsonl", *flags, cwd=tmp_path)
        return pd.DataFrame(runs.read_rows(tmp_path / "o.jsonl"))

    result = succeed("tools/foretell.py", "--metric=em", "--plays=a,b", cwd=tmp_path)
    rows = pd.DataFrame(runs.read_rows(tmp_path / "runs/foretell.jsonl"))
    r = rows["r"][rows["way"] == "all words"]
    assert len(rows) == 6 and min(r) > 0.5
    # The mean, then each pair of runs.
    printed = re.search("em +all words +(.*)", result.stdout)[1].split()
    assert [float(number) for number in printed] == pytest.approx([r.mean(), *r], abs=0.006)
    # Two runs as one, which is learned from and foretold as a whole; and another score than the reward.
    rows = rows_of("--plays=a+b,c", "--judged_by=em,wrong,em")
    assert {*zip(rows["source"], rows["target"], strict=True)} == {("a+b", "c"), ("c", "a+b")}
    of_score = rows[rows["way"] == "all words"].groupby("judged_by")["r"].mean()
    assert of_score["em"] == pytest.approx(-of_score["wrong"], abs=0.001)
    assert of_score["em"] > 0.5
    # Each run is foretold by all others together.
    rows = rows_of("--plays=a,b,c", "--joined")
    pairs = {*zip(rows["source"], rows["target"], strict=True)}
    assert pairs == {("b,c", "a"), ("a,c", "b"), ("a,b", "c")}
    # No run is judged by plays that it has learned from.
    result = call("tools/foretell.py", "--metric=em", "--plays=a,b+a", cwd=tmp_path)
    assert result.returncode == 2 and "plays that are in another of these folders" in result.stderr
