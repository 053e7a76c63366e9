"""The thesis' programs (section 3.2) in NumPy, their inputs, and random programs.

Each program takes arrays and returns arrays. It runs on NumPy's, lazy and Dask's alike. Loops are unrolled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import erf

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class Subject:
    """A program and its inputs at a scale; 1 suits a test."""

    name: str
    program: Callable[..., Any]
    inputs: Callable[[int], Arrays]
    copies: float = 0.1
    """Memory for copies, as a share of the inputs."""


def linear(x: Any, y: Any, w: Any) -> Any:
    for _ in range(3):
        w = w - np.dot(x.T, np.dot(x, w) - y) * (0.1 / len(x))
    return w


def ridge(x: Any, y: Any, w: Any) -> Any:
    for _ in range(3):
        w = w - (np.dot(x.T, np.dot(x, w) - y) / len(x) + 0.1 * w) * 0.1
    return w


def logistic(x: Any, y: Any, w: Any) -> Any:
    for _ in range(3):
        w = w - np.dot(x.T, 1 / (1 + np.exp(-np.dot(x, w))) - y) * (0.1 / len(x))
    return w


def svm(x: Any, y: Any, w: Any) -> Any:
    """Minimize the hinge loss by its subgradient."""
    for _ in range(3):
        margin = y * np.dot(x, w)
        w = w - (0.01 * w - np.dot(x.T, np.where(margin < 1, y, 0)) / len(x)) * 0.1
    return w


def kmeans(points: Any, centers: Any) -> Any:
    for _ in range(3):
        nearest = np.argmin(np.sum(centers * centers, axis=1)[None, :] - 2 * np.dot(points, centers.T), axis=1)
        member = (nearest[:, None] == np.arange(len(centers))[None, :]).astype(points.dtype)
        centers = np.dot(member.T, points) / np.maximum(np.sum(member, axis=0), 1)[:, None]
    return centers


def fuzzy_kmeans(points: Any, centers: Any) -> Any:
    for _ in range(3):
        squares = np.sum(points * points, axis=1)[:, None] + np.sum(centers * centers, axis=1)[None, :]
        closeness = 1 / np.square(np.maximum(squares - 2 * np.dot(points, centers.T), 1e-3))
        member = np.square(closeness / np.sum(closeness, axis=1)[:, None])
        centers = np.dot(member.T, points) / np.sum(member, axis=0)[:, None]
    return centers


def als(ratings: Any, movies: Any) -> Any:
    """Alternate between users' and movies' factors (Figure 2.3)."""
    ridge_term = 10 * np.eye(movies.shape[1], dtype=np.float32)
    users = movies
    for _ in range(2):
        users = np.dot(np.dot(ratings, movies), np.linalg.inv(np.dot(movies.T, movies) + ridge_term))
        movies = np.dot(np.dot(ratings.T, users), np.linalg.inv(np.dot(users.T, users) + ridge_term))
    return users, movies


def ssvd(x: Any, directions: Any) -> Any:
    """Project on a random subspace, orthonormalized by a Cholesky factor."""
    sample = np.dot(x, directions)
    factor = np.linalg.cholesky(np.dot(sample.T, sample))
    basis = np.dot(sample, np.linalg.inv(factor).T)
    small = np.dot(basis.T, x)
    return basis, np.dot(small, small.T)


def pca(x: Any, direction: Any) -> Any:
    """Find the first principal component by power iteration."""
    centred = x - np.mean(x, axis=0)
    for _ in range(3):
        direction = np.dot(centred.T, np.dot(centred, direction))
        direction = direction / np.linalg.norm(direction)
    return direction


def conjugate_gradient(a: Any, b: Any) -> Any:
    residual, direction, x = b, b, b * 0
    square = np.sum(residual * residual)
    for _ in range(3):
        image = np.dot(a, direction)
        step = square / np.sum(direction * image)
        x = x + step * direction
        residual = residual - step * image
        next_square = np.sum(residual * residual)
        direction = residual + (next_square / square) * direction
        square = next_square
    return x


def cholesky(a: Any) -> Any:
    """Factorize by blocks of a quarter, from the left."""
    size, columns = len(a) // 4, []
    n = len(a)
    for k in range(0, n, size):
        diagonal = np.linalg.cholesky(a[:size, :size])
        if len(a) == size:
            columns.append((k, diagonal))
            break
        panel = np.dot(a[size:, :size], np.linalg.inv(diagonal).T)
        columns.append((k, np.concatenate([diagonal, panel])))
        a = a[size:, size:] - np.dot(panel, panel.T)
    zeros = [np.zeros((k, size), np.float32) for k, _ in columns]
    return np.concatenate(
        [np.concatenate([z, c]) if k else c for z, (k, c) in zip(zeros, columns, strict=True)], axis=1
    )


def naive_bayes(counts: Any, labels: Any) -> Any:
    """Train a multinomial model on word counts and one-hot labels, and score the same documents."""
    words = np.dot(labels.T, counts) + 1
    likelihood = np.log(words) - np.log(np.sum(words, axis=1))[:, None]
    prior = np.log(np.sum(labels, axis=0) / len(labels))
    return np.argmax(np.dot(counts, likelihood.T) + prior[None, :], axis=1)


def black_scholes(price: Any, strike: Any, years: Any) -> Any:
    rate, volatility = 0.02, 0.3
    d1 = (np.log(price / strike) + (rate + volatility**2 / 2) * years) / (volatility * np.sqrt(years))
    d2 = d1 - volatility * np.sqrt(years)
    discounted = strike * np.exp(-rate * years)
    call = price * (0.5 + 0.5 * erf(d1 / 2**0.5)) - discounted * (0.5 + 0.5 * erf(d2 / 2**0.5))
    return call, call - price + discounted


def swaption(shocks: Any) -> Any:
    """Price a payer swaption by Monte Carlo: paths of a short rate, in rows."""
    rates = 0.03 + np.cumsum(shocks * 0.002, axis=1)
    discount = np.exp(-np.cumsum(rates, axis=1) * 0.25)
    value = np.sum((rates - 0.03) * discount * 0.25, axis=1)
    payoff = np.maximum(value, 0)
    return np.mean(payoff), np.std(payoff)


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def _regression(scale: int) -> Arrays:
    x = _normal(2048 * scale, 16)
    return x, (x.sum(axis=1) > 0).astype(np.float32), np.zeros(16, np.float32)


def _signs(scale: int) -> Arrays:
    x, y, w = _regression(scale)
    return x, 2 * y - 1, w


def _clusters(scale: int) -> Arrays:
    centers = 4 * _normal(8, 16, seed=1)
    points = np.tile(centers, (256 * scale, 1)) + _normal(2048 * scale, 16)
    return points, centers + _normal(8, 16, seed=2)


def _definite(n: int) -> np.ndarray:
    a = _normal(n, n) / n
    return a @ a.T + np.eye(n, dtype=np.float32)


def _documents(scale: int) -> Arrays:
    rng = np.random.default_rng(0)
    counts = rng.poisson(rng.random((4, 64))[rng.integers(0, 4, 512 * scale)]).astype(np.float32)
    return counts, np.eye(4, dtype=np.float32)[rng.integers(0, 4, 512 * scale)]


def _options(scale: int) -> Arrays:
    rng = np.random.default_rng(0)
    n = 4096 * scale
    return tuple((low + rng.random(n) * 50).astype(np.float32) for low in (50, 60, 1))


SUBJECTS = (
    Subject("linear regression", linear, _regression),
    Subject("ridge regression", ridge, _regression),
    Subject("logistic regression", logistic, _regression),
    Subject("SVM", svm, _signs),
    Subject("k-means", kmeans, _clusters),
    Subject("fuzzy k-means", fuzzy_kmeans, _clusters),
    Subject("ALS", als, lambda scale: (_normal(256 * scale, 192 * scale), _normal(192 * scale, 8)), 1.05),
    Subject("SSVD", ssvd, lambda scale: (_normal(1024 * scale, 64), _normal(64, 8, seed=1))),
    Subject("PCA", pca, lambda scale: (_normal(1024 * scale, 64), _normal(64, seed=1))),
    Subject("conjugate gradient", conjugate_gradient, lambda scale: (_definite(256 * scale), _normal(256 * scale))),
    Subject("Cholesky", cholesky, lambda scale: (_definite(128 * scale),)),
    Subject("naive Bayes", naive_bayes, _documents),
    Subject("Black-Scholes", black_scholes, _options),
    Subject("Monte Carlo swaption", swaption, lambda scale: (_normal(1024 * scale, 32),)),
)


def random_program(rng: np.random.Generator, inputs: list[Any], operators: int) -> Any:
    """Apply random operators to square arrays of one size, and return the last array and what nothing reads."""
    arrays = list(inputs)
    unread = list(range(len(arrays)))
    for _ in range(operators):
        a, b = (int(i) for i in rng.integers(0, len(arrays), 2))
        if rng.random() < 0.5:
            a = unread[-1]
        x, y = arrays[a], arrays[b]
        kind = rng.integers(0, 8)
        if kind <= 1:
            made = x + y
        elif kind == 2:
            made = x * y.T
        elif kind == 3:
            made = np.dot(x, y)
        elif kind == 4:
            made = np.exp(x) - np.sum(y, axis=int(rng.integers(0, 2)), keepdims=True)
        elif kind == 5:
            made = np.cumsum(x, axis=int(rng.integers(0, 2)))
        elif kind == 6:
            made = np.dot(x.T, y)
        else:
            made = x / np.max(y, axis=0)
        unread = [u for u in unread if u not in ((a,) if kind == 5 else (a, b))] + [len(arrays)]
        arrays.append(made)
    return [arrays[u] for u in unread]
