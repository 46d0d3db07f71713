#!/usr/bin/env bash
# A relay as a systemd service, by one command from a checkout of this repository, as root:
#   ORIGIN=http://… TRAINER_KEY=ed25519:… COORDINATOR='https://…' bash deploy/relay/install.sh
# Environment: COORDINATOR (none), PEER (none), PORT (8601), MAX_MBIT (200), MAX_DISK_GIB (100), MONTHLY_GIB (1000); README.md says what they are.
# Running it again updates the program, and keeps the weights and every setting that isn't given anew (`PEER=` unsets one).
set -euo pipefail
cd "$(dirname "$0")/../.."
HOME_FOLDER=${HOME_FOLDER:-/opt/rollswarm}
SETTINGS=/etc/rollswarm/relay.env

# setting NAME DEFAULT: as the environment has it, else as an earlier installation, else the default.
setting() {
  [ -n "${!1+given}" ] || printf -v "$1" %s "$(sed -n "s/^$1=//p" "$SETTINGS" 2>/dev/null || true)"
  [ -n "${!1}" ] || printf -v "$1" %s "$2"
}
setting ORIGIN ""
setting TRAINER_KEY ""
setting COORDINATOR ""
setting PEER ""
setting PORT 8601
setting MAX_MBIT 200
setting MAX_DISK_GIB 100
setting MONTHLY_GIB 1000
: "${ORIGIN:?set ORIGIN to the URL of a relay of the run, or of its origin; the operator of the run tells it}"
: "${TRAINER_KEY:?set TRAINER_KEY to the key id of the trainer, ed25519:…; the operator of the run tells it}"

python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "a relay needs Python 3.11 or newer" >&2; exit 1; }
id rollswarm >/dev/null 2>&1 || useradd --system --home-dir /nonexistent --shell /usr/sbin/nologin rollswarm
[ -x "$HOME_FOLDER/bin/python" ] || python3 -m venv "$HOME_FOLDER"
"$HOME_FOLDER/bin/pip" install --quiet --disable-pip-version-check --require-hashes --no-deps -r deploy/requirements/relay.txt
"$HOME_FOLDER/bin/pip" install --quiet --disable-pip-version-check --no-deps --force-reinstall .
install -d -m 755 /etc/rollswarm
umask 077
cat >"$SETTINGS" <<END
ORIGIN=$ORIGIN
TRAINER_KEY=$TRAINER_KEY
COORDINATOR=$COORDINATOR
PEER=$PEER
PORT=$PORT
MAX_MBIT=$MAX_MBIT
MAX_DISK_GIB=$MAX_DISK_GIB
MONTHLY_GIB=$MONTHLY_GIB
END
install -m 644 deploy/relay/rollswarm-relay.service /etc/systemd/system/rollswarm-relay.service
systemctl daemon-reload
systemctl enable rollswarm-relay
systemctl restart rollswarm-relay
echo "running: at most $MAX_MBIT Mbit/s, $MAX_DISK_GIB GiB of disk, $MONTHLY_GIB GiB sent a month, then nothing until the next"
[ -n "$COORDINATOR$PEER" ] || echo "it knows no other relay: set COORDINATOR to the URL that workers join by, and run this again"
echo "from another machine try:  curl http://THIS-HOST:$PORT/healthz   then tell the run's operator the URL"
