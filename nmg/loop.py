"""The training loop that every stage shares: batches, the learning rate, steps.

    seconds = fit(model, pieces.length, make_batch, loss_fn, epochs=3, batch_size=16, lr=2e-5, seed=0)
"""
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from transformers.utils import ModelOutput

from support.checkpoints import load_checkpoint, save_checkpoint
from support.data import Batch, Pieces, collate
from support.devices import autocast, device, precision_of, rank_and_world, to_device
from support.rng import rng_for, torch_seed
from support.runs import UserError, is_main_process

CHECKPOINT_MINUTES = 10         # between two checkpoints of a long training


# ---------------------------------------------------------------- batches

def batches(length: np.ndarray, batch_size: int, epochs: int, seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """(epoch, indices) of every step: each epoch a new shuffle, pieces of similar length in a batch.

    length: (M,) tokens of each piece. Pieces are sorted by length within pools of about 32 batches, and
    then the batches are shuffled. (A batch at the edge of two pools has pieces of both.) With fewer than 48
    batches there is a single pool, so that, where lengths differ, much the same pieces share a batch in every
    epoch."""
    rng = rng_for(seed, "order")
    for epoch in range(epochs):
        order = np.arange(len(length), dtype=np.int32)
        rng.shuffle(order)
        pools = max(1, round(len(order) / (32 * batch_size)))
        for pool in np.array_split(order, pools):
            # A view: this sorts a part of `order`.
            pool[:] = pool[np.argsort(length[pool], kind="stable")]
        for start in rng.permutation(np.arange(0, len(order), batch_size)):
            yield epoch, order[start:start + batch_size]


def length_batches(length: np.ndarray, tokens: int | None = None) -> Iterator[np.ndarray]:
    """Indices of all pieces once, longest first, in batches of at most so many tokens each.

    tokens: None: 2,048 on a CPU and 32,768 on a GPU, where each batch costs a fixed time"""
    if tokens is None:
        tokens = 2048 if device().type == "cpu" else 32_768
    order = np.argsort(-length, kind="stable")
    while len(order):
        size = max(1, tokens // max(1, int(length[order[0]])))
        yield order[:size]
        order = order[size:]


@torch.no_grad()
def forward_all(model: torch.nn.Module, pieces: Pieces) -> Iterator[tuple[np.ndarray, Batch, ModelOutput]]:
    """Runs a model on all pieces, in batches of similar length, without dropout and gradients: the indices of
    some pieces, their batch, and the model's output for it."""
    model.to(device()).eval()
    for indices in progress([*length_batches(pieces.length)], "scoring"):
        batch = collate(pieces, indices)
        with autocast(model):
            output = model(**to_device(batch.tensors()))
        yield indices, batch, output


# ---------------------------------------------------------------- training

def steps_of(length: np.ndarray, batch_size: int, epochs: int, max_steps: int | None = None) -> int:
    """How many steps `fit` takes."""
    steps = epochs * math.ceil(len(length) / batch_size)
    return steps if max_steps is None else min(steps, max_steps)


def schedule(done: int, steps: int, warmup: float = 0.0) -> float:
    """The factor of the learning rate after `done` of all steps: it rises linearly from 0 to 1 during the
    first `warmup` share of the steps, and then falls linearly towards 0."""
    rising = math.ceil(warmup * steps)
    if done < rising:
        return done / rising
    return 1 - (done - rising) / (steps - rising)


def take_step(module: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler,
              world: int, parts: list[dict]) -> torch.Tensor:
    """Accumulates the gradients of one batch, and follows them; returns its mean loss over all its labels.

    module: LossOf(model), or DistributedDataParallel around that; parts: this process's micro-batches"""
    n_labels = torch.zeros((), dtype=torch.int64, device=device())
    for tensors in parts:
        n_labels += (tensors["labels"] != -100).sum()
    if world > 1:
        dist.all_reduce(n_labels)
    loss = 0
    for tensors in parts:
        # A batch without any label has loss 0, and so has the part of a process that has no piece (part_of).
        part_loss = module(tensors) / n_labels.clamp(min=1)
        # DDP averages the gradients of processes, but we want their sum.
        scaler.scale(part_loss * world).backward()
        loss += part_loss.detach().float()
    if world > 1:
        dist.all_reduce(loss)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return loss


def fit(model: torch.nn.Module, length: np.ndarray, make_batch: Callable[[int, np.ndarray], dict],
        loss_fn: Callable[[torch.nn.Module, dict], torch.Tensor], *, epochs: int, batch_size: int, lr: float,
        max_steps: int | None = None, micro_batch: int | None = None, warmup: float = 0.0,
        weight_decay: float = 0.0, seed: int = 0, distributed: bool = False, checkpoint: Path | None = None,
        after_step: Callable[[int], None] | None = None, desc: str = "training") -> float:
    """Trains `model` in place; returns the seconds that it took.

    length: (M,) tokens of each piece
    make_batch: (epoch, indices) -> tensors, "labels" among them, where -100 is no label
    loss_fn: (model, tensors) -> the SUM of the losses of the labels; steps follow the mean
    micro_batch: rows of one forward pass; None: the whole batch. Fewer need less memory; but for dropout, the
        gradient is the same
    warmup: the share of the steps in which the learning rate rises
    distributed: the processes of torchrun share every batch, and follow the gradient of the whole
    checkpoint: a file to resume from after a kill; the result is the same
    after_step: called in the first process with the number of steps that are done

    AdamW, linear decay of the learning rate to 0, gradient norm clipped to 1. With one process (world = 1)
    nothing is exchanged."""
    rank, world = rank_and_world() if distributed else (0, 1)
    model.to(device()).train()
    module = LossOf(model, loss_fn)
    if world > 1:
        module = DistributedDataParallel(module, static_graph=True, forward_sync_buffers=False)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=lr, weight_decay=weight_decay, fused=True)
    # In fp16 small gradients would become 0: the loss is scaled up, and they are scaled down again. It does
    # nothing in other precisions.
    scaler = torch.amp.GradScaler(device().type, enabled=precision_of(model) == torch.float16)
    steps = steps_of(length, batch_size, epochs, max_steps)
    trained = {"model": model, "optimizer": optimizer, "scaler": scaler}
    done, seconds = 0, 0.0
    if checkpoint and checkpoint.exists():
        done, seconds = load_checkpoint(checkpoint, trained)
        print(f"going on after step {done} of {steps} from {checkpoint}", flush=True)

    started = saved = time.monotonic()
    order = itertools.islice(batches(length, batch_size, epochs, seed), done, steps)
    bar = progress(order, desc, total=steps, initial=done)
    for epoch, indices in bar:
        make_part = functools.partial(make_batch, epoch)
        parts = [part_of(rows, indices, make_part)
                 for rows in micro_batches(indices, micro_batch, rank, world)]
        # Every step has a dropout stream of its own, so that a resumed run draws the same.
        torch_seed(seed, f"dropout {done} {rank}")
        # All groups of parameters have the same rate.
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(done, steps, warmup)
        loss = take_step(module, optimizer, scaler, world, parts)
        done += 1

        if after_step and rank == 0:
            after_step(done)
        if done % 20 == 0:
            check_finite(loss, f"{desc}: the loss after step {done} of {steps}")
            bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
        if checkpoint and rank == 0 and time.monotonic() - saved > 60 * CHECKPOINT_MINUTES:
            save_checkpoint(checkpoint, trained, done, seconds + time.monotonic() - started)
            saved = time.monotonic()
    check_weights(model, desc)
    return seconds + time.monotonic() - started


# ---------------------------------------------------------------- processes, bars and checks

class LossOf(torch.nn.Module):
    """A module whose forward returns the loss, in mixed precision: DistributedDataParallel wraps modules."""

    def __init__(self, model: torch.nn.Module, loss_fn: Callable):
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        with autocast(self.model):
            return self.loss_fn(self.model, tensors)


def micro_batches(indices: np.ndarray, rows: int | None, rank: int, world: int) -> list[np.ndarray]:
    """This process's share of a batch, `rows` at a time (None: at once). With one process its share is the
    whole batch. With several, each gets the same number of parts; its last may be empty."""
    share = indices[rank::world]
    largest_share = math.ceil(len(indices) / world)
    rows = rows or largest_share
    return [share[start:start + rows] for start in range(0, largest_share, rows)]


def part_of(rows: np.ndarray, indices: np.ndarray, make_part: Callable[[np.ndarray], dict]) -> dict:
    """The tensors of a micro-batch, on the device."""
    if len(rows):
        return to_device(make_part(rows))
    # Processes wait for each other's gradients: one whose share is used up runs a piece without its labels.
    tensors = make_part(indices[:1])
    tensors["labels"] = torch.full_like(tensors["labels"], -100)
    return to_device(tensors)


def progress(steps: Iterable, desc: str, **options: object) -> tqdm:
    """A bar for what takes more than a few seconds, gone when it ends; a log gets a line per minute."""
    refresh = 0.1 if sys.stderr.isatty() else 60
    return tqdm(steps, desc, leave=False, unit="step", delay=3, mininterval=refresh,
                disable=not is_main_process(), **options)


def check_finite(tensor: torch.Tensor, what: str) -> None:
    if not tensor.isfinite().all():
        raise UserError(f"{what} became infinite or NaN; a smaller learning rate may help")


def check_weights(model: torch.nn.Module, what: str) -> None:
    # The CPU waits for a GPU once, for the norm of all weights, unless there is a bad one to be named.
    if not torch.nn.utils.get_total_norm(model.parameters()).isfinite():
        for name, parameter in model.named_parameters():
            check_finite(parameter, f"{what}: the weights {name}")


def check_numbers(numbers: dict[str, object], what: str) -> None:
    """Raises UserError if a float among the values is infinite or NaN: scores, or a prediction."""
    for name, value in numbers.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{what}: {name} is {value}; a smaller learning rate may help, or another LM")
