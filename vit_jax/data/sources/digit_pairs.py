"""scikit-learn's digits in colours, each with captions that say which: pairs of images and texts without a download.
Of 'train' the digits are those of the data set 'digits' to train on, of 'test' its others.
"""

import dataclasses

import numpy as np

from vit_jax.data.options import Data
from vit_jax.data.record import DataSet, Record
from vit_jax.data.sources import digits, fingerprint

COLORS = {
    "white": (255, 255, 255), "red": (255, 60, 60), "green": (70, 220, 70), "blue": (90, 110, 255),
    "yellow": (255, 235, 60), "purple": (200, 80, 220),
}  # fmt: skip
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_CAPTIONS = ("{digit} in {color}", "a {color} {digit}")


@dataclasses.dataclass(frozen=True)
class DigitPairs:
    """Digits in colours; labels are captions.

    Attributes:
      digits: some of the digits.
      numbers: (n,) of the examples, the number of a digit times that of the colours, and of its colour.
    """

    digits: digits.Digits
    numbers: np.ndarray
    classes: tuple[str, ...] = ()
    multi_label: bool = False
    labels: None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Record:
        number, color = divmod(int(self.numbers[index]), len(COLORS))
        grey = self.digits.images[number].astype(np.float32) / 255
        pixels = np.round(grey * list(COLORS.values())[color]).astype(np.uint8)
        name = f"digit_pairs/{self.digits.ids[number]}/{list(COLORS)[color]}"
        return Record(pixels, self.captions(index), name)

    def captions(self, index: int) -> tuple[str, ...]:
        """The captions of an image."""
        number, color = divmod(int(self.numbers[index]), len(COLORS))
        digit = NAMES[int(self.digits.labels[number])]
        return tuple(text.format(color=list(COLORS)[color], digit=digit) for text in _CAPTIONS)

    def fingerprint(self) -> str:
        """A fingerprint of which digits these are."""
        return fingerprint.digest("digit_pairs", self.digits.ids, self.numbers)


def open_digit_pairs(config_data: Data) -> DataSet:
    """'train' (80 % of every digit, in six colours) and 'test' (the rest)."""
    of_digits = digits.open_digits(config_data)

    def read(parts: list[tuple[str, int, int]]) -> DigitPairs:
        names = list(dict.fromkeys(name for name, *_ in parts))
        all_digits = of_digits.read([(name, 0, of_digits.sizes[name]) for name in names])
        begins = dict(zip(names, np.cumsum([0, *(sizes[name] for name in names)]), strict=False))
        numbers = [np.arange(start, stop) + begins[name] for name, start, stop in parts]
        return DigitPairs(all_digits, np.concatenate(numbers))

    sizes = {name: count * len(COLORS) for name, count in of_digits.sizes.items()}
    return DataSet("the data set 'digit_pairs'", sizes, read)
