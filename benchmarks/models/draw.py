"""Random inputs similar to training data: smooth pictures, voiced sound, tokens."""

from __future__ import annotations

import numpy as np

Array = np.ndarray
RATE = 16_000


class Draw:
    """A seeded source of inputs."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)

    def normal(self, *shape: int) -> Array:
        return self.random.standard_normal(shape).astype(np.float32)

    def uniform(self, *shape: int) -> Array:
        return self.random.random(shape, dtype=np.float32)

    def tokens(self, high: int, *shape: int, low: int = 0) -> Array:
        return self.random.integers(low, high, shape)

    def pictures(self, count: int, channels: int, height: int, width: int) -> Array:
        """Smoothed coarse noise plus fine noise, between 0 and 1."""
        coarse = self.random.random((count, channels, height // 16 + 2, width // 16 + 2))
        rows = _blend(height, coarse.shape[2])
        columns = _blend(width, coarse.shape[3])
        smooth = np.einsum("hr,ncrs,ws->nchw", rows, coarse, columns)
        noisy = smooth + 0.05 * self.random.standard_normal(smooth.shape)
        return np.clip(noisy, 0, 1).astype(np.float32)

    def signed_pictures(self, *shape: int) -> Array:
        return self.pictures(*shape) * 2 - 1

    def sound(self, count: int, samples: int) -> Array:
        """Harmonics of a tone with varying pitch and volume plus noise, between -1 and 1."""
        time = np.arange(samples) / RATE
        rows = []
        for _ in range(count):
            pitch = self.random.uniform(90, 240) * (1 + 0.2 * np.sin(2 * np.pi * 1.5 * time))
            phase = 2 * np.pi * np.cumsum(pitch) / RATE
            voice = sum(np.sin(k * phase) / k for k in range(1, 12))
            swell = 0.15 * (1.2 + np.sin(2 * np.pi * 3 * time))
            rows.append(swell * voice + 0.03 * self.random.standard_normal(samples))
        return np.clip(np.array(rows), -1, 1).astype(np.float32)


def _blend(size: int, knots: int) -> Array:
    """The matrix that interpolates `knots` values at `size` places."""
    place = np.linspace(0, knots - 1.001, size)
    left = place.astype(int)
    matrix = np.zeros((size, knots))
    matrix[np.arange(size), left] = 1 - (place - left)
    matrix[np.arange(size), left + 1] = place - left
    return matrix
