"""Shows what maskers choose: masks.html, a page to read, and parts_of_speech.png, which words they take (PAPER: figures).

    python show_masks.py                                                        # toy world, tiny LM, no download
    python show_masks.py --dataset=newsqa --lm=bert-base-uncased --maskers=random,nmg:runs/nmg-newsqa-bert-base-uncased-0
    python show_masks.py --dataset=chemprot --lm=bert-base-uncased --spacy_model=en_core_web_sm       # with parts of speech and entities

All maskers choose beside the LM as it is now, at the same budget: the masks of the first epoch of pretrain.py with that seed and p (of a
learned masker as long as training has not moved the LM).
"""
import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import data_prep
import maskers as strategies
from data_prep import Rows, Specials, Split, blocks, gather
from loop import UserError, beside, by_length, checked, cli, stream
from pretrain import fitting, hidden_states, lineage, load_lm, masked_rows

STANDARD = ("random", "whole", "span", "entity", "punct")
COLORS = ("#9db8d2", "#1f3b57", "#d08c3c", "#7d9c6c", "#8c5a7c", "#b9b09a")


# ---------------------------------------------------------------- what is chosen

def chosen(pieces: Rows, rows: np.ndarray, masker: strategies.Masker, p: float, seed: int, lm) -> np.ndarray:
    """(T,) bool over the split's tokens: masked, in the given blocks."""
    out = np.zeros(len(pieces.split.ids), bool)
    for part in by_length(pieces.length[rows]):
        batch, mask, _ = masked_rows(pieces, masker, p, seed, 0, rows[part], lm)
        out[batch.at[mask]] = True
    return out


def probabilities(pieces: Rows, rows: np.ndarray, policy: strategies.NMG, lm) -> np.ndarray:
    """(T,) the policy's probability of each token: a softmax over the maskable tokens of its block, 0 elsewhere."""
    out = np.zeros(len(pieces.split.ids), np.float32)
    for part in by_length(pieces.length[rows]):
        batch = gather(pieces, rows[part])
        logits = torch.from_numpy(strategies.policy_logits(batch, lm, policy))                  # (B, L), -inf where not maskable
        out[batch.at[batch.ok]] = logits.softmax(1).numpy()[batch.ok]
    return out


# ---------------------------------------------------------------- the page

def answer_of(split: Split, question: int) -> tuple[int, int]:
    """Characters begin:end of a question's answer. The arrays know its tokens; its own text says where in them it begins and ends."""
    begin, end = split.start[split.q_row[question]] + split.answer[question]
    begin, end = int(split.begin[begin]), int(split.end[end])
    text = split.raw(split.q_row[question])[begin:end]
    exact = max((s.strip() for s in split.questions[question]["scored"] if s.strip() in text), key=len, default=text)
    begin += text.index(exact)
    return begin, begin + len(exact)


def context(split: Split, i: int, labels: list[str], masked: dict[str, np.ndarray], p: dict[str, np.ndarray]) -> dict:
    """Text i as the page shows it. pieces: [characters, first token, token after its last, whether in an answer]; together the raw text."""
    text, tokens = split.raw(i), slice(split.start[i], split.start[i + 1])
    begin, end = split.begin[tokens], split.end[tokens]
    asked = np.flatnonzero(split.q_row == i).tolist() if hasattr(split, "q_row") else []
    answers = [answer_of(split, q) for q in asked]
    cuts = np.unique([0, len(text), *begin, *end, *itertools.chain(*answers)]).tolist()
    pieces = [[text[a:b], int(np.searchsorted(end, a, "right")), int(np.searchsorted(begin, b)), any(lo <= a < hi for lo, hi in answers)]
              for a, b in itertools.pairwise(cuts)]
    return {"name": f"text {i:,}" + (f", {labels[split.label[i]]}" if hasattr(split, "label") else ""),
            "pieces": pieces, "maskable": int((split.word[tokens] >= 0).sum()),
            "masked": {name: np.flatnonzero(m[tokens]).tolist() for name, m in masked.items()},
            "p": {name: [round(x, 6) for x in share[tokens].tolist()] for name, share in p.items()},
            "questions": [[split.questions[q]["question"], text[lo:hi]] for q, (lo, hi) in zip(asked, answers, strict=True)]}


def page(data: dict) -> str:
    """The page with its data inside: nothing in a text can end the script element, as no "<" is left in the JSON."""
    return PAGE.replace("DATA", json.dumps(data).replace("<", "\\u003c"))


PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>What is masked</title>
<style>
:root { color-scheme: light dark; --back: #fff; --card: #f6f7f9; --line: #d5d9df; --text: #1c1e21; --quiet: #565c66; --masked: #b3001b;
        --shade: 188 215 247; --answer: #fff0a8; --frame: #a67c00 }
@media (prefers-color-scheme: dark) {
  :root { --back: #15171b; --card: #1d2025; --line: #3a3f47; --text: #e6e8eb; --quiet: #a9b0ba; --masked: #ff9d94;
          --shade: 36 70 114; --answer: #463900; --frame: #d4a900 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 84rem; padding: 0 1rem 2rem; background: var(--back); color: var(--text); font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.15rem; margin: 1rem 0 0 }
p, summary, output { color: var(--quiet); font-size: .875rem; margin: .2rem 0 }
nav { position: sticky; top: 0; display: flex; flex-wrap: wrap; gap: .3rem .6rem; align-items: center; padding: .6rem 0; background: var(--back) }
button, select { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--quiet); border-radius: .4rem; min-height: 2.4rem;
                 padding: .2rem .7rem; max-width: 100% }
:focus-visible { outline: 3px solid var(--masked); outline-offset: 1px }
main { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem }
@media (max-width: 44rem) { main { grid-template-columns: 1fr } }
section { min-width: 0; background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem }
section output { display: block }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 1.0625rem; line-height: 1.9; margin-top: .6rem }
.text span { padding: .12em 0; border-radius: .15em }
.masked { color: var(--masked); text-decoration: underline 2px; text-underline-offset: .2em }
.answer { color: inherit; background: var(--answer); border: 2px solid var(--frame); border-radius: .3em; padding: .1em .15em;
          -webkit-box-decoration-break: clone; box-decoration-break: clone }
.bar { display: inline-block; width: 5rem; height: .8em; border: 1px solid var(--line); vertical-align: baseline;
       background: linear-gradient(to right, rgb(var(--shade) / 0), rgb(var(--shade))) }
li { margin: .4rem 0 }
kbd { border: 1px solid var(--quiet); border-radius: .25rem; padding: 0 .35rem; font: .8rem ui-monospace, monospace; color: var(--text) }
</style>
<h1 id="title"></h1>
<p id="about"></p>
<p><span class="masked">masked</span> <span id="asked">&nbsp; <mark class="answer">answer</mark></span>
  <span id="learned">&nbsp; <span class="bar"></span> probability of being masked</span></p>
<details id="keys"><summary>keys: <kbd>?</kbd></summary>
<p><kbd>j</kbd> or <kbd>→</kbd> next text, <kbd>k</kbd> or <kbd>←</kbd> the one before</p>
<p><kbd>1</kbd> to <kbd>9</kbd> masker on the left, with <kbd>Shift</kbd> on the right</p>
<p><kbd>a</kbd> next masker on the left, <kbd>Shift</kbd> <kbd>a</kbd> on the right, <kbd>s</kbd> swap sides</p>
<p><kbd>?</kbd> show or hide this</p></details>
<nav><button id="back">◀ <kbd>k</kbd></button><button id="next"><kbd>j</kbd> ▶</button><span id="where" aria-live="polite"></span>
  <output id="both"></output></nav>
<main>
  <section><label>left <select></select></label><output></output><div class="text" dir="auto"></div></section>
  <section><label>right <select></select></label><output></output><div class="text" dir="auto"></div></section>
</main>
<ol id="questions"></ol>
<script type="application/json" id="data">DATA</script>
<script>
const data = JSON.parse(document.getElementById("data").textContent), names = data.maskers, n = data.contexts.length
const $ = id => document.getElementById(id), sides = [...document.querySelectorAll("section")], percent = x => (100 * x).toFixed(1) + " %"
const make = (tag, text, kind = "") => Object.assign(document.createElement(tag), { textContent: text, className: kind })
let at = 0, side = [0, 1]

function drawSide(section, name, c) {
  const masked = new Set(c.masked[name]), p = c.p[name], most = Math.max(...(p || [0])), box = section.querySelector(".text")
  section.querySelector("select").value = name
  section.querySelector("output").textContent = `${masked.size} of ${c.maskable} tokens masked (${percent(masked.size / Math.max(1, c.maskable))})` +
    (p ? `; deepest shade ${percent(most)}, uniform ${percent(c.blocks / Math.max(1, c.maskable))}` : "")
  box.replaceChildren()
  let frame = null
  for (const [text, first, stop, inAnswer] of c.pieces) {
    const tokens = Array.from({ length: stop - first }, (_, i) => first + i), hit = tokens.some(t => masked.has(t))
    const word = make("span", text, hit ? "masked" : "")
    if (p && tokens.length) {
      const share = Math.max(...tokens.map(t => p[t]))
      word.style.background = `rgb(var(--shade) / ${most ? share / most : 0})`
      word.title = (hit ? "masked, " : "") + "probability " + percent(share)
    }
    if (inAnswer && !frame) box.append(frame = make("mark", "", "answer"))
    if (!inAnswer) frame = null;
    (frame || box).append(word)
  }
}

function draw() {
  const c = data.contexts[at], [left, right] = side.map(i => new Set(c.masked[names[i]]))
  $("where").textContent = `${at + 1} of ${n}: ${c.name}`
  $("both").textContent = `masked on both sides: ${[...left].filter(t => right.has(t)).length}`
  sides.forEach((section, s) => drawSide(section, names[side[s]], c))
  $("questions").replaceChildren(...c.questions.map(([question, answer]) => make("li", question + " → " + answer)))
}

function move(step) { at = (at + step + n) % n; draw() }
function choose(s, i) { if (i < names.length) { side[s] = i; draw() } }

sides.forEach((section, s) => {
  const select = section.querySelector("select")
  select.append(...names.map((name, i) => make("option", i < 9 ? `${i + 1} ${name}` : name)))
  names.forEach((name, i) => { select.options[i].value = name })
  select.onchange = () => choose(s, select.selectedIndex)
})
$("title").textContent = data.title
$("about").textContent = data.about
$("asked").hidden = !data.contexts.some(c => c.questions.length)
$("learned").hidden = !data.contexts.some(c => Object.keys(c.p).length)
$("back").onclick = () => move(-1)
$("next").onclick = () => move(1)
document.addEventListener("keydown", e => {
  if (e.ctrlKey || e.metaKey || e.altKey || (e.target.tagName === "SELECT" && e.key.startsWith("Arrow"))) return
  const s = e.shiftKey ? 1 : 0, key = e.key.toLowerCase(), digit = /^Digit([1-9])$/.exec(e.code)
  if (key === "j" || key === "arrowright") move(1)
  else if (key === "k" || key === "arrowleft") move(-1)
  else if (digit) choose(s, digit[1] - 1)
  else if (key === "a") choose(s, (side[s] + 1) % names.length)
  else if (key === "s") { side.reverse(); draw() }
  else if (key === "?") $("keys").open = !$("keys").open
  else return
  e.preventDefault()
})
draw()
</script>
</html>
"""


# ---------------------------------------------------------------- parts of speech

def parts_of_speech(split: Split, texts: np.ndarray, masked: dict[str, np.ndarray], nlp) -> dict[str, Counter]:
    """How many tokens of each part of speech each masker masked in some texts, and how many are maskable at all ("in the text").

    spaCy reads the raw text; a token is of the word in which its last character stands."""
    masked = masked | {"in the text": split.word >= 0}
    counts = {name: Counter() for name in masked}
    raw = ((split.raw(i), slice(split.start[i], split.start[i + 1])) for i in texts)
    nlp.max_length = 2**31                          # the limit is for the memory of the parts that are left out
    for doc, tokens in nlp.pipe(tqdm(raw, desc="parts of speech", total=len(texts), unit="text", disable=None), as_tuples=True):
        word = np.searchsorted([w.idx for w in doc], split.end[tokens] - 1, "right") - 1
        pos = np.array([w.pos_ for w in doc])[word]
        for name, hit in masked.items():
            counts[name].update(pos[hit[tokens]].tolist())
    if not any(counts["in the text"]):
        raise UserError("--spacy_model: this pipeline tells no parts of speech (pos_); en_core_web_sm does")
    return counts


def shares(counts: dict[str, Counter]) -> tuple[list[str], dict[str, list[float]]]:
    """The six commonest parts of speech of the learned masker (else of the first) and "other"; their shares by masker, in percent."""
    main = next((name for name in counts if strategies.is_learned(name)), next(iter(counts)))
    top = [pos for pos, _ in counts[main].most_common(6)]
    rows = {name: [*(count[pos] for pos in top), sum(count[pos] for pos in count if pos not in top)] for name, count in counts.items()}
    return [*top, "other"], {name: [100 * n / max(1, sum(row)) for n in row] for name, row in rows.items()}


def draw(kinds: list[str], percent: dict[str, list[float]], title: str, file: Path) -> None:
    """PAPER: parts of speech of the masked words. A group of bars for each, a bar for each masker, a line for the text as a whole."""
    from matplotlib.figure import Figure
    names, x = [name for name in percent if name != "in the text"], np.arange(len(kinds))
    width = 0.8 / len(names)
    fig = Figure(figsize=(8, 3.8), layout="constrained")
    ax = fig.subplots()
    for i, name in enumerate(names):
        ax.bar(x - 0.4 + (i + 0.5) * width, percent[name], width, color=COLORS[i % len(COLORS)], label=name)
    ax.hlines(percent["in the text"], x - 0.45, x + 0.45, color="black", linewidth=1.5, label="in the text")
    ax.set(title=title, ylabel="share of the masked tokens, %")
    ax.set_xticks(x, kinds)
    ax.yaxis.grid(color="#e3e3e3")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
    with beside(file) as tmp:
        fig.savefig(tmp, dpi=150, format="png")


# ---------------------------------------------------------------- command line

def main(
    dataset: str = "toycls",            # a name (squad newsqa emrqa imdb chemprot toycls toyqa) or a path (see data_prep.py)
    lm: str = "tiny",                   # the LM that the masks are for: tiny, a Hugging Face folder or hub name
    maskers: str | None = None,         # with commas between them, as --masker of pretrain.py; the page offers the standard ones as well
    p: float = 0.15,                    # share of tokens to mask, in (0, 1], the same for all
    contexts: int = 40,                 # texts on the page, drawn by seed
    most: int = 1000,                   # texts whose parts of speech are counted, at most
    seed: int = 0,                      # of the drawn texts and of the masks
    split: str | None = None,           # train dev test corpus; None: the text that pretrain.py reads
    raw: str | None = None,             # folder with raw files of a named data set
    spacy_model: str | None = None,     # parts of speech and named entities: a name or a folder; None: neither
    out: str = "runs/masks",            # folder of the page and the picture
):
    checked(locals())
    nlp = data_prep.load_spacy(spacy_model, "tells the parts of speech", exclude=["parser", "lemmatizer"]) if spacy_model else None
    finders = data_prep.entity_finders(nlp) if nlp else []
    standard = [name for name in STANDARD if name != "entity" or finders]
    given = maskers.split(",") if maskers else standard
    names = list(dict.fromkeys([*given, *standard]))
    found = {name: strategies.find(name) for name in names}
    if {"oracle", "anti"} & set(names) and lineage(lm)["base"] != "tiny":
        raise UserError("--maskers: oracle and anti know the words of the toy world only; allowed with --lm=tiny")
    if Path(out).exists() and not Path(out).is_dir():
        raise UserError(f"--out={out}: is a file; it must be a folder")
    tok = data_prep.load_tokenizer(lm)
    data = data_prep.load(dataset, tok, raw)
    text = data[split] if split else data.corpus
    text.spacy_model = spacy_model or text.spacy_model
    model = load_lm(lm)
    states = hidden_states(model)
    pieces = blocks(text, Specials.of(tok), fitting(model, None, 512 if data.kind == "qa" else 256))
    order = stream(seed, "contexts").permutation(np.flatnonzero(np.diff(text.start)))

    def of(texts):
        return np.flatnonzero(np.isin(pieces.row, texts))

    masked = {name: chosen(pieces, of(order[:max(contexts, most) if nlp else contexts]), masker, p, seed, states) for name, masker in found.items()}
    shown = np.sort(order[:contexts])
    learned = {name: probabilities(pieces, of(shown), found[name].keywords["policy"], states) for name in names if strategies.is_learned(name)}
    said = [context(text, i, data.labels, masked, learned) | {"blocks": len(of(i))} for i in shown.tolist()]
    title = f"{Path(data.name).name}, {Path(lm).name}"
    about = f"{len(said)} of {len(order):,} texts; {100 * p:g}% of the tokens masked, in blocks as in pre-training; seed {seed}"
    with beside(Path(out) / "masks.html") as tmp:
        tmp.write_text(page({"title": title, "about": about, "maskers": names, "contexts": said}), "utf-8")
    print(f"page: {out}/masks.html")
    if not nlp:
        return print("no picture of parts of speech: it needs --spacy_model=en_core_web_sm (python -m spacy download en_core_web_sm) or a folder")
    nlp.select_pipes(disable=finders)
    kinds, percent = shares(parts_of_speech(text, order[:most], {name: masked[name] for name in given}, nlp))
    for name, row in percent.items():
        print(f"{name:16}", *(f"{kind} {x:.1f}%" for kind, x in zip(kinds, row, strict=True)), sep="  ")
    draw(kinds, percent, f"Parts of speech of masked words: {title}", Path(out) / "parts_of_speech.png")
    print(f"picture: {out}/parts_of_speech.png")


if __name__ == "__main__":
    cli(main)
