"""Every format, the views (blocks, windows, batches) against Hugging Face's own, downloads, and bad input."""
import functools
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import textwrap
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import spacy
from conftest import (
    SHARED,
    TEXTS,
    all_of,
    corpus_of,
    fast_tokenizer,
    load_splits,
    needs_shared,
    squad,
    write_rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

import data_prep
from data_prep import load
from support import sources
from support.data import blocks, truncated, windows
from support.runs import UserError
from support.sources import DataFlags


def texts_of(split):
    return [split.text(i) for i in range(len(split))]


def answer_of(split, question):
    """What the tokens of a gold answer say, as a prediction is read."""
    text_id = split.question_text[question]
    first, last = split.token_start[text_id] + split.answer[question]
    return split.text(text_id)[split.char_begin[first]:split.char_end[last]].strip()


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


@pytest.mark.parametrize("numbered", [False, True])
def test_pre_training_reads_train_and_corpus(numbered, tmp_path, tok):
    """All arrays fit to each other, and documents stay apart unless both files number them alike."""
    rows = [{"text": f"The cat, number {i}.", "label": "ab"[i % 2]} for i in range(20)]
    more = [{"text": "more dogs"}] * 2
    if numbered:
        rows = [row | {"doc": i} for i, row in enumerate(rows)]
        more = [row | {"doc": 3} for row in more]
    data = load_splits(tmp_path, tok, train=rows, corpus=more)
    train, corpus = [data_prep.text_to_read(data, read) for read in ("train", "corpus")]
    assert train is data["train"] and corpus is data["corpus"]
    both = data_prep.text_to_read(data, "both")
    assert both.train is train and data_prep.what_to_read(data) == "both"
    assert texts_of(both) == [*texts_of(train), *texts_of(corpus)]
    assert words_under(both) == [*words_under(train), *words_under(corpus)]
    assert both.input_ids.tolist() == [*train.input_ids, *corpus.input_ids]
    documents = len({*train.doc, 3}) if numbered else 20
    assert len(np.unique(both.doc)) == documents


def class_labels(labels):
    """A Dataset as the hub has it: labels are numbers of the names neg and pos, or -1."""
    kind = datasets.ClassLabel(names=["neg", "pos"])
    features = datasets.Features({"text": datasets.Value("string"), "label": kind})
    texts = [f"text {i} of {len(labels)}" for i in range(len(labels))]
    return datasets.Dataset.from_dict({"text": texts, "label": labels}, features=features)


def label_names(split):
    return [split.labels[i] for i in split.label]


def test_a_saved_folder_of_the_library_datasets(tmp_path, tok, monkeypatch):
    """It also stands in the place of what the library would download of the hub."""
    parts = {"train": class_labels([0, 1, 1]), "validation": class_labels([1, 0]),
             "test": class_labels([-1] * 4), "unsupervised": class_labels([-1] * 5)}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "all")
    data = load(str(tmp_path / "all"), tok)
    assert label_names(data["train"]) == ["neg", "pos", "pos"] and label_names(data["dev"]) == ["pos", "neg"]
    assert texts_of(data.corpus)[4] == "text 4 of 5" and not hasattr(data.corpus, "label")
    # All labels of test are -1, which says that there are none.
    with pytest.raises(UserError, match="test: there is no label"):
        data.check_labels("test")
    # Each split by itself.
    class_labels([0, 1, 1]).save_to_disk(tmp_path / "each/train")
    class_labels([1]).save_to_disk(tmp_path / "each/test")
    each = load(str(tmp_path / "each"), tok)
    assert (len(each["train"]), label_names(each["test"])) == (2, ["pos"])
    two = {name: class_labels([0]) for name in ("train", "validation_a", "validation_b")}
    datasets.DatasetDict(two).save_to_disk(tmp_path / "two")
    with pytest.raises(UserError, match="two of its parts could be dev"):
        load(str(tmp_path / "two"), tok)
    del parts["validation"], parts["unsupervised"]
    datasets.DatasetDict(parts | {"train": class_labels([0, 1] * 10)}).save_to_disk(tmp_path / "hub")
    hub = {("owner/name", "plain"): datasets.load_from_disk(tmp_path / "hub")}
    monkeypatch.setattr(datasets, "load_dataset", lambda *asked: hub[asked])
    data = load("hf:owner/name:plain", tok)
    assert [len(data[split]) for split in ("train", "dev", "test")] == [18, 2, 4]


def test_shards_are_read_in_order_and_all_of_them(tmp_path, tok):
    """As the hub names them, with a checksum behind the numbers. Other files cannot be joined."""
    for i in range(3):
        class_labels([i % 2] * (i + 1)).to_parquet(tmp_path / f"train-0000{i}-of-00003-1a2b3c4d.parquet")
    write_rows(tmp_path / "dev.jsonl", [{"text": "a", "label": "pos"}])
    assert texts_of(load(str(tmp_path), tok)["train"]) == [
        "text 0 of 1", "text 0 of 2", "text 1 of 2", "text 0 of 3", "text 1 of 3", "text 2 of 3"]
    (tmp_path / "train-00001-of-00003-1a2b3c4d.parquet").unlink()
    with pytest.raises(UserError, match=r"4d\.parquet is one of 3 files, but here are 2"):
        load(str(tmp_path), tok)
    write_rows(tmp_path / "train.jsonl", [GOOD])
    with pytest.raises(UserError, match="could be train"):
        load(str(tmp_path), tok)


def test_files_that_are_no_split_are_named(tmp_path, tok, capsys):
    """And a split may be a folder."""
    for name in ("train/part-0.jsonl", "old.jsonl", "eval.jsonl", "dev.xlsx", "train/notes.pdf"):
        write_rows(tmp_path / name, [{"text": name}])
    data = load(str(tmp_path), tok)
    assert {split: texts_of(data[split]) for split in data.splits} == {
        "train": ["train/part-0.jsonl"], "dev": ["eval.jsonl"]}
    assert re.search("not read.*: dev.xlsx, old.jsonl, notes.pdf\n", capsys.readouterr().out)


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


@pytest.mark.parametrize(("given", "names"), [
    ([10, 9, -1], ["-1", "10", "9"]), ([True, False], ["false", "true"]), ([0.5, 1.0], ["0.5", "1.0"]),
    ([" b", "a "], ["a", "b"]), ([["b"], "a"], ["a", "b"])])
def test_labels_are_named_as_they_were_written(given, names, tmp_path, tok):
    rows = [{"text": f"text {i}", "label": label} for i, label in enumerate(given)]
    data = load_splits(tmp_path, tok, train=rows, dev=rows)
    assert data["train"].labels == names and sorted(label_names(data["dev"])) == names


FLAT = {"id": "7", "title": "t", "context": "the cat sat", "question": "who?"}
FOUND = {"text": "cat", "answer_start": 4}
FLAT_ANSWERS = {
    "an object of lists": {"answers": {"text": ["cat"], "answer_start": [4]}},
    "a list of objects": {"answers": [FOUND]},
    "one object": {"answers": FOUND},
    "MRQA": {"answers": ["cat"],
             "detected_answers": {"text": ["cat"], "char_spans": [{"start": [4], "end": [6]}]}}}


@pytest.mark.parametrize("form", FLAT_ANSWERS)
def test_rows_with_a_question_each(form, tmp_path, tok):
    """As the hub has SQuAD: rows about the same text are one text with several questions."""
    contexts = ["the cat sat", "the cat sat", "the cat ran"]
    rows = [FLAT | FLAT_ANSWERS[form] | {"id": str(i), "context": contexts[i]} for i in range(3)]
    pd.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    train = load(str(tmp_path), tok, kind="qa")["train"]
    assert texts_of(train) == ["the cat sat", "the cat ran"]
    assert train.question_text.tolist() == [0, 0, 1]
    assert [answer_of(train, j) for j in range(3)] == ["cat"] * 3
    assert [question["references"] for question in train.questions] == [["cat"]] * 3
    # One title is one document.
    assert len(set(train.doc)) == 1


@pytest.mark.parametrize(("row", "columns", "text"), [
    # A question that is the text, or that has a label beside it, asks nothing.
    ({"question": "who sat?", "label": "HUM"}, {"text": "question"}, "who sat?"),
    ({"question": "q?", "context": "a cat", "answer": True}, {"text": "context", "label": "answer"}, "a cat"),
    ({"question": "is it?", "text": "the cat"}, {}, "the cat"),
    ({"question": "q?", "passage": "the cat", "guid": 1, "answers": [FOUND]}, {"text": "passage"}, "the cat"),
])
def test_which_column_is_the_text(row, columns, text, tmp_path, tok):
    data = load(str(write_rows(tmp_path / "t.jsonl", [row])), tok, columns=DataFlags(**columns))
    assert texts_of(data["train"]) == [text]
    assert hasattr(data["train"], "question_text") == ("guid" in row)


def test_labels_that_cannot_be_used_are_told_to_who_needs_them(tmp_path, tok):
    """Texts without a label are read, and no masker reads their labels."""
    rows = [GOOD, {"text": "b"}, OTHER, {"text": "c", "label": None}]
    unknown = [{"text": "d", "label": "z"}, {"text": "e"}]
    data = load_splits(tmp_path, tok, train=rows, dev=[GOOD], test=unknown)
    train = data["train"]
    assert train.label.tolist() == [0, -1, 1, -1] and train.labelled.tolist() == [0, 2]
    train.limit_labels(1, seed=0)
    assert train.labelled.tolist() in ([0], [2])
    with pytest.raises(UserError, match="test: the label 'z' is not among those of train"):
        data.check_labels("test")


def test_mrqa(tmp_path, tok):
    """A context is a document of its own. An answer may have other punctuation there, and the end of its span
    is inclusive. What is scored against is `answers`, not `detected_answers`."""
    found = {"text": "U.S.A.", "char_spans": [[7, 14]]}
    qa = {"qid": "1", "question": "where?", "answers": ["U.S.A.", "USA"], "detected_answers": [found]}
    rows = [{"header": {"dataset": "x"}}]
    rows += [{"context": f"in the U. S. A. {word}", "qas": [qa]} for word in ("today", "again")]
    data = load(str(write_rows(tmp_path / "m.jsonl", rows)), tok, dev_share=0.5)
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
    (tmp_path / "toycls").mkdir()
    sources.find_source("toycls")
    assert "what lies here is called --dataset=./toycls" in capsys.readouterr().out


def test_columns_without_names_are_told_apart():
    assert sources.unique_names(["", "text", "", "", "a"]) == ["", "text", "unnamed 2", "unnamed 3", "a"]


@functools.cache
def letters_tokenizer(form, pre="bytes"):
    """Text in a normal form ("NFC", ..., or "no accents" as BERT reads it), then in bytes; or in characters,
    one of which is known."""
    forms = {"none": normalizers.Sequence([]), "no accents": normalizers.BertNormalizer(),
             "NFC": normalizers.NFC(), "NFD": normalizers.NFD(), "NFKC": normalizers.NFKC(),
             "NFKD": normalizers.NFKD()}
    splitter, pieces = pre_tokenizers.Metaspace(), ["a"]
    if pre == "bytes":
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
        pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(["[PAD]", "[UNK]", *pieces])}
    backend = Tokenizer(tokenizer_models.BPE(vocabulary, [], unk_token="[UNK]"))
    backend.pre_tokenizer, backend.normalizer = splitter, forms[form]
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", mask_token="[PAD]")


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
def test_gold_answers_through_tokens_and_back(form, pre, data, tmp_path_factory):
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
    folder, problems = tmp_path_factory.mktemp("questions"), []
    [gold] = data_prep.question_arrays([record], arrays, encoder, folder, 0, problems)["answer"]
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
    assert words_under(corpus_of(tmp_path, letters_tokenizer(form, pre), WORDS)) == UNITS


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
    (["any pain?"], [{"evidence": "for pain.", "evidence_start": 3, "text": "yes"}]),
    (["no class?"], [{"evidence": "for pain.", "evidence_start": 3, "text": ""}]),
    (["two?"], [{"evidence": "aspirin"}, {"evidence": "pain"}]),
    (["only a piece of a word?"], [{"evidence": "spirin"}]),
    (["smoker?"], [{"evidence": "", "text": "Patient"}])]


def test_emrqa_notes(tmp_path, tok, monkeypatch):
    """A synthetic file of the shape of n2c2's data.json: kept are questions with one piece of evidence; notes
    never straddle splits."""
    qas = [{"id": [["x"]], "question": question, "answers": answers} for question, answers in NOTE_QAS]
    lines = ["aspirin  daily\n", "for pain.\n"]
    notes = [{"note_id": str(i), "context": [f"Patient {i} took pain killers \n", *lines], "qas": qas}
             for i in range(10)]
    # The same notes again in another part, as one string.
    other = [note | {"context": "".join(note["context"])} for note in notes]
    articles = [{"title": "medication", "paragraphs": notes}, {"title": "risk", "paragraphs": other}]
    monkeypatch.setattr(sources, "CACHE", tmp_path)
    write_rows(tmp_path / "raw/emrqa/data.json", [{"data": articles}])
    # A cut of dev is of what that of test has left.
    data = load("emrqa", tok, dev_share=0.1)
    assert [len(data[name]) for name in ("train", "dev", "test")] == [14, 2, 4]
    assert len({*texts_of(data["train"]), *texts_of(data["dev"]), *texts_of(data["test"])}) == 7 + 1 + 2
    split = data["test"]
    assert [q["question"] for q in split.questions] == ["what drug?", "which medication?", "what for?"] * 4
    for question in split.questions:
        assert re.sub(r"\s+", " ", question["references"][0]) in ("aspirin daily for pain", "pain")
    # The first "pain", that before "aspirin".
    assert split.answer[2][0] < split.answer[0][0]


# ---------------------------------------------------------------- splits

def test_a_cut_stays_as_it_was(tmp_path, tok):
    """Which texts are held out decides about published numbers. A label may be only there."""
    rows = [{"text": f"sentence {i}", "label": "xy"[i % 2]} for i in range(40)]
    rows[9]["label"] = "z"
    data = load(str(write_rows(tmp_path / "cut.jsonl", rows)), tok)
    assert sorted(data["dev"].doc.tolist()) == [0, 9, 12, 14]
    assert data["train"].labels == data["dev"].labels == ["x", "y", "z"]


def test_a_cache_is_keyed_by_file_tokenizer_cut_and_records(tmp_path, tok, monkeypatch):
    file = write_rows(tmp_path / "d.jsonl", [{"text": f"text {i}", "label": "a"} for i in range(20)])
    checksum = load(str(file), tok).checksum
    assert load(str(file), tok).checksum == checksum
    assert load(str(file), tok, dev_share=0.5).checksum != checksum
    assert load(str(file), fast_tokenizer("bpe")).checksum != checksum
    before = file.stat()
    file.write_text(file.read_text().replace('"a"', '"b"'))
    # Of the same size and age, as rsync or tar may leave it.
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load(str(file), tok)["train"].labels == ["b"]
    for text in ("more text", "other text"):
        source = sources.Source({"train": [file], "corpus": [{"text": text}]})
        monkeypatch.setitem(sources.DATASETS, "mine", lambda source=source: source)
        assert texts_of(load("mine", tok).corpus) == [text]


def test_what_two_want_at_once_is_made_once(tmp_path):
    """As the processes of torchrun do; here they are threads."""
    made = []

    def make(partial):
        made.append(partial)
        time.sleep(0.2)
        partial.touch()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(sources.make_once, [tmp_path / "file"] * 2, [make] * 2))
    assert len(made) == 1


# ---------------------------------------------------------------- views

@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_blocks_and_truncated_texts_against_hugging_face(kind, tmp_path):
    """Blocks hold every token once. That a tokenizer has a length of its own counts for nothing."""
    tok = fast_tokenizer(kind)
    tok.backend_tokenizer.enable_truncation(4)
    tok.backend_tokenizer.enable_padding(length=9)
    texts = [*TEXTS, " ".join(TEXTS * 4)]
    corpus = corpus_of(tmp_path, tok, *texts)
    pieces = blocks(corpus, 16)
    batch = all_of(pieces)
    for i, text in enumerate(texts):
        mine = [batch.input_ids[b][batch.in_text[b]] for b in np.flatnonzero(pieces.text_ids == i)]
        assert np.concatenate(mine).tolist() == tok(text, add_special_tokens=False)["input_ids"]
    assert pieces.length.max() <= 16 and (pieces.length == batch.attention_mask.sum(1)).all()
    for ours, max_len in ((blocks(corpus, 4096), 4096), (truncated(corpus, 24), 24)):
        theirs = tok(texts, padding=True, truncation=True, max_length=max_len, return_tensors="np")
        assert (all_of(ours).input_ids == theirs["input_ids"]).all()
        assert (all_of(ours).attention_mask == theirs["attention_mask"]).all()


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_windows_are_those_of_hugging_face(kind, tmp_path):
    tok, context = fast_tokenizer(kind), " ".join(TEXTS * 3)
    articles = squad([context, TEXTS[0]], ["many pieces", "mat"])["data"]
    pieces = windows(load_splits(tmp_path, tok, train=articles)["train"], 48, 8, 64)
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
    corpus = corpus_of(tmp_path, tok, *texts, spacy_model=str(tmp_path / "rules"))
    for i, text in enumerate(texts):
        tokens = slice(corpus.token_start[i], corpus.token_start[i + 1])
        for number, place in enumerate(re.finditer("Berlin", text)):
            hit = np.flatnonzero(corpus.entity_ids[tokens] == number)
            assert corpus.char_begin[tokens][hit].min() == place.start()
            assert corpus.char_end[tokens][hit].max() == place.end()
    with pytest.raises(UserError, match="finds no named entity"):
        data_prep.run_spacy(corpus, spacy.blank("en"))


def test_punctuation(tmp_path):
    # Bytes of a letter are no punctuation.
    for kind, text, signs in (("wordpiece", TEXTS[1], "();'!"), ("bpe", "é 日本 a, 5", ",")):
        tok = fast_tokenizer(kind)
        corpus = corpus_of(tmp_path, tok, text)
        assert "".join(tok.convert_ids_to_tokens(corpus.input_ids[corpus.is_punct])) == signs


def test_text_that_the_tokenizer_does_not_know(tmp_path, tok, capsys):
    """Where it was prepared before, too."""
    for _ in range(2):
        corpus_of(tmp_path, tok, "the cat 日本語 中文 字")
        assert "WARNING: 75% of the tokens of corpus are unknown" in capsys.readouterr().out


# ---------------------------------------------------------------- downloads

def test_a_data_set_is_downloaded_whole_or_not_at_all(tmp_path, monkeypatch):
    """With files that are checked; what is in its folder already is not fetched again."""
    (tmp_path / "f.bin").write_bytes(b"x" * 100_000)
    url, right = (tmp_path / "f.bin").as_uri(), hashlib.sha256(b"x" * 100_000).hexdigest()
    monkeypatch.setattr(sources, "CACHE", tmp_path)
    files = {"train.jsonl": (url, None), "test.jsonl": (url, "0" * 64)}
    monkeypatch.setitem(sources.DOWNLOADS, "squad", files)
    with pytest.raises(UserError, match=r"cannot be downloaded.*hash"):
        sources.downloaded("squad")
    assert os.listdir(tmp_path / "raw") == ["squad.lock"]
    files["test.jsonl"] = (url, right)
    source = sources.downloaded("squad")
    assert sorted(source.splits) == ["test", "train"]
    assert (tmp_path / "raw/squad/train.jsonl").read_bytes() == b"x" * 100_000
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
    for split, count in zip(("train", "dev", "test"), counts, strict=True):
        assert sum(len(record.get("qas", [1])) for record in source.records(split)) == count
        if name in ("scierc", "acl_arc", "scicite"):
            content = (SHARED / f"data/{name}/{split}.jsonl").read_bytes()
            assert hashlib.sha256(content).hexdigest() == sources.DOWNLOADS[name][f"{split}.jsonl"][1]


# ---------------------------------------------------------------- bad input: one sentence

def jsonl(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


GOOD = {"text": "a text", "label": "a"}
OTHER = {"text": "another text", "label": "b"}
CONLL = "Anna NNP B-NP B-PER\nsings VBZ B-VP O\n. . O O\n\nIn IN B-PP O\nRome NNP B-NP I-LOC\n" * 400
TSV = 'text\tlabel\n"a fine film\tx\nb\ty\nshe said no to\tx\nhe said"\tx\n'


def stories(labels, **more):
    """Forty rows, whose labels take turns."""
    rows = []
    for i in range(40):
        others = {key: values[i % len(values)] for key, values in more.items()}
        rows.append({"text": f"story {i} of a river", "label": labels[i % len(labels)]} | others)
    return rows


ROWS = stories(["neg", "pos"])
TABLE = pd.DataFrame(ROWS).to_csv(index=False)
TEXT_ALONE = "or a label and a text (fastText, csv), but a .txt file is text alone"
TWICE = io.BytesIO()
pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), TWICE)
BAD = [
    ("empty.jsonl", "", "empty.jsonl, train: there is no text in it"),
    ("conll.txt", CONLL, "conll.txt: looks like a token and its tag per line (CoNLL)"),
    ("windows.csv", "text,label\na,b\n".encode("utf-16"), "windows.csv: is not UTF-8 text; save it as"),
    ("train-00000-of-00002.jsonl", jsonl(GOOD), "00002.jsonl is one of 2 files, but here are 1"),
    ("broken.jsonl", jsonl(GOOD) + '{"text": "a\n', "broken.jsonl:2: is not JSON (Unterminated"),
    ("some.jsonl", jsonl(GOOD | {"doc": 1}, GOOD), "some.jsonl:2: its fields are text, label, but"),
    ("column.csv", "id,review,labels\n1,a,b\n", "column.csv:2: the field 'text' is missing"),
    ("cells.csv", "text,label\na, b,c", "cells.csv:2: more cells than columns"),
    ("is_impossible.jsonl", jsonl(FLAT | {"answers": [FOUND], "is_impossible": 1.0}), "has no answer"),
    ("quote.csv", 'text,label\n"a,b\n', "quote.csv:2: unexpected end of data"),
    ("quoted.tsv", TSV, "quoted.tsv:2: a quoted cell holds tabs and runs over"),
    ("span.jsonl", jsonl(FLAT | FLAT_ANSWERS["MRQA"] | {"context": "a b"}),
     "span.jsonl, train: the answer 'cat' of question '7' does not stand"),
    ("nothing.json", json.dumps(squad(["the cat \x01 sat"], ["\x01"])), "'q0' holds no token of its context"),
    ("header.csv", "text,label\na,x\ntext,label\nb,y\n", "header.csv:3: the header is repeated here"),
    ("inch.csv", 'label,text\nneg,a river\npos,"quoted\npos,the end\nneg,a city 12"\n', "rows: 'pos,the"),
    ("twice.csv", "text,label,text\na,x,1\n", "twice.csv: two columns have the name 'text'; rename"),
    ("twice.parquet", TWICE.getvalue(), "twice.parquet: two columns have the name 'text'; rename"),
    ("zero.jsonl", jsonl({"text": 0}), "zero.jsonl:1: the field 'text' must be text and not empty, not 0"),
    ("list.jsonl", jsonl(GOOD, GOOD | {"label": [1]}), "or true or false, one for each text, not [1]"),
    ("space.jsonl", jsonl(GOOD, GOOD | {"label": "a\u200b"}), r"the labels 'a' and 'a\u200b' look alike"),
    ("pointer.csv", "version https://git-lfs.github.com/spec/v1\n", "pointer.csv: is not the data, but a"),
    ("escaped.csv", 'text,label,date\n"size 5\\", a river",neg\na city,pos,monday\n', "torn apart at ','"),
    ("blank.csv", 'label,text,date\npos,a city,monday\nneg, "a river, wide"\n', "torn apart at ','"),
    ("fasttext.txt", "__label__pos a b\n__label__neg __label__x c\n", TEXT_ALONE),
    ("last.txt", "".join(f"{row['label']}\t{row['text']}\n" for row in ROWS), TEXT_ALONE),
    ("data.tar", b"train.csv" + bytes(503) + TABLE.encode(), "data.tar: holds NUL bytes, so that it"),
    ("look1.jsonl", jsonl(*stories(["p\u043es", "pos"])), r"the labels 'pos' and 'p\u043es' look alike"),
    ("look3.jsonl", jsonl(*stories(["A1", "\uff21\uff11"])), "look alike"),
    ("emotions.txt", "".join(f"{row['text']};{row['label']}\n" for row in ROWS), TEXT_ALONE),
    ("table.txt", TABLE, TEXT_ALONE),
    ("first.txt", pd.DataFrame(ROWS)[["label", "text"]].to_csv(index=False), TEXT_ALONE),
    ("page.html", "<!DOCTYPE html>\n<p>a river</p>\n", "page.html: begins like a web page, RTF,"),
    ("word.txt", r"{\rtf1\ansi a river\par}", "word.txt: begins like a web page, RTF, or a printed dict"),
    ("printed.txt", "".join(f"{row}\n" for row in ROWS), r"printed.txt: begins like a web page, RTF, or"),
    ("signs.txt", "".join(f"{row['text']};{i % 2 * 2 - 1}\n" for i, row in enumerate(ROWS)), TEXT_ALONE),
    # Also in a file of which most rows are right.
    ("inches.csv", TABLE + '"a 12,neg\na river,pos\na 5",neg\n', "rows: 'a river,pos'"),
]


@pytest.mark.parametrize(("name", "content", "said"), BAD, ids=[name for name, *_ in BAD])
def test_a_bad_file_is_one_sentence(name, content, said, tmp_path, tok):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=re.escape(said)) as raised:
        load(str(tmp_path / name), tok).check_labels("train", "dev")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("width", "said"), [(70, True), (140, False), (40, False)])
def test_lines_that_end_at_the_edge_of_a_page(width, said, tmp_path, tok, capsys):
    """Shorter lines may be titles, and longer ones are no page."""
    prose = " ".join(f"a river of {i % 13 * 'very '}long stories" for i in range(200))
    (tmp_path / "a.txt").write_text(textwrap.fill(prose, width))
    load(str(tmp_path / "a.txt"), tok)
    assert ("but each line is read as one document" in capsys.readouterr().out) == said


LOOKS = [
    # what is read: (texts, labels), and what is said of it
    ("comma.tsv", TABLE, (40, 2), r"its columns are separated by ',', not by '\t'"),
    ("breaks.csv", 'text,label\n' + '"Dear all,\nfine, thanks\n\nBye",a\n' * 3, (3, 1), "over several lines"),
    ("speech.csv", 'label,text\n' + 'pos,"It was late.\n""Go,"" he said."\n' * 3, (3, 1), "3 rows in 7"),
    # As pandas writes a quotation that goes on in the next column.
    ("goes_on.csv", 'title,text,label\n' + '"""I am sad.","Very sad.""",a\n' * 3, (3, 1), "3 rows in 4"),
    ("excel.csv", "\nsep=;\ntext;label\na;x\n", (1, 1), "csv: its columns are separated by ';'"),
    ("empty.csv", "text,label\na,x\n,\nb,y\n\n ,\n", (2, 2), "empty.csv: 2 empty rows are skipped"),
    ("reject.jsonl", jsonl(*stories(["a"], answer=["accept", "reject", "ignore"])), (14, 1), "26 rejected"),
    ("scores.jsonl", jsonl(*stories([0.5, 1.5, 2, "-3e-1"])), (40, 4), "'0.5' look like scores"),
    ("names.jsonl", jsonl(*stories([f"user {i}" for i in range(20)])), (40, 20), "20 labels for 40 texts"),
    ("vector.jsonl", jsonl(*stories(["[1, 0]", "[0, 1]"])), (40, 2), "'[1, 0]' look like several labels"),
    ("comma.jsonl", jsonl(*stories(["pos", "pos,river"])), (40, 2), "'pos,river' look like several labels"),
    ("case.jsonl", jsonl(*stories(["pos", "Pos"])), (40, 2), "'pos' and 'Pos' differ in capitals"),
    ("list.txt", json.dumps(ROWS, indent=1), (40, 2), "  for example 'story 1 of a river', label 'pos'"),
    ("one_line.txt", json.dumps(ROWS), (40, 2), ""),
    ("ids.json", json.dumps({f"id {i}": row for i, row in enumerate(ROWS)}), (40, 2), ""),
    ("columns.json", pd.DataFrame(ROWS).set_index("text", drop=False).to_json(), (40, 2), ""),
    ("units.csv", 'label,text\n' + 'a,"Sold:\n1,234 units"\n' * 3, (3, 1), "3 rows in 7 lines"),
    ("none.jsonl", jsonl(*stories(["pos", "NA"])), (40, 2), "the label 'NA' is read as a class"),
    ("formula.csv", pd.DataFrame(stories(["pos", "#N/A"])).to_csv(), (40, 2), "'#N/A' is read as a class"),
    ("null.csv", pd.DataFrame(stories(["pos", "[NULL]"])).to_csv(), (40, 2), "'[NULL]' is read as a class"),
    ("dump.csv", pd.DataFrame(stories([r"\N", "pos"])).to_csv(), (40, 2), r"'\\N' is read as a class"),
    ("slash.jsonl", jsonl(*stories(["a", "b", "a/b"])), (40, 3), "'a/b' look like several labels"),
    ("parts.jsonl", jsonl(*stories(["a;b", "b;c", "a;c"])), (40, 3), "'a;b' look like several labels"),
    ("names.csv", pd.DataFrame(stories(["ARTS", "ARTS & CULTURE", "C", "C++"])).to_csv(), (40, 4), None),
    ("sum.csv", TABLE + "a total,40\n", (41, 3), "labels with a single text: 1, such as '40'"),
    ("nan.jsonl", jsonl(*ROWS, *[{"text": "nan", "label": "neg"}] * 10), (50, 2), "10 of 50 texts are 'nan'"),
    ("both.jsonl", jsonl(*ROWS, *ROWS[:3], ROWS[0] | {"label": "pos"}), (44, 2),
     "  1 of 40 different texts of train have several labels, such as 'story 0 of a river'"),
    ("whole.jsonl", jsonl(*stories(["1", "1.0"])), (40, 2), "the labels '1' and '1.0' are the same number"),
    ("torn.csv", "label,text,more\n" + "a,b,c\n" * 40 + "a,half a text\n", (41, 1), "torn.csv:42; is a line"),
    ("frage.csv", '"Frage, Text";text;label\n1;a;x\n', (1, 1), "separated by ';'"),
    ("blank.csv", "text; label\na; x\n", (1, 1), "separated by ';'"),
    ("squad.txt", json.dumps({"data": ROWS}, indent=1), (40, 2), ""),
    ("column.json", json.dumps({"data": [1, 2], "text": ["a", "b"], "label": ["x", "y"]}), (2, 2), ""),
    ("blanks.csv", 'label, "text"\npos, "bad ""movie"""\n"neg", good\n', (2, 2), None),
    ("spoken.csv", 'label, text\npos, "Great" movie\n', (1, 1), None),
    ("thai.jsonl", jsonl(*stories(["\u0e14\u0e35", "\u0e15\u0e35"])), (40, 2), None),
    ("plain.jsonl", jsonl(*stories(["burn", "bum", "1", "l"])), (40, 4), None),
    ("topics.jsonl", jsonl(*stories(["Sports", "Science, technology"])), (40, 2), None),
    ("culture.jsonl", jsonl(*stories(["Sports", "Science, technology", "Art", "Art & C++"])), (40, 4), None),
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
    assert "WARNING" not in printed if said is None else said in printed


def test_texts_and_documents_that_splits_share(tmp_path, tok, capsys):
    """Is said at each load, also of what was prepared before."""
    train = [row | {"doc": i // 4} for i, row in enumerate(ROWS)]
    new = [{"text": f"new {i}", "label": "neg", "doc": 6 + i} for i in range(10)]
    dev = [*new[:9], ROWS[0] | {"doc": 90}]
    corpus = [{"text": text} for text in ("new 5", "new 6 ", "some text")]
    for _ in range(2):
        load_splits(tmp_path, tok, train=train, dev=dev, test=new[4:], corpus=corpus)
        said = [line for line in capsys.readouterr().out.splitlines() if "of the texts of" in line]
        assert said == ["WARNING: 10.0% of the texts of dev also stand in train",
                        "WARNING: 20.0% of the texts of dev also stand in corpus",
                        "WARNING: 40.0% of the texts of dev are from documents of train",
                        "WARNING: 33.3% of the texts of test also stand in corpus"]


def test_lines_that_only_look_like_json_or_labels_are_text(tmp_path, tok):
    texts = ["{{Infobox}}", "no", "O", "B-PER", "a B-52", "exercise S-1", "Vitamin B", "type O", "lane I-A"]
    assert texts_of(corpus_of(tmp_path, tok, *texts)) == texts
    # What all lines end with, such as the name of a source, is no label.
    texts = [f"x = {i}; y = 1;\nheadline {i};Reuters" for i in range(30)]
    assert len(corpus_of(tmp_path, tok, *texts)) == 60
    texts = [f"(2R,3S)-acid {i}\n(2S,3S)-acid {i}" for i in range(30)]
    assert len(corpus_of(tmp_path, tok, *texts)) == 60
    for one, other in (("49,99", "19,98"), ('"Go," he said.', '"No," she said.'), ("so ;)", "no ;-)"),
                       ("in [3,4].", "in [3,7]."), ("&quot;.", "&quot;!"), ("yes, he", "yes, she")):
        assert len(corpus_of(tmp_path, tok, *[f"{i} {one}\n{i} {other}" for i in range(30)])) == 60


def test_texts_whose_questions_have_no_answer_teach_nothing(tmp_path, tok):
    unanswered = FLAT | {"context": "a dog", "answers": []}
    data = load(str(write_rows(tmp_path / "u.jsonl", [unanswered, FLAT | {"answers": [FOUND]}])), tok)
    assert data["train"].labelled.tolist() == [1]
    # So do contexts that nobody asks about.
    articles = squad([TEXTS[0]], ["mat"])["data"]
    articles[0]["paragraphs"].insert(0, {"context": TEXTS[1], "qas": []})
    # Articles have numbers within a file, which say nothing about a corpus numbered by its owner.
    data = load_splits(tmp_path, tok, train=articles, dev=articles, corpus=[{"text": "a", "doc": 0}])
    assert len(data["train"]) == 2 and data["train"].labelled.tolist() == [1] and not data.shared_doc_ids


def test_articles_are_documents_unless_there_is_only_one(tmp_path, tok):
    two = [squad(TEXTS[:2], ["mat", "big ones"])["data"][0], squad(TEXTS[2:], ["break", "Short"])["data"][0]]
    data = load(str(write_rows(tmp_path / "two.jsonl", two)), tok, dev_share=0.5)
    assert len(data["train"]) == len(data["dev"]) == 2 and len(set(data["dev"].doc)) == 1
    # The paragraphs of a single one are cut.
    one = write_rows(tmp_path / "one.json", [{"data": two[:1]}])
    assert len(load(str(one), tok, dev_share=0.5)["dev"]) == 1
