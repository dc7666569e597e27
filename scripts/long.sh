#!/usr/bin/env bash
# Run one of the shards into which the long tier is divided, of which each takes about as long: scripts/long.sh 3/8
# The tests of a shard are the same on every machine. More arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
shard=${1:?a shard, as 0/8}
shift
SPECCASCADE_SHARD=$shard exec python -m pytest -m long "$@"
