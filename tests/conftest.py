"""Fixtures: a cache of its own for the whole run, tiny random LMs of several architectures, small data files."""
import contextlib
import importlib
import io
import json
import os
import re
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import loop

os.environ.setdefault("NMG_CACHE", tempfile.mkdtemp(prefix="nmg-test-"))
os.environ["HF_HUB_OFFLINE"] = "1"
GPU = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
SEES_GPU = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]     # a process, as this one must not touch it
needs_gpu = pytest.mark.skipif(not (GPU and torch.version.cuda) or subprocess.run(SEES_GPU).returncode != 0, reason="torch finds no GPU here")
os.environ["CUDA_VISIBLE_DEVICES"] = ""                                    # the tests run on the CPU, but for those that ask for a GPU

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
needs_shared = pytest.mark.skipif(not (SHARED / "data").is_dir(), reason=f"the real data and LM of {SHARED.name}/ are not here")
TEXTS = ["The cat sat on the mat, and purred.", "Dogs (big ones) bark; they don't purr!", "A much longer sentence about unbelievable "
         "electroencephalographic measurements, in which words break into many pieces.", "Short."]


def run(script: str, *flags: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    """A script of the project in a subprocess, as a user would start it."""
    return subprocess.run([sys.executable, str(ROOT / script), *flags], cwd=cwd, capture_output=True, text=True, timeout=600,
                          env=os.environ | {"PYTHONWARNINGS": "ignore"} | env)


def kill_when(ready: Callable[[], bool], script: str, *flags: str, cwd: Path, **env: str) -> None:
    """Starts a script as `run` does and sends it SIGKILL as soon as `ready`; it must still be at work then."""
    child = subprocess.Popen([sys.executable, str(ROOT / script), *flags], cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                             env=os.environ | env)
    while child.poll() is None and not ready():
        time.sleep(0.02)
    child.kill()
    assert child.wait() == -signal.SIGKILL


def torchrun(n: int, script: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={n}", str(ROOT / script), *flags]


def kill_worker_when(ready: Callable[[], bool], command: list[str], cwd: Path) -> None:
    """Starts torchrun and sends SIGKILL to one of its processes as soon as `ready`; that must end the run, with a message."""
    child = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                             env=os.environ | {"OMP_NUM_THREADS": "1"})
    while child.poll() is None and not ready():
        time.sleep(0.02)
    workers = [int(w) for w in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()]
    os.kill(workers[-1], signal.SIGKILL)
    assert "Signal 9 (SIGKILL)" in child.communicate()[1] and child.returncode != 0


def call(script: str, *flags: str, cwd: Path) -> subprocess.CompletedProcess:
    """The same in this process, without the seconds that importing torch takes: for what many tests do, above all wrong flags."""
    out, err, argv, place, code = io.StringIO(), io.StringIO(), sys.argv, os.getcwd(), 0
    main = importlib.import_module(Path(script).stem).main
    sys.argv = [script, *flags]
    os.chdir(cwd)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            loop.cli(main)
    except SystemExit as e:
        code = e.code or 0
    finally:
        sys.argv = argv
        os.chdir(place)
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())


def fast_tokenizer(kind: str):
    """A fast tokenizer of one of the three families. WordPiece has a fixed vocabulary (short words whole, long ones in letters);
    the others are trained on a few sentences, which breaks ties anew in every process."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if kind == "wordpiece":
        words = {w for w in re.findall(r"\w+|[^\w\s]", " ".join(TEXTS).lower()) if len(w) <= 8}
        pieces = [*special, *sorted(words | set(string.ascii_lowercase + string.digits)), *("##" + c for c in string.ascii_lowercase + string.digits)]
        tok = Tokenizer(models.WordPiece({w: i for i, w in enumerate(pieces)}, unk_token="[UNK]"))
        tok.normalizer, tok.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    elif kind == "bpe":
        tok = Tokenizer(models.BPE())
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    else:
        tok = Tokenizer(models.Unigram())
        tok.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=100, special_tokens=special, unk_token="[UNK]")
    if kind != "wordpiece":
        tok.train_from_iterator(TEXTS, trainer)
    ids = {s: tok.token_to_id(s) for s in special}
    tok.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1" if kind == "wordpiece" else "[CLS]:0 $A:0 [SEP]:0 [SEP]:0 $B:0 [SEP]:0")
    inputs = ["input_ids", "attention_mask"] + (["token_type_ids"] if kind == "wordpiece" else [])
    return PreTrainedTokenizerFast(tokenizer_object=tok, model_input_names=inputs, model_max_length=64, **names)


def random_lm(kind: str, vocab: int = 120, dropout: float = 0.0):
    """A small masked LM with random weights of one of the architectures that people adapt."""
    import transformers as t
    size = {"vocab_size": vocab, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
            "max_position_embeddings": 66, "pad_token_id": 0}
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    torch.manual_seed(0)
    if kind == "bert":
        return t.BertForMaskedLM(t.BertConfig(**size, **drop))
    if kind == "distilbert":
        return t.DistilBertForMaskedLM(t.DistilBertConfig(vocab_size=vocab, dim=32, n_layers=2, n_heads=2, hidden_dim=64, pad_token_id=0,
                                                          max_position_embeddings=66, dropout=dropout, attention_dropout=dropout))
    if kind == "roberta":
        return t.RobertaForMaskedLM(t.RobertaConfig(**size, **drop, bos_token_id=2, eos_token_id=3))
    if kind == "electra":
        return t.ElectraForMaskedLM(t.ElectraConfig(**size, **drop, embedding_size=16))
    if kind == "eurobert":                                      # two heads that share a key and a value
        return t.EuroBertForMaskedLM(t.EuroBertConfig(**size, num_key_value_heads=1, attention_dropout=dropout))
    if kind == "deberta":
        return t.DebertaV2ForMaskedLM(t.DebertaV2Config(**size, **drop))
    return t.ModernBertForMaskedLM(t.ModernBertConfig(**size, embedding_dropout=dropout, mlp_dropout=dropout, attention_dropout=dropout,
                                                      bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3, reference_compile=False))


@pytest.fixture
def lm_folder(tmp_path):
    """A Hugging Face folder with a small BERT and its tokenizer."""
    folder = tmp_path / "lm"
    tok = fast_tokenizer("wordpiece")
    random_lm("bert", len(tok), 0.1).save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder


def write_jsonl(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture
def cls_folder(tmp_path):
    """A small labelled data set: train, dev and test."""
    for split, n in (("train", 24), ("dev", 6), ("test", 9)):
        write_jsonl(tmp_path / "data" / f"{split}.jsonl",
                    [{"text": f"{TEXTS[i % 4]} {split} {i}", "label": ["cat", "dog", "long", "short"][i % 4]} for i in range(n)])
    return tmp_path / "data"


def squad(contexts: list[str], answers: list[str]) -> dict:
    """A SQuAD 1.1 file with one article (and an empty one) and one question a context."""
    return {"data": [{"title": "t", "paragraphs": [
        {"context": c, "qas": [{"id": f"q{i}", "question": f"What is number {i}?", "answers": [{"text": a, "answer_start": c.index(a)}]}]}
        for i, (c, a) in enumerate(zip(contexts, answers, strict=True))]}, {"title": "none", "paragraphs": []}]}


@pytest.fixture
def qa_folder(tmp_path):
    """A small SQuAD-like data set with contexts long enough for several windows."""
    contexts = [" ".join(TEXTS[(i + j) % 4] for j in range(5)) for i in range(12)]
    for split, part in (("train", contexts), ("dev", contexts[:3]), ("test", contexts[:5])):
        (tmp_path / "qa").mkdir(exist_ok=True)
        asked = [["purred", "big ones", "many pieces"][i % 3] for i in range(len(part))]
        (tmp_path / "qa" / f"{split}.json").write_text(json.dumps(squad(part, asked)))
    return tmp_path / "qa"
