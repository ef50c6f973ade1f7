"""Checkpoints: what a killed run needs to go on to the same result."""
import contextlib
import pickle
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from support.runs import UserError, atomic_write, is_out_of_memory


def save_checkpoint(file: Path, trained: dict, done: int, seconds: float) -> None:
    """trained: name -> what has a state_dict()"""
    state = {name: part.state_dict() for name, part in trained.items()}
    save_state(file, state | {"done": done, "seconds": seconds})


def load_checkpoint(file: Path, trained: dict) -> tuple[int, float]:
    """Returns the steps that are done, and the seconds that they took."""
    with loaded_state(file) as state:
        for name, part in trained.items():
            # Where the scaler was off (no fp16), its state is empty, and one that is on would refuse it.
            if state[name]:
                part.load_state_dict(state[name])
        return state["done"], state["seconds"]


def save_state(file: Path, state: dict) -> None:
    # Opened here, as torch does not say that a disk is full.
    with atomic_write(file) as partial, open(partial, "wb") as f:
        torch.save(state, f)


@contextlib.contextmanager
def loaded_state(file: Path) -> Iterator[dict]:
    """What save_state wrote. Raises UserError if the file is damaged, or the block cannot use its content."""
    try:
        # torch writes the checksums of a zip file, but does not read them.
        with zipfile.ZipFile(file) as f:
            damaged = f.testzip()
        if damaged:
            raise ValueError(f"the checksum of {damaged} is another")
        yield torch.load(file, weights_only=True, map_location="cpu")
    # What torch raises for a file that is cut short, and the block for values of other types.
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, EOFError,
            zipfile.BadZipFile, zlib.error, pickle.UnpicklingError) as e:
        # That is no fault of the file.
        if is_out_of_memory(e):
            raise
        raise UserError(f"{file}: cannot be read (cut short, damaged, or of other code); remove it, and the "
                        f"same command begins anew. The reason: {' '.join(repr(e).split())[:200]}") from e
