"""Every format, the views (blocks, windows, batches) against naive or Hugging Face's own, downloads, and bad input."""
import collections
import functools
import gzip
import http.server
import json
import os
import re
import tarfile
import threading
import tracemalloc

import numpy as np
import pytest
import spacy
from conftest import SHARED, TEXTS, fast_tokenizer, needs_shared, squad, write_jsonl
from tokenizers.processors import TemplateProcessing

import data_prep
import loop
from data_prep import Specials, blocks, gather, heads, load, windows
from loop import UserError


@pytest.fixture(scope="module")
def tok():
    return fast_tokenizer("wordpiece")


def texts_of(split):
    return [split.raw(i) for i in range(len(split))]


# ---------------------------------------------------------------- formats

def test_the_same_labelled_texts_in_every_format(tmp_path, tok):
    rows = [{"text": f'{t} "quoted", {i}', "label": "ab"[i % 2]} for i, t in enumerate(TEXTS)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    write_jsonl(tmp_path / "b.txt", rows)                     # JSON lines under another name, as ChemProt is spread
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as f:
        f.writelines(json.dumps(r) + "\n" for r in rows)
    (tmp_path / "d.csv").write_text("label,text\n" + "".join('{},"{}"\n'.format(r["label"], r["text"].replace('"', '""')) for r in rows))
    (tmp_path / "e.tsv").write_text("text\tlabel\n" + "".join('"{}"\t{}\n'.format(r["text"].replace('"', '""'), r["label"]) for r in rows))
    for name in ("a.jsonl", "b.txt", "c.jsonl.gz", "d.csv", "e.tsv"):
        records = list(data_prep.read(tmp_path / name))
        assert records == rows, name


def test_a_corpus_of_plain_text(tmp_path, tok):
    (tmp_path / "c.txt").write_text("one line\n\n  another  \n")
    data = load(str(tmp_path / "c.txt"), tok)
    assert data.kind == "text" and texts_of(data.corpus) == ["one line", "another"]
    with pytest.raises(UserError, match="no test split"):
        data["test"]


def test_squad_and_mrqa_give_the_same_questions(tmp_path, tok):
    contexts, answers = [TEXTS[0], TEXTS[1]], ["mat", "big ones"]
    (tmp_path / "a").mkdir()
    (tmp_path / "a/train.json").write_text(json.dumps(squad(contexts, answers)))
    rows = [{"header": {"dataset": "x"}}]
    for i, (c, a) in enumerate(zip(contexts, answers, strict=True)):
        s = c.index(a)
        rows.append({"context": c, "qas": [{"qid": f"q{i}", "question": f"What is number {i}?", "answers": [a, a.upper()],
                                            "detected_answers": [{"text": a, "char_spans": [[s, s + len(a) - 1]]}]}]})      # inclusive end
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as f:
        f.writelines(json.dumps(r) + "\n" for r in rows)
    one, two = load(str(tmp_path / "a"), tok), load(str(tmp_path / "b.jsonl.gz"), tok, dev_share=0.5)
    assert one.kind == two.kind == "qa"
    assert len(two["train"]) == len(two["dev"]) == 1                   # a context of MRQA is a document of its own
    for split in (one["train"], two["train"], two["dev"]):
        for j, q in enumerate(split.questions):
            first, last = split.start[split.q_row[j]] + split.answer[j]
            assert split.raw(split.q_row[j])[split.begin[first]:split.end[last]] == answers[int(q["id"][1])]
    assert two["train"].questions[0]["scored"][1].isupper()            # scored against `answers`, not `detected_answers`


@pytest.mark.parametrize("name", ["dev", "val", "valid", "validation", "dev.clean", "dev-v1.1", "dev-00000-of-00001"])
def test_dev_by_its_usual_names(name, tmp_path, tok):
    for file, n in (("train", 4), (name, 2)):
        write_jsonl(tmp_path / f"{file}.jsonl", [{"text": f"{file} {i}", "label": "ab"[i % 2]} for i in range(n)])
    data = load(str(tmp_path), tok)
    assert len(data["train"]) == 4 and len(data["dev"]) == 2


def test_files_by_other_names(tmp_path, tok):
    """SQuAD's own names, capitals, lines of JSON in a .txt; a single article is cut by paragraphs; a corpus numbered by its owner is not paired."""
    for split in ("train", "dev"):
        (tmp_path / f"{split}-v1.1.json").write_text(json.dumps(squad(TEXTS[:2], ["mat", "big ones"])))
    data = load("squad", tok, str(tmp_path))
    assert len(data["train"]) == len(data["test"]) == 2
    (tmp_path / "one.json").write_text(json.dumps({"data": squad(TEXTS, ["mat", "big ones", "break", "Short"])["data"][:1]}))
    assert len(load(str(tmp_path / "one.json"), tok, dev_share=0.5)["dev"]) == 2
    (tmp_path / "up").mkdir()
    (tmp_path / "up/Train.CSV").write_text("text,label\na,x\nb,y\n")
    assert load(str(tmp_path / "up"), tok).labels == load(str(tmp_path / "up/Train.CSV"), tok).labels == ["x", "y"]
    (tmp_path / "lines.txt").write_text('\n{"text": "a", "label": "x"}\n')
    (tmp_path / "braces.txt").write_text("{{Infobox}}\nsome text\n")
    assert load(str(tmp_path / "lines.txt"), tok).kind == "cls" and len(load(str(tmp_path / "braces.txt"), tok).corpus) == 2
    (tmp_path / "q").mkdir()
    (tmp_path / "train-v1.1.json").rename(tmp_path / "q/train.json")
    write_jsonl(tmp_path / "q/corpus.jsonl", [{"text": "a", "doc": 0}])
    assert not load(str(tmp_path / "q"), tok).joined
    write_jsonl(tmp_path / "hf.json", [{"text": "a"}, {"text": "b"}])
    with pytest.raises(UserError, match=r"Extra data \(line 2, column 1\); one object a line\? Then call the file \.jsonl"):
        load(str(tmp_path / "hf.json"), tok)


def test_a_tokenizer_with_a_length_of_its_own(tmp_path):
    tok = fast_tokenizer("wordpiece")
    (tmp_path / "c.txt").write_text("\n".join(TEXTS))
    theirs = tok(TEXTS, add_special_tokens=False)["input_ids"]
    tok.backend_tokenizer.enable_truncation(4)
    tok.backend_tokenizer.enable_padding(length=9)
    assert load(str(tmp_path / "c.txt"), tok).corpus.ids.tolist() == [i for ids in theirs for i in ids]


def test_a_named_set_has_no_dev_unless_asked(tmp_path, tok):
    articles = squad(TEXTS[:1], ["mat"])["data"] + squad(TEXTS[1:2], ["big ones"])["data"]
    (tmp_path / "train.json").write_text(json.dumps({"data": articles}))
    with pytest.raises(UserError, match="no dev split; --dev_share"):
        load("squad", tok, str(tmp_path)).scored("dev")
    assert len(load("squad", tok, str(tmp_path), 0.5).scored("dev")) == 1


def test_answers_survive_every_tokenizer(tmp_path):
    for kind in ("wordpiece", "bpe", "unigram"):
        tok = fast_tokenizer(kind)
        (tmp_path / kind).mkdir()
        answers = ["mat, and", "big ones", "electroencephalographic", "Short"]
        (tmp_path / kind / "train.json").write_text(json.dumps(squad(TEXTS, answers)))
        split = load(str(tmp_path / kind), tok)["train"]
        for j, answer in enumerate(answers):
            first, last = split.start[split.q_row[j]] + split.answer[j]
            assert split.raw(j)[split.begin[first]:split.end[last]].strip() == answer


def test_emrqa_notes(tmp_path, tok):
    """A synthetic file of the shape of n2c2's data.json: kept are questions with one piece of evidence; notes never straddle splits."""
    lines = ["Patient {} took pain killers \n", "aspirin  daily\n", "for pain.\n"]
    notes = [{"note_id": str(i), "context": [lines[0].format(i), *lines[1:]], "qas": [
        {"id": [["x"]], "question": ["what drug?", "which medication?"], "answers": [{"evidence": "aspirin daily for pain", "text": "aspirin"}]},
        {"id": [["x"]], "question": ["what for?"], "answers": [{"evidence": "pain", "evidence_start": 3, "text": "pain"}]},
        {"id": [["x"]], "question": ["is it yes?"], "answers": [{"evidence": "yes"}]},
        {"id": [["x"]], "question": ["any pain?"], "answers": [{"evidence": "for pain.", "evidence_start": 3, "text": ("yes", "")[i % 2]}]},
        {"id": [["x"]], "question": ["two?"], "answers": [{"evidence": "aspirin"}, {"evidence": "pain"}]},
        {"id": [["x"]], "question": ["not there?"], "answers": [{"evidence": "morphine"}]},
        {"id": [["x"]], "question": ["only a piece of a word?"], "answers": [{"evidence": "spirin"}]},
        {"id": [["x"]], "question": ["smoker?"], "answers": [{"evidence": "", "text": "Patient"}]}]} for i in range(10)]
    other = [{**n, "context": "".join(n["context"])} for n in notes]           # the same notes again in another part, as one string
    (tmp_path / "data.json").write_text(json.dumps({"data": [{"title": "medication", "paragraphs": notes}, {"title": "risk", "paragraphs": other}]}))
    data = load("emrqa", tok, str(tmp_path))
    assert (len(data["train"]), len(data["test"])) == (16, 4)
    assert not set(texts_of(data["train"])) & set(texts_of(data["test"]))
    split = data["test"]
    assert [x["question"] for x in split.questions] == ["what drug?", "which medication?", "what for?"] * 4
    assert all(re.sub(r"\s+", " ", s) in ("aspirin daily for pain", "pain") for x in split.questions for s in x["scored"])
    text, (first, _) = split.raw(0), split.start[0] + split.answer[2]
    assert text[:split.begin[first]].count("\n") == 2                           # the "pain" of the third line, not of the first
    both = load("emrqa", tok, str(tmp_path), dev_share=0.1)                     # the second cut is of what the first has left
    parts = [set(texts_of(both[s])) for s in ("train", "dev", "test")]
    assert [len(both[s]) for s in ("train", "dev", "test")] == [14, 2, 4] and sum(map(len, parts)) == len(set.union(*parts)) == 10


def test_evidence_by_its_place_among_the_characters(tmp_path, tok):
    """As the part on risk has it: of a line that stands twice, the first."""
    lines = ["Record one", "chest pain", "no fever", "Record two", "chest pain"]
    qas = [{"question": "what?", "answers": [{"evidence": "chest pain", "evidence_start": 11, "text": "pain"}]}]
    (tmp_path / "data.json").write_text(json.dumps({"data": [{"title": "risk", "paragraphs": [
        {"note_id": str(i), "context": "\n".join([f"Note {i}", *lines][1:]), "qas": qas} for i in range(2)]}]}))
    split = load("emrqa", tok, str(tmp_path))["train"]
    assert split.raw(0)[:split.begin[split.start[0] + split.answer[0][0]]].count("\n") == 1


def test_original_imdb_as_archive_and_as_folder(tmp_path, tok):
    root = tmp_path / "raw/aclImdb"
    for split in ("train", "test"):
        for label in ("pos", "neg", "unsup"):
            (root / split / label).mkdir(parents=True)
            for i in range(10):
                (root / split / label / f"{i}_7.txt").write_text(f"{split} {label} {i}")
    folder = load("imdb", tok, str(tmp_path / "raw"))
    with tarfile.open(tmp_path / "raw/aclImdb_v1.tar.gz", "w:gz") as tar:
        tar.add(root, "aclImdb")
    archive = load("imdb", tok, str(tmp_path / "raw"))
    (tmp_path / "bad").mkdir()
    damaged = bytearray((tmp_path / "raw/aclImdb_v1.tar.gz").read_bytes())
    damaged[len(damaged) // 2] ^= 255
    (tmp_path / "bad/aclImdb_v1.tar.gz").write_bytes(damaged)
    with pytest.raises(UserError, match=r"aclImdb_v1\.tar\.gz: cannot be read"):
        load("imdb", tok, str(tmp_path / "bad"))
    (root / "imdbEr.txt").write_text("0.1\n0.2\n")
    assert len(load("imdb", tok, str(root))["test"]) == len(archive["test"])
    with pytest.raises(UserError, match="no file named train"):
        load(str(root), tok)
    for data in (folder, archive):
        assert [len(data[s]) for s in ("train", "dev", "test")] == [16, 4, 20] and data.labels == ["neg", "pos"]
    assert sorted(texts_of(folder["test"])) == sorted(texts_of(archive["test"]))


@needs_shared
def test_the_counts_of_imdb():
    """All 50,000 reviews through the real preparation, by a tokenizer that makes one token of each text."""
    from tokenizers import Tokenizer, models, processors
    from transformers import PreTrainedTokenizerFast
    one = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1, "[MASK]": 2}, unk_token="[UNK]"))
    one.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    data = load("imdb", PreTrainedTokenizerFast(tokenizer_object=one, unk_token="[UNK]", pad_token="[PAD]", mask_token="[MASK]"),
                str(SHARED / "data/imdb"))
    assert [len(data[s]) for s in ("train", "dev", "test")] == [20_000, 5_000, 25_000] and data.labels == ["neg", "pos"]
    assert not set(data["train"].doc) & set(data["dev"].doc)


@needs_shared
def test_the_counts_of_chemprot_and_policyqa():
    tok = data_prep.load_tokenizer(str(SHARED / "lm/minilm"))
    data = load("chemprot", tok, str(SHARED / "data/chemprot"))
    assert [len(data[s]) for s in ("train", "dev", "test")] == [4169, 2427, 3469] and len(data.labels) == 13
    data = load(str(SHARED / "data/policyqa"), tok)
    assert len(data["train"].q_row) + len(data["dev"].q_row) == 4152 and len(data["test"].q_row) == 3809
    sample = load("newsqa", tok, str(SHARED / "data/newsqa_sample"))
    assert sample.kind == "qa" and len(sample["train"].q_row) > 0


# ---------------------------------------------------------------- splits

def test_a_cut_keeps_documents_together_and_counts_exactly(tmp_path, tok):
    rows = [{"text": f"sentence {i // 3} " + ["<< a >> [[ b ]]", "a [[ << b >> ]]", "<< a >> b"][i % 3], "label": "xy"[i % 2]} for i in range(90)]
    write_jsonl(tmp_path / "d/train.jsonl", rows)
    data = load(str(tmp_path / "d"), tok, dev_share=0.2)
    assert (len(data["train"]), len(data["dev"])) == (72, 18)
    plain = [{re.sub(r"<<|>>|\[\[|\]\]|\s", "", t) for t in texts_of(data[s])} for s in ("train", "dev")]
    assert not plain[0] & plain[1]


def test_a_cache_is_keyed_by_file_tokenizer_and_cut(tmp_path, tok):
    file = write_jsonl(tmp_path / "d.jsonl", [{"text": f"text {i}", "label": "a"} for i in range(20)])
    one = load(str(file), tok)
    again = load(str(file), tok)
    cut = load(str(file), tok, dev_share=0.5)
    other = load(str(file), fast_tokenizer("bpe"))
    before = file.stat()
    write_jsonl(file, [{"text": f"text {i}", "label": "b"} for i in range(20)])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))            # of the same size and age, as rsync or tar may leave it
    changed = load(str(file), tok)
    assert file.stat().st_size == before.st_size and changed.labels == ["b"]
    assert one.checksum == again.checksum and len({d.checksum for d in (one, cut, other, changed)}) == 4


# ---------------------------------------------------------------- views

@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_blocks_keep_every_token_once(kind, tmp_path):
    tok = fast_tokenizer(kind)
    texts = [*TEXTS, " ".join(TEXTS * 4)]
    (tmp_path / "c.txt").write_text("\n".join(texts))
    corpus = load(str(tmp_path / "c.txt"), tok).corpus
    pieces = blocks(corpus, Specials.of(tok), 16)
    batch = gather(pieces, np.arange(len(pieces)))
    for i, text in enumerate(texts):
        got = np.concatenate([batch.ids[b][batch.inside[b]] for b in np.flatnonzero(pieces.row == i)])
        assert got.tolist() == tok(text, add_special_tokens=False)["input_ids"]
    assert pieces.length.max() <= 16 and (pieces.length == batch.real.sum(1)).all()
    whole = gather(blocks(corpus, Specials.of(tok), 4096), np.arange(len(texts)))
    theirs = tok(texts, padding=True, return_tensors="np")
    assert (whole.ids == theirs["input_ids"]).all() and (whole.real == theirs["attention_mask"]).all()


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_windows_are_those_of_hugging_face(kind, tmp_path):
    tok, context = fast_tokenizer(kind), " ".join(TEXTS * 3)
    (tmp_path / "d").mkdir()
    (tmp_path / "d/train.json").write_text(json.dumps(squad([context, TEXTS[0]], ["many pieces", "mat"])))
    split = load(str(tmp_path / "d"), tok)["train"]
    pieces = windows(split, Specials.of(tok), 48, 8, 64)
    batch = gather(pieces, np.arange(len(pieces)))
    theirs = tok(["What is number 0?", "What is number 1?"], [context, TEXTS[0]], truncation="only_second", max_length=48, stride=8,
                 return_overflowing_tokens=True, padding=True, return_tensors="np", return_token_type_ids=True)
    assert (batch.ids == theirs["input_ids"]).all()
    assert (batch.real == theirs["attention_mask"]).all()
    assert (pieces.question == theirs["overflow_to_sample_mapping"]).all()
    assert (batch.types is not None) == (kind == "wordpiece")
    if batch.types is not None:
        assert (batch.types == theirs["token_type_ids"]).all()


def test_a_tokenizer_that_puts_nothing_around_its_texts(tmp_path):
    tok = fast_tokenizer("wordpiece")
    tok.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    (tmp_path / "c.txt").write_text("\n".join(TEXTS))
    pieces = blocks(load(str(tmp_path / "c.txt"), tok).corpus, Specials.of(tok), 24)
    assert [pieces.specials.prefix, pieces.specials.middle, pieces.specials.suffix] == [[], [], []]
    assert (gather(pieces, np.arange(1)).ids == tok(TEXTS[0], return_tensors="np")["input_ids"]).all()


def test_entities_in_texts_that_spacy_gets_in_pieces(tmp_path):
    nlp = spacy.blank("en")
    nlp.add_pipe("entity_ruler").add_patterns([{"label": "X", "pattern": "Berlin"}])
    nlp.to_disk(tmp_path / "rules")
    spacy.blank("en").to_disk(tmp_path / "blank")
    texts = ["Berlin", "In Berlin " + "the cat sat on " * 4000 + "the mat of Berlin, and purred."]     # the second has 60,000 characters
    (tmp_path / "corpus.txt").write_text("\n".join(texts))
    corpus = load(str(tmp_path / "corpus.txt"), fast_tokenizer("wordpiece")).corpus
    corpus.spacy_model = str(tmp_path / "rules")
    for row, text in enumerate(texts):
        for number, place in enumerate(m.start() for m in re.finditer("Berlin", text)):
            hit = corpus.start[row] + np.flatnonzero(corpus.ent[corpus.start[row]:corpus.start[row + 1]] == number)
            assert (corpus.begin[hit].min(), corpus.end[hit].max()) == (place, place + 6)
    pieces = blocks(corpus, Specials.of(fast_tokenizer("wordpiece")), 16)               # on a batch: what stands there, in any block
    batch = gather(pieces, np.arange(len(pieces)))
    for b, (row, lo) in enumerate(zip(pieces.row, pieces.lo, strict=True)):
        at = batch.at[b][batch.ent[b] >= 0]
        assert all(corpus.raw(row)[corpus.begin[t]:corpus.end[t]] in "Berlin" for t in at) and (at >= lo).all()
    assert (batch.ent >= 0).sum() == (corpus.ent >= 0).sum() > 0
    corpus = load(str(tmp_path / "corpus.txt"), fast_tokenizer("wordpiece")).corpus
    corpus.spacy_model = str(tmp_path / "blank")
    with pytest.raises(UserError, match="finds no named entities"):
        _ = corpus.ent


def test_heads_are_hugging_faces_truncation(tmp_path, tok):
    file = write_jsonl(tmp_path / "d.jsonl", [{"text": t, "label": "a"} for t in [*TEXTS, " ".join(TEXTS * 9), "word " * 100_000]])
    split = load(str(file), tok, dev_share=0.01)
    rows = [split[s] for s in ("train", "dev")]
    for part in rows:
        pieces = heads(part, Specials.of(tok), 24)
        batch = gather(pieces, np.arange(len(pieces)))
        assert (batch.ids == tok(texts_of(part), truncation=True, max_length=24, padding=True, return_tensors="np")["input_ids"]).all()


def test_a_text_of_nothing_but_what_the_tokenizer_drops(tmp_path, tok):
    file = write_jsonl(tmp_path / "d.jsonl", [{"text": t, "label": "a"} for t in ["\u200b\u0001", "a word", "another", "b", "c", "d"]])
    data = load(str(file), tok, dev_share=0.2)
    pieces = blocks(data["train"], Specials.of(tok), 24)
    assert len(pieces) == np.sum(np.diff(data["train"].start) > 0)


def test_what_a_run_keeps_in_memory_of_a_corpus(tmp_path, tok):
    """At most 24 bytes a block, order included (2.4 GB for 10^8); to number the texts of a corpus takes nothing."""
    n = 100_000
    for name, values in (("start", np.arange(n + 1) * 9), ("doc", np.arange(n)), ("ids", np.zeros(9 * n))):
        values.astype(data_prep.DTYPE[name]).tofile(tmp_path / f"{name}.bin")
    tracemalloc.start()
    pieces = blocks(data_prep.Split(tmp_path), Specials.of(tok), 8)
    plan = loop.batches(pieces.length, 16, 1, seed=0)
    next(plan)
    assert len(pieces) == 2 * n and tracemalloc.get_traced_memory()[0] < 24 * len(pieces)
    tracemalloc.reset_peak()
    kept = tracemalloc.get_traced_memory()[0]
    assert [r["doc"] for r in data_prep.with_docs({"text": "a"} for _ in range(3))] == [0, 1, 2]
    collections.deque(data_prep.with_docs({"text": "a"} for _ in range(n)), maxlen=0)
    assert tracemalloc.get_traced_memory()[1] < kept + 100_000
    tracemalloc.stop()


def test_special_tokens_written_in_a_text_are_never_masked(tmp_path, tok):
    (tmp_path / "c.txt").write_text("a [MASK] b [SEP] c")
    corpus = load(str(tmp_path / "c.txt"), tok).corpus
    batch = gather(blocks(corpus, Specials.of(tok), 24), np.array([0]))
    assert batch.ok.sum() == 3 and not np.isin(batch.ids[batch.ok], tok.all_special_ids).any()


def test_punctuation(tmp_path, tok):
    (tmp_path / "c.txt").write_text(TEXTS[1])
    corpus = load(str(tmp_path / "c.txt"), tok).corpus
    assert "".join(corpus.raw(0)[b:e] for b, e, p in zip(corpus.begin, corpus.end, corpus.punct, strict=True) if p) == "();'!"
    (tmp_path / "bpe.txt").write_text("é 日本 a, 5")                              # bytes of a letter are no punctuation
    corpus = load(str(tmp_path / "bpe.txt"), fast_tokenizer("bpe")).corpus
    assert {corpus.raw(0)[b:e].strip() for b, e, p in zip(corpus.begin, corpus.end, corpus.punct, strict=True) if p} == {","}


# ---------------------------------------------------------------- downloads

@pytest.fixture
def server(tmp_path):
    (tmp_path / "www").mkdir()
    (tmp_path / "www/f.bin").write_bytes(b"x" * 100_000)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            if self.path == "/short":                                  # promises more than it sends
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b"x" * 10)
            else:
                super().do_GET()

    http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=tmp_path / "www"))
    threading.Thread(target=http_server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http_server.server_port}/"
    http_server.shutdown()


def test_download(server, tmp_path):
    import hashlib
    sha = hashlib.sha256(b"x" * 100_000).hexdigest()
    path = data_prep.download(server + "f.bin", tmp_path / "d/f.bin", sha)
    assert path.read_bytes() == b"x" * 100_000
    for url, said in (("f.bin", "sha256 is"), ("short", "bytes came|cannot be downloaded"), ("none", "cannot be downloaded")):
        with pytest.raises(UserError, match=said):
            data_prep.download(server + url, tmp_path / "d/g.bin", "0" * 64)
    with pytest.raises(UserError, match="--raw=FOLDER"):
        data_prep.download("http://127.0.0.1:9/x", tmp_path / "d/g.bin")
    assert [f.name for f in (tmp_path / "d").iterdir()] == ["f.bin"]


def test_named_sets_download_what_they_read(server, tmp_path, tok, monkeypatch):
    """squad and chemprot through the real code, with a local server in the place of the official ones."""
    rows = [{"text": f"text {i}", "label": "a"} for i in range(5)]
    for split in ("train", "dev", "test"):
        write_jsonl(tmp_path / f"www/chemprot/{split}.jsonl", rows)
    monkeypatch.setattr(data_prep, "DONT_STOP", server)
    monkeypatch.setattr(data_prep, "CACHE", tmp_path / "cache")
    assert [len(load("chemprot", tok)[s]) for s in ("train", "dev", "test")] == [5, 5, 5]
    (tmp_path / "www/train").mkdir()
    (tmp_path / "www/train/SQuAD.jsonl.gz").write_bytes(b"not the official file")
    monkeypatch.setattr(data_prep, "MRQA", server)
    with pytest.raises(UserError, match="sha256"):
        load("squad", tok)


# ---------------------------------------------------------------- bad input: one sentence

def jsonl(*rows):
    return "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows)


GOOD = {"text": "a text", "label": "a"}
QA = squad([TEXTS[0]], ["mat"])


def changed(path, value):
    data = json.loads(json.dumps(QA))
    at = data
    for step in path[:-1]:
        at = at[step]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(data)


QAS = ["data", 0, "paragraphs", 0, "qas", 0]


@pytest.mark.parametrize(("name", "content", "said"), [
    ("empty.jsonl", "", "the file is empty"),
    ("blank.txt", "\n\n", "the file is empty"),
    ("binary.txt", b"\x89PNG\xff\xfe", "cannot be read"),
    ("zeros.txt", b"\0\0\0\n", "not a text file"),
    ("cut.jsonl.gz", gzip.compress(jsonl(*[GOOD] * 500).encode())[:60], "cannot be read"),
    ("broken.jsonl", jsonl(GOOD, '{"text": "a', GOOD), "broken.jsonl:2: not valid JSON"),
    ("array.jsonl", json.dumps([GOOD]), "array.jsonl:1: the field 'text' is missing"),
    ("missing.jsonl", jsonl(GOOD, {"label": "a"}), "missing.jsonl:2: the field 'text' is missing"),
    ("type.jsonl", jsonl(GOOD, {"text": 3, "label": "a"}), "type.jsonl:2: the field 'text' is int"),
    ("list.jsonl", jsonl(GOOD, "[1]"), "list.jsonl:2: the field 'text' is missing"),
    ("label.jsonl", jsonl(GOOD, {"text": "a", "label": None}), "the field 'label' is NoneType"),
    ("text.jsonl", jsonl(GOOD, {"text": " ", "label": "a"}), "text.jsonl:2: the field 'text' is empty"),
    ("column.csv", "text,labels\na,b\n", "column.csv:2: the field 'label' is missing"),
    ("quoted.tsv", 'text\tlabel\n"a fine film\tx\nb\ty\nshe said no to\tx\nhe said"\tx\n', "quoted.tsv:5: a quoted field runs over several lines"),
    ("comma.csv", "label,text\npos,A fine, good film\n", "comma.csv:2: more cells than columns"),
    ("quote.csv", 'text,label\n"a,b\n', "unexpected end of data"),
    ("cut.json", json.dumps(QA)[:80], "not valid JSON"),
    ("other.json", '{"rows": []}', "the field 'data' is missing"),
    ("context.json", changed(["data", 0, "paragraphs", 0, "context"], None), "the field 'context' is missing"),
    ("offset.json", changed([*QAS, "answers", 0, "answer_start"], 5), "does not stand at offset 5"),
    ("far.json", changed([*QAS, "answers", 0, "answer_start"], 5000), "does not stand at offset 5000"),
    ("mixed.jsonl", jsonl(*[GOOD] * 3, {"text": "a"}), "mixed.jsonl, train, row 4: the field 'label' is missing"),
    ("header.jsonl", jsonl({"header": {}}), "there is no text in it"),
    ("span.jsonl", jsonl({"context": "a b", "qas": [{"qid": "1", "question": "q", "answers": ["b"], "detected_answers": [{"char_spans": [[7]]}]}]}),
     "span.jsonl:1: the answer span [7]"),
    ("none.json", changed([*QAS, "answers"], []), "has no answer"),
    ("id.json", changed([*QAS, "id"], None), "the field 'id' is missing"),
    ("blank.json", changed([*QAS, "question"], ""), "the field 'question' is empty"),
    ("cells.csv", "text,labels\na, b,c", "the field 'label' is missing; found: text, labels, None"),
    ("half.jsonl", '{"text": "a"\n', "half.jsonl:1: not valid JSON: Expecting ',' delimiter (column 13)"),
    ("two.jsonl", '{"text": "a"} {"text": "b"}\n', "two.jsonl:1: not valid JSON: Extra data (column 15)"),
    ("some.jsonl", '{"text": "one", "label": "x", "doc": 1}\n{"text": "two", "label": "x"}', ":2: the field 'doc' must be in all records or in none"),
    ("words.jsonl", '{"context": "a b", "qas": [{"qid": "1", "question": "q", "answers": [], "detected_answers": [{"char_spans": [["0", "1"]]}]}]}',
     "the answer span ['0', '1'] of question '1' is not inside its context"),
    ("note.json", '{"data": [{"title": "t", "paragraphs": [{"note_id": "1", "context": "a", "qas": [{"question": ["q"], "answers": ["a"]}]}]}]}',
     "note.json: t: question 0 has an answer that is no object"),
])
def test_a_bad_file_is_one_sentence(name, content, said, tmp_path, tok):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=re.escape(said)):
        load(str(tmp_path / name), tok)
    assert not [f for f in (data_prep.CACHE / "prepared").glob(f"*{name.split('.')[0]}*") if f.name.startswith(".")]


def test_odd_but_good_input(tmp_path, tok):
    """A corpus only; a table of texts; articles of two SQuAD files, which have nothing to do with each other, and a file dev of a named set
    whose dev is for scoring; a label that only the cut part has; a lone surrogate; the same answer written with other punctuation in MRQA."""
    (tmp_path / "c").mkdir()
    (tmp_path / "c/corpus.txt").write_text("a line\n")
    assert len(load(str(tmp_path / "c"), tok).corpus) == 1
    with pytest.raises(UserError, match="c has no train split to cut from"):
        load(str(tmp_path / "c"), tok, dev_share=0.2)
    (tmp_path / "t.csv").write_text("text\n\"a, b\"\nc\n")
    table = load(str(tmp_path / "t.csv"), tok)
    assert table.kind == "text" and len(table["train"]) + len(table["dev"]) == 2
    (tmp_path / "q").mkdir()
    for split in ("train", "corpus", "dev"):
        (tmp_path / f"q/{split}.json").write_text(json.dumps(QA))
    squad = load("squad", tok, str(tmp_path / "q"))
    assert not squad.joined and set(squad.splits) == {"train", "corpus", "test"}
    for i in range(12):
        write_jsonl(tmp_path / f"r{i}.jsonl", [{"text": f"text {j}", "label": "rare" if j == i else "a"} for j in range(12)])
        assert load(str(tmp_path / f"r{i}.jsonl"), tok).labels == ["a", "rare"]
    (tmp_path / "s.jsonl").write_text('{"text": "a \\ud800 b", "label": "x"}\n' * 3)
    assert texts_of(load(str(tmp_path / "s.jsonl"), tok)["train"])[0] == "a ? b"
    write_jsonl(tmp_path / "m.jsonl", [{"context": "in the U. S. A. today", "qas": [{"qid": "1", "question": "where?", "answers": ["U.S.A."],
                                        "detected_answers": [{"text": "U.S.A.", "char_spans": [[7, 14]]}]}]}])
    assert load(str(tmp_path / "m.jsonl"), tok)["train"].questions[0]["scored"] == ["U.S.A."]
    write_jsonl(tmp_path / "two/train.jsonl", [GOOD])
    write_jsonl(tmp_path / "two/train.txt", [GOOD])
    with pytest.raises(UserError, match="could be train"):
        load(str(tmp_path / "two"), tok)


def test_other_bad_input(tmp_path, tok):
    write_jsonl(tmp_path / "d/train.jsonl", [GOOD] * 3)
    write_jsonl(tmp_path / "d/test.jsonl", [GOOD, {"text": "b", "label": "z"}])
    for name, raw, share, said in ((str(tmp_path / "d"), None, None, "the label 'z' is not among those of train"),
                                   ("chemprott", None, None, "did you mean 'chemprot'"),
                                   ("chemprot", str(tmp_path / "none"), None, "no such folder"),
                                   ("emrqa", None, None, "data-use agreement"),
                                   (str(tmp_path), None, None, "no file named train")):
        with pytest.raises(UserError, match=re.escape(said)):
            load(name, tok, raw, share)


def test_an_answer_that_no_window_holds_is_trained_as_absent(tmp_path, tok):
    import finetune_qa
    (tmp_path / "d").mkdir()
    (tmp_path / "d/train.json").write_text(json.dumps(squad([" ".join(TEXTS)], [" ".join(TEXTS)[:150]])))
    split = load(str(tmp_path / "d"), tok)["train"]
    pieces = windows(split, Specials.of(tok), 48, 8, 64)
    batch = gather(pieces, np.arange(len(pieces)))
    assert (finetune_qa.targets(batch, pieces) == 0).all()
    with pytest.raises(UserError, match="leaves no room"):
        windows(split, Specials.of(tok), 16, 8, 64)


def test_documents_by_number(tmp_path, capsys, monkeypatch):
    """A `doc` in the records says which texts belong together, and joins a corpus to train; without it each text is its own."""
    write_jsonl(tmp_path / "a/train.jsonl", [{"text": f"alpha {i}", "label": "xy"[i % 2], "doc": 7 + i // 4} for i in range(16)])
    write_jsonl(tmp_path / "a/corpus.jsonl", [{"text": f"beta {i}", "doc": 7} for i in range(3)])
    write_jsonl(tmp_path / "b/train.jsonl", [{"text": f"alpha {i}", "label": "xy"[i % 2], "doc": 7} for i in range(16)])
    write_jsonl(tmp_path / "b/corpus.jsonl", [{"text": f"beta {i}"} for i in range(3)])
    a, b = (data_prep.load(str(tmp_path / name), fast_tokenizer("wordpiece"), dev_share=0.1) for name in "ab")
    assert a.joined and len(a["dev"]) == 4 and len(set(a["dev"].doc)) == 1 and set(a["train"].doc) | set(a["dev"].doc) == {7, 8, 9, 10}
    counts = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert counts[0][1:4:2] == ["12 rows", "3 documents"] and counts[2][1:4:2] == ["3 rows", "1 documents"]
    assert a.corpus.doc.tolist() == [7, 7, 7] and not b.joined and b.corpus.doc.tolist() == [0, 1, 2]
    rows = {"train": [{"text": f"alpha {i}", "label": "xy"[i % 2]} for i in range(16)], "corpus": [{"text": "beta"}]}
    monkeypatch.setitem(data_prep.DATASETS, "in_memory", data_prep.embedded(lambda: rows))
    assert not data_prep.load("in_memory", fast_tokenizer("wordpiece")).joined and set(rows["corpus"][0]) == {"text"}
    write_jsonl(tmp_path / "c/train.jsonl", [{"text": "alpha", "label": "x", "doc": -1}])
    with pytest.raises(UserError, match=r"train.jsonl:1: the field 'doc' is -1"):
        data_prep.load(str(tmp_path / "c"), fast_tokenizer("wordpiece"))
