"""Which tokens are masked: the registry of strategies, and what becomes of a masked token.

    @register("punct")
    def punct(batch, k, rng, lm=None):
        return pick(batch.punct + rng.random(batch.ids.shape), batch, k)

A masker gets
    batch  (B, L) numpy arrays: ids, ok, word, punct, ent (see data_prep.Batch)
    k      (B,) how many tokens to mask in each row, the same for every masker (`budget`)
    rng    (B, L) uniform numbers on demand; a row's numbers depend on (seed, epoch, row) alone (`RowRandom`)
    lm     a callable: batch -> (B, L, H) hidden states of the LM as it is now, a torch tensor on its device; None where there is no LM
and returns a bool (B, L): True only where `ok`, at most k[b] in row b, exactly k[b] wherever its units allow.
A masker of your own: decorate a function here, or use --masker=path/to/file.py:function
The learned one (PAPER: NMG) is --masker=nmg:FOLDER, where FOLDER is a run of train_nmg.py; sampled:FOLDER draws from it.
"""
import functools
import importlib.util
import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import toy
from data_prep import Batch
from loop import UserError, beside, nearest

Masker = Callable[..., np.ndarray]
MASKERS: dict[str, Masker] = {}


def register(name: str) -> Callable[[Masker], Masker]:
    def add(masker):
        MASKERS[name] = masker
        return masker
    return add


def find(name: str) -> Masker:
    """The masker of a --masker: a registered name, nmg:FOLDER or sampled:FOLDER, or FILE.py:function."""
    if is_learned(name):
        return functools.partial(MASKERS[name.partition(":")[0]], policy=NMG.load(name.partition(":")[2]))
    if name in MASKERS:
        return MASKERS[name]
    file, _, function = name.rpartition(":")
    if not file.endswith(".py"):
        raise UserError(f"--masker={name}: no such masker" + nearest(name, MASKERS) + ", or FILE.py:function")
    if not Path(file).is_file():
        raise UserError(f"--masker={name}: no such file: {file}")
    spec = importlib.util.spec_from_file_location(f"masker {Path(file).stem}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        known = [n for n, f in vars(module).items() if callable(f) and getattr(f, "__module__", "") == module.__name__]
        raise UserError(f"--masker={name}: {file} has no function {function!r}" + nearest(function, known))
    return getattr(module, function)


def is_learned(name: str) -> bool:
    """Whether a --masker names the folder of a policy."""
    return name.startswith(("nmg:", "sampled:"))


# ---------------------------------------------------------------- the strategies (PAPER: baselines)

@register("none")
def none(batch: Batch, k: np.ndarray, rng: "RowRandom", lm=None) -> np.ndarray:
    """No further pre-training at all."""
    return np.zeros_like(batch.ok)


@register("random")
def random(batch: Batch, k: np.ndarray, rng: "RowRandom", lm=None) -> np.ndarray:
    """Tokens, uniformly, without replacement."""
    return pick(rng.random(batch.ids.shape), batch, k)


@register("whole")
def whole(batch: Batch, k: np.ndarray, rng: "RowRandom", lm=None) -> np.ndarray:
    """Whole words, uniformly."""
    unit = runs(batch.word)
    return pick(np.take_along_axis(rng.random(unit.shape), unit, 1), batch, k, unit)


@register("span")
def span(batch: Batch, k: np.ndarray, rng: "RowRandom", lm=None) -> np.ndarray:
    """Spans of consecutive whole words, lengths geometric (0.2) up to 10 words (SpanBERT); the last span is cut to the budget."""
    B, L = shape = batch.ids.shape
    length = np.minimum(10, 1 + np.log1p(-rng.random(shape) * (1 - 0.8**10)) // np.log(0.8))     # (B, S) words of each span
    end = np.cumsum(length, 1) - 1 - np.floor(rng.random(shape)[:, :1] * length[:, :1])          # the first span begins before the row
    breaks = np.zeros((B, L + 1), np.int64)                                                      # (B, words) a new span begins here
    np.put_along_axis(breaks, np.minimum(end + 1, L).astype(np.int64), 1, 1)
    word = np.cumsum((runs(batch.word) == np.arange(L)) & batch.ok, 1) - 1                # (B, L) words counted in the row
    number = np.take_along_axis(np.cumsum(breaks, 1), np.maximum(word, 0), 1)                    # (B, L) span of each token
    return pick(np.take_along_axis(rng.random((B, L + 1)), number, 1) - 1e-9 * np.arange(L), batch, k)


@register("entity")
def entity(batch: Batch, k: np.ndarray, rng: "RowRandom", lm=None) -> np.ndarray:
    """Whole named entities first, then random tokens."""
    ent = batch.ent
    unit = runs(ent)
    return pick((ent >= 0) + np.take_along_axis(rng.random(unit.shape), unit, 1), batch, k, unit)


@register("punct")
def punct(batch: Batch, k: np.ndarray, rng: "RowRandom", lm=None) -> np.ndarray:
    """Punctuation first, then random tokens (the paper's Punctuation-Random)."""
    return pick(batch.punct + rng.random(batch.ids.shape), batch, k)


@register("oracle")
def oracle(batch: Batch, k: np.ndarray, rng: "RowRandom", lm=None) -> np.ndarray:
    """The toy world's informative words first: the best that a policy could learn there (only with --lm=tiny)."""
    return pick(toy.informative()[batch.ids] + rng.random(batch.ids.shape), batch, k)


@register("anti")
def anti(batch: Batch, k: np.ndarray, rng: "RowRandom", lm=None) -> np.ndarray:
    """The toy world's filler first: the worst (only with --lm=tiny)."""
    return pick(rng.random(batch.ids.shape) - toy.informative()[batch.ids], batch, k)


@register("nmg")
def nmg(batch: Batch, k: np.ndarray, rng: "RowRandom", lm=None, policy: "NMG | None" = None) -> np.ndarray:
    """The most probable tokens under a learned policy, which reads the LM's hidden states (PAPER: meta-testing)."""
    return pick(policy_logits(batch, lm, policy), batch, k)


@register("sampled")
def sampled(batch: Batch, k: np.ndarray, rng: "RowRandom", lm=None, policy: "NMG | None" = None) -> np.ndarray:
    """Tokens drawn from a learned policy, without replacement (PAPER: meta-training)."""
    return pick(policy_logits(batch, lm, policy) + rng.gumbel(batch.ids.shape), batch, k)


def policy_logits(batch: Batch, lm: Callable[[Batch], torch.Tensor], policy: "NMG | None") -> np.ndarray:
    """(B, L) a policy's logits, -inf where nothing may be masked; UserError where policy and LM do not fit."""
    if policy is None:
        raise UserError("--masker=nmg: and --masker=sampled: need the folder of a policy, such as nmg:FOLDER; train_nmg.py makes one")
    states = lm(batch)                                                                           # (B, L, H)
    if states.shape[-1] != policy.hidden:
        raise UserError(f"the policy of {policy.about['lm']} reads hidden states of size {policy.hidden}, this LM has {states.shape[-1]}: "
                        "use it with a LM of that size, or train one for this LM")
    with torch.no_grad():
        logits, _ = policy.to(states.device)(states, torch.from_numpy(batch.real).to(states.device), torch.from_numpy(batch.ok).to(states.device))
    return logits.cpu().numpy()


# ---------------------------------------------------------------- the policy network (PAPER: NMG network)

class NMG(torch.nn.Module):
    """One attention block as BERT's (projection, residual, LayerNorm; no feed-forward part), then Linear(H, 128) - gelu - Linear(128, 1)
    for each token: the logit of masking it. The value of a context: its mean hidden state through layers of its own.

    hidden: H of the LM whose hidden states it reads; about: what it was trained on (kept in config.json)."""

    def __init__(self, hidden: int, **about):
        super().__init__()
        self.hidden, self.about = hidden, about
        heads = next(n for n in range(max(1, hidden // 64), 0, -1) if hidden % n == 0)           # BERT-base: 12 of 64
        self.attention = torch.nn.MultiheadAttention(hidden, heads, batch_first=True)
        self.norm = torch.nn.LayerNorm(hidden, eps=1e-12)
        self.score, self.value = (torch.nn.Sequential(torch.nn.Linear(hidden, 128), torch.nn.GELU(), torch.nn.Linear(128, 1)) for _ in range(2))

    def forward(self, states: torch.Tensor, real: torch.Tensor, ok: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """states (B, L, H), real and ok (B, L) bool -> logits (B, L), -inf where not ok, and values (B,)."""
        mixed, _ = self.attention(states, states, states, key_padding_mask=~real, need_weights=False)
        logits = self.score(self.norm(states + mixed)).squeeze(-1).masked_fill(~ok, -torch.inf)
        pooled = (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)                   # (B, H)
        return logits, self.value(pooled).squeeze(-1)

    def save(self, folder: Path) -> None:
        """folder/config.json and folder/model.safetensors, the latter last: where it stands, the policy is whole."""
        (folder / "config.json").write_text(json.dumps({"hidden": self.hidden} | self.about, indent=1))
        with beside(folder / "model.safetensors") as tmp:
            save_file({k: v.contiguous().cpu() for k, v in self.state_dict().items()}, tmp)

    @classmethod
    def load(cls, folder: str) -> "NMG":
        """The policy of a folder; UserError where there is none."""
        try:
            policy = cls(**json.loads((Path(folder) / "config.json").read_text()))
            policy.load_state_dict(load_file(Path(folder) / "model.safetensors"))
        except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as e:
            raise UserError(f"{folder}: no policy of train_nmg.py in this folder ({str(e).splitlines()[0]})") from None
        return policy


# ---------------------------------------------------------------- what they are made of

def budget(batch: Batch, p: float) -> np.ndarray:
    """(B,) max(1, round(p n)) of the n maskable tokens of each row; 0 where there is none."""
    n = batch.ok.sum(1)
    return np.minimum(n, np.maximum(1, np.round(p * n))).astype(np.int64)


def given(mask: np.ndarray) -> Masker:
    """A masker that repeats what was chosen before: mask (N, L) bool, of every row of a corpus."""
    def repeat(batch, k, rng, lm=None):
        out = np.zeros(batch.ids.shape, bool)
        out[:, :mask.shape[1]] = mask[batch.rows, :out.shape[1]]
        return out
    return repeat


def pick(score: np.ndarray, batch: Batch, k: np.ndarray, unit: np.ndarray | None = None) -> np.ndarray:
    """The highest scores (B, L) first, at most k[b] tokens in row b, only where `ok`.

    unit (B, L) in [0, L): tokens of one unit (`runs` of words or entities) are taken together or not at all; a unit that
    no longer fits is passed over for the next that does. Sampling without replacement from a softmax policy is
    pick(logits + gumbel noise); its greedy choice is pick(logits)."""
    score = np.where(batch.ok, score, -np.inf)
    if unit is None:
        mask = np.zeros(score.shape, bool)
        np.put_along_axis(mask, np.argsort(-score, 1, kind="stable"), np.arange(score.shape[1]) < k[:, None], 1)
        return mask & batch.ok
    b, width = np.arange(len(score)), score.shape[1]
    flat = b[:, None] * width + unit                                                             # (B, L) the unit's cell in (B, U)
    size = np.bincount(flat.ravel(), batch.ok.ravel(), score.size).reshape(score.shape).astype(np.int64)
    best = np.full(score.shape, -np.inf)
    np.maximum.at(best.reshape(-1), flat.ravel(), score.ravel())
    left, taken = np.array(k), np.zeros(score.shape, bool)
    for u in np.argsort(-best, 1, kind="stable").T:                                              # every row's next best unit
        fits = (size[b, u] <= left) & (size[b, u] > 0)
        taken[b, u] = fits
        left -= size[b, u] * fits
        if not left.any():
            break
    return taken.reshape(-1)[flat] & batch.ok


def runs(number: np.ndarray) -> np.ndarray:
    """(B, L) the position where the run of equal numbers begins that each token is in; a token with -1 is a run of its own."""
    begins = np.ones(number.shape, bool)
    begins[:, 1:] = (number[:, 1:] != number[:, :-1]) | (number[:, 1:] < 0)
    return np.maximum.accumulate(np.where(begins, np.arange(number.shape[1]), 0), 1)


def corrupt(ids: np.ndarray, mask: np.ndarray, rng: "RowRandom", mask_id: int, plain: np.ndarray) -> np.ndarray:
    """BERT's 80/10/10: of the masked tokens 80 % become [MASK], 10 % a random ordinary token, 10 % stay. Labels are ids[mask]."""
    fate, which = rng.random(ids.shape), rng.random(ids.shape)
    replaced = np.where(fate < 0.8, mask_id, np.where(fate < 0.9, plain[(which * len(plain)).astype(np.int64)], ids))
    return np.where(mask, replaced, ids)


class RowRandom:
    """Uniform numbers for a batch of rows, each row with a stream of its own, whatever batch it comes in.

    A counter-based generator (splitmix64): number (i, j) of a call is a hash of (seed, name, epoch, rows[i], call, j), so
    that shuffling, batch size, padding and the number of processes change nothing, at a few ns a number."""

    def __init__(self, seed: int, name: str, epoch: int, rows: np.ndarray):
        key = np.zeros(len(rows), np.uint64)
        for part in (seed, zlib.crc32(name.encode()), epoch, rows):
            key = mix(key + np.asarray(part).astype(np.uint64) + np.uint64(1))
        self.key, self.calls = key[:, None], 0

    def random(self, shape: tuple[int, int]) -> np.ndarray:
        """(B, n) in [0, 1)"""
        self.calls += 1
        counter = np.arange(shape[1], dtype=np.uint64) + np.uint64(self.calls << 32)
        return (mix(self.key + mix(counter)) >> np.uint64(11)) * 2.0**-53

    def gumbel(self, shape: tuple[int, int]) -> np.ndarray:
        """(B, n) noise: the highest of logits + noise are a draw from their softmax, without replacement."""
        return -np.log(-np.log(self.random(shape) + 1e-300))


def mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) over uint64."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
