"""Raw files in, token arrays out. Every stage calls load(); as a script, this file prepares and shows counts.

    python data_prep.py --dataset=chemprot --lm=bert-base-uncased     # downloads and prepares
    python data_prep.py --dataset=my_folder                           # train, dev, test, corpus in any format
    python data_prep.py --dataset=reviews.csv                         # one file; a dev split is cut from it
    python data_prep.py --dataset=hf:stanfordnlp/imdb                 # of the Hugging Face hub

Formats: .csv .tsv .parquet .jsonl .json (tables with the columns --text, --label and --doc, or questions:
SQuAD 1.1, MRQA, emrQA, rows as the hub has them), .txt (a corpus, one document per line), and folders of
save_to_disk.
"""
import collections
import functools
import hashlib
import inspect
import itertools
import json
import re
import string
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import regex
from confusable_homoglyphs.confusables import confusables_data
from tokenizers import Encoding, Tokenizer
from tqdm import tqdm

from nmg.counts import WORD
from support import runs, toy
from support.data import ARRAYS, Data, Split, cut_docs, offsets_of
from support.models import load_tokenizer, special_tokens_of
from support.runs import UserError
from support.sources import CACHE, SPLITS, DataFlags, Source, error_context, find_source, make_once

FORMAT = 11             # goes up when what is kept changes, so that old caches are not read
# The kind of a data set (KIND of its finetune_*.py) by a field of its records; "text" where it has neither.
KIND_OF_FIELD = {"label": "cls", "qas": "qa"}
# What a text consists of: words, and all that stands between them, sign by sign. A blank before either is no
# unit, as tokenizers may put it into the token of what follows.
UNIT = regex.compile(rf"{WORD.pattern}|\S\p{{M}}*|[^\S ]|\ (?!\S)")
MARKS = regex.compile(r"\p{M}*")
# Characters that one does not see; white space apart.
INVISIBLE = regex.compile(r"(?V1)[[\p{DI}\p{Cc}\p{Cf}]--\s]")
NUMBER = re.compile(r"-?\d+(\.\d*)?(e-?\d+)?")
# How exports write an empty cell or a failed formula: NA, <NA>, #N/A, [NULL], \N.
NO_VALUE = re.compile(r"[#<(\[]?(na|n/a|nan|nat|null|none|undefined)[>)\]]?|\\n|"
                      r"#(name\?|(ref|value|num|null|div/0)!)", re.I)
# Parts of spaCy pipelines that take time and that named entities do not depend on.
NOT_FOR_ENTITIES = ["tagger", "morphologizer", "parser", "attribute_ruler", "lemmatizer"]


# ---------------------------------------------------------------- load

def load(name: str, tokenizer, dev_share: float | None = None, spacy_model: str | None = None,
         kind: str | None = None, columns: DataFlags | None = None, corpus: str | None = None) -> Data:
    """Prepares a data set for a tokenizer, or opens what was prepared before; prints its counts.

    dev_share: share of train to cut as dev where there is none; kind: what the caller can work with ("cls",
    "qa"), None for all; columns: what is read of a table; corpus: a file of unlabelled texts, where the data
    set has none. Raises UserError; whether labels can be used, Data.check_labels tells."""
    source = find_source(name)
    if corpus:
        add_corpus(source, name, corpus)
    parts = list(itertools.chain(*source.splits.values()))
    files = [part for part in parts if isinstance(part, Path)]
    records = [part for part in parts if not isinstance(part, Path)]
    if columns:
        source.set_columns(name, columns)
    if dev_share is not None and "dev" not in source.splits:
        if "train" not in source.splits:
            raise UserError(f"--dev_share={dev_share}: {name} has no train split to cut from; text in a "
                            "file named train.txt, in a folder, is one")
        source.cut["dev"] = dev_share
    # A split is cut from train only where it has no files of its own.
    source.cut = {split: share for split, share in source.cut.items() if split not in source.splits}
    special = special_tokens_of(tokenizer)

    # What was prepared is found by the checksum of all that went into it.
    # (4 is an old version number. It stays, so that checksums in older results remain valid.)
    how = [4, asdict(source.columns), source.cut, list(source.splits), source.kind]
    how.append(tokenizer.backend_tokenizer.to_str())
    if source.own_arrays:
        how.append(inspect.getsource(source.own_arrays))
    with error_context(f"--dataset={name}"):
        how += [(file.name, runs.checksum(file)) for file in files]
    if records:
        how.append(runs.digest(records))
    key = hashlib.sha256(json.dumps(how).encode()).hexdigest()
    folder = CACHE / "prepared" / f"{Path(name).stem}-{key[:12]}-{FORMAT}"
    make_once(folder, lambda partial: prepare(source, tokenizer, partial, name))

    meta = json.loads((folder / "meta.json").read_text())
    if kind and not {"train", "corpus"} & {*meta["splits"]}:
        raise UserError(f"--dataset={name}: there is no train split to learn from, only "
                        f"{', '.join(meta['splits'])}; training files are called train, or train-...")
    if kind not in (None, meta["kind"]):
        script = "pretrain.py" if meta["kind"] == "text" else f"finetune_{meta['kind']}.py"
        raise UserError(f"--dataset={name}: holds {meta['kind']!r} data, not {kind!r}; it is for {script}, "
                        "or --label=COLUMN names the labels of a table (if you edited how data are read, "
                        f"remove {folder})")
    default_model = "toy" if name in toy.TASKS else "en_core_web_sm"
    entities = functools.partial(find_entities, model=spacy_model or default_model)
    splits = {split: Split(folder / split, special, meta["labels"], entities) for split in meta["splits"]}
    for split in splits.values():
        split.train = splits.get("train", split)
    data = Data(name, meta["kind"], splits, key, meta["shared_doc_ids"], meta["label_errors"])
    print(f"{name} ({data.kind}) in {folder}")
    for split in splits:
        describe(split, splits[split], tokenizer.unk_token_id)
    print(*meta["look"], sep="\n", flush=True)
    return data


def add_corpus(source: Source, name: str, corpus: str) -> None:
    """Makes a file the corpus of a data set. Raises UserError if that has one."""
    if "corpus" in source.splits:
        raise UserError(f"--corpus={corpus}: {name} has a corpus already; join the two, or leave one out")
    if not Path(corpus).is_file():
        raise UserError(f"--corpus={corpus}: no such file; its formats are those of --dataset "
                        "(docs/formats.md has the code that makes one of a folder of texts)")
    source.splits["corpus"] = [Path(corpus)]


def what_to_read(data: Data) -> str | None:
    """What pre-training reads without --read: "both" if there are train and a corpus. None: the one there is,
    or of the toy world the corpus, with which it was tuned."""
    has_both = {"train", "corpus"} <= data.splits.keys()
    return "both" if has_both and data.name not in toy.TASKS else None


def text_to_read(data: Data, read: str | None) -> Split:
    """The text of pre-training: "train", "corpus", or "both", the texts of train and behind them those of the
    corpus, a split that is made once. None: the corpus, or train if there is none."""
    if read is None:
        return data.corpus
    if read in ("train", "corpus"):
        return data[read]
    if read != "both":
        raise UserError(f"--read={read}: allowed are train, corpus, both")
    train, corpus = data["train"], data["corpus"]
    folder = train.folder.parent / "both"
    make_once(folder, lambda partial: join(train, corpus, data.shared_doc_ids, partial))
    both = Split(folder, train.special, [], train.find_entities)
    both.train = train
    return both


def join(train: Split, corpus: Split, same_documents: bool, folder: Path) -> None:
    """Writes the texts of two splits as one, without labels and questions. same_documents: whether both
    number their documents alike; otherwise they share none."""
    folder.mkdir()
    arrays = {}
    for name in ("input_ids", "word_ids", "char_begin", "char_end", "is_punct", "utf8"):
        arrays[name] = [getattr(train, name), getattr(corpus, name)]
    for name in ("token_start", "byte_start"):
        first, second = getattr(train, name), getattr(corpus, name)
        arrays[name] = [first, first[-1] + second[1:]]
    shift = 0 if same_documents else 2**31
    # Numbers from 0, of 32 bits.
    _, doc = np.unique(np.concatenate((train.doc, corpus.doc + np.int64(shift))), return_inverse=True)
    arrays["doc"] = [doc]
    append(folder, arrays)


def split_to_predict(records: list[dict], tokenizer, labels: list[str], folder: Path, what: str) -> Split:
    """A split of records without a data set, for prediction, whose arrays are written to `folder`."""
    numbered = [record | {"doc": i} for i, record in enumerate(records)]
    fields = {"qas"} if any("qas" in record for record in records) else set()
    write_split(numbered, tokenizer, folder, fields, labels, what)
    return Split(folder, special_tokens_of(tokenizer), labels, find_entities)


def describe(name: str, split: Split, unknown: int | None) -> None:
    """Prints the counts that one should see."""
    docs = len(np.unique(split.doc))
    text = f"  {name:6} {len(split):>9,} texts  {len(split.input_ids):>11,} tokens  {docs:>9,} documents"
    tokens = np.diff(split.token_start)
    text += f"  {tokens.min():,} to {tokens.max():,} tokens a text, median {np.median(tokens):,.0f}"
    if hasattr(split, "question_text"):
        text += f"  {len(split.question_text):,} questions"
    if hasattr(split, "label"):
        counts = np.bincount(split.label[split.label >= 0], minlength=len(split.labels))
        frequent = np.argsort(-counts, kind="stable")[:12]
        counted = [f"{split.labels[i]} {counts[i]:,}" for i in frequent] + ["..."] * (len(counts) > 12)
        text += f"  {len(split.labels)} labels: {', '.join(counted)}"
    print(text, flush=True)
    unknown_share = np.mean(split.input_ids[:1_000_000] == unknown)
    if unknown_share > 0.2:
        print(f"WARNING: {unknown_share:.0%} of the tokens of {name} are unknown to the tokenizer: is the LM "
              "one for this language?", flush=True)


# ---------------------------------------------------------------- records -> token arrays

def prepare(source: Source, tokenizer, folder: Path, name: str) -> None:
    """Writes the arrays of every split and, last, meta.json."""
    # Train is read at once: it tells which fields and labels there are, and other splits are cut from it.
    records = list(source.records("train"))
    train = list(with_docs(records))
    first = records[0] if records else {}
    fields = set()
    for record in train:
        fields |= KIND_OF_FIELD.keys() & record.keys()
    counts = collections.Counter(record["label"] for record in train if isinstance(record.get("label"), str))
    labels = sorted(counts)
    if train and "label" not in fields and source.columns.label != DataFlags.label:
        raise UserError(f"--label={source.columns.label}: no row of train has this column")
    # The splits whose documents have numbers that mean the same as in train.
    numbered = []
    if "doc" in first:
        numbered = [split for split in source.splits if "doc" in next(iter(source.records(split)), {})]

    # The others are read as they are written.
    splits = {split: with_docs(source.records(split), split == "corpus") for split in source.splits}
    if "train" in splits:
        splits |= cut_parts(train, source.cut)
    names = [split for split in SPLITS if split in splits]
    label_errors, written = {}, {}
    alike = look_alikes(labels)
    for split in names:
        # A corpus is text only.
        wanted = fields if split != "corpus" else set()
        own_arrays = source.own_arrays if split != "corpus" else None
        what = f"{name}, {split}"
        problem = write_split(splits[split], tokenizer, folder / split, wanted, labels, what, own_arrays)
        problem = problem or alike
        if problem:
            label_errors[split] = problem
        written[split] = Split(folder / split, special_tokens_of(tokenizer), labels, find_entities)

    examples = records[:3] or itertools.islice(source.records(names[0]), 3)
    look = [*map(example_of, examples), *warn_of_labels(counts), *warn_of_texts(train),
            *overlaps(written, numbered)]
    kind = source.kind or next((KIND_OF_FIELD[field] for field in KIND_OF_FIELD if field in fields), "text")
    meta = {"kind": kind, "labels": labels, "splits": names, "shared_doc_ids": "corpus" in numbered,
            "label_errors": label_errors, "look": look}
    (folder / "meta.json").write_text(json.dumps(meta))


# ---------------------------------------------------------------- a look at what was read

def beginning(text: str) -> str:
    """A text in quotes, on one line, cut to what one looks at."""
    return repr(" ".join(text.split())[:70])


def example_of(record: dict) -> str:
    """A text as it was read, shortened, with its label, or its first question and answer."""
    text = f"  for example {beginning(record['text'])}"
    if "label" in record:
        text += f", label {record['label']!r}"
    for qa in record.get("qas", [])[:1]:
        answers = [answer["text"] for answer in qa["answers"][:1]]
        text += f", question {qa['question'][:70]!r}, answer {', '.join(map(repr, answers)) or 'none'}"
    return text


def warn_of_labels(counts: collections.Counter) -> Iterator[str]:
    """Warnings of labels that look like something else than classes. counts: label -> its texts"""
    n = counts.total()
    if n >= 20 and len(counts) > n / 5:
        yield (f"WARNING: {len(counts):,} labels for {n:,} texts: are these classes, not scores, names or "
               "texts? (--label=COLUMN)")
    elif n >= 20 and 1 in counts.values():
        single = [label for label in counts if counts[label] == 1]
        yield f"WARNING: labels with a single text: {len(single)}, such as {single[0]!r}; are these classes?"
    broken = [label for label in counts if NUMBER.fullmatch(label) and float(label) % 1 > 0]
    if broken and all(map(NUMBER.fullmatch, counts)):
        yield f"WARNING: labels such as {broken[0]!r} look like scores, but each is read as a class"
    no_labels = list(filter(NO_VALUE.fullmatch, counts))
    if no_labels:
        yield (f"WARNING: the label {no_labels[0]!r} is read as a class; if it stands for no label, leave "
               "the cell empty, or remove the row")
    joined = [label for label in several_in_one(counts) if label not in no_labels]
    if joined:
        yield (f"WARNING: labels such as {joined[0]!r} look like several labels, but each is read as one "
               "class; several labels per text are not supported")
    first = {}
    for label in counts:
        other = first.setdefault(visible(label).casefold(), label)
        if visible(other) != visible(label):
            yield f"WARNING: the labels {other!a} and {label!a} differ in capitals alone, but are two classes"
        whole = label.removesuffix(".0")
        if whole != label and whole in counts:
            yield f"WARNING: the labels {whole!r} and {label!r} are the same number, but are two classes"


def several_in_one(labels: Collection[str]) -> Iterator[str]:
    """The labels that look like several ones: lists; labels joined by / & + (which stand in names, too); and
    parts joined by other signs, if one of them is a label, or all stand in other labels, too."""
    parts = {label: set(re.split(r"\s*[,;|#\n]\s*", label.strip())) - {""} for label in labels}
    labels_with = collections.Counter(itertools.chain(*parts.values()))
    known = set(labels)
    for label in labels:
        is_list = re.fullmatch(r"\[.*\]|\{.*\}", label)
        names = re.split(r"\s*[/&+]\s*", label)
        are_labels = len(names) > 1 and known.issuperset(names)
        has_label = not parts[label].isdisjoint(known)
        parts_recur = all(labels_with[part] > 1 for part in parts[label])
        if is_list or are_labels or (len(parts[label]) > 1 and (has_label or parts_recur)):
            yield label


def alarm(share: float) -> str:
    """How a line begins that tells of a share of the texts: small ones are told without alarm."""
    return "WARNING:" if share > 0.05 else " "


def warn_of_texts(records: list[dict]) -> Iterator[str]:
    """Warnings of texts of train that repeat: what stands for no text, and what has several labels."""
    # In question answering a text may stand in many rows.
    records = [record for record in records if "qas" not in record]
    texts = collections.Counter(record["text"].strip() for record in records)
    for text, n in texts.most_common(3):
        if n >= 10 and n > len(records) / 200:
            yield (f"WARNING: {n:,} of {len(records):,} texts are {beginning(text)}; if this stands for no "
                   "text, remove these rows")
    labelled = set()
    for record in records:
        if isinstance(record.get("label"), str):
            labelled.add((record["text"].strip(), record["label"]))
    labels_of = collections.Counter(text for text, _ in labelled)
    several = [text for text, n in labels_of.items() if n > 1]
    if several:
        share = len(several) / len(labels_of)
        yield (f"{alarm(share)} {len(several):,} of {len(labels_of):,} different texts of train have several "
               f"labels, such as {beginning(several[0])}")


def overlaps(splits: dict[str, Split], numbered: list[str]) -> Iterator[str]:
    """What of dev and test also stands in train and corpus, and the documents that they share with train."""
    held_out = {name: set(stripped_texts(splits[name])) for name in ("dev", "test") if name in splits}
    if not held_out:
        return
    # Each is read once, one text after another, as a corpus may be larger than memory.
    every = set().union(*held_out.values())
    learned = {name: every.intersection(stripped_texts(splits[name]))
               for name in ("train", "corpus") if name in splits}
    for name, texts in held_out.items():
        for other, found in learned.items():
            both = texts & found
            if both:
                share = len(both) / len(texts)
                yield f"{alarm(share)} {share:.1%} of the texts of {name} also stand in {other}"
        if name in numbered:
            shared = np.isin(splits[name].doc, splits["train"].doc)
            if shared.any():
                yield f"WARNING: {shared.mean():.1%} of the texts of {name} are from documents of train"


def stripped_texts(split: Split) -> Iterator[str]:
    for i in range(len(split)):
        yield split.text(i).strip()


def look_alikes(labels: list[str]) -> str | None:
    """A sentence about two labels that look identical; None if there are none."""
    seen = {}
    for label in labels:
        other = seen.setdefault(visible(label), label)
        if other != label:
            return f"the labels {other!a} and {label!a} look alike; make them one"
    return None


def visible(label: str) -> str:
    """What one sees of a label: without invisible characters, with one kind of white space and accents, and
    with the letters of ASCII in place of those that look the same."""
    characters = []
    for c in INVISIBLE.sub("", unicodedata.normalize("NFKC", label)):
        # Letters of ASCII are told apart: 1 from l, and rn from m.
        if not c.isascii():
            alike = [other["c"] for other in confusables_data.get(c, []) if len(other["c"]) == 1]
            # Readers of a script tell its letters apart.
            alike = [other for other in alike if script_of(other) != script_of(c)]
            c = min([c, *alike], key=lambda c: (not c.isalpha(), c))
        characters.append(c)
    return " ".join("".join(characters).split())


def script_of(character: str) -> str:
    """The first word of the character's Unicode name, which for a letter is its script."""
    return unicodedata.name(character, "").partition(" ")[0]


def cut_parts(train: list[dict], cut: dict[str, float]) -> dict[str, list[dict]]:
    """What is left of train, and the splits that are cut from it, whole documents each.

    cut: split -> its share of the texts that are left by then"""
    parts = {}
    for part, share in cut.items():
        held_out = cut_docs(np.array([record["doc"] for record in train]), share)       # (N,)
        if held_out.all() and len({record["doc"] for record in train}) > 1:
            raise UserError(f"--dev_share={share:g}: leaves nothing of train; it must be smaller")
        # A single document cannot be divided: then nothing is cut.
        if not held_out.all():
            parts[part] = [record for record, out in zip(train, held_out, strict=True) if out]
            train = [record for record, out in zip(train, held_out, strict=True) if not out]
    return parts | {"train": train}


def with_docs(records: Iterable[dict], is_corpus: bool = False) -> Iterator[dict]:
    """The records, each with the number of its document: its "doc", its article, or else a number shared by
    all texts that are equal up to entity markers (<< >>, [[ ]]) and white space."""
    seen = {}
    for i, record in enumerate(records):
        doc = record.get("doc", record.get("article"))
        # A corpus may be long: nothing is remembered of it, as nothing is held out from it.
        if doc is None and is_corpus:
            doc = i
        elif doc is None:
            doc = seen.setdefault(hash(plain(record["text"])), i)
        yield record | {"doc": doc}


def plain(text: str) -> str:
    """What texts of one document have in common: a text without entity markers, white space and capitals."""
    return re.sub(r"<<|>>|\[\[|\]\]|\s+", "", text).lower()


def write_split(records: Iterable[dict], tokenizer, folder: Path, fields: set[str], labels: list[str],
                what: str, own_arrays: Callable | None = None) -> str | None:
    """Tokenizes the records, 1,000 at a time, and appends them to the arrays of a Split. Returns the first
    reason why labels or answers cannot be used; None where all can.

    fields: "label" and "qas", where they are to be written; own_arrays: as in Source"""
    folder.mkdir(parents=True)
    is_punct, is_special = vocabulary_tables(tokenizer)
    encoder = text_encoder(tokenizer)
    n, errors = 0, []
    id_of_label = {name: i for i, name in enumerate(labels)}
    records = iter(tqdm(records, desc=what, unit="row", disable=None))
    while chunk := list(itertools.islice(records, 1000)):
        arrays = text_arrays(chunk, encoder, is_punct, is_special)
        if own_arrays:
            arrays |= own_arrays(chunk, arrays)
        if "label" in fields:
            arrays["label"] = [label_id(record, id_of_label, errors) for record in chunk]
        if "qas" in fields:
            unasked = next((record for record in chunk if "qas" not in record), None)
            if unasked:
                raise UserError(f"{what}: the text {unasked['text'][:60]!r} has no question, unlike those of "
                                "train; call its column 'context', or add an empty column 'answers'")
            arrays |= question_arrays(chunk, arrays, encoder, folder, n, errors)
        append(folder, arrays)
        n += len(chunk)
    if n == 0:
        raise UserError(f"{what}: there is no text in it")
    if (folder / "input_ids.bin").stat().st_size == 0:
        raise UserError(f"{what}: the tokenizer drops every character of it; are there letters in it?")
    if "qas" in fields and (folder / "answer.bin").stat().st_size == 0:
        raise UserError(f"{what}: there is no question in it")
    # Where each text, its characters and each question start, from how long they are.
    for name in ("token_start", "byte_start", "question_start"):
        file = folder / f"{name}.bin"
        if file.exists():
            file.write_bytes(offsets_of(np.fromfile(file, ARRAYS[name])))
    return errors[0] if errors else None


def append(folder: Path, arrays: dict[str, Iterable]) -> None:
    """Adds the parts of each array (numbers or arrays) to the end of NAME.bin."""
    for name, parts in arrays.items():
        with open(folder / f"{name}.bin", "ab") as f:
            f.writelines(np.asarray(part, ARRAYS[name]).tobytes() for part in parts)


def text_encoder(tokenizer) -> Callable[[list[str]], list[tuple[np.ndarray, Encoding]]]:
    """A function: texts -> the ids and the encoding of each, of any length, without special tokens around it.
    A special token that is written in a text, such as [SEP], is text like any other; markers that somebody
    added to the tokenizer stay one token."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    special = [*tokenizer.special_tokens_map.values()]
    for token in state["added_tokens"]:
        token["special"] = token["content"] in special
    # Some tokenizer files carry a length of their own.
    backend = Tokenizer.from_str(json.dumps(state | {"truncation": None, "padding": None}))
    backend.encode_special_tokens = True
    # Unigram models have "</s>" among their pieces: in a text it is then unknown.
    id_in_text = np.arange(special_tokens_of(tokenizer).vocabulary_size, dtype=np.int32)
    if tokenizer.unk_token_id is not None:
        id_in_text[tokenizer.convert_tokens_to_ids(special)] = tokenizer.unk_token_id

    def encode(texts: list[str]) -> list[tuple[np.ndarray, Encoding]]:
        encodings = backend.encode_batch(texts, add_special_tokens=False)
        return [(id_in_text[np.array(encoding.ids, int)], encoding) for encoding in encodings]

    return encode


def vocabulary_tables(tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Two (V,) bool: which tokens are punctuation, and which are special, [UNK] apart."""
    ids = np.arange(special_tokens_of(tokenizer).vocabulary_size)
    is_punct = []
    for token in tokenizer.backend_tokenizer.decode_batch(ids[:, None].tolist(), skip_special_tokens=False):
        signs = [c in string.punctuation or unicodedata.category(c)[0] == "P" for c in token.strip()]
        is_punct.append(signs != [] and all(signs))
    return np.array(is_punct), np.isin(ids, tokenizer.all_special_ids) & (ids != tokenizer.unk_token_id)


def text_arrays(chunk: list[dict], encoder: Callable, is_punct: np.ndarray, is_special: np.ndarray) -> dict:
    """The arrays of some texts: NAME -> one array per text."""
    arrays = collections.defaultdict(list)
    texts = [record["text"] for record in chunk]
    for record, (ids, encoding) in zip(chunk, encoder(texts), strict=True):
        text = record["text"]
        begin, end, word_ids = words_of_tokens(text, np.array(encoding.offsets, np.int32).reshape(-1, 2))
        arrays["input_ids"].append(ids)
        arrays["word_ids"].append(np.where(is_special[ids], -1, word_ids))
        arrays["char_begin"].append(begin)
        arrays["char_end"].append(end)
        arrays["is_punct"].append(is_punct[ids])
        utf8 = np.frombuffer(text.encode(), np.uint8)
        # Lengths, which write_split turns into start offsets.
        arrays["token_start"].append(len(ids))
        arrays["byte_start"].append(len(utf8))
        arrays["utf8"].append(utf8)
        arrays["doc"].append(record["doc"])
    return arrays


def words_of_tokens(text: str, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The characters of each token, from begin (n,) to end (n,), and the index of its word (n,).

    offsets: (n, 2) the characters, as the tokenizer says. Words come from the text alone, the same under any
    tokenizer. A sign that belongs to no word is a word of its own. A token that touches several words joins
    them to one. The tokens un believ able ! of "unbelievable!" have the words 0 0 0 1, and begin at the
    characters 0 2 8 12."""
    start, stop = np.array([unit.span() for unit in UNIT.finditer(text)], np.int32).reshape(-1, 2).T
    begin, end = offsets.T
    # The first and the last unit of each token. A token of a blank, or of nothing, belongs to what follows.
    first = np.minimum(np.searchsorted(stop, begin, "right"), len(stop) - 1)
    last = np.maximum(first, np.searchsorted(start, end) - 1)
    # Characters that have no token, as a normalizer drops them (accents) or composes them (Korean letters in
    # parts, marks of half-width kana), belong to the token before them in their word, else to the one behind.
    # For example, the tokens cafe (characters 0 to 4) and ##s (5 to 6) leave out an accent between them: then
    # cafe ends at 5.
    end = np.maximum(end, np.minimum(stop[last], np.append(begin[1:], len(text))))
    begin = np.minimum(begin, np.maximum(start[first], np.append(0, end[:-1])))
    last_before = np.append(-1, np.maximum.accumulate(last)[:-1])
    return begin, end, np.cumsum(first > last_before) - 1


def label_id(record: dict, id_of_label: dict[str, int], errors: list[str]) -> int:
    """The index of a record's label; -1 where it has none that is known, and why to `errors`."""
    label = record.get("label")
    if isinstance(label, str) and label in id_of_label:
        return id_of_label[label]
    # One is enough.
    if not errors:
        reason = f"the label {label!r} is not among those of train ({', '.join(id_of_label)})"
        if label is None:
            reason = "there is no label"
        elif not isinstance(label, str):
            reason = f"a label must be text, a number, or true or false, one for each text, not {label!r}"
        errors.append(f"{reason}, in the row with the text {record['text'][:60]!r}; fix it or remove it")
    return -1


def question_arrays(chunk: list[dict], arrays: dict, encoder: Callable, folder: Path, n: int,
                    errors: list[str]) -> dict:
    """The arrays of the questions about texts n, n + 1, ..., given their arrays; adds to questions.jsonl, and
    why an answer cannot be used to `errors`."""
    found = {"question_text": [], "answer": []}
    questions = []
    for i, record in enumerate(chunk):
        for qa in record["qas"]:
            try:
                check_answers(record["text"], qa)
                answer = qa["answers"][0]
                # An answer may have been cut off before its marks.
                end = MARKS.match(record["text"], answer["start"] + len(answer["text"].rstrip())).end()
                first = np.searchsorted(arrays["char_end"][i], answer["start"], "right")
                last = np.searchsorted(arrays["char_begin"][i], end) - 1
                if first > last:
                    raise ValueError(f"the answer of question {qa['id']!r} holds no token of its context")
            except ValueError as e:
                first, last = -1, -1
                errors.append(str(e))
            found["question_text"].append(n + i)
            found["answer"].append([first, last])
            references = qa.get("references") or [answer["text"] for answer in qa["answers"]]
            questions.append({"id": qa["id"], "question": qa["question"], "references": references})
    asked = [question["question"] for question in questions]
    found["question_tokens"] = [ids for ids, _ in encoder(asked)]
    found["question_start"] = [len(ids) for ids in found["question_tokens"]]
    with open(folder / "questions.jsonl", "a", encoding="utf-8") as f:
        f.writelines(json.dumps(question) + "\n" for question in questions)
    return found


def check_answers(text: str, qa: dict) -> None:
    if not qa["answers"]:
        raise ValueError(f"question {qa['id']!r} has no answer: its field 'answers' must hold \"text\" and "
                         "\"answer_start\"; questions without an answer, as in SQuAD 2, are not supported; "
                         "remove them")
    for answer in qa["answers"]:
        begin = answer["start"]
        if not isinstance(answer["text"], str) or not isinstance(begin, int):
            raise ValueError(f"the field 'answers' of question {qa['id']!r} must hold \"text\" and "
                             f"\"answer_start\" of each answer, a number without a point, not "
                             f"{answer['text']!r} and {begin!r}; a csv file cannot hold them, but jsonl can")
        stands = text[begin:begin + len(answer["text"])]
        if begin < 0 or not stands.strip() or stands != answer["text"]:
            raise ValueError(f"the answer {answer['text'][:60]!r} of question {qa['id']!r} does not stand at "
                             f"offset {begin} of its context (found {stands[:60]!r})")


# ---------------------------------------------------------------- named entities

def find_entities(split: Split, model: str) -> np.ndarray:
    """(T,) int32: the n-th named entity of its text for every token that overlaps one, else -1.

    spaCy reads the raw texts once; the result is kept in the split's folder."""
    nlp = toy.entity_pipeline() if model == "toy" else load_spacy(model, exclude=NOT_FOR_ENTITIES)
    file = split.folder / f"ent-{Path(model).name}-{runs.digest(nlp.meta)}.bin"
    make_once(file, lambda partial: partial.write_bytes(run_spacy(split, nlp)))
    return np.memmap(file, np.int32, "r")


def load_spacy(name: str, **options):
    """A spaCy pipeline. Raises UserError if it is not installed."""
    import spacy
    try:
        return spacy.load(name, **options)
    except OSError:
        raise UserError(f"the spaCy model {name!r} is not installed: python -m spacy download {name} "
                        "(or --spacy_model=FOLDER)") from None


def run_spacy(split: Split, nlp) -> np.ndarray:
    entity_ids = np.full(len(split.input_ids), -1, np.int32)
    texts = tqdm(range(len(split)), desc="named entities", disable=None)
    for i, doc in enumerate(nlp.pipe(map(split.text, texts), batch_size=64)):
        tokens = slice(split.token_start[i], split.token_start[i + 1])
        for n, entity in enumerate(doc.ents):
            first = np.searchsorted(split.char_end[tokens], entity.start_char, "right")
            stop = np.searchsorted(split.char_begin[tokens], entity.end_char)
            entity_ids[tokens][first:stop] = n
    if (entity_ids < 0).all():
        raise UserError(f"the spaCy model {nlp.meta['name']!r} finds no named entity in this text; its "
                        f"components: {', '.join(nlp.pipe_names) or 'none'}")
    return entity_ids


# ---------------------------------------------------------------- the script

@dataclass
class Config(DataFlags):
    dataset: str = "toycls"             # chemprot scierc acl_arc scicite imdb squad newsqa emrqa toycls ...
    lm: str = "tiny"                    # whose tokenizer: tiny, a Hugging Face folder, or a hub name
    corpus: str | None = None           # a file of texts without labels, as pretrain.py reads it beside these
    dev_share: float | None = None      # share of train cut as dev if there is none; None: 0.1, but none of
                                        # data sets with a name
    kind: str | None = None             # cls or qa: a data set of another kind is refused; None: none is
    split: str | None = None            # what will be scored; None: test, or dev where there is none


def main(cfg: Config) -> None:
    data = load(cfg.dataset, load_tokenizer(cfg.lm), cfg.dev_share, kind=cfg.kind, columns=cfg,
                corpus=cfg.corpus)
    data.check_labels("train", data.scored_split(cfg.split))


if __name__ == "__main__":
    runs.start(main, Config)
