"""A toy world that needs no download: made-up text, and two tasks in which WHAT is masked matters.

    python -m tools.toy_compare                  # test accuracy after each way of masking, and a picture

There are six classes of things. A *name* ("tanumu") belongs to one class and keeps company with the
*attributes* ("futor") of that class; all other words are *fillers* ("nas") and tell nothing. Old names
make up the general text that the embedded LM has seen (`tiny/`, made by tools/make_tiny.py), 240 new names
make up the tasks. A context of a task's unlabelled corpus holds one new name and two of its attributes:

    {"text": "nas susus ser tanumu, mos lar mil bal tom futor.", "doc": 17}

but a labelled sentence holds the name among fillers alone, and train, dev and test share no name:

    {"text": "mus vir tom tanumu, rir sil kar nel.", "label": "star", "doc": 17}

So only an LM that learned from the corpus which attributes go with a test name can tell its class. A masked
token teaches that if it is the name or an attribute, predictable from the other two, and not if it is a
filler; with all three masked at once nothing is left to predict from, so few tokens should be masked (p =
0.05: one per context).
"""
import functools
import random
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

# The embedded LM: a Hugging Face folder. `--lm=tiny` means this one.
TINY = Path(__file__).resolve().parent / "tiny"

CLASSES = ["bird", "fish", "tree", "stone", "tool", "star"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CONSONANTS = "bdfklmnrstvz"
VOWELS = "aeiou"
ENDINGS = "lmnrs"


def make_words(pattern: list[str], n: int, seed: int) -> list[str]:
    """n different words, one letter drawn from each string of the pattern."""
    rng = random.Random(seed)
    words = {}
    while len(words) < n:
        words["".join(map(rng.choice, pattern))] = None
    return list(words)


# The patterns differ in length, so no word is of two kinds. Attribute and name i belong to class i % 6.
FILLERS = make_words([CONSONANTS, VOWELS, ENDINGS], 60, 1)
ATTRIBUTES = make_words([CONSONANTS, VOWELS, CONSONANTS, VOWELS, ENDINGS], 60, 2)
NAMES = make_words([CONSONANTS, VOWELS, CONSONANTS, VOWELS, CONSONANTS, VOWELS], 300, 3)
TASK_NAMES, GENERAL_NAMES = NAMES[:240], NAMES[240:]
NAME_RANGES = {"train": range(120), "dev": range(120, 144), "test": range(144, 240)}


def attributes(rng: random.Random, i: int, n: int) -> list[str]:
    """n different attributes of the class of name i."""
    return rng.sample(ATTRIBUTES[i % len(CLASSES) :: len(CLASSES)], n)


def sentence(rng: random.Random, words: list[str], n: int) -> str:
    """n words: the given ones in random places, fillers elsewhere, one comma and the final period."""
    words = words + rng.choices(FILLERS, k=n - len(words))
    rng.shuffle(words)
    words[rng.randrange(n - 1)] += ","
    return " ".join(words) + "."


def general_text(seed: int = 0) -> list[str]:
    """What the embedded LM was pre-trained on: old names, each with 2 to 8 attributes of its class."""
    rng = random.Random(f"general{seed}")
    texts = []
    for n in range(24000):
        i = n % len(GENERAL_NAMES)
        words = [GENERAL_NAMES[i], *attributes(rng, i, rng.randint(2, 8))]
        texts.append(sentence(rng, words, rng.randint(12, 18)))
    return texts


def corpus(rng: random.Random) -> list[dict]:
    """Unlabelled contexts of 10 words: a new name and two attributes of its class; 16 contexts per name."""
    records = []
    for i, name in enumerate(TASK_NAMES):
        for _ in range(16):
            records.append({"text": sentence(rng, [name, *attributes(rng, i, 2)], 10), "doc": i})
    return records


def classification(seed: int = 0) -> dict[str, list[dict]]:
    """The class of the one name in a sentence of 8 words: {"corpus", "train", "dev", "test"} -> records.

    A record is {"text", "label", "doc"}, without label in the corpus; doc is the index of the name. A name
    has 10 sentences."""
    rng = random.Random(f"cls{seed}")
    records = {"corpus": corpus(rng)}
    for split, names in NAME_RANGES.items():
        records[split] = []
        for i in names:
            for _ in range(10):
                text = sentence(rng, [TASK_NAMES[i]], 8)
                records[split].append({"text": text, "label": CLASSES[i % len(CLASSES)], "doc": i})
    return records


def question_answering(seed: int = 0) -> dict[str, list[dict]]:
    """The same names and corpus: "which one is <the first attribute of a class>?", asked of three names.

    A record is {"text", "doc", "qas": [{"id", "question", "answers": [{"text", "start" (characters)}]}]},
    without qas in the corpus. A context of 10 words holds three names of three classes; doc is the index of
    the first, divided by 3."""
    rng = random.Random(f"qa{seed}")
    records = {"corpus": [record | {"doc": record["doc"] // 3} for record in corpus(rng)]}
    for split, names in NAME_RANGES.items():
        records[split] = []
        for i in names[::3]:
            for j in range(10):
                text = sentence(rng, TASK_NAMES[i : i + 3], 10)
                qas = []
                for k, name in enumerate(TASK_NAMES[i : i + 3]):
                    question = f"which one is {ATTRIBUTES[(i + k) % len(CLASSES)]}?"
                    answer = {"text": name, "start": text.index(name)}
                    qas.append({"id": f"{split}-{i // 3}-{j}-{k}", "question": question, "answers": [answer]})
                records[split].append({"text": text, "doc": i // 3, "qas": qas})
    return records


TASKS = {"toycls": classification, "toyqa": question_answering}


# ---------------------------------------------------------------- what the scripts know of this world

def tokenizer() -> PreTrainedTokenizerFast:
    """Lower-cased WordPiece; each word of the world is one token, any other word is spelled in letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*SPECIAL, *".,?", *letters, *("##" + x for x in letters), "which", "one", "is"]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *FILLERS, *ATTRIBUTES, *NAMES])}
    backend = Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(piece, vocabulary[piece]) for piece in ("[SEP]", "[CLS]")]
    backend.post_processor = processors.BertProcessing(*ends)
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=128, pad_token="[PAD]", unk_token="[UNK]",
        cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"])


@functools.cache
def informative() -> np.ndarray:
    """(V,) bool: the token ids of names and attributes, the words that teach something when masked."""
    vocabulary = tokenizer()
    table = np.zeros(len(vocabulary), dtype=bool)
    table[vocabulary.convert_tokens_to_ids(ATTRIBUTES + NAMES)] = True
    return table


def entity_pipeline():
    """A spaCy pipeline for the text of this world: its names are the named entities."""
    import spacy

    nlp = spacy.blank("en")
    patterns = [{"label": CLASSES[i % len(CLASSES)], "pattern": name} for i, name in enumerate(NAMES)]
    nlp.add_pipe("entity_ruler", name="ner").add_patterns(patterns)
    return nlp


# Flags of the scripts in this world, taken where a flag is None and the LM is `tiny`. They were found by
# looking at its test accuracy: the gap between maskers is a property of the world, not a result.
PRETRAIN = {"p": 0.05, "epochs": 3, "lr": 1e-3, "batch_size": 32}
FINETUNE = {
    "cls": {"epochs": 3, "lr": 5e-4, "batch_size": 32},
    "qa": {"epochs": 9, "lr": 1e-3, "batch_size": 32},
}
# Meta-training and search: sub-tasks of every name of train, half of them labelled. Accuracy is what is
# compared here, as a few wrong answers dominate the log likelihood.
INNER_LOOP = {
    "cls": {"contexts": 1920, "docs": 120, "val_share": 0.5, "mlm_lr": 1e-3, "ft_epochs": 3, "ft_lr": 5e-4,
            "batch_size": 32, "metric": "accuracy"},
}
INNER_LOOP["qa"] = INNER_LOOP["cls"] | {"docs": 40, "ft_epochs": 9, "ft_lr": 1e-3, "metric": "em"}
