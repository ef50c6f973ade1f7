"""Makes nmg/general_words.txt, the counts of English words that the masker `difference` reads.

    pip install wordfreq && python -m tools.general_words --out=nmg/general_words.txt   # the 20,000 commonest

The figures are those of Robyn Speer's wordfreq 3 (2022), CC BY-SA 4.0. Counts of text of your own, a file of
"word<TAB>count" lines, are for --masker=difference:FILE.
"""
from dataclasses import dataclass
from pathlib import Path

from nmg.counts import has_letter
from support import runs


@dataclass
class Config:
    language: str = "en"                # of wordfreq
    words: int = 20_000                 # the commonest are kept
    out: str = "general_words.txt"


def main(cfg: Config) -> None:
    if not cfg.out.endswith(".txt"):
        raise runs.UserError(f"--out={cfg.out}: is a list of words, and must end with .txt")
    try:
        import wordfreq
    except ImportError:
        raise runs.UserError("needs the package wordfreq: pip install wordfreq") from None
    rows = []
    for word in wordfreq.top_n_list(cfg.language, cfg.words):
        # What has no letter (numbers) is lumped together in wordfreq.
        if has_letter(word):
            # How often it occurs among 10^9 words.
            rows.append(f"{word}\t{round(1e9 * wordfreq.word_frequency(word, cfg.language))}\n")
    with runs.atomic_write(Path(cfg.out)) as partial:
        partial.write_text("".join(rows), encoding="utf-8")
    print(f"{cfg.out}: {len(rows):,} words")


if __name__ == "__main__":
    runs.start(main, Config)
