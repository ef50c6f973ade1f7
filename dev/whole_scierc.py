"""Writes a data set for more text of SciERC than a task of 200: as test those texts of dev and test that its
policies have not learned from (they played in half of the documents of all three splits), and train as it is.
As there is no dev, scripts cut a tenth of train off as dev. With --texts=2000 --seed=S train is as many of
its texts, drawn anew for each seed, and dev is 300 of the others.

    python dev/whole_scierc.py --plan=results/plans/scierc-words.toml --lm=MINILM --out=runs/data/scierc-whole
"""
import json
import sys
from pathlib import Path

import fire

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import sources
from support.rng import rng_for
from tools import study


def main(plan: str, lm: str, out: str, dataset: str = "scierc", texts: int | None = None,
         seed: int = 0) -> None:
    read = study.read_plan(Path(plan), study.Config(plan=plan, lm=lm, dataset=dataset))
    study.divide(read)
    new = {record["text"] for record in sources.find_source(f"{read.file.stem}-new").records("train")}
    source = sources.find_source(dataset)
    train = list(source.records("train"))
    scored = [*source.records("dev"), *source.records("test")]
    splits = {"train": train, "test": [record for record in scored if record["text"] in new]}
    if texts is not None:
        order = rng_for(seed, "texts").permutation(len(train))
        splits["train"] = [train[i] for i in order[:texts]]
        splits["dev"] = [train[i] for i in order[texts:texts + 300]]
    Path(out).mkdir(parents=True, exist_ok=True)
    for split, records in splits.items():
        lines = [json.dumps({"text": record["text"], "label": record["label"]}) for record in records]
        Path(out, f"{split}.jsonl").write_text("\n".join(lines) + "\n")
        print(split, len(lines))


if __name__ == "__main__":
    fire.Fire(main)
