#!/usr/bin/env bash
# Runs a command on every GPU of this host, or in two CPU processes if it has none. The first word is a model family, which
# trains, or a command of lightseq:
#   launch/local.sh llama3 --model_name_or_path tiny-llama3 --random_init --data_path data/stdlib --output_dir outputs/tiny
#   launch/local.sh verify --model_name_or_path tiny-llama3
# NPROC=4 sets the number of processes, PYTHON=/path/to/python the interpreter (default: .venv's, else python3).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage="usage: [NPROC=N] [PYTHON=PATH] launch/local.sh llama2|llama3|train|verify|evaluate FLAG..."

refuse() {
    printf 'launch/local.sh: error: %s\n%s\n' "$1" "$usage" >&2
    exit 2
}

case "${1:-}" in
llama2 | llama3) program=("$root/$1/train.py") && shift ;;
train | verify | evaluate)
    program=(-m lightseq "$1") && shift
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    ;;
-h | --help) echo "$usage" && exit ;;
"") refuse "give a model family or a command first" ;;
plan | merge | generate) refuse "'$1' runs in one process: use lightseq $1" ;;
*) refuse "'$1' is neither a model family nor a command" ;;
esac

python=${PYTHON:-}
if [[ -z $python ]]; then
    python=python3
    [[ -x $root/.venv/bin/python ]] && python=$root/.venv/bin/python
fi

processes=${NPROC:-}
if [[ -z $processes ]]; then
    processes=$("$python" -c 'import torch; print(torch.cuda.device_count() or 2)' 2>&1) ||
        refuse "$python cannot import torch (${processes##*$'\n'}); run 'make train' once, which installs it, or set PYTHON"
    processes=${processes##*$'\n'} # without warnings
fi
[[ $processes =~ ^[1-9][0-9]*$ ]] || refuse "NPROC '$processes' is not a number of processes"

# Without it the launcher gives each process one thread, however many cores the host has, and warns.
threads=$(($(nproc) / processes))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"

# On a signal the launcher forwards it and kills ranks after this time, which a step and its checkpoint need.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}"

command=("$python" -m torch.distributed.run --standalone "--nproc_per_node=$processes" "${program[@]}" "$@")
printf 'launch:%s\n' "$(printf ' %q' "${command[@]}")" >&2
exec "${command[@]}"
