"""The embedded world: what it promises of its texts, its reference policies, and the scripts that show them."""
import importlib
import inspect
import json
import re

import numpy as np
import pytest
from conftest import ROOT, call, run

import bench
import data_prep
import loop
import toy
from loop import stream


def test_the_world_is_what_its_docstring_says():
    attributes, names = set(toy.ATTRIBUTES), set(toy.NEW)
    for world in (toy.cls(), toy.qa()):
        docs = [{r["doc"] for r in world[s]} for s in ("train", "dev", "test")]
        assert not docs[0] & docs[1] and not docs[0] & docs[2] and not docs[1] & docs[2]
        assert docs[0] | docs[1] | docs[2] == {r["doc"] for r in world["corpus"]}
        for split in ("train", "dev", "test"):
            for record in world[split]:
                words = set(record["text"].replace(",", "").replace(".", "").split())
                assert not words & attributes and words & names             # nothing tells the class but what the LM knows of the name
        for record in world["corpus"]:
            words = set(record["text"].replace(",", "").replace(".", "").split())
            assert len(words & attributes) == 2 and len(words & names) == 1
    assert not names & {w for text in toy.general() for w in text.replace(",", "").replace(".", "").split()}


def test_it_is_the_same_everywhere():
    assert toy.cls() == toy.cls() and toy.qa() == toy.qa() and toy.cls(1) != toy.cls()
    assert toy.tokenizer().get_vocab() == toy.tokenizer().get_vocab()
    a, b = toy.blank().state_dict(), toy.blank().state_dict()
    assert all((a[k] == b[k]).all() for k in a)


def test_every_word_is_one_token():
    tok = data_prep.load_tokenizer("tiny")
    corpus = data_prep.load("toycls", tok).corpus
    assert (np.diff(corpus.start) == 12).all() and tok.unk_token_id not in corpus.ids


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """`python toy.py`, one seed, from a cold cache: about a minute goes into the embedded LM."""
    place = tmp_path_factory.mktemp("toy")
    return place, run("toy.py", "--seeds=1", cwd=place)


def test_oracle_beats_random_by_far(shown):
    place, result = shown
    assert result.returncode == 0, result.stderr
    score = {line.split()[0]: float(line.split()[1]) for line in result.stdout.split("toycls, test accuracy")[1].splitlines()[1:5]}
    assert score["oracle"] > score["random"] + 20 and score["random"] > score["none"] and score["anti"] < score["random"]
    assert (place / "runs/toy.png").read_bytes()[:4] == b"\x89PNG"


def test_a_row_of_the_toy_world_by_the_scripts(shown, tmp_path):
    """pretrain.py and finetune_cls.py with their defaults give the score of toy.py for the same seed."""
    for command in (["pretrain.py", "--masker=oracle", "--out=o"], ["finetune_cls.py", "--lm=o"]):
        result = run(*command, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    row = json.loads((tmp_path / "results.jsonl").read_text())
    assert row["masker"] == "oracle" and row["lm"] == "tiny"
    assert f"seed 0  oracle {row['accuracy']:6.2f}" in shown[1].stdout


def test_bench_prints_its_tables(shown, tmp_path):
    """Every stage three ways, in one run; useful operations are those that a count by hand gives."""
    result = run("bench.py", "--contexts=8", "--examples=16", "--validation=16", "--ft_epochs=1", "--updates=1", "--repeats=1", "--plain=True",
                 cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "baseline / ours" in result.stdout and "Traceback" not in result.stderr
    figures = json.loads((tmp_path / "runs/bench.json").read_text())
    assert list(figures["stages"]) == ["masking", "MLM", "fine-tuning", "validation", "policy updates", "whole episode"]
    assert all(s > 0 for stage in figures["stages"].values() for side in ("plain", "baseline", "ours") for s in stage["seconds"][side])
    assert set(figures["maskers, rows/s"]) == {"random", "whole", "span", "punct"}
    cells = next(re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines() if line.startswith("MLM "))
    took = {side: s[0] for side, s in figures["stages"]["MLM"]["seconds"].items()}
    assert [c.split(" ")[0] for c in cells[4:6]] == [f"{took[side] / took['ours']:.1f}" for side in ("plain", "baseline")]
    assert 0 < figures["stages"]["MLM"]["share"] < 1 and 0 < figures["rest of an episode"][0] < 1


def test_bench_prints_how_the_cost_grows(shown, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "POINTS", [(16, 2, 64), (32, 2, 64)])            # length, batch, width
    monkeypatch.setattr(bench, "ATTENTION", [120])
    drawn = {}
    monkeypatch.setattr(bench, "episode", lambda w, folder: drawn.update({w.seed: w}) or {"seconds": {"mlm": 1.0, "episode": 2.0}, "peak_gb": 1.0})
    bench.main(contexts=8, examples=16, validation=16, ft_epochs=1, updates=1, repeats=2, scaling=True, out=str(tmp_path / "b.json"))
    assert list(drawn) == [0, 1]                                # a sub-task for each repeat: the one that train_nmg.py draws with this seed
    for seed, w in drawn.items():
        np.testing.assert_array_equal(w.sub.contexts.row, w.task.sample(stream(seed, "sub-task 0"), 8, 8, 16, 16).contexts.row)
    assert drawn[0].sub.contexts.row.tolist() != drawn[1].sub.contexts.row.tolist()
    out = capsys.readouterr().out
    titles = "MLM steps: length", "attention, times the plain way: tokens", "one play: contexts"
    steps, attention, plays = (out.split(title)[1].splitlines()[1:] for title in titles)
    assert [line.split()[:3] for line in steps[:2]] == [["16", "2", "64"], ["32", "2", "64"]]
    assert attention[0].split()[0] == "120" and all(float(times) > 0 for times in attention[0].split()[1:]) and loop.LARGE == 2**21
    assert [line.split()[0] for line in plays] == ["2", "4", "8", "16"]
    assert all(0 < f["share"] < 1 for f in json.loads((tmp_path / "b.json").read_text())["scaling"] if "share" in f)


def test_operations_are_counted_as_by_hand():
    model = toy.blank()
    model.set_attn_implementation("eager")                      # whose products are counted one by one
    encoder, head = bench.cost(model)
    n, h, layers, inner = np.array([7, 30]), model.config.hidden_size, model.config.num_hidden_layers, model.config.intermediate_size
    assert encoder(n) == layers * (2 * n * (4 * h * h + 2 * h * inner) + 4 * n**2 * h).sum()
    assert head == 2 * h * (h + len(toy.tokenizer()))


@pytest.mark.parametrize(("script", "flags", "said"), [
    ("toy.py", ["--seeds=0"], "--seeds=0: must be positive"),
    ("toy.py", ["--maskers=none,rndom"], "did you mean 'random'?"),
    ("toy.py", ["--dataset=imdb"], "must be toycls or toyqa"),
    ("bench.py", ["--max_len=4096"], "--max_len=4096: this LM takes at most"),
    ("bench.py", ["--repeats=0"], "--repeats=0: must be positive"),
    ("data_prep.py", ["--dev_share=2"], "must be in (0, 1)"),
])
def test_wrong_flags(script, flags, said, tmp_path):
    result = call(script, *flags, cwd=tmp_path)
    assert result.returncode == 2 and said in result.stderr and "Traceback" not in result.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["data_prep.py", "train_nmg.py", "pretrain.py", "finetune_cls.py", "finetune_qa.py", "toy.py", "bench.py",
                                    "report.py", "show_masks.py"])
def test_help_shows_every_knob(script):
    result = call(script, "--help", cwd=ROOT)
    assert result.returncode == 0 and result.stderr == "" and f"python {script}" in result.stdout
    assert all(f"    {knob}: " in result.stdout for knob in inspect.signature(importlib.import_module(script[:-3]).main).parameters)
