"""Further pre-trains a masked LM on a task's own text, masking what a masker chooses. LM in, LM out.

    python pretrain.py                                                  # toycls, tiny LM, random masking
    python pretrain.py --dataset=chemprot --lm=bert-base-uncased --masker=whole --out=runs/chemprot-whole
    python pretrain.py --dataset=my_corpus.txt --lm=roberta-base --masker=my_maskers.py:high_ids
    python pretrain.py --dataset=my_labelled.csv --corpus=my_texts.txt --lm=roberta-base    # reads both
    torchrun --nproc_per_node=4 pretrain.py --dataset=newsqa --lm=bert-base-uncased
"""
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import data_prep
import maskers
from nmg import loop
from nmg.loop import fit, length_batches, progress, steps_of
from support import devices, models, runs, toy
from support.data import Batch, Data, Pieces, Split, blocks, collate
from support.devices import autocast, device, to_device
from support.models import LMReader, load_lm, load_tokenizer, max_len_of, save_lm, set_dropout, weights_of
from support.plots import held_out_curve
from support.rng import RowRandom
from support.runs import Run, UserError
from support.sources import DataFlags


@dataclass
class Config(DataFlags):
    # The values are the paper's, of a whole task; with --lm=tiny they come from PRETRAIN in support/toy.py.
    dataset: str = "toycls"         # squad newsqa emrqa imdb chemprot scierc acl_arc scicite toycls toyqa,
                                    # hf:REPO of the hub, or a path (data_prep.py)
    corpus: str | None = None       # a file of unlabelled texts beside --dataset, read as well
    read: str | None = None         # train, corpus, or both; None: both, of the toy world the corpus
    lm: str = "tiny"                # tiny, a Hugging Face folder or hub name; with a fast tokenizer
    masker: str = "random"          # a name in maskers.py, nmg:FOLDER, sampled:FOLDER, difference:FILE, or
                                    # FILE.py:function
    p: float = 0.15                 # share of tokens to mask; give 0.05 yourself for a learned masker
    epochs: int = 1                 # passes over the text; give 3 yourself for a learned masker
    max_steps: int | None = None    # stop after so many steps, with lr at 0 by then; None: after all epochs
    lr: float = 2e-5                # raise it for LMs smaller than BERT-base (6 layers x 384: 3e-4)
    batch_size: int = 16            # blocks per step; the paper chose from 12, 16, 24
    micro_batch: int | None = None  # blocks of one forward pass; fewer need less memory; None: batch_size
    warmup: float = 0.0             # share of the steps in which lr rises; 0.06 is usual for long runs
    weight_decay: float = 0.0       # AdamW's; 0.01 is usual for long runs
    max_len: int | None = None      # tokens per block; None: 512 for question answering, else 256
    dropout: float | None = None    # None: the LM's own, mostly 0.1; 0 is faster, for few passes
    seed: int = 0                   # of masks, order, dropout and a missing MLM head, in separate streams
    eval_every: int | None = None   # steps between evaluations on held-out text; None: before and after only
    fast: bool = True               # bf16 or fp16 where that is fast, cheaper attention on a CPU
    dev_share: float | None = None  # share of train cut as dev if there is none; None: 0.1, but none of
                                    # data sets with a name
    labelled: int | None = None     # texts whose labels a masker may read, as in finetune_*.py; None: all
    spacy_model: str | None = None  # finds the entities for --masker=entity; None: en_core_web_sm
    out: str | None = None          # folder of the adapted LM; None: runs/pretrain-DATASET-LM-MASKER-SEED


# ---------------------------------------------------------------- masks and loss

def mask_batch(pieces: Pieces, masker: maskers.Masker, p: float, seed: int, epoch: int, indices: np.ndarray,
               lm: Callable | None = None) -> tuple[Batch, np.ndarray, np.ndarray]:
    """The batch of some pieces, its mask (B, L), and its corrupted ids (B, L): a function of seed, epoch,
    index and, if the masker reads it, of the LM as it is.

    Raises UserError if the masker breaks its contract."""
    batch = collate(pieces, indices)
    budget = maskers.budget_of(batch, p)
    budget.flags.writeable = False
    mask = masker(batch, budget, RowRandom(seed, "mask", epoch, indices), lm)
    right_kind = isinstance(mask, np.ndarray) and mask.shape == batch.maskable.shape and mask.dtype == bool
    if not right_kind or (mask & ~batch.maskable).any() or (mask.sum(1) > budget).any():
        name = getattr(masker, "__name__", masker)
        raise UserError(f"the masker {name!r} must return a bool array (B, L), True only where maskable and "
                        "at most budget[b] times in row b (maskers.pick does)")
    special = pieces.split.special
    corrupted = maskers.corrupt(batch.input_ids, mask, RowRandom(seed, "corrupt", epoch, indices),
                                special.mask_id, special.ordinary_ids)
    return batch, mask, corrupted


def mlm_tensors(batch: Batch, mask: np.ndarray, corrupted: np.ndarray) -> dict[str, torch.Tensor]:
    """What mlm_loss reads: those of the batch, corrupted; masked_at (K,), flat indices; labels (K,)."""
    return batch.tensors() | {"input_ids": torch.from_numpy(corrupted.astype(np.int64)),
                              "masked_at": torch.from_numpy(np.flatnonzero(mask)),
                              "labels": torch.from_numpy(batch.input_ids[mask].astype(np.int64))}


def mlm_loss(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The cross-entropy of the masked tokens, summed (L_MLM, section 3.1).

    The MLM head runs on the masked positions only: a hook on the encoder keeps just these of its output. That
    works for every architecture whose head reads last_hidden_state."""
    def keep_masked(module, args, output):
        hidden = output.last_hidden_state.flatten(0, 1)                             # (B L, H)
        output.last_hidden_state = hidden[tensors["masked_at"]].unsqueeze(0)        # (1, K, H)
        return output

    hook = model.base_model.register_forward_hook(keep_masked)
    try:
        output = model(input_ids=tensors["input_ids"], attention_mask=tensors.get("attention_mask"))
    finally:
        hook.remove()
    return F.cross_entropy(output.logits[0].float(), tensors["labels"], reduction="sum")


# ---------------------------------------------------------------- training

def pretrain(model: torch.nn.Module, pieces: Pieces, masker: maskers.Masker, *, p: float, seed: int = 0,
             remask: bool = True, desc: str = "MLM", **training: object) -> float:
    """Trains `model` in place on blocks of text; returns the seconds that it took.

    p: the share of tokens to mask; remask: draws masks and corruption anew in each epoch; otherwise they stay
    the same, unless the masker reads the LM; training: epochs, lr, batch_size and more, as in loop.fit"""
    reader = LMReader(model)

    def make_batch(epoch, indices):
        mask_epoch = epoch if remask else 0
        batch, mask, corrupted = mask_batch(pieces, masker, p, seed, mask_epoch, indices, reader)
        return mlm_tensors(batch, mask, corrupted)

    return fit(model, pieces.length, make_batch, mlm_loss, seed=seed, desc=desc, **training)


# ---------------------------------------------------------------- the script

@torch.no_grad()
def held_out_loss(model: torch.nn.Module, pieces: Pieces) -> float:
    """Mean MLM loss on up to 1,000 blocks under random masks, p = 0.15; the same masks in every run.
    Raises UserError if it is not finite."""
    pieces = pieces.take(pieces.evenly_spaced(1000))
    total, count = 0.0, 0
    training = model.training
    model.to(device()).eval()
    # Small batches, as a masked token needs a logit for each word of the vocabulary.
    for indices in progress([*length_batches(pieces.length, tokens=2048)], "held-out loss"):
        batch, mask, corrupted = mask_batch(pieces, maskers.random, 0.15, 0, 0, indices)
        tensors = to_device(mlm_tensors(batch, mask, corrupted))
        with autocast(model):
            total += mlm_loss(model, tensors).item()
        count += int(mask.sum())
    model.train(training)
    loss = total / max(1, count)
    loop.check_numbers({"its loss": loss}, "the LM")
    return loss


def policy_settings(cfg: Config) -> dict:
    """The settings with which the policy of --masker was learned, or the last of several. Warns where one is
    used in another way, or with another LM."""
    for folder in maskers.folders_of(cfg.masker):
        settings = runs.read_run(folder).get("settings", {})
        p, epochs = settings.get("p"), settings.get("mlm_epochs")
        if settings and (p, epochs) != (cfg.p, cfg.epochs) and not runs.is_tiny(cfg.lm):
            print(f"WARNING: this policy was learned with --p={p} --epochs={epochs}, and is used with "
                  f"--p={cfg.p} --epochs={cfg.epochs}")
        if runs.is_another_lm(settings, cfg.lm, models.weights_of(cfg.lm)):
            print(f"WARNING: this policy was learned with the LM {settings['lm']}, whose hidden states it "
                  f"reads, and is used with {cfg.lm}")
    return settings


def try_masker(cfg: Config, pieces: Pieces, masker: maskers.Masker, lm: LMReader, tokenizer) -> None:
    """Masks up to 16 blocks, and says how many tokens that are, and which; warns where they are less than
    half of the budget."""
    some = pieces.evenly_spaced(16)
    batch, mask, _ = mask_batch(pieces, masker, cfg.p, cfg.seed, 0, some, lm)
    wanted = maskers.budget_of(batch, cfg.p).sum()
    print(f"{cfg.masker} masks {mask.sum() / len(some):.1f} tokens of a block at p = {cfg.p:g}")
    masked = tokenizer.convert_ids_to_tokens(batch.input_ids[mask][:12])
    if masked:
        print(f"the first of them: {' '.join(masked)}")
    if cfg.masker != "none" and 2 * mask.sum() < wanted:
        print(f"WARNING: in {len(some)} blocks {cfg.masker} masks {mask.sum()} tokens, and the budget is "
              f"{wanted}; do its units (words?) suit this text?")


def log_held_out(folder: Path, step: int, loss: float) -> None:
    """Adds the held-out loss after some steps to metrics.jsonl, and draws the curve, held_out.png."""
    file = folder / "metrics.jsonl"
    # After a kill, the steps since the last checkpoint are taken again.
    rows = [row for row in runs.read_rows(file) if row["step"] < step]
    rows.append({"step": step, "held_out_loss": loss})
    runs.write_rows(file, rows)
    held_out_curve(rows, folder / "held_out.png")


def what_was_done(cfg: Config, pieces: Pieces, steps: int, before: float | None, after: float | None) -> str:
    """What the card of the adapted LM says."""
    text = f"""{steps:,} steps of masked language modeling, {cfg.batch_size} blocks per step, from \
{len(pieces):,} blocks of
text ({(pieces.end - pieces.begin).sum():,} tokens). The words to mask were chosen by
`{runs.portable(cfg.masker)}`, at a rate of {cfg.p}."""
    if before is not None:
        text += f"""

Loss of held-out text under 15 % random masks: {before:.3f} nats before, {after:.3f} after (perplexity
{np.exp(before):.2f}, {np.exp(after):.2f})."""
    return text


def open_text(cfg: Config, tokenizer) -> tuple[Data, Split]:
    """The data set, and the text of it that pre-training reads. Fills in cfg.read."""
    data = data_prep.load(cfg.dataset, tokenizer, cfg.dev_share, cfg.spacy_model, columns=cfg,
                          corpus=cfg.corpus)
    if cfg.eval_every and "dev" not in data.splits:
        raise UserError(f"--eval_every: {cfg.dataset} has no dev split to look at; --dev_share=0.1 cuts one "
                        "from train; put a single .txt into a folder as train.txt, and pass the folder")
    if cfg.labelled:
        data["train"].limit_labels(cfg.labelled, cfg.seed)
    cfg.read = cfg.read or data_prep.what_to_read(data)
    text = data_prep.text_to_read(data, cfg.read)
    what = "train and corpus" if cfg.read == "both" else text.folder.name
    print(f"Pre-training reads {what}: {len(text):,} texts (--read=train, corpus or both chooses)")
    return data, text


def main(cfg: Config) -> None:
    devices.use_fast_path(cfg.fast)
    masker = maskers.find(cfg.masker)
    # Taken at once, so that it is that of the code which was loaded, should the file be edited now.
    masker_file = maskers.checksum_of(cfg.masker)
    if cfg.out is None:
        name = re.sub(r"[/:]+", "-", cfg.masker)
        cfg.out = f"runs/pretrain-{Path(cfg.dataset).stem}-{Path(cfg.lm).name}-{name}-{cfg.seed}"

    # 1. the LM, and the task's text in blocks
    tokenizer = load_tokenizer(cfg.lm)
    model = load_lm(cfg.lm, cfg.seed)
    data, text = open_text(cfg, tokenizer)
    if cfg.dropout is not None:
        set_dropout(model, cfg.dropout)
    cfg.max_len = max_len_of(model, cfg.max_len or data.block_len)
    sources = {"data": data.checksum, "weights": weights_of(cfg.lm), "masker_file": masker_file}
    if maskers.is_learned(cfg.masker):
        sources["policy"] = policy_settings(cfg)
    run = Run(cfg.out, runs.settings_of(cfg, without=("micro_batch",), **sources))
    if run.done:
        return
    pieces = blocks(text, cfg.max_len)
    print(f"{len(pieces):,} blocks of at most {cfg.max_len} tokens, {pieces.length.mean():.1f} on average, "
          f"on {device()}")

    # 2. a masker that fails, or whose units do not fit this text, shows it now
    try_masker(cfg, pieces, masker, LMReader(model), tokenizer)

    # 3. pre-train; the loss of held-out text before and after, and on the way where that is asked for
    held_out = blocks(data.splits["dev"], cfg.max_len) if "dev" in data.splits else None
    before = held_out_loss(model, held_out) if held_out else None
    steps, seconds = 0, 0.0
    checkpoint = run.folder / "checkpoint.pt"
    if runs.is_main_process() and not checkpoint.exists():
        # What a run with other flags may have left here.
        for name in ("metrics.jsonl", "held_out.png"):
            runs.remove(run.folder / name)
        if cfg.eval_every:
            log_held_out(run.folder, 0, before)

    def look(step):
        if cfg.eval_every and step % cfg.eval_every == 0:
            log_held_out(run.folder, step, held_out_loss(model, held_out))

    if cfg.masker != "none":
        steps = steps_of(pieces.length, cfg.batch_size, cfg.epochs, cfg.max_steps)
        seconds = pretrain(model, pieces, masker, p=cfg.p, epochs=cfg.epochs, lr=cfg.lr,
                           batch_size=cfg.batch_size, max_steps=cfg.max_steps, micro_batch=cfg.micro_batch,
                           warmup=cfg.warmup, weight_decay=cfg.weight_decay, seed=cfg.seed,
                           distributed=True, checkpoint=checkpoint, after_step=look, desc=f"MLM {cfg.masker}")
    if not runs.is_main_process():
        return
    # An LM whose loss is not finite is not saved: held_out_loss raises UserError. Without a dev split, some
    # of the training text shows it.
    loss = held_out_loss(model, held_out or pieces.take(pieces.evenly_spaced(16)))
    after = loss if held_out else None
    if cfg.eval_every:
        log_held_out(run.folder, steps, after)

    # 4. a Hugging Face folder
    save_lm(run.folder, model, tokenizer)
    models.write_card(run.folder, "pretrain.py", cfg, "further pre-trained",
                      what_was_done(cfg, pieces, steps, before, after), library_name="transformers",
                      pipeline_tag="fill-mask")
    run.finish(held_out_loss=[before, after], seconds=round(seconds, 3), base_model=runs.base_of(cfg.lm))
    runs.remove(checkpoint)
    print(f"saved {run.folder}: {steps:,} steps in {seconds:.1f} s")
    if held_out:
        print_perplexity(before, after)


def print_perplexity(before: float, after: float) -> None:
    """Of held-out text, from its MLM loss before and after pre-training."""
    print(f"perplexity of held-out text under random masks, p = 0.15: {np.exp(before):.2f} before, "
          f"{np.exp(after):.2f} after")
    if after > before:
        print("WARNING: the LM became worse on the text of dev; where that is like the corpus "
              "(in the toy world it is not, and this is no fault), a smaller --lr or more --epochs may help")


if __name__ == "__main__":
    runs.start(main, Config, tiny=toy.PRETRAIN)
