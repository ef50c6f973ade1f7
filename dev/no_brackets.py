"""A masker of one's own: random tokens, but never the brackets << >> and [[ ]], in which ChemProt and SciERC
mark the two entities of a sentence. (A lone < or [ of the text is left out, too.)

    python pretrain.py --dataset=chemprot --lm=MINILM --masker=dev/no_brackets.py:no_brackets
"""
import numpy as np

import maskers
from support.data import Batch


def no_brackets(batch: Batch, budget: np.ndarray, rng: maskers.RowRandom, lm=None) -> np.ndarray:
    is_bracket = np.zeros(batch.maskable.shape, bool)
    for row, text_id in enumerate(batch.text_ids):
        text = batch.split.text(text_id)
        for column in batch.in_text[row].nonzero()[0]:
            first = batch.split.char_begin[batch.token_at[row, column]]
            is_bracket[row, column] = text[first] in "<>[]"
    # All random numbers are below 1, so that brackets come last.
    return maskers.pick(rng.random(is_bracket.shape) - is_bracket, batch, budget)
