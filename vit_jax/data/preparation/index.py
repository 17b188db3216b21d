"""The index of a data set that has none yet, stored beside its files: `vit_jax prepare SOURCE --index`."""

from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.data.options import Data
from vit_jax.data.sources import arrayrecord, stored_index, tar, tar_index, tfds, zip_index
from vit_jax.data.sources.prepared import read_description, record_files


def index(source: str, *, data_dir: str = "") -> dict:
    """Stores where the records of a data set are, unless that is stored already.

    Args:
      source: what `vit_jax prepare` made, tar files, or the name of a TFDS data set.
      data_dir: where TFDS keeps its data sets.

    Returns:
      {"index": its path, "files", "records": of all files; tar files: images}; without "index" where files on
      a disk need none.

    Raises:
      ConfigError: there is no such data set, or it has no files of records.
      UserError: the index cannot be written.
    """
    paths, kind, sizes = _files(source, sources.locate(source, Data(path=data_dir), "SOURCE"))
    if kind is arrayrecord.KIND and not arrayrecord.needs_index(paths[0]):
        return {"files": len(paths)}
    stored = stored_index.store_index(paths, kind, sizes)
    of_archives = kind in (tar_index.KIND, zip_index.KIND)
    count = tar_index.count_images if of_archives else arrayrecord.count_records
    records = sum(count(stored, path) for path in paths)
    where = paths[0].rpartition("/")[0] + f"/{stored_index.INDEX}"
    return {"index": where, "files": len(paths), "records": records}


def _files(
    source: str, config_data: Data
) -> tuple[list[str], stored_index.Kind, dict[str, int] | None]:
    """The files of a data set, of which kind they are, and their bytes where these are known."""
    if config_data.name == "prepared":
        sizes = record_files(config_data.path, read_description(config_data.path))
        return list(sizes), arrayrecord.KIND, sizes
    if config_data.name == "tar":
        files = tar.find_tars(config_data.path)
        return list(map(str, files)), tar.archive_kind(files), None
    if config_data.name in sources.OPENERS:
        raise ConfigError(
            f"{source} has no files of records to index: --index is for what 'vit_jax prepare' made, for tar files, "
            "and for data sets of TFDS"
        )
    return *tfds.record_files(config_data), None


def text(result: dict) -> str:
    """`index`'s result for a person."""
    if "index" not in result:
        return f"the {result['files']} files are on a disk and say themselves where their records are: no index needed"
    return f"{result['records']:,} records of {result['files']:,} files: {result['index']}"
