"""Raw files in, token arrays out.

    python data_prep.py --dataset=chemprot --lm=bert-base-uncased            # downloads, prepares, prints what it made
    python data_prep.py --dataset=my_folder                                  # train/dev/test(/corpus) in any known format
    python data_prep.py --dataset=reviews.csv                                # one file; a dev split is cut from it
    python data_prep.py --dataset=emrqa --raw=folder_of_data_json            # files that you already have

Formats, known by suffix and content: SQuAD json, emrQA (n2c2) json, MRQA jsonl, jsonl or csv or tsv with `text` and `label`, plain
text (one document a line); each also gzipped. Texts are tokenised once, whole; blocks and windows of any length are views.
"""
import contextlib
import csv
import functools
import gzip
import hashlib
import http.client
import importlib.metadata
import io
import itertools
import json
import os
import re
import shutil
import string
import tarfile
import unicodedata
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

import toy
from loop import ENDING, FULL, UserError, beside, checked, cli, nearest, stream

FORMAT = 2                  # goes up when the arrays change, so that old caches are not read
SPLITS = ("train", "dev", "test", "corpus")
CACHE = Path(os.environ.get("NMG_CACHE", Path(__file__).resolve().parent / "cache"))


# ---------------------------------------------------------------- raw files -> records
#
# A record is one text: {"text": str, "label": str} or {"text": str, "qas": [{"id", "question", "answers": [{"text", "start"}]}]}
# or {"text": str}; and "doc", the number of the document that it comes from: splits and sub-tasks never share one.

def lines(path: Path) -> Iterator[tuple[str, str]]:
    """("file:line", line) of a text file, gzipped or not; a broken file is one sentence."""
    n = 0
    try:
        with open(path, "rb") as f:
            f = gzip.open(f) if f.peek(2)[:2] == b"\x1f\x8b" else f
            for n, line in enumerate(io.TextIOWrapper(f, "utf-8-sig"), 1):
                if "\0" in line:
                    raise UserError(f"{path}:{n}: not a text file")
                yield f"{path}:{n}", line
    except (UnicodeDecodeError, EOFError, OSError, zlib.error) as e:
        raise UserError(f"{path}: cannot be read after line {n}: {e}") from None


def field(record: object, name: str, where: str, kind: type = str) -> object:
    """record[name], or one sentence saying where it is missing, of the wrong type, or empty."""
    if not isinstance(record, dict) or name not in record:
        raise UserError(f"{where}: the field {name!r} is missing" + (f"; found: {', '.join(map(str, record))}" if isinstance(record, dict) else ""))
    value = record[name]
    if not isinstance(value, kind):
        raise UserError(f"{where}: the field {name!r} is {type(value).__name__}, not {getattr(kind, '__name__', kind)}")
    if isinstance(value, str) and not value.strip():
        raise UserError(f"{where}: the field {name!r} is empty")
    return value


def parse_json(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as e:
        at = f"line {e.lineno}, column {e.colno}" if e.lineno > 1 else f"column {e.colno}"             # of jsonl, `where` says the line
        advice = "; one object a line? Then call the file .jsonl" if e.msg == "Extra data" and e.lineno > 1 else ""
        raise UserError(f"{where}: not valid JSON: {e.msg} ({at}){advice}") from None


JSON_LINE = re.compile(r'\s*\{\s*(["}]|$)')        # how one begins, in a .txt too


def read(path: Path) -> Iterator[dict]:
    """Records of one file in any of the known formats, without `doc` where the format has no documents."""
    rows = lines(path)
    first = next(((where, line) for where, line in rows if line.strip()), None)
    if first is None:
        raise UserError(f"{path}: the file is empty")
    rows = itertools.chain([first], rows)
    name = path.name.lower().removesuffix(".gz")
    if name.endswith((".csv", ".tsv")):
        yield from read_table(rows, "\t" if name.endswith(".tsv") else ",", path)
    elif name.endswith(".json"):
        yield from read_squad(parse_json("".join(line for _, line in rows), str(path)), path)
    elif name.endswith(".jsonl") or JSON_LINE.match(first[1]):
        yield from read_jsonl(rows)
    else:
        yield from ({"text": line.strip()} for _, line in rows if line.strip())


def read_table(rows: Iterable, delimiter: str, path: Path) -> Iterator[dict]:
    csv.field_size_limit(2**31 - 1)
    table = csv.DictReader((line for _, line in rows), delimiter=delimiter, strict=True)
    try:
        for row in table:
            where = f"{path}:{table.line_num}"
            record = {"text": field(row, "text", where)}
            if table.fieldnames != ["text"]:                        # a corpus has no other column
                record["label"] = field(row, "label", where).strip()
            if None in row:
                raise UserError(f"{where}: more cells than columns; put cells that hold a separator in double quotes")
            if delimiter == "\t" and any("\n" in cell for cell in record.values()):
                raise UserError(f"{where}: a quoted field runs over several lines; if its quotes are plain characters, double them, or use jsonl")
            yield record
    except csv.Error as e:
        raise UserError(f"{path}:{table.line_num}: {e}") from None


def read_jsonl(rows: Iterable) -> Iterator[dict]:
    """`text`, with `label` where there is one and `doc` (the number of the document that it is from), or MRQA: a header line, then
    one context a line; answer spans include their end."""
    numbered = None
    for where, line in rows:
        if not line.strip():
            continue
        row = parse_json(line.rstrip(), where)
        if isinstance(row, dict) and "context" in row:
            context, qas = field(row, "context", where), []
            for qa in field(row, "qas", where, list):
                answers = []
                for found in field(qa, "detected_answers", where, list):
                    for span in field(found, "char_spans", where, list):
                        numbers = isinstance(span, list) and [type(at) for at in span] == [int, int]
                        if not (numbers and 0 <= span[0] <= span[1] < len(context)):
                            raise UserError(f"{where}: the answer span {span} of question {qa.get('qid')!r} is not inside its context")
                        answers.append({"text": context[span[0]:span[1] + 1], "start": span[0]})
                        check_answer(answers[-1]["text"], found.get("text", answers[-1]["text"]), span[0], where, loosely=True)
                qas.append({"id": str(field(qa, "qid", where, str | int)), "question": field(qa, "question", where), "answers": answers,
                            "scored": field(qa, "answers", where, list)})
            yield {"text": context, "qas": qas}
        elif isinstance(row, dict) and "header" in row and "text" not in row:
            continue
        else:
            record = {"text": field(row, "text", where)}
            if "label" in row:
                record["label"] = str(field(row, "label", where, str | int))
            if numbered not in (None, "doc" in row):
                raise UserError(f"{where}: the field 'doc' must be in all records or in none")
            numbered = "doc" in row
            if numbered:
                record["doc"] = field(row, "doc", where, int)
                if not 0 <= record["doc"] < 2**31:
                    raise UserError(f"{where}: the field 'doc' is {record['doc']}; documents have numbers from 0 to {2**31 - 1}")
            yield record


def read_squad(data: object, path: Path) -> Iterator[dict]:
    """SQuAD 1.1: an article is a document, or a paragraph where all are of one article. A paragraph with a `note_id` is a clinical note of
    emrQA: a note is a document."""
    for doc, article in enumerate(field(data, "data", str(path), list)):
        for paragraph in field(article, "paragraphs", f"{path}: data[{doc}]", list):
            if isinstance(paragraph, dict) and "note_id" in paragraph:
                yield from read_note(paragraph, f"{path}: {article.get('title')}")
                continue
            where = f"{path}: data[{doc}] ({article.get('title', 'no title')})"
            context, qas = field(paragraph, "context", where), []
            for qa in field(paragraph, "qas", where, list):
                at = f"{path}: question {field(qa, 'id', where, str | int)!r}"
                answers = [{"text": field(a, "text", at), "start": field(a, "answer_start", at, int)} for a in field(qa, "answers", at, list)]
                for a in answers:
                    check_answer(context[a["start"]:][:len(a["text"])] if a["start"] >= 0 else "", a["text"], a["start"], at)
                qas.append({"id": str(qa["id"]), "question": field(qa, "question", at), "answers": answers})
            yield {"text": context, "qas": qas} | ({"doc": doc} if len(data["data"]) > 1 else {})


def read_note(note: dict, where: str) -> Iterator[dict]:
    """One emrQA note. Kept: questions with exactly one piece of evidence that stands in the note, up to white space. So lists and the classes
    that the smoking and obesity parts ask for (they come without evidence) are dropped, and so are yes/no questions: their answer's own
    text is that word, or empty."""
    context = field(note, "context", where, str | list)
    own = context.splitlines() if isinstance(context, str) else context
    text, qas = "\n".join(line.strip() for line in own), []
    for i, qa in enumerate(field(note, "qas", where, list)):
        answers = field(qa, "answers", where, list)
        if not all(isinstance(a, dict) for a in answers):
            raise UserError(f"{where}: question {i} has an answer that is no object")
        evidence = {str(a.get("evidence") or "").strip(): a.get("evidence_start") for a in answers}
        words = next(iter(evidence)).split() if len(evidence) == 1 else []
        said = {str(a.get("text", a.get("evidence")) or "").strip().lower() for a in answers}
        if not words or said <= {"", "yes", "no"}:
            continue
        found = list(re.finditer(r"(?<!\w)" + r"\s+".join(map(re.escape, words)) + r"(?!\w)", text))
        line = next(iter(evidence.values()))
        if isinstance(line, int):                                   # counted from 1; the part on risk gives a place among the characters
            line = line - 1 if line <= len(own) else "\n".join(own).count("\n", 0, line)
        if found:
            best = min(found, key=lambda m: abs(text.count("\n", 0, m.start()) - line)) if isinstance(line, int) else found[0]
            asked = field(qa, "question", where, str | list)
            qas += [{"id": f"{note['note_id']}-{i}-{j}", "question": q, "answers": [{"text": best[0], "start": best.start()}]}
                    for j, q in enumerate([asked] if isinstance(asked, str) else asked) if q.strip()]
    if text.strip() and qas:
        yield {"text": text, "qas": qas}


def check_answer(found: str, text: str, start: int, where: str, loosely: bool = False) -> None:
    """What stands in the context must be the answer (`loosely`: up to case and punctuation, as MRQA matched them)."""
    plain = (lambda s: re.sub(r"\W+", "", s.lower())) if loosely else str
    if not text.strip() or not found or plain(found) != plain(text):
        raise UserError(f"{where}: the answer {text[:60]!r} does not stand at offset {start} of its context (found {found[:60]!r})")


def read_aclimdb(path: Path, split: str) -> Iterator[dict]:
    """The original IMDb release, archive (read in place, nothing is extracted) or folder."""
    def reviews():
        if path.is_dir():
            for file in sorted(path.glob(f"{split}/*/*.txt")):
                yield file.parent.name, file.read_text("utf-8")
        else:
            with tarfile.open(path) as tar:
                for member in tar:
                    parts = member.name.split("/")
                    if member.isfile() and len(parts) == 4 and parts[1] == split:
                        yield parts[2], tar.extractfile(member).read().decode("utf-8")
                while tar.fileobj.read(1 << 20):                    # to gzip's checksum: to tarfile, a damaged archive is a short one
                    pass
    try:
        yield from ({"text": text, "label": label} for label, text in reviews() if label in ("pos", "neg"))
    except (tarfile.TarError, EOFError, OSError, UnicodeDecodeError, zlib.error) as e:
        raise UserError(f"{path}: cannot be read: {e}") from None


def with_docs(records: Iterable[dict]) -> Iterator[dict]:
    """Adds `doc` where the format has none: texts of a task that are equal once entity markers (<< >>, [[ ]]) are gone share one."""
    seen = {}
    for i, record in enumerate(records):
        if len(record) == 1:
            record = record | {"doc": i}            # a corpus: each its own, with nothing to remember however long it is
        elif "doc" not in record:
            plain = re.sub(r"<<|>>|\[\[|\]\]|\s+", "", record["text"]).lower()
            record = record | {"doc": seen.setdefault(hash(plain), i)}
        yield record


# ---------------------------------------------------------------- named data sets and downloads

@dataclass
class Source:
    """Where the records of a data set come from: readers by split, the files behind them, shares to cut from train where missing.

    What was prepared is used again while the files are the same: a reader of your own that may change belongs among them."""
    read: dict[str, Callable[[], Iterable[dict]]]
    files: list[Path]
    cut: dict[str, float]


DATASETS: dict[str, Callable[[Path | None], Source]] = {}


def dataset(f: Callable[[Path | None], Source]) -> Callable:
    """Registers a named data set: one function, (folder of the user's own raw files or None) -> Source."""
    DATASETS[f.__name__] = f
    return f


def from_files(files: dict[str, Path], **cut: float) -> Source:
    return Source({split: functools.partial(read, file) for split, file in files.items()}, list(files.values()),
                  {split: share for split, share in cut.items() if split not in files})


def find_splits(folder: Path) -> dict[str, Path]:
    """train / dev / test / corpus files of a folder, whatever their format, also by names such as dev-v1.1.json; one that is alone is train."""
    names = {"train": "train", "dev": "dev", "val": "dev", "valid": "dev", "validation": "dev", "test": "test", "corpus": "corpus"}
    known = [f for f in sorted(folder.iterdir()) if re.search(ENDING, f.name.lower())]
    found = {}
    for file in known:
        split = names.get(re.sub(r"(-v\d[\d.]*|-\d+-of-\d+)?(\..*)?" + ENDING, "", file.name.lower()))
        if split in found:
            raise UserError(f"{folder}: both {found[split].name} and {file.name} could be {split}; keep one")
        if split:
            found[split] = file
    if not found and (len(known) != 1 or any((folder / name).is_dir() for name in names)):
        raise UserError(f"{folder}: no file named train, dev, test or corpus (.json .jsonl .csv .tsv .txt, also .gz) in this folder")
    return found or {"train": known[0]}


MRQA = "https://s3.us-east-2.amazonaws.com/mrqa/release/v2/"
DONT_STOP = "https://allennlp.s3-us-west-2.amazonaws.com/dont_stop_pretraining/data/"


def mrqa(name: str, raw: Path | None, train_sha: str, dev_sha: str) -> Source:
    """SQuAD and NewsQA as MRQA 2019 released them; its dev file is what the paper reports, so it is `test` here."""
    if raw and not (raw / "train").is_dir():
        found = find_splits(raw)
        return from_files(found if "test" in found else {"test" if split == "dev" else split: file for split, file in found.items()})
    return from_files({split: raw / part / f"{name}.jsonl.gz" if raw else
                       download(f"{MRQA}{part}/{name}.jsonl.gz", CACHE / "raw" / f"{name}-{part}.jsonl.gz", sha)
                       for split, part, sha in (("train", "train", train_sha), ("test", "dev", dev_sha))})


@dataset
def squad(raw: Path | None) -> Source:
    return mrqa("SQuAD", raw, "b094703b9c6f740cc2dfd70b3201b833553fcec0c8a522f22c2c6ff82ce2cc78",
                "5afa4b088adf297fc29374ddf2d44d974b8837380e2554e62edf258fee5c32ee")


@dataset
def newsqa(raw: Path | None) -> Source:
    return mrqa("NewsQA", raw, "f1ccbf2d259ce1094aacde21a53592894248e5778814205dac94f0b086dbe968",
                "66bfb10cab2029bbc7d1afaece20c35fac341b1c179d15b70fde22a207f096ae")


@dataset
def emrqa(raw: Path | None) -> Source:
    """The user's own n2c2 `data.json` (data-use agreement); 20 % of the notes are held out for scoring, as in the paper."""
    if not raw or not (raw / "data.json").exists():
        raise UserError("emrqa: needs --raw=FOLDER with data.json, which the n2c2 portal (DBMI, Harvard, 'Community Annotations') "
                        f"gives out under a data-use agreement; there is none in {raw}")
    return from_files({"train": raw / "data.json"}, test=0.2)


def dont_stop(name: str, raw: Path | None, **cut: float) -> Source:
    """ChemProt and IMDb with the splits of Gururangan et al. 2020."""
    return from_files(find_splits(raw) if raw else {s: download(f"{DONT_STOP}{name}/{s}.jsonl", CACHE / "raw" / f"{name}-{s}.jsonl")
                                                    for s in ("train", "dev", "test")}, **cut)


@dataset
def chemprot(raw: Path | None) -> Source:
    return dont_stop("chemprot", raw)


@dataset
def imdb(raw: Path | None) -> Source:
    places = (raw / "aclImdb_v1.tar.gz", raw / "aclImdb", raw) if raw else ()
    archive = next((p for p in places if p.is_file() or (p / "train/pos").is_dir()), None)
    if not archive:
        return dont_stop("imdb", raw, dev=0.2)
    files = sorted(archive.rglob("*.txt")) if archive.is_dir() else [archive]
    return Source({split: functools.partial(read_aclimdb, archive, split) for split in ("train", "test")}, files, {"dev": 0.2})


def embedded(make: Callable[[], dict]) -> Callable[[Path | None], Source]:
    made = functools.cache(make)
    return lambda raw: Source({split: lambda split=split: made()[split] for split in made()}, [Path(toy.__file__)], {})


EMBEDDED = {"toycls": embedded(toy.cls), "toyqa": embedded(toy.qa)}
DATASETS |= EMBEDDED


def find_source(name: str, raw: str | None) -> Source:
    """The source of a --dataset, which is a registered name or a path."""
    folder = Path(raw) if raw else None
    if folder and not folder.is_dir():
        raise UserError(f"--raw={raw}: no such folder")
    if name in DATASETS:
        return DATASETS[name](folder)
    path = Path(name)
    if path.is_dir():
        return from_files(find_splits(path), dev=0.1)
    if path.is_file():
        first = next((line for _, line in lines(path) if line.strip()), "")
        plain = re.search(r"\.(txt|text)(\.gz)?$", path.name.lower()) and not JSON_LINE.match(first)
        return from_files({"corpus" if plain else "train": path}, **({} if plain else {"dev": 0.1}))
    raise UserError(f"--dataset={name}: neither a known name nor a path" + nearest(name, DATASETS))


def download(url: str, path: Path, sha256: str | None = None) -> Path:
    """Fetches `url` to `path` once, with a progress bar; the checksum is compared before the file takes its place."""
    if path.exists():
        return path
    try:
        with beside(path) as tmp, urllib.request.urlopen(url, timeout=60) as response:
            size = int(response.headers.get("Content-Length") or 0)
            with tqdm.wrapattr(response, "read", size or None, desc=path.name, disable=None) as body, open(tmp, "wb") as out:
                shutil.copyfileobj(body, out)
            if size and tmp.stat().st_size != size:
                raise UserError(f"{url}: {tmp.stat().st_size} bytes came of {size}; try again")
            if sha256 and checksum(tmp) != sha256:
                raise UserError(f"{url}: sha256 is {checksum(tmp)}, not {sha256}: the file changed or was damaged on the way")
    except (OSError, http.client.HTTPException) as e:               # URLError, time-outs and broken connections are OSErrors
        if getattr(e, "errno", 0) in FULL:
            raise
        reason = getattr(e, "reason", e)
        raise UserError(f"{url}: cannot be downloaded ({reason}); with files of your own, use --raw=FOLDER or --dataset=PATH") from None
    return path


# ---------------------------------------------------------------- tokenizer and LM by name

def find_lm(name: str) -> str:
    """What `from_pretrained` takes: a folder, a hub name, or the folder of the embedded `tiny` (made on first use)."""
    if name == "tiny":
        from pretrain import tiny  # the one step against the flow: the embedded LM is made by the stage that makes LMs
        return str(tiny())
    if Path(name).exists() and not (Path(name) / "config.json").exists():
        raise UserError(f"--lm={name}: no config.json in it; a Hugging Face model folder or a hub name is needed")
    return name


def load_tokenizer(name: str):
    """The fast tokenizer of a LM. Raises UserError where there is none: words and offsets come from it."""
    if name == "tiny":
        return toy.tokenizer()
    from transformers import AutoTokenizer
    with lm_errors(name):
        tok = AutoTokenizer.from_pretrained(find_lm(name))
    if not hasattr(tok, "backend_tokenizer"):
        raise UserError(f"--lm={name}: has only a slow tokenizer ({type(tok).__name__}); a fast one (tokenizer.json) is needed")
    if len(tok) <= len(tok.all_special_ids):                # what transformers makes of a folder without its files
        raise UserError(f"--lm={name}: its tokenizer knows no words; the folder needs tokenizer.json or the vocabulary")
    return tok


@contextlib.contextmanager
def lm_errors(name: str) -> Iterator[None]:
    """Turns the many ways in which a model cannot be opened into one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        reason = str(e).strip().split("\n")[0][:300]
        raise UserError(f"--lm={name}: cannot be opened: {reason} (allowed: 'tiny', a Hugging Face folder, or a hub name)") from e


@dataclass
class Specials:
    """What a tokenizer puts around one text or a pair: prefix + a + middle + b + suffix; type ids where the model has them."""
    prefix: list[int]
    middle: list[int]
    suffix: list[int]
    types: bool
    pad: int
    mask: int
    plain: np.ndarray       # (V - specials,) ids that may replace a token: no special ones

    @classmethod
    def of(cls, tok) -> "Specials":
        if tok.mask_token_id is None or tok.pad_token_id is None:
            raise UserError(f"the tokenizer of {tok.name_or_path or 'this LM'} has no mask or no padding token: not a masked LM's")
        pair = tok("a", "a", return_special_tokens_mask=True)
        ids, special = pair["input_ids"], np.array(pair["special_tokens_mask"])
        at = np.flatnonzero(special == 0)                       # where the two texts stand
        gap = at[np.argmax(np.diff(at))] + 1                    # where what joins them begins
        return cls(ids[:at[0]], ids[gap:at[at >= gap][0]], ids[at[-1] + 1:], max(pair.get("token_type_ids", [0])) > 0,
                   tok.pad_token_id, tok.mask_token_id, np.setdiff1d(np.arange(len(tok)), tok.all_special_ids))


# ---------------------------------------------------------------- records -> token arrays

TOKEN = {"ids": np.int32, "word": np.int32, "begin": np.int32, "end": np.int32, "punct": np.bool_}     # (T,) one entry a token
ROW = {"start": np.int64, "text_start": np.int64, "doc": np.int32, "label": np.int32}                  # (N,) or (N + 1,) one a row
QUESTION = {"q_ids": np.int32, "q_start": np.int64, "q_row": np.int32, "answer": np.int32}             # one a question
DTYPE = TOKEN | ROW | QUESTION | {"text": np.uint8}


class Split:
    """One prepared split, memory-mapped: N rows (whole texts) and T tokens, without special tokens.

    ids, word, begin, end, punct (T,): token id, index of its word in the row (-1: never masked), characters begin:end of
    the raw text, whether it is punctuation. Row i is tokens start[i]:start[i + 1]; doc (N,) its document; label (N,) its class.
    Question j: tokens q_ids[q_start[j]:q_start[j + 1]] on row q_row[j]; answer (Q, 2) first and last token in that row."""

    def __init__(self, folder: Path, spacy_model: str = "en_core_web_sm"):
        self.folder, self.spacy_model = folder, spacy_model
        for name in DTYPE:
            file = folder / f"{name}.bin"
            if file.exists():
                empty = file.stat().st_size == 0
                setattr(self, name, np.zeros(0, DTYPE[name]) if empty else np.memmap(file, DTYPE[name], "r"))
        if hasattr(self, "answer"):
            self.answer = self.answer.reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.doc)

    def raw(self, i: int) -> str:
        """The raw text of row i, in which begin and end count characters."""
        return bytes(self.text[self.text_start[i]:self.text_start[i + 1]]).decode()

    @functools.cached_property
    def questions(self) -> list[dict]:
        """id, question and reference answers ("scored") of every question, in order."""
        return [json.loads(line) for line in open(self.folder / "questions.jsonl")]

    @functools.cached_property
    def ent(self) -> np.ndarray:
        """(T,) index of the named entity that a token is in, or -1. spaCy reads the RAW text, once; the result is kept beside the rest."""
        meta, version = Path(self.spacy_model) / "meta.json", ""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = checksum(meta)[:8] if meta.exists() else importlib.metadata.version(self.spacy_model)
        file = self.folder / f"ent-{Path(self.spacy_model).name}{version}.bin"
        if not file.exists():
            with beside(file) as tmp:
                find_entities(self, self.spacy_model).tofile(tmp)
        return np.memmap(file, np.int32, "r")


@dataclass
class Data:
    """A prepared data set for one tokenizer. kind: "cls", "qa" or "text"; labels: the class names, sorted; joined: whether the
    documents of its corpus are those of train, because the records of both name theirs."""
    name: str
    kind: str
    labels: list[str]
    splits: dict[str, Split]
    checksum: str
    joined: bool

    def __getitem__(self, split: str) -> Split:
        if split not in self.splits:
            raise UserError(f"{self.name} has no {split} split. Allowed: {', '.join(self.splits)}")
        return self.splits[split]

    def scored(self, split: str) -> Split:
        """The split that an evaluation is asked for."""
        if split not in ("dev", "test"):
            raise UserError(f"--split={split}: must be dev or test")
        if split == "dev" and split not in self.splits:
            raise UserError(f"{self.name} has no dev split; --dev_share=0.1 cuts one from train")
        return self[split]

    @property
    def corpus(self) -> Split:
        """The unlabelled text: a split of its own where the data set has one, else the texts of train (PAPER: the task's own text)."""
        return self.splits.get("corpus") or self["train"]


def load(name: str, tok, raw: str | None = None, dev_share: float | None = None, kind: str | None = None) -> Data:
    """Prepares a data set for a tokenizer, or opens what was prepared before from the same files by the same tokenizer.

    kind: the kind that the caller can work with ("cls", "qa"); None for any. Prints what it made. Raises UserError."""
    source = find_source(name, raw)
    if dev_share is not None and "dev" not in source.read:
        if "train" not in source.read:
            raise UserError(f"--dev_share={dev_share}: {name} has no train split to cut from; text in a file named train.txt, in a folder, is one")
        source.cut["dev"] = dev_share
    tok.backend_tokenizer.no_truncation()                   # some tokenizer files carry a length of their own
    tok.backend_tokenizer.no_padding()
    named = [FORMAT, source.cut, list(source.read), [file.name for file in source.files], tok.backend_tokenizer.to_str()]
    digest = hashlib.sha256(json.dumps(named).encode())
    for file in source.files:
        digest.update(checksum(file).encode())
    key = digest.hexdigest()
    folder = CACHE / "prepared" / f"{Path(name).stem}-{key[:12]}"
    if not (folder / "meta.json").exists():
        with beside(folder) as tmp:
            tmp.mkdir(parents=True)
            prepare(source, tok, tmp, name)
    meta = json.loads((folder / "meta.json").read_text())
    print(describe(folder, name, meta), flush=True)
    if kind not in (None, meta["kind"]):
        script = {"cls": "finetune_cls.py", "qa": "finetune_qa.py", "text": "pretrain.py, it is a corpus only"}[meta["kind"]]
        raise UserError(f"--dataset={name}: holds {meta['kind']!r} data, not {kind!r}; for this data: {script}")
    splits = {s: Split(folder / s, *(["toy"] if name in EMBEDDED else [])) for s in meta["splits"]}
    return Data(name, meta["kind"], meta["labels"], splits, key, meta["joined"])


def checksum(file: Path) -> str:
    try:
        with open(file, "rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as e:
        raise UserError(f"{file}: cannot be read: {e.strerror}") from None


def prepare(source: Source, tok, folder: Path, name: str) -> None:
    """Writes every split of `source` under `folder`: a pass over train for its labels, one for each cut, one over each split to write."""
    def keeping(make, keep):
        return lambda: itertools.compress(make(), keep)

    readers = {split: lambda make=make: with_docs(make()) for split, make in source.read.items()}
    kind, labels, whole = "text", [], readers.get("train")
    if whole:
        first = next(iter(whole()), {})
        kind = "cls" if "label" in first else "qa" if "qas" in first else "text"
        labels = sorted({field(r, "label", f"{name}, train, row {i}") for i, r in enumerate(whole(), 1)}) if kind == "cls" else []
    for part, share in source.cut.items() if whole else ():
        whole = readers["train"]
        held = cut_docs(np.array([r["doc"] for r in whole()]), share)
        if not held.all():
            readers["train"], readers[part] = keeping(whole, ~held), keeping(whole, held)
    splits = [s for s in SPLITS if s in readers]
    for split in splits:
        write_split(readers[split](), tok, folder / split, kind if split != "corpus" else "text", labels, f"{name}, {split}")
    shown = [next(iter(source.read[s]()), {}) for s in ("corpus", "train") if s in source.read]
    squad = any(getattr(make, "func", None) is read and re.search(r"\.json(\.gz)?$", make.args[0].name.lower()) for make in source.read.values())
    joined = len(shown) == 2 and all("doc" in record for record in shown) and not squad         # whose articles have numbers within a file
    meta = {"dataset": name, "kind": kind, "labels": labels, "splits": splits, "joined": joined}
    (folder / "meta.json").write_text(json.dumps(meta))


def cut_docs(docs: np.ndarray, share: float) -> np.ndarray:
    """(N,) bool: which rows are held out. Whole documents in random order, always the same, as many as fit into the share."""
    values, counts = np.unique(docs, return_counts=True)
    left, held = max(round(share * len(docs)), counts.min(initial=len(docs))), []
    for i in stream(0, "cut").permutation(len(values)):
        if counts[i] <= left:
            held.append(values[i])
            left -= counts[i]
    return np.isin(docs, held)


def write_split(records: Iterable[dict], tok, folder: Path, kind: str, labels: list[str], what: str) -> None:
    """Tokenises records 1,000 at a time (on all cores, in the tokenizer) and appends them to the arrays of `Split`."""
    folder.mkdir()
    backend = tok.backend_tokenizer
    vocabulary = [s.strip() for s in backend.decode_batch([[i] for i in range(len(tok))], skip_special_tokens=False)]
    is_punct = np.array([bool(s) and all(c in string.punctuation or unicodedata.category(c)[0] == "P" for c in s) for s in vocabulary])
    special = np.isin(np.arange(len(tok)), [i for i in tok.all_special_ids if i != tok.unk_token_id])
    label_of = {label: i for i, label in enumerate(labels)}
    names = [*TOKEN, "start", "text_start", "doc", "text"] + {"cls": ["label"], "qa": list(QUESTION), "text": []}[kind]
    files = {n: open(folder / f"{n}.bin", "wb") for n in names}
    asked = open(folder / "questions.jsonl", "w") if kind == "qa" else None
    size = dict.fromkeys(("start", "text_start", "q_start"), 0)

    def append(name, values):
        files[name].write(np.asarray(values, DTYPE[name]).tobytes())

    def append_start(name, length):
        size[name] += length
        append(name, size[name])

    for name in size.keys() & files.keys():
        append(name, 0)
    row = 0
    records = iter(tqdm(records, desc=what, unit="row", disable=None))
    while chunk := list(itertools.islice(records, 1000)):
        texts = [clean(r["text"]) for r in chunk]
        asking = [qa for i, r in enumerate(chunk) for qa in (field(r, "qas", f"{what}, row {row + i + 1}", list) if kind == "qa" else ())]
        encoded_questions = iter(backend.encode_batch([clean(qa["question"]) for qa in asking], add_special_tokens=False))
        for record, text, enc in zip(chunk, texts, backend.encode_batch(texts, add_special_tokens=False), strict=True):
            ids = np.array(enc.ids, np.int32)
            span = np.fromiter(itertools.chain.from_iterable(enc.offsets), np.int32).reshape(-1, 2)      # (n, 2)
            word = np.array([-1 if w is None else w for w in enc.word_ids], np.int32)
            append("ids", ids)
            append("word", np.where(special[ids], -1, word))
            append("begin", span[:, 0])
            append("end", span[:, 1])
            append("punct", is_punct[ids])
            raw = np.frombuffer(text.encode(), np.uint8)
            append("text", raw)
            append_start("start", len(ids))
            append_start("text_start", len(raw))
            append("doc", record["doc"])
            if kind == "cls":
                if field(record, "label", f"{what}, row {row + 1}") not in label_of:
                    raise UserError(f"{what}: the label {record['label']!r} is not among those of train: {', '.join(labels)}")
                append("label", label_of[record["label"]])
            for qa in record["qas"] if kind == "qa" else ():
                if not qa["answers"]:
                    raise UserError(f"{what}: question {qa['id']!r} has no answer; unanswerable questions (SQuAD 2) are not supported")
                begin = qa["answers"][0]["start"]
                end = begin + len(qa["answers"][0]["text"].rstrip())
                first, last = np.searchsorted(span[:, 1], begin, "right"), np.searchsorted(span[:, 0], end) - 1
                if first > last:
                    raise UserError(f"{what}: the answer of question {qa['id']!r} holds no token of the context")
                q = next(encoded_questions).ids
                append("q_ids", q)
                append_start("q_start", len(q))
                append("q_row", row)
                append("answer", [first, last])
                scored = qa.get("scored") or [a["text"] for a in qa["answers"]]
                asked.write(json.dumps({"id": qa["id"], "question": qa["question"], "scored": scored}) + "\n")
            row += 1
    for f in files.values():
        f.close()
    if asked:
        asked.close()
    if row == 0:
        raise UserError(f"{what}: there is no text in it")


def clean(text: str) -> str:
    """A lone surrogate, which no tokenizer takes, becomes "?": the length stays."""
    return text.encode("utf-8", "replace").decode()


def describe(folder: Path, name: str, meta: dict) -> str:
    """What was made: the counts that one should see."""
    out = [f"{name} ({meta['kind']}) in {folder}"]
    for s in meta["splits"]:
        split = Split(folder / s)
        docs = 1 + np.count_nonzero(np.diff(np.sort(split.doc)))             # np.unique hashes: 2.7 s for 2,000,000 rows, this 0.03
        text = f"  {s:6} {len(split):>9,} rows  {len(split.ids):>11,} tokens  {docs:>9,} documents"
        if hasattr(split, "q_row"):
            text += f"  {len(split.q_row):,} questions"
        if hasattr(split, "label"):
            counts = np.bincount(split.label, minlength=len(meta["labels"]))
            text += f"  {len(meta['labels'])} labels: " + ", ".join(f"{n} {c:,}" for n, c in zip(meta["labels"], counts, strict=True))
        out.append(text)
    return "\n".join(out)


def load_spacy(name: str, task: str, **how):
    """A spaCy pipeline; UserError where there is none."""
    import spacy
    try:
        return spacy.load(name, **how)
    except (OSError, ImportError):
        raise UserError(f"the spaCy model {name!r} is not installed: python -m spacy download {name} (or --spacy_model=FOLDER); it {task}") from None


def entity_finders(nlp) -> list[str]:
    """The components of a spaCy pipeline that find named entities."""
    return [name for name in nlp.pipe_names if "doc.ents" in nlp.get_pipe_meta(name).assigns]


def find_entities(split: Split, spacy_model: str) -> np.ndarray:
    """(T,) int32: the row's n-th named entity, or -1, for every token that overlaps one."""
    nlp = toy.pipeline() if spacy_model == "toy" else load_spacy(spacy_model, "finds the named entities")
    finders = entity_finders(nlp)
    if not finders:
        raise UserError(f"the spaCy model {spacy_model!r} finds no named entities; its components: {', '.join(nlp.pipe_names) or 'none'}")
    nlp.select_pipes(enable=["tok2vec", "transformer", *finders])
    ent = np.full(len(split.ids), -1, np.int32)

    def pieces():                                   # spaCy's memory grows with the text: long texts go in at white space
        for i in range(len(split)):
            text, at = split.raw(i), 0
            while at < len(text):
                stop = len(text) if len(text) - at <= 50_000 else (text.rfind(" ", at, at + 50_000) + 1) or at + 50_000
                yield text[at:stop], (i, at)
                at = stop

    count, row = 0, -1
    for doc, (i, at) in nlp.pipe(tqdm(pieces(), desc="named entities", unit="text", disable=None), as_tuples=True, batch_size=64):
        count, row = (count, row) if i == row else (0, i)
        tokens = slice(split.start[i], split.start[i + 1])
        begin, end = split.begin[tokens], split.end[tokens]
        for e in doc.ents:
            lo, hi = np.searchsorted(end, at + e.start_char, "right"), np.searchsorted(begin, at + e.end_char)
            ent[tokens][lo:hi] = count
            count += 1
    return ent


# ---------------------------------------------------------------- views: blocks, windows, batches

@dataclass
class Rows:
    """M pieces of a split, ready to be batched: piece m is tokens lo[m]:hi[m] of text row[m], after question[m] where there is one."""
    split: Split
    specials: Specials
    row: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    question: np.ndarray | None = None
    max_question: int = 0

    def __len__(self) -> int:
        return len(self.lo)

    @functools.cached_property
    def length(self) -> np.ndarray:
        """(M,) int32 tokens of each piece with its question and its special tokens."""
        s, extra = self.specials, 0
        if self.question is not None:
            extra = np.minimum(np.diff(self.split.q_start)[self.question], self.max_question) + len(s.middle)
        return (self.hi - self.lo + (extra + len(s.prefix) + len(s.suffix))).astype(np.int32)

    def take(self, rows: np.ndarray) -> "Rows":
        question = None if self.question is None else self.question[rows]
        return replace(self, row=self.row[rows], lo=self.lo[rows], hi=self.hi[rows], question=question)


def blocks(split: Split, specials: Specials, max_len: int) -> Rows:
    """Every text in non-overlapping blocks of at most max_len tokens with the special ones; the tail is kept, empty texts give none."""
    room = max(1, max_len - len(specials.prefix) - len(specials.suffix))
    count = -(-np.diff(split.start) // room)                                 # (N,) blocks of each text
    row = np.repeat(np.arange(len(count), dtype=np.int32), count)            # (M,)
    edge = np.arange(len(row) + 1)                                           # (M + 1,) each block ends where the next begins
    edge[:-1] -= (np.cumsum(count) - count)[row]                             # in place: a corpus may have 10^8 rows
    edge[:-1] *= room
    edge[:-1] += split.start[row]
    edge[-1] = split.start[-1]
    return Rows(split, specials, row, edge[:-1], edge[1:])


def heads(split: Split, specials: Specials, max_len: int) -> Rows:
    """Every text once, cut to max_len tokens with the special ones (classification)."""
    room = max(1, max_len - len(specials.prefix) - len(specials.suffix))
    lo = np.asarray(split.start[:-1])
    return Rows(split, specials, np.arange(len(split)), lo, np.minimum(split.start[1:], lo + room))


def windows(split: Split, specials: Specials, max_len: int, overlap: int, max_question: int) -> Rows:
    """Every question with its context in windows of at most max_len tokens, each sharing `overlap` context tokens with the last."""
    q = np.minimum(np.diff(split.q_start), max_question)                                        # (Q,)
    room = max_len - q - len(specials.prefix) - len(specials.middle) - len(specials.suffix)     # (Q,) context tokens that fit
    step = room - overlap
    if (step <= 0).any():
        raise UserError(f"a window of {max_len} tokens leaves no room for a question of {max_question} and an overlap of {overlap}; allowed are "
                        "longer windows (--max_len, in train_nmg.py --ft_max_len), shorter questions (--max_question) and overlaps (--overlap)")
    n = np.diff(split.start)[split.q_row]
    count = 1 + np.maximum(0, -(-(n - room) // step))                                           # (Q,) windows of each question
    question = np.repeat(np.arange(len(q)), count)                                              # (M,)
    index = np.arange(len(question)) - np.repeat(np.cumsum(count) - count, count)
    row = split.q_row[question]
    lo = split.start[row] + index * step[question]
    return Rows(split, specials, row, lo, np.minimum(lo + room[question], split.start[row + 1]), question, max_question)


@dataclass
class Batch:
    """B padded rows of L tokens, (B, L) each: what maskers read. `ok` is False on special tokens and padding, word is -1 there."""
    ids: np.ndarray
    real: np.ndarray        # not padding
    ok: np.ndarray          # may be masked
    word: np.ndarray
    punct: np.ndarray
    rows: np.ndarray        # (B,) which pieces these are
    at: np.ndarray          # (B, L) index of the token in the split, 0 where `inside` is False
    inside: np.ndarray      # a token of the text: not special, not padding, not the question
    types: np.ndarray | None
    split: Split

    @property
    def ent(self) -> np.ndarray:
        """(B, L) index of the named entity or -1; the first use computes it for the whole split."""
        return np.where(self.inside, self.split.ent[self.at], -1)


def gather(pieces: Rows, rows: np.ndarray, width: int | None = None, multiple: int = 1) -> Batch:
    """Builds the batch of the given pieces, padded to its longest row (rounded up to `multiple`), or to `width` on the plain path."""
    s, split = pieces.specials, pieces.split
    lo, hi, length = pieces.lo[rows], pieces.hi[rows], pieces.length[rows]
    width = width or -(-int(length.max()) // multiple) * multiple
    before = length - (hi - lo) - len(s.suffix)                              # (B,) tokens before the text
    column = np.arange(width)
    offset = column - before[:, None]                                        # (B, L) position within the text
    inside = (offset >= 0) & (offset < (hi - lo)[:, None])
    at = np.where(inside, lo[:, None] + offset, 0)
    ids = np.where(inside, split.ids[at], s.pad)
    word = np.where(inside, split.word[at], -1)
    ids[:, :len(s.prefix)] = s.prefix
    for i, token in enumerate(s.suffix):
        ids[np.arange(len(rows)), length - len(s.suffix) + i] = token
    if pieces.question is not None:
        for b, q in enumerate(pieces.question[rows]):
            stop = before[b] - len(s.middle)
            ids[b, stop:before[b]] = s.middle
            ids[b, len(s.prefix):stop] = split.q_ids[split.q_start[q]:split.q_start[q] + stop - len(s.prefix)]
    real = column < length[:, None]
    types = (real & (column >= before[:, None])).astype(np.int64) if s.types and pieces.question is not None else None
    return Batch(ids, real, word >= 0, word, inside & split.punct[at], rows, at, inside, types, split)


# ---------------------------------------------------------------- command line

def main(
    dataset: str = "toycls",            # a name (squad newsqa emrqa imdb chemprot toycls toyqa) or a path
    lm: str = "tiny",                   # whose tokenizer: tiny, a Hugging Face folder or hub name
    raw: str | None = None,             # folder with the raw files of a named data set, instead of downloading them
    dev_share: float | None = None,     # share of train's documents to cut as dev where there is none; None: 0.1 for paths
    spacy_model: str | None = None,     # find named entities now, with this spaCy model (else on first need)
):
    checked(locals())
    data = load(dataset, load_tokenizer(lm), raw, dev_share)
    if spacy_model:
        data.corpus.spacy_model = spacy_model
        print(f"{np.mean(data.corpus.ent >= 0):.1%} of the corpus' tokens are in a named entity")


if __name__ == "__main__":
    cli(main)
