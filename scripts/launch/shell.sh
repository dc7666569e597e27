#!/usr/bin/env bash
# Shards on the GPUs of one machine, a process each; run the same command again to go on with those that were stopped.
#   SHARDS=4 scripts/launch/shell.sh --gin_file=gin_configs/runs/multi30k_table2.gin --run_dir=runs/table2
# Processes on one machine disturb each other's timings: measure quality here, with --gin.Experiment.latency_examples=0.
# On several machines that share the run directory, start one of these lines on each, with its own i.
set -uo pipefail
shards=${SHARDS:-4}
for ((i = 0; i < shards; i++)); do
  CUDA_VISIBLE_DEVICES=$i python -m speccascade.run "$@" --shard="$i/$shards" &
done
failed=0
for job in $(jobs -p); do
  wait "$job" || failed=1
done
exit "$failed"
