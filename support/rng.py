"""Named random streams: from one seed, each use has its own."""
import zlib

import numpy as np
import torch


def rng_for(seed: int, name: str) -> np.random.Generator:
    """The generator of one purpose ("order", "head", ...): drawing from one never moves another."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


class RowRandom:
    """Random numbers for the rows of a batch, each row with a stream of its own, whatever batch it comes in.

    Number j of a call is a hash of (seed, name, epoch, index of the row, call, j): shuffling, batch size,
    padding and the number of processes change nothing. epoch: of training, or an episode. A numpy
    generator for each row would do the same, but takes 10 to 40 µs to make, several times a step."""

    def __init__(self, seed: int, name: str, epoch: int, indices: np.ndarray):
        key = np.zeros(len(indices), np.uint64)
        for part in (seed, zlib.crc32(name.encode()), epoch, indices):
            key = splitmix64(key + np.asarray(part).astype(np.uint64) + np.uint64(1))
        self.key = key[:, None]
        self.calls = 0

    def random(self, shape: tuple[int, int]) -> np.ndarray:
        """(B, n) uniform in [0, 1)"""
        self.calls += 1
        counter = np.arange(shape[1], dtype=np.uint64) + np.uint64(self.calls << 32)
        return (splitmix64(self.key + splitmix64(counter)) >> np.uint64(11)) * 2.0**-53

    def gumbel(self, shape: tuple[int, int]) -> np.ndarray:
        """(B, n) noise: the k highest of logits + noise are k draws from their softmax, none twice."""
        return -np.log(-np.log(self.random(shape) + 1e-300))


def splitmix64(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014), uint64 -> uint64."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def torch_seed(seed: int, name: str) -> None:
    """Starts torch's own generators (initialization, dropout) on a named stream."""
    torch.manual_seed(int(rng_for(seed, name).integers(2**62)))
