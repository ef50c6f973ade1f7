"""What the commands of run_all.sh cost, in hours of one H100 with one process a command.

    bash run_all.sh --list | python tools/cost.py       # run_all.sh prints it by itself, on stderr

A training step takes as long as the CPU needs to launch it, whatever is in its batch; scoring takes as long
as the GPU computes. Both were measured on one machine (docs/speed.md).
"""
import math
import shlex
import sys
from collections import defaultdict
from dataclasses import dataclass

STEP = 0.049            # seconds of a step of BERT-base
TOKEN = 1.1e-6          # seconds of a token that is scored
PLAY = 0.6              # seconds of everything else in a play
BATCH = 16              # pieces of a step
# Layers of an LM, as a share of BERT-base's. Only BERT-base was measured.
LAYERS = {"bert-base-uncased": 1.0, "distilbert-base-uncased": 0.5}


@dataclass
class Size:
    """A data set in tokens of BERT. Of question answering a piece is a window of 384 tokens, else a text."""
    texts: int              # of train
    blocks: float           # of a text, each with at most 512 tokens in question answering, else 256
    train: int              # labelled examples
    scored: int             # examples of test
    pieces: float           # of an example
    tokens: int             # of a piece, on average
    epochs: int             # of fine-tuning
    ft_epochs: int          # of fine-tuning in a play


# ChemProt and IMDb were counted. SQuAD and NewsQA are estimates: the questions of MRQA's files, with contexts
# of about 137 and 599 words, at 1.1 tokens a word. emrQA, which is not public, is taken
# to be like NewsQA: a guess.
SIZES = {
    "squad": Size(18_900, 1.0, 86_588, 10_507, 1.0, 170, 2, 1),
    "newsqa": Size(11_400, 1.7, 74_160, 4_212, 2.6, 340, 2, 1),
    "emrqa": Size(11_400, 1.7, 74_160, 4_212, 2.6, 340, 2, 1),
    "chemprot": Size(4_169, 1.0, 4_169, 3_469, 1.0, 70, 3, 5),
    "imdb": Size(20_000, 1.7, 20_000, 25_000, 1.0, 208, 3, 5)}


# Flags of plays, and of rows, that change a price in ways that are not known here.
OTHER_PRICE = {"preset", "contexts", "docs", "examples", "validation", "val_share", "mlm_epochs", "ft_epochs",
               "batch_size", "max_steps", "labelled", "corpus", "read", "max_len", "ft_max_len",
               "random_every", "eval_every"}


def play_seconds(size: Size) -> float:
    """Of a play of BERT-base with the paper's sub-tasks: 200 texts in three epochs, at most 1,000 examples of
    these texts, and at most 10,000 of a tenth of train."""
    blocks = 200 * size.blocks
    train = size.pieces * min(1000, 200 * size.train / size.texts)
    scored = size.pieces * min(10_000, 0.1 * size.train)
    return STEP * (3 * blocks + size.ft_epochs * train) / BATCH + TOKEN * scored * size.tokens + PLAY


def row_seconds(size: Size, mlm_epochs: int, epochs: int) -> float:
    """Of a row of BERT-base: pre-training on all texts, fine-tuning on all examples, and scoring."""
    pieces = mlm_epochs * size.texts * size.blocks + epochs * size.train * size.pieces
    return STEP * pieces / BATCH + TOKEN * size.scored * size.pieces * size.tokens


def flags_of(command: str) -> dict[str, str]:
    """The flags of a script, the last of each name."""
    return dict(word[2:].partition("=")[::2] for word in shlex.split(command) if word.startswith("--"))


def plays_of(flags: dict[str, str]) -> int:
    """How many plays train_nmg.py makes: two an episode, and those of the random player, which is there in
    every fourth, or with --paper in each."""
    episodes = int(flags.get("episodes", 16))
    if flags.get("self_play") == "False":
        return 2 * episodes
    if flags.get("paper") == "True":
        return 3 * episodes
    return 2 * episodes + math.ceil(episodes / 4)


def hours_of(command: str) -> tuple[str, str, bool, float]:
    """Data set, LM, whether the command learns a policy, and its hours. KeyError where data set or LM are not
    known here, and for what has another price: the baseline without an LM, and flags of OTHER_PRICE."""
    scripts = command.split("&&")
    flags = flags_of(scripts[0])
    last = flags_of(scripts[-1])
    if (flags.keys() | last.keys()) & OTHER_PRICE or "linear.py" in command:
        raise KeyError(command)
    size, share = SIZES[flags["dataset"]], LAYERS[flags["lm"]]
    learns = "train_nmg.py" in command
    epochs = int(last.get("epochs", size.epochs))
    if learns:
        seconds = plays_of(flags) * play_seconds(size)
    elif len(scripts) == 2:
        seconds = row_seconds(size, int(flags.get("epochs", 1)), epochs)
    else:
        seconds = row_seconds(size, 0, epochs)
    return flags["dataset"], flags["lm"], learns, seconds * share / 3600


def main() -> None:
    # (data set, LM) -> policies, their hours, rows, their hours
    costs = defaultdict(lambda: [0, 0.0, 0, 0.0])
    unknown, longest = 0, 0.0
    for command in sys.stdin.read().splitlines():
        try:
            data, lm, learns, hours = hours_of(command)
        except (KeyError, ValueError):
            unknown += 1
            continue
        kind = 0 if learns else 2
        costs[data, lm][kind] += 1
        costs[data, lm][kind + 1] += hours
        longest = max(longest, hours)
    # Of nothing but the user's own data there is nothing to say.
    if not costs:
        return
    print("| data set | LM | policies | hours | rows | hours |\n|---|---|---|---|---|---|")
    costs["all", ""] = [sum(column) for column in zip(*costs.values(), strict=True)]
    for (data, lm), (policies, learning, rows, scoring) in costs.items():
        print(f"| {data} | {lm} | {policies} | {learning:.1f} | {rows} | {scoring:.1f} |")
    total = learning + scoring
    digits = 1 if total < 10 else 0
    print(f"about {total:.{digits}f} hours of one H100 (the longest command: {longest:.1f}), estimated as "
          "docs/speed.md says")
    if unknown:
        print(f"{unknown} commands have a data set, an LM or flags whose cost is not known here")


if __name__ == "__main__":
    main()
