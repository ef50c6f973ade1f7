"""Makes general_words.txt: how often words occur in English at large, of the masker `difference`.

    pip install wordfreq && python -m tools.general_words           # the 20,000 commonest English words
    python -m tools.general_words --text=text.txt --out=words.txt   # for --masker=difference:words.txt
"""
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

import runs
from runs import UserError
from scores import has_letter
from sources import lines


@dataclass
class Config:
    text: str | None = None             # a text file, also gzipped; None: the counts of the package wordfreq
    language: str = "en"                # of wordfreq
    words: int = 20_000                 # the commonest are kept
    out: str = "general_words.txt"


def from_wordfreq(language: str, n: int) -> dict[str, int]:
    """{word: how often it occurs among 10^9}; figures of Robyn Speer's wordfreq 3 (2022), CC BY-SA 4.0."""
    try:
        import wordfreq
    except ImportError:
        raise UserError("the counts need a package that is not installed: pip install wordfreq") from None
    return {word: round(1e9 * wordfreq.word_frequency(word, language))
            for word in wordfreq.top_n_list(language, n)}


def from_text(file: Path, n: int) -> dict[str, int]:
    """{word: how often it occurs in a file}"""
    counts = Counter()
    for _, line in tqdm(lines(file), unit="line", disable=None):
        counts.update(re.findall(r"\w+", line.lower()))
    return dict(counts.most_common(n))


def main(cfg: Config) -> None:
    text = cfg.text and Path(cfg.text)
    counts = from_text(text, cfg.words) if text else from_wordfreq(cfg.language, cfg.words)
    # What has no letter (numbers) is lumped together in wordfreq.
    counts = {word: count for word, count in counts.items() if has_letter(word)}
    with runs.atomic_write(Path(cfg.out)) as partial:
        rows = [f"{word}\t{count}\n" for word, count in counts.items()]
        partial.write_text("".join(rows), encoding="utf-8")
    print(f"{cfg.out}: {len(counts):,} words, {sum(counts.values()):,} occurrences")


if __name__ == "__main__":
    runs.start(main, Config)
