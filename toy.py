"""A toy world that needs no download: made-up text, a tiny BERT, and two tasks in which WHAT is masked matters.

    python toy.py                                       # the score after each way of masking, three seeds, and a picture
    python toy.py --dataset=toyqa --seeds=5

There are six classes of things. A *name* ("tanumu") belongs to one class and keeps company with the *attributes*
("futor") of that class; all other words are *fillers* ("nas") and tell nothing. Old names make up the general text,
240 new names make up the tasks. A context of a task's unlabelled corpus holds one new name and two of its attributes:

    {"text": "nas susus ser tanumu, mos lar mil bal tom futor.", "doc": 17}

but a labelled sentence holds the name among fillers alone, and train, dev and test share no name:

    {"text": "mus vir tom tanumu, rir sil kar nel.", "label": "star", "doc": 17}

So only a LM that learned from the corpus which attributes go with a test name can tell its class. A masked token
teaches that if it is the name or an attribute, predictable from the other two, and not if it is a filler; with
all three masked at once nothing is left to predict from, so few tokens should be masked (p = 0.05: one a context).
"""
import functools
import random
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from loop import UserError, beside, checked, cli

CLASSES = ["bird", "fish", "tree", "stone", "tool", "star"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
C, V, END = "bdfklmnrstvz", "aeiou", "lmnrs"  # letters of the made-up language


def make(pattern: list[str], n: int, seed: int) -> list[str]:
    """n unique words, one letter drawn from each string of the pattern. The patterns differ in length, so kinds share no word."""
    rng, out = random.Random(seed), {}
    while len(out) < n:
        out["".join(map(rng.choice, pattern))] = None
    return list(out)


FILLERS = make([C, V, END], 60, 1)  # "nas"
ATTRIBUTES = make([C, V, C, V, END], 60, 2)  # "futor"; word i goes with class i % 6, here and below
NAMES = make([C, V, C, V, C, V], 300, 3)  # "tanumu"
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


def corpus(rng: random.Random) -> list[dict]:
    """Unlabelled contexts of 10 words, one new name and two attributes of its class each; 16 contexts a name."""
    return [{"text": sentence(rng, [NEW[i], *attributes(rng, i, 2)], 10), "doc": i} for i in range(240) for _ in range(16)]


def cls(seed: int = 0) -> dict[str, list[dict]]:
    """Classification, the class of the one name in a sentence of 8 words: {"corpus", "train", "dev", "test"} -> records.

    A record is {"text", "label", "doc"}, without label in the corpus; doc = index of the name, 10 sentences a name.
    """
    rng = random.Random(f"cls{seed}")
    out = {"corpus": corpus(rng)}
    for split, docs in SPLITS.items():
        out[split] = [{"text": sentence(rng, [NEW[i]], 8), "label": CLASSES[i % 6], "doc": i} for i in docs for _ in range(10)]
    return out


def qa(seed: int = 0) -> dict[str, list[dict]]:
    """Extractive question answering, the same names and corpus: "which one is <the first attribute of a class>?".

    A record is {"text", "doc", "qas": [{"id", "question", "answers": [{"text", "start" (in characters)}]}]}, without qas
    in the corpus. A context of 10 words holds three names of three classes and is asked for each; doc = name index // 3.
    """
    rng = random.Random(f"qa{seed}")
    out = {"corpus": [{**r, "doc": r["doc"] // 3} for r in corpus(rng)]}
    for split, docs in SPLITS.items():
        out[split] = []
        for i, j in [(i, j) for i in docs[::3] for j in range(10)]:
            text = sentence(rng, NEW[i : i + 3], 10)
            qas = [{"id": f"{split}-{i // 3}-{j}-{k}", "question": f"which one is {ATTRIBUTES[(i + k) % 6]}?",
                    "answers": [{"text": NEW[i + k], "start": text.index(NEW[i + k])}]} for k in range(3)]
            out[split].append({"text": text, "doc": i // 3, "qas": qas})
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


@functools.cache
def informative() -> np.ndarray:
    """bool (V,): True for the token ids of names and attributes, the words that teach something when masked."""
    table = np.zeros(len(tokenizer()), dtype=bool)
    table[tokenizer().convert_tokens_to_ids(ATTRIBUTES + NAMES)] = True
    return table


@functools.cache
def pipeline():
    """A spaCy pipeline for the text of this world: its names are the named entities."""
    import spacy

    nlp = spacy.blank("en")
    nlp.add_pipe("entity_ruler", name="ner").add_patterns([{"label": CLASSES[i % 6], "pattern": name} for i, name in enumerate(NAMES)])
    return nlp


# What works in this world, found by looking at its test accuracy: the gap between maskers is a property of the world, not a result.
GENERAL = {"p": 0.15, "epochs": 2, "lr": 1e-3, "batch_size": 32}            # the tiny LM's own pre-training
ADAPT = {"p": 0.05, "epochs": 3, "lr": 1e-3, "batch_size": 32}              # further pre-training: one token a context
FINETUNE_CLS = {"epochs": 3, "lr": 5e-4, "batch_size": 32}
FINETUNE_QA = {"epochs": 9, "lr": 1e-3, "batch_size": 32}


# Meta-training: sub-tasks of every name of train, half of them labelled. On fewer names the scores hardly depend on what is masked.
META = {"episodes": 6, "contexts": 1920, "docs": 120, "val_share": 0.5, "mlm_lr": 1e-3, "ft_epochs": 3, "ft_lr": 5e-4, "batch_size": 32,
        "rl_lr": 3e-4, "updates": 20, "explore": 2, "continual": False, "credit": "regression", "alpha": 0.5}
META_QA = META | {"docs": 40, "ft_epochs": 9, "ft_lr": 1e-3}


def score(data, masker: str, seed: int) -> float:
    """Accuracy (toycls) or exact match (toyqa) on test, in percent, after masking the whole corpus with a masker."""
    import data_prep
    import finetune_cls
    import finetune_qa
    import pretrain
    from maskers import find

    lm, specials = pretrain.load_lm("tiny"), data_prep.Specials.of(tokenizer())
    if masker != "none":
        pretrain.pretrain(lm, data_prep.blocks(data.corpus, specials, 128), find(masker), **ADAPT, seed=seed, desc=f"seed {seed}, MLM {masker}")
    if data.kind == "cls":
        train, test = (data_prep.heads(data[s], specials, 128) for s in ("train", "test"))
        said = finetune_cls.predict(finetune_cls.finetune(lm, train, 6, **FINETUNE_CLS, seed=seed), test, quiet=True)
        return finetune_cls.scores(data["test"].label, said.argmax(1))["accuracy"]
    train, test = (data_prep.windows(data[s], specials, 128, 32, 64) for s in ("train", "test"))
    said = finetune_qa.predict(finetune_qa.finetune(lm, train, **FINETUNE_QA, seed=seed), test, quiet=True)
    return 100 * float(np.mean([finetune_qa.em_f1(s[0]["text"], q["scored"])[0] for s, q in zip(said, data["test"].questions, strict=True)]))


def share(data, masker: str) -> float:
    """The share of informative words among the tokens that a masker chooses in the corpus, beside the tiny LM as it is at the start."""
    import data_prep
    import pretrain
    from maskers import find

    rows = data_prep.blocks(data.corpus, data_prep.Specials.of(tokenizer()), 128)
    lm = pretrain.hidden_states(pretrain.load_lm("tiny"))
    batch, mask, _ = pretrain.masked_rows(rows, find(masker), ADAPT["p"], 0, 0, np.arange(len(rows)), lm)
    return float(informative()[batch.ids[mask]].mean())


def compare(data, maskers: dict[str, str], seeds: range, out) -> None:
    """Prints the score of each masker (by the name that it is shown under) on the toy test set, what it masks, and draws the scores."""
    scores, width = {name: [] for name in maskers}, max(map(len, maskers))
    for seed in seeds:
        for name, seen in scores.items():
            seen.append(score(data, maskers[name], seed))
            print(f"seed {seed}  {name:{width}} {seen[-1]:6.2f}", flush=True)
    measure = "test accuracy" if data.kind == "cls" else "exact match"
    print(f"\n{data.name}, {measure}: mean, standard deviation, each seed; share of informative words among the masked, at the start")
    for name, s in scores.items():
        each, what = " ".join(f"{x:6.2f}" for x in s), f"{share(data, maskers[name]):8.0%}" if maskers[name] != "none" else ""
        print(f"{name:{width}} {np.mean(s):6.2f} {np.std(s, ddof=1) if len(s) > 1 else 0:6.2f}   {each}{what}")
    draw(scores, measure, 100 / (6 if data.kind == "cls" else 3), out)
    print(f"picture: {out}")


def draw(scores: dict[str, list[float]], measure: str, chance: float, file) -> None:
    """Bars: the mean score of each masker in percent; dots: its seeds."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=(7, 0.55 * len(scores) + 1.1), layout="constrained")
    ax = fig.subplots()
    for i, s in enumerate(scores.values()):
        ax.barh(i, np.mean(s), color="#9db8d2", height=0.6)
        ax.plot(s, [i] * len(s), "o", color="#1f3b57", markersize=5, alpha=0.8)
        ax.text(112, i, f"{np.mean(s):.1f}", va="center", ha="right")
    ax.axvline(chance, color="grey", linestyle=":", linewidth=1)
    for x, what in ((chance, "chance"), (109, "mean")):
        ax.text(x, -0.72, what, color="grey", fontsize=8, va="center", ha="center")
    ax.set(xlim=(0, 112), xlabel=f"{measure}, % (bar: mean, dots: seeds)")
    ax.set_yticks(range(len(scores)), scores)
    ax.set_xticks(range(0, 101, 20))
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)
    with beside(file) as tmp:
        fig.savefig(tmp, dpi=150, format="png")


def main(
    dataset: str = "toycls",                            # toycls or toyqa
    seeds: int = 3,                                     # of masks, order and head; 0 .. seeds - 1
    maskers: str = "none,anti,random,oracle",           # registered maskers, with commas between them
    out: str = "runs/toy.png",                          # the picture
):
    import data_prep
    from maskers import find

    checked({"seeds": seeds})
    if dataset not in data_prep.EMBEDDED:
        raise UserError(f"--dataset={dataset}: must be toycls or toyqa")
    chosen = {name: name for name in maskers.split(",")}
    for name in chosen:
        find(name)
    compare(data_prep.load(dataset, tokenizer()), chosen, range(seeds), Path(out))


if __name__ == "__main__":
    cli(main)
