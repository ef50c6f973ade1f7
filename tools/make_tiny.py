"""Makes the embedded LM: a small BERT, pre-trained on the toy world's general text in about a minute.

    python -m tools.make_tiny --out=my_tiny         # without --out it replaces support/tiny
"""
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import BertConfig, BertForMaskedLM

import data_prep
import maskers
from pretrain import held_out_loss, pretrain
from support import devices, runs, toy
from support.data import Pieces, blocks


@dataclass
class Config:
    out: str = str(toy.TINY)        # the Hugging Face folder


def untrained() -> BertForMaskedLM:
    """1 layer, 128 wide, 4 heads, no dropout; always the same weights."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(toy.tokenizer()), hidden_size=128, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=512, max_position_embeddings=128, initializer_range=0.06, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0)
    model = BertForMaskedLM(config)
    # Words of one kind get a common offset: an LM that has read much more text groups them in this way.
    embeddings = model.bert.embeddings.word_embeddings.weight
    tokenizer = toy.tokenizer()
    with torch.no_grad():
        for words in toy.KINDS.values():
            embeddings[tokenizer.convert_tokens_to_ids(words)] += 0.2 * torch.randn(config.hidden_size)
    return model


@torch.no_grad()
def introduce_new_names(model: BertForMaskedLM) -> None:
    """Gives the names of the tasks, which training has only pushed away, the mean embedding of the old names
    of their family, and a little noise: the LM knows what kind of words they are, and nothing else."""
    torch.manual_seed(1)
    embeddings, bias = model.bert.embeddings.word_embeddings.weight, model.cls.predictions.bias
    for names in toy.NAMES:
        ids = toy.tokenizer().convert_tokens_to_ids(names)
        new, old = ids[:toy.N_TASK], ids[toy.N_TASK:]
        embeddings[new] = embeddings[old].mean(0) + 0.02 * torch.randn(len(new), embeddings.shape[1])
        bias[new] = bias[old].mean()


def general_blocks(seed: int) -> Pieces:
    """The general text, prepared like any corpus of plain text."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"general{seed}.txt"
        file.write_text("\n".join(toy.general_text(seed)))
        return blocks(data_prep.load(str(file), toy.tokenizer()).corpus, 128)


def main(cfg: Config) -> None:
    if Path(cfg.out) != toy.TINY and os.path.lexists(cfg.out):
        raise runs.UserError(f"--out={cfg.out}: is there already; choose another folder")
    devices.use_fast_path(False)
    model = untrained()
    seconds = pretrain(model, general_blocks(0), maskers.random, p=0.2, epochs=4, lr=2e-3,
                       batch_size=32)
    introduce_new_names(model)
    held_out = held_out_loss(model, general_blocks(1))
    model.save_pretrained(cfg.out)
    toy.tokenizer().save_pretrained(cfg.out)
    print(f"saved {cfg.out}: loss {held_out:.3f} on other text of this world, {seconds:.0f} s")


if __name__ == "__main__":
    runs.start(main, Config)
