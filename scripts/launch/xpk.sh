#!/usr/bin/env bash
# Shards as workloads of xpk, a TPU slice each, which know nothing of each other.
#   CLUSTER=mine TPU=v5litepod-4 IMAGE=REGISTRY/speccascade SHARDS=8 scripts/launch/xpk.sh \
#     --gin_file=gin_configs/runs/multi30k_table2.gin --run_dir=gs://BUCKET/table2
# ONLY="2 5" starts those that are missing, as --merge names them.
set -euo pipefail
shards=${SHARDS:-4}
for i in ${ONLY:-$(seq 0 $((shards - 1)))}; do
  xpk workload create --cluster="$CLUSTER" --workload="${NAME:-speccascade}-$i" --tpu-type="$TPU" --num-slices=1 \
    --docker-image="$IMAGE" --command="$(printf '%q ' python -m speccascade.run "$@" --shard="$i/$shards")"
done
