"""What can be packed: one module per kind of source, found by looking at what is there."""

from glob import has_magic
from pathlib import Path

from flatout.data.format import RAISE
from flatout.data.sources.source import Source, files_of_kind
from flatout.records.errors import UserError

KINDS = (
    "a folder of images, a WebDataset (.tar, also as 'name-{000..009}.tar'), Parquet or Arrow "
    "files, a folder that Hugging Face datasets saved, .csv or .tsv, .jsonl, .txt, .npy or .npz, "
    "or a data set as module:name or file.py:name"
)
SPLITS = "dataset_dict.json"
"""What Hugging Face `datasets` writes alongside the folders of a set's splits."""
TABLES = (".csv", ".tsv")
LINES = (".jsonl", ".ndjson", ".txt")
ARRAYS = (".npy", ".npz")
COLUMNS = (".parquet", ".arrow")


def open_source(target: str, *, work: Path, on_bad: str = RAISE) -> Source:
    """Return the source behind a path or a name; nothing of its samples is read yet.

    What has to be converted once (Parquet) goes into the folder `work`.
    """
    path = Path(target).expanduser()
    if path.is_dir():
        return _folder(path, work, on_bad)
    if path.is_file():
        return _file(path, work, on_bad)
    if target.endswith(".tar") and ("{" in target or has_magic(target)):
        from flatout.data.sources.webdataset import expand, open_tars

        return open_tars(expand(target), on_bad=on_bad)
    if ":" in target:
        from flatout.data.sources.dataset import open_dataset

        return open_dataset(target)
    raise UserError(f"there is no {target}; give {KINDS}")


def _folder(path: Path, work: Path, on_bad: str) -> Source:
    """Return what a folder holds; its own files decide, image folders are the rest."""
    try:
        suffixes = {item.suffix.lower() for item in path.iterdir()}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if (path / SPLITS).is_file():
        splits = sorted(item.name for item in path.iterdir() if item.is_dir())
        raise UserError(f"{path} holds several splits; pack one of them: {', '.join(splits)}")
    if suffixes & set(COLUMNS):
        from flatout.data.sources.columns import open_columns

        return open_columns(path, work=work)
    if ".tar" in suffixes:
        from flatout.data.sources.webdataset import open_tars

        return open_tars(files_of_kind(path, (".tar",)), on_bad=on_bad)
    from flatout.data.sources.folder import open_folder

    return open_folder(path, on_bad=on_bad)


def _file(path: Path, work: Path, on_bad: str) -> Source:
    suffix = path.suffix.lower()
    if suffix == ".tar":
        from flatout.data.sources.webdataset import open_tars

        return open_tars([path], on_bad=on_bad)
    if suffix in COLUMNS:
        from flatout.data.sources.columns import open_columns

        return open_columns(path, work=work)
    if suffix in TABLES:
        from flatout.data.sources.table import open_table

        return open_table(path)
    if suffix in LINES:
        from flatout.data.sources.lines import open_lines

        return open_lines(path)
    if suffix in ARRAYS:
        from flatout.data.sources.arrays import open_arrays

        return open_arrays(path)
    raise UserError(f"{path.name} is not of a kind that can be packed; give {KINDS}")
