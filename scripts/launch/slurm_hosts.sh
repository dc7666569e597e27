#!/usr/bin/env bash
# Several hosts as one Slurm job, a process for each GPU, as JAX has it; the first writes. The same command goes on.
#   sbatch --nodes=4 scripts/launch/slurm_hosts.sh --gin_file=gin_configs/runs/multi30k_table2.gin --run_dir=runs/table2
#SBATCH --job-name=speccascade
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
exec srun --kill-on-bad-exit=1 python -m speccascade.run "$@" --distributed
