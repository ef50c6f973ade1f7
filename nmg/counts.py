"""What a masker may count over a whole split: how often tokens occur, in how many texts, with which
labels; and the words and collocations of its texts. Each is counted once, and kept.

A split has T tokens in N texts; V is the size of the vocabulary (Split in support/data.py)."""
import functools
import itertools
import re
import unicodedata
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import regex

from support.data import Split
from support.runs import UserError
from support.sources import lines

LONGEST = 5     # words of a collocation, at most
# A word: letters, marks and digits, with apostrophes, hyphens and invisible joiners between them.
JOINT = r"[-'·\u2019\u2010\u2011\u00ad\u200c\u200d]"
WORD = regex.compile(rf"[\p{{L}}\p{{M}}\p{{N}}]+(?:{JOINT}[\p{{L}}\p{{M}}\p{{N}}]+)*")
LETTER = regex.compile(r"\p{L}")
# Letters of scripts that are written without spaces, and runs of them that are longer than a word.
CHINESE_JAPANESE = r"[\p{Han}\p{Hiragana}\p{Katakana}ー]"
SOUTHEAST_ASIAN = r"(?:[\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]\p{M}*)"
SPACELESS = regex.compile(f"{CHINESE_JAPANESE}|{SOUTHEAST_ASIAN}")
LONG_RUN = regex.compile(f"{CHINESE_JAPANESE}{{5,}}|{SOUTHEAST_ASIAN}{{9,}}")


@functools.cache
def token_counts(split: Split) -> np.ndarray:
    """(V,) how often each token occurs in a split, at least 1."""
    return np.maximum(1, np.bincount(split.input_ids, minlength=split.special.vocabulary_size))


@functools.cache
def inverse_document_frequency(split: Split) -> np.ndarray:
    """(V,) log(N / df) of the N texts of a split, of which df hold the token; a little above 0 at least."""
    V = split.special.vocabulary_size
    text_ids = np.repeat(np.arange(len(split)), np.diff(split.token_start))
    df = np.bincount(np.unique(text_ids * V + split.input_ids) % V, minlength=V)
    return np.log((len(split) + 1) / np.maximum(1, df))


@functools.lru_cache(maxsize=4)
def label_information(split: Split, texts: tuple[int, ...]) -> np.ndarray:
    """(V,) KL(p(label | token), p(label)) in nats, smoothed by 5 tokens of p(label), and 1e-4 at least.

    texts: whose labels are counted: the labelled examples of a sub-task; in meta-testing, those of train"""
    if hasattr(split, "label") and (split.label >= 0).any():
        label = np.repeat(split.label, np.diff(split.token_start))                              # (T,)
    elif not hasattr(split, "answer") or (split.answer < 0).all():
        raise UserError("the score 'label' needs labels or answers in train, and these texts have neither")
    else:
        # Whether a token stands in an answer: answers add 1 where they begin, and take it away behind.
        starts = split.token_start[split.question_text]
        change = np.zeros(len(split.input_ids) + 1, np.int64)
        answered = split.answer[:, 0] >= 0
        np.add.at(change, (starts + split.answer[:, 0])[answered], 1)
        np.add.at(change, (starts + split.answer[:, 1] + 1)[answered], -1)
        label = (np.cumsum(change[:-1]) > 0).astype(np.int64)
    known = np.repeat(np.isin(np.arange(len(split)), texts), np.diff(split.token_start))
    count = np.zeros((split.special.vocabulary_size, label.max() + 1))
    np.add.at(count, (split.input_ids[known], label[known]), 1)
    p_label = (count.sum(0) + 1) / (count.sum() + count.shape[1])
    p_given = (count + 5 * p_label) / (count.sum(1, keepdims=True) + 5)                         # (V, labels)
    return 1e-4 + (p_given * np.log(p_given / p_label)).sum(1)


class Words(NamedTuple):
    """The words of a split, and the signs between them; W different ones, in the order of their first use."""
    word_of_token: np.ndarray   # (T,)
    first_token: np.ndarray     # of every occurrence of a word, in order
    count: np.ndarray           # (W,) how often each occurs
    text: list[str]             # (W,) in lower case

    def have_letters(self) -> np.ndarray:
        """(W,) bool"""
        return np.array([has_letter(word) for word in self.text])


def has_letter(word: str) -> bool:
    return any(map(str.isalpha, word))


@functools.cache
def words_of(split: Split) -> Words:
    """The words of the raw texts of a split. Raises UserError if there are no spaces between them."""
    check_spaces(split)
    index = {}
    first_token = []
    word_of_token = np.zeros(len(split.input_ids), np.int64)
    for i in range(len(split)):
        text = split.text(i)
        start, stop = split.token_start[i:i + 2]
        # A word begins where the index of the word changes.
        begins = start + np.flatnonzero(np.diff(split.word_ids[start:stop], prepend=-2))
        for a, b in itertools.pairwise([*begins.tolist(), stop]):
            word = plain_word(text[split.char_begin[a]:split.char_end[b - 1]])
            word_of_token[a:b] = index.setdefault(word, len(index))
        first_token.extend(begins.tolist())
    count = np.bincount(word_of_token[first_token])
    return Words(word_of_token, np.array(first_token), count, list(index))


@functools.lru_cache(maxsize=100_000)
def plain_word(characters: str) -> str:
    """The word in the characters of some tokens, which may hold blanks and signs, too: in lower case, with
    straight apostrophes and composed accents. Where there is no word, the signs."""
    words = WORD.findall(characters) or [characters.strip()]
    return unicodedata.normalize("NFC", " ".join(words).lower()).replace("\u2019", "'")


@functools.cache
def check_spaces(split: Split) -> None:
    """Raises UserError if more than a fifth of the letters stand in scripts without spaces between words.
    Looks at 1,000 texts at most, and 10,000 characters of each."""
    letters, in_runs = 0, 0
    for i in np.unique(np.linspace(0, len(split) - 1, 1000).astype(int)):
        text = split.text(i)[:10_000]
        letters += len(LETTER.findall(text))
        # A short text without any space needs no long run.
        runs = LONG_RUN if re.search(r"\s", text.strip()) else SPACELESS
        in_runs += len(LETTER.findall("".join(runs.findall(text))))
    if in_runs > 0.2 * letters:
        raise UserError(f"{in_runs / letters:.0%} of the letters of this text stand in scripts without "
                        "spaces between words (Chinese, Japanese, Thai, ...), so that whole, span, pmi, "
                        "difference and subword find no words; put spaces there with a segmenter (jieba, "
                        "fugashi, PyThaiNLP), or choose another masker")


@functools.cache
def log_ratio_to_general(split: Split, general: Path) -> np.ndarray:
    """(W,) log p(word) in the split - log p(word) in general text. There a word that is not listed counts as
    the rarest of its parts between hyphens and apostrophes, and a part that is not listed as the rarest word
    of the list."""
    counts = general_counts(general)
    total, least = sum(counts.values()), min(counts.values())
    words = words_of(split)
    in_general, is_listed = [], []
    for word in words.text:
        parts = [word] if word in counts else regex.split(JOINT, word)
        in_general.append(min(counts.get(part, least) for part in parts))
        is_listed.append(all(part in counts for part in parts))
    occurrences = words.count * words.have_letters()
    unlisted_share = occurrences[np.logical_not(is_listed)].sum() / max(1, occurrences.sum())
    if unlisted_share > 0.4:
        print(f"WARNING: {unlisted_share:.0%} of the words of this text are not in {general.name}: is that a "
              "list for this language? (--masker=difference:FILE)", flush=True)
    log_ratio = np.log(words.count / words.count.sum()) - np.log(np.array(in_general) / total)
    return np.where(words.have_letters(), log_ratio, 0)


def general_counts(file: Path) -> dict[str, int]:
    """{word: count} of a file. Raises UserError if a line has no count."""
    counts = {}
    for where, line in lines(file):
        word, _, count = line.rstrip("\n").partition("\t")
        if not count.isdecimal() or int(count) == 0:
            raise UserError(f"{where}: must be a word, a tab, and how often the word occurs")
        # Lists may write names and German nouns with capitals, and accents as signs of their own.
        word = plain_word(word)
        counts[word] = counts.get(word, 0) + int(count)
    if not counts:
        raise UserError(f"{file}: is empty; each line must be a word, a tab, and how often the word occurs")
    return counts


@functools.cache
def collocations(split: Split) -> np.ndarray:
    """(T,) which unit of the split a token belongs to: a collocation, else its word alone.

    PMI-Masking (Levine et al. 2021): n-grams of 2 to 5 words that occur at least 10 times and whose PMI is
    above the median. PMI: log p(n-gram) - log (p(segment) p(segment) ...), the least of all ways to cut."""
    words = words_of(split)
    ends = np.searchsorted(words.first_token, split.token_start[1:-1])
    texts = [text.tolist() for text in np.split(words.word_of_token[words.first_token], ends)]
    kept = high_pmi(texts, set(np.flatnonzero(words.have_letters()).tolist()))

    # From left to right, the longest collocation that begins at a word.
    begins = []
    for text in texts:
        i = 0
        while i < len(text):
            left = min(LONGEST, len(text) - i)
            lengths = [n for n in range(2, left + 1) if tuple(text[i:i + n]) in kept]
            length = max(lengths, default=1)
            begins += [True] + [False] * (length - 1)
            i += length
    first = np.zeros(len(split.input_ids), np.int64)
    first[words.first_token[begins]] = 1
    return np.cumsum(first)


def high_pmi(texts: list[list[int]], words: set[int]) -> set[tuple[int, ...]]:
    """The collocations among the n-grams of some texts that consist of the given words."""
    total = sum(map(len, texts))
    # Only frequent n-grams that are made of frequent parts are in it. For each the highest log p: of its own
    # frequency, or of its best division into two parts, each of which has its highest log p in turn.
    likeliest = {}
    pmi = {}
    for n in range(1, LONGEST + 1):
        count = Counter()
        for text in texts:
            for i in range(len(text) - n + 1):
                gram = tuple(text[i:i + n])
                # An n-gram is no more frequent than its parts.
                if n == 1 or (gram[1:] in likeliest and gram[:-1] in likeliest):
                    count[gram] += 1
        for gram, times in count.items():
            if times < 10 or (n == 1 and gram[0] not in words):
                continue
            log_p = np.log(times / total)
            divided = max([likeliest[gram[:k]] + likeliest[gram[k:]] for k in range(1, n)], default=log_p)
            likeliest[gram] = max(log_p, divided)
            if n > 1:
                pmi[gram] = log_p - divided
    # The median of all and 0, as there may be no n-gram.
    median = np.median([0.0, *pmi.values()])
    return {gram for gram, value in pmi.items() if value > median}
