#!/usr/bin/env bash
# Shards as a Slurm array, a job each. The run directory lies on a file system that all nodes have.
#   sbatch --array=0-7 scripts/launch/slurm_array.sh --gin_file=gin_configs/runs/multi30k_table2.gin --run_dir=runs/table2
# Those that are missing, as --merge names them: SHARDS=8 sbatch --array=2,5 scripts/launch/slurm_array.sh …
#SBATCH --job-name=speccascade
#SBATCH --gres=gpu:1
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A-%a.log
set -euo pipefail
shards=${SHARDS:-${SLURM_ARRAY_TASK_COUNT:?submit it with sbatch --array=0-N}}
exec srun python -m speccascade.run "$@" --shard="$SLURM_ARRAY_TASK_ID/$shards"
