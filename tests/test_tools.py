"""The tools: what the page of masks shows, what the benchmark times, and the comparison in the toy world."""
import base64
import gzip
import json
import re
import shutil
import subprocess
import sys
import urllib.parse
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import spacy
import torch
from conftest import ROOT, SHARED, call, fast_tokenizer, needs_shared, random_lm, squad, write_rows

import data_prep
import finetune_cls
import finetune_qa
import loop
import maskers
import pretrain
import scores
import toy
import train_nmg
from data import Pieces, blocks, collate
from policies import Policy
from runs import UserError
from tools import bench, show_masks, toy_compare

PNG = b"\x89PNG"


# ---------------------------------------------------------------- show_masks

HOSTILE = ["</script><img src=x onerror=alert(1)> on the <b>mat</b> & \"dogs\" don't",
           "<!--<script>alert(1)</script> \u2028 😀 big\r\n\t cats\u202e  ]]>"]


@pytest.fixture
def policy(tmp_path):
    """A policy for hidden states of size 32, with weights so wide that probabilities differ."""
    torch.manual_seed(0)
    net = Policy(32)
    for layer in (net.token_head[0], net.token_head[2]):
        torch.nn.init.normal_(layer.weight, std=0.3)
    net.save(tmp_path / "policy")
    return f"nmg:{tmp_path / 'policy'}"


@pytest.fixture
def pipeline(tmp_path):
    """A spaCy pipeline that tells parts of speech by rule: no model is needed."""
    nlp = spacy.blank("en")
    ruler = nlp.add_pipe("attribute_ruler")
    ruler.add([[{}]], {"POS": "X"})
    ruler.add([[{"IS_ALPHA": True}]], {"POS": "NOUN"})
    ruler.add([[{"IS_PUNCT": True}]], {"POS": "PUNCT"})
    ruler.add([[{"LIKE_NUM": True}]], {"POS": "NUM"})
    words = {"DET": "the a", "ADP": "on in into", "VERB": "sat bark break purr purred",
             "ADJ": "big much longer", "PRON": "they"}
    for tag, some in words.items():
        ruler.add([[{"LOWER": {"IN": some.split()}}]], {"POS": tag})
    nlp.to_disk(tmp_path / "rules")
    return tmp_path / "rules"


class Elements(HTMLParser):
    """Every element of a page with its attributes, and what stands in the data element."""

    def __init__(self, page: str):
        super().__init__()
        self.found = []
        self.data = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, attrs))

    def handle_data(self, data):
        if self.found and ("id", "data") in self.found[-1][1]:
            self.data += data


def show(dataset: Path, lm: Path, out: Path, **flags: object) -> dict:
    """Runs show_masks, and returns the data in its page."""
    show_masks.main(show_masks.Config(dataset=str(dataset), lm=str(lm), out=str(out), **flags))
    return data_of(out)


def data_of(out: Path) -> dict:
    return json.loads(Elements((out / "masks.html").read_text("utf-8")).data)


def text_of(context: dict) -> str:
    return "".join(segment for segment, *_ in context["segments"])


def corpus_blocks(dataset: Path, lm: Path) -> Pieces:
    return blocks(data_prep.load(str(dataset), data_prep.load_tokenizer(str(lm))).corpus, 66)


def corpus_of(tmp_path: Path, texts: list[str]) -> Path:
    write_rows(tmp_path / "data" / "corpus.jsonl", [{"text": text} for text in texts])
    return tmp_path / "data"


def test_masks_are_those_of_pretraining(qa_folder, lm_folder, policy, tmp_path):
    """The same blocks one by one, and their tokens numbered within the text afterwards."""
    page = show(qa_folder, lm_folder, tmp_path / "out", maskers=f"punct,{policy},whole", p=0.2, contexts=7,
                seed=3)
    assert page["maskers"] == ["punct", policy, "whole"] and len(page["contexts"]) == 7
    pieces = corpus_blocks(qa_folder, lm_folder)
    lm = pretrain.LMReader(pretrain.load_lm(str(lm_folder)))
    for context in page["contexts"]:
        i = int(re.match(r"text (\d+)", context["name"])[1])
        start = pieces.split.token_start[i]
        in_text = np.flatnonzero(pieces.text_ids == i)
        assert text_of(context) == pieces.split.text(i)
        assert context["blocks"] == len(in_text)
        assert context["maskable"] == pieces.split.token_start[i + 1] - start
        for name in page["maskers"]:
            expected = []
            for block in in_text:
                one = np.array([block])
                batch, mask, _ = pretrain.mask_batch(pieces, maskers.find(name), 0.2, 3, 0, one, lm)
                expected += (batch.token_at[mask] - start).tolist()
            assert context["masked"][name] == expected and expected
    assert max(context["blocks"] for context in page["contexts"]) > 1


def test_probabilities_are_the_policys(qa_folder, lm_folder, policy, tmp_path):
    """They sum to 1 in each block, and what is masked is most probable."""
    page = show(qa_folder, lm_folder, tmp_path / "out", maskers=f"random,{policy}", contexts=5)
    pieces = corpus_blocks(qa_folder, lm_folder)
    for context in page["contexts"]:
        assert list(context["probability"]) == [policy]
        assert len(context["probability"][policy]) == context["maskable"]
        i = int(re.match(r"text (\d+)", context["name"])[1])
        for block in np.flatnonzero(pieces.text_ids == i):
            tokens = np.arange(pieces.begin[block], pieces.end[block]) - pieces.split.token_start[i]
            share = np.array(context["probability"][policy])[tokens]
            masked = np.isin(tokens, context["masked"][policy])
            assert share.sum() == pytest.approx(1, abs=1e-4)
            assert share.max() > 2 / len(share)
            assert share[masked].min() >= share[~masked].max()


def test_probabilities_are_zero_where_nothing_may_be_masked(lm_folder, policy, tmp_path):
    """[SEP] written in a text is a special token: one text has nothing else, another has it among words."""
    folder = corpus_of(tmp_path, ["[SEP]", "the cat [SEP] sat on"])
    page = show(folder, lm_folder, tmp_path / "out", maskers=policy)
    first, second = [context["probability"][policy] for context in page["contexts"]]
    assert first == [0]
    assert [share > 0 for share in second] == [True, True, False, True, True]
    assert sum(second) == pytest.approx(1, abs=1e-4)


def test_tokens_and_answers_are_marked(lm_folder, tmp_path):
    """Two answers overlap, one is a part of a token, one has an equal twin elsewhere in the text."""
    text = "Dogs bark;  the cat sat on the mat.\nThe cat sat on the mat, and purred"
    places = {"Dog": 0, "cat sat": text.rindex("cat sat"), "sat on": text.rindex("sat on"),
              "purred": text.index("purred")}
    asked = []
    for answer, start in places.items():
        found = [{"text": answer, "answer_start": start}]
        asked.append({"id": answer, "question": f"<{answer}>?", "answers": found})
    article = {"title": "t", "paragraphs": [{"context": text, "qas": asked}]}
    (tmp_path / "train.json").write_text(json.dumps({"data": [article, article]}))
    [context] = show(tmp_path / "train.json", lm_folder, tmp_path / "out", contexts=1)["contexts"]

    marked = "".join(len(segment) * "- "[not answer] for segment, _, _, answer in context["segments"])
    between = " " * len(text[len("Dogs"):text.rindex("cat sat")])
    assert marked == "----" + between + "-" * len("cat sat on") + " " * len(" the mat, and ") + "------"
    assert [question for question, _ in context["questions"]] == [f"<{answer}>?" for answer in places]
    assert [answer for _, answer in context["questions"]] == ["Dogs", *list(places)[1:]]

    tokens = Counter()
    for segment, first, stop, _ in context["segments"]:
        # What stands between tokens belongs to none.
        assert stop - first == bool(segment.strip())
        if stop > first:
            tokens[first] = segment
    words = [tokens[i].lower() for i in range(len(tokens))]
    assert words == re.findall(r"\w+|[^\w\s]", text.lower())


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_a_hostile_text_stays_a_text(kind, tmp_path):
    """As a context, which goes into the page in segments, and as a question and answer, which do whole."""
    tokenizer = fast_tokenizer(kind)
    random_lm("bert", len(tokenizer)).save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    pages = {}
    for name, texts in {"harmless": ["the cat", "the mat"], "hostile": HOSTILE}.items():
        data = squad(texts, texts)
        for question, text in zip([p["qas"][0] for p in data["data"][0]["paragraphs"]], texts, strict=True):
            question["question"] = text
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
        show(tmp_path / f"{name}.json", tmp_path / "lm", tmp_path / name, split="train")
        pages[name] = Elements((tmp_path / name / "masks.html").read_text("utf-8"))
    assert pages["harmless"].found == pages["hostile"].found
    assert len(pages["hostile"].found) > 30
    for context in json.loads(pages["hostile"].data)["contexts"]:
        assert text_of(context) in HOSTILE
        assert context["questions"][0][0] in HOSTILE


def test_the_page_needs_nothing_from_elsewhere():
    template = show_masks.TEMPLATE.read_text("utf-8")
    assert not re.search(r"https?:|@import|url\(|src=|href=", template)
    assert template.count("DATA") == 1


# What a page shows, and how a key is pressed: "^5" is 5 with Shift.
STATE = """() => {
  const all = selector => [...document.querySelectorAll(selector)]
  return { at: document.getElementById("where").textContent,
           keys: document.getElementById("keys").open,
           images: document.images.length, names: all("select").map(s => s.value),
           text: all(".text").map(t => t.textContent),
           masked: all(".text").map(t => t.querySelectorAll(".masked").length),
           shaded: all(".text").map(t => t.querySelectorAll("[style]").length) }
}"""
PRESS = """key => {
  const digit = /[1-9]$/.exec(key)
  const number = { code: "Digit" + digit, key: "x", shiftKey: key.length > 1 }
  const letter = { key, shiftKey: key === "A" }
  document.dispatchEvent(new KeyboardEvent("keydown", digit ? number : letter))
}"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="there is no chromium to open the page in")
def test_keys_in_a_browser(lm_folder, policy, tmp_path):
    """Each key is pressed once, and the page says afterwards what it shows."""
    names = f"random,{policy},whole,span,punct"
    page = show(corpus_of(tmp_path, HOSTILE), lm_folder, tmp_path, maskers=names)
    keys = ["", "j", "ArrowRight", "k", "4", "^5", "A", "a", "s", "?"]
    script = f"""<script>
        const pressed = {PRESS}
        const state = {STATE}
        const seen = {json.dumps(keys)}.map(key => {{ pressed(key); return state() }})
        const text = btoa(encodeURIComponent(JSON.stringify(seen)))
        document.body.textContent = "SEEN" + text + "END"</script>"""
    source = (tmp_path / "masks.html").read_text("utf-8")
    (tmp_path / "keys.html").write_text(source.replace("</html>", script), "utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
               "--disable-component-update", "--disable-sync", "--no-first-run",
               f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{tmp_path}/keys.html"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    seen = json.loads(urllib.parse.unquote(base64.b64decode(re.search("SEEN(.*)END", dom)[1]).decode()))

    assert [state["at"].split(":")[0] for state in seen[:4]] == ["1 of 2", "2 of 2", "1 of 2", "2 of 2"]
    assert [state["names"] for state in seen[3:9]] == [
        ["random", policy], ["span", policy], ["span", "punct"], ["span", "random"], ["punct", "random"],
        ["random", "punct"]]
    assert [state["keys"] for state in seen[-2:]] == [False, True]
    for state in seen:
        context = page["contexts"][int(state["at"][0]) - 1]
        assert state["images"] == 0
        assert state["text"] == [text_of(context)] * 2
        assert [n > 0 for n in state["shaded"]] == [name == policy for name in state["names"]]
        for name, shown in zip(state["names"], state["masked"], strict=True):
            masked = set(context["masked"][name])
            hit = [not masked.isdisjoint(range(first, stop)) for _, first, stop, _ in context["segments"]]
            assert shown == sum(hit)


def test_parts_of_speech_against_a_naive_count(lm_folder, policy, pipeline, tmp_path, capsys):
    sentence = "The cat sat on the mat, and purred; they don't  purr {}!\nDogs (big ones) bark into pieces."
    texts = [sentence.format(i) for i in range(9)]
    # Several blocks, one of which ends within "don't".
    texts.append("  " + " ".join(texts))
    folder = corpus_of(tmp_path, texts)
    page = show(folder, lm_folder, tmp_path / "out", maskers=f"random,{policy}", p=0.3, contexts=2, seed=1,
                spacy_model=str(pipeline))
    printed = capsys.readouterr().out

    pieces, nlp = corpus_blocks(folder, lm_folder), spacy.load(pipeline)
    tokenizer = data_prep.load_tokenizer(str(lm_folder))
    lm = pretrain.LMReader(pretrain.load_lm(str(lm_folder)))
    assert len(pieces) > len(texts)
    counts = {}
    for name, masker, p in (("random", "random", 0.3), (policy, policy, 0.3), ("in the text", "random", 1.0)):
        counts[name] = Counter()
        for block, i in enumerate(pieces.text_ids):
            one = np.array([block])
            batch, mask, _ = pretrain.mask_batch(pieces, maskers.find(masker), p, 1, 0, one, lm)
            doc = nlp(texts[i])
            encoded = tokenizer(texts[i], return_offsets_mapping=True, add_special_tokens=False)
            for token in batch.token_at[mask] - pieces.split.token_start[i]:
                end = encoded["offset_mapping"][token][1]
                [word] = [w for w in doc if w.idx < end <= w.idx + len(w.text)]
                counts[name][word.pos_] += 1
    assert counts["random"] != counts[policy]

    top = [tag for tag, _ in counts[policy].most_common(6)]
    for name, count in counts.items():
        total = count.total()
        count["other"] = sum(n for tag, n in count.items() if tag not in top)
        [line] = [line for line in printed.splitlines() if line.startswith(f"{name} ") and "NOUN" in line]
        expected = [f"{tag} {100 * count[tag] / total:.1f} %" for tag in (*top, "other")]
        assert line.removeprefix(name).strip().split("  ") == expected
    assert (tmp_path / "out" / "parts_of_speech.png").read_bytes()[:4] == PNG
    assert len(page["contexts"]) == 2


def test_the_top_six_are_the_learned_maskers():
    counts = {"none": Counter(), "random": Counter("AAAAAAABCDEFGH"),
              "nmg:x": Counter("HHHHHHHGGGGGGFFFFFEEEEDDDCCB"), "in the text": Counter("ABCDEFGHHH")}
    tags, percent = show_masks.shares(counts)
    assert tags == [*"HGFEDC", "other"]
    assert percent["in the text"] == pytest.approx([30, 10, 10, 10, 10, 10, 20])
    assert percent["none"] == [0] * 7
    del counts["nmg:x"], counts["none"]
    assert show_masks.shares(counts)[0][0] == "A"


@pytest.mark.parametrize(("flags", "said"), [
    (["--dataset=nowhere"], "neither a known name nor a path"),
    (["--maskers=random,rndom"], "did you mean 'random'"),
    (["--maskers=nmg:nowhere"], "nowhere: no policy"),
    (["--maskers=oracle"], "toy world only"),
    (["--split=test"], "no test split. Allowed: train"),
    (["--spacy_model=en_nothing"], "python -m spacy download en_nothing"),
    (["--spacy_model=blank"], "tells no parts of speech"),
    (["--p=2"], "--p=2: a share"),
    (["--contexts=0"], "--contexts=0: must be 1 or more"),
    (["--contexs=3"], "did you mean 'contexts'"),
    (["--out=train.txt"], "train.txt"),
])
def test_wrong_flags_of_show_masks(flags, said, lm_folder, tmp_path):
    write_rows(tmp_path / "train.txt", [{"text": "the cat sat", "label": "x"}] * 2)
    spacy.blank("en").to_disk(tmp_path / "blank")
    result = call("tools/show_masks.py", "--dataset=train.txt", f"--lm={lm_folder}", *flags, cwd=tmp_path)
    assert result.returncode == 2
    assert said in result.stderr and result.stderr.count("\n") == 1


def test_show_masks_on_the_toy_world(tmp_path):
    flags = ["--dataset=toyqa", "--split=test", "--contexts=3", "--out=o"]
    result = call("tools/show_masks.py", *flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "page: o/masks.html" in result.stdout and "--spacy_model=" in result.stdout
    assert [file.name for file in (tmp_path / "o").iterdir()] == ["masks.html"]
    page = data_of(tmp_path / "o")
    assert page["maskers"] == ["random", "whole", "span", "punct"]
    for context in page["contexts"]:
        answers = [answer for _, answer in context["questions"]]
        marked = [segment for segment, _, _, in_answer in context["segments"] if in_answer]
        assert len(answers) == 3 and sorted(answers) == sorted(marked)


@needs_shared
@pytest.mark.slow
def test_parts_of_speech_of_real_text(tmp_path):
    """Masking punctuation first takes mostly punctuation, and random masks are as the text is."""
    lines = (SHARED / "data/chemprot/train.txt").read_text("utf-8").splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(lines[:200]), "utf-8")
    flags = ["--dataset=train.jsonl", f"--lm={SHARED}/lm/minilm", "--maskers=random,punct,entity",
             "--p=0.05", "--contexts=5", f"--spacy_model={SHARED}/spacy/en_small", "--out=o"]
    result = call("tools/show_masks.py", *flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    shares = {}
    for line in result.stdout.splitlines():
        if "PUNCT" in line:
            shares[line.split("  ")[0]] = dict(re.findall(r"(\w+) ([\d.]+) %", line))
    assert float(shares["punct"]["PUNCT"]) > 75
    assert float(shares["random"]["PUNCT"]) == pytest.approx(float(shares["in the text"]["PUNCT"]), abs=10)
    assert {"NOUN", "PROPN"} <= set(shares["entity"])


# ---------------------------------------------------------------- bench

SMALL = {"contexts": 8, "examples": 16, "validation": 16}


@pytest.fixture
def steady_lm(tmp_path):
    """A BERT without dropout, so that two ways of training it can be compared."""
    tokenizer = fast_tokenizer("wordpiece")
    random_lm("bert", len(tokenizer)).save_pretrained(tmp_path / "steady")
    tokenizer.save_pretrained(tmp_path / "steady")
    return str(tmp_path / "steady")


@pytest.fixture
def asked_folder(tmp_path):
    """Questions about 24 texts, each a document of its own, of one or several windows."""
    contexts = [f"The {i}. cat " + "sat on the mat and purred into pieces " * (1 + i % 4) for i in range(24)]
    answers = [["cat", "purred", "into pieces"][i % 3] for i in range(24)]
    [paragraphs, _] = [article["paragraphs"] for article in squad(contexts, answers)["data"]]
    articles = [{"title": "t", "paragraphs": [paragraph]} for paragraph in paragraphs]
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked" / "train.json").write_text(json.dumps({"data": articles}))
    return tmp_path / "asked"


@pytest.fixture(autouse=True)
def patched(monkeypatch):
    """What the padded side patches for good ends with the test."""
    monkeypatch.setattr(pretrain, "mlm_loss", pretrain.mlm_loss)
    for module in (pretrain, finetune_cls, finetune_qa):
        monkeypatch.setattr(module, "collate", collate)


def moved(model: torch.nn.Module, start: torch.nn.Module) -> torch.Tensor:
    """How far training moved the encoder, but for the biases of keys, whose gradients are rounding errors."""
    after = model.base_model.state_dict()
    steps = []
    for name, before in start.base_model.state_dict().items():
        if not name.endswith("key.bias"):
            steps.append((after[name] - before).flatten())
    return torch.cat(steps)


@pytest.mark.parametrize("folder", ["cls_folder", "asked_folder"])
def test_padding_costs_time_and_changes_nothing(folder, steady_lm, request, monkeypatch):
    """Both MLM losses and padded batches train the same LM and classifier, on the plain path."""
    cfg = bench.Config(dataset=str(request.getfixturevalue(folder)), lm=steady_lm, **SMALL)
    monkeypatch.setattr(bench.Ours, "fast", False)
    lengths = set()
    forward = torch.nn.Embedding.forward

    def spy(module, ids):
        lengths.add(ids.shape[-1])
        return forward(module, ids)

    ours = bench.Ours(cfg, 0)
    ours.mlm()
    ours.finetune()
    padded = bench.Padded(cfg, 0)
    monkeypatch.setattr(torch.nn.Embedding, "forward", spy)
    padded.mlm()
    padded.finetune()
    scores = padded.score()["likelihood"]
    assert lengths == {padded.cfg.max_len} == {padded.cfg.ft_max_len}
    expected = moved(ours.adapted, ours.lm)
    assert (moved(padded.adapted, ours.lm) - expected).norm() < 1e-3 * expected.norm()
    # The softmax over the start and the end of an answer runs over padding, too, as usual.
    if folder == "cls_folder":
        expected = moved(ours.model, ours.lm)
        assert (moved(padded.model, ours.lm) - expected).norm() < 1e-3 * expected.norm()
    monkeypatch.setattr(padded.task, "collate", collate)
    np.testing.assert_allclose(scores, padded.score()["likelihood"], atol=1e-5)


def test_the_mlm_loss_on_every_position_is_the_same_loss(steady_lm, cls_folder):
    mlm_loss = pretrain.mlm_loss
    work = bench.Padded(bench.Config(dataset=str(cls_folder), lm=steady_lm, **SMALL), 0)
    pieces = work.subtask.contexts
    every = np.arange(len(pieces))
    tensors = pretrain.mlm_tensors(*pretrain.mask_batch(pieces, maskers.random, 0.3, 0, 0, every))
    expected = mlm_loss(work.lm, tensors)
    torch.testing.assert_close(bench.mlm_loss_everywhere(work.lm, tensors), expected)


def test_sub_tasks_are_those_of_train_nmg(lm_folder, cls_folder, monkeypatch, tmp_path):
    flags = {"dataset": str(cls_folder), "lm": str(lm_folder), **SMALL}
    drawn = []

    def stop_here(lm, subtask, *_):
        drawn.append(subtask)
        raise UserError("enough")

    monkeypatch.setattr(train_nmg, "inner_loop", stop_here)
    for seed in (0, 1):
        with pytest.raises(UserError, match="enough"):
            train_nmg.main(train_nmg.Config(**flags, seed=seed, out=str(tmp_path / f"{seed}")))
        subtask = bench.Ours(bench.Config(**flags), seed).subtask
        for part in ("contexts", "train", "val"):
            ours, theirs = getattr(subtask, part), getattr(drawn[seed], part)
            np.testing.assert_array_equal(ours.text_ids, theirs.text_ids)
            np.testing.assert_array_equal(ours.end, theirs.end)
    assert drawn[0].contexts.text_ids.tolist() != drawn[1].contexts.text_ids.tolist()


def test_trainer_gets_the_same_examples(lm_folder, cls_folder, asked_folder):
    work = bench.Trainer(bench.Config(dataset=str(cls_folder), lm=str(lm_folder), **SMALL), 0)
    labels = [example["labels"] for example in work.train]
    assert labels == finetune_cls.labels_of(work.subtask.train).tolist()
    assert [len(example["input_ids"]) for example in work.corpus] == work.subtask.contexts.length.tolist()
    assert not any("labels" in example for example in work.corpus)

    cfg = bench.Config(dataset=str(asked_folder), lm=str(lm_folder), ft_max_len=30, **SMALL)
    work = bench.Trainer(cfg, 0)
    found = set()
    for example in work.train:
        answer = example["input_ids"][example["start_positions"]:example["end_positions"] + 1]
        found.add(work.tokenizer.decode(answer))
    # Windows that do not hold their answer point to [CLS].
    assert found == {"[CLS]", "cat", "purred", "into pieces"}


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["cls_folder", "asked_folder"])
def test_trainer_trains(folder, lm_folder, request):
    cfg = bench.Config(dataset=str(request.getfixturevalue(folder)), lm=str(lm_folder), **SMALL)
    seconds, gb, operations = bench.measure("Trainer", cfg, 0)
    assert len(seconds) == len(bench.STAGES) and min(*seconds, operations) > 0
    assert gb > 0.1
    work = bench.Trainer(cfg, 0)
    work.mlm()
    work.finetune()
    before, adapted, tuned = [m.base_model.state_dict() for m in (work.lm, work.adapted, work.model)]
    name = "encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(before[name], adapted[name]) and not torch.equal(adapted[name], tuned[name])


def test_operations_are_counted_as_by_hand():
    """Products of the encoder and of the MLM head, of which the tiny LM's shape tells the sizes."""
    work = bench.Ours(bench.Config(**SMALL), 0)
    config, contexts = work.lm.config, work.subtask.contexts
    tokens, length = contexts.length.sum(), round(contexts.length.mean())
    h, inner = config.hidden_size, config.intermediate_size
    encoder = config.num_hidden_layers * (2 * (4 * h * h + 2 * h * inner) + 4 * length * h)
    head = 2 * h * (h + len(toy.tokenizer()))
    loop.use_fast_path(True)
    assert bench.mlm_operations(work) == pytest.approx(3 * 3 * tokens * (encoder + 0.05 * head))


@pytest.mark.slow
def test_bench_prints_its_tables(tmp_path, monkeypatch):
    """Two of the three sides, each in a process of its own."""
    monkeypatch.delitem(bench.SIDES, "Trainer")
    flags = [f"--{name}={value}" for name, value in SMALL.items()]
    result = call("tools/bench.py", *flags, "--repeats=2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["dataset"] == "toycls" and 0 < figures["mlm_share"] < 1
    cells = {}
    for line in result.stdout.splitlines():
        if line.startswith("| "):
            first, *rest = line.strip("| ").split(" | ")
            cells[first] = rest
    for i, stage in enumerate((*bench.STAGES, "episode")):
        medians = [np.median(found, 0)[i] for found in figures["seconds"].values()]
        assert [cell.split()[0] for cell in cells[stage][:2]] == [f"{s:.2f}" for s in medians]
        median, least, most = map(float, re.findall(r"[\d.]+", cells[stage][2]))
        assert least <= median <= most
    for side, repeats in figures["seconds"].items():
        assert len(repeats) == 2 and figures["gb"][side] > 0.1
        for *stages, episode in repeats:
            assert episode == pytest.approx(3 * sum(stages))


@pytest.mark.parametrize(("flags", "said"), [
    (["--max_len=4096"], "--max_len=4096: this LM takes at most"),
    (["--ft_max_len=4096"], "--ft_max_len=4096: this LM takes at most"),
    (["--repeats=0"], "--repeats=0: must be 1 or more"),
    (["--dataset=corpus.txt"], "has no labelled examples"),
])
def test_wrong_flags_of_bench(flags, said, tmp_path):
    (tmp_path / "corpus.txt").write_text("the cat\nthe mat\n")
    result = call("tools/bench.py", *flags, cwd=tmp_path)
    assert result.returncode == 2
    assert said in result.stderr and result.stderr.count("\n") == 1


# ---------------------------------------------------------------- toy_compare

def test_the_tokens_that_are_masked_most():
    """Against counting by hand; tokens 0 to 14, of which 14 is too rare."""
    rng = np.random.default_rng(0)
    ids = np.append(rng.integers(0, 14, 600), [14] * 9)
    split = SimpleNamespace(input_ids=ids, token_start=np.array([0, 300, 609]),
                            special=SimpleNamespace(vocabulary_size=15))
    masked = rng.random(len(ids)) < 0.1 + 0.05 * (ids == 3) + 0.8 * (ids == 7)
    found = show_masks.most_masked(split, np.array([0, 1]), masked)
    beyond = {}
    for token in range(14):
        expected = masked.sum() * (ids == token).sum() / len(ids)
        beyond[token] = (masked[ids == token].sum() - expected) / np.sqrt(expected)
    assert [token for token, _ in found] == sorted(beyond, key=beyond.get)[::-1][:10]
    assert found[0][0] == 7 and dict(found)[7] == pytest.approx(masked[ids == 7].mean())
    masked[ids == 7] = False
    assert 7 not in dict(show_masks.most_masked(split, np.array([0, 1]), masked))


@pytest.mark.slow
def test_the_oracle_beats_no_masking_by_far(tmp_path, monkeypatch):
    """After one epoch. And pretrain.py and finetune_cls.py, with their defaults, give the same score."""
    monkeypatch.setitem(toy.PRETRAIN, "epochs", 1)
    result = call("tools/toy_compare.py", "--maskers=none,oracle", "--out=toy.png", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    score = dict(re.findall(r"seed 0  (\w+) +([\d.]+)", result.stdout))
    assert float(score["oracle"]) > float(score["none"]) + 20
    assert re.search(r"oracle .* 100\n", result.stdout)
    assert (tmp_path / "toy.png").read_bytes()[:4] == PNG
    for command in (["pretrain.py", "--masker=oracle", "--out=o"], ["finetune_cls.py", "--lm=o"]):
        result = call(*command, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    row = json.loads((tmp_path / "results.jsonl").read_text())
    assert row["masker"] == "oracle" and row["lm"] == "tiny"
    assert f"{row['accuracy']:.2f}" == score["oracle"]


def test_what_a_search_found_is_compared_by_seed(tmp_path, monkeypatch):
    """Sampled and greedy, between random masks and the oracle."""
    for seed in (7, 8):
        Policy(128).save(tmp_path / f"runs/search-toycls-tiny-{seed}")
    monkeypatch.setattr(toy_compare, "score_on_test", lambda data, masker, seed: seed + len(masker) % 2)
    monkeypatch.setattr(toy_compare, "informative_share", lambda data, masker: len(masker))
    result = call("tools/toy_compare.py", "--seed=7", "--seeds=2", "--out=toy.png", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    names = ["none", "random", "search, sampled", "search, greedy", "oracle"]
    lines = result.stdout.split("among the masked, %\n")[1].splitlines()
    assert [re.split(r"  | \d", line)[0] for line in lines[:-1]] == names
    # The mean, each seed, and their shares of informative words.
    assert lines[0].split()[1:] == ["7.50", "7.00", "8.00"]
    assert lines[4].split()[1:] == ["7.50", "7.00", "8.00", "6", "6"]
    sampled, greedy = "sampled:runs/search-toycls-tiny-7", "search:runs/search-toycls-tiny-7"
    assert lines[2].split()[-2:] == [str(len(sampled))] * 2
    assert lines[3].split()[-2:] == [str(len(greedy))] * 2
    assert (tmp_path / "toy.png").read_bytes()[:4] == PNG


@pytest.mark.parametrize(("flags", "said"), [
    (["--seeds=0"], "--seeds=0: must be 1 or more"),
    (["--maskers=none,rndom"], "did you mean 'random'?"),
    (["--dataset=imdb"], "must be toycls or toyqa"),
    (["--seed=3"], "runs/search-toycls-tiny-3: no policy"),
])
def test_wrong_flags_of_toy_compare(flags, said, tmp_path):
    result = call("tools/toy_compare.py", *flags, cwd=tmp_path)
    assert result.returncode == 2
    assert said in result.stderr and not list(tmp_path.iterdir())


# ---------------------------------------------------------------- general_words

TEXT = "The cat sat.\nTHE cat, the 7 été"


@pytest.mark.parametrize(("name", "flags", "rows"), [
    ("text.txt", [], "the\t3\ncat\t2\nsat\t1\nété\t1\n"),
    ("text.txt", ["--words=2"], "the\t3\ncat\t2\n"),
    ("text.txt.gz", [], "the\t3\ncat\t2\nsat\t1\nété\t1\n"),
])
def test_words_of_a_text_are_counted(name, flags, rows, tmp_path):
    """In lower case, those with a letter, the commonest first."""
    content = TEXT.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    result = call("tools/general_words.py", f"--text={name}", "--out=my/words.txt", *flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "my/words.txt").read_text("utf-8") == rows
    assert result.stdout.startswith(f"my/words.txt: {len(rows.splitlines())} words")


def test_words_of_wordfreq_are_counted_among_a_billion(tmp_path, monkeypatch):
    frequency = {"die": 0.0398, "00": 0.002, "straße": 1.234e-7, "selten": 1.02e-8}
    fake = SimpleNamespace(top_n_list=lambda language, n: {"de": list(frequency)}[language][:n],
                           word_frequency=lambda word, language: {"de": frequency}[language][word])
    monkeypatch.setitem(sys.modules, "wordfreq", fake)
    result = call("tools/general_words.py", "--language=de", "--words=3", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "general_words.txt").read_text("utf-8") == "die\t39800000\nstraße\t123\n"


@pytest.mark.parametrize(("flags", "said"), [
    ([], "error: the counts need a package that is not installed: pip install wordfreq\n"),
    (["--text=none.txt"], "error: [Errno 2] No such file or directory: 'none.txt'\n"),
])
def test_wrong_flags_of_general_words(flags, said, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wordfreq", None)
    result = call("tools/general_words.py", *flags, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.endswith(said) and "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_general_words_are_common_english():
    """20,000 of the package, without those that have no letter."""
    assert scores.GENERAL == ROOT / "general_words.txt"
    rows = [line.split("\t") for line in scores.GENERAL.read_text("utf-8").splitlines()]
    words, counts = [word for word, _ in rows], [int(count) for _, count in rows]
    assert 19_000 < len(set(words)) == len(words) <= 20_000
    assert {"the", "to", "and", "of", "a", "in"} <= set(words[:10])
    assert counts == sorted(counts, reverse=True) and counts[-1] > 0
    assert all(re.search(r"[^\W\d_]", word) and word == word.lower() for word in words)
