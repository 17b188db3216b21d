# shellcheck shell=bash
# Sourced by the other scripts: makes .venv in the project's root once, with Python 3.11 or newer, and installs the project.
# Usage: use_venv [EXTRA]. $PYTHON chooses the interpreter. The extra `test` is installed in the versions of
# tests/constraints.txt, if there is one; $lock names it then.

# Large pages: a CPU step allocates hundreds of megabytes every time, and faulting them in page by page
# takes a good part of its time (docs/performance.md).
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"

use_venv() {
  local target=".${1:+[$1]}" python stamp
  stamp=".venv/installed-${1:-base}" lock=''
  if [ "${1:-}" = test ] && [ -f tests/constraints.txt ]; then lock=tests/constraints.txt; fi
  if [ ! -x .venv/bin/python ]; then
    python=$(find_python) || { echo "Python 3.11 or newer is needed; set PYTHON to one" >&2; return 1; }
    "$python" -m venv .venv
  fi
  # Installed once, and again when the list of dependencies or their lock changes.
  if [ ! -f "$stamp" ] || [ setup.py -nt "$stamp" ] || [ "${lock:-setup.py}" -nt "$stamp" ]; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check ${lock:+"--constraint=$lock"} --editable "$target" || return
    touch "$stamp"
  fi
}

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  return 1
}
