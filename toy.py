"""A toy world that needs no download: made-up text, a tiny BERT, and two tasks in which WHAT is masked matters.

There are six classes of things. A *name* ("veluna") belongs to one class and keeps company with the *attributes*
("dorem") of that class; all other words are *fillers* ("tas") and tell nothing. Old names make up the general text;
240 new names make up the task. A context of the task's unlabelled corpus holds one new name and two attributes:

    {"text": "bor tel vam dorem nis, kal veluna ser pon lir miral dun ...", "doc": 17}

but a labelled sentence holds the name among fillers alone, and train, dev and test share no name:

    {"text": "sum, veluna tor bal mel fir das kon.", "label": "bird", "doc": 17}

So the test can be solved only by a LM that has learned from the corpus which attributes go with each test name, and a
masked token teaches that only if it is a name or an attribute (predictable from the other), not if it is a filler.
"""
import random

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

CLASSES = ["bird", "fish", "tree", "stone", "tool", "star"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
QUESTION = "which one is {}?"
C, V, END = "bdfklmnrstvz", "aeiou", "lmnrs"  # letters of the made-up language


def make(pattern: list[str], n: int, seed: int) -> list[str]:
    """n unique words, one letter drawn from each string of the pattern. The patterns differ in length, so kinds share no word."""
    rng, out = random.Random(seed), {}
    while len(out) < n:
        out["".join(map(rng.choice, pattern))] = None
    return list(out)


FILLERS = make([C, V, END], 60, 1)  # "tas"
ATTRIBUTES = make([C, V, C, V, END], 60, 2)  # "dorem"; word i goes with class i % 6, here and below
NAMES = make([C, V, C, V, C, V], 300, 3)  # "veluna"
NEW, OLD = NAMES[:240], NAMES[240:]  # of the tasks, of the general text
SPLITS = {"train": range(120), "dev": range(120, 144), "test": range(144, 240)}  # new names, no name in two splits


def attributes(rng: random.Random, i: int, n: int) -> list[str]:
    """n different attributes of the class of name i."""
    return rng.sample(ATTRIBUTES[i % len(CLASSES) :: len(CLASSES)], n)


def sentence(rng: random.Random, words: list[str], n: int) -> str:
    """A sentence of n words: the given ones in random places, fillers elsewhere, one comma and the final period."""
    out = words + rng.choices(FILLERS, k=n - len(words))
    rng.shuffle(out)
    out[rng.randrange(n - 1)] += ","
    return " ".join(out) + "."


def general(seed: int = 0) -> list[str]:
    """Text for the tiny LM's own pre-training: old names, each with two to eight attributes of its class; no new name."""
    rng = random.Random(f"general{seed}")
    return [sentence(rng, [OLD[i % 60], *attributes(rng, i % 60, rng.randint(2, 8))], rng.randint(12, 18)) for i in range(24000)]


def corpus(rng: random.Random, per_name: int = 16) -> list[dict]:
    """Unlabelled contexts of 10 words, one new name and two attributes each."""
    return [{"text": sentence(rng, [NEW[i], *attributes(rng, i, 2)], 10), "doc": i} for i in range(240) for _ in range(per_name)]


def cls(seed: int = 0) -> dict[str, list[dict]]:
    """Classification: say the class of the only name. {"corpus", "train", "dev", "test"}; doc = index of the name."""
    rng, n = random.Random(f"cls{seed}"), {"train": 10, "dev": 10, "test": 10}  # sentences a name
    out = {"corpus": corpus(rng)}
    for split, docs in SPLITS.items():
        out[split] = [{"text": sentence(rng, [NEW[i]], 8), "label": CLASSES[i % 6], "doc": i} for i in docs for _ in range(n[split])]
    return out


def qa(seed: int = 0) -> dict[str, list[dict]]:
    """Extractive question answering: three names of different classes in a context, "which one is <attribute>?".

    A doc is a group of three names (name i is in doc i // 3): {"text", "doc", "qas": [{"id", "question", "answers":
    [{"text", "start" (in characters)}]}]}, in "corpus" {"text", "doc"} only. Attributes of the corpus tell the answer.
    """
    rng = random.Random(f"qa{seed}")
    out = {"corpus": [{**r, "doc": r["doc"] // 3} for r in corpus(rng)]}
    for split, docs in SPLITS.items():
        out[split] = []
        for doc in range(docs[0] // 3, docs[-1] // 3 + 1):
            for j in range(10):
                names = NEW[3 * doc : 3 * doc + 3]
                text = sentence(rng, names, 12)
                qas = [{"id": f"{split}-{doc}-{j}-{k}", "question": QUESTION.format(*attributes(rng, 3 * doc + k, 1)),
                        "answers": [{"text": name, "start": text.index(name)}]} for k, name in enumerate(names)]
                out[split].append({"text": text, "doc": doc, "qas": qas})
    return out


def tokenizer() -> PreTrainedTokenizerFast:
    """Lower-cased WordPiece with BERT's five special tokens; each word of the world is one token, any other is spelled."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*SPECIAL, *".,?", *letters, *("##" + x for x in letters), "which", "one", "is", *FILLERS, *ATTRIBUTES, *NAMES]
    vocab = {w: i for i, w in enumerate(words)}
    tok = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tok.normalizer = normalizers.BertNormalizer(lowercase=True)
    tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tok.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    tok.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, model_max_length=128, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_input_names=["input_ids", "token_type_ids", "attention_mask"])


def blank() -> BertForMaskedLM:
    """The tiny LM with fresh weights (always the same ones): 2 layers, 128 wide, 4 heads, no dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertForMaskedLM(BertConfig(
            vocab_size=len(tokenizer()), hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512,
            max_position_embeddings=128, initializer_range=0.06, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)).eval()


def informative() -> np.ndarray:
    """bool (V,): True for the token ids of names and attributes, the words that teach something when masked."""
    table = np.zeros(len(tokenizer()), dtype=bool)
    table[tokenizer().convert_tokens_to_ids(ATTRIBUTES + NAMES)] = True
    return table
