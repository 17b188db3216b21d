"""my_data.py: squares that are brighter or darker than their surroundings."""

import dataclasses

import numpy as np

from vit_jax.extend import DataConfig, DataSet, Record, load_config, register_data_source

SIZES = {"train": 512, "test": 128}
FIRST = {"train": 0, "test": 512}


@dataclasses.dataclass(frozen=True)
class Squares:
    numbers: tuple[int, ...]
    classes: tuple[str, ...] = ("darker", "brighter")
    multi_label: bool = False
    labels: None = None  # of all examples, where they are known before these are read

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Record:
        number = self.numbers[index]
        image = np.full((32, 32, 3), 128, np.uint8)
        y, x = np.random.default_rng(number).integers(0, 24, 2)
        image[y : y + 8, x : x + 8] = (64, 192)[number % 2]
        return Record(image, number % 2, f"square {number}")

    def fingerprint(self) -> str:
        return f"squares {self.numbers[0]} to {self.numbers[-1]}"


def open_squares(config_data: DataConfig) -> DataSet:
    def read(parts: list[tuple[str, int, int]]) -> Squares:
        numbers = [FIRST[split] + i for split, start, stop in parts for i in range(start, stop)]
        return Squares(tuple(numbers))

    return DataSet("the data set 'squares'", SIZES, read)


register_data_source("squares", open_squares)


def get_config():
    config = load_config("digits")
    config.data.name = "squares"
    return config
