"""Further pre-trains a masked LM on a task's own text, masking what a masker chooses. LM in, LM out.

    python pretrain.py                                                          # toycls, tiny LM, random masking
    python pretrain.py --dataset=chemprot --lm=bert-base-uncased --masker=whole --out=runs/chemprot-whole
    python pretrain.py --dataset=my_corpus.txt --lm=roberta-base --masker=my_maskers.py:rare
"""
import errno
import functools
import hashlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import data_prep
import loop
import maskers
import toy
from data_prep import Batch, Rows, Specials, blocks, gather
from loop import UserError, autocast, beside, by_length, checked, checkpoint_of, claim, cli, device, fit, pad_to, processes, timeless, to


def load_lm(name: str) -> torch.nn.Module:
    """A masked LM in fp32, from a folder, the hub, or the embedded `tiny`. Says loudly when its MLM head is newly initialised."""
    from transformers import AutoModelForMaskedLM
    from transformers.utils import logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = data_prep.find_lm(name)
    with data_prep.lm_errors(name):
        model, info = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=loop.attention_of_models(),
                                                           output_attentions=False, output_loading_info=True)
    new = sorted(k for k in info["missing_keys"] if not k.endswith(("decoder.weight", "decoder.bias")))
    if new:
        print(f"WARNING: {name} brings no weights for {', '.join(new)}: NEWLY INITIALISED, to be learned in pre-training", flush=True)
    return model


def fitting(model: torch.nn.Module, max_len: int | None, default: int, knob: str = "max_len") -> int:
    """The knob if the LM has that many positions (RoBERTa starts them after its padding index), else the default or its most."""
    tables = [m for n, m in model.named_modules() if n.endswith("position_embeddings") and isinstance(m, torch.nn.Embedding)]
    most = tables[0].num_embeddings - (-1 if tables[0].padding_idx is None else tables[0].padding_idx) - 1 if tables else 8192
    if max_len and max_len > most:
        raise UserError(f"--{knob}={max_len}: this LM takes at most {most} tokens")
    length = max_len or min(default, most)
    return length - length % pad_to()


def masked_rows(pieces: Rows, masker: maskers.Masker, p: float, seed: int, epoch: int, rows: np.ndarray, lm=None,
                width: int | None = None, multiple: int = 1) -> tuple[Batch, np.ndarray, np.ndarray]:
    """The batch of the given rows, its mask (B, L) and its corrupted ids (B, L): a function of (seed, epoch, row) alone."""
    batch = gather(pieces, rows, width, multiple)
    k = maskers.budget(batch, p)
    mask = masker(batch, k, maskers.RowRandom(seed, "mask", epoch, rows), lm)
    if np.shape(mask) != batch.ok.shape or mask.dtype != bool or (mask & ~batch.ok).any() or (mask.sum(1) > k).any():
        raise UserError(f"the masker {getattr(masker, '__name__', masker)!r} must return a bool (B, L), True only where batch.ok, "
                        "at most k[b] times in row b (maskers.pick does)")
    ids = maskers.corrupt(batch.ids, mask, maskers.RowRandom(seed, "corrupt", epoch, rows), pieces.specials.mask, pieces.specials.plain)
    return batch, mask, ids


def mlm_loss(model: torch.nn.Module, t: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy over the masked positions (inner problem of the paper, L_MLM). With `at` (M,), positions in the
    flattened batch, the head sees these hidden states alone; without, it sees all of them and `labels` (B, L) ignores -100.

    Any architecture: a hook gathers the base model's last hidden state, and the model's own head follows."""
    if "at" not in t:
        logits, labels = model(input_ids=t["input_ids"], attention_mask=t["attention_mask"]).logits.flatten(0, 1), t["labels"].flatten()
        return F.cross_entropy(logits.float(), labels, reduction="sum") / (labels != -100).sum().clamp(min=1)

    def keep_masked(module, args, output):
        output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[t["at"]].unsqueeze(0)      # (B, L, H) -> (1, M, H)
        return output

    hook = model.base_model.register_forward_hook(keep_masked)
    try:
        logits = model(input_ids=t["input_ids"], attention_mask=t.get("attention_mask")).logits[0]   # (M, V)
    finally:
        hook.remove()
    return F.cross_entropy(logits.float(), t["labels"], reduction="sum") / max(1, len(t["labels"]))     # 0 where nothing is masked


def tensors(batch: Batch, mask: np.ndarray, ids: np.ndarray, fast: bool = True) -> dict[str, torch.Tensor]:
    """What `mlm_loss` reads. On the fast path no attention mask goes where there is no padding, and M labels instead of B L."""
    out = {"input_ids": torch.from_numpy(ids.astype(np.int64))}
    if not fast or not batch.real.all():
        out["attention_mask"] = torch.from_numpy(batch.real.astype(np.int64))
    if fast:
        return out | {"at": torch.from_numpy(np.flatnonzero(mask)), "labels": torch.from_numpy(batch.ids[mask].astype(np.int64))}
    return out | {"labels": torch.from_numpy(np.where(mask, batch.ids, -100).astype(np.int64))}


def inputs(batch: Batch) -> dict[str, torch.Tensor]:
    """What every model reads of a batch as it stands."""
    out = {"input_ids": torch.from_numpy(batch.ids.astype(np.int64)), "attention_mask": torch.from_numpy(batch.real.astype(np.int64))}
    return out | ({"token_type_ids": torch.from_numpy(batch.types)} if batch.types is not None else {})


def hidden_states(model: torch.nn.Module, fast: bool = True) -> Callable[[Batch], torch.Tensor]:
    """What a masker gets as `lm`: batch -> (B, L, H) hidden states of the model as it is now, without dropout or gradients."""
    @torch.no_grad()
    def encode(batch: Batch) -> torch.Tensor:
        training, dev = model.training, device()
        model.to(dev).eval()
        with autocast(dev, fast):
            states = model.base_model(**to(inputs(batch), dev)).last_hidden_state.float()
        model.train(training)
        return states
    return encode


def pretrain(model: torch.nn.Module, pieces: Rows, masker: maskers.Masker, *, p: float = 0.15, epochs: int = 1, lr: float = 2e-5,
             batch_size: int = 16, max_len: int = 512, seed: int = 0, remask: bool = True, fast: bool = True,
             checkpoint: Path | None = None, key: str = "", desc: str = "MLM", quiet: bool = False) -> float:
    """Trains `model` in place on `pieces` (blocks of text); returns the mean loss. Dropout, order and masks are separate streams.

    remask: masks anew each epoch (meta-testing), or once for all epochs (meta-training), by the LM as it then is."""
    def make(epoch, rows):
        return tensors(*masked_rows(pieces, masker, p, seed, epoch if remask else 0, rows, ask, None if fast else max_len, pad_to()), fast)

    lm, tried, live = hidden_states(model, fast), False, False

    def ask(batch):
        nonlocal live
        if tried and not live:
            raise UserError("the masker asks for the LM's hidden states, but did not when it was tried on a row; it must ask in each call or in none")
        live = True
        return lm(batch)

    masked_rows(pieces, masker, p, seed, 0, np.arange(1), ask)       # a masker that reads the LM gives itself away
    tried = True
    if live and not remask:                                         # the LM as it came chooses, once
        mask = np.zeros((len(pieces), pieces.length.max()), bool)
        for rows in by_length(pieces.length):
            _, chosen, _ = masked_rows(pieces, masker, p, seed, 0, rows, lm)
            mask[rows, :chosen.shape[1]] = chosen
        masker, live = maskers.given(mask), False
    return fit(model, pieces.length, make, mlm_loss, epochs=epochs, batch_size=batch_size, lr=lr, seed=seed, fast=fast, live=live,
               checkpoint=checkpoint, key=key, desc=desc, quiet=quiet)


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, pieces: Rows) -> float:
    """Mean MLM loss on up to 1,000 blocks of held-out text under random masks (p = 0.15), the same for every masker and run."""
    dev, total, count = device(), 0.0, 0
    pieces = pieces.take(np.linspace(0, len(pieces) - 1, min(1000, len(pieces))).astype(np.int64))
    model.to(dev).eval()
    for rows in by_length(pieces.length):
        t = to(tensors(*masked_rows(pieces, maskers.find("random"), 0.15, 0, 0, rows)), dev)
        with autocast(dev):
            total += mlm_loss(model, t).item() * len(t["at"])
        count += len(t["at"])
    return total / max(1, count)


def save(model: torch.nn.Module | None, tok, folder: Path, run: dict, examples: list[dict] | None = None) -> None:
    """The folder of a finished run: run.json (every knob, versions, git commit, data checksum), where there is a model a Hugging
    Face folder (safetensors), and per-example predictions as predictions.jsonl. The run's checkpoint goes."""
    with beside(folder) as tmp:
        tmp.mkdir(parents=True)
        if model:
            model.save_pretrained(tmp)
            tok.save_pretrained(tmp)
        if examples is not None:
            (tmp / "predictions.jsonl").write_text("".join(json.dumps(e, ensure_ascii=False) + "\n" for e in examples), encoding="utf-8")
        (tmp / "run.json").write_text(json.dumps(run, indent=1))
    checkpoint_of(folder).unlink(missing_ok=True)


def digest(run: dict) -> str:
    """Eight characters that tell configurations apart (where the output goes is not one)."""
    return hashlib.sha256(json.dumps(timeless({k: v for k, v in run.items() if k not in ("out", "results")})).encode()).hexdigest()[:8]


def finish(folder: Path, results: str, run: dict, measures: tuple[str, ...]) -> None:
    """The line of a finished evaluation in results.jsonl: what was evaluated, its scores, and every knob; and beside it, in scores/, the
    measures of every example, (examples, measures) float32."""
    done, origin = json.loads((folder / "run.json").read_text()), run["pretraining"]
    each = np.array([[example[m] for m in measures] for example in map(json.loads, open(folder / "predictions.jsonl", encoding="utf-8"))], np.float32)
    examples = Path("scores") / f"{digest(run | {'into': str(folder)})}.npy"
    with beside(Path(results).parent / examples) as tmp, open(tmp, "wb") as f:
        np.save(f, each)
    add_result(results, {"dataset": run["dataset"], "lm": origin["base"], "masker": origin["masker"], "seed": run["seed"], "split": run["split"],
                         **done["scores"], "predictions": str(folder / "predictions.jsonl"), "examples": str(examples), "config": run,
                         "versions": done["versions"]})


def add_result(results: str, row: dict) -> None:
    """Appends the row to results.jsonl, unless a line of the same configuration is there."""
    path = Path(results)
    with loop.lock(path, wait=True) as f:
        f.seek(0)
        for n, line in enumerate(f, 1):
            try:
                if timeless(json.loads(line)["config"]) == timeless(row["config"]):
                    return
            except (json.JSONDecodeError, KeyError):
                raise UserError(f"{path}:{n}: not a line of results; mend or remove it, then start the same command again") from None
        size, line = os.fstat(f.fileno()).st_size, (json.dumps(row) + "\n").encode()
        if os.write(f.fileno(), line) < len(line):              # without a buffer, which `f` would write again
            os.ftruncate(f.fileno(), size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), results)
    print(json.dumps({k: v for k, v in row.items() if k not in ("config", "versions")}))


def lineage(lm: str) -> dict:
    """Where a LM comes from, for its line of results: the LM it started from, masker, p, seed and seconds of further pre-training."""
    file = Path(lm) / "run.json"
    run = json.loads(file.read_text()) if file.exists() else {}
    if "masker" not in run:                                         # not further pre-trained, though it may be fine-tuned
        run = {"lm": lm, "weights": weights_of(lm), "masker": "none"}
    kept = ("lm", "weights", "masker", "p", "epochs", "lr", "batch_size", "max_len", "remask", "fast", "spacy_model", "seed", "dataset", "data",
            "masker_file", "policy", "loss", "seconds")
    return {"base" if k == "lm" else k: run.get(k) for k in kept}


def weights_of(lm: str) -> str | None:
    """The checksum of the weights in a LM's folder, which may be trained on under the same name; None of `tiny` and of names on the hub."""
    files = sorted([*Path(lm).glob("*.safetensors"), *Path(lm).glob("pytorch_model*.bin")]) if lm != "tiny" else []
    return hashlib.sha256("".join(map(data_prep.checksum, files)).encode()).hexdigest() if files else None


def versions() -> dict[str, str]:
    import transformers
    try:
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True).stdout
    except OSError:
        commit = ""                                             # no git on this machine
    return {"torch": torch.__version__, "transformers": transformers.__version__, "commit": commit.strip(), "device": device().type,
            **({"gpu": torch.cuda.get_device_name(device())} if device().type == "cuda" else {}), "processes": processes()[1]}


@functools.cache
def tiny() -> Path:
    """The folder of the embedded LM: a tiny BERT, pre-trained once on the toy world's general text (about a minute), then cached."""
    tok, model = toy.tokenizer(), toy.blank()
    source = [toy.general(), toy.GENERAL, tok.backend_tokenizer.to_str(), model.config.to_dict()]
    folder = data_prep.CACHE / f"tiny-{hashlib.sha256(json.dumps(source).encode()).hexdigest()[:12]}"
    if not folder.exists():
        with loop.team(1), tempfile.TemporaryDirectory() as tmp:     # the same LM, however many processes ask for it
            text = Path(tmp) / "general"
            data_prep.write_split(({"text": t, "doc": i} for i, t in enumerate(toy.general())), tok, text, "text", [], "the toy world's general text")
            pieces = blocks(data_prep.Split(text), Specials.of(tok), 128)
            loss = pretrain(model, pieces, maskers.find("random"), **toy.GENERAL, desc="pre-training the embedded LM, once")
            save(model, tok, folder, {"loss": loss})
    return folder


def main(
    dataset: str = "toycls",            # a name (squad newsqa emrqa imdb chemprot toycls toyqa) or a path (see data_prep.py)
    lm: str = "tiny",                   # tiny, a Hugging Face folder or hub name; any AutoModelForMaskedLM with a fast tokenizer
    masker: str = "random",             # none random whole span entity punct oracle anti, nmg:FOLDER, sampled:FOLDER, or FILE.py:function
    p: float | None = None,             # share of tokens to mask, in (0, 1]; None: 0.15 (nmg and in the toy world: 0.05)
    epochs: int | None = None,          # None: 1 as in the paper's meta-test (nmg and in the toy world: 3)
    lr: float | None = None,            # None: 2e-5 (the toy world's own for tiny); raise it for smaller LMs
    batch_size: int | None = None,      # rows a step; the paper chose from 12, 16, 24; None: 16 (32 in the toy world)
    max_len: int | None = None,         # tokens a block; None: 512 for question answering, 256 else, or the LM's most
    seed: int = 0,                      # of masks, order and dropout (three separate streams)
    remask: bool = True,                # masks anew each epoch; False: the same in all (learned maskers then read the LM as it came)
    fast: bool = True,                  # False: the plain path (rows padded to max_len, head on all positions, fp32)
    raw: str | None = None,             # folder with raw files of a named data set
    dev_share: float | None = None,     # share of train to cut as dev where there is none; None: 0.1 for paths
    spacy_model: str | None = None,     # finds the named entities for --masker=entity; None: en_core_web_sm (the toy world's own rule there)
    out: str | None = None,             # folder of the adapted LM; None: runs/pretrain-DATASET-LM-MASKER-SEED
):
    run = checked(locals())
    mask = maskers.find(masker)
    if masker in ("oracle", "anti") and lineage(lm)["base"] != "tiny":
        raise UserError(f"--masker={masker}: knows the words of the toy world only; allowed with --lm=tiny")
    kind, _, what = masker.rpartition(":")
    out = Path(out or f"runs/pretrain-{Path(dataset).stem}-{Path(lm).name}-{'sampled-' * (kind == 'sampled')}{Path(what).name}-{seed}")
    tok = data_prep.load_tokenizer(lm)
    data = data_prep.load(dataset, tok, raw, dev_share)
    learned = maskers.is_learned(masker)                             # the paper's meta-test: few tokens, more epochs
    defaults = toy.ADAPT if lm == "tiny" else {"p": 0.05 if learned else 0.15, "epochs": 3 if learned else 1, "lr": 2e-5, "batch_size": 16}
    run |= {k: v for k, v in defaults.items() if run[k] is None}
    run |= {"out": str(out), "data": data.checksum, "weights": weights_of(lm)}
    if ":" in masker:
        file = Path(masker.partition(":")[2]) / "model.safetensors" if learned else Path(masker.rpartition(":")[0])
        run |= {"masker_file": data_prep.checksum(file), "policy": mask.keywords["policy"].about if learned else None}
    if claim(out, run):
        return
    corpus = data.corpus
    corpus.spacy_model = spacy_model or corpus.spacy_model
    model = load_lm(lm)
    length = fitting(model, max_len, 512 if data.kind == "qa" else 256)
    pieces = blocks(corpus, Specials.of(tok), length)
    print(f"{len(pieces):,} blocks of at most {length} tokens, {pieces.length.mean():.1f} on average, on {device()}")
    some = np.linspace(0, len(pieces) - 1, min(16, len(pieces))).astype(np.int64)        # a masker that fails (or must find entities) does so now
    batch, chosen, _ = masked_rows(pieces, mask, run["p"], seed, 0, some, hidden_states(model))
    if 2 * chosen.sum() < (asked := maskers.budget(batch, run["p"]).sum()) and masker != "none":
        print(f"WARNING: in {len(some)} blocks {masker} masks {chosen.sum()} tokens of {asked} that it may: do its units (words?) suit this text?")
    held_out = blocks(data.splits["dev"], pieces.specials, length) if "dev" in data.splits else None
    before = held_out_loss(model, held_out) if held_out else None
    begin, loss = time.time() - loop.spent(checkpoint_of(out), json.dumps(run)), 0.0
    if masker != "none":
        loss = pretrain(model, pieces, mask, p=run["p"], epochs=run["epochs"], lr=run["lr"], batch_size=run["batch_size"],
                        max_len=length, seed=seed, remask=remask, fast=fast, checkpoint=checkpoint_of(out),
                        key=json.dumps(run), desc=f"MLM {masker}")
    if processes()[0]:
        return
    run["seconds"] = round(time.time() - begin, 1)
    after = held_out_loss(model, held_out) if held_out else None
    save(model, tok, out, run | {"loss": loss, "held_out_loss": [before, after], "versions": versions()})
    on_held_out = f", on held-out text {before:.3f} before, {after:.3f} after" if held_out else ""
    print(f"saved {out}: loss {loss:.3f}{on_held_out}, {run['seconds']} s")


if __name__ == "__main__":
    cli(main)
