"""The language model: opened by its name, asked for its hidden states, given the head of a task."""
import hashlib
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer
from transformers.utils import logging

from nmg import runs, toy
from nmg.data import Batch
from nmg.loop import autocast, device, to_device, torch_seed
from nmg.runs import UserError

# ---------------------------------------------------------------- by name

def open_lm(name: str, auto_class: type, **options: object):
    """What auto_class.from_pretrained makes of an LM: the embedded `tiny`, a folder, or a hub name. UserError
    where it fails, in one of many ways."""
    place = toy.TINY if name == "tiny" else Path(name)
    if (place / "policy.json").exists():
        raise UserError(f"--lm={name}: this is a policy, for pretrain.py --masker=sampled:{name}; an LM is "
                        "needed here")
    if (place / "started.json").exists() and not (place / "run.json").exists():
        raise UserError(f"--lm={name}: the run that makes it has not finished; start its command again")
    if place.exists() and not (place / "config.json").exists():
        raise UserError(f"--lm={name}: no config.json in it; allowed are 'tiny', a Hugging Face folder, or "
                        "a hub name")
    try:
        # Code that a model folder brings along is never run.
        return auto_class.from_pretrained(str(place), trust_remote_code=False, **options)
    except Exception as e:
        reason = str(e).strip().split("\n")[0][:300]
        here = "" if place.exists() else "no such folder here; "
        raise UserError(f"--lm={name}: cannot be opened: {here}{reason} (allowed: 'tiny', a Hugging Face "
                        "folder, or a hub name)") from e


def load_tokenizer(name: str):
    """The fast tokenizer of an LM, which knows words and character offsets. Raises UserError."""
    tokenizer = open_lm(name, AutoTokenizer)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UserError(f"--lm={name}: has only a slow tokenizer; a fast one (tokenizer.json) is needed")
    # What transformers makes of a folder without its files.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(f"--lm={name}: its tokenizer knows no words; tokenizer.json or the vocabulary is "
                        "needed")
    return tokenizer


def load_lm(name: str) -> torch.nn.Module:
    """A masked LM in fp32, from a folder or the hub. Says loudly when its MLM head is newly initialised."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, info = open_lm(name, AutoModelForMaskedLM, dtype=torch.float32, output_attentions=False,
                          output_loading_info=True)
    # Other names of the embeddings, and of the head's bias.
    tied = ("decoder.weight", "decoder.bias")
    new = [weight for weight in sorted(info["missing_keys"]) if not weight.endswith(tied)]
    if new:
        print(f"WARNING: {name} brings no weights for {', '.join(new)}: "
              "NEWLY INITIALISED, to be learned in pre-training")
    return model


def set_dropout(model: torch.nn.Module, p: float) -> None:
    """Sets every dropout rate of the model. Its config stays, so that fine-tuning uses the LM's own again."""
    if p >= 1:
        raise UserError(f"--dropout={p:g}: must be below 1")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = p
        # The rate of some attention is a number of its module.
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, p)


def max_len_of(model: torch.nn.Module, wanted: int, flag: str = "max_len") -> int:
    """The tokens that are wanted, or the LM's maximum where that is less, which is printed."""
    # Of LMs without a table of positions (relative, rotary): what they were trained on.
    most = getattr(model.config, "max_position_embeddings", 8192)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            # RoBERTa's positions begin behind its padding index.
            padding = -1 if module.padding_idx is None else module.padding_idx
            most = min(most, module.num_embeddings - padding - 1)
    if wanted > most:
        print(f"--{flag}={most} instead of {wanted}: this LM takes no longer text")
    return min(wanted, most)


def weights_of(lm: str) -> str | None:
    """sha256 of the weights in an LM's folder, which others may replace; None of `tiny` and of hub names."""
    if lm == "tiny":
        return None
    files = sorted([*Path(lm).glob("*.safetensors"), *Path(lm).glob("pytorch_model*.bin")])
    if not files:
        return None
    return hashlib.sha256("".join(map(runs.checksum, files)).encode()).hexdigest()


def save_lm(folder: Path, model: torch.nn.Module, tokenizer) -> None:
    """Writes a Hugging Face folder: an LM, or a model of a task, with its tokenizer."""
    with runs.full_disk(folder):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    # safetensors hides its files from all but their owner.
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)


# ---------------------------------------------------------------- as it is used

class LMReader:
    """What a masker gets as `lm`: the model as it is now, without dropout or gradients."""

    def __init__(self, model: torch.nn.Module):
        self.model = model

    def __call__(self, batch: Batch) -> torch.Tensor:
        """(B, L, H) hidden states"""
        return self.run(self.model.base_model, batch).last_hidden_state.float()

    def logits(self, batch: Batch) -> torch.Tensor:
        """(B, L, V) of the tokens that the LM would put in every place"""
        return self.run(self.model, batch).logits.float()

    @torch.no_grad()
    def run(self, module: torch.nn.Module, batch: Batch):
        training = self.model.training
        self.model.to(device()).eval()
        with autocast(self.model):
            output = module(**to_device(batch.tensors()))
        self.model.train(training)
        return output


def with_head(lm: torch.nn.Module, auto_class: type, seed: int, **config: object) -> torch.nn.Module:
    """A task model (an AutoModelFor... class) around a copy of the LM's encoder.

    Its head is fresh, and so is BERT's pooler, which a masked LM does not have. config: what the task changes
    in the LM's config, such as num_labels."""
    with torch.random.fork_rng(devices=[]):
        torch_seed(seed, "head")
        changed = type(lm.config).from_dict(lm.config.to_dict() | config)
        try:
            model = auto_class.from_config(changed, dtype=torch.float32, trust_remote_code=False)
        except ValueError as e:
            raise UserError(f"the LM is a {type(lm).__name__}: transformers has no model of its kind for "
                            f"this task ({auto_class.__name__})") from e
    model.base_model.load_state_dict(lm.base_model.state_dict(), strict=False)
    return model.to(lm.device)
