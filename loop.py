"""What every stage shares: the optimisation loop, the device, the random streams, the command line.

    device, precision   what the machine really has                    `device`, `autocast`
    processes           of torchrun, all or a team: what each knows    `team`, `processes`, `shared`, `gathered`
    random streams      one seed, one independent stream per purpose   `stream`
    batches             rows of similar length together, shuffled      `batches`
    optimisation        AdamW, linear decay, clipping, resume          `fit`
    models              heads; dropout and attention on a CPU          `with_head`, `dropout16`, `attention`
    files               written beside and renamed; whose run it is    `beside`, `claim`
    command line        fire, one clear sentence for a wrong flag      `cli`
"""
import contextlib
import datetime
import difflib
import errno
import functools
import inspect
import itertools
import json
import os
import pickle
import queue
import re
import shutil
import signal
import sys
import threading
import time
import typing
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import fire
import numpy as np
import torch
import torch.nn.functional as F
from torch import distributed
from tqdm import tqdm

try:
    import fcntl
    import resource
except ImportError:         # Windows has no such locks: there, nobody should start the same run twice at once
    fcntl = resource = None

LOCKS: dict[Path, object] = {}          # of the runs that this process is at work on, held until it ends
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(Exception):
    """Something that the user can mend, said in one sentence: what, where, what is allowed. Exit code 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean X?' for the nearest known name, and the list of what is allowed."""
    known = sorted(known)
    close = [k for k in known if k.startswith(name)] or difflib.get_close_matches(name, known, 1)
    return (f"; did you mean {close[0]!r}?" if close else ";") + f" Allowed: {', '.join(known)}"


# ---------------------------------------------------------------- device and precision

def device() -> torch.device:
    """The best device of this machine: cuda, then mps, then cpu. On cuda, PyTorch takes deterministic kernels, and raises where there is none
    (only to warn would let it choose other kernels for attention)."""
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False         # nothing here reads what it did not write
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


@functools.cache
def has_bf16(kind: str) -> bool:
    """Whether bf16 products are native: emulated ones (a CPU without AVX512_BF16 or AMX) are slower than fp32."""
    if kind == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return kind == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def autocast(dev: torch.device, fast: bool = True) -> contextlib.AbstractContextManager:
    """bf16 autocast where the device multiplies bf16 natively; fp32 elsewhere and on the plain path."""
    return torch.autocast(dev.type, torch.bfloat16, enabled=fast and has_bf16(dev.type))


def pad_to() -> int:
    """Batches of models are as wide as a multiple of this: a GPU multiplies such matrices faster."""
    return 8 if device().type == "cuda" else 1


def peak_gb() -> float:
    """The most memory that this process has held so far, in 10^9 bytes: the GPU's where there is one; 0.0 where nobody says (Windows)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    status = Path("/proc/self/status")                              # Linux: `resource` would count whoever started this process, too
    if status.exists() and (high := re.search(r"VmHWM:\s*(\d+) kB", status.read_text())):
        return int(high[1]) * 1024 / 1e9
    if not resource:
        return 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


# ---------------------------------------------------------------- several processes (torchrun)

PATIENCE = datetime.timedelta(days=2)           # a play may take long; torchrun sees who died
ALONE = object()
GROUP = None                                    # whom this process works with: None, all that torchrun started; ALONE; or those of its team


@contextlib.contextmanager
def team(size: int) -> Iterator[None]:
    """While open, only `size` processes of consecutive ranks work together, and everything below speaks of this process's team and of
    ranks in it. All processes must come here, in the same order, unless the size is 1 (each by itself); it must divide their number."""
    global GROUP
    before, GROUP = GROUP, ALONE if size == 1 else teams(size)
    try:
        yield
    finally:
        GROUP = before


@functools.cache
def teams(size: int) -> distributed.ProcessGroup:
    return distributed.new_subgroups(size, timeout=PATIENCE)[0]


def processes() -> tuple[int, int]:
    """The rank of this process and the number of processes that work together: those that torchrun started, or a `team`; 0 and 1 without."""
    if "RANK" not in os.environ or GROUP is ALONE:
        return 0, 1
    if not distributed.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(device())
        nccl = torch.cuda.is_available() and distributed.is_nccl_available()        # left to itself, a torch for CUDA takes NCCL without a GPU, too
        distributed.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", timeout=PATIENCE)                      # objects go by gloo
    return distributed.get_rank(GROUP), distributed.get_world_size(GROUP)


def shared(value: object) -> object:
    """The value that the first process has, in every process."""
    box = [value]
    if processes()[1] > 1:
        distributed.broadcast_object_list(box, group=GROUP, group_src=0)
    return box[0]


def gathered(value: object) -> list:
    """The values of all processes, in every process, by rank."""
    out = [value] * processes()[1]
    if len(out) > 1:
        distributed.all_gather_object(out, value, GROUP)
    return out


def share_weights(model: torch.nn.Module, source: int) -> None:
    """Gives every process the weights that the model has in process `source`."""
    if processes()[1] > 1:
        for weight in model.state_dict().values():
            there = weight.cpu()
            distributed.broadcast(there, group=GROUP, group_src=source)
            weight.copy_(there)


# ---------------------------------------------------------------- random streams

def stream(seed: int, name: str) -> np.random.Generator:
    """The generator of one purpose ("order", "head", ...): drawing from one never moves another."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def torch_seed(seed: int, name: str) -> None:
    """Starts torch's own generators (initialisation, dropout) on the named stream."""
    torch.manual_seed(int(stream(seed, name).integers(2**62)))


def get_rng() -> dict:
    return {"cpu": torch.get_rng_state(), "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],
            "mps": [torch.mps.get_rng_state()] if torch.backends.mps.is_available() else []}


def set_rng(state: dict) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"][0])
    if state.get("mps") and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"][0])


# ---------------------------------------------------------------- batches

def batches(length: np.ndarray, batch_size: int, epochs: int, seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """(epoch, rows) of every step: each epoch a new shuffle, rows of similar length together, batches in random order.

    length: (N,) tokens of each row. Rows are sorted by length only within pools of 32 batches, so batches stay random."""
    rng = stream(seed, "order")
    for epoch in range(epochs):
        order = np.arange(len(length), dtype=np.int32)
        rng.shuffle(order)
        for pool in np.array_split(order, max(1, round(len(order) / (32 * batch_size)))):
            pool[:] = pool[np.argsort(length[pool], kind="stable")]
        starts = np.arange(0, len(order), batch_size)
        for start in rng.permutation(starts):
            yield epoch, order[start:start + batch_size]


def by_length(length: np.ndarray, tokens: int | None = None) -> Iterator[np.ndarray]:
    """Rows for evaluation, longest first, in batches of about `tokens` tokens counting padding. length: (N,)

    None: 2,048 on a CPU, where 8,192 took 1.4 times as long and 0.4 GB more (six layers of 384), else 32,768."""
    order, tokens = np.argsort(-length, kind="stable"), tokens or (2048 if device().type == "cpu" else 32768)
    while len(order):
        size = max(1, tokens // max(1, int(length[order[0]])))
        yield order[:size]
        order = order[size:]


def ahead(make: Iterable) -> Iterator:
    """Runs an iterator in a thread, four items ahead, so that batches are built while the device computes."""
    q, end, stop = queue.Queue(4), object(), threading.Event()

    def put(item):
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                return q.put(item, timeout=0.1)

    def work():
        try:
            for item in make:
                if stop.is_set():
                    return
                put(item)
            put(end)
        except BaseException as e:          # handed to the consumer, which raises it
            put(e)

    threading.Thread(target=work, daemon=True).start()
    try:
        while (item := q.get()) is not end:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()


def to(tensors: dict[str, torch.Tensor], dev: torch.device) -> dict[str, torch.Tensor]:
    """Moves a batch, without waiting where it is in pinned memory."""
    return {k: v.to(dev, non_blocking=True) for k, v in tensors.items()}


# ---------------------------------------------------------------- optimisation

def fit(model: torch.nn.Module, length: np.ndarray, make: Callable[..., dict], loss_of: Callable, *, epochs: int, batch_size: int, lr: float,
        seed: int = 0, fast: bool = True, live: bool = False, checkpoint: Path | None = None, key: str = "", desc: str = "",
        quiet: bool = False) -> float:
    """Optimises `model` in place; returns the training loss at the end, averaged over about 50 steps (0.0 when there is no step).

    length   (N,) tokens of each row; order (`batches`) and dropout are streams of `seed`
    make     (epoch, rows) -> dict of tensors; runs in a thread, so that masks and padding cost the device nothing
    loss_of  (model, tensors) -> scalar loss, the mean over what "labels" holds (but for -100)
    live     `make` looks at the model: no thread, each batch is made just before its step
    Processes share every batch, each its rows: gradients are those of the whole batch.
    AdamW without weight decay, no warm-up, linear decay of the learning rate to 0, gradient norm clipped to 1 (the official code's).
    checkpoint: a file; written every 500 steps (on a GPU 5,000) and on Ctrl-C, and read at the start when its `key` is the same.
    Raises KeyboardInterrupt after saving, UserError when the loss is no longer finite."""
    dev, (rank, world), steps = device(), processes(), epochs * -(-len(length) // batch_size)
    torch_seed(seed, f"dropout{rank or ''}")
    if dev.type == "cuda" and len(set(gathered(str(torch.cuda.get_device_properties(dev).uuid)))) < world:
        raise UserError(f"{world} processes share every batch, but have fewer GPUs; start one process a GPU")
    model.to(dev).train()
    params = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr=lr, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: max(0.0, 1 - s / max(1, steps)))
    done, average, begin = 0, torch.zeros((), device=dev), time.time()
    if checkpoint and checkpoint.exists():
        state = loaded(checkpoint)
        if state["key"] == key:
            model.load_state_dict(state["model"])
            opt.load_state_dict(state["opt"])
            schedule.load_state_dict(state["schedule"])
            done, average, begin = state["done"], state["average"].to(dev), begin - state["seconds"]
            set_rng(state["rng"][rank % len(state["rng"])])
            print(f"resuming at step {done} of {steps} from {checkpoint}", flush=True)
        del state

    if world > 1 and len(set(gathered(done))) > 1:
        raise UserError(f"{checkpoint}: not every process sees this checkpoint; they need a folder in common")

    def save():
        state = {"key": key, "seconds": time.time() - begin, "model": model.state_dict(), "opt": opt.state_dict(), "schedule": schedule.state_dict(),
                 "done": done, "average": average, "rng": gathered(get_rng()) if world > 1 else [get_rng()]}
        if rank == 0:
            with beside(checkpoint) as tmp:
                torch.save(state, tmp)

    def own(epoch, rows):                                           # this process's rows; where there are none, one that weighs nothing
        mine = rows[rank::world]
        tensors = make(epoch, mine if len(mine) else rows[:1])
        return tensors | {"weight": (tensors["labels"] != -100).sum() * (len(mine) > 0)}

    def pinned(tensors):                                            # in the thread: what is pinned travels while the device computes
        return {k: v.pin_memory() for k, v in tensors.items()} if dev.type == "cuda" else tensors

    ready = (pinned(own(*arguments)) for arguments in itertools.islice(batches(length, batch_size, epochs, seed), done, None))
    every = 0.1 if sys.stderr.isatty() else 60                      # seconds between two states of the bar: a log gets a line a minute
    with tqdm(total=steps, initial=done, desc=desc, disable=quiet or rank > 0, mininterval=every, unit="step") as bar, interruptible() as hit:
        tokens = 0
        for tensors in ready if live else ahead(ready):
            tensors = to(tensors, dev)
            weight = tensors.pop("weight")
            with autocast(dev, fast), quick_dropout(fast and dev.type == "cpu"):
                loss = loss_of(model, tensors)
            if world > 1:                                           # so that the losses of all add up to the mean
                total = weight.clone()
                distributed.all_reduce(total, group=GROUP)
                loss = loss * weight / total.clamp(min=1)
            loss.backward()
            if world > 1:                                           # and all stop together
                loss, stopped = add_up(params, loss.detach(), hit())
            else:
                stopped = hit()
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            opt.step()
            schedule.step()
            opt.zero_grad(set_to_none=True)
            average = average.lerp(loss.detach().float(), 0.02) if done else loss.detach().float()
            done += 1
            tokens += tensors["input_ids"].numel()
            bar.update()
            if done % 20 == 0 or done == steps:
                if not average.isfinite():
                    raise UserError(f"{desc}: the loss became {average.item()} at step {done} of {steps}; a smaller --lr may help")
                bar.set_postfix_str(f"loss {average.item():.3f}, {tokens / max(1e-9, bar.format_dict['elapsed']):,.0f} tokens/s", refresh=False)
            if checkpoint and (stopped or (done < steps and done % (500 if dev.type == "cpu" else 5000) == 0)):
                save()
            if stopped:
                raise KeyboardInterrupt
    return average.item()


def spent(checkpoint: Path, key: str) -> float:
    """Seconds that went into the checkpoint that `fit` would go on from; 0.0 where there is none."""
    if not checkpoint.exists():
        return 0.0
    state = loaded(checkpoint, mmap=True)
    return state["seconds"] if state["key"] == key else 0.0


def loaded(checkpoint: Path, **how) -> dict:
    try:
        return torch.load(checkpoint, weights_only=True, map_location="cpu", **how)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as e:
        raise UserError(f"{checkpoint}: damaged ({str(e).splitlines()[0]}); remove it and start the same command again") from None


def add_up(params: list[torch.Tensor], loss: torch.Tensor, stopped: bool) -> tuple[torch.Tensor, bool]:
    """Sums the gradients over all processes, in one message; returns the sum of their losses, and whether any is to stop."""
    held = [p.grad for p in params if p.grad is not None]
    flat = torch.cat([g.flatten() for g in held] + [loss[None], torch.full_like(loss[None], stopped)])
    distributed.all_reduce(flat, group=GROUP)
    for g, total in zip(held, flat[:-2].split([g.numel() for g in held]), strict=True):
        g.copy_(total.view_as(g))
    return flat[-2], bool(flat[-1])


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C or SIGTERM only sets a flag, so that the step in flight ends whole; another one acts at once, unless it comes within five
    seconds: torchrun passes on what a scheduler sends to every process anyway."""
    hit = []

    def handler(number, frame):
        hit.append(time.monotonic())
        if hit[-1] - hit[0] > 5:
            raise KeyboardInterrupt

    before = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(hit)
    finally:
        for s, old in before.items():
            signal.signal(s, old)


# ---------------------------------------------------------------- models: heads, dropout, attention

def with_head(lm: torch.nn.Module, auto: type, seed: int, **config) -> torch.nn.Module:
    """A task model (an AutoModelFor... class) around a copy of the LM's encoder; its head is fresh, from the stream "head"."""
    with torch.random.fork_rng(devices=[]), lm.device:              # a GPU draws the weights (most are overwritten) in no time
        torch_seed(seed, "head")
        changed = type(lm.config).from_dict(lm.config.to_dict() | config)
        try:
            model = auto.from_config(changed, attn_implementation=lm.config._attn_implementation, dtype=torch.float32)
        except ValueError as e:
            raise UserError(f"the LM is a {type(lm).__name__}: transformers has no model of its kind for this task ({auto.__name__})") from e
    model.to(lm.device).base_model.load_state_dict(lm.base_model.state_dict(), strict=False)
    return model


def dropout16(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout whose mask takes 16 random bits an element: a CPU draws four elements at once, instead of a double for each.

    Same distribution as torch's (p rounded to 1/65536), same stream (torch's generator), other numbers."""
    if not training or p == 0:
        return x
    return x * kept(random_bits(x.shape), p).div_(1 - p).to(x.dtype)


def random_bits(shape: torch.Size) -> torch.Tensor:
    n = shape.numel()
    return torch.empty(-(-n // 4), dtype=torch.int64).random_(-2**63, None).view(torch.int16)[:n].view(shape)


def kept(bits: torch.Tensor, p: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """1.0 where 16 random bits let an element live, 0.0 where it is dropped; comparing floats is faster than making bools."""
    return (torch.empty(bits.shape) if out is None else out).copy_(bits).ge_(round(p * 65536) - 32768)


@contextlib.contextmanager
def quick_dropout(wanted: bool) -> Iterator[None]:
    """While open, every dropout of every model goes through the one above (nn.Dropout and attention call this name)."""
    torchs = F.dropout
    F.dropout = dropout16 if wanted else torchs
    try:
        yield
    finally:
        F.dropout = torchs


LARGE = 2**21           # attention weights (B H L L) above which the ways for long rows below are the faster ones


def attention_of_models() -> str | None:
    """`attn_implementation` for models of transformers: None, their own choice, on a GPU; on a CPU the name of `attention`, which knows
    ways that take less time and memory for long rows."""
    if device().type != "cpu":
        return None if device().type == "cuda" else "eager"
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask
    AttentionInterface.register("frugal", attention)
    AttentionMaskInterface.register("frugal", eager_mask)
    return "frugal"


def attention(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
              scaling: float | None = None, dropout: float = 0.0, **_) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: q, k, v (B, H, L, D), mask (B, 1, L, L) to be added -> (B, L, H, D), and no weights."""
    scaling = q.shape[-1]**-0.5 if scaling is None else scaling
    if k.shape[1] != q.shape[1]:                                    # several heads share a key and a value
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    large = q.shape[:3].numel() * k.shape[2] > LARGE
    fixed = mask is None or (mask.shape[1] == 1 and not mask.requires_grad)                         # no learned bias, none of single heads
    if large and not q.requires_grad and not dropout:               # fused; its backward pass would be wrong for queries that may look nowhere
        out = F.scaled_dot_product_attention(q, k, v, None if mask is None else mask.to(q.dtype), scale=scaling)
    elif large and fixed and dropout and F.dropout is dropout16 and k.shape == q.shape:
        q, k, v = (x.float().contiguous() for x in (q * scaling, k, v / (1 - dropout)))
        out = FewHeads.apply(q, k, v, None if mask is None else mask.float(), dropout)
    else:
        weights = q @ k.transpose(2, 3) * scaling
        out = F.dropout((weights if mask is None else weights + mask).softmax(-1), dropout) @ v
    return out.transpose(1, 2).contiguous(), None


class FewHeads(torch.autograd.Function):
    """dropout(softmax(q kᵀ + mask)) v, of a few heads at a time, so that their weights stay in the cache. They are made again for the
    backward pass, for which only the random bits of all weights are kept. The scale of dropout is the caller's (in v)."""

    @staticmethod
    def weights(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, spare: int) -> Iterator[tuple]:
        """((row, heads), weights (h, L, L), `spare` more such buffers) until all heads are through."""
        B, H, L, _ = q.shape
        buffers = torch.empty(1 + spare, min(H, 1 + 150_000 * torch.get_num_threads() // L**2), L, L)       # 0.6 MB a thread, and one head
        for b, h in itertools.product(range(B), range(0, H, buffers.shape[1])):
            at, (w, *more) = (b, slice(h, h + buffers.shape[1])), buffers[:, :H - h]
            torch.baddbmm(w if mask is None else mask[b], q[at], k[at].transpose(1, 2), beta=int(mask is not None), out=w)
            yield at, torch.softmax(w, -1, out=w), *more

    @staticmethod
    def forward(ctx, q, k, v, mask, p):
        out, bits = torch.empty_like(v), random_bits(torch.Size((*q.shape[:3], q.shape[2])))
        for at, w, buffer in FewHeads.weights(q, k, mask, 1):
            torch.bmm(w.mul_(kept(bits[at], p, buffer)), v[at], out=out[at])
        ctx.save_for_backward(q, k, v, mask, bits, out)
        ctx.p = p
        return out

    @staticmethod
    def backward(ctx, g):
        q, k, v, mask, bits, out = ctx.saved_tensors
        dq, dk, dv, g = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), g.contiguous()
        mean = (g * out).sum(-1, keepdim=True)                                                      # of the gradient under the weights
        for at, w, ds, lives in FewHeads.weights(q, k, mask, 2):
            kept(bits[at], ctx.p, lives)
            torch.bmm(g[at], v[at].transpose(1, 2), out=ds).mul_(lives).sub_(mean[at]).mul_(w)
            torch.bmm(ds, k[at], out=dq[at])
            torch.bmm(ds.transpose(1, 2), q[at], out=dk[at])
            torch.bmm(w.mul_(lives).transpose(1, 2), g[at], out=dv[at])
        return dq, dk, dv, None, None


# ---------------------------------------------------------------- files

ENDING = r"\.(jsonl?|csv|tsv|txt)(\.gz)?$"                         # of the files that data_prep.py reads by their names


def lock(path: Path, wait: bool) -> object:
    """An open file that no other process can lock until it is closed or this process ends; None where another has it and `wait` is False."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = open(path, "a+")
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.close()
            return None
        except OSError as e:                                        # a network file system without locks: as on Windows
            if e.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            return file
        file.close()                                                # its holder has just removed it: lock the one that is there now


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A path beside `path` to write a file or folder to; renamed into place when the block ends well, removed when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        yield tmp
        try:
            os.replace(tmp, path)
        except OSError as e:
            if not (tmp.is_dir() and e.errno in (errno.ENOTEMPTY, errno.EEXIST)):       # another process made the same folder meanwhile
                raise
    except Exception as e:                  # torch and safetensors say it each in their own way
        if getattr(e, "errno", 0) in FULL or re.search(r"os error (27|28)\b", str(e)) or shutil.disk_usage(path.parent).free < 1 << 20:
            raise UserError(f"{path}: cannot be written, the disk is full; free some space and start the same command again") from e
        raise
    finally:
        shutil.rmtree(tmp) if tmp.is_dir() else tmp.unlink(missing_ok=True)


def claim(out: Path, run: dict, last: str = "run.json") -> bool:
    """Whether the folder `out` already holds this very run, finished: with its `last` file. A folder with anything else is refused,
    and so is one that another process is at work on."""
    return shared(processes()[0] == 0 and holds(out, run, last))


def holds(out: Path, run: dict, last: str) -> bool:
    if (out / "run.json").exists():
        there = json.loads((out / "run.json").read_text())
        changed = [f"{k}={there.get(k)} there, {v} here" for k, v in run.items() if timeless(there.get(k)) != timeless(v)]
        if changed:
            raise UserError(f"--out={out}: holds another run ({', '.join(changed)}); choose another folder or remove it")
        if (out / last).exists():
            print(f"already done: {out}")
            return True
    elif last == "run.json" and (out.is_symlink() or os.path.ismount(out)):
        raise UserError(f"--out={out}: is a link or a mount point, which a finished run could not replace; choose a folder inside of it")
    elif out.exists() and (not out.is_dir() or any(last == "run.json" or not file.name.startswith(".") for file in out.iterdir())):
        raise UserError(f"--out={out}: exists and is not a run of this script; choose another folder")
    file = out.resolve().parent / f".{out.name}.lock"
    mine = LOCKS.get(file) or lock(file, wait=False)
    if not mine:
        raise UserError(f"--out={out}: another process is at work on it; wait for it, or choose another folder")
    LOCKS[file] = mine
    return False


def timeless(value: object) -> object:
    """A knob, or what is known of the stages before, without their times: the same stage again does not make another run."""
    return {k: timeless(v) for k, v in value.items() if k not in ("seconds", "hours")} if isinstance(value, dict) else value


def checkpoint_of(out: Path) -> Path:
    return out.parent / f".{out.name}.checkpoint.pt"


# ---------------------------------------------------------------- command line

def cli(main: Callable) -> None:
    """Runs `main` with its knobs from the command line. --help shows the script's docstring and the knobs with their comments.

    Fire alone would run main first and complain about a mistyped flag afterwards; so flags are checked here, before anything runs."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)       # what is half made is removed then, too
    try:
        knobs = inspect.signature(main).parameters
        args = sys.argv[1:]
        if {"-h", "--help"} & set(args):
            source = inspect.getsource(main)
            print(inspect.getmodule(main).__doc__, "\nknobs:\n", source[source.index("(\n") + 2:source.index("\n)")], sep="")
            return
        takes_value = False
        for arg in args:
            name = arg.removeprefix("--").split("=")[0].replace("-", "_")
            if arg.startswith("--") and name not in knobs and name.removeprefix("no") not in knobs:
                raise UserError(f"unknown flag --{name}" + nearest(name, knobs))
            if not arg.startswith("--") and not takes_value:
                raise UserError(f"{arg!r} is not a flag: write --name=value")
            takes_value = arg.startswith("--") and "=" not in arg
        types = typing.get_type_hints(main)
        parsers = {name: functools.partial(parse, name, types[name]) for name in knobs}
        fire.Fire(fire.decorators.SetParseFns(**parsers)(main), name=Path(sys.argv[0]).name, serialize=lambda _: None)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on, from the last checkpoint where there is one", file=sys.stderr)
        sys.exit(130)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except OSError as e:
        if e.errno not in (*FULL, errno.EACCES, errno.EROFS, errno.EISDIR, errno.ENOTDIR):
            raise
        print(f"error: {e.strerror}: {e.filename or 'while writing'}", file=sys.stderr)
        sys.exit(2)
    finally:
        while LOCKS:
            path, file = LOCKS.popitem()
            if fcntl:                                               # Windows cannot remove what is open
                path.unlink(missing_ok=True)
            file.close()


def parse(name: str, kind: type, value: str) -> object:
    """One flag's value from its text, by the annotation of the knob (bool, int, float, str, or one of these | None)."""
    kinds = typing.get_args(kind) or (kind,)
    if type(None) in kinds and value == "None":
        return None
    kind = kinds[0]
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        return (value.rstrip("/") or value) if kind is str else kind(value)           # FOLDER/ is FOLDER
    except (ValueError, KeyError):
        raise UserError(f"--{name} takes {'True or False' if kind is bool else kind.__name__}, not {value!r}") from None


def checked(knobs: dict) -> dict:
    """A copy of main's knobs, after a look at the numbers among them."""
    bounds = {"seed": 0, "overlap": 0, "explore": 0, "compare": 0, "alpha": 0, "max_len": 8, "ft_max_len": 8}
    for name, value in knobs.items():
        if name == "p" and value is not None and not 0 < value <= 1:
            raise UserError(f"--p={value}: the share of tokens to mask must be in (0, 1]")
        if name in ("val_share", "dev_share", "sequential") and value is not None and not 0 < value < 1:
            raise UserError(f"--{name}={value}: must be in (0, 1)")
        if isinstance(value, int | float) and not isinstance(value, bool):
            least = bounds.get(name, 1 if isinstance(value, int) else 1e-12)
            if not least <= value < float("inf"):
                raise UserError(f"--{name}={value}: must be " + ("positive" if least in (1, 1e-12) else f"{least} or more"))
    return dict(knobs)
