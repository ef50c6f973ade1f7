"""The embedded world: what it promises of its texts, its reference policies, and the scripts that show them."""
import json

import numpy as np
import pytest
from conftest import ROOT, call, run

import data_prep
import toy


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
    assert f"seed 0  oracle    {row['accuracy']:6.2f}" in shown[1].stdout


def test_bench_prints_its_table(shown, tmp_path):
    result = run("bench.py", "--rows=64", "--repeats=1", "--batch_sizes=8,16", "--max_len=64", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "batch 8" in result.stdout and "batch 16" in result.stdout and "peak memory" in result.stdout
    figures = json.loads((tmp_path / "runs/bench.json").read_text())
    assert set(figures["MLM, rows/s"]) == {"8", "16"} and set(figures["masking, rows/s"]) == {"random", "whole", "span", "punct"}


@pytest.mark.parametrize(("script", "flags", "said"), [
    ("toy.py", ["--seeds=0"], "--seeds=0: must be positive"),
    ("toy.py", ["--maskers=none,rndom"], "did you mean 'random'?"),
    ("toy.py", ["--dataset=imdb"], "must be toycls or toyqa"),
    ("bench.py", ["--batch_sizes=8;16"], "numbers with commas"),
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
    assert result.returncode == 0 and result.stderr == "" and f"python {script}" in result.stdout and "# " in result.stdout
