"""ArrayRecord's own readers of local files, some of them open at a time: each has a descriptor, and a data set may have
more files than a process may open. To open a file again takes ten times as long as reading a record.
"""

import collections
import threading

from vit_jax.base import limits, places

# Open readers: a fifth of the files that the process was given, at most this many, which take 55 KB each.
_SHARE, _MOST = 5, 4096
# Read-ahead helps reading in order; at random places it reads records that are not used. So does reading more than the
# table of a file when it is opened.
_OPTIONS = "readahead_buffer_size:0,footer_prefetch_bytes:0"


class OpenReaders:
    """Readers of a process, those that were used least recently closed. Any number of threads may use them: one that is
    closed while a thread reads stays open until that thread is done.
    """

    def __init__(self):
        self._open: collections.OrderedDict = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, owner: object, path: str):
        """The reader of `path`, opened by `owner` unless it is open: another owner's may be of an earlier file.

        Raises:
          OSError: the file cannot be opened.
        """
        key = owner, path
        with self._lock:
            if key in self._open:
                self._open.move_to_end(key)
                return self._open[key]
        reader = open_reader(path)
        with self._lock:
            reader = self._open.setdefault(key, reader)
            while len(self._open) > min(_MOST, limits.given_open_files() // _SHARE):
                self._open.popitem(last=False)
        return reader


def open_reader(path: str):
    """ArrayRecord's own reader of the local file `path`.

    Raises:
      OSError: the file cannot be opened, of which ArrayRecord says only that it has 0 records.
    """
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(path, options=_OPTIONS)
    if not reader.num_records():
        places.open_bytes(path).close()  # raises why
        reader = ArrayRecordReader(path, options=_OPTIONS)  # there was no descriptor for a moment
    return reader


OPEN = OpenReaders()
