#!/usr/bin/env bash
# Fine-tunes CodeLlama-7B on chess games on one Slurm node, without a network; submit it from the repository root:
#   python3 examples/chess/downloadmodel.py                  # on the login node, once
#   sbatch --account=ACCOUNT examples/chess/slurm_submit.sh --data_path lichess.pgn --batch_size_per_device 4
# MODEL is the directory (models/CodeLlama-7b-hf), PYTHON the interpreter; flags go to finetune.py.
#SBATCH --job-name=chess
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
set -euo pipefail

[[ -f examples/chess/finetune.py ]] || { echo "error: submit from the repository root" >&2 && exit 2; }
model=${MODEL:-models/CodeLlama-7b-hf}
[[ -f $model/config.json ]] || { echo "error: no model in $model; run examples/chess/downloadmodel.py where there is a network" >&2 && exit 2; }

export HF_HUB_OFFLINE=1
processes=${NPROC:-${SLURM_GPUS_ON_NODE:-1}}
threads=$(($(nproc) / processes))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
# On a signal the launcher forwards it and kills ranks after this time, which a step and its checkpoint need.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}"
exec "${PYTHON:-python3}" -m torch.distributed.run --standalone "--nproc_per_node=$processes" examples/chess/finetune.py \
    --model_name_or_path "$model" --output_dir "outputs/chess-${SLURM_JOB_ID:-local}" "$@"
