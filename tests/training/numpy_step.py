"""A training step written once more, in NumPy and float64: a small network with gradients by hand, and all of
`config.optim` for optimizers of single numbers. It shares no line with the package.

The network has a layer before its stack, two residual layers in it, a scale and a head: each kind of parameter that
rules tell apart.
"""

import dataclasses
import re
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
LAYERS = 2
KERNEL, BIAS = "encoder/layers/kernel", "encoder/layers/bias"


def gradient(params: Arrays, x: np.ndarray, targets: np.ndarray) -> tuple[float, Arrays]:
    """The mean cross-entropy of a batch and its gradient.

    Args:
      params: by name.
      x: (B, inputs).
      targets: (B, classes), each row sums to 1.
    """
    hidden = [x @ params["embedding/kernel"] + params["embedding/bias"]]
    bent = []
    for i in range(LAYERS):
        bent.append(np.tanh(hidden[i] @ params[KERNEL][i] + params[BIAS][i]))
        hidden.append(hidden[i] + bent[i])
    features = hidden[-1] * params["norm/scale"]
    logits = features @ params["head/kernel"] + params["head/bias"]
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    loss = -(targets * log_p).sum(-1).mean()

    grads: Arrays = {name: np.zeros_like(p) for name, p in params.items()}
    dlogits = (np.exp(log_p) - targets) / len(x)
    grads["head/kernel"] = features.T @ dlogits
    grads["head/bias"] = dlogits.sum(0)
    dfeatures = dlogits @ params["head/kernel"].T
    grads["norm/scale"] = (dfeatures * hidden[-1]).sum(0)
    dhidden = dfeatures * params["norm/scale"]
    for i in reversed(range(LAYERS)):
        dproduct = dhidden * (1 - bent[i] ** 2)
        grads[KERNEL][i] = hidden[i].T @ dproduct
        grads[BIAS][i] = dproduct.sum(0)
        dhidden = dhidden + dproduct @ params[KERNEL][i].T
    grads["embedding/kernel"] = x.T @ dhidden
    grads["embedding/bias"] = dhidden.sum(0)
    return loss, grads


@dataclasses.dataclass
class Run:
    """A run of `config.optim`.

    Attributes:
      optim: the section; durations in it are whole numbers of steps.
      total: steps of the run.
      params: by name, changed by `step`.
      average: that of the parameters, or the parameters at first.
    """

    optim: Any
    total: int
    params: Arrays

    def __post_init__(self):
        self.average = {name: p.copy() for name, p in self.params.items()}
        self._z = {name: p.copy() for name, p in self.params.items()}
        start = 1.0 if self.optim.name == "rmsprop" else 0.0
        self._m = {name: np.zeros_like(p) for name, p in self.params.items()}
        self._v = {name: np.full_like(p, start) for name, p in self.params.items()}
        self._weight = 0.0
        self._done = 0
        self._trained = {name: self._is_trained(name, p) for name, p in self.params.items()}

    def step(self, x: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        """Trains on a batch; gives the loss and the learning rate."""
        optim, t = self.optim, self._done
        rate = optim.lr * self._relative(t)
        loss, grads = gradient(self.params, x, targets)
        grads = self._without_frozen(grads)
        if optim.sam_rho[1]:
            grads = self._sharp(grads, rate, x, targets)
        if optim.clip:
            grads = _scaled(grads, min(1.0, optim.clip / _norm(grads)))
        points = {}
        for name, p in self.params.items():
            mask = self._trained[name]
            points[name] = np.where(mask, p + self._update(name, grads[name]), p)
        if optim.name == "schedule_free":
            self._move_between(points)
        else:
            self.params = points
            if optim.ema:
                decay = min(optim.ema, (1 + t) / (10 + t))
                for name, p in self.params.items():
                    self.average[name] = decay * self.average[name] + (1 - decay) * p
        self._done += 1
        return {"loss": loss, "learning_rate": rate}

    def _update(self, name: str, g: np.ndarray) -> np.ndarray:
        """What is added to a parameter of this gradient."""
        optim, p = self.optim, self.params[name]
        decay = optim.weight_decay * _first(optim.weight_decay_rules, name, 0.0)
        rate = optim.lr * self._multiplier(name)
        if optim.weight_decay_by == "gradient":
            g = g + decay * p
        if optim.name in ("lamb", "lars"):
            u = self._trusted(name, g, decay)
            return -self._scale(name) * rate * u
        u = self._direction(name, g)
        if optim.weight_decay_by == "gradient":
            return -self._scale(name) * rate * u
        if optim.weight_decay_end is not None:
            share = (1 - np.cos(np.pi * min(self._done / self.total, 1))) / 2
            decay *= 1 + (optim.weight_decay_end / optim.weight_decay - 1) * share
        if optim.weight_decay_by == "lr":
            decay = decay * rate
        return -self._scale(name) * (rate * u + decay * p)

    def _direction(self, name: str, g: np.ndarray) -> np.ndarray:
        optim, t = self.optim, self._done + 1
        m, v = self._m[name], self._v[name]
        if optim.name in ("sgd", "lars"):
            self._m[name] = optim.b1 * m + g
            return self._m[name]
        if optim.name == "lion":
            self._m[name] = optim.b2 * m + (1 - optim.b2) * g
            return np.sign(optim.b1 * m + (1 - optim.b1) * g)
        if optim.name == "adafactor":
            decay = min(optim.b2, 1 - t**-0.8)
            self._v[name] = decay * v + (1 - decay) * (g**2 + 1e-30)
            self._m[name] = optim.b1 * m + (1 - optim.b1) * g / np.sqrt(self._v[name])
            return self._m[name]
        self._v[name] = optim.b2 * v + (1 - optim.b2) * g**2
        if optim.name == "rmsprop":
            self._m[name] = optim.b1 * m + g / np.sqrt(self._v[name] + optim.eps)
            return self._m[name]
        root = np.sqrt(self._v[name] / (1 - optim.b2**t)) + optim.eps
        if optim.name == "schedule_free":
            return g / root
        self._m[name] = optim.b1 * m + (1 - optim.b1) * g
        first = self._m[name]
        if optim.name == "nadamw":
            first = optim.b1 * first + (1 - optim.b1) * g
        return first / (1 - optim.b1**t) / root

    def _trusted(self, name: str, g: np.ndarray, decay: float) -> np.ndarray:
        """The direction of LAMB or LARS, which is as long as the parameter."""
        p = self.params[name]
        if self.optim.name == "lamb":
            u = self._direction(name, g) + decay * p
            return _as_long(name, u, p, 1.0) if decay else u
        u = g + decay * p
        is_vector = name.rpartition("/")[2] in ("bias", "scale")
        return self._direction(name, u if is_vector else _as_long(name, u, p, 1e-3))

    def _sharp(self, grads: Arrays, rate: float, x, targets) -> Arrays:
        """The gradient of SAM or GSAM."""
        optim = self.optim
        low, high = optim.sam_rho
        share = (rate - optim.lr_end) / (optim.lr - optim.lr_end)
        radius = max(low + (high - low) * share, 0.0)
        length = _norm(grads)
        nearby = {n: p + radius * grads[n] / length for n, p in self.params.items()}
        _, robust = gradient(nearby, x, targets)
        robust = self._without_frozen(robust)
        product = sum((grads[n] * robust[n]).sum() for n in grads)
        along = product / _norm(robust) ** 2
        return {
            n: h - optim.sam_alpha * (grads[n] - along * h) if optim.sam_alpha else h
            for n, h in robust.items()
        }

    def _move_between(self, moved: Arrays) -> None:
        """Schedule-free: the updates move z; the average is x, and the parameters y are between them."""
        b1, weight = self.optim.b1, self._relative(self._done) ** 2
        self._weight += weight
        share = weight / self._weight if self._weight else 0.0
        for name, y in self.params.items():
            mask = self._trained[name]
            z = self._z[name] + np.where(mask, moved[name] - y, 0.0)
            average = self.average[name] + share * (z - self.average[name])
            self._z[name], self.average[name] = z, average
            self.params[name] = np.where(mask, (1 - b1) * z + b1 * average, y)

    def _scale(self, name: str) -> float:
        optim, t = self.optim, self._done
        if not any(re.fullmatch(pattern, name) for pattern in optim.late):
            return self._relative(t)
        if t < optim.warmup:
            return 0.0
        return self._shape(t - optim.warmup, optim.late_warmup, self.total - optim.warmup)

    def _relative(self, t: int) -> float:
        return self._shape(t, self.optim.warmup, self.total)

    def _shape(self, t: int, warmup: int, total: int) -> float:
        """The learning rate relative to its peak after t of these steps."""
        optim = self.optim
        end, done = optim.lr_end / optim.lr, max(t - warmup, 0)
        p = min(done / max(total - warmup, 1), 1)
        value = {
            "cosine": end + (1 - end) * (1 + np.cos(np.pi * p)) / 2,
            "linear": end + (1 - end) * (1 - p),
            "polynomial": end + (1 - end) * (1 - p) ** optim.power,
            "rsqrt": (1 + done / optim.timescale) ** -0.5,
            "constant": 1.0,
            "staircase": optim.factor ** sum(t >= boundary for boundary in optim.boundaries),
        }[optim.schedule]
        if warmup:
            value *= min(t / warmup, 1)
        if optim.cooldown:
            value *= min((total - t) / optim.cooldown, 1)
        return value

    def _multiplier(self, name: str) -> float | np.ndarray:
        """Of the learning rate: by rules, times that of the layer."""
        decay, multiplier = self.optim.layer_decay, _first(self.optim.lr_rules, name, 1.0)
        if name.startswith("embedding/"):
            return multiplier * decay ** (LAYERS + 1)
        if name not in (KERNEL, BIAS):
            return multiplier
        powers = np.array([decay ** (LAYERS - i) for i in range(LAYERS)])
        return multiplier * powers.reshape(LAYERS, *[1] * (self.params[name].ndim - 1))

    def _is_trained(self, name: str, p: np.ndarray) -> np.ndarray:
        """Of each number of a parameter."""
        mask = np.ones(p.shape, bool)
        for pattern in self.optim.freeze:
            if "[:1]" in pattern and re.fullmatch(pattern.replace("[:1]", ""), name):
                mask[0] = False
            elif re.fullmatch(pattern, name):
                mask[:] = False
        return mask

    def _without_frozen(self, grads: Arrays) -> Arrays:
        return {name: np.where(self._trained[name], g, 0.0) for name, g in grads.items()}


def _first(rules, name: str, default: float) -> float:
    for pattern, value in rules:
        if re.fullmatch(pattern, name):
            return value
    return default


def _norm(arrays: Arrays) -> float:
    return np.sqrt(sum((x**2).sum() for x in arrays.values()))


def _scaled(arrays: Arrays, factor: float) -> Arrays:
    return {name: factor * x for name, x in arrays.items()}


def _as_long(name: str, u: np.ndarray, p: np.ndarray, coefficient: float) -> np.ndarray:
    """u at the length of p times a coefficient; each layer of a stack by itself."""
    if name in (KERNEL, BIAS):
        parts = [_as_long("", u[i], p[i], coefficient) for i in range(LAYERS)]
        return np.stack(parts)
    lengths = np.linalg.norm(p), np.linalg.norm(u)
    return u * coefficient * lengths[0] / lengths[1] if all(lengths) else u
