"""Fine-tunes an LM, predicts a split, and adds a line to the results: what all finetune_*.py have in common.

    evaluate(cfg, sys.modules[__name__])      # main() of finetune_cls.py, which is itself the task
"""
import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

import data_prep
from nmg import loop, runs
from nmg.data import Pieces, Split
from nmg.models import load_lm, load_tokenizer, max_len_of, save_lm, weights_of
from nmg.runs import Run, UserError
from nmg.sources import Columns


@dataclass
class EvaluationConfig(Columns):
    """The flags that all finetune_*.py share; each adds its own."""
    lm: str = "tiny"                # tiny, a folder of pretrain.py, a Hugging Face folder or hub name
    split: str | None = None        # scored: test, or dev to choose by; None: test if there is one
    labelled: int | None = None     # texts of train whose labels are used, drawn by seed; None: all
    seed: int = 0                   # of head, order and dropout, three separate streams
    micro_batch: int | None = None  # pieces of one forward pass; fewer need less memory; None: batch_size
    warmup: float = 0.0             # share of the steps in which lr rises; 0.1 is usual
    weight_decay: float = 0.0       # AdamW's; 0.01 is usual
    fast: bool = True               # bf16 or fp16 where that is fast, cheaper attention on a CPU
    dev_share: float | None = None  # share of train to cut as dev where there is none; None: 0.1 for paths
    results: str = "results.jsonl"  # one line per finished evaluation
    out: str | None = None          # folder of predictions; None: runs/KIND-DATASET-LM-SPLIT-SEED-HASH
    row: str | None = None          # what run_all.sh calls it, MASKER,--flag=value; tables show the flags
    save_model: bool = False        # keep the fine-tuned model in `out`, as a Hugging Face folder


def evaluate(cfg: EvaluationConfig, task: ModuleType, **options) -> None:
    """Fine-tunes cfg.lm on train (all processes of torchrun), predicts a split, and adds a line of results.

    task: finetune_cls, finetune_qa, or another file with their interface
    cfg: the Config of that file; options: more keyword arguments of its pieces_of"""
    loop.use_fast_path(cfg.fast)
    check_results(Path(cfg.results))

    # 1. the LM and the data
    tokenizer = load_tokenizer(cfg.lm)
    lm = load_lm(cfg.lm, cfg.seed)
    data = data_prep.load(cfg.dataset, tokenizer, cfg.dev_share, kind=task.KIND, columns=cfg)
    origin = origin_of(cfg.lm)
    pretraining = origin["settings"]
    cfg.max_len = max_len_of(lm, cfg.max_len)
    if cfg.split is None:
        cfg.split = "test" if "test" in data.splits else "dev"
    if cfg.split not in ("dev", "test"):
        raise UserError(f"--split={cfg.split}: must be dev or test")
    check_pretraining(pretraining, cfg, data.checksum)
    if cfg.labelled:
        data["train"].limit_labels(cfg.labelled, cfg.seed)
    data.check_labels("train", cfg.split)
    train = task.pieces_of(data["train"], cfg.max_len, **options).labelled_only()
    evaluated = task.pieces_of(data[cfg.split], cfg.max_len, **options)
    print(f"--max_len={cfg.max_len} cuts {cut_share(train):.1%} of the texts of train, and "
          f"{cut_share(evaluated):.1%} of those of {cfg.split}.", flush=True)

    # 2. the folder of this run
    settings = runs.settings_of(cfg, without=("results", "row", "save_model"), data=data.checksum,
                                weights=weights_of(cfg.lm), pretraining=pretraining)
    if cfg.out is None:
        name = f"{Path(cfg.dataset).stem}-{Path(cfg.lm).name}-{cfg.split}-{cfg.seed}"
        cfg.out = f"runs/{task.KIND}-{name}-{runs.digest(settings)}"
    run = Run(cfg.out, settings)
    if run.done and cfg.save_model and not (run.folder / "config.json").exists():
        raise UserError(f"--save_model: {run.folder} is a finished run without its model; remove it, or "
                        "choose another --out")

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
        scores = scores_of(lines, task, evaluated.split)
        if not evaluated.split.has_gold:
            lines = [without_scores(line, task) for line in lines]
        runs.write_rows(run.folder / "predictions.jsonl", lines)
        if cfg.save_model:
            save_lm(run.folder, model, tokenizer)
        seconds = {"pretrain": origin["seconds"], "train": trained - started,
                   "score": time.monotonic() - trained}
        run.finish(scores=scores, examples=len(lines), seconds=seconds,
                   held_out_loss=origin["held_out_loss"])

    # 4. one line of results
    if not evaluated.split.has_gold:
        print(f"WARNING: {cfg.split} has no labels, so that nothing is scored (predictions: {run.folder})")
    elif runs.is_main_process():
        add_result(Path(cfg.results), run, cfg.row)


def cut_share(pieces: Pieces) -> float:
    """The share of texts whose last token is in no piece."""
    texts = np.unique(pieces.text_ids)
    end = np.zeros(len(pieces.split), np.int64)                     # (N,) where the last piece of a text ends
    np.maximum.at(end, pieces.text_ids, pieces.end)
    return float(np.mean(end[texts] < pieces.split.token_start[texts + 1]))


def scores_of(lines: list[dict], task: ModuleType, split: Split) -> dict[str, float]:
    """The scores of all predictions of a split; none where it has no labels. Raises UserError if a prediction
    or a score is infinite or NaN."""
    for line in lines:
        loop.check_numbers(line, "predictions")
    if not split.has_gold:
        return {}
    warn_of_one_answer(lines)
    scores = {name: float(score) for name, score in task.summary(lines).items()}
    loop.check_numbers(scores, "scores")
    return scores


def without_scores(line: dict, task: ModuleType) -> dict:
    """A prediction of something that has no label."""
    return {name: value for name, value in line.items() if name not in ("gold", *task.METRICS)}


def warn_of_one_answer(lines: list[dict]) -> None:
    """A classifier that gives all texts one label has learned nothing."""
    first = lines[0]
    constant = all(line.get("predicted") == first.get("predicted") for line in lines)
    if constant and any(line.get("gold") != first.get("gold") for line in lines):
        print(f"WARNING: all texts were given the label {first['predicted']}: fine-tuning learned nothing; "
              "more --epochs or a larger --lr may help")


def origin_of(lm: str) -> dict:
    """run.json of the pre-training that made an LM; of any other LM, a stand-in with the masker "none"."""
    run = runs.read_run(lm)
    if "masker" not in run.get("settings", {}):
        settings = {"lm": lm, "weights": weights_of(lm), "masker": "none"}
        run = {"settings": settings, "seconds": 0.0, "held_out_loss": None}
    return run


def check_pretraining(pretraining: dict, cfg: EvaluationConfig, data: str) -> None:
    """Raises UserError if the LM's masks may have been chosen with labels that fine-tuning must not see.
    Warns if dev is scored, but pre-training prepared the data in another way.

    pretraining: its settings; data: the checksum of the data set and of how it was prepared. Earlier
    pre-training, and the data of a learned policy, are not checked."""
    if cfg.split == "dev" and pretraining.get("dataset") == cfg.dataset and pretraining["data"] != data:
        print(f"WARNING: {cfg.dataset} was prepared in another way for the pre-training of this LM (another "
              "--dev_share, other columns or files?), so that it may have read texts of dev")
    if not cfg.labelled or pretraining["masker"] != "label":
        return
    if (pretraining["labelled"], pretraining["seed"]) != (cfg.labelled, cfg.seed):
        raise UserError(f"--labelled={cfg.labelled}: the masks of this LM may have read other labels; "
                        f"pre-train it with --labelled={cfg.labelled} --seed={cfg.seed}, too")


# ---------------------------------------------------------------- one line of results

def check_results(path: Path) -> None:
    """Rewrites the file of results unchanged, so that a bad path fails before hours of training and not after
    them."""
    try:
        with runs.locked(path):
            runs.write_rows(path, runs.read_rows(path))
    except UserError as e:
        raise UserError(f"--results={e}") from None


def add_result(path: Path, run: Run, row: str | None = None) -> None:
    """Appends a finished evaluation to the results, unless a line with the same "config" is there.

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
        if any(other.get("config") == line["config"] for other in before):
            print(f"{path} has a line of these settings already; remove it there to score edited code")
            return
        runs.write_rows(path, [*before, line])
    hidden = ("metrics", "config", "versions")
    shown = {name: value for name, value in line.items() if name not in hidden}
    print(json.dumps(shown))
