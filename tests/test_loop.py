"""The training loop against a naive one, checkpoints, shared batches; the fast path against the formulas."""
import itertools
import math
import os
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import fork, patch_devices, random_lm, ranks, same, wait_for, weights
from torch.utils._python_dispatch import TorchDispatchMode

import pretrain
from nmg import loop
from support import checkpoints, devices, models
from support.runs import UserError

# ---------------------------------------------------------------- a tiny task: the class of each token

class Tagger(torch.nn.Module):
    """Token ids (B, L) -> logits (B, L, 5)."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(30, 8)
        self.dropout = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(8, 5)
        # As the pooler of BERT: no loss ever reaches it.
        self.unused = torch.nn.Linear(8, 8)

    def forward(self, input_ids):
        return self.head(self.dropout(self.embed(input_ids)).tanh())


def tagger_loss(model, tensors):
    logits = model(tensors["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), tensors["labels"].flatten(), reduction="sum")


# Ids (21, 6) and labels (21, 6), most of them none (-100); piece m has m % 5 labels.
RNG = np.random.default_rng(0)
IDS, LABELS = torch.from_numpy(RNG.integers(0, 30, (21, 6))), torch.from_numpy(RNG.integers(0, 5, (21, 6)))
LABELS[torch.arange(6) >= torch.arange(21)[:, None] % 5] = -100
LENGTH = np.full(len(IDS), 6)


def make_batch(epoch, indices):
    return {"input_ids": IDS[indices], "labels": LABELS[indices]}


def fit(model, make_batch=make_batch, loss_fn=tagger_loss, **changed):
    """loop.fit on the tiny task: 3 epochs of 6 steps, the last of which has one piece."""
    settings = {"epochs": 3, "batch_size": 4, "lr": 0.01, "seed": 5} | changed
    return loop.fit(model, LENGTH, make_batch, loss_fn, **settings)


@pytest.mark.parametrize(("max_steps", "steps", "warmup", "decay"),
                         [(None, 18, 0.0, 0.0), (17, 17, 0.2, 0.0), (99, 18, 0.1, 0.1)])
def test_the_optimiser_is_that_of_the_paper(max_steps, steps, warmup, decay):
    """AdamW, linear decay to 0, norm clipped to 1, in the paper without warm-up and weight decay: torch's and
    Hugging Face's own, on the mean loss of the labels."""
    ours, theirs = Tagger(), Tagger()
    for model in (ours, theirs):
        model.head.weight.data.mul_(3)      # for gradients that are clipped, and some that are not
    fit(ours, max_steps=max_steps, warmup=warmup, weight_decay=decay)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=decay)
    rising = math.ceil(warmup * steps)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, rising, steps)
    norms = []
    for _, indices in itertools.islice(loop.batches(LENGTH, 4, 3, seed=5), steps):
        optimizer.zero_grad()
        logits, labels = theirs(IDS[indices]), LABELS[indices]
        loss_sum = F.cross_entropy(logits[labels != -100], labels[labels != -100], reduction="sum")
        mean = loss_sum / max(1, (labels != -100).sum())
        mean.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0).item())
        optimizer.step()
        schedule.step()
    # One batch has no labels.
    assert max(norms) > 1 > sorted(norms)[1] and min(norms) == 0
    # A GPU adds in another order than a CPU, and Adam divides by small gradients.
    tolerance = 1e-5 if devices.device().type == "cpu" else 1e-3
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=tolerance, rtol=0)


def test_every_step_has_a_dropout_of_its_own():
    """Different from step to step and with the seed, whatever else draws from torch's generator."""
    def drawn(seed, noise):
        def loss_fn(model, tensors):
            assert model.training
            draws.append(torch.rand(()).item())
            return tagger_loss(model, tensors)

        def noisy_batch(epoch, indices):
            torch.rand(noise)
            return make_batch(epoch, indices)

        draws = []
        fit(Tagger().eval(), noisy_batch, loss_fn, seed=seed)
        return draws

    draws = drawn(0, noise=0)
    assert len(set(draws)) == 18
    assert draws == drawn(0, noise=3)
    assert not set(draws) & set(drawn(1, noise=0))


@pytest.mark.parametrize(("epochs", "said"), [
    (4, "MLM: the loss after step 20 of 24 became infinite or NaN"),
    (3, "MLM: the weights embed.weight became infinite or NaN"),
])
def test_a_loss_that_is_not_finite_ends_the_run(epochs, said):
    with pytest.raises(UserError, match=said):
        fit(Tagger(), loss_fn=lambda *args: tagger_loss(*args) * np.nan, epochs=epochs, desc="MLM")


# ---------------------------------------------------------------- checkpoints

class Killed(Exception):
    pass


def stopping_after(steps):
    """make_batch that raises once it has made so many batches."""
    return Mock(wraps=make_batch, side_effect=[DEFAULT] * steps + [Killed])


@pytest.mark.parametrize("stop", [0, 7, 17])
def test_a_checkpoint_resumes_to_the_same_weights(stop, tmp_path, monkeypatch, capsys):
    """Interrupted after any number of steps, dropout included. What the killed process spent counts."""
    monkeypatch.setattr(loop, "CHECKPOINT_MINUTES", 0)
    whole, file = Tagger(dropout=0.3), tmp_path / "checkpoint.pt"
    with monkeypatch.context() as short:
        # A short training writes none.
        short.setattr(loop, "CHECKPOINT_MINUTES", 5)
        fit(whole, checkpoint=file)
    assert not file.exists()
    with pytest.raises(Killed):
        fit(Tagger(dropout=0.3), stopping_after(stop), checkpoint=file)
    assert file.exists() == (stop > 0)
    spent = 0
    if stop:
        state, spent = torch.load(file, weights_only=True), 1000
        assert 0 < state["seconds"] < 100
        torch.save(state | {"seconds": 1000.0}, file)
    resumed = Tagger(dropout=0.3)
    seconds = fit(resumed, stopping_after(18 - stop), checkpoint=file)
    assert spent < seconds < spent + 100
    assert spent < torch.load(file, weights_only=True)["seconds"] < spent + 100
    assert same(weights(whole), weights(resumed))
    assert (f"going on after step {stop} of 18" in capsys.readouterr().out) == (stop > 0)


def test_a_damaged_checkpoint_is_refused_or_the_same(tmp_path):
    """Cut short, or with a flipped bit, wherever it is; most of the file are weights."""
    file, model = tmp_path / "checkpoint.pt", Tagger()
    checkpoints.save_checkpoint(file, {"model": model}, 3, 1.0)
    whole, refused = file.read_bytes(), 0
    contents = [whole[:left] for left in (0, 1, 10, 1000, -100)]
    for bit in np.random.default_rng(0).integers(8 * len(whole), size=40):
        contents.append(bytearray(whole))
        contents[-1][bit // 8] ^= 1 << bit % 8
    for content in contents:
        file.write_bytes(content)
        loaded = Tagger()
        try:
            assert checkpoints.load_checkpoint(file, {"model": loaded}) == (3, 1.0)
            assert same(weights(model), weights(loaded))
        except UserError as e:
            assert "checkpoint.pt: cannot be read (cut short, damaged" in str(e)
            refused += 1
    assert refused > 25


def test_what_is_no_fault_of_a_checkpoint(tmp_path):
    """A scaler of fp16 that another device did not need, and too little memory."""
    file, scaler = tmp_path / "checkpoint.pt", torch.amp.GradScaler
    checkpoints.save_checkpoint(file, {"scaler": scaler("cpu", enabled=False)}, 3, 1.0)
    assert checkpoints.load_checkpoint(file, {"scaler": scaler("cpu", enabled=True)}) == (3, 1.0)
    with pytest.raises(RuntimeError, match="out of memory"), checkpoints.loaded_state(file):
        raise RuntimeError("CUDA out of memory")


# ---------------------------------------------------------------- micro-batches, fp16

@pytest.mark.parametrize("rows", [1, 3, 4, 99])
def test_micro_batches_follow_the_gradient_of_the_batch(rows):
    """Also where the parts have different numbers of labels, or none."""
    whole, parted = Tagger(), Tagger()
    forward_rows = []

    def loss_fn(model, tensors):
        forward_rows.append(len(tensors["labels"]))
        return tagger_loss(model, tensors)

    fit(whole)
    fit(parted, loss_fn=loss_fn, micro_batch=rows)
    assert max(forward_rows) == min(rows, 4) and sum(forward_rows) == 3 * len(IDS)
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(parted)[name], weight, atol=1e-6, rtol=0)


def test_fp16_trains_nearly_as_fp32(monkeypatch):
    """Products are in fp16, weights stay in fp32. The gradients of these losses, a millionth of the usual
    ones, would be 0 in fp16 without the scaler."""
    plain, half = Tagger(), Tagger()
    fit(plain, loss_fn=lambda model, tensors: 1e-6 * tagger_loss(model, tensors))
    patch_devices(monkeypatch, "precision_of", lambda model: torch.float16)
    dtypes = set()
    half.head.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    fit(half, loss_fn=lambda model, tensors: 1e-6 * tagger_loss(model, tensors))
    assert dtypes == {torch.float16} and {weight.dtype for weight in half.parameters()} == {torch.float32}
    moved = weights(plain)["head.weight"] - weights(Tagger())["head.weight"]
    error = weights(plain)["head.weight"] - weights(half)["head.weight"]
    assert error.norm() < 0.05 * moved.norm()


def test_a_step_whose_gradient_overflows_in_fp16_is_left_out(monkeypatch):
    """The next ones are scaled by less."""
    patch_devices(monkeypatch, "precision_of", lambda model: torch.float16)
    model, seen = Tagger(), []

    def loss_fn(model, tensors):
        seen.append(model.head.weight.detach().clone())
        return 1e4 * tagger_loss(model, tensors)

    fit(model, loss_fn=loss_fn)
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[-1])
    assert model.head.weight.isfinite().all()


def shared_training(env, folder):
    """One of two processes that share the batches of the tiny task."""
    os.environ.update(env)
    torch.set_num_threads(1)
    model, parted = Tagger(), Tagger()
    fit(model, distributed=True)
    fit(parted, distributed=True, batch_size=3, micro_batch=1)
    torch.save([weights(model), weights(parted)], folder / f"{env['RANK']}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_batch_shared_by_processes(tmp_path):
    """Two processes end with the weights of one, also where one of them has fewer labels, fewer micro-batches
    or no piece at all."""
    labels = (LABELS != -100).sum(1)
    plan = [indices for _, indices in loop.batches(LENGTH, 4, 3, seed=5)]
    assert any(labels[indices[::2]].sum() != labels[indices[1::2]].sum() for indices in plan)
    assert any(len(indices) == 1 and labels[indices].sum() > 0 for indices in plan)
    alone, by_three = Tagger(), Tagger()
    fit(alone)
    fit(by_three, batch_size=3)
    assert wait_for([fork(shared_training, env, tmp_path) for env in ranks(2)]) == [0, 0]
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(found, [weights(alone), weights(by_three)], atol=1e-5, rtol=0)


# ---------------------------------------------------------------- batches, and a head for a task

def test_batches():
    """Every piece once an epoch, beside others of similar length; anew each epoch and with each seed."""
    length = np.random.default_rng(0).integers(3, 90, 257)
    plan = list(loop.batches(length, 8, 3, seed=1))
    means = []
    for epoch in range(3):
        of_epoch = [indices for e, indices in plan if e == epoch]
        assert len(of_epoch) == 33
        assert sorted(np.concatenate(of_epoch)) == list(range(257))
        means.append([length[indices].mean() for indices in of_epoch])
        # Sorted by length it would be 0.999.
        assert abs(np.corrcoef(np.arange(33), means[-1])[0, 1]) < 0.6
    assert means[0] != means[1]
    padded = sum(length[indices].max() * len(indices) for _, indices in plan)
    assert padded < 1.1 * 3 * length.sum()
    other = next(loop.batches(length, 8, 3, seed=2))[1]
    assert plan[0][1].tolist() != other.tolist()


def test_evaluation_batches_hold_so_many_tokens_longest_first():
    """A piece that is longer than a batch comes alone."""
    length = np.append(np.random.default_rng(0).integers(1, 600, 500), 5000)
    batches = list(loop.length_batches(length, tokens=2048))
    order = np.concatenate(batches)
    assert sorted(order) == list(range(501))
    assert (np.diff(length[order]) <= 0).all()
    assert batches[0].tolist() == [500]
    assert max(length[indices].max() * len(indices) for indices in batches[1:]) <= 2048


def test_a_head_depends_on_the_seed_alone():
    """Not on the size of the encoder, which is a copy, nor on torch's generator, which stays where it is."""
    heads = []
    for layers, seed in ((1, 0), (2, 0), (2, 1)):
        lm = random_lm("bert", layers=layers)
        torch.manual_seed(1 + layers)
        model = models.with_head(lm, transformers.AutoModelForSequenceClassification, seed, num_labels=3)
        drawn = torch.rand(())
        torch.manual_seed(1 + layers)
        assert torch.equal(drawn, torch.rand(()))
        heads.append(weights(model.classifier) | weights(model.bert.pooler.dense))
        assert model.classifier.weight.shape == (3, 32)
        for name, weight in lm.base_model.state_dict().items():
            copy = model.base_model.state_dict()[name]
            assert torch.equal(weight, copy) and weight.data_ptr() != copy.data_ptr()
    assert same(heads[0], heads[1]) and not same(heads[1], heads[2])


# ---------------------------------------------------------------- the fast path

@pytest.mark.parametrize(("fast", "attention"), [(True, "eager"), (False, "sdpa")])
def test_plain_attention_on_a_cpu(fast, attention):
    """In LMs and in what is made of them; scores hardly change."""
    devices.use_fast_path(fast)
    lm = models.load_lm("tiny")
    model = models.with_head(lm, transformers.AutoModelForSequenceClassification, 0, num_labels=3)
    ids = torch.arange(40).view(2, 20)
    mask = (ids < 35).long()
    states = []
    for encoder in (lm.base_model, model.base_model):
        assert encoder.config._attn_implementation == attention
        states.append(encoder.eval()(input_ids=ids, attention_mask=mask).last_hidden_state[mask == 1])
    lm.set_attn_implementation("sdpa")
    states.append(lm.base_model(input_ids=ids, attention_mask=mask).last_hidden_state[mask == 1])
    assert torch.equal(*states[:2])
    torch.testing.assert_close(*states[1:], rtol=0, atol=1e-5)


AVX = {"avx512_bf16": True}
AMX = AVX | {"amx_bf16": True}


@pytest.mark.parametrize(("kind", "fast", "processor", "half"), [
    ("bert", True, {"cpu_name": "Intel Xeon"} | AMX, True),
    ("bert", True, {"cpu_name": "Intel Xeon"} | AVX, False),
    ("bert", True, {"cpu_name": "AMD EPYC"} | AVX, True),
    ("bert", True, {"cpu_name": "AMD EPYC"}, False),
    ("bert", False, {"cpu_name": "AMD EPYC"} | AVX, False),
    ("deberta", True, {"cpu_name": "AMD EPYC"} | AVX, True),
    ("deberta-v1", True, {"cpu_name": "AMD EPYC"} | AVX, False),
])
def test_products_are_in_bf16_on_the_fast_path_where_that_is_faster(kind, fast, processor, half, monkeypatch):
    monkeypatch.undo()
    # A GPU without native bf16 computes in fp16 instead, which another test is about.
    patch_devices(monkeypatch, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor)
    devices.use_fast_path(fast)
    with devices.autocast(random_lm(kind)):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.bfloat16 if half else torch.float32)


def padded_ids():
    """Four rows of 30 tokens, one of them with padding, and the positions and ids of masked tokens."""
    ids = torch.randint(5, 40, (4, 30), generator=torch.Generator().manual_seed(0))
    real = torch.ones_like(ids)
    real[1, 20:] = 0
    at = torch.arange(3, 110, 7)
    at = at[real.flatten()[at] == 1]
    return {"input_ids": ids, "attention_mask": real, "masked_at": at, "labels": ids.flatten()[at]}


class AskedNumbers(TorchDispatchMode):
    """Counts how often the CPU asks for a number."""
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ == "_local_scalar_dense"
        return func(*args, **(kwargs or {}))


def test_a_step_asks_for_no_number_and_its_end_for_one(monkeypatch):
    """An MLM step, and the end of `fit`, in bf16, with the attention masks of a GPU."""
    with monkeypatch.context() as gpu:
        patch_devices(gpu, "device", lambda: torch.device("cuda"))
        devices.use_fast_path(True)
    patch_devices(monkeypatch, "precision_of", lambda model: torch.bfloat16)
    asked, found = AskedNumbers(), []

    def make_batch(epoch, indices):
        found.append(asked.count)
        return padded_ids()

    with asked:
        loop.fit(random_lm("bert"), np.full(4, 30), make_batch, pretrain.mlm_loss, epochs=3, batch_size=4,
                 lr=1e-5, after_step=lambda done: found.append(asked.count))
    before, after = found[-2:]
    assert after == before and asked.count == after + 1
