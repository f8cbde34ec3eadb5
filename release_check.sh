#!/usr/bin/env bash
# Check the commit that is to be released: build it, and use it in fresh environments.
#
#   ./release_check.sh           needs ./install.sh --dev, and a network for the fresh environments (10 minutes)
#
# 1. The checkout is clean; its version stands under a date in CHANGELOG.md and in CITATION.cff, and has no tag yet.
# 2. sdist and wheel of the commit, and the bill of materials of its lock, into dist/; twine and CycloneDX's validator check them.
# 3. With each of Python 3.11 and 3.12 found here: ./install.sh, the wheel, and its commands from FASTA to embeddings.
#
# What remains is printed at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
case ${1:-} in -h | --help) sed -n '2,/^[^#]/{/^#/!d;s/^# \{0,1\}//;p;}' release_check.sh; exit 0 ;; esac

fail() { echo "error: $*" >&2; exit 2; }
say() { printf '\n== %s\n' "$*"; }
[ $# -eq 0 ] || fail "./release_check.sh takes no arguments, not $*"

say "1/3 Version"
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
[ -z "$(git status --porcelain)" ] || fail "files differ from the commit: see git status"
grep -qE "^## \[$version\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md || fail "CHANGELOG.md has no heading '## [$version] - DATE'"
grep -qx "version: $version" CITATION.cff || fail "CITATION.cff: its version is not $version, pyproject.toml's"
[ -z "$(git tag --list "v$version")" ] || fail "there is a tag v$version already: raise the version"

say "2/3 sdist and wheel"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH # the wheel and the bill are the same bytes whenever they are built,
umask 022                # and by whomever
mkdir "$work/checkout"
git archive HEAD | tar --extract --no-same-permissions --directory "$work/checkout"
rm -rf dist
.venv/bin/python -m build --outdir dist "$work/checkout"
.venv/bin/twine check --strict dist/*
bill=dist/esm2-pretraining-$version.cdx.json
.venv/bin/python "$work/checkout/docker/sbom.py" "$bill"
python3 -m venv "$work/cyclonedx"
"$work/cyclonedx/bin/pip" install --quiet 'cyclonedx-python-lib[json-validation]==11.12.0'
"$work/cyclonedx/bin/python" - "$bill" <<'PYTHON'
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
sys.exit(JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read()))
PYTHON

tried=()
for python in python3.11 python3.12; do
  "$python" -c '' 2>/dev/null || continue
  say "3/3 $python"
  rm -rf "$work/checkout/.venv"
  PYTHON=$python "$work/checkout/install.sh"
  "$work/checkout/.venv/bin/python" -m pip install --quiet --no-deps dist/*.whl
  "$work/checkout/.venv/bin/python" -m pip check
  rm -rf "$work/empty"
  mkdir "$work/empty"
  ( # Nothing of the checkout is in reach there.
    cd "$work/empty"
    PATH=$work/checkout/.venv/bin:$PATH
    export HF_HUB_OFFLINE=1
    python -m extras.prepare.sample proteins.fasta --num_proteins 300
    esm2-download-data --source proteins.fasta --output_dir data
    esm2-tokenize-uniref-csv --input_dir data/csv --output_dir processed
    esm2-train-ddp --config_name facebook/esm2_t6_8M_UR50D --config_overrides num_hidden_layers=2 \
      --dataset_dir processed/arrow --output_dir out --max_steps 2 --tokens_per_pack 1024
    esm2-embed --model_name_or_path out --fasta proteins.fasta --output_dir embeddings
    esm2-train-ddp --config-name sanity --max_steps 1 --output_dir sanity
  )
  tried+=("$python")
done
[ "${#tried[@]}" -gt 0 ] || fail "neither python3.11 nor python3.12 is here"

say "$version builds, and works with ${tried[*]}"
echo "Before the tag: ./test.sh --slow; the tests of tests/gpu on a GPU; pip-audit --strict; ./build.sh --release (CONTRIBUTING.md)"
echo "Then: git tag --sign v$version -m v$version && git push origin v$version; twine upload dist/*.whl dist/*.tar.gz"
