"""Raw files in, records out: the formats, and the data sets that have a name.

    def my_data():                          # then --dataset=my_data
        return from_files({"train": Path("my_data.csv")}, dev=0.1)
    DATASETS["my_data"] = my_data

data_prep.py turns the records into token arrays.
"""
import contextlib
import csv
import functools
import gzip
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

import torch
from filelock import AcquireReturnProxy, FileLock

from nmg import runs, toy
from nmg.runs import UserError

CACHE = Path(os.environ.get("NMG_CACHE", Path(__file__).resolve().parent.parent / "cache")).expanduser()
SPLITS = ("train", "dev", "test", "corpus")
# The split of a file by the first word of its name.
SPLIT_NAMES = {split: split for split in SPLITS} | {"val": "dev", "valid": "dev", "validation": "dev"}

# What reading a broken or a forbidden file raises; anything else is a defect of the program.
BROKEN = (OSError, TypeError, ValueError, AttributeError, EOFError, csv.Error, zlib.error)

# A line of CoNLL: one or more columns, and a tag such as O or B-PER.
CONLL = re.compile(r"\S.*\s(O|[BIESLUM]-[A-Za-z]\S*)")


# ---------------------------------------------------------------- raw files -> records
#
# A record is one text: {"text"}, {"text", "label"}, or {"text", "qas"} with a list of questions
# {"id", "question", "answers": [{"text", "start" (characters)}]}, and "references" where predictions are to
# be compared with other texts. "doc" numbers the documents: what is cut from train shares none with the
# rest.

@contextlib.contextmanager
def error_context(where: object) -> Iterator[None]:
    """Turns what reading a record raises into one sentence that begins with its place."""
    try:
        yield
    except KeyError as e:
        raise UserError(f"{where}: the field {e} is missing") from e
    except json.JSONDecodeError as e:
        several = e.msg == "Extra data" and e.lineno > 1
        advice = "; one object per line? Then call the file .jsonl" if several else ""
        raise UserError(f"{where}: not valid JSON: {e}{advice}") from e
    except BROKEN as e:
        raise UserError(f"{where}: {e}") from e


def lines(path: Path) -> Iterator[tuple[str, str]]:
    """("file:line", line) of a text file, gzipped or not."""
    open_text = gzip.open if path.name.lower().endswith(".gz") else open
    with error_context(path), open_text(path, "rt", encoding="utf-8-sig") as f:
        for n, line in enumerate(f, 1):
            yield f"{path}:{n}", line


def read(path: Path) -> Iterator[dict]:
    """The records of one file in any of the formats."""
    with error_context(path):
        yield from reader_of(path)(path)


def reader_of(path: Path) -> Callable[[Path], Iterator[dict]]:
    """The reader of a file, by its suffix; .txt and unknown ones are plain text unless their first line is
    JSON."""
    reader = READERS.get(suffix_of(path), read_lines)
    if reader is read_lines:
        first = next((line for _, line in lines(path) if line.strip()), "")
        # An opening brace, and then a quote, the closing brace, or the end of the line.
        if re.match(r'\s*\{\s*(["}]|$)', first):
            return read_jsonl
    return reader


def suffix_of(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def read_lines(path: Path) -> Iterator[dict]:
    refuse_conll(path)
    for _, line in lines(path):
        if line.strip():
            yield {"text": line.strip()}


def refuse_conll(path: Path) -> None:
    """UserError where most of the first lines are a token and its tag: tags would be read as text."""
    first = [line.strip() for _, line in itertools.islice(lines(path), 1000) if line.strip()]
    tagged = [line for line in first if CONLL.fullmatch(line)]
    if len(tagged) > len(first) / 2 or (first and first[0].startswith("-DOCSTART-")):
        raise UserError(f"{path}: looks like CoNLL (a token and its tag per line), but token classification "
                        "is not built in; convert it to .jsonl with the field text, or to one text per line")


def read_table(path: Path, delimiter: str = ",") -> Iterator[dict]:
    # Texts may be longer than what the csv module allows.
    csv.field_size_limit(2**31 - 1)
    table = csv.DictReader((line for _, line in lines(path)), delimiter=delimiter, strict=True)
    columns = ["text"] if table.fieldnames == ["text"] else ["text", "label"]
    if table.fieldnames and not set(columns) <= set(table.fieldnames):
        raise UserError(f"{path}: must have the columns text and label, or text alone, in its first line; it "
                        f"has {', '.join(table.fieldnames)}; rename yours")
    while True:
        # A quoted cell may run over lines: the place of a row is where it begins.
        with error_context(f"{path}:{table.line_num + 1}"):
            row = next(table, None)
            if row is None:
                return
            if None in row:
                raise ValueError("more cells than columns; put cells that hold a separator in double quotes")
            if delimiter == "\t" and any("\n" in str(cell) for cell in row.values()):
                raise ValueError("a quoted cell runs over several lines; double quotes that are plain "
                                 "characters, or use jsonl")
            yield text_record({name: row[name] for name in columns})


def read_jsonl(path: Path) -> Iterator[dict]:
    fields = None
    for where, line in lines(path):
        if not line.strip():
            continue
        with error_context(where):
            row = json.loads(line.strip())
            if not isinstance(row, dict):
                raise ValueError(f"a line must be one JSON object, but this is a {type(row).__name__}")
            # MRQA begins with a header.
            if row.keys() == {"header"}:
                continue
            record = mrqa_record(row) if "context" in row else text_record(row)
            fields = fields or record.keys()
            if record.keys() != fields:
                raise ValueError(f"its fields are {', '.join(record)}, but before it {', '.join(fields)}")
            yield record


def text_record(row: dict) -> dict:
    record = {"text": nonempty(row, "text")}
    if "label" in row:
        is_number = isinstance(row["label"], int)
        record["label"] = str(row["label"]) if is_number else nonempty(row, "label").strip()
    if "doc" in row:
        record["doc"] = row["doc"]
        if not isinstance(row["doc"], int) or not 0 <= row["doc"] < 2**31:
            raise ValueError(f"the field 'doc' must be a number from 0 to {2**31 - 1}, not {row['doc']!r}")
    return record


def nonempty(row: dict, name: str) -> str:
    """A field that must hold text; a lone surrogate, which no tokenizer takes, becomes "?"."""
    if not isinstance(row[name], str) or not row[name].strip():
        raise ValueError(f"the field {name!r} must be text and not empty, not {row[name]!r}")
    return row[name].encode("utf-8", "replace").decode()


def mrqa_record(row: dict) -> dict:
    """A context of MRQA, where the last character of an answer belongs to its span."""
    context = nonempty(row, "context")
    qas = []
    for qa in row["qas"]:
        answers = []
        for found in qa["detected_answers"]:
            for first, last in found["char_spans"]:
                text = context[first:last + 1]
                # MRQA found the answers up to case and punctuation.
                if re.sub(r"\W", "", text.lower()) != re.sub(r"\W", "", found["text"].lower()):
                    raise ValueError(f"the answer {found['text']!r} of question {qa['qid']!r} does not stand "
                                     f"at {first} to {last} of its context (found {text[:60]!r})")
                answers.append({"text": text, "start": first})
        qas.append({"id": str(qa["qid"]), "question": nonempty(qa, "question"), "answers": answers,
                    "references": qa["answers"]})
    return {"text": context, "qas": qas}


def read_squad(path: Path) -> Iterator[dict]:
    """SQuAD 1.1, where articles are documents, or emrQA, where notes are."""
    articles = json.loads("".join(line for _, line in lines(path)))["data"]
    for n, article in enumerate(articles):
        with error_context(f"{path}: data[{n}]"):
            for paragraph in article["paragraphs"]:
                if "note_id" in paragraph:
                    yield from read_note(paragraph)
                    continue
                qas = []
                for qa in paragraph["qas"]:
                    question = nonempty(qa, "question")
                    answers = [{"text": a["text"], "start": a["answer_start"]} for a in qa["answers"]]
                    qas.append({"id": str(qa["id"]), "question": question, "answers": answers})
                record = {"text": nonempty(paragraph, "context"), "qas": qas}
                # Where there is one article, its paragraphs are documents. Not "doc", which would say that
                # train and corpus number their documents alike (Data.joined).
                if len(articles) > 1:
                    record["article"] = n
                yield record


def read_note(note: dict) -> Iterator[dict]:
    """A clinical note of emrQA, with the questions that have one piece of evidence in it, which is taken
    where it first occurs. Lists, yes/no questions, and the classes that the smoking and obesity parts ask for
    are dropped."""
    note_lines = note["context"]
    if isinstance(note_lines, str):
        note_lines = note_lines.splitlines()
    text = "\n".join(line.strip() for line in note_lines).encode("utf-8", "replace").decode()
    qas = []
    for i, qa in enumerate(note["qas"]):
        evidence = evidence_of(qa)
        if not evidence:
            continue
        # White space may differ, and a part of a longer word does not count.
        words = r"\s+".join(map(re.escape, evidence.split()))
        found = re.search(rf"(?<!\w){words}(?!\w)", text)
        if not found:
            continue
        answer = {"text": found[0], "start": found.start()}
        questions = [qa["question"]] if isinstance(qa["question"], str) else qa["question"]
        for j, question in enumerate(questions):
            if question.strip():
                qas.append({"id": f"{note['note_id']}-{i}-{j}", "question": question, "answers": [answer]})
    if qas:
        yield {"text": text, "qas": qas}


def evidence_of(qa: dict) -> str:
    """The one piece of evidence for the answers of a question; "" where there is not one."""
    evidence = {str(answer.get("evidence") or "").strip() for answer in qa["answers"]}
    said = {str(a.get("text", a.get("evidence")) or "").strip().lower() for a in qa["answers"]}
    if len(evidence) != 1 or said <= {"", "yes", "no"}:
        return ""
    return evidence.pop()


# The formats, also gzipped.
READERS = {".json": read_squad, ".jsonl": read_jsonl, ".csv": read_table,
           ".tsv": functools.partial(read_table, delimiter="\t"), ".txt": read_lines}


# ---------------------------------------------------------------- data sets by name or path

@dataclass
class Source:
    """Where the records of a data set come from. It is prepared again when one of its files changes (if you
    edit a reader, remove the folder that load() names)."""
    splits: dict[str, Path | list[dict]]                        # split -> its file, or its records
    files: list[Path] = field(default_factory=list)             # what its checksum is made of; none: records
    cut: dict[str, float] = field(default_factory=dict)         # split to cut from train -> its share
    kind: str | None = None                                     # None: found by the fields (KIND_OF_FIELD)

    def records(self, split: str) -> Iterable[dict]:
        """The records of a split, read anew from its file each time; none where there is no such split."""
        found = self.splits.get(split, [])
        return read(found) if isinstance(found, Path) else found


MRQA = "https://s3.us-east-2.amazonaws.com/mrqa/release/v2/"
DONT_STOP = "https://allennlp.s3-us-west-2.amazonaws.com/dont_stop_pretraining/data/"

# The files of each data set that is downloaded: their places, and their sha256 where one is known. The dev
# files of MRQA 2019 are what the paper reports: `test`. The others have the splits of Gururangan et al. 2020.
DOWNLOADS = {
    "squad": {
        "train.jsonl.gz": (f"{MRQA}train/SQuAD.jsonl.gz",
                           "b094703b9c6f740cc2dfd70b3201b833553fcec0c8a522f22c2c6ff82ce2cc78"),
        "test.jsonl.gz": (f"{MRQA}dev/SQuAD.jsonl.gz",
                          "5afa4b088adf297fc29374ddf2d44d974b8837380e2554e62edf258fee5c32ee")},
    "newsqa": {
        "train.jsonl.gz": (f"{MRQA}train/NewsQA.jsonl.gz",
                           "f1ccbf2d259ce1094aacde21a53592894248e5778814205dac94f0b086dbe968"),
        "test.jsonl.gz": (f"{MRQA}dev/NewsQA.jsonl.gz",
                          "66bfb10cab2029bbc7d1afaece20c35fac341b1c179d15b70fde22a207f096ae")},
    "chemprot": {f"{split}.jsonl": (f"{DONT_STOP}chemprot/{split}.jsonl", None) for split in SPLITS[:3]},
    "imdb": {f"{split}.jsonl": (f"{DONT_STOP}imdb/{split}.jsonl", None) for split in SPLITS[:3]},
}


def lock_of(path: Path) -> AcquireReturnProxy:
    """`with lock_of(path):` makes a file or folder of the cache in one of the processes that torchrun starts;
    the others wait."""
    with error_context(f"NMG_CACHE={CACHE}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(f"{path}.lock").acquire()


def downloaded(name: str) -> Source:
    """A data set of DOWNLOADS. Whoever has its files already puts them into the folder of that name."""
    folder = CACHE / "raw" / name
    with lock_of(folder):
        if not folder.exists():
            with runs.atomic_write(folder) as partial:
                partial.mkdir()
                for file, (url, sha256) in DOWNLOADS[name].items():
                    download(url, partial / file, sha256, folder)
    return from_files(find_splits(folder))


def download(url: str, file: Path, sha256: str | None, folder: Path) -> None:
    """Fetches a file with a progress bar, and checks it. folder: where files of one's own would go"""
    try:
        torch.hub.download_url_to_file(url, str(file), hash_prefix=sha256)
    except (OSError, RuntimeError, HTTPException) as e:
        raise UserError(f"{url}: cannot be downloaded ({e}); files of your own go into {folder}, or use "
                        "--dataset=PATH") from e


def emrqa() -> Source:
    """20 % of the notes are held out for scoring, as in the paper."""
    folder = CACHE / "raw/emrqa"
    if not (folder / "data.json").exists():
        raise UserError(f"emrqa: needs {folder}/data.json, which the n2c2 portal (DBMI, Harvard, 'Community "
                        "Annotations') gives out under a data-use agreement")
    source = from_files({"train": folder / "data.json"}, test=0.2)
    # What counts as an answer is decided by the code of this file: edited, its notes are prepared anew.
    source.files.append(Path(__file__))
    return source


def toy_source(name: str) -> Source:
    records = toy.TASKS[name]()
    return Source({split: records[split] for split in SPLITS}, [Path(toy.__file__)])


# Every data set that has a name: a function () -> Source.
DATASETS: dict[str, Callable[[], Source]] = {"emrqa": emrqa}
DATASETS |= {name: functools.partial(downloaded, name) for name in DOWNLOADS}
DATASETS |= {name: functools.partial(toy_source, name) for name in toy.TASKS}


def find_source(name: str) -> Source:
    """The source of --dataset: a registered name, a folder, or a file."""
    if name in DATASETS:
        return DATASETS[name]()
    path = Path(name)
    with error_context(f"--dataset={name}"):
        if path.is_dir():
            return from_files(find_splits(path), dev=0.1)
        if not path.is_file():
            raise UserError(f"--dataset={name}: no such file or folder, nor a known name"
                            f"{runs.nearest(name, DATASETS)}")
        if reader_of(path) is read_lines:
            return from_files({"corpus": path})
        return from_files({"train": path}, dev=0.1)


def from_files(files: dict[str, Path], **cut: float) -> Source:
    """The source of some files; cut: the share of train for each split that is cut from it where it has no
    file."""
    missing = {split: share for split, share in cut.items() if split not in files}
    return Source(files, list(files.values()), missing)


def find_splits(folder: Path) -> dict[str, Path]:
    """Files named train, dev, test or corpus, also dev-v1.1.json, val-00000-of-00001.jsonl and the like."""
    found = {}
    for file in sorted(folder.iterdir()):
        split = SPLIT_NAMES.get(re.split(r"[\W_]", file.name.lower())[0])
        if split is None or suffix_of(file) not in READERS:
            continue
        if split in found:
            raise UserError(f"{folder}: {found[split].name} and {file.name} could be {split}; join them, or "
                            "keep one")
        found[split] = file
    if not found:
        raise UserError(f"{folder}: no file named train, dev, test or corpus ({' '.join(READERS)}, also "
                        ".gz) in this folder; or give the path of one file")
    return found
