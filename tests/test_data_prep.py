"""Every format, the views (blocks, windows, batches) against Hugging Face's own, downloads, and bad input."""
import functools
import gzip
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import re
import tempfile
import time
import unicodedata
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import spacy
from conftest import SHARED, TEXTS, fast_tokenizer, needs_shared, squad, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

import data_prep
from data_prep import load
from support import sources
from support.data import blocks, collate, truncated, windows
from support.runs import UserError
from support.sources import DataFlags


def texts_of(split):
    return [split.text(i) for i in range(len(split))]


def all_of(pieces):
    """One batch of all pieces."""
    return collate(pieces, np.arange(len(pieces)))


def answer_of(split, question):
    """What the tokens of a gold answer say, as a prediction is read."""
    text_id = split.question_text[question]
    first, last = split.token_start[text_id] + split.answer[question]
    return split.text(text_id)[split.char_begin[first]:split.char_end[last]].strip()


def write_json(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


# ---------------------------------------------------------------- formats

def test_the_same_labelled_texts_in_every_format(tmp_path):
    rows = [{"text": f'{text} "quoted", {i}', "label": "ab"[i % 2]} for i, text in enumerate(TEXTS)]
    # JSON lines also under other names, as ChemProt is spread.
    for name in ("a.jsonl", "b.txt", "c.json"):
        write_rows(tmp_path / name, rows)
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    table = pd.DataFrame(rows)
    table.to_csv(tmp_path / "E.CSV", index=False)
    table.to_csv(tmp_path / "f.tsv", sep="\t", index=False)
    # As pandas writes them: records, columns, and a table with its schema.
    for orient in ("records", "columns", "table"):
        table.to_json(tmp_path / f"g-{orient}.json", orient=orient)
    table.to_parquet(tmp_path / "h.parquet")
    table.assign(label=table["label"].astype("category")).to_parquet(tmp_path / "i.parquet")
    for name in ("j.feather", "k.arrow"):
        table.to_feather(tmp_path / name)
    for file in tmp_path.iterdir():
        assert list(sources.read(file, DataFlags())) == rows, file.name


@pytest.mark.parametrize("where", ["folder", "file", "numbered"])
def test_pre_training_reads_train_and_corpus(where, tmp_path, tok):
    """All arrays fit to each other, and documents stay apart unless both files number them alike."""
    rows = [{"text": f"The cat, number {i}.", "label": "ab"[i % 2]} for i in range(20)]
    more = [{"text": "more dogs"}] * 2
    if where == "numbered":
        rows = [row | {"doc": i} for i, row in enumerate(rows)]
        more = [row | {"doc": 3} for row in more]
    write_rows(tmp_path / "d/train.jsonl", rows)
    corpus = str(write_rows(tmp_path / "d/corpus.jsonl", more))
    if where == "file":
        data = load(str(tmp_path / "d/train.jsonl"), tok, corpus=corpus)
        with pytest.raises(UserError, match=r"d has a corpus already"):
            load(str(tmp_path / "d"), tok, corpus=corpus)
    else:
        data = load(str(tmp_path / "d"), tok)
    train, both = data["train"], data_prep.text_to_read(data, "both")
    assert data_prep.what_to_read(data) == "both" and len(train) == 18 and both.train is train
    assert texts_of(both) == [*texts_of(train), "more dogs", "more dogs"]
    assert words_under(both) == [*words_under(train), *words_under(data["corpus"])]
    assert both.input_ids.tolist() == [*train.input_ids, *data["corpus"].input_ids]
    assert len(np.unique(both.doc)) == (20 if where != "numbered" else len({*train.doc, 3}))
    for read, texts in (("train", texts_of(train)), ("corpus", ["more dogs"] * 2)):
        assert texts_of(data_prep.text_to_read(data, read)) == texts
    with pytest.raises(UserError, match="--read=all: allowed are train, corpus, both"):
        data_prep.text_to_read(data, "all")


def class_labels(labels):
    """A Dataset as the hub has it: labels are numbers of the names neg and pos, or -1."""
    features = datasets.Features({"text": datasets.Value("string"),
                                  "label": datasets.ClassLabel(names=["neg", "pos"])})
    texts = [f"text {i} of {len(labels)}" for i in range(len(labels))]
    return datasets.Dataset.from_dict({"text": texts, "label": labels}, features=features)


def label_names(split):
    return [split.labels[i] for i in split.label]


def test_a_saved_folder_of_the_library_datasets(tmp_path, tok):
    parts = {"train": class_labels([0, 1, 1]), "validation": class_labels([1, 0]),
             "test": class_labels([-1] * 4), "unsupervised": class_labels([-1] * 5)}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "all")
    data = load(str(tmp_path / "all"), tok)
    assert label_names(data["train"]) == ["neg", "pos", "pos"] and label_names(data["dev"]) == ["pos", "neg"]
    assert texts_of(data.corpus)[4] == "text 4 of 5" and not hasattr(data.corpus, "label")
    # The names of classes are also those of lists with one class; a column of another type is not read.
    features = datasets.Features({"text": datasets.Value("string"),
                                  "labels": datasets.List(datasets.ClassLabel(names=["neg", "pos"]))})
    rows = {"text": ["a cat", "a dog", "a"], "labels": [[1], [0], [-1]]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "lists")
    lists = load(str(tmp_path / "lists"), tok, columns=DataFlags(label="labels"))
    assert lists["train"].labels == ["neg", "pos"]
    uuid = pa.array([bytes(16), bytes(16)], pa.uuid())
    pq.write_table(pa.table({"id": uuid, "text": ["a", "b"], "label": ["x", "y"]}), tmp_path / "u.parquet")
    assert len(load(str(tmp_path / "u.parquet"), tok)["train"]) == 1
    # All labels of test are -1, which says that there are none.
    data.check_labels("train", "dev", "corpus")
    # Each split by itself.
    class_labels([0, 1, 1]).save_to_disk(tmp_path / "each/train")
    class_labels([1]).save_to_disk(tmp_path / "each/test")
    each = load(str(tmp_path / "each"), tok)
    assert (len(each["train"]), label_names(each["test"])) == (2, ["pos"])
    with pytest.raises(UserError, match="test: there is no label"):
        data.check_labels("test")
    assert len(data["test"]) == 4
    for names, said in ((("train", "validation_a", "validation_b"), "two of its parts could be dev"),
                        (("all",), "none of its parts is train, dev, test or corpus: all")):
        datasets.DatasetDict({name: class_labels([0]) for name in names}).save_to_disk(tmp_path / "bad")
        with pytest.raises(UserError, match=said):
            load(str(tmp_path / "bad"), tok)


def test_shards_are_read_in_order_and_all_of_them(tmp_path, tok):
    """As the hub names them, with a checksum behind the numbers."""
    for i in range(3):
        class_labels([i % 2] * (i + 1)).to_parquet(tmp_path / f"train-0000{i}-of-00003-1a2b3c4d.parquet")
    write_rows(tmp_path / "dev.jsonl", [{"text": "a", "label": "pos"}])
    assert texts_of(load(str(tmp_path), tok)["train"]) == [
        "text 0 of 1", "text 0 of 2", "text 1 of 2", "text 0 of 3", "text 1 of 3", "text 2 of 3"]
    (tmp_path / "train-00001-of-00003-1a2b3c4d.parquet").unlink()
    with pytest.raises(UserError, match=r"4d\.parquet is one of 3 files, but here are 2"):
        load(str(tmp_path), tok)


def test_files_that_are_no_split_are_named(tmp_path, tok, capsys):
    """And a split may be a folder."""
    for name in ("train/part-0.jsonl", "test/part-0.jsonl", "old.jsonl", "eval.jsonl"):
        write_rows(tmp_path / name, [{"text": name, "label": "a"}])
    (tmp_path / "train/notes.pdf").write_text("not read")
    (tmp_path / "dev.xlsx").touch()
    data = load(str(tmp_path), tok)
    assert {split: texts_of(data[split]) for split in data.splits} == {
        "train": ["train/part-0.jsonl"], "test": ["test/part-0.jsonl"], "dev": ["eval.jsonl"]}
    said = capsys.readouterr().out
    assert re.search("not read, as their names .*: dev.xlsx, old.jsonl, notes.pdf\n", said)


def test_a_name_of_the_hub(tmp_path, tok, monkeypatch):
    """A folder stands in the place of the hub; the library loads it as it would load a repository."""
    for split, labels in (("train", [0, 1] * 10), ("test", [1])):
        class_labels(labels).to_parquet(tmp_path / f"repository/{split}-00000-of-00001.parquet")
    real = datasets.load_dataset

    def load_dataset(repo, configuration):
        if configuration is None:
            raise ValueError("Config name is missing.\nPlease pick one")
        assert (repo, configuration) == ("owner/name", "plain")
        return real(str(tmp_path / "repository"), cache_dir=str(tmp_path / "hub"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = load("hf:owner/name:plain", tok)
    assert [len(data[split]) for split in ("train", "dev", "test")] == [18, 2, 1]
    assert label_names(data["test"]) == ["pos"]
    with pytest.raises(UserError, match="hf:: which one"):
        load("hf:", tok)
    with pytest.raises(UserError, match=r"hf:o/n: cannot be loaded \(Config name is missing\. Please pick"):
        load("hf:o/n", tok)


def test_columns_by_their_names(tmp_path, tok):
    """Whole users are held out, the same in each format; pandas may make floats of their numbers."""
    rows = [{"review": f"review {i}", "stars": i % 12, "user": i // 6, "text": "x"} for i in range(36)]
    pd.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
    pd.DataFrame(rows).astype({"user": float}).to_parquet(tmp_path / "a.parquet")
    write_rows(tmp_path / "a.jsonl", rows)
    columns = DataFlags(text="review", label="stars", doc="user")
    for suffix in ("csv", "parquet", "jsonl"):
        data = load(str(tmp_path / f"a.{suffix}"), tok, dev_share=0.2, columns=columns)
        assert data["train"].labels == sorted(map(str, range(12)))
        user, = set(data["dev"].doc)
        assert texts_of(data["dev"]) == [row["review"] for row in rows if row["user"] == user]
    with pytest.raises(UserError, match="--label=star: no row of train has this column"):
        load(str(tmp_path / "a.csv"), tok, columns=DataFlags(label="star"))
    with pytest.raises(UserError, match="toycls: is not read from files, so that --text, --label and --doc"):
        load("toycls", tok, columns=DataFlags(label="kind"))


@pytest.mark.parametrize(("given", "names"), [
    ([10, 9, -1], ["-1", "10", "9"]), ([True, False], ["false", "true"]), ([0.5, 1.0], ["0.5", "1.0"]),
    ([" b", "a "], ["a", "b"]), (["\ud800", "\ud801"], ["\\ud800", "\\ud801"])])
def test_labels_are_named_as_they_were_written(given, names, tmp_path, tok):
    rows = [{"text": f"text {i}", "label": label} for i, label in enumerate(given)]
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "dev.jsonl", rows)
    data = load(str(tmp_path), tok)
    assert data["train"].labels == names and sorted(label_names(data["dev"])) == names


FLAT = {"id": "7", "title": "t", "context": "the cat sat", "question": "who?"}
FOUND = {"text": "cat", "answer_start": 4}
SPAN = {"text": ["cat"], "char_spans": [{"start": [4], "end": [6]}]}
FLAT_ANSWERS = {
    "an object of lists": {"answers": {"text": ["cat"], "answer_start": [4]}},
    "a list of objects": {"answers": [FOUND]},
    "one object": {"answers": FOUND},
    "MRQA": {"answers": ["cat"], "detected_answers": SPAN}}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", FLAT_ANSWERS)
def test_rows_with_a_question_each(form, suffix, tmp_path, tok):
    """As the hub has SQuAD: rows about the same text are one text with several questions."""
    rows = []
    for i, context in enumerate(("the cat sat", "the cat sat", "the cat ran")):
        rows.append(FLAT | FLAT_ANSWERS[form] | {"id": str(i), "context": context})
    if suffix == "jsonl":
        write_rows(tmp_path / "train.jsonl", rows)
    else:
        pd.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    data = load(str(tmp_path), tok, kind="qa")
    data.check_labels("train")
    assert texts_of(data["train"]) == ["the cat sat", "the cat ran"]
    assert data["train"].question_text.tolist() == [0, 0, 1]
    assert [answer_of(data["train"], j) for j in range(3)] == ["cat"] * 3
    assert [question["references"] for question in data["train"].questions] == [["cat"]] * 3
    # One title is one document.
    assert len(set(data["train"].doc)) == 1


@pytest.mark.parametrize(("row", "columns", "text"), [
    # A question that is the text, or that has a label beside it, asks nothing.
    ({"question": "who sat?", "label": "HUM"}, {"text": "question"}, "who sat?"),
    ({"question": "is it?", "context": "the cat", "answer": True}, {"text": "context", "label": "answer"},
     "the cat"),
    ({"question": "is it?", "text": "the cat"}, {}, "the cat"),
    ({"question": "who?", "passage": "the cat", "guid": 1, "answers": [FOUND]}, {"text": "passage"},
     "the cat"),
])
def test_which_column_is_the_text(row, columns, text, tmp_path, tok):
    write_rows(tmp_path / "train.jsonl", [row])
    data = load(str(tmp_path), tok, columns=DataFlags(**columns))
    assert texts_of(data["train"]) == [text]
    assert hasattr(data["train"], "question_text") == ("guid" in row)


def test_labels_that_cannot_be_used_are_told_to_who_needs_them(tmp_path, tok):
    """Texts without a label are read, and no masker reads their labels."""
    write_rows(tmp_path / "train.jsonl", [GOOD, {"text": "b"}, OTHER, {"text": "c", "label": None}])
    write_rows(tmp_path / "dev.jsonl", [GOOD])
    write_rows(tmp_path / "test.jsonl", [{"text": "d", "label": "z"}, {"text": "e"}])
    data = load(str(tmp_path), tok)
    split = data["train"]
    assert split.label.tolist() == [0, -1, 1, -1] and split.labelled.tolist() == [0, 2]
    split.limit_labels(1, seed=0)
    assert split.labelled.tolist() in ([0], [2])
    for name, said in (("train", "train: there is no label, in the row with the text 'b'"),
                       ("test", "test: the label 'z' is not among those of train")):
        with pytest.raises(UserError, match=said):
            data.check_labels(name)


def test_mrqa(tmp_path, tok):
    """A context is a document of its own. An answer may have other punctuation there, and the end of its span
    is inclusive. What is scored against is `answers`, not `detected_answers`."""
    found = {"text": "U.S.A.", "char_spans": [[7, 14]]}
    qa = {"qid": "1", "question": "where?", "answers": ["U.S.A.", "USA"], "detected_answers": [found]}
    rows = [{"header": {"dataset": "x"}}]
    rows += [{"context": f"in the U. S. A. {word}", "qas": [qa]} for word in ("today", "again")]
    data = load(str(write_rows(tmp_path / "m.jsonl", rows)), tok, dev_share=0.5)
    assert data.kind == "qa" and data.block_len == 512
    for split in (data["train"], data["dev"]):
        [question] = split.questions
        assert question["references"] == ["U.S.A.", "USA"] and answer_of(split, 0) == "U. S. A."


@pytest.mark.parametrize(("name", "split"), [
    ("Val", "dev"), ("valid", "dev"), ("validation", "dev"), ("dev.clean", "dev"), ("dev-v1.1", "dev"),
    ("dev_v2", "dev"), ("dev-00000-of-00001", "dev"), ("unsupervised", "corpus"), ("test_protocol", None),
    ("training", None), ("README", None), ("test.predicted", None)])
def test_splits_by_their_usual_names(name, split):
    assert sources.split_of(f"{name}.jsonl") == split


def test_a_folder_that_is_called_like_a_data_set(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sources.find_source("toycls")
    assert capsys.readouterr().out == ""
    (tmp_path / "toycls").mkdir()
    sources.find_source("toycls")
    assert "what lies here is called --dataset=./toycls" in capsys.readouterr().out


def test_columns_without_names_are_told_apart():
    assert sources.unique_names(["", "text", "", "", "a"]) == ["", "text", "unnamed 2", "unnamed 3", "a"]


def test_a_tokenizer_with_a_length_of_its_own(tmp_path):
    tok = fast_tokenizer("wordpiece")
    (tmp_path / "c.txt").write_text("\n".join(TEXTS))
    theirs = np.concatenate(tok(TEXTS, add_special_tokens=False)["input_ids"])
    tok.backend_tokenizer.enable_truncation(4)
    tok.backend_tokenizer.enable_padding(length=9)
    assert load(str(tmp_path / "c.txt"), tok).corpus.input_ids.tolist() == theirs.tolist()


@functools.cache
def letters_tokenizer(form, pre="bytes"):
    """Text in a normal form ("NFC", ..., or "no accents" as BERT reads it), then in bytes; or in characters,
    one of which is known."""
    forms = {"none": normalizers.Sequence([]), "no accents": normalizers.BertNormalizer(),
             "NFC": normalizers.NFC(), "NFD": normalizers.NFD(), "NFKC": normalizers.NFKC(),
             "NFKD": normalizers.NFKD()}
    special = dict.fromkeys(("pad_token", "mask_token"), "[PAD]")
    if pre == "bytes":
        alphabet = ["[PAD]", *sorted(pre_tokenizers.ByteLevel.alphabet())]
        backend = Tokenizer(tokenizer_models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        vocabulary = {"[PAD]": 0, "[UNK]": 1, "a": 2}
        backend = Tokenizer(tokenizer_models.BPE(vocabulary, [], unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.normalizer = forms[form]
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


SCRIPTS = {
    "Korean": "그는 한국 사람 입니다", "half-width kana": "ｶﾞｷﾞ ﾊﾟﾝ ﾃﾞｻﾞｲﾝ ﾃｽﾄ",
    "kana": "がぎ パン デザイン", "Vietnamese": "ông ở Hà Nội nay",
    "French": "le café déjà ouvert, où", "Hindi": "वह नदी में है आज क़लम",
    "Bengali": "সে কোথায় যাবে কৌশল", "Thai": "เรา น้ำ ที่ นี้", "Arabic": "هذا كتابٌ جديدٌ ﷲ",
    "Greek": "ὁ ᾠδὴ τοῦ ᾳ", "signs": "≠ ﬁne ㎏ ½ Å ① x² don\u2019t e-mail",
    "Hebrew": "שָׁלוֹם לָכֶם", "Tamil": "கொடு பௌர்ணமி", "Turkish": "İstanbul ığü",
    "emoji": "I ❤️ it 👩‍🔬 so é"}


@pytest.mark.parametrize("pre", ["bytes", "characters"])
@pytest.mark.parametrize("form", ["none", "no accents", "NFC", "NFD", "NFKC", "NFKD"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_gold_answers_through_tokens_and_back(form, pre, data):
    """Answers of whole words, in any script and normal form, whatever the tokenizer makes of them."""
    text = data.draw(st.lists(st.sampled_from(sorted(SCRIPTS)), min_size=1, max_size=3))
    words = " ".join(SCRIPTS[script] for script in text).split()
    written = data.draw(st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"]))
    words = [unicodedata.normalize(written, word) for word in words]
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(words) - 1)] * 2)))
    answer = {"text": " ".join(words[first:last + 1]), "start": len(" ".join([*words[:first], ""]))}
    record = {"text": " ".join(words), "doc": 0, "qas": [{"id": "0", "question": "?", "answers": [answer]}]}
    tokenizer = letters_tokenizer(form, pre)
    encoder = data_prep.text_encoder(tokenizer)
    arrays = data_prep.text_arrays([record], encoder, *data_prep.vocabulary_tables(tokenizer))
    with tempfile.TemporaryDirectory() as folder:
        problems = []
        [gold] = data_prep.question_arrays([record], arrays, encoder, Path(folder), 0, problems)["answer"]
        assert not problems
    begin, end = arrays["char_begin"][0][gold[0]], arrays["char_end"][0][gold[1]]
    assert record["text"][begin:end].strip() == answer["text"]


WORDS = "Don't stop, well-known e-mail (3.5%)...  good,bad नदी में été so\u00adft 😀"
UNITS = ["Don't", "stop", ",", "well-known", "e-mail", "(", "3", ".", "5", "%", ")", ".", ".", ".", "good",
         ",", "bad", "नदी", "में", "été", "so\u00adft", "😀"]


@pytest.mark.parametrize("form", ["none", "NFC", "NFKC"])
@pytest.mark.parametrize("pre", ["bytes", "characters"])
def test_words_are_the_same_under_every_tokenizer(pre, form, tmp_path):
    """Runs of letters, marks and digits, with apostrophes and hyphens inside; each other sign on its own."""
    (tmp_path / "c.txt").write_text(WORDS)
    assert words_under(load(str(tmp_path / "c.txt"), letters_tokenizer(form, pre)).corpus) == UNITS


def words_under(split):
    """The characters of each word of a split in turn; blanks between words have none."""
    words = []
    for i in range(len(split)):
        tokens = range(*split.token_start[i:i + 2])
        for _, group in itertools.groupby(tokens, lambda t: split.word_ids[t]):
            group = list(group)
            words.append(split.text(i)[split.char_begin[group[0]]:split.char_end[group[-1]]].strip())
    return [word for word in words if word]


# The questions of a note, each with its answers. Two are kept: the first, which is asked in two ways, and the
# second, which is no list.
NOTE_QAS = [
    (["what drug?", "which medication?"], [{"evidence": "aspirin daily for pain", "text": "aspirin"}]),
    ("what for?", [{"evidence": "pain", "evidence_start": 3, "text": "pain"}]),
    (["is it yes?"], [{"evidence": "yes"}]),
    (["any pain?"], [{"evidence": "for pain.", "evidence_start": 3, "text": "yes"}]),
    (["no class?"], [{"evidence": "for pain.", "evidence_start": 3, "text": ""}]),
    (["two?"], [{"evidence": "aspirin"}, {"evidence": "pain"}]),
    (["not there?"], [{"evidence": "morphine"}]),
    (["only a piece of a word?"], [{"evidence": "spirin"}]),
    (["smoker?"], [{"evidence": "", "text": "Patient"}])]


def test_emrqa_notes(tmp_path, tok, monkeypatch):
    """A synthetic file of the shape of n2c2's data.json: kept are questions with one piece of evidence; notes
    never straddle splits."""
    notes = []
    qas = [{"id": [["x"]], "question": question, "answers": answers} for question, answers in NOTE_QAS]
    for i in range(10):
        lines = [f"Patient {i} took pain killers \n", "aspirin  daily\n", "for pain.\n"]
        notes.append({"note_id": str(i), "context": lines, "qas": qas})
    # The same notes again in another part, as one string.
    other = [note | {"context": "".join(note["context"])} for note in notes]
    articles = [{"title": "medication", "paragraphs": notes}, {"title": "risk", "paragraphs": other}]
    monkeypatch.setattr(sources, "CACHE", tmp_path)
    write_json(tmp_path / "raw/emrqa/data.json", {"data": articles})
    # A cut of dev is of what that of test has left.
    data = load("emrqa", tok, dev_share=0.1)
    assert [len(data[name]) for name in ("train", "dev", "test")] == [14, 2, 4]
    assert len({*texts_of(data["train"]), *texts_of(data["dev"]), *texts_of(data["test"])}) == 7 + 1 + 2
    split = data["test"]
    assert [q["question"] for q in split.questions] == ["what drug?", "which medication?", "what for?"] * 4
    for question in split.questions:
        assert re.sub(r"\s+", " ", question["references"][0]) in ("aspirin daily for pain", "pain")
    # The first "pain", that of the first line, not of the third.
    text, first = split.text(0), split.token_start[0] + split.answer[2][0]
    assert text[:split.char_begin[first]].count("\n") == 0


# ---------------------------------------------------------------- splits

def test_a_cut_stays_as_it_was(tmp_path, tok):
    """Which texts are held out decides about published numbers."""
    rows = [{"text": f"sentence {i}", "label": "xy"[i % 2]} for i in range(40)]
    data = load(str(write_rows(tmp_path / "cut.jsonl", rows)), tok)
    assert sorted(data["dev"].doc.tolist()) == [0, 9, 12, 14] and data.block_len == 256


def test_a_cache_is_keyed_by_file_tokenizer_cut_and_records(tmp_path, tok, monkeypatch):
    file = write_rows(tmp_path / "d.jsonl", [{"text": f"text {i}", "label": "a"} for i in range(20)])
    checksums = [load(str(file), tok).checksum]
    assert load(str(file), tok).checksum == checksums[0]
    checksums.append(load(str(file), tok, dev_share=0.5).checksum)
    checksums.append(load(str(file), fast_tokenizer("bpe")).checksum)
    before = file.stat()
    write_rows(file, [{"text": f"text {i}", "label": "b"} for i in range(20)])
    # Of the same size and age, as rsync or tar may leave it.
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load(str(file), tok)["train"].labels == ["b"]
    for text in ("more text", "other text"):
        source = sources.Source({"train": [file], "corpus": [{"text": text}]})
        monkeypatch.setitem(sources.DATASETS, "mine", lambda source=source: source)
        data = load("mine", tok)
        assert texts_of(data.corpus) == [text]
        checksums.append(data.checksum)
    assert len(set(checksums)) == 5


def test_one_of_two_processes_makes_what_both_open(tmp_path):
    """As torchrun starts them."""
    def make(partial):
        with open(tmp_path / "log", "a") as f:
            f.write("made\n")
        time.sleep(0.2)
        partial.touch()

    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=sources.make_once, args=(tmp_path / "file", make)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert (tmp_path / "log").read_text() == "made\n"


# ---------------------------------------------------------------- views

@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_blocks_keep_every_token_once(kind, tmp_path):
    tok = fast_tokenizer(kind)
    texts = [*TEXTS, " ".join(TEXTS * 4)]
    (tmp_path / "c.txt").write_text("\n".join(texts))
    corpus = load(str(tmp_path / "c.txt"), tok).corpus
    pieces = blocks(corpus, 16)
    batch = all_of(pieces)
    for i, text in enumerate(texts):
        mine = [batch.input_ids[b][batch.in_text[b]] for b in np.flatnonzero(pieces.text_ids == i)]
        assert np.concatenate(mine).tolist() == tok(text, add_special_tokens=False)["input_ids"]
    assert pieces.length.max() <= 16 and (pieces.length == batch.attention_mask.sum(1)).all()
    whole = all_of(blocks(corpus, 4096))
    theirs = tok(texts, padding=True, return_tensors="np")
    assert (whole.input_ids == theirs["input_ids"]).all()
    assert (whole.attention_mask == theirs["attention_mask"]).all()


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_windows_are_those_of_hugging_face(kind, tmp_path):
    tok, context = fast_tokenizer(kind), " ".join(TEXTS * 3)
    write_json(tmp_path / "d/train.json", squad([context, TEXTS[0]], ["many pieces", "mat"]))
    pieces = windows(load(str(tmp_path / "d"), tok)["train"], 48, 8, 64)
    batch = all_of(pieces)
    theirs = tok(["What is number 0?", "What is number 1?"], [context, TEXTS[0]], truncation="only_second",
                 max_length=48, stride=8, return_overflowing_tokens=True, padding=True, return_tensors="np",
                 return_token_type_ids=True)
    assert (batch.input_ids == theirs["input_ids"]).all()
    assert (batch.attention_mask == theirs["attention_mask"]).all()
    assert (pieces.question_ids == theirs["overflow_to_sample_mapping"]).all()
    assert (batch.token_type_ids is not None) == (kind == "wordpiece")
    if batch.token_type_ids is not None:
        assert (batch.token_type_ids == theirs["token_type_ids"]).all()


def test_entities_are_where_spacy_finds_them(tmp_path, tok):
    nlp = spacy.blank("en")
    nlp.add_pipe("entity_ruler").add_patterns([{"label": "X", "pattern": "Berlin"}])
    nlp.to_disk(tmp_path / "rules")
    texts = ["Berlin", "In Berlin " + "the cat sat on " * 40 + "the mat of Berlin, and purred."]
    (tmp_path / "corpus.txt").write_text("\n".join(texts))
    corpus = load(str(tmp_path / "corpus.txt"), tok, spacy_model=str(tmp_path / "rules")).corpus
    for i, text in enumerate(texts):
        tokens = slice(corpus.token_start[i], corpus.token_start[i + 1])
        for number, place in enumerate(re.finditer("Berlin", text)):
            hit = np.flatnonzero(corpus.entity_ids[tokens] == number)
            assert corpus.char_begin[tokens][hit].min() == place.start()
            assert corpus.char_end[tokens][hit].max() == place.end()
    # A text that is too long for spaCy is read in parts.
    nlp.max_length = 25
    assert (data_prep.run_spacy(corpus, nlp) == corpus.entity_ids).all()
    # The second use reads what the first one kept.
    kept = list(corpus.folder.glob("ent-rules-*.bin"))
    again = load(str(tmp_path / "corpus.txt"), tok, spacy_model=str(tmp_path / "rules")).corpus
    assert len(kept) == 1 and (again.entity_ids == corpus.entity_ids).all()


def test_a_spacy_model_that_finds_no_entities(tmp_path, tok):
    spacy.blank("en").to_disk(tmp_path / "blank")
    (tmp_path / "c.txt").write_text("Berlin\n")
    for model, said in ((tmp_path / "blank", "finds no named entity"), ("no_model", "is not installed")):
        with pytest.raises(UserError, match=said):
            load(str(tmp_path / "c.txt"), tok, spacy_model=str(model)).corpus.entity_ids  # noqa: B018


def test_truncated_is_hugging_faces_truncation(tmp_path, tok):
    rows = [{"text": text, "label": "a"} for text in [*TEXTS, " ".join(TEXTS * 9), "word " * 10_000]]
    data = load(str(write_rows(tmp_path / "d.jsonl", rows)), tok, dev_share=0.01)
    for split in (data["train"], data["dev"]):
        batch = all_of(truncated(split, 24))
        theirs = tok(texts_of(split), truncation=True, max_length=24, padding=True, return_tensors="np")
        assert (batch.input_ids == theirs["input_ids"]).all()


def test_punctuation(tmp_path, tok):
    def signs(text, tokenizer):
        (tmp_path / "c.txt").write_text(text)
        split = load(str(tmp_path / "c.txt"), tokenizer).corpus
        at = np.flatnonzero(split.is_punct)
        return "".join(split.text(0)[split.char_begin[t]:split.char_end[t]].strip() for t in at)

    assert signs(TEXTS[1], tok) == "();'!"
    # Bytes of a letter are no punctuation.
    assert signs("é 日本 a, 5", fast_tokenizer("bpe")) == ","


def test_text_that_the_tokenizer_does_not_know(tmp_path, tok, capsys):
    """Where it was prepared before, too."""
    (tmp_path / "zh.txt").write_text("the cat 日本語 中文 字\n")
    for _ in range(2):
        load(str(tmp_path / "zh.txt"), tok)
        assert "WARNING: 75% of the tokens of corpus are unknown" in capsys.readouterr().out


# ---------------------------------------------------------------- downloads

def test_a_data_set_is_downloaded_whole_or_not_at_all(tmp_path, monkeypatch):
    """With files that are checked; what is in its folder already is not fetched again."""
    (tmp_path / "f.bin").write_bytes(b"x" * 100_000)
    url, right = (tmp_path / "f.bin").as_uri(), hashlib.sha256(b"x" * 100_000).hexdigest()
    monkeypatch.setattr(sources, "CACHE", tmp_path)
    folder = tmp_path / "raw/squad"
    for place, checksum, said in [
            (url, "0" * 64, "cannot be downloaded.*hash"),
            ("http://127.0.0.1:9/x", None, f"your own go into {folder}, or use --dataset")]:
        files = {"train.jsonl": (url, None), "test.jsonl": (place, checksum)}
        monkeypatch.setitem(sources.DOWNLOADS, "squad", files)
        with pytest.raises(UserError, match=said):
            sources.downloaded("squad")
        assert [file.name for file in (tmp_path / "raw").iterdir()] == ["squad.lock"]
    files["test.jsonl"] = (url, right)
    source = sources.downloaded("squad")
    assert sorted(source.splits) == ["test", "train"]
    assert (folder / "train.jsonl").read_bytes() == b"x" * 100_000
    (tmp_path / "f.bin").unlink()
    assert sources.downloaded("squad").splits == source.splits


@pytest.mark.parametrize("length", ["100", None])
def test_a_download_that_ends_early(length, tmp_path, monkeypatch):
    """Without a checksum, the length that the server says decides."""
    monkeypatch.setattr(sources, "CACHE", tmp_path)
    monkeypatch.setitem(sources.DOWNLOADS, "imdb", {"train.jsonl": ("http://host/train.jsonl", None)})
    response = io.BytesIO(b"nine byte")
    response.headers = {"Content-Length": length}
    monkeypatch.setattr(sources.urllib.request, "urlopen", lambda url: response)
    with pytest.raises(UserError, match=f"cannot be downloaded .9 bytes came, but the server says {length}"):
        sources.downloaded("imdb")


@needs_shared
@pytest.mark.parametrize(("name", "counts"), [
    ("imdb", (25_000, 0, 25_000)), ("chemprot", (4169, 2427, 3469)), ("policyqa", (4152, 0, 3809)),
    ("scierc", (3219, 455, 974)), ("acl_arc", (1688, 114, 139)), ("scicite", (7320, 916, 1861))])
def test_the_counts_of_real_data(name, counts):
    """Of texts, or of questions. The files of SciBERT are those whose checksums are known."""
    source = sources.find_source(str(SHARED / "data" / name))
    if name in ("scierc", "acl_arc", "scicite"):
        known = sources.DOWNLOADS[name].values()
        for split, (_, sha256) in zip(("train", "dev", "test"), known, strict=True):
            content = (SHARED / f"data/{name}/{split}.jsonl").read_bytes()
            assert hashlib.sha256(content).hexdigest() == sha256
    for split, count in zip(("train", "dev", "test"), counts, strict=True):
        assert sum(len(record.get("qas", [1])) for record in source.records(split)) == count


# ---------------------------------------------------------------- bad input: one sentence

def jsonl(*rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


CAT = {"text": "cat", "answer_start": 2}
GOOD = {"text": "a text", "label": "a"}
OTHER = {"text": "another text", "label": "b"}
MRQA = {"context": "a b", "qid": "1", "question": "q", "answers": ["b"],
        "detected_answers": [{"text": "b", "char_spans": [[7, 9]]}]}
CONLL = "Anna NNP B-NP B-PER\nsings VBZ B-VP O\n. . O O\n\nIn IN B-PP O\nRome NNP B-NP I-LOC\n" * 400
TSV = 'text\tlabel\n"a fine film\tx\nb\ty\nshe said no to\tx\nhe said"\tx\n'


def stories(labels, **more):
    """Forty rows, whose labels take turns."""
    rows = []
    for i in range(40):
        others = {key: values[i % len(values)] for key, values in more.items()}
        rows.append({"text": f"story {i} of a river", "label": labels[i % len(labels)]} | others)
    return rows


def table(rows):
    return "".join(",".join(cells) + "\n" for cells in [rows[0], *map(dict.values, rows)])


def asked(**fields):
    """Questions of which every other one has the given fields."""
    good = FLAT | {"answers": [FOUND]}
    return jsonl(*[good | {"id": str(i)} | fields if i % 2 else good for i in range(20)])


ROWS = stories(["neg", "pos"])
LINES = "a quoted cell holds lines that look like rows: 'pos,the end'"
TORN = "a quoted cell is torn apart at"
LABELS_AND_TEXTS = "or a label and a text (fastText), but a .txt file is text alone"
NO_ANSWER = "question '1' has no answer"
TWICE = io.BytesIO()
pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), TWICE)
LATE = io.BytesIO()
pq.write_table(pa.table([["a"], pa.array([2**45], pa.timestamp("s"))], names=["text", "when"]), LATE)
BAD = [
    ("empty.jsonl", "", "empty.jsonl, train: there is no text in it"),
    ("conll.txt", CONLL, "conll.txt: looks like a token and its tag per line (CoNLL)"),
    ("windows.csv", "text,label\na,b\n".encode("utf-16"), "windows.csv: is not UTF-8 text; save it as"),
    ("train-00000-of-00002.jsonl", jsonl(GOOD), "00002.jsonl is one of 2 files, but here are 1"),
    ("cut.jsonl.gz", gzip.compress(jsonl(*[GOOD] * 500).encode())[:60], "cut.jsonl.gz: Compressed file"),
    ("broken.jsonl", jsonl(GOOD, '{"text": "a', GOOD), "broken.jsonl:2: is not JSON (Unterminated"),
    ("array.jsonl", json.dumps([GOOD]), "array.jsonl:1: a row must be one JSON object, but this is a list"),
    ("some.jsonl", jsonl(GOOD | {"doc": 1}, GOOD), "some.jsonl:2: its fields are text, label, but"),
    ("column.csv", "id,review,labels\n1,a,b\n",
     "column.csv:2: the field 'text' is missing, there are id, review, labels; --text=NAME, --label=NAME"),
    ("cells.csv", "text,label\na, b,c", "cells.csv:2: more cells than columns"),
    ("is_impossible.jsonl", asked(is_impossible=1.0), NO_ANSWER),
    ("nan.jsonl", asked(answers=float("nan"), title=float("nan")), NO_ANSWER),
    ("quote.csv", 'text,label\n"a,b\n', "quote.csv:2: unexpected end of data"),
    ("quoted.tsv", TSV, "quoted.tsv:2: a quoted cell holds tabs and runs over"),
    ("id.json", jsonl(squad(["a cat"], ["cat"])).replace('"id"', '"nr"'), "id.json[0]: the field 'id' is"),
    ("span.jsonl", jsonl(MRQA), "span.jsonl, train: the answer 'b' of question '1' does not stand"),
    ("year.jsonl", jsonl(FLAT | {"answers": {"text": [1987], "answer_start": [4]}}), "not 1987 and 4; a csv"),
    ("answer.csv", "id,context,question,answer\n1,a cat,who?,cat\n",
     """question '1' has no answer: its field 'answers' must hold "text" and "answer_start"; questions"""),
    ("nothing.json", json.dumps(squad(["the cat \x01 sat"], ["\x01"])), "'q0' holds no token of its context"),
    ("unasked.jsonl", jsonl({"context": "a cat", "qas": []}), "jsonl, train: there is no question in it"),
    ("header.csv", "text,label\na,x\ntext,label\nb,y\n", "header.csv:3: the header is repeated here"),
    ("inch.csv", 'label,text\nneg,a river\npos,"quoted\npos,the end\nneg,a city 12"\n', f"csv:3: {LINES}"),
    ("twice.csv", "text,label,text\na,x,1\n", "twice.csv: two columns have the name 'text'; rename"),
    ("twice.parquet", TWICE.getvalue(), "twice.parquet: two columns have the name 'text'; rename"),
    ("list.jsonl", jsonl(GOOD | {"label": ["x", "y"]}), "a label must be text, a number, or true or"),
    ("zero.jsonl", jsonl({"text": 0}), "zero.jsonl:1: the field 'text' must be text and not empty, not 0"),
    ("doc.jsonl", jsonl(GOOD | {"doc": -1}), "doc.jsonl:1: the field 'doc' must be a number from 0"),
    ("space.jsonl", jsonl(GOOD, GOOD | {"label": "a\u200b"}), r"the labels 'a' and 'a\u200b' look alike"),
    ("pointer.csv", "version https://git-lfs.github.com/spec/v1\n", "pointer.csv: is not the data, but a"),
    ("escaped.csv", 'text,label,date\n"size 5\\", a river",neg\na city,pos,monday\n', f"csv:2: {TORN} ','"),
    ("blank.csv", 'label,text,date\npos,a city,monday\nneg, "a river, wide"\n', f"csv:3: {TORN} ','"),
    ("fasttext.txt", "__label__pos a b\n__label__neg __label__x c\n", LABELS_AND_TEXTS),
    ("last.txt", "".join(f"{row['label']}\t{row['text']}\n" for row in ROWS), LABELS_AND_TEXTS),
    ("given.jsonl", asked(answers=[{"text": "", "answer_start": 0}]), NO_ANSWER),
    ("data.tar", b"train.csv" + bytes(503) + table(ROWS).encode(), "data.tar: holds NUL bytes, so that it"),
    ("lists.jsonl", jsonl(FLAT | {"answers": {"text": ["mat"], "answer_start": []}}), "must have the same"),
    ("look1.jsonl", jsonl(*stories(["p\u043es", "pos"])), r"the labels 'pos' and 'p\u043es' look alike"),
    ("look3.jsonl", jsonl(*stories(["A1", "\uff21\uff11"])), "look alike"),
    ("emotions.txt", "".join(f"{row['text']};{row['label']}\n" for row in ROWS), LABELS_AND_TEXTS),
    # Also in a file of which most rows are right.
    ("inches.csv", table(ROWS * 2) + '"a 12,neg\na river,pos\na 5",neg\n', "rows: 'a river,pos'"),
    ("pretty.jsonl", json.dumps(ROWS, indent=1), "a .jsonl file has one object on each line"),
    ("late.parquet", LATE.getvalue(), "late.parquet: date value out of range"),
]


@pytest.mark.parametrize(("name", "content", "said"), BAD, ids=[name for name, *_ in BAD])
def test_a_bad_file_is_one_sentence(name, content, said, tmp_path, tok):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=re.escape(said)) as raised:
        load(str(tmp_path / name), tok).check_labels("train", "dev")
    assert "\n" not in str(raised.value)


SEVERAL = "look like several labels, but each is read as one class; several labels per text are not"
CAPITALS = "WARNING: the labels 'pos' and 'Pos' differ in capitals alone, but are two classes"
SCORES = "WARNING: labels such as '0.5' look like scores, but each is read as a class"
LOOKS = [
    # what is read: (texts, labels), and what is said of it
    ("comma.tsv", table(ROWS), (40, 2), r"its columns are separated by ',', not by '\t'"),
    ("rows.csv", table(ROWS) + "\n\n", (40, 2), "rows.csv: 40 rows in 43 lines, 2 of them blank"),
    ("breaks.csv", 'text,label\n' + '"Dear all,\nfine, thanks\n\nBye,\nMary",a\n' * 3, (3, 1),
     "breaks.csv: quoted cells run over several lines; if its texts have no line breaks"),
    # What follows the number's comma is no second cell, as the first line does not end a row.
    ("number.csv", 'text,label\n' + '"Dear all,\nwe sold 1,000 units",a\n' * 3, (3, 1), "3 rows in 7 lines"),
    ("speech.csv", 'label,text\n' + 'pos,"It was late.\n""Go,"" he said."\n' * 3, (3, 1), "3 rows in 7"),
    ("breaks.tsv", 'text\tlabel\n' + '"Dear all,\nbye"\ta\n' * 3, (3, 1), "3 rows in 7 lines"),
    # As pandas writes a quotation that goes on in the next column.
    ("goes_on.csv", 'title,text,label\n' + '"""I am sad.","Very sad.""",a\n' * 3, (3, 1), "3 rows in 4"),
    ("excel.csv", "\nsep=;\ntext;label\na;x\n", (1, 1), "csv: its columns are separated by ';'"),
    ("columns.jsonl", jsonl(*stories(["a"], paragraphs=[["b", "c"]])), (40, 1), "label 'a'"),
    ("empty.csv", "text,label\na,x\n,\nb,y\n\n ,\n", (2, 2), "empty.csv: 2 empty rows are skipped"),
    ("reject.jsonl", jsonl(*stories(["a"], answer=["accept", "reject", "a", "ignore"])), (20, 1),
     "reject.jsonl: 20 rejected rows are skipped, the first at"),
    ("scores.jsonl", jsonl(*stories([0.5, 1.5, 2, "-3e-1"])), (40, 4), SCORES),
    ("names.jsonl", jsonl(*stories([f"user {i}" for i in range(20)])), (40, 20),
     "WARNING: 20 labels for 40 texts: are these classes, not scores, names or texts?"),
    ("vector.jsonl", jsonl(*stories(["[1, 0]", "[0, 1]"])), (40, 2), f"labels such as '[1, 0]' {SEVERAL}"),
    ("comma.jsonl", jsonl(*stories(["pos", "pos,river"])), (40, 2), f"labels such as 'pos,river' {SEVERAL}"),
    ("case.jsonl", jsonl(*stories(["pos", "Pos"])), (40, 2), CAPITALS),
    ("list.txt", json.dumps(ROWS, indent=1), (40, 2), "  for example 'story 1 of a river', label 'pos'"),
    ("one_line.txt", json.dumps(ROWS), (40, 2), ""),
    ("ids.json", json.dumps({f"id {i}": row for i, row in enumerate(ROWS)}), (40, 2), ""),
    ("columns.json", pd.DataFrame(ROWS).set_index("text", drop=False).to_json(), (40, 2), ""),
    ("units.csv", 'label,text\n' + 'a,"Sold:\n1,234 units"\n' * 3, (3, 1), "3 rows in 7 lines"),
    ("none.jsonl", jsonl(*stories(["pos", "NA"])), (40, 2), "WARNING: the label 'NA' is read as a class"),
    ("whole.jsonl", jsonl(*stories(["1", "1.0"])), (40, 2), "the labels '1' and '1.0' are the same number"),
    ("doccano.jsonl", jsonl(*stories(["pos", "pos#river"])), (40, 2), f"such as 'pos#river' {SEVERAL}"),
    ("many.jsonl", jsonl(*stories([f"c{i:02}" for i in range(14)])), (40, 14), "14 labels: c00 3, c01 3, "),
    ("torn.csv", "label,text,more\n" + "a,b,c\n" * 40 + "a,half a text\n", (41, 1),
     "torn.csv: 1 rows have fewer cells than the header, the first at {}/torn.csv:42; is a line broken"),
    ("frage.csv", '"Frage, Text";text;label\n1;a;x\n', (1, 1), "separated by ';'"),
    ("excel_2.csv", "Frage, Text;text;label\n1;a;x\n", (1, 1), "separated by ';'"),
    ("blank.csv", "text; label\na; x\n", (1, 1), "separated by ';'"),
    ("bar.csv", "text, label, pos|neg\na, x, 1\n", (1, 1), "label 'x'"),
    ("squad.txt", json.dumps({"data": ROWS}, indent=1), (40, 2), ""),
    ("column.json", json.dumps({"data": [1, 2], "text": ["a", "b"], "label": ["x", "y"]}), (2, 2), ""),
    # Nothing is said of these.
    ("blanks.csv", 'label, "text"\npos, "bad ""movie"""\n"neg", good\n', (2, 2), None),
    ("spoken.csv", 'label, text\npos, "Great" movie\n', (1, 1), None),
    ("thai.jsonl", jsonl(*stories(["\u0e14\u0e35", "\u0e15\u0e35"])), (40, 2), None),
    ("plain.jsonl", jsonl(*stories(["burn", "bum", "1", "l"])), (40, 4), None),
    ("stars.jsonl", jsonl(*stories(["1.0", "2.0"])), (40, 2), None),
    ("topics.jsonl", jsonl(*stories(["Sports", "Science, technology"])), (40, 2), None),
    ("sharp.jsonl", jsonl(*stories(["C", "C#"])), (40, 2), None),
    ("folder.csv", "text,label\n" + "".join(f'"C:\\dir{i}\\",a\n' for i in range(40)), (40, 1), None),
    ("loans.jsonl", jsonl(*stories(["a"], answer=["accepted", "yes"])), (40, 1), None),
]


@pytest.mark.parametrize(("name", "content", "found", "said"), LOOKS, ids=[name for name, *_ in LOOKS])
def test_what_is_said_of_what_was_read(name, content, found, said, tmp_path, capsys, monkeypatch):
    """None: no warning."""
    (tmp_path / name).write_text(content)
    monkeypatch.setitem(sources.DATASETS, name, lambda: sources.Source({"train": [tmp_path / name]}))
    data = load(name, fast_tokenizer("bpe"))
    data.check_labels("train")
    printed = capsys.readouterr().out
    assert (len(data["train"]), len(data["train"].labels)) == found
    assert "WARNING" not in printed if said is None else said.replace("{}", str(tmp_path)) in printed


def test_texts_and_documents_that_splits_share(tmp_path, tok, capsys):
    """Is said at each load, also of what was prepared before."""
    write_rows(tmp_path / "train.jsonl", [row | {"doc": i // 4} for i, row in enumerate(ROWS)])
    new = [{"text": f"new {i}", "label": "neg", "doc": 6 + i} for i in range(10)]
    write_rows(tmp_path / "dev.jsonl", [*new[:9], ROWS[0] | {"doc": 90}])
    write_rows(tmp_path / "test.jsonl", new[4:])
    (tmp_path / "corpus.txt").write_text("new 5\nnew 6 \nsome text\n")
    for _ in range(2):
        load(str(tmp_path), tok)
        said = [line for line in capsys.readouterr().out.splitlines() if "of the texts of" in line]
        assert said == ["WARNING: 10.0% of the texts of dev also stand in train",
                        "WARNING: 20.0% of the texts of dev also stand in corpus",
                        "WARNING: 40.0% of the texts of dev are from documents of train",
                        "WARNING: 33.3% of the texts of test also stand in corpus"]


@pytest.mark.parametrize("name", ["d.csv", "d/train.txt"])
def test_equal_texts_without_labels_are_one_document(name, tmp_path, tok):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    texts = [f"Text {i % 5}{' ' * (i % 3)}" for i in range(50)]
    (tmp_path / name).write_text("\n".join(["text"] * name.endswith("csv") + texts))
    data = load(str(tmp_path / name).removesuffix("/train.txt"), tok, dev_share=0.2)
    assert len(data["dev"]) == 10 and len(set(data["dev"].doc)) == 1
    assert not {*map(str.strip, texts_of(data["dev"]))} & {*map(str.strip, texts_of(data["train"]))}


def test_names_that_cannot_be_opened_are_one_sentence(tmp_path, tok, monkeypatch):
    """What the system refuses is told with the path."""
    (tmp_path / "a/train.csv").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/train.jsonl").symlink_to(tmp_path / "gone.jsonl")
    for name in ("two/train.jsonl", "two/train.txt"):
        write_rows(tmp_path / name, [GOOD])
    cases = [
        (tmp_path / "a", "no file named train, dev, test or corpus"),
        (tmp_path / "b", f"No such file or directory: '{tmp_path}/b/train.jsonl'"),
        (tmp_path / "two", "train.jsonl and train.txt could be train"),
        ("x" * 300, "File name too long"),
        ("emrqa", "data-use agreement")]
    for name, said in cases:
        with pytest.raises(UserError, match=re.escape(said)):
            load(str(name), tok)
    # A pipe is not waited for.
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe/train.csv")
    with pytest.raises(UserError, match=r"pipe/train\.csv: is no regular file"):
        load(str(tmp_path / "pipe"), tok)
    file = tmp_path / "two/train.txt"
    for module in (data_prep, sources):
        monkeypatch.setattr(module, "CACHE", file)
    with pytest.raises(UserError, match=f"NMG_CACHE={file}: .*Not a directory"):
        load("toycls", tok)


def test_odd_but_good_input(tmp_path, tok):
    # A corpus only.
    (tmp_path / "c").mkdir()
    (tmp_path / "c/corpus.txt").write_text("a line\n")
    assert len(load(str(tmp_path / "c"), tok).corpus) == 1
    with pytest.raises(UserError, match="c has no train split to cut from"):
        load(str(tmp_path / "c"), tok, dev_share=0.2)
    # Braces that are no JSON, and short lines, some of which end as lines of CoNLL do.
    texts = ["{{Infobox}}", "no", "O", "B-PER", "a B-52", "exercise S-1", "Vitamin B", "type O", "lane I-A"]
    (tmp_path / "c.txt").write_text("\n".join(texts))
    data = load(str(tmp_path / "c.txt"), tok)
    assert data.kind == "text" and texts_of(data.corpus) == texts
    # Lines that end alike, and have no labels.
    (tmp_path / "code.txt").write_text("".join(f"x = {i}; y = 1;\nheadline {i};Reuters\n" for i in range(30)))
    assert len(load(str(tmp_path / "code.txt"), tok).corpus) == 60
    with pytest.raises(UserError, match="no test split"):
        data["test"]
    # A label that only the cut part may have.
    for i in range(12):
        rows = [{"text": f"text {j}", "label": "rare" if j == i else "a"} for j in range(12)]
        assert load(str(write_rows(tmp_path / f"r{i}.jsonl", rows)), tok)["train"].labels == ["a", "rare"]
    # A lone surrogate; a text of which the tokenizer keeps nothing.
    write_rows(tmp_path / "t/dev.jsonl", [{"text": "a"}])
    (tmp_path / "t/train.jsonl").write_text('{"text": "a \\ud800 b"}\n{"text": "\\u200b"}\n')
    train = load(str(tmp_path / "t"), tok)["train"]
    assert texts_of(train) == ["a ? b", "\u200b"] and len(blocks(train, 24)) == 1


def test_splits_of_which_one_lacks_something(tmp_path, tok):
    """The rows of test have no column that tells that questions are asked; there is no train."""
    row = {"id": "1", "text": "a cat", "question": "who?"}
    write_rows(tmp_path / "d/train.jsonl", [row | {"answers": [CAT]}])
    write_rows(tmp_path / "d/test.jsonl", [row])
    with pytest.raises(UserError, match="d, test: the text 'a cat' has no question, unlike those of train"):
        load(str(tmp_path / "d"), tok)
    (tmp_path / "d/train.jsonl").unlink()
    with pytest.raises(UserError, match="there is no train split to learn from, only test"):
        load(str(tmp_path / "d"), tok, kind="qa")
    # A column that --text names must be there; numbers of documents may have been written by pandas.
    with pytest.raises(UserError, match=r"test\.jsonl:1: the field 'txt' is missing"):
        list(sources.read_to_predict(tmp_path / "d/test.jsonl", "txt", "text", "qa"))
    assert [sources.doc_number(value, "doc") for value in ("3.0", "3", 3.0)] == [3, 3, 3]
    # A label may be a number of a database.
    assert sources.label_of(Decimal("2")) == "2"


def test_odd_but_good_questions(tmp_path, tok):
    # A context without a question, among others with one.
    data = squad([TEXTS[0]], ["mat"])
    data["data"][0]["paragraphs"].append({"context": TEXTS[1], "qas": []})
    write_json(tmp_path / "some/train.json", data)
    write_json(tmp_path / "some/dev.json", data)
    # Empty rows, and answers that are not looked at.
    rows = [FLAT | {"answers": 7}, dict.fromkeys(FLAT), FLAT | {"answers": {"text": [1]}, "title": 3.5}]
    found = [record for record, _ in sources.read_to_predict(write_rows(tmp_path / "p.jsonl", rows), "text",
                                                             "text", "qa")]
    assert [len(record["qas"]) if record else 0 for record in found] == [1, 0, 1]
    rows = [FLAT | {"answers": [FOUND]}, dict.fromkeys(FLAT)]
    assert len([*sources.Source({"train": [write_rows(tmp_path / "e.jsonl", rows)]}).records("train")]) == 1
    # Texts whose questions have no answer teach nothing.
    unanswered = FLAT | {"context": "a dog", "id": "8", "answers": []}
    data = load(str(write_rows(tmp_path / "u.jsonl", [unanswered, rows[0]])), tok)
    assert data["train"].labelled.tolist() == [1]
    # Articles have numbers within a file, which say nothing about a corpus numbered by its owner.
    write_rows(tmp_path / "some/corpus.jsonl", [{"text": "a", "doc": 0}])
    data = load(str(tmp_path / "some"), tok)
    assert len(data["train"]) == 2 and data["train"].question_text.tolist() == [0] and not data.shared_doc_ids
    assert data["train"].labelled.tolist() == [0]
    # An article per line is a document; the paragraphs of a single one are cut.
    articles = squad(TEXTS, ["mat", "big ones", "break", "Short"])["data"]
    one = write_json(tmp_path / "one.json", {"data": articles[:1]})
    assert len(load(str(one), tok, dev_share=0.5)["dev"]) == 2
    two = [squad(TEXTS[:2], ["mat", "big ones"])["data"][0], squad(TEXTS[2:], ["break", "Short"])["data"][0]]
    data = load(str(write_rows(tmp_path / "lines.jsonl", two)), tok, dev_share=0.5)
    assert len(data["train"]) == len(data["dev"]) == 2 and len(set(data["dev"].doc)) == 1
