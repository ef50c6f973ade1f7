"""Steps that a GPU replays (support/recorded.py), with a stand-in for CUDA graphs; and how many operators a
step runs, each of them a launch or more on a GPU. Both on a CPU.

    PYTHONPATH=. python tests/test_recorded.py      # prints the counts, for as many layers as BERT-base has
"""
import contextlib

import numpy as np
import pytest
import torch
import transformers
from conftest import patch_devices, random_lm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionMaskInterface

import data_prep
import finetune_cls
import finetune_qa
import maskers
import pretrain
from nmg import loop
from support import data, devices

# ---------------------------------------------------------------- a CUDA graph on the CPU

class Tape(TorchDispatchMode):
    """What a CUDA graph does: a replay runs the recorded operators on the same memory, with the numbers that
    Python had then. Recording changes no weights."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.replays = 0
        self.before = {}        # what is written to, and what it held

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info and argument.alias_info.is_write:
                for tensor in tree_leaves(value):
                    self.before.setdefault(id(tensor), (tensor, tensor.clone()))
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self):
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                # Views, and what is written in place, are in that memory already.
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextlib.contextmanager
def recording(tape, pool, stream):
    drawn = torch.get_rng_state()
    with tape:
        yield
    torch.set_rng_state(drawn)
    with torch.no_grad():
        for tensor, value in tape.before.values():
            tensor.copy_(value)


class Stream:
    def wait_stream(self, other):
        pass


@pytest.fixture
def tapes(monkeypatch):
    """Steps are recorded; the stand-ins of their graphs."""
    made = []

    def new_tape():
        made.append(Tape())
        return made[-1]

    patch_devices(monkeypatch, "may_record", lambda: True)
    for name, stand_in in {"Stream": Stream, "current_stream": Stream, "stream": contextlib.nullcontext,
                           "graph_pool_handle": int, "CUDAGraph": new_tape, "graph": recording}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return made


def not_recorded(monkeypatch, padding):
    """Steps are not recorded, and their batches are padded to a multiple of some tokens."""
    patch_devices(monkeypatch, "may_record", lambda: False)
    monkeypatch.setattr(data, "padded_to", lambda: padding)
    monkeypatch.setattr(pretrain, "padded_to", lambda: padding)


# ---------------------------------------------------------------- recorded and not

def trained(kind, stage, folder, tok, **training):
    """The weights after some steps of a stage with dropout, on pieces of 5 to 48 tokens."""
    prepared = data_prep.load(str(folder), tok)
    lm = random_lm(kind, len(tok), dropout=0.1)
    training = {"lr": 1e-3, "batch_size": 4, "seed": 1} | training
    if stage is pretrain:
        pretrain.pretrain(lm, data.blocks(prepared.corpus, 48), maskers.random, epochs=3, **training)
        return lm.state_dict()
    weights = stage.finetune(lm, stage.pieces_of(prepared["train"], 48), epochs=3, **training).state_dict()
    # Start and end do not depend on it, so that its gradient is nothing but rounding.
    weights.pop("qa_outputs.bias", None)
    return weights


def assert_close(found, wanted, atol):
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, atol=atol, rtol=0, msg=name)


@pytest.mark.parametrize(("kind", "stage"), [
    ("bert", pretrain), ("modernbert", pretrain), ("bert", finetune_cls), ("distilbert", finetune_qa)])
def test_replayed_steps_are_those_of_fit(kind, stage, cls_folder, qa_folder, tok, tapes, monkeypatch):
    """With dropout, a learning rate that falls, several shapes, gradients that are clipped and some that are
    not (which depend on the number of labels)."""
    folder = qa_folder if stage is finetune_qa else cls_folder
    if kind == "bert":
        name = {pretrain: "mlm_loss", finetune_cls: "loss_fn"}[stage]
        whole = getattr(stage, name)
        monkeypatch.setattr(stage, name, lambda model, tensors: 0.05 * whole(model, tensors))
    replayed = trained(kind, stage, folder, tok)
    # The first replay of a tape takes the place of the step that it recorded.
    assert sum(tape.replays for tape in tapes) >= 8 and max(tape.replays for tape in tapes) >= 4
    not_recorded(monkeypatch, 32)
    assert_close(replayed, trained(kind, stage, folder, tok), 1e-5)


def test_what_is_added_to_a_batch_changes_nothing(cls_folder, tok, monkeypatch):
    """But dropout, which depends on shapes. Batches are never longer than the longest of all pieces."""
    def without_dropout(padding):
        not_recorded(monkeypatch, padding)
        pieces = data.blocks(data_prep.load(str(cls_folder), tok).corpus, 48)
        lm = random_lm("roberta", len(tok))
        pretrain.pretrain(lm, pieces, maskers.random, lr=1e-3, batch_size=4)
        shapes = [data.collate(pieces, np.array([i])).input_ids.shape[1] for i in range(len(pieces))]
        return lm.state_dict() | {"loss": torch.tensor(pretrain.held_out_loss(lm, pieces))}, shapes

    plain, lengths = without_dropout(1)
    padded, padded_lengths = without_dropout(32)
    assert_close(padded, plain, 1e-5)
    assert len(set(lengths)) > 4 and set(padded_lengths) == {32, max(lengths)}


@pytest.mark.parametrize(("precision", "rows"), [(torch.float32, 2), (torch.float16, None)])
def test_micro_batches_and_fp16_are_not_recorded(precision, rows, cls_folder, tok, tapes, monkeypatch):
    patch_devices(monkeypatch, "precision_of", lambda model: precision)
    trained("bert", finetune_cls, cls_folder, tok, micro_batch=rows)
    assert not tapes


def test_recording_is_off_until_it_has_run_on_a_gpu(monkeypatch):
    patch_devices(monkeypatch, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(devices, "FAST", True)
    assert not devices.may_record() and devices.padded_to() == 1
    monkeypatch.setattr(devices, "RECORD", True)
    assert devices.may_record() and devices.padded_to() == 32
    monkeypatch.setattr(devices, "FAST", False)
    assert not devices.may_record()


def test_recorded_steps_resume(cls_folder, tok, tapes, monkeypatch, tmp_path):
    """To the same weights: learning rates, which are tensors there, and AdamW's settings are set anew."""
    monkeypatch.setattr(loop, "CHECKPOINT_MINUTES", 0)
    whole = trained("bert", pretrain, cls_folder, tok)
    file, made = tmp_path / "checkpoint.pt", loop.save_checkpoint

    def killed(file, trained, done, seconds):
        made(file, trained, done, seconds)
        if done == 9:
            raise KeyboardInterrupt

    monkeypatch.setattr(loop, "save_checkpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        trained("bert", pretrain, cls_folder, tok, checkpoint=file)
    assert_close(trained("bert", pretrain, cls_folder, tok, checkpoint=file), whole, 1e-5)


# ---------------------------------------------------------------- operators

class Operators(TorchDispatchMode):
    """Counts the operators that compute something, and how often the CPU asks for a number."""
    NOTHING = ("empty", "empty_like", "new_empty", "empty_strided", "detach", "_local_scalar_dense")

    def __init__(self):
        super().__init__()
        self.count = np.zeros(2, int)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        view = any(value.alias_info and not value.alias_info.is_write for value in func._schema.returns)
        self.count += (not view and name not in self.NOTHING, name == "_local_scalar_dense")
        return func(*args, **(kwargs or {}))


def counts():
    """Of a padded MLM step, of the end of `fit`, and of a batch that is scored: (operators, numbers that the
    CPU asks for). A BERT of 12 layers in bf16."""
    size = {"vocab_size": 50, "hidden_size": 24, "num_attention_heads": 12, "intermediate_size": 24}
    lm = transformers.BertForMaskedLM(transformers.BertConfig(**size))
    inputs = {"input_ids": torch.ones(16, 8, dtype=torch.int64),
              "attention_mask": torch.ones(16, 8, dtype=torch.int64).tril(7)}
    tensors = inputs | {"masked_at": torch.arange(20), "labels": torch.arange(20)}
    found = []
    operators = Operators()

    def make_batch(step, epoch, indices):
        found.append(operators.count.copy())
        return tensors

    with operators:
        loop.fit(lm, np.full(16, 8), make_batch, pretrain.mlm_loss, epochs=3, batch_size=16, lr=1e-5,
                 after_step=lambda done: found.append(operators.count.copy()))
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**size)).eval()
    scoring = Operators()
    with torch.no_grad(), scoring:
        with devices.autocast(model):
            output = model(**inputs)
        loop.check_finite(output.logits, "the predictions")
        output.logits.float().log_softmax(-1)
    # The last step: the first one also makes AdamW's moments.
    before, after = found[-2:]
    return {"step": after - before, "end": operators.count - after, "scoring": scoring.count}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """In bf16, with the masks of a GPU, until the next test begins."""
    with monkeypatch.context() as gpu:
        patch_devices(gpu, "device", lambda: torch.device("cuda"))
        devices.use_fast_path(True)
    patch_devices(monkeypatch, "precision_of", lambda model: torch.bfloat16)


def test_a_step_asks_for_no_number_and_its_end_for_one(as_on_a_gpu):
    found = counts()
    step, end, scoring = found["step"], found["end"], found["scoring"]
    assert [step[1], end[1], scoring[1]] == [0, 1, 1]
    # Five operators for each of 202 weights would be 1,010.
    assert end[0] < 220


def test_a_replay_is_one_launch_and_a_copy_of_the_batch(as_on_a_gpu, tapes, monkeypatch):
    monkeypatch.setattr(Tape, "replay", lambda tape: None)
    # Four tensors of the batch, and the learning rate.
    assert tuple(counts()["step"]) == (5, 0)
    assert len(tapes) == 1


if __name__ == "__main__":
    devices.precision_of = lambda model: torch.bfloat16
    AttentionMaskInterface.register("sdpa", devices.mask_of_padding)
    for part, (operators, numbers) in counts().items():
        print(f"{part}: {operators} operators, {numbers} numbers that the CPU waits for")
