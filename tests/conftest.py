"""Fixtures: a cache of its own for a whole run, tiny random LMs of many architectures, small data files."""
import contextlib
import importlib
import inspect
import io
import json
import multiprocessing
import os
import re
import signal
import socket
import string
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest import mock

# All processes of a run share a cache, which is not that of the user.
if "NMG_TEST_CACHE" not in os.environ:
    os.environ["NMG_TEST_CACHE"] = tempfile.mkdtemp(prefix="nmg-test-")
os.environ["NMG_CACHE"] = os.environ["NMG_TEST_CACHE"]
os.environ["HF_HUB_OFFLINE"] = "1"
# On a GPU only where that is asked for: CUDA_VISIBLE_DEVICES=0 pytest
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# Two tests run side by side, each on one core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

import data_prep
from nmg import loop
from support import devices
from support.data import Batch, Data, Pieces, Split, collate

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
needs_shared = pytest.mark.skipif(
    not (SHARED / "data").is_dir(), reason=f"the real data and LM of {SHARED.name}/ are not here")
TEXTS = [
    "The cat sat on the mat, and purred.",
    "Dogs (big ones) bark; they don't purr!",
    "A much longer sentence about unbelievable electroencephalographic measurements, in which words break "
    "into many pieces.",
    "Short.",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first: workers take from the tail of each other's list, and short ones end them alike."""
    items.sort(key=lambda item: "slow" not in item.keywords)


# Each pytest worker has one process that imports the scripts (ten seconds), from which others are forked.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["pretrain", "train_nmg", "finetune_cls", "tools.study"])


# ---------------------------------------------------------------- scripts

def patch_devices(monkeypatch, name: str, function: Callable) -> None:
    """Replaces a function of support/devices.py, also where nmg/loop.py has imported it."""
    for module in (devices, loop):
        monkeypatch.setattr(module, name, function)


def call(script: str, *flags: str, cwd: Path) -> subprocess.CompletedProcess:
    """A script of the project, run in this process. "tools/x.py" is tools.x."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            start(script, *flags)
        except SystemExit as e:
            code = e.code or 0
    return subprocess.CompletedProcess([script, *flags], code, out.getvalue(), err.getvalue())


def start(script: str, *flags: str) -> None:
    """Imports a script, and runs the line that starts it."""
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    [line] = re.findall(r"^    (runs\.start\(.*)", inspect.getsource(module), re.MULTILINE)
    with mock.patch.object(sys, "argv", [script, *flags]):
        exec(line, vars(module))


def succeed(script: str, *flags: str, cwd: Path) -> subprocess.CompletedProcess:
    """`call`, which must end well."""
    result = call(script, *flags, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result


def refused(said: str, script: str, *flags: str, cwd: Path) -> None:
    """`call`, which must end with exit code 2 and with this in its sentence."""
    result = call(script, *flags, cwd=cwd)
    assert result.returncode == 2 and said in result.stderr, result.stderr


def child(cwd: Path, threads: int, env: dict[str, str], changed: dict[str, object], said: Path, script: str,
          *flags: str) -> None:
    """What a process of `begin` does."""
    os.chdir(cwd)
    os.environ.update(env)
    torch.set_num_threads(threads)
    for name, value in changed.items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(module), attribute, value)
    with open(said, "w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            start(script, *flags)
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None


def fork(function: Callable, *args: object) -> multiprocessing.Process:
    """Starts a function of a test file in a process of its own, which ends with this one."""
    process = FORKSERVER.Process(target=function, args=args, daemon=True)
    # The first one starts the server, which finds the scripts in the folder where it is started.
    with contextlib.chdir(ROOT):
        process.start()
    return process


def begin(said: Path, script: str, *flags: str, cwd: Path, env: dict[str, str] | None = None,
          changed: dict[str, object] | None = None) -> multiprocessing.Process:
    """Starts a script in a process of its own, which prints to `said`.

    changed: {"module.NAME": the value that it has there}"""
    # As many threads as here: sums in another order would differ.
    return fork(child, cwd, torch.get_num_threads(), env or {}, changed or {}, said, script, *flags)


def wait_for(processes: list[multiprocessing.Process], seconds: float = 300) -> list[int]:
    """Returns the exit codes. If one process fails, or time is over, the others, which would wait for it, are
    killed."""
    end = time.monotonic() + seconds
    while any(process.is_alive() for process in processes):
        time.sleep(0.05)
        if time.monotonic() > end or any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
    return [process.exitcode for process in processes]


def kill_when(ready: Callable[[], bool], script: str, *flags: str, cwd: Path,
              changed: dict[str, object] | None = None) -> None:
    """Begins a script, and sends it SIGKILL as soon as `ready`; it must still be at work then."""
    process = begin(Path(os.devnull), script, *flags, cwd=cwd, changed=changed)
    while process.is_alive() and not ready():
        time.sleep(0.02)
    process.kill()
    assert wait_for([process]) == [-signal.SIGKILL]


def ranks(n: int) -> list[dict[str, str]]:
    """The environments that torchrun gives to n processes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(n)]


def side_by_side(envs: list[dict[str, str]], script: str, *flags: str, cwd: Path) -> list[str]:
    """The same script in a process for each environment; all must end well. What each of them printed.
    (Unlike those of torchrun, they end without what `atexit` has registered.)"""
    files = [cwd / f"process {i} said" for i in range(len(envs))]
    processes = [begin(file, script, *flags, cwd=cwd, env=env)
                 for file, env in zip(files, envs, strict=True)]
    codes = wait_for(processes)
    said = [file.read_text() for file in files]
    assert codes == [0] * len(envs), said
    for file in files:
        file.unlink()
    return said


@pytest.fixture(scope="module")
def one_thread():
    """Sums in the same order in this process and in those that it starts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def plain_path(monkeypatch):
    """Every test begins on the plain path, whatever the one before switched on. With NMG_TEST_BF16=1, the
    fast path of this process is that of a processor with bf16: others compute it, too, but slowly."""
    devices.use_fast_path(False)
    if "NMG_TEST_BF16" in os.environ:
        monkeypatch.setattr(devices, "has_bf16", lambda: True)


# ---------------------------------------------------------------- tokenizers and LMs

SPECIAL = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]",
           "mask_token": "[MASK]"}


def fast_tokenizer(kind: str) -> transformers.PreTrainedTokenizerFast:
    """A fast tokenizer. That of "wordpiece" has a fixed vocabulary (short words whole, long ones in letters);
    those of "bpe" and "unigram" are trained on TEXTS, which breaks ties anew in every process."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if kind == "wordpiece":
        letters = string.ascii_lowercase + string.digits
        words = {word for word in re.findall(r"\w+|[^\w\s]", " ".join(TEXTS).lower()) if len(word) <= 8}
        pieces = [*special, *sorted(words | set(letters)), *("##" + letter for letter in letters)]
        tok = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
        tok.normalizer = normalizers.BertNormalizer(lowercase=True)
        tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    elif kind == "bpe":
        tok = Tokenizer(models.BPE())
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet)
        tok.train_from_iterator(TEXTS, trainer)
    else:
        tok = Tokenizer(models.Unigram())
        tok.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=100, special_tokens=special, unk_token="[UNK]")
        tok.train_from_iterator(TEXTS, trainer)
    ends = [("[CLS]", tok.token_to_id("[CLS]")), ("[SEP]", tok.token_to_id("[SEP]"))]
    if kind == "wordpiece":
        pair, inputs = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", ["input_ids", "attention_mask", "token_type_ids"]
    else:
        pair, inputs = "[CLS]:0 $A:0 [SEP]:0 [SEP]:0 $B:0 [SEP]:0", ["input_ids", "attention_mask"]
    tok.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair=pair, special_tokens=ends)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tok, model_input_names=inputs,
                                                model_max_length=64, **SPECIAL)


@pytest.fixture(scope="session")
def tok():
    return fast_tokenizer("wordpiece")


def random_lm(kind: str, vocab: int = 120, dropout: float = 0.0, layers: int = 2) -> torch.nn.Module:
    """A small masked LM with random weights, hidden size 32, of an architecture that people adapt."""
    size = {"vocab_size": vocab, "hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2,
            "intermediate_size": 64, "max_position_embeddings": 66, "pad_token_id": 0}
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    ends = {"bos_token_id": 2, "eos_token_id": 3}
    more = {
        "bert": drop, "deberta": drop, "deberta-v1": drop, "roberta": drop | ends,
        "electra": drop | {"embedding_size": 16}, "albert": drop | {"embedding_size": 16},
        "mpnet": drop | {"pad_token_id": 1},
        "longformer": drop | ends | {"sep_token_id": 3, "attention_window": 16},
        "distilbert": {"hidden_dim": 64, "dropout": dropout, "attention_dropout": dropout},
        "modernbert": ends | {"embedding_dropout": dropout, "mlp_dropout": dropout,
                              "attention_dropout": dropout, "cls_token_id": 2, "sep_token_id": 3,
                              "reference_compile": False}}
    model_type = {"deberta": "deberta-v2", "deberta-v1": "deberta"}.get(kind, kind)
    config = transformers.CONFIG_MAPPING[model_type](**size | more[kind])
    torch.manual_seed(0)
    return transformers.AutoModelForMaskedLM.from_config(config)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy, on the CPU."""
    return {name: weight.to("cpu", copy=True) for name, weight in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def lm_folder(tmp_path, tok):
    """A Hugging Face folder with a small BERT and its tokenizer."""
    folder = tmp_path / "lm"
    random_lm("bert", len(tok), 0.1).save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder


# ---------------------------------------------------------------- data

def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def write_rows(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load_splits(folder: Path, tokenizer, **splits: list) -> Data:
    """A data set of these rows: train=[{"text": ..., "label": ...}, ...], ..."""
    for split, rows in splits.items():
        write_rows(folder / f"{split}.jsonl", rows)
    return data_prep.load(str(folder), tokenizer)


def corpus_of(folder: Path, tokenizer, *texts: str, **how: object) -> Split:
    """The texts of a file, one on each line."""
    (folder / "c.txt").write_text("\n".join(texts))
    return data_prep.load(str(folder / "c.txt"), tokenizer, **how).corpus


def all_of(pieces: Pieces) -> Batch:
    """One batch of all pieces."""
    return collate(pieces, np.arange(len(pieces)))


@pytest.fixture
def cls_folder(tmp_path):
    """A small labelled data set: train, dev and test."""
    labels = ["cat", "dog", "long", "short"]
    for split, n in (("train", 24), ("dev", 6), ("test", 9)):
        rows = [{"text": f"{TEXTS[i % 4]} {split} {i}", "label": labels[i % 4]} for i in range(n)]
        write_rows(tmp_path / "data" / f"{split}.jsonl", rows)
    return tmp_path / "data"


def squad(contexts: list[str], answers: list[str]) -> dict:
    """A SQuAD 1.1 file with one article (and an empty one) and one question a context."""
    paragraphs = []
    for i, (context, answer) in enumerate(zip(contexts, answers, strict=True)):
        found = {"text": answer, "answer_start": context.index(answer)}
        question = {"id": f"q{i}", "question": f"What is number {i}?", "answers": [found]}
        paragraphs.append({"context": context, "qas": [question]})
    return {"data": [{"title": "t", "paragraphs": paragraphs}, {"title": "none", "paragraphs": []}]}


@pytest.fixture
def qa_folder(tmp_path):
    """A small SQuAD-like data set with contexts long enough for several windows."""
    # Of five texts each, beginning with another one.
    contexts = [" ".join((TEXTS * 2)[i % 4:][:5]) for i in range(12)]
    for split, part in (("train", contexts), ("dev", contexts[:3]), ("test", contexts[:5])):
        answers = [["purred", "big ones", "many pieces"][i % 3] for i in range(len(part))]
        write_rows(tmp_path / f"qa/{split}.json", [squad(part, answers)])
    return tmp_path / "qa"
