"""What a request for an image wants of a model, and the reply: classes of the image and its features (`ClassReplies`),
or classes of its pixels (`MapReplies`). How they travel is in `server.py`.
"""

import asyncio
import base64
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from PIL import Image

from vit_jax.data.labels import segments
from vit_jax.evaluation import decisions
from vit_jax.pictures import masks
from vit_jax.pictures.page import png
from vit_jax.prediction.maps import Segmented
from vit_jax.serving.batching import Batcher
from vit_jax.serving.limits import Refusal
from vit_jax.serving.map_network import MOST_PIXELS, MapNetwork
from vit_jax.serving.network import Network

_MOST_DIGITS = 9  # of a number in a request; Python refuses to read thousands
Reply = dict[str, Any] | bytes  # for JSON, or a PNG
Wanted = Callable[[np.ndarray], Any]  # an image to an awaitable `Reply`


class Replies(Protocol):
    """What a server replies with.

    Attributes:
      whole: images are decoded whole, of this many pixels at most; 0: cut as for evaluation.
    """

    whole: int

    def about(self) -> dict[str, Any]:
        """What /model has of it."""

    def predict(self, query: Mapping[str, str]) -> Wanted:
        """What /predict replies, by the parameters of the request. Raises `Refusal` for wrong ones."""

    def features(self, query: Mapping[str, str]) -> Wanted:
        """What /features replies."""

    def mask(self, query: Mapping[str, str]) -> Wanted:
        """What /mask replies."""


class ClassReplies:
    """Of a classifier, or a model without head."""

    whole = 0

    def __init__(self, network: Network, batcher: Batcher):
        self._network, self._batcher = network, batcher

    def about(self) -> dict[str, Any]:
        """What /model has of it: whether attention can be shown, and the width of the features; there are no maps."""
        network = self._network
        return {"attention": network.has_attention, "maps": False, "features": network.width}

    def predict(self, query: Mapping[str, str]) -> Wanted:
        """The best classes; `topk` of them, and all that are decided for if the model has thresholds. With
        `attention=1` also a picture of where the model looks.
        """
        if not self._network.classes:
            raise Refusal(404, "this model has no head, and so no classes: POST to /features")
        _check_names(query, "topk", "attention")
        topk, attention = query.get("topk", "5"), _switch(query, "attention")
        if not topk.isdecimal() or len(topk) > _MOST_DIGITS or int(topk) < 1:
            raise Refusal(
                400, f"topk={topk[:_MOST_DIGITS]} must be a whole number, 1 or more, of up to {_MOST_DIGITS} digits"
            )  # fmt: skip
        if attention and not self._network.has_attention:
            raise Refusal(400, "this model has no attention among all patches: set attention=0")

        async def reply(image: np.ndarray) -> Reply:
            probabilities = (await self._batcher.answer(image)).probabilities
            answer: dict[str, Any] = {"predictions": self._classes(probabilities, int(topk))}
            if attention:
                look = await self._batcher.alone(self._network.look, image)
                answer["attention"] = data_url(png(Image.fromarray(look)))
            return answer

        return reply

    def _classes(self, probabilities: np.ndarray, topk: int) -> list[dict[str, Any]]:
        """The classes that are listed, best first."""
        names = self._network.classes
        thresholds = self._network.thresholds
        order = np.argsort(-probabilities, kind="stable")
        if thresholds is None:
            return [
                {"class": names[c], "probability": float(probabilities[c])} for c in order[:topk]
            ]
        places, decided = decisions.listed(probabilities[order], thresholds[order], topk)
        return [
            {"class": names[c], "probability": float(probabilities[c]), "decided": is_decided}
            for c, is_decided in zip(order[places], decided.tolist(), strict=True)
        ]

    def features(self, query: Mapping[str, str]) -> Wanted:
        """The input of the head, (D,)."""
        _check_names(query)

        async def reply(image: np.ndarray) -> Reply:
            return {"features": (await self._batcher.answer(image)).features.tolist()}

        return reply

    def mask(self, query: Mapping[str, str]) -> Wanted:
        """Refused."""
        raise Refusal(404, "this model gives classes of images, and no masks: POST to /predict")


class MapReplies:
    """Of a model that segments."""

    whole = MOST_PIXELS

    def __init__(self, network: MapNetwork, batcher: Batcher):
        self._network, self._batcher = network, batcher
        self._colors = masks.palette(len(network.classes)).tolist()

    def about(self) -> dict[str, Any]:
        """What /model has of it: maps, and whether single things are found."""
        return {"attention": False, "maps": True, "things": self._network.finds_things}

    def predict(self, query: Mapping[str, str]) -> Wanted:
        """The share of each class, and single things; with `overlay=1` a picture to lay over the image."""
        _check_names(query, "overlay")
        overlay = _switch(query, "overlay")

        def describe(segmented: Segmented) -> Reply:
            height, width = segmented.labels.shape
            shares = [self._class(name, share) for name, share in segmented.shares().items()]
            reply: dict[str, Any] = {"width": width, "height": height, "classes": shares}
            if segmented.segments is not None:
                reply["segments"] = [
                    {"id": info["id"], "class": segmented.classes[info["category_id"] - 1], "box": info["bbox"],
                     "share": info["area"] / segmented.labels.size}
                    for info in segments.colored(segmented.segments)[1]
                ]  # fmt: skip
            return reply | ({"overlay": data_url(png(segmented.layer()))} if overlay else {})

        return self._reply(describe)

    def features(self, query: Mapping[str, str]) -> Wanted:
        """Refused."""
        raise Refusal(
            404,
            "this model segments, and has no features of whole images: POST to /predict or /mask",
        )

    def mask(self, query: Mapping[str, str]) -> Wanted:
        """The mask as PNG; with `panoptic=1` its segments in COCO's colours."""
        _check_names(query, "panoptic")
        panoptic = _switch(query, "panoptic")
        if panoptic and not self._network.finds_things:
            raise Refusal(400, "this model finds no single things: set panoptic=0")

        def draw(segmented: Segmented) -> Reply:
            if panoptic:
                return png(Image.fromarray(segments.colored(segmented.segments)[0]))
            return png(segmented.mask())

        return self._reply(draw)

    def _reply(self, form: Callable[[Segmented], Reply]) -> Wanted:
        async def reply(image: np.ndarray) -> Reply:
            cut = await asyncio.to_thread(self._network.cut, image)
            answers = await asyncio.gather(*map(self._batcher.answer, cut.pixels))
            return await asyncio.to_thread(lambda: form(self._network.join(image, cut, answers)))

        return reply

    def _class(self, name: str, share: float) -> dict[str, Any]:
        color = self._colors[self._network.classes.index(name)]
        return {"class": name, "share": share, "color": "#{:02x}{:02x}{:02x}".format(*color)}


def replies_of(network: Network | MapNetwork, batcher: Batcher) -> Replies:
    """What a network's images are replied to with."""
    if isinstance(network, MapNetwork):
        return MapReplies(network, batcher)
    return ClassReplies(network, batcher)


def _check_names(query: Mapping[str, str], *known: str) -> None:
    for name in query:
        if name not in known:
            others = f", only {' and '.join(known)}" if known else ""
            raise Refusal(400, f"there is no parameter {name!r}{others}")


def _switch(query: Mapping[str, str], name: str) -> bool:
    value = query.get(name, "0")
    if value not in ("0", "1"):
        raise Refusal(400, f"{name}={value} must be 0 or 1")
    return value == "1"


def data_url(picture: bytes) -> str:
    """A `data:` address that contains a PNG, for JSON."""
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"
