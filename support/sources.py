"""Raw files in, records out: the formats, and the data sets that have a name.

    def my_data():                          # then --dataset=my_data
        return Source({"train": [Path("my_data.csv")]}, cut={"dev": 0.1})
    DATASETS["my_data"] = my_data

data_prep.py turns the records into token arrays.
"""
import collections
import contextlib
import csv
import functools
import gzip
import itertools
import json
import operator
import os
import re
import shutil
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from types import SimpleNamespace

from filelock import FileLock
from tqdm import tqdm

from support import runs, toy
from support.runs import UserError

CACHE = Path(os.environ.get("NMG_CACHE", Path(__file__).resolve().parent.parent / "cache")).expanduser()
SPLITS = ("train", "dev", "test", "corpus")
# The split of a file by its name, before a dot, the number of a shard, or a version.
SPLIT_NAMES = {split: split for split in SPLITS}
SPLIT_NAMES |= {"val": "dev", "valid": "dev", "validation": "dev", "eval": "dev", "unsupervised": "corpus"}

# A line of CoNLL (one or more columns, and a tag such as O or B-PER) or of fastText (a label, and a text).
TAGGED = re.compile(r"\S.*\s(O|[BIESLUM]-[A-Za-z]\S*)|__label__\S+\s.*")
# How RTF, XML and HTML begin, and the dicts that Python prints.
MARKUP = re.compile(r"\{\\rtf|<\?xml|<!doctype|<html|\{'", re.I)
QUOTES = ('a double quote in a quoted cell is written twice (""), with no backslash; where the cells are '
          "right, use jsonl (pandas writes it with to_json(orient='records', lines=True))")
# One file of several, as in train-00000-of-00002.parquet or train-00000-of-00002-1a2b3c4d.parquet.
SHARD = re.compile(r"-(\d+)-of-(\d+)[-.]")


@dataclass
class DataFlags:
    """The flags that say what is read of a table, or of JSON."""
    text: str = "text"              # the column of the texts
    label: str = "label"            # the column of their classes
    doc: str = "doc"                # of their documents, if any: what is held out shares none with the rest


# ---------------------------------------------------------------- raw files -> rows
#
# A reader gives the rows of a file, each with its place: ("file:line", {column: value}).

@contextlib.contextmanager
def error_context(where: object) -> Iterator[SimpleNamespace]:
    """`with error_context(where) as at:` turns errors of reading a file into a UserError that begins with
    at.where; a loop over rows sets at.where to the place of each."""
    at = SimpleNamespace(where=where)
    try:
        yield at
    except KeyError as e:
        raise UserError(f"{at.where}: the field {e} is missing") from e
    except UnicodeDecodeError as e:
        raise UserError(f"{at.where}: is not UTF-8 text; save it as UTF-8, in one of the formats "
                        f"{' '.join(READERS)}") from e
    except csv.Error as e:
        raise UserError(f"{at.where}: {e}; {QUOTES}") from e
    except json.JSONDecodeError as e:
        raise UserError(f"{at.where}: is not JSON ({e}); a .jsonl file has one object on each line, and a "
                        ".json file is read as a whole") from e
    # What a broken or a forbidden file raises; anything else is a defect of the program.
    except (OSError, TypeError, ValueError, AttributeError, EOFError, OverflowError, zlib.error) as e:
        raise UserError(f"{at.where}: {e}") from e


def lines(path: Path) -> Iterator[tuple[str, str]]:
    """("file:line", line) of a text file, gzipped or not."""
    open_text = gzip.open if path.name.lower().endswith(".gz") else open
    with error_context(path), open_text(path, "rt", encoding="utf-8") as f:
        for n, line in enumerate(f, 1):
            if "\0" in line:
                raise ValueError("holds NUL bytes, so that it is no UTF-8 text; unpack an archive, and save "
                                 "UTF-16 as UTF-8")
            # A byte order mark also begins the second of two files that were joined.
            yield f"{path}:{n}", line.removeprefix("\ufeff")


def reader_of(path: Path) -> Callable[[Path], Iterator[tuple[str, dict]]]:
    """The reader of a file, by its suffix. Unknown ones and .txt are plain text, or JSON if they begin so."""
    reader = READERS.get(suffix_of(path), read_lines)
    if reader is read_lines:
        first = next((line for _, line in lines(path) if line.strip()), "")
        # An object or a list over several lines, or a list of objects.
        if re.match(r"\s*([{[]\s*$|\[\s*\{)", first):
            return read_json
        # An opening brace, and then a quote or the closing brace.
        if re.match(r'\s*\{\s*["}]', first):
            return read_jsonl
    return reader


def suffix_of(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def read_lines(path: Path) -> Iterator[tuple[str, dict]]:
    first = [line.strip() for _, line in itertools.islice(lines(path), 1000) if line.strip()]
    check_text_alone(first)
    for where, line in lines(path):
        if line.strip():
            yield where, {"text": line.strip()}
    # Last, so that who reads a few lines does not see it. Where lines end at the edge of a page, most are
    # about as long as the long ones.
    lengths = sorted(map(len, first))
    if len(lengths) >= 20:
        median, long = lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10]
        if 50 <= long <= 120 and median > 0.8 * long:
            print(f"WARNING: {path}: most lines have about {long} characters, but each line is read as one "
                  "document; if lines were broken to fit a page, join those of each document", flush=True)


def check_text_alone(first: list[str]) -> None:
    """Raises ValueError if the first lines of a file of plain text look like something else."""
    if first and MARKUP.match(first[0]):
        raise ValueError(f"begins like a web page, RTF, or a printed dict ({first[0][:30]!r}), but would be "
                         "read as plain text; save it as plain text, or as .jsonl")
    tagged = [line for line in first if TAGGED.fullmatch(line)]
    # A column of few different cells for many lines holds labels: one between tabs, or the cell before the
    # first, or behind the last comma or the like of a line, if no blank follows it. (The comma in 1,000
    # belongs to the text.)
    rows = [line.split("\t") for line in first if "\t" in line]
    columns = [*zip(*rows, strict=False)]
    separator = r"(?:[;|]|(?<!\d),|,(?!\d))"
    # A cell that begins with a parenthesis is part of a name, such as (2R,3S)-acid.
    before = re.compile(rf"([^\w\s;,|(]?\w[^;,|]*){separator}\S")
    behind = re.compile(rf".*{separator}([^\w\s;,|]?\w[^;,|]*)$")
    for pattern in (before, behind):
        cells = [found[1] for found in map(pattern.match, first) if found]
        # What all lines begin or end with, such as the name of a source, is no label.
        if len(set(cells)) > 1:
            columns.append(cells)
    is_table = any(2 * len(column) > len(first) and 5 * len(set(column)) <= len(column) for column in columns)
    # Tags and labels would be read as text.
    if is_table or 2 * len(tagged) > len(first):
        raise ValueError("looks like a token and its tag per line (CoNLL), or a label and a text (fastText, "
                         "csv), but a .txt file is text alone; convert it to .jsonl with the fields text and "
                         "label, or text alone (token classification is not built in)")


def read_table(path: Path, delimiter: str = ",") -> Iterator[tuple[str, dict]]:
    # Texts may be longer than what the csv module allows.
    csv.field_size_limit(2**31 - 1)
    n = blank = 0
    short = []
    with error_context(path) as at:
        delimiter, spaced = separator_of(path, delimiter)
        table = csv.reader((line for _, line in lines(path)), delimiter=delimiter, strict=True,
                           skipinitialspace=spaced)
        # Blank lines may come first, and a line for Excel, such as sep=;
        firsts = (cells for cells in table if "".join(cells).strip() and cells[0] != "sep=")
        header = [name.strip() for name in next(firsts, [])]
        names = unique_names(header)
        before = table.line_num
        at.where = f"{path}:{before + 1}"
        for cells in table:
            check_quotes(cells, delimiter, len(header))
            if len(cells) > len(header):
                raise ValueError("more cells than columns; put cells that hold a separator in double quotes "
                                 "(and give row names, as R writes them, a name in the header)")
            if cells and set(cells) == set(header):
                raise ValueError("the header is repeated here; remove this line (were two files joined?)")
            if cells:
                n += 1
                if len(cells) < len(header) and "".join(cells).strip():
                    short.append(at.where)
                yield at.where, dict(itertools.zip_longest(names, cells, fillvalue=""))
            else:
                blank += 1
            # A quoted cell may run over lines: the place of a row is where it begins.
            at.where = f"{path}:{table.line_num + 1}"
        print(f"{path}: {n:,} rows in {table.line_num:,} lines, {blank:,} of them blank", flush=True)
        if short:
            print(f"WARNING: {path}: {len(short):,} rows have fewer cells than the header, the first at "
                  f"{short[0]}; is a line broken in a cell without quotes?", flush=True)
        if table.line_num - before - blank > 2 * n:
            print(f"WARNING: {path}: quoted cells run over several lines; if its texts have no line breaks, "
                  f"{QUOTES}", flush=True)


def separator_of(path: Path, delimiter: str) -> tuple[str, bool]:
    """What separates the columns of a table, by its header; `delimiter` where that says nothing else. And
    whether blanks behind it belong to no cell."""
    first = next((line for _, line in lines(path) if line.strip()), "")
    unquoted = re.sub(r'"[^"]*"', "", first)
    # A comma before a blank belongs to a name, unless all separators of the header stand before blanks.
    tight = re.findall(r"[,;\t|](?! )", unquoted)
    separators = tight or re.findall(r"[,;\t|]", unquoted)
    likely = max(",;\t|", key=separators.count)
    # Excel writes what it calls csv with other separators.
    is_likelier = separators.count(likely) >= max(1, unquoted.count(delimiter))
    if delimiter not in separators and is_likelier:
        print(f"{path}: its columns are separated by {likely!r}, not by {delimiter!r}", flush=True)
        delimiter = likely
    # A quoted cell behind a blank: the blank and the quotes would belong to the cell.
    quoted = re.compile(rf'[{delimiter}] +"([^"]|"")*"\s*([{delimiter}]|$)')
    some = itertools.islice(lines(path), 1000)
    return delimiter, delimiter not in tight and any(quoted.search(line) for _, line in some)


def unique_names(header: list[str]) -> list[str]:
    """The names of columns, where a second column without a name is called `unnamed N`, as --predict writes
    all columns. Raises ValueError if two have the same name."""
    names = []
    for name in header:
        if name and name in names:
            raise ValueError(f"two columns have the name {name!r}; rename one")
        if name in names:
            name = f"unnamed {len(names)}"
        names.append(name)
    return names


def check_quotes(cells: list[str], delimiter: str, columns: int) -> None:
    """Raises ValueError if double quotes that are plain characters join rows, or tear a cell apart."""
    for column, cell in enumerate(cells):
        first, *below = cell.split("\n")
        if below and "\t" in cell and delimiter == "\t":
            raise ValueError("a quoted cell holds tabs and runs over several lines, as where double quotes "
                             "are plain characters; double them, or use jsonl")
        # If quotes joined several rows, the first line of the cell completes its own row, and lines below are
        # whole rows. (A comma before a blank or a quotation mark, or in 1,000, belongs to the text.)
        separator = rf"(?!(?<=\d),\d{{3}}(?!\d))[{delimiter}](?=[^\s\"])"
        ends_row = len(re.findall(separator, first)) >= columns - 1 - column
        rows = [line for line in below if len(re.findall(separator, line)) == columns - 1]
        if columns > 1 and ends_row and rows and 2 * len(rows) >= len(below):
            raise ValueError(f"a quoted cell holds lines that look like rows: {rows[0][:60]!r}; {QUOTES}")
    # A separator inside a quotation has cut a cell in two: a cell opens the quotation, behind a blank or with
    # \", and the last one with an odd number of quotes closes it.
    odd = [cell for cell in cells if cell.count('"') % 2 or cell.endswith("\\")]
    opened = [cell for cell in odd[:-1] if re.match(r'\s+"', cell) or cell.endswith("\\")]
    if opened and odd[-1].endswith('"'):
        raise ValueError(f"a quoted cell is torn apart at {delimiter!r}; it begins at its first character, "
                         f"and {QUOTES}")


def read_jsonl(path: Path) -> Iterator[tuple[str, dict]]:
    with error_context(path) as at:
        for n, (where, line) in enumerate(lines(path)):
            if not line.strip():
                continue
            at.where = where
            row = json.loads(line.strip())
            # MRQA begins with a header.
            if not isinstance(row, dict) or row.keys() != {"header"}:
                for part in paragraphs_of(row, n):
                    yield where, part


def read_json(path: Path) -> Iterator[tuple[str, dict]]:
    """SQuAD 1.1, where articles are documents; emrQA, where notes are; or a table, as pandas writes it."""
    with error_context(path) as at:
        try:
            found = json.loads("".join(line for _, line in lines(path)))
        except json.JSONDecodeError as e:
            # One object per line, under another name.
            if e.msg != "Extra data":
                raise
            yield from read_jsonl(path)
            return
        if isinstance(found, dict):
            wrapped = found.get("data")
            rows = [*wrapped.values()] if isinstance(wrapped, dict) else wrapped
            # A column may have this name, too.
            if rows and all(isinstance(row, dict | list) for row in rows):
                found = wrapped
        if isinstance(found, dict):
            inner = [value for value in found.values() if isinstance(value, dict)]
            is_table = len(inner) == len(found)
            names = {*inner[0]} if inner else set()
            # Rows by their index, which pandas numbers; a table by columns; or else a single row.
            numbered = all(map(str.isdecimal, found)) and not all(map(str.isdecimal, names))
            if is_table and (numbered or "text" in names):
                found = inner
            elif is_table:
                found = {column: [*rows.values()] for column, rows in found.items()}
            found = as_list(found)
        for n, row in enumerate(found):
            at.where = f"{path}[{n}]"
            # Where there is one article, its paragraphs are documents.
            for part in paragraphs_of(row, n if len(found) > 1 else None):
                yield at.where, part


def paragraphs_of(row: object, n: int | None) -> Iterator[object]:
    """The paragraphs of a SQuAD article, with its number n, or the notes of emrQA; other rows as they are."""
    paragraphs = row.get("paragraphs") if isinstance(row, dict) else None
    # A column of this name may hold something else.
    are_asked = isinstance(paragraphs, list) and all(isinstance(p, dict) and "qas" in p for p in paragraphs)
    if not are_asked or "text" in row:
        yield row
        return
    for paragraph in paragraphs:
        if "note_id" in paragraph:
            paragraph = note_row(paragraph)
            # A note that no question is about says nothing.
            if paragraph["qas"]:
                yield paragraph
        elif n is None:
            yield paragraph
        else:
            yield paragraph | {"article": n}


def read_arrow(path: Path) -> Iterator[tuple[str, dict]]:
    """Parquet, Feather, or the files of the library `datasets`. Numbers of a ClassLabel become its names; -1,
    which stands for no label, becomes None."""
    import datasets
    import pyarrow
    from pyarrow import parquet, types
    with error_context(path) as at:
        if path.suffix.lower() == ".parquet":
            file = parquet.ParquetFile(path)
            schema, batches = file.schema_arrow, file.iter_batches(1000)
        elif pyarrow.memory_map(str(path)).read(6) == b"ARROW1":
            file = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
            schema, batches = file.schema, map(file.get_batch, range(file.num_record_batches))
        else:
            batches = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
            schema = batches.schema
        # Raises ValueError where two columns have the same name.
        unique_names(schema.names)
        # Classes are numbers; what else there is may be of types that datasets lacks.
        numbers = [part for part in schema if types.is_integer(part.type)]
        features = datasets.Features.from_arrow_schema(pyarrow.schema(numbers, schema.metadata))
        classes = {column: kind for column, kind in features.items() if isinstance(kind, datasets.ClassLabel)}
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        for n, row in enumerate(rows, 1):
            at.where = f"{path}, row {n}"
            for column, kind in classes.items():
                number = row[column]
                is_class = number is not None and number >= 0
                row[column] = kind.int2str(number) if is_class else None
            yield at.where, row


def note_row(note: dict) -> dict:
    """A clinical note of emrQA as a paragraph of SQuAD, with the questions that have one piece of evidence in
    it, which is taken where it first occurs. Lists, yes/no questions, and the classes that the smoking and
    obesity parts ask for are dropped."""
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
        answer = {"text": found[0], "answer_start": found.start()}
        questions = qa["question"]
        if isinstance(questions, str):
            questions = [questions]
        for j, question in enumerate(questions):
            if question.strip():
                qas.append({"id": f"{note['note_id']}-{i}-{j}", "question": question, "answers": [answer]})
    return {"context": text, "qas": qas}


def evidence_of(qa: dict) -> str:
    """The one piece of evidence for the answers of a question; "" where there is not one."""
    evidence = {str(answer.get("evidence") or "").strip() for answer in qa["answers"]}
    said = {str(a.get("text", a.get("evidence")) or "").strip().lower() for a in qa["answers"]}
    if len(evidence) != 1 or said <= {"", "yes", "no"}:
        return ""
    return evidence.pop()


# The formats; all but the last three also gzipped.
READERS = {".json": read_json, ".jsonl": read_jsonl, ".csv": read_table,
           ".tsv": functools.partial(read_table, delimiter="\t"), ".txt": read_lines,
           ".parquet": read_arrow, ".arrow": read_arrow, ".feather": read_arrow}


# ---------------------------------------------------------------- rows -> records
#
# A record is one text: {"text"}, {"text", "label"}, or {"text", "qas"} with a list of questions
# {"id", "question", "answers": [{"text", "start" (characters)}]}, and "references" where predictions are to
# be compared with other texts. A record without "label", or a question without answers, can be predicted.
# "doc" and "article" (of questions) number its document: "doc" agrees across files, "article" holds within
# one file only. What is cut from train shares no document with the rest.

def read(path: Path, columns: DataFlags) -> Iterator[dict]:
    """The records of one file in any of the formats. Neighbours with one question each, about the same text,
    are one record."""
    for _, group in itertools.groupby(records_of(path, columns), operator.itemgetter(0)):
        (_, record), *others = group
        for _, other in others:
            record["qas"] += other["qas"]
        yield record


def records_of(path: Path, columns: DataFlags) -> Iterator[tuple[object, dict]]:
    """Each row as (what belongs together, record): the text that its one question is about, else its number.
    Rows that are empty, or that an annotator rejected, are skipped, with a count."""
    first = None
    skipped = {"empty": [], "rejected": []}
    with error_context(path) as at:
        for together, (row, fields) in enumerate(rows_of(path, columns, at)):
            if is_rejected(row, fields):
                skipped["rejected"].append(at.where)
                continue
            record = record_of(row, fields)
            if record is None:
                skipped["empty"].append(at.where)
                continue
            first = first or record
            for name in ("doc", "qas"):
                if (name in record) != (name in first):
                    raise ValueError(f"its fields are {', '.join(record)}, but before it {', '.join(first)}")
            if "qas" in record and "qas" not in row:
                together = record["text"]
            yield together, record
    for what, places in skipped.items():
        if places:
            print(f"{path}: {len(places):,} {what} rows are skipped, the first at {places[0]}", flush=True)


def read_to_predict(path: Path, text: str, learned_text: str,
                    kind: str) -> Iterator[tuple[dict | None, list[dict]]]:
    """(record, rows) of every row of a file, in order: what a model reads, None where there is no text, and
    the row itself; in question answering one for each question. Labels are not read.

    text: the column of the texts; learned_text: the one that the model was fine-tuned with, which is read
    where the file has it and `text` names no other; kind: cls or qa"""
    with error_context(path) as at:
        for row, fields in rows_of(path, DataFlags(text), at):
            name = fields.text
            if name == DataFlags.text and learned_text in row:
                name = learned_text
            asked = [row]
            if kind == "qa":
                asked = row.get("qas", asked)
                name = context_of(row, name)
            if name not in row:
                raise missing_field(name, row)
            if is_missing(row[name]):
                yield None, asked
            elif kind == "qa":
                # Its place is a name for a question without one.
                questions = [question_of({"id": at.where} | qa) | {"answers": []} for qa in asked]
                yield {"text": nonempty(row, name), "qas": questions}, asked
            else:
                yield {"text": nonempty(row, name)}, asked


def rows_of(path: Path, columns: DataFlags, at: SimpleNamespace) -> Iterator[tuple[dict, DataFlags]]:
    """The rows of a file, each with the names of its fields (plain text has fixed ones), its place in
    at.where."""
    if runs.is_lfs_pointer(path):
        raise ValueError("is not the data, but a pointer of Git LFS to them; `git lfs pull` in its "
                         "folder fetches them")
    reader = reader_of(path)
    if reader is read_lines:
        columns = DataFlags()
    for at.where, row in reader(path):
        if not isinstance(row, dict):
            raise ValueError(f"a row must be one JSON object, but this is a {type(row).__name__} (pandas "
                             "writes rows with to_json(orient='records'))")
        yield row, columns


def is_rejected(row: dict, columns: DataFlags) -> bool:
    """Whether the annotator of a label rejected it, as Prodigy says."""
    if columns.label not in row or "answer" in (columns.text, columns.label):
        return False
    return row.get("answer") in ("reject", "ignore")


def record_of(row: dict, columns: DataFlags) -> dict | None:
    """The record of a row of a table, a paragraph of SQuAD, or a context of MRQA; None for an empty row."""
    if all(map(is_missing, row.values())):
        return None
    if "qas" in row or is_question(row, columns):
        record = qa_record(row, columns)
    elif columns.text not in row:
        raise missing_field(columns.text, row)
    else:
        label = label_of(row.get(columns.label))
        if label is None and is_missing(row[columns.text]) and is_missing(row.get(columns.doc)):
            return None
        record = {"text": nonempty(row, columns.text)}
        if label is not None:
            record["label"] = label
    # A name that was asked for must be there.
    if columns.doc not in row and columns.doc != DataFlags.doc:
        raise missing_field(columns.doc, row)
    if columns.doc in row:
        record["doc"] = doc_number(row[columns.doc], columns.doc)
    return record


def missing_field(name: str, row: dict) -> ValueError:
    return ValueError(f"the field {name!r} is missing, there are {', '.join([*row][:20])}; --text=NAME, "
                      "--label=NAME and --doc=NAME say what to read")


def is_question(row: dict, columns: DataFlags) -> bool:
    """Whether a row asks a question about a text. If it has a label, or if the question is itself the text,
    the row is one for classification."""
    is_classified = columns.text == "question" or columns.label in row
    return "question" in row and ("context" in row or "answers" in row) and not is_classified


def label_of(value: object) -> object:
    """The name of a class. Numbers, true and false become text, as JSON writes them; a lone surrogate becomes
    its escape; what cannot be a label, such as a list, stays as it is. None if there is none."""
    # A list of one text, as annotation tools write it; a number in a list may stand for a name.
    if isinstance(value, list) and len(value) <= 1 and all(isinstance(item, str) for item in value):
        value = value[0] if value else None
    if isinstance(value, str):
        return value.strip().encode("utf-8", "backslashreplace").decode() or None
    if is_missing(value):
        return None
    return json.dumps(value) if isinstance(value, int | float) else value


def is_missing(value: object) -> bool:
    """Whether a cell is empty: None, the NaN of pandas, or blank text."""
    is_blank = isinstance(value, str) and not value.strip()
    return value is None or value != value or is_blank


def nonempty(row: dict, name: str) -> str:
    """A field that must hold text; a lone surrogate, which no tokenizer takes, becomes "?"."""
    if not isinstance(row[name], str) or not row[name].strip():
        raise ValueError(f"the field {name!r} must be text and not empty, not {row[name]!r}")
    return row[name].encode("utf-8", "replace").decode()


def doc_number(value: object, column: str) -> int:
    """The number of a document, from 0; a name, or a larger number, becomes its checksum, the same one in
    every file."""
    name = str(value).strip()
    # As pandas writes numbers where one is missing.
    number = name.removesuffix(".0")
    if number.isdecimal() and int(number) < 2**31:
        return int(number)
    is_large = isinstance(value, int) and value >= 2**31
    if is_large or (isinstance(value, str) and name):
        return zlib.crc32(name.encode()) >> 1
    raise ValueError(f"the field {column!r} must be a number from 0 to {2**31 - 1}, or a name, not {value!r}")


def context_of(row: dict, text: str) -> str:
    """The column that questions are about: `text` if it is a name that somebody chose, which must be there,
    or if there is no "context"."""
    if text == DataFlags.text and ("context" in row or text not in row):
        return "context"
    if text not in row:
        raise missing_field(text, row)
    return text


def qa_record(row: dict, columns: DataFlags) -> dict:
    """A text and its questions: those of "qas", or the one of the row itself."""
    text = nonempty(row, context_of(row, columns.text))
    record = {"text": text, "qas": []}
    for qa in row.get("qas", [row]):
        answers = mrqa_answers(qa, text) if "detected_answers" in qa else squad_answers(qa)
        record["qas"].append(question_of(qa) | answers)
    # Not "doc", as these numbers mean something else in another file.
    if isinstance(row.get("article"), int):
        record["article"] = row["article"]
    elif not is_missing(row.get("title")):
        record["article"] = doc_number(row["title"], "title")
    return record


def question_of(qa: dict) -> dict:
    """The id and the text of a question."""
    # MRQA has qid, KLUE guid.
    name = next((name for name in ("qid", "guid") if name in qa), "id")
    return {"id": str(qa[name]), "question": nonempty(qa, "question")}


def squad_answers(qa: dict) -> dict:
    """The answers of a question: a list of objects, or an object of lists, as the hub has it; maybe none.
    check_answers in data_prep.py says whether they can be used."""
    answers = []
    given = qa.get("answers")
    # One that is missing is skipped below.
    if is_missing(given) or isinstance(given, str):
        given = [given]
    # In SQuAD 2 and the like, what stands there may be a trap.
    if any(str(qa.get(name)).lower() in ("true", "1", "1.0") for name in ("is_impossible", "no_answer")):
        given = []
    for found in as_list(given):
        if not isinstance(found, dict):
            found = {"text": found}
        if is_missing(found.get("text")):
            continue
        answers.append({"text": found.get("text"), "start": found.get("answer_start")})
    return {"answers": answers}


def as_list(value: object) -> list:
    """[{"a": 1, "b": 3}, {"a": 2, "b": 4}] of {"a": [1, 2], "b": [3, 4]}; a list stays one."""
    if not isinstance(value, dict):
        return value
    if not all(isinstance(column, list) for column in value.values()):
        return [value]
    if len({*map(len, value.values())}) > 1:
        raise ValueError(f"the lists {', '.join(value)} must have the same length")
    rows = zip(*value.values(), strict=True)
    return [dict(zip(value, row, strict=True)) for row in rows]


def mrqa_answers(qa: dict, context: str) -> dict:
    """The answers of a question of MRQA, where the last character of an answer belongs to its span."""
    references = qa["answers"]
    if not isinstance(references, list) or not all(isinstance(answer, str) for answer in references):
        raise ValueError(f"the field 'answers' must be a list of texts, not {references!r}")
    answers = []
    for found in as_list(qa["detected_answers"]):
        for span in as_list(found["char_spans"]):
            first, last = span.values() if isinstance(span, dict) else span
            text = context[first:last + 1]
            # MRQA found the answers up to case and punctuation. check_answers reports other differences.
            if re.sub(r"\W", "", text.lower()) != re.sub(r"\W", "", found["text"].lower()):
                text = found["text"]
            answers.append({"text": text, "start": first})
    return {"answers": answers, "references": references}


# ---------------------------------------------------------------- data sets by name or path

@dataclass
class Source:
    """Where the records of a data set come from. It is prepared again when one of them changes (if you edit
    a reader, remove the folder that load() names)."""
    splits: dict[str, list[Path | dict]]                        # split -> its files, or its records
    cut: dict[str, float] = field(default_factory=dict)         # split to cut where it has no files -> share
    kind: str | None = None                                     # None: found by the fields (KIND_OF_FIELD)
    columns: DataFlags = field(default_factory=DataFlags)       # what is read of the files
    # Of a task of your own: records, and the arrays of their texts (data.ARRAYS) -> more arrays by name.
    own_arrays: Callable[[list[dict], dict], dict] | None = None

    def records(self, split: str) -> Iterator[dict]:
        """The records of a split, read anew from its files each time; none where there is no such split."""
        for part in self.splits.get(split, []):
            if isinstance(part, Path):
                yield from read(part, self.columns)
            elif "label" in part:
                # As in files, a number is the name of a class, too.
                yield part | {"label": label_of(part["label"])}
            else:
                yield part

    def set_columns(self, name: str, flags: DataFlags) -> None:
        """Sets the columns that files are read by, from any config with text, label and doc. Raises UserError
        if text and label are the same, or if columns are named and the data set `name` has no files."""
        columns = DataFlags(flags.text, flags.label, flags.doc)
        parts = itertools.chain(*self.splits.values())
        if columns != DataFlags() and not any(isinstance(part, Path) for part in parts):
            raise UserError(f"--dataset={name}: is not read from files, so that --text, --label and --doc "
                            "name nothing there")
        if columns.text == columns.label:
            raise UserError(f"--text={columns.text} --label={columns.label}: are the same column; name the "
                            "other one, too")
        self.columns = columns


MRQA = "https://s3.us-east-2.amazonaws.com/mrqa/release/v2/"
DONT_STOP = "https://allennlp.s3-us-west-2.amazonaws.com/dont_stop_pretraining/data/"
SCIBERT = ("https://raw.githubusercontent.com/allenai/scibert/06793f77d7278898159ed50da30d173cdc8fdea9/"
           "data/text_classification/")


def of_scibert(folder: str, *sha256: str) -> dict[str, tuple[str, str]]:
    """Train, dev and test of a data set of the SciBERT repository, which are lines of JSON."""
    return {f"{split}.jsonl": (f"{SCIBERT}{folder}/{split}.txt", checksum)
            for split, checksum in zip(SPLITS, sha256, strict=False)}


# The files of each data set that is downloaded, with their sha256 (None: nobody has published it). The dev
# files of MRQA are what the paper reports: `test`. The others are split as by Gururangan et al. 2020.
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
    "chemprot": of_scibert(
        "chemprot",
        "ab17b85c4fb869b2338d7c9617414e63f3c7225e5005920b18d9cd996f1049d8",
        "bfe8f39e5146ad4bb16b23707dade850546a305047bc666f6f6824c6a7e3df2f",
        "372249c85ffea6d9a18dc5168cf45841b3d79b03412d6c620381cfc0dd3d6d49"),
    "scierc": of_scibert(
        "sciie-relation-extraction",
        "83d395d97de2c02dcb4898af3c6e34b5f5aa19771298fbc9f69ae435fa1258fb",
        "9500a8e561f1ce50d972b8473525fe24ebae732bde653c381a4c65945965567a",
        "be4c06d2b8903783818a5e4cba08c71b954a86f00021907706f66ac3e26c58bd"),
    "acl_arc": of_scibert(
        "citation_intent",
        "58eef60d2bbfdabefc3de25191714f769db03134523ef67e87d864112c67908c",
        "bc456ac8caf40829dc2d3a44801a385ad8463c80682cbf002c19329b35812b5f",
        "749d083cc3141d54a2bf1475c02a5a1c020c664601d55fe2829bdf85f06db4bb"),
    "scicite": of_scibert(
        "sci-cite",
        "3046a7288579c797052f82b55ec1b243231a7d80653462d052ebbbb2a6bd322b",
        "1dc52ca86748d6638642a204eff94714ca6cd6202e73fbe64eab09e3581cad02",
        "ac76196975f15d3a4317ccd702da9fc774f9a29caa962f87bbd5d1f9b810f1ab"),
    "imdb": {f"{split}.jsonl": (f"{DONT_STOP}imdb/{split}.jsonl", None) for split in SPLITS[:3]},
}


def make_once(path: Path, make: Callable[[Path], object]) -> None:
    """Makes a file or folder of the cache by make(path), unless it is there: in one of the processes that
    torchrun starts, while the others wait."""
    with error_context(f"NMG_CACHE={CACHE}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{path}.lock").acquire()
    with lock:
        if not path.exists():
            with runs.atomic_write(path) as partial:
                make(partial)


def download_file(url: str, target: Path, sha256: str | None) -> None:
    """Raises OSError if the file is not whole: by its checksum, or else by the length that the server
    says."""
    with urllib.request.urlopen(url) as response, open(target, "wb") as f:
        length = response.headers["Content-Length"]
        with tqdm.wrapattr(response, "read", int(length or 0), desc=target.name, disable=None) as body:
            shutil.copyfileobj(body, f)
        if sha256 is None and str(f.tell()) != length:
            raise OSError(f"{f.tell():,} bytes came, but the server says {length}")
    if sha256 not in (None, runs.checksum(target)):
        raise OSError(f"invalid hash, its sha256 is not {sha256}")


def downloaded(name: str) -> Source:
    """A data set of DOWNLOADS. Whoever has its files already puts them into the folder of that name."""
    folder = CACHE / "raw" / name

    def download(partial):
        partial.mkdir()
        for file, (url, sha256) in DOWNLOADS[name].items():
            try:
                download_file(url, partial / file, sha256)
            except (OSError, HTTPException) as e:
                raise UserError(f"{url}: cannot be downloaded ({e}); files of your own go into {folder}, or "
                                "use --dataset=PATH") from e

    make_once(folder, download)
    return Source(find_splits(folder))


def emrqa() -> Source:
    """20 % of the notes are held out for scoring, as in the paper."""
    folder = CACHE / "raw/emrqa"
    if not (folder / "data.json").exists():
        raise UserError(f"emrqa: needs {folder}/data.json, which the n2c2 portal (DBMI, Harvard, 'Community "
                        "Annotations') gives out under a data-use agreement")
    return Source({"train": [folder / "data.json"]}, cut={"test": 0.2})


def toy_source(name: str) -> Source:
    records = toy.TASKS[name]()
    return Source({split: records[split] for split in SPLITS})


# Every data set that has a name: a function () -> Source.
DATASETS: dict[str, Callable[[], Source]] = {"emrqa": emrqa}
DATASETS |= {name: functools.partial(downloaded, name) for name in DOWNLOADS}
DATASETS |= {name: functools.partial(toy_source, name) for name in toy.TASKS}


def find_source(name: str) -> Source:
    """The source of --dataset: a registered name, hf:REPO or hf:REPO:CONFIGURATION, a folder, or a file."""
    if name in DATASETS:
        if Path(name).exists():
            print(f"WARNING: --dataset={name} is the data set of that name; what lies here is called "
                  f"--dataset=./{name}", flush=True)
        return DATASETS[name]()
    if name.startswith("hf:"):
        return Source(hub_files(name), cut={"dev": 0.1})
    path = Path(name)
    with error_context(f"--dataset={name}"):
        if path.is_dir():
            return Source(find_splits(path), cut={"dev": 0.1})
        if not path.is_file():
            raise UserError(f"--dataset={name}: no such file or folder, nor a known name"
                            f"{runs.nearest(name, DATASETS)}")
        check_shards(name, [path])
        if reader_of(path) is read_lines:
            return Source({"corpus": [path]})
        return Source({"train": [path]}, cut={"dev": 0.1})


def hub_files(name: str) -> dict[str, list[Path]]:
    """The files of a data set of the Hugging Face hub, which the library `datasets` downloads once. No remote
    code is executed."""
    import datasets
    repo, _, configuration = name.removeprefix("hf:").partition(":")
    if not repo:
        raise UserError(f"--dataset={name}: which one? hf:OWNER/NAME, or hf:OWNER/NAME:CONFIGURATION")
    try:
        found = datasets.load_dataset(repo, configuration or None)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as e:
        reason = " ".join(str(e).split())
        raise UserError(f"--dataset={name}: cannot be loaded ({reason}); give hf:OWNER/NAME, or where it has "
                        "several configurations hf:OWNER/NAME:CONFIGURATION, or the folder of a copy") from e
    return arrow_files(found, name)


def arrow_files(found, name: str) -> dict[str, list[Path]]:
    """The files of each split of a Dataset (all of it is train) or DatasetDict of the library `datasets`."""
    if not isinstance(found, dict):
        found = {"train": found}
    files = {}
    for part, dataset in found.items():
        split = SPLIT_NAMES.get(re.split(r"[\W_]", part.lower())[0])
        if split in files:
            raise UserError(f"{name}: two of its parts could be {split} ({', '.join(found)}); save those "
                            "that you want with save_to_disk, and give that folder")
        if split:
            files[split] = [Path(file["filename"]) for file in dataset.cache_files]
        else:
            print(f"{name}: {part} is not read, as its name is not train, dev, test or corpus", flush=True)
    if not files:
        raise UserError(f"{name}: none of its parts is train, dev, test or corpus: {', '.join(found)}")
    return files


def split_of(name: str) -> str | None:
    """The split that a file is by its name: train.csv, val-00000-of-00002.parquet, dev-v1.1.json; None for
    others, such as test_protocol.txt, and for what --predict has written."""
    if ".predicted." in name.lower():
        return None
    word = re.match(r"([^\W_]+)([-_]v?\d[^.]*)?(\.|$)", name.lower())
    return SPLIT_NAMES.get(word[1]) if word else None


def find_splits(folder: Path) -> dict[str, list[Path]]:
    """The files of each split: in a folder of save_to_disk, or files (or folders of files) that are named as
    split_of says. Prints which files are not read."""
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        import datasets
        return arrow_files(datasets.load_from_disk(str(folder)), str(folder))
    found = collections.defaultdict(list)
    unread = []
    for path in sorted(folder.iterdir()):
        split = split_of(path.name)
        files = [path]
        if path.is_dir() and split:
            files = sorted(path.iterdir())
            # The library `datasets` has saved this split alone.
            if path / "state.json" in files:
                files = find_splits(path)["train"]
        for file in files:
            has_format = suffix_of(file) in READERS
            if split and has_format:
                found[split].append(file)
            elif has_format or (split and file.is_file()):
                unread.append(file.name)
    if found and unread:
        print(f"WARNING: {folder}: not read, as their names are not train, dev, test or corpus, or their "
              f"formats not {' '.join(READERS)}: {', '.join(unread[:20])}", flush=True)
    for split, files in found.items():
        if len(files) > 1 and not all(SHARD.search(file.name) for file in files):
            raise UserError(f"{folder}: {files[0].name} and {files[1].name} could be {split}; keep one, or "
                            "join them (where each file is a text, as the lines of a .jsonl file: "
                            "docs/formats.md has the code)")
        check_shards(folder, files)
    if not found:
        raise UserError(f"{folder}: no file named train, dev, test or corpus ({' '.join(READERS)}, also "
                        ".gz) in this folder; or give the path of one file, or of a folder in it")
    return dict(found)


def check_shards(where: str | Path, files: list[Path]) -> None:
    """Raises UserError if files are shards of one, such as train-00000-of-00002.parquet, and some lack."""
    shards = [SHARD.search(file.name) for file in files]
    if not all(shards):
        return
    found = sorted((int(shard[1]), int(shard[2])) for shard in shards)
    if found != [(i, len(files)) for i in range(len(files))]:
        _, total = found[0]
        raise UserError(f"{where}: {files[0].name} is one of {total} files, but here are {len(files)}; all "
                        "of them are needed, each once, in one folder, and no others")
