"""Counter-based random numbers.

Random numbers are a hash of (key, counter), vectorised and without generator state. A draw at (seed, epoch, record,
position) is the same in any order, process or batch, so a run is a function of its data, arguments and seed. The
mixing function is SplitMix64's finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA
2014; constants: Stafford's variant 13).
"""

from __future__ import annotations

import numpy as np

GAMMA = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: the step between the counters of one key
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
WORD = (1 << 64) - 1

# The purpose of a key, so that two uses of one (seed, epoch) never share a stream.
BLOCK_ORDER, ROTATION, RECORD_ORDER, PACK_ORDER, CROP, MASKING, MEMBER, BYTES, CLUSTER_ORDER, ROUNDING = range(1, 11)
SET_ORDER, SET_SIZE, MASK_RATE = range(11, 14)
DIRECTION, FILL_IN, SPANS = range(21, 24)  # of protein decoders


def mix_int(x: int) -> int:
    """The mixing function of one Python integer, modulo 2^64."""
    x &= WORD
    x = (x ^ (x >> 30)) * MULTIPLIERS[0] & WORD
    x = (x ^ (x >> 27)) * MULTIPLIERS[1] & WORD
    return x ^ (x >> 31)


def mix(x: np.ndarray) -> np.ndarray:
    """The mixing function of every element of `x` (uint64, any shape). Changes `x` in place and returns it."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(MULTIPLIERS[0])
    x ^= x >> np.uint64(27)
    x *= np.uint64(MULTIPLIERS[1])
    x ^= x >> np.uint64(31)
    return x


def derive_key(*parts: int) -> int:
    """One 64-bit key from integers such as (seed, epoch, purpose); the order of the parts matters."""
    key = 0
    for part in parts:
        key = mix_int((key + GAMMA) ^ mix_int(part + GAMMA))
    return key


def hash_counters(key: int, counters: np.ndarray) -> np.ndarray:
    """uint64 hashes of the integers `counters` (any shape) under `key`."""
    hashes = counters.astype(np.uint64)
    hashes *= np.uint64(GAMMA)
    hashes += np.uint64(key)
    return mix(hashes)


def scale(hashes: np.ndarray, sizes: np.ndarray | int) -> np.ndarray:
    """Uniform int64 in [0, size) from the hashes' upper 32 bits; 1 <= sizes < 2^32, bias below size / 2^32."""
    sizes = np.asarray(sizes, dtype=np.uint64)
    return (((hashes >> np.uint64(32)) * sizes) >> np.uint64(32)).astype(np.int64)


class Permutation:
    """A keyed bijection of [0, size) that needs no table: a Feistel network with cycle walking.

    The network permutes the smallest [0, 4^b) that holds the range; an image outside the range is sent through again
    until it falls inside, fewer than 4 times on average.
    """

    ROUNDS = 6

    def __init__(self, size: int, key: int):
        assert size >= 1
        self.size = size
        self.half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self.half_mask = np.uint64((1 << int(self.half_bits)) - 1)
        self.keys = [derive_key(key, round_number) for round_number in range(self.ROUNDS)]

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Images int64 [n] of indices [n], each in [0, size)."""
        images = self._network(indices.astype(np.uint64))
        while len(outside := np.flatnonzero(images >= self.size)):
            images[outside] = self._network(images[outside])
        return images.astype(np.int64)

    def _network(self, x: np.ndarray) -> np.ndarray:
        left, right = x >> self.half_bits, x & self.half_mask
        for key in self.keys:
            left, right = right, left ^ (hash_counters(key, right) >> np.uint64(32) & self.half_mask)
        return left << self.half_bits | right
