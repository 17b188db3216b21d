"""What versions of JAX call differently in their programs (jaxprs)."""

from jax.extend import core


def scan_counts(equation: core.JaxprEqn) -> tuple[int, int]:
    """How many of the inputs of a `scan` are constants, and how many are carried; the others are scanned over."""
    params = equation.params
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()  # since JAX 0.12
    return len(constants), len(carried)
