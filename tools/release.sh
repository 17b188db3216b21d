#!/usr/bin/env bash
# Builds a release from a clean tree: tests, sdist and wheel in dist/, and the tag.
#
#   bash tools/release.sh [--skip_tests] [--dry_run]
#
# --dry_run checks everything, and neither runs the tests nor builds nor makes the tag.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  echo "release.sh: $1" >&2
  exit 2
}

skip_tests='' dry_run=''
for flag in "$@"; do
  case $flag in
    --skip_tests) skip_tests=yes ;;
    --dry_run) dry_run=yes ;;
    *) fail "there is no flag $flag; known: --skip_tests --dry_run" ;;
  esac
done

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' vit_jax/__init__.py)
dirty=$(git status --porcelain)
[ -z "$dirty" ] || fail "the tree has uncommitted changes; commit or remove them first:
$dirty"
grep -q "^## \[$version\] - [0-9-]*$" CHANGELOG.md ||
  fail "CHANGELOG.md has no heading '## [$version] - DATE': write what changed"
grep -q "^version: $version$" CITATION.cff || fail "CITATION.cff has another version than $version"
if git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null; then
  fail "the tag v$version exists: give another version in vit_jax/__init__.py"
fi
if [ -n "$dry_run" ]; then
  echo "v$version can be released"
  exit
fi

[ -n "$skip_tests" ] || bash tests/run.sh
. launch/venv.sh
use_venv test
rm -rf build dist
.venv/bin/python - <<'PYTHON'
from setuptools import build_meta

for build in (build_meta.build_sdist, build_meta.build_wheel):
    print("dist/" + build("dist"))
PYTHON
git tag --annotate "v$version" --message "vit_jax $version"
echo "Next: git push origin v$version && twine upload dist/*"
