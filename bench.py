"""How fast an MLM step is: the plain path (rows padded, fp32, head on every position) and the fast one, in turn, in one run.

    python bench.py                                                             # toycls, tiny LM
    python bench.py --dataset=chemprot --lm=distilbert-base-uncased --batch_sizes=8,32

Ratios carry over to other machines, seconds do not. The table is also written as JSON.
"""
import json
import platform
import re
import resource
import time
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import data_prep
import maskers
from data_prep import Rows, Specials, blocks
from loop import UserError, beside, checked, cli, device, has_bf16
from pretrain import fitting, load_lm, pretrain, versions


def product_rate(dtype: torch.dtype, n: int = 2048) -> float:
    """Floating-point operations a second of square matrix products, in GFLOP/s: the limit of any training on this machine."""
    a, b, best = torch.randn(n, n, device=device()).to(dtype), torch.randn(n, n, device=device()).to(dtype), 0.0
    for _ in range(8):
        begin = time.perf_counter()
        (a @ b)[0, 0].item()
        best = max(best, 2 * n**3 / (time.perf_counter() - begin) / 1e9)
    return best


def rows_per_second(model: torch.nn.Module, pieces: Rows, batch_size: int, max_len: int, fast: bool) -> float:
    """Masking, batches, forward, backward, clipping and optimizer of one epoch over `pieces`."""
    begin = time.perf_counter()
    pretrain(model, pieces, maskers.find("random"), batch_size=batch_size, max_len=max_len, fast=fast, quiet=True)
    return len(pieces) / (time.perf_counter() - begin)


def masking_rate(pieces: Rows, name: str, batch_size: int) -> float:
    """Rows a second of a masker alone, on batches that are already there."""
    batches = [data_prep.gather(pieces, rows) for rows in np.array_split(np.arange(len(pieces)), max(1, len(pieces) // batch_size))]
    begin = time.perf_counter()
    for batch in batches:
        maskers.find(name)(batch, maskers.budget(batch, 0.15), maskers.RowRandom(0, "mask", 0, batch.rows))
    return len(pieces) / (time.perf_counter() - begin)


def main(
    dataset: str = "toycls",            # a name or a path (see data_prep.py)
    lm: str = "tiny",                   # tiny, a Hugging Face folder or hub name
    raw: str | None = None,             # folder with raw files of a named data set
    max_len: int = 256,                 # tokens a block, and what the plain path pads to
    batch_sizes: str = "8,32",          # rows a step
    rows: int = 320,                    # blocks of one measurement, a random sample of the corpus
    repeats: int = 3,                   # of each measurement, plain and fast in turn; the table shows medians
    spacy_model: str | None = None,     # also time the entity masker, with this spaCy model
    out: str = "runs/bench.json",       # the figures
):
    checked(locals())
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", batch_sizes):
        raise UserError(f"--batch_sizes={batch_sizes}: numbers with commas between them, such as 8,32")
    sizes = [int(size) for size in batch_sizes.split(",")]
    tok = data_prep.load_tokenizer(lm)
    corpus = data_prep.load(dataset, tok, raw).corpus
    model = load_lm(lm)
    max_len = min(max_len, fitting(model, None, max_len))
    pieces = blocks(corpus, Specials.of(tok), max_len)
    pieces = pieces.take(np.random.default_rng(0).permutation(len(pieces))[:rows])
    figures = {"dataset": dataset, "lm": lm, "machine": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
               "device": device().type, "native bf16": has_bf16(device().type), **versions(), "mean length": float(pieces.length.mean()),
               "products, GFLOP/s": {str(d).removeprefix("torch."): round(product_rate(d)) for d in (torch.float32, torch.bfloat16)},
               "masking, rows/s": {}, "MLM, rows/s": {}}
    if spacy_model:
        corpus.spacy_model = spacy_model
    for name in ["random", "whole", "span", "punct"] + (["entity"] if spacy_model else []):
        figures["masking, rows/s"][name] = round(np.median([masking_rate(pieces, name, 32) for _ in range(repeats + 1)]))
    rates = {(size, fast): [] for size in sizes for fast in (False, True)}
    for size, fast in rates:                                                     # warm up both paths
        rows_per_second(model, pieces.take(np.arange(min(2 * size, len(pieces)))), size, max_len, fast)
    for _ in tqdm(range(repeats), desc="repeats", disable=None):
        for (size, fast), seen in rates.items():
            seen.append(rows_per_second(model, pieces, size, max_len, fast))
    print(", ".join(f"{k} {v}" for k, v in figures.items() if "rows/s" not in k))
    print("masking alone, rows/s: " + ", ".join(f"{n} {r:,}" for n, r in figures["masking, rows/s"].items()))
    print(f"\n{'MLM step':>12} {'plain':>9} {'fast':>9} {'ratio':>7}   rows/s, medians of {repeats}; in brackets the lowest and the highest ratio")
    for size in sizes:
        plain, quick = np.array(rates[size, False]), np.array(rates[size, True])
        figures["MLM, rows/s"][size] = {"plain": plain.tolist(), "fast": quick.tolist()}
        ratios = quick / plain
        print(f"{'batch ' + str(size):>12} {np.median(plain):9.1f} {np.median(quick):9.1f} {np.median(ratios):7.1f}   "
              f"({ratios.min():.1f} to {ratios.max():.1f})")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if platform.system() != "Darwin" else 1 << 30)
    figures["peak memory, GB"] = round(peak, 2)
    print(f"peak memory {peak:.2f} GB")
    with beside(Path(out)) as tmp:
        tmp.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    cli(main)
