"""Sums over replicas a second time, in plain numpy on whole arrays, without a mesh.

Arrays are [replicas, ...]. The methods by element know which part of an array a device has, since
blocks and groups end with it: `boxes` are those parts.
"""

from collections.abc import Sequence

import numpy as np

type Box = tuple[slice, ...]


def _dequantized(x: np.ndarray) -> np.ndarray:
    """[..., block] -> what int8 codes with one scale per block stand for."""
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    codes = np.rint(x / np.where(scale == 0, 1, scale)).astype(np.int8)
    return codes.astype(np.float32) * scale


def int8(x: np.ndarray, boxes: Sequence[Box], block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum [...] and the errors [replicas, ...]."""
    total, errors, replicas = np.zeros_like(x[0]), np.zeros_like(x), len(x)
    for box in boxes:
        shape, size = x[0][box].shape, x[0][box].size
        blocks = -(-size // (block * replicas))
        padded = np.zeros((replicas, replicas * blocks * block), np.float32)
        padded[:, :size] = x[(slice(None), *box)].reshape(replicas, -1)
        pieces = padded.reshape(replicas, replicas, blocks, block)  # sender, owner
        sent = _dequantized(pieces)
        owned = sent.sum(0, dtype=np.float32)
        shared = _dequantized(owned)
        left = pieces - sent
        for owner in range(replicas):
            left[owner, owner] += owned[owner] - shared[owner]
        total[box] = shared.reshape(-1)[:size].reshape(shape)
        errors[(slice(None), *box)] = left.reshape(replicas, -1)[:, :size].reshape(-1, *shape)
    return total, errors


def top_k(x: np.ndarray, boxes: Sequence[Box], ratio: float, group: int, columns: int):
    """Return the sum and the errors. Groups have `columns` neighbors in each part of an array."""
    total, errors = np.zeros_like(x[0]), x.copy()
    for box in boxes:
        size = x[0][box].size
        each, neighbors = (group, columns) if size > group else (size, size)
        k = max(1, round(ratio * each))
        places = np.arange(-(-size // each) * each).reshape(each // neighbors, -1, neighbors)
        groups = places.swapaxes(0, 1).reshape(-1, each)
        for replica in range(len(x)):
            left = np.zeros(groups.size, np.float32)
            left[:size] = errors[replica][box].reshape(-1)
            sent = np.zeros_like(left)
            for own in groups:
                chosen = own[np.argsort(-np.abs(left[own]), kind="stable")[:k]]
                sent[chosen], left[chosen] = left[chosen], 0
            errors[replica][box] = left[:size].reshape(errors[replica][box].shape)
            total[box] += sent[:size].reshape(total[box].shape)
    return total, errors
