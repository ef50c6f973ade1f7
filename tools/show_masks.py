"""Shows what maskers choose: masks.html, a page to read; preferences.csv, how far the words that they take
differ from the text in each score; and parts_of_speech.png.

    python -m tools.show_masks                                      # toy world, tiny LM, no download
    python -m tools.show_masks --dataset=newsqa --lm=bert-base-uncased --p=0.05 \\
        --maskers=random,nmg:runs/nmg-newsqa-bert-base-uncased-0
    python -m tools.show_masks --dataset=chemprot --lm=bert-base-uncased \\
        --spacy_model=en_core_web_sm                                # with the picture of parts of speech

All maskers choose with the LM as it is now and with the same budget: the masks of the first epoch of
pretrain.py with this seed and p (of a learned masker as long as training has not moved the LM).
"""
import itertools
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

import data_prep
import maskers
from nmg.loop import length_batches
from pretrain import mask_batch
from support import devices, plots, runs, toy
from support.data import Pieces, Split, blocks, collate
from support.models import LMReader, load_lm, load_tokenizer, max_len_of
from support.rng import rng_for
from support.runs import UserError
from support.sources import DataFlags

COLORS = ("#9db8d2", plots.BLUE, plots.ORANGE, "#7d9c6c", "#8c5a7c", "#b9b09a")
ALL = "in the text"         # the name of all maskable tokens, beside the maskers


@dataclass
class Config(DataFlags):
    dataset: str = "toycls"         # squad newsqa emrqa imdb chemprot scierc acl_arc scicite toycls toyqa,
                                    # hf:REPO of the hub, or a path (data_prep.py)
    lm: str = "tiny"                # tiny, a Hugging Face folder or hub name
    maskers: str = "random,whole,span,punct"    # comma-separated, each as --masker of pretrain.py
    p: float = 0.15                 # share of tokens to mask, for all maskers; tiny: 0.05
    contexts: int = 100             # texts to show and to count in, drawn by seed
    seed: int = 0                   # of the drawn texts and of the masks
    split: str | None = None        # train dev test corpus; None: the text that pretrain.py reads
    spacy_model: str | None = None  # for the picture, and entities; None: no picture
    out: str = "runs/masks"         # folder of the page, the table and the picture


# ---------------------------------------------------------------- what is chosen

def choices(pieces: Pieces, masker: maskers.Masker, indices: np.ndarray, cfg: Config,
            lm: LMReader) -> np.ndarray:
    """(T,) bool: the tokens of the split that a masker chooses in the pieces of these indices."""
    masked = np.zeros(len(pieces.split.input_ids), bool)
    for some in length_batches(pieces.length[indices]):
        batch, mask, _ = mask_batch(pieces, masker, cfg.p, cfg.seed, 0, indices[some], lm)
        masked[batch.token_at[mask]] = True
    return masked


def most_masked(split: Split, texts: np.ndarray, masked: np.ndarray) -> list[tuple[int, float]]:
    """Up to ten tokens that are masked more often than chance, each with the share of its occurrences that is
    masked: those with the largest (masked - expected) / sqrt(expected) among the tokens that occur ten times
    in some texts. masked: (T,) bool"""
    here = np.concatenate([np.arange(*split.token_start[i:i + 2]) for i in texts])
    size = split.special.vocabulary_size
    count = np.bincount(split.input_ids[here], minlength=size)
    taken = np.bincount(split.input_ids[here[masked[here]]], minlength=size)
    expected = count * taken.sum() / count.sum()
    often = np.flatnonzero((count >= 10) & (taken > expected))
    beyond = (taken[often] - expected[often]) / np.sqrt(expected[often])
    top = often[np.argsort(-beyond, kind="stable")[:10]]
    return list(zip(top.tolist(), (taken[top] / count[top]).tolist(), strict=True))


# ---------------------------------------------------------------- what is preferred

def token_features(pieces: Pieces, indices: np.ndarray, lm: LMReader,
                   tags: np.ndarray | None) -> pd.DataFrame:
    """A column for each score of maskers.py and each part of speech, a line for each maskable token of the
    pieces of these indices (its index in the split). Standardized: mean 0, standard deviation 1.

    A score that these texts or this LM do not allow is left out, which is printed. tags: (T,) parts of
    speech, or None"""
    batches = [collate(pieces, indices[some]) for some in length_batches(pieces.length[indices])]
    tokens = np.concatenate([batch.token_at[batch.maskable] for batch in batches])
    features = pd.DataFrame(index=tokens)
    for name, score in maskers.SCORES.items():
        # Entities are found in the whole split, which takes long: not where no masker has asked for them.
        if name == "in_entity" and "entity_ids" not in vars(pieces.split):
            continue
        try:
            features[name] = np.concatenate([score(batch, lm)[batch.maskable] for batch in batches])
        except UserError as e:
            print(f"The table of preferences leaves {name} out: {e}")
    if tags is not None:
        features = features.join(pd.get_dummies(pd.Series(tags[tokens], tokens), dtype=float))
    varying = features.loc[:, features.std() > 0]
    return (varying - varying.mean()) / varying.std()


def preferences(features: pd.DataFrame, doc: pd.Series, masked: np.ndarray) -> pd.DataFrame:
    """For each feature the mean among the masked tokens of a document minus its mean in that document: the
    mean over documents ("masked minus text", in standard deviations), and Student's t 95 % interval ("low",
    "high"). The strongest preference comes first.

    features: of tokens; doc: the document of each; masked: (T,) bool of the split"""
    chosen = masked[features.index]
    of_masked = features[chosen].groupby(doc[chosen]).mean()
    of_text = features.groupby(doc).mean().loc[of_masked.index]
    d = of_masked - of_text
    half = stats.t.ppf(0.975, len(d) - 1) * d.sem()
    table = pd.DataFrame({"masked minus text": d.mean(), "low": d.mean() - half, "high": d.mean() + half})
    return table.sort_values("masked minus text", ascending=False)


# ---------------------------------------------------------------- the page

STYLE = """
:root { color-scheme: light dark }
body { max-width: 60rem; margin: 1rem auto; padding: 0 1rem; font: 1rem/1.6 system-ui, sans-serif }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1rem }
dt { color: gray; overflow-wrap: anywhere; max-width: 12rem }
dd { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere }
mark { background: #ffd54a; color: black; border-radius: .2em }
"""


def page(title: str, about: str, split: Split, texts: np.ndarray, masked: dict[str, np.ndarray]) -> str:
    """HTML: some texts, each once for every masker, its masked words marked. masked: {masker: (T,) bool}"""
    parts = [f"<!DOCTYPE html>\n<meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>",
             f"<h1>{escape(title)}</h1>\n<p>{escape(about)}</p>"]
    for i in texts:
        name = f"text {i:,}"
        if hasattr(split, "label") and split.label[i] >= 0:
            name += f", {split.labels[split.label[i]]}"
        parts.append(f"<h2>{escape(name)}</h2>")
        if hasattr(split, "question_text"):
            for question in np.flatnonzero(split.question_text == i):
                asked = split.questions[question]
                answer = "".join(asked["references"][:1])
                parts.append(f"<p>{escape(asked['question'])} → {escape(answer)}</p>")
        parts.append("<dl>")
        for masker, mask in masked.items():
            parts.append(f"<dt>{escape(masker)}</dt><dd dir=auto>{marked(split, i, mask)}</dd>")
        parts.append("</dl>")
    return "\n".join(parts)


def marked(split: Split, i: int, mask: np.ndarray) -> str:
    """Text i as HTML; mask (T,) bool: the tokens whose characters are marked."""
    text = split.text(i)
    start, stop = split.token_start[i:i + 2]
    in_mark = np.zeros(len(text), bool)
    for token in start + np.flatnonzero(mask[start:stop]):
        in_mark[split.char_begin[token]:split.char_end[token]] = True
    # Pieces of one word are one mark.
    changes = np.flatnonzero(np.diff(in_mark)) + 1
    html = ""
    for begin, end in itertools.pairwise([0, *changes, len(text)]):
        part = escape(text[begin:end])
        html += f"<mark>{part}</mark>" if in_mark[begin] else part
    return html


# ---------------------------------------------------------------- parts of speech

def parts_of_speech(split: Split, texts: np.ndarray, nlp) -> np.ndarray:
    """(T,) the part of speech of each token of some texts, "" in all others.

    spaCy reads the raw text; a token belongs to the word in which its last character stands."""
    tags = np.full(len(split.input_ids), "", "U8")
    docs = nlp.pipe(map(split.text, texts), batch_size=64)
    for i, doc in zip(texts, docs, strict=True):
        tokens = slice(*split.token_start[i:i + 2])
        word = np.searchsorted([w.idx for w in doc], split.char_end[tokens] - 1, "right") - 1
        # A token of no characters may stand before the first word.
        here = word >= 0
        tags[tokens][here] = np.array([w.pos_ for w in doc])[word[here]]
    return tags


def shares(counts: pd.DataFrame) -> pd.DataFrame:
    """Percentages, from counts: a column per masker, a row for each of the six commonest parts of speech of
    all masked tokens, and "other"."""
    top = counts.drop(columns=ALL).sum(axis=1).nlargest(6).index
    percent = 100 * counts / counts.sum().clip(lower=1)
    table = percent.loc[top]
    table.loc["other"] = percent.drop(top).sum()
    return table


def draw(percent: pd.DataFrame, title: str, file: Path) -> None:
    """The paper's figure: a group of bars for each part of speech, and a line for the text as a whole."""
    fig = plots.figure(8, 3.8)
    ax = fig.subplots()
    percent.drop(columns=ALL).plot.bar(ax=ax, width=0.8, color=COLORS, rot=0, legend=False)
    x = np.arange(len(percent))
    ax.hlines(percent[ALL], x - 0.45, x + 0.45, color="black", linewidth=1.5, label=ALL)
    ax.set(title=title, ylabel="share of the masked tokens, %")
    ax.yaxis.grid(color="#e3e3e3")
    ax.set_axisbelow(True)
    fig.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    plots.save(fig, file)


# ---------------------------------------------------------------- the script

def main(cfg: Config) -> None:
    # 1. the maskers, the text and the LM
    # As pretrain.py does, so that these are the masks that it makes.
    devices.use_fast_path(not runs.is_tiny(cfg.lm))
    found = {name: maskers.find(name) for name in maskers.split_names(cfg.maskers)}
    nlp = None
    if cfg.spacy_model:
        nlp = data_prep.load_spacy(cfg.spacy_model, exclude=["parser", "lemmatizer", "ner"])
    tokenizer = load_tokenizer(cfg.lm)
    model = load_lm(cfg.lm, cfg.seed)
    data = data_prep.load(cfg.dataset, tokenizer, spacy_model=cfg.spacy_model, columns=cfg)
    split = data[cfg.split] if cfg.split else data_prep.text_to_read(data, data_prep.what_to_read(data))
    pieces = blocks(split, max_len_of(model, data.block_len))

    # 2. what they choose in some texts, as a page
    order = rng_for(cfg.seed, "contexts").permutation(np.flatnonzero(np.diff(split.token_start)))
    texts = np.sort(order[:cfg.contexts])
    indices = np.flatnonzero(np.isin(pieces.text_ids, texts))
    lm = LMReader(model)
    masked = {}
    for name, masker in found.items():
        masked[name] = choices(pieces, masker, indices, cfg, lm)
        top = []
        for token, share in most_masked(split, texts, masked[name]):
            top.append(f"{tokenizer.convert_ids_to_tokens(token)!r} {share:.0%}")
        print(f"{name} masks most of: {', '.join(top) or 'no token that occurs ten times'}")
    if not any(mask.any() for mask in masked.values()):
        raise UserError(f"--maskers={cfg.maskers}: none of them masks anything")
    title = f"{Path(data.name).name}, {Path(cfg.lm).name}"
    about = (f"{len(texts)} of {len(order):,} texts; {100 * cfg.p:g} % of the tokens masked, in blocks "
             f"as in pre-training; seed {cfg.seed}. Yellow: masked. All maskers are given the same "
             "random numbers.")
    with runs.atomic_write(Path(cfg.out) / "masks.html") as partial:
        partial.write_text(page(title, about, split, texts, masked), "utf-8")
    print(f"page: {cfg.out}/masks.html")

    # 3. what each of them prefers
    tags = None
    if nlp:
        tags = parts_of_speech(split, texts, nlp)
        if not (tags != "").any():
            raise UserError("--spacy_model: this pipeline tells no parts of speech (pos_); en_core_web_sm "
                            "does")
    features = token_features(pieces, indices, lm, tags)
    text_of_token = np.repeat(np.arange(len(split)), np.diff(split.token_start))
    doc = pd.Series(split.doc[text_of_token[features.index]], features.index)
    tables = {name: preferences(features, doc, mask) for name, mask in masked.items() if mask.any()}
    for name, table in tables.items():
        print(f"{name}: masked minus text, in standard deviations, with the 95 % interval over "
              f"{doc[masked[name][features.index]].nunique()} documents")
        for feature, (mean, low, high) in table.iterrows():
            print(f"    {feature:12} {mean:+.2f} ({low:+.2f} to {high:+.2f})")
    with runs.atomic_write(Path(cfg.out) / "preferences.csv") as partial:
        pd.concat(tables, names=["masker", "feature"]).to_csv(partial)
    print(f"table: {cfg.out}/preferences.csv")

    # 4. the picture
    if not nlp:
        print("no picture of parts of speech: it needs --spacy_model=en_core_web_sm, or another spaCy model")
        return
    masked[ALL] = (tags != "") & (split.word_ids >= 0)
    counts = {name: pd.Series(tags[mask]).value_counts() for name, mask in masked.items()}
    percent = shares(pd.DataFrame(counts).fillna(0))
    for name, column in percent.items():
        each = [f"{tag} {x:.1f} %" for tag, x in column.items()]
        print(f"{name:16}", *each, sep="  ")
    draw(percent, f"Parts of speech of masked words: {title}", Path(cfg.out) / "parts_of_speech.png")
    print(f"picture: {cfg.out}/parts_of_speech.png")


if __name__ == "__main__":
    runs.start(main, Config, tiny={"p": toy.PRETRAIN["p"]})
