"""Do the plays of one policy scatter less if masks and corruption are drawn anew in each pass?

    python dev/scatter_of_plays.py --dataset=chemprot --lm=MINILM --preset=small_tasks --policy=FOLDER

In each of several sub-tasks a policy draws masks several times, and each draw is played in two ways: `fixed`,
as train_nmg.py plays it, with the first pass's mask and corruption in all passes, and `anew`, with its own in
each pass. All plays of a sub-task share head, order and dropout. What differs between the draws of one way is
the scatter of plays; a policy learns from fewer plays where it is small. A killed run goes on where it was.
"""
import copy
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import maskers
import train_nmg
from nmg import loop
from nmg.subtasks import SubTask, SubTaskSampler
from pretrain import mask_batch, mlm_loss, mlm_tensors
from support import devices, runs
from support.models import LMReader
from support.rng import rng_for
from tools.study import choose_masks

WAYS = ("fixed", "anew")


@dataclass
class Config(train_nmg.Config):
    policy: str = ""                # the folder of a policy
    first: int = 0                  # the first sub-task
    subtasks: int = 10
    draws: int = 4                  # times that the policy draws masks in a sub-task
    out: str = "scatter.jsonl"


def play(lm: torch.nn.Module, subtask: SubTask, masks: list[np.ndarray], task: object, cfg: Config) -> dict:
    """train_nmg.inner_loop, but with the mask masks[e], (N, L), in pass e of pre-training, and its own
    corruption; masks of one pass are used in all."""
    adapted = copy.deepcopy(lm)
    training = {"batch_size": cfg.batch_size, "micro_batch": cfg.micro_batch, "seed": subtask.seed}

    def make_batch(step, epoch, indices):
        number = epoch % len(masks)
        masker = maskers.fixed(masks[number])
        batch, mask, corrupted = mask_batch(subtask.contexts, masker, cfg.p, subtask.seed, number, indices)
        return mlm_tensors(batch, mask, corrupted)

    loop.fit(adapted, subtask.contexts.length, make_batch, mlm_loss, epochs=cfg.mlm_epochs, lr=cfg.mlm_lr,
             desc="MLM", **training)
    model = task.finetune(adapted, subtask.train, epochs=cfg.ft_epochs, lr=cfg.ft_lr, **training)
    lines = task.predictions(model, subtask.val)
    likelihood = float(np.mean([line["likelihood"] for line in lines]))
    return {**task.summary(lines), "likelihood": 100 * likelihood}


def main(cfg: Config) -> None:
    data, lm, task = train_nmg.open_task(cfg)
    sampler = SubTaskSampler(data, task, cfg.max_len, cfg.ft_max_len, cfg.val_share)
    masker = maskers.find(f"sampled:{cfg.policy}")
    devices.use_fast_path(cfg.fast)
    out = Path(cfg.out)
    done = {(line["subtask"], line["draw"], line["way"]) for line in runs.read_rows(out)}
    for number in tqdm(range(cfg.first, cfg.first + cfg.subtasks), unit="sub-task", disable=None):
        subtask = sampler.sample(rng_for(number, "scatter"), cfg.contexts, cfg.docs, cfg.examples,
                                 cfg.validation)
        for draw in range(cfg.draws):
            masks = []
            for epoch in range(cfg.mlm_epochs):
                seed = (number * cfg.draws + draw) * cfg.mlm_epochs + epoch
                masks.append(choose_masks(subtask.contexts, masker, cfg.p, seed, LMReader(lm)))
            for way in WAYS:
                if (number, draw, way) in done:
                    continue
                scores = play(lm, subtask, masks if way == "anew" else masks[:1], task, cfg)
                line = {"subtask": number, "draw": draw, "way": way, **scores, "commit": runs.commit()}
                with runs.locked(out):
                    runs.write_rows(out, [*runs.read_rows(out), line])


if __name__ == "__main__":
    runs.start(main, Config, presets=train_nmg.PRESETS)
