"""The page of masks and the picture of parts of speech: what they show is what maskers choose, and a text stays a text."""
import base64
import json
import re
import shutil
import subprocess
import urllib.parse
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import spacy
import torch
from conftest import fast_tokenizer, random_lm, run, write_jsonl

import data_prep
import maskers
import pretrain
import show_masks
from loop import UserError, cli

HOSTILE = ["</script><img src=x onerror=alert(1)> on the <b>mat</b> & \"dogs\" don't",
           "<!--<script>alert(1)</script> \u2028 😀 big\r\n\t cats\u202e  ]]>"]


@pytest.fixture
def policy(tmp_path):
    """A policy for hidden states of size 32, with its last layer scaled up, so that its probabilities are far from equal."""
    torch.manual_seed(0)
    net = maskers.NMG(32, lm="a test")
    with torch.no_grad():
        net.score[2].weight *= 30
    (tmp_path / "policy").mkdir()
    net.save(tmp_path / "policy")
    return tmp_path / "policy"


@pytest.fixture
def pipeline(tmp_path):
    """A spaCy pipeline with parts of speech and entities by rule: no model is needed."""
    nlp = spacy.blank("en")
    nlp.add_pipe("entity_ruler").add_patterns([{"label": "ANIMAL", "pattern": "cat"}])
    ruler = nlp.add_pipe("attribute_ruler")
    ruler.add([[{}]], {"POS": "X"})
    ruler.add([[{"IS_ALPHA": True}]], {"POS": "NOUN"})
    ruler.add([[{"IS_PUNCT": True}]], {"POS": "PUNCT"})
    ruler.add([[{"LIKE_NUM": True}]], {"POS": "NUM"})
    for pos, words in {"DET": "the a", "ADP": "on in into", "VERB": "sat bark break purr purred", "ADJ": "big much longer", "PRON": "they"}.items():
        ruler.add([[{"LOWER": {"IN": words.split()}}]], {"POS": pos})
    nlp.to_disk(tmp_path / "rules")
    return tmp_path / "rules"


class Elements(HTMLParser):
    """Every element of a page with its attributes, and what stands in the data element."""

    def __init__(self, page: str):
        super().__init__()
        self.found, self.data = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, attrs))

    def handle_data(self, data):
        if self.found and ("id", "data") in self.found[-1][1]:
            self.data += data


def shown(out: Path) -> dict:
    return json.loads(Elements((out / "masks.html").read_text("utf-8")).data)


def number(context: dict) -> int:
    return int(re.match(r"text ([\d,]+)", context["name"])[1].replace(",", ""))


def blocks_of(lm: Path, split: data_prep.Split) -> data_prep.Rows:
    return data_prep.blocks(split, data_prep.Specials.of(data_prep.load_tokenizer(str(lm))), 66)


def test_masks_are_those_of_pretraining_and_probabilities_are_the_policys(qa_folder, lm_folder, policy, tmp_path):
    learned = f"nmg:{policy}"
    show_masks.main(str(qa_folder), str(lm_folder), f"punct,{learned}", p=0.2, contexts=7, seed=3, out=str(tmp_path / "out"))
    data, split = shown(tmp_path / "out"), data_prep.load(str(qa_folder), data_prep.load_tokenizer(str(lm_folder))).corpus
    assert data["maskers"] == ["punct", learned, "random", "whole", "span"] and len(data["contexts"]) == 7
    pieces, lm = blocks_of(lm_folder, split), pretrain.hidden_states(pretrain.load_lm(str(lm_folder)))
    several = 0
    for c in data["contexts"]:
        i = number(c)
        assert "".join(piece for piece, *_ in c["pieces"]) == split.raw(i)
        rows = np.flatnonzero(pieces.row == i)
        several += len(rows) > 1
        assert c["blocks"] == len(rows) and c["maskable"] == split.start[i + 1] - split.start[i]
        for name in data["maskers"]:
            expected = []
            for row in rows:                                            # one by one, and only then numbered within the text
                batch, mask, _ = pretrain.masked_rows(pieces, maskers.find(name), 0.2, 3, 0, np.array([row]), lm)
                expected += (batch.at[mask] - split.start[i]).tolist()
            assert c["masked"][name] == expected and expected
        assert list(c["p"]) == [learned] and len(c["p"][learned]) == c["maskable"]
        for row in rows:
            p = np.array(c["p"][learned][pieces.lo[row] - split.start[i]:pieces.hi[row] - split.start[i]])
            hit = np.isin(np.arange(pieces.lo[row], pieces.hi[row]) - split.start[i], c["masked"][learned])
            assert p.sum() == pytest.approx(1, abs=1e-4) and p.max() > 2 / len(p) and p[hit].min() >= p[~hit].max()
    assert several


def test_probabilities_are_zero_where_nothing_may_be_masked(lm_folder, policy, tmp_path):
    """[SEP] written in a text is a special token: one text has nothing else, another has it among words."""
    write_jsonl(tmp_path / "data" / "corpus.jsonl", [{"text": "[SEP]"}, {"text": "the cat [SEP] sat on"}])
    show_masks.main(str(tmp_path / "data"), str(lm_folder), f"nmg:{policy}", out=str(tmp_path / "out"))
    p = [c["p"][f"nmg:{policy}"] for c in shown(tmp_path / "out")["contexts"]]
    assert p[0] == [0] and p[1][2] == 0 and sum(p[1]) == pytest.approx(1, abs=1e-4) and all(p[1][j] for j in (0, 1, 3, 4))


def test_tokens_and_answers_are_marked_to_the_character(lm_folder, tmp_path):
    """Two answers overlap, one is a part of a token, one has an equal twin elsewhere in the text."""
    text = "Dogs bark;  the cat sat on the mat.\nThe cat sat on the mat, and purred"
    answers = [("Dog", 0), ("cat sat", text.rindex("cat sat")), ("sat on", text.rindex("sat on")), ("purred", text.index("purred"))]
    asked = [{"id": str(i), "question": f"<{i}>?", "answers": [{"text": a, "answer_start": at}]} for i, (a, at) in enumerate(answers)]
    (tmp_path / "train.json").write_text(json.dumps({"data": [{"title": "t", "paragraphs": [{"context": text, "qas": asked}]}] * 2}))
    show_masks.main(str(tmp_path / "train.json"), str(lm_folder), contexts=1, out=str(tmp_path / "out"))
    [c] = shown(tmp_path / "out")["contexts"]
    marked = "".join(("^" if answer else " ") * len(piece) for piece, _, _, answer in c["pieces"])
    assert marked == "^^^" + " " * (text.rindex("cat sat") - 3) + "^" * len("cat sat on") + " " * len(" the mat, and ") + "^" * len("purred")
    assert c["questions"] == [[f"<{i}>?", a] for i, (a, _) in enumerate(answers)]
    tokens = {}
    for piece, first, stop, _ in c["pieces"]:
        assert stop - first == bool(piece.strip())                      # what stands between tokens belongs to none
        for t in range(first, stop):
            tokens[t] = tokens.get(t, "") + piece
    assert [tokens[t].lower() for t in range(len(tokens))] == re.findall(r"\w+|[^\w\s]", text.lower())


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_a_hostile_text_stays_a_text(kind, tmp_path):
    """As a context, which goes into the page in pieces, and as a question and an answer, which go into it whole."""
    tok, pages = fast_tokenizer(kind), []
    random_lm("bert", len(tok)).save_pretrained(tmp_path / "lm")
    tok.save_pretrained(tmp_path / "lm")
    for name, texts in (("harmless", ["the cat", "the mat"]), ("hostile", HOSTILE)):
        asked = [[{"id": str(i), "question": t, "answers": [{"text": t, "answer_start": 0}]}] for i, t in enumerate(texts)]
        data = {"data": [{"title": t, "paragraphs": [{"context": t, "qas": qas}]} for t, qas in zip(texts, asked, strict=True)]}
        (tmp_path / name).with_suffix(".json").write_text(json.dumps(data))
        show_masks.main(str((tmp_path / name).with_suffix(".json")), str(tmp_path / "lm"), split="train", out=str(tmp_path / name))
        pages.append(Elements((tmp_path / name / "masks.html").read_text("utf-8")))
    assert pages[0].found == pages[1].found and len(pages[0].found) > 30
    [c] = json.loads(pages[1].data)["contexts"]
    assert "".join(piece for piece, *_ in c["pieces"]) in HOSTILE and c["questions"][0][0] in HOSTILE


def test_nothing_comes_from_elsewhere():
    assert not re.search(r"https?:|//|@import|url\(|src=|href=", show_masks.PAGE) and show_masks.PAGE.count("DATA") == 1


@pytest.mark.skipif(not shutil.which("chromium"), reason="there is no chromium here to open the page in")
def test_keys_in_a_browser(lm_folder, policy, tmp_path):
    """Each key is pressed once, and the page says afterwards what it shows."""
    write_jsonl(tmp_path / "data" / "corpus.jsonl", [{"text": t} for t in HOSTILE])
    learned = f"nmg:{policy}"
    show_masks.main(str(tmp_path / "data"), str(lm_folder), f"random,{learned}", out=str(tmp_path))
    state = """() => ({ at: document.getElementById("where").textContent, keys: document.getElementById("keys").open,
        images: document.images.length, names: [...document.querySelectorAll("select")].map(s => s.value),
        text: [...document.querySelectorAll(".text")].map(t => t.textContent),
        masked: [...document.querySelectorAll(".text")].map(t => t.querySelectorAll(".masked").length),
        shaded: [...document.querySelectorAll(".text")].map(t => t.querySelectorAll("[style]").length) })"""
    press = """key => document.dispatchEvent(new KeyboardEvent("keydown", /^[1-9]$/.test(key.at(-1)) ? { code: "Digit" + key.at(-1), key: "x",
        shiftKey: key.length > 1 } : { key, shiftKey: key === "A" }))"""
    keys = ["", "j", "ArrowRight", "k", "4", "^5", "A", "a", "s", "?"]
    script = f"""<script>const seen = {json.dumps(keys)}.map(key => {{ ({press})(key); return ({state})() }})
        document.body.textContent = "SEEN" + btoa(encodeURIComponent(JSON.stringify(seen))) + "END"</script>"""
    (tmp_path / "keys.html").write_text((tmp_path / "masks.html").read_text("utf-8").replace("</html>", script), "utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
             "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    dom = subprocess.run(["chromium", *flags, f"file://{tmp_path}/keys.html"], capture_output=True, text=True, timeout=120).stdout
    seen = json.loads(urllib.parse.unquote(base64.b64decode(re.search("SEEN(.*)END", dom)[1]).decode()))
    assert [s["at"].split(":")[0] for s in seen[:4]] == ["1 of 2", "2 of 2", "1 of 2", "2 of 2"]
    assert [s["names"] for s in seen[3:9]] == [["random", learned], ["span", learned], ["span", "punct"], ["span", "random"],
                                               ["punct", "random"], ["random", "punct"]]
    assert [s["keys"] for s in seen[-2:]] == [False, True]
    contexts = shown(tmp_path)["contexts"]
    for s in seen:
        c = contexts[int(s["at"][0]) - 1]
        assert s["images"] == 0 and s["text"] == ["".join(piece for piece, *_ in c["pieces"])] * 2
        assert s["masked"] == [sum(not set(c["masked"][name]).isdisjoint(range(first, stop)) for _, first, stop, _ in c["pieces"])
                               for name in s["names"]]
        assert [n > 0 for n in s["shaded"]] == [name == learned for name in s["names"]]


# ---------------------------------------------------------------- parts of speech

def test_parts_of_speech_against_a_naive_count(lm_folder, policy, pipeline, tmp_path, capsys):
    texts = [f"The cat sat on the mat, and purred; they don't  purr {i}!\nDogs (big ones) bark into pieces." for i in range(9)]
    texts.append("  " + " ".join(texts))                                # several blocks, one of which ends within "don't"
    write_jsonl(tmp_path / "data" / "corpus.jsonl", [{"text": t} for t in texts])
    learned, lm = f"nmg:{policy}", str(lm_folder)
    show_masks.main(str(tmp_path / "data"), lm, f"random,{learned}", p=0.3, contexts=2, seed=1, spacy_model=str(pipeline), out=str(tmp_path / "out"))
    split, nlp = data_prep.load(str(tmp_path / "data"), data_prep.load_tokenizer(lm)).corpus, spacy.load(pipeline)
    pieces, states = blocks_of(lm_folder, split), pretrain.hidden_states(pretrain.load_lm(lm))
    assert len(pieces) > len(texts)
    count = {}
    for name in ("random", learned, "in the text"):
        count[name] = Counter()
        for row, text in enumerate(texts[i] for i in pieces.row):
            masker = maskers.find("random" if name == "in the text" else name)
            batch, mask, _ = pretrain.masked_rows(pieces, masker, 1.0 if name == "in the text" else 0.3, 1, 0, np.array([row]), states)
            spans = data_prep.load_tokenizer(lm)(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
            for token in batch.at[mask] - split.start[pieces.row[row]]:
                [word] = [w for w in nlp(text) if w.idx < spans[token][1] <= w.idx + len(w.text)]
                count[name][word.pos_] += 1
    top = [pos for pos, _ in count[learned].most_common(6)]
    printed = [line.split("  ") for line in capsys.readouterr().out.splitlines() if "NOUN" in line]
    lines = {line[0].strip(): [part.strip() for part in line[-7:]] for line in printed}
    assert list(lines) == ["random", learned, "in the text"] and count["random"] != count[learned]
    for name, c in count.items():
        c["other"] = sum(n for pos, n in c.items() if pos not in top)
        assert lines[name] == [f"{pos} {100 * c[pos] / (c.total() - c['other']):.1f}%" for pos in (*top, "other")]
    assert (tmp_path / "out" / "parts_of_speech.png").read_bytes()[:4] == b"\x89PNG"
    assert "entity" in shown(tmp_path / "out")["maskers"] and len(shown(tmp_path / "out")["contexts"]) == 2


def test_the_top_six_are_the_learned_maskers():
    counts = {"none": Counter(), "random": Counter("AAAAAAABCDEFGH"), "nmg:x": Counter("HHHHHHHGGGGGGFFFFFEEEEDDDCCB"),
              "in the text": Counter("ABCDEFGHHH")}
    kinds, percent = show_masks.shares(counts)
    assert kinds == [*"HGFEDC", "other"] and percent["in the text"] == pytest.approx([30, 10, 10, 10, 10, 10, 20])
    assert percent["none"] == [0] * 7
    del counts["nmg:x"], counts["none"]
    assert show_masks.shares(counts)[0][0] == "A"


# ---------------------------------------------------------------- the command line

@pytest.mark.parametrize(("knobs", "said"), [
    ({"dataset": "nowhere"}, "neither a known name nor a path"),
    ({"maskers": "random,rndom"}, "did you mean 'random'"),
    ({"maskers": "nmg:nowhere"}, "nowhere: no policy"),
    ({"maskers": "oracle"}, "toy world only"),
    ({"split": "test"}, "no test split. Allowed: train"),
    ({"spacy_model": "en_nothing"}, "python -m spacy download en_nothing"),
    ({"spacy_model": "blank"}, "tells no parts of speech"),
    ({"p": 2.0}, "--p=2.0: the share"),
    ({"contexts": 0}, "--contexts=0: must be positive"),
    ({"out": "train.txt"}, "--out=train.txt: is a file"),
])
def test_wrong_knobs(knobs, said, lm_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "train.txt", [{"text": "the cat sat", "label": "x"}] * 2)
    spacy.blank("en").to_disk(tmp_path / "blank")
    with pytest.raises(UserError, match=re.escape(said)):
        show_masks.main(**{"dataset": "train.txt", "lm": str(lm_folder)} | knobs)


def test_the_script_on_the_toy_world(lm_folder, tmp_path):
    result = run("show_masks.py", "--dataset=toyqa", f"--lm={lm_folder}", "--split=test", "--contexts=3", "--out=o", cwd=tmp_path)
    assert result.returncode == 0 and "page: o/masks.html" in result.stdout and "python -m spacy download" in result.stdout, result.stderr
    assert [p.name for p in (tmp_path / "o").iterdir()] == ["masks.html"]
    for c in shown(tmp_path / "o")["contexts"]:
        assert len(c["questions"]) == 3 and {q.split()[0] for q, _ in c["questions"]} == {"which"}
        assert Counter(a for _, a in c["questions"]) == Counter(piece for piece in re.findall(r"\w+", "".join(
            piece if answer else " " for piece, _, _, answer in c["pieces"])))


def test_unknown_flags_and_help(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["show_masks.py", "--contexs=3"])
    with pytest.raises(SystemExit) as exit:
        cli(show_masks.main)
    assert exit.value.code == 2 and "did you mean 'contexts'" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["show_masks.py", "--help"])
    cli(show_masks.main)
    usage = capsys.readouterr().out
    assert "python show_masks.py" in usage and "# share of tokens to mask" in usage
