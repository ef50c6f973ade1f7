"""Fine-tunes an LM, predicts a split, and adds a line to the results: what all finetune_*.py have in common.

    evaluate(cfg, sys.modules[__name__])      # main() of finetune_cls.py, which is itself the task

With --predict it does not train: it predicts rows without labels with a fine-tuned model.
"""
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd

import data_prep
from nmg import loop
from support import devices, runs
from support.data import Pieces
from support.models import (
    load_finetuned,
    load_lm,
    load_tokenizer,
    max_len_of,
    save_lm,
    weights_of,
    write_card,
)
from support.runs import Run, UserError
from support.sources import DataFlags, read_to_predict, suffix_of

# Of more labels, F1 of each is not shown.
MOST_LABELS = 20


@dataclass
class EvaluationConfig(DataFlags):
    """The flags that all finetune_*.py share; each adds its own."""
    lm: str = "tiny"                # tiny, a folder of pretrain.py, a Hugging Face folder or hub name
    predict: str | None = None      # a file of rows to predict with a fine-tuned --lm, without training
    split: str | None = None        # scored: test, or dev to choose by; None: test if there is one
    labelled: int | None = None     # texts of train whose labels are used, drawn by seed; None: all
    seed: int = 0                   # of head, order and dropout, three separate streams
    micro_batch: int | None = None  # pieces of one forward pass; fewer need less memory; None: batch_size
    warmup: float = 0.0             # share of the steps in which lr rises; 0.1 is usual
    weight_decay: float = 0.0       # AdamW's; 0.01 is usual
    fast: bool = True               # bf16 or fp16 where that is fast, cheaper attention on a CPU
    dev_share: float | None = None  # share of train cut as dev if there is none; None: 0.1, but none of
                                    # data sets with a name
    results: str = "results.jsonl"  # one line per finished evaluation
    out: str | None = None          # folder of the run; None: runs/KIND-DATASET-LM-SPLIT-SEED-HASH. Of
                                    # --predict=new.csv a file; None: new.predicted.csv beside it
    row: str | None = None          # what run_all.sh calls it, MASKER,--flag=value; tables show the flags
    save_model: bool = True         # keep the fine-tuned model in `out`, a Hugging Face folder; False: none


def evaluate(cfg: EvaluationConfig, task: ModuleType) -> None:
    """Fine-tunes cfg.lm on train (all processes of torchrun), predicts a split, and adds a line of results;
    with cfg.predict see `predict`.

    task: finetune_cls, finetune_qa, or another file with their interface
    cfg: the Config of that file"""
    devices.use_fast_path(cfg.fast)
    if cfg.predict:
        predict(cfg, task)
        return
    check_results(Path(cfg.results))

    # 1. the LM and the data
    tokenizer = load_tokenizer(cfg.lm)
    lm = load_lm(cfg.lm, cfg.seed)
    data = data_prep.load(cfg.dataset, tokenizer, cfg.dev_share, kind=task.KIND, columns=cfg)
    origin = origin_of(cfg.lm, cfg.row)
    pretraining = origin["settings"]
    cfg.max_len = max_len_of(lm, cfg.max_len)
    cfg.split = data.scored_split(cfg.split)
    check_pretraining(pretraining, cfg, data.checksum)
    if cfg.labelled:
        data["train"].limit_labels(cfg.labelled, cfg.seed)
    data.check_labels("train", cfg.split)
    train = task.pieces_of(data["train"], cfg.max_len).labelled_only()
    check_classes(train)
    evaluated = task.pieces_of(data[cfg.split], cfg.max_len)
    print(f"--max_len={cfg.max_len} cuts {cut_share(train):.1%} of the texts of train, and "
          f"{cut_share(evaluated):.1%} of those of {cfg.split}.", flush=True)

    # 2. the folder of this run
    settings = runs.settings_of(cfg, without=("results", "row", "save_model", "predict", "micro_batch"),
                                data=data.checksum, weights=weights_of(cfg.lm), pretraining=pretraining)
    if cfg.out is None:
        name = f"{Path(cfg.dataset).stem}-{Path(cfg.lm).name}-{cfg.split}-{cfg.seed}"
        cfg.out = f"runs/{task.KIND}-{name}-{runs.digest(settings)}"
    run = Run(cfg.out, settings)

    # 3. fine-tune, and predict every example
    if not run.done:
        started = time.monotonic()
        model = task.finetune(lm, train, epochs=cfg.epochs, lr=cfg.lr, batch_size=cfg.batch_size,
                              micro_batch=cfg.micro_batch, warmup=cfg.warmup,
                              weight_decay=cfg.weight_decay, seed=cfg.seed, distributed=True)
        trained = time.monotonic()
        if not runs.is_main_process():
            return
        lines = task.predictions(model, evaluated)
        scores = scores_of(lines, task)
        runs.write_rows(run.folder / "predictions.jsonl", lines)
        if cfg.save_model:
            save_lm(run.folder, model, tokenizer)
            text = "\n\n".join(in_words(scores, lines, cfg.split, task))
            write_card(run.folder, f"finetune_{task.KIND}.py", cfg, "fine-tuned", text,
                       library_name="transformers")
        seconds = {"pretrain": origin["seconds"], "train": trained - started,
                   "score": time.monotonic() - trained}
        run.finish(scores=scores, examples=len(lines), seconds=seconds,
                   held_out_loss=origin["held_out_loss"], base_model=runs.base_of(cfg.lm))

    # 4. one line of results, and the end of the run in plain words
    if not runs.is_main_process():
        return
    add_result(Path(cfg.results), run, cfg.row)
    report(run.folder, cfg.split, task)


def report(folder: Path, split: str, task: ModuleType) -> None:
    """Prints what a finished run has scored, and where its predictions and its model lie."""
    run = runs.read_run(folder)
    lines = runs.read_rows(folder / "predictions.jsonl")
    print(*in_words(run["scores"], lines, split, task), sep="\n")
    print(f"Predictions: {folder}/predictions.jsonl")
    if (folder / "config.json").exists():
        print(f"Model: {folder}")
        if hasattr(task, "outputs"):
            print(f"It predicts new rows: python finetune_{task.KIND}.py --predict=FILE --lm={folder}")
    else:
        print("Model: not saved (--save_model=False)")


def in_words(scores: dict[str, float], lines: list[dict], split: str, task: ModuleType) -> list[str]:
    """What was scored, in sentences; with few classes also the F1 of each."""
    of_all = [f"{name} {score:.2f}" for name, score in scores.items()]
    sentences = [f"Scores on {split} ({len(lines):,} examples), in percent: {', '.join(of_all)}"]
    if hasattr(task, "f1_by_label"):
        by_label = [f"{label} {100 * f1:.2f}" for label, f1 in task.f1_by_label(lines).items()]
        if len(by_label) <= MOST_LABELS:
            sentences.append(f"F1 by label: {', '.join(by_label)}")
    return sentences


def check_classes(train: Pieces) -> None:
    """Raises UserError if all texts that are learned from are of one class (of a task that has classes)."""
    split = train.split
    if hasattr(split, "label") and len(set(split.label[train.text_ids])) == 1:
        label = split.labels[split.label[train.text_ids[0]]]
        raise UserError(f"all {len(train)} labelled texts of train have the label {label!r}; two labels are "
                        "needed (more --labelled, or a smaller --dev_share)")


def cut_share(pieces: Pieces) -> float:
    """The share of texts whose last token is in no piece."""
    texts = np.unique(pieces.text_ids)
    end = np.zeros(len(pieces.split), np.int64)                     # (N,) where the last piece of a text ends
    np.maximum.at(end, pieces.text_ids, pieces.end)
    return float(np.mean(end[texts] < pieces.split.token_start[texts + 1]))


def scores_of(lines: list[dict], task: ModuleType) -> dict[str, float]:
    """The scores of all predictions of a split. Raises UserError if a prediction or a score is infinite or
    NaN."""
    for line in lines:
        loop.check_numbers(line, "predictions")
    warn_of_one_answer(lines)
    scores = {name: float(score) for name, score in task.summary(lines).items()}
    loop.check_numbers(scores, "scores")
    return scores


def warn_of_one_answer(lines: list[dict]) -> None:
    """A classifier that gives all texts one label has learned nothing."""
    first = lines[0]
    if "predicted" not in first:
        return
    constant = all(line["predicted"] == first["predicted"] for line in lines)
    if constant and any(line.get("gold") != first.get("gold") for line in lines):
        print(f"WARNING: all texts were given the label {first['predicted']}: fine-tuning learned nothing; "
              "more --epochs or a larger --lr may help")


def origin_of(lm: str, row: str | None = None) -> dict:
    """run.json of the pre-training that made an LM. A stand-in with the masker "none" for other LMs, and for
    the rows none and linear of run_all.sh, which take any LM as it is."""
    run = runs.read_run(lm)
    is_base = (row or "").partition(",")[0] in ("none", "linear")
    if is_base or "masker" not in run.get("settings", {}):
        settings = {"lm": runs.portable(lm), "weights": weights_of(lm), "masker": "none"}
        run = {"settings": settings, "seconds": 0.0, "held_out_loss": None}
    return run


def check_pretraining(pretraining: dict, cfg: EvaluationConfig, data: str) -> None:
    """Raises UserError if the LM's masks may have been chosen with labels that fine-tuning must not see.
    Warns if dev is scored, but pre-training prepared the data in another way.

    pretraining: its settings; data: the checksum of the data set and of how it was prepared. Earlier
    pre-training, and the data of a learned policy, are not checked."""
    same_name = runs.portable(pretraining.get("dataset")) == runs.portable(cfg.dataset)
    same_cut = pretraining.get("data") == data
    # With --corpus the checksum is that of both files, so that only the flag tells.
    if pretraining.get("corpus"):
        same_cut = same_name and pretraining.get("dev_share") == cfg.dev_share
    if cfg.split == "dev" and same_name and not same_cut:
        print(f"WARNING: {cfg.dataset} was prepared in another way for the pre-training of this LM (another "
              "--dev_share, other columns or files?), so that it may have read texts of dev")
    if not cfg.labelled or pretraining["masker"] != "label":
        return
    # Which texts are labelled depends on these, and on what is cut from train.
    if (pretraining["labelled"], pretraining["seed"]) != (cfg.labelled, cfg.seed) or not same_cut:
        raise UserError(f"--labelled={cfg.labelled}: the masks of this LM may have read other labels; "
                        f"pre-train it with --labelled={cfg.labelled} --seed={cfg.seed}, too, and with the "
                        "same data and --dev_share")


# ---------------------------------------------------------------- one line of results

def check_results(path: Path) -> None:
    """Rewrites the file of results unchanged, so that a bad path fails before hours of training and not after
    them."""
    with runs.locked(path):
        runs.write_rows(path, runs.read_rows(path))


def add_result(path: Path, run: Run, row: str | None = None) -> None:
    """Appends a finished evaluation to the results, unless a line with the same "config" and row is there.

    row: what run_all.sh calls it."""
    settings = run.settings
    finished = runs.read_run(run.folder)
    pretraining = settings["pretraining"]
    line = {"dataset": settings["dataset"], "lm": pretraining["lm"], "masker": pretraining["masker"],
            "row": row, "seed": settings["seed"], "split": settings["split"],
            "examples": finished["examples"], "metrics": list(finished["scores"]), **finished["scores"],
            "held_out_loss": finished["held_out_loss"], "seconds": finished["seconds"],
            "predictions": str(run.folder / "predictions.jsonl"), "config": settings,
            "versions": finished["versions"]}
    with runs.locked(path):
        before = runs.read_rows(path)
        for other in before:
            if (other.get("config"), other.get("row")) != (settings, row):
                continue
            if any(other.get(name) != score for name, score in finished["scores"].items()):
                print(f"WARNING: {path} keeps other scores of the same settings (of other code, or another "
                      f"machine?); remove the line that has {other.get('predictions')}, and start this "
                      "command again")
            return
        runs.write_rows(path, [*before, line])


# ---------------------------------------------------------------- predicting rows without labels

def predict(cfg: EvaluationConfig, task: ModuleType) -> None:
    """Predicts every row of the file cfg.predict with the fine-tuned model cfg.lm, and writes the rows in the
    same order, with task.outputs behind their own columns. Nothing is trained. Labels are not read.

    task: as in evaluate. A row without text stays, and nothing is predicted for it."""
    if not runs.is_main_process():
        return
    if not hasattr(task, "outputs"):
        raise UserError(f"--predict={cfg.predict}: finetune_{task.KIND}.py does not predict rows: it has no "
                        "`outputs`")
    out = predicted_file(cfg)

    # 1. the model, with the length that it was fine-tuned with, unless the flag says otherwise
    model = load_finetuned(cfg.lm, task.AUTO_CLASS)
    tokenizer = load_tokenizer(cfg.lm)
    settings = runs.read_run(cfg.lm).get("settings", {})
    if "max_len" not in cfg.given:
        cfg.max_len = settings.get("max_len", cfg.max_len)
    cfg.max_len = max_len_of(model, cfg.max_len)
    labels = [model.config.id2label[i] for i in range(model.config.num_labels)]

    # 2. the rows; of a text with several questions, a row for each
    records = []
    rows = []
    # Those of `rows` that have text; the same dicts, so that what is added to one is written with the other.
    predicted = []
    learned_text = settings.get("text", cfg.text)
    for record, own in read_to_predict(Path(cfg.predict), cfg.text, learned_text, task.KIND):
        own = [dict(row) for row in own]
        rows += own
        if record:
            records.append(record)
            predicted += own

    # 3. predict
    with tempfile.TemporaryDirectory() as folder:
        split = data_prep.split_to_predict(records, tokenizer, labels, Path(folder, "new"), cfg.predict)
        pieces = task.pieces_of(split, cfg.max_len)
        print(f"{len(predicted):,} of {len(rows):,} rows have text; {cut_share(pieces):.1%} of the texts are "
              f"cut to {cfg.max_len} tokens", flush=True)
        # The first example tells the names of the new columns, before hours of prediction.
        columns = [*task.outputs(model, pieces.take(np.arange(1)))[0]]
        for name in columns:
            if any(name in row for row in rows):
                raise UserError(f"{cfg.predict}: has a column {name!r} already, which is one of the "
                                "predictions; rename it")
        outputs = task.outputs(model, pieces)
    for row in rows:
        row.update(dict.fromkeys(columns))
    for row, output in zip(predicted, outputs, strict=True):
        row.update(output)
    write_predicted(out, rows)
    print(f"Predictions: {out}, with the columns {', '.join(columns[:MOST_LABELS])} behind those of "
          f"{cfg.predict}")


def predicted_file(cfg: EvaluationConfig) -> Path:
    """The file that --predict writes. Raises UserError if it is there already."""
    source = Path(cfg.predict)
    if not source.is_file():
        raise UserError(f"--predict={cfg.predict}: no such file; its formats are those of --dataset")
    suffix = suffix_of(source)
    if suffix not in DELIMITERS:
        suffix = ".jsonl"
    stem = Path(source.name.removesuffix(".gz")).stem
    out = Path(cfg.out or source.with_name(f"{stem}.predicted{suffix}"))
    if out.suffix.lower() not in (*DELIMITERS, ".jsonl"):
        raise UserError(f"--out={out}: predictions are written as .csv, .tsv or .jsonl")
    if out.exists():
        raise UserError(f"--out={out}: is there already; remove it, or choose another --out")
    # A folder that takes no files shows it now, and not after hours of prediction.
    tempfile.TemporaryFile(dir=runs.target_of(out).parent).close()
    return out


# Tables, by the suffix of their file; other files hold JSON objects, one a line.
DELIMITERS = {".csv": ",", ".tsv": "\t"}


def write_predicted(out: Path, rows: list[dict]) -> None:
    # Dates and the like, which parquet has, are written as text.
    plain = [json.loads(json.dumps(row, default=str)) for row in rows]
    delimiter = DELIMITERS.get(out.suffix.lower())
    if not delimiter:
        runs.write_rows(out, plain)
        return
    # A cell that holds a list or an object has it as JSON.
    for row in plain:
        row |= {name: json.dumps(value) for name, value in row.items() if isinstance(value, list | dict)}
    # As objects, so that whole numbers stay whole where a cell is empty.
    table = pd.DataFrame(plain, dtype=object)
    with runs.atomic_write(out) as partial:
        table.to_csv(partial, sep=delimiter, index=False, lineterminator="\n", errors="backslashreplace")


if __name__ == "__main__":
    print("error: run finetune_cls.py or finetune_qa.py, which use this file", file=sys.stderr)
    sys.exit(2)
