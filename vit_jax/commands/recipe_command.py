"""The commands on what comes with the package: `recipes` and `tutorial`. They import what they need when they run."""

from absl import flags

from vit_jax.commands import flags as cli

FLAGS = flags.FLAGS


def tutorial() -> None:
    """Copy the notebooks of the guides, to run and change: [DIR] [--json].

    They are copied to DIR, by default the current folder: fine_tune.ipynb (your photos) and look_inside.ipynb (what a
    model sees). Files that are there already are kept.
    """
    cli.define_json()
    folders = cli.parse_flags("DIR", optional=True)
    if len(folders) > 1:
        raise flags.Error(f"one DIR, not {' '.join(folders)}")

    from vit_jax.base import outputs
    from vit_jax.recipes import shipped

    folder = folders[0] if folders else "."
    outputs.make_folder(folder, "DIR")
    paths = list(map(str, shipped.copy_notebooks(folder)))
    opening = f"open with: jupyter lab {paths[0]}    (pip install jupyterlab)"
    cli.print_result({"paths": paths}, "\n".join([*paths, opening]))


def recipes() -> None:
    """List the recipes that come with the package, with model, data, cost and expected result: [NAME | copy NAME DIR]
    [--json|--markdown].

    Figures are for the first command that a recipe documents. NAME prints the whole description of a recipe, and
    copy NAME DIR copies it, so that you can change it. 'vit_jax train --config=NAME' trains it from any folder.
    """
    flags.DEFINE_bool("markdown", False, "the list as a page")
    cli.define_json()
    arguments = cli.parse_flags("NAME", optional=True)

    from vit_jax.planning import catalogue

    match arguments:
        case []:
            rows = catalogue.recipe_table(parameters=FLAGS.markdown or FLAGS.json)
            page = catalogue.recipe_page if FLAGS.markdown else catalogue.recipe_text
            cli.print_result(rows, page(rows))
        case ["copy", name, directory]:
            path = catalogue.copy_recipe(name, directory)
            cli.print_result(
                {"path": str(path)}, f"{path}: vit_jax train --config={path} --workdir=DIR"
            )
        case ["copy", *_]:
            raise flags.Error("expected: recipes copy NAME DIR")
        case [name]:
            text = catalogue.recipe_docstring(name)
            cli.print_result({"name": name, "text": text}, text)
        case _:
            raise flags.Error(f"one NAME, not {' '.join(arguments)}")
