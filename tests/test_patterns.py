"""Names of parameters and what patterns match."""

import numpy as np
import pytest

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError

TREE = {
    "head": {"kernel": np.zeros((2, 3)), "bias": np.zeros(3)},
    "encoder": {"layers": {"mlp": {"kernel": np.zeros((4, 2))}}, "norm": {"scale": np.ones(2)}},
    "position": np.zeros(5),
}
NAMES = ["encoder/layers/mlp/kernel", "encoder/norm/scale", "head/bias", "head/kernel", "position"]


def test_names_are_paths_joined_by_slashes_in_leaf_order():
    assert patterns.names(TREE) == NAMES


def test_map_named_tells_the_name_and_keeps_the_structure():
    other = {
        "head": {"kernel": 1, "bias": 2},
        "encoder": {"layers": {"mlp": {"kernel": 3}}, "norm": {"scale": 4}},
        "position": 5,
    }
    result = patterns.map_named(lambda name, leaf, number: (name, leaf.shape, number), TREE, other)
    assert result["head"]["bias"] == ("head/bias", (3,), 2)
    assert result["position"] == ("position", (5,), 5)


def test_only_a_path_component_called_layers_makes_a_parameter_stacked():
    assert patterns.is_stacked("encoder/layers/mlp/kernel")
    assert not patterns.is_stacked("encoder/norm/scale")
    assert not patterns.is_stacked("players/kernel")


def test_the_first_rule_that_matches_the_whole_name_wins():
    rules = (("head", 9.0), ("head/kernel", 100.0), (".*kernel", 1.0))
    assert patterns.first_match(rules, "head/kernel", 0.0) == 100.0
    assert patterns.first_match(rules, "encoder/layers/mlp/kernel", 0.0) == 1.0
    assert patterns.first_match(rules, "head/bias", 0.0) == 0.0, "'head' is only a part of the name"


def test_matching_keeps_the_order_of_the_names():
    assert patterns.matching((".*kernel", "encoder/.*"), NAMES) == [NAMES[0], NAMES[1], NAMES[3]]
    assert patterns.matching((), NAMES) == []


def test_patterns_that_all_match_pass():
    patterns.check_patterns((".*kernel", "position"), NAMES, "config.optim.freeze")


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [("head/kernl", "head/kernel"), ("head", "head/bias"), (".*/positon", "position")],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_names(pattern, nearest):
    with pytest.raises(ConfigError) as error:
        patterns.check_patterns((".*kernel", pattern), NAMES, "config.optim.freeze")
    message = str(error.value)
    assert (
        message.startswith("config.optim.freeze")
        and repr(pattern) in message
        and nearest in message
    )


@pytest.mark.parametrize(
    "use", [patterns.matching, lambda p, names: patterns.check_patterns(p, names, "here")]
)
def test_a_broken_regular_expression_is_a_config_error(use):
    with pytest.raises(ConfigError, match=r"'head\(' is not a regular expression") as error:
        use(("head(",), NAMES)
    assert str(error.value).startswith("the pattern" if use is patterns.matching else "here: ")


def test_rules_that_are_no_pairs_are_an_error():
    with pytest.raises(ConfigError, match="'.*kernel' is not a .pattern, value. pair"):
        patterns.check_rules((".*kernel", 1.0), NAMES, "config.optim.lr_rules")
    with pytest.raises(ConfigError, match="config.optim.lr_rules.*'tail' matches no parameter"):
        patterns.check_rules((("tail", 1.0),), NAMES, "config.optim.lr_rules")


SHAPES = {"encoder/layers/mlp/kernel": (4, 2, 3), "encoder/layers/norm": (4, 2), "head/bias": (3,)}


@pytest.mark.parametrize(
    ("layers", "selected"),
    [("[2:]", [2, 3]), ("[:1]", [0]), ("[1:3]", [1, 2]), ("[-1]", [3]), ("[1]", [1]), ("[-2:]", [2, 3])],
)  # fmt: skip
def test_a_pattern_may_select_some_layers_of_a_stack(layers, selected):
    whole, parts = patterns.select((f"encoder/layers{layers}/.*", "head/.*"), SHAPES, "here")
    assert whole == {"head/bias"} and list(parts) == list(SHAPES)[:2]
    assert all(np.flatnonzero(mask).tolist() == selected for mask in parts.values())


def test_patterns_that_select_all_layers_together_select_the_parameter():
    several = ("encoder/layers[:2]/mlp/.*", "encoder/layers[2:]/mlp/.*")
    assert patterns.select(several, SHAPES, "here") == ({"encoder/layers/mlp/kernel"}, {})
    assert patterns.matching(several, SHAPES) == []


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("encoder/layers[4:]/.*", "selects no layer of 4"),
        ("encoder/layers[1:]/mpl/.*", "matches no parameter.*encoder/layers/mlp"),
        ("head/layers[1]/.*", "matches no parameter"),
    ],
)
def test_layers_that_are_not_there_are_an_error(pattern, message):
    with pytest.raises(ConfigError, match=f"config.optim.freeze: .*{message}"):
        patterns.select((pattern,), SHAPES, "config.optim.freeze")
