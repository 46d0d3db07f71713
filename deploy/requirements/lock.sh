#!/usr/bin/env bash
# Pins what the images install, by version and hash: `make requirements`. Needs uv (`pip install uv`).
set -euo pipefail
cd "$(dirname "$0")/../.."
UV=${UV:-uv}

lock() {
  local name=$1
  shift
  "$UV" pip compile pyproject.toml "$@" --constraint deploy/requirements/constraints.txt --universal \
    --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet -o "deploy/requirements/$name.txt"
}

lock relay
lock coordinator --extra coordinator
lock trainer --extra trainer
lock worker --extra worker
lock calibrate --extra worker --extra coordinator
