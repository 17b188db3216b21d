"""Code and prose become no harder to read: the ceilings of the meters only ever go down."""

import ast
import pathlib

import pytest

from tests import meters

ROOT = pathlib.Path(__file__).parents[1]
# In 1,000 lines of code, and `elliptical` in 1,000 words. Whoever lowers a value lowers its ceiling.
CEILINGS = {
    "core": {
        "packed": 4.2, "chain": 32.7, "long": 1.3, "splat": 1.2, "guest": 2.6, "elliptical": 14.0,
    },
    "package": {
        "packed": 13.7, "chain": 48.4, "long": 3.5, "splat": 1.4, "guest": 1.0, "elliptical": 19.6,
    },
}  # fmt: skip


def files_of(part: str) -> list[pathlib.Path]:
    if part == "package":
        return meters.python_files([ROOT / "vit_jax"])
    names = (ROOT / "tests/core_files.txt").read_text().split()
    return [ROOT / name for name in names if name.endswith(".py")]


@pytest.fixture(scope="module", params=CEILINGS)
def part_and_reading(request):
    return request.param, meters.read(files_of(request.param))


@pytest.mark.parametrize("meter", meters.ADVICE)
def test_no_meter_rises(part_and_reading, meter):
    part, reading = part_and_reading
    rate, ceiling = reading.rate(meter), CEILINGS[part][meter]
    worst = "; ".join(
        f"{pathlib.Path(place.file).relative_to(ROOT)}:{place.line}"
        for place in reading.worst(meter, 3)
    )
    assert rate <= ceiling, (
        f"{meter} of the {part} is {rate:.2f}, above {ceiling}: {meters.ADVICE[meter]}. "
        f"The worst: {worst}. `python -m tests.meters FILE` shows the worst of a file."
    )


@pytest.mark.parametrize(
    ("meter", "code"),
    [
        ("packed", "a, b = 1, 2"),
        ("chain", "x = f(g(h(1, 2), [y for y in z if y.a and y.b]), k=m[0][1])"),
        ("long", "x = (\n" + "    +1\n" * 40 + ")"),
        ("splat", "def f():\n    d = {}\n    g(**d)"),
        ("splat", "def f():\n    d = dict(a=1) if f else {}\n    g(**d)"),
        ("guest", "def f():\n    if config.lora:\n        import lora"),
        ("guest", "def f():\n    if a:\n        with b:\n            from c import d"),
        ("elliptical", '"""Those of which the others have it."""'),
        ("elliptical", "x = 1  # what others see"),
    ],
)
def test_each_meter_counts(meter, code, tmp_path):
    (tmp_path / "bad.py").write_text(code)
    assert meters.read([tmp_path / "bad.py"]).places[meter]


@pytest.mark.parametrize(
    "code",
    [
        "a, b = f()\nc = 1",
        "def f(d):\n    g(**d)",
        "def f():\n    import slow",
        "if TYPE_CHECKING:\n    import types",
        '"""The model sees each image once."""',
        "x = 'what those of which'",
    ],
)
def test_plain_code_is_not_counted(code, tmp_path):
    ast.parse(code)
    (tmp_path / "good.py").write_text(code)
    assert not any(meters.read([tmp_path / "good.py"]).places.values())
