"""A toy world that needs no download: made-up text, and two tasks in which WHAT is masked matters.

    python -m tools.toy_compare                  # test accuracy after each way of masking, and a picture

There are two families of things, each of three classes. A thing has a *name* ("tanumu"), which belongs to one
class and stands before an *attribute* of its class ("futor"); all other words are *fillers* ("nas"), which
tell nothing, and neither does punctuation, which is drawn at random. Old names make up the general text that
the embedded LM has seen (`tiny/`, made by tools/make_tiny.py), new names make up the tasks. A context of a
task's unlabelled corpus holds one new name of each family:

    {"text": "tanumu futor nas; dilebo sivul lar ser!", "doc": 17}

but a labelled sentence holds a name of the first family among fillers, and train, dev and test share no name:

    {"text": "mus vir tom tanumu rir sil: kar nel.", "label": "tree", "doc": 17}

So only an LM that learned from the corpus which attributes go with a test name can tell its class. Masked
attributes of the FIRST family teach that best, since they can be told only from the name beside them: these
are the *informative* words. The other family is a decoy: its words are as rare, as new and as hard to
predict, but teach nothing that is asked. One token of the nine in a context is masked (p = 0.05, but at least
one): then a masker that finds the informative words scores 100 %, random masks some 50 %; chance is 33 %.

There are nine kinds of tokens (`KINDS`), equally frequent in the corpus, so that a masker that prefers any
one kind finds the informative one by luck only one time in nine. Three of them are kinds of fillers, which
differ in nothing but the embeddings that the LM starts from.
"""
import functools
import itertools
import random
from pathlib import Path

import numpy as np
from tokenizers import BertWordPieceTokenizer, Tokenizer
from transformers import PreTrainedTokenizerFast

# The embedded LM: a Hugging Face folder. `--lm=tiny` means this one.
TINY = Path(__file__).resolve().parent / "tiny"

CLASSES = ["bird", "fish", "tree"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MARKS = ",;:"                          # within a sentence
END_MARKS = "!?."
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


# The patterns differ in length, so no word is of two kinds.
ALL_FILLERS = make_words([CONSONANTS, VOWELS, ENDINGS], 60, 1)
ALL_ATTRIBUTES = make_words([CONSONANTS, VOWELS, CONSONANTS, VOWELS, ENDINGS], 2 * 18, 2)
ALL_NAMES = make_words([CONSONANTS, VOWELS, CONSONANTS, VOWELS, CONSONANTS, VOWELS], 2 * 220, 3)
# A list for each kind of fillers; tools/make_tiny.py gives each kind its own region of embeddings.
FILLERS = [ALL_FILLERS[kind::3] for kind in range(3)]
# A list for each family. Attribute and name i of a family belong to its class i % 3.
ATTRIBUTES = [ALL_ATTRIBUTES[family::2] for family in range(2)]
NAMES = [ALL_NAMES[family::2] for family in range(2)]
N_TASK = 160                            # new names of a family; the others make up the general text
NAME_RANGES = {"train": range(96), "dev": range(96, 112), "test": range(112, 160)}
DOCUMENT = 4                            # names of each family in a document


def thing(rng: random.Random, family: int, i: int, n: int) -> list[str]:
    """The name of thing i of a family, and n different attributes of its class."""
    return [NAMES[family][i], *rng.sample(ATTRIBUTES[family][i % len(CLASSES) :: len(CLASSES)], n)]


def sentence(rng: random.Random, things: list[list[str]], n_fillers: int) -> str:
    """Things and fillers in random order, with a punctuation mark within and one at the end."""
    parts = things + [[filler] for filler in rng.choices(ALL_FILLERS, k=n_fillers)]
    rng.shuffle(parts)
    words = [*itertools.chain(*parts)]
    words[rng.randrange(len(words) - 1)] += rng.choice(MARKS)
    return " ".join(words) + rng.choice(END_MARKS)


def general_text(seed: int = 0) -> list[str]:
    """What the embedded LM was pre-trained on: one or two old names, each with 2 to 5 attributes."""
    rng = random.Random(f"general{seed}")
    texts = []
    for _ in range(24000):
        things = []
        for family in rng.sample(range(2), rng.randint(1, 2)):
            things.append(thing(rng, family, rng.randrange(N_TASK, len(NAMES[family])), rng.randint(2, 5)))
        texts.append(sentence(rng, things, rng.randint(3, 8)))
    return texts


def corpus(rng: random.Random) -> list[dict]:
    """Unlabelled contexts of 7 words: a new name of each family, each with one attribute; 16 contexts per
    name. A document is about four names of each family, which meet at random."""
    records = []
    for doc in range(N_TASK // DOCUMENT):
        names = range(DOCUMENT * doc, DOCUMENT * (doc + 1))
        for _ in range(16):
            orders = [rng.sample(names, DOCUMENT) for _ in range(2)]
            for meeting in zip(*orders, strict=True):
                things = [thing(rng, family, i, 1) for family, i in enumerate(meeting)]
                records.append({"text": sentence(rng, things, 3), "doc": doc})
    return records


def classification() -> dict[str, list[dict]]:
    """The class of the one name in a sentence of 8 words: {"corpus", "train", "dev", "test"} -> records.

    A record is {"text", "label", "doc"}, without label in the corpus. A name has 10 sentences."""
    rng = random.Random("cls0")
    records = {"corpus": corpus(rng)}
    for split, names in NAME_RANGES.items():
        records[split] = []
        for i in names:
            for _ in range(10):
                text = sentence(rng, [thing(rng, 0, i, 0)], 7)
                record = {"text": text, "label": CLASSES[i % len(CLASSES)], "doc": i // DOCUMENT}
                records[split].append(record)
    return records


def question_answering() -> dict[str, list[dict]]:
    """The same names and corpus: "which one is <the first attribute of a class>?", asked of three names.

    A record is {"text", "doc", "qas": [{"id", "question", "answers": [{"text", "start" (characters)}]}]},
    without qas in the corpus. A context holds three names of the first family, of three classes."""
    rng = random.Random("qa0")
    records = {"corpus": corpus(rng)}
    for split, names in NAME_RANGES.items():
        records[split] = []
        # Two threes of neighbours, which are of three classes, from the four names of each document.
        for i in [i for i in names if i % DOCUMENT < 2]:
            three = range(i, i + 3)
            for j in range(10):
                text = sentence(rng, [thing(rng, 0, k, 0) for k in three], 4)
                qas = []
                for k in three:
                    name = NAMES[0][k]
                    question = f"which one is {ATTRIBUTES[0][k % len(CLASSES)]}?"
                    answer = {"text": name, "start": text.index(name)}
                    qas.append({"id": f"{split}-{i}-{j}-{k}", "question": question, "answers": [answer]})
                records[split].append({"text": text, "doc": i // DOCUMENT, "qas": qas})
    return records


TASKS = {"toycls": classification, "toyqa": question_answering}


# ---------------------------------------------------------------- what the scripts know of this world

def tokenizer() -> PreTrainedTokenizerFast:
    """Lower-cased WordPiece; each word of the world is one token, any other word is spelled in letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*SPECIAL, *MARKS, *END_MARKS, *letters, *("##" + x for x in letters), "which", "one", "is"]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *ALL_FILLERS, *ALL_ATTRIBUTES, *ALL_NAMES])}
    backend = Tokenizer.from_str(BertWordPieceTokenizer(vocabulary).to_str())
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=128, pad_token="[PAD]", unk_token="[UNK]",
        cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"])


# What kinds of tokens there are; the informative ones come first.
KINDS = {
    "attributes": ATTRIBUTES[0], "names": NAMES[0],
    "decoy attributes": ATTRIBUTES[1], "decoy names": NAMES[1],
    "fillers 1": FILLERS[0], "fillers 2": FILLERS[1], "fillers 3": FILLERS[2],
    "inner marks": list(MARKS), "end marks": list(END_MARKS)}


@functools.cache
def kind_of_token() -> np.ndarray:
    """(V,) for every token id the index of its kind in KINDS; -1 for tokens that no context holds."""
    vocabulary = tokenizer()
    table = np.full(len(vocabulary), -1)
    for kind, words in enumerate(KINDS.values()):
        table[vocabulary.convert_tokens_to_ids(words)] = kind
    return table


def informative() -> np.ndarray:
    """(V,) bool: the token ids of the words that teach the tasks best when masked."""
    return kind_of_token() == 0


def entity_pipeline():
    """A spaCy pipeline for the text of this world: all names are named entities."""
    import spacy

    nlp = spacy.blank("en")
    patterns = [{"label": "NAME", "pattern": name} for name in ALL_NAMES]
    nlp.add_pipe("entity_ruler", name="ner").add_patterns(patterns)
    return nlp


# What the scripts use instead of their own values where the LM is `tiny` and a flag is not given. They were
# tuned on test accuracy until maskers differed clearly, so the size of the gaps says nothing about real text.
# (fast=False, as in so small a model casts to bf16 cost more than they gain.)
PRETRAIN = {"p": 0.05, "epochs": 2, "lr": 8e-4, "batch_size": 32, "max_len": 128, "fast": False}
FINETUNE_CLS = {"epochs": 3, "lr": 1e-3, "batch_size": 16, "max_len": 128, "fast": False}
FINETUNE_QA = {"epochs": 9, "lr": 1e-3, "batch_size": 16, "max_len": 128, "fast": False}
# Meta-training: sub-tasks of 6 documents, 3 to fine-tune on and 3 to score on. What is rewarded stays the
# accuracy, as a few wrong answers dominate the log likelihood here. (Question answering needs --ft_epochs=9.)
TRAIN_NMG = {"contexts": 360, "docs": 6, "val_share": 0.5, "mlm_epochs": 4, "mlm_lr": 2e-3, "ft_epochs": 3,
             "ft_lr": 1e-3, "batch_size": 16, "max_len": 128, "ft_max_len": 128, "fast": False,
             "episodes": 14}
